"""The spectrum of the variance of a matrix-valued kernel, and tables of its correlations."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Complex, Float, Int
from torch import Tensor

from gp_orff.kernels.lattice_sums import lattice_weights
from gp_orff.kernels.spectra import GridSpectrum, unit_sphere

# Tables of the largest correlations of a kernel beyond each lag, by Fourier transforms.
#
# A grid needs the lag along an axis i beyond which ‖K(τ)‖ is small for all lags along the other
# axes. A bound follows from the triangle inequality over the frequencies ω′ of the other axes. The
# transform of A S along axis i is computed for every ω′, and the norms of these transforms are
# added.
#
# 1. `_density` evaluates A S at equispaced frequencies along the axis, and at polar nodes of the
#    other axes.
# 2. `_waves` computes the transform. Frequencies are first folded to one period, because e^{irω} at
#    the lags of the table is periodic in ω. The half ω < 0 follows from the symmetry of A S.
# 3. A running maximum from the longest lag makes the table decreasing.
# 4. A transform is periodic in the lag, so that correlations beyond half a period reappear at
#    shorter lags. `_table` therefore increases the period by a factor of 1.6 until two tables
#    agree.
# 5. Beyond the table, the bound continues with the power law of its second half. If there are too
#    many frequencies before two tables agree, the slowest power law is assumed.


_STEP = 0.25  # the spacing of the lags of a table
_LEAST_POWER = 0.1  # the slowest power law of correlations beyond a table


def frequency_step(num_lags: int) -> float:
    """Return the spacing of the frequencies of a transform with `num_lags` lags in its period."""
    return 2 * math.pi / (_STEP * num_lags)


@dataclass(frozen=True)
class CorrelationTable:
    """A bound of correlations that decreases with the lag, and continues with a power law.

    Args:
        sizes: the norms of the kernel at the lags 0, `_STEP`, … up to half of the period.
        num_lags: the number of lags in the period.
        resolved: whether another table agrees. If not, correlations may not fall beyond the table.
    """

    sizes: Float[np.ndarray, "l"]
    num_lags: int
    resolved: bool = True
    bounds: Float[np.ndarray, "l"] = field(init=False)

    def __post_init__(self):
        largest = np.maximum.accumulate(self.sizes[::-1])[::-1]
        # The table has a quarter of a period, although half a period is computed.
        object.__setattr__(self, "bounds", largest[: 1 + self.num_lags // 4])

    @property
    def longest(self) -> float:
        """The longest lag of the table."""
        return _STEP * (len(self.bounds) - 1)

    @property
    def power(self) -> float:
        """The exponent of the power law beyond the table."""
        return max(self._fall, _LEAST_POWER) if self.resolved else _LEAST_POWER

    @property
    def _fall(self) -> float:
        """The exponent of the power law over the second half of the table."""
        half, last = (max(self.bounds[i], 1e-300) for i in (len(self.bounds) // 2, -1))
        return math.log2(half / last)

    def __call__(self, lag: float) -> float:
        """Return the bound at a lag."""
        if lag <= self.longest:
            return float(np.interp(lag, _STEP * np.arange(len(self.bounds)), self.bounds))
        return float(self.bounds[-1] * (lag / self.longest) ** -self.power)

    def lag(self, bound: float) -> float:
        """Return the lag beyond which correlations are below `bound`."""
        if self.bounds[-1] <= bound:
            return float(_STEP * np.searchsorted(-self.bounds, -bound))
        log_lag = math.log(self.longest) + math.log(self.bounds[-1] / bound) / self.power
        return math.exp(min(log_lag, math.log(1e9)))

    def agrees(self, shorter: "CorrelationTable", floor: float) -> bool:
        """Return whether this table falls, and agrees with a table with a shorter period.

        Correlations beyond half a period appear at different lags in both tables. Differences below
        `floor` are ignored.
        """
        if self._fall < _LEAST_POWER and self.bounds[-1] > floor:
            return False
        other = np.array([shorter(_STEP * i) for i in range(len(self.bounds))])
        return np.allclose(self.bounds, other, rtol=0.1, atol=floor)


def correlation_table(
    density: Float[Tensor, "*b m k n p p"], opposite: Int[Tensor, "n"], num_lags: int
) -> CorrelationTable:
    """Return the table of ∫ ‖∫ e^{irω} G(ω, ω′) dω‖_F dω′ / ‖K(0)‖_F.

    The density satisfies G(−ω, −ω′) = G(ω, ω′)*.

    Args:
        density: G times volumes, at m equispaced frequencies ω ≥ 0, and for ω′ with k lengths and n
            directions. At ω = 0, the volumes are halved.
        opposite: (n,), the index of the opposite of each direction.
        num_lags: the number of lags in the period of the transform.
    """
    total, sizes = 0.0, 0.0
    for part in density.split(16, dim=-4):  # 16 lengths of ω′ at a time
        waves = _waves(part, opposite, num_lags)
        total = total + waves[..., 0, :, :, :, :].real.sum((-4, -3))
        sizes = sizes + waves.abs().square().sum((-1, -2)).sqrt().sum((-1, -2))
    shares = sizes / torch.linalg.matrix_norm(total).unsqueeze(-1)
    return CorrelationTable(shares.reshape(-1, shares.shape[-1]).amax(0).cpu().numpy(), num_lags)


def _waves(
    density: Float[Tensor, "*b m k n p p"], opposite: Int[Tensor, "n"], num_lags: int
) -> Complex[Tensor, "*b l k n p p"]:
    """Return ∫ e^{irω} G dω at lags r up to half a period."""
    count, rounds = density.shape[-5], -(-density.shape[-5] // num_lags)
    padded = density.new_zeros(*density.shape[:-5], rounds * num_lags, *density.shape[-4:])
    padded[..., :count, :, :, :, :] = density
    folded = padded.unflatten(-5, (rounds, num_lags)).sum(-6)  # e^{irω} has this period in ω
    half = torch.fft.fft(folded, dim=-5)[..., : num_lags // 2 + 1, :, :, :, :]
    return half + half[..., opposite, :, :].conj()  # G(−ω, ω′) = G(ω, −ω′)*


# The distribution of the variance ∫ A(ω) S(ω) dω of a kernel over frequencies, by quadrature.
#
# The nodes are polar, with directions on the unit sphere and equal steps of the logarithm of the
# radius. The radii cover twelve orders of magnitude, because the scale of B is unknown. The
# fractions of the variance in shells give the tail beyond a radius, its inverse, and moments.
# Outputs are divided by their standard deviations. An integral counts as infinite if more than a
# thousandth of it is beyond the radius 10⁵.


# Angles on a circle and steps of log-radii, by the number of inputs. With a step of 0.1, the
# trapezoidal rule is exact to rounding, and with 0.25 to 1e-8.
_NODES = {1: (0, 0.1), 2: (128, 0.1), 3: (32, 0.1)}
_FAR = 1e5  # an integral is infinite if more than _DIVERGES of it is beyond this radius
_DIVERGES = 1e-3
_FEW_ANGLES = 16  # the number of angles for the integral over the other axes
_FAINT = 1e-4  # smaller correlations of two tables need not agree


def diverges(parts: Float[np.ndarray, "*b m"], radii: Float[np.ndarray, "m"]) -> bool:
    """Return whether an integral is infinite, from its parts at scaled radii."""
    total = parts.sum(-1)
    beyond = parts[..., radii > _FAR].sum(-1) > _DIVERGES * total
    return bool(beyond.any() or not np.isfinite(total).all())


def grows(sizes: Float[np.ndarray, "m"], radii: Float[np.ndarray, "m"]) -> bool:
    """Return whether some sizes are largest at very large scaled radii."""
    largest = sizes[radii <= _FAR].max()
    return bool(sizes[radii > _FAR].max() / (1 + _DIVERGES) > largest)


@dataclass(frozen=True)
class VarianceSpectrum:
    """The density A(ω) S(ω) over frequencies, with A = B B*.

    For a batch of spectra, tails and moments are the largest ones in the batch.

    Args:
        spectrum: S.
        factor: B, with the attributes `num_outputs`, `rank` and `sampler`.
        num_dims: d, the number of inputs.
    """

    spectrum: GridSpectrum
    factor: Callable[[Tensor], Tensor]
    num_dims: int

    @cached_property
    def scales(self) -> Float[np.ndarray, "d"]:
        """The frequency along each axis whose scaled radius is one, (d,)."""
        return 1 / self.spectrum.scaled_radius(np.eye(self.num_dims))

    @property
    def variance(self) -> Float[Tensor, "*b p p"]:
        """The variance K(0) = ∫ A S dω, (*b, p, p)."""
        omega, volumes = self.nodes
        total = sum(
            torch.einsum("...m,mpr,mqr->...pq", mass.to(b), b, b.conj())
            for mass, b in self._masses(omega, volumes)
        )
        return total.real  # the imaginary part is odd in ω

    @cached_property
    def _units(self) -> Float[Tensor, "*b p 1"]:
        """The standard deviation of each output, or 1 if it is zero."""
        variances = self.variance.detach().diagonal(dim1=-1, dim2=-2)
        return torch.where(variances > 0, variances, 1.0).sqrt().unsqueeze(-1)

    def tail(self, scaled_radius: float) -> float:
        """Return the fraction of the variance beyond a scaled radius, a mean over the outputs."""
        radii, tails = self._tails
        return float(np.exp(np.interp(math.log(scaled_radius), np.log(radii), np.log(tails))))

    def radius(self, share: float) -> float:
        """Return the scaled radius beyond which the fraction `share` of the variance lies."""
        radii, tails = self._tails
        return float(np.exp(np.interp(-math.log(share), -np.log(tails), np.log(radii))))

    def moment(self, order: int) -> float:
        """Return the moment E ρ^{2t} of the scaled radius ρ, with t = `order`.

        The density of frequencies is the mean of Var_i⁻¹ A_ii S over the outputs i.
        """
        radii, shares = self._shares
        with np.errstate(over="ignore"):
            parts = shares * radii ** (2.0 * order)
        return math.inf if diverges(parts, radii) else float(parts.sum(-1).max())

    def correlation(self, lag: float, axis: int) -> float:
        """Return a bound of ‖K(τ)‖_F / ‖K(0)‖_F for all lags τ with τ_i ≥ `lag`.

        Outputs are divided by their standard deviations. The axis is i. The lags along the other
        axes are arbitrary, because correlations may be long in a direction between the axes.
        """
        return self._tables[axis](lag * self.scales[axis])

    def correlation_lag(self, axis: int, bound: float) -> float:
        """Return the lag along an axis beyond which correlations are below `bound`."""
        table = self._tables[axis]
        return table.lag(max(bound, self._floor(table.num_lags))) / self.scales[axis]

    def _floor(self, num_lags: int) -> float:
        """Return the accuracy of a table of correlations, whose integrals end at the cut."""
        return self.tail(self._cut) * frequency_step(num_lags) / self._cut

    @cached_property
    def _cut(self) -> float:
        """The scaled radius at which the integrals of the table of correlations end."""
        return min(self.radius(1e-10), {1: 3000.0, 2: 200.0}.get(self.num_dims, 20.0))

    @cached_property
    def nodes(self) -> tuple[Float[Tensor, "m d"], Float[Tensor, "m"]]:
        """Frequencies with all directions and lengths, and their volumes."""
        angles, step = _NODES.get(self.num_dims, (0, 0.3))
        return _polar_nodes(self.scales, angles, step, self.device)

    @property
    def device(self) -> torch.device:
        return self.spectrum.second_moments(self.num_dims).device

    def _masses(
        self, omega: Float[Tensor, "m d"], volumes: Float[Tensor, "m"]
    ) -> Iterator[tuple[Float[Tensor, "*b c"], Float[Tensor, "c p r"]]]:
        """Yield S times the volumes, and B, for chunks of frequencies; B is 0 if S underflows."""
        shape = self.factor.num_outputs, self.factor.rank
        for part, volume in zip(omega.split(2**16), volumes.split(2**16), strict=True):
            mass = self.spectrum.log_density(part).exp() * volume
            used = (mass > 0).reshape(-1, len(part)).any(0).nonzero().squeeze(-1)
            # B may overflow where S underflows, and 0 · ∞ would be NaN.
            b = self.factor(part[used])
            yield mass, b.new_zeros(len(part), *shape).index_copy(0, used, b)

    @cached_property
    def _shares(self) -> tuple[Float[np.ndarray, "m"], Float[np.ndarray, "*b m"]]:
        """Scaled radii in ascending order, and the fraction of the variance in each shell."""
        omega, volumes = self.nodes
        with torch.no_grad():
            masses = self._masses(omega, volumes)
            parts = [
                mass * (b / self._units.unsqueeze(-3)).abs().square().sum((-1, -2))
                for mass, b in masses
            ]
        traces = torch.cat(parts, dim=-1).cpu().numpy()
        invalid = ~np.isfinite(traces).reshape(-1, traces.shape[-1]).all(0)
        if invalid.any():
            raise ValueError(
                "SpectralMatrixKernel expects a finite amplitude, got NaN or infinity at ω = "
                f"{omega[int(invalid.argmax())].tolist()} with its current parameters; make it "
                "finite for all values of the parameters"
            )
        radii, place = np.unique(
            self.spectrum.scaled_radius(omega.cpu().numpy()).round(12), return_inverse=True
        )
        shares = np.zeros((*traces.shape[:-1], len(radii)))
        np.add.at(shares, (..., place.reshape(-1)), traces)
        total = shares.sum(-1, keepdims=True)
        return radii, shares / np.where(total > 0, total, 1.0)

    @cached_property
    def _tails(self) -> tuple[Float[np.ndarray, "m"], Float[np.ndarray, "m"]]:
        """Scaled radii in ascending order, and the fraction of the variance beyond each radius."""
        radii, shares = self._shares
        # A radius divides its shell into two halves.
        beyond = shares[..., ::-1].cumsum(-1)[..., ::-1] - 0.5 * shares
        tails = beyond.reshape(-1, len(radii)).max(0)
        return radii, np.maximum(tails, 1e-300 * (1 + np.arange(len(radii))[::-1]))

    @cached_property
    def _tables(self) -> list[CorrelationTable]:
        """For each axis, a table that agrees with a table with a shorter period."""
        return [self._table(axis) for axis in range(self.num_dims)]

    @torch.no_grad()
    def _table(self, axis: int) -> CorrelationTable:
        num_lags, shorter = 125, None
        while True:
            table = correlation_table(*self._density(axis, frequency_step(num_lags)), num_lags)
            floor = max(_FAINT, self._floor(num_lags))
            if shorter is not None and table.agrees(shorter, floor):
                return table
            num_lags, shorter = round(1.6 * num_lags), table
            others = len(self._others(range(1, self.num_dims))[1])
            if others * self._cut / frequency_step(num_lags) > 2**21:  # too many frequencies
                return replace(table, resolved=False)

    def _others(self, axes: Sequence[int]) -> tuple[Float[Tensor, "m k"], Float[Tensor, "m"]]:
        """Return frequencies along the other axes, up to the cut, and their volumes."""
        radii, tails = self._tails
        least = radii[np.searchsorted(-tails, _FAINT - 1)]  # smaller radii have little variance
        ends = min(least, 1e-3), self._cut
        return _polar_nodes(self.scales[list(axes)], _FEW_ANGLES, 0.25, self.device, ends)

    def _density(
        self, axis: int, step: float
    ) -> tuple[Float[Tensor, "*b m k n p p"], Int[Tensor, "n"]]:
        """Return A S times volumes, and the index of the opposite of each direction.

        The m frequencies along the axis are equispaced and ≥ 0. The frequencies of the other axes
        have k lengths and n directions.
        """
        others = [i for i in range(self.num_dims) if i != axis]
        rest, volumes = self._others(others)
        count = 1 + math.ceil(self._cut / step)
        along = step * torch.arange(count, dtype=torch.float64, device=self.device)
        omega = rest.new_empty(count, len(rest), self.num_dims)
        omega[..., axis] = along.unsqueeze(-1) * self.scales[axis]
        omega[..., others] = rest
        half = torch.where(along == 0, 0.5, 1.0).unsqueeze(-1) * volumes
        parts = [
            torch.einsum("...m,mpr,mqr->...mpq", mass.to(b), b, b.conj())
            for mass, b in self._masses(omega.flatten(0, 1), half.flatten())
        ]
        density = torch.cat(parts, dim=-3)
        if not others:  # S may be infinite at ω = 0
            spacing = torch.from_numpy(step * self.scales).to(rest)
            weight = lattice_weights(self.spectrum, omega[:1, 0], spacing) / spacing
            b = self.factor(omega[:1, 0])
            density[..., :1, :, :] = 0.5 * weight[..., None, None] * (b @ b.mH)
        density = density / (self._units * self._units.mT).unsqueeze(-3)
        directions = _directions(len(others), _FEW_ANGLES, self.device)[0]
        opposite = torch.cdist(directions, -directions).argmin(-1)
        return density.unflatten(-3, (count, -1, len(directions))), opposite


def _directions(
    dims: int, angles: int, device: torch.device
) -> tuple[Float[Tensor, "n k"], Float[Tensor, "n"]]:
    """Return unit vectors and weights of a mean over the sphere; an empty vector for k = 0."""
    if not dims:
        return torch.zeros(1, 0, dtype=torch.float64, device=device), torch.ones(1, device=device)
    return unit_sphere(dims, device, angles)


def _polar_nodes(
    scales: Float[np.ndarray, "k"],
    angles: int,
    step: float,
    device: torch.device,
    ends: tuple[float, float] = (1e-6, 1e6),  # radii, in units of the spectrum
) -> tuple[Float[Tensor, "m k"], Float[Tensor, "m"]]:
    """Return nodes ω and weights of an integral over k dimensions, in polar coordinates.

    `ends` are the smallest and the largest radius, in units of the spectrum.
    """
    dims = len(scales)
    directions, means = _directions(dims, angles, device)
    if not dims:
        return directions, means
    low, high = np.log(ends)
    radii = torch.from_numpy(np.exp(np.arange(low, high, step))).to(device)
    surface = 2 * math.pi ** (dims / 2) / math.gamma(dims / 2) * float(np.prod(scales))
    volumes = surface * step * radii.pow(dims).unsqueeze(-1) * means
    omega = radii[:, None, None] * directions * torch.from_numpy(scales).to(device)
    return omega.flatten(0, 1), volumes.flatten()
