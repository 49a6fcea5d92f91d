"""The draw of a dot-product kernel: for each column a harmonic and a unit vector z."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from gp_orff.features.columns import Columns, DotProductColumns
from gp_orff.features.frequencies.rule import Draw, LeafSpectrum, TermSpectrum
from gp_orff.features.phases import LinearPhases, Phases
from gp_orff.kernels.dot_product import DotProductSpectrum
from gp_orff.kernels.tree import Term, spectra_of


class DotProductDraw(Draw):
    """D columns of one term, each with a harmonic (n, m) and a unit vector of the lifted inputs.

    The kernel is Σ_k λ_k C_k E_z[Q_k(x, z) Q_k(x′, z)]. A harmonic of probability p_k therefore has
    columns of variance λ_k C_k / (D p_k) (Le et al. 2013, Corollary 4, where p_k ∝ λ_k C_k).
    """

    def __init__(
        self,
        directions: Float[Tensor, "D c"],
        harmonics: Int[Tensor, "D"],
        probabilities: Float[Tensor, "D"],
        dims: Sequence[int],
        num_sphere_dims: int,
    ):
        super().__init__([directions], [0])
        self.register_buffer("harmonics", harmonics)
        self.register_buffer("probabilities", probabilities)
        self.dims, self.num_sphere_dims = tuple(dims), num_sphere_dims

    @classmethod
    def of(
        cls,
        term: TermSpectrum,
        directions: Float[np.ndarray, "D c"],
        u: Float[np.ndarray, "D 1"],
        order: int,
    ) -> "DotProductDraw":
        """The draw from unit vectors and uniform coordinates, as `draw_harmonics` reads them."""
        (leaf,), rank = term.leaves, u[:, 0].argsort()
        num_dims = directions.shape[-1]
        drawn = draw_harmonics(leaf.spectrum, num_dims, order, u[rank, 0])
        return cls(torch.from_numpy(directions[rank]), *drawn, leaf.dims, num_dims)

    @property
    def num_columns(self) -> int:
        return self.num_frequencies

    def columns(self, term: Term, num_inputs: int) -> tuple[Columns, Float[Tensor, "*b D 1"]]:
        (spectrum,) = spectra_of(term)
        every = spectrum.harmonics(self.num_sphere_dims)
        variances = (every.eigenvalues * every.counts)[..., self.harmonics] / self._expected_number
        phi = DotProductColumns(
            self.unit_phases(spectrum.num_lifted(len(self.dims))),
            every.polynomials,
            every.degrees[self.harmonics],
            every.orders[self.harmonics],
            self.dims,
            spectrum.scale,
            spectrum.offset,
        )
        return phi, variances.unsqueeze(-1)

    @property
    def _expected_number(self) -> Float[Tensor, "D"]:
        """D p_k of the harmonic of each column."""
        return self.num_frequencies * self.probabilities

    def unit_phases(self, num_lifted: int) -> Phases:
        """⟨z, x̃⟩ of `num_lifted` lifted inputs x̃."""
        return LinearPhases(self.bases[0])

    def sample_weights(self, spectra: Sequence[DotProductSpectrum]) -> Float[Tensor, "*b D"]:
        """The variance that each column has on average over directions, for unit inputs."""
        eigenvalues = spectra[0].harmonics(self.num_sphere_dims).eigenvalues
        return eigenvalues[..., self.harmonics] / self._expected_number

    def nodes(self, spectra: Sequence[DotProductSpectrum]) -> tuple:
        """Raise: there are no frequencies.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(
            "expected a stationary kernel, whose features have frequencies, got a dot-product "
            "kernel, whose features are polynomials; use RBFKernel, MaternKernel or RQKernel"
        )


def lifted_leaf(term: TermSpectrum) -> LeafSpectrum | None:
    """The leaf of a term that is a dot-product kernel, on its lifted inputs; None if none is.

    Its degree is 1: the trace measure gives harmonics the probability ∝ λ_k C_k, for which columns
    are bounded, and the base measure ∝ λ_k.

    Raises:
        NotImplementedError: a product with another kernel, or a field kernel.
    """
    kinds = [isinstance(leaf.spectrum, DotProductSpectrum) for leaf in term.leaves]
    if not any(kinds):
        return None
    if len(kinds) > 1:
        raise NotImplementedError(
            "features of dot-product kernels expect a term without products, got a product of a "
            "LinearKernel, PolynomialKernel or DotProductKernel with another kernel; use a sum, a "
            "ScaleKernel, or a PolynomialKernel of a higher power"
        )
    (leaf,) = term.leaves
    if leaf.degree or leaf.variance is not None:
        raise NotImplementedError(
            "features of dot-product kernels expect scalar or separable kernels, such as "
            "MultitaskKernel, got a kernel whose spectral matrix depends on the frequency; use a "
            "stationary kernel inside it"
        )
    dims = tuple(range(leaf.spectrum.num_lifted(leaf.num_dims)))
    return replace(leaf, dims=dims, degree=1)


def draw_harmonics(
    spectrum: DotProductSpectrum, num_dims: int, order: int, u: Float[np.ndarray, "D"]
) -> tuple[Int[Tensor, "D"], Float[Tensor, "D"]]:
    """The harmonics of uniform numbers u, and their probabilities ∝ λ_k C_k^order.

    For ascending u the orders m descend, as `DotProductColumns` expects.
    """
    every = spectrum.harmonics(num_dims)
    logs = (every.eigenvalues.log() + order * every.counts.log()).detach().cpu()
    share = logs.softmax(-1).reshape(-1, logs.shape[-1]).mean(0)  # over the batch
    index = np.searchsorted(share.cumsum(0)[:-1].numpy(), u)
    harmonics = torch.from_numpy(index)
    return harmonics, share[harmonics]
