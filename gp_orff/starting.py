"""Starting values for training: hyperparameters of the data's own size.

Everything here scales with the units of x and y, so that a fit does not depend on them.
"""

import math
from collections.abc import Iterable
from functools import singledispatch

import numpy as np
import torch
from gpytorch.kernels import (
    AdditiveKernel,
    ConstantKernel,
    Kernel,
    LCMKernel,
    MultitaskKernel,
    ScaleKernel,
    SpectralMixtureKernel,
)
from gpytorch.likelihoods import Likelihood
from jaxtyping import Float, Int
from torch import Tensor

from gp_orff.coordinates import admissible
from gp_orff.noise import start_noise
from gp_orff.terms import Term, terms
from gp_orff.truncation import at_zero

LENGTHSCALES = (0.05, 0.15, 0.4)  # shares of the data's extent
_NOISE = 0.1  # share of the data's variance
_ENOUGH = 20_000  # points to look for neighbours among


@torch.no_grad()
def start(
    kernel: Kernel,
    likelihood: Likelihood,
    x: Float[Tensor, "N d"],
    y: Float[Tensor, "N p"],
    share: float,
) -> None:
    """Set lengthscales to a share of the data's extent, variances to that of the data."""
    variance = y.var(dim=0, correction=0).mean().item()
    level = y.mean(dim=0).square().mean().item() + variance
    if not variance > 0:
        variance = level if level > 0 else 1.0
    extent = x.amax(0) - x.amin(0)
    for term in terms(kernel):
        for leaf in term.leaves:
            seen = extent if leaf.active_dims is None else extent[list(leaf.active_dims)]
            size = seen.max().item() or 1.0
            if leaf.kernel.has_lengthscale and leaf.kernel.raw_lengthscale.requires_grad:
                wanted = torch.full_like(leaf.kernel.lengthscale, share * size)
                constraint = leaf.kernel.raw_lengthscale_constraint
                leaf.kernel.lengthscale = admissible(constraint, wanted)
    parts = _summands(kernel)
    varying = sum(any(term.leaves for term in terms(part)) for part in parts) or 1
    for part in parts:
        own = terms(part)
        target = variance / varying if any(term.leaves for term in own) else level
        rescale(part, target / max(_variance(own), torch.finfo(torch.float64).tiny))
    start_noise(likelihood, _NOISE * variance)


def _summands(kernel: Kernel) -> list[Kernel]:
    if isinstance(kernel, AdditiveKernel):
        return [part for own in kernel.kernels for part in _summands(own)]
    return [kernel]


def _variance(own: list[Term]) -> float:
    """tr K(0) / p."""
    return sum(at_zero(t).diagonal(dim1=-1, dim2=-2).mean().item() for t in own)


@singledispatch
def rescale(kernel: Kernel, factor: float) -> bool:
    """Multiply a kernel's variance, if it has a trainable scale: whether it had.

    Register kernels of your own that have one.
    """
    return any(rescale(part, factor) for part in kernel.children() if isinstance(part, Kernel))


@rescale.register
def _(kernel: ScaleKernel, factor: float) -> bool:
    if not kernel.raw_outputscale.requires_grad:
        return rescale(kernel.base_kernel, factor)
    wanted = kernel.outputscale * factor
    kernel.outputscale = admissible(kernel.raw_outputscale_constraint, wanted)
    return True


@rescale.register
def _(kernel: ConstantKernel, factor: float) -> bool:
    if kernel.raw_constant.requires_grad:
        wanted = kernel.constant * factor
        kernel.constant = admissible(kernel.raw_constant_constraint, wanted)
    return kernel.raw_constant.requires_grad


@rescale.register
def _(kernel: MultitaskKernel, factor: float) -> bool:
    tasks = kernel.task_covar_module
    if not tasks.covar_factor.requires_grad:
        return rescale(kernel.data_covar_module, factor)
    tasks.covar_factor.data.mul_(math.sqrt(factor))
    tasks.var = tasks.var * factor
    return True


@rescale.register
def _(kernel: LCMKernel, factor: float) -> bool:
    return _rescale_all(kernel.covar_module_list, factor)


@rescale.register
def _(kernel: AdditiveKernel, factor: float) -> bool:
    return _rescale_all(kernel.kernels, factor)


@rescale.register
def _(kernel: SpectralMixtureKernel, factor: float) -> bool:
    power = 1 / kernel.ard_num_dims  # k(0) = (Σw)^d
    kernel.mixture_weights = kernel.mixture_weights * factor**power
    return True


def _rescale_all(parts: Iterable[Kernel], factor: float) -> bool:
    """A factor for every term of a sum; all of them need a scale."""
    scaled = [rescale(part, factor) for part in parts]
    return all(scaled)


def subset(x: Float[Tensor, "N d"], size: int, seed: int = 0) -> Int[Tensor, "n"]:
    """Points that show every scale: around random centres, neighbours at geometric ranks."""
    if len(x) <= size:
        return torch.arange(len(x), device=x.device)
    rng = np.random.default_rng(seed)
    if len(x) > _ENOUGH:
        thinned = torch.from_numpy(rng.choice(len(x), _ENOUGH, replace=False)).to(x.device)
        return thinned[subset(x[thinned], size, seed)]
    extent = (x.amax(0) - x.amin(0)).max().clamp_min(torch.finfo(x.dtype).tiny)
    ranks = np.unique(np.geomspace(1, len(x), 25).astype(int)) - 1
    chosen: set[int] = set()
    while len(chosen) < size:
        centre = int(rng.integers(len(x)))
        distance = ((x - x[centre]) / extent).square().sum(-1)
        near = torch.argsort(distance)[torch.from_numpy(ranks)]
        chosen.update(near.tolist()[: size - len(chosen)] or [centre])
    return torch.tensor(sorted(chosen), device=x.device)
