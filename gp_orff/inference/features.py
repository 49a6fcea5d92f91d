"""Inference by features: random features, a grid, or a large grid with iterative solutions."""

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import torch
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import Likelihood
from jaxtyping import Float
from torch import Tensor

from gp_orff.data.dataset import Data
from gp_orff.data.noise import GroupNoise, Noise, Noises, group_noise, noises_of
from gp_orff.data.observations import PointObservations
from gp_orff.data.patterns import GroupKey
from gp_orff.data.statistics import FieldStatistics
from gp_orff.data.tracks import TrackObservations
from gp_orff.features.assemble import (
    check_domain,
    expand,
    expand_terms,
    num_features,
    require_separate,
    with_cells,
    with_constants,
)
from gp_orff.features.columns import Columns
from gp_orff.features.draws import Draw
from gp_orff.features.expansion import Expansion
from gp_orff.features.grid import MOST_DENSE
from gp_orff.features.truncation import truncated_variance
from gp_orff.inference.equations import (
    DenseRows,
    Group,
    NormalEquations,
    Primal,
    Rows,
    TrackRows,
    dual_equations,
    has_blocks,
    normal_equations,
    prefers_dual,
    whole_vectors,
)
from gp_orff.inference.iterative import Accuracy, Iterative
from gp_orff.inference.posteriors import (
    FieldDistribution,
    PlusConstant,
    PlusWhite,
    WeightPosterior,
    WithMean,
    check,
    plus_white,
)
from gp_orff.inference.products import OnProduct, Products, Site, SumsAlone, families
from gp_orff.inference.quadratic import Evidence
from gp_orff.kernels.tree import spectra_of, terms
from gp_orff.symbols.base import Identity, Symbol

# The interface of every inference: evidence and posterior of data under a kernel.


@dataclass(frozen=True)
class Posterior:
    """The posterior of a field, with its evidence."""

    distribution: FieldDistribution  # of the field minus its constant mean
    evidence: Evidence
    noises: Mapping[GroupKey, GroupNoise]  # of every group, with truncated variances
    mean: Float[Tensor, "p"]  # the given constant mean, or the one with the largest evidence

    def field(self, fixed: bool) -> FieldDistribution:
        """The distribution of the field. Its constant mean is fixed, or has a flat prior."""
        smooth, delta = self.distribution.split()
        root = self.mean.new_zeros(len(self.mean), 0) if fixed else self.evidence.mean_root()
        return plus_white(WithMean(smooth, self.mean, root), delta)


class Residuals(NamedTuple):
    """Residuals of the observations of a group, with the covariance of their predictions."""

    residual: Float[Tensor, "n v"]  # y − H E[f]
    covariance: Float[Tensor, "n v v"]  # H Cov[f] Hᵀ

    def take(self, rows: slice) -> "Residuals":
        """The residuals of some observations."""
        return Residuals(self.residual[rows], self.covariance[rows])


class Inference(ABC):
    """Inference of a field from data. The caller chooses the constant mean of the field."""

    data: Data
    is_exact = False  # whether by the exact kernel rather than features
    is_iterative = False

    @abstractmethod
    def evidence(self, kernel: Kernel, noises: Noises) -> Evidence:
        """The evidence, differentiable by the hyperparameters."""

    @abstractmethod
    def posterior(
        self, kernel: Kernel, noises: Noises, mean: Float[Tensor, "p"] | None
    ) -> Posterior:
        """The posterior under a constant mean. None: under the mean with the largest evidence."""

    def residuals(self, posterior: Posterior) -> Mapping[GroupKey, Residuals] | None:
        """The residuals of every group of the data under their posterior.

        None unless they follow from the factorised matrix.
        """
        return None

    def latent_of_sites(self, posterior: Posterior) -> Mapping[GroupKey, Residuals] | None:
        """y − E[ℓ] and Cov[ℓ] of every group, if the field changes within sites; otherwise None.

        ℓ is the latent vector that the records of a site share.
        """
        return None

    @abstractmethod
    def of(self, data: Data) -> "Inference":
        """Inference of this kind for other data."""

    @abstractmethod
    def prepare(self) -> None:
        """Read the data, if one pass serves all hyperparameters. Invalid data raise errors here."""

    def in_domain(self, kernel: Kernel, x: Float[Tensor, "n d"]) -> bool:
        """Whether predictions at x are accurate. Raises an error if the rule cannot extend to x."""
        return True

    def serves(self, symbol: Symbol | None) -> bool:
        """Whether the representation has an image under this symbol. None is the field itself."""
        return True

    def require(self, symbol: Symbol | None) -> None:
        """Raise a NotImplementedError if the representation has no image under the symbol."""
        if not self.serves(symbol):
            raise NotImplementedError(
                f"{type(symbol).__name__} needs the frequencies along every input, got a grid that "
                "sums over the frequencies along constant inputs; use Grid.for_data(x, domain=...) "
                "with a domain that has an extent along these inputs, or "
                "Grid(..., sum_constant=False)"
            )

    @property
    def truncated_share(self) -> float:
        """The largest share of the variance that the representation truncates."""
        return 0.0

    def left_out(
        self, symbol: Symbol, kernel: Kernel, space: Sequence[int]
    ) -> tuple[Float[Tensor, "q q"], Float[Tensor, "q q"]] | None:
        """The truncated variance of a symbol: the white part, and the part common to all points;

        None if nothing is truncated.
        """
        return None

    def with_constants(self, kernel: Kernel, expansion: Expansion) -> Expansion:
        """The features of a grid, followed by features for constants of absolute potentials."""
        return expansion

    def apply(
        self,
        symbol: Symbol,
        distribution: FieldDistribution,
        kernel: Kernel,
        space: Sequence[int],
    ) -> FieldDistribution:
        """The distribution of a symbol of the field.

        The truncated variance of the field has no image under a symbol. The symbol therefore gets
        its own truncated variance.
        """
        self.require(symbol)
        truncated = self.left_out(symbol, kernel, space)
        image = distribution.split()[0].apply(symbol, space)
        if truncated is None:
            return image
        delta, common = truncated
        return PlusWhite(PlusConstant(image, common) if common.any() else image, delta)

    def of_terms(
        self, kernel: Kernel, chosen: Sequence[int]
    ) -> tuple["Inference", Expansion | None]:
        """Return inference on the `chosen` terms of a sum of kernels, and features of the sum.

        In these features, the directions of all other terms are zero. They are None for the exact
        kernel, and if all terms are chosen.
        """
        return self, None

    def stale(self, kernel: Kernel, noises: Noises) -> bool:
        """Whether the hyperparameters are outside the range that this inference serves."""
        return False

    @property
    def note(self) -> str:
        """A note on the data, for the report; empty if there is none."""
        return ""

    @property
    def num_values(self) -> float:
        return self.data.num_values

    def log_density(
        self, evidence: Evidence, mean: Float[Tensor, "*b p"] | None, restricted: bool = False
    ) -> Float[Tensor, "*b"]:
        """log p(y) of all data, in nats, from the evidence.

        Without a `mean`, the constant mean is that with the largest evidence. If `restricted`, it
        is integrated out instead.
        """
        if restricted and mean is None:
            density = evidence.restricted_log_density(self.num_values)
        else:
            density = evidence.log_density(mean, self.num_values)
        return density + self.data.elbo_correction


def log_marginal_likelihood(
    inference: Inference,
    kernel: Kernel,
    likelihoods: Mapping[str, Likelihood],
    mean: Float[Tensor, "p"] | None,
    restricted: bool = False,
) -> Float[Tensor, ""]:
    """log p(y) of all data, in nats.

    Without a `mean`, the constant mean is that with the largest evidence. If `restricted`, it is
    integrated out instead.
    """
    evidence = inference.evidence(kernel, noises_of(kernel, likelihoods))
    return inference.log_density(evidence, mean, restricted)


# Inference by random features, or by the features of a frequency grid.
#
# An evaluation of the evidence proceeds as follows.
#
# 1. `expand` computes the features at the present hyperparameters. `truncated` computes the
#    variance δ that they omit.
# 2. If the dual algebra is cheaper, each observed value becomes a row of a matrix. Otherwise the
#    algebra uses sums over the data. They are computed once if the columns are shared
#    (`statistics`).
# 3. δ is added to the noise of each group. In sums, the weights of observations apply to δ too, as
#    if it were part of Σ (`unweighted_noise`).
# 4. Observations of symbols become dense rows. Tracks become groups with unit noise. Tracks along
#    directions become whitened rows. Each evaluation computes them again, as their noise changes.
# 5. `normal_equations` chooses the algebra for the groups and rows.


@dataclass(frozen=True)
class FeatureInference(Inference):
    """Inference by features. Statistics of fixed columns are computed once."""

    data: Data
    draws: Sequence[Draw]
    known: FieldStatistics | None = None  # of the shared columns, if computed

    def evidence(self, kernel: Kernel, noises: Noises) -> Evidence:
        expansion, delta, statistics = self._expanded(kernel)
        equations = self._equations(kernel, noises, expansion, delta, statistics)
        return self._with_scatter(equations.evidence(), noises, statistics)

    @torch.no_grad()
    def posterior(self, kernel, noises, mean):
        expansion, delta, statistics = self._expanded(kernel)

        def solve(
            features: Expansion, columns: Tensor | None = None
        ) -> tuple[WeightPosterior, Evidence]:
            """The posterior of the expansion, or of the part of it with some of its columns."""
            every = statistics is None or columns is None
            sums = statistics if every else statistics.select(columns)
            return self._equations(kernel, noises, features, delta, sums).posterior(mean)

        weights, evidence = solve(expansion)
        points = torch.cat([part.x for part in self.data.survey.sample])
        check(weights, expansion, lambda *half: solve(*half)[0], points)
        group_noises = self._group_noises(noises, delta, statistics)
        evidence = self._with_scatter(evidence, noises, statistics)
        mean = evidence.best_mean() if mean is None else mean
        return Posterior(plus_white(weights, delta), evidence, group_noises, mean)

    @torch.no_grad()
    def primal(self, kernel: Kernel, noises: Noises) -> Primal | None:
        """The normal equations of the weights, if they follow from statistics; otherwise None."""
        expansion, delta, statistics = self._expanded(kernel)
        if statistics is None or self.data.tracks:
            return None
        return self._equations(kernel, noises, expansion, delta, statistics).sums

    def _with_scatter(
        self, evidence: Evidence, noises: Noises, statistics: FieldStatistics | None
    ) -> Evidence:
        """Add the scatter of observations along tracks about their block means to the evidence.

        Statistics of tracks already include it.
        """
        written_out = self.data.tracks if statistics is None else self._along_directions
        if not written_out:
            return evidence
        return evidence.with_scatter(part.scatter_terms(noises) for part in written_out)

    @torch.no_grad()
    def num_features(self, kernel: Kernel) -> int:
        """F, the number of features at the present hyperparameters."""
        return expand(kernel, self.draws, self.data.num_inputs).num_features

    def in_domain(self, kernel: Kernel, x: Float[Tensor, "n d"]) -> bool:
        if self.has_shared_columns:
            return not self.draws[0].shared.outside(x).any()
        check_domain(kernel, self.draws, self._corners, x)
        return True

    def serves(self, symbol):
        if symbol is None or symbol.is_identity:
            return True
        return not (self.has_shared_columns and self.draws[0].shared.constant.any())

    @torch.no_grad()
    def written_out(self, kernel: Kernel) -> bool:
        """Whether the dual algebra is used, with a truncated variance for every observation."""
        return self.prefers_dual_algebra(expand(kernel, self.draws, self.data.num_inputs))

    @property
    def truncated_share(self) -> float:
        return self.draws[0].shared.tolerance.item() if self.has_shared_columns else 0.0

    def stale(self, kernel: Kernel, noises: Noises) -> bool:
        """Whether a lengthscale is outside the range that the frequencies serve."""
        return any(
            draw.ratio_outside_range(spectra_of(term))
            for draw, term in zip(self.draws, terms(kernel), strict=True)
        )

    def of(self, data):
        return self if data is self.data else replace(self, data=data, known=None)

    def prepare(self) -> None:
        if self.has_shared_columns:
            _ = self.statistics

    @cached_property
    def statistics(self) -> FieldStatistics:
        """The statistics of the shared columns."""
        if self.known is not None:
            return self.known
        return self.data.statistics(self.draws[0].shared_columns())

    @torch.no_grad()
    def statistics_of(self, kernel: Kernel) -> FieldStatistics:
        """The statistics at the present hyperparameters."""
        return self._statistics_of(self._expansion_and_delta(kernel)[0])

    def _statistics_of(self, expansion: Expansion) -> FieldStatistics:
        return self.statistics if self.has_shared_columns else self.data.statistics(expansion.phi)

    def truncated(
        self, kernel: Kernel, expansion: Expansion | None = None
    ) -> Float[Tensor, "p p"] | None:
        """δ, the variance that a grid truncates at every point; None if there is none."""
        variances = truncated_variance(Identity(), kernel, self.draws, (), expansion)
        return None if variances is None else variances[0]

    @torch.no_grad()
    def truncation_ratios(self, kernel: Kernel, noises: Noises) -> dict[GroupKey, float]:
        """δ over the noise variance of an observation with the mean weight, by group."""
        delta = self.truncated(kernel)
        variance = 0.0 if delta is None else delta.diagonal().mean().item()
        return {key: variance / noise for key, noise in self.data.local_noises(noises).items()}

    def left_out(self, symbol, kernel, space):
        variances = truncated_variance(symbol, kernel, self.draws, space)
        if variances is None or not (symbol.is_absolute and self._observes_constants):
            return variances
        return variances[0], torch.zeros_like(variances[1])  # features represent the constant

    def with_constants(self, kernel, expansion):
        return with_constants(expansion, terms(kernel), self.draws)

    @property
    def _observes_constants(self) -> bool:
        """Whether the data have information on the constants of potentials."""
        return any(part.symbol.is_absolute for part in self.data.symbol_data)

    def of_terms(self, kernel, chosen):
        every = terms(kernel)
        if len(chosen) == len(every):
            return self, None
        require_separate(every, self.draws, chosen)
        summands = [
            term if i in chosen else term.scaled(torch.zeros_like(term.outputscale))
            for i, term in enumerate(every)
        ]
        expansion = expand_terms(summands, self.draws, self.data.num_inputs).double().general()
        if self._observes_constants:
            expansion = with_constants(expansion, summands, self.draws)
        return replace(self, draws=[self.draws[i] for i in chosen]), expansion

    def prefers_dual_algebra(self, expansion: Expansion) -> bool:
        """Whether the dual algebra is cheaper than the primal one."""
        if not self.data.revisitable:
            return False
        if self.data.tracks:  # each evaluation averages their columns
            return self.num_values <= MOST_DENSE < expansion.num_features
        points = self.num_values / expansion.num_outputs
        # The dual algebra evaluates the features again, while shared sums are computed once. It
        # therefore has to be cheaper by a factor.
        points = (2 if self.has_shared_columns else 1) * points
        if not prefers_dual(expansion, points):  # before reading data that may not fit into memory
            return False
        whole = whole_vectors(self.data.observations) and not self.data.symbol_data
        return prefers_dual(expansion, points, whole)

    def has_dual_blocks(self, expansion: Expansion) -> bool:
        """Whether the dual algebra has a block of N points for each output."""
        further = self.data.symbol_data or self.data.tracks
        return not further and has_blocks(expansion) and whole_vectors(self.data.observations)

    @cached_property
    def _point_observations(self) -> PointObservations:
        return PointObservations(self.data.observations)

    def _equations(
        self,
        kernel: Kernel,
        noises: Noises,
        expansion: Expansion,
        delta: Float[Tensor, "p p"] | None,
        statistics: FieldStatistics | None,
    ) -> NormalEquations:
        """The normal equations, with the truncated variance in the noise of each observation."""
        for part in self.data.symbol_data:
            self.require(part.symbol)
        symbol_data = [
            DenseRows.of(part, expansion, noises, self.left_out(part.symbol, kernel, part.space))
            for part in self.data.symbol_data
        ]
        if statistics is None:
            white = None if delta is None else (delta, torch.zeros_like(delta))
            rows = [DenseRows.of(part, expansion, noises, white) for part in self.data.tracks]
            rows = symbol_data + rows
            return dual_equations(expansion, self._point_observations, rows, noises, delta)
        noise = self._group_noises(noises, delta, statistics)
        groups = [
            Group(group, Noise.of(noise[key].weighted)) for key, group in statistics.groups.items()
        ]
        rows: list[Rows] = [*symbol_data]
        if self.data.tracks:  # their statistics change with the noise
            expansion = expansion.general()
            groups += self._groups_of_tracks(statistics.phi, noises, delta)
            rows += self._directed_rows(expansion, noises, delta)
        return self.normal_equations(expansion, groups, rows)

    def normal_equations(
        self, expansion: Expansion, groups: Sequence[Group], rows: Sequence[Rows]
    ) -> NormalEquations:
        """The algebra of groups of statistics and of dense rows."""
        return normal_equations(expansion, groups, rows)

    def _group_noises(
        self,
        noises: Noises,
        delta: Float[Tensor, "p p"] | None,
        statistics: FieldStatistics | None,
    ) -> dict[GroupKey, GroupNoise]:
        """The noise of every group, with δ. In statistics, δ has the same weights as Σ."""
        if statistics is None:
            keys = [part.key for part in self.data.observations]
            return {key: GroupNoise(group_noise(key, noises), delta) for key in keys}
        return {
            key: GroupNoise(group_noise(key, noises, delta, group.masses, group.count))
            for key, group in statistics.groups.items()
        }

    def _groups_of_tracks(
        self, phi: Columns, noises: Noises, delta: Float[Tensor, "p p"] | None
    ) -> list[Group]:
        """Statistics of whitened tracks, whose noise covariance is the unit matrix."""
        groups = []
        for number, part in enumerate(self._of_vectors):
            averages = self._averages[number] if self.has_shared_columns else part.averages(phi)
            unit = Noise.of(torch.eye(part.y.shape[-1]).to(part.y))
            groups.append(Group(part.statistics(phi, averages, noises, delta), unit))
        return groups

    def _directed_rows(
        self, expansion: Expansion, noises: Noises, delta: Float[Tensor, "p p"] | None
    ) -> list[TrackRows]:
        """The rows of tracks along directions, whose block means have no common moments."""
        rows = []
        for number, part in enumerate(self._along_directions):
            shared = self.has_shared_columns
            averages = self._directed[number] if shared else part.averages_along(expansion.phi)
            rows.append(TrackRows.of(part, expansion, averages, noises, delta))
        return rows

    @cached_property
    def _averages(self) -> list[list[Float[Tensor, "b t k"]]]:
        """The shared columns averaged over the blocks of tracks, in batches, for each group."""
        return [part.averages(self.draws[0].shared_columns()) for part in self._of_vectors]

    @cached_property
    def _directed(self) -> list[Float[Tensor, "M p*T"]]:
        """The shared columns times directions, averaged over the blocks of tracks."""
        phi = self.draws[0].shared_columns()
        return [part.averages_along(phi) for part in self._along_directions]

    @property
    def _of_vectors(self) -> list[TrackObservations]:
        return [part for part in self.data.tracks if part.direction is None]

    @property
    def _along_directions(self) -> list[TrackObservations]:
        return [part for part in self.data.tracks if part.direction is not None]

    @property
    def _corners(self) -> Float[Tensor, "2 d"]:
        return torch.tensor(self.data.box, dtype=torch.float64).mT

    @property
    def has_shared_columns(self) -> bool:
        return self.draws[0].shared_columns() is not None

    def _expanded(
        self, kernel: Kernel
    ) -> tuple[Expansion, Float[Tensor, "p p"] | None, FieldStatistics | None]:
        """The features, the variance δ that they truncate, and the statistics.

        The statistics are None if the dual algebra is cheaper.
        """
        expansion, delta = self._expansion_and_delta(kernel)
        dual = self.prefers_dual_algebra(expansion)
        return expansion, delta, None if dual else self._statistics_of(expansion)

    def _expansion_and_delta(self, kernel: Kernel) -> tuple[Expansion, Tensor | None]:
        if not self.has_shared_columns:
            check_domain(kernel, self.draws, self._corners)
        expansion = expand(kernel, self.draws, self.data.num_inputs).double()
        delta = self.truncated(kernel, expansion)
        if self._observes_constants:
            expansion = self.with_constants(kernel, expansion)
        return expansion, delta


# Inference by the features of a large frequency grid, without their matrix.
#
# `feature_inference` chooses iterations only if factorisation is impossible or slow: for a grid
# with more features than memory permits, and with too many values for the dual algebra.


_MOST_NUMBERS = 2**27  # elements of a matrix of features, 1 GiB
_MOST_PRODUCTS = 1.5e11  # operations of its product with its transpose: 10 s on one core
_LARGEST = 20_000  # features: their matrix takes 3 GiB, its factorisation about 40 s on two cores
_MATRICES = 5  # matrices with F² elements in memory for variances at many points
_WRITTEN = 3  # matrices with F² elements in memory for any result
_USUAL_MEMORY = 2**33  # bytes, if the system does not report its memory


@dataclass(frozen=True)
class IterativeInference(FeatureInference):
    """Inference by F features on a lattice, with memory proportional to F instead of F².

    The mean of the weights, and variances at chosen points, are iterative solutions of linear
    systems to the tolerances of `accuracy`. log|A| is a random estimate with a standard error.

    Args:
        data: the data.
        draws: the frequencies of a grid, one draw for each term of the kernel.
        known: the statistics of the shared columns, if they are already computed.
        accuracy: the tolerances and numbers of random vectors.

    Example:
        >>> import gp_orff, torch
        >>> from gp_orff.data.dataset import Dataset
        >>> from gp_orff.data.reading import Options, read
        >>> from gp_orff.features.assemble import draw
        >>> from gp_orff.inference.features import IterativeInference
        >>> generator = torch.Generator().manual_seed(0)
        >>> x = torch.rand(400, 2, generator=generator, dtype=torch.float64)
        >>> data = Dataset.in_memory(read(x, torch.sin(9 * x), 2, Options()))
        >>> kernel = gp_orff.CurlFreeKernel(num_dims=2).double()
        >>> draws = draw(kernel, gp_orff.Grid.for_data(x))
        >>> noises = {"": 0.01 * torch.eye(2, dtype=torch.float64)}
        >>> posterior = IterativeInference(data, draws).posterior(
        ...     kernel, noises, None
        ... )
        >>> posterior.distribution.mean(x).shape
        torch.Size([400, 2])
    """

    accuracy: Accuracy = field(default_factory=Accuracy)
    is_iterative = True

    def prefers_dual_algebra(self, expansion) -> bool:
        return False

    def normal_equations(self, expansion, groups, rows):
        return Iterative(expansion.general(), groups, rows, self.accuracy)


# Tides and eddies, with an observation at every position and every time.


_FIXED = (
    "expected fixed hyperparameters for so many features, got trained ones; fit a model without "
    "frequencies= to a subset of the observations, and condition a second model with its kernel "
    "and likelihood on all observations"
)


@dataclass(frozen=True)
class ProductInference(FeatureInference):
    """Inference with the features of lines and of one lattice, for vectors at all pairs of
    positions and times.

    Three small matrices are factorised. Their sizes are the numbers of functions of space, of
    functions of time, and of features of lines. The evidence has no derivatives, so hyperparameters
    have to be learned from a subset of the observations.

    Args:
        data: the data.
        draws: the frequencies of a grid, one draw for each term of the kernel.
        known: the statistics of the shared columns, if they are already computed.
        site: the positions and times.
        ranks: the rank of the factor B(ω) of every term, followed by the ranks of the cells around
            ω = 0.
    """

    site: Site = None
    ranks: Sequence[int] = ()

    @classmethod
    def on_pairs(
        cls, data: Data, draws: Sequence[Draw], kernel: Kernel
    ) -> "ProductInference | None":
        """Return the inference if data and frequencies allow it, otherwise None.

        The columns must be those of a lattice and of lines. The data must be complete vectors at
        every pair of a position and a time.
        """
        pair = families(draws[0].shared_columns())
        if pair is None or not data.revisitable or data.tracks or data.symbol_data:
            return None
        observations, (lattice, lines) = data.observations, pair
        if not whole_vectors(observations):
            return None
        site = Site.of(observations[0].x, lines.nu.any(0), lattice.origin)
        ranks = [term.factor.rank for term in with_cells(terms(kernel), draws)[0]]
        return None if site is None else cls(data, draws, site=site, ranks=ranks)

    def of(self, data):
        if data is not self.data:  # a search on a subset, which is not a product
            raise NotImplementedError(_FIXED)
        return self

    @cached_property
    def statistics(self) -> FieldStatistics:
        return self.data.statistics(SumsAlone(self.draws[0].shared_columns().families))

    def evidence(self, kernel, noises):
        if torch.is_grad_enabled() and any(p.requires_grad for p in kernel.parameters()):
            raise NotImplementedError(_FIXED)
        return super().evidence(kernel, noises)

    def prefers_dual_algebra(self, expansion) -> bool:
        return False

    def normal_equations(self, expansion, groups, rows):
        lattice, lines = expansion.phi.families
        cells = [draw.cell for draw in self.draws if draw.on_lattice and draw.cell]
        pairs = zip([*self.draws, *cells], self.ranks, strict=True)
        of_lattice = [(draw, rank) for draw, rank in pairs if not draw.expands]
        general = expansion.general()
        products = Products.of(general, lattice, of_lattice, lines.nu.any(0))
        if products is None:
            raise ValueError(
                "expected one field in addition to fields of lines, with the same kernel of time "
                "in all its terms, and a grid of frequencies that is a product of space and time, "
                "got another kernel or grid; pass spacing= and tolerance= to gp_orff.Grid, or a "
                "smaller max_features"
            )
        sizes = (*products.shape, general.num_features - len(products.weights))
        if max(sizes) > (most := most_factorised(general.directions.device)):
            space, time, of_lines = sizes
            raise ValueError(
                f"expected at most {most} functions of space, functions of time and features of "
                f"lines, got {space}, {time} and {of_lines}; pass a smaller largest_index to "
                "gp_orff.Grid, or use a longer lengthscale"
            )
        return OnProduct(general, groups, rows, products, self.site)


@torch.no_grad()
def feature_inference(data: Data, draws: Sequence[Draw], kernel: Kernel) -> FeatureInference:
    """Return inference with features, by matrix factorisations or by an iterative method.

    The result is a `FeatureInference`, which factorises matrices, with two exceptions.

    It is an `IterativeInference` for a frequency grid that meets both of these conditions:

    1. A matrix with one row and column for each feature is too large. The limit is 20 000 features,
       or the smaller number whose matrices fit into half of the memory, but at least 8192.
    2. A matrix with one row and column for each observed value is too large or too slow. This is
       so for more than 8192 values, for a feature matrix above 1 GiB, or above about 10 s.

    It is a `ProductInference` if all of these conditions are met:

    1. There are more than 8192 features.
    2. The kernel is the sum of a kernel of lines, such as tides, and another kernel.
    3. Vectors were observed at every pair of a position and a time.

    Args:
        data: the observations.
        draws: the frequencies, one draw for each term of the kernel.
        kernel: the kernel, at any hyperparameters.

    Raises:
        ValueError: observations along tracks need iterations, which do not support tracks; or a
            kernel with lines has more features than fit into memory.
    """
    features = num_features(kernel, draws)
    phi = draws[0].shared_columns()
    on_grid = phi is not None and phi.on_lattice
    rows = data.num_values if data.revisitable else float("inf")
    written_out = rows <= MOST_DENSE and rows * features <= _MOST_NUMBERS
    if not data.tracks:  # tracks have no alternative
        written_out = written_out and rows**2 * features <= _MOST_PRODUCTS
    device = next(kernel.parameters()).device
    most = most_factorised(device)
    if (
        features > MOST_DENSE
        and (product := ProductInference.on_pairs(data, draws, kernel)) is not None
    ):
        return product
    fitting = math.isqrt(_memory(device) // (8 * _WRITTEN))
    if features > fitting and families(phi) is not None:
        raise ValueError(
            f"expected whole vectors at every pair of a position and a time, or at most {fitting} "
            f"features, whose matrix fits into memory, got {features} features for other data; "
            "condition on fewer observations without frequencies=, or pass a smaller fastest=, "
            "max_features= or largest_index= to the grid"
        )
    dense = not on_grid or features <= most or written_out
    if data.tracks and not dense:
        raise ValueError(
            f"expected at most {most} features for {rows:.0f} values along tracks, got "
            f"{features}; pass max_features={most}, or use a coarser grid"
        )
    return (FeatureInference if dense else IterativeInference)(data, draws)


def most_factorised(device: torch.device) -> int:
    """Return the largest number of features whose normal equations are factorised."""
    affordable = math.isqrt(_memory(device) // (2 * 8 * _MATRICES))
    return max(MOST_DENSE, min(affordable, _LARGEST))


def _memory(device: torch.device) -> int:
    """The memory of a device in bytes."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # not every system has these
        return _USUAL_MEMORY
