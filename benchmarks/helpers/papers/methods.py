"""The methods of Le et al. 2013, Table 3: ridge regression with exact kernels and features."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from gpytorch.kernels import Kernel, PolynomialKernel, RBFKernel
from jaxtyping import Float
from sklearn.kernel_approximation import PolynomialCountSketch, RBFSampler
from torch import Tensor

import gp_orff
from helpers.papers.sets import Split

SUBSET, DEGREE, POWER, JITTER = 600, 10, 2, 1e-8
SCALES = {
    "RBF": (0.5, 1.0, 2.0, 4.0),
    "Bessel": (0.5, 1.0, 2.0, 4.0),
    "polynomial": (2.0, 4.0, 8.0, 16.0, 32.0),
}
NOISES = (1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0)  # variances, over that of f
Features = tuple[Float[Tensor, "N F"], Float[Tensor, "n F"]]


@dataclass(frozen=True)
class Family:
    """A kernel of the scaled inputs z = x / (s u), where u is a typical length of the data, and the
    scale s is tuned.

    Args:
        kernel: a function that returns the kernel for d inputs.
        unit: a function that returns u from the inputs.
        width: a function that returns the number of inputs of the kernel. Inputs are padded by
            zeros.
    """

    kernel: Callable[[int], Kernel]
    unit: Callable[[Float[Tensor, "N d"]], Float[Tensor, ""]]
    width: Callable[[int], int]

    def inputs(self, split: Split, scale: float) -> tuple[Kernel, Tensor, Tensor]:
        """Return the kernel, and the scaled inputs z for training and for the test."""
        width, unit = self.width(split.x.shape[-1]), scale * self.unit(split.x[:SUBSET])
        zeros = (0, width - split.x.shape[-1])
        z, zs = (torch.nn.functional.pad(x / unit, zeros) for x in (split.x, split.xs))
        return self.kernel(width).double().requires_grad_(False), z, zs


def _gaussian(num_inputs: int) -> Kernel:
    kernel = RBFKernel().double()
    kernel.lengthscale = 1.0
    return kernel


def _bessel(num_inputs: int) -> Kernel:
    """Return the Bessel kernel with the same curvature at zero as the Gaussian kernel."""
    kernel = gp_orff.BesselKernel(POWER, num_inputs).double()
    kernel.lengthscale = (POWER / (num_inputs + 2)) ** 0.5
    return kernel


def _polynomial(num_inputs: int) -> Kernel:
    kernel = PolynomialKernel(power=DEGREE).double()
    kernel.offset = 1.0
    return kernel


def _distance(x: Float[Tensor, "N d"]) -> Float[Tensor, ""]:
    return torch.pdist(x).median()


def _length(x: Float[Tensor, "N d"]) -> Float[Tensor, ""]:
    return x.square().sum(-1).mean().sqrt()


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


FAMILIES = {
    "RBF": Family(_gaussian, _distance, int),
    "Bessel": Family(_bessel, _distance, _power_of_two),
    "polynomial": Family(_polynomial, _length, int),
}


def _ours(
    rule, each: int, kernel: Kernel, z: Tensor, zs: Tensor, number: int, seed: int
) -> Features:
    """Return `number` features of a rule that has `each` features per frequency."""
    features = gp_orff.ORFFKernel(kernel, rule(number // each, seed=seed), num_dims=z.shape[-1])
    return features.features(z), features.features(zs)


def _by_sklearn(build, kernel: Kernel, z: Tensor, zs: Tensor, number: int, seed: int) -> Features:
    sampler = build(n_components=number, random_state=seed).fit(z.numpy())
    return tuple(torch.from_numpy(sampler.transform(own.numpy())) for own in (z, zs))


def _nystroem(kernel: Kernel, z: Tensor, zs: Tensor, number: int, seed: int) -> Features:
    """Return Nyström features from random training points, at most as many as there are.

    They are computed by a Cholesky factor. The symmetric root of scikit-learn's `Nystroem` gives
    the same regression, but would take most of the time of these benchmarks.
    """
    points = z[np.random.default_rng(seed).permutation(len(z))[:number]]
    gram = kernel(points).to_dense()
    gram.diagonal().add_(JITTER)
    factor = torch.linalg.cholesky(gram)
    columns = (kernel(points, own).to_dense() for own in (z, zs))
    return tuple(torch.linalg.solve_triangular(factor, own, upper=False).mT for own in columns)


BASE = partial(gp_orff.Fastfood, measure="base")  # for kernels of many inputs
SKETCH = partial(PolynomialCountSketch, gamma=1.0, degree=DEGREE, coef0=1)
METHODS: dict[str, tuple[str, Callable | None]] = {  # kernel, features or None
    "exact RBF": ("RBF", None),
    "Nystroem": ("RBF", _nystroem),
    "RBFSampler": ("RBF", partial(_by_sklearn, partial(RBFSampler, gamma=0.5))),
    "MonteCarlo": ("RBF", partial(_ours, gp_orff.MonteCarlo, 2)),
    "QuasiMonteCarlo": ("RBF", partial(_ours, gp_orff.QuasiMonteCarlo, 2)),
    "Fastfood": ("RBF", partial(_ours, gp_orff.Fastfood, 2)),
    "StructuredOrthogonal": ("RBF", partial(_ours, gp_orff.StructuredOrthogonal, 2)),
    "FourierFastfood": ("RBF", partial(_ours, gp_orff.FourierFastfood, 2)),
    "exact Bessel": ("Bessel", None),
    "Fastfood, Bessel": ("Bessel", partial(_ours, gp_orff.Fastfood, 2)),
    "exact polynomial": ("polynomial", None),
    "PolynomialCountSketch": ("polynomial", partial(_by_sklearn, SKETCH)),
    "Fastfood, polynomial": ("polynomial", partial(_ours, BASE, 1)),
}


@torch.no_grad()
def rmse(
    method: str, split: Split, scale: float, noises: Sequence[float], number: int, seed: int
) -> Iterator[float]:
    """Yield the RMSE of a component at the test points, for each noise."""
    name, features = METHODS[method]
    kernel, z, zs = FAMILIES[name].inputs(split, scale)
    if features is None:
        matrix, right, rows = kernel(z).to_dense(), split.y, kernel(zs, z).to_dense()
    else:
        phi, rows = features(kernel, z, zs, number, seed)
        if len(z) < phi.shape[-1]:
            matrix, right, rows = phi @ phi.mT, split.y, rows @ phi.mT
        else:
            matrix, right = phi.mT @ phi, phi.mT @ split.y
    variance = kernel(z, diag=True).mean()
    for noise in noises:
        system = matrix.clone()
        system.diagonal().add_(noise * variance)
        mean = rows @ torch.cholesky_solve(right, torch.linalg.cholesky(system))
        yield (mean - split.ys).square().mean().sqrt().item()


def tuned(method: str, split: Split, number: int, seed: int) -> dict[str, float]:
    """Return the scale and the noise with the smallest error on validation data, which are a fifth
    of the training data."""
    validation = split.validation()
    _, scale, noise = min(
        (error, scale, noise)
        for scale in SCALES[METHODS[method][0]]
        for noise, error in zip(
            NOISES, rmse(method, validation, scale, NOISES, number, seed), strict=True
        )
    )
    return {"scale": scale, "noise": noise}


def errors_of(
    method: str, splits: Sequence[Split], scale: float, noise: float, number: int
) -> list[float]:
    """Return the RMSE of each split. The number of the split is the seed of the features."""
    return [
        error
        for seed, split in enumerate(splits)
        for error in rmse(method, split, scale, [noise], number, seed)
    ]
