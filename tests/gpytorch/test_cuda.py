"""Equal numbers on a GPU; without a GPU, the same tests run on the CPU."""

import gpytorch
import pytest
import torch
from gpytorch.kernels import ScaleKernel

import gp_orff
from tests.support.fields import conditioned, curl_free, directions, flow
from tests.support.models import VectorGP

NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
DEVICES = ["cpu", pytest.param("cuda", marks=[NO_GPU, pytest.mark.cuda])]
RULES = {
    "exact": None,
    "grid": gp_orff.Auto(exact_values=0),
    "random": gp_orff.MonteCarlo(40),
}
pytestmark = [
    pytest.mark.usefixtures("no_check_of_random_features"),
    pytest.mark.parametrize("device", DEVICES),
]


def assert_same(model, other, x, atol=1e-8):
    """Results come where the points are, wherever the model is."""
    one, expected = model.posterior(), other.posterior()
    for name in ("mean", "variance"):
        mine, theirs = getattr(one, name)(x), getattr(expected, name)(x)
        assert mine.device == x.device
        torch.testing.assert_close(mine, theirs, rtol=0, atol=atol)
    joint = one(x[:5])
    torch.testing.assert_close(
        joint.covariance_matrix.cpu(), expected(x[:5]).covariance_matrix, rtol=0, atol=atol
    )
    evidence = model.log_marginal_likelihood().item()
    assert evidence == pytest.approx(other.log_marginal_likelihood().item(), rel=1e-8)


@pytest.mark.parametrize("rule", RULES)
def test_a_model_moves_with_its_data(device, rule, tmp_path):
    x, y, _ = flow(400)
    expected = conditioned(curl_free(0.4), x[:300], y[:300], RULES[rule], noise=0.01)
    model = conditioned(curl_free(0.4), x[:300], y[:300], RULES[rule], noise=0.01).to(device)
    assert {p.device.type for p in model.parameters()} == {device}
    assert_same(model, expected, x)
    for own in (model, expected):
        own.update(x[300:], y[300:])
    assert_same(model, expected, x)
    model.save(tmp_path / "model.pt")
    loaded = gp_orff.VectorFieldGP.load(tmp_path / "model.pt")
    assert next(loaded.parameters()).device.type == "cpu"
    assert_same(loaded, model.cpu(), x)


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
def test_a_fit_on_the_device_is_a_fit(device, rule):
    """Readings of every kind, on either side."""
    x, y, _ = flow(240)
    y[::9, 0] = float("nan")
    u = directions(240)
    found = []
    for where in ("cpu", device):
        kernel = curl_free(0.4)
        if rule == "random":
            kernel.requires_grad_(False)  # its frequencies
        model = gp_orff.VectorFieldGP(kernel, frequencies=RULES[rule]).to(where)
        chunks = [
            {"x": x.to(where), "y": y.to(where), "variances": torch.ones(240)},
            {"x": x, "y": (u * y.nan_to_num(0.0)).sum(-1), "directions": u, "group": "radar"},
        ]
        found.append(model.fit(chunks, missing="mask", progress=False))
    one, other = (model.posterior() for model in found)
    # Each search ends where another step promises less than .01 nats.
    evidence = [model.log_marginal_likelihood().item() for model in found]
    assert evidence[0] == pytest.approx(evidence[1], abs=0.02)
    sd = other.variance(x).sqrt().cpu()
    assert ((one.mean(x) - other.mean(x)).cpu().abs() < 0.1 * sd).all()
    torch.testing.assert_close(one.variance(x).sqrt().cpu(), sd, rtol=0.05, atol=0)


def test_a_model_is_where_its_kernel_is(device):
    """A kernel may be on a device before a model adds an amplitude and a noise to it."""
    kernel = curl_free(0.4).to(device)
    model = gp_orff.VectorFieldGP(kernel)
    assert {own.device.type for own in model.parameters()} == {device}
    x, y, _ = flow(60)
    field = model.condition(x.to(device), y.to(device)).posterior()
    for of in (field.divergence, field.potential):  # derivatives of the exact kernel
        assert of(x[:4].to(device)).variance.device.type == device


@pytest.mark.slow
def test_robust_noise_statistics_and_scores(device):
    x, y, _ = flow(700)
    y[:50] += 5.0
    found = []
    for where in ("cpu", device):
        likelihood = gp_orff.MultitaskStudentTLikelihood(2)
        model = gp_orff.VectorFieldGP(curl_free(0.4), likelihood=likelihood).double()
        likelihood.noise = 0.01
        model = model.to(where).condition(x, y)
        part = model.statistics_of(x[:100], y[:100])
        scores = model.leave_one_out(x, y)
        found.append((model.update(part), scores))
    assert_same(found[1][0], found[0][0], x, atol=1e-6)
    for name in ("distance", "p_value", "weight"):
        mine, theirs = (getattr(own[1], name) for own in found)
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("rule", ["grid", "random"])
def test_features_in_an_exact_gp(device, rule, dtype):
    """Evidence, gradient and prediction; float64 inside, whatever comes in."""
    x, y, _ = flow(300)
    results = []
    for where in ("cpu", device):
        kernel = ScaleKernel(gp_orff.CurlFreeKernel(num_dims=2)).to(where, torch.float64)
        kernel.base_kernel.base_kernel.lengthscale = 0.5
        rule_ = RULES["random"] if rule == "random" else gp_orff.Grid.for_data(x)
        features = gp_orff.ORFFKernel(kernel, rule_, num_dims=2).to(where, dtype)
        likelihood = gpytorch.likelihoods.MultitaskGaussianLikelihood(2, has_task_noise=False)
        inputs, targets = x.to(where, dtype), y.to(where, dtype)
        model = VectorGP(inputs, targets, likelihood, features).to(where, dtype)
        mll = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)
        evidence = mll(model(inputs), targets)
        evidence.backward()
        model.eval()
        with torch.no_grad():
            prediction = model(inputs[:20])
        assert prediction.mean.device.type == where
        gradient = features.base_kernel.base_kernel.base_kernel.raw_lengthscale.grad
        parts = (evidence.detach(), gradient, prediction.mean, prediction.variance)
        results.append([part.cpu() for part in parts])
    for mine, theirs in zip(*results, strict=True):
        tolerance = 1e-8 if dtype == torch.float64 else 2e-3
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)
