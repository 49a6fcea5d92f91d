"""Weak priors of hyperparameters, for data that determine them poorly.

All priors are log-normal, with units from the data. D is the extent of the middle 90 % of the
points. s is the standard deviation (SD) of the observed values about their mean.

    hyperparameter      median    SD of the logarithm
    lengthscale         0.4 D     0.8
    SD of the field     s         0.8
    SD of the noise     0.1 s     1.2
    alpha of RQKernel   1         1

In a sum of n kernels, the SD of each summand has the median s/n, and its logarithm the SD 1.5.
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

# A prior of the noise variance, for fields with learned spectra.


def log_prior_of_noise(
    kernel: Kernel, likelihoods: Mapping[str, Likelihood], survey: Survey
) -> Float[Tensor, ""] | float:
    """Return the log prior density of the noise variances σ², for a learned spectrum.

    The prior of every group is log σ² ~ N(log 0.1 v, 3²), with the variance v of the data. The
    density is that of log σ², up to a constant. Without a learned spectrum, it is 0.

    Waves shorter than the distances between observations look like noise. Only the extrapolation of
    the spectrum distinguishes them from noise, so that the evidence of few observations may have a
    maximum without noise.

    Args:
        kernel: the kernel of the model.
        likelihoods: the likelihood of every group, by label. Known noise and noise along tracks
            have no prior.
        survey: the survey of the data.
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


_WIDTH = 0.8  # the SD of the logarithm of a lengthscale, and of the SD of a field
_SUMMAND, _NOISE = 1.5, 1.2  # the SD of the logarithm of the SD of a summand, and of noise

MOST_SAMPLED = 200  # values up to which posteriors with a learned spectrum sample hyperparameters
_FEW = 120  # vectors up to which posteriors integrate over hyperparameters


def leave_much_open(data: Data) -> bool:
    """Whether the data have at most as many values as 120 vectors, and no tracks.

    Such data determine the hyperparameters poorly. Tracks are not supported yet.
    """
    num_outputs = data.survey.sample[0].pattern.num_outputs
    return data.num_values <= _FEW * num_outputs and not data.tracks


Modules = Mapping[str | None, Module]
"""The kernel under the key None, and the likelihood of every group under its label."""


@dataclass(frozen=True)
class Owner:
    """The location of a raw parameter in the kernel or in a likelihood."""

    label: str | None  # the group of the likelihood; None for the kernel
    name: str

    def value(self, modules: Modules) -> Tensor:
        """The parameter, transformed by its constraint."""
        owner, name = self._owner(modules)
        return owner.constraint_for_parameter_name(name).transform(getattr(owner, name))

    def is_positive(self, modules: Modules) -> bool:
        """Whether a constraint makes the parameter positive."""
        owner, name = self._owner(modules)
        constraint = owner.constraint_for_parameter_name(name)
        return constraint is not None and bool((constraint.lower_bound >= 0).all())

    def _owner(self, modules: Modules) -> tuple[Module, str]:
        path, _, name = self.name.rpartition(".")
        return modules[self.label].get_submodule(path), name


def owners_of(modules: Modules) -> dict[nn.Parameter, Owner]:
    """The location of every raw parameter."""
    return {
        parameter: Owner(label, name)
        for label, module in modules.items()
        for name, parameter in module.named_parameters()
    }


@dataclass(frozen=True)
class LogNormal:
    """The prior log v ~ N(log median, width²).

    v is every element of a positive parameter. If `summand` is a number, v is the variance of this
    summand, which the parameter scales.
    """

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
    """The weak priors of the trained hyperparameters.

    Priors that the user has registered replace them.
    """

    weak: Mapping[Owner, LogNormal]
    registered: Mapping[Owner, Prior]
    x: Float[Tensor, "n d"]  # of the data

    @classmethod
    @torch.no_grad()
    def of(
        cls, kernel: Kernel, likelihoods: Mapping[str, Likelihood], survey: Survey
    ) -> "WeakPriors | None":
        """Return the priors for these data, or None.

        The result is None if a trained parameter has neither a weak prior nor a registered one,
        such as an output covariance. It is also None for learned spectra, which have their own
        prior.
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
        several = len(set(amplitudes)) < len(amplitudes)  # amplitudes of one summand
        if several or {*weak, *registered} != set(owners.values()):
            return None
        return cls(weak, registered, torch.cat([part.x for part in survey.sample]))

    def residuals(
        self, kernel: Kernel, likelihoods: Mapping[str, Likelihood]
    ) -> Float[Tensor, "*b r"]:
        """(log v − log median) / width of all r values v with a weak prior.

        A batch of kernels and likelihoods has a batch of residuals.
        """
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
    """The registered priors by parameter; None if a prior is not that of one parameter's value."""
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
    """All parameters with a weak prior, trained or fixed, and the priors."""
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
    """The variance of every output about its mean.

    For heavy tails, it is that of a normal distribution with the same central 68 % interval.
    """
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
