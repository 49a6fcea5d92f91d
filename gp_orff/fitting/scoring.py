"""Weak priors of hyperparameters, in the units of the data, for data that leave them open.

With the extent D of the points and the standard deviation s of the observed numbers about their
mean, logarithms are normal:

    lengthscale ~ (0.4 D, 0.8) ,    sd of the field ~ (s, 0.8) ,    sd of the noise ~ (0.1 s, 1.2) ,

each with its median and the standard deviation of its logarithm. Of a sum of n kernels, the sd of
each summand has the median s/n and the width 1.5.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from gpytorch import Module
from gpytorch.kernels import ConstantKernel, Kernel, RQKernel, ScaleKernel
from gpytorch.likelihoods import GaussianLikelihood, Likelihood, MultitaskGaussianLikelihood
from gpytorch.priors import Prior
from jaxtyping import Float
from torch import Tensor, nn

from gp_orff.data.dataset import Data
from gp_orff.data.likelihoods import KnownNoiseLikelihood, raw_deg_frees
from gp_orff.data.noise import noise_of, of_kind
from gp_orff.data.observations import Observations, join
from gp_orff.data.survey import Survey
from gp_orff.fitting.starting_values import SHARES, all_summands, axis_extents, mean_weight, moments
from gp_orff.inference.price import NEGLIGIBLE
from gp_orff.kernels.spectra import learned_spectra
from gp_orff.kernels.tree import leaf_dims, num_outputs, terms

# A prior of the noise beside learned spectra, which may take its place.


def log_prior_of_noise(
    kernel: Kernel, likelihoods: Mapping[str, Likelihood], survey: Survey
) -> Float[Tensor, ""] | float:
    """The log density of log σ² ~ N(log 0.1 v, 3²), v being the variance of the data, up to a
    constant, for the noise of every group; 0 without a learned spectrum.

    Only extrapolation of the spectrum distinguishes waves shorter than the distances of the
    observations from noise, so that the evidence of few observations may have a maximum without
    noise.

    Args:
        kernel: that may have a learned spectrum.
        likelihoods: those of all groups; those with given noise, or of tracks, have no prior.
        survey: of the data.
    """
    if not learned_spectra(kernel):
        return 0.0
    median = math.log(NEGLIGIBLE * moments(join(survey.sample))[0])
    total = 0.0
    learned = of_kind(likelihoods, GaussianLikelihood | MultitaskGaussianLikelihood)
    for likelihood in learned.values():
        variance = noise_of(likelihood, num_outputs(kernel)).diagonal(dim1=-1, dim2=-2).mean()
        total = total - 0.5 * ((torch.log(variance) - median) / (2 * _SUMMAND)) ** 2
    return total


_WIDTH, _SUMMAND, _NOISE = 0.8, 1.5, 1.2  # sd of log lengths and log sd of fields, parts and noise

MOST_SAMPLED = 200  # numbers whose posteriors count what they leave open of hyperparameters
_FEW = 120  # vectors, up to which predictions depend on what is left open of hyperparameters


def leave_much_open(data: Data) -> bool:
    """Whether observations are so few that they leave hyperparameters open: at most as many numbers
    as 120 vectors have. Observations along tracks are not covered yet."""
    num_outputs = data.survey.sample[0].pattern.num_outputs
    return data.num_values <= _FEW * num_outputs and not data.tracks


Modules = Mapping[str | None, Module]
"""The kernel, under None, and the likelihood of every group by its label."""


@dataclass(frozen=True)
class Owner:
    """Where a raw parameter is."""

    label: str | None  # of the group of a likelihood; None for the kernel
    name: str

    def value(self, modules: Modules) -> Tensor:
        """The parameter, transformed by its constraint."""
        owner, name = self._owner(modules)
        return owner.constraint_for_parameter_name(name).transform(getattr(owner, name))

    def is_positive(self, modules: Modules) -> bool:
        """Whether a constraint keeps the parameter positive."""
        owner, name = self._owner(modules)
        constraint = owner.constraint_for_parameter_name(name)
        return constraint is not None and bool((constraint.lower_bound >= 0).all())

    def _owner(self, modules: Modules) -> tuple[Module, str]:
        path, _, name = self.name.rpartition(".")
        return modules[self.label].get_submodule(path), name


def owners_of(modules: Modules) -> dict[nn.Parameter, Owner]:
    """Where every raw parameter is."""
    return {
        parameter: Owner(label, name)
        for label, module in modules.items()
        for name, parameter in module.named_parameters()
    }


@dataclass(frozen=True)
class LogNormal:
    """log v ~ N(log median, width²), of every element of a positive parameter v, or of the variance
    v of the summand that the parameter scales."""

    median: Float[Tensor, "..."]  # in the shape of the parameter
    width: float
    summand: int | None = None

    def residual(
        self, owner: Owner, modules: Modules, x: Float[Tensor, "n d"]
    ) -> Float[Tensor, "*b k"]:
        """(log v − log median) / width."""
        v = owner.value(modules)
        if self.summand is not None:
            part = all_summands(modules[None])[self.summand]
            v = part(x, diag=True).mean(-1).reshape(v.shape)
        batch = v.shape[: v.dim() - self.median.dim()]
        residual = (v.double().log() - self.median.log()) / self.width
        return residual.reshape(*batch, -1)


@dataclass(frozen=True)
class WeakPriors:
    """The weak priors of the hyperparameters that are trained, and the priors that the user has
    registered, which take their places."""

    weak: Mapping[Owner, LogNormal]
    registered: Mapping[Owner, Prior]
    x: Float[Tensor, "n d"]  # of the data

    @classmethod
    @torch.no_grad()
    def of(
        cls, kernel: Kernel, likelihoods: Mapping[str, Likelihood], survey: Survey
    ) -> "WeakPriors | None":
        """The priors for these data.

        None where a trained parameter has neither a weak prior, as a matrix of outputs, nor one of
        its own that the user registered; and for learned spectra, which have a prior.
        """
        if learned_spectra(kernel, trained=True):
            return None
        modules = {None: kernel, **likelihoods}
        fixed = {raw for likelihood in likelihoods.values() for raw in raw_deg_frees(likelihood)}
        owners = {
            parameter: owner
            for parameter, owner in owners_of(modules).items()
            if parameter.requires_grad and parameter not in fixed
        }
        registered = _registered(modules, owners)
        if registered is None:
            return None
        weak: dict[Owner, LogNormal] = {}
        amplitudes: list[int] = []
        for parameter, prior in _candidates(kernel, likelihoods, survey):
            owner = owners.get(parameter)
            if owner is None or owner in registered or owner in weak:
                continue
            if not owner.is_positive(modules):
                return None
            weak[owner] = prior
            amplitudes += [] if prior.summand is None else [prior.summand]
        several = len(set(amplitudes)) < len(amplitudes)  # that scale one summand
        if several or {*weak, *registered} != set(owners.values()):
            return None
        return cls(weak, registered, torch.cat([part.x for part in survey.sample]))

    def residuals(
        self, kernel: Kernel, likelihoods: Mapping[str, Likelihood]
    ) -> Float[Tensor, "*b r"]:
        """(log v − log median) / width of all that has a weak prior; of a batch of kernels, with a
        batch of likelihoods, those of each."""
        modules = {None: kernel, **likelihoods}
        found = [prior.residual(own, modules, self.x) for own, prior in self.weak.items()]
        return torch.cat(found, dim=-1) if found else self.x.new_zeros(*kernel.batch_shape, 0)

    def log_density(
        self, kernel: Kernel, likelihoods: Mapping[str, Likelihood]
    ) -> Float[Tensor, "*b"]:
        """The log density of the weak priors in the logarithms log v, up to a constant."""
        return -0.5 * self.residuals(kernel, likelihoods).square().sum(-1)


@torch.enable_grad()
def _registered(
    modules: Modules, owners: Mapping[nn.Parameter, Owner]
) -> dict[Owner, Prior] | None:
    """The priors of the user, each of the value of one parameter; None if one is of something
    else."""
    found: dict[Owner, Prior] = {}
    for module in modules.values():
        for _, owner, prior, closure, _ in module.named_priors():
            value = closure(owner)
            if not value.requires_grad:
                continue
            slopes = torch.autograd.grad(value.sum(), list(owners), allow_unused=True)
            reached = [own for own, slope in zip(owners, slopes, strict=True) if slope is not None]
            if not reached:
                continue
            of = owners[reached[0]]
            if len(reached) > 1 or of in found:
                return None
            if not torch.equal(value.flatten(), of.value(modules).flatten()):
                return None
            found[of] = prior
    return found


def _candidates(
    kernel: Kernel, likelihoods: Mapping[str, Likelihood], survey: Survey
) -> Iterator[tuple[nn.Parameter, LogNormal]]:
    """The parameters that have a weak prior, trained or not, and these priors."""
    observations = join(survey.sample)
    heavy = any(map(raw_deg_frees, likelihoods.values()))
    variances = _variances(observations, heavy)
    yield from _lengths(kernel, survey)
    yield from _amplitudes(kernel, variances.mean())
    kinds = KnownNoiseLikelihood | GaussianLikelihood | MultitaskGaussianLikelihood
    for label, likelihood in of_kind(likelihoods, kinds).items():
        weight = mean_weight([group for group in observations if group.key.label == label])
        yield from _of_noise(likelihood, weight * variances)


def _lengths(kernel: Kernel, survey: Survey) -> Iterator[tuple[nn.Parameter, LogNormal]]:
    bulk = torch.from_numpy(survey.distances.bulk)
    for term in terms(kernel):
        for leaf in term.leaves:
            if not leaf.kernel.has_lengthscale:
                continue
            raw = leaf.kernel.raw_lengthscale
            extents = axis_extents(bulk[list(leaf.columns(leaf_dims(term, leaf, len(bulk))))])
            extents = extents if leaf.kernel.ard_num_dims else extents.max()
            yield raw, _log_normal(extents, raw, SHARES[0], _WIDTH)
            if isinstance(leaf.kernel, RQKernel):
                alpha = leaf.kernel.raw_alpha
                yield alpha, _log_normal(torch.ones(()), alpha, 1.0, 1.0)


def _amplitudes(
    kernel: Kernel, variance: Float[Tensor, ""]
) -> Iterator[tuple[nn.Parameter, LogNormal]]:
    every = all_summands(kernel)
    width = _WIDTH if len(every) == 1 else _SUMMAND
    for number, summand in enumerate(every):
        for part in summand.modules():
            name = {ScaleKernel: "raw_outputscale", ConstantKernel: "raw_constant"}.get(type(part))
            if name is not None:
                raw = getattr(part, name)
                median = (variance / len(every) ** 2).expand_as(raw)
                yield raw, LogNormal(median.to(raw.device), 2 * width, number)


def _of_noise(
    likelihood: Likelihood, variances: Float[Tensor, "p"]
) -> Iterator[tuple[nn.Parameter, LogNormal]]:
    medians = {  # by the name of the parameter
        "raw_noise_scale": torch.ones(()),
        "raw_noise": NEGLIGIBLE**2 * variances.mean(),
        "raw_task_noises": NEGLIGIBLE**2 * variances,
    }
    for name, raw in likelihood.named_parameters():
        if (median := medians.get(name.split(".")[-1])) is not None:
            yield raw, _log_normal(median, raw, 1.0, 2 * _NOISE)


def _log_normal(size: Tensor, raw: nn.Parameter, median: float, width: float) -> LogNormal:
    return LogNormal((median * size.double()).to(raw.device).expand_as(raw), width)


def _variances(observations: Sequence[Observations], heavy: bool) -> Float[Tensor, "p"]:
    """The variance of every output about its mean; of heavy tails, that of a normal distribution
    with the same share of the numbers in its middle."""
    p = observations[0].pattern.num_outputs
    values: list[list[Tensor]] = [[] for _ in range(p)]
    for part in observations:
        for output in range(p):
            if part.direction is not None:
                values[output].append(part.y.flatten())
            elif output in part.pattern.columns:
                values[output].append(part.y[:, part.pattern.columns.index(output)])
    variances = [_variance(torch.cat(own), heavy) if own else math.nan for own in values]
    found = torch.tensor(variances, dtype=torch.float64)
    typical = found[found > 0].mean() if (found > 0).any() else torch.ones((), dtype=found.dtype)
    return torch.where(found > 0, found, typical)


def _variance(y: Float[Tensor, "n"], heavy: bool) -> float:
    if not heavy:
        return y.var(correction=0).item()
    tails = torch.special.ndtr(torch.tensor([-1.0, 1.0], dtype=torch.float64, device=y.device))
    low, high = torch.quantile(y.double(), tails)
    return ((high - low) / 2).square().item()
