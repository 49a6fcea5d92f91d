"""The draw of a dot-product kernel: for each column a harmonic and a unit vector z."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

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

    The kernel is Σ_k λ_k C_k E_z[Q_k(x, z) Q_k(x′, z)]. If M_k columns with the harmonic k are
    expected, each has the variance λ_k C_k / M_k (Le et al. 2013, Corollary 4, where M_k is
    proportional to λ_k C_k, so that all columns have the variance Σ_k λ_k C_k / D).
    """

    def __init__(
        self,
        directions: Float[Tensor, "D c"],
        harmonics: "DrawnHarmonics",
        dims: Sequence[int],
    ):
        super().__init__([directions], [0])
        self.register_buffer("harmonics", harmonics.index)
        self.register_buffer("expected_numbers", harmonics.expected_numbers)
        self.dims, self.num_sphere_dims = tuple(dims), harmonics.num_dims

    @classmethod
    def of(
        cls,
        term: TermSpectrum,
        directions: Float[np.ndarray, "D c"],
        u: Float[np.ndarray, "D 1"],
        order: int,
    ) -> "DotProductDraw":
        """The draw from unit vectors and uniform coordinates, as `DrawnHarmonics` reads them."""
        (leaf,) = term.leaves
        drawn = DrawnHarmonics.of(leaf.spectrum, directions.shape[-1], order, u[:, 0])
        return cls(torch.from_numpy(directions[drawn.rank]), drawn, leaf.dims)

    @property
    def num_columns(self) -> int:
        return self.num_frequencies

    def columns(self, term: Term, num_inputs: int) -> tuple[Columns, Float[Tensor, "*b D 1"]]:
        (spectrum,) = spectra_of(term)
        every = spectrum.harmonics(self.num_sphere_dims)
        variances = (every.eigenvalues * every.counts)[..., self.harmonics] / self.expected_numbers
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

    def unit_phases(self, num_lifted: int) -> Phases:
        """⟨z, x̃⟩ of `num_lifted` lifted inputs x̃."""
        return LinearPhases(self.bases[0])

    def sample_weights(self, spectra: Sequence[DotProductSpectrum]) -> Float[Tensor, "*b D"]:
        """The variance that each column has on average over directions, for unit inputs."""
        eigenvalues = spectra[0].harmonics(self.num_sphere_dims).eigenvalues
        return eigenvalues[..., self.harmonics] / self.expected_numbers

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


@dataclass(frozen=True)
class DrawnHarmonics:
    """A harmonic for each of D columns, those of the highest order m first."""

    index: Int[Tensor, "D"]  # among `Harmonics`
    expected_numbers: Float[Tensor, "D"]  # M_k of columns with this harmonic
    rank: Int[np.ndarray, "D"]  # which of the uniform numbers each column is drawn from
    num_dims: int  # of the sphere

    @classmethod
    def of(
        cls, spectrum: DotProductSpectrum, num_dims: int, order: int, u: Float[np.ndarray, "D"]
    ) -> "DrawnHarmonics":
        """Harmonics with the probabilities p_k ∝ λ_k C_k^order, one for each uniform number u.

        Those of order m = 0 do not depend on z: they have one column each, if D is large enough.
        """
        every = spectrum.harmonics(num_dims)
        logs = (every.eigenvalues.log() + order * every.counts.log()).detach().cpu()
        constant = int((every.orders == 0).sum())  # they are the last
        constant = constant if constant < min(len(u), logs.shape[-1]) else 0
        number, kinds = len(u) - constant, logs.shape[-1] - constant
        share = logs[..., :kinds].softmax(-1).reshape(-1, kinds).mean(0)  # over the batch
        rank = u[:number].argsort()
        drawn = torch.from_numpy(share.cumsum(0)[:-1].numpy().searchsorted(u[rank]))
        return cls(
            torch.cat([drawn, torch.arange(kinds, kinds + constant)]),
            torch.cat([number * share[drawn], share.new_ones(constant)]),
            np.concatenate([rank, np.arange(number, len(u))]),
            num_dims,
        )
