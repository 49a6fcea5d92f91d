"""What was done to the data and what came of it: numbers, and words."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from gpytorch import Module
from gpytorch.means import Mean
from jaxtyping import Float

from gp_orff.models.state import ModelState

_NAMES = {"raw_noise": "noise variance", "noise_covar.raw_noise": "noise variance"}


@dataclass(frozen=True)
class FitReport:
    """Of a model that holds data; `str` and `print` give the words.

    Attributes:
        story: what was done last, and how long it took.
        data: what is held.
        notes: the stages of the fit, in order, and what there is to know of it.
        kernel: what represents it.
        log_marginal_likelihood: total nats.
        hyperparameters: by name, in the user's units; after the group, where one has a name.
    """

    story: str
    data: str
    notes: tuple[str, ...]
    kernel: str
    log_marginal_likelihood: float
    hyperparameters: Sequence[tuple[str, Float[np.ndarray, "k"]]]

    @classmethod
    def of(cls, state: ModelState, prior_mean: Mean) -> "FitReport":
        return cls(
            state.story,
            state.data.describe(),
            state.notes,
            state.inference.describe(state.kernel),
            state.snapshot(prior_mean).log_marginal_likelihood,
            tuple(_hyperparameters(state, prior_mean)),
        )

    def __str__(self) -> str:
        lines = [f"{self.story}: {self.data}", *self.notes, self.kernel]
        lines.append(f"log marginal likelihood {self.log_marginal_likelihood:.2f} nats")
        for name, values in self.hyperparameters:
            numbers = np.array2string(values, precision=5, separator=", ", threshold=12)
            lines.append(f"{name} = {numbers}")
        return "\n".join(lines)


def _hyperparameters(state: ModelState, prior_mean: Mean) -> Iterator[tuple[str, np.ndarray]]:
    present = {key.label for key in state.data.keys}
    noises = [(label, own) for label, own in state.likelihoods.items() if label in present]
    modules: list[tuple[str, Module]] = [("", state.kernel), *noises, ("", prior_mean)]
    for label, module in modules:
        for name, parameter, constraint in module.named_parameters_and_constraints():
            value = parameter if constraint is None else constraint.transform(parameter)
            words = _NAMES.get(name, name.replace("raw_", ""))
            values = value.detach().cpu().numpy().reshape(-1).copy()
            yield f"{label}: {words}" if label else words, values
