"""Starting values for training: hyperparameters of the data's own size.

Everything here scales with the units of x and y, so that a fit does not depend on them.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import singledispatch

import numpy as np
import torch
from gpytorch.kernels import (
    AdditiveKernel,
    ConstantKernel,
    Kernel,
    LCMKernel,
    MultitaskKernel,
    ProductKernel,
    ScaleKernel,
    SpectralMixtureKernel,
)
from gpytorch.likelihoods import GaussianLikelihood, Likelihood, MultitaskGaussianLikelihood
from jaxtyping import Float, Int
from torch import Tensor

from gp_orff.data.observations import Observations
from gp_orff.data.survey import Distances
from gp_orff.kernels.closed_form import at_zero
from gp_orff.kernels.tree import Leaf, Term, terms
from gp_orff.models.fitting.coordinates import admissible

_SHARES = (0.4, 0.15, 0.05)  # of the extent of the bulk of the data: lengthscales to start from
_NEIGHBOURS, _SHORTER = 2.0, 5  # shorter ones, down to so many distances of neighbours; how many
_MINOR = 0.01  # of the variance, that other terms of a sum have where one dominates
_NOISE = 0.1  # share of the data's variance
_TINY = torch.finfo(torch.float64).tiny


@dataclass(frozen=True)
class Start:
    """Where a search may begin."""

    share: float  # of the extent of the bulk of the data, that lengthscales are
    dominant: int | None = None  # the varying term of a sum that has nearly all of the variance

    def __str__(self) -> str:
        only = "" if self.dominant is None else f", term {self.dominant + 1} of the sum dominant"
        return f"from {self.share:.2g} of the extent{only}"


def starts(kernel: Kernel, distances: Distances) -> list[Start]:
    """Lengthscales from large to small, down to what neighbours could tell; for a sum, also each
    term almost alone."""
    shares = list(_SHARES)
    leaf = max((leaf for t in terms(kernel) for leaf in t.leaves), key=_breadth, default=None)
    if leaf is not None:
        dims = leaf.active_dims or range(distances.points.shape[-1])
        size, apart = distances.bulk[list(dims)].max(), distances.typical(dims)
        while shares[-1] * size > 3 * _NEIGHBOURS * apart > 0 and len(shares) < 3 + _SHORTER:
            shares.append(shares[-1] / 3)
    varying = len(_varying(kernel))
    dominant = [None, *range(varying)] if varying > 1 else [None]
    return [Start(share, which) for share in shares for which in dominant]


def _breadth(leaf: Leaf) -> float:
    return math.inf if leaf.active_dims is None else len(leaf.active_dims)


def _varying(kernel: Kernel) -> list[Kernel]:
    """The terms of a sum that are no constants."""
    return [part for part in _summands(kernel) if any(term.leaves for term in terms(part))]


@torch.no_grad()
def start(
    kernel: Kernel,
    likelihoods: Mapping[str, Likelihood],
    observations: Sequence[Observations],
    distances: Distances,
    where: Start,
) -> None:
    """Set lengthscales to a share of the data's extent, variances to that of the data."""
    variance, level = _sizes_of(observations)
    bulk = torch.from_numpy(distances.bulk).to(next(kernel.parameters()).device)
    for term in terms(kernel):
        for leaf in term.leaves:
            dims = list(leaf.active_dims or range(len(bulk)))
            sizes = where.share * _sizes(bulk[dims], isotropic=term.factor.degree > 0)
            _set_scales(leaf.kernel, sizes.clamp_min(distances.typical(dims)))
    varying = _varying(kernel)
    shares = [1 / max(len(varying), 1)] * len(varying)
    if where.dominant is not None:
        shares = [_MINOR] * len(varying)
        shares[where.dominant] = 1.0
    wanted = {own: share * variance for own, share in zip(varying, shares, strict=True)}
    for part in _summands(kernel):
        factor = wanted.get(part, level) / max(_variance(terms(part)), _TINY)
        rescale(part, factor)
    for label, likelihood in likelihoods.items():
        own = [part for part in observations if part.key.label == label]
        start_noise(likelihood, _NOISE * variance * _typical_weight(own))


def _sizes_of(observations: Sequence[Observations]) -> tuple[float, float]:
    """Variance and mean square of the numbers read."""
    counts = torch.tensor([own.y.numel() for own in observations], dtype=torch.float64)
    variances = torch.stack([own.y.var(dim=0, correction=0).mean() for own in observations])
    squares = torch.stack([own.y.mean(dim=0).square().mean() for own in observations])
    shares = (counts / counts.sum()).to(variances)
    variance = (shares * variances).sum().item()
    level = (shares * squares).sum().item() + variance
    if not variance > 0:
        variance = level if level > 0 else 1.0
    return variance, level


def _typical_weight(observations: Sequence[Observations]) -> float:
    """The geometric mean, which known variances that spread over decades do not pull away."""
    total = sum(own.weight.log().sum().item() for own in observations if own.weight is not None)
    return math.exp(total / (sum(map(len, observations)) or 1))


def _sizes(extent: Float[Tensor, "d"], isotropic: bool) -> Float[Tensor, "d"]:
    """Of each axis; the largest for the axes of a field, which are one space, and for flat ones."""
    largest = extent.amax() if extent.amax() > 0 else torch.ones_like(extent.amax())
    return torch.where((extent > 0) & (not isotropic), extent, largest)


def _set_scales(kernel: Kernel, wanted: Float[Tensor, "d"]) -> None:
    """Lengthscales, one for each axis or the largest; of a mixture, those of its components."""
    if isinstance(kernel, SpectralMixtureKernel):
        if kernel.raw_mixture_scales.requires_grad:
            kernel.mixture_scales = (0.5 / math.pi / wanted).expand_as(kernel.mixture_scales)
        if kernel.raw_mixture_means.requires_grad:
            steps = torch.arange(kernel.num_mixtures).to(wanted) + 0.5
            means = steps.reshape(-1, 1, 1) / kernel.num_mixtures / wanted
            kernel.mixture_means = means.expand_as(kernel.mixture_means)
    elif kernel.has_lengthscale and kernel.raw_lengthscale.requires_grad:
        own = wanted if kernel.ard_num_dims else wanted.amax()
        own = own.expand_as(kernel.lengthscale)
        kernel.lengthscale = admissible(kernel.raw_lengthscale_constraint, own)


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
    if not (tasks.covar_factor.requires_grad and tasks.raw_var.requires_grad):
        return rescale(kernel.data_covar_module, factor)
    tasks.covar_factor.data.mul_(math.sqrt(factor))
    tasks.var = admissible(tasks.raw_var_constraint, tasks.var * factor)
    return True


@rescale.register
def _(kernel: LCMKernel, factor: float) -> bool:
    return _rescale_all(kernel.covar_module_list, factor)


@rescale.register
def _(kernel: AdditiveKernel, factor: float) -> bool:
    return _rescale_all(kernel.kernels, factor)


@rescale.register
def _(kernel: ProductKernel, factor: float) -> bool:
    return any(rescale(part, factor) for part in kernel.kernels)


@rescale.register
def _(kernel: SpectralMixtureKernel, factor: float) -> bool:
    if not kernel.raw_mixture_weights.requires_grad:
        return False
    power = 1 / kernel.ard_num_dims  # k(0) = (Σw)^d
    kernel.mixture_weights = kernel.mixture_weights * factor**power
    return True


def _rescale_all(parts: Iterable[Kernel], factor: float) -> bool:
    """A factor for every term of a sum; all of them need a scale."""
    scaled = [rescale(part, factor) for part in parts]
    return all(scaled)


def with_amplitude(kernel: Kernel) -> Kernel:
    """The kernel, with a scale around every term that has no amplitude of its own, frozen or not.

    Without one, the variance of a field would follow from its lengthscale.
    """
    if type(kernel) is AdditiveKernel:
        parts = [with_amplitude(part) for part in kernel.kernels]
        changed = any(a is not b for a, b in zip(parts, kernel.kernels, strict=True))
        return AdditiveKernel(*parts) if changed else kernel
    known = (ScaleKernel, ConstantKernel, MultitaskKernel, LCMKernel, SpectralMixtureKernel)
    if any(isinstance(module, known) for module in kernel.modules()) or rescale(kernel, 1.0):
        return kernel
    scaled = ScaleKernel(kernel, batch_shape=kernel.batch_shape)
    scaled.outputscale = torch.ones_like(scaled.outputscale)
    return scaled


def subset(x: Float[Tensor, "N d"], size: int, seed: int = 0) -> Int[Tensor, "n"]:
    """Points that show every scale: around random centres, neighbours at geometric ranks."""
    if len(x) <= size:
        return torch.arange(len(x), device=x.device)
    rng = np.random.default_rng(seed)
    extent = (x.amax(0) - x.amin(0)).max().clamp_min(torch.finfo(x.dtype).tiny)
    ranks = np.unique(np.geomspace(1, len(x), 25).astype(int)) - 1
    order, chosen = rng.permutation(len(x)), {}
    for centre in order[: 4 * size // len(ranks)]:
        distance = ((x - x[centre]) / extent).square().sum(-1)
        near = torch.argsort(distance)[torch.from_numpy(ranks)]
        chosen.update(dict.fromkeys(near.tolist()))
    chosen.update(dict.fromkeys(order.tolist()))  # repeated places give few neighbours
    return torch.tensor(sorted(list(chosen)[:size]), device=x.device)


@singledispatch
def scale_noise(likelihood: Likelihood, factor: float) -> None:
    """Multiply the noise; likelihoods that are not known keep theirs."""


@scale_noise.register
def _(likelihood: GaussianLikelihood, factor: float) -> None:
    start_noise(likelihood, factor * likelihood.noise.mean().item())


@scale_noise.register
def _(likelihood: MultitaskGaussianLikelihood, factor: float) -> None:
    with torch.no_grad():
        if likelihood.has_global_noise and likelihood.raw_noise.requires_grad:
            wanted = factor * likelihood.noise
            likelihood.noise = admissible(likelihood.raw_noise_constraint, wanted)
        if likelihood.has_task_noise and likelihood.rank:
            if likelihood.task_noise_covar_factor.requires_grad:
                likelihood.task_noise_covar_factor.mul_(factor**0.5)
        elif likelihood.has_task_noise and likelihood.raw_task_noises.requires_grad:
            wanted = factor * likelihood.task_noises
            likelihood.task_noises = admissible(likelihood.raw_task_noises_constraint, wanted)


@singledispatch
def start_noise(likelihood: Likelihood, variance: float) -> None:
    """Set the noise variance before training; likelihoods that are not known keep theirs."""


@start_noise.register
def _(likelihood: GaussianLikelihood, variance: float) -> None:
    if likelihood.raw_noise.requires_grad:
        wanted = torch.full_like(likelihood.noise, variance)
        likelihood.noise = admissible(likelihood.noise_covar.raw_noise_constraint, wanted)


@start_noise.register
def _(likelihood: MultitaskGaussianLikelihood, variance: float) -> None:
    parts = likelihood.has_global_noise + likelihood.has_task_noise
    if likelihood.has_global_noise and likelihood.raw_noise.requires_grad:
        wanted = torch.full_like(likelihood.noise, variance / parts)
        likelihood.noise = admissible(likelihood.raw_noise_constraint, wanted)
    if not likelihood.has_task_noise:
        return
    if not likelihood.rank and likelihood.raw_task_noises.requires_grad:
        wanted = torch.full_like(likelihood.task_noises, variance / parts)
        likelihood.task_noises = admissible(likelihood.raw_task_noises_constraint, wanted)
    if likelihood.rank and likelihood.task_noise_covar_factor.requires_grad:
        factor = likelihood.task_noise_covar_factor.data
        size = factor.square().sum(-1).mean()
        factor.mul_((variance / parts / size).sqrt())
