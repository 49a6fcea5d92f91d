"""The posterior of a vector field, as a scientist asks for it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from jaxtyping import Float
from torch import Tensor

from gp_orff.operators import NoisyPosteriorCovariance, PosteriorCovariance
from gp_orff.posterior import FieldLaw
from gp_orff.readings import as_points


@dataclass(frozen=True)
class Conditioned:
    """What conditioning leaves: the law without its mean, and the variance it does not hold."""

    law: FieldLaw
    white: Float[Tensor, "p p"] | None  # truncated by a grid
    covers: Callable[[Float[Tensor, "n d"]], bool]  # whether it is right at some points


class Snapshot(Protocol):
    """A model's data and hyperparameters as they were."""

    def conditioned(self, points: Float[Tensor, "n d"] | None = None) -> Conditioned:
        """For the data's own domain, or one that holds these points too."""

    def mean(self, points: Float[Tensor, "n d"]) -> Float[Tensor, "n p"]:
        """The prior mean."""


class FieldPosterior:
    """The latent field given the data, its mean included; an immutable snapshot of a model.

    Variances are those of the field: for new observations, add the noise of the likelihood.

    All results are computed in float64 and returned in the type of the points. Points outside the
    frequency grid's domain are served by a wider grid, made from the data when they come.

    Example:
        >>> import gp_orff, torch
        >>> x = torch.rand(100, 2, dtype=torch.float64)
        >>> y = torch.stack([torch.sin(3 * x[:, 1]), torch.sin(3 * x[:, 0])], dim=-1)
        >>> model = gp_orff.VectorFieldGP(gp_orff.HelmholtzKernel(num_dims=2))
        >>> field = model.fit(x, y, progress=False).posterior()
        >>> field.mean(x).shape, field.variance(x).shape
        (torch.Size([100, 2]), torch.Size([100, 2]))
        >>> (field.mean(x) - y).abs().max() < 0.01
        tensor(True)
    """

    def __init__(self, snapshot: Snapshot, num_inputs: int):
        self._snapshot = snapshot
        self._num_inputs = num_inputs
        self._own = snapshot.conditioned()
        self._wide: Conditioned | None = None  # of the points outside that came last

    @property
    def num_outputs(self) -> int:
        return self._own.law.num_outputs

    def __call__(self, x: Float[Tensor, "n d"]) -> MultitaskMultivariateNormal | MultivariateNormal:
        """The joint distribution of the field at n points; (n,) where it has one output."""
        points, conditioned = self._at(x)
        points = points.to(_dtype(x))
        covariance = PosteriorCovariance(points, conditioned.law)
        if conditioned.white is not None:
            white = conditioned.white.to(points.dtype)
            covariance = NoisyPosteriorCovariance.of(covariance, white)
        mean = self.mean(x)
        if self.num_outputs == 1:
            return MultivariateNormal(mean.squeeze(-1), covariance)
        return MultitaskMultivariateNormal(mean, covariance)

    def mean(self, x: Float[Tensor, "n d"]) -> Float[Tensor, "n p"]:
        """E[f(x)]."""
        points, conditioned = self._at(x)
        return (conditioned.law.mean(points) + self._snapshot.mean(points)).to(_dtype(x))

    def variance(self, x: Float[Tensor, "n d"]) -> Float[Tensor, "n p"]:
        """Var[f_j(x)], nothing n×n."""
        points, conditioned = self._at(x)
        variance = conditioned.law.variance(points)
        if conditioned.white is not None:
            variance = variance + conditioned.white.diagonal()
        return variance.to(_dtype(x))

    def _at(self, x: Float[Tensor, "n d"]) -> tuple[Float[Tensor, "n d"], Conditioned]:
        points = as_points(x, self._num_inputs)
        if self._own.covers(points):
            return points, self._own
        if self._wide is None or not self._wide.covers(points):
            self._wide = self._snapshot.conditioned(points)
        return points, self._wide


def _dtype(x: object) -> torch.dtype:
    known = isinstance(x, Tensor) and x.is_floating_point()
    return x.dtype if known else torch.float64
