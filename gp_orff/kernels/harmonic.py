"""Fields in free space: gradients of potentials that satisfy Laplace's equation."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product

import numpy as np
import torch
from gpytorch.constraints import Interval, Positive
from gpytorch.priors import Prior
from jaxtyping import Float
from torch import Tensor, nn

from gp_orff.kernels.base import (
    FieldKernel,
    as_real_tensor,
    check_num_dims,
    check_points,
    check_positive_integer,
    set_value,
    value_of,
)
from gp_orff.kernels.derivatives import (
    HIGHEST_ORDER,
    polynomial,
    radial_partial,
    scalar_covariance,
)
from gp_orff.kernels.pairs import (
    Cut,
    FormsOfTerm,
    Plain,
    RowForms,
    Rows,
    inputs_of,
    multiplied,
    prepared_rows,
)
from gp_orff.kernels.spectra import KernelSpectrum, Range
from gp_orff.kernels.tree import Factor, Leaf, Term, inner_terms
from gp_orff.symbols.base import Symbol

# Random sources on horizontal planes, and the covariance of derivatives of their potential.
#
# A potential with the spectrum a e^{−|k||z − p|} / (2π|k|) on each side of the plane z = p has, for
# points x and x′ on one side,
#
#   Cov[V(x), V(x′)] = a / R ,    R² = (x₁ − x′₁)² + (x₂ − x′₂)² + Z² ,    Z = |z − p| + |z′ − p| ,
#
# because ∫ e^{i⟨k,r⟩ − |k|Z} d²k / (2π|k|) = 1/√(r² + Z²). It is the potential at x of a charge at
# the mirror image of x′, harmonic in either argument.
#
# All covariances are thus derivatives of 1/R in the lag d = (τ, Z) from the mirror image. The lag
# changes with x and with x′ by ±1 along each axis: a derivative in x′ changes the sign of the
# horizontal components only, and sources above the points change that of the vertical one. `signs`
# has these factors, and no other function needs to know on which side the sources are.


@dataclass(frozen=True)
class Sources:
    """Independent planes of sources, all below the points or all above them.

    Args:
        side: 1 for sources below the points, −1 for sources above them.
        planes: p_j, their heights.
        amplitudes: a_j, in units of potential² times length.
    """

    side: int
    planes: Float[Tensor, "*b J"]
    amplitudes: Float[Tensor, "*b J"]

    def distances(self, z: Float[Tensor, "*b n"]) -> Float[Tensor, "*b J n"]:
        """The distances of heights from the planes, negative on their other side."""
        return self.side * (z.unsqueeze(-2) - self.planes.unsqueeze(-1))

    def lags(
        self, x: Float[Tensor, "*b #n #m 3"], z: Float[Tensor, "*b #n #m 3"]
    ) -> Float[Tensor, "*b J n m 3"]:
        """x less the mirror images of z, seen from the side of the points."""
        across = (x - z)[..., :2].unsqueeze(-4)
        planes = self.planes[..., None, None]
        vertical = self.side * ((x + z)[..., 2].unsqueeze(-3) - 2 * planes)
        across = across.expand(*vertical.shape, 2)
        return torch.cat([across, vertical.unsqueeze(-1)], dim=-1)

    def covariance(
        self, x: Float[Tensor, "*b #n #m 3"], z: Float[Tensor, "*b #n #m 3"]
    ) -> Float[Tensor, "*b n m 3 3"]:
        """Cov[f(x), f(z)] of the field f = −∇V."""
        d = self.lags(x, z)
        inverse = d.square().sum(-1).rsqrt()
        cubed = self.amplitudes[..., None, None] * inverse**3
        near, far = cubed.sum(-3), 3 * cubed * inverse.square()
        # ∇∇ᵀ(1/R) = 3 d dᵀ/R⁵ − I/R³, summed over the planes j.
        hessian = torch.einsum("...jnm,...jnmp,...jnmq->...nmpq", far, d, d)
        hessian = hessian - torch.diag_embed(near.unsqueeze(-1).expand(*near.shape, 3))
        left, right = self.signs(d)
        return hessian * left.unsqueeze(-1) * right

    def signs(self, like: Tensor) -> tuple[Float[Tensor, "3"], Float[Tensor, "3"]]:
        """The derivatives of the lag by x and by the mirrored z along every axis: ±1."""
        return like.new_tensor([1.0, 1.0, self.side]), like.new_tensor([-1.0, -1.0, self.side])

    def variance(self, height: Float[Tensor, "*b"]) -> Float[Tensor, "*b 3 3"]:
        """Cov f at a height: Σ a_j diag(1, 1, 2) / (2|z − p_j|)³."""
        cubes = (2 * self.distances(height.unsqueeze(-1)).squeeze(-1)) ** 3
        share = (self.amplitudes / cubes).sum(-1)
        return torch.diag_embed(share.unsqueeze(-1) * share.new_tensor([1.0, 1.0, 2.0]))


# `HarmonicKernel`: fields in free space, curl-free and divergence-free at once.


_SIDES = {"below": (1,), "above": (-1,), "both": (1, -1)}
_STEP = 3.0  # the ratio of depths at the start


class HarmonicKernel(FieldKernel):
    r"""The prior of a magnetic or gravity field in free space: f = −∇V with ΔV = 0.

    Away from its sources such a field is curl-free and divergence-free. V is a random potential
    that is stationary in the horizontal coordinates x₁ and x₂ and decays with the height x₃ above
    its sources. With J planes of sources at depths h_j below the reference height z₀,

        Cov[V(x), V(x′)] = Σ_j a_j / √((x₁ − x′₁)² + (x₂ − x′₂)² + Z_j²) ,
        Z_j = x₃ + x₃′ − 2z₀ + 2h_j ,

    and the covariance of f follows by differentiation. Its two-dimensional spectrum, Σ_j a_j
    e^{−2|k|h_j} |k| at z₀, decays like e^{−2|k|(x₃ − z₀)} with height. Observations at some heights
    therefore determine the field at all heights above the sources (upward and downward
    continuation), and one component determines the other two.

    The depths and the variances of the field are trained. A variance is the mean over the three
    components of f at the mean height z̄: 4a_j / (3(2z̄ − 2z₀ + 2h_j)³).

    The kernel is stationary in x₁ and x₂ only, and has no values below its sources. The covariance
    matrix of points x (N, 3) is (N·3, N·3), ordered as for `CurlFreeKernel`.

    Args:
        num_depths: J, the number of planes of sources on each side.
        sources: "below" the points, "above" them (x₃ then decreases with the distance from the
            sources), or "both".
        reference_height: z₀, from which depths are measured; (z₀, z₁) for sources on both sides.
            If None, `VectorFieldGP` uses the lowest observation for sources below, and the highest
            for sources above.
        mean_height: z̄, the height of the trained variances. If None, `VectorFieldGP` uses the mean
            height of the observations. If `reference_height` is given, the default is this height,
            or the middle of both heights.
        depth_constraint, variance_constraint: constraints of the trained parameters; positive if
            None.
        depth_prior, variance_prior: priors of the trained parameters, if any.
        batch_shape: as for other gpytorch kernels.
        active_dims: the three input columns, height last; all columns if None.

    Raises:
        ValueError: `sources` is another word; `num_depths` is not a positive integer; heights are
            not finite, not one for each side, or in the wrong order.

    Example:
        The field is curl-free and divergence-free, and decays with the height:

        >>> import gp_orff, torch
        >>> kernel = gp_orff.HarmonicKernel(num_depths=1, reference_height=0.0)
        >>> x = torch.tensor([[0.0, 0.0, 0.0], [0.0, 0.0, 1.0]])
        >>> kernel.depths = 1.0
        >>> kernel(x).to_dense().detach().diag()
        tensor([0.7500, 0.7500, 1.5000, 0.0938, 0.0938, 0.1875])

        A magnetic field from observations of one component:

        >>> x = torch.rand(
        ...     100, 3, generator=torch.Generator().manual_seed(0)
        ... ).double()
        >>> y = 1 / (2 + x[:, 2])
        >>> from gpytorch.means import ZeroMean
        >>> model = gp_orff.VectorFieldGP(
        ...     gp_orff.HarmonicKernel(num_depths=1), mean=ZeroMean()
        ... )
        >>> up = torch.tensor([0.0, 0.0, 1.0]).expand(100, 3)
        >>> model = model.condition(x, y, directions=up)
        >>> # continued upward
        >>> model.posterior().mean(x + torch.tensor([0.0, 0.0, 1.0])).shape
        torch.Size([100, 3])
    """

    num_dims = 3
    amplitude = "variances"

    def __init__(
        self,
        num_depths: int = 2,
        sources: str = "below",
        *,
        reference_height: float | Sequence[float] | None = None,
        mean_height: float | None = None,
        depth_constraint: Interval | None = None,
        variance_constraint: Interval | None = None,
        depth_prior: Prior | None = None,
        variance_prior: Prior | None = None,
        batch_shape: Sequence[int] = (),
        active_dims: tuple[int, ...] | None = None,
    ):
        check_positive_integer(num_depths, "num_depths", "HarmonicKernel")
        if sources not in _SIDES:
            raise ValueError(
                f'HarmonicKernel expects sources "below", "above" or "both", got {sources!r}'
            )
        check_num_dims("HarmonicKernel", self.num_dims, self.num_dims, active_dims)
        super().__init__(batch_shape=torch.Size(batch_shape), active_dims=active_dims)
        self.num_depths, self.sources = num_depths, sources
        heights = _heights(sources, reference_height, mean_height)
        self.follows_data = heights is None
        values = torch.tensor([math.nan] * 3 if heights is None else heights)
        self.register_buffer("heights", values.expand(*batch_shape, 3).clone())
        depths = _STEP ** torch.arange(num_depths).repeat(self.num_sides)
        initial = {"depths": depths, "variances": torch.full_like(depths, 1 / len(depths))}
        constraints = {"depths": depth_constraint, "variances": variance_constraint}
        priors = {"depths": depth_prior, "variances": variance_prior}
        for name, values in initial.items():
            raw = nn.Parameter(torch.zeros(*batch_shape, len(depths)))
            self.register_parameter(f"raw_{name}", raw)
            self.register_constraint(f"raw_{name}", constraints[name] or Positive())
            self._set(name, values)
            if priors[name] is not None:
                closures = partial(value_of, name), partial(set_value, name)
                self.register_prior(f"{name[:-1]}_prior", priors[name], *closures)

    @property
    def num_sides(self) -> int:
        """1, or 2 for sources on both sides of the points."""
        return len(_SIDES[self.sources])

    @property
    def depths(self) -> Float[Tensor, "*b S*J"]:
        """The depths h_j, (\\*b, J), or (\\*b, 2J): first the depths below, then above."""
        return self.raw_depths_constraint.transform(self.raw_depths)

    @depths.setter
    def depths(self, values: float | Float[Tensor, "*b S*J"]) -> None:
        self._set("depths", values)

    @property
    def variances(self) -> Float[Tensor, "*b S*J"]:
        """The variance of a component of the field at the mean height, by depth."""
        return self.raw_variances_constraint.transform(self.raw_variances)

    @variances.setter
    def variances(self, values: float | Float[Tensor, "*b S*J"]) -> None:
        self._set("variances", values)

    def _set(self, name: str, values: object) -> None:
        raw = getattr(self, f"raw_{name}")
        values = as_real_tensor(values, f"{name} of HarmonicKernel", dtype=raw.dtype)
        values = values.to(raw).expand_as(raw)
        constraint = getattr(self, f"raw_{name}_constraint")
        self.initialize(**{f"raw_{name}": constraint.inverse_transform(values)})

    @property
    def reference_height(self) -> float | tuple[float, float]:
        """The height z₀, from which depths are measured; (z₀, z₁) for sources on both sides."""
        low, _, high = self.heights.reshape(-1, 3)[0].tolist()
        return {"below": low, "above": high, "both": (low, high)}[self.sources]

    @property
    def mean_height(self) -> float:
        """The height z̄ at which `variances` are the variances of the field."""
        return self.heights.reshape(-1, 3)[0, 1].item()

    def set_heights(self, lowest: float, mean: float, highest: float) -> None:
        """Set the reference and the mean height from observations.

        Args:
            lowest: the height of the lowest observation, the reference for sources below.
            mean: the mean height of the observations.
            highest: the height of the highest observation, the reference for sources above.
        """
        self.heights.copy_(torch.tensor([lowest, mean, highest]).to(self.heights))

    def scales(self, lengths: Float[Tensor, "3"]) -> dict[str, Float[Tensor, "S*J"]]:
        """Depths at which a search starts: the longest of the `lengths`, and multiples of it."""
        depths = lengths.amax() * _STEP ** torch.arange(self.num_depths).to(lengths)
        return {"depths": depths.repeat(self.num_sides)}

    def planes_of_sources(self) -> list[Sources]:
        """Return the planes of sources below the points, those above the points, or both.

        Returns:
            One `Sources` for each side of `sources`, below first. It has the heights (*b, J) of its
            J planes, in units of x, and their amplitudes (*b, J).

        Raises:
            ValueError: the reference height, from which depths are measured, is not known.
        """
        low, mean, high = self.heights.unbind(-1)
        if self.heights.isnan().any():
            raise ValueError(
                "HarmonicKernel expects a reference height from which depths are measured, got "
                "none; pass reference_height=, such as the lowest observation for sources below, "
                "or use VectorFieldGP, which takes it from the data"
            )
        found = []
        sides = _SIDES[self.sources]
        shares = (values.chunk(len(sides), dim=-1) for values in (self.depths, self.variances))
        for side, depths, variances in zip(sides, *shares, strict=True):
            reference = (low if side > 0 else high).unsqueeze(-1)
            planes = reference - side * depths
            distance = side * (mean.unsqueeze(-1) - planes)
            # The variances at the mean height are a/(2h)³ · (1, 1, 2), with the mean (4/3) a/(2h)³.
            found.append(Sources(side, planes, 0.75 * variances * (2 * distance) ** 3))
        return found

    def num_outputs_per_input(self, x1: Tensor, x2: Tensor) -> int:
        """3, the number of outputs at each of the points `x1` (n, 3) and `x2` (m, 3)."""
        return 3

    def forward(
        self,
        x1: Float[Tensor, "*b n 3"],
        x2: Float[Tensor, "*b m 3"],
        diag: bool = False,
        last_dim_is_batch: bool = False,
    ) -> Float[Tensor, "*b n*3 m*3"] | Float[Tensor, "*b n*3"]:
        """The covariance matrix between the points `x1` (*b, n, 3) and `x2` (*b, m, 3).

        Rows and columns are point-major, n·3 + i. With `diag`, only the diagonal, (*b, n·3).

        Raises:
            ValueError: points on the other side of the sources; no reference height;
                `last_dim_is_batch`, another number of columns, no points, NaN or infinity.
            TypeError: inputs of another dtype than the hyperparameters.
        """
        check_points(self, self.num_dims, x1, x2, last_dim_is_batch)
        planes = self.planes_of_sources()
        for x in (x1,) if x2 is x1 else (x1, x2):
            check_above_sources(planes, x[..., 2])
        pairs = x1.unsqueeze(-2), x2.unsqueeze(-2 if diag else -3)
        blocks = sum(part.covariance(*pairs) for part in planes)  # (*b, n, m, 3, 3)
        if diag:
            return blocks.squeeze(-3).diagonal(dim1=-1, dim2=-2).flatten(-2)
        return blocks.transpose(-3, -2).flatten(-4, -3).flatten(-2, -1)


def check_above_sources(planes: Sequence[Sources], height: Float[Tensor, "*b n"]) -> None:
    """Refuse points where there is no field.

    Raises:
        ValueError: points on the other side of a plane of sources, or on it.
    """
    for part in planes:
        outside = (part.distances(height.detach()) <= 0).any(-2)
        if outside.any():
            words = ("above", "below") if part.side > 0 else ("below", "above")
            reach, nearest = (
                ("up", part.planes.max()) if part.side > 0 else ("down", part.planes.min())
            )
            worst = height.detach().expand_as(outside)[outside][0].item()
            raise ValueError(
                f"HarmonicKernel expects points {words[0]} its sources, which reach {reach} to "
                f"height {nearest.item():.6g}, got {int(outside.sum())} {words[1]} them, such as "
                f"height {worst:.6g}; drop these points, or give a reference_height beyond them"
            )


def _heights(
    sources: str, reference: float | Sequence[float] | None, mean: float | None
) -> list[float] | None:
    """The lower reference, the mean height and the upper reference; None if not given."""
    if reference is None:
        if mean is not None:
            raise ValueError(
                "HarmonicKernel expects a mean_height together with a reference_height, got only "
                "the former; give both, or neither"
            )
        return None
    what = "reference_height of HarmonicKernel"
    given = as_real_tensor(reference, what, dtype=torch.float64).flatten().tolist()
    if len(given) != len(_SIDES[sources]) or not all(map(math.isfinite, given)):
        expected = "a pair (low, high)" if sources == "both" else "a number"
        raise ValueError(
            f'HarmonicKernel(sources="{sources}") expects {expected} as reference_height, got '
            f"{reference}"
        )
    low, high = given[0], given[-1]
    middle = 0.5 * (low + high) if mean is None else float(mean)
    beyond = {"below": middle < low, "above": middle > high, "both": not low <= middle <= high}
    if not math.isfinite(middle) or beyond[sources] or low > high:
        raise ValueError(
            f"HarmonicKernel expects a mean_height on the side of the reference_height "
            f"{reference} that is away from the sources, got {mean}"
        )
    return [low, middle, high]


# The two-dimensional spectrum of a `HarmonicKernel`, and its term of a kernel tree.


@dataclass(frozen=True)
class HarmonicSpectrum(KernelSpectrum):
    """The planes of sources on one side of a harmonic kernel, with horizontal frequencies k.

    It is no `Spectrum`: the kernel is stationary in the horizontal inputs only.

    Args:
        sources: the planes.
        depths: h, of the planes of all sides: the parameter of the kernel.
        mean_height: z̄.
    """

    sources: Sources
    depths: Float[Tensor, "*b S*J"]
    mean_height: Float[Tensor, "*b"]

    def scaled_radius(self, omega: Float[np.ndarray, "D 3"]) -> Float[np.ndarray, "D"]:
        """A norm of ω by the length over which the field varies along every input, for margins:
        the smallest depth, and zero for the height."""
        depth = self.depths.detach().double().min().item()
        return np.abs(omega) @ np.array([depth, depth, 0.0])

    def num_coordinates(self, num_dims: int) -> int:
        """Raise: random frequencies are not known for fields that decay with height.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(
            "expected a stationary kernel for random frequencies, got a HarmonicKernel; use "
            "gp_orff.Grid.for_data(x) or gp_orff.Auto().for_data(x), or the exact kernel"
        )

    def frequency_parameters(
        self, shortest: Float[np.ndarray, "k"], longest: Float[np.ndarray, "k"]
    ) -> list[Range]:
        """The depths, and the interval to search; see `Spectrum.frequency_parameters`."""
        return [Range(self.depths, float(shortest.min()), float(longest.max()))]


@dataclass(frozen=True)
class HarmonicFactor(Factor):
    """The directions (ik, −|k|) of the waves e^{i⟨k,x⟩ − |k|z} of a harmonic field."""

    num_outputs = num_inputs = 3
    degree = rank = 1
    decays = True

    def variance(self, density: HarmonicSpectrum) -> Float[Tensor, "*b 3 3"]:
        """K(x, x) at the mean height of the observations."""
        return density.sources.variance(density.mean_height)

    def __call__(self, omega: Tensor) -> Tensor:
        """Raise: the directions are complex, and belong to columns that decay.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(
            "expected a stationary kernel, whose features are waves, got a HarmonicKernel, whose "
            "waves decay with height; use gp_orff.Grid or gp_orff.Auto"
        )

    def covariance(
        self,
        term: Term,
        left: Symbol,
        right: Symbol,
        x: Float[Tensor, "#n #m d"],
        z: Float[Tensor, "#n #m d"],
    ) -> Float[Tensor, "n m q r"]:
        """Cov[Q f(x), R f(z)] of a harmonic field f, times other kernels of other inputs.

        Raises:
            NotImplementedError: a symbol that is neither a polynomial in derivatives nor a
                potential, or more than two derivatives of the field altogether.
        """
        space, *others = term.leaves
        dims = list(space.columns(x.shape[-1]))
        symbols = [_derivatives(symbol) for symbol in (left, right)]
        outputs = [symbol.num_outputs(self.num_outputs) for symbol in (left, right)]
        total = x.new_zeros(*torch.broadcast_shapes(x.shape[:-1], z.shape[:-1]), *outputs)
        sources = space.spectrum.sources
        lags = sources.lags(x[..., dims], z[..., dims])
        signs = sources.signs(lags)
        pairs = list(product(*(found.items() for found in symbols)))
        order = max(
            (len(axes) + len(others_axes) for (axes, _), (others_axes, _) in pairs), default=0
        )
        if order > HIGHEST_ORDER:
            raise NotImplementedError(f"derivatives of order {order} of its potential")
        kappas, partials = _inverse_distances(lags, sources.amplitudes, order), {}
        for (axes, a), (others_axes, b) in pairs:
            sign = math.prod(
                [*(signs[0][i] for i in axes), *(signs[1][i] for i in others_axes)],
                start=lags.new_ones(()),
            )
            both = tuple(sorted((*axes, *others_axes)))
            if both not in partials:
                partials[both] = _of_inverse_distances(kappas, lags, both)[..., None, None]
            total = total + sign * partials[both] * torch.outer(a.to(lags), b.to(lags))
        scale = term.outputscale
        for leaf in others:
            columns = list(leaf.columns(x.shape[-1]))
            scale = scale * scalar_covariance(leaf.kernel, (x - z)[..., columns])[..., None, None]
        return scale * total


@dataclass(frozen=True)
class SideOfHarmonic(Leaf):
    """The sources of a harmonic kernel on one side of the points."""

    side: int = 0  # its index among the sides of the kernel
    is_elementary = True

    @property
    def spectrum(self) -> HarmonicSpectrum:
        kernel = self.kernel
        sources = kernel.planes_of_sources()[self.side]
        return HarmonicSpectrum(sources, kernel.depths, kernel.heights[..., 1])


@inner_terms.register
def _(kernel: HarmonicKernel) -> list[Term]:
    one = torch.ones((), dtype=kernel.dtype, device=kernel.device)
    return [
        Term((SideOfHarmonic(kernel, side=side),), HarmonicFactor(), one)
        for side in range(kernel.num_sides)
    ]


# Covariances of derivatives and potentials of harmonic fields: derivatives of 1/R.
#
# 1. `_derivatives` writes a symbol as a sum of derivatives of −V: f_i is ∂_i of it, and a
#    polynomial in ω stands for further ones. A symbol that annihilates all waves, such as the curl,
#    gives none.
# 2. `covariance` of the factor takes every pair of derivatives of both symbols; that of two is
#    the derivative of their joint order of Σ a/R, with the signs of the mirrored lag.
# 3. `_of_inverse_distances` computes a derivative from those of κ(s) = s^{−1/2}, s = R².


_ROUNDING = 1e-9  # of the coefficients of derivatives

# for each derivative of −V, by its axes, the coefficients of the outputs
Derivatives = dict[tuple[int, ...], Float[Tensor, "q"]]


def _derivatives(symbol: Symbol) -> Derivatives:
    """A symbol of f = −∇V as derivatives of −V: ω^α stands for (−i∂)^α."""
    if symbol.of_gradients:
        return {(): torch.ones(1)}
    if symbol.order < 0:
        raise NotImplementedError(f"{type(symbol).__name__} of a harmonic field")
    p = HarmonicFactor.num_outputs
    coefficients = polynomial(lambda omega: symbol(omega, p), p, symbol.order)
    found = {
        (*monomial, i): ((-1j) ** symbol.order * coefficient[:, i]).real
        for monomial, coefficient in coefficients.items()
        for i in range(p)
        if coefficient[:, i].abs().max() > _ROUNDING
    }
    return {} if _vanishes(found) else found


def _vanishes(derivatives: Derivatives) -> bool:
    """Whether derivatives of all waves e^{i⟨k,x⟩ − |k|z} are zero, as the curl of the gradient and
    the divergence are."""
    angle = torch.linspace(0.1, 3.0, 7, dtype=torch.float64)
    wave = torch.stack([1j * angle.cos(), 1j * angle.sin(), -torch.ones_like(angle)], dim=-1)
    images = [
        torch.outer(wave[:, list(axes)].prod(-1), coefficient.to(wave))
        for axes, coefficient in derivatives.items()
    ]
    return not images or bool(sum(images).abs().max() < _ROUNDING)


def _inverse_distances(
    lags: Float[Tensor, "J n m 3"], amplitudes: Float[Tensor, "J"], order: int
) -> list[Float[Tensor, "J n m"]]:
    """a_j κ, a_j κ′, … of κ(s) = s^{−1/2} at s = R_j², up to the derivative of some order.

    κ^{(i)} = −½ · −3/2 ⋯ s^{−1/2 − i}.
    """
    s = lags.square().sum(-1)
    found = [amplitudes[..., None, None] * s.rsqrt()]
    for i in range(order):
        found.append((-0.5 - i) * found[-1] / s)
    return found


def _of_inverse_distances(
    kappas: Sequence[Float[Tensor, "J n m"]], lags: Float[Tensor, "J n m 3"], axes: Sequence[int]
) -> Float[Tensor, "n m"]:
    """A partial derivative of Σ_j a_j / R_j."""
    if not axes:
        return kappas[0].sum(0)
    return radial_partial(kappas[1:], lags.unbind(-1), (1.0, 1.0, 1.0), axes).sum(0)


# Covariances of observed numbers of harmonic fields, without those of whole vectors.
#
# As in `kernels.pairs`, hyperparameters enter through numbers of pairs, and the forms of directions
# are computed once: the depths change Z, on which none of the four forms depends.


def _forms(
    x: Float[Tensor, "n 3"],
    z: Float[Tensor, "m 3"],
    v: Float[Tensor, "q #n 3"],
    w: Float[Tensor, "r #m 3"],
) -> tuple[Float[Tensor, "n m"], Float[Tensor, "n m"], tuple[Plain, Plain, Plain, Plain]]:
    """Of pairs of points and of directions, of which those that are mirrored change signs.

    With the lag d = (τ, Z), vᵀ∇∇ᵀ(1/R)w = 3 (vᵀd)(wᵀd) R⁻⁵ − vᵀw R⁻³ has four forms, of which none
    depends on Z.

    Returns:
        τᵀτ; x₃ + z₃; the forms −vᵀw, (vᵀτ)(wᵀτ), vᵀτ w₃ + v₃ wᵀτ and v₃ w₃.
    """
    lag = x[:, None, :2] - z[:, :2]  # τ
    v, w = v.unsqueeze(-2), w.unsqueeze(-3)  # (q, #n, 1, 3), (r, 1, #m, 3)
    left, right = ((u[..., :2] * lag).sum(-1) for u in (v, w))  # (q, n, m), (r, n, m)
    up, other = v[:, None, ..., 2], w[None, ..., 2]
    left, right = left.unsqueeze(1), right.unsqueeze(0)
    forms = -(v[:, None] * w[None]).sum(-1), left * right, left * other + up * right, up * other
    return lag.square().sum(-1), x[:, None, 2] + z[:, 2], tuple(map(Plain, forms))


@prepared_rows.register
def _(factor: HarmonicFactor, term: Term, cut: Cut) -> RowForms:
    """A harmonic field times scalar kernels of other inputs."""
    space, *others = term.leaves
    sources = space.spectrum.sources
    amplitudes = term.outputscale.double() * sources.amplitudes.double()
    planes, amplitudes = cut(sources.planes.double()), cut(amplitudes)

    def forms(left: Rows, right: Rows, known: dict) -> FormsOfTerm:
        key = space.active_dims, sources.side
        if key not in known:
            x, z = (inputs_of(space, rows) for rows in (left, right))
            first, second = sources.signs(x)
            known[key] = _forms(x, z, first * left.v, second * right.v)
        squares, heights, every = known[key]
        numbers = [0.0] * 4  # Σ_j of a R⁻³, 3aR⁻⁵, 3aZR⁻⁵ and 3aZ²R⁻⁵
        for plane, amplitude in zip(planes, amplitudes, strict=True):
            z = sources.side * (heights - 2 * plane)
            inverse = 1 / (squares + z * z)
            near = amplitude * inverse * inverse.sqrt()
            far = 3 * near * inverse
            parts = (near, far, far * z, far * z * z)
            numbers = [total + part for total, part in zip(numbers, parts, strict=True)]
        return multiplied(zip(every, numbers, strict=True), others, left, right)

    return forms
