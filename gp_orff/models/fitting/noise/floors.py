"""The least noise variance of a search.

Data without noise are the likelier the less noise there is, until the evidence is rounding.
Variances of the field, which are differences of numbers as large as the prior's, are rounding too
then, and clipped at zero. Noise whose standard deviation is a ten-thousandth of that of the data
is far above both, and below what readings resolve.
"""

from collections.abc import Mapping

from gpytorch.likelihoods import Likelihood
from torch import nn

from gp_orff.data.observations import join
from gp_orff.data.survey import Survey
from gp_orff.models.fitting.starting_values import mean_weight, moments

_LEAST = 1e-8  # of the variance of the data
_VARIANCES = ("raw_noise", "raw_task_noises")


def noise_floors(
    likelihoods: Mapping[str, Likelihood], survey: Survey
) -> dict[nn.Parameter, float]:
    """The least value of every noise variance that is learned, by its parameter.

    Args:
        likelihoods: of all groups, by label.
        survey: of the data.
    """
    observations = join(survey.sample)
    variance, _ = moments(observations)
    floors = {}
    for label, likelihood in likelihoods.items():
        groups = [group for group in observations if group.key.label == label]
        for name, parameter in likelihood.named_parameters():
            if name.split(".")[-1] in _VARIANCES:
                floors[parameter] = _LEAST * variance * mean_weight(groups)
    return floors
