"""Columns whose frequencies lie on a lattice, ω_k = h ∘ k with integer k.

C = φᵀφ is then Toeplitz plus Hankel. With T(q) = Σ_n exp(i⟨h∘q, x_n − x₀⟩), one non-uniform Fourier
transform of the points,

    cos·cos = ½ Re(T(k−l) + T(k+l)) ,   sin·sin = ½ Re(T(k−l) − T(k+l)) ,
    cos·sin = ½ Im(T(k+l) − T(k−l)) ,

and φᵀy, φw are two more (Greengard, Rachh & Barnett 2022, for scalar kernels).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

import torch
from jaxtyping import Complex, Float, Int
from torch import Tensor
from torch.autograd import Function

from gp_orff.features import chunked, nufft
from gp_orff.features.chunked import LinearPhases
from gp_orff.features.columns import Columns, TrigColumns

_FEW = 2**21  # entries of φ(x) up to which it is quicker to write them out


class GramCache:
    """C and s of the points last asked for; copies and pickles start empty."""

    def __init__(self):
        self.x: Tensor | None = None
        self.found: tuple[Tensor, Tensor] | None = None

    def of(
        self, x: Tensor, compute: Callable[[Tensor], tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, Tensor]:
        if self.x is None or self.x.shape != x.shape or not torch.equal(self.x, x):
            self.found, self.x = compute(x), x.detach().clone()
        return self.found

    def __reduce__(self):
        return GramCache, ()


@dataclass(frozen=True)
class LatticeColumns(TrigColumns):
    """Columns cos and sin of ⟨h∘k, x − x₀⟩."""

    indices: Int[Tensor, "D d"] = None  # k
    spacing: Float[Tensor, "d"] = None  # h
    origin: Float[Tensor, "d"] = None  # x₀
    cache: GramCache = field(default_factory=GramCache, compare=False)

    @classmethod
    def of(
        cls,
        indices: Int[Tensor, "D d"],
        spacing: Float[Tensor, "d"],
        origin: Float[Tensor, "d"],
        cache: GramCache | None = None,
    ) -> "LatticeColumns":
        omega = indices.to(spacing) * spacing
        return cls(LinearPhases(omega), False, indices, spacing, origin, cache or GramCache())

    def boxed(self) -> "LatticeColumns":
        """Of all |k_i| ≤ m_i: one of k and −k."""
        ranges = [torch.arange(-m, m + 1) for m in self.modes]
        points = torch.cartesian_prod(*ranges).reshape(-1, len(ranges))
        half = points[len(points) // 2 :].to(self.indices.device)
        return LatticeColumns.of(half, self.spacing, self.origin)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """None: these frequencies do not move."""
        return ()

    def with_tensors(self) -> "LatticeColumns":
        return self

    def to(self, device: torch.device) -> "LatticeColumns":
        parts = (self.indices, self.spacing, self.origin)
        return LatticeColumns.of(*(part.to(device) for part in parts))

    def select(self, columns: Int[Tensor, "2*k"]) -> "LatticeColumns":
        indices = self.indices[columns[: len(columns) // 2]]
        return LatticeColumns.of(indices, self.spacing, self.origin)

    def plain(self) -> dict[str, Tensor]:
        return {name: getattr(self, name).cpu() for name in ("indices", "spacing", "origin")}

    def values(self, x: Tensor) -> Tensor:
        return super().values(self._centred(x))

    def moments(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if x.requires_grad:
            return super().moments(self._centred(x), y)
        batch = torch.broadcast_shapes(x.shape[:-2], y.shape[:-2])
        gram, total = self.cache.of(x, self._grams)
        total = total.expand(*batch, total.shape[-1])
        return gram.expand(*batch, *gram.shape[-2:]), self.adjoint(x, y), total

    def adjoint(self, x: Tensor, y: Tensor) -> Tensor:
        if x.requires_grad or self._few(x):
            return super().adjoint(self._centred(x), y)
        return _Adjoint.apply(self, x, y.double())

    def apply(self, x: Tensor, w: Tensor) -> Tensor:
        if x.requires_grad or self._few(x):
            return super().apply(self._centred(x), w)
        return _Apply.apply(self, x, w.double())

    def exponential_sums(
        self, x: Float[Tensor, "N d"], weights: Float[Tensor, "N k"] | None = None
    ) -> Complex[Tensor, "k q"]:
        """T(q) = Σ_n a_n exp(i⟨h∘q, x_n − x₀⟩) for all differences and sums of the lattice's
        indices, in a flat array for each column a of weights."""
        modes = tuple(2 * m for m in self.modes)
        if weights is None:
            weights = torch.ones(len(x), 1, dtype=torch.float64, device=x.device)
        return nufft.type1(self._phases(x), weights, modes).flatten(1)

    def sums(self, x, y, weights):
        """T, φᵀy, and the φᵀa that T contains."""
        x = x.detach()
        found = self.exponential_sums(x, weights)
        return found.unbind(0), self._type1(x, y), [self.column_sum(own) for own in found]

    def column_sum(self, sums: Complex[Tensor, "q"]) -> Float[Tensor, "2*D"]:
        """φᵀa: T(k) itself."""
        flat, centre = self._positions(2)
        own = sums[centre + flat]
        return torch.cat([own.real, own.imag])

    def gram(self, found: Tensor) -> Float[Tensor, "2*D 2*D"]:
        """C from T, or C itself."""
        return self._from_sums(found) if found.is_complex() else found

    def _from_sums(self, sums: Complex[Tensor, "q"]) -> Float[Tensor, "2*D 2*D"]:
        flat, centre = self._positions(2)
        d = len(flat)
        real, imag = sums.real.contiguous(), sums.imag.contiguous()
        c = torch.empty(2 * d, 2 * d, dtype=torch.float64, device=sums.device)
        for rows in chunked.chunks(self.indices, d):
            below = (centre + flat[rows, None]) - flat
            above = (centre + flat[rows, None]) + flat
            a, s = real[below], real[above]
            c[:d][rows, :d] = 0.5 * (a + s)
            c[d:][rows, d:] = 0.5 * (a - s)
            c[:d][rows, d:] = 0.5 * (imag[above] - imag[below])
        c[d:, :d] = c[:d, d:].mT
        return c

    def same(self, other: Columns) -> bool:
        return isinstance(other, LatticeColumns) and all(
            torch.equal(getattr(self, name), getattr(other, name))
            for name in ("indices", "spacing", "origin")
        )

    def crop(self, sums: Complex[Tensor, "q"], to: "LatticeColumns") -> Complex[Tensor, "q2"]:
        """The middle of T: that of a smaller lattice."""
        if self.modes == to.modes:
            return sums
        own, wanted = ([2 * m for m in phi.modes] for phi in (self, to))
        box = sums.reshape([2 * m + 1 for m in own])
        middle = tuple(slice(a - b, a + b + 1) for a, b in zip(own, wanted, strict=True))
        return box[middle].flatten()

    def pick(self, values: Float[Tensor, "2*D k"], to: "LatticeColumns") -> Tensor:
        """Values of the columns that a smaller lattice has; k and −k are the same frequency."""
        flat, centre = self._positions(1)
        row = torch.zeros(2 * centre + 1, dtype=torch.long, device=flat.device)
        sign = torch.zeros(2 * centre + 1, dtype=values.dtype, device=flat.device)
        index = torch.arange(len(flat), device=flat.device)
        for way in (-1, 1):
            row[centre + way * flat], sign[centre + way * flat] = index, float(way)
        strides = _strides([2 * m + 1 for m in self.modes])
        wanted = centre + (to.indices * torch.tensor(strides, device=flat.device)).sum(-1)
        if (sign[wanted] == 0).any():
            raise ValueError("the lattice does not have all frequencies of the other")
        cos, sin = values.chunk(2)
        return torch.cat([cos[row[wanted]], sign[wanted].unsqueeze(-1) * sin[row[wanted]]])

    def folds(self, x: Tensor, num_features: int) -> bool:
        return x.dim() == 2 and not x.requires_grad and 4 * len(x) > num_features

    def quadratic(
        self, x: Float[Tensor, "N d"], form: Float[Tensor, "2*D 2*D"]
    ) -> Float[Tensor, "N"]:
        """diag(φ P φᵀ) for a symmetric P: C from T read backwards, and one transform."""
        flat, centre = self._positions(2)
        d = len(flat)
        values = torch.zeros(2 * centre + 1, dtype=torch.complex128, device=form.device)
        for rows in chunked.chunks(self.indices, d):
            cc, ss, cs = form[:d, :d][rows], form[d:, d:][rows], form[:d, d:][rows]
            below = (centre + flat[rows, None]) - flat
            above = (centre + flat[rows, None]) + flat
            values.index_add_(0, below.flatten(), torch.complex(0.5 * (cc + ss), cs).flatten())
            values.index_add_(0, above.flatten(), torch.complex(0.5 * (cc - ss), -cs).flatten())
        sizes = [4 * m + 1 for m in self.modes]
        return nufft.type2(self._phases(x), values.reshape(1, *sizes)).squeeze(-1)

    @cached_property
    def modes(self) -> tuple[int, ...]:
        """The largest |k_i| along each axis."""
        return tuple(self.indices.abs().amax(0).tolist())

    def _positions(self, multiple: int) -> tuple[Int[Tensor, "D"], int]:
        """Of the indices in a flat array over |q_i| ≤ multiple · m_i, from its centre."""
        sizes = [2 * multiple * m + 1 for m in self.modes]
        strides = torch.tensor(_strides(sizes), device=self.indices.device)
        return (self.indices * strides).sum(-1), prod(sizes) // 2

    def _centred(self, x: Tensor) -> Tensor:
        return x.double() - self.origin

    def _phases(self, x: Float[Tensor, "N d"]) -> Float[Tensor, "N d"]:
        return self._centred(x.detach()) * self.spacing

    def _few(self, x: Tensor) -> bool:
        return x.shape[:-1].numel() * self.num_columns <= _FEW

    def _grams(
        self, x: Float[Tensor, "*b N d"]
    ) -> tuple[Float[Tensor, "*b 2*D 2*D"], Float[Tensor, "*b 2*D"]]:
        if self._few(x):
            phi = self.values(x.detach())
            return phi.mT @ phi, phi.sum(-2)

        def both(points: Tensor) -> Float[Tensor, "2*D 1+2*D"]:
            (sums,) = self.exponential_sums(points)
            return torch.cat([self.column_sum(sums).unsqueeze(-1), self.gram(sums)], dim=-1)

        found = _over_batch(both, x)
        return found[..., 1:].contiguous(), found[..., 0]

    def _type1(self, x: Float[Tensor, "N d"], y: Float[Tensor, "N k"]) -> Float[Tensor, "2*D k"]:
        flat, centre = self._positions(1)
        sums = nufft.type1(self._phases(x), y, self.modes).flatten(1)[:, centre + flat]
        return torch.cat([sums.real, sums.imag], dim=-1).mT

    def _type2(self, x: Float[Tensor, "N d"], w: Float[Tensor, "2*D k"]) -> Float[Tensor, "N k"]:
        flat, centre = self._positions(1)
        sizes = [2 * m + 1 for m in self.modes]
        cos, sin = w.chunk(2, dim=0)
        grid = torch.zeros(w.shape[-1], 2 * centre + 1, dtype=torch.complex128, device=w.device)
        grid[:, centre + flat] = torch.complex(cos, -sin).mT
        return nufft.type2(self._phases(x), grid.unflatten(1, sizes))


def _strides(sizes: Sequence[int]) -> list[int]:
    """Of an array of this shape."""
    return [prod(sizes[axis + 1 :]) for axis in range(len(sizes))]


def _over_batch(function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """A function of matrices, on every matrix of a batch."""
    batch = torch.broadcast_shapes(*(t.shape[:-2] for t in tensors))
    if not batch:
        return function(*tensors)
    flat = [t.expand(*batch, *t.shape[-2:]).flatten(0, -3) for t in tensors]
    return torch.stack([function(*parts) for parts in zip(*flat, strict=True)]).unflatten(0, batch)


class _Adjoint(Function):
    """φᵀy by a transform of type 1; its derivative is one of type 2."""

    @staticmethod
    def forward(ctx, columns: LatticeColumns, x: Tensor, y: Tensor) -> Tensor:
        ctx.columns, ctx.shape = columns, y.shape
        ctx.save_for_backward(x)
        return _over_batch(columns._type1, x, y)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return None, None, _Apply.apply(ctx.columns, x, grad).sum_to_size(ctx.shape)


class _Apply(Function):
    """φw by a transform of type 2; its derivative is one of type 1."""

    @staticmethod
    def forward(ctx, columns: LatticeColumns, x: Tensor, w: Tensor) -> Tensor:
        ctx.columns, ctx.shape = columns, w.shape
        ctx.save_for_backward(x)
        return _over_batch(columns._type2, x, w)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return None, None, _Adjoint.apply(ctx.columns, x, grad).sum_to_size(ctx.shape)
