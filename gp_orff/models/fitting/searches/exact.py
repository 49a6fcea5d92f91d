"""Searches under the exact kernel, of all data or of subsets."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from gp_orff.data.dataset import Dataset
from gp_orff.kernels.learned_spectrum import has_learned_spectrum
from gp_orff.models.fitting.search import Search
from gp_orff.models.fitting.starting_values import scale_noise
from gp_orff.models.fitting.trainer import MOST_SEARCHED, SUBSET_VALUES, SUBSETS, Trainer

_BEYOND = 1.3  # times as many numbers as of a subset, for a search on that
_NATS_OF_CURVES = 0.5  # that a step has to gain: the prior of curves is wider
_RAISE, _RAISES = 1.3, 8  # factor of the noise variance that subsets tell, and how often at most


@dataclass(frozen=True)
class ExactKernel:
    """Searches under the exact kernel."""

    trainer: Trainer
    data: Dataset

    def run(self, search: Search) -> Search:
        """Search on all data, on subsets first if they are many: the cost is cubic in N."""
        trainer = self.trainer
        inference = trainer.exact_inference(self.data)
        search_on_subsets(trainer, search, inference.size)
        if inference.size > MOST_SEARCHED:
            self.raise_noise(search)
            return search
        inference = trainer.exact_inference(self.data)  # the sites at the present lengthscales
        nats = 0.01
        if inference.size > SUBSET_VALUES:
            nats = _NATS_OF_CURVES if has_learned_spectrum(trainer.kernel, trained=True) else 0.1
        return trainer.search(search, inference, "exact kernel", nats=nats)

    def raise_noise(self, search: Search) -> None:
        """Multiply the noise that subsets tell, as long as this makes all data likelier: readings
        of a line differ by less from each other than from those of lines that cross it, which few
        readings hardly show."""
        trainer, coordinates = self.trainer, search.coordinates
        inference = trainer.exact_inference(self.data)

        @torch.no_grad()
        def value() -> float:
            found = trainer.value(inference) + float(coordinates.log_prior())
            stage.count(found / inference.num_values)
            return found

        with trainer.journal.stage("exact kernel, noise") as stage:
            best, u = value(), coordinates.get()
            for _ in range(_RAISES):
                for likelihood in trainer.likelihoods.values():
                    scale_noise(likelihood, _RAISE)
                if not (raised := value()) > best:
                    break
                best, u = raised, coordinates.get()
            coordinates.set(u)
            stage.nats_per_number = best / inference.num_values


def search_on_subsets(
    trainer: Trainer, search: Search, size: float, until: Callable[[], bool] = lambda: False
) -> None:
    """Search under the exact kernel on growing subsets of data with `size` numbers, until what is
    asked after each of them holds."""
    held = has_learned_spectrum(trainer.kernel, trained=True) and trainer.has_many  # curves
    for numbers in (SUBSET_VALUES, *SUBSETS) if held else SUBSETS:
        if size > _BEYOND * numbers:
            inference = trainer.exact_inference(trainer.subset(numbers))
            label = f"exact kernel, {inference.data.survey.num_points} points"
            trainer.search(search, inference, label, nats=0.1)
            if until():
                return
