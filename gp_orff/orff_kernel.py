"""`ORFFKernel` and its prediction strategy: all that knows gpytorch's ExactGP protocol."""

import torch
from gpytorch import settings
from gpytorch.kernels import AdditiveKernel, Kernel, ScaleKernel
from gpytorch.likelihoods import Likelihood
from gpytorch.models.exact_prediction_strategies import DefaultPredictionStrategy
from gpytorch.utils.memoize import cached
from jaxtyping import Float
from linear_operator.operators import LinearOperator, ZeroLinearOperator
from torch import Tensor, nn

from gp_orff.expansion import Expansion, draw, expand
from gp_orff.frequencies import Rule
from gp_orff.operators import FeatureCovariance, NoisyFeatureCovariance, PosteriorCovariance
from gp_orff.posterior import WeightPosterior
from gp_orff.terms import terms
from gp_orff.wrapper import WrapperKernel


class ORFFKernel(WrapperKernel):
    r"""Operator-valued Fourier features of a kernel, for any gpytorch `ExactGP`.

    K(x, z) ≈ Φ(x) Φ(z)ᵀ with the features Φ of the given kernel tree: curl-free, divergence-free,
    Helmholtz, gpytorch's `MultitaskKernel`, scalar kernels, their sums and scaled forms. The
    model, its likelihood and `ExactMarginalLogLikelihood` stay as they are; N points with F
    features then cost N·F² instead of (N·p)³ in training *and* in prediction, and no N·p × N·p
    or N·p × F matrix is held. Where N·p is smaller than F, gpytorch's N·p × N·p algebra is used.

    Brault et al. 2016 (operator-valued features); Minh 2016, Theorem 3.

    Args:
        kernel: the kernel to approximate; its hyperparameters are the same modules, and are
            trained through the features.
        frequencies: a rule, such as `gp_orff.MonteCarlo(256, seed=0)`.
        num_dims: the number of input columns, where the kernel does not tell it (a scalar
            kernel without ARD or active_dims).

    Attributes:
        frequencies: the drawn frequencies, one `Draw` for each leaf of the kernel tree.
        num_features: F.

    Raises:
        NotImplementedError: a kernel whose spectrum is not registered.
        ValueError: terms with different numbers of outputs, or an unknown number of inputs.

    Example:
        >>> import gpytorch, gp_orff
        >>> kernel = gp_orff.CurlFreeKernel(gpytorch.kernels.RBFKernel(ard_num_dims=2), num_dims=2)
        >>> kernel = gp_orff.ORFFKernel(kernel, gp_orff.MonteCarlo(256, seed=0))
        >>> kernel.num_features
        512
    """

    def __init__(self, kernel: Kernel, frequencies: Rule, *, num_dims: int | None = None):
        super().__init__()
        parts = terms(kernel)
        outputs = sorted({term.factor.num_outputs for term in parts})
        if len(outputs) != 1:
            raise ValueError(
                f"ORFFKernel expects terms with one number of outputs, got {outputs}; wrap scalar "
                "kernels in gpytorch.kernels.MultitaskKernel"
            )
        self.num_outputs = outputs[0]
        self.base_kernel = kernel
        self.frequencies = nn.ModuleList(draw(kernel, frequencies, num_dims))
        columns = [
            (max(part.active_dims) + 1) if part.active_dims is not None else drawn.z.shape[-1]
            for part, drawn in zip(parts, self.frequencies, strict=True)
        ]
        self._num_inputs = max(columns)  # at least; exactly, where a term sees all columns
        self._sees_all = any(part.active_dims is None for part in parts)

    @property
    def num_features(self) -> int:
        return self._expansion(self._num_inputs).num_features

    @property
    def is_stationary(self) -> bool:
        return True

    def num_outputs_per_input(self, x1: Tensor, x2: Tensor) -> int:
        return self.num_outputs

    def _expansion(self, num_inputs: int) -> Expansion:
        return expand(self.base_kernel, self.frequencies, num_inputs)

    def forward(
        self,
        x1: Float[Tensor, "*b n d"],
        x2: Float[Tensor, "*b m d"],
        diag: bool = False,
        last_dim_is_batch: bool = False,
    ) -> FeatureCovariance | Float[Tensor, "*b n*p"]:
        if last_dim_is_batch:
            raise ValueError("ORFFKernel does not take last_dim_is_batch=True; use active_dims")
        self._check_inputs(x1)
        if x2 is not x1:
            self._check_inputs(x2)
        covariance = FeatureCovariance.of(x1, x2, self._expansion(x1.shape[-1]))
        return covariance._diagonal() if diag else covariance

    def _check_inputs(self, x: Tensor) -> None:
        if not x.is_floating_point():
            raise TypeError(
                f"ORFFKernel expects floating-point inputs, got {x.dtype}; pass x.double()"
            )
        if x.dtype != self.dtype:
            raise TypeError(
                f"ORFFKernel has {self.dtype} hyperparameters and expects inputs like them, got "
                f"{x.dtype}; convert the model (model.double()) or the inputs (x.float())"
            )
        expected, found = self._num_inputs, x.shape[-1]
        if found < expected or (self._sees_all and found != expected):
            raise ValueError(
                f"ORFFKernel expects inputs with {expected} columns, got {found}; pass num_dims= "
                "or select columns with active_dims"
            )
        if x.shape[-2] == 0:
            raise ValueError("ORFFKernel expects at least one point, got an empty set")
        invalid = int((~torch.isfinite(x)).any(-1).sum())
        if invalid:
            raise ValueError(
                f"ORFFKernel expects finite inputs, got {invalid} points with NaN or infinite "
                "coordinates; drop them"
            )

    def prediction_strategy(
        self, train_inputs, train_prior_dist, train_labels, likelihood: Likelihood
    ) -> "ORFFPredictionStrategy":
        return ORFFPredictionStrategy(train_inputs, train_prior_dist, train_labels, likelihood)


class ORFFPredictionStrategy(DefaultPredictionStrategy):
    """Predictions from the posterior of the feature weights, computed once and cached.

    Where the training covariance is not features plus I⊗Σ, gpytorch's default takes over.
    """

    @property
    @cached(name="noisy_covariance")
    def _noisy_covariance(self) -> LinearOperator:
        return self.lik_train_train_covar.evaluate_kernel()

    @property
    def _structured(self) -> bool:
        return (
            isinstance(self._noisy_covariance, NoisyFeatureCovariance)
            and settings.observation_nan_policy.value() == "ignore"
        )

    @property
    @cached(name="weight_posterior")
    def weight_posterior(self) -> WeightPosterior:
        """p(θ | y), detached unless `settings.detach_test_caches` is off."""
        residuals = self.train_labels - self.train_prior_dist.loc
        posterior = self._noisy_covariance.posterior(residuals)
        return posterior.detached() if settings.detach_test_caches.on() else posterior

    def exact_prediction(
        self,
        test_mean: Tensor,
        test_test_covar: LinearOperator,
        test_train_covar: LinearOperator,
    ) -> tuple[Tensor, LinearOperator]:
        if not (self._structured and isinstance(test_test_covar, FeatureCovariance)):
            return super().exact_prediction(test_mean, test_test_covar, test_train_covar)
        x, posterior = test_test_covar.x1, self.weight_posterior
        mean = test_mean + posterior.mean(x).flatten(-2).to(test_mean.dtype)
        if settings.skip_posterior_variances.on():
            return mean, ZeroLinearOperator(*test_test_covar.shape)
        return mean, PosteriorCovariance(x, posterior)


def _is_features(kernel: Kernel) -> bool:
    if isinstance(kernel, AdditiveKernel):
        return all(_is_features(term) for term in kernel.kernels)
    if isinstance(kernel, ScaleKernel):
        return _is_features(kernel.base_kernel)
    return isinstance(kernel, ORFFKernel)


def _additive_prediction_strategy(
    self: AdditiveKernel, train_inputs, train_prior_dist, train_labels, likelihood
) -> DefaultPredictionStrategy:
    strategy = ORFFPredictionStrategy if _is_features(self) else DefaultPredictionStrategy
    return strategy(train_inputs, train_prior_dist, train_labels, likelihood)


# gpytorch's ScaleKernel asks its base kernel for a prediction strategy, its AdditiveKernel asks
# nobody. Sums made of ORFFKernels alone get theirs; every other sum keeps gpytorch's default.
AdditiveKernel.prediction_strategy = _additive_prediction_strategy
