"""The next observations and redundant ones, compared with models with and without them."""

import numpy as np
import pytest
import torch
from gpytorch.kernels import MaternKernel, RBFKernel
from gpytorch.likelihoods import GaussianLikelihood
from gpytorch.means import MultitaskMean, ZeroMean

import gp_orff

GRID = gp_orff.Grid(domain=((-0.3, 1.3), (-0.3, 1.3)), tolerance=1e-7)
RULES = {"exact": gp_orff.Auto(), "grid": GRID, "dual": gp_orff.QuasiMonteCarlo(512)}
TARGETS = {
    "field": None,
    "curl": gp_orff.Curl(),
    "part": gp_orff.DivergenceFreePart(),
    "transport": gp_orff.Flux(torch.tensor([[0.2, 0.2], [0.8, 0.5]]).double()),
    "potential": gp_orff.Potential([0.5, 0.5]),
}
NOISE = 0.01


def draw(*shape, seed=0):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def kernel():
    kernel = gp_orff.HelmholtzKernel(RBFKernel(), num_dims=2)
    for part in kernel.modules():
        if isinstance(part, RBFKernel):
            part.lengthscale = 0.4
    return kernel


pytestmark = pytest.mark.filterwarnings("ignore:the posterior of these")  # random features

X = draw(14, 2)
Y = torch.sin(6 * X.flip(-1))
REGION = draw(5, 2, seed=3)


def model(rule="exact", x=X, y=Y, **options):
    made = gp_orff.VectorFieldGP(kernel(), frequencies=RULES[rule])
    made.likelihood.noise = NOISE
    return made.condition(x, y, **options)


def variance(posterior, target, region=REGION):
    """The mean of the summed variances of a target."""
    return posterior.variance(region, target).sum(-1).mean().item()


def region_for(target):
    return torch.zeros(1, 2).double() if target == "transport" else REGION


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("target", TARGETS)
def test_gains_are_those_of_models_with_the_observations(rule, target):
    candidates, symbol, region = draw(6, 2, seed=5), TARGETS[target], region_for(target)
    posterior = model(rule).posterior()
    found = posterior.design(candidates, 3, target=symbol, region=region)
    before = variance(posterior, symbol, region)
    assert found.variance == pytest.approx(before, rel=1e-6)
    for i in (0, 4):
        x, y = torch.cat([X, candidates[i : i + 1]]), torch.cat([Y, Y[:1]])
        alone = variance(model(rule, x, y).posterior(), symbol, region)
        assert found.first[i].item() == pytest.approx(before - alone, rel=1e-5, abs=1e-9)
    x = torch.cat([X, candidates[found.indices]])
    after = variance(model(rule, x, torch.cat([Y, Y[:3]])).posterior(), symbol, region)
    assert found.gains.sum().item() == pytest.approx(before - after, rel=1e-5, abs=1e-9)
    assert len(set(found.indices.tolist())) == 3
    assert found.indices[0] == found.first.argmax()
    torch.testing.assert_close(found.points, candidates[found.indices])


@pytest.mark.parametrize("rule", RULES)
def test_with_a_known_mean(rule):
    def known(x, y):
        mean = MultitaskMean(ZeroMean(), num_tasks=2)
        made = gp_orff.VectorFieldGP(kernel(), mean=mean, frequencies=RULES[rule])
        made.likelihood.noise = NOISE
        return made.condition(x, y).posterior()

    posterior, candidates = known(X, Y), draw(4, 2, seed=5)
    before = variance(posterior, None)
    design = posterior.design(candidates, 2, region=REGION)
    x = torch.cat([X, candidates[design.indices]])
    after = variance(known(x, torch.cat([Y, Y[:2]])), None)
    assert design.gains.sum().item() == pytest.approx(before - after, rel=1e-5)
    losses = posterior.redundancy(np.arange(len(X)), region=REGION).losses
    without = variance(known(X[1:], Y[1:]), None)
    assert losses[0].item() == pytest.approx(without - before, rel=1e-5)


@pytest.mark.parametrize("rule", ["exact", "grid"])
def test_components_and_noise_of_each_candidate(rule):
    candidates, noise = draw(4, 2, seed=5), torch.tensor([0.5, 0.01, 0.1, 0.02]).double()
    directions = torch.nn.functional.normalize(draw(4, 2, seed=6) - 0.5)
    posterior = model(rule).posterior()
    found = posterior.design(candidates, 2, region=REGION, directions=directions, noise=noise)
    before = variance(posterior, None)
    for i in range(4):
        new = {"x": candidates[i : i + 1], "y": torch.zeros(1), "directions": directions[i : i + 1]}
        other = model(rule)
        other.likelihoods["new"] = GaussianLikelihood().double()
        other.likelihoods["new"].noise = noise[i].item()
        other.condition([(X, Y), {**new, "group": "new"}])
        after = variance(other.posterior(), None)
        assert found.first[i].item() == pytest.approx(before - after, rel=1e-4)


def test_cost_decides():
    candidates, posterior = draw(6, 2, seed=5), model().posterior()
    free = posterior.design(candidates, region=REGION)
    cost = torch.ones(6)
    cost[free.indices[0]] = 1e6
    assert posterior.design(candidates, region=REGION, cost=cost).indices[0] != free.indices[0]


def test_a_region_is_a_box_or_that_of_the_data():
    posterior = model().posterior()
    far = torch.tensor([[0.1, 0.1], [2.9, 2.9]]).double()
    assert posterior.design(far, region=((2.5, 3.0), (2.5, 3.0))).indices.item() == 1
    assert posterior.design(far).first[0] > posterior.design(far).first[1]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("target", ["field", "curl"])
def test_losses_are_those_of_models_without_the_observations(rule, target):
    stations, symbol = np.arange(14) // 2, TARGETS[target]
    posterior = model(rule).posterior()
    found = posterior.redundancy(stations, target=symbol, region=REGION)
    before = variance(posterior, symbol)
    for name in (0, 5):
        kept = torch.from_numpy(stations != name)
        without = variance(model(rule, X[kept], Y[kept]).posterior(), symbol)
        assert found.losses[name].item() == pytest.approx(without - before, rel=1e-5)
    assert found.variance == pytest.approx(before, rel=1e-6)
    torch.testing.assert_close(found.points[0], X[:2].mean(0))
    assert found.order[0] == found.losses.argmin()


def test_stations_are_positions_by_default():
    """With missing components, and repeated readings of one station."""
    x, y = X[[0, 0, 1, 2, 3]], Y[:5].clone()
    y[3, 0] = torch.nan
    found = model(x=x, y=y, missing="mask").posterior().redundancy(region=REGION)
    assert len(found.labels) == 4
    before = variance(model(x=x, y=y, missing="mask").posterior(), None)
    kept = [2, 3, 4]
    without = variance(model(x=x[kept], y=y[kept], missing="mask").posterior(), None)
    first = int((found.points - X[0]).norm(dim=-1).argmin())
    assert found.losses[first].item() == pytest.approx(without - before, rel=1e-5)


def test_after_a_fit_to_few_data():
    """Whose posterior integrates the hyperparameters; the design has the learned ones."""
    fitted = gp_orff.VectorFieldGP(kernel()).fit(X, Y, progress=False)
    learned = fitted.posterior(marginalize=False)
    found = fitted.posterior().design(draw(6, 2, seed=5), region=REGION)
    assert found.variance == pytest.approx(variance(learned, None), rel=1e-6)


def test_inputs_beside_space():
    time = MaternKernel(nu=1.5, active_dims=(2,))
    flow = gp_orff.DivergenceFreeKernel(RBFKernel(), num_dims=2, active_dims=(0, 1)) * time
    x = draw(10, 3)
    held = gp_orff.VectorFieldGP(flow).condition(x, torch.sin(6 * x[:, [1, 0]]))
    found = held.posterior().design(draw(5, 3, seed=2), 2, target=gp_orff.Curl())
    assert (found.gains > 0).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"count": 9}, "at most the 4 candidates"),
        ({"region": ((0.0, 1.0),)}, "of 2 inputs, got 1"),
        ({"noise": -1.0}, "positive noise"),
        ({"noise": torch.ones(3)}, "one for each of the 4 candidates"),
        ({"candidates": X[:2], "noise": [0.1, 0.2]}, "distinguishes 2 candidates and 2 components"),
        ({"region": [(0, 1), (0, 1)]}, "a box, or an array of points"),
        ({"cost": torch.zeros(4)}, "4 positive numbers.*with 4 that are not positive"),
        ({"cost": [1.0, np.nan, 1.0, 1.0]}, "with 1 that are not positive"),
        ({"candidates": torch.full((4, 2), torch.nan)}, "got 4 of 4 with NaN"),
        ({"directions": torch.full((4, 2), torch.nan)}, "expected unit vectors"),
        ({"directions": torch.ones(4, 2)}, "expected unit vectors"),
        ({"region": ((0.0, np.inf), (0.0, 1.0))}, "finite numbers low <= high"),
        ({"directions": torch.ones(4, 3)}, r"directions of shape \(4, 2\)"),
        ({"target": gp_orff.VectorPotential()}, "VectorPotential"),
    ],
)
def test_mistakes(options, message):
    with pytest.raises(ValueError, match=message):
        model().posterior().design(**{"candidates": draw(4, 2), **options})


@pytest.mark.parametrize("target", [gp_orff.Curl, "curl"])
def test_a_target_that_is_no_symbol(target):
    with pytest.raises(TypeError, match=r"expected a symbol, such as gp_orff\.Curl\(\), got"):
        model().posterior().design(draw(4, 2), target=target)


def test_noise_by_shape():
    """What two numbers of noise mean is said by a further dimension."""
    posterior, noise, two = model().posterior(), torch.tensor([0.1, 0.2]).double(), X[:2] + 0.01
    of_components = posterior.design(two, noise=torch.diag(noise), region=REGION).first
    of_candidates = noise[:, None, None] * torch.eye(2)
    of_candidates = posterior.design(two, noise=of_candidates, region=REGION).first
    for i in range(2):
        alone = two[i : i + 1]
        one = posterior.design(alone, noise=noise, region=REGION).first
        torch.testing.assert_close(of_components[i : i + 1], one)
        one = posterior.design(alone, noise=noise[i], region=REGION).first
        torch.testing.assert_close(of_candidates[i : i + 1], one)


@pytest.mark.parametrize("kind", ["variances", "covariances"])
def test_noise_that_is_known(kind):
    """It is that of candidates where all observations have the same."""

    def given(noise):
        return noise if kind == "variances" else noise[:, None, None] * torch.eye(2)

    noise = torch.full((14,), 0.1).double()
    posterior = model(noise=given(noise)).posterior()
    chosen = posterior.design(draw(4, 2, seed=5), region=REGION)
    x, y = torch.cat([X, chosen.points]), torch.cat([Y, Y[:1]])
    after = variance(model(x=x, y=y, noise=given(torch.full((15,), 0.1))).posterior(), None)
    assert chosen.gains.item() == pytest.approx(chosen.variance - after, rel=1e-5)
    noise[3] = 0.2
    with pytest.raises(ValueError, match="expected noise= for the candidates"):
        model(noise=given(noise)).posterior().design(X)


def test_noise_beside_any_likelihood():
    """Where pseudo-observations represent Gaussian noise, candidates have the noise that is given,
    and must have one."""
    base = GaussianLikelihood()
    base.noise = NOISE
    pointwise = gp_orff.VectorFieldGP(kernel(), likelihood=gp_orff.Pointwise(base)).condition(X, Y)
    with pytest.raises(NotImplementedError, match="design expects noise="):
        pointwise.posterior().design(X)
    gains = [
        each.posterior().design(draw(4, 2, seed=5), 2, noise=0.1, region=REGION).gains
        for each in (pointwise, model())
    ]
    torch.testing.assert_close(*gains, rtol=1e-6, atol=0)


def test_regions_of_three_inputs():
    """A list of three pairs is a box, as a tuple is; with two inputs, falling pairs are points."""
    time = MaternKernel(nu=1.5, active_dims=(2,))
    flow = gp_orff.DivergenceFreeKernel(RBFKernel(), num_dims=2, active_dims=(0, 1)) * time
    x, box = draw(10, 3), [(0.0, 1.0)] * 3
    held = gp_orff.VectorFieldGP(flow).condition(x, torch.sin(6 * x[:, [1, 0]])).posterior()
    assert held.design(x, region=box).variance == held.design(x, region=tuple(box)).variance
    points, posterior = [[0.9, 0.1], [0.2, 0.3]], model().posterior()
    mean = variance(posterior, None, torch.tensor(points).double())
    assert posterior.design(X, region=points).variance == pytest.approx(mean)


def test_what_cannot_be_left_out():
    labels = np.arange(14) // 7
    with pytest.raises(ValueError, match="each of the 14 observations"):
        model().posterior().redundancy([1, 2])
    with pytest.warns(gp_orff.DataWarning, match="copies"):
        held = model(x=X.repeat(2, 1), y=Y.repeat(2, 1)).posterior()
    with pytest.raises(ValueError, match="14 observations that the model stores"):
        held.redundancy(np.tile(labels, 2))
    kept = model(x=X.repeat(2, 1), y=Y.repeat(2, 1), merge=0).posterior()
    assert len(kept.redundancy(np.tile(labels, 2)).losses) == 2
    along = gp_orff.VectorFieldGP(kernel()).condition(X, Y, track=labels)
    noisy = gp_orff.VectorFieldGP(kernel())
    noisy = noisy.condition(X, Y, track=labels, noise=np.linspace(0.1, 0.2, 14))
    with pytest.raises(ValueError, match="expected noise= for the candidates"):
        noisy.posterior().design(X)
    with pytest.raises(NotImplementedError, match="along tracks"):
        along.posterior().redundancy()
    two = model().condition(X, Y, group=labels.astype(str)).posterior()
    with pytest.raises(NotImplementedError, match="stations=None"):
        two.redundancy(labels)
    with pytest.raises(ValueError, match="expected noise= for the candidates"):
        two.design(X)
