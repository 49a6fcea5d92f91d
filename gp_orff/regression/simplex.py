"""Codes of classes: the corners of a simplex."""

from numbers import Integral

import numpy as np
from jaxtyping import Float
from scipy.linalg import helmert


def simplex_codes(num_classes: int) -> Float[np.ndarray, "T T-1"]:
    """The T corners of a regular simplex around the origin: one unit vector for each class.

    ⟨c_s, c_t⟩ = −1/(T − 1) for s ≠ t, the most separated T unit vectors, and Σ_t c_t = 0. A field f
    that is regressed on the codes of labels gives the label argmax_t ⟨f(x), c_t⟩. As columns of a
    root, the same codes make a kernel of T outputs, k(x, z) C Cᵀ, which sum to zero.

    Mroueh, Poggio, Rosasco and Slotine 2012, "Multiclass learning with simplex coding"; Brault et
    al. 2016, Section 4.2.

    Args:
        num_classes: T ≥ 2.

    Returns:
        C (T, T − 1) in float64; row t is c_t.

    Raises:
        ValueError: `num_classes` is no integer, or less than two.

    Example:
        >>> from gp_orff.regression import simplex_codes
        >>> codes = simplex_codes(3)
        >>> (codes @ codes.T).round(12)
        array([[ 1. , -0.5, -0.5],
               [-0.5,  1. , -0.5],
               [-0.5, -0.5,  1. ]])
    """
    if not isinstance(num_classes, Integral) or num_classes < 2:
        raise ValueError(
            f"simplex_codes expects an integer of at least 2 classes, got {num_classes!r}; for "
            "labels pass len(numpy.unique(labels))"
        )
    # Helmert's rows are orthonormal and sum to zero: CCᵀ = (I − 11ᵀ/T) T/(T − 1)
    return helmert(num_classes).T * np.sqrt(num_classes / (num_classes - 1))
