"""Observations of symbols of the field, compared with dense algebra and the exact kernel."""

import gpytorch
import numpy as np
import pytest
import torch
from gpytorch.kernels import ScaleKernel

import gp_orff
from gp_orff.features.assemble import expand
from gp_orff.inference.equations import DenseRows
from gp_orff.kernels.derivatives import SymbolCovariance
from gp_orff.symbols.base import Identity
from tests.support import oracles
from tests.support.fields import ALGEBRAS, helmholtz, model_of, uniform

pytestmark = pytest.mark.usefixtures("no_check_of_random_features")

XE = uniform(5, 2, seed=8)
OBSERVED = {
    "divergence": (gp_orff.Divergence(), torch.zeros(5), 0.01),
    "vorticity": (gp_orff.Curl(), torch.ones(5, 1), 0.1),
    "component": (gp_orff.Component([0.6, 0.8]), 2 + torch.arange(5.0), 0.01),
    "gauge": (gp_orff.Potential(torch.tensor([0.5, 0.5])), torch.arange(5.0), 0.02),
    "part": (gp_orff.CurlFreePart(), torch.ones(5, 2), torch.tensor([0.1, 0.2])),
    "section": (gp_orff.Flux(torch.tensor([[0.0, 0.0], [0.2, 0.3]])), torch.ones(5), 0.01),
    "box": (gp_orff.BoxAverage(0.2), torch.ones(5, 2), 0.1 * torch.eye(2)),
}


def observing(rule, names, **options):
    model = model_of(helmholtz(2), rule, 2, **options)
    for name in names:
        symbol, y, noise = OBSERVED[name]
        model.observe(XE, y, symbol, noise=noise)
    return model


def test_the_exact_kernel_by_dense_algebra():
    """All at once: evidence, posterior mean and covariance of the field."""
    names = ["divergence", "gauge", "component"]
    zero = gpytorch.means.ZeroMean()
    model = observing(None, names, mean=zero)
    x = model.state.data.observations[0].x
    y = [model.state.data.observations[0].y.flatten()]
    sides, noise = (
        [(Identity(), x)],
        [model.likelihood.noise.item() * torch.ones(len(y[0])).double()],
    )
    for name in names:
        symbol, values, variance = OBSERVED[name]
        sides.append((symbol, XE))
        y.append(values.double().flatten())
        noise.append(variance * torch.ones(len(y[-1])).double())
    kernel, y, noise = model.kernel.requires_grad_(False), torch.cat(y), torch.cat(noise)

    def covariance(left, right):
        rows = [
            torch.cat([SymbolCovariance(kernel, s, r, (0, 1)).relative(a, b) for r, b in right], -1)
            for s, a in left
        ]
        return torch.cat(rows)

    noisy = covariance(sides, sides) + torch.diag(noise)
    evidence = oracles.log_density(noisy, y)
    torch.testing.assert_close(model.log_marginal_likelihood(), evidence, rtol=1e-9, atol=1e-9)
    xs = uniform(7, 2, seed=5)
    cross = covariance([(Identity(), xs)], sides)
    gain = torch.linalg.solve(noisy, cross.mT).mT
    posterior = model.posterior()
    torch.testing.assert_close(posterior.mean(xs).flatten(), gain @ y, rtol=0, atol=1e-8)
    expected = covariance([(Identity(), xs)], [(Identity(), xs)]) - gain @ cross.mT
    torch.testing.assert_close(posterior(xs).covariance_matrix, expected, rtol=0, atol=1e-8)


@pytest.mark.slow
@pytest.mark.parametrize("name", OBSERVED)
def test_every_algebra_is_the_exact_kernel(name):
    """Statistics and dual, on a fine grid: the field, a symbol of it, evidence; and the constant
    mean, that all observations have a say in."""
    exact = observing(None, [name])
    fine = gp_orff.Grid(domain=((-0.2, 2.2),) * 2, tolerance=1e-8, lengthscale_range=(1, 1))
    xs = uniform(6, 2, seed=5)
    for rule in (fine, gp_orff.Auto(exact_values=0, tolerance=1e-7)):
        model = observing(rule, [name])
        for symbol in (None, gp_orff.Divergence(), gp_orff.StreamFunction()):
            one, other = model.posterior(), exact.posterior()
            sd = other.variance(xs, symbol).sqrt()
            difference = (one.mean(xs, symbol) - other.mean(xs, symbol)) / sd
            assert difference.abs().max() < 5e-3
            torch.testing.assert_close(one.variance(xs, symbol).sqrt(), sd, rtol=5e-3, atol=0)
        evidence = exact.log_marginal_likelihood().item()
        assert model.log_marginal_likelihood().item() == pytest.approx(evidence, abs=0.02)
        for mine, theirs in zip(model.mean.base_means, exact.mean.base_means, strict=True):
            assert mine.constant.item() == pytest.approx(theirs.constant.item(), abs=5e-3)


@pytest.mark.parametrize("points", [60, 400], ids=["dual", "primal"])
def test_random_features_by_dense_algebra(points):
    """Of the features themselves, in both algebras: 1e-9."""
    rule = gp_orff.MonteCarlo(40)
    zero = gpytorch.means.ZeroMean()
    model = model_of(helmholtz(2), rule, 2, points=points, mean=zero)
    symbol, y, noise = OBSERVED["gauge"]
    model.observe(XE, y, symbol, noise=noise)
    expansion = expand(model.kernel, model.state.inference.draws, 2).double()
    part = model.state.data.observations[0]
    further = model.state.data.symbol_data[0]
    observed = DenseRows.of(further, expansion, {}, None)
    rows = torch.cat([expansion.features(part.x), observed.features]).detach()
    values = torch.cat([part.y.flatten(), y.double()])
    own = model.likelihood.noise.item() * torch.ones(2 * points).double()
    variance = torch.cat([own, noise * torch.ones(5).double()])
    noisy = rows @ rows.mT + torch.diag(variance)
    evidence = oracles.log_density(noisy, values)
    torch.testing.assert_close(
        model.log_marginal_likelihood().detach(), evidence, rtol=1e-9, atol=1e-9
    )
    xs = uniform(6, 2, seed=5)
    features = expansion.features(xs).detach()
    gain = torch.linalg.solve(noisy, rows @ features.mT).mT
    expected = (gain @ values).reshape(6, 2)
    torch.testing.assert_close(model.posterior().mean(xs), expected, rtol=0, atol=1e-8)
    covariance = features @ features.mT - gain @ rows @ features.mT
    torch.testing.assert_close(
        model.posterior()(xs).covariance_matrix, covariance, rtol=0, atol=1e-8
    )


@pytest.mark.parametrize("rule", ["exact", "grid"])
def test_gradients_of_the_evidence(rule):
    """In the hyperparameters, by differences."""
    grid = gp_orff.Grid(domain=((0, 2),) * 2, tolerance=1e-4, diagonal_correction=False)
    model = observing(None if rule == "exact" else grid, ["divergence", "gauge"])
    raw = model.kernel.curl_free.base_kernel.base_kernel.raw_lengthscale
    for own in (raw, model.likelihood.raw_noise):
        value = model.log_marginal_likelihood()
        (gradient,) = torch.autograd.grad(value, own)
        with torch.no_grad():
            step = 1e-5
            own += step
            high = model.log_marginal_likelihood()
            own -= 2 * step
            low = model.log_marginal_likelihood()
            own += step
        found = (high - low) / (2 * step)
        assert gradient.item() == pytest.approx(found.item(), rel=2e-3)


def test_a_wall_is_data():
    """No flow across it within the stated noise, and a better field inside the box."""
    rng = np.random.default_rng(0)
    x = torch.from_numpy(rng.uniform(0, 1, (40, 2)))

    def field(p):  # of the stream function sin πx sin πy, which is zero on the walls
        sx, sy = torch.sin(torch.pi * p[:, 0]), torch.sin(torch.pi * p[:, 1])
        cx, cy = torch.cos(torch.pi * p[:, 0]), torch.cos(torch.pi * p[:, 1])
        return torch.stack([sx * cy, -cx * sy], dim=-1)

    y = field(x) + 0.2 * torch.from_numpy(rng.standard_normal((40, 2)))
    t = torch.linspace(0, 1, 11, dtype=torch.float64)
    zero, one = torch.zeros_like(t), torch.ones_like(t)
    west = torch.cat([torch.stack([zero, t], -1), torch.stack([one, t], -1)])
    south = torch.cat([torch.stack([t, zero], -1), torch.stack([t, one], -1)])
    kernel = ScaleKernel(gp_orff.DivergenceFreeKernel(num_dims=2)).double()
    kernel.base_kernel.base_kernel.lengthscale = 0.5
    kernel.outputscale = 0.5**2 * 0.5**2  # of a field of mean square 1/4
    model = gp_orff.VectorFieldGP(kernel, mean=gpytorch.means.ZeroMean())
    model.likelihood.noise = 0.04
    model.condition(x, y)
    inside = uniform(400, 2, seed=3) / 2
    open_error = (model.posterior().mean(inside) - field(inside)).square().mean().sqrt()
    for walls, normal in ((west, [1.0, 0.0]), (south, [0.0, 1.0])):
        model.observe(walls, torch.zeros(22), gp_orff.Component(normal), noise=1e-4)
    posterior = model.posterior()
    assert posterior.mean(west)[:, 0].abs().max() < 0.03
    assert posterior.mean(south)[:, 1].abs().max() < 0.03
    closed_error = (posterior.mean(inside) - field(inside)).square().mean().sqrt()
    assert closed_error < 0.8 * open_error


@pytest.mark.slow
@pytest.mark.parametrize("rule", ALGEBRAS)
def test_they_stay_with_the_model(rule, tmp_path):
    """Through updates, new hyperparameters and files; not through a new condition."""
    model = observing(ALGEBRAS[rule], ["component", "gauge"])
    assert model.report.observed == {"Component": 5, "Potential": 5}
    x = uniform(20, 2, seed=11)
    y = torch.ones(20, 2).double()
    model.update(x, y)
    other = model_of(helmholtz(2), ALGEBRAS[rule], 2)
    other.update(x, y)
    for name in ("component", "gauge"):
        symbol, values, noise = OBSERVED[name]
        other.observe(XE, values, symbol, noise=noise)
    xs = uniform(5, 2, seed=5)
    one, two = model.posterior().mean(xs), other.posterior().mean(xs)
    torch.testing.assert_close(one, two, rtol=0, atol=1e-9)
    model.save(tmp_path / "model.pt")
    loaded = gp_orff.VectorFieldGP.load(tmp_path / "model.pt")
    torch.testing.assert_close(loaded.posterior().mean(xs), one, rtol=0, atol=1e-9)
    evidence = model.log_marginal_likelihood().item()
    assert loaded.log_marginal_likelihood().item() == pytest.approx(evidence, rel=1e-12)
    plain = model_of(helmholtz(2), ALGEBRAS[rule], 2).posterior().mean(xs)
    part = model.state.data.observations[0]
    model.condition(part.x[:60], part.y[:60])
    torch.testing.assert_close(model.posterior().mean(xs), plain, rtol=0, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["exact", "grid"])
def test_they_stay_with_a_model_that_learns(rule):
    """Hyperparameters are those of the largest evidence of all observations."""
    model = observing(ALGEBRAS[rule], ["component", "gauge"], points=125)
    before = model.log_marginal_likelihood().item()
    model.fit(progress=False, warm_start=True)
    assert model.report.observed == {"Component": 5, "Potential": 5}
    assert model.log_marginal_likelihood().item() > before + 1


def test_what_has_no_closed_form_is_refused_by_exact_kernels():
    model = model_of(helmholtz(2), None, 2)
    before = model.posterior().mean(XE)
    smooth = gp_orff.Divergence() @ gp_orff.BoxAverage(0.1)
    with pytest.raises(NotImplementedError, match="no closed form under this exact kernel"):
        model.observe(XE, torch.zeros(5), smooth, noise=0.1)
    assert torch.equal(model.posterior().mean(XE), before)
    model = model_of(helmholtz(2), ALGEBRAS["grid"], 2)
    free = model.posterior().variance(XE, smooth)
    model.observe(XE, torch.zeros(5), smooth, noise=1e-4)
    assert (model.posterior().variance(XE, smooth) < 0.1 * free).all()


def test_what_needs_frequencies_near_zero_is_refused_by_grids():
    separable = gpytorch.kernels.MultitaskKernel(gpytorch.kernels.RBFKernel(), num_tasks=2, rank=1)
    model = model_of(separable, ALGEBRAS["grid"], 2)
    before = model.posterior().mean(XE)
    symbol, y, noise = OBSERVED["gauge"]
    with pytest.raises(
        NotImplementedError, match="a frequency grid, which omits frequencies near zero"
    ):
        model.observe(XE, y, symbol, noise=noise)
    assert torch.equal(model.posterior().mean(XE), before)


def test_paths_pass_through_what_is_observed():
    model = observing(None, ["component"])
    symbol, _, _ = OBSERVED["component"]
    along = model.posterior().sample_paths(500, seed=0)(XE) @ torch.tensor([0.6, 0.8]).double()
    wanted = model.posterior()(XE, symbol)
    z = (along.mean(0) - wanted.mean) / wanted.stddev * 500**0.5
    assert z.abs().max() < 5
    torch.testing.assert_close(along.std(0), wanted.stddev, rtol=0.15, atol=0)


BAD = {
    "symbol": ({"symbol": "divergence"}, TypeError, r"such as gp_orff.Curl\(\), got 'divergence'"),
    "shape": ({"y": torch.zeros(4)}, ValueError, r"of shape \(5, 1\), got shape \(4, 1\)"),
    "nan": ({"y": torch.full((5,), float("nan"))}, ValueError, "with NaN"),
    "noise": ({"noise": 0.0}, ValueError, "positive noise variance"),
    "matrix": (
        {"noise": torch.ones(2, 2)},
        ValueError,
        "positive noise variance, 1 positive variances",
    ),
    "points": ({"x": torch.zeros(5, 3)}, ValueError, "2 columns"),
    "dims": ({"symbol": gp_orff.VectorPotential()}, ValueError, "exists in 3 dimensions"),
}


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["exact", "grid"])
@pytest.mark.parametrize("name", BAD)
def test_bad_observations_are_refused_and_nothing_is_lost(name, rule):
    model = model_of(helmholtz(2), ALGEBRAS[rule], 2)
    before = model.posterior().mean(XE)
    change, error, message = BAD[name]
    how = {"x": XE, "y": torch.zeros(5), "symbol": gp_orff.Divergence(), "noise": 0.1, **change}
    with pytest.raises(error, match=message):
        model.observe(**how)
    assert torch.equal(model.posterior().mean(XE), before)
    with pytest.raises(RuntimeError, match="no data yet"):
        gp_orff.VectorFieldGP(helmholtz(2)).observe(**{**how, **BAD["noise"][0]})


@pytest.mark.parametrize("rule", [gp_orff.Auto(exact_values=0), None], ids=["grid", "exact"])
def test_conditioning_on_statistics_begins_anew(rule):
    """They are of the field's readings alone: what was observed beside them is forgotten."""
    expected = observing(rule, []).posterior()
    model = observing(rule, ["divergence", "gauge"])
    model.condition(model.statistics)
    assert not model.state.data.symbol_data
    xs = uniform(7, 2, seed=3)
    mean, sd = model.posterior().mean(xs), expected.variance(xs).sqrt()
    assert ((mean - expected.mean(xs)).abs() < 0.05 * sd).all()  # two grids: 2 % of a variance
    torch.testing.assert_close(model.posterior().variance(xs).sqrt(), sd, rtol=0.02, atol=0)
