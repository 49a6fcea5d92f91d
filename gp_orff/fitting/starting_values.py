"""Starting values of hyperparameters, from the data."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import singledispatch

import numpy as np
import torch
from gpytorch.kernels import (
    AdditiveKernel,
    ConstantKernel,
    IndexKernel,
    Kernel,
    LCMKernel,
    MultitaskKernel,
    PeriodicKernel,
    ProductKernel,
    ScaleKernel,
    SpectralMixtureKernel,
)
from gpytorch.likelihoods import GaussianLikelihood, Likelihood, MultitaskGaussianLikelihood
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import normalize

from gp_orff.data.observations import Observations
from gp_orff.data.survey import Distances
from gp_orff.fitting.coordinates import Coordinates, set_trained
from gp_orff.fitting.delays import Delay, starting_delays
from gp_orff.inference.price import NEGLIGIBLE
from gp_orff.kernels.base import FieldKernel, parts_of
from gp_orff.kernels.derivatives import at_zero
from gp_orff.kernels.separable import SeparableKernel
from gp_orff.kernels.tree import Term, terms

# The starting value of noise that is correlated between outputs.


def shared_factor(num_outputs: int, rank: int) -> Float[Tensor, "p r"]:
    """Return B of shape (p, r) with orthogonal columns of equal length, and tr B Bᵀ = p.

    Every column is a cosine. (gpytorch draws B from the global random state.)

    Args:
        num_outputs: p, the number of outputs.
        rank: r, the number of columns.

    Example:
        >>> from gp_orff.fitting.starting_values import shared_factor
        >>> shared_factor(3, 1).squeeze(-1).tolist()
        [1.0, 1.0, 1.0]
    """
    phases = torch.outer(torch.arange(num_outputs) + 0.5, torch.arange(rank)) / num_outputs
    cosines = normalize(torch.cos(math.pi * phases.double()), dim=0)
    return math.sqrt(num_outputs / rank) * cosines


# Starting values for training: lengthscales, variances and noise, in the units of the data.
#
# The evidence has several maxima in the lengthscale: one at a long lengthscale, which explains much
# of the data as noise, and one at a short lengthscale, which explains noise as field. Searches
# therefore start from several lengthscales, from 0.4 of the extent of most points down to twice the
# distance between neighbours. In a sum of kernels, each term dominates in one start, as a search
# rarely moves variance from one term to another. At each start, the field has the variance of the
# data, and the noise has a tenth of this variance.


SHARES = (0.4, 0.15, 0.05)  # starting lengthscales over the extent of most points
_TINY = torch.finfo(torch.float64).tiny


@dataclass(frozen=True)
class Start:
    """The starting point of a search."""

    share: float  # lengthscale over the extent of most points
    dominant: int | None = None  # the varying term with nearly all of the variance
    delays: Sequence[Delay] = ()

    def __str__(self) -> str:
        term = "" if self.dominant is None else f", term {self.dominant + 1} of the sum dominant"
        return f"from {self.share:.2g} of the extent{term}"


def starts(
    kernel: Kernel, distances: Distances, observations: Sequence[Observations] = ()
) -> list[Start]:
    """Return starting points in order of decreasing lengthscales.

    The first lengthscales are fixed fractions of the extent of the points. Shorter ones follow in
    equal ratios, as long as they exceed twice the distance between neighbours.

    A sum of kernels has further starting points, with nearly all of the variance in one term.
    Outputs with delays also start from the delays with the largest cross-covariance.
    """
    leaves = [leaf for term in terms(kernel) for leaf in term.leaves]
    wide = leaves and all(getattr(leaf.kernel, "is_learned", False) for leaf in leaves)
    # learned spectra have eight times longer and shorter lengths: every other start suffices
    shares, ratio = ([SHARES[1]], 9.0) if wide else ([*SHARES], 3.0)
    inputs = [list(leaf.active_dims or range(distances.points.shape[-1])) for leaf in leaves]
    varying = [dims for dims in inputs if distances.bulk[dims].max() > 0]
    if varying:
        dims = max(varying, key=len)
        extent, spacing = distances.bulk[dims].max(), distances.typical(dims)
        shortest = 2 * spacing
        while shares[-1] * extent > ratio * shortest > 0:
            shares.append(shares[-1] / ratio)
    count = len(_varying_terms(kernel))
    dominant = [None, *range(count)] if count > 1 else [None]
    bulk = distances.bulk
    return [
        Start(share, term, delays)
        for share in shares
        for delays in starting_delays(kernel, observations, bulk, share * bulk.max())
        for term in dominant
    ]


def _varying_terms(kernel: Kernel) -> list[Kernel]:
    """The terms of a sum that are not constant."""
    return [part for part in all_summands(kernel) if any(term.leaves for term in terms(part))]


@torch.no_grad()
def start(
    kernel: Kernel,
    likelihoods: Mapping[str, Likelihood],
    observations: Sequence[Observations],
    distances: Distances,
    where: Start,
) -> None:
    """Set lengthscales, delays and variances to starting values.

    Each lengthscale is `where.share` times the extent of the points, but not below the typical
    distance between neighbours. The extent is `distances.bulk`, which a few distant points do not
    change. The field gets the variance of the data, and the noise gets a tenth of this variance.
    In a sum of kernels, the terms get equal parts of the variance of the field, unless
    `where.dominant` selects one term.

    Args:
        kernel: the kernel, which is changed in place.
        likelihoods: the likelihood of every group, by label. They are changed in place.
        observations: the observations of a subset.
        distances: the distances between the points of a sample.
        where: the starting point.
    """
    variance, mean_square = moments(observations)
    bulk = torch.from_numpy(distances.bulk).to(next(kernel.parameters()).device)
    for term in terms(kernel):
        for leaf in term.leaves:
            dims = list(leaf.active_dims or range(len(bulk)))
            lengths = where.share * axis_extents(bulk[dims], isotropic=term.factor.degree > 0)
            scales = _scales(leaf.kernel, lengths.clamp_min(distances.typical(dims)))
            for name, values in scales.items():
                set_trained(leaf.kernel, name, values)
    _start_outputs(kernel, observations)
    for delay in where.delays:
        delay.set()
    varying = _varying_terms(kernel)
    shares = [1 / max(len(varying), 1)] * len(varying)
    if where.dominant is not None:
        shares = [NEGLIGIBLE**2] * len(varying)
        shares[where.dominant] = 1.0
    variances = {part: share * variance for part, share in zip(varying, shares, strict=True)}
    for part in all_summands(kernel):
        factor = variances.get(part, mean_square) / max(_variance(terms(part)), _TINY)
        rescale(part, factor)
    for label, likelihood in likelihoods.items():
        groups = [group for group in observations if group.key.label == label]
        start_noise(likelihood, NEGLIGIBLE * variance * mean_weight(groups))


def _start_outputs(kernel: Kernel, observations: Sequence[Observations]) -> None:
    """Set the output covariances B Bᵀ + diag v of gpytorch to principal components of the data.

    gpytorch draws B from the global random state. The kernels of a sum get different components.
    """
    learned = [p for p in parts_of(kernel, IndexKernel) if p.covar_factor.requires_grad]
    for number, part in enumerate(learned):
        p, rank = part.covar_factor.shape[-2:]
        whole = [group.y for group in observations if group.pattern.complete]
        covariance = torch.cov(torch.cat(whole).mT, correction=0).reshape(p, p) if whole else None
        if covariance is None or not covariance.trace() > 0:
            covariance = torch.eye(p, dtype=torch.float64)
        values, vectors = torch.linalg.eigh(covariance / covariance.trace() * p)
        order = (p - 1 - torch.arange(rank) - number * rank) % p  # the largest first
        root = vectors[:, order] * values[order].clamp_min(NEGLIGIBLE**2).sqrt()
        part.covar_factor.data.copy_(root.expand_as(part.covar_factor))
        rest = covariance.diagonal() / covariance.trace() * p - root.square().sum(-1)
        set_trained(part, "var", rest.clamp_min(NEGLIGIBLE))


@torch.no_grad()
def with_common_lengths(kernel: Kernel, coordinates: Coordinates) -> list[Float[np.ndarray, "k"]]:
    """Return starting points of a search, one for each minor term of a sum of kernels.

    A minor term has less than a tenth of the variance of the sum. At its starting point, its
    lengthscale is the geometric mean of the lengthscales of the other terms. Its variance does not
    change.

    A subset of the data may not determine the lengthscale of a minor term. A search on the subset
    then ends at an arbitrary lengthscale, and a search on all data may not leave it.
    """
    present, summands, candidates = coordinates.get(), terms(kernel), []
    scales = {  # the innermost ScaleKernel of each kernel
        leaf: scaled
        for scaled in parts_of(kernel, ScaleKernel)
        for leaf in parts_of(scaled, Kernel)
        if leaf.has_lengthscale and leaf.raw_lengthscale.requires_grad
    }
    lengths = {leaf: leaf.lengthscale.log() for leaf in scales}

    def variance_of(leaf: Kernel, summands: list[Term]) -> float:
        return _variance([t for t in summands if any(leaf is part.kernel for part in t.leaves)])

    for leaf, scaled in scales.items():
        others = [log for other, log in lengths.items() if other is not leaf]
        others = [log for log in others if log.shape == lengths[leaf].shape]
        variance = variance_of(leaf, summands)
        if others and variance < NEGLIGIBLE * _variance(summands):
            set_trained(leaf, "lengthscale", torch.stack(others).mean(0).exp())
            rescale(scaled, variance / max(variance_of(leaf, terms(kernel)), _TINY))
            candidates.append(coordinates.get())
            coordinates.set(present)
    return candidates


def moments(observations: Sequence[Observations]) -> tuple[float, float]:
    """The variance and the mean square of the observed values."""
    counts = torch.tensor([group.y.numel() for group in observations], dtype=torch.float64)
    variances = torch.stack([group.y.var(dim=0, correction=0).mean() for group in observations])
    squares = torch.stack([group.y.mean(dim=0).square().mean() for group in observations])
    shares = (counts / counts.sum()).to(variances)
    variance = (shares * variances).sum().item()
    mean_square = (shares * squares).sum().item() + variance
    if not variance > 0:
        variance = mean_square if mean_square > 0 else 1.0
    return variance, mean_square


def mean_weight(observations: Sequence[Observations]) -> float:
    """The geometric mean of the weights. It is robust to variances that differ by decades."""
    logs = [group.weight.log().sum().item() for group in observations if group.weight is not None]
    return math.exp(sum(logs) / (sum(map(len, observations)) or 1))


def axis_extents(extent: Float[Tensor, "d"], isotropic: bool = False) -> Float[Tensor, "d"]:
    """The extent along each axis, or the largest for flat axes, and for all axes of a field."""
    largest = extent.amax() if extent.amax() > 0 else torch.ones_like(extent.amax())
    return torch.where((extent > 0) & (not isotropic), extent, largest)


@singledispatch
def _scales(kernel: Kernel, lengths: Float[Tensor, "d"]) -> dict[str, Tensor]:
    """The starting lengthscales of a kernel: one per axis, one in all, or one per component."""
    if not kernel.has_lengthscale:
        return {}
    return {"lengthscale": lengths if kernel.ard_num_dims else lengths.amax()}


@_scales.register
def _(kernel: FieldKernel, lengths: Float[Tensor, "d"]) -> dict[str, Tensor]:
    return kernel.scales(lengths)


@_scales.register
def _(kernel: PeriodicKernel, lengths: Float[Tensor, "d"]) -> dict[str, Tensor]:
    return {}  # its lengthscale is not a length, and a search does not find the period


@_scales.register
def _(kernel: SpectralMixtureKernel, lengths: Float[Tensor, "d"]) -> dict[str, Tensor]:
    steps = torch.arange(kernel.num_mixtures).to(lengths) + 0.5
    means = steps.reshape(-1, 1, 1) / kernel.num_mixtures / lengths
    return {"mixture_scales": 0.5 / math.pi / lengths, "mixture_means": means}


def all_summands(kernel: Kernel) -> list[Kernel]:
    """The terms of a sum and of the sums in it."""
    if isinstance(kernel, AdditiveKernel):
        return [term for part in kernel.kernels for term in all_summands(part)]
    return [kernel]


def _variance(kernel_terms: list[Term]) -> float:
    """tr K(0) / p."""
    return sum(at_zero(term).diagonal(dim1=-1, dim2=-2).mean().item() for term in kernel_terms)


@singledispatch
def rescale(kernel: Kernel, factor: float) -> bool:
    """Multiply the variance of a kernel by a factor, and return whether it has a trained scale.

    Kernel classes with a scale register with `@rescale.register`.
    """
    return any(rescale(part, factor) for part in kernel.children() if isinstance(part, Kernel))


@rescale.register
def _(kernel: ScaleKernel, factor: float) -> bool:
    if not kernel.raw_outputscale.requires_grad:
        return rescale(kernel.base_kernel, factor)
    return _multiply(kernel, "outputscale", factor)


@rescale.register
def _(kernel: ConstantKernel, factor: float) -> bool:
    return _multiply(kernel, "constant", factor)


@rescale.register
def _(kernel: MultitaskKernel, factor: float) -> bool:
    tasks = kernel.task_covar_module
    if not (tasks.covar_factor.requires_grad and tasks.raw_var.requires_grad):
        return rescale(kernel.data_covar_module, factor)
    tasks.covar_factor.data.mul_(math.sqrt(factor))
    return _multiply(tasks, "var", factor)


@rescale.register
def _(kernel: FieldKernel, factor: float) -> bool:
    return _multiply(kernel, kernel.amplitude, factor)


def _multiply(kernel: Kernel, name: str, factor: float) -> bool:
    """Multiply a trained parameter of a kernel by a factor, and return whether it is trained."""
    return set_trained(kernel, name, getattr(kernel, name) * factor)


@rescale.register
def _(kernel: SeparableKernel, factor: float) -> bool:
    if not kernel.root.requires_grad:
        return rescale(kernel.base_kernel, factor)
    kernel.root.data.mul_(math.sqrt(factor))
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
    return _multiply(
        kernel, "mixture_weights", factor ** (1 / kernel.ard_num_dims)
    )  # k(0) = (Σw)^d


def _rescale_all(parts: Iterable[Kernel], factor: float) -> bool:
    """Multiply the variance of every term of a sum, and return whether all have a trained scale."""
    scaled = [rescale(part, factor) for part in parts]
    return all(scaled)


def with_amplitude(kernel: Kernel) -> Kernel:
    """Return the kernel, with a `ScaleKernel` around every term without an amplitude.

    A term with a fixed amplitude does not change. Without an amplitude, the lengthscale would
    determine the variance of a field.
    """
    if type(kernel) is AdditiveKernel:
        parts = [with_amplitude(part) for part in kernel.kernels]
        changed = any(a is not b for a, b in zip(parts, kernel.kernels, strict=True))
        return AdditiveKernel(*parts) if changed else kernel
    scaled_kinds = (
        ScaleKernel,
        ConstantKernel,
        FieldKernel,
        MultitaskKernel,
        LCMKernel,
        SpectralMixtureKernel,
    )
    if parts_of(kernel, *scaled_kinds) or rescale(kernel, 1.0):
        return kernel
    scaled = ScaleKernel(kernel, batch_shape=kernel.batch_shape)
    scaled.outputscale = torch.ones_like(scaled.outputscale)
    return scaled


@singledispatch
def scale_noise(likelihood: Likelihood, factor: float) -> None:
    """Multiply the noise variance by a factor. Unknown likelihoods do not change."""


@scale_noise.register
def _(likelihood: GaussianLikelihood, factor: float) -> None:
    start_noise(likelihood, factor * likelihood.noise.mean().item())


@scale_noise.register
def _(likelihood: MultitaskGaussianLikelihood, factor: float) -> None:
    _set_noises(likelihood, lambda noise: factor * noise, lambda root: factor**0.5 * root)


@torch.no_grad()
def _set_noises(
    likelihood: MultitaskGaussianLikelihood,
    variances: Callable[[Tensor], float | Tensor],
    roots: Callable[[Tensor], Tensor],
) -> None:
    """Change the trained noise variances, and the trained root of a noise covariance."""
    if likelihood.has_global_noise:
        set_trained(likelihood, "noise", variances(likelihood.noise))
    if likelihood.has_task_noise and not likelihood.rank:
        set_trained(likelihood, "task_noises", variances(likelihood.task_noises))
    if likelihood.has_task_noise and likelihood.rank:
        root = likelihood.task_noise_covar_factor
        if root.requires_grad:
            root.copy_(roots(root))


@singledispatch
def start_noise(likelihood: Likelihood, variance: float) -> None:
    """Set the noise variance before training. Unknown likelihoods do not change."""


@start_noise.register
def _(likelihood: GaussianLikelihood, variance: float) -> None:
    set_trained(likelihood.noise_covar, "noise", variance)


@start_noise.register
def _(likelihood: MultitaskGaussianLikelihood, variance: float) -> None:
    each = variance / (likelihood.has_global_noise + likelihood.has_task_noise)

    def root(present: Float[Tensor, "p r"]) -> Float[Tensor, "p r"]:
        return each**0.5 * shared_factor(*present.shape[-2:]).to(present)

    _set_noises(likelihood, lambda noise: each, root)
