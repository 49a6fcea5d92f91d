"""Symbols Q(ω): translation-invariant linear maps of fields, such as derivatives and potentials.

This subpackage imports no other subpackage.
"""

from gp_orff.symbols.base import Composed, Identity, Symbol
from gp_orff.symbols.integrals import BoxAverage, Flux, LineIntegral
from gp_orff.symbols.pointwise import (
    Background,
    Component,
    Curl,
    CurlFreePart,
    Divergence,
    DivergenceFreePart,
    Jacobian,
    Potential,
    ReductionToPole,
    StreamFunction,
    VectorPotential,
)

__all__ = [
    "Background",
    "BoxAverage",
    "Component",
    "Composed",
    "Curl",
    "CurlFreePart",
    "Divergence",
    "DivergenceFreePart",
    "Flux",
    "Identity",
    "Jacobian",
    "LineIntegral",
    "Potential",
    "ReductionToPole",
    "StreamFunction",
    "Symbol",
    "VectorPotential",
]
