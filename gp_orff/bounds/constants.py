"""A bound as a value, what it is asked of, and the constants and tails that theorems use."""

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

# Tails of the error at one lag: P(‖K̃(δ) − K(δ)‖ ≥ x) ≤ C exp(−D t(x)), D frequencies.
#
# K̃(δ) = (1/D) Σ_j Y_j(δ), where Y_j = Re e^{−i⟨ω_j, δ⟩} W_j are independent, with mean K(δ).
#
# Where W is real, Y = cos⟨ω, δ⟩ W is symmetric. A Hermitian W gives Y that is not, with ‖Y‖ ≤ ‖W‖
# in both norms and E Y Yᵀ, E Yᵀ Y ≤ E W². The matrix inequalities then hold for the symmetric
# matrix (0, Y; Yᵀ, 0), with the same factor 2p.


@dataclass(frozen=True)
class Hoeffding:
    """x²/(2a²) for scalars with |Y_j| ≤ a (Rahimi & Recht 2007, Section 3)."""

    scale: float  # a

    def __call__(self, error: float) -> float:
        return 0.5 * (error / self.scale) ** 2


@dataclass(frozen=True)
class Bernstein:
    """x²/(2b + 2Ux/3) for ‖Y_j − K‖₂ ≤ U and b = ‖E(Y_j − K)²‖₂ (Brault et al. 2016, Thm B.1)."""

    variance: float  # b
    scale: float  # U

    def __call__(self, error: float) -> float:
        return error**2 / (2 * self.variance + 2 * self.scale * error / 3)


@dataclass(frozen=True)
class Subexponential:
    """The tail for ‖Y_j − K‖₂ with an Orlicz norm of at most m/2 (Brault et al. 2016, Thm B.2).

    x²/(4b + 2xū/3) where xū ≤ 2(e − 1)b, else x/((e − 1)ū); ū = m log(2m²/b + 1). The variance in
    ū is that of one Y_j.
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
    """x/(4M) · log(1 + 2Mx/σ²) for ‖Y_j‖_F ≤ M and σ² = E‖Y_j‖_F² (Minh 2016, Theorem 11).

    The bound of Y_j − K, in its Lemma 15, is 2M.
    """

    variance: float  # σ²
    scale: float  # M

    def __call__(self, error: float) -> float:
        double = 2 * self.scale
        return error / (2 * double) * math.log1p(double * error / self.variance)


Tail = Hoeffding | Bernstein | Subexponential | Logarithmic


# A bound of the error of random features as a value, with its inverses.
#
# A theorem gives the logarithm of a probability, which decreases in the number D of frequencies and
# in the error ε. The two inverses need nothing else: D by doubling and bisection of integers, ε by
# doubling and bisection down to neighbouring floating-point numbers. Logarithms are used because
# probabilities such as e^{−1000} underflow, and bounds above one may be very large.


class Bound(ABC):
    """A bound of the probability that random features have a larger error than ε, with inverses.

    The functions of `gp_orff.bounds` return it; you need not build one. Each of three numbers
    follows from the other two:

    - D, as in `MonteCarlo(D)`, by `num_frequencies(error, confidence)`;
    - the error ε of the kernel, by `error(num_frequencies, confidence)`;
    - the probability of a larger error, by `probability(num_frequencies, error)`.

    The error is a norm of K̃(x, z) − K(x, z), where K̃ is the kernel of D random frequencies. It
    refers to one pair of points, or it is the largest error over all x and z in a box. It is
    absolute, in the squared units of the outputs: for 5 %, pass 0.05 times the norm of K(0).

    Example:
        >>> import gp_orff
        >>> kernel = gp_orff.CurlFreeKernel(num_dims=2)
        >>> kernel.base_kernel.lengthscale = 1.0
        >>> bound = gp_orff.bounds.minh(kernel, ((-1, 1), (-1, 1)))
        >>> error = bound.error(10_000)  # with a probability of 95 %
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
        """The typical error of one frequency, at which a search starts."""

    @abstractmethod
    def log_probability(self, num_frequencies: int, error: float) -> float:
        """The logarithm of the bound, which decreases in both arguments. A positive value is no
        bound.

        Args:
            num_frequencies: D, for each term of a sum.
            error: ε > 0, in the squared units of the outputs.
        """

    def probability(self, num_frequencies: int, error: float) -> float:
        """An upper bound of the probability that the error is at least `error`.

        It is 1 if the theorem gives no bound.

        Args:
            num_frequencies: D, the number in `MonteCarlo(D)`, of each term of a sum.
            error: ε > 0, in the squared units of the outputs.

        Raises:
            ValueError: fewer frequencies than one, or an error that is not positive and finite.
        """
        _check_number(num_frequencies)
        _check_error(error)
        return math.exp(min(0.0, self.log_probability(num_frequencies, error)))

    def error(self, num_frequencies: int, confidence: float = 0.95) -> float:
        """The error that D frequencies do not exceed, with a probability of at least `confidence`.

        Args:
            num_frequencies: D, the number in `MonteCarlo(D)`, of each term of a sum.
            confidence: the probability, between 0 and 1: 0.95 for 95 %.

        Returns:
            ε, in the squared units of the outputs.

        Raises:
            ValueError: fewer frequencies than one, or a confidence that is not between 0 and 1.
        """
        _check_number(num_frequencies)
        target = _log_of_rest(confidence)
        return crossing(
            lambda error: self.log_probability(num_frequencies, error) - target, self.scale
        )

    def num_frequencies(self, error: float, confidence: float = 0.95) -> int:
        """The number of frequencies that suffice for an error below `error`, by this bound.

        Args:
            error: ε > 0, in the squared units of the outputs.
            confidence: the probability that the error stays below, between 0 and 1.

        Returns:
            D for `MonteCarlo(D)`, the number of frequencies of each term of a sum. Each makes a
            cosine and a sine.

        Raises:
            ValueError: an error that is not positive and finite, or a confidence that is not
                between 0 and 1.
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
    """C ε^{−power} exp(−share · D · tail): the tail of the error at one lag, raised to `share`."""

    log_constant: float  # log C
    power: float = 0.0
    share: float = 1.0


@dataclass(frozen=True)
class TailBound(Bound):
    """The bound that follows from a tail of the error at one pair of points.

        P(error ≥ ε) ≤ max_i C_i ε^{−c_i} exp(−s_i D t(ε′))

    Here t is the tail of the error at one pair of points. ε′ is ε for one pair and ε/2 over a box.

    Args:
        tail: t, as a function of the error at one pair of points.
        parts: the constants C_i, powers c_i and shares s_i.
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
    """The smallest x > 0 at which a decreasing function is not positive, found from `start`."""
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
        raise ValueError(f"a bound expects num_frequencies >= 1, got {num_frequencies}; raise it")


def _check_error(error: float) -> None:
    if not 0 < error < math.inf:
        raise ValueError(
            f"a bound expects a positive and finite error, got {error}; it has the units of the "
            "kernel"
        )


def _log_of_rest(confidence: float) -> float:
    """log(1 − confidence)."""
    if not 0 < confidence < 1:
        raise ValueError(
            f"a bound expects a confidence between 0 and 1, got {confidence}; pass 0.95 for 95 %"
        )
    return math.log1p(-confidence)


# Moments of the size of a random spectral matrix, for each spectrum.
#
# A frequency ω of one leaf is drawn with an importance weight v. With a factor of degree g its
# matrix has the size w = v ‖ω‖^{2g}, times constants. Moments are exact where the spectrum is
# isotropic, and upper bounds with a lengthscale for each input.
#
# With z = ℓω = r u, the radius r and the direction u are independent. Every moment is therefore
# that of a power of r, which the spectrum knows, times that of a power of the quadratic form q =
# ‖u/ℓ‖². If the density is weighted by r^{2t} (trace measure, t = g = 1), the weight E r²/r²
# cancels r² in w: w is bounded.


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
            "returns its Moments with @gp_orff.bounds.constants.moments.register"
        )
    scales = lengthscale.detach().double().flatten().expand(num_dims).pow(-2).numpy()
    square = quadratic_moments(scales)  # E q^k
    g, tilt = degree, _radial_moment(spectrum, 2 * order, num_dims)

    def tilted(power: int) -> float:
        """E r^{2t} · E r^{power − 2t}, t the order: of r^{power} times squared weights."""
        return tilt * _radial_moment(spectrum, power - 2 * order, num_dims)

    largest = tilt * scales.max() ** g if order == g else math.inf
    outer = scales * (scales.sum() + 2 * scales) / (num_dims * (num_dims + 2))
    # Cauchy and Schwarz: the half-integer moment of q has no closed form.
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
    # The second and third moments of a sum from its cumulants κ₁ = a, κ₂ = 2b and κ₃ = 8c.
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


# Moments of the size of a spectral matrix that is any function of the frequency, by quadrature.
#
# Frequencies that are drawn from S are integrated over polar nodes, of radii up to 10⁶ in units of
# the spectrum, as for the variance. A `sampler` says only what it draws: the integrals are then
# means over a Sobol sequence, and the largest size is that of the sequence.


@dataclass(frozen=True)
class Nodes:
    """Frequencies with probabilities, and the random matrices W = v A(ω)."""

    omega: Float[Tensor, "m d"]
    log_probability: Float[Tensor, "m"]
    matrices: Float[Tensor, "m p p"]
    radii: Float[np.ndarray, "m"] | None  # scaled, if the nodes reach far beyond the spectrum

    @classmethod
    def of(cls, leaf: LeafSpectrum) -> "Nodes":
        """The nodes of the density that a leaf is drawn from.

        Raises:
            NotImplementedError: the spectral density is not known, or there are too many inputs.
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
                "bounds integrate over the spectral density of a SpectralMatrixKernel of at most 3 "
                f"inputs, got {type(spectrum).__name__} of {leaf.num_dims}; measure the error with "
                "gp_orff.compare_with_exact, or give the kernel a sampler"
            )
        omega, volumes = leaf.variance.nodes
        log_probability = spectrum.log_density(omega).flatten() + volumes.log()
        b = factor(omega)
        return cls(omega, log_probability, b @ b.mH, spectrum.scaled_radius(omega.numpy()))

    @property
    def finite(self) -> Bool[Tensor, "m"]:
        """Where W does not overflow."""
        return torch.isfinite(self.matrices.abs()).all(-1).all(-1)

    @property
    def spectral(self) -> Float[Tensor, "m"]:
        """‖W‖₂."""
        norms = torch.full_like(self.log_probability, math.inf)
        norms[self.finite] = torch.linalg.eigvalsh(self.matrices[self.finite])[:, -1]
        return norms

    @property
    def frobenius(self) -> Float[Tensor, "m"]:
        """‖W‖_F."""
        norms = self.matrices.abs().square().sum((-1, -2)).sqrt()
        return torch.where(self.finite, norms, math.inf)

    @property
    def square(self) -> float:
        """‖E W²‖₂, whose imaginary part is odd in ω."""
        if math.isinf(self._mean(self.frobenius.square())):
            return math.inf
        parts = self._parts((self.matrices @ self.matrices).real.flatten(1).mT)
        mean = parts.sum(-1).unflatten(0, self.matrices.shape[-2:])
        return float(torch.linalg.matrix_norm(mean, 2))

    def moments(self, size: Float[Tensor, "m"]) -> Moments:
        """The moments of a size of W."""
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
        """Probabilities times values, which may overflow where probabilities underflow."""
        probability = self.log_probability.exp()
        return torch.where(probability > 0, probability * values, 0.0)

    def _is_infinite(self, parts: Float[Tensor, "m"]) -> bool:
        return self.radii is not None and diverges(parts.numpy(), self.radii)

    def _orlicz(self, size: Float[Tensor, "m"]) -> float:
        """c with E exp(w/c) = 2."""
        if not math.isfinite(size.max()) or math.isinf(self._mean(size)):
            return math.inf

        def log_excess(c: float) -> float:
            return float((self.log_probability + size / c).logsumexp(0)) - math.log(2)

        c = crossing(log_excess, self._mean(size))
        return math.inf if self._is_infinite((self.log_probability + size / c).exp()) else c


# The largest variance b = sup_δ ‖E cos²⟨ω, δ⟩ W² − K(δ)²‖₂ of one frequency of a term.
#
# It is found by a search along one axis where the spectrum is isotropic and the kernel has a closed
# form. Elsewhere b is bounded by ‖E W²‖₂.
#
# cos² x = ½ (1 + cos 2x) turns the expectation into kernels at the lags 0 and 2δ. Lags along one
# axis suffice because an isotropic kernel at any lag is a rotation of these, which leaves the norm
# as it is. Lags are logarithmic over seven decades; the neighbourhood of the best one is searched
# again; and the limit of long lags, where K(δ) vanishes, is compared.


def scalar_variance(leaf: Leaf, spectrum: LeafSpectrum, moments: Moments) -> float:
    """sup_δ E v² cos²⟨ω, δ⟩ − k(δ)² of a scalar kernel, v the importance weights."""
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
    """b of a curl-free or divergence-free kernel without further leaves.

    Both have A² = ‖ω‖² A: E cos⟨ω, δ⟩ W² comes from the fourth derivatives of k (measure of order
    0), or is a multiple of K(δ) where the weights make ‖W‖ constant (order 1).
    """
    ceiling = square_bound(factor, moments)
    if math.isinf(moments.orlicz):  # no theorem needs it
        return ceiling
    lengthscale = spectrum.spectrum.isotropic_lengthscale
    if lengthscale is None or lengthscale.min() < lengthscale.max():
        return ceiling
    if order not in (0, factor.degree):
        return ceiling
    # at most 256 derivatives at one lag: second ones up to d = 16, fourth ones up to d = 4
    if spectrum.num_dims ** (2 if order else 4) > 256:
        return ceiling

    def covariance(tau: Float[Tensor, "n k"]) -> Float[Tensor, "n p p"]:
        return factor.block(-derivatives(leaf.kernel, tau, 2))

    def square(tau: Float[Tensor, "n k"]) -> Float[Tensor, "n p p"]:
        """E cos⟨ω, τ⟩ W²."""
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
    """‖E W²‖₂ of a curl-free or divergence-free kernel."""
    if math.isinf(moments.mean_square):
        return math.inf
    outer = torch.tensor(moments.outer, dtype=torch.float64).diag()
    return float(torch.linalg.matrix_norm(factor.block(outer), 2))


def _along_axis(spectrum: LeafSpectrum, lags: Float[Tensor, "n"]) -> Float[Tensor, "n k"]:
    """Lags along the first axis, given in units of its lengthscale."""
    lengthscale = spectrum.spectrum.isotropic_lengthscale.flatten()[0]
    tau = lags.new_zeros(len(lags), spectrum.num_dims)
    tau[:, 0] = lags * lengthscale
    return tau


def _supremum(
    variance: Callable[[Float[Tensor, "n"], bool], Float[Tensor, "n"]], ceiling: float
) -> float:
    """The largest of `variance` over all lags; `ceiling` for a kernel without a closed form."""
    lags = torch.logspace(-3, 4, 600, dtype=torch.float64)  # in lengthscales
    lags = torch.cat([lags.new_zeros(1), lags])
    try:
        values = variance(lags, False)
    except NotImplementedError:
        return ceiling
    best = int(values.argmax())
    low, high = lags[max(best - 1, 0)], lags[min(best + 1, len(lags) - 1)]
    refined = variance(low + (high - low) * torch.linspace(0, 1, 200).to(lags), False)
    beyond = variance(lags[-1:], True)  # of all longer lags, for a kernel that decreases
    return min(ceiling, float(torch.cat([values, refined, beyond]).max()))


# Constants of the distribution of Y = Σ_q cos⟨ω^q, δ⟩ W_q, one sample of the features of a kernel.
#
# q are the terms of the kernel, and W_q = outputscale · A(ω) · importance weight. Frequencies of
# different terms are independent. All constants of a sum are sums: norms by the triangle
# inequality, variances by independence.


@dataclass(frozen=True)
class Constants:
    """Of a term, or of a sum of terms; infinite where they do not exist."""

    size: float  # ‖K(0)‖₂
    largest: float  # ess sup ‖W‖₂
    orlicz: float  # ‖ ‖W‖₂ ‖_ψ₁
    variance: float  # b = sup_δ ‖E cos² W² − K(δ)²‖₂
    lipschitz: float  # σ_p = (E ‖ω‖² ‖W‖₂²)^{1/2}
    largest_frobenius: float  # M = ess sup ‖W‖_F
    variance_frobenius: float  # σ² = E ‖W‖_F²
    lipschitz_frobenius: float  # m₁ = E ‖ω‖ ‖W‖_F

    def __add__(self, other: "Constants") -> "Constants":
        return Constants(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    @classmethod
    def of(
        cls, w: Moments, size: float, variance: float, spectral: float, frobenius: float
    ) -> "Constants":
        """The constants of W with the norms `spectral` · w and `frobenius` · w."""
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
    """The constants of a term whose leaves are drawn with weights of these orders.

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
    """The constants of a term."""
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
    """A(ω) is ‖ω‖² times a projection, whose rank is that of the factor."""
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


# What a bound is asked of: a kernel, the measure of its frequencies, and a box of inputs.


@dataclass(frozen=True)
class Problem:
    """The random terms of a kernel, without constants, whose features are exact."""

    name: str  # of the bound, for messages
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
        """The problem of the arguments of a bound.

        Raises:
            TypeError: `kernel` is not a gpytorch kernel.
            ValueError: a batch of kernels; a kernel without random terms, or whose terms have
                different numbers of outputs; a domain that is not a finite box of its inputs; an
                unknown measure.
            NotImplementedError: terms that share their frequencies.
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
        if num_dims is None:  # constants at one lag do not depend on it
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
                f"{name} expects a kernel with a spectral density, got constants only, whose "
                "features are exact; add a stationary kernel"
            )
        groups = [term.group for term, _ in random if term.group is not None]
        if len(set(groups)) < len(groups):
            raise NotImplementedError(
                f"{name} is not known for the terms of an LCMKernel, which share their "
                "frequencies; measure the error with gp_orff.compare_with_exact"
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
        """l, the diagonal of the domain along these columns.

        Raises:
            ValueError: no domain.
        """
        if self.domain is None:
            raise ValueError(
                f"{self.name} expects a domain, since it is valid for all inputs of a box, got "
                "None; pass domain=((low, high), ...), one pair for each input"
            )
        return math.hypot(*(self.domain[dim][1] - self.domain[dim][0] for dim in self.columns))

    def number_of_matrices(self, others: str) -> int:
        """The number of different L of the terms k_q(δ) L_q L_qᵀ of a separable kernel.

        Raises:
            ValueError: another kernel; the message names `others`, the bounds that it has.
        """
        factors = [term.factor for term, _ in self.terms]
        if not all(factor.is_constant for factor in factors):
            raise ValueError(
                f"{self.name} expects a scalar or separable kernel, got one whose spectral matrix "
                f"varies with the frequency; use {others}"
            )
        return len({tuple(factor.matrix.flatten().tolist()) for factor in factors})

    def check_slope(self, slope: float, moment: str, others: str) -> None:
        """Refuse a kernel that is too rough for the theorem.

        Raises:
            ValueError: an infinite moment; the message names it, and `others`, the bounds without.
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
