"""The algebra of separable kernels, primal and dual."""

from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from gp_orff.data.noise.covariances import Noise
from gp_orff.data.statistics import Statistics
from gp_orff.features.expansion import KroneckerExpansion
from gp_orff.inference.equations.base import Group, NormalEquations, evidence_of, noise_terms
from gp_orff.inference.equations.dense import Dual, dual_of_vectors
from gp_orff.inference.equations.primal import Primal
from gp_orff.inference.quadratic import Evidence
from gp_orff.inference.separable.blocks import DualBlocks, EigenBlocks
from gp_orff.inference.separable.posterior import KroneckerPosterior, Response
from gp_orff.inference.separable.quadratic import KroneckerInvQuadLogdet, Solution


@dataclass(frozen=True)
class Kronecker(NormalEquations):
    """The algebra of separable kernels: A = I + SCS ⊗ G, G = LᵀΣ⁻¹L."""

    expansion: KroneckerExpansion
    group: Group

    @cached_property
    def _equations(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        return kronecker_equations(self.expansion, *self.group)

    def evidence(self) -> Evidence:
        *equations, outputs = self._equations
        quad, logdet = KroneckerInvQuadLogdet.apply(*equations)
        return self._evidence(outputs @ quad @ outputs.mT, logdet)

    def posterior(self, mean):
        *equations, outputs = self._equations
        if equations[1].requires_grad:  # eigenvectors of equal eigenvalues: no derivative
            return Primal(self.expansion.general(), [self.group]).posterior(mean)
        solution = Solution.of(*equations)
        explained = outputs @ solution.quad @ outputs.mT
        evidence = self._evidence(explained, solution.blocks.logdet())
        theta = solution.combine(outputs.mT @ evidence.contrast(mean))
        response = Response(solution.p, solution.u, solution.u.mT @ outputs[..., 1:, 1:].mT)
        weights = self.expansion, theta, response
        return KroneckerPosterior(*weights, solution.u, solution.blocks), evidence

    def _evidence(self, explained: Tensor, logdet: Tensor) -> Evidence:
        return evidence_of([noise_terms(self.group)], explained, logdet)


@dataclass(frozen=True)
class KroneckerDual(NormalEquations):
    """The dual algebra of separable kernels, for whole vectors at fewer points than columns.

    With Ψ = φS and the noise T⁻¹T⁻ᵀ = Σ, the covariance of the vectors that T multiplies is
    I + ΨΨᵀ ⊗ G, G = T L (T L)ᵀ.
    """

    expansion: KroneckerExpansion
    x: Float[Tensor, "*b N d"]
    y: Float[Tensor, "*b N p"]
    noise: Noise

    @cached_property
    def _rows(self) -> Float[Tensor, "*b N M"]:
        """Ψ."""
        return self.expansion.phi.values(self.x.double()) * self.expansion.scales.mT

    @cached_property
    def _whitening(self) -> Float[Tensor, "*b p p"]:
        """T."""
        factor = torch.linalg.cholesky(self.noise.covariance)
        eye = torch.eye(factor.shape[-1], dtype=factor.dtype, device=factor.device)
        return torch.linalg.solve_triangular(factor, eye, upper=False)

    @cached_property
    def _equations(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """ΨΨᵀ, G, and Y Tᵀ and 1, where V has the columns [vec Y, 1⊗I]."""
        rows, mixing = self._rows, self._whitening @ self.expansion.mixing
        whitened = self.y @ self._whitening.mT
        return rows @ rows.mT, mixing @ mixing.mT, whitened, torch.ones_like(self.y[..., :1])

    def evidence(self) -> Evidence:
        return self._evidence(*KroneckerInvQuadLogdet.apply(*self._equations))

    @property
    def _differentiated(self) -> bool:
        return torch.is_grad_enabled() and any(t.requires_grad for t in self._equations)

    @property
    def _blocks(self) -> tuple[Float[Tensor, "*b p p"], EigenBlocks]:
        """The eigenvectors of G, and (I + λ_j ΨΨᵀ)⁻¹."""
        covariance, g, *_ = self._equations
        eigenvalues, u = torch.linalg.eigh(g)
        return u, EigenBlocks.of(covariance, eigenvalues.clamp_min(0))

    def solve(self, v: Float[Tensor, "*b N*p k"]) -> Float[Tensor, "*b N*p k"]:
        """The inverse of the observations' covariance times v."""
        if self._differentiated:
            return self._written_out.solve(v)
        u, blocks = self._blocks
        outputs = self._whitening.mT @ u
        rows = torch.einsum("...npk,...pj->...jkn", v.unflatten(-2, self.y.shape[-2:]), outputs)
        return torch.einsum("...jkn,...pj->...npk", blocks.solve(rows), outputs).flatten(-3, -2)

    def posterior(self, mean):
        if self._differentiated:
            return self._written_out.posterior(mean)
        *_, whitened, ones = self._equations
        u, blocks = self._blocks
        solution = Solution.with_blocks(u, blocks, whitened, ones)
        evidence = self._evidence(solution.quad, blocks.logdet())
        alpha = solution.combine(self._outputs.mT @ evidence.contrast(mean))
        mixing = self._whitening @ self.expansion.mixing
        theta = self._rows.mT @ alpha.unflatten(-2, whitened.shape[-2:]).squeeze(-1) @ mixing
        constants = solution.p @ self._rows, mixing.mT @ u, u.mT @ self._whitening
        eigenvalues, u = torch.linalg.eigh(mixing.mT @ mixing)
        inverse = DualBlocks(eigenvalues.clamp_min(0), blocks.mu, self._rows.mT @ blocks.v)
        theta = theta.flatten(-2).unsqueeze(-1)
        weights = self.expansion, theta, Response(*constants)
        return KroneckerPosterior(*weights, u, inverse), evidence

    def _evidence(self, quad: Tensor, logdet: Tensor) -> Evidence:
        quad = self._outputs @ quad @ self._outputs.mT
        return Evidence(quad, logdet + self.y.shape[-2] * self.noise.logdet)

    @property
    def _outputs(self) -> Float[Tensor, "*b 1+p 1+p"]:
        """1 ⊕ Tᵀ, by which the columns of V come from [vec Y Tᵀ, 1⊗I]."""
        outputs = pad(self._whitening.mT, (1, 0, 1, 0))
        outputs[..., 0, 0] = 1
        return outputs

    @property
    def _written_out(self) -> Dual:
        """The same equations with a row for each value, which can be differentiated."""
        return dual_of_vectors(self.expansion, self.x, self.y, self.noise)


def kronecker_equations(
    expansion: KroneckerExpansion, statistics: Statistics, noise: Noise
) -> tuple[
    Float[Tensor, "*b M M"],
    Float[Tensor, "*b r r"],
    Float[Tensor, "*b M r"],
    Float[Tensor, "*b M 1"],
    Float[Tensor, "*b 1+p 1+r"],
]:
    """S C S, G = LᵀΣ⁻¹L, Z, s and E, where A = I + SCS ⊗ G and B = [vec Z, s⊗I] Eᵀ."""
    scales, mixing = expansion.scales, expansion.mixing
    whitened = noise.precision @ mixing  # Σ⁻¹L
    gram = scales * statistics.gram * scales.mT
    cross = scales * (statistics.cross @ whitened)
    sums = scales * statistics.column_sum.unsqueeze(-1)
    outputs = pad(whitened, (1, 0, 1, 0))  # 1 ⊕ Σ⁻¹L
    outputs[..., 0, 0] = 1
    return gram, mixing.mT @ whitened, cross, sums, outputs
