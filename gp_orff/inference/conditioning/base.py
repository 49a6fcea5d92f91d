"""Evidence and posterior of data under a kernel: what every kind of inference gives."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gpytorch.kernels import Kernel
from gpytorch.likelihoods import Likelihood
from jaxtyping import Float
from torch import Tensor

from gp_orff.data.dataset import Data
from gp_orff.data.noise.covariances import Noises, noises_of
from gp_orff.data.noise.groups import GroupNoise
from gp_orff.data.patterns import GroupKey
from gp_orff.features.expansion import Expansion
from gp_orff.inference.distributions import (
    FieldDistribution,
    PlusConstant,
    PlusWhite,
    UnknownMean,
    plus_white,
)
from gp_orff.inference.quadratic import Evidence
from gp_orff.symbols.base import Symbol


@dataclass(frozen=True)
class Posterior:
    """The posterior of a field, with its evidence."""

    distribution: FieldDistribution  # of the field without its mean
    evidence: Evidence
    noises: Mapping[GroupKey, GroupNoise]  # of every group, as used

    def under(self, mean: Float[Tensor, "p"] | None) -> FieldDistribution:
        """The distribution under a constant mean; without one, where the mean is not known and
        the posterior has that of largest evidence."""
        if mean is not None:
            return self.distribution
        smooth, delta = self.distribution.split()
        return plus_white(UnknownMean(smooth, self.evidence.mean_root()), delta)


class Residuals(NamedTuple):
    """Of observations of a group: y − H E[f], and H Cov[f] Hᵀ, which is also the covariance of the
    residual without its noise."""

    residual: Float[Tensor, "n v"]
    covariance: Float[Tensor, "n v v"]

    def take(self, rows: slice) -> "Residuals":
        """Those of some observations."""
        return Residuals(self.residual[rows], self.covariance[rows])


class Inference(ABC):
    """Data of a field; its mean is a constant that the caller chooses."""

    data: Data

    @abstractmethod
    def evidence(self, kernel: Kernel, noises: Noises) -> Evidence:
        """The evidence, differentiable in the hyperparameters."""

    @abstractmethod
    def posterior(
        self, kernel: Kernel, noises: Noises, mean: Float[Tensor, "p"] | None
    ) -> Posterior:
        """The posterior under a constant mean; if None, under that of largest evidence."""

    def residuals(self, posterior: Posterior) -> Mapping[GroupKey, Residuals] | None:
        """The residuals of every group of the data under their posterior, where they follow from
        the matrix that was factorised; None elsewhere."""
        return None

    def latent_of_sites(self, posterior: Posterior) -> Mapping[GroupKey, Residuals] | None:
        """Where the field changes within sites: y − E[ℓ] and Cov[ℓ] of every group, for the latent
        vector ℓ that the records of a site have in common; None elsewhere."""
        return None

    @abstractmethod
    def of(self, data: Data) -> "Inference":
        """The same inference with other data."""

    @abstractmethod
    def prepare(self) -> None:
        """Visit the data if one visit serves all hyperparameters; invalid data raise here."""

    def in_domain(self, kernel: Kernel, x: Float[Tensor, "n d"]) -> bool:
        """Whether predictions at x are accurate; raises where the rule cannot make them so."""
        return True

    def serves(self, symbol: Symbol | None) -> bool:
        """Whether the representation has an image under this symbol; None for the field itself."""
        return True

    def require(self, symbol: Symbol | None) -> None:
        """Raise a NotImplementedError if the representation does not serve the symbol."""
        if not self.serves(symbol):
            raise NotImplementedError(
                f"{type(symbol).__name__} needs the frequencies along every input, got a grid that "
                "sums over those along constant inputs; give a domain with an extent along them, "
                "such as Grid.for_data(x, domain=...), or Grid(..., sum_constant=False)"
            )

    @property
    def truncated_share(self) -> float:
        """The share of the variance that the representation may truncate."""
        return 0.0

    def left_out(
        self, symbol: Symbol, kernel: Kernel, space: Sequence[int]
    ) -> tuple[Float[Tensor, "q q"], Float[Tensor, "q q"]] | None:
        """The truncated variance of a symbol: white, and common to all points; None if none."""
        return None

    def with_constants(self, kernel: Kernel, expansion: Expansion) -> Expansion:
        """The features of a grid, and those of the constants of absolute potentials after them."""
        return expansion

    def apply(
        self,
        symbol: Symbol,
        distribution: FieldDistribution,
        kernel: Kernel,
        space: Sequence[int],
    ) -> FieldDistribution:
        """The distribution of a symbol of the field. White noise has no image under a symbol, which
        has a truncated variance of its own."""
        self.require(symbol)
        truncated = self.left_out(symbol, kernel, space)
        image = distribution.split()[0].apply(symbol, space)
        if truncated is None:
            return image
        delta, common = truncated
        return PlusWhite(PlusConstant(image, common) if common.any() else image, delta)

    def of_terms(
        self, kernel: Kernel, chosen: Sequence[int]
    ) -> tuple["Inference", Expansion | None]:
        """Inference on the frequencies of the `chosen` terms of a sum of kernels, and the features
        of the sum, in which the directions of all other terms are zero; None without features."""
        return self, None

    def stale(self, kernel: Kernel, noises: Noises) -> bool:
        """Whether the hyperparameters have left the range that this inference serves."""
        return False

    @property
    def note(self) -> str:
        """A sentence on the data, for the report; empty if there is nothing to say."""
        return ""

    @property
    def num_values(self) -> float:
        return self.data.num_values

    def log_density(
        self, evidence: Evidence, mean: Float[Tensor, "*b p"] | None, restricted: bool = False
    ) -> Float[Tensor, "*b"]:
        """log p(y) of all data from what a kernel gives for it; without a `mean`, under the
        constant mean of largest evidence, or, if `restricted`, with the constant mean integrated
        out."""
        if restricted and mean is None:
            density = evidence.restricted_log_density(self.num_values)
        else:
            density = evidence.log_density(mean, self.num_values)
        return density + self.data.elbo_correction


def log_marginal_likelihood(
    inference: Inference,
    kernel: Kernel,
    likelihoods: Mapping[str, Likelihood],
    mean: Float[Tensor, "p"] | None,
    restricted: bool = False,
) -> Float[Tensor, ""]:
    """log p(y) of all data; without a `mean`, under the constant mean of largest evidence, or, if
    `restricted`, with the constant mean integrated out."""
    evidence = inference.evidence(kernel, noises_of(kernel, likelihoods))
    return inference.log_density(evidence, mean, restricted)
