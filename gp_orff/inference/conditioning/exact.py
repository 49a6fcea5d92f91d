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
from gp_orff.data.observations import (
    LinearObservations,
    Observations,
    PointObservations,
    block_diagonal,
)
from gp_orff.inference.conditioning.base import Inference, Posterior
from gp_orff.inference.equations import (
    dense_evidence,
    dense_posterior,
)
from gp_orff.inference.exact import Tiles, tiled_evidence
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

    @cached_property
    def _tiles(self) -> Tiles:
        return Tiles.of(self.data.observations)

    def of(self, data):
        return ExactInference(data)

    def prepare(self) -> None:
        _ = self.observed

    def evidence(self, kernel: Kernel, noises: Noises) -> Evidence:
        observations = self.data.observations
        if self.data.symbol_data or not _is_plain(kernel, observations):
            return dense_evidence(*self._covariance_and_design(kernel, noises))
        blocks = [group.noise(GroupNoise(group_noise(group.key, noises))) for group in observations]
        return tiled_evidence(kernel, self._tiles, self._design(noises), blocks)

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
        noise = block_diagonal([part.noise_covariance(noises) for part in self.observed])
        return observed_covariance(kernel, self.observed) + noise, self._design(noises)

    def _design(self, noises: Noises) -> Float[Tensor, "M 1+p"]:
        num_outputs = next(iter(noises.values())).shape[-1]
        return torch.cat([part.design(num_outputs) for part in self.observed])


def _is_plain(kernel: Kernel, observations: Sequence[Observations]) -> bool:
    """Whether only leaves of the graph, the parameters of one kernel, determine Cov[H f]."""
    fixed = [tensor for part in observations for tensor in (part.x, part.direction)]
    return (
        not kernel.batch_shape
        and all(parameter.is_leaf for parameter in kernel.parameters())
        and not any(tensor is not None and tensor.requires_grad for tensor in fixed)
    )
