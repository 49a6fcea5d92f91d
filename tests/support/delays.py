"""Two sensors of one signal; the second sensor observes the signal later."""

import torch
from gpytorch.kernels import RBFKernel

from gp_orff.kernels.spectral_matrix import SpectralMatrixKernel

DELAY = 0.5


class Delayed(torch.nn.Module):
    """The factor B = (1, e^{iωτ})ᵀ of the outputs f₁(x) = g(x) and f₂(x) = g(x − τ)."""

    def __init__(self, delay=DELAY):
        super().__init__()
        self.delay = torch.nn.Parameter(torch.tensor(delay, dtype=torch.float64))

    def forward(self, omega):
        shift = torch.polar(torch.ones_like(omega), self.delay * omega)
        return torch.stack([torch.ones_like(shift), shift], dim=1)


def made(amplitude=None, base=None):
    base = RBFKernel() if base is None else base
    base.lengthscale = 1.0
    amplitude = Delayed() if amplitude is None else amplitude
    return SpectralMatrixKernel(base, amplitude, num_outputs=2, num_dims=1).double()


def signature(lag, delay=DELAY):
    """Return Cov[f(x), f(z)] for lags x − z (m, 1).

    For example, the covariance of the first output at x with the second at z is k(x − z + τ).
    """
    shifts = torch.tensor([[0.0, delay], [-delay, 0.0]], dtype=lag.dtype)
    return torch.exp(-0.5 * (lag[..., None] + shifts).square())


def dense(x, z, delay=DELAY):
    lags = (x - z.mT).reshape(-1, 1)
    blocks = signature(lags, delay).reshape(len(x), len(z), 2, 2)
    return blocks.movedim(-2, 1).reshape(2 * len(x), 2 * len(z))
