"""Likelihoods of single points, by quadrature, and pseudo-observations that represent them."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import singledispatch

import numpy as np
import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.likelihoods import BernoulliLikelihood, Likelihood
from gpytorch.likelihoods.gaussian_likelihood import _GaussianLikelihoodBase
from gpytorch.likelihoods.likelihood import _OneDimensionalLikelihood
from gpytorch.settings import num_likelihood_samples
from jaxtyping import Float
from torch import Tensor
from torch.distributions import Distribution, constraints

from gp_orff.data.noise import noise_of, of_kind
from gp_orff.data.observations import Observations, Represented
from gp_orff.data.patterns import DEFAULT, Components, LineOfSight
from gp_orff.kernels.base import cholesky
from gp_orff.symbols.base import required

# Expectations under the distribution of the outputs of one point.


_NODES = {1: 32, 2: 16, 3: 10}  # nodes of Gauss–Hermite rules along each output
_POINTS = 512  # Sobol' points for more outputs, which are used with their negatives


class Pointwise(Likelihood):
    r"""Any likelihood p(y_n | f(x_n)) of single points, by quadrature over the outputs of a point.

    Let q be the normal distribution of the p outputs at each point, with their covariance. The
    class computes

        E_n = ∫ q(f) log p(y_n | f) df ,    log ∫ q(f) p(y_n | f) df .

    `VectorFieldGP(kernel, likelihood=...)` wraps any likelihood without a noise covariance in a
    `Pointwise`. It then computes the normal distribution q of the field that maximises the evidence
    lower bound (ELBO)

        Σ_n E_n − KL(q ‖ prior) .

    Likelihoods of single outputs, such as `BernoulliLikelihood` or `PoissonLikelihood`, apply to
    each output, and E_n is the sum over the outputs. All others, such as `SoftmaxLikelihood`,
    depend on all outputs of a point. In train mode, gpytorch draws these outputs independently, and
    posteriors can become 35 % too narrow without an error. This class includes their covariance.

    NaN in y are values that were not observed. If you call the likelihood on the distribution of a
    field, it returns the distribution of observations, as the base likelihood does:
    `model.likelihood(model.posterior()(xs))`.

    Args:
        base: a gpytorch likelihood.
        nodes: the number of Gauss–Hermite nodes along each output. The default is 32, 16 or 10 for
            1, 2 or 3 outputs. For more outputs, 512 Sobol points and their negatives are used.

    Raises:
        TypeError: `base` is not a gpytorch likelihood.

    Example:
        >>> import gp_orff, gpytorch, torch
        >>> x = torch.rand(
        ...     200, 1, generator=torch.Generator().manual_seed(0)
        ... ).double()
        >>> rate = torch.exp(1 + torch.sin(6 * x[:, 0]))
        >>> counts = torch.poisson(rate, generator=torch.Generator().manual_seed(1))
        >>> kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())
        >>> poisson = gpytorch.likelihoods.PoissonLikelihood()
        >>> model = gp_orff.VectorFieldGP(kernel, likelihood=poisson)
        >>> field = model.fit(x, counts, progress=False).posterior()
        >>> learned = torch.nn.functional.softplus(field.mean(x)[:, 0])
        >>> bool(((learned - rate).abs() / rate).mean() < 0.2)
        True
    """

    def __init__(self, base: Likelihood, nodes: int | None = None):
        required(
            base,
            Likelihood,
            "Pointwise expects a gpytorch likelihood",
            "use, for example, Pointwise(gpytorch.likelihoods.PoissonLikelihood())",
        )
        super().__init__(max_plate_nesting=base.max_plate_nesting)
        self.base, self.nodes = base, nodes
        self.register_buffer("unit", torch.ones((), dtype=torch.float64), persistent=False)

    @property
    def joint(self) -> bool:
        """Whether the likelihood of a point depends jointly on all p outputs of the field there.

        If False, the likelihood is a product of one factor for each output.
        """
        return not isinstance(self.base, _OneDimensionalLikelihood)

    def forward(self, function_samples: Tensor, *args, **kwargs) -> Distribution:
        """Return the distribution of observations, given values of the field.

        Args:
            function_samples: values of the field (*b, n, p), or (*b, n) if p = 1.
        """
        return self.base.forward(function_samples, *args, **kwargs)

    def marginal(self, function_dist: MultivariateNormal, *args, **kwargs) -> Distribution:
        """Return the distribution of observations at n points. Calling the likelihood with a
        distribution of the field calls this method.

        The base likelihood computes it in closed form, or else from draws of the field.

        Args:
            function_dist: the distribution of the field at n points.
        """
        if self.base.has_analytic_marginal:
            return self.base.marginal(function_dist, *args, **kwargs)
        draws = function_dist.rsample(torch.Size([num_likelihood_samples.value()]))
        return self.base.forward(draws, *args, **kwargs)

    def expected_log_prob(
        self, observations: Tensor, function_dist: MultivariateNormal, *args, **kwargs
    ) -> Float[Tensor, "*b n"]:
        """Return E_n, (*b, n), for `VariationalELBO` of gpytorch.

        Args:
            observations: observations y (*b, n, v), or (*b, n) if there is one value per point.
            function_dist: the distribution of the field f at their points.

        Raises:
            ValueError: The observations have another shape than the field, or a value has zero
                probability.
        """
        moments = moments_of(function_dist)
        self.check(observations, moments[0])
        return self.expected(observations, *moments)

    def log_marginal(
        self, observations: Tensor, function_dist: MultivariateNormal, *args, **kwargs
    ) -> Float[Tensor, "*b n"]:
        """Return log ∫ q(f) p(y_n | f) df, (*b, n), for `PredictiveLogLikelihood` of gpytorch.

        Args:
            observations: observations y (*b, n, v), or (*b, n) if there is one value per point.
            function_dist: the distribution of the field f at their points.

        Raises:
            ValueError: The observations have another shape than the field, or a value has zero
                probability.
        """
        moments = moments_of(function_dist)
        self.check(observations, moments[0])
        logs, weights = self._at_nodes(observations, *moments)
        return (logs + weights.log()).logsumexp(-1)

    @torch.no_grad()
    def check(self, y: Float[Tensor, "*b n v"], mean: Float[Tensor, "*b n p"]) -> None:
        """Raise an error if the likelihood cannot describe the observations. NaN are allowed.

        Args:
            y: observations (*b, n, v).
            mean: the mean of the outputs at their points, (*b, n, p).

        Raises:
            ValueError: The observations have another shape than the field, or a value has zero
                probability.
        """
        points, p = mean.shape[:-1], mean.shape[-1]
        rows = y.shape[: len(points)] == points
        if not (rows if self.joint else y.shape == mean.shape or (rows and p == 1)):
            expected = f"{tuple(points)} or {(*points, 'v')}" if self.joint else tuple(mean.shape)
            raise ValueError(
                f"{type(self.base).__name__} expects observations y of shape {expected}, one row "
                f"for each point, got {tuple(y.shape)}; reshape y"
            )
        filled, missing = _filled(y)
        if not missing.all():
            outputs = mean if self.joint else mean.reshape(y.shape)
            _check_support(filled, self.base, outputs)

    def expected(
        self,
        y: Float[Tensor, "*b n v"],
        mean: Float[Tensor, "*b n p"],
        covariance: Float[Tensor, "*b n p p"],
    ) -> Float[Tensor, "*b n"]:
        """Return E_n, (*b, n), for given moments of the field.

        Args:
            y: observations (*b, n, v), or (*b, n) if there is one value per point.
            mean: the mean of the outputs at each point, (*b, n, p).
            covariance: the covariance of the outputs at each point, (*b, n, p, p).
        """
        if self.joint:
            logs, weights = self._at_nodes(y, mean, covariance)
            return (weights * logs).sum(-1)
        variance = covariance.diagonal(dim1=-1, dim2=-2)[..., None, None]
        logs, weights = self._at_nodes(y.reshape(mean.shape), mean.unsqueeze(-1), variance)
        return (weights * logs).sum((-1, -2))

    @torch.enable_grad()
    def derivatives(
        self,
        y: Float[Tensor, "n v"],
        mean: Float[Tensor, "n p"],
        covariance: Float[Tensor, "n p p"],
    ) -> tuple[Float[Tensor, "n"], Float[Tensor, "n p"], Float[Tensor, "n p p"]]:
        """Return E_n = E[log p(y_n | f)], its gradient E[∇ log p], and the curvature −E[∇² log p].

        Expectations are over f with the given mean and covariance. The gradient is that of E_n with
        respect to the mean. The curvature is −2 times the gradient of E_n with respect to the
        covariance (Opper & Archambeau 2009, *The variational Gaussian approximation revisited*).

        Args:
            y: observations (n, v).
            mean: the mean of the outputs at each point, (n, p).
            covariance: the covariance of the outputs at each point, (n, p, p).

        Returns:
            E_n (n,), the gradient (n, p) and the curvature (n, p, p).
        """
        mean, covariance = (t.detach().clone().requires_grad_() for t in (mean, covariance))
        expected = self.expected(y, mean, covariance)
        slope, slope_of_covariance = torch.autograd.grad(expected.sum(), [mean, covariance])
        return expected.detach(), slope, -(slope_of_covariance + slope_of_covariance.mT)

    def _at_nodes(
        self, y: Tensor, mean: Float[Tensor, "*b n p"], covariance: Float[Tensor, "*b n p p"]
    ) -> tuple[Float[Tensor, "*b n k"], Float[Tensor, "k"]]:
        """log p(y_n | f) at nodes f of the distribution of every point, and their weights."""
        p = mean.shape[-1]
        nodes, weights = (t.to(mean) for t in _rule(p, self.nodes))
        root = covariance.clamp_min(0).sqrt() if p == 1 else cholesky(covariance)
        # The nodes of a point replace the points of a distribution, because some likelihoods
        # interpret p points with p outputs as another layout.
        f = mean.unsqueeze(-2) + nodes @ root.mT  # (*b, n, k, p)
        if y.dim() == mean.dim() and y.shape[-1] == 1:
            y = y.squeeze(-1)
        several = y.dim() == mean.dim()
        y, missing = (t.unsqueeze(-2 if several else -1) for t in _filled(y))
        logs = log_density(self.base, f.squeeze(-1) if p == 1 else f, y)
        if logs.dim() == f.dim():  # of every value
            return logs.masked_fill(missing, 0.0).sum(-1), weights
        return logs.masked_fill(missing.any(-1) if several else missing, 0.0), weights


@singledispatch
def log_density(
    likelihood: Likelihood, f: Float[Tensor, "*n"], y: Float[Tensor, "*n"]
) -> Float[Tensor, "*n"]:
    """log p(y | f) as a smooth function of f. Register an implementation for likelihoods whose
    `log_prob` has rounding errors."""
    return likelihood.forward(f).log_prob(y)


@log_density.register
def _(likelihood: BernoulliLikelihood, f: Tensor, y: Tensor) -> Tensor:
    """log p(y | f) without the clamped probabilities of torch and the polynomials of gpytorch,
    whose derivatives are inconsistent with their values."""
    return torch.special.log_ndtr((2 * y - 1) * f)


def _rule(p: int, nodes: int | None) -> tuple[Float[Tensor, "k p"], Float[Tensor, "k"]]:
    """Nodes and weights of a rule for N(0, I_p)."""
    if nodes is None and p not in _NODES:
        uniform = torch.quasirandom.SobolEngine(p, scramble=True, seed=0).draw(_POINTS)
        draws = torch.special.ndtri(uniform.double().clamp(1e-6, 1 - 1e-6))
        draws = torch.cat([draws, -draws])
        factor = torch.linalg.cholesky(draws.mT @ draws / len(draws))
        draws = torch.linalg.solve_triangular(
            factor, draws.mT, upper=False
        ).mT  # so that the moments are those of N(0, I)
        return draws, torch.full((len(draws),), 1 / len(draws), dtype=torch.float64)
    t, w = map(torch.from_numpy, np.polynomial.hermite_e.hermegauss(nodes or _NODES[p]))
    grids = torch.cartesian_prod(*[t] * p), torch.cartesian_prod(*[w / w.sum()] * p)
    return grids[0].reshape(-1, p), grids[1].reshape(-1, p).prod(-1)


def _filled(y: Tensor) -> tuple[Tensor, Tensor]:
    """y with an observed value instead of each NaN, and the positions of NaN."""
    missing = y.isnan()
    if not missing.any():
        return y, missing
    observed = y[~missing]
    return torch.where(missing, observed[0] if len(observed) else 0.0, y), missing


def moments_of(
    distribution: MultivariateNormal,
) -> tuple[Float[Tensor, "*b n p"], Float[Tensor, "*b n p p"]]:
    """The mean and the covariance of the outputs at each point."""
    mean = distribution.mean
    if len(distribution.event_shape) == 1:
        return mean.unsqueeze(-1), distribution.variance[..., None, None]
    n, p = mean.shape[-2:]
    points, outputs = torch.arange(n, device=mean.device), range(p)
    interleaved = distribution._interleaved  # whether the order is point by point
    rows = [points * p + i if interleaved else points + i * n for i in outputs]
    covariance = distribution.lazy_covariance_matrix
    entries = [[covariance[..., rows[i], rows[j]] for j in outputs] for i in outputs]
    return mean, torch.stack([torch.stack(row, dim=-1) for row in entries], dim=-2)


@noise_of.register
def _(likelihood: Pointwise, num_outputs: int) -> Tensor:
    """The noise of pseudo-observations with weight one."""
    return torch.eye(num_outputs).to(likelihood.unit)


def by_points(likelihood: Likelihood) -> Likelihood:
    """The likelihood, wrapped in a `Pointwise` unless it has a noise covariance.

    Raises:
        TypeError: The argument is not a gpytorch likelihood.
    """
    has_noise = noise_of.dispatch(type(likelihood)) is not noise_of.dispatch(object)
    gaussian = isinstance(likelihood, _GaussianLikelihoodBase)
    return likelihood if has_noise or gaussian else Pointwise(likelihood)


def likelihood_of(likelihoods: Mapping[str, Likelihood], part: Observations) -> Likelihood:
    """The likelihood of the group of observations. A new group has the likelihood of observations
    without a name."""
    return likelihoods.get(part.key.label, likelihoods[DEFAULT])


def any_pointwise(likelihoods: Mapping[str, Likelihood]) -> bool:
    """Whether pseudo-observations represent the data of any group."""
    return bool(of_kind(likelihoods, Pointwise))


def require_gaussian(likelihoods: Mapping[str, Likelihood], what: str, remedy: str) -> None:
    """Raise a NotImplementedError if pseudo-observations represent the data of any group."""
    for likelihood in of_kind(likelihoods, Pointwise).values():
        raise NotImplementedError(
            f"{what} expects Gaussian or Student-t noise, got {type(likelihood.base).__name__}; "
            f"use {remedy}"
        )


# Pseudo-observations: p(y_n | f) as a function of f is represented by exp(η_nᵀf − ½ fᵀΛ_n f).
#
# This is an observation Λ_n⁻¹η_n of the vector f(x_n) with the known noise Λ_n⁻¹. For a likelihood
# of single outputs, Λ_n is diagonal, and each output has the pseudo-observation η/Λ with the weight
# Λ. Otherwise Λ_n = Σ_k λ_k u_k u_kᵀ, and there is one pseudo-observation along each axis u_k:
# u_kᵀη/λ_k with the weight λ_k. The distribution q that maximises the ELBO is the posterior under
# pseudo-observations with
#
#     Λ_n = −E[∇² log p] ,    η_n = E[∇ log p] + Λ_n E[f_n]      (expectations under q).


_LEAST = 1e-2  # least λ over |E∇ log p|², which have the same expectation
_NONE = 1e-8  # least λ over that of another axis; along an axis with less, nothing is known
_WIDTH = 10.0  # standard deviation of the constant field for the first pseudo-observations
_STEPS = 30  # most steps of Newton's method for this constant


def represented(
    parts: Sequence[Observations], likelihoods: Mapping[str, Likelihood], num_outputs: int
) -> list[Observations]:
    """Return the observations, with first pseudo-observations in groups with a `Pointwise`
    likelihood.

    These pseudo-observations represent the likelihood at the best constant field.

    Raises:
        ValueError: A value has zero probability. Or noise or variances are given with such a
            likelihood, or directions with a likelihood that depends on all outputs of a point.
        NotImplementedError: The group with such a likelihood has tracks.
    """
    every: list[Observations] = []
    widths: dict[str, int] = {}
    for part in parts:
        widths[part.key.label] = max(widths.get(part.key.label, 0), part.y.shape[-1])
    for part in parts:
        likelihood = likelihood_of(likelihoods, part)
        if not isinstance(likelihood, Pointwise):
            every.append(part)
            continue
        _check(part, likelihood)
        together = likelihood.joint and num_outputs > 1
        if together and part.y.shape[-1] < widths[part.key.label]:  # some values are missing
            continue
        outputs = part.y.new_zeros(len(part), num_outputs) if together else torch.zeros_like(part.y)
        _check_support(part.y.squeeze(-1), likelihood.base, outputs.squeeze(-1))
        every += (_of_vectors if together else _of_values)(part, likelihood, num_outputs)
    return every


def _check(part: Observations, likelihood: Pointwise) -> None:
    """Raise an error for observations that the likelihood cannot describe."""
    name = type(likelihood.base).__name__
    if part.on_tracks:
        raise NotImplementedError(
            f"expected observations at single points with {name}, got track=; noise along tracks "
            "is Gaussian: omit track=, or likelihood="
        )
    if part.weight is not None or part.key.known:
        raise ValueError(
            f"expected neither noise= nor variances= with {name}, which determines the distribution"
            " of observations, got one of them; give Gaussian observations a separate group=, with "
            "model.likelihoods[group] = GaussianLikelihood()"
        )
    if part.direction is not None and likelihood.joint:
        raise ValueError(
            f"expected a likelihood of single values with directions=, got {name}, which depends "
            "on all outputs of a point; omit directions=, or use another likelihood"
        )


_SUPPORTS = {
    constraints.boolean: "0 or 1, such as (y > 0).double() of signs,",
    constraints.nonnegative_integer: "counts 0, 1, 2, ...",
}


def _check_support(
    y: Float[Tensor, "n *v"], likelihood: Likelihood, f: Float[Tensor, "n *p"]
) -> None:
    """Raise an error for values outside the support of a likelihood. The support does not depend on
    f."""
    try:
        support = likelihood.forward(f).support
    except NotImplementedError:  # the distribution does not state its support
        return
    wrong = ~support.check(y)
    if wrong.any():
        raise ValueError(
            f"{type(likelihood).__name__} expects {_SUPPORTS.get(support, support)} as y, got "
            f"{y[wrong][0].tolist()} and {int(wrong.sum()) - 1} other values that are not; convert "
            'y, make these values NaN with missing="mask", or use another likelihood'
        )


def _of_values(part: Observations, likelihood: Pointwise, p: int) -> Iterator[Observations]:
    """The first pseudo-observations of values that each depend on one output or one direction."""
    axis = torch.zeros(len(part), dtype=torch.long, device=part.x.device)
    for column, y in zip(part.pattern.columns, part.y.split(1, dim=-1), strict=True):
        along = part.direction is not None
        key = part.key._replace(pattern=part.pattern if along else Components((column,), p))
        given = Represented(y, *_constant(y, likelihood, 1), axis)
        yield observed_as(replace(part, key=key), given)


def _of_vectors(part: Observations, likelihood: Pointwise, p: int) -> Iterator[Observations]:
    """The first pseudo-observations of values that depend on all outputs, along every axis."""
    natural = _constant(part.y, likelihood, p)
    part = replace(part, key=part.key._replace(pattern=LineOfSight(p)))
    for number in range(p):
        axis = torch.full((len(part),), number, device=part.x.device)
        yield observed_as(part, Represented(part.y, *natural, axis))


def _constant(
    y: Float[Tensor, "n v"], likelihood: Pointwise, q: int
) -> tuple[Float[Tensor, "n q"], Float[Tensor, "n q q"]]:
    """Return η and Λ of the pseudo-observations at the best constant field. Its prior has
    variance one."""
    eye, constant, best = torch.eye(q).to(y), y.new_zeros(q), -math.inf
    blocks = eye.expand(len(y), q, q)
    step = torch.zeros_like(constant)
    for _ in range(_STEPS):
        trial = constant + step
        value, slope, curvature = likelihood.derivatives(y, trial.expand(len(y), q), blocks)
        total = value.sum() - 0.5 * (trial / _WIDTH).square().sum()
        if not total >= best:
            step = 0.5 * step
            continue
        gain, best, constant = total - best, total, trial
        curvature = positive(curvature, slope)
        natural = slope + (curvature @ constant), curvature
        step = torch.linalg.solve(
            curvature.sum(0) + eye / _WIDTH**2, slope.sum(0) - constant / _WIDTH**2
        )
        if gain < 1e-6 * len(y):
            break
    return natural


def positive(
    curvature: Float[Tensor, "n q q"], slope: Float[Tensor, "n q"]
) -> Float[Tensor, "n q q"]:
    """Return the curvatures after raising eigenvalues that are negative or too small.

    Each eigenvalue becomes at least a small multiple of the squared slope along its eigenvector,
    and at least a tiny multiple of the largest eigenvalue.
    """
    values, axes = torch.linalg.eigh(0.5 * (curvature + curvature.mT))
    along = (axes.mT @ slope.unsqueeze(-1)).squeeze(-1)
    least = _NONE * values.amax(-1, keepdim=True).clamp_min(_NONE)
    values = values.maximum(_LEAST * along.square()).maximum(least)
    return (axes * values.unsqueeze(-2)) @ axes.mT


def proposed(
    part: Observations,
    likelihood: Pointwise,
    mean: Float[Tensor, "n p"],
    covariance: Float[Tensor, "n p p"],
) -> tuple[Float[Tensor, "n"], Represented]:
    """Return the expected log density of the observed values, and their next
    pseudo-observations.

    Both are for a given distribution of the field at the points of the observations.
    """
    given = part.represented
    mean, covariance = latent(part, mean, covariance)
    expected, slope, curvature = likelihood.derivatives(given.values, mean, covariance)
    curvature = positive(curvature, slope)
    linear = slope + (curvature @ mean.unsqueeze(-1)).squeeze(-1)
    return expected / given.linear.shape[-1], given._replace(linear=linear, precision=curvature)


def latent(
    part: Observations, mean: Float[Tensor, "n p"], covariance: Float[Tensor, "n p p"]
) -> tuple[Float[Tensor, "n q"], Float[Tensor, "n q q"]]:
    """Return the distribution of the argument of the likelihood, which is one value or all
    outputs of a point."""
    if part.represented.linear.shape[-1] > 1:
        return mean, covariance
    return part.apply(mean), part.apply_to_covariance(covariance)


def observed_as(part: Observations, given: Represented) -> Observations:
    """The observations with the given pseudo-observations."""
    if given.linear.shape[-1] == 1:
        weight = given.precision[:, 0, 0]
        return replace(
            part, y=given.linear / given.precision[:, 0], weight=weight, represented=given
        )
    values, axes = torch.linalg.eigh(given.precision)
    rows = torch.arange(len(part), device=part.x.device)
    weight, direction = values[rows, given.axis], axes[rows, :, given.axis]
    y = (direction * given.linear).sum(-1, keepdim=True) / weight.unsqueeze(-1)
    return replace(part, y=y, weight=weight, direction=direction, represented=given)


def expected_density(
    part: Observations, mean: Float[Tensor, "n p"], covariance: Float[Tensor, "n p p"]
) -> Float[Tensor, "n"]:
    """E log N(ỹ; H f, 1/w) of pseudo-observations ỹ with weights w, under a distribution of the
    field."""
    residual = (part.y - part.apply(mean)).squeeze(-1)
    second = residual.square() + part.apply_to_covariance(covariance)[:, 0, 0]
    return 0.5 * (part.weight.log() - math.log(2 * math.pi) - part.weight * second)
