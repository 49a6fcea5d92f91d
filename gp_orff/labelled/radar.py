"""Radars and lidars: positions and directions of what they observe along their beams."""

import numpy as np
from jaxtyping import Float

from gp_orff.data.units import UnitArray, conversion, units_of_columns
from gp_orff.data.validation import as_real
from gp_orff.symbols.base import unit_of


def beams(
    distance: object,
    azimuth: object,
    elevation: object = None,
    *,
    site: object = None,
    effective_radius: float | None = None,
) -> tuple[Float[np.ndarray, "N d"], Float[np.ndarray, "N d"]]:
    """Return the positions x (N, d) that a radar observes, and the directions (N, d) of its beams.

    Pass them to `model.fit(x, velocity, directions=directions)` with radial velocities (N,), which
    are positive away from the radar. Without an elevation, positions and directions are horizontal,
    d = 2, as for HF radars. Otherwise d = 3, with the height last.

    A beam at the angle e above the horizon is straight in the plane. Over a spherical Earth, the
    effective radius R is 4/3 of the true radius for weather radars in a standard atmosphere. The
    height and the distance along the ground are then (Doviak & Zrnić 1993, eq. 2.28)

        h = √(r² + R² + 2 r R sin e) − R ,    s = R asin(r cos e / (R + h)) ,

    and at the observed position it rises by e + s/R.

    Args:
        distance: ranges r (N,), or of any shape.
        azimuth: angles in degrees clockwise from north, or in radians if they have this unit. The
            shape must broadcast with the shape of the ranges.
        elevation: angles above the horizon, in units as the azimuth; None for horizontal beams.
        site: the position of the radar (d,), in the unit of the ranges, or an array with another
            unit; zero if None. Use `plane.forward(places)` for the plane of other data.
        effective_radius: R, in units as the site, such as 8495 km; None for a flat Earth.

    Raises:
        ValueError: negative ranges, NaN or infinite values, shapes that do not broadcast, angles in
            other units, a site of another dimension or kind of unit, or a radius that is not
            positive.

    Example:
        >>> import gp_orff
        >>> x, directions = gp_orff.labelled.beams([10.0, 20.0], [90.0, 0.0])
        >>> x.round(9).tolist()  # 10 km to the east, and 20 km to the north
        [[10.0, 0.0], [0.0, 20.0]]
        >>> directions.round(9).tolist()
        [[1.0, 0.0], [0.0, 1.0]]
    """
    unit = unit_of(distance)
    angles = [_radians(azimuth, "azimuth")]
    angles += [] if elevation is None else [_radians(elevation, "elevation")]
    given = [as_real(distance, "distance").numpy(), *angles]
    try:
        r, east, *up = (values.ravel() for values in np.broadcast_arrays(*given))
    except ValueError:
        raise ValueError(
            "expected ranges, azimuths and elevations of shapes that broadcast, got "
            f"{', '.join(str(values.shape) for values in given)}; for all ranges along each beam, "
            "give azimuths of shape (beams, 1); of DataArrays, xarray.broadcast(distance, azimuth)"
        ) from None
    wrong = ~((r >= 0) & np.isfinite(sum((r, east, *up))))
    if wrong.any():
        raise ValueError(
            f"expected finite angles, and finite ranges of at least zero, got {int(wrong.sum())} "
            "others; drop them"
        )
    rise = up[0] if up else np.zeros_like(r)
    height, ground = r * np.sin(rise), r * np.cos(rise)
    if effective_radius is not None:
        if not up:
            raise ValueError("expected elevation= with effective_radius, got none")
        radius = float(_in_unit(effective_radius, unit, "effective_radius"))
        if not 0 < radius < np.inf:
            raise ValueError(f"expected a positive effective_radius, got {effective_radius!r}")
        height = np.sqrt(r**2 + radius**2 + 2 * r * radius * np.sin(rise)) - radius
        ground = radius * np.arcsin(r * np.cos(rise) / (radius + height))
        rise = rise + ground / radius
    horizontal = np.stack([np.sin(east), np.cos(east)], -1)
    x, directions = ground[:, None] * horizontal, np.cos(rise)[:, None] * horizontal
    if up:
        x = np.concatenate([x, height[:, None]], -1)
        directions = np.concatenate([directions, np.sin(rise)[:, None]], -1)
    if site is not None:
        place = _in_unit(site, unit, "site").reshape(-1)
        if place.shape != x.shape[1:]:
            raise ValueError(f"expected a site of {x.shape[1]} numbers, got shape {place.shape}")
        x = x + place
    return (x if unit is None else UnitArray.of(x, [unit] * x.shape[1])), directions


def _in_unit(lengths: object, unit: str | None, name: str) -> Float[np.ndarray, "..."]:
    """Lengths in the unit of the ranges, as far as both are known."""
    given = next(iter(units_of_columns(lengths)), None)
    factor = 1.0 if None in (given, unit) else conversion(given, unit)
    if factor is None:
        raise ValueError(
            f"expected {name} in {unit!r}, as the ranges, got {given!r}, which cannot be "
            "converted; convert it, or correct its attribute `units`"
        )
    return factor * as_real(lengths, name).numpy()


def _radians(angle: object, name: str) -> Float[np.ndarray, "..."]:
    """Angles in radians, from degrees unless they have another unit."""
    unit = unit_of(angle) or "degree"
    factor = conversion(unit, "radian")
    if factor is None:
        raise ValueError(f"expected {name} in degrees or radians, got {unit!r}")
    return factor * as_real(angle, name).double().numpy()
