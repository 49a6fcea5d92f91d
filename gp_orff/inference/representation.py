"""What represents the kernel for some data: the kernel itself, a grid, or random frequencies."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np
import torch
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import Likelihood
from jaxtyping import Float
from torch import Tensor, nn

from gp_orff.data.dataset import Data, StatisticsOnly
from gp_orff.data.noise.covariances import noises_of
from gp_orff.data.patterns import GroupKey
from gp_orff.features.assemble import draw, expand, term_spectra
from gp_orff.features.domain import Box, box_of, contains, union
from gp_orff.features.frequencies.auto import Auto
from gp_orff.features.frequencies.grid import MOST_FEATURES, Grid, GridBudgetError
from gp_orff.features.frequencies.grid_design import lengthscales
from gp_orff.features.frequencies.rule import Draw, Rule
from gp_orff.inference.conditioning import ExactInference, FeatureInference, Inference
from gp_orff.kernels.closed_form import at_zero
from gp_orff.kernels.tree import terms

COARSE_FACTOR, FINE_FACTOR = 1.4, 1.2  # the ranges of lengthscales that searches on grids have
_COARSE_TOLERANCE, _COARSE_FEATURES = 1e-2, 2000
_FEW_FEATURES = 1000  # that cost next to nothing
_SIGNAL_TO_NOISE = 1e3  # of variances: where a tolerance is used as it is
_SCARCE = 10.0  # a tolerance that many times what was asked for
_SERVED, _WIDER = (0.7, 1.4), 4  # lengthscales and budget of statistics that replace the data
_STEP = 4.0  # between tolerances
_SHARE_OF_POSTERIOR = 0.01  # of the posterior variance, that a grid may leave out
_NOTHING_LEFT = 0.9  # of the variance missing: a grid for points far away that is of no use
T = TypeVar("T")


class Memo:
    """One value, for as long as the hyperparameters and all else it was made from stay the same."""

    def __init__(self):
        self._kept: tuple[object, list[Tensor], object] | None = None

    def get(self, make: Callable[[], T], modules: Iterable[nn.Module], key: object = None) -> T:
        now, kept = [p for module in modules for p in module.parameters()], self._kept
        if kept is None or kept[0] != key or not _equal(kept[1], now):
            self._kept = kept = (key, [p.detach().clone() for p in now], make())
        return kept[2]


def _equal(before: list[Tensor], now: list[Tensor]) -> bool:
    return len(before) == len(now) and all(map(torch.equal, before, now))


@dataclass(frozen=True)
class Representation:
    """Chosen once for data; what follows from the choice, at the hyperparameters as they are."""

    kernel: Kernel
    likelihoods: Mapping[str, Likelihood]
    requested: Rule
    data: Data
    rule: Rule | None  # None for the exact kernel itself
    reason: str = ""  # of a choice, in words
    counts: Memo = field(default_factory=Memo, compare=False, repr=False)

    @classmethod
    def of(
        cls, kernel: Kernel, likelihoods: Mapping[str, Likelihood], requested: Rule, data: Data
    ) -> "Representation":
        """The rule that is asked for, or the one that `Auto` finds for the data."""
        found = cls(kernel, likelihoods, requested, data, requested)
        return found._chosen(requested) if isinstance(requested, Auto) else found

    def _chosen(self, auto: Auto) -> "Representation":
        data = self.data
        if isinstance(data, StatisticsOnly):
            budget = auto.max_features
            rule = Grid(domain=data.domain, tolerance=auto.tolerance, max_features=budget)
            return replace(self, rule=rule)
        exact = data.num_values <= max(auto.exact_values, auto.max_features)
        exact = exact and has_covariance(self.kernel, data)
        if exact and data.num_values <= auto.exact_values:
            return replace(self, rule=None)
        rule, reason = auto.for_data(corners(data.box, self.kernel)).choose(
            term_spectra(self.kernel, data.num_inputs)
        )
        found = replace(self, rule=rule, reason=reason)
        if exact and data.num_values <= auto.max_features and not found._suffices:
            reason = f"exact kernel: cheaper than the features it would take; {reason}"
            return replace(self, rule=None, reason=reason)
        return found

    @property
    def _suffices(self) -> bool:
        """Whether a grid of few features, or fewer than there are numbers, leaves out little."""
        if not isinstance(self.rule, Grid):
            return False
        draws = self._draw(self.fine())
        enough = max(_SCARCE * self.rule.tolerance, self._tolerance(self.rule))
        few = num_features(self.kernel, draws) <= max(self.data.num_values, _FEW_FEATURES)
        return few and draws[0].lattice.tolerance.item() <= enough

    @property
    def follows(self) -> bool:
        """Whether it is a grid that follows the hyperparameters, not one by hand."""
        return isinstance(self.rule, Grid) and self.rule.spacing is None

    def inference(self, rule: Rule | None) -> Inference:
        """The data on the frequencies of a rule; None for the exact kernel."""
        if rule is None:
            return ExactInference(self.data)
        return FeatureInference(self.data, self._draw(rule))

    def conditioning_rule(self, domain: Box | None = None) -> Rule | None:
        """For evidence and predictions; by steps, so that few new data do not change it."""
        rule = self.rule
        if not self.follows:
            return rule
        box = self._rounded_box
        given = rule.domain is not None and contains(rule.domain, self.data.box)
        domain = domain or (rule.domain if given else box)
        steps = math.floor(math.log(self._tolerance(rule), _STEP))
        return self.data.restrict(_serving(rule, domain, box, _STEP**steps))

    def now(self) -> Inference:
        """For evidence and predictions."""
        return self.inference(self.conditioning_rule())

    def coarse(self) -> Grid:
        """For a search that has far to go."""
        budget = min(self.rule.max_features or _COARSE_FEATURES, _COARSE_FEATURES)
        return replace(self.fine(COARSE_FACTOR), tolerance=_COARSE_TOLERANCE, max_features=budget)

    def fine(self, trust_factor: float = FINE_FACTOR, returned: bool = False) -> Grid:
        """For the data's own box. What is cut, the noise takes up: sought with the truncated
        variance in the noise, lengthscales would grow for its sake."""
        own, box = self.rule, self.data.box
        grid = _serving(own, box, box, self._tolerance(own), (1 / trust_factor, trust_factor))
        returned = returned and own.diagonal_correction
        return self.data.restrict(replace(grid, diagonal_correction=returned))

    def wider(self, points: Float[Tensor, "n d"]) -> Inference:
        """The data, on frequencies that serve these points too.

        Raises:
            ValueError: no grid that is of use serves both.
        """
        box, requested = self.data.box, box_of(points)
        both = union(box, requested)
        around = tuple((low - 0.1 * (high - low), high + 0.1 * (high - low)) for low, high in both)
        try:
            found = self.inference(self.conditioning_rule(around))
        except ValueError as error:  # no grid of this size within the budget
            raise ValueError(_far(box, requested)) from error
        if found.missing > _NOTHING_LEFT and found.missing > self.now().missing:
            raise ValueError(_far(box, requested))
        return found

    def statistics_only(self) -> StatisticsOnly:
        """Statistics that serve other lengthscales and a larger domain; one pass."""
        data, rule = self.data, self.rule
        if isinstance(data, StatisticsOnly):
            return data
        if rule is None:  # exact: as if it were not
            auto = self.requested.for_data(corners(data.box, self.kernel))
            rule, _ = auto.choose(term_spectra(self.kernel, data.num_inputs))
        if not isinstance(rule, Grid):
            phi = expand(self.kernel, self._draw(rule), data.num_inputs).double().phi
            phi = phi.detached()
            return StatisticsOnly(data.statistics(phi), None, data.survey, data.symbol_data)
        if rule.spacing is None:
            domain = rule.domain or self._widened_box  # new readings may come anywhere in it
            rule = _serving(rule, domain, domain, self._tolerance(rule), _SERVED)
            rule = replace(rule, max_features=_WIDER * rule.max_features)
        lattice = self._draw(rule)[0].lattice
        sums = data.statistics(lattice.columns().boxed())
        return StatisticsOnly(sums, rule.domain, data.survey, data.symbol_data)

    @torch.no_grad()
    def cuts(self) -> dict[GroupKey, float]:
        """The truncated variance over that of the noise, for a reading of mean weight."""
        cut = self.now().truncated(self.kernel)
        variance = 0.0 if cut is None else cut.diagonal().mean().item()
        return {key: variance / noise for key, noise in self._noises().items()}

    def _noises(self, observations: float = math.inf) -> dict[GroupKey, float]:
        """The noise variance of a reading, for every group: of the mean weight of so many."""
        found = noises_of(self.kernel, self.likelihoods)
        return {
            key: found[key.label].diagonal().mean().item() / own.nearby(observations)
            for key, own in self.data.weights_of.items()
        }

    @torch.no_grad()
    def _tolerance(self, rule: Grid) -> float:
        """The rule's tolerance where the noise is a thousandth of the signal's variance, tighter
        where there is less. Also less than what the data could tell of the features left out,
        and than the posterior variance, which is about F/(N·p) of the noise's."""
        signal = sum(
            at_zero(term).diagonal(dim1=-1, dim2=-2).mean()
            for term in terms(self.kernel)
            if term.leaves
        )
        if not signal > 0:
            return rule.tolerance
        coarse = _serving(rule, self._rounded_box, None, _COARSE_TOLERANCE)
        coarse = replace(coarse, max_features=_COARSE_FEATURES)
        count = self.counts.get(lambda: self._count(coarse), [self.kernel], coarse)
        informed = count / self.data.num_values
        ratio = min(self._noises(1 / informed).values()) / signal.item()
        wanted = rule.tolerance * min(max(ratio * _SIGNAL_TO_NOISE, 1e-3), 10.0)
        return max(min(wanted, _SHARE_OF_POSTERIOR * ratio * informed), 1e-10)

    def _count(self, rule: Grid) -> int:
        """Features of a grid, within its budget."""
        try:
            return num_features(self.kernel, self._draw(rule))
        except GridBudgetError:
            return rule.max_features

    @property
    def _lengthscales(self) -> Float[np.ndarray, "d"]:
        return lengthscales(term_spectra(self.kernel, self.data.num_inputs), self.data.num_inputs)

    @property
    def _rounded_box(self) -> Box:
        """The data's box in steps of a quarter of a lengthscale: few data do not change it."""
        rounded = []
        for (low, high), step in zip(self.data.box, 0.25 * self._lengthscales, strict=True):
            if high > low and step > 1e-12 * max(abs(low), abs(high)):
                low, high = math.floor(low / step) * step, math.ceil(high / step) * step
            rounded.append((float(low), float(high)))
        return tuple(rounded)

    @property
    def _widened_box(self) -> Box:
        """The data's box, and on each side a lengthscale and at least a quarter of its extent."""
        low, high = np.array(self.data.box).T
        margin = np.maximum(self._lengthscales, 0.25 * (high - low))
        return tuple(zip((low - margin).tolist(), (high + margin).tolist(), strict=True))

    def _draw(self, rule: Rule) -> list[Draw]:
        return draw(self.kernel, rule, self.data.num_inputs)


def _serving(
    rule: Grid,
    domain: Box,
    data: Box | None,
    tolerance: float,
    lengthscale_range: tuple[float, float] = (1.0, 1.0),
) -> Grid:
    """A grid for a domain, within the rule's budget."""
    places = {"domain": domain, "data": data, "max_features": rule.max_features or MOST_FEATURES}
    return replace(rule, tolerance=tolerance, lengthscale_range=lengthscale_range, **places)


def corners(box: Box, kernel: Kernel) -> Float[Tensor, "2 d"]:
    """The lowest and the highest point of a box, where the kernel is."""
    return torch.tensor(box, dtype=torch.float64, device=next(kernel.parameters()).device).mT


def has_covariance(kernel: Kernel, data: Data) -> bool:
    """Whether the kernel has a covariance of its own, beside its spectral density."""
    x = corners(data.box, kernel)[:1]
    try:
        with torch.no_grad():
            kernel(x, x).to_dense()
    except NotImplementedError:
        return False
    return True


def num_features(kernel: Kernel, draws: list[Draw]) -> int:
    found = zip(draws, terms(kernel), strict=True)
    return sum(2 * own.num_frequencies * term.factor.rank for own, term in found)


def _far(data: Box, requested: Box) -> str:
    """In which column the points asked for are farthest from the data."""
    extent, both = (
        np.ptp(np.concatenate(boxes, axis=-1), axis=-1) for boxes in ([data], [data, requested])
    )
    least = 1e-9 * both.max() + np.finfo(float).tiny
    column = np.argmax(both / np.maximum(extent, least))
    (low, high), (first, last) = data[column], requested[column]
    return (
        f"expected points near the data, got column {column} from {first:.6g} to {last:.6g} where "
        f"the data are between {low:.6g} and {high:.6g}: no frequency grid serves both; check the "
        "units and the order of the columns, or predict nearer by"
    )
