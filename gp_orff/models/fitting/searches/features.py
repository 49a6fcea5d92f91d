"""Searches on the frequencies of a rule."""

import torch

from gp_orff.data.dataset import Dataset
from gp_orff.features.assemble import expand
from gp_orff.features.expansion import Expansion
from gp_orff.features.frequencies.auto import Auto
from gp_orff.inference.conditioning import FeatureInference, has_covariance
from gp_orff.inference.representation import Representation
from gp_orff.models.fitting.search import Search
from gp_orff.models.fitting.searches.exact import search_on_subsets
from gp_orff.models.fitting.trainer import MOST_SEARCHED, Trainer

_OPERATIONS = 5e11  # of a search whose evaluations take seconds: 20 s or so on one core
_FEWEST, _MOST = 2, 60  # evaluations


def search_on_features(
    trainer: Trainer, search: Search, representation: Representation, name: str
) -> None:
    """Search on the frequencies of a rule; where an evaluation takes seconds, under the exact
    kernel on subsets first, and for few evaluations or none. Few features are searched on to the
    end, unless no one asked for them and their sums over many points take too long."""
    inference, data = representation.inference(representation.rule), representation.data
    with torch.no_grad():
        expansion = expand(trainer.kernel, inference.draws, data.num_inputs)
    features = expansion.cholesky_cost ** (1 / 3)  # fewer than there are, of separable kernels
    evaluations = min(int(_OPERATIONS / _operations(inference, expansion)), _MOST)
    given = not isinstance(representation.requested, Auto)
    if min(features, data.num_values) <= MOST_SEARCHED and (given or evaluations >= _FEWEST):
        trainer.search(search, inference, name)
        return
    on_subsets = isinstance(data, Dataset) and has_covariance(trainer.kernel, data)
    if on_subsets:
        search_on_subsets(trainer, search, data.num_values)
    if evaluations >= _FEWEST or not on_subsets:
        trainer.search(search, inference, name, evaluations=max(evaluations, _FEWEST))


def _operations(inference: FeatureInference, expansion: Expansion) -> float:
    """About the floating-point operations of an evaluation with its gradient."""
    moving = inference.draws[0].shared_columns() is None  # sums over the data are made anew
    points = inference.data.survey.num_points if moving else 0
    return 6.0 * points * expansion.num_columns**2 + expansion.cholesky_cost
