"""Likelihoods beyond those of gpytorch: Student-t noise, noise along tracks, known noise."""

import math
import warnings
from collections.abc import Iterator, MutableMapping
from copy import deepcopy
from dataclasses import dataclass
from functools import partial

import torch
from gpytorch import settings
from gpytorch.constraints import GreaterThan, Interval
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from gpytorch.likelihoods import (
    GaussianLikelihood,
    Likelihood,
    MultitaskGaussianLikelihood,
    _GaussianLikelihoodBase,
)
from gpytorch.priors import LogNormalPrior, Prior
from gpytorch.utils.warnings import GPInputWarning
from jaxtyping import Bool, Float
from linear_operator import to_dense, to_linear_operator
from linear_operator.operators import (
    BlockDiagLinearOperator,
    BlockInterleavedLinearOperator,
    ConstantDiagLinearOperator,
    DiagLinearOperator,
    LinearOperator,
)
from linear_operator.settings import max_cholesky_size
from torch import Tensor, nn
from torch.distributions import Distribution, constraints

from gp_orff.data.noise import (
    SlowVariance,
    TrackNoise,
    along_tracks,
    check_num_tasks,
    noise_of,
    slow_variance_of,
)
from gp_orff.data.observations import Observations
from gp_orff.data.patterns import GroupKey, LineOfSight
from gp_orff.data.pointwise import Pointwise, by_points
from gp_orff.data.validation import as_real
from gp_orff.kernels.base import as_real_tensor, set_value, value_of

# Densities of observations of an uncertain field, by point: E[log p(y | f)], log E[p(y | f)].


_NODES = 64  # nodes of the trapezoidal rule in a logarithm
_WEIGHTS = 128  # nodes of a mixture of normal densities
_LATEST = 25.0  # upper end of an integral: e⁻²⁵ = 1e-11
_LEAST = 1e-5  # lower end of an integral whose integrand begins with a square
_TAIL = 36.0  # logarithm at which a mixture ends: e⁻³⁶ = 2e-16


def point_covariances(field: MultivariateNormal) -> Float[Tensor, "*b n p p"]:
    """Return the covariances (n, p, p) between the outputs at each of n points.

    Example:
        >>> import torch
        >>> from gpytorch.distributions import MultitaskMultivariateNormal
        >>> from gp_orff.data.likelihoods import point_covariances
        >>> field = MultitaskMultivariateNormal(torch.zeros(3, 2), torch.eye(6))
        >>> point_covariances(field).shape
        torch.Size([3, 2, 2])
    """
    if len(field.event_shape) == 1:
        return field.variance[..., None, None]
    (n, p), covariance = field.event_shape, field.lazy_covariance_matrix
    if not field._interleaved:
        blocks = to_dense(covariance).unflatten(-1, (p, n)).unflatten(-3, (p, n))
        return blocks.diagonal(dim1=-3, dim2=-1).movedim(-1, -3)
    # Small blocks of a structured matrix cost less than single entries.
    size = p * max(1, max_cholesky_size.value() // p)
    rows = [slice(start, start + size) for start in range(0, n * p, size)]
    parts = [to_dense(covariance[..., part, part] if n * p > size else covariance) for part in rows]
    blocks = [part.unflatten(-1, (-1, p)).unflatten(-3, (-1, p)) for part in parts]
    return torch.cat([b.diagonal(dim1=-4, dim2=-2).movedim(-1, -3) for b in blocks], dim=-3)


@dataclass(frozen=True)
class Errors:
    """The distribution of the errors e = L⁻¹(y − f), point by point. Here y are observations, f is
    the field with a normal distribution, and L Lᵀ is the scale of the noise. Components that were
    not observed have errors of zero."""

    mean: Float[Tensor, "*b n p"]
    covariance: Float[Tensor, "*b n p p"]
    values: Float[Tensor, "*b n"]  # the number v of observed components
    logdet: Float[Tensor, "*b n"]  # log|L Lᵀ|

    @classmethod
    def of(
        cls,
        y: Float[Tensor, "*b n p"],
        field: MultivariateNormal,
        scale: Float[Tensor, "*b #n p p"],
    ) -> "Errors":
        """The errors, in float64. NaN in y is a component that was not observed.

        Raises:
            ValueError: y contains NaN, and gpytorch's `observation_nan_policy` is "ignore".
        """
        residual = (y - field.mean).double()
        residual = residual.unsqueeze(-1) if len(field.event_shape) == 1 else residual
        scale, covariance = scale.double(), point_covariances(field).double()
        seen = torch.ones_like(residual)
        if residual.isnan().any():
            if settings.observation_nan_policy.value() == "ignore":
                raise ValueError(
                    f"expected finite observations, got {int(residual.isnan().sum())} NaN among "
                    f"{residual.numel()}; drop these points, or mask the components by "
                    'gpytorch.settings.observation_nan_policy("mask")'
                )
            seen = (~residual.isnan()).to(residual)
            both = seen.unsqueeze(-1) * seen.unsqueeze(-2)
            residual = residual.nan_to_num(nan=0.0)
            scale, covariance = scale * both + torch.diag_embed(1 - seen), covariance * both
        factor = torch.linalg.cholesky(scale)
        root = factor.expand(*covariance.shape[:-2], -1, -1)
        half = torch.linalg.solve_triangular(root, covariance, upper=False)
        return cls(
            torch.linalg.solve_triangular(root, residual.unsqueeze(-1), upper=False).squeeze(-1),
            torch.linalg.solve_triangular(root, half.mT, upper=False),
            seen.sum(-1),
            2 * factor.diagonal(dim1=-1, dim2=-2).log().sum(-1),
        )

    @property
    def distance(self) -> Float[Tensor, "*b n"]:
        """E|e|²."""
        return self.mean.square().sum(-1) + self.covariance.diagonal(dim1=-1, dim2=-2).sum(-1)

    def transform(self, s: Float[Tensor, "k *b n"]) -> Float[Tensor, "k *b n"]:
        """log E exp(−½ s |e|²) = −½ log|I + s C| − ½ s mᵀ(I + s C)⁻¹m."""
        eye = torch.eye(self.mean.shape[-1]).to(self.mean)
        factor = torch.linalg.cholesky(eye + s[..., None, None] * self.covariance)
        half = torch.linalg.solve_triangular(
            factor, self.mean.unsqueeze(-1).expand(*factor.shape[:-1], 1), upper=False
        )
        logdet = 2 * factor.diagonal(dim1=-1, dim2=-2).log().sum(-1)
        return -0.5 * logdet - 0.5 * s * half.square().sum((-1, -2))

    def expected_log_normal(self) -> Float[Tensor, "*b n"]:
        """E[log N(y; f, L Lᵀ)]."""
        return -0.5 * (self.distance + self.logdet + self.values * math.log(2 * math.pi))

    def log_mean_normal(self) -> Float[Tensor, "*b n"]:
        """log E[N(y; f, L Lᵀ)]."""
        mass = self.transform(torch.ones_like(self.values).unsqueeze(0)).squeeze(0)
        return mass - 0.5 * (self.logdet + self.values * math.log(2 * math.pi))

    def expected_log_student_t(self, nu: Float[Tensor, "1"]) -> Float[Tensor, "*b n"]:
        """E[log t_ν(y; f, L Lᵀ)]."""
        # With z = |e|²/ν, log t_ν = const − ½(ν + v) log(1 + z), and by Frullani's integral
        #
        #     E log(1 + z) = log(1 + E z) + ∫ (e^{−t E z} − E e^{−t z}) e^{−t} dt/t ,  t > 0 .
        #
        # In log t the integrand is analytic in a strip of half-width π/2 and decays at both ends.
        # The error of the trapezoidal rule is therefore e^{−π²/h} for the step h, at most 1e-9
        # here.
        mean = self.distance / nu
        first = math.log(_LEAST) - mean.detach().log1p()
        step = (math.log(_LATEST) - first) / (_NODES - 1)
        nodes = torch.arange(_NODES).to(mean).view(-1, *[1] * mean.dim())
        t = (first + step * nodes).exp()
        gap = ((-t * mean).exp() - self.transform(2 * t / nu).exp()) * (-t).exp()
        expected = mean.log1p() + step * gap.sum(0)
        return _log_constant(nu, self.values, self.logdet) - 0.5 * (nu + self.values) * expected

    def log_mean_student_t(self, nu: Float[Tensor, "1"]) -> Float[Tensor, "*b n"]:
        """log E[t_ν(y; f, L Lᵀ)]."""
        # The mean over w ~ Gamma(ν/2, ν/2) of N(y; f, L Lᵀ/w), by the trapezoidal rule in log w.
        # The maximum of the integrand is between ν/(ν + |m|²) and (ν + v)/ν. Towards larger w, its
        # logarithm decreases at least as a(e^u − 1 − u), with a = ½(ν + v).
        shape = 0.5 * (nu + self.values)
        spread = (2 * _TAIL / shape).sqrt()
        low = -(self.mean.square().sum(-1) / nu).log1p() - spread - _TAIL / shape
        first, last = low.detach(), ((self.values / nu).log1p() + spread).detach()
        step = (last - first) / (_WEIGHTS - 1)
        nodes = torch.arange(_WEIGHTS).to(step).view(-1, *[1] * step.dim())
        log_w = first + step * nodes
        exponents = shape * log_w - 0.5 * nu * log_w.exp() + self.transform(log_w.exp())
        half = 0.5 * nu
        constant = half * half.log() - half.lgamma() - 0.5 * self.values * math.log(2 * math.pi)
        return constant - 0.5 * self.logdet + step.log() + exponents.logsumexp(0)


def _log_constant(nu: Tensor, count: Tensor | int, logdet: Tensor) -> Tensor:
    """log t_ν(0; 0, L Lᵀ) for `count` components, from `logdet` = log|L Lᵀ|."""
    gammas = (0.5 * (nu + count)).lgamma() - (0.5 * nu).lgamma()
    return gammas - 0.5 * (count * (math.pi * nu).log() + logdet)


class MultivariateStudentT(Distribution):
    """Student's t distribution of vectors, t_ν(m, L Lᵀ).

    It is the distribution of m + L ε/√w with ε ~ N(0, I) and w ~ Gamma(ν/2, ν/2).

    Args:
        df: the degrees of freedom ν > 0.
        loc: the centre m, (*b, p).
        scale_tril: the lower triangular factor L, (*b, p, p).

    Example:
        >>> import torch
        >>> from gp_orff.data.likelihoods import MultivariateStudentT
        >>> law = MultivariateStudentT(
        ...     torch.tensor(4.0), torch.zeros(3, 2), torch.eye(2)
        ... )
        >>> law.variance[0], law.rsample(torch.Size([5])).shape
        (tensor([2., 2.]), torch.Size([5, 3, 2]))
    """

    arg_constraints = {  # noqa: RUF012  as torch declares it
        "df": constraints.positive,
        "loc": constraints.real_vector,
        "scale_tril": constraints.lower_cholesky,
    }
    support = constraints.real_vector
    has_rsample = True

    def __init__(
        self,
        df: Float[Tensor, "..."],
        loc: Float[Tensor, "*b p"],
        scale_tril: Float[Tensor, "*b p p"],
    ):
        batch = torch.broadcast_shapes(loc.shape[:-1], scale_tril.shape[:-2])
        self.loc = loc.expand(*batch, -1)
        self.scale_tril = scale_tril.expand(*batch, -1, -1)
        self.df = df.reshape(df.shape if df.dim() != 1 else ()).expand(batch)
        super().__init__(batch, loc.shape[-1:], validate_args=False)

    @property
    def mean(self) -> Tensor:
        return self.loc

    @property
    def covariance_matrix(self) -> Float[Tensor, "*b p p"]:
        """ν/(ν − 2) L Lᵀ."""
        return (self.df / (self.df - 2))[..., None, None] * self.scale_tril @ self.scale_tril.mT

    @property
    def variance(self) -> Tensor:
        return self.covariance_matrix.diagonal(dim1=-1, dim2=-2)

    def rsample(self, sample_shape: tuple[int, ...] = ()) -> Tensor:
        shape = self._extended_shape(torch.Size(sample_shape))
        half = (0.5 * self.df).expand(shape[:-1])
        weight = torch._standard_gamma(half) / half
        white = torch.randn(shape, dtype=self.loc.dtype, device=self.loc.device)
        scaled = (self.scale_tril @ white.unsqueeze(-1)).squeeze(-1)
        return self.loc + scaled / weight.sqrt().unsqueeze(-1)

    def log_prob(self, value: Float[Tensor, "*b p"]) -> Float[Tensor, "*b"]:
        p, residual = self.loc.shape[-1], (value - self.loc).unsqueeze(-1)
        factor = self.scale_tril.expand(*residual.shape[:-2], p, p)
        white = torch.linalg.solve_triangular(factor, residual, upper=False)
        distance = white.square().sum((-1, -2))
        logdet = 2 * self.scale_tril.diagonal(dim1=-1, dim2=-2).log().sum(-1)
        constant = _log_constant(self.df, p, logdet)
        return constant - 0.5 * (self.df + p) * (distance / self.df).log1p()


# Noise that comes with the observations: an absolute variance or covariance of each.
#
# An observation y = f + ε, ε ~ N(0, R), has the same information as its components along the axes
# u_k of R = Σ_k λ_k u_k u_kᵀ. These are u_kᵀ y = u_kᵀ f + ε_k, with independent noise of variance
# λ_k.


_ASYMMETRY = 1e-5  # largest asymmetry over √(R_ii R_jj), above rounding in single precision
_SINGULAR = 100 * torch.finfo(torch.float64).eps  # least ratio of eigenvalues


def given_noise(
    noise: object, count: int, num_values: int, observed: Bool[Tensor, "N v"] | None = None
) -> Float[Tensor, "N ..."]:
    """Check the noise of N observations with v values each, and return it as a tensor.

    Entries of values that were not observed are neither checked nor used.

    Args:
        noise: variances (N,) or (N, v), or covariances (N, v, v), in squared units of y.
        count: the number N of observations.
        num_values: the number v of values of an observation; 1 for observations along directions.
        observed: whether each value was observed, (N, v); None if all were.

    Raises:
        TypeError: Values are not real numbers.
        ValueError: The shape is another one, a variance is not positive and finite, or a covariance
            is not symmetric and positive definite.

    Example:
        >>> from gp_orff.data.likelihoods import given_noise
        >>> given_noise([[[0.1]], [[0.2]]], count=2, num_values=1).tolist()
        [0.1, 0.2]
    """
    values = as_real(noise, "noise").detach()
    each, components = (count,), (count, num_values)
    shapes = (each, components, (*components, num_values))
    if values.shape not in shapes:
        raise ValueError(
            f"expected noise of shape {shapes[0]}, a variance for each observation, {shapes[1]}, "
            f"one for each component, or {shapes[2]}, covariances, got {tuple(values.shape)}"
        )
    if observed is None:
        observed = torch.ones(components, dtype=torch.bool)
    observed = observed.to(values.device)
    if num_values == 1:
        values = values.reshape(each)
    if values.dim() == 3:
        return _covariances(values, observed)
    observed = observed.any(-1) if values.dim() == 1 else observed
    positive = (values > 0) & torch.isfinite(values)
    _require(positive | ~observed, values, "positive, finite noise variances")
    return values


def along_axes(part: Observations, covariance: Float[Tensor, "n p p"]) -> list[Observations]:
    """The components of observations along the axes of their noise covariances, axis by axis.

    Args:
        part: observations of some components of vectors.
        covariance: the noise covariances (n, p, p) that `given_noise` returned.
    """
    # The columns of `axes` are the directions u_k. In these coordinates the noise is independent.
    # Every component is an observation along a line of sight, with a separate variance.
    variances, axes = _principal_axes(part.apply_to_covariance(covariance))
    directions = part.pattern.embed(axes.mT)  # (n, v, p): the rows are axes
    y = (axes.mT @ part.y.unsqueeze(-1)).squeeze(-1)
    key = GroupKey(part.key.label, LineOfSight(part.pattern.num_outputs), known=True)
    return [
        Observations(key, part.x, y[:, [k]], 1 / variances[:, k], directions[:, k], part.index)
        for k in range(y.shape[-1])
    ]


def _principal_axes(
    covariance: Float[Tensor, "n v v"],
) -> tuple[Float[Tensor, "n v"], Float[Tensor, "n v v"]]:
    """Eigenvalues and eigenvectors that do not depend on rounding errors. Copies of a record whose
    covariances were rotated with it must have equal axes."""
    # If variances are equal, any axes are eigenvectors. Rounding to nine digits removes differences
    # that come from rounding errors, and `eigh` then returns the axes of the components.
    size = covariance.diagonal(dim1=-1, dim2=-2).mean(-1)[..., None, None]
    _, axes = torch.linalg.eigh((covariance / size).round(decimals=9))
    largest = axes.gather(-2, axes.abs().argmax(-2, keepdim=True))
    return (axes * (covariance @ axes)).sum(-2), axes * largest.sign()


def _covariances(
    values: Float[Tensor, "N v v"], observed: Bool[Tensor, "N v"]
) -> Float[Tensor, "N v v"]:
    """The covariances, exactly symmetric, with the identity for values that were not observed."""
    both = observed.unsqueeze(-1) & observed.unsqueeze(-2)
    eye = torch.eye(values.shape[-1]).to(values)
    # Rows and columns of values that were not observed become those of the identity. The checks
    # below then pass for them, even if the user gave NaN.
    values = torch.where(both, values, eye)
    _require(torch.isfinite(values).all(-1).all(-1), values, "finite noise covariances")
    size = values.diagonal(dim1=-1, dim2=-2).abs().sqrt()
    skew = (values - values.mT).abs() / (size.unsqueeze(-1) * size.unsqueeze(-2))
    _require(~(skew > _ASYMMETRY).any(-1).any(-1), values, "symmetric noise covariances")
    values = 0.5 * (values + values.mT)
    eigenvalues = torch.linalg.eigvalsh(values)
    positive = eigenvalues[:, 0] > _SINGULAR * eigenvalues[:, -1]
    _require(positive, values, "positive definite noise covariances")
    return values


def _require(valid: Bool[Tensor, "N *v"], values: Float[Tensor, "N *b"], what: str) -> None:
    """Raise a ValueError unless all values are valid. Values that were not observed are valid."""
    if not valid.all():
        first = int(torch.nonzero(~valid)[0, 0])
        raise ValueError(
            f"expected {what}, got {int((~valid).sum())} of {valid.numel()} that are not, the "
            f"first for observation {first}: {values[first].tolist()}; drop observations with "
            "unknown noise"
        )


# The degrees of freedom of Student-t noise, as a parameter of a likelihood.


_LIKELIEST, _WIDTH = 2.0, 1.0  # mode of the prior of ν − 2, and standard deviation of log(ν − 2)


class Constrained(Likelihood):
    """A likelihood with parameters by name, each with a constraint."""

    def _add_parameter(
        self, name: str, raw: nn.Parameter, constraint: Interval | None, prior: Prior | None
    ) -> None:
        """Register a parameter with its raw value. It is positive by default."""
        self.register_parameter(f"raw_{name}", raw)
        self.register_constraint(f"raw_{name}", constraint or GreaterThan(0.0))
        if prior is not None:
            closures = partial(value_of, name), partial(set_value, name)
            self.register_prior(f"{name}_prior", prior, *closures)

    def _value_of(self, name: str) -> Tensor:
        """The value of a parameter, transformed by its constraint."""
        raw, constraint = getattr(self, f"raw_{name}"), getattr(self, f"raw_{name}_constraint")
        return constraint.transform(raw)

    def _set_value(self, name: str, value: float | Tensor) -> None:
        raw, constraint = getattr(self, f"raw_{name}"), getattr(self, f"raw_{name}_constraint")
        value = as_real_tensor(value, name, dtype=raw.dtype).to(raw).expand_as(raw)
        self.initialize(**{f"raw_{name}": constraint.inverse_transform(value)})


def _parameter(name: str, doc: str) -> property:
    """A property that returns and sets the value of a parameter."""

    def value(self: Constrained) -> Float[Tensor, "1"]:
        return self._value_of(name)

    value.__doc__ = doc
    return property(value, lambda self, value: self._set_value(name, value))


class HeavyTails(Constrained):
    """A likelihood whose noise may be Student-t with ν > 2 degrees of freedom.

    The raw parameter is `raw_deg_free` (1,) in float64, as in
    `gpytorch.likelihoods.StudentTLikelihood`.
    """

    def add_deg_free(
        self,
        deg_free: float | Tensor,
        learned: bool = False,
        constraint: Interval | None = None,
        prior: Prior | None = None,
    ) -> None:
        """Register ν, its constraint and its prior.

        By default, ν − 2 has a log-normal prior with its mode at 2. If observations do not
        determine ν, a fit therefore gives a value near 4. The prior excludes ν ≤ 2, for which the
        noise has an infinite variance. If the noise of the data is Gaussian, the likelihood alone
        has no maximum at a finite ν. Its product with the prior has one.

        Args:
            deg_free: the value of ν.
            learned: whether a fit learns ν.
            constraint: the constraint of ν. By default, ν > 2.
            prior: the prior of ν. The default is the log-normal prior.

        Raises:
            ValueError: ν is at most 2, or the constraint does not allow it.
        """
        constraint = constraint or GreaterThan(2.0)
        if not deg_free > 2:
            raise ValueError(
                f"{type(self).__name__} expects deg_free > 2, got {float(deg_free)}, for which "
                "the noise has no variance; use 4, for example"
            )
        if not constraint.check(torch.as_tensor(deg_free)):
            raise ValueError(
                f"{type(self).__name__} expects deg_free inside its constraint, {constraint}, got "
                f"{float(deg_free)}; give deg_free= and deg_free_constraint= that agree"
            )
        raw = nn.Parameter(torch.zeros(1, dtype=torch.float64), requires_grad=learned)
        self._add_parameter("deg_free", raw, constraint, prior)
        if prior is None:
            # The mode of a log-normal distribution is exp(m − s²), so its location m is
            # log 2 + s².
            log_normal = LogNormalPrior(math.log(_LIKELIEST) + _WIDTH**2, _WIDTH)
            self.register_prior("deg_free_prior", log_normal, _excess, _set_excess)
        self.deg_free = deg_free

    def copy_deg_free(self, other: Likelihood) -> None:
        """Register the ν of another likelihood with its constraint and prior, if it has ν."""
        nu = getattr(other, "deg_free", None)
        if isinstance(other, HeavyTails) and other.has_deg_free:
            constraint, learned = other.raw_deg_free_constraint, other.raw_deg_free.requires_grad
            prior = None if other.has_default_prior else other.deg_free_prior
            self.add_deg_free(nu, learned, *deepcopy((constraint, prior)))
        elif nu is not None:
            self.add_deg_free(nu)

    @property
    def has_default_prior(self) -> bool:
        """Whether ν has the prior of `add_deg_free`."""
        closures = {name: closure for name, _, _, closure, _ in self.named_priors()}
        return closures.get("deg_free_prior") is _excess

    @property
    def deg_free(self) -> Float[Tensor, "1"] | None:
        """The degrees of freedom ν, a tensor (1,); None for Gaussian noise."""
        return self._value_of("deg_free") if self.has_deg_free else None

    @deg_free.setter
    def deg_free(self, value: float | Tensor) -> None:
        self._set_value("deg_free", value)

    @property
    def has_deg_free(self) -> bool:
        """Whether the noise is Student-t."""
        return "raw_deg_free" in self._parameters

    @property
    def heavier(self) -> float:
        """The variance of the noise divided by its squared scale: ν/(ν − 2), or 1 for Gaussian
        noise."""
        if not self.has_deg_free:
            return 1.0
        nu = self.deg_free.item()
        return nu / (nu - 2)

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *args, **kwargs) -> None:
        """Load a state. ν does not change if the state has none, as in older versions."""
        for name, value in self.state_dict().items():
            if name.startswith(("raw_deg_free", "deg_free_prior")):
                state_dict.setdefault(prefix + name, value.clone())
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


def _excess(likelihood: HeavyTails) -> Tensor:
    return likelihood.deg_free - 2


def _set_excess(likelihood: HeavyTails, value: Tensor) -> None:
    likelihood.deg_free = value + 2


def raw_deg_frees(module: nn.Module) -> set[nn.Parameter]:
    """The parameters that have no effect on the evidence under given weights or
    pseudo-observations: the degrees of freedom, and all parameters of `Pointwise` likelihoods."""
    if isinstance(module, Pointwise):
        return set(module.parameters())
    parameters = module.named_parameters()
    return {raw for name, raw in parameters if name.rpartition(".")[-1] == "raw_deg_free"}


# `KnownNoiseLikelihood`: noise that is given with each observation.


class KnownNoiseLikelihood(HeavyTails, _GaussianLikelihoodBase):
    r"""Noise with a known covariance for each observation: y_n = f(x_n) + ε_n, ε_n ~ N(0, s R_n).

    Here R_n is the known covariance (p, p), and s is a factor. `VectorFieldGP.fit(x, y, noise=R)`
    creates this likelihood for each group of observations with noise. By default s = 1. With
    `scale_noise=True`, a fit learns s by evidence.

    In an `ExactGP`, `KnownNoiseLikelihood(num_tasks=p, noise=R)` extends
    `gpytorch.likelihoods.FixedNoiseGaussianLikelihood` to several outputs. Call
    `likelihood.raw_noise_scale.requires_grad_(True)` to learn s. Pass the noise of new data to
    `get_fantasy_model` as `noise=`. With the F features of an `ORFFKernel`, a training step for N
    points costs N·F² operations.

    With `deg_free=ν` the noise is Student-t with the scale matrix s R_n: ε_n ~ N(0, s R_n / w_n)
    with w_n ~ Gamma(ν/2, ν/2). Use it if some observations are worse than their stated errors. With
    variances (N,), all components of an observation have the same w_n. With variances (N, p) or
    covariances (N, p, p), each component or axis has a separate w_n. A fit with `noise=` replaces a
    `MultitaskStudentTLikelihood` by such a likelihood.

    For the distribution of new observations, call `likelihood(field(xs), noise=R)` with R of shape
    (n,), (n, p) or (n, p, p). This adds s R to the covariance of the field, or s R ν/(ν − 2) for
    Student-t noise. Without `noise=`, it adds the noise of the training data if the points are the
    training points. Otherwise, it gives a warning and adds nothing, like
    `gpytorch.likelihoods.FixedNoiseGaussianLikelihood`.

    Args:
        num_tasks: the number p of outputs.
        noise: the noise R of the training data of an `ExactGP`: variances (N,) or (N, p), or
            covariances (N, p, p), in squared units of y. For a `VectorFieldGP`, pass it to `fit`.
        deg_free: the degrees of freedom ν > 2 of Student-t noise. The default is Gaussian noise.
        learn_deg_free: whether fits learn ν, as for `MultitaskStudentTLikelihood`.
        deg_free_constraint: the constraint of ν, as for `MultitaskStudentTLikelihood`.
        deg_free_prior: the prior of ν, as for `MultitaskStudentTLikelihood`.
        noise_scale_constraint: the constraint of s. By default, s is positive.
        noise_scale_prior: the prior of s. By default, there is none.

    Raises:
        ValueError: `noise` is not valid, or `deg_free` is at most 2.

    Example:
        >>> import gp_orff, torch
        >>> x = torch.rand(
        ...     80, 2, generator=torch.Generator().manual_seed(0)
        ... ).double()
        >>> noise = 0.1 ** torch.linspace(1, 4, 80).double()
        >>> y = torch.stack(
        ...     [torch.sin(3 * x[:, 1]), torch.sin(3 * x[:, 0])], dim=-1
        ... )
        >>> errors = torch.randn(80, 2, generator=torch.Generator().manual_seed(1))
        >>> model = gp_orff.VectorFieldGP(gp_orff.DivergenceFreeKernel(num_dims=2))
        >>> model = model.fit(
        ...     x, y + noise.sqrt()[:, None] * errors, noise=noise, progress=False
        ... )
        >>> model.likelihood.noise_scale.item()
        1.0
        >>> field = model.posterior()(x[:2])
        >>> observation = model.likelihood(field, noise=noise[:2])
        >>> bool(
        ...     torch.allclose(
        ...         observation.variance - field.variance, noise[:2, None]
        ...     )
        ... )
        True
    """

    noise: Float[Tensor, "N ..."] | None

    def __init__(
        self,
        num_tasks: int,
        *,
        noise: Float[Tensor, "N ..."] | None = None,
        deg_free: float | Tensor | None = None,
        learn_deg_free: bool = False,
        deg_free_constraint: Interval | None = None,
        deg_free_prior: Prior | None = None,
        noise_scale_constraint: Interval | None = None,
        noise_scale_prior: Prior | None = None,
    ):
        super().__init__(noise_covar=None)
        self.num_tasks = num_tasks
        self.register_buffer("noise", None)
        if noise is not None:
            self.noise = given_noise(noise, len(as_real(noise, "noise")), num_tasks)
        raw = nn.Parameter(torch.zeros(1, dtype=torch.float64), requires_grad=False)
        self._add_parameter("noise_scale", raw, noise_scale_constraint, noise_scale_prior)
        self.noise_scale = 1.0
        if deg_free is not None:
            self.add_deg_free(deg_free, learn_deg_free, deg_free_constraint, deg_free_prior)

    noise_scale = _parameter("noise_scale", "The factor s of the given noise, a tensor (1,).")

    def forward(
        self,
        function_samples: Float[Tensor, "*b n p"],
        *args,
        noise: Float[Tensor, "n ..."] | None = None,
        **kwargs,
    ) -> torch.distributions.Distribution:
        """Return the distribution of new observations, given values of the field.

        Args:
            function_samples: values of the field (*b, n, p), or (*b, n) if p = 1.
            noise: the noise of the observations: variances (n,) or (n, p), or covariances
                (n, p, p).
        """
        count = function_samples.shape[-1 if self.num_tasks == 1 else -2]
        blocks = self._given(count, args, noise).to(function_samples)
        if self.num_tasks == 1:
            return torch.distributions.Normal(function_samples, blocks.flatten().sqrt())
        return torch.distributions.MultivariateNormal(function_samples, blocks)

    def marginal(
        self,
        function_dist: MultivariateNormal,
        *args,
        noise: Float[Tensor, "n ..."] | None = None,
        **kwargs,
    ) -> MultivariateNormal:
        """Return the distribution of new observations at n points. Calling the likelihood with a
        distribution of the field calls this method.

        Args:
            function_dist: the distribution of the field at n points.
            noise: the noise of the observations: variances (n,) or (n, p), or covariances
                (n, p, p). Without it, the noise of the training data is added if the points are
                the training points.
        """
        if noise is None and not self._has_noise_of(function_dist.event_shape[0], args):
            warnings.warn(
                "expected noise=, the noise of new observations, (n,), (n, p) or (n, p, p), got "
                "none: the result is the distribution of the field without noise; pass noise=",
                GPInputWarning,
                stacklevel=3,
            )
            return function_dist
        mean = function_dist.mean
        covariance = function_dist.lazy_covariance_matrix.evaluate_kernel()
        blocks = self._given(function_dist.event_shape[0], args, noise).to(mean)
        blocks = to_linear_operator(blocks.expand(*function_dist.batch_shape, -1, -1, -1))
        if len(function_dist.event_shape) == 1:
            return function_dist.__class__(mean, covariance + BlockDiagLinearOperator(blocks))
        interleaved = function_dist._interleaved  # whether the order is point by point
        kind = BlockDiagLinearOperator if interleaved else BlockInterleavedLinearOperator
        return function_dist.__class__(mean, covariance + kind(blocks), interleaved=interleaved)

    def expected_log_prob(
        self,
        observations: Float[Tensor, "*b n p"],
        function_dist: MultivariateNormal,
        *args,
        noise: Float[Tensor, "n ..."] | None = None,
        **kwargs,
    ) -> Float[Tensor, "*b n"]:
        """Return E[log p(y_n | f)], (n,), for `VariationalELBO` of gpytorch.

        Args:
            observations: observations y (n, p).
            function_dist: the distribution of the field f at their points.
            noise: the noise of the observations, as for `marginal`.
        """
        errors = self._errors(observations, function_dist, args, noise)
        return errors.expected_log_normal().to(observations)

    def log_marginal(
        self,
        observations: Float[Tensor, "*b n p"],
        function_dist: MultivariateNormal,
        *args,
        noise: Float[Tensor, "n ..."] | None = None,
        **kwargs,
    ) -> Float[Tensor, "*b n"]:
        """Return log E[p(y_n | f)], (n,), for `PredictiveLogLikelihood` of gpytorch.

        Args:
            observations: observations y (n, p).
            function_dist: the distribution of the field f at their points.
            noise: the noise of the observations, as for `marginal`.
        """
        errors = self._errors(observations, function_dist, args, noise)
        return errors.log_mean_normal().to(observations)

    def get_fantasy_likelihood(
        self, *, noise: Float[Tensor, "m ..."] | None = None, **kwargs
    ) -> "KnownNoiseLikelihood":
        """Return the likelihood of the training data and m new observations. `get_fantasy_model`
        calls it.

        Args:
            noise: the noise of the new observations: variances (m,) or (m, p), or covariances
                (m, p, p).

        Raises:
            ValueError: The noise of the training data or of the new observations is missing.
        """
        if self.noise is None or noise is None:
            raise ValueError(
                "expected noise= of the data and of the new observations, as in "
                "model.get_fantasy_model(x, y, noise=noise), got none"
            )
        new = given_noise(noise, len(as_real(noise, "noise")), self.num_tasks).to(self.noise)
        blocks = torch.cat([_as_blocks(values, self.num_tasks) for values in (self.noise, new)])
        likelihood = deepcopy(self)
        likelihood.noise = given_noise(blocks, len(blocks), self.num_tasks)
        return likelihood

    def _errors(self, observations, function_dist, params, noise) -> Errors:
        """The errors of observations under Gaussian noise."""
        if self.has_deg_free:
            raise NotImplementedError(
                "expected Gaussian noise in a KnownNoiseLikelihood outside VectorFieldGP, got "
                "deg_free=; use MultitaskStudentTLikelihood(num_tasks), which learns the noise"
            )
        blocks = self._given(function_dist.event_shape[0], params, noise)
        return Errors.of(observations, function_dist, blocks)

    def _has_noise_of(self, count: int, params: tuple) -> bool:
        """Whether the stored noise belongs to `count` observations with these parameters."""
        return self.noise is not None and len(self.noise) == count and (self.training or params)

    def _given(
        self, count: int, params: tuple, noise: Float[Tensor, "n ..."] | None
    ) -> Float[Tensor, "n p p"]:
        """s R of the observations, from the given noise, or else from the stored noise."""
        if noise is not None:
            noise = given_noise(noise, count, self.num_tasks)
        elif self._has_noise_of(count, params):
            noise = self.noise
        else:
            raise ValueError(
                f"expected noise=, the noise of {count} observations, (n,), (n, p) or (n, p, p), "
                "got none; pass noise="
            )
        blocks = _as_blocks(noise, self.num_tasks)
        return self.heavier * self.noise_scale * blocks.to(self.noise_scale.device)


def _as_blocks(noise: Float[Tensor, "n ..."], num_tasks: int) -> Float[Tensor, "n p p"]:
    """The noise that `given_noise` returned, as covariances."""
    if noise.dim() == 1:
        noise = noise.unsqueeze(-1).expand(-1, num_tasks)
    return noise if noise.dim() == 3 else torch.diag_embed(noise)


@noise_of.register
def _(likelihood: KnownNoiseLikelihood, num_outputs: int) -> Tensor:
    check_num_tasks(likelihood, num_outputs)
    if likelihood.noise is not None:
        raise ValueError(
            "expected noise= in a call of fit, got it in KnownNoiseLikelihood(noise=), which is "
            "for an ExactGP; call VectorFieldGP(kernel).fit(x, y, noise=noise)"
        )
    scale = likelihood.noise_scale.unsqueeze(-1)
    return scale * torch.eye(num_outputs, dtype=scale.dtype, device=scale.device)


# `MultitaskStudentTLikelihood`, and a container of likelihoods by name.


class MultitaskStudentTLikelihood(HeavyTails, MultitaskGaussianLikelihood):
    r"""Student-t noise for vectors with outliers: ε ~ t_ν(0, Σ) in p dimensions.

    The noise of observation n is N(0, Σ/w_n) with w_n ~ Gamma(ν/2, ν/2) (Lange, Little & Taylor
    1989, *Robust statistical modeling using the t distribution*). All components of a vector have
    the same weight w_n. `VectorFieldGP` computes the field f, the weights and the hyperparameters
    by variational EM. The E-step is

        E[w_n] = (ν + v) / (ν + d_n) ,    d_n = E_f[(y_n − f(x_n))ᵀ Σ⁻¹ (y_n − f(x_n))] ,

    where v is the number of observed components of the vector. The log marginal likelihood of the
    model is the evidence lower bound (ELBO).

    With `learn_deg_free=True`, a fit also maximises Σ_n log t_ν(d_n) + log p(ν) over ν, where p(ν)
    is the prior, and

        t_ν(d) ∝ Γ((ν + v)/2) / Γ(ν/2) ν^(−v/2) (1 + d/ν)^(−(ν + v)/2) .

    The sum is the ELBO under the best weights for ν (ECME: Liu & Rubin 1995, *ML estimation of the
    t distribution using EM and its extensions, ECM and ECME*). A learned ν is at least 2.5, or at
    least its starting value if this is smaller. With gross outliers, the evidence is largest near
    ν = 2, but predictions are then worse and error bars too small. `condition` and `update` do not
    change ν.

    If you call the likelihood on a distribution of the field, it adds Gaussian noise with the
    covariance νΣ/(ν − 2) of the Student-t noise. If you call it on values of the field, it returns
    the Student-t distribution of observations. In variational models of gpytorch, use it with
    `VariationalELBO` or `PredictiveLogLikelihood`. An `ExactGP` does not accept it.

    Args:
        num_tasks: the number p of outputs.
        deg_free: the degrees of freedom ν > 2, or their starting value if fits learn them. With
            ν = 4, residuals of many standard deviations get small weights, and predictions lose
            little accuracy if the noise is Gaussian.
        learn_deg_free: whether fits learn ν. A learned ν describes the distribution of observations
            best. With few observations, or few and gross outliers, ν = 4 gives better predictions.
        deg_free_constraint: the constraint of ν. By default, ν > 2.
        deg_free_prior: the prior of ν. The default is log p(ν) = −½ log²((ν − 2)/2) + const, with
            its mode at 4. If the data do not determine ν, the prior gives a value near 4.
        has_task_noise: False for Σ = σ² I. True adds a learned covariance (p, p) to σ² I, which is
            diagonal for the default `rank` of 0.
        kwargs: other arguments of `gpytorch.likelihoods.MultitaskGaussianLikelihood`, such as
            `rank`. The noise covariance of that class is the scale matrix Σ here, in squared units
            of y.

    Raises:
        ValueError: `deg_free` is at most 2, for which the noise has no variance.

    Attributes:
        deg_free: ν, a tensor (1,). You can set it.

    Example:
        >>> import gp_orff, torch
        >>> x = torch.rand(80, 2, generator=torch.Generator().manual_seed(0))
        >>> y = torch.stack(
        ...     [torch.sin(3 * x[:, 1]), torch.sin(3 * x[:, 0])], dim=-1
        ... )
        >>> y[:5] += 10  # outliers
        >>> robust = gp_orff.MultitaskStudentTLikelihood(num_tasks=2)
        >>> kernel = gp_orff.DivergenceFreeKernel(num_dims=2)
        >>> model = gp_orff.VectorFieldGP(kernel, likelihood=robust).fit(
        ...     x, y, progress=False
        ... )
        >>> (model.posterior().mean(x[5:]) - y[5:]).abs().max() < 0.2
        tensor(True)
    """

    def __init__(
        self,
        num_tasks: int,
        *,
        deg_free: float | Tensor = 4.0,
        learn_deg_free: bool = False,
        deg_free_constraint: Interval | None = None,
        deg_free_prior: Prior | None = None,
        has_task_noise: bool = False,
        **kwargs,
    ):
        super().__init__(num_tasks, has_task_noise=has_task_noise, **kwargs)
        self.add_deg_free(deg_free, learn_deg_free, deg_free_constraint, deg_free_prior)

    def forward(
        self, function_samples: Float[Tensor, "*b n p"], *args, **kwargs
    ) -> MultivariateStudentT:
        """Return the Student-t distribution of observations, given values of the field.

        Args:
            function_samples: values of the field (*b, n, p).
        """
        scale = self._scale.to(function_samples)
        return MultivariateStudentT(
            self.deg_free.to(scale), function_samples, torch.linalg.cholesky(scale)
        )

    def expected_log_prob(
        self,
        target: Float[Tensor, "*b n p"],
        input: MultitaskMultivariateNormal,
        *args,
        **kwargs,
    ) -> Float[Tensor, "*b n"]:
        """Return E[log t_ν(y_n; f, Σ)], (n,), for `VariationalELBO` of gpytorch.

        The expectation is over the joint distribution of all outputs at a point, by quadrature in
        one dimension, to ten digits.

        Args:
            target: observations y (n, p).
            input: the distribution of the field f at their points.
        """
        errors = Errors.of(target, input, self._scale)
        return errors.expected_log_student_t(self.deg_free).to(target)

    def log_marginal(
        self,
        observations: Float[Tensor, "*b n p"],
        function_dist: MultitaskMultivariateNormal,
        *args,
        **kwargs,
    ) -> Float[Tensor, "*b n"]:
        """Return log E[t_ν(y_n; f, Σ)], (n,), for `PredictiveLogLikelihood` of gpytorch.

        The expectation is over the joint distribution of all outputs at a point, by quadrature in
        one dimension, to ten digits.

        Args:
            observations: observations y (n, p).
            function_dist: the distribution of the field f at their points.
        """
        errors = Errors.of(observations, function_dist, self._scale)
        return errors.log_mean_student_t(self.deg_free).to(observations)

    @property
    def _scale(self) -> Float[Tensor, "*b 1 p p"]:
        """The scale matrix Σ, common to all points."""
        return noise_of(self, self.num_tasks).unsqueeze(-3)

    def _shaped_noise_covar(self, *args, **kwargs) -> LinearOperator:
        scale = super()._shaped_noise_covar(*args, **kwargs)
        return scale * torch.tensor(self.heavier).to(scale.device)


class NamedLikelihoods(nn.Module, MutableMapping):
    """Likelihoods by the names of groups. Any string is a valid name, unlike in
    `torch.nn.ModuleDict`."""

    def __init__(self):
        super().__init__()
        self.names: list[str] = []
        self.members = nn.ModuleList()

    def __getitem__(self, name: str) -> Likelihood:
        if name not in self.names:
            raise KeyError(
                f"expected one of the groups {self.names}, got {name!r}; to set the noise of a "
                "group before its data, assign a likelihood, such as "
                "GaussianLikelihood(noise_constraint=GreaterThan(0.0))"
            )
        return self.members[self.names.index(name)]

    def __setitem__(self, name: str, likelihood: Likelihood) -> None:
        likelihood = by_points(likelihood)
        if name in self.names:
            self.members[self.names.index(name)] = likelihood
        else:
            self.names.append(name)
            self.members.append(likelihood)

    def __delitem__(self, name: str) -> None:
        del self.members[self.names.index(name)]
        self.names.remove(name)

    def __iter__(self) -> Iterator[str]:
        return iter(list(self.names))

    def __len__(self) -> int:
        return len(self.names)

    __hash__ = nn.Module.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other


def default_likelihood(num_outputs: int) -> Likelihood:
    """A Gaussian likelihood with one positive noise variance, without gpytorch's lower bound."""
    if num_outputs == 1:
        return GaussianLikelihood(noise_constraint=GreaterThan(0.0))
    return MultitaskGaussianLikelihood(
        num_outputs, has_task_noise=False, noise_constraint=GreaterThan(0.0)
    )


# `TrackLikelihood`: noise that is common to observations of one track.


_NAMES = (
    "noise",
    "offset_variance",
    "correlated_variance",
    "correlation_time",
    "block_variance",
)
NUM_VALUES = 64
"""The number of values of the variance of new tracks over which predictions integrate."""


class TrackLikelihood(Constrained):
    r"""Noise of observations along tracks: an offset, correlated noise and white noise.

    The observations y_i of a track at the times t_i are

        y_i = f(x_i) + b + r(t_i) + e_i + ε_i ,
        b ~ N(0, σ_b²) , Cov[r(t), r(s)] = σ_r² exp(−|t − s| / τ) , ε_i ~ N(0, σ²) ,

    independently for each component and each track (r: Uhlenbeck & Ornstein 1930, *On the theory
    of the Brownian motion*). Dense observations are averaged over blocks that are short compared
    with τ. The observations of a block share the error e_i ~ N(0, σ_e²), which is independent
    between blocks. In the mean of a block, all observations have equal weights.

    `VectorFieldGP.fit(x, y, track=..., time=...)` creates this likelihood for each group of
    observations along tracks and learns its parameters by evidence. Without times, t is the length
    of the path. With `noise=`, the known variance of an observation is added to σ². Then σ² is the
    variance in excess of the stated errors.

    If you call the likelihood on the distribution of a field, it returns the distribution of new
    observations, each on a new track. For parameters that you set, it adds the variance
    v + σ_e² + σ² to the variance of the field, where v = σ_b² + σ_r².

    A small number of tracks leaves v uncertain: three tracks give two independent differences of
    offsets in each component. After `fit`, predictions therefore integrate over v, given all data
    and the other parameters. The posterior of v follows from the restricted evidence p(y | v) with
    the Fisher information I(v) and Jeffreys' prior √I(v):

        p(v | y) ∝ p(y | v) √I(v) ,    I(v) = ½ tr[(BᵀPB)²] ,
        P = K⁻¹ − K⁻¹H(HᵀK⁻¹H)⁻¹HᵀK⁻¹ ,

    where K is the covariance of y, the matrix B assigns observations to tracks, and H is the effect
    of the constant mean (Box & Tiao 1973, *Bayesian inference in statistical analysis*). The
    distribution of a new observation is then a mixture of Gaussians. If the offsets of T tracks are
    known precisely, it is a Student-t distribution with p (T − 1) degrees of freedom. `quantile`
    returns its quantiles. A call of the likelihood returns the Gaussian distribution with the same
    central 95 % interval.

    If `offset_variance` has a prior, it replaces Jeffreys' prior. Predictions use the present value
    of v, without integration, in four cases:

    - `raw_offset_variance` is frozen.
    - You set a parameter after the fit.
    - The group has more than 400 offsets.
    - The data contain no difference of offsets, for example with a single track.

    Args:
        num_tasks: the number p of outputs.
        noise_constraint, noise_prior: the constraint and the prior of σ², in squared units of y. By
            default, each parameter of this class is positive and has no prior.
        offset_variance_constraint, offset_variance_prior: the constraint and the prior of σ_b², in
            squared units of y.
        correlated_variance_constraint, correlated_variance_prior: the constraint and the prior of
            σ_r², in squared units of y.
        correlation_time_constraint, correlation_time_prior: the constraint and the prior of τ, in
            units of time or length.
        block_variance_constraint, block_variance_prior: the constraint and the prior of σ_e², in
            squared units of y.

    Attributes:
        span: the duration of one block, whose mean is one observation. A fit chooses it. It is 0 if
            blocks are single observations.
        duration: the median duration (or length) of the tracks of the last fit; 0 before a fit.

    Example:
        >>> import gp_orff, torch
        >>> time = torch.arange(60).double()
        >>> x = torch.stack(
        ...     [torch.sin(0.21 * time), torch.sin(0.13 * time)], dim=-1
        ... )
        >>> offsets = torch.tensor([[0.4, -0.3], [-0.5, 0.2], [0.1, 0.3]]).double()
        >>> track = torch.arange(60) // 20
        >>> y = torch.sin(3 * x).flip(-1) + offsets[track]
        >>> y = y + 0.1 * torch.randn(
        ...     60, 2, generator=torch.Generator().manual_seed(0)
        ... )
        >>> model = gp_orff.VectorFieldGP(gp_orff.DivergenceFreeKernel(num_dims=2))
        >>> model = model.fit(x, y, track=track, time=time, progress=False)
        >>> type(model.likelihood).__name__
        'TrackLikelihood'
        >>> field = model.posterior()
        >>> new = model.likelihood(field(x[:1]))  # an observation on a new track
        >>> bool(
        ...     (
        ...         new.variance > field.variance(x[:1]) + model.likelihood.noise
        ...     ).all()
        ... )
        True
        >>> upper = model.likelihood.quantile(field(x[:1]), 0.975)
        >>> torch.allclose(upper, new.mean + 1.96 * new.stddev, rtol=1e-4)
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
        self.register_buffer("span", torch.zeros(()))
        self.register_buffer("duration", torch.zeros(()))
        self.register_buffer("slow_values", torch.zeros(NUM_VALUES))
        self.register_buffer("slow_weights", torch.zeros(NUM_VALUES))  # zeros before a fit
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
            self._add_parameter(name, nn.Parameter(torch.zeros(1)), constraint, prior)

    noise = _parameter(
        "noise",
        "The variance σ² (1,) of the white noise of one observation, in squared units of y.",
    )
    offset_variance = _parameter(
        "offset_variance",
        "The variance σ_b² (1,) of the offset that all observations of one track share, in squared "
        "units of y.",
    )
    correlated_variance = _parameter(
        "correlated_variance",
        "The variance σ_r² (1,) of the correlated noise, in squared units of y.",
    )
    correlation_time = _parameter(
        "correlation_time",
        "The correlation time τ (1,) of the correlated noise, in units of time, or of length if "
        "tracks have no times.",
    )
    block_variance = _parameter(
        "block_variance",
        "The variance σ_e² (1,) of the error that all observations of one block share, in squared "
        "units of y; 0 if blocks are single observations.",
    )

    def _value_of(self, name: str) -> Tensor:
        value = super()._value_of(name)
        return value * (self.span > 0) if name == "block_variance" else value

    def _set_value(self, name: str, value: float | Tensor) -> None:
        super()._set_value(name, value)
        self.slow_variance = None

    @property
    def slow_variance(self) -> SlowVariance | None:
        """The posterior distribution of v = σ_b² + σ_r² from the last fit, for new tracks.

        It has 64 values of v in squared units of y, and their probabilities. It is None if
        predictions use the present value of v; the docstring of the class lists these cases.
        """
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
        """Return quantiles of new observations, each on a new track.

        Args:
            function_dist: the distribution of the field at n points, such as `field(xs)`.
            level: the probability of a smaller value, between 0 and 1.
            noise: known variances (n,) of the new observations, in squared units of y. By default,
                there is no known noise.

        Returns:
            The quantiles (n, p), or (n,) for p = 1, in units of y.

        Raises:
            ValueError: The level is not between 0 and 1.

        Example:
            >>> import gp_orff, torch
            >>> from gpytorch.distributions import MultitaskMultivariateNormal
            >>> field = MultitaskMultivariateNormal(torch.zeros(3, 2), torch.eye(6))
            >>> gp_orff.TrackLikelihood(num_tasks=2).quantile(field, 0.975).shape
            torch.Size([3, 2])
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
        """Return the distribution of new observations on new tracks, given values of the field.

        Args:
            function_samples: values of the field (n, p).
        """
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
        """Return the distribution of new observations, each on a new track. Calling the likelihood
        with a distribution of the field calls this method.

        Args:
            function_dist: the distribution of the field at n points.
            noise: known variances (n,) of the observations, in squared units of y. By default,
                there is no known noise.
        """
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
        """The distribution of the field plus the known noise of new observations."""
        if noise is None:
            return function_dist
        return KnownNoiseLikelihood(self.num_tasks).marginal(function_dist, noise=noise)

    def _slow_and_fast(self, values: Tensor) -> tuple[SlowVariance, Float[Tensor, ""]]:
        """The variance v of new tracks, and the variance of other noise, in the type of
        `values`."""
        noise = along_tracks(self)
        value = noise.slow.unsqueeze(-1)
        slow = self.slow_variance or SlowVariance(value, torch.ones_like(value))
        return slow, (noise.noise + noise.block_variance).to(values)

    def _load_from_state_dict(self, state_dict, prefix, *args):
        for name in ("slow_values", "slow_weights"):  # older files do not have these
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
