"""Searches for hyperparameters, on whatever represents the data, and what is told of them."""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import Likelihood
from jaxtyping import Float
from torch import Tensor

from gp_orff.data.dataset import Data, Dataset
from gp_orff.data.observations import join
from gp_orff.data.survey import DataWarning, Distances, Survey
from gp_orff.features.assemble import draw
from gp_orff.features.frequencies.auto import Auto
from gp_orff.features.frequencies.grid import Grid
from gp_orff.features.frequencies.random import QuasiMonteCarlo
from gp_orff.features.frequencies.rule import Rule
from gp_orff.inference.conditioning import (
    ExactInference,
    FeatureInference,
    Inference,
    log_marginal_likelihood,
)
from gp_orff.inference.representation import has_covariance
from gp_orff.models.fitting.coordinates import Coordinates
from gp_orff.models.fitting.ranges import parameter_ranges
from gp_orff.models.fitting.search import Search
from gp_orff.models.fitting.starting_values import subset
from gp_orff.models.threads import again

SCREENED_VALUES, SUBSET_VALUES = 200, 600  # numbers whose exact evidence gives starting values
_SHORT = 4  # iterations


@dataclass(frozen=True)
class Trainer:
    """A kernel, the noise of every group and a constant mean, while they are learned."""

    kernel: Kernel
    likelihoods: Mapping[str, Likelihood]
    mean: Float[Tensor, "p"] | None  # a fixed one; None for the best one
    survey: Survey  # of the data
    progress: Callable[..., None]
    notes: list[str] = field(default_factory=list)

    @property
    def num_outputs(self) -> int:
        return self.survey.sample[0].pattern.num_outputs

    @property
    def distances(self) -> Distances:
        return self.survey.distances

    def note(self, text: str) -> None:
        if text and text not in self.notes:
            self.notes.append(text)

    def begin(self) -> Search:
        """Of all that is trained, within what the data can tell, from where it is."""
        ranges = parameter_ranges(self.kernel, self.distances)
        return Search(Coordinates(self.kernel, *self.likelihoods.values(), ranges=ranges))

    def evidence(self, inference: Inference) -> Float[Tensor, ""]:
        return log_marginal_likelihood(inference, self.kernel, self.likelihoods, self.mean)

    def search(
        self, search: Search, inference: Inference, name: str, note: bool = True, **options
    ) -> Search:
        def objective() -> Float[Tensor, ""]:
            again()  # the machine may have become busy
            return self.evidence(inference) + search.coordinates.log_prior()

        before, failed = search.evaluations, len(search.failures)
        search.run(
            objective,
            inference.num_values,
            report=lambda value: self.progress(stage=name, nats=value),
            **options,
        )
        if note:
            evaluations = search.evaluations - before
            self.note(f"{name}: {evaluations} evaluations, {search.value:.5f} nats per number")
        if len(search.failures) > failed:
            failures = len(search.failures) - failed
            self.note(f"{name}: {failures} of them failed ({search.failures[-1]}): shorter steps")
        return search

    def begun(
        self, search: Search, inference: Inference, name: str, iterations: int = _SHORT
    ) -> tuple[Search, Float[np.ndarray, "k"]]:
        """A short search, and where it came to."""
        self.search(search, inference, name, note=False, iterations=iterations)
        return search, search.coordinates.get()

    def some(self, numbers: int) -> Dataset:
        """Few readings, that show every scale."""
        parts = join(self.survey.sample)
        chosen = subset(torch.cat([own.x for own in parts]), max(2, numbers // self.num_outputs))
        offsets = np.cumsum([0, *map(len, parts)])
        few = []
        for own, low, high in zip(parts, offsets[:-1], offsets[1:], strict=True):
            rows = chosen[(chosen >= low) & (chosen < high)] - low
            if len(rows):
                few.append(own.take(rows))
        return Dataset.in_memory(few)

    def represented(self, few: Dataset) -> Inference:
        """Few readings, by the exact kernel if there is one."""
        if has_covariance(self.kernel, few):
            return ExactInference(few)
        return FeatureInference(few, draw(self.kernel, QuasiMonteCarlo(1024), few.num_inputs))


def without_far_points(data: Data, requested: Rule) -> tuple[Data, list[str]]:
    """Set aside a few points far from all others, which would take up all the frequencies of a
    grid; and what was done, in words."""
    near = data.survey.distances.near
    if near is None or not isinstance(data, Dataset) or not _spans(requested, data):
        return data, []
    inside = data.within(near)
    text = (
        f"{data.survey.num_points - inside.survey.num_points} points far from all others are left "
        "out: no frequency grid serves both; drop them if they are errors, or fit them apart"
    )
    warnings.warn(text, DataWarning, stacklevel=2)
    return inside, [text]


def _spans(requested: Rule, data: Data) -> bool:
    """Whether there will be a grid whose domain follows from the data."""
    if isinstance(requested, Auto):
        return requested.domain is None and data.num_values > requested.max_features
    return isinstance(requested, Grid) and requested.domain is None and requested.spacing is None
