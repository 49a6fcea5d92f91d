"""`HarmonicKernel`: fields in free space, curl-free and divergence-free at once."""

import math
from collections.abc import Sequence

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
)
from gp_orff.kernels.harmonic.sources import Sources

_SIDES = {"below": (1,), "above": (-1,), "both": (1, -1)}
_STEP = 3.0  # the ratio of initial depths


class HarmonicKernel(FieldKernel):
    r"""The prior of a magnetic or gravity field in free space: f = −∇V with ΔV = 0.

    Away from its sources such a field is curl-free and divergence-free. V is a random potential
    that is stationary in the horizontal coordinates x₁ and x₂ and decays with the height x₃ above
    its sources. With J planes of sources at depths h_j below the reference height z₀,

        Cov[V(x), V(x′)] = Σ_j a_j / √((x₁ − x′₁)² + (x₂ − x′₂)² + Z_j²) ,
        Z_j = x₃ + x₃′ − 2z₀ + 2h_j ,

    and the covariance of f follows by differentiation. Its two-dimensional spectrum, Σ_j a_j
    e^{−2|k|h_j} |k| at z₀, decays like e^{−2|k|(x₃ − z₀)} with height. So readings at some heights
    tell the field at all heights above the sources (upward and downward continuation), and one
    component tells the other two.

    The depths and the variances of the field are trained. A variance is that of one component of f,
    on average over the three, at the mean height z̄: 4a_j / (3(2z̄ − 2z₀ + 2h_j)³).

    The kernel is stationary in x₁ and x₂ only, and has no values below its sources. The covariance
    matrix of points x (N, 3) is (N·3, N·3), ordered as for `CurlFreeKernel`.

    Args:
        num_depths: J, the number of planes of sources on each side.
        sources: "below" the points, "above" them (x₃ then decreases with the distance from the
            sources), or "both".
        reference_height: z₀, from which depths are measured; (z₀, z₁) for sources on both sides.
            If None, `VectorFieldGP` takes the lowest reading for sources below, the highest for
            those above.
        mean_height: z̄, where the variances are those of the field. If None, `VectorFieldGP` takes
            the mean height of the readings; with a `reference_height`, the reference, or the middle
            of both.
        depth_constraint, variance_constraint: positive if None.
        depth_prior, variance_prior: of the trained parameters, if any.
        batch_shape: as for other gpytorch kernels.
        active_dims: the three input columns, height last; all columns if None.

    Raises:
        ValueError: `sources` is none of the three; `num_depths` is no positive integer; heights
            that are not finite, not one for each side, or in the wrong order.

    Example:
        The field is curl-free and divergence-free, and decays with the height:

        >>> import gp_orff, torch
        >>> kernel = gp_orff.HarmonicKernel(num_depths=1, reference_height=0.0)
        >>> x = torch.tensor([[0.0, 0.0, 0.0], [0.0, 0.0, 1.0]])
        >>> kernel.depths = 1.0
        >>> kernel(x).to_dense().detach().diag()
        tensor([0.7500, 0.7500, 1.5000, 0.0938, 0.0938, 0.1875])

        A magnetic field from readings of one component:

        >>> x = torch.rand(100, 3, generator=torch.Generator().manual_seed(0)).double()
        >>> y = 1 / (2 + x[:, 2])
        >>> from gpytorch.means import ZeroMean
        >>> model = gp_orff.VectorFieldGP(gp_orff.HarmonicKernel(num_depths=1), mean=ZeroMean())
        >>> up = torch.tensor([0.0, 0.0, 1.0]).expand(100, 3)
        >>> model = model.condition(x, y, directions=up)
        >>> model.posterior().mean(x + torch.tensor([0.0, 0.0, 1.0])).shape  # continued upward
        torch.Size([100, 3])
    """

    num_dims = 3

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
        sides = len(_SIDES[sources])
        depths = _STEP ** torch.arange(num_depths).repeat(sides)
        initial = {"depths": depths, "variances": torch.full_like(depths, 1 / len(depths))}
        constraints = {"depths": depth_constraint, "variances": variance_constraint}
        priors = {"depths": depth_prior, "variances": variance_prior}
        for name, values in initial.items():
            raw = nn.Parameter(torch.zeros(*batch_shape, len(depths)))
            self.register_parameter(f"raw_{name}", raw)
            self.register_constraint(f"raw_{name}", constraints[name] or Positive())
            self._set(name, values)
        if priors["depths"] is not None:
            self.register_prior("depth_prior", depth_prior, _depths, _set_depths)
        if priors["variances"] is not None:
            self.register_prior("variance_prior", variance_prior, _variances, _set_variances)

    @property
    def num_sides(self) -> int:
        """1, or 2 for sources on both sides of the points."""
        return len(_SIDES[self.sources])

    @property
    def depths(self) -> Float[Tensor, "*b S*J"]:
        """The depths h_j, (\\*b, J), or (\\*b, 2J): those below first, then those above."""
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
        """The height z̄ at which the variances are those of the field."""
        return self.heights.reshape(-1, 3)[0, 1].item()

    def set_heights(self, lowest: float, mean: float, highest: float) -> None:
        """Take the reference and the mean height from readings.

        Args:
            lowest: the lowest reading, the reference for sources below.
            mean: the mean height of the readings.
            highest: the highest reading, the reference for sources above.
        """
        self.heights.copy_(torch.tensor([lowest, mean, highest]).to(self.heights))

    def planes_of_sources(self) -> list[Sources]:
        """The planes of sources, below and above the points.

        Raises:
            ValueError: the reference height is not known.
        """
        low, mean, high = self.heights.unbind(-1)
        if self.heights.isnan().any():
            raise ValueError(
                "HarmonicKernel expects a reference height from which depths are measured, got "
                "none; pass reference_height=, such as the lowest reading for sources below, or "
                "use VectorFieldGP, which takes it from the data"
            )
        found = []
        sides = _SIDES[self.sources]
        shares = (values.chunk(len(sides), dim=-1) for values in (self.depths, self.variances))
        for side, depths, variances in zip(sides, *shares, strict=True):
            reference = (low if side > 0 else high).unsqueeze(-1)
            planes = reference - side * depths
            distance = side * (mean.unsqueeze(-1) - planes)
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
        if diag:
            pairs = x1.unsqueeze(-2), x2.unsqueeze(-2)
            blocks = sum(part.covariance(*pairs) for part in planes).squeeze(-3)
            return blocks.diagonal(dim1=-1, dim2=-2).flatten(-2)
        pairs = x1.unsqueeze(-2), x2.unsqueeze(-3)
        blocks = sum(part.covariance(*pairs) for part in planes)  # (*b, n, m, 3, 3)
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


def _depths(kernel: HarmonicKernel) -> Tensor:
    return kernel.depths


def _set_depths(kernel: HarmonicKernel, values: Tensor) -> None:
    kernel.depths = values


def _variances(kernel: HarmonicKernel) -> Tensor:
    return kernel.variances


def _set_variances(kernel: HarmonicKernel, values: Tensor) -> None:
    kernel.variances = values
