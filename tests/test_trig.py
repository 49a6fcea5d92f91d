"""Products with trigonometric columns against plain dense algebra, and their gradients."""

import pytest
import torch
from torch.autograd import gradcheck

from gp_orff.data.statistics import Statistics
from gp_orff.features import chunked
from gp_orff.features.columns import TrigColumns


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
    gram, cross = chunked.moments(x, omega, y)
    torch.testing.assert_close(gram, phi.mT @ phi)
    torch.testing.assert_close(cross, phi.mT @ y)
    torch.testing.assert_close(chunked.adjoint(x, omega, y), phi.mT @ y)
    torch.testing.assert_close(chunked.apply(x, omega, w), phi @ w)


@pytest.mark.usefixtures("chunks_of")
@pytest.mark.parametrize("batch", [(), (2,)])
def test_gradients(batch):
    x, omega, y, w = inputs(batch)
    assert gradcheck(chunked.moments, (x, omega, y))
    assert gradcheck(chunked.adjoint, (x, omega, y))
    assert gradcheck(chunked.apply, (x, omega, w))


def test_only_the_gradients_that_are_needed():
    x, omega, y, _ = inputs()
    gram, cross = chunked.moments(x.detach(), omega, y.detach())
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
    whole = Statistics.of(x, y, TrigColumns(omega))
    parts = [
        Statistics.of(x[rows], y[rows], TrigColumns(omega)) for rows in torch.randperm(40).split(13)
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
    statistics = Statistics.of(x, y, TrigColumns(omega))
    assert statistics.gram.dtype == statistics.cross.dtype == torch.float64
    expected = Statistics.of(x.double(), y.double(), TrigColumns(omega.double()))
    torch.testing.assert_close(statistics.gram, expected.gram, rtol=1e-14, atol=1e-12)
