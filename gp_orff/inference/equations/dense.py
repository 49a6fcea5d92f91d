"""Observations with a matrix row for each value, and the dual algebra: K + I⊗Σ itself."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from gp_orff.data.noise.covariances import Noise, Noises, independent
from gp_orff.data.observations import (
    LinearObservations,
    TruncatedVariance,
    block_diagonal,
    less_reference,
)
from gp_orff.features.expansion import (
    Expansion,
    apply_symbol,
)
from gp_orff.inference.equations.base import NormalEquations
from gp_orff.inference.quadratic import (
    Evidence,
    InvQuadLogdet,
    log_determinant,
    seen_by,
)
from gp_orff.inference.weight_posterior import DualPosterior
from gp_orff.kernels.cholesky import cholesky, size_of
from gp_orff.symbols.base import Identity, Symbol


@dataclass(frozen=True)
class DenseRows:
    """Observations with a matrix row for each value: H Φ, V and the noise covariance."""

    features: Float[Tensor, "*b M F"]
    design: Float[Tensor, "*b M 1+p"]
    noise: Float[Tensor, "*b M M"]

    @classmethod
    def of(
        cls,
        observations: LinearObservations,
        expansion: Expansion,
        noises: Noises,
        truncated: TruncatedVariance,
    ) -> "DenseRows":
        """The matrices, differentiable in the expansion, which lacks the variance `truncated`."""

        def features(symbol: Symbol, space: Sequence[int], x: Float[Tensor, "n d"]) -> Tensor:
            if isinstance(symbol, Identity):
                return expansion.features(x)
            image = apply_symbol(symbol, expansion, space)
            return less_reference(image.features, x, symbol, space)

        noise = observations.noise_covariance(noises, truncated)
        return cls(observations.apply(features), observations.design(expansion.num_outputs), noise)

    @classmethod
    def concatenate(cls, parts: Sequence["DenseRows"]) -> "DenseRows":
        """The rows of all parts."""
        if len(parts) == 1:
            return parts[0]
        return cls(
            torch.cat([part.features for part in parts]),
            torch.cat([part.design for part in parts]),
            block_diagonal([part.noise for part in parts]),
        )

    def whitened(self) -> tuple[Float[Tensor, "M F"], Float[Tensor, "M 1+p"], Float[Tensor, ""]]:
        """N^{−½}Φ, N^{−½}V and log|N|."""
        factor = torch.linalg.cholesky(self.noise)
        both = torch.cat([self.features, self.design], dim=-1)
        half = torch.linalg.solve_triangular(factor, both, upper=False)
        logdet = 2 * factor.diagonal().log().sum()
        return *half.split([self.features.shape[-1], self.design.shape[-1]], dim=-1), logdet


@dataclass(frozen=True)
class Dual(NormalEquations):
    """The dual algebra, for fewer values than features: it factorises their covariance."""

    expansion: Expansion
    rows: DenseRows

    @property
    def _covariance(self) -> Float[Tensor, "*b M M"]:
        return self.rows.features @ self.rows.features.mT + self.rows.noise

    def evidence(self) -> Evidence:
        return dense_evidence(self._covariance, self.rows.design)

    def solve(self, v: Float[Tensor, "*b M k"]) -> Float[Tensor, "*b M k"]:
        """The inverse of the observations' covariance times v."""
        return torch.linalg.solve(self._covariance, v)

    def posterior(self, mean):
        features = self.rows.features
        factor, solved, evidence = dense_posterior(self._covariance, self.rows.design, mean)
        whitened = torch.linalg.solve_triangular(factor, features, upper=False)
        theta = mean_and_response(features.mT @ solved)
        return DualPosterior(self.expansion, *theta, whitened), evidence


def dual_of_vectors(
    expansion: Expansion, x: Float[Tensor, "*b N d"], y: Float[Tensor, "*b N p"], noise: Noise
) -> Dual:
    """The dual algebra of vectors y at x."""
    covariance = independent(noise.covariance, x.shape[-2])
    return Dual(expansion, DenseRows(expansion.features(x.double()), with_ones(y), covariance))


def with_ones(y: Float[Tensor, "*b N p"]) -> Float[Tensor, "*b N*p 1+p"]:
    """V = [y, 1⊗I_p] of vectors y."""
    eye = torch.eye(y.shape[-1], dtype=y.dtype, device=y.device)
    ones = eye.expand(*y.shape, y.shape[-1]).flatten(-3, -2)  # 1⊗I_p
    return torch.cat([y.flatten(-2).unsqueeze(-1), ones], dim=-1)


def dense_evidence(
    covariance: Float[Tensor, "*b M M"], design: Float[Tensor, "*b M 1+p"]
) -> Evidence:
    """The evidence of V under a dense covariance, noise included."""
    size = size_of(covariance)
    quad, logdet = InvQuadLogdet.apply(covariance / size, design)
    logdet = logdet + covariance.shape[-1] * size.log()[..., 0, 0]
    return Evidence(quad / size, logdet, seen_by(design, covariance.diagonal(dim1=-1, dim2=-2)))


def dense_posterior(
    covariance: Float[Tensor, "*b M M"],
    design: Float[Tensor, "*b M 1+p"],
    mean: Float[Tensor, "*b p"] | None,
) -> tuple[Float[Tensor, "*b M M"], Float[Tensor, "*b M 1+p"], Evidence]:
    """The Cholesky factor L of the covariance, (L Lᵀ)⁻¹[y − c, 1⊗I_p], and the evidence of V."""
    factor = cholesky(covariance)
    seen = seen_by(design, covariance.diagonal(dim1=-1, dim2=-2))
    return factor, *solve_with(factor, design, mean, partial(Evidence, seen=seen))


def solve_with(
    factor: Float[Tensor, "*b n n"],
    b: Float[Tensor, "*b n 1+p"],
    mean: Float[Tensor, "*b p"] | None,
    evidence_of: Callable[[Tensor, Tensor], Evidence],
) -> tuple[Float[Tensor, "*b n 1+p"], Evidence]:
    """A⁻¹B times the contrasts of the mean c, from the factor of A, and the evidence that follows
    from BᵀA⁻¹B and log|A|."""
    half = torch.linalg.solve_triangular(factor, b, upper=False)
    evidence = evidence_of(half.mT @ half, log_determinant(factor))
    residual = half @ evidence.contrasts(mean)
    return torch.linalg.solve_triangular(factor.mT, residual, upper=True), evidence


def mean_and_response(
    solved: Float[Tensor, "*b n 1+p"],
) -> tuple[Float[Tensor, "*b n 1"], Float[Tensor, "*b n p"]]:
    """What weights are under the contrasts: their mean, and their response to constants."""
    return solved[..., :1], solved[..., 1:]
