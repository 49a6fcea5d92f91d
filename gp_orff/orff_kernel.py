"""`ORFFKernel` and its prediction strategy: all that knows gpytorch's ExactGP protocol."""

import torch
from gpytorch import settings
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import Likelihood
from gpytorch.models.exact_prediction_strategies import DefaultPredictionStrategy
from gpytorch.utils.memoize import add_to_cache, cached
from jaxtyping import Float
from linear_operator.operators import LinearOperator, ZeroLinearOperator, to_linear_operator
from torch import Tensor, nn

from gp_orff.expansion import Expansion
from gp_orff.frequencies import Rule
from gp_orff.inference import white_blocks
from gp_orff.operators import (
    FeatureCovariance,
    NoisyFeatureCovariance,
    NoisyPosteriorCovariance,
    PosteriorCovariance,
)
from gp_orff.posterior import WeightPosterior
from gp_orff.resolution import check_domain, draw, expand, infer_num_dims, input_columns
from gp_orff.statistics import Statistics
from gp_orff.terms import terms
from gp_orff.truncation import GridAccuracy, accuracy, truncated_variance
from gp_orff.trust import check
from gp_orff.wrapper import WrapperKernel, check_inputs


class ORFFKernel(WrapperKernel):
    r"""Operator-valued Fourier features of a kernel, for any gpytorch `ExactGP`.

    K(x, z) ≈ Φ(x) Φ(z)ᵀ with the features Φ of the given kernel tree: curl-free, divergence-free,
    Helmholtz, gpytorch's `MultitaskKernel`, scalar kernels, their sums and scaled forms. The
    model, its likelihood and `ExactMarginalLogLikelihood` stay as they are; N points with F
    features then cost N·F² instead of (N·p)³ in training *and* in prediction, and no N·p × N·p
    or N·p × F matrix is held. Where N·p is smaller than F, the N·p × N·p matrix is factorised
    instead. The algebra is float64; in a float32 model the inputs, the hyperparameters and the
    results are float32, and it is not faster.

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
        if not isinstance(kernel, Kernel):
            raise TypeError(
                f"ORFFKernel expects an instance of a gpytorch kernel first, got {kernel!r}; for "
                "instance ORFFKernel(gpytorch.kernels.RBFKernel(), gp_orff.MonteCarlo(256), "
                "num_dims=2)"
            )
        if isinstance(frequencies, type) or not hasattr(frequencies, "draw"):
            raise TypeError(
                f"ORFFKernel expects a frequency rule second, got {frequencies!r}; for instance "
                "gp_orff.MonteCarlo(256)"
            )
        parts = terms(kernel)
        num_dims = infer_num_dims(parts, num_dims)
        outputs = sorted({term.num_outputs for term in parts})
        if len(outputs) != 1:
            raise ValueError(
                f"ORFFKernel expects terms with one number of outputs, got {outputs}; wrap scalar "
                "kernels in gpytorch.kernels.MultitaskKernel"
            )
        self.num_outputs = outputs[0]
        self.base_kernel = kernel
        self.rule, self._num_dims = frequencies, num_dims
        self.frequencies = nn.ModuleList(draw(kernel, frequencies, num_dims))
        self._num_inputs, self._sees_all = input_columns(parts, num_dims)

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
        check_domain(self.base_kernel, self.frequencies, x1, x2)
        expansion = self._expansion(x1.shape[-1])
        covariance = FeatureCovariance.of(x1, x2, expansion)
        white = truncated_variance(self.base_kernel, self.frequencies, expansion)
        if white is not None and covariance.symmetric:
            covariance = NoisyFeatureCovariance.of(covariance, white.to(x1.dtype))
        return covariance._diagonal() if diag else covariance

    def accuracy(self) -> list[GridAccuracy]:
        """What a `Grid` achieves for each term of the kernel, at its present hyperparameters."""
        return accuracy(self.base_kernel, self.frequencies)

    def redraw(self) -> "ORFFKernel":
        """The rule resolved anew, at the kernel's present hyperparameters; returns the kernel."""
        device = next(self.frequencies.buffers()).device
        self.frequencies = nn.ModuleList(draw(self.base_kernel, self.rule, self._num_dims))
        self.frequencies.to(device=device, dtype=self.dtype)
        return self

    def _check_inputs(self, x: Tensor) -> None:
        check_inputs(self, x)
        expected, found = self._num_inputs, x.shape[-1]
        if found < expected or (self._sees_all and found != expected):
            raise ValueError(
                f"ORFFKernel expects inputs with {expected} columns, got {found}; select columns "
                "with active_dims"
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
    def _residuals(self) -> Float[Tensor, "*b N*p"]:
        return self.train_labels - self.train_prior_dist.loc

    @property
    @cached(name="statistics")
    def statistics(self) -> Statistics:
        """C, Z, Y₂ and N of the training residuals."""
        return self._noisy_covariance.statistics(self._residuals)

    @property
    @cached(name="weight_posterior")
    def weight_posterior(self) -> WeightPosterior:
        """p(θ | y), detached unless `settings.detach_test_caches` is off."""
        expansion = self._noisy_covariance.latent.expansion
        posterior = self._posterior_of(expansion, None)
        latent = self._noisy_covariance.latent
        check(posterior, expansion, self._posterior_of, latent.x1)
        return posterior.detached() if settings.detach_test_caches.on() else posterior

    def _posterior_of(self, expansion: Expansion, columns: Tensor | None) -> WeightPosterior:
        """The posterior of the features or, given their columns, of some of them."""
        covariance = self._noisy_covariance
        if covariance.prefers_dual:
            return covariance.posterior(self._residuals, expansion.double())
        statistics = self.statistics if columns is None else self.statistics.select(columns)
        return covariance.posterior_from(statistics, expansion.double())

    def get_fantasy_strategy(
        self, inputs, targets, full_inputs, full_targets, full_output, **kwargs
    ) -> "ORFFPredictionStrategy":
        """The strategy with more data: statistics add, so that only the new points are visited."""
        likelihood = self.likelihood.get_fantasy_likelihood(**kwargs)
        new = type(self)(full_inputs, full_output, full_targets, likelihood)
        if self._structured and new._structured and not self._noisy_covariance.prefers_dual:
            added = targets.flatten(-2) if full_output.event_shape[1:] else targets
            residuals = added - full_output.loc[..., self.num_train :]
            latent = new._noisy_covariance.latent
            points = latent.x1[..., latent.x1.shape[-2] - inputs[0].shape[-2] :, :]
            more = Statistics.of(
                points,
                residuals.unflatten(-1, (-1, latent.num_outputs)),
                self._noisy_covariance.latent.expansion.phi,
            )
            add_to_cache(new, "statistics", self.statistics + more)
        return new

    def exact_prediction(
        self,
        test_mean: Tensor,
        test_test_covar: LinearOperator,
        test_train_covar: LinearOperator,
    ) -> tuple[Tensor, LinearOperator]:
        latent, white = test_test_covar, None
        if isinstance(latent, NoisyFeatureCovariance):  # with the variance that a grid truncates
            latent, white = latent.latent, latent.noise
        if not (self._structured and isinstance(latent, FeatureCovariance)):
            return super().exact_prediction(test_mean, test_test_covar, test_train_covar)
        x, posterior = latent.x1, self.weight_posterior
        mean = test_mean + posterior.mean(x).flatten(-2).to(test_mean.dtype)
        if settings.skip_posterior_variances.on():
            return mean, ZeroLinearOperator(*test_test_covar.shape)
        if posterior.requires_grad:  # plain autograd reaches everything through a dense matrix
            covariance = posterior.covariance(x).to(test_mean.dtype)
            if white is not None:
                eye = torch.eye(x.shape[-2], dtype=x.dtype, device=x.device)
                covariance = covariance + white_blocks(eye, white)
            return mean, to_linear_operator(covariance)
        covariance = PosteriorCovariance(x, posterior)
        if white is None:
            return mean, covariance
        return mean, NoisyPosteriorCovariance.of(covariance, white.detach())
