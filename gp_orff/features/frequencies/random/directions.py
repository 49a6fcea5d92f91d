"""Random unit vectors: independent, orthogonal, or from points of a cube."""

import numpy as np
import scipy.special


def gaussian_directions(number: int, num_dims: int, rng: np.random.Generator) -> np.ndarray:
    """Independent unit vectors, uniform on the sphere."""
    return _normalise(rng.standard_normal((number, num_dims)))


def _normalise(vectors: np.ndarray) -> np.ndarray:
    return vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)


def rotations(number: int, num_dims: int, rng: np.random.Generator) -> np.ndarray:
    """Rows of independent orthogonal matrices, uniform over the orthogonal group."""
    blocks = rng.standard_normal((-(-number // num_dims), num_dims, num_dims))
    q, r = np.linalg.qr(blocks)
    q = q * np.sign(np.diagonal(r, axis1=-2, axis2=-1))[:, None, :]
    return q.reshape(-1, num_dims)[:number]


def direction_coordinates(num_dims: int) -> int:
    """The number of uniform coordinates that `directions` needs.

    One on a line, too: the signs of ω matter in a product of kernels.
    """
    return {1: 1, 2: 1, 3: 2}.get(num_dims, num_dims)


def directions(u: np.ndarray, num_dims: int) -> np.ndarray:
    """Unit vectors, uniform on the sphere if u is uniform in the cube."""
    if num_dims == 1:
        return np.where(u < 0.5, -1.0, 1.0)
    if num_dims == 2:
        angle = 2 * np.pi * u[:, 0]
        return np.stack([np.cos(angle), np.sin(angle)], axis=-1)
    if num_dims == 3:  # Archimedes: the height is uniform
        angle, height = 2 * np.pi * u[:, 0], 2 * u[:, 1] - 1
        rim = np.sqrt(1 - height**2)
        return np.stack([rim * np.cos(angle), rim * np.sin(angle), height], axis=-1)
    return _normalise(scipy.special.ndtri(u))
