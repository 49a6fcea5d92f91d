"""A model's data and hyperparameters as they were when its posterior was made."""

import warnings
from abc import ABC, abstractmethod
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from gpytorch.kernels import AdditiveKernel, Kernel
from gpytorch.means import Mean, ZeroMean
from gpytorch.models import ExactGP
from jaxtyping import Float
from torch import Tensor

from gp_orff.data.dataset import Dataset
from gp_orff.data.noise.covariances import Noises, noise_of, noises_of
from gp_orff.data.observations import of_constant
from gp_orff.data.patterns import DEFAULT
from gp_orff.data.reading import Options, read
from gp_orff.data.sources import is_constant, varying_mean
from gp_orff.exact_gp.orff_kernel import ORFFKernel
from gp_orff.features.frequencies.grid import MOST_FEATURES, Grid
from gp_orff.inference.conditioning import (
    ExactInference,
    FeatureInference,
    Inference,
    Posterior,
)
from gp_orff.inference.distributions import FieldDistribution, PlusWhite
from gp_orff.inference.representation import Representation
from gp_orff.kernels.symbol_covariance import require
from gp_orff.kernels.tree import space_of, terms
from gp_orff.symbols.base import Identity, Symbol
from gp_orff.symbols.patches import TooFine


class Located(NamedTuple):
    """A distribution, and the observations on whose frequencies it is: they know where it holds."""

    inference: Inference
    distribution: FieldDistribution


class Snapshot(ABC):
    """What a `FieldPosterior` is made from."""

    kernel: Kernel
    inference: Inference
    noises: Noises
    prior_mean: Mean
    given: Float[Tensor, "p"] | None  # a fixed constant mean; None for the best one
    num_inputs: int

    @abstractmethod
    def elsewhere(self, points: Float[Tensor, "n d"]) -> Inference:
        """The observations, on frequencies that serve these points too."""

    @property
    def device(self) -> torch.device:
        return next(self.kernel.parameters()).device

    @cached_property
    def space(self) -> tuple[int, ...]:
        """The inputs that are directions of space."""
        return space_of(self.kernel, self.num_inputs)

    @property
    def somewhere(self) -> Float[Tensor, "1 d"]:
        """A point of the data."""
        return self.inference.data.survey.sample[0].x[:1]

    @cached_property
    def own(self) -> Posterior:
        """On the data's own frequencies."""
        return self.inference.posterior(self.kernel, self.noises, self.given)

    @cached_property
    def constant(self) -> Float[Tensor, "p"]:
        return self.own.evidence.best_mean() if self.given is None else self.given

    @torch.no_grad()
    def located(self, points: Float[Tensor, "n d"] | None = None) -> Located:
        """On the data's own domain, or one that holds these points too."""
        if points is None:
            return Located(self.inference, self.own.distribution)
        return self._on(self.elsewhere(points))

    def _on(self, inference: Inference) -> Located:
        found = inference.posterior(self.kernel, self.noises, self.constant)
        return Located(inference, found.distribution)

    def in_domain(self, located: Located, points: Float[Tensor, "n d"]) -> bool:
        """Whether a distribution is right at these points."""
        return located.inference.in_domain(self.kernel, points)

    def require(self, points: Float[Tensor, "n d"]) -> None:
        """Raise ValueError for points that the data's own frequencies do not serve."""
        if not self.inference.in_domain(self.kernel, points):
            self.inference.draws[0].lattice.check(points)

    def check_symbol(self, symbol: Symbol) -> None:
        """Raise ValueError for a symbol that does not exist for the field."""
        require(symbol, self.kernel, self.space)

    def by_features(self, points: Float[Tensor, "n d"]) -> Inference | None:
        """Observations on features, for what the exact kernel has no closed form of."""
        return None

    @torch.no_grad()
    def apply(self, symbol: Symbol, located: Located, points: Float[Tensor, "n d"]) -> Located:
        """Of a symbol of the field, which looks at these points."""
        inference, distribution = located
        try:
            image = inference.apply(symbol, distribution, self.kernel, self.space)
        except NotImplementedError as error:
            exact = not isinstance(inference, FeatureInference)
            features = self.by_features(points) if exact else None
            if features is None:
                raise
            if isinstance(error, TooFine):
                _warn_of_features(error)
            return self.apply(symbol, self._on(features), points)
        return Located(inference, image)

    def mean(self, points: Float[Tensor, "n d"], symbol: Symbol | None) -> Float[Tensor, "n q"]:
        """The prior mean of the field, or of a symbol of it."""
        if symbol is None:
            return self.constant + varying_mean(self.prior_mean, points, len(self.constant))
        if not is_constant(self.prior_mean):
            raise NotImplementedError(
                f"{type(symbol).__name__} of {type(self.prior_mean).__name__}, a mean that varies, "
                "is not known: expected a constant mean; make the trend a term of the kernel"
            )
        image = of_constant(symbol, len(self.space), len(self.constant)).to(points)
        return (image @ self.constant).expand(len(points), -1)


def _warn_of_features(error: TooFine) -> None:
    warnings.warn(
        f"{error}. This answer is of a posterior on such features, less accurate than exact ones; "
        "ask for smaller pieces of the integral, or for features from the start",
        UserWarning,
        stacklevel=2,
    )


@dataclass(frozen=True)
class ExactGPSnapshot(Snapshot):
    """Of a trained `ExactGP`."""

    kernel: Kernel
    inference: Inference
    noises: Noises
    prior_mean: Mean
    given: Float[Tensor, "p"] | None
    num_inputs: int

    @classmethod
    @torch.no_grad()
    def of(cls, model: ExactGP) -> "ExactGPSnapshot":
        if not isinstance(model, ExactGP) or model.train_inputs is None:
            raise TypeError(
                f"expected a gpytorch ExactGP with training data, got {type(model).__name__}"
            )
        covariance, mean = (
            deepcopy(getattr(model, name, None)) for name in ("covar_module", "mean_module")
        )
        wrapped = isinstance(covariance, ORFFKernel)
        if (
            mean is None
            or not isinstance(covariance, Kernel)
            or any(isinstance(part, ORFFKernel) for part in list(covariance.modules())[1:])
        ):
            raise TypeError(
                "expected a model with mean_module and covar_module, the latter an ORFFKernel or "
                f"a kernel without one inside, got {type(covariance).__name__}; sum and scale "
                "kernels inside ORFFKernel"
            )
        kernel = (covariance.base_kernel if wrapped else covariance).double()
        p, mean = terms(kernel)[0].num_outputs, mean.double()
        for module in (kernel, mean):
            module.requires_grad_(False)
        x, y = model.train_inputs[0].double(), model.train_targets.double().reshape(-1, p)
        trend = mean(x).reshape(-1, p)
        given = trend[0] if is_constant(mean) else torch.zeros_like(trend[0])
        observations = read(x, y + given - trend, p, Options())
        data = Dataset.in_memory([part.to(x.device) for part in observations])
        draws = [own.double() for own in covariance.frequencies] if wrapped else None
        inference = FeatureInference(data, draws) if wrapped else ExactInference(data)
        noise = noise_of(model.likelihood, p).double()
        return cls(kernel, inference, {DEFAULT: noise}, mean, given, x.shape[-1])

    def elsewhere(self, points):
        self.inference.draws[0].lattice.check(points)
        return self.inference


@dataclass(frozen=True)
class PartSnapshot(Snapshot):
    """Of one term of a sum, given the data of the whole; without the mean."""

    whole: Snapshot
    kernel: Kernel
    chosen: tuple[int, ...]  # its terms among those of the whole

    @classmethod
    def of(cls, whole: Snapshot, name: str | int) -> "PartSnapshot":
        parts = list(whole.kernel.kernels) if isinstance(whole.kernel, AdditiveKernel) else []
        part = parts[name] if isinstance(name, int) and -len(parts) <= name < len(parts) else None
        part = getattr(whole.kernel, name, None) if isinstance(name, str) else part
        place = [i for i, own in enumerate(parts) if own is part]
        if not place:
            raise ValueError(
                f"expected a term of a sum of kernels, by its name, such as 'curl_free' of a "
                f"HelmholtzKernel, or its number below {len(parts)}; got {name!r}"
            )
        start = sum(len(terms(own)) for own in parts[: place[0]])
        return cls(whole, part, tuple(range(start, start + len(terms(part)))))

    @property
    def inference(self) -> Inference:
        return self.whole.inference

    @property
    def num_inputs(self) -> int:
        return self.whole.num_inputs

    @property
    def given(self) -> Float[Tensor, "p"]:
        return torch.zeros_like(self.whole.constant)

    prior_mean = ZeroMean()

    def elsewhere(self, points):
        return self.whole.elsewhere(points)

    def require(self, points):
        self.whole.require(points)

    @property
    def space(self) -> tuple[int, ...]:
        return self.whole.space

    def located(self, points=None):
        inference, distribution = self.whole.located(points)
        own, expansion = inference.of_terms(self.whole.kernel, self.chosen)
        part = distribution.split()[0].of_part(expansion, self.kernel)
        missing = own.left_out(Identity(), self.kernel, self.space)
        return Located(own, part if missing is None else PlusWhite(part, missing[0]))


@dataclass(frozen=True)
class ModelSnapshot(Snapshot):
    """Of a `VectorFieldGP`."""

    representation: Representation
    inference: Inference
    noises: Noises
    prior_mean: Mean
    given: Float[Tensor, "p"] | None

    @classmethod
    def of(
        cls,
        representation: Representation,
        inference: Inference,
        prior_mean: Mean,
        given: Float[Tensor, "p"] | None,
    ) -> "ModelSnapshot":
        parts = (representation.kernel, representation.likelihoods, prior_mean)
        kernel, likelihoods, mean = map(deepcopy, parts)
        for module in (kernel, mean, *likelihoods.values()):
            module.requires_grad_(False)
        own = replace(representation, kernel=kernel, likelihoods=likelihoods)
        return cls(own, inference, noises_of(kernel, likelihoods), mean, given)

    @property
    def kernel(self) -> Kernel:
        return self.representation.kernel

    @property
    def num_inputs(self) -> int:
        return self.representation.data.num_inputs

    @property
    def log_marginal_likelihood(self) -> float:
        values, elbo_correction = (
            self.inference.num_values,
            self.representation.data.elbo_correction,
        )
        return (self.own.evidence.log_density(self.constant, values) + elbo_correction).item()

    def by_features(self, points):
        rule = Grid(data=self.representation.data.box, max_features=MOST_FEATURES)
        return replace(self.representation, rule=rule).wider(points)

    def elsewhere(self, points):
        inference = self.representation.wider(points)
        if not inference.in_domain(self.kernel, points):  # a grid by hand, or statistics alone
            inference.draws[0].lattice.check(points)
        return inference
