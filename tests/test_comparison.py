"""Kernels judged by their evidence, and features by the exact kernel."""

import gpytorch
import pytest
import torch
from gpytorch.kernels import MaternKernel, ScaleKernel

import gp_orff
from tests.test_vector_field_gp import conditioned, curl_free, flow


@pytest.mark.parametrize(
    ("points", "rule"), [(150, None), (400, gp_orff.Auto(exact_values=0))], ids=["exact", "grid"]
)
def test_the_kernel_that_made_the_field_wins(points, rule):
    x, y, _ = flow(points)
    found = gp_orff.compare_kernels(x, y, progress=False, frequencies=rule)
    assert set(found.evidence) == {"curl-free", "divergence-free", "Helmholtz", "independent"}
    names = list(found.evidence)
    assert set(names[:2]) == {"curl-free", "Helmholtz"}
    assert found.evidence["curl-free"] > found.evidence["divergence-free"] + 20
    assert found.best is found.models[names[0]]
    for name, model in found.models.items():
        assert model.log_marginal_likelihood().item() == pytest.approx(found.evidence[name])
    table = str(found).splitlines()
    assert len(table) == 5
    assert table[1].split()[0] == names[0]
    behind = (found.evidence[names[1]] - found.evidence[names[0]]) / points
    assert float(table[2].split()[-1]) == pytest.approx(behind, abs=1e-4)


def test_kernels_of_ones_own_on_chunks():
    x, y, _ = flow(120)
    kernels = {"rbf": curl_free(), "matern": curl_free(kernel=lambda: MaternKernel(nu=2.5))}
    found = gp_orff.compare_kernels(
        [(x[:50], y[:50]), (x[50:], y[50:])], None, kernels, progress=False
    )
    assert set(found.evidence) == {"rbf", "matern"}
    with pytest.raises(TypeError, match="varainces"):
        gp_orff.compare_kernels(x, y, progress=False, varainces=1)


@pytest.mark.parametrize("rule", ["grid", "coarse", "random", "exact"])
def test_features_are_judged_by_the_exact_kernel(rule):
    """The three numbers by dense algebra on the same points."""
    x, y, _ = flow(800)
    rules = {
        "grid": gp_orff.Auto(exact_values=0),
        "coarse": gp_orff.Grid(domain=((-1, 1), (-1, 1)), max_features=80),
        "random": gp_orff.MonteCarlo(60),
        "exact": gp_orff.Auto(exact_values=2000),
    }
    with gp_orff.settings.check_features(False):
        model = conditioned(
            curl_free(0.3), x, y, rules[rule], noise=0.01, mean=gpytorch.means.ZeroMean()
        )
        found = gp_orff.compare_with_exact(model, x, y, subset=200, seed=1)
    words = {"grid": "good", "coarse": "poor", "random": "poor", "exact": "exact"}
    assert found.verdict.startswith(words[rule])
    assert str(found).startswith(found.verdict)
    assert found.num_points == 200
    assert ("gp_orff.Grid" in found.verdict) == (rule == "random")  # none to who has one
    assert ("larger max_features" in found.verdict) == (rule == "coarse")
    if rule == "exact":
        assert found.mean == found.sd == found.evidence == 0
        return
    order = torch.randperm(800, generator=torch.Generator().manual_seed(1))
    train, test = x[order[:200]], x[order[:400]]
    target = y[order[:200]].reshape(-1)
    features = gp_orff.ORFFKernel(model.kernel, gp_orff.MonteCarlo(2), num_dims=2)
    features.frequencies = torch.nn.ModuleList(model.state.inference.draws)
    results = []
    for kernel in (model.kernel, features):
        dense = kernel(train).to_dense().detach() + 0.01 * torch.eye(400).double()
        cross = kernel(test, train).to_dense().detach()
        if kernel is features:
            expansion = features._expansion(2).double()
            cross = (expansion.features(test) @ expansion.features(train).mT).detach()
        gain = torch.linalg.solve(dense, cross.mT).mT
        sd = (kernel(test).to_dense().diagonal() - (gain * cross).sum(-1)).detach().sqrt()
        nats = -0.5 * (target @ torch.linalg.solve(dense, target) + dense.logdet())
        results.append((gain @ target, sd, nats / 400))
    (mean, sd, nats), (other_mean, other_sd, other_nats) = results
    assert found.mean == pytest.approx(
        (((other_mean - mean) / sd) ** 2).mean().sqrt().item(), rel=1e-4
    )
    assert found.sd == pytest.approx(((other_sd - sd) / sd).abs().max().item(), rel=1e-4, abs=1e-6)
    assert found.evidence == pytest.approx((other_nats - nats).item(), rel=1e-4, abs=1e-8)


def test_comparison_leaves_the_model_as_it_is():
    x, y, _ = flow(300)
    model = gp_orff.VectorFieldGP(curl_free(0.3), frequencies=gp_orff.Auto(exact_values=0))
    model.condition(x, y, group="adcp")
    before = model.posterior().mean(x)
    gp_orff.compare_with_exact(model, x, y, subset=100, group="adcp")
    with pytest.raises(ValueError, match="known group"):
        gp_orff.compare_with_exact(model, x, y, subset=100, group="other")
    assert torch.equal(model.posterior().mean(x), before)
    assert set(model.likelihoods) == {"adcp"}
    with pytest.raises(ValueError, match="at least 2 points"):
        gp_orff.compare_with_exact(model, x, y, subset=1)
    with pytest.raises(RuntimeError, match="no data yet"):
        gp_orff.compare_with_exact(gp_orff.VectorFieldGP(curl_free()), x, y)


def test_a_kernel_without_covariance_is_not_compared():
    x, y, _ = flow(200)
    mixture = gpytorch.kernels.SpectralMixtureKernel(num_mixtures=2, ard_num_dims=2)
    kernel = ScaleKernel(gp_orff.CurlFreeKernel(mixture, num_dims=2))
    model = gp_orff.VectorFieldGP(kernel, frequencies=gp_orff.MonteCarlo(20, measure="base"))
    with gp_orff.settings.check_features(False):
        model.condition(x, y)
        with pytest.raises(NotImplementedError):
            gp_orff.compare_with_exact(model, x, y)
