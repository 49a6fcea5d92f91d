"""Prior covariances of features, without and with noise."""

import warnings
from collections.abc import Callable

import torch
from jaxtyping import Float
from linear_operator.operators import (
    ConstantDiagLinearOperator,
    KroneckerProductDiagLinearOperator,
    KroneckerProductLinearOperator,
    LinearOperator,
    to_linear_operator,
)
from linear_operator.utils.warnings import PerformanceWarning
from torch import Tensor

from gp_orff import trig
from gp_orff.expansion import Expansion, merge
from gp_orff.inference import Evidence, Noise, evidence, noisy_covariance, prefers_dual
from gp_orff.operators.base import PointwiseOperator, RootedOperator
from gp_orff.posterior import WeightPosterior, weight_posterior


class FeatureCovariance(RootedOperator):
    """K(x₁, x₂) = Φ(x₁) Φ(x₂)ᵀ of one expansion; build it with `FeatureCovariance.of`."""

    def __init__(self, x1: Tensor, x2: Tensor, *tensors: Tensor, rebuild: Callable[..., Expansion]):
        super().__init__(x1, x2, *tensors, rebuild=rebuild)
        self.x1, self.x2 = x1, x2
        self.expansion = rebuild(*tensors)
        self.num_outputs = self.expansion.num_outputs

    @classmethod
    def of(
        cls, x1: Float[Tensor, "*b n d"], x2: Float[Tensor, "*b m d"], expansion: Expansion
    ) -> "FeatureCovariance":
        parts = (x1, x2, *expansion.tensors)
        batch = torch.broadcast_shapes(*(t.shape[:-2] for t in parts))
        if batch:
            parts = tuple(t.expand(*batch, *t.shape[-2:]) for t in parts)
        return cls(*parts, rebuild=expansion.rebuild)

    @property
    def symmetric(self) -> bool:
        return _same(self.x1, self.x2)

    def _size(self) -> torch.Size:
        p = self.num_outputs
        return torch.Size((*self.x1.shape[:-2], self.x1.shape[-2] * p, self.x2.shape[-2] * p))

    def _points(self, rows: slice, cols: slice) -> "FeatureCovariance":
        x1, x2 = self.x1[..., rows, :], self.x2[..., cols, :]
        return FeatureCovariance(x1, x2, *self.expansion.tensors, rebuild=self.expansion.rebuild)

    def _transpose_nonbatch(self) -> "FeatureCovariance":
        return FeatureCovariance.of(self.x2, self.x1, self.expansion)

    def _matmul(self, rhs: Tensor) -> Tensor:
        if rhs.dim() == 1:
            return self._matmul(rhs.unsqueeze(-1)).squeeze(-1)
        expansion, p = self.expansion.double(), self.num_outputs
        values = rhs.double().unflatten(-2, (-1, p)).flatten(-2)  # (*b, m, p·k)
        theta = expansion.feature_values(trig.adjoint(self.x2, expansion.omega, values))
        out = trig.apply(self.x1, expansion.omega, expansion.column_weights(theta))
        return out.unflatten(-1, (p, -1)).flatten(-3, -2).to(self.dtype)

    def to_dense(self) -> Float[Tensor, "*b n*p m*p"]:
        expansion = self.expansion.double()
        left = expansion.features(self.x1.double())
        right = left if self.x1 is self.x2 else expansion.features(self.x2.double())
        return (left @ right.mT).to(self.dtype)

    def _diagonal(self) -> Float[Tensor, "*b n*p"]:
        expansion = self.expansion.double()
        if self.symmetric:
            return expansion.variance(self.x1.double()).flatten(-2).to(self.dtype)
        product = expansion.features(self.x1.double()) * expansion.features(self.x2.double())
        return product.sum(-1).to(self.dtype)

    def _root(self) -> Tensor:
        return self.expansion.double().features(self.x1.double())

    def _mul_constant(self, other: Tensor) -> LinearOperator:
        if (other < 0).any():
            return super()._mul_constant(other)
        return FeatureCovariance.of(self.x1, self.x2, self.expansion.scaled(other))

    def __add__(self, other: LinearOperator | Tensor) -> LinearOperator:
        if isinstance(other, FeatureCovariance):
            if _same(self.x1, other.x1) and _same(self.x2, other.x2):
                merged = merge([self.expansion, other.expansion])
                return FeatureCovariance.of(self.x1, self.x2, merged)
        elif isinstance(other, NoisyFeatureCovariance):
            return other + self
        noise = _noise_covariance(other, self.num_outputs)
        if noise is not None and self.symmetric:
            return NoisyFeatureCovariance(self, noise.expand(*self.batch_shape, *noise.shape[-2:]))
        return _unstructured_sum(self, other, super().__add__)


class NoisyFeatureCovariance(PointwiseOperator):
    """K(x, x) + I⊗Σ, with the algebra of `inference`: no N·p × N·p matrix unless it is small."""

    def __init__(self, latent: FeatureCovariance, noise: Float[Tensor, "*b p p"]):
        super().__init__(latent, noise)
        self.latent, self.noise = latent, noise
        self.num_outputs = latent.num_outputs

    def _size(self) -> torch.Size:
        return self.latent.shape

    def _transpose_nonbatch(self) -> "NoisyFeatureCovariance":
        return self

    def _points(self, rows: slice, cols: slice) -> LinearOperator:
        latent = self.latent._points(rows, cols)
        if rows == cols:
            return NoisyFeatureCovariance(latent, self.noise)
        index = torch.arange(self.latent.x1.shape[-2], device=self.device)
        same = (index[rows].unsqueeze(-1) == index[cols]).to(self.dtype)
        white = torch.einsum("nm,...ij->...nimj", same, self.noise)
        return to_linear_operator(latent.to_dense() + white.flatten(-4, -3).flatten(-2, -1))

    def _matmul(self, rhs: Tensor) -> Tensor:
        if rhs.dim() == 1:
            return self._matmul(rhs.unsqueeze(-1)).squeeze(-1)
        blocks = rhs.unflatten(-2, (-1, self.num_outputs))
        white = (self.noise.unsqueeze(-3) @ blocks).flatten(-3, -2)
        return self.latent._matmul(rhs) + white

    def to_dense(self) -> Float[Tensor, "*b N*p N*p"]:
        features = self.latent.expansion.double().features(self.latent.x1.double())
        return noisy_covariance(features, self.noise.double()).to(self.dtype)

    def _diagonal(self) -> Float[Tensor, "*b N*p"]:
        white = self.noise.diagonal(dim1=-1, dim2=-2).unsqueeze(-2)
        return (self.latent._diagonal().unflatten(-1, (-1, self.num_outputs)) + white).flatten(-2)

    def _mul_constant(self, other: Tensor) -> LinearOperator:
        if (other < 0).any():
            return super()._mul_constant(other)
        return NoisyFeatureCovariance(self.latent * other, self.noise * other[..., None, None])

    def __add__(self, other: LinearOperator | Tensor) -> LinearOperator:
        if isinstance(other, FeatureCovariance):
            latent = self.latent + other
            if isinstance(latent, FeatureCovariance):
                return NoisyFeatureCovariance(latent, self.noise)
        noise = _noise_covariance(other, self.num_outputs)
        if noise is not None:
            return NoisyFeatureCovariance(self.latent, self.noise + noise)
        return _unstructured_sum(self, other, super().__add__)

    def posterior(self, y: Float[Tensor, "*b N*p"]) -> WeightPosterior:
        """The posterior of the feature weights given the residuals y."""
        return weight_posterior(
            self.latent.expansion, self.latent.x1, self._per_point(y), Noise.of(self.noise)
        )

    def _per_point(self, y: Float[Tensor, "*b N*p"]) -> Float[Tensor, "*b N p"]:
        invalid = int((~torch.isfinite(y)).sum())
        if invalid:
            raise ValueError(
                f"expected finite observations, got {invalid} NaN or infinite values among "
                f"{y.numel()}; drop those points, or use gpytorch.settings.observation_nan_policy"
            )
        return y.unflatten(-1, (-1, self.num_outputs))

    def _evidence(self, y: Float[Tensor, "*b N*p"]) -> Evidence:
        return evidence(
            self.latent.expansion.double(),
            self.latent.x1,
            self._per_point(y.double()),
            Noise.of(self.noise),
        )

    def _zeros(self) -> Float[Tensor, "*b N*p"]:
        return torch.zeros(self.shape[:-1], dtype=torch.float64, device=self.device)

    def inv_quad_logdet(
        self,
        inv_quad_rhs: Tensor | None = None,
        logdet: bool | None = False,
        reduce_inv_quad: bool | None = True,
    ) -> tuple[Tensor, Tensor]:
        zero = torch.zeros(self.batch_shape, dtype=self.dtype, device=self.device)
        if inv_quad_rhs is None:
            return zero, self.logdet() if logdet else zero
        rhs = inv_quad_rhs.unsqueeze(-1) if inv_quad_rhs.dim() == 1 else inv_quad_rhs
        if rhs.shape[-1] == 1 and logdet:  # the evidence: both from one pass
            quad, log_determinant = self._evidence(rhs.squeeze(-1))
            quad = quad if reduce_inv_quad else quad.unsqueeze(-1)
            return quad.to(self.dtype), log_determinant.to(self.dtype)
        quad = (rhs * self.solve(rhs)).sum(-2)
        return quad.sum(-1) if reduce_inv_quad else quad, self.logdet() if logdet else zero

    def inv_quad(self, inv_quad_rhs: Tensor, reduce_inv_quad: bool = True) -> Tensor:
        return self.inv_quad_logdet(inv_quad_rhs, False, reduce_inv_quad)[0]

    def logdet(self) -> Float[Tensor, "*b"]:
        return self._evidence(self._zeros()).logdet.to(self.dtype)

    def solve(self, right_tensor: Tensor, left_tensor: Tensor | None = None) -> Tensor:
        """(K + I⊗Σ)⁻¹v = Σ⁻¹v − Σ⁻¹Φ Cov[θ] ΦᵀΣ⁻¹v."""
        rhs = right_tensor.unsqueeze(-1) if right_tensor.dim() == 1 else right_tensor
        solution = self._solve(rhs).to(right_tensor.dtype)
        solution = solution.squeeze(-1) if right_tensor.dim() == 1 else solution
        return solution if left_tensor is None else left_tensor @ solution

    def _solve(self, rhs: Tensor, preconditioner=None, num_tridiag: int | None = 0) -> Tensor:
        if num_tridiag:
            return super()._solve(rhs, preconditioner, num_tridiag)
        rhs, noise = rhs.double(), Noise.of(self.noise)
        latent, p = self.latent, self.num_outputs
        if prefers_dual(latent.expansion, latent.x1.shape[-2]):
            features = latent.expansion.double().features(latent.x1.double())
            return torch.linalg.solve(noisy_covariance(features, noise.covariance), rhs)
        posterior = self.posterior(self._zeros())
        expansion = posterior.expansion

        def whiten(v: Tensor) -> Tensor:  # Σ⁻¹v
            return (noise.precision.unsqueeze(-3) @ v.unflatten(-2, (-1, p))).flatten(-3, -2)

        white = whiten(rhs)
        per_point = white.unflatten(-2, (-1, p)).flatten(-2)
        values = expansion.feature_values(trig.adjoint(latent.x1, expansion.omega, per_point))
        weights = expansion.column_weights(posterior.weight_covariance(values))
        fitted = trig.apply(latent.x1, expansion.omega, weights)
        return white - whiten(fitted.unflatten(-1, (p, -1)).flatten(-3, -2))


def _same(a: Tensor, b: Tensor) -> bool:
    return a is b or (a.shape == b.shape and torch.equal(a, b))


def _noise_covariance(other: object, p: int) -> Float[Tensor, "*b p p"] | None:
    """Σ where `other` is I⊗Σ, as gpytorch's likelihoods and jitter write it; None elsewhere."""
    if isinstance(other, ConstantDiagLinearOperator):
        eye = torch.eye(p, dtype=other.dtype, device=other.device)
        return other.diag_values.unsqueeze(-1) * eye
    if isinstance(other, (KroneckerProductLinearOperator, KroneckerProductDiagLinearOperator)):
        points, *outputs = other.linear_ops
        per_point = isinstance(points, ConstantDiagLinearOperator) and len(outputs) == 1
        if per_point and outputs[0].shape[-1] == p:
            return points.diag_values.unsqueeze(-1) * outputs[0].to_dense()
    return None


def _unstructured_sum(
    covariance: LinearOperator, other: object, add: Callable[[object], LinearOperator]
) -> LinearOperator:
    result = add(other)
    if result is not covariance and covariance.is_square:
        warnings.warn(
            f"{type(covariance).__name__} + {type(other).__name__} is not features plus noise of "
            "the form I⊗Σ: gpytorch's general algebra, cubic in the number of points, takes over. "
            "Use MultitaskGaussianLikelihood or GaussianLikelihood, and put sums of kernels "
            "inside one ORFFKernel.",
            PerformanceWarning,
            stacklevel=3,
        )
    return result
