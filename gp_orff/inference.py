"""Evidence of vector observations under an expansion.

With noise covariance Σ (p×p, shared by all points), columns c and directions M of the features,

    A = I_F + C[c,c] ∘ (M Σ⁻¹ Mᵀ) ,   b = Σ_j (Z[c] Σ⁻¹ ∘ M)[:, j] ,
    yᵀ(K + I⊗Σ)⁻¹y = tr(Σ⁻¹Y₂) − bᵀA⁻¹b ,   log|K + I⊗Σ| = log|A| + N log|Σ| .

For separable kernels A = I + S C S ⊗ LᵀΣ⁻¹L: r factorisations of size 2D after one of size r.
Where there are fewer numbers than features, the dual: K + I⊗Σ itself.
"""

from functools import singledispatch
from typing import NamedTuple

import torch
from jaxtyping import Float
from linear_operator.utils.cholesky import psd_safe_cholesky
from torch import Tensor
from torch.autograd import Function

from gp_orff.expansion import Expansion, FeatureExpansion, KroneckerExpansion
from gp_orff.statistics import Statistics


class Noise(NamedTuple):
    """The noise covariance Σ of one observation, with its inverse and log-determinant."""

    covariance: Float[Tensor, "*b p p"]
    precision: Float[Tensor, "*b p p"]
    logdet: Float[Tensor, "*b"]

    @classmethod
    def of(cls, covariance: Float[Tensor, "*b p p"]) -> "Noise":
        """Raises ValueError where Σ is not positive definite."""
        covariance = covariance.double()
        factor, info = torch.linalg.cholesky_ex(covariance)
        diagonal = factor.diagonal(dim1=-1, dim2=-2)
        size = covariance.diagonal(dim1=-1, dim2=-2).amax().sqrt()
        eps = torch.finfo(covariance.dtype).eps
        if info.any() or not (diagonal > 10 * eps**0.5 * size).all():
            raise ValueError(
                "expected a positive definite noise covariance, got a singular one, "
                f"{covariance.detach().tolist()}; give the likelihood a global noise "
                "(has_global_noise=True) or a task noise of full rank"
            )
        return cls(covariance, torch.cholesky_inverse(factor), 2 * diagonal.log().sum(-1))


class Evidence(NamedTuple):
    """The two terms of a Gaussian log density: −½ (inv_quad + logdet + N p log 2π)."""

    inv_quad: Float[Tensor, "*b"]  # yᵀ (K + I⊗Σ)⁻¹ y
    logdet: Float[Tensor, "*b"]  # log |K + I⊗Σ|


def prefers_dual(expansion: Expansion, num_points: int) -> bool:
    """Whether factorising K + I⊗Σ (N·p square) is cheaper than factorising A."""
    return (num_points * expansion.num_outputs) ** 3 < expansion.cholesky_cost


def evidence(
    expansion: Expansion, x: Float[Tensor, "*b N d"], y: Float[Tensor, "*b N p"], noise: Noise
) -> Evidence:
    """Evidence of observations y at x, by the cheaper of the two algebras."""
    if prefers_dual(expansion, x.shape[-2]):
        covariance = noisy_covariance(expansion.features(x.double()), noise.covariance)
        return Evidence(*InvQuadLogdet.apply(covariance, y.double().flatten(-2)))
    return statistics_evidence(expansion, Statistics.of(x, y, expansion.omega), noise)


def noisy_covariance(
    features: Float[Tensor, "*b N*p F"], noise: Float[Tensor, "*b p p"]
) -> Float[Tensor, "*b N*p N*p"]:
    """ΦΦᵀ + I⊗Σ."""
    num_points = features.shape[-2] // noise.shape[-1]
    eye = torch.eye(num_points, dtype=features.dtype, device=features.device)
    return features @ features.mT + white_blocks(eye, noise)


def white_blocks(
    same: Float[Tensor, "n m"], noise: Float[Tensor, "*b p p"]
) -> Float[Tensor, "*b n*p m*p"]:
    """Σ wherever a row and a column are the same point."""
    blocks = torch.einsum("nm,...ij->...nimj", same, noise)
    return blocks.flatten(-4, -3).flatten(-2, -1)


def statistics_evidence(expansion: Expansion, statistics: Statistics, noise: Noise) -> Evidence:
    """Evidence from the statistics alone: one factorisation and one inverse with its gradient."""
    explained, logdet = _explained(expansion, statistics, noise)
    total = (noise.precision * statistics.second_moment).sum((-1, -2))
    return Evidence(total - explained, logdet + statistics.count * noise.logdet)


@singledispatch
def _explained(expansion: Expansion, statistics: Statistics, noise: Noise) -> tuple[Tensor, Tensor]:
    """bᵀA⁻¹b and log|A|."""
    raise NotImplementedError(type(expansion).__name__)


@_explained.register
def _(expansion: FeatureExpansion, statistics: Statistics, noise: Noise) -> tuple[Tensor, Tensor]:
    return InvQuadLogdet.apply(*normal_equations(expansion, statistics, noise))


@_explained.register
def _(expansion: KroneckerExpansion, statistics: Statistics, noise: Noise) -> tuple[Tensor, Tensor]:
    return KroneckerInvQuadLogdet.apply(*kronecker_equations(expansion, statistics, noise))


def normal_equations(
    expansion: FeatureExpansion, statistics: Statistics, noise: Noise
) -> tuple[Float[Tensor, "*b F F"], Float[Tensor, "*b F"]]:
    """A and b."""
    m, precision = expansion.directions, noise.precision
    gram = expansion.gather(expansion.gather(statistics.gram).mT)  # C[c,c], symmetric
    a = gram * (m @ precision @ m.mT)
    a = a + torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
    b = (expansion.gather(statistics.cross @ precision) * m).sum(-1)
    return a, b


def kronecker_equations(
    expansion: KroneckerExpansion, statistics: Statistics, noise: Noise
) -> tuple[Float[Tensor, "*b 2*D 2*D"], Float[Tensor, "*b r r"], Float[Tensor, "*b 2*D r"]]:
    """S C S, G = LᵀΣ⁻¹L and B, with A = I + SCS ⊗ G and b = vec B."""
    scales, mixing = expansion.scales, expansion.mixing
    whitened = noise.precision @ mixing  # Σ⁻¹L
    gram = scales * statistics.gram * scales.mT
    return gram, mixing.mT @ whitened, scales * (statistics.cross @ whitened)


class InvQuadLogdet(Function):
    """bᵀA⁻¹b and log|A| of a positive definite A, differentiated by ∂log|A| = A⁻¹,
    ∂(bᵀA⁻¹b) = −uuᵀ dA + 2u db with u = A⁻¹b, instead of through the factorisation."""

    @staticmethod
    def forward(ctx, a: Float[Tensor, "*b F F"], b: Float[Tensor, "*b F"]):
        factor = psd_safe_cholesky(a)
        u = torch.cholesky_solve(b.unsqueeze(-1), factor)
        ctx.save_for_backward(a, b, factor, u)
        logdet = 2 * factor.diagonal(dim1=-1, dim2=-2).log().sum(-1)
        return (b * u.squeeze(-1)).sum(-1), logdet

    @staticmethod
    def backward(ctx, grad_quad, grad_logdet):
        a, b, factor, u = ctx.saved_tensors
        if torch.is_grad_enabled():  # a second derivative is wanted: with the graph of A and b
            factor = psd_safe_cholesky(a)
            u = torch.cholesky_solve(b.unsqueeze(-1), factor)
        grad_quad, grad_logdet = grad_quad[..., None, None], grad_logdet[..., None, None]
        grad_a = grad_logdet * torch.cholesky_inverse(factor) - grad_quad * u @ u.mT
        return grad_a, (2 * grad_quad * u).squeeze(-1)


class KroneckerInvQuadLogdet(Function):
    """The same for A = I + C⊗G, b = vec B (rows c, columns j), by the eigenvectors of G.

    The eigenvectors themselves are never differentiated: equal eigenvalues do no harm.
    """

    @staticmethod
    def forward(ctx, c, g, b):
        eigenvalues, u, factor, b_rotated = diagonalised(c, g, b)
        # T = A⁻¹ vec B, rotated: column j solves (I + λ_j C) t_j = (B U)_j
        t = torch.cholesky_solve(b_rotated, factor)  # (*b, r, 2D, 1)
        ctx.save_for_backward(c, g, b, eigenvalues, u, factor, t)
        logdet = 2 * factor.diagonal(dim1=-1, dim2=-2).log().sum((-1, -2))
        return (b_rotated * t).sum((-1, -2, -3)), logdet

    @staticmethod
    def backward(ctx, grad_quad, grad_logdet):
        c, g, b, eigenvalues, u, factor, t = ctx.saved_tensors
        if torch.is_grad_enabled():  # a second derivative is wanted: by A written out
            values = InvQuadLogdet.apply(*written_out(c, g, b))
            return torch.autograd.grad(
                values, (c, g, b), (grad_quad, grad_logdet), create_graph=True
            )
        grad_quad, grad_logdet = grad_quad[..., None, None], grad_logdet[..., None, None]
        inverses = torch.cholesky_inverse(factor)  # P_j = (I + λ_j C)⁻¹
        solution = t.squeeze(-1).mT @ u.mT  # T: (*b, 2D, r)
        traces = (inverses * c.unsqueeze(-3)).sum((-1, -2))  # tr(P_j C)
        grad_c = grad_logdet * (eigenvalues[..., None, None] * inverses).sum(-3)
        grad_c = grad_c - grad_quad * (solution @ g @ solution.mT)
        grad_g = grad_logdet * ((u * traces.unsqueeze(-2)) @ u.mT)
        grad_g = grad_g - grad_quad * (solution.mT @ c @ solution)
        return grad_c, grad_g, 2 * grad_quad * solution


def written_out(
    c: Float[Tensor, "*b 2*D 2*D"], g: Float[Tensor, "*b r r"], b: Float[Tensor, "*b 2*D r"]
) -> tuple[Float[Tensor, "*b F F"], Float[Tensor, "*b F"]]:
    """I + C⊗G and vec B."""
    a = torch.einsum("...cd,...ij->...cidj", c, g).flatten(-4, -3).flatten(-2)
    return a + torch.eye(a.shape[-1], dtype=a.dtype, device=a.device), b.flatten(-2)


def diagonalised(
    c: Float[Tensor, "*b 2*D 2*D"], g: Float[Tensor, "*b r r"], b: Float[Tensor, "*b 2*D r"]
) -> tuple[Tensor, Tensor, Float[Tensor, "*b r 2*D 2*D"], Float[Tensor, "*b r 2*D 1"]]:
    """G = U diag(λ) Uᵀ, the Cholesky factors of I + λ_j C, and the columns of B U."""
    eigenvalues, u = torch.linalg.eigh(g)
    eigenvalues = eigenvalues.clamp_min(0)
    identity = torch.eye(c.shape[-1], dtype=c.dtype, device=c.device)
    factor = psd_safe_cholesky(identity + eigenvalues[..., None, None] * c.unsqueeze(-3))
    return eigenvalues, u, factor, (b @ u).mT.unsqueeze(-1)
