"""Moments of the size of a random spectral matrix, for each spectrum.

A frequency ω of one leaf is drawn with an importance weight v. With a factor of degree g its matrix
has the size w = v ‖ω‖^{2g}, times constants. Moments are exact where the spectrum is isotropic, and
upper bounds with a lengthscale for each input.
"""

import math
from dataclasses import dataclass
from functools import singledispatch

import numpy as np
import scipy.special
import torch
from jaxtyping import Float

from gp_orff.features.bounds.bound import crossing
from gp_orff.kernels.spectra.base import Spectrum
from gp_orff.kernels.spectra.elliptical import Gaussian
from gp_orff.kernels.spectra.spectral_mixture import SpectralMixture


@dataclass(frozen=True)
class Moments:
    """Of w and ω, in the distribution that ω is drawn from; infinite where they do not exist."""

    largest: float  # ess sup w
    orlicz: float  # the ψ₁ norm of w, inf{c: E exp(w/c) ≤ 2}
    mean: float  # E w
    mean_square: float  # E w²
    first: float  # E ‖ω‖ w
    second: float  # E ‖ω‖² w²
    outer: tuple[float, ...] = ()  # E v² ‖ω‖² ω_i², if g = 1

    def __mul__(self, other: "Moments") -> "Moments":
        """The moments of w w′ and ω + ω′, of two independent leaves with symmetric ω."""
        return Moments(
            self.largest * other.largest,
            min(self.orlicz * other.largest, self.largest * other.orlicz),
            self.mean * other.mean,
            self.mean_square * other.mean_square,
            self.first * other.mean + self.mean * other.first,
            self.second * other.mean_square + self.mean_square * other.second,
            tuple(moment * other.mean_square for moment in self.outer),
        )


@singledispatch
def moments(spectrum: Spectrum, degree: int, order: int, num_dims: int) -> Moments:
    """The moments of a leaf with a factor of this degree, drawn with the weight ‖z‖^{2·order}.

    z = ℓω is isotropic: ω = r u/ℓ with u uniform on the sphere. With q = ‖u/ℓ‖², w = r²q for the
    measure of order 0 and w = E r² · q for order 1.

    Raises:
        NotImplementedError: a spectrum without `isotropic_lengthscale`.
    """
    lengthscale = spectrum.isotropic_lengthscale
    if lengthscale is None:
        raise NotImplementedError(
            f"bounds expect a spectrum with an isotropic lengthscale, got "
            f"{type(spectrum).__name__}, whose moments are not known; register a function that "
            "returns its Moments with @gp_orff.features.bounds.moments.register"
        )
    scales = lengthscale.detach().double().flatten().expand(num_dims).pow(-2).numpy()
    square = quadratic_moments(scales)  # E q^k
    g, tilt = degree, _radial_moment(spectrum, 2 * order, num_dims)

    def tilted(power: int) -> float:
        """E r^{2t} · E r^{power − 2t}, t the order: of r^{power} times squared weights."""
        return tilt * _radial_moment(spectrum, power - 2 * order, num_dims)

    largest = tilt * scales.max() ** g if order == g else math.inf
    outer = scales * (scales.sum() + 2 * scales) / (num_dims * (num_dims + 2))
    odd = math.sqrt(square[g] * square[g + 1])  # at least E q^{g + ½}
    return Moments(
        largest=float(largest),
        orlicz=float(largest / math.log(2)) if order == g else orlicz(spectrum, scales),
        mean=square[g] * _radial_moment(spectrum, 2 * g, num_dims),
        mean_square=square[2 * g] * tilted(4 * g),
        first=odd * _radial_moment(spectrum, 2 * g + 1, num_dims),
        second=square[2 * g + 1] * tilted(4 * g + 2),
        outer=tuple((outer * tilted(4)).tolist()) if g else (),
    )


def _radial_moment(spectrum: Spectrum, power: int, num_dims: int) -> float:
    """E r^power, r = ‖z‖."""
    moment = torch.as_tensor(spectrum.moment(power / 2, num_dims), dtype=torch.float64)
    return float(moment.detach())


def quadratic_moments(scales: Float[np.ndarray, "d"]) -> list[float]:
    """E q^k for k = 0, …, 3, q = Σ_i λ_i u_i² with u uniform on the sphere and λ = `scales`.

    For a standard normal g, E(Σ_i λ_i g_i²)^k = E q^k · E(χ²_d)^k; its cumulants are
    2^{n−1} (n−1)! Σ_i λ_iⁿ.
    """
    d, (a, b, c) = len(scales), (float((scales**n).sum()) for n in (1, 2, 3))
    first, second = a, a * a + 2 * b
    third = a**3 + 6 * a * b + 8 * c
    return [1.0, first / d, second / (d * (d + 2)), third / (d * (d + 2) * (d + 4))]


@singledispatch
def orlicz(spectrum: Spectrum, scales: Float[np.ndarray, "d"]) -> float:
    """The ψ₁ norm of ‖ω‖², ω = z/ℓ, with `scales` = ℓ⁻²; infinite unless it is registered."""
    return math.inf


@orlicz.register
def _(spectrum: Gaussian, scales: Float[np.ndarray, "d"]) -> float:
    return gaussian_orlicz(np.ones((1, 1)), np.zeros((1, len(scales))), scales[None])


def gaussian_orlicz(
    shares: Float[np.ndarray, "q 1"],
    means: Float[np.ndarray, "q d"],
    variances: Float[np.ndarray, "q d"],
) -> float:
    """The ψ₁ norm of ‖ω‖² where each coordinate is a mixture of Gaussians: E exp(‖ω‖²/c) = 2."""

    def log_excess(c: float) -> float:
        rest = 1 - 2 * variances / c
        if rest.min() <= 0:
            return math.inf
        exponents = means**2 / (c * rest) - 0.5 * np.log(rest)
        return float(scipy.special.logsumexp(exponents, axis=0, b=shares).sum()) - math.log(2)

    return crossing(log_excess, 4 * float(variances.max()))


@moments.register
def _(spectrum: SpectralMixture, degree: int, order: int, num_dims: int) -> Moments:
    """Of independent coordinates, each of a component with the weight v = Q w_q/Σw."""
    if order:
        raise NotImplementedError(
            'a field over SpectralMixtureKernel has no trace measure; use measure="base"'
        )
    weights = spectrum.weights.detach().double().numpy()
    means, scales = (
        2 * math.pi * t.detach().double().numpy().squeeze(-2)
        for t in (spectrum.means, spectrum.scales)
    )
    v, variances = len(weights) * weights / weights.sum(), scales**2
    of_weights = [_norm_moments(v**j, means**2, variances) for j in (1, 2)]
    largest = float(v.max()) ** num_dims
    (_, *norms), squares = of_weights
    if not degree:
        return Moments(
            largest, largest / math.log(2), 1.0, squares[0], math.sqrt(norms[0]), squares[1]
        )
    shares = np.full((len(v), 1), 1 / len(v))
    return Moments(
        math.inf,
        largest * gaussian_orlicz(shares, means, variances),
        norms[0],
        squares[2],
        math.sqrt(norms[0] * norms[1]),
        squares[3],
        _outer_moments(v**2, means**2, variances),
    )


def _axis_moments(
    weights: Float[np.ndarray, "q"],
    centres: Float[np.ndarray, "q d"],
    variances: Float[np.ndarray, "q d"],
) -> Float[np.ndarray, "4 d"]:
    """E v ω_i^{2n}, n = 0, …, 3, over components of equal probability; `centres` are squared."""
    m, s = centres, variances
    powers = [
        np.ones_like(m),
        m + s,
        m**2 + 6 * m * s + 3 * s**2,
        m**3 + 15 * m**2 * s + 45 * m * s**2 + 15 * s**3,
    ]
    return np.stack([(weights[:, None] * power).mean(0) for power in powers])


def _norm_moments(weights, centres, variances) -> list[float]:
    """E v ‖ω‖^{2n}, n = 0, …, 3, with v the product over the coordinates: a product of series."""
    factorials = np.array([1.0, 1.0, 2.0, 6.0])
    series = np.array([1.0])
    for axis in (_axis_moments(weights, centres, variances) / factorials[:, None]).T:
        series = np.polynomial.polynomial.polymul(series, axis)[:4]
    return (series * factorials).tolist()


def _outer_moments(weights, centres, variances) -> tuple[float, ...]:
    """E v ‖ω‖² ω_i²."""
    axis = _axis_moments(weights, centres, variances)
    total = axis[0].prod()
    second, fourth = axis[1] / axis[0], axis[2] / axis[0]
    return tuple((total * (fourth + second * (second.sum() - second))).tolist())
