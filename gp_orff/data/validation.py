"""Convert arrays of any kind to validated float64 tensors."""

from collections.abc import Mapping
from numbers import Number

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from gp_orff.kernels.base import as_real_tensor
from gp_orff.symbols.base import refuse_units

_MISSING = ("None", "nan", "<NA>", "NaT")  # the texts of missing labels


def as_points(
    x: object, num_inputs: int | None = None, empty: bool = False
) -> Float[Tensor, "n d"]:
    """Points x (N, d) as a float64 matrix. With `empty`, there may be no points.

    Raises:
        TypeError: Values are not real numbers.
        ValueError: x is not a matrix, has no rows, has another number of columns than `num_inputs`,
            or has NaN or infinite coordinates.
    """
    points = as_matrix(x, "points x (N, d)", empty)
    if num_inputs is not None and points.shape == (0, 1):  # for an empty list
        points = points.new_zeros(0, num_inputs)
    if num_inputs is not None and points.shape[-1] != num_inputs:
        raise ValueError(f"expected points with {num_inputs} columns, got {points.shape[-1]}")
    if not torch.isfinite(points.sum()):  # the sum needs no array of flags if all are finite
        invalid = int((~torch.isfinite(points)).any(-1).sum())
        if invalid:
            raise ValueError(
                f"expected finite points, got {invalid} of {len(points)} with NaN or infinite "
                "coordinates; drop them"
            )
    return points


def as_matrix(values: object, name: str, empty: bool = False) -> Float[Tensor, "n k"]:
    """A tensor or array as a float64 matrix. It must have at least one row, unless `empty`. Values
    (N,) become a column."""
    matrix = as_real(values, name)
    matrix = matrix.unsqueeze(-1) if matrix.dim() == 1 else matrix
    if matrix.dim() != 2 or matrix.shape[-1] == 0 or not (len(matrix) or empty):
        raise ValueError(f"expected {name}, at least one row, got shape {tuple(matrix.shape)}")
    return matrix


def as_real(values: object, name: str) -> Float[Tensor, "..."]:
    """A tensor or array of any shape in float64. A TypeError is raised for values that are not real
    numbers."""
    tensor = values if isinstance(values, Tensor) else torch.from_numpy(_array(values, name))
    if tensor.dtype == torch.bool:
        raise TypeError(f"expected real numbers for {name}, got {tensor.dtype}")
    return as_real_tensor(
        tensor, name, "for vectors u + iv, pass torch.view_as_real(values)"
    ).double()


def _array(values: object, name: str) -> np.ndarray:
    """An array-like as an array that torch accepts. Masked values become NaN."""
    values = getattr(values, "magnitude", values)  # for a quantity of pint
    if isinstance(values, list | tuple):
        # NumPy would drop the units and the masks.
        refuse_units(values, f"the entries of {name}, or one quantity of all of them,")
        if any(isinstance(row, np.ma.MaskedArray) for row in values):
            values = np.ma.stack([np.ma.asarray(row) for row in values])
    if np.ma.isMaskedArray(values) and values.dtype.kind in "fiuO":
        values = np.where(np.ma.getmaskarray(values), np.nan, values.data)
    try:
        array = np.asarray(values)
    except (TypeError, ValueError) as error:  # rows of different lengths
        raise TypeError(f"expected {name} as a tensor or array, got {error}") from error
    array = _from_objects(array, name) if array.dtype.kind == "O" else array
    if array.dtype.kind == "c":
        raise TypeError(
            f"expected real numbers for {name}, got {type(values).__name__} of type {array.dtype}; "
            "for vectors u + iv, pass np.ma.stack([np.real(values), np.imag(values)], axis=-1)"
        )
    if array.dtype.kind not in "fiu":
        raise TypeError(
            f"expected {name} as a tensor or array of real numbers, got "
            f"{type(values).__name__} of type {array.dtype}{_remedy(array)}"
        )
    array = array.astype(np.float64, copy=False)  # from any byte order
    reversed_axis = any(stride < 0 for stride in array.strides)  # torch does not support it
    return array.copy() if reversed_axis or not array.flags.writeable else array  # memory maps


def _from_objects(array: np.ndarray, name: str) -> np.ndarray:
    """Numbers from an array of objects, for example a nullable column. None, pd.NA and masked
    values become NaN. A TypeError is raised for other objects."""
    numbers = [np.nan if _is_missing(value) else value for value in array.ravel().tolist()]
    for value in numbers:
        if not isinstance(value, Number):
            convert = _remedy(np.asarray(value))
            raise TypeError(
                f"expected real numbers for {name}, got objects such as {value!r}{convert}"
            )
    others = (kind for kind in (complex, bool) if any(isinstance(value, kind) for value in numbers))
    return np.array(numbers, next(others, float)).reshape(array.shape)


def _is_missing(value: object) -> bool:
    return value is None or value is np.ma.masked or str(value) in ("<NA>", "NaT")


def _remedy(array: np.ndarray) -> str:
    """The call that converts an array of another type."""
    calls = {
        **dict.fromkeys("USa", "pandas.to_numeric(column, errors='coerce')"),
        "T": "pandas.to_numeric(column, errors='coerce')",
        "b": "values.astype(float)",
        "M": "(times - times[0]) / numpy.timedelta64(1, 's')",
        "m": "durations / numpy.timedelta64(1, 's')",
    }
    call = calls.get(array.dtype.kind)
    return f"; convert it, for example with {call}" if call else ""


def are_missing(texts: np.ndarray, labels: object) -> Bool[np.ndarray, "N"]:
    """Whether each label is masked, or is missing according to its text."""
    return np.isin(texts, _MISSING) | np.ma.getmask(labels)


def without_tensor(values: object) -> object:
    """The values, as an array if they are a tensor."""
    return values.detach().cpu().numpy() if isinstance(values, Tensor) else values


def is_single(values: object) -> bool:
    """Whether `values` is one value for all observations."""
    return (
        not hasattr(values, "__len__") or isinstance(values, str) or getattr(values, "ndim", 1) == 0
    )


def entries_of(chunk: object) -> Mapping[str, object]:
    """The x, y and options of a chunk by name. A chunk is a mapping or a pair (x, y).

    Raises:
        TypeError: The chunk is something else.
    """
    if isinstance(chunk, Mapping):
        return chunk
    count = len(chunk) if isinstance(chunk, tuple | list) else None
    if count != 2:
        got = type(chunk).__name__ if count is None else f"{count} parts"
        raise TypeError(
            f"expected chunks (x, y), or mappings with keys x and y, got {got}; pass arrays "
            "as fit(x, y)"
        )
    return dict(zip("xy", chunk, strict=True))
