"""Comparison of kernels by their evidence, and of features with the exact kernel."""

import itertools

import gpytorch
import pytest
import torch
from gpytorch.kernels import MaternKernel, ScaleKernel
from sklearn.model_selection import KFold

import gp_orff
from tests.support.fields import conditioned, curl_free, features_of, flow


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:lengthscale is less:gp_orff.DataWarning")
@pytest.mark.parametrize(
    ("points", "rule"), [(60, None), (130, gp_orff.Auto(exact_values=0))], ids=["exact", "grid"]
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


@pytest.mark.slow
def test_kernels_of_ones_own_on_chunks():
    x, y, _ = flow(120)
    kernels = {"rbf": curl_free(), "matern": curl_free(kernel=lambda: MaternKernel(nu=2.5))}
    found = gp_orff.compare_kernels(
        [(x[:50], y[:50]), (x[50:], y[50:])], None, kernels, progress=False
    )
    assert set(found.evidence) == {"rbf", "matern"}
    with pytest.raises(TypeError, match="varainces"):
        gp_orff.compare_kernels(x, y, progress=False, varainces=1)


RULES = {  # and the first word of the verdict
    "grid": (gp_orff.Auto(exact_values=0), "good"),
    "coarse": (gp_orff.Grid(domain=((-1, 1), (-1, 1)), max_features=80), "poor"),
    "random": (gp_orff.MonteCarlo(60), "poor"),
    "exact": (gp_orff.Auto(exact_values=2000), "exact"),
}


def judged(rule):
    """Data, a model, and what is said of it."""
    x, y, _ = flow(800)
    rule, word = RULES[rule]
    with gp_orff.settings.check_features(False):
        model = conditioned(curl_free(0.3), x, y, rule, noise=0.01, mean=gpytorch.means.ZeroMean())
        found = gp_orff.compare_with_exact(model, x, y, subset=200, seed=1)
    assert found.verdict.startswith(word)
    assert str(found).startswith(found.verdict)
    assert found.num_points == 200
    return x, y, model, found


def test_an_exact_kernel_is_what_it_is_judged_by():
    *_, found = judged("exact")
    assert found.mean == found.sd == found.evidence == 0


@pytest.mark.parametrize("rule", ["grid", "coarse", "random"])
@pytest.mark.filterwarnings("ignore:the truncated variance of the given grid")
def test_features_are_judged_by_the_exact_kernel(rule):
    """The three numbers by dense algebra on the same points."""
    x, y, model, found = judged(rule)
    assert ("gp_orff.Grid" in found.verdict) == (rule == "random")  # none to who has one
    assert ("larger max_features" in found.verdict) == (rule == "coarse")
    order = torch.randperm(800, generator=torch.Generator().manual_seed(1))
    train, test = x[order[:200]], x[order[:400]]
    target = y[order[:200]].reshape(-1)
    features = gp_orff.ORFFKernel(model.kernel, gp_orff.MonteCarlo(2), num_dims=2)
    features.frequencies = torch.nn.ModuleList(model.state.inference.draws)
    results, phi = [], features_of(model)
    for kernel, cross in (
        (model.kernel, model.kernel(test, train).to_dense().detach()),
        (features, phi(test) @ phi(train).mT),
    ):
        dense = kernel(train).to_dense().detach() + 0.01 * torch.eye(400).double()
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


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:lengthscale is less:gp_orff.DataWarning")
def test_kernels_are_ranked_by_left_out_blocks():
    x, y, _ = flow(80)
    labels = (torch.arange(80) % 4).tolist()
    wrong = ScaleKernel(gp_orff.DivergenceFreeKernel(num_dims=2))
    kernels = {"divergence-free": wrong, "curl-free": curl_free()}
    found = gp_orff.compare_kernels(x, y, kernels, progress=False, blocks=labels)
    results = found.cross_validations
    names = list(results)
    assert names == list(found.evidence) == list(found.models) == ["curl-free", "divergence-free"]
    assert names == sorted(names, key=lambda name: results[name].nlpd)
    assert found.best is found.models[names[0]]
    for name, result in results.items():
        alone = found.models[name].cross_validate(x, y, blocks=labels)
        assert result.nlpd == alone.nlpd
    first, last = results[names[0]], results[names[-1]]
    gain, error = first.gain_over(last)
    assert gain == pytest.approx(last.nlpd - first.nlpd)
    differences = (first.log_density - last.log_density - gain).double()
    sums = torch.stack([differences[first.block == b].sum() for b in range(4)])
    assert error == pytest.approx((4 / 3 * sums.square().sum()).sqrt().item() / 160)
    assert not found.tied(names[0], names[-1])
    table = str(found).splitlines()
    assert table[1].split()[0] == names[0]
    assert float(table[-1].split()[2]) == pytest.approx(gain, abs=1e-4)
    assert ["tied" in line for line in table[2:]] == [
        found.tied(a, b) for a, b in itertools.pairwise(names)
    ]
    with pytest.raises(ValueError, match="same blocks"):
        first.gain_over(found.best.cross_validate(x, y, blocks=labels[::-1]))


@pytest.mark.slow
def test_blocks_are_the_same_for_all_kernels():
    """Random splits too, and cells of the lengthscale of one of them."""
    x, y, _ = flow(60)
    kernels = {"rbf": curl_free(), "matern": curl_free(kernel=lambda: MaternKernel(nu=2.5))}
    for blocks in ("auto", KFold(3, shuffle=True)):
        found = gp_orff.compare_kernels(x, y, kernels, progress=False, blocks=blocks)
        first, second = found.cross_validations.values()
        assert torch.equal(first.block, second.block)
        assert torch.equal(first.index, second.index)
    with pytest.raises(TypeError, match="x alone"):
        gp_orff.compare_kernels([(x, y)], None, kernels, progress=False, blocks="auto")
    with pytest.raises(ValueError, match="label for each"):
        gp_orff.compare_kernels(x, y, kernels, progress=False, blocks=[1, 2])


@pytest.mark.slow
def test_kernels_that_share_hyperparameters_are_refused():
    """Each is trained in place: the last one would decide. Fixed ones may be shared."""
    x, y, _ = flow(30)
    base = gpytorch.kernels.RBFKernel()
    kernels = {
        "curl-free": gp_orff.CurlFreeKernel(base, num_dims=2),
        "divergence-free": gp_orff.DivergenceFreeKernel(base, num_dims=2),
    }
    with pytest.raises(ValueError, match="'curl-free' and 'divergence-free', which share"):
        gp_orff.compare_kernels(x, y, kernels, progress=False)
    with pytest.raises(TypeError, match=r"from names to kernels, such as .*, got list"):
        gp_orff.compare_kernels(x, y, list(kernels.values()), progress=False)
    base.requires_grad_(False)
    assert len(gp_orff.compare_kernels(x, y, kernels, progress=False).models) == 2
