"""Local map projections, and a field on a plane at longitudes and latitudes."""

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

    `LocalPlane.around(places)` chooses a conformal projection whose origin is the centre of the
    area. It is transverse Mercator if the area is at least as tall as wide, otherwise oblique
    stereographic. A conformal projection multiplies all lengths at a position by the same factor k,
    and rotates all vectors there by the same angle. The relative error of lengths is |k − 1| ≤
    s²/(32 R²) in an area with the diagonal s, where R = 6371 km. This is 8e-6 for 100 km, 8e-4 for
    1000 km, and 0.7 % for the limit of 3000 km.

    Vectors v with two components are rotated and divided by k before a model is fitted to them. The
    divergence and the curl of the resulting field in the plane are k⁻² times those of v on the
    ellipsoid. Its potential, stream function and line integrals equal those of v, and gradients
    remain gradients. Maps in longitude and latitude are multiplied by the powers of k, so they have
    no distortion. Vectors with three components are only rotated.

    Args:
        crs: a projected coordinate reference system, in any form that pyproj reads, such as
            "EPSG:31983". Longitudes and latitudes refer to its datum. Only conformal projections
            rotate vectors exactly.
        vectors: whether the first two outputs of a model are the components of a vector to the east
            and to the north. If False, only positions are projected.

    Raises:
        ImportError: pyproj is not installed. Run `pip install gp_orff[geo]`.
        ValueError: The reference system is unknown or not projected, or its axes do not point to
            the east and north.

    Example:
        >>> import gp_orff
        >>> plane = gp_orff.labelled.LocalPlane.around([[10.0, 50.0], [12.0, 51.0]])
        >>> points = plane.forward([[11.0, 50.5], [12.0, 51.0]])
        >>> points.round(1).tolist(), plane.inverse(points).round(9).tolist()
        ([[0.8, -0.5], [70.9, 55.6]], [[11.0, 50.5], [12.0, 51.0]])
        >>> # the direction of north in the plane
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
                f"expected a coordinate reference system that pyproj knows, such as 'EPSG:31983', "
                f"or project='auto', got {self.crs!r}"
            ) from error
        object.__setattr__(self, "crs", crs.to_string())
        if not crs.is_projected:
            raise ValueError(
                f"expected a projected coordinate reference system, got {crs.name!r}; use "
                "project='auto', or a projected system such as 'EPSG:31983'"
            )
        if "+axis=" in self._projection.srs:
            raise ValueError(
                f"expected axes to the east and to the north, got other axes in {crs.name!r}; use "
                "project='auto'"
            )

    @classmethod
    def around(cls, places: Float[np.ndarray, "N 2"], *, vectors: bool = True) -> "LocalPlane":
        """Return a projection for the area around given positions.

        Args:
            places: longitudes and latitudes (N, 2) in degrees. Rows with NaN are ignored.
            vectors: whether the first two outputs of a model are the components of a vector to the
                east and to the north. If False, only positions are projected.

        Raises:
            ImportError: pyproj is not installed. Run `pip install gp_orff[geo]`.
            ValueError: Values are not degrees, or the diagonal of the area exceeds 3000 km.

        Example:
            >>> import gp_orff
            >>> plane = gp_orff.labelled.LocalPlane.around([[10, 50], [12, 51]])
            >>> plane.forward([[11.0, 50.5]]).round(1).tolist()  # near the origin
            [[0.8, -0.5]]
        """
        places = _degrees(places)
        (longitude, latitude), half = _box(places[np.isfinite(places).all(-1)])
        # The scale k increases from the centre to the sides by x²/2R² for transverse Mercator, and
        # by r²/4R² for the stereographic projection. A scale at the centre that is smaller by half
        # of this increase balances the errors at the centre and at the sides.
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
        """Raise an error if the area of the positions has a diagonal above 3000 km.

        Args:
            places: longitudes and latitudes (N, 2) in degrees. Rows with NaN are ignored.

        Raises:
            ValueError: Values are not degrees, or the diagonal exceeds 3000 km.

        Example:
            >>> import gp_orff
            >>> plane = gp_orff.labelled.LocalPlane.around([[10, 50], [12, 51]])
            >>> plane.check_extent([[9.0, 49.0], [13.0, 52.0]])  # no error
        """
        places = _degrees(places)
        _box(places[np.isfinite(places).all(-1)])

    def forward(self, places: Float[np.ndarray, "N 2"]) -> Float[np.ndarray, "N 2"]:
        """Return positions in the plane (N, 2), in km to the east and to the north of the origin.

        Args:
            places: longitudes and latitudes (N, 2) in degrees.

        Raises:
            ValueError: Values are not degrees, or positions are outside the area of the projection.

        Example:
            >>> import gp_orff
            >>> plane = gp_orff.labelled.LocalPlane.around([[10, 50], [12, 51]])
            >>> plane.forward([[11.0, 50.5], [12.0, 51.0]]).round(1).tolist()
            [[0.8, -0.5], [70.9, 55.6]]
        """
        places = _degrees(places)
        points = np.stack(self._projection(*places.T), axis=-1) / 1000
        lost = np.isinf(points).any(-1)
        if lost.any():
            raise ValueError(
                f"expected places inside the area of the projection {self.crs!r}, got {lost.sum()} "
                f"outside, such as {places[lost][0].tolist()}; drop them, or use another projection"
            )
        return points

    def inverse(self, points: Float[np.ndarray, "N 2"]) -> Float[np.ndarray, "N 2"]:
        """Return longitudes and latitudes (N, 2) in degrees. Longitudes are from −180 to 180.

        Args:
            points: positions in the plane (N, 2), in km.

        Example:
            >>> import gp_orff
            >>> plane = gp_orff.labelled.LocalPlane.around([[10, 50], [12, 51]])
            >>> points = plane.forward([[12.0, 51.0]])
            >>> plane.inverse(points).round(9).tolist()
            [[12.0, 51.0]]
        """
        x, y = np.asarray(points, dtype=np.float64).reshape(-1, 2).T * 1000
        return np.stack(self._projection(x, y, inverse=True), axis=-1)

    def rotation(self, places: Float[np.ndarray, "N 2"]) -> Float[np.ndarray, "N 2 2"]:
        """Return the rotation matrices R (N, 2, 2) with (v_x, v_y) = R (v_east, v_north).

        R = [[cos γ, −sin γ], [sin γ, cos γ]], where γ is the meridian convergence: the angle from
        the y axis of the plane to the meridian. It is negative if the angle is clockwise.

        Args:
            places: longitudes and latitudes (N, 2) in degrees.

        Raises:
            ValueError: Values are not degrees.

        Example:
            >>> import gp_orff
            >>> plane = gp_orff.labelled.LocalPlane.around([[10, 50], [12, 51]])
            >>> plane.rotation([[12.0, 51.0]]).round(3).tolist()
            [[[1.0, -0.014], [0.014, 1.0]]]
        """
        angle = np.deg2rad(self._factors(places)[0])
        cos, sin = np.cos(angle), np.sin(angle)
        return np.stack([cos, -sin, sin, cos], axis=-1).reshape(-1, 2, 2)

    def rotate(
        self, vectors: Float[np.ndarray, "N p"], places: Float[np.ndarray, "N 2"]
    ) -> Float[np.ndarray, "N p"]:
        """Return vectors (N, p) with components along x and y instead of east and north.

        Lengths do not change, and components after the first two are copied.

        Args:
            vectors: vectors (N, p) whose first two components are to the east and to the north.
            places: longitudes and latitudes (N, 2) in degrees.

        Raises:
            ValueError: Values are not degrees.

        Example:
            >>> import gp_orff
            >>> plane = gp_orff.labelled.LocalPlane.around([[10, 50], [12, 51]])
            >>> plane.rotate([[0.0, 1.0]], [[12.0, 51.0]]).round(4).tolist()
            [[-0.0137, 0.9999]]
        """
        turned = np.array(vectors, dtype=np.float64)
        turned[:, :2] = np.einsum("nij,nj->ni", self.rotation(places), turned[:, :2])
        return turned

    def frame(self, places: Float[np.ndarray, "N 2"], p: int) -> Float[np.ndarray, "N p p"]:
        """Return the matrices (N, p, p) that convert vectors to the components of a model.

        The vectors have the components east, north and so on. The first two rows and columns are
        the `rotation`, divided by the `scale` k if p = 2. The rest is the identity matrix.

        Args:
            places: longitudes and latitudes (N, 2) in degrees.
            p: the number of components.

        Raises:
            ValueError: Values are not degrees.

        Example:
            >>> import gp_orff
            >>> plane = gp_orff.labelled.LocalPlane.around([[10, 50], [12, 51]])
            >>> plane.frame([[12.0, 51.0]], 3).shape
            (1, 3, 3)
        """
        frame = np.broadcast_to(np.eye(p), (len(places), p, p)).copy()
        frame[:, :2, :2] = self.rotation(places)
        return frame / self.scale(places)[:, None, None] if p == 2 else frame

    def scale(self, places: Float[np.ndarray, "N 2"]) -> Float[np.ndarray, "N"]:
        """Return the scale k (N,): lengths in the plane divided by lengths on the ellipsoid.

        Args:
            places: longitudes and latitudes (N, 2) in degrees.

        Raises:
            ValueError: Values are not degrees.

        Example:
            >>> import gp_orff
            >>> plane = gp_orff.labelled.LocalPlane.around([[10, 50], [12, 51]])
            >>> abs(plane.scale([[12.0, 51.0]]) - 1).item() < 1e-4
            True
        """
        return np.sqrt(self._factors(places)[1])

    def _factors(self, places: object) -> tuple[Float[np.ndarray, "N"], Float[np.ndarray, "N"]]:
        """The meridian convergence in degrees and the areal scale k²; NaN if places are NaN."""
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
    """A text on places that are not degrees, with a remedy."""
    beyond = (np.abs(places) > [360, 90]).any(-1)
    first = int(np.flatnonzero(beyond)[0])
    text = f"{places[first].tolist()} in place {first}, and {int(beyond.sum())} such places in all"
    if beyond.mean() > 0.5:
        return f"{text}; omit project= if the positions are already lengths"
    return (
        f"{text}; if these values mark missing positions, make them NaN and drop them: "
        "dataset.where((abs(dataset.lon) <= 360) & (abs(dataset.lat) <= 90)), with the names of "
        "longitude and latitude"
    )


def _box(
    places: Float[np.ndarray, "N 2"],
) -> tuple[Float[np.ndarray, "2"], Float[np.ndarray, "2"]]:
    """The centre in degrees, and half the width and height in km, of the area of some places.

    They follow from an azimuthal equidistant projection, in which distances from the centre are
    exact.
    """
    if not len(places):
        raise ValueError(
            "expected at least one place with a longitude and a latitude, got none; check that the "
            "positions are not all NaN"
        )
    longitude, latitude = np.deg2rad(places.T)
    across = np.cos(latitude)
    east, north, up = across * np.cos(longitude), across * np.sin(longitude), np.sin(latitude)
    east, north, up = east.mean(), north.mean(), up.mean()
    centre = np.rad2deg([np.arctan2(north, east), np.arctan2(up, np.hypot(east, north))])
    for _ in range(3):  # near a pole, east and north depend on the centre
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
            "plane preserves lengths and angles of a larger part of the Earth; select a smaller "
            "area, or divide it into several"
        )
    return centre, (high - low) / 2


# A field on a plane, evaluated at longitudes and latitudes.


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
"""A function that returns values of a field, or of a symbol of it, at points."""


class Paths(Protocol):
    """Functions drawn from a field."""

    def __call__(
        self, x: Float[Tensor, "n d"], symbol: Symbol | None
    ) -> Float[Tensor, "S n q"]: ...

    def __len__(self) -> int: ...


@dataclass(frozen=True)
class ProjectedField:
    """A field on a plane at longitudes and latitudes, with vectors to the east and north.

    Args:
        field: the field on the plane.
        plane: the projection.
        columns: the columns of longitude and latitude among the inputs.
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
        """The attributes of the inputs, with the unit km for positions in the plane. For a vector
        field, a height without a unit is also in km."""
        heights = self.space if self.num_outputs == len(self.space) else ()
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
        """The inputs of the model, with positions in km in the plane. Other columns are copied."""
        points = x.clone()
        points[:, list(self.columns)] = torch.from_numpy(self.plane.forward(self._places(x)))
        return points

    def turn(self, x: Float[Tensor, "n d"], symbol: Symbol | None) -> Tensor | None:
        """The matrices (n, q, q) from outputs in the plane to outputs along east and north.

        If q = p, the outputs are a vector. If q = p·d, they are the derivatives of a vector along
        the d directions of space. A vector with two components is divided by k in the plane. A
        symbol of it whose unit has the power n of a length therefore has the factor k^(1−n).
        """
        p, space = self.num_outputs, len(self.space)
        q = p if symbol is None else symbol.num_outputs(p)
        if not self.plane.vectors or p == 1:
            return None
        frame = torch.from_numpy(self.plane.frame(self._places(x), p))
        scale = frame[:, :2, :2].det() ** -0.5  # k, or 1
        power = 0 if symbol is None else symbol.length_power or 0
        # A vector v on the Earth is v/k in the plane, and a length in the plane is k times the
        # length on the Earth. `vector`, the inverse of the frame, rotates v/k back and multiplies
        # by k. Each power of a length divides by k.
        factor = (scale**-power)[:, None, None]
        vector = frame.inverse()
        if q == 1:
            return factor * scale[:, None, None]
        if q == p:
            return factor * vector
        if q != p * space or self.space[:2] != self.columns:
            raise ValueError(
                f"expected a symbol with 1 output, the {p} components of a vector, or their "
                f"{p * space} derivatives, to rotate to east and north, got {q} outputs; evaluate "
                "the symbol at project.forward(places), in the axes of the plane"
            )
        along = torch.eye(space, dtype=torch.float64).repeat(len(x), 1, 1)
        along[:, :2, :2] = vector[:, :2, :2] / scale[:, None, None]
        return factor * torch.einsum("nij,nkl->nikjl", vector, along).reshape(len(x), q, q)


@dataclass(frozen=True)
class ProjectedPaths:
    """Sample paths of a field at longitudes and latitudes, with vectors to the east and north.

    Args:
        field: the field at longitudes and latitudes.
        paths: the sample paths on the plane.
    """

    field: ProjectedField
    paths: Paths

    def __call__(self, x: Float[Tensor, "n d"], symbol: Symbol | None) -> Float[Tensor, "S n q"]:
        values, turn = self.paths(self.field.points(x), symbol), self.field.turn(x, symbol)
        return values if turn is None else (turn @ values.unsqueeze(-1)).squeeze(-1)

    def __len__(self) -> int:
        return len(self.paths)
