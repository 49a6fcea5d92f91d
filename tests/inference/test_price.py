"""The loss of modes that a search treats as noise, against dense covariances."""

import pytest
import torch
from torch.distributions import MultivariateNormal, kl_divergence

from gp_orff.inference.price import loss_of_noise, ratio_of_loss


@pytest.mark.parametrize("modes", [1, 7, 30, 60])
def test_modes_that_are_treated_as_white_noise_lose_evidence(modes):
    """The expected difference of the log densities of N(0, I + r M/m BBᵀ) and N(0, (1 + r) I), for
    an orthonormal basis B of m modes at M values."""
    ratio = ratio_of_loss(1e-4, 60, modes)
    count = min(modes, 30)  # at most half as many modes as values
    generator = torch.Generator().manual_seed(0)
    basis, _ = torch.linalg.qr(torch.randn(60, count, generator=generator, dtype=torch.float64))
    eye, zeros = torch.eye(60, dtype=torch.float64), torch.zeros(60, dtype=torch.float64)
    true = MultivariateNormal(zeros, eye + ratio * 60 / count * basis @ basis.mT)
    white = MultivariateNormal(zeros, (1 + ratio) * eye)
    lost = kl_divergence(true, white).item()
    assert lost == pytest.approx(1e-4, rel=0.05)  # without O(r³)


def test_waves_shorter_than_distances_have_half_as_many_modes_as_there_are_values():
    assert loss_of_noise(ratio_of_loss(0.1, 1000, 5000), 1000) == pytest.approx(0.1, rel=0.05)
