"""Inference by the features of a large frequency grid, without their matrix."""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from gpytorch.kernels import Kernel

from gp_orff.data.dataset import Data
from gp_orff.features.assemble import num_features
from gp_orff.features.frequencies.auto import MOST_DENSE
from gp_orff.features.frequencies.rule import Draw
from gp_orff.features.lattice import LatticeColumns
from gp_orff.inference.conditioning.features import FeatureInference
from gp_orff.inference.iterative import Accuracy, Iterative

_MOST_NUMBERS = 2**27  # of a matrix of features, 1 GiB
_MOST_PRODUCTS = 1.5e11  # of the covariance that follows from it: 10 s on one core
_LARGEST = 20_000  # features: their matrix takes 3 GiB, its factorisation about 40 s on two cores
_MATRICES = 5  # of F² numbers, which variances at many points need at a time
_USUAL_MEMORY = 2**33  # bytes, where the system does not tell


@dataclass(frozen=True)
class IterativeInference(FeatureInference):
    """Inference by features on a lattice, whose memory grows with F and not with F².

    The mean of the weights and variances at chosen points are solutions of linear systems, to the
    tolerances of `accuracy`; log|A| is estimated, and the evidence has its standard error.

    Args:
        data, draws, known: as for `FeatureInference`; the frequencies of a grid.
        accuracy: tolerances, and numbers of random vectors.

    Example:
        >>> import gp_orff, torch
        >>> from gp_orff.data.dataset import Dataset
        >>> from gp_orff.data.reading import Options, read
        >>> from gp_orff.features.assemble import draw
        >>> from gp_orff.inference.conditioning import IterativeInference
        >>> generator = torch.Generator().manual_seed(0)
        >>> x = torch.rand(400, 2, generator=generator, dtype=torch.float64)
        >>> data = Dataset.in_memory(read(x, torch.sin(9 * x), 2, Options()))
        >>> kernel = gp_orff.CurlFreeKernel(num_dims=2).double()
        >>> draws = draw(kernel, gp_orff.Grid.for_data(x))
        >>> noises = {"": 0.01 * torch.eye(2, dtype=torch.float64)}
        >>> posterior = IterativeInference(data, draws).posterior(kernel, noises, None)
        >>> posterior.distribution.mean(x).shape
        torch.Size([400, 2])
    """

    accuracy: Accuracy = field(default_factory=Accuracy)

    def prefers_dual_algebra(self, expansion) -> bool:
        return False

    def normal_equations(self, expansion, groups, rows):
        return Iterative(expansion.general(), groups, rows, self.accuracy)


@torch.no_grad()
def feature_inference(data: Data, draws: Sequence[Draw], kernel: Kernel) -> FeatureInference:
    """Inference by features: by factorisations where their matrices are small, else by iterations.

    Iterations take a frequency grid of more than 20 000 features, or as many as half of the memory
    holds, but at least 8192; and more values than a matrix with a row for each of them could hold,
    or than their covariance could be made of it in about 10 s.

    Raises:
        ValueError: that is so with readings along tracks, for which there are no iterations.
    """
    features = num_features(kernel, draws)
    on_grid = isinstance(draws[0].shared_columns(), LatticeColumns)
    rows = data.num_values if data.revisitable else float("inf")
    written_out = rows <= MOST_DENSE and rows * features <= _MOST_NUMBERS
    if not data.tracks:  # for which there is nothing else
        written_out = written_out and rows**2 * features <= _MOST_PRODUCTS
    most = most_factorised(next(kernel.parameters()).device)
    dense = not on_grid or features <= most or written_out
    if data.tracks and not dense:
        raise ValueError(
            f"expected at most {most} features for {rows:.0f} numbers along tracks, got "
            f"{features}; give max_features={most}, or a coarser grid"
        )
    return (FeatureInference if dense else IterativeInference)(data, draws)


def most_factorised(device: torch.device) -> int:
    """The largest number of features whose normal equations are factorised."""
    affordable = math.isqrt(_memory(device) // (2 * 8 * _MATRICES))
    return max(MOST_DENSE, min(affordable, _LARGEST))


def _memory(device: torch.device) -> int:
    """The bytes of memory of a device."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # not every system has these
        return _USUAL_MEMORY
