"""The largest error of an approximate kernel over a fixed set of lags."""

import torch
from gpytorch.kernels import Kernel
from jaxtyping import Float
from torch import Tensor

import gp_orff


def points(number: int, num_dims: int) -> Float[Tensor, "N d"]:
    """Return fixed random points of [−1, 1]^d, followed by its corners."""
    generator = torch.Generator().manual_seed(0)
    inside = 2 * torch.rand(number, num_dims, generator=generator, dtype=torch.float64) - 1
    ends = torch.tensor([-1.0, 1.0], dtype=torch.float64)
    return torch.cat([inside, torch.cartesian_prod(*[ends] * num_dims)])


class Errors:
    """The errors K̃(x, z) − K(x, z) for all pairs of some points, including pairs of equal points.

    Args:
        kernel: K.
        points: x and z.
    """

    def __init__(self, kernel: Kernel, points: Float[Tensor, "N d"]):
        self.kernel, self.points = kernel, points
        self._pairs = torch.triu_indices(len(points), len(points))
        self._exact = self._blocks(kernel)
        self.norm = torch.linalg.matrix_norm(self._exact[0], 2).item()  # ‖K(x, x)‖
        self.frobenius_norm = torch.linalg.matrix_norm(self._exact[0]).item()

    def of(self, rule) -> tuple[float, float]:
        """Return the largest error with the features of a rule, in the spectral norm and in the
        Frobenius norm."""
        return self.of_features(gp_orff.ORFFKernel(self.kernel, rule))

    def of_features(self, features: gp_orff.ORFFKernel) -> tuple[float, float]:
        error = self._blocks(features) - self._exact
        spectral = torch.linalg.eigvalsh(error).abs().max().item()
        return spectral, torch.linalg.matrix_norm(error).max().item()

    def _blocks(self, kernel: Kernel) -> Float[Tensor, "n p p"]:
        with torch.no_grad():
            dense = kernel(self.points).to_dense()
        blocks = dense.unflatten(0, (len(self.points), -1)).unflatten(-1, (len(self.points), -1))
        rows, columns = self._pairs
        return blocks.permute(0, 2, 1, 3)[rows, columns]
