"""Student-t noise: weights of observations (E-step), and EM for weights and hyperparameters."""

import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import singledispatch

import numpy as np
import torch
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import Likelihood
from jaxtyping import Float
from torch import Tensor

from gp_orff.data.dataset import Dataset
from gp_orff.data.noise.covariances import Noises, noises_of
from gp_orff.data.noise.known_noise_likelihood import KnownNoiseLikelihood
from gp_orff.data.noise.likelihoods import MultitaskStudentTLikelihood
from gp_orff.data.survey import warn_of_far_points
from gp_orff.inference.conditioning import Inference, Posterior
from gp_orff.inference.representation import FINE_FACTOR, Representation
from gp_orff.inference.robust import (
    StudentTNoise,
    climb,
    expected_weights,
    foreseen_weights,
    total_elbo_correction,
)
from gp_orff.models.fitting.search import Search
from gp_orff.models.fitting.starting_values import start, starts
from gp_orff.models.fitting.trainer import (
    MOST_SEARCHED,
    SCREENED_VALUES,
    SUBSET_VALUES,
    SUBSETS,
    Trainer,
)

_ROUND = 1e-5  # nats per number: a round of EM that gains less ends it
_FIRST_ROUNDS, _FURTHER_ROUNDS = 2, 4  # of EM, from all starting values and from the best of them
_FURTHER = 3  # starting values at least, and a third of all
_MOST_ROUNDS = 100  # of EM, to converge
_NEAR, _CONVERGED = 1e-3, 1e-9  # nats per number: gain of a step to extrapolate, and to end
_MANY_CONVERGED = 1e-4  # of many numbers, each of whose steps takes many seconds

_START = "starting values, Student-t EM"  # a stage


@singledispatch
def heavy_tailed_noise(likelihood: Likelihood) -> StudentTNoise | None:
    """The model of the weights of observations under this likelihood; None for Gaussian noise.

    Register other likelihoods with `@heavy_tailed_noise.register`.
    """
    return None


@heavy_tailed_noise.register
def _(likelihood: MultitaskStudentTLikelihood) -> StudentTNoise:
    return StudentTNoise(likelihood.deg_free)


@heavy_tailed_noise.register
def _(likelihood: KnownNoiseLikelihood) -> StudentTNoise | None:
    return None if likelihood.deg_free is None else StudentTNoise(likelihood.deg_free)


@dataclass(frozen=True)
class EStep:
    """The E-step: weights of observations at the present hyperparameters."""

    kernel: Kernel
    likelihoods: Mapping[str, Likelihood]
    mean: Float[Tensor, "p"] | None

    @property
    def heavy_tailed(self) -> dict[str, StudentTNoise]:
        """The noise models of the groups with heavy-tailed noise."""
        models = {label: heavy_tailed_noise(noise) for label, noise in self.likelihoods.items()}
        return {label: model for label, model in models.items() if model is not None}

    @property
    def noises(self) -> Noises:
        return noises_of(self.kernel, self.likelihoods)

    @torch.no_grad()
    def weighted(
        self, data: Dataset, inference: Inference, known: Iterable[Tensor] | None = None
    ) -> Dataset:
        """The data with their expected weights under the posterior of `inference`; `known` weights
        stay as they are."""
        posterior = inference.posterior(self.kernel, self.noises, self.mean)
        return data.weighted(*self._weights(data, inference, posterior, known))

    @torch.no_grad()
    def foreseen(self, data: Dataset, inference: Inference) -> Dataset:
        """The data with the weights that the posterior of a few of them lets expect."""
        posterior = inference.posterior(self.kernel, self.noises, self.mean)
        parts = self.heavy_tailed, posterior, self.noises, self._mean(posterior)
        weights = foreseen_weights(data.unweighted().visit(), *parts)
        keys = [part.key for part in data.visit()]
        correction = total_elbo_correction(keys, weights, self.heavy_tailed)
        return data.weighted(weights, correction)

    @torch.no_grad()
    def converged(self, representation: Representation, rounds: int = 300) -> Representation:
        """Repeat the E-step, from the present weights, until the ELBO converges; the data with the
        last weights."""
        if not self.heavy_tailed:
            return representation
        data, inference = representation.data, representation.now()
        plain = data.unweighted()
        keys, sizes = zip(*((part.key, len(part)) for part in plain.visit()), strict=True)

        def weighted(logs: Tensor) -> Dataset:
            weights = logs.exp().split(sizes)
            return plain.weighted(weights, total_elbo_correction(keys, weights, self.heavy_tailed))

        def step(logs: Tensor) -> tuple[float, Tensor]:
            current = inference.of(weighted(logs))
            posterior = current.posterior(self.kernel, self.noises, self.mean)
            log_density = posterior.evidence.log_density(self._mean(posterior), current.num_values)
            weights, _ = self._weights(plain, current, posterior)
            elbo = log_density + current.data.elbo_correction
            return elbo.item(), torch.cat(weights).log()

        initial = torch.cat(list(data.all_weights())).log()
        settled = _MANY_CONVERGED if plain.num_values > MOST_SEARCHED else _CONVERGED
        near, gain = _NEAR * plain.num_values, settled * plain.num_values
        logs, converged = climb(step, initial, near, gain, rounds)
        if not converged:
            warnings.warn(
                f"the weights of Student-t noise have not converged after {rounds} rounds: use a "
                "larger deg_free or noise, or call fit, which learns the noise",
                stacklevel=2,
            )
        return replace(representation, data=weighted(logs))

    def _mean(self, posterior: Posterior) -> Float[Tensor, "p"]:
        return posterior.evidence.best_mean() if self.mean is None else self.mean

    def _weights(
        self,
        data: Dataset,
        inference: Inference,
        posterior: Posterior,
        known: Iterable[Tensor] | None = None,
    ) -> tuple[list[Tensor], float]:
        parts = posterior, self.noises, self._mean(posterior), known
        same = data.sources is inference.data.sources  # observations, but for their weights
        seconds = inference.residuals(posterior) if same else None
        return expected_weights(data.visit(), self.heavy_tailed, *parts, seconds)


@dataclass(frozen=True)
class RobustEM:
    """Expectation maximisation: E-steps for the weights, searches of a trainer as M-steps."""

    trainer: Trainer

    @property
    def e_step(self) -> EStep:
        return EStep(self.trainer.kernel, self.trainer.likelihoods, self.trainer.mean)

    def start(self, data: Dataset, warm_start: bool) -> Dataset:
        """EM on a subset, from good starting values unless `warm_start`; the data with weights."""
        with self.trainer.journal.stage(_START):
            return self._start(data, warm_start)

    def _start(self, data: Dataset, warm_start: bool) -> Dataset:
        subset, inference = self.trainer.subset(SUBSET_VALUES // 2), self.trainer.inference
        if not warm_start:
            self._start_among_outliers(self.trainer.subset(SCREENED_VALUES))
        subset = self._maximise(subset, inference, _START)
        return self.e_step.weighted(data.unweighted(), inference(subset))

    def _start_among_outliers(self, subset: Dataset) -> None:
        """Set the hyperparameters to the best after a few rounds of EM from each starting value:
        without weights, the evidence may be largest for a field that passes through outliers."""
        trainer, candidates = self.trainer, []
        kernel, likelihoods, distances = trainer.kernel, trainer.likelihoods, trainer.distances
        warn_of_far_points(distances)
        for initial in starts(kernel, distances):
            start(kernel, likelihoods, subset.observations, distances, initial)
            candidates.append(self._few_rounds(subset, trainer.new_search(), _FIRST_ROUNDS))
        candidates.sort(key=lambda candidate: candidate[0].value, reverse=True)
        further = []
        for search, u, weighted in candidates[: max(_FURTHER, len(candidates) // 3)]:
            search.coordinates.set(u)
            further.append(self._few_rounds(weighted, search, _FURTHER_ROUNDS))
        search, u, _ = max(further, key=lambda candidate: candidate[0].value)
        search.coordinates.set(u)

    def _few_rounds(
        self, data: Dataset, search: Search, rounds: int
    ) -> tuple[Search, Float[np.ndarray, "k"], Dataset]:
        """A few rounds of EM: the search, the coordinates that it reached, the weighted data."""
        data, _ = self._rounds(data, search, self.trainer.inference, _START, rounds)
        return search, search.coordinates.get(), data

    def run(self, representation: Representation) -> Representation:
        """EM on all data, until the weights have converged.

        Many numbers under an exact kernel learn the hyperparameters on subsets: a round on all
        would take minutes and gain little. So do grids of decaying waves. The weights of all start
        from what the last subset tells.
        """
        data, levels = representation.data, [lambda: representation.rule]
        by_subsets = representation.rule is None or not representation.on_lattice
        if by_subsets and data.num_values > MOST_SEARCHED:
            levels, exact = [], self.trainer.exact_inference
            for numbers in SUBSETS:
                subset = self.trainer.subset(numbers)
                subset = self._maximise(subset, exact, f"Student-t EM, {numbers}")
            data = self.e_step.foreseen(data, exact(subset))
        elif representation.follows:
            levels = [representation.coarse, representation.fine]
        for level in levels:

            def inference(weighted: Dataset, level=level) -> Inference:
                return replace(representation, data=weighted).inference(level())

            data = self._maximise(data, inference, "Student-t EM")
        return self.e_step.converged(replace(representation, data=data))

    def _maximise(
        self, data: Dataset, inference: Callable[[Dataset], Inference], name: str
    ) -> Dataset:
        """Rounds of EM until the ELBO converges, as a stage `name`; the data with weights."""
        with self.trainer.journal.stage(name):
            data, done = self._rounds(
                data, self.trainer.new_search(), inference, name, _MOST_ROUNDS
            )
        self.trainer.journal.note(f"{name}: {done} rounds of EM")
        return data

    def _rounds(
        self,
        data: Dataset,
        search: Search,
        inference: Callable[[Dataset], Inference],
        name: str,
        rounds: int,
    ) -> tuple[Dataset, int]:
        """Up to `rounds` rounds of EM, each of which goes on with the search; the weighted data,
        the number of rounds."""
        previous, done = -np.inf, 0
        while done < rounds:
            done += 1
            data = self.e_step.weighted(data.unweighted(), inference(data))
            options = {"iterations": 5, "nats": 0.1, "trust_factor": FINE_FACTOR}
            self.trainer.search(search, inference(data), name, **options)
            if search.value - previous < _ROUND:
                break
            previous = search.value
        return data, done
