"""The methods of Le et al. 2013, Table 3: exact kernels and features of them, all by one ridge."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from gpytorch.kernels import Kernel, PolynomialKernel, RBFKernel
from jaxtyping import Float
from sklearn.kernel_approximation import Nystroem, PolynomialCountSketch, RBFSampler
from torch import Tensor

import gp_orff
from helpers.papers.sets import Split

SUBSET, DEGREE, POWER = 600, 10, 2
NOISES = 10.0 ** np.arange(-6, 1.5, 0.5)
Features = tuple[Float[Tensor, "N F"], Float[Tensor, "n F"]]


@dataclass(frozen=True)
class Family:
    """A kernel of inputs z = x / (s u), u being a length of the data, and s to be chosen.

    Args:
        kernel: the kernel for d inputs.
        unit: u, from inputs.
        width: how many inputs the kernel takes; zeros are added.
    """

    kernel: Callable[[int], Kernel]
    unit: Callable[[Float[Tensor, "N d"]], Float[Tensor, ""]]
    width: Callable[[int], int]

    def inputs(self, split: Split, scale: float) -> tuple[Kernel, Tensor, Tensor]:
        """The kernel, and z of training and test."""
        width, unit = self.width(split.x.shape[-1]), scale * self.unit(split.x[:SUBSET])
        zeros = (0, width - split.x.shape[-1])
        z, zs = (torch.nn.functional.pad(x / unit, zeros) for x in (split.x, split.xs))
        return self.kernel(width).double().requires_grad_(False), z, zs


def _gaussian(num_inputs: int) -> Kernel:
    kernel = RBFKernel().double()
    kernel.lengthscale = 1.0
    return kernel


def _bessel(num_inputs: int) -> Kernel:
    """Near zero like the Gaussian one."""
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
SCALES = {name: 2.0 ** np.arange(-2, 4.5, 0.5) for name in FAMILIES}


def chosen(family: Family, split: Split, scales: np.ndarray) -> dict[str, float]:
    """Scale and noise (variance over that of f) of the largest evidence of the exact kernel.

    From `SUBSET` points; the variance of f is where the evidence is largest, too.
    """
    x, y = split.x[:SUBSET], split.y[:SUBSET]

    def evidences() -> Iterator[tuple[float, float, float]]:
        for scale in scales:
            kernel, z, _ = family.inputs(Split(x, y, x[:1], y[:1]), scale)
            gram = kernel(z).to_dense()
            values, vectors = torch.linalg.eigh(gram / gram.diagonal().mean())
            squares = (vectors.mT @ y).square()
            for noise in NOISES:
                total = (values.clamp_min(0) + noise).unsqueeze(-1)
                variance = (squares / total).mean()
                yield (
                    -float(y.numel() * variance.log() + y.shape[-1] * total.log().sum()),
                    float(scale),
                    float(noise),
                )

    _, scale, noise = max(evidences())
    return {"scale": scale, "noise": noise}


def _ours(
    rule, each: int, kernel: Kernel, z: Tensor, zs: Tensor, number: int, seed: int
) -> Features:
    """`number` features, so many for `each` frequency."""
    features = gp_orff.ORFFKernel(kernel, rule(number // each, seed=seed), num_dims=z.shape[-1])
    return features.features(z), features.features(zs)


def _by_sklearn(build, kernel: Kernel, z: Tensor, zs: Tensor, number: int, seed: int) -> Features:
    sampler = build(n_components=number, random_state=seed).fit(z.numpy())
    return tuple(torch.from_numpy(sampler.transform(own.numpy())) for own in (z, zs))


def _nystroem(kernel: Kernel, z: Tensor, zs: Tensor, number: int, seed: int) -> Features:
    """No more components than points."""
    build = partial(Nystroem, kernel="rbf", gamma=0.5)
    return _by_sklearn(build, kernel, z, zs, min(number, len(z)), seed)


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
def rmse(method: str, split: Split, choice: dict[str, float], number: int, seed: int) -> float:
    """On the points of the test, of a number."""
    name, features = METHODS[method]
    kernel, z, zs = FAMILIES[name].inputs(split, choice["scale"])
    penalty = choice["noise"] * kernel(z, diag=True).mean().item()
    if features is None:
        gram, cross = kernel(z).to_dense(), kernel(zs, z).to_dense()
        mean = cross @ _solved(gram, split.y, penalty)
    else:
        phi, phis = features(kernel, z, zs, number, seed)
        if len(z) < phi.shape[-1]:
            mean = phis @ (phi.mT @ _solved(phi @ phi.mT, split.y, penalty))
        else:
            mean = phis @ _solved(phi.mT @ phi, phi.mT @ split.y, penalty)
    return (mean - split.ys).square().mean().sqrt().item()


def _solved(matrix: Tensor, right: Tensor, penalty: float) -> Tensor:
    matrix.diagonal().add_(penalty)
    return torch.cholesky_solve(right, torch.linalg.cholesky(matrix))
