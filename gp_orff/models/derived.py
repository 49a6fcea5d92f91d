"""Warnings of undetermined derivatives, distributions of a field, heights of harmonic kernels."""

import warnings
from collections.abc import Sequence

import gpytorch
import torch
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from gpytorch.kernels import Kernel
from jaxtyping import Float
from torch import Tensor

from gp_orff.data.checks import directions_across, place_in_words
from gp_orff.data.dataset import Data
from gp_orff.data.observations import Observations
from gp_orff.data.survey import DataWarning
from gp_orff.kernels.tree import space_of, terms
from gp_orff.models.cross_validation import lengthscales_of
from gp_orff.symbols.base import Symbol

_ZERO = 1e-12  # below this, the multiplier of a symbol is zero

# Derivatives across a line or a plane on which all points lie.


def directions_unknown(kernel: Kernel, data: Data) -> Float[Tensor, "m k"]:
    """Directions of space along which all points have the same coordinate, in units of
    lengthscales. The data do not determine derivatives along them. The result is empty for a
    harmonic kernel and if symbols were observed, because these determine derivatives."""
    columns = list(space_of(kernel, data.num_inputs))
    lengths = torch.from_numpy(lengthscales_of(kernel, data.num_inputs))[columns]
    lengths = torch.where((lengths > 0) & lengths.isfinite(), lengths, 1.0)
    harmonic = any(term.factor.decays for term in terms(kernel))
    if harmonic or data.symbol_data:
        return torch.empty(0, len(columns), dtype=torch.float64)
    x = torch.cat([part.x for part in data.survey.sample])[:, columns].cpu()
    return torch.nn.functional.normalize(directions_across(x / lengths) / lengths, dim=-1)


def note_of_places(kernel: Kernel, data: Data) -> str:
    """A note if all points lie on a line or in a plane; otherwise an empty text."""
    unknown = directions_unknown(kernel, data)
    if not len(unknown):
        return ""
    place = place_in_words(*unknown.shape)
    return f"all points lie {place}: derivatives across it come from the prior alone"


@torch.no_grad()
def warn_of_derivatives(symbol: Symbol, kernel: Kernel, unknown: Float[Tensor, "m k"]) -> None:
    """Warn of a symbol with derivatives along `unknown` directions, which the data do not
    determine."""
    if not len(unknown) or symbol.order < 1:
        return
    every, unknown = terms(kernel), unknown.to(next(kernel.parameters()).device)
    if not symbol(unknown, every[0].num_outputs).abs().amax() > 0:
        return
    # A symbol that is zero for all fields with this kernel is known.
    generator = torch.Generator().manual_seed(0)
    omega = torch.randn(8, unknown.shape[-1], generator=generator).to(unknown)
    images = (symbol(omega, t.num_outputs) @ t.factor(omega).to(torch.complex128) for t in every)
    if not any(image.abs().amax() > _ZERO for image in images):
        return
    along = " and ".join(str([round(v, 3) + 0.0 for v in row]) for row in unknown.tolist())
    warnings.warn(
        f"all points lie {place_in_words(*unknown.shape)}: the derivatives along {along} in "
        f"{type(symbol).__name__} have the mean and the error bars of the prior alone; "
        "observe at other places, or pass known derivatives to model.observe",
        DataWarning,
        stacklevel=4,
    )


# Joint distributions of a field at points, in any unit.


class _InAnyUnit(MultivariateNormal):
    """A normal distribution whose variances have no floor.

    gpytorch raises variances to at least `gpytorch.settings.min_variance`, which is 1e-10 in double
    precision. This is a standard deviation of 1e-5 in any unit. The standard deviation of a
    vorticity in s⁻¹ may be smaller.
    """

    @property
    def variance(self) -> Tensor:
        """The variances of all outputs at all points, (n, q) or (n,)."""
        floor = gpytorch.settings.min_variance(float_value=0.0, double_value=0.0, half_value=0.0)
        with floor:
            return super().variance


class FieldNormal(_InAnyUnit, MultitaskMultivariateNormal):
    """A joint normal distribution of q outputs at n points, (n, q)."""


class ScalarNormal(_InAnyUnit):
    """A joint normal distribution of one output at n points, (n,)."""


# The heights that harmonic kernels get from the observations.


_ONE_HEIGHT = 1e-3  # heights that differ by less, over the horizontal extent, count as equal
_TURN = 0.05  # directions count as equal if their root mean square across their axis is less


@torch.no_grad()
def take_heights(kernel: Kernel, data: Data, anew: bool = False) -> None:
    """Give each `HarmonicKernel` without a `reference_height` the heights of the observations.

    Heights that a kernel already has do not change, unless `anew`.
    """
    for term in terms(kernel):
        for leaf in term.leaves:
            own = leaf.kernel
            if getattr(own, "follows_data", False) and (anew or own.heights.isnan().any()):
                columns = leaf.columns(data.num_inputs)
                box = [data.box[column] for column in columns]
                warn_of_degrees(box)
                if own.num_sides == 2:
                    warn_of_one_height(box, data.survey.sample)
                (lowest, highest), column = box[-1], columns[-1]
                heights = torch.cat([part.x[:, column] for part in data.survey.sample])
                own.set_heights(lowest, heights.double().mean().item(), highest)


def warn_of_one_height(box: Sequence[tuple[float, float]], parts: Sequence[Observations]) -> None:
    """Warn of observations along one direction at one height, because sources below and above
    explain them equally well. With complete vectors, the vertical component determines the
    side."""
    (west, east), (south, north), (low, high) = box
    units = torch.cat([_directions(part) for part in parts])
    turns = torch.linalg.svdvals(units)[1:].square().sum() > _TURN**2 * len(units)
    flat = high - low <= _ONE_HEIGHT * max(east - west, north - south)
    if flat and not turns:
        warnings.warn(
            'a HarmonicKernel with sources="both" expects observations at several heights or of '
            "several components, got one value at each point, all at one height. This does not "
            "determine the side of the sources, so other components, and the field at other "
            'heights, follow the prior; give sources="below" or "above"',
            DataWarning,
            stacklevel=2,
        )


def _directions(part: Observations) -> Float[Tensor, "m p"]:
    """The unit vectors along which components are observed."""
    if part.direction is not None:
        return part.direction.double()
    every = torch.eye(part.pattern.num_outputs, dtype=torch.float64)
    return every[list(part.pattern.columns)].repeat(len(part), 1).to(part.x.device)


def warn_of_degrees(box: Sequence[tuple[float, float]]) -> None:
    """Warn of positions that look like longitudes and latitudes, with heights in metres.

    A harmonic field needs all three coordinates in one unit of length. Positions look like degrees
    if they are within −180° to 360° and ±90° and are further from the origin than their extent,
    which positions on a local plane are not. In addition, the heights are at least 100 and 10 times
    the extent.
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
