"""Frequencies of a kernel tree on one lattice."""

import math
import warnings
from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from gp_orff.features.frequencies.rule import Draw, TermSpectrum
from gp_orff.features.lattice import GramCache, LatticeColumns
from gp_orff.kernels.spectra.base import GridSpectrum, Spectrum
from gp_orff.kernels.spectra.lattice_sums import weight_at_zero


class GridWarning(UserWarning):
    """A lengthscale that has left the range its frequency grid was built for."""


class _Fixed(nn.Module):
    """Buffers that move between devices and keep their types; loaded whatever their length."""

    def _apply(self, fn, recurse=True):
        return super()._apply(lambda tensor: tensor.to(fn(tensor).device), recurse)

    def _load_from_state_dict(self, state_dict, prefix, *arguments):
        for name, own in self._buffers.items():
            incoming = state_dict.get(prefix + name)
            if incoming is not None and incoming.shape != own.shape:
                self._buffers[name] = torch.empty_like(incoming, device=own.device)
        super()._load_from_state_dict(state_dict, prefix, *arguments)


class Lattice(_Fixed):
    """Integer points, their spacing and the domain they serve; shared by the terms of a tree."""

    def __init__(
        self,
        indices: Int[np.ndarray, "D d"],
        spacing: Float[np.ndarray, "d"],
        domain: Float[np.ndarray, "2 d"],
        lag: Float[np.ndarray, "d"],
        tolerance: float,
    ):
        super().__init__()
        finite = np.isfinite(domain).all()
        self.register_buffer("indices", torch.from_numpy(indices))
        self.register_buffer("spacing", torch.from_numpy(spacing))
        self.register_buffer("domain", torch.from_numpy(domain))
        origin = domain.mean(axis=0) if finite else np.zeros(len(spacing))
        self.register_buffer("origin", torch.from_numpy(origin))
        self.register_buffer("lag", torch.from_numpy(lag if finite else np.zeros_like(lag)))
        self.register_buffer("tolerance", torch.tensor(tolerance, dtype=torch.float64))
        self.cache = GramCache()

    def columns(self) -> LatticeColumns:
        """cos and sin of every frequency; C of the last points is kept."""
        return LatticeColumns.of(self.indices, self.spacing, self.origin, self.cache)

    def _load_from_state_dict(self, *arguments):
        super()._load_from_state_dict(*arguments)
        self.cache = GramCache()

    @property
    def period(self) -> Float[Tensor, "d"]:
        return 2 * math.pi / self.spacing

    def outside(self, x: Float[Tensor, "*b n d"]) -> Bool[Tensor, "*b n"]:
        """Which points are outside the domain."""
        low, high = self.domain
        slack = 1e-6 * (high - low)  # the rounding of float32 inputs
        x = x.detach()[..., : len(low)]
        return ((x < low - slack) | (x > high + slack)).any(-1)

    def check(self, x: Float[Tensor, "*b n d"]) -> None:
        """Raise ValueError for points outside the domain."""
        outside = self.outside(x)
        if outside.any():
            worst = ", ".join(f"{value:.6g}" for value in x[outside][0].tolist())
            box = ", ".join(f"({low:.6g}, {high:.6g})" for low, high in self.domain.mT.tolist())
            raise ValueError(
                f"expected points inside the grid's domain ({box}), got {int(outside.sum())} "
                f"outside it, such as ({worst}); give the region of interest as "
                "Grid.for_data(x, domain=...)"
            )


class LatticeDraw(_Fixed, Draw):
    """The points of a lattice that one term uses, with the quadrature's weights."""

    sampled = False

    def __init__(self, lattice: Lattice, position, spectrum: TermSpectrum, served, correct: bool):
        super().__init__([], [])
        self.lattice = lattice
        self.dims = tuple(leaf.dims for leaf in spectrum.leaves)
        self.served, self.correct = served, correct
        self.warned = False
        self.register_buffer("position", torch.from_numpy(position))
        built = _lengths([leaf.spectrum for leaf in spectrum.leaves], self.dims)
        self.register_buffer("built", torch.from_numpy(np.concatenate(built)))

    @property
    def num_frequencies(self) -> int:
        return len(self.position)

    @property
    def nonzero(self) -> Tensor:
        """Which frequencies have a sine."""
        return self.lattice.indices[self.position].any(-1)

    def shared_columns(self) -> LatticeColumns:
        return self.lattice.columns()

    def nodes(self, spectra):
        self._check_range(spectra)
        indices, spacing = self.lattice.indices[self.position], self.lattice.spacing
        omegas = [(indices * spacing)[:, list(dims)] for dims in self.dims]
        weights = 1.0 + self.nonzero.to(spacing)  # −k is the same feature
        for spectrum, own, dims in zip(spectra, omegas, self.dims, strict=True):
            weights = weights * _weights(spectrum, own, spacing[list(dims)])
        return omegas, weights

    def check_domain(self, spectra, *points):
        for x in points:
            self.lattice.check(x)

    def left_range(self, spectra: Sequence[Spectrum]) -> float | None:
        first, others = _lengths(spectra, self.dims)
        built = self.built.cpu().numpy()
        power = np.repeat([1, 2], [len(first), len(others)])[: len(built)]  # of two that move
        ratio = np.concatenate([first, others])[: len(built)] / built
        low, high = self.served
        outside = ratio[(ratio < 0.999 * low**power) | (ratio > 1.001 * high**power)]
        return float(outside[0]) if len(outside) else None

    def _check_range(self, spectra: Sequence[Spectrum]) -> None:
        ratio = None if self.warned else self.left_range(spectra)
        if ratio is not None:
            self.warned = True
            low, high = self.served
            warnings.warn(
                f"a lengthscale is {ratio:.2g} times what the frequency grid was built for, "
                f"outside its range {low:g} to {high:g}: call redraw() of the ORFFKernel and go "
                "on, constrain the lengthscale, or give Grid a wider lengthscale_range",
                GridWarning,
                stacklevel=2,
            )


def _lengths(
    spectra: Sequence[Spectrum], dims: Sequence[Sequence[int]]
) -> tuple[Float[np.ndarray, "k"], Float[np.ndarray, "m"]]:
    """The lengthscales, and other lengths, that a grid is built for."""
    first = [unit_radii(spectrum, len(own)) for spectrum, own in zip(spectra, dims, strict=True)]
    others = [spectrum.other_lengths(len(own)) for spectrum, own in zip(spectra, dims, strict=True)]
    return np.concatenate([[], *first]), np.concatenate([[], *others])


def _weights(
    spectrum: Spectrum, omega: Float[Tensor, "D d"], spacing: Float[Tensor, "d"]
) -> Float[Tensor, "*b D"]:
    """Of the points of a lattice: S(ω) ∏h, but for ω = 0, whose S need not be finite."""
    away = omega.any(-1)
    if away.all():
        return spacing.prod() * spectrum.log_density(omega).exp()
    elsewhere = torch.where(away.unsqueeze(-1), omega, spacing)
    weights = spacing.prod() * spectrum.log_density(elsewhere).exp()
    return torch.where(away, weights, weight_at_zero(spectrum, spacing).unsqueeze(-1))


def unit_radii(spectrum: Spectrum, num_dims: int) -> Float[np.ndarray, "d"]:
    """The reach of a unit frequency along each axis: the lengthscales."""
    if not isinstance(spectrum, GridSpectrum):
        raise NotImplementedError(
            f"{type(spectrum).__name__} tells no reach, tail and correlation, which a frequency "
            "grid needs: expected a subclass of gp_orff.spectra.GridSpectrum; use a random rule"
        )
    return spectrum.scaled_radius(np.eye(num_dims))
