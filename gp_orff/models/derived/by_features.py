"""Symbols of exact models that have no closed form, and take features: what is said of that."""

import warnings

from gpytorch.kernels import Kernel

from gp_orff.data.noise.covariances import Noises
from gp_orff.features.frequencies.lattice_nodes import GridWarning
from gp_orff.inference.conditioning import FeatureInference
from gp_orff.inference.conditioning.few_sites import MUCH_TRUNCATED
from gp_orff.symbols.base import Symbol
from gp_orff.symbols.patches import TooFine


def warn_of_features(
    symbol: Symbol,
    error: NotImplementedError,
    features: FeatureInference,
    kernel: Kernel,
    noises: Noises,
) -> None:
    """Warn where features take the place of the exact kernel in an integral over many lengthscales,
    or truncate much of the noise variance of a reading."""
    if isinstance(error, TooFine):
        warnings.warn(
            f"{error}. This result uses features, which are less accurate than the exact kernel; "
            "split the integral into smaller pieces, or use features from the start",
            UserWarning,
            stacklevel=2,
        )
    ratio = max(features.truncation_ratios(kernel, noises).values(), default=0.0)
    if ratio > MUCH_TRUNCATED:
        warnings.warn(
            f"{type(symbol).__name__} has no closed form under the exact kernel, and takes a "
            f"frequency grid, whose truncated variance is {ratio:.2g} times the noise variance: it "
            "counts as noise of readings, so that error bars are wider than those of the exact "
            "kernel; a smoother kernel or a smaller region would reduce it",
            GridWarning,
            stacklevel=2,
        )
