"""Block means of readings along directions as rows, whitened track by track."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from gp_orff.data.noise.covariances import Noises
from gp_orff.data.tracks.observations import TrackObservations
from gp_orff.features.expansion import Expansion
from gp_orff.inference.equations.dense import DenseRows


@dataclass(frozen=True)
class TrackRows:
    """Block means with a matrix row for each: H Φ, V, and the noise covariance R of every track."""

    features: Float[Tensor, "T F"]
    design: Float[Tensor, "T 1+p"]
    noise: Sequence[tuple[Int[Tensor, "b t"], Float[Tensor, "b t t"]]]  # rows, −1 for none, and R

    @classmethod
    def of(
        cls,
        part: TrackObservations,
        expansion: Expansion,
        averages: Float[Tensor, "M p*T"],
        noises: Noises,
        truncated: Float[Tensor, "p p"] | None,
    ) -> "TrackRows":
        """The rows; `averages` are the columns of the expansion, by `averages_along`."""
        features = expansion.feature_values(averages).mT
        noise = tuple(part.covariances(noises, truncated))
        return cls(features, part.design(expansion.num_outputs), noise)

    def whitened(self) -> tuple[Float[Tensor, "m F"], Float[Tensor, "m 1+p"], Float[Tensor, ""]]:
        """R^{−½}Φ, R^{−½}V and log|R|, with zeros in the rows of blocks that a track lacks."""
        every, halves, logdet = torch.cat([self.features, self.design], dim=-1), [], 0
        for rows, covariance in self.noise:
            factor = torch.linalg.cholesky(covariance)
            values = every[rows] * (rows >= 0).unsqueeze(-1)
            half = torch.linalg.solve_triangular(factor, values, upper=False)
            halves.append(half.flatten(0, 1))
            logdet = logdet + 2 * factor.diagonal(dim1=-1, dim2=-2).log().sum()
        sizes = self.features.shape[-1], self.design.shape[-1]
        return *torch.cat(halves).split(sizes, dim=-1), logdet


Rows = DenseRows | TrackRows
