"""Posteriors for few observations, which integrate over the hyperparameters by draws."""

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cached_property, partial, singledispatch

import numpy as np
import scipy
import torch
from gpytorch import Module
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import Likelihood
from gpytorch.priors import Prior
from jaxtyping import Float
from linear_operator.utils.warnings import NumericalWarning
from torch import Tensor, nn

from gp_orff.data.noise import Noises, noises_of
from gp_orff.data.observations import PointObservations
from gp_orff.data.survey import DataWarning
from gp_orff.features.chunked import by_chunks
from gp_orff.features.expansion import Expansion
from gp_orff.fitting.coordinates import Coordinate, Coordinates, log_density
from gp_orff.fitting.curvature import average, prior_scales
from gp_orff.fitting.names import parameter_names
from gp_orff.fitting.noise import search_coordinates
from gp_orff.fitting.robust_em import EStep
from gp_orff.fitting.scoring import (
    MOST_SAMPLED,
    LogNormal,
    Owner,
    WeakPriors,
    log_prior_of_noise,
    owners_of,
)
from gp_orff.fitting.starting_values import all_summands
from gp_orff.inference.exact import ExactInference
from gp_orff.inference.features import Inference, Posterior, log_marginal_likelihood
from gp_orff.inference.posteriors import FieldDistribution
from gp_orff.inference.quadratic import Evidence
from gp_orff.kernels.base import cholesky
from gp_orff.kernels.fields import counterpart
from gp_orff.kernels.spectra import learned_spectra
from gp_orff.kernels.tree import leaf_dims, terms
from gp_orff.symbols.base import Symbol

# The evidence for many hyperparameters at once.
#
# The evidence for S hyperparameters costs one batched Cholesky factorisation if kernel and data
# permit batches, and S factorisations otherwise.
#
# 1. `Coordinates.raw` converts the coordinates u, an array (S, k), to raw parameters with a leading
#    dimension S.
# 2. `with_parameters` copies the tree of modules and replaces only the parameters. The fitted model
#    does not change, and buffers are shared.
# 3. The batch is evaluated in parts whose covariance matrices have at most `_NUMBERS` entries.
# 4. A batched factorisation fails for all members if it fails for one. The members of the part are
#    then evaluated one by one. A member that fails alone gets −∞, and importance sampling gives it
#    the weight zero. This is right for a covariance that is singular to rounding.


_NUMBERS = 2**23  # entries of the matrices of one batch


@dataclass(frozen=True)
class Model:
    """A kernel and the likelihoods of all groups, as a function of the coordinates of a search."""

    inference: ExactInference
    kernel: Kernel
    likelihoods: Mapping[str, Likelihood]
    mean: Float[Tensor, "p"] | None  # the constant mean if it is fixed
    coordinates: Coordinates

    @property
    def step(self) -> int:
        """The number of hyperparameters that are evaluated at once."""
        if not self.inference.serves_batches(self.kernel):
            return 1
        return max(1, int(_NUMBERS / self.inference.size**2))

    def at(self, u: Float[np.ndarray, "*S k"]) -> tuple[Kernel, dict[str, Likelihood]]:
        """The kernel and the likelihoods at u, or a batch of them."""
        raw = self.coordinates.raw(np.atleast_2d(u))
        if u.ndim == 1:
            raw = {parameter: values[0] for parameter, values in raw.items()}
        kernel, *likelihoods = (
            with_parameters(module, raw, torch.Size(u.shape[:-1]))
            for module in (self.kernel, *self.likelihoods.values())
        )
        return kernel, dict(zip(self.likelihoods, likelihoods, strict=True))

    def with_noises(self, u: Float[np.ndarray, "*S k"]) -> tuple[Kernel, Noises]:
        """The kernel and the noise of the likelihoods at u, or a batch of them."""
        kernel, likelihoods = self.at(u)
        return kernel, noises_of(kernel, likelihoods)

    def evidence(self, u: Float[np.ndarray, "S k"]) -> Float[np.ndarray, "S"]:
        """Return log p(y | u) for each of S draws u. It is −∞ if it cannot be computed.

        The constant mean is integrated out unless it is fixed.
        """
        parts = np.array_split(u, max(1, -(-len(u) // self.step)))
        with warnings.catch_warnings():  # draws may make the covariance singular to rounding
            warnings.simplefilter("ignore", NumericalWarning)
            values = np.concatenate([self._evidence(part) for part in parts])
        return np.where(np.isfinite(values), values, -np.inf)

    def _evidence(self, u: Float[np.ndarray, "S k"]) -> Float[np.ndarray, "S"]:
        try:
            if len(u) == 1:
                return self.log_density(self.inference.evidence(*self.with_noises(u[0])))[None]
            return self.log_density(self.inference.in_batches(*self.with_noises(u)).evidence)
        except (torch.linalg.LinAlgError, ValueError, RuntimeError):
            if len(u) == 1:
                return np.array([-np.inf])
            return np.concatenate([self._evidence(one) for one in np.split(u, len(u))])

    def log_density(self, evidence: Evidence) -> Float[np.ndarray, "*b"]:
        return self.inference.log_density(evidence, self.mean, restricted=True).cpu().numpy()

    def posteriors(self, u: Float[np.ndarray, "S k"]) -> list[tuple[Kernel, Posterior]]:
        """Return a kernel and its posterior for each of S draws, with one batched factorisation.

        Args:
            u: the draws of the hyperparameters (S, k), in the coordinates of a search.

        Raises:
            LinAlgError: One of the covariances is not positive definite.
        """
        whitened = self.inference.in_batches(*self.with_noises(u))
        each = list(map(self.with_noises, u))
        posteriors = self.inference.posteriors(whitened, each, self.mean)
        return list(zip((kernel for kernel, _ in each), posteriors, strict=True))

    def moments(
        self, u: Float[np.ndarray, "S k"], x: Float[Tensor, "n d"]
    ) -> tuple[Float[np.ndarray, "S t"], Float[np.ndarray, "S t"]]:
        """Means and variances at points, of the field and of each summand of a sum of kernels."""
        kernel, noises = self.with_noises(u)
        factor, half, evidence = self.inference.in_batches(kernel, noises)
        summands = all_summands(kernel)
        # `half` is L⁻¹V with V = [y, 1⊗I], so its product with the contrast is L⁻¹(y − H c).
        residual = half @ evidence.contrast(self.mean)
        means, variances = [], []
        for part in [kernel, *(summands if len(summands) > 1 else [])]:
            cross = self.inference.cross(part, x).to(factor).expand(*factor.shape[:-1], -1)
            cross = torch.linalg.solve_triangular(factor, cross, upper=False)
            mean = (cross.mT @ residual).squeeze(-1)
            variance = part(x, diag=True) - cross.square().sum(-2)
            # The constant mean belongs to the complete field. Its uncertainty adds to the variance
            # of the total, but not to the variance of a summand, whose mean is zero.
            if part is kernel and self.mean is None:
                constants = torch.eye(half.shape[-1] - 1).to(half).repeat(len(x), 1)
                effect = constants - cross.mT @ half[..., 1:]
                mean = mean + evidence.best_mean().repeat(1, len(x))
                variance = variance + (effect @ evidence.mean_root()).square().sum(-1)
            means.append(mean)
            variances.append(variance)
        return torch.cat(means, -1).cpu().numpy(), torch.cat(variances, -1).cpu().numpy()


def with_parameters(
    module: Module, parameters: Mapping[nn.Parameter, Tensor], batch: torch.Size
) -> Module:
    """A copy of a module with other values of some parameters. It shares everything else with the
    module. In a batch of kernels, each parameter has the batch dimension."""
    copies: dict[Module, Module] = {}

    def copied(part: Module) -> Module:
        if part not in copies:
            copies[part] = own = object.__new__(type(part))
            own.__dict__.update(vars(part))
            of_part = batch if isinstance(part, Kernel) else torch.Size()
            own.__dict__["_parameters"] = {
                name: None if raw is None else value(raw, of_part)
                for name, raw in vars(part)["_parameters"].items()
            }
            children = vars(part)["_modules"].items()
            own.__dict__["_modules"] = {n: None if c is None else copied(c) for n, c in children}
            if of_part:
                own.batch_shape = of_part
        return copies[part]

    def value(raw: nn.Parameter, of_part: torch.Size) -> nn.Parameter:
        # In a batched kernel, parameters that do not vary need the batch dimension too.
        values = parameters.get(raw, raw.detach().expand((*of_part, *raw.shape)))
        return nn.Parameter(values, requires_grad=False)

    return copied(module)


# The prior of hyperparameters in the coordinates of a search, and draws from it.
#
# There are two densities of u:
#
#     p(u)   the prior, with the Jacobian of the coordinates. It is a factor of the weights.
#     q(u)   a proposal with about the same width, which can be drawn from. It is part of the
#            mixture of proposals.
#
# A weak prior is log-normal, so it is normal in the logarithm and is its own proposal. A prior that
# the user registered may be any distribution. Then q is normal, with the mean and the enlarged
# standard deviation of 2000 draws, and the weights correct for the difference.
#
# The prior of the variance v of a summand describes the variance of the field, so its median
# depends on the lengthscales. Draws therefore have two steps: first all other parameters, then v
# given these. The residual r(u) = (log v − log median)/width is linear in the logarithm of the
# scale with the slope 1/width, so u + width·(r* − r(u)) has the residual r*. The density of this
# step is the density of r* divided by the width.


_DRAWS, _FEWEST = 2000, 100  # draws for the moments of a prior, and least number in its range
_WIDER_PRIOR, _WIDEST = 1.5, 2.0  # sd of q over that of the draws; sd of q with too few draws
_STEP = 1e-5  # step of finite differences
_LOG_ROOT = 0.5 * math.log(2 * math.pi)


@dataclass(frozen=True)
class PriorOfCoordinates:
    """The prior p(u), and a proposal q(u) with equally wide tails, from which u can be drawn.

    q is normal in the coordinates of each parameter, with the moments of the prior. It is wider if
    the prior is not normal in these coordinates. The variance of a summand of the kernel is
    log-normal given its lengthscales. Weak priors are their own proposal.
    """

    model: Model
    priors: WeakPriors

    @cached_property
    def _columns(self) -> dict[Owner, tuple[slice, Coordinate]]:
        """The columns of u for each parameter."""
        owners = owners_of({None: self.model.kernel, **self.model.likelihoods})
        parts = self.model.coordinates.parts
        ends = np.cumsum([part.parameter.numel() for part in parts])
        return {
            owners[part.parameter]: (slice(end - part.parameter.numel(), end), part)
            for part, end in zip(parts, ends, strict=True)
        }

    @cached_property
    def _scaling(self) -> dict[Owner, tuple[slice, float]]:
        """The columns of parameters that scale summands and have no other bounds. Each has the
        width of the prior of the variance of its summand."""
        return {
            own: (self._columns[own][0], prior.width)
            for own, prior in self.priors.weak.items()
            if prior.summand is not None and self._columns[own][1].is_logarithm
        }

    @cached_property
    def _normal(self) -> tuple[Float[np.ndarray, "k"], Float[np.ndarray, "k"]]:
        """The means and standard deviations of q, except for scaling parameters."""
        means = self.model.coordinates.get()
        widths = np.ones_like(means)
        for own, prior in {**self.priors.weak, **self.priors.registered}.items():
            columns, part = self._columns[own]
            if own in self.priors.weak and part.is_logarithm:
                if prior.summand is None:
                    means[columns] = prior.median.log().flatten().cpu().numpy()
                    widths[columns] = prior.width
            else:
                means[columns], widths[columns] = _moments(part, prior, means[columns])
        return means, widths

    def draw(self, count: int, rng: np.random.Generator) -> Float[np.ndarray, "S k"]:
        """Draws from q."""
        means, widths = self._normal
        u = means + widths * rng.standard_normal((count, len(means)))
        for columns, _ in self._scaling.values():  # from the present ones
            u[:, columns] = means[columns]
        residuals = self._residuals(u)
        for own, (columns, width) in self._scaling.items():
            wanted = rng.standard_normal((count, columns.stop - columns.start))
            u[:, columns] += width * (wanted - residuals[own])
        return u

    def log_proposal(self, u: Float[np.ndarray, "S k"]) -> Float[np.ndarray, "S"]:
        """log q(u)."""
        means, widths = self._normal
        scores, residuals = (u - means) / widths, self._residuals(u)
        widths = widths.copy()
        for own, (columns, width) in self._scaling.items():
            scores[:, columns], widths[columns] = residuals[own], width
        return (-0.5 * np.square(scores) - np.log(widths) - _LOG_ROOT).sum(-1)

    def log_density(self, u: Float[np.ndarray, "S k"]) -> Float[np.ndarray, "S"]:
        """log p(u), up to a constant. It is −∞ for noise below the least value of a search, for
        which the evidence has large rounding errors."""
        total = np.zeros(len(u))
        for columns, part in self._columns.values():
            if part.floor is not None:
                values = part.values(part.on_device(u[:, columns]))
                total[(values < part.floor).any(-1).cpu().numpy()] = -np.inf
        for own, residual in self._residuals(u).items():
            columns, part = self._columns[own]
            ours = part.on_device(u[:, columns])
            slopes = part.log_slopes(ours) - part.values(ours).log()  # slopes of the logarithm
            # The prior is a density of log v. The factor ∂ log v/∂u makes it a density of u.
            total += (slopes.cpu().numpy() - 0.5 * np.square(residual)).sum(-1)
        for own, prior in self.priors.registered.items():
            columns, part = self._columns[own]
            ours = part.on_device(u[:, columns])
            values = part.values(ours).reshape(len(u), *part.parameter.shape)
            logs = log_density(prior, values.to(part.parameter))
            total += (logs + part.log_slopes(ours).sum(-1)).cpu().numpy()
        return np.where(np.isnan(total), -np.inf, total)

    def precision(self, u: Float[np.ndarray, "k"]) -> Float[np.ndarray, "k k"]:
        """The curvature of −log q at u, without second derivatives of variances."""
        _, widths = self._normal
        steps = _STEP * np.concatenate([np.eye(len(u)), -np.eye(len(u))])
        residuals, jacobian = self._residuals(u + steps), np.diag(1 / widths)
        for own, (columns, _) in self._scaling.items():
            after, before = np.split(residuals[own], 2)
            jacobian[columns] = (after - before).T / (2 * _STEP)
        return jacobian.T @ jacobian

    def _residuals(self, u: Float[np.ndarray, "S k"]) -> dict[Owner, Float[np.ndarray, "S r"]]:
        """(log v − log median) / width for each value v with a weak prior."""
        if not self.priors.weak:
            return {}
        kernel, likelihoods = self.model.at(u)
        every = self.priors.residuals(kernel, likelihoods).expand(len(u), -1).cpu().numpy()
        ends = np.cumsum([prior.median.numel() for prior in self.priors.weak.values()])
        return dict(zip(self.priors.weak, np.split(every, ends[:-1], axis=-1), strict=True))


def _moments(
    part: Coordinate, prior: Prior | LogNormal, present: Float[np.ndarray, "k"]
) -> tuple[Float[np.ndarray, "k"], Float[np.ndarray, "k"]]:
    """Means and standard deviations of u under a prior, from draws inside the constraint."""
    shape = part.parameter.shape
    # `Prior.sample` has no argument for a generator, so the global state is set and restored here.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        values = _draws(prior, shape)
    values = values.double().reshape(_DRAWS, -1).to(part.parameter.device)
    u = part.of_values(values)[part.allows_each(values).all(-1)]
    if len(u) < _FEWEST:
        return present, np.full_like(present, _WIDEST)
    return u.mean(0).cpu().numpy(), _WIDER_PRIOR * u.std(0).cpu().numpy()


@singledispatch
def _draws(prior: Prior | LogNormal, shape: torch.Size) -> Float[Tensor, "S ..."]:
    """Draws of values from a prior; NaN if the prior cannot be drawn from."""
    try:
        own = prior.batch_shape + prior.event_shape
        count = (_DRAWS,) if own == shape or len(own) else (_DRAWS, *shape)
        return prior.sample(torch.Size(count)).expand(_DRAWS, *shape)
    except NotImplementedError:
        return torch.full((_DRAWS, *shape), math.nan)


@_draws.register
def _(prior: LogNormal, shape):
    normal = torch.randn(_DRAWS, *shape, dtype=torch.float64)
    if prior.summand is not None:
        return normal * math.nan
    return prior.median.cpu() * torch.exp(prior.width * normal)


# Adaptive importance sampling. A quarter of the draws always comes from the prior.
#
# 1. A batch of 64 is drawn: a quarter from the prior, the rest from a Student-t distribution with
#    five degrees of freedom. At first, its centre is the maximum of the posterior density, and its
#    scale matrix is 1.5 times the inverse of the information.
# 2. All draws so far get the weights w ∝ p(y|u) p(u) / q(u). Here q is the mixture of all proposals
#    so far, in proportion to their numbers of draws (Veach & Guibas 1995; Cornuet et al. 2012). The
#    weights are bounded, because the prior is part of q. The largest weights are replaced by
#    quantiles of a generalised Pareto distribution that is fitted to them (Vehtari et al. 2024).
# 3. The next Student-t distribution has the weighted mean, and 1.5 times a covariance between the
#    first one and the weighted one. With more effective draws, the covariance is closer to the
#    weighted one.
# 4. Batches are drawn until the effective number of draws, 1/Σw², is large enough, or there are
#    1024 draws.
#
# The weights of early draws change with each batch, because q then includes later proposals. Only
# the evidences are computed once. A poor first proposal is therefore harmless. Weights are stored
# as logarithms until the end, because evidences differ by hundreds of nats.


Points = Float[np.ndarray, "S k"]
Logs = Float[np.ndarray, "S"]

MOST = 1024  # draws
_BATCH, _OF_PRIOR = 64, 16
_TAILS, _WIDER_PROPOSAL = 5.0, 1.5
_TAIL, _ROOTS = 0.2, 3.0  # number of weights that are smoothed: at most 0.2 S and 3 √S
_LEAST_TAIL = 5
_SHAPES = 10.0, 0.5  # prior of the shape k of a Pareto distribution: 10 draws with k = 0.5


@dataclass(frozen=True)
class Draws:
    """Draws with weights that sum to one."""

    u: Points
    weights: Float[np.ndarray, "S"]
    pareto_k: float  # the shape of the tail of the weights; they are unreliable above 0.7

    @property
    def effective(self) -> float:
        """The effective number 1/Σw² of draws."""
        return float(1 / np.square(self.weights).sum())

    def resampled(self, count: int, rng: np.random.Generator) -> "Draws":
        """Return about `count` of the draws, by systematic resampling.

        Each of them occurs once, with the weight of the draws that it represents. They are ordered
        along the direction of largest variance. If there are at most `count` draws, they do not
        change.
        """
        if len(self.u) <= count:
            return self
        # Systematic resampling uses equidistant quantiles of the sorted draws. Neighbours in the
        # order represent each other, so they should be similar.
        offsets = self.u - self.weights @ self.u
        _, _, directions = np.linalg.svd(
            np.sqrt(self.weights)[:, None] * offsets, full_matrices=False
        )
        order = np.argsort(offsets @ directions[0])
        places = (rng.random() + np.arange(count)) / count
        rows = np.searchsorted(np.cumsum(self.weights[order]), places).clip(0, len(self.u) - 1)
        rows, times = np.unique(order[rows], return_counts=True)
        return Draws(self.u[rows], times / count, self.pareto_k)


def adaptive_draws(
    log_posterior: Callable[[Points], Logs],
    draw_prior: Callable[[int, np.random.Generator], Points],
    log_prior: Callable[[Points], Logs],
    mode: Float[np.ndarray, "k"],
    covariance: Float[np.ndarray, "k k"],
    effective: float,
    rng: np.random.Generator,
) -> Draws:
    """Draws from a posterior distribution.

    Args:
        log_posterior: a function that returns log p(y|u) p(u), up to a constant, and −∞ if it
            cannot be computed.
        draw_prior: a function that draws from a proposal with the tails of the prior.
        log_prior: the log density of this proposal.
        mode: the approximate mode (k,) of the posterior.
        covariance: the approximate covariance (k, k) of the posterior.
        effective: the requested effective number of draws.
        rng: the source of random numbers.

    Raises:
        ValueError: The posterior density cannot be computed at any draw.
    """
    k = len(mode)
    proposals: list[Callable[[Points], Logs]] = []
    u, logs = np.empty((0, k)), np.empty(0)
    student = StudentT(mode, _WIDER_PROPOSAL * covariance)
    while len(u) < MOST:
        batch = np.concatenate([draw_prior(_OF_PRIOR, rng), student.draw(_BATCH - _OF_PRIOR, rng)])
        u, logs = np.concatenate([u, batch]), np.concatenate([logs, log_posterior(batch)])
        proposals.append(student.log_density)
        # log q of the mixture at all draws. The prior has a quarter of the weight, and the
        # proposals of all batches have equal parts of the rest.
        parts = [math.log(_OF_PRIOR / _BATCH) + log_prior(u)]
        share = math.log((1 - _OF_PRIOR / _BATCH) / len(proposals))
        parts += [share + proposal(u) for proposal in proposals]
        ratios = logs - scipy.special.logsumexp(parts, axis=0)
        known = np.isfinite(ratios)
        if not known.any():
            raise ValueError(
                "expected an evidence that can be computed near the hyperparameters of the model, "
                "got none; use posterior(marginalize=False)"
            )
        smoothed, pareto_k = smoothed_logs(np.where(known, ratios, -np.inf))
        weights = np.exp(smoothed - scipy.special.logsumexp(smoothed))
        draws = Draws(u, weights, pareto_k)
        if draws.effective >= effective:
            break
        # A covariance of k coordinates from few draws is singular or too narrow. It is therefore
        # mixed with the first covariance until there are more effective draws than coordinates.
        share = draws.effective / (draws.effective + 2 * k)
        mean = weights @ u
        weighted = ((u - mean).T * weights) @ (u - mean)
        student = StudentT(mean, _WIDER_PROPOSAL * (share * weighted + (1 - share) * covariance))
    return draws


class StudentT:
    """A Student-t distribution with five degrees of freedom."""

    def __init__(self, mean: Float[np.ndarray, "k"], scale: Float[np.ndarray, "k k"]):
        self.mean, self.root = mean, np.linalg.cholesky(scale)

    def draw(self, count: int, rng: np.random.Generator) -> Points:
        """Draw from the distribution."""
        normal = rng.standard_normal((count, len(self.mean)))
        size = np.sqrt(rng.chisquare(_TAILS, count) / _TAILS)
        return self.mean + normal / size[:, None] @ self.root.T

    def log_density(self, u: Points) -> Logs:
        """The log density."""
        k = len(self.mean)
        scores = np.linalg.solve(self.root, (u - self.mean).T)
        constant = scipy.special.gammaln(0.5 * (_TAILS + k)) - scipy.special.gammaln(0.5 * _TAILS)
        constant -= 0.5 * k * math.log(_TAILS * math.pi) + np.log(self.root.diagonal()).sum()
        return constant - 0.5 * (_TAILS + k) * np.log1p(np.square(scores).sum(0) / _TAILS)


def smoothed_logs(logs: Logs) -> tuple[Logs, float]:
    """The logarithms of Pareto-smoothed importance weights, and the shape k of their tail (Vehtari,
    Simpson, Gelman, Yao & Gabry 2024). The largest weight is at most one.

    k is −∞ if all weights in the tail are equal, and NaN if there are too few draws for a tail.
    """
    logs = logs - logs.max()
    # The tail length that Vehtari et al. recommend: min(S/5, 3√S).
    size = int(min(_TAIL * len(logs), _ROOTS * math.sqrt(len(logs))))
    if size < _LEAST_TAIL:
        return logs, math.nan
    order = np.argsort(logs)
    tail, cut = order[-size:], np.exp(logs[order[-size - 1]])
    excess = np.exp(logs[tail]) - cut
    if not excess[0] < excess[-1]:
        return logs, -math.inf
    k, scale = pareto(excess)
    # The i-th largest weight becomes the quantile (i − ½)/m of the fitted distribution, but not
    # more than the largest raw weight.
    places = (np.arange(size) + 0.5) / size
    steps = -np.log1p(-places)
    quantiles = scale * (steps if abs(k) < 1e-9 else np.expm1(k * steps) / k)
    smoothed = logs.copy()
    smoothed[tail] = np.minimum(np.log(cut + quantiles), 0.0)
    return smoothed, k


def pareto(excess: Float[np.ndarray, "m"]) -> tuple[float, float]:
    """Estimate the shape k and the scale σ of a generalised Pareto distribution from sorted draws.

    The density is (1 + k x/σ)^(−1/k − 1) / σ. The estimate of k includes a weak prior. Source:
    Zhang & Stephens 2009.
    """
    x = np.maximum(excess, np.finfo(float).tiny)
    m, count = len(x), 30 + int(math.sqrt(len(x)))
    # Zhang & Stephens use the posterior mean of b = −k/σ on a grid of points, weighted by the
    # profile likelihood. The grid follows from the first quartile of the excesses, a robust scale.
    quartile = x[max(int(m / 4 + 0.5) - 1, 0)]
    b = (1 - np.sqrt(count / (np.arange(count) + 0.5))) / (3 * quartile) + 1 / x[-1]
    with np.errstate(divide="ignore", invalid="ignore"):
        shapes = np.log1p(-b[:, None] * x).mean(-1)
        profile = m * (np.log(-b / shapes) - shapes - 1)
    profile = np.where(np.isfinite(profile), profile, -np.inf)
    b = np.exp(profile - scipy.special.logsumexp(profile)) @ b
    k = float(np.log1p(-b * x).mean())
    scale = -k / b
    weight, centre = _SHAPES
    return (m * k + weight * centre) / (m + weight), scale


# Mixtures of the posteriors under several hyperparameters, by their first two moments.
#
# Each method of the mixture calls the same method of each member, and combines the results by the
# law of total covariance: the average of the covariances of the members, plus the covariance of
# their means. The means include the constant mean of each member, because the best constant depends
# on the hyperparameters.
#
# `root` is a factor of the covariance. It has one block of columns for each member, √w_s times its
# root, and one column for each mean. The product of the factor with its transpose is the sum above.


@dataclass(frozen=True)
class Member:
    """The posterior of a field under one value of the hyperparameters.

    Attributes:
        weight: the probability of the hyperparameters.
        kernel: the kernel with these hyperparameters.
        distribution: the distribution of the field, with its constant mean.
    """

    weight: float
    kernel: Kernel
    distribution: FieldDistribution


@dataclass(frozen=True)
class Mixture(FieldDistribution):
    """A mixture of Gaussian distributions with weights w_s, represented by its first two moments:

        E f = Σ_s w_s m_s ,    Cov f = Σ_s w_s (C_s + (m_s − E f)(m_s − E f)ᵀ) .

    Args:
        members: the members, with weights that sum to one.
        kernel: the kernel whose terms name the parts.
    """

    members: Sequence[Member] = field()
    kernel: Kernel

    @property
    def num_outputs(self) -> int:
        return self.members[0].distribution.num_outputs

    @property
    def _weights(self) -> Float[Tensor, "S"]:
        weights = [member.weight for member in self.members]
        return torch.tensor(weights, dtype=torch.float64).to(next(self.kernel.parameters()).device)

    def _means(self, x: Float[Tensor, "n d"]) -> Float[Tensor, "S n q"]:
        return torch.stack([own.distribution.mean(x) for own in self.members])

    def _average(self, values: Float[Tensor, "S n q"]) -> Float[Tensor, "n q"]:
        return torch.tensordot(self._weights, values, 1)

    def _spread(self, x: Float[Tensor, "n d"]) -> Float[Tensor, "S n q"]:
        """√w_s (m_s − E f)."""
        means = self._means(x)
        return self._weights.sqrt()[:, None, None] * (means - self._average(means))

    def mean(self, x: Tensor) -> Tensor:
        return self._mean_and_variance(x)[..., 0].clone()

    def variance(self, x: Tensor) -> Tensor:
        return self._mean_and_variance(x)[..., 1].clone()

    def _mean_and_variance(self, x: Float[Tensor, "n d"]) -> Float[Tensor, "n q 2"]:
        """E f and Var f together. They are stored for the last points, because a map needs both."""
        if self._last and torch.equal(self._last[0], x) and not x.requires_grad:
            return self._last[1]
        width = 2 * len(self.members) * self.num_outputs
        pair = by_chunks(self._moments_of_chunk, x, width).unflatten(-1, (self.num_outputs, 2))
        self._last[:] = [x.detach().clone(), pair.detach()]
        return pair

    @cached_property
    def _last(self) -> list[Tensor]:
        return []

    def __getstate__(self) -> dict:
        return {name: own for name, own in self.__dict__.items() if name != "_last"}

    def _moments_of_chunk(self, x: Float[Tensor, "n d"]) -> Float[Tensor, "n q*2"]:
        means, variances, _ = zip(
            *(own.distribution.moments(x) for own in self.members), strict=True
        )
        means = torch.stack(means)
        mean = self._average(means)
        variance = self._average(torch.stack(variances) + (means - mean).square())
        return torch.stack([mean, variance], dim=-1).flatten(1)

    def blocks(self, x: Tensor) -> Tensor:
        within = sum(own.weight * own.distribution.blocks(x) for own in self.members)
        spread = self._spread(x).movedim(0, -1)  # (n, q, S)
        return within + spread @ spread.mT

    def normals(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        blocks = torch.stack([own.distribution.blocks(x) for own in self.members])
        return self._weights, self._means(x), blocks

    def covariance(self, x: Tensor) -> Tensor:
        within = sum(own.weight * own.distribution.covariance(x) for own in self.members)
        spread = self._spread(x).flatten(1)
        return within + spread.mT @ spread

    def root(self, x: Tensor) -> Tensor:
        roots = [own.weight**0.5 * own.distribution.root(x) for own in self.members]
        return torch.cat([*roots, self._spread(x).flatten(1).mT], dim=-1)

    def apply(self, symbol: Symbol, space: Sequence[int]) -> "Mixture":
        members = [
            replace(own, distribution=own.distribution.apply(symbol, space)) for own in self.members
        ]
        return replace(self, members=members)

    def of_part(self, expansion: Expansion | None, kernel: Kernel) -> "Mixture":
        """The distribution of one term of a sum of kernels, from the terms of the members. Its
        prior mean is zero."""
        members = []
        for own in self.members:
            part = counterpart(kernel, self.kernel, own.kernel)
            distribution = own.distribution.split()[0].of_part(expansion, part)
            members.append(replace(own, kernel=part, distribution=distribution))
        return Mixture(members, kernel)


# Draws of the weights of observations with Student-t noise, from their posterior.
#
# 1. The errors ε of all observations are drawn given the weights, by Matheron's rule. This needs
#    one draw of field and noise from their prior, and one linear solution for the difference
#    between the data and this draw. A factor of the posterior covariance is not needed.
# 2. The weight of each observation is drawn from its Gamma distribution given its error. The
#    weights are independent given the errors.
# 3. Steps 1 and 2 alternate. They start from the expected weights, which are close to the
#    distribution, so that ten sweeps suffice without a long burn-in.
#
# If the constant mean is not fixed, it has a flat prior. The best constant for the difference is
# then a draw of the mean.


_SWEEPS = 10  # sweeps of Gibbs sampling, from the expected weights


@torch.no_grad()
def with_drawn_weights(
    inference: ExactInference,
    kernel: Kernel,
    likelihoods: Mapping[str, Likelihood],
    mean: Float[Tensor, "p"] | None,
    generator: np.random.Generator,
) -> ExactInference:
    """The inference with weights w that are drawn from p(w | y), given the hyperparameters.

    Student-t noise is Gaussian noise with the covariance N_n/w_n, where w_n ~ Gamma(ν/2, ν/2).
    Gibbs sampling starts from the expected weights. In turn, it draws all errors ε from their
    Gaussian posterior given w, by Matheron's rule, and the weights from

        w_n | ε ~ Gamma((ν + v)/2, (ν + ε_nᵀ N_n⁻¹ ε_n)/2) .

    Under Gaussian noise, and if observations were merged, the weights do not change.
    """
    models = EStep.of(kernel, likelihoods, mean).heavy_tailed
    data = inference.data
    if not models or data.tracks or data.symbol_data or inference.size != data.num_values:
        return inference
    noises = noises_of(kernel, likelihoods)
    parts = data.unweighted().observations  # in the order of the rows of the covariance
    points, sizes = PointObservations(parts), [part.y.numel() for part in parts]
    noise = points.noise_covariance(noises)  # N, for weights of one
    noise_root = cholesky(noise)
    prior, constants = inference.prior(kernel), inference.design(noises)[:, 1:]
    values, vectors = torch.linalg.eigh(prior)  # without noise, it may be singular to rounding
    root = vectors * values.clamp_min(0).sqrt()
    weights = list(data.all_weights())
    for _ in range(_SWEEPS):
        normal = torch.from_numpy(generator.standard_normal((2, len(prior)))).to(prior)
        spread = torch.cat(
            [
                weight.rsqrt().repeat_interleave(part.y.shape[-1])
                for part, weight in zip(parts, weights, strict=True)
            ]
        )
        draws = root @ normal[0], spread * (noise_root @ normal[1])
        scaled = spread.unsqueeze(-1) * noise * spread
        errors = drawn_errors(points.values, prior, scaled, *draws, constants, mean)
        whitened = torch.linalg.solve_triangular(noise_root, errors.unsqueeze(-1), upper=False)
        for i, (part, rows) in enumerate(zip(parts, whitened.split(sizes), strict=True)):
            model = models.get(part.key.label)
            if model is not None:
                distance = rows.view(part.y.shape).square().sum(-1)
                weights[i] = model.drawn_weights(distance, part.y.shape[-1], generator)
    return inference.of(data.unweighted().weighted(weights, 0.0))


def drawn_errors(
    y: Float[Tensor, "M"],
    prior: Float[Tensor, "M M"],
    noise: Float[Tensor, "M M"],
    field: Float[Tensor, "M"],
    error: Float[Tensor, "M"],
    constants: Float[Tensor, "M p"],
    mean: Float[Tensor, "p"] | None,
) -> Float[Tensor, "M"]:
    """A draw of y − Hc − f given y, by Matheron's rule, from the draws `field` and `error` with the
    covariances `prior` and `noise`. The mean c is fixed or has a flat prior."""
    factor = cholesky(prior + noise)
    # The difference between the data and the draws. Its solution corrects the drawn noise below.
    rest = y - field - error
    if mean is None:
        design = torch.cholesky_solve(constants, factor)
        # With the pseudo-inverse, the mean is zero along directions on which no observation
        # depends.
        information = torch.linalg.pinv(constants.mT @ design, hermitian=True)
        mean = information @ (design.mT @ rest)
    rest = torch.cholesky_solve((rest - constants @ mean).unsqueeze(-1), factor)
    return error + (noise @ rest).squeeze(-1)


# A sample of the hyperparameters that few observations do not determine.
#
# 1. The trained hyperparameters become coordinates u, with the ranges and least values of a search.
# 2. If all of them have priors, `integrated` draws from their posterior by adaptive importance
#    sampling. Its first proposal is Gaussian with the precision H + (curvature of the prior), where
#    H is the average information. `_draws_needed` sets the effective number of draws. It measures
#    at 16 points the part of a predictive variance that comes from the hyperparameters, because
#    only this part has a Monte Carlo error.
# 3. Otherwise, `about_a_fit` draws 32 times from Laplace's approximation and truncates the weights.
#    Learned spectra, for example, have too many coordinates for step 2.
# 4. The draws are resampled to at most 64 members with equal weights, because each member predicts
#    again. There are fewer if their factors exceed the memory.
# 5. `_member` computes the posterior of each member when a prediction first needs it. For Student-t
#    noise, the weights of the observations are drawn. A member whose covariance cannot be
#    factorised is dropped, and the remaining weights are normalised again.


_SIZE, _LEAST = 32, 1e-3  # draws near a fit, and the least weight of a draw that is used
_WIDEST_OPEN = 3.0  # largest standard deviation of a coordinate without a prior
_LARGEST = 1200  # rows of a covariance whose factors for all draws are stored, in 0.4 GB
_MEMORY = 5e7  # numbers in all factors
_FEW = 4.0  # effective number of draws below which a warning is given
_MEMBERS = 64  # members of a mixture, whose error bars then have an error below 9 %
_LIKELY = 0.5  # probability above which a warning is given
_EFFECTIVE, _TOLERANCE = 100.0, 0.02  # least effective number of draws; error of error bars
_PLACES, _SLOPE_STEP = 16, 1e-3  # points that determine the number of draws; step of slopes


@dataclass(frozen=True)
class Sample:
    """Posteriors for draws of the hyperparameters. It is empty if no hyperparameter is trained.

    Attributes:
        draws: draws of the hyperparameters, in the coordinates of a search; None if empty.
        longer: the probability that the lengthscale of a field exceeds the extent of the data.
        compute: a function that returns the posteriors for some of the draws, with their weights.
    """

    draws: Draws | None = None
    longer: float = 0.0
    compute: Callable[[], Sequence[Member]] = tuple

    @cached_property
    def members(self) -> Sequence[Member]:
        """The posteriors with their weights. They are computed at the first access."""
        return self.compute()

    def check(self, symbol: Symbol) -> None:
        """Warn of a potential with long waves that the data cannot distinguish from the constant
        mean."""
        if symbol.order < 0 and self.longer > _LIKELY:
            warnings.warn(
                "a lengthscale exceeds the extent of the data with a probability of "
                f"{self.longer:.2f}: the data barely distinguish such long waves from the constant "
                f"mean, and error bars of {type(symbol).__name__} may be too small; add more "
                "distant observations, register a prior of the lengthscale, or give a known mean",
                DataWarning,
                stacklevel=6,
            )


def leaves_spectra_open(inference: Inference, kernel: Kernel) -> bool:
    """Whether there are too few observations to determine a learned spectrum."""
    few = inference.is_exact and inference.num_values <= MOST_SAMPLED
    return few and bool(learned_spectra(kernel, trained=True))


@torch.no_grad()
def sample_of_hyperparameters(
    inference: Inference,
    kernel: Kernel,
    likelihoods: Mapping[str, Likelihood],
    mean: Float[Tensor, "p"] | None,
) -> Sample:
    """Posteriors for a sample of all trained hyperparameters.

    If all hyperparameters have a weak prior, or a prior that the user registered, the sample is
    from `adaptive_draws`. It is so large that the Monte Carlo error of error bars is 2 %.
    Otherwise, for example for learned spectra, it has 32 draws near the fitted hyperparameters. You
    get a `DataWarning` if a few draws have most of the weight. Under Student-t noise, the weights
    of the observations are drawn as well, with the degrees of freedom of the fit.

    Args:
        inference: the inference of a fitted model.
        kernel: the kernel of the model. It is not changed.
        likelihoods: the likelihoods of the model. They are not changed.
        mean: the constant mean (p,) if it is fixed, otherwise None.

    Raises:
        ValueError: The model has features, or the covariance is too large.
    """
    exact = inference.is_exact
    size = inference.size if exact else inference.num_values
    if not exact or size > _LARGEST:
        raise ValueError(
            f"expected at most {_LARGEST} values under the exact kernel, for posteriors with many "
            f"draws of the hyperparameters, got {size}{'' if exact else ' on features'}; fit "
            "fewer observations (gp_orff.thin) with frequencies=Auto(), or use posterior(): with "
            "many observations, the hyperparameters have little uncertainty"
        )
    kernel, likelihoods = deepcopy((kernel, dict(likelihoods)))
    survey = inference.data.survey
    coordinates = search_coordinates(kernel, likelihoods, survey)
    if not coordinates.parts:
        return Sample()
    if not inference.data.tracks:
        inference = inference.of(inference.data.in_one_piece())
    model = Model(inference, kernel, likelihoods, mean, coordinates)
    priors = None if inference.data.tracks else WeakPriors.of(kernel, likelihoods, survey)
    draws = about_a_fit(model) if priors is None else integrated(model, priors)
    if draws is None:
        return Sample()
    effective = draws.effective
    # For learned spectra, few draws of curves are better than one, so there is no warning.
    if effective < _FEW and not prior_scales(kernel, coordinates).any():
        warnings.warn(
            f"the {len(draws.weights)} draws of hyperparameters have an effective number of "
            f"{effective:.1f}: their distribution is far from Gaussian, and error bars may be too "
            "small; register priors of the hyperparameters, or use a simpler kernel",
            DataWarning,
            stacklevel=3,
        )
    if priors is not None:
        most = int(min(effective, _MEMBERS, _MEMORY / inference.size**2))
        kept = draws.resampled(max(most, 1), np.random.default_rng(0))
    else:
        kept = Draws(draws.u[chosen := draws.weights >= _LEAST], draws.weights[chosen], np.nan)
    longer = 0.0 if priors is None else _longer(model, draws)
    model = replace(model, coordinates=coordinates.without_ranges())
    return Sample(draws, longer, partial(_members, model, kept))


@torch.no_grad()
def _members(model: Model, drawn: Draws) -> list[Member]:
    """The posteriors for draws. If none can be computed, the list is empty and you get a
    `DataWarning`."""
    pairs = zip(drawn.weights, _parts(model, drawn.u), strict=True)
    members = [(w, parts) for w, parts in pairs if parts is not None]
    if not members:
        warnings.warn(
            "the posterior cannot be computed for hyperparameters other than the learned ones: "
            "error bars treat these as known, and may be too small; register priors, or give more "
            "noise",
            DataWarning,
            stacklevel=3,
        )
    total, fixed = sum(w for w, _ in members), model.mean is not None
    return [
        Member(float(w / total), kernel, posterior.field(fixed=fixed))
        for w, (kernel, posterior) in members
    ]


def _longer(model: Model, draws: Draws) -> float:
    """The probability that the lengthscale of a field exceeds the extent of the data. You get a
    `DataWarning` of lengthscales below the median distance of neighbours."""
    distances, longest = model.inference.data.survey.distances, 0.0
    names = {own: name for name, own in parameter_names(model.kernel, model.likelihoods).items()}
    parts, split = model.coordinates.parts, model.coordinates.split(draws.u)
    every = {
        part.parameter: part.values(part.on_device(u)).cpu().numpy()
        for part, u in zip(parts, split, strict=True)
    }
    leaves = [(term, leaf) for term in terms(model.kernel) for leaf in term.leaves]
    for term, leaf in leaves:
        if not (leaf.kernel.has_lengthscale and leaf.kernel.raw_lengthscale in every):
            continue
        lengths = every[leaf.kernel.raw_lengthscale]
        dims = leaf.columns(leaf_dims(term, leaf, len(distances.extent)))
        spacing, extent = distances.typical(dims), distances.extent[list(dims)].max()
        shorter = draws.weights @ (lengths.max(-1) < spacing)
        if shorter > _LIKELY:
            warnings.warn(
                f"{names[leaf.kernel.raw_lengthscale]} is less than {spacing:.3g}, the median "
                f"distance of neighbours, with a probability of {shorter:.2f}: the field changes "
                "between the observations, and error bars may be too small; add denser "
                "observations, or register a prior of the lengthscale",
                DataWarning,
                stacklevel=4,
            )
        if term.factor.degree:
            longest = max(longest, float(draws.weights @ (lengths.min(-1) > extent)))
    return longest


def integrated(model: Model, priors: WeakPriors) -> Draws:
    """Return draws from the posterior of all hyperparameters.

    The number of draws is chosen so that error bars have a given accuracy. Let S be the covariance
    of the coordinates u about their best values, and m and v the mean and variance of a prediction
    for these values. The uncertainty of u increases the variance by r v, with r = (∂m)ᵀS(∂m)/v +
    exp(½ (∂log v)ᵀS(∂log v)) − 1. The share q = r/(1 + r) of the variance comes from the draws.
    With the effective number ESS of draws, error bars have a relative error of about q/√(2 ESS).
    """
    prior, start = PriorOfCoordinates(model, priors), model.coordinates.get()
    parts = model.inference, model.kernel, model.likelihoods, model.coordinates, model.mean
    covariance = np.linalg.inv(average(*parts) + prior.precision(start))
    model.coordinates.set(start)
    return adaptive_draws(
        lambda u: model.evidence(u) + prior.log_density(u),
        prior.draw,
        prior.log_proposal,
        start,
        0.5 * (covariance + covariance.T),
        _draws_needed(model, start, covariance),
        np.random.default_rng(0),
    )


def _draws_needed(
    model: Model, start: Float[np.ndarray, "k"], covariance: Float[np.ndarray, "k k"]
) -> float:
    """The effective number of draws that the error bars need, in the box of the data."""
    if not model.inference.serves_batches(model.kernel):
        return _EFFECTIVE
    low, high = torch.tensor(model.inference.data.survey.box, dtype=torch.float64).mT
    sobol = torch.quasirandom.SobolEngine(len(low), scramble=True, seed=0)
    x = low + (high - low) * sobol.draw(_PLACES, dtype=torch.float64)
    steps = _SLOPE_STEP * np.eye(len(start))
    u = np.concatenate([start[None], start + steps, start - steps])
    means, variances = model.moments(u, x.to(next(model.kernel.parameters()).device))
    logs = np.log(np.maximum(variances, np.finfo(float).tiny))
    slopes = [np.subtract(*np.split(own[1:], 2)) / (2 * _SLOPE_STEP) for own in (means, logs)]
    of_mean, of_log = (np.einsum("it,ij,jt->t", own, covariance, own) for own in slopes)
    # The bound 3 prevents an overflow if the logarithm of a variance is almost undetermined. The
    # share q is then close to one in any case.
    ratio = of_mean / np.exp(logs[0]) + np.expm1(np.minimum(0.5 * of_log, 3.0))
    share = np.nanmean(ratio / (1 + ratio))
    return max(_EFFECTIVE, 0.5 * (share / _TOLERANCE) ** 2)


def about_a_fit(model: Model) -> Draws | None:
    """Return S draws of the coordinates u near their fitted values û, with importance weights.

    The draws are from Laplace's approximation N(û, H⁻¹), where H is the average information. Their
    weights are w ∝ p(y|u) p(u) / N(u; û, H⁻¹), but at most √S times the mean weight (Ionides 2008,
    *Truncated importance sampling*). A positive parameter without a prior has a flat prior of its
    logarithm. The result is None if no evidence can be computed.
    """
    coordinates, start = model.coordinates, model.coordinates.get()
    parts = model.inference, model.kernel, model.likelihoods
    # A coordinate that the data do not determine would have an infinite variance. The additional
    # precision limits its standard deviation to `_WIDEST_OPEN`.
    open_ones = prior_scales(model.kernel, coordinates) == 0
    precision = average(*parts, coordinates, model.mean) + np.diag(open_ones * _WIDEST_OPEN**-2)
    root = np.linalg.cholesky(np.linalg.inv(precision))
    points, logs = [], []
    for draw in np.random.default_rng(0).standard_normal((_SIZE, len(start))):
        u = np.clip(start + root @ draw, coordinates.low, coordinates.high)
        coordinates.set(u)
        try:
            evidence = log_marginal_likelihood(*parts, model.mean)
        except (torch.linalg.LinAlgError, ValueError, RuntimeError):
            continue
        noise = log_prior_of_noise(*parts[1:], model.inference.data.survey)
        points.append(u)
        # −½ drawᵀdraw is the logarithm of the proposal, up to a constant.
        logs.append(float(evidence + coordinates.log_prior() + noise) + 0.5 * draw @ draw)
    if not points:
        return None
    return Draws(np.array(points), truncated_weights(np.array(logs)), np.nan)


def _parts(model: Model, u: Float[np.ndarray, "S k"]) -> Iterator[tuple[Kernel, Posterior] | None]:
    """The kernel and the posterior at each u; None if they cannot be computed."""
    generator = np.random.default_rng(1)
    e_step = EStep.of(model.kernel, model.likelihoods, model.mean)
    batches = model.inference.serves_batches(model.kernel) and not e_step.heavy_tailed
    for some in np.array_split(u, -(-len(u) // model.step)):
        try:
            batch = model.posteriors(some) if batches and len(some) > 1 else None
        except (torch.linalg.LinAlgError, ValueError, RuntimeError):  # one failure stops the batch
            batch = None
        if batch is None:
            yield from (_member(model, one, generator) for one in some)
        else:
            yield from batch


def _member(
    model: Model, u: Float[np.ndarray, "k"], generator: np.random.Generator
) -> tuple[Kernel, Posterior] | None:
    """The kernel and the posterior at u, with drawn weights for Student-t noise; None if they
    cannot be computed."""
    kernel, likelihoods = model.at(u)
    try:
        parts = kernel, likelihoods, model.mean
        inference = with_drawn_weights(model.inference, *parts, generator)
        posterior = inference.posterior(kernel, noises_of(kernel, likelihoods), model.mean)
    except (torch.linalg.LinAlgError, ValueError, RuntimeError):
        return None
    return kernel, posterior


def truncated_weights(logs: Float[np.ndarray, "S"]) -> Float[np.ndarray, "S"]:
    """Return normalised importance weights from their logarithms. First, weights are reduced to at
    most √S times the mean of S weights."""
    weights = np.exp(logs - logs.max())
    weights = np.minimum(weights, weights.mean() * np.sqrt(len(weights)))
    return weights / weights.sum()
