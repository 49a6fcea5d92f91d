"""Colours, sizes and titles that all figures share."""

from __future__ import annotations

from string import ascii_lowercase
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes

# Colour maps, all safe for colour-blind readers.

MAGNITUDE = "viridis"
"""The colour map of what is never negative, such as a speed."""
DEVIATION = "cividis"
"""The colour map of standard deviations."""
SIGNED = "PuOr_r"
"""The colour map of what has a sign, on a scale that is symmetric about zero."""

STYLE = {
    "axes.formatter.use_mathtext": True,
    "axes.labelsize": "medium",
    "axes.titlelocation": "left",
    "axes.titlesize": "medium",
    "figure.constrained_layout.h_pad": 0.08,
    "figure.constrained_layout.w_pad": 0.08,
    "font.size": 9,
    "hatch.linewidth": 0.5,
    "image.cmap": MAGNITUDE,
    "legend.fontsize": "small",
    "legend.frameon": False,
    "pdf.fonttype": 42,
    "savefig.bbox": "tight",
    "savefig.dpi": 300,
    "xtick.labelsize": "small",
    "ytick.labelsize": "small",
}
"""Settings of matplotlib for print: 300 dots per inch, small text, and fonts that a PDF embeds."""


def title_panels(axes: Axes | Sequence[Axes] | np.ndarray, titles: Sequence[str]) -> None:
    """Set titles at the left of panels, with the letters (a), (b), ... if there are several.

    Args:
        axes: matplotlib axes in the order of their letters.
        titles: one for each; no capital at the beginning.

    Raises:
        ValueError: another number of titles than of axes, or more than 26.

    Example:
        >>> import matplotlib
        >>> matplotlib.use("agg")
        >>> from matplotlib import pyplot as plt
        >>> from gp_orff.plotting import STYLE, title_panels
        >>> with plt.rc_context(STYLE):
        ...     fig, axes = plt.subplots(1, 2, layout="compressed")
        ...     title_panels(axes, ["mean", "standard deviation"])
        >>> [ax.get_title(loc="left") for ax in axes]
        ['(a) mean', '(b) standard deviation']
        >>> plt.close(fig)
    """
    axes = np.ravel(axes)
    if not len(axes) == len(titles) <= len(ascii_lowercase):
        raise ValueError(
            f"title_panels expects a title for each of {len(axes)} axes, at most 26, got "
            f"{len(titles)}"
        )
    letters = ascii_lowercase[: len(axes)]
    for ax, letter, title in zip(axes, letters, titles, strict=True):
        ax.set_title(f"({letter}) {title}" if len(axes) > 1 else title, loc="left")
