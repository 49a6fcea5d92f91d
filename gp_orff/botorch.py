"""`FieldGP`: a Gaussian process of a vector field as a BoTorch model, for Bayesian optimisation.

Install it by `pip install gp_orff[botorch]`.
"""

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import torch
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import Likelihood
from gpytorch.means import ConstantMean, Mean, MultitaskMean
from gpytorch.models import ExactGP
from jaxtyping import Float
from linear_operator.operators import DiagLinearOperator
from torch import Tensor

from gp_orff.data.likelihoods import KnownNoiseLikelihood, default_likelihood
from gp_orff.data.units import optional
from gp_orff.exact_gp.orff_kernel import ORFFKernel
from gp_orff.features.draws import Rule
from gp_orff.fitting.starting_values import with_amplitude
from gp_orff.kernels.tree import num_outputs

optional("botorch", "botorch")

from botorch.models import transforms  # noqa: E402  an error that names the extra comes before
from botorch.models.gpytorch import GPyTorchModel  # noqa: E402
from botorch.models.model import FantasizeMixin  # noqa: E402
from botorch.models.transforms.outcome import OutcomeTransform  # noqa: E402
from botorch.models.utils import gpt_posterior_settings, validate_input_scaling  # noqa: E402
from botorch.posteriors.gpytorch import GPyTorchPosterior  # noqa: E402
from botorch.sampling.base import MCSampler  # noqa: E402


class Standardize(transforms.Standardize):
    """Shift outcomes to mean zero, and divide all outputs by the same number.

    The transform of BoTorch divides each output by its own standard deviation, so that a field is
    no longer divergence-free or curl-free. This transform divides all p outputs by √(Σ_j s_j²/p),
    where s_j is the standard deviation of output j.

    Args:
        m: the number p of outputs.
        outputs: must be None, because all components of a field are scaled together.
        batch_shape: the batch shape of the observations.
        min_stdv: the least divisor. If the divisor would be smaller, for example for constant
            outcomes, outcomes are divided by 1.

    Raises:
        ValueError: `outputs` is not None.

    Example:
        >>> import torch
        >>> from gp_orff.botorch import Standardize
        >>> y = torch.tensor([[1.0, 30.0], [3.0, 10.0]], dtype=torch.float64)
        >>> standardized, _ = Standardize(2)(y)
        >>> # the ratio of the deviations −10 and 1 from the means
        >>> (standardized[:, 1] / standardized[:, 0]).tolist()
        [-10.0, -10.0]
    """

    def __init__(
        self,
        m: int,
        outputs: list[int] | None = None,
        batch_shape: torch.Size = torch.Size(),  # noqa: B008
        min_stdv: float = 1e-8,
    ):
        if outputs is not None:
            raise ValueError(
                f"expected outputs=None, got {outputs}: the components of a field are divided by "
                "one number; use botorch.models.transforms.Standardize for independent outputs"
            )
        super().__init__(m, None, batch_shape, min_stdv)

    def forward(
        self,
        Y: Float[Tensor, "*b n p"],
        Yvar: Float[Tensor, "*b n p"] | None = None,
        X: Float[Tensor, "*b n d"] | None = None,
    ) -> tuple[Float[Tensor, "*b n p"], Float[Tensor, "*b n p"] | None]:
        """Return the transformed outcomes and noise variances.

        In train mode, the means and the divisor are computed from these outcomes.

        Args:
            Y: outcomes (*b, n, p).
            Yvar: noise variances (*b, n, p), or None.
            X: points (*b, n, d). They are not used.
        """
        if not self.training:
            return super().forward(Y, Yvar, X)
        super().forward(Y, Yvar, X)
        squares = (Y - self.means).square().nanmean(-2, keepdim=True)
        count = (~Y.isnan()).sum(-2, keepdim=True)
        squares = squares * count / (count - 1).clamp_min(1)
        stdv = squares.mean(-1, keepdim=True).sqrt()
        stdv = stdv.where(stdv >= self._min_stdv, torch.ones_like(stdv))
        self.stdvs = stdv.expand_as(self.means).clone()
        self._stdvs_sq = self.stdvs.square()
        return (Y - self.means) / self.stdvs, None if Yvar is None else Yvar / self._stdvs_sq


class FieldGP(ExactGP, GPyTorchModel, FantasizeMixin):
    """A vector-valued Gaussian process with a kernel of this package, as a BoTorch model.

    It works with all acquisition functions. `posterior` is joint over points and components.
    `condition_on_observations` and `fantasize` add observations, and `subset_output` selects
    components. The model can be part of a `ModelListGP`. Fit it with
    `botorch.fit.fit_gpytorch_mll`. With more than a few thousand observations, use a
    `gp_orff.VectorFieldGP` instead.

    Pass positions unscaled, or scale all axes by the same factor. Separate factors would break the
    divergence-free constraint, so there is no `input_transform`.

    Args:
        train_X: points (n, d).
        train_Y: vectors (n, p) with p ≥ 2, before any transform.
        kernel: a gpytorch kernel that `ORFFKernel` accepts. If it has no amplitude, it is wrapped
            in a `ScaleKernel`.
        train_Yvar: known noise variances (n, p) of train_Y, before any transform.
        likelihood: a likelihood for an `ExactGP`, in the scale of the outcome transform. The
            default is Gaussian noise: with the variances `train_Yvar`, or else with one learned
            variance.
        mean_module: a gpytorch mean with p outputs. The default is a constant for each output.
        frequencies: a rule for features that approximate the kernel. An example is
            `Grid.for_data(box)`, where the box is the complete search domain. The default is the
            exact kernel.
        outcome_transform: a transform of BoTorch, or None for no transform. The default
            "standardize" is `Standardize`, which divides all components by the same number.

    Raises:
        ImportError: BoTorch is not installed. Run `pip install gp_orff[botorch]`.
        ValueError: Shapes do not fit each other or the kernel, or there is only one output. Or both
            `train_Yvar` and a likelihood are given, or the likelihood has known noise and there is
            an outcome transform.
        botorch.exceptions.InputDataError: train_X or train_Y contains NaN.

    Example:
        >>> import gp_orff, gpytorch, torch
        >>> from botorch.fit import fit_gpytorch_mll
        >>> from gp_orff.botorch import FieldGP
        >>> x = torch.rand(
        ...     12, 2, generator=torch.Generator().manual_seed(0)
        ... ).double()
        >>> model = FieldGP(
        ...     x,
        ...     torch.sin(6 * x.flip(-1)),
        ...     gp_orff.DivergenceFreeKernel(num_dims=2),
        ... )
        >>> mll = gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model)
        >>> _ = fit_gpytorch_mll(mll)
        >>> model.posterior(x[:4]).mean.shape
        torch.Size([4, 2])
    """

    _supports_cache_root = False  # posteriors are joint over several outputs

    def __init__(
        self,
        train_X: Float[Tensor, "n d"],
        train_Y: Float[Tensor, "n p"],
        kernel: Kernel,
        *,
        train_Yvar: Float[Tensor, "n p"] | None = None,
        likelihood: Likelihood | None = None,
        mean_module: Mean | None = None,
        frequencies: Rule | None = None,
        outcome_transform: OutcomeTransform | str | None = "standardize",
    ):
        p = num_outputs(kernel)
        self._validate_tensor_args(train_X, train_Y, train_Yvar)
        if train_Y.shape != (*train_X.shape[:-1], p) or p < 2:
            raise ValueError(
                f"FieldGP expects train_Y of shape {(*train_X.shape[:-1], p)}, with p ≥ 2 outputs "
                f"as the kernel has, got {tuple(train_Y.shape)}; for one output use "
                "botorch.models.SingleTaskGP"
            )
        if outcome_transform == "standardize":
            outcome_transform = Standardize(p, batch_shape=train_X.shape[:-2])
        if not isinstance(outcome_transform, OutcomeTransform | None):
            raise ValueError(
                'expected outcome_transform="standardize", None, or an OutcomeTransform of '
                f"BoTorch, got {outcome_transform!r}; use the default for a vector field"
            )
        _check_noise(train_Yvar, likelihood, outcome_transform)
        validate_input_scaling(train_X, train_Y, train_Yvar, check_nans_only=True)
        if outcome_transform is not None:
            outcome_transform.train()
            train_Y, train_Yvar = outcome_transform(train_Y, train_Yvar, X=train_X)
        if train_Yvar is not None:
            likelihood = KnownNoiseLikelihood(p, noise=train_Yvar)
        likelihood = default_likelihood(p) if likelihood is None else likelihood
        super().__init__(train_X, train_Y, likelihood)
        self.mean_module = MultitaskMean(ConstantMean(), p) if mean_module is None else mean_module
        scaled = with_amplitude(kernel)
        self.covar_module = scaled if frequencies is None else ORFFKernel(scaled, frequencies)
        self._num_outputs, self._outputs = p, None
        if outcome_transform is not None:
            self.outcome_transform = outcome_transform
        self.to(train_X)

    def forward(self, x: Float[Tensor, "*b n d"]) -> MultitaskMultivariateNormal:
        """Return the prior distribution at points x (*b, n, d), in the scale of the outcome
        transform. Its mean has the shape (*b, n, p)."""
        return MultitaskMultivariateNormal(self.mean_module(x), self.covar_module(x))

    @property
    def num_outputs(self) -> int:
        """The number of outputs of the posterior, all or those that `subset_output` selected."""
        return self._num_outputs if self._outputs is None else len(self._outputs)

    def posterior(
        self,
        X: Float[Tensor, "*b q d"],
        output_indices: Sequence[int] | None = None,
        observation_noise: bool | Tensor = False,
        posterior_transform: Any = None,
    ) -> Any:
        """Return the joint posterior of all components, or of some, at q points.

        Args:
            X: points (*b, q, d).
            output_indices: the indices of components. The default is all components.
            observation_noise: False for the posterior of the field, True for that of observations.
                If the noise of the data is known, its mean is used. You can also pass variances
                (*b, q, p) in the scale of the outcome transform, as for BoTorch's models.
            posterior_transform: a posterior transform of BoTorch.

        Returns:
            A BoTorch posterior in the scale of train_Y, with a mean of shape (*b, q, p).

        Example:
            >>> import gp_orff, torch
            >>> from gp_orff.botorch import FieldGP
            >>> x = torch.rand(12, 2).double()
            >>> kernel = gp_orff.DivergenceFreeKernel(num_dims=2)
            >>> model = FieldGP(x, torch.sin(6 * x.flip(-1)), kernel)
            >>> model.posterior(torch.rand(5, 2).double()).variance.shape
            torch.Size([5, 2])
        """
        self.eval()
        with gpt_posterior_settings():
            posterior = GPyTorchPosterior(self._with_noise(self(X), X, observation_noise))
        if hasattr(self, "outcome_transform"):
            posterior = self.outcome_transform.untransform_posterior(posterior, X=X)
        chosen = self._outputs if output_indices is None else self._chosen(output_indices)
        if chosen is not None:
            posterior = GPyTorchPosterior(_of_components(posterior, chosen))
        return posterior if posterior_transform is None else posterior_transform(posterior, X=X)

    def condition_on_observations(
        self,
        X: Float[Tensor, "*b n d"],
        Y: Float[Tensor, "*b n p"],
        noise: Tensor | None = None,
        **kwargs: Any,
    ) -> "FieldGP":
        """Return a model with further observations and the same hyperparameters.

        Args:
            X: points (*b, n, d).
            Y: vectors (*b, n, p), before any transform.
            noise: known noise variances (*b, n, p) in the scale of the outcome transform, as for
                BoTorch's models. All batches must have the same variances. Pass them only if the
                model has `train_Yvar`.

        Raises:
            NotImplementedError: `subset_output` has selected components of the model, or batches
                have different noise.

        Example:
            >>> import gp_orff, torch
            >>> from gp_orff.botorch import FieldGP
            >>> x = torch.rand(12, 2).double()
            >>> kernel = gp_orff.DivergenceFreeKernel(num_dims=2)
            >>> model = FieldGP(x, torch.sin(6 * x.flip(-1)), kernel)
            >>> _ = model.posterior(x)
            >>> new = torch.rand(3, 2).double()
            >>> larger = model.condition_on_observations(
            ...     new, torch.sin(6 * new.flip(-1))
            ... )
            >>> larger.posterior(x).mean.shape
            torch.Size([12, 2])
        """
        if self._outputs is not None:
            raise NotImplementedError(
                f"expected a model of all {self._num_outputs} components, got the components "
                f"{list(self._outputs)} of subset_output; condition the complete model first"
            )
        if self.prediction_strategy is None:  # its caches are extended by the new observations
            self.eval()
            self(self.train_inputs[0][..., :1, :])
        if noise is None:
            return super().condition_on_observations(X, Y, **kwargs)
        if hasattr(self, "outcome_transform"):  # BoTorch does not pass noise of several outputs
            Y, _ = self.outcome_transform(Y, X=X)
        return self.get_fantasy_model(X, Y, noise=_of_one_batch(noise), **kwargs)

    def fantasize(
        self,
        X: Float[Tensor, "*b n d"],
        sampler: MCSampler,
        observation_noise: Float[Tensor, "*b n p"] | None = None,
        **kwargs: Any,
    ) -> "FieldGP":
        """Return models with further observations, which are drawn from the posterior at X.

        Args:
            X: points (*b, n, d).
            sampler: a sampler of BoTorch.
            observation_noise: noise variances (*b, n, p) of the new observations. By default, they
                have the learned noise, or the mean of the known noise of the data.
        """
        if observation_noise is None and self._mean_noise is not None:
            observation_noise = self._mean_noise.expand(X.shape[-2], self._num_outputs)
        return super().fantasize(X, sampler, observation_noise, **kwargs)

    def subset_output(self, idcs: Sequence[int]) -> "FieldGP":
        """Return a copy whose `posterior` has only the selected components.

        Args:
            idcs: the indices of components, in the order of the posterior.

        Example:
            >>> import gp_orff, torch
            >>> from gp_orff.botorch import FieldGP
            >>> x = torch.rand(12, 2).double()
            >>> kernel = gp_orff.DivergenceFreeKernel(num_dims=2)
            >>> model = FieldGP(x, torch.sin(6 * x.flip(-1)), kernel)
            >>> model.subset_output([1]).posterior(x).mean.shape
            torch.Size([12, 1])
        """
        chosen = self._chosen(idcs)
        subset = deepcopy(self)
        subset._outputs = chosen
        return subset

    @property
    def _mean_noise(self) -> Float[Tensor, "p"] | None:
        """The mean (p,) of the known noise variances of the data; None if they are not known."""
        noise = _given_noise(self.likelihood)
        if noise is None:
            return None
        if noise.dim() == 3:
            noise = noise.diagonal(dim1=1, dim2=2)
        return self.likelihood.noise_scale * noise.reshape(len(noise), -1).mean(0)

    def _with_noise(
        self, field: MultitaskMultivariateNormal, X: Tensor, noise: bool | Tensor
    ) -> MultitaskMultivariateNormal:
        """The distribution of noisy observations of a field at X."""
        if noise is True:
            noise = self._mean_noise
            if noise is None:
                return self.likelihood(field, X)
        if noise is False:
            return field
        variances = noise.expand_as(field.mean).flatten(-2)
        covariance = field.lazy_covariance_matrix + DiagLinearOperator(variances)
        return MultitaskMultivariateNormal(field.mean, covariance)

    def _chosen(self, indices: Sequence[int]) -> tuple[int, ...]:
        """The components with these indices among the components that were selected before."""
        present = range(self._num_outputs) if self._outputs is None else self._outputs
        if any(not -len(present) <= i < len(present) for i in indices):
            raise ValueError(
                f"expected indices of the {len(present)} components, got {list(indices)}; use "
                f"0 to {len(present) - 1}"
            )
        return tuple(present[i] for i in indices)

    def _extract_targets_and_noise(self) -> tuple[Tensor, Tensor | None]:
        """The observations (n, p) and their known variances, which `load_state_dict` transforms
        again."""
        return self.train_targets, _given_noise(self.likelihood)

    def _restore_targets_and_noise(self, Y: Tensor, Yvar: Tensor | None, strict: bool) -> None:
        self.set_train_data(targets=Y, strict=strict)
        if Yvar is not None:
            self.likelihood.noise = Yvar


def _given_noise(likelihood: Likelihood | None) -> Tensor | None:
    """The noise of each observation, if it is known."""
    return likelihood.noise if isinstance(likelihood, KnownNoiseLikelihood) else None


def _check_noise(
    variances: Tensor | None, likelihood: Likelihood | None, transform: OutcomeTransform | None
) -> None:
    """Raise an error unless the noise of the data has one source, in a known scale."""
    if variances is not None and likelihood is not None:
        raise ValueError("expected train_Yvar or a likelihood, got both; omit one of them")
    if _given_noise(likelihood) is not None and transform is not None:
        raise ValueError(
            "expected train_Yvar=, variances in the units of train_Y, which are transformed "
            "together with it, got noise in a KnownNoiseLikelihood; for covariances (n, p, p) "
            "use outcome_transform=None"
        )


def _of_one_batch(noise: Float[Tensor, "*b n p"]) -> Float[Tensor, "n p"]:
    """The noise of one batch of observations. All batches must have the same noise."""
    first = noise.flatten(0, -3)[0] if noise.dim() > 2 else noise
    if not bool((noise == first).all()):
        raise NotImplementedError(
            "expected the same noise in each batch of observations, got noise that differs; "
            "condition on one batch at a time"
        )
    return first


def _of_components(posterior: Any, chosen: Sequence[int]) -> MultivariateNormal:
    """The distribution of selected components."""
    joint = getattr(posterior, "distribution", None)
    if not isinstance(joint, MultitaskMultivariateNormal):
        raise NotImplementedError(
            f"expected a normal posterior, whose components can be chosen, got a "
            f"{type(posterior).__name__}; use outcome_transform=None or Standardize"
        )
    n, p = joint.event_shape
    rows = torch.arange(n * p, device=joint.loc.device).reshape(n, p)[:, list(chosen)]
    covariance = joint.covariance_matrix
    if not joint._interleaved:
        raise NotImplementedError(
            "expected an interleaved distribution, with the components of each point next to each "
            "other, got another order; use outcome_transform=None or Standardize"
        )
    covariance = covariance[..., rows.flatten(), :][..., rows.flatten()]
    mean = joint.mean[..., list(chosen)]
    if len(chosen) == 1:
        return MultivariateNormal(mean.squeeze(-1), covariance)
    return MultitaskMultivariateNormal(mean, covariance)
