"""Grids for kernels with line spectra, compared with exact kernels and dense algebra."""

import warnings
from dataclasses import replace

import pytest
import torch
from gpytorch.kernels import ConstantKernel, CosineKernel, MultitaskKernel, RBFKernel

import gp_orff
from gp_orff.features import lattice
from gp_orff.features.assemble import draw as draw_frequencies
from gp_orff.features.assemble import expand
from gp_orff.features.expansion import apply_symbol
from gp_orff.features.lines import LineColumns
from gp_orff.features.truncation import truncated_variance
from gp_orff.kernels.derivatives import SymbolCovariance
from gp_orff.kernels.tree import spectra_of, terms
from tests.support.fields import draw
from tests.support.lines import cosine, in_space, periodic
from tests.support.models import evidence, vector_gp

BOX = ((0.0, 1.0),) * 3
TIME = (2,)


def scalar():
    return RBFKernel(ard_num_dims=2, active_dims=(0, 1)).double()


def of_time(lengthscale=1.0):
    kernel = RBFKernel(active_dims=TIME).double()
    kernel.lengthscale = lengthscale
    return kernel


def cosines():
    return in_space() * cosine(active_dims=TIME), in_space() * cosine(0.4, active_dims=TIME)


KERNELS = {
    "a season": lambda: in_space() * periodic(active_dims=TIME),
    "two tides": lambda: sum(cosines()[1:], cosines()[0]),
    "a tide and eddies": lambda: cosines()[0] + in_space() * of_time(),
    "two periods": lambda: in_space() * (cosine(active_dims=TIME) * cosine(0.4, active_dims=TIME)),
    "a season that changes": lambda: scalar() * periodic(active_dims=TIME) * of_time(),
    "separable": lambda: MultitaskKernel(scalar() * periodic(active_dims=TIME), num_tasks=2),
    "a season of a number": lambda: scalar() * periodic(active_dims=TIME) + of_time(),
    "time alone": lambda: periodic(active_dims=TIME),
    "and a constant": lambda: in_space() * (cosine(active_dims=TIME) + ConstantKernel().double()),
    "potential of a season": lambda: (
        gp_orff.CurlFreeKernel(scalar(), num_dims=2, active_dims=(0, 1))
        * periodic(active_dims=TIME)
    ),
}


@pytest.mark.parametrize("name", KERNELS)
def test_features_have_the_covariance_of_the_kernel(name):
    kernel = KERNELS[name]().double()
    grid = gp_orff.Grid(domain=BOX, tolerance=1e-7, lengthscale_range=(1.0, 1.0))
    orff = gp_orff.ORFFKernel(kernel, grid, num_dims=3)
    generator = torch.Generator().manual_seed(0)
    x, z = (torch.rand(n, 3, generator=generator).double() for n in (7, 5))
    exact = kernel(x, z).to_dense()
    assert (orff(x, z).to_dense() - exact).abs().max() < 2e-6 * exact.abs().max()
    assert all(own.truncated < 2e-6 for own in orff.accuracy())


def test_a_budget_takes_fewer_lines_and_frequencies():
    """And what it leaves out is added to the variance: K(x, x) is that of the exact kernel."""
    kernel = KERNELS["a season"]()
    orff = gp_orff.ORFFKernel(kernel, gp_orff.Grid(domain=BOX, max_features=400), num_dims=3)
    x = draw(3, 3).sigmoid()
    assert orff.num_features <= 400
    whole = orff(x).to_dense()
    torch.testing.assert_close(whole.diagonal(), kernel(x).to_dense().diagonal(), rtol=1e-2, atol=0)
    assert max(own.truncated for own in orff.accuracy()) > 1e-4


@pytest.mark.parametrize("most", [40, 400, 4000])
def test_a_budget_is_shared_by_lines_and_lattice(most):
    """The error of both together is at most that of other divisions, within a factor: those of
    the lattice with one to nine lines, by the exact variance."""
    kernel = scalar() * periodic(lengthscale=0.3, active_dims=TIME)
    grid = gp_orff.Grid(domain=BOX, max_features=most, lengthscale_range=(1.0, 1.0))
    orff = gp_orff.ORFFKernel(kernel, grid, num_dims=3)
    assert orff.num_features <= most
    (found,) = orff.accuracy()
    shares = []
    for count in range(1, 10):
        part = replace(grid, max_features=max(most // (2 * count - 1), 1))
        try:
            (space,) = gp_orff.ORFFKernel(scalar(), part, num_dims=3).accuracy()
        except ValueError:
            continue
        weights = gp_orff.spectrum(periodic(lengthscale=0.3)).lines(count)[1]
        shares.append(1 - (1 - space.truncated) * weights.sum().item())
    assert found.truncated < 4 * min(shares) + 1e-5


SYMBOLS = {
    "field": gp_orff.symbols.base.Identity(),
    "divergence": gp_orff.Divergence(),
    "jacobian": gp_orff.Jacobian(num_dims=2),
    "stream function": gp_orff.StreamFunction([0.1, 0.2]),
}


@pytest.mark.parametrize("name", SYMBOLS)
def test_symbols_and_what_a_grid_leaves_out_of_them(name):
    """Features of Q f and truncated variance add up to the variance of Q f, by closed forms."""
    symbol, kernel, space = SYMBOLS[name], KERNELS["a season"](), (0, 1)
    grid = gp_orff.Grid(domain=BOX, data=BOX, max_features=1500, lengthscale_range=(1.0, 1.0))
    draws = draw_frequencies(kernel, grid, 3)
    expansion = expand(kernel, draws, 3)
    x = draw(1, 3).sigmoid()
    white, _ = truncated_variance(symbol, kernel, draws, space)
    image = apply_symbol(symbol, expansion, space).features(x)
    reference = symbol.reference_points(x, space)
    if reference is not None:
        image = image - apply_symbol(symbol, expansion, space).features(reference)
        white = 2 * white
    exact = SymbolCovariance(kernel, symbol, symbol, space).relative(x, x)
    torch.testing.assert_close(image @ image.mT + white, exact, rtol=2e-2, atol=1e-3)


@pytest.fixture(params=["few", "transforms"])
def sizes(request, monkeypatch):
    if request.param == "transforms":
        monkeypatch.setattr(lattice, "_FEW", 0)


@pytest.mark.usefixtures("sizes")
def test_products_equal_dense_algebra():
    """Every sum, against products of cosines and sines that are written out."""
    indices = torch.tensor([[0, 0, 0], [0, 1, 0], [1, -1, 0], [2, 0, 1]])
    step, origin = torch.tensor([0.7, 0.5, 0.3]).double(), draw(1, 3)[0]
    nu = torch.tensor([[0.0, 0, 0], [0, 0, 1.3], [0, 0, 2.1]]).double()
    phi = LineColumns(lattice.LatticeColumns.of(indices, step, origin), nu)
    x, y, w = draw(30, 3), draw(30, 2, seed=1), draw(phi.num_columns, 3, seed=2)
    theta, phase = (x - origin) @ (indices * step).mT, (x - origin) @ nu.mT
    waves = torch.cat([theta.cos(), theta.sin()], dim=-1)
    factors = [phase[:, 0].cos(), *phase[:, 1:].cos().mT, *phase[:, 1:].sin().mT]
    dense = torch.cat([m[:, None] * waves for m in factors], dim=-1)
    torch.testing.assert_close(phi.values(x), dense, rtol=0, atol=1e-12)
    a = draw(30, 2, seed=3).exp()
    grams, cross, sums = phi.sums(x, y, a)
    for gram, total, weight in zip(grams, sums, a.mT, strict=True):
        torch.testing.assert_close(gram, dense.mT @ (weight[:, None] * dense), rtol=0, atol=1e-10)
        torch.testing.assert_close(total, dense.mT @ weight, rtol=0, atol=1e-10)
    torch.testing.assert_close(cross, dense.mT @ y, rtol=0, atol=1e-10)
    torch.testing.assert_close(phi.apply(x, w), dense @ w, rtol=0, atol=1e-10)
    gram, cross, total = phi.moments(x, y)
    torch.testing.assert_close(gram, dense.mT @ dense, rtol=0, atol=1e-10)
    partner, sign = phi.quarter_turn
    turned = torch.cat([theta.sin(), -theta.cos()], dim=-1)
    turned = torch.cat([m[:, None] * turned for m in factors], dim=-1)
    torch.testing.assert_close(sign * phi.values(x)[:, partner], turned, rtol=0, atol=1e-12)


def records(n=60, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(n, 3, generator=generator, dtype=torch.float64) * torch.tensor([1.0, 1.0, 9.0])
    return x, torch.randn(n, 2, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("name", ["a season", "two tides", "a tide and eddies"])
def test_posterior_on_a_grid_is_that_of_the_exact_kernel(name):
    (x, y), kernel = records(), KERNELS[name]()
    rule = gp_orff.Grid.for_data(x, tolerance=1e-9, lengthscale_range=(1.0, 1.0))
    features = gp_orff.ORFFKernel(kernel, rule, num_dims=3)
    models = [vector_gp(x, y, own, 0.1, has_task_noise=False) for own in (kernel, features)]
    posteriors = list(map(gp_orff.FieldPosterior.from_exact_gp, models))
    xs = x[:4] + 0.05
    (one, other) = posteriors
    torch.testing.assert_close(one.mean(xs), other.mean(xs), rtol=0, atol=1e-5)
    torch.testing.assert_close(one.variance(xs), other.variance(xs), rtol=1e-4, atol=1e-6)
    for symbol in ("divergence", "curl"):
        left, right = (getattr(own, symbol)(xs) for own in posteriors)
        torch.testing.assert_close(left.mean, right.mean, rtol=0, atol=1e-4)
        torch.testing.assert_close(left.variance, right.variance, rtol=1e-3, atol=1e-5)
    left, right = (evidence(model).item() for model in models)
    assert left == pytest.approx(right, rel=1e-7)


def test_lines_reach_beyond_the_record():
    """A season of the next century; space is still bounded, and so are eddies."""
    (x, y), kernel = records(), KERNELS["a season"]()
    grid = gp_orff.Grid.for_data(x, max_features=600)
    field = gp_orff.VectorFieldGP(kernel, frequencies=grid).condition(x, y).posterior()
    later = x[:3] + torch.tensor([0, 0, 1000 * 1.3])
    torch.testing.assert_close(field.mean(later), field.mean(x[:3]), rtol=1e-6, atol=1e-8)


def test_a_change_of_the_period_needs_another_grid():
    kernel = KERNELS["a season"]()
    (draw_,) = draw_frequencies(kernel.field_kernel.curl_free * kernel.scalar_kernel, GRID, 3)
    (term,) = terms(kernel.field_kernel.curl_free * kernel.scalar_kernel)
    assert draw_.ratio_outside_range(spectra_of(term)) is None
    kernel.scalar_kernel.period_length = torch.tensor(1.3 * 1.01).double()
    (term,) = terms(kernel.field_kernel.curl_free * kernel.scalar_kernel)
    assert draw_.ratio_outside_range(spectra_of(term)) == pytest.approx(1.01)
    kernel = KERNELS["a season"]()
    kernel.scalar_kernel.lengthscale = 0.1
    (term,) = terms(kernel.field_kernel.curl_free * kernel.scalar_kernel)
    assert draw_.ratio_outside_range(spectra_of(term)) < 0.7


def test_a_period_that_a_grid_does_not_follow_warns():
    kernel = KERNELS["a season"]()
    orff = gp_orff.ORFFKernel(kernel, gp_orff.Grid(domain=BOX, tolerance=1e-3), num_dims=3)
    x = draw(3, 3).sigmoid()
    before = orff(x).to_dense()
    kernel.scalar_kernel.period_length = torch.tensor(1.7).double()
    with pytest.warns(gp_orff.GridWarning, match="a period"):
        assert torch.equal(orff(x).to_dense(), before)
    orff.redraw()
    exact = kernel(x).to_dense()
    assert (orff(x).to_dense() - exact).abs().max() < 0.02 * exact.max()


GRID = gp_orff.Grid(domain=BOX, max_features=500)


def test_what_is_refused():
    across = in_space() * periodic(active_dims=(1,))
    expansion = expand(across, draw_frequencies(across, GRID, 3), 3)
    with pytest.raises(NotImplementedError, match="periodic in space"):
        apply_symbol(gp_orff.Divergence(), expansion, (0, 1))


def test_float32_kernels():
    kernel = in_space().float() * CosineKernel(active_dims=TIME)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        orff = gp_orff.ORFFKernel(kernel, GRID, num_dims=3)
        x = draw(4, 3).sigmoid().float()
        assert orff(x).to_dense().dtype == torch.float32
