"""Sample paths are functions with the distribution of the posterior, near the data and far away."""

import pickle

import gpytorch
import pytest
import torch
from gpytorch.kernels import MaternKernel, MultitaskKernel, RBFKernel, RQKernel, ScaleKernel
from gpytorch.means import ZeroMean
from torch.autograd.functional import jacobian

import gp_orff
from tests.support.fields import ALGEBRAS, draw, helmholtz, model_of, symbols, uniform
from tests.support.models import VectorGP

pytestmark = pytest.mark.usefixtures("no_check_of_random_features")

KERNELS = {
    "helmholtz": lambda: helmholtz(2),
    "separable": lambda: MultitaskKernel(RBFKernel(), num_tasks=2, rank=1),
}


@pytest.mark.slow
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("rule", ALGEBRAS)
def test_paths_have_the_law_of_the_posterior(rule, kernel):
    """Mean and covariance of 2000 of them, within 5 standard errors."""
    torch.manual_seed(0)  # gpytorch starts task covariances at random
    field = model_of(KERNELS[kernel](), ALGEBRAS[rule], 2).posterior()
    x, count = uniform(4, 2, seed=5), 2000
    values = field.sample_paths(count, seed=1)(x).flatten(1)  # (S, n·p)
    joint = field(x)
    wanted = joint.covariance_matrix
    sd = wanted.diagonal().sqrt()
    z = (values.mean(0) - joint.mean.flatten()) / sd * count**0.5
    assert z.abs().max() < 5
    found = torch.cov(values.mT)
    spread = (wanted.square() + sd.square().outer(sd.square())).sqrt() / count**0.5
    assert ((found - wanted) / spread).abs().max() < 5


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["grid", "primal", "dual"])
def test_symbols_of_paths_have_the_law_of_symbols(rule):
    """Mean and variance of every symbol against 3000 paths, within 5 standard errors."""
    fine = gp_orff.Grid(domain=((-1, 3),) * 2, tolerance=1e-7, lengthscale_range=(1, 1))
    field = model_of(helmholtz(2), fine if rule == "grid" else ALGEBRAS[rule], 2).posterior()
    x, count = uniform(4, 2, seed=5), 3000
    paths = field.sample_paths(count, seed=2)
    for symbol in symbols(2):
        if symbol.order < 0 and symbol.reference is None:
            continue  # paths of grids lack their constant
        values = paths(x, symbol)
        mean, sd = field.mean(x, symbol), field.variance(x, symbol).sqrt()
        assert ((values.mean(0) - mean) / sd * count**0.5).abs().max() < 5, symbol
        assert ((values.var(0) / sd**2 - 1) * (count / 2) ** 0.5).abs().max() < 5, symbol


@pytest.mark.parametrize("rule", ALGEBRAS)
def test_paths_are_functions(rule):
    """The same wherever and however often they are asked; differentiable; by the seed."""
    field = model_of(helmholtz(2), ALGEBRAS[rule], 2).posterior()
    paths, x = field.sample_paths(3, seed=7), uniform(6, 2, seed=5)
    values = paths(x)
    assert values.shape == (3, 6, 2)
    torch.testing.assert_close(paths(x.flip(0)).flip(1), values, rtol=0, atol=1e-9)
    torch.testing.assert_close(paths(x[2:3])[:, 0], values[:, 2], rtol=0, atol=1e-9)
    apart = torch.stack([x, x + 0.1, x.flip(0)])  # each at points of its own
    own = torch.stack([paths(part)[i] for i, part in enumerate(apart)])
    torch.testing.assert_close(paths(apart), own, rtol=0, atol=1e-9)
    for wrong in (
        x[None],
        torch.zeros(2, 6, 2),
        torch.zeros(3, 6, 3),
        torch.zeros(3),
        x * float("nan"),
    ):
        with pytest.raises(ValueError, match="expected"):
            paths(wrong)
    again, other = field.sample_paths(3, seed=7), field.sample_paths(3, seed=8)
    assert torch.equal(again(x), values)
    assert not torch.allclose(other(x), values)
    assert paths(x.float()).dtype == torch.float32


@pytest.mark.parametrize("rule", ["grid", "primal", "dual"])
def test_symbols_of_paths_are_those_of_autograd(rule):
    field, x = model_of(helmholtz(2), ALGEBRAS[rule], 2).posterior(), uniform(6, 2, seed=5)
    paths = field.sample_paths(3, seed=7)
    slopes = jacobian(lambda z: paths(z).sum(1), x).movedim(2, 1)  # (S, n, i, j)
    trace = slopes.diagonal(dim1=2, dim2=3).sum(-1, keepdim=True)
    torch.testing.assert_close(paths(x, gp_orff.Divergence()), trace, rtol=0, atol=1e-7)
    potential = gp_orff.Potential(torch.zeros(2).double())
    slopes = jacobian(lambda z: paths(z, potential).sum(1), x).squeeze(1)  # (S, n, j)
    part = paths(x, gp_orff.CurlFreePart())
    torch.testing.assert_close(slopes, part, rtol=0, atol=1e-7)


def test_paths_of_an_exact_kernel_are_differentiated_by_autograd():
    paths = model_of(helmholtz(2), None, 2).posterior().sample_paths(3)
    with pytest.raises(NotImplementedError, match="differentiate the paths"):
        paths(uniform(6, 2), gp_orff.Divergence())


def test_pathwise_variance_does_not_starve():
    """Ten lengthscales away the prior's variance, at the data the posterior's: exact paths have
    both, those of a few random features lose the first."""
    kernel = helmholtz(2)
    known = {"points": 300, "mean": gpytorch.means.ZeroMean()}
    exact = model_of(kernel, None, 2, **known)
    far = uniform(40, 2, seed=5) + 10.0
    near = exact.state.data.observations[0].x[:40]
    for x in (far, near):
        wanted = exact.posterior().variance(x).mean().item()
        found = exact.posterior().sample_paths(200, seed=0)(x).var(0).mean().item()
        assert found == pytest.approx(wanted, rel=0.15)
    starved = model_of(kernel, gp_orff.MonteCarlo(15), 2, **known).posterior()
    prior = exact.posterior().variance(far).mean()
    assert starved.sample_paths(200, seed=0)(far).var(0).mean() < 0.6 * prior


@pytest.mark.slow
@pytest.mark.parametrize("base", [MaternKernel(nu=2.5), RQKernel(alpha=1.0)])
def test_paths_between_dense_readings_spread(base):
    """Almost no noise: what is left of a rough field has 4e-4 of the prior's variance. Frequencies
    of the prior's own density gave .4 to 2.1 of it (RQ: .91), by the seed; now it is 1.7 % off at
    most in four seeds of these kernels."""
    base = base.double()
    base.lengthscale = 0.5
    kernel = ScaleKernel(gp_orff.CurlFreeKernel(base, num_dims=2)).double()
    model = gp_orff.VectorFieldGP(kernel, mean=gpytorch.means.MultitaskMean(ZeroMean(), 2))
    model.likelihood.noise = 1e-6 * kernel(torch.zeros(1, 2).double()).to_dense()[0, 0].item()
    x, xs = 0.5 * uniform(600, 2), 0.1 + 0.4 * uniform(100, 2, seed=1)
    field = model.condition(x, draw(600, 2)).posterior()
    ratio = field.sample_paths(400, seed=2)(xs).var(0) / field.variance(xs)
    assert ratio.mean().item() == pytest.approx(1.0, abs=0.05)
    assert ratio.median().item() == pytest.approx(1.0, abs=0.05)


@pytest.mark.parametrize("rule", ALGEBRAS)
def test_posteriors_and_paths_pickle(rule):
    field, x = model_of(helmholtz(2), ALGEBRAS[rule], 2).posterior(), uniform(4, 2, seed=5)
    divergence, paths = field.divergence(x).mean, field.sample_paths(2)
    again, same = pickle.loads(pickle.dumps((field, paths)))
    torch.testing.assert_close(again.divergence(x).mean, divergence)
    torch.testing.assert_close(same(x), paths(x))


def test_outside_the_grid_paths_say_so():
    rule = gp_orff.Auto(exact_values=0)
    field = model_of(helmholtz(2), rule, 2).posterior()
    with pytest.raises(ValueError, match="inside the grid's domain"):
        field.sample_paths(2)(uniform(3, 2) + 30.0)
    with pytest.raises(ValueError, match="at least one path"):
        field.sample_paths(0)


@pytest.mark.slow
def test_paths_of_parts_by_the_remedy_that_is_told():
    """Also of a rough kernel, whose grids are so large that `Auto` takes the exact kernel."""
    x, y = uniform(60, 2), uniform(60, 2, seed=1)
    kernel = gp_orff.HelmholtzKernel(MaternKernel(nu=2.5), num_dims=2)
    model = gp_orff.VectorFieldGP(kernel).condition(x, y)
    with pytest.raises(NotImplementedError, match=r"use VectorFieldGP\(") as raised:
        model.posterior().part("curl_free").sample_paths(2)
    remedy = str(raised.value).partition("use ")[2]
    names = {"VectorFieldGP": gp_orff.VectorFieldGP, "gp_orff": gp_orff, "kernel": kernel, "x": x}
    part = eval(remedy, names).condition(x, y).posterior().part("curl_free")
    assert part.sample_paths(2)(x).shape == (2, 60, 2)


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["exact", "grid"])
def test_anything_nonlinear_by_paths(rule):
    """Of a linear function, what the posterior says in closed form; of the speed, its moments."""
    field = model_of(helmholtz(2), ALGEBRAS[rule], 2).posterior()
    x = uniform(5, 2, seed=5)
    if rule == "grid":
        linear = field.summarize(x, lambda f: f[..., 0] - f[..., 1], num_paths=2000)
        exact = field(x, gp_orff.Component([1.0, -1.0]))
        sd = exact.variance.sqrt()
        torch.testing.assert_close(linear.mean, exact.mean, rtol=0, atol=5 * sd.max() / 2000**0.5)
        torch.testing.assert_close(linear.sd, sd, rtol=0.08, atol=0)
        torch.testing.assert_close(linear.high - linear.low, 3.92 * sd, rtol=0.1, atol=0)
    speed = field.summarize(x, lambda f: f.norm(dim=-1), num_paths=2000)
    second = field.mean(x).square().sum(-1) + field.variance(x).sum(-1)
    # Var |f|² = Σ 2 v² + 4 m² v of independent components: 5 standard errors, if they are equal
    mean, variance = field.mean(x), field.variance(x)
    spread = (2 * variance.square() + 4 * mean.square() * variance).sqrt().sum(-1)
    error = (speed.mean**2 + speed.sd**2 - second).abs()
    assert (error < 5 * spread / 2000**0.5).all()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("rule", ALGEBRAS)
def test_the_posterior_of_an_exact_gp(rule, dtype):
    """Mean and covariance as the model itself predicts them, and everything else besides."""
    x, y = uniform(60, 2).to(dtype), draw(60, 2).to(dtype)
    kernel = helmholtz(2).to(dtype)
    if rule == "grid":
        kernel = gp_orff.ORFFKernel(kernel, gp_orff.Grid.for_data(x))
    elif rule != "exact":
        kernel = gp_orff.ORFFKernel(kernel, ALGEBRAS[rule])
    likelihood = gpytorch.likelihoods.MultitaskGaussianLikelihood(2, rank=1)
    model = VectorGP(x, y, likelihood, kernel).to(dtype)
    for i, mean in enumerate(model.mean_module.base_means):
        mean.constant = 1.0 + i
    model.eval()
    field, xs = gp_orff.FieldPosterior.from_exact_gp(model), uniform(7, 2, seed=5).to(dtype)
    with torch.no_grad():
        expected = model(xs)
    atol = 1e-7 if dtype == torch.float64 else 2e-3
    assert field.mean(xs).dtype == dtype
    torch.testing.assert_close(field.mean(xs), expected.mean, rtol=0, atol=atol)
    covariance = field(xs).covariance_matrix
    torch.testing.assert_close(covariance, expected.covariance_matrix, rtol=0, atol=atol)
    assert field.divergence(xs).mean.shape == (7,)
    assert field.sample_paths(2)(xs).shape == (2, 7, 2)
    model.covar_module.requires_grad_(True)  # a snapshot: the model's own are left as they were
    assert all(p.requires_grad for p in model.parameters())


def test_what_is_no_exact_gp():
    x, y = uniform(10, 2), uniform(10, 2)
    likelihood = gpytorch.likelihoods.MultitaskGaussianLikelihood(2)
    features = gp_orff.ORFFKernel(helmholtz(2), gp_orff.MonteCarlo(5))
    model = VectorGP(x, y, likelihood, gpytorch.kernels.ScaleKernel(features))
    with pytest.raises(TypeError, match="kernels inside one ORFFKernel"):
        gp_orff.FieldPosterior.from_exact_gp(model)
    with pytest.raises(TypeError, match="ExactGP with training data, got VectorFieldGP"):
        gp_orff.FieldPosterior.from_exact_gp(gp_orff.VectorFieldGP(helmholtz(2)))
