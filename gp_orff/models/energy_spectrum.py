"""Energy spectra of a planar field, from sample paths under a window."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from gp_orff.data.checks import entries_in_units, in_column_units, plain_unit
from gp_orff.data.units import Unit, units_of_columns
from gp_orff.data.validation import as_real
from gp_orff.kernels.tree import num_outputs
from gp_orff.labelled.attributes import since_epoch
from gp_orff.models.frozen_model import Snapshot
from gp_orff.models.sample_paths import SamplePaths, Summary

if TYPE_CHECKING:
    import xarray

_LOWEST = 2.0  # periods of the lowest wavenumber in the box: a Hann window blurs over two
_OF_CUT_OFF = 1.5  # the cut-off of a grid over the highest wavenumber
_OF_NYQUIST = 2.5  # the Nyquist wavenumber over the highest one: aliases come from four times it
_DEFAULT, _USUAL, _MOST = 24, 32.0, 512  # wavenumbers; periods of the highest; points per side
_ROWS = 2048  # points that are evaluated at a time


# Steps of an energy spectrum:
#
# 1. The paths are evaluated at the centres of cells in the box. There are 2.5 points per half
#    period of the highest wavenumber, so that waves with four times this wavenumber are aliased to
#    it.
# 2. The weighted mean of the paths is subtracted, and they are multiplied by a Hann window of mean
#    square one. Without a window, the jump at the sides of the box would leak energy to all
#    wavenumbers.
# 3. The Fourier coefficients are divided into their components along and across k, which are the
#    divergent and the rotational part.
# 4. The energies of the modes within half a mode spacing of |k| = k are averaged. Their mean times
#    the number of modes per wavenumber, 2πk over the area of a mode, is E(k).
# 5. Mean and quantiles over the paths give the spectrum and its intervals.


@dataclass(frozen=True)
class EnergySpectrum:
    """The energy of a planar field in a box, per wavenumber, with intervals.

    `FieldPosterior.energy_spectrum` returns it, and `gp_orff.plotting.plot_energy_spectrum` draws
    it. Each sample path, without its mean, is multiplied by a Hann window of mean square one and
    has the Fourier coefficients û. The energy at the wavenumber k is

        E(k) = 2πk ⟨½ |û|²⟩ / (area of a mode) ,    ∫ E(k) dk = half the variance of the field ,

    where ⟨·⟩ is the mean over the modes whose wavenumber is close to k. The rotational part uses
    the component of û perpendicular to the wave vector, and the divergent part uses the component
    along it. E(k) is the energy of this field in the box, not the expectation of a stationary
    process. Its intervals are therefore narrow if there are many observations.

    Attributes:
        wavenumbers: the wavenumbers k (m,), in radians per unit of x.
        rotational: E(k) of the rotational part, as a `Summary` with `mean`, `sd` and the interval
            from `low` to `high`, (m,) each. Its unit is the squared unit of the field times the
            unit of x.
        divergent: E(k) of the divergent part, as for `rotational`.
        total: E(k) of the complete field, as for `rotational`.
        level: the probability of the intervals.

    Example:
        >>> import gp_orff, torch
        >>> x = torch.rand(200, 2, dtype=torch.float64)
        >>> y = torch.stack(
        ...     [torch.sin(9 * x[:, 1]), torch.cos(9 * x[:, 0])], dim=-1
        ... )
        >>> model = gp_orff.VectorFieldGP(gp_orff.HelmholtzKernel(num_dims=2))
        >>> field = model.condition(x, y).posterior()
        >>> spectrum = field.energy_spectrum(
        ...     torch.tensor([13.0, 20.0, 30.0]), num_paths=20
        ... )
        >>> spectrum.rotational.mean.shape
        torch.Size([3])
        >>> bool((spectrum.rotational.mean > spectrum.divergent.mean).all())
        True
    """

    wavenumbers: Float[Tensor, "m"]
    rotational: Summary
    divergent: Summary
    total: Summary
    level: float

    def to_xarray(self) -> "xarray.Dataset":
        """Return an xarray Dataset along the dimension `wavenumber`.

        For `rotational`, it has the variables `rotational` (the mean), `rotational_low` and
        `rotational_high`. The other parts have the same suffixes. The attribute `level` is the
        probability of the intervals.

        Raises:
            ImportError: xarray is not installed. Run `pip install gp_orff[xarray]`.
        """
        import xarray

        variables = {
            name + end: ("wavenumber", getattr(getattr(self, name), kind).cpu().numpy())
            for name in ("rotational", "divergent", "total")
            for end, kind in (("", "mean"), ("_low", "low"), ("_high", "high"))
        }
        return xarray.Dataset(
            variables, {"wavenumber": self.wavenumbers.cpu().numpy()}, {"level": self.level}
        )


def energy_spectrum(
    paths: SamplePaths,
    snapshot: Snapshot,
    units: tuple[str | None, ...],
    wavenumbers: Float[Tensor, "m"] | None,
    box: Sequence[tuple[float, float]] | None,
    at: Sequence[float],
    level: float,
) -> EnergySpectrum:
    """The spectra of paths; see `FieldPosterior.energy_spectrum`."""
    space, others = snapshot.space, snapshot.num_inputs - len(snapshot.space)
    if len(space) != 2:
        raise NotImplementedError(
            f"energy_spectrum expects a planar field, with two directions of space, got "
            f"{len(space)}"
        )
    outputs = num_outputs(snapshot.kernel)
    if outputs != 2:
        raise NotImplementedError(
            f"energy_spectrum expects a field of the two components in its plane, got {outputs}; "
            "fit these two components alone"
        )
    rest = [column for column in range(snapshot.num_inputs) if column not in space]
    of_space, of_rest = ([units[i] for i in columns if units] for columns in (space, rest))
    if len(at) != others:
        raise ValueError(
            f"energy_spectrum expects at= to give the {others} inputs that are not in space, such "
            f"as a time, got {len(at)} values"
        )
    if not 0 < level < 1:
        raise ValueError(f"energy_spectrum expects a level between 0 and 1, got {level}")
    if box is None:
        box = [snapshot.inference.data.box[i] for i in space]
    box = np.stack(entries_in_units(box, of_space, "box"))
    wavenumbers = in_column_units(wavenumbers, _per_length(of_space, wavenumbers), "wavenumbers")
    if box.shape != (2, 2) or not (box[:, 0] < box[:, 1]).all():
        raise ValueError(
            f"energy_spectrum expects a box ((low, high), (low, high)) with extent, got {box}"
        )
    extent = box[:, 1] - box[:, 0]
    k = _checked(wavenumbers, 2 * math.pi / extent.min(), _cut_off(snapshot) / _OF_CUT_OFF)
    count = np.ceil(_OF_NYQUIST * k.max().item() * extent / math.pi).astype(int)
    count = np.maximum(count + count % 2, 8)
    if count.max() > _MOST:
        raise ValueError(
            f"energy_spectrum expects wavenumbers up to "
            f"{math.pi * _MOST / _OF_NYQUIST / extent.max():.4g} in this box, of {_MOST} points "
            f"along a side, got {k.max().item():.4g}"
        )
    places = np.empty((*count, snapshot.num_inputs))
    axes = [
        low + side * (np.arange(n) + 0.5) / n
        for (low, _), side, n in zip(box, extent, count, strict=True)
    ]
    for column, values in zip(space, np.meshgrid(*axes, indexing="ij"), strict=True):
        places[..., column] = values
    if any(isinstance(value, np.datetime64 | datetime | str) for value in at):
        pairs = zip(at, of_rest or [None] * len(rest), strict=True)
        at = [since_epoch(value, unit) for value, unit in pairs]
    places[..., rest] = [value.item() for value in entries_in_units(at, of_rest, "at")]
    rows = torch.from_numpy(places.reshape(-1, snapshot.num_inputs)).split(_ROWS)
    values = torch.cat([paths(part) for part in rows], dim=1).unflatten(1, tuple(count))
    energy = windowed_energy(values, torch.from_numpy(extent), k)
    both = [Summary.of(part, level) for part in energy.unbind(-1)]
    return EnergySpectrum(k, *both, Summary.of(energy.sum(-1), level), level)


def windowed_energy(
    values: Float[Tensor, "S n m 2"], extent: Float[Tensor, "2"], wavenumbers: Float[Tensor, "k"]
) -> Float[Tensor, "S k 2"]:
    """The rotational and the divergent energy per wavenumber, for S fields at the centres of
    cells."""
    count = values.shape[1:3]
    hann = [torch.sin(math.pi * (torch.arange(n).double() + 0.5) / n).square() for n in count]
    window = torch.outer(*hann).to(values)
    window = (window / window.square().mean().sqrt()).unsqueeze(-1)
    # The mean under the window, so that the windowed field has the mean zero exactly.
    mean = (window * values).mean((1, 2), keepdim=True) / window.mean()
    waves = torch.fft.fft2(window * (values - mean), dim=(1, 2)) / math.prod(count)
    modes = torch.meshgrid(
        *[
            2 * math.pi * torch.fft.fftfreq(n, (side / n).item(), dtype=torch.float64)
            for n, side in zip(count, extent, strict=True)
        ],
        indexing="ij",
    )
    k = torch.stack(modes, dim=-1).to(values)
    radius = k.norm(dim=-1)
    unit = k / radius.clamp_min(torch.finfo(k.dtype).tiny).unsqueeze(-1)
    along = (waves * unit).sum(-1).abs().square()
    across = (waves[..., 1] * unit[..., 0] - waves[..., 0] * unit[..., 1]).abs().square()
    parts = 0.5 * torch.stack([across, along], dim=-1).flatten(1, 2)  # (S, n·m, 2)
    spacing = 2 * math.pi / extent
    # With the larger of both spacings a ring has modes in every direction of a box that is not
    # square.
    near = (radius.flatten() - wavenumbers.unsqueeze(-1)).abs() <= 0.5 * spacing.max()
    near = near.to(parts) / near.sum(-1, keepdim=True)
    density = 2 * math.pi * wavenumbers / spacing.prod()
    return torch.einsum("km,smc->skc", near, parts) * density.unsqueeze(-1)


def _per_length(
    units: Sequence[str | None], wavenumbers: Float[Tensor, "m"] | None
) -> tuple[str | None, ...]:
    """The unit of wavenumbers: one over the unit of space, with radians if `wavenumbers` have
    them."""
    of_space = {plain_unit(unit) for unit in units}
    length = Unit.parse(of_space.pop()) if len(of_space) == 1 else None
    if length is None:
        return ()
    given = Unit.parse(next(iter(units_of_columns(wavenumbers)), None))
    radians = given is not None and given.root is not None and "radian" in given.root[2]
    return (str(Unit.parse("radian" if radians else "1") * length**-1),)


def _checked(
    wavenumbers: Float[Tensor, "m"] | None, lowest: float, highest: float
) -> Float[Tensor, "m"]:
    """Wavenumbers, checked to be between two periods in the box and the largest one of a grid."""
    low = _LOWEST * lowest
    if low > highest:
        raise ValueError(
            f"energy_spectrum expects a box with two periods of the highest wavenumber, "
            f"{highest:.4g}, got one for {low:.4g} and more; give a larger box, or a finer grid"
        )
    if wavenumbers is None:
        high = min(highest, max(_USUAL * lowest, 1.01 * low))
        return torch.from_numpy(np.geomspace(low, high, _DEFAULT))
    k = as_real(wavenumbers, "wavenumbers").cpu()
    if k.dim() != 1 or not len(k):
        raise ValueError(f"energy_spectrum expects wavenumbers (m,), got shape {tuple(k.shape)}")
    slack = 1e-9
    if k.min() < low * (1 - slack) or not k.max() <= highest * (1 + slack):
        end = (
            f"{highest:.4g}, where the paths of a grid end" if highest < math.inf else "higher ones"
        )
        raise ValueError(
            f"energy_spectrum expects wavenumbers from {low:.4g}, two periods in the box, to {end}"
            f", got {k.min():.4g} to {k.max():.4g}"
        )
    return k


def _cut_off(snapshot: Snapshot) -> float:
    """The highest wavenumber that a grid has along every direction of space; infinite without a
    grid."""
    if snapshot.inference.is_exact:
        return math.inf
    phi = snapshot.field().distribution.split()[0].given_mean.expansion.phi
    if not phi.on_lattice:
        return math.inf
    largest = phi.indices.abs().amax(0).to(phi.spacing) * phi.spacing
    return largest[list(snapshot.space)].min().item()
