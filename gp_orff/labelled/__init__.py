"""Observations from an xarray Dataset, and a posterior as an xarray Dataset.

Positions in degrees go to a local plane in km and come back, units are carried through derivatives
and integrals, and total-field anomalies get the directions of the main field. xarray, pyproj and
ppigrf are optional, `pip install gp_orff[xarray]`, `[geo]` and `[geomag]`, and imported when a
function needs them.
"""

from gp_orff.labelled.directions import beams, total_field
from gp_orff.labelled.maps import on_grid
from gp_orff.labelled.plane import LocalPlane
from gp_orff.labelled.reading import files, readings

__all__ = ["LocalPlane", "beams", "files", "on_grid", "readings", "total_field"]
