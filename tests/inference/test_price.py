"""The loss of a plan, against the log evidence under dense covariances."""

import pytest
import torch

from gp_orff.inference.price import loss_of_noise, ratio_of_loss


@pytest.mark.parametrize("ratio", [1e-3, 0.1, 3.0])
@pytest.mark.parametrize("modes", [1, 7, 30])
def test_modes_that_are_treated_as_white_noise_lose_evidence(ratio, modes):
    """The expected difference of the log densities of N(0, I + r M/m BBᵀ) and N(0, (1 + r) I), for
    an orthonormal basis B of m modes at M values."""
    generator = torch.Generator().manual_seed(0)
    basis, _ = torch.linalg.qr(torch.randn(60, modes, generator=generator, dtype=torch.float64))
    eye = torch.eye(60, dtype=torch.float64)
    true = torch.distributions.MultivariateNormal(
        torch.zeros(60).double(), eye + ratio * 60 / modes * basis @ basis.mT
    )
    white = torch.distributions.MultivariateNormal(torch.zeros(60).double(), (1 + ratio) * eye)
    expected = torch.distributions.kl_divergence(true, white).item()
    assert loss_of_noise(ratio, 60, modes) == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_waves_shorter_than_distances_have_half_as_many_modes_as_there_are_values():
    assert loss_of_noise(0.01, 1000, 5000) == loss_of_noise(0.01, 1000)
    assert loss_of_noise(0.01, 1000) == pytest.approx(1000 / 4 * 0.01**2, rel=0.02)  # M r²/4


@pytest.mark.parametrize("modes", [20, 500, 10_000])
def test_the_ratio_of_a_small_loss(modes):
    ratio = ratio_of_loss(0.1, 1000, modes)
    assert loss_of_noise(ratio, 1000, modes) == pytest.approx(0.1, rel=0.2)  # O(r³) is left out
