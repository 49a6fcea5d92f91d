"""The three kernels of Brault et al. 2016, with a Gaussian k of lengthscale one."""

import torch
from gpytorch.kernels import Kernel, MultitaskKernel, RBFKernel
from jaxtyping import Float
from torch import Tensor

import gp_orff

MEASURES = ("base", "trace")  # Brault's unbounded maps, Minh's bounded ones


def gaussian(num_dims: int) -> RBFKernel:
    kernel = RBFKernel(ard_num_dims=num_dims).double()
    kernel.lengthscale = 1.0
    return kernel.requires_grad_(False)


def decomposable(num_dims: int) -> MultitaskKernel:
    """Return k A with p = d outputs and A = (I + 11ᵀ)/2, with variances 1 and correlations ½."""
    kernel = MultitaskKernel(gaussian(num_dims), num_tasks=num_dims, rank=1).double()
    tasks = kernel.task_covar_module
    tasks.covar_factor.data.fill_(0.5**0.5)
    tasks.var = torch.full_like(tasks.var, 0.5)
    return kernel.requires_grad_(False)


def curl_free(num_dims: int) -> gp_orff.CurlFreeKernel:
    return gp_orff.CurlFreeKernel(gaussian(num_dims), num_dims=num_dims)


def divergence_free(num_dims: int) -> gp_orff.DivergenceFreeKernel:
    return gp_orff.DivergenceFreeKernel(gaussian(num_dims), num_dims=num_dims)


KERNELS = {
    "decomposable": decomposable,
    "curl-free": curl_free,
    "divergence-free": divergence_free,
}


def cells(num_dims: int) -> list[tuple[str, str, Kernel]]:
    """Return the name, the measure and the kernel of each combination.

    Both measures of the decomposable kernel are equal, so it occurs once.
    """
    return [
        (name, measure, make(num_dims))
        for name, make in KERNELS.items()
        for measure in MEASURES[name == "decomposable" :]
    ]


def at_lag(kernel: Kernel, lag: Float[Tensor, "d"]) -> Float[Tensor, "p p"]:
    """Return K₀(δ) at the lag δ."""
    return kernel(lag.unsqueeze(0), torch.zeros_like(lag).unsqueeze(0)).to_dense()
