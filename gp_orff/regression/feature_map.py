"""Kernel, rule and data → the features of a regression."""

import copy
import warnings
from dataclasses import dataclass, replace

import torch
from gpytorch.kernels import Kernel, RBFKernel
from jaxtyping import Bool, Float
from torch import Tensor

from gp_orff.exact_gp.orff_kernel import ORFFKernel
from gp_orff.features.assemble import check_domain, expand
from gp_orff.features.domain import Box, box_of, in_words, union
from gp_orff.features.expansion import Expansion
from gp_orff.features.frequencies.auto import Auto
from gp_orff.features.frequencies.lattice_nodes import GridWarning, Lattice, LatticeDraw
from gp_orff.features.frequencies.rule import Rule

_MOST_TRUNCATED = 0.1
_SAMPLE = 1000  # points, for the median of their distances


@dataclass(frozen=True)
class FeatureMap:
    """The features of a kernel on the points of a box, at fixed hyperparameters.

    Made by `FeatureMap.of`.
    """

    kernel: ORFFKernel  # in float64
    rule: Rule | None  # as requested
    box: Box  # of the points that it serves
    expansion: Expansion

    @classmethod
    @torch.no_grad()
    def of(cls, kernel: Kernel | None, rule: Rule | None, x: Float[Tensor, "N d"]) -> "FeatureMap":
        """The features for the points x.

        Without a kernel: an RBF kernel whose lengthscale is the median distance of the points. The
        kernel is copied. Without a rule: `Auto`, for the lengthscales that the kernel has.

        Raises:
            TypeError: not an instance of a kernel, or not a rule.
            ValueError: a kernel that does not fit the inputs; points outside the domain of a rule.
        """
        if isinstance(kernel, ORFFKernel):
            raise TypeError(
                "expected a kernel without frequencies, got an ORFFKernel; use its base_kernel, "
                "and its rule as frequencies="
            )
        kernel = median_kernel(x) if kernel is None else copy.deepcopy(kernel)
        if isinstance(kernel, Kernel):
            kernel = kernel.double().requires_grad_(False)
        features = cls._resolving(kernel, rule, box_of(x))
        features.check(x)
        if features.truncated > _MOST_TRUNCATED:
            warnings.warn(
                f"a frequency grid of {features.kernel.num_features} features lacks "
                f"{features.truncated:.0%} of the variance of the kernel on these points: use a "
                "longer lengthscale, points closer together, more features, as "
                "Auto(max_features=...), or a random rule",
                GridWarning,
                stacklevel=5,
            )
        return features

    @classmethod
    def _resolving(cls, kernel: Kernel, rule: Rule | None, box: Box) -> "FeatureMap":
        """The features for the points of a box."""
        orff = ORFFKernel(kernel, resolved(rule, box), num_dims=len(box))
        orff = orff.double().requires_grad_(False)
        return cls(orff, rule, box, expand(kernel, orff.frequencies, len(box)).double())

    @property
    def adaptive(self) -> bool:
        """Whether the rule takes its domain from the data."""
        return resolved(self.rule, self.box) is not self.rule

    @torch.no_grad()
    def check(self, x: Float[Tensor, "n d"]) -> None:
        """Check that the features represent the kernel at these points.

        Raises:
            ValueError: they are outside the domain of the rule.
        """
        ends = torch.tensor(self.box, dtype=torch.float64).mT
        check_domain(self.kernel.base_kernel, self.kernel.frequencies, ends, x)

    def covered(self, x: Float[Tensor, "n d"]) -> Bool[Tensor, "n"]:
        """Which of the points these features serve; `widened` ones serve the others.

        Raises:
            ValueError: some are outside the domain that the rule was given.
        """
        if self._lattice is None or not self.adaptive:
            self.check(x)
            return torch.ones(len(x), dtype=torch.bool)
        return ~self._lattice.outside(x)

    def box_with(self, x: Float[Tensor, "n d"]) -> Box:
        """The smallest box that contains the points served and these."""
        return union(self.box, box_of(x))

    @torch.no_grad()
    def widened(self, box: Box) -> "FeatureMap":
        """The features of the same kernel for a larger box.

        Raises:
            ValueError: no frequency grid serves it as well as the data.
        """
        kernel = self.kernel.base_kernel
        wider = FeatureMap._resolving(kernel, self.rule, box)
        if wider._lattice is None or wider.truncated > max(_MOST_TRUNCATED, 2 * self.truncated):
            raise ValueError(
                f"expected points near the data, which are in {in_words(self.box)}, got some in "
                f"{in_words(box)}: no frequency grid serves both; predict closer to the data, or "
                "use a random rule, such as gp_orff.QuasiMonteCarlo(1024)"
            )
        return wider

    @property
    def truncated(self) -> float:
        """The largest share of the variance of a term that a grid lacks."""
        if self._lattice is None:
            return 0.0
        return max(term.truncated for term in self.kernel.accuracy())

    @property
    def _lattice(self) -> Lattice | None:
        """The lattice of the frequencies; None if they are on none."""
        draw = self.kernel.frequencies[0]
        return draw.lattice if isinstance(draw, LatticeDraw) else None


def resolved(rule: Rule | None, box: Box) -> Rule:
    """The rule for data in a box; the same object where it needs no box."""
    rule = Auto(lengthscale_range=(1, 1)) if rule is None else rule
    if isinstance(rule, Auto) and rule.domain is None and rule.data is None:
        return replace(rule, data=box)
    return rule


def median_kernel(x: Float[Tensor, "N d"]) -> RBFKernel:
    """An RBF kernel whose lengthscale is the median distance of points at different places
    (Jaakkola's heuristic), in a random sample; 1 if all are at one place."""
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    distances = torch.pdist(x[order[:_SAMPLE]])
    distances = distances[distances > 0]
    kernel = RBFKernel().double()
    kernel.lengthscale = distances.median().item() if len(distances) else 1.0
    return kernel
