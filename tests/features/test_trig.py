"""Products with trigonometric columns and their gradients, compared with dense algebra."""

import pytest
import torch
from torch.autograd import gradcheck

from gp_orff.data.statistics import Statistics
from gp_orff.features import chunked
from gp_orff.features.columns import TrigColumns
from gp_orff.features.phases import LinearPhases, Phases
from tests.support.fields import draw


def inputs(batch=(), points=7, dims=2, frequencies=3, outputs=2):
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()

    x, omega = draw(*batch, points, dims), draw(frequencies, dims)
    return x, omega, draw(*batch, points, outputs), draw(2 * frequencies, outputs)


@pytest.fixture(params=[1, 2 * 8 * 6, 2**20], ids=["one_by_one", "uneven_chunks", "whole"])
def chunks_of(request, monkeypatch):
    monkeypatch.setitem(chunked._CHUNK_BYTES, "cpu", request.param)


@pytest.mark.usefixtures("chunks_of")
@pytest.mark.parametrize("batch", [(), (2,)])
def test_products_equal_dense_algebra(batch):
    x, omega, y, w = inputs(batch)
    phase = torch.einsum("...nd,kd->...nk", x, omega)
    phi = torch.cat([torch.cos(phase), torch.sin(phase)], dim=-1)
    phases = LinearPhases(omega)
    gram, cross = chunked.moments(x, phases, y)
    torch.testing.assert_close(gram, phi.mT @ phi)
    torch.testing.assert_close(cross, phi.mT @ y)
    torch.testing.assert_close(chunked.adjoint(x, phases, y), phi.mT @ y)
    torch.testing.assert_close(chunked.apply(x, phases, w), phi @ w)


@pytest.mark.usefixtures("chunks_of")
@pytest.mark.parametrize("batch", [(), (2,)])
def test_gram_matrices_of_several_blocks_of_rows(batch):
    """400 columns, with and without weights of the points."""
    x, omega, y, _ = inputs(batch, frequencies=200)
    phases, weights = LinearPhases(omega), draw(7, 3).square()
    phi = chunked.trig(x, phases)
    gram, _ = chunked.moments(x, phases, y)
    torch.testing.assert_close(gram, phi.mT @ phi)
    grams, _ = chunked.moments(x, phases, y, weights)
    for own, weight in zip(grams, weights.unbind(-1), strict=True):
        torch.testing.assert_close(own, phi.mT @ (weight.unsqueeze(-1) * phi))


def of_frequencies(product):
    """As a function of tensors alone."""
    return lambda x, omega, values: product(x, LinearPhases(omega), values)


@pytest.mark.usefixtures("chunks_of")
@pytest.mark.parametrize("batch", [(), (2,)])
def test_gradients(batch):
    x, omega, y, w = inputs(batch)
    assert gradcheck(of_frequencies(chunked.moments), (x, omega, y))
    assert gradcheck(of_frequencies(chunked.adjoint), (x, omega, y))
    assert gradcheck(of_frequencies(chunked.apply), (x, omega, w))


class Haar(Phases):
    """ω = diag(s) [[1, 1], [1, −1]] diag(t) by sums and differences, never written out."""

    num_frequencies = 2

    def __init__(self, s, t):
        self.tensors = s, t

    omega = zero = same = plain = None

    def rebuild(self, s, t):
        return Haar(s, t)

    def select(self, frequencies):
        raise NotImplementedError

    def __call__(self, x):
        s, t = self.tensors
        return s.mT * self._turned(t.mT * x)

    def point_gradient(self, grad):
        s, t = self.tensors
        return t.mT * self._turned(s.mT * grad)

    def gradients(self, x, grad):
        s, t = self.tensors
        by_s, by_t = grad * self._turned(t.mT * x), self._turned(s.mT * grad) * x
        return by_s.sum(-2, keepdim=True).mT, by_t.sum(-2, keepdim=True).mT

    def _turned(self, values):
        first, second = values.split(1, dim=-1)
        return torch.cat([first + second, first - second], dim=-1)


@pytest.mark.usefixtures("chunks_of")
@pytest.mark.parametrize("batch", [(), (2,)])
def test_phases_by_another_transform(batch):
    x, s, y, w = inputs(batch, dims=2, frequencies=2)
    s, t = s[:, :1].detach().requires_grad_(), s[:, 1:].detach().requires_grad_()
    omega = s * torch.tensor([[1.0, 1.0], [1.0, -1.0]]).double() * t.mT
    for product, values in ((chunked.moments, y), (chunked.adjoint, y), (chunked.apply, w)):
        expected = product(x, LinearPhases(omega), values)
        torch.testing.assert_close(product(x, Haar(s, t), values), expected)
        assert gradcheck(lambda x, s, t, v, f=product: f(x, Haar(s, t), v), (x, s, t, values))
    statistics = Statistics.of(x, y, TrigColumns(Haar(s, t)))
    torch.testing.assert_close(statistics.gram, Statistics.of(x, y, TrigColumns.of(omega)).gram)


def test_only_the_gradients_that_are_needed():
    x, omega, y, _ = inputs()
    gram, cross = chunked.moments(x.detach(), LinearPhases(omega), y.detach())
    (gram.sum() + cross.sum()).backward()
    assert x.grad is None
    assert omega.grad.abs().min() > 0


def test_chunks_cover_every_point_once():
    x = torch.zeros(1001, 2)
    rows = list(chunked.chunks(x, width=4096))
    assert len(rows) > 1
    assert torch.cat([torch.arange(1001)[r] for r in rows]).equal(torch.arange(1001))


def test_statistics_add_over_points():
    x, omega, y, _ = (t.detach() for t in inputs(points=40))
    whole = Statistics.of(x, y, TrigColumns.of(omega))
    parts = [
        Statistics.of(x[rows], y[rows], TrigColumns.of(omega))
        for rows in torch.randperm(40, generator=torch.Generator().manual_seed(0)).split(13)
    ]
    merged = parts[2] + parts[0] + parts[3] + parts[1]
    assert merged.count == whole.count == 40
    for name in ("gram", "cross", "second_moment"):
        torch.testing.assert_close(
            getattr(merged, name), getattr(whole, name), rtol=1e-12, atol=1e-12
        )
    torch.testing.assert_close(whole.second_moment, y.mT @ y)


def test_float32_data_is_accumulated_in_float64():
    x, omega, y, _ = (t.detach().float() for t in inputs(points=2000))
    statistics = Statistics.of(x, y, TrigColumns.of(omega))
    assert statistics.gram.dtype == statistics.cross.dtype == torch.float64
    expected = Statistics.of(x.double(), y.double(), TrigColumns.of(omega.double()))
    torch.testing.assert_close(statistics.gram, expected.gram, rtol=1e-14, atol=1e-12)
