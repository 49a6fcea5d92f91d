"""Plots of vector fields with matplotlib, which is imported when a function is called.

`overview` makes a figure of a posterior for a first look. The other functions draw on the caller's
axes: `plot_field` vectors, `plot_map` what has a sign, and `plot_deviation` a standard deviation;
over these `plot_uncertainty`, `plot_streamlines` and `plot_coastlines`. `plot_comparison` draws
four panels, `plot_calibration` the coverage of error bars, `plot_energy_spectrum` energy per
wavenumber, and `plot_gain` where to measure next. `plot_colorbar` draws a bar as high as its axes,
and `title_panels` sets titles with letters. Arrays are NumPy's or torch's.

For print, draw under the settings `STYLE`: `with plt.rc_context(gp_orff.plotting.STYLE): ...`.
`savefig` then writes 300 dots per inch; saved as PDF or SVG, figures are vectors, but for shaded
areas, which are pixels. The colour maps are `MAGNITUDE`, `DEVIATION` and, of what has a sign,
`SIGNED`. Maps of one shape have panels of one size with `plt.subplots(..., layout="compressed")`.
On axes of cartopy, `transform=` is the reference system of positions.
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
