"""Tidal ellipses of a planar field, with error bars."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from gpytorch.distributions import MultitaskMultivariateNormal
from gpytorch.kernels import Kernel
from jaxtyping import Complex, Float
from torch import Tensor

from gp_orff.data.validation import as_points
from gp_orff.kernels.base import check_positive_integer, cholesky
from gp_orff.kernels.fields import summands
from gp_orff.kernels.lines import tidal_leaves
from gp_orff.kernels.tree import Leaf, num_outputs, terms
from gp_orff.models.sample_paths import Summary

# From a posterior to ellipses:
#
# 1. The field of one constituent is a(x) cos νt + b(x) sin νt, without the constant mean. Its
#    values at a time t₀ of phase zero and a quarter of a period later are a and b, which are
#    jointly normal at each point.
# 2. Samples of a and b, as complex numbers a_1 + i a_2, become rotating components,
#
#        w(t) = R₊ e^{iνt} + R₋ e^{−iνt} ,   R₊ = (a − i b)/2 ,   R₋ = (a + i b)/2 .
#
# 3. The two components are parallel at the phase g = (arg R₋ − arg R₊)/2, in the direction
#    (arg R₊ + arg R₋)/2. The speed is then |R₊| + |R₋|. A quarter of a period later they are
#    opposite.
# 4. The arguments of the samples are relative to those of the means of R₊ and R₋, so that no sample
#    is on the other side of a jump by 180°.


_TOGETHER = 64  # points whose joint distribution is computed at once


@dataclass(frozen=True)
class TidalEllipses:
    """The tidal ellipses of one constituent at n points; `FieldPosterior.ellipses` returns it.

    Each attribute is a `Summary` with `mean`, `sd`, `low` and `high`, (n,) each. The field of the
    constituent with the angular frequency ν is a cos νt + b sin νt at the time t after the epoch.
    It is largest when νt equals the phase. It then points along the major axis. If the amplitude is
    uncertain, the mean of `semi_major` is biased upward, as the mean of a modulus always is.

    Attributes:
        semi_major: the amplitude along the major axis, in units of the field.
        semi_minor: the amplitude along the minor axis, in units of the field. It is negative if the
            field rotates clockwise.
        inclination: the angle of the major axis in degrees, from the first direction of space
            towards the second. For the mean field it is between 0 and 180. Intervals may extend
            beyond these limits.
        phase: the phase in degrees after the epoch. For the mean field it is between 0 and 360.
            Intervals may extend beyond these limits.

    Example:
        >>> import gp_orff, torch
        >>> space = gp_orff.HelmholtzKernel(num_dims=2, active_dims=(0, 1))
        >>> kernel = gp_orff.tides(space, ["M2"], active_dims=(2,))
        >>> x = torch.rand(60, 3) * torch.tensor([1, 1, 100])  # hours in column 2
        >>> model = gp_orff.VectorFieldGP(kernel).condition(x, torch.randn(60, 2))
        >>> ellipses = model.posterior().ellipses("M2", torch.rand(7, 2))
        >>> (ellipses.semi_major.mean >= ellipses.semi_minor.mean.abs()).all()
        tensor(True)
    """

    semi_major: Summary
    semi_minor: Summary
    inclination: Summary
    phase: Summary

    @classmethod
    def of(
        cls, cosine: Float[Tensor, "S n 2"], sine: Float[Tensor, "S n 2"], level: float = 0.95
    ) -> "TidalEllipses":
        """Return the ellipses of samples of a cos νt + b sin νt.

        Args:
            cosine: S samples of a at n points, (S, n, 2).
            sine: S samples of b at n points, (S, n, 2).
            level: the probability of the intervals.

        Example:
            >>> import torch
            >>> from gp_orff.models.ellipses import TidalEllipses
            >>> # 2 cos νt along the first axis
            >>> along = torch.tensor([[2.0, 0.0]]).expand(9, 1, 2)
            >>> across = torch.tensor([[0.0, 1.0]]).expand(9, 1, 2)
            >>> ellipse = TidalEllipses.of(along, across)
            >>> ellipse.semi_major.mean.item(), ellipse.semi_minor.mean.item()
            (2.0, 1.0)
        """
        a, b = (torch.view_as_complex(part.contiguous()) for part in (cosine, sine))
        forward, backward = 0.5 * (a - 1j * b), 0.5 * (a + 1j * b)
        (first, turn), (last, back) = _argument(forward), _argument(backward)
        inclination = torch.rad2deg(0.5 * (first + last))
        phase = torch.rad2deg(0.5 * (last - first))
        half = torch.floor(inclination / 180)  # half a turn of the axis is one of the phase too
        start = inclination - 180 * half, torch.remainder(phase + 180 * half, 360)
        change = torch.rad2deg(0.5 * (turn + back)), torch.rad2deg(0.5 * (back - turn))
        sizes = forward.abs() + backward.abs(), forward.abs() - backward.abs()
        angles = (middle + part for middle, part in zip(start, change, strict=True))
        return cls(*(Summary.of(samples, level) for samples in (*sizes, *angles)))


def _argument(
    wave: Complex[Tensor, "S n"],
) -> tuple[Float[Tensor, "n"], Float[Tensor, "S n"]]:
    """The argument of the mean over the samples, and the argument of each sample relative to it."""
    mean = wave.mean(0)
    return mean.angle(), (wave * mean.conj()).angle()


Joint = Callable[[Float[Tensor, "n d"]], MultitaskMultivariateNormal]
"""A function that returns the joint distribution at n points."""


def ellipses(
    tide: Joint,
    leaf: Leaf,
    x: Float[Tensor, "n k"],
    box: Sequence[tuple[float, float]],
    epoch: float,
    num_samples: int,
    level: float,
    seed: int,
) -> TidalEllipses:
    """The ellipses of a constituent at points x without time; see `FieldPosterior.ellipses`.

    Args:
        tide: the posterior of the constituent alone.
        leaf: the kernel of the constituent, in the kernel tree.
        x: points (n, d − 1), without time.
        box: (low, high) of each of the d inputs in the data.
        epoch: the time at which phases are zero.
        num_samples: the number of samples.
        level: the probability of the intervals.
        seed: the seed of the random numbers.

    Raises:
        ValueError: The points have another shape, there are fewer than two samples, or the level is
            not between 0 and 1.
    """
    check_positive_integer(num_samples, "num_samples", "ellipses")
    if num_samples < 2:
        raise ValueError(f"ellipses expects at least two samples, got {num_samples}")
    if not 0 < level < 1:
        raise ValueError(f"ellipses expects a level between 0 and 1, got {level}")
    (time,) = leaf.active_dims
    period, middle = 2 * leaf.kernel.period_length.item(), 0.5 * sum(box[time])
    start = epoch + period * round((middle - epoch) / period)
    times = torch.tensor([0.0, 0.25], dtype=torch.float64) * period + start
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for points in as_points(torch.as_tensor(x), len(box) - 1).double().split(_TOGETHER):
        copies = points.repeat(len(times), 1)
        moments = times.repeat_interleave(len(points)).unsqueeze(-1).to(copies)
        joint = tide(torch.cat([copies[:, :time], moments, copies[:, time:]], dim=-1))
        root = cholesky(joint.covariance_matrix.double().cpu())
        normal = torch.randn(num_samples, len(root), generator=generator, dtype=torch.float64)
        drawn = joint.mean.double().cpu().flatten() + normal @ root.mT
        samples.append(drawn.unflatten(-1, (2, len(points), 2)))
    cosine, sine = torch.cat(samples, dim=2).unbind(1)
    return TidalEllipses.of(cosine, sine, level)


def constituent_of(kernel: Kernel, name: str) -> tuple[Leaf, list[Kernel]]:
    """The kernel of a constituent in the kernel tree, and the summands that contain it.

    If all terms contain the constituent, the complete kernel is the only summand.

    Raises:
        ValueError: The field is not planar, or the kernel does not contain the constituent. Or the
            constituent has several periods, or is not in separate summands.
    """
    if num_outputs(kernel) != 2:
        raise ValueError(
            f"ellipses expects two components of a plane, got a field of {num_outputs(kernel)}"
        )
    tides = tidal_leaves(kernel)
    leaves = [leaf for leaf in tides if leaf.kernel.constituent == name]
    if not leaves:
        names = dict.fromkeys(leaf.kernel.constituent for leaf in tides)
        raise ValueError(
            f"ellipses expects a constituent of the kernel, {', '.join(names) or 'which has none'}"
            f", got {name!r}; make the kernel with gp_orff.tides"
        )
    lines = {(leaf.active_dims, leaf.kernel.period_length.item()) for leaf in leaves}
    if len(lines) > 1:
        raise ValueError(
            f"ellipses expects one period of {name} along one column of time, got "
            f"{', '.join(f'{2 * half:.10g} along {dims}' for dims, half in sorted(lines))}; give "
            "the same unit and column to all of gp_orff.tides, and fix or share their periods"
        )
    if _holds(kernel, leaves) == {True}:
        return leaves[0], [kernel]
    kinds = [(summand, _holds(summand, leaves)) for summand in summands(kernel)]
    if not kinds or any(len(kind) > 1 for _, kind in kinds):
        raise ValueError(
            f"ellipses expects a sum with {name} as one summand, as gp_orff.tides makes it, got a "
            "kernel of another form"
        )
    return leaves[0], [summand for summand, kind in kinds if kind == {True}]


def _holds(kernel: Kernel, leaves: Sequence[Leaf]) -> set[bool]:
    """Whether terms contain one of the leaves: {True} if all do, {False} if none does."""
    kernels = {leaf.kernel for leaf in leaves}
    return {any(part.kernel in kernels for part in term.leaves) for term in terms(kernel)}
