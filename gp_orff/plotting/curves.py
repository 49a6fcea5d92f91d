"""Curves: energy per wavenumber, and the coverage of prediction intervals."""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike

from gp_orff.plotting.drawing import array

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes
    from matplotlib.collections import PolyCollection
    from matplotlib.lines import Line2D


def plot_energy_spectrum(
    ax: Axes,
    wavenumbers: ArrayLike,
    mean: ArrayLike,
    low: ArrayLike | None = None,
    high: ArrayLike | None = None,
    *,
    slopes: Sequence[float] = (),
    label: str | None = None,
    color: str = "C0",
) -> Line2D:
    """Draw energy per wavenumber on logarithmic axes, with an interval and reference slopes.

    Args:
        ax: matplotlib axes. The function sets logarithmic scales, but no labels and titles.
        wavenumbers: the wavenumbers k (m,), positive.
        mean: the energies E(k) (m,), positive, such as `field.energy_spectrum().total.mean`.
        low, high: the limits (m,) of an interval, which is drawn as a band. By default, there is no
            band.
        slopes: exponents s of reference lines k^s, such as (-3, -5 / 3). They are thin lines above
            the middle of the curve, with the exponent as a label.
        label: the name of the curve, for a legend.
        color: a matplotlib colour of the curve and the band.

    Returns:
        The line of the curve.

    Raises:
        ValueError: The shapes of arrays do not fit, or values are not positive.

    Example:
        >>> import matplotlib, numpy as np
        >>> matplotlib.use("agg")
        >>> from matplotlib import pyplot as plt
        >>> from gp_orff.plotting import plot_energy_spectrum
        >>> fig, ax = plt.subplots()
        >>> k = np.geomspace(1, 10, 20)
        >>> curve = plot_energy_spectrum(
        ...     ax, k, k**-3, 0.8 * k**-3, 1.3 * k**-3, slopes=[-3]
        ... )
        >>> plt.close(fig)
    """
    k, mean, low, high = map(array, (wavenumbers, mean, low, high))
    for values in (k, mean, low, high):
        if values is not None and (values.shape != (k.size,) or not (values > 0).all()):
            raise ValueError(
                f"plot_energy_spectrum expects positive values of shape ({k.size},), one for each "
                f"wavenumber, got shape {values.shape} with the least value "
                f"{values.min(initial=np.inf):.3g}"
            )
    ax.set(xscale="log", yscale="log")
    (curve,) = ax.plot(k, mean, color=color, linewidth=2, label=label)
    if low is not None and high is not None:
        ax.fill_between(k, low, high, color=color, alpha=0.25, linewidth=0)
    middle = len(k) // 2
    for slope in slopes:
        line = 5 * mean[middle] * (k / k[middle]) ** slope
        ax.plot(k, line, color="0.4", linewidth=0.8, linestyle="--")
        above = {"xytext": (4, 4), "textcoords": "offset points", "color": "0.4"}
        ratio = Fraction(slope).limit_denominator(9)
        text = str(ratio) if abs(ratio - slope) < 1e-9 else f"{slope:.3g}"
        ax.annotate(text.replace("-", "−"), (k[middle], line[middle]), fontsize="small", **above)
    return curve


def plot_calibration(
    ax: Axes,
    pit: ArrayLike,
    *,
    block: ArrayLike | None = None,
    independent: float | None = None,
    label: str | None = "all",
    color: str = "C0",
) -> tuple[Line2D, PolyCollection]:
    """Draw the observed coverage of central prediction intervals against their nominal coverage.

    The observed coverage is the fraction of observed values inside the intervals. If the curve is
    below the diagonal, error bars are too small. The grey band is the 95 % interval of the observed
    coverage for a calibrated model and `independent` values, from binomial quantiles.

    Values of one block often have common errors. The thin line of a single block may therefore be
    outside the band. With few blocks, the curve of all values may be outside too.

    Args:
        ax: matplotlib axes. The function sets labels and limits, but no title.
        pit: the predicted probability (M,) of a smaller value, for each of M observed values. An
            example is `model.cross_validate(x, y).pit`.
        block: the block (M,) of each value, such as `model.cross_validate(x, y).block`. Each block
            has a thin line. By default, there are no thin lines.
        independent: the effective number of independent values. The default is M.
        label: the name of the curve, for a legend.
        color: a matplotlib colour of the curve.

    Returns:
        The line of the curve, and the band.

    Raises:
        ValueError: The shapes of arrays do not fit, or `pit` are not probabilities.

    Example:
        >>> import matplotlib, numpy as np
        >>> matplotlib.use("agg")
        >>> from matplotlib import pyplot as plt
        >>> from gp_orff.plotting import plot_calibration
        >>> fig, ax = plt.subplots()
        >>> curve, band = plot_calibration(
        ...     ax, np.random.default_rng(0).uniform(size=300)
        ... )
        >>> plt.close(fig)
    """
    pit, block = array(pit), array(block)
    if pit.ndim != 1 or not len(pit) or not ((pit >= 0) & (pit <= 1)).all():
        raise ValueError(
            "plot_calibration expects pit as probabilities (M,) between 0 and 1, got shape "
            f"{pit.shape}; give CrossValidation.pit"
        )
    if block is not None and block.shape != pit.shape:
        raise ValueError(
            f"plot_calibration expects block of shape {pit.shape}, got {block.shape}; give "
            "CrossValidation.block"
        )
    levels = np.linspace(0, 1, 101)

    def coverage(values: np.ndarray) -> np.ndarray:
        """The fraction of values inside the central interval of each level."""
        return np.searchsorted(np.sort(2 * np.abs(values - 0.5)), levels, "right") / len(values)

    from scipy.stats import binom

    trials = max(round(len(pit) if independent is None else independent), 1)
    low, high = (binom.ppf(q, trials, levels).clip(0) / trials for q in (0.025, 0.975))
    band = ax.fill_between(levels, low, high, color="0.85", linewidth=0)
    ax.plot([0, 1], [0, 1], color="0.4", linewidth=0.8, linestyle="--")
    for name in () if block is None else np.unique(block):
        ax.plot(levels, coverage(pit[block == name]), color=color, linewidth=0.5, alpha=0.4)
    (curve,) = ax.plot(levels, coverage(pit), color=color, linewidth=2, label=label)
    ax.set(xlim=(0, 1), ylim=(0, 1), aspect="equal")
    ax.set(xlabel="nominal coverage of the intervals", ylabel="observed coverage")
    return curve, band
