"""Models with structured frequencies equal models with the same explicit frequencies."""

import copy
import pickle
import warnings
from itertools import pairwise

import numpy as np
import pytest
import torch
from gpytorch.kernels import (
    ConstantKernel,
    LCMKernel,
    MaternKernel,
    MultitaskKernel,
    RBFKernel,
    RQKernel,
    ScaleKernel,
)
from gpytorch.means import ZeroMean

import gp_orff
from gp_orff.features.assemble import draw, expand
from gp_orff.regression import ORFFRidge
from tests.support import fields, oracles
from tests.support.models import evidence, gradient, scalar_gp, vector_gp
from tests.support.registry import STRUCTURED_RULES, randomise_tasks
from tests.support.structured_oracle import WrittenOut

INPUTS = 3  # d′ = 4
ROOT = torch.tensor([[0.7, 0.3], [-1.2, 0.5]], dtype=torch.float64)


def rbf():
    kernel = RBFKernel(ard_num_dims=INPUTS).double()
    kernel.lengthscale = torch.tensor([0.7, 1.0, 1.3])
    return kernel


def rational_quadratic():
    kernel = RQKernel(ard_num_dims=INPUTS).double()
    kernel.alpha, kernel.lengthscale = 0.6, 0.8
    return kernel


def multitask(data):
    return randomise_tasks(MultitaskKernel(data, num_tasks=2).double())


def coregionalised():
    kernel = LCMKernel([rbf(), rational_quadratic()], num_tasks=2).double()
    for seed, part in enumerate(kernel.covar_module_list):
        randomise_tasks(part, seed)
    return kernel


def product():
    first = RBFKernel(ard_num_dims=2, active_dims=(2, 0)).double()
    return first * MaternKernel(nu=1.5, active_dims=(1, 0)).double()


KERNELS = {
    "scalar": rational_quadratic,
    "scalar_sum": lambda: rbf() + ConstantKernel().double(),
    "multitask": lambda: multitask(rbf()),
    "sum": lambda: multitask(rbf() + ScaleKernel(MaternKernel(2.5)).double() + ConstantKernel()),
    "product": lambda: multitask(product()),
    "separable": lambda: gp_orff.SeparableKernel(rational_quadratic(), torch.nn.Parameter(ROOT)),
    "two_separable": lambda: multitask(rbf()) + gp_orff.SeparableKernel(rbf(), ROOT[:, :1]),
    "lcm": coregionalised,
}


def orff_of(name, rule):
    return gp_orff.ORFFKernel(KERNELS[name](), rule, num_dims=INPUTS).double()


def gp(kernel, points):
    x = fields.draw(points, INPUTS)
    y = torch.stack([x.sum(-1).sin(), x[:, 0].cos()], dim=-1) + 0.1 * fields.draw(points, 2)
    if kernel.num_outputs == 1:
        return scalar_gp(x, y[:, 0], kernel, noise=0.05)
    return vector_gp(x, y, kernel, noise=0.05)


each_rule = pytest.mark.parametrize("rule", STRUCTURED_RULES.values(), ids=STRUCTURED_RULES)


@pytest.mark.slow
@each_rule
@pytest.mark.parametrize("points", [5, 60])  # numbers against 20 features of a term or more
@pytest.mark.parametrize("name", KERNELS)
def test_a_training_step(name, points, rule):
    """Evidence, gradient, and the predictions at new points."""
    found = []
    for own in (rule(10, seed=2), WrittenOut(rule(10, seed=2))):
        model = gp(orff_of(name, own), points)
        value = evidence(model)
        slope = gradient(value, model)
        model.eval()
        with gp_orff.settings.check_features(False):  # of so few features
            at = model.likelihood(model(fields.draw(4, INPUTS, seed=5)))
        found.append((value, slope, at.mean, at.variance))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)
    assert found[0][1].abs().max() > 1e-3


@each_rule
def test_gradients_by_the_inputs(rule):
    x = fields.draw(6, INPUTS)
    found = []
    for own in (rule(10), WrittenOut(rule(10))):
        at = x.clone().requires_grad_()
        k = orff_of("lcm", own)(at, fields.draw(4, INPUTS, seed=1)).to_dense()
        found.append(torch.autograd.grad(k.square().sum(), at)[0])
    torch.testing.assert_close(*found, rtol=1e-10, atol=1e-10)


@each_rule
def test_single_precision(rule):
    """Inputs and results are float32, computations float64."""
    double, single = (gp(orff_of("multitask", rule(10)), 40) for _ in range(2))
    single = single.float()
    single.set_train_data(
        single.train_inputs[0].float(), single.train_targets.float(), strict=False
    )
    values = [evidence(own) for own in (double, single)]
    assert values[1].dtype == torch.float32
    assert values[1].item() == pytest.approx(values[0].item(), rel=1e-4)
    values[1].backward()
    slopes = single.covar_module.base_kernel.data_covar_module.raw_lengthscale.grad
    expected = torch.autograd.grad(
        values[0], double.covar_module.base_kernel.data_covar_module.raw_lengthscale
    )[0]
    torch.testing.assert_close(slopes.double(), expected, rtol=1e-3, atol=1e-3)
    x = fields.draw(3, INPUTS)
    phases = single.covar_module.phases(x.float())
    assert phases.dtype == torch.float32
    assert (phases - double.covar_module.phases(x)).abs().max() < 1e-4


@each_rule
def test_batches_of_kernels_and_of_points(rule):
    scales = torch.tensor([0.6, 1.9]).double()
    kernel = RBFKernel(batch_shape=torch.Size([2])).double()
    kernel.lengthscale = scales.reshape(2, 1, 1)
    orff = gp_orff.ORFFKernel(kernel, rule(10), num_dims=INPUTS)
    one = RBFKernel().double()
    x, z = fields.draw(2, 5, INPUTS), fields.draw(2, 4, INPUTS, seed=1)
    for i, scale in enumerate(scales):
        one.lengthscale = scale
        each = gp_orff.ORFFKernel(one, rule(10), num_dims=INPUTS)
        assert (orff(x, z).to_dense()[i] - each(x[i], z[i]).to_dense()).abs().max() <= 1e-12
        assert (orff.phases(x)[i] - each.phases(x[i])).abs().max() <= 1e-12
        assert (orff.features(x)[i] - each.features(x[i])).abs().max() <= 1e-12
    assert orff(x, z).to_dense().shape == (2, 5, 4)


@each_rule
@pytest.mark.parametrize("name", ["product", "lcm"])
def test_copies(name, rule, tmp_path):
    kernel, x = orff_of(name, rule(10, seed=3)), fields.draw(4, INPUTS)
    expected = kernel(x).to_dense()
    fresh = orff_of(name, rule(10, seed=4))
    assert (fresh(x).to_dense() - expected).abs().max() > 1e-3
    fresh.load_state_dict(kernel.state_dict())
    torch.save(kernel.state_dict(), tmp_path / "state.pt")
    stored = orff_of(name, rule(10, seed=5))
    stored.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    copies = [copy.deepcopy(kernel), pickle.loads(pickle.dumps(kernel)), fresh, stored]
    for own in copies:
        assert torch.equal(own(x).to_dense(), expected)
    assert copies[0].redraw().phases(x).equal(kernel.phases(x))
    signs = [
        b for n, b in kernel.frequencies.named_buffers() if n.split(".")[-1].startswith("sign")
    ]
    assert all(own.dtype == torch.int8 for own in signs)  # B as int8
    assert signs


@each_rule
@pytest.mark.parametrize("name", ["scalar_sum", "product", "lcm"])
def test_halves_of_the_frequencies(name, rule):
    """As the check of overconfidence uses them."""
    x, found = fields.draw(6, INPUTS), []
    for own in (rule(11), WrittenOut(rule(11))):
        kernel = KERNELS[name]()
        whole = expand(kernel, draw(kernel, own, INPUTS), INPUTS)
        parts = [whole.select(*half) for half in whole.phi.halves()]
        found.append([part.features(x) @ part.features(x).mT for part in (whole, *parts)])
    if name == "product":  # one family of columns: the same halves
        for one, other in zip(*found, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
    whole, first, second = found[0]
    torch.testing.assert_close(whole, found[1][0], rtol=0, atol=1e-12)
    count = torch.tensor([6.0, 5.0]).double()  # frequencies of a term in each half, in some order
    shares = [count / 11, count.flip(0) / 11]
    sums = [a * first + b * second for a, b in shares]
    error = min((own - whole).abs().max() for own in sums)
    assert error <= 1e-12


X = fields.uniform(80, 2)
Y = torch.stack([(3 * X[:, 0]).sin(), (2 * X[:, 1]).cos()], dim=-1) + 0.1 * fields.draw(80, 2)


def field_model(rule):
    kernel = randomise_tasks(MultitaskKernel(RBFKernel(ard_num_dims=2), num_tasks=2).double())
    kernel.data_covar_module.lengthscale = 0.6
    model = gp_orff.VectorFieldGP(kernel, frequencies=rule)
    model.likelihood.noise = 0.3
    return model


def numbers(model, at):
    """What a posterior says of the field and of its derivatives."""
    field = model.posterior()
    joint = [field(at), field.divergence(at), field.curl(at), field.jacobian(at)]
    path = field.sample_paths(2, seed=1)(at)
    every = [(own.mean, own.variance, own.covariance_matrix) for own in joint]
    return [field.mean(at), field.variance(at), path, *(value for own in every for value in own)]


@pytest.mark.slow
@each_rule
@pytest.mark.parametrize("number", [20, 200])  # fewer and more features than the 160 numbers
def test_models_of_fields(number, rule):
    """Their symbols that differentiate go through ω = phases(I)."""
    at = fields.uniform(5, 2, seed=3)
    with gp_orff.settings.check_features(False):
        one, other = (
            field_model(own).condition(X, Y) for own in (rule(number), WrittenOut(rule(number)))
        )
        for mine, theirs in zip(numbers(one, at), numbers(other, at), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-7, atol=1e-8)
        nats = one.log_marginal_likelihood(), other.log_marginal_likelihood()
    torch.testing.assert_close(*nats)


def test_observations_of_derivatives():
    """A divergence and a curl of zero at some points."""
    at, zero, found = fields.uniform(6, 2, seed=4), torch.zeros(6).double(), []
    with gp_orff.settings.check_features(False):
        for own in (gp_orff.Fastfood(40), WrittenOut(gp_orff.Fastfood(40))):
            model = field_model(own).condition(X, Y)
            model.observe(at, zero, gp_orff.Divergence(), noise=0.1)
            model.observe(at, zero, gp_orff.Curl(), noise=0.1)
            found.append((model.posterior().mean(at), model.log_marginal_likelihood()))
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-9)


def test_potentials_by_frequencies_that_are_written_out():
    """A symbol that divides by ω; and one that multiplies components."""
    at = fields.uniform(5, 2, seed=3)
    with gp_orff.settings.check_features(False):
        rules = gp_orff.Fastfood(64), WrittenOut(gp_orff.Fastfood(64))
        one, other = (field_model(own).condition(X, Y).posterior() for own in rules)
        for symbol in (
            gp_orff.CurlFreePart(),
            gp_orff.Component([1.0, 2.0]),
            gp_orff.BoxAverage(0.2),
        ):
            torch.testing.assert_close(one.mean(at, symbol), other.mean(at, symbol))
            torch.testing.assert_close(one.variance(at, symbol), other.variance(at, symbol))


def test_a_posterior_of_few_features_warns():
    model = field_model(gp_orff.Fastfood(10))
    model.likelihood.noise = 1e-4
    with pytest.warns(gp_orff.FeatureWarning, match="20 random features|40 random features"):
        model.condition(X, Y).posterior().mean(X[:3])


@pytest.mark.slow
@each_rule
def test_chunks_of_uneven_size_and_updates(rule):
    at = fields.uniform(5, 2, seed=3)
    with gp_orff.settings.check_features(False):
        whole = field_model(rule(20)).condition(X, Y)
        cuts = [0, 1, 8, 50, 80]
        pieces = [(X[a:b], Y[a:b]) for a, b in pairwise(cuts)]
        models = [field_model(rule(20)).condition(pieces)]
        models.append(field_model(rule(20)).condition(*pieces[0]))
        for piece in pieces[1:]:
            models[-1].update(*piece)
        models.append(field_model(rule(20)).condition(X[:9], Y[:9]))
        parts = [models[-1].statistics_of(X[a:b], Y[a:b]) for a, b in pairwise(cuts)]
        models[-1].condition(sum(parts[1:], parts[0]))
        expected = whole.posterior()
        for model in models:
            found = model.posterior()
            torch.testing.assert_close(found.mean(at), expected.mean(at), rtol=1e-8, atol=1e-8)
            torch.testing.assert_close(found.variance(at), expected.variance(at))


@pytest.mark.slow
@each_rule
@pytest.mark.parametrize("held", ["data", "statistics"])
def test_files(held, rule, tmp_path):
    at = fields.uniform(5, 2, seed=3)
    with gp_orff.settings.check_features(False):
        model = field_model(rule(20, seed=7)).condition(X, Y)
        if held == "statistics":
            model.condition(model.statistics_of(X, Y))
        model.save(tmp_path / "model.pt")
        loaded = gp_orff.VectorFieldGP.load(tmp_path / "model.pt")
        assert loaded.frequencies == rule(20, seed=7)
        assert (model.report.held, loaded.report.held) == (held, held)
        for mine, theirs in zip(numbers(model, at), numbers(loaded, at), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-10)
        for own in (model, loaded):
            own.update(X[:7] + 0.1, Y[:7])
        means = model.posterior().mean(at), loaded.posterior().mean(at)
        torch.testing.assert_close(*means, rtol=1e-9, atol=1e-10)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*poorly:gp_orff.DataWarning")
def test_a_fit_moves_the_lengthscales():
    x, y, rule = X[:40], Y[:40], gp_orff.Fastfood(12)
    with gp_orff.settings.check_features(False):
        one, other = (
            field_model(own).fit(x, y, progress=False) for own in (rule, WrittenOut(rule))
        )
        nats = [own.log_marginal_likelihood().item() for own in (one, other)]
        start = field_model(rule).condition(x, y).log_marginal_likelihood().item()
    assert nats[0] == pytest.approx(nats[1], rel=1e-3)
    assert nats[0] > start + 10


SOLVERS = [(solver, gp_orff.Fastfood) for solver in ("cholesky", "stein", "lsmr", "sgd")]
SOLVERS += [("auto", rule) for rule in STRUCTURED_RULES.values()]


@pytest.mark.slow
@pytest.mark.parametrize(("solver", "rule"), SOLVERS)
def test_regressions(solver, rule):
    x, y = X.numpy(), Y.numpy()
    kernel = gp_orff.SeparableKernel(RBFKernel(ard_num_dims=2).double(), ROOT)
    kernel.base_kernel.lengthscale = 0.6
    one, other = (
        ORFFRidge(kernel, own, alpha=0.5, solver=solver).fit(x, y)
        for own in (rule(20), WrittenOut(rule(20)))
    )
    assert np.allclose(one.predict(x), other.predict(x), rtol=0, atol=1e-6)
    phi = one.kernel_.features(X).detach().numpy()
    weights = np.linalg.solve(phi.T @ phi + 0.5 * np.eye(phi.shape[1]), phi.T @ y.reshape(-1))
    tolerance = {"sgd": 0.05, "lsmr": 1e-5}.get(solver, 1e-8)
    assert np.abs(one.predict(x).reshape(-1) - phi @ weights).max() < tolerance


def test_regressions_of_chunks():
    kernel = RBFKernel(ard_num_dims=2).double()
    whole = ORFFRidge(kernel, gp_orff.Fastfood(20), alpha=0.5, solver="cholesky").fit(X, Y)
    part = ORFFRidge(kernel, gp_orff.Fastfood(20), alpha=0.5, solver="cholesky")
    for a, b in ((0, 3), (3, 50), (50, 80)):
        part.partial_fit(X[a:b].numpy(), Y[a:b].numpy())
    assert np.allclose(whole.predict(X), part.predict(X), rtol=0, atol=1e-9)


@pytest.mark.parametrize("rule", [gp_orff.MonteCarlo(16), gp_orff.Fastfood(16)])
def test_second_derivatives_of_a_model_of_statistics(rule):
    """A Hessian times a vector, against autograd through the dense covariance of the features."""
    kernel = ScaleKernel(RBFKernel(ard_num_dims=3)).double()
    x, y = fields.draw(60, 3), fields.draw(60, 1, seed=1)
    model = gp_orff.VectorFieldGP(kernel, mean=ZeroMean(), frequencies=rule)
    model.likelihood.noise = 0.3
    model.condition(x, y)
    orff, parameters = gp_orff.ORFFKernel(kernel, rule), list(kernel.parameters())

    def dense():
        phi = orff.features(x)
        return oracles.log_density(phi @ phi.mT + 0.3 * torch.eye(60), y)

    products = []
    for function in (model.log_marginal_likelihood, dense):
        slopes = torch.autograd.grad(function(), parameters, create_graph=True)
        along = sum((slope * (1 + torch.arange(slope.numel()))).sum() for slope in slopes)
        products.append(torch.cat([h.flatten() for h in torch.autograd.grad(along, parameters)]))
    torch.testing.assert_close(*products, rtol=1e-9, atol=1e-9)


def test_one_frequency_beside_a_constant():
    kernel = ConstantKernel() + RBFKernel(ard_num_dims=5)
    model = gp_orff.VectorFieldGP(kernel.double(), frequencies=gp_orff.Fastfood(1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", gp_orff.FeatureWarning)
        model.condition(fields.draw(30, 5), fields.draw(30, 1, seed=1))
    assert torch.isfinite(model.posterior().mean(fields.draw(3, 5, seed=2))).all()
