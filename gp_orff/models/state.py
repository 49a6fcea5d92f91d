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

from gp_orff.data.dataset import Data, HeldData, HeldSums
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
    observations: Inference

    @classmethod
    def of(cls, representation: Representation) -> "Represented":
        """At the hyperparameters as they are."""
        rule = representation.conditioning_rule()
        return cls(representation, rule, representation.observations(rule))

    @classmethod
    def resumed(
        cls, representation: Representation, rule: Rule | None, known: FieldStatistics | None
    ) -> "Represented":
        """As they were saved, with what is known of their frequencies."""
        observations = representation.observations(rule)
        if isinstance(observations, FeatureInference):
            phi = observations.draws[0].shared_columns()
            if phi is not None and not phi.same(known.phi):  # another machine's rounding
                return cls.of(representation)
            observations = replace(observations, known=None if phi is None else known)
        return cls(representation, rule, observations)

    def current(self, likelihoods: Mapping[str, Likelihood]) -> "Represented":
        """On other frequencies where a lengthscale has left the range of these."""
        own, observations = replace(self.representation, likelihoods=likelihoods), self.observations
        if isinstance(observations, FeatureInference) and observations.stale(own.kernel):
            return Represented.of(own)
        return replace(self, representation=own)

    def grown(self, representation: Representation, new: HeldData) -> "Represented":
        """After `new` has been added to the data."""
        own, before = representation, self.observations
        if not isinstance(before, FeatureInference):
            return Represented.of(
                Representation.of(own.kernel, own.likelihoods, own.asked, own.data)
            )
        phi = before.draws[0].shared_columns()
        if phi is None:
            return Represented(own, self.rule, before.of(own.data))
        held = isinstance(own.data, HeldData)
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
        represented.observations.prepare()
        said = [*notes, own.reason] if own.reason else notes
        return cls(represented, mean, tuple(dict.fromkeys(said)), story)

    @property
    def representation(self) -> Representation:
        return self.represented.representation

    @property
    def observations(self) -> Inference:
        return self.represented.observations

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
            own = Representation.of(kernel, likelihoods, own.asked, own.data)
            return ModelState.of(Represented.of(own), self.mean, self.notes, self.story)
        return replace(self, represented=self.represented.current(likelihoods))

    def meeting(self, keys: Iterable[GroupKey]) -> "ModelState":
        """With a likelihood for every group that is new."""
        likelihoods = with_groups(self.likelihoods, keys, self.kernel)
        own = replace(self.representation, likelihoods=likelihoods)
        return replace(self, represented=replace(self.represented, representation=own))

    def holding(self, data: Data) -> "ModelState":
        """Other data, represented anew."""
        own = replace(self.representation, data=data)
        return ModelState.of(Represented.of(own), self.mean, self.notes, self.story)

    def updated(self, new: HeldData) -> "ModelState":
        """With new readings too, beside what there is."""
        state = self.meeting(new.keys)
        new = state.weighed(new)
        if isinstance(self.data, HeldSums):
            self.data.require(new.box)
            data = self.data + new
        else:
            data = self.data + new.counted()
            if data.overflows:
                data = replace(state.representation, data=data).sums()
        grown = self.represented.grown(replace(state.representation, data=data), new)
        return ModelState.of(grown, self.mean, self.notes, self.story)

    def weighed(self, data: HeldData, held: Data | None = None) -> HeldData:
        """Data, under noise of heavy tails with the weights they have among those held; others with
        weights from the field as it is."""
        e_step = self.meeting(data.keys).e_step
        if not e_step.tails:
            return data
        known = None if held is None else held.stored_weights(data)
        return e_step.weighed(data, self.observations, known)

    @chosen_threads()
    def sums(self) -> HeldSums:
        """Statistics in the place of the data."""
        return self.statistics.get(self.representation.sums, self._modules)

    def taken(self, statistics: FieldStatistics) -> FieldStatistics:
        """Statistics, if this model can take them."""
        if not self.sums().sums.phi.same(statistics.phi):
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
        return log_marginal_likelihood(self.observations, self.kernel, self.likelihoods, self.mean)

    def snapshot(self, prior_mean: Mean) -> ModelSnapshot:
        """For predictions, whatever becomes of the model."""

        def make() -> ModelSnapshot:
            own = self.representation, self.observations
            found = ModelSnapshot.of(*own, prior_mean, self.mean)
            _ = found.constant  # what fails, fails here
            return found

        return self.snapshots.get(make, self._modules)

    @property
    def _modules(self) -> list[Kernel | Likelihood]:
        return [self.kernel, *self.likelihoods.values()]


def small_copied(data: HeldData) -> HeldData:
    """Small data, as a copy that no one else can change."""
    return data.kept() if data.is_small else data


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
