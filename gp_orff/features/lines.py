"""Columns of kernels with spectra of lines: those of a lattice, times cosines and sines."""

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations_with_replacement

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from gp_orff.features.assemble import expand_on_lattice
from gp_orff.features.columns import PointwiseColumns
from gp_orff.features.draws import (
    Draw,
    FixedBuffers,
    GridDraw,
    GridWarning,
    Lattice,
    LatticeDraw,
    LeafSpectrum,
    Rule,
    TermSpectrum,
    joined,
)
from gp_orff.features.expansion import Expansion, FeatureExpansion, KroneckerExpansion
from gp_orff.features.grid_design import GridBudgetError
from gp_orff.features.lattice import LatticeColumns
from gp_orff.features.truncation import (
    GridAccuracy,
    grid_accuracy,
    image_variance,
    truncated_variance_of,
)
from gp_orff.kernels.lines import LineSpectrum, has_lines
from gp_orff.kernels.tree import Term, spectra_of
from gp_orff.symbols.base import Symbol

# A kernel of lines times a kernel on a lattice:
#
#     K(x, z) Σ_j w_j cos⟨ν_j, x − z⟩ ,
#     cos⟨ν, x − z⟩ = cos⟨ν, x⟩ cos⟨ν, z⟩ + sin⟨ν, x⟩ sin⟨ν, z⟩ .
#
# Features of K times √w_j cos⟨ν_j, x⟩ and √w_j sin⟨ν_j, x⟩ are therefore its features; ν = 0 has no
# sine. Symbols act on the field in space, where these factors m(x) are constant.
#
# 1. `draw_with_lines` removes the lines from their terms. A grid of what remains is one lattice,
#    which all terms with lines share. Terms without lines have a separate lattice: one that
#    resolves time would multiply the number of columns.
# 2. The lines of a product of kernels of lines are at the sums and differences of theirs.
# 3. `LineColumns` has the columns of the lattice times every factor m. Sums over the data are those
#    of the lattice: φᵀ diag(m m′) φ for every pair of factors is one transform with weights m m′.
# 4. Lines have the frequencies of the draw, and follow no later change of a period.


@dataclass(frozen=True)
class LineColumns(PointwiseColumns):
    """The columns φ(x) of a lattice times each of K factors cos⟨ν, x − x₀⟩ and sin⟨ν, x − x₀⟩.

    Column k·M + c is factor k times column c of the M columns of the lattice.
    """

    lattice: LatticeColumns
    nu: Float[Tensor, "J d"]

    @property
    def device(self) -> torch.device:
        return self.lattice.device

    @property
    def num_factors(self) -> int:
        """K: a cosine of every line, and a sine except of ν = 0."""
        return len(self.nu) + int(self.nu.any(-1).sum())

    @property
    def num_columns(self) -> int:
        return self.num_factors * self.lattice.num_columns

    def to(self, device: torch.device) -> "LineColumns":
        return LineColumns(self.lattice.to(device), self.nu.to(device))

    def select(self, columns: Int[Tensor, "k"]) -> "LineColumns":
        if len(columns) != self.num_columns:
            raise NotImplementedError("expected all columns of a kernel of lines, got some of them")
        return self

    def plain(self) -> dict[str, object]:
        return {"lattice": self.lattice.plain(), "nu": self.nu.cpu()}

    def factors(self, x: Float[Tensor, "*b N d"]) -> Float[Tensor, "*b N K"]:
        """m(x): the cosines of all lines, then the sines."""
        phase = (x.double() - self.lattice.origin) @ self.nu.mT
        return torch.cat([phase.cos(), phase[..., self.nu.any(-1)].sin()], dim=-1)

    def inner_products(self, x: Float[Tensor, "*b N d"]) -> Float[Tensor, "*b N J+D"]:
        phase = (x.double() - self.lattice.origin) @ self.nu.mT
        return torch.cat([phase, self.lattice.inner_products(x)], dim=-1)

    def values(self, x: Float[Tensor, "*b N d"]) -> Float[Tensor, "*b N K*M"]:
        return (self.factors(x).unsqueeze(-1) * self.lattice.values(x).unsqueeze(-2)).flatten(-2)

    def mean_squares(self) -> Float[Tensor, "K*M 1"]:
        of_factors = torch.full((self.num_factors, 1), 0.5).to(self.nu)
        of_factors[: len(self.nu)][~self.nu.any(-1)] = 1.0
        return torch.kron(of_factors, self.lattice.mean_squares())

    def sums(self, x, y, weights):
        x, m = x.detach(), self.factors(x.detach())
        pairs = list(combinations_with_replacement(range(self.num_factors), 2))
        left, right = (list(numbers) for numbers in zip(*pairs, strict=True))
        size, grams = self.lattice.num_columns, []
        for a in weights.double().unbind(-1):
            products = a.unsqueeze(-1) * m[:, left] * m[:, right]
            compact = self.lattice.exponential_sums(x, products)
            gram = m.new_empty(self.num_factors, size, self.num_factors, size)
            for (i, j), part in zip(pairs, compact, strict=True):
                gram[i, :, j] = self.lattice.gram(part)
                gram[j, :, i] = gram[i, :, j]  # which is symmetric
            grams.append(gram.reshape(self.num_columns, self.num_columns))
        sums = self.adjoint(x, torch.cat([y, weights], dim=-1))
        cross, sums = sums.split([y.shape[-1], weights.shape[-1]], dim=-1)
        return grams, cross, sums.unbind(-1)

    def adjoint(self, x: Tensor, y: Tensor) -> Tensor:
        products = self.factors(x).unsqueeze(-1) * y.double().unsqueeze(-2)  # (*b, N, K, k)
        sums = self.lattice.adjoint(x, products.flatten(-2))
        return sums.unflatten(-1, (self.num_factors, -1)).transpose(-3, -2).flatten(-3, -2)

    def apply(self, x: Tensor, w: Tensor) -> Tensor:
        parts = w.double().unflatten(-2, (self.num_factors, -1)).transpose(-3, -2)  # (*b, M, K, k)
        values = self.lattice.apply(x, parts.flatten(-2)).unflatten(-1, (self.num_factors, -1))
        return (self.factors(x).unsqueeze(-1) * values).sum(-2)

    def multiplier(self, symbol, num_outputs, space):
        if self.nu[:, list(space)].any():
            raise NotImplementedError(
                f"{type(symbol).__name__} of a kernel that is periodic in space is not known on a "
                "grid: expected periods of time; use a random rule such as gp_orff.QuasiMonteCarlo"
            )
        return self.lattice.multiplier(symbol, num_outputs, space).repeat(self.num_factors, 1, 1)

    @property
    def quarter_turn(self) -> tuple[Int[Tensor, "K*M"], Float[Tensor, "K*M"]]:
        partner, sign = self.lattice.quarter_turn
        start = torch.arange(self.num_factors, device=self.device) * len(partner)
        return (start.unsqueeze(-1) + partner).flatten(), sign.repeat(self.num_factors)


class LineFrequencies(FixedBuffers):
    """The lattice and the lines ν that the terms with lines share.

    Args:
        lattice: of what remains of the terms without their lines.
        nu: all lines, one of each pair ±ν.
        unbounded: the inputs that no lattice depends on; the domain does not bound them.
        omitted: the share of the variance that lines beyond these may have.
    """

    def __init__(
        self,
        lattice: Lattice,
        nu: Float[np.ndarray, "J d"],
        unbounded: Bool[np.ndarray, "d"],
        omitted: float,
    ):
        super().__init__()
        self.lattice = lattice
        self.register_buffer("omitted", torch.tensor(omitted, dtype=torch.float64))
        self.register_buffer("nu", torch.from_numpy(nu))
        self.register_buffer("unbounded", torch.from_numpy(unbounded))

    def columns(self) -> LineColumns:
        """The columns of the lattice times the factors of all lines."""
        return LineColumns(self.lattice.columns(), self.nu)

    def outside(self, x: Float[Tensor, "*b n d"]) -> Bool[Tensor, "*b n"]:
        """Which of the points x are outside the domain."""
        return self.lattice.outside(self._bounded(x))

    def check(self, x: Float[Tensor, "*b n d"]) -> None:
        """Check that all points x are inside the domain; raises a ValueError otherwise."""
        self.lattice.check(self._bounded(x))

    def _bounded(self, x: Float[Tensor, "*b n d"]) -> Float[Tensor, "*b n d"]:
        return torch.where(self.unbounded, self.lattice.origin.to(x), x[..., : len(self.unbounded)])

    @property
    def tolerance(self) -> Float[Tensor, ""]:
        """The share of the variance for which the lattice, and the number of lines, were made."""
        return torch.maximum(self.lattice.tolerance, self.omitted)

    @property
    def constant(self) -> Bool[Tensor, "d"]:
        """The inputs that are constant, along which frequencies are summed."""
        return self.lattice.constant


class LineDraw(GridDraw):
    """The frequencies of one term with lines.

    Args:
        rest: those of the term without its lines.
        lattice: the lattice and all lines, shared by the terms with lines.
        numbers: for every line of the term, the number of the line of each kernel of lines.
        halvings: how often each is one of a sum and a difference, with half of the weight.
        place: which of the shared lines each is.
        spectra: of the kernels of lines, as they are now.
    """

    expands = True
    without_nodes = (
        "expected a kernel with a spectral density, got one with a spectrum of lines, such as "
        "PeriodicKernel, on a grid; use a random rule such as gp_orff.QuasiMonteCarlo"
    )

    def __init__(
        self,
        rest: LatticeDraw,
        lattice: LineFrequencies,
        numbers: Int[np.ndarray, "J L"],
        halvings: Int[np.ndarray, "J"],
        place: Int[np.ndarray, "J"],
        spectra: Sequence[LineSpectrum],
    ):
        super().__init__(lattice, rest.lengthscale_range, rest.diagonal_correction)
        self.rest = rest
        for name, values in (("numbers", numbers), ("halvings", halvings), ("place", place)):
            self.register_buffer(name, torch.from_numpy(values))
        counts = (numbers.max(axis=0) + 1).tolist()
        built = [s.lines(count)[0].detach() for s, count in zip(spectra, counts, strict=True)]
        self.register_buffer("built", torch.stack([nu.flatten()[-1].double() for nu in built]))

    @property
    def num_frequencies(self) -> int:
        return self.rest.num_frequencies * len(self._used)

    @property
    def num_columns(self) -> int:
        return self.rest.num_columns * len(self._used)

    @property
    def _used(self) -> list[tuple[int, int]]:
        """The line of the term, and the factor, of each of its factors."""
        nonzero = self.lattice.nu.any(-1)
        sines = len(nonzero) + nonzero.cumsum(0) - 1
        lines = list(enumerate(self.place.tolist()))
        return [*lines, *((i, int(sines[j])) for i, j in lines if nonzero[j])]

    def weights(self, term: Term) -> Float[Tensor, "*b J"]:
        """w_j of every line of the term."""
        weights = 0.5 ** self.halvings.double()
        spectra = [s for s in spectra_of(term) if s.is_line]
        for density, order in zip(spectra, self.numbers.mT, strict=True):
            weights = weights * density.lines(int(order.max()) + 1)[1][..., order]
        return weights

    def expansion(self, members: Sequence[tuple[Term, "LineDraw"]]) -> Expansion:
        """The features of all terms on the lattice of this one, from those of their rests."""
        for term, draw in members:
            draw._check_lines(spectra_of(term))
        phi, lattice = self.lattice.columns(), self.lattice.lattice.columns()
        parts = [expand_on_lattice(lattice, [_rest(term)], [draw.rest]) for term, draw in members]
        roots = [draw.weights(term).sqrt() for term, draw in members]
        if len(parts) == 1 and parts[0].is_kronecker:
            return self._kronecker(phi, parts[0], roots[0])
        directions, columns = [], []
        for (_, draw), part, root in zip(members, parts, roots, strict=True):
            full = part.general()
            for line, factor in draw._used:
                directions.append(root[..., line, None, None] * full.directions)
                columns.append(full.columns + factor * lattice.num_columns)
        batch = torch.broadcast_shapes(*(d.shape[:-2] for d in directions))
        directions = [d.expand(*batch, *d.shape[-2:]) for d in directions]
        return FeatureExpansion(phi, torch.cat(directions, dim=-2), torch.cat(columns))

    def _kronecker(
        self, phi: LineColumns, part: KroneckerExpansion, root: Float[Tensor, "*b J"]
    ) -> KroneckerExpansion:
        """The features of one separable term."""
        blocks = [torch.zeros_like(part.scales * root[..., :1, None])] * phi.num_factors
        for line, factor in self._used:
            blocks[factor] = root[..., line, None, None] * part.scales
        return KroneckerExpansion(phi, torch.cat(blocks, dim=-2), part.mixing)

    def truncated_image(
        self, symbol: Symbol, term: Term, space: Sequence[int]
    ) -> Float[Tensor, "*b q q"]:
        """Var Q f that the lattice lacks, and that of the lines that are left out."""
        # total − (1 − c) grid = (total − grid) + c grid, where c is the share of lines left out
        rest = _rest(term)
        left_out = (1 - self.weights(term).sum(-1)).clamp_min(0)[..., None, None]
        delta = truncated_variance_of(symbol, rest, self.rest, space)
        return delta + left_out * image_variance(symbol, rest, self.rest, space)

    @torch.no_grad()
    def accuracy(self, term: Term) -> GridAccuracy:
        """The errors of the lattice, and the share of the lines that are left out."""
        of_rest = grid_accuracy(_rest(term), self.rest)
        included = self.weights(term).sum(-1).min().item()
        return replace(of_rest, truncated=1 - included * (1 - of_rest.truncated))

    def ratio_outside_range(self, spectra) -> float | None:
        """The ratio of a period to that of the draw, if it has changed, or that of lengthscales."""
        others = [density for density in spectra if not density.is_line]
        # A relative change of a period above 1e-9 is more than rounding.
        return self._ratio_of_lines(spectra, 1e-9) or self.rest.ratio_outside_range(others)

    def _ratio_of_lines(self, spectra, least: float) -> float | None:
        """The ratio of a period to that of the draw, or of the number of lines to that needed,
        if it differs by more than the `least`."""
        lines = [density for density in spectra if density.is_line]
        counts = (self.numbers.amax(0) + 1).tolist()
        for density, count, built in zip(lines, counts, self.built, strict=True):
            present = density.lines(count)[0].detach().flatten()[-1].double()
            if (present - built).abs() > least * built:
                return float(built / present)
            needed = density.num_lines(self.lattice.omitted.item() / len(lines), 1.001)
            if needed > count:
                return count / needed
        return None

    def _check_lines(self, spectra) -> None:
        # more than a change for a difference quotient
        ratio = None if self.warned else self._ratio_of_lines(spectra, 1e-3)
        if ratio is not None:
            self.warned = True
            warnings.warn(
                f"a period, or the number of its lines, is about {ratio:.4g} times what the "
                "frequency grid was built for, which does not follow it: call redraw() of the "
                "ORFFKernel and continue, or keep the period fixed",
                GridWarning,
                stacklevel=2,
            )


_COARSER = 4.0  # the ratio of tolerances that are tried under a budget


def _rest(term: Term | TermSpectrum) -> Term | TermSpectrum:
    """A term without its lines."""
    leaves = tuple(leaf for leaf in term.leaves if not leaf.spectrum.is_line)
    return replace(term, leaves=leaves)


def draw_with_lines(grid: Rule, terms: Sequence[TermSpectrum], most: int) -> list[Draw]:
    """The draws of all terms by a `Grid`, in order, with shared columns.

    Args:
        grid: the specification.
        terms: the spectra, of which some have lines.
        most: the number of features allowed; terms with lines get up to half of them in a sum.

    Raises:
        GridBudgetError: no lattice within the number of features.
        NotImplementedError: a periodic kernel of several inputs.
    """
    others = [term for term in terms if not has_lines(term)]
    with_lines = [term for term in terms if has_lines(term)]
    if any(leaf.num_dims > 1 for term in with_lines for leaf in _leaves(term)):
        raise NotImplementedError(
            "expected periodic kernels of one input, got one of several, which no grid is known "
            "for; give active_dims=, and multiply kernels of one input each"
        )
    rests = [_rest(term) for term in with_lines]
    share = most // 2 if others else most
    num_inputs = 1 + max(dim for term in with_lines for leaf in term.leaves for dim in leaf.dims)

    def attempt(tolerance: float) -> tuple[list, list[LatticeDraw], float]:
        """Lines of each term for a tolerance, what the budget leaves for the lattice, and the
        larger one of both tolerances."""
        shorter = grid.lengthscale_range[0]
        lines = [_lines(term, num_inputs, tolerance, shorter) for term in with_lines]
        factors = max(2 * len(nu) - (~nu.any(axis=-1)).sum() for nu, _, _ in lines)
        budget = None if grid.max_features is None else max(int(share // factors), 1)
        try:
            draws = replace(grid, max_features=budget).draw(rests)
        except GridBudgetError:
            if budget is None or _COARSER * tolerance >= 1:
                raise
            return lines, [], math.inf
        return lines, draws, max(tolerance, draws[0].lattice.tolerance.item())

    # Under a budget fewer lines leave more features for the lattice. The tolerance of the lines
    # rises until it is that of the lattice; of the last two, the better one is taken.
    omitted, best = grid.tolerance, attempt(grid.tolerance)
    trial, tried = omitted, best
    while tried[2] > trial and _COARSER * trial < 1:
        trial *= _COARSER
        tried = attempt(trial)
        if tried[2] < best[2]:
            omitted, best = trial, tried
    lines, draws, _ = best
    every, place = np.unique(
        np.concatenate([nu for nu, _, _ in lines]), axis=0, return_inverse=True
    )
    places = np.split(place.reshape(-1), np.cumsum([len(nu) for nu, _, _ in lines])[:-1])
    lattice = draws[0].lattice
    bounded = np.zeros(len(lattice.spacing), dtype=bool)
    for rest in rests:
        for leaf in rest.leaves:
            bounded[list(leaf.dims)] = True
    every = np.pad(every, ((0, 0), (0, len(bounded) - every.shape[1])))
    shared = LineFrequencies(lattice, every, ~bounded, omitted)
    parts = zip(draws, lines, places, with_lines, strict=True)
    made = [
        LineDraw(draw, shared, orders, halvings, at, [leaf.spectrum for leaf in _leaves(term)])
        for draw, (_, orders, halvings), at, term in parts
    ]
    return joined(grid, terms, made, has_lines, most)


def _leaves(term: TermSpectrum) -> list[LeafSpectrum]:
    return [leaf for leaf in term.leaves if leaf.spectrum.is_line]


def _lines(
    term: TermSpectrum, num_inputs: int, tolerance: float, shorter: float
) -> tuple[Float[np.ndarray, "J d"], Int[np.ndarray, "J L"], Int[np.ndarray, "J"]]:
    """ν of every line of a product of kernels, the number of its line in each, and its halvings."""
    leaves = _leaves(term)
    lines = [(np.zeros(num_inputs), (), 0)]
    for leaf in leaves:
        (dim,) = leaf.dims
        count = leaf.spectrum.num_lines(tolerance / len(leaves), shorter)
        step = np.eye(num_inputs)[dim]
        waves = leaf.spectrum.lines(count)[0].detach().double().cpu().numpy().reshape(-1, count)[0]
        products = []
        for nu, orders, halvings in lines:
            for number, frequency in enumerate(waves):
                split = nu.any() and frequency > 0
                for sign in (1, -1) if split else (1,):
                    wave = nu + sign * frequency * step
                    products.append((wave, (*orders, number), halvings + int(split)))
        lines = products
    nu, orders, halvings = (np.array(values) for values in zip(*lines, strict=True))
    return nu, orders, halvings
