"""Student-t noise: the weights of readings, and EM (weights and hyperparameters in turn)."""

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
from gp_orff.data.noise.likelihoods import MultitaskStudentTLikelihood
from gp_orff.data.survey import warn_of_far_points
from gp_orff.inference.conditioning import Inference, Posterior
from gp_orff.inference.representation import FINE_FACTOR, Representation
from gp_orff.inference.robust import StudentTNoise, climb, expected_weights, total_elbo_correction
from gp_orff.models.fitting.search import Search
from gp_orff.models.fitting.starting_values import start, starts
from gp_orff.models.fitting.trainer import SCREENED_VALUES, SUBSET_VALUES, Trainer

_ROUND = 1e-5  # nats per number, a round of EM that gains less ends it
_FEW_ROUNDS, _MOST_ROUNDS = 6, 100  # of EM, to choose a start and to the end
_NEARLY, _SETTLED = 1e-3, 1e-9  # nats per number, that weights gain when they have settled


@singledispatch
def heavy_tailed_noise(likelihood: Likelihood) -> StudentTNoise | None:
    """How readings are weighed under this noise, by EM; None where they are not.

    Register likelihoods of your own.
    """
    return None


@heavy_tailed_noise.register
def _(likelihood: MultitaskStudentTLikelihood) -> StudentTNoise:
    return StudentTNoise(likelihood.deg_free)


@dataclass(frozen=True)
class EStep:
    """The weights of readings, at the hyperparameters as they are."""

    kernel: Kernel
    likelihoods: Mapping[str, Likelihood]
    mean: Float[Tensor, "p"] | None

    @property
    def heavy_tailed(self) -> dict[str, StudentTNoise]:
        """Of the groups whose noise has heavy ones."""
        found = {label: heavy_tailed_noise(own) for label, own in self.likelihoods.items()}
        return {label: own for label, own in found.items() if own is not None}

    @property
    def noises(self) -> Noises:
        return noises_of(self.kernel, self.likelihoods)

    @torch.no_grad()
    def weighted(
        self, data: Dataset, inference: Inference, known: Iterable[Tensor] | None = None
    ) -> Dataset:
        """The data, with weights from the field that the observations give; those known stay."""
        found = inference.posterior(self.kernel, self.noises, self.mean)
        return data.weighted(*self._weights(data, found, known))

    @torch.no_grad()
    def settled(self, representation: Representation, rounds: int = 300) -> Representation:
        """With weights of the data that follow from each other: from those they have, until the
        bound on the evidence settles."""
        if not self.heavy_tailed:
            return representation
        data, inference = representation.data, representation.now()
        plain = data.unweighted()
        keys, sizes = zip(*((part.key, len(part)) for part in plain.visit()), strict=True)

        def weighted(logs: Tensor) -> Dataset:
            weights = logs.exp().split(sizes)
            return plain.weighted(weights, total_elbo_correction(keys, weights, self.heavy_tailed))

        def step(logs: Tensor) -> tuple[float, Tensor]:
            own = inference.of(weighted(logs))
            found = own.posterior(self.kernel, self.noises, self.mean)
            height = found.evidence.log_density(self._mean(found), own.num_values)
            weights, _ = self._weights(plain, found)
            return (height + own.data.elbo_correction).item(), torch.cat(weights).log()

        begin = torch.cat(list(data.all_weights())).log()
        near, settled = _NEARLY * plain.num_values, _SETTLED * plain.num_values
        logs, done = climb(step, begin, near, settled, rounds)
        if not done:
            warnings.warn(
                f"the weights of Student-t noise have not settled after {rounds} rounds: a larger "
                "deg_free or noise would make them, or call fit, which learns the noise",
                stacklevel=2,
            )
        return replace(representation, data=weighted(logs))

    def _mean(self, found: Posterior) -> Float[Tensor, "p"]:
        return found.evidence.best_mean() if self.mean is None else self.mean

    def _weights(
        self, data: Dataset, found: Posterior, known: Iterable[Tensor] | None = None
    ) -> tuple[list[Tensor], float]:
        return expected_weights(
            data.visit(), self.heavy_tailed, found, self.noises, self._mean(found), known
        )


@dataclass(frozen=True)
class RobustEM:
    """Expectation maximisation on data, by searches of a trainer."""

    trainer: Trainer

    @property
    def e_step(self) -> EStep:
        return EStep(self.trainer.kernel, self.trainer.likelihoods, self.trainer.mean)

    def start(self, data: Dataset, warm_start: bool) -> Dataset:
        """EM on few readings, then weights for all of them."""
        few, represented = self.trainer.some(SUBSET_VALUES // 2), self.trainer.represented
        if not warm_start:
            self._start_among_outliers(self.trainer.some(SCREENED_VALUES))
        few = self._maximised(few, represented, "start, weights")
        return self.e_step.weighted(data.unweighted(), represented(few))

    def _start_among_outliers(self, few: Dataset) -> None:
        """The best of some rounds of EM from each of several lengthscales: without weights, the
        largest evidence may be that of a field that goes through every outlier."""
        own, found = self.trainer, []
        warn_of_far_points(own.distances)
        for where in starts(own.kernel, own.distances):
            start(own.kernel, own.likelihoods, few.observations, own.distances, where)
            search = self._rounds(few, own.represented, f"start {where}", _FEW_ROUNDS)[1]
            found.append((search, search.coordinates.get()))
        search, place = max(found, key=lambda pair: pair[0].value)
        search.coordinates.set(place)

    def run(self, representation: Representation) -> Representation:
        """EM on all readings, until their weights have settled."""
        data, levels = representation.data, [lambda: representation.rule]
        if representation.follows:
            levels = [representation.coarse, representation.fine]
        for level in levels:

            def represented(own: Dataset, level=level) -> Inference:
                return replace(representation, data=own).inference(level())

            data = self._maximised(data, represented, "weights")
        return self.e_step.settled(replace(representation, data=data))

    def _maximised(
        self, data: Dataset, represented: Callable[[Dataset], Inference], name: str
    ) -> Dataset:
        """Weights and hyperparameters in turn, until the bound on the evidence settles."""
        data, search, done = self._rounds(data, represented, name, _MOST_ROUNDS)
        self.trainer.note(f"{name}: {done} rounds, {search.value:.5f} nats per number")
        return data

    def _rounds(
        self,
        data: Dataset,
        represented: Callable[[Dataset], Inference],
        name: str,
        rounds: int,
    ) -> tuple[Dataset, Search, int]:
        """At most so many rounds of EM: the weighted data, the last search, and the rounds."""
        previous, done = -np.inf, 0
        while done < rounds:
            done += 1
            data = self.e_step.weighted(data.unweighted(), represented(data))
            search = self.trainer.begin()
            options = {"iterations": 5, "nats": 0.1, "trust_factor": FINE_FACTOR, "note": False}
            self.trainer.search(search, represented(data), name, **options)
            if search.value - previous < _ROUND:
                break
            previous = search.value
        return data, search, done
