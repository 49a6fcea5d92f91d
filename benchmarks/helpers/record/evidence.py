"""The objective of a data set: its evidence under the exact kernel, for any plan of a fit.

Let S be the covariance of the observations, including noise, and c the constants of the outputs.
The evidence is

    log p(y) = −½ (y − c)ᵀ S⁻¹ (y − c) − ½ log det S − ½ M log 2π

at the best c. If there are so few data that hyperparameters have weak priors, the q constants are
integrated out. With Student-t noise, the objective is the variational bound at its fixed point. Log
priors of hyperparameters are added.

The formula uses dense algebra on matrices of gpytorch. Only the kernels and the priors are code of
the package. Larger sets have the evidence on a fine lattice.
"""

import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from copy import deepcopy

import gpytorch
import numpy as np
import scipy.optimize
import torch
from gpytorch.constraints import Interval
from gpytorch.kernels import Kernel
from jaxtyping import Float
from torch import Tensor, nn

import gp_orff
from gp_orff.data.patterns import DEFAULT
from gp_orff.fitting.scoring import WeakPriors, leave_much_open
from gp_orff.inference.exact import has_covariance
from helpers.record.cases import MOST_DENSE, Case

LATTICE = {"tolerance": 1e-6, "max_features": 6000}  # of sets with more values
CONTINUED, NEAR = 8, 0.1  # evaluations of a continued search, and how far it goes: a grid serves
STEPS = 200  # of the fixed point of Student-t weights, at most
EXTENTS, SHAPES = (1e-3, 3.0), (1e-2, 1e4)  # ranges of lengthscales, and of exponents of RQ
LEAST_NOISE, FARTHEST = 1e-8, 16.0  # of the variance of the data; of other coordinates
SPREAD = 1.5  # standard deviation of random starts, in the logarithms of parameters


class Hyperparameters:
    """Copies in float64 of the kernel and the likelihoods of a model, which a search may change."""

    def __init__(self, model: gp_orff.VectorFieldGP):
        copies = deepcopy((model.kernel, model.likelihood, model.likelihoods))
        self.kernel, self.likelihood, self.groups = (part.double() for part in copies)

    @property
    def modules(self) -> list[gpytorch.Module]:
        return [self.kernel, self.likelihood, *self.groups.values()]


class Objective:
    """The evidence of a case as a function of kernel and noise."""

    def __init__(self, case: Case, model: gp_orff.VectorFieldGP):
        self.case, self.weak = case, None
        data = model.state.data
        if leave_much_open(data) and has_covariance(model.kernel, data):
            likelihoods = {DEFAULT: model.likelihood, **model.likelihoods}
            self.weak = WeakPriors.of(model.kernel, likelihoods, data.survey)
        self.x, self.y = case.x.double(), case.y.double().reshape(len(case.x), -1)
        self.directions = case.options.get("directions")

    def __call__(self, at: Hyperparameters) -> Float[Tensor, ""]:
        """Return the objective in nats. It is −∞ if the covariance has no Cholesky factor."""
        evidence = self.given(at, self._constants())
        priors = (
            prior.log_prob(value(owner)).sum()
            for module in at.modules
            for name, owner, prior, value, _ in module.named_priors()
            if "deg_free" not in name  # which is fixed
        )
        weak = 0.0
        if self.weak is not None:
            weak = self.weak.log_density(at.kernel, {DEFAULT: at.likelihood, **at.groups})
        return evidence + sum(priors, 0.0) + self._prior_of_noise(at) + weak

    def __str__(self) -> str:
        many = self.weak is None
        return "best constants" if many else "constants integrated out, and weak priors"

    def _prior_of_noise(self, at: Hyperparameters) -> Float[Tensor, "1"] | float:
        """Return the log prior of the noise variance, which is zero without a learned spectrum.

        The prior is log σ² ~ N(log 0.1 v, 3²), where v is the variance of the data.
        """
        if not any(isinstance(own, gp_orff.LearnedSpectrumKernel) for own in at.kernel.modules()):
            return 0.0
        median = 0.1 * self.y.var(0, unbiased=False).mean()
        return -0.5 * ((at.likelihood.noise / median).log() / 3).square().sum()

    def given(self, at: Hyperparameters, constants: Float[Tensor, "M k"]) -> Float[Tensor, ""]:
        """Return the evidence at the best values of the constants, or its bound under Student-t
        noise."""
        covariance, noise, more = self._prior(at.kernel), self._noise(at), 0.0
        if isinstance(at.likelihood, gp_orff.MultitaskStudentTLikelihood):
            nu = at.likelihood.deg_free
            weights, more = self._weights(covariance, noise, constants, nu)
            noise = noise / weights.repeat_interleave(self.y.shape[-1])
        return self._gaussian(covariance, noise, constants) + more

    def _prior(self, kernel: Kernel) -> Float[Tensor, "M M"]:
        matrix = kernel(self.x).to_dense()
        if self.directions is None:
            return matrix
        u = torch.as_tensor(self.directions).double()
        n, p = u.shape
        return torch.einsum("ni,nimj,mj->nm", u, matrix.reshape(n, p, n, p), u)

    def _constants(self) -> Float[Tensor, "M p"]:
        if self.directions is not None:
            return torch.as_tensor(self.directions).double()
        n, p = self.y.shape
        return torch.eye(p, dtype=torch.float64).repeat(n, 1)

    def _noise(self, at: Hyperparameters) -> Float[Tensor, "M"] | Float[Tensor, "M M"]:
        """Return the noise variances (M,), or the covariance of the noise (M, M)."""
        options, (n, width) = self.case.options, self.y.shape
        if "noise" in options:
            return options["noise"].double().repeat_interleave(width)
        if "track" in options:
            one = self._along_tracks(at.likelihood)
            return torch.kron(one, torch.eye(width, dtype=torch.float64))
        if "group" in options:
            parts = [at.groups[name].noise for name in options["group"]]
            return torch.cat(parts).repeat_interleave(width)
        return at.likelihood.noise.expand(n * width)

    def _along_tracks(self, noise: gp_orff.TrackLikelihood) -> Float[Tensor, "N N"]:
        label, clock = np.asarray(self.case.options["track"]), self.case.options.get("time")
        steps = self.x.diff(dim=0).norm(dim=-1)
        path = torch.cat([torch.zeros(1, dtype=torch.float64), steps.cumsum(0)])
        t = path if clock is None else torch.as_tensor(clock).double()
        same = torch.from_numpy(label[:, None] == label)
        correlated = torch.exp(-(t[:, None] - t).abs() / noise.correlation_time)
        shared = noise.offset_variance + noise.correlated_variance * correlated
        white = (noise.noise + noise.block_variance).expand(len(t))
        return same * shared + torch.diag(white)

    def _gaussian(self, covariance, noise, constants) -> Float[Tensor, ""]:
        total = covariance + (noise if noise.ndim == 2 else torch.diag(noise))
        factor, failed = torch.linalg.cholesky_ex(total)
        if failed:
            return torch.tensor(-math.inf)
        design = torch.cat([self.y.reshape(-1, 1), constants], dim=-1)
        white = torch.linalg.solve_triangular(factor, design, upper=False)
        normal = white.mT @ white
        seen = torch.linalg.pinv(normal[1:, 1:], hermitian=True)  # along one direction, one of p
        squares = normal[0, 0] - normal[0, 1:] @ seen @ normal[1:, 0]
        size = factor.diagonal().log().sum() + 0.5 * len(total) * math.log(2 * math.pi)
        if self.weak is not None:
            seen = torch.linalg.eigvalsh(normal[1:, 1:])
            seen = seen[seen > 1e-12 * seen[-1]]
            size = size + 0.5 * (seen.log().sum() - len(seen) * math.log(2 * math.pi))
        return -0.5 * squares - size

    @torch.no_grad()
    def _weights(
        self,
        covariance: Float[Tensor, "M M"],
        noise: Float[Tensor, "M"],
        constants: Float[Tensor, "M k"],
        nu: Float[Tensor, "1"],
    ) -> tuple[Float[Tensor, "N"], Float[Tensor, ""]]:
        """Return E[w] for q(w) = Gamma(a, b), and a correction of the evidence under these weights.

        The correction is Σ_n ½p (E[log w] − log E[w]) − KL(q ‖ Gamma(ν/2, ν/2)).
        """
        n, p = self.y.shape
        half, shape = nu.double() / 2, (nu.double() + p) / 2
        weights, y, design = torch.ones(n).double(), self.y.reshape(-1, 1), constants
        for _ in range(STEPS):
            total = covariance + torch.diag(noise / weights.repeat_interleave(p))
            inverse = torch.cholesky_inverse(torch.linalg.cholesky(total))
            normal = design.mT @ inverse @ design
            projected = inverse - inverse @ design @ torch.linalg.solve(normal, design.mT @ inverse)
            own = noise / weights.repeat_interleave(p)
            residual = (own.unsqueeze(-1) * (projected @ y)).squeeze(-1)
            spread = own - own.square() * projected.diagonal()
            distance = ((residual.square() + spread) / noise).unflatten(0, (n, p)).sum(-1)
            rate = half + distance / 2
            before, weights = weights, shape / rate
            if (weights / before - 1).abs().max() < 1e-9:
                break
        mean_log = torch.digamma(shape) - rate.log()
        divergence = (
            (shape - half) * torch.digamma(shape)
            - torch.lgamma(shape)
            + torch.lgamma(half)
            + half * (rate.log() - half.log())
            + shape * (half / rate - 1)
        )
        return weights, (0.5 * p * (mean_log - weights.log()) - divergence).sum()


def reached(case: Case, model: gp_orff.VectorFieldGP) -> tuple[float, str]:
    """Return the objective at the hyperparameters of a model, and its description."""
    at = Hyperparameters(model)
    with torch.no_grad():
        if case.values <= MOST_DENSE:
            objective = Objective(case, model)
            return objective(at).item(), str(objective)
        rule = gp_orff.Grid.for_data(case.x, **LATTICE)
        fine = gp_orff.VectorFieldGP(at.kernel, likelihood=at.likelihood, frequencies=rule)
        fine.condition(case.x, case.y, **case.options)
        return fine.log_marginal_likelihood().item(), "best constants, fine lattice"


# ---- searches ------------------------------------------------------------------------------------


class Coordinate:
    """The coordinate u of a parameter: its logarithm, its logit, or its value if it has no
    constraint."""

    def __init__(
        self, name: str, parameter: nn.Parameter, constraint: Interval | None, extent: float
    ):
        self.name, self.parameter, self.constraint = name, parameter, constraint
        self.extent = extent
        self.low, self.high = -math.inf, math.inf
        if constraint is not None:
            self.low, self.high = constraint.lower_bound.item(), constraint.upper_bound.item()

    def value(self, u: Tensor) -> Tensor:
        if math.isfinite(self.high):
            return self.low + (self.high - self.low) * torch.sigmoid(u)
        return self.low + u.exp() if math.isfinite(self.low) else u

    def u(self, value: Tensor) -> Tensor:
        if math.isfinite(self.high):
            return torch.logit((value - self.low) / (self.high - self.low), eps=1e-9)
        return (value - self.low).clamp_min(1e-300).log() if math.isfinite(self.low) else value

    def get(self) -> Float[np.ndarray, "k"]:
        raw = self.parameter.detach().double()
        value = raw if self.constraint is None else self.constraint.transform(raw)
        return self.u(value).flatten().numpy()

    def set(self, u: Float[np.ndarray, "k"]) -> None:
        with torch.no_grad():
            self.parameter.copy_(self._raw(torch.from_numpy(u)))

    def gradient(self) -> Float[np.ndarray, "k"]:
        """Return the gradient with respect to u, from the gradient of the parameter."""
        u = torch.from_numpy(self.get()).requires_grad_()
        slope = self.parameter.grad
        slope = torch.zeros_like(self.parameter) if slope is None else slope
        (found,) = torch.autograd.grad(self._raw(u), u, slope)
        return found.numpy()

    def _raw(self, u: Tensor) -> Tensor:
        value = self.value(u).reshape(self.parameter.shape)
        return value if self.constraint is None else self.constraint.inverse_transform(value)

    def bounds(self, variance: float) -> Float[np.ndarray, "k 2"]:
        origin = self.get()[:, None] + [-FARTHEST, FARTHEST]
        if self.constraint is None or math.isfinite(self.high):
            return origin
        if self.name.endswith("raw_lengthscale"):
            origin[:] = np.log(np.multiply(EXTENTS, self.extent))
        elif self.name.endswith("raw_alpha"):
            origin[:] = np.log(SHAPES)
        elif self.name.endswith("noise"):
            origin[:, 0] = math.log(LEAST_NOISE * variance)
        return origin


class Search:
    """A search for the largest objective by L-BFGS of SciPy. It stores the best hyperparameters."""

    def __init__(
        self,
        modules: Sequence[gpytorch.Module],
        objective: Callable[[], Float[Tensor, ""]],
        case: Case,
        seconds: float = math.inf,
    ):
        self.objective, self.until = objective, time.process_time() + seconds
        self.parts = [
            Coordinate(name, parameter, constraint, _extent(module, name, case.x))
            for module in modules
            for name, parameter, constraint in module.named_parameters_and_constraints()
            if parameter.requires_grad and "deg_free" not in name
        ]
        variance = case.y.double().var(0).mean().item()
        self.bounds = np.concatenate([part.bounds(variance) for part in self.parts])
        self.first = self.get().clip(*self.bounds.T)
        self.best, self.at = -math.inf, self.first

    def get(self) -> Float[np.ndarray, "k"]:
        return np.concatenate([part.get() for part in self.parts])

    def set(self, u: Float[np.ndarray, "k"]) -> None:
        ends = np.cumsum([part.parameter.numel() for part in self.parts])[:-1]
        for part, own in zip(self.parts, np.split(u, ends), strict=True):
            part.set(own)

    def run(self, start: Float[np.ndarray, "k"], evaluations: int = 15_000) -> float:
        """Search from `start`, and return the largest objective of all runs."""
        options = {"maxfun": evaluations, "maxiter": evaluations, "ftol": 1e-12, "gtol": 1e-4}
        with suppress(TimeoutError, RuntimeError):  # a step to where the covariance has no factor
            scipy.optimize.minimize(
                self.loss, start, jac=True, method="L-BFGS-B", bounds=self.bounds, options=options
            )
        return self.best

    def loss(self, u: Float[np.ndarray, "k"]) -> tuple[float, Float[np.ndarray, "k"]]:
        if time.process_time() > self.until:
            raise TimeoutError
        self.set(u)
        for part in self.parts:
            part.parameter.grad = None
        value = self.objective()
        if not torch.isfinite(value):
            return 1e10, np.zeros(len(u))
        value.backward()
        if value.item() > self.best:
            self.best, self.at = value.item(), u.copy()
        return -value.item(), -np.concatenate([part.gradient() for part in self.parts])


def _extent(module: nn.Module, name: str, x: Float[Tensor, "N c"]) -> float:
    """Return the largest extent of the inputs on which the module of a parameter depends."""
    columns = None
    for word in ["", *name.split(".")[:-1]]:
        module = getattr(module, word) if word else module
        chosen = getattr(module, "active_dims", None)
        columns = columns if chosen is None else chosen
    x = x if columns is None else x[:, columns]
    return (x.amax(0) - x.amin(0)).max().item() or 1.0


def best_known(case: Case, model: gp_orff.VectorFieldGP, starts: int, seconds: float) -> float:
    """Return the largest objective of several searches. They start at the end of a fit and at
    random points near it."""
    at, rng = Hyperparameters(model), np.random.default_rng(0)
    objective = Objective(case, model)
    search = Search(at.modules, lambda: objective(at), case, seconds)
    search.run(search.first)
    for _ in range(starts):
        search.run(
            (search.first + SPREAD * rng.standard_normal(len(search.first))).clip(*search.bounds.T)
        )
    return search.best


def gain(case: Case, model: gp_orff.VectorFieldGP) -> float:
    """Return the nats that a search gains if it is continued on the features of the fit."""
    modules = [model.kernel, model.likelihood, *model.likelihoods.values()]
    with torch.no_grad():
        before = model.log_marginal_likelihood().item()
    search = Search(modules, model.log_marginal_likelihood, case)
    search.bounds = search.first[:, None] + [-NEAR, NEAR]
    return max(0.0, search.run(search.first, CONTINUED) - before)
