"""The representation of a kernel for some data: exact kernel, grid or random frequencies."""

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np
import torch
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import Likelihood
from jaxtyping import Float, Int
from torch import Tensor, nn

from gp_orff.data.dataset import Data, Dataset, StatisticsOnly
from gp_orff.data.noise import Noises, noises_of
from gp_orff.data.observations import Observations
from gp_orff.data.patterns import GroupKey
from gp_orff.data.sites import site_labels
from gp_orff.data.statistics import FieldStatistics
from gp_orff.data.survey import DataWarning
from gp_orff.features.assemble import draw, expand, num_features, term_spectra
from gp_orff.features.chunked import Box, box_of, contains, corners, far_message, rounded, union
from gp_orff.features.draws import Draw, Rule
from gp_orff.features.grid import MOST_DENSE, Auto, Grid
from gp_orff.features.grid_design import GridBudgetError, lengthscales
from gp_orff.inference.exact import ExactInference, has_covariance, may_suffice, with_few_sites
from gp_orff.inference.features import (
    FeatureInference,
    Inference,
    feature_inference,
    most_factorised,
)
from gp_orff.inference.price import (
    FINE_FACTOR,
    MANY,
    MOST_ITERATIVE,
    MOST_ON_SITES,
    MOST_TRAINING,
    NEGLIGIBLE,
    STEP,
    aim,
    cubic,
    loss_of_noise,
    loss_of_share,
    ratio_of_loss,
)
from gp_orff.inference.robust import weighs
from gp_orff.kernels.derivatives import at_zero
from gp_orff.kernels.lines import has_lines
from gp_orff.kernels.spectra import learned_spectra
from gp_orff.kernels.tree import terms

# A cache of one value that depends on hyperparameters.


T = TypeVar("T")


class Memo:
    """A cache of one value, valid while its key and the hyperparameters stay the same."""

    def __init__(self):
        self._entry: tuple[object, list[Tensor], object] | None = None

    def get(self, make: Callable[[], T], modules: Iterable[nn.Module], key: object = None) -> T:
        now, entry = [p for module in modules for p in module.parameters()], self._entry
        same = entry is not None and entry[0] == key and len(entry[1]) == len(now)
        if not (same and all(map(torch.equal, entry[1], now))):
            self._entry = entry = (key, [p.detach().clone() for p in now], make())
        return entry[2]


# Statistics of many observations on a wide lattice. Statistics on smaller grids follow from them.


@dataclass(frozen=True)
class Kept:
    """The statistics of `data` on a lattice that serves a range of lengthscales."""

    data: Data
    grid: Grid
    draws: Sequence[Draw]
    statistics: StatisticsOnly

    @classmethod
    def of(cls, data: Data, draws: Sequence[Draw], grid: Grid) -> "Kept":
        """The statistics from one pass over the data."""
        sums = data.statistics(draws[0].shared_columns().full_box())
        return cls(
            data, grid, draws, StatisticsOnly(sums, grid.domain, data.survey, data.symbol_data)
        )

    def serves(self, data: Data, kernel: Kernel, noises: Noises, grid: Grid) -> bool:
        """Whether the lattice contains the frequencies of a grid for these data."""
        fits = data is self.data and contains(self.grid.domain, grid.domain)
        fits &= grid.sum_constant or not self.draws[0].shared.constant.any()
        return fits and not FeatureInference(data, self.draws).stale(kernel, noises)

    def known(self, data: Data, draws: Sequence[Draw]) -> FieldStatistics | None:
        """The statistics of the data on a part of the lattice; None for other frequencies."""
        phi, wide = draws[0].shared_columns(), self.statistics.field_statistics.phi
        lattices = phi.on_lattice and wide.on_lattice
        if data is not self.data or not lattices or not torch.equal(phi.spacing, wide.spacing):
            return None
        inside = all(m <= most for m, most in zip(phi.modes, wide.modes, strict=True))
        same = inside and torch.equal(phi.origin, wide.origin)
        return self.statistics.field_statistics.on(phi) if same else None


# The resolution of the data: tolerances of grids, from the noise, and boxes of grids.


COARSE_TOLERANCE, COARSE_FEATURES = NEGLIGIBLE**2, MOST_TRAINING // 2
COARSE_FACTOR = FINE_FACTOR**2  # range of lengthscales of grids at the start of a search
MOST_EXACT = MOST_DENSE  # default limit of values: an evaluation takes about 20 s


def grid_for(
    rule: Grid,
    domain: Box,
    data: Box | None,
    tolerance: float,
    lengthscale_range: tuple[float, float] = (1.0, 1.0),
    most: int = MOST_TRAINING,
) -> Grid:
    """The grid for a domain, with at most the rule's number of features, or `most` without one."""
    limits = {"tolerance": tolerance, "max_features": rule.max_features or most}
    return replace(rule, domain=domain, data=data, lengthscale_range=lengthscale_range, **limits)


def _range(factor: float) -> tuple[float, float]:
    """Return the range of lengthscales of a grid, relative to the present lengthscale."""
    return 1 / factor, factor


# The exact kernel in place of a grid, for few values or few sites.


@torch.no_grad()
def exact_instead(
    inference: FeatureInference, kernel: Kernel, noises: Noises, most: float, weighs: bool = False
) -> tuple[ExactInference, str] | None:
    """Return inference by the exact kernel with a reason, or None if the grid is better.

    A posterior has four plans, in the order of their prices:

    1. the grid, if its equations are factorised,
    2. all values under the exact kernel, if they are few enough for one factorisation,
    3. means at sites under the exact kernel,
    4. the grid with iterations, which take thousands of products and compute every variance again.

    A grid treats the truncated part of the field as white noise. This part is correlated over its
    wavelengths, so that error bars near dense observations are too small. Means at sites treat the
    changes of the field within each site as white noise. Either approximation loses log evidence.
    The function chooses the first plan whose loss is at most the aim of a fit (`price.aim`). If
    there is no such plan, it chooses the plan with the smallest loss.

    There are three exceptions if the truncated variance and the changes within sites both exceed
    the noise variance:

    - Under Student-t noise, observations that differ within a site would look like outliers. One
      observation of each site is used, and all others are omitted.
    - The waves of a harmonic field cannot represent shallow sources, whose fields would look like
      noise. One of every few observations is used, in the given order.
    - If observations fill the box evenly, the grid is used. Their mean reduces the effect of the
      truncated part, and the search on the grid has learned this part as noise.

    Args:
        inference: the inference on the grid.
        kernel: the prior.
        noises: the noise covariances Σ, by the label of the group.
        most: the largest number of means at sites.
        weighs: whether Student-t noise weighs the observations.
    """
    data, numbers = inference.data, inference.data.num_values
    cut = max(inference.truncation_ratios(kernel, noises).values())
    permitted = max(loss_of_noise(cut, numbers), aim(numbers))
    iterative = inference.is_iterative
    enough = not iterative and permitted <= aim(numbers)
    if enough or not has_covariance(kernel, data):
        return None
    once = most_factorised(next(kernel.parameters()).device)
    if iterative and numbers <= MOST_ON_SITES and may_suffice(kernel, noises, data, once):
        exact = ExactInference.merging(kernel, noises, data)
        if exact.size <= once:
            features = num_features(kernel, inference.draws)
            return exact, (
                f"exact kernel: the covariance of {exact.size:.0f} values needs one "
                f"factorisation, but {features} features would need iterations"
            )
    waves = any(draw.decays for draw in inference.draws)
    given = data.repeats.distance is not None  # a distance of the user applies to all positions
    if given or data.tracks or not data.revisitable or numbers > (MANY if waves else MOST_ON_SITES):
        return None
    data = with_few_sites(kernel, noises, data, most)
    sites = ExactInference.merging(kernel, noises, data)
    if sites.size > most:
        return None
    change = sites.mean_change
    if min(change, cut) > 1 and (weighs or waves):
        kept = every_few(data, most) if waves else one_of_each(data, sites.reach)
        which = "one of every few observations" if waves else "one observation per position"
        return ExactInference.merging(kernel, noises, kept), (
            f"exact kernel: a grid would truncate {cut:.2g} times the noise variance, and merging "
            f"enough positions would add {change:.2g} times the noise variance; {which} is used, "
            f"{kept.survey.num_points} of {data.survey.num_points}"
        )
    if loss_of_noise(change, numbers) > permitted or (
        min(change, cut) > 1 and _share_of_box(inference.data) > 1 - NEGLIGIBLE
    ):
        return None
    return sites, (
        f"exact kernel: the field changes by {change:.2g} times the noise variance between merged "
        f"positions, and a grid would truncate {cut:.2g} times the noise variance"
    )


def every_few(data: Dataset, most: float) -> Dataset:
    """Return every k-th observation in the given order, with its weight, so that at most `most`
    values remain.

    Unlike means at sites, some of these observations are as close to each other as in the complete
    data. They show the differences between survey lines where the lines cross.
    """
    step = math.ceil(data.num_values / most)
    return _kept(data, lambda part: torch.arange(0, len(part), step))


def one_of_each(data: Dataset, reach: Sequence[float]) -> Dataset:
    """Return one observation of each site, with its weight. It is the observation nearest to the
    mean position."""
    return _kept(data, lambda part: torch.from_numpy(_nearest_to_middle(part, reach)))


def _kept(data: Dataset, rows_of: Callable[[Observations], Int[Tensor, "m"]]) -> Dataset:
    """The chosen rows of every part, with their weights."""
    parts, weights = [], []
    for part, weight in zip(data.unweighted().visit(), data.all_weights(), strict=True):
        rows = rows_of(part).to(part.x.device)
        parts.append(part.take(rows))
        weights.append(weight[rows])
    kept = replace(Dataset.in_memory(parts).counting_memory(), symbol_data=data.symbol_data)
    return kept if data.weights is None else replace(kept, weights=tuple(weights))


def _nearest_to_middle(part: Observations, reach: Sequence[float]) -> Int[np.ndarray, "m"]:
    site, x = site_labels(part, reach), part.x.cpu().numpy()
    x = x / np.array([length or 1.0 for length in reach])
    middle = np.zeros((site.max() + 1, x.shape[1]))
    np.add.at(middle, site, x)
    middle /= np.bincount(site)[:, None]
    order = np.lexsort((np.square(x - middle[site]).sum(-1), site))
    return np.sort(order[np.unique(site[order], return_index=True)[1]])


def _share_of_box(data: Dataset) -> float:
    """The share of cells that contain observations, for cells with ten observations on average."""
    x = torch.cat([part.x for part in data.observations]).cpu().numpy()
    x = x[:, np.ptp(x, axis=0) > 0]
    count = max(1, int((NEGLIGIBLE * len(x)) ** (1 / max(x.shape[-1], 1))))
    lattice = np.floor((x - x.min(0)) / np.ptp(x, axis=0) * count).clip(max=count - 1)
    return len(np.unique(lattice, axis=0)) / count ** x.shape[-1]


@dataclass(frozen=True)
class Representation:
    """The representation of the kernel for the data, with grids at the present hyperparameters."""

    kernel: Kernel
    likelihoods: Mapping[str, Likelihood]
    requested: Rule
    data: Data
    rule: Rule | None  # None for the exact kernel
    reason: str = ""  # for the choice, for the report
    kept: Kept | None = None  # statistics that save passes over the data
    dense: bool = False  # whether all grids have to be small enough for a factorisation
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
        return representation if representation.auto is None else representation._choose()

    @property
    def again(self) -> "Representation":
        """The representation that is chosen at the present hyperparameters."""
        return self.of(self.kernel, self.likelihoods, self.requested, self.data)

    @property
    def auto(self) -> Auto | None:
        """The request, if it is `Auto`."""
        return self.requested if isinstance(self.requested, Auto) else None

    @property
    def grid(self) -> Grid | None:
        """The rule, if it is a grid."""
        return self.rule if isinstance(self.rule, Grid) else None

    def _choose(self) -> "Representation":
        """The cheaper of the exact kernel and an accurate rule that `auto` finds."""
        data, auto = self.data, self.auto
        if not data.revisitable:
            grid = Grid(domain=data.domain, tolerance=auto.tolerance)
            return replace(self, rule=replace(grid, max_features=auto.max_features))
        most = max(auto.exact_values, auto.max_features or MOST_EXACT)
        few = has_covariance(self.kernel, data) and self.may_be_exact(most)
        size = self.inference(None).size if few else data.num_values
        exact = few and size <= most
        if exact and size <= auto.exact_values:
            return replace(self, rule=None)
        budget = auto.max_features or (None if self.on_lattice else MOST_TRAINING)
        trial = replace(auto, domain=auto.domain or data.box, data=data.box, max_features=budget)
        if self._learns_spectrum and auto.longest_period is None:
            trial = replace(trial, longest_period=2.0)  # learned spectra always have long waves
        rule, reason = trial.choose(term_spectra(self.kernel, data.num_inputs))
        chosen = replace(self, rule=rule, reason=reason)
        if chosen.grid:  # without a budget, each use of the grid has its own
            rule = replace(rule, domain=auto.domain, max_features=auto.max_features)
            chosen = replace(chosen, rule=rule)
        if exact and not chosen._grid_suffices(size):
            reason = f"exact kernel: it is cheaper than the required features; {reason}"
            return replace(self, rule=None, reason=reason)
        return chosen

    def may_be_exact(self, most: float) -> bool:
        """Whether the exact kernel may need at most `most` values, with merged positions."""
        if self.data.survey.num_points > MANY:
            return False
        return may_suffice(self.kernel, self._noises, self.data, most)

    def _grid_suffices(self, size: float) -> bool:
        """Whether a grid with few features, or with fewer than `size`, truncates little."""
        costly = not self.on_lattice and size <= MOST_TRAINING and self.requested.exact_values
        if self.grid is None or costly:  # decaying waves cost more than their kernel
            return False
        draws = self._draw(replace(self.fine(), max_features=self.rule.max_features or MOST_DENSE))
        numbers, affordable = self.data.num_values, max(size, COARSE_FEATURES)
        lost = loss_of_share(self._misread_share(draws), numbers)
        return num_features(self.kernel, draws) <= affordable and lost <= aim(numbers)

    @property
    def mended(self) -> "Representation":
        """The representation for the posterior, which may replace this one by the exact kernel.

        `exact_instead` describes the choice. If the data are statistics only, the representation
        does not change, because the exact kernel needs observations.
        """
        auto = self.auto
        if auto is None or not (self.follows and self.data.revisitable):
            return self
        most = max(auto.exact_values, auto.max_features or MOST_EXACT)
        found = exact_instead(self.now(), self.kernel, self._noises, most, weighs(self.likelihoods))
        if found is None:
            return self
        return replace(self, data=found[0].data, rule=None, reason=found[1])

    @property
    def follows(self) -> bool:
        """Whether the rule is a grid without a given spacing, which follows the hyperparameters."""
        return self.grid is not None and self.rule.spacing is None

    @property
    def on_lattice(self) -> bool:
        """Whether the frequencies of a grid are on one lattice.

        Frequencies of harmonic terms and of terms with lines are not.
        """
        return not any(term.factor.decays or has_lines(term) for term in terms(self.kernel))

    def inference(self, rule: Rule | None) -> Inference:
        """Return inference with the frequencies of a rule, or with the exact kernel if the rule is
        None."""
        if rule is None:
            return ExactInference.merging(self.kernel, self._noises, self.data)
        draws = self._draw(rule)
        known = None if self.kept is None else self.kept.known(self.data, draws)
        inference = feature_inference(self.data, draws, self.kernel)
        return inference if known is None else replace(inference, known=known)

    def keeping(self) -> "Representation":
        """This representation with statistics from one pass over the data.

        The statistics serve grids for a range of lengthscales.
        """
        rule, margins = self.rule, self._lengthscales
        box = tuple(  # with margins, as the rounding of boxes depends on lengthscales
            (low - 0.5 * margin * (high > low), high + 0.5 * margin * (high > low))
            for (low, high), margin in zip(self.data.box, margins.tolist(), strict=True)
        )
        tolerance = self._tolerance(rule) / STEP**2
        grid = grid_for(rule, box, box, tolerance, _range(FINE_FACTOR))
        grid = self._with_symbols(replace(grid, max_features=MOST_ITERATIVE))
        return replace(self, kept=Kept.of(self.data, self._draw(grid), grid))

    def _restricted(self, grid: Grid) -> Grid:
        """The grid, or a grid on the lattice of known statistics."""
        grid = self._with_symbols(grid)
        kept = self.kept
        if kept is not None and kept.serves(self.data, self.kernel, self._noises, grid):
            return kept.statistics.restrict(grid)
        return self.data.restrict(grid)

    def _with_symbols(self, grid: Grid) -> Grid:
        """Return the grid. If symbols are observed, it includes all frequencies along constant
        inputs."""
        return replace(grid, sum_constant=grid.sum_constant and not self.data.symbol_data)

    def conditioning_rule(self, domain: Box | None = None) -> Rule | None:
        """The rule for evidence and predictions. It changes in steps, not with every new point."""
        rule = self.rule
        if not self.follows:
            return rule
        box = self._rounded_box
        fits = rule.domain is not None and contains(rule.domain, self.data.box)
        domain = domain or (rule.domain if fits else box)
        tolerance = STEP ** math.floor(math.log(self._tolerance(rule), STEP))
        most = MOST_DENSE if self.on_lattice else MOST_TRAINING
        grid = grid_for(rule, domain, box, tolerance, most=most)
        dense = rule.max_features or self.dense or self.data.tracks or not self.on_lattice
        if not dense and self._reached(self._restricted(grid)) * NEGLIGIBLE > tolerance:
            grid = replace(grid, tolerance=tolerance / NEGLIGIBLE, max_features=MOST_ITERATIVE)
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

    def coarse(self, trust_factor: float = COARSE_FACTOR) -> Grid:
        """A grid for the start of a search, far from the optimum."""
        budget = min(self.rule.max_features or COARSE_FEATURES, COARSE_FEATURES)
        return replace(self.fine(trust_factor), tolerance=COARSE_TOLERANCE, max_features=budget)

    def fine(
        self,
        trust_factor: float = FINE_FACTOR,
        returned: bool = False,
        most: int | None = None,
    ) -> Grid:
        """A grid on the bounding box of the data, for a search near the optimum.

        Args:
            trust_factor: the factor by which lengthscales may change on the grid.
            returned: whether to add the truncated variance to the noise. Otherwise the learned
                noise contains it. If it were added in a search, the search would increase
                lengthscales to make it small.
            most: the largest number of features, if the rule has no limit. By default, it depends
                on the number of observed values.
        """
        rule, box = self.rule, self.data.box
        tolerance = self._tolerance(rule, of_search=not returned)
        grid = grid_for(rule, box, box, tolerance, _range(trust_factor), most or self._affordable)
        returned = returned and rule.diagonal_correction
        return self._restricted(replace(grid, diagonal_correction=returned))

    @property
    def _affordable(self) -> int:
        """The largest number of features of a search. It is larger if there are few values, for
        which dual equations are cheap."""
        cheap = 6.0 * self.data.num_values**2 * MOST_DENSE <= cubic(MOST_TRAINING)
        return MOST_DENSE if cheap else MOST_TRAINING

    def wider(self, points: Float[Tensor, "n d"]) -> Inference:
        """Inference on a grid for the data and for the points.

        Raises:
            ValueError: if no useful grid serves both.
        """
        box, requested = self.data.box, box_of(points)
        both = union(box, requested)
        around = tuple((low - 0.1 * (high - low), high + 0.1 * (high - low)) for low, high in both)
        try:
            inference = self.inference(self.conditioning_rule(around))
        except ValueError as error:  # no grid of this size within the budget
            raise ValueError(far_message(box, requested)) from error
        share = inference.truncated_share
        if share > 1 - NEGLIGIBLE and share > self.now().truncated_share:
            raise ValueError(far_message(box, requested))
        return inference

    def statistics_only(self) -> StatisticsOnly:
        """Statistics from one pass over the data, for a range of lengthscales and a larger domain.

        Raises:
            NotImplementedError: if the frequencies are not on one lattice.
        """
        data, rule = self.data, self.rule
        if not data.revisitable:
            return data
        data.require_no_tracks()
        if not self.on_lattice:
            raise NotImplementedError(
                "statistics expect frequencies that are valid for all lengthscales, got those of a "
                "HarmonicKernel, valid for one range of depths, or of a PeriodicKernel or tides, "
                "valid for one period; call save(), which stores the data with the model"
            )
        if rule is None:  # the exact kernel: the frequencies that `auto` would choose otherwise
            auto = self.requested.for_data(corners(data.box, next(self.kernel.parameters()).device))
            rule, _ = auto.choose(term_spectra(self.kernel, data.num_inputs))
            return replace(self, rule=rule).statistics_only()
        if self.grid is None:
            phi = expand(self.kernel, self._draw(rule), data.num_inputs).double().phi
            phi = phi.detached()
            return StatisticsOnly(data.statistics(phi), None, data.survey, data.symbol_data)
        if rule.spacing is None:
            # later observations may be anywhere in the domain
            low, high = np.array(data.box).T
            margin = np.maximum(self._lengthscales, (high - low) / STEP)
            wide = tuple(zip((low - margin).tolist(), (high + margin).tolist(), strict=True))
            domain, tolerance = rule.domain or wide, self._tolerance(rule)
            rule = grid_for(rule, domain, domain, tolerance, _range(COARSE_FACTOR), MOST_DENSE)
            rule = replace(rule, max_features=STEP * rule.max_features, sum_constant=False)
        lattice = self._draw(rule)[0].lattice
        statistics = data.statistics(lattice.columns().full_box())
        return StatisticsOnly(statistics, rule.domain, data.survey, data.symbol_data)

    @torch.no_grad()
    def cuts(self) -> dict[GroupKey, float]:
        """Return the truncated variance δ divided by the noise variance, for each group.

        The noise variance is the one of an observation with the mean weight.
        """
        return self.now().truncation_ratios(self.kernel, self._noises)

    @torch.no_grad()
    def training_cuts(self, level: Callable[["Representation"], Grid]) -> dict[GroupKey, float]:
        """Return the truncated variance δ of the grid of a search divided by the noise variance,
        for each group. It is ∞ if there is no grid."""
        try:
            inference = self.inference(replace(level(self), diagonal_correction=True))
        except GridBudgetError:
            return dict.fromkeys(self.data.keys, math.inf)
        return inference.truncation_ratios(self.kernel, self._noises)

    @torch.no_grad()
    def misread_share(self, level: Callable[["Representation"], Grid]) -> float:
        """Return the fraction δ/(σ² + δ) of the noise variance of a search that is truncated
        variance.

        A search learns the truncated variance δ of its grid as part of the noise. The result is the
        root mean square over the observations, and 1 if no lattice can be built. δ is the tolerance
        of the lattice times the variance of the field. Aliasing by the period of the lattice has
        the same size.
        """
        try:
            return self._misread_share(self._draw(level(self)))
        except GridBudgetError:
            return 1.0

    def _misread_share(self, draws: Sequence[Draw]) -> float:
        delta = draws[0].shared.tolerance.item() * self._signal
        counts = dict.fromkeys(self.data.keys, 0)
        for part in self.data.survey.sample:
            counts[part.key] = counts.get(part.key, 0) + part.y.numel()
        noises = self.data.local_noises(self._noises)
        shares = [counts[key] * (delta / (noise + delta)) ** 2 for key, noise in noises.items()]
        return math.sqrt(sum(shares) / max(sum(counts.values()), 1))

    @torch.no_grad()
    def _tolerance(self, rule: Grid, of_search: bool = False) -> float:
        """The tolerance of a grid that the noise of the data requires.

        If the noise variance is a thousandth of the signal variance, the result is the tolerance of
        the rule. With less noise, the result is smaller. The truncated variance is at most 1 % of
        the posterior variance, which is about F/(N·p) times the noise variance. For learned
        spectra, the limit is 10 %, because their shortest waves always have some of the variance.

        The grid of a search may truncate more, if its loss of log evidence is at most a tenth of
        the aim of a fit (`price.aim`).
        """
        signal = self._signal
        if not signal > 0:
            return rule.tolerance
        if not self._learns_spectrum:
            return self._tolerance_of(rule, signal, COARSE_TOLERANCE, NEGLIGIBLE**2, of_search)
        # Few long waves may have most of the variance. The count is therefore that of all features
        # that the data resolve.
        least = self._tolerance_of(rule, signal, COARSE_TOLERANCE, NEGLIGIBLE)
        return self._tolerance_of(rule, signal, least, NEGLIGIBLE)

    @property
    def _signal(self) -> float:
        """The variance of the field without constant terms, averaged over the outputs."""
        varying = (at_zero(term) for term in terms(self.kernel) if term.leaves)
        return sum(k.diagonal(dim1=-1, dim2=-2).mean().item() for k in varying)

    def _tolerance_of(
        self, rule: Grid, signal: float, counted: float, share: float, of_search: bool = False
    ) -> float:
        """Return the tolerance of a grid that truncates the fraction `share` of the posterior
        variance, or more for a search that loses little by it.

        The posterior variance is estimated from the number of features of a grid with the tolerance
        `counted`. `signal` is the variance of the field.
        """
        coarse = grid_for(rule, self._rounded_box, None, counted)
        coarse = replace(coarse, max_features=COARSE_FEATURES)
        counts = self.counts if counted == COARSE_TOLERANCE else self.resolved
        count = counts.get(lambda: self._count(coarse), [self.kernel], coarse)
        numbers = self.data.num_values
        posterior_to_noise = count / numbers
        noise_to_signal = min(self.data.local_noises(self._noises, 1 / posterior_to_noise).values())
        noise_to_signal /= signal
        scaled = min(max(noise_to_signal / NEGLIGIBLE**3, NEGLIGIBLE**3), 1 / NEGLIGIBLE)
        ratio = share * posterior_to_noise
        if of_search:
            ratio = max(ratio, ratio_of_loss(NEGLIGIBLE * aim(numbers), numbers, count))
        largest = ratio * noise_to_signal
        # decaying waves cost more than a lattice: they may lose up to a quarter of the aim
        costly = self.auto is not None and not self.on_lattice
        least = NEGLIGIBLE**2 * noise_to_signal if costly else 1e-10
        return max(min(rule.tolerance * scaled, largest), least)

    def _count(self, rule: Grid) -> int:
        """The number of features of a grid, or its limit if the grid exceeds it."""
        try:
            return num_features(self.kernel, self._draw(rule))
        except GridBudgetError:
            return rule.max_features

    @property
    def _learns_spectrum(self) -> bool:
        """Whether the kernel has trained curves of learned spectra."""
        return bool(learned_spectra(self.kernel, trained=True))

    @property
    def _lengthscales(self) -> Float[np.ndarray, "d"]:
        """The largest lengthscale of all kernels along each input.

        For learned spectra, it is at most a quarter of the extent: with another lengthscale, a
        shifted curve gives the same spectrum.
        """
        d = self.data.num_inputs
        scales = lengthscales(term_spectra(self.kernel, d), d)
        if not self._learns_spectrum:
            return scales
        extent = np.ptp(self.data.box, axis=1)
        return np.minimum(scales, np.where(extent > 0, extent / STEP, np.inf))

    @property
    def _rounded_box(self) -> Box:
        """The box of the data, rounded outward to quarters of lengthscales.

        New points rarely change it.
        """
        return rounded(self.data.box, self._lengthscales / STEP)

    @property
    def _noises(self) -> Noises:
        return noises_of(self.kernel, self.likelihoods)

    def _draw(self, rule: Rule) -> list[Draw]:
        return draw(self.kernel, rule, self.data.num_inputs)


# Points that a fit omits with a warning.


def without_far_points(data: Data, requested: Rule) -> tuple[Data, list[str]]:
    """Return the data without a few points far from all others, and notes on them.

    A grid for such points would need too many frequencies.
    """
    near = data.survey.distances.near
    fixed = not data.revisitable or data.tracks or not _spans(requested, data)
    if near is None or fixed:
        return data, []
    inside = data.within(near)
    count = data.survey.num_points - inside.survey.num_points
    text = (
        f"points far from all others are omitted: {count}; one frequency grid cannot represent "
        "both groups; drop these points if they are errors, or fit them separately"
    )
    warnings.warn(text, DataWarning, stacklevel=2)
    return inside, [text]


def warn_of_left_out(given: Data, kept: Data) -> None:
    """Warn if observations close to others were omitted.

    This happens if neither features nor the exact kernel can represent all of them.
    """
    count = given.survey.num_points - kept.survey.num_points
    if count:
        warnings.warn(
            f"{count} of {given.survey.num_points} observations are omitted, because they are "
            "close to others: neither features nor the exact kernel can represent all of them, and "
            "their means would contain less information than single observations; fit parts of the "
            "region, or choose observations with gp_orff.thin",
            DataWarning,
            stacklevel=2,
        )


def _spans(requested: Rule, data: Data) -> bool:
    """Whether the rule may give a grid whose domain follows from the data."""
    if isinstance(requested, Auto):
        most = requested.max_features or MOST_EXACT
        return requested.domain is None and data.num_values > most
    return isinstance(requested, Grid) and requested.domain is None and requested.spacing is None
