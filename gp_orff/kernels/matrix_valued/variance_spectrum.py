"""How the variance ∫ A(ω) S(ω) dω of a kernel is distributed over frequencies, by quadrature."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Protocol

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from gp_orff.kernels.spectra.base import GridSpectrum
from gp_orff.kernels.spectra.sphere import unit_sphere

# angles on a circle and steps of log-radii, by the number of inputs: a step of 0.1 is exact to
# rounding in the trapezoidal rule, one of 0.25 to 1e-8
_NODES = {1: (0, 0.1), 2: (128, 0.1), 3: (32, 0.1)}
_SMALLEST, _LARGEST = 1e-6, 1e6  # radii, in units of the spectrum
_FAR = 1e5  # if more than _DIVERGES of an integral lies beyond this radius, it is infinite
_DIVERGES = 1e-3
_FEW_ANGLES, _LONG_STEP = 16, 0.25  # for the integral over the other axes
_LONGEST_LAG, _NUM_LAGS = 20.0, 401  # of a table of correlations, in units of the spectrum
_LAG_STEP = math.pi / (1.25 * _LONGEST_LAG)  # of its frequencies: a period beyond the longest lag
_CUT, _MOST = 1e-10, {1: 3000.0, 2: 200.0}  # where its frequencies end; elsewhere _FEWEST
_FEWEST = 20.0
_TINY = 1e-300  # for logarithms
_CHUNK = 2**16  # frequencies at a time


class MatrixFunction(Protocol):
    """B(ω), a matrix for every frequency."""

    num_outputs: int
    rank: int  # r

    def __call__(self, omega: Float[Tensor, "m d"]) -> Float[Tensor, "m p r"]:
        """B at the frequencies ω."""


@dataclass(frozen=True)
class VarianceSpectrum:
    """The density A(ω) S(ω), A = B Bᵀ, over frequencies; for a batch of spectra, the worst of them.

    Args:
        spectrum: S.
        factor: B.
        num_dims: d, the number of inputs.
    """

    spectrum: GridSpectrum
    factor: MatrixFunction
    num_dims: int

    @cached_property
    def scales(self) -> Float[np.ndarray, "d"]:
        """The unit of frequency along each axis: where the scaled radius is one."""
        return 1 / self.spectrum.scaled_radius(np.eye(self.num_dims))

    @property
    def variance(self) -> Float[Tensor, "*b p p"]:
        """K(0) = ∫ A S dω."""
        omega, volumes = self._polar
        return sum(
            torch.einsum("...m,mpr,mqr->...pq", mass, b, b)
            for mass, b in self._masses(omega, volumes)
        )

    def tail(self, scaled_radius: float) -> float:
        """The share of tr K(0) beyond a scaled radius."""
        radii, tails = self._tails
        return float(np.exp(np.interp(math.log(scaled_radius), np.log(radii), np.log(tails))))

    def radius(self, share: float) -> float:
        """The scaled radius beyond which this share of tr K(0) lies."""
        radii, tails = self._tails
        return float(np.exp(np.interp(-math.log(share), -np.log(tails), np.log(radii))))

    def moment(self, order: int) -> float:
        """E ρ^{2t}, t = `order`, of the scaled radius ρ under the density tr A S / tr K(0)."""
        radii, shares = self._shares
        with np.errstate(over="ignore"):
            parts = shares * radii ** (2.0 * order)
        total = parts.sum(-1)
        diverges = (parts[..., radii > _FAR].sum(-1) > _DIVERGES * total).any()
        return math.inf if diverges or not np.isfinite(total).all() else float(total.max())

    def correlation(self, lag: float, axis: int) -> float:
        """A bound of ‖K(r)‖ / ‖K(0)‖ for all lags r ≥ `lag` along an axis.

        It comes from a table, continued by a power of the lag.
        """
        bounds, unit = self._bounds[axis], self.scales[axis]
        lags = np.linspace(0, _LONGEST_LAG, _NUM_LAGS)
        scaled = lag * unit
        inside = float(np.interp(scaled, lags, bounds))
        if scaled <= _LONGEST_LAG:
            return inside
        last, half = max(bounds[-1], 1e-300), max(bounds[_NUM_LAGS // 2], 1e-300)
        power = max(math.log2(half / last), 1.0)
        return float(last * (scaled / _LONGEST_LAG) ** -power)

    def correlation_lag(self, axis: int, bound: float) -> float:
        """The lag along an axis beyond which the bound of the correlation is below this."""
        end = self.tail(self._cut) * _LAG_STEP / self._cut  # the table is no more accurate
        bound = max(bound, end)
        lag = _LONGEST_LAG / self.scales[axis]
        if self.correlation(lag, axis) <= bound:
            lags = np.linspace(0, lag, _NUM_LAGS)
            return float(lags[np.searchsorted(-self._bounds[axis], -bound)])
        while self.correlation(lag, axis) > bound and lag < _LARGEST / self.scales[axis]:
            lag *= 2
        return lag

    @cached_property
    def _cut(self) -> float:
        """The scaled radius at which the integrals of the table of correlations end."""
        return min(self.radius(_CUT), _MOST.get(self.num_dims, _FEWEST))

    @cached_property
    def _polar(self) -> tuple[Float[Tensor, "m d"], Float[Tensor, "m"]]:
        """Frequencies in all directions and of all lengths, and their volumes."""
        angles, step = _NODES.get(self.num_dims, (0, 0.3))
        return _polar_nodes(self.scales, angles, step, self.device)

    @property
    def device(self) -> torch.device:
        return self.spectrum.second_moments(self.num_dims).device

    def _masses(
        self, omega: Float[Tensor, "m d"], volumes: Float[Tensor, "m"]
    ) -> Iterator[tuple[Float[Tensor, "*b c"], Float[Tensor, "c p r"]]]:
        """By chunks of frequencies: S times the volumes, and B, zero where S underflows."""
        shape = self.factor.num_outputs, self.factor.rank
        for part, volume in zip(omega.split(_CHUNK), volumes.split(_CHUNK), strict=True):
            mass = self.spectrum.log_density(part).exp() * volume
            used = (mass > 0).reshape(-1, len(part)).any(0).nonzero().squeeze(-1)
            zeros = part.new_zeros(len(part), *shape)
            yield mass, zeros.index_copy(0, used, self.factor(part[used]))

    @cached_property
    def _shares(self) -> tuple[Float[np.ndarray, "m"], Float[np.ndarray, "*b m"]]:
        """Scaled radii, in ascending order, and the shares of tr K(0) in the shell of each."""
        omega, volumes = self._polar
        with torch.no_grad():
            masses = self._masses(omega, volumes)
            parts = [mass * b.square().sum((-1, -2)) for mass, b in masses]
        traces = torch.cat(parts, dim=-1).cpu().numpy()
        invalid = ~np.isfinite(traces).reshape(-1, traces.shape[-1]).all(0)
        if invalid.any():
            raise ValueError(
                "SpectralMatrixKernel expects a finite amplitude, got NaN or infinity at ω = "
                f"{omega[int(invalid.argmax())].tolist()} with its present parameters; write it so "
                "that it is finite for all of their values"
            )
        radii, place = np.unique(
            self.spectrum.scaled_radius(omega.cpu().numpy()).round(12), return_inverse=True
        )
        shares = np.zeros((*traces.shape[:-1], len(radii)))
        np.add.at(shares, (..., place.reshape(-1)), traces)
        total = shares.sum(-1, keepdims=True)
        return radii, shares / np.where(total > 0, total, 1.0)

    @cached_property
    def _tails(self) -> tuple[Float[np.ndarray, "m"], Float[np.ndarray, "m"]]:
        """Scaled radii, in ascending order, and the shares of tr K(0) beyond each of them."""
        radii, shares = self._shares
        beyond = shares[..., ::-1].cumsum(-1)[..., ::-1] - 0.5 * shares  # half of its own shell
        tails = beyond.reshape(-1, len(radii)).max(0)
        return radii, np.maximum(tails, _TINY * (1 + np.arange(len(radii))[::-1]))

    @cached_property
    def _bounds(self) -> list[Float[np.ndarray, "l"]]:
        """For each axis, the largest ‖K(r)‖/‖K(0)‖ from each lag of the table on."""
        return [self._bound(axis) for axis in range(self.num_dims)]

    @torch.no_grad()
    def _bound(self, axis: int) -> Float[np.ndarray, "l"]:
        density, frequencies = self._marginal(axis)
        lags = torch.linspace(0, _LONGEST_LAG, _NUM_LAGS, dtype=torch.float64).to(frequencies)
        cosines = torch.cos(lags.unsqueeze(-1) * frequencies)
        blocks = torch.einsum("lm,...mpq->...lpq", cosines, density)
        sizes = torch.linalg.matrix_norm(blocks, ord=2)
        sizes = (sizes / sizes[..., :1]).reshape(-1, _NUM_LAGS).amax(0)
        return sizes.flip(0).cummax(0).values.flip(0).cpu().numpy()

    def _marginal(self, axis: int) -> tuple[Float[Tensor, "*b m p p"], Float[Tensor, "m"]]:
        """A S integrated over all axes but one, at equispaced scaled frequencies along that one."""
        count = 1 + math.ceil(self._cut / _LAG_STEP)
        along = _LAG_STEP * torch.arange(count, dtype=torch.float64, device=self.device)
        others = [i for i in range(self.num_dims) if i != axis]
        rest, volumes = _polar_nodes(self.scales[others], _FEW_ANGLES, _LONG_STEP, self.device)
        omega = rest.new_empty(count, len(rest), self.num_dims)
        omega[..., axis] = along.unsqueeze(-1) * self.scales[axis]
        omega[..., others] = rest
        half = torch.where(along == 0, 1.0, 2.0).unsqueeze(-1) * volumes
        parts = [
            torch.einsum("...m,mpr,mqr->...mpq", mass, b, b)
            for mass, b in self._masses(omega.flatten(0, 1), half.flatten())
        ]
        density = torch.cat(parts, dim=-3).unflatten(-3, (count, len(rest))).sum(-3)
        return density, along


def _polar_nodes(
    scales: Float[np.ndarray, "k"], angles: int, step: float, device: torch.device
) -> tuple[Float[Tensor, "m k"], Float[Tensor, "m"]]:
    """Nodes ω in k dimensions and weights of an integral over all of them, in polar coordinates."""
    dims = len(scales)
    if not dims:
        return torch.zeros(1, 0, dtype=torch.float64, device=device), torch.ones(1, device=device)
    directions, means = unit_sphere(dims, device, angles)
    radii = torch.from_numpy(_radii(step)).to(device)
    surface = 2 * math.pi ** (dims / 2) / math.gamma(dims / 2) * float(np.prod(scales))
    volumes = surface * step * radii.pow(dims).unsqueeze(-1) * means
    omega = radii[:, None, None] * directions * torch.from_numpy(scales).to(device)
    return omega.flatten(0, 1), volumes.flatten()


@cache
def _radii(step: float) -> Float[np.ndarray, "n"]:
    return np.exp(np.arange(math.log(_SMALLEST), math.log(_LARGEST), step))
