"""`KnownNoiseLikelihood`: noise that is given with each reading."""

import warnings

import torch
from gpytorch.constraints import GreaterThan, Interval
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from gpytorch.priors import Prior
from gpytorch.utils.warnings import GPInputWarning
from jaxtyping import Float
from linear_operator import to_linear_operator
from linear_operator.operators import BlockDiagLinearOperator, BlockInterleavedLinearOperator
from torch import Tensor, nn

from gp_orff.data.noise.covariances import check_num_tasks, noise_of
from gp_orff.data.noise.given import given_noise
from gp_orff.data.noise.heavy_tails import HeavyTails
from gp_orff.kernels.base import as_real_tensor


class KnownNoiseLikelihood(HeavyTails):
    r"""Noise whose covariance comes with every reading: y_n = f(x_n) + ε_n, ε_n ~ N(0, s R_n).

    `VectorFieldGP.fit(x, y, noise=R)` makes one for each group of such readings. It keeps s = 1,
    and learns s by evidence with `scale_noise=True`.

    With `deg_free=ν` the noise is Student-t with the scale s R_n in the place of its covariance:
    ε_n ~ N(0, s R_n / w_n), w_n ~ Gamma(ν/2, ν/2), for readings of which some are worse than their
    stated errors. Variances (N,) have one w_n for all components of a reading; variances (N, p),
    and each axis of covariances (N, p, p), one for each number. A fit makes such a likelihood in
    the place of a `MultitaskStudentTLikelihood`.

    Called on the distribution of a field, it adds the noise of new readings, `noise=`, times s
    (and ν/(ν − 2)): `likelihood(field(xs), noise=R)` with R of shape (n,), (n, p) or (n, p, p).
    Without `noise=` it warns and adds nothing, as
    `gpytorch.likelihoods.FixedNoiseGaussianLikelihood` does.

    Args:
        num_tasks: p, the number of outputs.
        deg_free: the degrees of freedom ν > 2 of Student-t noise; None for Gaussian noise.
        learn_deg_free, deg_free_constraint, deg_free_prior: as for `MultitaskStudentTLikelihood`.
        noise_scale_constraint, noise_scale_prior: of s; positive by default, without a prior.

    Example:
        >>> import gp_orff, torch
        >>> x = torch.rand(80, 2, generator=torch.Generator().manual_seed(0)).double()
        >>> noise = 0.1 ** torch.linspace(1, 4, 80).double()
        >>> y = torch.stack([torch.sin(3 * x[:, 1]), torch.sin(3 * x[:, 0])], dim=-1)
        >>> errors = torch.randn(80, 2, generator=torch.Generator().manual_seed(1))
        >>> model = gp_orff.VectorFieldGP(gp_orff.DivergenceFreeKernel(num_dims=2))
        >>> model = model.fit(x, y + noise.sqrt()[:, None] * errors, noise=noise, progress=False)
        >>> model.likelihood.noise_scale.item()
        1.0
        >>> field = model.posterior()(x[:2])
        >>> reading = model.likelihood(field, noise=noise[:2])
        >>> bool(torch.allclose(reading.variance - field.variance, noise[:2, None]))
        True
    """

    def __init__(
        self,
        num_tasks: int,
        *,
        deg_free: float | Tensor | None = None,
        learn_deg_free: bool = False,
        deg_free_constraint: Interval | None = None,
        deg_free_prior: Prior | None = None,
        noise_scale_constraint: Interval | None = None,
        noise_scale_prior: Prior | None = None,
    ):
        super().__init__()
        self.num_tasks = num_tasks
        raw = nn.Parameter(torch.zeros(1, dtype=torch.float64), requires_grad=False)
        self.register_parameter("raw_noise_scale", raw)
        self.register_constraint("raw_noise_scale", noise_scale_constraint or GreaterThan(0.0))
        if noise_scale_prior is not None:
            self.register_prior(
                "noise_scale_prior",
                noise_scale_prior,
                lambda module: module.noise_scale,
                lambda module, value: setattr(module, "noise_scale", value),
            )
        self.noise_scale = 1.0
        if deg_free is not None:
            self.add_deg_free(deg_free, learn_deg_free, deg_free_constraint, deg_free_prior)

    @property
    def noise_scale(self) -> Float[Tensor, "1"]:
        """The factor s of the noise that is given, a tensor (1,)."""
        return self.raw_noise_scale_constraint.transform(self.raw_noise_scale)

    @noise_scale.setter
    def noise_scale(self, value: float | Tensor) -> None:
        raw = self.raw_noise_scale
        value = as_real_tensor(value, "noise_scale", dtype=raw.dtype).to(raw).expand_as(raw)
        raw_value = self.raw_noise_scale_constraint.inverse_transform(value)
        self.initialize(raw_noise_scale=raw_value)

    def forward(
        self,
        function_samples: Float[Tensor, "*b n p"],
        *args,
        noise: Float[Tensor, "n ..."] | None = None,
        **kwargs,
    ) -> torch.distributions.Distribution:
        """New readings with the noise `noise`, given values of the field, `function_samples`
        (*b, n, p), or (*b, n) if p = 1."""
        if self.num_tasks == 1:
            variances = self._blocks(noise, function_samples.shape[-1]).flatten()
            return torch.distributions.Normal(
                function_samples, variances.to(function_samples) ** 0.5
            )
        blocks = self._blocks(noise, function_samples.shape[-2]).to(function_samples)
        return torch.distributions.MultivariateNormal(function_samples, blocks)

    def marginal(
        self,
        function_dist: MultivariateNormal,
        *args,
        noise: Float[Tensor, "n ..."] | None = None,
        **kwargs,
    ) -> MultivariateNormal:
        """The distribution of new readings with the noise `noise`, from that of the field, which is
        `function_dist` at n points."""
        if noise is None:
            warnings.warn(
                "expected noise=, the noise of new readings, (n,), (n, p) or (n, p, p), got none: "
                "the result is the distribution of the field",
                GPInputWarning,
                stacklevel=3,
            )
            return function_dist
        mean, covariance = function_dist.mean, function_dist.lazy_covariance_matrix
        blocks = to_linear_operator(self._blocks(noise, mean.shape[0]).to(mean))
        if not isinstance(function_dist, MultitaskMultivariateNormal):
            return function_dist.__class__(mean, covariance + BlockDiagLinearOperator(blocks))
        interleaved = function_dist._interleaved  # reading by reading, not component by component
        kind = BlockDiagLinearOperator if interleaved else BlockInterleavedLinearOperator
        return function_dist.__class__(mean, covariance + kind(blocks), interleaved=interleaved)

    def _blocks(self, noise: Float[Tensor, "n ..."], count: int) -> Float[Tensor, "n p p"]:
        """s R of new readings."""
        values = given_noise(noise, count, self.num_tasks)
        if values.dim() == 1:
            values = values.unsqueeze(-1).expand(count, self.num_tasks)
        blocks = values if values.dim() == 3 else torch.diag_embed(values)
        return self.heavier * self.noise_scale * blocks.to(self.noise_scale.device)


@noise_of.register
def _(likelihood: KnownNoiseLikelihood, num_outputs: int) -> Tensor:
    check_num_tasks(likelihood, num_outputs)
    scale = likelihood.noise_scale.unsqueeze(-1)
    return scale * torch.eye(num_outputs, dtype=scale.dtype, device=scale.device)
