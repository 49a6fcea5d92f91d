"""Points that a fit leaves out, and says so."""

import warnings

from gp_orff.data.dataset import Data, Dataset
from gp_orff.data.survey import DataWarning
from gp_orff.features.frequencies.auto import Auto
from gp_orff.features.frequencies.grid import Grid
from gp_orff.features.frequencies.rule import Rule
from gp_orff.inference.representation.choice import MOST_EXACT


def without_far_points(data: Data, requested: Rule) -> tuple[Data, list[str]]:
    """The data without a few points far from all others, which would use up the frequencies of a
    grid, and notes that say so."""
    near = data.survey.distances.near
    fixed = not isinstance(data, Dataset) or data.tracks or not _spans(requested, data)
    if near is None or fixed:
        return data, []
    inside = data.within(near)
    count = data.survey.num_points - inside.survey.num_points
    text = (
        f"points far from all others are left out: {count}; one frequency grid cannot represent "
        "both groups; drop these points if they are errors, or fit them separately"
    )
    warnings.warn(text, DataWarning, stacklevel=2)
    return inside, [text]


def warn_of_left_out(given: Data, kept: Data) -> None:
    """Warn if readings close to others were left out, where neither features nor the exact kernel
    hold all."""
    count = given.survey.num_points - kept.survey.num_points
    if count:
        warnings.warn(
            f"{count} of {given.survey.num_points} readings are left out, which lie close to "
            "others: neither features nor the exact kernel can hold all of them, and their means "
            "would tell less than single readings. Fit parts of the region, or choose readings by "
            "gp_orff.thin",
            DataWarning,
            stacklevel=2,
        )


def _spans(requested: Rule, data: Data) -> bool:
    """Whether the rule gives a grid whose domain follows from the data."""
    if isinstance(requested, Auto):
        most = requested.max_features or MOST_EXACT
        return requested.domain is None and data.num_values > most
    return isinstance(requested, Grid) and requested.domain is None and requested.spacing is None
