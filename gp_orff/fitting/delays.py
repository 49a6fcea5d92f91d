"""Starting values of delays between outputs, from the cross-covariance of the data."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from gpytorch.kernels import Kernel
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import conv1d

from gp_orff.data.observations import Observations
from gp_orff.kernels.base import parts_of
from gp_orff.kernels.spectral_matrix import SpectralMatrixKernel
from gp_orff.kernels.tree import evaluate

# The evidence of outputs f_i(x) = g(x − τ_i) has local maxima, which a search does not leave.
#
# 1. `_phase_slopes` returns the present delays τ_i: row i of B(ω) has the phase factor e^{iωτ_i}.
# 2. `_linear` finds the parameters θ in which the τ_i are linear, with the same slope at all ω.
# 3. `_most_alike` finds the lag with the largest cross-covariance of two outputs of the data.
# 4. Least squares give the θ for which the differences τ_i − τ_0 are these lags.


_FREQUENCIES = 8
_STEP = 1e-3  # step of θ, relative to the extent of the data: ∂τ/∂θ has rounding below 1e-8
_EQUAL = 1e-6  # tolerance of equal slopes, relative to the largest
_STEPS_OF_WIDTH = 4  # lags per width of the smoothing of the cross-covariance

Values = tuple[Float[Tensor, "n"], Float[Tensor, "n"]]


@dataclass(frozen=True)
class Delay:
    """A parameter, or an element of a vector of parameters, and a starting value."""

    parameter: nn.Parameter
    index: int
    value: float

    def set(self) -> None:
        """Give the parameter this value."""
        self.parameter.data.view(-1)[self.index] = self.value


@torch.no_grad()
def starting_delays(
    kernel: Kernel,
    observations: Iterable[Observations],
    extent: Float[np.ndarray, "d"],
    width: float,
) -> list[list[Delay]]:
    """Return the present delays, and the delays for which the outputs of the data agree best.

    The second list exists only for kernels with one input, and if all outputs are observed.

    Args:
        kernel: the kernel, with `SpectralMatrixKernel`s whose amplitudes have delays.
        observations: the observations of all groups.
        extent: the extent of the data along every input.
        width: the width of the smoothing of the cross-covariance, such as the starting lengthscale.
    """
    if len(extent) > 1 or not extent[0] > 0:
        return [[]]
    extent, outputs = float(extent[0]), _by_output(observations)
    present, likely = [], []
    for part in parts_of(kernel, SpectralMatrixKernel):
        delays, slopes = _linear(part, extent)
        present += delays
        if delays and len(outputs) == part.num_outputs:
            lags = [_most_alike(outputs[0], other, extent, width) for other in outputs]
            tau = _phase_slopes(part, extent).mean(0)
            missing = torch.stack(lags).to(tau) - (tau - tau[0])
            change = torch.linalg.pinv(slopes - slopes[0]) @ missing
            likely += [
                Delay(one.parameter, one.index, one.value + more)
                for one, more in zip(delays, change.tolist(), strict=True)
            ]
    return [present, likely] if likely else [present]


def _linear(
    kernel: SpectralMatrixKernel, extent: float
) -> tuple[list[Delay], Float[Tensor, "p k"]]:
    """The parameters θ that are delays, with their present values, and the slopes ∂τ/∂θ."""
    delays, slopes, now = [], [], _phase_slopes(kernel, extent)
    for name, parameter in kernel.named_parameters() if now is not None else ():
        of_amplitude = name.startswith("amplitude.")
        if not of_amplitude or not parameter.requires_grad or parameter.dim() > 1:
            continue
        for index, value in enumerate(parameter.flatten().tolist()):
            changes = []
            for step in (_STEP * extent, -_STEP * extent):
                Delay(parameter, index, value + step).set()
                changes.append((_phase_slopes(kernel, extent) - now) / step)
            Delay(parameter, index, value).set()
            both = torch.cat(changes)
            slope = both.mean(0)
            if (both - slope).abs().max() < _EQUAL * slope.abs().max():
                delays.append(Delay(parameter, index, value))
                slopes.append(slope)
    return delays, torch.stack(slopes, dim=-1) if delays else torch.empty(0)


def _phase_slopes(kernel: SpectralMatrixKernel, extent: float) -> Float[Tensor, "D p"] | None:
    """τ_i at each of `_FREQUENCIES` frequencies, or None if the amplitude is real."""
    device = next(kernel.parameters()).device
    omega = torch.arange(1, 1 + _FREQUENCIES, device=device).double().unsqueeze(-1) / extent
    step = 1e-4 / extent  # far below π/τ
    b, after = (evaluate(kernel.amplitude, w) for w in (omega, omega + step))
    return (after * b.conj()).sum(-1).angle() / step if b.is_complex() else None


def _by_output(observations: Iterable[Observations]) -> list[Values]:
    """The positions and centred values of each observed output."""
    pieces: dict[int, list[Values]] = {}
    for group in observations:
        if not group.pattern.along:
            for column, y in zip(group.pattern.columns, group.y.mT, strict=True):
                pieces.setdefault(column, []).append((group.x[:, 0], y))
    joined = [
        [torch.cat(part) for part in zip(*pieces[column], strict=True)] for column in sorted(pieces)
    ]
    return [(x, y - y.mean()) for x, y in joined]


def _most_alike(first: Values, second: Values, extent: float, width: float) -> Float[Tensor, ""]:
    """The lag z_m − x_n with the largest weighted mean of the products y_n v_m.

    The weight of a lag falls to zero at the extent of the data, since long lags have few pairs.
    """
    (x, y), (z, v) = first, second
    step = width / _STEPS_OF_WIDTH
    count = int(extent / step)
    lags = step * (torch.arange(-count, count).to(x) + 0.5)  # not zero
    cell = ((z - x.unsqueeze(-1)) / step).floor().long().flatten() + count
    inside = (cell >= 0) & (cell < len(lags))
    products = (y.unsqueeze(-1) * v).flatten()
    sums = x.new_zeros(2, len(lags))
    for row, values in zip(sums, (products, torch.ones_like(products)), strict=True):
        row.index_add_(0, cell[inside], values[inside])
    reach = torch.arange(-4 * _STEPS_OF_WIDTH, 4 * _STEPS_OF_WIDTH + 1).to(x)
    near = torch.exp(-0.5 * (reach / _STEPS_OF_WIDTH).square())
    smooth = conv1d(sums.unsqueeze(1), near.view(1, 1, -1), padding=len(near) // 2)
    total, pairs = smooth.squeeze(1)
    return lags[(total / pairs.clamp_min(1) * (1 - lags.abs() / extent)).argmax()]
