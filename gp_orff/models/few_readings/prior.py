"""The prior of hyperparameters in the coordinates of a search, and draws from it."""

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from gpytorch.priors import Prior
from jaxtyping import Float
from torch import Tensor

from gp_orff.models.few_readings.batches import Model
from gp_orff.models.fitting.coordinates import Coordinate
from gp_orff.models.fitting.scoring.weak_priors import LogNormal, Owner, WeakPriors, owners_of

_DRAWS, _FEWEST = 2000, 100  # of a prior, and inside the constraint, to learn its moments from
_WIDER, _WIDEST = 1.5, 2.0  # the sd over that of these, and without them
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
                values = part.values(torch.from_numpy(u[:, columns]))
                total[(values < part.floor).any(-1).numpy()] = -np.inf
        for own, residual in self._residuals(u).items():
            columns, part = self._columns[own]
            ours = torch.from_numpy(u[:, columns])
            slopes = part.log_slopes(ours) - part.values(ours).log()  # of the logarithm
            total += (slopes.cpu().numpy() - 0.5 * np.square(residual)).sum(-1)
        for own, prior in self.priors.registered.items():
            columns, part = self._columns[own]
            ours = torch.from_numpy(u[:, columns])
            values = part.values(ours).reshape(len(u), *part.parameter.shape)
            logs = prior.log_prob(values.to(part.parameter)).reshape(len(u), -1).sum(-1)
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
        kernel, likelihoods = self.model.batch(u)
        every = self.priors.residuals(kernel, likelihoods).expand(len(u), -1).cpu().numpy()
        ends = np.cumsum([prior.median.numel() for prior in self.priors.weak.values()])
        return dict(zip(self.priors.weak, np.split(every, ends[:-1], axis=-1), strict=True))


def _moments(
    part: Coordinate, prior: Prior | LogNormal, present: Float[np.ndarray, "k"]
) -> tuple[Float[np.ndarray, "k"], Float[np.ndarray, "k"]]:
    """Means and standard deviations of u under a prior, by draws inside the constraint."""
    shape = part.parameter.shape
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        values = _draws(prior, shape)
    values = values.double().reshape(_DRAWS, -1)
    u = part.of_values(values)[part.allows(values)]
    if len(u) < _FEWEST:
        return present, np.full_like(present, _WIDEST)
    return u.mean(0).cpu().numpy(), _WIDER * u.std(0).cpu().numpy()


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
