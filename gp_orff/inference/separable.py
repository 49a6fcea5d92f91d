"""The algebra of separable kernels: blocks, evidence and posterior."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd import Function

from gp_orff.inference.posteriors import WeightPosterior, no_part
from gp_orff.inference.quadratic import InvQuadLogdet, gradients_with_graph
from gp_orff.kernels.base import cholesky, cholesky_inverse

# The blocks P_j = (I + λ_j C)⁻¹ of (I + C⊗G)⁻¹, for the eigenvalues λ_j of G.
#
# There are two algebras:
#
# - A Cholesky factor of every I + λ_j C. It takes r factorisations, and can be differentiated.
# - One eigendecomposition C = V diag(μ) Vᵀ, with P_j = V diag(1/(1 + λ_j μ)) Vᵀ. It takes as long
#   as several factorisations, for any r.
#
# The dual algebra has the same blocks with the Gram matrix ΨΨᵀ of the points. `DualBlocks` converts
# them to blocks of the columns without forming ΨᵀΨ.
#
# Vectors are rows. The index j of the block comes first, because one product with V then serves all
# blocks.


# The rank from which an eigendecomposition is faster for evidence and gradient: 1.1 to 1.8 times at
# rank 5, 0.98 to 1.5 times at rank 4 (128 to 2048 columns, one or two threads of a CPU). Variances
# then take one product with V in place of r triangular solves.
_MANY = 5


class Blocks(ABC):
    """P_j = R_j R_jᵀ, applied to rows v_j. A single block (*b, 1, m, n) is used for all j."""

    eigenvalues: Float[Tensor, "*b r"]  # λ

    @abstractmethod
    def half(self, v: Float[Tensor, "*b r m n"]) -> Float[Tensor, "*b r m n"]:
        """v_j R_j."""

    @abstractmethod
    def other_half(self, v: Float[Tensor, "*b r m n"]) -> Float[Tensor, "*b r m n"]:
        """v_j R_jᵀ."""

    def solve(self, v: Float[Tensor, "*b r m n"]) -> Float[Tensor, "*b r m n"]:
        """v_j P_j."""
        return self.other_half(self.half(v))

    def forms(self, v: Float[Tensor, "*b m n"]) -> Float[Tensor, "*b r m"]:
        """The diagonal of v P_j vᵀ."""
        return self.half(v.unsqueeze(-3)).square().sum(-1)

    @property
    @abstractmethod
    def width(self) -> int:
        """The number of elements in memory that `forms` needs for each row."""

    def detach(self) -> "Blocks":
        """These blocks without their autograd graph."""
        return type(self)(*(getattr(self, one.name).detach() for one in fields(self)))


# Blocks of the primal algebra also have `logdet` = log|I + C⊗G| = −Σ_j log|P_j|. `logdet_gradients`
# are its derivatives Σ_j λ_j P_j by C and tr(P_j C) by λ_j.


@dataclass(frozen=True)
class CholeskyBlocks(Blocks):
    """R_j = L_j⁻ᵀ with r differentiable Cholesky factors L_j L_jᵀ = I + λ_j C."""

    eigenvalues: Float[Tensor, "*b r"]
    factor: Float[Tensor, "*b r n n"]  # L_j

    @classmethod
    def of(cls, c: Float[Tensor, "*b n n"], eigenvalues: Float[Tensor, "*b r"]) -> "CholeskyBlocks":
        identity = torch.eye(c.shape[-1], dtype=c.dtype, device=c.device)
        blocks = identity + eigenvalues[..., None, None] * c.unsqueeze(-3)
        return cls(eigenvalues, cholesky(blocks, unit=1.0))

    def half(self, v: Tensor) -> Tensor:
        return torch.linalg.solve_triangular(self.factor.mT, v, upper=True, left=False)

    def other_half(self, v: Tensor) -> Tensor:
        return torch.linalg.solve_triangular(self.factor, v, upper=False, left=False)

    @property
    def width(self) -> int:
        return self.factor.shape[-3] * self.factor.shape[-1]

    def logdet(self) -> Tensor:
        return 2 * self.factor.diagonal(dim1=-1, dim2=-2).log().sum((-1, -2))

    def logdet_gradients(self, c: Tensor) -> tuple[Tensor, Tensor]:
        inverses = cholesky_inverse(self.factor)
        weighted = (self.eigenvalues[..., None, None] * inverses).sum(-3)
        return weighted, (inverses * c.unsqueeze(-3)).sum((-1, -2))


@dataclass(frozen=True)
class EigenBlocks(Blocks):
    """R_j = V diag(1 + λ_j μ)^{−½} with C = V diag(μ) Vᵀ.

    All r blocks share the matrix V, and no other matrix of size n is stored. Gradients do not pass
    through the eigendecomposition, so eigenvalues may be equal. For example, μ is zero in all
    directions without data.
    """

    eigenvalues: Float[Tensor, "*b r"]
    mu: Float[Tensor, "*b n"]
    v: Float[Tensor, "*b n n"]

    @classmethod
    def of(cls, c: Float[Tensor, "*b n n"], eigenvalues: Float[Tensor, "*b r"]) -> "EigenBlocks":
        mu, v = torch.linalg.eigh(c.detach())
        return cls(eigenvalues.detach(), mu.clamp_min(0), v)

    @property
    def _shrinkage(self) -> Float[Tensor, "*b r n"]:
        """1/(1 + λ_j μ_i)."""
        return 1 / (1 + self.eigenvalues.unsqueeze(-1) * self.mu.unsqueeze(-2))

    def half(self, v: Tensor) -> Tensor:
        return _times(v, self.v) * self._shrinkage.sqrt().unsqueeze(-2)

    def other_half(self, v: Tensor) -> Tensor:
        return _times(v * self._shrinkage.sqrt().unsqueeze(-2), self.v.mT)

    def forms(self, v: Tensor) -> Tensor:
        return self._shrinkage @ (v @ self.v).square().mT

    @property
    def width(self) -> int:
        return sum(self._shrinkage.shape[-2:])

    def logdet(self) -> Tensor:
        return -self._shrinkage.log().sum((-1, -2))

    def logdet_gradients(self, c: Tensor) -> tuple[Tensor, Tensor]:
        shrinkage = self._shrinkage
        weights = self.eigenvalues.unsqueeze(-2) @ shrinkage  # Σ_j λ_j/(1 + λ_j μ_i)
        traces = (shrinkage @ self.mu.unsqueeze(-1)).squeeze(-1)
        return (self.v * weights) @ self.v.mT, traces


@dataclass(frozen=True)
class DualBlocks(Blocks):
    """R_j = I + Q diag(q_j) Qᵀ for C = ΨᵀΨ, if Ψ has few rows.

    Here Q = ΨᵀV, ΨΨᵀ = V diag(μ) Vᵀ, and q_j = ((1 + λ_j μ)^{−½} − 1)/μ, which is computed without
    division by μ. R_j is symmetric.
    """

    eigenvalues: Float[Tensor, "*b r"]
    mu: Float[Tensor, "*b n"]
    q: Float[Tensor, "*b M n"]

    @property
    def _squares(self) -> Float[Tensor, "*b r n"]:
        """1 + λ_j μ_i."""
        return 1 + self.eigenvalues.unsqueeze(-1) * self.mu.unsqueeze(-2)

    def half(self, v: Tensor) -> Tensor:
        root = self._squares.sqrt()
        # q_j without cancellation, also for μ = 0:
        # ((1 + λμ)^{−½} − 1)/μ = −λ / (√(1 + λμ) (1 + √(1 + λμ))).
        weights = -self.eigenvalues.unsqueeze(-1) / (root * (1 + root))
        return v + _times(_times(v, self.q) * weights.unsqueeze(-2), self.q.mT)

    def other_half(self, v: Tensor) -> Tensor:
        return self.half(v)

    def forms(self, v: Tensor) -> Tensor:
        explained = self.eigenvalues.unsqueeze(-1) / self._squares @ (v @ self.q).square().mT
        # This is a difference of nearly equal values where the data determine the field.
        return (v.square().sum(-1).unsqueeze(-2) - explained).clamp_min(0)

    @property
    def width(self) -> int:
        return sum(self._squares.shape[-2:]) + self.q.shape[-2]


def _times(v: Float[Tensor, "*b r m n"], a: Float[Tensor, "*b n n"]) -> Float[Tensor, "*b r m n"]:
    """v_j a as one product. A batched product would copy `a` for every block."""
    return (v.flatten(-3, -2) @ a).unflatten(-2, v.shape[-3:-1])


def blocks_of(
    c: Float[Tensor, "*b n n"], eigenvalues: Float[Tensor, "*b r"]
) -> CholeskyBlocks | EigenBlocks:
    """The blocks in the cheaper algebra, with Cholesky factors if they are differentiated."""
    many = eigenvalues.shape[-1] >= _MANY
    differentiated = torch.is_grad_enabled() and c.requires_grad
    return (EigenBlocks if many and not differentiated else CholeskyBlocks).of(c, eigenvalues)


# The posterior of the feature weights of a separable kernel.


class Response(NamedTuple):
    """E[θ] for data that are constants: Σ_j a_j d_j m_jᵀ, with columns a, directions d, means m.

    As a dense array, it would have p·M·r entries.
    """

    columns: Float[Tensor, "*b j M"]  # a_j
    directions: Float[Tensor, "*b r j"]  # d_j
    means: Float[Tensor, "*b j p"]  # m_j

    def to(self, constants: Float[Tensor, "p k"] | None) -> Float[Tensor, "*b F k"]:
        """E[θ] for data that are each of k constants, or for the data 1⊗I_p."""
        means = self.means if constants is None else self.means @ constants
        parts = self.columns, self.directions, means
        return torch.einsum("...jm,...rj,...jk->...mrk", *parts).flatten(-3, -2)


@dataclass(frozen=True)
class KroneckerPosterior(WeightPosterior):
    """The posterior of separable kernels: blocks P_j = (I + λ_j C)⁻¹ in the eigenbasis of G."""

    response: Response
    u: Float[Tensor, "*b r r"]
    inverse: Blocks  # Cov[θ] in this basis

    @property
    def rotated(self) -> Float[Tensor, "*b p r"]:
        """L U: the mixing matrix in the eigenbasis."""
        return self.expansion.mixing @ self.u

    @property
    def _width(self) -> int:
        return self.inverse.width + self.num_outputs**2

    def response_to(self, constants=None):
        return self.response.to(constants)

    def absorbed(self, x: Tensor) -> Tensor:
        values = self._columns(x) @ self.response.columns.mT  # (*b, n, j)
        outputs = self.expansion.mixing @ self.response.directions
        return torch.einsum("...nj,...pj,...jq->...npq", values, outputs, self.response.means)

    def weight_covariance(self, v: Tensor) -> Tensor:
        rotated = torch.einsum("...rj,...crk->...jkc", self.u, self._by_column(v))
        return self._from_blocks(self.inverse.solve(rotated))

    def weight_root(self, v: Tensor) -> Tensor:
        rows = torch.einsum("...cjk->...jkc", self._by_column(v))
        return self._from_blocks(self.inverse.other_half(rows))

    def _by_column(self, v: Float[Tensor, "*b F k"]) -> Float[Tensor, "*b M r k"]:
        return v.unflatten(-2, (self.expansion.num_columns, -1))

    def _from_blocks(self, rows: Float[Tensor, "*b r k M"]) -> Float[Tensor, "*b F k"]:
        return torch.einsum("...rj,...jkc->...crk", self.u, rows).flatten(-3, -2)

    def root_of(self, features: Tensor) -> Tensor:
        features = features.unflatten(-1, (self.expansion.num_columns, -1))  # (*b, m, M, r)
        rotated = torch.einsum("...mcr,...rj->...jmc", features, self.u)
        return self.inverse.half(rotated).transpose(-3, -2).flatten(-2)

    def _columns(self, x: Float[Tensor, "*b n d"]) -> Float[Tensor, "*b n M"]:
        """φ(x) S."""
        return self.expansion.phi.values(x.double()) * self.expansion.scales.mT

    def _block_roots(self, x: Float[Tensor, "*b n d"]) -> Float[Tensor, "*b r n M"]:
        """φ(x) S R_j with R_j R_jᵀ = P_j, for each block j."""
        return self.inverse.half(self._columns(x).unsqueeze(-3))

    def root(self, x: Tensor) -> Tensor:
        roots = self._block_roots(x)
        if roots.shape[-2] < roots.shape[-1] and not roots.requires_grad:
            roots = torch.linalg.qr(roots.mT, mode="r").R.mT  # one column per point
        root = torch.einsum("...pr,...rnc->...nprc", self.rotated, roots)
        return root.flatten(-4, -3).flatten(-2)

    def covariance(self, x: Tensor) -> Tensor:
        root = self._block_roots(x)
        blocks = root @ root.mT  # (*b, r, n, n)
        outer = torch.einsum("...pr,...qr,...rnm->...npmq", self.rotated, self.rotated, blocks)
        return outer.flatten(-4, -3).flatten(-2)

    def _variance(self, x: Tensor) -> Tensor:
        return self.inverse.forms(self._columns(x)).mT @ self.rotated.square().mT

    def _blocks(self, x: Tensor) -> Tensor:
        each = self.inverse.forms(self._columns(x))  # (r, n)
        return torch.einsum("pr,qr,rn->npq", self.rotated, self.rotated, each)

    def of_part(self, expansion, kernel):
        if expansion is None:
            return self
        raise no_part()

    def detached(self) -> "KroneckerPosterior":
        response = Response(*(t.detach() for t in self.response))
        return replace(super().detached(), response=response, inverse=self.inverse.detach())


# BᵀA⁻¹B and log|A| for A = I + C⊗G, with closed-form derivatives.
#
# The columns of B are vec Z and s⊗I, so that every block has two columns. With G = U diag(λ) Uᵀ and
# P_j = (I + λ_j C)⁻¹, the columns of A⁻¹B have the parts t_j = P_j (Z U)_j and p_j = P_j s.
#
# Derivatives of eigenvectors would have differences λ_i − λ_j in denominators. The derivative by G
# avoids them: it follows from ∂(A⁻¹) = −A⁻¹ ∂A A⁻¹ for the quadratic form, and in the basis U it is
# diagonal for the log-determinant.


@dataclass(frozen=True)
class Solution:
    """A⁻¹B in the basis of the eigenvectors, with the quadratic form BᵀA⁻¹B."""

    u: Float[Tensor, "*b r r"]
    blocks: CholeskyBlocks | EigenBlocks
    t: Float[Tensor, "*b r n"]
    p: Float[Tensor, "*b r n"]
    forms: Float[Tensor, "*b r 2 2"]  # quadratic forms of [(Z U)_j, s] under P_j

    @classmethod
    def of(
        cls,
        c: Float[Tensor, "*b n n"],
        g: Float[Tensor, "*b r r"],
        z: Float[Tensor, "*b n r"],
        s: Float[Tensor, "*b n 1"],
    ) -> "Solution":
        """The solution from one eigendecomposition of G, differentiable by C, Z and s only."""
        eigenvalues, u = torch.linalg.eigh(g)
        return cls.with_blocks(u, blocks_of(c, eigenvalues.clamp_min(0)), z, s)

    @classmethod
    def with_blocks(
        cls,
        u: Float[Tensor, "*b r r"],
        blocks: CholeskyBlocks | EigenBlocks,
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
    """BᵀA⁻¹B and log|A| for A = I + C⊗G and B = [vec Z, s⊗I].

    Rows of Z belong to C, columns to G. No eigenvectors are differentiated, so that eigenvalues may
    be equal.
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
        ctx.solution = solution  # no outputs, which would be a reference cycle
        quad = solution.quad
        return quad, solution.blocks.logdet().expand(quad.shape[:-2])

    @staticmethod
    def backward(ctx, grad_quad, grad_logdet):
        c, g, z, s = ctx.saved_tensors
        if torch.is_grad_enabled():
            values = InvQuadLogdet.apply(*kronecker_dense(c, g, z, s))
            return gradients_with_graph(values, (c, g, z, s), (grad_quad, grad_logdet))
        u, blocks, t, p = ctx.solution.u, ctx.solution.blocks, ctx.solution.t, ctx.solution.p
        quad = 0.5 * (grad_quad + grad_quad.mT)
        square, mixed = quad[..., :1, :1], u.mT @ quad[..., 1:, :1]  # (*b, 1, 1), (*b, r, 1)
        ones = u.mT @ quad[..., 1:, 1:] @ u
        # M = A⁻¹B ∂/∂(BᵀA⁻¹B), with the columns of Z and, for each j, the column of s⊗u_j
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
