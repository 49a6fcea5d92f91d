"""Observations along directions: anomalies of the total magnetic field, and beams of radars."""

from datetime import date as Date
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float
from numpy.polynomial import chebyshev

from gp_orff.data.units import UnitArray, conversion, optional, units_of_columns
from gp_orff.data.validation import as_real
from gp_orff.labelled.attributes import as_dataset, named
from gp_orff.labelled.plane import LocalPlane
from gp_orff.labelled.reading import readings
from gp_orff.symbols.base import unit_of

if TYPE_CHECKING:
    import pyproj
    import xarray

_NODES = (16, 16, 6)  # nodes of the interpolation along x, y and height
_CHUNK = 2**14  # observations that are interpolated together


def total_field(
    dataset: "xarray.Dataset",
    anomaly: str = "anomaly",
    coordinates: tuple[str, str, str] = ("longitude", "latitude", "height"),
    *,
    date: "str | float | Date | np.datetime64",
    track: str | None = None,
    time: str | None = None,
    noise: str | None = None,
    project: "str | pyproj.CRS | LocalPlane" = "auto",
) -> tuple[Float[np.ndarray, "N 3"], Float[np.ndarray, "N"], dict[str, np.ndarray], LocalPlane]:
    """Return positions, total-field anomalies and directions of the main field, for `model.fit`.

    A total-field magnetometer measures |B₀ + b|. Here B₀ is the main field from the International
    Geomagnetic Reference Field (IGRF), and b is the field of the rocks. The survey gives the
    anomaly ΔT = |B₀ + b| − |B₀|. To first order, it is the component of b along the direction
    u = B₀/|B₀|:

        0 ≤ ΔT − u·b ≤ |b|²/(2|B₀|) .

    At |B₀| = 50 000 nT, this limit is 0.1 nT for |b| = 100 nT, and 10 nT for |b| = 1000 nT. Call
    `model.fit(x, y, **options)` with the result.

    The direction u is computed at 1536 positions and interpolated by Chebyshev polynomials. The
    error is less than 1e-7 in an area of 3000 km and heights up to 500 km. It is 1e-11 if all
    heights are within 10 km.

    Args:
        dataset: an xarray Dataset.
        anomaly: the name of the variable ΔT, in any unit.
        coordinates: the names of longitude, latitude and height. Longitude and latitude are in
            degrees. The height is above the ellipsoid, in m unless its attribute `units` gives
            another unit.
        date: the date of the survey: ISO 8601 such as "1978-04-20", decimal years such as 1978.3,
            or a date. The direction u changes by about 0.1 degrees per year.
        track: the name of the line labels, as for `readings`. `fit` then levels the survey: it
            learns an offset and correlated noise for each line.
        time: the name of the times along lines, as for `readings`.
        noise: the name of the noise variances, as for `readings`.
        project: the projection, as for `readings`.

    Returns:
        A tuple (x, y, options, plane). The positions x (N, 3) are in km to the east, to the north
        and upward. The anomalies are y (N,). The dictionary `options` has the `directions` u (N, 3)
        along these axes, and `track`, `time` and `noise` if they are given. `plane` is the
        `LocalPlane`.

    Raises:
        ImportError: xarray, pyproj or ppigrf is not installed. Run
            `pip install gp_orff[xarray,geo,geomag]`.
        KeyError: The Dataset does not have a variable with one of the names.
        ValueError: The IGRF does not cover the date, the height is not a length, or `readings`
            raises the error.

    Example:
        >>> import gp_orff, xarray
        >>> survey = xarray.Dataset(
        ...     {"anomaly": ("reading", [115.4, 121.3, 130.2])},
        ...     {
        ...         "longitude": ("reading", [-42.59, -42.58, -42.57]),
        ...         "latitude": ("reading", [-22.50, -22.49, -22.48]),
        ...         "height": ("reading", [264.0, 265.0, 266.0]),
        ...     },
        ... )
        >>> x, y, options, plane = gp_orff.labelled.total_field(survey, date=1978.3)
        >>> x.round(3).tolist()
        [[-1.029, -1.107, 0.264], [0.0, 0.0, 0.265], [1.029, 1.107, 0.266]]
        >>> options["directions"][0].round(2).tolist()  # east, north, up
        [-0.29, 0.83, 0.47]
    """
    dataset = as_dataset(dataset)
    names = [str(name) for name in coordinates]
    if len(names) != 3:
        raise ValueError(
            f"total_field expects the names of longitude, latitude and height, got {names}"
        )
    dataset = dataset.assign({names[2]: _in_km(dataset, names[2])})
    x, y, *options, plane = readings(
        dataset, anomaly, names, track=track, time=time, noise=noise, project=project
    )
    field = _main_field(x, plane, _moment(date))
    directions = field / np.linalg.norm(field, axis=-1, keepdims=True)
    y = UnitArray.of(y[:, 0], y.units)
    return x, y, {**(options[0] if options else {}), "directions": directions}, plane


def _in_km(dataset: "xarray.Dataset", name: str) -> "xarray.Variable":
    height = named(dataset, [name])[name]
    units = height.attrs.get("units", "m")
    factor = conversion(units, "km")
    if factor is None or height.attrs.get("positive", "up") != "up":
        raise ValueError(
            f"expected {name!r} as a height in m or km, positive upward, got attributes "
            f"{height.attrs}; convert it"
        )
    height = factor * height
    height.attrs = {"units": "km"}
    return height


def _moment(date: object) -> datetime:
    """A date in any form as a datetime, accurate to a second."""
    if isinstance(date, int | float | np.number):
        year = int(date)
        start, end = datetime(year, 1, 1), datetime(year + 1, 1, 1)
        return start + timedelta(
            seconds=round((float(date) - year) * (end - start).total_seconds())
        )
    return np.datetime64(date).astype("M8[s]").item()


def _main_field(
    x: Float[np.ndarray, "N 3"], plane: LocalPlane, moment: datetime
) -> Float[np.ndarray, "N 3"]:
    """B₀ in nT along the axes of the plane, interpolated in the box of all positions."""
    low, high = np.nanmin(x, axis=0), np.nanmax(x, axis=0)
    middle, half = (low + high) / 2, np.maximum((high - low) / 2, 1e-3)
    points = [chebyshev.chebpts1(count) for count in _NODES]
    axes = [centre + width * own for centre, width, own in zip(middle, half, points, strict=True)]
    nodes = np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1).reshape(-1, 3)
    places = plane.inverse(nodes[:, :2])
    values = plane.rotate(_igrf(places, nodes[:, 2], moment), places).reshape(*_NODES, 3)
    inverses = [np.linalg.inv(chebyshev.chebvander(own, len(own) - 1)) for own in points]
    coefficients = np.einsum("ai,bj,ck,ijkl->abcl", *inverses, values)
    rows = [
        _interpolated((part - middle) / half, coefficients)
        for part in np.array_split(x, len(x) // _CHUNK + 1)
    ]
    return np.concatenate(rows)


def _interpolated(
    x: Float[np.ndarray, "n 3"], coefficients: Float[np.ndarray, "a b c 3"]
) -> Float[np.ndarray, "n 3"]:
    """Chebyshev series in three variables."""
    a, b, c = (chebyshev.chebvander(column, n - 1) for column, n in zip(x.T, _NODES, strict=True))
    along = (a @ coefficients.reshape(len(coefficients), -1)).reshape(-1, *coefficients.shape[1:])
    return np.einsum("nb,nc,nbcl->nl", b, c, along, optimize=True)


def _igrf(
    places: Float[np.ndarray, "n 2"], height: Float[np.ndarray, "n"], moment: datetime
) -> Float[np.ndarray, "n 3"]:
    """The components of the main field to the east, to the north and upward, in nT."""
    ppigrf = optional("ppigrf", "geomag")
    if not 1900 <= moment.year < 2030:
        raise ValueError(
            f"expected a date that the IGRF covers, from 1900 to 2029, got {moment.date()}"
        )
    field = ppigrf.igrf(*places.T, height, moment)
    return np.stack(field, axis=-1)[0]


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
    are positive away from the radar. Without `elevation`, positions and directions are horizontal
    with d = 2, as for HF radars. With `elevation`, d = 3 and the height is last.

    Over a flat Earth, a beam with the elevation e is straight. Over a spherical Earth with the
    effective radius R, the height h and the distance s along the ground at the range r are

        h = √(r² + R² + 2 r R sin e) − R ,    s = R asin(r cos e / (R + h))

    (Doviak & Zrnić 1993, *Doppler radar and weather observations*, eq. 2.28). The elevation of the
    beam at this position is e + s/R. For weather radars in a standard atmosphere, R is 4/3 of the
    radius of the Earth.

    Args:
        distance: the ranges r, of any shape with N elements after broadcasting.
        azimuth: the angles clockwise from north, in degrees, or in radians if they have this unit.
            The shapes of ranges and angles must broadcast.
        elevation: the angles e above the horizon, in degrees or radians. By default, beams are
            horizontal.
        site: the position of the radar (d,), in the unit of the ranges, or an array with another
            unit. The default is the origin. If other data are in the plane of a `LocalPlane`, use
            `plane.forward(places)`.
        effective_radius: R, in the unit of the ranges, such as 8495 km. The default is a flat
            Earth.

    Returns:
        The positions x (N, d), in the unit of the ranges, to the east, to the north and upward; and
        the unit vectors (N, d) along the beams, away from the radar.

    Raises:
        ValueError: Ranges are negative, values are NaN or infinite, or shapes do not broadcast. Or
            units cannot be converted, the site has another dimension, or the radius is not
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
            "give azimuths of shape (beams, 1), or use xarray.broadcast(distance, azimuth) with "
            "DataArrays"
        ) from None
    wrong = ~((r >= 0) & np.isfinite(sum((r, east, *up))))
    if wrong.any():
        raise ValueError(
            f"expected finite angles, and finite ranges of at least zero, got {int(wrong.sum())} "
            "NaN, infinite or negative ones; drop them"
        )
    rise = up[0] if up else np.zeros_like(r)
    height, ground = r * np.sin(rise), r * np.cos(rise)
    if effective_radius is not None:
        if not up:
            raise ValueError(
                "expected elevation= with effective_radius=, got none; give the elevations, for "
                "example elevation=0.0"
            )
        radius = float(_in_unit(effective_radius, unit, "effective_radius"))
        if not 0 < radius < np.inf:
            raise ValueError(
                f"expected a positive, finite effective_radius, got {effective_radius!r}; omit it "
                "for a flat Earth"
            )
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
            raise ValueError(
                f"expected a site with {x.shape[1]} coordinates, got shape {place.shape}; with "
                "elevation=, the height is the third coordinate"
            )
        x = x + place
    return (x if unit is None else UnitArray.of(x, [unit] * x.shape[1])), directions


def _in_unit(lengths: object, unit: str | None, name: str) -> Float[np.ndarray, "..."]:
    """Lengths, converted to the unit of the ranges if both units are known."""
    given = next(iter(units_of_columns(lengths)), None)
    factor = 1.0 if None in (given, unit) else conversion(given, unit)
    if factor is None:
        raise ValueError(
            f"expected {name} in {unit!r}, the unit of the ranges, got {given!r}, which cannot be "
            "converted; convert it, or correct its attribute `units`"
        )
    return factor * as_real(lengths, name).numpy()


def _radians(angle: object, name: str) -> Float[np.ndarray, "..."]:
    """Angles, converted to radians from their unit, or from degrees if they have none."""
    unit = unit_of(angle) or "degree"
    factor = conversion(unit, "radian")
    if factor is None:
        raise ValueError(f"expected {name} in degrees or radians, got {unit!r}")
    return factor * as_real(angle, name).double().numpy()
