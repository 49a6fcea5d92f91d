"""What represents the kernel, and how well."""

from dataclasses import dataclass

import torch

from gp_orff.features.accuracy import accuracy
from gp_orff.inference.conditioning import FeatureInference
from gp_orff.models.frozen_model import ModelSnapshot


@dataclass(frozen=True)
class Approximation:
    """Attributes as those of `FitReport`."""

    method: str
    features: int | None = None
    tolerance_reached: float | None = None
    aliasing: float | None = None
    share_cut: float | None = None
    cut_over_noise: float | None = None

    @classmethod
    @torch.no_grad()
    def of(cls, snapshot: ModelSnapshot) -> "Approximation":
        inference, kernel = snapshot.inference, snapshot.kernel
        if not isinstance(inference, FeatureInference):
            return cls("exact")
        features = inference.num_features(kernel)
        terms = accuracy(kernel, inference.draws)
        if not terms:
            sampled = any(own.sampled for own in inference.draws)
            return cls("random" if sampled else "quadrature", features)
        return cls(
            "grid",
            features,
            max(own.tolerance for own in terms),
            max(own.aliasing for own in terms),
            max(own.truncated for own in terms),
            _cut_over_noise(snapshot, inference),
        )

    def __str__(self) -> str:
        if self.method == "exact":
            return "exact kernel"
        if self.method != "grid":
            return f"{self.features} {self.method} features"
        return (
            f"grid of {self.features} features: {self.tolerance_reached:.0e} tolerance, "
            f"{self.share_cut:.1e} of the variance truncated ({self.cut_over_noise:.1e} of the "
            f"noise), aliasing {self.aliasing:.0e}"
        )


def _cut_over_noise(snapshot: ModelSnapshot, inference: FeatureInference) -> float:
    """The variance of a point that features lack, over that of the noise of a reading of mean
    weight, in the group of least noise."""
    cut = inference.truncated(snapshot.kernel)
    variance = 0.0 if cut is None else cut.diagonal().mean().item()
    return max(
        variance
        * weights.local_mean(float("inf"))
        / snapshot.noises[key.label].diagonal().mean().item()
        for key, weights in inference.data.weights_of.items()
    )
