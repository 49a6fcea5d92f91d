"""The zero mean that a fit of few numbers chooses in the place of a constant, and who keeps it."""

import gpytorch
import pytest
import torch

import gp_orff
from tests.fields import draw, swirl, unit_cube

XS = unit_cube(5, seed=3)


@pytest.fixture(scope="module")
def fitted():
    """A fit of 44 numbers that chose zero, with its data."""
    x = unit_cube(22)
    y = swirl(x) + 0.3 * draw(22, 2)
    model = gp_orff.VectorFieldGP(gp_orff.DivergenceFreeKernel(num_dims=2))
    with pytest.warns(gp_orff.DataWarning, match="poorly"):
        model.fit(x, y, progress=False)
    assert model.report.zero_mean
    return model, x, y


def loaded(model, folder):
    model.save(folder / "model.pt")
    return gp_orff.VectorFieldGP.load(folder / "model.pt")


def test_conditioning_keeps_the_choice(fitted, tmp_path):
    """The same data give the same posterior and evidence; others have no constant either."""
    model, x, y = fitted
    field, evidence = model.posterior(), model.log_marginal_likelihood()
    again = loaded(model, tmp_path)
    for _ in range(2):  # the choice is kept by a model that was conditioned too
        again = loaded(again.condition(x, y), tmp_path)
        assert again.report.zero_mean
        torch.testing.assert_close(again.posterior().mean(XS), field.mean(XS))
        torch.testing.assert_close(again.posterior().variance(XS), field.variance(XS))
        torch.testing.assert_close(again.log_marginal_likelihood(), evidence)
    again.condition(x, y + 5)
    assert again.mean(XS).abs().max() == 0


def test_blocks_left_out_are_predicted_as_by_conditioning(fitted, tmp_path):
    model, x, y = fitted
    block = torch.arange(len(x)) < 6
    result = model.cross_validate(x, y, blocks=block)
    found = result.mean[block[result.index]].reshape(-1, 2)
    rest = loaded(model, tmp_path).condition(x[~block], y[~block])
    torch.testing.assert_close(found, rest.posterior().mean(x[block]))


def test_another_fit_chooses_again(fitted, tmp_path):
    model, x, y = fitted
    other = loaded(model, tmp_path)
    with pytest.warns(gp_orff.DataWarning, match="poorly"):
        other.fit(x, y + 50, progress=False)
    assert not other.report.zero_mean
    other.condition(x, y + 70)  # a constant, the best one of these data
    torch.testing.assert_close(other.mean(XS).mean().item(), 70.0, atol=1.0, rtol=0)


def test_a_mean_that_is_set_is_kept(fitted, tmp_path):
    model, x, y = fitted
    other = loaded(model, tmp_path)
    other.mean = gpytorch.means.MultitaskMean(gpytorch.means.ConstantMean(), 2).double()
    other.mean.requires_grad_(False)
    for mean in other.mean.base_means:
        mean.initialize(constant=3.0)
    other.condition(x, y)
    assert other.mean(XS).eq(3.0).all()
    reference = gp_orff.VectorFieldGP(other.kernel, likelihood=other.likelihood, mean=other.mean)
    expected = reference.condition(x, y).posterior().mean(XS)
    torch.testing.assert_close(other.posterior().mean(XS), expected)
