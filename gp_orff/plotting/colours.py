"""Scales of colours that panels share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from matplotlib.colors import Normalize


def norm_from_zero(*shades: np.ndarray) -> Normalize:
    from matplotlib.colors import Normalize

    return Normalize(0, max(np.abs(shade).max() for shade in shades) or 1)


def norm_about_zero(*shades: np.ndarray) -> Normalize:
    from matplotlib.colors import Normalize

    limit = norm_from_zero(*shades).vmax
    return Normalize(-limit, limit)
