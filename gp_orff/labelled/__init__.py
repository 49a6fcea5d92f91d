"""Observations from an xarray Dataset, and a posterior as an xarray Dataset.

`readings` and `files` read observations, `total_field` reads magnetic anomalies, and `beams` gives
the positions and directions of radar observations. `on_grid` writes a posterior to a Dataset.
`LocalPlane` projects positions from degrees to km and back. Derivatives and integrals get units
that follow from those of the data.

The packages xarray, pyproj and ppigrf are optional, and imported when a function needs them. Run
`pip install gp_orff[xarray,geo,geomag]` to install all three.
"""

from gp_orff.labelled.directions import beams, total_field
from gp_orff.labelled.maps import on_grid
from gp_orff.labelled.plane import LocalPlane
from gp_orff.labelled.reading import files, readings

__all__ = ["LocalPlane", "beams", "files", "on_grid", "readings", "total_field"]
