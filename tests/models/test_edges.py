"""Limiting cases: distant points, no points, data without information."""

import re
import warnings

import gpytorch
import numpy as np
import pytest
import torch
from gpytorch.kernels import MultitaskKernel, RBFKernel

import gp_orff
from tests.support.fields import conditioned, curl_free, flow

pytestmark = pytest.mark.usefixtures("no_check_of_random_features")

RULES = {
    "exact": gp_orff.Auto(),
    "grid": gp_orff.Auto(exact_values=0),
    "by_hand": gp_orff.Grid(spacing=0.8, cutoff=15.0),
    "random": gp_orff.MonteCarlo(30),
    "hermite": gp_orff.GaussHermite(30),
}
X, Y, _ = flow(120)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["field", "separable"])
@pytest.mark.parametrize("rule", RULES)
def test_no_points_give_empty_results(rule, kind):
    kernel = curl_free(0.4)
    if kind == "separable":
        kernel = MultitaskKernel(RBFKernel(), num_tasks=2).double()
    field = conditioned(kernel, X, Y, RULES[rule]).posterior()
    none = torch.zeros(0, 2)
    assert field.mean(none).shape == field.variance(none).shape == (0, 2)
    assert field.mean(none).dtype == torch.float32
    assert field.mean([]).shape == field.mean(np.zeros((0, 2))).shape == (0, 2)
    assert field.pointwise_covariance(none).shape == (0, 2, 2)
    joint = field(none)
    assert joint.mean.shape == joint.variance.shape == (0, 2)
    assert joint.covariance_matrix.shape == (0, 0)
    assert field.divergence(none).mean.shape == field.divergence(none).stddev.shape == (0,)
    assert field.jacobian(none).variance.shape == (0, 4)
    assert field.sample_paths(3)(none).shape == (3, 0, 2)
    assert field.sample_paths(3)(torch.zeros(3, 0, 2)).shape == (3, 0, 2)
    with pytest.raises(ValueError, match="2 columns, got 3"):
        field.mean(torch.zeros(0, 3))


FAR = {
    "degrees_for_radians": (X[:5] * torch.tensor([1.0, 1e6]), 1),
    "seconds_for_days": (X[:5] + torch.tensor([86400.0, 0.0]), 0),
}


@pytest.mark.parametrize("rule", [RULES["grid"], gp_orff.Grid.for_data(X)], ids=["auto", "grid"])
@pytest.mark.parametrize("name", FAR)
def test_points_far_away_are_told_by_their_column(name, rule):
    field = conditioned(curl_free(0.3), X, Y, rule).posterior()
    points, column = FAR[name]
    low, high = points[:, column].aminmax()
    least, most = X[:, column].aminmax()
    asked = f"column {column} from {low:.6g} to {high:.6g}"
    expected = f"{asked} where the data are between {least:.6g} and {most:.6g}"
    with pytest.raises(ValueError, match=re.escape(expected)) as found:
        field.mean(points)
    assert "max_features" not in str(found.value)


def test_a_grid_takes_points_on_a_line():
    x = torch.linspace(0, 1, 30)
    assert gp_orff.Grid.for_data(x) == gp_orff.Grid.for_data(x.unsqueeze(-1))
    kernel = gp_orff.ORFFKernel(RBFKernel(), gp_orff.Grid.for_data(x), num_dims=1)
    torch.testing.assert_close(
        kernel(x).to_dense(), kernel.base_kernel(x).to_dense(), rtol=0, atol=1e-4
    )


@pytest.mark.parametrize(
    ("offset", "extent", "coarse"),
    [(1e8, 1.0, True), (1e8, 1e3, True), (5e6, 100.0, True), (180.0, 1.0, False), (0, 1e-9, False)],
)
def test_single_precision_that_loses_the_positions_is_told(offset, extent, coarse):
    """Near 1e8 float32 has steps of 8, near 5e6 of 0.5."""
    x = offset + extent * torch.rand(50, 2, generator=torch.Generator().manual_seed(0)).double()
    model = gp_orff.VectorFieldGP(curl_free(extent))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.condition(x, Y[:50])  # in float64
    if coarse:
        with pytest.warns(UserWarning, match="given in float32.*float64, or subtract an offset"):
            model.condition(x.float().numpy(), Y[:50])
    else:
        model.condition(x.float(), Y[:50])


@pytest.mark.parametrize("call", ["fit", "condition", "leave_one_out", "cross_validate"])
def test_a_table_of_degrees_is_told_once_a_call(call):
    """Also where the data are visited several times."""
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame({"lon": X[:40, 0] + 5, "lat": X[:40, 1] + 50})
    model = gp_orff.VectorFieldGP(curl_free(0.4))
    if call in ("leave_one_out", "cross_validate"):
        model.condition(table.to_numpy(), Y[:40])
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        getattr(model, call)(table, Y[:40], **({"progress": False} if call == "fit" else {}))
    assert sum("look like degrees" in str(warning.message) for warning in told) == 1


def test_reversed_arrays_are_read():
    """numpy's `x[::-1]`, which torch does not take."""
    model = gp_orff.VectorFieldGP(curl_free(0.4))
    x, y = X.numpy()[::-1], Y.numpy()[::-1, ::-1]
    found = model.condition(x, y).posterior().mean(x[::-1][:5])
    expected = model.condition(X, Y.flip(1)).posterior().mean(X[:5])
    torch.testing.assert_close(torch.as_tensor(found), expected, rtol=0, atol=1e-9)


def test_a_constant_column_is_no_loss():
    flat = torch.cat([X[:, :1], torch.full_like(X[:, :1], 5.0)], dim=-1).float()
    gp_orff.VectorFieldGP(curl_free(0.4)).condition(flat, Y)


@pytest.mark.parametrize("rule", ["exact", "grid"])
@pytest.mark.parametrize("count", [1, 50])
def test_data_that_tell_no_noise_leave_the_hyperparameters(rule, count):
    """Constant numbers: the posterior is that of the hyperparameters there are."""
    model = gp_orff.VectorFieldGP(curl_free(0.4), frequencies=RULES[rule])
    model.likelihood.noise = 0.04
    constant = torch.tensor([1.0, -2.0]).double().expand(count, 2)
    with pytest.warns(UserWarning, match=f"got {count} observations with equal values.*condition"):
        model.fit(X[:count], constant, progress=False)
    assert model.likelihood.noise.item() == pytest.approx(0.04)
    field = model.posterior()
    torch.testing.assert_close(field.mean(X), constant[:1].expand(len(X), 2), rtol=0, atol=1e-6)
    prior = model.kernel(X).to_dense().detach()
    noisy = prior[: 2 * count, : 2 * count] + 0.04 * torch.eye(2 * count)
    cross = prior[: 2 * count]
    ones = torch.eye(2).double().repeat(len(X), 1)
    seen, gain = ones[: 2 * count], torch.linalg.solve(noisy, cross).mT
    effect = ones - gain @ seen  # of the mean, which the data have to tell
    of_mean = torch.linalg.inv(seen.mT @ torch.linalg.solve(noisy, seen))
    covariance = prior - gain @ cross + effect @ of_mean @ effect.mT
    expected = covariance.diagonal().reshape(-1, 2)
    torch.testing.assert_close(field.variance(X), expected, rtol=0.02, atol=0)  # of a grid


def test_names_of_the_package():
    assert set(dir(gp_orff)) == {*gp_orff.__all__, "__version__"}
    assert callable(gp_orff.plotting.plot_field)
    with pytest.raises(AttributeError, match="module 'gp_orff' has no attribute 'plots'"):
        gp_orff.plots  # noqa: B018


def test_auto_without_data_says_what_it_lacks():
    """Unless it has a budget, or there are more inputs than a grid serves."""
    with pytest.raises(
        ValueError, match=r"neither data nor domain; use gp_orff\.Auto\(\)\.for_data"
    ):
        gp_orff.ORFFKernel(RBFKernel(), gp_orff.Auto(), num_dims=1)
    many = gp_orff.ORFFKernel(RBFKernel(), gp_orff.Auto(), num_dims=5)
    given = gp_orff.ORFFKernel(RBFKernel(), gp_orff.Auto(max_features=2048), num_dims=1)
    assert (many.num_features, given.num_features) == (4096, 2048)


class Mine(gpytorch.kernels.Kernel):
    has_lengthscale = True

    def forward(self, x1, x2, diag=False, **params):
        return (-self.covar_dist(x1 / self.lengthscale, x2 / self.lengthscale, diag=diag)).exp()


def test_a_rough_potential_that_is_no_matern():
    @gp_orff.spectrum.register
    def _(kernel: Mine):
        return gp_orff.spectra.StudentT(kernel.lengthscale, nu=0.5)

    with pytest.raises(ValueError, match=r"twice-differentiable.*got Mine; use nu=1\.5"):
        gp_orff.CurlFreeKernel(Mine(), num_dims=2)
