"""Densities of observations of an uncertain field, by point: E[log p(y | f)], log E[p(y | f)]."""

import math
from dataclasses import dataclass

import torch
from gpytorch import settings
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from jaxtyping import Float
from linear_operator import to_dense
from linear_operator.settings import max_cholesky_size
from torch import Tensor
from torch.distributions import Distribution, constraints

_NODES = 64  # of the trapezoidal rule in a logarithm
_WEIGHTS = 128  # of a mixture of normal densities
_LATEST = 25.0  # e⁻²⁵ = 1e-11
_LEAST = 1e-5  # of an integrand that begins with a square
_TAIL = 36.0  # e⁻³⁶ = 2e-16


def point_covariances(field: MultivariateNormal) -> Float[Tensor, "*b n p p"]:
    """The covariance of the outputs of each point, of a distribution at n points.

    Example:
        >>> import torch
        >>> from gpytorch.distributions import MultitaskMultivariateNormal
        >>> from gp_orff.data.point_densities import point_covariances
        >>> field = MultitaskMultivariateNormal(torch.zeros(3, 2), torch.eye(6))
        >>> point_covariances(field).shape
        torch.Size([3, 2, 2])
    """
    if not isinstance(field, MultitaskMultivariateNormal):
        return field.variance[..., None, None]
    (n, p), covariance = field.event_shape, field.lazy_covariance_matrix
    if not field._interleaved:
        blocks = to_dense(covariance).unflatten(-1, (p, n)).unflatten(-3, (p, n))
        return blocks.diagonal(dim1=-3, dim2=-1).movedim(-1, -3)
    # Entries of a structured matrix cost more, one by one, than blocks that are small.
    size = p * max(1, max_cholesky_size.value() // p)
    rows = [slice(start, start + size) for start in range(0, n * p, size)]
    parts = [to_dense(covariance[..., part, part] if n * p > size else covariance) for part in rows]
    blocks = [part.unflatten(-1, (-1, p)).unflatten(-3, (-1, p)) for part in parts]
    return torch.cat([b.diagonal(dim1=-4, dim2=-2).movedim(-1, -3) for b in blocks], dim=-3)


@dataclass(frozen=True)
class Errors:
    """Errors e = L⁻¹(y − f) of observations y under a distribution of the field f, in units of the
    noise, whose scale is L Lᵀ: they are normal, point by point. Components that were not observed
    are errors of zero."""

    mean: Float[Tensor, "*b n p"]
    covariance: Float[Tensor, "*b n p p"]
    values: Float[Tensor, "*b n"]  # v, the number of observed components
    logdet: Float[Tensor, "*b n"]  # log|L Lᵀ|

    @classmethod
    def of(
        cls,
        y: Float[Tensor, "*b n p"],
        field: MultivariateNormal,
        scale: Float[Tensor, "*b #n p p"],
    ) -> "Errors":
        """The errors, in float64; NaN in y is a component that was not observed.

        Raises:
            ValueError: NaN in y while gpytorch's `observation_nan_policy` is "ignore".
        """
        residual = (y - field.mean).double()
        if not isinstance(field, MultitaskMultivariateNormal):
            residual = residual.unsqueeze(-1)
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
        # In log t the integrand is analytic in a strip of half-width π/2 and decays at both ends,
        # so that the error of the trapezoidal rule is e^{−π²/h} for the step h, at most 1e-9 here.
        mean = self.distance / nu
        first = math.log(_LEAST) - mean.detach().log1p()
        step = (math.log(_LATEST) - first) / (_NODES - 1)
        nodes = torch.arange(_NODES).to(mean).view(-1, *[1] * mean.dim())
        t = (first + step * nodes).exp()
        gap = ((-t * mean).exp() - self.transform(2 * t / nu).exp()) * (-t).exp()
        expected = mean.log1p() + step * gap.sum(0)
        return self._log_constant(nu) - 0.5 * (nu + self.values) * expected

    def log_mean_student_t(self, nu: Float[Tensor, "1"]) -> Float[Tensor, "*b n"]:
        """log E[t_ν(y; f, L Lᵀ)]."""
        # The mean over w ~ Gamma(ν/2, ν/2) of N(y; f, L Lᵀ/w), by the trapezoidal rule in log w.
        # The largest value of the integrand is between ν/(ν + |m|²) and (ν + v)/ν; around it its
        # logarithm falls at least as a(e^u − 1 − u), with a = ½(ν + v), towards larger w.
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

    def _log_constant(self, nu: Float[Tensor, "1"]) -> Float[Tensor, "*b n"]:
        """log t_ν(0; 0, L Lᵀ)."""
        gammas = (0.5 * (nu + self.values)).lgamma() - (0.5 * nu).lgamma()
        return gammas - 0.5 * (self.values * (math.pi * nu).log() + self.logdet)


class MultivariateStudentT(Distribution):
    """Student's t distribution of vectors, t_ν(m, L Lᵀ): m + L ε/√w, w ~ Gamma(ν/2, ν/2).

    Example:
        >>> import torch
        >>> from gp_orff.data.point_densities import MultivariateStudentT
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
        gammas = (0.5 * (self.df + p)).lgamma() - (0.5 * self.df).lgamma()
        constant = gammas - 0.5 * (p * (math.pi * self.df).log() + logdet)
        return constant - 0.5 * (self.df + p) * (distance / self.df).log1p()
