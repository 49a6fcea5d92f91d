"""Any likelihood of single points, by quadrature, and the pseudo-observations that represent it."""

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


_NODES = {1: 32, 2: 16, 3: 10}  # of Gauss–Hermite rules, along each output
_POINTS = 512  # of Sobol' points for more outputs, and their negatives


class Pointwise(Likelihood):
    r"""Any pointwise likelihood p(y_n | f(x_n)), by quadrature over all outputs of a point.

    For the normal distribution q of the p outputs of each point, with their covariance, it computes

        E_n = ∫ q(f) log p(y_n | f) df ,    log ∫ q(f) p(y_n | f) df .

    Likelihoods of single outputs, such as `BernoulliLikelihood` or `PoissonLikelihood`, apply to
    every output, and E_n is the sum over the outputs. All others, such as `SoftmaxLikelihood`,
    depend on all outputs of a point. In train mode gpytorch draws these outputs independently, so
    that posteriors become up to 35 % too narrow, without an error. This class includes their
    covariance. NaN in y are values that were not observed.

    `VectorFieldGP(kernel, likelihood=...)` wraps any likelihood without a noise covariance in a
    `Pointwise`. It computes the normal distribution q of the field that maximises the evidence
    lower bound (ELBO)

        Σ_n E_n − KL(q ‖ prior) .

    Called on the distribution of a field, it returns the distribution of observations, as the base
    likelihood does: `model.likelihood(model.posterior()(xs))`.

    Args:
        base: a gpytorch likelihood.
        nodes: the number of Gauss–Hermite nodes along each output. If None, 32, 16 or 10 nodes for
            up to 3 outputs, and 512 Sobol points with their negatives for more outputs.

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
            "for instance Pointwise(gpytorch.likelihoods.PoissonLikelihood())",
        )
        super().__init__(max_plate_nesting=base.max_plate_nesting)
        self.base, self.nodes = base, nodes
        self.register_buffer("unit", torch.ones((), dtype=torch.float64), persistent=False)

    @property
    def joint(self) -> bool:
        """Whether the likelihood of a point is a joint function of its p outputs of the field.

        If False, the likelihood is a product of one factor for each output.
        """
        return not isinstance(self.base, _OneDimensionalLikelihood)

    def forward(self, function_samples: Tensor, *args, **kwargs) -> Distribution:
        """Return the distribution of observations, given values of the field, `function_samples`
        (*b, n, p), or (*b, n) if p = 1."""
        return self.base.forward(function_samples, *args, **kwargs)

    def marginal(self, function_dist: MultivariateNormal, *args, **kwargs) -> Distribution:
        """Return the distribution of observations at points with the distribution `function_dist`
        of the field. The base likelihood computes it in closed form, or else from draws of the
        field."""
        if self.base.has_analytic_marginal:
            return self.base.marginal(function_dist, *args, **kwargs)
        draws = function_dist.rsample(torch.Size([num_likelihood_samples.value()]))
        return self.base.forward(draws, *args, **kwargs)

    def expected_log_prob(
        self, observations: Tensor, function_dist: MultivariateNormal, *args, **kwargs
    ) -> Float[Tensor, "*b n"]:
        """Return E_n of every point, (*b, n), from `observations` (*b, n, v) and the distribution
        `function_dist` of the field.

        Raises:
            ValueError: as `check`.
        """
        moments = moments_of(function_dist)
        self.check(observations, moments[0])
        return self.expected(observations, *moments)

    def log_marginal(
        self, observations: Tensor, function_dist: MultivariateNormal, *args, **kwargs
    ) -> Float[Tensor, "*b n"]:
        """Return log ∫ q(f) p(y_n | f) df of every point, (*b, n), from `observations` and the
        distribution `function_dist` of the field.

        Raises:
            ValueError: as `check`.
        """
        moments = moments_of(function_dist)
        self.check(observations, moments[0])
        logs, weights = self._at_nodes(observations, *moments)
        return (logs + weights.log()).logsumexp(-1)

    @torch.no_grad()
    def check(self, y: Float[Tensor, "*b n v"], mean: Float[Tensor, "*b n p"]) -> None:
        """Refuse observations that the likelihood does not describe; NaN were not observed.

        Args:
            y: observations.
            mean: the mean of the outputs of every point.

        Raises:
            ValueError: another shape than that of the field; values with zero probability.
        """
        points, p = mean.shape[:-1], mean.shape[-1]
        rows = y.shape[: len(points)] == points
        if not (rows if self.joint else y.shape == mean.shape or (rows and p == 1)):
            expected = f"{tuple(points)} or {(*points, 'v')}" if self.joint else tuple(mean.shape)
            raise ValueError(
                f"{type(self.base).__name__} expects observations y of shape {expected}, a row for "
                f"each point, got {tuple(y.shape)}"
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
        """E_n of every point under given moments.

        Args:
            y: observations (*b, n, v), or (*b, n) if there is one value a point.
            mean: the mean of the outputs of every point.
            covariance: the covariance of the outputs.
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

        Expectations are over f with the given mean and covariance. The gradient is with respect to
        the mean.

        The curvature is −2 times the gradient of E_n in the covariance (Opper & Archambeau 2009,
        *The variational Gaussian approximation revisited*).

        Args:
            y: observations.
            mean: the mean of the outputs of every point.
            covariance: the covariance of the outputs.
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
        # The nodes of a point are instead of the points of a distribution: some likelihoods
        # take p points with p outputs for another layout.
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
    """log p(y | f), smooth in f; register likelihoods whose distribution rounds it."""
    return likelihood.forward(f).log_prob(y)


@log_density.register
def _(likelihood: BernoulliLikelihood, f: Tensor, y: Tensor) -> Tensor:
    """Without the clamped probabilities of torch, and the polynomials of gpytorch, whose slopes are
    not those of their values."""
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
        ).mT  # moments of N(0, I)
        return draws, torch.full((len(draws),), 1 / len(draws), dtype=torch.float64)
    t, w = map(torch.from_numpy, np.polynomial.hermite_e.hermegauss(nodes or _NODES[p]))
    grids = torch.cartesian_prod(*[t] * p), torch.cartesian_prod(*[w / w.sum()] * p)
    return grids[0].reshape(-1, p), grids[1].reshape(-1, p).prod(-1)


def _filled(y: Tensor) -> tuple[Tensor, Tensor]:
    """y with an observed value instead of every NaN, and where these were."""
    missing = y.isnan()
    if not missing.any():
        return y, missing
    observed = y[~missing]
    return torch.where(missing, observed[0] if len(observed) else 0.0, y), missing


def moments_of(
    distribution: MultivariateNormal,
) -> tuple[Float[Tensor, "*b n p"], Float[Tensor, "*b n p p"]]:
    """The mean, and the covariance of the outputs, at every point."""
    mean = distribution.mean
    if len(distribution.event_shape) == 1:
        return mean.unsqueeze(-1), distribution.variance[..., None, None]
    n, p = mean.shape[-2:]
    points, outputs = torch.arange(n, device=mean.device), range(p)
    interleaved = distribution._interleaved  # point by point, not output by output
    rows = [points * p + i if interleaved else points + i * n for i in outputs]
    covariance = distribution.lazy_covariance_matrix
    entries = [[covariance[..., rows[i], rows[j]] for j in outputs] for i in outputs]
    return mean, torch.stack([torch.stack(row, dim=-1) for row in entries], dim=-2)


@noise_of.register
def _(likelihood: Pointwise, num_outputs: int) -> Tensor:
    """That of pseudo-observations of weight one."""
    return torch.eye(num_outputs).to(likelihood.unit)


def by_points(likelihood: Likelihood) -> Likelihood:
    """The likelihood; in a `Pointwise` if it is neither Gaussian nor has a noise covariance.

    Raises:
        TypeError: not a gpytorch likelihood.
    """
    has_noise = noise_of.dispatch(type(likelihood)) is not noise_of.dispatch(object)
    gaussian = isinstance(likelihood, _GaussianLikelihoodBase)
    return likelihood if has_noise or gaussian else Pointwise(likelihood)


def likelihood_of(likelihoods: Mapping[str, Likelihood], part: Observations) -> Likelihood:
    """The likelihood of the group of observations; a new group has that without a name."""
    return likelihoods.get(part.key.label, likelihoods[DEFAULT])


def any_pointwise(likelihoods: Mapping[str, Likelihood]) -> bool:
    """Whether pseudo-observations represent the data of any group."""
    return bool(of_kind(likelihoods, Pointwise))


def require_gaussian(likelihoods: Mapping[str, Likelihood], what: str, remedy: str) -> None:
    """Raise NotImplementedError if pseudo-observations represent the data of any group."""
    for likelihood in of_kind(likelihoods, Pointwise).values():
        raise NotImplementedError(
            f"{what} expects Gaussian or Student-t noise, got {type(likelihood.base).__name__}; "
            f"use {remedy}"
        )


# Pseudo-observations: p(y_n | f) as a function of f is represented by exp(η_nᵀf − ½ fᵀΛ_n f).
#
# That is an observation Λ_n⁻¹η_n of the vector f(x_n) with the known noise Λ_n⁻¹. Under a
# likelihood of single outputs Λ_n is diagonal, and every output has its pseudo-observation η/Λ of
# weight Λ. Otherwise Λ_n = Σ_k λ_k u_k u_kᵀ, and there is one along each axis u_k: u_kᵀη/λ_k of
# weight λ_k. The q that maximises the ELBO is the posterior under pseudo-observations with
#
#     Λ_n = −E[∇² log p] ,    η_n = E[∇ log p] + Λ_n E[f_n]      (expectations under q).


_LEAST = 1e-2  # of λ over |E∇ log p|², whose expectation is that of λ
_NONE = 1e-8  # of λ over that of another axis: along it, nothing is known
_WIDTH = 10.0  # the standard deviation of a constant field, from which the first ones follow
_STEPS = 30  # of Newton's method for this constant, at most


def represented(
    parts: Sequence[Observations], likelihoods: Mapping[str, Likelihood], num_outputs: int
) -> list[Observations]:
    """The observations, with pseudo-observations instead of those of every group with a `Pointwise`
    likelihood: the first ones, about the best constant field.

    Raises:
        ValueError: values to which the likelihood gives no probability; noise or variances with it,
            or directions with one of all outputs of a point.
        NotImplementedError: such a likelihood along tracks.
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
        if together and part.y.shape[-1] < widths[part.key.label]:  # something is missing
            continue
        outputs = part.y.new_zeros(len(part), num_outputs) if together else torch.zeros_like(part.y)
        _check_support(part.y.squeeze(-1), likelihood.base, outputs.squeeze(-1))
        every += (_of_vectors if together else _of_values)(part, likelihood, num_outputs)
    return every


def _check(part: Observations, likelihood: Pointwise) -> None:
    """Raise for observations that the likelihood does not describe."""
    name = type(likelihood.base).__name__
    if part.on_tracks:
        raise NotImplementedError(
            f"expected observations at single points with {name}, got track=; noise along tracks "
            "is Gaussian: leave out track=, or likelihood="
        )
    if part.weight is not None or part.key.known:
        raise ValueError(
            f"expected neither noise= nor variances= with {name}, which says how observations "
            "vary; give Gaussian observations a separate group=, with model.likelihoods[group] "
            "= GaussianLikelihood()"
        )
    if part.direction is not None and likelihood.joint:
        raise ValueError(
            f"expected a likelihood of single values with directions=, got {name}, which depends "
            "on all outputs of a point"
        )


_SUPPORTS = {
    constraints.boolean: "0 or 1, such as (y > 0).double() of signs,",
    constraints.nonnegative_integer: "counts 0, 1, 2, ...",
}


def _check_support(
    y: Float[Tensor, "n *v"], likelihood: Likelihood, f: Float[Tensor, "n *p"]
) -> None:
    """Raise for values outside of the support of a likelihood, which does not depend on f."""
    try:
        support = likelihood.forward(f).support
    except NotImplementedError:  # a distribution that states none
        return
    wrong = ~support.check(y)
    if wrong.any():
        raise ValueError(
            f"{type(likelihood).__name__} expects {_SUPPORTS.get(support, support)} as y, got "
            f"{y[wrong][0].tolist()} and {int(wrong.sum()) - 1} other values that are not; convert "
            'y, leave them out as NaN with missing="mask", or take another likelihood'
        )


def _of_values(part: Observations, likelihood: Pointwise, p: int) -> Iterator[Observations]:
    """The first pseudo-observations of values that depend on one output each, or one direction."""
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
    """η and Λ of pseudo-observations about the best constant field, with the variance one."""
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
    """The curvatures, with eigenvalues of at least a small share of the squared slope along their
    axis."""
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
    """The expected log density of what was observed under a distribution of the field at its
    points, and the pseudo-observations that represent it there."""
    given = part.represented
    mean, covariance = latent(part, mean, covariance)
    expected, slope, curvature = likelihood.derivatives(given.values, mean, covariance)
    curvature = positive(curvature, slope)
    linear = slope + (curvature @ mean.unsqueeze(-1)).squeeze(-1)
    return expected / given.linear.shape[-1], given._replace(linear=linear, precision=curvature)


def latent(
    part: Observations, mean: Float[Tensor, "n p"], covariance: Float[Tensor, "n p p"]
) -> tuple[Float[Tensor, "n q"], Float[Tensor, "n q q"]]:
    """The distribution of what the likelihood depends on: one value, or all outputs of a point."""
    if part.represented.linear.shape[-1] > 1:
        return mean, covariance
    return part.apply(mean), part.apply_to_covariance(covariance)


def observed_as(part: Observations, given: Represented) -> Observations:
    """The observations with these pseudo-observations of them."""
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
    """E log N(ỹ; H f, 1/w) of pseudo-observations ỹ under a distribution of the field."""
    residual = (part.y - part.apply(mean)).squeeze(-1)
    second = residual.square() + part.apply_to_covariance(covariance)[:, 0, 0]
    return 0.5 * (part.weight.log() - math.log(2 * math.pi) - part.weight * second)
