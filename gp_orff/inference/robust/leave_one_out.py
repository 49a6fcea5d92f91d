"""Leave-one-out residuals."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from gp_orff.data.noise.covariances import Noises
from gp_orff.data.observations import Observations, with_rows
from gp_orff.data.patterns import GroupKey
from gp_orff.inference.conditioning import Posterior, Residuals
from gp_orff.inference.robust.e_step import residuals
from gp_orff.inference.robust.student_t import StudentTNoise


@dataclass(frozen=True)
class LeaveOneOut:
    """Each observation against its prediction from all others: one row per point, in given order.

    NaN stands where nothing was observed.

    Attributes:
        residual: the observation less its prediction from the others, (N, v), in the unit of y.
        covariance: the covariance of the residual, noise included, (N, v, v), in squared units;
            under Student-t noise with the scale Σ of the noise in the place of its covariance.
        distance: rᵀ C⁻¹ r of residual r and covariance C, (N,).
        p_value: the probability of a distance at least as large under the model, (N,); small for
            outliers. The distance is χ² with as many degrees of freedom v as values, or v·F(v, ν)
            under Student-t noise if the variance of the field is small beside the noise.
        log_density: the Gaussian log density of each observation given all others, (N,); under
            Gaussian noise their sum is a score of the model.
        weight: E[w] of each observation under Student-t noise, (N,), small for outliers; else 1.
    """

    residual: Float[Tensor, "N v"]
    covariance: Float[Tensor, "N v v"]
    distance: Float[Tensor, "N"]
    p_value: Float[Tensor, "N"]
    log_density: Float[Tensor, "N"]
    weight: Float[Tensor, "N"]

    @classmethod
    def empty(cls, count: int, values: int) -> "LeaveOneOut":
        """NaN in every row, to be overwritten."""
        shapes = [(values,), (values, values), (), (), (), ()]
        nan = torch.tensor(math.nan, dtype=torch.float64)
        return cls(*(nan.repeat(count, *shape) for shape in shapes))

    def record(
        self,
        index: Int[Tensor, "n"],
        columns: Int[Tensor, "v"],
        residual: Float[Tensor, "n v"],
        covariance: Float[Tensor, "n v v"],
        weight: Float[Tensor, "n"],
        tail: Callable[[Float[Tensor, "n"], int], Float[Tensor, "n"]],
    ) -> None:
        """Overwrite some rows; `tail(d, v)` is the probability of a distance of at least d."""
        distance = (residual * torch.linalg.solve(covariance, residual)).sum(-1)
        log_normaliser = residual.shape[-1] * math.log(2 * math.pi) + torch.logdet(covariance)
        self.residual[index[:, None], columns] = residual.cpu()
        self.covariance[index[:, None, None], columns[:, None], columns] = covariance.cpu()
        self.distance[index] = distance.cpu()
        self.p_value[index] = tail(distance.cpu(), len(columns))
        self.log_density[index] = -0.5 * (distance + log_normaliser).cpu()
        self.weight[index] = weight.cpu()


@torch.no_grad()
def leave_one_out(
    pairs: Iterable[tuple[Observations, Observations]],
    count: int,
    models: Mapping[str, StudentTNoise],
    posterior: Posterior,
    noises: Noises,
    mean: Float[Tensor, "p"],
    sites: Mapping[GroupKey, Residuals] | None = None,
) -> LeaveOneOut:
    """Leave-one-out residuals of pairs (nominal, weighted) of observations.

    The posterior is conditioned on the weighted ones, with noise covariance N. With e = y − H E[f]
    and S = H Cov[f] Hᵀ of each observation,

        r = N (N − S)⁻¹ e ,    Cov[H f | others] = N (N − S)⁻¹ N − N .

    Covariance and density use the noise of the nominal ones. Where the field changes within sites,
    e and S of every group are given as `sites`: those of what the records of a site have in common.

    Raises:
        ValueError: observations that the posterior was not conditioned on, or components of one
            vector as separate observations.
    """
    result, pairs = None, list(pairs)
    parts = [weighted for _, weighted in pairs]
    known = [None] * len(parts) if sites is None else [row for _, row in with_rows(parts, sites)]
    for (nominal, weighted), at_sites in zip(pairs, known, strict=True):
        columns = torch.tensor(nominal.pattern.columns)
        if result is None:
            result = LeaveOneOut.empty(count, nominal.pattern.num_columns)
        index = nominal.index.cpu()
        if not result.weight[index].isnan().all():
            raise ValueError(
                "expected one observation for each point, got components of a vector with "
                "noise of their own, which are several; give variances (N,) or noise (N,), or "
                "cross_validate(x, y, blocks=range(len(x)))"
            )
        if at_sites is None:
            residual, latent, noise = residuals(weighted, posterior, noises, mean)
        else:
            residual, latent, noise = *at_sites, posterior.noises[weighted.key]
        noise_covariance = weighted.noise(noise)
        if not (torch.linalg.eigvalsh(noise_covariance - latent)[:, 0] > 0).all():
            raise ValueError(
                "expected observations that the model was conditioned on, one by one, got some at "
                "which the field is less certain than the observation; pass the data of fit or "
                "condition, and where the report tells that positions were merged, condition with "
                "merge=0, or take cross_validate(x, y, blocks=range(len(x)))"
            )
        gain = noise_covariance @ torch.linalg.inv(noise_covariance - latent)  # N (N − S)⁻¹
        residual = (gain @ residual.unsqueeze(-1)).squeeze(-1)
        covariance = gain @ noise_covariance - noise_covariance + nominal.noise(noise)
        model = models.get(nominal.key.label)
        weight = torch.ones_like(residual[:, 0]) if weighted.weight is None else weighted.weight
        weight = weight if nominal.weight is None else weight / nominal.weight
        tail = chi_squared if model is None else model.tail
        result.record(index, columns, residual, covariance, weight, tail)
    return result


def chi_squared(distance: Float[Tensor, "n"], values: int) -> Float[Tensor, "n"]:
    """P(D ≥ distance) for D ~ χ² with `values` degrees of freedom."""
    half = torch.tensor(0.5 * values, dtype=distance.dtype)
    return torch.special.gammaincc(half, 0.5 * distance)
