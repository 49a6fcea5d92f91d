"""What a model holds: values that are never changed, but replaced as the last step of a call."""

from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace

import torch
from gpytorch.constraints import GreaterThan
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import GaussianLikelihood, Likelihood
from gpytorch.means import Mean
from jaxtyping import Float
from torch import Tensor

from gp_orff.data.dataset import MOST_KEPT, Data, Dataset, StatisticsOnly
from gp_orff.data.field_statistics import FieldStatistics
from gp_orff.data.noise.covariances import noise_of, noises_of
from gp_orff.data.noise.groups import group_noise
from gp_orff.data.patterns import DEFAULT, GroupKey, LineOfSight
from gp_orff.features.frequencies.rule import Rule
from gp_orff.inference.conditioning import (
    FeatureInference,
    Inference,
    log_marginal_likelihood,
)
from gp_orff.inference.representation import Memo, Representation, corners
from gp_orff.models.fitting.robust_em import EStep
from gp_orff.models.fitting.starting_values import start_noise
from gp_orff.models.frozen_model import ModelSnapshot
from gp_orff.models.threads import chosen_threads


@dataclass(frozen=True)
class Represented:
    """Data, for evidence and predictions, and the rule behind their frequencies."""

    representation: Representation
    rule: Rule | None
    inference: Inference

    @classmethod
    def of(cls, representation: Representation) -> "Represented":
        """At the hyperparameters as they are."""
        rule = representation.conditioning_rule()
        return cls(representation, rule, representation.inference(rule))

    @classmethod
    def resumed(
        cls, representation: Representation, rule: Rule | None, known: FieldStatistics | None
    ) -> "Represented":
        """As they were saved, with what is known of their frequencies."""
        inference = representation.inference(rule)
        if isinstance(inference, FeatureInference):
            phi = inference.draws[0].shared_columns()
            if phi is not None and not phi.same(known.phi):  # another machine's rounding
                return cls.of(representation)
            inference = replace(inference, known=None if phi is None else known)
        return cls(representation, rule, inference)

    def current(self, likelihoods: Mapping[str, Likelihood]) -> "Represented":
        """On other frequencies where a lengthscale has left the range of these."""
        own, inference = replace(self.representation, likelihoods=likelihoods), self.inference
        if isinstance(inference, FeatureInference) and inference.stale(own.kernel):
            return Represented.of(own)
        return replace(self, representation=own)

    def extended(self, representation: Representation, new: Dataset) -> "Represented":
        """After `new` has been added to the data."""
        own, before = representation, self.inference
        if not isinstance(before, FeatureInference):
            return Represented.of(
                Representation.of(own.kernel, own.likelihoods, own.requested, own.data)
            )
        phi = before.draws[0].shared_columns()
        if phi is None:
            return Represented(own, self.rule, before.of(own.data))
        held = isinstance(own.data, Dataset)
        if before.draws[0].lattice.outside(corners(new.box, own.kernel)).any() or (
            held and own.conditioning_rule() != self.rule
        ):
            return Represented.of(own)
        known = before.statistics + new.statistics(phi)
        return Represented(own, self.rule, FeatureInference(own.data, before.draws, known))


@dataclass(frozen=True)
class ModelState:
    """Data, and what was made of them; what follows, at the hyperparameters as they are."""

    represented: Represented
    mean: Float[Tensor, "p"] | None  # a fixed one; None for the best one
    notes: tuple[str, ...]  # of a fit
    story: str
    snapshots: Memo = field(default_factory=Memo, compare=False, repr=False)
    statistics: Memo = field(default_factory=Memo, compare=False, repr=False)

    @classmethod
    def of(
        cls,
        represented: Represented,
        mean: Float[Tensor, "p"] | None,
        notes: Iterable[str] = (),
        story: str = "",
    ) -> "ModelState":
        """The data are visited where that is done once: what fails, fails here."""
        own = represented.representation
        noises = noises_of(own.kernel, own.likelihoods)
        for key in own.data.keys:
            group_noise(key, noises)  # raises
        represented.inference.prepare()
        said = [*notes, own.reason] if own.reason else notes
        return cls(represented, mean, tuple(dict.fromkeys(said)), story)

    @property
    def representation(self) -> Representation:
        return self.represented.representation

    @property
    def inference(self) -> Inference:
        return self.represented.inference

    @property
    def data(self) -> Data:
        return self.representation.data

    @property
    def kernel(self) -> Kernel:
        return self.representation.kernel

    @property
    def likelihoods(self) -> Mapping[str, Likelihood]:
        """Of every group, the one of readings that name none included."""
        return self.representation.likelihoods

    @property
    def e_step(self) -> EStep:
        return EStep(self.kernel, self.likelihoods, self.mean)

    def current(self, kernel: Kernel, likelihoods: Mapping[str, Likelihood]) -> "ModelState":
        if kernel is not self.kernel:  # another one was assigned to the model
            own = self.representation
            own = Representation.of(kernel, likelihoods, own.requested, own.data)
            return ModelState.of(Represented.of(own), self.mean, self.notes, self.story)
        return replace(self, represented=self.represented.current(likelihoods))

    def with_new_groups(self, keys: Iterable[GroupKey]) -> "ModelState":
        """With a likelihood for every group that is new."""
        likelihoods = with_groups(self.likelihoods, keys, self.kernel)
        own = replace(self.representation, likelihoods=likelihoods)
        return replace(self, represented=replace(self.represented, representation=own))

    def holding(self, data: Data) -> "ModelState":
        """Other data, represented anew."""
        own = replace(self.representation, data=data)
        return ModelState.of(Represented.of(own), self.mean, self.notes, self.story)

    def updated(self, new: Dataset) -> "ModelState":
        """With new readings too, beside what there is."""
        state = self.with_new_groups(new.keys)
        new = state.weighted(new)
        if isinstance(self.data, StatisticsOnly):
            self.data.require(new.box)
            data = self.data + new
        else:
            data = self.data + new.counting_memory()
            if data.numbers_in_memory > MOST_KEPT:
                data = replace(state.representation, data=data).statistics_only()
        extended = self.represented.extended(replace(state.representation, data=data), new)
        return ModelState.of(extended, self.mean, self.notes, self.story)

    def weighted(self, data: Dataset, held: Data | None = None) -> Dataset:
        """Data, under noise of heavy tails with the weights they have among those held; others with
        weights from the field as it is."""
        e_step = self.with_new_groups(data.keys).e_step
        if not e_step.heavy_tailed:
            return data
        known = None if held is None else held.stored_weights(data)
        return e_step.weighted(data, self.inference, known)

    @chosen_threads()
    def statistics_only(self) -> StatisticsOnly:
        """Statistics in the place of the data."""
        return self.statistics.get(self.representation.statistics_only, self._modules)

    def checked(self, statistics: FieldStatistics) -> FieldStatistics:
        """Statistics, if this model can take them."""
        if not self.statistics_only().field_statistics.phi.same(statistics.phi):
            raise ValueError(
                "expected statistics of this model's frequencies, got those of others; make them "
                "with statistics_of(x, y) of this model, or of a copy of it"
            )
        if not statistics.num_values > 0:
            raise ValueError("expected statistics of at least one reading, got those of none")
        return statistics

    def to(self, device: torch.device) -> "ModelState":
        """With the data on another device, where the modules are already."""
        own = replace(self.representation, data=self.data.to(device), counts=Memo())
        mean = None if self.mean is None else self.mean.to(device)
        return ModelState.of(Represented.of(own), mean, self.notes, self.story)

    def log_marginal_likelihood(self) -> Float[Tensor, ""]:
        return log_marginal_likelihood(self.inference, self.kernel, self.likelihoods, self.mean)

    def snapshot(self, prior_mean: Mean) -> ModelSnapshot:
        """For predictions, whatever becomes of the model."""

        def make() -> ModelSnapshot:
            own = self.representation, self.inference
            found = ModelSnapshot.of(*own, prior_mean, self.mean)
            _ = found.constant  # what fails, fails here
            return found

        return self.snapshots.get(make, self._modules)

    @property
    def _modules(self) -> list[Kernel | Likelihood]:
        return [self.kernel, *self.likelihoods.values()]


def copied_if_small(data: Dataset) -> Dataset:
    """Small data, as a copy that no one else can change."""
    return data.copied() if data.size <= MOST_KEPT else data


def with_groups(
    likelihoods: Mapping[str, Likelihood], keys: Iterable[GroupKey], kernel: Kernel
) -> dict[str, Likelihood]:
    """A likelihood for every group: of those that are new, Σ is that of readings that name none,
    beside which variances are understood."""
    found, like = dict(likelihoods), next(kernel.parameters())
    for key in keys:
        if key.label in found:
            continue
        likelihood = found[DEFAULT]
        if isinstance(key.pattern, LineOfSight):
            variance = noise_of(likelihood, key.pattern.num_outputs).diagonal().mean()
            likelihood = GaussianLikelihood(noise_constraint=GreaterThan(0.0))
            start_noise(likelihood, variance.item())
        found[key.label] = deepcopy(likelihood).to(like)
    return found
