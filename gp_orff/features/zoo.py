"""Features of dot-product kernels, local features around templates, and Gauss–Hermite nodes."""

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, lru_cache
from numbers import Integral

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from gp_orff.features.columns import Columns, PointwiseColumns
from gp_orff.features.draws import Draw, LeafSpectrum, TermSpectrum, check_seed, sole_leaf, uniform
from gp_orff.features.phases import LinearPhases, Phases
from gp_orff.kernels.base import as_real_tensor, check_positive_integer, is_number
from gp_orff.kernels.dot_product import DotProductSpectrum, Polynomials
from gp_orff.kernels.spectra import Gaussian
from gp_orff.kernels.tree import Term, spectra_of

# The columns ‖x‖ⁿ L_m(⟨x, z⟩/‖x‖) of dot-product kernels.


@dataclass(frozen=True)
class DotProductColumns(PointwiseColumns):
    """φ_k(x) = ‖x̃‖^{n_k − m_k} P_{m_k}(⟨x̃, z_k⟩, ‖x̃‖²) with unit vectors z_k.

    The lifted inputs are x̃ = (scale · x, offset). The columns are sorted by their orders m_k,
    highest first, so that each step of the recurrence concerns the first columns only (Le et al.
    2013, Section 4.5).
    """

    phases: Phases  # ⟨x̃, z_k⟩
    polynomials: Polynomials
    degrees: Int[Tensor, "M"]  # n_k
    orders: Int[Tensor, "M"]  # m_k, descending
    dims: tuple[int, ...]  # the input columns
    scale: Float[Tensor, "*b 1 d"]
    offset: Float[Tensor, "*b 1 q"]

    sampled = True

    @property
    def num_columns(self) -> int:
        return len(self.orders)

    @property
    def device(self) -> torch.device:
        return self.orders.device

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return *self.phases.tensors, self.scale, self.offset

    def with_tensors(self, *tensors: Tensor) -> "DotProductColumns":
        *others, scale, offset = tensors
        phases = self.phases.rebuild(*others)
        return replace(self, phases=phases, scale=scale, offset=offset)

    def to(self, device: torch.device) -> "DotProductColumns":
        moved = self.with_tensors(*(tensor.to(device) for tensor in self.tensors))
        return replace(moved, degrees=self.degrees.to(device), orders=self.orders.to(device))

    def select(self, columns: Int[Tensor, "k"]) -> "DotProductColumns":
        return replace(
            self,
            phases=self.phases.select(columns),
            degrees=self.degrees[columns],
            orders=self.orders[columns],
        )

    def halves(self) -> list[tuple[Int[Tensor, "k"], Float[Tensor, "k"]]]:
        """Return two halves of the columns with orders m > 0, as a sample of z.

        Both halves also contain the columns with m = 0, which do not depend on z.
        """
        sampled, constant = self.orders.nonzero().flatten(), (self.orders == 0).nonzero().flatten()
        halves = []
        for side in (0, 1):
            half = sampled[side::2]
            factors = constant.new_ones(len(half) + len(constant), dtype=torch.float64)
            factors[: len(half)] *= len(sampled) / max(len(half), 1)
            halves.append((torch.cat([half, constant]), factors))
        return halves

    def plain(self) -> dict[str, object]:
        tensors = {name: getattr(self, name) for name in ("degrees", "orders", "scale", "offset")}
        return {
            "phases": self.phases.plain(),
            "polynomials": {"class": type(self.polynomials).__name__, **asdict(self.polynomials)},
            "dims": self.dims,
            **{name: tensor.detach().cpu() for name, tensor in tensors.items()},
        }

    def mean_squares(self) -> Float[Tensor, "*b M 1"]:
        """Raise an error, because the mean square of a polynomial over all of space is infinite.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(
            "expected a stationary kernel for a mean over all of space, got a dot-product kernel, "
            "whose variance grows without bound; pass points"
        )

    def inner_products(self, x: Float[Tensor, "*b N d"]) -> Float[Tensor, "*b N M"]:
        return self.phases(self._lifted(x, torch.zeros_like(self.offset)))

    def _lifted(
        self, x: Float[Tensor, "*b N d"], offset: Float[Tensor, "*b 1 q"]
    ) -> Float[Tensor, "*b N k"]:
        scaled = x[..., list(self.dims)] * self.scale
        batch = torch.broadcast_shapes(scaled.shape[:-1], offset.shape[:-1])
        return torch.cat([part.expand(*batch, part.shape[-1]) for part in (scaled, offset)], dim=-1)

    def values(self, x: Float[Tensor, "*b N d"]) -> Float[Tensor, "*b N M"]:
        lifted = self._lifted(x, self.offset)
        t, s = self.phases(lifted), lifted.square().sum(-1, keepdim=True)
        values = torch.cat(list(self._by_order(t, s))[::-1], dim=-1)
        halves = (self.degrees - self.orders) // 2
        if not halves.any():
            return values
        powers = torch.cat([s**k for k in range(int(halves.max()) + 1)], dim=-1)
        return values * powers[..., halves]

    def _by_order(
        self, t: Float[Tensor, "*b N M"], s: Float[Tensor, "*b N 1"]
    ) -> Iterator[Float[Tensor, "*b N k"]]:
        """Yield P_m of the columns of order m, for m = 0, 1, …"""
        previous, current = t, torch.ones_like(t)
        for m, count in enumerate(self._counts):
            yield current[..., count:]
            t, previous, current = (a[..., :count] for a in (t, previous, current))
            step = self.polynomials.step(m, t, s, current, previous) if m else t
            previous, current = current, step

    @cached_property
    def _counts(self) -> list[int]:
        """The number of columns with a higher order than m, for m = 0, 1, …"""
        numbers = torch.bincount(self.orders).tolist()
        return [sum(numbers[m + 1 :]) for m in range(len(numbers))]


# Local columns: functions of templates z, such as positive bumps around templates.


Profile = Callable[[Float[Tensor, "*b N M"], Float[Tensor, "*b N 1"], Float[Tensor, "M"]], Tensor]


@dataclass(frozen=True)
class TemplateColumns(PointwiseColumns):
    """φ_k(x) = κ(⟨x̃, z_k⟩, ‖x̃‖, ‖z_k‖) with x̃ = (x − center)/ℓ (Le et al. 2013, eq. 19)."""

    templates: Float[Tensor, "M k"]  # z
    inverse_lengthscale: Float[Tensor, "*b 1 k"]
    center: Float[Tensor, "k"]
    dims: tuple[int, ...]  # the input columns
    function: Profile  # κ

    sampled = True

    @property
    def num_columns(self) -> int:
        return len(self.templates)

    @property
    def device(self) -> torch.device:
        return self.templates.device

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.inverse_lengthscale,)

    def with_tensors(self, *tensors: Tensor) -> "TemplateColumns":
        (inverse_lengthscale,) = tensors
        return replace(self, inverse_lengthscale=inverse_lengthscale)

    def to(self, device: torch.device) -> "TemplateColumns":
        names = ("templates", "inverse_lengthscale", "center")
        return replace(self, **{name: getattr(self, name).to(device) for name in names})

    def select(self, columns: Int[Tensor, "k"]) -> "TemplateColumns":
        return replace(self, templates=self.templates[columns])

    def halves(self) -> list[tuple[Int[Tensor, "k"], Float[Tensor, "k"]]]:
        """Return two halves of the templates, every second one."""
        index = torch.arange(self.num_columns, device=self.device)
        halves = (index[::2], index[1::2])
        return [(h, self.templates.new_full(h.shape, len(index) / max(len(h), 1))) for h in halves]

    def plain(self) -> dict[str, object]:
        names = ("templates", "inverse_lengthscale", "center")
        tensors = {name: getattr(self, name).detach().cpu() for name in names}
        bump = isinstance(self.function, Bump)
        function = asdict(self.function) if bump else {"function": self.function}
        return {**tensors, **function, "dims": list(self.dims)}

    def inner_products(self, x: Float[Tensor, "*b N d"]) -> Float[Tensor, "*b N M"]:
        """Return ⟨x, z_k/ℓ⟩."""
        return (x[..., list(self.dims)].double() * self.inverse_lengthscale) @ self.templates.mT

    def values(self, x: Float[Tensor, "*b N d"]) -> Float[Tensor, "*b N M"]:
        scaled = (x[..., list(self.dims)] - self.center) * self.inverse_lengthscale
        lengths = torch.linalg.vector_norm(scaled, dim=-1, keepdim=True)
        return self.function(scaled @ self.templates.mT, lengths, self.templates.norm(dim=-1))

    def mean_squares(self) -> Float[Tensor, "*b M 1"]:
        """Return the mean of φ² at the center, over random templates.

        It replaces the mean over space, which is 0. The variance of the features is then the
        variance of the kernel, if this variance is the same everywhere.
        """
        if isinstance(self.function, Bump):
            mean = (1 - 2 / self.function.a) ** (0.5 * len(self.dims))  # z ~ N(0, I/(a² − 2a))
        else:
            mean = at_center(self.function, self.templates).square().mean().item()
        shape = (*self.inverse_lengthscale.shape[:-2], self.num_columns, 1)
        return self.inverse_lengthscale.new_full(shape, mean)


@dataclass(frozen=True)
class Bump:
    """The function κ(s, r, t) = exp(a s − (p/2) r² − (a/2) t²), a bump around x̃ = (a/p) z.

    The standard deviation of the bump is 1/√p (Le et al. 2013, eqs. 24 and 26).
    """

    a: float
    p: float

    def __call__(self, s: Tensor, r: Tensor, t: Tensor) -> Float[Tensor, "*b N M"]:
        return (self.a * s - 0.5 * self.p * r.square() - 0.5 * self.a * t.square()).exp()


def at_center(function: Profile, templates: Float[Tensor, "M k"]) -> Float[Tensor, "1 M"]:
    """Return κ(0, 0, ‖z‖) for every template."""
    norms = templates.norm(dim=-1)
    return function(norms.new_zeros(1, len(norms)), norms.new_zeros(1, 1), norms)


# Rules for dot-product kernels, for templates, and Gauss–Hermite quadrature.


# The draw of a dot-product kernel, which has a harmonic and a unit vector z for each column.


class DotProductDraw(Draw):
    """D columns of one term, each with a harmonic (n, m) and a unit vector of the lifted inputs.

    The kernel is Σ_k λ_k C_k E_z[Q_k(x, z) Q_k(x′, z)]. Let M_k be the expected number of columns
    with the harmonic k. Then each of these columns has the variance λ_k C_k / M_k. In Corollary 4
    of Le et al. 2013, M_k is proportional to λ_k C_k. Here this is so for half of the columns, see
    `DrawnHarmonics`.
    """

    without_nodes = (
        "expected a stationary kernel, whose features have frequencies, got a dot-product "
        "kernel, whose features are polynomials; use RBFKernel, MaternKernel or RQKernel"
    )

    def __init__(
        self,
        directions: Float[Tensor, "D c"],
        harmonics: "DrawnHarmonics",
        dims: Sequence[int],
    ):
        super().__init__([directions], [0])
        self.register_buffer("harmonics", harmonics.index)
        self.register_buffer("expected_numbers", harmonics.expected_numbers)
        self.dims, self.num_sphere_dims = tuple(dims), harmonics.num_dims

    @classmethod
    def of(
        cls,
        term: TermSpectrum,
        directions: Float[np.ndarray, "D c"],
        u: Float[np.ndarray, "D 1"],
        order: int,
    ) -> "DotProductDraw":
        """Return the draw for unit vectors (D, c) and uniform numbers (D, 1)."""
        (leaf,) = term.leaves
        drawn = DrawnHarmonics.of(leaf.spectrum, directions.shape[-1], order, u[:, 0])
        return cls(torch.from_numpy(directions[drawn.rank]), drawn, leaf.dims)

    @property
    def num_columns(self) -> int:
        return self.num_frequencies

    def columns(self, term: Term, num_inputs: int) -> tuple[Columns, Float[Tensor, "*b D 1"]]:
        (spectrum,) = spectra_of(term)
        every = spectrum.harmonics(self.num_sphere_dims)
        variances = (every.eigenvalues * every.counts)[..., self.harmonics] / self.expected_numbers
        phi = DotProductColumns(
            self.unit_phases(spectrum.num_lifted(len(self.dims))),
            every.polynomials,
            every.degrees[self.harmonics],
            every.orders[self.harmonics],
            self.dims,
            spectrum.scale,
            spectrum.offset,
        )
        return phi, variances.unsqueeze(-1)

    def unit_phases(self, num_lifted: int) -> Phases:
        """Return ⟨z, x̃⟩ for `num_lifted` lifted inputs x̃."""
        return LinearPhases(self.bases[0])

    def sample_weights(self, spectra: Sequence[DotProductSpectrum]) -> Float[Tensor, "*b D"]:
        """Return the variance of each column for unit inputs, averaged over their directions."""
        eigenvalues = spectra[0].harmonics(self.num_sphere_dims).eigenvalues
        return eigenvalues[..., self.harmonics] / self.expected_numbers


def lifted_leaf(term: TermSpectrum) -> LeafSpectrum | None:
    """Return the dot-product kernel of a term on its lifted inputs, or None if there is none.

    The degree of the leaf is 1, so that the columns of the trace measure are bounded.

    Raises:
        NotImplementedError: the term is a product with another kernel, or a field kernel.
    """
    leaf = sole_leaf(
        term,
        DotProductSpectrum,
        "features of dot-product kernels expect a term without products, got a product of a "
        "LinearKernel, PolynomialKernel or DotProductKernel with another kernel; use a sum, a "
        "ScaleKernel, or a PolynomialKernel of a higher power",
    )
    if leaf is None:
        return None
    if leaf.degree or leaf.variance is not None:
        raise NotImplementedError(
            "features of dot-product kernels expect scalar or separable kernels, such as "
            "MultitaskKernel, got a kernel whose spectral matrix depends on the frequency; use a "
            "stationary base kernel"
        )
    dims = tuple(range(leaf.spectrum.num_lifted(leaf.num_dims)))
    return replace(leaf, dims=dims, degree=1)


@dataclass(frozen=True)
class DrawnHarmonics:
    """A harmonic for each of D columns, with the highest order m first.

    Attributes:
        index: (D,), the index of the harmonic in `Harmonics`.
        expected_numbers: M_k, (D,), the expected number of columns with the same harmonic.
        rank: (D,), the index of the uniform number from which the column was drawn.
        num_dims: the dimension of the vectors on the sphere.
    """

    index: Int[Tensor, "D"]
    expected_numbers: Float[Tensor, "D"]
    rank: Int[np.ndarray, "D"]
    num_dims: int

    @classmethod
    def of(
        cls, spectrum: DotProductSpectrum, num_dims: int, order: int, u: Float[np.ndarray, "D"]
    ) -> "DrawnHarmonics":
        """Draw one harmonic for each uniform number u, with the probabilities ½p_k + ½q_k.

        Here p_k ∝ λ_k C_k^order and q_k ∝ λ_k. With p_k of order 1 alone, low orders would barely
        ever be drawn although they have much of the variance, because C_k grows like d^m. With the
        mixture, the variance of the approximate kernel is at most twice the variance with p or with
        q alone. A harmonic of order m = 0 does not depend on z, and gets one column if D is large
        enough.
        """
        every = spectrum.harmonics(num_dims)
        logs = every.eigenvalues.log().detach().cpu()
        counts = every.counts.log().detach().cpu()
        constant = int((every.orders == 0).sum())  # they are the last
        constant = constant if constant < min(len(u), logs.shape[-1]) else 0
        number, kinds = len(u) - constant, logs.shape[-1] - constant
        laws = torch.stack([logs, logs + order * counts])[..., :kinds].softmax(-1)
        share = laws.reshape(-1, kinds).mean(0)  # over both, and over the batch
        # Sorted uniform numbers give sorted harmonics, so that equal orders are adjacent.
        rank = u[:number].argsort()
        drawn = torch.from_numpy(share.cumsum(0)[:-1].numpy().searchsorted(u[rank]))
        return cls(
            torch.cat([drawn, torch.arange(kinds, kinds + constant)]),
            torch.cat([number * share[drawn], share.new_ones(constant)]),
            np.concatenate([rank, np.arange(number, len(u))]),
            num_dims,
        )


# Gauss–Hermite quadrature of Gaussian spectra.


_ERROR = 1e-3  # the largest accepted error of the kernel, as a fraction of its variance


@dataclass(frozen=True)
class GaussHermite:
    r"""The rule for Gauss–Hermite quadrature of the spectral density of RBF kernels.

    For d inputs, E g(ω) ≈ Σ_k w_k g(z_k/ℓ), with n^d nodes z_k on a tensor grid and their weights
    w_k. The rule is exact for polynomials g of degree up to 2n − 1 in each coordinate. It gives the
    quadrature Fourier features of Mutný & Krause (2018). The nodes z and −z are stored as one
    frequency. Frequencies are divided by the current lengthscales in every evaluation.

    The error of the kernel is below 1e-3 of its variance up to a longest lag along each input. For
    curl-free and divergence-free kernels, this lag is 4 lengthscales with n = 16, 7 with n = 32 and
    15 with n = 100. Points at larger distances raise an error. In a `SpectralMatrixKernel`, delays
    between outputs are added to the lags, with their values when the `ORFFKernel` is built. `Grid`
    has no such limit.

    Args:
        nodes_per_dim: n, an integer from 2 to 200.

    Raises:
        ValueError: `nodes_per_dim` is not an integer from 2 to 200. An `ORFFKernel` also raises
            this error when it is built, if there are more than 4 million nodes, and when it is
            evaluated, if points are too far from each other.
        NotImplementedError: raised when an `ORFFKernel` is built, if the kernel is not an RBF
            kernel.

    Example:
        Two inputs have 16² nodes, which are 128 frequencies with two features each:

        >>> import gpytorch, gp_orff
        >>> kernel = gp_orff.CurlFreeKernel(
        ...     gpytorch.kernels.RBFKernel(), num_dims=2
        ... )
        >>> gp_orff.ORFFKernel(kernel, gp_orff.GaussHermite(16)).num_features
        256
    """

    nodes_per_dim: int

    def __post_init__(self):
        if not is_number(self.nodes_per_dim, Integral) or not 2 <= self.nodes_per_dim <= 200:
            raise ValueError(
                "GaussHermite expects an integer nodes_per_dim from 2 to 200, got "
                f"{self.nodes_per_dim!r}"
            )

    def draw(self, terms: Sequence[TermSpectrum]) -> list[Draw]:
        """Return the nodes and weights of each term.

        Args:
            terms: the spectra of the terms of a kernel.
        """
        return [
            HermiteDraw(self.nodes_per_dim, term) if term.leaves else Draw([], [])  # a constant
            for term in terms
        ]


class HermiteDraw(Draw):
    """The nodes of one term at unit lengthscale, and their weights."""

    sampled = False

    def __init__(self, nodes_per_dim: int, term: TermSpectrum):
        for leaf in term.leaves:
            if not leaf.spectrum.is_gaussian:
                raise NotImplementedError(
                    "GaussHermite expects RBF kernels, got the spectrum "
                    f"{type(leaf.spectrum).__name__}; use gp_orff.Grid.for_data(x), or a random "
                    "rule, such as gp_orff.QuasiMonteCarlo"
                )
        sizes = [leaf.num_dims for leaf in term.leaves]
        if nodes_per_dim ** sum(sizes) > 2**22:
            raise ValueError(
                "GaussHermite expects at most 4 million nodes in total, got "
                f"{nodes_per_dim} along each of {sum(sizes)} inputs; use a smaller nodes_per_dim, "
                "or gp_orff.QuasiMonteCarlo"
            )
        nodes, weights = _half_space(nodes_per_dim, sum(sizes))
        if term.leaves[0].degree:  # B(0) = 0
            nonzero = nodes[:, : sizes[0]].any(-1)
            nodes, weights = nodes[nonzero], weights[nonzero]
        parts = np.split(nodes, np.cumsum(sizes)[:-1], axis=-1)
        super().__init__([torch.from_numpy(part) for part in parts], [0] * len(parts))
        self.nodes_per_dim = nodes_per_dim
        self.dims = tuple(leaf.dims for leaf in term.leaves)
        self.degrees = tuple(leaf.degree for leaf in term.leaves)
        self.shifts = tuple(_longest_shift(leaf) for leaf in term.leaves)
        self.register_buffer("weights", torch.from_numpy(weights))

    @property
    def num_frequencies(self) -> int:
        return len(self.weights)

    def sample_weights(self, spectra: Sequence[Gaussian]) -> Float[Tensor, "D"]:
        return self.weights

    def check_domain(self, spectra, *points: Float[Tensor, "*b n d"]) -> None:
        flat = [x.detach().reshape(-1, x.shape[-1]) for x in points]
        low = torch.stack([x.amin(0) for x in flat]).amin(0)
        high = torch.stack([x.amax(0) for x in flat]).amax(0)
        extent = (high - low).double().cpu().numpy()
        parts = zip(spectra, self.dims, self.degrees, self.shifts, strict=True)
        for spectrum, dims, degree, shifts in parts:
            lags = (extent[list(dims)] + shifts) / spectrum.scaled_radius(np.eye(len(dims)))
            longest = longest_lag(self.nodes_per_dim, degree)
            if (lags > longest).any():
                axis = int(lags.argmax())
                delays = ", with the delays of its outputs" if shifts[axis] else ""
                raise ValueError(
                    f"GaussHermite({self.nodes_per_dim}) expects lags up to {longest:.1f} "
                    f"lengthscales, got a lag of {lags[axis]:.1f} lengthscales along column "
                    f"{dims[axis]}{delays}; use a larger nodes_per_dim, or gp_orff.Grid.for_data(x)"
                )


def _longest_shift(leaf: LeafSpectrum) -> Float[np.ndarray, "d"]:
    """Return how much a general B(ω) extends correlations along every axis, as delays do."""
    if leaf.variance is None:
        return np.zeros(leaf.num_dims)
    without = math.sqrt(-2 * math.log(_ERROR)) / leaf.variance.scales
    reach = [leaf.variance.correlation_lag(axis, _ERROR) for axis in range(leaf.num_dims)]
    return np.maximum(reach - without, 0.0)


def _half_space(n: int, num_dims: int) -> tuple[Float[np.ndarray, "D d"], Float[np.ndarray, "D"]]:
    """Return the nodes of N(0, I) on a tensor grid, one of each pair ±z, and their weights."""
    roots, weights = np.polynomial.hermite_e.hermegauss(n)
    weights = weights / weights.sum()
    # The middle node of an odd rule is zero only up to rounding.
    if n % 2:
        roots[n // 2] = 0.0
    index = np.stack(np.meshgrid(*[np.arange(n)] * num_dims, indexing="ij"), axis=-1)
    index = index.reshape(-1, num_dims) if num_dims else np.zeros((1, 0), dtype=int)
    nodes, product = roots[index], weights[index].prod(-1)
    opposite = np.zeros(len(index), dtype=int)  # the place of −z in the same order
    for column in index.T:
        opposite = opposite * n + (n - 1 - column)
    place = np.arange(len(index))
    half = place >= opposite
    return nodes[half], product[half] * np.where(place == opposite, 1.0, 2.0)[half]


@lru_cache
def longest_lag(n: int, degree: int) -> float:
    """Return the longest lag along an axis, in lengthscales, for which the kernel is accurate."""
    roots, weights = np.polynomial.hermite_e.hermegauss(n)
    weights = weights / weights.sum()
    lags = np.linspace(0, 4 * np.sqrt(n), 4000)
    cosines = np.cos(np.outer(lags, roots))
    gauss = np.exp(-0.5 * lags**2)
    error = np.abs(cosines @ weights - gauss)
    if degree:
        along = np.abs(cosines @ (weights * roots**2) - (1 - lags**2) * gauss)
        error = np.maximum(error, along)
    above = np.nonzero(error > _ERROR)[0]
    return float(lags[above[0] - 1]) if len(above) and above[0] else float(lags[-1])


# Random templates of any function, and of the bumps of an RBF kernel.


class FunctionDraw(Draw):
    """Random templates z_k of a function κ, in lengthscales from the center."""

    without_nodes = (
        "expected features with frequencies, got Templates, whose features are local; use "
        "another rule, such as gp_orff.QuasiMonteCarlo"
    )

    def __init__(
        self,
        base: Float[Tensor, "M k"],
        function: Profile,
        center: Float[Tensor, "k"],
        dims: Sequence[int],
    ):
        super().__init__([base], [0])
        self.function, self.dims = function, tuple(dims)
        self.register_buffer("center", center)

    @property
    def num_columns(self) -> int:
        return self.num_frequencies

    @property
    def templates(self) -> Float[Tensor, "M k"]:
        """The templates z (M, k), in lengthscales from the center."""
        return self.bases[0].double()

    @property
    def variance(self) -> float:
        """The factor of the mean of φ_z(x) φ_z(x′) in the kernel."""
        return 1.0

    def columns(self, term: Term, num_inputs: int) -> tuple[Columns, Float[Tensor, "*b M 1"]]:
        (spectrum,) = spectra_of(term)
        phi = TemplateColumns(
            self.templates,
            spectrum.inverse_lengthscale(len(self.dims)),
            self.center.double(),
            self.dims,
            self.function,
        )
        share = self.variance / self.num_frequencies
        return phi, self.bases[0].new_full((self.num_frequencies, 1), share)

    def sample_weights(self, spectra: Sequence[Gaussian]) -> Float[Tensor, "M"]:
        return torch.full_like(self.bases[0][:, 0], 1 / self.num_frequencies)


class TemplateDraw(FunctionDraw):
    """Random templates z_k = w_k/√b of an RBF kernel, from standard normal w_k.

    Attributes:
        reach: the distance from the center, in lengthscales, up to which the standard error of the
            approximate variance is below the variance k(x, x).
    """

    def __init__(
        self,
        normal: Float[Tensor, "M k"],
        a: float,
        weighted: bool,
        center: Float[Tensor, "k"],
        dims: Sequence[int],
    ):
        super().__init__(normal, Bump(a, a if weighted else 2.0), center, dims)
        self.a = a
        self.reach = reach(a, len(self.dims), len(normal))

    @property
    def templates(self) -> Float[Tensor, "M k"]:
        return super().templates / math.sqrt(self.a**2 - 2 * self.a)

    @property
    def variance(self) -> float:
        return (1 - 2 / self.a) ** (-0.5 * len(self.dims))

    def check_domain(self, spectra: Sequence[Gaussian], *points: Float[Tensor, "*b n d"]) -> None:
        """Warn if the mean of the points, or half of the points, are farther away than `reach`.

        For two points, only their mean is compared. They may be the corners of a box, most of which
        is closer to the center.
        """
        every = torch.cat([x.detach().reshape(-1, x.shape[-1]) for x in points])
        every = torch.cat([every.mean(0, keepdim=True), every])[:, list(self.dims)]
        scaled = (every - self.center) * spectra[0].inverse_lengthscale(len(self.dims))
        distances = scaled.norm(dim=-1)
        middle, half = distances[..., 0], distances[..., 1:].median(-1).values
        corners = all(x.shape[-2] <= 2 for x in points)
        far = middle if corners else torch.maximum(middle, half)
        if (far > self.reach).any():
            warnings.warn(
                f"Templates(a={self.a:g}) with {self.num_frequencies} features expects inputs at "
                f"most {self.reach:.2g} lengthscales from its center, but the mean of the inputs "
                "or half of the inputs are farther away, so that features are nearly zero; pass "
                "the mean of the inputs as center=, a smaller a, or use gp_orff.QuasiMonteCarlo",
                stacklevel=2,
            )


def reach(a: float, num_dims: int, num_features: int) -> float:
    """Return the distance r at which the standard error of the approximate variance is k(x, x).

    It is 0 if the standard error is larger everywhere. For features with E φ² = 1, E φ⁴ =
    (a²/(a² − 4))^{d/2} exp(4r²(a − 2)/(a + 2)).
    """
    excess = math.log1p(num_features) - 0.5 * num_dims * math.log(a**2 / (a**2 - 4))
    return math.sqrt(max(excess, 0.0) * (a + 2) / (4 * (a - 2)))


# A rule for few inputs: positive, local features of the RBF kernel.


@dataclass(frozen=True)
class Templates:
    r"""The rule for positive, local features of an RBF kernel, which are bumps around templates.

    Each random template z ~ N(0, I/b) gives one feature. With x̃ = (x − center)/ℓ,

        φ_z(x) = (a/(a − 2))^{d/4} exp(−½[2‖x̃‖² − 2a⟨x̃, z⟩ + a‖z‖²]) ,    b = a² − 2a .

    This is a Gaussian bump around x̃ = (a/2) z. The mean of φ_z(x) φ_z(x′) over n templates is an
    unbiased estimate of the RBF kernel exp(−½‖x̃ − x̃′‖²). Unlike waves, bumps vanish at distant
    inputs and are never negative (Le et al. 2013, eqs. 26 and 27).

    The variance of the estimate grows exponentially with d and with the distance from the center.
    At x = x′ with ‖x̃‖ = r, the variance of the estimate of k(x, x) = 1 is

        (1/n) [(a²/(a² − 4))^{d/2} exp(4r²(a − 2)/(a + 2)) − 1] .

    At r = √d, the best a is 2.45. The bracket is then 2.6^d − 1, which is 16 for d = 3, and 14 000
    for d = 10. For comparison, random waves have at most ½ instead, for every d and r. The bumps
    are centred around `center`, with a standard deviation of ½√(a/(a − 2)) lengthscales. This is
    1.2 for a = 2.45, and 2.5 for a = 2.08. Use a smaller a for wider data. Far from the center, all
    features vanish, and so does the variance of the prior.

    A `function` κ and a `sampler` define another kernel, which needs no closed form:

        k(x, x′) = E_z[φ_z(x) φ_z(x′)] ,    φ_z(x) = κ(⟨x̃, z⟩, ‖x̃‖, ‖z‖) ,    z ~ sampler

    (Le et al. 2013, eqs. 19 to 23). The `RBFKernel` that you pass to `ORFFKernel` then only sets
    the lengthscales ℓ, and the outputscale if it is inside a `ScaleKernel`. To use a function of
    the distance, compute ‖x̃ − z‖² = ‖x̃‖² + ‖z‖² − 2⟨x̃, z⟩.

    Args:
        num_features: n, the number of features of a scalar kernel, for each term of a sum.
        a: a > 2. With a larger a, templates are closer to the center. Omit it if you pass a
            `function`.
        weighted: whether to use the bumps exp(−(a/2)‖x̃ − z‖²) of eq. 24; False by default. They
            approximate the locally weighted kernel exp(−½(a − 2)(‖x̃‖² + ‖x̃′‖²))
            exp(−½‖x̃ − x̃′‖²) of eq. 25 instead of the RBF kernel.
        function: κ(s, r, t), a function of s = ⟨x̃, z⟩ (N, n), r = ‖x̃‖ (N, 1) and t = ‖z‖ (n,), for
            N points. It receives float64 tensors and returns values (N, n). If lengthscales are
            trained, write it with torch functions.
        sampler: a function of uniform numbers (n, d) in (0, 1), a float64 tensor. It returns n
            templates z (n, d), in lengthscales from the center. An example is
            `scipy.stats.t(3).ppf`, which has heavier tails than a normal distribution.
        center: the center of the templates, d numbers in units of the inputs, for example the mean
            of the inputs; the origin if None.
        seed: the seed of NumPy's `default_rng`.

    Raises:
        ValueError: `num_features` is not a positive integer; a ≤ 2; `center` does not have finite
            numbers; `seed` is not a non-negative integer; `function` is passed without `sampler`,
            or with `a` or `weighted`. An `ORFFKernel` also raises this error when it is built, if
            `center` does not have d numbers, or if templates or values are not finite or have
            another shape.
        NotImplementedError: raised when an `ORFFKernel` is built, if the kernel is not an
            `RBFKernel`, a sum or scaled form of RBF kernels, or a separable kernel of them.

    Example:
        Features of an RBF kernel of one input:

        >>> import gp_orff, gpytorch, torch
        >>> exact = gpytorch.kernels.RBFKernel()
        >>> kernel = gp_orff.ORFFKernel(
        ...     exact, gp_orff.Templates(4000, a=2.5), num_dims=1
        ... )
        >>> x = torch.linspace(-1, 1, 5).unsqueeze(-1)
        >>> error = kernel(x).to_dense() - exact(x).to_dense()
        >>> bool(error.abs().max() < 0.1)
        True

        Epanechnikov's function of the distance from templates, which are uniform between −3 and 3.
        The kernel is zero at distances above two lengthscales. Its variance is the integral of
        (1 − z²)², which is 16/15, divided by 6:

        >>> rule = gp_orff.Templates(
        ...     4000,
        ...     function=lambda s, r, t: (1 - (r**2 - 2 * s + t**2)).clamp_min(0),
        ...     sampler=lambda u: 6 * u - 3,
        ... )
        >>> kernel = gp_orff.ORFFKernel(exact, rule, num_dims=1)
        >>> variance = kernel(torch.zeros(1, 1)).to_dense()
        >>> bool((variance - 16 / 15 / 6).abs() < 0.02)
        True
    """

    num_features: int
    a: float | None = field(default=None, kw_only=True)
    weighted: bool = field(default=False, kw_only=True)
    function: Profile | None = field(default=None, kw_only=True)
    sampler: Callable[[Float[Tensor, "n d"]], Tensor] | None = field(default=None, kw_only=True)
    center: Sequence[float] | None = field(default=None, kw_only=True)
    seed: int = field(default=0, kw_only=True)

    def __post_init__(self):
        check_positive_integer(self.num_features, "num_features", "Templates")
        if self.function is not None or self.sampler is not None:
            both = callable(self.function) and callable(self.sampler)
            if not both or self.a is not None or self.weighted:
                raise ValueError(
                    "Templates expects a function and a sampler together, without a and weighted, "
                    f"got function={self.function!r}, sampler={self.sampler!r}, a={self.a!r} and "
                    f"weighted={self.weighted!r}; pass both, or a alone"
                )
        elif not is_number(self.a) or not 2 < self.a < math.inf:
            raise ValueError(
                f"Templates expects a > 2, got {self.a!r}; try a=2.5, or a smaller number if the "
                "data are wider than a lengthscale"
            )
        if not isinstance(self.weighted, bool):
            raise ValueError(
                f"Templates expects weighted to be True or False, got {self.weighted!r}"
            )
        if self.center is not None:
            try:
                center = tuple(np.asarray(self.center, dtype=float).reshape(-1).tolist())
            except (TypeError, ValueError):
                center = (math.nan,)
            if not all(map(math.isfinite, center)):
                raise ValueError(
                    "Templates expects finite numbers as center, one for each input, got "
                    f"{self.center}; pass the mean of the inputs"
                )
            object.__setattr__(self, "center", center)
        check_seed(self.seed, "Templates")

    def draw(self, terms: Sequence[TermSpectrum]) -> list[Draw]:
        """Draw the templates of each term, from independent random streams of the seed.

        Args:
            terms: the spectra of the terms of a kernel.
        """
        streams = np.random.default_rng(self.seed).spawn(len(terms))
        return [self._draw(term, rng) for term, rng in zip(terms, streams, strict=True)]

    def _draw(self, term: TermSpectrum, rng: np.random.Generator) -> Draw:
        if not term.leaves:  # a constant: one cosine of ω = 0
            return Draw([], [])
        _check(term)
        dims = term.leaves[0].dims
        center = (0.0,) * len(dims) if self.center is None else self.center
        if len(center) != len(dims):
            raise ValueError(
                f"Templates expects a center of {len(dims)} numbers, one for each input of the "
                f"kernel, got {len(center)}: {self.center}"
            )
        number = int(self.num_features)
        center = torch.tensor(center, dtype=torch.float64)
        if self.function is not None:
            base = _drawn(self.sampler, uniform(number, len(dims), rng))
            _check_values(self.function, base)
            return FunctionDraw(base, self.function, center, dims)
        if not reach(self.a, len(dims), self.num_features):
            warnings.warn(
                f"Templates(a={self.a:g}) expects few inputs: with {len(dims)} inputs and "
                f"{self.num_features} features, the standard error of the kernel exceeds the "
                "kernel; use gp_orff.QuasiMonteCarlo, or gp_orff.Fastfood for many inputs",
                stacklevel=2,
            )
        normal = torch.from_numpy(rng.standard_normal((number, len(dims))))
        return TemplateDraw(normal, float(self.a), self.weighted, center, dims)


def _drawn(sampler: Callable, u: Float[np.ndarray, "n d"]) -> Float[Tensor, "n d"]:
    """Return the templates of a sampler.

    Raises:
        ValueError: the templates have another shape, or are not finite.
    """
    z = as_real_tensor(sampler(torch.from_numpy(u)), "the templates that sampler returns").detach()
    z = z.double().cpu()
    if z.shape != u.shape or not z.isfinite().all():
        raise ValueError(
            f"expected a sampler that returns finite templates {u.shape}, one for each row of "
            f"uniform numbers, got shape {tuple(z.shape)} with {int((~z.isfinite()).sum())} that "
            "are not finite; make it finite for every u in (0, 1)"
        )
    return z


def _check_values(function: Profile, templates: Float[Tensor, "n d"]) -> None:
    """Raise an error if a function does not return finite values of the right shape.

    Raises:
        ValueError: the values have another shape, or are not finite.
    """
    values = as_real_tensor(at_center(function, templates), "the values that function returns")
    if values.shape != (1, len(templates)) or not values.isfinite().all():
        raise ValueError(
            f"expected a function that returns finite values (N, n), got shape "
            f"{tuple(values.shape)} for N = 1 and n = {len(templates)} with "
            f"{int((~values.isfinite()).sum())} that are not finite; compute them from s (N, n), "
            "r (N, 1) and t (n,) by broadcasting"
        )


def _check(term: TermSpectrum) -> None:
    """Raise an error if a term is not a scalar or separable RBF kernel.

    Raises:
        NotImplementedError: the term has another kernel, a product, or a field kernel.
    """
    leaf, names = term.leaves[0], [type(leaf.spectrum).__name__ for leaf in term.leaves]
    if len(names) > 1 or not leaf.spectrum.is_gaussian:
        raise NotImplementedError(
            f"Templates expects RBFKernel in every term, got spectra {' x '.join(names)}; use "
            "gp_orff.QuasiMonteCarlo, and one RBFKernel with ARD for a product of RBF kernels"
        )
    if leaf.degree or leaf.variance is not None:
        raise NotImplementedError(
            "Templates expects scalar or separable kernels, got a kernel whose spectral matrix "
            "depends on the frequency, such as a CurlFreeKernel; use gp_orff.QuasiMonteCarlo"
        )
