"""Outputs in very different units: each contributes to quadratures, grids and checks."""

import numpy as np
import pytest
import torch
from gpytorch.kernels import RBFKernel

import gp_orff


def points(count, scale):
    generator = torch.Generator().manual_seed(0)
    return scale * torch.rand(count, 1, generator=generator, dtype=torch.float64)


SMALL_UNITS = torch.tensor([1.0, 1e-7], dtype=torch.float64)  # such as of pressure and humidity


def test_signatures_of_outputs_in_very_different_units():
    def signature(lag):
        short, long = torch.exp(-lag.square()), torch.exp(-lag.square() / 50)
        zero = torch.zeros_like(short)
        correlations = torch.stack([short, zero, zero, long], dim=-1).reshape(-1, 2, 2)
        return SMALL_UNITS.unsqueeze(-1) * SMALL_UNITS * correlations

    kernel = gp_orff.SpectralMatrixKernel.from_signature(signature, [(0, 3)])
    x = points(6, 3.0)
    expected = torch.exp(-((x - x.mT) ** 2) / 50)
    for k in (kernel, gp_orff.ORFFKernel(kernel, gp_orff.Grid.for_data(x))):
        got = k(x).to_dense()[1::2, 1::2] / SMALL_UNITS[1] ** 2
        assert (got - expected).abs().max() < 1e-5  # the tolerance of the grid


def test_a_small_output_has_to_be_positive_too():
    def signature(lag):
        one, zero = torch.exp(-lag.square()), torch.zeros_like(lag)
        box = 1e-14 * (lag.abs() < 1).to(lag)  # its transform is a sinc
        return torch.stack([one, zero, zero, box], dim=-1).reshape(-1, 2, 2)

    with pytest.raises(ValueError, match="without negative eigenvalues"):
        gp_orff.SpectralMatrixKernel.from_signature(signature, [(0, 3)])


def _gaussian(lag):
    return torch.exp(-lag.square().sum(-1))[:, None, None]


@pytest.mark.parametrize(
    ("signature", "domain", "error", "message"),
    [
        (lambda lag: _gaussian(lag).numpy(), [(0, 3)], TypeError, "torch.Tensor"),
        (3, [(0, 3)], TypeError, "a function of lags"),
        (_gaussian, (0, 3), ValueError, "one pair with low < high"),
        (_gaussian, [], ValueError, "one pair with low < high"),
        (_gaussian, [(0, 1)] * 4, NotImplementedError, "at most 3 inputs"),
    ],
)
def test_arguments_of_from_signature(signature, domain, error, message):
    with pytest.raises(error, match=message):
        gp_orff.SpectralMatrixKernel.from_signature(signature, domain)


def test_each_output_has_its_share_in_a_grid():
    """The second output is rougher, and its unit is much smaller."""

    def amplitude(omega):
        one, rough = torch.exp(-(omega**2)), omega**2
        zero = torch.zeros_like(one)
        return torch.stack([one, zero, zero, 1e-7 * rough], dim=-1).reshape(-1, 2, 2)

    rbf = RBFKernel().double()
    rbf.lengthscale = 1.0
    kernel = gp_orff.SpectralMatrixKernel(rbf, amplitude, num_outputs=2, num_dims=1)
    x = points(6, 3.0)
    r = (x - x.mT).numpy()
    expected = (r**4 - 6 * r**2 + 3) * np.exp(-(r**2) / 2)  # k⁗ of k = exp(−r²/2)
    features = gp_orff.ORFFKernel(kernel, gp_orff.Grid.for_data(x))
    for k, tolerance in ((kernel, 1e-8), (features, 3e-5)):
        got = k(x).to_dense().detach().numpy()[1::2, 1::2] / 1e-14
        np.testing.assert_allclose(got, expected, atol=tolerance)
