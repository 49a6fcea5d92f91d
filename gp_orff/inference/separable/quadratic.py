"""BᵀA⁻¹B and log|A| of A = I + C⊗G, with closed-form derivatives.

The columns of B are vec Z and s⊗I, so that every block has two of them: with G = U diag(λ) Uᵀ and
P_j = (I + λ_j C)⁻¹, those of A⁻¹B have the parts t_j = P_j (Z U)_j and p_j = P_j s.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd import Function

from gp_orff.inference.quadratic import InvQuadLogdet
from gp_orff.inference.separable.blocks import FactoredBlocks, blocks_of


@dataclass(frozen=True)
class Solution:
    """A⁻¹B in the eigenvectors' basis, and what follows from it."""

    u: Float[Tensor, "*b r r"]
    blocks: FactoredBlocks
    t: Float[Tensor, "*b r n"]
    p: Float[Tensor, "*b r n"]
    forms: Float[Tensor, "*b r 2 2"]  # of [(Z U)_j, s] under P_j

    @classmethod
    def of(
        cls,
        c: Float[Tensor, "*b n n"],
        g: Float[Tensor, "*b r r"],
        z: Float[Tensor, "*b n r"],
        s: Float[Tensor, "*b n 1"],
    ) -> "Solution":
        """The solution from one eigendecomposition of G; differentiable in C, Z and s only."""
        eigenvalues, u = torch.linalg.eigh(g)
        return cls.with_blocks(u, blocks_of(c, eigenvalues.clamp_min(0)), z, s)

    @classmethod
    def with_blocks(
        cls,
        u: Float[Tensor, "*b r r"],
        blocks: FactoredBlocks,
        z: Float[Tensor, "*b n r"],
        s: Float[Tensor, "*b n 1"],
    ) -> "Solution":
        """The solution in the basis U from the blocks (I + λ_j C)⁻¹."""
        both = torch.stack(torch.broadcast_tensors((z @ u).mT, s.mT), dim=-2)  # (*b, r, 2, n)
        half = blocks.half(both)
        t, p = blocks.other_half(half).unbind(-2)
        return cls(u, blocks, t, p, half @ half.mT)

    @property
    def quad(self) -> Float[Tensor, "*b 1+r 1+r"]:
        """BᵀA⁻¹B."""
        square = self.forms[..., 0, 0].sum(-1)[..., None, None]
        mixed = self.u @ self.forms[..., 1, :1]
        ones = (self.u * self.forms[..., 1, 1].unsqueeze(-2)) @ self.u.mT
        upper, lower = torch.cat([square, mixed.mT], dim=-1), torch.cat([mixed, ones], dim=-1)
        return torch.cat([upper, lower], dim=-2)

    def combine(self, v: Float[Tensor, "*b 1+r 1"]) -> Float[Tensor, "*b n*r 1"]:
        """A⁻¹B v."""
        first, others = v[..., :1, :], self.u.mT @ v[..., 1:, :]
        solution = first * self.t + others * self.p  # (*b, r, n)
        return (solution.mT @ self.u.mT).flatten(-2).unsqueeze(-1)


class KroneckerInvQuadLogdet(Function):
    """BᵀA⁻¹B and log|A|, A = I + C⊗G, B = [vec Z, s⊗I].

    Rows of Z belong to C, columns to G. No eigenvectors are differentiated, so that equal
    eigenvalues do no harm.
    """

    @staticmethod
    def forward(
        ctx,
        c: Float[Tensor, "*b n n"],
        g: Float[Tensor, "*b r r"],
        z: Float[Tensor, "*b n r"],
        s: Float[Tensor, "*b n 1"],
    ):
        solution = Solution.of(c, g, z, s)
        ctx.save_for_backward(c, g, z, s)
        ctx.solution = solution  # none of it is an output, which would be a circle
        quad = solution.quad
        return quad, solution.blocks.logdet().expand(quad.shape[:-2])

    @staticmethod
    def backward(ctx, grad_quad, grad_logdet):
        c, g, z, s = ctx.saved_tensors
        if torch.is_grad_enabled():
            values = InvQuadLogdet.apply(*kronecker_dense(c, g, z, s))
            variables = [t for t in (c, g, z, s) if t.requires_grad]
            gradients = iter(
                torch.autograd.grad(values, variables, (grad_quad, grad_logdet), create_graph=True)
            )
            return tuple(next(gradients) if t.requires_grad else None for t in (c, g, z, s))
        u, blocks, t, p = ctx.solution.u, ctx.solution.blocks, ctx.solution.t, ctx.solution.p
        quad = 0.5 * (grad_quad + grad_quad.mT)
        square, mixed = quad[..., :1, :1], u.mT @ quad[..., 1:, :1]  # (*b, 1, 1), (*b, r, 1)
        ones = u.mT @ quad[..., 1:, 1:] @ u
        # M = A⁻¹B ∂/∂(BᵀA⁻¹B); of its columns, those of Z and, for each j, that of s⊗u_j
        of_z = square * t + mixed * p
        of_s = mixed * t + ones.diagonal(dim1=-1, dim2=-2).unsqueeze(-1) * p
        weighted, traces = blocks.logdet_gradients(c)
        rates = blocks.eigenvalues.unsqueeze(-1)
        grad_c = grad_logdet[..., None, None] * weighted
        grad_c = grad_c - of_z.mT @ (rates * t) - of_s.mT @ (rates * p)
        tc, pc = t @ c, p @ c
        inner = (square * tc + mixed * pc) @ t.mT + (tc @ p.mT) * mixed.mT + ones * (pc @ p.mT)
        grad_g = torch.diag_embed(grad_logdet.unsqueeze(-1) * traces) - inner
        grad_s = 2 * of_s.sum(-2).unsqueeze(-1)
        return grad_c, u @ grad_g @ u.mT, 2 * of_z.mT @ u.mT, grad_s


def kronecker_dense(
    c: Float[Tensor, "*b n n"],
    g: Float[Tensor, "*b r r"],
    z: Float[Tensor, "*b n r"],
    s: Float[Tensor, "*b n 1"],
) -> tuple[Float[Tensor, "*b n*r n*r"], Float[Tensor, "*b n*r 1+r"]]:
    """I + C⊗G and [vec Z, s⊗I], as dense matrices."""
    a = torch.einsum("...cd,...ij->...cidj", c, g).flatten(-4, -3).flatten(-2)
    identity = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
    eye = torch.eye(z.shape[-1], dtype=a.dtype, device=a.device)
    ones = (s.unsqueeze(-1) * eye).flatten(-3, -2)
    z = z.flatten(-2).unsqueeze(-1)
    batch = torch.broadcast_shapes(z.shape[:-2], ones.shape[:-2])
    b = torch.cat([t.expand(*batch, *t.shape[-2:]) for t in (z, ones)], dim=-1)
    return a + identity, b
