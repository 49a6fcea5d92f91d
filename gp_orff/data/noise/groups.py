"""The noise of the observations of a group."""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from gp_orff.data.noise.covariances import Noises
from gp_orff.data.patterns import GroupKey


@dataclass(frozen=True)
class GroupNoise:
    """The noise of the observations of a group: Σ/w_n + H_n δ H_nᵀ."""

    weighted: Float[Tensor, "v v"]  # Σ, of an observation of weight one
    delta: Float[Tensor, "p p"] | None = None  # δ, independent of the weight


def group_noise(
    key: GroupKey,
    noises: Noises,
    delta: Float[Tensor, "p p"] | None = None,
    masses: Float[Tensor, "k"] | None = None,
    count: float = 1,
) -> Float[Tensor, "v v"]:
    """The noise covariance of an observation of weight one, truncated variance δ included.

    The caller divides it by the weights w_n. δ does not depend on them, and is multiplied here by
    their mean.
    """
    if key.label not in noises:
        raise ValueError(
            f"expected observations of a known group, one of {sorted(noises)}, got {key.label!r}"
        )
    covariance = key.pattern.noise(noises[key.label])
    return (
        covariance
        if delta is None
        else covariance + key.pattern.unweighted_noise(delta, masses, count)
    )
