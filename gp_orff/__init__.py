"""Gaussian processes with vector-valued outputs for GPyTorch.

Curl-free, divergence-free, Helmholtz and separable kernels, exact and as operator-valued random
Fourier features.
"""

import warnings
from importlib import import_module
from types import ModuleType

with warnings.catch_warnings():  # linear_operator, for what it does when it is imported
    warnings.filterwarnings("ignore", message="`torch.jit.script` is deprecated")
    import gpytorch  # noqa: F401

import gp_orff.gpytorch_hooks  # noqa: F401  sums and products of our kernels inside gpytorch
from gp_orff import settings, spectra
from gp_orff.comparison import (
    compare_kernels,
    compare_with_exact,
)
from gp_orff.distances import DataWarning
from gp_orff.field import FieldPosterior
from gp_orff.field_statistics import FieldStatistics
from gp_orff.frequencies import (
    Auto,
    GaussHermite,
    Grid,
    GridWarning,
    MonteCarlo,
    Orthogonal,
    QuasiMonteCarlo,
)
from gp_orff.kernels import (
    CurlFreeKernel,
    DivergenceFreeKernel,
    HelmholtzKernel,
    radial_derivatives,
)
from gp_orff.likelihoods import MultitaskStudentTLikelihood
from gp_orff.models import VectorFieldGP
from gp_orff.orff_kernel import ORFFKernel
from gp_orff.products import FieldProductKernel
from gp_orff.scalar_kernels import GeneralMaternKernel
from gp_orff.spectra import spectrum
from gp_orff.symbols import (
    Background,
    BoxAverage,
    Component,
    Curl,
    CurlFreePart,
    Divergence,
    DivergenceFreePart,
    Flux,
    Jacobian,
    LineIntegral,
    Potential,
    StreamFunction,
    Symbol,
    VectorPotential,
)
from gp_orff.trust import FeatureWarning

__all__ = [
    "Auto",
    "Background",
    "BoxAverage",
    "Component",
    "Curl",
    "CurlFreeKernel",
    "CurlFreePart",
    "DataWarning",
    "Divergence",
    "DivergenceFreeKernel",
    "DivergenceFreePart",
    "FeatureWarning",
    "FieldPosterior",
    "FieldProductKernel",
    "FieldStatistics",
    "Flux",
    "GaussHermite",
    "GeneralMaternKernel",
    "Grid",
    "GridWarning",
    "HelmholtzKernel",
    "Jacobian",
    "LineIntegral",
    "MonteCarlo",
    "MultitaskStudentTLikelihood",
    "ORFFKernel",
    "Orthogonal",
    "Potential",
    "QuasiMonteCarlo",
    "StreamFunction",
    "Symbol",
    "VectorFieldGP",
    "VectorPotential",
    "compare_kernels",
    "compare_with_exact",
    "plotting",
    "radial_derivatives",
    "settings",
    "spectra",
    "spectrum",
]

__version__ = "0.1.0"


def __getattr__(name: str) -> ModuleType:
    """`gp_orff.plotting`, when it is asked for."""
    if name == "plotting":
        return import_module("gp_orff.plotting")
    raise AttributeError(f"module 'gp_orff' has no attribute {name!r}")


def __dir__() -> list[str]:
    """The public names."""
    return [*__all__, "__version__"]
