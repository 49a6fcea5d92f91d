"""Kernels with any positive spectral matrix A(ω), and a quadrature for their covariances."""

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from gpytorch.kernels import Kernel, MaternKernel
from jaxtyping import Float
from torch import Tensor, nn

from gp_orff import nufft
from gp_orff.kernels.base import (
    WrapperKernel,
    as_real_tensor,
    check_base_kernel,
    check_num_dims,
    check_points,
    check_scalar,
    positive_root,
)
from gp_orff.kernels.lattice_sums import first_nonzero, lattice_weights
from gp_orff.kernels.spectra import StudentT, spectral_density
from gp_orff.kernels.tree import Sampler, SpectralMatrix, Term, evaluate, inner_terms, terms
from gp_orff.kernels.variance_spectrum import VarianceSpectrum
from gp_orff.symbols.base import required

# The amplitude B(ω) of a kernel with the signature K₀, by a Fourier transform.
#
# 1. `_check` evaluates K₀ at random lags. The standard deviations of the outputs become their
#    units.
# 2. `_longest_lag` doubles a lag along each axis until K₀ vanishes on the whole face of the box of
#    lags. From then on, K₀ counts as a function with compact support.
# 3. `_resolve` samples K₀ on a lattice of lags and computes its transform C(ω). If C has not
#    vanished at the largest frequency of an axis, the spacing along this axis is halved.
# 4. If C(ω) has a negative eigenvalue beyond rounding, no process has this covariance, and an error
#    is raised.
# 5. The base density S is the spectral density of a Matérn 5/2 kernel with the second moments of
#    tr C. S only has to be positive wherever C is, because B(ω) compensates for the difference.
# 6. Random frequencies are drawn from a density ∝ tr C, linear between the points of a lattice.
# 7. At any ω, B is a root of C(ω)/S(ω) from its eigenvectors. A non-uniform Fourier transform
#    computes C(ω) from the samples. Beyond their largest frequency, B is zero.


_NU = 2.5  # the smoothness of the base kernel; its density has a heavy tail
_VANISHED = 1e-8  # the fraction of K₀(0) that is negligible at the longest lags
_MOST = {1: 2**14 + 1, 2: 2**9 + 1, 3: 2**6 + 1}  # the most samples per axis, by number of axes

Signature = Callable[[Float[Tensor, "m d"]], Float[Tensor, "m p p"]]


def check_frozen(values: Tensor) -> None:
    """Raise an error if frequencies or weights depend on trained parameters of S.

    Raises:
        ValueError: `values` requires a gradient.
    """
    if values.requires_grad:
        raise ValueError(
            "expected a frozen base kernel, because the signature determines the kernel, got "
            "one with trained parameters; use base_kernel.requires_grad_(False), and a "
            "ScaleKernel for the variance"
        )


class SignatureAmplitude(nn.Module):
    """B(ω) with B B* = C(ω)/S(ω), where C is the Fourier transform of samples of a signature K₀.

    Args:
        units: (p,), the standard deviations of the outputs, from K₀(0).
        samples: (n, …, n, p, p), K₀ divided by these units, at the lags j∘δ with |j| ≤ n/2 along
            each axis, for odd n.
        spacing: δ, (d,), the spacing of the lags.
        lengthscale: (1, d), the lengthscale of the Matérn 5/2 kernel with the density S.
    """

    def __init__(
        self,
        units: Float[Tensor, "p"],
        samples: Float[Tensor, "*n p p"],
        spacing: Float[Tensor, "d"],
        lengthscale: Float[Tensor, "1 d"],
    ):
        super().__init__()
        self.num_outputs = samples.shape[-1]
        self.register_buffer("units", units)
        self.register_buffer("samples", samples * (spacing / (2 * math.pi)).prod())
        self.register_buffer("spacing", spacing)
        self.register_buffer("lengthscale", lengthscale)
        self.is_even = _is_even(samples)

    def forward(self, omega: Float[Tensor, "m d"]) -> Float[Tensor, "m p p"]:
        """Return B(ω), which is zero beyond the largest frequency that the samples resolve.

        Raises:
            ValueError: ω depends on trained parameters of S.
        """
        check_frozen(omega)
        inside = (omega.abs() * self.spacing <= math.pi).all(-1)
        part = omega[inside]
        values, vectors = torch.linalg.eigh(self._spectral_matrix(part))
        density = StudentT(self.lengthscale, _NU).log_density(part).exp()
        b = vectors * (values.clamp_min(0) / density.unsqueeze(-1)).sqrt().unsqueeze(-2)
        if not self.is_even:  # the Hermitian root has B(−ω) = conj B(ω)
            b = b @ vectors.mH
        b = self.units.unsqueeze(-1) * b
        zeros = b.new_zeros(len(omega), *b.shape[1:])
        return zeros.index_copy(0, inside.nonzero().squeeze(-1), b)

    def _spectral_matrix(self, omega: Float[Tensor, "m d"]) -> Float[Tensor, "m p p"]:
        """Return C(ω) = (2π)^{−d} Σ_j K₀(j∘δ) e^{i⟨ω, j∘δ⟩} ∏δ."""
        p, phases = self.num_outputs, (omega * self.spacing).double()
        row, column = torch.tril_indices(p, p)
        coefficients = self.samples[..., row, column].movedim(-1, 0).to(torch.complex128)
        entries = nufft.type2(phases, coefficients.contiguous())
        if not self.is_even:
            entries = torch.complex(entries, nufft.type2(phases, -1j * coefficients.contiguous()))
        matrix = entries.new_zeros(len(omega), p, p)
        matrix[:, column, row] = entries.conj()
        matrix[:, row, column] = entries
        return matrix.to(omega.dtype if self.is_even else omega.dtype.to_complex())


@dataclass(frozen=True, eq=False)
class TraceSampler:
    """Draws frequencies from a density that is linear between the points of a lattice.

    The first coordinate has the density summed over the other axes. Each further coordinate has its
    conditional density, for the coordinates that are already drawn. Both densities are linear
    between points, so each quantile is a root of a quadratic equation.

    Args:
        heights: (n, …, n) with odd n, the density at equispaced frequencies about zero, positive
            and of any norm. The density is zero beyond these frequencies.
        spacing: (d,), the spacing of the frequencies.
    """

    heights: Float[Tensor, "*n"]
    spacing: Float[Tensor, "d"]

    def __call__(self, u: Float[Tensor, "D d"]) -> tuple[Float[Tensor, "D d"], Float[Tensor, "D"]]:
        """Return frequencies ω (D, d) and log ρ(ω) (D,) for uniform numbers u (D, d)."""
        size = max(1, 2**24 // self.heights[0].numel())
        omega, density = zip(*(self._quantiles(part) for part in u.split(size)), strict=True)
        density = torch.cat(density) / (self.heights.sum() * self.spacing.prod())
        return torch.cat(omega), density.clamp_min(torch.finfo(density.dtype).tiny).log()

    def _quantiles(
        self, u: Float[Tensor, "D d"]
    ) -> tuple[Float[Tensor, "D d"], Float[Tensor, "D"]]:
        """Return ω, and the height of the density at ω."""
        rows = nn.functional.pad(self.heights, [1, 1] * u.shape[1]).unsqueeze(0)
        omega = []
        for level, spacing in zip(u.mT, self.spacing, strict=True):
            marginal = rows.flatten(2).sum(-1) if rows.dim() > 2 else rows
            masses = 0.5 * (marginal[:, 1:] + marginal[:, :-1])
            levels, row = masses.cumsum(-1), torch.arange(len(u)).clamp_max(len(rows) - 1)
            level = level * levels[row, -1]
            cell = torch.searchsorted(levels[row], level.unsqueeze(-1)).squeeze(-1)
            cell = cell.clamp_max(masses.shape[-1] - 1)
            share = (1 - (levels[row, cell] - level) / masses[row, cell]).clamp(0, 1)
            low, high = marginal[row, cell], marginal[row, cell + 1]
            root = (low.square() + share * (high.square() - low.square())).sqrt()
            t = share * (low + high) / (low + root).clamp_min(torch.finfo(root.dtype).tiny)
            omega.append((cell + t - marginal.shape[-1] // 2) * spacing)
            t = t.reshape(-1, *[1] * (rows.dim() - 2))
            rows = (1 - t) * rows[row, cell] + t * rows[row, cell + 1]
        return torch.stack(omega, dim=-1), rows


def amplitude_of(
    signature: Signature, domain: Sequence[tuple[float, float]]
) -> tuple[Kernel, SignatureAmplitude, TraceSampler]:
    """Return a fixed base kernel, the amplitude B(ω), and a sampler with the density ∝ tr C.

    They satisfy ∫ e^{−i⟨ω, δ⟩} B B* S dω = K₀(δ), where S is the density of the base kernel.

    Raises:
        ValueError: the signature is not a finite covariance, does not vanish at large lags, or has
            a spectral matrix C(ω) with a negative eigenvalue.
    """
    extent = _extent(domain)
    units = _check(signature, extent)
    original = signature

    def signature(lag: Float[Tensor, "m d"]) -> Float[Tensor, "m p p"]:
        """Return the correlations of the outputs."""
        return _real(original(lag)).double() / (units.unsqueeze(-1) * units)

    longest = np.array([_longest_lag(signature, extent, axis) for axis in range(len(extent))])
    samples, spectral_matrix = _resolve(signature, longest)
    sides = samples.shape[: len(extent)]
    frequencies = [math.pi / lag * _centred(n) for lag, n in zip(longest, sides, strict=True)]
    omega = torch.from_numpy(_product(frequencies))
    _require_positive(spectral_matrix.flatten(0, -3), omega)
    traces = spectral_matrix.diagonal(dim1=-1, dim2=-2).real.sum(-1).flatten()
    moments = (traces @ omega.square()) / traces.sum()  # E ω_i²
    kernel = MaternKernel(nu=_NU, ard_num_dims=len(extent)).double()
    # The spectral density of a Matérn kernel has the second moment ν / ((ν − 1) ℓ²) along each
    # axis.
    kernel.lengthscale = (_NU / (_NU - 1) / moments).sqrt()
    kernel.requires_grad_(False)
    spacing = torch.from_numpy(2 * longest / sides)
    amplitude = SignatureAmplitude(units, samples, spacing, kernel.lengthscale.detach().clone())
    return kernel, amplitude, _sampler(samples, spacing)


def _sampler(samples: Float[Tensor, "*n p p"], spacing: Float[Tensor, "d"]) -> TraceSampler:
    """Return a sampler with the density ∝ tr C, on a lattice twice as fine as the lattice of C."""
    traces = samples.diagonal(dim1=-2, dim2=-1).sum(-1)
    halves = [n // 2 for n in reversed(traces.shape) for _ in range(2)]
    traces = nn.functional.pad(traces, halves)[..., None, None]
    heights = _fourier(traces, 1.0)[..., 0, 0]
    sides = torch.tensor(heights.shape, dtype=spacing.dtype)
    return TraceSampler(
        heights.clamp_min(torch.finfo(heights.dtype).eps * heights.max()),
        2 * math.pi / (sides * spacing),
    )


def _extent(domain: Sequence[tuple[float, float]]) -> Float[np.ndarray, "d"]:
    """Return high − low for every input."""
    pairs = np.array(domain, dtype=float)
    extent = np.diff(pairs).squeeze(-1) if pairs.ndim == 2 and pairs.shape[1] == 2 else np.zeros(0)
    if not len(extent) or not (np.isfinite(extent) & (extent > 0)).all():
        raise ValueError(
            "from_signature expects domain=((low, high), ...), one pair with low < high for each "
            f"input, got {domain}"
        )
    if len(extent) > 3:
        raise NotImplementedError(
            f"from_signature expects at most 3 inputs, got a domain of {len(extent)}; pass the "
            "amplitude B(ω) to SpectralMatrixKernel instead"
        )
    return extent


def _check(signature: Signature, extent: Float[np.ndarray, "d"]) -> Float[Tensor, "p"]:
    """Return the standard deviations of the outputs, after checks of the signature."""
    if not callable(signature):
        raise TypeError(
            f"from_signature expects a function of lags (m, d) as signature, got {signature!r}"
        )
    lags = torch.from_numpy(extent * np.random.default_rng(0).uniform(-1, 1, (16, len(extent))))
    lags = torch.cat([torch.zeros_like(lags[:1]), lags])
    values, opposite = signature(lags), signature(-lags)
    required(
        values,
        Tensor,
        "from_signature expects a signature that returns a torch.Tensor (m, p, p)",
        "use, for instance, torch.as_tensor(values)",
    )
    values, opposite = _real(values), _real(opposite)
    if values.dim() != 3 or len(values) != len(lags) or values.shape[1] != values.shape[2]:
        raise ValueError(
            f"from_signature expects matrices ({len(lags)}, p, p) for {len(lags)} lags, got shape "
            f"{tuple(values.shape)}"
        )
    if not torch.isfinite(values).all():
        raise ValueError("from_signature expects a finite signature, got NaN or infinity")
    sd = values[0].diagonal().double().clamp_min(0).sqrt()
    units = torch.where(sd > 0, sd, 1.0)
    outer = units.unsqueeze(-1) * units
    difference = ((values - opposite.mT) / outer).abs().amax((-1, -2))
    if (difference > _VANISHED).any():
        worst = difference.argmax()
        raise ValueError(
            "from_signature expects a signature with K₀(−δ) = K₀(δ)ᵀ, as every covariance has, got "
            f"a difference of {(values - opposite.mT)[worst].abs().max():.3g} at the lag "
            f"{lags[worst].tolist()}"
        )
    return units


def _real(values: Tensor) -> Tensor:
    """Return the values of a signature, or raise a TypeError if they are complex."""
    remedy = "return values.real; the covariance of a real field has no imaginary part"
    return as_real_tensor(values, "the signature K₀(δ) of from_signature", remedy)


def _longest_lag(signature: Signature, extent: Float[np.ndarray, "d"], axis: int) -> float:
    """Return a lag along an axis at which K₀ has vanished."""
    # K₀ may be long in a direction between the axes. So the lags along the other axes are on a
    # coarse grid up to the largest lag.
    powers = 2.0 ** np.arange(-6, 5)  # up to 16 times the domain
    multiples = np.concatenate([-powers[::-1], [0.0], powers])
    others = _product([multiples * length for i, length in enumerate(extent) if i != axis])
    size = signature(torch.zeros(1, len(extent), dtype=torch.float64)).abs().max()
    for lag in powers * extent[axis]:
        face = torch.from_numpy(np.insert(others, axis, lag, axis=1))
        if signature(face).abs().max() <= _VANISHED * size:
            return float(lag)
    raise ValueError(
        f"from_signature expects a signature that vanishes at large lags, got "
        f"{float(signature(face).abs().max() / size):.1e} of K₀(0) at a lag of {lag:.3g} along "
        f"input {axis}; multiply K₀ by a kernel that vanishes, or pass a larger domain"
    )


def _resolve(
    signature: Signature, longest: Float[np.ndarray, "d"]
) -> tuple[Float[Tensor, "*n p p"], Float[Tensor, "*n p p"]]:
    """Return samples of K₀ and their transform C(ω), which vanishes at the largest frequencies."""
    most, counts = _MOST[len(longest)], [17] * len(longest)
    while True:
        lags = [2 * lag / n * _centred(n) for lag, n in zip(longest, counts, strict=True)]
        samples = signature(torch.from_numpy(_product(lags))).double()
        samples = samples.reshape(*counts, *samples.shape[-2:])
        spectral_matrix = _fourier(samples, float(np.prod(longest / counts / math.pi)))
        size = spectral_matrix.abs().max()
        ends = [spectral_matrix.select(axis, 0).abs().max() for axis in range(len(counts))]
        coarse = [end > 1e-10 * size for end in ends]
        finer = [
            n if n == most or not more else 2 * n - 1
            for n, more in zip(counts, coarse, strict=True)
        ]
        if finer == counts:
            return samples, spectral_matrix
        counts = finer


def _fourier(samples: Float[Tensor, "*n p p"], cell: float) -> Float[Tensor, "*n p p"]:
    """Return C at the frequencies πk/L, |k| ≤ n/2, for samples up to the lag L along each axis."""
    axes = tuple(range(samples.dim() - 2))
    centred = torch.fft.ifftshift(samples, dim=axes)
    # K₀ is real, so the transform with e^{i⟨ω, δ⟩} is the conjugate of the transform by fftn.
    transform = torch.fft.fftn(centred, dim=axes).conj().resolve_conj()
    transform = transform.real if _is_even(samples) else transform
    return cell * torch.fft.fftshift(transform, dim=axes)


def _is_even(samples: Float[Tensor, "*n p p"]) -> bool:
    """Return whether K₀(−δ) = K₀(δ); then C is real."""
    opposite = samples.flip(tuple(range(samples.dim() - 2)))
    return bool((samples - opposite).abs().max() <= _VANISHED * samples.abs().max())


def _require_positive(spectral_matrix: Float[Tensor, "m p p"], omega: Float[Tensor, "m d"]) -> None:
    values = torch.linalg.eigvalsh(0.5 * (spectral_matrix + spectral_matrix.mH))
    share = float((-values).clamp_min(0).sum() / values.abs().sum())
    if share > 1e-6:  # more than rounding
        lowest = values[:, 0].argmin()
        raise ValueError(
            "from_signature expects a spectral matrix C(ω) without negative eigenvalues, got "
            f"{values[lowest, 0]:.3g} at ω = {omega[lowest].tolist()}, while the largest is "
            f"{values.max():.3g} and negative ones are {share:.1e} of the sum; no process has this "
            "covariance, so correct the signature"
        )


def _centred(count: int) -> Float[np.ndarray, "n"]:
    """Return `count` integers around zero."""
    return np.arange(count) - count // 2.0


def _product(axes: Sequence[Float[np.ndarray, "n"]]) -> Float[np.ndarray, "m d"]:
    """Return all points of a tensor grid; the last axis varies fastest."""
    if not axes:
        return np.zeros((1, 0))
    return np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1).reshape(-1, len(axes))


# The covariance ∫ e^{−i⟨ω, τ⟩} A(ω) S(ω) dω, by the trapezoidal rule over frequencies.
#
# 1. The box of both sets of points gives the longest lags. `_lattice` takes the smallest tolerance
#    for which the number of frequencies is permitted. The spacing 2π/(lag + reach) and the cut-off
#    depend on the tolerance.
# 2. The features of the points are √w B(ω) times cosines and sines. K(x, z) is the product of the
#    features, which are computed in chunks of frequencies.
#
# This is the quadrature of a `Grid`, but every set of points has its own frequencies. A covariance
# matrix thus costs a product of large matrices.


_MOST_NODES = 200_000


@torch.no_grad()
def _lattice(
    variance: VarianceSpectrum, lag: Float[np.ndarray, "d"]
) -> tuple[Float[Tensor, "D d"], Float[Tensor, "d"]]:
    """Return equispaced frequencies (D, d), one of each pair ±ω, and their spacing (d,).

    The sum over the lattice is a periodic kernel. Its period is the sum of `lag`, the longest lag,
    and of the lag beyond which correlations are negligible.
    """
    # the smallest tolerance of truncation and aliasing that is affordable
    for tolerance in 10.0 ** np.arange(-10, 0, 0.5):
        reach = [variance.correlation_lag(axis, tolerance) for axis in range(len(lag))]
        spacing = 2 * math.pi / (lag + np.array(reach))
        counts = np.floor(variance.radius(tolerance) * variance.scales / spacing)
        if 0.5 * np.prod(2 * counts + 1) <= _MOST_NODES:
            break
    else:
        raise NotImplementedError(
            "SpectralMatrixKernel expects lags and correlation lengths for which a quadrature "
            f"needs at most {_MOST_NODES} frequencies, got lags up to {np.round(lag, 3)} and "
            "correlations that fall too slowly; put it inside ORFFKernel, with "
            "gp_orff.QuasiMonteCarlo"
        )
    if tolerance > 1.1e-6:
        warnings.warn(
            f"for lags up to {np.round(lag, 3)}, the covariance of SpectralMatrixKernel has an "
            f"error of about {tolerance:.0e} of the variance, because its quadrature has at most "
            f"{_MOST_NODES} frequencies; put the kernel inside ORFFKernel, or use a smoother base "
            "kernel",
            RuntimeWarning,
            stacklevel=2,
        )
    # ω and −ω are one feature. So the lattice contains only zero and frequencies whose first
    # nonzero index is positive. `_weighted` doubles their weights, except the weight of zero.
    indices = _product([np.arange(0 if i == 0 else -n, n + 1) for i, n in enumerate(counts)])
    omega = indices[first_nonzero(indices) >= 0] * spacing
    return tuple(torch.from_numpy(values).to(variance.device) for values in (omega, spacing))


def covariance(
    variance: VarianceSpectrum, x: Float[Tensor, "*b n d"], z: Float[Tensor, "*b m d"]
) -> Float[Tensor, "*b n*p m*p"]:
    """Return K(x, z), ordered point by point, as a product of features."""
    low, high = _box(x, z)
    # The centre is subtracted from the points, so that phases are small and lose no digits.
    x, z = (points - 0.5 * (low + high) for points in (x, z))
    size = (x.shape[-2] + z.shape[-2]) * variance.factor.num_outputs * 2 * variance.factor.rank
    return sum(
        _features(x, omega, b) @ _features(z, omega, b).mT
        for omega, b in _weighted(variance, high - low, size)
    )


def variances(
    variance: VarianceSpectrum, x: Float[Tensor, "*b n d"], z: Float[Tensor, "*b n d"]
) -> Float[Tensor, "*b n*p"]:
    """Return the diagonal of K(x, z)."""
    low, high = _box(x, z)
    total = sum(
        torch.cos((x - z).double() @ omega.mT) @ b.abs().square().sum(-1)
        for omega, b in _weighted(variance, high - low, x.shape[-2])
    )
    return total.flatten(-2)


def _box(*points: Float[Tensor, "*b n d"]) -> tuple[Float[Tensor, "d"], Float[Tensor, "d"]]:
    """Return the lowest and the highest coordinates of all points."""
    every = torch.cat([part.detach().double().flatten(0, -2) for part in points])
    return every.amin(0), every.amax(0)


def _weighted(
    variance: VarianceSpectrum, lag: Float[Tensor, "d"], size: int
) -> Iterator[tuple[Float[Tensor, "c d"], Float[Tensor, "*b c p r"]]]:
    """Yield chunks of frequencies for all lags up to `lag`, and √w B(ω) of each frequency.

    A chunk has as many frequencies as memory allows, with `size` numbers for each frequency.
    """
    every, spacing = _lattice(variance, lag.cpu().numpy())
    for omega in every.split(max(1, 2**24 // size)):
        weights = lattice_weights(variance.spectrum, omega, spacing)
        weights = weights * (1.0 + omega.any(-1).to(weights))  # −ω is the same feature
        scale = positive_root(weights)
        yield omega, scale[..., None, None] * variance.factor(omega)


def _features(
    x: Float[Tensor, "*b n d"], omega: Float[Tensor, "c d"], b: Float[Tensor, "*b c p r"]
) -> Float[Tensor, "*b n*p 2*c*r"]:
    phase = x.double() @ omega.mT
    if b.is_complex():  # Re(m e^{iθ}) and Im(m e^{iθ})
        waves = torch.polar(torch.ones_like(phase), phase)[..., :, None, :, None]
        values = torch.view_as_real(waves * b.transpose(-3, -2).unsqueeze(-4)).movedim(-1, -3)
        return values.flatten(-3).flatten(-3, -2)
    waves = torch.cat([phase.cos(), phase.sin()], dim=-1)  # (*b, n, 2c)
    # The cosine and the sine of a frequency have the same directions. The features (*b, n, p, 2c,
    # r) are flattened to the rows n·p + i and to 2·c·r columns.
    directions = torch.cat([b, b], dim=-3).transpose(-3, -2)  # (*b, p, 2c, r)
    values = waves[..., :, None, :, None] * directions.unsqueeze(-4)
    return values.flatten(-2).flatten(-3, -2)


# Kernels of any positive spectral matrix.


_EVEN = 1e-6  # the largest relative difference of A(ω) and A(−ω)


class SpectralMatrixKernel(WrapperKernel):
    r"""The stationary kernel whose spectral matrix is A(ω) S(ω), with A(ω) = B(ω) B(ω)*.

    K(x, z) = ∫ e^{−i⟨ω, x − z⟩} B(ω) B(ω)* S(ω) dω

    S is the spectral density of the scalar kernel `base_kernel`. You write the amplitude B(ω), a
    (p, r) matrix, as a function. If B is real, the field is a sum of random waves cos⟨ω, x⟩ and
    sin⟨ω, x⟩, with amplitudes along the columns of B(ω) and a variance that is proportional to
    S(ω). With B = 1, the kernel is `base_kernel` itself. A complex B shifts the phase of one output
    relative to another. For example, B = (1, e^{i⟨ω, τ⟩})ᵀ describes a signal f₁(x) = g(x) and its
    delayed copy f₂(x) = g(x − τ).

    A is Hermitian and positive semidefinite for every B. Real fields need A(−ω) = A(ω)ᵀ. Every
    stationary real kernel with a spectral density has this form (Brault et al. 2016, Propositions
    2.2 and 2.3; Minh 2016, Theorem 3 and equation 21). Only the product A·S matters. S can
    therefore be any positive density if B compensates for it.

    The covariance has no closed form. How it is computed depends on the model:

    - An `ORFFKernel` uses r features for each cosine and each sine, with any rule for frequencies.
    - `VectorFieldGP` uses features, also for small data.
    - A plain gpytorch model uses quadrature over frequencies, for up to 3 inputs. The relative
      error is about 1e-9 for an RBF base kernel and a smooth B.

    If `amplitude` is a `torch.nn.Module`, its parameters are trained with the others. A fit tries
    several lengthscales and variances, but only one starting value for these parameters, their
    current value. Set them to the right order of magnitude first. Delays between outputs along a
    single input are an exception. A fit also starts from the delays with the largest
    cross-covariance of the data.

    `VectorFieldGP.save` needs a module as `amplitude`. To load the model, build this kernel again
    and pass it to `VectorFieldGP.load` as `kernel=`.

    The covariance matrix of points x (N, d) is (N·p, N·p), ordered point by point: row n·p + i is
    output i at point n.

    Args:
        base_kernel: the scalar kernel with the spectral density S, such as `RBFKernel()`. Pass a
            kernel with a spectral density in `gp_orff.spectrum`, alone or in a `ScaleKernel`, or a
            sum of such kernels.
        amplitude: B, a function or a `torch.nn.Module`. It receives frequencies ω (D, d), in
            radians per unit of the inputs, and returns a tensor (D, p, r). D changes from call to
            call. The dtype of ω is float64, or the dtype of the parameters of a module, which must
            be the dtype of `base_kernel`. B must be continuous and finite, B(0) must be real, and
            A(−ω) = A(ω)ᵀ. To satisfy the last condition, make each real column even or odd in ω,
            and each complex column satisfy B(−ω) = ±conj B(ω). Derivatives of B with respect to
            trained parameters must be finite.
        num_outputs: p, the number of outputs.
        num_dims: d, the number of input columns of the kernel.
        active_dims: the d input columns; all columns if None.
        sampler: a density ρ from which rules with `measure="trace"` draw random frequencies. With
            None, the default, they are drawn from S. The sampler is a function of uniform numbers u
            (D, d) in (0, 1). It returns ω (D, d), in radians per unit of the inputs, and log ρ(ω)
            (D,). When lengthscales are trained, these ω are fixed, and only their weights
            S(ω)/ρ(ω) change. So ρ must be positive wherever S is large, for all lengthscales in
            training. The best choice is ρ ∝ S tr A, whose features are bounded (Minh 2016, Theorem
            9 and Corollary 10). `ORFFKernel.accuracy` returns the effective sample size.

    Raises:
        TypeError: `base_kernel` is not an instance of a kernel, or `amplitude` is neither a
            function nor an instance of a module.
        ValueError: B does not have the shape (D, p, r), or is not finite; A(−ω) ≠ A(ω)ᵀ; the
            variance ∫ tr A S dω is infinite; `base_kernel` is a product or a constant, or has
            several outputs or `active_dims`.
        NotImplementedError: the spectrum of `base_kernel` is not registered. An evaluation of the
            covariance without features raises this error too if there are more than 3 inputs.

    Example:
        A current that flows at a constant angle to the pressure gradient. The angle is trained:

        >>> import gpytorch, gp_orff, torch
        >>> class Turned(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.angle = torch.nn.Parameter(torch.tensor(0.5))
        ...
        ...     def forward(self, omega):  # (D, 2) -> (D, 2, 1)
        ...         c, s = self.angle.cos(), self.angle.sin()
        ...         rotation = torch.stack(
        ...             [torch.stack([c, -s]), torch.stack([s, c])]
        ...         )
        ...         return (omega @ rotation.mT).unsqueeze(-1)
        >>> rbf = gpytorch.kernels.RBFKernel()
        >>> kernel = gp_orff.SpectralMatrixKernel(
        ...     rbf, Turned(), num_outputs=2, num_dims=2
        ... )
        >>> [name for name, _ in kernel.named_parameters()]
        ['base_kernel.raw_lengthscale', 'amplitude.angle']
        >>> gp_orff.ORFFKernel(kernel, gp_orff.MonteCarlo(100)).num_features
        200

        Two outputs with r = 1. The second output is the first one without its long waves:

        >>> import gpytorch, gp_orff, torch
        >>> def amplitude(omega):  # (D, 1) -> (D, 2, 1)
        ...     return torch.stack(
        ...         [torch.ones_like(omega), omega**2 / (1 + omega**2)], dim=1
        ...     )
        >>> rbf = gpytorch.kernels.RBFKernel()
        >>> kernel = gp_orff.SpectralMatrixKernel(
        ...     rbf, amplitude, num_outputs=2, num_dims=1
        ... )
        >>> kernel(torch.zeros(1, 1)).to_dense().detach().diagonal()
        tensor([1.0000, 0.3017])
        >>> x = torch.linspace(0, 1, 20).unsqueeze(-1)
        >>> grid = gp_orff.Grid.for_data(x, tolerance=1e-3)
        >>> gp_orff.ORFFKernel(kernel, grid).num_features < 50
        True
    """

    is_stationary = True

    def __init__(
        self,
        base_kernel: Kernel,
        amplitude: Callable[[Float[Tensor, "D d"]], Float[Tensor, "D p r"]],
        *,
        num_outputs: int,
        num_dims: int,
        active_dims: Sequence[int] | None = None,
        sampler: Sampler | None = None,
    ):
        name = type(self).__name__
        check_base_kernel(name, base_kernel)
        check_num_dims(name, num_dims, 1, active_dims)
        if not callable(amplitude) or isinstance(amplitude, type):
            raise TypeError(
                "SpectralMatrixKernel expects amplitude to be a function of frequencies (D, d), or "
                f"an instance of torch.nn.Module, got {amplitude!r}"
            )
        super().__init__(active_dims=active_dims)
        self.base_kernel = base_kernel
        self.amplitude = amplitude
        self.sampler = sampler
        self.num_outputs, self.num_dims = num_outputs, num_dims
        for term in terms(base_kernel):
            _check_base(term, num_dims)
        self.rank = self._checked_rank()
        self._require_finite_variance()

    @classmethod
    def from_signature(
        cls,
        signature: Callable[[Float[Tensor, "m d"]], Float[Tensor, "m p p"]],
        domain: Sequence[tuple[float, float]],
    ) -> "SpectralMatrixKernel":
        r"""Return the kernel K(x, z) = K₀(x − z) for a function K₀, the signature of the kernel.

        The method computes (Brault et al. 2016, Section 2.2):

        1. The spectral matrix C(ω) = (2π)^{−d} ∫ e^{i⟨ω,δ⟩} K₀(δ) dδ, by a fast Fourier transform
           (Proposition 2.4).
        2. The density S of a Matérn 5/2 kernel with the second moments of tr C.
        3. B(ω) from the eigenvectors of C(ω)/S(ω), so that B B* S = C.

        Rules with `measure="trace"` draw random frequencies from ρ ∝ tr C, with each output divided
        by its standard deviation. The features are then bounded (Minh 2016, Theorem 9 and Corollary
        10).

        The kernel has no trained parameters. Its lengthscale only defines S and does not describe
        the data. To train a variance, put the kernel inside a `ScaleKernel`; `VectorFieldGP` does
        so. The computation takes tenths of a second for 1 or 2 inputs, and seconds for 3 inputs.

        Args:
            signature: K₀, a function that receives lags δ (m, d) in float64, and returns matrices
                (m, p, p) with K₀(−δ) = K₀(δ)ᵀ. It must vanish at large lags.
            domain: ((low, high), …), the box of the inputs, with one pair for each of d ≤ 3 inputs.

        Returns:
            A `SpectralMatrixKernel` with d inputs and p outputs, in float64.

        Raises:
            TypeError: `signature` is not a function, or returns complex values or another type than
                a tensor.
            ValueError: K₀ is not finite, or does not return square matrices; K₀(−δ) ≠ K₀(δ)ᵀ; K₀
                does not vanish within 16 times the domain; C(ω) has a negative eigenvalue, so that
                no field has this covariance; `domain` is invalid.
            NotImplementedError: `domain` has more than 3 inputs.

        Example:
            Two outputs of one input. The first output also varies over a shorter length:

            >>> import gp_orff, torch
            >>> def signature(lag):  # (m, 1) -> (m, 2, 2)
            ...     near, far = torch.exp(-lag.square()), torch.exp(-lag.square() / 4)
            ...     return torch.stack([near + far, far, far, far], dim=-1).reshape(
            ...         -1, 2, 2
            ...     )
            >>> kernel = gp_orff.SpectralMatrixKernel.from_signature(
            ...     signature, [(0, 3)]
            ... )
            >>> kernel(torch.zeros(1, 1).double(), torch.ones(1, 1).double()).to_dense()
            tensor([[1.1467, 0.7788],
                    [0.7788, 0.7788]], dtype=torch.float64)
        """
        base_kernel, amplitude, sampler = amplitude_of(signature, domain)
        return cls(
            base_kernel,
            amplitude,
            num_outputs=amplitude.num_outputs,
            num_dims=len(domain),
            sampler=sampler,
        )

    @property
    def factor(self) -> SpectralMatrix:
        """The amplitude B(ω) as a `Factor` of the kernel tree."""
        return SpectralMatrix(
            self.amplitude, self.num_outputs, self.num_dims, self.rank, self.sampler
        )

    def forward(
        self,
        x1: Float[Tensor, "*b n d"],
        x2: Float[Tensor, "*b m d"],
        diag: bool = False,
        last_dim_is_batch: bool = False,
    ) -> Float[Tensor, "*b n*p m*p"] | Float[Tensor, "*b n*p"]:
        """Return the covariance matrix (*b, n·p, m·p) between the points `x1` and `x2`.

        Row k·p + i is output i at point k of `x1`, both counted from 0. Columns are ordered in the
        same way, by the points of `x2`.

        Args:
            x1: points (*b, n, d).
            x2: points (*b, m, d).
            diag: whether to return only the diagonal (*b, n·p); it needs m = n.
            last_dim_is_batch: must be False.

        Raises:
            ValueError: `last_dim_is_batch` is True; the points have another number of columns than
                d; there are no points; a point contains NaN or infinity.
            TypeError: the points have another dtype than the hyperparameters.
            NotImplementedError: there are more than 3 inputs, or the spectral density of the base
                kernel cannot be evaluated.
        """
        check_points(self, self.num_dims, x1, x2, last_dim_is_batch)
        if self.num_dims > 3:
            raise NotImplementedError(
                "SpectralMatrixKernel expects at most 3 inputs for a covariance without features, "
                f"got {self.num_dims}; put it inside ORFFKernel, with gp_orff.QuasiMonteCarlo"
            )
        quadrature = variances if diag else covariance
        total = 0.0
        for term in inner_terms(self):
            measure = term.leaves[0].spectrum
            if not measure.for_grids:
                raise NotImplementedError(
                    "SpectralMatrixKernel expects a base kernel with a GridSpectrum for a "
                    f"covariance without features, got {type(measure).__name__}; put it inside "
                    "ORFFKernel, with gp_orff.QuasiMonteCarlo"
                )
            density = term.factor.variance_spectrum(measure)
            # The scale of a batch is broadcast over rows and columns; a diagonal has only rows.
            scale = term.outputscale.reshape(*term.outputscale.shape, 1, *[1] * (not diag))
            total = total + scale * quadrature(density, x1, x2)
        return total.to(x1.dtype)

    @torch.no_grad()
    def _checked_rank(self) -> int:
        """Return r, after checks of B at zero, and at random frequencies and their negatives."""
        density = terms(self.base_kernel)[0].leaves[0].spectrum
        rng = np.random.default_rng(0)
        directions = rng.standard_normal((64, self.num_dims))
        directions /= np.linalg.norm(directions, axis=-1, keepdims=True)
        u = rng.random((len(directions), density.num_coordinates(self.num_dims)))
        base = torch.from_numpy(density.base(directions, u, 0))
        omega = density.frequencies(base, 0).reshape(-1, self.num_dims).double()
        omega = torch.cat([torch.zeros_like(omega[:1]), omega])
        b, opposite = (_checked(self.amplitude, w, self.num_outputs) for w in (omega, -omega))
        a, other = b @ b.mH, (opposite @ opposite.mH).conj()
        sizes = a.abs().square().sum((-1, -2)).sqrt()
        difference = (a - other).abs().square().sum((-1, -2)).sqrt()
        # Differences are relative to A(ω), or to a millionth of its largest value if A is smaller.
        if (difference > _EVEN * sizes.clamp_min(_EVEN * sizes.amax())).any():
            worst = omega[(difference / sizes.clamp_min(1e-300)).argmax()].tolist()
            raise ValueError(
                "SpectralMatrixKernel expects an amplitude B for which A = B B* satisfies A(−ω) = "
                f"A(ω)ᵀ, got another A(−ω) at ω = {worst}; make the real part of B even and its "
                "imaginary part odd in ω, or vice versa"
            )
        if b.is_complex() and b[0].imag.abs().max() > _EVEN * b[0].abs().max():
            raise ValueError(
                "SpectralMatrixKernel expects a real amplitude at ω = 0, got a complex one; "
                "multiply each column of B by a phase, which does not change the covariance"
            )
        return b.shape[-1]

    @torch.no_grad()
    def _require_finite_variance(self) -> None:
        densities = [term.leaves[0].spectrum for term in terms(self.base_kernel)]
        if self.num_dims > 3 or not all(d.for_grids for d in densities):
            return  # no quadrature
        if any(math.isinf(self.factor.variance_spectrum(d).moment(0)) for d in densities):
            raise ValueError(
                "SpectralMatrixKernel expects a finite variance ∫ tr B B* S dω, got an amplitude "
                f"that grows too fast for the spectral density of {type(self.base_kernel).__name__}"
                "; use a smoother base kernel, such as RBFKernel"
            )


def _checked(
    amplitude: Callable, omega: Float[Tensor, "m d"], num_outputs: int
) -> Float[Tensor, "m p r"]:
    """Return B(ω) after checks.

    Raises:
        TypeError: B is not a tensor.
        ValueError: B has another shape, or is not finite.
    """
    shape = f"({len(omega)}, {num_outputs}, r)"
    b = evaluate(amplitude, omega)
    if b.dim() != 3 or b.shape[:2] != (len(omega), num_outputs) or not b.shape[-1]:
        raise ValueError(
            f"SpectralMatrixKernel expects amplitude to return matrices {shape} for "
            f"{len(omega)} frequencies and num_outputs={num_outputs}, got {tuple(b.shape)}; return "
            "one matrix of p rows for each frequency"
        )
    if not torch.isfinite(b).all():
        worst = omega[~torch.isfinite(b).all(-1).all(-1)][0].tolist()
        raise ValueError(
            "SpectralMatrixKernel expects a finite amplitude, got NaN or infinity at "
            f"ω = {worst}; return the limit there, or any finite value at ω = 0"
        )
    return b


def _check_base(term: Term, num_dims: int) -> None:
    """Raise an error if a term of the base kernel has no spectral density over all inputs."""
    check_scalar("SpectralMatrixKernel", term.num_outputs)
    if len(term.leaves) != 1:
        raise ValueError(
            "SpectralMatrixKernel expects a stationary base kernel, or a sum of them, each with a "
            "ScaleKernel or without, got a constant or a product; multiply SpectralMatrixKernel "
            "itself by a kernel of time"
        )
    leaf = term.leaves[0]
    spectral_density(leaf.kernel, "SpectralMatrixKernel")  # raises where there is none
    if leaf.active_dims is not None:
        raise ValueError(
            f"SpectralMatrixKernel(num_dims={num_dims}) expects a base kernel of all its inputs, "
            f"got active_dims {leaf.active_dims}; pass active_dims to SpectralMatrixKernel"
        )
    if leaf.kernel.ard_num_dims not in (None, num_dims):
        raise ValueError(
            f"SpectralMatrixKernel(num_dims={num_dims}) expects ard_num_dims={num_dims} in its "
            f"base kernel, got {leaf.kernel.ard_num_dims}"
        )


@inner_terms.register
def _(kernel: SpectralMatrixKernel) -> list[Term]:
    return [term.with_factor(kernel.factor) for term in terms(kernel.base_kernel)]
