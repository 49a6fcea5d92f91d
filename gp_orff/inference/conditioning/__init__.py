"""Evidence and posterior of data under a kernel, by the exact kernel or by features."""

from gp_orff.inference.conditioning.base import Inference, Posterior, log_marginal_likelihood
from gp_orff.inference.conditioning.exact import ExactInference
from gp_orff.inference.conditioning.features import FeatureInference

__all__ = [
    "ExactInference",
    "FeatureInference",
    "Inference",
    "Posterior",
    "log_marginal_likelihood",
]
