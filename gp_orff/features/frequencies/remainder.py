"""The frequencies that are not on a lattice; where its nodes are depends on no hyperparameters."""

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from gp_orff.features.frequencies.lattice_nodes import LatticeDraw
from gp_orff.kernels.spectra.base import Spectrum

_LONGER = 1.5  # how far the lattice goes on, as it is
_FAR = {1: 32, 2: 16, 3: 8}  # nodes along an axis from there on, by the number of axes; else 6


def remainder(
    own: LatticeDraw, spectra: Sequence[Spectrum]
) -> tuple[list[Float[Tensor, "m k"]], Float[Tensor, "*b m"]]:
    """ω of each leaf and weights w with Σ w g(ω) ≈ E[g(ω); ω is not on the grid], for even g.

    The cell around zero is not part of it.
    """
    omegas, weights = _cells(own)
    for spectrum, omega in zip(spectra, omegas, strict=True):
        weights = weights * spectrum.log_density(omega).exp()
    return omegas, weights


def _cells(own: LatticeDraw) -> tuple[list[Float[Tensor, "m k"]], Float[Tensor, "m"]]:
    """ω of each leaf and the volumes they stand for.

    The lattice goes on beyond the points that are kept, and then, to infinity, nodes of a
    Gauss–Legendre rule in 1/√ω along every axis.
    """
    columns = [dim for dims in own.dims for dim in dims]
    spacing = own.lattice.spacing[columns].cpu().numpy()
    kept = own.lattice.indices[own.position][:, columns].cpu().numpy()
    edge = np.ceil(_LONGER * np.abs(kept).max(axis=0)).astype(int) + 1
    far = _FAR.get(len(columns), 6)
    axes = [_axis(m, h, far) for m, h in zip(edge, spacing, strict=True)]
    volume = np.ones(())
    for _, lengths in axes:
        volume = np.multiply.outer(volume, lengths)
    for side in (kept, -kept):
        volume[tuple((side + edge + far).T)] = 0.0
    # −ω, the same wave, is as far from the end as ω from the start; zero is in the middle
    chosen = np.flatnonzero(volume.reshape(-1)[: volume.size // 2])
    places = np.unravel_index(chosen, volume.shape)
    omega = {i: axis[at] for i, (axis, _), at in zip(columns, axes, places, strict=True)}
    device = own.position.device
    return (
        [torch.from_numpy(np.stack([omega[i] for i in dims], -1)).to(device) for dims in own.dims],
        torch.from_numpy(2 * volume.reshape(-1)[chosen]).to(device),
    )


def _axis(edge: int, spacing: float, far: int) -> tuple[np.ndarray, np.ndarray]:
    """Nodes from −∞ to ∞ and the lengths they stand for: multiples of the spacing up to an edge."""
    x, weights = np.polynomial.legendre.leggauss(far)
    x, end = 0.5 * (1 + x[::-1]), (edge + 0.5) * spacing
    beyond, lengths = end / x**2, weights[::-1] * end / x**3  # ω = end / x²
    inner = np.arange(-edge, edge + 1) * spacing
    return (
        np.concatenate([-beyond[::-1], inner, beyond]),
        np.concatenate([lengths[::-1], np.full(len(inner), spacing), lengths]),
    )
