"""Importance sampling of hyperparameters: their prior, proposals, and data under many."""

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

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

from gp_orff.data.noise import noises_of
from gp_orff.fitting.scoring import LogNormal, Owner, WeakPriors, owners_of
from gp_orff.fitting.search import Coordinate, Coordinates, log_density
from gp_orff.fitting.starting_values import all_summands
from gp_orff.inference.exact import ExactInference
from gp_orff.inference.features import Posterior
from gp_orff.inference.quadratic import Evidence

# Data under many hyperparameters at once.
#
# The evidence of S hyperparameters costs one batched Cholesky factorisation where kernel and data
# permit batches, and S of them otherwise.
#
# 1. `Coordinates.raw` turns the coordinates u, an array (S, k), into raw parameters with S in
#    front.
# 2. `with_parameters` copies the tree of modules and replaces only the parameters, so that the
#    fitted model is not changed and buffers are shared.
# 3. The batch is evaluated in parts of at most `_NUMBERS` numbers of covariance matrices.
# 4. A batched factorisation fails for all members if it fails for one. The part is then evaluated
#    again one by one, and a member that fails alone gets −∞: importance sampling gives it the
#    weight zero, which is right for a covariance that is singular to rounding.


_NUMBERS = 2**23  # in the matrices of one batch


@dataclass(frozen=True)
class Model:
    """A kernel and the likelihoods of all groups, of which a search moves the coordinates."""

    inference: ExactInference
    kernel: Kernel
    likelihoods: Mapping[str, Likelihood]
    mean: Float[Tensor, "p"] | None  # a fixed one
    coordinates: Coordinates

    @property
    def step(self) -> int:
        """How many hyperparameters are evaluated at once."""
        if not self.inference.serves_batches(self.kernel):
            return 1
        return max(1, int(_NUMBERS / self.inference.size**2))

    def batch(self, u: Float[np.ndarray, "S k"]) -> tuple[Kernel, dict[str, Likelihood]]:
        """A batch of kernels and likelihoods."""
        return self._at(self.coordinates.raw(u), torch.Size([len(u)]))

    def at(self, u: Float[np.ndarray, "k"]) -> tuple[Kernel, dict[str, Likelihood]]:
        """A kernel and likelihoods."""
        raw = self.coordinates.raw(u[None])
        return self._at({own: values[0] for own, values in raw.items()}, torch.Size())

    def _at(
        self, raw: Mapping[nn.Parameter, Tensor], batch: torch.Size
    ) -> tuple[Kernel, dict[str, Likelihood]]:
        kernel, *likelihoods = (
            with_parameters(module, raw, batch)
            for module in (self.kernel, *self.likelihoods.values())
        )
        return kernel, dict(zip(self.likelihoods, likelihoods, strict=True))

    def evidence(self, u: Float[np.ndarray, "S k"]) -> Float[np.ndarray, "S"]:
        """log p(y | u): with the constant mean integrated out, unless it is fixed; −∞ where it
        cannot be computed."""
        parts = np.array_split(u, max(1, -(-len(u) // self.step)))
        with warnings.catch_warnings():  # draws may make the covariance singular to rounding
            warnings.simplefilter("ignore", NumericalWarning)
            values = np.concatenate([self._evidence(part) for part in parts])
        return np.where(np.isfinite(values), values, -np.inf)

    def _evidence(self, u: Float[np.ndarray, "S k"]) -> Float[np.ndarray, "S"]:
        try:
            if len(u) == 1:
                kernel, likelihoods = self.at(u[0])
                noises = noises_of(kernel, likelihoods)
                return self.log_density(self.inference.evidence(kernel, noises))[None]
            kernel, likelihoods = self.batch(u)
            whitened = self.inference.in_batches(kernel, noises_of(kernel, likelihoods))
            return self.log_density(whitened.evidence)
        except (torch.linalg.LinAlgError, ValueError, RuntimeError):
            if len(u) == 1:
                return np.array([-np.inf])
            return np.concatenate([self._evidence(one) for one in np.split(u, len(u))])

    def log_density(self, evidence: Evidence) -> Float[np.ndarray, "*b"]:
        return self.inference.log_density(evidence, self.mean, restricted=True).cpu().numpy()

    def posteriors(self, u: Float[np.ndarray, "S k"]) -> list[tuple[Kernel, Posterior]]:
        """The kernels and their posteriors, from one batched factorisation.

        Raises:
            LinAlgError: one of the covariances is not positive definite.
        """
        kernel, likelihoods = self.batch(u)
        whitened = self.inference.in_batches(kernel, noises_of(kernel, likelihoods))
        pairs = list(map(self.at, u))
        each = [(kernel, noises_of(kernel, likelihoods)) for kernel, likelihoods in pairs]
        posteriors = self.inference.posteriors(whitened, each, self.mean)
        return list(zip((kernel for kernel, _ in each), posteriors, strict=True))

    def moments(
        self, u: Float[np.ndarray, "S k"], x: Float[Tensor, "n d"]
    ) -> tuple[Float[np.ndarray, "S t"], Float[np.ndarray, "S t"]]:
        """Means and variances of the field at points, and of each summand of a sum of kernels."""
        kernel, likelihoods = self.batch(u)
        noises = noises_of(kernel, likelihoods)
        factor, half, evidence = self.inference.in_batches(kernel, noises)
        summands = all_summands(kernel)
        # `half` is L⁻¹V with V = [y, 1⊗I], so the contrast turns it into L⁻¹(y − H c).
        residual = half @ evidence.contrast(self.mean)
        means, variances = [], []
        for part in [kernel, *(summands if len(summands) > 1 else [])]:
            cross = self.inference.cross(part, x).to(factor).expand(*factor.shape[:-1], -1)
            cross = torch.linalg.solve_triangular(factor, cross, upper=False)
            mean = (cross.mT @ residual).squeeze(-1)
            variance = part(x, diag=True) - cross.square().sum(-2)
            # The constant mean is estimated with the whole field: its uncertainty adds to the
            # variance of the total, and not to that of a summand, which has the mean zero.
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
    """A copy of a module with other values of some parameters, which shares all else with it; of a
    kernel, a batch of copies has a batch of every parameter."""
    copies: dict[Module, Module] = {}

    def copied(part: Module) -> Module:
        if part not in copies:
            copies[part] = own = object.__new__(type(part))
            own.__dict__.update(vars(part))
            own.__dict__["_parameters"] = {
                name: None if raw is None else value(part, raw)
                for name, raw in vars(part)["_parameters"].items()
            }
            children = vars(part)["_modules"].items()
            own.__dict__["_modules"] = {n: None if c is None else copied(c) for n, c in children}
            if batch and isinstance(part, Kernel):
                own.batch_shape = batch
        return copies[part]

    def value(part: Module, raw: nn.Parameter) -> nn.Parameter:
        values = parameters.get(raw)
        if values is None:
            own = isinstance(part, Kernel)
            # Every parameter of a batched kernel needs the batch dimension, also those that do not
            # vary.
            values = raw.detach().expand((*batch, *raw.shape)) if own else raw.detach()
        return nn.Parameter(values, requires_grad=False)

    return copied(module)


# The prior of hyperparameters in the coordinates of a search, and draws from it.
#
# Two densities of u are distinguished:
#
#     p(u)   the prior itself, with the Jacobian of the coordinates; it enters the weights.
#     q(u)   a proposal that can be drawn from and is about as wide; it enters the mixture of
#            proposals.
#
# A weak prior is log-normal, thus normal in the logarithm, and serves as proposal. A prior that the
# user registered may be any distribution: q is then normal with the mean and the widened standard
# deviation of 2000 draws, and the weights correct for the difference.
#
# The variance of a summand has a prior whose median depends on the lengthscales, because what the
# prior describes is the variance of the field. Draws are therefore made in two steps, first of all
# other parameters, then of the variance given these: r(u) = (log v − log median)/width is linear in
# the logarithm of the scale with the slope 1/width, so u + width·(r* − r(u)) has the residual r*.
# The density of this second step is that of r* over the width.


_DRAWS, _FEWEST = 2000, 100  # of a prior, and inside the constraint, to learn its moments from
_WIDER_PRIOR, _WIDEST = 1.5, 2.0  # the sd over that of these, and without them
_STEP = 1e-5  # of differences
_LOG_ROOT = 0.5 * math.log(2 * math.pi)


@dataclass(frozen=True)
class PriorOfCoordinates:
    """p(u), and a proposal q(u) with tails as wide, which u can be drawn from.

    q is normal in the coordinates of every parameter, with the moments of the prior, and wider
    where the prior is not normal in them. The variance of a summand of the kernel is log-normal
    given its lengthscales. Weak priors are their own proposal.
    """

    model: Model
    priors: WeakPriors

    @cached_property
    def _columns(self) -> dict[Owner, tuple[slice, Coordinate]]:
        """The columns of u of every parameter."""
        owners = owners_of({None: self.model.kernel, **self.model.likelihoods})
        parts = self.model.coordinates.parts
        ends = np.cumsum([part.parameter.numel() for part in parts])
        return {
            owners[part.parameter]: (slice(end - part.parameter.numel(), end), part)
            for part, end in zip(parts, ends, strict=True)
        }

    @cached_property
    def _scaling(self) -> dict[Owner, LogNormal]:
        """The variances of summands that a parameter without other bounds scales."""
        weak = self.priors.weak.items()
        return {
            own: prior
            for own, prior in weak
            if prior.summand is not None and self._columns[own][1].is_logarithm
        }

    @cached_property
    def _normal(self) -> tuple[Float[np.ndarray, "k"], Float[np.ndarray, "k"]]:
        """The means and standard deviations of q, but for the scaling parameters."""
        means = self.model.coordinates.get()
        widths = np.ones_like(means)
        for own, prior in {**self.priors.weak, **self.priors.registered}.items():
            columns, part = self._columns[own]
            if isinstance(prior, LogNormal) and part.is_logarithm:
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
        for own in self._scaling:  # from the present ones
            columns, _ = self._columns[own]
            u[:, columns] = means[columns]
        residuals = self._residuals(u)
        for own, prior in self._scaling.items():
            columns, _ = self._columns[own]
            wanted = rng.standard_normal((count, columns.stop - columns.start))
            u[:, columns] += prior.width * (wanted - residuals[own])
        return u

    def log_proposal(self, u: Float[np.ndarray, "S k"]) -> Float[np.ndarray, "S"]:
        """log q(u)."""
        means, widths = self._normal
        scores, residuals = (u - means) / widths, self._residuals(u)
        widths = widths.copy()
        for own, prior in self._scaling.items():
            columns, _ = self._columns[own]
            scores[:, columns], widths[columns] = residuals[own], prior.width
        return (-0.5 * np.square(scores) - np.log(widths) - _LOG_ROOT).sum(-1)

    def log_density(self, u: Float[np.ndarray, "S k"]) -> Float[np.ndarray, "S"]:
        """log p(u), up to a constant; −∞ for noise below the floor of searches, where the evidence
        is rounding."""
        total = np.zeros(len(u))
        for columns, part in self._columns.values():
            if part.floor is not None:
                values = part.values(part.on_device(u[:, columns]))
                total[(values < part.floor).any(-1).cpu().numpy()] = -np.inf
        for own, residual in self._residuals(u).items():
            columns, part = self._columns[own]
            ours = part.on_device(u[:, columns])
            slopes = part.log_slopes(ours) - part.values(ours).log()  # of the logarithm
            # The prior is a density of log v; ∂ log v/∂u turns it into one of u.
            total += (slopes.cpu().numpy() - 0.5 * np.square(residual)).sum(-1)
        for own, prior in self.priors.registered.items():
            columns, part = self._columns[own]
            ours = part.on_device(u[:, columns])
            values = part.values(ours).reshape(len(u), *part.parameter.shape)
            logs = log_density(prior, values.to(part.parameter))
            total += (logs + part.log_slopes(ours).sum(-1)).cpu().numpy()
        return np.where(np.isnan(total), -np.inf, total)

    def precision(self, u: Float[np.ndarray, "k"]) -> Float[np.ndarray, "k k"]:
        """The curvature of −log q at u, but for second derivatives of variances."""
        _, widths = self._normal
        steps = _STEP * np.concatenate([np.eye(len(u)), -np.eye(len(u))])
        residuals, jacobian = self._residuals(u + steps), np.diag(1 / widths)
        for own in self._scaling:
            columns, _ = self._columns[own]
            after, before = np.split(residuals[own], 2)
            jacobian[columns] = (after - before).T / (2 * _STEP)
        return jacobian.T @ jacobian

    def _residuals(self, u: Float[np.ndarray, "S k"]) -> dict[Owner, Float[np.ndarray, "S r"]]:
        """(log v − log median) / width of all that has a weak prior."""
        if not self.priors.weak:
            return {}
        kernel, likelihoods = self.model.batch(u)
        every = self.priors.residuals(kernel, likelihoods).expand(len(u), -1).cpu().numpy()
        ends = np.cumsum([prior.median.numel() for prior in self.priors.weak.values()])
        return dict(zip(self.priors.weak, np.split(every, ends[:-1], axis=-1), strict=True))


def _moments(
    part: Coordinate, prior: Prior | LogNormal, present: Float[np.ndarray, "k"]
) -> tuple[Float[np.ndarray, "k"], Float[np.ndarray, "k"]]:
    """Means and standard deviations of u under a prior, by draws inside the constraint."""
    shape = part.parameter.shape
    # `Prior.sample` has no generator as an argument: the global state is set here and restored.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        values = _draws(prior, shape)
    values = values.double().reshape(_DRAWS, -1).to(part.parameter.device)
    u = part.of_values(values)[part.allows_each(values).all(-1)]
    if len(u) < _FEWEST:
        return present, np.full_like(present, _WIDEST)
    return u.mean(0).cpu().numpy(), _WIDER_PRIOR * u.std(0).cpu().numpy()


def _draws(prior: Prior | LogNormal, shape: torch.Size) -> Float[Tensor, "S ..."]:
    """Draws of values; NaN where a prior gives none."""
    if isinstance(prior, LogNormal):
        normal = torch.randn(_DRAWS, *shape, dtype=torch.float64)
        if prior.summand is not None:
            return normal * math.nan
        return prior.median.cpu() * torch.exp(prior.width * normal)
    try:
        own = prior.batch_shape + prior.event_shape
        count = (_DRAWS,) if own == shape or len(own) else (_DRAWS, *shape)
        return prior.sample(torch.Size(count)).expand(_DRAWS, *shape)
    except NotImplementedError:
        return torch.full((_DRAWS, *shape), math.nan)


# Adaptive importance sampling, a share of whose draws always comes from the prior.
#
# 1. A batch of 64 is drawn: a quarter from the prior, the rest from a Student-t distribution of
#    five degrees of freedom, at first about the maximum of the posterior density, with 1.5 times
#    the inverse of the information as its scale matrix.
# 2. All draws so far get the weights w ∝ p(y|u) p(u) / q(u), where q is the mixture of all
#    proposals so far, each as often as it was drawn from (Veach & Guibas 1995; Cornuet et al.
#    2012). They are bounded, since the prior is part of q. The largest are replaced by quantiles of
#    a generalised Pareto distribution that is fitted to them (Vehtari et al. 2024).
# 3. The next Student-t distribution has the weighted mean, and 1.5 times a covariance between the
#    weighted one and the first one, the nearer to the weighted one the more draws count.
# 4. Batches are drawn until the effective number of draws, 1/Σw², is as large as asked, or there
#    are 1024 draws.
#
# The weights of early draws change with every batch, because their density under the later
# proposals counts as well; only the evidences are computed once. This is what makes a poor first
# proposal harmless. Weights are kept as logarithms until the end: evidences differ by hundreds of
# nats.


Points = Float[np.ndarray, "S k"]
Logs = Float[np.ndarray, "S"]

MOST = 1024  # draws
_BATCH, _OF_PRIOR = 64, 16
_TAILS, _WIDER_PROPOSAL = 5.0, 1.5
_TAIL, _ROOTS = 0.2, 3.0  # the tail that is smoothed: a share of the draws, or so many times √S
_LEAST_TAIL = 5
_SHAPES = 10.0, 0.5  # the prior of the shape of a Pareto distribution: as many draws, with this k


@dataclass(frozen=True)
class Draws:
    """Draws with weights that add up to one."""

    u: Points
    weights: Float[np.ndarray, "S"]
    pareto_k: float  # the shape of the tail of the weights; above 0.7 they are not reliable

    @property
    def effective(self) -> float:
        """The effective number 1/Σw² of draws."""
        return float(1 / np.square(self.weights).sum())

    def resampled(self, count: int, rng: np.random.Generator) -> "Draws":
        """About `count` draws of equal weights by systematic resampling, each once with its share,
        in the order along the direction in which they vary most; the same draws if they are
        fewer."""
        if len(self.u) <= count:
            return self
        # Systematic resampling takes evenly spaced quantiles of the sorted draws. The order
        # matters: neighbours in it represent one another, so they should be similar.
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
        log_posterior: log p(y|u) p(u), up to a constant; −∞ where it is not known.
        draw_prior, log_prior: of a proposal with tails as wide as those of the prior.
        mode, covariance: of the posterior, about.
        effective: the effective number of draws that is asked for.
        rng: the source of random numbers.

    Raises:
        ValueError: the posterior density is known at none of the draws.
    """
    k = len(mode)
    proposals: list[Callable[[Points], Logs]] = []
    u, logs = np.empty((0, k)), np.empty(0)
    student = StudentT(mode, _WIDER_PROPOSAL * covariance)
    while len(u) < MOST:
        batch = np.concatenate([draw_prior(_OF_PRIOR, rng), student.draw(_BATCH - _OF_PRIOR, rng)])
        u, logs = np.concatenate([u, batch]), np.concatenate([logs, log_posterior(batch)])
        proposals.append(student.log_density)
        # log q of the mixture at all draws: the prior has the share of a quarter in every batch,
        # and the proposals of all batches share the rest equally.
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
        # A covariance of k coordinates from few draws is singular or too narrow; the first one,
        # from the information, is mixed in until the draws outnumber the coordinates.
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
        """Draws."""
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
    """The logarithms of Pareto-smoothed importance weights, the largest of which is at most one,
    and the shape k of their tail (Vehtari, Simpson, Gelman, Yao & Gabry 2024).

    −∞ for k where the tail has no spread, NaN where draws are too few for one.
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
    # The i-th largest weight becomes the quantile (i − ½)/m of the fitted distribution, cut off at
    # the largest raw weight, so that smoothing never makes a weight larger than any that occurred.
    places = (np.arange(size) + 0.5) / size
    steps = -np.log1p(-places)
    quantiles = scale * (steps if abs(k) < 1e-9 else np.expm1(k * steps) / k)
    smoothed = logs.copy()
    smoothed[tail] = np.minimum(np.log(cut + quantiles), 0.0)
    return smoothed, k


def pareto(excess: Float[np.ndarray, "m"]) -> tuple[float, float]:
    """The shape k and the scale σ of a generalised Pareto distribution with the density
    (1 + k x/σ)^(−1/k − 1) / σ, from sorted draws (Zhang & Stephens 2009), k with a weak prior."""
    x = np.maximum(excess, np.finfo(float).tiny)
    m, count = len(x), 30 + int(math.sqrt(len(x)))
    # Zhang & Stephens take the posterior mean of b = −k/σ on a grid of points, weighted by the
    # profile likelihood. The grid is spaced about the first quartile of the excesses, a robust
    # scale.
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
