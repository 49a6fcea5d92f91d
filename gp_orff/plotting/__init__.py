"""Plots of vector fields with matplotlib, which is imported when a function is called.

`overview` makes a figure of a posterior for a first look. The other functions draw on the caller's
axes: `plot_field` or `plot_map`, then `plot_uncertainty` or `plot_streamlines` over it;
`plot_comparison` draws four panels, `plot_calibration` how many readings error bars hold,
`plot_energy_spectrum` energy per wavenumber, and `plot_gain` where to measure next. `plot_colorbar`
draws a bar as high as its axes. Maps of one shape have panels of one size with
`plt.subplots(..., layout="compressed")`. Arrays are NumPy's or torch's. Saved as PDF or SVG,
figures are vectors, but for shaded areas, which are pixels at the `dpi` of `savefig`.
"""

from gp_orff.plotting.curves import plot_calibration, plot_energy_spectrum
from gp_orff.plotting.drawing import plot_colorbar
from gp_orff.plotting.fields import plot_field, plot_gain, plot_streamlines, plot_uncertainty
from gp_orff.plotting.maps import plot_comparison, plot_map
from gp_orff.plotting.overview import overview

__all__ = [
    "overview",
    "plot_calibration",
    "plot_colorbar",
    "plot_comparison",
    "plot_energy_spectrum",
    "plot_field",
    "plot_gain",
    "plot_map",
    "plot_streamlines",
    "plot_uncertainty",
]
