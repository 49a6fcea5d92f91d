"""The heights that harmonic kernels take from the readings."""

import warnings
from collections.abc import Sequence

import torch
from gpytorch.kernels import Kernel
from jaxtyping import Float
from torch import Tensor

from gp_orff.data.dataset import Data
from gp_orff.data.observations import Observations
from gp_orff.data.survey import DataWarning
from gp_orff.kernels.harmonic import HarmonicKernel
from gp_orff.kernels.tree import terms

_ONE_HEIGHT = 1e-3  # of the horizontal extent: heights that differ by less are one
_TURN = 0.05  # the root mean square of directions across their axis, of those that are one


@torch.no_grad()
def take_heights(kernel: Kernel, data: Data, anew: bool = False) -> None:
    """Give every `HarmonicKernel` of a tree without a `reference_height` those of the readings.

    Kernels that have them already keep them, unless `anew`.
    """
    for term in terms(kernel):
        for leaf in term.leaves:
            own = leaf.kernel
            if not (isinstance(own, HarmonicKernel) and own.follows_data):
                continue
            if anew or own.heights.isnan().any():
                columns = leaf.columns(data.num_inputs)
                box = [data.box[column] for column in columns]
                warn_of_degrees(box)
                if own.num_sides == 2:
                    warn_of_one_height(box, data.survey.sample)
                column = columns[-1]
                lowest, highest = data.box[column]
                readings = torch.cat([part.x[:, column] for part in data.survey.sample])
                own.set_heights(lowest, readings.double().mean().item(), highest)


def warn_of_one_height(box: Sequence[tuple[float, float]], parts: Sequence[Observations]) -> None:
    """Warn of numbers along one direction at one height: sources below and above explain them
    equally well. Vectors tell the sides apart, by the sign of the vertical component."""
    (west, east), (south, north), (low, high) = box
    units = torch.cat([_directions(part) for part in parts])
    turns = torch.linalg.svdvals(units)[1:].square().sum() > _TURN**2 * len(units)
    flat = high - low <= _ONE_HEIGHT * max(east - west, north - south)
    if flat and not turns:
        warnings.warn(
            'a HarmonicKernel with sources="both" expects readings at several heights, or of '
            "several components, got one number at each point at one height, which cannot tell "
            "the sides apart: components and fields at other heights follow the prior; give "
            'sources="below" or "above"',
            DataWarning,
            stacklevel=2,
        )


def _directions(part: Observations) -> Float[Tensor, "m p"]:
    """The unit vectors along which numbers are observed."""
    if part.direction is not None:
        return part.direction.double()
    every = torch.eye(part.pattern.num_outputs, dtype=torch.float64)
    return every[list(part.pattern.columns)].repeat(len(part), 1).to(part.x.device)


def warn_of_degrees(box: Sequence[tuple[float, float]]) -> None:
    """Warn of positions that look like longitudes and latitudes, with heights in metres.

    Those are positions within −180° to 360° and ±90°, further from the origin than their extent,
    as those on a local plane are not, and heights of hundreds, far larger than it. A harmonic
    field needs all three coordinates in one unit of length.
    """
    (west, east), (south, north), (low, high) = box
    largest, extent = max(abs(low), abs(high)), max(east - west, north - south)
    in_degrees = west >= -180 and east <= 360 and south >= -90 and north <= 90
    far = max(west, -east, south, -north) > extent > 0
    if in_degrees and far and largest >= max(100, 10 * extent):
        warnings.warn(
            "a HarmonicKernel expects positions and heights in one unit of length, got positions "
            f"within [{west:.4g}, {east:.4g}] and [{south:.4g}, {north:.4g}], which look like "
            f"degrees, and heights up to {largest:.4g}; use gp_orff.labelled.total_field, or "
            'gp_orff.labelled.readings(..., project="auto")',
            DataWarning,
            stacklevel=2,
        )
