"""Reduction to the pole: the anomaly that rocks would cause under a vertical main field."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Complex, Float
from torch import Tensor

from gp_orff.symbols.base import Multiplier, Symbol, copy_of

_LEAST = 10.0  # degrees of inclination, below which errors are multiplied by more than 5.8


@dataclass(frozen=True)
class ReductionToPole(Symbol):
    """The total-field anomaly as if main field and magnetisation were vertical, one output.

    A magnetic field b of sources below, magnetised along m, is a sum of waves e^{i⟨k,x⟩ − |k|z}
    with complex frequencies ω = (k, i|k|). Magnetised vertically, and read along a vertical main
    field, the same sources have the anomaly

        Q(ω) b = b₃ ω₃ / ⟨m, ω⟩ ,

    whose maxima are above the rocks (Baranov 1957). Where m is inclined by I, errors grow by at
    most 1/|sin I|. Constants are left out. It needs features of a `HarmonicKernel`, which have
    complex frequencies: `VectorFieldGP(..., frequencies=gp_orff.Auto(exact_values=0))`.

    Args:
        magnetisation: m, (3,), east, north and up, of any length: that of the main field for
            induced magnetisation, such as the mean of the `directions` of `labelled.total_field`.

    Raises:
        ValueError: `magnetisation` is no vector of 3 finite numbers, or is inclined by less than
            10 degrees.

    Example:
        >>> import gp_orff, torch
        >>> reduction = gp_orff.ReductionToPole([0.0, 0.0, -1.0])  # at the pole already
        >>> wave = torch.tensor([[0.6, 0.8, 1.0j]])  # exp(i(0.6 x + 0.8 y) - z)
        >>> reduction(wave, 3)[..., 2].real  # the anomaly along a field that points down is -b₃
        tensor([[-1.]], dtype=torch.float64)
    """

    magnetisation: Sequence[float] | Float[Tensor, "3"]
    homogeneous = True

    def __post_init__(self):
        m = copy_of(self.magnetisation).double()
        if m.shape != (3,) or not torch.isfinite(m).all() or not m.norm() > 0:
            raise ValueError(
                "ReductionToPole expects a magnetisation (3,) of finite numbers that are not all "
                f"zero, got {m.tolist()}; give the direction of the main field"
            )
        inclination = torch.rad2deg(torch.asin(m[2] / m.norm())).item()
        if abs(inclination) < _LEAST:
            raise ValueError(
                f"ReductionToPole expects an inclination of at least {_LEAST:g} degrees, got "
                f"{abs(inclination):.3g}, where errors would grow more than fivefold; read the "
                "field at other heights, its components, or Jacobian instead"
            )
        object.__setattr__(self, "magnetisation", tuple((m / m.norm()).tolist()))

    def num_outputs(self, p: int) -> int:
        return 1

    def check(self, num_dims: int, p: int) -> None:
        if (num_dims, p) != (3, 3):
            raise ValueError(
                f"ReductionToPole expects a field of 3 components of 3 inputs in space, got {p} "
                f"components of {num_dims}"
            )

    def patches(self, num_dims: int, p: int) -> None:
        return None  # it is no sum of averages

    def of_waves(self, omega: Complex[Tensor, "D 3"], p: int) -> Multiplier:
        return self(omega, p)

    def __call__(self, omega: Complex[Tensor, "D 3"], p: int) -> Multiplier:
        if not omega.is_complex() and omega.any():
            raise NotImplementedError(
                "ReductionToPole expects waves that decay with height, as those of a "
                "HarmonicKernel, got a field of real frequencies, for which it is not known"
            )
        omega = omega.to(torch.complex128)
        m = torch.as_tensor(self.magnetisation, dtype=torch.complex128, device=omega.device)
        values = torch.zeros(len(omega), 1, 3, dtype=torch.complex128, device=omega.device)
        waves = (omega != 0).any(-1)  # constants are left out
        values[waves, 0, 2] = omega[waves, 2] / (omega[waves] @ m)
        return values
