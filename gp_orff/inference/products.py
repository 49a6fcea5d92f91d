"""The normal equations of fields such as tides and eddies, observed at all positions and times.

The tides are fields with line spectra, and the eddies are one field on a lattice.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from gp_orff.features.columns import Columns, SideBySide
from gp_orff.features.draws import LatticeDraw
from gp_orff.features.expansion import FeatureExpansion
from gp_orff.features.lattice import LatticeColumns
from gp_orff.features.lines import LineColumns
from gp_orff.inference.equations import WeightEquations, mean_and_response
from gp_orff.inference.posteriors import GeneralPosterior, PrimalPosterior
from gp_orff.kernels.base import cholesky

# The covariance of eddies is a product of a covariance in space and one in time. On a product of
# positions and times, their features are Ψ_s ⊗ Ψ_t. Each feature of tides is z ⊗ c with one of few
# cosines and sines c of time. With whitened features, G_s = Ψ_sᵀΨ_s = U diag(λ) Uᵀ and
# G_t = Ψ_tᵀΨ_t = V diag(μ) Vᵀ,
#
#     A = ⎛ I + G_s⊗G_t    H   ⎞ ,        (I + G_s⊗G_t)⁻¹ = (U⊗V) diag(1/(1 + λ_a μ_b)) (U⊗V)ᵀ ,
#         ⎝      Hᵀ       A_ll ⎠
#
# H has the columns Ψ_sᵀz_l ⊗ Ψ_tᵀc_l, and is never formed. The Schur complement
# S = A_ll − Hᵀ(I + G_s⊗G_t)⁻¹H has one row for each feature of tides. The determinant is
# log|A| = Σ log(1 + λμ) + log|S|.
#
# 1. `Grid` has waves cos⟨k, x⟩ and sin⟨k, x⟩ of space and time together. Waves of (k_s, k_t) and
#    (k_s, −k_t) are rotated to products of a wave of space and a wave of time (`Products`). This is
#    possible if all terms of the lattice have the same spectrum of time, and if the frequencies are
#    a product.
# 2. All other quantities follow from three matrices, with the sizes of the waves of space, of the
#    waves of time and of the features of tides (`ProductSystem`).


class Site(NamedTuple):
    """All pairs of positions and times."""

    places: Float[Tensor, "n d"]  # the positions, at the time of the origin
    times: Float[Tensor, "T d"]  # the times, at the position of the origin

    @classmethod
    def of(
        cls,
        x: Float[Tensor, "N d"],
        is_time: Bool[Tensor, "d"],
        origin: Float[Tensor, "d"],
    ) -> "Site | None":
        """Return the positions and times of points. The result is None unless the points are all
        pairs of these positions and times, each exactly once."""
        x = x.double()
        places, place = torch.where(is_time, origin, x).unique(dim=0, return_inverse=True)
        times, time = torch.where(is_time, x, origin).unique(dim=0, return_inverse=True)
        if len(places) * len(times) != len(x):
            return None
        pairs = place * len(times) + time
        return cls(places, times) if len(pairs.unique()) == len(x) else None


class Waves(NamedTuple):
    """Cosines and sines of some of the inputs, each times a direction."""

    indices: Int[Tensor, "F d"]  # k
    sine: Bool[Tensor, "F"]
    directions: Float[Tensor, "F p"]

    def values(self, phi: LatticeColumns, x: Float[Tensor, "n d"]) -> Float[Tensor, "n p F"]:
        phase = (x - phi.origin) @ (self.indices * phi.spacing).mT
        wave = torch.where(self.sine, phase.sin(), phase.cos())
        return wave.unsqueeze(1) * self.directions.mT


@dataclass(frozen=True)
class Products:
    """Features of a lattice as an orthogonal transform of products of two waves.

    Feature f is Σ_i weights[f, i] · (product number places[f, i]), a sum of at most two products.
    With T waves of time, the product of wave s of space and wave t of time has the number s T + t.
    """

    space: Waves
    time: Waves
    places: Int[Tensor, "F 2"]
    weights: Float[Tensor, "F 2"]

    @classmethod
    def of(
        cls,
        expansion: FeatureExpansion,
        phi: LatticeColumns,
        draws: Sequence[tuple[LatticeDraw, int]],
        is_time: Bool[Tensor, "d"],
    ) -> "Products | None":
        """The products of the lattice features of an expansion; None if they are not products.

        Args:
            expansion: the features. Those of the lattice come first.
            phi: the columns of the lattice.
            draws: the draw of every term on the lattice, with the rank of its factor B(ω).
            is_time: True for each input that is a time.
        """
        columns, label = _labels(phi, draws)
        count = len(columns)
        if not torch.equal(columns, expansion.columns[:count]):
            return None
        k, sine = phi.indices[columns % len(phi.indices)], columns >= len(phi.indices)
        (space, sigma), (time, s) = _canonical(k * ~is_time), _canonical(k * is_time)
        root = (1.0 + (sigma * s != 0).double()).sqrt().unsqueeze(-1)
        # cos(σa + sb) = cos a cos b − σs sin a sin b
        # sin(σa + sb) = σ sin a cos b + s cos a sin b
        cosines = torch.stack([torch.ones_like(s), -sigma * s], dim=-1)
        signs = torch.where(sine.unsqueeze(-1), torch.stack([sigma, s], dim=-1), cosines)
        turned = torch.stack([sine, ~sine], dim=-1)  # True if the wave of space is a sine
        wave, of_wave = torch.cat([label, space], dim=-1).unique(dim=0, return_inverse=True)
        present = signs != 0
        rows, u = torch.stack([of_wave.unsqueeze(-1).expand(-1, 2), turned.long()], dim=-1)[
            present
        ].unique(dim=0, return_inverse=True)
        shifted = (turned ^ sine.unsqueeze(-1)).long().unsqueeze(-1)  # 1 if that of time is a sine
        moments, v = torch.cat([time.unsqueeze(1).expand(-1, 2, -1), shifted], dim=-1)[
            present
        ].unique(dim=0, return_inverse=True)
        if len(rows) * len(moments) != count:
            return None
        vectors = root * expansion.directions[:count]
        unit = _units(vectors, of_wave, len(wave))
        along = (vectors * unit[of_wave]).sum(-1)  # of both signs: B(−ω) may be −B(ω)
        amplitudes = torch.full((len(rows), len(moments)), torch.nan).to(along)
        amplitudes[u, v] = along.abs().unsqueeze(-1).expand(-1, 2)[present]
        row, column = divmod(int(amplitudes.nan_to_num().argmax()), len(moments))
        largest = amplitudes[row, column]
        left, right = amplitudes[:, column], amplitudes[row] / largest
        errors = (
            (amplitudes - left.unsqueeze(-1) * right).abs().max(),
            (vectors.norm(dim=-1) - along.abs()).max(),
        )
        if not all(error <= _ROUNDING * largest for error in errors):
            return None
        places = torch.zeros_like(signs).masked_scatter(present, u * len(moments) + v)
        places = torch.where(present, places, places.flip(-1))  # arbitrary if the weight is zero
        weights = signs * torch.where(along < 0, -1.0, 1.0).unsqueeze(-1) / root
        number = rows[:, 0]
        directions = unit[number] * left.unsqueeze(-1)
        return cls(
            Waves(wave[number, label.shape[-1] :], rows[:, 1].bool(), directions),
            Waves(moments[:, :-1], moments[:, -1].bool(), right.unsqueeze(-1)),
            places,
            weights,
        )

    @property
    def shape(self) -> tuple[int, int]:
        """The number of waves of space, and the number of waves of time."""
        return len(self.space.sine), len(self.time.sine)

    def forward(self, theta: Float[Tensor, "F k"]) -> Float[Tensor, "a b k"]:
        """The coefficients of products from the coefficients of features."""
        parts = (theta.unsqueeze(1) * self.weights.unsqueeze(-1)).flatten(0, 1)
        zeros = theta.new_zeros(theta.shape)
        return zeros.index_add(0, self.places.flatten(), parts).unflatten(0, self.shape)

    def back(self, products: Float[Tensor, "a b k"]) -> Float[Tensor, "F k"]:
        """The inverse of `forward`, which is its adjoint."""
        flat = products.flatten(0, 1)
        first, second = self.places.unbind(-1)
        return flat[first] * self.weights[:, :1] + flat[second] * self.weights[:, 1:]


_TINY = 1e-300
_ROUNDING = 1e-8  # rounding of amplitudes, relative to the largest


def _units(
    vectors: Float[Tensor, "F p"], group: Int[Tensor, "F"], count: int
) -> Float[Tensor, "G p"]:
    """The direction of the longest vector of every group."""
    sizes = vectors.norm(dim=-1)
    longest = torch.zeros(count).to(sizes).scatter_reduce(0, group, sizes, "amax")
    chosen = (sizes == longest[group]).nonzero().squeeze(-1)
    units = torch.zeros(count, vectors.shape[-1]).to(sizes)
    units[group[chosen]] = vectors[chosen] / sizes[chosen].unsqueeze(-1).clamp_min(_TINY)
    return units


def _labels(
    phi: LatticeColumns, draws: Sequence[tuple[LatticeDraw, int]]
) -> tuple[Int[Tensor, "F"], Int[Tensor, "F 2"]]:
    """Return the column of every feature of a lattice, in the order of `expand`, with two labels.

    The first label is the number of the term, and the second the number of the direction.
    """
    columns, labels = [], []
    for sine in (0, 1):
        for term, (draw, rank) in enumerate(draws):
            position = draw.position[draw.nonzero] if sine else draw.position
            columns.append((position + sine * len(phi.indices)).repeat_interleave(rank))
            number = torch.arange(rank, device=position.device).repeat(len(position))
            labels.append(torch.stack([torch.full_like(number, term), number], dim=-1))
    columns, order = torch.cat(columns).sort(stable=True)
    return columns, torch.cat(labels)[order]


def _canonical(k: Int[Tensor, "F d"]) -> tuple[Int[Tensor, "F d"], Int[Tensor, "F"]]:
    """k or −k such that the first nonzero element is positive, and the sign; 0 for k = 0."""
    first = (k != 0).int().argmax(-1, keepdim=True)
    sign = k.gather(-1, first).sign()
    return k * sign, sign.squeeze(-1)


@dataclass(frozen=True)
class ProductSystem:
    """The factorised matrix A. Features of the lattice come before those of lines."""

    products: Products
    u: Float[Tensor, "a a"]
    v: Float[Tensor, "b b"]
    shrinkage: Float[Tensor, "a b"]  # 1/(1 + λμ)
    left: Float[Tensor, "a L"]  # UᵀΨ_sᵀz_l
    right: Float[Tensor, "b K"]  # VᵀΨ_tᵀc_k
    factor_of: Int[Tensor, "L"]  # k of every l
    root: Float[Tensor, "L L"]  # the Cholesky factor of S

    @classmethod
    def of(
        cls, expansion: FeatureExpansion, products: Products, site: Site, precision: Tensor
    ) -> "ProductSystem":
        """The system for features, positions and times, and the noise precision P of a vector."""
        lattice, lines = expansion.phi.families
        whiten = torch.linalg.cholesky(precision)
        space = products.space.values(lattice, site.places)
        space = torch.einsum("npf,pq->nqf", space, whiten).flatten(0, 1)
        time = products.time.values(lattice, site.times).squeeze(1)
        count = products.weights.shape[0]
        column = expansion.columns[count:] - lattice.num_columns
        factor_of, column = column // lines.lattice.num_columns, column % lines.lattice.num_columns
        directions = expansion.directions[count:] @ whiten
        z = lines.lattice.values(site.places)[:, column].unsqueeze(1) * directions.mT
        z, c = z.flatten(0, 1), lines.factors(site.times)
        (lam, u), (mu, v) = (torch.linalg.eigh(part.mT @ part) for part in (space, time))
        shrinkage = 1 / (1 + lam.clamp_min(0)[:, None] * mu.clamp_min(0))
        left, right = u.mT @ (space.mT @ z), v.mT @ (time.mT @ c)
        s = (z.mT @ z) * (c.mT @ c)[factor_of][:, factor_of]
        for k in factor_of.unique().tolist():
            rows, weighted = factor_of == k, shrinkage @ (right * right[:, k : k + 1])
            s[rows] -= left[:, rows].mT @ (left * weighted[:, factor_of])
        s.diagonal().add_(1)
        return cls(products, u, v, shrinkage, left, right, factor_of, cholesky(s))

    @property
    def logdet(self) -> Float[Tensor, ""]:
        return 2 * self.root.diagonal().log().sum() - self.shrinkage.log().sum()

    def solve(self, b: Float[Tensor, "F k"]) -> Float[Tensor, "F k"]:
        """A⁻¹b."""
        ours, lines = self._split(b)
        ours = self._rotated(ours) * self.shrinkage.unsqueeze(-1)
        lines = torch.cholesky_solve(lines - self._adjoint(ours), self.root)
        ours = ours - self.shrinkage.unsqueeze(-1) * self._coupled(lines)
        return torch.cat([self._back(ours), lines])

    def root_of(self, features: Float[Tensor, "m F"]) -> Float[Tensor, "m F"]:
        """R with R Rᵀ = Φ A⁻¹ Φᵀ."""
        ours, lines = self._split(features.mT)
        ours = self._rotated(ours)
        lines = lines - self._adjoint(ours * self.shrinkage.unsqueeze(-1))
        half = torch.linalg.solve_triangular(self.root, lines, upper=False)
        return torch.cat([(ours * self.shrinkage.sqrt().unsqueeze(-1)).flatten(0, 1), half]).mT

    def root_times(self, v: Float[Tensor, "F k"]) -> Float[Tensor, "F k"]:
        """R v with R Rᵀ = A⁻¹. It is the adjoint of `root_of`."""
        ours, lines = self._split(v)
        lines = torch.linalg.solve_triangular(self.root.mT, lines, upper=True)
        ours = self.shrinkage.sqrt().unsqueeze(-1) * ours.unflatten(0, self.products.shape)
        ours = ours - self.shrinkage.unsqueeze(-1) * self._coupled(lines)
        return torch.cat([self._back(ours), lines])

    def _split(self, v: Float[Tensor, "F k"]) -> tuple[Tensor, Tensor]:
        return v.split([len(v) - len(self.root), len(self.root)])

    def _rotated(self, theta: Float[Tensor, "F k"]) -> Float[Tensor, "a b k"]:
        """(U⊗V)ᵀ times the coefficients of products."""
        half = torch.tensordot(self.u.mT, self.products.forward(theta), dims=1)
        return self.v.mT @ half

    def _back(self, rotated: Float[Tensor, "a b k"]) -> Float[Tensor, "F k"]:
        return self.products.back(torch.tensordot(self.u, self.v @ rotated, dims=1))

    def _coupled(self, lines: Float[Tensor, "L k"]) -> Float[Tensor, "a b k"]:
        """H times weights of lines, in the eigenbasis."""
        total = 0
        for k in self.factor_of.unique().tolist():
            rows = self.factor_of == k
            total = total + (self.left[:, rows] @ lines[rows]).unsqueeze(1) * self.right[:, k, None]
        return total

    def _adjoint(self, rotated: Float[Tensor, "a b k"]) -> Float[Tensor, "L k"]:
        """Hᵀ times coefficients in the eigenbasis."""
        by_factor = self.right.mT @ rotated  # (a, K, k)
        return torch.einsum("al,alk->lk", self.left, by_factor[:, self.factor_of])


@dataclass(frozen=True)
class ProductPosterior(GeneralPosterior):
    """The posterior of tides and eddies: E[θ] = A⁻¹b and Cov[θ] = A⁻¹, without forming A."""

    system: ProductSystem

    def weight_covariance(self, v: Tensor) -> Tensor:
        return self.system.solve(v)

    def weight_root(self, v: Tensor) -> Tensor:
        return self.system.root_times(v)

    def root_of(self, features: Tensor) -> Tensor:
        return self.system.root_of(features)

    def of_part(self, expansion, kernel):
        count = len(self.theta) - len(self.system.root)
        if expansion is None:
            return self
        sizes = expansion.directions.abs().amax(-1)
        # directions of terms that the part omits are zero, up to rounding
        if sizes[:count].max() > _NOTHING * sizes.max():
            return super().of_part(expansion, kernel)
        # For lines only, the weights have the covariance S⁻¹.
        lattice, lines = expansion.phi.families
        columns = expansion.columns[count:] - lattice.num_columns
        part = FeatureExpansion(lines, expansion.directions[count:], columns)
        return PrimalPosterior(part, self.theta[count:], self.response[count:], self.system.root)


_NOTHING = 1e-20


@dataclass(frozen=True)
class OnProduct(WeightEquations):
    """The primal algebra of whole vectors at every position and every time.

    Its evidence has no derivatives.
    """

    products: Products = None
    site: Site = None

    @cached_property
    def _solved(self) -> tuple[ProductSystem, Float[Tensor, "F 1+p"]]:
        ((_, noise),) = self.groups
        system = ProductSystem.of(self.general, self.products, self.site, noise.precision)
        return system, system.solve(self.b)

    @torch.no_grad()
    def evidence(self):
        system, solved = self._solved
        return self.evidence_of(self.b.mT @ solved, system.logdet)

    def posterior(self, mean):
        system, solved = self._solved
        evidence = self.evidence()
        theta = mean_and_response(solved @ evidence.contrasts(mean))
        return ProductPosterior(self.general, *theta, system), evidence


class SumsAlone(SideBySide):
    """Columns with the sums of y and of 1, but without their Gram matrix."""

    def sums(self, x, y, weights):
        cross, sums = self.adjoint(x, torch.cat([y, weights], dim=-1)).split(
            [y.shape[-1], weights.shape[-1]], dim=-1
        )
        return [x.new_zeros(())] * weights.shape[-1], cross, sums.unbind(-1)


def families(phi: Columns | None) -> tuple[LatticeColumns, LineColumns] | None:
    """The lattice and the lines of such columns; None for other columns, and without columns."""
    match phi and phi.families:
        case (LatticeColumns() as lattice, LineColumns() as lines):
            return lattice, lines
    return None
