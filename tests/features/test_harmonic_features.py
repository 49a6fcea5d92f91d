"""Waves of `HarmonicKernel`: accuracy against the exact kernel, statistics, models of features."""

from itertools import combinations

import gpytorch
import numpy as np
import pytest
import torch

import gp_orff
from gp_orff.features import rings as harmonic_columns
from gp_orff.features.assemble import draw, expand
from gp_orff.features.columns import PointwiseColumns
from gp_orff.features.expansion import apply_symbol
from gp_orff.features.rings import Depths, HarmonicColumns, Rings
from gp_orff.features.truncation import truncated_variance
from gp_orff.inference.quadratic import Evidence
from tests.support.harmonic import SOURCES, harmonic, points

DOMAIN = ((0.0, 1.0), (0.0, 1.0), (0.0, 1.0))


def features(kernel, tolerance, **options):
    options = {"lengthscale_range": (1.0, 1.0), "max_features": 20_000, **options}
    return gp_orff.ORFFKernel(kernel, gp_orff.Grid(DOMAIN, tolerance=tolerance, **options))


@pytest.mark.parametrize("sources", SOURCES)
@pytest.mark.parametrize("tolerance", [1e-3, 1e-5, 1e-8])
def test_features_are_as_accurate_as_the_tolerance_says(sources, tolerance):
    """The tolerance is a share of the variance at the height where most is truncated; a cut-off
    changes a covariance by as much, and aliasing by a little more."""
    kernel, x = harmonic(sources), points(60)
    exact = kernel(x).to_dense()
    error = features(kernel, tolerance)(x).to_dense() - exact
    assert error.abs().max() < 10 * tolerance * exact.abs().max()


def test_deep_and_shallow_sources_together():
    """Rings close to k = 0 hold sources much deeper than the extent of the data, which the sum over
    a lattice would not."""
    kernel, x = harmonic("below", 2), points(40)
    kernel.depths = torch.tensor([0.5, 40.0])
    exact, found = (k(x).to_dense() for k in (kernel, features(kernel, 1e-6)))
    assert (found - exact).abs().max() < 1e-5 * exact.abs().max()


def test_rings_integrate_over_the_plane():
    """∫ |k| e^{−|k|Z} cos⟨k, r⟩ d²k / 2π = (2Z² − r²) / (Z² + r²)^{5/2}."""
    depths = Depths(np.array([1.0]), np.array([1.0]))
    rings = Rings.of(depths.cutoff(1e-10), depths, 30.0, 4.0, 1e-10)
    size = np.linalg.norm(rings.wavevectors, axis=1)
    for z in (1.0, 3.0, 30.0):
        for r in ([0.0, 0.0], [1.0, 0.5], [-2.8, 2.8]):
            waves = np.cos(rings.wavevectors @ r) * size * np.exp(-size * z) / (2 * np.pi)
            square = z * z + np.dot(r, r)
            expected = (3 * z * z - square) / square**2.5
            assert abs(rings.weights @ waves - expected) < 1e-8


def columns(count, side, start, seed):
    generator = torch.Generator().manual_seed(seed)
    angle, size = torch.rand(2, count, generator=generator, dtype=torch.float64)
    omega = 8 * size * torch.stack([torch.cos(3.14 * angle), torch.sin(3.14 * angle)])
    origin = torch.tensor([0.5, 0.4, start], dtype=torch.float64)
    return HarmonicColumns(omega.mT.contiguous(), side, origin, (0, 1, 2))


@pytest.mark.parametrize("extent", [0.0, 0.3, 4.0])
def test_sums_by_transforms_are_those_of_dense_products(extent, monkeypatch):
    x = points(500) * torch.tensor([1.0, 1.0, extent])
    generator = torch.Generator().manual_seed(1)
    y = torch.randn(500, 3, generator=generator, dtype=torch.float64)
    weights = torch.rand(500, 2, generator=generator, dtype=torch.float64)
    phi, other = columns(20, 1, -0.1, 0), columns(15, -1, extent + 0.2, 1)
    monkeypatch.setattr(harmonic_columns, "prefers_transforms", lambda *_: True)
    grams, cross, sums = phi.sums(x, y, weights)
    expected, of_y, totals = PointwiseColumns.sums(phi, x, y, weights)
    pairs = [*zip(grams, expected, strict=True), (cross, of_y), *zip(sums, totals, strict=True)]
    between = phi.cross_gram(other, x, weights[:, 0])
    pairs.append((between, PointwiseColumns.cross_gram(phi, other, x, weights[:, 0])))
    for found, dense in pairs:
        assert (found - dense).abs().max() < 1e-10 * dense.abs().max()


def field_data(count=150):
    x = points(count)
    y = torch.stack([x[:, 0] * x[:, 2], x[:, 1] ** 2, torch.sin(3 * x[:, 0])], dim=-1)
    noise = torch.randn(count, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    return x, y + 0.1 * noise


def model_of(kernel, rule=None, **options):
    rule = gp_orff.Grid(DOMAIN, tolerance=1e-8) if rule is None else rule
    model = gp_orff.VectorFieldGP(kernel, frequencies=rule, **options)
    model.likelihood.noise = 0.05
    return model


EXACT = gp_orff.Auto(exact_values=10**6)
PATTERNS = ["whole", "gaps", "directions", "groups", "tracks"]


def arguments(pattern, x, y):
    if pattern == "gaps":
        missing = torch.rand(y.shape, generator=torch.Generator().manual_seed(3)) < 0.3
        return y.masked_fill(missing, torch.nan), {"missing": "mask"}
    if pattern == "directions":
        generator = torch.Generator().manual_seed(3)
        u = torch.nn.functional.normalize(torch.randn(y.shape, generator=generator).to(y), dim=-1)
        return (u * y).sum(-1), {"directions": u}
    if pattern == "groups":
        return y, {"group": np.array(["a", "b"])[np.arange(len(x)) % 2]}
    if pattern == "tracks":
        return y, {"track": np.arange(len(x)) // 50, "time": np.arange(len(x)) % 50 * 1.0}
    return y, {}


@pytest.mark.slow
@pytest.mark.parametrize("pattern", PATTERNS)
def test_evidence_and_posterior_are_those_of_the_exact_kernel(pattern):
    """The grid truncates less than 1e-8 of the variance, and N·p/σ² = 10⁴ multiplies that."""
    (x, y), z = field_data(), points(10, seed=4)
    y, options = arguments(pattern, x, y)
    kernel = harmonic("below", 1)
    exact, waves = (model_of(kernel, rule).condition(x, y, **options) for rule in (EXACT, None))
    values = [model.log_marginal_likelihood() for model in (exact, waves)]
    assert values[1].item() == pytest.approx(values[0].item(), abs=2e-3)
    gradients = [torch.autograd.grad(value, kernel.raw_depths)[0] for value in values]
    assert torch.allclose(*gradients, rtol=1e-3, atol=1e-3)
    first, second = exact.posterior(), waves.posterior()
    scale = first.mean(z).abs().max()
    assert (first.mean(z) - second.mean(z)).abs().max() < 1e-4 * scale
    assert (first.variance(z) - second.variance(z)).abs().max() < 1e-6
    for symbol in (gp_orff.Jacobian(), gp_orff.Potential(), gp_orff.Potential(torch.zeros(3))):
        assert torch.allclose(first.mean(z, symbol), second.mean(z, symbol), atol=2e-3 * scale)
        pair = (field.variance(z, symbol) for field in (first, second))
        assert torch.allclose(*pair, rtol=1e-3, atol=1e-4)
    for symbol in (gp_orff.Curl(), gp_orff.Divergence()):
        assert second.mean(z, symbol).abs().max() < 1e-10 * scale


@pytest.mark.parametrize("pattern", ["whole", "directions"])
def test_statistics_tell_what_all_features_do(pattern):
    """More numbers than features: normal equations of complex directions against dense matrices."""
    (x, y), z = field_data(300), points(10, seed=4)
    y, options = arguments(pattern, x, y)
    kernel = harmonic("both", 1)
    rule = gp_orff.Grid(DOMAIN, tolerance=0.05, max_features=250)
    model = model_of(kernel, rule, mean=gpytorch.means.ZeroMean()).condition(x, y, **options)
    inference = model.state.inference
    expansion, delta = expand(kernel, inference.draws, 3), inference.truncated(kernel)
    assert not inference.prefers_dual_algebra(expansion)

    def dense():
        phi = expand(kernel, inference.draws, 3).features(x).unflatten(0, (len(x), 3))
        noise = inference.truncated(kernel)
        if pattern == "directions":
            u = options["directions"]
            phi = torch.einsum("npf,np->nf", phi, u)
            along = torch.einsum("np,pq,nq->n", u, noise, u).mean()  # statistics have one noise
            noise = along * torch.eye(len(x)).to(x)
        else:
            phi, noise = phi.flatten(0, 1), torch.kron(torch.eye(len(x)).to(x), noise)
        covariance = phi @ phi.mT + noise + 0.05 * torch.eye(len(phi)).to(x)
        return phi, covariance

    phi, covariance = dense()
    zero = torch.zeros(len(phi), dtype=torch.float64)
    law = torch.distributions.MultivariateNormal(zero, covariance)
    expected, value = law.log_prob(y.flatten()), model.log_marginal_likelihood()
    assert value.item() == pytest.approx(expected.item(), abs=1e-6)
    parameters = [kernel.raw_depths, kernel.raw_variances]
    pairs = (torch.autograd.grad(v, parameters) for v in (value, expected))
    for found, by_hand in zip(*pairs, strict=True):
        assert torch.allclose(found, by_hand, rtol=1e-7, atol=1e-7)
    at_z = expansion.features(z)
    gain = torch.linalg.solve(covariance, phi @ at_z.mT).mT
    field = model.posterior()
    assert torch.allclose(field.mean(z).flatten(), gain @ y.flatten(), atol=1e-8)
    variance = (at_z @ at_z.mT - gain @ phi @ at_z.mT).diagonal().unflatten(0, (10, 3))
    assert torch.allclose(field.variance(z), variance + delta.diagonal(), atol=1e-8)


def background():
    return gpytorch.kernels.MultitaskKernel(
        gpytorch.kernels.ConstantKernel(), num_tasks=3, rank=0
    ).double()


SUMS = {
    "both sides": lambda: harmonic("both", 1),
    "curl-free": lambda: harmonic("below", 1) + gp_orff.CurlFreeKernel(num_dims=3).double(),
    "constant": lambda: harmonic("above", 1) + background(),
}


@pytest.mark.parametrize("name", SUMS)
def test_sums_with_other_kernels(name):
    (x, y), z, kernel = field_data(), points(5, seed=4), SUMS[name]()
    rule = gp_orff.Grid(DOMAIN, tolerance=1e-6, max_features=6000)
    exact, waves = (model_of(kernel, r).condition(x, y) for r in (EXACT, rule))
    values = [model.log_marginal_likelihood().item() for model in (exact, waves)]
    assert values[1] == pytest.approx(values[0], abs=0.05)
    first, second = (model.posterior() for model in (exact, waves))
    assert torch.allclose(first.mean(z), second.mean(z), atol=1e-2)
    assert torch.allclose(first.variance(z), second.variance(z), rtol=1e-2)


def test_a_fit_update_and_file(tmp_path):
    """Of features; readings below all others rebuild the waves."""
    x, y = field_data(200)
    auto = gp_orff.Auto(exact_values=0, max_features=1500)
    mean = gpytorch.means.MultitaskMean(gpytorch.means.ZeroMean(), 3)
    model = gp_orff.VectorFieldGP(gp_orff.HarmonicKernel(1), frequencies=auto, mean=mean)
    model.fit(x, y, progress=False)
    lower = x[:4] * torch.tensor([1.0, 1.0, 0.0]) - torch.tensor([0.0, 0.0, 0.05])
    model.update(lower, y[:4])
    assert model.state.inference.draws[0].lattice.domain[0, 2] <= -0.05
    model.save(tmp_path / "field.pt")
    loaded = gp_orff.VectorFieldGP.load(tmp_path / "field.pt")
    assert torch.allclose(loaded.posterior().mean(x), model.posterior().mean(x), atol=1e-10)
    with pytest.raises(ValueError, match="expected points inside"):
        model.posterior().mean(x - torch.tensor([0.0, 0.0, 50.0]))
    with pytest.raises(NotImplementedError, match="of a HarmonicKernel"):
        _ = model.statistics
    up = model.posterior().variance(x[:5] + torch.tensor([0.0, 0.0, 30.0]))
    assert (up < 0.2 * model.posterior().variance(x[:5] + torch.tensor([0.0, 0.0, 1.0]))).all()


@pytest.mark.slow
def test_sample_paths_have_the_moments_of_the_posterior():
    """Within 5/√M standard deviations for M = 1000, by features and under the exact kernel."""
    (x, y), z = field_data(60), points(4, seed=4)
    for rule in (EXACT, None):
        field = model_of(harmonic("below", 1), rule).condition(x, y).posterior()
        paths = field.sample_paths(1000, seed=0)
        sd = field.variance(z).sqrt()
        assert ((paths(z).mean(0) - field.mean(z)).abs() < 5 * sd / 1000**0.5).all()
        assert torch.allclose(paths(z).std(0), sd, rtol=0.12)


def test_observations_of_derivatives():
    """A known Jacobian narrows the posterior, by features as under the exact kernel."""
    (x, y), z = field_data(40), points(5, seed=4)
    variances = []
    for rule in (EXACT, None):
        model = model_of(harmonic("below", 1), rule).condition(x, y)
        model.observe(z, torch.zeros(5, 9), gp_orff.Jacobian(), noise=0.01)
        variances.append(model.posterior().variance(z))
    assert torch.allclose(*variances, rtol=1e-3)


def test_what_has_no_features():
    kernel = harmonic()
    for rule in (gp_orff.MonteCarlo(64), gp_orff.QuasiMonteCarlo(64), gp_orff.Grid(spacing=1.0)):
        with pytest.raises((NotImplementedError, ValueError), match="HarmonicKernel"):
            gp_orff.ORFFKernel(kernel, rule)
    with pytest.raises(ValueError, match="side of the sources"):
        gp_orff.ORFFKernel(kernel, gp_orff.Grid(((0.0, 1.0), (0.0, 1.0), (-9.0, 1.0))))
    time = gpytorch.kernels.RBFKernel(active_dims=(3,)).double()
    product = harmonic(active_dims=(0, 1, 2)) * time
    with pytest.raises(NotImplementedError, match="product"):
        gp_orff.ORFFKernel(product, gp_orff.Grid((*DOMAIN, (0.0, 1.0))))
    field = model_of(kernel).condition(*field_data(30)).posterior()
    for symbol in (gp_orff.CurlFreePart(), gp_orff.VectorPotential()):
        with pytest.raises(NotImplementedError, match=type(symbol).__name__):
            field.mean(points(2), symbol)


def test_depths_outside_the_range_warn():
    kernel = harmonic("below", 1)
    waves = features(kernel, 1e-4, lengthscale_range=(0.7, 1.4))
    kernel.depths = 0.5 * kernel.depths
    with pytest.warns(gp_orff.GridWarning, match="a depth is 0.5"):
        waves(points(3)).to_dense()


def test_budgets_are_kept():
    counts = []
    for kernel, budget in (
        (harmonic("both"), 900),
        (harmonic("below") + gp_orff.CurlFreeKernel(num_dims=3).double(), 2000),
    ):
        waves = features(kernel, 1e-8, max_features=budget)
        counts.append((waves.num_features, budget))
    assert all(budget / 4 < count <= budget for count, budget in counts)
    assert all(a != b for a, b in combinations(counts, 2))


def test_rounding_tells_nothing_of_a_mean():
    """Readings along u tell of the mean along u, in outputs of any units; rounding leaves a little
    information across it, and any value there."""
    units, u = torch.tensor([1.0, 1e3, 1e-3]).double(), torch.tensor([0.1, 0.7, -0.7]).double()
    rounding = torch.tensor([[1.0, 2.0, 3.0], [2.0, -1.0, 1.0], [3.0, 1.0, 2.0]]).double()
    information = 1e4 * torch.outer(u, u) + 1e-4 * rounding
    y = information @ (5.0 * u) + torch.tensor([0.1, -0.1, 0.2])
    for scale in (torch.ones(3).double(), units):
        quad = torch.zeros(4, 4).double()
        quad[1:, 1:] = scale[:, None] * information * scale
        quad[1:, 0] = quad[0, 1:] = scale * y
        seen = scale[:, None] * torch.outer(u, u) * scale
        evidence = Evidence(quad, torch.zeros(()), seen)
        mean, root = evidence.best_mean(), evidence.mean_root()
        assert (scale * u) @ mean == pytest.approx(5.0 * (u @ u).item(), rel=1e-3)
        assert mean.norm() < 1.1 * 5.0 * (u @ u) / (scale * u).norm()
        assert (root @ root.mT).trace() < 1.1 / (1e4 * (scale * u).square().sum())


SYMBOLS_OF_FEW = {
    "component": gp_orff.Component([0.0, 0.6, 0.8]),
    "reduced to the pole": gp_orff.ReductionToPole([0.0, 0.5, -1.0]),
    "mean over boxes": gp_orff.BoxAverage((0.1, 0.1, 0.1)),
    "derivatives": gp_orff.Jacobian(num_dims=3),
}


@pytest.mark.parametrize("name", SYMBOLS_OF_FEW)
def test_symbols_have_the_variance_that_few_waves_lack(name):
    """At the mean height 0.5, against 1500 waves. What 28 waves lack is 3 to 15 % of the variance;
    it is told within a fifth, since the quadrature of so few is not exact below the cut-off."""
    symbol, space = SYMBOLS_OF_FEW[name], (0, 1, 2)
    kernel, draws = harmonic("both", 1), {}
    for count, tolerance in ((60, 1e-4), (3000, 1e-7)):
        rule = gp_orff.Grid(((0.0, 1.0),) * 3, tolerance=tolerance, max_features=count)
        draws[count] = draw(kernel, rule, 3)
    x = points(5)
    x[:, 2] = 0.5

    def variance(count):
        expansion = expand(kernel, draws[count], 3).double()
        return apply_symbol(symbol, expansion, space).features(x).square().sum(-1).mean()

    delta, common = truncated_variance(symbol, kernel, draws[60], space)
    missing = variance(3000) - variance(60)
    assert missing > 0.02 * variance(3000)
    assert (delta.diagonal().mean() - missing).abs() < 0.2 * missing
    assert not common.any()
