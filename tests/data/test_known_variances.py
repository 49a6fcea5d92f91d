"""Known variances: results depend only on Σ over the weights of the observations, in every unit."""

import copy

import gpytorch
import pytest
import torch
from gpytorch.kernels import MultitaskKernel, RBFKernel
from linear_operator.utils.warnings import NumericalWarning

import gp_orff
from gp_orff.data.statistics import FieldStatistics
from gp_orff.features.assemble import expand
from gp_orff.inference.equations import prefers_dual
from gp_orff.kernels.base import cholesky
from tests.support import oracles
from tests.support.fields import curl_free, directions, features_of, flow

pytestmark = pytest.mark.usefixtures("no_check_of_random_features")

WITHOUT_EXACT = gp_orff.Auto(exact_values=0)
XS = directions(30, seed=5)


def separable():
    return MultitaskKernel(RBFKernel(), num_tasks=2, rank=1).double()


ALGEBRAS = {
    "exact": (curl_free, 60, gp_orff.Auto()),
    "dual": (curl_free, 20, gp_orff.Grid(domain=((-1, 1),) * 2, max_features=120)),
    "statistics": (curl_free, 300, WITHOUT_EXACT),
    "kronecker": (separable, 300, WITHOUT_EXACT),
    "random": (curl_free, 100, gp_orff.MonteCarlo(40)),
}


def spread(count, decades=1.0, seed=0):
    """Lognormal variances around one."""
    generator = torch.Generator().manual_seed(seed)
    return 10 ** (decades * torch.randn(count, generator=generator).double())


def model_for(kernel, rule, noise):
    torch.manual_seed(0)  # frequencies and tasks that are drawn
    kernel = kernel() if kernel is separable else kernel(0.5)
    model = gp_orff.VectorFieldGP(kernel, frequencies=rule)
    model.likelihood.noise = noise
    return model


def assert_same(model, other, rtol=1e-9):
    """Rounding, times the condition of the covariance."""
    for name in ("mean", "variance"):
        mine, theirs = (getattr(own.posterior(), name)(XS) for own in (model, other))
        torch.testing.assert_close(mine, theirs, rtol=rtol, atol=rtol)
    nats = [own.log_marginal_likelihood().item() for own in (model, other)]
    assert nats[0] == pytest.approx(nats[1], rel=rtol)


@pytest.mark.slow
@pytest.mark.parametrize("name", ALGEBRAS)
@pytest.mark.filterwarnings("ignore:the truncated variance of the given grid")
def test_noise_over_weights_is_all_that_matters(name, tmp_path):
    """(Σ, v) and (cΣ, v/c): conditioned, merged, with more readings, saved and loaded."""
    kernel, points, rule = ALGEBRAS[name]
    x, y, _ = flow(points + 5)
    v, models = spread(points + 5), []
    for scale in (1.0, 1e-18):
        model = model_for(kernel, rule, 1e-3 * scale)
        own = v / scale
        model.condition(x[:points], y[:points], variances=own[:points])
        models.append((model, own))
    assert_same(*(model for model, _ in models))
    torch.testing.assert_close(
        *(_left_out(m, x, y, own, points) for m, own in models), rtol=1e-6, atol=1e-9
    )
    if name in ("statistics", "kronecker", "random"):
        merged = []
        for model, own in models:
            part = model.statistics_of(x[points:], y[points:], variances=own[points:])
            merged.append(copy.deepcopy(model).condition(model.statistics + part))
        assert_same(*merged)
    for model, own in models:
        model.update(x[points:], y[points:], variances=own[points:])
    assert_same(*(model for model, _ in models))
    for index, (model, _) in enumerate(models):
        model.save(tmp_path / str(index))
    loaded = [gp_orff.VectorFieldGP.load(tmp_path / str(index)) for index in (0, 1)]
    assert_same(*loaded)
    assert_same(loaded[1], models[0][0], rtol=1e-6 if name in ("statistics", "kronecker") else 1e-9)


def _left_out(model, x, y, v, points):
    return model.leave_one_out(x[:points], y[:points], variances=v[:points]).distance


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rule", "decades"),
    [(gp_orff.Auto(), 0.0), (gp_orff.Auto(), 0.5), (WITHOUT_EXACT, 0.5)],
    ids=["exact_equal", "exact", "grid"],
)
def test_a_fit_does_not_know_units(rule, decades):
    """The same steps, but for rounding; with equal variances, those of a fit without any."""
    x, y, field = flow(50 if rule.exact_values else 100, extent=0.5)
    xs = 0.45 * XS
    v = spread(len(x), decades)
    noise = y - field(x)
    y = field(x) + v.sqrt().unsqueeze(-1) * noise
    cases, found = [(1.0, v), (1e8, 1e6 * v)], []
    if not decades:
        cases = [(1.0, None), (1e-8, 1e-18 * v)]
    for unit, variances in cases:
        model = gp_orff.VectorFieldGP(curl_free(), frequencies=rule)
        model.fit(x, unit * y, variances=variances, progress=False)
        size = 1.0 if variances is None else (variances / v)[0].item()
        numbers = [
            model.kernel.base_kernel.base_kernel.lengthscale.item(),
            model.kernel.outputscale.item() / unit**2,
            model.likelihood.noise.item() * size / unit**2,
        ]
        posterior = model.posterior()
        found.append((numbers, posterior.mean(xs) / unit, posterior.variance(xs).sqrt() / unit))
    for numbers, mean, sd in found[1:]:
        assert numbers == pytest.approx(found[0][0], rel=1e-6)
        torch.testing.assert_close(mean, found[0][1], rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(sd, found[0][2], rtol=1e-6, atol=0)
    assert found[0][0][2] ** 0.5 == pytest.approx(0.1, rel=0.3)  # what it is, of 100 numbers
    z = (found[0][1] - field(xs)) / found[0][2]
    assert 0.5 < z.square().mean().sqrt() < 1.5  # interpolated: far beyond


@pytest.mark.parametrize("decades", [0.0, 0.5, 1.0])
def test_a_grid_serves_the_most_precise_readings(decades):
    """Standard deviations within 1 % of dense algebra, where 95 % of variances are in 10^±2, also
    at the readings themselves, some of which know hundreds of times more than others."""
    x, _, _ = flow(350)
    v, model = spread(300, decades), model_for(curl_free, WITHOUT_EXACT, 1e-3)
    model.mean = gpytorch.means.ZeroMean()
    y = torch.zeros(300, 2).double()
    posterior = model.condition(x[:300], y, variances=v).posterior()
    prior = model.kernel(x).to_dense().detach()
    noisy = prior[:600, :600] + 1e-3 * torch.diag(v.repeat_interleave(2))
    _, covariance = oracles.condition(prior, prior[:, :600], noisy, torch.zeros(600).double())
    ratio = posterior.variance(x).flatten() / covariance.diagonal()
    assert ratio.min() > 0.98
    assert ratio.max() < 1.02


def test_what_is_cut_is_told_of_every_instrument():
    """δ over Σ by the mean weight: what a search gives back of the noise it has learned."""
    x, y, _ = flow(300)
    v = spread(300)
    model = model_for(curl_free, gp_orff.Auto(exact_values=0, max_features=100), 0.1)
    chunks = [
        {"x": x[:200], "y": y[:200], "variances": v[:200]},
        {"x": x[200:], "y": y[200:], "variances": v[200:], "group": "coarse"},
    ]
    model.condition(chunks)
    model.likelihoods["coarse"].noise = 3.0
    fine, coarse = model.state.representation.cuts().values()
    delta = model.state.inference.truncated(model.kernel).diagonal().mean().item()
    assert fine == pytest.approx(delta * (1 / v[:200]).mean().item() / 0.1)
    assert coarse == pytest.approx(delta * (1 / v[200:]).mean().item() / 3.0)


def written_out(seen):
    """A model of few readings with a truncated variance, and H, y, noise and H δ Hᵀ of them."""
    x, y, _ = flow(12)
    v, u = spread(12), directions(12)
    along = (u * y).sum(-1)
    model = model_for(curl_free, gp_orff.Grid(domain=((-1, 1),) * 2, max_features=60), 0.01)
    model.mean = gpytorch.means.ZeroMean()
    how = {"variances": v}
    if seen == "directions":
        how |= {"directions": u}
        y, h = along, torch.block_diag(*u.unsqueeze(1))
    else:
        h = torch.eye(24).double()
    model.condition(x, y, **how)
    observations = model.state.inference
    assert prefers_dual(expand(model.kernel, observations.draws, 2), 24)
    delta = observations.truncated(model.kernel).detach()
    assert delta.trace() > 0.05 * model.kernel.outputscale  # it matters
    phi = h @ features_of(model)(x)
    noise = 0.01 * torch.diag(v.repeat_interleave(1 if seen == "directions" else 2))
    white = h @ torch.block_diag(*[delta] * 12) @ h.mT
    return model, (x, y, how), phi @ phi.mT + noise + white


@pytest.mark.parametrize("seen", ["vectors", "directions"])
@pytest.mark.filterwarnings("ignore:the truncated variance of the given grid")
def test_readings_that_are_written_out_have_their_own_truncated_variance(seen):
    """Unequal weights and directions: evidence and leave-one-out of dense algebra, to rounding."""
    model, (x, y, how), noisy = written_out(seen)
    expected = oracles.log_density(noisy, y.reshape(-1))
    torch.testing.assert_close(model.log_marginal_likelihood(), expected, rtol=1e-10, atol=1e-8)
    found = model.leave_one_out(x, y, **how)
    values = y[0].numel()
    for i in (0, 5, 11):
        own = list(range(values * i, values * (i + 1)))
        rest = [j for j in range(len(noisy)) if j not in own]
        residual, covariance = oracles.condition(
            noisy[own][:, own], noisy[own][:, rest], noisy[rest][:, rest], y.reshape(-1)[rest]
        )
        residual = y.reshape(-1)[own] - residual
        torch.testing.assert_close(found.residual[i], residual, rtol=1e-8, atol=1e-8)
        torch.testing.assert_close(found.covariance[i], covariance, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("unit", [1e-20, 1e20])
def test_jitter_has_units(unit):
    a = torch.tensor([[1.0, 1.0], [1.0, 1.0 - 1e-9]], dtype=torch.float64)  # singular
    with pytest.warns(NumericalWarning):
        factor = cholesky(unit * a) / unit**0.5
    torch.testing.assert_close(factor @ factor.mT, a, rtol=0, atol=2e-8)


def test_weights_add_up_and_old_files_have_them():
    """Σw and Σw² of groups that merge; of a file without them, as if all weights were alike."""
    x, y, _ = flow(60)
    v = spread(60)
    model = model_for(curl_free, WITHOUT_EXACT, 0.1).condition(x, y, variances=v)
    parts = [model.statistics_of(x[i::2], y[i::2], variances=v[i::2]) for i in (0, 1)]
    (weights,) = (own.weights for own in (parts[0] + parts[1]).groups.values())
    expected = 60, (1 / v).sum().item(), v.pow(-2).sum().item(), -v.log().sum().item()
    found = weights.count, weights.total, weights.squares, weights.log
    assert found == pytest.approx(expected)
    packed = model.statistics.plain()
    (group,) = packed["groups"]
    group["count"], group["log_weight"] = group["weights"][0], group.pop("weights")[3]
    (old,) = FieldStatistics.from_plain(packed).groups.values()
    assert (old.count, old.weights.log) == pytest.approx((60, expected[3]))
    assert old.weights.mean == pytest.approx(v.log().mean().neg().exp().item())
