"""Readings left out by blocks: for any inference, the posterior given the rest."""

from collections.abc import Iterable, Iterator
from functools import singledispatch
from typing import NamedTuple

import torch
from gpytorch.kernels import Kernel
from jaxtyping import Bool, Float
from torch import Tensor

from gp_orff.data.dataset import Dataset
from gp_orff.data.noise.covariances import Noises
from gp_orff.data.observations import Observations
from gp_orff.inference.conditioning import Inference, Posterior


class LeftOut(NamedTuple):
    """Readings of a group that are left out, and what the rest tells of the field there."""

    part: Observations  # with nominal weights, and the `index` of every reading
    mean: Float[Tensor, "n v"]  # E[H f], the constant mean included
    variance: Float[Tensor, "n v"]  # Var[H f], the truncated variance included


@singledispatch
@torch.no_grad()
def left_out(
    inference: Inference,
    kernel: Kernel,
    noises: Noises,
    mean: Float[Tensor, "p"] | None,
    blocks: Iterable[Bool[Tensor, "N"]],
) -> Iterator[list[LeftOut]]:
    """The readings of every block, and the field there given all others.

    Inference by features subtracts statistics, the exact kernel inverts one matrix; any other
    inference is conditioned on the rest anew for every block. Learned weights of Student-t noise
    stay as they are.

    Args:
        inference: of a `Dataset` in memory whose observations have an `index`, without symbols.
        kernel: the prior.
        noises: Σ by the label of the group.
        mean: the constant mean; None for the one of largest evidence given the rest.
        blocks: which readings are left out, by `index`.
    """
    for block in blocks:
        rest = [part.take(~block[part.index]) for part in inference.data.visit()]
        rest = Dataset.in_memory([part for part in rest if len(part)])
        posterior = inference.of(rest).posterior(kernel, noises, mean)
        yield predicted(inference.data, block, posterior, mean)


def predicted(
    data: Dataset, block: Bool[Tensor, "N"], posterior: Posterior, mean: Float[Tensor, "p"] | None
) -> list[LeftOut]:
    """The readings of a block, and the field there under a posterior given the rest."""
    constant = posterior.evidence.best_mean() if mean is None else mean
    results = []
    for part in data.unweighted().visit():
        part = part.take(block[part.index])
        if len(part):
            vectors = posterior.distribution.mean(part.x) + constant
            results.append(LeftOut(part, part.apply(vectors), _variance(part, posterior)))
    return results


def _variance(part: Observations, posterior: Posterior) -> Float[Tensor, "n v"]:
    if part.direction is None:  # then H selects components
        return part.apply(posterior.distribution.variance(part.x))
    blocks = part.apply_to_covariance(posterior.distribution.blocks(part.x))
    return blocks.diagonal(dim1=-1, dim2=-2)
