"""Scalar kernels with a learned spectral density."""

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

# The power law that continues a learned curve beyond its shortest length.
#
# Waves of length λ with the weight π contribute a variance ∝ π λ⁻² to a field. Beyond the shortest
# knot, this variance continues as λ^q. The exponent q follows from the slope of the curve over its
# shortest knots. Four lengths, each half the previous one, represent all shorter lengths. Each of
# them has the weight of an interval of log λ, and the shortest one has the weight of all that
# remain. Sums of geometric series give these weights in closed form, as differentiable functions of
# the curve.


BEYOND = 4  # the number of lengths beyond the knots, each half the previous one
_LEAST = 0.3  # the smallest q; the variance of a field is finite for q > 0
_ROUNDED = 0.25  # the interval of q over which the bound is rounded
_RATIO = math.log(2.0)


def end_lengths(shortest: float, step: float) -> Float[np.ndarray, "M"]:
    """Return the lengths that continue a curve below its shortest knot, shortest first.

    The lengths are the middles of neighbouring intervals of log λ, each log 2 wide. The shortest
    length also represents all lengths below its interval.

    Args:
        shortest: the length at the shortest knot.
        step: the logarithm of the ratio of lengths from knot to knot.
    """
    middles = 0.5 * step + _RATIO * (np.arange(BEYOND)[::-1] + 0.5)
    return shortest * np.exp(-middles)


def end_of_curve(curve: Float[Tensor, "*b J"], step: float) -> Float[Tensor, "*b M"]:
    """Return the log weights of the `end_lengths`, shortest first.

    Beyond the shortest knot, the variance π λ⁻² continues as λ^q. With steps Δ of log λ, the
    variance of all shorter lengths is Σ_{i≥1} e^{−q i Δ} = 1 / (e^{qΔ} − 1) times the variance at
    this knot. If p is the slope of log π over the shortest knots, q = p − 2, but at least 0.3.

    Args:
        curve: (*b, J), the log weights at the knots, shortest length first.
        step: Δ, the logarithm of the ratio of lengths from knot to knot.
    """
    steps = end_steps(step)
    slope = (curve[..., steps] - curve[..., 0]) / (steps * step) - 2
    # a smooth maximum of the slope and the bound, because a kink would stop a search
    q = _LEAST + _ROUNDED * softplus((slope - _LEAST) / _ROUNDED)
    # `total` is the logarithm of the whole variance beyond the shortest knot. The interval after m
    # halvings has the fraction e^{−m q log 2} (1 − e^{−q log 2}), and the last interval has the
    # rest, e^{−(M−1) q log 2}. The factor λ² converts variances of a field, π λ⁻², to weights π.
    fall, total = q * _RATIO, curve[..., 0] - q * step - _log_complement(q * step)
    parts = [total - m * fall + _log_complement(fall) for m in range(BEYOND - 1)]
    parts.append(total - (BEYOND - 1) * fall)
    lengths = torch.from_numpy(end_lengths(1.0, step)).to(curve)
    return torch.stack(parts[::-1], dim=-1) + 2 * lengths.log()


def end_steps(step: float) -> int:
    """Return the number of steps between the knots for a slope. They span about 1.5 in log λ."""
    return max(1, round(1.5 / step))


def _log_complement(x: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
    """Return log(1 − e^{−x})."""
    return (-torch.expm1(-x)).log()


# A scalar kernel whose spectral density is learned from the data.
#
# The curve of log weights over u = log λ is a fixed parabola plus a linear map of `shape`, which
# has a standard normal prior. The basis of this map consists of a slope, and of curves with one
# nonzero second difference each. These curves are the columns of D₂⁺, the pseudo-inverse of second
# differences, so they have neither mean nor slope. The map has one coordinate fewer than there are
# knots, because a constant cancels in the softmax of the weights.


_WIDTH = 0.7  # the standard deviation of log λ under the starting weights
_SLOPE = 3.0  # the prior standard deviation of the slope of log weights over log λ


class LearnedSpectrumKernel(RadialKernel):
    r"""A stationary kernel whose spectral density is learned from the data.

    The kernel is a mixture of RBF kernels of many lengths, with trained weights π_j:

        k(x, z) = Σ_j π_j exp(−½ ‖(x − z)/(ℓ λ_j)‖²) ,    S(ω) = Σ_j π_j N(ω; 0, diag(ℓ λ_j)⁻²) .

    The J relative lengths λ_j are from 1/8 to 8 at equal ratios, and Σ_j π_j = 1. By Schoenberg's
    theorem, every isotropic kernel that is valid for any number of inputs is such a mixture. RBF,
    Matérn and rational quadratic kernels are examples, so you need not choose among them. Spectra
    with a narrow peak, for example of a periodic wave, are not such mixtures. Use gpytorch's
    `SpectralMixtureKernel` for them.

    The log weights form a curve over u = log λ. It is a fixed parabola plus a slope b ~ N(0, 3²)
    and second differences c_j ~ N(0, τ²) from knot to knot, where τ is the `smoothness`:

        log π = const − ½ (u / 0.7)² + b u + D₂⁺ c .

    D₂⁺ is the pseudo-inverse of the matrix of second differences. The trained parameter `shape`
    consists of b and c divided by their standard deviations. Its standard normal prior is a
    gpytorch prior, which `fit` and gpytorch's marginal likelihood include.

    If `continued` is False, the curve ends at its shortest length. Otherwise it continues as a
    power law π ∝ λ^p. The exponent p is the slope of the curve between its shortest length and 4.5
    times that length, but at least 2.3, so that the variance of a field is finite. The energy
    spectrum of a field in the plane falls as k^{1−p}. Four more lengths represent the power law,
    and the shortest one represents all shorter lengths. `VectorFieldGP.fit` sets `continued`:

    - With many observations, the curve is learned on a frequency grid and continues. The
      observations may resolve the whole curve while the true field has even shorter waves.
    - With few observations, the curve is learned with the exact kernel and ends. The data do not
      resolve its shortest lengths, which represent all shorter waves.

    The data do not distinguish unresolved waves from noise. Only the priors do: the prior of the
    curve, and a prior log σ² ~ N(log 0.1 v, 3²) of the noise variance σ², where v is the variance
    of the data. Error bars include the variance of waves that a grid truncates.

    The covariance has a closed form, for any number of inputs and with ARD. `Grid` and `Auto`
    support the kernel. Random rules support it only if the weights are not trained, and raise an
    error otherwise. In a `HelmholtzKernel`, the two curves are related by a learned difference.
    `fit` raises an error if the inputs of this kernel are equal in all observations, because such
    data do not determine a spectrum.

    Args:
        num_knots: J ≥ 4, the number of lengths. More lengths rarely change the result, and add
            cost.
        smoothness: τ > 0, the prior standard deviation of the second differences. A larger value
            allows a stronger curvature of the log weights.
        continued: whether the curve continues beyond its shortest length. `fit` sets it when it
            trains the curve. It is part of the `state_dict`, although it is not a parameter.
        ard_num_dims: the number of inputs, to train one lengthscale for each input. With None, the
            default, all inputs share one lengthscale.
        batch_shape: the batch shape of the parameters, as in gpytorch.
        active_dims: the input columns of the kernel; all columns if None.
        lengthscale_prior: the prior of the lengthscales, as in gpytorch.
        lengthscale_constraint: the constraint of the lengthscales, as in gpytorch.

    Raises:
        ValueError: `num_knots` is not an integer of at least 4, or `smoothness` is not positive and
            finite.

    Example:
        The kernel with 12 lengths, as the potential of a curl-free field:

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
                f"LearnedSpectrumKernel expects num_knots of at least 4, got {num_knots}; the "
                "default is 12"
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
        knots = np.geomspace(1 / 8, 8, num_knots)  # lengths, divided by the lengthscale
        u = np.log(knots)
        self._step = u[1] - u[0]
        # The rows of the second differences are orthogonal to constants and to lines. So are the
        # columns of their pseudo-inverse. They are thus orthogonal to the slope.
        bends = np.linalg.pinv(np.diff(np.eye(num_knots), n=2, axis=0))  # D₂⁺
        # These are not buffers, because gpytorch indexes buffers as if they were batched.
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
        """Return `continued`, which the covariance depends on although it is not a parameter."""
        return {"continued": self.continued}

    def set_extra_state(self, state: dict[str, bool]) -> None:
        """Restore a `state` that `get_extra_state` has returned."""
        self.continued = state["continued"]

    def _load_from_state_dict(self, state_dict, prefix, *args):
        key = prefix + "_extra_state"
        if key not in state_dict:
            warnings.warn(
                "the state_dict is older than this version of gp_orff and does not state whether "
                "the spectrum continues beyond its shortest length; the kernel keeps "
                f"continued={self.continued}, so set kernel.continued if this is wrong",
                stacklevel=2,
            )
            state_dict[key] = self.get_extra_state()
        super()._load_from_state_dict(state_dict, prefix, *args)

    @property
    def lengths(self) -> Float[Tensor, "M+J"]:
        """The relative lengths λ, shortest first.

        They are the J lengths of the knots and, if `continued`, the M = 4 lengths of the power law.
        """
        return self._lengths if self.continued else self._lengths[BEYOND:]

    @property
    def curve(self) -> Float[Tensor, "*b J"]:
        """The log weights (*b, J) at the knots, up to a constant."""
        return self._start.to(self.shape) + self.shape @ self._basis.to(self.shape).mT

    @property
    def log_weights(self) -> Float[Tensor, "*b M+J"]:
        """The log weights (*b, M+J) of the `lengths`, up to a constant."""
        curve = self.curve
        if not self.continued:
            return curve
        return torch.cat([end_of_curve(curve, self._step), curve], dim=-1)

    @property
    def weights(self) -> Float[Tensor, "*b M+J"]:
        """The weights π (*b, M+J) of the `lengths`, which add up to one."""
        return self.log_weights.softmax(dim=-1)

    @property
    def is_trained(self) -> bool:
        """Whether the weights are trained."""
        return self.shape.requires_grad

    def related(self) -> "RelatedSpectrumKernel":
        """Return a kernel whose curve is the curve of this kernel plus a learned difference."""
        return RelatedSpectrumKernel(self)

    @property
    def rates(self) -> Float[Tensor, "M+J"]:
        """The variances λ⁻² of the frequencies, in units of ℓ⁻²."""
        return self.lengths.to(self.shape.device) ** -2

    @torch.no_grad()
    def centre(self, order: int) -> None:
        """Centre the starting curve for derivatives of order t = `order`.

        A length λ with the weight π contributes a variance ∝ π λ^{−2t} to these derivatives. This
        method changes the lengthscale and the slope of the curve together, so that the starting
        spectrum is unchanged and these contributions are symmetric about log λ = 0.
        """
        shift = -2 * order * _WIDTH**2  # the shift of u
        self.lengthscale = self.lengthscale * math.exp(shift)
        self.shape.zero_()
        # With the slope 2t in u, π λ^{−2t} is symmetric about λ = 1, and the maximum of π is at
        # u = 2t · 0.7². The shorter lengthscale moves this maximum back to its absolute length.
        self.shape[..., 0] = 2 * order / _SLOPE

    @torch.no_grad()
    def extrapolate(self, shortest: float) -> None:
        """Replace the curve by a straight line at lengths λ below `shortest`.

        The line has the slope of the curve between `shortest` and 4.5 times `shortest`. At least
        three knots are unchanged.
        """
        curve, lengths = self.curve, self._lengths[BEYOND:]
        first = min(int((lengths < shortest).sum()), self.num_knots - 3)
        steps = min(end_steps(self._step), self.num_knots - 1 - first)
        # Knots are numbered from the shortest length. `number` counts the steps from the knot
        # `first` to the shortest one.
        slope = (curve[..., first + steps] - curve[..., first]) / steps
        number = torch.arange(first, 0, -1).to(curve)
        line = curve[..., first, None] - slope.unsqueeze(-1) * number
        change = torch.cat([line - curve[..., :first], torch.zeros_like(curve[..., first:])], -1)
        self.shape += self._coordinates(change)

    def _coordinates(self, change: Float[Tensor, "*b J"]) -> Float[Tensor, "*b J-1"]:
        """Return the change of `shape` that adds `change` to the curve, up to a constant."""
        # The constant completes the basis to J columns. Its coordinate is dropped, because the
        # softmax of the weights does not depend on it.
        basis = torch.cat([self._basis, torch.ones(self.num_knots, 1).to(self._basis)], dim=-1)
        inverse = torch.linalg.inv(basis.to(change))[:-1]
        return change @ inverse.mT

    @property
    def spectrum(self) -> "FiniteMixture":
        """The spectral density at the current weights and lengthscales, a mixture of Gaussians."""
        beyond = BEYOND if self.continued else 0
        return FiniteMixture(self.lengthscale, self.rates.detach(), self.weights, beyond)

    def correlation(self, s: Float[Tensor, "*m"], order: int = 0) -> Float[Tensor, "*m"]:
        """Return κ(s) = Σ_j π_j e^{−s/2λ_j²} with s = ‖(x − z)/ℓ‖², or a derivative of κ.

        Args:
            s: (*m), squared distances divided by ℓ², with up to two axes after the batch axes.
            order: the order of the derivative with respect to s.
        """
        rates = -0.5 * self.rates.to(s)
        factors = (self.weights.to(s) * rates**order).unbind(-1)
        if self.batch_shape:
            points = min(s.dim() - len(self.batch_shape), 2)  # axes before these are broadcast
            factors = [factor[(..., *[None] * points)] for factor in factors]
        return sum(factor * (rate * s).exp() for factor, rate in zip(factors, rates, strict=True))


# A learned spectrum whose curve is another curve plus a difference, for two parts of one field.


_DIFFERENCE = 0.5  # the prior sd of the difference, divided by the prior sd of the first curve


class RelatedSpectrumKernel(LearnedSpectrumKernel):
    """A `LearnedSpectrumKernel` whose curve is the curve of another kernel plus a difference.

    The other kernel has the log weights log π. With the same lengths ℓ λ_j and u = log λ,

        log π′ = const + log π + b′ u + D₂⁺ c′ ,    b′ ~ N(0, 1.5²) ,    c′_j ~ N(0, (τ/2)²) .

    These standard deviations are half of those of the first curve. The parameter `shape` consists
    of b′ and c′ divided by their standard deviations.

    Args:
        other: the kernel that defines the lengthscale, the lengths and log π. It is not a submodule
            of this kernel. Another part of the model contains it and trains it.

    Example:
        The weights are equal while the difference is zero:

        >>> import gp_orff
        >>> from gp_orff.kernels.learned import RelatedSpectrumKernel
        >>> first = gp_orff.LearnedSpectrumKernel(5)
        >>> second = RelatedSpectrumKernel(first)
        >>> first.lengthscale, first.shape.data[0] = 2.0, 0.3
        >>> second.lengthscale.item(), bool((second.weights == first.weights).all())
        (2.0, True)
    """

    has_lengthscale = False  # so that gpytorch does not register a second lengthscale
    has_recipe = False  # for files, because the kernel of both curves creates this kernel

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
        """The kernel that defines the lengthscale, the lengths and the first curve."""
        return self._other[0]

    @property
    def lengthscale(self) -> Float[Tensor, "*b 1 d"]:
        """The lengthscale ℓ of the other kernel."""
        return self.other.lengthscale.to(self.shape)

    @lengthscale.setter
    def lengthscale(self, value: float | Tensor) -> None:
        self.other.lengthscale = value

    @property
    def raw_lengthscale(self) -> nn.Parameter:
        """The raw lengthscale of the other kernel."""
        return self.other.raw_lengthscale

    @property
    def raw_lengthscale_constraint(self) -> Interval:
        """The constraint of the raw lengthscale of the other kernel."""
        return self.other.raw_lengthscale_constraint

    @property
    def curve(self) -> Float[Tensor, "*b J"]:
        """The log weights (*b, J) at the knots, up to a constant."""
        difference = self.shape @ self._basis.to(self.shape).mT
        return self.other.curve.to(self.shape) + _DIFFERENCE * difference

    @property
    def is_trained(self) -> bool:
        """Whether the difference or the curve of the other kernel is trained."""
        return super().is_trained or self.other.is_trained

    def _coordinates(self, change: Float[Tensor, "*b J"]) -> Float[Tensor, "*b J-1"]:
        """Return the change of `shape` that adds `change` to the curve, up to a constant."""
        return super()._coordinates(change) / _DIFFERENCE

    def centre(self, order: int) -> None:
        """Set the difference from the curve of the other kernel to zero."""
        self.shape.data.zero_()

    def __getitem__(self, index) -> "RelatedSpectrumKernel":
        own = super().__getitem__(index)
        if own is not self:
            own._other = (self.other[index],)
        return own

    def expand_batch(self, *sizes: torch.Size | int) -> "RelatedSpectrumKernel":
        """Return a copy whose parameters are expanded to the batch shape `sizes`."""
        own = super().expand_batch(*sizes)
        if own is not self:
            own._other = (self.other.expand_batch(*sizes),)
        return own


# Finite mixtures of Gaussian spectra, the spectra of `LearnedSpectrumKernel`.


@dataclass(frozen=True)
class FiniteMixture(ScaleMixture):
    """The spectral density of a `LearnedSpectrumKernel`, a finite mixture of Gaussians.

    The scaled frequency of d inputs is z = ℓω = √s g with g ~ N(0, I). The scale s has the value
    s_j with probability π_j. In the density weighted by ‖z‖^{2t} (see `Spectrum`), the
    probabilities are ∝ π_j s_j^t, and ‖g‖² ~ χ²_{d+2t}.

    Args:
        lengthscale: ℓ, (*b, 1, d), or (*b, 1, 1) if all inputs share one lengthscale.
        variances: s, (J,), positive.
        weights: π, (*b, J), which add up to one.
        beyond: the number of scales, counted from the first, that continue a learned curve beyond
            its shortest length; 0 by default. `tail` omits them, because a grid need not represent
            them.

    Example:
        The mean of ‖z‖² is d E s = 2 (0.75 · 1 + 0.25 · 4):

        >>> import gp_orff, torch
        >>> mixture = gp_orff.spectra.FiniteMixture(
        ...     torch.ones(1, 1),
        ...     variances=torch.tensor([1.0, 4.0]),
        ...     weights=torch.tensor([0.75, 0.25]),
        ... )
        >>> mixture.moment(order=1, num_dims=2)
        tensor([3.5000])
    """

    variances: Float[Tensor, "J"]
    weights: Float[Tensor, "*b J"]
    beyond: int = 0

    def scales(self, least: float) -> tuple[Float[Tensor, "*b J"], Float[Tensor, "*b J"]]:
        """Return the scales s (*b, J) and their weights (*b, J).

        Args:
            least: scales below this number are replaced by it.
        """
        weights = self.weights.double()
        return self.variances.double().clamp_min(least).expand_as(weights), weights

    def log_density(self, omega: Float[Tensor, "*b m d"]) -> Float[Tensor, "*b m"]:
        radius2, log_det = self._scaled(omega)
        half = omega.shape[-1] / 2
        s, weights = self.variances.to(radius2), self.weights.to(radius2).unsqueeze(-2)
        terms = weights.log() - half * (2 * math.pi * s).log() - 0.5 * radius2.unsqueeze(-1) / s
        return log_det + terms.logsumexp(-1)

    def moment(self, order: float, num_dims: int) -> Float[Tensor, "*b 1"]:
        """Return E‖z‖^{2t} = E s^t E‖g‖^{2t} for t = `order` and `num_dims` inputs."""
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
        """The length λ below which the curve has a hundredth of the variance of a field."""
        s, weights = self._of_curve(1)
        below = np.cumsum(weights[:, np.argsort(-s)], axis=-1) > 0.01
        return float(np.sort(1 / np.sqrt(s))[below.argmax(-1).min()])

    def frequency_parameters(self, shortest, longest):
        # The weights also change the important frequencies. Their coordinates are in units of their
        # prior standard deviations, and may change faster than the frequencies in a search.
        lengthscales = super().frequency_parameters(shortest, longest)
        return [*lengthscales, Range(self.weights, -16.0, 16.0, 6.0)]

    def _weighted_across(self, order: int) -> "FiniteMixture":
        weights = self.weights * self.variances**order
        return replace(self, weights=weights / weights.sum(-1, keepdim=True))

    def _radial_correlation(self, r: float, order: int) -> float:
        """Bound `correlation` from the scaled lag r by the mean of max(1, s r²)^t e^{−s r²/2}."""
        s, weights = self._values(order)
        square = s * r * r
        return float((weights * np.maximum(1, square) ** order * np.exp(-square / 2)).sum(-1).max())

    def _of_curve(self, order: int) -> tuple[Float[np.ndarray, "J"], Float[np.ndarray, "b J"]]:
        """Return `_values` without the scales beyond the curve."""
        s, weights = self._values(order)
        return s[self.beyond :], weights[:, self.beyond :]

    def _values(self, order: int) -> tuple[Float[np.ndarray, "J"], Float[np.ndarray, "b J"]]:
        """Return s, and the weights ∝ π s^t of a batch for t = `order`."""
        s, weights = self._arrays
        weights = weights * s**order
        return s, weights / weights.sum(-1, keepdims=True)

    @cached_property
    def _arrays(self) -> tuple[Float[np.ndarray, "J"], Float[np.ndarray, "b J"]]:
        s = self.variances.detach().double().cpu().numpy()
        return s, self.weights.detach().double().cpu().numpy().reshape(-1, len(s))

    def scale(self, base: Float[Tensor, "D c"], order: int) -> Float[Tensor, "*b D"]:
        """Return the random scale of each of D frequencies, (*b, D).

        It is the scale s_j of component j, which is selected with probability ∝ π_j s_j^t.

        Args:
            base: (D, c), the base variables of the frequencies. The last column contains the
                probability at which the quantile function of the index j is evaluated.
            order: t.

        Raises:
            NotImplementedError: the weights are trained, but random frequencies do not depend on
                them smoothly.
        """
        # The selected component is a step function of the weights, whose derivative is zero almost
        # everywhere: training would ignore the weights.
        if torch.is_grad_enabled() and self.weights.requires_grad:
            inputs = base.shape[-1] - 1
            remedy = "Grid or Auto" if inputs <= GRID_INPUTS else "the kernel without features"
            raise NotImplementedError(
                f"expected a frequency grid, which supports up to {GRID_INPUTS} inputs, for a "
                "LearnedSpectrumKernel with trained weights, got random frequencies of "
                f"{inputs} inputs; use {remedy}, or fix the weights by "
                "kernel.shape.requires_grad_(False)"
            )
        weights = self.weights * self.variances**order
        # The uniform number in the last column of `base` selects the component by the inverse
        # distribution function: the index is the number of levels that it exceeds.
        levels = (weights / weights.sum(-1, keepdim=True)).cumsum(-1)[..., :-1]
        chosen = (base[:, -1, None] > levels.unsqueeze(-2)).sum(-1)  # (*b, D)
        return self.variances[chosen].to(base)


@shortest_lengths.register
def _(kernel: LearnedSpectrumKernel) -> Tensor:
    """Return ℓ times the shortest length with a relevant part of the variance."""
    return kernel.lengthscale * kernel.spectrum.shortest
