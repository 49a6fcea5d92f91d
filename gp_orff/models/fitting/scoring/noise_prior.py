"""A prior of the noise beside learned spectra, which may take its place."""

import math
from collections.abc import Mapping

import torch
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import GaussianLikelihood, Likelihood, MultitaskGaussianLikelihood
from jaxtyping import Float
from torch import Tensor

from gp_orff.data.noise.covariances import noise_of
from gp_orff.data.observations import join
from gp_orff.data.survey import Survey
from gp_orff.kernels.learned_spectrum import has_learned_spectrum
from gp_orff.kernels.tree import terms
from gp_orff.models.fitting.starting_values import moments

_SHARE, _WIDTH = 0.1, 3.0  # the median noise variance over that of the data; sd of its logarithm


def log_prior_of_noise(
    kernel: Kernel, likelihoods: Mapping[str, Likelihood], survey: Survey
) -> Float[Tensor, ""] | float:
    """The log density of log σ² ~ N(log 0.1 v, 3²), v being the variance of the data, up to a
    constant, for the noise of every group; 0 without a learned spectrum.

    Waves shorter than the distances of the readings cannot be told from noise but by extrapolation
    of the spectrum, so that the evidence of few readings may have a maximum without noise.

    Args:
        kernel: that may have a learned spectrum.
        likelihoods: those of all groups; those with given noise, or of tracks, have no prior.
        survey: of the data.
    """
    if not has_learned_spectrum(kernel):
        return 0.0
    num_outputs = terms(kernel)[0].num_outputs
    median = math.log(_SHARE * moments(join(survey.sample))[0])
    total = 0.0
    for likelihood in likelihoods.values():
        if isinstance(likelihood, GaussianLikelihood | MultitaskGaussianLikelihood):
            size = 1 if isinstance(likelihood, GaussianLikelihood) else num_outputs
            variance = noise_of(likelihood, size).diagonal(dim1=-1, dim2=-2).mean()
            total = total - 0.5 * ((torch.log(variance) - median) / _WIDTH) ** 2
    return total
