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
    r"""Power of a Bessel function, which Le et al. (2013, eq. 37) call Matérn kernel.

    k(x, z) = [Γ(ν + 1) (2/r)^ν J_ν(r)]^t, with ν = d/2, r = ‖(x − z)/ℓ‖ and the power t.

    Its spectral density is the distribution of a sum of t independent points, each uniform in the
    unit ball of d dimensions, divided by ℓ. So k has no frequencies beyond t/ℓ. For t = 1 all
    frequencies below are equally probable, and k is sin(r)/r if d = 1 as well. In many dimensions,
    k approaches exp(−t r²/(2d + 4)), an RBF kernel with lengthscale ℓ √((d + 2)/t). Its
    lengthscales are therefore not comparable to those of other kernels. Start from ℓ √(t/(d + 2)),
    where ℓ is a lengthscale for an RBF kernel.

    The kernel is valid for one number of dimensions. `MonteCarlo`, `QuasiMonteCarlo` and
    `Orthogonal` work for every d, and `FourierFastfood` does with its bias. Among the rules that
    pad the inputs, `Fastfood` needs d = 2^k, and `StructuredOrthogonal` needs d = 2^k ≥ 32. `Grid`,
    `GaussHermite` and rules with `shared=True` do not work, because the density is not evaluated.
    `CurlFreeKernel`, `DivergenceFreeKernel` and `HelmholtzKernel` with this base kernel are exact.
    Their features need `measure="base"`.

    The covariance is accurate to 1e-13 for all d and r, and can be differentiated any number of
    times.

    Args:
        power: t, a positive integer.
        num_dims: d, the number of inputs.
        ard_num_dims: d for one lengthscale of each input; one for all inputs if None.
        batch_shape: the batch shape of the lengthscales, as in gpytorch.
        active_dims: the d input columns of the kernel; all columns if None.
        lengthscale_prior: the prior of the lengthscales, as in gpytorch.
        lengthscale_constraint: the constraint of the lengthscales, as in gpytorch.

    Raises:
        ValueError: `power` or `num_dims` is not a positive integer; `ard_num_dims`, `active_dims`
            or the inputs have another number of dimensions.

    Example:
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
                    f"BesselKernel expects {name} to be num_dims={num_dims}, got {number}; the "
                    "kernel belongs to one number of dimensions, give it as num_dims"
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
        """k(x1, x2), or its diagonal (*b, n) if `diag`.

        Args:
            x1: points (*b, n, d).
            x2: points (*b, m, d).
            diag: return the diagonal only.
            params: further arguments of gpytorch's `covar_dist`.

        Raises:
            ValueError: another number of inputs than `num_dims`.
        """
        for x in (x1, x2):
            if x.shape[-1] != self.num_dims:
                raise ValueError(
                    f"BesselKernel expects {self.num_dims} inputs, its num_dims, got "
                    f"{x.shape[-1]}; the kernel belongs to one number of dimensions, use "
                    f"BesselKernel({self.power}, num_dims={x.shape[-1]})"
                )
        return super().forward(x1, x2, diag, **params)

    @property
    def spectrum(self) -> "BesselSpectrum":
        """The density of ω = z/ℓ, with z the sum of `power` uniform points in the unit ball."""
        return BesselSpectrum(self.lengthscale, self.power, self.num_dims)

    def correlation(self, s: Float[Tensor, "*m"], order: int = 0) -> Float[Tensor, "*m"]:
        """κ(s), or a derivative: k(x, z) = κ(s) with s = ‖(x − z)/ℓ‖².

        κ = f^t with t = `power`, f(s) = ₀F₁(; b; −s/4) and b = d/2 + 1. Derivatives follow from
        ₀F₁(; b; −q)′ = −₀F₁(; b + 1; −q)/b.

        Args:
            s: (*m), squared distances in units of the lengthscale.
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

    Its derivative by q is −₀F₁(; b + 1; −q)/b. It is e^{−y} Σ c_n yⁿ with y = q/b, c_0 = 1, c_1 = 0
    and (n + 1)(n + b) c_{n+1} = 2n c_n − c_{n−1}, which follows from Bessel's equation. Beyond
    y = 13 it is that of scipy, whose functions underflow for b > 100; there the series is valid up
    to y = 45, and the function vanishes beyond.
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
    """e^{−y} Σ c_n yⁿ, with 49 terms; no smaller beyond y = 45."""
    coefficients = [1.0, 0.0]
    for n in range(1, 48):
        step = 2 * n * coefficients[-1] - coefficients[-2]
        coefficients.append(step / ((n + 1) * (n + b)))
    y = y.clamp_max(45)
    total = torch.zeros_like(y)
    for coefficient in reversed(coefficients):
        total.mul_(y).add_(coefficient)
    return total.mul_((-y).exp_())


# Sums of points in a ball: spectra of powers of Bessel functions.


@dataclass(frozen=True)
class BesselSpectrum(Radial):
    """Spectrum of `BesselKernel`: z is the sum of t points, uniform in the unit ball.

    Le et al. (2013, Section 4.4) draw ‖z‖ from these points. It follows without them from t radii
    ρ = u^{1/d} and the cosines c of the angles between each point and the sum S of those before it:
    ‖S + ξ‖² = ‖S‖² + ρ² + 2‖S‖ρc, where (c + 1)/2 ~ Beta((d − 1)/2, (d − 1)/2).

    Args:
        lengthscale: ℓ, (*b, 1, d), or (*b, 1, 1) for one lengthscale of all inputs.
        power: t.
        num_dims: d, the number of inputs.

    Example:
        >>> import gp_orff, torch
        >>> # td/(d+2)
        >>> gp_orff.spectra.BesselSpectrum(torch.ones(1, 1), 3, num_dims=4).moment(
        ...     1, 4
        ... )
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
                f"expected frequencies in {self.num_dims} dimensions, those of "
                f"BesselKernel(num_dims={self.num_dims}), got {num_dims}; give the kernel its "
                "number of inputs as num_dims, and, if the rule pads them to a power of two, use "
                "gp_orff.QuasiMonteCarlo or gp_orff.Orthogonal, which do not"
            )
        if order:
            raise NotImplementedError(
                f"expected frequencies of the density p of a BesselKernel, got ‖z‖^{2 * order} p, "
                'which is not known; use measure="base"'
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
        """Raise, for all `omega` (*b, m, d): the density has no simple form.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(
            "expected a kernel whose spectral density can be evaluated, got BesselKernel, whose "
            "frequencies can only be drawn; use a random rule with shared=False, or "
            "gp_orff.Fastfood for an LCMKernel"
        )

    def moment(self, order: float, num_dims: int) -> float:
        """E‖z‖^{2m} of a frequency z = ℓω at unit lengthscale, with m = `order`.

        z is the sum of t independent points, uniform in the unit ball of d = `num_dims` dimensions,
        where t is `power`. The moments follow from the series of E cos⟨z, x⟩, which is the t-th
        power of the series of one point. Its coefficient of ‖x‖^{2m} is
        (−1)^m E‖z‖^{2m} / (4^m m! (d/2)_m), with the rising factorial (d/2)_m.

        Args:
            order: m ≥ 0, a whole number unless t = 1.
            num_dims: d, the number of inputs of the kernel.

        Raises:
            NotImplementedError: m is not a whole number, and t > 1.
        """
        d = self.num_dims
        if self.power == 1:
            return d / (d + 2 * order)
        if order != int(order):
            raise NotImplementedError(
                f"expected a moment E‖z‖^(2m) of whole order m of BesselKernel with power > 1, got "
                f"m={order}; bounds of its error need power=1"
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
    """The u-quantiles of one coordinate of a point on the unit sphere."""
    if num_dims == 1:
        return np.where(u < 0.5, -1.0, 1.0)
    half = (num_dims - 1) / 2
    return 2 * scipy.special.betaincinv(half, half, u) - 1


# The functions z^μ K_μ(z) of Matérn kernels of any smoothness, from tables of scipy's.


_FIRST, _CELLS = -30.0, 32 * 43  # log q where the table begins, and cells of width 1/32: to z = 665


class MaternFunction(Function):
    """g_μ(q) = z^μ K_μ(z) with z = √q, for q > 0 and any real μ, in float64.

    K_μ is the modified Bessel function of the second kind. The derivative of g_μ by q is −½ g_{μ−1}
    (Abramowitz & Stegun 1964, 9.6.28). The logarithm of e^z g_μ, as a function of log q, is close
    to straight lines at both ends and smooth between them: polynomials in 1376 cells interpolate it
    to 1e-14. Below the table are values of scipy, beyond it z is so large that g_μ is zero.
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
    """The coefficients of log(e^z g_μ) in every cell, of the highest power first."""
    nodes = np.cos((np.arange(7) + 0.5) * np.pi / 7)  # for polynomials of degree 6
    positions = np.arange(_CELLS)[:, None] + 0.5 * (nodes + 1)
    q = np.exp(_FIRST + positions / 32)
    values = _logarithm(q, order) + np.sqrt(q)
    return torch.from_numpy(np.linalg.solve(np.vander(nodes), values.T)).to(device)


def _logarithm(q: Float[np.ndarray, "*m"], order: float) -> Float[np.ndarray, "*m"]:
    """log g_μ(q); where K_μ(z) overflows, from its series 2^{μ−1} Γ(μ) (1 − q/(4(μ − 1)) + …)."""
    z = np.sqrt(q)
    scaled = scipy.special.kve(order, z)
    large = ~np.isfinite(scaled)
    values = np.log(np.where(large, 1.0, scaled)) - z + order * np.log(z)
    if order > 1:
        limit = (order - 1) * math.log(2) + math.lgamma(order) - q / (4 * (order - 1))
        values = np.where(large, limit, values)
    return values


# Matérn kernels of any smoothness.


_ROUGHEST = 1.2  # ν of fields: lags of 1e-14 change their variance by 1e-28^(ν − 1)


class GeneralMaternKernel(RadialKernel):
    r"""Matérn kernel of any smoothness ν > 0.

    k(x, z) = 2^{1−ν}/Γ(ν) · u^ν K_ν(u), with u = √(2ν) ‖(x − z)/ℓ‖ and the modified Bessel
    function K_ν (Rasmussen & Williams 2006, eq. 4.14).

    Use gpytorch's `MaternKernel` for ν = 1/2, 3/2 or 5/2: the kernel is then a polynomial times an
    exponential, and about ten times faster than this class. This kernel is exact, alone and in
    field kernels, and has features. Its spectral density is a multivariate Student-t density with
    2ν degrees of freedom and scale 1/ℓ. The smoothness ν is fixed and not trained. Values are
    accurate to 1e-12, and can be differentiated any number of times. For ν > 50, and for field
    kernels with ν < 1.2, only features are available.

    Args:
        nu: ν > 0, the smoothness. `CurlFreeKernel`, `DivergenceFreeKernel` and `HelmholtzKernel`
            need ν > 1.
        ard_num_dims: the number of lengthscales, one for each input; one for all inputs if None.
        batch_shape: the batch shape of the lengthscales, as in gpytorch.
        active_dims: the input columns of the kernel; all columns if None.
        lengthscale_prior: the prior of the lengthscales, as in gpytorch.
        lengthscale_constraint: the constraint of the lengthscales, as in gpytorch.

    Raises:
        TypeError: ν is not a number.
        ValueError: ν ≤ 0.
        NotImplementedError: the covariance is evaluated without an `ORFFKernel`, for ν > 50,
            or for ν < 1.2 in a field kernel.

    Example:
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
        """The spectral density at the present lengthscales."""
        return StudentT(self.lengthscale, self.nu)

    def correlation(self, s: Float[Tensor, "*m"], order: int = 0) -> Float[Tensor, "*m"]:
        """κ(s), or a derivative: k(x, z) = κ(s) with s = ‖(x − z)/ℓ‖².

        κ^{(j)}(s) = (−ν)^j 2^{1−ν}/Γ(ν) · u^{ν−j} K_{ν−j}(u), with u² = 2νs. For j > ν the
        derivative is infinite at s = 0, and a very large number is returned.

        Args:
            s: (*m), squared distances in units of the lengthscale.
            order: j, 0 for κ, 1 for κ′ and 2 for κ″.

        Raises:
            NotImplementedError: ν > 50, or a derivative for ν < 1.2.
        """
        refuse_tracing(self)
        if order and self.nu < _ROUGHEST:
            raise NotImplementedError(
                f"expected a GeneralMaternKernel with nu >= {_ROUGHEST}, got nu={self.nu}, whose "
                "field changes too much between neighbouring floating-point numbers for a "
                "covariance at lag zero; put it inside ORFFKernel, or use a larger nu"
            )
        if self.nu > 50:  # K_ν overflows near zero
            raise NotImplementedError(
                f"GeneralMaternKernel(nu={self.nu}) has features, but values for nu <= 50 only; "
                "put it inside ORFFKernel, or use gpytorch's RBFKernel, its limit for large nu"
            )
        factor = (-self.nu) ** order * 2.0 ** (1 - self.nu) / math.gamma(self.nu)
        values = MaternFunction.apply(positive(2 * self.nu * s.double()), self.nu - order)
        largest = math.sqrt(torch.finfo(s.dtype).max)  # products with a zero are zero
        return (factor * values).clamp(-largest, largest).to(s.dtype)
