"""Sources that a search on few readings has lost."""

import torch
from gpytorch.kernels import Kernel

from gp_orff.kernels.harmonic import HarmonicKernel
from gp_orff.models.fitting.coordinates import admissible

_LEAST = 0.01  # share of the largest variance


@torch.no_grad()
def restore(kernel: Kernel) -> None:
    """Give every depth of sources at least a hundredth of the largest variance of a depth.

    Where few readings do not tell two depths, a variance goes to zero, and its logarithm so far
    that no gradient brings it back on more readings.
    """
    for part in kernel.modules():
        if isinstance(part, HarmonicKernel) and part.raw_variances.requires_grad:
            least = _LEAST * part.variances.max()
            if (part.variances < least).any():
                part.variances = admissible(
                    part.raw_variances_constraint, part.variances.clamp_min(least)
                )
