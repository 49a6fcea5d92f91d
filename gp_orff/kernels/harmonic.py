"""Harmonic fields, such as magnetic and gravity fields: gradients of solutions of ΔV = 0."""

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
# The sources on the plane z = p have a potential whose waves decay on each side as e^{−|k||z − p|},
# with the spectrum a / (2π|k|) on the plane. For points x and x′ on one side,
#
#   Cov[V(x), V(x′)] = a / R ,    R² = (x₁ − x′₁)² + (x₂ − x′₂)² + Z² ,    Z = |z − p| + |z′ − p| ,
#
# because ∫ e^{i⟨k,r⟩ − |k|Z} d²k / (2π|k|) = 1/√(r² + Z²). This covariance is the potential at x of
# a charge at the mirror image of x′. It is harmonic in x and in x′.
#
# All covariances are thus derivatives of 1/R with respect to the lag d = (τ, Z) from the mirror
# image. The derivative of each coordinate of d with respect to x or x′ is ±1. For x′, the
# horizontal coordinates have the sign −1. If the sources are above the points, the vertical
# coordinate has the sign −1. `signs` returns these factors, so that no other function depends on
# the side of the sources.


@dataclass(frozen=True)
class Sources:
    """J independent planes of sources, all below the points or all above them.

    Args:
        side: 1 for sources below the points, −1 for sources above them.
        planes: p_j, (*b, J), the heights of the planes, in units of x.
        amplitudes: a_j, (*b, J), in units of potential² times length.
    """

    side: int
    planes: Float[Tensor, "*b J"]
    amplitudes: Float[Tensor, "*b J"]

    def distances(self, z: Float[Tensor, "*b n"]) -> Float[Tensor, "*b J n"]:
        """Return the distances (*b, J, n) of n heights z from the planes.

        A distance is negative if the height is on the wrong side of the plane.
        """
        return self.side * (z.unsqueeze(-2) - self.planes.unsqueeze(-1))

    def lags(
        self, x: Float[Tensor, "*b #n #m 3"], z: Float[Tensor, "*b #n #m 3"]
    ) -> Float[Tensor, "*b J n m 3"]:
        """Return the lags (*b, J, n, m, 3) from the mirror images of z to x, with Z > 0."""
        across = (x - z)[..., :2].unsqueeze(-4)
        planes = self.planes[..., None, None]
        vertical = self.side * ((x + z)[..., 2].unsqueeze(-3) - 2 * planes)
        across = across.expand(*vertical.shape, 2)
        return torch.cat([across, vertical.unsqueeze(-1)], dim=-1)

    def covariance(
        self, x: Float[Tensor, "*b #n #m 3"], z: Float[Tensor, "*b #n #m 3"]
    ) -> Float[Tensor, "*b n m 3 3"]:
        """Return Cov[f(x), f(z)] for the field f = −∇V."""
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
        """Return the derivatives ±1 of the lag with respect to x and to z, along every axis."""
        return like.new_tensor([1.0, 1.0, self.side]), like.new_tensor([-1.0, -1.0, self.side])

    def variance(self, height: Float[Tensor, "*b"]) -> Float[Tensor, "*b 3 3"]:
        """Return Cov f(x) = Σ_j a_j diag(1, 1, 2) / (2|z − p_j|)³ at the height z."""
        cubes = (2 * self.distances(height.unsqueeze(-1)).squeeze(-1)) ** 3
        share = (self.amplitudes / cubes).sum(-1)
        return torch.diag_embed(share.unsqueeze(-1) * share.new_tensor([1.0, 1.0, 2.0]))


# `HarmonicKernel`: fields outside their sources, which are both curl-free and divergence-free.


_SIDES = {"below": (1,), "above": (-1,), "both": (1, -1)}
_STEP = 3.0  # the ratio of the starting depths


class HarmonicKernel(FieldKernel):
    r"""The kernel of a magnetic or gravity field outside its sources: f = −∇V with ΔV = 0.

    Outside its sources, such a field is both curl-free and divergence-free. The random potential V
    is stationary in the horizontal coordinates x₁ and x₂, and decays with the height x₃ above the
    sources. With J planes of sources at the depths h_j below the reference height z₀, the potential
    has the covariance

        Cov[V(x), V(x′)] = Σ_j a_j / √((x₁ − x′₁)² + (x₂ − x′₂)² + Z_j²) ,
        Z_j = x₃ + x₃′ − 2z₀ + 2h_j .

    The covariance of f follows by differentiation. The horizontal spectrum of f at the height x₃ is
    proportional to Σ_j a_j |k| e^{−2|k|(x₃ − z₀ + h_j)}, for horizontal frequencies k. Observations
    at some heights therefore determine the field at all heights above the sources (upward and
    downward continuation). Observations of one component determine the other two.

    The trained parameters are the depths h_j and the variances v_j = 4a_j / (3(2z̄ − 2z₀ + 2h_j)³).
    v_j is the mean variance of the three components of f at the height z̄ that the plane j causes.

    The kernel is stationary in x₁ and x₂ only. Points on or beyond a plane of sources raise an
    error. The covariance matrix of points x (N, 3) is (N·3, N·3), ordered as for `CurlFreeKernel`.

    Args:
        num_depths: J, the number of planes of sources on each side.
        sources: where the sources are relative to the points: "below", "above" or "both". For
            sources above, V decays downward, and each plane is at the distance h_j above z₀.
        reference_height: z₀, the height from which depths are measured, in units of x; (z₀, z₁) for
            sources on both sides. If None, `VectorFieldGP` uses the height of the lowest
            observation for sources below, and of the highest observation for sources above.
        mean_height: z̄, the height at which the variances are defined, in units of x. By default, it
            is `reference_height`, or the mean of both reference heights. If both arguments are
            None, `VectorFieldGP` uses the mean height of the observations.
        depth_constraint: the constraint of the depths; positive if None.
        variance_constraint: the constraint of the variances; positive if None.
        depth_prior: the prior of the depths; no prior if None.
        variance_prior: the prior of the variances; no prior if None.
        batch_shape: the batch shape of the parameters, as in gpytorch.
        active_dims: the three input columns, with the height last; all columns if None.

    Attributes:
        depths: h_j, (\*b, J), in units of x. For sources on both sides, the shape is (\*b, 2J),
            with the sources below first.
        variances: v_j, in the shape of `depths` and in units of f².

    Raises:
        ValueError: `sources` is another word; `num_depths` is not a positive integer;
            `active_dims` does not have 3 columns; heights are not finite, not one for each side, or
            in the wrong order; `mean_height` is passed without `reference_height`.

    Example:
        The variances decrease with height, and the vertical variance is twice the horizontal ones:

        >>> import gp_orff, torch
        >>> kernel = gp_orff.HarmonicKernel(num_depths=1, reference_height=0.0)
        >>> x = torch.tensor([[0.0, 0.0, 0.0], [0.0, 0.0, 1.0]])
        >>> kernel.depths = 1.0
        >>> kernel(x).to_dense().detach().diag()
        tensor([0.7500, 0.7500, 1.5000, 0.0938, 0.0938, 0.1875])

        Observations of the vertical component determine all components, also at other heights:

        >>> x = torch.rand(
        ...     100, 3, generator=torch.Generator().manual_seed(0)
        ... ).double()
        >>> y = 1 / (2 + x[:, 2])
        >>> from gpytorch.means import ZeroMean
        >>> model = gp_orff.VectorFieldGP(
        ...     gp_orff.HarmonicKernel(num_depths=1), mean=ZeroMean()
        ... )
        >>> up = torch.tensor([0.0, 0.0, 1.0])
        >>> model = model.condition(x, y, directions=up.expand(100, 3))
        >>> model.posterior().mean(x + up).shape  # upward continuation
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
                f'HarmonicKernel expects sources="below", "above" or "both", got {sources!r}'
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
        """The number of sides of the points, 1 or 2, on which the sources lie."""
        return len(_SIDES[self.sources])

    @property
    def depths(self) -> Float[Tensor, "*b S*J"]:
        """The depths h_j of the sources, in units of the inputs.

        The shape is (\\*b, J). For sources on both sides, it is (\\*b, 2J), and the depths of the
        sources below come first.
        """
        return self.raw_depths_constraint.transform(self.raw_depths)

    @depths.setter
    def depths(self, values: float | Float[Tensor, "*b S*J"]) -> None:
        self._set("depths", values)

    @property
    def variances(self) -> Float[Tensor, "*b S*J"]:
        """The variances v_j, in the shape of `depths` and in units of f².

        v_j is the mean variance of the three components that the plane j causes at `mean_height`.
        """
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
        """The height z₀ from which depths are measured; (z₀, z₁) for sources on both sides."""
        low, _, high = self.heights.reshape(-1, 3)[0].tolist()
        return {"below": low, "above": high, "both": (low, high)}[self.sources]

    @property
    def mean_height(self) -> float:
        """The height z̄ at which the `variances` are defined."""
        return self.heights.reshape(-1, 3)[0, 1].item()

    def set_heights(self, lowest: float, mean: float, highest: float) -> None:
        """Set the reference heights and the mean height from observations.

        Args:
            lowest: the height of the lowest observation, the reference height of sources below.
            mean: the mean height of the observations.
            highest: the height of the highest observation, the reference height of sources above.
        """
        self.heights.copy_(torch.tensor([lowest, mean, highest]).to(self.heights))

    def scales(self, lengths: Float[Tensor, "3"]) -> dict[str, Float[Tensor, "S*J"]]:
        """Return starting values of the depths, by the name of the parameter.

        The first depth is the longest of the `lengths` (3,), the typical lengths of the field along
        the inputs. Each further depth is three times the previous one.
        """
        depths = lengths.amax() * _STEP ** torch.arange(self.num_depths).to(lengths)
        return {"depths": depths.repeat(self.num_sides)}

    def planes_of_sources(self) -> list[Sources]:
        """Return the planes of sources on each side of the points.

        Returns:
            One `Sources` for each side, below first. It has the heights (*b, J) of its J planes, in
            units of x, and their amplitudes (*b, J).

        Raises:
            ValueError: the reference height is unknown.
        """
        low, mean, high = self.heights.unbind(-1)
        if self.heights.isnan().any():
            raise ValueError(
                "HarmonicKernel expects a reference height from which depths are measured, got "
                "none; pass reference_height=, for sources below the height of the lowest "
                "observation, or use VectorFieldGP, which sets it from the data"
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
        """Return 3, the number of outputs at each of the points `x1` (n, 3) and `x2` (m, 3)."""
        return 3

    def forward(
        self,
        x1: Float[Tensor, "*b n 3"],
        x2: Float[Tensor, "*b m 3"],
        diag: bool = False,
        last_dim_is_batch: bool = False,
    ) -> Float[Tensor, "*b n*3 m*3"] | Float[Tensor, "*b n*3"]:
        """Return the covariance matrix (*b, n·3, m·3) between the points `x1` and `x2`.

        Row k·3 + i is component i at point k of `x1`, both counted from 0. Columns are ordered in
        the same way, by the points of `x2`.

        Args:
            x1: points (*b, n, 3), with the height in the last column.
            x2: points (*b, m, 3).
            diag: whether to return only the diagonal (*b, n·3); it needs m = n.
            last_dim_is_batch: must be False.

        Raises:
            ValueError: a point is on the wrong side of the sources; the reference height is
                unknown; `last_dim_is_batch` is True; the points do not have 3 columns; there are no
                points; a point contains NaN or infinity.
            TypeError: the points have another dtype than the hyperparameters.
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
    """Raise an error if a point is not on the side of the sources where the field exists.

    Args:
        planes: the planes of sources on each side.
        height: (*b, n), the heights of the points.

    Raises:
        ValueError: a point is on a plane of sources, or on its wrong side.
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
                f"height {worst:.6g}; drop these points, or pass a reference_height beyond them"
            )


def _heights(
    sources: str, reference: float | Sequence[float] | None, mean: float | None
) -> list[float] | None:
    """Return the lower reference, the mean height and the upper reference; None if unknown."""
    if reference is None:
        if mean is not None:
            raise ValueError(
                "HarmonicKernel expects a mean_height together with a reference_height, got only "
                "mean_height; pass both, or neither"
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
            f"HarmonicKernel expects reference_height between the sources and mean_height, got "
            f"reference_height={reference} and mean_height={mean}; correct the heights"
        )
    return [low, middle, high]


# The horizontal spectrum of a `HarmonicKernel`, and the terms of this kernel in a kernel tree.


@dataclass(frozen=True)
class HarmonicSpectrum(KernelSpectrum):
    """The spectrum of horizontal frequencies k, for sources on one side of the points.

    It is not a `Spectrum`, because the kernel is stationary in the horizontal inputs only.

    Args:
        sources: the planes of sources on this side.
        depths: h, the depths of the planes on all sides, the parameter of the kernel.
        mean_height: z̄, the height at which the variances are defined.
    """

    sources: Sources
    depths: Float[Tensor, "*b S*J"]
    mean_height: Float[Tensor, "*b"]

    def scaled_radius(self, omega: Float[np.ndarray, "D 3"]) -> Float[np.ndarray, "D"]:
        """Return the norm h (|ω₁| + |ω₂|) of frequencies, with the smallest depth h.

        The margins of a grid need the length h over which the field varies along the inputs.
        """
        depth = self.depths.detach().double().min().item()
        return np.abs(omega) @ np.array([depth, depth, 0.0])

    def num_coordinates(self, num_dims: int) -> int:
        """Raise an error, because random rules do not support waves that decay with height.

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
        """Return the depths and their interval to search; see `Spectrum.frequency_parameters`."""
        return [Range(self.depths, float(shortest.min()), float(longest.max()))]


@dataclass(frozen=True)
class HarmonicFactor(Factor):
    """The factor of a harmonic field, whose waves e^{i⟨k,x⟩ − |k|z} have directions (ik, −|k|)."""

    num_outputs = num_inputs = 3
    degree = rank = 1
    decays = True

    def variance(self, density: HarmonicSpectrum) -> Float[Tensor, "*b 3 3"]:
        """Return K(x, x) at the mean height of the observations."""
        return density.sources.variance(density.mean_height)

    def __call__(self, omega: Tensor) -> Tensor:
        """Raise an error, because stationary rules do not support waves that decay with height.

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
        """Return Cov[Q f(x), R f(z)] for a harmonic field f and the symbols Q and R.

        The term may include kernels of other inputs, which multiply this covariance.

        Args:
            term: the term of the kernel tree, whose first leaf is the harmonic kernel.
            left: Q, with q outputs.
            right: R, with r outputs.
            x: points that broadcast to (n, m, d).
            z: points that broadcast to (n, m, d).

        Raises:
            NotImplementedError: a symbol is neither a polynomial in derivatives nor a potential; or
                both symbols together have too many derivatives.
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
            raise NotImplementedError(
                f"expected derivatives of the potential up to order {HIGHEST_ORDER}, got {order}; "
                "use features"
            )
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
    """A leaf of the kernel tree: the sources of a harmonic kernel on one side of the points."""

    side: int = 0  # the index of the side in `planes_of_sources`
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


# Covariances of derivatives and potentials of harmonic fields, as derivatives of 1/R.
#
# 1. `_derivatives` writes a symbol of f as a sum of partial derivatives of −V. The component f_i is
#    ∂_i(−V), and powers of ω in the multiplier are further derivatives. If the symbol maps all
#    waves to zero, as the curl does, the sum is empty.
# 2. `HarmonicFactor.covariance` sums over all pairs of derivatives, one of each symbol. The
#    covariance of a pair is the joint derivative of Σ a/R, with the signs of the mirrored lag.
# 3. `_of_inverse_distances` computes this derivative from the derivatives of κ(s) = s^{−1/2}, with
#    s = R².


_ROUNDING = 1e-9  # smaller coefficients of derivatives count as zero

# maps the axes of each partial derivative of −V to its coefficients in the q outputs
Derivatives = dict[tuple[int, ...], Float[Tensor, "q"]]


def _derivatives(symbol: Symbol) -> Derivatives:
    """Return a symbol of f = −∇V as derivatives of −V, where ω^α becomes (−i∂)^α."""
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
    """Return whether the derivatives of all waves e^{i⟨k,x⟩ − |k|z} are zero.

    This is so for the curl and for the divergence.
    """
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
    """Return a_j κ, a_j κ′, … up to the derivative of the `order`, for κ(s) = s^{−1/2}, s = R_j².

    The derivatives are κ^{(i)} = (−1/2)(−3/2)⋯(1/2 − i) s^{−1/2 − i}.
    """
    s = lags.square().sum(-1)
    found = [amplitudes[..., None, None] * s.rsqrt()]
    for i in range(order):
        found.append((-0.5 - i) * found[-1] / s)
    return found


def _of_inverse_distances(
    kappas: Sequence[Float[Tensor, "J n m"]], lags: Float[Tensor, "J n m 3"], axes: Sequence[int]
) -> Float[Tensor, "n m"]:
    """Return the partial derivative of Σ_j a_j / R_j along the `axes`."""
    if not axes:
        return kappas[0].sum(0)
    return radial_partial(kappas[1:], lags.unbind(-1), (1.0, 1.0, 1.0), axes).sum(0)


# Covariances of observed values of harmonic fields, along the observed directions only.
#
# As in `kernels.pairs`, a covariance is a sum of products. One factor is a number that depends on
# hyperparameters, and the other one is a form of the directions that is computed once. The depths
# change Z, and none of the four forms depends on Z.


def _forms(
    x: Float[Tensor, "n 3"],
    z: Float[Tensor, "m 3"],
    v: Float[Tensor, "q #n 3"],
    w: Float[Tensor, "r #m 3"],
) -> tuple[Float[Tensor, "n m"], Float[Tensor, "n m"], tuple[Plain, Plain, Plain, Plain]]:
    """Return the forms of vᵀ∇∇ᵀ(1/R)w for pairs of points, none of which depends on the depths.

    With the lag d = (τ, Z), vᵀ∇∇ᵀ(1/R)w = 3 (vᵀd)(wᵀd) R⁻⁵ − vᵀw R⁻³.

    Args:
        x: (n, 3), points.
        z: (m, 3), points.
        v: (q, #n, 3), directions at x, with the signs of the lag.
        w: (r, #m, 3), directions at z, with the signs of the lag.

    Returns:
        τᵀτ (n, m); x₃ + z₃ (n, m); the forms −vᵀw, (vᵀτ)(wᵀτ), vᵀτ w₃ + v₃ wᵀτ and v₃ w₃.
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
    """Prepare the covariance of a harmonic field times scalar kernels of other inputs."""
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
