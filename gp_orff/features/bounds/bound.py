"""A bound of the error of random features as a value, with its inverses."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from gp_orff.features.bounds.tails import Tail


class Bound(ABC):
    """A bound of the probability that random features have a larger error than ε, with inverses.

    The functions of `gp_orff.bounds` return it; you need not build one. Any one of three numbers
    follows from the other two:

    - D, as in `MonteCarlo(D)`, by `num_frequencies(error, confidence)`;
    - the error ε of the kernel, by `error(num_frequencies, confidence)`;
    - the probability of a larger error, by `probability(num_frequencies, error)`.

    The error is a norm of K̃(x, z) − K(x, z), K̃ being the kernel of D random frequencies, at
    one pair of points or the largest over all x and z in a box. It is absolute, in units of the
    kernel, which are those of the outputs squared: for 5 %, take 0.05 times the norm of K(0).

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
        """An error of the size of that of one frequency, where a search begins."""

    @abstractmethod
    def log_probability(self, num_frequencies: int, error: float) -> float:
        """The logarithm of the bound, which decreases in both arguments; positive ones say nothing.

        Args:
            num_frequencies: D, of each term of a sum.
            error: ε > 0, in units of the kernel, which are those of the outputs squared.
        """

    def probability(self, num_frequencies: int, error: float) -> float:
        """A probability that is not exceeded: that of an error of at least `error`.

        It is 1 where the bound says nothing.

        Args:
            num_frequencies: D, the number in `MonteCarlo(D)`, of each term of a sum.
            error: ε > 0, in units of the kernel, which are those of the outputs squared.

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
            ε, in units of the kernel, which are those of the outputs squared.

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
            error: ε > 0, in units of the kernel, which are those of the outputs squared.
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
