"""The class `Bound`, and the tails and constants that the theorems use."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from copy import deepcopy
from dataclasses import astuple, dataclass, replace
from functools import cached_property, reduce, singledispatch
from operator import add, mul

import numpy as np
import scipy
import torch
from gpytorch.kernels import Kernel
from jaxtyping import Bool, Float
from torch import Tensor

from gp_orff.features.assemble import term_spectra
from gp_orff.features.chunked import Box, as_box
from gp_orff.features.draws import LeafSpectrum, TermSpectrum
from gp_orff.features.random import Measure, Proposal, as_measure
from gp_orff.kernels.derivatives import at_zero, derivatives, scalar_covariance
from gp_orff.kernels.spectra import Gaussian, SpectralMixture, Spectrum
from gp_orff.kernels.tree import (
    Factor,
    Gradient,
    Leaf,
    Mixing,
    Solenoidal,
    SpectralMatrix,
    Term,
    checked_terms,
    infer_num_dims,
    input_columns,
    terms,
)
from gp_orff.kernels.variance_spectrum import diverges, grows

# Tails t of the error at one lag: P(‖K̃(δ) − K(δ)‖ ≥ x) ≤ C exp(−D t(x)) with D frequencies.
#
# K̃(δ) = (1/D) Σ_j Y_j(δ), where the Y_j = Re e^{−i⟨ω_j, δ⟩} W_j are independent with mean K(δ).
#
# If W is real, Y = cos⟨ω, δ⟩ W is symmetric. If W is Hermitian, Y is not symmetric, but ‖Y‖ ≤ ‖W‖
# in both norms, and E Y Yᵀ, E Yᵀ Y ≤ E W². The matrix inequalities are then valid for the symmetric
# matrix (0, Y; Yᵀ, 0), with the same factor 2p.


@dataclass(frozen=True)
class Hoeffding:
    """The tail x²/(2a²) for scalars with |Y_j| ≤ a (Rahimi & Recht 2007, Section 3)."""

    scale: float  # a

    def __call__(self, error: float) -> float:
        return 0.5 * (error / self.scale) ** 2


@dataclass(frozen=True)
class Bernstein:
    """The tail x²/(2b + 2Ux/3) for ‖Y_j − K‖₂ ≤ U and b = ‖E(Y_j − K)²‖₂.

    Source: Brault et al. 2016, Theorem B.1.
    """

    variance: float  # b
    scale: float  # U

    def __call__(self, error: float) -> float:
        return error**2 / (2 * self.variance + 2 * self.scale * error / 3)


@dataclass(frozen=True)
class Subexponential:
    """The tail for ‖Y_j − K‖₂ with an Orlicz norm of at most m/2.

    It is x²/(4b + 2xū/3) if xū ≤ 2(e − 1)b, and x/((e − 1)ū) otherwise, with ū = m log(2m²/b + 1).
    Here b is the variance of one Y_j. Source: Brault et al. 2016, Theorem B.2.
    """

    variance: float  # b
    scale: float  # m, twice the Orlicz norm

    def __call__(self, error: float) -> float:
        b, m = self.variance, self.scale
        u = m * math.log1p(2 * m * m / b)
        if error * u <= 2 * (math.e - 1) * b:
            return error**2 / (4 * b + 2 * error * u / 3)
        return error / ((math.e - 1) * u)


@dataclass(frozen=True)
class Logarithmic:
    """The tail x/(4M) · log(1 + 2Mx/σ²) for ‖Y_j‖_F ≤ M and σ² = E‖Y_j‖_F².

    Source: Minh 2016, Theorem 11, with the bound 2M of ‖Y_j − K‖_F in its Lemma 15.
    """

    variance: float  # σ²
    scale: float  # M

    def __call__(self, error: float) -> float:
        double = 2 * self.scale
        return error / (2 * double) * math.log1p(double * error / self.variance)


Tail = Hoeffding | Bernstein | Subexponential | Logarithmic


# The bound of the error of random features, with its inverses.
#
# A theorem gives the logarithm of a probability. It decreases with the number D of frequencies and
# with the error ε. Both inverses follow by doubling and bisection, D among the integers, and ε up
# to neighbouring floating-point numbers. Logarithms are used because probabilities such as
# e^{−1000} underflow, and bounds above one may be very large.


class Bound(ABC):
    """A bound of the probability that random features have a larger error than ε.

    The functions of `gp_orff.bounds` return such bounds. Three methods compute one of three numbers
    from the other two:

    - `num_frequencies(error, confidence)` returns D, as in `MonteCarlo(D)`;
    - `error(num_frequencies, confidence)` returns the error ε of the kernel;
    - `probability(num_frequencies, error)` returns the probability of a larger error.

    The error is a norm of K̃(x, z) − K(x, z), where K̃ is the kernel of D random frequencies.
    Depending on the bound, it is the error at one pair of points, or the largest error over all x
    and z in a box. It is an absolute error, in squared units of the outputs. For a relative error
    of 5 %, pass 0.05 times the norm of K(0).

    Example:
        With a probability of 95 %, the error of 10 000 frequencies is below 0.289:

        >>> import gp_orff
        >>> kernel = gp_orff.CurlFreeKernel(num_dims=2)
        >>> kernel.base_kernel.lengthscale = 1.0
        >>> bound = gp_orff.bounds.minh(kernel, ((-1, 1), (-1, 1)))
        >>> error = bound.error(10_000)
        >>> round(error, 3)
        0.289
        >>> bound.num_frequencies(error)
        10000
        >>> round(bound.probability(10_000, error), 6)
        0.05
    """

    @property
    @abstractmethod
    def scale(self) -> float:
        """The typical error of one frequency, where the search for ε starts."""

    @abstractmethod
    def log_probability(self, num_frequencies: int, error: float) -> float:
        """Return the logarithm of the bound of the probability.

        It decreases with both arguments. If it is positive, the theorem gives no bound.

        Args:
            num_frequencies: D, the number of frequencies of each term of a sum.
            error: ε > 0, in squared units of the outputs.
        """

    def probability(self, num_frequencies: int, error: float) -> float:
        """Return an upper bound of the probability that the error is at least ε.

        The result is 1 if the theorem gives no bound.

        Args:
            num_frequencies: D, the number of frequencies of each term of a sum.
            error: ε > 0, in squared units of the outputs.

        Raises:
            ValueError: `num_frequencies` < 1, or `error` is not positive and finite.
        """
        _check_number(num_frequencies)
        _check_error(error)
        return math.exp(min(0.0, self.log_probability(num_frequencies, error)))

    def error(self, num_frequencies: int, confidence: float = 0.95) -> float:
        """Return the error ε that D frequencies do not exceed, by this bound.

        Args:
            num_frequencies: D, the number of frequencies of each term of a sum.
            confidence: the probability that the error is below ε, between 0 and 1.

        Returns:
            ε, in squared units of the outputs.

        Raises:
            ValueError: `num_frequencies` < 1, or `confidence` is not between 0 and 1.
        """
        _check_number(num_frequencies)
        target = _log_of_rest(confidence)
        return crossing(
            lambda error: self.log_probability(num_frequencies, error) - target, self.scale
        )

    def num_frequencies(self, error: float, confidence: float = 0.95) -> int:
        """Return the number of frequencies that suffice for an error below ε, by this bound.

        Args:
            error: ε > 0, in squared units of the outputs.
            confidence: the probability that the error is below ε, between 0 and 1.

        Returns:
            D for `MonteCarlo(D)`, the number of frequencies of each term of a sum.

        Raises:
            ValueError: `error` is not positive and finite, or `confidence` is not between 0 and 1.
        """
        _check_error(error)
        target = _log_of_rest(confidence)
        few, enough = 0, 1
        while self.log_probability(enough, error) > target:
            few, enough = enough, 2 * enough
        while enough - few > 1:
            middle = (few + enough) // 2
            if self.log_probability(middle, error) > target:
                few = middle
            else:
                enough = middle
        return enough


@dataclass(frozen=True)
class Part:
    """An expression C ε^{−power} exp(−share · D · tail), with the tail of the error at one lag."""

    log_constant: float  # log C
    power: float = 0.0
    share: float = 1.0


@dataclass(frozen=True)
class TailBound(Bound):
    """The bound that follows from the tail t of the error at one pair of points.

        P(error ≥ ε) ≤ max_i C_i ε^{−c_i} exp(−s_i D t(ε′))

    For one pair of points, ε′ = ε. For a box, ε′ is ε/2.

    Args:
        tail: t, a function of the error at one pair of points.
        parts: the constants C_i, the powers c_i and the factors s_i.
        fraction: ε′/ε.
    """

    tail: Tail
    parts: tuple[Part, ...]
    fraction: float = 1.0

    @property
    def scale(self) -> float:
        return self.tail.scale

    def log_probability(self, num_frequencies: int, error: float) -> float:
        exponent = num_frequencies * self.tail(self.fraction * error)
        return max(
            part.log_constant - part.power * math.log(error) - part.share * exponent
            for part in self.parts
        )


def crossing(decreasing: Callable[[float], float], start: float) -> float:
    """Return the smallest x > 0 at which a decreasing function is not positive.

    The search starts from `start`.
    """
    low = high = start
    while decreasing(high) > 0:
        high *= 2
    while decreasing(low) <= 0:
        low /= 2
    while low < (middle := 0.5 * (low + high)) < high:
        low, high = (middle, high) if decreasing(middle) > 0 else (low, middle)
    return high


def _check_number(num_frequencies: int) -> None:
    if not num_frequencies >= 1:
        raise ValueError(
            f"a bound expects num_frequencies >= 1, got {num_frequencies}; pass a larger number"
        )


def _check_error(error: float) -> None:
    if not 0 < error < math.inf:
        raise ValueError(
            f"a bound expects a positive and finite error, got {error}; pass it in units of the "
            "kernel"
        )


def _log_of_rest(confidence: float) -> float:
    """Return log(1 − confidence)."""
    if not 0 < confidence < 1:
        raise ValueError(
            f"a bound expects a confidence between 0 and 1, got {confidence}; pass 0.95 for 95 %"
        )
    return math.log1p(-confidence)


# Moments of the size of a random spectral matrix, for each spectrum.
#
# A frequency ω of one leaf is drawn with an importance weight v. With a factor of degree g, its
# matrix has the size w = v ‖ω‖^{2g}, times constants. Moments are exact if the spectrum is
# isotropic, and upper bounds if each input has its own lengthscale.
#
# In z = ℓω = r u, the radius r and the direction u are independent. Every moment is therefore the
# moment of a power of r, which the spectrum returns, times the moment of a power of q = ‖u/ℓ‖². If
# the density is weighted by r^{2t} (trace measure, t = g = 1), the weight E r²/r² cancels r² in w,
# so that w is bounded.


@dataclass(frozen=True)
class Moments:
    """The moments of w and ω, for the density from which ω is drawn; infinite if they diverge.

    Attributes:
        largest: ess sup w.
        orlicz: the ψ₁ norm of w, inf{c: E exp(w/c) ≤ 2}.
        mean: E w.
        mean_square: E w².
        first: E ‖ω‖ w.
        second: E ‖ω‖² w².
        outer: E v² ‖ω‖² ω_i² for each input i if g = 1; empty otherwise.
    """

    largest: float
    orlicz: float
    mean: float
    mean_square: float
    first: float
    second: float
    outer: tuple[float, ...] = ()

    def __mul__(self, other: "Moments") -> "Moments":
        """Return the moments of w w′ and ω + ω′, for two independent leaves with symmetric ω."""
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
    """Return the moments of a leaf.

    By default, z = ℓω is isotropic: ω = r u/ℓ with u uniform on the sphere. With q = ‖u/ℓ‖² and a
    factor of degree 1, w = r²q for the measure of order 0, and w = E r² · q for order 1.

    Args:
        spectrum: the spectrum of the leaf.
        degree: g, the degree of the factor B(ω).
        order: t, the exponent of the weight ‖z‖^{2t} of the density from which ω is drawn.
        num_dims: the number of inputs of the leaf.

    Raises:
        NotImplementedError: the spectrum has no `isotropic_lengthscale`.
    """
    lengthscale = spectrum.isotropic_lengthscale
    if lengthscale is None:
        raise NotImplementedError(
            f"bounds expect a spectrum with an isotropic lengthscale, got "
            f"{type(spectrum).__name__}, whose moments are unknown; register a function that "
            "returns its Moments with @gp_orff.bounds.constants.moments.register"
        )
    scales = lengthscale.detach().double().flatten().expand(num_dims).pow(-2).numpy()
    square = quadratic_moments(scales)  # E q^k
    g, tilt = degree, _radial_moment(spectrum, 2 * order, num_dims)

    def tilted(power: int) -> float:
        """Return the mean of r^power times squared weights, E r^{2t} · E r^{power − 2t}."""
        return tilt * _radial_moment(spectrum, power - 2 * order, num_dims)

    largest = tilt * scales.max() ** g if order == g else math.inf
    outer = scales * (scales.sum() + 2 * scales) / (num_dims * (num_dims + 2))
    # The half-integer moment E q^{g + ½} has no closed form; this is its Cauchy–Schwarz bound.
    odd = math.sqrt(square[g] * square[g + 1])
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
    """Return E r^power for r = ‖z‖."""
    moment = torch.as_tensor(spectrum.moment(power / 2, num_dims), dtype=torch.float64)
    return float(moment.detach())


def quadratic_moments(scales: Float[np.ndarray, "d"]) -> list[float]:
    """Return E q^k for k = 0, …, 3, where q = Σ_i λ_i u_i² and u is uniform on the sphere.

    Here λ = `scales`. For a standard normal g, E(Σ_i λ_i g_i²)^k = E q^k · E(χ²_d)^k. The cumulants
    of Σ_i λ_i g_i² are 2^{n−1} (n−1)! Σ_i λ_iⁿ.
    """
    d, (a, b, c) = len(scales), (float((scales**n).sum()) for n in (1, 2, 3))
    # The second and third moments follow from the cumulants κ₁ = a, κ₂ = 2b and κ₃ = 8c.
    first, second = a, a * a + 2 * b
    third = a**3 + 6 * a * b + 8 * c
    return [1.0, first / d, second / (d * (d + 2)), third / (d * (d + 2) * (d + 4))]


@singledispatch
def orlicz(spectrum: Spectrum, scales: Float[np.ndarray, "d"]) -> float:
    """Return the ψ₁ norm of ‖ω‖² for ω = z/ℓ and `scales` = ℓ⁻².

    It is infinite unless a function is registered for the spectrum.
    """
    return math.inf


@orlicz.register
def _(spectrum: Gaussian, scales: Float[np.ndarray, "d"]) -> float:
    return gaussian_orlicz(np.ones((1, 1)), np.zeros((1, len(scales))), scales[None])


def gaussian_orlicz(
    shares: Float[np.ndarray, "q 1"],
    means: Float[np.ndarray, "q d"],
    variances: Float[np.ndarray, "q d"],
) -> float:
    """Return the ψ₁ norm c of ‖ω‖², with E exp(‖ω‖²/c) = 2, for mixtures of Gaussians.

    Args:
        shares: (q, 1), the probabilities of q components.
        means: (q, d), the means of each coordinate.
        variances: (q, d), the variances of each coordinate.
    """

    def log_excess(c: float) -> float:
        rest = 1 - 2 * variances / c
        if rest.min() <= 0:
            return math.inf
        exponents = means**2 / (c * rest) - 0.5 * np.log(rest)
        return float(scipy.special.logsumexp(exponents, axis=0, b=shares).sum()) - math.log(2)

    return crossing(log_excess, 4 * float(variances.max()))


@moments.register
def _(spectrum: SpectralMixture, degree: int, order: int, num_dims: int) -> Moments:
    """Return moments of independent coordinates, each with the weight v = Q w_q/Σw."""
    if order:
        raise NotImplementedError(
            "expected order 0 for a SpectralMixtureKernel, got a rule that draws from the "
            'trace measure, which is not available; use measure="base"'
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
    """Return E v ω_i^{2n} for n = 0, …, 3, over components of equal probability.

    `centres` are the squared means of the components.
    """
    m, s = centres, variances
    powers = [
        np.ones_like(m),
        m + s,
        m**2 + 6 * m * s + 3 * s**2,
        m**3 + 15 * m**2 * s + 45 * m * s**2 + 15 * s**3,
    ]
    return np.stack([(weights[:, None] * power).mean(0) for power in powers])


def _norm_moments(weights, centres, variances) -> list[float]:
    """Return E v ‖ω‖^{2n} for n = 0, …, 3, where v is a product over the coordinates.

    It is computed as a product of power series.
    """
    factorials = np.array([1.0, 1.0, 2.0, 6.0])
    series = np.array([1.0])
    for axis in (_axis_moments(weights, centres, variances) / factorials[:, None]).T:
        series = np.polynomial.polynomial.polymul(series, axis)[:4]
    return (series * factorials).tolist()


def _outer_moments(weights, centres, variances) -> tuple[float, ...]:
    """Return E v ‖ω‖² ω_i² for each input i."""
    axis = _axis_moments(weights, centres, variances)
    total = axis[0].prod()
    second, fourth = axis[1] / axis[0], axis[2] / axis[0]
    return tuple((total * (fourth + second * (second.sum() - second))).tolist())


# Moments of the size of a spectral matrix that is any function of the frequency, by quadrature.
#
# If frequencies are drawn from S, the integrals are over polar nodes, with radii up to 10⁶ in units
# of the spectrum, as for the variance. If they are drawn by a `sampler`, the integrals are means
# over a Sobol sequence, and the largest size is the maximum over this sequence.


@dataclass(frozen=True)
class Nodes:
    """Frequencies with probabilities, and the random matrices W = v A(ω).

    Attributes:
        omega: (m, d), the frequencies.
        log_probability: (m,), the logarithms of their probabilities.
        matrices: (m, p, p), W.
        radii: (m,), the scaled radii of polar nodes; None for a Sobol sequence.
    """

    omega: Float[Tensor, "m d"]
    log_probability: Float[Tensor, "m"]
    matrices: Float[Tensor, "m p p"]
    radii: Float[np.ndarray, "m"] | None

    @classmethod
    def of(cls, leaf: LeafSpectrum) -> "Nodes":
        """Return the nodes of the density from which a leaf is drawn.

        Raises:
            NotImplementedError: the spectral density is unknown, or there are too many inputs.
        """
        factor, spectrum = leaf.variance.factor, leaf.spectrum
        if isinstance(spectrum, Proposal):
            u = scipy.stats.qmc.Sobol(leaf.num_dims, seed=0).random_base2(14)
            base = torch.from_numpy(spectrum.base(np.zeros(0), u.clip(2.0**-33, 1 - 2.0**-33), 0))
            omega, v = spectrum.frequencies(base, 0), spectrum.importance(base, 0)
            log_probability = torch.full_like(v, -math.log(len(v)))
            b = v.sqrt()[:, None, None] * factor(omega)
            return cls(omega, log_probability, b @ b.mH, None)
        if not spectrum.for_grids or leaf.num_dims > 3:
            raise NotImplementedError(
                "bounds expect a SpectralMatrixKernel of at most 3 inputs with a GridSpectrum, got "
                f"{leaf.num_dims} inputs and {type(spectrum).__name__}; measure the error with "
                "gp_orff.compare_with_exact, or pass a sampler to the kernel"
            )
        omega, volumes = leaf.variance.nodes
        log_probability = spectrum.log_density(omega).flatten() + volumes.log()
        b = factor(omega)
        return cls(omega, log_probability, b @ b.mH, spectrum.scaled_radius(omega.numpy()))

    @property
    def finite(self) -> Bool[Tensor, "m"]:
        """Which W do not overflow, (m,)."""
        return torch.isfinite(self.matrices.abs()).all(-1).all(-1)

    @property
    def spectral(self) -> Float[Tensor, "m"]:
        """The spectral norms ‖W‖₂, (m,)."""
        norms = torch.full_like(self.log_probability, math.inf)
        norms[self.finite] = torch.linalg.eigvalsh(self.matrices[self.finite])[:, -1]
        return norms

    @property
    def frobenius(self) -> Float[Tensor, "m"]:
        """The Frobenius norms ‖W‖_F, (m,)."""
        norms = self.matrices.abs().square().sum((-1, -2)).sqrt()
        return torch.where(self.finite, norms, math.inf)

    @property
    def square(self) -> float:
        """‖E W²‖₂; the imaginary part of W² is odd in ω, so its mean is zero."""
        if math.isinf(self._mean(self.frobenius.square())):
            return math.inf
        parts = self._parts((self.matrices @ self.matrices).real.flatten(1).mT)
        mean = parts.sum(-1).unflatten(0, self.matrices.shape[-2:])
        return float(torch.linalg.matrix_norm(mean, 2))

    def moments(self, size: Float[Tensor, "m"]) -> Moments:
        """Return the moments of a size (m,) of W."""
        length = self.omega.norm(dim=-1)
        unbounded = self.radii is not None and grows(size.numpy(), self.radii)
        largest = math.inf if unbounded else float(size.max())
        return Moments(
            largest=largest,
            orlicz=self._orlicz(size) if unbounded else largest / math.log(2),
            mean=self._mean(size),
            mean_square=self._mean(size.square()),
            first=self._mean(length * size),
            second=self._mean((length * size).square()),
        )

    def _mean(self, values: Float[Tensor, "m"]) -> float:
        parts = self._parts(values)
        return math.inf if self._is_infinite(parts) else float(parts.sum())

    def _parts(self, values: Float[Tensor, "*n m"]) -> Float[Tensor, "*n m"]:
        """Return probabilities times values; values may overflow if probabilities underflow."""
        probability = self.log_probability.exp()
        return torch.where(probability > 0, probability * values, 0.0)

    def _is_infinite(self, parts: Float[Tensor, "m"]) -> bool:
        return self.radii is not None and diverges(parts.numpy(), self.radii)

    def _orlicz(self, size: Float[Tensor, "m"]) -> float:
        """Return c with E exp(w/c) = 2."""
        if not math.isfinite(size.max()) or math.isinf(self._mean(size)):
            return math.inf

        def log_excess(c: float) -> float:
            return float((self.log_probability + size / c).logsumexp(0)) - math.log(2)

        c = crossing(log_excess, self._mean(size))
        return math.inf if self._is_infinite((self.log_probability + size / c).exp()) else c


# The largest variance b = sup_δ ‖E cos²⟨ω, δ⟩ W² − K(δ)²‖₂ of one frequency of a term.
#
# If the spectrum is isotropic and the kernel has a closed form, b is computed by a search along one
# axis. Otherwise b is replaced by its upper bound ‖E W²‖₂.
#
# By cos² x = ½ (1 + cos 2x), the expectation is a sum of kernels at the lags 0 and 2δ. Lags along
# one axis suffice, because an isotropic kernel at another lag is a rotation, which does not change
# the norm. Lags are logarithmic over seven decades. The neighbourhood of the best lag is searched
# again, and compared with the limit of long lags, where K(δ) vanishes.


def scalar_variance(leaf: Leaf, spectrum: LeafSpectrum, moments: Moments) -> float:
    """Return sup_δ E v² cos²⟨ω, δ⟩ − k(δ)² for a scalar kernel with importance weights v."""
    if spectrum.spectrum.isotropic_lengthscale is None or moments.largest != 1:
        return moments.mean_square

    def variance(lags: Float[Tensor, "n"], limit: bool) -> Float[Tensor, "n"]:
        at, double = (
            scalar_covariance(leaf.kernel, _along_axis(spectrum, r)) for r in (lags, 2 * lags)
        )
        return 0.5 * (1 + double) - (0 if limit else at.square())

    return _supremum(variance, moments.mean_square)


def field_variance(
    factor: Factor, leaf: Leaf, spectrum: LeafSpectrum, order: int, moments: Moments
) -> float:
    """Return b for a curl-free or divergence-free kernel without further leaves.

    Both have A² = ‖ω‖² A. With the measure of order 0, E cos⟨ω, δ⟩ W² follows from the fourth
    derivatives of k. With order 1, ‖W‖ is constant, and this mean is a multiple of K(δ).
    """
    ceiling = square_bound(factor, moments)
    if math.isinf(moments.orlicz):  # no theorem needs b
        return ceiling
    lengthscale = spectrum.spectrum.isotropic_lengthscale
    if lengthscale is None or lengthscale.min() < lengthscale.max():
        return ceiling
    if order not in (0, factor.degree):
        return ceiling
    # At most 256 derivatives at one lag are allowed: second ones to d = 16, fourth ones to d = 4.
    if spectrum.num_dims ** (2 if order else 4) > 256:
        return ceiling

    def covariance(tau: Float[Tensor, "n k"]) -> Float[Tensor, "n p p"]:
        return factor.block(-derivatives(leaf.kernel, tau, 2))

    def square(tau: Float[Tensor, "n k"]) -> Float[Tensor, "n p p"]:
        """Return E cos⟨ω, τ⟩ W²."""
        if order:
            return moments.largest * covariance(tau)
        fourth = derivatives(leaf.kernel, tau, 4).diagonal(dim1=-1, dim2=-2).sum(-1)
        return factor.block(fourth)

    def variance(lags: Float[Tensor, "n"], limit: bool) -> Float[Tensor, "n"]:
        zero, at, double = (_along_axis(spectrum, r) for r in (0 * lags, lags, 2 * lags))
        matrices = 0.5 * (square(zero) + square(double))
        if not limit:
            matrices = matrices - covariance(at) @ covariance(at)
        return torch.linalg.eigvalsh(matrices)[..., -1].flatten()

    return _supremum(variance, ceiling)


def square_bound(factor: Factor, moments: Moments) -> float:
    """Return ‖E W²‖₂ for a curl-free or divergence-free kernel."""
    if math.isinf(moments.mean_square):
        return math.inf
    outer = torch.tensor(moments.outer, dtype=torch.float64).diag()
    return float(torch.linalg.matrix_norm(factor.block(outer), 2))


def _along_axis(spectrum: LeafSpectrum, lags: Float[Tensor, "n"]) -> Float[Tensor, "n k"]:
    """Return lags (n, k) along the first axis from lags (n,) in units of its lengthscale."""
    lengthscale = spectrum.spectrum.isotropic_lengthscale.flatten()[0]
    tau = lags.new_zeros(len(lags), spectrum.num_dims)
    tau[:, 0] = lags * lengthscale
    return tau


def _supremum(
    variance: Callable[[Float[Tensor, "n"], bool], Float[Tensor, "n"]], ceiling: float
) -> float:
    """Return the largest `variance` over all lags, or `ceiling` without a closed form."""
    lags = torch.logspace(-3, 4, 600, dtype=torch.float64)  # in lengthscales
    lags = torch.cat([lags.new_zeros(1), lags])
    try:
        values = variance(lags, False)
    except NotImplementedError:
        return ceiling
    best = int(values.argmax())
    low, high = lags[max(best - 1, 0)], lags[min(best + 1, len(lags) - 1)]
    refined = variance(low + (high - low) * torch.linspace(0, 1, 200).to(lags), False)
    beyond = variance(lags[-1:], True)  # the limit of long lags, for a kernel that decreases
    return min(ceiling, float(torch.cat([values, refined, beyond]).max()))


# Constants of the distribution of Y = Σ_q cos⟨ω^q, δ⟩ W_q, one sample of the features of a kernel.
#
# The sum is over the terms q of the kernel, and W_q = outputscale · A(ω) · importance weight.
# Frequencies of different terms are independent. The constants of a sum of terms are sums of
# constants: for norms by the triangle inequality, and for variances by independence.


@dataclass(frozen=True)
class Constants:
    """The constants of a term, or of a sum of terms; infinite if they diverge.

    Attributes:
        size: ‖K(0)‖₂.
        largest: ess sup ‖W‖₂.
        orlicz: the ψ₁ norm of ‖W‖₂.
        variance: b = sup_δ ‖E cos²⟨ω, δ⟩ W² − K(δ)²‖₂.
        lipschitz: σ_p = (E ‖ω‖² ‖W‖₂²)^{1/2}.
        largest_frobenius: M = ess sup ‖W‖_F.
        variance_frobenius: σ² = E ‖W‖_F².
        lipschitz_frobenius: m₁ = E ‖ω‖ ‖W‖_F.
    """

    size: float
    largest: float
    orlicz: float
    variance: float
    lipschitz: float
    largest_frobenius: float
    variance_frobenius: float
    lipschitz_frobenius: float

    def __add__(self, other: "Constants") -> "Constants":
        return Constants(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    @classmethod
    def of(
        cls, w: Moments, size: float, variance: float, spectral: float, frobenius: float
    ) -> "Constants":
        """Return the constants of a matrix W with the norms `spectral` · w and `frobenius` · w."""
        return cls(
            size,
            spectral * w.largest,
            spectral * w.orlicz,
            variance,
            spectral * w.second**0.5,
            frobenius * w.largest,
            frobenius**2 * w.mean_square,
            frobenius * w.first,
        )


@singledispatch
def constants(
    factor: Factor, term: Term, spectrum: TermSpectrum, orders: tuple[int, ...]
) -> Constants:
    """Return the constants of a term whose leaves are drawn with weights of the `orders`.

    Raises:
        NotImplementedError: the class of the factor is not registered.
    """
    raise NotImplementedError(
        f"no bound is known for a kernel with {type(factor).__name__}; measure the error with "
        "gp_orff.compare_with_exact, or register a function that returns its Constants with "
        "@gp_orff.bounds.constants.constants.register"
    )


@torch.no_grad()
def term_constants(term: Term, spectrum: TermSpectrum, measure: Measure) -> Constants:
    """Return the constants of a term whose frequencies are drawn with a measure."""
    orders = tuple(measure.order(leaf) for leaf in spectrum.leaves)
    leaves = tuple(replace(leaf, spectrum=measure.source(leaf)) for leaf in spectrum.leaves)
    return constants(term.factor, term, replace(spectrum, leaves=leaves), orders)


def _leaf_moments(spectrum: TermSpectrum, orders: tuple[int, ...]) -> list[Moments]:
    return [
        moments(leaf.spectrum, leaf.degree, order, leaf.num_dims)
        for leaf, order in zip(spectrum.leaves, orders, strict=True)
    ]


@constants.register
def _(factor: Mixing, term: Term, spectrum: TermSpectrum, orders: tuple[int, ...]) -> Constants:
    size = float(torch.linalg.matrix_norm(at_zero(term), 2))
    leaves = _leaf_moments(spectrum, orders)
    w = reduce(mul, leaves)
    variance = w.mean_square
    if len(leaves) == 1:
        variance = scalar_variance(term.leaves[0], spectrum.leaves[0], w)
    frobenius = float(torch.linalg.matrix_norm(at_zero(term)))
    return Constants.of(w, size, size**2 * variance, size, frobenius)


@constants.register(Gradient)
@constants.register(Solenoidal)
def _(
    factor: Gradient | Solenoidal, term: Term, spectrum: TermSpectrum, orders: tuple[int, ...]
) -> Constants:
    """Use that A(ω) is ‖ω‖² times a projection with the rank of the factor."""
    scale = float(term.outputscale)
    leaves = _leaf_moments(spectrum, orders)
    w = reduce(mul, leaves)
    if len(leaves) == 1:
        variance = field_variance(factor, term.leaves[0], spectrum.leaves[0], orders[0], w)
    else:
        variance = square_bound(factor, w)
    size = float(torch.linalg.matrix_norm(at_zero(term), 2))
    return Constants.of(w, size, scale**2 * variance, scale, scale * factor.rank**0.5)


@constants.register
def _(
    factor: SpectralMatrix, term: Term, spectrum: TermSpectrum, orders: tuple[int, ...]
) -> Constants:
    scale, nodes = float(term.outputscale), Nodes.of(spectrum.leaves[0])
    others = _leaf_moments(replace(spectrum, leaves=spectrum.leaves[1:]), orders[1:])
    spectral = reduce(mul, others, nodes.moments(nodes.spectral))
    frobenius = reduce(mul, others, nodes.moments(nodes.frobenius))
    others = math.prod(w.mean_square for w in others)
    return Constants(
        size=float(torch.linalg.matrix_norm(at_zero(term), 2)),
        largest=scale * spectral.largest,
        orlicz=scale * spectral.orlicz,
        variance=scale**2 * nodes.square * others,
        lipschitz=scale * spectral.second**0.5,
        largest_frobenius=scale * frobenius.largest,
        variance_frobenius=scale**2 * frobenius.mean_square,
        lipschitz_frobenius=scale * frobenius.first,
    )


# The arguments of a bound: a kernel, the measure of its frequencies, and a box of inputs.


@dataclass(frozen=True)
class Problem:
    """The arguments of a bound, after checks.

    Attributes:
        name: the name of the bound, for errors.
        terms: the random terms of the kernel. Constants are omitted, because their features are
            exact.
        measure: the measure of the frequencies.
        domain: the box of the inputs, if any.
    """

    name: str
    terms: tuple[tuple[Term, TermSpectrum], ...]
    measure: Measure
    domain: Box | None

    @classmethod
    @torch.no_grad()
    def of(
        cls,
        name: str,
        kernel: Kernel,
        domain: Box | None,
        measure: str | Measure,
        num_dims: int | None,
    ) -> "Problem":
        """Check the arguments of a bound.

        Raises:
            TypeError: `kernel` is not a gpytorch kernel.
            ValueError: `kernel` is a batch of kernels, has no random terms, or has terms with
                different numbers of outputs; `domain` is not a finite box of the inputs; `measure`
                is unknown.
            NotImplementedError: the terms share their frequencies.
        """
        checked_terms(kernel, name, "gp_orff.CurlFreeKernel(num_dims=2)")
        if kernel.batch_shape:
            raise ValueError(
                f"{name} expects one kernel, got a batch of shape {tuple(kernel.batch_shape)}; "
                "pass one kernel of the batch, kernel[i]"
            )
        measure = as_measure(measure, name)
        kernel = deepcopy(kernel).double().cpu()
        summands = terms(kernel)
        if domain is not None:
            domain = as_box(domain, "domain", name)
        num_dims = infer_num_dims(summands, num_dims)
        if num_dims is None:  # constants at one lag do not depend on the number of inputs
            num_dims = 1 if domain is None else len(domain)
        number, exact = input_columns(summands, num_dims)
        if domain is not None and (len(domain) < number or (exact and len(domain) > number)):
            raise ValueError(
                f"{name} expects a domain with {number} pairs (low, high), one for each input of "
                f"the kernel, got {len(domain)}"
            )
        pairs = zip(summands, term_spectra(kernel, num_dims), strict=True)
        random = tuple(pair for pair in pairs if pair[0].leaves)
        if not random:
            raise ValueError(
                f"{name} expects a kernel with a spectral density, got only constants, whose "
                "features are exact; add a stationary kernel"
            )
        groups = [term.group for term, _ in random if term.group is not None]
        if len(set(groups)) < len(groups):
            raise NotImplementedError(
                f"{name} expects a kernel whose terms have separate frequencies, got an LCMKernel, "
                "whose terms share them; measure the error with gp_orff.compare_with_exact"
            )
        return cls(name, random, measure, domain)

    @cached_property
    def constants(self) -> Constants:
        """The constants of the sum of all terms."""
        return reduce(add, (term_constants(*pair, self.measure) for pair in self.terms))

    @property
    def num_outputs(self) -> int:
        """p, the number of outputs."""
        return self.terms[0][0].num_outputs

    @property
    def columns(self) -> list[int]:
        """The input columns that the kernel depends on."""
        return sorted({dim for _, term in self.terms for leaf in term.leaves for dim in leaf.dims})

    @property
    def diagonal(self) -> float:
        """l, the length of the diagonal of the domain along `columns`.

        Raises:
            ValueError: `domain` is None.
        """
        if self.domain is None:
            raise ValueError(
                f"{self.name} expects a domain, the box of the inputs, got None; pass "
                "domain=((low, high), ...), one pair for each input"
            )
        return math.hypot(*(self.domain[dim][1] - self.domain[dim][0] for dim in self.columns))

    def number_of_matrices(self, others: str) -> int:
        """Return the number of different L_q in the terms k_q(δ) L_q L_qᵀ of a separable kernel.

        Args:
            others: the bounds for other kernels, for the error.

        Raises:
            ValueError: the kernel is not scalar or separable.
        """
        factors = [term.factor for term, _ in self.terms]
        if not all(factor.is_constant for factor in factors):
            raise ValueError(
                f"{self.name} expects a scalar or separable kernel, got one whose spectral matrix "
                f"depends on the frequency; use {others}"
            )
        return len({tuple(factor.matrix.flatten().tolist()) for factor in factors})

    def check_slope(self, slope: float, moment: str, others: str) -> None:
        """Raise an error if the kernel is too rough for the theorem.

        Args:
            slope: the moment.
            moment: a formula of the moment, for the error.
            others: bounds that do not need this moment, for the error.

        Raises:
            ValueError: the moment is infinite.
        """
        if math.isinf(slope):
            leaves = [leaf.kernel for term, _ in self.terms for leaf in term.leaves]
            kernels = {
                type(leaf).__name__ + (f"(nu={leaf.nu})" if hasattr(leaf, "nu") else "")
                for leaf in leaves
            }
            raise ValueError(
                f"{self.name} expects a kernel with {moment} < ∞, got "
                f"{', '.join(sorted(kernels))} with {moment} = ∞; use {others}, or a smoother "
                "kernel"
            )
