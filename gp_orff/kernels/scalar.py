"""Bessel kernels, with their spectra, and Matérn kernels of any smoothness."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import scipy
import torch
from gpytorch.constraints import Interval
from gpytorch.priors import Prior
from jaxtyping import Float
from torch import Tensor
from torch.autograd import Function

from gp_orff.kernels.base import check_positive_integer, is_number, positive, refuse_tracing
from gp_orff.kernels.spectra import Radial, RadialKernel, StudentT

# Powers of Bessel functions as kernels.


class BesselKernel(RadialKernel):
    r"""The kernel of Le et al. (2013, eq. 37), a power of a Bessel function.

    k(x, z) = [Γ(ν + 1) (2/r)^ν J_ν(r)]^t, with ν = d/2 and r = ‖(x − z)/ℓ‖

    J_ν is the Bessel function of the first kind, and t is the power. Le et al. call this kernel a
    Matérn kernel. Its frequencies are sums of t independent points, each uniform in the unit ball
    of d dimensions, divided by ℓ. So all frequencies have ‖ω‖ ≤ t/ℓ. For t = 1, all points of this
    ball are equally probable. For t = 1 and d = 1, the kernel is sin(r)/r.

    Lengthscales of this kernel are not comparable to those of other kernels. With many inputs, k
    approaches an RBF kernel with the lengthscale ℓ √((d + 2)/t). If r is a good lengthscale of an
    RBF kernel for your data, start from ℓ = r √(t/(d + 2)).

    The kernel is valid for d inputs only, and some rules for frequencies do not support it:

    - `MonteCarlo`, `QuasiMonteCarlo` and `Orthogonal` work for every d.
    - `FourierFastfood` works for every d, with its usual bias.
    - `Fastfood` needs d = 2^k, because it pads the inputs to a power of two.
    - `StructuredOrthogonal` needs d = 2^k ≥ 32, for the same reason.
    - `Grid`, `GaussHermite` and rules with `shared=True` raise an error, because the spectral
      density has no simple form.

    `CurlFreeKernel`, `DivergenceFreeKernel` and `HelmholtzKernel` accept this kernel as their base
    kernel. Their features need a rule with `measure="base"`. The covariance is accurate to 1e-13
    for all d and r. It can be differentiated any number of times.

    Args:
        power: t, a positive integer.
        num_dims: d, the number of inputs.
        ard_num_dims: d, to train one lengthscale for each input. With None, the default, all inputs
            share one lengthscale.
        batch_shape: the batch shape of the lengthscales, as in gpytorch.
        active_dims: the d input columns of the kernel; all columns if None.
        lengthscale_prior: the prior of the lengthscales, as in gpytorch.
        lengthscale_constraint: the constraint of the lengthscales, as in gpytorch.

    Raises:
        ValueError: `power` or `num_dims` is not a positive integer; `ard_num_dims`, `active_dims`
            or the inputs disagree with `num_dims`.

    Example:
        Random features approximate the covariance:

        >>> import gp_orff, torch
        >>> exact = gp_orff.BesselKernel(power=3, num_dims=16)
        >>> kernel = gp_orff.ORFFKernel(exact, gp_orff.Fastfood(4096))
        >>> x = torch.rand(10, 16)
        >>> error = kernel(x).to_dense() - exact(x).to_dense()
        >>> bool(error.abs().max() < 0.05)
        True
    """

    def __init__(
        self,
        power: int,
        num_dims: int,
        *,
        ard_num_dims: int | None = None,
        batch_shape: torch.Size | None = None,
        active_dims: Sequence[int] | None = None,
        lengthscale_prior: Prior | None = None,
        lengthscale_constraint: Interval | None = None,
    ):
        check_positive_integer(power, "power", "BesselKernel")
        check_positive_integer(num_dims, "num_dims", "BesselKernel")
        numbers = {
            "ard_num_dims": ard_num_dims,
            "the number of active_dims": None if active_dims is None else len(active_dims),
        }
        for name, number in numbers.items():
            if number is not None and number != num_dims:
                raise ValueError(
                    f"BesselKernel expects {name} to be num_dims={num_dims}, got {number}; pass "
                    "the number of inputs as num_dims"
                )
        super().__init__(
            ard_num_dims=ard_num_dims,
            batch_shape=batch_shape,
            active_dims=active_dims,
            lengthscale_prior=lengthscale_prior,
            lengthscale_constraint=lengthscale_constraint,
        )
        self.power, self.num_dims = int(power), int(num_dims)

    def forward(
        self,
        x1: Float[Tensor, "*b n d"],
        x2: Float[Tensor, "*b m d"],
        diag: bool = False,
        **params,
    ) -> Float[Tensor, "*b n m"]:
        """Return the covariance matrix (*b, n, m) between the points `x1` and `x2`.

        Args:
            x1: points (*b, n, d).
            x2: points (*b, m, d).
            diag: whether to return only the diagonal (*b, n); it needs m = n.
            params: further arguments of gpytorch's `covar_dist`.

        Raises:
            ValueError: the points have another number of columns than `num_dims`.
        """
        for x in (x1, x2):
            if x.shape[-1] != self.num_dims:
                raise ValueError(
                    f"BesselKernel expects {self.num_dims} inputs, its num_dims, got "
                    f"{x.shape[-1]}; use BesselKernel({self.power}, num_dims={x.shape[-1]})"
                )
        return super().forward(x1, x2, diag, **params)

    @property
    def spectrum(self) -> "BesselSpectrum":
        """The spectral density, which is the density of ω = z/ℓ.

        Here z is the sum of `power` independent points, each uniform in the unit ball.
        """
        return BesselSpectrum(self.lengthscale, self.power, self.num_dims)

    def correlation(self, s: Float[Tensor, "*m"], order: int = 0) -> Float[Tensor, "*m"]:
        """Return κ(s) or a derivative of κ, where k(x, z) = κ(s) and s = ‖(x − z)/ℓ‖².

        κ = f^t with t = `power`, f(s) = ₀F₁(; b; −s/4) and b = d/2 + 1. The derivatives follow from
        ₀F₁(; b; −q)′ = −₀F₁(; b + 1; −q)/b, where ′ is the derivative with respect to q.

        Args:
            s: (*m), squared distances divided by ℓ².
            order: 0 for κ, 1 for κ′ and 2 for κ″.
        """
        b, t = self.num_dims / 2 + 1, self.power
        f = BesselFunction.apply(s / 4, b)
        if order == 0:
            return f**t
        first = -BesselFunction.apply(s / 4, b + 1) / (4 * b)
        if order == 1:
            return t * f ** (t - 1) * first
        second = BesselFunction.apply(s / 4, b + 2) / (16 * b * (b + 1))
        square = (t - 1) * f ** (t - 2) * first.square() if t > 1 else 0.0
        return t * (square + f ** (t - 1) * second)


class BesselFunction(Function):
    """₀F₁(; b; −q) = Γ(b) J_{b−1}(2√q) / q^{(b−1)/2} for q ≥ 0, in float64.

    Its derivative with respect to q is −₀F₁(; b + 1; −q)/b. With y = q/b, the function is
    e^{−y} Σ c_n yⁿ, where c_0 = 1, c_1 = 0 and (n + 1)(n + b) c_{n+1} = 2n c_n − c_{n−1}. This
    recurrence follows from Bessel's equation. The series is used up to y = 13, and scipy for larger
    y. For b > 100, scipy underflows. The series is then used up to y = 45, where the function
    vanishes to rounding.
    """

    @staticmethod
    def forward(ctx, q: Float[Tensor, "*m"], b: float) -> Float[Tensor, "*m"]:
        ctx.save_for_backward(q)
        ctx.b = b
        values, far = _gaussian_series(q.double() / b, b), q > 13 * b
        if b <= 100 and far.any():
            beyond = scipy.special.hyp0f1(b, -q[far].double().cpu().numpy())
            values[far] = torch.from_numpy(beyond).to(q.device)
        return values.to(q.dtype)

    @staticmethod
    def backward(ctx, grad):
        (q,) = ctx.saved_tensors
        return -grad / ctx.b * BesselFunction.apply(q, ctx.b + 1), None


def _gaussian_series(y: Float[Tensor, "*m"], b: float) -> Float[Tensor, "*m"]:
    """Return e^{−y} Σ c_n yⁿ with 49 terms, where a larger y is replaced by 45."""
    coefficients = [1.0, 0.0]
    for n in range(1, 48):
        step = 2 * n * coefficients[-1] - coefficients[-2]
        coefficients.append(step / ((n + 1) * (n + b)))
    y = y.clamp_max(45)
    total = torch.zeros_like(y)
    for coefficient in reversed(coefficients):
        total.mul_(y).add_(coefficient)
    return total.mul_((-y).exp_())


# Spectra of powers of Bessel functions: distributions of sums of points in a ball.


@dataclass(frozen=True)
class BesselSpectrum(Radial):
    """The spectral density of a `BesselKernel`, from which frequencies ω = z/ℓ are drawn.

    The vector z is the sum of t independent points, each uniform in the unit ball of d dimensions.
    Le et al. (2013, Section 4.4) draw the t points. This class draws only the norm ‖z‖, by adding
    one point at a time. A point ξ has the norm ρ = u^{1/d}, with u uniform in (0, 1). Its angle to
    the sum S of the previous points has the cosine c, with (c + 1)/2 ~ Beta((d − 1)/2, (d − 1)/2).
    The new sum has ‖S + ξ‖² = ‖S‖² + ρ² + 2‖S‖ρc.

    The density of ω itself has no simple form, so `log_density` raises a NotImplementedError.

    Args:
        lengthscale: ℓ, (*b, 1, d), or (*b, 1, 1) if all inputs share one lengthscale.
        power: t, a positive integer.
        num_dims: d, the number of inputs.

    Example:
        The mean of ‖z‖² is td/(d + 2):

        >>> import gp_orff, torch
        >>> spectrum = gp_orff.spectra.BesselSpectrum(
        ...     torch.ones(1, 1), power=3, num_dims=4
        ... )
        >>> spectrum.moment(order=1, num_dims=4)
        2.0
    """

    power: int
    num_dims: int
    is_weighted = False

    def num_coordinates(self, num_dims: int) -> int:
        return 2 * self.power - 1

    def radial_base(self, u: np.ndarray, num_dims: int, order: int) -> np.ndarray:
        if num_dims != self.num_dims:
            raise ValueError(
                f"expected frequencies in {self.num_dims} dimensions for "
                f"BesselKernel(num_dims={self.num_dims}), got {num_dims}; set num_dims of the "
                "kernel to its number of inputs. If the rule pads inputs to a power of two, use "
                "gp_orff.QuasiMonteCarlo or gp_orff.Orthogonal instead"
            )
        if order:
            raise NotImplementedError(
                "expected frequencies from the spectral density p of a BesselKernel, got a rule "
                f'that draws from ‖z‖^{2 * order} p, which is not available; use measure="base"'
            )
        radii, levels = u[:, : self.power] ** (1 / num_dims), u[:, self.power :]
        total = radii[:, 0]
        for radius, cosine in zip(radii.T[1:], _cosines(levels, num_dims).T, strict=True):
            square = total**2 + radius**2 + 2 * total * radius * cosine
            total = np.sqrt(np.maximum(square, 0.0))
        return total[:, None]

    def importance(self, base: Float[Tensor, "D d"], order: int) -> Float[Tensor, "D"]:
        return torch.ones_like(base[:, 0])

    def log_density(self, omega: Float[Tensor, "*b m d"]) -> Float[Tensor, "*b m"]:
        """Raise an error for all `omega` (*b, m, d), because the density has no simple form.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(
            "expected a kernel whose spectral density can be evaluated, got BesselKernel, whose "
            "frequencies can only be drawn; use a random rule with shared=False, or "
            "gp_orff.Fastfood for an LCMKernel"
        )

    def moment(self, order: float, num_dims: int) -> float:
        """Return the moment E‖z‖^{2m} of z = ℓω, with m = `order`.

        The moments follow from the power series of E cos⟨z, x⟩. In this series, the coefficient of
        ‖x‖^{2m} is (−1)^m E‖z‖^{2m} / (4^m m! (d/2)_m), with the rising factorial (d/2)_m. The
        series for t points is the t-th power of the series for one point.

        Args:
            order: m ≥ 0. It must be an integer if t > 1.
            num_dims: d, the number of inputs of the kernel.

        Raises:
            NotImplementedError: m is not an integer, and t > 1.
        """
        d = self.num_dims
        if self.power == 1:
            return d / (d + 2 * order)
        if order != int(order):
            raise NotImplementedError(
                "expected an integer order m of the moment E‖z‖^(2m) of a BesselKernel with "
                f"power > 1, got m={order}; use power=1 for bounds of the error"
            )
        m = int(order)
        j = np.arange(m + 1)
        point = 1 / (scipy.special.factorial(j) * scipy.special.poch(d / 2 + 1, j))
        coefficient = np.polynomial.polynomial.polypow(point, self.power)[m]
        return float(math.factorial(m) * scipy.special.poch(d / 2, m) * coefficient)

    def frequency_parameters(self, shortest, longest):
        # correlations end at about ℓ √((d + 2)/t)
        scale = math.sqrt(self.power / (self.num_dims + 2))
        return super().frequency_parameters(scale * shortest, scale * longest)


def _cosines(u: Float[np.ndarray, "D k"], num_dims: int) -> Float[np.ndarray, "D k"]:
    """Return the u-quantiles of one coordinate of a uniform point on the unit sphere."""
    if num_dims == 1:
        return np.where(u < 0.5, -1.0, 1.0)
    half = (num_dims - 1) / 2
    return 2 * scipy.special.betaincinv(half, half, u) - 1


# The functions z^μ K_μ(z) of Matérn kernels of any smoothness, from tables of values of scipy.


# The table starts at log q = −30. It has cells of width 1/32, up to z = 665.
_FIRST, _CELLS = -30.0, 32 * 43


class MaternFunction(Function):
    """g_μ(q) = z^μ K_μ(z) with z = √q, for q > 0 and any real μ, in float64.

    K_μ is the modified Bessel function of the second kind. The derivative of g_μ with respect to q
    is −½ g_{μ−1} (Abramowitz & Stegun 1964, 9.6.28). As a function of log q, the logarithm of
    e^z g_μ is close to a straight line at both ends, and smooth between them. Polynomials in 1376
    cells interpolate it to 1e-14. Smaller q use scipy. For larger q, g_μ is zero to rounding.
    """

    @staticmethod
    def forward(ctx, q: Float[Tensor, "*m"], order: float) -> Float[Tensor, "*m"]:
        ctx.save_for_backward(q)
        ctx.order = order
        values, t = q.detach().double(), q.detach().double().log()
        position = (t - _FIRST) * 32
        cell = position.nan_to_num(0.0).clamp(0, _CELLS - 1).long()
        local = position.sub_(cell).mul_(2).sub_(1)  # from −1 to 1
        total = torch.zeros_like(values)
        for coefficient in _table(order, q.device):
            total.mul_(local).add_(coefficient[cell])
        total.sub_(values.sqrt()).exp_()
        total[t >= _FIRST + _CELLS / 32] = 0.0
        below = t < _FIRST
        if below.any():
            smallest = _logarithm(values[below].cpu().numpy(), order)
            total[below] = torch.from_numpy(smallest).to(values).exp()
        return total.to(q.dtype)

    @staticmethod
    def backward(ctx, grad):
        (q,) = ctx.saved_tensors
        return -0.5 * grad * MaternFunction.apply(q, ctx.order - 1), None


@lru_cache(maxsize=64)
def _table(order: float, device: torch.device) -> Float[Tensor, "k cells"]:
    """Return the polynomial coefficients of log(e^z g_μ) in every cell, highest power first."""
    nodes = np.cos((np.arange(7) + 0.5) * np.pi / 7)  # for polynomials of degree 6
    positions = np.arange(_CELLS)[:, None] + 0.5 * (nodes + 1)
    q = np.exp(_FIRST + positions / 32)
    values = _logarithm(q, order) + np.sqrt(q)
    return torch.from_numpy(np.linalg.solve(np.vander(nodes), values.T)).to(device)


def _logarithm(q: Float[np.ndarray, "*m"], order: float) -> Float[np.ndarray, "*m"]:
    """Return log g_μ(q).

    If K_μ(z) overflows, it is computed from the series 2^{μ−1} Γ(μ) (1 − q/(4(μ − 1)) + …).
    """
    z = np.sqrt(q)
    scaled = scipy.special.kve(order, z)
    large = ~np.isfinite(scaled)
    values = np.log(np.where(large, 1.0, scaled)) - z + order * np.log(z)
    if order > 1:
        limit = (order - 1) * math.log(2) + math.lgamma(order) - q / (4 * (order - 1))
        values = np.where(large, limit, values)
    return values


# Matérn kernels of any smoothness.


# The smallest ν of field kernels. A lag of 1e-14 changes their variance by 1e-28^(ν − 1).
_ROUGHEST = 1.2


class GeneralMaternKernel(RadialKernel):
    r"""Matérn kernel of any smoothness ν > 0.

    k(x, z) = 2^{1−ν}/Γ(ν) · u^ν K_ν(u), with u = √(2ν) ‖(x − z)/ℓ‖

    K_ν is the modified Bessel function of the second kind (Rasmussen & Williams 2006, eq. 4.14).
    The smoothness ν is fixed and not trained. The spectral density is a multivariate Student-t
    density with 2ν degrees of freedom and scale 1/ℓ.

    For ν = 1/2, 3/2 or 5/2, use gpytorch's `MaternKernel`, which is about ten times faster. Values
    of this kernel are accurate to 1e-12. They can be differentiated any number of times. If ν > 50,
    or if ν < 1.2 in a field kernel, the exact covariance is not available: put the kernel inside an
    `ORFFKernel`.

    Args:
        nu: ν > 0, the smoothness. `CurlFreeKernel`, `DivergenceFreeKernel` and `HelmholtzKernel`
            need ν > 1.
        ard_num_dims: the number of inputs, to train one lengthscale for each input. With None, the
            default, all inputs share one lengthscale.
        batch_shape: the batch shape of the lengthscales, as in gpytorch.
        active_dims: the input columns of the kernel; all columns if None.
        lengthscale_prior: the prior of the lengthscales, as in gpytorch.
        lengthscale_constraint: the constraint of the lengthscales, as in gpytorch.

    Raises:
        TypeError: ν is not a number.
        ValueError: ν ≤ 0.
        NotImplementedError: raised by an evaluation of the exact covariance if ν > 50, or if
            ν < 1.2 in a field kernel.

    Example:
        A curl-free field that is rougher than with ν = 5/2, exact and with features:

        >>> import gp_orff, torch
        >>> potential = gp_orff.GeneralMaternKernel(nu=1.8, ard_num_dims=2)
        >>> field = gp_orff.CurlFreeKernel(potential, num_dims=2)
        >>> field(torch.rand(5, 2)).shape
        torch.Size([10, 10])
        >>> kernel = gp_orff.ORFFKernel(field, gp_orff.MonteCarlo(64))
        >>> kernel(torch.rand(5, 2)).shape
        torch.Size([10, 10])
    """

    highest_order = 4

    def __init__(
        self,
        nu: float,
        *,
        ard_num_dims: int | None = None,
        batch_shape: torch.Size | None = None,
        active_dims: Sequence[int] | None = None,
        lengthscale_prior: Prior | None = None,
        lengthscale_constraint: Interval | None = None,
    ):
        if not is_number(nu):
            raise TypeError(f"GeneralMaternKernel expects nu as a number, got {nu!r}")
        if not nu > 0:
            raise ValueError(f"GeneralMaternKernel expects nu > 0, got {nu}")
        super().__init__(
            ard_num_dims=ard_num_dims,
            batch_shape=batch_shape,
            active_dims=active_dims,
            lengthscale_prior=lengthscale_prior,
            lengthscale_constraint=lengthscale_constraint,
        )
        self.nu = float(nu)

    @property
    def spectrum(self) -> StudentT:
        """The spectral density at the current lengthscales."""
        return StudentT(self.lengthscale, self.nu)

    def correlation(self, s: Float[Tensor, "*m"], order: int = 0) -> Float[Tensor, "*m"]:
        """Return κ(s) or a derivative of κ, where k(x, z) = κ(s) and s = ‖(x − z)/ℓ‖².

        κ^{(j)}(s) = (−ν)^j 2^{1−ν}/Γ(ν) · u^{ν−j} K_{ν−j}(u), with u² = 2νs. If j > ν, this is
        infinite at s = 0, and a very large number is returned instead.

        Args:
            s: (*m), squared distances divided by ℓ².
            order: j = 0 for κ, 1 for κ′ and 2 for κ″.

        Raises:
            NotImplementedError: ν > 50, or j > 0 and ν < 1.2.
        """
        refuse_tracing(self)
        if order and self.nu < _ROUGHEST:
            raise NotImplementedError(
                f"expected a GeneralMaternKernel with nu >= {_ROUGHEST}, got nu={self.nu}, for "
                "which rounding of the inputs changes the covariance of the field near lag zero; "
                "put it inside ORFFKernel, or use a larger nu"
            )
        if self.nu > 50:  # K_ν overflows near zero
            raise NotImplementedError(
                f"expected a GeneralMaternKernel with nu <= 50 for an exact covariance, got "
                f"nu={self.nu}; put it inside ORFFKernel, or use gpytorch's RBFKernel, its limit "
                "for large nu"
            )
        factor = (-self.nu) ** order * 2.0 ** (1 - self.nu) / math.gamma(self.nu)
        values = MaternFunction.apply(positive(2 * self.nu * s.double()), self.nu - order)
        largest = math.sqrt(torch.finfo(s.dtype).max)  # products with a zero are zero
        return (factor * values).clamp(-largest, largest).to(s.dtype)
