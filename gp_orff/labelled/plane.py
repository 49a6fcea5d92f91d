"""Local map projections, and a field of the plane as it is seen in degrees."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from gp_orff.data.checks import in_column_units
from gp_orff.data.units import optional
from gp_orff.symbols.base import Symbol

if TYPE_CHECKING:
    import pyproj


# `LocalPlane`: longitude and latitude to a plane in km, and back.


_EXTENT = 3000.0  # km
_RADIUS = 6371.0  # km


@dataclass(frozen=True)
class LocalPlane:
    """A map projection from longitude and latitude in degrees to a plane in km, and back.

    `around` chooses a conformal projection, with the centre of the area as its origin. It is
    transverse Mercator if the area is at least as tall as wide, else oblique stereographic. A
    conformal projection scales all directions at a position by the same factor k(x), and rotates
    every vector by the angle of the meridian. The error of lengths is |k − 1| ≤ s²/(32 R²) in an
    area with diagonal s, where R = 6371 km. This is 8e-6 for 100 km, 8e-4 for 1000 km, and 0.7 %
    for the limit of 3000 km.

    Vectors v of two components are rotated and divided by k before they enter a model. Divergence
    and curl of this field in the plane are 1/k² times the divergence and curl of v on the
    ellipsoid. Its potential, stream function and line integrals are the same, and gradients remain
    gradients. A map in longitude and latitude is therefore free of the distortion. Vectors of three
    components are only rotated.

    Args:
        crs: a projected coordinate reference system, in any form that pyproj reads, such as
            "EPSG:31983". Longitudes and latitudes refer to its datum. Only conformal projections
            rotate vectors exactly.
        vectors: whether a model with two or more outputs has the components of a vector to the east
            and to the north as the first two. If False, only positions are projected.

    Raises:
        ImportError: pyproj is not installed; `pip install gp_orff[geo]`.
        ValueError: a reference system that is unknown, not projected, or not to the east and north.

    Example:
        >>> import gp_orff
        >>> plane = gp_orff.labelled.LocalPlane.around([[10.0, 50.0], [12.0, 51.0]])
        >>> points = plane.forward([[11.0, 50.5], [12.0, 51.0]])
        >>> points.round(1).tolist(), plane.inverse(points).round(9).tolist()
        ([[0.8, -0.5], [70.9, 55.6]], [[11.0, 50.5], [12.0, 51.0]])
        >>> # north, in the plane
        >>> plane.rotate([[0.0, 1.0]], [[12.0, 51.0]]).round(4).tolist()
        [[-0.0137, 0.9999]]
    """

    crs: str
    vectors: bool = True

    def __post_init__(self):
        pyproj = optional("pyproj", "geo")
        try:
            crs = pyproj.CRS.from_user_input(self.crs)
        except pyproj.exceptions.CRSError as error:
            raise ValueError(
                f"expected a coordinate reference system that pyproj knows, or 'auto', got "
                f"{self.crs!r}"
            ) from error
        object.__setattr__(self, "crs", crs.to_string())
        if not crs.is_projected:
            raise ValueError(
                f"expected a projected coordinate reference system, got {crs.name!r}; take "
                "project='auto', or one such as 'EPSG:31983'"
            )
        if "+axis=" in self._projection.srs:
            raise ValueError(
                f"expected axes to the east and to the north, got others in {crs.name!r}; take "
                "project='auto'"
            )

    @classmethod
    def around(cls, places: Float[np.ndarray, "N 2"], *, vectors: bool = True) -> "LocalPlane":
        """Return the projection for an area that contains the positions `places` (N, 2).

        Args:
            places: longitude and latitude in degrees; rows with NaN are ignored.
            vectors: as for the class.

        Raises:
            ImportError: pyproj is not installed.
            ValueError: values that are not degrees, or an area with a diagonal above 3000 km.
        """
        places = _degrees(places)
        (longitude, latitude), half = _box(places[np.isfinite(places).all(-1)])
        # By how much the scale k grows from the centre to the sides: with x²/2R² for transverse
        # Mercator, and with r²/4R² for the stereographic projection. A scale at the centre that is
        # smaller by half of it balances both errors.
        across, radius = half[0] ** 2 / (2 * _RADIUS**2), (half @ half) / (4 * _RADIUS**2)
        name, growth = ("tmerc", across) if half[0] <= half[1] else ("sterea", radius)
        crs = (
            f"+proj={name} +lat_0={latitude:.4f} +lon_0={longitude:.4f} +k_0={1 - growth / 2:.8f} "
            "+datum=WGS84 +units=m +no_defs +type=crs"
        )
        return cls(crs, vectors)

    @cached_property
    def _projection(self) -> "pyproj.Proj":
        return optional("pyproj", "geo").Proj(self.crs, preserve_units=False)

    def check_extent(self, places: Float[np.ndarray, "N 2"]) -> None:
        """Check that positions lie in an area whose diagonal is at most 3000 km.

        Args:
            places: (N, 2), longitude and latitude in degrees; rows with NaN are ignored.

        Raises:
            ValueError: values that are not degrees, or an area with a longer diagonal.
        """
        places = _degrees(places)
        _box(places[np.isfinite(places).all(-1)])

    def forward(self, places: Float[np.ndarray, "N 2"]) -> Float[np.ndarray, "N 2"]:
        """Return the positions in the plane, in km to the east and to the north.

        Args:
            places: (N, 2), longitude and latitude in degrees.

        Raises:
            ValueError: values that are not degrees, or positions outside the area of the
                projection.
        """
        places = _degrees(places)
        points = np.stack(self._projection(*places.T), axis=-1) / 1000
        lost = np.isinf(points).any(-1)
        if lost.any():
            raise ValueError(
                f"expected places that {self.crs!r} reaches, got {lost.sum()} beyond, such as "
                f"{places[lost][0].tolist()}"
            )
        return points

    def inverse(self, points: Float[np.ndarray, "N 2"]) -> Float[np.ndarray, "N 2"]:
        """Return longitude, from −180 to 180, and latitude, in degrees, of points (N, 2) in km."""
        x, y = np.asarray(points, dtype=np.float64).reshape(-1, 2).T * 1000
        return np.stack(self._projection(x, y, inverse=True), axis=-1)

    def rotation(self, places: Float[np.ndarray, "N 2"]) -> Float[np.ndarray, "N 2 2"]:
        """Return the matrices R with (v_x, v_y) = R (v_east, v_north).

        R rotates by the meridian convergence γ, the angle from the vertical axis of the plane to
        the meridian, which is negative if clockwise: R = [[cos γ, −sin γ], [sin γ, cos γ]].

        Args:
            places: (N, 2), longitude and latitude in degrees.
        """
        angle = np.deg2rad(self._factors(places)[0])
        cos, sin = np.cos(angle), np.sin(angle)
        return np.stack([cos, -sin, sin, cos], axis=-1).reshape(-1, 2, 2)

    def rotate(
        self, vectors: Float[np.ndarray, "N p"], places: Float[np.ndarray, "N 2"]
    ) -> Float[np.ndarray, "N p"]:
        """Return vectors whose first two components, east and north, are replaced by x and y.

        Args:
            vectors: (N, p).
            places: (N, 2), longitude and latitude in degrees.
        """
        turned = np.array(vectors, dtype=np.float64)
        turned[:, :2] = np.einsum("nij,nj->ni", self.rotation(places), turned[:, :2])
        return turned

    def frame(self, places: Float[np.ndarray, "N 2"], p: int) -> Float[np.ndarray, "N p p"]:
        """Return the matrices (N, p, p) from the components east, north, ... to those of a model.

        The upper left block is the rotation, divided by k if p = 2.

        Args:
            places: (N, 2), longitude and latitude in degrees.
            p: the number of components.
        """
        frame = np.broadcast_to(np.eye(p), (len(places), p, p)).copy()
        frame[:, :2, :2] = self.rotation(places)
        return frame / self.scale(places)[:, None, None] if p == 2 else frame

    def scale(self, places: Float[np.ndarray, "N 2"]) -> Float[np.ndarray, "N"]:
        """Return k (N,) at `places` (N, 2): lengths in the plane divided by lengths on the
        ellipsoid."""
        return np.sqrt(self._factors(places)[1])

    def _factors(self, places: object) -> tuple[Float[np.ndarray, "N"], Float[np.ndarray, "N"]]:
        """The meridian convergence in degrees, and the areal scale; NaN where places are."""
        places = _degrees(places)
        known = np.isfinite(places).all(-1)
        convergence, scale = np.full((2, len(places)), np.nan)
        factors = self._projection.get_factors(*places[known].T)
        convergence[known], scale[known] = factors.meridian_convergence, factors.areal_scale
        return convergence, scale


def _degrees(places: object) -> Float[np.ndarray, "N 2"]:
    if hasattr(places, "__geo_interface__"):
        raise TypeError(
            "expected places (N, 2) of longitude and latitude, got a geometry; transform its "
            "vertices: shapely.transform(geometry, plane.forward)"
        )
    places = in_column_units(places, ("degree",), "longitudes and latitudes")
    places = np.asarray(places, dtype=np.float64)
    if places.ndim != 2 or places.shape[-1] != 2:
        raise ValueError(
            f"expected places (N, 2) of longitude and latitude, got shape {places.shape}"
        )
    largest = np.nanmax(np.abs(places), axis=0, initial=0.0)
    if largest[0] > 360 or largest[1] > 90:
        raise ValueError(
            "expected longitudes from -360 to 360 and latitudes from -90 to 90 degrees, got "
            f"{_beyond(places)}"
        )
    return places


def _beyond(places: Float[np.ndarray, "N 2"]) -> str:
    """What is wrong with places that are no degrees, and what helps."""
    beyond = (np.abs(places) > [360, 90]).any(-1)
    first = int(np.flatnonzero(beyond)[0])
    text = f"{places[first].tolist()} in place {first}, and {int(beyond.sum())} such places in all"
    if beyond.mean() > 0.5:
        return f"{text}; leave out project= if they are lengths already"
    return (
        f"{text}; if these values stand for missing ones, make them NaN and drop them: "
        "dataset.where((abs(dataset.lon) <= 360) & (abs(dataset.lat) <= 90)), with the names of "
        "longitude and latitude"
    )


def _box(
    places: Float[np.ndarray, "N 2"],
) -> tuple[Float[np.ndarray, "2"], Float[np.ndarray, "2"]]:
    """The centre in degrees, and half the width and height in km, of the area of some places.

    Distances from the centre are true, in an azimuthal equidistant projection.
    """
    if not len(places):
        raise ValueError("expected a place with numbers as longitude and latitude, got none")
    longitude, latitude = np.deg2rad(places.T)
    across = np.cos(latitude)
    east, north, up = across * np.cos(longitude), across * np.sin(longitude), np.sin(latitude)
    east, north, up = east.mean(), north.mean(), up.mean()
    centre = np.rad2deg([np.arctan2(north, east), np.arctan2(up, np.hypot(east, north))])
    for _ in range(3):  # directions at the centre turn with it, near a pole
        projection = optional("pyproj", "geo").Proj(
            proj="aeqd", lon_0=centre[0], lat_0=centre[1], ellps="WGS84"
        )
        points = np.stack(projection(*places.T), axis=-1) / 1000
        low, high = points.min(0), points.max(0)
        centre = np.array(projection(*(500 * (low + high)), inverse=True))
    extent = np.hypot(*(high - low))
    if not extent <= _EXTENT:
        raise ValueError(
            f"expected an area with a diagonal of up to {_EXTENT:g} km, got {extent:.0f} km: no "
            "plane keeps lengths and angles of a larger part of the Earth; select a smaller area, "
            "or divide it into several"
        )
    return centre, (high - low) / 2


# A field on a plane, seen in longitude and latitude.


class Field(Protocol):
    """The part of `FieldPosterior` that maps use."""

    num_inputs: int
    num_outputs: int
    space: tuple[int, ...]
    mean: "Values"  # (n, q)
    variance: "Values"  # (n, q)
    pointwise_covariance: "Values"  # (n, q, q)
    sample_paths: Callable[..., "Paths"]


Values = Callable[[Float[Tensor, "n d"], Symbol | None], Tensor]
"""What a field, or functions drawn from it, give at points, of themselves or of a symbol."""


class Paths(Protocol):
    """Functions drawn from a field."""

    def __call__(
        self, x: Float[Tensor, "n d"], symbol: Symbol | None
    ) -> Float[Tensor, "S n q"]: ...

    def __len__(self) -> int: ...


@dataclass(frozen=True)
class ProjectedField:
    """The field at longitude and latitude, with vectors to the east and north.

    Args:
        field: the field on the plane.
        plane: the projection.
        columns: those of longitude and latitude among the inputs.
    """

    field: Field
    plane: LocalPlane
    columns: tuple[int, int]

    @property
    def num_inputs(self) -> int:
        return self.field.num_inputs

    @property
    def num_outputs(self) -> int:
        return self.field.num_outputs

    @property
    def space(self) -> tuple[int, ...]:
        return self.field.space

    def in_km(self, inputs: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """The attributes of inputs, with the unit of those of the plane, and of a height's unless
        it has one."""
        heights = self.space if self.num_outputs == len(self.space) else ()  # beside a vector
        km = {"units": "km"}
        return [
            km if i in self.columns else {**km, **own} if i in heights else own
            for i, own in enumerate(inputs)
        ]

    def mean(self, x: Float[Tensor, "n d"], symbol: Symbol | None) -> Float[Tensor, "n q"]:
        mean, turn = self.field.mean(self.points(x), symbol), self.turn(x, symbol)
        return mean if turn is None else (turn @ mean.unsqueeze(-1)).squeeze(-1)

    def variance(self, x: Float[Tensor, "n d"], symbol: Symbol | None) -> Float[Tensor, "n q"]:
        points, turn = self.points(x), self.turn(x, symbol)
        if turn is None:
            return self.field.variance(points, symbol)
        covariance = self.field.pointwise_covariance(points, symbol)
        return (turn @ covariance * turn).sum(-1)

    def pointwise_covariance(
        self, x: Float[Tensor, "n d"], symbol: Symbol | None
    ) -> Float[Tensor, "n q q"]:
        covariance = self.field.pointwise_covariance(self.points(x), symbol)
        turn = self.turn(x, symbol)
        return covariance if turn is None else turn @ covariance @ turn.mT

    def sample_paths(self, num_paths: int, *, seed: int = 0) -> "ProjectedPaths":
        return ProjectedPaths(self, self.field.sample_paths(num_paths, seed=seed))

    def _places(self, x: Float[Tensor, "n d"]) -> Float[np.ndarray, "n 2"]:
        return x[:, list(self.columns)].numpy()

    def points(self, x: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
        """The inputs of the model: km in the plane, and other columns as they are."""
        points = x.clone()
        points[:, list(self.columns)] = torch.from_numpy(self.plane.forward(self._places(x)))
        return points

    def turn(self, x: Float[Tensor, "n d"], symbol: Symbol | None) -> Tensor | None:
        """The matrices (n, q, q) from the outputs in the plane to those of the east and north.

        p outputs are a vector, p·d the derivatives of one, along the d columns of space. With two
        components, divided by k in the plane, a symbol in units of lengths to the power n gets the
        factor k^(1−n).
        """
        p, space = self.num_outputs, len(self.space)
        q = p if symbol is None else symbol.num_outputs(p)
        if not self.plane.vectors or p == 1:
            return None
        frame = torch.from_numpy(self.plane.frame(self._places(x), p))
        scale = frame[:, :2, :2].det() ** -0.5  # k, or 1
        power = 0 if symbol is None else symbol.length_power or 0
        # A vector v of the Earth is v/k in the plane, and a length of the plane is k times that of
        # the Earth. `vector`, the inverse of the frame, turns v/k back and multiplies by k; each
        # power of a length divides by k.
        factor = (scale**-power)[:, None, None]
        vector = frame.inverse()
        if q == 1:
            return factor * scale[:, None, None]
        if q == p:
            return factor * vector
        if q != p * space or self.space[:2] != self.columns:
            raise ValueError(
                f"expected a symbol with 1 output, {p} components of a vector or their {p * space} "
                f"derivatives to turn to the east and north, got {q} outputs; evaluate it at "
                "project.forward(places), in the axes of the plane"
            )
        along = torch.eye(space, dtype=torch.float64).repeat(len(x), 1, 1)
        along[:, :2, :2] = vector[:, :2, :2] / scale[:, None, None]
        return factor * torch.einsum("nij,nkl->nikjl", vector, along).reshape(len(x), q, q)


@dataclass(frozen=True)
class ProjectedPaths:
    """Functions drawn from a field, at longitude and latitude, with vectors to the east and north.

    Args:
        field: the field at longitude and latitude.
        paths: the functions on the plane.
    """

    field: ProjectedField
    paths: Paths

    def __call__(self, x: Float[Tensor, "n d"], symbol: Symbol | None) -> Float[Tensor, "S n q"]:
        values, turn = self.paths(self.field.points(x), symbol), self.field.turn(x, symbol)
        return values if turn is None else (turn @ values.unsqueeze(-1)).squeeze(-1)

    def __len__(self) -> int:
        return len(self.paths)
