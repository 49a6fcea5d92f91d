"""Local columns: positive bumps around templates z."""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from gp_orff.features.columns.base import Columns
from gp_orff.features.columns.pointwise import PointwiseColumns
from gp_orff.features.phases.base import equal


@dataclass(frozen=True)
class TemplateColumns(PointwiseColumns):
    """φ_k(x) = exp(a⟨x̃, z_k⟩ − (p/2)‖x̃‖² − (a/2)‖z_k‖²), x̃ = (x − center)/ℓ.

    Each is a bump of width 1/√p around x̃ = (a/p) z_k (Le et al. 2013, eqs. 24 and 26).
    """

    templates: Float[Tensor, "M k"]  # z
    inverse_lengthscale: Float[Tensor, "*b 1 k"]
    center: Float[Tensor, "k"]
    a: float
    p: float
    dims: tuple[int, ...]  # the input columns

    sampled = True

    @property
    def num_columns(self) -> int:
        return len(self.templates)

    @property
    def device(self) -> torch.device:
        return self.templates.device

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.inverse_lengthscale,)

    def with_tensors(self, *tensors: Tensor) -> "TemplateColumns":
        (inverse_lengthscale,) = tensors
        return replace(self, inverse_lengthscale=inverse_lengthscale)

    def to(self, device: torch.device) -> "TemplateColumns":
        names = ("templates", "inverse_lengthscale", "center")
        return replace(self, **{name: getattr(self, name).to(device) for name in names})

    def select(self, columns: Int[Tensor, "k"]) -> "TemplateColumns":
        return replace(self, templates=self.templates[columns])

    def halves(self) -> list[tuple[Int[Tensor, "k"], Float[Tensor, "k"]]]:
        """Every second template."""
        index = torch.arange(self.num_columns, device=self.device)
        halves = [index[side::2] for side in (0, 1)]
        shares = [len(index) / max(len(half), 1) for half in halves]
        variances = [
            self.templates.new_full(h.shape, s) for h, s in zip(halves, shares, strict=True)
        ]
        return list(zip(halves, variances, strict=True))

    def same(self, other: Columns) -> bool:
        return (
            isinstance(other, TemplateColumns)
            and (self.a, self.p, self.dims) == (other.a, other.p, other.dims)
            and torch.equal(self.templates, other.templates)
            and torch.equal(self.center, other.center)
            and equal(self.inverse_lengthscale, other.inverse_lengthscale)
        )

    def plain(self) -> dict[str, object]:
        names = ("templates", "inverse_lengthscale", "center")
        tensors = {name: getattr(self, name).detach().cpu() for name in names}
        return {**tensors, "a": self.a, "p": self.p, "dims": list(self.dims)}

    def inner_products(self, x: Float[Tensor, "*b N d"]) -> Float[Tensor, "*b N M"]:
        """⟨x, z_k/ℓ⟩."""
        return (x[..., list(self.dims)].double() * self.inverse_lengthscale) @ self.templates.mT

    def values(self, x: Float[Tensor, "*b N d"]) -> Float[Tensor, "*b N M"]:
        scaled = (x[..., list(self.dims)] - self.center) * self.inverse_lengthscale
        squares = 0.5 * self.p * scaled.square().sum(-1, keepdim=True)
        heights = 0.5 * self.a * self.templates.square().sum(-1)
        return (self.a * (scaled @ self.templates.mT) - squares - heights).exp()

    def mean_squares(self) -> Float[Tensor, "*b M 1"]:
        """The mean of φ² at the center over draws of the template, z ~ N(0, I/(a² − 2a)).

        It takes the place of the mean over space, which is 0: with it, the variance of the features
        is that of the kernel, which is the same everywhere if p = 2.
        """
        mean = (1 - 2 / self.a) ** (0.5 * len(self.dims))
        shape = (*self.inverse_lengthscale.shape[:-2], self.num_columns, 1)
        return self.inverse_lengthscale.new_full(shape, mean)
