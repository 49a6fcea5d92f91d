"""Predictions of an `ExactGP` with our kernels, and how they enter gpytorch."""

import warnings
from copy import deepcopy
from functools import singledispatch, wraps

import torch
from gpytorch import settings
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import AdditiveKernel, Kernel, ScaleKernel
from gpytorch.lazy import LazyEvaluatedKernelTensor
from gpytorch.models import ExactGP
from gpytorch.models.exact_prediction_strategies import DefaultPredictionStrategy
from gpytorch.utils.memoize import add_to_cache, cached
from jaxtyping import Float
from linear_operator import to_dense
from linear_operator.operators import LinearOperator, ZeroLinearOperator, to_linear_operator
from linear_operator.utils.cholesky import psd_safe_cholesky
from linear_operator.utils.warnings import PerformanceWarning
from torch import Tensor

from gp_orff.data.observations import Observations, PointObservations
from gp_orff.data.patterns import DEFAULT, Components, GroupKey
from gp_orff.data.statistics import Statistics
from gp_orff.exact_gp.operators import (
    NoisyFeatureCovariance,
    OfFeatures,
    PointwiseOperator,
    posterior_covariance,
)
from gp_orff.exact_gp.orff_kernel import ORFFKernel
from gp_orff.exact_gp.parts import check_kernels, check_mean, check_noise, check_parts
from gp_orff.features.expansion import Expansion
from gp_orff.inference.exact import ExactPosterior
from gp_orff.inference.posteriors import WeightPosterior, check, plus_white
from gp_orff.kernels.base import FieldKernel, WrapperKernel
from gp_orff.kernels.fields import FieldProductKernel, PotentialKernel
from gp_orff.kernels.separable import SeparableKernel
from gp_orff.kernels.spectral_matrix import SpectralMatrixKernel
from gp_orff.kernels.tree import num_outputs
from gp_orff.symbols.base import Identity

# Predictions of an `ExactGP` with our kernels: exact, or from the posterior of feature weights.


class _VectorPredictionStrategy(DefaultPredictionStrategy):
    """gpytorch's exact prediction, with the variance that missing components leave.

    gpytorch predicts the mean from the components that were observed, but the variance as if all
    had been observed.

    Raises:
        NotImplementedError, TypeError, ValueError: as `check_parts`.
    """

    def __init__(self, train_inputs, train_prior_dist, train_labels, likelihood, *args, **kwargs):
        check_parts(train_prior_dist, train_labels, likelihood)
        super().__init__(train_inputs, train_prior_dist, train_labels, likelihood, *args, **kwargs)

    def exact_predictive_covar(self, test_test_covar, test_train_covar):
        policy = settings.observation_nan_policy.value()
        seen = ~self.train_labels.isnan()
        if policy == "ignore" or seen.all():
            return super().exact_predictive_covar(test_test_covar, test_train_covar)
        if settings.skip_posterior_variances.on():
            return ZeroLinearOperator(*test_test_covar.shape)
        if policy == "mask":  # gpytorch leaves out a component if it is missing in any batch
            seen = seen.reshape(-1, seen.shape[-1]).all(0)
        seen = seen.to(self.train_prior_dist.loc.dtype)
        train = to_dense(self.lik_train_train_covar) * seen.unsqueeze(-1) * seen.unsqueeze(-2)
        factor = psd_safe_cholesky(train + torch.diag_embed(1 - seen))
        cross = to_dense(test_train_covar) * seen.unsqueeze(-2)
        half = torch.linalg.solve_triangular(factor, cross.mT, upper=False)
        return to_linear_operator(to_dense(test_test_covar) - half.mT @ half)


class ExactFieldPredictionStrategy(_VectorPredictionStrategy):
    """gpytorch's exact prediction for kernels with several outputs.

    gpytorch's own `get_fantasy_strategy` adds residuals of shapes (n, p) and (n·p) and fails for
    every multitask model. Here the model is conditioned again on all data.
    """

    def get_fantasy_strategy(
        self, inputs, targets, full_inputs, full_targets, full_output, **kwargs
    ) -> "ExactFieldPredictionStrategy":
        likelihood = self.likelihood.get_fantasy_likelihood(**kwargs)
        return type(self)(full_inputs, full_output, full_targets, likelihood)

    def exact_prediction(
        self,
        test_mean: Tensor,
        test_test_covar: LinearOperator,
        test_train_covar: LinearOperator,
    ) -> tuple[Tensor, LinearOperator]:
        lazy = isinstance(test_test_covar, LazyEvaluatedKernelTensor)
        if not (lazy and self.serves_many_points):
            covariances = test_test_covar.evaluate_kernel(), test_train_covar.evaluate_kernel()
            return super().exact_prediction(test_mean, *covariances)
        x, posterior = test_test_covar.x1, self._posterior
        mean = test_mean + posterior.mean(x).flatten(-2).to(test_mean.dtype)
        if settings.skip_posterior_variances.on():
            return mean, ZeroLinearOperator(*test_test_covar.shape)
        return mean, posterior_covariance(x, posterior)

    @property
    def serves_many_points(self) -> bool:
        """Whether marginals at many points can be computed piece by piece: without gaps in the
        data, batches and gradients."""
        prior = self.train_prior_dist
        plain = isinstance(prior.lazy_covariance_matrix, LazyEvaluatedKernelTensor)
        single = settings.observation_nan_policy.value() == "ignore" and not prior.batch_shape
        return plain and single and not torch.is_grad_enabled()

    @property
    @cached(name="field_posterior")
    def _posterior(self) -> ExactPosterior:
        prior = self.train_prior_dist.lazy_covariance_matrix
        factor = psd_safe_cholesky(to_dense(self.lik_train_train_covar).double())
        residuals = (self.train_labels - self.train_prior_dist.loc).double()
        alpha = torch.cholesky_solve(residuals.unsqueeze(-1), factor)
        p, x = num_outputs(prior.kernel), prior.x1.double()
        key, kernel = GroupKey(DEFAULT, Components.every(p)), deepcopy(prior.kernel).double()
        points = PointObservations([Observations(key, x, residuals.reshape(-1, p))])
        return ExactPosterior(
            kernel, [points], {}, factor, alpha, alpha.new_zeros(len(alpha), p), Identity(), ()
        )


class ORFFPredictionStrategy(_VectorPredictionStrategy):
    """Predictions from the posterior of the feature weights, computed once and cached.

    gpytorch's default strategy predicts if the training covariance is not features plus I⊗Σ.
    """

    @property
    @cached(name="noisy_covariance")
    def _noisy_covariance(self) -> LinearOperator:
        return self.lik_train_train_covar.evaluate_kernel()

    @property
    def _structured(self) -> bool:
        """Whether the training covariance is features plus I⊗Σ, without gaps in the data."""
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
        """The sufficient statistics of the training residuals."""
        return self._noisy_covariance.statistics(self._residuals)

    @property
    @cached(name="weight_posterior")
    def weight_posterior(self) -> WeightPosterior:
        """p(θ | y), detached unless `settings.detach_test_caches` is off."""
        latent, detach = self._noisy_covariance.latent, settings.detach_test_caches.on()
        with torch.set_grad_enabled(torch.is_grad_enabled() and not detach):
            posterior = self._posterior_of(latent.expansion, None)
        check(posterior, latent.expansion, self._posterior_of, latent.x1)
        return posterior.detached() if detach else posterior

    def _posterior_of(self, expansion: Expansion, columns: Tensor | None) -> WeightPosterior:
        """The posterior of the features, or of a part of them with these columns."""
        covariance = self._noisy_covariance
        if not covariance.has_sums:
            return covariance.posterior(self._residuals, expansion.double())
        statistics = self.statistics if columns is None else self.statistics.select(columns)
        return covariance.posterior_from(statistics, expansion.double())

    def get_fantasy_strategy(
        self, inputs, targets, full_inputs, full_targets, full_output, **kwargs
    ) -> "ORFFPredictionStrategy":
        """The strategy with more data; statistics add up, and only the new points are visited."""
        likelihood = self.likelihood.get_fantasy_likelihood(**kwargs)
        new = type(self)(full_inputs, full_output, full_targets, likelihood)
        if self._structured and new._structured and self._noisy_covariance.has_sums:
            new_targets = targets.flatten(-2) if full_output.event_shape[1:] else targets
            residuals = new_targets - full_output.loc[..., self.num_train :]
            latent = new._noisy_covariance.latent
            points = latent.x1[..., latent.x1.shape[-2] - inputs[0].shape[-2] :, :]
            new_statistics = Statistics.of(
                points,
                residuals.unflatten(-1, (-1, latent.num_outputs)),
                self._noisy_covariance.latent.expansion.phi,
            )
            add_to_cache(new, "statistics", self.statistics + new_statistics)
        return new

    def exact_prediction(
        self,
        test_mean: Tensor,
        test_test_covar: LinearOperator,
        test_train_covar: LinearOperator,
    ) -> tuple[Tensor, LinearOperator]:
        covariance = test_test_covar.evaluate_kernel()
        if not (self._structured and isinstance(covariance, OfFeatures)):
            cross = test_train_covar.evaluate_kernel()
            return super().exact_prediction(test_mean, covariance, cross)
        latent, delta = covariance.parts  # with the variance that a grid truncates
        x, posterior = latent.x1, self.weight_posterior
        mean = test_mean + posterior.mean(x).flatten(-2).to(test_mean.dtype)
        if settings.skip_posterior_variances.on():
            return mean, ZeroLinearOperator(*test_test_covar.shape)
        if posterior.requires_grad:  # plain autograd reaches everything through a dense matrix
            covariance = plus_white(posterior, delta).covariance(x)
            return mean, to_linear_operator(covariance.to(test_mean.dtype))
        delta = None if delta is None else delta.detach()
        return mean, posterior_covariance(x, plus_white(posterior, delta))


# Prediction strategies of our kernels, and six methods of gpytorch that are replaced.
#
# gpytorch has no hook for sums and products of our kernels, nor for elementwise products of their
# matrices, and none that sees the parts of a model in training, of which it takes some that are
# wrong without an error (see `check_parts`). Models without a kernel or likelihood of this package
# are not affected: each replacement first looks for one, and otherwise does what gpytorch does.


@singledispatch
def _is_features(kernel: Kernel) -> bool:
    """Whether a kernel consists of `ORFFKernel`s, up to sums and scales."""
    return False


@_is_features.register
def _(kernel: ORFFKernel) -> bool:
    return True


@_is_features.register
def _(kernel: ScaleKernel) -> bool:
    return _is_features(kernel.base_kernel)


@_is_features.register
def _(kernel: AdditiveKernel) -> bool:
    return all(map(_is_features, kernel.kernels))


def _is_field(kernel: object) -> bool:
    """Whether a kernel contains a field kernel."""
    fields = (
        FieldKernel,
        PotentialKernel,
        SeparableKernel,
        SpectralMatrixKernel,
        FieldProductKernel,
    )
    return isinstance(kernel, Kernel) and any(isinstance(m, fields) for m in kernel.modules())


def _prediction_strategy(
    self: Kernel, train_inputs, train_prior_dist, train_labels, likelihood
) -> DefaultPredictionStrategy:
    """The strategy of our kernels and of sums of kernels; ScaleKernel asks its base kernel."""
    if _is_features(self):
        strategy = ORFFPredictionStrategy
    elif _is_field(self):
        strategy = ExactFieldPredictionStrategy
    else:
        strategy = DefaultPredictionStrategy
    return strategy(train_inputs, train_prior_dist, train_labels, likelihood)


_gpytorch_product = Kernel.__mul__


def _product(self: Kernel, other: Kernel) -> Kernel:
    """The product of a field kernel and a scalar kernel, in either order."""
    if not (_is_field(self) or _is_field(other)):
        return _gpytorch_product(self, other)
    if any(isinstance(m, ORFFKernel) for kernel in (self, other) for m in kernel.modules()):
        warnings.warn(
            "a product with ORFFKernel has no features: its matrices are dense, at a cost cubic in "
            "the number of points. Multiply inside: ORFFKernel(field * scalar, rule).",
            PerformanceWarning,
            stacklevel=2,
        )
    return FieldProductKernel(self, other) if _is_field(self) else FieldProductKernel(other, self)


def _mul_matrix(self: LazyEvaluatedKernelTensor, other: LinearOperator) -> LinearOperator:
    """The elementwise product of two covariances, as of positions and tasks; gpytorch's product of
    two roots has a cube of numbers."""
    first, second = self.evaluate_kernel(), other.evaluate_kernel()
    if isinstance(second, PointwiseOperator):
        first, second = second, first
    return type(first)._mul_matrix(first, second)


_gpytorch_init = ExactGP.__init__


@wraps(_gpytorch_init)
def _init(self: ExactGP, train_inputs, train_targets, likelihood, *args, **kwargs) -> None:
    check_noise(likelihood)
    _gpytorch_init(self, train_inputs, train_targets, likelihood, *args, **kwargs)


_gpytorch_call = ExactGP.__call__


def _call(self: ExactGP, *args: Tensor, **kwargs: object) -> MultivariateNormal:
    """The distribution at some inputs, of a model whose parts fit each other."""
    check_noise(self.likelihood)
    if not any(isinstance(part, WrapperKernel | FieldKernel) for part in self.modules()):
        return _gpytorch_call(self, *args, **kwargs)
    check_kernels(self)
    for part in self.modules() if self.training else ():
        if isinstance(part, ORFFKernel):
            part.follow_lengthscales()
    try:
        result = _gpytorch_call(self, *args, **kwargs)
    except RuntimeError as error:
        if args and "mean" in str(error):
            check_mean(self, args[0], error)
        raise
    if self.training and settings.debug.on():  # in which all inputs are those of training
        check_parts(result, self.train_targets, self.likelihood)
    return result


_gpytorch_prior_at_tests = ExactGP._get_test_prior_mean_and_covariances


def _prior_at_tests(self: ExactGP, train_inputs, test_inputs, **kwargs: object) -> tuple:
    """The prior at test points, and its covariances.

    gpytorch 1.15.2 evaluates the covariance of all test points with each other before anybody asks
    for it. Under an exact kernel of fields it is left as it is where there are many points.
    """
    strategy = self.prediction_strategy
    if strategy.serves_many_points:
        prior = self.forward(*test_inputs, **kwargs)
        covariance = prior.lazy_covariance_matrix
        many = covariance.shape[-1] + strategy.num_train > settings.max_eager_kernel_size.value()
        if many and isinstance(covariance, LazyEvaluatedKernelTensor) and not prior.batch_shape:
            train = strategy.train_prior_dist.lazy_covariance_matrix.x1
            cross = covariance.kernel(covariance.x1, train)
            return prior.loc, covariance, cross, prior.batch_shape, prior.event_shape, type(prior)
    return _gpytorch_prior_at_tests(self, train_inputs, test_inputs, **kwargs)


for kind in (WrapperKernel, AdditiveKernel, FieldKernel):
    kind.prediction_strategy = _prediction_strategy
Kernel.__mul__ = _product
LazyEvaluatedKernelTensor._mul_matrix = _mul_matrix
ExactGP.__init__, ExactGP.__call__ = _init, _call
ExactGP._get_test_prior_mean_and_covariances = _prior_at_tests
DefaultPredictionStrategy.serves_many_points = False
