"""Where noise that outputs share starts."""

import math

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import normalize


def shared_factor(num_outputs: int, rank: int) -> Float[Tensor, "p r"]:
    """B with orthogonal columns of one length, and tr B Bᵀ = p; every column is a cosine.

    gpytorch draws B from the global random state.

    Example:
        >>> from gp_orff.models.fitting.noise.outputs import shared_factor
        >>> shared_factor(3, 1).squeeze(-1).tolist()
        [1.0, 1.0, 1.0]
    """
    phases = torch.outer(torch.arange(num_outputs) + 0.5, torch.arange(rank)) / num_outputs
    cosines = normalize(torch.cos(math.pi * phases.double()), dim=0)
    return math.sqrt(num_outputs / rank) * cosines
