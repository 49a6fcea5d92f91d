"""Theorems on the error of random features, over a box and at one pair of points."""

import math
from dataclasses import dataclass

from gpytorch.kernels import Kernel

from gp_orff.bounds.constants import (
    Bernstein,
    Bound,
    Hoeffding,
    Logarithmic,
    Part,
    Problem,
    Subexponential,
    Tail,
    TailBound,
)
from gp_orff.features.chunked import Box
from gp_orff.features.phases import FastfoodProjection
from gp_orff.features.random import Measure
from gp_orff.kernels.tree import leaf_dims

# Theorems on the error of random features, for every kernel of the package.
#
# The lags x − z of a box with the diagonal l are in a ball of radius l. This ball is covered by
# (4l/s)^d balls of radius s ≤ 4l. The tail t bounds the error F = K̃ − K at the centres of these
# balls. Between the centres, its slope is bounded. Together,
#
#     P(sup ‖F‖ ≥ ε) ≤ C e^{−D t(ε/2)} (4l/s)^d + (4Λs/ε)^k .
#
# The radius s minimises this sum. Λ is the norm of ‖ω‖‖W‖ in L^k, and the norm of the slope of F is
# at most 2Λ. If the best s exceeds 4l, one ball is enough.


_BOUNDED = 'use measure="trace" for a field, and a sampler ∝ S tr A in a SpectralMatrixKernel'


def hoeffding(
    kernel: Kernel,
    domain: Box | None = None,
    *,
    measure: str | Measure = "trace",
    num_dims: int | None = None,
) -> Bound:
    """Bound the error of a scalar or separable kernel at one pair of points, in the spectral norm.

    K̃ is the kernel of the random features with D frequencies. For two points x and z that are
    chosen before the frequencies are drawn,

        P(‖K̃(x, z) − K(x, z)‖₂ ≥ ε) ≤ 2Q exp(−Dε²/(2a²)) .

    In general, the kernel is a sum of terms K_q = k_q(x − z) L_q L_qᵀ. Then a = Σ_q ‖K_q(0)‖₂, and
    Q is the number of different matrices L_q. Q is 1 for a scalar kernel, for one `SeparableKernel`
    and for one `MultitaskKernel`. For a scalar kernel with k(0) = 1, the bound is 2 exp(−Dε²/2). In
    a spectral mixture kernel, frequencies have importance weights, and ‖K_q(0)‖₂ is multiplied by
    the largest weight.

    Source: Hoeffding's inequality, as in Rahimi & Recht 2007, Section 3.

    Args:
        kernel: a scalar kernel, a `SeparableKernel`, a `MultitaskKernel`, or a sum, product or
            scaled form of them. The bound is computed for its current hyperparameters.
        domain: ignored, because the bound is the same for every pair of points.
        measure: "trace" or "base", as for `MonteCarlo`. Both are equal for these kernels.
        num_dims: ignored.

    Returns:
        A `Bound`, where D is the number of frequencies of each term of a sum, as in
        `MonteCarlo(D)`.

    Raises:
        TypeError: `kernel` is not a gpytorch kernel.
        ValueError: `kernel` is curl-free or divergence-free (use `minh_pointwise`), or a batch of
            kernels; `measure` is unknown.
        NotImplementedError: the moments of the spectrum are unknown, or `kernel` is an `LCMKernel`,
            whose terms share frequencies.

    Example:
        With 1000 frequencies, an error of 0.1 has at most the probability 2 exp(−5):

        >>> import gp_orff, gpytorch
        >>> bound = gp_orff.bounds.hoeffding(gpytorch.kernels.RBFKernel())
        >>> round(bound.probability(1000, error=0.1), 4)
        0.0135
        >>> bound.num_frequencies(error=0.1, confidence=0.95)
        738
    """
    problem = Problem.of("hoeffding", kernel, domain, measure, num_dims)
    count = problem.number_of_matrices("minh_pointwise")
    return TailBound(Hoeffding(problem.constants.largest), (Part(math.log(2 * count)),))


def rahimi_recht(
    kernel: Kernel,
    domain: Box | None = None,
    *,
    measure: str | Measure = "trace",
    num_dims: int | None = None,
) -> Bound:
    """Bound the largest error of a scalar or separable kernel over a box, in the spectral norm.

    K̃ is the kernel of the random features with D frequencies. The supremum is over all x and z in
    the box:

        P(sup ‖K̃(x, z) − K(x, z)‖₂ ≥ ε) ≤ 2⁸ Q r² exp(−Dε²/(4(d + 2)a²)) ,    r = σ a l/ε .

    Here l is the diagonal of the box, d is the number of inputs, and σ² = E‖ω‖² for frequencies ω
    from the spectral density. `hoeffding` defines the constants a and Q. For a kernel with several
    terms, σ a is the sum over the terms. `brault` usually requires fewer frequencies.

    Source: Rahimi & Recht 2007, Claim 1; Brault et al. 2016, Theorem A.1 and Corollary A.1.1. The
    last step of the proof replaces r^{2d/(d+2)} by r², which is larger only if r ≥ 1. For r < 1,
    the bound before this step is used.

    Args:
        kernel: a scalar kernel, a `SeparableKernel`, a `MultitaskKernel`, or a sum, product or
            scaled form of them. The bound is computed for its current hyperparameters.
        domain: ((low, high), …), the box that contains x and z, with one pair for each of the d
            inputs.
        measure: "trace" or "base", as for `MonteCarlo`. Both are equal for these kernels.
        num_dims: d, the number of inputs. If None, it follows from `domain`.

    Returns:
        A `Bound`, where D is the number of frequencies of each term of a sum, as in
        `MonteCarlo(D)`.

    Raises:
        TypeError: `kernel` is not a gpytorch kernel.
        ValueError: `kernel` is curl-free or divergence-free (use `brault` or `minh`), or a batch of
            kernels; E‖ω‖² = ∞, as for a Matérn kernel with ν ≤ 1; `domain` is not a finite box of
            the inputs; `measure` is unknown.
        NotImplementedError: the moments of the spectrum are unknown, or `kernel` is an `LCMKernel`,
            whose terms share frequencies.

    Example:
        >>> import gp_orff, gpytorch
        >>> kernel = gpytorch.kernels.RBFKernel()
        >>> kernel.lengthscale = 1.0
        >>> bound = gp_orff.bounds.rahimi_recht(kernel, ((-1, 1), (-1, 1)))
        >>> bound.num_frequencies(error=0.1, confidence=0.95)
        25470
    """
    problem = Problem.of("rahimi_recht", kernel, domain, measure, num_dims)
    count = problem.number_of_matrices("brault or minh")
    c, d = problem.constants, len(problem.columns)
    problem.check_slope(c.lipschitz, "E‖ω‖²", "minh, where E‖ω‖ < ∞, or hoeffding (one lag)")
    net = _over_box(problem, Hoeffding(c.largest), 2 * count, c.lipschitz, 2)
    printed = 8 * math.log(2) + math.log(count) + 2 * _log(c.lipschitz * problem.diagonal)
    return TailBound(net.tail, (*net.parts, Part(printed, 2, 2 / (d + 2))), net.fraction)


def brault(
    kernel: Kernel,
    domain: Box | None = None,
    *,
    measure: str | Measure = "trace",
    num_dims: int | None = None,
) -> Bound:
    """Bound the largest error of any kernel over a box, in the spectral norm.

    K̃ is the kernel of the random features with D frequencies. The supremum is over all x and z in
    the box. With the diagonal l of the box, d inputs and p outputs,

        P(sup ‖K̃(x, z) − K(x, z)‖₂ ≥ ε)
            ≤ C′ 2^{(6d+2)/(d+2)} p^{2/(d+2)} (2σ_p l/ε)^{2d/(d+2)} exp(−2D t/(d + 2)) ,
        C′ = (d/2)^{−d/(d+2)} + (d/2)^{2/(d+2)} .

    W is the random matrix of one frequency ω, with the mean K(0). With the measure "base", W is
    A(ω). With the measure "trace", W is A(ω) E‖z‖²/‖z‖², where z = ℓω. The constants of W are

        σ_p² = E ‖ω‖² ‖W‖₂² ,    b = sup_δ ‖E cos²⟨ω, δ⟩ W² − K(δ)²‖₂ .

    If W is bounded, as for "trace" and for separable kernels,

        2t = ε²/(4b + 2Uε/3) ,    U = sup‖W‖₂ + ‖K(0)‖₂ .

    If W is not bounded, as for fields with "base", the Orlicz norm ψ₁ of ‖W‖₂ replaces the
    supremum, with ū = m log(2m²/b + 1) and m = 2‖‖W‖₂‖_ψ₁ + 2‖K(0)‖₂/log 2:

        2t = ε²/(8(b + εū/12))  if εū ≤ 4(e − 1)b ,    2t = ε/((e − 1)ū)  otherwise .

    If the kernel is isotropic and has a closed form, b is computed by a search over δ. Otherwise,
    b is replaced by its upper bound ‖E W²‖₂.

    For a `SpectralMatrixKernel`, W = v A(ω) for both measures. It may be complex, and v is the
    importance weight of its `sampler`, or 1 without a sampler. The constants are integrals over
    frequencies up to 10⁶ times the scale of the spectral density. With a `sampler`, they are means
    over 2¹⁴ frequencies, and the largest ‖W‖ replaces the supremum.

    Source: Brault et al. 2016, Theorem 3.1, with the matrix Bernstein inequalities of its Theorems
    B.1 and B.2. The paper prints ū, p^{2/(d+2)} and 2σ_p differently. See the errata on the page
    "From paper to name".

    Args:
        kernel: a kernel that `ORFFKernel` accepts. The bound is computed for its current
            hyperparameters.
        domain: ((low, high), …), the box that contains x and z, with one pair for each of the d
            inputs.
        measure: "trace" or "base", as for `MonteCarlo`.
        num_dims: d, the number of inputs. If None, it follows from `kernel` or `domain`.

    Returns:
        A `Bound`, where D is the number of frequencies of each term of a sum, as in
        `MonteCarlo(D)`.

    Raises:
        TypeError: `kernel` is not a gpytorch kernel.
        ValueError: W has no Orlicz norm, as with "base" for curl-free and divergence-free kernels
            with a Matérn or rational quadratic base kernel; σ_p = ∞, as for curl-free and
            divergence-free Matérn kernels with ν ≤ 2; `domain` is not a finite box of the inputs;
            `kernel` is a batch of kernels; `measure` is unknown.
        NotImplementedError: the moments of the spectrum are unknown, for example for a
            `SpectralMatrixKernel` of more than 3 inputs without a sampler; `kernel` is an
            `LCMKernel`, whose terms share frequencies; `measure` is "trace" for a field with a
            spectral mixture kernel.

    Example:
        With 10 000 frequencies, the error is below 0.403 with a probability of 95 %. The variance
        of each component is 1:

        >>> import gp_orff
        >>> kernel, box = gp_orff.CurlFreeKernel(num_dims=2), ((-1, 1), (-1, 1))
        >>> kernel.base_kernel.lengthscale = 1.0
        >>> bound = gp_orff.bounds.brault(kernel, box, measure="base")
        >>> round(bound.error(10_000), 3)
        0.403
    """
    problem = Problem.of("brault", kernel, domain, measure, num_dims)
    c = problem.constants
    if math.isfinite(c.largest):
        tail: Tail = Bernstein(c.variance, c.largest + c.size)
    elif math.isfinite(c.orlicz):
        tail = Subexponential(c.variance, 2 * c.orlicz + 2 * c.size / math.log(2))
    else:
        raise ValueError(
            "brault expects features that are bounded or have an Orlicz norm (E exp(‖W‖/c) < ∞), "
            f"got heavier tails; {_BOUNDED}"
        )
    others = "minh, where E‖ω‖‖W‖_F < ∞, or minh_pointwise (one lag)"
    problem.check_slope(c.lipschitz, "E‖ω‖²‖W‖₂²", others)
    return _over_box(problem, tail, 2 * problem.num_outputs, c.lipschitz, 2)


def minh_pointwise(
    kernel: Kernel,
    domain: Box | None = None,
    *,
    measure: str | Measure = "trace",
    num_dims: int | None = None,
) -> Bound:
    """Bound the error of any kernel at one pair of points, in the Hilbert–Schmidt (Frobenius) norm.

    K̃ is the kernel of the random features with D frequencies. For two points x and z that are
    chosen before the frequencies are drawn,

        P(‖K̃(x, z) − K(x, z)‖_F ≥ ε) ≤ 2 exp(−(Dε/4M) log(1 + 2Mε/σ²)) .

    Here M = sup‖W‖_F and σ² = E‖W‖_F², where W is the random matrix of one frequency, as defined at
    `brault`. W must be bounded.

    Source: Minh 2016, Theorem 11. The M of the paper is 2M here, which bounds
    ‖cos⟨ω, x − z⟩ W − K(x, z)‖_F.

    Args:
        kernel: a kernel that `ORFFKernel` accepts. The bound is computed for its current
            hyperparameters.
        domain: ignored, because the bound is the same for every pair of points.
        measure: "trace" or "base", as for `MonteCarlo`.
        num_dims: ignored.

    Returns:
        A `Bound`, where D is the number of frequencies of each term of a sum, as in
        `MonteCarlo(D)`.

    Raises:
        TypeError: `kernel` is not a gpytorch kernel.
        ValueError: W is not bounded, as for a curl-free or divergence-free kernel with "base";
            `kernel` is a batch of kernels; `measure` is unknown.
        NotImplementedError: one of the reasons listed at `brault`.

    Example:
        >>> import gp_orff
        >>> kernel = gp_orff.CurlFreeKernel(num_dims=2)
        >>> kernel.base_kernel.lengthscale = 1.0
        >>> bound = gp_orff.bounds.minh_pointwise(kernel)
        >>> bound.num_frequencies(error=0.1, confidence=0.95)
        3097
    """
    problem = Problem.of("minh_pointwise", kernel, domain, measure, num_dims)
    return TailBound(_logarithmic(problem), (Part(math.log(2)),))


def minh(
    kernel: Kernel,
    domain: Box | None = None,
    *,
    measure: str | Measure = "trace",
    num_dims: int | None = None,
) -> Bound:
    """Bound the largest error of any kernel over a box, in the Hilbert–Schmidt (Frobenius) norm.

    K̃ is the kernel of the random features with D frequencies. The supremum is over all x and z in
    the box, which has the diagonal l and d inputs:

        P(sup ‖K̃(x, z) − K(x, z)‖_F ≥ ε)
            ≤ a(d) (2 m₁ l/ε)^{d/(d+1)} exp(−Dε/(8(d + 1)M) · log(1 + Mε/σ²)) ,
        a(d) = 2^{(3d+1)/(d+1)} (d^{1/(d+1)} + d^{−d/(d+1)}) .

    `minh_pointwise` defines M and σ². The constant m₁ = E‖ω‖‖W‖_F, with the random matrix W of one
    frequency ω, is the same for both measures. The Frobenius norm is never smaller than the
    spectral norm. `brault` bounds the spectral norm, and usually requires fewer frequencies.

    Source: Minh 2016, Theorem 12, applied to the set of lags x − z, whose diameter is 2l. The M of
    the paper is 2M here.

    Args:
        kernel: a kernel that `ORFFKernel` accepts. The bound is computed for its current
            hyperparameters.
        domain: ((low, high), …), the box that contains x and z, with one pair for each of the d
            inputs.
        measure: "trace" or "base", as for `MonteCarlo`.
        num_dims: d, the number of inputs. If None, it follows from `kernel` or `domain`.

    Returns:
        A `Bound`, where D is the number of frequencies of each term of a sum, as in
        `MonteCarlo(D)`.

    Raises:
        TypeError: `kernel` is not a gpytorch kernel.
        ValueError: W is not bounded, as for a curl-free or divergence-free kernel with "base";
            m₁ = ∞, as for curl-free and divergence-free Matérn kernels with ν ≤ 3/2; `domain` is
            not a finite box of the inputs; `kernel` is a batch of kernels; `measure` is unknown.
        NotImplementedError: one of the reasons listed at `brault`.

    Example:
        >>> import gp_orff
        >>> kernel, box = gp_orff.CurlFreeKernel(num_dims=2), ((-1, 1), (-1, 1))
        >>> kernel.base_kernel.lengthscale = 1.0
        >>> round(gp_orff.bounds.minh(kernel, box).error(10_000), 3)
        0.289
    """
    problem = Problem.of("minh", kernel, domain, measure, num_dims)
    tail, slope = _logarithmic(problem), problem.constants.lipschitz_frobenius
    problem.check_slope(slope, "E‖ω‖‖W‖_F", "minh_pointwise (one lag)")
    return _over_box(problem, tail, 2, slope, 1)


def _logarithmic(problem: Problem) -> Logarithmic:
    """Return the tail of Theorem 11 of Minh 2016."""
    c = problem.constants
    if math.isinf(c.largest_frobenius):
        raise ValueError(f"{problem.name} expects bounded features, got unbounded ones; {_BOUNDED}")
    return Logarithmic(c.variance_frobenius, c.largest_frobenius)


def _over_box(problem: Problem, tail: Tail, count: float, slope: float, k: int) -> TailBound:
    """Return the bound of the largest error over a box, for the best radius s of the balls.

    Args:
        problem: the kernel and the box.
        tail: t, the tail of the error at one lag.
        count: C, the factor of the tail.
        slope: Λ, half of a bound of the slope in the norm of L^k.
        k: the order of the moment of the slope in Markov's inequality.
    """
    d, diagonal = len(problem.columns), problem.diagonal
    ratio, log_count = d / k, math.log(count)
    log_constant = (k * (log_count + d * _log(4 * diagonal)) + d * k * math.log(4 * slope)) / (
        d + k
    ) + math.log(ratio ** (k / (d + k)) + ratio ** (-d / (d + k)))
    net = Part(log_constant, power=d * k / (d + k), share=k / (d + k))
    # s > 4l only if (4Λ · 4l/ε)^k < (d/k) C e^{−Dt}. Then one ball of radius s = l gives this part.
    ball = Part(log_count + math.log1p(ratio / 4**k))
    return TailBound(tail, (net, ball), fraction=0.5)


def _log(number: float) -> float:
    """Return the logarithm of a number, or −∞ for 0."""
    return math.log(number) if number else -math.inf


# The error of Fastfood at one pair of points. Frequencies of a block depend on each other.
#
# Consider one block S H G Π H B/√m of m frequencies, with v = (x − z)/ℓ and s = ‖v‖². Let
# w = HBv/√m and u = Πw, and let γ = G/‖G‖ be a unit vector. The phases of the block are r_j y_j
# with y_j = Σ_i H_ji γ_i u_i and independent radii r_j ~ χ_m.
#
# Variance: for fixed u, the covariance of two cosines is Σ_i e_i P_i(ρ) for i = 2, 4, … The P_i are
# normalised Gegenbauer polynomials in m dimensions, e_i ≥ 0, Σ e_i ≤ Var cos = ½(1 − e^{−s})², and
# ρ is the correlation of y_j and y_t. Its mean square is E ρ² = 2(1 − ‖v‖₄⁴/s²)/(m − 1), because
# E w_i⁴ = (3s² − 2‖v‖₄⁴)/m² and a random half of the w_i² has a plus sign in ρ. By Laplace's
# integral, |P_i(ρ)| ≤ ρ² + 3(1 − ρ²)/(m² − 1).
#
# Concentration: all blocks together have at most D + m − 1 entries u_i, because the last block may
# be incomplete. With probability 1 − δ, all |u_i| ≤ U, where U² = (2s/m) log(2(D + m − 1)/δ)
# (Lemma 12). For fixed γ, the average of D cosines varies with the radii no more than a Gaussian of
# variance U² (D + m − 1)/D². The mean over the radii has a slope of at most U m/√D with respect to
# γ. On a sphere, with the logarithmic Sobolev constant m − 1, it varies no more than a Gaussian of
# variance U² m²/((m − 1)D).


@dataclass(frozen=True)
class FastfoodBound(Bound):
    """The bound of `fastfood`, with the variance on which it is based.

    Attributes:
        size: a = ‖K(0)‖₂.
        squared_lag: s, the squared lag divided by ℓ²; infinite for a bound over all lags.
        num_dims: d, the number of inputs.
    """

    size: float
    squared_lag: float
    num_dims: int

    @property
    def scale(self) -> float:
        return self.size

    @property
    def block(self) -> int:
        """m, the number of frequencies in a block, which is d padded to a power of two."""
        return FastfoodProjection.padded(self.num_dims)

    def variance(self, num_frequencies: int) -> float:
        """Return an upper bound of E‖K̃ − K‖₂², in units of the kernel squared.

        Args:
            num_frequencies: D, as in `Fastfood(D)`.
        """
        return self.size**2 * self._relative_variance / num_frequencies

    def log_probability(self, num_frequencies: int, error: float) -> float:
        m, n, relative = self.block, num_frequencies, error / self.size
        v, energy = self._relative_variance, num_frequencies * relative**2
        chebyshev = math.log(v / energy)
        bernstein = math.log(2) - energy / (2 * v + 4 / 3 * m * relative)
        half = 0.5 * math.log(n + m - 1)
        # the sum of both variances of the concentration, divided by the variance in Theorem 11
        spread = 1.0 if m == 1 else m / (m - 1) + (n + m - 1) / (n * m)
        rest = energy / (4 * spread * self.squared_lag)  # t² + 2 half t
        lipschitz = math.log(4) - rest / (half + math.sqrt(half**2 + rest) or 1.0)
        return min(chebyshev, bernstein, lipschitz)

    @property
    def _relative_variance(self) -> float:
        inflation = 1.0  # κ, a bound of the variance relative to independent frequencies
        if self.block > 1:
            spread = 2 * (1 - 1 / self.num_dims)  # (m − 1) E ρ², at most
            inflation += spread + 3 * (1 - spread / (self.block - 1)) / (self.block + 1)
        return 0.5 * inflation * math.expm1(-self.squared_lag) ** 2


def fastfood(
    kernel: Kernel, domain: Box | None = None, *, num_dims: int | None = None
) -> FastfoodBound:
    """Bound the error of `Fastfood` for an RBF kernel at one pair of points, in the spectral norm.

    K̃ is the kernel of D frequencies in independent blocks of m frequencies, where m ≥ d is the
    smallest power of two. For two points x and z that are chosen before the frequencies are drawn,
    with s = ‖(x − z)/ℓ‖² and a = ‖K(0)‖₂,

        P(‖K̃(x, z) − K(x, z)‖₂ ≥ aε)
            ≤ min{ V/(Dε²),  2 exp(−Dε²/(2V + 4mε/3)),  4e^{−t} } ,
        V = κ ½(1 − e^{−s})² ,    κ = 1 + 2(1 − 1/d) + 3(1 − 2(1 − 1/d)/(m − 1))/(m + 1) ,
        t² + t log(D + m − 1) = Dε²/(4cs) ,    c = m/(m − 1) + (D + m − 1)/(Dm) .

    For d = 1, κ = c = 1. The variance of the error is at most a²V/D. This is κ ≤ 3.03 times the
    variance with independent frequencies.

    The three expressions are Chebyshev's inequality, Bernstein's inequality for the blocks, and the
    concentration of Lipschitz functions of Gaussians. The last one is best for few blocks and small
    probabilities. V and s increase with the lag. The bound for a box is thus the bound for its
    diagonal. For one pair of points, pass the box ((0, |x₁ − z₁|), …).

    Source: Le et al. 2013, Corollary 10 and Theorem 11. In Corollary 10, V = ½(1 − e^{−s})² +
    6s²(e^{−s} + s/3). At lags of 0.5 to 2 lengthscales, this is 14 to 270 times the variance with
    independent frequencies. The V of this function follows from the same proof with the exact E ρ².
    Theorem 11 is for one block, D = m, without the factor S of `Fastfood`. It has c = 1, and D
    instead of D + m − 1. The factor S = r/‖G‖ needs c > 1, for example 1.0015 for D = m = 2048.

    Args:
        kernel: one `RBFKernel`, or a scaled form, `SeparableKernel` or `MultitaskKernel` of it. The
            bound is computed for its current hyperparameters.
        domain: ((low, high), …), the box that contains x and z, with one pair for each of the d
            inputs. If None, the bound is for all pairs of points, and the last expression is
            omitted.
        num_dims: d, the number of inputs. If None, it follows from `kernel` or `domain`.

    Returns:
        A `Bound`, where D is the number of frequencies, as in `Fastfood(D)`. Its method
        `variance(num_frequencies)` returns a²V/D, in units of the kernel squared.

    Raises:
        TypeError: `kernel` is not a gpytorch kernel.
        ValueError: `kernel` is not an RBF kernel, or is a sum, a product, a field kernel or a batch
            of kernels; the number of inputs is unknown; `domain` is not a finite box of the inputs.
        NotImplementedError: `kernel` is an `LCMKernel`, or has a spectrum with unknown moments.

    Example:
        The error of 4096 frequencies at any lag, and at a lag of 0.4 lengthscales:

        >>> import gp_orff, gpytorch
        >>> kernel = gpytorch.kernels.RBFKernel(ard_num_dims=16)
        >>> bound = gp_orff.bounds.fastfood(kernel)
        >>> round(bound.error(4096), 3)
        0.063
        >>> kernel.lengthscale = 1.0
        >>> bound = gp_orff.bounds.fastfood(kernel, domain=((0.0, 0.1),) * 16)
        >>> round(bound.error(4096), 4)
        0.0127
    """
    problem = Problem.of("fastfood", kernel, domain, "trace", num_dims)
    (term, spectrum), *others = problem.terms
    leaves = [leaf.spectrum for leaf in spectrum.leaves]
    single = not others and len(leaves) == 1 and term.factor.is_constant
    if not single or not leaves[0].is_gaussian:
        raise ValueError(
            "fastfood expects one RBFKernel, scaled or not, or a SeparableKernel or "
            f"MultitaskKernel of it, got {_in_words(problem)}; bound each term of a sum separately "
            "and add errors and probabilities, or measure the error with "
            "gp_orff.compare_with_exact"
        )
    if domain is None:
        dims = leaf_dims(term, term.leaves[0], num_dims)
        return FastfoodBound(problem.constants.size, math.inf, dims)
    dims = spectrum.leaves[0].dims
    lengthscale = leaves[0].lengthscale.flatten().expand(len(dims)).tolist()
    sides = (problem.domain[dim][1] - problem.domain[dim][0] for dim in dims)
    lag = sum((side / ell) ** 2 for side, ell in zip(sides, lengthscale, strict=True))
    # The error at lag 0 is 0, but the formula needs a positive s.
    return FastfoodBound(problem.constants.size, max(lag, 1e-100), len(dims))


def _in_words(problem: Problem) -> str:
    """Return the terms of a kernel in words, by the names of their classes."""
    return " + ".join(
        " * ".join(
            [type(term.factor).__name__] * (not term.factor.is_constant)
            + [type(leaf.kernel).__name__ for leaf in term.leaves]
        )
        for term, _ in problem.terms
    )
