"""Typical uses of an ExactGP of gpytorch: fantasies, batches, products, learned features."""

import gpytorch
import pytest
import torch
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from gpytorch.kernels import IndexKernel, MaternKernel, RBFKernel, RFFKernel, ScaleKernel
from linear_operator.operators import ZeroLinearOperator
from linear_operator.utils.warnings import PerformanceWarning

import gp_orff
from tests.support import oracles
from tests.support.fields import draw
from tests.support.models import (
    POINTS,
    dense_noise,
    evidence,
    model_for,
    orff_of,
    scalar_gp,
    vector_gp,
)
from tests.support.registry import CASES

pytestmark = pytest.mark.filterwarnings("ignore::gp_orff.FeatureWarning")

EXACT = {
    "curl_free": lambda: gp_orff.CurlFreeKernel(RBFKernel(), num_dims=2),
    "scaled": lambda: ScaleKernel(gp_orff.DivergenceFreeKernel(RBFKernel(), num_dims=2)),
    "helmholtz": lambda: gp_orff.HelmholtzKernel(num_dims=2),
    "product": lambda: (
        gp_orff.CurlFreeKernel(RBFKernel(), num_dims=2) * RBFKernel(active_dims=(0,))
    ),
}
ORFF = {
    f"orff_{name}": (lambda name=name: orff_of(CASES[name]()))
    for name in ("helmholtz", "separable")
}


def fantasy_models(kernel, points, fantasies, num_outputs):
    x, y = draw(points, 2), draw(points, num_outputs, seed=1)
    more_x, more_y = draw(*fantasies, 2, seed=2), draw(*fantasies, num_outputs, seed=3)
    model = vector_gp(x, y, kernel, noise=0.1).eval()
    with torch.no_grad():
        model(draw(2, 2, seed=4))
        return model, model.get_fantasy_model(more_x, more_y), (x, y, more_x, more_y)


@pytest.mark.parametrize("kernel", [*EXACT, *ORFF])
@pytest.mark.parametrize("regime", POINTS)
def test_fantasies_equal_a_refit(kernel, regime):
    """Several points at once, and again on top of them."""
    build = {**EXACT, **ORFF}[kernel]
    num_outputs = 3 if kernel == "orff_separable" else 2
    _, fantasy, (x, y, more_x, more_y) = fantasy_models(
        build().double(), POINTS[regime], (3,), num_outputs
    )
    refit = vector_gp(
        torch.cat([x, more_x]), torch.cat([y, more_y]), fantasy.covar_module, noise=0.1
    ).eval()
    xs = draw(5, 2, seed=5)
    with torch.no_grad():
        for _ in range(2):
            found, expected = fantasy(xs), refit(xs)
            scale = expected.covariance_matrix.abs().max()
            assert (found.mean - expected.mean).abs().max() <= 1e-8
            difference = found.covariance_matrix - expected.covariance_matrix
            assert difference.abs().max() <= 1e-8 * scale
            again_x, again_y = draw(2, 2, seed=6), draw(2, num_outputs, seed=7)
            fantasy = fantasy.get_fantasy_model(again_x, again_y)
            refit = vector_gp(
                torch.cat([x, more_x, again_x]),
                torch.cat([y, more_y, again_y]),
                fantasy.covar_module,
                noise=0.1,
            ).eval()


@pytest.mark.slow
@pytest.mark.parametrize("kernel", [*EXACT, *ORFF])
@pytest.mark.parametrize("regime", POINTS)
def test_batches_of_fantasies_equal_a_loop(kernel, regime):
    build = {**EXACT, **ORFF}[kernel]
    num_outputs = 3 if kernel == "orff_separable" else 2
    model, fantasy, (_, _, more_x, more_y) = fantasy_models(
        build().double(), POINTS[regime], (4, 3), num_outputs
    )
    xs = draw(5, 2, seed=5)
    with torch.no_grad():
        found = fantasy(xs)
        assert found.mean.shape == (4, 5, num_outputs)
        for i in range(4):
            expected = model.get_fantasy_model(more_x[i], more_y[i])(xs)
            torch.testing.assert_close(found.mean[i], expected.mean, rtol=1e-8, atol=1e-8)
            torch.testing.assert_close(
                found.covariance_matrix[i], expected.covariance_matrix, rtol=1e-8, atol=1e-8
            )


@pytest.mark.parametrize("kernel", ["helmholtz", "orff_helmholtz"])
@pytest.mark.parametrize("regime", POINTS)
def test_fantasies_subtract_the_mean(kernel, regime):
    """A constant that is not zero, against dense algebra on all points."""
    points = POINTS[regime]
    model = vector_gp(
        draw(points, 2), draw(points, 2, seed=1), {**EXACT, **ORFF}[kernel]().double(), noise=0.1
    )
    constants = torch.tensor([2.0, -1.0]).double()
    for own, constant in zip(model.mean_module.base_means, constants, strict=True):
        own.constant.data.fill_(constant)
    model.eval()
    more_x, more_y, xs = draw(3, 2, seed=2), draw(3, 2, seed=3), draw(5, 2, seed=5)
    x = torch.cat([model.train_inputs[0], more_x])
    residuals = torch.cat([model.train_targets, more_y]) - constants
    with torch.no_grad():
        model(xs)
        found = model.get_fantasy_model(more_x, more_y)(xs)
        between = model.covar_module
        prior, cross = between(xs, xs.clone()).to_dense(), between(xs, x).to_dense()
        noisy = between(x, x.clone()).to_dense() + 0.2 * torch.eye(2 * len(x)).double()
        mean, covariance = oracles.condition(prior, cross, noisy, residuals)
    torch.testing.assert_close(found.mean, mean.reshape(5, 2) + constants, rtol=0, atol=1e-7)
    torch.testing.assert_close(found.covariance_matrix, covariance, rtol=0, atol=1e-7)


def test_fantasies_visit_only_the_new_points(monkeypatch):
    """The statistics of the old data are not computed again."""
    from gp_orff.features import chunked

    seen = []
    original = chunked.moments
    model, fantasy, _ = fantasy_models(ORFF["orff_helmholtz"](), 150, (3,), 2)
    monkeypatch.setattr(
        chunked, "moments", lambda x, *rest: seen.append(len(x)) or original(x, *rest)
    )
    with torch.no_grad():
        fantasy = model.get_fantasy_model(draw(3, 2, seed=2), draw(3, 2, seed=3))
        fantasy(draw(2, 2, seed=5))
    assert seen == [3]


def test_batches_of_models_equal_a_loop():
    """Batches of data and hyperparameters, trained and predicting at once."""
    shape = torch.Size([3])
    x, y = draw(3, 40, 2), draw(3, 40, 2, seed=1)
    scales = torch.tensor([0.6, 1.0, 1.5], dtype=torch.float64)

    def build(batch_shape, lengthscale):
        potential = RBFKernel(batch_shape=batch_shape).double()
        potential.lengthscale = lengthscale
        field = gp_orff.CurlFreeKernel(potential, num_dims=2)
        return gp_orff.ORFFKernel(
            ScaleKernel(field, batch_shape=batch_shape), gp_orff.MonteCarlo(9)
        )

    class BatchGP(gpytorch.models.ExactGP):
        def __init__(self, x, y, kernel, batch_shape):
            likelihood = gpytorch.likelihoods.MultitaskGaussianLikelihood(
                2, batch_shape=batch_shape
            )
            super().__init__(x, y, likelihood)
            self.covar_module = kernel
            self.double()

        def forward(self, x):
            mean = torch.zeros(*x.shape[:-1], 2, dtype=x.dtype)
            return gpytorch.distributions.MultitaskMultivariateNormal(mean, self.covar_module(x))

    batch = BatchGP(x, y, build(shape, scales.view(3, 1, 1)), shape)
    mll = gpytorch.mlls.ExactMarginalLogLikelihood(batch.likelihood, batch)
    values = mll(batch(x), y)
    assert values.shape == (3,)
    (gradient,) = torch.autograd.grad(
        values.sum(), batch.covar_module.base_kernel.base_kernel.base_kernel.raw_lengthscale
    )
    batch.eval()
    xs = draw(3, 5, 2, seed=2)
    posterior = batch(xs)
    for i in range(3):
        single = BatchGP(x[i], y[i], build(torch.Size(), scales[i]), torch.Size())
        value = gpytorch.mlls.ExactMarginalLogLikelihood(single.likelihood, single)(
            single(x[i]), y[i]
        )
        torch.testing.assert_close(values[i], value, rtol=1e-12, atol=1e-12)
        raw = single.covar_module.base_kernel.base_kernel.base_kernel.raw_lengthscale
        torch.testing.assert_close(
            gradient[i], torch.autograd.grad(value, raw)[0], rtol=1e-10, atol=1e-12
        )
        single.eval()
        expected = single(xs[i])
        torch.testing.assert_close(posterior.mean[i], expected.mean, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(
            posterior.covariance_matrix[i], expected.covariance_matrix, rtol=1e-10, atol=1e-12
        )
        torch.testing.assert_close(posterior.variance[i], expected.variance, rtol=1e-10, atol=1e-12)
        assert torch.equal(posterior[i].mean, posterior.mean[i])


def test_indexing_and_expanding_kernels():
    potential = RBFKernel(batch_shape=torch.Size([2])).double()
    potential.lengthscale = torch.tensor([0.5, 1.5], dtype=torch.float64).view(2, 1, 1)
    field = gp_orff.CurlFreeKernel(potential, num_dims=2, active_dims=(2, 0))
    time = MaternKernel(active_dims=(1,)).double()
    x = draw(4, 3)
    for kernel in (field, field * time, gp_orff.ORFFKernel(field, gp_orff.MonteCarlo(5))):
        full = kernel(x).to_dense()
        assert kernel.batch_shape == full.shape[:1] == (2,)
        for i in range(2):
            assert kernel[i].batch_shape == ()
            torch.testing.assert_close(kernel[i](x).to_dense(), full[i])
        assert kernel.batch_shape == (2,)  # indexing leaves the kernel as it was
    single = gp_orff.ORFFKernel(field[0], gp_orff.MonteCarlo(5))
    expanded = single.expand_batch(torch.Size([3]))
    assert expanded.batch_shape == (3,)
    torch.testing.assert_close(expanded(x).to_dense()[1], single(x).to_dense())


@pytest.mark.parametrize("order", ["field_first", "scalar_first"])
def test_products_of_field_and_time(order):
    """Exact: the Hadamard product with the scalar kernel repeated over outputs."""
    field = ScaleKernel(gp_orff.HelmholtzKernel(num_dims=2, active_dims=(0, 1)))
    time = RBFKernel(active_dims=(2,))
    kernel = (field * time if order == "field_first" else time * field).double()
    assert isinstance(kernel, gp_orff.FieldProductKernel)
    x, z = draw(4, 3), draw(5, 3, seed=1)
    expected = torch.kron(time(x, z).to_dense(), torch.ones(2, 2).double()) * field(x, z).to_dense()
    torch.testing.assert_close(kernel(x, z).to_dense(), expected)
    torch.testing.assert_close(kernel(x[:4], z[:4], diag=True), expected[:, :8].diagonal())
    with pytest.raises(ValueError, match=r"several outputs and one.*with 2 and.*with 2"):
        field * field
    assert type(time * RBFKernel()) is gpytorch.kernels.ProductKernel


def test_products_of_gpytorch_with_several_outputs_are_refused():
    """gpytorch's own kernels do not know of fields: `*` multiplies matrices of different sizes."""
    field = gpytorch.kernels.MultitaskKernel(RBFKernel(active_dims=(0,)), 2, rank=1)
    time = RBFKernel(active_dims=(1,))
    with pytest.raises(
        ValueError, match=r"FieldProductKernel.* got .*MultitaskKernel \* RBFKernel"
    ):
        gp_orff.VectorFieldGP(ScaleKernel(field * time))
    model = gp_orff.VectorFieldGP(gp_orff.FieldProductKernel(field, time))
    x = draw(4, 2).double()
    between = torch.kron(time(x).to_dense(), torch.ones(2, 2)) * field(x).to_dense()
    torch.testing.assert_close(model.kernel(x).to_dense(), between.double())


def test_products_outside_the_features_are_correct_and_say_so():
    case = CASES["scalar"]()
    orff, other = orff_of(case), RBFKernel().double()
    x, y = draw(30, 2), draw(30, seed=1)
    model = scalar_gp(x, y, orff * other, noise=0.1)
    with pytest.warns(
        PerformanceWarning, match=r"elementwise is not a covariance of features plus noise"
    ):
        value = evidence(model)
    dense = case.covariance(orff.frequencies, x, x) * other(x).to_dense()
    noisy = dense + dense_noise(model, 30)
    torch.testing.assert_close(value, oracles.log_density(noisy, y - model.mean_module(x)))


class HadamardGP(gpytorch.models.ExactGP):
    """The model of gpytorch's tutorial on tasks that are observed at different points."""

    def __init__(self, x, task, y, kernel):
        super().__init__((x, task), y, gpytorch.likelihoods.GaussianLikelihood())
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module, self.tasks = kernel, IndexKernel(num_tasks=2, rank=1)
        self.double()
        self.tasks.initialize(covar_factor=draw(2, 1, seed=2), raw_var=draw(2, seed=3))

    def forward(self, x, task):
        covariance = self.covar_module(x).mul(self.tasks(task))
        return MultivariateNormal(self.mean_module(x), covariance)


@pytest.mark.parametrize("correction", [True, False])
@pytest.mark.filterwarnings("ignore::linear_operator.utils.warnings.PerformanceWarning")
@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")  # of an IndexKernel
def test_tasks_at_different_points(correction):
    """On a grid of tolerance 1e-8 the evidence and the posterior are those of the exact kernel."""
    x, task, y = draw(30, 1), (torch.arange(30) % 2).unsqueeze(-1), draw(30, seed=1)
    rule = gp_orff.Grid(((-5.0, 5.0),), tolerance=1e-8, diagonal_correction=correction)
    grid = ScaleKernel(gp_orff.ORFFKernel(RBFKernel(), rule, num_dims=1))
    results = []
    for kernel in (ScaleKernel(RBFKernel()), grid):
        model = HadamardGP(x, task, y, kernel)
        value = evidence(model)
        results.append((value, model.eval()(x[:9] + 0.1, 1 - task[:9])))
    (exact, wanted), (value, posterior) = results
    torch.testing.assert_close(value, exact, rtol=0, atol=1e-5)
    torch.testing.assert_close(posterior.mean, wanted.mean, rtol=0, atol=1e-5)
    for part in ("covariance_matrix", "variance"):
        torch.testing.assert_close(
            getattr(posterior, part), getattr(wanted, part), rtol=0, atol=1e-5
        )


@pytest.mark.parametrize("rows", [30, 300])
@pytest.mark.parametrize("inside", [(), (2,)])
@pytest.mark.parametrize("correction", [True, False])
def test_a_batch_of_scales_over_features(inside, correction, rows):
    """Each is the scaled kernel, with the structure of features, so that no warning is given."""
    rule = gp_orff.Grid(((-5.0, 5.0),), lengthscale_range=(0.5, 2), diagonal_correction=correction)
    base = RBFKernel(batch_shape=torch.Size(inside))
    orff = gp_orff.ORFFKernel(base, rule, num_dims=1)
    kernel = ScaleKernel(orff, batch_shape=torch.Size([2])).double()
    base.lengthscale = torch.tensor([0.8, 1.5]).reshape(2, 1, 1) if inside else 1.2
    kernel.outputscale = torch.tensor([1.0, 3.0])
    x, y = draw(rows, 1).clamp(-4, 4), draw(rows, seed=1)
    noisy = kernel(x).add_jitter(0.3)
    quad, logdet = noisy.inv_quad_logdet(y.expand(2, rows).unsqueeze(-1), logdet=True)
    for i, scale in enumerate(kernel.outputscale):
        dense = (base[i] if inside else base)(x).to_dense() * scale
        torch.testing.assert_close(kernel(x).to_dense()[i], dense, rtol=0, atol=1e-4)
        dense = kernel(x).to_dense()[i] + 0.3 * torch.eye(rows)
        torch.testing.assert_close(logdet[i], torch.logdet(dense))
        torch.testing.assert_close(quad[i], y @ torch.linalg.solve(dense, y))


@pytest.mark.parametrize("order", ["field_first", "scalar_first"])
def test_products_of_field_features_are_correct_and_say_so(order):
    orff, time = orff_of(CASES["curl_free"]()), RBFKernel(active_dims=(0,)).double()
    scaled = ScaleKernel(orff).double()
    with pytest.warns(PerformanceWarning, match=r"use ORFFKernel\(field \* scalar"):
        kernel = scaled * time if order == "field_first" else time * scaled
    x = draw(4, 2)
    expected = torch.kron(time(x).to_dense(), torch.ones(2, 2).double()) * scaled(x).to_dense()
    torch.testing.assert_close(kernel(x).to_dense(), expected)


def test_learned_features_are_trained_through_the_inputs():
    """Deep kernels: the inputs of the kernel are a network's outputs."""

    class Deep(gpytorch.models.ExactGP):
        def __init__(self, x, y):
            super().__init__(x, y, gpytorch.likelihoods.GaussianLikelihood())
            self.net = torch.nn.Linear(3, 2)
            self.covar_module = orff_of(CASES["scalar"]())
            self.double()

        def forward(self, x):
            features = torch.tanh(self.net(x))
            mean = torch.zeros(len(x), dtype=x.dtype)
            return gpytorch.distributions.MultivariateNormal(mean, self.covar_module(features))

    torch.manual_seed(0)
    x, y = draw(150, 3), draw(150, seed=1)
    model = Deep(x, y)
    found = torch.autograd.grad(evidence(model), list(model.net.parameters()))
    features = torch.tanh(model.net(x))
    dense = CASES["scalar"]().covariance(model.covar_module.frequencies, features, features)
    noise = model.likelihood.noise * torch.eye(150, dtype=torch.float64)
    expected = torch.autograd.grad(
        oracles.log_density(dense + noise, y), list(model.net.parameters())
    )
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
    model.eval()
    xs = draw(4, 3, seed=2)
    torch.testing.assert_close(model(xs).mean.shape, torch.Size([4]))


def test_a_drop_in_for_gpytorchs_random_features():
    """Sums keep the structure and a state_dict loads into a fresh kernel, where RFFKernel fails."""
    x, y = draw(200, 2), draw(200, seed=1)

    def build(seed):
        parts = [
            ScaleKernel(gp_orff.ORFFKernel(k, gp_orff.MonteCarlo(20, seed=seed), num_dims=2))
            for k in (RBFKernel(), MaternKernel(nu=1.5))
        ]
        return scalar_gp(x, y, parts[0] + parts[1], noise=0.1)

    model, fresh = build(0), build(1)
    fresh.load_state_dict(model.state_dict())
    model.eval(), fresh.eval()
    xs = draw(5, 2, seed=2)
    assert torch.equal(model(xs).mean, fresh(xs).mean)
    assert type(model.prediction_strategy).__name__ == "ORFFPredictionStrategy"
    reference = RFFKernel(num_samples=20).double()
    reference(x).to_dense()
    with pytest.raises(RuntimeError, match="Unexpected key"):
        RFFKernel(num_samples=20).double().load_state_dict(reference.state_dict())


@pytest.mark.parametrize("num_tasks", [1, 3])
@pytest.mark.parametrize("task_noise", [False, True])
def test_a_likelihood_for_another_number_of_outputs_is_refused(num_tasks, task_noise):
    likelihood = gpytorch.likelihoods.MultitaskGaussianLikelihood(
        num_tasks, has_task_noise=task_noise
    ).double()
    model = model_for(CASES["helmholtz"](), 150, {})
    model.likelihood = likelihood
    with pytest.raises(ValueError, match=r"likelihood for the 2 outputs.*num_tasks=2"):
        evidence(model)
    covariance = model.covar_module(*model.train_inputs).evaluate_kernel()
    zeros = torch.zeros(150, num_tasks).double()
    nothing = MultitaskMultivariateNormal(zeros, ZeroLinearOperator(*2 * (zeros.numel(),)))
    noise = likelihood(nothing).lazy_covariance_matrix
    with pytest.raises(ValueError, match=r"of 2 outputs of the kernel.*pass num_tasks=2"):
        covariance + noise


@pytest.mark.parametrize("regime", POINTS)
def test_predictive_distributions_are_scaled_expanded_and_indexed(regime):
    model = model_for(CASES["helmholtz"](), POINTS[regime], {}).eval()
    with torch.no_grad():
        for distribution in (
            model(draw(6, 2, seed=2)),
            model.likelihood(model(draw(6, 2, seed=2))),
        ):
            dense = distribution.covariance_matrix
            torch.testing.assert_close((distribution * 2.0).covariance_matrix, 4 * dense)
            expanded = distribution.expand(torch.Size([3]))
            torch.testing.assert_close(expanded.covariance_matrix, dense.expand(3, 12, 12))
            few = distribution[:2, :].covariance_matrix
            torch.testing.assert_close(few, dense[:4, :4])
            first = distribution[:, 0].covariance_matrix
            torch.testing.assert_close(first, dense[::2, ::2])


def test_a_batch_of_likelihoods_over_one_kernel():
    x, y = draw(60, 2), draw(2, 60, 2, seed=1)
    likelihood = gpytorch.likelihoods.MultitaskGaussianLikelihood(2, batch_shape=torch.Size([2]))
    likelihood.double().noise = torch.tensor([[0.1], [0.4]])
    orff = orff_of(CASES["curl_free"]())
    prior = gpytorch.distributions.MultitaskMultivariateNormal(torch.zeros_like(y), orff(x))
    values = likelihood(prior).log_prob(y)
    for i in range(2):
        sd2 = (likelihood.noise[i] + likelihood.task_noises[i]).detach()
        noisy = orff(x).to_dense() + torch.diag(sd2.repeat(60))
        torch.testing.assert_close(values[i], oracles.log_density(noisy, y[i]))
