"""The protocol of normal equations, and the evidence from their parts."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from gp_orff.data.noise.covariances import Noise
from gp_orff.data.statistics import Statistics
from gp_orff.inference.quadratic import Evidence
from gp_orff.inference.weight_posterior import WeightPosterior


class Group(NamedTuple):
    """The statistics of observations that share a pattern and a noise."""

    statistics: Statistics
    noise: Noise  # of one observation


class NormalEquations(ABC):
    """A and B of the feature weights: E[θ] = A⁻¹B [1; −c] under a constant mean c."""

    @abstractmethod
    def evidence(self) -> Evidence:
        """The evidence: one factorisation, and one inverse for its gradient."""

    @abstractmethod
    def posterior(self, mean: Float[Tensor, "*b p"] | None) -> tuple[WeightPosterior, Evidence]:
        """The posterior of the weights and the evidence, from one factorisation.

        Without a `mean`, both are under the constant mean of largest evidence.
        """


def evidence_of(
    noise_terms: Sequence[tuple[Float[Tensor, "*b 1+p 1+p"], Float[Tensor, "*b"]]],
    explained: Float[Tensor, "*b 1+p 1+p"],
    logdet: Float[Tensor, "*b"],
) -> Evidence:
    """The evidence from BᵀA⁻¹B, log|A| and the terms VᵀN⁻¹V and log|N| of all noise N."""
    squares, logdets = zip(*noise_terms, strict=True)
    square = sum(squares)
    return Evidence(square - explained, logdet + sum(logdets), square[..., 1:, 1:].detach())


def noise_terms(group: Group) -> tuple[Float[Tensor, "*b 1+p 1+p"], Float[Tensor, "*b"]]:
    """VᵀN⁻¹V and log|N| of the noise N of a group."""
    statistics, noise = group
    pattern = statistics.pattern
    precision = pattern.precision(noise.precision)
    square = (precision * statistics.second_moment).sum((-1, -2))[..., None, None]
    total = pattern.embed((precision @ statistics.total.unsqueeze(-1)).mT).mT
    ones = 0
    for moments, e in zip(statistics.moments, pattern.basis(precision), strict=True):
        ones = ones + moments.mass * pattern.embed(pattern.embed(precision @ e).mT)
    ones = ones.expand(*total.shape[:-2], -1, -1)
    quad = torch.cat(
        [torch.cat([square, total.mT], dim=-1), torch.cat([total, ones], dim=-1)], dim=-2
    )
    logdet = statistics.count * noise.logdet - pattern.num_values * statistics.weights.log
    return quad, logdet
