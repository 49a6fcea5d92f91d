"""Gauss–Hermite quadrature of Gaussian spectra."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from gp_orff.features.frequencies.rule import Draw, TermSpectrum
from gp_orff.kernels.spectra.elliptical import Gaussian

_ERROR = 1e-3  # the largest error of the kernel, relative to its variance, that is accepted


@dataclass(frozen=True)
class GaussHermite:
    r"""Gauss–Hermite quadrature of the spectral density of RBF kernels, with n^d nodes.

    For d inputs, E g(ω) ≈ Σ_k w_k g(z_k/ℓ). The nodes z_k lie on a tensor grid, n along each axis.
    The rule is exact for polynomials g up to degree 2n − 1 in each coordinate (Mutný & Krause 2018,
    quadrature Fourier features). The nodes z and −z have the same cosine and sine, up to sign, and
    are stored as one frequency. Frequencies follow the lengthscales in training.

    The approximation is valid up to a longest lag, where the error of the kernel reaches 1e-3 of
    its variance. For curl-free and divergence-free kernels the longest lag along each axis is 4
    lengthscales with n = 16, 7 with n = 32 and 15 with n = 100. Points that are farther apart raise
    an error. `Grid` has no such limit.

    Args:
        nodes_per_dim: n, from 2 to 200.

    Raises:
        ValueError: `nodes_per_dim` is not an integer from 2 to 200. When an `ORFFKernel` is built:
            there are more than 4 million nodes. When it is evaluated: points are too far apart.
        NotImplementedError: when an `ORFFKernel` is built, the kernel is not an RBF kernel.

    Example:
        >>> import gpytorch, gp_orff
        >>> kernel = gp_orff.CurlFreeKernel(gpytorch.kernels.RBFKernel(), num_dims=2)
        >>> gp_orff.ORFFKernel(kernel, gp_orff.GaussHermite(16)).num_features  # 16² / 2 pairs · 2
        256
    """

    nodes_per_dim: int

    def __post_init__(self):
        if isinstance(self.nodes_per_dim, bool) or int(self.nodes_per_dim) != self.nodes_per_dim:
            raise ValueError(
                f"GaussHermite expects an integer nodes_per_dim, got {self.nodes_per_dim!r}"
            )
        if not 2 <= self.nodes_per_dim <= 200:
            raise ValueError(
                f"GaussHermite expects 2 to 200 nodes_per_dim, got {self.nodes_per_dim}"
            )

    def draw(self, terms: Sequence[TermSpectrum]) -> list[Draw]:
        """The nodes and weights of each of `terms`."""
        return [
            HermiteDraw(self.nodes_per_dim, term) if term.leaves else Draw([], [])  # a constant
            for term in terms
        ]


class HermiteDraw(Draw):
    """The nodes of one term in base units, and their weights."""

    sampled = False

    def __init__(self, nodes_per_dim: int, term: TermSpectrum):
        for leaf in term.leaves:
            if not isinstance(leaf.spectrum, Gaussian):
                raise NotImplementedError(
                    "GaussHermite expects RBF kernels, got the spectrum "
                    f"{type(leaf.spectrum).__name__}; use gp_orff.Grid.for_data(x), or a random "
                    "rule, such as gp_orff.QuasiMonteCarlo"
                )
        sizes = [leaf.num_dims for leaf in term.leaves]
        if nodes_per_dim ** sum(sizes) > 2**22:
            raise ValueError(
                "GaussHermite expects at most 4 million nodes in all, got "
                f"{nodes_per_dim} along each of {sum(sizes)} inputs; use a smaller nodes_per_dim, "
                "or gp_orff.QuasiMonteCarlo"
            )
        nodes, weights = _half_space(nodes_per_dim, sum(sizes))
        if term.leaves[0].degree:  # B(0) = 0
            nonzero = nodes[:, : sizes[0]].any(-1)
            nodes, weights = nodes[nonzero], weights[nonzero]
        parts = np.split(nodes, np.cumsum(sizes)[:-1], axis=-1)
        super().__init__([torch.from_numpy(part) for part in parts], [0] * len(parts))
        self.nodes_per_dim = nodes_per_dim
        self.dims = tuple(leaf.dims for leaf in term.leaves)
        self.degrees = tuple(leaf.degree for leaf in term.leaves)
        self.register_buffer("weights", torch.from_numpy(weights))

    @property
    def num_frequencies(self) -> int:
        return len(self.weights)

    def nodes(self, spectra):
        omegas = [
            spectrum.frequencies(base, 0)
            for spectrum, base in zip(spectra, self.bases, strict=True)
        ]
        return omegas, self.weights

    def check_domain(self, spectra, *points: Float[Tensor, "*b n d"]) -> None:
        flat = [x.detach().reshape(-1, x.shape[-1]) for x in points]
        low = torch.stack([x.amin(0) for x in flat]).amin(0)
        high = torch.stack([x.amax(0) for x in flat]).amax(0)
        extent = (high - low).double().cpu().numpy()
        for spectrum, dims, degree in zip(spectra, self.dims, self.degrees, strict=True):
            lags = extent[list(dims)] / spectrum.scaled_radius(np.eye(len(dims)))
            longest = longest_lag(self.nodes_per_dim, degree)
            if (lags > longest).any():
                axis = int(lags.argmax())
                raise ValueError(
                    f"GaussHermite({self.nodes_per_dim}) expects lags up to {longest:.1f} "
                    f"lengthscales, got points {lags[axis]:.1f} lengthscales apart along column "
                    f"{dims[axis]}; use a larger nodes_per_dim, or gp_orff.Grid.for_data(x)"
                )


def _half_space(n: int, num_dims: int) -> tuple[Float[np.ndarray, "D d"], Float[np.ndarray, "D"]]:
    """The nodes of N(0, I) on a tensor grid, one of each pair ±z, and their weights."""
    roots, weights = np.polynomial.hermite_e.hermegauss(n)
    weights = weights / weights.sum()
    if n % 2:
        roots[n // 2] = 0.0
    index = np.stack(np.meshgrid(*[np.arange(n)] * num_dims, indexing="ij"), axis=-1)
    index = index.reshape(-1, num_dims) if num_dims else np.zeros((1, 0), dtype=int)
    nodes, product = roots[index], weights[index].prod(-1)
    opposite = np.zeros(len(index), dtype=int)  # the place of −z in the same order
    for column in index.T:
        opposite = opposite * n + (n - 1 - column)
    place = np.arange(len(index))
    half = place >= opposite
    return nodes[half], product[half] * np.where(place == opposite, 1.0, 2.0)[half]


@lru_cache
def longest_lag(n: int, degree: int) -> float:
    """The longest lag along an axis, in lengthscales, up to which the kernel is accurate."""
    roots, weights = np.polynomial.hermite_e.hermegauss(n)
    weights = weights / weights.sum()
    lags = np.linspace(0, 4 * np.sqrt(n), 4000)
    cosines = np.cos(np.outer(lags, roots))
    gauss = np.exp(-0.5 * lags**2)
    error = np.abs(cosines @ weights - gauss)
    if degree:
        along = np.abs(cosines @ (weights * roots**2) - (1 - lags**2) * gauss)
        error = np.maximum(error, along)
    above = np.nonzero(error > _ERROR)[0]
    return float(lags[above[0] - 1]) if len(above) and above[0] else float(lags[-1])
