"""Columns whose frequencies lie on a lattice, ω_k = h ∘ k with integer k and spacing h.

C = φᵀφ is then the sum of a Toeplitz and a Hankel matrix. Let x_n be the points, x₀ an origin, and
T(q) = Σ_n exp(i⟨h∘q, x_n − x₀⟩) one non-uniform Fourier transform of the points. The elements of C
for the frequencies k and l are

    cos·cos = ½ Re(T(k−l) + T(k+l)) ,   sin·sin = ½ Re(T(k−l) − T(k+l)) ,
    cos·sin = ½ Im(T(k+l) − T(k−l)) .

The products φᵀy and φw need one transform each. Source, for scalar kernels: Greengard, Rachh &
Barnett 2022.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

import torch
from jaxtyping import Complex, Float, Int
from torch import Tensor
from torch.autograd import Function

from gp_orff import nufft
from gp_orff.features import chunked
from gp_orff.features.columns import TrigColumns
from gp_orff.features.phases import LinearPhases
from gp_orff.kernels.base import is_traced

# Sums over N points do not need the N×M matrix φ(x), where M = 2D:
#
# 1. In terms of the phases θ = h∘(x − x₀), frequencies are integer vectors k.
# 2. One non-uniform FFT of type 1 computes T(q) for all |q_i| ≤ 2m_i. These q include every k − l
#    and k + l, so the (4m+1)^d numbers T determine all M² elements of C. T is the sufficient
#    statistic. `gram` computes a dense C from it by indexing.
# 3. φᵀy is a transform of type 1 up to m, and φw is a transform of type 2. They are adjoint, so
#    each is the derivative of the other (`_Sums`).
# 4. diag(φ P φᵀ) uses the adjoint of `gram`: each element of P is added to the coefficients of
#    k − l and k + l. One transform of type 2 then evaluates the result at all points
#    (`quadratic`).
#
# Sums T are stored as flat arrays over a box of indices. The flat position of q is linear in q.
# Differences and sums of indices therefore become differences and sums of positions
# (`_positions`). The dense φ(x) is used if there are few points, or if points are differentiated.


_FEW = 2**21  # the largest number of elements for which a dense φ(x) is faster than a transform


class GramCache:
    """A cache of C = φᵀφ and s = φᵀ1 for the last points; its copies and pickles are empty."""

    def __init__(self):
        self.x: Tensor | None = None
        self.moments: tuple[Tensor, Tensor] | None = None

    def of(
        self, x: Tensor, compute: Callable[[Tensor], tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, Tensor]:
        """Return C and s of the points x, from `compute(x)` if x differ from the last points."""
        if self.x is None or self.x.shape != x.shape or not torch.equal(self.x, x):
            self.moments, self.x = compute(x), x.detach().clone()
        return self.moments

    def __reduce__(self):
        return GramCache, ()


@dataclass(frozen=True)
class LatticeColumns(TrigColumns):
    """The columns cos⟨h∘k, x − x₀⟩ and sin⟨h∘k, x − x₀⟩ for one of each pair ±k.

    The frequencies depend on no hyperparameter, so `tensors` is empty.

    Attributes:
        indices: the integer vectors k, (D, d).
        spacing: h, (d,), in radians per unit of the inputs.
        origin: x₀, (d,), in the unit of the inputs.
        cache: C = φᵀφ and s = φᵀ1 for the last points.
    """

    indices: Int[Tensor, "D d"] = None
    spacing: Float[Tensor, "d"] = None
    origin: Float[Tensor, "d"] = None
    cache: GramCache = field(default_factory=GramCache, compare=False)
    on_lattice = True
    tensors = ()

    @classmethod
    def of(
        cls,
        indices: Int[Tensor, "D d"],
        spacing: Float[Tensor, "d"],
        origin: Float[Tensor, "d"],
        cache: GramCache | None = None,
    ) -> "LatticeColumns":
        """Return the columns of the frequencies h∘k; equal columns may share a `cache`."""
        omega = indices.to(spacing) * spacing
        return cls(LinearPhases(omega), False, indices, spacing, origin, cache or GramCache())

    def tilted(
        self, columns: Int[Tensor, "k"], axes: Int[Tensor, "k"], count: int
    ) -> tuple["LatticeColumns", Int[Tensor, "k"], Float[Tensor, "k"]]:
        """Return columns with slightly different frequencies, on a finer lattice.

        The frequency of each column in `columns` changes by a small step along its axis. From
        number `count` on, the columns become sines of frequencies close to zero.

        Args:
            columns: the indices of k columns.
            axes: the axis of the step of each column, from 0.
            count: the number of columns that remain cosines or sines as they are.

        Returns:
            The new columns; the indices of the k columns among them; and the k steps, in radians
            per unit of the inputs.
        """
        row = torch.arange(len(columns), device=columns.device)
        known = row < count
        frequency, sine = columns % len(self.indices), (columns >= len(self.indices)) | ~known
        finer = torch.zeros_like(self.indices[0]).index_fill(0, axes, 1) > 0
        indices = self.indices[frequency] * known.unsqueeze(-1)
        steps = torch.where(finer, 2**13, 1)  # a frequency of one step is practically zero
        indices = indices * steps
        indices[row, axes] += 1
        spacing = self.spacing / steps
        phi = LatticeColumns.of(indices, spacing, self.origin)
        return phi, row + sine * len(columns), spacing[axes]

    def full_box(self) -> "LatticeColumns":
        """Return the columns of the whole box |k_i| ≤ m_i, where m_i is the largest |k_i| here."""
        ranges = [torch.arange(-m, m + 1) for m in self.modes]
        points = torch.cartesian_prod(*ranges).reshape(-1, len(ranges))
        # The box is symmetric and ordered. Its second half starts at k = 0 and contains one of each
        # pair ±k.
        half = points[len(points) // 2 :].to(self.indices.device)
        return LatticeColumns.of(half, self.spacing, self.origin)

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
        return super().values(self._centre(x))

    def moments(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if x.requires_grad:
            return super().moments(self._centre(x), y)
        batch = torch.broadcast_shapes(x.shape[:-2], y.shape[:-2])
        gram, total = self.cache.of(x, self._gram_and_sum)
        total = total.expand(*batch, total.shape[-1])
        return gram.expand(*batch, *gram.shape[-2:]), self.adjoint(x, y), total

    def adjoint(self, x: Tensor, y: Tensor) -> Tensor:
        if x.requires_grad or self._is_small(x):
            return super().adjoint(self._centre(x), y)
        return _Sums.apply(self, False, x, y.double())

    def apply(self, x: Tensor, w: Tensor) -> Tensor:
        if x.requires_grad or is_traced() or self._is_small(x):
            return super().apply(self._centre(x), w)
        return _Sums.apply(self, True, x, w.double())

    def exponential_sums(
        self, x: Float[Tensor, "N d"], weights: Float[Tensor, "N k"] | None = None
    ) -> Complex[Tensor, "k q"]:
        """Return the sums T(q) = Σ_n a_n exp(i⟨h∘q, x_n − x₀⟩) for all integers |q_i| ≤ 2 m_i.

        Here m_i is the largest |k_i| of the lattice points k. The range of q therefore includes the
        sum and the difference of any two lattice points, from which `gram` computes C.

        Args:
            x: points (N, d).
            weights: (N, k), the weights a_n in columns. By default, there is one column of ones.

        Returns:
            One flat array of all T(q) for each column of weights, (k, q).
        """
        modes = tuple(2 * m for m in self.modes)
        if weights is None:
            weights = torch.ones(len(x), 1, dtype=torch.float64, device=x.device)
        return nufft.type1(self._phases(x), weights, modes).flatten(1)

    def sums(self, x, y, weights):
        """Return the sums T, φᵀy and φᵀa, with one T and one φᵀa for every column a of `weights`.

        φᵀa is computed from T.
        """
        x = x.detach()
        sums = self.exponential_sums(x, weights)
        return sums.unbind(0), self._type1(x, y), [self.column_sum(t) for t in sums]

    def column_sum(self, sums: Complex[Tensor, "q"]) -> Float[Tensor, "2*D"]:
        """Return φᵀa from T: the real parts of all T(k), then the imaginary parts."""
        flat, centre = self._positions(2)
        values = sums[centre + flat]
        return torch.cat([values.real, values.imag])

    def gram_diagonal(self, sums: Complex[Tensor, "q"]) -> Float[Tensor, "2*D"]:
        """Return the diagonal of C from T: ½ Re(T(0) ± T(2k))."""
        flat, centre = self._positions(2)
        twice, zero = sums[centre + 2 * flat].real, sums[centre].real
        return 0.5 * torch.cat([zero + twice, zero - twice])

    def gram(self, sums: Tensor) -> Float[Tensor, "2*D 2*D"]:
        """Return C from T by the formulas in the docstring of this module.

        A real argument is C and is returned.
        """
        if not sums.is_complex():
            return sums
        flat, centre = self._positions(2)
        d = len(flat)
        real, imag = sums.real.contiguous(), sums.imag.contiguous()
        c = torch.empty(2 * d, 2 * d, dtype=torch.float64, device=sums.device)
        for rows in chunked.chunks(self.indices, d):
            difference = (centre + flat[rows, None]) - flat  # k − l
            total = (centre + flat[rows, None]) + flat  # k + l
            toeplitz, hankel = real[difference], real[total]
            c[:d][rows, :d] = 0.5 * (toeplitz + hankel)
            c[d:][rows, d:] = 0.5 * (toeplitz - hankel)
            c[:d][rows, d:] = 0.5 * (imag[total] - imag[difference])
        c[d:, :d] = c[:d, d:].mT
        return c

    def crop(self, sums: Complex[Tensor, "q"], to: "LatticeColumns") -> Complex[Tensor, "q2"]:
        """Return T of a smaller lattice `to`, which is the middle of T of this lattice."""
        if self.modes == to.modes:
            return sums
        large, small = ([2 * m for m in phi.modes] for phi in (self, to))
        box = sums.reshape([2 * m + 1 for m in large])
        middle = tuple(slice(a - b, a + b + 1) for a, b in zip(large, small, strict=True))
        return box[middle].flatten()

    def pick(self, values: Float[Tensor, "2*D k"], to: "LatticeColumns") -> Tensor:
        """Return the values of the columns of a smaller lattice `to`.

        The frequencies k and −k are the same.

        Raises:
            ValueError: this lattice omits a frequency of `to`.
        """
        flat, centre = self._positions(1)
        # A table maps the positions of k and of −k to the row of the frequency and to the sign of
        # its sine.
        row = torch.zeros(2 * centre + 1, dtype=torch.long, device=flat.device)
        sign = torch.zeros(2 * centre + 1, dtype=values.dtype, device=flat.device)
        index = torch.arange(len(flat), device=flat.device)
        for s in (-1, 1):
            row[centre + s * flat], sign[centre + s * flat] = index, float(s)
        place = centre + self._offsets(to.indices, [2 * m + 1 for m in self.modes])
        if (sign[place] == 0).any():
            raise ValueError(
                "expected a lattice with all frequencies of the other lattice, got one that omits "
                "some of them; compute the statistics on the other lattice"
            )
        cos, sin = values.chunk(2)
        return torch.cat([cos[row[place]], sign[place].unsqueeze(-1) * sin[row[place]]])

    def prefers_quadratic(self, x: Tensor, num_features: int) -> bool:
        return x.dim() == 2 and not x.requires_grad and 4 * len(x) > num_features

    def quadratic(
        self, x: Float[Tensor, "N d"], form: Float[Tensor, "2*D 2*D"]
    ) -> Float[Tensor, "N"]:
        """Return diag(φ P φᵀ) for a symmetric P = `form`, by the adjoint of `gram`."""
        flat, centre = self._positions(2)
        d = len(flat)
        values = torch.zeros(2 * centre + 1, dtype=torch.complex128, device=form.device)
        for rows in chunked.chunks(self.indices, d):
            cc, ss, cs = form[:d, :d][rows], form[d:, d:][rows], form[:d, d:][rows]
            difference = (centre + flat[rows, None]) - flat  # k − l
            total = (centre + flat[rows, None]) + flat  # k + l
            # The real parts are as in `gram`. The sign of cs follows from two signs: a transform of
            # type 2 sums values · exp(i⟨q, θ⟩), whose real part contains −Im(values) sin, and
            # cos(k) sin(l) contains −sin(k − l). P is symmetric, so cs counts twice.
            values.index_add_(0, difference.flatten(), torch.complex(0.5 * (cc + ss), cs).flatten())
            values.index_add_(0, total.flatten(), torch.complex(0.5 * (cc - ss), -cs).flatten())
        sizes = [4 * m + 1 for m in self.modes]
        return nufft.type2(self._phases(x), values.reshape(1, *sizes)).squeeze(-1)

    @cached_property
    def modes(self) -> tuple[int, ...]:
        """m_i, the largest |k_i| along each axis."""
        return tuple(self.indices.abs().amax(0).tolist())

    def _positions(self, multiple: int) -> tuple[Int[Tensor, "D"], int]:
        """Return the offsets of k in a flat array over |q_i| ≤ multiple · m_i, and its centre.

        Offsets count from the position of q = 0, which is the second value.
        """
        sizes = [2 * multiple * m + 1 for m in self.modes]
        return self._offsets(self.indices, sizes), prod(sizes) // 2

    def _offsets(self, indices: Int[Tensor, "m d"], sizes: Sequence[int]) -> Int[Tensor, "m"]:
        """Return the offsets of `indices` from the centre of a flat array of these sizes."""
        strides = torch.empty(sizes, device="meta").stride()
        return (indices * torch.tensor(strides, device=indices.device)).sum(-1)

    def _centre(self, x: Tensor) -> Tensor:
        return x.double() - self.origin

    def _phases(self, x: Float[Tensor, "N d"]) -> Float[Tensor, "N d"]:
        """Return θ = h∘(x − x₀), so that ⟨h∘q, x − x₀⟩ = ⟨q, θ⟩."""
        return self._centre(x.detach()) * self.spacing

    def _is_small(self, x: Tensor) -> bool:
        """Return whether a dense φ(x) is faster than a transform."""
        return x.shape[:-1].numel() * self.num_columns <= _FEW

    def _gram_and_sum(
        self, x: Float[Tensor, "*b N d"]
    ) -> tuple[Float[Tensor, "*b 2*D 2*D"], Float[Tensor, "*b 2*D"]]:
        """Return C = φᵀφ and s = φᵀ1."""
        if self._is_small(x):
            phi = self.values(x.detach())
            return phi.mT @ phi, phi.sum(-2)

        def sum_and_gram(points: Tensor) -> Float[Tensor, "2*D 1+2*D"]:
            (sums,) = self.exponential_sums(points)
            return torch.cat([self.column_sum(sums).unsqueeze(-1), self.gram(sums)], dim=-1)

        result = _over_batch(sum_and_gram, x)
        return result[..., 1:].contiguous(), result[..., 0]

    def _type1(self, x: Float[Tensor, "N d"], y: Float[Tensor, "N k"]) -> Float[Tensor, "2*D k"]:
        """Return φᵀy."""
        flat, centre = self._positions(1)
        sums = nufft.type1(self._phases(x), y, self.modes).flatten(1)[:, centre + flat]
        return torch.cat([sums.real, sums.imag], dim=-1).mT

    def _type2(self, x: Float[Tensor, "N d"], w: Float[Tensor, "2*D k"]) -> Float[Tensor, "N k"]:
        """Return φw."""
        flat, centre = self._positions(1)
        sizes = [2 * m + 1 for m in self.modes]
        cos, sin = w.chunk(2, dim=0)
        grid = torch.zeros(w.shape[-1], 2 * centre + 1, dtype=torch.complex128, device=w.device)
        # Re((a − i b) exp(iθ)) = a cos θ + b sin θ.
        grid[:, centre + flat] = torch.complex(cos, -sin).mT
        return nufft.type2(self._phases(x), grid.unflatten(1, sizes))


def _over_batch(function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """Apply a function of matrices to every matrix of a batch."""
    batch = torch.broadcast_shapes(*(t.shape[:-2] for t in tensors))
    if not batch:
        return function(*tensors)
    flat = [t.expand(*batch, *t.shape[-2:]).flatten(0, -3) for t in tensors]
    return torch.stack([function(*parts) for parts in zip(*flat, strict=True)]).unflatten(0, batch)


class _Sums(Function):
    """φᵀy by a transform of type 1, or φw by a transform of type 2.

    Each transform is the derivative of the other.
    """

    @staticmethod
    def forward(ctx, columns: LatticeColumns, applies: bool, x: Tensor, values: Tensor) -> Tensor:
        ctx.columns, ctx.applies, ctx.shape = columns, applies, values.shape
        ctx.save_for_backward(x)
        return _over_batch(columns._type2 if applies else columns._type1, x, values)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        sums = _Sums.apply(ctx.columns, not ctx.applies, x, grad)
        return None, None, None, sums.sum_to_size(ctx.shape)
