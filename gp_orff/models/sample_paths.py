"""Functions drawn from a posterior or a prior. They are differentiable, at any points."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cached_property, partial, singledispatch

import numpy as np
import torch
from gpytorch.kernels import Kernel
from jaxtyping import Float
from torch import Tensor

from gp_orff.data.checks import in_column_units
from gp_orff.data.observations import less_reference, of_constants
from gp_orff.data.validation import as_points
from gp_orff.features.assemble import draw, expand, term_spectra, with_constants
from gp_orff.features.chunked import Box, as_box
from gp_orff.features.draws import Draw, Rule
from gp_orff.features.expansion import Expansion, apply_symbol
from gp_orff.features.grid import GRID_INPUTS, Grid
from gp_orff.features.random import LongTails, QuasiMonteCarlo
from gp_orff.inference.exact import ExactPosterior
from gp_orff.inference.posteriors import FieldDistribution, WeightPosterior
from gp_orff.kernels.base import check_positive_integer, is_transformed
from gp_orff.kernels.derivatives import decided
from gp_orff.kernels.tree import terms
from gp_orff.models.few_readings import Mixture
from gp_orff.models.frozen_model import FieldOnDomain, KernelOfField, Snapshot
from gp_orff.models.transforms import pointwise
from gp_orff.symbols.base import Identity, Symbol, required
from gp_orff.threads import chosen_threads

# From a posterior to functions that can be evaluated anywhere:
#
# 1. Features (`WeightPaths`): weights are drawn from their posterior once, and the function is a
#    combination of the columns. The truncated variance is white and has no continuous paths.
# 2. Exact kernel (`PathwisePaths`): a function is drawn from the prior by random features, and is
#    corrected by the data with the exact kernel (Matheron's rule). Random features of the posterior
#    itself would have too small a variance away from the data.
# 3. A trained constant mean is drawn from its posterior. The data determine the sum of mean and
#    field, so the field is changed by its response to the drawn mean (`less`).
# 4. A mixture over hyperparameters has paths of each member, in proportion to the weights.
#
# A mean that the user gave is added at the end, in `SamplePaths`.


_PRIOR_FREQUENCIES = 2048  # for paths of an exact model, and for a prior without a grid
_BY_FEATURES = "VectorFieldGP(kernel, frequencies=gp_orff.Grid.for_data(x, max_features=4000))"


class Paths(ABC):
    """S functions drawn from a field."""

    @abstractmethod
    def __call__(self, x: Float[Tensor, "n d"] | Float[Tensor, "S n d"]) -> Float[Tensor, "S n p"]:
        """Values at common points (n, d) of all paths, or at separate points (S, n, d)."""

    def apply(self, symbol: Symbol, space: Sequence[int]) -> "Paths":
        """Paths of a symbol of the field."""
        raise NotImplementedError(
            f"{type(symbol).__name__} of sample paths of an exact model is not available: expected "
            f"features, for example {_BY_FEATURES}; or differentiate the paths with torch"
        )

    def with_constants(
        self, extended: Callable[[Expansion], Expansion], normal: Callable[..., Tensor]
    ) -> "Paths":
        """These paths, with drawn weights for the constants of potentials.

        `extended` adds the features of the constants to an expansion. `normal` draws weights.
        """
        return self

    @abstractmethod
    def __len__(self) -> int:
        """S, the number of paths."""


@dataclass(frozen=True)
class WeightPaths(Paths):
    """f_s(x) = Φ(x) θ_s with drawn weights θ_s of the features."""

    expansion: Expansion
    theta: Float[Tensor, "F S"]
    symbol: Symbol = field(default_factory=Identity)
    space: Sequence[int] = ()

    def __call__(self, x: Tensor) -> Tensor:
        return less_reference(self._values, x, self.symbol, self.space)

    def _values(self, x: Tensor) -> Tensor:
        if x.dim() == 3:
            weights = self._flat.unflatten(-1, (-1, len(self))).movedim(-1, 0)
            return self.expansion.phi.apply(x, weights)
        values = self.expansion.phi.apply(x, self._flat)
        return values.unflatten(-1, (-1, len(self))).movedim(-1, 0)

    @cached_property
    def _flat(self) -> Float[Tensor, "2*D p*S"]:
        """The weights of the columns."""
        return self.expansion.column_weights(self.theta)

    def __len__(self) -> int:
        return self.theta.shape[-1]

    def less(self, weights: Float[Tensor, "k S"]) -> "WeightPaths":
        """Paths with their weights less these, which `FieldDistribution.response_to` returns."""
        return replace(self, theta=self.theta - weights)

    def with_constants(self, extended, normal):
        expansion = extended(self.expansion)
        further = normal(expansion.num_features - len(self.theta), len(self))
        return replace(self, expansion=expansion, theta=torch.cat([self.theta, further]))

    def apply(self, symbol: Symbol, space: Sequence[int]) -> "WeightPaths":
        image = apply_symbol(symbol, self.expansion, space)
        return WeightPaths(image, self.theta, symbol, space)


@dataclass(frozen=True)
class PathwisePaths(Paths):
    """Posterior paths by Matheron's rule: prior paths plus a correction by the data,

        f_s(x) = g_s(x) + K(x, X) (K + Σ)⁻¹ (y − H g_s(X) − ε_s)

    (Wilson et al. 2020, eq. 14). The prior path g_s is a sum of random features, and the correction
    is exact. Far from the data, the paths have the prior variance. Between dense observations,
    their variance comes from high frequencies that the observations do not resolve. Many
    frequencies are drawn there, with importance weights (`LongTails`).
    """

    distribution: ExactPosterior
    prior: WeightPaths
    alpha: Float[Tensor, "M S"]  # (K + Σ)⁻¹ (y − H g_s(X) − ε_s)

    def __call__(self, x: Tensor) -> Tensor:
        if x.dim() == 3:
            cross = self.distribution.cross(x.flatten(0, 1)).mT
            cross = cross.unflatten(0, (len(x), -1))  # (S, n·p, M)
            correction = (cross @ self.alpha.mT.unsqueeze(-1)).squeeze(-1)
            return self.prior(x) + correction.unflatten(1, (x.shape[1], -1))
        cross = self.distribution.cross(x).mT
        correction = (cross @ self.alpha).unflatten(0, (len(x), -1))  # (n, p, S)
        return self.prior(x) + correction.movedim(-1, 0)

    def less(self, weights: Tensor) -> "PathwisePaths":
        return replace(self, alpha=self.alpha - weights)

    def __len__(self) -> int:
        return len(self.prior)


@dataclass(frozen=True)
class PlusConstants(Paths):
    """Paths plus constant means, one for each path."""

    paths: Paths  # conditional on these means
    constants: Float[Tensor, "S p"]
    symbol: Symbol = field(default_factory=Identity)
    space: Sequence[int] = ()

    def __call__(self, x: Tensor) -> Tensor:
        points = x.flatten(0, -2).double()
        eye = torch.eye(self.constants.shape[-1]).to(points)
        images = of_constants(self.symbol, points, self.space, eye)
        images = images.unflatten(0, x.shape[:-1])  # (n, q, p), or (S, n, q, p)
        return self.paths(x) + (images @ self.constants[:, None, :, None]).squeeze(-1)

    def apply(self, symbol: Symbol, space: Sequence[int]) -> Paths:
        return replace(self, paths=self.paths.apply(symbol, space), symbol=symbol, space=space)

    def __len__(self) -> int:
        return len(self.paths)


@dataclass(frozen=True)
class JoinedPaths(Paths):
    """Paths of several distributions."""

    groups: Sequence[Paths]

    def __call__(self, x: Tensor) -> Tensor:
        sizes = [len(group) for group in self.groups]
        parts = x.split(sizes) if x.dim() == 3 else [x] * len(sizes)
        values = [group(part) for group, part in zip(self.groups, parts, strict=True)]
        return torch.cat(values)

    def __len__(self) -> int:
        return sum(map(len, self.groups))


def sample_paths(field: FieldOnDomain, snapshot: Snapshot, count: int, seed: int) -> Paths:
    """Draw `count` functions from a field of a snapshot."""
    distribution, _ = field.distribution.split()
    if distribution.members:
        return _mixed(distribution, field, snapshot, count, seed)
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(snapshot.device)

    paths = paths_of(distribution.given_mean, snapshot, count, seed, normal)
    root = distribution.constant_root
    change = root @ normal(root.shape[-1], count)
    paths = paths.less(distribution.given_mean.response_to(change))
    paths = paths.with_constants(partial(field.inference.with_constants, snapshot.kernel), normal)
    constants = (distribution.constant.unsqueeze(-1) + change).mT
    return PlusConstants(paths, constants) if distribution.includes_mean else paths


def _mixed(
    mixture: Mixture, field: FieldOnDomain, snapshot: Snapshot, count: int, seed: int
) -> Paths:
    """Paths of all members of a mixture, in proportion to their weights."""
    # Rounding the cumulative weights distributes exactly `count` paths.
    ends = np.round(np.cumsum([0.0, *(member.weight for member in mixture.members)]) * count)
    groups = []
    for number, member in enumerate(mixture.members):
        own = int(ends[number + 1] - ends[number])
        if own:
            alone = field._replace(distribution=member.distribution)
            part_seed = (seed * len(mixture.members) + number) % 2**63  # unique
            groups.append(sample_paths(alone, snapshot, own, part_seed))
    return JoinedPaths(groups)


@singledispatch
def paths_of(
    distribution: FieldDistribution,
    snapshot: Snapshot,
    count: int,
    seed: int,
    normal: Callable[..., Tensor],
) -> Paths:
    """Draw `count` functions given the constant mean. `normal` draws random numbers of a shape."""
    raise NotImplementedError(f"no sample paths for {type(distribution).__name__} available")


@paths_of.register
def _(distribution: WeightPosterior, snapshot, count, seed, normal) -> WeightPaths:
    theta = distribution.weight_root(normal(distribution.expansion.num_features, count))
    return WeightPaths(distribution.expansion, distribution.theta + theta)


@paths_of.register
def _(distribution: ExactPosterior, snapshot, count, seed, normal) -> PathwisePaths:
    if snapshot.is_part:
        raise NotImplementedError(
            "expected a part of a model with features, got a part of a model with the exact "
            "kernel, which has no sample paths; use " + _BY_FEATURES
        )
    rule: Rule = QuasiMonteCarlo(_PRIOR_FREQUENCIES, measure=LongTails(), seed=seed)
    if any(term.factor.decays for term in terms(distribution.kernel)):
        # The waves of a harmonic prior are chosen for a domain, here three times the extent of the
        # data. Paths are not valid outside it.
        box = snapshot.inference.data.box
        domain = tuple((2 * low - high, 2 * high - low) for low, high in box)
        rule = Grid(domain=domain, data=box, max_features=2 * _PRIOR_FREQUENCIES)
    draws = [
        term.to(distribution.alpha) for term in draw(distribution.kernel, rule, snapshot.num_inputs)
    ]
    expansion = expand(distribution.kernel, draws, snapshot.num_inputs).double()
    prior = WeightPaths(expansion, normal(expansion.num_features, count))
    rows = [
        part.rows(prior.apply(part.symbol, part.space)(part.points).movedim(0, -1).flatten(0, 1))
        for part in distribution.observed
    ]
    noise = distribution.noise_root @ normal(len(distribution.alpha), count)
    correction = torch.cholesky_solve(torch.cat(rows) + noise, distribution.factor)
    return PathwisePaths(distribution, prior, distribution.alpha - correction)


class SamplePaths:
    """S functions drawn from a `FieldPosterior` or a prior, including the mean.

    `FieldPosterior.sample_paths` and `gp_orff.sample_prior` return it. `paths(x)` evaluates the
    same S functions in every call, and gradients reach x.

    With features on a grid, the paths do not include the truncated variance, which has no
    continuous paths. With the exact kernel, the prior paths are sums of random features, and the
    standard deviation of the paths has an error of a few per cent. The error is larger for LCM
    kernels (sums of separable kernels) and spectral mixtures. A potential without a reference has a
    different constant in each path.

    Args:
        paths: draws of the field, without a mean that is not constant.
        snapshot: the model from which the paths are drawn.
        units: the units of the columns of the points, as for `FieldPosterior`.

    Example:
        >>> import gp_orff, torch
        >>> model = gp_orff.VectorFieldGP(gp_orff.HelmholtzKernel(num_dims=2))
        >>> field = model.condition(
        ...     torch.rand(20, 2), torch.randn(20, 2)
        ... ).posterior()
        >>> paths, x = field.sample_paths(5), torch.rand(7, 2)
        >>> particles = x.expand(5, 7, 2)  # each path moves 7 particles
        >>> particles = particles + 0.1 * paths(particles)
        >>> paths(x).shape, paths(particles).shape
        (torch.Size([5, 7, 2]), torch.Size([5, 7, 2]))
    """

    def __init__(self, paths: Paths, snapshot: Snapshot, units: Sequence[str | None] = ()):
        self._paths, self._snapshot, self._units = paths, snapshot, units

    @chosen_threads()
    def __call__(
        self,
        x: Float[Tensor, "n d"] | Float[Tensor, "S n d"],
        symbol: Symbol | None = None,
    ) -> Float[Tensor, "S n q"]:
        """Return the values (S, n, q) of the paths, or of a symbol of them.

        Args:
            x: points (n, d) for all paths, or (S, n, d) with separate points for each path.
            symbol: a linear map of the field with q outputs. The default is the field itself, with
                q = p.

        Raises:
            ValueError: x has another shape, points are outside the domain of the grid, or the
                symbol does not exist for the field.
            NotImplementedError: A symbol is given for a model with the exact kernel, or for a grid
                that sums the frequencies along a constant input.
        """
        if is_transformed():
            if x.dim() == 3:  # the n-th points of all paths are one point of S·d coordinates
                shape = len(x), x.shape[-1]
                at_points = x.movedim(1, 0).flatten(1)

                def values(at: Tensor) -> Tensor:
                    return self(at.unflatten(1, shape).movedim(0, 1), symbol).movedim(0, 1)

                return pointwise(values, at_points).movedim(1, 0)
            return pointwise(lambda at: self(at, symbol).movedim(0, 1), x).movedim(1, 0)
        points, snapshot = torch.as_tensor(in_column_units(x, self._units, "x")), self._snapshot
        dtype = points.dtype if points.is_floating_point() else torch.float64
        device = points.device
        per_path = points.dim() == 3
        if per_path and len(points) != len(self):
            raise ValueError(
                f"expected points (n, d), or (S, n, d) for each of {len(self)} paths, got shape "
                f"{tuple(points.shape)}"
            )
        if not points.numel():  # of the right shape, from the values at one point of the data
            return self(snapshot.data_point, symbol)[:, :0].to(points.to(dtype))
        shape = points.shape[:2] if per_path else points.shape[:1]
        flat = as_points(points.flatten(0, 1) if per_path else points, snapshot.num_inputs)
        flat = flat.to(snapshot.device)
        paths, support = self._paths, flat
        if symbol is not None:
            snapshot.check_symbol(symbol)
            support = symbol.all_points(flat, snapshot.space)
        snapshot.require(support.detach(), symbol)
        if symbol is not None:
            paths = paths.apply(decided(symbol, snapshot.kernel), snapshot.space)
        trend = snapshot.trend(flat, symbol).unflatten(0, shape)
        return (paths(flat.unflatten(0, shape)) + trend).to(device, dtype)

    def __len__(self) -> int:
        """S, the number of paths."""
        return len(self._paths)


@dataclass(frozen=True)
class Summary:
    """The mean, standard deviation and central interval of samples of a quantity.

    All attributes have the shape and the unit of one sample.

    Attributes:
        mean: the means over the samples.
        sd: the standard deviations.
        low: the lower limits of the intervals: the 2.5 % quantiles for the level 0.95.
        high: the upper limits of the intervals: the 97.5 % quantiles for the level 0.95.

    Example:
        >>> import torch
        >>> from gp_orff.models.sample_paths import Summary
        >>> summary = Summary.of(torch.randn(1000, 3))
        >>> summary.mean.shape, bool((summary.low < summary.high).all())
        (torch.Size([3]), True)
    """

    mean: Tensor
    sd: Tensor
    low: Tensor
    high: Tensor

    @classmethod
    def of(cls, samples: Float[Tensor, "S *any"], level: float = 0.95) -> "Summary":
        """Return the summary of S samples.

        Args:
            samples: the samples (S, ...), along the first axis.
            level: the probability of the interval.
        """
        ends = 0.5 - 0.5 * level, 0.5 + 0.5 * level
        low, high = samples.quantile(torch.tensor(ends).to(samples), dim=0)
        return cls(samples.mean(0), samples.std(0), low, high)


# Functions drawn from the prior of a kernel.


_TOLERANCE = 1e-4  # largest truncated variance over the variance: 4000 paths would not show it
_MOST = 2**13  # features of a grid


@dataclass(frozen=True)
class Prior(KernelOfField):
    """A field without data, with drawn frequencies. It is the snapshot of `sample_prior`."""

    kernel: Kernel
    num_inputs: int
    draws: Sequence[Draw]
    domain: Box | None  # None: any points

    @property
    def data_point(self) -> Float[Tensor, "1 d"]:
        """A point of the domain."""
        box = self.domain or ((0.0, 1.0),) * self.num_inputs
        middle = [0.5 * (low + high) for low, high in box]
        return torch.tensor([middle], dtype=torch.float64, device=self.device)

    def require(self, points: Float[Tensor, "n d"], symbol: Symbol | None) -> None:
        """Raise a ValueError for points outside the domain of the frequencies."""
        if self.domain is not None:
            self.draws[0].shared.check(points)

    def trend(self, points: Float[Tensor, "n d"], symbol: Symbol | None) -> Float[Tensor, "n 1"]:
        """The prior mean, which is zero."""
        return torch.zeros_like(points[:, :1])


def sample_prior(
    kernel: Kernel, num_paths: int, *, seed: int = 0, domain: Box | None = None
) -> SamplePaths:
    """Draw functions from a zero-mean Gaussian process with a given kernel.

    A function is the sum g(x) = Σ_f θ_f φ_f(x) m_f over features f. Here θ ~ N(0, I) are weights,
    φ_f(x) is a sine or cosine, and m_f is a direction (p,). With a `domain`, the features are those
    of a frequency grid if the kernel has one. They omit at most about 10⁻⁴ of the variance.
    Otherwise 2048 quasi-random frequencies are used. Their covariance has an error of a few per
    cent, which is the same for all functions.

    Args:
        kernel: a gpytorch kernel that `ORFFKernel` accepts, with its present hyperparameters.
        num_paths: the number S of functions.
        seed: the seed of the random numbers.
        domain: (low, high) of each input, for the points where the functions are needed. Without a
            domain, quasi-random frequencies are used, and the functions are defined everywhere. The
            kernel must then determine its number of inputs.

    Returns:
        A `SamplePaths`. If `paths` is the result, `paths(x)` has the values (S, n, p) at points
        x (n, d). All calls evaluate the same functions. `paths(x, symbol)` returns their
        derivatives, potentials and parts.

    Raises:
        TypeError: `kernel` is not a kernel.
        ValueError: `num_paths` is less than 1, the number of inputs is unknown, or the kernel needs
            a domain.

    Example:
        >>> import gp_orff, torch
        >>> kernel = gp_orff.HelmholtzKernel(num_dims=2)
        >>> flows = gp_orff.sample_prior(kernel, 3, seed=1, domain=((0, 5), (0, 5)))
        >>> x = 5 * torch.rand(7, 2)
        >>> flows(x).shape, flows(x, gp_orff.Curl()).shape
        (torch.Size([3, 7, 2]), torch.Size([3, 7, 1]))
    """
    check_positive_integer(num_paths, "num_paths", "sample_prior")
    required(
        kernel,
        Kernel,
        "sample_prior expects an instance of a gpytorch kernel",
        "give model.kernel if you have a model",
    )
    with torch.no_grad():
        kernel = deepcopy(kernel).double().requires_grad_(False)
        box = None if domain is None else as_box(domain, "domain", "sample_prior")
        num_inputs = _num_inputs(kernel, box)
        draws, box = _drawn(kernel, num_inputs, box, seed)
        expansion = with_constants(expand(kernel, draws, num_inputs).double(), terms(kernel), draws)
        generator = torch.Generator().manual_seed(seed)
        theta = torch.randn(
            expansion.num_features, num_paths, generator=generator, dtype=torch.float64
        )
        prior = Prior(kernel, num_inputs, draws, box)
        return SamplePaths(WeightPaths(expansion, theta.to(prior.device)), prior)


def _drawn(
    kernel: Kernel, num_inputs: int, box: Box | None, seed: int
) -> tuple[list[Draw], Box | None]:
    """Frequencies, and the domain in which they are valid."""
    rule: Rule = QuasiMonteCarlo(_PRIOR_FREQUENCIES, measure=LongTails(), seed=seed)
    decays = any(term.factor.decays for term in terms(kernel))
    if decays and box is None:
        raise ValueError(
            "expected domain= for a kernel whose waves decay with height, got None; give "
            "(low, high) of each input"
        )
    if box is not None and num_inputs <= GRID_INPUTS:
        own = {"tolerance": _TOLERANCE, "lengthscale_range": (1.0, 1.0), "max_features": _MOST}
        try:
            draws = draw(kernel, Grid(domain=box, **own), num_inputs)
            if decays or draws[0].shared.tolerance.item() <= 10 * _TOLERANCE:
                return draws, box
        except (ValueError, NotImplementedError):
            if decays:
                raise
    return draw(kernel, rule, num_inputs), None


def _num_inputs(kernel: Kernel, box: Box | None) -> int:
    """The number of inputs: that of the domain, or else that of the kernel."""
    spectra = term_spectra(kernel, None if box is None else len(box))
    least = max(1 + max(leaf.dims) for spectrum in spectra for leaf in spectrum.leaves)
    if box is not None and len(box) < least:
        raise ValueError(
            f"expected domain= with (low, high) of each input of the kernel, {least} inputs, or "
            f"more, got {len(box)}"
        )
    return least if box is None else len(box)
