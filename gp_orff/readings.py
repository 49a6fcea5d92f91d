"""What a user gives as data, as readings that share an instrument and a pattern."""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from gp_orff.distances import DataWarning
from gp_orff.patterns import Components, LineOfSight, Pattern

_CHUNK = 2**20  # points that are looked at together
_COARSE = 1e-3  # of the extent of the positions, a rounding that is told
DEFAULT = ""  # the instrument of readings that name none


class GroupKey(NamedTuple):
    """Readings whose statistics add up."""

    label: str  # of the instrument, which has a noise of its own
    pattern: Pattern


@dataclass(frozen=True)
class Readings:
    """Readings of one group: y_n = H_n f(x_n) + ε_n, ε_n ~ N(0, Σ / w_n)."""

    key: GroupKey
    x: Float[Tensor, "n d"]
    y: Float[Tensor, "n v"]
    weight: Float[Tensor, "n"] | None = None
    direction: Float[Tensor, "n p"] | None = None
    place: Int[Tensor, "n"] | None = None  # of each among the points that were given with it

    def __len__(self) -> int:
        return len(self.x)

    @property
    def pattern(self) -> Pattern:
        return self.key.pattern

    @property
    def masses(self) -> Float[Tensor, "k"]:
        """Σ_n w_n a_n."""
        weights = self.pattern.weights(self.direction, self.y)
        return (weights if self.weight is None else weights * self.weight.unsqueeze(-1)).sum(0)

    def take(self, index: Int[Tensor, "m"] | slice) -> "Readings":
        """Some of the readings."""
        return self._each(lambda tensor: tensor[index])

    def weighted(self, factor: Float[Tensor, "n"]) -> "Readings":
        """The same with weights multiplied."""
        own = factor if self.weight is None else self.weight * factor
        return replace(self, weight=own)

    def minus(self, trend: Float[Tensor, "n p"]) -> "Readings":
        """The residuals of a trend of whole vectors."""
        return replace(self, y=self.y - self.see(trend))

    def see(self, vectors: Float[Tensor, "n p"]) -> Float[Tensor, "n v"]:
        """H_n of vectors."""
        return self.pattern.rows(vectors.unsqueeze(-1), self.direction).squeeze(-1)

    def see_covariance(self, blocks: Float[Tensor, "n p p"]) -> Float[Tensor, "n v v"]:
        """H_n C_n H_nᵀ of covariances of vectors."""
        half = self.pattern.rows(blocks, self.direction)
        return self.pattern.rows(half.mT, self.direction)

    def to(self, device: torch.device) -> "Readings":
        return self._each(lambda tensor: tensor.to(device))

    def copied(self) -> "Readings":
        return replace(self, place=None)._each(lambda tensor: tensor.clone())

    def moved(self, places: int) -> "Readings":
        """The same, with so many points before what was given with them."""
        return replace(self, place=self.place + places)

    def _each(self, change: Callable[[Tensor], Tensor]) -> "Readings":
        tensors = {name: getattr(self, name) for name in ("x", "y", "weight", "direction", "place")}
        return replace(
            self, **{name: None if t is None else change(t) for name, t in tensors.items()}
        )


def join(parts: Iterable[Readings]) -> list[Readings]:
    """Readings of the same group in one piece, groups in the order of their first reading."""
    groups: dict[GroupKey, list[Readings]] = {}
    for part in parts:
        groups.setdefault(part.key, []).append(part)
    return [own[0] if len(own) == 1 else _joined(own) for own in groups.values()]


def _joined(parts: list[Readings]) -> Readings:
    if any(part.weight is not None for part in parts):
        parts = [part.weighted(torch.ones_like(part.y[:, 0])) for part in parts]

    def cat(name: str) -> Tensor | None:
        tensors = [getattr(part, name) for part in parts]
        return None if tensors[0] is None else torch.cat(tensors)

    return Readings(parts[0].key, cat("x"), cat("y"), cat("weight"), cat("direction"))


@dataclass(frozen=True)
class Options:
    """How readings are to be understood: arguments of `VectorFieldGP.fit`."""

    variances: object = None
    directions: object = None
    group: object = None
    missing: str = "raise"

    def __post_init__(self):
        if self.missing not in ("raise", "mask"):
            raise ValueError(
                f"expected missing='raise' or missing='mask', got {self.missing!r}; 'mask' leaves "
                "out components of y that are NaN"
            )

    def rows(self, rows: slice) -> "Options":
        """For some of the points."""

        def cut(values: object) -> object:
            return values if is_single(values) else values[rows]

        return replace(
            self,
            variances=cut(self.variances),
            directions=cut(self.directions),
            group=cut(self.group),
        )


def read(x: object, y: object, num_outputs: int, options: Options) -> list[Readings]:
    """Validated readings, split into groups.

    Raises:
        TypeError: values that are not real numbers.
        ValueError: shapes that do not fit each other, NaN or infinite values, no readings at all.
    """
    _check_precision(x)
    x = as_points(x).detach()
    along = options.directions is not None
    y = as_matrix(y, "observations y (N, p)").detach()
    expected = 1 if along else num_outputs
    if y.shape[-1] != expected:
        raise ValueError(_wrong_columns(y.shape[-1], num_outputs, along))
    if len(x) != len(y):
        raise ValueError(f"expected x and y of equal length, got {len(x)} and {len(y)} rows")
    direction = _directions(options.directions, len(x), num_outputs) if along else None
    weight = _weights(options.variances, len(x), y.shape[-1])
    apart = weight is not None and weight.dim() == 2  # components of their own precision
    seen, found, place = _seen(y, options.missing), [], torch.arange(len(x))
    for label, mine in _labels(options.group, len(x)):
        for columns, rows in _patterns(seen, expected, mine, apart):
            pattern = LineOfSight(num_outputs) if along else Components(columns, num_outputs)
            own = weight[:, columns[0]] if apart else weight
            key, values = GroupKey(label, pattern), y if along else pattern.select(y)
            whole = Readings(key, x, values, own, direction, place)
            found.append(whole if rows is None else whole.take(rows))
    return found


def _check_precision(x: object) -> None:
    """Warn of single precision that does not tell neighbours from each other."""
    matrix = as_matrix(x, "points x (N, d)")
    dtype = x.dtype if isinstance(x, Tensor) else np.asarray(x).dtype
    name = str(dtype).removeprefix("torch.")
    if name not in ("float32", "float16", "bfloat16") or len(matrix) < 2:
        return
    eps = {"float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}[name]
    low, high = matrix.detach().amin(0), matrix.detach().amax(0)
    step = eps * torch.maximum(low.abs(), high.abs())
    extent = torch.where(high > low, high - low, (high - low).max())
    coarse = torch.nonzero(step > _COARSE * extent).flatten().tolist()
    if coarse:
        j = coarse[0]
        warnings.warn(
            f"positions are given in {name}, whose numbers near {high[j]:.3g} are {step[j]:.2g} "
            f"apart: not small against the {extent[j]:.3g} that column {j} extends, so that points "
            "have moved or fallen together; give them in float64, or subtract an offset before",
            DataWarning,
            stacklevel=2,
        )


def chunks(x: object, y: object, options: Options) -> Iterator[tuple[object, object, Options]]:
    """Tensors and arrays, memory maps included, slice by slice."""
    length, other = _length(x, "points x (N, d)"), _length(y, "observations y (N, p)")
    if length != other:
        raise ValueError(f"expected x and y of equal length, got {length} and {other} rows")
    for start in range(0, max(length, 1), _CHUNK):
        rows = slice(start, start + _CHUNK)
        yield x[rows], y[rows], options.rows(rows)


def unpack(chunk: object, options: Options) -> tuple[object, object, Options]:
    """One element of an iterable of chunks: (x, y), or a mapping that names them and options."""
    if isinstance(chunk, Mapping):
        known = {"x", "y", "variances", "directions", "group"}
        if not {"x", "y"} <= set(chunk) <= known:
            raise ValueError(
                f"expected a chunk with x, y and perhaps variances, directions, group; got "
                f"{sorted(map(str, chunk))}"
            )
        given = {name: chunk[name] for name in chunk if name not in ("x", "y")}
        return chunk["x"], chunk["y"], replace(options, **given)
    if not isinstance(chunk, tuple | list) or len(chunk) != 2:
        found = f"{len(chunk)} parts" if isinstance(chunk, tuple | list) else type(chunk).__name__
        raise TypeError(
            f"expected chunks (x, y), or mappings with keys x and y, got {found}; arrays are given "
            "as fit(x, y)"
        )
    return chunk[0], chunk[1], options


def as_points(x: object, num_inputs: int | None = None) -> Float[Tensor, "n d"]:
    """Points as a float64 matrix.

    Raises:
        TypeError: values that are not real numbers.
        ValueError: no matrix, no points, another number of columns, NaN or infinite coordinates.
    """
    return _checked(as_matrix(x, "points x (N, d)"), num_inputs)


def as_places(x: object, num_inputs: int) -> Float[Tensor, "n d"]:
    """Points to ask at, perhaps none; else as `as_points`."""
    points = _matrix(x, "points x (N, d)")
    if points.shape == (0, 1):  # of an empty list
        points = points.new_zeros(0, num_inputs)
    return _checked(points, num_inputs)


def _checked(points: Float[Tensor, "n d"], num_inputs: int | None) -> Float[Tensor, "n d"]:
    if num_inputs is not None and points.shape[-1] != num_inputs:
        raise ValueError(f"expected points with {num_inputs} columns, got {points.shape[-1]}")
    if not torch.isfinite(points.sum()):  # of a sum: no array of flags where all is well
        invalid = int((~torch.isfinite(points)).any(-1).sum())
        if invalid:
            raise ValueError(
                f"expected finite points, got {invalid} of {len(points)} with NaN or infinite "
                "coordinates; drop them"
            )
    return points


def as_matrix(values: object, name: str) -> Float[Tensor, "n k"]:
    """Tensors and arrays as float64, (N,) as a column; at least one row."""
    matrix = _matrix(values, name)
    if len(matrix) == 0:
        raise ValueError(f"expected {name}, at least one row, got shape {tuple(matrix.shape)}")
    return matrix


def _matrix(values: object, name: str) -> Float[Tensor, "n k"]:
    matrix = values if isinstance(values, Tensor) else torch.from_numpy(_array(values, name))
    if matrix.dtype == torch.bool or matrix.is_complex():
        raise TypeError(f"expected real numbers for {name}, got {matrix.dtype}")
    matrix = matrix.double()
    matrix = matrix.unsqueeze(-1) if matrix.dim() == 1 else matrix
    if matrix.dim() != 2 or matrix.shape[-1] == 0:
        raise ValueError(f"expected {name}, at least one row, got shape {tuple(matrix.shape)}")
    return matrix


def _array(values: object, name: str) -> np.ndarray:
    """Anything that is an array, as one that torch can take; what is masked in it, as NaN."""
    if isinstance(values, np.ma.MaskedArray):
        values = values.astype(np.float64).filled(np.nan)
    try:
        array = np.asarray(values)
    except (TypeError, ValueError) as error:  # rows of different lengths
        raise TypeError(f"expected {name} as a tensor or array, got {error}") from error
    if array.dtype.kind not in "fiu":
        raise TypeError(
            f"expected {name} as a tensor or array of real numbers, got "
            f"{type(values).__name__} of type {array.dtype}"
        )
    array = array.astype(np.float64, copy=False)  # of any byte order
    return array if array.flags.writeable else array.copy()  # a memory map: torch would warn


def is_single(values: object) -> bool:
    """Whether it is one value for all readings."""
    return (
        not hasattr(values, "__len__") or isinstance(values, str) or getattr(values, "ndim", 1) == 0
    )


def _length(values: object, name: str) -> int:
    """How many points an array has."""
    if not (isinstance(values, Tensor | list | tuple) or hasattr(values, "__array__")):
        raise TypeError(f"expected {name} as a tensor or array, got {type(values).__name__}")
    if is_single(values):
        raise ValueError(f"expected {name}, at least one row, got a single value")
    return len(values)


def _wrong_columns(found: int, num_outputs: int, along: bool) -> str:
    if along:
        return (
            "expected one number for each point, the component along its direction, got "
            f"{found} columns in y"
        )
    return (
        f"expected observations y with {num_outputs} columns, one for each output of the "
        f"kernel, got {found}; kernels of vectors are gp_orff.CurlFreeKernel, "
        "DivergenceFreeKernel, HelmholtzKernel and gpytorch.kernels.MultitaskKernel"
    )


def _directions(values: object, count: int, num_outputs: int) -> Float[Tensor, "n p"]:
    direction = as_matrix(values, "directions (N, p)").detach()
    if direction.shape != (count, num_outputs):
        raise ValueError(
            f"expected directions of shape {(count, num_outputs)}, got {tuple(direction.shape)}"
        )
    length = direction.norm(dim=-1)
    wrong = int((~((length - 1).abs() < 1e-3)).sum())
    if wrong:
        raise ValueError(
            f"expected unit vectors as directions, got {wrong} of {count} of another length; "
            "divide them by their norm"
        )
    return direction / length.unsqueeze(-1)


def _weights(values: object, count: int, columns: int) -> Tensor | None:
    """1/variance: (N,) for whole vectors, (N, p) for components."""
    if values is None:
        return None
    variances = as_matrix(values, "variances (N,) or (N, p)").detach()
    if len(variances) != count or variances.shape[-1] not in (1, columns):
        raise ValueError(
            f"expected variances of shape {(count,)} or {(count, columns)}, got "
            f"{tuple(variances.shape)}"
        )
    wrong = int((~((variances > 0) & torch.isfinite(variances))).sum())
    if wrong:
        raise ValueError(
            f"expected positive, finite variances, got {wrong} others among {variances.numel()}; "
            "drop readings of no weight"
        )
    return variances.squeeze(-1).reciprocal() if variances.shape[-1] == 1 else 1 / variances


def _seen(y: Float[Tensor, "n v"], missing: str) -> Bool[Tensor, "n v"] | None:
    """Which numbers were read; None if all of them."""
    if torch.isfinite(y.sum()):
        return None
    nan, finite = torch.isnan(y), torch.isfinite(y)
    infinite = int((~finite & ~nan).sum())
    if infinite or (missing == "raise" and nan.any()):
        raise ValueError(
            f"expected finite observations, got {int((~finite).sum())} NaN or infinite values "
            f"among {y.numel()}; drop those points, or pass missing='mask' where NaN means that a "
            "component was not observed"
        )
    if nan.all():
        raise ValueError("expected observations, got nothing but NaN")
    return finite if nan.any() else None


def _labels(group: object, count: int) -> list[tuple[str, Int[Tensor, "m"] | None]]:
    """Each instrument with its rows; None for all rows."""
    if group is None:
        return [(DEFAULT, None)]
    if is_single(group):
        return [(str(group), None)]
    labels = np.asarray(group)
    if labels.shape != (count,):
        raise ValueError(
            f"expected one group for all readings or {count} of them, got shape {labels.shape}"
        )
    named = np.array([DEFAULT if label is None else str(label) for label in labels.tolist()])
    names, which = np.unique(named, return_inverse=True)
    return [(str(n), torch.from_numpy(np.flatnonzero(which == i))) for i, n in enumerate(names)]


def _patterns(
    seen: Bool[Tensor, "n v"] | None, values: int, mine: Int[Tensor, "m"] | None, apart: bool
) -> Iterator[tuple[tuple[int, ...], Int[Tensor, "m"] | None]]:
    """The components seen together, with their rows; `apart`: every component by itself."""
    every = tuple(range(values))
    wanted = [(j,) for j in every] if apart else [every]
    if seen is None:
        yield from ((columns, mine) for columns in wanted)
        return
    rows = torch.arange(len(seen)) if mine is None else mine
    flags = seen[rows]
    if not apart:
        wanted = [tuple(np.flatnonzero(p)) for p in np.unique(flags.numpy(), axis=0) if p.any()]
    for columns in wanted:
        kept = flags[:, list(columns)].all(-1)
        if not apart:
            kept &= flags.sum(-1) == len(columns)
        if kept.any():
            yield tuple(int(j) for j in columns), rows[kept]
