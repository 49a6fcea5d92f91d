"""Covariances of observed numbers of harmonic fields, without those of whole vectors."""

import math
from dataclasses import dataclass
from functools import cached_property

from jaxtyping import Float
from torch import Tensor

from gp_orff.kernels.harmonic.sources import Sources
from gp_orff.kernels.harmonic.spectrum import HarmonicFactor
from gp_orff.kernels.pairs.forms import Plain
from gp_orff.kernels.pairs.hessian import Cut, FormsOfTerm
from gp_orff.kernels.pairs.rows import Rows, inputs_of, prepared_rows, scalar_rows
from gp_orff.kernels.tree import Leaf, Term


@dataclass(frozen=True)
class HarmonicPairs:
    """Pairs of points and of directions v and w, of which those that are mirrored change signs.

    With the lag d = (τ, Z), vᵀ∇∇ᵀ(1/R)w = 3 (vᵀd)(wᵀd) R⁻⁵ − vᵀw R⁻³ has four forms, of which none
    depends on Z.
    """

    x: Float[Tensor, "n 3"]
    z: Float[Tensor, "m 3"]
    v: Float[Tensor, "q #n 3"]
    w: Float[Tensor, "r #m 3"]

    @cached_property
    def lag(self) -> Float[Tensor, "n m 2"]:
        """τ."""
        return self.x[:, None, :2] - self.z[:, :2]

    @cached_property
    def squares(self) -> Float[Tensor, "n m"]:
        """τᵀτ."""
        return self.lag.square().sum(-1)

    @cached_property
    def heights(self) -> Float[Tensor, "n m"]:
        """x₃ + z₃."""
        return self.x[:, None, 2] + self.z[:, 2]

    @cached_property
    def forms(self) -> tuple[Plain, Plain, Plain, Plain]:
        """−vᵀw; (vᵀτ)(wᵀτ); vᵀτ w₃ + v₃ wᵀτ; v₃ w₃."""
        v, w = self.v.unsqueeze(-2), self.w.unsqueeze(-3)  # (q, #n, 1, 3), (r, 1, #m, 3)
        left, right = ((u[..., :2] * self.lag).sum(-1) for u in (v, w))  # (q, n, m), (r, n, m)
        up, other = v[:, None, ..., 2], w[None, ..., 2]
        left, right = left.unsqueeze(1), right.unsqueeze(0)
        return (
            Plain(-(v[:, None] * w[None]).sum(-1)),
            Plain(left * right),
            Plain(left * other + up * right),
            Plain(up * other),
        )


@dataclass(frozen=True)
class HarmonicRows:
    """A harmonic field times scalar kernels of other inputs."""

    space: Leaf
    others: tuple[Leaf, ...]
    sources: Sources

    def __call__(self, left: Rows, right: Rows, known: dict) -> FormsOfTerm:
        """The four forms, each with its number."""
        key = self.space.active_dims, self.sources.side
        if key not in known:
            x, z = (inputs_of(self.space, rows) for rows in (left, right))
            first, second = self.sources.signs(x)
            known[key] = HarmonicPairs(x, z, first * left.v, second * right.v)
        others = [scalar_rows(leaf, left, right) for leaf in self.others]
        for form, number in zip(known[key].forms, self._numbers(known[key]), strict=True):
            yield form, math.prod(others, start=number)

    def _numbers(self, pairs: HarmonicPairs) -> list[Float[Tensor, "n m"]]:
        """Σ_j of a R⁻³, 3aR⁻⁵, 3aZR⁻⁵ and 3aZ²R⁻⁵."""
        totals = [0.0] * 4
        planes = zip(self.sources.planes, self.sources.amplitudes, strict=True)
        for plane, amplitude in planes:
            z = self.sources.side * (pairs.heights - 2 * plane)
            inverse = 1 / (pairs.squares + z * z)
            near = amplitude * inverse * inverse.sqrt()
            far = 3 * near * inverse
            parts = (near, far, far * z, far * z * z)
            totals = [total + part for total, part in zip(totals, parts, strict=True)]
        return totals


@prepared_rows.register
def _(factor: HarmonicFactor, term: Term, cut: Cut) -> HarmonicRows:
    space, *others = term.leaves
    sources = space.spectrum.sources
    amplitudes = term.outputscale.double() * sources.amplitudes.double()
    found = Sources(sources.side, cut(sources.planes.double()), cut(amplitudes))
    return HarmonicRows(space, tuple(others), found)
