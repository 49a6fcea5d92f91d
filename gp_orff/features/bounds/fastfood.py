"""The error of Fastfood at one pair of points, whose frequencies depend on one another.

One block S H G Π H B/√m of m frequencies, v = (x − z)/ℓ, s = ‖v‖²: with w = HBv/√m, u = Πw and the
unit vector γ = G/‖G‖, its phases are r_j y_j, y_j = Σ_i H_ji γ_i u_i, the radii r_j ~ χ_m being
independent.

Variance: given u, the covariance of two cosines is Σ_i e_i P_i(ρ), i = 2, 4, …, over normalised
Gegenbauer polynomials in m dimensions, where e_i ≥ 0, Σ e_i ≤ Var cos = ½(1 − e^{−s})², and ρ is
the correlation of y_j and y_t. E ρ² = 2(1 − ‖v‖₄⁴/s²)/(m − 1), since E w_i⁴ = (3s² − 2‖v‖₄⁴)/m² and
a random half of the w_i² has a plus sign in ρ. By Laplace's integral,
|P_i(ρ)| ≤ ρ² + 3(1 − ρ²)/(m² − 1).

Concentration: all blocks have D + m − 1 entries u_i at most, if the last one is cut. With a
probability of 1 − δ all |u_i| ≤ U, U² = (2s/m) log(2(D + m − 1)/δ) (Lemma 12). Given γ, the radii
move the average of D cosines no more than a Gaussian of variance U² (D + m − 1)/D². Its mean over r
has a slope in γ of at most U m/√D, and on a sphere (of logarithmic Sobolev constant m − 1) it moves
no more than a Gaussian of variance U² m²/((m − 1)D).
"""

import math
from dataclasses import dataclass

from gpytorch.kernels import Kernel

from gp_orff.features.bounds.bound import Bound
from gp_orff.features.bounds.problem import Problem
from gp_orff.features.domain import Box
from gp_orff.features.phases import FastfoodProjection
from gp_orff.kernels.factors import Mixing
from gp_orff.kernels.spectra.elliptical import Gaussian
from gp_orff.kernels.tree import leaf_dims

_SMALLEST = 1e-100  # s of one point, whose error is 0


@dataclass(frozen=True)
class FastfoodBound(Bound):
    """The bound of `fastfood`, and the variance that it contains."""

    size: float  # a = ‖K(0)‖₂
    squared_lag: float  # s, in units of the lengthscales; infinite for all lags
    num_dims: int  # d

    @property
    def scale(self) -> float:
        return self.size

    @property
    def block(self) -> int:
        """The number of frequencies in a block: d, padded to a power of two."""
        return FastfoodProjection.padded(self.num_dims)

    def variance(self, num_frequencies: int) -> float:
        """The variance of the norm of K̃ − K that D frequencies do not exceed.

        Args:
            num_frequencies: D, the number in `Fastfood(D)`.
        """
        return self.size**2 * self._relative_variance / num_frequencies

    def log_probability(self, num_frequencies: int, error: float) -> float:
        m, n, relative = self.block, num_frequencies, error / self.size
        v, energy = self._relative_variance, num_frequencies * relative**2
        chebyshev = math.log(v / energy)
        bernstein = math.log(2) - energy / (2 * v + 4 / 3 * m * relative)
        half = 0.5 * math.log(n + m - 1)
        rest = energy / (4 * _spread(m, n) * self.squared_lag)  # t² + 2 half t
        lipschitz = math.log(4) - rest / (half + math.sqrt(half**2 + rest) or 1.0)
        return min(chebyshev, bernstein, lipschitz)

    @property
    def _relative_variance(self) -> float:
        return 0.5 * _inflation(self.num_dims, self.block) * math.expm1(-self.squared_lag) ** 2


def _inflation(num_dims: int, block: int) -> float:
    """κ: a bound of the variance, over that of independent frequencies."""
    if block == 1:
        return 1.0
    spread = 2 * (1 - 1 / num_dims)  # (m − 1) E ρ², at most
    return 1 + spread + 3 * (1 - spread / (block - 1)) / (block + 1)


def _spread(block: int, num_frequencies: int) -> float:
    """c: the variances of both steps of the concentration, over that of Theorem 11."""
    m, n = block, num_frequencies
    return 1.0 if m == 1 else m / (m - 1) + (n + m - 1) / (n * m)


def fastfood(
    kernel: Kernel, domain: Box | None = None, *, num_dims: int | None = None
) -> FastfoodBound:
    """Bound the error of `Fastfood` for an RBF kernel at one pair of points, in the spectral norm.

    K̃ is the kernel of D frequencies in independent blocks of m = 2^k ≥ d. For two points x and z
    that are chosen before they are drawn, with s = ‖(x − z)/ℓ‖² and a = ‖K(0)‖₂,

        P(‖K̃(x, z) − K(x, z)‖₂ ≥ aε)
            ≤ min{ V/(Dε²),  2 exp(−Dε²/(2V + 4mε/3)),  4e^{−t} } ,
        V = κ ½(1 − e^{−s})² ,    κ = 1 + 2(1 − 1/d) + 3(1 − 2(1 − 1/d)/(m − 1))/(m + 1) ,
        t² + t log(D + m − 1) = Dε²/(4cs) ,    c = m/(m − 1) + (D + m − 1)/(Dm) .

    a²V/D bounds the variance, and κ ≤ 3.03 compares it with that of independent frequencies. For
    d = 1, κ = c = 1. The three bounds are Chebyshev's inequality, Bernstein's for the blocks, and
    that of Lipschitz functions of Gaussians, for few blocks and small probabilities. V and s
    increase with the lag: the bound for a box is that of its diagonal. In the box
    ((0, |x₁ − z₁|), …) it is that of one pair.

    Le et al. 2013, Corollary 10 and Theorem 11. Corollary 10 has V = ½(1 − e^{−s})² +
    6s²(e^{−s} + s/3) (it prints 2/n for the 1/2n of Theorem 9), which allows 14 to 270 times the
    variance of independent frequencies at lags of 0.5 to 2 lengthscales. The variance here comes
    from the same proof with E ρ² as it is. Theorem 11 is for one block, D = m, without S: it has
    2δ = 4e^{−t} with c = 1 and D for D + m − 1. Its (52) prints √(2L log(2/δ)) for
    L√(2 log(2/δ)). The radii of `Fastfood`, S = r/‖G‖_F, need c > 1, which is
    1.0015 for D = m = 2048.

    Args:
        kernel: one `RBFKernel`, scaled or not, or a `SeparableKernel` or `MultitaskKernel` of it,
            at its present hyperparameters.
        domain: ((low, high), …), the box of the inputs, one pair for each of the d inputs. Both x
            and z are in it. If None, the bound is for all pairs of points; t is then 0.
        num_dims: d, the number of inputs; what the kernel or `domain` says if None.

    Returns:
        A `Bound`. Its D is the number of frequencies in `Fastfood(D)`. It also has
        `variance(num_frequencies)`, in units of the kernel squared.

    Raises:
        TypeError: `kernel` is not a gpytorch kernel.
        ValueError: another kernel than RBF, sums and products of kernels, and fields; a number of
            inputs that is not known; a domain that is no finite box of the inputs; a batch of
            kernels.
        NotImplementedError: an `LCMKernel` or another kernel whose moments are not known.

    Example:
        >>> import gp_orff, gpytorch
        >>> kernel = gpytorch.kernels.RBFKernel(ard_num_dims=16)
        >>> bound = gp_orff.bounds.fastfood(kernel)
        >>> round(bound.error(4096), 3)
        0.063
        >>> lag = ((0.0, 0.1),) * 16  # ‖x − z‖ = 0.4
        >>> kernel.lengthscale = 1.0
        >>> round(gp_orff.bounds.fastfood(kernel, lag).error(4096), 4)
        0.0127
    """
    problem = Problem.of("fastfood", kernel, domain, "trace", num_dims)
    (term, spectrum), *others = problem.terms
    leaves = [leaf.spectrum for leaf in spectrum.leaves]
    single = not others and len(leaves) == 1 and isinstance(term.factor, Mixing)
    if not single or not isinstance(leaves[0], Gaussian):
        raise ValueError(
            "fastfood expects one RBFKernel, scaled or not, or a SeparableKernel or "
            f"MultitaskKernel of it, got {_in_words(problem)}; bound each term of a sum by itself "
            "(errors and probabilities add up), or measure the error with "
            "gp_orff.compare_with_exact"
        )
    if domain is None:
        dims = leaf_dims(term, term.leaves[0], num_dims)
        return FastfoodBound(problem.constants.size, math.inf, dims)
    dims = spectrum.leaves[0].dims
    lengthscale = leaves[0].lengthscale.flatten().expand(len(dims)).tolist()
    sides = (problem.domain[dim][1] - problem.domain[dim][0] for dim in dims)
    lag = sum((side / ell) ** 2 for side, ell in zip(sides, lengthscale, strict=True))
    return FastfoodBound(problem.constants.size, max(lag, _SMALLEST), len(dims))


def _in_words(problem: Problem) -> str:
    """The terms of a kernel by their classes."""
    return " + ".join(
        " * ".join(
            [type(term.factor).__name__] * (not isinstance(term.factor, Mixing))
            + [type(leaf.kernel).__name__ for leaf in term.leaves]
        )
        for term, _ in problem.terms
    )
