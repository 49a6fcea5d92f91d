"""Functions drawn from a posterior: evaluated anywhere, any number of times, differentiable."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from gp_orff.data.observations import less_reference
from gp_orff.data.validation import as_points
from gp_orff.features.assemble import draw, expand
from gp_orff.features.expansion import Expansion, weights_through
from gp_orff.features.frequencies.random import QuasiMonteCarlo
from gp_orff.inference.distributions import FieldDistribution
from gp_orff.inference.exact_posterior import ExactPosterior
from gp_orff.inference.weight_posterior import WeightPosterior
from gp_orff.models.frozen_model import Snapshot
from gp_orff.models.threads import chosen_threads
from gp_orff.symbols.base import Identity, Symbol

_PRIOR_FREQUENCIES = 2048  # of paths of the prior of an exact model


class Paths(ABC):
    """Draws of a field without its mean."""

    @abstractmethod
    def __call__(self, x: Float[Tensor, "n d"] | Float[Tensor, "S n d"]) -> Float[Tensor, "S n p"]:
        """Their values, at the same points or each at its own."""

    def apply(self, symbol: Symbol, space: Sequence[int]) -> "Paths":
        """A symbol of them."""
        raise NotImplementedError(
            f"{type(symbol).__name__} of sample paths of an exact model is not known: expected "
            "features, such as VectorFieldGP(kernel, frequencies=gp_orff.Auto(exact_values=0)), or "
            "differentiate the paths"
        )

    @abstractmethod
    def __len__(self) -> int:
        """S."""


@dataclass(frozen=True)
class WeightPaths(Paths):
    """φ(x) w_s for drawn weights of the columns."""

    expansion: Expansion
    weights: Float[Tensor, "S 2*D p"]
    symbol: Symbol = field(default_factory=Identity)
    space: Sequence[int] = ()

    def __call__(self, x: Tensor) -> Tensor:
        return less_reference(self._values, x, self.symbol, self.space)

    def _values(self, x: Tensor) -> Tensor:
        if x.dim() == 3:
            return self.expansion.phi.apply(x, self.weights)
        values = self.expansion.phi.apply(x, self._flat)
        return values.unflatten(-1, (-1, len(self.weights))).movedim(-1, 0)

    @property
    def _flat(self) -> Float[Tensor, "2*D p*S"]:
        return self.weights.movedim(0, -1).flatten(1)

    def __len__(self) -> int:
        return len(self.weights)

    def apply(self, symbol: Symbol, space: Sequence[int]) -> "WeightPaths":
        images = weights_through(symbol, self.expansion, self._flat, space)  # (2D, q·S)
        images = images.unflatten(-1, (-1, len(self))).movedim(-1, 0)
        return WeightPaths(self.expansion, images, symbol, space)


@dataclass(frozen=True)
class PathwisePaths(Paths):
    """Matheron's rule: a path of the prior, moved by what the data say of it,

        f_s(x) = g_s(x) + K(x, X) (K + Σ)⁻¹ (y − H g_s(X) − ε_s)

    (Wilson et al. 2020, eq. 14). g_s has random features of its own, the correction is exact: far
    from the data the variance is the prior's, near them that of the posterior to some per cent of
    the features' chance, and up to 20 % of a variance where there is next to no noise.
    """

    distribution: ExactPosterior
    prior: WeightPaths
    alpha: Float[Tensor, "M S"]

    def __call__(self, x: Tensor) -> Tensor:
        if x.dim() == 3:
            cross = self.distribution.cross(x.flatten(0, 1)).mT.unflatten(
                0, (len(x), -1)
            )  # (S, n·p, M)
            moved = (cross @ self.alpha.mT.unsqueeze(-1)).squeeze(-1)
            return self.prior(x) + moved.unflatten(1, (x.shape[1], -1))
        moved = (self.distribution.cross(x).mT @ self.alpha).unflatten(0, (len(x), -1))  # (n, p, S)
        return self.prior(x) + moved.movedim(-1, 0)

    def __len__(self) -> int:
        return len(self.prior)


def sample_paths(distribution: FieldDistribution, num_inputs: int, count: int, seed: int) -> Paths:
    """Draws from a law, by the generator of a seed."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    if isinstance(distribution, WeightPosterior):
        own = distribution.weight_root(
            normal(distribution.expansion.num_features, count).to(distribution.weights.device)
        )
        drawn = distribution.expansion.column_weights(own).unflatten(-1, (-1, count)).movedim(-1, 0)
        return WeightPaths(distribution.expansion, distribution.weights + drawn)
    if not isinstance(distribution, ExactPosterior):
        raise NotImplementedError(f"no sample paths are known for {type(distribution).__name__}")
    rule = QuasiMonteCarlo(_PRIOR_FREQUENCIES, seed=seed)
    draws = [own.to(distribution.alpha) for own in draw(distribution.kernel, rule, num_inputs)]
    expansion = expand(distribution.kernel, draws, num_inputs).double()
    theta = normal(expansion.num_features, count).to(distribution.alpha.device)
    weights = expansion.column_weights(theta).unflatten(-1, (-1, count)).movedim(-1, 0)
    prior = WeightPaths(expansion, weights)

    def image(symbol: Symbol, space: Sequence[int], z: Float[Tensor, "m d"]) -> Tensor:
        return prior.apply(symbol, space)(z).movedim(0, -1).flatten(0, 1)  # (m·q, S)

    noise = distribution.noise_root @ normal(len(distribution.alpha), count).to(
        distribution.alpha.device
    )
    seen = torch.cat([own.apply(image) for own in distribution.observed]) + noise
    return PathwisePaths(
        distribution, prior, distribution.alpha - torch.cholesky_solve(seen, distribution.factor)
    )


class SamplePaths:
    """Paths of a `FieldPosterior`, its mean included: `paths(x)` is (S, n, p).

    Every call evaluates the same S functions. Points x (n, d) are those of all paths; with x
    (S, n, d) every path is asked at points of its own, as for particles that the paths advect:
    `x = x + dt * paths(x)`. Gradients reach x. Paths of features lack what a grid truncates, which
    is not a path, and their potentials a constant: give those a reference.

    Raises:
        ValueError: another shape of x, points outside a frequency grid's domain.
    """

    def __init__(self, paths: Paths, snapshot: Snapshot):
        self._paths, self._snapshot = paths, snapshot

    @chosen_threads()
    def __call__(
        self,
        x: Float[Tensor, "n d"] | Float[Tensor, "S n d"],
        symbol: Symbol | None = None,
    ) -> Float[Tensor, "S n q"]:
        """The paths, or a symbol of them, at n points."""
        points, snapshot = torch.as_tensor(x), self._snapshot
        dtype = points.dtype if points.is_floating_point() else torch.float64
        device = points.device
        own = points.dim() == 3
        if own and len(points) != len(self):
            raise ValueError(
                f"expected points (n, d), or (S, n, d) for each of {len(self)} paths, got shape "
                f"{tuple(points.shape)}"
            )
        if not points.numel():
            return self._of_none(symbol, points.to(dtype))
        shape = points.shape[:2] if own else points.shape[:1]
        flat = as_points(points.flatten(0, 1) if own else points, snapshot.num_inputs)
        flat = flat.to(snapshot.device)
        paths, support = self._paths, flat
        if symbol is not None:
            snapshot.check_symbol(symbol)
            paths = paths.apply(symbol, snapshot.space)
            support = symbol.all_points(flat, snapshot.space)
        snapshot.require(support.detach())
        mean = snapshot.mean(flat, symbol).unflatten(0, shape)
        return (paths(flat.unflatten(0, shape)) + mean).to(device, dtype)

    def _of_none(self, symbol: Symbol | None, like: Tensor) -> Float[Tensor, "S 0 q"]:
        """At no points: what there is at one, without it."""
        return self(self._snapshot.somewhere, symbol)[:, :0].to(like)

    def __len__(self) -> int:
        return len(self._paths)


@dataclass(frozen=True)
class Summary:
    """What samples say of a quantity: its mean, standard deviation and 95 % interval."""

    mean: Tensor
    sd: Tensor
    low: Tensor
    high: Tensor

    @classmethod
    def of(cls, samples: Float[Tensor, "S *any"]) -> "Summary":
        low, high = samples.quantile(torch.tensor([0.025, 0.975]).to(samples), dim=0)
        return cls(samples.mean(0), samples.std(0), low, high)
