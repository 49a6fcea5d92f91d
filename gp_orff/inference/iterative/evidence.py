"""BᵀA⁻¹B and log|A| − log|P| with their derivatives, from solutions of A x = b alone.

With U = A⁻¹B, and random z with E[z zᵀ] = P,

    ∂ BᵀA⁻¹B = ∂Bᵀ U + Uᵀ ∂B − Uᵀ ∂A U ,
    ∂ (log|A| − log|P|) = tr(A⁻¹∂A) − tr(P⁻¹∂P) = E[(A⁻¹z − P⁻¹z)ᵀ ∂A P⁻¹z] ,

the last because A and P have the same block and diagonal, so that E[zᵀP⁻¹ ∂A P⁻¹z] = tr(P⁻¹∂P).
The derivative of log|P| is exact.
"""

from collections.abc import Iterator

from jaxtyping import Float
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from gp_orff.inference.iterative.system import System
from gp_orff.inference.quadratic import Evidence


class InvQuad(Function):
    """BᵀA⁻¹B; arguments: the system, B (F, k), M (F, p), and each Q and N^{−½}Φ of A."""

    @staticmethod
    def forward(ctx, system: System, b: Float[Tensor, "F k"], *parts: Tensor):
        u = system.solve_mean(b.mT)
        ctx.system = system
        ctx.save_for_backward(u)
        residual = b - system.precision.product(u).mT
        return u @ b + u @ residual  # the error is quadratic in the residual

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        (u,) = ctx.saved_tensors
        weighted = 0.5 * (grad + grad.mT) @ u
        return None, 2 * weighted.mT, *_derivatives(ctx.system, -weighted, u)


class LogdetRatio(Function):
    """log|A| − log|P|; arguments: the system, M (F, p), and each Q and N^{−½}Φ of A."""

    @staticmethod
    def forward(ctx, system: System, *parts: Tensor):
        ctx.system = system
        return system.logdet_ratio[0].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        preconditioned, solution = ctx.system.probes
        difference = grad / len(preconditioned) * (solution.x - preconditioned)
        return None, *_derivatives(ctx.system, difference, preconditioned)


def _derivatives(system: System, left: Tensor, right: Tensor) -> list[Tensor]:
    """The derivatives of Σ uᵀAv for rows u of `left` and v of `right`."""
    directions, bases, rows = system.precision.derivatives(left, right)
    return [directions, *bases, *rows]


class EstimatedEvidence(Evidence):
    """An evidence with the standard error of its log-determinant.

    Both are computed when they are needed first, unless the log-determinant is given with its
    derivatives.
    """

    system: System
    ratio: Float[Tensor, ""] | None

    @classmethod
    def of(
        cls,
        exact: Evidence,
        system: System,
        ratio: Float[Tensor, ""] | None = None,
    ) -> "EstimatedEvidence":
        """The evidence from one with |P| in the place of |A|, and log|A| − log|P|."""
        evidence = cls(exact.quad, exact.logdet, exact.seen)
        evidence.system, evidence.ratio = system, ratio
        return evidence

    def __iter__(self) -> Iterator[Tensor]:
        return iter((self.quad, self.logdet, self.seen))

    @property
    def logdet(self) -> Float[Tensor, ""]:
        return self[1] + (self.system.logdet_ratio[0] if self.ratio is None else self.ratio)

    @property
    def logdet_error(self) -> float:
        return self.system.logdet_ratio[1]
