"""Structured frequencies by dense matrices of numpy and scipy, without code of gp_orff."""

import numpy as np
import scipy.linalg
import torch

import gp_orff
from gp_orff.features.draws import Draw
from gp_orff.kernels.base import tensors_of


def _fastfood(signs, order, gaussians):
    """Return H G Π H B, one block after the other. G includes the factor 1/(‖G‖ √d′)."""
    dims = signs.shape[-1]
    h, blocks = scipy.linalg.hadamard(dims).astype(float), []
    for b, own, g in zip(signs, order, gaussians, strict=True):
        permutation = np.eye(dims)[own]
        blocks.append(h @ np.diag(g) @ permutation @ h @ np.diag(b.astype(float)))
    return np.concatenate(blocks)


def _orthogonal(signs):
    """Return H D₁ H D₂ H D₃ / d′^{3/2}, one block after the other."""
    dims = signs.shape[-1]
    h = scipy.linalg.hadamard(dims) / np.sqrt(dims)
    blocks = signs.astype(float).transpose(1, 0, 2)
    return np.concatenate([h @ np.diag(a) @ h @ np.diag(b) @ h @ np.diag(c) for a, b, c in blocks])


def _fourier(signs, order):
    """Return Π F B, one block after the other. F has the entries (cos t + sin t)/√d with t =
    2πjk/d."""
    dims = signs.shape[-1]
    angle = 2 * np.pi * np.outer(np.arange(dims), np.arange(dims)) / dims
    f, blocks = (np.cos(angle) + np.sin(angle)) / np.sqrt(dims), []
    for b, own in zip(signs, order, strict=True):
        permutation = np.eye(dims)[own]
        blocks.append(permutation @ f @ np.diag(b.astype(float)))
    return np.concatenate(blocks)


_DENSE = {"FastfoodProjection": _fastfood, "OrthogonalProjection": _orthogonal}
_DENSE |= {"FourierProjection": _fourier}


def directions(projection):
    """Return the unit vectors (D, d′) of a projection."""
    arrays = {name: array.numpy() for name, array in tensors_of(projection).items()}
    return _DENSE[type(projection).__name__](**arrays)[: projection.num_vectors]


class WrittenDraw(Draw):
    """The frequencies of a structured draw as a dense matrix, with the columns of random rules."""

    def __init__(self, structured):
        super().__init__(structured.bases, structured.orders)
        for i, projection in enumerate(structured.projections):
            rows = directions(projection)[:, : projection.num_inputs]
            self.register_buffer(f"rows_{i}", torch.from_numpy(rows.copy()))

    def nodes(self, spectra):
        omegas = [
            law.radii(base, 0).unsqueeze(-1) * getattr(self, f"rows_{i}") / law.lengthscale
            for i, (law, base) in enumerate(zip(spectra, self.bases, strict=True))
        ]
        return omegas, torch.full_like(self.bases[0][:, 0], 1 / self.num_frequencies)


class WrittenOut:
    """A structured rule whose frequencies are stored as a dense matrix."""

    def __init__(self, rule: gp_orff.Fastfood):
        self.rule = rule

    def draw(self, terms):
        draws = self.rule.draw(terms)
        return [WrittenDraw(draw) if draw.orders else draw for draw in draws]
