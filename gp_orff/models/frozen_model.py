"""Snapshots of a model for predictions, and symbols by features if they have no closed form."""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import takewhile
from typing import NamedTuple

import torch
from gpytorch.kernels import AdditiveKernel, Kernel
from gpytorch.means import Mean, ZeroMean
from gpytorch.models import ExactGP
from jaxtyping import Bool, Float
from torch import Tensor

from gp_orff.data.dataset import Dataset, is_constant, varying_mean
from gp_orff.data.noise import Noises, noise_of, noises_of
from gp_orff.data.patterns import DEFAULT
from gp_orff.data.reading import Options, read
from gp_orff.exact_gp.orff_kernel import ORFFKernel
from gp_orff.features.draws import GridWarning
from gp_orff.features.grid import MOST_FEATURES, Grid
from gp_orff.inference.exact import ExactInference
from gp_orff.inference.features import FeatureInference, Inference, Posterior
from gp_orff.inference.posteriors import FieldDistribution, PlusWhite
from gp_orff.inference.price import NEGLIGIBLE
from gp_orff.inference.representation import Representation
from gp_orff.kernels.base import as_real_tensor, parts_of
from gp_orff.kernels.derivatives import decided, require
from gp_orff.kernels.fields import HelmholtzKernel, summands
from gp_orff.kernels.tree import num_outputs, space_of, terms
from gp_orff.models.few_readings import Mixture, Sample
from gp_orff.symbols.base import Identity, Symbol
from gp_orff.symbols.patches import TooFine

# Warnings of symbols that have no closed form under the exact kernel and use features.


def warn_of_features(
    symbol: Symbol,
    error: NotImplementedError,
    features: FeatureInference,
    kernel: Kernel,
    noises: Noises,
) -> None:
    """Warn if features replace the exact kernel in an integral over many lengthscales, or if they
    truncate a variance that is not small compared with the noise variance."""
    if isinstance(error, TooFine):
        warnings.warn(
            f"{error}. This result uses features, which are less accurate than the exact kernel; "
            "split the integral into smaller pieces, or use features from the start",
            UserWarning,
            stacklevel=2,
        )
    ratio = max(features.truncation_ratios(kernel, noises).values(), default=0.0)
    if ratio > NEGLIGIBLE:
        warnings.warn(
            f"{type(symbol).__name__} has no closed form under the exact kernel, and is computed "
            f"on a frequency grid, whose truncated variance is {ratio:.2g} times the noise "
            "variance: it is treated as noise of observations, so that error bars are wider than "
            "those of the exact kernel; use a smoother kernel or a smaller region to reduce it",
            GridWarning,
            stacklevel=2,
        )


# From a model to the distribution of a field, or of a symbol of it.
#
# 1. `ModelSnapshot.of` and `ExactGPSnapshot.of` copy the modules of a model. Data and inference are
#    immutable and are shared.
# 2. `field()` is the posterior on the frequencies for the domain of the data. Points outside this
#    domain, and symbols without an image under these frequencies, need other frequencies. For a
#    `ModelSnapshot`, `inference_at` makes them, and the posterior is computed again.
# 3. `apply` maps the distribution by a symbol. If the exact kernel has no closed form for it,
#    `feature_inference` returns a frequency grid. The posterior is computed on the grid, and the
#    symbol is applied there. Only a `ModelSnapshot` has such a grid.
# 4. `mean` adds the prior mean, which the distributions do not include.
# 5. A `PartSnapshot` uses the joint posterior of the complete sum, and then selects the features or
#    the kernel of one term.
class FieldOnDomain(NamedTuple):
    """The distribution of a field, and the inference whose frequencies and domain it uses."""

    inference: Inference
    distribution: FieldDistribution


class KernelOfField:
    """A kernel that does not change, and the space of its field."""

    kernel: Kernel
    num_inputs: int

    @property
    def device(self) -> torch.device:
        return next(self.kernel.parameters()).device

    @cached_property
    def space(self) -> tuple[int, ...]:
        """The input columns that are directions of space."""
        return space_of(self.kernel, self.num_inputs)

    def check_symbol(self, symbol: Symbol) -> None:
        """Raise a ValueError for a symbol that does not exist for the field."""
        require(symbol, self.kernel, self.space)


class Snapshot(KernelOfField, ABC):
    """The parts of a model that a `FieldPosterior` uses. Later changes of the model do not affect
    it."""

    inference: Inference
    noises: Noises
    prior_mean: Mean
    fixed_mean: Float[Tensor, "p"] | None  # None if the mean is the constant of largest evidence
    is_part = False  # whether it is a `PartSnapshot`

    @abstractmethod
    def inference_at(self, points: Float[Tensor, "n d"], symbol: Symbol | None = None) -> Inference:
        """The inference on frequencies that have an image under the symbol, and whose domain
        contains the data and these points."""

    @property
    def data_point(self) -> Float[Tensor, "1 d"]:
        """One point of the data."""
        return self.inference.data.survey.sample[0].x[:1]

    @cached_property
    def posterior(self) -> Posterior:
        """The posterior on the frequencies for the domain of the data."""
        return self.inference.posterior(self.kernel, self.noises, self.fixed_mean)

    @cached_property
    def constant(self) -> Float[Tensor, "p"]:
        """The constant mean (p,): the fixed one, or that with the largest evidence."""
        return self.posterior.mean if self.fixed_mean is None else self.fixed_mean

    @torch.no_grad()
    def field(
        self, points: Float[Tensor, "n d"] | None = None, symbol: Symbol | None = None
    ) -> FieldOnDomain:
        """The field on the domain of the data, with features that have an image under the `symbol`.
        The domain is extended to contain `points`."""
        if points is None:
            distribution = self.posterior.field(fixed=self.fixed_mean is not None)
            return FieldOnDomain(self.inference, distribution)
        return self._field_by(self.inference_at(points, symbol))

    def _field_by(self, inference: Inference) -> FieldOnDomain:
        # On each domain, the constant is that of the domain of the data.
        posterior = inference.posterior(self.kernel, self.noises, self.constant)
        return FieldOnDomain(inference, posterior.field(fixed=self.fixed_mean is not None))

    @torch.no_grad()
    def learned_field(
        self,
        points: Float[Tensor, "n d"],
        symbol: Symbol | None = None,
        inference: Inference | None = None,
    ) -> FieldOnDomain:
        """The field for the learned hyperparameters, without integration over them, at any points.
        It uses the given inference, or that of the data if it is valid for the points and the
        symbol."""
        if inference is not None:
            return self._field_by(inference)
        field = FieldOnDomain(
            self.inference, self.posterior.field(fixed=self.fixed_mean is not None)
        )
        if self.in_domain(field, points, symbol):
            return field
        return self._field_by(self.inference_at(points, symbol))

    def in_domain(
        self, field: FieldOnDomain, points: Float[Tensor, "n d"], symbol: Symbol | None = None
    ) -> bool:
        """Whether the distribution is valid at these points, and has an image under the symbol."""
        inference = field.inference
        return inference.serves(symbol) and inference.in_domain(self.kernel, points)

    def inside(self, field: FieldOnDomain, points: Float[Tensor, "n d"]) -> Bool[Tensor, "n"]:
        """The points where the distribution is valid, without a check that depends on values.

        Raises:
            NotImplementedError: The model has the exact kernel or a harmonic kernel.
        """
        draws = getattr(field.inference, "draws", [])
        if not draws or any(draw.decays for draw in draws):
            raise NotImplementedError(
                "torch.export expects a model with features of waves that do not decay, got the "
                "exact kernel or a HarmonicKernel; condition a model with frequencies="
                "gp_orff.Auto(exact_values=0)"
            )
        if field.inference.has_shared_columns:
            return ~draws[0].shared.outside(points)
        return torch.ones_like(points[:, 0], dtype=torch.bool)

    def require(self, points: Float[Tensor, "n d"], symbol: Symbol | None = None) -> None:
        """Check that the frequencies for the data are valid for these points and the symbol.

        Raises:
            ValueError: Points are outside the domain of the frequencies.
            NotImplementedError: The frequencies have no image under the symbol.
        """
        self.inference.require(symbol)
        if not self.inference.in_domain(self.kernel, points):
            self.inference.draws[0].shared.check(points)

    def with_part(self, kernel: Kernel, indices: Sequence[int]) -> "PartSnapshot":
        """The part with the terms of these indices, whose sum is `kernel`."""
        return PartSnapshot(self, kernel, tuple(indices))

    def feature_inference(self, points: Float[Tensor, "n d"]) -> Inference | None:
        """Inference by features, for symbols whose covariance has no closed form; None if it is not
        available."""
        return None

    @torch.no_grad()
    def apply(
        self, symbol: Symbol, field: FieldOnDomain, points: Float[Tensor, "n d"]
    ) -> FieldOnDomain:
        """The distribution of a symbol of the field; `points` are its support points."""
        inference, distribution = field
        symbol = decided(symbol, self.kernel)
        try:
            image = inference.apply(symbol, distribution, self.kernel, self.space)
        except NotImplementedError as error:
            exact = inference.is_exact
            features = self.feature_inference(points) if exact else None
            if features is None:
                raise
            warn_of_features(symbol, error, features, self.kernel, self.noises)
            return self.apply(symbol, self._field_by(features), points)
        return FieldOnDomain(inference, image)

    def trend(self, points: Float[Tensor, "n d"], symbol: Symbol | None) -> Float[Tensor, "n _"]:
        """The prior mean of the field at n points if it is not constant; otherwise zero."""
        if symbol is None:
            return varying_mean(self.prior_mean, points, len(self.constant))
        if not is_constant(self.prior_mean):
            raise NotImplementedError(
                f"{type(symbol).__name__} of a field with the mean {type(self.prior_mean).__name__}"
                " is not available: expected a constant mean; make the trend a term of the kernel"
            )
        return torch.zeros_like(points[:, :1])


@dataclass(frozen=True)
class ExactGPSnapshot(Snapshot):
    """A snapshot of a trained gpytorch `ExactGP`."""

    kernel: Kernel
    inference: Inference
    noises: Noises
    prior_mean: Mean
    fixed_mean: Float[Tensor, "p"] | None
    num_inputs: int

    @classmethod
    @torch.no_grad()
    def of(cls, model: ExactGP) -> "ExactGPSnapshot":
        """Copy the modules and data of the model, in float64. A mean that is not constant is
        subtracted from y."""
        if not isinstance(model, ExactGP) or model.train_inputs is None:
            raise TypeError(
                f"expected a gpytorch ExactGP with training data, got {type(model).__name__}"
            )
        covariance, mean = (
            deepcopy(getattr(model, name, None)) for name in ("covar_module", "mean_module")
        )
        has_features = isinstance(covariance, ORFFKernel)
        kernel = covariance.base_kernel if has_features else covariance
        if mean is None or not isinstance(kernel, Kernel) or parts_of(kernel, ORFFKernel):
            raise TypeError(
                "expected a model with mean_module and covar_module, where covar_module is an "
                f"ORFFKernel or contains none, got {type(covariance).__name__}; put sums and "
                "scales of kernels inside one ORFFKernel"
            )
        kernel, mean = (part.double().requires_grad_(False) for part in (kernel, mean))
        p = num_outputs(kernel)
        targets = as_real_tensor(model.train_targets, "the targets of ExactGP")
        x, y = model.train_inputs[0].double(), targets.double().reshape(-1, p)
        trend = mean(x).reshape(-1, p)
        # A mean that is not constant is subtracted from y. `mean` adds it again at the points of a
        # prediction.
        constant = trend[0] if is_constant(mean) else torch.zeros_like(trend[0])
        observations = read(x, y + constant - trend, p, Options())
        data = Dataset.in_memory([group.to(x.device) for group in observations])
        draws = [draw.double() for draw in covariance.frequencies] if has_features else None
        inference = FeatureInference(data, draws) if has_features else ExactInference(data)
        noise = noise_of(model.likelihood, p).double()
        return cls(kernel, inference, {DEFAULT: noise}, mean, constant, x.shape[-1])

    def inference_at(self, points, symbol=None):
        self.require(points, symbol)  # raises, because there are no other frequencies
        return self.inference


@dataclass(frozen=True)
class PartSnapshot(Snapshot):
    """A snapshot of some terms of a sum of kernels, given all data. Its mean is zero."""

    total: Snapshot  # the snapshot of the sum
    kernel: Kernel
    term_indices: tuple[int, ...]  # the terms of the part, among the terms of the sum
    is_part = True

    @classmethod
    def of(cls, total: Snapshot, name: str | int) -> "PartSnapshot":
        """The summand with an index, or the part of a Helmholtz kernel with a name."""
        parts = summands(total.kernel)
        if isinstance(name, int) and -len(parts) <= name < len(parts):
            chosen = [parts[name]]
        else:
            halves = [h for k in parts if isinstance(k, HelmholtzKernel) for h in k.kernels]
            named = [getattr(k, str(name), None) for k in (total.kernel, *parts)]
            chosen = [k for k in named if any(k is part for part in (*parts, *halves))]
        if len(chosen) != 1:
            remedy = "; select one first, such as part(0).part('curl_free')" if chosen else ""
            raise ValueError(
                f"expected a term of a sum of kernels, by its name, such as 'curl_free' of a "
                f"HelmholtzKernel, or its index below {len(parts)}; got {name!r}, which "
                f"{len(chosen)} terms have{remedy}"
            )
        return cls.of_sum(total, chosen)

    @classmethod
    def of_sum(cls, total: Snapshot, parts: Sequence[Kernel]) -> "PartSnapshot":
        """The sum of some summands or parts of a Helmholtz kernel, or the complete kernel."""
        kernel = parts[0] if len(parts) == 1 else AdditiveKernel(*parts)
        indices = [index for part in parts for index in cls._indices(total.kernel, part)]
        return total.with_part(kernel, indices)

    @staticmethod
    def _indices(total: Kernel, part: Kernel) -> range:
        """The indices of the terms of a part, among the terms of the sum."""
        if part is total:
            return range(len(terms(total)))
        # gpytorch flattens sums, so that the parts of a Helmholtz kernel are summands. The number
        # of terms of all kernels before the part is the index of its first term.
        first = part.kernels[0] if isinstance(part, HelmholtzKernel) else part
        before = takewhile(lambda kernel: kernel is not first, total.kernels)
        start = sum(len(terms(kernel)) for kernel in before)
        return range(start, start + len(terms(part)))

    def with_part(self, kernel, indices):
        return PartSnapshot(self.total, kernel, tuple(self.term_indices[i] for i in indices))

    @property
    def inference(self) -> Inference:
        return self.total.inference

    @property
    def num_inputs(self) -> int:
        return self.total.num_inputs

    @property
    def fixed_mean(self) -> Float[Tensor, "p"]:
        return torch.zeros_like(self.total.constant)

    prior_mean = ZeroMean()

    def inference_at(self, points, symbol=None):
        return self.total.inference_at(points, symbol)

    def require(self, points, symbol=None):
        self.total.require(points, symbol)

    @property
    def space(self) -> tuple[int, ...]:
        return self.total.space

    def field(self, points=None, symbol=None):
        inference, distribution = self.total.field(points, symbol)
        part_inference, expansion = inference.of_terms(self.total.kernel, self.term_indices)
        # The grid also truncates variance of the part. It is white in space, and is added to the
        # variance of the features.
        part = distribution.split()[0].of_part(expansion, self.kernel)
        missing = part_inference.left_out(Identity(), self.kernel, self.space)
        return FieldOnDomain(
            part_inference, part if missing is None else PlusWhite(part, missing[0])
        )


@dataclass(frozen=True)
class ModelSnapshot(Snapshot):
    """A snapshot of a `VectorFieldGP`."""

    representation: Representation
    inference: Inference
    noises: Noises
    prior_mean: Mean
    fixed_mean: Float[Tensor, "p"] | None
    draw: Callable[[], Sample] = Sample  # draws the hyperparameters, for few observations

    @classmethod
    def of(
        cls,
        representation: Representation,
        inference: Inference,
        prior_mean: Mean,
        fixed_mean: Float[Tensor, "p"] | None,
        draw: Callable[[], Sample],
    ) -> "ModelSnapshot":
        """Copy the modules. Data and inference are immutable and shared."""
        modules = (representation.kernel, representation.likelihoods, prior_mean)
        kernel, likelihoods, mean = map(deepcopy, modules)
        for module in (kernel, mean, *likelihoods.values()):
            module.requires_grad_(False)
        copied = replace(representation, kernel=kernel, likelihoods=likelihoods)
        noises = noises_of(kernel, likelihoods)
        return cls(copied, inference, noises, mean, fixed_mean, draw)

    @cached_property
    def sample(self) -> Sample:
        """The sample of the hyperparameters. It is drawn at the first access, so that a sequence of
        updates need not draw it."""
        return self.draw()

    def field(self, points=None, symbol=None):
        if points is None and (members := self.sample.members):
            return FieldOnDomain(self.inference, Mixture(members, self.kernel))
        return super().field(points, symbol)

    @property
    def kernel(self) -> Kernel:
        return self.representation.kernel

    @property
    def num_inputs(self) -> int:
        return self.representation.data.num_inputs

    @property
    def log_marginal_likelihood(self) -> float:
        """log p(y) in nats. Under Student-t noise it is the ELBO."""
        num_values, elbo_correction = (
            self.inference.num_values,
            self.representation.data.elbo_correction,
        )
        nats = self.posterior.evidence.log_density(self.constant, num_values)
        return (nats + elbo_correction).item()

    @property
    def log_marginal_likelihood_error(self) -> float:
        """The standard error of log p(y) in nats, if it is estimated by iterations; otherwise 0."""
        return self.posterior.evidence.standard_error

    def apply(self, symbol, field, points):
        self.sample.check(symbol)
        return super().apply(symbol, field, points)

    def feature_inference(self, points):
        box = self.representation.data.box
        rule = Grid(data=box, max_features=MOST_FEATURES, sum_constant=False)
        return replace(self.representation, rule=rule).wider(points)

    def inference_at(self, points, symbol=None):
        representation, rule = self.representation, self.representation.rule
        if not self.inference.serves(symbol):  # the grid does not have the frequencies
            representation = replace(representation, rule=replace(rule, sum_constant=False))
        inference = representation.wider(points)
        if not inference.in_domain(self.kernel, points):  # a given grid, or statistics alone
            inference.draws[0].shared.check(points)
        return inference
