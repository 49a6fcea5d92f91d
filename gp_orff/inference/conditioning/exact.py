"""Inference by the exact kernel."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from gpytorch.kernels import Kernel
from jaxtyping import Float
from torch import Tensor

from gp_orff.data.dataset import Dataset
from gp_orff.data.noise.covariances import Noises
from gp_orff.data.noise.groups import GroupNoise, group_noise
from gp_orff.data.observations import LinearObservations, PointObservations, block_diagonal
from gp_orff.inference.conditioning.base import Inference, Posterior
from gp_orff.inference.equations import (
    dense_evidence,
    dense_posterior,
)
from gp_orff.inference.exact_posterior import ExactPosterior, observed_covariance
from gp_orff.inference.quadratic import Evidence
from gp_orff.symbols.base import Identity


@dataclass(frozen=True)
class ExactInference(Inference):
    """Inference by the exact kernel: one Cholesky factorisation of an M×M matrix."""

    data: Dataset

    @cached_property
    def observed(self) -> Sequence[LinearObservations]:
        return (PointObservations(self.data.observations), *self.data.symbol_data)

    def of(self, data):
        return ExactInference(data)

    def prepare(self) -> None:
        _ = self.observed

    def evidence(self, kernel: Kernel, noises: Noises) -> Evidence:
        return dense_evidence(*self._covariance_and_design(kernel, noises))

    @torch.no_grad()
    def posterior(self, kernel, noises, mean):
        covariance, design = self._covariance_and_design(kernel, noises)
        factor, alpha, evidence = dense_posterior(covariance, design, mean)
        distribution = ExactPosterior(kernel, self.observed, noises, factor, alpha, Identity(), ())
        keys = [part.key for part in self.data.observations]
        group_noises = {key: GroupNoise(group_noise(key, noises)) for key in keys}
        return Posterior(distribution, evidence, group_noises)

    def _covariance_and_design(
        self, kernel: Kernel, noises: Noises
    ) -> tuple[Float[Tensor, "M M"], Float[Tensor, "M 1+p"]]:
        """Cov[H f] plus the covariance of the noise, and V."""
        observed, num_outputs = self.observed, next(iter(noises.values())).shape[-1]
        noise = block_diagonal([part.noise_covariance(noises) for part in observed])
        design = torch.cat([part.design(num_outputs) for part in observed])
        return observed_covariance(kernel, observed) + noise, design
