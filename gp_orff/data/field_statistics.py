"""The sufficient statistics of observations of a vector field, group by group."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from jaxtyping import Int
from torch import Tensor

from gp_orff.data.observations import Observations
from gp_orff.data.packing.bytes import gathered, read_bytes, write_bytes
from gp_orff.data.packing.columns import unpack_columns
from gp_orff.data.packing.sums import pack_group, unpack_group
from gp_orff.data.patterns import GroupKey
from gp_orff.data.statistics import Moments, Statistics
from gp_orff.features.columns import Columns
from gp_orff.features.lattice import LatticeColumns

_KIND = "gp_orff.FieldStatistics"


@dataclass(frozen=True)
class FieldStatistics:
    """The sufficient statistics of observations: all that a posterior on fixed frequencies needs.

    `VectorFieldGP.statistics` and `VectorFieldGP.statistics_of` make them. Their size depends on
    the number of frequencies, not on the number of observations. Statistics with the same
    frequencies combine exactly:

    - `a + b` and `sum(parts)` are the statistics of all observations;
    - `a - b` removes the observations of b from a;
    - `0.9 * a` multiplies the weight of every observation by 0.9, to forget old ones gradually.

    Args:
        phi: the M cosine and sine functions φ(x) of the frequencies.
        groups: the sums over the observations of each group, in units of y: Σφφᵀ (M, M), Σφyᵀ
            (M, q), Σφ (M,), Σyyᵀ (q, q), Σy (q,), and their number N.
        elbo_correction: what the learned weights of Student-t noise add to the ELBO, in nats.

    Raises:
        TypeError: adding or subtracting something other than a `FieldStatistics`.
        ValueError: the frequencies differ, more observations are subtracted than there are, or a
            factor is not positive.

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
    elbo_correction: float = 0.0  # the term of the ELBO that comes from learned weights

    @classmethod
    def of(cls, parts: Iterable[Observations], phi: Columns) -> "FieldStatistics":
        """The statistics of observations (`parts`) under the columns `phi`; one pass over them."""
        groups: dict[GroupKey, Statistics] = {}
        for part in parts:
            statistics = Statistics.of_observations(
                part.x, part.y, phi, part.pattern, part.weight, part.direction
            )
            total = groups.get(part.key)
            groups[part.key] = statistics if total is None else total + statistics
        return cls(phi, groups)

    @property
    def num_values(self) -> float:
        """The number of observed values."""
        return sum(group.num_values for group in self.groups.values())

    def plain(self) -> dict[str, object]:
        """Plain values from which `from_plain` restores these statistics; on the CPU."""
        return {
            "columns": self.phi.plain(),
            "groups": [pack_group(key, group) for key, group in self.groups.items()],
            "bound": self.elbo_correction,
        }

    @classmethod
    def from_plain(cls, content: Mapping) -> "FieldStatistics":
        """The statistics from the `content` that `plain` gave."""
        phi = unpack_columns(content["columns"])
        groups = dict(unpack_group(group, phi) for group in content["groups"])
        return cls(phi, groups, content["bound"])

    def to_bytes(self) -> bytes:
        """These statistics as bytes, for a file or another machine; pickles have the same size."""
        return write_bytes(_KIND, self.plain())

    @classmethod
    def from_bytes(cls, content: bytes) -> "FieldStatistics":
        """The statistics that `to_bytes` wrote as `content`, on the CPU.

        Raises:
            ValueError: bytes that are damaged, of something else, or of a newer version.
        """
        return cls.from_plain(read_bytes(_KIND, content))

    def __reduce__(self) -> tuple:
        return FieldStatistics.from_bytes, (self.to_bytes(),)

    def __deepcopy__(self, memo: dict) -> "FieldStatistics":
        return self  # a value, which no one changes

    def all_reduce(self, group: object = None) -> "FieldStatistics":
        """The sum of the statistics of all processes of a `group` of `torch.distributed`.

        Every process calls it, and gets the same sum, on its own device. If `group` is None, all
        processes. The frequencies have to be the same: those of one model, and of its copies.

        Raises:
            RuntimeError: `torch.distributed` has not been initialised.
            ValueError: the frequencies differ between processes.
        """
        parts = gathered(self.to_bytes(), group)
        return sum(map(FieldStatistics.from_bytes, parts)).to(self.phi.device)

    def select(self, columns: Int[Tensor, "k"]) -> "FieldStatistics":
        """The statistics of the columns with indices `columns` (k,)."""
        groups = {key: group.select(columns) for key, group in self.groups.items()}
        return FieldStatistics(self.phi.select(columns), groups, self.elbo_correction)

    def on(self, phi: LatticeColumns) -> "FieldStatistics":
        """The statistics on `phi`, whose frequencies are some of this lattice."""
        groups = {key: group.on(phi) for key, group in self.groups.items()}
        return FieldStatistics(phi, groups, self.elbo_correction)

    def __add__(self, other: "FieldStatistics | int") -> "FieldStatistics":
        if isinstance(other, int) and other == 0:  # the start value of sum()
            return self
        self._require_same(other)
        groups = dict(self.groups)
        for key, statistics in other.groups.items():
            groups[key] = groups[key] + statistics if key in groups else statistics
        return FieldStatistics(self.phi, groups, self.elbo_correction + other.elbo_correction)

    __radd__ = __add__

    def __sub__(self, other: "FieldStatistics") -> "FieldStatistics":
        self._require_same(other)
        groups = dict(self.groups)
        for key, statistics in other.groups.items():
            if key not in groups or groups[key].count < statistics.count:
                raise ValueError(
                    "expected to take away no more observations than there are, got "
                    f"{statistics.count} of group {key.label!r} ({key.pattern}) from "
                    f"{groups[key].count if key in groups else 0}"
                )
            groups[key] = groups[key] - statistics
        remaining = {key: statistics for key, statistics in groups.items() if statistics.count}
        return FieldStatistics(self.phi, remaining, self.elbo_correction - other.elbo_correction)

    def __mul__(self, factor: float) -> "FieldStatistics":
        if not 0 < factor < float("inf"):
            raise ValueError(f"expected a positive factor, got {factor}")
        groups = {key: factor * group for key, group in self.groups.items()}
        return FieldStatistics(self.phi, groups, factor * self.elbo_correction)

    __rmul__ = __mul__

    def _require_same(self, other: object) -> None:
        if not isinstance(other, FieldStatistics):
            raise TypeError(f"expected FieldStatistics, got {type(other).__name__}")
        if not self.phi.same(other.phi):
            raise ValueError(
                "expected statistics of the same frequencies, got those of others; make them with "
                "statistics_of(x, y) of one model or of its copies"
            )

    def to(self, device: torch.device) -> "FieldStatistics":
        """The same statistics on another `device`."""
        phi = self.phi.to(device)
        groups = {key: group.to(device, phi) for key, group in self.groups.items()}
        return FieldStatistics(phi, groups, self.elbo_correction)

    @property
    def tensors(self) -> dict[tuple, Tensor]:
        """The tensors (M, M), (M,), (M, q) that depend on the frequencies, by group, name and
        index."""
        tensors = {}
        for key, group in self.groups.items():
            tensors[key, "cross", 0] = group.cross
            for index, part in enumerate(group.moments):
                tensors[key, "gram", index] = part.gram
                tensors[key, "column_sum", index] = part.column_sum
        return tensors

    def with_tensors(self, tensors: Mapping[tuple, Tensor], phi: Columns) -> "FieldStatistics":
        """The same statistics of columns `phi`, with other `tensors` (M, M), (M,), (M, q)."""
        groups = {}
        for key, group in self.groups.items():
            moments = tuple(
                Moments(tensors[key, "gram", i], tensors[key, "column_sum", i], part.mass)
                for i, part in enumerate(group.moments)
            )
            cross = tensors[key, "cross", 0]
            groups[key] = replace(group, phi=phi, moments=moments, cross=cross)
        return FieldStatistics(phi, groups, self.elbo_correction)


Visit = Callable[[], Iterator[Observations]]


def differentiable_statistics(visit: Visit, phi: Columns) -> FieldStatistics:
    """Statistics whose derivative in ω comes from a second visit; no chunk stays in memory, unless
    the derivative is differentiated again."""
    fixed = FieldStatistics.of(visit(), phi.detached())
    tensors = _StatisticsByVisit.apply(phi, visit, fixed.tensors, *phi.tensors)
    return fixed.with_tensors(dict(zip(fixed.tensors, tensors, strict=True)), phi)


class _StatisticsByVisit(torch.autograd.Function):
    @staticmethod
    def forward(ctx, phi, visit, tensors, *parameters):
        ctx.phi, ctx.visit, ctx.names = phi, visit, list(tensors)
        ctx.save_for_backward(*parameters)
        return tuple(tensors.values())

    @staticmethod
    def backward(ctx, *gradients):
        by_name, again = dict(zip(ctx.names, gradients, strict=True)), torch.is_grad_enabled()
        totals = [torch.zeros_like(parameter) for parameter in ctx.saved_tensors]
        for part in ctx.visit():
            with torch.enable_grad():
                inputs = [  # the graph of a chunk ends at copies, unless it is needed again
                    p if again and p.requires_grad else p.detach().requires_grad_()
                    for p in ctx.saved_tensors
                ]
                tensors = FieldStatistics.of([part], ctx.phi.with_tensors(*inputs)).tensors
            outputs, needed = list(tensors.values()), [by_name[name] for name in tensors]
            terms = torch.autograd.grad(outputs, inputs, needed, create_graph=again)
            totals = [total + term for total, term in zip(totals, terms, strict=True)]
        return None, None, None, *totals
