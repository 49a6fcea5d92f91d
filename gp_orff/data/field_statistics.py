"""The sufficient statistics of a vector field's readings, group by group."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from jaxtyping import Int
from torch import Tensor

from gp_orff.data.observations import Observations
from gp_orff.data.patterns import GroupKey
from gp_orff.data.statistics import Moments, Statistics
from gp_orff.features.columns import Columns
from gp_orff.features.lattice import LatticeColumns


@dataclass(frozen=True)
class FieldStatistics:
    """All that a posterior needs of the data, on frequencies that do not move: `VectorFieldGP.
    statistics`.

    They add up and can be taken away again, so that chunks, streams, workers and machines merge
    exactly: `a + b`, `sum(parts)`, `a - b`, and `0.9 * a` to forget. Sizes depend on the number of
    frequencies, not on that of the data.

    Raises:
        ValueError: adding statistics of other frequencies, or taking away more than there is.

    Example:
        >>> import gp_orff, torch
        >>> x, y = torch.rand(300, 2).double(), torch.randn(300, 2).double()
        >>> model = gp_orff.VectorFieldGP(gp_orff.CurlFreeKernel(num_dims=2)).condition(x, y)
        >>> first, second = (model.statistics_of(x[i::2], y[i::2]) for i in (0, 1))
        >>> (first + second).num_values
        600
        >>> model = model.condition(model.statistics - second)
        >>> model.statistics.num_values
        300
    """

    phi: Columns
    groups: Mapping[GroupKey, Statistics]
    elbo_correction: float = 0.0  # what weights that were learned add to the log density

    @classmethod
    def of(cls, parts: Iterable[Observations], phi: Columns) -> "FieldStatistics":
        """One pass over readings."""
        groups: dict[GroupKey, Statistics] = {}
        for part in parts:
            found = Statistics.of_readings(
                part.x, part.y, phi, part.pattern, part.weight, part.direction
            )
            known = groups.get(part.key)
            groups[part.key] = found if known is None else known + found
        return cls(phi, groups)

    @property
    def num_values(self) -> float:
        """Numbers that were read."""
        return sum(own.num_values for own in self.groups.values())

    def select(self, columns: Int[Tensor, "k"]) -> "FieldStatistics":
        """The statistics of some columns."""
        groups = {key: own.select(columns) for key, own in self.groups.items()}
        return FieldStatistics(self.phi.select(columns), groups, self.elbo_correction)

    def on(self, phi: LatticeColumns) -> "FieldStatistics":
        """On some of the frequencies of the lattice these are on."""
        groups = {}
        for key, own in self.groups.items():
            moments = []
            for part in own.moments:
                gram = self.phi.crop(part.gram, phi)
                moments.append(Moments(gram, phi.column_sum(gram), part.mass))
            cross = self.phi.pick(own.cross, phi)
            groups[key] = replace(own, phi=phi, moments=tuple(moments), cross=cross)
        return FieldStatistics(phi, groups, self.elbo_correction)

    def __add__(self, other: "FieldStatistics | int") -> "FieldStatistics":
        if isinstance(other, int) and other == 0:  # of sum()
            return self
        self._require_same(other)
        groups = dict(self.groups)
        for key, own in other.groups.items():
            groups[key] = groups[key] + own if key in groups else own
        return FieldStatistics(self.phi, groups, self.elbo_correction + other.elbo_correction)

    __radd__ = __add__

    def __sub__(self, other: "FieldStatistics") -> "FieldStatistics":
        self._require_same(other)
        groups = dict(self.groups)
        for key, own in other.groups.items():
            if key not in groups or groups[key].count < own.count:
                raise ValueError(
                    f"expected to take away no more readings than there are, got {own.count} of "
                    f"group {key.label!r} ({key.pattern}) from "
                    f"{groups[key].count if key in groups else 0}"
                )
            groups[key] = groups[key] - own
        left = {key: own for key, own in groups.items() if own.count}
        return FieldStatistics(self.phi, left, self.elbo_correction - other.elbo_correction)

    def __mul__(self, factor: float) -> "FieldStatistics":
        if not 0 < factor < float("inf"):
            raise ValueError(f"expected a positive factor, got {factor}")
        groups = {key: factor * own for key, own in self.groups.items()}
        return FieldStatistics(self.phi, groups, factor * self.elbo_correction)

    __rmul__ = __mul__

    def _require_same(self, other: object) -> None:
        if not isinstance(other, FieldStatistics):
            raise TypeError(f"expected FieldStatistics, got {type(other).__name__}")
        if not self.phi.same(other.phi):
            raise ValueError(
                "expected statistics of the same frequencies, got those of others; make them with "
                "statistics_of(x, y) of one model, or of copies of it"
            )

    def to(self, device: torch.device) -> "FieldStatistics":
        """On another device."""
        phi = self.phi.to(device)
        groups = {key: own.to(device, phi) for key, own in self.groups.items()}
        return FieldStatistics(phi, groups, self.elbo_correction)

    @property
    def tensors(self) -> dict[tuple, Tensor]:
        """What depends on the frequencies, by name."""
        found = {}
        for key, own in self.groups.items():
            found[key, "cross", 0] = own.cross
            for index, part in enumerate(own.moments):
                found[key, "gram", index] = part.gram
                found[key, "column_sum", index] = part.column_sum
        return found

    def with_tensors(self, tensors: Mapping[tuple, Tensor], phi: Columns) -> "FieldStatistics":
        """The same numbers in other tensors."""
        groups = {}
        for key, own in self.groups.items():
            moments = tuple(
                Moments(tensors[key, "gram", i], tensors[key, "column_sum", i], part.mass)
                for i, part in enumerate(own.moments)
            )
            cross = tensors[key, "cross", 0]
            groups[key] = replace(own, phi=phi, moments=moments, cross=cross)
        return FieldStatistics(phi, groups, self.elbo_correction)


Visit = Callable[[], Iterator[Observations]]


def differentiable_statistics(visit: Visit, phi: Columns) -> FieldStatistics:
    """Statistics whose derivative in ω is a second visit: no chunk is kept in between."""
    fixed = FieldStatistics.of(visit(), phi.detached())
    tensors = _Visited.apply(phi, visit, fixed.tensors, *phi.tensors)
    return fixed.with_tensors(dict(zip(fixed.tensors, tensors, strict=True)), phi)


class _Visited(torch.autograd.Function):
    @staticmethod
    def forward(ctx, phi, visit, tensors, *parameters):
        ctx.phi, ctx.visit, ctx.names = phi, visit, list(tensors)
        ctx.save_for_backward(*parameters)
        return tuple(tensors.values())

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *gradients):
        given = dict(zip(ctx.names, gradients, strict=True))
        totals = [torch.zeros_like(own) for own in ctx.saved_tensors]
        for part in ctx.visit():
            with torch.enable_grad():
                own = [parameter.detach().requires_grad_() for parameter in ctx.saved_tensors]
                found = FieldStatistics.of([part], ctx.phi.with_tensors(*own)).tensors
            outputs = list(found.values())
            parts = torch.autograd.grad(outputs, own, [given[name] for name in found])
            totals = [total.add_(more) for total, more in zip(totals, parts, strict=True)]
        return None, None, None, *totals
