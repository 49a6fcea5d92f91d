"""Sufficient statistics of observations by group, and their conversion to plain values."""

import io
import math
import os
import pickle
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from operator import add, sub
from pathlib import Path
from typing import BinaryIO, NamedTuple
from zipfile import BadZipFile

import torch
import torch.distributed as distributed
from jaxtyping import Float, Int
from torch import Tensor

from gp_orff.data.observations import Observations
from gp_orff.data.patterns import Components, GroupKey, Pattern
from gp_orff.features import phases
from gp_orff.features.columns import Columns, SideBySide, TrigColumns
from gp_orff.features.expansion import FeatureExpansion
from gp_orff.features.lattice import LatticeColumns
from gp_orff.features.lines import LineColumns
from gp_orff.features.phases import LinearPhases, Phases, ProjectedPhases, SumOfPhases
from gp_orff.features.rings import HarmonicColumns
from gp_orff.features.zoo import Bump, DotProductColumns, TemplateColumns
from gp_orff.kernels import dot_product
from gp_orff.symbols.base import required

# Sufficient statistics of vector observations under the columns φ; they add up over points.
#
# 1. One pass over the data computes sums for each pattern of observation (`of_observations`). On a
#    lattice the Gram matrix C is stored as the sums T of `features.lattice`, (4m+1)^d numbers.
# 2. The sums of chunks, workers and machines are added. The sums of observations that are removed
#    are subtracted.
# 3. The normal equations need C[c, c] (`feature_grams`): T is expanded to the columns of the
#    features. In a search on a grid neither changes, so the result is stored until other columns
#    are needed. Small matrices are stored for three sets of columns, because features with complex
#    directions have two layers and their cross terms.
# 4. Noise enters later, as p×p matrices. On a grid, statistics do not depend on hyperparameters.


_MOST_KEPT = 2**26  # largest size of matrices of which several sets are stored
_LAYERS = 3  # sets of matrices for features with complex directions


class Moments(NamedTuple):
    """Moments of the columns φ under the weights a_n of the points."""

    gram: Tensor  # Σ a φφᵀ, in the form that `Columns.gram` returns
    column_sum: Float[Tensor, "*b M"]  # Σ a φ
    mass: Tensor | float  # Σ a


@dataclass(frozen=True)
class Weights:
    """Sums over the relative precisions w_n of observations. Sums of parts of the data add."""

    count: float  # N
    total: float  # Σ w_n
    squares: float  # Σ w_n²
    log: float = 0.0  # Σ log w_n

    @classmethod
    def of(cls, weight: Float[Tensor, "n"] | None, count: int) -> "Weights":
        """The sums over all observations, with w_n = 1 if there are no weights."""
        if weight is None:
            return cls(count, count, count)
        sums = weight.sum(), weight.square().sum(), weight.log().sum()
        return cls(count, *(value.item() for value in sums))

    @property
    def mean(self) -> float:
        """Σ w_n / N."""
        return self.total / self.count

    def local_mean(self, num_observations: float) -> float:
        """Return the mean weight of a few neighbouring observations, of which one has a large
        weight.

        It is the expected mean of `num_observations` weights. One observation is drawn with the
        probability w_n/Σw_n, the others uniformly. Such observations determine the field at places
        where its posterior variance is smallest.
        """
        # Σw²/Σw is at least the mean by Cauchy–Schwarz, except for rounding.
        weighted_mean = max(self.squares / self.total, self.mean)
        return self.mean + (weighted_mean - self.mean) / max(num_observations, 1.0)

    def mapped(self, function: Callable[..., float], *others: "Weights") -> "Weights":
        """Apply a function to each sum of these weights and of `others`."""
        return Weights(*map(function, *map(astuple, (self, *others))))

    def __add__(self, other: "Weights") -> "Weights":
        return self.mapped(add, other)


def added(first: Mapping, second: Mapping) -> dict:
    """Sums by key. If both mappings have a key, the sums are added."""
    sums = {key: first[key] + more if key in first else more for key, more in second.items()}
    return {**first, **sums}


@dataclass(frozen=True)
class Statistics:
    """The sufficient statistics C = Σφφᵀ, Z = Σφyᵀ, s = Σφ, Y₂ = Σyyᵀ, y₁ = Σy and N.

    Posterior and evidence depend on the data through these sums only. The sums of chunks, streams
    and machines add exactly. If each point has a relative precision w_n, each sum except N is
    weighted by w_n. Observations of some components, or along directions, have the moments and
    values of `gp_orff.data.patterns`.

    Example:
        >>> import torch
        >>> from gp_orff.features.columns import TrigColumns
        >>> from gp_orff.data.statistics import Statistics
        >>> phi, x, y = (
        ...     TrigColumns.of(torch.randn(3, 2)),
        ...     torch.randn(10, 2),
        ...     torch.randn(10, 2),
        ... )
        >>> parts = Statistics.of(x[:4], y[:4], phi) + Statistics.of(
        ...     x[4:], y[4:], phi
        ... )
        >>> total = Statistics.of(x, y, phi)
        >>> parts.count, torch.allclose(parts.gram, total.gram)
        (10, True)
    """

    phi: Columns
    pattern: Pattern
    moments: tuple[Moments, ...]  # one for each weight a_k of the pattern
    cross: Float[Tensor, "*b M q"]  # Z
    second_moment: Float[Tensor, "*b q q"]  # Y₂
    total: Float[Tensor, "*b q"]  # y₁
    weights: Weights
    _grams: list = field(default_factory=list, init=False, repr=False, compare=False)
    _kept: list = field(default_factory=list, init=False, repr=False, compare=False)

    @classmethod
    def of(
        cls, x: Float[Tensor, "*b N d"], y: Float[Tensor, "*b N p"], phi: Columns
    ) -> "Statistics":
        """Statistics of complete vectors in one pass, in float64, differentiable in x, y and ω."""
        y = y.double()
        gram, cross, column_sum = phi.moments(x, y)
        moments = (Moments(gram, column_sum, float(x.shape[-2])),)
        pattern = Components.every(y.shape[-1])
        weights = Weights.of(None, x.shape[-2])
        return cls(phi, pattern, moments, cross, y.mT @ y, y.sum(-2), weights)

    @classmethod
    def of_observations(
        cls,
        part: Observations,
        phi: Columns,
    ) -> "Statistics":
        """Statistics of observations of one pattern in one pass, differentiable in ω."""
        vectors = part.pattern.vectors(part.y, part.direction)
        weights = part.pattern.weights(part.direction, part.y)
        weighted_vectors = vectors
        if part.weight is not None:
            each = part.weight.unsqueeze(-1)
            weights, weighted_vectors = weights * each, vectors * each
        grams, cross, sums = phi.sums(part.x, weighted_vectors, weights)
        masses = weights.sum(0)
        return cls(
            phi,
            part.pattern,
            tuple(Moments(*moments) for moments in zip(grams, sums, masses, strict=True)),
            cross,
            vectors.mT @ weighted_vectors,
            weighted_vectors.sum(0),
            Weights.of(part.weight, len(part)),
        )

    @property
    def gram(self) -> Float[Tensor, "*b M M"]:
        """The sum C, for a pattern with one weight."""
        (moments,) = self.moments
        return self.phi.gram(moments.gram)

    @property
    def column_sum(self) -> Float[Tensor, "*b M"]:
        """The sum s, for a pattern with one weight."""
        (moments,) = self.moments
        return moments.column_sum

    @property
    def num_values(self) -> float:
        """The number of observed values."""
        return self.count * self.pattern.num_values

    @property
    def masses(self) -> Float[Tensor, "k"]:
        """Σ_n w_n a_nk for each weight a_k."""
        return torch.as_tensor(
            [float(moments.mass) for moments in self.moments], dtype=torch.float64
        )

    @property
    def count(self) -> float:
        """The number N of observations."""
        return self.weights.count

    def feature_grams(
        self, expansion: FeatureExpansion, other: FeatureExpansion | None = None
    ) -> list[Float[Tensor, "*b F F"]]:
        """C[c,c′] for each weight a_k, with the columns c of `expansion` and c′ of `other`. Without
        `other`, c′ = c. The result is cached if C is constant.

        A value made by `replace` starts with an empty cache.
        """
        right = expansion if other is None else other
        for columns, others, grams in self._grams:
            if torch.equal(columns, expansion.columns) and torch.equal(others, right.columns):
                return grams
        grams = []
        for moments in self.moments:
            gram = self.phi.gram(moments.gram)
            if not (expansion.one_to_one and right.one_to_one):
                # Rows are gathered first, then columns of the transpose: the result is C[c, c′]ᵀ.
                gram = right.gather(expansion.gather(gram).mT)
                gram = gram if other is None else gram.mT  # symmetric without `other`
            grams.append(gram)
        # Matrices with a graph belong to one evaluation of the gradient and are not stored.
        if not any(gram.requires_grad for gram in grams):
            # Small matrices are stored for the last sets of columns, large ones for the latest set
            # only.
            few = sum(gram.numel() for gram in grams) <= _MOST_KEPT
            self._grams[:] = [
                (expansion.columns, right.columns, grams),
                *(self._grams[: _LAYERS - 1] if few else []),
            ]
        return grams

    def kept(
        self, compute: Callable[["Statistics"], list[Tensor]], keys: Sequence[Tensor]
    ) -> list[Tensor]:
        """Return the result of `compute` for these statistics. The result is stored, and
        computed again only if the keys change."""
        if not (self._kept and all(map(torch.equal, self._kept[0], keys))):
            self._kept[:] = [keys, compute(self)]
            self._grams.clear()  # the matrices that `compute` has used
        return self._kept[1]

    def select(self, columns: Int[Tensor, "k"]) -> "Statistics":
        """The statistics of selected columns."""
        moments = tuple(
            Moments(
                self.phi.gram(part.gram)[..., columns, :][..., columns],
                part.column_sum[..., columns],
                part.mass,
            )
            for part in self.moments
        )
        phi, cross = self.phi.select(columns), self.cross[..., columns, :]
        return replace(self, phi=phi, moments=moments, cross=cross)

    def on(self, phi: LatticeColumns) -> "Statistics":
        """Return the statistics of columns `phi`, whose frequencies are part of this lattice."""
        moments = []
        for part in self.moments:
            gram = self.phi.crop(part.gram, phi)
            moments.append(Moments(gram, phi.column_sum(gram), part.mass))
        cross = self.phi.pick(self.cross, phi)
        return replace(self, phi=phi, moments=tuple(moments), cross=cross)

    def to(self, device: torch.device, phi: Columns) -> "Statistics":
        """These statistics on another device, where `phi` is."""
        moved = self._mapped(lambda sums: sums.to(device) if torch.is_tensor(sums) else sums)
        return replace(moved, phi=phi)

    def __add__(self, other: "Statistics") -> "Statistics":
        return self._mapped(add, other)

    def __sub__(self, other: "Statistics") -> "Statistics":
        return self._mapped(sub, other)

    def __mul__(self, factor: float) -> "Statistics":
        """The statistics of data in which every observation occurs `factor` times."""
        return self._mapped(lambda sums: factor * sums)

    __rmul__ = __mul__

    def _mapped(self, function: Callable, *others: "Statistics") -> "Statistics":
        """Apply a function to each sum of these statistics and of `others`."""
        every = self, *others
        moments = zip(*(statistics.moments for statistics in every), strict=True)
        return replace(
            self,
            moments=tuple(Moments(*map(function, *parts)) for parts in moments),
            weights=self.weights.mapped(function, *(other.weights for other in others)),
            **{
                name: function(*(getattr(statistics, name) for statistics in every))
                for name in ("cross", "second_moment", "total")
            },
        )


# Columns φ from the plain values that `Columns.plain` returns.


def unpack_columns(content: Mapping) -> Columns:
    """The columns from the content that `Columns.plain` returned."""
    if "families" in content:
        return SideBySide(tuple(map(unpack_columns, content["families"])))
    if "indices" in content:
        return LatticeColumns.of(content["indices"], content["spacing"], content["origin"])
    if "nu" in content:
        return LineColumns(unpack_columns(content["lattice"]), content["nu"])
    if "polynomials" in content:
        return _unpack_dot_product(content)
    if "wavevectors" in content:
        parts = (content["side"], content["origin"], tuple(content["dims"]))
        return HarmonicColumns(content["wavevectors"], *parts)
    if "templates" in content:
        content = dict(content)
        function = Bump(content.pop("a"), content.pop("p"))
        return TemplateColumns(**{**content, "dims": tuple(content["dims"])}, function=function)
    return TrigColumns(_unpack_phases(content), content["sampled"])


def _unpack_dot_product(content: Mapping) -> DotProductColumns:
    polynomials = dict(content["polynomials"])
    cls = getattr(dot_product, polynomials.pop("class"))
    return DotProductColumns(
        phases=_unpack_phases(content["phases"]),
        polynomials=cls(**polynomials),
        dims=tuple(content["dims"]),
        **{name: content[name] for name in ("degrees", "orders", "scale", "offset")},
    )


def _unpack_phases(content: Mapping) -> Phases:
    if "parts" in content:
        return SumOfPhases(tuple(map(_unpack_phases, content["parts"])))
    if "omega" in content:
        return LinearPhases(content["omega"])
    arguments = {key: content[key] for key in ("radius", "inverse_lengthscale", "chosen")}
    dims, num_inputs = phases.as_range(tuple(content["dims"])), content["num_inputs"]
    projection = dict(content["projection"])
    cls = getattr(phases, projection.pop("class"))
    return ProjectedPhases(cls(**projection), dims=dims, num_inputs=num_inputs, **arguments)


# The keys of groups as plain values, and back.


# Common parts of the file formats of this package: atomic writes, and a check of the kind.


def write_whole(path: str | os.PathLike, write: Callable[[BinaryIO], object]) -> None:
    """Replace a file by the output of `write`. If the write is interrupted, the old file remains.

    The permissions of the file do not change. A new file has the permissions that `open` would set.
    """
    path = Path(path)
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        mask = os.umask(0)  # the mask can only be read by setting it
        os.umask(mask)
        mode = 0o666 & ~mask
    temporary = {"dir": path.parent, "prefix": f".{path.name}.", "delete": False}
    with tempfile.NamedTemporaryFile(**temporary) as file:
        try:
            write(file)
            # The new content must be on disk before the name refers to it. Otherwise, a crash in
            # between would leave an empty file.
            file.flush()
            os.fsync(file.fileno())
            os.chmod(file.name, stat.S_IMODE(mode))
            os.replace(file.name, path)
        except BaseException:
            Path(file.name).unlink(missing_ok=True)
            raise


def check_kind(record: object, kind: str, expected: str, place: str = "") -> None:
    """Raise a ValueError unless a record is a dict whose entry "format" is `kind`.

    Args:
        record: the content of a file.
        kind: the expected format.
        expected: the words of the message that precede the kind, such as "a file of".
        place: the end of the message, such as " in model.pt".
    """
    actual = record.get("format") if isinstance(record, dict) else type(record).__name__
    if actual != kind:
        raise ValueError(f"expected {expected} a {kind}, got {actual!r}{place}")


# Sums of groups as plain values. The keys are part of the file format and must not change.


def pack_group(key: GroupKey, group: Statistics) -> dict:
    """The sums of a group, without the columns, which are common to all groups."""
    return {
        **key.plain(),
        "moments": [[_own(m.gram), _own(m.column_sum), float(m.mass)] for m in group.moments],
        "cross": _own(group.cross),
        "second_moment": _own(group.second_moment),
        "total": _own(group.total),
        "weights": list(astuple(group.weights)),
    }


def unpack_group(content: Mapping, phi: Columns) -> tuple[GroupKey, Statistics]:
    """The key and the sums of a group, for the columns `phi`."""
    key = GroupKey.from_plain(content)
    return key, Statistics(
        phi,
        key.pattern,
        tuple(Moments(*parts) for parts in content["moments"]),
        content["cross"],
        content["second_moment"],
        content["total"],
        _unpack_weights(content),
    )


def _own(values: Tensor) -> Tensor:
    """Values on the CPU in separate memory: files store the complete memory of a view."""
    values = values.detach().cpu()
    whole = values.untyped_storage().nbytes() == values.nbytes
    return values if whole else values.clone()


def _unpack_weights(group: Mapping) -> Weights:
    """The sums of weights. Older files have N and Σ log w_n only, and get equal weights."""
    if "weights" in group:
        return Weights(*group["weights"])
    count, weight = group["count"], math.exp(group["log_weight"] / group["count"])
    return Weights(count, weight * count, weight**2 * count, group["log_weight"])


# The sufficient statistics of observations of a vector field, group by group.


_KIND, _VERSION = "gp_orff.FieldStatistics", 1  # format of the bytes


@dataclass(frozen=True)
class FieldStatistics:
    """The sufficient statistics of observations for a posterior with fixed frequencies.

    `VectorFieldGP.statistics` and `VectorFieldGP.statistics_of` return them, and
    `VectorFieldGP.condition` and `update` accept them. Their size depends on the number of
    frequencies, not on the number of observations. Statistics with the same frequencies combine
    exactly:

    - `a + b` and `sum(parts)` are the statistics of all observations.
    - `a - b` removes the observations of b from a.
    - `0.9 * a` multiplies the weight of each observation by 0.9, to discount old data gradually.

    Args:
        phi: the M cosine and sine functions φ(x) of the frequencies.
        groups: the sums over the observations y with q components, for each group: Σφφᵀ (M, M),
            Σφyᵀ (M, q), Σφ (M,), Σyyᵀ (q, q), Σy (q,), and the number N of observations.
        elbo_correction: the contribution of learned weights to the ELBO (evidence lower bound) in
            nats, for Student-t noise.

    Raises:
        TypeError: An operand of + or − is not a `FieldStatistics`.
        ValueError: The frequencies differ, more observations are subtracted than there are, or a
            factor is not positive.

    Example:
        >>> import gp_orff, torch
        >>> x, y = torch.rand(300, 2).double(), torch.randn(300, 2).double()
        >>> model = gp_orff.VectorFieldGP(
        ...     gp_orff.CurlFreeKernel(num_dims=2)
        ... ).condition(x, y)
        >>> first, second = (model.statistics_of(x[i::2], y[i::2]) for i in (0, 1))
        >>> (first + second).num_values
        600
        >>> model = model.condition(model.statistics - second)
        >>> model.statistics.num_values
        300
    """

    phi: Columns
    groups: Mapping[GroupKey, Statistics]
    elbo_correction: float = 0.0

    @classmethod
    def of(cls, parts: Iterable[Observations], phi: Columns) -> "FieldStatistics":
        """Return the statistics of observations for the columns `phi`, in one pass.

        Args:
            parts: the observations.
            phi: the columns.
        """
        groups: dict[GroupKey, Statistics] = {}
        for part in parts:
            groups = added(groups, {part.key: Statistics.of_observations(part, phi)})
        return cls(phi, groups)

    @property
    def num_values(self) -> float:
        """The number of observed values, which is N·p minus the number of missing components."""
        return sum(group.num_values for group in self.groups.values())

    def plain(self) -> dict[str, object]:
        """Return these statistics as plain values on the CPU. `from_plain` restores them."""
        return {
            "columns": self.phi.plain(),
            "groups": [pack_group(key, group) for key, group in self.groups.items()],
            "bound": self.elbo_correction,
        }

    @classmethod
    def from_plain(cls, content: Mapping) -> "FieldStatistics":
        """Return the statistics from `content`, the result of `plain`."""
        phi = unpack_columns(content["columns"])
        groups = dict(unpack_group(group, phi) for group in content["groups"])
        return cls(phi, groups, content["bound"])

    def to_bytes(self) -> bytes:
        """Return these statistics as bytes, for a file or another machine.

        `from_bytes` restores them. A pickle has the same size.

        Raises:
            ValueError: The frequencies are from a rule with a function, such as
                `Templates(function=...)`.

        Example:
            >>> import gp_orff, torch
            >>> model = gp_orff.VectorFieldGP(gp_orff.CurlFreeKernel(num_dims=2))
            >>> model = model.condition(torch.rand(20, 2), torch.randn(20, 2))
            >>> content = model.statistics.to_bytes()
            >>> gp_orff.FieldStatistics.from_bytes(content).num_values
            40
        """
        content = self.plain()
        if _has_function(content):
            raise ValueError(
                f"expected a {_KIND} of plain values, got columns of a rule with a function, "
                "which cannot be saved; add the data in one process, or use a rule without "
                "function= and sampler="
            )
        stream = io.BytesIO()
        torch.save({"format": _KIND, "version": _VERSION, **content}, stream)
        return stream.getvalue()

    @classmethod
    def from_bytes(cls, content: bytes) -> "FieldStatistics":
        """Return statistics on the CPU from the result of `to_bytes`.

        Args:
            content: the bytes.

        Raises:
            ValueError: The bytes are damaged, are not statistics, or are from a newer version.

        Example:
            >>> import gp_orff, torch
            >>> model = gp_orff.VectorFieldGP(gp_orff.CurlFreeKernel(num_dims=2))
            >>> model = model.condition(torch.rand(20, 2), torch.randn(20, 2))
            >>> content = model.statistics.to_bytes()
            >>> gp_orff.FieldStatistics.from_bytes(content).num_values
            40
        """
        try:
            record = torch.load(io.BytesIO(content), weights_only=True, map_location="cpu")
        except (RuntimeError, EOFError, ValueError, BadZipFile, pickle.UnpicklingError) as error:
            raise ValueError(
                f"expected bytes of a {_KIND}, got other or damaged bytes; make them with to_bytes"
            ) from error
        check_kind(record, _KIND, "bytes of")
        if record["version"] > _VERSION:
            raise ValueError(
                f"expected a {_KIND} of a version up to {_VERSION}, got {record['version']}: "
                "install a newer gp_orff"
            )
        return cls.from_plain(record)

    def __reduce__(self) -> tuple:
        return FieldStatistics.from_bytes, (self.to_bytes(),)

    def __deepcopy__(self, memo: dict) -> "FieldStatistics":
        return self  # it is immutable

    def all_reduce(self, group: object = None) -> "FieldStatistics":
        """Return the sum of the statistics of all processes, by `torch.distributed`.

        Call it in each process. Each process gets the same sum, on its device. All processes must
        have the same frequencies, from copies of one model.

        Args:
            group: a process group of `torch.distributed`. The default is all processes.

        Raises:
            RuntimeError: `torch.distributed` has not been initialised.
            ValueError: The frequencies differ between processes.
        """
        if not (distributed.is_available() and distributed.is_initialized()):
            raise RuntimeError(
                "expected an initialised torch.distributed, got none; call "
                "torch.distributed.init_process_group first"
            )
        parts = [None] * distributed.get_world_size(group)
        distributed.all_gather_object(parts, self.to_bytes(), group)
        return sum(map(FieldStatistics.from_bytes, parts)).to(self.phi.device)

    def select(self, columns: Int[Tensor, "k"]) -> "FieldStatistics":
        """Return the statistics of the columns with the indices `columns` (k,)."""
        return self._mapped(lambda group: group.select(columns), self.phi.select(columns))

    def on(self, phi: LatticeColumns) -> "FieldStatistics":
        """Return the statistics of columns `phi`, whose frequencies are part of this lattice."""
        return self._mapped(lambda group: group.on(phi), phi)

    def _mapped(
        self, function: Callable[[Statistics], Statistics], phi: Columns, factor: float = 1.0
    ) -> "FieldStatistics":
        """The statistics for the columns `phi`, with a function of each group."""
        groups = {key: function(group) for key, group in self.groups.items()}
        return FieldStatistics(phi, groups, factor * self.elbo_correction)

    def __add__(self, other: "FieldStatistics | int") -> "FieldStatistics":
        if other == 0:  # the start value of sum()
            return self
        self._require_same(other)
        groups = added(self.groups, other.groups)
        return FieldStatistics(self.phi, groups, self.elbo_correction + other.elbo_correction)

    __radd__ = __add__

    def __sub__(self, other: "FieldStatistics") -> "FieldStatistics":
        self._require_same(other)
        groups = dict(self.groups)
        for key, statistics in other.groups.items():
            if key not in groups or groups[key].count < statistics.count:
                raise ValueError(
                    "expected to subtract no more observations than there are, got "
                    f"{statistics.count} of group {key.label!r} ({key.pattern}) from "
                    f"{groups[key].count if key in groups else 0}; subtract observations that were "
                    "added before"
                )
            groups[key] = groups[key] - statistics
        # A group without observations has no mean and no noise to estimate, so it is dropped.
        remaining = {key: statistics for key, statistics in groups.items() if statistics.count}
        return FieldStatistics(self.phi, remaining, self.elbo_correction - other.elbo_correction)

    def __mul__(self, factor: float) -> "FieldStatistics":
        if not 0 < factor < float("inf"):
            raise ValueError(
                f"expected a positive factor, got {factor}; subtract statistics to remove them"
            )
        return self._mapped(lambda group: factor * group, self.phi, factor)

    __rmul__ = __mul__

    def _require_same(self, other: object) -> None:
        required(
            other,
            FieldStatistics,
            "expected FieldStatistics",
            "make them with statistics_of(x, y) of a model",
        )
        if not self.phi.same(other.phi):
            raise ValueError(
                "expected statistics with the same frequencies, got different ones; make them with "
                "statistics_of(x, y) of one model or of its copies"
            )

    def to(self, device: torch.device) -> "FieldStatistics":
        """Return these statistics on another `device`."""
        phi = self.phi.to(device)
        return self._mapped(lambda group: group.to(device, phi), phi)

    @property
    def tensors(self) -> dict[tuple, Tensor]:
        """The sums (M, M), (M,) and (M, q) that depend on the frequencies, by group, name and
        index."""
        tensors = {}
        for key, group in self.groups.items():
            tensors[key, "cross", 0] = group.cross
            for index, (gram, column_sum, _) in enumerate(group.moments):
                tensors |= {(key, "gram", index): gram, (key, "column_sum", index): column_sum}
        return tensors

    def with_tensors(self, tensors: Mapping[tuple, Tensor], phi: Columns) -> "FieldStatistics":
        """Return statistics for the columns `phi`, with other sums `tensors`: (M, M), (M,) and
        (M, q)."""
        groups = {}
        for key, group in self.groups.items():
            moments = tuple(
                Moments(tensors[key, "gram", i], tensors[key, "column_sum", i], part.mass)
                for i, part in enumerate(group.moments)
            )
            cross = tensors[key, "cross", 0]
            groups[key] = replace(group, phi=phi, moments=moments, cross=cross)
        return FieldStatistics(phi, groups, self.elbo_correction)


def _has_function(values: object) -> bool:
    """Whether a function is among plain values."""
    if isinstance(values, Mapping):
        values = list(values.values())
    if isinstance(values, list | tuple):
        return any(map(_has_function, values))
    return callable(values)


Visit = Callable[[], Iterator[Observations]]


def differentiable_statistics(visit: Visit, phi: Columns) -> FieldStatistics:
    """Statistics whose derivative with respect to ω is computed in a second visit. No chunk stays
    in memory, unless the derivative is differentiated again."""
    fixed = FieldStatistics.of(visit(), phi.detached())
    tensors = _StatisticsByVisit.apply(phi, visit, fixed.tensors, *phi.tensors)
    return fixed.with_tensors(dict(zip(fixed.tensors, tensors, strict=True)), phi)


class _StatisticsByVisit(torch.autograd.Function):
    @staticmethod
    def forward(ctx, phi, visit, tensors, *parameters):
        # The sums are computed in a pass without a graph. They enter the graph here, as functions
        # of the parameters of φ, so that `backward` runs when all their gradients are known.
        ctx.phi, ctx.visit, ctx.names = phi, visit, list(tensors)
        ctx.save_for_backward(*parameters)
        return tuple(tensors.values())

    @staticmethod
    def backward(ctx, *gradients):
        by_name, again = dict(zip(ctx.names, gradients, strict=True)), torch.is_grad_enabled()
        # The sums are computed again, chunk by chunk with a graph. Each graph is contracted with
        # the gradient of the sums at once, so that only one chunk is in memory.
        totals = [torch.zeros_like(parameter) for parameter in ctx.saved_tensors]
        for part in ctx.visit():
            with torch.enable_grad():
                inputs = [  # the graph of a chunk ends at copies, unless it is used again
                    p if again and p.requires_grad else p.detach().requires_grad_()
                    for p in ctx.saved_tensors
                ]
                tensors = FieldStatistics.of([part], ctx.phi.with_tensors(*inputs)).tensors
            outputs, needed = list(tensors.values()), [by_name[name] for name in tensors]
            terms = torch.autograd.grad(outputs, inputs, needed, create_graph=again)
            totals = [total + term for total, term in zip(totals, terms, strict=True)]
        return None, None, None, *totals
