"""Gaussian processes with vector-valued outputs for GPyTorch.

The package has curl-free, divergence-free, Helmholtz and separable kernels. They are available as
exact kernels and as operator-valued random Fourier features.
"""

import warnings
from importlib import import_module
from types import ModuleType

with warnings.catch_warnings():  # importing linear_operator emits a warning
    warnings.filterwarnings("ignore", message="`torch.jit.script` is deprecated")
    import gpytorch  # noqa: F401

import gp_orff.exact_gp.prediction  # noqa: F401  it registers sums and products of kernels
from gp_orff import bounds, settings, spectra
from gp_orff.data.likelihoods import (
    KnownNoiseLikelihood,
    MultitaskStudentTLikelihood,
    TrackLikelihood,
)
from gp_orff.data.pointwise import Pointwise
from gp_orff.data.sites import thin
from gp_orff.data.statistics import FieldStatistics
from gp_orff.data.survey import DataWarning
from gp_orff.exact_gp.feature_gp import FeatureGP, WeightVariationalStrategy
from gp_orff.exact_gp.orff_kernel import ORFFKernel
from gp_orff.features.draws import GridWarning
from gp_orff.features.grid import Auto, Grid
from gp_orff.features.random import (
    Fastfood,
    FourierFastfood,
    MonteCarlo,
    Orthogonal,
    QuasiMonteCarlo,
    StructuredOrthogonal,
)
from gp_orff.features.zoo import GaussHermite, Templates
from gp_orff.fitting.search import SearchWarning
from gp_orff.inference.posteriors import FeatureWarning
from gp_orff.kernels import lengths  # noqa: F401
from gp_orff.kernels.derivatives import radial_derivatives
from gp_orff.kernels.dot_product import DotProductKernel
from gp_orff.kernels.fields import (
    CurlFreeKernel,
    DivergenceFreeKernel,
    FieldProductKernel,
    HelmholtzKernel,
)
from gp_orff.kernels.harmonic import HarmonicKernel
from gp_orff.kernels.learned import LearnedSpectrumKernel
from gp_orff.kernels.lines import tides
from gp_orff.kernels.scalar import BesselKernel, GeneralMaternKernel
from gp_orff.kernels.separable import SeparableKernel
from gp_orff.kernels.spectra import spectrum
from gp_orff.kernels.spectral_matrix import SpectralMatrixKernel
from gp_orff.models.calibration import CalibrationWarning
from gp_orff.models.comparison import compare_kernels, compare_with_exact
from gp_orff.models.cross_validation import CrossValidation
from gp_orff.models.energy_spectrum import EnergySpectrum
from gp_orff.models.field_posterior import FieldPosterior
from gp_orff.models.fit_plan import FitPlan
from gp_orff.models.report import FitReport
from gp_orff.models.sample_paths import sample_prior
from gp_orff.models.vector_field_gp import VectorFieldGP
from gp_orff.symbols.base import Symbol
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
    "FeatureGP",
    "FeatureWarning",
    "FieldPosterior",
    "FieldProductKernel",
    "FieldStatistics",
    "FitPlan",
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
    "Pointwise",
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
    "WeightVariationalStrategy",
    "bounds",
    "compare_kernels",
    "compare_with_exact",
    "plotting",
    "radial_derivatives",
    "regression",
    "sample_prior",
    "settings",
    "show_versions",
    "spectra",
    "spectrum",
    "thin",
    "tides",
]

__version__ = "0.2.0"


def __getattr__(name: str) -> ModuleType:
    """`gp_orff.plotting`, `gp_orff.regression` and `gp_orff.botorch`, when they are asked for."""
    if name in ("plotting", "regression", "botorch"):
        return import_module(f"gp_orff.{name}")
    raise AttributeError(f"module 'gp_orff' has no attribute {name!r}")


def __dir__() -> list[str]:
    """The public names."""
    return [*__all__, "__version__"]
