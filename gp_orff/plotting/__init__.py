"""Plots of vector fields with matplotlib, which is imported when a function is called.

`overview` makes a complete figure of a posterior. All other functions draw on axes that you pass:

- maps: `plot_field` draws vectors, `plot_map` a scalar with a sign, and `plot_deviation` a standard
  deviation;
- on top of maps: `plot_uncertainty`, `plot_streamlines` and `plot_coastlines`;
- curves: `plot_calibration` draws the coverage of intervals, and `plot_energy_spectrum` the energy
  per wavenumber;
- panels: `plot_comparison` compares truth and posterior, and `plot_gain` shows where to measure
  next;
- layout: `plot_colorbar` adds a colour bar as high as its axes, and `title_panels` sets titles.

Arrays may be from NumPy or torch. On cartopy axes, pass the reference system of positions by
`transform=`.

For print, draw under the settings `STYLE`: `with plt.rc_context(gp_orff.plotting.STYLE): ...`. In
PDF and SVG files, lines and text are vectors, and shaded areas are pixels. The colour maps are
`MAGNITUDE` (quantities that are not negative), `DEVIATION` (standard deviations) and `SIGNED`
(quantities with a sign). Use `plt.subplots(..., layout="compressed")` for panels of equal size.
"""

from gp_orff.plotting.curves import plot_calibration, plot_energy_spectrum
from gp_orff.plotting.drawing import (
    DEVIATION,
    MAGNITUDE,
    SIGNED,
    STYLE,
    plot_colorbar,
    title_panels,
)
from gp_orff.plotting.fields import (
    plot_comparison,
    plot_deviation,
    plot_field,
    plot_gain,
    plot_map,
    plot_streamlines,
    plot_uncertainty,
)
from gp_orff.plotting.geography import plot_coastlines
from gp_orff.plotting.overview import overview

__all__ = [
    "DEVIATION",
    "MAGNITUDE",
    "SIGNED",
    "STYLE",
    "overview",
    "plot_calibration",
    "plot_coastlines",
    "plot_colorbar",
    "plot_comparison",
    "plot_deviation",
    "plot_energy_spectrum",
    "plot_field",
    "plot_gain",
    "plot_map",
    "plot_streamlines",
    "plot_uncertainty",
    "title_panels",
]
