"""The likelihood of readings whose noise is learned, each by itself, in the place of another."""

from functools import singledispatch

from gpytorch.likelihoods import Likelihood

from gp_orff.data.noise.covariances import noise_of
from gp_orff.data.noise.known_noise_likelihood import KnownNoiseLikelihood
from gp_orff.data.noise.likelihoods import MultitaskStudentTLikelihood, default_likelihood
from gp_orff.data.noise.track_likelihood import TrackLikelihood
from gp_orff.models.fitting.starting_values import start_noise


@singledispatch
def independent(likelihood: Likelihood) -> Likelihood:
    """The likelihood, or in the place of one along tracks, or of known noise, a Gaussian one."""
    return likelihood


@independent.register
def _(likelihood: TrackLikelihood) -> Likelihood:
    variance = noise_of(likelihood, likelihood.num_tasks)[0, 0].item()
    plain = default_likelihood(likelihood.num_tasks).to(likelihood.raw_noise)
    start_noise(plain, variance)
    return plain


@independent.register
def _(likelihood: KnownNoiseLikelihood) -> Likelihood:
    plain = default_likelihood(likelihood.num_tasks)
    if likelihood.has_deg_free:
        plain = MultitaskStudentTLikelihood(likelihood.num_tasks)
        plain.copy_deg_free(likelihood)
    return plain.to(likelihood.raw_noise_scale)
