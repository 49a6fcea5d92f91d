"""EM for Student-t noise and pseudo-observations, and depths of sources with tiny variances."""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import singledispatch

import numpy as np
import torch
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import Likelihood
from jaxtyping import Float
from torch import Tensor

from gp_orff.data.dataset import Data, Dataset
from gp_orff.data.likelihoods import HeavyTails
from gp_orff.data.noise import Noises, noises_of
from gp_orff.data.pointwise import any_pointwise
from gp_orff.data.survey import warn_of_far_points
from gp_orff.fitting.coordinates import set_trained
from gp_orff.fitting.noise import Tails
from gp_orff.fitting.search import Search
from gp_orff.fitting.starting_values import start, starts
from gp_orff.fitting.trainer import SCREENED_VALUES, Trainer
from gp_orff.inference.features import Inference, Posterior
from gp_orff.inference.price import (
    FINALISTS,
    MOST_EVALUATIONS,
    MOST_TRAINING,
    NATS,
    NATS_OF_A_NUMBER,
    NEGLIGIBLE,
    ROUNDING,
    SHORT,
    SUBSET_VALUES,
)
from gp_orff.inference.pseudo_observations import Iterate, converge, learn
from gp_orff.inference.representation import Representation
from gp_orff.inference.robust import (
    Distances,
    StudentTNoise,
    all_distances,
    climb,
    foreseen_weights,
    total_elbo_correction,
    weights_at,
)
from gp_orff.kernels.base import FieldKernel, parts_of

# Depths of sources whose variance has vanished in a search on few observations.


@torch.no_grad()
def restore(kernel: Kernel) -> None:
    """Raise very small variances of a harmonic kernel to a hundredth of the largest one.

    A harmonic kernel has one variance for the sources at each depth. If few observations do not
    distinguish two depths, a search may reduce the variance of one of them to almost zero. The
    gradient with respect to its logarithm is then so small that a search on more observations would
    not increase it again.
    """
    for part in parts_of(kernel, FieldKernel):
        variances = getattr(part, part.amplitude)
        least = NEGLIGIBLE**2 * variances.max()
        if (variances < least).any():
            set_trained(part, part.amplitude, variances.clamp_min(least))


# Student-t noise: weights of observations (E-step), and EM for weights and hyperparameters.
#
# Student-t noise is Gaussian noise with a random weight w_n of each observation. Given the expected
# weights, evidence and posterior are those for Gaussian noise with the covariances N_n/E[w_n].
#
# 1. E-step: the posterior of the field determines the expected distances. These determine the
#    weights, ν and the scale of the noise (`EStep.refreshed`).
# 2. M-step: a few iterations of a search for the other hyperparameters, given the weights.
# 3. Both repeat until the ELBO gains less than a threshold in a round (`maximise`).
#
# The first rounds run on a subset, from several starting values (`_start_among_outliers`): without
# weights, the evidence may be largest for a field that passes through the outliers. The plans of
# the search follow, and each refreshes the weights of its data. At the end, EM iterates the weights
# of all data until they converge (`EStep.converged`), accelerated by extrapolation (`climb`).


_ROUND = NEGLIGIBLE * NATS_OF_A_NUMBER  # EM ends with a round that gains fewer nats per value

_START = "starting values, EM"  # the name of a stage


@singledispatch
def heavy_tailed_noise(likelihood: Likelihood) -> StudentTNoise | None:
    """The model of the weights of observations under this likelihood; None for Gaussian noise.

    Other likelihoods register with `@heavy_tailed_noise.register`.
    """
    return None


@heavy_tailed_noise.register
def _(likelihood: HeavyTails) -> StudentTNoise | None:
    return StudentTNoise(likelihood.deg_free.item()) if likelihood.has_deg_free else None


@dataclass(frozen=True)
class EStep:
    """The E-step: weights of observations at the present hyperparameters."""

    kernel: Kernel
    likelihoods: Mapping[str, Likelihood]
    mean: Float[Tensor, "p"] | None

    @classmethod
    def of(
        cls, kernel: Kernel, likelihoods: Mapping[str, Likelihood], mean: Float[Tensor, "p"] | None
    ) -> "EStep":
        """The E-step for Student-t weights, or for pseudo-observations if a likelihood needs them.

        Raises:
            NotImplementedError: if one group has Student-t noise and another pseudo-observations.
        """
        step = EStep(kernel, likelihoods, mean)
        if not any_pointwise(likelihoods):
            return step
        if step.heavy_tailed:
            raise NotImplementedError(
                "expected Gaussian noise in the other groups if one group has a gp_orff.Pointwise "
                "likelihood, got a MultitaskStudentTLikelihood; use "
                "gp_orff.Pointwise(gpytorch.likelihoods.StudentTLikelihood()) instead"
            )
        return RepresentationStep(kernel, likelihoods, mean)

    @property
    def limits(self) -> dict[str, float]:
        """The limits of the search in one round of EM.

        A search ends when it would gain less than a fraction of a nat, because the weights change
        afterwards.
        """
        return {"nats": NEGLIGIBLE * NATS}

    @property
    def refreshes(self) -> bool:
        """Whether the data have weights or pseudo-observations, which follow from the posterior."""
        return bool(self.heavy_tailed)

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
        self, data: Dataset, inference: Inference, known: Sequence[Tensor] | None = None
    ) -> Dataset:
        """The data with their expected weights under the posterior of `inference`.

        `known` are weights that stay unchanged.
        """
        posterior = inference.posterior(self.kernel, self.noises, self.mean)
        found = self._distances(data, inference, posterior, known)
        return data.weighted(*weights_at(found, self.heavy_tailed))

    @torch.no_grad()
    def refreshed(self, data: Dataset, infer: Callable[[Dataset], Inference]) -> Dataset:
        """Learn ν and the scale of the noise, and return the data with their expected weights.

        The scale is learned only if no truncation variance is added to the noise.
        """
        inference, data = infer(data), data.unweighted()
        posterior = inference.posterior(self.kernel, self.noises, self.mean)
        found = list(self._distances(data, inference, posterior))
        found = Tails(self.likelihoods, _is_pure(inference)).learn(found)
        return data.weighted(*weights_at(found, self.heavy_tailed))

    def stored(self, data: Dataset) -> list[Distances]:
        """The distances that correspond to the present weights of the data."""
        pairs = zip(data.unweighted().visit(), data.all_weights(), strict=True)
        models, empty = self.heavy_tailed, torch.zeros(0)
        return [
            Distances(part.key, empty)
            if (model := models.get(part.key.label)) is None
            else Distances(part.key, model.distance(weight, part.pattern.num_values))
            for part, weight in pairs
        ]

    @torch.no_grad()
    def foreseen(self, data: Dataset, inference: Inference) -> Dataset:
        """Return the data with predicted weights, given the inference from a few of the
        observations."""
        posterior = inference.posterior(self.kernel, self.noises, self.mean)
        parts = self.heavy_tailed, posterior, self.noises
        weights = foreseen_weights(data.unweighted().visit(), *parts)
        keys = [part.key for part in data.visit()]
        correction = total_elbo_correction(keys, weights, self.heavy_tailed)
        return data.weighted(weights, correction)

    @torch.no_grad()
    def converged(
        self, representation: Representation, rounds: int = 300, learn: bool = False
    ) -> Representation:
        """Repeat the E-step from the present weights until the ELBO converges.

        Args:
            representation: the data with weights, and the form of the prior.
            rounds: the largest number of E-steps.
            learn: whether to learn ν and the scale of the noise too, like `refreshed`.

        Returns:
            The representation, with the weights of the last round.

        Warns:
            UserWarning: if the ELBO has not converged after `rounds` rounds.
        """
        if not self.heavy_tailed:
            return representation
        data, inference = representation.data, representation.now()
        plain, tails = (
            data.unweighted(),
            Tails(self.likelihoods if learn else {}, _is_pure(inference)),
        )
        keys, sizes = zip(*((part.key, len(part)) for part in plain.visit()), strict=True)
        count = len(tails.get())

        def weighted(point: Tensor) -> Dataset:
            tails.set(point[:count])
            weights = point[count:].exp().split(sizes)
            return plain.weighted(weights, total_elbo_correction(keys, weights, self.heavy_tailed))

        def step(point: Tensor) -> tuple[float, Tensor]:
            current = inference.of(weighted(point))
            posterior = current.posterior(self.kernel, self.noises, self.mean)
            log_density = posterior.evidence.log_density(posterior.mean, current.num_values)
            elbo = (log_density + current.data.elbo_correction).item() + tails.log_prior()
            found = tails.learn(list(self._distances(plain, current, posterior)))
            weights, _ = weights_at(found, self.heavy_tailed)
            logs = torch.cat(weights).log()
            return elbo, torch.cat([tails.get().to(logs), logs])

        logs = torch.cat(list(data.all_weights())).log()
        settled = NATS_OF_A_NUMBER if plain.num_values > MOST_TRAINING else NEGLIGIBLE * ROUNDING
        near, gain = NATS_OF_A_NUMBER / NEGLIGIBLE * plain.num_values, settled * plain.num_values
        initial = torch.cat([tails.get().to(logs), logs])
        point, converged = climb(step, initial, near, gain, rounds)
        if not converged:
            warnings.warn(
                f"the weights of Student-t noise have not converged after {rounds} rounds; use a "
                "larger deg_free or noise, or call fit, which learns the noise",
                stacklevel=2,
            )
        return replace(representation, data=weighted(point))

    def _distances(
        self,
        data: Dataset,
        inference: Inference,
        posterior: Posterior,
        known: Sequence[Tensor] | None = None,
    ) -> Iterator[Distances]:
        parts = posterior, self.noises, known
        held = inference.data  # may be sufficient statistics only
        same = held.revisitable and data.sources is held.sources  # the weights may differ
        residuals = inference.residuals(posterior) if same else None
        return all_distances(data.visit(), self.heavy_tailed, *parts, residuals)


@dataclass(frozen=True)
class RepresentationStep(EStep):
    """The E-step for pseudo-observations, which can represent any likelihood.

    In contrast to Student-t weights, pseudo-observations are iterated until they converge in each
    E-step of a fit.
    """

    refreshes, limits, heavy_tailed = True, {}, {}

    def _iterate(self, data: Dataset, inference: Inference) -> Iterate:
        posterior = inference.posterior(self.kernel, self.noises, self.mean)
        return Iterate.of(data, inference, posterior, self.likelihoods)

    def weighted(self, data: Dataset, inference: Inference, *weights: object) -> Dataset:
        """The data with the pseudo-observations under the posterior of `inference`."""
        moved = self._iterate(data, inference).moved(1.0)
        return self._iterate(moved, inference).data  # with their ELBO correction

    foreseen = weighted

    def refreshed(self, data: Dataset, infer: Callable[[Dataset], Inference]) -> Dataset:
        """Learn the parameters of likelihoods, and return data with converged pseudo-observations.

        The parameters are learned under the posterior before the pseudo-observations change.
        """
        return self._converged(data, infer, _ROUND * data.num_values)

    def converged(
        self, representation: Representation, rounds: int = 300, learn: bool = False
    ) -> Representation:
        """Return the representation with converged pseudo-observations.

        The form of the prior follows the noise of the pseudo-observations. If `learn` is True, the
        parameters of likelihoods are learned in turn with them.
        """
        numbers, before = representation.data.num_values, np.inf
        for _ in range(rounds):
            inference = representation.now()
            data = self._converged(representation.data, inference.of, _ROUND * numbers, learn)
            representation = replace(representation, data=data)
            elbo = self._iterate(data, representation.now()).elbo
            if abs(elbo - before) < _ROUND * numbers:
                break
            before = elbo
        settled = NEGLIGIBLE**4 * ROUNDING  # each step gains little, long before convergence
        data = self._converged(data, representation.now().of, settled * numbers, learns=False)
        return replace(representation, data=data)

    def _converged(
        self, data: Dataset, infer: Callable[[Dataset], Inference], nats: float, learns: bool = True
    ) -> Dataset:
        def at(trial: Dataset) -> Iterate:
            return self._iterate(trial, infer(trial))

        if learns:
            posterior = infer(data).posterior(self.kernel, self.noises, self.mean)
            learn(data, posterior, self.likelihoods, SHORT)
        return converge(at, data, nats, MOST_EVALUATIONS)


def _is_pure(inference: Inference) -> bool:
    """Return whether the scale of the likelihood multiplies all noise of the observations."""
    return inference.is_exact and inference.changes is None


@dataclass(frozen=True)
class Candidate:
    """The result of a few rounds of EM."""

    search: Search
    u: Float[np.ndarray, "k"]  # the coordinates
    tails: Float[Tensor, "2*g"]
    data: Dataset  # with weights


def e_step_of(trainer: Trainer) -> EStep:
    """The E-step for the kernel and the likelihoods of a trainer."""
    return EStep.of(trainer.kernel, trainer.likelihoods, trainer.mean)


def has_weights(trainer: Trainer, data: Data) -> bool:
    """Whether the observations have weights of Student-t noise, or are pseudo-observations."""
    return data.revisitable and e_step_of(trainer).refreshes


def start_with_weights(trainer: Trainer, data: Dataset, warm_start: bool) -> Dataset:
    """Run EM on a subset, and return all data with weights.

    If `warm_start` is True, EM starts from the present hyperparameters. Otherwise, it tries several
    starting values.
    """
    subset, inference = trainer.subset(SUBSET_VALUES // 2), trainer.inference
    with trainer.journal.stage(_START):
        if not warm_start:
            _start_among_outliers(trainer, trainer.subset(SCREENED_VALUES))
        subset = maximise(trainer, trainer.new_search(), subset, inference, _START)
        return e_step_of(trainer).weighted(data.unweighted(), inference(subset))


def _start_among_outliers(trainer: Trainer, subset: Dataset) -> None:
    """Set the hyperparameters to the best after a few rounds of EM from each starting value.

    Without weights, the evidence may be largest for a field that passes through outliers.
    """
    kernel, likelihoods, distances = trainer.kernel, trainer.likelihoods, trainer.distances
    tails, candidates, further = Tails(likelihoods), [], []
    at_first, coordinates = tails.get(), trainer.new_search().coordinates
    first = coordinates.get()  # `start` does not set all, such as exponents
    warn_of_far_points(distances)

    def few_rounds(data: Dataset, search: Search, rounds: int) -> Candidate:
        data = maximise(trainer, search, data, trainer.inference, _START, rounds)
        return Candidate(search, search.coordinates.get(), tails.get(), data)

    def return_to(candidate: Candidate) -> None:
        candidate.search.coordinates.set(candidate.u)
        tails.set(candidate.tails)

    for initial in starts(kernel, distances, subset.observations):
        tails.set(at_first)
        coordinates.set(first)
        start(kernel, likelihoods, subset.observations, distances, initial)
        candidates.append(few_rounds(subset, trainer.new_search(), rounds=2))
    candidates.sort(key=lambda candidate: candidate.search.value, reverse=True)
    for candidate in candidates[: max(FINALISTS, len(candidates) // 3)]:
        return_to(candidate)
        further.append(few_rounds(candidate.data, candidate.search, rounds=2 * 2))
    return_to(max(further, key=lambda candidate: candidate.search.value))


def maximise(
    trainer: Trainer,
    search: Search,
    data: Data,
    inference: Callable[[Data], Inference],
    name: str,
    rounds: int = MOST_EVALUATIONS,
    evaluations: int = MOST_EVALUATIONS,
    **options,
) -> Data:
    """Run a search as one stage of the fit, in rounds of EM if the data have weights.

    Each round refreshes the weights or pseudo-observations, and continues the search. EM ends with
    a round that gains little.

    Args:
        trainer: the trainer of the hyperparameters.
        search: the search, which continues from its present coordinates.
        data: the data, without weights or with those of an earlier round.
        inference: a function that returns the inference from data with weights.
        name: the name of the stage.
        rounds: the largest number of rounds.
        evaluations: the approximate number of evaluations of all rounds together.
        options: other arguments of `Trainer.search`.

    Returns:
        The data, with the weights of the last round if they have weights.
    """
    if not has_weights(trainer, data):
        trainer.search(search, inference(data), name, evaluations=evaluations, **options)
        return data
    e_step, previous = e_step_of(trainer), -np.inf
    options = {**options, **e_step.limits}
    restore(trainer.kernel)
    with trainer.journal.stage(name):
        for _ in range(rounds):
            data = e_step.refreshed(data, inference)
            made, before = inference(data), search.evaluations
            few = min(SHORT, evaluations)
            trainer.search(search, made, name, evaluations=few, **options)
            evaluations -= search.evaluations - before
            if not made.is_exact and made.stale(trainer.kernel, e_step.noises):
                search.settled = False  # the features are stale after several rounds
            if not search.settled or search.value - previous < _ROUND or evaluations < 1:
                break
            previous = search.value
    return data


def settled(trainer: Trainer, representation: Representation) -> Representation:
    """Iterate the weights of all data, ν and the scale of the noise until they converge."""
    representation = e_step_of(trainer).converged(representation, learn=True)
    for sentence in Tails(trainer.likelihoods).notes:
        trainer.journal.note(sentence)
    return representation
