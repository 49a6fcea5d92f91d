"""Searches for hyperparameters on any representation of the data, and their record."""

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import Likelihood
from jaxtyping import Float, Int
from torch import Tensor

from gp_orff.data.dataset import Data, Dataset
from gp_orff.data.noise import noises_of
from gp_orff.data.observations import Observations, join
from gp_orff.data.passes import kept
from gp_orff.data.sites import site_labels
from gp_orff.data.survey import DataWarning, Distances, Survey, subset, windows
from gp_orff.data.tracks import TrackObservations
from gp_orff.features.assemble import draw
from gp_orff.features.draws import GridWarning
from gp_orff.features.random import QuasiMonteCarlo
from gp_orff.fitting.curvature import average
from gp_orff.fitting.curves import Curves
from gp_orff.fitting.journal import Journal
from gp_orff.fitting.noise import search_coordinates
from gp_orff.fitting.scoring import MOST_SAMPLED, WeakPriors, log_prior_of_noise
from gp_orff.fitting.search import Search
from gp_orff.inference.equations import whole_vectors
from gp_orff.inference.exact import ExactInference, has_covariance
from gp_orff.inference.features import FeatureInference, Inference, log_marginal_likelihood
from gp_orff.inference.price import FINALISTS, NEGLIGIBLE, SUBSET_VALUES
from gp_orff.inference.representation import Representation
from gp_orff.kernels.tree import share_mixing, terms

SCREENED_VALUES = SUBSET_VALUES // FINALISTS  # values of the subset for the first short searches
_FREQUENCIES = 1024  # for kernels without a covariance, times the columns of B(ω)
_FEW_FOR_EACH = 10  # values per hyperparameter; with fewer, 95 % intervals had coverage 0.6 to 0.88
_FLAT = 20.0  # inverse of the first curvature of searches along tracks, in nats per value
_MOST_SCORED = 800  # values; with more, the information costs several evaluations
_OUTPUTS = 4  # outputs of a separable kernel, beyond which further ones cost little


@dataclass(frozen=True)
class Trainer:
    """The kernel, the likelihoods and the constant mean that a fit learns, with its journal."""

    kernel: Kernel
    likelihoods: Mapping[str, Likelihood]
    mean: Float[Tensor, "p"] | None  # a fixed mean; None for the mean with the largest evidence
    survey: Survey  # of the data
    journal: Journal
    tracks: Sequence[TrackObservations] = ()  # of the data
    whole: Survey | None = None  # of all data, if `survey` is that of a subset
    priors: WeakPriors | None = None  # None for many data

    @property
    def num_outputs(self) -> int:
        return self.survey.sample[0].pattern.num_outputs

    @property
    def distances(self) -> Distances:
        return self.survey.distances

    @property
    def curves(self) -> Curves:
        return Curves(self.kernel)

    def new_search(self) -> Search:
        """A search over all trained hyperparameters, from their present values."""
        modules = self.kernel, self.likelihoods
        search = Search(search_coordinates(*modules, self.whole or self.survey, self.survey))
        if self.tracks:  # few tracks hardly determine the parameters of their noise
            search.curvature = np.eye(len(search.coordinates.get())) / _FLAT
        return search

    @cached_property
    def num_learned(self) -> int:
        """k, the number of hyperparameters of a search."""
        return len(self.new_search().coordinates.get())

    def evidence(self, inference: Inference) -> Float[Tensor, ""]:
        """log p(y) in total nats. With weak priors, the constant mean is integrated out."""
        parts = inference, self.kernel, self.likelihoods, self.mean
        return log_marginal_likelihood(*parts, restricted=self.priors is not None)

    def log_prior(self, search: Search) -> Float[Tensor, ""] | float:
        """The log density of all priors at the present hyperparameters."""
        modules = self.kernel, self.likelihoods
        prior = log_prior_of_noise(*modules, self.whole or self.survey)
        weak = 0.0 if self.priors is None else self.priors.log_density(*modules)
        return search.coordinates.log_prior() + prior + weak

    @torch.no_grad()
    def value(self, inference: Inference) -> float:
        """The log evidence in total nats. −∞ if its computation fails."""
        try:
            value = self.evidence(inference).item()
        except (torch.linalg.LinAlgError, ValueError, RuntimeError):
            return -math.inf
        return value if math.isfinite(value) else -math.inf

    def search(self, search: Search, inference: Inference, name: str, **options) -> Search:
        """Run a search as the stage `name` of the journal, with the options of `Search.run`."""

        def objective() -> Float[Tensor, ""]:
            return self.evidence(inference) + self.log_prior(search)

        def reached() -> dict[str, object]:
            information, of = self._information(search, inference)
            search.run(
                objective,
                inference.num_values,
                information=information,
                of=of,
                report=stage.count,
                **options,
            )
            return search.reached

        before = len(search.failures)
        with self.journal.stage(name) as stage:
            search.go_to(kept(reached))
            stage.nats_per_number = search.value
        if failures := search.failures[before:]:
            self.journal.note(
                f"{name}: {len(failures)} evaluations failed, and the search took shorter steps "
                f"({failures[-1]})"
            )
        return search

    def _information(
        self, search: Search, inference: Inference
    ) -> tuple[Callable[[], Float[np.ndarray, "k k"] | None], object]:
        """Return a function for the information, and a value that identifies its data.

        The function returns None if the information is expensive. The value does not depend on
        weights: EM, which changes only weights, continues with the present curvature.
        """
        parts = inference, self.kernel, self.likelihoods, search.coordinates
        exact = inference.is_exact

        def information() -> Float[np.ndarray, "k k"] | None:
            if not exact and not inference.has_shared_columns:
                return None
            if exact and self.curves and inference.size > _MOST_SCORED:
                return None
            return average(*parts, self.mean)

        return information, (inference.num_values, inference.size if exact else None)

    def subset(self, numbers: int) -> Dataset:
        """Return about `numbers` observed values, at points such that distances of all lengths
        occur between them."""
        return self._chosen(lambda x: subset(x, self._points(numbers)))

    def windows(self, numbers: int, count: int, seed: int) -> Dataset:
        """Return about `numbers` observed values. They are all points in `count` compact parts of
        the data."""
        return self._chosen(lambda x: windows(x, self._points(numbers), count, seed))

    def _points(self, numbers: int) -> int:
        """The number of points with about `numbers` observed values, at least two."""
        return max(2, round(numbers * self.survey.num_points / self.survey.num_values))

    def _chosen(self, rows_of: Callable[[Float[Tensor, "N d"]], Int[Tensor, "n"]]) -> Dataset:
        """Select rows of the sample of the survey, and of the blocks of tracks."""
        along = {part.key for part in self.tracks}
        single = join(part for part in self.survey.sample if part.key not in along)
        parts = [*single, *self.tracks]
        points = [part.x for part in single] + [part.means.x for part in self.tracks]
        chosen = rows_of(torch.cat(points))
        offsets = np.cumsum([0, *map(len, points)])
        selected = []
        for part, low, high in zip(parts, offsets[:-1], offsets[1:], strict=True):
            rows = chosen[(chosen >= low) & (chosen < high)] - low
            if len(rows):
                selected.append(part.take(rows))
        return Dataset.in_memory(selected)

    def exact_inference(self, data: Dataset) -> ExactInference:
        """Inference under the exact kernel. Observations at equal positions are merged."""
        noises = noises_of(self.kernel, self.likelihoods)
        return ExactInference.merging(self.kernel, noises, data)

    def starting_subset(self, numbers: int) -> Dataset:
        """Return a subset as `subset` selects it. It has more points if further outputs cost
        little."""
        cheap = self._has_cheap_outputs and self._is_whole(join(self.survey.sample))
        return self.subset(numbers * self.num_outputs // _OUTPUTS if cheap else numbers)

    def inference(self, data: Dataset) -> Inference:
        """Inference from a subset of the data, under the exact kernel if it is available."""
        number = _FREQUENCIES // 2
        if not (self._has_cheap_outputs and self._is_whole(data.observations)):
            if has_covariance(self.kernel, data):
                return ExactInference(data)
            rank = max(term.factor.rank for term in terms(self.kernel))
            number = max(1, min(_FREQUENCIES, 2 ** (2 * data.num_values).bit_length()) // rank)
        rule = QuasiMonteCarlo(number)
        return FeatureInference(data, draw(self.kernel, rule, data.num_inputs))

    def _is_whole(self, observations: Sequence[Observations]) -> bool:
        """Whether all observations are whole vectors with the same white noise."""
        return not self.tracks and whole_vectors(observations)

    def warn_of_few_numbers(self, data: Data, learned: int) -> None:
        """Warn if there are few values per hyperparameter, and posteriors do not allow for it."""
        if self.priors is not None or (self.curves and data.num_values <= MOST_SAMPLED):
            return
        if (numbers := self._at_distinct_places(data)) < _FEW_FOR_EACH * learned:
            alike = (
                f", equivalent to {numbers:.0f} because the field barely changes between most "
                "places under the learned lengthscales,"
            )
            warnings.warn(
                f"{data.num_values:.0f} values{alike if numbers < data.num_values else ''} "
                f"determine {learned} hyperparameters poorly: error bars do not include the "
                "uncertainty of hyperparameters and may be too small; use "
                "posterior(marginalize=True) to include it, fix known hyperparameters by "
                "requires_grad_(False), register priors, or use a simpler kernel",
                DataWarning,
                stacklevel=2,
            )

    def warn_of_truncation(self, representation: Representation) -> None:
        """Warn if the grid of the posterior truncates much of the variance."""
        ratio = max(representation.cuts().values()) if representation.follows else 0.0
        if ratio > NEGLIGIBLE:
            remedy = "a smoother kernel, a smaller region or fewer observations"
            if representation.rule.max_features is not None:
                remedy = "a larger max_features="
            text = (
                f"the truncated variance of the grid is {ratio:.2g} times the noise variance: "
                "error bars include it as independent between observations, and are too small on "
                f"dense tracks; {remedy} would reduce it"
            )
            self.journal.note(text)
            warnings.warn(text, GridWarning, stacklevel=2)

    def _at_distinct_places(self, data: Data) -> float:
        """Return the number of observed values, if indistinguishable positions are merged."""
        sample, of_symbols = self.survey.sample, data.num_values - self.survey.num_values
        if has_covariance(self.kernel, held := Dataset.in_memory(sample)):
            distinct = self.exact_inference(held).size
        elif sum(map(len, sample)) < self.survey.num_points:  # the sample has not all positions
            return data.num_values
        else:
            equal = (0.0,) * data.num_inputs
            distinct = sum((site_labels(p, equal).max() + 1) * p.y.shape[-1] for p in sample)
        return min(data.num_values, distinct + of_symbols)

    @property
    def _has_cheap_outputs(self) -> bool:
        """Whether an evaluation by features costs about as much for all outputs as for few."""
        return self.num_outputs > _OUTPUTS and share_mixing(terms(self.kernel))
