"""Non-uniform Fourier transforms: sums of exponentials over points and an integer lattice.

For phases θ_n ∈ R^d in radians and the lattice |q_i| ≤ m_i, the transforms are

    type 1:  F(q) = Σ_n c_n exp(i⟨q, θ_n⟩) ,      type 2:  g_n = Re Σ_q F(q) exp(i⟨q, θ_n⟩) .

On the CPU, FINUFFT computes them in O(N + M log M) operations for N points and M lattice points. On
other devices, products of one-dimensional exponentials need O(N·M) operations. The tests compare
FINUFFT with these products. Source: Barnett, Magland & af Klinteberg 2019.
"""

from collections.abc import Iterator, Sequence
from math import prod

import finufft
import numpy as np
import torch
from jaxtyping import Complex, Float
from torch import Tensor

_PRECISION = 1e-12  # 1e-10 would change log-determinants of a million points by 3e-4
_POINTS = 2**20  # the number of points in one transform; FINUFFT needs about 100 bytes per point
_MAX_DIMS = 3  # the largest number of axes of a FINUFFT transform
_SINGLE = 8  # the largest number of points for which products are faster than a transform
_CHUNK_BYTES = 256 * 2**20  # the memory of the exponentials in one matrix product


# Transforms of types 1 and 2 prepare the input of FINUFFT as follows.
#
# 1. An axis with m = 0 is removed, because its waves are one for all phases.
# 2. Pairs of real columns of strengths become complex columns, because FINUFFT computes complex
#    transforms at the cost of real ones. F of real strengths satisfies F(−q) = F(q)*. This property
#    separates the two results.
# 3. A transform has at most 2²⁰ points, which limits the memory of the sorted copies in FINUFFT.
# 4. FINUFFT has at most three axes. If there are more, a loop replaces the last axis. For each q of
#    this axis, the wave multiplies the strengths (type 1) or the result (type 2).
# 5. On a GPU, and for a few points in type 1, matrix products of one-dimensional exponentials
#    replace all these steps. The axes are divided into two halves, so that the size of both factors
#    is about the square root of the size of the lattice.
def type1(
    phases: Float[Tensor, "N d"], strengths: Float[Tensor, "N k"], modes: tuple[int, ...]
) -> Complex[Tensor, "k *q"]:
    """Return F(q) for each column c of `strengths`, with the shape (k, 2m_1 + 1, …, 2m_d + 1)."""
    sizes = tuple(2 * m + 1 for m in modes)
    axes = _varying(sizes)
    if len(axes) < len(modes):
        sums = type1(phases[:, axes], strengths, tuple(modes[axis] for axis in axes))
        return sums.reshape(-1, *sizes)
    total = torch.zeros(strengths.shape[-1], *sizes, dtype=torch.complex128, device=phases.device)
    if phases.is_cuda or len(phases) <= _SINGLE:
        return type1_by_products(phases, strengths, modes, total)
    for rows in slices(len(phases), _POINTS):
        pairs = _pair(strengths[rows].mT.numpy())
        sums = torch.from_numpy(_finufft1(phases[rows].numpy(), pairs, modes))
        total += _separate(sums)[: strengths.shape[-1]]
    return total


def _varying(sizes: Sequence[int]) -> list[int]:
    """Return the axes with a nonzero q, or the first axis if there are none.

    The waves do not depend on the coordinates of all other axes.
    """
    return [axis for axis, size in enumerate(sizes) if size > 1] or [0]


def _pair(real: Float[np.ndarray, "k N"]) -> Complex[np.ndarray, "h N"]:
    """Return pairs of real vectors as complex vectors a + ib, which halves the transforms."""
    pairs = np.zeros(((len(real) + 1) // 2, real.shape[1]), dtype=complex)
    pairs.real = real[::2]
    # If the number of vectors is odd, the last pair has no imaginary part.
    pairs.imag[: len(real) // 2] = real[1::2]
    return pairs


def _separate(sums: Complex[Tensor, "h *q"]) -> Complex[Tensor, "k *q"]:
    """Return F of a and F of b from F of a + ib; F of a − ib is the conjugate of F(−q)."""
    mirrored = sums.flip(tuple(range(1, sums.dim()))).conj()
    # Stacking along axis 1 and flattening gives the order of `_pair`: a₀, b₀, a₁, b₁, …
    return torch.stack([0.5 * (sums + mirrored), -0.5j * (sums - mirrored)], dim=1).flatten(0, 1)


def type2(
    phases: Float[Tensor, "N d"], coefficients: Complex[Tensor, "k *q"]
) -> Float[Tensor, "N k"]:
    """Return g_n for each array F of `coefficients`, (k, 2m_1 + 1, …, 2m_d + 1)."""
    sizes = coefficients.shape[1:]
    axes = _varying(sizes)
    if len(axes) < len(sizes):
        kept = [sizes[axis] for axis in axes]
        return type2(phases[:, axes], coefficients.reshape(len(coefficients), *kept))
    out = phases.new_empty(len(phases), len(coefficients))
    if phases.is_cuda:
        return type2_by_products(phases, coefficients, out)
    values = np.ascontiguousarray(coefficients.numpy())
    for rows in slices(len(phases), _POINTS):
        out[rows] = torch.from_numpy(_finufft2(phases[rows].numpy(), values).real).mT
    return out


def _finufft1(
    points: Float[np.ndarray, "N d"], weights: Complex[np.ndarray, "k N"], modes: tuple[int, ...]
) -> Complex[np.ndarray, "k *q"]:
    if len(modes) > _MAX_DIMS:  # a transform of the other axes for each q of the last axis
        waves = np.exp(1j * np.outer(np.arange(-modes[-1], modes[-1] + 1), points[:, -1]))
        parts = [_finufft1(points[:, :-1], weights * wave, modes[:-1]) for wave in waves]
        return np.stack(parts, axis=-1)
    sizes = tuple(2 * m + 1 for m in modes)
    return _plan(1, sizes, points, len(weights)).execute(weights).reshape(len(weights), *sizes)


def _finufft2(
    points: Float[np.ndarray, "N d"], values: Complex[np.ndarray, "k *q"]
) -> Complex[np.ndarray, "k N"]:
    if values.ndim - 1 > _MAX_DIMS:  # as in _finufft1
        half = values.shape[-1] // 2
        waves = np.exp(1j * np.outer(np.arange(-half, half + 1), points[:, -1]))
        return sum(
            _finufft2(points[:, :-1], np.ascontiguousarray(values[..., i])) * wave
            for i, wave in enumerate(waves)
        )
    plan = _plan(2, values.shape[1:], points, len(values))
    return plan.execute(values).reshape(len(values), -1)


def _plan(
    kind: int, sizes: tuple[int, ...], points: Float[np.ndarray, "N d"], transforms: int
) -> finufft.Plan:
    plan = finufft.Plan(
        kind,
        sizes,
        n_trans=transforms,
        eps=_PRECISION,
        isign=1,
        nthreads=torch.get_num_threads(),
    )
    plan.setpts(*(np.ascontiguousarray(points[:, i]) for i in range(points.shape[1])))
    return plan


class Type3:
    """The sums Σ_n c_n exp(i⟨q, x_n⟩) at any vectors q, on the CPU.

    Args:
        points: x_n, (N, 2).
        targets: the vectors q, (T, 2).
    """

    def __init__(self, points: Float[Tensor, "N 2"], targets: Float[np.ndarray, "T 2"]):
        threads = torch.get_num_threads()
        self._plan = finufft.Plan(3, 2, eps=_PRECISION, isign=1, nthreads=threads)
        x, y = (np.ascontiguousarray(column) for column in points.numpy().T)
        s, t = (np.ascontiguousarray(column) for column in targets.T)
        self._plan.setpts(x, y, None, s, t, None)

    def __call__(self, strengths: Complex[Tensor, "N"]) -> Complex[np.ndarray, "T"]:
        """Return the sums for one vector c of strengths."""
        return self._plan.execute(np.ascontiguousarray(strengths.numpy()))


def slices(count: int, rows: int) -> Iterator[slice]:
    """Yield slices of `rows` rows each, up to `count` rows in total."""
    return (slice(start, start + rows) for start in range(0, count, rows))


def _halves(
    phases: Float[Tensor, "n d"], modes: tuple[int, ...]
) -> tuple[Complex[Tensor, "n a"], Complex[Tensor, "n b"]]:
    """Return two factors of exp(i⟨q, θ⟩), one for each half of the axes."""
    waves = []
    for phase, m in zip(phases.mT, modes, strict=True):
        q = torch.arange(-m, m + 1, dtype=phases.dtype, device=phases.device)
        angle = phase.unsqueeze(-1) * q
        waves.append(torch.complex(angle.cos(), angle.sin()))
    ones = torch.ones(len(phases), 1, dtype=torch.complex128, device=phases.device)
    left, right = ones, ones
    middle = (len(waves) + 1) // 2
    for wave in waves[:middle]:
        left = (left.unsqueeze(-1) * wave.unsqueeze(-2)).flatten(-2)
    for wave in waves[middle:]:
        right = (right.unsqueeze(-1) * wave.unsqueeze(-2)).flatten(-2)
    return left, right


def _rows(modes: tuple[int, ...]) -> int:
    """Return the number of points for which the factors of `_halves` fit into one chunk."""
    middle = (len(modes) + 1) // 2
    width = sum(prod(2 * m + 1 for m in part) for part in (modes[:middle], modes[middle:]))
    return max(1, _CHUNK_BYTES // (48 * width))


def type1_by_products(phases, strengths, modes, total):
    """Add `type1` to `total` and return it, by products of one-dimensional exponentials."""
    for rows in slices(len(phases), _rows(modes)):
        left, right = _halves(phases[rows], modes)
        for out, weight in zip(total, strengths[rows].mT, strict=True):
            # The product has the shape (a, b), where a and b are the lattices of both halves of the
            # axes, in the order of `modes`.
            out += (left.mT @ (weight.unsqueeze(-1) * right)).reshape(out.shape)
    return total


def type2_by_products(phases, coefficients, out):
    """Write `type2` to `out` and return it, by products of one-dimensional exponentials."""
    modes = tuple(size // 2 for size in coefficients.shape[1:])
    for rows in slices(len(phases), _rows(modes)):
        left, right = _halves(phases[rows], modes)
        for k, values in enumerate(coefficients):
            values = values.reshape(left.shape[-1], right.shape[-1])
            out[rows, k] = ((left @ values) * right).sum(-1).real
    return out
