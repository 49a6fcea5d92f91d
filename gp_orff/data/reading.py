"""Convert the arguments of `VectorFieldGP.fit` to observations, by label and pattern."""

import warnings
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from gp_orff.data.checks import ColumnUnits
from gp_orff.data.likelihoods import along_axes, given_noise
from gp_orff.data.observations import Observations
from gp_orff.data.patterns import DEFAULT, Components, GroupKey, LineOfSight
from gp_orff.data.survey import DataWarning
from gp_orff.data.validation import are_missing, as_matrix, as_points, entries_of, is_single

_LONGITUDES, _LATITUDES = ("longitude", "lon", "long", "lng"), ("latitude", "lat")
_CHUNK = 2**20  # points of one chunk
_COARSE = 1e-3  # rounding of positions over their extent, above which a warning is given
PER_OBSERVATION = ("variances", "noise", "directions", "group", "track", "time")
"""The options with one entry for each observation, or one entry for all."""


@dataclass(frozen=True)
class Options:
    """The arguments of `VectorFieldGP.fit` that describe the observations."""

    variances: object = None
    noise: object = None
    scale_noise: bool = False
    directions: object = None
    group: object = None
    missing: str = "raise"
    merge: float | None = None
    track: object = None
    time: object = None

    def __post_init__(self):
        if self.noise is not None and self.variances is not None:
            raise ValueError(
                "expected noise= or variances=, got both; noise= has absolute variances, and "
                "variances= has factors of a learned variance: pass one of them"
            )
        if self.scale_noise and self.track is not None:
            raise NotImplementedError(
                "expected scale_noise=False with track=, got True; for tracks, a learned white "
                "variance is added to the given noise instead of a factor"
            )
        for name in PER_OBSERVATION:
            if isinstance(values := getattr(self, name), Mapping | Set):
                raise TypeError(
                    f"expected {name}= with one entry for each observation, in their order, got a "
                    f"{type(values).__name__}; give a list or an array"
                )
        if self.time is not None and self.track is None:
            raise ValueError(
                "expected track= with time=, got times alone; label the track of every "
                "observation, or make time a column of x if the field changes with it"
            )
        if self.missing not in ("raise", "mask"):
            raise ValueError(
                f"expected missing='raise' or missing='mask', got {self.missing!r}; 'mask' treats "
                "NaN in y as components that were not observed"
            )

    def rows(self, rows: slice) -> "Options":
        """The options of some rows."""
        values = {name: getattr(self, name) for name in PER_OBSERVATION}
        cut = {name: each[rows] for name, each in values.items() if not is_single(each)}
        return replace(self, **cut)


def in_units(
    units: ColumnUnits, x: object, y: object, options: Options
) -> tuple[object, object, Options]:
    """Arguments of `fit`, converted to the units of a model if both units are known."""
    x, y, noise, time = units.convert(x, y, options.noise, options.time)
    return x, y, replace(options, noise=noise, time=time)


def read(
    x: object, y: object, num_outputs: int, options: Options, joint: bool = False
) -> list[Observations]:
    """Validated observations, split into groups. With `joint`, y may have any number of columns,
    because the likelihood depends on all outputs of a point.

    Raises:
        TypeError: Values are not real numbers.
        ValueError: Shapes do not fit each other, values are NaN or infinite, or there are no
            observations.
    """
    x = as_points(x).detach()
    along = options.directions is not None
    y = as_matrix(y, "observations y (N, p)").detach()
    expected = 1 if along else y.shape[-1] if joint else num_outputs
    if y.shape[-1] != expected:
        raise ValueError(_wrong_columns(y.shape[-1], num_outputs, along))
    if len(x) != len(y):
        raise ValueError(f"expected x and y of equal length, got {len(x)} and {len(y)} rows")
    direction = unit_directions(options.directions, len(x), num_outputs) if along else None
    weight = _weights(options.variances, len(x), y.shape[-1])
    observed, parts, index = _observed(y, options), [], torch.arange(len(x))
    known, covariance = options.noise is not None, None
    if known:
        noise = given_noise(options.noise, len(x), y.shape[-1], observed).to(y.device)
        if options.track is not None and noise.dim() > 1:
            raise NotImplementedError(
                f"expected noise of shape {(len(x),)} with track=, a variance for each "
                f"observation, got {tuple(noise.shape)}; noise along tracks is the same in each "
                "component: give the mean of the variances of the components"
            )
        weight, covariance = (None, noise) if noise.dim() == 3 else (1 / noise, None)
    separate = weight is not None and weight.dim() == 2  # a weight for each component
    for label, members in _labels(options.group, len(x)):
        for columns, rows in _patterns(observed, expected, members, separate):
            pattern = LineOfSight(num_outputs) if along else Components(columns, num_outputs)
            weights = weight[:, columns[0]] if separate else weight
            key, values = GroupKey(label, pattern, known), y if along else pattern.select(y)
            part = Observations(key, x, values, weights, direction, index)
            part = part if rows is None else part.take(rows)
            if covariance is None:
                parts.append(part)
            else:
                parts += along_axes(part, covariance if rows is None else covariance[rows])
    return parts


def warn_of_positions(x: object) -> None:
    """Warn of positions that are coarse, or that are degrees according to their names."""
    _warn_of_precision(x)
    _warn_of_degrees(x)


def _warn_of_degrees(x: object) -> None:
    """Warn of a table with columns named longitude and latitude whose values may be degrees."""
    names = [str(name).lower() for name in getattr(x, "columns", ())]
    if not any(name in _LATITUDES for name in names):
        return
    named = dict(zip(names, as_points(x).T, strict=True))
    longitudes = any(_within(named.get(name), -180.0, 360.0) for name in _LONGITUDES)
    if longitudes and any(_within(named.get(name), -90.0, 90.0) for name in _LATITUDES):
        warnings.warn(
            f"expected positions in one unit of length, got columns {names}, which look like "
            "degrees: a degree of longitude is shorter than one of latitude, and neither is a "
            "length; project them onto a plane, as gp_orff.labelled.readings does with "
            'project="auto" for the xarray.Dataset of a table, or give an array without names',
            DataWarning,
            stacklevel=3,
        )


def _within(values: Float[Tensor, "N"] | None, least: float, most: float) -> bool:
    return values is not None and bool(least <= values.min() and values.max() <= most)


def _warn_of_precision(x: object) -> None:
    """Warn of positions in single or half precision, if their rounding is not small compared with
    their extent."""
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
            f"positions are given in {name}, whose resolution near {high[j]:.3g} is {step[j]:.2g}. "
            f"This is not small compared with the extent {extent[j]:.3g} of column {j}: points "
            "have moved or coincide. Give positions in float64, or subtract an offset first",
            DataWarning,
            stacklevel=3,
        )


def chunks(x: object, y: object, options: Options) -> Iterator[tuple[object, object, Options]]:
    """Slices of tensors and arrays, memory maps included, with their options."""
    num_points = _length(x, "points x (N, d)")
    num_observations = _length(y, "observations y (N, p)")
    if num_points != num_observations:
        raise ValueError(
            f"expected x and y of equal length, got {num_points} and {num_observations} rows"
        )
    size = _CHUNK if options.track is None else max(num_points, 1)  # tracks are not divided
    for start in range(0, max(num_points, 1), size):
        rows = slice(start, start + size)
        yield x[rows], y[rows], options.rows(rows)


def unpack(chunk: object, options: Options) -> tuple[object, object, Options]:
    """The x, y and options of a chunk, which is a pair (x, y) or a mapping."""
    values = dict(entries_of(chunk))
    if not {"x", "y"} <= set(values) <= {"x", "y", *PER_OBSERVATION}:
        raise ValueError(
            "expected a chunk with keys x, y and, if needed, variances or noise, directions, "
            f"group, track and time; got {sorted(map(str, values))}"
        )
    return values.pop("x"), values.pop("y"), replace(options, **values)


def has_no_rows(x: object, y: object) -> bool:
    """Whether x and y are arrays or lists without rows."""
    return all(not is_single(values) and not len(values) for values in (x, y))


def _length(values: object, name: str) -> int:
    """The number of rows of an array."""
    if not (isinstance(values, Tensor | list | tuple) or hasattr(values, "__array__")):
        raise TypeError(f"expected {name} as a tensor or array, got {type(values).__name__}")
    if is_single(values):
        raise ValueError(f"expected {name}, at least one row, got a single value")
    return len(values)


def _wrong_columns(got: int, num_outputs: int, along: bool) -> str:
    """The message for y with a wrong number of columns."""
    if along:
        return (
            "expected one value for each point, the component along its direction, got "
            f"{got} columns in y; give y of shape (N,)"
        )
    text = (
        f"expected observations y with {num_outputs} columns, one for each output of the "
        f"kernel, got {got}; "
    )
    if got == 1:
        return text + (
            f"for one component of each vector, such as a radial velocity, give directions= of "
            f"shape (N, {num_outputs}); a kernel of one output is a scalar kernel of gpytorch"
        )
    return text + (
        "kernels of vectors are gp_orff.CurlFreeKernel, DivergenceFreeKernel, HelmholtzKernel and "
        "gpytorch.kernels.MultitaskKernel"
    )


def unit_directions(values: object, count: int, num_outputs: int) -> Float[Tensor, "n p"]:
    """Unit vectors u_n, one for each point."""
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
    """Weights 1/variance: (N,) for vectors, (N, p) for components."""
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
            f"expected positive, finite variances, got {wrong} that are not among "
            f"{variances.numel()}; drop observations with infinite variance"
        )
    return variances.squeeze(-1).reciprocal() if variances.shape[-1] == 1 else 1 / variances


def _observed(y: Float[Tensor, "n v"], options: Options) -> Bool[Tensor, "n v"] | None:
    """Whether each value was observed; None if all were."""
    if torch.isfinite(y.sum()):
        return None
    nan, finite = torch.isnan(y), torch.isfinite(y)
    infinite = int((~finite & ~nan).sum())
    if infinite or (options.missing == "raise" and nan.any()):
        remedy = ", or pass missing='mask' if NaN means that a component was not observed"
        raise ValueError(
            f"expected finite observations, got {int((~finite).sum())} NaN or infinite values "
            f"among {y.numel()}; drop those points{'' if options.track is not None else remedy}"
        )
    return finite if nan.any() else None


def _labels(group: object, count: int) -> list[tuple[str, Int[Tensor, "m"] | None]]:
    """Each label with its rows, or with None for all rows. Observations with missing labels have no
    group."""
    if group is None:
        return [(DEFAULT, None)]
    if is_single(group):
        return [(str(group), None)]
    labels = np.asarray(group)
    if labels.shape != (count,):
        raise ValueError(
            f"expected one group for all observations, or {count} labels, got shape {labels.shape}"
        )
    texts = np.array([str(label) for label in labels.tolist()])
    named = np.where(are_missing(texts, group), DEFAULT, texts)
    names, which = np.unique(named, return_inverse=True)
    return [
        (str(name), torch.from_numpy(np.flatnonzero(which == i))) for i, name in enumerate(names)
    ]


def _patterns(
    observed: Bool[Tensor, "n v"] | None,
    num_values: int,
    members: Int[Tensor, "m"] | None,
    separate: bool,
) -> Iterator[tuple[tuple[int, ...], Int[Tensor, "m"] | None]]:
    """The sets of components that were observed together, with their rows. With `separate`, each
    component is a separate set."""
    every = tuple(range(num_values))
    subsets = [(j,) for j in every] if separate else [every]
    if observed is None:
        yield from ((columns, members) for columns in subsets)
        return
    rows = torch.arange(len(observed)) if members is None else members
    flags = observed.cpu()[rows]
    if not separate:
        subsets = [tuple(np.flatnonzero(p)) for p in np.unique(flags.numpy(), axis=0) if p.any()]
    for columns in subsets:
        selected = flags[:, list(columns)].all(-1)
        if not separate:
            selected &= flags.sum(-1) == len(columns)
        if selected.any():
            yield tuple(int(j) for j in columns), rows[selected]
