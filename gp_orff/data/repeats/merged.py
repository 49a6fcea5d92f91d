"""Observations merged at each site, and the scatter that their means leave.

Records y_i = f + ε_i at one place, with weights w_i and noise ε_i ~ N(0, Σ/w_i), have the mean
ȳ = Σ w_i y_i / W, W = Σ w_i, and

    Σ_i w_i (y_i − f)ᵀ Σ⁻¹ (y_i − f) = W (ȳ − f)ᵀ Σ⁻¹ (ȳ − f) + tr(Σ⁻¹ S) ,
    Σ_i log|Σ/w_i| = log|Σ/W| + (r − 1) log|Σ| − v (Σ_i log w_i − log W) ,

S = Σ_i w_i (y_i − ȳ)(y_i − ȳ)ᵀ, for r records of v values. The posterior given the means is that
given the records, and the scatter S completes the evidence.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from gp_orff.data.noise.covariances import Noise
from gp_orff.data.observations import Observations
from gp_orff.data.patterns import GroupKey
from gp_orff.data.repeats.sites import sites

_TURN = 1e-3  # between directions at one site: their numbers differ by 1e-6 of the variance


@dataclass(frozen=True)
class Scatter:
    """The scatter of the records of a group about the means of their sites."""

    key: GroupKey
    repeats: int  # records less sites
    squares: Float[Tensor, "v v"]  # S, summed over all sites
    log_weights: float  # Σ log w_i of the records less Σ log W of the sites

    def terms(self, noise: Noise) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
        """What the scatter adds to yᵀK⁻¹y and to log|K| under the noise Σ of weight one."""
        logdet = self.repeats * noise.logdet - len(self.squares) * self.log_weights
        return (noise.precision * self.squares).sum((-1, -2)), logdet


def merged(
    parts: Sequence[Observations], reach: Sequence[float]
) -> tuple[list[Observations], list[Scatter]]:
    """The means at the sites of every group, with the sums of their weights, and the scatter.

    Records along different directions stay apart; those of sites with a reach may turn by a
    thousandth, and have a mean direction. A group without repeated positions stays as it is, and
    has no scatter.

    Args:
        parts: the observations, a piece for each group.
        reach: (d), the size of a site along each axis, as in `sites`.

    Example:
        >>> import torch
        >>> from gp_orff.data.reading import Options, read
        >>> from gp_orff.data.repeats.merged import merged
        >>> x, y = torch.tensor([[0.0], [1.0], [0.0]]), torch.tensor([1.0, 5.0, 3.0])
        >>> (means,), (scatter,) = merged(read(x.double(), y, 1, Options()), (0.0,))
        >>> means.y.flatten().tolist(), means.weight.tolist(), scatter.squares.item()
        ([2.0, 5.0], [2.0, 1.0], 2.0)
    """
    return merged_at(parts, [site_labels(part, reach) for part in parts])


def merged_at(
    parts: Sequence[Observations], labels: Sequence[Int[np.ndarray, "n"]]
) -> tuple[list[Observations], list[Scatter]]:
    """As `merged`, where the site of every record is known."""
    pairs = [_merge(part, own) for part, own in zip(parts, labels, strict=True)]
    return [means for means, _ in pairs], [scatter for _, scatter in pairs if scatter is not None]


def site_labels(part: Observations, reach: Sequence[float]) -> Int[np.ndarray, "n"]:
    """The site of every record; records along different directions have different sites."""
    if part.direction is None:
        return sites(part.x.cpu().numpy(), reach)
    columns = torch.cat([part.x, part.direction], dim=-1).cpu().numpy()
    turns = (_TURN if any(reach) else 0.0,) * part.direction.shape[-1]
    return sites(columns, (*reach, *turns))


def weighted_means(
    values: Float[Tensor, "n k"],
    weight: Float[Tensor, "n"],
    site: Int[Tensor, "n"],
    record: Int[Tensor, "m"],
) -> Float[Tensor, "m k"]:
    """The weighted mean at every site, exact where all values are equal; any `record` of each."""
    origin = values[record]
    moved = weight.unsqueeze(-1) * (values - origin[site])
    total = weight.new_zeros(len(record)).index_add(0, site, weight)
    return origin + torch.zeros_like(origin).index_add(0, site, moved) / total.unsqueeze(-1)


def _merge(part: Observations, labels: Int[np.ndarray, "n"]) -> tuple[Observations, Scatter | None]:
    count = int(labels.max()) + 1
    if count == len(part):
        return part, None
    site = torch.from_numpy(labels).to(part.x.device)
    first = torch.from_numpy(np.unique(labels, return_index=True)[1]).to(site)
    weight = torch.ones_like(part.y[:, 0]) if part.weight is None else part.weight
    total = weight.new_zeros(count).index_add(0, site, weight)

    def mean(values: Float[Tensor, "n k"]) -> Float[Tensor, "m k"]:
        return weighted_means(values, weight, site, first)

    y = mean(part.y)
    residual = part.y - y[site]
    squares = (weight.unsqueeze(-1) * residual).mT @ residual
    log_weights = (weight.log().sum() - total.log().sum()).item()
    direction = None if part.direction is None else mean(part.direction)
    means = replace(
        part.take(first), x=mean(part.x), y=y, direction=direction, weight=total, index=None
    )
    return means, Scatter(part.key, len(part) - count, squares, log_weights)
