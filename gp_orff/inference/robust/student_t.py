"""Student-t noise: one weight for each observation, and what it adds to the ELBO."""

from collections.abc import Mapping
from dataclasses import dataclass

import scipy.special
import torch
from gpytorch.likelihoods import Likelihood
from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True)
class StudentTNoise:
    """Student-t noise by q(w_n) = Gamma((ν+v)/2, (ν+d_n)/2), v values at distance d_n."""

    deg_free: float

    def weights(self, distance: Float[Tensor, "n"], values: int) -> Float[Tensor, "n"]:
        """E[w_n] = (ν + v) / (ν + d_n)."""
        return (self.deg_free + values) / (self.deg_free + distance)

    def distance(self, weights: Float[Tensor, "n"], values: int) -> Float[Tensor, "n"]:
        """d_n, from the weights E[w_n]."""
        return (self.deg_free + values) / weights - self.deg_free

    def elbo_correction(self, distance: Float[Tensor, "n"], values: int) -> float:
        """Σ_n ½v (E[log w_n] − log E[w_n]) − KL(q(w_n) ‖ Gamma(ν/2, ν/2)).

        Added to the evidence under the weights E[w_n], it gives the ELBO.
        """
        half = torch.tensor(0.5 * self.deg_free, dtype=distance.dtype, device=distance.device)
        shape, rate = half + 0.5 * values, half + 0.5 * distance
        log_mean = shape.log() - rate.log()
        mean_log = shape.digamma() - rate.log()
        divergence = (
            0.5 * values * shape.digamma()
            - shape.lgamma()
            + half.lgamma()
            + half * (rate.log() - half.log())
            + shape * (half - rate) / rate
        )
        return (0.5 * values * (mean_log - log_mean) - divergence).sum().item()

    def log_density(self, distance: Float[Tensor, "n"], values: int) -> Float[Tensor, "n"]:
        """log t_ν(d_n) up to terms without ν: log E[exp(−½ w d_n) w^(v/2)], w ~ Gamma(ν/2, ν/2).

        With E[d_n] under the posterior of the field in the place of d_n, it is what the observation
        adds to the ELBO under its best weight.
        """
        half = torch.tensor(0.5 * self.deg_free, dtype=distance.dtype, device=distance.device)
        normaliser = (half + 0.5 * values).lgamma() - half.lgamma() - 0.5 * values * half.log()
        return normaliser - (half + 0.5 * values) * (0.5 * distance / half).log1p()

    def tail(self, distance: Float[Tensor, "n"], values: int) -> Float[Tensor, "n"]:
        """P(D ≥ distance) where D/v ~ F(v, ν)."""
        share = self.deg_free / (self.deg_free + distance.numpy())
        return torch.from_numpy(scipy.special.betainc(self.deg_free / 2, values / 2, share))


def weighs(likelihoods: Mapping[str, Likelihood]) -> bool:
    """Whether Student-t noise weighs the readings of any group."""
    return any(
        getattr(likelihood, "deg_free", None) is not None for likelihood in likelihoods.values()
    )
