"""Tables of the largest correlations of a kernel from each lag on, by Fourier transforms."""

import math
from dataclasses import dataclass, field

import numpy as np
import torch
from jaxtyping import Complex, Float, Int
from torch import Tensor

_STEP = 0.25  # of the lags of a table
_SHARE = 0.25  # of a period that a table has; half a period is known
_LEAST_POWER = 0.1  # of the lag, by which correlations fall beyond a table
_FARTHEST = 1e9  # the longest lag that is returned
_DIFFERENCE = 0.1  # the largest relative difference of two tables that agree
_CHUNK = 16  # lengths of ω′ at a time


def frequency_step(num_lags: int) -> float:
    """The spacing of the frequencies of a transform with `num_lags` lags in its period."""
    return 2 * math.pi / (_STEP * num_lags)


@dataclass(frozen=True)
class CorrelationTable:
    """A bound of correlations that decreases with the lag, continued by a power of the lag.

    Args:
        sizes: the sizes of the kernel at the lags 0, `_STEP`, … up to half of the period.
        num_lags: the number of lags in the period.
        resolved: whether another table agrees; if not, correlations may not fall beyond the table.
    """

    sizes: Float[np.ndarray, "l"]
    num_lags: int
    resolved: bool = True
    bounds: Float[np.ndarray, "l"] = field(init=False)

    def __post_init__(self):
        largest = np.maximum.accumulate(self.sizes[::-1])[::-1]
        object.__setattr__(self, "bounds", largest[: 1 + int(_SHARE * self.num_lags)])

    @property
    def longest(self) -> float:
        """The longest lag of the table."""
        return _STEP * (len(self.bounds) - 1)

    @property
    def power(self) -> float:
        """The power of the lag by which the bound falls beyond the table."""
        return max(self._fall, _LEAST_POWER) if self.resolved else _LEAST_POWER

    @property
    def _fall(self) -> float:
        """The power by which the bound falls over the second half of the table."""
        half, last = (max(self.bounds[i], 1e-300) for i in (len(self.bounds) // 2, -1))
        return math.log2(half / last)

    def __call__(self, lag: float) -> float:
        """The bound at a lag."""
        if lag <= self.longest:
            return float(np.interp(lag, _STEP * np.arange(len(self.bounds)), self.bounds))
        return float(self.bounds[-1] * (lag / self.longest) ** -self.power)

    def lag(self, bound: float) -> float:
        """The lag from which the bound of correlations is below this."""
        if self.bounds[-1] <= bound:
            return float(_STEP * np.searchsorted(-self.bounds, -bound))
        log_lag = math.log(self.longest) + math.log(self.bounds[-1] / bound) / self.power
        return math.exp(min(log_lag, math.log(_FARTHEST)))

    def agrees(self, shorter: "CorrelationTable", floor: float) -> bool:
        """Whether this table falls, and a shorter one says the same, down to a floor.

        Correlations beyond half a period are at other lags in each of them.
        """
        if self._fall < _LEAST_POWER and self.bounds[-1] > floor:
            return False
        other = np.array([shorter(_STEP * i) for i in range(len(self.bounds))])
        return np.allclose(self.bounds, other, rtol=_DIFFERENCE, atol=floor)


def correlation_table(
    density: Float[Tensor, "*b m k n p p"], opposite: Int[Tensor, "n"], num_lags: int
) -> CorrelationTable:
    """The table of ∫ ‖∫ e^{irω} G(ω, ω′) dω‖_F dω′ / ‖K(0)‖_F for a density G, even in (ω, ω′).

    Args:
        density: G at m equispaced frequencies ω ≥ 0, times volumes, half of them at ω = 0, and for
            ω′ of k lengths and n directions.
        opposite: the index of the opposite of each direction.
        num_lags: the number of lags in the period of the transform.
    """
    total, sizes = 0.0, 0.0
    for part in density.split(_CHUNK, dim=-4):
        waves = _waves(part, opposite, num_lags)
        total = total + waves[..., 0, :, :, :, :].real.sum((-4, -3))
        sizes = sizes + waves.abs().square().sum((-1, -2)).sqrt().sum((-1, -2))
    shares = sizes / torch.linalg.matrix_norm(total).unsqueeze(-1)
    return CorrelationTable(shares.reshape(-1, shares.shape[-1]).amax(0).cpu().numpy(), num_lags)


def _waves(
    density: Float[Tensor, "*b m k n p p"], opposite: Int[Tensor, "n"], num_lags: int
) -> Complex[Tensor, "*b l k n p p"]:
    """∫ e^{irω} G dω at lags r up to half a period."""
    count, rounds = density.shape[-5], -(-density.shape[-5] // num_lags)
    padded = density.new_zeros(*density.shape[:-5], rounds * num_lags, *density.shape[-4:])
    padded[..., :count, :, :, :, :] = density
    folded = padded.unflatten(-5, (rounds, num_lags)).sum(-6)  # e^{irω} has this period in ω
    half = torch.fft.fft(folded, dim=-5)[..., : num_lags // 2 + 1, :, :, :, :]
    return half + half[..., opposite, :, :].conj()  # G(−ω, ω′) = G(ω, −ω′)
