"""The draw of an RBF kernel's templates."""

import math
import warnings
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from gp_orff.features.columns import Columns, TemplateColumns
from gp_orff.features.frequencies.rule import Draw
from gp_orff.kernels.spectra.elliptical import Gaussian
from gp_orff.kernels.tree import Term, spectra_of


class TemplateDraw(Draw):
    """Templates z_k = w_k/√b of one RBF kernel, from standard normal w_k.

    `reach` is the distance from the center, in lengthscales, within which the standard error of
    k̃(x, x) stays below k(x, x).
    """

    def __init__(
        self,
        normal: Float[Tensor, "M k"],
        a: float,
        weighted: bool,
        center: Float[Tensor, "k"],
        dims: Sequence[int],
    ):
        super().__init__([normal], [0])
        self.a, self.weighted, self.dims = a, weighted, tuple(dims)
        self.register_buffer("center", center)
        self.reach = reach(a, len(self.dims), len(normal))

    @property
    def num_columns(self) -> int:
        return self.num_frequencies

    def columns(self, term: Term, num_inputs: int) -> tuple[Columns, Float[Tensor, "*b M 1"]]:
        (spectrum,), (normal,) = spectra_of(term), self.bases
        phi = TemplateColumns(
            normal.double() / math.sqrt(self.a**2 - 2 * self.a),
            spectrum.inverse_lengthscale(len(self.dims)),
            self.center.double(),
            self.a,
            self.a if self.weighted else 2.0,
            self.dims,
        )
        variance = (1 - 2 / self.a) ** (-0.5 * len(self.dims)) / self.num_frequencies
        return phi, normal.new_full((self.num_frequencies, 1), variance)

    def nodes(self, spectra: Sequence[Gaussian]) -> tuple:
        """Raise: there are no frequencies.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(
            "expected features with frequencies, got Templates, whose features are local; use "
            "another rule, such as gp_orff.QuasiMonteCarlo"
        )

    def sample_weights(self, spectra: Sequence[Gaussian]) -> Float[Tensor, "M"]:
        return torch.full_like(self.bases[0][:, 0], 1 / self.num_frequencies)

    def check_domain(self, spectra: Sequence[Gaussian], *points: Float[Tensor, "*b n d"]) -> None:
        """Warn if the middle of the points, or half of them, are out of reach.

        Two points may be the corners of a box, most of which is closer: only their middle counts.
        """
        every = torch.cat([x.detach().reshape(-1, x.shape[-1]) for x in points])
        every = torch.cat([every.mean(0, keepdim=True), every])[:, list(self.dims)]
        scaled = (every - self.center) * spectra[0].inverse_lengthscale(len(self.dims))
        distances = scaled.norm(dim=-1)
        middle, half = distances[..., 0], distances[..., 1:].median(-1).values
        corners = all(x.shape[-2] <= 2 for x in points)
        far = middle if corners else torch.maximum(middle, half)
        if (far > self.reach).any():
            warnings.warn(
                f"Templates(a={self.a:g}) with {self.num_frequencies} features expects inputs "
                f"around its center, at most {self.reach:.2g} lengthscales from it, got inputs "
                "of which the mean, or half, are farther away, where features are nearly zero; "
                "pass their mean as center=, a smaller a, or use gp_orff.QuasiMonteCarlo",
                stacklevel=2,
            )


def reach(a: float, num_dims: int, num_features: int) -> float:
    """The distance r at which the standard error of k̃(x, x) is k(x, x); 0 if it is larger at 0.

    E φ⁴ = (a²/(a² − 4))^{d/2} exp(4r²(a − 2)/(a + 2)) for features with E φ² = 1.
    """
    excess = math.log1p(num_features) - 0.5 * num_dims * math.log(a**2 / (a**2 - 4))
    return math.sqrt(max(excess, 0.0) * (a + 2) / (4 * (a - 2)))
