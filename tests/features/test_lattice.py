"""Non-uniform Fourier transforms and sums that use them, compared with direct sums."""

import copy
import pickle

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

import gp_orff
from gp_orff import nufft
from gp_orff.data.noise import Noise
from gp_orff.data.statistics import Statistics
from gp_orff.features import chunked, lattice
from gp_orff.features.assemble import expand
from gp_orff.features.columns import TrigColumns
from gp_orff.features.lattice import LatticeColumns
from gp_orff.inference.equations import equations_of_vectors
from gp_orff.inference.posteriors import PrimalPosterior
from tests.support.fields import draw
from tests.support.registry import CASES

MODES = [(5,), (3, 2), (2, 3, 1), (1, 2, 0, 2), (0,), (2, 1, 1, 1)]


def every_index(modes):
    axes = [torch.arange(-m, m + 1) for m in modes]
    return torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1).reshape(-1, len(modes))


def half_space(modes):
    points = every_index(modes)
    return points[len(points) // 2 :]  # zero and one of each pair ±k


def columns(modes, **kwargs):
    spacing = torch.linspace(0.4, 0.9, len(modes)).double()
    return LatticeColumns.of(half_space(modes), spacing, draw(len(modes), seed=9), **kwargs)


@pytest.fixture(params=["written_out", "transforms"])
def size(request, monkeypatch):
    """Few points are written out; here also they go through the transforms."""
    if request.param == "transforms":
        monkeypatch.setattr(lattice, "_FEW", 0)


@pytest.mark.parametrize("modes", MODES, ids=str)
def test_transforms_equal_sums_written_out(modes, monkeypatch):
    """FINUFFT is asked for 1e-12 relative to the sum of the strengths; so is the tolerance."""
    phases, strengths = 3 * draw(40, len(modes)), draw(40, 3, seed=1)
    waves = torch.exp(1j * (phases @ every_index(modes).double().mT))  # (N, q)
    monkeypatch.setattr(nufft, "_POINTS", 17)
    forward = nufft.type1(phases, strengths, modes)
    assert forward.shape == (3, *(2 * m + 1 for m in modes))
    expected = (strengths.mT.to(waves) @ waves).reshape(forward.shape)
    torch.testing.assert_close(forward, expected, rtol=0, atol=1e-10)
    coefficients = torch.complex(draw(*forward.shape, seed=2), draw(*forward.shape, seed=3))
    back = nufft.type2(phases, coefficients)
    expected = (waves @ coefficients.flatten(1).mT).real
    torch.testing.assert_close(back, expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("modes", MODES, ids=str)
def test_products_of_exponentials_are_the_same_transforms(modes, monkeypatch):
    """The form that runs on a GPU."""
    monkeypatch.setattr(nufft, "_CHUNK_BYTES", 48 * 64)
    phases, strengths = 3 * draw(40, len(modes)), draw(40, 3, seed=1)
    forward = nufft.type1(phases, strengths, modes)
    total = nufft.type1_by_products(phases, strengths, modes, torch.zeros_like(forward))
    torch.testing.assert_close(total, forward, rtol=0, atol=1e-10)
    out = nufft.type2_by_products(phases, forward, torch.empty_like(strengths))
    torch.testing.assert_close(out, nufft.type2(phases, forward), rtol=0, atol=1e-8)


@pytest.mark.parametrize("modes", MODES, ids=str)
def test_statistics_equal_products_of_columns(modes, size):
    phi = columns(modes)
    x, y, w = 2 * draw(60, len(modes)), draw(60, 2, seed=1), draw(phi.num_columns, 3, seed=2)
    written = chunked.trig(x - phi.origin, phi.phases)
    found = Statistics.of(x, y, phi)
    torch.testing.assert_close(found.gram, written.mT @ written, rtol=0, atol=1e-9)
    torch.testing.assert_close(found.cross, written.mT @ y, rtol=0, atol=1e-9)
    torch.testing.assert_close(found.column_sum, written.sum(0), rtol=0, atol=1e-9)
    torch.testing.assert_close(phi.apply(x, w), written @ w, rtol=0, atol=1e-9)
    torch.testing.assert_close(phi.values(x), written)


def test_a_batch_is_a_loop(size):
    phi = columns((3, 2))
    x, y, w = draw(4, 30, 2), draw(4, 30, 2, seed=1), draw(4, phi.num_columns, 1, seed=2)
    gram, cross, _ = phi.moments(x, y)
    shared = phi.adjoint(x[0], y)  # one set of points, several of values
    for i in range(4):
        phi_i = columns((3, 2))
        expected = phi_i.moments(x[i], y[i])[:2]
        torch.testing.assert_close((gram[i], cross[i]), expected, rtol=0, atol=1e-10)
        torch.testing.assert_close(phi.apply(x, w)[i], phi_i.apply(x[i], w[i]))
        torch.testing.assert_close(shared[i], phi_i.adjoint(x[0], y[i]), rtol=0, atol=1e-10)


@pytest.mark.slow
def test_derivatives_of_transforms(size):
    phi, x = columns((2, 1)), draw(12, 2)
    y, w = draw(12, 2, seed=1).requires_grad_(), draw(phi.num_columns, 2, seed=2).requires_grad_()
    for function, value in ((phi.adjoint, y), (phi.apply, w)):
        assert gradcheck(lambda v, f=function: f(x, v), value, atol=1e-6)
        assert gradgradcheck(lambda v, f=function: f(x, v), value, atol=1e-6)


def test_derivatives_in_the_points(size):
    phi, y, w = columns((2, 1)), draw(8, 2, seed=1), None
    x, w = draw(8, 2).requires_grad_(), draw(phi.num_columns, 2, seed=2)
    assert gradcheck(lambda x: (*phi.moments(x, y), phi.adjoint(x, y), phi.apply(x, w)), x)


def test_the_gram_matrix_is_kept_for_the_same_points():
    phi, x, y = columns((3, 2)), draw(30, 2), draw(30, 2, seed=1)
    first, kept = phi.moments(x, y)[0], phi.cache.moments
    assert torch.equal(phi.moments(x.clone(), 2 * y)[0], first)
    assert phi.cache.moments is kept
    x[0] += 1.0  # in place: no longer the same points
    assert not torch.equal(phi.moments(x, y)[0], first)
    assert phi.cache.moments is not kept
    assert pickle.loads(pickle.dumps(phi.cache)).moments is None
    assert copy.deepcopy(phi.cache).x is None


def test_points_far_from_zero_keep_their_digits():
    """Map coordinates: the columns are centred."""
    spacing, far = torch.tensor([1e-3, 1e-3]).double(), torch.tensor([5e5, 6e6]).double()
    x, y = 1e3 * draw(5000, 2), draw(5000, 2, seed=1)
    near = LatticeColumns.of(half_space((6, 6)), spacing, torch.zeros(2).double())
    away = LatticeColumns.of(half_space((6, 6)), spacing, far)
    for here, there in zip(near.moments(x, y), away.moments(x + far, y), strict=True):
        torch.testing.assert_close(here, there, rtol=0, atol=1e-6)


def test_memory_is_asked_for_in_pieces(monkeypatch):
    """Many points: the same sums."""
    phi, x, y = columns((4, 3)), draw(3000, 2), draw(3000, 2, seed=1)
    monkeypatch.setattr(lattice, "_FEW", 0)
    whole = phi.moments(x, y)
    monkeypatch.setattr(nufft, "_POINTS", 256)
    pieces = columns((4, 3)).moments(x, y)
    torch.testing.assert_close(pieces, whole, rtol=0, atol=1e-9)
    plain = TrigColumns.of(phi.omega).moments(x - phi.origin, y)
    torch.testing.assert_close(pieces, plain, rtol=0, atol=1e-9)


@pytest.mark.parametrize("modes", MODES, ids=str)
def test_quadratic_forms_are_folded_into_one_transform(modes):
    phi, x = columns(modes), 2 * draw(50, len(modes))
    form = draw(phi.num_columns, phi.num_columns, seed=1)
    form = form + form.mT
    written = phi.values(x)
    expected = ((written @ form) * written).sum(-1)
    torch.testing.assert_close(phi.quadratic(x, form), expected, rtol=0, atol=1e-8)


@pytest.mark.parametrize("kernel", ["helmholtz", "curl_free", "field_separable_and_constant"])
def test_variances_at_many_points_are_those_at_few(kernel, monkeypatch):
    case = CASES[kernel]()
    grid = gp_orff.Grid(domain=((-2.0, 2.0),) * 2, max_features=120)
    orff = gp_orff.ORFFKernel(case.kernel, grid, num_dims=2)
    expansion = expand(orff.base_kernel, orff.frequencies, 2)
    x, y, xs = draw(400, 2), draw(400, 2, seed=1), draw(300, 2, seed=2)
    noise = Noise.of(torch.eye(2).double() * 0.1)
    posterior = equations_of_vectors(expansion, x, y, noise).posterior(torch.zeros(2).double())[0]
    posterior = posterior.detached()
    assert isinstance(posterior, PrimalPosterior)
    calls, original = [], LatticeColumns.quadratic
    monkeypatch.setattr(
        LatticeColumns, "quadratic", lambda *args: calls.append(1) or original(*args)
    )
    many = posterior.variance(xs)
    assert len(calls) == 2  # one for each output
    few = torch.cat([posterior.variance(points) for points in xs.split(3)])
    assert len(calls) == 2
    torch.testing.assert_close(many, few, rtol=1e-9, atol=1e-11)
