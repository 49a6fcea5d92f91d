"""The waves of one harmonic term, in rings, with the weights of the quadrature."""

import math
import warnings
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from gp_orff.features.columns import Columns, HarmonicColumns
from gp_orff.features.frequencies.harmonic.rings import Depths, Rings
from gp_orff.features.frequencies.lattice_nodes import FixedBuffers, GridWarning, check_domain
from gp_orff.features.frequencies.rule import Draw
from gp_orff.features.scaled_expansion import ScaledExpansion
from gp_orff.kernels.cholesky import positive_root
from gp_orff.kernels.harmonic import HarmonicSpectrum, Sources
from gp_orff.kernels.tree import Term, spectra_of
from gp_orff.symbols.base import Symbol

_RADII, _ANGLES = 24, 24  # of waves beyond the last: exact for some derivatives


class HarmonicWaves(FixedBuffers):
    """The waves that serve a harmonic term in a domain; what a lattice is for other kernels.

    Args:
        rings: the wavevectors and weights.
        domain: the lowest and highest value of every input.
        dims: the three inputs of the kernel, height last.
        side: 1 for sources below the points, −1 for sources above them.
        tolerance: the share of the variance for which the waves were made.
    """

    def __init__(
        self,
        rings: Rings,
        domain: Float[np.ndarray, "2 d"],
        dims: Sequence[int],
        side: int,
        tolerance: float,
    ):
        super().__init__()
        self.dims, self.side = tuple(dims), side
        self.register_buffer("wavevectors", torch.from_numpy(rings.wavevectors))
        self.register_buffer("weights", torch.from_numpy(rings.weights))
        self.register_buffer("domain", torch.from_numpy(domain))
        self.register_buffer("constant", torch.zeros(domain.shape[1], dtype=torch.bool))
        self.register_buffer("tolerance", torch.tensor(tolerance, dtype=torch.float64))

    def columns(self) -> HarmonicColumns:
        """The waves that decay with the distance from the sources."""
        low, high = self.domain[:, list(self.dims)]
        origin = 0.5 * (low + high)
        origin[2] = low[2] if self.side > 0 else high[2]
        return HarmonicColumns(self.wavevectors, self.side, origin, self.dims)

    def outside(self, x: Float[Tensor, "*b n d"]) -> Bool[Tensor, "*b n"]:
        """Which of the points x are outside the domain; it has no end away from the sources."""
        low, high = self.domain.clone()
        slack = 1e-6 * (high - low)
        x = x.detach()[..., : len(low)]
        below, above = x < low - slack, x > high + slack
        vertical = self.dims[2]
        (above if self.side > 0 else below)[..., vertical] = False
        return (below | above).any(-1)

    def check(self, x: Float[Tensor, "*b n d"]) -> None:
        """Check that all points x are inside the domain.

        Raises:
            ValueError: points outside.
        """
        check_domain(x, self.outside(x), self.domain)


class HarmonicDraw(FixedBuffers, Draw):
    """The waves of one harmonic term, which depend on no hyperparameter, and their variances.

    Args:
        waves: the wavevectors, and the domain that they serve.
        cutoff: |k| beyond which the share of its variance lies, at the present depths.
        share: of the variance of this term, beyond the last wave.
        lengthscale_range: the shortest and longest depth that the waves serve, relative to the
            present ones.
        diagonal_correction: whether inference adds the truncated variance.
    """

    sampled = False

    def __init__(
        self,
        waves: HarmonicWaves,
        cutoff: float,
        share: float,
        lengthscale_range: tuple[float, float],
        diagonal_correction: bool,
    ):
        super().__init__([], [])
        self.lattice, self.joint, self.warned = waves, None, False
        self.lengthscale_range = lengthscale_range
        self.diagonal_correction = diagonal_correction
        self.register_buffer("cutoff", torch.tensor(cutoff, dtype=torch.float64))
        self.register_buffer("share", torch.tensor(share, dtype=torch.float64))

    @property
    def num_frequencies(self) -> int:
        return len(self.lattice.wavevectors)

    @property
    def num_columns(self) -> int:
        return 2 * self.num_frequencies

    @property
    def shared(self) -> nn.Module:
        """The waves, and in a sum the frequencies of the other terms."""
        return self.joint or self.lattice

    def shared_columns(self) -> Columns:
        return self.shared.columns()

    def nodes(self, spectra: Sequence[HarmonicSpectrum]) -> tuple:
        """Raise: the waves decay, so that their directions are complex.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(
            "expected a stationary kernel, whose features have real frequencies, got a "
            "HarmonicKernel, whose waves decay with height; this quantity is not known for it"
        )

    def expansion(self, term: Term) -> ScaledExpansion:
        """The features −∇ of a potential of decaying waves with independent weights."""
        (spectrum,) = spectra_of(term)
        self._check_range(spectrum)
        phi = self.lattice.columns()
        root = positive_root(term.outputscale.unsqueeze(-1) * self.variances(spectrum.sources, phi))
        units, columns = phi.directions(), torch.arange(phi.num_columns, device=phi.device)
        scales = torch.cat([root, root], dim=-1)
        return ScaledExpansion(phi, scales, torch.cat([units, units]), columns)

    def variances(self, sources: Sources, phi: HarmonicColumns) -> Float[Tensor, "*b D"]:
        """Σ_j a_j |k| e^{−2|k||z₀ − p_j|} / 2π times the weights."""
        return _density(sources, phi) * self.lattice.weights

    def truncated_variance(self, term: Term) -> Float[Tensor, "*b 3 3"]:
        """The variance at the mean height that the waves lack."""
        (spectrum,) = spectra_of(term)
        phi = self.lattice.columns()
        decay = phi.decay(spectrum.mean_height.double()).square()
        weights, d = self.variances(spectrum.sources, phi) * decay, phi.directions()
        parts = (torch.einsum("...k,kp,kq->...pq", weights, v, v) for v in (d.real, d.imag))
        total = spectrum.variance().double() - sum(parts)
        share = total.diagonal(dim1=-1, dim2=-2).mean(-1).clamp_min(0.0)
        shape = total.new_tensor([0.75, 0.75, 1.5])
        return term.outputscale[..., None, None] * torch.diag_embed(share.unsqueeze(-1) * shape)

    def truncated_image(
        self, symbol: Symbol, term: Term, space: Sequence[int]
    ) -> Float[Tensor, "q q"]:
        """The variance of Q f at the mean height that the waves lack: that of waves beyond the
        last, in proportion to what they lack of the field."""
        (spectrum,) = spectra_of(term)
        phi, height = self.lattice.columns(), spectrum.mean_height.double()
        nearest = spectrum.sources.distances(height.unsqueeze(-1)).detach().min().item()
        omega, weights = _beyond(phi.omega.norm(dim=-1).amax().item(), nearest)
        phi = replace(phi, omega=omega.to(phi.omega))
        weights = _density(spectrum.sources, phi) * weights.to(phi.omega)
        weights = weights * phi.decay(height).square()
        waves = phi.directions()[: len(omega)]
        image = phi.multiplier(symbol, 3, space)[: len(omega)] @ waves.unsqueeze(-1)
        moment = torch.einsum("k,kp,kq->pq", weights.to(image), image[..., 0], image[..., 0].conj())
        field = (weights.unsqueeze(-1) * waves.abs().square()).sum()
        lacking = self.truncated_variance(term).diagonal().sum()
        return moment.real * (lacking / field if field > 0 else 0.0)

    def ratio_outside_range(self, spectra: Sequence[HarmonicSpectrum]) -> float | None:
        """The ratio of the depth that decides the cut-off to that for which it was made."""
        low, high = self.lengthscale_range
        lengths = depths_of(spectra[0], self.lattice.domain[:, self.lattice.dims[2]].cpu().numpy())
        ratio = self.cutoff.item() / lengths.cutoff(self.share.item())
        return ratio if not 0.999 * low <= ratio <= 1.001 * high else None

    def _check_range(self, spectrum: HarmonicSpectrum) -> None:
        ratio = None if self.warned else self.ratio_outside_range([spectrum])
        if ratio is not None:
            self.warned = True
            low, high = self.lengthscale_range
            warnings.warn(
                f"a depth is about {ratio:.2g} times what the waves were made for, outside the "
                f"range {low:g} to {high:g}: call redraw() of the ORFFKernel and continue, "
                "constrain the depth, or give Grid a wider lengthscale_range",
                GridWarning,
                stacklevel=2,
            )

    def check_domain(self, spectra, *points) -> None:
        for x in points:
            self.lattice.check(x)


def _density(sources: Sources, phi: HarmonicColumns) -> Float[Tensor, "*b D"]:
    """Σ_j a_j |k| e^{−2|k||z₀ − p_j|} / 2π."""
    k = phi.omega.norm(dim=-1)
    distances = sources.distances(phi.origin[2:]).double()  # (*b, J, 1)
    decay = torch.exp(-2 * distances * k)
    return (sources.amplitudes.double().unsqueeze(-1) * decay).sum(-2) * k / (2 * math.pi)


def _beyond(cutoff: float, distance: float) -> tuple[Float[Tensor, "m 2"], Float[Tensor, "m"]]:
    """Wavevectors and weights of a quadrature over |k| > `cutoff`, by Gauss and Laguerre for waves
    that decay as e^{−2|k| distance}."""
    t, weights = np.polynomial.laguerre.laggauss(_RADII)
    k = cutoff + t / (2 * distance)
    weights = weights * np.exp(t) / (2 * distance) * k * 2 * math.pi / _ANGLES
    angle = 2 * math.pi * np.arange(_ANGLES) / _ANGLES
    unit = np.stack([np.cos(angle), np.sin(angle)], axis=-1)
    omega = (k[:, None, None] * unit).reshape(-1, 2)
    return torch.from_numpy(omega), torch.from_numpy(np.repeat(weights, _ANGLES))


@torch.no_grad()
def depths_of(
    spectrum: HarmonicSpectrum, heights: Float[np.ndarray, "2"], shallower: float = 1.0
) -> Depths:
    """Z of two points at the end of the heights that is nearest to the sources.

    `shallower` multiplies the depths; a batch counts as more planes.
    """
    sources = spectrum.sources
    nearest = heights[0] if sources.side > 0 else heights[1]
    planes, amplitudes = (
        t.double().cpu().numpy().ravel() for t in (sources.planes, sources.amplitudes)
    )
    shortest = 2 * sources.side * (nearest - planes) * shallower
    return Depths(shortest, amplitudes / shortest**3)
