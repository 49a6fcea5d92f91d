"""Symbols of a field as methods."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from jaxtyping import Float
from torch import Tensor

from gp_orff.models.sample_paths import Summary
from gp_orff.symbols.base import Symbol
from gp_orff.symbols.derivatives import Curl, Divergence, Jacobian
from gp_orff.symbols.parts import Component, CurlFreePart, DivergenceFreePart
from gp_orff.symbols.potentials import Potential, StreamFunction, VectorPotential
from gp_orff.symbols.reduction import ReductionToPole


class NamedSymbols(ABC):
    """Methods for the symbols of a field, from its distribution under any of them."""

    space: tuple[int, ...]
    num_outputs: int

    @abstractmethod
    def __call__(
        self, x: Float[Tensor, "n d"], symbol: Symbol | None = None
    ) -> MultitaskMultivariateNormal | MultivariateNormal:
        """The joint distribution of the field, or of a symbol of it, at n points."""

    @abstractmethod
    def mean(
        self, x: Float[Tensor, "n d"], symbol: Symbol | None = None
    ) -> Float[Tensor, "n q"] | Float[Tensor, "n"]:
        """The mean of the field, or of a symbol of it."""

    @abstractmethod
    def pointwise_covariance(
        self, x: Float[Tensor, "n d"], symbol: Symbol | None = None
    ) -> Float[Tensor, "n q q"]:
        """The covariance of its components at each point."""

    def divergence(self, x: Float[Tensor, "n d"]) -> MultivariateNormal:
        """∇·f at points `x`, a distribution of (n,) values; see `Divergence`."""
        return self(x, Divergence())

    def curl(self, x: Float[Tensor, "n d"]) -> MultivariateNormal | MultitaskMultivariateNormal:
        """∇×f at points `x`: (n,) in two dimensions, (n, 3) in three; see `Curl`."""
        return self(x, Curl())

    def jacobian(self, x: Float[Tensor, "n d"]) -> MultivariateNormal | MultitaskMultivariateNormal:
        """∂_j f_i at points `x`: (n, p·d), row by row; see `Jacobian`."""
        space = len(self.space)
        return self(x, Jacobian(None if space == self.num_outputs else space))

    def potential(
        self,
        x: Float[Tensor, "n d"],
        reference: Float[Tensor, "d"] | None = None,
        *,
        background: bool | None = None,
    ) -> MultivariateNormal:
        """The potential g (n,) of the curl-free part ∇g, at points `x`; `reference` and
        `background` as in `Potential`: the point where g is zero, or None for zero mean over space
        a priori, and whether g includes that of the constant mean."""
        return self(x, Potential(reference, background))

    def stream_function(
        self,
        x: Float[Tensor, "n 2"],
        reference: Float[Tensor, "2"] | None = None,
        *,
        background: bool | None = None,
    ) -> MultivariateNormal:
        """ψ (n,) at points `x`, of the divergence-free part (∂₂ψ, −∂₁ψ); zero at `reference`; see
        `StreamFunction`."""
        return self(x, StreamFunction(reference, background))

    def vector_potential(
        self, x: Float[Tensor, "n 3"], *, background: bool | None = None
    ) -> MultitaskMultivariateNormal:
        """A (n, 3) at points `x`, of the divergence-free part ∇×A; see `VectorPotential`."""
        return self(x, VectorPotential(background))

    def curl_free_part(
        self, x: Float[Tensor, "n d"], *, background: bool = False
    ) -> MultitaskMultivariateNormal:
        """The part of f that is a gradient (n, d), at points `x`; see `CurlFreePart`."""
        return self(x, CurlFreePart(background))

    def divergence_free_part(
        self, x: Float[Tensor, "n d"], *, background: bool = False
    ) -> MultitaskMultivariateNormal:
        """The part of f without divergence (n, d), at points `x`; see `DivergenceFreePart`."""
        return self(x, DivergenceFreePart(background))

    def reduction_to_pole(
        self, x: Float[Tensor, "n 3"], magnetisation: Sequence[float] | Float[Tensor, "3"]
    ) -> MultivariateNormal:
        """The anomaly (n,) under a vertical main field, at points `x`, of a harmonic field whose
        sources are magnetised along `magnetisation` (3,); see `ReductionToPole`."""
        return self(x, ReductionToPole(magnetisation))

    def analytic_signal(
        self,
        x: Float[Tensor, "n d"],
        direction: Sequence[float] | Float[Tensor, "p"],
        *,
        num_draws: int = 256,
        seed: int = 0,
    ) -> Summary:
        """Estimate |∇T| of the component T = ⟨u, f⟩ at points `x`, by draws of its slopes: (n,).

        Of the anomaly T along the main field u it shows the edges of magnetic rocks, whatever their
        magnetisation (Nabighian 1972).

        Raises:
            ValueError: a direction that is not a vector of p numbers.
        """
        slopes = Jacobian(num_dims=len(self.space)) @ Component(direction)
        mean, covariance = self.mean(x, slopes), self.pointwise_covariance(x, slopes)
        values, vectors = torch.linalg.eigh(covariance)
        root = vectors * values.clamp_min(0).sqrt().unsqueeze(-2)
        generator = torch.Generator().manual_seed(seed)
        shape = num_draws, *mean.shape, 1
        draws = torch.randn(shape, generator=generator, dtype=mean.dtype).to(mean.device)
        return Summary.of((mean + (root @ draws).squeeze(-1)).norm(dim=-1))
