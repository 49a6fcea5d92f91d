"""Line spectra of periodic kernels of one input, for example of tides and seasons."""

from abc import abstractmethod
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import reduce
from itertools import combinations
from operator import add

import numpy as np
import scipy
import torch
from gpytorch.constraints import Interval
from gpytorch.kernels import CosineKernel, Kernel, MultitaskKernel, PeriodicKernel, ScaleKernel
from jaxtyping import Float
from torch import Tensor
from torch.autograd import Function

from gp_orff.kernels.base import parts_of, require_covariance_of
from gp_orff.kernels.spectra import Range, Spectrum, spectrum
from gp_orff.kernels.tree import Leaf, Term, terms

# A kernel of one input may be a sum of cosines of the lag τ,
#
#     k(τ) = Σ_j w_j cos(ν_j τ) ,   Σ_j w_j = 1 .
#
# Its spectral measure has lines at ±ν_j instead of a density. gpytorch has two such kernels:
#
#     CosineKernel     cos(πτ/p):  one line at π/p, because its period is 2p
#     PeriodicKernel   exp(−2 sin²(πτ/p)/ℓ) = e^{−z} e^{z cos(2πτ/p)} ,  z = 1/ℓ (ℓ is not squared):
#                      lines at 2πj/p, w_0 = e^{−z} I_0(z), w_j = 2 e^{−z} I_j(z)
#
# The weights of the second kernel follow from the generating function of the modified Bessel
# functions I_j.


class LineSpectrum(Spectrum):
    """The spectral measure of a kernel of one input that is a sum of cosines.

    The kernel is k(τ) = Σ_j w_j cos(ν_j τ) with the lag τ, the frequencies ν_j and Σ_j w_j = 1. It
    has no spectral density, so `log_density` raises a NotImplementedError. To define the spectrum
    of a new kernel, subclass this class and define `lines` and `num_lines`.

    Example:
        The five strongest lines contain all but a thousandth of the variance of this kernel:

        >>> import gpytorch, gp_orff
        >>> spectrum = gp_orff.spectrum(gpytorch.kernels.PeriodicKernel())
        >>> isinstance(spectrum, gp_orff.spectra.LineSpectrum)
        True
        >>> spectrum.num_lines(tolerance=1e-3)
        5
    """

    is_line = True
    has_density = is_weighted = False

    @abstractmethod
    def lines(self, count: int) -> tuple[Float[Tensor, "*b J"], Float[Tensor, "*b J"]]:
        """Return the frequencies ν_j and the weights w_j of the first lines, (*b, J) each.

        Args:
            count: J, the number of lines. Frequencies are in radians per unit of the input.
        """

    @abstractmethod
    def num_lines(self, tolerance: float, shorter: float = 1.0) -> int:
        """Return the number of lines that contain all but a small fraction of the variance.

        Args:
            tolerance: the fraction of the variance that further lines may have.
            shorter: a factor of the lengthscale, for which the number is computed.
        """

    def num_coordinates(self, num_dims: int) -> int:
        if num_dims != 1:
            raise ValueError(
                f"expected a periodic kernel of one input, got {num_dims} inputs; pass "
                "active_dims=, and multiply kernels of one input each for several inputs"
            )
        return 1

    def base(self, directions: np.ndarray, u: np.ndarray, order: int) -> np.ndarray:
        """Return base variables (D, 3): a sign, the number j of a line, and its probability w_j.

        The lines are drawn with the current weights.

        Args:
            directions: (D, 1), random signs ±1.
            u: (D, 1), uniform random numbers in (0, 1).
            order: ignored, because there are no weighted measures.
        """
        with torch.no_grad():
            weights = self.lines(self.num_lines(_ROUNDING))[1].double().cpu().numpy()
        weights = weights.reshape(-1, weights.shape[-1]).mean(0)
        line = np.searchsorted(weights.cumsum()[:-1], u[:, 0] * weights.sum())
        return np.stack([directions[:, 0], line, weights[line] / weights.sum()], axis=-1)

    def frequencies(self, base: Float[Tensor, "D 3"], order: int) -> Float[Tensor, "*b D 1"]:
        line = base[:, 1].long()
        return (base[:, 0] * self.lines(int(line.max()) + 1)[0][..., line]).unsqueeze(-1)

    def importance(self, base: Float[Tensor, "D 3"], order: int) -> Float[Tensor, "*b D"]:
        line = base[:, 1].long()
        return self.lines(int(line.max()) + 1)[1][..., line] / base[:, 2]

    def log_density(self, omega: Float[Tensor, "*b m d"]) -> Float[Tensor, "*b m"]:
        raise NotImplementedError(
            "expected a kernel with a spectral density, got a kernel with a spectrum of lines, for "
            "example a PeriodicKernel; use shared=False, and MultitaskKernel instead of LCMKernel"
        )

    def moment(self, order: float, num_dims: int) -> float:
        nu, weights = self.lines(self.num_lines(_ROUNDING))
        return (weights * nu.pow(2 * order)).sum(-1).max().item()


def has_lines(term: Term) -> bool:
    """Return whether a kernel with a line spectrum is a factor of a term."""
    return any(leaf.spectrum.is_line for leaf in term.leaves)


def inputs_of_lines(kernel: Kernel) -> list[int]:
    """Return the inputs that enter a kernel tree through kernels with line spectra only."""
    lines, others = set(), set()
    for term in terms(kernel):
        for leaf in term.leaves:
            (lines if leaf.spectrum.is_line else others).update(leaf.active_dims or ())
    return sorted(lines - others)


_ROUNDING = 1e-15  # a fraction of the variance that is negligible


@dataclass(frozen=True)
class CosineLine(LineSpectrum):
    """The spectral measure of gpytorch's `CosineKernel`, cos(πτ/p) with the lag τ.

    It is a single line at the frequency ν = π/p, with the weight 1.

    Args:
        period_length: p, (*b, 1), half of the period, in units of the input.

    Example:
        >>> import gp_orff, torch
        >>> gp_orff.spectra.CosineLine(torch.tensor([2.0])).lines(1)  # ν = π/2
        (tensor([1.5708]), tensor([1.]))
    """

    period_length: Float[Tensor, "*b 1"]

    def lines(self, count: int) -> tuple[Float[Tensor, "*b 1"], Float[Tensor, "*b 1"]]:
        nu = torch.pi / self.period_length
        return nu, torch.ones_like(nu)

    def num_lines(self, tolerance: float, shorter: float = 1.0) -> int:
        return 1

    def frequency_parameters(self, shortest, longest):
        return [Range(self.period_length, float(shortest.min()), float(longest.max()))]


@dataclass(frozen=True)
class PeriodicLines(LineSpectrum):
    """The spectral measure of gpytorch's `PeriodicKernel`, exp(−2 sin²(πτ/p)/ℓ) with the lag τ.

    It has lines at the frequencies ν_j = 2πj/p for j = 0, 1, … With z = 1/ℓ and the modified Bessel
    functions I_j, the weights are w_0 = e^{−z} I_0(z), and w_j = 2 e^{−z} I_j(z) for j > 0.

    Args:
        period_length: p, (*b, 1), the period, in units of the input.
        lengthscale: ℓ, (*b, 1), which has no unit.

    Example:
        With p = 1, the frequencies are multiples of 2π:

        >>> import gp_orff, torch
        >>> one = torch.ones(1)
        >>> gp_orff.spectra.PeriodicLines(one, lengthscale=one).lines(3)
        (tensor([ 0.0000,  6.2832, 12.5664]), tensor([0.4658, 0.4158, 0.0999]))
    """

    period_length: Float[Tensor, "*b 1"]
    lengthscale: Float[Tensor, "*b 1"]

    def lines(self, count: int) -> tuple[Float[Tensor, "*b J"], Float[Tensor, "*b J"]]:
        j = torch.arange(count).to(self.period_length)
        weights = _ScaledBessel.apply(1 / self.lengthscale, count)
        return 2 * torch.pi * j / self.period_length, weights * (1.0 + (j > 0))

    def num_lines(self, tolerance: float, shorter: float = 1.0) -> int:
        z = 1 / (shorter * self.lengthscale.detach().min().item())
        count = 16
        # For large j, the w_j fall faster than 2^{−j}.
        while scipy.special.ive(count, z) > 1e-3 * tolerance:
            count *= 2
        beyond = 2 * scipy.special.ive(np.arange(1, count), z)[::-1].cumsum()[::-1]
        return 1 + int((beyond > tolerance).sum())

    def frequency_parameters(self, shortest, longest):
        return [
            Range(self.lengthscale, 1e-2, 1e2),  # from 70 lines to a constant
            Range(self.period_length, float(shortest.min()), float(longest.max())),
        ]


class _ScaledBessel(Function):
    """e^{−z} I_j(z), (*b, J), for j < J = `count` and z (*b, 1).

    The derivative with respect to z is e^{−z} ((I_{j−1} + I_{j+1})/2 − I_j).
    """

    @staticmethod
    def forward(ctx, z: Float[Tensor, "*b 1"], count: int) -> Float[Tensor, "*b J"]:
        ctx.count = count
        ctx.save_for_backward(z)
        values = scipy.special.ive(np.arange(count), z.detach().double().cpu().numpy())
        return torch.from_numpy(values).to(z)

    @staticmethod
    def backward(ctx, grad):
        (z,) = ctx.saved_tensors
        values = _ScaledBessel.apply(z, ctx.count + 1)
        above, here = values[..., 1:], values[..., :-1]
        below = torch.cat([values[..., 1:2], values[..., : ctx.count - 1]], dim=-1)  # I_{−1} = I_1
        slope = 0.5 * (below + above) - here
        return (grad * slope).sum(-1, keepdim=True), None


@spectrum.register
def _(kernel: CosineKernel) -> Spectrum:
    require_covariance_of(CosineKernel, kernel)
    return CosineLine(kernel.period_length.squeeze(-1))


@spectrum.register
def _(kernel: PeriodicKernel) -> Spectrum:
    require_covariance_of(PeriodicKernel, kernel)
    if kernel.ard_num_dims not in (None, 1):
        raise NotImplementedError(
            f"expected a PeriodicKernel of one input, got ard_num_dims={kernel.ard_num_dims}; "
            "multiply kernels of one input each"
        )
    return PeriodicLines(kernel.period_length.squeeze(-1), kernel.lengthscale.squeeze(-1))


# Tides: one cosine for each tidal constituent, with its astronomical period.


_TABLE = """
    Sa 0.0410686  Ssa 0.0821373  Mm 0.5443747  Msf 1.0158958  Mf 1.0980331
    Q1 13.3986609  O1 13.9430356  P1 14.9589314  S1 15  K1 15.0410686  J1 15.5854433  OO1 16.1391017
    2N2 27.8953548  MU2 27.9682084  N2 28.4397295  NU2 28.5125831
    M2 28.9841042  L2 29.5284789  T2 29.9589333  S2 30  K2 30.0821373  M3 43.4761563  MK3 44.0251729
    MN4 57.4238337  M4 57.9682084  MS4 58.9841042  S4 60  M6 86.9523127
"""
SPEEDS = dict(zip(_TABLE.split()[::2], map(float, _TABLE.split()[1::2]), strict=True))
"""Speeds in degrees per mean solar hour, by the name of the constituent.

Source: Schureman 1958, Table 2.
"""

HOURS = {"s": 1 / 3600, "min": 1 / 60, "h": 1.0, "d": 24.0}  # the hours in a unit of time


class TidalKernel(CosineKernel):
    """The kernel cos(2π(t − s)/P) of a tidal constituent with the period P.

    The period is not trained, and is stored in the dtype of the kernel. `tides` returns a sum of
    products with such kernels.

    Args:
        constituent: the name of the constituent, a key of `gp_orff.kernels.lines.SPEEDS`.
        unit: the unit of time: "s", "min", "h" or "d".
        kwargs: further arguments of gpytorch's `CosineKernel`, such as `active_dims`.

    Raises:
        ValueError: the constituent or the unit is unknown.

    Example:
        The period of the constituent M2:

        >>> import torch
        >>> from gp_orff.kernels.lines import TidalKernel
        >>> kernel = TidalKernel("M2", active_dims=(2,))
        >>> round(kernel.period, 4)  # hours
        12.4206
    """

    def __init__(self, constituent: str, unit: str = "h", **kwargs):
        for value, names in ((constituent, SPEEDS), (unit, HOURS)):
            if value not in names:
                raise ValueError(f"tides expect one of {', '.join(names)}, got {value!r}")
        super().__init__(**kwargs)
        self.constituent, self.unit = constituent, unit
        self.raw_period_length.requires_grad_(False)
        self._set_period()

    def forward(
        self, x1: Float[Tensor, "*b n 1"], x2: Float[Tensor, "*b m 1"], diag: bool = False, **_
    ) -> Float[Tensor, "*b n m"] | Float[Tensor, "*b n"]:
        """Return the covariance matrix (*b, n, m) between the times `x1` and `x2`.

        It is computed from differences of times, so that times since 1970 lose no digits.

        Args:
            x1: times (*b, n, 1).
            x2: times (*b, m, 1).
            diag: whether to return only the diagonal (*b, n); it needs m = n.

        Raises:
            ValueError: the times have several columns.
        """
        if x1.shape[-1] != 1:
            raise ValueError(
                f"tides expect one column of time, got {x1.shape[-1]} columns; pass active_dims="
            )
        lag = x1 - x2 if diag else x1 - x2.mT
        values = torch.cos(torch.pi * lag / self.period_length)
        return values.squeeze(-1) if diag else values

    @property
    def period(self) -> float:
        """The period P, in units of time, which is twice `period_length`."""
        return 360 / SPEEDS[self.constituent] / HOURS[self.unit]

    def _set_period(self) -> None:
        self.period_length = torch.tensor(0.5 * self.period, dtype=torch.float64)

    def _apply(self, fn, recurse=True):
        module = super()._apply(fn, recurse)
        if not self.raw_period_length.requires_grad:
            self._set_period()  # so that a kernel that becomes float64 has all digits
        return module


@spectrum.register
def _(kernel: TidalKernel) -> Spectrum:
    require_covariance_of(TidalKernel, kernel)
    return CosineLine(kernel.period_length.squeeze(-1))


def tides(
    kernel: Kernel,
    constituents: Sequence[str],
    *,
    active_dims: tuple[int],
    unit: str = "h",
    period_bound: float | None = None,
) -> Kernel:
    """Return the kernel of a field with tides.

    Each tidal constituent has the field a(x) cos(2πt/P) + b(x) sin(2πt/P) at the place x and the
    time t, where P is the period of the constituent. The fields a and b are independent and have
    the kernel k. The kernel of the tides is thus Σ k(x, x′) cos(2π(t − t′)/P), a sum over the
    constituents. Each constituent has a separate copy of k, with separate hyperparameters.

    Add another kernel for motion that is not a tide, for example for eddies that decorrelate in
    time. Without it, the error bars of tides may be far too small. `VectorFieldGP` issues a
    `DataWarning` if a record is too short to separate two of the constituents.

    `FieldPosterior.ellipses` returns the tidal ellipses. Nodal corrections are not applied, so that
    amplitudes and phases are valid for the time of the record. Over 18.6 years, the amplitude of M2
    varies by 4 %, and the amplitude of K2 by 29 %.

    Args:
        kernel: k, the kernel of the field in space, such as a `HelmholtzKernel` with `active_dims`.
            If it has no outputscale, a `ScaleKernel` is added.
        constituents: the names of the constituents, such as "M2", from
            `gp_orff.kernels.lines.SPEEDS`.
        active_dims: the number of the time column, such as (2,).
        unit: the unit of time: "s", "min", "h" or "d". Data with another unit of time raise an
            error. Dates are in seconds, unless you pass `time_unit="h"` to `gp_orff.labelled`.
        period_bound: None, the default, for fixed periods. Otherwise each period is trained, and
            differs from the astronomical period by at most this fraction. With a `Grid`, periods
            are trained only in the first searches of a fit, which use a subset of the data.

    Returns:
        A sum with one `FieldProductKernel` for each constituent, or a single one. If k has one
        output, the terms have gpytorch's class `ProductKernel`.

    Raises:
        ValueError: `constituents` is a single string or empty, or contains an unknown name or a
            name twice; `active_dims` is not one column; `unit` is unknown; `period_bound` is not
            between 0 and 1.

    Example:
        Four constituents, and eddies with a Matérn kernel of time:

        >>> import gp_orff, gpytorch, torch
        >>> space = gp_orff.HelmholtzKernel(num_dims=2, active_dims=(0, 1))
        >>> tides = gp_orff.tides(space, ["M2", "S2", "K1", "O1"], active_dims=(2,))
        >>> eddies = space * gpytorch.kernels.MaternKernel(nu=0.5, active_dims=(2,))
        >>> (tides + eddies)(torch.rand(5, 3)).shape
        torch.Size([10, 10])
    """
    single = isinstance(constituents, str)
    if single or not constituents or len(set(constituents)) < len(constituents):
        raise ValueError(
            f"tides expects a list of different constituents, such as ['M2', 'K1'], got "
            f"{constituents!r}"
        )
    if np.shape(active_dims) != (1,):
        raise ValueError(
            f"tides expects one column of time, such as active_dims=(2,), got {active_dims}"
        )
    if period_bound is not None and not 0 < period_bound < 1:
        raise ValueError(f"tides expects a period_bound between 0 and 1, got {period_bound}")
    if not parts_of(kernel, ScaleKernel, MultitaskKernel):
        kernel = ScaleKernel(kernel)
    summands = []
    for name in constituents:
        time = TidalKernel(name, unit, active_dims=active_dims)
        if period_bound is not None:
            half = time.period_length.item()
            bounds = Interval(half * (1 - period_bound), half * (1 + period_bound))
            time.register_constraint("raw_period_length", bounds)
            time.period_length = half
            time.raw_period_length.requires_grad_(True)
        summands.append(deepcopy(kernel) * time)
    return reduce(add, summands)


def tidal_leaves(kernel: Kernel) -> list[Leaf]:
    """Return the leaves of a kernel tree that are tidal constituents."""
    leaves = {leaf.kernel: leaf for term in terms(kernel) for leaf in term.leaves}
    return [leaves[part] for part in parts_of(kernel, TidalKernel)]


def inseparable(kernel: Kernel, durations: Sequence[float]) -> list[tuple[str, str, float]]:
    """Return pairs of constituents that a record cannot separate, and the duration they need.

    By Rayleigh's criterion, a record of duration T separates the periods P and Q if
    |T/P − T/Q| ≥ 1.

    Args:
        kernel: a kernel with tidal constituents.
        durations: T, the duration of the record along every input.
    """
    pairs = []
    leaves = {(leaf.kernel.constituent, leaf.active_dims): leaf for leaf in tidal_leaves(kernel)}
    for one, other in combinations(leaves.values(), 2):
        rates = [1 / leaf.kernel.period for leaf in (one, other)]
        difference = abs(rates[0] - rates[1])
        (dim,) = one.active_dims
        names = one.kernel.constituent, other.kernel.constituent
        if one.active_dims == other.active_dims and durations[dim] * difference < 1:
            pairs.append((*names, 1 / difference))
    return pairs
