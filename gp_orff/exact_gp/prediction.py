"""Predictions of an `ExactGP` with kernels of this package, and changes of gpytorch for them."""

import warnings
from copy import deepcopy
from functools import singledispatch, wraps

import torch
from gpytorch import Module, settings
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from gpytorch.kernels import AdditiveKernel, Kernel, MultitaskKernel, ProductKernel, ScaleKernel
from gpytorch.lazy import LazyEvaluatedKernelTensor
from gpytorch.likelihoods import (
    FixedNoiseGaussianLikelihood,
    GaussianLikelihood,
    Likelihood,
    MultitaskGaussianLikelihood,
)
from gpytorch.means import Mean
from gpytorch.models import ExactGP
from gpytorch.models.exact_prediction_strategies import DefaultPredictionStrategy
from gpytorch.utils.memoize import add_to_cache, cached
from jaxtyping import Float
from linear_operator import to_dense
from linear_operator.operators import LinearOperator, ZeroLinearOperator, to_linear_operator
from linear_operator.utils.cholesky import psd_safe_cholesky
from linear_operator.utils.warnings import PerformanceWarning
from torch import Tensor

from gp_orff.data.likelihoods import HeavyTails, KnownNoiseLikelihood, TrackLikelihood
from gp_orff.data.observations import Observations, PointObservations
from gp_orff.data.patterns import DEFAULT, Components, GroupKey
from gp_orff.data.statistics import Statistics
from gp_orff.exact_gp.operators import (
    NoisyFeatureCovariance,
    OfFeatures,
    PointwiseOperator,
    check_finite,
    posterior_covariance,
)
from gp_orff.exact_gp.orff_kernel import ORFFKernel
from gp_orff.features.expansion import Expansion
from gp_orff.inference.exact import ExactPosterior
from gp_orff.inference.posteriors import WeightPosterior, check, plus_white
from gp_orff.kernels.base import FieldKernel, WrapperKernel, as_real_tensor, parts_of
from gp_orff.kernels.fields import FieldProductKernel, require_field_products
from gp_orff.kernels.tree import num_outputs
from gp_orff.symbols.base import Identity, required

# Predictions of an `ExactGP` with kernels of this package. They are exact, or follow from the
# posterior of feature weights.


class _VectorPredictionStrategy(DefaultPredictionStrategy):
    """gpytorch's exact prediction with correct variances if components are missing.

    gpytorch computes the mean from the observed components, but the variance as if all components
    were observed.

    Raises:
        NotImplementedError: one of the reasons listed at `check_parts`.
        TypeError: one of the reasons listed at `check_parts`.
        ValueError: one of the reasons listed at `check_parts`.
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
        if policy == "mask":  # gpytorch omits a component if it is missing in any batch
            seen = seen.reshape(-1, seen.shape[-1]).all(0)
        seen = seen.to(self.train_prior_dist.loc.dtype)
        train = to_dense(self.lik_train_train_covar) * seen.unsqueeze(-1) * seen.unsqueeze(-2)
        factor = psd_safe_cholesky(train + torch.diag_embed(1 - seen))
        cross = to_dense(test_train_covar) * seen.unsqueeze(-2)
        half = torch.linalg.solve_triangular(factor, cross.mT, upper=False)
        return to_linear_operator(to_dense(test_test_covar) - half.mT @ half)


class ExactFieldPredictionStrategy(_VectorPredictionStrategy):
    """gpytorch's exact prediction for kernels with several outputs.

    `get_fantasy_strategy` of gpytorch adds residuals of the shapes (n, p) and (n·p), and fails for
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
        """Whether marginals at many points can be computed in pieces.

        This needs data without missing values, no batches, and no gradients.
        """
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
    """Predictions from the posterior of the feature weights, which is computed once and cached.

    If the training covariance is not features plus I⊗Σ, gpytorch's default strategy is used.
    """

    @property
    @cached(name="noisy_covariance")
    def _noisy_covariance(self) -> LinearOperator:
        return self.lik_train_train_covar.evaluate_kernel()

    @property
    def _structured(self) -> bool:
        """Whether the training covariance is features plus I⊗Σ, without missing data."""
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
        """The posterior p(θ | y), detached unless `settings.detach_test_caches` is off."""
        latent, detach = self._noisy_covariance.latent, settings.detach_test_caches.on()
        with torch.set_grad_enabled(torch.is_grad_enabled() and not detach):
            posterior = self._posterior_of(latent.expansion, None)
        check(posterior, latent.expansion, self._posterior_of, latent.x1)
        return posterior.detached() if detach else posterior

    def _posterior_of(self, expansion: Expansion, columns: Tensor | None) -> WeightPosterior:
        """Return the posterior of all features, or of the features with these columns."""
        covariance = self._noisy_covariance
        if not covariance.has_sums:
            return covariance.posterior(self._residuals, expansion.double())
        statistics = self.statistics if columns is None else self.statistics.select(columns)
        return covariance.posterior_from(statistics, expansion.double())

    def get_fantasy_strategy(
        self, inputs, targets, full_inputs, full_targets, full_output, **kwargs
    ) -> "ORFFPredictionStrategy":
        """Return the strategy with more data, by adding the statistics of the new points."""
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


# Checks of the mean, the targets and the likelihood of an `ExactGP` against its kernel.


@singledispatch
def check_noise(likelihood: Likelihood) -> None:
    """Raise an error for likelihoods of this package that `ExactGP` does not support.

    Raises:
        NotImplementedError: the noise is not Gaussian, or several observations share it.
    """


@check_noise.register
def _(likelihood: HeavyTails) -> None:
    if likelihood.has_deg_free:
        raise NotImplementedError(
            f"an ExactGP expects Gaussian noise, got a {type(likelihood).__name__}, whose heavy "
            "tails it would ignore; use gp_orff.VectorFieldGP(kernel, likelihood=likelihood), and "
            "call fit(x, y)"
        )


@check_noise.register
def _(likelihood: TrackLikelihood) -> None:
    raise NotImplementedError(
        "an ExactGP expects noise that is independent between points, got a "
        f"{type(likelihood).__name__}, whose observations share offsets; use "
        "gp_orff.VectorFieldGP(kernel).fit(x, y, track=track, time=time)"
    )


@singledispatch
def _check_sizes(likelihood: Likelihood, count: int, p: int) -> None:
    """Raise an error if a likelihood is not for `count` observations of p values."""


@_check_sizes.register
def _(likelihood: FixedNoiseGaussianLikelihood, count, p) -> None:
    if p > 1:
        raise NotImplementedError(
            f"expected noise of vectors in an ExactGP with {p} outputs, got a "
            f"{type(likelihood).__name__}, whose noise gpytorch ignores; use "
            f"gp_orff.KnownNoiseLikelihood(num_tasks={p}, noise=noise)"
        )


@_check_sizes.register
def _(likelihood: KnownNoiseLikelihood, count, p) -> None:
    given = "no" if likelihood.noise is None else len(likelihood.noise)  # observations
    if (likelihood.num_tasks, given) != (p, count):
        raise ValueError(
            f"expected the noise of {count} observations of {p} values in an ExactGP, got a "
            f"KnownNoiseLikelihood with num_tasks={likelihood.num_tasks} and noise of {given} "
            f"observations; use gp_orff.KnownNoiseLikelihood(num_tasks={p}, noise=noise)"
        )


@_check_sizes.register(GaussianLikelihood)
@_check_sizes.register(MultitaskGaussianLikelihood)
def _(likelihood, count, p) -> None:
    expected = getattr(likelihood, "num_tasks", 1)
    if expected != p:
        several = f"MultitaskGaussianLikelihood(num_tasks={p})"
        raise ValueError(
            f"expected a likelihood for the {p} outputs of the model, got a "
            f"{type(likelihood).__name__} for {expected}; use gpytorch.likelihoods."
            f"{several if p > 1 else 'GaussianLikelihood()'}"
        )


def check_parts(prior: MultivariateNormal, targets: Tensor, likelihood: Likelihood) -> None:
    """Raise an error if the targets or the likelihood do not fit the prior of an `ExactGP`.

    gpytorch itself accepts such parts. It reads targets of shape (p, N) in a wrong order, ignores
    the noise of a `FixedNoiseGaussianLikelihood` for several outputs, and treats Student-t noise as
    Gaussian. Likelihoods with another number of outputs lead to unclear errors.

    Args:
        prior: the prior distribution of the training data.
        targets: the training targets.
        likelihood: the likelihood of the model.

    Raises:
        NotImplementedError: the noise is not Gaussian, or several observations share it; there are
            several outputs and a `FixedNoiseGaussianLikelihood`.
        TypeError: the targets are complex.
        ValueError: the targets have another shape, or contain NaN; the likelihood has another
            number of outputs, or the known noise of other data; the prior has another type or
            order.
    """
    as_real_tensor(targets, "the targets of ExactGP")
    check_noise(likelihood)
    if settings.observation_nan_policy.value() == "ignore":
        check_finite(targets)
    _check_order(prior)
    shape = tuple(prior.event_shape)
    size = prior.lazy_covariance_matrix.shape[-1]
    if size != prior.loc.shape[-1]:
        raise ValueError(_wrong_mean(shape, size // shape[0]))
    p = shape[1] if len(shape) > 1 else 1
    _check_sizes(likelihood, shape[0], p)
    given = tuple(targets.shape)
    if given[-len(shape) :] == shape or (p > 1 and given[-1] == shape[0] * p):  # or flattened
        return
    rows = "pass a row with all components for each point"
    remedy = "pass y.mT" if given[-2:] == shape[::-1] and len(shape) > 1 else rows
    raise ValueError(
        f"an ExactGP expects targets y of shape {shape}, like its mean, got {given}; {remedy}"
    )


def _check_order(prior: MultivariateNormal) -> None:
    """Raise an error if the mean of a prior is not ordered point by point, like its covariance."""
    covariance, mean = prior.lazy_covariance_matrix, tuple(prior.mean.shape[-2:])
    if not isinstance(covariance, LazyEvaluatedKernelTensor) or num_outputs(covariance.kernel) < 2:
        return
    if not isinstance(prior, MultitaskMultivariateNormal):
        if len(mean) > 1 and covariance.shape[-1] == mean[0] * mean[1]:
            raise ValueError(
                f"expected a MultitaskMultivariateNormal for a mean of shape {mean}, got a "
                f"{type(prior).__name__}; return gpytorch.distributions."
                "MultitaskMultivariateNormal(mean, covariance) in forward"
            )
    elif not prior._interleaved:
        raise ValueError(
            "expected interleaved=True in the MultitaskMultivariateNormal of a kernel of vectors, "
            "whose covariance is ordered point by point, got interleaved=False; omit this argument"
        )


@singledispatch
def check_outputs(part: Module) -> None:
    """Raise an error if the parts of a kernel have matrices of different sizes.

    Raises:
        ValueError: a sum or product has parts with different numbers of outputs, or a
            `MultitaskKernel` contains a kernel with several outputs.
    """


@check_outputs.register(AdditiveKernel)
@check_outputs.register(ProductKernel)
def _(part) -> None:
    outputs = [num_outputs(kernel) for kernel in part.kernels]
    if len(set(outputs)) > 1:
        require_field_products(part)
        raise ValueError(
            f"expected summands with the same number of outputs, got {outputs}; wrap scalar "
            f"kernels in gpytorch.kernels.MultitaskKernel(kernel, num_tasks={max(outputs)})"
        )


@check_outputs.register
def _(part: MultitaskKernel) -> None:
    p = num_outputs(part.data_covar_module)
    if p > 1:
        raise ValueError(
            "expected a scalar kernel in a MultitaskKernel, got a "
            f"{type(part.data_covar_module).__name__} with {p} outputs; use this kernel without "
            "MultitaskKernel, or pass its scalar kernel"
        )


def check_mean(model: ExactGP, x: Float[Tensor, "*b n d"], error: RuntimeError) -> None:
    """Raise an error if a model has failed because its mean does not fit its kernel.

    Args:
        model: a model whose `forward` has failed. If it does not have exactly one mean and one
            kernel, it is not checked.
        x: the inputs of `forward`.
        error: the error of `forward`.

    Raises:
        ValueError: the mean has another number of outputs than the kernel.
    """
    kernels = [part for part in model.children() if isinstance(part, Kernel)]
    means = [part for part in model.children() if isinstance(part, Mean)]
    if len(kernels) != 1 or len(means) != 1:
        return
    (kernel,), (mean,) = kernels, means
    x = x.unsqueeze(-1) if x.dim() == 1 else x
    shape, n, p = tuple(mean(x).shape), x.shape[-2], num_outputs(kernel)
    shape = shape[-1:] if shape[-1] == n else shape[-2:]
    if shape not in ((n, p), (n,) if p == 1 else ()):
        raise ValueError(_wrong_mean(shape, p)) from error


def _wrong_mean(shape: tuple[int, ...], p: int) -> str:
    """Return the error message for a mean of shape (N,) or (N, q)."""
    if p == 1:
        return (
            f"expected a mean of shape {shape[:1]} for the one output of the kernel, got {shape}; "
            "use a scalar mean, or "
            f"gpytorch.kernels.MultitaskKernel(kernel, num_tasks={shape[1]})"
        )
    return (
        f"expected a mean of shape {(shape[0], p)} for the {p} outputs of the kernel, in a "
        f"MultitaskMultivariateNormal, got {shape}; use "
        f"gpytorch.means.MultitaskMean(gpytorch.means.ConstantMean(), num_tasks={p})"
    )


# Prediction strategies of the kernels of this package, and methods of gpytorch that are replaced.
#
# gpytorch has no hook for sums and products of these kernels, or for elementwise products of their
# matrices. It also has no hook that checks the parts of a model in training, and it accepts some
# wrong parts without an error (see `check_parts`). Each replacement first looks for a kernel or
# likelihood of this package. If there is none, it calls the method of gpytorch, so that other
# models are not affected.


@singledispatch
def _is_features(kernel: Kernel) -> bool:
    """Return whether a kernel consists of `ORFFKernel`s, up to sums and scales."""
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


def _is_field(kernel: Kernel) -> bool:
    """Return whether a kernel contains a field kernel."""
    return any(part.is_field for part in parts_of(kernel, WrapperKernel, FieldKernel))


def _prediction_strategy(
    self: Kernel, train_inputs, train_prior_dist, train_labels, likelihood
) -> DefaultPredictionStrategy:
    """Return the prediction strategy for kernels of this package and for sums of kernels."""
    if _is_features(self):
        strategy = ORFFPredictionStrategy
    elif _is_field(self):
        strategy = ExactFieldPredictionStrategy
    else:
        strategy = DefaultPredictionStrategy
    return strategy(train_inputs, train_prior_dist, train_labels, likelihood)


_gpytorch_product = Kernel.__mul__


def _product(self: Kernel, other: Kernel) -> Kernel:
    """Return the product of a field kernel and a scalar kernel, in either order."""
    required(other, Kernel, "expected a kernel as the other factor", "use a ScaleKernel")
    if not (_is_field(self) or _is_field(other)):
        return _gpytorch_product(self, other)
    if parts_of(self, ORFFKernel) or parts_of(other, ORFFKernel):
        warnings.warn(
            "a product with an ORFFKernel has no features, so that its matrices are dense, at a "
            "cost cubic in the number of points; use ORFFKernel(field * scalar, rule) instead",
            PerformanceWarning,
            stacklevel=2,
        )
    return FieldProductKernel(self, other) if _is_field(self) else FieldProductKernel(other, self)


def _mul_matrix(self: LazyEvaluatedKernelTensor, other: LinearOperator) -> LinearOperator:
    """Return the elementwise product of two covariances, for example of positions and tasks.

    gpytorch's product of two roots would need memory of cubic size.
    """
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
    """Return the distribution at some inputs, after checks that the parts fit each other."""
    check_noise(self.likelihood)
    if not parts_of(self, WrapperKernel, FieldKernel):
        return _gpytorch_call(self, *args, **kwargs)
    for part in self.modules():
        check_outputs(part)
    for part in parts_of(self, ORFFKernel) if self.training else ():
        part.follow_lengthscales()
    try:
        result = _gpytorch_call(self, *args, **kwargs)
    except RuntimeError as error:
        if args and "mean" in str(error):
            check_mean(self, args[0], error)
        raise
    if self.training and settings.debug.on():  # then the inputs are the training inputs
        check_parts(result, self.train_targets, self.likelihood)
    return result


_gpytorch_prior_at_tests = ExactGP._get_test_prior_mean_and_covariances


def _prior_at_tests(self: ExactGP, train_inputs, test_inputs, **kwargs: object) -> tuple:
    """Return the prior at test points, and its covariances.

    gpytorch 1.15.2 evaluates the covariance between all test points, even if it is not needed. With
    an exact kernel of vectors and many points, this function leaves it unevaluated.
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
