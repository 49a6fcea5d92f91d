"""Coasts that no flow crosses: their points and normals, and dense algebra."""

import numpy as np
import pint
import pytest
import torch
from gpytorch.kernels import MaternKernel, RBFKernel
from gpytorch.likelihoods import GaussianLikelihood
from linear_operator import to_dense

import gp_orff
from gp_orff.data.units import UnitArray
from gp_orff.models.coasts import points_along
from gp_orff.symbols.base import Identity

SQUARE = np.array([[0.0, 0.0], [1.0, 0.0], [1.0, 1.0], [0.0, 1.0]])
ISLAND = np.array([[0.4, 0.4], [0.6, 0.4], [0.5, 0.6]])
GRID = gp_orff.Grid(domain=((-0.6, 1.6), (-0.6, 1.6)), tolerance=1e-9)


def kernel():
    flow = gp_orff.DivergenceFreeKernel(RBFKernel(), num_dims=2)
    flow.base_kernel.lengthscale = 0.4
    return flow


def model(rule=None, n=25):
    x = torch.rand(n, 2, generator=torch.Generator().manual_seed(0)).double()
    y = torch.sin(6 * x.flip(-1))
    made = gp_orff.VectorFieldGP(kernel(), frequencies=rule or gp_orff.Auto())
    made.likelihood.noise = 0.01
    return made.condition(x, y), x, y


def test_points_and_normals():
    x, normals = points_along(SQUARE, True, 0.25)
    assert len(x) == 16
    np.testing.assert_allclose(x[:4], [[0.125, 0], [0.375, 0], [0.625, 0], [0.875, 0]])
    np.testing.assert_allclose(np.abs(normals[:4]), [[0, 1]] * 4)
    np.testing.assert_allclose(np.abs(normals[4:8]), [[1, 0]] * 4)
    line, _ = points_along(SQUARE, False, 0.25)
    np.testing.assert_allclose(line, x[:12])  # without the edge that closes the ring
    closed = np.concatenate([SQUARE, SQUARE[:1]])  # as of GeoJSON, whose last vertex is the first
    np.testing.assert_allclose(points_along(closed, True, 0.25)[0], x)
    slope, normal = points_along(np.array([[0.0, 0.0], [3.0, 4.0]]), False, 2.0)
    np.testing.assert_allclose(np.linalg.norm(normal, axis=-1), 1)
    np.testing.assert_allclose(normal @ [3.0, 4.0], 0, atol=1e-12)
    assert len(slope) == 3


@pytest.mark.parametrize("rule", [None, GRID])
def test_the_posterior_is_that_of_dense_algebra(rule):
    held, x, y = model(rule)
    held.observe_coast(SQUARE, spacing=0.2, noise=1e-3)
    at, normals = map(torch.from_numpy, points_along(SQUARE, True, 0.2))
    every = torch.cat([x, at])
    k = to_dense(held.kernel(every, every)).detach()
    rows = torch.block_diag(torch.eye(2 * len(x)).double(), *normals[:, None])
    ones = rows @ torch.eye(2).double().repeat(len(every), 1)
    noise = torch.cat([torch.full((2 * len(x),), 0.01), torch.full((len(at),), 1e-3)]).double()
    inverse = torch.linalg.inv(rows @ k @ rows.mT + noise.diag())
    values = torch.cat([y.flatten(), torch.zeros(len(at)).double()])
    mean = torch.linalg.solve(ones.mT @ inverse @ ones, ones.mT @ inverse @ values)
    xs = torch.tensor([[0.0, 0.5], [0.3, 0.7]]).double()
    cross = to_dense(held.kernel(xs, every)).detach() @ rows.mT
    expected = mean.repeat(2) + cross @ inverse @ (values - ones @ mean)
    found = held.posterior().mean(xs)
    torch.testing.assert_close(found, expected.reshape(2, 2), rtol=1e-5, atol=1e-5)
    effect = torch.eye(2).double().repeat(2, 1) - cross @ inverse @ ones
    variance = to_dense(held.kernel(xs, xs)).detach() - cross @ inverse @ cross.mT
    variance += effect @ torch.linalg.solve(ones.mT @ inverse @ ones, effect.mT)
    torch.testing.assert_close(
        held.posterior().variance(xs), variance.diag().reshape(2, 2), rtol=1e-4, atol=1e-6
    )


def test_it_is_a_group_along_directions():
    """As tutorial 8 has it, with a group whose noise is known."""
    held, x, y = model()
    at, normals = map(torch.from_numpy, points_along(SQUARE, True, 0.2))
    other, *_ = model()
    other.likelihoods["shore"] = GaussianLikelihood().double()
    other.likelihoods["shore"].noise = 1e-3
    shore = {"x": at, "y": torch.zeros(len(at)), "directions": normals, "group": "shore"}
    other.condition([(x, y), shore])
    held.observe_coast(SQUARE, spacing=0.2, noise=1e-3)
    xs = torch.rand(5, 2, generator=torch.Generator().manual_seed(1)).double()
    torch.testing.assert_close(held.posterior().mean(xs), other.posterior().mean(xs))
    torch.testing.assert_close(
        held.log_marginal_likelihood(), other.log_marginal_likelihood(), rtol=1e-7, atol=1e-5
    )


class Shape:
    """An object like a polygon of shapely."""

    def __init__(self, kind, coordinates):
        self.__geo_interface__ = {"type": kind, "coordinates": coordinates}


def closed(ring):
    return [*map(tuple, ring), tuple(ring[0])]


@pytest.mark.parametrize(
    "polygon",
    [
        [SQUARE, ISLAND],
        [SQUARE.tolist(), ISLAND.tolist()],
        Shape("Polygon", [closed(SQUARE), closed(ISLAND)]),
        Shape("MultiPolygon", [[closed(SQUARE)], [closed(ISLAND)]]),
        Shape("MultiLineString", [closed(SQUARE), closed(ISLAND)]),
        {"type": "Feature", "geometry": Shape("Polygon", [closed(SQUARE), closed(ISLAND)])},
        [Shape("Polygon", [closed(SQUARE)]), Shape("Polygon", [closed(ISLAND)])],
        Shape("Polygon", [[(*v, 7.0) for v in closed(ring)] for ring in (SQUARE, ISLAND)]),
        [SQUARE[::-1], ISLAND[::-1]],
    ],
)
def test_islands(polygon):
    held, *_ = model()
    held.observe_coast(polygon, spacing=0.1, noise=1e-6)
    x, normals = points_along(ISLAND, True, 0.1)
    across = (held.posterior().mean(torch.from_numpy(x)).numpy() * normals).sum(-1)
    assert np.abs(across).max() < 0.05  # of a flow of 1
    assert held.report.observed == {"Identity": 40 + len(x)}


def test_long_steps_have_one_point_on_each_edge():
    held, *_ = model()
    assert held.observe_coast(SQUARE, spacing=1e9).report.observed == {"Identity": 4}


def test_defaults_and_files(tmp_path):
    held, *_ = model()
    before = held.posterior().variance(torch.tensor([[0.0, 0.5]]))
    held.observe_coast(SQUARE)
    (part,) = held.state.data.symbol_data
    assert len(part.x) == 20  # edges of 1 in steps of at most half of 0.4
    prior = to_dense(held.kernel(torch.zeros(1, 2).double())).diagonal().mean().item()
    assert part.noise.item() == pytest.approx(1e-4 * prior)
    after = held.posterior().variance(torch.tensor([[0.0, 0.5]]))
    assert after[0, 0] < 0.1 * before[0, 0]
    held.save(tmp_path / "flow.pt")
    loaded = gp_orff.VectorFieldGP.load(tmp_path / "flow.pt")
    xs = torch.rand(5, 2).double()
    torch.testing.assert_close(loaded.posterior().mean(xs), held.posterior().mean(xs))


def test_at_times():
    time = MaternKernel(nu=1.5, active_dims=(2,))
    flow = gp_orff.DivergenceFreeKernel(RBFKernel(), num_dims=2, active_dims=(0, 1)) * time
    x = torch.rand(20, 3, generator=torch.Generator().manual_seed(0)).double()
    held = gp_orff.VectorFieldGP(flow).condition(x, torch.sin(6 * x[:, [1, 0]]))
    held.observe_coast(SQUARE, spacing=0.25, at=[[0.0], [0.5], [1.0]])
    across = held.posterior().mean(torch.tensor([[0.0, 0.55, 0.0], [0.0, 0.55, 0.5]]))[:, 0]
    assert across.abs().max() < 0.05
    with pytest.raises(ValueError, match="at= with the 1 inputs"):
        held.observe_coast(SQUARE)


@pytest.mark.parametrize("rest", [(), (2,)])
def test_columns_of_space_in_another_order(rest):
    """Latitude before longitude: the coast is that of the model with exchanged columns."""
    x = torch.rand(30, 2 + len(rest), generator=torch.Generator().manual_seed(0)).double()
    line = {"type": "LineString", "coordinates": [[0.25, 0.0], [0.25, 1.0]]}
    means = []
    for order in ((0, 1), (1, 0)):
        flow = gp_orff.DivergenceFreeKernel(RBFKernel(), num_dims=2, active_dims=order)
        if rest:
            flow = flow * MaternKernel(nu=1.5, active_dims=rest)
        held = gp_orff.VectorFieldGP(flow).condition(
            x[:, [*order, *rest]], torch.sin(6 * x[:, [1, 0]])
        )
        held.observe_coast(line, spacing=0.1, at=[[0.5]] if rest else None)
        at = torch.tensor([[0.25, 0.45, 0.5]]).double()[:, [*order, *rest]]
        means.append(held.posterior().mean(at))
    torch.testing.assert_close(*means, rtol=1e-6, atol=1e-6)
    assert means[1][0, 0].abs() < 1e-3 < 0.1 < means[1][0, 1].abs()


@pytest.mark.parametrize("kind", ["array", "pint"])
def test_units(kind):
    """A coast in m for a model in km is that of the numbers in km."""

    def metres(values):
        values = 1000 * np.asarray(values)
        if kind == "pint":
            return pint.Quantity(values, "m")
        return UnitArray.of(values, ["m", "m"]) if values.ndim else pint.Quantity(values, "m")

    x = torch.rand(25, 2, generator=torch.Generator().manual_seed(0)).double()
    means, xs = [], torch.tensor([[0.0, 0.5], [0.3, 0.7]]).double()
    for square, island, step in (
        (SQUARE, ISLAND, 0.2),
        (metres(SQUARE), metres(ISLAND), metres(0.2)),
    ):
        held = gp_orff.VectorFieldGP(kernel())
        held.condition(UnitArray.of(x.numpy(), ["km", "km"]), torch.sin(6 * x.flip(-1)))
        held.observe_coast([square, island], spacing=step)
        means.append(held.posterior().mean(xs))
    torch.testing.assert_close(*means, rtol=1e-9, atol=1e-9)
    with pytest.raises(ValueError, match="the coast in 'km'"):
        held.observe_coast(pint.Quantity(SQUARE, "s"))


def test_components_along_directions_of_other_symbols():
    """(∇ × f)·u, as a component of what a symbol gives."""
    x = torch.rand(20, 3, generator=torch.Generator().manual_seed(0)).double()
    held = gp_orff.VectorFieldGP(gp_orff.DivergenceFreeKernel(num_dims=3))
    held.condition(x, torch.sin(3 * x.roll(1, -1)))
    along = torch.tensor([[0.6, 0.8, 0.0]]).double()
    held.observe(x[:1], [0.3], gp_orff.Curl(), noise=1e-6, directions=along)
    found = held.posterior().mean(x[:1], gp_orff.Curl()) @ along[0]
    assert found.item() == pytest.approx(0.3, abs=1e-3)


@pytest.mark.parametrize(
    ("polygon", "options", "message"),
    [
        (SQUARE + 50, {}, "expected a coast near the data"),
        ([[0.0, 1.0, 2.0]], {}, "finite vertices"),
        (np.insert(SQUARE, 2, np.nan, 0), {}, "1 rows of NaN.*give a list of the rings"),
        (Shape("Point", (0.0, 1.0)), {}, "type 'Point'"),
        ([], {}, r"vertices \(v, 2\) of a ring, a list of rings.*got \[\]"),
        (None, {}, "got None"),
        ([[0, 0], [0, 0]], {}, "coast with edges"),
        (SQUARE, {"spacing": 0.0}, "positive spacing"),
        (SQUARE, {"spacing": "1"}, "positive spacing, got '1'"),
        (SQUARE, {"at": [[0.0]]}, "0 inputs of the model that are not in space"),
    ],
)
def test_mistakes(polygon, options, message):
    held, *_ = model()
    with pytest.raises(ValueError, match=message):
        held.observe_coast(polygon, **options)
    assert not held.state.data.symbol_data


def test_other_fields_have_no_coast():
    x = torch.rand(9, 3).double()
    held = gp_orff.VectorFieldGP(gp_orff.CurlFreeKernel(num_dims=3)).condition(x, x)
    with pytest.raises(ValueError, match="two dimensions"):
        held.observe_coast(SQUARE)
    with pytest.raises(ValueError, match=r"directions of shape \(9, 3\)"):
        held.observe(x, torch.zeros(9), Identity(), noise=1.0, directions=x[:, :2])
