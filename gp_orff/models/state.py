"""The state of a model: immutable values, which a call replaces in its last step."""

import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import Likelihood
from gpytorch.means import ConstantMean, Mean, MultitaskMean
from jaxtyping import Float
from torch import Tensor

from gp_orff.data.dataset import (
    Data,
    Dataset,
    StatisticsOnly,
    base_means,
    is_constant,
    varying_mean,
)
from gp_orff.data.noise import group_noise, noises_of
from gp_orff.data.observations import SymbolObservations
from gp_orff.data.patterns import DEFAULT
from gp_orff.data.pointwise import any_pointwise, require_gaussian
from gp_orff.data.statistics import FieldStatistics
from gp_orff.data.survey import DataWarning
from gp_orff.features.chunked import corners
from gp_orff.features.draws import GridWarning, Rule
from gp_orff.fitting.journal import History
from gp_orff.fitting.noise import (
    along_directions,
    independent,
    learn_new_tracks,
    note_of,
    with_known_noise,
    with_tracks,
)
from gp_orff.fitting.robust_em import EStep
from gp_orff.fitting.scoring import leave_much_open
from gp_orff.inference.features import Inference, log_marginal_likelihood
from gp_orff.inference.iterative import ConvergenceError
from gp_orff.inference.representation import Memo, Representation
from gp_orff.kernels.tree import num_outputs
from gp_orff.models.derived import note_of_places
from gp_orff.models.few_readings import Sample, leaves_spectra_open, sample_of_hyperparameters
from gp_orff.models.frozen_model import ModelSnapshot
from gp_orff.models.report import FitReport, trained_names
from gp_orff.threads import chosen_threads

# A call of a model changes its state. A `VectorFieldGP` refers to one immutable `ModelState`. A
# call builds a new state and assigns it in its last step, so that an error does not change the
# model. Modules, such as the kernel, are mutable and shared: `restored_on_failure` resets their
# parameters.
#
# 1. `current` compares the state with the present kernel and likelihoods. Another kernel, or a
#    lengthscale outside the range of the grid, needs a new representation. Otherwise frequencies
#    and sums over the data remain. If hyperparameters have changed, Student-t weights and
#    pseudo-observations are computed again until they converge.
# 2. `updated` adds data. If new points are in the domain of the grid, their sums are added to the
#    known sums, and the old data are not visited. Data that do not fit into memory are replaced by
#    their statistics.
# 3. `prepared` prepares inference, which is the only pass over large data. Errors are therefore
#    raised there, and not at the first prediction.
# 4. Posteriors, reports and statistics are computed on demand, and stored as long as the
#    hyperparameters do not change (`Memo`). A new state from `of` has none.


@dataclass(frozen=True)
class ModelState:
    """The data, their representation, the inference on the frequencies of a rule, and the history.
    Results for the present hyperparameters are stored."""

    representation: Representation
    rule: Rule | None
    inference: Inference
    mean: Float[Tensor, "p"] | None  # the constant if it is fixed; None for the best one
    history: History
    results: dict[object, Memo] = field(
        default_factory=partial(defaultdict, Memo), compare=False, repr=False
    )
    weighted_at: tuple[str, Tensor] | None = field(default=None, compare=False, repr=False)

    @classmethod
    def of(
        cls, representation: Representation, mean: Float[Tensor, "p"] | None, history: History
    ) -> "ModelState":
        """The state for the present hyperparameters, with new inference."""
        return cls(representation, *_inference(representation), mean, history).prepared

    @classmethod
    def from_statistics(
        cls,
        representation: Representation,
        rule: Rule | None,
        known: FieldStatistics | None,
        mean: Float[Tensor, "p"] | None,
        history: History,
    ) -> "ModelState":
        """The state with the rule of a file, and with the statistics of the file if it has any."""
        inference = representation.inference(rule)
        if not inference.is_exact and known is not None:
            phi = inference.draws[0].shared_columns()
            if phi is not None and not phi.same(known.phi):  # another machine rounds differently
                return cls.of(representation, mean, history)
            inference = replace(inference, known=None if phi is None else known)
        return cls(representation, rule, inference, mean, history).prepared

    @property
    def prepared(self) -> "ModelState":
        """This state with prepared inference and its notes. The preparation is the only pass over
        large data. It raises an error if inference fails."""
        representation = self.representation
        noises = noises_of(representation.kernel, representation.likelihoods)
        for key in representation.data.keys:
            group_noise(key, noises)  # raises if the noise does not fit the group
        self.inference.prepare()
        repeats = representation.data.repeats
        given = note_of(representation.likelihoods, representation.data)
        places = note_of_places(representation.kernel, representation.data)
        notes = [representation.reason, given, repeats.note, self.inference.note, places]
        history = self.history.with_notes(notes)
        return replace(self, history=history, weighted_at=self._hyperparameters)

    @property
    def converged(self) -> "ModelState":
        """This state with Student-t weights or pseudo-observations that agree with its posterior.

        If the state stores only statistics of the data, it is returned unchanged.
        """
        e_step = self.e_step
        if not e_step.refreshes or not self.data.revisitable:
            return self
        return ModelState.of(e_step.converged(self.representation), self.mean, self.history)

    @property
    def _hyperparameters(self) -> tuple[str, Tensor]:
        """All values on which weights and pseudo-observations depend, in addition to the data.

        They are a text with the labels and likelihoods of all groups, and a vector of the raw
        parameters and a fixed mean.
        """
        labels = sorted({key.label for key in self.data.keys})
        chosen = [self.likelihoods[label] for label in labels]
        values = raw_parameters([self.kernel, *chosen])
        if self.mean is not None:
            values = torch.cat([values, self.mean.to(values)])
        return str([*zip(labels, chosen, strict=True)]), values

    @property
    def data(self) -> Data:
        return self.representation.data

    @property
    def kernel(self) -> Kernel:
        return self.representation.kernel

    @property
    def likelihoods(self) -> Mapping[str, Likelihood]:
        """The likelihoods of all groups, and of observations without a group name."""
        return self.representation.likelihoods

    @property
    def e_step(self) -> EStep:
        return EStep.of(self.kernel, self.likelihoods, self.mean)

    def current(
        self,
        kernel: Kernel,
        likelihoods: Mapping[str, Likelihood],
        mean: Float[Tensor, "p"] | None,
    ) -> "ModelState":
        """The state for the present kernel and likelihoods of the model, and its fixed mean."""
        if self.mean is not None and mean is not None and (self.mean != mean.to(self.mean)).any():
            changed = replace(self, mean=mean.to(self.mean), results=defaultdict(Memo))
            return changed.current(kernel, likelihoods, mean)
        if kernel is not self.kernel:  # another kernel was assigned to the model
            requested = self.representation.requested
            representation = Representation.of(kernel, likelihoods, requested, self.data).mended
            return ModelState.of(representation, self.mean, History("conditioned")).converged
        state = replace(self, representation=replace(self.representation, likelihoods=likelihoods))
        if self.inference.stale(kernel, noises_of(kernel, likelihoods)):
            rule, inference = _inference(state.representation)
            state = replace(state, rule=rule, inference=inference)
        if not state.e_step.refreshes:
            return state
        (kinds, values), (before, at) = state._hyperparameters, self.weighted_at
        return state if kinds == before and torch.equal(values, at) else state.converged

    def following(
        self, before: Sequence[Mean], after: Mean, mean: Float[Tensor, "p"] | None
    ) -> "ModelState":
        """Return the state after the mean function of the model was replaced by `after`.

        The mean functions `before`, if any, were subtracted from the data. They are added again,
        and `after` is subtracted.

        Args:
            before: mean functions that are not constant.
            after: the present mean of the model.
            mean: the constant mean (p,), if it is fixed.

        Raises:
            RuntimeError: The data are not stored, or have tracks.
        """
        data, p = self.data, num_outputs(self.kernel)
        if not data.revisitable or data.tracks:
            raise RuntimeError(
                f"expected the {type(after).__name__} that was subtracted from the data, got other "
                "parameters or another mean: statistics and observations along tracks cannot be "
                "corrected for it; call condition(x, y) again"
            )

        def further(x: Float[Tensor, "n d"]) -> Float[Tensor, "n p"]:
            present = varying_mean(after, x, p)
            return present - sum(varying_mean(mean, x, p) for mean in before)

        parts = {"data": data.less(further), "counts": Memo(), "reached": Memo()}
        representation = replace(self.representation, **parts)
        return ModelState.of(representation, mean, self.history).converged

    def with_new_groups(self, data: Data) -> "ModelState":
        """The state with a likelihood for each new group."""
        likelihoods = with_groups(self.likelihoods, data, self.kernel, self.data)
        return replace(self, representation=replace(self.representation, likelihoods=likelihoods))

    def observing(self, symbol_data: SymbolObservations) -> "ModelState":
        """The state with additional observations of a symbol."""
        representation = replace(self.representation, data=self.data.observing(symbol_data))
        history = self.history.then("observed")
        return ModelState.of(representation, self.mean, history).converged

    def skipping(self) -> "ModelState":
        """The state after an update without a valid observation, which is counted as skipped."""
        survey = replace(self.data.survey, skipped=self.data.survey.skipped + 1)
        data = replace(self.data, survey=survey)
        return replace(
            self,
            representation=replace(self.representation, data=data),
            history=self.history.then("updated"),
            results=defaultdict(Memo),
        )

    def updated(self, new: Dataset) -> "ModelState":
        """The state with additional observations."""
        state = self.with_new_groups(new)
        new = state.weighted(new)
        if not self.data.revisitable:
            self.data.require(new.box)
            data = self.data + new
        else:
            data = self.data + new.counting_memory()
            if data.overflows and state.representation.on_lattice:
                data = replace(state.representation, data=data).statistics_only()
        state = self._extended(replace(state.representation, data=data), new)
        if any_pointwise(state.likelihoods):  # Student-t weights of the old data do not change
            state = state.converged
        # With few data, the posterior integrates over the hyperparameters. With more, it treats the
        # hyperparameters of the last fit as known, although they were learned from few data.
        if self._leaves_much_open and not state._leaves_much_open:
            warnings.warn(
                f"hyperparameters that were learned from {self.data.num_values:.0f} values or "
                "fewer are treated as known, because there are more values now: error bars may be "
                "too small; call fit() to learn them from all data, or "
                "posterior(marginalize=True)",
                DataWarning,
                stacklevel=3,
            )
        return state

    def _extended(self, representation: Representation, new: Dataset) -> "ModelState":
        """The state with a representation whose data include the `new` ones."""
        kernel, data, inference = representation.kernel, representation.data, self.inference
        history = self.history.then("updated")
        if inference.is_exact:
            parts = kernel, representation.likelihoods, representation.requested, data
            return ModelState.of(Representation.of(*parts).mended, self.mean, history)
        draw = inference.draws[0]
        phi = draw.shared_columns()
        if phi is None:
            inference = inference.of(data)
        elif draw.shared.outside(corners(new.box, next(kernel.parameters()).device)).any() or (
            data.revisitable and representation.conditioning_rule() != self.rule
        ):
            return ModelState.of(representation, self.mean, history)
        else:
            statistics = inference.statistics + new.statistics(phi)
            inference = replace(inference, data=data, known=statistics)
        return ModelState(representation, self.rule, inference, self.mean, history).prepared

    def weighted(self, data: Dataset, held: Data | None = None) -> Dataset:
        """The data with weights for heavy-tailed noise.

        Observations in `held` have their stored weights. Others have weights from the present
        posterior.
        """
        e_step = self.with_new_groups(data).e_step
        if not e_step.refreshes:
            return data
        known = None if held is None else held.stored_weights(data)
        return e_step.weighted(data, self.inference, known)

    @chosen_threads()
    def statistics_only(self) -> StatisticsOnly:
        """The statistics of the data, without the data."""
        return self.results["statistics"].get(self.representation.statistics_only, self._modules)

    def checked(self, statistics: FieldStatistics) -> FieldStatistics:
        """The statistics, if they have the frequencies of this model. Otherwise an error is
        raised."""
        if not self.statistics_only().field_statistics.phi.same(statistics.phi):
            raise ValueError(
                "expected statistics with the frequencies of this model, got other frequencies; "
                "make them with statistics_of(x, y) of this model or of a copy of it"
            )
        if not statistics.num_values > 0:
            raise ValueError(
                "expected statistics of at least one observation, got none; add observations"
            )
        return statistics

    def to(self, device: torch.device) -> "ModelState":
        """The state on another device, to which the modules have moved already."""
        representation = replace(
            self.representation, data=self.data.to(device), counts=Memo(), reached=Memo()
        )
        mean = None if self.mean is None else self.mean.to(device)
        moved = ModelState.of(representation, mean, self.history)
        return replace(moved, weighted_at=self.weighted_at)

    def log_marginal_likelihood(self) -> Float[Tensor, ""]:
        """log p(y), in nats."""
        return log_marginal_likelihood(self.inference, self.kernel, self.likelihoods, self.mean)

    def snapshot(self, prior_mean: Mean, marginalize: bool | None = None) -> ModelSnapshot:
        """A snapshot for predictions, which later changes of the model do not affect. `marginalize`
        is as for `VectorFieldGP.posterior`."""
        spectra = self.history.stages and leaves_spectra_open(self.inference, self.kernel)
        spectra = spectra and not any_pointwise(self.likelihoods)
        sampled = bool(self._leaves_much_open or spectra) if marginalize is None else marginalize
        if sampled:
            require_gaussian(self.likelihoods, "marginalize=True", "marginalize=False")
        # Both kinds of posterior are stored, so that a single call with the other kind does not
        # discard the usual one.
        memo = self.results["snapshot", sampled]
        trained = trained_names(self.kernel, self.likelihoods)
        snapshot = memo.get(lambda: self._snapshot(prior_mean, sampled), self._modules, trained)
        if marginalize:
            _ = snapshot.sample  # raises if there is no sample
        return snapshot

    def _snapshot(self, prior_mean: Mean, sampled: bool) -> ModelSnapshot:
        """A new snapshot, with a sample of the hyperparameters or without."""
        modules = deepcopy((self.kernel, dict(self.likelihoods)))  # with the flags of training
        draw = partial(sample_of_hyperparameters, self.inference, *modules, self.mean)
        model = self.representation, self.inference, prior_mean, self.mean
        snapshot = ModelSnapshot.of(*model, draw if sampled else Sample)
        _ = snapshot.constant  # raises here if the posterior fails
        return snapshot

    def with_posterior(self, prior_mean: Mean) -> "ModelState":
        """The state after its posterior was computed. If the iterations on a larger grid do not
        converge, a smaller grid is used."""
        try:
            self.snapshot(prior_mean)
            return self
        except ConvergenceError as error:
            representation = self.representation
            if (
                representation.dense
                or not representation.follows
                or representation.rule.max_features
            ):
                raise
            text = f"a smaller grid was used, whose error bars are wider: {error}"
            warnings.warn(text, GridWarning, stacklevel=2)
        history = self.history.with_notes([text])
        state = ModelState.of(replace(representation, dense=True), self.mean, history)
        state.snapshot(prior_mean)
        return state

    @torch.no_grad()
    def warn_of_small_grid(self) -> None:
        """Warn if the grid that the user gave truncates much of the variance, unless the fit has
        given this warning."""
        inference, representation = self.inference, self.representation
        if inference.is_exact or representation.auto or not representation.grid:
            return
        noises = noises_of(self.kernel, self.likelihoods)
        ratio = max(inference.truncation_ratios(self.kernel, noises).values(), default=0.0)
        if ratio > 1 and not any("truncated variance" in n for n in self.history.notes):
            warnings.warn(
                f"the truncated variance of the given grid is {ratio:.2g} times the noise variance:"
                " the evidence is that of the truncated prior, with the truncated variance as "
                "noise, and may be many nats too low; give a larger cutoff= or max_features=, a "
                "smaller tolerance=, or gp_orff.Auto(); or a larger fastest= of Grid.for_tides",
                GridWarning,
                stacklevel=4,
            )

    def with_new_tracks(self, prior_mean: Mean) -> "ModelState":
        """The state after its likelihoods have learned the variance of new tracks."""
        snapshot = self.snapshot(prior_mean)
        field = snapshot.posterior.field(fixed=snapshot.fixed_mean is not None)
        notes = learn_new_tracks(self.likelihoods, self.data, field, snapshot.noises)
        return replace(self, history=self.history.with_notes(notes))

    def report(self, prior_mean: Mean) -> FitReport:
        """The report. It is one object until hyperparameters change, so that it stores standard
        errors."""
        trained = trained_names(self.kernel, self.likelihoods)
        return self.results["reports"].get(
            lambda: FitReport.of(self.snapshot(prior_mean), self.history, trained),
            self._modules,
            (self.history, trained),
        )

    @property
    def _leaves_much_open(self) -> bool:
        """Whether the posterior integrates over hyperparameters, because there are few data."""
        few = self.history.weak_priors and leave_much_open(self.data)
        return few and not any_pointwise(self.likelihoods) and self.inference.is_exact

    @property
    def _modules(self) -> list[Kernel | Likelihood]:
        return [self.kernel, *self.likelihoods.values()]


def _inference(representation: Representation) -> tuple[Rule | None, Inference]:
    """The rule for the present hyperparameters, and the inference with it."""
    rule = representation.conditioning_rule()
    return rule, representation.inference(rule)


def raw_parameters(modules: Iterable[torch.nn.Module]) -> Float[Tensor, "k"]:
    """The raw parameters of modules, on the CPU."""
    values = [p.detach().flatten().double() for module in modules for p in module.parameters()]
    return torch.cat(values).cpu()


def with_groups(
    likelihoods: Mapping[str, Likelihood],
    data: Data,
    kernel: Kernel,
    held: Data | None = None,
) -> dict[str, Likelihood]:
    """Return a likelihood for each group of observations.

    A new group starts with the noise covariance of observations without a group name. A group with
    tracks has a `TrackLikelihood`, and a group with given noise has a `KnownNoiseLikelihood`.
    """
    groups = with_tracks(with_known_noise(likelihoods, data, held), data, held)
    reference = next(kernel.parameters())
    for key in data.keys:
        if key.label in groups:
            continue
        likelihood = independent(groups[DEFAULT])
        if key.pattern.along:
            likelihood = along_directions(likelihood, key.pattern.num_outputs)
        groups[key.label] = deepcopy(likelihood).to(reference)
    return groups


@contextmanager
def restored_on_failure(module: torch.nn.Module) -> Iterator[None]:
    """Restore the state of a module if the `with` block raises an error.

    The state consists of all parameters and buffers, the flags of training, and the ends of learned
    spectra.
    """
    held = [*module.parameters(), *module.buffers()]
    before = [(tensor.detach().clone(), tensor.requires_grad) for tensor in held]
    curves = [part for part in module.modules() if hasattr(part, "continued")]
    continued = [curve.continued for curve in curves]
    try:
        yield
    except BaseException:
        for tensor, (value, trained) in zip(held, before, strict=True):
            tensor.data.copy_(value)
            tensor.requires_grad_(trained)
        for curve, value in zip(curves, continued, strict=True):
            curve.continued = value
        raise


def default_mean(num_outputs: int) -> Mean:
    return MultitaskMean(ConstantMean(), num_outputs) if num_outputs > 1 else ConstantMean()


def trend_of(mean: Mean) -> tuple[Mean, ...]:
    """A copy of a mean that is not constant, which is subtracted from data; empty for a constant
    mean."""
    return () if is_constant(mean) else (deepcopy(mean),)


def is_trend(before: Sequence[Mean], mean: Mean) -> bool:
    """Whether the copy that `trend_of` made still equals the mean."""
    if not before or is_constant(mean):
        return not before and is_constant(mean)
    stored, present = before[0].state_dict(), mean.state_dict()
    same = str(before[0]) == str(mean) and stored.keys() == present.keys()
    return same and all(torch.equal(value, present[name]) for name, value in stored.items())


def is_trained(mean: Mean) -> bool:
    """Whether the mean is a trained constant for each output."""
    trained = [any(p.requires_grad for p in m.parameters()) for m in base_means(mean)]
    return is_constant(mean) and all(trained)


def check_mean(mean: Mean, num_outputs: int) -> None:
    """Raise an error unless constant means can be computed in closed form: there is one for each
    output, and all or none are trained. Trained means have no priors and constraints."""
    means = base_means(mean)
    if not all(isinstance(m, ConstantMean) for m in means):
        return
    if len(means) != num_outputs:
        raise ValueError(
            f"expected a constant mean for each of the kernel's {num_outputs} outputs, got "
            f"{len(means)}; use MultitaskMean(ConstantMean(), num_tasks={num_outputs})"
        )
    trained = {m.raw_constant.requires_grad for m in means}
    bound = any([*m.named_priors(), *m.named_constraints()] for m in means)
    if len(trained) > 1 or (bound and True in trained):
        raise ValueError(
            "expected constant means without priors and constraints, all trained or none, because "
            "their best values are computed in closed form; for a Gaussian prior on a constant, "
            "add the term MultitaskKernel(ConstantKernel(), num_tasks=...) to the kernel"
        )
