"""The fields of Minh 2016, Example 2, with a Gaussian φ(x) = exp(−‖x‖²/σ²), and maps of them."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from gpytorch.kernels import Kernel
from jaxtyping import Float
from torch import Tensor

import gp_orff
from gp_orff.features.zoo import longest_lag
from gp_orff.kernels.tree import Factor, Gradient, Solenoidal
from helpers.papers import pictures
from helpers.papers.kernels import KERNELS, gaussian

FACTORS = {"curl-free": Gradient, "divergence-free": Solenoidal}
STYLES = {  # colour and marker
    "unbounded": (pictures.ORANGE, "o"),
    "bounded": (pictures.RED, "v"),
    "trace": (pictures.PINK, "D"),
    "QuasiMonteCarlo": (pictures.GREEN, "^"),
    "Grid": (pictures.BLUE, "s"),
    "GaussHermite": (pictures.BLACK, "*"),
}
Map = tuple[Kernel, object]  # a kernel and a rule


@dataclass(frozen=True)
class Split:
    """The factor ψ(ω)ᵀ of the bounded maps of Minh 2016, Equations 40 and 42, in which half of the
    Gaussian is part of ψ.

    The root of ‖ω‖² I − ωωᵀ is the one of `Solenoidal`, with n − 1 columns. It gives the same
    kernel as the symmetric root of the paper.
    """

    factor: Factor
    sigma: float

    def __call__(self, omega: Float[Tensor, "D d"]) -> Float[Tensor, "D d r"]:
        half = torch.exp(-(self.sigma**2) * omega.square().sum(-1) / 16)
        return self.factor(omega) * 2 ** (omega.shape[-1] / 4) * half[:, None, None]


@dataclass(frozen=True)
class Field:
    """A kernel of Minh 2016 with its maps, on a cube.

    Args:
        name: a key of `FACTORS`.
        num_dims: n of the paper.
        sigma: σ; lengthscales are σ/√2.
        interval: the interval of every input.
    """

    name: str
    num_dims: int
    sigma: float
    interval: tuple[float, float]

    @property
    def lengthscale(self) -> float:
        return self.sigma / 2**0.5

    @property
    def kernel(self) -> Kernel:
        """The kernel of Equations 33 and 34."""
        kernel = KERNELS[self.name](self.num_dims)
        kernel.base_kernel.lengthscale = self.lengthscale
        return kernel

    @property
    def split(self) -> Kernel:
        """The kernel as an integral over the density ρ = N(0, 4/σ² I) of Equation 39."""
        density = gaussian(self.num_dims)
        density.lengthscale = self.sigma / 2
        psi = Split(FACTORS[self.name](self.num_dims), self.sigma)
        shape = {"num_outputs": self.num_dims, "num_dims": self.num_dims}
        return gp_orff.SpectralMatrixKernel(density, psi, **shape)

    def random(self, number: int, seed: int) -> Iterator[tuple[str, Map]]:
        """Yield maps with D random frequencies. The first two are those of the paper."""
        rule = gp_orff.MonteCarlo
        yield "unbounded", (self.kernel, rule(number, measure="base", seed=seed))
        yield "bounded", (self.split, rule(number, seed=seed))
        yield "trace", (self.kernel, rule(number, seed=seed))
        yield "QuasiMonteCarlo", (self.kernel, gp_orff.QuasiMonteCarlo(number, seed=seed))

    def grid(self, number: int) -> Map:
        """Return a grid with at most as many features as D random frequencies have."""
        columns = gp_orff.ORFFKernel(self.kernel, gp_orff.MonteCarlo(1)).num_features
        grid = gp_orff.Grid(
            (self.interval,) * self.num_dims,
            lengthscale_range=(1, 1),
            tolerance=1e-8,
            max_features=columns * number,
            diagonal_correction=False,
        )
        return self.kernel, grid

    def hermite(self) -> Map:
        """Return the Gauss–Hermite rule with the smallest number of nodes that is valid on the
        cube."""
        lag = (self.interval[1] - self.interval[0]) / self.lengthscale
        nodes = next(n for n in range(2, 200) if longest_lag(n, 1) >= lag)
        return self.kernel, gp_orff.GaussHermite(nodes)
