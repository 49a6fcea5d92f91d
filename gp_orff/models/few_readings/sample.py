"""A sample of the hyperparameters that few readings leave open."""

import warnings
from collections.abc import Mapping
from copy import deepcopy

import numpy as np
import torch
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import Likelihood
from jaxtyping import Float
from torch import Tensor

from gp_orff.data.noise.covariances import noises_of
from gp_orff.data.survey import DataWarning
from gp_orff.inference.conditioning import ExactInference, Inference, log_marginal_likelihood
from gp_orff.kernels.learned_spectrum import has_learned_spectrum
from gp_orff.models.few_readings.mixture import Member
from gp_orff.models.fitting.coordinates import Coordinates
from gp_orff.models.fitting.ranges import parameter_ranges
from gp_orff.models.fitting.scoring import MOST_SAMPLED, Information, log_prior_of_noise

_SIZE, _LEAST = 32, 1e-3  # draws, and the weight of those that are kept
_WIDEST = 3.0  # standard deviation of a coordinate without a prior, at most
_LARGEST = 1200  # covariance matrix of which the factors of all draws are kept: 0.4 GB
_FEW = 4.0  # effective draws


def leaves_spectra_open(inference: Inference, kernel: Kernel) -> bool:
    """Whether readings are so few that they leave a learned spectrum open."""
    few = isinstance(inference, ExactInference) and inference.num_values <= MOST_SAMPLED
    return few and has_learned_spectrum(kernel, trained=True)


@torch.no_grad()
def sample_of_hyperparameters(
    inference: Inference,
    kernel: Kernel,
    likelihoods: Mapping[str, Likelihood],
    mean: Float[Tensor, "p"] | None,
) -> list[Member]:
    """Posteriors under a sample of all trained hyperparameters, about those of a fit.

    They are drawn from Laplace's approximation N(û, H⁻¹) in the coordinates u of a search, with the
    Fisher information H, and have the weights w ∝ p(y|u) p(u) / N(u; û, H⁻¹), none more than the
    mean weight times √S (Ionides 2008, *Truncated importance sampling*). Without a prior of its own
    the coordinate of a positive parameter, its logarithm, has an even one. Empty if no parameter is
    trained. A `DataWarning` tells if few draws have most of the weight. Under Student-t noise all
    draws have the weights of the readings, and the degrees of freedom, of the fit.

    Args:
        inference, kernel, likelihoods, mean: of a fitted model, which are not changed; the mean is
            None if it is the best constant.

    Raises:
        ValueError: there is no exact covariance, or it is large.
    """
    _check(inference)
    kernel, likelihoods = deepcopy((kernel, dict(likelihoods)))
    ranges = parameter_ranges(kernel, inference.data.survey.distances)
    coordinates = Coordinates(kernel, *likelihoods.values(), ranges=ranges)
    if not coordinates.parts:
        return []
    start, information = coordinates.get(), Information(inference, kernel, likelihoods, coordinates)
    precision = information() + np.diag(np.where(information.of_curves, 0.0, _WIDEST**-2))
    root = np.linalg.cholesky(np.linalg.inv(precision))
    members, logs = [], []
    for draw in np.random.default_rng(0).standard_normal((_SIZE, len(start))):
        coordinates.set(np.clip(start + root @ draw, coordinates.low, coordinates.high))
        try:
            evidence = log_marginal_likelihood(inference, kernel, likelihoods, mean)
            own = deepcopy(kernel).requires_grad_(False)
            posterior = inference.posterior(own, noises_of(own, likelihoods), mean)
        except (torch.linalg.LinAlgError, ValueError, RuntimeError):
            continue
        constant = posterior.evidence.best_mean() if mean is None else mean
        members.append((own, posterior.under(mean), constant))
        noise = log_prior_of_noise(own, likelihoods, inference.data.survey)
        logs.append(float(evidence + coordinates.log_prior() + noise) + 0.5 * draw @ draw)
    if not members:
        return []
    weights = truncated_weights(np.array(logs))
    if not has_learned_spectrum(kernel, trained=True):  # few curves are better than one of them
        _warn_of_few(weights)
    kept = np.flatnonzero(weights >= _LEAST)
    total = weights[kept].sum()
    return [Member(float(weights[i] / total), *members[i]) for i in kept]


def _check(inference: Inference) -> None:
    exact = isinstance(inference, ExactInference)
    size = inference.size if exact else inference.num_values
    if not exact or size > _LARGEST:
        raise ValueError(
            f"expected at most {_LARGEST} numbers under the exact kernel, whose posteriors under "
            f"many hyperparameters are kept, got {size}{'' if exact else ' on features'}; fit "
            "fewer readings (gp_orff.thin) with frequencies=Auto(), or use posterior(): many "
            "readings leave little open"
        )


def _warn_of_few(weights: Float[np.ndarray, "S"]) -> None:
    effective = 1 / np.square(weights).sum()
    if effective < _FEW:
        warnings.warn(
            f"the {len(weights)} draws of hyperparameters tell as much as {effective:.1f}: their "
            "distribution is far from a Gaussian one, and error bars may be too small; give them "
            "priors, or take a simpler kernel",
            DataWarning,
            stacklevel=4,
        )


def truncated_weights(logs: Float[np.ndarray, "S"]) -> Float[np.ndarray, "S"]:
    """Importance weights from their logarithms, none more than the mean weight times √S, over their
    sum."""
    weights = np.exp(logs - logs.max())
    weights = np.minimum(weights, weights.mean() * np.sqrt(len(weights)))
    return weights / weights.sum()
