"""Every spectrum, kernel and rule once; the conformance tests cross them."""

from dataclasses import dataclass
from typing import Any

import torch
from gpytorch.kernels import MaternKernel, MultitaskKernel, RBFKernel, ScaleKernel

import gp_orff
from tests import oracles

SPECTRA = {
    "rbf": lambda **kwargs: RBFKernel(**kwargs),
    "matern12": lambda **kwargs: MaternKernel(nu=0.5, **kwargs),
    "matern32": lambda **kwargs: MaternKernel(nu=1.5, **kwargs),
    "matern52": lambda **kwargs: MaternKernel(nu=2.5, **kwargs),
}
SMOOTH = ("rbf", "matern32", "matern52")  # twice differentiable: potentials of fields

FIELDS = {  # kernel class, exact blocks from the Hessian of k, spectral matrix A(ω)
    "curl_free": (gp_orff.CurlFreeKernel, oracles.curl_free, oracles.outer),
    "divergence_free": (
        gp_orff.DivergenceFreeKernel,
        oracles.divergence_free,
        oracles.projected,
    ),
}

RULES = {
    "monte_carlo_trace": lambda num, seed=0: gp_orff.MonteCarlo(num, seed=seed),
    "monte_carlo_base": lambda num, seed=0: gp_orff.MonteCarlo(num, measure="base", seed=seed),
}

# (spectrum, measure) whose features have an infinite variance under a field kernel
INFINITE_VARIANCE = {("matern32", "base")}


def base(name: str, num_dims: int, ard: bool = True):
    """A scalar kernel in float64 with lengthscales away from one."""
    kernel = SPECTRA[name](ard_num_dims=num_dims if ard else None).double()
    kernel.lengthscale = torch.linspace(0.7, 1.3, num_dims if ard else 1, dtype=torch.float64)
    return kernel


@dataclass
class Case:
    """A kernel for ORFFKernel and its covariance from the definition, given the drawn ω."""

    kernel: Any
    num_dims: int
    num_outputs: int
    parts: list  # (scalar kernel, function → outputscale, A(ω))

    def covariance(self, orff_draws, x, z):
        total = 0.0
        for (leaf, scale, matrix), draw in zip(self.parts, orff_draws, strict=True):
            omega = draw.z / leaf.lengthscale
            total = total + scale() * oracles.fourier_sum(x, z, omega, draw.weights, matrix(omega))
        return total


def _one():
    return torch.ones((), dtype=torch.float64)


def _field(name, spectrum, num_dims):
    cls, _, matrix = FIELDS[name]
    leaf = base(spectrum, num_dims)
    return Case(cls(leaf, num_dims=num_dims), num_dims, num_dims, [(leaf, _one, matrix)])


def _scaled():
    case = _field("curl_free", "rbf", 2)
    kernel = ScaleKernel(case.kernel).double()
    kernel.outputscale = 1.7
    leaf = case.parts[0][0]
    return Case(kernel, 2, 2, [(leaf, lambda: kernel.outputscale, oracles.outer)])


def _helmholtz():
    kernel = gp_orff.HelmholtzKernel(base("matern52", 2), num_dims=2).double()
    curl, div = kernel.curl_free, kernel.divergence_free
    div.outputscale = 0.3
    return Case(
        kernel,
        2,
        2,
        [
            (curl.base_kernel.base_kernel, lambda: curl.outputscale, oracles.outer),
            (div.base_kernel.base_kernel, lambda: div.outputscale, oracles.projected),
        ],
    )


def _separable(num_tasks=3):
    leaf = base("rbf", 2)
    generator = torch.Generator().manual_seed(0)
    kernel = MultitaskKernel(leaf, num_tasks=num_tasks, rank=2).double()
    for parameter in kernel.task_covar_module.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)

    def matrix(omega):
        return kernel.task_covar_module._eval_covar_matrix().expand(len(omega), -1, -1)

    return Case(kernel, 2, num_tasks, [(leaf, _one, matrix)])


def _potential_of_a_sum():
    smooth, rough = base("rbf", 3), ScaleKernel(base("matern52", 3)).double()
    rough.outputscale = 0.4
    kernel = gp_orff.DivergenceFreeKernel(smooth + rough, num_dims=3)
    return Case(
        kernel,
        3,
        3,
        [
            (smooth, _one, oracles.projected),
            (rough.base_kernel, lambda: rough.outputscale, oracles.projected),
        ],
    )


def _field_plus_separable():
    field, separable = _field("divergence_free", "rbf", 2), _separable(num_tasks=2)
    return Case(field.kernel + separable.kernel, 2, 2, field.parts + separable.parts)


def _scalar():
    leaf = base("matern52", 2)
    return Case(
        leaf, 2, 1, [(leaf, _one, lambda omega: torch.ones(len(omega), 1, 1, dtype=torch.float64))]
    )


CASES = {
    "curl_free": lambda: _field("curl_free", "rbf", 2),
    "divergence_free_2d": lambda: _field("divergence_free", "rbf", 2),
    "divergence_free_3d": lambda: _field("divergence_free", "matern52", 3),
    "helmholtz": _helmholtz,
    "separable": _separable,
    "scaled": _scaled,
    "potential_of_a_sum": _potential_of_a_sum,
    "field_plus_separable": _field_plus_separable,
    "scalar": _scalar,
}
