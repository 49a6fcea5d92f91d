"""The amplitude B(ω) of a kernel that is given by its signature K₀, by a Fourier transform."""

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from gpytorch.kernels import Kernel, MaternKernel
from jaxtyping import Float
from torch import Tensor, nn

from gp_orff import nufft
from gp_orff.kernels.base import as_real_tensor
from gp_orff.kernels.spectra.elliptical import StudentT

_NU = 2.5  # smoothness of the base kernel, whose density falls more slowly than most
_VANISHED = 1e-8  # of K₀(0), at the longest lags
_RESOLVED = 1e-10  # of the largest C(ω), at the largest frequencies
_NEGATIVE = 1e-6  # of the sum of all eigenvalues: negative ones that rounding explains
_WIDER = 16  # the most that lags are longer than the domain
_FEWEST, _MOST = 17, {1: 2**14 + 1, 2: 2**9 + 1}  # samples along an axis
_MOST_IN_SPACE = 2**6 + 1  # if there are more axes

Signature = Callable[[Float[Tensor, "m d"]], Float[Tensor, "m p p"]]


class SignatureAmplitude(nn.Module):
    """B(ω) with B Bᵀ = C(ω)/S(ω), where C is the Fourier transform of samples of a signature.

    Args:
        units: of the outputs, (p,): their standard deviations, from K₀(0).
        samples: K₀ in these units at the lags j∘δ with |j| ≤ n/2 along each axis, n odd,
            (n, …, n, p, p).
        spacing: δ, (d,).
        lengthscale: of the density S, that of a Matérn 5/2 kernel, (1, d).
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

    def forward(self, omega: Float[Tensor, "m d"]) -> Float[Tensor, "m p p"]:
        """B(ω); zero beyond the largest frequency that the samples resolve.

        Raises:
            ValueError: ω depends on trained parameters: those of S have to be frozen.
        """
        if omega.requires_grad:
            raise ValueError(
                "expected a frozen base kernel, since the signature determines the kernel, got "
                "one with trained parameters; use base_kernel.requires_grad_(False), and a "
                "ScaleKernel for the variance"
            )
        inside = (omega.abs() * self.spacing <= math.pi).all(-1)
        part = omega[inside]
        values, vectors = torch.linalg.eigh(self._spectral_matrix(part))
        density = StudentT(self.lengthscale, _NU).log_density(part).exp()
        b = vectors * (values.clamp_min(0) / density.unsqueeze(-1)).sqrt().unsqueeze(-2)
        b = self.units.unsqueeze(-1) * b
        zeros = b.new_zeros(len(omega), *b.shape[1:])
        return zeros.index_copy(0, inside.nonzero().squeeze(-1), b)

    def _spectral_matrix(self, omega: Float[Tensor, "m d"]) -> Float[Tensor, "m p p"]:
        """C(ω) = (2π)^{−d} Σ_j K₀(j∘δ) cos⟨ω, j∘δ⟩ ∏δ."""
        p = self.num_outputs
        row, column = torch.tril_indices(p, p)
        coefficients = self.samples[..., row, column].movedim(-1, 0).to(torch.complex128)
        entries = nufft.type2((omega * self.spacing).double(), coefficients.contiguous())
        matrix = entries.new_zeros(len(omega), p, p)
        matrix[:, row, column] = entries
        matrix[:, column, row] = entries
        return matrix.to(omega)


def amplitude_of(
    signature: Signature, domain: Sequence[tuple[float, float]]
) -> tuple[Kernel, SignatureAmplitude]:
    """A frozen base kernel, and B(ω) with ∫ cos⟨ω, δ⟩ B Bᵀ S dω = K₀(δ).

    Raises:
        ValueError: a signature that is not symmetric, even and finite, does not vanish, or has a
            spectral matrix C(ω) that is not positive.
    """
    extent = _extent(domain)
    units = _check(signature, extent)
    original = signature

    def signature(lag: Float[Tensor, "m d"]) -> Float[Tensor, "m p p"]:
        """The correlations of the outputs."""
        return _real(original(lag)).double() / (units.unsqueeze(-1) * units)

    longest = np.array([_longest_lag(signature, extent, axis) for axis in range(len(extent))])
    samples, spectral_matrix = _resolve(signature, longest)
    sides = samples.shape[: len(extent)]
    frequencies = [math.pi / lag * _centred(n) for lag, n in zip(longest, sides, strict=True)]
    omega = torch.from_numpy(_product(frequencies))
    _require_positive(spectral_matrix.flatten(0, -3), omega)
    traces = spectral_matrix.diagonal(dim1=-1, dim2=-2).sum(-1).flatten()
    moments = (traces @ omega.square()) / traces.sum()  # E ω_i²
    kernel = MaternKernel(nu=_NU, ard_num_dims=len(extent)).double()
    kernel.lengthscale = (_NU / (_NU - 1) / moments).sqrt()
    kernel.requires_grad_(False)
    spacing = torch.from_numpy(2 * longest / sides)
    return kernel, SignatureAmplitude(units, samples, spacing, kernel.lengthscale.detach().clone())


def _extent(domain: Sequence[tuple[float, float]]) -> Float[np.ndarray, "d"]:
    """high − low of every input."""
    pairs = np.array(domain, dtype=float)
    extent = np.diff(pairs).squeeze(-1) if pairs.ndim == 2 and pairs.shape[1] == 2 else np.zeros(0)
    if not len(extent) or not (np.isfinite(extent) & (extent > 0)).all():
        raise ValueError(
            "from_signature expects domain=((low, high), ...), one pair with low < high for each "
            f"input, got {domain}"
        )
    if len(extent) > 3:
        raise NotImplementedError(
            f"from_signature expects at most 3 inputs, got a domain of {len(extent)}; give the "
            "amplitude to SpectralMatrixKernel instead"
        )
    return extent


def _check(signature: Signature, extent: Float[np.ndarray, "d"]) -> Float[Tensor, "p"]:
    """The standard deviations of the outputs; refuse what is not finite, symmetric and even."""
    if not callable(signature):
        raise TypeError(
            f"from_signature expects a function of lags (m, d) as signature, got {signature!r}"
        )
    lags = torch.from_numpy(extent * np.random.default_rng(0).uniform(-1, 1, (16, len(extent))))
    lags = torch.cat([torch.zeros_like(lags[:1]), lags])
    values, opposite = signature(lags), signature(-lags)
    if not isinstance(values, Tensor):
        raise TypeError(
            "from_signature expects a signature that returns a torch.Tensor (m, p, p), got "
            f"{type(values).__name__}; for instance torch.as_tensor(values)"
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
    for other, property_ in ((opposite, "even, K₀(−δ) = K₀(δ)"), (values.mT, "symmetric")):
        difference = ((values - other) / outer).abs().amax((-1, -2))
        if (difference > _VANISHED).any():
            worst = difference.argmax()
            raise ValueError(
                f"from_signature expects a signature that is {property_}, got a difference of "
                f"{(values - other)[worst].abs().max():.3g} at the lag {lags[worst].tolist()}; "
                "kernels with phases or delays are not supported"
            )
    return units


def _real(values: Tensor) -> Tensor:
    """Values of a signature; TypeError for complex ones."""
    remedy = "return values.real if the imaginary part is zero; no real field has another one"
    return as_real_tensor(values, "the signature K₀(δ) of from_signature", remedy)


def _longest_lag(signature: Signature, extent: Float[np.ndarray, "d"], axis: int) -> float:
    """The lag along an axis at which K₀ has vanished."""
    powers = 2.0 ** np.arange(-6, 1 + math.log2(_WIDER))
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
        f"input {axis}; multiply K₀ by a kernel that vanishes, or give a larger domain"
    )


def _resolve(
    signature: Signature, longest: Float[np.ndarray, "d"]
) -> tuple[Float[Tensor, "*n p p"], Float[Tensor, "*n p p"]]:
    """Samples of K₀, dense enough that C(ω) vanishes at the largest frequencies; and C."""
    most, counts = _MOST.get(len(longest), _MOST_IN_SPACE), [_FEWEST] * len(longest)
    while True:
        lags = [2 * lag / n * _centred(n) for lag, n in zip(longest, counts, strict=True)]
        samples = signature(torch.from_numpy(_product(lags))).double()
        samples = samples.reshape(*counts, *samples.shape[-2:])
        spectral_matrix = _fourier(samples, float(np.prod(longest / counts / math.pi)))
        size = spectral_matrix.abs().max()
        ends = [spectral_matrix.select(axis, 0).abs().max() for axis in range(len(counts))]
        coarse = [end > _RESOLVED * size for end in ends]
        finer = [
            n if n == most or not more else 2 * n - 1
            for n, more in zip(counts, coarse, strict=True)
        ]
        if finer == counts:
            return samples, spectral_matrix
        counts = finer


def _fourier(samples: Float[Tensor, "*n p p"], cell: float) -> Float[Tensor, "*n p p"]:
    """C at the frequencies πk/L, |k| ≤ n/2, for samples up to the lag L along each axis."""
    axes = tuple(range(samples.dim() - 2))
    centred = torch.fft.ifftshift(samples, dim=axes)
    return cell * torch.fft.fftshift(torch.fft.fftn(centred, dim=axes).real, dim=axes)


def _require_positive(spectral_matrix: Float[Tensor, "m p p"], omega: Float[Tensor, "m d"]) -> None:
    values = torch.linalg.eigvalsh(0.5 * (spectral_matrix + spectral_matrix.mT))
    share = float((-values).clamp_min(0).sum() / values.abs().sum())
    if share > _NEGATIVE:
        lowest = values[:, 0].argmin()
        raise ValueError(
            "from_signature expects a positive kernel, whose spectral matrix C(ω) has no negative "
            f"eigenvalue, got {values[lowest, 0]:.3g} at ω = {omega[lowest].tolist()} (the largest "
            f"is {values.max():.3g}; {share:.1e} of the sum of all is negative): no process has "
            "this covariance"
        )


def _centred(count: int) -> Float[np.ndarray, "n"]:
    """The integers around zero."""
    return np.arange(count) - count // 2.0


def _product(axes: Sequence[Float[np.ndarray, "n"]]) -> Float[np.ndarray, "m d"]:
    """All points of a tensor grid, the last axis fastest."""
    if not axes:
        return np.zeros((1, 0))
    return np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1).reshape(-1, len(axes))
