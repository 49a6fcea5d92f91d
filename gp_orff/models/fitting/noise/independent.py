"""The likelihood of readings whose noise is learned, each by itself, from that of others."""

from functools import singledispatch

from gpytorch.constraints import GreaterThan
from gpytorch.likelihoods import GaussianLikelihood, Likelihood

from gp_orff.data.noise.covariances import noise_of
from gp_orff.data.noise.heavy_tails import HeavyTails
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
        plain = _with_tails_of(likelihood)
    return plain.to(likelihood.raw_noise_scale)


def along_directions(likelihood: Likelihood, num_outputs: int) -> Likelihood:
    """The likelihood of numbers along directions: one variance, the mean of those of vectors, whose
    noise has a likelihood of the same kind, Gaussian or Student-t."""
    plain = GaussianLikelihood(noise_constraint=GreaterThan(0.0))
    if isinstance(likelihood, HeavyTails) and likelihood.has_deg_free:
        plain = _with_tails_of(likelihood)
    start_noise(plain, noise_of(likelihood, num_outputs).diagonal().mean().item())
    return plain


def _with_tails_of(likelihood: HeavyTails) -> Likelihood:
    """Student-t noise of one variance, with the degrees of freedom of a likelihood."""
    plain = MultitaskStudentTLikelihood(likelihood.num_tasks, noise_constraint=GreaterThan(0.0))
    plain.copy_deg_free(likelihood)
    return plain
