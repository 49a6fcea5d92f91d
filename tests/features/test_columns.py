"""Several families of columns, compared with products of dense matrices of columns."""

import copy

import gpytorch
import pytest
import torch
from gpytorch.kernels import RBFKernel
from torch.autograd import gradcheck

import gp_orff
from gp_orff.data.patterns import Components
from gp_orff.data.reading import Options, read
from gp_orff.data.statistics import FieldStatistics, Statistics, differentiable_statistics
from gp_orff.features import chunked, lattice
from gp_orff.features.columns import SideBySide, TrigColumns, side_by_side
from gp_orff.features.expansion import FeatureExpansion, apply_symbol
from gp_orff.features.lattice import LatticeColumns
from gp_orff.features.phases import Phases
from gp_orff.inference.posteriors import halves
from tests.support import oracles
from tests.support.fields import draw
from tests.support.models import vector_gp


def families(omega=None):
    """Random frequencies, one of them zero, and two lattices."""
    omega = torch.cat([torch.zeros(1, 2), draw(4, 2)]).double() if omega is None else omega
    near, far = torch.tensor([0.7, 0.5]).double(), torch.tensor([0.9, 1.1]).double()
    indices = torch.tensor([[0, 0], [0, 1], [1, -1], [1, 0]])
    first = LatticeColumns.of(indices, near, draw(2, seed=7))
    return SideBySide((TrigColumns.of(omega), first, LatticeColumns.of(indices[1:], far, far)))


@pytest.fixture(params=["whole", "uneven_chunks_and_transforms"])
def sizes(request, monkeypatch):
    if request.param != "whole":
        monkeypatch.setitem(chunked._CHUNK_BYTES, "cpu", 8 * 24 * 7)
        monkeypatch.setattr(lattice, "_FEW", 0)


@pytest.mark.usefixtures("sizes")
@pytest.mark.parametrize("batch", [(), (3,)])
def test_products_equal_dense_algebra(batch):
    phi, x, y = families(), draw(*batch, 40, 2), draw(*batch, 40, 2, seed=1)
    w = draw(*batch, phi.num_columns, 3, seed=2)
    written = torch.cat([own.values(x) for own in phi.families], dim=-1)
    torch.testing.assert_close(phi.values(x), written)
    gram, cross, total = phi.moments(x, y)
    torch.testing.assert_close(gram, written.mT @ written, rtol=0, atol=1e-9)
    torch.testing.assert_close(cross, written.mT @ y, rtol=0, atol=1e-9)
    torch.testing.assert_close(total, written.sum(-2), rtol=0, atol=1e-9)
    torch.testing.assert_close(phi.adjoint(x, y), written.mT @ y, rtol=0, atol=1e-9)
    torch.testing.assert_close(phi.apply(x, w), written @ w, rtol=0, atol=1e-9)
    assert phi.num_columns == written.shape[-1] == 24


@pytest.mark.usefixtures("sizes")
def test_weighted_sums_equal_dense_algebra():
    phi, x, y, weights = families(), draw(40, 2), draw(40, 2, seed=1), draw(40, 3, seed=2).exp()
    grams, cross, sums = phi.sums(x, y, weights)
    written = phi.values(x)
    for gram, total, weight in zip(grams, sums, weights.mT, strict=True):
        expected = written.mT @ (weight[:, None] * written)
        torch.testing.assert_close(phi.gram(gram), expected, rtol=0, atol=1e-9)
        torch.testing.assert_close(total, written.mT @ weight, rtol=0, atol=1e-9)
    torch.testing.assert_close(cross, written.mT @ y, rtol=0, atol=1e-9)
    nothing, *_ = phi.sums(x[:0], y[:0], weights[:0])[0]
    assert torch.equal(phi.gram(nothing), torch.zeros(24, 24).double())


@pytest.mark.usefixtures("sizes")
def test_gradients():
    x, omega, y = draw(4, 2).requires_grad_(), draw(2, 2, seed=3).requires_grad_(), draw(4, 2)
    assert gradcheck(lambda x, omega: families(omega).moments(x, y), (x, omega), fast_mode=True)
    assert gradcheck(lambda omega: families(omega).sums(x.detach(), y, y)[0], omega, fast_mode=True)


def test_float32_data_is_accumulated_in_float64():
    x, y, omega = draw(2000, 2).float(), draw(2000, 2).float(), draw(3, 2).float()
    found = Statistics.of(x, y, families(omega)).gram
    expected = Statistics.of(x.double(), y.double(), families(omega.double())).gram
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-11)


def test_a_second_visit_gives_the_derivative():
    omega, x, y = draw(3, 2).requires_grad_(), draw(30, 2, seed=1), draw(30, 2, seed=2)
    parts = read(x, y, 2, Options())
    once = FieldStatistics.of(parts, families(omega)).tensors
    twice = differentiable_statistics(lambda: iter(parts), families(omega)).tensors
    for name, own in once.items():
        expected = torch.autograd.grad(own.square().sum(), omega, retain_graph=True)
        found = torch.autograd.grad(twice[name].square().sum(), omega, retain_graph=True)
        torch.testing.assert_close(found, expected)


def test_statistics_add_are_selected_and_saved():
    phi, x, y = families(), draw(60, 2), draw(60, 2, seed=1)
    whole, first, second = (
        FieldStatistics.of(read(x[rows], y[rows], 2, Options()), phi)
        for rows in (slice(None), slice(20), slice(20, None))
    )
    for (columns, _), added in zip(phi.halves(), (first + second, second + first), strict=True):
        (own,), (expected,) = added.select(columns).groups.values(), whole.groups.values()
        chosen = phi.values(x)[:, columns]
        torch.testing.assert_close(own.phi.values(x), chosen)
        torch.testing.assert_close(own.gram, chosen.mT @ chosen, rtol=0, atol=1e-9)
        torch.testing.assert_close(own.cross, expected.cross[columns], rtol=0, atol=1e-9)
    again = FieldStatistics.from_plain(whole.plain())
    assert again.phi.same(phi)
    assert phi.same(phi.to(torch.device("cpu")))
    assert not phi.same(SideBySide(phi.families[:2]))
    assert not phi.same(families(draw(5, 2, seed=9)))
    assert (again - first).num_values == second.num_values
    assert isinstance(next(iter(again.groups)).pattern, Components)


def expansion_on(phi, outputs=2):
    directions = draw(phi.num_columns, outputs, seed=5)
    return FeatureExpansion(phi, directions, torch.arange(phi.num_columns))


@pytest.mark.parametrize(
    "symbol",
    [gp_orff.Curl(), gp_orff.CurlFreePart(), gp_orff.BoxAverage(0.3), gp_orff.Divergence()],
    ids=lambda own: type(own).__name__,
)
def test_symbols_of_every_family(symbol):
    """The image of the whole is that of the families; derivatives are those of autograd."""
    phi, x, theta = families(), draw(6, 2), draw(24, 1, seed=6)
    expansion = expansion_on(phi)
    seen = apply_symbol(symbol, expansion, (0, 1))
    parts = expansion.directions.split(phi.counts)
    features = [
        apply_symbol(symbol, FeatureExpansion(own, m, torch.arange(len(m))), (0, 1)).features(x)
        for own, m in zip(phi.families, parts, strict=True)
    ]
    torch.testing.assert_close(seen.features(x), torch.cat(features, dim=-1))
    field = (seen.features(x) @ theta).reshape(6, -1)
    torch.testing.assert_close(phi.apply(x, seen.column_weights(theta)), field)
    if isinstance(symbol, gp_orff.Divergence):
        x = x.requires_grad_()
        values = (expansion.features(x) @ theta).reshape(6, 2)
        slopes = [torch.autograd.grad(values[:, i].sum(), x, retain_graph=True)[0] for i in (0, 1)]
        torch.testing.assert_close(field.squeeze(-1), slopes[0][:, 0] + slopes[1][:, 1])


def test_the_mean_of_a_kernel_over_space():
    expansion = expansion_on(families())
    x = 2000 * (torch.rand(400_000, 2, generator=torch.Generator().manual_seed(0)).double() - 0.5)
    phi = expansion.phi.values(x)
    measured = (phi.square().mean(0).unsqueeze(-1) * expansion.directions).mT @ expansion.directions
    error = (expansion.mean_variance() - measured).abs().max() / measured.diagonal().max()
    assert error < 5 * 0.5 / 400_000**0.5 * 2


def test_halves_keep_what_is_no_sample():
    expansion = expansion_on(families())
    x = draw(5, 2)
    first, second = (part.features(x) for part, _ in halves(expansion))
    whole = expansion.features(x)
    own, other = (set(columns.tolist()) for _, columns in halves(expansion))
    share = len(own - other) / len(own ^ other)
    average = share * first @ first.mT + (1 - share) * second @ second.mT
    torch.testing.assert_close(average, whole @ whole.mT)
    assert own | other == set(range(24))
    assert own & other == {0, 5, *range(10, 24)}  # the constant and the lattices


class Turned(Phases):
    """Of another transform, which frequencies that are written out do not join."""

    def __init__(self, omega):
        self.omega = omega
        self.tensors, self.num_frequencies = (omega,), len(omega)

    def rebuild(self, omega):
        return Turned(omega)

    def __call__(self, x):
        return x @ self.omega.mT

    select = point_gradient = gradients = zero = same = plain = None


def test_frequencies_that_are_written_out_become_one_family():
    random, first, second = families().families
    others = TrigColumns(Turned(draw(2, 2, seed=3)))
    parts = [first, random, SideBySide((second, others)), TrigColumns.of(draw(3, 2, seed=4))]
    phi, places = side_by_side(parts)
    assert [type(own) for own in phi.families] == [TrigColumns, *[LatticeColumns] * 2, TrigColumns]
    assert torch.equal(torch.cat(places).sort().values, torch.arange(phi.num_columns))
    x = draw(7, 2)
    for own, place in zip(parts, places, strict=True):
        torch.testing.assert_close(phi.values(x)[:, place], own.values(x))
    joined, _ = side_by_side([random, random])
    assert isinstance(joined, TrigColumns)


def test_kernels_on_grids_of_their_own_add_up():
    """In ExactGP: the posterior of dense algebra, each kernel on its lattice, and a check of the
    random features alone."""
    x, y, xs = draw(150, 2), draw(150, 2, seed=1), draw(5, 2, seed=2)
    curl_free = gp_orff.CurlFreeKernel(RBFKernel().double(), num_dims=2)
    rotational = copy.deepcopy(curl_free)
    rotational.base_kernel.lengthscale = 1.5
    grids = [gp_orff.Grid(domain=((-5.0, 5.0),) * 2, max_features=m) for m in (40, 60)]
    kernels = [gp_orff.ORFFKernel(curl_free, grids[0]), gp_orff.ORFFKernel(rotational, grids[1])]
    kernels.append(gp_orff.ORFFKernel(curl_free, gp_orff.MonteCarlo(20, seed=0)))
    model = vector_gp(x, y, kernels[0] + kernels[1] + kernels[2], 0.5, has_task_noise=False)
    covariance = model.covar_module(x).evaluate_kernel()
    kinds = [type(own) for own in covariance.latent.expansion.phi.families]
    assert kinds == [TrigColumns, LatticeColumns, LatticeColumns]
    model.eval()
    with torch.no_grad():
        posterior = model(xs)
        both = torch.cat([x, xs])
        dense = sum(own(both).to_dense() for own in kernels)
    noise = 0.5 * torch.eye(300).double()
    residuals = (y - model.mean_module(x)).flatten()
    mean, cov = oracles.condition(
        dense[300:, 300:], dense[300:, :300], dense[:300, :300] + noise, residuals
    )
    mean = mean + model.mean_module(xs).flatten()
    torch.testing.assert_close(posterior.mean.flatten(), mean.detach(), rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(posterior.covariance_matrix, cov, rtol=1e-8, atol=1e-8)
    mll = gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model.train())
    mll(model(x), y).backward()
    assert all(p.grad.isfinite().all() for p in curl_free.parameters())
