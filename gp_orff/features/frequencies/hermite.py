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

_ERROR = 1e-3  # of the kernel, relative to its variance, at the edge of the domain


@dataclass(frozen=True)
class GaussHermite:
    r"""Quadrature of the RBF kernel's Gaussian spectrum, n^d nodes on a tensor grid.

    E g(ω) ≈ Σ_k w_k g(z_k/ℓ) with Hermite nodes z and weights w, exact for polynomials up to
    degree 2n − 1 in each coordinate (Mutný & Krause 2018, quadrature Fourier features). A node and
    its opposite are one frequency. Frequencies move with the lengthscales. For fields, 16 nodes
    resolve lags up to 4 lengthscales, 32 up to 7 and 100 up to 15 (kernel error 1e-3): beyond, the
    kernel would be silently wrong, so that points farther apart raise. `Grid` has no such limit.

    Args:
        nodes_per_dim: n, at least 2.

    Raises:
        ValueError: fewer than 2 nodes; when it is used, points too far apart.
        NotImplementedError: when a kernel is built on a spectrum that is not Gaussian.

    Example:
        >>> import gpytorch, gp_orff
        >>> kernel = gp_orff.CurlFreeKernel(gpytorch.kernels.RBFKernel(), num_dims=2)
        >>> gp_orff.ORFFKernel(kernel, gp_orff.GaussHermite(16)).num_features
        256
    """

    nodes_per_dim: int

    def __post_init__(self):
        if isinstance(self.nodes_per_dim, bool) or int(self.nodes_per_dim) != self.nodes_per_dim:
            raise ValueError(f"GaussHermite expects an integer, got {self.nodes_per_dim!r}")
        if not 2 <= self.nodes_per_dim <= 200:
            raise ValueError(
                f"GaussHermite expects 2 to 200 nodes_per_dim, got {self.nodes_per_dim}"
            )

    def draw(self, terms: Sequence[TermSpectrum]) -> list[Draw]:
        return [HermiteDraw(self.nodes_per_dim, spectrum) for spectrum in terms]


class HermiteDraw(Draw):
    """Nodes of one term in base units, and their weights."""

    sampled = False

    def __init__(self, nodes_per_dim: int, spectrum: TermSpectrum):
        for leaf in spectrum.leaves:
            if not isinstance(leaf.spectrum, Gaussian):
                raise NotImplementedError(
                    "GaussHermite expects RBF kernels, got the spectrum "
                    f"{type(leaf.spectrum).__name__}; use gp_orff.Grid.for_data(x)"
                )
        sizes = [leaf.num_dims for leaf in spectrum.leaves]
        if nodes_per_dim ** sum(sizes) > 2**22:
            raise ValueError(
                f"GaussHermite({nodes_per_dim}) on {sum(sizes)} inputs has more than 4 million "
                "nodes; use fewer, or gp_orff.QuasiMonteCarlo"
            )
        nodes, weights = _half_space(nodes_per_dim, sum(sizes))
        if spectrum.leaves and spectrum.leaves[0].degree:  # B(0) = 0
            kept = nodes[:, : sizes[0]].any(-1)
            nodes, weights = nodes[kept], weights[kept]
        parts = np.split(nodes, np.cumsum(sizes)[:-1], axis=-1) if sizes else []
        super().__init__([torch.from_numpy(part) for part in parts], [0] * len(parts))
        self.nodes_per_dim = nodes_per_dim
        self.dims = tuple(leaf.dims for leaf in spectrum.leaves)
        self.degrees = tuple(leaf.degree for leaf in spectrum.leaves)
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
            longest = _longest_lag(self.nodes_per_dim, degree)
            if (lags > longest).any():
                axis = int(lags.argmax())
                raise ValueError(
                    f"GaussHermite({self.nodes_per_dim}) is right up to lags of {longest:.1f} "
                    f"lengthscales, got points {lags[axis]:.1f} lengthscales apart along column "
                    f"{dims[axis]}; use more nodes_per_dim, or gp_orff.Grid.for_data(x)"
                )


def _half_space(n: int, num_dims: int) -> tuple[Float[np.ndarray, "D d"], Float[np.ndarray, "D"]]:
    """Tensor product of nodes of N(0, 1), one of each pair ±z, and weights."""
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
    own = np.arange(len(index))
    kept = own >= opposite
    return nodes[kept], product[kept] * np.where(own == opposite, 1.0, 2.0)[kept]


@lru_cache
def _longest_lag(n: int, degree: int) -> float:
    """The lag in lengthscales up to which the quadrature gives the kernel along an axis."""
    roots, weights = np.polynomial.hermite_e.hermegauss(n)
    weights = weights / weights.sum()
    lags = np.linspace(0, 4 * np.sqrt(n), 4000)
    cosines = np.cos(np.outer(lags, roots))
    gauss = np.exp(-0.5 * lags**2)
    error = np.abs(cosines @ weights - gauss)
    if degree:
        along = np.abs(cosines @ (weights * roots**2) - (1 - lags**2) * gauss)
        error = np.maximum(error, along)
    wrong = np.nonzero(error > _ERROR)[0]
    return float(lags[wrong[0] - 1]) if len(wrong) and wrong[0] else float(lags[-1])
