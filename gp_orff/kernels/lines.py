"""Spectra of lines: kernels of one input that repeat, as tides and seasons do."""

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

# A kernel of one input that is a sum of cosines,
#
#     k(τ) = Σ_j w_j cos(ν_j τ) ,   Σ_j w_j = 1 ,
#
# has a spectral measure with lines at ±ν_j instead of a density. gpytorch has two of them:
#
#     CosineKernel     cos(πτ/p):  one line at π/p, as its period is 2p
#     PeriodicKernel   exp(−2 sin²(πτ/p)/ℓ) = e^{−z} e^{z cos(2πτ/p)} ,  z = 1/ℓ (ℓ is not squared):
#                      lines at 2πj/p, w_0 = e^{−z} I_0(z), w_j = 2 e^{−z} I_j(z)
#
# The second sum is the generating function of the modified Bessel functions I_j.


class LineSpectrum(Spectrum):
    """The spectral measure of a kernel of one input that is a sum Σ_j w_j cos(ν_j τ).

    Example:
        >>> import gpytorch, gp_orff
        >>> spectrum = gp_orff.spectrum(gpytorch.kernels.PeriodicKernel())
        >>> (
        ...     isinstance(spectrum, gp_orff.spectra.LineSpectrum),
        ...     spectrum.num_lines(tolerance=1e-3),
        ... )
        (True, 5)
    """

    is_line = True
    has_density = is_weighted = False

    @abstractmethod
    def lines(self, count: int) -> tuple[Float[Tensor, "*b J"], Float[Tensor, "*b J"]]:
        """Return ν_j and w_j of the first `count` lines, in radians per unit of the input."""

    @abstractmethod
    def num_lines(self, tolerance: float, shorter: float = 1.0) -> int:
        """The number of lines beyond which the share of the variance is at most `tolerance`, at
        `shorter` times the present lengthscale."""

    def num_coordinates(self, num_dims: int) -> int:
        if num_dims != 1:
            raise ValueError(
                f"expected a periodic kernel of one input, got one of {num_dims}; give "
                "active_dims=, and multiply kernels of one input each for more"
            )
        return 1

    def base(self, directions: np.ndarray, u: np.ndarray, order: int) -> np.ndarray:
        """Sign, number j of the line, and its w_j, of lines that are drawn with the present w_j.

        Args:
            directions: (D, 1), the signs.
            u: (D, 1), uniform numbers in (0, 1).
            order: not used.
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
            "expected a kernel with a spectral density, got one with a spectrum of lines, such as "
            "PeriodicKernel; use shared=False, and MultitaskKernel instead of LCMKernel"
        )

    def moment(self, order: float, num_dims: int) -> float:
        nu, weights = self.lines(self.num_lines(_ROUNDING))
        return (weights * nu.pow(2 * order)).sum(-1).max().item()


def has_lines(term: Term) -> bool:
    """Whether a term is a product with kernels of lines."""
    return any(leaf.spectrum.is_line for leaf in term.leaves)


def inputs_of_lines(kernel: Kernel) -> list[int]:
    """The inputs along which a kernel tree varies, and in all terms by kernels of lines alone."""
    lines, others = set(), set()
    for term in terms(kernel):
        for leaf in term.leaves:
            (lines if leaf.spectrum.is_line else others).update(leaf.active_dims or ())
    return sorted(lines - others)


_ROUNDING = 1e-15  # of the variance


@dataclass(frozen=True)
class CosineLine(LineSpectrum):
    """The line of cos(πτ/p).

    Args:
        period_length: p, (*b, 1), half a period.

    Example:
        >>> import gp_orff, torch
        >>> nu, weights = gp_orff.spectra.CosineLine(torch.tensor([2.0])).lines(1)
        >>> nu, weights  # π/2
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
    """The lines of exp(−2 sin²(πτ/p)/ℓ).

    Args:
        period_length: p, (*b, 1).
        lengthscale: ℓ, (*b, 1), which has no unit.

    Example:
        >>> import gp_orff, torch
        >>> one = torch.ones(1)
        >>> nu, weights = gp_orff.spectra.PeriodicLines(one, lengthscale=one).lines(
        ...     3
        ... )
        >>> nu, weights  # multiples of 2π
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
        while (
            scipy.special.ive(count, z) > 1e-3 * tolerance
        ):  # the w_j fall faster than 2^{−j} soon
            count *= 2
        beyond = 2 * scipy.special.ive(np.arange(1, count), z)[::-1].cumsum()[::-1]
        return 1 + int((beyond > tolerance).sum())

    def frequency_parameters(self, shortest, longest):
        return [
            Range(self.lengthscale, 1e-2, 1e2),  # from 70 lines to a constant
            Range(self.period_length, float(shortest.min()), float(longest.max())),
        ]


class _ScaledBessel(Function):
    """e^{−z} I_j(z), (*b, J), for j < J = `count` from z (*b, 1).

    Its derivative is (I_{j−1} + I_{j+1})/2 − I_j, each times e^{−z}.
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


# Tides: one cosine for each constituent, with the period that astronomy gives.


_TABLE = """
    Sa 0.0410686  Ssa 0.0821373  Mm 0.5443747  Msf 1.0158958  Mf 1.0980331
    Q1 13.3986609  O1 13.9430356  P1 14.9589314  S1 15  K1 15.0410686  J1 15.5854433  OO1 16.1391017
    2N2 27.8953548  MU2 27.9682084  N2 28.4397295  NU2 28.5125831
    M2 28.9841042  L2 29.5284789  T2 29.9589333  S2 30  K2 30.0821373  M3 43.4761563  MK3 44.0251729
    MN4 57.4238337  M4 57.9682084  MS4 58.9841042  S4 60  M6 86.9523127
"""
SPEEDS = dict(zip(_TABLE.split()[::2], map(float, _TABLE.split()[1::2]), strict=True))
"""Degrees per mean solar hour (Schureman 1958, Table 2), by the name of the constituent."""

HOURS = {"s": 1 / 3600, "min": 1 / 60, "h": 1.0, "d": 24.0}  # of a unit of time


class TidalKernel(CosineKernel):
    """The kernel cos(2π(t − s)/P) of a tidal constituent of period P; `tides` makes sums of them.

    The period is not trained, and is that of the constituent to the precision of its type.

    Args:
        constituent: its name, a key of `gp_orff.kernels.lines.SPEEDS`.
        unit: of time: "s", "min", "h" or "d".
        kwargs: of gpytorch's `CosineKernel`, such as `active_dims`.

    Raises:
        ValueError: a constituent or a unit that is not known.

    Example:
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
        """The covariance of times `x1` and `x2`, by their plain difference, which has all digits of
        times since 1970; with `diag`, of each pair alone.

        Raises:
            ValueError: several columns.
        """
        if x1.shape[-1] != 1:
            raise ValueError(
                f"tides expect one column of time, got {x1.shape[-1]}; give active_dims="
            )
        lag = x1 - x2 if diag else x1 - x2.mT
        values = torch.cos(torch.pi * lag / self.period_length)
        return values.squeeze(-1) if diag else values

    @property
    def period(self) -> float:
        """P, in units of time; twice `period_length`."""
        return 360 / SPEEDS[self.constituent] / HOURS[self.unit]

    def _set_period(self) -> None:
        self.period_length = torch.tensor(0.5 * self.period, dtype=torch.float64)

    def _apply(self, fn, recurse=True):
        module = super()._apply(fn, recurse)
        if not self.raw_period_length.requires_grad:
            self._set_period()  # a kernel that becomes float64 has the digits of float64
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
    """Return the kernel of a field with tides: a sum of `kernel` times cos(2π(t − s)/P).

    Each constituent has a copy of `kernel`, with separate amplitudes and lengthscales. Its field is
    a(x) cos(2πt/P) + b(x) sin(2πt/P), where P is its period, and a and b are independent fields
    with this kernel. `FieldPosterior.ellipses` returns the tidal ellipses, with phases relative to
    t = 0 or another epoch. Nodal corrections are not applied: amplitudes and phases are valid for
    the time of the record. Over 18.6 years the amplitude of M2 changes by 4 %, and the amplitude of
    K2 by 29 %.

    Add a kernel for motion other than tides, for example eddies that decorrelate in time. Without
    it, error bars of tides may be far too small. `VectorFieldGP` gives a `DataWarning` if a record
    is too short to separate two of the constituents.

    Args:
        kernel: the kernel of the field in space, such as a `HelmholtzKernel` with `active_dims`. If
            it has no outputscale, one is added.
        constituents: names such as "M2", of `gp_orff.kernels.lines.SPEEDS`.
        active_dims: the input column that is time.
        unit: the unit of time: "s", "min", "h" or "d". Data with another unit of time raise an
            error. Dates are in seconds unless you pass `time_unit="h"` to `gp_orff.labelled`.
        period_bound: None for fixed periods. Otherwise each period is trained within this relative
            distance of the period of the constituent. On a `Grid` only the first searches, on few
            data, change it.

    Returns:
        A sum of `FieldProductKernel`, or of products if there is one output. With one constituent,
        a single product is returned.

    Raises:
        ValueError: no constituents; a constituent that is unknown or occurs twice; several columns
            of time; an unknown unit; a bound that is not between 0 and 1.

    Example:
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
    """The leaves of a kernel tree that are tidal constituents."""
    leaves = {leaf.kernel: leaf for term in terms(kernel) for leaf in term.leaves}
    return [leaves[part] for part in parts_of(kernel, TidalKernel)]


def inseparable(kernel: Kernel, durations: Sequence[float]) -> list[tuple[str, str, float]]:
    """Pairs of constituents that a record is too short to separate, and the duration they need.

    By Rayleigh's criterion a record of duration T separates periods P and Q if |T/P − T/Q| ≥ 1.

    Args:
        kernel: with tidal constituents.
        durations: T along every input.
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
