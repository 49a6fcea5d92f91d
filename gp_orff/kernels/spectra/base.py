"""Spectral densities of gpytorch's stationary scalar kernels.

Bochner's theorem writes a stationary kernel as the Fourier transform of a probability law,

    k(x, z) = E cos⟨ω, x − z⟩ .

A random ω is made in two steps. *Base variables* are drawn once and hold no hyperparameters; the
live hyperparameters turn them into frequencies afterwards, so that gradients reach every one of
them. `spectrum(kernel)` gives the law of one kernel.
"""

from abc import ABC, abstractmethod
from functools import singledispatch
from typing import NamedTuple

import numpy as np
import torch
from gpytorch.kernels import Kernel
from jaxtyping import Float
from torch import Tensor


class Range(NamedTuple):
    """A hyperparameter and the values that are sought."""

    value: Tensor  # live
    low: float | Float[Tensor, "..."]
    high: float | Float[Tensor, "..."]
    stretch: float = 1.0  # how many times faster than frequencies it moves, in logarithms


class Spectrum(ABC):
    """The law of the frequencies of a scalar kernel with k(0) = 1.

    Subclass it, or `GridSpectrum`, for a law of your own: the abstract members suffice.

    In base units (unit lengthscales) ω is z. A *tilt* t stands for the law with density
    proportional to ‖z‖^{2t} p(z). Fields that are derivatives of a potential have their variance
    at higher frequencies; t = 1 is the law of that variance for curl- and divergence-free kernels.
    """

    @abstractmethod
    def num_coordinates(self, num_dims: int) -> int:
        """How many uniform coordinates `base` needs beside a direction."""

    @abstractmethod
    def base(self, directions: np.ndarray, u: np.ndarray, order: int) -> np.ndarray:
        """Base variables (D, c) of the tilted law from unit vectors (D, d) and u in (0, 1)."""

    @abstractmethod
    def frequencies(self, base: Float[Tensor, "D c"], order: int) -> Float[Tensor, "*b D d"]:
        """ω at the kernel's present hyperparameters, differentiable in all of them."""

    @abstractmethod
    def importance(self, base: Float[Tensor, "D c"], order: int) -> Float[Tensor, "*b D"]:
        """The density of the law over that of the tilted one: E‖z‖^{2t} / ‖z‖^{2t}."""

    @abstractmethod
    def log_density(self, omega: Float[Tensor, "*b m d"]) -> Float[Tensor, "*b m"]:
        """log S(ω) with ∫ S(ω) dω = k(0) = 1."""

    @abstractmethod
    def moment(self, order: int, num_dims: int) -> float:
        """E ‖z‖^{2·tilt}; infinite where the kernel is not smooth enough."""

    @property
    def isotropic_lengthscale(self) -> Float[Tensor, "*b 1 d"] | None:
        """ℓ where the law of ℓω has no directions of its own; None where no such ℓ is known."""
        return None

    def frequency_parameters(
        self, shortest: Float[np.ndarray, "k"], longest: Float[np.ndarray, "k"]
    ) -> list[Range]:
        """What moves the frequencies, for data with these distances along its k inputs."""
        lengthscale = self.isotropic_lengthscale
        if lengthscale is None:
            return []
        if lengthscale.shape[-1] == 1:
            return [Range(lengthscale, float(shortest.min()), float(longest.max()))]
        low, high = (torch.from_numpy(own).to(lengthscale) for own in (shortest, longest))
        return [Range(lengthscale, low, high)]


class GridSpectrum(Spectrum):
    """What a frequency grid asks of a law besides: where it ends, and where its kernel ends."""

    @abstractmethod
    def scaled_radius(self, omega: Float[np.ndarray, "D d"]) -> Float[np.ndarray, "D"]:
        """A norm of ω, even in every coordinate; grids end at one of its level sets.

        Over a batch of kernels, the smallest.
        """

    @abstractmethod
    def tail(self, scaled_radius: float, order: int, num_dims: int) -> float:
        """The share of the tilted law beyond a reach."""

    @abstractmethod
    def correlation(self, lag: float, axis: int, order: int) -> float:
        """A bound of |K(r)| / |K(0)| for the kernel of the tilted law, r ≥ lag along one axis."""

    @abstractmethod
    def second_moments(self, num_dims: int) -> Float[Tensor, "*b d"]:
        """E ω_i², coordinates being uncorrelated."""

    def other_lengths(self, num_dims: int) -> Float[np.ndarray, "m"]:
        """Lengths that a grid must serve beside those of the reach; none for most laws."""
        return np.zeros(0)


@singledispatch
def spectrum(kernel: Kernel) -> Spectrum:
    """The spectral law of a stationary scalar kernel, at its present hyperparameters.

    Known: `RBFKernel`, `MaternKernel`, `GeneralMaternKernel` (any ν > 0), `RQKernel` (α is trained
    too) and `SpectralMixtureKernel`, with one lengthscale or ARD.

    Raises:
        NotImplementedError: for every other kernel. Register a `Spectrum` for your own, and the
            whole package knows it.

    Example:
        >>> import gpytorch, gp_orff
        >>> law = gp_orff.spectrum(gpytorch.kernels.MaternKernel(nu=2.5))
        >>> round(law.moment(order=1, num_dims=2), 6)          # E‖z‖² = d ν/(ν − 1)
        3.333333

        A kernel of your own, here a Matérn 5/2 kernel by another name:

        >>> class MyKernel(gpytorch.kernels.Kernel):
        ...     has_lengthscale = True
        >>> @gp_orff.spectrum.register
        ... def _(kernel: MyKernel):
        ...     return gp_orff.spectra.StudentT(kernel.lengthscale, nu=2.5)
        >>> gp_orff.ORFFKernel(MyKernel(ard_num_dims=3), gp_orff.MonteCarlo(64)).num_features
        128
    """
    known = ", ".join(sorted(cls.__name__ for cls in spectrum.registry if cls is not object))
    raise NotImplementedError(
        f"no spectral density is known for {type(kernel).__name__}; known are {known}. "
        "Register yours with @gp_orff.spectrum.register (see its docstring)."
    )
