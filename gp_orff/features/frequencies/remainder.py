"""A quadrature over the frequencies beyond a grid; its nodes depend on no hyperparameter."""

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from gp_orff.features.frequencies.lattice_nodes import LatticeDraw
from gp_orff.kernels.spectra.base import Spectrum

_LONGER = 1.5  # the lattice goes on to this multiple of the grid's largest index
_FAR = {1: 32, 2: 16, 3: 8}  # nodes from there to infinity, by the number of axes; else 6


def remainder(
    draw: LatticeDraw, spectra: Sequence[Spectrum]
) -> tuple[list[Float[Tensor, "m k"]], Float[Tensor, "*b m"]]:
    """ω of each leaf and weights w with Σ w g(ω) ≈ E[g(ω); ω beyond the grid], for even g.

    The cell around ω = 0 counts as part of the grid.
    """
    omegas, weights = _cells(draw)
    for spectrum, omega in zip(spectra, omegas, strict=True):
        weights = weights * spectrum.log_density(omega).exp()
    return omegas, weights


def _cells(draw: LatticeDraw) -> tuple[list[Float[Tensor, "m k"]], Float[Tensor, "m"]]:
    """ω of each leaf and the volumes of their cells.

    Beyond the grid the lattice goes on for a while; from there to infinity follow, along every
    axis, the nodes of a Gauss–Legendre rule in 1/√ω.
    """
    columns = [dim for dims in draw.dims for dim in dims]
    spacing = draw.lattice.spacing[columns].cpu().numpy()
    grid = draw.lattice.indices[draw.position][:, columns].cpu().numpy()
    edge = np.ceil(_LONGER * np.abs(grid).max(axis=0)).astype(int) + 1
    far = _FAR.get(len(columns), 6)
    axes = [_axis(m, h, far) for m, h in zip(edge, spacing, strict=True)]
    volume = np.ones(())
    for _, lengths in axes:
        volume = np.multiply.outer(volume, lengths)
    for half in (grid, -grid):
        volume[tuple((half + edge + far).T)] = 0.0
    # the flat array is symmetric: −ω, the same wave, is in the second half, ω = 0 in the middle
    beyond = np.flatnonzero(volume.reshape(-1)[: volume.size // 2])
    places = np.unravel_index(beyond, volume.shape)
    omega = {i: axis[at] for i, (axis, _), at in zip(columns, axes, places, strict=True)}
    device = draw.position.device
    return (
        [torch.from_numpy(np.stack([omega[i] for i in dims], -1)).to(device) for dims in draw.dims],
        torch.from_numpy(2 * volume.reshape(-1)[beyond]).to(device),
    )


def _axis(edge: int, spacing: float, far: int) -> tuple[np.ndarray, np.ndarray]:
    """Nodes between −∞ and ∞ and the lengths of their cells.

    Up to the index `edge` nodes are multiples of the spacing; `far` nodes lie on each side beyond.
    """
    x, weights = np.polynomial.legendre.leggauss(far)
    x, end = 0.5 * (1 + x[::-1]), (edge + 0.5) * spacing
    beyond, lengths = end / x**2, weights[::-1] * end / x**3  # ω = end / x²
    inner = np.arange(-edge, edge + 1) * spacing
    return (
        np.concatenate([-beyond[::-1], inner, beyond]),
        np.concatenate([lengths[::-1], np.full(len(inner), spacing), lengths]),
    )
