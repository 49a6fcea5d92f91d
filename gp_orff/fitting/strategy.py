"""The strategy of a fit: starting values, then searches on finer and finer representations."""

from collections.abc import Mapping
from dataclasses import dataclass

from gpytorch.kernels import Kernel
from gpytorch.likelihoods import Likelihood
from jaxtyping import Float
from torch import Tensor

from gp_orff.data.dataset import Data, Dataset
from gp_orff.data.track_reading import blocks_in_words
from gp_orff.features.draws import Rule
from gp_orff.features.grid import Auto, Grid
from gp_orff.fitting.journal import History, Journal, Progress
from gp_orff.fitting.names import parameter_names
from gp_orff.fitting.robust_em import RobustEM
from gp_orff.fitting.scoring import WeakPriors, leave_much_open
from gp_orff.fitting.search import check_extents
from gp_orff.fitting.searches import (
    ExactKernel,
    Grids,
    best_start,
    learned_from_kept,
    search_on_features,
)
from gp_orff.fitting.trainer import Trainer
from gp_orff.inference.exact import has_covariance
from gp_orff.inference.representation import Representation, warn_of_left_out, without_far_points


@dataclass(frozen=True)
class Fitted:
    """The result of a fit, beside the hyperparameters that it has set."""

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
    check_extents(kernel, data.survey.distances)
    data, notes = without_far_points(data, requested)
    journal = Journal(progress, [*notes, blocks_in_words(data.tracks)])
    priors = _weak_priors(kernel, likelihoods, requested, data)
    parts = {"tracks": data.tracks, "priors": priors}
    trainer = Trainer(kernel, likelihoods, mean, data.survey, journal, **parts)
    robust, start_search = RobustEM(trainer), Trainer.new_search if warm_start else best_start
    has_weights = isinstance(data, Dataset) and bool(robust.e_step.heavy_tailed)
    if has_weights:
        data, start_search = robust.start(data, warm_start), Trainer.new_search
    search = trainer.restarted(start_search(trainer))
    representation = Representation.of(kernel, likelihoods, requested, data)
    journal.note(representation.reason)
    rule = representation.rule
    if rule is None:
        ExactKernel(trainer, data).run(search)
    elif representation.follows:
        whole = Grids(trainer, representation).run(search)
        representation = whole.mended
        if not whole.on_lattice and representation.data.num_values < data.num_values:
            trainer, representation = learned_from_kept(trainer, representation, whole)
        journal.note("" if representation.follows else representation.reason)
        trainer.warn_of_truncation(representation)
        warn_of_left_out(data, representation.data)
    else:
        name = "given grid" if isinstance(rule, Grid) else repr(rule)
        search_on_features(trainer, search, representation, name)
    for text in search.coordinates.reached(parameter_names(kernel, likelihoods)):
        journal.note(text)
    search.warn()
    means = trainer.num_outputs if mean is None else 0
    trainer.warn_of_few_numbers(data, len(search.coordinates.get()) + means)
    if has_weights:
        representation = RobustEM(trainer).run(representation)
    weak = trainer.priors is not None
    history = History("fitted", tuple(journal.stages), weak_priors=weak)
    return Fitted(representation, trainer.mean, history.with_notes(journal.notes))


def _weak_priors(
    kernel: Kernel, likelihoods: Mapping[str, Likelihood], requested: Rule, data: Data
) -> WeakPriors | None:
    """The weak priors of few readings under the exact kernel, whose posterior integrates the
    hyperparameters; None for others."""
    few = isinstance(data, Dataset) and leave_much_open(data)
    exact = isinstance(requested, Auto) and data.num_values <= requested.exact_values
    if not (few and exact and has_covariance(kernel, data)):
        return None
    return WeakPriors.of(kernel, likelihoods, data.survey)
