"""Arguments of estimators as checked tensors, by scikit-learn's conventions."""

from collections.abc import Iterator
from contextlib import contextmanager
from numbers import Real

import numpy as np
import torch
from jaxtyping import Bool, Float
from numpy.typing import ArrayLike
from sklearn.base import BaseEstimator
from sklearn.utils.validation import check_array, check_consistent_length, validate_data
from torch import Tensor


@contextmanager
def unchanged_on_failure(estimator: BaseEstimator) -> Iterator[None]:
    """Restore the attributes of an estimator if the block raises."""
    before = dict(vars(estimator))
    try:
        yield
    except BaseException:
        vars(estimator).clear()
        vars(estimator).update(before)
        raise


def read_points(estimator: BaseEstimator, X: ArrayLike, reset: bool = False) -> Tensor:
    """X as a tensor (N, d); `reset` sets the number of columns that the estimator expects.

    Raises:
        ValueError: not a matrix of finite numbers, or with another number of columns.
    """
    return _tensor(validate_data(estimator, _array(X), dtype=np.float64, reset=reset))


def read_data(
    estimator: BaseEstimator, X: ArrayLike, y: ArrayLike, reset: bool, needs_label: bool
) -> tuple[Float[Tensor, "N d"], Float[Tensor, "N q"], bool]:
    """X, y as a matrix, and whether y was a vector. Rows of NaN in y are unlabelled.

    Raises:
        ValueError: as `read_points`; no y, or one of another length; infinite numbers; rows that
            are NaN in part; no row that has a label, if it `needs_label`.
    """
    if y is None:
        validate_data(estimator, X, y)  # raises, in the words of scikit-learn
    x = read_points(estimator, X, reset).clone()  # kept, while the caller may change X
    y = check_array(
        _array(y), dtype=np.float64, ensure_2d=False, ensure_all_finite="allow-nan", input_name="y"
    )
    check_consistent_length(x, y)
    targets = _tensor(y).clone()
    is_vector = targets.dim() == 1
    targets = targets.unsqueeze(-1) if is_vector else targets
    missing = targets.isnan()
    partial = missing.any(-1) & ~missing.all(-1)
    if partial.any():
        raise ValueError(
            "expected rows of y that are numbers, or all NaN where there is no label, got "
            f"{int(partial.sum())} rows that are NaN in part; drop them, or use "
            "gp_orff.VectorFieldGP with missing='mask'"
        )
    if needs_label and missing.all():
        raise ValueError(f"expected a row of y with a label, got {len(y)} rows of NaN")
    return x, targets, is_vector


def labelled_rows(y: ArrayLike) -> Bool[np.ndarray, "N"]:
    """Which rows of y are not NaN."""
    y = check_array(_array(y), dtype=np.float64, ensure_2d=False, ensure_all_finite="allow-nan")
    return ~np.isnan(y.reshape(len(y), -1)).any(-1)


def checked_number(estimator: BaseEstimator, name: str) -> float:
    """A parameter of the estimator that is a finite number ≥ 0.

    Raises:
        ValueError: it is not.
    """
    value = getattr(estimator, name)
    if not isinstance(value, Real) or isinstance(value, bool) or not 0 <= value < float("inf"):
        raise ValueError(
            f"{type(estimator).__name__} expects {name}, a finite number >= 0, got {value!r}"
        )
    return float(value)


def checked_combination(
    combination: ArrayLike | None, num_outputs: int, num_targets: int
) -> Float[Tensor, "q p"] | None:
    """C as a tensor, for a kernel with `num_outputs` outputs and `num_targets` columns of y.

    Raises:
        ValueError: C has another shape or entries that are not finite; without C, the columns of y
            are not the outputs of the kernel.
    """
    if combination is None:
        if num_outputs not in (1, num_targets):
            raise ValueError(
                f"expected y with {num_outputs} columns, one for each output of the kernel, got "
                f"{num_targets}; use another kernel, or combination= for outputs that are "
                "combinations of those of the kernel"
            )
        return None
    matrix = _tensor(check_array(_array(combination), dtype=np.float64, input_name="combination"))
    if matrix.shape != (num_targets, num_outputs):
        raise ValueError(
            f"expected combination ({num_targets}, {num_outputs}), a row for each column of y and "
            f"a column for each output of the kernel, got {tuple(matrix.shape)}; for a kernel with "
            "several outputs see gp_orff.SeparableKernel"
        )
    return matrix


def _array(values: ArrayLike) -> ArrayLike:
    """The values, as an array if they are a tensor."""
    return values.detach().cpu().numpy() if isinstance(values, Tensor) else values


def _tensor(array: np.ndarray) -> Tensor:
    """A view of the array where torch can have one: not of one that is read-only or reversed."""
    viewable = array.flags.writeable and all(stride >= 0 for stride in array.strides)
    return torch.from_numpy(array if viewable else array.copy())
