"""A = I + Σ C[c,c] ∘ (M P Mᵀ) + Σ ΦᵀN⁻¹Φ of lattice features, by products; vectors are rows."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from gp_orff.features.expansion import FeatureExpansion
from gp_orff.inference.equations.base import Group
from gp_orff.inference.iterative.images import Images

_NUMBERS = 2**22  # of the images of the vectors that are multiplied at once


@dataclass(frozen=True)
class WeightPrecision:
    """The precision A of the weights. A term C ∘ (M Q Mᵀ) is an image t of its sums, and Q = P E.

    All tensors are constants: `derivatives` gives the derivatives of uᵀAv.
    """

    images: Images
    directions: Float[Tensor, "p F"]  # Mᵀ
    terms: Sequence[Float[Tensor, "n"]]  # t, for every group and every weight of its pattern
    bases: Sequence[Float[Tensor, "p p"]]  # Q
    rows: Sequence[Float[Tensor, "M F"]]  # N^{−½}Φ of dense observations

    @classmethod
    def of(
        cls,
        expansion: FeatureExpansion,
        groups: Sequence[Group],
        bases: Sequence[Float[Tensor, "p p"]],
        rows: Sequence[Float[Tensor, "M F"]],
    ) -> "WeightPrecision":
        """The operator of groups of observations, whose `bases` are Q, and of dense rows."""
        images = Images.of(expansion)
        sums = [part.gram for statistics, _ in groups for part in statistics.moments]
        return cls(
            images,
            expansion.directions.detach().mT.contiguous(),
            [images.of_sums(t) for t in sums],
            [q.detach() for q in bases],
            [features.detach() for features in rows],
        )

    def __matmul__(self, v: Float[Tensor, "F k"]) -> Float[Tensor, "F k"]:
        return self.product(v.mT).mT

    def product(self, v: Float[Tensor, "k F"]) -> Float[Tensor, "k F"]:
        """A v for every row v."""
        out = v.clone()
        for part in self._chunks(v):
            out[part] += (self._information(self._fields(v[part])) * self.directions).sum(-2)
        for features in self.rows:
            out += (v @ features.mT) @ features
        return out

    def derivatives(
        self, left: Float[Tensor, "k F"], right: Float[Tensor, "k F"]
    ) -> tuple[Float[Tensor, "F p"], list[Float[Tensor, "p p"]], list[Float[Tensor, "M F"]]]:
        """∂/∂M, ∂/∂Q and ∂/∂(N^{−½}Φ) of Σ_k u_kᵀ A v_k for rows u of `left` and v of `right`."""
        of_directions = torch.zeros_like(self.directions)
        of_bases = [torch.zeros_like(q) for q in self.bases]
        for part in self._chunks(left):
            u, v = left[part], right[part]
            fields = self._fields(u), self._fields(v)
            for other, field in ((v, fields[0]), (u, fields[1])):
                of_directions += (other.unsqueeze(-2) * self._information(field)).sum(0)
            for total, t in zip(of_bases, self.terms, strict=True):
                total += torch.einsum("kin,kjn->ij", fields[0] * t, fields[1])
        of_rows = [
            (features @ left.mT) @ right + (features @ right.mT) @ left for features in self.rows
        ]
        return of_directions.mT, of_bases, of_rows

    @cached_property
    def _weights(self) -> dict[tuple[int, int], Float[Tensor, "n"]]:
        """Σ Q_ij t, where it is not zero."""
        weights: dict[tuple[int, int], Tensor] = {}
        for t, q in zip(self.terms, self.bases, strict=True):
            for i, j in q.nonzero().tolist():
                weights[i, j] = weights.get((i, j), 0) + q[i, j] * t
        return weights

    def _chunks(self, v: Float[Tensor, "k F"]) -> Iterator[slice]:
        size = max(1, _NUMBERS // (len(self.directions) * self.images.size))
        return (slice(start, start + size) for start in range(0, len(v), size))

    def _fields(self, v: Float[Tensor, "k F"]) -> Float[Tensor, "k p n"]:
        """The images of Φv, one for each output."""
        return self.images.of_weights(v.unsqueeze(-2) * self.directions)

    def _information(self, fields: Float[Tensor, "k p n"]) -> Float[Tensor, "k p F"]:
        """Σ_n φ(x_n) (H_nᵀΣ⁻¹H_n f(x_n))ᵀ for the column of every feature."""
        total = torch.zeros_like(fields)
        for (i, j), weight in self._weights.items():
            total[:, i].addcmul_(fields[:, j], weight)
        return self.images.adjoint(total)
