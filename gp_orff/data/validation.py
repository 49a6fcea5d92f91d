"""Arrays of any kind, as checked tensors."""

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor


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
