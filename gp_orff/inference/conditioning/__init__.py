"""Evidence and posterior of data under a kernel: by its covariance, or by features."""

from gp_orff.inference.conditioning.base import (
    Inference,
    Posterior,
    Residuals,
    log_marginal_likelihood,
)
from gp_orff.inference.conditioning.exact import ExactInference, has_covariance
from gp_orff.inference.conditioning.features import FeatureInference
from gp_orff.inference.conditioning.iterative import IterativeInference, feature_inference

__all__ = [
    "ExactInference",
    "FeatureInference",
    "Inference",
    "IterativeInference",
    "Posterior",
    "Residuals",
    "feature_inference",
    "has_covariance",
    "log_marginal_likelihood",
]
