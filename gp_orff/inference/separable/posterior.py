"""The posterior of the feature weights of a separable kernel."""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from gp_orff.inference.separable.blocks import Blocks
from gp_orff.inference.weight_posterior import WeightPosterior, no_part


class Response(NamedTuple):
    """E[θ] given constants in the data: Σ_j a_j d_j m_jᵀ, with columns a, directions d, means m.

    Written out, it would have p·M·r entries.
    """

    columns: Float[Tensor, "*b j M"]  # a_j
    directions: Float[Tensor, "*b r j"]  # d_j
    means: Float[Tensor, "*b j p"]  # m_j

    def to(self, constants: Float[Tensor, "p k"] | None) -> Float[Tensor, "*b F k"]:
        """E[θ] given k constants, or 1⊗I_p."""
        means = self.means if constants is None else self.means @ constants
        parts = self.columns, self.directions, means
        return torch.einsum("...jm,...rj,...jk->...mrk", *parts).flatten(-3, -2)


@dataclass(frozen=True)
class KroneckerPosterior(WeightPosterior):
    """The posterior of separable kernels: blocks P_j = (I + λ_j C)⁻¹ in the eigenbasis U of G."""

    response: Response
    u: Float[Tensor, "*b r r"]
    inverse: Blocks  # Cov[θ] in this basis

    @property
    def rotated(self) -> Float[Tensor, "*b p r"]:
        """L U: the mixing matrix in the eigenbasis."""
        return self.expansion.mixing @ self.u

    @property
    def _width(self) -> int:
        return self.inverse.width + self.num_outputs**2

    def response_to(self, constants=None):
        return self.response.to(constants)

    def absorbed(self, x: Tensor) -> Tensor:
        values = self._columns(x) @ self.response.columns.mT  # (*b, n, j)
        outputs = self.expansion.mixing @ self.response.directions
        return torch.einsum("...nj,...pj,...jq->...npq", values, outputs, self.response.means)

    def weight_covariance(self, v: Tensor) -> Tensor:
        rotated = torch.einsum("...rj,...crk->...jkc", self.u, self._by_column(v))
        return self._from_blocks(self.inverse.solve(rotated))

    def weight_root(self, v: Tensor) -> Tensor:
        rows = torch.einsum("...cjk->...jkc", self._by_column(v))
        return self._from_blocks(self.inverse.other_half(rows))

    def _by_column(self, v: Float[Tensor, "*b F k"]) -> Float[Tensor, "*b M r k"]:
        return v.unflatten(-2, (self.expansion.num_columns, -1))

    def _from_blocks(self, rows: Float[Tensor, "*b r k M"]) -> Float[Tensor, "*b F k"]:
        return torch.einsum("...rj,...jkc->...crk", self.u, rows).flatten(-3, -2)

    def root_of(self, features: Tensor) -> Tensor:
        features = features.unflatten(-1, (self.expansion.num_columns, -1))  # (*b, m, M, r)
        rotated = torch.einsum("...mcr,...rj->...jmc", features, self.u)
        return self.inverse.half(rotated).transpose(-3, -2).flatten(-2)

    def _columns(self, x: Float[Tensor, "*b n d"]) -> Float[Tensor, "*b n M"]:
        """φ(x) S."""
        return self.expansion.phi.values(x.double()) * self.expansion.scales.mT

    def _block_roots(self, x: Float[Tensor, "*b n d"]) -> Float[Tensor, "*b r n M"]:
        """φ(x) S R_j with R_j R_jᵀ = P_j, for each block j."""
        return self.inverse.half(self._columns(x).unsqueeze(-3))

    def root(self, x: Tensor) -> Tensor:
        roots = self._block_roots(x)
        if roots.shape[-2] < roots.shape[-1] and not roots.requires_grad:
            roots = torch.linalg.qr(roots.mT, mode="r").R.mT  # as many columns as points
        root = torch.einsum("...pr,...rnc->...nprc", self.rotated, roots)
        return root.flatten(-4, -3).flatten(-2)

    def covariance(self, x: Tensor) -> Tensor:
        root = self._block_roots(x)
        blocks = root @ root.mT  # (*b, r, n, n)
        outer = torch.einsum("...pr,...qr,...rnm->...npmq", self.rotated, self.rotated, blocks)
        return outer.flatten(-4, -3).flatten(-2)

    def _variance(self, x: Tensor) -> Tensor:
        return self.inverse.forms(self._columns(x)).mT @ self.rotated.square().mT

    def _blocks(self, x: Tensor) -> Tensor:
        each = self.inverse.forms(self._columns(x))  # (r, n)
        return torch.einsum("pr,qr,rn->npq", self.rotated, self.rotated, each)

    def of_part(self, expansion, kernel):
        raise no_part()

    def detached(self) -> "KroneckerPosterior":
        response = Response(*(t.detach() for t in self.response))
        return replace(super().detached(), response=response, inverse=self.inverse.detach())
