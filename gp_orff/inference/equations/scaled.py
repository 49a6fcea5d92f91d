"""The algebra of fixed fields times scales: A = I + Σ_g Σ_i w_gi G_gi ∘ s sᵀ."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float
from linear_operator.utils.cholesky import psd_safe_cholesky
from torch import Tensor

from gp_orff.data.noise.covariances import Noise
from gp_orff.data.statistics import Statistics
from gp_orff.features.expansion import FeatureExpansion
from gp_orff.features.scaled_expansion import ScaledExpansion
from gp_orff.inference.equations.base import Group, NormalEquations, evidence_of, noise_terms
from gp_orff.inference.equations.dense import mean_and_response, solve_with
from gp_orff.inference.equations.primal import information, right_hand_sides
from gp_orff.inference.quadratic import Evidence, MaskedInvQuadLogdet, masked_sum
from gp_orff.inference.weight_posterior import PrimalPosterior


@dataclass(frozen=True)
class Scaled(NormalEquations):
    """Features s_f u_f(x) of fixed fields u_f, under noise that is independent between outputs.

    With w_i the precision of value i of an observation, and (H_n u_f)_i that value of the field,

        A = I + Σ_i w_i G_i ∘ s sᵀ ,    (G_i)_ff′ = Σ_n (H_n u_f(x_n))_i (H_n u_f′(x_n))_i .
    """

    expansion: ScaledExpansion
    groups: Sequence[Group]

    def evidence(self) -> Evidence:
        return self._evidence(*MaskedInvQuadLogdet.apply(self._b, *self._parts))

    def posterior(self, mean):
        factor = psd_safe_cholesky(masked_sum(self._parts))
        solved, evidence = solve_with(factor, self._b, mean, self._evidence)
        weights = mean_and_response(solved)
        return PrimalPosterior(self.expansion.general(), *weights, factor), evidence

    @cached_property
    def _b(self) -> Float[Tensor, "*b F 1+p"]:
        return right_hand_sides(self.expansion.general(), self.groups)

    @cached_property
    def _parts(self) -> list[Tensor]:
        """G, s and w for every value of the observations of every group."""
        parts, scales = [], self.expansion.scales.unsqueeze(-1)
        for statistics, noise in self.groups:
            grams = statistics.kept(lambda own: _grams(own, self.expansion.fixed), self._key)
            weights = noise.precision.diagonal(dim1=-1, dim2=-2)
            for gram, weight in zip(grams, weights.unbind(-1), strict=True):
                parts += [gram, scales, weight[..., None, None]]
        return parts

    @property
    def _key(self) -> tuple[Tensor, Tensor]:
        return self.expansion.units, self.expansion.columns

    def _evidence(self, explained: Tensor, logdet: Tensor) -> Evidence:
        return evidence_of([*map(noise_terms, self.groups)], explained, logdet)


@torch.no_grad()
def _grams(statistics: Statistics, fields: FeatureExpansion) -> list[Float[Tensor, "F F"]]:
    """G_i for every value i of an observation."""
    grams = []
    for weights in torch.eye(statistics.pattern.num_values, dtype=torch.float64):
        unit = Noise(torch.diag(weights), torch.diag(weights), torch.zeros(()))
        gram = information(fields, [Group(statistics, unit)])
        gram.diagonal().sub_(1)
        grams.append(gram)
    return grams


def is_diagonal(noise: Noise) -> bool:
    """Whether the noise is independent between the values of an observation."""
    precision = noise.precision.detach()
    return torch.equal(precision, torch.diag_embed(precision.diagonal(dim1=-1, dim2=-2)))
