"""The phases ⟨ω_k, x⟩ of D frequencies: one class for each way to compute them."""

from gp_orff.features.phases.base import LinearPhases, Phases
from gp_orff.features.phases.projected import ProjectedPhases, SumOfPhases, as_range
from gp_orff.features.phases.projections import (
    FastfoodProjection,
    FourierProjection,
    OrthogonalProjection,
    Projection,
)

__all__ = [
    "FastfoodProjection",
    "FourierProjection",
    "LinearPhases",
    "OrthogonalProjection",
    "Phases",
    "ProjectedPhases",
    "Projection",
    "SumOfPhases",
    "as_range",
]
