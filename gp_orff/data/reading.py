"""What a user gives as data, as readings that share an instrument and a pattern."""

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from gp_orff.data.observations import Observations
from gp_orff.data.patterns import DEFAULT, Components, GroupKey, LineOfSight
from gp_orff.data.survey import DataWarning
from gp_orff.data.validation import as_matrix, as_points, is_single

_CHUNK = 2**20  # points that are looked at together
_COARSE = 1e-3  # of the extent of the positions, a rounding that is told


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


def read(x: object, y: object, num_outputs: int, options: Options) -> list[Observations]:
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
            whole = Observations(key, x, values, own, direction, place)
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
