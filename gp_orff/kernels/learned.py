"""Scalar kernels whose spectral density is learned, and their spectrum."""

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np
import torch
from gpytorch.constraints import Interval
from gpytorch.priors import NormalPrior, Prior
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import softplus

from gp_orff.kernels.base import check_positive_integer, set_value, value_of
from gp_orff.kernels.lengths import shortest_lengths
from gp_orff.kernels.spectra import (
    GRID_INPUTS,
    RadialKernel,
    Range,
    ScaleMixture,
    chi2_moment,
    chi2_tail,
)

# The power law that a learned curve follows beyond its shortest knot.
#
# The variance of a field of length λ is π λ⁻². From the last knot on it continues as λ^q, with q
# from the slope of the curve over its last knots. Four lengths, each half the one before, represent
# all shorter ones: each has the weight of an interval of log λ, the last one that of all that
# remain. Sums of geometric series give these weights in closed form, as differentiable functions of
# the curve.


BEYOND = 4  # lengths beyond the knots, each half the one before
_LEAST = 0.3  # q, of the variance of a field: it is finite for q > 0
_ROUNDED = 0.25  # over how much of q the bound is rounded
_RATIO = math.log(2.0)


def end_lengths(shortest: float, step: float) -> Float[np.ndarray, "M"]:
    """The lengths beyond the knots, shortest first: the middles of the intervals that they stand
    for, of which the last one has no end.

    Args:
        shortest: the length at the last knot.
        step: the logarithm of the ratio of lengths from knot to knot.
    """
    middles = 0.5 * step + _RATIO * (np.arange(BEYOND)[::-1] + 0.5)
    return shortest * np.exp(-middles)


def end_of_curve(curve: Float[Tensor, "*b J"], step: float) -> Float[Tensor, "*b M"]:
    """The log weights of the `end_lengths`, from those at the knots, shortest first.

    The variance of a field of each length, π λ⁻², goes on as λ^q from the last knot, in steps from
    knot to knot: all of it is Σ_{i≥1} e^{−q i Δ} = 1 / (e^{qΔ} − 1) times that of the last knot,
    in closed form, and each length has that of an interval of log λ. With p the slope of log π
    over the last knots, q = p − 2, but at least 0.3.

    Args:
        curve: log weights at the knots.
        step: Δ, the logarithm of the ratio of lengths from knot to knot.
    """
    steps = end_steps(step)
    slope = (curve[..., steps] - curve[..., 0]) / (steps * step) - 2
    # a smooth maximum of the slope and the bound: a kink would stop a search
    q = _LEAST + _ROUNDED * softplus((slope - _LEAST) / _ROUNDED)
    # `total` is the logarithm of the whole variance beyond the last knot. The interval m halvings
    # further has the share e^{−m q log 2} (1 − e^{−q log 2}) of it, and the last one all that
    # remains, e^{−(M−1) q log 2}. The factor λ² turns variances of a field, π λ⁻², into weights π.
    fall, total = q * _RATIO, curve[..., 0] - q * step - _log_complement(q * step)
    parts = [total - m * fall + _log_complement(fall) for m in range(BEYOND - 1)]
    parts.append(total - (BEYOND - 1) * fall)
    lengths = torch.from_numpy(end_lengths(1.0, step)).to(curve)
    return torch.stack(parts[::-1], dim=-1) + 2 * lengths.log()


def end_steps(step: float) -> int:
    """The steps between knots over which a slope is taken, about 1.5 of u = log λ."""
    return max(1, round(1.5 / step))


def _log_complement(x: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
    """log(1 − e^{−x})."""
    return (-torch.expm1(-x)).log()


# A scalar kernel whose spectral density is learned from the data.
#
# The curve of log weights over u = log λ is a fixed parabola plus a linear map of `shape`, which
# has a standard normal prior. The basis of this map is a slope, and curves with one second
# difference each: D₂⁺ is the pseudo-inverse of second differences, so that its columns have neither
# mean nor slope. The map has one coordinate fewer than knots, since a constant cancels in the
# softmax of the weights.


_WIDTH = 0.7  # standard deviation of the logarithm of the lengths, by their weights at the start
_SLOPE = 3.0  # standard deviation of the slope of the log weights over the log lengths


class LearnedSpectrumKernel(RadialKernel):
    r"""A stationary kernel with a spectral density that is learned from the data.

    The kernel is a mixture of RBF kernels of many lengths with trained weights:

        k(x, z) = Σ_j π_j exp(−½ ‖(x − z)/(ℓ λ_j)‖²) ,    S(ω) = Σ_j π_j N(ω; 0, diag(ℓ λ_j)⁻²) ,

    with `num_knots` lengths λ_j from 1/8 to 8 at equal ratios, and Σ_j π_j = 1. By Schoenberg's
    theorem, every isotropic kernel that is valid in any number of dimensions is such a mixture.
    RBF, Matérn and rational quadratic kernels are among them, so that you need not choose one.
    Spectra with a narrow peak, for example of a periodic wave, are not included: use gpytorch's
    `SpectralMixtureKernel`.

    The log weights are a curve over u = log λ, which starts as −½ (u / 0.7)². The fit adds a slope
    b ~ N(0, 3²) and second differences c_j ~ N(0, τ²) from knot to knot, where τ is the
    `smoothness`:

        log π = const − ½ (u / 0.7)² + b u + D₂⁺ c .

    If `continued` is False, the curve ends at its shortest length. Otherwise it continues as a
    power law π ∝ λ^p. The exponent p is the slope of the curve between its shortest length and 4.5
    times that length. It is at least 2.3, so that the variance of a field is finite. The energy
    spectrum of a field in the plane then falls as k^{1−p}. Four more lengths represent the power
    law, and the last one represents all shorter lengths.

    `fit` sets `continued`. With many observations, the curve is learned on a frequency grid and
    continues, because observations may resolve the whole curve while the true field has shorter
    waves. With few observations, the curve is learned with the exact kernel and ends. The data do
    not resolve its shortest lengths, which then represent everything shorter.

    Only extrapolation of the curve separates unresolved waves from noise. Its prior is the prior of
    the curve, and the noise has the prior log σ² ~ N(log 0.1 v, 3²), where v is the variance of the
    data. A frequency grid covers the curve up to its end. Error bars include the variance
    beyond its end, like all variance that a grid truncates.

    The parameter `shape` is b and c divided by their standard deviations, so that its prior is
    standard normal. It is a gpytorch prior, and both `fit` and gpytorch's marginal likelihood
    include it.

    The covariance has a closed form, for any number of inputs and with ARD. Frequency grids
    (`Grid`, `Auto`) approximate it as they do other kernels. Use random frequencies with fixed
    weights only: they cannot follow weights in training, and raise an error. In a `HelmholtzKernel`
    the curve of the second part is the curve of the first plus a difference. `fit` raises an error
    if all observations have the same values in the inputs of the kernel, because they carry no
    information about a spectrum.

    Args:
        num_knots: J, the number of lengths, at least 4. More lengths only add cost.
        smoothness: τ, how far the curve of the log weights may bend.
        continued: whether the curve continues beyond its shortest length. `fit` sets it when it
            trains the curve. It is in the `state_dict`, although it is not a parameter.
        ard_num_dims: the number of lengthscales, one for each input; one for all inputs if None.
        batch_shape: the batch shape of the parameters, as in gpytorch.
        active_dims: the input columns of the kernel; all columns if None.
        lengthscale_prior: the prior of the lengthscales, as in gpytorch.
        lengthscale_constraint: the constraint of the lengthscales, as in gpytorch.

    Raises:
        ValueError: fewer than 4 knots, or a smoothness that is not positive and finite.

    Example:
        >>> import gp_orff, torch
        >>> kernel = gp_orff.LearnedSpectrumKernel(num_knots=12)
        >>> kernel.weights.shape, kernel.lengths[[0, -1]].tolist()
        (torch.Size([12]), [0.125, 8.0])
        >>> field = gp_orff.CurlFreeKernel(kernel, num_dims=2)
        >>> field(torch.rand(5, 2)).shape
        torch.Size([10, 10])
    """

    highest_order = 4
    is_learned = True

    def __init__(
        self,
        num_knots: int = 12,
        smoothness: float = 4.0,
        *,
        continued: bool = False,
        ard_num_dims: int | None = None,
        batch_shape: torch.Size | None = None,
        active_dims: Sequence[int] | None = None,
        lengthscale_prior: Prior | None = None,
        lengthscale_constraint: Interval | None = None,
    ):
        check_positive_integer(num_knots, "num_knots", "LearnedSpectrumKernel")
        if num_knots < 4:
            raise ValueError(
                f"LearnedSpectrumKernel expects num_knots of at least 4, got {num_knots}; a curve "
                "needs some, the default is 12"
            )
        if not 0 < smoothness < math.inf:
            raise ValueError(
                "LearnedSpectrumKernel expects a finite smoothness > 0, got "
                f"{smoothness}; the default is 4"
            )
        super().__init__(
            ard_num_dims=ard_num_dims,
            batch_shape=batch_shape,
            active_dims=active_dims,
            lengthscale_prior=lengthscale_prior,
            lengthscale_constraint=lengthscale_constraint,
        )
        self.num_knots, self.smoothness = int(num_knots), float(smoothness)
        knots = np.geomspace(1 / 8, 8, num_knots)  # lengths over the lengthscale
        u = np.log(knots)
        self._step = u[1] - u[0]
        # The rows of the second differences are orthogonal to constants and to lines, and so are
        # the columns of their pseudo-inverse: the slope and the bends do not overlap.
        bends = np.linalg.pinv(np.diff(np.eye(num_knots), n=2, axis=0))  # D₂⁺
        # no buffers, which gpytorch takes for batches when it indexes a kernel
        ends = end_lengths(knots[0], self._step)
        self._lengths = torch.from_numpy(np.concatenate([ends, knots]))
        self.continued = continued
        self._start = torch.from_numpy(-0.5 * (u / _WIDTH) ** 2)
        self._basis = torch.from_numpy(np.column_stack([_SLOPE * u, smoothness * bends]))
        size = torch.Size([*self.batch_shape, num_knots - 1])
        self.register_parameter("shape", nn.Parameter(torch.zeros(size)))
        closures = partial(value_of, "shape"), partial(set_value, "shape")
        self.register_prior("shape_prior", NormalPrior(0.0, 1.0), *closures)

    def get_extra_state(self) -> dict[str, bool]:
        """The state on which the covariance depends, other than parameters and buffers."""
        return {"continued": self.continued}

    def set_extra_state(self, state: dict[str, bool]) -> None:
        """Restore `state`, which `get_extra_state` returned."""
        self.continued = state["continued"]

    def _load_from_state_dict(self, state_dict, prefix, *args):
        key = prefix + "_extra_state"
        if key not in state_dict:
            warnings.warn(
                "the state_dict is older than this version of gp_orff: it does not say whether "
                f"the spectrum continues beyond its shortest length; continued={self.continued} "
                "stays, set kernel.continued if that is wrong",
                stacklevel=2,
            )
            state_dict[key] = self.get_extra_state()
        super()._load_from_state_dict(state_dict, prefix, *args)

    @property
    def lengths(self) -> Float[Tensor, "M+J"]:
        """λ, shortest first: the lengths of the power law if `continued`, then the lengths of the
        knots."""
        return self._lengths if self.continued else self._lengths[BEYOND:]

    @property
    def curve(self) -> Float[Tensor, "*b J"]:
        """The logarithms of the weights at the knots, up to a constant."""
        return self._start.to(self.shape) + self.shape @ self._basis.to(self.shape).mT

    @property
    def log_weights(self) -> Float[Tensor, "*b M+J"]:
        """The logarithms of the weights of the M + J `lengths`, up to a constant."""
        curve = self.curve
        if not self.continued:
            return curve
        return torch.cat([end_of_curve(curve, self._step), curve], dim=-1)

    @property
    def weights(self) -> Float[Tensor, "*b M+J"]:
        """The weights π of the lengths; they add up to one."""
        return self.log_weights.softmax(dim=-1)

    @property
    def is_trained(self) -> bool:
        """Whether a search changes the weights."""
        return self.shape.requires_grad

    def related(self) -> "RelatedSpectrumKernel":
        """The kernel of another part of the field, whose curve is this one plus a difference."""
        return RelatedSpectrumKernel(self)

    @property
    def rates(self) -> Float[Tensor, "M+J"]:
        """The variances λ⁻² of the frequencies, in units of ℓ⁻²."""
        return self.lengths.to(self.shape.device) ** -2

    @torch.no_grad()
    def centre(self, order: int) -> None:
        """Start a search from a curve that is centred for derivatives of order t = `order`.

        The length λ contributes a fraction ∝ π λ^{−2t} to the variance of the derivatives, where π
        is its weight. These fractions become symmetric about λ = 1 on a logarithmic axis. The
        lengthscale and the slope of the curve change, and the spectrum at the start stays the same.
        """
        shift = -2 * order * _WIDTH**2  # of u
        self.lengthscale = self.lengthscale * math.exp(shift)
        self.shape.zero_()
        # The slope 2t in u makes π λ^{−2t} symmetric about λ = 1. It moves the maximum of π to u =
        # 2t · 0.7²; the shorter lengthscale moves it back to the same absolute length.
        self.shape[..., 0] = 2 * order / _SLOPE

    @torch.no_grad()
    def extrapolate(self, shortest: float) -> None:
        """Replace the curve by a line at lengths λ below `shortest`. The line has the slope of the
        curve from there to 4.5 times this length. At least three knots are unchanged."""
        curve, lengths = self.curve, self._lengths[BEYOND:]
        first = min(int((lengths < shortest).sum()), self.num_knots - 3)
        steps = min(end_steps(self._step), self.num_knots - 1 - first)
        # Knots are numbered from the shortest length on; `number` counts the steps from the knot
        # `first` down to the shortest.
        slope = (curve[..., first + steps] - curve[..., first]) / steps
        number = torch.arange(first, 0, -1).to(curve)
        line = curve[..., first, None] - slope.unsqueeze(-1) * number
        change = torch.cat([line - curve[..., :first], torch.zeros_like(curve[..., first:])], -1)
        self.shape += self._coordinates(change)

    def _coordinates(self, change: Float[Tensor, "*b J"]) -> Float[Tensor, "*b J-1"]:
        """The change of `shape` that changes the curve so, up to a constant."""
        # The constant completes the basis to J columns. Its coordinate is dropped, since the
        # softmax of the weights does not depend on it.
        basis = torch.cat([self._basis, torch.ones(self.num_knots, 1).to(self._basis)], dim=-1)
        inverse = torch.linalg.inv(basis.to(change))[:-1]
        return change @ inverse.mT

    @property
    def spectrum(self) -> "FiniteMixture":
        """The spectral density, a mixture of Gaussians with the present `weights` and
        `lengthscale`."""
        beyond = BEYOND if self.continued else 0
        return FiniteMixture(self.lengthscale, self.rates.detach(), self.weights, beyond)

    def correlation(self, s: Float[Tensor, "*m"], order: int = 0) -> Float[Tensor, "*m"]:
        """κ(s) = Σ_j π_j e^{−s/2λ_j²}, s = ‖(x − z)/ℓ‖², or a derivative by s.

        Args:
            s: squared distances in units of the lengthscale, with up to two axes after the batch
                axes.
            order: the order of the derivative.
        """
        rates = -0.5 * self.rates.to(s)
        factors = (self.weights.to(s) * rates**order).unbind(-1)
        if self.batch_shape:
            points = min(s.dim() - len(self.batch_shape), 2)  # axes before these are broadcast
            factors = [factor[(..., *[None] * points)] for factor in factors]
        return sum(factor * (rate * s).exp() for factor, rate in zip(factors, rates, strict=True))


# A learned spectrum that is another one plus a difference: the two parts of one field.


_DIFFERENCE = 0.5  # standard deviations of a difference, over those of the curve itself


class RelatedSpectrumKernel(LearnedSpectrumKernel):
    """A `LearnedSpectrumKernel` whose curve is that of another one plus a difference.

    With the log weights log π of the other one and the same lengths ℓ λ_j,

        log π′ = const + log π + b′ u + D₂⁺ c′ ,    b′ ~ N(0, 1.5²) ,    c′_j ~ N(0, (τ/2)²) :

    half the standard deviations of the first curve. `shape` holds b′ and c′ over theirs.

    Args:
        other: the kernel whose lengthscale, lengths and curve this one shares. It is no submodule:
            the part of the model that owns it trains it.

    Example:
        >>> import gp_orff
        >>> from gp_orff.kernels.learned import RelatedSpectrumKernel
        >>> first = gp_orff.LearnedSpectrumKernel(5)
        >>> second = RelatedSpectrumKernel(first)
        >>> first.lengthscale, first.shape.data[0] = 2.0, 0.3
        >>> second.lengthscale.item(), bool((second.weights == first.weights).all())
        (2.0, True)
    """

    has_lengthscale = False  # of its own: gpytorch registers none
    has_recipe = False  # for files: the kernel that has both curves makes it

    def __init__(self, other: LearnedSpectrumKernel):
        super().__init__(
            other.num_knots,
            other.smoothness,
            ard_num_dims=other.ard_num_dims,
            batch_shape=other.batch_shape,
            active_dims=other.active_dims,
            continued=other.continued,
        )
        self._other = (other,)  # a tuple hides it from the list of submodules
        self.has_lengthscale = True
        self.to(other.shape)
        self.shape.requires_grad_(other.shape.requires_grad)

    @property
    def other(self) -> LearnedSpectrumKernel:
        """The kernel whose curve this one shares."""
        return self._other[0]

    @property
    def lengthscale(self) -> Float[Tensor, "*b 1 d"]:
        """ℓ of the other kernel."""
        return self.other.lengthscale.to(self.shape)

    @lengthscale.setter
    def lengthscale(self, value: float | Tensor) -> None:
        self.other.lengthscale = value

    @property
    def raw_lengthscale(self) -> nn.Parameter:
        """The parameter of the other kernel."""
        return self.other.raw_lengthscale

    @property
    def raw_lengthscale_constraint(self) -> Interval:
        """Its constraint."""
        return self.other.raw_lengthscale_constraint

    @property
    def curve(self) -> Float[Tensor, "*b J"]:
        """The logarithms of the weights at the knots, up to a constant."""
        difference = self.shape @ self._basis.to(self.shape).mT
        return self.other.curve.to(self.shape) + _DIFFERENCE * difference

    @property
    def is_trained(self) -> bool:
        """Whether a search changes the weights: the difference, or the other curve."""
        return super().is_trained or self.other.is_trained

    def _coordinates(self, change: Float[Tensor, "*b J"]) -> Float[Tensor, "*b J-1"]:
        """The change of `shape` that changes the curve so, up to a constant."""
        return super()._coordinates(change) / _DIFFERENCE

    def centre(self, order: int) -> None:
        """Leave the curve where that of the other kernel is."""
        self.shape.data.zero_()

    def __getitem__(self, index) -> "RelatedSpectrumKernel":
        own = super().__getitem__(index)
        if own is not self:
            own._other = (self.other[index],)
        return own

    def expand_batch(self, *sizes: torch.Size | int) -> "RelatedSpectrumKernel":
        """The kernel with parameters expanded to a batch shape, as in gpytorch."""
        own = super().expand_batch(*sizes)
        if own is not self:
            own._other = (self.other.expand_batch(*sizes),)
        return own


# Mixtures of Gaussian spectra of known widths: spectra of `LearnedSpectrumKernel`.


@dataclass(frozen=True)
class FiniteMixture(ScaleMixture):
    """Spectrum of `LearnedSpectrumKernel`: z = √s g, g ~ N(0, I), where s = s_j with weight π_j.

    Weighted by ‖z‖^{2t}: weights ∝ π_j s_j^t, and ‖g‖² ~ χ²_{d+2t}.

    Args:
        lengthscale: ℓ, (*b, 1, d), or (*b, 1, 1) for one lengthscale of all inputs.
        variances: s, (J,), positive.
        weights: π, (*b, J).
        beyond: of how many of the s, the first ones, a grid omits what it does not represent: those
            that continue a learned curve beyond its last knot. `tail` does not count them.

    Example:
        >>> import gp_orff, torch
        >>> variances, weights = (
        ...     torch.tensor([1.0, 4.0]),
        ...     torch.tensor([0.75, 0.25]),
        ... )
        >>> mixture = gp_orff.spectra.FiniteMixture(
        ...     torch.ones(1, 1), variances, weights
        ... )
        >>> mixture.moment(order=1, num_dims=2)  # d E s
        tensor([3.5000])
    """

    variances: Float[Tensor, "J"]
    weights: Float[Tensor, "*b J"]
    beyond: int = 0

    def scales(self, least: float) -> tuple[Float[Tensor, "*b J"], Float[Tensor, "*b J"]]:
        """s and weights, (*b, J); `least` is for scales without end."""
        weights = self.weights.double()
        return self.variances.double().clamp_min(least).expand_as(weights), weights

    def log_density(self, omega: Float[Tensor, "*b m d"]) -> Float[Tensor, "*b m"]:
        radius2, log_det = self._scaled(omega)
        half = omega.shape[-1] / 2
        s, weights = self.variances.to(radius2), self.weights.to(radius2).unsqueeze(-2)
        terms = weights.log() - half * (2 * math.pi * s).log() - 0.5 * radius2.unsqueeze(-1) / s
        return log_det + terms.logsumexp(-1)

    def moment(self, order: float, num_dims: int) -> Float[Tensor, "*b 1"]:
        """E‖z‖^{2t} = E s^t E‖g‖^{2t}, t = `order`, in `num_dims` dimensions."""
        mean = (self.weights * self.variances**order).sum(-1, keepdim=True)
        return mean * chi2_moment(order, num_dims)

    def tail(self, scaled_radius: float, order: int, num_dims: int) -> float:
        s, weights = self._of_curve(order)
        outside = chi2_tail(scaled_radius**2 / s, num_dims + 2 * order)
        return float((weights * outside).sum(-1).max())

    def other_lengths(self, num_dims: int) -> Float[np.ndarray, "d"]:
        return self.scaled_radius(np.eye(num_dims)) * self.shortest

    @property
    def shortest(self) -> float:
        """The length of the curve, over ℓ, below which it has a hundredth of the variance of a
        field."""
        s, weights = self._of_curve(1)
        below = np.cumsum(weights[:, np.argsort(-s)], axis=-1) > 0.01
        return float(np.sort(1 / np.sqrt(s))[below.argmax(-1).min()])

    def frequency_parameters(self, shortest, longest):
        # The weights too: they decide which frequencies matter. Their coordinates are in standard
        # deviations of their prior, and may move faster than the frequencies in a search.
        lengthscales = super().frequency_parameters(shortest, longest)
        return [*lengthscales, Range(self.weights, -16.0, 16.0, 6.0)]

    def _weighted_across(self, order: int) -> "FiniteMixture":
        weights = self.weights * self.variances**order
        return replace(self, weights=weights / weights.sum(-1, keepdim=True))

    def _radial_correlation(self, r: float, order: int) -> float:
        """`correlation` from the scaled lag r on: the mean of max(1, s r²)^t e^{−s r²/2}."""
        s, weights = self._values(order)
        square = s * r * r
        return float((weights * np.maximum(1, square) ** order * np.exp(-square / 2)).sum(-1).max())

    def _of_curve(self, order: int) -> tuple[Float[np.ndarray, "J"], Float[np.ndarray, "b J"]]:
        """Those of `_values` that are not beyond the curve."""
        s, weights = self._values(order)
        return s[self.beyond :], weights[:, self.beyond :]

    def _values(self, order: int) -> tuple[Float[np.ndarray, "J"], Float[np.ndarray, "b J"]]:
        """s, and the weights ∝ π s^t of a batch, t = `order`."""
        s, weights = self._arrays
        weights = weights * s**order
        return s, weights / weights.sum(-1, keepdims=True)

    @cached_property
    def _arrays(self) -> tuple[Float[np.ndarray, "J"], Float[np.ndarray, "b J"]]:
        s = self.variances.detach().double().cpu().numpy()
        return s, self.weights.detach().double().cpu().numpy().reshape(-1, len(s))

    def scale(self, base: Float[Tensor, "D c"], order: int) -> Float[Tensor, "*b D"]:
        """The scales s (*b, D) of variables `base` (D, c), weighted by s^t, t = `order`.

        Raises:
            NotImplementedError: weights are trained, which the choice of a scale cannot follow.
        """
        # The selected component is a step function of the weights, whose derivative is zero almost
        # everywhere: training would ignore the weights.
        if torch.is_grad_enabled() and self.weights.requires_grad:
            inputs = base.shape[-1] - 1
            remedy = "Grid or Auto" if inputs <= GRID_INPUTS else "the kernel without features"
            raise NotImplementedError(
                "expected a frequency grid while the weights of a LearnedSpectrumKernel are "
                f"trained, which is valid for up to {GRID_INPUTS} inputs, got random frequencies "
                f"of {inputs}, which cannot follow the weights; use {remedy}, or freeze the "
                "weights by kernel.shape.requires_grad_(False)"
            )
        weights = self.weights * self.variances**order
        # The inverse of the distribution function: the uniform number in the last column of `base`
        # selects the component, as the number of levels it exceeds.
        levels = (weights / weights.sum(-1, keepdim=True)).cumsum(-1)[..., :-1]
        chosen = (base[:, -1, None] > levels.unsqueeze(-2)).sum(-1)  # (*b, D)
        return self.variances[chosen].to(base)


@shortest_lengths.register
def _(kernel: LearnedSpectrumKernel) -> Tensor:
    """ℓ times the shortest of the lengths that matter."""
    return kernel.lengthscale * kernel.spectrum.shortest
