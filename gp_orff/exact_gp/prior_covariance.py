"""Prior covariances of features, with and without noise."""

import warnings
from collections.abc import Callable

import torch
from jaxtyping import Float
from linear_operator.operators import LinearOperator, to_linear_operator
from linear_operator.utils.warnings import PerformanceWarning
from torch import Tensor

from gp_orff.data.noise.covariances import Noise
from gp_orff.data.statistics import Statistics
from gp_orff.exact_gp.operators import (
    RootedOperator,
    WithWhiteNoise,
    noise_covariance,
    with_one_batch,
)
from gp_orff.features.assemble import merge
from gp_orff.features.expansion import Expansion
from gp_orff.inference.equations import (
    Group,
    NormalEquations,
    equations_of_vectors,
    normal_equations,
    prefers_dual,
)
from gp_orff.inference.quadratic import Evidence
from gp_orff.inference.weight_posterior import WeightPosterior


class FeatureCovariance(RootedOperator):
    """K(x₁, x₂) = Φ(x₁) Φ(x₂)ᵀ of one expansion; made by `FeatureCovariance.of`."""

    def __init__(self, x1: Tensor, x2: Tensor, *tensors: Tensor, rebuild: Callable[..., Expansion]):
        super().__init__(x1, x2, *tensors, rebuild=rebuild)
        self.x1, self.x2 = x1, x2
        self.expansion = rebuild(*tensors)
        self.num_outputs = self.expansion.num_outputs

    @classmethod
    def of(
        cls, x1: Float[Tensor, "*b n d"], x2: Float[Tensor, "*b m d"], expansion: Expansion
    ) -> "FeatureCovariance":
        first, second, *tensors = with_one_batch(x1, x2, *expansion.tensors)
        return cls(first, first if x1 is x2 else second, *tensors, rebuild=expansion.rebuild)

    @property
    def symmetric(self) -> bool:
        return _same(self.x1, self.x2)

    def _size(self) -> torch.Size:
        p = self.num_outputs
        return torch.Size((*self.x1.shape[:-2], self.x1.shape[-2] * p, self.x2.shape[-2] * p))

    def _points(self, rows: slice, cols: slice) -> "FeatureCovariance":
        x1 = self.x1[..., rows, :]
        same = rows == cols and self.x1 is self.x2
        x2 = x1 if same else self.x2[..., cols, :]
        return FeatureCovariance(x1, x2, *self.expansion.tensors, rebuild=self.expansion.rebuild)

    def _transpose_nonbatch(self) -> "FeatureCovariance":
        return FeatureCovariance.of(self.x2, self.x1, self.expansion)

    def _matmul(self, rhs: Tensor) -> Tensor:
        if rhs.dim() == 1:
            return self._matmul(rhs.unsqueeze(-1)).squeeze(-1)
        expansion, p = self.expansion.double(), self.num_outputs
        values = rhs.double().unflatten(-2, (-1, p)).flatten(-2)  # (*b, m, p·k)
        theta = expansion.feature_values(expansion.phi.adjoint(self.x2, values))
        out = expansion.phi.apply(self.x1, expansion.column_weights(theta))
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

    def _mul_matrix(self, other: LinearOperator) -> LinearOperator:
        _warn_lost_structure(f"FeatureCovariance times {type(other).__name__} elementwise")
        return to_linear_operator(self.to_dense() * other.to_dense())

    def __add__(self, other: LinearOperator | Tensor) -> LinearOperator:
        if isinstance(other, FeatureCovariance):
            if _same(self.x1, other.x1) and _same(self.x2, other.x2):
                merged = merge([self.expansion, other.expansion])
                return FeatureCovariance.of(self.x1, self.x2, merged)
        elif isinstance(other, NoisyFeatureCovariance):
            return other + self
        elif self.symmetric:
            noise = noise_covariance(self, other)
            if noise is not None:
                return NoisyFeatureCovariance.of(self, noise)
        return _unstructured_sum(self, other, super().__add__)


class NoisyFeatureCovariance(WithWhiteNoise):
    """K(x, x) + I⊗Σ with the algebra of `inference`; no N·p square matrix unless it is small."""

    def __init__(
        self,
        x: Float[Tensor, "*b N d"],
        noise: Float[Tensor, "*b p p"],
        *tensors: Tensor,
        rebuild: Callable[..., Expansion],
    ):
        super().__init__(x, noise, *tensors, rebuild=rebuild)
        self.latent = FeatureCovariance(x, x, *tensors, rebuild=rebuild)
        self.noise = 0.5 * (noise + noise.mT)  # so that every use has the same gradient
        self.num_outputs = self.latent.num_outputs

    @classmethod
    def of(
        cls, latent: FeatureCovariance, noise: Float[Tensor, "*b p p"]
    ) -> "NoisyFeatureCovariance":
        parts = with_one_batch(latent.x1, noise, *latent.expansion.tensors)
        return cls(*parts, rebuild=latent.expansion.rebuild)

    def __add__(self, other: LinearOperator | Tensor) -> LinearOperator:
        if isinstance(other, FeatureCovariance | NoisyFeatureCovariance):
            noisy = isinstance(other, NoisyFeatureCovariance)
            latent = self.latent + (other.latent if noisy else other)
            if isinstance(latent, FeatureCovariance):
                noise = self.noise + other.noise if noisy else self.noise
                return NoisyFeatureCovariance.of(latent, noise)
        noise = noise_covariance(self, other)
        if noise is not None:
            return NoisyFeatureCovariance.of(self.latent, self.noise + noise)
        return _unstructured_sum(self, other, super().__add__)

    @property
    def prefers_dual(self) -> bool:
        """Whether K + I⊗Σ itself is the cheaper matrix to factorise."""
        return prefers_dual(self.latent.expansion, self.latent.x1.shape[-2])

    def posterior(
        self, y: Float[Tensor, "*b N*p"], expansion: Expansion | None = None
    ) -> WeightPosterior:
        """The posterior of the weights given y, of these features or of another expansion."""
        expansion = self.latent.expansion if expansion is None else expansion
        return self._equations(y, expansion).posterior(self._zero_mean)[0]

    def statistics(self, y: Float[Tensor, "*b N*p"]) -> Statistics:
        """The sufficient statistics of the residuals y."""
        expansion = self.latent.expansion.double()
        return Statistics.of(self.latent.x1, self._per_point(y), expansion.phi)

    def posterior_from(self, statistics: Statistics, expansion: Expansion) -> WeightPosterior:
        """The posterior of an expansion's weights from the statistics of its columns."""
        groups = [Group(statistics, Noise.of(self.noise))]
        return normal_equations(expansion, groups).posterior(self._zero_mean)[0]

    @property
    def _zero_mean(self) -> Float[Tensor, "p"]:
        return torch.zeros(self.num_outputs, dtype=torch.float64, device=self.device)

    def _equations(self, y: Float[Tensor, "*b N*p"], expansion: Expansion) -> NormalEquations:
        noise = Noise.of(self.noise)
        return equations_of_vectors(expansion, self.latent.x1, self._per_point(y), noise)

    def _per_point(self, y: Float[Tensor, "*b N*p"]) -> Float[Tensor, "*b N p"]:
        """y with one row for each point; raises ValueError if it is not finite."""
        invalid = int((~torch.isfinite(y)).sum())
        if invalid:
            raise ValueError(
                f"expected finite observations, got {invalid} NaN or infinite values among "
                f"{y.numel()}; drop those points, or predict under gpytorch.settings."
                'observation_nan_policy("mask"), at a cost cubic in the number of points'
            )
        return y.unflatten(-1, (-1, self.num_outputs))

    def _evidence(self, y: Float[Tensor, "*b N*p"]) -> Evidence:
        return self._equations(y, self.latent.expansion).evidence()

    def _zeros(self) -> Float[Tensor, "*b N*p"]:
        return torch.zeros(self.shape[:-1], dtype=torch.float64, device=self.device)

    def inv_quad_logdet(
        self,
        inv_quad_rhs: Tensor | None = None,
        logdet: bool | None = False,
        reduce_inv_quad: bool | None = True,
    ) -> tuple[Tensor, Tensor]:
        zero = torch.zeros([], dtype=self.dtype, device=self.device)
        if inv_quad_rhs is None:
            return zero.new_empty(0), self.logdet() if logdet else zero
        rhs = inv_quad_rhs.unsqueeze(-1) if inv_quad_rhs.dim() == 1 else inv_quad_rhs
        if rhs.shape[-1] == 1 and logdet:  # the evidence gives both in one pass
            evidence = self._evidence(rhs.squeeze(-1))
            quad, log_determinant = evidence.inv_quad, evidence.logdet
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
        rhs, latent, p = rhs.double(), self.latent, self.num_outputs
        if self.prefers_dual:
            return self._equations(self._zeros(), latent.expansion).solve(rhs)
        noise = Noise.of(self.noise)
        posterior = self.posterior(self._zeros())
        expansion = posterior.expansion

        def whiten(v: Tensor) -> Tensor:  # Σ⁻¹v
            return (noise.precision.unsqueeze(-3) @ v.unflatten(-2, (-1, p))).flatten(-3, -2)

        white = whiten(rhs)
        per_point = white.unflatten(-2, (-1, p)).flatten(-2)
        values = expansion.feature_values(expansion.phi.adjoint(latent.x1, per_point))
        weights = expansion.column_weights(posterior.weight_covariance(values))
        fitted = expansion.phi.apply(latent.x1, weights)
        return white - whiten(fitted.unflatten(-1, (p, -1)).flatten(-3, -2))


def _same(a: Tensor, b: Tensor) -> bool:
    """Whether tensors are equal; differentiable ones must share memory (gpytorch slices them)."""
    if a is b:
        return True
    if a.shape != b.shape or a.requires_grad != b.requires_grad:
        return False
    if a.requires_grad:
        return a.data_ptr() == b.data_ptr() and a.stride() == b.stride()
    return torch.equal(a, b)


def _unstructured_sum(
    covariance: LinearOperator, other: object, add: Callable[[object], LinearOperator]
) -> LinearOperator:
    """gpytorch's sum, with a warning that the structure is lost."""
    result = add(other)
    if result is not covariance and covariance.is_square:
        _warn_lost_structure(f"{type(covariance).__name__} + {type(other).__name__}")
    return result


def _warn_lost_structure(what: str) -> None:
    warnings.warn(
        f"{what} is not features plus noise of the form I⊗Σ: gpytorch's general algebra, cubic in "
        "the number of points, takes over. Use MultitaskGaussianLikelihood or GaussianLikelihood, "
        "and put sums and products of kernels inside one ORFFKernel.",
        PerformanceWarning,
        stacklevel=4,
    )
