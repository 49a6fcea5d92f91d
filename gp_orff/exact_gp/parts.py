"""Means, targets and likelihoods of an `ExactGP`, which have to fit its kernel."""

import torch
from gpytorch import settings
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import AdditiveKernel, Kernel, MultitaskKernel, ProductKernel
from gpytorch.likelihoods import (
    FixedNoiseGaussianLikelihood,
    GaussianLikelihood,
    Likelihood,
    MultitaskGaussianLikelihood,
)
from gpytorch.means import Mean
from gpytorch.models import ExactGP
from jaxtyping import Float
from torch import Tensor

from gp_orff.data.likelihoods import HeavyTails, KnownNoiseLikelihood, TrackLikelihood
from gp_orff.kernels.base import as_real_tensor
from gp_orff.kernels.fields import require_field_products
from gp_orff.kernels.tree import num_outputs


def check_noise(likelihood: Likelihood) -> None:
    """Refuse likelihoods of this package that no `ExactGP` follows.

    Raises:
        NotImplementedError: noise that is not Gaussian, or shared by observations.
    """
    name = type(likelihood).__name__
    if isinstance(likelihood, HeavyTails) and likelihood.has_deg_free:
        raise NotImplementedError(
            f"an ExactGP expects Gaussian noise, got a {name}, whose outliers it would not see; "
            "give it to gp_orff.VectorFieldGP(kernel, likelihood=likelihood), and call fit(x, y)"
        )
    if isinstance(likelihood, TrackLikelihood):
        raise NotImplementedError(
            f"an ExactGP expects noise that is independent from point to point, got a {name}, "
            "whose observations share offsets; use gp_orff.VectorFieldGP(kernel).fit(x, y, "
            "track=track, time=time)"
        )


def check_parts(prior: MultivariateNormal, targets: Tensor, likelihood: Likelihood) -> None:
    """Refuse targets and likelihoods that do not fit the prior distribution of an `ExactGP`.

    gpytorch takes targets of shape (p, N) in a wrong order, ignores the noise of a
    `FixedNoiseGaussianLikelihood` if there are several outputs, and takes Student-t noise for
    Gaussian; likelihoods of another number of outputs end in errors of shapes.

    Raises:
        NotImplementedError: as `check_noise`; a `FixedNoiseGaussianLikelihood` for several outputs.
        TypeError: complex targets.
        ValueError: targets of another shape, or NaN in them; a likelihood with another number of
            outputs, or known noise of other data.
    """
    as_real_tensor(targets, "the targets of ExactGP")
    check_noise(likelihood)
    if settings.observation_nan_policy.value() == "ignore":
        check_finite(targets)
    shape = tuple(prior.event_shape)
    size = prior.lazy_covariance_matrix.shape[-1]
    if size != prior.loc.shape[-1]:
        raise ValueError(_wrong_mean(shape, size // shape[0]))
    p = shape[1] if len(shape) > 1 else 1
    if p > 1 and isinstance(likelihood, FixedNoiseGaussianLikelihood):
        raise NotImplementedError(
            f"expected noise of vectors in an ExactGP with {p} outputs, got a "
            f"{type(likelihood).__name__}, whose noise gpytorch ignores; use "
            f"gp_orff.KnownNoiseLikelihood(num_tasks={p}, noise=noise)"
        )
    if isinstance(likelihood, KnownNoiseLikelihood):
        count = None if likelihood.noise is None else len(likelihood.noise)
        if (likelihood.num_tasks, count) != (p, shape[0]):
            raise ValueError(
                f"expected the noise of {shape[0]} observations of {p} values in an ExactGP, got "
                f"a KnownNoiseLikelihood with num_tasks={likelihood.num_tasks} and noise of "
                f"{'no' if count is None else count} observations; use "
                f"gp_orff.KnownNoiseLikelihood(num_tasks={p}, noise=noise)"
            )
    if isinstance(likelihood, GaussianLikelihood | MultitaskGaussianLikelihood):
        expected = getattr(likelihood, "num_tasks", 1)
        if expected != p:
            several = f"MultitaskGaussianLikelihood(num_tasks={p})"
            wanted = several if p > 1 else "GaussianLikelihood()"
            raise ValueError(
                f"expected a likelihood for the {p} outputs of the model, got a "
                f"{type(likelihood).__name__} for {expected}; use gpytorch.likelihoods.{wanted}"
            )
    given = tuple(targets.shape)
    if given[-len(shape) :] == shape or (p > 1 and given[-1] == shape[0] * p):  # or flattened
        return
    rows = "give a row with all components for each point"
    remedy = "give y.mT" if given[-2:] == shape[::-1] and len(shape) > 1 else rows
    raise ValueError(
        f"an ExactGP expects targets y of shape {shape}, as its mean, got {given}; {remedy}"
    )


def check_finite(y: Tensor) -> None:
    """Refuse NaN and infinity, which would be that of all results.

    Raises:
        ValueError: observations that are not finite.
    """
    invalid = int((~torch.isfinite(y)).sum())
    if invalid:
        raise ValueError(
            f"expected finite observations, got {invalid} NaN or infinite values among "
            f"{y.numel()}; drop those points, or train and predict under gpytorch.settings."
            'observation_nan_policy("mask"), at a cost cubic in the number of points'
        )


def check_kernels(model: ExactGP) -> None:
    """Refuse sums and products of kernels with different numbers of outputs, and fields in the
    place of scalar kernels, whose matrices would have different sizes.

    Raises:
        ValueError: such a kernel.
    """
    for part in model.modules():
        if isinstance(part, AdditiveKernel | ProductKernel):
            outputs = [num_outputs(kernel) for kernel in part.kernels]
            if len(set(outputs)) == 1:
                continue
            require_field_products(part)
            raise ValueError(
                f"expected summands with one number of outputs, got {outputs}; wrap scalar "
                f"kernels in gpytorch.kernels.MultitaskKernel(kernel, num_tasks={max(outputs)})"
            )
        if isinstance(part, MultitaskKernel) and num_outputs(part.data_covar_module) > 1:
            p = num_outputs(part.data_covar_module)
            raise ValueError(
                "expected a scalar kernel in a MultitaskKernel, got a "
                f"{type(part.data_covar_module).__name__} with {p} outputs; give it to the model "
                "as it is, or take the scalar kernel inside it"
            )


def check_mean(model: ExactGP, x: Float[Tensor, "*b n d"], error: RuntimeError) -> None:
    """Say which mean a model needs whose `forward` has failed, if it has one mean and one kernel.

    Raises:
        ValueError: a mean with another number of outputs.
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
    """The message for a mean of shape (N,) or (N, q)."""
    if p == 1:
        return (
            f"expected a mean of shape {shape[:1]} for the one output of the kernel, got {shape}; "
            "or make the scalar kernel one of vectors, "
            f"gpytorch.kernels.MultitaskKernel(kernel, num_tasks={shape[1]})"
        )
    return (
        f"expected a mean of shape {(shape[0], p)} for the {p} outputs of the kernel, in a "
        f"MultitaskMultivariateNormal, got {shape}; use "
        f"gpytorch.means.MultitaskMean(gpytorch.means.ConstantMean(), num_tasks={p})"
    )
