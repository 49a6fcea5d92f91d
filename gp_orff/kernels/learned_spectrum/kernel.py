"""A scalar kernel whose spectral density is learned from the data."""

import math
import warnings
from collections.abc import Sequence

import numpy as np
import torch
from gpytorch.constraints import Interval
from gpytorch.kernels import Kernel
from gpytorch.priors import NormalPrior, Prior
from jaxtyping import Float
from torch import Tensor, nn

from gp_orff.kernels.base import check_positive_integer
from gp_orff.kernels.closed_form import radial_derivatives
from gp_orff.kernels.learned_spectrum.ends import BEYOND, end_lengths, end_of_curve, end_steps

_FARTHEST = 8.0  # the longest of the lengths over the lengthscale, and the inverse of the shortest
_WIDTH = 0.7  # standard deviation of the logarithm of the lengths, by their weights at the start
_SLOPE = 3.0  # standard deviation of the slope of the log weights over the log lengths
_FEWEST = 4


class LearnedSpectrumKernel(Kernel):
    r"""A stationary kernel whose spectral density is a curve that is learned from the data.

    A mixture of RBF kernels of many lengths, whose weights are trained:

        k(x, z) = Σ_j π_j exp(−½ ‖(x − z)/(ℓ λ_j)‖²) ,    S(ω) = Σ_j π_j N(ω; 0, diag(ℓ λ_j)⁻²) ,

    with `num_knots` lengths λ_j from 1/8 to 8 at equal ratios, and Σ_j π_j = 1. By Schoenberg's
    theorem such mixtures are all the isotropic kernels that are valid in every number of
    dimensions. RBF, Matérn and rational quadratic kernels are among them, so that nobody has to
    choose. A spectrum with a peak that is narrower than that of a derivative of an RBF kernel, as
    of a regular wave, is not: use gpytorch's `SpectralMixtureKernel`.

    The log weights are a curve over u = log λ, at the start −½ (u / 0.7)². To it are added a slope
    b ~ N(0, 3²) and second differences c_j ~ N(0, τ²) from knot to knot, τ being the `smoothness`:

        log π = const − ½ (u / 0.7)² + b u + D₂⁺ c .

    At its shortest length the curve ends, or goes on as a power law if `continued`: π ∝ λ^p, with
    the slope p from there to 4.5 times that length, but p ≥ 2.3, so that the variance of a
    field is finite; the energy spectrum of a field in the plane falls like k^{1−p}. Four lengths
    stand for this, the last one for all shorter ones. `fit` decides: curves of many readings, which
    are learned on a frequency grid, go on, as readings may resolve all of the curve there, while
    the truth has shorter waves. Curves of few readings, learned under the exact kernel, end: their
    shortest lengths are not resolved, and stand for all that are shorter. What is not resolved
    can be told from noise only by extrapolation of the curve; the prior of the one is that of the
    curve, that of the other log σ² ~ N(log 0.1 v, 3²), v being the variance of the data. A
    frequency grid is made to hold the curve up to its end; what it lacks beyond counts in error
    bars, as all that grids truncate.

    `shape` holds b and c over their standard deviations, so that its prior is standard normal; this
    prior is one of gpytorch, and takes part in `fit` and in gpytorch's own marginal likelihood.

    The covariance has a closed form, for all inputs and with ARD; frequency grids (`Grid`, `Auto`)
    hold it as they hold other kernels. Random frequencies cannot follow the weights while these are
    trained, and raise; they serve fixed weights. In a `HelmholtzKernel` the curve of the second
    part is that of the first plus a difference. `fit` refuses readings that have the same values
    in all inputs of the kernel: they tell nothing of a spectrum.

    Args:
        num_knots: J, the number of lengths, at least 4. More do no harm beyond their cost.
        smoothness: τ, how far the curve of the log weights may bend.
        continued: whether the curve goes on beyond its shortest length; `fit` sets it where it
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

    has_lengthscale = True

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
        if num_knots < _FEWEST:
            raise ValueError(
                f"LearnedSpectrumKernel expects num_knots of at least {_FEWEST}, got {num_knots}; "
                "a curve needs some, the default is 12"
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
        knots = np.geomspace(1 / _FARTHEST, _FARTHEST, num_knots)
        u = np.log(knots)
        self._step = u[1] - u[0]
        bends = np.linalg.pinv(np.diff(np.eye(num_knots), n=2, axis=0))  # D₂⁺
        # no buffers, which gpytorch takes for batches when it indexes a kernel
        ends = end_lengths(knots[0], self._step)
        self._lengths = torch.from_numpy(np.concatenate([ends, knots]))
        self.continued = continued
        self._start = torch.from_numpy(-0.5 * (u / _WIDTH) ** 2)
        self._basis = torch.from_numpy(np.column_stack([_SLOPE * u, smoothness * bends]))
        size = torch.Size([*self.batch_shape, num_knots - 1])
        self.register_parameter("shape", nn.Parameter(torch.zeros(size)))
        self.register_prior("shape_prior", NormalPrior(0.0, 1.0), _shape, _set_shape)

    def get_extra_state(self) -> dict[str, bool]:
        """What the covariance depends on, and no parameter or buffer has."""
        return {"continued": self.continued}

    def set_extra_state(self, state: dict[str, bool]) -> None:
        """Take over `state`, which `get_extra_state` returned."""
        self.continued = state["continued"]

    def _load_from_state_dict(self, state_dict, prefix, *args):
        key = prefix + "_extra_state"
        if key not in state_dict:
            warnings.warn(
                "the state_dict is older than this version of gp_orff: it does not say whether "
                f"the spectrum goes on beyond its shortest length; continued={self.continued} "
                "stays, set kernel.continued if that is wrong",
                stacklevel=2,
            )
            state_dict[key] = self.get_extra_state()
        super()._load_from_state_dict(state_dict, prefix, *args)

    @property
    def lengths(self) -> Float[Tensor, "M+J"]:
        """λ, shortest first: those of the knots, before them those beyond, if it is `continued`."""
        return self._lengths if self.continued else self._lengths[BEYOND:]

    @property
    def curve(self) -> Float[Tensor, "*b J"]:
        """The logarithms of the weights at the knots, up to a constant."""
        return self._start.to(self.shape) + self.shape @ self._basis.to(self.shape).mT

    @property
    def log_weights(self) -> Float[Tensor, "*b M+J"]:
        """The logarithms of the weights of all lengths, up to a constant."""
        curve = self.curve
        if not self.continued:
            return curve
        return torch.cat([end_of_curve(curve, self._step), curve], dim=-1)

    @property
    def weights(self) -> Float[Tensor, "*b M+J"]:
        """The weights π of the lengths; they add up to one."""
        return self.log_weights.softmax(dim=-1)

    @property
    def rates(self) -> Float[Tensor, "M+J"]:
        """The variances λ⁻² of the frequencies, in units of ℓ⁻²."""
        return self.lengths.to(self.shape.device) ** -2

    @torch.no_grad()
    def centre(self, order: int) -> None:
        """Move the start of the curve such that weights ∝ π λ^{−2t} are symmetric about λ = 1,
        t = `order`, by lengthscale and slope: the curve goes along with the lengths.

        Fields of degree t have these shares of the variance.
        """
        shift = -2 * order * _WIDTH**2  # of u
        self.lengthscale = self.lengthscale * math.exp(shift)
        self.shape.zero_()
        self.shape[..., 0] = 2 * order / _SLOPE

    @torch.no_grad()
    def extrapolate(self, shortest: float) -> None:
        """Make the curve a line at lengths λ below `shortest`, with the slope that it has from
        there to 4.5 times this length; at least three knots are left as they are."""
        curve, lengths = self.curve, self._lengths[BEYOND:]
        first = min(int((lengths < shortest).sum()), self.num_knots - 3)
        steps = min(end_steps(self._step), self.num_knots - 1 - first)
        slope = (curve[..., first + steps] - curve[..., first]) / steps
        number = torch.arange(first, 0, -1).to(curve)
        line = curve[..., first, None] - slope.unsqueeze(-1) * number
        change = torch.cat([line - curve[..., :first], torch.zeros_like(curve[..., first:])], -1)
        self.shape += self._coordinates(change)

    def _coordinates(self, change: Float[Tensor, "*b J"]) -> Float[Tensor, "*b J-1"]:
        """The change of `shape` that changes the curve so, up to a constant."""
        basis = torch.cat([self._basis, torch.ones(self.num_knots, 1).to(self._basis)], dim=-1)
        inverse = torch.linalg.inv(basis.to(change))[:-1]
        return change @ inverse.mT

    def forward(
        self,
        x1: Float[Tensor, "*b n d"],
        x2: Float[Tensor, "*b m d"],
        diag: bool = False,
        **params,
    ) -> Float[Tensor, "*b n m"]:
        """k(x1, x2), or its diagonal (*b, n) if `diag`.

        Args:
            x1: points (*b, n, d).
            x2: points (*b, m, d).
            diag: return the diagonal only.
            params: further arguments of gpytorch's `covar_dist`.
        """
        x1, x2 = x1 / self.lengthscale, x2 / self.lengthscale
        if diag:
            return self.correlation((x1 - x2).square().sum(-1), vectors=1)
        return self.correlation(self.covar_dist(x1, x2, square_dist=True, **params))

    def correlation(
        self, s: Float[Tensor, "*m"], order: int = 0, vectors: int = 2
    ) -> Float[Tensor, "*m"]:
        """κ(s) = Σ_j π_j e^{−s/2λ_j²}, s = ‖(x − z)/ℓ‖², or a derivative by s.

        Args:
            s: squared distances in units of the lengthscale.
            order: of the derivative.
            vectors: the number of axes of s after those of the batch.
        """
        rates = -0.5 * self.rates.to(s)
        factors = (self.weights.to(s) * rates**order).unbind(-1)
        if self.batch_shape:
            factors = [factor[(..., *[None] * vectors)] for factor in factors]
        return sum(factor * (rate * s).exp() for factor, rate in zip(factors, rates, strict=True))


def _shape(kernel: LearnedSpectrumKernel) -> Float[Tensor, "*b J-1"]:
    return kernel.shape


def _set_shape(kernel: LearnedSpectrumKernel, value: Float[Tensor, "*b J-1"]) -> None:
    kernel.initialize(shape=value)


@radial_derivatives.register
def _(kernel: LearnedSpectrumKernel, s: Tensor) -> tuple[Tensor, Tensor]:
    vectors = s.dim() - len(kernel.batch_shape)
    return kernel.correlation(s, 1, vectors), kernel.correlation(s, 2, vectors)
