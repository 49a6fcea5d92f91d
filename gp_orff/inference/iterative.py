"""The primal algebra without its matrix, on frequency lattices of many features.

A = I + Σ C[c,c] ∘ (M P Mᵀ) is a sum of Toeplitz and Hankel matrices between diagonal ones: a
product with it takes two fast Fourier transforms for each output. A preconditioner with a dense
block for the features that the data determine best makes conjugate gradients fast; the Lanczos
process gives log|A| with a standard error, and A^{−½}z. From these follow the
evidence and the posterior, as the normal equations of `equations`.
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

# Fields of a lattice's columns on a periodic grid of points: weights ↔ images, by FFT.
#
# A field φ(x) w of columns cos⟨k, θ⟩ and sin⟨k, θ⟩ is a trigonometric polynomial. Its values at the
# points θ_u = 2πu/n are its image. For sums T(q) = Σ_n a_n exp(i⟨q, θ_n⟩) and n > 4m,
#
#     Σ_n a_n f(x_n) g(x_n) = Σ_u t(u) f(u) g(u) ,     t(u) = n⁻¹ Σ_q T(q) exp(−i⟨q, θ_u⟩) ,
#
# for any two such fields: products with C = φᵀ diag(a) φ are products with t on the grid.
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
# The real FFT stores the half k_d ≥ 0 of the last axis. A lattice has one of each pair ±k but not
# always the one in this half, so a frequency with k_d < 0 is replaced by its negative, which
# changes the sign of its sine. On the plane k_d = 0 both ±k belong to the stored half, and the
# second is set to the conjugate of the first.


@dataclass(frozen=True)
class Images:
    """Weights of features, one for each of F columns ↔ images on n_1 × … × n_d points.

    Fourier coefficients are in the layout of a real FFT, where the last index is not negative: of
    each pair ±k, the one with k_d ≥ 0.
    """

    modes: tuple[int, ...]  # m_i
    points: tuple[int, ...]  # n_i
    slots: Int[Tensor, "F"]  # of the real or imaginary part of a feature's coefficient
    scale: Float[Tensor, "F"]  # of a weight, as a part of the coefficient: ±½, or 1 at k = 0
    signs: Float[Tensor, "F"]  # of Σ_n a_n f(x_n) φ(x_n), as a part of the transform of t f
    plane: Int[Tensor, "k"]  # coefficients with k_d = 0 that are set
    mirrored: Int[Tensor, "k"]  # those at −k

    @classmethod
    def of(cls, expansion: FeatureExpansion) -> "Images":
        """The images of the features' columns, which are those of a lattice."""
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
        """The values φ(θ_u) w on the grid, flat."""
        batch, extents = weights.shape[:-1], _half(self.points, self.modes)
        parts = weights.new_zeros(*batch, 2 * prod(extents))
        # Several features may share one column, so their weights are added.
        parts.scatter_add_(-1, self.slots.expand(*batch, -1), weights * self.scale)
        values = torch.view_as_complex(parts.unflatten(-1, (-1, 2)))
        values[..., self.mirrored] = values[..., self.plane].conj()
        return self._synthesis(values.unflatten(-1, extents)).flatten(len(batch))

    def adjoint(self, images: Float[Tensor, "*b n"]) -> Float[Tensor, "*b F"]:
        """Σ_u g(u) φ(θ_u) for the column of every feature."""
        # The order of `of_weights` reversed: the real transform of the last axis first, cut off at
        # m_d.
        axes = range(-len(self.points), -1)
        values = torch.fft.rfft(images.unflatten(-1, self.points))[..., : self.modes[-1] + 1]
        if len(self.points) > 1:
            values = torch.fft.fftn(values, dim=tuple(axes))
        parts = torch.view_as_real(values.contiguous()).flatten(images.dim() - 1)
        return parts[..., self.slots] * self.signs

    def of_sums(self, sums: Complex[Tensor, "q"]) -> Float[Tensor, "n"]:
        """t(u) from T, a flat array over |q_i| ≤ 2 m_i."""
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
    """The shape of the coefficients, of which no last index exceeds m_d."""
    return (*points[:-1], modes[-1] + 1)


def _places(
    k: Int[Tensor, "D d"], points: tuple[int, ...], extents: tuple[int, ...]
) -> Int[Tensor, "D"]:
    """The positions of frequencies k in a flat array of coefficients."""
    place = torch.zeros_like(k[:, 0])
    for index, n, extent in zip(k.mT, points, extents, strict=True):
        place = place * extent + index % n
    return place


# A = I + Σ C[c,c] ∘ (M P Mᵀ) + Σ ΦᵀN⁻¹Φ of lattice features, by products; vectors are rows.
#
# A product A v takes the steps of the images for every output: the weights v_f times direction m_f
# give p images, one for each component of the field. At each grid point these p numbers are
# multiplied by the p×p matrix Σ Q t, and the p resulting images are transformed back and combined
# by the directions. All terms of A with a lattice share these transforms, because their t are added
# first.


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
            # uᵀAv is bilinear in M through both fields: the derivative has a term for each.
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


# P ≈ A: a dense block for the features of which the data tell most, the diagonal of A beyond.
#
# Where the data determine features well, A is far from the identity and its eigenvalues are spread
# over many orders of magnitude; these features go into a dense block that is factorised. For the
# others A is close to its diagonal. R⁻¹AR⁻ᵀ then has an identity in the block and a unit diagonal
# beyond, and eigenvalues near one, on which conjugate gradients converge in few iterations.
# Frequencies enter the block whole, with cosine and sine, because the columns of a lattice are
# selected so.


@dataclass(frozen=True)
class Preconditioner:
    """P = R Rᵀ, where R is a Cholesky factor for some features, and diagonal for the others.

    Vectors are rows.
    """

    columns: Int[Tensor, "2*k"]  # of the block's features: the cosines of k frequencies, the sines
    block: Int[Tensor, "m"]  # the features of the block
    factor: Float[Tensor, "m m"]  # of A at these features
    diagonal: Float[Tensor, "F"]  # of A, and 1 at the features of the block

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

    The block has the frequencies at which the diagonal of A is largest: those where the signal
    exceeds the noise most.
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
    # P itself is a constant of the iterations; only log|P| is differentiated.
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
    """The columns of the frequencies of largest diagonal that have at most `size` features."""
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
# 2. Systems with ‖r‖ ≤ tolerance ‖b‖ leave the batch; `active` keeps their rows in x. Norms are
#    rᵀP⁻¹r throughout, since this approximates eᵀAe, the error in posterior standard deviations.
# 3. Return if none is left, or if `enough` iterations are done and every remaining system has
#    reached what is permitted at some time; raise if `most` are done.
# 4. Otherwise take a step along d, update r by recursion, and make the next d conjugate to the
#    last.
#
# Right-hand sides are independent: this is no block method, and a system converges as it would
# alone.


class ConvergenceError(RuntimeError):
    """Conjugate gradients did not reach their tolerance."""


class Solution(NamedTuple):
    """A⁻¹b, and the iterations it took."""

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
    """A⁻¹b for every row b, until ‖r‖ ≤ tolerance ‖b‖ in the norm rᵀP⁻¹r.

    The preconditioned method of Saad (2003, algorithm 9.1), in which a system that has converged
    takes no further part.

    Args:
        a, p: A and P.
        b: the right-hand sides.
        tolerance: the relative residual that ends the iterations.
        most: iterations, at most.
        permitted: the relative residual that has to be reached by then; the tolerance if None. It
            may have been before: residuals go up and down, the error in the norm eᵀAe only down.
        enough: iterations after which what is permitted ends them; `most` if None.
        guess: of the solution, from which iterations start; zero if None.

    Raises:
        ConvergenceError: a system has not reached what is permitted after `most` iterations.
    """
    permitted = tolerance if permitted is None else permitted
    enough = most if enough is None else min(enough, most)
    x, r = (torch.zeros_like(b), b) if guess is None else (guess.clone(), b - a.product(guess))
    z = p.solve(r)
    d, size = z, (r * z).sum(-1)
    # Relative to b also with a guess: a good guess must not tighten the criterion.
    start = size if guess is None else (b * p.solve(b)).sum(-1)
    active, least = torch.arange(len(b), device=b.device), size
    count, done = torch.zeros_like(active), 0
    going = size > 0 if guess is None else size > tolerance**2 * start
    while True:
        if not going.all():
            r, z, d = r[going], z[going], d[going]
            # `x`, `least` and `count` stay at full length and are indexed by `active`.
            size, start, active = size[going], start[going], active[going]
        if not len(active):
            return Solution(x, count)
        if done >= enough and (least[active] <= permitted**2 * start).all():
            return Solution(x, count)
        if done >= most:
            raise ConvergenceError(
                f"expected conjugate gradients to reach a relative residual of {permitted:.1g}, "
                f"got {(least[active] / start).sqrt().max():.1g} after {most} iterations: the "
                "noise is very small against the signal that these features describe; use fewer "
                "features, Grid(max_features=8192), which are solved directly, or a larger noise"
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
# The process builds, from a start vector, an orthonormal basis V of a Krylov space in which B is a
# tridiagonal matrix T (`_process`). Two quantities follow from T alone or with V:
#
#     uᵀ f(B) u ≈ ‖u‖² e₁ᵀ f(T) e₁        Gauss quadrature with the eigenvalues of T as nodes,
#     B^{−½} z  ≈ ‖z‖ V T^{−½} e₁         a draw of the weights.
#
# B is symmetric and has the determinant |A|/|P|; it is never formed, and each step takes one
# product with A and two triangular solutions. Vectors are not orthogonalised again: the loss of
# orthogonality repeats eigenvalues of T that have converged, but barely changes these two
# quantities.


_BETWEEN_CHECKS = 5  # iterations
_FIRST = 25  # iterations of a quadrature, before they double
_SMALLEST = 1e-12  # relative norm at which a Krylov space has ended
_MOST_KEPT = 2**27  # numbers of a basis, 1 GiB


def quadrature(
    a: WeightPrecision,
    p: Preconditioner,
    u: Float[Tensor, "k F"],
    function: Callable[[Float[Tensor, "i"]], Float[Tensor, "i"]],
    most: int,
) -> Float[Tensor, "k"]:
    """uᵀ f(B) u / uᵀu for every random row u, by Gauss quadrature (Golub & Meurant 2010, Matrices,
    Moments and Quadrature, section 4.1).

    Iterations double until their mean over all u changes by less than its standard error.
    """
    diagonals, besides, last, count = [], [], None, _FIRST
    for step in _process(a, p, u):
        diagonals.append(step.diagonal)
        besides.append(step.beside)
        ended = len(diagonals) == most or not (step.beside > 0).any()
        if len(diagonals) < count and not ended:
            continue
        # The change with twice as many iterations is compared with the standard error over the
        # random vectors: a quadrature more exact than the sampling would be of no use.
        nodes, vectors = _eigen(diagonals, besides)
        values = (vectors[:, 0].square() * function(nodes)).sum(-1)  # e₁ᵀ f(T) e₁
        error = values.std() / len(values) ** 0.5
        if ended or (last is not None and (values - last).mean().abs() <= error):
            return values
        last, count = values, 2 * count
    raise AssertionError("the Lanczos process does not end")


class _Step(NamedTuple):
    """A step of the Lanczos process."""

    vector: Float[Tensor, "k F"]  # of the basis
    diagonal: Float[Tensor, "k"]
    beside: Float[Tensor, "k"]  # the next element beside the diagonal


def inverse_root(
    a: WeightPrecision,
    p: Preconditioner,
    z: Float[Tensor, "k F"],
    tolerance: float,
    most: int,
    permitted: float,
) -> Float[Tensor, "k F"]:
    """R⁻ᵀB^{−½}z for every row z: draws from N(0, A⁻¹) if z are draws from N(0, I).

    B^{−½}z ≈ ‖z‖ V T^{−½}e₁ (Higham 2008, Functions of Matrices, equation 13.4). A basis V of more
    than 1 GiB is not kept: the process then runs twice, first for T, then for the sum over V.

    Args:
        a, p, z: as above.
        tolerance: the relative residual that ends the iterations.
        most: iterations, at most.
        permitted: the relative residual that has to be reached by then.

    Raises:
        ConvergenceError: it is not.
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
                f"got {last:.1g} after {most} iterations; use fewer features, "
                "Grid(max_features=8192), which are solved directly, or a larger noise"
            )
    coefficients = coefficients * z.norm(dim=-1, keepdim=True)
    total = torch.zeros_like(z)
    if len(basis) < len(diagonals):
        steps = islice(_process(a, p, z), len(diagonals))  # which goes on for ever
        basis = (step.vector for step in steps)
    for vector, factor in zip(basis, coefficients.mT, strict=True):
        total += factor.unsqueeze(-1) * vector
    return p.inverse_root_transposed(total)


def _process(a: WeightPrecision, p: Preconditioner, z: Float[Tensor, "k F"]) -> Iterator[_Step]:
    """The Lanczos process of B from z; it goes on with zeros where a Krylov space has ended."""
    vector = z / z.norm(dim=-1, keepdim=True)
    previous, beside = torch.zeros_like(z), z.new_zeros(len(z))
    while True:
        going = vector.any(-1)
        w = p.inverse_root(a.product(p.inverse_root_transposed(vector)))
        w -= beside.unsqueeze(-1) * previous
        # A vector of zeros continues with T = 1 and no coupling: a block of T that e₁ does not
        # reach, so rows of a batch may end at different steps.
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
    nodes, vectors = torch.linalg.eigh(matrix)  # which reads the lower triangle
    # B is positive definite; rounding may still give an eigenvalue of T below zero.
    return torch.maximum(nodes, torch.finfo(nodes.dtype).eps * nodes[:, -1:]), vectors


# A with its preconditioner: A⁻¹b, log|A| with its standard error, and draws from N(0, A⁻¹).
#
# How much each result costs follows from how much its error matters:
#
# - The mean is solved until its error, over the posterior standard deviation, is below
#   `mean_error`, and at least to `permitted_error` if `operations` do not suffice (`_residuals`).
# - Constants and rough solutions enter quadratic forms only, whose error is of second order in the
#   residual: a residual of 1 % suffices.
# - Variances at few points are solved for; at many they are estimated from draws.
# - log|A| = log|P| + tr log B, where log|P| is exact and the trace is estimated with random signs.
#   The better P, the smaller the trace and its error. With all features in the block it vanishes.
# - The gradient of log|A| uses the same random signs, as `probes`.
#
# Every random number comes from the seed again, so that the evidence is a deterministic function of
# the hyperparameters, which a search needs.


_LOOSEST = 1e-2  # relative residual of the mean
_FEWEST = 100  # iterations, whatever they cost


@dataclass(frozen=True)
class Accuracy:
    """The effort of iterative solutions.

    Args:
        block: features of the preconditioner's dense block. If it holds all, nothing is estimated.
        probes: random vectors that estimate log|A| and its gradient.
        mean_error: of the mean, root mean square over the posterior's standard deviation. Its
            square, times the smaller of F and the number of values, is the error of yᵀK⁻¹y.
        permitted_error: likewise, where `operations` do not suffice for that.
        operations: for the mean, about; 5·10¹⁰ take 10 s on one core.
        variance_operations: for solutions that give variances, about. Those of more points are
            estimated from paths, and iterations beyond them end at the permitted residual.
        constants_tolerance: relative residual of constants instead of the data, and of the data
            that determine the best ones. The error of these is of the order of its square.
        variance_tolerance: relative residual of variances and sample paths. The error of a
            variance is of the order of its square.
        permitted_tolerance: likewise, where the most iterations do not suffice for that. Among
            dense tracks and clusters, variances were within 0.4 % at residuals of 0.06.
        random_tolerance: relative residual of probes, and of paths that estimate variances: far
            below their random error, which is of the order of a tenth.
        paths: sample paths that estimate variances at many points.
        most: iterations, at most.
        seed: of probes and paths.
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
    """A, P and the accuracy of solutions; vectors are rows."""

    precision: WeightPrecision
    preconditioner: Preconditioner
    accuracy: Accuracy
    num_values: float  # of the data

    def solve(self, b: Float[Tensor, "k F"]) -> Float[Tensor, "k F"]:
        """A⁻¹b, so accurate that bᵀA⁻¹b is."""
        accuracy = self.accuracy
        limits = accuracy.variance_tolerance, accuracy.most, accuracy.permitted_tolerance
        enough = int(accuracy.variance_operations / (len(b) * self._cost))
        return solve(self.precision, self.preconditioner, b, *limits, enough=enough).x

    def affords(self, solutions: int) -> bool:
        """Whether so many solutions take no more than the operations for variances."""
        affordable = self.accuracy.variance_operations / (solutions * self._cost)
        return affordable >= self.accuracy.most or affordable >= self._typical_iterations

    @cached_property
    def _typical_iterations(self) -> int:
        """Of a random vector, until its residual is permitted."""
        z = self.preconditioner.root(self._signs[:1])
        return self._solution(z, self.accuracy.permitted_tolerance).iterations.item()

    def solve_mean(self, b: Float[Tensor, "1+p F"]) -> Float[Tensor, "1+p F"]:
        """A⁻¹Bᵀ, to the accuracy of the mean; the columns of constants get the relative residual of
        that of y."""
        wanted, permitted = self._residuals(b[:1])
        return self._solution(b, wanted, permitted).x

    def solve_roughly(self, b: Float[Tensor, "1+p F"]) -> Float[Tensor, "1+p F"]:
        """A⁻¹Bᵀ, so accurate that BᵀA⁻¹B determines the best constants and their variance."""
        return self._solution(b, self.accuracy.constants_tolerance).x

    def refined(self, b: Float[Tensor, "1 F"], guess: Float[Tensor, "1 F"]) -> Float[Tensor, "1 F"]:
        """A⁻¹b of data less their mean, to the accuracy of the mean, from a guess."""
        wanted, permitted = self._residuals(b)
        return solve(
            self.precision, self.preconditioner, b, wanted, self._affordable, permitted, guess
        ).x

    def _residuals(self, b: Float[Tensor, "1 F"]) -> tuple[float, float]:
        """The relative residuals of the wanted and of the permitted error of the mean.

        An error e of the weights, with the residual r, changes the field by at most ‖e‖_A standard
        deviations at any point, and by about ‖e‖_A/√n in root mean square over n determined
        directions. ‖e‖²_A ≈ rᵀP⁻¹r.
        """
        size = (b * self.preconditioner.solve(b)).sum().sqrt().item()
        directions = min(self.num_values, len(self.preconditioner.diagonal))
        errors = self.accuracy.mean_error, self.accuracy.permitted_error
        # ‖r‖ ≤ tolerance ‖b‖ with ‖r‖ ≈ ‖e‖_A: the tolerance is the permitted ‖e‖_A over ‖b‖.
        wanted, permitted = (
            min(error * directions**0.5 / size, _LOOSEST) if size else _LOOSEST for error in errors
        )
        return wanted, max(wanted, permitted)

    @property
    def _affordable(self) -> int:
        """Iterations of one system."""
        count = int(self.accuracy.operations / self._cost)
        return min(max(count, _FEWEST), self.accuracy.most)

    @property
    def _cost(self) -> float:
        """The operations of an iteration: Fourier transforms for each output, triangular solves."""
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
        """Draws from N(0, A⁻¹) and N(0, P⁻¹) of common random numbers."""
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

        Stochastic Lanczos quadrature (Ubaru, Chen & Saad 2017) of uᵀ(log B)u, less uᵀ(B − I)u,
        whose mean is zero: B has the diagonal, and in the block the values, of an identity.
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


# BᵀA⁻¹B and log|A| − log|P| with their derivatives, from solutions of A x = b alone.
#
# With U = A⁻¹B, and random z with E[z zᵀ] = P,
#
#     ∂ BᵀA⁻¹B = ∂Bᵀ U + Uᵀ ∂B − Uᵀ ∂A U ,
#     ∂ (log|A| − log|P|) = tr(A⁻¹∂A) − tr(P⁻¹∂P) = E[(A⁻¹z − P⁻¹z)ᵀ ∂A P⁻¹z] ,
#
# the last because A and P have the same block and diagonal, so that E[zᵀP⁻¹ ∂A P⁻¹z] = tr(P⁻¹∂P).
# The derivative of log|P| is exact.
#
# The difference A⁻¹z − P⁻¹z is small where P is good, so few probes give a gradient of small
# variance. Both functions return derivatives of bilinear forms uᵀAv only, which
# `WeightPrecision.derivatives` computes with images: neither A nor ∂A is formed. The gradient is
# that of the exact function; the value of the log-determinant is an estimate by other means
# (Lanczos), hence the two agree up to the random error only.


class InvQuad(Function):
    """BᵀA⁻¹B; arguments: the system, B (F, k), M (F, p), and each Q and N^{−½}Φ of A."""

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
        # BᵀA⁻¹B is symmetric, so only the symmetric part of its gradient acts.
        weighted = 0.5 * (grad + grad.mT) @ u
        return None, 2 * weighted.mT, *_derivatives(ctx.system, -weighted, u)


class LogdetRatio(Function):
    """log|A| − log|P|; arguments: the system, M (F, p), and each Q and N^{−½}Φ of A."""

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

    Both are computed when they are needed first, unless the log-determinant is given with its
    derivatives.
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
        """The evidence from one with |P| instead of |A|, and log|A| − log|P|."""
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
# 2. Up to 400 variances are solved for: one system for each.
# 3. Beyond, 64 draws of the weights give the variances at all points, with a relative standard
#    error of at most √(4/64) if they were used alone. They serve as a correction instead: the same
#    random numbers give draws under P, whose exact variance is known, and the ratio of the two mean
#    squares cancels most of the error.
# 4. The exact variance under P is the sum over the dense block, by its factor, and the rest, where
#    P is diagonal: that is one transform of the coefficients of cos² and sin², at twice the
#    frequency.
# 5. For several outputs, ratios become matrices: `_scaled` uses Cholesky factors, so that the
#    result is symmetric and positive semidefinite.


_NOTHING = 1e-20  # a share of the largest variance that is none to rounding
_SOLVED = 400  # values of a field whose variances are solved for


@dataclass(frozen=True)
class IterativePosterior(GeneralPosterior):
    """E[θ] = A⁻¹b, Cov[θ] = A⁻¹, where products with A⁻¹ are iterations.

    Covariances, and variances at up to 400 values n·p, or fewer if iterations are many or costly,
    are solutions. Variances at more values follow from those of the preconditioner P, whose inverse
    is known: with S draws s of the field under A⁻¹ and c under P⁻¹, of common random numbers, and
    their mean squares ⟨s²⟩ and ⟨c²⟩,

        Var f(x) ≈ φ(x) P⁻¹ φ(x)ᵀ ⟨s²⟩ / ⟨c²⟩ .

    The relative standard error of this variance is at most √(4/S), and √(4(1 − r)/S) if the
    squares s² and c² have the correlation r; that of the sd is half of it.
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
        """Whether variances of so many numbers are estimated, since solving for them is costly."""
        return values > _SOLVED or not self.system.affords(values)

    def estimated_from(self, features: Float[Tensor, "n*q F"], q: int) -> Float[Tensor, "n q q"]:
        """The blocks of Φ A⁻¹ Φᵀ, estimated as above for any features Φ of these weights."""

        def products(values: Float[Tensor, "n*q k"]) -> Float[Tensor, "n q q"]:
            values = values.unflatten(0, (-1, q))
            return values @ values.mT

        known = products(self.system.preconditioner.inverse_root(features))
        return _scaled(known, *(products(features @ draws.mT) for draws in self.system.draws))

    def _estimates(self, x: Float[Tensor, "n d"]) -> bool:
        """Never on columns that are no single lattice."""
        lattice = self.expansion.phi.on_lattice
        return lattice and self.estimates(len(x) * self.num_outputs)

    def _estimated_blocks(self, x: Float[Tensor, "n d"]) -> Float[Tensor, "n p p"]:
        known = self._block_posterior.blocks(x) + self._rest_blocks(x)
        return _scaled(known, *(self._mean_products(x, draws) for draws in self.system.draws))

    @property
    def _block_posterior(self) -> PrimalPosterior:
        """The distribution of the features of the dense block, under P⁻¹."""
        p = self.system.preconditioner
        variance = torch.ones_like(p.diagonal[: len(p.columns)])
        part = self.expansion.select(p.columns, variance)
        return PrimalPosterior(part, self.theta[p.block], self.response[p.block], p.factor)

    def _rest_blocks(self, x: Float[Tensor, "n d"]) -> Float[Tensor, "n p p"]:
        """Σ φ_f(x)² m_f m_fᵀ / A_ff over the other features; 2 cos² = 1 + cos of twice the phase,
        2 sin² = 1 − cos of it."""
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
        """⟨f fᵀ⟩ of the fields of draws of the weights."""
        values = self.expansion.phi.apply(x, self.expansion.column_weights(draws.mT))
        values = values.unflatten(-1, (self.num_outputs, -1))
        return values @ values.mT / len(draws)


@dataclass(frozen=True)
class EstimatedSymbol(SymbolPosterior):
    """Q f under an `IterativePosterior`, whose variances at many points are estimated likewise."""

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
    """L K⁻¹ ⟨s sᵀ⟩ K⁻ᵀ Lᵀ, with the Cholesky factors L of the blocks under P⁻¹ and K of ⟨c cᵀ⟩; for
    one output, the equation of `IterativePosterior`. Zero at a reference."""
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
# needs the best constant mean c before it knows the right-hand side y − Hc, hence the order:
#
# 1. Solve roughly for all columns of B; this gives c and its variance to second order.
# 2. Refine the combination b(y) − B c alone, to the accuracy of the mean, from the rough solution.
# 3. Put the refined solution into the column of y, so that all contrasts of the solutions contain
#    it.


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
        contrast = evidence_of_solution(u).contrast(mean).mT  # y less its mean
        # The coefficient of y in the contrast is one: with this column, contrast @ u is what was
        # refined.
        u[:1] += system.refined(contrast @ b.mT, contrast @ u) - contrast @ u
        evidence = evidence_of_solution(u)
        theta = mean_and_response(u.mT @ evidence.contrasts(mean))
        return IterativePosterior(self.expansion, *theta, system), evidence

    @cached_property
    def _features(self) -> list[Float[Tensor, "M F"]]:
        return [features for features, *_ in self.whitened]

    @cached_property
    def _bases(self) -> list[Float[Tensor, "p p"]]:
        """P E of every weight of every group, for all p components."""
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
