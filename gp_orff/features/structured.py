"""Random frequencies in structured blocks, whose phases are fast transforms of the inputs."""

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from gp_orff.features.columns import Columns, TrigColumns
from gp_orff.features.draws import Draw, LeafSpectrum, TermSpectrum, uniform
from gp_orff.features.phases import (
    FastfoodProjection,
    FourierProjection,
    OrthogonalProjection,
    Phases,
    ProjectedPhases,
    Projection,
    SumOfPhases,
    as_range,
)
from gp_orff.features.random import DrawnRule, as_measure
from gp_orff.features.zoo import DotProductDraw, DrawnHarmonics, lifted_leaf
from gp_orff.kernels.base import name_constructor
from gp_orff.kernels.spectra import Radial
from gp_orff.kernels.tree import Term, spectra_of

# Frequencies that are never written out: radii and fast projections, drawn once.
#
# 1. When the kernel is built, `_StructuredRule` draws radii from the spectral density, and for each
#    leaf a projection, whose rows are the unit vectors. Inputs may be padded with zeros; the radii
#    are then those of the padded dimension, which leaves the distribution of ⟨ω, x⟩ as it is.
# 2. In every evaluation `_phases` scales the inputs by the lengthscales, applies the fast
#    projection, and multiplies by the radii at the present hyperparameters: ⟨ω, x⟩ without ω.
# 3. Leaves of a product depend on different inputs, and their phases add up.
# 4. The factor of a field is a function of ω. In the density weighted by ‖z‖², radii are those of
#    the padded dimension too. With B(ω) = ω of a gradient, features are products with the
#    projection, as phases are (`GradientExpansion`). Other factors write ω out; general ones are
#    refused (`_check`).


class StructuredDraw(Draw):
    """The frequencies r_k u_k / ℓ of one term: for each leaf radii r and unit vectors u.

    `dims` are the input columns of every leaf, `orders` those of the measure.
    """

    projected = True

    def __init__(
        self,
        projections: Sequence[Projection],
        bases: Sequence[Float[Tensor, "D c"]],
        dims: Sequence[tuple[int, ...]],
        orders: Sequence[int] | None = None,
    ):
        super().__init__(bases, [0] * len(bases) if orders is None else orders)
        self.dims = tuple(map(as_range, dims))
        self._sizes = [(type(p), p.num_inputs, p.num_vectors, tuple(p.arrays)) for p in projections]
        for index, projection in enumerate(projections):
            for name, array in projection.arrays.items():
                self.register_buffer(f"{name}_{index}", array)

    @property
    def projections(self) -> list[Projection]:
        """The unit vectors of each leaf."""
        return [
            cls(num_inputs, num_vectors, *(getattr(self, f"{name}_{index}") for name in names))
            for index, (cls, num_inputs, num_vectors, names) in enumerate(self._sizes)
        ]

    def columns(self, term: Term, num_inputs: int) -> tuple[Columns, Float[Tensor, "*b M 1"]]:
        spectra = spectra_of(term)
        parts = self._phases(spectra, self.dims, num_inputs)
        phi = TrigColumns(parts[0] if len(parts) == 1 else SumOfPhases(tuple(parts)))
        return phi, phi.of_frequencies(self.sample_weights(spectra).unsqueeze(-1))

    def nodes(self, spectra: Sequence[Radial]):
        """ω of each leaf, written out, and the weights."""
        dims = [range(len(columns)) for columns in self.dims]
        phases = self._phases(spectra, dims, max(map(len, dims)))
        written = [one.omega[..., : len(d)] for one, d in zip(phases, dims, strict=True)]
        return written, self.sample_weights(spectra)

    def sample_weights(self, spectra: Sequence[Radial]) -> Float[Tensor, "*b D"]:
        weights = torch.full_like(self.bases[0][:, 0], 1 / self.num_frequencies)
        parts = zip(spectra, self.projections, self.bases, self.orders, strict=True)
        for spectrum, projection, base, order in parts:
            if order:
                moment = spectrum.moment(order, projection.padded(projection.num_inputs))
                weights = weights * moment / spectrum.radii(base, order) ** (2 * order)
        return weights

    def _phases(
        self, spectra: Sequence[Radial], dims: Sequence[Sequence[int]], num_inputs: int
    ) -> list[Phases]:
        """⟨ω, x⟩ for the frequencies of each leaf."""
        parts = zip(spectra, self.projections, self.bases, dims, self.orders, strict=True)
        return [
            ProjectedPhases(
                projection,
                spectrum.radii(base, order).unsqueeze(-1),
                spectrum.inverse_lengthscale(len(columns)),
                columns,
                num_inputs,
            )
            for spectrum, projection, base, columns, order in parts
        ]


class StructuredDotProductDraw(DotProductDraw):
    """Columns of a dot-product kernel whose unit vectors are a fast projection."""

    def __init__(
        self,
        projection: Projection,
        harmonics: DrawnHarmonics,
        dims: Sequence[int],
    ):
        lengths = torch.ones_like(harmonics.expected_numbers).unsqueeze(-1)
        super().__init__(lengths, harmonics, dims)
        self.directions = StructuredDraw([projection], [lengths], [range(projection.num_inputs)])

    def unit_phases(self, num_lifted: int) -> Phases:
        lengths, (projection,) = self.bases[0], self.directions.projections
        scale = torch.ones_like(lengths[:1]).expand(1, num_lifted)
        return ProjectedPhases(projection, lengths, scale, range(num_lifted), num_lifted)


# Rules for inputs of high dimension: Fastfood and its siblings.


class _StructuredRule(DrawnRule):
    """Independent radii, and directions from a projection."""

    projection: ClassVar[type[Projection]]

    def __init_subclass__(cls) -> None:
        name_constructor(cls)

    def draw(self, terms: Sequence[TermSpectrum]) -> list[Draw]:
        """The frequencies of each of `terms`, from independent random streams of the seed."""
        streams = np.random.default_rng(self.seed).spawn(len(terms))
        return [self._draw(term, rng) for term, rng in zip(terms, streams, strict=True)]

    def _draw(self, term: TermSpectrum, rng: np.random.Generator) -> Draw:
        if not term.leaves:  # a constant: ω = 0 only
            return Draw([], [])
        lifted = lifted_leaf(term)
        if lifted is not None:
            return self._draw_dot_product(term, lifted, rng)
        projections, bases, orders = [], [], []
        for leaf in term.leaves:
            self._check(leaf)
            order = as_measure(self.measure, type(self).__name__).order(leaf)
            num_dims, number = self.projection.padded(leaf.num_dims), self.num_frequencies
            u = uniform(number, leaf.spectrum.num_coordinates(num_dims), rng)
            bases.append(torch.from_numpy(leaf.spectrum.radial_base(u, num_dims, order)))
            projections.append(self.projection.draw(leaf.num_dims, number, rng))
            orders.append(order)
        return StructuredDraw(projections, bases, [leaf.dims for leaf in term.leaves], orders)

    def _draw_dot_product(
        self, term: TermSpectrum, lifted: LeafSpectrum, rng: np.random.Generator
    ) -> Draw:
        """Harmonics, and directions on the sphere of the padded inputs (Le et al. 2013, 4.5)."""
        number, num_dims = self.num_frequencies, self.projection.padded(lifted.num_dims)
        u = uniform(number, 1, rng)[:, 0]
        order = as_measure(self.measure, type(self).__name__).order(lifted)
        harmonics = DrawnHarmonics.of(lifted.spectrum, num_dims, order, u)
        projection = self.projection.draw(lifted.num_dims, number, rng)
        return StructuredDotProductDraw(projection, harmonics, term.leaves[0].dims)

    def _check(self, leaf: LeafSpectrum) -> None:
        """Check that frequencies are a radius times a direction, and B homogeneous in them.

        Raises:
            NotImplementedError: they are not.
        """
        name = type(self).__name__
        if leaf.variance is not None:
            raise NotImplementedError(
                f"{name} expects kernels whose spectral matrix is constant or quadratic in the "
                "frequency, got a SpectralMatrixKernel; use gp_orff.QuasiMonteCarlo"
            )
        if not isinstance(leaf.spectrum, Radial):
            raise NotImplementedError(
                f"{name} expects kernels of the scaled distance, such as RBFKernel, MaternKernel "
                f"or RQKernel, got the spectrum {type(leaf.spectrum).__name__}, which has other "
                "directions than a sphere; use gp_orff.QuasiMonteCarlo"
            )


class Fastfood(_StructuredRule):
    r"""Random frequencies for many inputs, in O(n log d) time and O(n) memory (Le et al. 2013).

    Frequencies come in blocks V = S H G Π H B / √d′ of d′ frequencies (eq. 33). H is the
    Walsh–Hadamard matrix and Π a random permutation. The other factors are diagonal: B has random
    signs, G has normal random numbers, and S sets the lengths of the frequencies. The smallest
    power of two that is not below d is d′, and inputs are padded with d′ − d zeros. Only B, Π, G
    and S are stored, as four vectors for each block. Two fast Hadamard transforms then compute
    ⟨ω, x⟩ instead of a product with a D × d matrix.

    Each frequency has exactly the same distribution as with `MonteCarlo`: S is r/‖G‖, where r is a
    radius of the kernel's spectral density in d′ dimensions. The approximate kernel is therefore
    unbiased. Frequencies of a block depend on each other. At lags of 0.5 to 2 lengthscales, they
    raise the variance of the kernel by a factor of up to 2.0, or 3 for dot-product kernels.

    Use it with hundreds to thousands of inputs, to save time in prediction, and memory. Training in
    closed form gains nothing, because the N F² operations of ΦᵀΦ dominate. For few inputs
    `QuasiMonteCarlo` is more accurate.

    A `CurlFreeKernel` of d inputs has the frequencies V as directions: f(x) = Vᵀ(φ(x) ∘ Θ). The
    products of `ORFFKernel.feature_operator` and the predictions of `ORFFRidge` do not compute V
    either. This is faster if d is in the hundreds, and slower if it is below a hundred.
    Divergence-free fields gain nothing: a frequency has d − 1 features, and the sum over them takes
    D·d operations for any V.

    The kernel must be scalar or separable, with a radial spectral density: `RBFKernel`,
    `MaternKernel`, `GeneralMaternKernel` or `RQKernel`, with or without ARD, or `BesselKernel` in
    2^k dimensions. Their sums and products are accepted too, also in `MultitaskKernel`,
    `SeparableKernel` and `LCMKernel`, and curl-free, divergence-free and Helmholtz kernels of them.
    The terms of a sum are drawn separately, and the phases of a product are added. Dot-product
    kernels also work: `LinearKernel`, `PolynomialKernel` and power series for every d, Legendre
    series and projections if d is a power of two.

    Args:
        num_frequencies: D, the number of frequencies of each term of a sum of kernels. Each
            frequency has a cosine and a sine, so that a scalar term has 2D features. The last block
            may be incomplete.
        seed: seed of NumPy's `default_rng`; the same seed gives the same frequencies.
        measure: "trace" or "base", for fields and dot-product kernels, as for `MonteCarlo`.

    Raises:
        ValueError: `num_frequencies` is not a positive integer, `seed` is not a non-negative
            integer, or `measure` is unknown.
        NotImplementedError: when an `ORFFKernel` is built, for `SpectralMatrixKernel` and
            `SpectralMixtureKernel`.

    Example:
        >>> import gp_orff, gpytorch, torch
        >>> exact = gpytorch.kernels.RBFKernel()
        >>> exact.lengthscale = 20.0
        >>> kernel = gp_orff.ORFFKernel(exact, gp_orff.Fastfood(4096), num_dims=784)
        >>> x = torch.rand(5, 784)
        >>> error = kernel(x).to_dense() - exact(x).to_dense()
        >>> bool(error.abs().max() < 0.05)
        True
        >>> kernel.phases(x).shape  # ⟨ω, x⟩, without the frequencies ω (4096, 784)
        torch.Size([5, 4096])

        A field of forces that is the gradient of an energy of 784 inputs:

        >>> kernel = gp_orff.CurlFreeKernel(exact, num_dims=784)
        >>> features = gp_orff.ORFFKernel(
        ...     kernel, gp_orff.Fastfood(4096)
        ... ).feature_operator(x)
        >>> (
        ...     features @ torch.ones(features.shape[-1])
        ... ).shape  # 784 components of 5 vectors
        torch.Size([3920])
    """

    projection = FastfoodProjection


class StructuredOrthogonal(_StructuredRule):
    r"""Random frequencies whose directions are orthogonal in blocks, by fast transforms.

    Directions are the rows of H D₁ H D₂ H D₃ / d′^{3/2}, with the Walsh–Hadamard matrix H and
    random signs D₁, D₂, D₃ (Yu et al. 2016, Section 4). The d inputs are padded to d′ dimensions, a
    power of two that is at least 32. Lengths are independent radii of the kernel's spectral density
    in d′ dimensions. The kernels and the cost are as for `Fastfood`, with three transforms instead
    of two.

    The approximate kernel is slightly biased, because a direction has 2^{3d′} possible values and
    is not exactly uniform. For an RBF kernel the bias is at most 0.003 of the variance, between
    inputs that differ in few coordinates. In return its variance is smaller, as with `Orthogonal`.
    For dot-product kernels of few inputs use `Orthogonal` or `QuasiMonteCarlo`, because vectors on
    a sphere of 32 dimensions do not reduce their variance.

    Args:
        num_frequencies: D, the number of frequencies of each term of a sum of kernels.
        seed: seed of NumPy's `default_rng`.
        measure: "trace" or "base", as for `Fastfood`.

    Raises:
        ValueError: as for `Fastfood`.
        NotImplementedError: as for `Fastfood`.

    Example:
        >>> import gp_orff, gpytorch
        >>> kernel = gpytorch.kernels.MaternKernel(nu=1.5, ard_num_dims=64)
        >>> gp_orff.ORFFKernel(
        ...     kernel, gp_orff.StructuredOrthogonal(128)
        ... ).num_features
        256
    """

    projection = OrthogonalProjection


class FourierFastfood(_StructuredRule):
    r"""Random frequencies from one Fourier transform, for any number of inputs, and biased.

    Directions are the rows of Π F B, with random signs B, the real Fourier (Hartley) matrix F, and
    a permutation Π (Le et al. 2013, Section 6.1, "FFT Fastfood", where F is complex). Lengths are
    independent radii of the kernel's spectral density in d dimensions, without padding.

    Use `Fastfood` or `StructuredOrthogonal` instead, except for comparisons: this rule is a
    heuristic, also in the paper. All frequencies have entries of similar size, so that the kernel
    of two inputs that differ in one coordinate is wrong. For an RBF kernel with many inputs, it is
    about J₀(√2 r) at a distance of r lengthscales instead of exp(−r²/2). This is 0.33 too low at
    r = 2. For a few coordinates, including the first, it is about cos r, which is 0.55 too low.
    Between inputs that differ in many coordinates the error is small.

    Args:
        num_frequencies: D, the number of frequencies of each term of a sum of kernels.
        seed: seed of NumPy's `default_rng`.
        measure: "trace" or "base", as for `Fastfood`.

    Raises:
        ValueError: as for `Fastfood`.
        NotImplementedError: as for `Fastfood`.

    Example:
        >>> import gp_orff, gpytorch
        >>> kernel = gpytorch.kernels.RBFKernel(ard_num_dims=85)
        >>> gp_orff.ORFFKernel(kernel, gp_orff.FourierFastfood(128)).num_features
        256
    """

    projection = FourierProjection
