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

import gp_orff.exact_gp.hooks  # noqa: F401  sums and products of our kernels inside gpytorch
from gp_orff import bounds, settings, spectra
from gp_orff.data.field_statistics import FieldStatistics
from gp_orff.data.noise.known_noise_likelihood import KnownNoiseLikelihood
from gp_orff.data.noise.likelihoods import MultitaskStudentTLikelihood
from gp_orff.data.noise.track_likelihood import TrackLikelihood
from gp_orff.data.repeats.thinning import thin
from gp_orff.data.survey import DataWarning
from gp_orff.exact_gp.orff_kernel import ORFFKernel
from gp_orff.features.frequencies import (
    Auto,
    Fastfood,
    FourierFastfood,
    GaussHermite,
    Grid,
    GridWarning,
    MonteCarlo,
    Orthogonal,
    QuasiMonteCarlo,
    StructuredOrthogonal,
    Templates,
)
from gp_orff.inference.overconfidence import FeatureWarning
from gp_orff.kernels.closed_form import radial_derivatives
from gp_orff.kernels.dot_product import DotProductKernel
from gp_orff.kernels.fields import CurlFreeKernel, DivergenceFreeKernel, HelmholtzKernel
from gp_orff.kernels.harmonic import HarmonicKernel
from gp_orff.kernels.learned_spectrum import LearnedSpectrumKernel
from gp_orff.kernels.matrix_valued.separable import SeparableKernel
from gp_orff.kernels.matrix_valued.spectral_matrix import SpectralMatrixKernel
from gp_orff.kernels.products import FieldProductKernel
from gp_orff.kernels.scalar import BesselKernel, GeneralMaternKernel
from gp_orff.kernels.spectra import lengths  # noqa: F401
from gp_orff.kernels.spectra.base import spectrum
from gp_orff.models.comparison import compare_kernels
from gp_orff.models.derived.energy_spectrum import EnergySpectrum
from gp_orff.models.exact_comparison import compare_with_exact
from gp_orff.models.field_posterior import FieldPosterior
from gp_orff.models.fitting.search import SearchWarning
from gp_orff.models.report.fit_report import FitReport
from gp_orff.models.validation.calibration import CalibrationWarning
from gp_orff.models.validation.cross_validation import CrossValidation
from gp_orff.models.vector_field_gp import VectorFieldGP
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
    ReductionToPole,
    StreamFunction,
    Symbol,
    VectorPotential,
)
from gp_orff.versions import show_versions

__all__ = [
    "Auto",
    "Background",
    "BesselKernel",
    "BoxAverage",
    "CalibrationWarning",
    "Component",
    "CrossValidation",
    "Curl",
    "CurlFreeKernel",
    "CurlFreePart",
    "DataWarning",
    "Divergence",
    "DivergenceFreeKernel",
    "DivergenceFreePart",
    "DotProductKernel",
    "EnergySpectrum",
    "Fastfood",
    "FeatureWarning",
    "FieldPosterior",
    "FieldProductKernel",
    "FieldStatistics",
    "FitReport",
    "Flux",
    "FourierFastfood",
    "GaussHermite",
    "GeneralMaternKernel",
    "Grid",
    "GridWarning",
    "HarmonicKernel",
    "HelmholtzKernel",
    "Jacobian",
    "KnownNoiseLikelihood",
    "LearnedSpectrumKernel",
    "LineIntegral",
    "MonteCarlo",
    "MultitaskStudentTLikelihood",
    "ORFFKernel",
    "Orthogonal",
    "Potential",
    "QuasiMonteCarlo",
    "ReductionToPole",
    "SearchWarning",
    "SeparableKernel",
    "SpectralMatrixKernel",
    "StreamFunction",
    "StructuredOrthogonal",
    "Symbol",
    "Templates",
    "TrackLikelihood",
    "VectorFieldGP",
    "VectorPotential",
    "bounds",
    "compare_kernels",
    "compare_with_exact",
    "plotting",
    "radial_derivatives",
    "regression",
    "settings",
    "show_versions",
    "spectra",
    "spectrum",
    "thin",
]

__version__ = "0.2.0"


def __getattr__(name: str) -> ModuleType:
    """`gp_orff.plotting` and `gp_orff.regression`, when they are asked for."""
    if name in ("plotting", "regression"):
        return import_module(f"gp_orff.{name}")
    raise AttributeError(f"module 'gp_orff' has no attribute {name!r}")


def __dir__() -> list[str]:
    """The public names."""
    return [*__all__, "__version__"]
