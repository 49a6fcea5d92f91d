"""The strategy of a fit: starting values, then searches on finer and finer representations."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from gpytorch.kernels import Kernel
from gpytorch.likelihoods import Likelihood
from jaxtyping import Float
from torch import Tensor

from gp_orff.data.dataset import Data
from gp_orff.data.tracks import blocks_in_words
from gp_orff.features.draws import Rule
from gp_orff.features.grid import Auto
from gp_orff.fitting.curves import Curves
from gp_orff.fitting.journal import History, Journal, Progress
from gp_orff.fitting.names import parameter_names
from gp_orff.fitting.plans import Plan, climb, plans_of
from gp_orff.fitting.robust_em import e_step_of, has_weights, settled, start_with_weights
from gp_orff.fitting.scoring import WeakPriors, leave_much_open
from gp_orff.fitting.search import Search
from gp_orff.fitting.searches import best_start
from gp_orff.fitting.starting_values import scale_noise
from gp_orff.fitting.trainer import Trainer
from gp_orff.inference.exact import has_covariance
from gp_orff.inference.representation import Representation, warn_of_left_out, without_far_points


@dataclass(frozen=True)
class Fitted:
    """The result of a fit, in addition to the hyperparameters that it has set."""

    representation: Representation
    mean: Float[Tensor, "p"] | None
    history: History


def fit(
    kernel: Kernel,
    likelihoods: Mapping[str, Likelihood],
    mean: Float[Tensor, "p"] | None,
    requested: Rule,
    data: Data,
    warm_start: bool,
    progress: Progress,
) -> Fitted:
    """Set the hyperparameters to values that maximise the evidence, plus the log priors."""
    trainer, data = trainer_of(kernel, likelihoods, mean, requested, data, progress)
    journal = trainer.journal
    search, data = _started(trainer, data, warm_start)
    representation = Representation.of(kernel, likelihoods, requested, data)
    journal.note(representation.reason)
    representation = climbed(trainer, search, representation)
    if representation.follows:
        whole = representation
        representation = whole.mended
        if not whole.on_lattice and representation.data.num_values < data.num_values:
            parts = trainer, search, representation, whole
            trainer, search, representation = learned_from_kept(*parts)
        journal.note("" if representation.follows else representation.reason)
        trainer.warn_of_truncation(representation)
        warn_of_left_out(data, representation.data)
    for text in search.coordinates.reached(parameter_names(kernel, likelihoods)):
        journal.note(text)
    search.warn()
    means = trainer.num_outputs if mean is None else 0
    trainer.warn_of_few_numbers(data, len(search.coordinates.get()) + means)
    if has_weights(trainer, representation.data):
        representation = settled(trainer, representation)
    weak = trainer.priors is not None
    history = History("fitted", tuple(journal.stages), weak_priors=weak)
    return Fitted(representation, trainer.mean, history.with_notes(journal.notes))


def _started(trainer: Trainer, data: Data, warm_start: bool) -> tuple[Search, Data]:
    """A search from good starting values, or from where the hyperparameters are; the data, with
    weights of Student-t noise."""
    if has_weights(trainer, data):
        data = start_with_weights(trainer, data, warm_start)
    elif not warm_start:
        best_start(trainer)
    return trainer.new_search(), data


def _with_weights(trainer: Trainer, data: Data, last: Plan | None) -> Data:
    """The data, under Student-t noise with the weights of the last search: those that it has, if
    it was of all observations, or those that the posterior of a part of the data lets expect."""
    if last is None or not has_weights(trainer, data):
        return data
    if last.data.sources is data.sources:
        return last.data
    inference = last.inference()
    return data if inference is None else e_step_of(trainer).foreseen(data, inference)


def trainer_of(
    kernel: Kernel,
    likelihoods: Mapping[str, Likelihood],
    mean: Float[Tensor, "p"] | None,
    requested: Rule,
    data: Data,
    progress: Progress,
) -> tuple[Trainer, Data]:
    """What a fit learns with, and the data that it learns from."""
    Curves(kernel).check_extents(data.survey.distances)
    data, notes = without_far_points(data, requested)
    journal = Journal(progress, [*notes, blocks_in_words(data.tracks)])
    priors = _weak_priors(kernel, likelihoods, requested, data)
    parts = {"tracks": data.tracks, "priors": priors}
    return Trainer(kernel, likelihoods, mean, data.survey, journal, **parts), data


def climbed(trainer: Trainer, search: Search, representation: Representation) -> Representation:
    """Search on the plans of the data; the representation, with statistics that were computed."""
    plans = plans_of(trainer, representation)
    last = climb(search, plans, representation.data.num_values)
    representation = replace(representation, data=_with_weights(trainer, representation.data, last))
    if not representation.follows:
        return representation
    representation = next((plan.representation for plan in plans if plan.keeps), representation)
    ratios = {} if last is None else last.truncated(representation)
    for label, likelihood in trainer.likelihoods.items():
        ratio = min((r for key, r in ratios.items() if key.label == label), default=0.0)
        if 0 < ratio < math.inf:
            scale_noise(likelihood, max(1 - ratio, 0.5))
    if representation.kept is None and (now := representation.again).rule is None:
        return now
    return representation


def learned_from_kept(
    trainer: Trainer, search: Search, kept: Representation, whole: Representation
) -> tuple[Trainer, Search, Representation]:
    """Learn again, from the observations that are kept of many: neighbours along a line determine
    the noise along it, which is less than the difference between observations of several lines.
    Under that noise the means of all observations may do; the representation that does, with the
    trainer of the kept and its search."""
    trainer = replace(trainer, survey=kept.data.survey)
    search, data = _started(trainer, kept.data, warm_start=False)
    kept = replace(kept, data=data)
    last = climb(search, plans_of(trainer, kept), kept.data.num_values)
    if has_weights(trainer, data):
        return trainer, search, replace(kept, data=_with_weights(trainer, data, last))
    return trainer, search, again if (again := whole.mended).rule is None else kept


def _weak_priors(
    kernel: Kernel, likelihoods: Mapping[str, Likelihood], requested: Rule, data: Data
) -> WeakPriors | None:
    """The weak priors of few observations under the exact kernel, whose posterior integrates the
    hyperparameters; None for others."""
    few = data.revisitable and leave_much_open(data)
    exact = isinstance(requested, Auto) and data.num_values <= requested.exact_values
    if not (few and exact and has_covariance(kernel, data)):
        return None
    return WeakPriors.of(kernel, likelihoods, data.survey)
