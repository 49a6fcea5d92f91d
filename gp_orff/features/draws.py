"""The protocol of frequency rules, and frequencies on a lattice shared by all terms."""

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Protocol

import numpy as np
import torch
from gpytorch.kernels import Kernel
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from gp_orff.features.columns import Columns, TrigColumns, side_by_side
from gp_orff.features.lattice import GramCache, LatticeColumns
from gp_orff.kernels.base import is_number
from gp_orff.kernels.lattice_sums import lattice_weights
from gp_orff.kernels.spectra import KernelSpectrum, Spectrum, gauss_legendre
from gp_orff.kernels.tree import Sampler, Term, embedded, spectra_of
from gp_orff.kernels.variance_spectrum import VarianceSpectrum

# The protocol of frequency rules: a rule turns spectra of terms into frequencies.
#
# 1. A rule is an immutable value without tensors. `draw` gives it the spectra of all terms at once,
#    because terms may share a lattice or a mixture.
# 2. The result is a `Draw` for each term: base variables in buffers, which do not depend on
#    hyperparameters and are stored with the model.
# 3. `nodes` turns base variables into frequencies and weights at the present hyperparameters,
#    differentiably, and `columns` gives the columns φ(x) with their variances.
#
# Inference asks `shared_columns` whether the frequencies stay where they are: if so, the sums over
# the data are computed once.


@dataclass(frozen=True)
class LeafSpectrum:
    """The spectrum of one scalar kernel of a term, its inputs and its degree in B(ω)."""

    spectrum: Spectrum
    dims: tuple[int, ...]  # the input columns of the kernel
    degree: int  # ‖B(ω)‖² grows like ‖ω‖^{2·degree}, unless B is a general function
    variance: VarianceSpectrum | None = None  # for a general B

    @property
    def num_dims(self) -> int:
        return len(self.dims)

    @property
    def is_constant(self) -> bool:
        """Whether B does not depend on the frequency."""
        return self.degree == 0 and self.variance is None

    @property
    def sampler(self) -> Sampler | None:
        """What draws frequencies from a density of its own, for a general B that has one."""
        return None if self.variance is None else self.variance.factor.sampler

    def tail(self, scaled_radius: float) -> float:
        """The share of the variance beyond a scaled radius."""
        if self.variance is not None:
            return self.variance.tail(scaled_radius)
        return self.spectrum.tail(scaled_radius, self.degree, self.num_dims)

    def correlation(self, lag: float, axis: int) -> float:
        """A bound of the correlation at all lags from `lag` on, along an axis."""
        if self.variance is not None:
            return self.variance.correlation(lag, axis)
        return self.spectrum.correlation(lag, axis, self.degree)


@dataclass(frozen=True)
class TermSpectrum:
    """The spectrum of one term of a kernel tree; its leaves have independent frequencies."""

    leaves: tuple[LeafSpectrum, ...]
    rank: int = 1  # features for each trigonometric column: the columns of B(ω)
    group: Kernel | None = None  # terms of one group share random frequencies
    share: float = 1.0  # of the variance of the sum of all terms

    def own(self, tolerance: float, most: float) -> float:
        """The share of its own variance that truncates `tolerance` of that of the sum."""
        return min(tolerance / self.share, most) if self.share > 0 else most


class Draw(nn.Module):
    """The frequencies of one term, drawn once as base variables free of hyperparameters.

    Terms with the same `mixture` are drawn from one mixture of their densities: each gives some of
    the frequencies, and uses all of them.
    """

    sampled = True  # whether they are a random sample, whose halves can be compared
    decays = False  # whether the columns are waves that decay with height
    projected = False  # whether frequencies are fast projections, which are not written out
    expands = False  # whether `expansion` makes the features of its term
    on_lattice = False  # whether it is a `LatticeDraw`
    without_nodes: str | None = None  # the error of `nodes`, for columns that are no waves

    def __init__(
        self,
        bases: Sequence[Float[Tensor, "D c"]],
        orders: Sequence[int],
        mixture: int | None = None,  # None: the term is drawn by itself
    ):
        super().__init__()
        self.orders, self.mixture = tuple(orders), mixture
        for index, base in enumerate(bases):
            self.register_buffer(f"base_{index}", base)

    @property
    def bases(self) -> list[Float[Tensor, "D c"]]:
        """The base variables of each leaf."""
        return [getattr(self, f"base_{index}") for index in range(len(self.orders))]

    @property
    def num_frequencies(self) -> int:
        return self.bases[0].shape[0] if self.orders else 1

    @property
    def num_columns(self) -> int:
        """The number of columns that `columns` gives."""
        return 2 * self.num_frequencies

    def columns(self, term: Term, num_inputs: int) -> tuple[Columns, Float[Tensor, "*b M 1"]]:
        """The columns φ(x) of a term's scalar kernel, and the variance v_c of each.

        k(x, z) ≈ Σ_c v_c φ_c(x) φ_c(z), differentiable in the hyperparameters.
        """
        omegas, weights = self.nodes(spectra_of(term))
        phi = TrigColumns.of(sum_of_leaves(omegas, term, num_inputs), self.sampled)
        return phi, phi.of_frequencies(weights.unsqueeze(-1))

    def nodes(
        self, spectra: Sequence[Spectrum]
    ) -> tuple[list[Float[Tensor, "*b D d"]], Float[Tensor, "*b D"]]:
        """ω of each leaf, and the weights w with E[g(ω₁, …)] ≈ Σ_k w_k g(ω_1k, …).

        They follow the hyperparameters of the spectra, differentiably.
        """
        if self.without_nodes is not None:
            raise NotImplementedError(self.without_nodes)
        parts = zip(spectra, self.bases, self.orders, strict=True)
        omegas = [spectrum.frequencies(base, order) for spectrum, base, order in parts]
        return omegas, self.sample_weights(spectra)

    def sample_weights(self, spectra: Sequence[Spectrum]) -> Float[Tensor, "*b D"]:
        """The weights w of a random sample."""
        weights = torch.full_like(self.bases[0][:, 0], 1 / self.num_frequencies)
        for spectrum, base, order in zip(spectra, self.bases, self.orders, strict=True):
            weights = weights * spectrum.importance(base, order)
        return weights

    def shared_columns(self) -> Columns | None:
        """The columns that all terms of the tree share; None if each has its own."""
        return None

    def ratio_outside_range(self, spectra: Sequence[Spectrum]) -> float | None:
        """The ratio of a lengthscale to its value at the draw, if these frequencies are no longer
        valid for it; None if they are valid."""
        return None

    def check_domain(self, spectra: Sequence[Spectrum], *points: Float[Tensor, "*b n d"]) -> None:
        """Raise a ValueError at points where these frequencies do not represent the kernel."""

    def extra_repr(self) -> str:
        return f"num_frequencies={self.num_frequencies}"

    def _load_from_state_dict(self, state_dict, prefix, *arguments):
        if self.mixture is not None:  # the share of a term follows hyperparameters
            take_lengths(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *arguments)


def sum_of_leaves(
    omegas: Sequence[Float[Tensor, "*b D k"]], term: Term, num_inputs: int
) -> Float[Tensor, "*b D d"]:
    """The frequencies of a product of kernels, from those of its leaves."""
    return sum(
        embedded(omega, leaf.active_dims, num_inputs)
        for omega, leaf in zip(omegas, term.leaves, strict=True)
    )


def uniform(number: int, num_coordinates: int, rng: np.random.Generator) -> np.ndarray:
    """Independent uniform numbers (number, num_coordinates), neither 0 nor 1."""
    return np.clip(rng.random((number, num_coordinates)), 2.0**-54, 1 - 2.0**-53)


def sole_leaf(term: TermSpectrum, kind: type[KernelSpectrum], expected: str) -> LeafSpectrum | None:
    """The leaf of a term whose spectrum is of a kind that has no products; None if none is.

    Raises:
        NotImplementedError: a product with another kernel; the message states what is `expected`.
    """
    leaves = [leaf for leaf in term.leaves if isinstance(leaf.spectrum, kind)]
    if leaves and len(term.leaves) > 1:
        raise NotImplementedError(expected)
    return leaves[0] if leaves else None


def check_seed(seed: int, owner: str) -> None:
    """Check a seed.

    Raises:
        ValueError: no non-negative integer.
    """
    if not is_number(seed, Integral) or seed < 0:
        raise ValueError(f"{owner} expects seed to be a non-negative integer, got {seed!r}")


class Rule(Protocol):
    """A frequency rule: an immutable value without tensors."""

    def draw(self, terms: Sequence[TermSpectrum]) -> list[Draw]:
        """The frequencies of every term of a kernel tree, in order."""


def check_rule(rule: object, expected: str) -> None:
    """Raise TypeError, with words on what is `expected`, unless `rule` is an instance of a rule."""
    if isinstance(rule, type) or not hasattr(rule, "draw"):
        raise TypeError(f"{expected}, got {rule!r}; use, for instance, gp_orff.Auto()")


# Inputs that are constant: on a lattice, the frequencies along them are summed.
#
# Where the input a is the same at all points, columns do not depend on ω_a. The kernel of a field
# has A(ω) = B Bᵀ, quadratic in ω, and a density even in ω_a, so that with ω = (ω_t, ω_a)
#
#     Σ_{ω_a} w(ω) A(ω) = m₀(ω_t) A(ω_t, 0) + m₂(ω_t) A(0, 1),   m₀ = Σ w,  m₂ = Σ w ω_a²,
#
# and likewise with one more summand for each further input of this kind. m₀ and m₂ are the weights
# of spectra in the plane: of the marginal one, and of the marginal one weighted by ω_a². For scale
# mixtures of Gaussians both are in the same family, so that the sums are complete.


ALONG_FREQUENCY = -1  # the direction of the summand A(ω_t, 0)


def summable(terms: Sequence[TermSpectrum], num_inputs: int) -> Bool[np.ndarray, "d"]:
    """The inputs along which the frequencies of all kernels that depend on them can be summed."""
    used, known = np.zeros(num_inputs, dtype=bool), np.ones(num_inputs, dtype=bool)
    for term in terms:
        for leaf in term.leaves:
            used[list(leaf.dims)] = True
            summed = leaf.variance is None and leaf.spectrum.marginal((0,)) is not None
            known[list(leaf.dims)] &= summed
    return used & known


def in_plane(
    leaf: LeafSpectrum, constant: Bool[np.ndarray, "d"], across: bool = False
) -> LeafSpectrum | None:
    """The spectrum of a leaf over its inputs that are not constant; None if all are.

    `across` a constant input, it is that of the weights m₂ of a field.
    """
    varying = [axis for axis, dim in enumerate(leaf.dims) if not constant[dim]]
    if len(varying) == leaf.num_dims:
        return leaf
    if not varying:
        return None
    dims, order = tuple(leaf.dims[axis] for axis in varying), int(across)
    degree = 0 if across else leaf.degree
    return replace(leaf, spectrum=leaf.spectrum.marginal(varying, order), dims=dims, degree=degree)


def directions(
    term: TermSpectrum, constant: Bool[np.ndarray, "d"]
) -> dict[int, list[LeafSpectrum]]:
    """The spectra in the plane that belong to m₀, and to m₂ of every constant input of a field.

    The keys are the axes of the first leaf, or `ALONG_FREQUENCY`. Leaves whose inputs are all
    constant are left out.
    """
    first, others = term.leaves[:1], [in_plane(leaf, constant) for leaf in term.leaves[1:]]
    blocks = {ALONG_FREQUENCY: [in_plane(leaf, constant) for leaf in first]}
    if first and first[0].degree:
        for axis, dim in enumerate(first[0].dims):
            if constant[dim]:
                blocks[axis] = [in_plane(first[0], constant, across=True)]
        if blocks[ALONG_FREQUENCY] == [None]:  # B(0) = 0
            del blocks[ALONG_FREQUENCY]
    return {
        axis: [leaf for leaf in (*leaves, *others) if leaf is not None]
        for axis, leaves in blocks.items()
    }


def plane_weights(
    spectrum: Spectrum,
    omega: Float[Tensor, "D k"],
    spacing: Float[Tensor, "k"],
    constant: Sequence[bool],
    axis: int = ALONG_FREQUENCY,
) -> Float[Tensor, "*b D"]:
    """m₀ of a leaf on the lattice of its inputs that are not constant, or m₂ of a constant `axis`.

    Args:
        spectrum: of the leaf.
        omega: the frequencies; their coordinates along constant inputs do not matter.
        spacing: of the lattice.
        constant: which of the inputs are constant.
        axis: the one that m₂ belongs to, or `ALONG_FREQUENCY` for m₀.
    """
    varying, order = [i for i, flat in enumerate(constant) if not flat], 0
    weights = omega.new_ones(len(omega))
    if axis != ALONG_FREQUENCY:
        order, weights = 1, weights * spectrum.second_moments(len(constant))[..., axis, None]
    if not varying:
        return weights
    if len(varying) < len(constant):
        spectrum = spectrum.marginal(varying, order)
    return weights * lattice_weights(spectrum, omega[:, varying], spacing[varying])


# The frequencies of a kernel tree's terms on one shared lattice.
#
# All terms use points of one `Lattice`, so that one set of columns and one set of sums over the
# data serves all of them. A `LatticeDraw` refers to its points by position and computes their
# weights S(ω)∏h; the weight of ω ≠ 0 counts twice, as it stands for ±ω.


class GridWarning(UserWarning):
    """Warns that a lengthscale has left the range for which its frequency grid was built, or that a
    grid truncates much of the variance.

    The kernel is then less accurate than `Grid(tolerance=...)` says: call `ORFFKernel.redraw()`,
    constrain the lengthscale, or give `Grid` a wider `lengthscale_range`.

    Example:
        >>> import gpytorch, gp_orff, torch, warnings
        >>> x = torch.linspace(0, 1, 20).unsqueeze(-1)
        >>> kernel = gpytorch.kernels.RBFKernel(ard_num_dims=1)
        >>> kernel = gp_orff.ORFFKernel(kernel, gp_orff.Grid.for_data(x))
        >>> # it was 0.69 when the grid was built
        >>> kernel.base_kernel.lengthscale = 0.1
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always")
        ...     _ = kernel(x).to_dense()
        >>> caught[0].category.__name__
        'GridWarning'
    """


def take_lengths(module: nn.Module, state: Mapping[str, Tensor], prefix: str) -> None:
    """Give the buffers of a module the shapes that a state has."""
    for name, buffer in [*module.named_buffers(recurse=False)]:
        incoming = state.get(prefix + name)
        if incoming is not None and incoming.shape != buffer.shape:
            setattr(module, name, torch.empty_like(incoming, device=buffer.device))


class FixedBuffers(nn.Module):
    """A module whose buffers keep their types, and take the lengths of the state they load."""

    def _apply(self, fn, recurse=True):
        return super()._apply(lambda tensor: tensor.to(fn(tensor).device), recurse)

    def _load_from_state_dict(self, state_dict, prefix, *arguments):
        take_lengths(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *arguments)


class Lattice(FixedBuffers):
    """The lattice that the terms of a kernel tree share: ω = h ∘ k for integer k.

    Args:
        indices: k, one of each pair ±k.
        spacing: h, in radians per unit of the inputs.
        domain: the lowest and highest value of every input at which the lattice represents the
            kernel; may be infinite.
        lag: the longest lag between a datum and a point of the domain, along each axis.
        tolerance: the share of the variance for which the lattice was made.
        constant: the inputs that are constant, along which frequencies are summed; none if None.
    """

    def __init__(
        self,
        indices: Int[np.ndarray, "D d"],
        spacing: Float[np.ndarray, "d"],
        domain: Float[np.ndarray, "2 d"],
        lag: Float[np.ndarray, "d"],
        tolerance: float,
        constant: Bool[np.ndarray, "d"],
    ):
        super().__init__()
        self.register_buffer("constant", torch.from_numpy(constant))
        finite = np.isfinite(domain).all()
        self.register_buffer("indices", torch.from_numpy(indices))
        self.register_buffer("spacing", torch.from_numpy(spacing))
        self.register_buffer("domain", torch.from_numpy(domain))
        origin = domain.mean(axis=0) if finite else np.zeros(len(spacing))
        self.register_buffer("origin", torch.from_numpy(origin))
        self.register_buffer("lag", torch.from_numpy(lag if finite else np.zeros_like(lag)))
        self.register_buffer("tolerance", torch.tensor(tolerance, dtype=torch.float64))
        self.cache = GramCache()

    def columns(self) -> LatticeColumns:
        """The cosines and sines of every frequency, with the lattice's cache of C."""
        return LatticeColumns.of(self.indices, self.spacing, self.origin, self.cache)

    def _load_from_state_dict(self, state_dict, prefix, *arguments):
        spacing = state_dict.get(prefix + "spacing", self.spacing)
        state_dict.setdefault(prefix + "constant", torch.zeros_like(spacing, dtype=torch.bool))
        super()._load_from_state_dict(state_dict, prefix, *arguments)
        self.cache = GramCache()

    @property
    def period(self) -> Float[Tensor, "d"]:
        """P = 2π/h, with which the sum over the lattice is periodic."""
        return 2 * math.pi / self.spacing

    def outside(self, x: Float[Tensor, "*b n d"]) -> Bool[Tensor, "*b n"]:
        """Which of the points x are outside the domain."""
        low, high = self.domain
        slack = 1e-6 * (high - low)  # the rounding of float32 inputs
        x = x.detach()[..., : len(low)]
        return ((x < low - slack) | (x > high + slack)).any(-1)

    def check(self, x: Float[Tensor, "*b n d"]) -> None:
        """Check that all points x are inside the domain.

        Raises:
            ValueError: points outside.
        """
        check_domain(x, self.outside(x), self.domain)


def check_domain(
    x: Float[Tensor, "*b n d"], outside: Bool[Tensor, "*b n"], domain: Float[Tensor, "2 d"]
) -> None:
    """Refuse points x that are outside a domain.

    Raises:
        ValueError: points outside.
    """
    if outside.any():
        worst = ", ".join(f"{value:.6g}" for value in x[outside][0].tolist())
        box = ", ".join(f"({low:.6g}, {high:.6g})" for low, high in domain.mT.tolist())
        raise ValueError(
            f"expected points inside the grid's domain ({box}), got {int(outside.sum())} "
            f"outside it, such as ({worst}); give the region of interest as domain= of the "
            "rule, such as Grid.for_data(x, domain=...) or Auto(domain=...)"
        )


class GridDraw(FixedBuffers, Draw):
    """The draw of a term of a grid, for a range of lengths about the present ones.

    Args:
        lattice: the frequencies, which know their domain.
        lengthscale_range: the shortest and longest length, relative to the present ones.
        diagonal_correction: whether inference adds the truncated variance.
    """

    sampled = False
    length = "a lengthscale"  # whose range it is

    def __init__(
        self,
        lattice: nn.Module,
        lengthscale_range: tuple[float, float],
        diagonal_correction: bool,
    ):
        super().__init__([], [])
        self.lattice, self.joint, self.warned = lattice, None, False
        self.lengthscale_range, self.diagonal_correction = lengthscale_range, diagonal_correction

    @property
    def shared(self) -> nn.Module:
        """The frequencies that all terms share: the lattice, or more in a sum with others."""
        return self.joint or self.lattice

    def shared_columns(self) -> Columns:
        return self.shared.columns()

    def check_domain(self, spectra, *points):
        for x in points:
            self.lattice.check(x)

    def check_range(self, spectra: Sequence[Spectrum]) -> None:
        """Warn once of lengths outside the range."""
        ratio = None if self.warned else self.ratio_outside_range(spectra)
        if ratio is not None:
            self.warned = True
            low, high = self.lengthscale_range
            warnings.warn(
                f"{self.length} is {ratio:.2g} times what the frequency grid was built for, "
                f"outside its range {low:g} to {high:g}: call redraw() of the ORFFKernel and "
                f"continue, constrain {self.length.replace('a ', 'the ')}, or give Grid a wider "
                "lengthscale_range",
                GridWarning,
                stacklevel=2,
            )


class LatticeDraw(GridDraw):
    """The frequencies of one term on a lattice, with the weights of the quadrature.

    Args:
        lattice: shared by all terms of the tree.
        position: which of the lattice's points the term uses, (D,). A point occurs again for each
            constant input of a field.
        direction: of B(ω), (D,): the axis of its spectrum that is a constant input, or
            `ALONG_FREQUENCY`.
        spectrum: of the term, at its present hyperparameters.
        lengthscale_range: the shortest and longest lengthscale for which the frequencies are
            valid, relative to the present lengthscales.
        diagonal_correction: whether inference adds the truncated variance.
        cell: which of the points represent the cell around ω = 0 of a field; see `NearZero` in
            `gp_orff.features.assemble`.
    """

    on_lattice = True

    def __init__(
        self,
        lattice: Lattice,
        position: Int[np.ndarray, "D"],
        direction: Int[np.ndarray, "D"],
        spectrum: TermSpectrum,
        lengthscale_range: tuple[float, float],
        diagonal_correction: bool,
        cell: Int[np.ndarray, "k"] = (),
    ):
        super().__init__(lattice, lengthscale_range, diagonal_correction)
        self.cell: LatticeDraw | None = None
        if len(cell):
            varying = (~lattice.constant[list(spectrum.leaves[0].dims)]).sum().item()
            others = TermSpectrum(spectrum.leaves[1:], varying * spectrum.rank)
            along = np.full(len(cell), ALONG_FREQUENCY)
            options = (0.0, math.inf), diagonal_correction
            self.cell = LatticeDraw(lattice, cell, along, others, *options)
        self.dims = tuple(leaf.dims for leaf in spectrum.leaves)
        self.register_buffer("position", torch.from_numpy(position))
        self.register_buffer("direction", torch.from_numpy(direction))
        built = _lengths([leaf.spectrum for leaf in spectrum.leaves], self.dims)
        self.register_buffer("built", torch.from_numpy(np.concatenate(built)))

    @property
    def num_frequencies(self) -> int:
        return len(self.position)

    @property
    def nonzero(self) -> Tensor:
        """Which frequencies are not zero, and so have a sine."""
        return self.lattice.indices[self.position].any(-1)

    def nodes(self, spectra):
        self.check_range(spectra)
        indices, spacing = self.lattice.indices[self.position], self.lattice.spacing
        omegas = [(indices * spacing)[:, list(dims)] for dims in self.dims]
        weights = 1.0 + self.nonzero.to(spacing)  # −k is the same feature
        for leaf, (spectrum, omega) in enumerate(zip(spectra, omegas, strict=True)):
            weights = weights * self._leaf_weights(leaf, spectrum, omega)
        across = self.direction != ALONG_FREQUENCY
        if across.any():
            omegas[0][across] = torch.eye(len(self.dims[0])).to(spacing)[self.direction[across]]
        return omegas, weights

    def _leaf_weights(
        self, leaf: int, spectrum: Spectrum, omega: Float[Tensor, "D k"]
    ) -> Float[Tensor, "*b D"]:
        """The weights of the frequencies of one leaf; the first is that of the field."""
        dims = list(self.dims[leaf])
        spacing, constant = self.lattice.spacing[dims], self.lattice.constant[dims].tolist()
        if leaf or not any(constant):
            return plane_weights(spectrum, omega, spacing, constant)
        axes, counts = self.direction.unique_consecutive(return_counts=True)
        parts = zip(axes.tolist(), omega.split(counts.tolist()), strict=True)
        weights = [plane_weights(spectrum, part, spacing, constant, axis) for axis, part in parts]
        return torch.cat(weights, dim=-1)

    def _load_from_state_dict(self, state_dict, prefix, *arguments):
        position = state_dict.get(prefix + "position", self.position)
        along = torch.full_like(position, ALONG_FREQUENCY)
        state_dict.setdefault(prefix + "direction", along)  # of a state before there were others
        super()._load_from_state_dict(state_dict, prefix, *arguments)

    def ratio_outside_range(self, spectra: Sequence[Spectrum]) -> float | None:
        lengthscales, others = _lengths(spectra, self.dims)
        built = self.built.cpu().numpy()
        # other lengths depend on two parameters, and may leave the range by each of them
        power = np.repeat([1, 2], [len(lengthscales), len(others)])[: len(built)]
        ratio = np.concatenate([lengthscales, others])[: len(built)] / built
        low, high = self.lengthscale_range
        outside = (ratio < 0.999 * low**power) | (ratio > 1.001 * high**power)
        columns = [dim for dims in self.dims for dim in dims]  # one for each lengthscale
        outside[: len(columns)] &= ~self.lattice.constant.cpu().numpy()[columns]
        outside = ratio[outside]
        return float(outside[0]) if len(outside) else None


def _lengths(
    spectra: Sequence[Spectrum], dims: Sequence[Sequence[int]]
) -> tuple[Float[np.ndarray, "k"], Float[np.ndarray, "m"]]:
    """The lengthscales, and the other lengths, for which a grid is built."""
    pairs = [(spectrum, len(axes)) for spectrum, axes in zip(spectra, dims, strict=True)]
    lengthscales = [axis_lengthscales(spectrum, count) for spectrum, count in pairs]
    others = [spectrum.other_lengths(count) for spectrum, count in pairs]
    return np.concatenate([[], *lengthscales]), np.concatenate([[], *others])


def axis_lengthscales(spectrum: Spectrum, num_dims: int) -> Float[np.ndarray, "d"]:
    """The lengthscale along each axis: the scaled radius of a unit frequency."""
    if not hasattr(spectrum, "scaled_radius"):
        raise NotImplementedError(
            f"{type(spectrum).__name__} has no scaled_radius, tail and correlation, which a "
            "frequency grid needs: expected a subclass of gp_orff.spectra.GridSpectrum; use a "
            "random rule such as gp_orff.QuasiMonteCarlo"
        )
    return spectrum.scaled_radius(np.eye(num_dims))


# A quadrature over the frequencies beyond a grid; its nodes depend on no hyperparameter.


def remainder(
    draw: LatticeDraw, spectra: Sequence[Spectrum]
) -> tuple[list[Float[Tensor, "m k"]], Float[Tensor, "*b m"]]:
    """ω of each leaf and weights w with Σ w g(ω) ≈ E[g(ω); ω beyond the grid], for even g.

    The cell around ω = 0 counts as part of the grid.
    """
    omegas, weights = _cells(draw)
    for spectrum, omega in zip(spectra, omegas, strict=True):
        weights = weights * spectrum.log_density(omega).exp()
    return omegas, weights


def _cells(draw: LatticeDraw) -> tuple[list[Float[Tensor, "m k"]], Float[Tensor, "m"]]:
    """ω of each leaf and the volumes of their cells.

    Beyond the grid the lattice goes on for a while; from there to infinity follow, along every
    axis, the nodes of a Gauss–Legendre rule in 1/√ω.
    """
    columns = [dim for dims in draw.dims for dim in dims]
    spacing = draw.lattice.spacing[columns].cpu().numpy()
    grid = draw.lattice.indices[draw.position][:, columns].cpu().numpy()
    # The lattice goes on to 1.5 of the grid's largest index; so many nodes reach from there to
    # infinity.
    edge = np.ceil(1.5 * np.abs(grid).max(axis=0)).astype(int) + 1
    far = {1: 32, 2: 16, 3: 8}.get(len(columns), 6)
    axes = [_axis(m, h, far) for m, h in zip(edge, spacing, strict=True)]
    volume = np.ones(())
    for _, lengths in axes:
        volume = np.multiply.outer(volume, lengths)
    for half in (grid, -grid):
        volume[tuple((half + edge + far).T)] = 0.0
    # the flat array is symmetric: −ω, the same wave, is in the second half, ω = 0 in the middle
    beyond = np.flatnonzero(volume.reshape(-1)[: volume.size // 2])
    places = np.unravel_index(beyond, volume.shape)
    omega = {i: axis[at] for i, (axis, _), at in zip(columns, axes, places, strict=True)}
    device = draw.position.device
    return (
        [torch.from_numpy(np.stack([omega[i] for i in dims], -1)).to(device) for dims in draw.dims],
        torch.from_numpy(2 * volume.reshape(-1)[beyond]).to(device),
    )


def _axis(edge: int, spacing: float, far: int) -> tuple[np.ndarray, np.ndarray]:
    """Nodes between −∞ and ∞ and the lengths of their cells.

    Up to the index `edge` nodes are multiples of the spacing; `far` nodes lie on each side beyond.
    """
    x, weights = gauss_legendre(far)
    x, end = 0.5 * (1 + x[::-1]), (edge + 0.5) * spacing
    beyond, lengths = end / x**2, weights[::-1] * end / x**3  # ω = end / x²
    inner = np.arange(-edge, edge + 1) * spacing
    return (
        np.concatenate([-beyond[::-1], inner, beyond]),
        np.concatenate([lengths[::-1], np.full(len(inner), spacing), lengths]),
    )


# The frequencies of sums of several families: those of a lattice, harmonic waves, and lines.


class SharedFrequencies(nn.Module):
    """The lattice of a sum, and the waves and lines of its harmonic and periodic terms."""

    def __init__(self, parts: Sequence[nn.Module]):
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def columns(self) -> Columns:
        """The columns of all parts, one part after the other."""
        return side_by_side([part.columns() for part in self.parts])[0]

    def outside(self, x: Float[Tensor, "*b n d"]) -> Bool[Tensor, "*b n"]:
        """Which of the points x are outside the domain of any part."""
        return torch.stack([part.outside(x) for part in self.parts]).any(0)

    def check(self, x: Float[Tensor, "*b n d"]) -> None:
        """Check that all points x are inside the domains; raises a ValueError otherwise."""
        for part in self.parts:
            part.check(x)

    @property
    def tolerance(self) -> Float[Tensor, ""]:
        """The share of the variance for which the frequencies were made."""
        return torch.stack([part.tolerance for part in self.parts]).max()

    @property
    def constant(self) -> Bool[Tensor, "d"]:
        """The inputs that are constant, along which frequencies are summed."""
        return torch.stack([part.constant for part in self.parts]).any(0)


def joined(
    grid: Rule,
    terms: Sequence[TermSpectrum],
    family: Sequence[Draw],
    in_family: Callable[[TermSpectrum], bool],
    most: int,
) -> list[Draw]:
    """The draws of all terms, in order: those of a family, and of other terms those by a `Grid`,
    with what is left of `most` features. Draws of several families share their frequencies."""
    others, rest = [term for term in terms if not in_family(term)], []
    if others:
        left = max(most - sum(draw.num_columns for draw in family), 1)
        rest = replace(grid, max_features=None if grid.max_features is None else left).draw(others)
    ours, remaining = iter(family), iter(rest)
    draws = [next(ours if in_family(term) else remaining) for term in terms]
    parts = dict.fromkeys(draw.lattice for draw in sorted(draws, key=lambda d: d.expands))
    for draw in draws:
        draw.joint = SharedFrequencies(list(parts)) if len(parts) > 1 else None
    return draws
