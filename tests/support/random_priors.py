"""Random kernels and noises in two forms: of gpytorch and the package, and for the dense oracle."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial, reduce
from operator import add

import numpy as np
import torch
from gpytorch import kernels
from gpytorch.likelihoods import GaussianLikelihood, Likelihood, MultitaskGaussianLikelihood

import gp_orff
from tests.support import dense_oracle as dense

GENERAL_NU = 3.3
DERIVATIVES = {  # of a process with this kernel and its covariance, together
    "rbf": 99,
    "rq": 99,
    "general": 6,
    "matern52": 4,
    "matern32": 2,
    "matern12": 0,
}


def tensor(values: object) -> torch.Tensor:
    return torch.tensor(np.asarray(values), dtype=torch.float64)


@dataclass(frozen=True)
class Inputs:
    """The columns of the inputs that are space, and the column that is time, if any."""

    space: tuple[int, ...]
    time: int | None = None

    @property
    def number(self) -> int:
        return len(self.space) + (self.time is not None)

    @property
    def active(self) -> tuple[int, ...] | None:
        """The `active_dims` of a field kernel."""
        return None if self.space == tuple(range(self.number)) else self.space


@dataclass(frozen=True)
class Scalars:
    """The kinds of scalar kernels that may be drawn, with their lengthscales."""

    names: tuple[str, ...] = ("rbf", "rq", "matern52", "matern32", "matern12")
    when: tuple[str, ...] = ("rbf", "matern32")  # of time
    shortest: float = 0.6  # lengthscale
    rich: bool = True  # sums and products of two within a term

    def draw(
        self, rng, columns: tuple[int, ...], *, order: int = 0, time: bool = False
    ) -> tuple[kernels.Kernel, dense.Leaf, str]:
        """Return a random kernel of some columns that has at least `order` derivatives.

        A kernel of time has `active_dims`.
        """
        names = self.when if time else [n for n in self.names if DERIVATIVES[n] >= order]
        name, ard = str(rng.choice(names)), rng.random() < 0.5
        ell = rng.uniform(self.shortest, 1.6, len(columns) if ard else 1)
        alpha = rng.uniform(2.5, 4.0)
        make, profile = {
            "rbf": (kernels.RBFKernel, dense.rbf),
            "rq": (kernels.RQKernel, dense.rational_quadratic(alpha)),
            "general": (partial(gp_orff.GeneralMaternKernel, GENERAL_NU), dense.matern(GENERAL_NU)),
            "matern52": (partial(kernels.MaternKernel, nu=2.5), dense.matern(2.5)),
            "matern32": (partial(kernels.MaternKernel, nu=1.5), dense.matern(1.5)),
            "matern12": (partial(kernels.MaternKernel, nu=0.5), dense.matern(0.5)),
        }[name]
        kernel = make(
            ard_num_dims=len(columns) if ard else None, active_dims=columns if time else None
        ).double()
        kernel.lengthscale = tensor(ell)
        if name == "rq":
            kernel.alpha = tensor(alpha)
        lengthscales = dict(zip(columns, np.broadcast_to(ell, len(columns)).tolist(), strict=True))
        return kernel, dense.Leaf(profile, lengthscales), name


def scaled(kernel: kernels.Kernel, scale: float) -> kernels.ScaleKernel:
    out = kernels.ScaleKernel(kernel).double()
    out.outputscale = tensor(scale)
    return out


@dataclass(frozen=True)
class Prior:
    """A kernel of vectors, and the processes by which the oracle represents it."""

    kernel: kernels.Kernel
    processes: list[dense.Process]
    names: tuple[str, ...]  # of the scalar kernels in space
    words: str
    derivatives: int = 99  # of the field and its covariance, together; −1 where none is known
    parts: int = 1  # of the sum it is

    def __add__(self, other: "Prior") -> "Prior":
        self, other = self._summand(), other._summand()
        return Prior(
            self.kernel + other.kernel,
            self.processes + [replace(own, term=own.term + self.parts) for own in other.processes],
            self.names + other.names,
            f"{self.words} + {other.words}",
            min(self.derivatives, other.derivatives),
            self.parts + other.parts,
        )

    def _summand(self) -> "Prior":
        """This prior as a term of a sum, in which both parts of a Helmholtz kernel are one term."""
        if not isinstance(self.kernel, gp_orff.HelmholtzKernel):
            return self
        return replace(self, processes=[replace(p, term=0) for p in self.processes], parts=1)


# Fields that derive from a potential --------------------------------------------------------------

FIELDS = {
    "curl-free": (gp_orff.CurlFreeKernel, dense.gradient),
    "divergence-free": (gp_orff.DivergenceFreeKernel, dense.rotation),
}


def derived(rng, inputs: Inputs, known: Scalars) -> Prior:
    """Return a scaled curl-free or divergence-free kernel. Its potential may have a sum of kernels,
    and it may be multiplied by a kernel of time."""
    d, scale = len(inputs.space), rng.uniform(0.4, 1.5)
    name = rng.choice(list(FIELDS)) if d > 1 else "curl-free"
    cls, make = FIELDS[name]
    potential, leaf, first = known.draw(rng, inputs.space, order=2)
    found, names = [dense.Scalar(scale, (leaf,))], [first]
    if known.rich and rng.random() < 0.2:
        other, leaf, second = known.draw(rng, inputs.space, order=2)
        potential = potential + scaled(other, 0.5)
        found.append(dense.Scalar(0.5 * scale, (leaf,)))
        names.append(second)
    kernel = cls(potential, num_dims=d, active_dims=inputs.active)
    words = f"{name}({' + '.join(names)})"
    if inputs.time is not None and rng.random() < 0.7:
        when, leaf, own = known.draw(rng, (inputs.time,), time=True)
        kernel = kernel * when if rng.random() < 0.5 else when * kernel
        found = [replace(scalar, leaves=(*scalar.leaves, leaf)) for scalar in found]
        words += f" * {own} of time"
    processes = [own for scalar in found for own in make(scalar, d)]
    least = min(map(DERIVATIVES.get, names)) - 2
    return Prior(scaled(kernel, scale), processes, tuple(names), words, least)


def helmholtz(rng, inputs: Inputs, known: Scalars) -> Prior:
    d, scales = len(inputs.space), rng.uniform(0.4, 1.5, 2)
    base, leaf, name = known.draw(rng, inputs.space, order=2)
    kernel = gp_orff.HelmholtzKernel(base, num_dims=d, active_dims=inputs.active).double()
    kernel.curl_free.outputscale, kernel.divergence_free.outputscale = tensor(scales)
    first, second = (dense.Scalar(scale, (leaf,)) for scale in scales.tolist())
    turning = [replace(own, term=1) for own in dense.rotation(second, d)]
    processes, least = dense.gradient(first, d) + turning, DERIVATIVES[name] - 2
    return Prior(kernel, processes, (name,), f"Helmholtz({name})", least, 2)


# Separable kernels --------------------------------------------------------------------------------


def mix(rng, kernel: kernels.MultitaskKernel, p: int, rank: int) -> np.ndarray:
    """Set a task matrix to random values, and return it."""
    factor, variances = rng.normal(size=(p, rank)), rng.uniform(0.2, 0.6, p)
    kernel.task_covar_module.covar_factor.data = tensor(factor)
    kernel.task_covar_module.var = tensor(variances)
    return factor @ factor.T + np.diag(variances)


def separable(rng, inputs: Inputs, known: Scalars, p: int) -> Prior:
    """Return a task matrix times a scalar kernel. The scalar kernel may be a sum of two kernels, or
    of a kernel and a constant."""
    columns, rank = tuple(range(inputs.number)), int(rng.integers(1, p + 1))
    data, leaf, name = known.draw(rng, columns)
    found, names, words = [dense.Scalar(1.0, (leaf,))], (name,), name
    kind = rng.choice(["one", "constant", "sum"] if known.rich else ["one", "constant"])
    if kind == "sum":
        other, leaf, second = known.draw(rng, columns)
        data = data + scaled(other, 0.7)
        found.append(dense.Scalar(0.7, (leaf,)))
        names, words = (name, second), f"{name} + {second}"
    if kind == "constant":
        data, words = data + constant(0.6), f"{name} + constant"
        found.append(dense.Scalar(0.6, ()))
    kernel = kernels.MultitaskKernel(data, num_tasks=p, rank=rank).double()
    matrix = mix(rng, kernel, p, rank)
    processes = [own for s in found for own in dense.mixed(s, matrix, len(inputs.space))]
    least = min(map(DERIVATIVES.get, names))
    return Prior(kernel, processes, names, f"separable({words}, rank {rank})", least)


def constant(value: float) -> kernels.ConstantKernel:
    kernel = kernels.ConstantKernel().double()
    kernel.constant = tensor(value)
    return kernel


def coregional(rng, inputs: Inputs, known: Scalars, p: int) -> Prior:
    """Return a linear model of coregionalisation with two kernels."""
    drawn = [known.draw(rng, tuple(range(inputs.number))) for _ in range(2)]
    kernel = kernels.LCMKernel([own for own, _, _ in drawn], num_tasks=p, rank=1).double()
    processes, names = [], tuple(name for _, _, name in drawn)
    for part, (_, leaf, _) in zip(kernel.covar_module_list, drawn, strict=True):
        matrix = mix(rng, part, p, 1)
        processes += dense.mixed(dense.Scalar(1.0, (leaf,)), matrix, len(inputs.space))
    least = min(map(DERIVATIVES.get, names))
    return Prior(kernel, processes, names, f"LCM({', '.join(names)})", least)


def background(rng, inputs: Inputs, known: Scalars, p: int) -> Prior:
    """Return the kernel of a random constant vector."""
    kernel = kernels.MultitaskKernel(constant(0.8), num_tasks=p, rank=1).double()
    matrix = mix(rng, kernel, p, 1)
    processes = dense.mixed(dense.Scalar(0.8, ()), matrix, len(inputs.space))
    return Prior(kernel, processes, (), "background")


def single(rng, inputs: Inputs, known: Scalars) -> Prior:
    """Return a kernel with one output, which is a scaled kernel or a product of two kernels."""
    columns, scale = tuple(range(inputs.number)), rng.uniform(0.5, 1.5)
    kernel, leaf, name = known.draw(rng, columns)
    leaves, names, least = (leaf,), (name,), DERIVATIVES[name]
    if known.rich and rng.random() < 0.3:
        other, leaf, second = known.draw(rng, columns)
        kernel, leaves, names, least = kernel * other, (*leaves, leaf), (name, second), -1
    processes = dense.mixed(dense.Scalar(scale, leaves), np.eye(1), len(inputs.space))
    return Prior(scaled(kernel, scale), processes, names, " * ".join(names), least)


def vectors(rng, inputs: Inputs, known: Scalars) -> Prior:
    """Return the prior of a field with one component for each direction of space, as a sum of
    random terms."""
    d = len(inputs.space)
    first: Callable = helmholtz if d > 1 and rng.random() < 0.4 else derived
    found = [first(rng, inputs, known)]
    if rng.random() < 0.25:
        found.append(derived(rng, inputs, known))
    if d > 1 and rng.random() < 0.3:
        found.append([separable, background][rng.integers(2)](rng, inputs, known, d))
    return reduce(add, found)


# Noises -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Noise:
    """The parameters of a likelihood, and the noise covariance that follows from them."""

    parameters: dict[str, np.ndarray]
    covariance: np.ndarray

    @classmethod
    def draw(cls, rng, kind: str, p: int) -> "Noise":
        """Return random noise of the kind "global", "tasks", "both" or "full".

        The kind "full" has a global noise and task noises of rank p − 1.
        """
        level, each = rng.uniform(0.02, 0.1), rng.uniform(0.02, 0.1, p)
        factor = 0.2 * rng.normal(size=(p, max(1, p - 1)))
        every = {
            "noise": (level, level * np.eye(p)),
            "task_noises": (each, np.diag(each)),
            "task_noise_covar_factor": (factor, factor @ factor.T),
        }
        used = {
            "global": ["noise"],
            "tasks": ["task_noises"],
            "both": ["noise", "task_noises"],
            "full": ["noise", "task_noise_covar_factor"],
        }[kind]
        return cls({name: every[name][0] for name in used}, sum(every[name][1] for name in used))

    @property
    def isotropic(self) -> bool:
        return list(self.parameters) == ["noise"]

    def likelihood(self) -> Likelihood:
        p, names = len(self.covariance), self.parameters
        if p == 1:
            return self.given_to(GaussianLikelihood().double())
        own = MultitaskGaussianLikelihood(
            p,
            rank=max(1, p - 1) if "task_noise_covar_factor" in names else 0,
            has_task_noise=not self.isotropic,
            has_global_noise="noise" in names,
        )
        return self.given_to(own.double())

    def given_to(self, likelihood: Likelihood) -> Likelihood:
        return likelihood.initialize(**{k: tensor(v) for k, v in self.parameters.items()})
