"""The information of data about hyperparameters, and priors that are weak.

Weak priors of hyperparameters, in the units of the data, for data that leave them open.

With the extent D of the points and the standard deviation s of the observed numbers about their
mean, logarithms are normal:

    lengthscale ~ (0.4 D, 0.8) ,    sd of the field ~ (s, 0.8) ,    sd of the noise ~ (0.1 s, 1.2) ,

each with its median and the standard deviation of its logarithm. Of a sum of n kernels, the sd of
each summand has the median s/n and the width 1.5.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch
from gpytorch import Module
from gpytorch.constraints import Interval
from gpytorch.kernels import ConstantKernel, Kernel, RQKernel, ScaleKernel
from gpytorch.likelihoods import GaussianLikelihood, Likelihood, MultitaskGaussianLikelihood
from gpytorch.priors import Prior
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn.functional import normalize

from gp_orff.data.dataset import Data
from gp_orff.data.likelihoods import KnownNoiseLikelihood, raw_deg_frees
from gp_orff.data.noise import Noises, noise_of, noises_of
from gp_orff.data.observations import Observations, join
from gp_orff.data.survey import Survey
from gp_orff.fitting.search import Coordinates
from gp_orff.fitting.starting_values import all_summands, mean_weight, moments
from gp_orff.inference.equations import Primal, information
from gp_orff.inference.exact import ExactInference
from gp_orff.inference.features import FeatureInference, Inference
from gp_orff.inference.quadratic import Evidence, log_determinant, seen_by, solve
from gp_orff.kernels.base import cholesky
from gp_orff.kernels.learned import components, has_learned_spectrum, learned_spectra
from gp_orff.kernels.tree import leaf_dims, num_outputs, terms

# Which coordinates of a search are those of the curves of learned spectra.


def prior_scales(kernel: Kernel, coordinates: Coordinates) -> Float[np.ndarray, "k"]:
    """∂z/∂u of the coordinates u of the curves z ~ N(0, I) of learned spectra; 0 for all others."""
    curves = {id(part.shape) for part in learned_spectra(kernel)}
    return np.concatenate(
        [
            np.full(part.parameter.numel(), part.scale * (id(part.parameter) in curves))
            for part in coordinates.parts
        ]
    )


# The Fisher information of hyperparameters that scale features, as the curves of spectra do.


_STEP_OF_FEATURES = 1e-6  # of differences, in coordinates
_TURN, _ROUNDING = 1e-3, 1e-9  # a step, and by how much what it leaves alone may differ


@dataclass(frozen=True)
class FeatureInformation:
    """The Fisher information of observations under features whose hyperparameters change their
    variances w and the noise variances σ² of groups, in the coordinates u of a search, plus that of
    the prior of learned spectra.

    With unit weights, the information G_g = ZᵀΣ_g⁻¹Z of each group on them, A = I + Σ_g G_g and
    M = I − A⁻¹,

        −E ∂²L/∂log w_e ∂log w_f = ½ M_ef² ,
        −E ∂²L/∂log w_f ∂log σ²_g = ½ (A⁻¹ G_g A⁻¹)_ff ,
        −E ∂²L/∂log σ²_g ∂log σ²_h = ½ [δ_gh (n_g − 2 tr A⁻¹G_g) + tr A⁻¹G_g A⁻¹G_h] .

    With E[θ] the mean of the unit weights, the first is averaged with ½ E[θ_e] E[θ_f] M_ef, whose
    mean it is under the model (Johnson & Thompson 1995, *Restricted maximum likelihood estimation
    of variance components ... using average information*): where w is far below what the data tell,
    as of waves that a curve does not hold yet, the expected information alone is too small by
    orders, and its steps too long.

    One factorisation and one inverse, as of an evaluation of the evidence. The derivatives of log w
    and log σ² by u are differences.

    Args:
        inference: of the data, by features on a lattice.
        kernel: its kernel.
        likelihoods: those of all groups.
        coordinates: of the kernel and of the likelihoods.
        mean: a constant one; None for the best one.
    """

    inference: FeatureInference
    kernel: Kernel
    likelihoods: Mapping[str, Likelihood]
    coordinates: Coordinates
    mean: Float[Tensor, "p"] | None = None

    @classmethod
    def of(
        cls,
        inference: Inference,
        kernel: Kernel,
        likelihoods: Mapping[str, Likelihood],
        coordinates: Coordinates,
        mean: Float[Tensor, "p"] | None = None,
    ) -> "FeatureInformation | None":
        """The information; None where hyperparameters do more than to scale features and noise, or
        where weights are not found from statistics."""
        if not isinstance(inference, FeatureInference):
            return None
        own = cls(inference, kernel, likelihoods, coordinates, mean)
        return own if own._equations() is not None and own._scales() else None

    @torch.no_grad()
    def __call__(self) -> Float[np.ndarray, "k k"]:
        """H at the present hyperparameters."""
        equations = self._equations()
        expansion, groups = equations.expansion, equations.groups
        slopes, noise_slopes = self._slopes(equations)
        posterior, _ = equations.posterior(self.mean)
        inverse = torch.cholesky_inverse(posterior.factor)
        explained = -inverse  # M = I − A⁻¹, which is A⁻¹G of a single group
        explained.diagonal().add_(1)
        solved = [explained]
        if len(groups) > 1:  # `information` has the I of the prior
            solved = [inverse @ information(expansion, [group]) - inverse for group in groups]
        observed = posterior.theta * slopes  # (F, k)
        total = slopes.mT @ (explained.square() @ slopes) + observed.mT @ (explained @ observed)
        total = 0.5 * total
        mixed = torch.stack([(part * inverse).sum(-1) for part in solved])  # (G, F)
        mixed = noise_slopes.mT @ (mixed @ slopes)
        noise = torch.stack(
            [torch.stack([(one * other.mT).sum() for other in solved]) for one in solved]
        )
        counts = [
            group.statistics.count * group.statistics.pattern.num_values - 2 * part.trace()
            for group, part in zip(groups, solved, strict=True)
        ]
        noise = noise + torch.diag(torch.stack(counts))
        total = total + mixed + mixed.mT + noise_slopes.mT @ noise @ noise_slopes
        prior = prior_scales(self.kernel, self.coordinates) ** 2
        return 0.5 * total.cpu().numpy() + np.diag(prior)

    def _equations(self) -> Primal | None:
        return self.inference.primal(self.kernel, noises_of(self.kernel, self.likelihoods))

    def _slopes(self, equations: Primal) -> tuple[Float[Tensor, "F k"], Float[Tensor, "G k"]]:
        """∂ log w/∂u of every feature, and ∂ log σ²/∂u of every group."""
        u, columns = self.coordinates.get(), []
        start = _logarithms(equations)
        for step in _STEP_OF_FEATURES * np.eye(len(u)):
            self.coordinates.set(u + step)
            moved = _logarithms(self._equations())
            columns.append([(b - a) / _STEP_OF_FEATURES for a, b in zip(start, moved, strict=True)])
        self.coordinates.set(u)
        return tuple(torch.stack(part, -1) for part in zip(*columns, strict=True))

    @torch.no_grad()
    def _scales(self) -> bool:
        """Whether a step of all coordinates leaves the directions of features, and the ratios of
        the elements of Σ, as they are."""
        u, shapes = self.coordinates.get(), []
        for step in (0.0, _TURN):
            self.coordinates.set(u + step * np.cos(np.arange(len(u))))
            equations = self._equations()
            directions = equations.expansion.directions
            noises = [group.noise.precision for group in equations.groups]
            shapes.append([normalize(part, dim=-1) for part in (directions, *noises)])
        self.coordinates.set(u)
        alike = [torch.allclose(*pair, atol=_ROUNDING) for pair in zip(*shapes, strict=True)]
        return not directions.is_complex() and all(alike)


def _logarithms(equations: Primal) -> tuple[Float[Tensor, "F"], Float[Tensor, "G"]]:
    """log w of every feature, and log σ² of every group."""
    squares = equations.expansion.directions.square().sum(-1)
    tiny = torch.finfo(squares.dtype).tiny
    noises = [group.noise.logdet / group.noise.precision.shape[-1] for group in equations.groups]
    return squares.clamp_min(tiny).log(), torch.stack(noises)


# The average information of hyperparameters under the exact kernel.


_STEP_OF_COVARIANCES = 1e-7  # of differences, in coordinates


@dataclass(frozen=True)
class AverageInformation:
    """The average information of numbers y ~ N(H c, K) in the coordinates u of a search:

        A_ij = ½ w_iᵀ P w_j ,    w_i = ∂_iK a ,    a = K⁻¹(y − H c) ,

    with P = K⁻¹ − K⁻¹H(HᵀK⁻¹H)⁻¹HᵀK⁻¹ where c is the best mean, else K⁻¹. It is the mean of minus
    the observed and the expected Hessian in what they do not share (Gilmour, Thompson & Cullis
    1995, *Average information REML*), is positive semidefinite, and takes one factorisation and a
    product of the covariance at each of k moved hyperparameters.

    Args:
        inference: of the numbers, under the exact kernel.
        kernel: its kernel.
        likelihoods: those of all groups.
        coordinates: of the kernel and of the likelihoods.
        mean: a constant one; None for the best one.
    """

    inference: ExactInference
    kernel: Kernel
    likelihoods: Mapping[str, Likelihood]
    coordinates: Coordinates
    mean: Float[Tensor, "p"] | None = None

    @torch.no_grad()
    def __call__(self) -> Float[np.ndarray, "k k"]:
        """A at the present hyperparameters."""
        coordinates, u = self.coordinates, self.coordinates.get()
        noises = noises_of(self.kernel, self.likelihoods)
        prior, noise = self.inference.prior(self.kernel), self.inference.noise(noises)
        factor, design = cholesky(prior + noise), self.inference.design(noises)
        half, solved = solve(factor, design)
        seen = seen_by(design, noise.diagonal())
        evidence = Evidence(half.mT @ half, log_determinant(factor), seen)
        a = solved @ evidence.contrast(self.mean)
        scatter, of_scatter = self.inference.scatter_logdet(noises), []
        of_kernel, columns = set(self.kernel.parameters()), []
        steps = iter(_STEP_OF_COVARIANCES * np.eye(len(u)))
        for part in coordinates.parts:
            for step in islice(steps, part.parameter.numel()):
                coordinates.set(u + step)
                if part.parameter in of_kernel:
                    change = self.inference.prior(self.kernel) - prior
                    of_scatter.append(torch.zeros_like(scatter))
                else:
                    moved = noises_of(self.kernel, self.likelihoods)
                    change = self.inference.noise(moved) - noise
                    of_scatter.append(self.inference.scatter_logdet(moved) - scatter)
                columns.append(change.tril() @ a + change.tril(-1).mT @ a)
        coordinates.set(u)
        w = torch.cat(columns, -1) / _STEP_OF_COVARIANCES
        w = torch.linalg.solve_triangular(factor, w, upper=False)
        if self.mean is None:
            left = half[:, 1:] @ evidence.mean_root()
            w = w - left @ (left.mT @ w)
        # r numbers of scatter, of variances ∝ σ², have the information ½ r ∂_i log σ² ∂_j log σ²,
        # and add r log σ² to the logarithm of the determinant.
        slopes = torch.stack(of_scatter).to(w) / _STEP_OF_COVARIANCES
        count = max(self.inference.num_values - len(design), 1.0)
        return 0.5 * (w.mT @ w + slopes[:, None] * slopes / count).cpu().numpy()


# The Fisher information of hyperparameters under the exact kernel.
#
# Every derivative ∂_iK is whitened on both sides and flattened to a row, L⁻¹ ∂_iK L⁻ᵀ: all traces
# tr(K⁻¹ ∂_iK K⁻¹ ∂_jK) are inner products of these rows. Coordinates of curves are linear
# combinations of the derivatives in the weights, so that rows are needed for the lengths only.


MOST_SAMPLED = 200  # numbers whose posteriors count what they leave open of hyperparameters


@dataclass(frozen=True)
class Information:
    """The Fisher information of numbers y ~ N(c, K) in the coordinates u of a search, plus that of
    the prior of learned spectra:

        H_ij = ½ tr(K⁻¹ ∂_iK K⁻¹ ∂_jK) + ∂_iz · ∂_jz ,    z ~ N(0, I) the `shape` of the spectra.

    The covariance is linear in the weights π of a learned spectrum, so that its derivatives in all
    coordinates of the curves follow from a matrix for each length, and those from an RBF kernel
    each. Derivatives in the other coordinates are differences of the covariance.

    Args:
        inference: of the numbers, under the exact kernel.
        kernel: its kernel.
        likelihoods: those of all groups.
        coordinates: of the kernel and of the likelihoods.
    """

    inference: ExactInference
    kernel: Kernel
    likelihoods: Mapping[str, Likelihood]
    coordinates: Coordinates

    @torch.no_grad()
    def __call__(self, projected: bool = False) -> Float[np.ndarray, "k k"]:
        """H at the present hyperparameters; `projected`: that of the numbers less their best
        constant mean, with P = K⁻¹ − K⁻¹H(HᵀK⁻¹H)⁻¹HᵀK⁻¹ in the place of K⁻¹."""
        coordinates, u = self.coordinates, self.coordinates.get()
        covariance = self._covariance()
        factor = cholesky(covariance)
        constants = self.inference.constants(self._noises) if projected else None

        def whitened(change: Float[Tensor, "M M"]) -> Float[Tensor, "M*M"]:
            half = torch.linalg.solve_triangular(factor, change, upper=False)
            both = torch.linalg.solve_triangular(factor, half.mT, upper=False)
            if constants is None:
                return both.flatten()
            basis = torch.linalg.solve_triangular(factor, constants, upper=False)
            basis, _, _ = torch.linalg.svd(basis, full_matrices=False)
            left = both - basis @ (basis.mT @ both)
            return (left - (left @ basis) @ basis.mT).flatten()

        weights, rows = [], []
        for own, j, part in components(self.kernel):
            weights.append((own, j))
            rows.append(whitened(self.inference.prior_covariance(part)))
        others = np.flatnonzero(~self.of_curves)
        for i in others:
            coordinates.set(u + _STEP_OF_COVARIANCES * np.eye(len(u))[i])
            rows.append(whitened((self._covariance() - covariance) / _STEP_OF_COVARIANCES))
        coordinates.set(u)
        stacked = torch.stack(rows)
        gram = 0.5 * (stacked @ stacked.mT).cpu().numpy()
        to_rows = np.zeros((len(rows), len(u)))
        if weights:
            to_rows[: len(weights)] = self._slopes_of_weights(weights)
        to_rows[range(len(weights), len(rows)), others] = 1.0
        return to_rows.T @ gram @ to_rows + np.diag(self._scales**2)

    @property
    def of_curves(self) -> Bool[np.ndarray, "k"]:
        """Which of the coordinates are those of a learned spectrum."""
        return self._scales > 0

    @property
    def _scales(self) -> Float[np.ndarray, "k"]:
        return prior_scales(self.kernel, self.coordinates)

    def _covariance(self) -> Float[Tensor, "M M"]:
        return self.inference.covariance(self.kernel, self._noises)

    @property
    def _noises(self) -> Noises:
        return noises_of(self.kernel, self.likelihoods)

    @torch.enable_grad()
    def _slopes_of_weights(self, weights: list[tuple[Kernel, int]]) -> Float[np.ndarray, "w k"]:
        """∂π/∂u."""
        parameters = [part.parameter for part in self.coordinates.parts]
        values = {own: own.weights for own, _ in weights}
        return np.stack([self._gradient(values[own][j], parameters) for own, j in weights])

    def _gradient(
        self, value: Float[Tensor, ""], parameters: list[nn.Parameter]
    ) -> Float[np.ndarray, "k"]:
        slopes = torch.autograd.grad(value, parameters, retain_graph=True, allow_unused=True)
        return self._scales * np.concatenate(
            [
                np.zeros(parameter.numel()) if slope is None else slope.cpu().numpy().ravel()
                for parameter, slope in zip(parameters, slopes, strict=True)
            ]
        )


# A prior of the noise beside learned spectra, which may take its place.


_SHARE, _WIDTH = 0.1, 3.0  # the median noise variance over that of the data; sd of its logarithm


def log_prior_of_noise(
    kernel: Kernel, likelihoods: Mapping[str, Likelihood], survey: Survey
) -> Float[Tensor, ""] | float:
    """The log density of log σ² ~ N(log 0.1 v, 3²), v being the variance of the data, up to a
    constant, for the noise of every group; 0 without a learned spectrum.

    Waves shorter than the distances of the readings cannot be told from noise but by extrapolation
    of the spectrum, so that the evidence of few readings may have a maximum without noise.

    Args:
        kernel: that may have a learned spectrum.
        likelihoods: those of all groups; those with given noise, or of tracks, have no prior.
        survey: of the data.
    """
    if not has_learned_spectrum(kernel):
        return 0.0
    median = math.log(_SHARE * moments(join(survey.sample))[0])
    total = 0.0
    for likelihood in likelihoods.values():
        if isinstance(likelihood, GaussianLikelihood | MultitaskGaussianLikelihood):
            size = 1 if isinstance(likelihood, GaussianLikelihood) else num_outputs(kernel)
            variance = noise_of(likelihood, size).diagonal(dim1=-1, dim2=-2).mean()
            total = total - 0.5 * ((torch.log(variance) - median) / _WIDTH) ** 2
    return total


_LENGTH = 0.4, 0.8  # the median over the extent, and the sd of the logarithm
_SHAPE = 1.0, 1.0  # of α of rational quadratic kernels
_FIELD, _SUMMAND = 0.8, 1.5  # the sd of the logarithm of the sd of the field, and of a summand
_NOISE = 0.1, 1.2  # of the sd of the noise over that of the data
_FACTOR = 1.0, 1.2  # of the sd of the noise over that which was given with the readings
_TAILS = 0.1587, 0.8413  # the probabilities below −1 and 1 standard deviations

_FEW = 120  # vectors, up to which predictions depend on what is left open of hyperparameters


def leave_much_open(data: Data) -> bool:
    """Whether readings are so few that they leave hyperparameters open: at most as many numbers as
    120 vectors have. Readings along tracks are not covered yet."""
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
        return isinstance(constraint, Interval) and bool((constraint.lower_bound >= 0).all())

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
        if has_learned_spectrum(kernel, trained=True):
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
    for label, likelihood in likelihoods.items():
        weight = mean_weight([group for group in observations if group.key.label == label])
        yield from _of_noise(likelihood, weight * variances)


def _lengths(kernel: Kernel, survey: Survey) -> Iterator[tuple[nn.Parameter, LogNormal]]:
    bulk = torch.from_numpy(survey.distances.bulk)
    for term in terms(kernel):
        for leaf in term.leaves:
            if not leaf.kernel.has_lengthscale:
                continue
            raw = leaf.kernel.raw_lengthscale
            extents = bulk[list(leaf.columns(leaf_dims(term, leaf, len(bulk))))]
            longest = extents.max() if extents.max() > 0 else torch.ones_like(extents.max())
            extents = torch.where(extents > 0, extents, longest)
            extents = extents if leaf.kernel.ard_num_dims else longest
            yield raw, _log_normal(extents, raw, *_LENGTH)
            if isinstance(leaf.kernel, RQKernel):
                alpha = leaf.kernel.raw_alpha
                yield alpha, _log_normal(torch.ones(()), alpha, *_SHAPE)


def _amplitudes(
    kernel: Kernel, variance: Float[Tensor, ""]
) -> Iterator[tuple[nn.Parameter, LogNormal]]:
    every = all_summands(kernel)
    width = _FIELD if len(every) == 1 else _SUMMAND
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
    if isinstance(likelihood, KnownNoiseLikelihood):
        raw = likelihood.raw_noise_scale
        yield raw, _log_normal(torch.ones(()), raw, _FACTOR[0] ** 2, 2 * _FACTOR[1])
    elif isinstance(likelihood, GaussianLikelihood):
        raw = likelihood.noise_covar.raw_noise
        yield raw, _log_normal(variances.mean(), raw, _NOISE[0] ** 2, 2 * _NOISE[1])
    elif isinstance(likelihood, MultitaskGaussianLikelihood):
        if likelihood.has_global_noise:
            raw = likelihood.raw_noise
            yield raw, _log_normal(variances.mean(), raw, _NOISE[0] ** 2, 2 * _NOISE[1])
        if likelihood.has_task_noise and not likelihood.rank:
            raw = likelihood.raw_task_noises
            yield raw, _log_normal(variances, raw, _NOISE[0] ** 2, 2 * _NOISE[1])


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
    tails = torch.tensor(_TAILS, dtype=torch.float64, device=y.device)
    low, high = torch.quantile(y.double(), tails)
    return ((high - low) / 2).square().item()
