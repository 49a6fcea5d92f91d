"""Readings left out by blocks: for any inference, the posterior given the rest."""

from collections.abc import Callable, Hashable, Iterable, Iterator
from functools import partial, singledispatch
from typing import NamedTuple

import torch
from gpytorch.kernels import Kernel
from jaxtyping import Bool, Float
from torch import Tensor

from gp_orff.data.dataset import Dataset
from gp_orff.data.noise.covariances import Noises
from gp_orff.data.observations import Observations
from gp_orff.inference.conditioning import Inference, Posterior
from gp_orff.inference.distributions import FieldDistribution


class Block(NamedTuple):
    """The readings of a block, by their `index`."""

    name: Hashable
    left_out: Bool[Tensor, "N"]  # that the posterior does not know
    tested: Bool[Tensor, "N"]  # of these, the ones that are predicted

    def to(self, device: torch.device) -> "Block":
        """The same block on another device."""
        return Block(self.name, self.left_out.to(device), self.tested.to(device))


class LeftOut(NamedTuple):
    """Readings of a group that are left out, and what the rest tells of the field there."""

    part: Observations  # with nominal weights, and the `index` of every reading
    mean: Float[Tensor, "n v"]  # E[H f], the constant mean included
    variance: Float[Tensor, "n v"]  # Var[H f], the truncated variance included
    joint: Callable[[], Float[Tensor, "n*v n*v"]]  # computes Cov[H f] of all these readings
    noise: Float[Tensor, "n v"] | None = None  # its variance, where it is not that of the group
    on_new_track: Bool[Tensor, "n"] | None = None  # of which no reading is known


@singledispatch
@torch.no_grad()
def left_out(
    inference: Inference,
    kernel: Kernel,
    noises: Noises,
    mean: Float[Tensor, "p"] | None,
    blocks: Iterable[Block],
) -> Iterator[list[LeftOut]]:
    """The tested readings of every block, and the field there given all that are not left out.

    Inference by features subtracts statistics, the exact kernel inverts one matrix; any other
    inference is conditioned on the rest anew for every block. Learned weights of Student-t noise
    stay as they are.

    Args:
        inference: of a `Dataset` in memory whose observations have an `index`, without symbols.
        kernel: the prior.
        noises: Σ by the label of the group.
        mean: the constant mean; None where it is not known: that of largest evidence given the
            rest, with its covariance.
        blocks: on the device of the data.
    """
    for block in blocks:
        rest = [part.take(~block.left_out[part.index]) for part in inference.data.visit()]
        rest = Dataset.in_memory([part for part in rest if len(part)])
        posterior = inference.of(rest).posterior(kernel, noises, mean)
        yield predicted(inference.data, block, posterior, mean)


def predicted(
    data: Dataset, block: Block, posterior: Posterior, mean: Float[Tensor, "p"] | None
) -> list[LeftOut]:
    """The tested readings of a block, and the field there under a posterior given the rest."""
    constant = posterior.evidence.best_mean() if mean is None else mean
    field, results = posterior.under(mean), []
    for part in data.unweighted().visit():
        part = part.take(block.tested[part.index])
        if len(part):
            vectors = field.mean(part.x) + constant
            joint = partial(_joint, part, field)
            variance = _variance(part, field)
            results.append(LeftOut(part, part.apply(vectors), variance, joint))
    return results


def _variance(part: Observations, field: FieldDistribution) -> Float[Tensor, "n v"]:
    if part.direction is None:  # then H selects components
        return part.apply(field.variance(part.x))
    return part.apply_to_covariance(field.blocks(part.x)).diagonal(dim1=-1, dim2=-2)


@torch.no_grad()
def _joint(part: Observations, field: FieldDistribution) -> Float[Tensor, "n*v n*v"]:
    return part.apply_to_joint(field.covariance(part.x))
