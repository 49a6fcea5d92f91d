"""Positions and directions of radar beams."""

import numpy as np
import pint
import pytest
import xarray as xr

import gp_orff
from gp_orff.labelled import beams

EARTH = 6371.0


def test_horizontal_beams():
    x, directions = beams([1.0, 2.0, 3.0], [0.0, 90.0, 225.0], site=[10.0, 20.0])
    half = 0.5**0.5
    np.testing.assert_allclose(x - [10, 20], [[0, 1], [2, 0], [-3 * half, -3 * half]], atol=1e-12)
    np.testing.assert_allclose(directions, (x - [10, 20]) / [[1.0], [2.0], [3.0]], atol=1e-12)


def test_a_sweep_of_gates_and_rays():
    x, directions = beams(np.array([1.0, 2.0]), np.arange(0.0, 360.0, 90.0)[:, None], 30.0)
    assert x.shape == directions.shape == (8, 3)
    np.testing.assert_allclose(x[:, 2], np.tile([0.5, 1.0], 4))
    np.testing.assert_allclose(np.linalg.norm(directions, axis=-1), 1)


def test_beams_over_a_round_earth():
    """By geometry in the plane of the beam: a straight ray from the surface of a circle."""
    radius, r, e = 4 / 3 * EARTH, np.array([10.0, 100.0, 250.0]), 2.0
    x, directions = beams(r, 0.0, e, effective_radius=radius)
    ray = r[:, None] * [np.cos(np.radians(e)), np.sin(np.radians(e))] + [0.0, radius]
    np.testing.assert_allclose(x[:, 2], np.linalg.norm(ray, axis=-1) - radius, rtol=1e-9)
    angle = np.arctan2(ray[:, 0], ray[:, 1])  # at the centre
    np.testing.assert_allclose(x[:, 1], radius * angle, rtol=1e-9)
    upward = np.stack([np.sin(angle), np.cos(angle)], -1)
    along = np.array([np.cos(np.radians(e)), np.sin(np.radians(e))])
    np.testing.assert_allclose(directions[:, 2], upward @ along, rtol=1e-9)
    flat, _ = beams(r, 0.0, e)
    assert (x[:, 2] > flat[:, 2]).all()


def test_units():
    azimuth = xr.DataArray([0.5 * np.pi], attrs={"units": "radian"})
    x, _ = beams(pint.Quantity([3.0], "km"), azimuth)
    np.testing.assert_allclose(x, [[3.0, 0.0]], atol=1e-12)
    assert x.units == ("kilometer", "kilometer")
    with pytest.raises(ValueError, match="azimuth in degrees or radians, got 'm'"):
        beams([1.0], xr.DataArray([1.0], attrs={"units": "m"}))


def test_lengths_in_other_units():
    """5 km are 5000 m."""
    ranges, site = xr.DataArray([1000.0], attrs={"units": "m"}), pint.Quantity([5.0, 5.0, 0], "km")
    radius = pint.Quantity(8495.0, "km")
    x, _ = beams(ranges, 0.0, 1.0, site=site, effective_radius=radius)
    expected, _ = beams(1000.0, 0.0, 1.0, site=[5000.0, 5000.0, 0], effective_radius=8_495_000.0)
    np.testing.assert_allclose(x, expected, rtol=1e-12)
    with pytest.raises(ValueError, match="site in 'm', the unit of the ranges, got 'second'"):
        beams(ranges, 0.0, site=pint.Quantity([5.0, 5.0], "s"))


def test_dimensions_of_arrays():
    """Every range along every beam, as the remedy has it."""
    ranges = xr.DataArray([1.0, 2.0, 3.0], dims="range", attrs={"units": "km"})
    azimuth = xr.DataArray([0.0, 90.0], dims="azimuth", attrs={"units": "degree"})
    with pytest.raises(ValueError, match=r"\(3,\), \(2,\).*xarray.broadcast\(distance, azimuth\)"):
        beams(ranges, azimuth)
    x, _ = beams(*xr.broadcast(ranges, azimuth))
    np.testing.assert_allclose(x[:2], [[0, 1], [1, 0]], atol=1e-12)
    assert x.shape == (6, 2)
    assert x.units == ("km", "km")


def test_radial_velocities_of_two_radars_are_a_flow():
    """A uniform flow from its components along the beams."""
    flow, parts = np.array([0.3, -0.2]), []
    for site in ([0.0, 0.0], [30.0, 0.0]):
        distance, azimuth = np.meshgrid([5.0, 12.0, 20.0], np.arange(-60.0, 61.0, 30.0))
        x, directions = beams(distance, azimuth, site=site)
        parts.append({"x": x, "y": directions @ flow, "directions": directions})
    model = gp_orff.VectorFieldGP(gp_orff.HelmholtzKernel(num_dims=2)).condition(parts)
    np.testing.assert_allclose(model.posterior().mean(np.array([[15.0, 8.0]])), [flow], atol=0.02)


def test_mistakes():
    with pytest.raises(ValueError, match="ranges of at least zero"):
        beams([-1.0], [0.0])
    with pytest.raises(ValueError, match="a site with 2 coordinates"):
        beams([1.0], [0.0], site=[0.0, 0.0, 0.0])
    with pytest.raises(ValueError, match="elevation= with effective_radius"):
        beams([1.0], [0.0], effective_radius=8495.0)
    for angles in (([np.nan], [1.0]), ([0.0], [np.nan])):
        with pytest.raises(
            ValueError, match=r"finite angles.*got 1 NaN, infinite or negative ones; drop them"
        ):
            beams([1.0], *angles)
    with pytest.raises(ValueError, match="finite ranges"):
        beams([np.inf], [0.0])
    with pytest.raises(ValueError, match="a positive, finite effective_radius, got 0"):
        beams([1.0], [0.0], [1.0], effective_radius=0.0)


@pytest.mark.parametrize("radius", [None, 8495.0])
def test_beams_to_the_zenith(radius):
    """The azimuth does not matter there."""
    x, directions = beams([10.0, 20.0], [0.0, 77.0], [90.0, 90.0], effective_radius=radius)
    np.testing.assert_allclose(x, [[0, 0, 10], [0, 0, 20]], atol=1e-10)
    np.testing.assert_allclose(directions, [[0, 0, 1], [0, 0, 1]], atol=1e-12)
