"""Any likelihood: quadrature at points, and pseudo-observations that maximise the ELBO."""

import math

import numpy as np
import pytest
import torch
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from gpytorch.kernels import MultitaskKernel, RBFKernel
from gpytorch.likelihoods import (
    BernoulliLikelihood,
    BetaLikelihood,
    Likelihood,
    PoissonLikelihood,
    SoftmaxLikelihood,
    StudentTLikelihood,
)
from gpytorch.means import ZeroMean
from linear_operator.operators import BlockDiagLinearOperator, DiagLinearOperator

import gp_orff
from gp_orff.data.dataset import StatisticsOnly
from gp_orff.symbols.base import Identity
from tests.support.counts import bernoulli, counts, gaussian, rbf, signal, zero
from tests.support.fields import curl_free, directions, draw, swirl, unit_cube

GRID = gp_orff.Auto(exact_values=0, tolerance=1e-9)
RULES = {"exact": None, "grid": GRID}


class Speed(Likelihood):
    """A Gaussian observation of |f|."""

    def forward(self, f, *args, **kwargs):
        return torch.distributions.Normal(f.norm(dim=-1), 0.3)


def three_classes():
    kernel = MultitaskKernel(RBFKernel(), num_tasks=3, rank=3).double()
    kernel.data_covar_module.lengthscale = 0.4
    factor = torch.tensor([[1.5, 0, 0], [1.2, 0.7, 0], [-0.8, 0.3, 1.0]])
    kernel.task_covar_module.covar_factor.data.copy_(factor)
    kernel.task_covar_module.var = torch.full((3,), 0.1)
    return kernel


def softmax():
    return SoftmaxLikelihood(num_classes=3, mixing_weights=False)


def student_t():
    likelihood = StudentTLikelihood().double()
    likelihood.deg_free, likelihood.noise = 4.0, 0.05
    return likelihood.requires_grad_(False)


# quadrature


def covariances(n, p, seed=1):
    root = draw(n, p, p, seed=seed)
    return root @ root.mT / p + 0.1 * torch.eye(p)


def test_expectations_of_single_outputs_are_sums():
    """E log Φ(±f) under a normal distribution of f, on a fine grid; 32 nodes leave 1e-8."""
    mean, covariance = draw(6, 2), covariances(6, 2)
    y = bernoulli(draw(6, 2, seed=2))
    found = gp_orff.Pointwise(BernoulliLikelihood()).expected(y, mean, covariance)
    sd = covariance.diagonal(dim1=-1, dim2=-2).sqrt().unsqueeze(-1)
    z = torch.linspace(-9, 9, 4001, dtype=torch.float64)
    weight = torch.exp(-0.5 * z.square()) / math.sqrt(2 * math.pi) * (z[1] - z[0])
    f = mean.unsqueeze(-1) + sd * z
    logs = torch.special.log_ndtr((2 * y - 1).unsqueeze(-1) * f)
    torch.testing.assert_close(found, (logs * weight).sum(-1).sum(-1), rtol=0, atol=1e-7)


def test_expectations_of_all_outputs_are_those_of_their_covariance():
    """E log softmax over a million draws of the three outputs together: five standard errors."""
    mean, covariance = draw(2, 3), covariances(2, 3)
    y = torch.tensor([0.0, 2.0]).double()
    found = gp_orff.Pointwise(softmax()).expected(y, mean, covariance)
    root = torch.linalg.cholesky(covariance)
    f = mean + (root @ draw(200_000, 2, 3, 1, seed=3)).squeeze(-1)
    logs = torch.log_softmax(f, dim=-1)[:, [0, 1], [0, 2]]
    error = logs.std(0) / math.sqrt(len(logs))
    assert ((found - logs.mean(0)).abs() < 5 * error).all()


@pytest.mark.parametrize("p", [1, 2, 4])
def test_gaussian_noise_in_closed_form(p):
    """Quadrature, Sobol' points for four outputs too, is exact for squares."""
    likelihood = gaussian(p, 0.3)
    mean, covariance, y = draw(5, p), covariances(5, p), draw(5, p, seed=4)
    expected, slope, curvature = gp_orff.Pointwise(likelihood).derivatives(y, mean, covariance)
    squares = (y - mean).square() + covariance.diagonal(dim1=-1, dim2=-2)
    noise = likelihood.noise.item()  # 0.3 in single precision
    closed = -0.5 * (squares / noise + math.log(2 * math.pi * noise)).sum(-1)
    torch.testing.assert_close(expected, closed, rtol=1e-10, atol=0)
    torch.testing.assert_close(slope, (y - mean) / noise, rtol=1e-9, atol=1e-9)
    wanted = (torch.eye(p).double() / noise).expand(5, p, p)
    torch.testing.assert_close(curvature, wanted, rtol=1e-8, atol=1e-8)


def test_student_t_noise_of_vectors():
    """Against its expectation by a quadrature of one dimension; 16 nodes along each output leave a
    thousandth."""
    likelihood = gp_orff.MultitaskStudentTLikelihood(2).double()
    likelihood.noise = 0.5
    mean, covariance, y = draw(5, 2), 0.3 * covariances(5, 2), draw(5, 2, seed=4)
    joint = MultitaskMultivariateNormal(mean, BlockDiagLinearOperator(covariance))
    found = gp_orff.Pointwise(likelihood).expected(y, mean, covariance)
    torch.testing.assert_close(found, likelihood.expected_log_prob(y, joint), rtol=0, atol=1e-3)


def test_derivatives_are_those_of_the_expectation():
    """Differences of E in the mean, twice for the curvature: −E[∇² log p] = −∇²E."""
    likelihood = gp_orff.Pointwise(softmax(), nodes=24)
    mean, covariance, y = draw(3, 3), covariances(3, 3), torch.tensor([0.0, 1.0, 2.0]).double()
    _, slope, curvature = likelihood.derivatives(y, mean, covariance)
    step = 1e-4
    for i in range(3):
        shift = step * torch.eye(3).double()[i]
        ends = [likelihood.derivatives(y, mean + s * shift, covariance) for s in (-1, 1)]
        torch.testing.assert_close(
            slope[:, i], (ends[1][0] - ends[0][0]) / (2 * step), rtol=0, atol=1e-6
        )
        change = -(ends[1][1] - ends[0][1]) / (2 * step)
        torch.testing.assert_close(curvature[:, i], change, rtol=0, atol=1e-5)


def test_missing_values_add_nothing():
    y, mean, covariance = bernoulli(draw(4, 2)), draw(4, 2), covariances(4, 2)
    y[1, 0] = y[2] = math.nan
    likelihood = gp_orff.Pointwise(BernoulliLikelihood())
    found = likelihood.expected(y, mean, covariance)
    single = [
        likelihood.expected(y[:, j], mean[:, [j]], covariance[:, [j]][..., [j]]) for j in (0, 1)
    ]
    assert found[2] == 0
    assert found[1] == single[1][1]
    torch.testing.assert_close(found[[0, 3]], (single[0] + single[1])[[0, 3]])
    labels = torch.tensor([0.0, math.nan]).double()
    assert gp_orff.Pointwise(softmax()).expected(labels, draw(2, 3), covariances(2, 3))[1] == 0


def test_gpytorch_objectives_in_train_mode():
    """gpytorch draws the outputs of a point independently in train mode; these do not."""
    mean, covariance, y = draw(5, 3), covariances(5, 3), torch.tensor([0.0, 1, 2, 1, 0]).double()
    likelihood = gp_orff.Pointwise(softmax()).train()
    joint = MultitaskMultivariateNormal(mean, BlockDiagLinearOperator(covariance))
    expected = likelihood.expected(y, mean, covariance)
    torch.testing.assert_close(likelihood.expected_log_prob(y, joint), expected)
    by_output = covariance.new_zeros(15, 15)
    for n in range(5):
        rows = torch.arange(3) * 5 + n
        by_output[rows[:, None], rows] = covariance[n]
    other = MultitaskMultivariateNormal(mean, by_output, interleaved=False)
    torch.testing.assert_close(likelihood.expected_log_prob(y, other), expected)
    assert (likelihood.log_marginal(y, joint) > expected).all()  # Jensen
    scalar = MultivariateNormal(mean[:, 0], DiagLinearOperator(covariance[:, 0, 0]))
    probit = gp_orff.Pointwise(BernoulliLikelihood())
    closed = torch.special.ndtr(mean[:, 0] / (1 + covariance[:, 0, 0]).sqrt())
    torch.testing.assert_close(
        probit.log_marginal(torch.ones(5).double(), scalar).exp(), closed, rtol=1e-6, atol=0
    )
    torch.testing.assert_close(probit(scalar).probs, closed)
    assert likelihood(joint).probs.shape[-2:] == (5, 3)


# Gaussian noise: the posterior is Gaussian


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("p", [1, 2])
def test_gaussian_noise_gives_the_exact_posterior(rule, p):
    """A step of rate one gives it; what is left is rounding."""
    x = unit_cube(60)
    y = signal(x).unsqueeze(-1) if p == 1 else swirl(x)
    y, kernel = y + 0.2 * draw(60, p), (rbf if p == 1 else curl_free)
    exact, other = (
        gp_orff.VectorFieldGP(kernel(), likelihood=noise, frequencies=RULES[rule]).condition(x, y)
        for noise in (gaussian(p, 0.04), gp_orff.Pointwise(gaussian(p, 0.04)))
    )
    xs = unit_cube(20, seed=9)
    for name in ("mean", "pointwise_covariance"):
        wanted, found = (getattr(model.posterior(), name)(xs) for model in (exact, other))
        torch.testing.assert_close(found, wanted, rtol=1e-8, atol=1e-8)
    nats = [model.log_marginal_likelihood().item() for model in (exact, other)]
    assert nats[1] == pytest.approx(nats[0], abs=1e-6)


# any likelihood: the dense optimum


def rule(p, nodes):
    t, w = map(torch.from_numpy, np.polynomial.hermite_e.hermegauss(nodes))
    grid = torch.cartesian_prod(*[t] * p).reshape(-1, p)
    return grid, torch.cartesian_prod(*[w / w.sum()] * p).reshape(-1, p).prod(-1)


def dense_optimum(kernel, x, expected, p):
    """The largest ELBO over q(f) = N(m, LLᵀ) of all values at x, and mean and covariance of q, by
    L-BFGS over m and L; `expected` is Σ_n E log p(y_n | f), of means and blocks of q."""
    size = len(x) * p
    root = torch.linalg.cholesky(kernel(x).to_dense().detach() + 1e-9 * torch.eye(size))
    m = torch.zeros(size, dtype=torch.float64, requires_grad=True)  # whitened
    free = torch.eye(size, dtype=torch.float64).requires_grad_()
    limits = {"max_iter": 2000, "max_eval": 4000, "tolerance_grad": 1e-10}
    optimizer = torch.optim.LBFGS(
        [m, free], line_search_fn="strong_wolfe", tolerance_change=1e-14, **limits
    )

    def elbo():
        low = free.tril()
        factor = (root @ low).unflatten(0, (len(x), p))
        mean, blocks = (root @ m).unflatten(0, (len(x), p)), factor @ factor.mT
        divergence = 0.5 * (low.square().sum() + m.square().sum() - size)
        divergence = divergence - low.diagonal().abs().log().sum()
        return expected(mean, blocks) - divergence, mean, blocks

    def closure():
        optimizer.zero_grad()
        loss = -elbo()[0]
        loss.backward()
        return loss

    optimizer.step(closure)
    with torch.no_grad():
        value, mean, blocks = elbo()
    return value.item(), mean, blocks


def by_output(log_density, nodes=32):
    """Σ E log p(y | f) of every output by itself."""
    t, w = rule(1, nodes)

    def expected(mean, blocks):
        sd = blocks.diagonal(dim1=-1, dim2=-2).sqrt()
        return (w[:, None, None] * log_density(mean + sd * t[:, None])).sum()

    return expected


def together(log_density, p, nodes=10):
    """Σ E log p(y | f) of all outputs of a point together."""
    t, w = rule(p, nodes)

    def expected(mean, blocks):
        f = mean + (torch.linalg.cholesky(blocks) @ t.mT).permute(2, 0, 1)
        return (w.unsqueeze(-1) * log_density(f)).sum()

    return expected


def log_softplus_poisson(y):
    def log_density(f):
        rate = torch.nn.functional.softplus(f)
        return y * rate.log() - rate - torch.lgamma(y + 1)

    return log_density


def signs(x, y=None):
    y = bernoulli(signal(x)).unsqueeze(-1) if y is None else y
    return BernoulliLikelihood(), y, by_output(lambda f: torch.special.log_ndtr((2 * y - 1) * f))


def signs_of_vectors(x):
    return signs(x, bernoulli(2 * swirl(x)))


def counted(x):
    y = counts(signal(x)).unsqueeze(-1)
    return PoissonLikelihood(), y, by_output(log_softplus_poisson(y))


def classes(x):
    y = torch.arange(len(x)) % 3
    rows = torch.arange(len(x))
    of_softmax = together(lambda f: torch.log_softmax(f, -1)[:, rows, y], 3)
    return softmax(), y.double().unsqueeze(-1), of_softmax


CASES = {
    "signs": (rbf, 1, signs),
    "counts": (rbf, 1, counted),
    "signs of vectors": (curl_free, 2, signs_of_vectors),
    "classes": (three_classes, 3, classes),
}


@pytest.mark.parametrize("case", CASES)
def test_the_optimum_of_the_elbo(case):
    """Against L-BFGS over all means and covariances, which leaves 1e-6 of the ELBO."""
    kernel, p, values = CASES[case]
    x = unit_cube(9, seed=2)
    likelihood, y, expected = values(x)
    value, mean, blocks = dense_optimum(kernel(), x, expected, p)
    model = gp_orff.VectorFieldGP(kernel(), likelihood=likelihood, mean=zero(p))
    found = model.condition(x, y, merge=0).posterior()
    assert model.log_marginal_likelihood().item() == pytest.approx(value, abs=1e-6)
    torch.testing.assert_close(found.mean(x), mean, rtol=0, atol=1e-4)
    torch.testing.assert_close(found.pointwise_covariance(x), blocks, rtol=0, atol=1e-4)


def test_signs_of_a_large_amplitude():
    """Full steps go round the optimum; against L-BFGS, which leaves 1e-6."""
    kernel, x = rbf(outputscale=200.0), unit_cube(40, seed=2)
    likelihood, y, expected = signs(x)
    value, *_ = dense_optimum(kernel, x, expected, 1)
    model = gp_orff.VectorFieldGP(kernel, likelihood=likelihood, mean=zero(1))
    found = model.condition(x, y, merge=0).log_marginal_likelihood().item()
    assert found == pytest.approx(value, abs=1e-6)


def test_sites_of_noise_that_is_not_log_concave():
    """Student-t noise: the mean is where the gradient of the ELBO vanishes whatever the curvatures,
    and the ELBO is below its largest value, of curvatures that may be negative, by little."""
    x = unit_cube(12, seed=2)
    y = signal(x) + 0.2 * draw(12)
    y[3] += 3.0
    likelihood, prior = student_t(), rbf()
    scale, nu = likelihood.noise.sqrt(), likelihood.deg_free

    def log_density(f):
        return torch.distributions.StudentT(nu, f, scale).log_prob(y.unsqueeze(-1))

    value, _, _ = dense_optimum(prior, x, by_output(log_density), 1)
    model = gp_orff.VectorFieldGP(prior, likelihood=likelihood, mean=zero(1))
    field = model.condition(x, y, merge=0).posterior()
    elbo = model.log_marginal_likelihood().item()
    assert value - 0.1 < elbo < value + 1e-6
    mean, variance = field.mean(x), field.pointwise_covariance(x)
    _, slope, _ = model.likelihood.derivatives(y.unsqueeze(-1), mean, variance)
    covariance = prior(x).to_dense().detach()
    torch.testing.assert_close(covariance @ slope, mean, rtol=0, atol=1e-4)


# what is learned


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
def test_a_fit_ends_at_the_optimum_of_the_elbo(rule):
    """The ELBO of pseudo-observations that converge anew, as a parabola of the logarithm of each
    hyperparameter, has its top less than 0.02 nats higher: a search ends where it promises 0.01."""
    x, kernel = unit_cube(130, seed=4), rbf()
    y, options = bernoulli(2 * signal(x)), {"mean": ZeroMean(), "frequencies": RULES[rule]}
    model = gp_orff.VectorFieldGP(kernel, likelihood=BernoulliLikelihood(), **options)
    model.fit(x, y, progress=False)

    def elbo():
        return model.condition(x, y).log_marginal_likelihood().item()

    best = elbo()
    for part, name in ((kernel, "outputscale"), (kernel.base_kernel, "lengthscale")):
        value, ends = getattr(part, name).detach().clone(), []
        for factor in (0.9, 1 / 0.9):
            setattr(part, name, factor * value)
            ends.append(elbo())
        setattr(part, name, value)
        slope, curvature = 0.5 * (ends[1] - ends[0]), 2 * best - ends[0] - ends[1]
        assert curvature > 0.01
        assert slope**2 / (2 * curvature) < 0.02


@pytest.mark.slow
def test_parameters_of_a_likelihood_are_learned():
    """Student-t noise of gpytorch: a step in its scale or ν either way lowers the ELBO."""
    x = unit_cube(130, seed=4)
    tails = draw(130, seed=1) / draw(130, 3, seed=2).square().mean(-1).sqrt()
    y = signal(x) + 0.2 * tails  # ν = 3
    likelihood = StudentTLikelihood()
    model = gp_orff.VectorFieldGP(rbf(), likelihood=likelihood).fit(x, y, progress=False)
    best = model.log_marginal_likelihood().item()
    assert likelihood.noise.item() ** 0.5 == pytest.approx(0.2, rel=0.3)
    for raw in (likelihood.raw_noise, likelihood.raw_deg_free):
        value = raw.detach().clone()
        for step in (-0.2, 0.2):
            raw.data.copy_(value + step)
            assert model.condition(x, y).log_marginal_likelihood().item() < best + 1e-2
        raw.data.copy_(value)


# data in every form


def close(model, other, tolerance=1e-6):
    """Posteriors and ELBOs are equal, to what converged pseudo-observations leave."""
    xs = unit_cube(15, seed=8)
    one, two = model.posterior(), other.posterior()
    torch.testing.assert_close(one.mean(xs), two.mean(xs), rtol=0, atol=tolerance)
    torch.testing.assert_close(one.variance(xs), two.variance(xs), rtol=0, atol=tolerance)
    nats = [own.log_marginal_likelihood().item() for own in (model, other)]
    assert nats[0] == pytest.approx(nats[1], abs=1e-4)


def probit(rule="exact", kernel=None):
    kernel = curl_free() if kernel is None else kernel
    return gp_orff.VectorFieldGP(kernel, likelihood=BernoulliLikelihood(), frequencies=RULES[rule])


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
def test_chunks_updates_and_files(rule, tmp_path):
    x = unit_cube(40)
    y = bernoulli(2 * swirl(x))
    model = probit(rule).condition(x, y)
    close(model, probit(rule).condition([(x[:15], y[:15]), (x[15:], y[15:])]))
    close(model, probit(rule).condition(x[:25], y[:25]).update(x[25:], y[25:]))
    path = tmp_path / "model.pt"
    model.save(path)
    loaded = gp_orff.VectorFieldGP.load(path)
    close(model, loaded, 1e-10)
    if rule == "exact":
        close(model.fit(progress=False), loaded.fit(progress=False), 1e-8)


@pytest.mark.parametrize("rule", RULES)
def test_statistics_are_those_of_pseudo_observations(rule):
    x = unit_cube(80)
    y = bernoulli(2 * swirl(x))
    model = probit(rule).condition(x, y)
    statistics = model.statistics_of(x, y)
    other = probit(rule).condition(x, y).condition(statistics)
    assert isinstance(other.state.data, StatisticsOnly)
    xs = unit_cube(15, seed=8)
    means = [own.posterior().mean(xs) for own in (model, other)]
    torch.testing.assert_close(*means, rtol=0, atol=1e-3)
    nats = [each.log_marginal_likelihood().item() for each in (model, other)]
    assert nats[0] == pytest.approx(nats[1], abs=1e-2)
    with pytest.raises(NotImplementedError, match="no longer stored"):
        other.fit(progress=False)


def test_groups_have_likelihoods_of_their_own():
    """Gaussian observations and signs together: as two groups, or with the signs of another model
    as known noise."""
    x = unit_cube(80)
    f = swirl(x)
    y, name = f + 0.1 * draw(80, 2), ["a", "b"] * 40
    y[1::2] = bernoulli(2 * f[1::2])
    model = gp_orff.VectorFieldGP(curl_free(), mean=zero(2))
    model.likelihood.noise = 0.01
    model.likelihoods["b"] = BernoulliLikelihood()
    model.likelihoods["a"] = gaussian(2, 0.01)
    model.condition(x, y, group=name)
    again = gp_orff.VectorFieldGP(curl_free(), mean=zero(2))
    noise, values = torch.full((80, 2), 0.01).double(), y.clone()
    for part in model.state.data.visit():
        if part.key.label == "b":
            rows, column = torch.arange(1, 80, 2), part.key.pattern.columns[0]
            values[rows, column], noise[rows, column] = part.y[:, 0], 1 / part.weight
    again.condition(x, values, noise=noise)
    xs = unit_cube(15, seed=8)
    torch.testing.assert_close(model.posterior().mean(xs), again.posterior().mean(xs))
    model.likelihoods["a"] = gp_orff.MultitaskStudentTLikelihood(2)
    with pytest.raises(NotImplementedError, match="Gaussian noise in the other groups"):
        model.condition(x, y, group=name)


def test_missing_components_and_directions():
    """A component that is NaN, or the sign along an axis, is the sign of one component."""
    x, u = unit_cube(60), torch.zeros(60, 2).double()
    y = bernoulli(2 * swirl(x))
    column = torch.arange(60) % 2
    u[torch.arange(60), column] = 1.0
    single = y[torch.arange(60), column]
    masked = torch.full_like(y, math.nan)
    masked[torch.arange(60), column] = single
    close(
        probit().condition(x, masked, missing="mask"), probit().condition(x, single, directions=u)
    )


def test_equal_signs_at_one_place_are_several():
    """Equal numbers at one place are copies, which count once; signs are equal by chance."""
    x = unit_cube(30)
    y = bernoulli(2 * swirl(x))
    model = probit().condition(x.repeat(2, 1), y.repeat(2, 1))
    single = probit().condition(x, y)
    assert model.report.numbers == 2 * single.report.numbers == 120
    assert (model.posterior().variance(x) < single.posterior().variance(x)).all()
    y = signal(x) + draw(30)
    model = gp_orff.VectorFieldGP(rbf(), likelihood=student_t())
    with pytest.warns(gp_orff.DataWarning, match="copies"):
        model.condition(x.repeat(2, 1), y.repeat(2))
    assert model.report.numbers == 30


def test_symbols_beside_counts():
    x = unit_cube(60)
    y = bernoulli(2 * swirl(x))
    model = probit().condition(x, y)
    before = model.posterior().divergence(x[:5]).stddev
    model.observe(x, torch.zeros(60), gp_orff.Divergence(), noise=1e-3)
    assert (model.posterior().divergence(x[:5]).stddev < 0.5 * before).all()


def test_observing_a_symbol_is_observing_the_field():
    """Values of the field that contradict the signs move their pseudo-observations, as those of a
    Gaussian group of a model that is conditioned on all at once."""
    x = unit_cube(30)
    y, o = bernoulli(2 * swirl(x)), unit_cube(6, seed=4)
    model = probit().condition(x, y).observe(o, -3 * swirl(o), Identity(), noise=0.01)
    other = probit()
    other.likelihoods["known"] = gaussian(2, 0.01)
    close(model, other.condition([(x, y), {"x": o, "y": -3 * swirl(o), "group": "known"}]), 1e-5)


@pytest.mark.parametrize("how", ["load_state_dict", "assigned", "file"])
def test_other_hyperparameters(how, tmp_path):
    """Against L-BFGS over all means and covariances, under hyperparameters that changed after the
    model was conditioned."""
    x = unit_cube(7, seed=2)
    likelihood, y, expected = signs(x)
    value, mean, blocks = dense_optimum(rbf(0.3, 6.0), x, expected, 1)

    def made(kernel):
        return gp_orff.VectorFieldGP(kernel, likelihood=likelihood, mean=zero(1))

    model = made(rbf()).condition(x, y, merge=0)
    before = model.posterior()
    if how == "load_state_dict":
        model.load_state_dict(made(rbf(0.3, 6.0)).condition(x[:3], y[:3]).state_dict())
    elif how == "assigned":
        model.kernel = rbf(0.3, 6.0)
    else:
        model.kernel.base_kernel.lengthscale, model.kernel.outputscale = 0.3, 6.0
    if how == "file":
        model.save(tmp_path / "model.pt")
        loaded = gp_orff.VectorFieldGP.load(tmp_path / "model.pt")
        torch.testing.assert_close(loaded.posterior().mean(x), model.posterior().mean(x))
        model = loaded
    found = model.posterior()
    assert model.log_marginal_likelihood().item() == pytest.approx(value, abs=1e-6)
    torch.testing.assert_close(found.mean(x), mean, rtol=0, atol=1e-4)
    torch.testing.assert_close(found.pointwise_covariance(x), blocks, rtol=0, atol=1e-4)
    assert not torch.allclose(before.mean(x), mean, atol=0.1)


def test_other_likelihoods():
    """A model of counts whose likelihood is replaced has the pseudo-observations of the new one."""
    x = unit_cube(20)
    y = bernoulli(signal(x))
    model = gp_orff.VectorFieldGP(rbf(), likelihood=PoissonLikelihood()).condition(x, y)
    model.likelihood = gp_orff.Pointwise(BernoulliLikelihood())
    close(model, gp_orff.VectorFieldGP(rbf(), likelihood=BernoulliLikelihood()).condition(x, y))


def test_the_gradient_of_the_elbo():
    """In a hyperparameter that an optimiser of the user changes, against differences of models."""
    x = unit_cube(20)
    y = bernoulli(signal(x))
    model = gp_orff.VectorFieldGP(rbf(), likelihood=BernoulliLikelihood()).condition(x, y)
    raw = model.kernel.base_kernel.raw_lengthscale
    with torch.no_grad():
        raw += 0.3
    (slope,) = torch.autograd.grad(model.log_marginal_likelihood(), raw)
    nats = []
    for step in (1e-3, -1e-3):
        other = rbf()
        other.base_kernel.raw_lengthscale.data.copy_(raw + step)
        other = gp_orff.VectorFieldGP(other, likelihood=BernoulliLikelihood()).condition(x, y)
        nats.append(other.log_marginal_likelihood().item())
    assert slope.item() == pytest.approx((nats[0] - nats[1]) / 2e-3, abs=1e-4)


def test_predictions_of_left_out_signs():
    """The density of a sign is the closed form of the posterior given the other blocks under the
    same pseudo-observations; draws give the mean to five standard errors."""
    x = unit_cube(90)
    y = bernoulli(2 * swirl(x))
    model = probit().condition(x, y, merge=0)
    labels = torch.arange(90) % 3
    result = model.cross_validate(x, y, blocks=labels, merge=0)
    assert len(result.pit) == 180
    assert set(result.observed.tolist()) == {0.0, 1.0}
    rest = gp_orff.VectorFieldGP(curl_free())
    values, noise = torch.zeros_like(y), torch.zeros_like(y)
    for part in model.state.data.visit():
        column = part.key.pattern.columns[0]
        values[:, column], noise[:, column] = part.y[:, 0], 1 / part.weight
    kept = labels > 0
    rest.condition(x[kept], values[kept], noise=noise[kept], merge=0)
    field = rest.posterior()
    mean, variance = field.mean(x[~kept]), field.variance(x[~kept])
    probability = torch.special.ndtr(mean / (1 + variance).sqrt())
    density = torch.where(y[~kept] > 0, probability, 1 - probability).log()
    block = result.blocks[0]
    wanted = density[(block.index // 3), block.column]
    torch.testing.assert_close(block.log_density, wanted, rtol=0, atol=1e-3)
    error = 5 * (probability * (1 - probability) / 500).sqrt()
    assert (
        (block.mean - probability[block.index // 3, block.column]).abs()
        < error[block.index // 3, block.column]
    ).all()
    assert 0.5 < result.coverage <= 1


# messages


@pytest.mark.parametrize(
    ("likelihood", "wrong", "message"),
    [
        (BernoulliLikelihood(), -1.0, r"expects 0 or 1.*got -1\.0 and 1 other"),
        (PoissonLikelihood(), -1.0, r"expects counts 0, 1, 2.*got -1\.0"),
        (PoissonLikelihood(), 0.5, r"expects counts.*got 0\.5"),
        (BetaLikelihood(), 1.5, r"BetaLikelihood expects .*got 1\.5"),
        (softmax(), 3.0, r"SoftmaxLikelihood expects .*got 3\.0"),
    ],
)
def test_values_outside_of_the_support(likelihood, wrong, message):
    x, joint = unit_cube(10), isinstance(likelihood, SoftmaxLikelihood)
    model = gp_orff.VectorFieldGP(three_classes() if joint else rbf(), likelihood=likelihood)
    y = torch.full((10,), 0.5 if isinstance(likelihood, BetaLikelihood) else 1.0).double()
    model.condition(x, y)
    y[[3, 7]] = wrong
    with pytest.raises(ValueError, match=message):
        model.update(x, y)
    assert model.state.data.survey.num_values == 10 * (3 if joint else 1)
    if not joint:
        y[[3, 7]] = torch.nan  # the remedy
        model.update(x, y, missing="mask")


def test_what_is_out_of_reach():
    x = unit_cube(40)
    y = bernoulli(2 * swirl(x))
    with pytest.raises(ValueError, match="neither noise= nor variances="):
        probit().condition(x, y, noise=torch.ones(40))
    with pytest.raises(NotImplementedError, match="track="):
        probit().condition(x, y, track=["a", "b"] * 20)
    model = probit().condition(x, y)
    with pytest.raises(NotImplementedError, match="leave_one_out expects Gaussian"):
        model.leave_one_out(x, y)
    with pytest.raises(NotImplementedError, match="marginalize=True expects Gaussian"):
        model.posterior(marginalize=True)
    with pytest.raises(TypeError, match="expects a gpytorch likelihood"):
        gp_orff.VectorFieldGP(curl_free(), likelihood="poisson")
    speed = gp_orff.VectorFieldGP(curl_free(), likelihood=Speed())
    with pytest.raises(ValueError, match="all outputs of a point"):
        speed.condition(x, y[:, 0], directions=directions(40))
    speed.condition(x, swirl(x).norm(dim=-1))
    with pytest.raises(NotImplementedError, match="single outputs"):
        speed.cross_validate(x, swirl(x).norm(dim=-1))
    classes = gp_orff.VectorFieldGP(three_classes(), likelihood=softmax())
    classes.condition(x, torch.arange(40) % 3)
    assert isinstance(classes.likelihood(classes.posterior()(x)), torch.distributions.Categorical)
