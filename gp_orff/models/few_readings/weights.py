"""Weights of readings with Student-t noise, drawn from their posterior."""

from collections.abc import Mapping

import numpy as np
import torch
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import Likelihood
from jaxtyping import Float
from torch import Tensor

from gp_orff.data.noise.covariances import noises_of
from gp_orff.data.noise.groups import GroupNoise, group_noise
from gp_orff.inference.conditioning import ExactInference
from gp_orff.kernels.cholesky import cholesky
from gp_orff.models.fitting.robust_em import EStep

_SWEEPS = 10  # of Gibbs sampling, from the expected weights


@torch.no_grad()
def with_drawn_weights(
    inference: ExactInference,
    kernel: Kernel,
    likelihoods: Mapping[str, Likelihood],
    mean: Float[Tensor, "p"] | None,
    generator: np.random.Generator,
) -> ExactInference:
    """The inference under weights w drawn from p(w | y), given the hyperparameters.

    Student-t noise is Gaussian noise with the covariance N_n/w_n, w_n ~ Gamma(ν/2, ν/2). Gibbs
    sampling starts from the expected weights and draws in turn all errors ε from their Gaussian
    posterior given w, by Matheron's rule, and

        w_n | ε ~ Gamma((ν + v)/2, (ν + ε_nᵀ N_n⁻¹ ε_n)/2) .

    The weights stay as they are under Gaussian noise, and where readings were merged.
    """
    models = EStep(kernel, likelihoods, mean).heavy_tailed
    data = inference.data
    if not models or data.tracks or data.symbol_data or inference.size != data.num_values:
        return inference
    noises = noises_of(kernel, likelihoods)
    parts = list(data.unweighted().visit())
    blocks = [part.noise(GroupNoise(group_noise(part.key, noises))) for part in parts]  # N_n
    prior, constants = cholesky(inference.prior_covariance(kernel)), inference.constants(noises)
    y = torch.cat([part.y.flatten() for part in parts])
    weights = list(data.all_weights())
    for _ in range(_SWEEPS):
        noise = torch.block_diag(
            *(b for own, w in zip(blocks, weights, strict=True) for b in own / w[:, None, None])
        )
        errors = drawn_errors(y, prior, noise, constants, mean, generator)
        for i, (part, own) in enumerate(zip(parts, blocks, strict=True)):
            error, errors = errors[: part.y.numel()].view_as(part.y), errors[part.y.numel() :]
            model = models.get(part.key.label)
            if model is not None:
                solved = torch.linalg.solve(own, error)
                rate = 0.5 * (model.deg_free + (error * solved).sum(-1))
                shape = 0.5 * (model.deg_free + error.shape[-1])
                gamma = generator.standard_gamma(shape, len(error))
                weights[i] = torch.from_numpy(gamma).to(rate) / rate
    return inference.of(data.unweighted().weighted(weights, 0.0))


def drawn_errors(
    y: Float[Tensor, "M"],
    prior: Float[Tensor, "M M"],
    noise: Float[Tensor, "M M"],
    constants: Float[Tensor, "M p"],
    mean: Float[Tensor, "p"] | None,
    generator: np.random.Generator,
) -> Float[Tensor, "M"]:
    """A draw of y − Hc − f given y, for the root `prior` of the covariance of f, and a constant
    mean c that is known or has a flat prior."""
    normal = torch.from_numpy(generator.standard_normal((2, len(y)))).to(y)
    own = cholesky(noise) @ normal[1]
    factor = cholesky(prior @ prior.mT + noise)
    rest = y - prior @ normal[0] - own
    design = torch.cholesky_solve(constants, factor)
    if mean is None:
        mean = torch.linalg.solve(constants.mT @ design, design.mT @ rest)
    rest = torch.cholesky_solve((rest - constants @ mean).unsqueeze(-1), factor)
    return own + (noise @ rest).squeeze(-1)
