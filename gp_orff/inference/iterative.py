"""The primal algebra without its matrix, on frequency lattices of many features.

A = I + Σ C[c,c] ∘ (M P Mᵀ) is a sum of Toeplitz and Hankel matrices, multiplied by diagonal
matrices. A product with it takes two fast Fourier transforms for each output. A preconditioner has
a dense block for the features that the data determine best, and makes conjugate gradients fast. The
Lanczos process gives log|A| with a standard error, and A^{−½}z. Evidence and posterior follow from
these results, as for the normal equations of `equations`.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import islice
from math import prod
from typing import NamedTuple

import scipy
import torch
from jaxtyping import Complex, Float, Int
from linear_operator.utils.cholesky import psd_safe_cholesky
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from gp_orff.features.chunked import by_chunks, chunks
from gp_orff.features.expansion import FeatureExpansion
from gp_orff.features.lattice import LatticeColumns
from gp_orff.inference.equations import Group, WeightEquations, masked_parts, mean_and_response
from gp_orff.inference.posteriors import (
    FieldDistribution,
    GeneralPosterior,
    PrimalPosterior,
    SymbolPosterior,
)
from gp_orff.inference.quadratic import Evidence, InvQuadLogdet, log_determinant, masked_sum
from gp_orff.kernels.base import cholesky
from gp_orff.symbols.base import Symbol

# Fields on a periodic grid of points: weights of a lattice's columns ↔ images, by FFT.
#
# A field φ(x) w of columns cos⟨k, θ⟩ and sin⟨k, θ⟩ is a trigonometric polynomial. Its values at the
# points θ_u = 2πu/n are its image. For sums T(q) = Σ_n a_n exp(i⟨q, θ_n⟩) and n > 4m, any two such
# fields f and g satisfy
#
#     Σ_n a_n f(x_n) g(x_n) = Σ_u t(u) f(u) g(u) ,     t(u) = n⁻¹ Σ_q T(q) exp(−i⟨q, θ_u⟩) .
#
# Products with C = φᵀ diag(a) φ are therefore products with t on the grid.
#
# The condition n > 4m avoids aliasing: f and g have frequencies up to m and t up to 2m, thus t f g
# up to 4m, and its sum over the grid is exact if no nonzero frequency is a multiple of n.
#
# A product with C therefore costs two transforms instead of a dense matrix:
#
# 1. `of_weights` places the weights as Fourier coefficients and transforms them to the image of f.
# 2. The image is multiplied by t, which `of_sums` computed once from T.
# 3. `adjoint` transforms back and reads off the coefficients of the columns.
#
# The real FFT stores the half k_d ≥ 0 of the last axis. A lattice has one frequency of each pair
# ±k, but not always the one in this half. A frequency with k_d < 0 is replaced by its negative,
# which changes the sign of its sine. On the plane k_d = 0, the stored half contains both k and −k.
# The coefficient of −k is set to the conjugate of that of k.


@dataclass(frozen=True)
class Images:
    """The map between weights of F features and images on n_1 × … × n_d points.

    Fourier coefficients are in the layout of a real FFT, with k_d ≥ 0 for the last index.
    """

    modes: tuple[int, ...]  # m_i
    points: tuple[int, ...]  # n_i
    slots: Int[Tensor, "F"]  # index of the real or imaginary part of a feature's coefficient
    scale: Float[Tensor, "F"]  # this part over the weight: ±½, or 1 at k = 0
    signs: Float[Tensor, "F"]  # Σ_n a_n f(x_n) φ(x_n) over this part of the transform of t f
    plane: Int[Tensor, "k"]  # coefficients with k_d = 0 that `slots` sets
    mirrored: Int[Tensor, "k"]  # the coefficients at −k

    @classmethod
    def of(cls, expansion: FeatureExpansion) -> "Images":
        """The map for the features of a lattice."""
        phi: LatticeColumns = expansion.phi
        points = tuple(scipy.fft.next_fast_len(4 * m + 1, real=True) for m in phi.modes)
        extents = _half(points, phi.modes)
        frequency = expansion.columns % len(phi.indices)
        sine = expansion.columns >= len(phi.indices)
        k = phi.indices
        flipped = k[:, -1] < 0
        k = torch.where(flipped.unsqueeze(-1), -k, k)
        place = _places(k, points, extents)
        zero = ~k.any(-1)
        on_plane = (k[:, -1] == 0) & ~zero
        negative = (sine & ~flipped[frequency]).double()  # the coefficient is ½ (a − i b)
        scale = torch.where(zero, 1.0, 0.5).double()[frequency] * (1 - 2 * negative)
        return cls(
            phi.modes,
            points,
            2 * place[frequency] + sine,
            scale,
            1 - 2 * negative,  # Σ a f exp(iθ) is the conjugate of the transform
            place[on_plane],
            _places(-k[on_plane], points, extents),
        )

    @property
    def size(self) -> int:
        """The number of points of an image."""
        return prod(self.points)

    def of_weights(self, weights: Float[Tensor, "*b F"]) -> Float[Tensor, "*b n"]:
        """The values φ(θ_u) w on the grid, as a flat array."""
        batch, extents = weights.shape[:-1], _half(self.points, self.modes)
        parts = weights.new_zeros(*batch, 2 * prod(extents))
        # Several features may share one column. Their weights are added.
        parts.scatter_add_(-1, self.slots.expand(*batch, -1), weights * self.scale)
        values = torch.view_as_complex(parts.unflatten(-1, (-1, 2)))
        values[..., self.mirrored] = values[..., self.plane].conj()
        return self._synthesis(values.unflatten(-1, extents)).flatten(len(batch))

    def adjoint(self, images: Float[Tensor, "*b n"]) -> Float[Tensor, "*b F"]:
        """Σ_u g(u) φ(θ_u) for the column of every feature."""
        # The order of `of_weights` is reversed: the real transform of the last axis is the first,
        # and is cut off at m_d.
        axes = range(-len(self.points), -1)
        values = torch.fft.rfft(images.unflatten(-1, self.points))[..., : self.modes[-1] + 1]
        if len(self.points) > 1:
            values = torch.fft.fftn(values, dim=tuple(axes))
        parts = torch.view_as_real(values.contiguous()).flatten(images.dim() - 1)
        return parts[..., self.slots] * self.signs

    def of_sums(self, sums: Complex[Tensor, "q"]) -> Float[Tensor, "n"]:
        """t(u) from T, which is a flat array over |q_i| ≤ 2 m_i."""
        double = tuple(2 * m for m in self.modes)
        # t has exp(−i⟨q, θ⟩), the inverse FFT exp(+i⟨q, θ⟩): hence the conjugate. T(−q) is the
        # conjugate of T(q), so the half q_d ≥ 0 suffices.
        box = sums.reshape([2 * m + 1 for m in double])[..., double[-1] :].conj()
        for axis, (m, n) in enumerate(zip(double[:-1], self.points[:-1], strict=True)):
            q = torch.arange(-m, m + 1, device=box.device) % n
            shape = [*box.shape[:axis], n, *box.shape[axis + 1 :]]
            box = box.new_zeros(shape).index_copy_(axis, q, box)
        return self._synthesis(box).flatten() / self.size

    def _synthesis(self, values: Complex[Tensor, "*b h"]) -> Float[Tensor, "*b n"]:
        """Values of a field from its coefficients."""
        if len(self.points) > 1:
            axes = tuple(range(-len(self.points), -1))
            values = torch.fft.ifftn(values, dim=axes, norm="forward")
        return torch.fft.irfft(values, n=self.points[-1], norm="forward")


def _half(points: tuple[int, ...], modes: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the coefficients, whose last index is at most m_d."""
    return (*points[:-1], modes[-1] + 1)


def _places(
    k: Int[Tensor, "D d"], points: tuple[int, ...], extents: tuple[int, ...]
) -> Int[Tensor, "D"]:
    """The positions of frequencies k in a flat array of coefficients."""
    place = torch.zeros_like(k[:, 0])
    for index, n, extent in zip(k.mT, points, extents, strict=True):
        place = place * extent + index % n
    return place


# Products with A = I + Σ C[c,c] ∘ (M P Mᵀ) + Σ ΦᵀN⁻¹Φ of lattice features. Vectors are rows.
#
# 1. The weights v_f times the directions m_f give p images, one for each component of the field.
# 2. At each grid point, the p×p matrix Σ Q t multiplies the p values.
# 3. The p resulting images are transformed back, and combined by the directions.
#
# All terms of A with a lattice share these transforms, because their t are added first.


_NUMBERS = 2**22  # elements of the images in memory at a time


@dataclass(frozen=True)
class WeightPrecision:
    """The precision matrix A of F weights, as a linear operator that does not store A.

        A = I + Σ C[c,c] ∘ (M Q Mᵀ) + Σ ΦᵀN⁻¹Φ .

    The first sum is over the groups of observations at points, and over the matrices Q (p, p) of
    each group. C is the Gram matrix of the columns, M (F, p) contains the directions, and ∘ is the
    elementwise product. The comment above `Images` explains how the image t of a group replaces C.
    The second sum is over dense observations with features Φ and noise covariance N.

    No tensor is attached to the autograd graph. `derivatives` returns the derivatives of uᵀAv.
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
        """Return the operator for groups of observations and dense observations.

        Args:
            expansion: the features, on a lattice.
            groups: the statistics and the noise of each group.
            bases: Q (p, p), for each matrix of sums of each group.
            rows: N^{−½}Φ, for each set of dense observations.
        """
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
        """Return A v for every row v."""
        out = v.clone()
        for part in self._chunks(v):
            out[part] += (self._information(self._fields(v[part])) * self.directions).sum(-2)
        for features in self.rows:
            out += (v @ features.mT) @ features
        return out

    def derivatives(
        self, left: Float[Tensor, "k F"], right: Float[Tensor, "k F"]
    ) -> tuple[Float[Tensor, "F p"], list[Float[Tensor, "p p"]], list[Float[Tensor, "M F"]]]:
        """Return the derivatives of Σ_k u_kᵀ A v_k by M, by each Q and by each N^{−½}Φ.

        The vectors u_k are the rows of `left`, and the vectors v_k are the rows of `right`.
        """
        of_directions = torch.zeros_like(self.directions)
        of_bases = [torch.zeros_like(q) for q in self.bases]
        for part in self._chunks(left):
            u, v = left[part], right[part]
            fields = self._fields(u), self._fields(v)
            # uᵀAv depends on M through both fields. The derivative has a term for each.
            for other, image in ((v, fields[0]), (u, fields[1])):
                of_directions += (other.unsqueeze(-2) * self._information(image)).sum(0)
            for total, t in zip(of_bases, self.terms, strict=True):
                total += torch.einsum("kin,kjn->ij", fields[0] * t, fields[1])
        of_rows = [
            (features @ left.mT) @ right + (features @ right.mT) @ left for features in self.rows
        ]
        return of_directions.mT, of_bases, of_rows

    @cached_property
    def _weights(self) -> dict[tuple[int, int], Float[Tensor, "n"]]:
        """Σ Q_ij t for each pair (i, j) with a nonzero sum."""
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


# P ≈ A: a dense block for the features that the data determine best, and the diagonal of A for the
# other features.
#
# For well-determined features, A is far from the identity, and its eigenvalues differ by many
# orders of magnitude. These features form a dense block, which is factorised. For the other
# features, A is close to its diagonal. R⁻¹AR⁻ᵀ then has an identity in the block, a unit diagonal
# elsewhere, and eigenvalues near one, so that conjugate gradients converge in few iterations. The
# block has cosine and sine of each of its frequencies, because columns of a lattice are selected in
# pairs.


@dataclass(frozen=True)
class Preconditioner:
    """P = R Rᵀ, where R is a Cholesky factor for some features, and diagonal for the others.

    Vectors are rows.
    """

    columns: Int[Tensor, "2*k"]  # columns of the block: cosines of k frequencies, then sines
    block: Int[Tensor, "m"]  # features of the block
    factor: Float[Tensor, "m m"]  # Cholesky factor of A at these features
    diagonal: Float[Tensor, "F"]  # diagonal of A, and 1 at the features of the block

    def solve(self, v: Float[Tensor, "k F"]) -> Float[Tensor, "k F"]:
        """P⁻¹v."""
        return self.inverse_root_transposed(self.inverse_root(v))

    def root(self, v: Float[Tensor, "k F"]) -> Float[Tensor, "k F"]:
        """R v."""
        out = v * self._scale
        out[:, self.block] = v[:, self.block] @ self.factor.mT
        return out

    def inverse_root(self, v: Float[Tensor, "k F"]) -> Float[Tensor, "k F"]:
        """R⁻¹v."""
        return self._triangular(v, self.factor, upper=False)

    def inverse_root_transposed(self, v: Float[Tensor, "k F"]) -> Float[Tensor, "k F"]:
        """R⁻ᵀv."""
        return self._triangular(v, self.factor.mT, upper=True)

    @cached_property
    def rest(self) -> Float[Tensor, "F"]:
        """The diagonal of P⁻¹, and 0 at the features of the block."""
        return (1 / self.diagonal).index_fill(0, self.block, 0.0)

    @cached_property
    def _scale(self) -> Float[Tensor, "F"]:
        return self.diagonal.sqrt()

    def _triangular(self, v: Tensor, factor: Tensor, upper: bool) -> Float[Tensor, "k F"]:
        out = v / self._scale
        block = torch.linalg.solve_triangular(factor, v[:, self.block].mT, upper=upper)
        out[:, self.block] = block.mT
        return out


def precondition(
    expansion: FeatureExpansion,
    groups: Sequence[Group],
    rows: Sequence[Float[Tensor, "M F"]],
    size: int,
) -> tuple[Preconditioner, Float[Tensor, ""]]:
    """P with a dense block of at most `size` features, and log|P|, which is differentiable.

    The block has the frequencies with the largest diagonal elements of A, where the signal exceeds
    the noise most.
    """
    diagonal = _diagonal(expansion, groups, rows)
    columns = _leading_columns(expansion, diagonal.detach(), size)
    inside = torch.zeros(expansion.num_columns, dtype=torch.bool, device=columns.device)
    inside[columns] = True
    chosen = inside[expansion.columns]
    block = chosen.nonzero().squeeze(-1)
    part = expansion.select(columns, torch.ones_like(diagonal[: len(columns)]))
    parts = [Group(group.on(part.phi), noise) for group, noise in groups]
    a = masked_sum(masked_parts(part, parts))
    for features in rows:
        a = a + features[:, block].mT @ features[:, block]
    factor = psd_safe_cholesky(a.detach())
    logdet = log_determinant(factor)
    if a.requires_grad:
        _, logdet = InvQuadLogdet.apply(a, a.new_zeros(len(a), 1))
    # P is a constant of the iterations. Only log|P| is differentiated.
    fixed = torch.where(chosen, 1.0, diagonal.detach())
    return (
        Preconditioner(columns, block, factor, fixed),
        logdet + diagonal[~chosen].log().sum(),
    )


def _diagonal(
    expansion: FeatureExpansion, groups: Sequence[Group], rows: Sequence[Float[Tensor, "M F"]]
) -> Float[Tensor, "F"]:
    """The diagonal of A."""
    total = 1.0
    for statistics, noise in groups:
        pattern = statistics.pattern
        m, precision = pattern.select(expansion.directions), pattern.precision(noise.precision)
        for moments, e in zip(statistics.moments, pattern.basis(precision), strict=True):
            squares = expansion.phi.gram_diagonal(moments.gram)[expansion.columns]
            total = total + squares * ((m @ (precision @ e)) * m).sum(-1)
    return total + sum(features.square().sum(0) for features in rows)


def _leading_columns(
    expansion: FeatureExpansion, diagonal: Float[Tensor, "F"], size: int
) -> Int[Tensor, "2*k"]:
    """The columns of the frequencies with the largest diagonal, with at most `size` features."""
    phi = expansion.phi
    count = len(phi.indices)
    frequency = expansion.columns % count
    features = torch.bincount(frequency, minlength=count)
    largest = torch.zeros(count, dtype=diagonal.dtype, device=diagonal.device)
    largest = largest.scatter_reduce(0, frequency, diagonal, "amax")
    order = largest.argsort(descending=True, stable=True)
    return torch.cat(phi.columns_of(order[features[order].cumsum(0) <= size]))


# Preconditioned conjugate gradients for many right-hand sides, which are rows.
#
# All systems advance together, so that one product handles a matrix of directions.
#
# 1. Start from zero or from the guess, with the residual r, z = P⁻¹r and the direction d = z.
# 2. Systems with ‖r‖ ≤ tolerance ‖b‖ leave the batch. `active` stores the rows of the remaining
#    systems. The squared norm is rᵀP⁻¹r, since this approximates eᵀAe, the squared error in
#    posterior standard deviations.
# 3. Return if no system remains, or if `enough` iterations are done and each remaining system has
#    reached the permitted residual at some time. Raise an error after `most` iterations.
# 4. Otherwise take a step along d, update r by recursion, and make the next d conjugate to the
#    last.
#
# Right-hand sides are independent: each system converges as it would without the others.


class ConvergenceError(RuntimeError):
    """Conjugate gradients did not reach their tolerance."""


class Solution(NamedTuple):
    """A⁻¹b, and the number of iterations for each right-hand side."""

    x: Float[Tensor, "k F"]
    iterations: Int[Tensor, "k"]


def solve(
    a: WeightPrecision,
    p: Preconditioner,
    b: Float[Tensor, "k F"],
    tolerance: float,
    most: int,
    permitted: float | None = None,
    guess: Float[Tensor, "k F"] | None = None,
    enough: int | None = None,
) -> Solution:
    """Solve A x = b for k right-hand sides b by preconditioned conjugate gradients.

    A system has converged when its residual r = b − A x satisfies ‖r‖ ≤ tolerance ‖b‖, in the norm
    ‖r‖ = √(rᵀP⁻¹r). It is then removed from the batch. Source: Saad 2003, algorithm 9.1.

    Args:
        a: A.
        p: the preconditioner P.
        b: the right-hand sides, as rows (k, F).
        tolerance: the relative residual ‖r‖/‖b‖ at which a system has converged.
        most: the largest number of iterations.
        permitted: the relative residual that is accepted after `enough` iterations. A system has
            reached it if any earlier residual was as small, because the error norm √(eᵀAe) never
            increases. The default is `tolerance`.
        guess: the first iterates (k, F). The default is zero.
        enough: the number of iterations from which on `permitted` is sufficient. The solver then
            stops as soon as all systems have reached it. The default is `most`.

    Raises:
        ConvergenceError: a system has not reached `permitted` after `most` iterations.
    """
    permitted = tolerance if permitted is None else permitted
    enough = most if enough is None else min(enough, most)
    x, r = (torch.zeros_like(b), b) if guess is None else (guess.clone(), b - a.product(guess))
    z = p.solve(r)
    d, size = z, (r * z).sum(-1)
    # The criterion is relative to b also with a guess: a good guess must not tighten it.
    start = size if guess is None else (b * p.solve(b)).sum(-1)
    active, least = torch.arange(len(b), device=b.device), size
    count, done = torch.zeros_like(active), 0
    going = size > 0 if guess is None else size > tolerance**2 * start
    while True:
        if not going.all():
            r, z, d = r[going], z[going], d[going]
            # `x`, `least` and `count` have all rows, and are indexed by `active`.
            size, start, active = size[going], start[going], active[going]
        if not len(active):
            return Solution(x, count)
        if done >= enough and (least[active] <= permitted**2 * start).all():
            return Solution(x, count)
        if done >= most:
            raise ConvergenceError(
                f"expected conjugate gradients to reach a relative residual of {permitted:.1g}, "
                f"got {(least[active] / start).sqrt().max():.1g} after {most} iterations, because "
                "the noise is very small against the signal; use Grid(max_features=8192), whose "
                "features are solved directly, or a larger noise"
            )
        product = a.product(d)
        step = size / (d * product).sum(-1)
        x[active] += step.unsqueeze(-1) * d
        r = r - step.unsqueeze(-1) * product
        z = p.solve(r)
        previous, size = size, (r * z).sum(-1)
        least = least.index_copy(0, active, torch.minimum(least[active], size))
        d = z + (size / previous).unsqueeze(-1) * d
        count[active] += 1
        done += 1
        going = size > tolerance**2 * start


# Functions of B = R⁻¹AR⁻ᵀ by the Lanczos process, where P = R Rᵀ is a preconditioner of A.
#
# The process builds an orthonormal basis V of a Krylov space from a start vector. In this basis, B
# is a tridiagonal matrix T (`_process`). Two quantities follow:
#
#     uᵀ f(B) u ≈ ‖u‖² e₁ᵀ f(T) e₁        Gauss quadrature with the eigenvalues of T as nodes,
#     B^{−½} z  ≈ ‖z‖ V T^{−½} e₁         a draw of the weights.
#
# B is symmetric and has the determinant |A|/|P|. It is never formed: each step takes one product
# with A and two triangular solutions. Vectors are not orthogonalised again: the loss of
# orthogonality repeats eigenvalues of T that have converged, but hardly changes the two quantities.


_BETWEEN_CHECKS = 5  # iterations between checks of convergence
_FIRST = 25  # iterations of a quadrature, before they double
_SMALLEST = 1e-12  # relative norm at which a Krylov space ends
_MOST_KEPT = 2**27  # largest number of stored elements of a basis, 1 GiB


def quadrature(
    a: WeightPrecision,
    p: Preconditioner,
    u: Float[Tensor, "k F"],
    function: Callable[[Float[Tensor, "i"]], Float[Tensor, "i"]],
    most: int,
) -> Float[Tensor, "k"]:
    """Return uᵀ f(B) u / uᵀu for every random row u, by Gauss quadrature, with B = R⁻¹AR⁻ᵀ.

    The number of iterations doubles until the mean over all u changes by less than its standard
    error. Source: Golub & Meurant 2010, *Matrices, Moments and Quadrature*, section 4.1.

    Args:
        a: A.
        p: the preconditioner P.
        u: random rows.
        function: f, applied to eigenvalues.
        most: the largest number of iterations.
    """
    diagonals, besides, last, count = [], [], None, _FIRST
    for step in _process(a, p, u):
        diagonals.append(step.diagonal)
        besides.append(step.beside)
        ended = len(diagonals) == most or not (step.beside > 0).any()
        if len(diagonals) < count and not ended:
            continue
        # The quadrature need not be more accurate than the random sampling. Its change with twice
        # as many iterations is therefore compared with the standard error over the random vectors.
        nodes, vectors = _eigen(diagonals, besides)
        values = (vectors[:, 0].square() * function(nodes)).sum(-1)  # e₁ᵀ f(T) e₁
        error = values.std() / len(values) ** 0.5
        if ended or (last is not None and (values - last).mean().abs() <= error):
            return values
        last, count = values, 2 * count
    raise AssertionError("the Lanczos process does not end")


class _Step(NamedTuple):
    """A step of the Lanczos process."""

    vector: Float[Tensor, "k F"]  # the next vector of the basis
    diagonal: Float[Tensor, "k"]  # the next diagonal element of T
    beside: Float[Tensor, "k"]  # the next off-diagonal element of T


def inverse_root(
    a: WeightPrecision,
    p: Preconditioner,
    z: Float[Tensor, "k F"],
    tolerance: float,
    most: int,
    permitted: float,
) -> Float[Tensor, "k F"]:
    """Return R⁻ᵀB^{−½}z for every row z: draws from N(0, A⁻¹) if z are draws from N(0, I).

    B^{−½}z ≈ ‖z‖ V T^{−½}e₁ (Higham 2008, *Functions of Matrices*, equation 13.4). A basis V of
    more than 1 GiB is not stored. The process then runs twice, first for T and then for the sum
    over V.

    Args:
        a: A.
        p: the preconditioner P.
        z: the rows z.
        tolerance: the relative residual that ends the iterations.
        most: the largest number of iterations.
        permitted: the relative residual that has to be reached after `most` iterations.

    Raises:
        ConvergenceError: if the relative residual exceeds `permitted` after `most` iterations.
    """
    diagonals, besides, basis = [], [], []
    for step in _process(a, p, z):
        diagonals.append(step.diagonal)
        besides.append(step.beside)
        if len(basis) == len(diagonals) - 1 and len(diagonals) * z.numel() <= _MOST_KEPT:
            basis.append(step.vector)
        if len(diagonals) % _BETWEEN_CHECKS and (step.beside > 0).any():
            continue
        nodes, vectors = _eigen(diagonals, besides)
        coefficients = (vectors * (vectors[:, :1] / nodes.sqrt().unsqueeze(1))).sum(-1)  # T^{−½}e₁
        # The coefficient of the newest basis vector, relative to all, serves as the residual.
        last = (coefficients[:, -1].abs() / coefficients.norm(dim=-1)).max().item()
        if last <= tolerance or not (step.beside > 0).any():
            break
        if len(diagonals) >= most:
            if last <= permitted:
                break
            raise ConvergenceError(
                f"expected the Lanczos process to reach a relative residual of {permitted:.1g}, "
                f"got {last:.1g} after {most} iterations; use Grid(max_features=8192), whose "
                "features are solved directly, or a larger noise"
            )
    coefficients = coefficients * z.norm(dim=-1, keepdim=True)
    total = torch.zeros_like(z)
    if len(basis) < len(diagonals):
        steps = islice(_process(a, p, z), len(diagonals))  # the process has no end
        basis = (step.vector for step in steps)
    for vector, factor in zip(basis, coefficients.mT, strict=True):
        total += factor.unsqueeze(-1) * vector
    return p.inverse_root_transposed(total)


def _process(a: WeightPrecision, p: Preconditioner, z: Float[Tensor, "k F"]) -> Iterator[_Step]:
    """The Lanczos process of B from z. It continues with zeros after the end of a Krylov space."""
    vector = z / z.norm(dim=-1, keepdim=True)
    previous, beside = torch.zeros_like(z), z.new_zeros(len(z))
    while True:
        going = vector.any(-1)
        w = p.inverse_root(a.product(p.inverse_root_transposed(vector)))
        w -= beside.unsqueeze(-1) * previous
        # A vector of zeros continues with T = 1 without coupling. e₁ does not reach this block of
        # T, so that rows of a batch may end at different steps.
        diagonal = torch.where(going, (w * vector).sum(-1), 1.0)
        w -= diagonal.unsqueeze(-1) * vector
        norm = w.norm(dim=-1)
        beside = torch.where(going & (norm > _SMALLEST * diagonal), norm, 0.0)
        yield _Step(vector, diagonal, beside)
        previous, vector = vector, w * torch.where(beside > 0, 1 / norm, 0.0).unsqueeze(-1)


def _eigen(
    diagonals: Sequence[Float[Tensor, "k"]], besides: Sequence[Float[Tensor, "k"]]
) -> tuple[Float[Tensor, "k i"], Float[Tensor, "k i i"]]:
    """Eigenvalues, all positive, and eigenvectors of the tridiagonal matrix T of every row."""
    beside = torch.stack(besides, -1)[:, :-1]
    matrix = torch.diag_embed(torch.stack(diagonals, -1)) + torch.diag_embed(beside, -1)
    nodes, vectors = torch.linalg.eigh(matrix)  # reads the lower triangle
    # B is positive definite, but rounding may make an eigenvalue of T negative.
    return torch.maximum(nodes, torch.finfo(nodes.dtype).eps * nodes[:, -1:]), vectors


# A with its preconditioner: A⁻¹b, log|A| with its standard error, and draws from N(0, A⁻¹).
#
# The effort for each result depends on the effect of its error:
#
# - The mean is solved until its error, over the posterior standard deviation, is below
#   `mean_error`. If `operations` do not suffice, `permitted_error` is the limit (`_residuals`).
# - Constants and rough solutions occur only in quadratic forms, with errors of second order in the
#   residual. A residual of 1 % suffices.
# - Variances at few points are solutions of systems. At many points, they are estimated from draws.
# - log|A| = log|P| + tr log B, where log|P| is exact and the trace is estimated with random signs.
#   A better P gives a smaller trace with a smaller error. With all features in the block, the trace
#   is zero.
# - The gradient of log|A| uses the same random signs, as `probes`.
#
# All random numbers start from the same seed. The evidence is therefore a deterministic function of
# the hyperparameters, as a search requires.


_LOOSEST = 1e-2  # largest relative residual of the mean
_FEWEST = 100  # smallest limit of iterations, whatever their cost


@dataclass(frozen=True)
class Accuracy:
    """The effort of iterative solutions.

    Args:
        block: the number of features in the preconditioner's dense block. If the block contains all
            features, nothing is estimated.
        probes: the number of random vectors for estimates of log|A| and its gradient.
        mean_error: the root mean square error of the mean, over the posterior standard deviation.
            Its square, times the smaller of F and the number of values, is the error of yᵀK⁻¹y.
        permitted_error: the same error, if `operations` do not suffice for `mean_error`.
        operations: the approximate number of operations for the mean. 5·10¹⁰ take 10 s on one core.
        variance_operations: the approximate number of operations for solutions that give variances.
            If variances would take more, they are estimated from sample paths. After so many
            operations, iterations end at the permitted residual.
        constants_tolerance: the relative residual of solutions that determine the constant mean.
            The error of the constant mean is of the order of its square.
        variance_tolerance: the relative residual of variances and sample paths. The relative error
            of a variance is about its square.
        permitted_tolerance: the same residual, if `most` iterations do not suffice. Among dense
            tracks and clusters, variances were within 0.4 % at residuals of 0.06.
        random_tolerance: the relative residual of probes, and of paths that estimate variances. It
            is far below their random error of about a tenth.
        paths: the number of sample paths for estimates of variances at many points.
        most: the largest number of iterations.
        seed: the seed of probes and paths.
    """

    block: int = 6000
    probes: int = 8
    mean_error: float = 3e-3
    permitted_error: float = 0.1
    operations: float = 5e10
    variance_operations: float = 5e11
    constants_tolerance: float = 1e-2
    variance_tolerance: float = 1e-4
    permitted_tolerance: float = 1e-2
    random_tolerance: float = 1e-2
    paths: int = 64
    most: int = 2000
    seed: int = 0


class Probes(NamedTuple):
    """z = R u for random signs u, with P⁻¹z and the solutions of A x = z."""

    preconditioned: Float[Tensor, "k F"]
    solution: Solution


@dataclass(frozen=True)
class System:
    """A, P and the accuracy of solutions. Vectors are rows."""

    precision: WeightPrecision
    preconditioner: Preconditioner
    accuracy: Accuracy
    num_values: float  # of the data

    def solve(self, b: Float[Tensor, "k F"]) -> Float[Tensor, "k F"]:
        """A⁻¹b, with the accuracy of variances bᵀA⁻¹b."""
        accuracy = self.accuracy
        limits = accuracy.variance_tolerance, accuracy.most, accuracy.permitted_tolerance
        enough = int(accuracy.variance_operations / (len(b) * self._cost))
        return solve(self.precision, self.preconditioner, b, *limits, enough=enough).x

    def affords(self, solutions: int) -> bool:
        """Whether this number of solutions takes at most `variance_operations`."""
        affordable = self.accuracy.variance_operations / (solutions * self._cost)
        return affordable >= self.accuracy.most or affordable >= self._typical_iterations

    @cached_property
    def _typical_iterations(self) -> int:
        """The number of iterations for a random vector, until its residual is permitted."""
        z = self.preconditioner.root(self._signs[:1])
        return self._solution(z, self.accuracy.permitted_tolerance).iterations.item()

    def solve_mean(self, b: Float[Tensor, "1+p F"]) -> Float[Tensor, "1+p F"]:
        """A⁻¹Bᵀ, to the accuracy of the mean.

        The columns of constants have the same relative residual as the column of y.
        """
        wanted, permitted = self._residuals(b[:1])
        return self._solution(b, wanted, permitted).x

    def solve_roughly(self, b: Float[Tensor, "1+p F"]) -> Float[Tensor, "1+p F"]:
        """A⁻¹Bᵀ, with the accuracy that constant means and their variance need."""
        return self._solution(b, self.accuracy.constants_tolerance).x

    def refined(self, b: Float[Tensor, "1 F"], guess: Float[Tensor, "1 F"]) -> Float[Tensor, "1 F"]:
        """A⁻¹b for data minus their constant mean, to the accuracy of the mean, from a guess."""
        wanted, permitted = self._residuals(b)
        return solve(
            self.precision, self.preconditioner, b, wanted, self._affordable, permitted, guess
        ).x

    def _residuals(self, b: Float[Tensor, "1 F"]) -> tuple[float, float]:
        """The relative residuals for `mean_error` and for `permitted_error`.

        Let e be an error of the weights with the residual r. It changes the field by at most ‖e‖_A
        posterior standard deviations at any point. Its root mean square over n determined
        directions is about ‖e‖_A/√n, with ‖e‖²_A ≈ rᵀP⁻¹r.
        """
        size = (b * self.preconditioner.solve(b)).sum().sqrt().item()
        directions = min(self.num_values, len(self.preconditioner.diagonal))
        errors = self.accuracy.mean_error, self.accuracy.permitted_error
        # From ‖r‖ ≤ tolerance ‖b‖ and ‖r‖ ≈ ‖e‖_A, the tolerance is the permitted ‖e‖_A over ‖b‖.
        wanted, permitted = (
            min(error * directions**0.5 / size, _LOOSEST) if size else _LOOSEST for error in errors
        )
        return wanted, max(wanted, permitted)

    @property
    def _affordable(self) -> int:
        """The largest number of iterations for one system."""
        count = int(self.accuracy.operations / self._cost)
        return min(max(count, _FEWEST), self.accuracy.most)

    @property
    def _cost(self) -> float:
        """The operations of one iteration, for Fourier transforms and triangular solutions."""
        images, p = self.precision.images, self.precision.directions.shape[0]
        transforms = 5 * p * images.size * math.log2(images.size)
        return transforms + 2 * len(self.preconditioner.block) ** 2

    def draw(self, z: Float[Tensor, "k F"], tolerance: float | None = None) -> Float[Tensor, "k F"]:
        """R⁻ᵀB^{−½}z, draws from N(0, A⁻¹) if z are draws from N(0, I)."""
        tolerance = tolerance or self.accuracy.variance_tolerance
        limits = tolerance, self.accuracy.most, self.accuracy.permitted_tolerance
        return inverse_root(self.precision, self.preconditioner, z, *limits)

    @cached_property
    def draws(self) -> tuple[Float[Tensor, "k F"], Float[Tensor, "k F"]]:
        """Draws from N(0, A⁻¹) and N(0, P⁻¹), from the same random numbers."""
        shape = self.accuracy.paths, len(self.preconditioner.diagonal)
        z = torch.randn(*shape, generator=self._generator, dtype=torch.float64)
        z = z.to(self.preconditioner.diagonal.device)
        draws = self.draw(z, self.accuracy.random_tolerance)
        return draws, self.preconditioner.inverse_root_transposed(z)

    @cached_property
    def probes(self) -> Probes:
        """The probes of the gradient of log|A|."""
        z = self.preconditioner.root(self._signs)
        solution = self._solution(z, self.accuracy.random_tolerance)
        return Probes(self.preconditioner.solve(z), solution)

    @cached_property
    def logdet_ratio(self) -> tuple[Float[Tensor, ""], float]:
        """log|A| − log|P| = tr log B, and its standard error over the probes.

        The estimate is stochastic Lanczos quadrature (Ubaru, Chen & Saad 2017) of
        uᵀ(log B)u − uᵀ(B − I)u. The second term has the mean zero, since B has the diagonal of an
        identity, and equals it in the block.
        """
        parts = self.precision, self.preconditioner, self._signs
        values = quadrature(*parts, lambda nodes: nodes.log() - (nodes - 1), self.accuracy.most)
        values = values * len(self.preconditioner.diagonal)
        error = values.std() / len(values) ** 0.5
        return values.mean(), error.item()

    @property
    def _signs(self) -> Float[Tensor, "k F"]:
        """The random signs u of the probes."""
        shape = self.accuracy.probes, len(self.preconditioner.diagonal)
        signs = torch.randint(0, 2, shape, generator=self._generator).double() * 2 - 1
        return signs.to(self.preconditioner.diagonal.device)

    def _solution(
        self, b: Float[Tensor, "k F"], tolerance: float, permitted: float | None = None
    ) -> Solution:
        parts = self.precision, self.preconditioner
        return solve(*parts, b, tolerance, self.accuracy.most, permitted)

    @property
    def _generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.accuracy.seed)


# BᵀA⁻¹B and log|A| − log|P| with their derivatives, from solutions of A x = b.
#
# With U = A⁻¹B, and random z with E[z zᵀ] = P,
#
#     ∂ BᵀA⁻¹B = ∂Bᵀ U + Uᵀ ∂B − Uᵀ ∂A U ,
#     ∂ (log|A| − log|P|) = tr(A⁻¹∂A) − tr(P⁻¹∂P) = E[(A⁻¹z − P⁻¹z)ᵀ ∂A P⁻¹z] ,
#
# The last equation holds because A and P have the same block and diagonal, so that
# E[zᵀP⁻¹ ∂A P⁻¹z] = tr(P⁻¹∂P). The derivative of log|P| is exact.
#
# The difference A⁻¹z − P⁻¹z is small for a good P. Few probes then give a gradient with a small
# variance. Both functions return only derivatives of bilinear forms uᵀAv. The method
# `WeightPrecision.derivatives` computes them with images: neither A nor ∂A is formed. The gradient
# is an estimate of that of the exact function. The value of the log-determinant is a different
# estimate (Lanczos), so that the two agree only up to random errors.


class InvQuad(Function):
    """BᵀA⁻¹B. Arguments: the system, B (F, k), M (F, p), and each Q and N^{−½}Φ of A."""

    @staticmethod
    def forward(ctx, system: System, b: Float[Tensor, "F k"], *parts: Tensor):
        u = system.solve_mean(b.mT)
        ctx.system = system
        ctx.save_for_backward(u)
        residual = b - system.precision.product(u).mT
        return u @ b + u @ residual  # the error is quadratic in the residual

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        (u,) = ctx.saved_tensors
        # BᵀA⁻¹B is symmetric, so that only the symmetric part of its gradient matters.
        weighted = 0.5 * (grad + grad.mT) @ u
        return None, 2 * weighted.mT, *_derivatives(ctx.system, -weighted, u)


class LogdetRatio(Function):
    """log|A| − log|P|. Arguments: the system, M (F, p), and each Q and N^{−½}Φ of A."""

    @staticmethod
    def forward(ctx, system: System, *parts: Tensor):
        ctx.system = system
        return system.logdet_ratio[0].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        preconditioned, solution = ctx.system.probes
        difference = grad / len(preconditioned) * (solution.x - preconditioned)
        return None, *_derivatives(ctx.system, difference, preconditioned)


def _derivatives(system: System, left: Tensor, right: Tensor) -> list[Tensor]:
    """The derivatives of Σ uᵀAv for rows u of `left` and v of `right`."""
    directions, bases, rows = system.precision.derivatives(left, right)
    return [directions, *bases, *rows]


class EstimatedEvidence(Evidence):
    """An evidence with the standard error of its log-determinant.

    Both are computed at their first use, unless the log-determinant is given with its derivatives.
    """

    system: System
    ratio: Float[Tensor, ""] | None

    @classmethod
    def of(
        cls,
        exact: Evidence,
        system: System,
        ratio: Float[Tensor, ""] | None = None,
    ) -> "EstimatedEvidence":
        """The evidence, from an evidence with |P| in place of |A|, and from log|A| − log|P|."""
        evidence = cls(exact.quad, exact.logdet, exact.seen)
        evidence.system, evidence.ratio = system, ratio
        return evidence

    def __iter__(self) -> Iterator[Tensor]:
        return iter((self.quad, self.logdet, self.seen))

    @property
    def logdet(self) -> Float[Tensor, ""]:
        return self[1] + (self.system.logdet_ratio[0] if self.ratio is None else self.ratio)

    @property
    def logdet_error(self) -> float:
        return self.system.logdet_ratio[1]


# The posterior of the weights of lattice features, by iterations.
#
# 1. The mean is φ(x) θ with the solved weights θ, as for any features.
# 2. Up to 400 variances take one linear system each.
# 3. More variances are estimated from 64 draws of the weights. A mean square of 64 draws has a
#    relative standard error of √(2/64). The same random numbers also give draws under P, whose
#    exact variance is known. The ratio of the two mean squares corrects the exact variance under P,
#    and cancels most of the random error.
# 4. The exact variance under P is a sum over the dense block, by its factor, and over the other
#    features, for which P is diagonal. The second sum is one transform of coefficients of cos² and
#    sin², at twice the frequencies.
# 5. For several outputs, ratios become matrices: `_scaled` uses Cholesky factors, so that the
#    result is symmetric and positive semidefinite.


_NOTHING = 1e-20  # share of the largest variance that counts as zero
_SOLVED = 400  # number of variances up to which each takes a linear system


@dataclass(frozen=True)
class IterativePosterior(GeneralPosterior):
    """The posterior with E[θ] = A⁻¹b and Cov[θ] = A⁻¹, where linear systems are solved iteratively.

    Covariances, and up to 400 variances, are computed by solving linear systems with A. The limit
    of 400 is lower if the iterations are many or expensive. If more variances are needed at once,
    they are estimated from random draws, with the preconditioner P ≈ A as a control. The variance
    of the field is known exactly if the weights have the covariance P⁻¹.

    Let s be the field at x for weights drawn with the covariance A⁻¹. Let c be the field for
    weights drawn with the covariance P⁻¹, from the same random numbers. With the means ⟨s²⟩ and
    ⟨c²⟩ over S draws,

        Var f(x) ≈ φ(x) P⁻¹ φ(x)ᵀ ⟨s²⟩ / ⟨c²⟩ .

    If the squares s² and c² have the correlation r, the relative standard error of this variance is
    √(4(1 − r)/S), which is at most √(4/S). The standard deviation has half this relative error.

    Attributes:
        system: A and P, which solve linear systems and draw weights.
    """

    system: System

    def weight_covariance(self, v: Tensor) -> Tensor:
        return self.system.solve(v.mT).mT

    def weight_root(self, v: Tensor) -> Tensor:
        return self.system.draw(v.mT).mT

    def root_of(self, features: Tensor) -> Tensor:
        return cholesky(self.covariance_of(features))

    def covariance_of(self, features: Tensor) -> Tensor:
        covariance = features @ self.system.solve(features).mT
        return 0.5 * (covariance + covariance.mT)

    def variance_of(self, features: Tensor) -> Tensor:
        return (features * self.system.solve(features)).sum(-1)

    def blocks_of(self, features: Tensor, q: int) -> Tensor:
        solved = self.system.solve(features).unflatten(-2, (-1, q))
        blocks = features.unflatten(-2, (-1, q)) @ solved.mT
        return 0.5 * (blocks + blocks.mT)

    def covariance(self, x: Tensor) -> Tensor:
        x, expansion, columns = x.double(), self.expansion, []
        for rows in chunks(x, self._width):
            solved = self.system.solve(expansion.features(x[rows])).mT
            values = expansion.phi.apply(x, expansion.column_weights(solved))  # (n, p·k)
            columns.append(values.unflatten(-1, (self.num_outputs, -1)).flatten(0, 1))
        covariance = torch.cat(columns, dim=-1)
        return 0.5 * (covariance + covariance.mT)

    def root(self, x: Tensor) -> Tensor:
        return cholesky(self.covariance(x))

    def variance(self, x: Tensor) -> Tensor:
        if not self._estimates(x):
            return super().variance(x)
        return self._estimated_blocks(x.double()).diagonal(dim1=-1, dim2=-2)

    def blocks(self, x: Tensor) -> Tensor:
        return self._estimated_blocks(x.double()) if self._estimates(x) else super().blocks(x)

    def apply(self, symbol: Symbol, space: Sequence[int]) -> FieldDistribution:
        image = super().apply(symbol, space)
        plain = symbol.reference is None and not image.expansion.directions.is_complex()
        if plain:
            return replace(self, expansion=image.expansion)
        return EstimatedSymbol(**{f.name: getattr(image, f.name) for f in fields(image)})

    def estimates(self, values: int) -> bool:
        """Return whether this number of variances is estimated, because solving is expensive."""
        return values > _SOLVED or not self.system.affords(values)

    def estimated_from(self, features: Float[Tensor, "n*q F"], q: int) -> Float[Tensor, "n q q"]:
        """Estimate the diagonal blocks (q, q) of Φ A⁻¹ Φᵀ, for features Φ (n·q, F)."""

        def products(values: Float[Tensor, "n*q k"]) -> Float[Tensor, "n q q"]:
            values = values.unflatten(0, (-1, q))
            return values @ values.mT

        known = products(self.system.preconditioner.inverse_root(features))
        return _scaled(known, *(products(features @ draws.mT) for draws in self.system.draws))

    def _estimates(self, x: Float[Tensor, "n d"]) -> bool:
        """Return whether variances at x are estimated. This requires columns of one lattice."""
        lattice = self.expansion.phi.on_lattice
        return lattice and self.estimates(len(x) * self.num_outputs)

    def _estimated_blocks(self, x: Float[Tensor, "n d"]) -> Float[Tensor, "n p p"]:
        known = self._block_posterior.blocks(x) + self._rest_blocks(x)
        return _scaled(known, *(self._mean_products(x, draws) for draws in self.system.draws))

    @property
    def _block_posterior(self) -> PrimalPosterior:
        """The distribution of the part of the field from the dense block, for Cov[θ] = P⁻¹."""
        p = self.system.preconditioner
        variance = torch.ones_like(p.diagonal[: len(p.columns)])
        part = self.expansion.select(p.columns, variance)
        return PrimalPosterior(part, self.theta[p.block], self.response[p.block], p.factor)

    def _rest_blocks(self, x: Float[Tensor, "n d"]) -> Float[Tensor, "n p p"]:
        """Σ φ_f(x)² m_f m_fᵀ / A_ff over the features that are not in the block.

        The squares are 2 cos² a = 1 + cos 2a and 2 sin² a = 1 − cos 2a.
        """
        expansion: FeatureExpansion = self.expansion
        phi: LatticeColumns = expansion.phi
        weighted = expansion.directions * self.system.preconditioner.rest.unsqueeze(-1)
        outer = weighted.unsqueeze(-1) * expansion.directions.unsqueeze(-2)  # (F, p, p)
        cosines, sines = (0.5 * expansion.scatter(outer.flatten(1))).chunk(2)
        twice = LatticeColumns.of(2 * phi.indices, phi.spacing, phi.origin)
        weights = torch.cat([cosines - sines, torch.zeros_like(sines)])
        values = twice.apply(x, weights) + (cosines + sines).sum(0)
        return values.unflatten(-1, (self.num_outputs, -1))

    def _mean_products(
        self, x: Float[Tensor, "n d"], draws: Float[Tensor, "k F"]
    ) -> Float[Tensor, "n p p"]:
        """The mean ⟨f fᵀ⟩ over the fields f of draws of the weights."""
        values = self.expansion.phi.apply(x, self.expansion.column_weights(draws.mT))
        values = values.unflatten(-1, (self.num_outputs, -1))
        return values @ values.mT / len(draws)


@dataclass(frozen=True)
class EstimatedSymbol(SymbolPosterior):
    """Q f under an `IterativePosterior`, with the same estimates of variances at many points."""

    posterior: IterativePosterior

    def variance(self, x: Tensor) -> Tensor:
        if not self.posterior.estimates(len(x) * self.num_outputs):
            return super().variance(x)
        return self._estimated_blocks(x).diagonal(dim1=-1, dim2=-2)

    def blocks(self, x: Tensor) -> Tensor:
        if not self.posterior.estimates(len(x) * self.num_outputs):
            return super().blocks(x)
        return self._estimated_blocks(x)

    def _estimated_blocks(self, x: Float[Tensor, "n d"]) -> Float[Tensor, "n q q"]:
        def flat(part: Float[Tensor, "n d"]) -> Float[Tensor, "n q*q"]:
            return self.posterior.estimated_from(self.features(part), self.num_outputs).flatten(-2)

        blocks = by_chunks(flat, x.double(), self._width)
        return blocks.unflatten(-1, (self.num_outputs, self.num_outputs))


def _scaled(
    known: Float[Tensor, "n p p"],
    posterior: Float[Tensor, "n p p"],
    preconditioned: Float[Tensor, "n p p"],
) -> Float[Tensor, "n p p"]:
    """L K⁻¹ ⟨s sᵀ⟩ K⁻ᵀ Lᵀ, with the Cholesky factors L of the blocks under P⁻¹ and K of ⟨c cᵀ⟩.

    For one output, it is the equation of `IterativePosterior`. It is zero at a reference point.
    """
    traces = known.diagonal(dim1=-1, dim2=-2).sum(-1)
    # A potential is zero at its reference point: its block has no Cholesky factor there.
    at_reference = (traces <= _NOTHING * traces.max())[:, None, None]
    eye = torch.eye(known.shape[-1]).to(known)
    left, right = (
        cholesky(torch.where(at_reference, eye, block)) for block in (known, preconditioned)
    )
    ratio = torch.linalg.solve_triangular(right, left, upper=False, left=False)  # L K⁻¹
    return ratio @ posterior @ ratio.mT


# The normal equations of lattice features, solved by iterations.
#
# The evidence of a search solves for y and the constants to the accuracy of the mean. The posterior
# needs the constant mean c with the largest evidence before its right-hand side y − Hc is known:
#
# 1. Solve roughly for all columns of B. This gives c and its variance to second order.
# 2. Refine the combination b(y) − B c to the accuracy of the mean, from the rough solution.
# 3. Put the refined solution into the column of y. All contrasts of the solutions then contain it.


@dataclass(frozen=True)
class Iterative(WeightEquations):
    """The primal algebra of features on a lattice, without A."""

    accuracy: Accuracy = field(default_factory=Accuracy)

    def evidence(self) -> Evidence:
        system, logdet = self._system
        quad = InvQuad.apply(system, self.b, *self._parts)
        ratio = LogdetRatio.apply(system, *self._parts)
        return EstimatedEvidence.of(self.evidence_of(quad, logdet), system, ratio)

    def posterior(self, mean):
        system, logdet = self._system
        b = self.b

        def evidence_of_solution(u: Tensor) -> EstimatedEvidence:
            quad = u @ (2 * b - system.precision.product(u).mT)  # quadratic in the residual
            exact = self.evidence_of(0.5 * (quad + quad.mT), logdet)
            return EstimatedEvidence.of(exact, system)

        u = system.solve_roughly(b.mT)
        contrast = evidence_of_solution(u).contrast(mean).mT  # y minus its mean
        # The coefficient of y in the contrast is one. After this change of the column of y,
        # contrast @ u equals the refined solution.
        u[:1] += system.refined(contrast @ b.mT, contrast @ u) - contrast @ u
        evidence = evidence_of_solution(u)
        theta = mean_and_response(u.mT @ evidence.contrasts(mean))
        return IterativePosterior(self.expansion, *theta, system), evidence

    @cached_property
    def _features(self) -> list[Float[Tensor, "M F"]]:
        return [features for features, *_ in self.whitened]

    @cached_property
    def _bases(self) -> list[Float[Tensor, "p p"]]:
        """Q = P E for every weight of every group, for all p components."""
        bases = []
        for statistics, noise in self.groups:
            pattern = statistics.pattern
            precision = pattern.precision(noise.precision)
            for e in pattern.basis(precision):
                bases.append(pattern.embed(pattern.embed(precision @ e).mT))
        return bases

    @property
    def _parts(self) -> list[Tensor]:
        """The tensors that A depends on."""
        return [self.expansion.directions, *self._bases, *self._features]

    @cached_property
    def _system(self) -> tuple[System, Float[Tensor, ""]]:
        """A with its preconditioner P, and log|P|."""
        parts = self.expansion, self.groups
        preconditioner, logdet = precondition(*parts, self._features, self.accuracy.block)
        precision = WeightPrecision.of(*parts, self._bases, self._features)
        num_values = sum(statistics.num_values for statistics, _ in self.groups)
        num_values += sum(len(features) for features in self._features)
        return System(precision, preconditioner, self.accuracy, num_values), logdet
