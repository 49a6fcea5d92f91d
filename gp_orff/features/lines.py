"""Features of kernels with line spectra: columns of a lattice times cosines and sines."""

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

# A kernel with a line spectrum is multiplied by a kernel K on a lattice:
#
#     K(x, z) Σ_j w_j cos⟨ν_j, x − z⟩ ,
#     cos⟨ν, x − z⟩ = cos⟨ν, x⟩ cos⟨ν, z⟩ + sin⟨ν, x⟩ sin⟨ν, z⟩ .
#
# The features of the product are therefore the features of K times √w_j cos⟨ν_j, x⟩ and
# √w_j sin⟨ν_j, x⟩; ν = 0 has no sine. Symbols act along the inputs in space. Along these inputs the
# factors m(x) are constant.
#
# 1. `draw_with_lines` removes the line spectra from the terms and draws a grid for the remaining
#    kernels. All terms with lines share this lattice. Terms without lines have a separate lattice,
#    because a lattice that resolves time would multiply the number of columns.
# 2. A product of several line spectra has lines at the sums and differences of their frequencies.
# 3. `LineColumns` has the columns of the lattice times every factor m. Its sums over the data are
#    sums of the lattice: φᵀ diag(m m′) φ for two factors is one transform with the weights m m′.
# 4. Lines have the frequencies of the draw. A later change of a period does not change them.


@dataclass(frozen=True)
class LineColumns(PointwiseColumns):
    """The columns φ(x) of a lattice times each of K factors cos⟨ν, x − x₀⟩ and sin⟨ν, x − x₀⟩.

    Column k·M + c is factor k times column c of the M columns of the lattice.

    Attributes:
        lattice: the columns of the lattice.
        nu: the frequencies ν of the lines, (J, d), in radians per unit of the inputs.
    """

    lattice: LatticeColumns
    nu: Float[Tensor, "J d"]

    @property
    def device(self) -> torch.device:
        return self.lattice.device

    @property
    def num_factors(self) -> int:
        """K, the number of factors: a cosine for every line, and a sine for every line ν ≠ 0."""
        return len(self.nu) + int(self.nu.any(-1).sum())

    @property
    def num_columns(self) -> int:
        return self.num_factors * self.lattice.num_columns

    def to(self, device: torch.device) -> "LineColumns":
        return LineColumns(self.lattice.to(device), self.nu.to(device))

    def select(self, columns: Int[Tensor, "k"]) -> "LineColumns":
        if len(columns) != self.num_columns:
            raise NotImplementedError(
                f"expected all {self.num_columns} columns of a kernel with a line spectrum, got "
                f"{len(columns)}; use a random rule such as gp_orff.QuasiMonteCarlo"
            )
        return self

    def plain(self) -> dict[str, object]:
        return {"lattice": self.lattice.plain(), "nu": self.nu.cpu()}

    def factors(self, x: Float[Tensor, "*b N d"]) -> Float[Tensor, "*b N K"]:
        """Return m(x): the cosines of all lines, then the sines."""
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
                gram[j, :, i] = gram[i, :, j]  # each block is symmetric
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
                f"{type(symbol).__name__} on a grid expects periodic kernels of time, got a kernel "
                "that is periodic in space; use a random rule such as gp_orff.QuasiMonteCarlo"
            )
        return self.lattice.multiplier(symbol, num_outputs, space).repeat(self.num_factors, 1, 1)

    @property
    def quarter_turn(self) -> tuple[Int[Tensor, "K*M"], Float[Tensor, "K*M"]]:
        partner, sign = self.lattice.quarter_turn
        start = torch.arange(self.num_factors, device=self.device) * len(partner)
        return (start.unsqueeze(-1) + partner).flatten(), sign.repeat(self.num_factors)


class LineFrequencies(FixedBuffers):
    """The lattice and the lines ν that all terms with lines share.

    Args:
        lattice: the lattice of the terms without their lines.
        nu: the frequencies of all lines, one of each pair ±ν, (J, d), in radians per unit.
        unbounded: whether the lattice does not depend on an input, (d,). The domain does not bound
            such inputs.
        omitted: the fraction of the variance that the omitted lines may have.
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
        """Return the columns of the lattice times the factors of all lines."""
        return LineColumns(self.lattice.columns(), self.nu)

    def outside(self, x: Float[Tensor, "*b n d"]) -> Bool[Tensor, "*b n"]:
        """Return for each of the points x whether it is outside the domain."""
        return self.lattice.outside(self._bounded(x))

    def check(self, x: Float[Tensor, "*b n d"]) -> None:
        """Raise a `ValueError` if a point of x is outside the domain."""
        self.lattice.check(self._bounded(x))

    def _bounded(self, x: Float[Tensor, "*b n d"]) -> Float[Tensor, "*b n d"]:
        return torch.where(self.unbounded, self.lattice.origin.to(x), x[..., : len(self.unbounded)])

    @property
    def tolerance(self) -> Float[Tensor, ""]:
        """The fraction of the variance that the lattice or the lines may omit."""
        return torch.maximum(self.lattice.tolerance, self.omitted)

    @property
    def constant(self) -> Bool[Tensor, "d"]:
        """Whether each input is constant, (d,); frequencies are summed along constant inputs."""
        return self.lattice.constant


class LineDraw(GridDraw):
    """The frequencies of one term with lines.

    Args:
        rest: the frequencies of the term without its lines.
        lattice: the lattice and all lines, which all terms with lines share.
        numbers: for each line of the term, the index of the line of each of its L line spectra,
            (J, L).
        halvings: the number of times that the weight of each line is halved, (J,). A product of two
            cosines halves the weight, because it has a sum and a difference of frequencies.
        place: the index of each line among the shared lines, (J,).
        spectra: the line spectra of the term, at the current hyperparameters.
    """

    expands = True
    without_nodes = (
        "expected a kernel with a spectral density, got a grid for a kernel with a line spectrum, "
        "such as PeriodicKernel; use a random rule such as gp_orff.QuasiMonteCarlo"
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
        """Pairs of a line of the term and the index of a factor, for every factor of the term."""
        nonzero = self.lattice.nu.any(-1)
        sines = len(nonzero) + nonzero.cumsum(0) - 1
        lines = list(enumerate(self.place.tolist()))
        return [*lines, *((i, int(sines[j])) for i, j in lines if nonzero[j])]

    def weights(self, term: Term) -> Float[Tensor, "*b J"]:
        """Return the weight w_j of every line of the term."""
        weights = 0.5 ** self.halvings.double()
        spectra = [s for s in spectra_of(term) if s.is_line]
        for density, order in zip(spectra, self.numbers.mT, strict=True):
            weights = weights * density.lines(int(order.max()) + 1)[1][..., order]
        return weights

    def expansion(self, members: Sequence[tuple[Term, "LineDraw"]]) -> Expansion:
        """Return the features of all terms on this lattice from the features without lines."""
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
        """Return the features of a single separable term."""
        blocks = [torch.zeros_like(part.scales * root[..., :1, None])] * phi.num_factors
        for line, factor in self._used:
            blocks[factor] = root[..., line, None, None] * part.scales
        return KroneckerExpansion(phi, torch.cat(blocks, dim=-2), part.mixing)

    def truncated_image(
        self, symbol: Symbol, term: Term, space: Sequence[int]
    ) -> Float[Tensor, "*b q q"]:
        """Return the variance of Q f that the lattice omits, plus that of the omitted lines."""
        # Let c be the fraction of the variance of the omitted lines. The formula is
        # total − (1 − c) grid = (total − grid) + c grid.
        rest = _rest(term)
        left_out = (1 - self.weights(term).sum(-1)).clamp_min(0)[..., None, None]
        delta = truncated_variance_of(symbol, rest, self.rest, space)
        return delta + left_out * image_variance(symbol, rest, self.rest, space)

    @torch.no_grad()
    def accuracy(self, term: Term) -> GridAccuracy:
        """Return the errors of the lattice; `truncated` includes the omitted lines."""
        of_rest = grid_accuracy(_rest(term), self.rest)
        included = self.weights(term).sum(-1).min().item()
        return replace(of_rest, truncated=1 - included * (1 - of_rest.truncated))

    def ratio_outside_range(self, spectra) -> float | None:
        """Return the ratio of a period to the period of the draw, if a period has changed.

        Otherwise return the ratio of lengthscales if it is outside its range, or None.
        """
        others = [density for density in spectra if not density.is_line]
        # Rounding changes a period by less than 1e-9.
        return self._ratio_of_lines(spectra, 1e-9) or self.rest.ratio_outside_range(others)

    def _ratio_of_lines(self, spectra, least: float) -> float | None:
        """Return the ratio of a period to its value at the draw if it changed by more than `least`.

        Otherwise return the ratio of the number of lines to the necessary number if there are too
        few lines, or None.
        """
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
        # Difference quotients change a period by less than 1e-3.
        ratio = None if self.warned else self._ratio_of_lines(spectra, 1e-3)
        if ratio is not None:
            self.warned = True
            warnings.warn(
                f"a period is about {ratio:.4g} times its value when the frequency grid was built, "
                "or the grid has only this fraction of the necessary lines; call redraw() of the "
                "ORFFKernel and continue, or do not optimise the period",
                GridWarning,
                stacklevel=2,
            )


_COARSER = 4.0  # the ratio of successive tolerances if the number of features is limited


def _rest(term: Term | TermSpectrum) -> Term | TermSpectrum:
    """Return a term without its lines."""
    leaves = tuple(leaf for leaf in term.leaves if not leaf.spectrum.is_line)
    return replace(term, leaves=leaves)


def draw_with_lines(grid: Rule, terms: Sequence[TermSpectrum], most: int) -> list[Draw]:
    """Return the draws of all terms by a `Grid`, in the order of the terms, with shared columns.

    Args:
        grid: a `Grid`.
        terms: the spectra of all terms. At least one of them has lines.
        most: the largest number of features. If other terms have no lines, the terms with lines
            have at most half of it.

    Raises:
        GridBudgetError: no lattice has so few features.
        NotImplementedError: a periodic kernel depends on several inputs.
    """
    others = [term for term in terms if not has_lines(term)]
    with_lines = [term for term in terms if has_lines(term)]
    if any(leaf.num_dims > 1 for term in with_lines for leaf in _leaves(term)):
        raise NotImplementedError(
            "Grid expects periodic kernels of one input, got a periodic kernel of several inputs; "
            "multiply periodic kernels with one input column each in active_dims="
        )
    rests = [_rest(term) for term in with_lines]
    share = most // 2 if others else most
    num_inputs = 1 + max(dim for term in with_lines for leaf in term.leaves for dim in leaf.dims)

    def attempt(tolerance: float) -> tuple[list, list[LatticeDraw], float]:
        """Return the lines of each term, the draws of the lattice, and the tolerance of both."""
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

    # If the number of features is limited, fewer lines allow more features for the lattice. The
    # tolerance of the lines increases until it reaches the tolerance of the lattice. The best
    # attempt is used.
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
    """Return ν, `numbers` and `halvings` of every line of a term, see `LineDraw`."""
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
