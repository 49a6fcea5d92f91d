"""Frequencies that are never written out: radii and fast projections, drawn once."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from gp_orff.features.columns import Columns, TrigColumns
from gp_orff.features.frequencies.dot_product import DotProductDraw, DrawnHarmonics
from gp_orff.features.frequencies.rule import Draw
from gp_orff.features.phases import Phases, ProjectedPhases, Projection, SumOfPhases, as_range
from gp_orff.kernels.spectra.elliptical import Radial
from gp_orff.kernels.tree import Term, spectra_of


class StructuredDraw(Draw):
    """The frequencies r_k u_k / ℓ of one term: for each leaf radii r and unit vectors u.

    `dims` are the input columns of every leaf.
    """

    def __init__(
        self,
        projections: Sequence[Projection],
        bases: Sequence[Float[Tensor, "D c"]],
        dims: Sequence[tuple[int, ...]],
    ):
        super().__init__(bases, [0] * len(bases))
        self.dims = tuple(map(as_range, dims))
        self._sizes = [(type(p), p.num_inputs, p.num_vectors, tuple(p.arrays)) for p in projections]
        for index, projection in enumerate(projections):
            for name, array in projection.arrays.items():
                self.register_buffer(f"{name}_{index}", array)

    @property
    def projections(self) -> list[Projection]:
        """The unit vectors of each leaf."""
        return [
            cls(num_inputs, num_vectors, *(getattr(self, f"{name}_{index}") for name in names))
            for index, (cls, num_inputs, num_vectors, names) in enumerate(self._sizes)
        ]

    def columns(self, term: Term, num_inputs: int) -> tuple[Columns, Float[Tensor, "*b M 1"]]:
        spectra = spectra_of(term)
        parts = self._phases(spectra, self.dims, num_inputs)
        phi = TrigColumns(parts[0] if len(parts) == 1 else SumOfPhases(tuple(parts)))
        return phi, phi.of_frequencies(self.sample_weights(spectra).unsqueeze(-1))

    def nodes(self, spectra: Sequence[Radial]):
        """ω of each leaf, written out, and the weights."""
        parts = zip(spectra, self.dims, strict=True)
        written = [self._phases([s], [range(len(d))], len(d))[0].omega for s, d in parts]
        return written, self.sample_weights(spectra)

    def sample_weights(self, spectra: Sequence[Radial]) -> Float[Tensor, "D"]:
        return torch.full_like(self.bases[0][:, 0], 1 / self.num_frequencies)

    def _phases(
        self, spectra: Sequence[Radial], dims: Sequence[Sequence[int]], num_inputs: int
    ) -> list[Phases]:
        """⟨ω, x⟩ for the frequencies of each leaf."""
        parts = zip(spectra, self.projections, self.bases, dims, strict=True)
        return [
            ProjectedPhases(
                projection,
                spectrum.radii(base, 0).unsqueeze(-1),
                spectrum.inverse_lengthscale(len(columns)),
                columns,
                num_inputs,
            )
            for spectrum, projection, base, columns in parts
        ]


class StructuredDotProductDraw(DotProductDraw):
    """Columns of a dot-product kernel whose unit vectors are a fast projection."""

    def __init__(
        self,
        projection: Projection,
        harmonics: DrawnHarmonics,
        dims: Sequence[int],
    ):
        lengths = torch.ones_like(harmonics.expected_numbers).unsqueeze(-1)
        super().__init__(lengths, harmonics, dims)
        self.directions = StructuredDraw([projection], [lengths], [range(projection.num_inputs)])

    def unit_phases(self, num_lifted: int) -> Phases:
        lengths, (projection,) = self.bases[0], self.directions.projections
        scale = torch.ones_like(lengths[:1]).expand(1, num_lifted)
        return ProjectedPhases(projection, lengths, scale, range(num_lifted), num_lifted)
