"""Posteriors given few observations, which leave hyperparameters uncertain."""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np
import torch
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import Likelihood
from jaxtyping import Float
from torch import Tensor, nn

from gp_orff.data.noise import noises_of
from gp_orff.data.observations import PointObservations
from gp_orff.data.survey import DataWarning
from gp_orff.features.chunked import by_chunks
from gp_orff.features.expansion import Expansion
from gp_orff.fitting.curvature import average, prior_scales
from gp_orff.fitting.names import parameter_names
from gp_orff.fitting.noise import search_coordinates
from gp_orff.fitting.robust_em import EStep
from gp_orff.fitting.scoring import MOST_SAMPLED, WeakPriors, log_prior_of_noise
from gp_orff.inference.exact import ExactInference
from gp_orff.inference.features import Inference, Posterior, log_marginal_likelihood
from gp_orff.inference.posteriors import FieldDistribution
from gp_orff.kernels.base import cholesky
from gp_orff.kernels.fields import counterpart
from gp_orff.kernels.learned import has_learned_spectrum
from gp_orff.kernels.tree import leaf_dims, terms
from gp_orff.models.importance import Draws, Model, PriorOfCoordinates, adaptive_draws
from gp_orff.symbols.base import Symbol

# Mixtures of the posteriors under several hyperparameters, by their first two moments.
#
# Every question to the mixture becomes the same question to each member, and the answers are
# combined by the law of total covariance: the average of the covariances within the members, plus
# the covariance of the means between them. The means contain the constant mean of each member,
# because the best constant differs with the hyperparameters.
#
# `root` is a factor of the covariance with one column block for each member, √w_s times its root,
# and one column for each mean: the product of the factor with its transpose is the sum above.


@dataclass(frozen=True)
class Member:
    """The posterior of a field under one value of the hyperparameters.

    Attributes:
        weight: its probability.
        kernel: with these hyperparameters.
        distribution: of the field, with its constant mean.
    """

    weight: float
    kernel: Kernel
    distribution: FieldDistribution


@dataclass(frozen=True)
class Mixture(FieldDistribution):
    """A mixture of Gaussian distributions, taken for a Gaussian one:

        E f = Σ_s w_s m_s ,    Cov f = Σ_s w_s (C_s + (m_s − E f)(m_s − E f)ᵀ) .

    Args:
        members: with weights that add up to one.
        kernel: whose terms name the parts.
    """

    members: Sequence[Member]
    kernel: Kernel

    @property
    def num_outputs(self) -> int:
        return self.members[0].distribution.num_outputs

    @property
    def _weights(self) -> Float[Tensor, "S"]:
        weights = [member.weight for member in self.members]
        return torch.tensor(weights, dtype=torch.float64).to(next(self.kernel.parameters()).device)

    def _means(self, x: Float[Tensor, "n d"]) -> Float[Tensor, "S n q"]:
        return torch.stack([own.distribution.mean(x) for own in self.members])

    def _average(self, values: Float[Tensor, "S n q"]) -> Float[Tensor, "n q"]:
        return torch.tensordot(self._weights, values, 1)

    def _spread(self, x: Float[Tensor, "n d"]) -> Float[Tensor, "S n q"]:
        """√w_s (m_s − E f)."""
        means = self._means(x)
        return self._weights.sqrt()[:, None, None] * (means - self._average(means))

    def mean(self, x: Tensor) -> Tensor:
        return self._mean_and_variance(x)[..., 0].clone()

    def variance(self, x: Tensor) -> Tensor:
        return self._mean_and_variance(x)[..., 1].clone()

    def _mean_and_variance(self, x: Float[Tensor, "n d"]) -> Float[Tensor, "n q 2"]:
        """E f and Var f together, kept for the last points: a map asks for one after the other."""
        if self._last and torch.equal(self._last[0], x) and not x.requires_grad:
            return self._last[1]
        width = 2 * len(self.members) * self.num_outputs
        pair = by_chunks(self._moments_of_chunk, x, width).unflatten(-1, (self.num_outputs, 2))
        self._last[:] = [x.detach().clone(), pair.detach()]
        return pair

    @cached_property
    def _last(self) -> list[Tensor]:
        return []

    def __getstate__(self) -> dict:
        return {name: own for name, own in self.__dict__.items() if name != "_last"}

    def _moments_of_chunk(self, x: Float[Tensor, "n d"]) -> Float[Tensor, "n q*2"]:
        means, variances, _ = zip(
            *(own.distribution.moments(x) for own in self.members), strict=True
        )
        means = torch.stack(means)
        mean = self._average(means)
        variance = self._average(torch.stack(variances) + (means - mean).square())
        return torch.stack([mean, variance], dim=-1).flatten(1)

    def blocks(self, x: Tensor) -> Tensor:
        within = sum(own.weight * own.distribution.blocks(x) for own in self.members)
        spread = self._spread(x).movedim(0, -1)  # (n, q, S)
        return within + spread @ spread.mT

    def normals(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        blocks = torch.stack([own.distribution.blocks(x) for own in self.members])
        return self._weights, self._means(x), blocks

    def covariance(self, x: Tensor) -> Tensor:
        within = sum(own.weight * own.distribution.covariance(x) for own in self.members)
        spread = self._spread(x).flatten(1)
        return within + spread.mT @ spread

    def root(self, x: Tensor) -> Tensor:
        roots = [own.weight**0.5 * own.distribution.root(x) for own in self.members]
        return torch.cat([*roots, self._spread(x).flatten(1).mT], dim=-1)

    def apply(self, symbol: Symbol, space: Sequence[int]) -> "Mixture":
        members = [
            replace(own, distribution=own.distribution.apply(symbol, space)) for own in self.members
        ]
        return replace(self, members=members)

    def of_part(self, expansion: Expansion | None, kernel: Kernel) -> "Mixture":
        """That of one term of a sum of kernels, by the terms of the members; its mean is zero."""
        members = []
        for own in self.members:
            part = counterpart(kernel, self.kernel, own.kernel)
            distribution = own.distribution.split()[0].of_part(expansion, part)
            members.append(replace(own, kernel=part, distribution=distribution))
        return Mixture(members, kernel)


# Weights of observations with Student-t noise, drawn from their posterior.
#
# 1. The errors ε of all observations are drawn given the weights. By Matheron's rule this takes one
#    draw of field and noise from their prior, and one solution for the difference between the data
#    and this draw, instead of a factor of the posterior covariance.
# 2. The weight of each observation is drawn from its Gamma distribution given its error. The
#    weights are independent given the errors.
# 3. Steps 1 and 2 alternate. Starting from the expected weights, near which the distribution lies,
#    ten sweeps suffice in place of a long burn-in.
#
# The constant mean has a flat prior, if it is not known: the best constant for the difference is
# then the same as a draw of it from an infinitely wide normal distribution.


_SWEEPS = 10  # of Gibbs sampling, from the expected weights


@torch.no_grad()
def with_drawn_weights(
    inference: ExactInference,
    kernel: Kernel,
    likelihoods: Mapping[str, Likelihood],
    mean: Float[Tensor, "p"] | None,
    generator: np.random.Generator,
) -> ExactInference:
    """The inference under weights w drawn from p(w | y), given the hyperparameters.

    Student-t noise is Gaussian noise with the covariance N_n/w_n, w_n ~ Gamma(ν/2, ν/2). Gibbs
    sampling starts from the expected weights and draws in turn all errors ε from their Gaussian
    posterior given w, by Matheron's rule, and

        w_n | ε ~ Gamma((ν + v)/2, (ν + ε_nᵀ N_n⁻¹ ε_n)/2) .

    The weights stay as they are under Gaussian noise, and where observations were merged.
    """
    models = EStep.of(kernel, likelihoods, mean).heavy_tailed
    data = inference.data
    if not models or data.tracks or data.symbol_data or inference.size != data.num_values:
        return inference
    noises = noises_of(kernel, likelihoods)
    parts = data.unweighted().observations  # in the order of the rows of the covariance
    points, sizes = PointObservations(parts), [part.y.numel() for part in parts]
    noise = points.noise_covariance(noises)  # N, of unit weights
    noise_root = cholesky(noise)
    prior, constants = inference.prior(kernel), inference.design(noises)[:, 1:]
    values, vectors = torch.linalg.eigh(prior)  # without noise, it may be singular to rounding
    root = vectors * values.clamp_min(0).sqrt()
    weights = list(data.all_weights())
    for _ in range(_SWEEPS):
        normal = torch.from_numpy(generator.standard_normal((2, len(prior)))).to(prior)
        spread = torch.cat(
            [
                weight.rsqrt().repeat_interleave(part.y.shape[-1])
                for part, weight in zip(parts, weights, strict=True)
            ]
        )
        draws = root @ normal[0], spread * (noise_root @ normal[1])
        scaled = spread.unsqueeze(-1) * noise * spread
        errors = drawn_errors(points.values, prior, scaled, *draws, constants, mean)
        whitened = torch.linalg.solve_triangular(noise_root, errors.unsqueeze(-1), upper=False)
        for i, (part, rows) in enumerate(zip(parts, whitened.split(sizes), strict=True)):
            model = models.get(part.key.label)
            if model is not None:
                distance = rows.view(part.y.shape).square().sum(-1)
                weights[i] = model.drawn_weights(distance, part.y.shape[-1], generator)
    return inference.of(data.unweighted().weighted(weights, 0.0))


def drawn_errors(
    y: Float[Tensor, "M"],
    prior: Float[Tensor, "M M"],
    noise: Float[Tensor, "M M"],
    field: Float[Tensor, "M"],
    error: Float[Tensor, "M"],
    constants: Float[Tensor, "M p"],
    mean: Float[Tensor, "p"] | None,
) -> Float[Tensor, "M"]:
    """A draw of y − Hc − f given y, from draws of the prior and of the noise with the covariances
    `prior` and `noise` (Matheron's rule); the mean c is known or has a flat prior."""
    factor = cholesky(prior + noise)
    # What the draws from the prior fail to explain; its solution corrects the drawn noise below.
    rest = y - field - error
    if mean is None:
        design = torch.cholesky_solve(constants, factor)
        # The pseudo-inverse keeps the mean zero along a direction that no observation depends on.
        information = torch.linalg.pinv(constants.mT @ design, hermitian=True)
        mean = information @ (design.mT @ rest)
    rest = torch.cholesky_solve((rest - constants @ mean).unsqueeze(-1), factor)
    return error + (noise @ rest).squeeze(-1)


# A sample of the hyperparameters that few observations leave open.
#
# 1. The trained hyperparameters become coordinates u, with the ranges and floors of a search.
# 2. If all of them have priors, `integrated` draws from their posterior by adaptive importance
#    sampling. Its first proposal is Gaussian, with the precision H + (curvature of the prior),
#    where H is the average information. `_draws_needed` sets the number of effective draws: it
#    measures at 16 points how much of a predictive variance comes from the hyperparameters at all,
#    because only that part has a Monte Carlo error.
# 3. Otherwise, as for learned spectra, whose curves have many coordinates, `about_a_fit` draws 32
#    times from Laplace's approximation and truncates the weights.
# 4. The draws are resampled to at most 64 members of equal weight, or fewer if their factors exceed
#    the memory, because every member predicts again.
# 5. `_member` computes the posterior of each one when a prediction first needs it, under Student-t
#    noise with drawn weights of the observations. A member whose covariance cannot be factorised is
#    left out, and the remaining weights are normalised again.


_SIZE, _LEAST = 32, 1e-3  # draws about a fit, and the weight of those that are kept
_WIDEST = 3.0  # standard deviation of a coordinate without a prior, at most
_LARGEST = 1200  # covariance matrix of which the factors of all draws are kept: 0.4 GB
_MEMORY = 5e7  # numbers in all factors
_FEW = 4.0  # effective draws
_MEMBERS = 64  # of a mixture, each of which predicts: their error of error bars is below 9 %
_LIKELY = 0.5  # a probability at which a warning is given
_EFFECTIVE, _TOLERANCE = 100.0, 0.02  # draws at least, and their error of error bars
_PLACES, _STEP = 16, 1e-3  # where predictions tell how many draws they need


@dataclass(frozen=True)
class Sample:
    """Posteriors under draws of the hyperparameters; empty if none is open.

    Attributes:
        draws: of the hyperparameters, in the coordinates of a search; None if empty.
        longer: the probability that the lengthscale of a field exceeds the extent of the data.
        compute: the posteriors under some of the draws, with their weights.
    """

    draws: Draws | None = None
    longer: float = 0.0
    compute: Callable[[], Sequence[Member]] = tuple

    @cached_property
    def members(self) -> Sequence[Member]:
        """The posteriors with their weights, computed when a prediction first asks for them."""
        return self.compute()

    def check(self, symbol: Symbol) -> None:
        """Warn of potentials that have long waves, which the data cannot distinguish from the
        constant mean."""
        if symbol.order < 0 and self.longer > _LIKELY:
            warnings.warn(
                "a lengthscale exceeds the extent of the data with a probability of "
                f"{self.longer:.2f}: the data barely distinguish such long waves from the constant "
                f"mean, and error bars of {type(symbol).__name__} may be too small; give more "
                "distant observations, a prior of the lengthscale, or a mean that is known",
                DataWarning,
                stacklevel=6,
            )


def leaves_spectra_open(inference: Inference, kernel: Kernel) -> bool:
    """Whether observations are so few that they leave a learned spectrum open."""
    few = inference.is_exact and inference.num_values <= MOST_SAMPLED
    return few and has_learned_spectrum(kernel, trained=True)


@torch.no_grad()
def sample_of_hyperparameters(
    inference: Inference,
    kernel: Kernel,
    likelihoods: Mapping[str, Likelihood],
    mean: Float[Tensor, "p"] | None,
) -> Sample:
    """Posteriors under a sample of all trained hyperparameters.

    Where all of these have a weak prior, or one that the user registered, the sample is that of
    `adaptive_draws`, as large as error bars need whose Monte Carlo error is 2 %. Otherwise, as for
    learned spectra, it consists of 32 draws about those of a fit. You get a `DataWarning` if few
    draws have most of the weight. Under Student-t noise every posterior has weights of the
    observations that are drawn as well; the degrees of freedom are those of the fit.

    Args:
        inference, kernel, likelihoods, mean: of a fitted model, which are not changed; the mean is
            None if it is the best constant.

    Raises:
        ValueError: there is no exact covariance, or it is large.
    """
    _check(inference)
    kernel, likelihoods = deepcopy((kernel, dict(likelihoods)))
    survey = inference.data.survey
    coordinates = search_coordinates(kernel, likelihoods, survey)
    if not coordinates.parts:
        return Sample()
    if not inference.data.tracks:
        inference = inference.of(inference.data.in_one_piece())
    model = Model(inference, kernel, likelihoods, mean, coordinates)
    priors = None if inference.data.tracks else WeakPriors.of(kernel, likelihoods, survey)
    draws = about_a_fit(model) if priors is None else integrated(model, priors)
    if draws is None:
        return Sample()
    effective = draws.effective
    if not prior_scales(kernel, coordinates).any():  # few curves are better than one of them
        _warn_of_few(len(draws.weights), effective)
    if priors is not None:
        most = int(min(effective, _MEMBERS, _MEMORY / inference.size**2))
        kept = draws.resampled(max(most, 1), np.random.default_rng(0))
    else:
        kept = Draws(draws.u[chosen := draws.weights >= _LEAST], draws.weights[chosen], np.nan)
    longer = 0.0 if priors is None else _longer(model, draws)
    model = replace(model, coordinates=coordinates.without_ranges())
    return Sample(draws, longer, partial(_members, model, kept))


@torch.no_grad()
def _members(model: Model, drawn: Draws) -> list[Member]:
    """The posteriors under draws; empty, with a `DataWarning`, if none can be computed."""
    pairs = zip(drawn.weights, _parts(model, drawn.u), strict=True)
    members = [(w, parts) for w, parts in pairs if parts is not None]
    if not members:
        warnings.warn(
            "the posterior cannot be computed under other hyperparameters than the learned ones: "
            "error bars take these as known, and may be too small; give priors, or more noise",
            DataWarning,
            stacklevel=3,
        )
    total = sum(w for w, _ in members)
    return [Member(float(w / total), *parts) for w, parts in members]


def _longer(model: Model, draws: Draws) -> float:
    """The probability that the lengthscale of a field exceeds the extent of the data; you get a
    `DataWarning` of lengthscales below the distances of neighbours."""
    distances, longest = model.inference.data.survey.distances, 0.0
    names = {own: name for name, own in parameter_names(model.kernel, model.likelihoods).items()}
    every = dict(_values(model, draws))
    leaves = [(term, leaf) for term in terms(model.kernel) for leaf in term.leaves]
    for term, leaf in leaves:
        if not (leaf.kernel.has_lengthscale and leaf.kernel.raw_lengthscale in every):
            continue
        lengths = every[leaf.kernel.raw_lengthscale]
        dims = leaf.columns(leaf_dims(term, leaf, len(distances.extent)))
        spacing, extent = distances.typical(dims), distances.extent[list(dims)].max()
        shorter = draws.weights @ (lengths.max(-1) < spacing)
        if shorter > _LIKELY:
            warnings.warn(
                f"{names[leaf.kernel.raw_lengthscale]} is less than {spacing:.3g}, the median "
                f"distance of neighbours, with a probability of {shorter:.2f}: the field changes "
                "between the observations, and error bars may be too small; give denser "
                "observations, or a prior of the lengthscale",
                DataWarning,
                stacklevel=4,
            )
        if term.factor.degree:
            longest = max(longest, float(draws.weights @ (lengths.min(-1) > extent)))
    return longest


def _values(model: Model, draws: Draws) -> Iterator[tuple[nn.Parameter, Float[np.ndarray, "S k"]]]:
    """The values of every parameter in all draws."""
    coordinates = model.coordinates
    for part, u in zip(coordinates.parts, coordinates.split(draws.u), strict=True):
        yield part.parameter, part.values(part.on_device(u)).cpu().numpy()


def integrated(model: Model, priors: WeakPriors) -> Draws:
    """Draws from the posterior of all hyperparameters, as many as error bars need.

    With the covariance S of the coordinates u about their best values, and the mean m and the
    variance v of a prediction, r = (∂m)ᵀS(∂m)/v + exp(½ (∂log v)ᵀS(∂log v)) − 1 is how much
    larger its variance is than v, and q = r/(1 + r) is the share that the draws tell. Error bars
    have an error of about q/√(2 ESS).
    """
    prior, start = PriorOfCoordinates(model, priors), model.coordinates.get()
    parts = model.inference, model.kernel, model.likelihoods, model.coordinates, model.mean
    covariance = np.linalg.inv(average(*parts) + prior.precision(start))
    model.coordinates.set(start)
    return adaptive_draws(
        lambda u: model.evidence(u) + prior.log_density(u),
        prior.draw,
        prior.log_proposal,
        start,
        0.5 * (covariance + covariance.T),
        _draws_needed(model, start, covariance),
        np.random.default_rng(0),
    )


def _draws_needed(
    model: Model, start: Float[np.ndarray, "k"], covariance: Float[np.ndarray, "k k"]
) -> float:
    """The effective number of draws that the error bars need, in the box of the data."""
    if not model.inference.serves_batches(model.kernel):
        return _EFFECTIVE
    low, high = torch.tensor(model.inference.data.survey.box, dtype=torch.float64).mT
    sobol = torch.quasirandom.SobolEngine(len(low), scramble=True, seed=0)
    x = low + (high - low) * sobol.draw(_PLACES, dtype=torch.float64)
    steps = _STEP * np.eye(len(start))
    u = np.concatenate([start[None], start + steps, start - steps])
    means, variances = model.moments(u, x.to(next(model.kernel.parameters()).device))
    logs = np.log(np.maximum(variances, np.finfo(float).tiny))
    slopes = [np.subtract(*np.split(own[1:], 2)) / (2 * _STEP) for own in (means, logs)]
    of_mean, of_log = (np.einsum("it,ij,jt->t", own, covariance, own) for own in slopes)
    # The bound 3 keeps a variance whose logarithm is almost undetermined from overflowing; the
    # share q is then close to one anyway.
    ratio = of_mean / np.exp(logs[0]) + np.expm1(np.minimum(0.5 * of_log, 3.0))
    share = np.nanmean(ratio / (1 + ratio))
    return max(_EFFECTIVE, 0.5 * (share / _TOLERANCE) ** 2)


def about_a_fit(model: Model) -> Draws | None:
    """Draws from Laplace's approximation N(û, H⁻¹) in the coordinates u of a search, with the
    average information H. They have the weights w ∝ p(y|u) p(u) / N(u; û, H⁻¹), none more than the
    mean weight times √S (Ionides 2008, *Truncated importance sampling*). Without a prior the
    coordinate of a positive parameter, its logarithm, has an even one. None if no evidence can be
    computed."""
    coordinates, start = model.coordinates, model.coordinates.get()
    parts = model.inference, model.kernel, model.likelihoods
    # A coordinate that the data leave open would have an infinite variance; the additional
    # precision limits its standard deviation to `_WIDEST`.
    open_ones = prior_scales(model.kernel, coordinates) == 0
    precision = average(*parts, coordinates, model.mean) + np.diag(open_ones * _WIDEST**-2)
    root = np.linalg.cholesky(np.linalg.inv(precision))
    points, logs = [], []
    for draw in np.random.default_rng(0).standard_normal((_SIZE, len(start))):
        u = np.clip(start + root @ draw, coordinates.low, coordinates.high)
        coordinates.set(u)
        try:
            evidence = log_marginal_likelihood(*parts, model.mean)
        except (torch.linalg.LinAlgError, ValueError, RuntimeError):
            continue
        noise = log_prior_of_noise(*parts[1:], model.inference.data.survey)
        points.append(u)
        # −½ drawᵀdraw is the logarithm of the proposal, up to a constant.
        logs.append(float(evidence + coordinates.log_prior() + noise) + 0.5 * draw @ draw)
    if not points:
        return None
    return Draws(np.array(points), truncated_weights(np.array(logs)), np.nan)


Parts = tuple[Kernel, FieldDistribution]
"""A kernel, and the posterior under it."""


def _parts(model: Model, u: Float[np.ndarray, "S k"]) -> Iterator[Parts | None]:
    """The parts of the member at every u; None where they cannot be computed."""
    generator = np.random.default_rng(1)
    e_step = EStep.of(model.kernel, model.likelihoods, model.mean)
    batches = model.inference.serves_batches(model.kernel) and not e_step.heavy_tailed
    for some in np.array_split(u, -(-len(u) // model.step)):
        try:
            batch = model.posteriors(some) if batches and len(some) > 1 else None
        except (torch.linalg.LinAlgError, ValueError, RuntimeError):  # if one fails, so do all
            batch = None
        if batch is None:
            yield from (_member(model, one, generator) for one in some)
        else:
            yield from (_of(model, *pair) for pair in batch)


def _member(
    model: Model, u: Float[np.ndarray, "k"], generator: np.random.Generator
) -> Parts | None:
    """The parts of a member, under Student-t noise with drawn weights; None if they cannot be
    computed."""
    kernel, likelihoods = model.at(u)
    try:
        parts = kernel, likelihoods, model.mean
        inference = with_drawn_weights(model.inference, *parts, generator)
        posterior = inference.posterior(kernel, noises_of(kernel, likelihoods), model.mean)
    except (torch.linalg.LinAlgError, ValueError, RuntimeError):
        return None
    return _of(model, kernel, posterior)


def _of(model: Model, kernel: Kernel, posterior: Posterior) -> Parts:
    return kernel, posterior.field(fixed=model.mean is not None)


def _check(inference: Inference) -> None:
    exact = inference.is_exact
    size = inference.size if exact else inference.num_values
    if not exact or size > _LARGEST:
        raise ValueError(
            f"expected at most {_LARGEST} values under the exact kernel, whose posteriors under "
            f"many hyperparameters are kept, got {size}{'' if exact else ' on features'}; fit "
            "fewer observations (gp_orff.thin) with frequencies=Auto(), or use posterior(): with "
            "many observations, little uncertainty remains"
        )


def _warn_of_few(count: int, effective: float) -> None:
    if effective < _FEW:
        warnings.warn(
            f"the {count} draws of hyperparameters have an effective number of {effective:.1f}: "
            "their distribution is far from a Gaussian one, and error bars may be too small; give "
            "them priors, or take a simpler kernel",
            DataWarning,
            stacklevel=4,
        )


def truncated_weights(logs: Float[np.ndarray, "S"]) -> Float[np.ndarray, "S"]:
    """Importance weights from their logarithms, none more than the mean weight times √S, over their
    sum."""
    weights = np.exp(logs - logs.max())
    weights = np.minimum(weights, weights.mean() * np.sqrt(len(weights)))
    return weights / weights.sum()
