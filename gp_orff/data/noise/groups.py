"""The noise of groups of readings."""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from gp_orff.data.noise.covariances import Noises
from gp_orff.data.patterns import GroupKey


@dataclass(frozen=True)
class GroupNoise:
    """Of the readings of a group: Σ/w_n + H_n δ H_nᵀ."""

    weighted: Float[Tensor, "v v"]  # Σ, of a reading of weight one
    delta: Float[Tensor, "p p"] | None = None  # δ, whatever the weight


def group_noise(
    key: GroupKey,
    noises: Noises,
    delta: Float[Tensor, "p p"] | None = None,
    masses: Float[Tensor, "k"] | None = None,
    count: float = 1,
) -> Float[Tensor, "v v"]:
    """The noise covariance of a reading of weight one, with its share of a white variance: as if
    that had weights too, the mean of those being one."""
    if key.label not in noises:
        known = sorted(noises)
        raise ValueError(f"expected readings of a known group, one of {known}, got {key.label!r}")
    covariance = key.pattern.noise(noises[key.label])
    return (
        covariance
        if delta is None
        else covariance + key.pattern.unweighted_noise(delta, masses, count)
    )
