"""Values of a kernel ∫ cos⟨ω, τ⟩ A(ω) S(ω) dω by the trapezoidal rule over frequencies."""

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from gp_orff.kernels.cholesky import positive_root
from gp_orff.kernels.matrix_valued.variance_spectrum import VarianceSpectrum
from gp_orff.kernels.spectra.lattice_sums import first_nonzero, lattice_weights

_TOLERANCES = 10.0 ** np.arange(-10, 0, 0.5)  # of truncation and aliasing; the first affordable
_POOR = 1.1e-6  # the largest without a warning
_MOST_NODES = 200_000
_MOST_NUMBERS = 2**24  # of a chunk of features


@dataclass(frozen=True)
class Lattice:
    """Equispaced frequencies ω, one of each pair ±ω, and their spacing."""

    omega: Float[Tensor, "D d"]
    spacing: Float[Tensor, "d"]

    @classmethod
    @torch.no_grad()
    def for_lags(cls, variance: VarianceSpectrum, lag: Float[np.ndarray, "d"]) -> "Lattice":
        """The frequencies for lags up to `lag` along each axis.

        The sum over the lattice is the kernel made periodic: the period is the longest lag and the
        lag beyond which correlations are negligible, together.
        """
        for tolerance in _TOLERANCES:
            reach = [variance.correlation_lag(axis, tolerance) for axis in range(len(lag))]
            spacing = 2 * math.pi / (lag + np.array(reach))
            counts = np.floor(variance.radius(tolerance) * variance.scales / spacing)
            if 0.5 * np.prod(2 * counts + 1) <= _MOST_NODES:
                break
        else:
            raise NotImplementedError(
                f"SpectralMatrixKernel computes covariances by quadrature with {_MOST_NODES} "
                f"frequencies at most, which do not suffice for lags up to {np.round(lag, 3)} and "
                "correlations that fall so slowly; put it inside ORFFKernel, with "
                "gp_orff.QuasiMonteCarlo"
            )
        if tolerance > _POOR:
            warnings.warn(
                f"a quadrature with {_MOST_NODES} frequencies reaches a tolerance of "
                f"{tolerance:.0e} of the variance only, for lags up to {np.round(lag, 3)}: put the "
                "kernel inside ORFFKernel, or use a smoother base kernel",
                RuntimeWarning,
                stacklevel=2,
            )
        axes = [np.arange(0 if i == 0 else -n, n + 1) for i, n in enumerate(counts)]
        indices = np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1).reshape(-1, len(counts))
        omega = indices[first_nonzero(indices) >= 0] * spacing
        return cls(*(torch.from_numpy(v).to(variance.device) for v in (omega, spacing)))


def covariance(
    variance: VarianceSpectrum, x: Float[Tensor, "*b n d"], z: Float[Tensor, "*b m d"]
) -> Float[Tensor, "*b n*p m*p"]:
    """K(x, z), point-major, as a product of features."""
    lattice, origin = _lattice(variance, x, z)
    size = (x.shape[-2] + z.shape[-2]) * variance.factor.num_outputs * 2 * variance.factor.rank
    total = 0.0
    for omega, b in _weighted(variance, lattice, max(1, _MOST_NUMBERS // size)):
        left, right = (_features(points - origin, omega, b) for points in (x, z))
        total = total + left @ right.mT
    return total


def variances(
    variance: VarianceSpectrum, x: Float[Tensor, "*b n d"], z: Float[Tensor, "*b n d"]
) -> Float[Tensor, "*b n*p"]:
    """The diagonal of K(x, z)."""
    lattice, _ = _lattice(variance, x, z)
    total = 0.0
    for omega, b in _weighted(variance, lattice, max(1, _MOST_NUMBERS // x.shape[-2])):
        total = total + torch.cos((x - z) @ omega.mT) @ b.square().sum(-1)
    return total.flatten(-2)


def _lattice(
    variance: VarianceSpectrum, x: Float[Tensor, "*b n d"], z: Float[Tensor, "*b m d"]
) -> tuple[Lattice, Float[Tensor, "d"]]:
    """Frequencies for the lags between two sets of points, and the centre of the points."""
    ends = [[points.flatten(0, -2).amin(0), points.flatten(0, -2).amax(0)] for points in (x, z)]
    low, high = (torch.stack(end).double().detach() for end in zip(*ends, strict=True))
    low, high = low.amin(0), high.amax(0)
    return Lattice.for_lags(variance, (high - low).cpu().numpy()), 0.5 * (low + high)


def _weighted(
    variance: VarianceSpectrum, lattice: Lattice, size: int
) -> Sequence[tuple[Float[Tensor, "c d"], Float[Tensor, "*b c p r"]]]:
    """Chunks of frequencies, and √w B(ω) of each."""
    for omega in lattice.omega.split(size):
        weights = lattice_weights(variance.spectrum, omega, lattice.spacing)
        weights = weights * (1.0 + omega.any(-1).to(weights))  # −ω is the same feature
        scale = positive_root(weights)
        yield omega, scale[..., None, None] * variance.factor(omega)


def _features(
    x: Float[Tensor, "*b n d"], omega: Float[Tensor, "c d"], b: Float[Tensor, "*b c p r"]
) -> Float[Tensor, "*b n*p 2*c*r"]:
    phase = x.double() @ omega.mT
    waves = torch.cat([phase.cos(), phase.sin()], dim=-1)  # (*b, n, 2c)
    directions = torch.cat([b, b], dim=-3).transpose(-3, -2)  # (*b, p, 2c, r)
    values = waves[..., :, None, :, None] * directions.unsqueeze(-4)
    return values.flatten(-2).flatten(-3, -2)
