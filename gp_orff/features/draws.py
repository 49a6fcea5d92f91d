"""The protocol of frequency rules, and frequencies on a lattice that all terms share."""

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

# The protocol of frequency rules, which choose frequencies for the spectra of terms.
#
# 1. A rule is an immutable value without tensors. Its method `draw` receives the spectra of all
#    terms at once, because terms may share a lattice or a mixture.
# 2. The result is a `Draw` for each term. Its buffers contain base variables, which do not depend
#    on hyperparameters and are stored with the model.
# 3. `Draw.nodes` computes frequencies and weights at the current hyperparameters, differentiably.
#    `Draw.columns` returns the columns φ(x) with their variances.
#
# If the frequencies are fixed, `shared_columns` returns their columns. The sums over the data are
# then computed only once.


@dataclass(frozen=True)
class LeafSpectrum:
    """The spectrum of one scalar kernel of a term.

    Attributes:
        spectrum: the spectral density of the scalar kernel.
        dims: the input columns of the scalar kernel.
        degree: the exponent of ‖B(ω)‖ ~ ‖ω‖^degree, for the factor B of the term; 0 if B is a
            general function.
        variance: the spectrum of the variance, if B is a general function; None otherwise.
    """

    spectrum: Spectrum
    dims: tuple[int, ...]
    degree: int
    variance: VarianceSpectrum | None = None

    @property
    def num_dims(self) -> int:
        return len(self.dims)

    @property
    def is_constant(self) -> bool:
        """Whether B does not depend on the frequency."""
        return self.degree == 0 and self.variance is None

    @property
    def sampler(self) -> Sampler | None:
        """The function that draws frequencies instead of the spectral density, or None."""
        return None if self.variance is None else self.variance.factor.sampler

    def tail(self, scaled_radius: float) -> float:
        """Return the fraction of the variance at frequencies beyond `scaled_radius`.

        Args:
            scaled_radius: the radius, in units of `GridSpectrum.scaled_radius`.
        """
        if self.variance is not None:
            return self.variance.tail(scaled_radius)
        return self.spectrum.tail(scaled_radius, self.degree, self.num_dims)

    def correlation(self, lag: float, axis: int) -> float:
        """Return a bound of |K(r)| / |K(0)| at all lags r ≥ `lag` along one input.

        Args:
            lag: the shortest lag, in units of the input.
            axis: the input, as an index into `dims`.
        """
        if self.variance is not None:
            return self.variance.correlation(lag, axis)
        return self.spectrum.correlation(lag, axis, self.degree)


@dataclass(frozen=True)
class TermSpectrum:
    """The spectrum of one term of a kernel tree, whose leaves have independent frequencies.

    Attributes:
        leaves: the spectra of the scalar kernels of the term.
        rank: the number of columns of B(ω), which is the number of features for each cosine or
            sine.
        group: the kernel of a group of terms that share random frequencies; None without a group.
        share: the fraction of the variance of the sum of all terms.
    """

    leaves: tuple[LeafSpectrum, ...]
    rank: int = 1
    group: Kernel | None = None
    share: float = 1.0

    def own(self, tolerance: float, most: float) -> float:
        """Return the fraction of the variance of this term that the term may truncate.

        Args:
            tolerance: the fraction of the variance of the sum of all terms that may be truncated.
            most: the largest result.
        """
        return min(tolerance / self.share, most) if self.share > 0 else most


class Draw(nn.Module):
    """The D frequencies of one term, stored in a form that does not depend on hyperparameters.

    The stored random numbers are the base variables of each leaf, that is, of each scalar kernel of
    the term. `Spectrum.frequencies` computes frequencies from them. For an RBF kernel, for example,
    the base variables are z ~ N(0, I), and the frequencies are ω = z/ℓ. The base variables are
    drawn once, so that results are smooth functions of hyperparameters such as ℓ.

    Terms with the same `mixture` share the frequencies of a mixture of their densities. Some of
    these frequencies are drawn from each term, and every term uses all of them.

    Args:
        bases: the base variables (D, c) of each leaf of the term.
        orders: the exponent t of the weight ‖z‖^{2t} in the density of each leaf.
        mixture: the index of the mixture; None if the term shares no frequencies.
    """

    sampled = True  # whether the frequencies are a random sample, whose halves can be compared
    decays = False  # whether the columns are waves that decay with height
    projected = False  # whether frequencies are fast projections, not stored as a matrix
    expands = False  # whether `expansion` computes the features of the term
    on_lattice = False  # whether this is a `LatticeDraw`
    without_nodes: str | None = None  # the error that `nodes` raises if columns are not waves

    def __init__(
        self,
        bases: Sequence[Float[Tensor, "D c"]],
        orders: Sequence[int],
        mixture: int | None = None,
    ):
        super().__init__()
        self.orders, self.mixture = tuple(orders), mixture
        for index, base in enumerate(bases):
            self.register_buffer(f"base_{index}", base)

    @property
    def bases(self) -> list[Float[Tensor, "D c"]]:
        """The base variables (D, c) of each leaf."""
        return [getattr(self, f"base_{index}") for index in range(len(self.orders))]

    @property
    def num_frequencies(self) -> int:
        return self.bases[0].shape[0] if self.orders else 1

    @property
    def num_columns(self) -> int:
        """M, the number of columns that `columns` returns."""
        return 2 * self.num_frequencies

    def columns(self, term: Term, num_inputs: int) -> tuple[Columns, Float[Tensor, "*b M 1"]]:
        """Return the M columns φ_c(x) of the scalar kernel of a term, and their variances v_c.

        The kernel is k(x, z) ≈ Σ_c v_c φ_c(x) φ_c(z). The variances (*b, M, 1) are differentiable
        in the hyperparameters.

        Args:
            term: the term of the kernel tree.
            num_inputs: d, the number of input columns.
        """
        omegas, weights = self.nodes(spectra_of(term))
        phi = TrigColumns.of(sum_of_leaves(omegas, term, num_inputs), self.sampled)
        return phi, phi.of_frequencies(weights.unsqueeze(-1))

    def nodes(
        self, spectra: Sequence[Spectrum]
    ) -> tuple[list[Float[Tensor, "*b D d"]], Float[Tensor, "*b D"]]:
        """Return the frequencies ω_l (*b, D, d) of each leaf l, and the weights w (*b, D).

        A leaf is one scalar kernel of the term. The leaves 1, …, L have independent frequencies.
        For every function g of one frequency of each leaf, the expectation over their spectral
        densities is approximately

            E[g(ω_1, …, ω_L)] ≈ Σ_k w_k g(ω_1k, …, ω_Lk) .

        The frequencies and weights are differentiable in the hyperparameters of the spectra.

        Args:
            spectra: the spectral density of each leaf, at its current hyperparameters.

        Raises:
            NotImplementedError: the columns are not waves cos⟨ω, x⟩ and sin⟨ω, x⟩.
        """
        if self.without_nodes is not None:
            raise NotImplementedError(self.without_nodes)
        parts = zip(spectra, self.bases, self.orders, strict=True)
        omegas = [spectrum.frequencies(base, order) for spectrum, base, order in parts]
        return omegas, self.sample_weights(spectra)

    def sample_weights(self, spectra: Sequence[Spectrum]) -> Float[Tensor, "*b D"]:
        """Return the weights w (*b, D) of a random sample.

        Args:
            spectra: the spectral density of each leaf, at its current hyperparameters.
        """
        weights = torch.full_like(self.bases[0][:, 0], 1 / self.num_frequencies)
        for spectrum, base, order in zip(spectra, self.bases, self.orders, strict=True):
            weights = weights * spectrum.importance(base, order)
        return weights

    def shared_columns(self) -> Columns | None:
        """Return the columns that all terms of the kernel share, or None for random frequencies."""
        return None

    def ratio_outside_range(self, spectra: Sequence[Spectrum]) -> float | None:
        """Return the ratio of a lengthscale to its value at the draw, if it is out of range.

        The result is None if the frequencies are valid for the current lengthscales.

        Args:
            spectra: the spectral density of each leaf, at its current hyperparameters.
        """
        return None

    def check_domain(self, spectra: Sequence[Spectrum], *points: Float[Tensor, "*b n d"]) -> None:
        """Raise an error if the frequencies do not represent the kernel at some points.

        Args:
            spectra: the spectral density of each leaf, at its current hyperparameters.
            points: arrays of points (*b, n, d).

        Raises:
            ValueError: a point is outside the domain of a grid; or two points are too far from
                each other for a quadrature.
        """

    def extra_repr(self) -> str:
        return f"num_frequencies={self.num_frequencies}"

    def _load_from_state_dict(self, state_dict, prefix, *arguments):
        if self.mixture is not None:  # the number of frequencies depends on hyperparameters
            take_lengths(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *arguments)


def sum_of_leaves(
    omegas: Sequence[Float[Tensor, "*b D k"]], term: Term, num_inputs: int
) -> Float[Tensor, "*b D d"]:
    """Return the frequencies of a product of kernels, the sums of the frequencies of its leaves."""
    return sum(
        embedded(omega, leaf.active_dims, num_inputs)
        for omega, leaf in zip(omegas, term.leaves, strict=True)
    )


def uniform(number: int, num_coordinates: int, rng: np.random.Generator) -> np.ndarray:
    """Draw independent uniform numbers (number, num_coordinates), strictly between 0 and 1."""
    return np.clip(rng.random((number, num_coordinates)), 2.0**-54, 1 - 2.0**-53)


def sole_leaf(term: TermSpectrum, kind: type[KernelSpectrum], expected: str) -> LeafSpectrum | None:
    """Return the leaf of a term whose spectrum is an instance of `kind`, or None if there is none.

    Args:
        term: the spectrum of a term.
        kind: a class of spectra that cannot be factors of a product.
        expected: the error message.

    Raises:
        NotImplementedError: the leaf is one of several factors of the term.
    """
    leaves = [leaf for leaf in term.leaves if isinstance(leaf.spectrum, kind)]
    if leaves and len(term.leaves) > 1:
        raise NotImplementedError(expected)
    return leaves[0] if leaves else None


def check_seed(seed: int, owner: str) -> None:
    """Raise an error if a seed is invalid.

    Raises:
        ValueError: the seed is not a non-negative integer.
    """
    if not is_number(seed, Integral) or seed < 0:
        raise ValueError(f"{owner} expects seed to be a non-negative integer, got {seed!r}")


class Rule(Protocol):
    """The protocol of frequency rules, which are immutable values without tensors.

    Every object with this method is a rule and can be the argument `frequencies` of `ORFFKernel`.
    """

    def draw(self, terms: Sequence[TermSpectrum]) -> list[Draw]:
        """Return the frequencies of every term of a kernel, in the order of the terms.

        Args:
            terms: the spectra of the terms of the kernel.
        """


def check_rule(rule: object, expected: str) -> None:
    """Raise a TypeError with the text `expected` if `rule` is not an instance of a rule."""
    if isinstance(rule, type) or not hasattr(rule, "draw"):
        raise TypeError(f"{expected}, got {rule!r}; use, for instance, gp_orff.Auto()")


# Constant inputs, along which the frequencies of a lattice are summed.
#
# If the input a is equal at all points, columns do not depend on ω_a. The kernel of a field has
# A(ω) = B Bᵀ, which is quadratic in ω, and its density is even in ω_a. With ω = (ω_t, ω_a),
#
#     Σ_{ω_a} w(ω) A(ω) = m₀(ω_t) A(ω_t, 0) + m₂(ω_t) A(0, 1),   m₀ = Σ w,  m₂ = Σ w ω_a².
#
# Each further constant input adds one more summand. The weights m₀ belong to the marginal spectrum
# of ω_t, and the weights m₂ to the marginal spectrum that is weighted by ω_a². For scale mixtures
# of Gaussians, both are in the same family, so that the sums are complete.


ALONG_FREQUENCY = -1  # the direction of the summand A(ω_t, 0)


def summable(terms: Sequence[TermSpectrum], num_inputs: int) -> Bool[np.ndarray, "d"]:
    """Return which inputs allow a sum over frequencies, in all kernels that depend on them."""
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
    """Return the marginal spectrum of a leaf over those of its inputs that are not constant.

    A leaf is one scalar kernel of a term. The marginal spectrum is the sum m₀ = Σ w of the
    quadrature weights over the frequencies ω_a of the constant inputs. The result is None if all
    inputs of the leaf are constant.

    Args:
        leaf: the spectrum of the leaf over all its inputs.
        constant: (d,), whether each input column is constant.
        across: if True, the sum is m₂ = Σ w ω_a² for one constant input a.
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
    """Return the marginal spectra of a term over the inputs that are not constant.

    The spectra are sums over the frequencies ω_a of each constant input a. For the quadrature
    weights w, the kernel of a field needs the sums m₀ = Σ w, and m₂ = Σ w ω_a² for each a. The
    formula is in the comment above `ALONG_FREQUENCY`.

    Args:
        term: the spectrum of the term. Its leaves are the spectra of its scalar kernels, and the
            first leaf is the one that B(ω) multiplies.
        constant: (d,), whether each input column is constant.

    Returns:
        A dict of lists of spectra, one spectrum for each leaf. The key for m₀ is `ALONG_FREQUENCY`.
        It is absent for a field whose inputs are all constant, because B(0) = 0. The key for m₂ is
        the position of a among the inputs of the first leaf. Leaves whose inputs are all constant
        are omitted.
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
    """Return quadrature weights on a lattice, summed over the frequencies of constant inputs.

    For the quadrature weights w and a constant input a, the sums over its frequencies ω_a are
    m₀ = Σ w and m₂ = Σ w ω_a². They are computed as integrals over all ω_a.

    Args:
        spectrum: the spectrum of one scalar kernel of a term.
        omega: (D, k), the frequencies. Their coordinates along constant inputs are ignored.
        spacing: (k,), the spacing of the lattice, in radians per unit of the inputs.
        constant: whether each of the k inputs is constant.
        axis: the index of the constant input a for m₂, or `ALONG_FREQUENCY` for m₀.
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


# The frequencies of the terms of a kernel tree on one shared lattice.
#
# All terms use points of one `Lattice`, so that they share one set of columns and one set of sums
# over the data. A `LatticeDraw` refers to its points by position, and computes their weights
# S(ω)∏h. The weight of ω ≠ 0 is doubled, because ω represents ±ω.


class GridWarning(UserWarning):
    """A frequency grid is less accurate than its tolerance.

    There are two reasons. First, a lengthscale may have left the range for which the grid was
    built. In this case, call `ORFFKernel.redraw()`, constrain the lengthscale, or pass a wider
    `lengthscale_range` to `Grid`. Second, the truncated variance may be too large, for example
    compared with the noise variance. In this case, use a smoother kernel, a smaller domain, or more
    features.

    Example:
        The lengthscale is 0.69 when the grid is built, and 0.1 later:

        >>> import gpytorch, gp_orff, torch, warnings
        >>> x = torch.linspace(0, 1, 20).unsqueeze(-1)
        >>> kernel = gpytorch.kernels.RBFKernel(ard_num_dims=1)
        >>> kernel = gp_orff.ORFFKernel(kernel, gp_orff.Grid.for_data(x))
        >>> kernel.base_kernel.lengthscale = 0.1
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always")
        ...     _ = kernel(x).to_dense()
        >>> caught[0].category.__name__
        'GridWarning'
    """


def take_lengths(module: nn.Module, state: Mapping[str, Tensor], prefix: str) -> None:
    """Give the buffers of a module the shapes of the tensors in a state dict."""
    for name, buffer in [*module.named_buffers(recurse=False)]:
        incoming = state.get(prefix + name)
        if incoming is not None and incoming.shape != buffer.shape:
            setattr(module, name, torch.empty_like(incoming, device=buffer.device))


class FixedBuffers(nn.Module):
    """A module whose buffers keep their types, and adopt the shapes of a loaded state dict."""

    def _apply(self, fn, recurse=True):
        return super()._apply(lambda tensor: tensor.to(fn(tensor).device), recurse)

    def _load_from_state_dict(self, state_dict, prefix, *arguments):
        take_lengths(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *arguments)


class Lattice(FixedBuffers):
    """The lattice of frequencies ω = h ∘ k with integer k that the terms of a kernel tree share.

    Args:
        indices: k, (D, d), one of each pair ±k.
        spacing: h, (d,), in radians per unit of the inputs.
        domain: (2, d), the lowest and the highest value of every input for which the lattice
            represents the kernel. They may be infinite.
        lag: (d,), the longest lag from an observation to a point of the domain, along each input.
        tolerance: the tolerance of the lattice, as a fraction of the variance.
        constant: (d,), which inputs are constant, so that their frequencies are summed.
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
        """Return the columns cos⟨ω, x − x₀⟩ and sin⟨ω, x − x₀⟩ of all frequencies.

        The origin x₀ is the centre of the domain, or 0 for an infinite domain.
        """
        return LatticeColumns.of(self.indices, self.spacing, self.origin, self.cache)

    def _load_from_state_dict(self, state_dict, prefix, *arguments):
        spacing = state_dict.get(prefix + "spacing", self.spacing)
        state_dict.setdefault(prefix + "constant", torch.zeros_like(spacing, dtype=torch.bool))
        super()._load_from_state_dict(state_dict, prefix, *arguments)
        self.cache = GramCache()

    @property
    def period(self) -> Float[Tensor, "d"]:
        """P = 2π/h, (d,), the period of the sum over the lattice, in units of the inputs."""
        return 2 * math.pi / self.spacing

    def outside(self, x: Float[Tensor, "*b n d"]) -> Bool[Tensor, "*b n"]:
        """Return for each of the points `x` whether it is outside the domain, (*b, n).

        Args:
            x: points (*b, n, d).
        """
        low, high = self.domain
        slack = 1e-6 * (high - low)  # the rounding of float32 inputs
        x = x.detach()[..., : len(low)]
        return ((x < low - slack) | (x > high + slack)).any(-1)

    def check(self, x: Float[Tensor, "*b n d"]) -> None:
        """Raise an error if a point is outside the domain.

        Args:
            x: points (*b, n, d).

        Raises:
            ValueError: a point is outside the domain.
        """
        check_domain(x, self.outside(x), self.domain)


def check_domain(
    x: Float[Tensor, "*b n d"], outside: Bool[Tensor, "*b n"], domain: Float[Tensor, "2 d"]
) -> None:
    """Raise an error if a point is outside a domain.

    Args:
        x: (*b, n, d), the points.
        outside: (*b, n), which points are outside.
        domain: (2, d), the lowest and the highest value of every input.

    Raises:
        ValueError: a point is outside the domain.
    """
    if outside.any():
        worst = ", ".join(f"{value:.6g}" for value in x[outside][0].tolist())
        box = ", ".join(f"({low:.6g}, {high:.6g})" for low, high in domain.mT.tolist())
        raise ValueError(
            f"expected points inside the grid's domain ({box}), got {int(outside.sum())} "
            f"outside it, such as ({worst}); pass the region of interest as domain= of the "
            "rule, such as Grid.for_data(x, domain=...) or Auto(domain=...)"
        )


class GridDraw(FixedBuffers, Draw):
    """The frequencies of one term on a grid, for a range of lengthscales.

    Args:
        lattice: the frequencies, with their domain.
        lengthscale_range: the shortest and the longest lengthscale for which the grid is valid,
            divided by the lengthscale when the grid is built.
        diagonal_correction: whether inference adds the truncated variance.
    """

    sampled = False
    length = "a lengthscale"  # the name of the length that has a range, for warnings

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
        """The frequencies that all terms share, the lattice or a union with other frequencies."""
        return self.joint or self.lattice

    def shared_columns(self) -> Columns:
        return self.shared.columns()

    def check_domain(self, spectra, *points):
        for x in points:
            self.lattice.check(x)

    def check_range(self, spectra: Sequence[Spectrum]) -> None:
        """Warn once if a lengthscale is outside the range."""
        ratio = None if self.warned else self.ratio_outside_range(spectra)
        if ratio is not None:
            self.warned = True
            low, high = self.lengthscale_range
            warnings.warn(
                f"{self.length} is {ratio:.2g} times its value when the frequency grid was built, "
                f"outside its range {low:g} to {high:g}; call redraw() of the ORFFKernel and "
                f"continue, constrain {self.length.replace('a ', 'the ')}, or pass a wider "
                "lengthscale_range to Grid",
                GridWarning,
                stacklevel=2,
            )


class LatticeDraw(GridDraw):
    """The frequencies of one term on a lattice, with the weights of the quadrature.

    Args:
        lattice: the lattice, which all terms of the tree share.
        position: (D,), the positions of the points in the lattice that the term uses. A point
            occurs once more for each constant input of a field.
        direction: (D,), the direction of B(ω). It is the axis of a constant input for the weights
            m₂, and `ALONG_FREQUENCY` for all others.
        spectrum: the spectrum of the term, at its current hyperparameters.
        lengthscale_range: the shortest and the longest lengthscale for which the frequencies are
            valid, divided by the current lengthscale.
        diagonal_correction: whether inference adds the truncated variance.
        cell: the positions of the points that represent the cell around ω = 0 of a field; see
            `NearZero` in `gp_orff.features.assemble`.
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
        """Whether each frequency is not zero and thus has a sine, (D,)."""
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
        """Return the weights of the frequencies of one leaf; leaf 0 is the kernel of the field."""
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
        state_dict.setdefault(prefix + "direction", along)  # earlier versions had no directions
        super()._load_from_state_dict(state_dict, prefix, *arguments)

    def ratio_outside_range(self, spectra: Sequence[Spectrum]) -> float | None:
        lengthscales, others = _lengths(spectra, self.dims)
        built = self.built.cpu().numpy()
        # Other lengths depend on two parameters, and each of them may use the whole range.
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
    """Return the lengthscales, and the other lengths, for which a grid is built."""
    pairs = [(spectrum, len(axes)) for spectrum, axes in zip(spectra, dims, strict=True)]
    lengthscales = [axis_lengthscales(spectrum, count) for spectrum, count in pairs]
    others = [spectrum.other_lengths(count) for spectrum, count in pairs]
    return np.concatenate([[], *lengthscales]), np.concatenate([[], *others])


def axis_lengthscales(spectrum: Spectrum, num_dims: int) -> Float[np.ndarray, "d"]:
    """Return the lengthscale along each axis, which is the scaled radius of a unit frequency."""
    if not hasattr(spectrum, "scaled_radius"):
        raise NotImplementedError(
            "a frequency grid expects a subclass of gp_orff.spectra.GridSpectrum, got "
            f"{type(spectrum).__name__}, which has no scaled_radius, tail and correlation; use a "
            "random rule such as gp_orff.QuasiMonteCarlo"
        )
    return spectrum.scaled_radius(np.eye(num_dims))


# A quadrature over the frequencies beyond a grid. Its nodes do not depend on hyperparameters.


def remainder(
    draw: LatticeDraw, spectra: Sequence[Spectrum]
) -> tuple[list[Float[Tensor, "m k"]], Float[Tensor, "*b m"]]:
    """Return frequencies ω of each leaf and weights w of a quadrature beyond the grid.

    For even g, Σ_k w_k g(ω_k) is the part of E[g(ω)] from frequencies beyond the grid. The cell
    around ω = 0 is part of the grid.

    Args:
        draw: the frequencies of a term on a grid.
        spectra: the spectral density of each leaf, at its current hyperparameters.

    Returns:
        The frequencies (m, k) of each leaf with k inputs, and the weights (*b, m).
    """
    omegas, weights = _cells(draw)
    for spectrum, omega in zip(spectra, omegas, strict=True):
        weights = weights * spectrum.log_density(omega).exp()
    return omegas, weights


def _cells(draw: LatticeDraw) -> tuple[list[Float[Tensor, "m k"]], Float[Tensor, "m"]]:
    """Return the frequencies ω of each leaf and the volumes of their cells.

    Beyond the grid, the lattice continues up to 1.5 times the largest index. From there to
    infinity, the nodes along every axis are those of a Gauss–Legendre rule in 1/√ω.
    """
    columns = [dim for dims in draw.dims for dim in dims]
    spacing = draw.lattice.spacing[columns].cpu().numpy()
    grid = draw.lattice.indices[draw.position][:, columns].cpu().numpy()
    edge = np.ceil(1.5 * np.abs(grid).max(axis=0)).astype(int) + 1
    far = {1: 32, 2: 16, 3: 8}.get(len(columns), 6)  # the number of nodes from there to infinity
    axes = [_axis(m, h, far) for m, h in zip(edge, spacing, strict=True)]
    volume = np.ones(())
    for _, lengths in axes:
        volume = np.multiply.outer(volume, lengths)
    for half in (grid, -grid):
        volume[tuple((half + edge + far).T)] = 0.0
    # The flat array is symmetric: −ω is in the second half, and ω = 0 is in the middle.
    beyond = np.flatnonzero(volume.reshape(-1)[: volume.size // 2])
    places = np.unravel_index(beyond, volume.shape)
    omega = {i: axis[at] for i, (axis, _), at in zip(columns, axes, places, strict=True)}
    device = draw.position.device
    return (
        [torch.from_numpy(np.stack([omega[i] for i in dims], -1)).to(device) for dims in draw.dims],
        torch.from_numpy(2 * volume.reshape(-1)[beyond]).to(device),
    )


def _axis(edge: int, spacing: float, far: int) -> tuple[np.ndarray, np.ndarray]:
    """Return nodes between −∞ and ∞ and the lengths of their cells.

    Up to the index `edge`, nodes are multiples of the spacing. Beyond it are `far` nodes on each
    side.
    """
    x, weights = gauss_legendre(far)
    x, end = 0.5 * (1 + x[::-1]), (edge + 0.5) * spacing
    beyond, lengths = end / x**2, weights[::-1] * end / x**3  # ω = end / x²
    inner = np.arange(-edge, edge + 1) * spacing
    return (
        np.concatenate([-beyond[::-1], inner, beyond]),
        np.concatenate([lengths[::-1], np.full(len(inner), spacing), lengths]),
    )


# The frequencies of a sum of several families: a lattice, harmonic waves, and lines.


class SharedFrequencies(nn.Module):
    """The frequencies of several families, for example a lattice, harmonic waves and lines."""

    def __init__(self, parts: Sequence[nn.Module]):
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def columns(self) -> Columns:
        """Return the columns of all parts, one part after the other."""
        return side_by_side([part.columns() for part in self.parts])[0]

    def outside(self, x: Float[Tensor, "*b n d"]) -> Bool[Tensor, "*b n"]:
        """Return for each of the points x whether it is outside the domain of any part."""
        return torch.stack([part.outside(x) for part in self.parts]).any(0)

    def check(self, x: Float[Tensor, "*b n d"]) -> None:
        """Raise a `ValueError` if a point of x is outside the domain of any part."""
        for part in self.parts:
            part.check(x)

    @property
    def tolerance(self) -> Float[Tensor, ""]:
        """The largest fraction of the variance that a part may omit."""
        return torch.stack([part.tolerance for part in self.parts]).max()

    @property
    def constant(self) -> Bool[Tensor, "d"]:
        """Whether each input is constant, (d,); frequencies are summed along constant inputs."""
        return torch.stack([part.constant for part in self.parts]).any(0)


def joined(
    grid: Rule,
    terms: Sequence[TermSpectrum],
    family: Sequence[Draw],
    in_family: Callable[[TermSpectrum], bool],
    most: int,
) -> list[Draw]:
    """Return the draws of all terms of a kernel, in the order of the terms.

    Some terms have columns of a special family, for example harmonic waves or lines. Their draws
    are given. This function draws the frequencies of all other terms on a grid. If there are both
    kinds, all terms share the columns of both.

    Args:
        grid: a `Grid`, which draws the terms that are not in the family.
        terms: the spectra of all terms.
        family: the draws of the terms in the family, in the order of these terms.
        in_family: a function that returns whether a term is in the family.
        most: the largest number of features of all terms. The grid may use those that the family
            does not need. If `grid.max_features` is None, the grid has no such limit.
    """
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
