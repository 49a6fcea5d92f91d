"""Constants of the distribution of Y = Σ_q cos⟨ω^q, δ⟩ W_q, one sample of the features of a kernel.

q are the terms of the kernel, and W_q = outputscale · A(ω) · importance weight. Frequencies of
different terms are independent. All constants of a sum are sums: norms by the triangle inequality,
variances by independence.
"""

from dataclasses import astuple, dataclass
from functools import reduce, singledispatch
from operator import mul

import torch

from gp_orff.features.bounds.leaf_moments import Moments, moments
from gp_orff.features.bounds.variance import field_variance, scalar_variance, square_bound
from gp_orff.features.frequencies.random import Measure
from gp_orff.features.frequencies.rule import TermSpectrum
from gp_orff.kernels.closed_form import at_zero
from gp_orff.kernels.factors import Factor, Gradient, Mixing, Solenoidal
from gp_orff.kernels.tree import Term


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
        "@gp_orff.features.bounds.constants.register"
    )


@torch.no_grad()
def term_constants(term: Term, spectrum: TermSpectrum, measure: Measure) -> Constants:
    """The constants of a term.

    Raises:
        NotImplementedError: a term that shares its frequencies with another one.
    """
    if spectrum.share > 1:
        raise NotImplementedError(
            "no bound is known for the terms of an LCMKernel on shared frequencies; measure the "
            "error with gp_orff.compare_with_exact"
        )
    orders = tuple(measure.order(leaf) for leaf in spectrum.leaves)
    return constants(term.factor, term, spectrum, orders)


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
