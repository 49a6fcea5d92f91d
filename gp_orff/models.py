"""`VectorFieldGP`: a vector field learned from data, with uncertainty."""

import time
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from gpytorch.constraints import GreaterThan
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import GaussianLikelihood, Likelihood, MultitaskGaussianLikelihood
from gpytorch.means import ConstantMean, Mean, MultitaskMean, ZeroMean
from jaxtyping import Float
from torch import Tensor
from tqdm import tqdm

from gp_orff.field import Conditioned, FieldPosterior, as_matrix, as_points
from gp_orff.fitting import Fit, silent
from gp_orff.frequencies import Auto, Rule
from gp_orff.frequencies.grid import box_of
from gp_orff.noise import noise_of
from gp_orff.observations import FeatureObservations, Observations
from gp_orff.resolution import infer_num_dims, input_columns
from gp_orff.starting import with_amplitude
from gp_orff.terms import terms
from gp_orff.training import log_marginal_likelihood


class VectorFieldGP(torch.nn.Module):
    r"""A Gaussian process y = f(x) + μ + ε for vectors, from a hundred points to millions.

    `fit` learns the hyperparameters by the marginal likelihood, `condition` takes them as they
    are, `posterior` is the field. Small data use the exact kernel. Otherwise one pass over the
    data gives the statistics of a frequency grid, and training costs nothing in N: starting values
    come from the evidence of a small subset that shows every scale, then narrow grids, coarse
    before fine, follow the lengthscales. What was done stands in `report`.

    Units do not matter: hyperparameters, constraints and priors are in the user's units, the search
    runs in logarithms, and starting values scale with the data. Inside, everything is float64.

    Args:
        kernel: any kernel tree that `ORFFKernel` understands; it is trained in place. A term
            without an amplitude of its own, such as a bare `CurlFreeKernel`, gets one: a
            `ScaleKernel` of outputscale 1 around it, in `model.kernel`.
        likelihood: a `MultitaskGaussianLikelihood`, or a `GaussianLikelihood` for one output; one
            global noise if None.
        mean: a constant for each output if None, of which the best one is found in closed form;
            `gpytorch.means.ZeroMean()`; or any other mean, taken as it is. Trends to be learned
            are terms of the kernel.
        frequencies: a rule; `Auto(tolerance=1e-5, max_features=4096)` if None. Of a `Grid` or
            `Auto`, the tolerance is used as it is where the noise has a thousandth of the signal's
            variance, and made to follow the noise and the posterior variance elsewhere; ranges of
            lengthscales are chosen while they are sought, and the domain grows where it is asked.

    Raises:
        TypeError: something that is no kernel, likelihood or rule.
        ValueError: in `fit` and `condition`, data that are empty, not finite, of different length
            or of another number of outputs. A model that fails keeps what it has learned.

    Example:
        >>> import gp_orff, torch
        >>> x = torch.rand(200, 2)
        >>> y = torch.stack([torch.sin(3 * x[:, 1]), torch.sin(3 * x[:, 0])], dim=-1)
        >>> model = gp_orff.VectorFieldGP(gp_orff.HelmholtzKernel(num_dims=2))
        >>> model = model.fit(x, y + 0.1 * torch.randn(200, 2), progress=False)
        >>> field = model.posterior()
        >>> field.mean(x).shape, field.variance(x).shape
        (torch.Size([200, 2]), torch.Size([200, 2]))
    """

    def __init__(
        self,
        kernel: Kernel,
        *,
        likelihood: Likelihood | None = None,
        mean: Mean | None = None,
        frequencies: Rule | None = None,
    ):
        super().__init__()
        if not isinstance(kernel, Kernel):
            raise TypeError(
                f"VectorFieldGP expects an instance of a gpytorch kernel, got {kernel!r}; for "
                "instance VectorFieldGP(gp_orff.HelmholtzKernel(num_dims=2))"
            )
        frequencies = Auto() if frequencies is None else frequencies
        if isinstance(frequencies, type) or not hasattr(frequencies, "draw"):
            raise TypeError(
                f"VectorFieldGP expects a frequency rule, got {frequencies!r}; for instance "
                "gp_orff.Auto()"
            )
        outputs = sorted({term.num_outputs for term in terms(kernel)})
        if len(outputs) != 1:
            raise ValueError(
                f"VectorFieldGP expects terms with one number of outputs, got {outputs}; wrap "
                "scalar kernels in gpytorch.kernels.MultitaskKernel"
            )
        self.num_outputs = outputs[0]
        self.kernel = with_amplitude(kernel)
        self.likelihood = (
            _default_likelihood(self.num_outputs) if likelihood is None else likelihood
        )
        self.mean = _default_mean(self.num_outputs) if mean is None else mean
        self.frequencies = frequencies
        self.double()
        noise_of(self.likelihood, self.num_outputs)  # raises for what is not known
        _check_mean(self.mean, self.num_outputs)
        self._fit: Fit | None = None
        self._observations: Observations | None = None
        self._report = "not fitted: call fit(x, y) or condition(x, y)"

    @property
    def report(self) -> str:
        """What was done to the data, in words."""
        return self._report

    def fit(
        self,
        x: Float[Tensor, "N d"],
        y: Float[Tensor, "N p"],
        *,
        progress: bool = True,
        warm_start: bool = False,
    ) -> "VectorFieldGP":
        """Learn the hyperparameters from observations y at x, and condition on them.

        Starting values come from the data; with `warm_start`, they are those the kernel and the
        likelihood have. Parameters that do not require gradients stay as they are.
        """
        began, before = time.perf_counter(), self._state()
        with tqdm(disable=not progress, unit=" evaluations", mininterval=0.5) as bar:

            def show(stage: str, nats: float) -> None:
                bar.set_description_str(f"{stage} ", refresh=False)
                bar.set_postfix({"nats per number": f"{nats:.4f}"}, refresh=False)
                bar.update()

            try:
                fit = self._prepare(x, y, show)
                fit.run(warm_start)
                observations = fit.observations()
                found = self._best_mean(fit, observations)
            except BaseException:
                self._restore(before)
                raise
        what = f"fitted in {time.perf_counter() - began:.1f} s"
        self._accept(fit, observations, found, what)
        return self

    def condition(self, x: Float[Tensor, "N d"], y: Float[Tensor, "N p"]) -> "VectorFieldGP":
        """Condition on observations y at x with the hyperparameters as they are."""
        fit = self._prepare(x, y, silent)
        observations = fit.observations()
        self._accept(fit, observations, self._best_mean(fit, observations), "conditioned")
        return self

    def log_marginal_likelihood(self) -> Float[Tensor, ""]:
        """log p(y), total nats, without priors; differentiable in the hyperparameters."""
        fit, observations = self._conditioned()
        return log_marginal_likelihood(observations, self.kernel, self.likelihood, fit.mean)

    def posterior(self) -> FieldPosterior:
        """The field given the data."""
        fit, observations = self._conditioned()
        return FieldPosterior(_Snapshot.of(self, fit, observations), fit.x.shape[-1])

    @property
    def _has_constant(self) -> bool:
        return all(isinstance(m, ConstantMean) for m in _means(self.mean))

    def _noise(self, likelihood: Likelihood) -> Float[Tensor, "p p"]:
        return noise_of(likelihood, self.num_outputs)

    def _prepare(self, x: object, y: object, show: Callable[..., None]) -> Fit:
        self.double()
        x, y = as_points(x), as_matrix(y, "observations y (N, p)")
        _check_data(x, y, self.num_outputs)
        parts = terms(self.kernel)
        known = infer_num_dims(parts, None)
        expected, all_of_them = input_columns(parts, x.shape[-1] if known is None else known)
        if x.shape[-1] < expected or (all_of_them and x.shape[-1] != expected):
            raise ValueError(
                f"the kernel expects points with {expected} columns, got {x.shape[-1]}"
            )
        device = next(self.kernel.parameters()).device
        x, y = x.to(device), y.to(device)
        with torch.no_grad():
            trend = _evaluate(self.mean, x, self.num_outputs, self._has_constant)
        trained = self._has_constant and any(p.requires_grad for p in self.mean.parameters())
        fixed = None if trained else torch.zeros(self.num_outputs).to(y)
        if self._has_constant and not trained:
            fixed = torch.stack([m.constant.detach().reshape(()) for m in _means(self.mean)])
        return Fit(self.kernel, self.likelihood, fixed, self.frequencies, x, y - trend, show)

    def _accept(
        self, fit: Fit, observations: Observations, found: tuple[Tensor, float], what: str
    ) -> None:
        fit.progress, (constant, evidence) = silent, found
        self._fit, self._observations = fit, observations
        if fit.mean is None:
            for own, value in zip(_means(self.mean), constant, strict=True):
                own.initialize(constant=value)
        lines = [f"{what}: {len(fit.x)} points, {fit.y.numel()} numbers", *fit.notes]
        lines.append(observations.describe(self.kernel))
        lines.append(f"log marginal likelihood {evidence:.2f} nats")
        self._report = "\n".join([*lines, *_hyperparameters(self)])

    def _conditioned(self) -> tuple[Fit, Observations]:
        """The data under the hyperparameters as they are now."""
        if self._fit is None:
            raise RuntimeError("the model has no data yet: call fit(x, y) or condition(x, y) first")
        if isinstance(self._observations, FeatureObservations) and self._observations.stale(
            self.kernel
        ):
            self._observations = self._fit.observations()
        return self._fit, self._observations

    @torch.no_grad()
    def _best_mean(self, fit: Fit, observations: Observations) -> tuple[Tensor, float]:
        """The constant mean, and the log marginal likelihood with it."""
        evidence = observations.evidence(fit.kernel, self._noise(fit.likelihood))
        mean = evidence.best_mean() if fit.mean is None else fit.mean
        return mean, evidence.log_density(mean, observations.num_values).item()

    def _state(self) -> list[Tensor]:
        return [parameter.detach().clone() for parameter in self.parameters()]

    def _restore(self, state: list[Tensor]) -> None:
        for parameter, value in zip(self.parameters(), state, strict=True):
            parameter.data.copy_(value)


@dataclass(frozen=True)
class _Snapshot:
    """The data and the hyperparameters as they were when a posterior was made."""

    fit: Fit
    observations: Observations
    noise: Float[Tensor, "p p"]
    prior_mean: Mean
    has_constant: bool
    constant: Float[Tensor, "p"]

    @classmethod
    def of(cls, model: VectorFieldGP, fit: Fit, observations: Observations) -> "_Snapshot":
        parts = (model.kernel, model.likelihood, model.mean)
        kernel, likelihood, mean = (deepcopy(m).requires_grad_(False) for m in parts)
        frozen = replace(fit, kernel=kernel, likelihood=likelihood)
        constant = fit.mean
        if constant is None:
            constant, _ = model._best_mean(frozen, observations)
        noise = model._noise(likelihood)
        return cls(frozen, observations, noise, mean, model._has_constant, constant)

    @torch.no_grad()
    def conditioned(self, points: Float[Tensor, "n d"] | None = None) -> Conditioned:
        observations, kernel = self.observations, self.fit.kernel
        if points is not None:
            observations = self.fit.observations(_around(self.fit.x, points))
            if not observations.covers(kernel, points):  # a grid by hand
                observations.draws[0].lattice.check(points)
        law, white = observations.posterior(kernel, self.noise, self.constant)
        return Conditioned(law, white, partial(observations.covers, kernel))

    def mean(self, points: Float[Tensor, "n d"]) -> Float[Tensor, "n p"]:
        varying = _evaluate(self.prior_mean, points, len(self.constant), self.has_constant)
        return self.constant + varying


def _default_likelihood(num_outputs: int) -> Likelihood:
    """One global noise, positive: a lower bound would have units."""
    if num_outputs == 1:
        return GaussianLikelihood(noise_constraint=GreaterThan(0.0))
    return MultitaskGaussianLikelihood(
        num_outputs, has_task_noise=False, noise_constraint=GreaterThan(0.0)
    )


def _default_mean(num_outputs: int) -> Mean:
    return MultitaskMean(ConstantMean(), num_outputs) if num_outputs > 1 else ConstantMean()


def _evaluate(mean: Mean, x: Tensor, num_outputs: int, has_constant: bool) -> Tensor:
    """The part of the mean that is subtracted beforehand: all that is not a constant."""
    if has_constant or isinstance(mean, ZeroMean):
        return x.new_zeros(len(x), num_outputs)
    values = mean(x).detach()
    if values.numel() != len(x) * num_outputs:
        raise ValueError(
            f"expected a mean with {num_outputs} outputs, got values of shape "
            f"{tuple(values.shape)} at {len(x)} points; wrap it in gpytorch.means.MultitaskMean"
        )
    return values.reshape(len(x), num_outputs)


def _means(mean: Mean) -> list[Mean]:
    """Of each output."""
    return list(mean.base_means) if isinstance(mean, MultitaskMean) else [mean]


def _check_mean(mean: Mean, num_outputs: int) -> None:
    """Constants are found in closed form: one for each output, all trained or none, and free."""
    means = _means(mean)
    if not all(isinstance(m, ConstantMean) for m in means):
        return
    if len(means) != num_outputs:
        raise ValueError(
            f"expected a constant mean for each of the kernel's {num_outputs} outputs, got "
            f"{len(means)}; use MultitaskMean(ConstantMean(), num_tasks={num_outputs})"
        )
    trained = {m.raw_constant.requires_grad for m in means}
    bound = any([*m.named_priors(), *m.named_constraints()] for m in means)
    if len(trained) > 1 or (bound and True in trained):
        raise ValueError(
            "expected constant means without priors and constraints, all trained or none, since "
            "the best ones are found in closed form; a Gaussian prior on a constant is the term "
            "MultitaskKernel(ConstantKernel(), num_tasks=...) of the kernel"
        )


def _check_data(x: Tensor, y: Tensor, num_outputs: int) -> None:
    if y.shape[-1] != num_outputs:
        raise ValueError(
            f"expected observations y with {num_outputs} columns, one for each output of the "
            f"kernel, got {y.shape[-1]}; kernels of vectors are gp_orff.CurlFreeKernel, "
            "DivergenceFreeKernel, HelmholtzKernel and gpytorch.kernels.MultitaskKernel"
        )
    if len(x) != len(y):
        raise ValueError(f"expected x and y of equal length, got {len(x)} and {len(y)} rows")
    invalid = int((~torch.isfinite(y)).sum())
    if invalid:
        raise ValueError(
            f"expected finite observations, got {invalid} NaN or infinite values among "
            f"{y.numel()}; drop those points"
        )


def _around(x: Tensor, points: Tensor) -> tuple[tuple[float, float], ...]:
    """The box of data and points, a little larger: the next points will come from near by."""
    box = box_of(torch.cat([x, points]))
    return tuple((low - 0.1 * (high - low), high + 0.1 * (high - low)) for low, high in box)


_NAMES = {"raw_noise": "noise variance", "noise_covar.raw_noise": "noise variance"}


def _hyperparameters(model: VectorFieldGP) -> list[str]:
    lines = []
    for module in (model.kernel, model.likelihood, model.mean):
        for name, parameter, constraint in module.named_parameters_and_constraints():
            value = parameter if constraint is None else constraint.transform(parameter)
            numbers = np.array2string(
                value.detach().cpu().numpy().reshape(-1), precision=5, separator=", ", threshold=12
            )
            lines.append(f"{_NAMES.get(name, name.replace('raw_', ''))} = {numbers}")
    return lines
