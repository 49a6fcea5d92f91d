"""The protocol of frequency rules: a rule turns spectra of terms into frequencies."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from gpytorch.kernels import Kernel
from jaxtyping import Float
from torch import Tensor, nn

from gp_orff.features.columns import Columns, TrigColumns
from gp_orff.kernels.factors import Sampler, embedded
from gp_orff.kernels.matrix_valued.variance_spectrum import VarianceSpectrum
from gp_orff.kernels.spectra.base import Spectrum
from gp_orff.kernels.tree import Term, spectra_of


@dataclass(frozen=True)
class LeafSpectrum:
    """The spectrum of one scalar kernel of a term, its inputs and its degree in B(ω)."""

    spectrum: Spectrum
    dims: tuple[int, ...]  # the input columns of the kernel
    degree: int  # ‖B(ω)‖² grows like ‖ω‖^{2·degree}, unless B is a general function
    variance: VarianceSpectrum | None = None  # for a general B

    @property
    def num_dims(self) -> int:
        return len(self.dims)

    @property
    def is_constant(self) -> bool:
        """Whether B does not depend on the frequency."""
        return self.degree == 0 and self.variance is None

    @property
    def sampler(self) -> Sampler | None:
        """What draws frequencies from a density of its own, for a general B that has one."""
        return None if self.variance is None else self.variance.factor.sampler

    def tail(self, scaled_radius: float) -> float:
        """The share of the variance beyond a scaled radius."""
        if self.variance is not None:
            return self.variance.tail(scaled_radius)
        return self.spectrum.tail(scaled_radius, self.degree, self.num_dims)

    def correlation(self, lag: float, axis: int) -> float:
        """A bound of the correlation at all lags from `lag` on, along an axis."""
        if self.variance is not None:
            return self.variance.correlation(lag, axis)
        return self.spectrum.correlation(lag, axis, self.degree)


@dataclass(frozen=True)
class TermSpectrum:
    """The spectrum of one term of a kernel tree; its leaves have independent frequencies."""

    leaves: tuple[LeafSpectrum, ...]
    rank: int = 1  # features for each trigonometric column: the columns of B(ω)
    group: Kernel | None = None  # terms of one group share random frequencies
    share: float = 1.0  # of the variance of the sum of all terms

    def own(self, tolerance: float, most: float) -> float:
        """The share of its own variance that truncates `tolerance` of that of the sum."""
        return min(tolerance / self.share, most) if self.share > 0 else most


class Draw(nn.Module):
    """The frequencies of one term, drawn once as base variables free of hyperparameters.

    Terms with the same `mixture` are drawn from one mixture of their densities: each gives some of
    the frequencies, and uses all of them.
    """

    sampled = True  # whether they are a random sample, whose halves can be compared

    def __init__(
        self,
        bases: Sequence[Float[Tensor, "D c"]],
        orders: Sequence[int],
        mixture: int | None = None,  # None: the term is drawn by itself
    ):
        super().__init__()
        self.orders, self.mixture = tuple(orders), mixture
        for index, base in enumerate(bases):
            self.register_buffer(f"base_{index}", base)

    @property
    def bases(self) -> list[Float[Tensor, "D c"]]:
        """The base variables of each leaf."""
        return [getattr(self, f"base_{index}") for index in range(len(self.orders))]

    @property
    def num_frequencies(self) -> int:
        return self.bases[0].shape[0] if self.orders else 1

    @property
    def num_columns(self) -> int:
        """The number of columns that `columns` gives."""
        return 2 * self.num_frequencies

    def columns(self, term: Term, num_inputs: int) -> tuple[Columns, Float[Tensor, "*b M 1"]]:
        """The columns φ(x) of a term's scalar kernel, and the variance v_c of each.

        k(x, z) ≈ Σ_c v_c φ_c(x) φ_c(z), differentiable in the hyperparameters.
        """
        omegas, weights = self.nodes(spectra_of(term))
        phi = TrigColumns.of(sum_of_leaves(omegas, term, num_inputs), self.sampled)
        return phi, phi.of_frequencies(weights.unsqueeze(-1))

    def nodes(
        self, spectra: Sequence[Spectrum]
    ) -> tuple[list[Float[Tensor, "*b D d"]], Float[Tensor, "*b D"]]:
        """ω of each leaf, and the weights w with E[g(ω₁, …)] ≈ Σ_k w_k g(ω_1k, …).

        They follow the hyperparameters of the spectra, differentiably.
        """
        parts = zip(spectra, self.bases, self.orders, strict=True)
        omegas = [spectrum.frequencies(base, order) for spectrum, base, order in parts]
        return omegas, self.sample_weights(spectra)

    def sample_weights(self, spectra: Sequence[Spectrum]) -> Float[Tensor, "*b D"]:
        """The weights w of a random sample."""
        weights = torch.full_like(self.bases[0][:, 0], 1 / self.num_frequencies)
        for spectrum, base, order in zip(spectra, self.bases, self.orders, strict=True):
            weights = weights * spectrum.importance(base, order)
        return weights

    def shared_columns(self) -> Columns | None:
        """The columns that all terms of the tree share; None if each has its own."""
        return None

    def ratio_outside_range(self, spectra: Sequence[Spectrum]) -> float | None:
        """The ratio of a lengthscale to its value at the draw, if these frequencies are no longer
        valid for it; None if they are valid."""
        return None

    def check_domain(self, spectra: Sequence[Spectrum], *points: Float[Tensor, "*b n d"]) -> None:
        """Raise a ValueError at points where these frequencies do not represent the kernel."""

    def extra_repr(self) -> str:
        return f"num_frequencies={self.num_frequencies}"


def sum_of_leaves(
    omegas: Sequence[Float[Tensor, "*b D k"]], term: Term, num_inputs: int
) -> Float[Tensor, "*b D d"]:
    """The frequencies of a product of kernels, from those of its leaves."""
    return sum(
        embedded(omega, leaf.active_dims, num_inputs)
        for omega, leaf in zip(omegas, term.leaves, strict=True)
    )


def uniform(number: int, num_coordinates: int, rng: np.random.Generator) -> np.ndarray:
    """Independent uniform numbers (number, num_coordinates), neither 0 nor 1."""
    return np.clip(rng.random((number, num_coordinates)), 2.0**-54, 1 - 2.0**-53)


def check_seed(seed: int, owner: str) -> None:
    """Check a seed.

    Raises:
        ValueError: no non-negative integer.
    """
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or seed < 0:
        raise ValueError(f"{owner} expects seed to be a non-negative integer, got {seed!r}")


class Rule(Protocol):
    """A frequency rule: an immutable value without tensors."""

    def draw(self, terms: Sequence[TermSpectrum]) -> list[Draw]:
        """The frequencies of every term of a kernel tree, in order."""
