"""The heights that harmonic kernels take from the readings."""

import torch
from gpytorch.kernels import Kernel

from gp_orff.data.dataset import Data
from gp_orff.kernels.harmonic import HarmonicKernel
from gp_orff.kernels.tree import terms


@torch.no_grad()
def take_heights(kernel: Kernel, data: Data, anew: bool = False) -> None:
    """Give every `HarmonicKernel` of a tree without a `reference_height` those of the readings.

    Kernels that have them already keep them, unless `anew`.
    """
    for term in terms(kernel):
        for leaf in term.leaves:
            own = leaf.kernel
            if not (isinstance(own, HarmonicKernel) and own.follows_data):
                continue
            if anew or own.heights.isnan().any():
                column = leaf.columns(data.num_inputs)[-1]
                lowest, highest = data.box[column]
                readings = torch.cat([part.x[:, column] for part in data.survey.sample])
                own.set_heights(lowest, readings.double().mean().item(), highest)
