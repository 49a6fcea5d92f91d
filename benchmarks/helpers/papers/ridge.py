"""Ridge regression of a planar field with an exact kernel and with its features."""

from collections.abc import Callable

import torch
from gpytorch.kernels import Kernel
from jaxtyping import Float
from torch import Tensor

from gp_orff.regression import ORFFRidge
from helpers.papers.five_gaussians import Sample

ROWS = 1000  # points of a block of the Gram matrix, whose computation takes four times its memory
Predict = Callable[[Float[Tensor, "n 2"]], Float[Tensor, "n 2"]]


def exact(kernel: Kernel, penalty: float, sample: Sample) -> Predict:
    """Return the function K(·, x) (K(x, x) + αI)⁻¹ y, computed by a Cholesky factor."""
    gram = torch.cat([kernel(some, sample.x).to_dense() for some in sample.x.split(ROWS)])
    gram.diagonal().add_(penalty)
    y = sample.y.reshape(len(gram), -1)
    weights = torch.cholesky_solve(y, torch.linalg.cholesky(gram))
    return lambda x: (kernel(x, sample.x).to_dense() @ weights).reshape(-1, 2)


def by_features(kernel: Kernel, rule, penalty: float, sample: Sample) -> Predict:
    model = ORFFRidge(kernel, rule, alpha=penalty, solver="cholesky").fit(sample.x, sample.y)
    return lambda x: torch.from_numpy(model.predict(x))
