"""Tails of the error at one lag: P(‖K̃(δ) − K(δ)‖ ≥ x) ≤ C exp(−D t(x)), D frequencies.

K̃(δ) = (1/D) Σ_j Y_j(δ), where Y_j = cos⟨ω_j, δ⟩ W_j are independent, with mean K(δ).
"""

import math
from dataclasses import dataclass
from typing import Protocol


class Tail(Protocol):
    """t(x), which increases in the error x."""

    @property
    def scale(self) -> float:
        """An error of the size of one Y_j, where a search begins."""

    def __call__(self, error: float) -> float:
        """t(x) at an error x."""


@dataclass(frozen=True)
class Hoeffding:
    """x²/(2a²) for scalars with |Y_j| ≤ a (Rahimi & Recht 2007, Section 3)."""

    largest: float  # a

    @property
    def scale(self) -> float:
        return self.largest

    def __call__(self, error: float) -> float:
        return 0.5 * (error / self.largest) ** 2


@dataclass(frozen=True)
class Bernstein:
    """x²/(2b + 2Ux/3) for ‖Y_j − K‖₂ ≤ U and b = ‖E(Y_j − K)²‖₂ (Brault et al. 2016, Thm B.1)."""

    variance: float  # b
    largest: float  # U

    @property
    def scale(self) -> float:
        return self.largest

    def __call__(self, error: float) -> float:
        return error**2 / (2 * self.variance + 2 * self.largest * error / 3)


@dataclass(frozen=True)
class Subexponential:
    """The tail for ‖Y_j − K‖₂ with an Orlicz norm of at most m/2 (Brault et al. 2016, Thm B.2).

    x²/(4b + 2xū/3) where xū ≤ 2(e − 1)b, else x/((e − 1)ū); ū = m log(2m²/b + 1). The variance in
    ū is that of one Y_j: the ū that is printed, 2m log(2^{3/2}(m/b)²), changes with the unit of K.
    """

    variance: float  # b
    orlicz: float  # m, twice the Orlicz norm

    @property
    def scale(self) -> float:
        return self.orlicz

    def __call__(self, error: float) -> float:
        b, m = self.variance, self.orlicz
        u = m * math.log1p(2 * m * m / b)
        if error * u <= 2 * (math.e - 1) * b:
            return error**2 / (4 * b + 2 * error * u / 3)
        return error / ((math.e - 1) * u)


@dataclass(frozen=True)
class Logarithmic:
    """x/(4M) · log(1 + 2Mx/σ²) for ‖Y_j‖_F ≤ M and σ² = E‖Y_j‖_F² (Minh 2016, Theorem 11).

    Its Lemma 15 holds for Y_j − K, which is bounded by 2M: M is printed where 2M is here.
    """

    variance: float  # σ²
    largest: float  # M

    @property
    def scale(self) -> float:
        return self.largest

    def __call__(self, error: float) -> float:
        double = 2 * self.largest
        return error / (2 * double) * math.log1p(double * error / self.variance)
