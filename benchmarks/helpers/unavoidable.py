"""Computations that every method on a grid of frequencies needs, without this package."""

from collections.abc import Callable

import finufft
import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from gp_orff.features.lattice import LatticeColumns


def factorisation(size: int) -> Callable[[], object]:
    """Return a function that computes one Cholesky factorisation and one inverse."""
    matrix = torch.eye(size, dtype=torch.float64) * 2 + 1e-3
    return lambda: torch.cholesky_inverse(torch.linalg.cholesky(matrix))


def transforms(
    x: Float[Tensor, "N d"], y: Float[Tensor, "N p"], phi: LatticeColumns
) -> Callable[[], None]:
    """Return a function that computes two non-uniform transforms by FINUFFT.

    They are Σ_n exp(i⟨h∘q, x_n⟩) for all q = k ± l, and φᵀy with two real columns in each
    transform.
    """
    modes = phi.indices.abs().amax(0).tolist()
    phases = ((x - phi.origin) * phi.spacing).numpy()
    points = [np.ascontiguousarray(column) for column in phases.T]
    transform = {2: finufft.nufft2d1, 3: finufft.nufft3d1}[len(points)]
    ones = np.ones(len(x), dtype=complex)
    vectors = [_pair(y[:, i : i + 2].numpy()) for i in range(0, y.shape[-1], 2)]

    def once() -> None:
        transform(*points, ones, tuple(4 * m + 1 for m in modes), eps=1e-12, isign=1)
        for own in vectors:
            transform(*points, own, tuple(2 * m + 1 for m in modes), eps=1e-12, isign=1)

    return once


def _pair(columns: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(columns @ np.array([1, 1j])[: columns.shape[-1]])
