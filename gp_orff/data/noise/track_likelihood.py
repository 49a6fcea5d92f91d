"""`TrackLikelihood`: noise that readings of one track share."""

import torch
from gpytorch.constraints import GreaterThan, Interval
from gpytorch.distributions import MultivariateNormal
from gpytorch.likelihoods import Likelihood
from gpytorch.priors import Prior
from jaxtyping import Float
from linear_operator.operators import ConstantDiagLinearOperator, DiagLinearOperator
from torch import Tensor, nn

from gp_orff.data.noise.along_tracks import (
    SlowVariance,
    TrackNoise,
    along_tracks,
    slow_variance_of,
)
from gp_orff.data.noise.covariances import check_num_tasks, noise_of
from gp_orff.data.noise.known_noise_likelihood import KnownNoiseLikelihood
from gp_orff.kernels.base import as_real_tensor

_NAMES = (
    "noise",
    "offset_variance",
    "correlated_variance",
    "correlation_time",
    "block_variance",
)
NUM_VALUES = 64
"""Values of the variance of new tracks over which predictions integrate."""


class TrackLikelihood(Likelihood):
    r"""Noise of readings along tracks: an offset, correlated noise and white noise, by component.

    Readings y_i of a track, at the times t_i along it, are

        y_i = f(x_i) + b + r(t_i) + e_i + ε_i ,
        b ~ N(0, σ_b²) , Cov[r(t), r(s)] = σ_r² exp(−|t − s| / τ) , ε_i ~ N(0, σ²) ,

    independently for every component and every track (r: Uhlenbeck & Ornstein 1930, *On the theory
    of the Brownian motion*). Many readings are averaged over blocks, short against τ. The readings
    of a block share e_i ~ N(0, σ_e²), and those of other blocks do not.

    Beside `noise=`, the known variance of a reading is added to σ²: what errors do not tell that
    were stated with the readings. The mean of a block weighs its readings alike.

    `VectorFieldGP.fit(x, y, track=, time=)` makes one for each group of readings along tracks and
    learns its parameters by evidence. Without times, t is the length of the path.

    Called on the distribution of a field, it returns the distribution of new readings, each on a
    new track. With parameters that you set, this adds the variance v + σ_e² + σ² to that of the
    field, where v = σ_b² + σ_r².

    A small number of tracks leaves v uncertain: three tracks give two independent differences of
    offsets in each component. After `fit`, predictions therefore integrate over v, given all data
    and the other parameters, under Jeffreys' prior for the restricted evidence p(y | v),

        p(v | y) ∝ p(y | v) √I(v) ,    I(v) = ½ tr[(BᵀPB)²] ,
        P = K⁻¹ − K⁻¹H(HᵀK⁻¹H)⁻¹HᵀK⁻¹ ,

    where B assigns readings to tracks, and H is the effect of the constant mean. The distribution
    of a new reading is then a mixture of Gaussians. If the offsets of T tracks are known precisely,
    it is Student's t distribution with p (T − 1) degrees of freedom (Box & Tiao 1973, *Bayesian
    inference in statistical analysis*). `quantile` returns its quantiles. The Gaussian distribution
    that the likelihood returns has the central 95 % interval of the mixture.

    If `offset_variance` has a prior, it replaces Jeffreys' prior. Predictions use the present value
    of v if `raw_offset_variance` is frozen, after you set a parameter, if the group has more than
    400 offsets, and if the data contain no difference of offsets: the readings of a single track do
    not determine the offset of another.

    Args:
        num_tasks: p, the number of outputs.
        noise_constraint, noise_prior: of σ², in squared units of y; positive by default, without a
            prior, as all of them.
        offset_variance_constraint, offset_variance_prior: of σ_b².
        correlated_variance_constraint, correlated_variance_prior: of σ_r².
        correlation_time_constraint, correlation_time_prior: of τ, in units of time or length.
        block_variance_constraint, block_variance_prior: of σ_e².

    Attributes:
        span: the time of one block of readings, whose mean is one observation; 0 for blocks of
            one reading. A fit chooses it.
        duration: the median duration (or length) of the tracks of the last fit; 0 before.

    Example:
        >>> import gp_orff, torch
        >>> time = torch.arange(60).double()
        >>> x = torch.stack([torch.sin(0.21 * time), torch.sin(0.13 * time)], dim=-1)
        >>> offsets = torch.tensor([[0.4, -0.3], [-0.5, 0.2], [0.1, 0.3]]).double()
        >>> track = torch.arange(60) // 20
        >>> y = torch.sin(3 * x).flip(-1) + offsets[track]
        >>> y = y + 0.1 * torch.randn(60, 2, generator=torch.Generator().manual_seed(0))
        >>> model = gp_orff.VectorFieldGP(gp_orff.DivergenceFreeKernel(num_dims=2))
        >>> model = model.fit(x, y, track=track, time=time, progress=False)
        >>> type(model.likelihood).__name__
        'TrackLikelihood'
        >>> field = model.posterior()
        >>> reading = model.likelihood(field(x[:1]))  # of a new track
        >>> bool((reading.variance > field.variance(x[:1]) + model.likelihood.noise).all())
        True
        >>> upper = model.likelihood.quantile(field(x[:1]), 0.975)
        >>> torch.allclose(upper, reading.mean + 1.96 * reading.stddev, rtol=1e-4)
        True
    """

    def __init__(
        self,
        num_tasks: int,
        *,
        noise_constraint: Interval | None = None,
        offset_variance_constraint: Interval | None = None,
        correlated_variance_constraint: Interval | None = None,
        correlation_time_constraint: Interval | None = None,
        block_variance_constraint: Interval | None = None,
        noise_prior: Prior | None = None,
        offset_variance_prior: Prior | None = None,
        correlated_variance_prior: Prior | None = None,
        correlation_time_prior: Prior | None = None,
        block_variance_prior: Prior | None = None,
    ):
        super().__init__()
        self.num_tasks = num_tasks
        constraints = (
            noise_constraint,
            offset_variance_constraint,
            correlated_variance_constraint,
            correlation_time_constraint,
            block_variance_constraint,
        )
        priors = noise_prior, offset_variance_prior, correlated_variance_prior
        priors = (*priors, correlation_time_prior, block_variance_prior)
        for name, constraint, prior in zip(_NAMES, constraints, priors, strict=True):
            self.register_parameter(f"raw_{name}", nn.Parameter(torch.zeros(1)))
            self.register_constraint(f"raw_{name}", constraint or GreaterThan(0.0))
            if prior is not None:
                self.register_prior(
                    f"{name}_prior",
                    prior,
                    lambda module, name=name: getattr(module, name),
                    lambda module, value, name=name: setattr(module, name, value),
                )
        self.register_buffer("span", torch.zeros(()))
        self.register_buffer("duration", torch.zeros(()))
        self.register_buffer("slow_values", torch.zeros(NUM_VALUES))
        self.register_buffer("slow_weights", torch.zeros(NUM_VALUES))  # zeros: nothing learned

    @property
    def noise(self) -> Float[Tensor, "1"]:
        """The variance σ² of the white noise of one reading, a tensor (1,)."""
        return self._value("noise")

    @noise.setter
    def noise(self, value: float | Tensor) -> None:
        self._set("noise", value)

    @property
    def offset_variance(self) -> Float[Tensor, "1"]:
        """The variance σ_b² of the offset that all readings of a track share, a tensor (1,)."""
        return self._value("offset_variance")

    @offset_variance.setter
    def offset_variance(self, value: float | Tensor) -> None:
        self._set("offset_variance", value)

    @property
    def correlated_variance(self) -> Float[Tensor, "1"]:
        """The variance σ_r² of the correlated noise, a tensor (1,)."""
        return self._value("correlated_variance")

    @correlated_variance.setter
    def correlated_variance(self, value: float | Tensor) -> None:
        self._set("correlated_variance", value)

    @property
    def correlation_time(self) -> Float[Tensor, "1"]:
        """The time (or length) τ over which correlated noise loses its memory, a tensor (1,)."""
        return self._value("correlation_time")

    @correlation_time.setter
    def correlation_time(self, value: float | Tensor) -> None:
        self._set("correlation_time", value)

    @property
    def block_variance(self) -> Float[Tensor, "1"]:
        """The variance σ_e² of what readings of a block share, a tensor (1,); 0 without blocks."""
        return self._value("block_variance") * (self.span > 0)

    @block_variance.setter
    def block_variance(self, value: float | Tensor) -> None:
        self._set("block_variance", value)

    @property
    def slow_variance(self) -> SlowVariance | None:
        """The values of v = σ_b² + σ_r² on new tracks and their probabilities, from the last fit;
        None if predictions use the parameters. Setting a parameter sets it to None."""
        if not self.slow_weights.any():
            return None
        return SlowVariance(self.slow_values.clone(), self.slow_weights.clone())

    @slow_variance.setter
    def slow_variance(self, variance: SlowVariance | None) -> None:
        self.slow_values.zero_()
        self.slow_weights.zero_()
        if variance is not None:
            self.slow_values.copy_(variance.values)
            self.slow_weights.copy_(variance.weights)

    def quantile(
        self,
        function_dist: MultivariateNormal,
        level: float,
        *,
        noise: Float[Tensor, "n ..."] | None = None,
    ) -> Float[Tensor, "n p"]:
        """Return the quantiles (n, p) of new readings, each on a new track; (n,) for p = 1.

        Args:
            function_dist: the distribution of the field at n points, such as `field(xs)`.
            level: the probability of a smaller number, between 0 and 1.
            noise: the known noise of the new readings, as for calling the likelihood.

        Raises:
            ValueError: a level that is not between 0 and 1.
        """
        if not 0 < level < 1:
            raise ValueError(
                f"expected a level between 0 and 1, got {level}; use 0.975 for the upper end of a "
                "central 95 % interval"
            )
        field = self._with_known(function_dist, noise)
        slow, fast = self._slow_and_fast(field.mean)
        z = slow.quantile(level, field.variance + fast)
        return field.mean + z

    def forward(self, function_samples: Tensor, *args, **kwargs) -> torch.distributions.Normal:
        """New readings of new tracks, given values of the field, `function_samples` (n, p)."""
        slow, fast = self._slow_and_fast(function_samples)
        deviation = slow.matched(fast).sqrt()
        return torch.distributions.Independent(
            torch.distributions.Normal(function_samples, deviation), 1
        )

    def marginal(
        self,
        function_dist: MultivariateNormal,
        *args,
        noise: Float[Tensor, "n ..."] | None = None,
        **kwargs,
    ) -> MultivariateNormal:
        """The distribution of new readings, each on a new track, from that of the field, which is
        `function_dist` at n points; `noise`, their known noise, is added where it is given."""
        field = self._with_known(function_dist, noise)
        covariance = field.lazy_covariance_matrix
        if self.slow_variance is None:
            total = along_tracks(self).total.to(field.mean).reshape(1)
            added = ConstantDiagLinearOperator(total, diag_shape=covariance.shape[-1])
        else:
            slow, fast = self._slow_and_fast(field.mean)
            variance = covariance.diagonal(dim1=-1, dim2=-2)
            added = DiagLinearOperator(slow.matched(variance + fast) - variance)
        return type(field)(field.mean, covariance + added)

    def _with_known(
        self, function_dist: MultivariateNormal, noise: Float[Tensor, "n ..."] | None
    ) -> MultivariateNormal:
        """The distribution of the field with the known noise of new readings."""
        if noise is None:
            return function_dist
        return KnownNoiseLikelihood(self.num_tasks).marginal(function_dist, noise=noise)

    def _slow_and_fast(self, values: Tensor) -> tuple[SlowVariance, Float[Tensor, ""]]:
        """The variance of new tracks, and that of other noise, in the type of `values`."""
        noise = along_tracks(self)
        value = noise.slow.unsqueeze(-1)
        slow = self.slow_variance or SlowVariance(value, torch.ones_like(value))
        return slow, (noise.noise + noise.block_variance).to(values)

    def _value(self, name: str) -> Tensor:
        raw = getattr(self, f"raw_{name}")
        return getattr(self, f"raw_{name}_constraint").transform(raw)

    def _set(self, name: str, value: float | Tensor) -> None:
        raw = getattr(self, f"raw_{name}")
        value = as_real_tensor(value, name, dtype=raw.dtype).to(raw).expand_as(raw)
        constraint = getattr(self, f"raw_{name}_constraint")
        self.initialize(**{f"raw_{name}": constraint.inverse_transform(value)})
        self.slow_variance = None

    def _load_from_state_dict(self, state_dict, prefix, *args):
        for name in ("slow_values", "slow_weights"):  # older files have none
            state_dict.setdefault(prefix + name, torch.zeros_like(getattr(self, name)))
        super()._load_from_state_dict(state_dict, prefix, *args)


@along_tracks.register
def _(likelihood: TrackLikelihood) -> TrackNoise:
    return TrackNoise(*(getattr(likelihood, name).squeeze(-1) for name in _NAMES))


@noise_of.register
def _(likelihood: TrackLikelihood, num_outputs: int) -> Tensor:
    check_num_tasks(likelihood, num_outputs)
    total = along_tracks(likelihood).total
    return total * torch.eye(num_outputs, dtype=total.dtype, device=total.device)


@slow_variance_of.register
def _(likelihood: TrackLikelihood) -> SlowVariance | None:
    return likelihood.slow_variance
