"""Maps of magnetic and gravity fields above their sources."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Complex, Float
from torch import Tensor

from gp_orff.symbols.base import Multiplier, VectorFieldSymbol, copy_of

LEAST_INCLINATION = 10.0  # degrees


@dataclass(frozen=True)
class ReductionToPole(VectorFieldSymbol):
    """The total-field anomaly as if magnetisation and main field were vertical, in units of f.

    Anomalies then stand above their sources. Outside the sources the field is f = ∇g, and g is the
    derivative along the magnetisation m of a field S of point sources: g = m·∇S. At the pole the
    anomaly is ∂²S/∂z², so that its multiplier (see `Symbol`) is

        Q(ω) = (0, 0, ω₃ / m·ω),   ω = (k₁, k₂, ±i|k|),

    at the complex frequencies of decaying waves. The direction of the main field does not enter:
    it is in the readings (`directions=`), which tell all of f. Magnetisation parallel to the main
    field is *induced*; give another m for remanent magnetisation. It is the same for all sources.

    A constant part of the field is not reduced: it is left out. Only a `HarmonicKernel` has this
    map, alone or in a sum with constants; by features, which a model under the exact kernel makes
    for it. Sample paths of it take `frequencies=gp_orff.Auto(exact_values=0)`.

    Upward continuation is the posterior at larger heights. The slopes of an anomaly along u are
    `slopes = Jacobian(num_dims=3) @ Component(u)`, of which the last is its vertical derivative;
    `field.summarize(x, lambda g: g.norm(dim=-1), symbol=slopes)` is the analytic signal.

    Args:
        magnetisation: m, (3,), along the inputs (east, north, up); its length does not matter.

    Raises:
        ValueError: `magnetisation` is not a vector of three finite numbers, or within 10° of the
            horizontal, where the error bars along m grow without bound.

    Example:
        >>> import gp_orff, torch
        >>> x = torch.rand(50, 3, dtype=torch.float64)
        >>> u = torch.tensor([0.0, 0.6, -0.8], dtype=torch.float64).expand(50, 3)
        >>> model = gp_orff.VectorFieldGP(gp_orff.HarmonicKernel(1))
        >>> field = model.condition(x, x[:, 0].sin(), directions=u).posterior()
        >>> pole = gp_orff.ReductionToPole([0.0, 0.6, -0.8])
        >>> field.mean(x, pole).shape, field.variance(x, pole).shape
        (torch.Size([50, 1]), torch.Size([50, 1]))
        >>> higher = x + torch.tensor([0.0, 0.0, 1.5])
        >>> field.mean(higher, gp_orff.Component(u[0])).shape  # the anomaly 1.5 units above
        torch.Size([50, 1])
    """

    magnetisation: Sequence[float] | Float[Tensor, "3"]
    dims = (3,)
    of_decaying_waves = True

    def __post_init__(self):
        m = copy_of(self.magnetisation)
        if m.shape != (3,) or not torch.isfinite(m).all() or not m.norm() > 0:
            raise ValueError(
                "ReductionToPole expects a magnetisation of three finite numbers (east, north, "
                f"up), not all zero, got {m.tolist()}"
            )
        m = m / m.norm()
        inclination = math.degrees(math.asin(min(abs(m[2].item()), 1.0)))
        if inclination < LEAST_INCLINATION:
            raise ValueError(
                "ReductionToPole expects a magnetisation at least "
                f"{LEAST_INCLINATION:g}° from the horizontal, got {inclination:.3g}°; near the "
                "equator map the analytic signal or the components of the field instead"
            )
        object.__setattr__(self, "magnetisation", tuple(m.tolist()))

    def num_outputs(self, p: int) -> int:
        return 1

    def patches(self, num_dims: int, p: int) -> None:
        return None

    def __call__(self, omega: Float[Tensor, "D 3"] | Complex[Tensor, "D 3"], p: int) -> Multiplier:
        omega = omega.to(torch.complex128)
        values = torch.zeros_like(omega).unsqueeze(-2)
        varies = (omega != 0).any(-1)
        along = omega[varies] @ torch.tensor(self.magnetisation).to(omega)
        values[varies, 0, 2] = omega[varies, 2] / along
        return values
