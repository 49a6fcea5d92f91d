"""Coasts as observations: the component of the flow along the normal of a coast is zero."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from gpytorch.kernels import Kernel
from jaxtyping import Float
from torch import Tensor

from gp_orff.data.checks import in_column_units
from gp_orff.data.validation import as_points, as_real, is_single
from gp_orff.features.chunked import Box
from gp_orff.kernels.derivatives import at_zero
from gp_orff.kernels.tree import space_of, terms
from gp_orff.models.cross_validation import lengthscales_of_terms

_NOISE = 1e-4  # the variance of the flow through a coast, over the prior variance of the flow


def coast_observations(
    kernel: Kernel,
    num_inputs: int,
    box: Box,
    units: Sequence[str | None],
    polygon: object,
    spacing: object,
    noise: object,
    at: object,
) -> tuple[Float[Tensor, "m d"], Float[Tensor, "m 2"], object]:
    """Points (m, d) along a coast near the data, the normals (m, 2) there, and the variance of the
    flow across the coast.

    Args:
        kernel: the kernel of the model.
        num_inputs: the number d of inputs.
        box: the box of the data.
        units: the units of the inputs, as far as they are known.
        polygon, spacing, noise, at: as for `VectorFieldGP.observe_coast`.
    """
    space = space_of(kernel, num_inputs)
    if len(space) != 2 or terms(kernel)[0].num_outputs != 2:
        raise ValueError(
            f"expected a field of two components in two dimensions for a coast, got "
            f"{terms(kernel)[0].num_outputs} components in {len(space)}"
        )
    lengths = np.array(
        [scales[list(space)] for scales in lengthscales_of_terms(kernel, num_inputs)]
    )
    positive = lengths[lengths > 0]
    if spacing is None and not len(positive):
        raise ValueError(
            "expected spacing= for a kernel without a lengthscale, got None; give the distance "
            "between points along the coast"
        )
    of_space = tuple(units[column] for column in space) if units else ()
    step = 0.5 * positive.min() if spacing is None else _positive(spacing, of_space)
    along = [
        points_along(_vertices(ring, of_space), closed, step) for ring, closed in _rings(polygon)
    ]
    x, normals = (np.concatenate(parts) for parts in zip(*along, strict=True))
    if not len(x):
        raise ValueError(
            "expected a coast with edges, got one whose vertices are all at one place; give at "
            "least two different vertices"
        )
    low, high = np.array(box)[list(space)].T
    reach = positive.max() if len(positive) else (high - low).max()
    near = ((x >= low - reach) & (x <= high + reach)).all(-1)
    if not near.any():
        raise ValueError(
            f"expected a coast near the data, in {low.tolist()} to {high.tolist()}, got one in "
            f"{x.min(0).tolist()} to {x.max(0).tolist()}; give it in the coordinates of the model, "
            "such as plane.forward(polygon)"
        )
    of_others = tuple(unit for column, unit in enumerate(units) if column not in space)
    others = None if at is None else in_column_units(at, of_others, "at")
    points = _with_others(torch.from_numpy(x[near]), others, space, num_inputs)
    copies = len(points) // int(near.sum())
    if noise is None:
        variances = [at_zero(term).diagonal(dim1=-1, dim2=-2) for term in terms(kernel)]
        noise = _NOISE * torch.stack(variances).sum(0).mean().item()
    return points, torch.from_numpy(normals[near]).repeat(copies, 1), noise


def points_along(
    ring: Float[np.ndarray, "v 2"], closed: bool, spacing: float
) -> tuple[Float[np.ndarray, "m 2"], Float[np.ndarray, "m 2"]]:
    """Equidistant points along each edge, at most `spacing` from each other, and unit normals."""
    ends = np.concatenate([ring[1:], ring[:1]]) if closed else ring[1:]
    starts = ring if closed else ring[:-1]
    edges = ends - starts
    lengths = np.linalg.norm(edges, axis=-1)
    starts, edges, lengths = (values[lengths > 0] for values in (starts, edges, lengths))
    counts = np.ceil(lengths / spacing - 1e-6).astype(int).clip(1)  # 1e-6 allows for rounding
    edge = np.repeat(np.arange(len(edges)), counts)
    number = np.arange(len(edge)) - np.repeat(np.cumsum(counts) - counts, counts)
    share = (number + 0.5) / counts[edge]  # in the middle of equal parts, away from corners
    tangents = edges / lengths[:, None]
    normals = np.stack([tangents[:, 1], -tangents[:, 0]], -1)
    return starts[edge] + share[:, None] * edges[edge], normals[edge]


def _with_others(
    x: Float[Tensor, "m 2"], at: object, space: tuple[int, ...], num_inputs: int
) -> Float[Tensor, "m d"]:
    """The points along a coast, repeated for each row of the other inputs of the model."""
    others = [column for column in range(num_inputs) if column not in space]
    if bool(others) != (at is not None):
        raise ValueError(
            f"expected at= with the {len(others)} inputs of the model that are not in space, got "
            f"{'None' if at is None else 'an array'}"
        )
    rows = as_points(at, len(others)) if others else x.new_empty(1, 0)
    points = x.new_empty(len(rows), len(x), num_inputs)
    points[..., list(space)] = x
    points[..., others] = rows[:, None]
    return points.flatten(0, 1)


def _positive(spacing: object, units: tuple[str | None, ...]) -> float:
    """The spacing as a number in the unit of the directions of space."""
    value = in_column_units(spacing, units, "spacing")
    try:
        number = as_real(value, "spacing").item()
    except (TypeError, RuntimeError):  # no number, or several
        number = np.nan
    if not 0 < number < np.inf:
        raise ValueError(
            f"expected a positive spacing, got {spacing!r}; give the distance between points"
        )
    return number


Ring = tuple[object, bool]
"""The vertices of a ring or line in the form in which the user gave them, and whether the line is
closed."""


def _rings(polygon: object) -> Iterator[Ring]:
    """Each ring or line of a coast."""
    shape: Any = getattr(polygon, "__geo_interface__", polygon)
    if isinstance(shape, Mapping):
        rings = list(_of_geometry(shape))
    elif not is_single(shape) and any(hasattr(part, "__geo_interface__") for part in shape):
        rings = [ring for part in shape for ring in _rings(part)]
    else:
        parts = [] if is_single(shape) else list(shape)
        rings = [(shape, True)] if parts and np.ndim(parts[0]) == 1 else [(r, True) for r in parts]
    if not rings:
        raise ValueError(
            "expected a coast as vertices (v, 2) of a ring, a list of rings, or an object with "
            f"__geo_interface__, got {polygon!r}"
        )
    yield from rings


def _of_geometry(shape: Mapping[str, Any]) -> Iterator[Ring]:
    """The rings and lines of a geometry in the form of GeoJSON."""
    kind = shape.get("type")
    if kind == "Feature":
        yield from _rings(shape["geometry"])
    elif kind in ("GeometryCollection", "FeatureCollection"):
        for part in shape.get("geometries", shape.get("features", ())):
            yield from _rings(part)
    elif kind in ("Polygon", "MultiPolygon", "LineString", "MultiLineString"):
        closed = kind.endswith("Polygon")
        yield from ((line, closed) for line in _lines(shape.get("coordinates", ())))
    else:
        raise ValueError(f"expected a polygon or line as a coast, got a geometry of type {kind!r}")


def _lines(vertices: Any) -> Iterator[Any]:
    """The lines in nested vertices in the form of GeoJSON, without third coordinates."""
    first = vertices[0] if len(vertices) else ()
    if len(first) and np.ndim(first[0]) == 0:
        yield [point[:2] for point in vertices]
    else:
        for part in vertices:
            yield from _lines(part)


def _vertices(ring: object, units: tuple[str | None, ...]) -> Float[np.ndarray, "v 2"]:
    """The vertices of a ring or line, converted to the units of the directions of space."""
    array = as_real(in_column_units(ring, units, "the coast"), "the coast").numpy()
    if array.ndim != 2 or array.shape[-1] != 2 or len(array) < 2 or not np.isfinite(array).all():
        raise ValueError(
            "expected a coast as finite vertices (v, 2) of a ring, or a list of rings, got shape "
            f"{array.shape}, with {int((~np.isfinite(array)).any(-1).sum())} rows of NaN or "
            "infinite values; if such rows are between rings, give a list of the rings"
        )
    return array
