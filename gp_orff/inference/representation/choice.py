"""The representation of a kernel for some data: itself, a grid or random frequencies."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import Likelihood
from jaxtyping import Float
from torch import Tensor

from gp_orff.data.dataset import Data, StatisticsOnly
from gp_orff.data.noise.covariances import Noises, noises_of
from gp_orff.data.patterns import GroupKey
from gp_orff.data.tracks.observations import require_none
from gp_orff.features.assemble import draw, expand, num_features, term_spectra
from gp_orff.features.domain import Box, box_of, contains, corners, far_message, union
from gp_orff.features.frequencies.auto import MOST_DENSE, Auto
from gp_orff.features.frequencies.grid import Grid, GridBudgetError
from gp_orff.features.frequencies.rule import Draw, Rule
from gp_orff.inference.conditioning import (
    ExactInference,
    Inference,
    feature_inference,
    has_covariance,
)
from gp_orff.inference.conditioning.few_sites import MOST_REPEATED, exact_instead
from gp_orff.inference.kept import Kept
from gp_orff.inference.memo import Memo
from gp_orff.inference.representation.resolution import (
    COARSE_FEATURES,
    COARSE_TOLERANCE,
    MOST_TRAINING,
    PERIOD_OF_LEARNED,
    Resolution,
    grid_for,
)
from gp_orff.inference.robust import weighs
from gp_orff.kernels.harmonic import HarmonicFactor
from gp_orff.kernels.tree import terms

COARSE_FACTOR, FINE_FACTOR = 1.4, 1.2  # ranges of lengthscales of grids for a search
_FEW_FEATURES = 1000  # their cost is negligible
_SCARCE = 10.0  # acceptable tolerance over the requested one
MOST_ITERATIVE = 2**15  # features, by default, of the posterior
MOST_EXACT = 8192  # numbers, by default: one evaluation of the evidence takes about 20 s
_SERVED, _WIDER = (0.7, 1.4), 4  # lengthscales and budget of statistics that replace the data
_KEPT = (0.8, 1.25)  # lengthscales of statistics that save passes
_STEP = 4.0  # the ratio of successive tolerances
_USELESS = 0.9  # the truncated share of the variance above which a grid is of no use


@dataclass(frozen=True)
class Representation:
    """The representation chosen for data, and what follows at the present hyperparameters."""

    kernel: Kernel
    likelihoods: Mapping[str, Likelihood]
    requested: Rule
    data: Data
    rule: Rule | None  # None for the exact kernel itself
    reason: str = ""  # for the choice, in words
    kept: Kept | None = None  # statistics that save passes over the data
    dense: bool = False  # whether all grids are small enough for a factorisation
    counts: Memo = field(default_factory=Memo, compare=False, repr=False)
    resolved: Memo = field(default_factory=Memo, compare=False, repr=False)
    reached: Memo = field(default_factory=Memo, compare=False, repr=False)

    @classmethod
    def of(
        cls, kernel: Kernel, likelihoods: Mapping[str, Likelihood], requested: Rule, data: Data
    ) -> "Representation":
        """The requested rule, or the rule that `Auto` chooses for the data."""
        if data.repeats.width > 1:  # chosen at other hyperparameters
            data = replace(data, repeats=replace(data.repeats, width=1.0))
        representation = cls(kernel, likelihoods, requested, data, requested)
        return representation._choose(requested) if isinstance(requested, Auto) else representation

    @property
    def again(self) -> "Representation":
        """The choice at the present hyperparameters."""
        return self.of(self.kernel, self.likelihoods, self.requested, self.data)

    def _choose(self, auto: Auto) -> "Representation":
        """The cheapest of the exact kernel and the rule that `auto` finds that is accurate."""
        data = self.data
        if isinstance(data, StatisticsOnly):
            grid = Grid(domain=data.domain, tolerance=auto.tolerance)
            return replace(self, rule=replace(grid, max_features=auto.max_features))
        most = max(auto.exact_values, auto.max_features or MOST_EXACT)
        few = data.num_values <= MOST_REPEATED * most and has_covariance(self.kernel, data)
        size = self.inference(None).size if few else data.num_values
        exact = few and size <= most
        if exact and size <= auto.exact_values:
            return replace(self, rule=None)
        budget = auto.max_features or (None if self.on_lattice else MOST_TRAINING)
        trial = replace(auto, domain=auto.domain or data.box, data=data.box, max_features=budget)
        if self._resolution.learns_spectrum and auto.longest_period is None:
            trial = replace(trial, longest_period=PERIOD_OF_LEARNED)
        rule, reason = trial.choose(term_spectra(self.kernel, data.num_inputs))
        if isinstance(rule, Grid):  # without a budget, each use of the grid has its own
            rule = replace(rule, domain=auto.domain, max_features=auto.max_features)
        chosen = replace(self, rule=rule, reason=reason)
        if exact and not chosen._grid_suffices(size):
            reason = f"exact kernel: cheaper than the features it would take; {reason}"
            return replace(self, rule=None, reason=reason)
        return chosen

    def _grid_suffices(self, size: float) -> bool:
        """Whether a grid of few features, or fewer than `size`, truncates little."""
        most = (
            MOST_EXACT if weighs(self.likelihoods) else MOST_TRAINING
        )  # weights change sums over all data
        costly = not self.on_lattice and size <= most and self.requested.exact_values
        if not isinstance(self.rule, Grid) or costly:  # decaying waves cost more than their kernel
            return False
        draws = self._draw(replace(self.fine(), max_features=self.rule.max_features or MOST_DENSE))
        acceptable = max(_SCARCE * self.rule.tolerance, self._resolution.tolerance(self.rule))
        affordable = num_features(self.kernel, draws) <= max(size, _FEW_FEATURES)
        return affordable and draws[0].shared.tolerance.item() <= acceptable

    @property
    def mended(self) -> "Representation":
        """The exact kernel in the place of iterations, or on few sites, within which the field
        changes by less than what the grid truncates, where that is much; else the same.
        Statistics have no readings for a covariance."""
        auto = self.requested
        if not (isinstance(auto, Auto) and self.follows and self.data.revisitable):
            return self
        most = max(auto.exact_values, auto.max_features or MOST_EXACT)
        found = exact_instead(self.now(), self.kernel, self._noises, most, weighs(self.likelihoods))
        if found is None:
            return self
        return replace(self, data=found[0].data, rule=None, reason=found[1])

    @property
    def follows(self) -> bool:
        """Whether the rule is a grid that follows the hyperparameters, not one of given spacing."""
        return isinstance(self.rule, Grid) and self.rule.spacing is None

    @property
    def on_lattice(self) -> bool:
        """Whether the frequencies of a grid are on one lattice: those of harmonic terms are not."""
        return not any(isinstance(term.factor, HarmonicFactor) for term in terms(self.kernel))

    def inference(self, rule: Rule | None) -> Inference:
        """Inference on the frequencies of a rule; by the exact kernel if None."""
        if rule is None:
            return ExactInference.merging(self.kernel, self._noises, self.data)
        draws = self._draw(rule)
        known = None if self.kept is None else self.kept.known(self.data, draws)
        inference = feature_inference(self.data, draws, self.kernel)
        return inference if known is None else replace(inference, known=known)

    def keeping(self) -> "Representation":
        """The same with statistics that serve grids for somewhat other lengthscales: one pass."""
        rule, margins = self.rule, self._resolution.lengthscales
        box = tuple(  # boxes of other lengthscales are rounded otherwise
            (low - 0.5 * margin * (high > low), high + 0.5 * margin * (high > low))
            for (low, high), margin in zip(self.data.box, margins.tolist(), strict=True)
        )
        tolerance = self._resolution.tolerance(rule) / _STEP**2
        grid = grid_for(rule, box, box, tolerance, _KEPT)
        grid = self._with_symbols(replace(grid, max_features=MOST_ITERATIVE))
        return replace(self, kept=Kept.of(self.data, self._draw(grid), grid))

    def _restricted(self, grid: Grid) -> Grid:
        """The grid, or one on the lattice of known statistics."""
        grid = self._with_symbols(grid)
        kept = self.kept
        if kept is not None and kept.serves(self.data, self.kernel, self._noises, grid):
            return kept.statistics.restrict(grid)
        return self.data.restrict(grid)

    def _with_symbols(self, grid: Grid) -> Grid:
        """The grid; observed symbols need all frequencies along constant inputs."""
        return replace(grid, sum_constant=grid.sum_constant and not self.data.symbol_data)

    def conditioning_rule(self, domain: Box | None = None) -> Rule | None:
        """The rule for evidence and predictions; it changes in steps, not with every new point."""
        rule = self.rule
        if not self.follows:
            return rule
        box = self._resolution.rounded_box
        fits = rule.domain is not None and contains(rule.domain, self.data.box)
        domain = domain or (rule.domain if fits else box)
        tolerance = _STEP ** math.floor(math.log(self._resolution.tolerance(rule), _STEP))
        most = MOST_DENSE if self.on_lattice else MOST_TRAINING
        grid = grid_for(rule, domain, box, tolerance, most=most)
        dense = rule.max_features or self.dense or self.data.tracks or not self.on_lattice
        if not dense and self._reached(self._restricted(grid)) > _SCARCE * tolerance:
            grid = replace(grid, tolerance=_SCARCE * tolerance, max_features=MOST_ITERATIVE)
        return self._restricted(grid)

    def fits(self, grid: Grid) -> bool:
        """Whether a grid reaches its tolerance within its budget."""
        return self._reached(grid) <= 1.01 * grid.tolerance

    def _reached(self, grid: Grid) -> float:
        """The tolerance that a grid reaches within its budget."""

        def reach() -> float:
            try:
                return self._draw(grid)[0].lattice.tolerance.item()
            except GridBudgetError:
                return math.inf

        return self.reached.get(reach, [self.kernel], grid)

    def now(self) -> Inference:
        """Inference for evidence and predictions."""
        return self.inference(self.conditioning_rule())

    def coarse(self) -> Grid:
        """A grid for a search that starts far from the optimum."""
        budget = min(self.rule.max_features or COARSE_FEATURES, COARSE_FEATURES)
        return replace(self.fine(COARSE_FACTOR), tolerance=COARSE_TOLERANCE, max_features=budget)

    def fine(
        self,
        trust_factor: float = FINE_FACTOR,
        returned: bool = False,
        most: int = MOST_TRAINING,
    ) -> Grid:
        """A grid on the data's own box; without a budget of the rule of at most so many features.

        Unless `returned`, the learned noise absorbs the truncated variance. If it were added to the
        noise, the search would increase the lengthscales to make it small.
        """
        rule, box = self.rule, self.data.box
        lengthscale_range = (1 / trust_factor, trust_factor)
        grid = grid_for(rule, box, box, self._resolution.tolerance(rule), lengthscale_range, most)
        returned = returned and rule.diagonal_correction
        return self._restricted(replace(grid, diagonal_correction=returned))

    def wider(self, points: Float[Tensor, "n d"]) -> Inference:
        """Inference on frequencies that serve the data and these points.

        Raises:
            ValueError: no useful grid serves both.
        """
        box, requested = self.data.box, box_of(points)
        both = union(box, requested)
        around = tuple((low - 0.1 * (high - low), high + 0.1 * (high - low)) for low, high in both)
        try:
            inference = self.inference(self.conditioning_rule(around))
        except ValueError as error:  # no grid of this size within the budget
            raise ValueError(far_message(box, requested)) from error
        share = inference.truncated_share
        if share > _USELESS and share > self.now().truncated_share:
            raise ValueError(far_message(box, requested))
        return inference

    def statistics_only(self) -> StatisticsOnly:
        """Statistics that serve other lengthscales and a larger domain; one visit."""
        data, rule = self.data, self.rule
        if isinstance(data, StatisticsOnly):
            return data
        require_none(data.tracks)
        if not self.on_lattice:
            raise NotImplementedError(
                "statistics expect frequencies that serve all lengthscales, got the waves of a "
                "HarmonicKernel, which serve one range of depths; save() the model, which keeps "
                "the data"
            )
        if rule is None:  # the exact kernel: frequencies as without it
            auto = self.requested.for_data(corners(data.box, next(self.kernel.parameters()).device))
            rule, _ = auto.choose(term_spectra(self.kernel, data.num_inputs))
        if not isinstance(rule, Grid):
            phi = expand(self.kernel, self._draw(rule), data.num_inputs).double().phi
            phi = phi.detached()
            return StatisticsOnly(data.statistics(phi), None, data.survey, data.symbol_data)
        if rule.spacing is None:
            domain = (
                rule.domain or self._resolution.widened_box
            )  # new observations may be anywhere in it
            rule = grid_for(
                rule, domain, domain, self._resolution.tolerance(rule), _SERVED, MOST_DENSE
            )
            rule = replace(rule, max_features=_WIDER * rule.max_features, sum_constant=False)
        lattice = self._draw(rule)[0].lattice
        statistics = data.statistics(lattice.columns().full_box())
        return StatisticsOnly(statistics, rule.domain, data.survey, data.symbol_data)

    @torch.no_grad()
    def cuts(self) -> dict[GroupKey, float]:
        """δ over the noise variance, by group, for an observation of mean weight."""
        return self.now().truncation_ratios(self.kernel, self._noises)

    @torch.no_grad()
    def training_cuts(self) -> dict[GroupKey, float]:
        """The same on the grids of searches; infinite where there is none within the budget."""
        try:
            inference = self.inference(replace(self.fine(), diagonal_correction=True))
        except GridBudgetError:
            return dict.fromkeys(self.data.keys, math.inf)
        return inference.truncation_ratios(self.kernel, self._noises)

    @property
    def _noises(self) -> Noises:
        return noises_of(self.kernel, self.likelihoods)

    @property
    def _resolution(self) -> Resolution:
        costly = isinstance(self.requested, Auto) and not self.on_lattice
        return Resolution(self.kernel, self.data, self._noises, costly, self.counts, self.resolved)

    def _draw(self, rule: Rule) -> list[Draw]:
        return draw(self.kernel, rule, self.data.num_inputs)
