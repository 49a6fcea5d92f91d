"""The evidence from VᵀK⁻¹V and log|K|, and BᵀA⁻¹B and log|A| with closed-form derivatives.

With U = A⁻¹B,

    ∂ log|A| = tr(A⁻¹ ∂A) ,    ∂ BᵀA⁻¹B = ∂Bᵀ U + Uᵀ ∂B − Uᵀ ∂A U .

A gradient takes one Cholesky factorisation and one inverse, instead of a derivative of the
factorisation. Second derivatives differentiate ordinary operations of torch.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.autograd import Function
from torch.nn.functional import pad

from gp_orff.kernels.base import cholesky, cholesky_inverse

# The treatment of the constant mean. The data may determine all, some or none of its p components.
# A component that is never observed is not determined, nor is a mean whose symbol is zero.
#
# 1. `seen` = HᵀD⁻¹H has the eigenvalue zero along directions that the data do not determine. Its
#    diagonal is scaled to one first, so that outputs in different units have comparable
#    eigenvalues.
# 2. `_information` restricts HᵀK⁻¹H to the other directions. Columns of zeros make the shape (p, p)
#    for batches. They get ones on the diagonal, so that solutions and determinants exist.
# 3. `best_mean`, `mean_root` and the restricted likelihood work in this basis. Along directions
#    that the data do not determine, the best mean and its covariance are zero.


_ROUNDING = 1e-12  # relative rounding error of a zero eigenvalue


class Evidence(NamedTuple):
    """The terms of the Gaussian log density of y, for every constant mean c of the outputs.

    H are the observed values of a unit mean of each output, such as 1⊗I_p for whole vectors. With
    V = [y, H], and with the noise included in K, the log density is
    −½ ([1 −c] VᵀK⁻¹V [1 −c]ᵀ + log|K| + N p log 2π).

    The data determine c along all directions for which H is not zero, even if they have little
    information under a kernel. The eigenvalues of `seen` = HᵀD⁻¹H decide this, with any variances D
    of the data, such as those of the noise. HᵀK⁻¹H could not decide it: it has rounding errors
    along directions with little information.
    """

    quad: Float[Tensor, "*b 1+p 1+p"]  # Vᵀ (K + I⊗Σ)⁻¹ V
    logdet: Float[Tensor, "*b"]  # log |K + I⊗Σ|
    seen: Float[Tensor, "*b p p"] | None = None  # HᵀD⁻¹H; None if the data determine all of c

    @property
    def inv_quad(self) -> Float[Tensor, "*b"]:
        """yᵀ (K + I⊗Σ)⁻¹ y."""
        return self.quad[..., 0, 0]

    def best_mean(self) -> Float[Tensor, "*b p"]:
        """The constant mean with the largest evidence (generalised least squares).

        Among several such means, it is the one with the smallest norm.
        """
        basis, information = self._information()
        y = basis.mT @ self.quad[..., 1:, :1]
        return (basis @ torch.linalg.solve(information, y)).squeeze(-1)

    def mean_root(self) -> Float[Tensor, "*b p p"]:
        """R with R Rᵀ = (HᵀK⁻¹H)⁻¹, the covariance of the best constant mean.

        The covariance is zero along directions that the data do not determine.
        """
        basis, information = self._information()
        values, vectors, units = _eigen(information)
        root = (vectors * values.rsqrt().unsqueeze(-2)) @ vectors.mT  # for any eigenvectors
        return basis @ (root / units.unsqueeze(-1))

    def unknown_means(self) -> Float[Tensor, "k p"]:
        """Unit vectors along the directions of a constant mean that the data do not determine."""
        if self.seen is None:
            return self.quad.new_zeros(0, self.quad.shape[-1] - 1)
        vectors, unknown = _directions(self.seen.detach())
        return vectors.mT[unknown]

    def _information(self) -> tuple[Float[Tensor, "*b p p"], Float[Tensor, "*b p p"]]:
        """The orthonormal directions that the data determine, and the information along them.

        Directions are columns. Columns of zeros replace the other directions, with ones on the
        diagonal of the information.
        """
        ones = self.quad[..., 1:, 1:]
        if self.seen is None:
            return torch.eye(ones.shape[-1]).to(ones), ones
        vectors, unknown = _directions(self.seen.detach())
        if not unknown.any():
            return vectors, ones
        basis = vectors * ~unknown.unsqueeze(-2)
        return basis, basis.mT @ ones @ basis + torch.diag_embed(unknown.to(ones))

    def contrast(self, mean: Float[Tensor, "*b p"] | None) -> Float[Tensor, "*b 1+p 1"]:
        """[1; −c], which maps V to y − H c. Without a mean, c has the largest evidence."""
        mean = self.best_mean() if mean is None else mean
        return torch.cat([torch.ones_like(mean[..., :1]), -mean], dim=-1).unsqueeze(-1)

    def contrasts(self, mean: Float[Tensor, "*b p"] | None) -> Float[Tensor, "*b 1+p 1+p"]:
        """The matrix that maps V to [y − H c, H]."""
        contrast = self.contrast(mean)
        constants = torch.eye(contrast.shape[-2]).to(contrast)[:, 1:]
        constants = constants.expand(*contrast.shape[:-2], -1, -1)
        return torch.cat([contrast, constants], dim=-1)

    def with_scatter(
        self, terms: Iterable[tuple[Float[Tensor, "k"], Float[Tensor, ""]]]
    ) -> "Evidence":
        """Return the evidence of records from the evidence of their means at sites.

        `terms` are the contributions of the scatter about the means to yᵀK⁻¹y and to log|K|.
        """
        quad, logdet = self.quad, self.logdet
        for squares, change in terms:
            zeros = (0, quad.shape[-1] - 1)
            quad, logdet = quad + pad(squares.sum().reshape(1, 1), zeros * 2), logdet + change
        return Evidence(quad, logdet, self.seen)

    @property
    def logdet_error(self) -> float:
        """The standard error of an estimated log|K + I⊗Σ|."""
        return 0.0

    @property
    def standard_error(self) -> float:
        """The standard error of the log density, in nats."""
        return 0.5 * self.logdet_error

    def log_density(
        self, mean: Float[Tensor, "*b p"] | None, num_values: float
    ) -> Float[Tensor, "*b"]:
        """log p(y) under a constant mean; under the mean with the largest evidence if None."""
        v = self.contrast(mean)
        quad = (v * (self.quad @ v)).sum((-1, -2))
        return -0.5 * (quad + self.logdet + num_values * math.log(2 * math.pi))

    def restricted_log_density(self, num_values: float) -> Float[Tensor, "*b"]:
        """log ∫ p(y | c) dc under a flat prior of the constant mean c (restricted likelihood):

            −½ (log|K| + log|HᵀK⁻¹H| + min_c (y − Hc)ᵀK⁻¹(y − Hc) + (N p − q) log 2π) ,

        along the q directions of c that the data determine.
        """
        basis, information = self._information()
        values, _, units = _eigen(information)
        logdet = (values.log() + 2 * units.log()).sum(-1)
        rank = basis.detach().square().sum((-1, -2))
        return self.log_density(None, num_values) - 0.5 * (logdet - rank * math.log(2 * math.pi))


def _with_unit_diagonal(
    a: Float[Tensor, "*b p p"],
) -> tuple[Float[Tensor, "*b p p"], Float[Tensor, "*b p"]]:
    """D^{−½} A D^{−½} with the diagonal D of A, and D^½.

    Zeros of D are replaced by 1. D^½ is a constant for derivatives.
    """
    size = a.detach().diagonal(dim1=-1, dim2=-2).clamp_min(0.0).sqrt()
    units = torch.where(size > 0, size, 1.0)
    return a / units.unsqueeze(-1) / units.unsqueeze(-2), units


def _eigen(
    a: Float[Tensor, "*b p p"],
) -> tuple[Float[Tensor, "*b p"], Float[Tensor, "*b p p"], Float[Tensor, "*b p"]]:
    """The eigenvalues and eigenvectors of D^{−½} A D^{−½}, and D^½, for positive definite A."""
    scaled, units = _with_unit_diagonal(a)
    values, vectors = torch.linalg.eigh(scaled)
    # rounding may make them negative
    return values.clamp_min(torch.finfo(values.dtype).eps), vectors, units


def _directions(
    seen: Float[Tensor, "*b p p"],
) -> tuple[Float[Tensor, "*b p p"], Bool[Tensor, "*b p"]]:
    """Return an orthonormal basis of constant means, and whether each direction changes no observed
    value.

    Directions that change no value come first. The rank follows from a matrix with unit diagonal,
    so it does not depend on the units of the outputs.
    """
    scaled, units = _with_unit_diagonal(seen)
    shares, vectors = torch.linalg.eigh(scaled)
    unknown = shares <= _ROUNDING * shares[..., -1:]
    if not unknown.any():
        return torch.eye(seen.shape[-1]).to(seen).expand_as(seen), unknown
    null = vectors / units.unsqueeze(-1)  # S c = 0 if D^½ c has the eigenvalue zero
    # The null vectors of the unscaled matrix are not orthogonal. An SVD gives an orthonormal basis
    # whose first columns span them, because columns of zeros have the singular value zero.
    null = null / null.norm(dim=-2, keepdim=True) * unknown.unsqueeze(-2)
    basis, _, _ = torch.linalg.svd(null)
    place = torch.arange(seen.shape[-1], device=seen.device)
    return basis, place < unknown.sum(-1, keepdim=True)


def seen_by(
    design: Float[Tensor, "*b M 1+p"], variances: Float[Tensor, "*b M"]
) -> Float[Tensor, "*b p p"]:
    """HᵀD⁻¹H for V = [y, H] and variances D of y."""
    scaled = design[..., 1:].detach() / variances.detach().sqrt().unsqueeze(-1)
    return scaled.mT @ scaled


def log_determinant(factor: Float[Tensor, "*b F F"]) -> Float[Tensor, "*b"]:
    """log|L Lᵀ|."""
    return 2 * factor.diagonal(dim1=-1, dim2=-2).log().sum(-1)


def solve(
    factor: Float[Tensor, "*b F F"], b: Float[Tensor, "*b F k"]
) -> tuple[Float[Tensor, "*b F k"], Float[Tensor, "*b F k"]]:
    """L⁻¹B and A⁻¹B."""
    half = torch.linalg.solve_triangular(factor, b, upper=False)
    return half, torch.linalg.solve_triangular(factor.mT, half, upper=True)


def gradients_with_graph(
    values: Sequence[Tensor], inputs: Sequence[Tensor], gradients: Sequence[Tensor]
) -> tuple[Tensor | None, ...]:
    """Return gradients with respect to the inputs, from gradients with respect to the values. They
    have a graph for higher derivatives."""
    needed = [t for t in inputs if t.requires_grad]
    options = {"create_graph": True, "allow_unused": True}
    results = iter(torch.autograd.grad(values, needed, gradients, **options))
    return tuple(next(results) if t.requires_grad else None for t in inputs)


class InvQuadLogdet(Function):
    """BᵀA⁻¹B and log|A| for any positive definite A."""

    @staticmethod
    def forward(ctx, a: Float[Tensor, "*b F F"], b: Float[Tensor, "*b F k"]):
        factor = cholesky(a, unit=1.0)
        half, u = solve(factor, b)
        ctx.save_for_backward(a, b, factor, u)
        return half.mT @ half, log_determinant(factor)

    @staticmethod
    def backward(ctx, grad_quad, grad_logdet):
        a, b, factor, u = ctx.saved_tensors
        if torch.is_grad_enabled():  # with the graph of A and B
            factor = cholesky(a, unit=1.0)
            u = torch.cholesky_solve(b, factor)
        inverse = cholesky_inverse(factor)
        grad_a = grad_logdet[..., None, None] * inverse - u @ grad_quad @ u.mT
        return grad_a, u @ (grad_quad + grad_quad.mT)


class MaskedInvQuadLogdet(Function):
    """BᵀA⁻¹B and log|A| for A = I + Σ_g C_g ∘ (M_g P_g M_gᵀ), in few passes over F×F matrices.

    Arguments: B (F, k), then symmetric C_g (F, F), M_g (F, q) and symmetric P_g (q, q) for every g.
    """

    @staticmethod
    def forward(ctx, b: Float[Tensor, "*b F k"], *parts: Tensor):
        factor = cholesky(_masked_sum_in_place(parts), unit=1.0)
        half, u = solve(factor, b)
        ctx.save_for_backward(b, factor, u, *parts)
        return half.mT @ half, log_determinant(factor)

    @staticmethod
    def backward(ctx, grad_quad, grad_logdet):
        b, factor, u, *parts = ctx.saved_tensors
        if torch.is_grad_enabled():
            values = InvQuadLogdet.apply(masked_sum(parts), b)
            return gradients_with_graph(values, (b, *parts), (grad_quad, grad_logdet))
        symmetric = 0.5 * (grad_quad + grad_quad.mT)
        inverse = cholesky_inverse(factor)
        scale = grad_logdet[..., None, None]
        weights = u @ symmetric
        gradients = []
        for index, (c, m, precision) in enumerate(_triples(parts)):
            grad_c = None
            if ctx.needs_input_grad[1 + 3 * index]:
                grad_c = (scale * inverse - weights @ u.mT) * (m @ precision @ m.mT)
            last = index + 1 == len(parts) // 3
            masked_inverse = inverse.mul_(c) if last else inverse * c
            # W m with W = ∂/∂A ∘ C; u uᵀ ∘ C = diag(u) C diag(u)
            products = scale * (masked_inverse @ m)
            weighted = (u.unsqueeze(-1) * m.unsqueeze(-2)).flatten(-2)  # (*b, F, k·q)
            explained = (c @ weighted).unflatten(-1, (u.shape[-1], m.shape[-1]))
            products = products - (weights.unsqueeze(-1) * explained).sum(-2)
            gradients += [grad_c, 2 * products @ precision, m.mT @ products]
        return 2 * weights, *gradients


def _triples(parts: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    return zip(parts[::3], parts[1::3], parts[2::3], strict=True)


def masked_sum(parts: Sequence[Tensor]) -> Float[Tensor, "*b F F"]:
    """I + Σ C ∘ (M P Mᵀ) over triples C, M, P. It is differentiable."""
    if not any(t.requires_grad for t in parts):
        return _masked_sum_in_place(parts)
    a = sum(c * (m @ precision @ m.mT) for c, m, precision in _triples(parts))
    return a + torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)


def _masked_sum_in_place(parts: Sequence[Tensor]) -> Tensor:
    """The sum of `masked_sum` in place, without derivatives."""
    total = None
    for c, m, precision in _triples(parts):
        a = (m @ precision) @ m.mT
        a = a.mul_(c) if a.shape == torch.broadcast_shapes(a.shape, c.shape) else a * c
        total = a if total is None else total.add_(a)
    total.diagonal(dim1=-1, dim2=-2).add_(1)
    return total
