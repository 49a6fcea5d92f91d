"""A quadrature of the plane in rings, for spectra that are not smooth at k = 0.

The spectrum |k| e^{−|k|Z} of a harmonic field has a cusp at k = 0. The sum over a lattice of
period P then differs from the integral by images of size P⁻³, which fall slowly. In polar
coordinates the integrand is analytic: Gauss–Legendre nodes on panels of |k|, each twice as long as
the one before, and equidistant angles on every ring converge exponentially, and need fewer waves.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import scipy.optimize
import scipy.special
from jaxtyping import Float

_FEWEST, _MOST = 2, 400  # nodes of a panel
_FIRST = 4.0  # |k|Z of the longest Z at the end of the first panel
_FINER = 12  # further nodes of the rule that tells the error of another


@dataclass(frozen=True)
class Depths:
    """The distances Z between heights of pairs of points and mirror images, and their variances.

    Args:
        shortest: Z of each plane of sources, for two points at the height of largest variance.
        variances: of the field at that height, from each plane.
    """

    shortest: Float[np.ndarray, "J"]
    variances: Float[np.ndarray, "J"]

    def tail(self, k: float) -> float:
        """The share of the variance beyond |k|."""
        shares = self.variances / self.variances.sum()
        return float(shares @ scipy.special.gammaincc(3, k * self.shortest))

    def cutoff(self, share: float) -> float:
        """|k| beyond which this share of the variance lies."""
        high = scipy.special.gammainccinv(3, share) / self.shortest.min()
        return scipy.optimize.brentq(lambda k: self.tail(k) - share, 0.0, 1.01 * high, rtol=1e-6)


@dataclass(frozen=True)
class Rings:
    """Waves with weights: ∫ g(k) d²k ≈ Σ weights · g(k) over half the plane, for even g."""

    wavevectors: Float[np.ndarray, "D 2"]
    weights: Float[np.ndarray, "D"]

    @classmethod
    def of(
        cls, cutoff: float, depths: Depths, longest: float, lag: float, tolerance: float
    ) -> "Rings":
        """Rings up to a cut-off, for Z up to `longest` and horizontal lags up to `lag`.

        Errors are relative to the variance, Σ_j of 2/Z³ at the shortest Z.
        """
        shortest = float(depths.shortest.min())
        radii, lengths = _radii(cutoff, shortest, longest, lag, tolerance)
        counts = [_angles(k, shortest, lag, tolerance) for k in radii]
        angles = [np.pi * (np.arange(n) + 0.5 * (i % 2)) / n for i, n in enumerate(counts)]
        waves = [
            k * np.stack([np.cos(angle), np.sin(angle)], axis=-1)
            for k, angle in zip(radii, angles, strict=True)
        ]
        weights = [
            np.full(n, 2 * np.pi * k * length / n)
            for k, length, n in zip(radii, lengths, counts, strict=True)
        ]
        return cls(np.concatenate(waves), np.concatenate(weights))


def _angles(k: float, shortest: float, lag: float, tolerance: float) -> int:
    """The number of angles in half a ring: those beyond carry J_n(k·lag), and the directions, whose
    products are of second order, move n by two."""
    share = max(0.5 * (k * shortest) ** 2 * np.exp(-k * shortest), 1e-300)
    orders = np.arange(2, 2 * int(k * lag) + 60)
    large = np.abs(scipy.special.jv(orders - 2, k * lag)) * share > tolerance
    most = int(orders[large].max()) + 1 if large.any() else 4
    return max(-(-most // 2), 2)


def _radii(
    cutoff: float, shortest: float, longest: float, lag: float, tolerance: float
) -> tuple[Float[np.ndarray, "m"], Float[np.ndarray, "m"]]:
    """Nodes and weights of ∫ dk from 0 to the cut-off."""
    panels = max(0, int(np.ceil(np.log2(cutoff * longest / _FIRST))))
    edges = cutoff * 2.0 ** np.arange(-panels, 1)
    edges = np.concatenate([[0.0], edges])
    parts = [_panel(low, high, shortest, longest, lag, tolerance) for low, high in pairwise(edges)]
    return tuple(np.concatenate(values) for values in zip(*parts, strict=True))


def _panel(
    low: float, high: float, shortest: float, longest: float, lag: float, tolerance: float
) -> tuple[Float[np.ndarray, "n"], Float[np.ndarray, "n"]]:
    """The Gauss–Legendre rule with the fewest nodes that is exact to the tolerance for
    k² e^{−kZ + ikr}, relative to ∫ k² e^{−kZ}, Z and r at their ends and between."""
    z = np.geomspace(shortest, longest, 5)[:, None, None]
    r = np.array([0.0, 0.5, 1.0])[:, None] * lag
    exact = None
    for n in range(_FEWEST, _MOST):
        value = _integral(low, high, z, r, n)
        if exact is None or n % _FINER == 0:
            exact = _integral(low, high, z, r, n + 2 * _FINER)
        if np.abs(value - exact).max() < tolerance:
            break
    return _gauss(low, high, n)


def _integral(
    low: float, high: float, z: Float[np.ndarray, "a 1 1"], r: Float[np.ndarray, "b 1"], n: int
) -> np.ndarray:
    k, w = _gauss(low, high, n)
    return (w * 0.5 * z**3 * k**2 * np.exp(-k * z + 1j * k * r)).sum(-1)


def _gauss(low: float, high: float, n: int) -> tuple[np.ndarray, np.ndarray]:
    x, w = np.polynomial.legendre.leggauss(n)
    return low + 0.5 * (high - low) * (1 + x), 0.5 * (high - low) * w
