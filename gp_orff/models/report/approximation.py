"""Which features represent the kernel, and how accurate they are."""

from dataclasses import dataclass

import torch

from gp_orff.features.accuracy import accuracy
from gp_orff.inference.conditioning import FeatureInference
from gp_orff.models.frozen_model import ModelSnapshot


@dataclass(frozen=True)
class Approximation:
    """The representation of the kernel; the fields are attributes of `FitReport`."""

    method: str
    features: int | None = None
    tolerance_reached: float | None = None
    aliasing: float | None = None
    share_cut: float | None = None
    cut_over_noise: float | None = None

    @classmethod
    @torch.no_grad()
    def of(cls, snapshot: ModelSnapshot) -> "Approximation":
        """The representation that a model with data uses."""
        inference, kernel = snapshot.inference, snapshot.kernel
        if not isinstance(inference, FeatureInference):
            return cls("exact")
        features = inference.num_features(kernel)
        if any(draw.sampled for draw in inference.draws):
            return cls("random", features)
        grids = accuracy(kernel, inference.draws)
        if not grids:
            return cls("quadrature", features)
        return cls(
            "grid",
            features,
            max(grid.tolerance for grid in grids),
            max(grid.aliasing for grid in grids),
            max(grid.truncated for grid in grids),
            max(inference.truncation_ratios(kernel, snapshot.noises).values()),
        )

    @property
    def rows(self) -> list[tuple[str, str]]:
        """Labels and values, as `print` shows them."""
        if self.method == "exact":
            return [("kernel", "exact")]
        if self.method != "grid":
            return [("kernel", f"{self.features} {self.method} features")]
        return [
            (
                "kernel",
                f"frequency grid of {self.features} features, "
                f"tolerance {self.tolerance_reached:.1g}, aliasing {self.aliasing:.1g}",
            ),
            (
                "truncated variance",
                f"{self.share_cut:.2g} of the prior variance, "
                f"{self.cut_over_noise:.2g} of the noise variance",
            ),
        ]
