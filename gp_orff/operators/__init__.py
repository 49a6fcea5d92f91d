"""LinearOperators that keep the structure of features inside gpytorch.

`FeatureCovariance` is K(x₁, x₂) = Φ(x₁)Φ(x₂)ᵀ, `NoisyFeatureCovariance` adds I⊗Σ, and
`PosteriorCovariance` is what conditioning leaves. Φ is never held for many points.
"""

from gp_orff.operators.features import FeatureCovariance, NoisyFeatureCovariance
from gp_orff.operators.posterior import NoisyPosteriorCovariance, PosteriorCovariance

__all__ = [
    "FeatureCovariance",
    "NoisyFeatureCovariance",
    "NoisyPosteriorCovariance",
    "PosteriorCovariance",
]
