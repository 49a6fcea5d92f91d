"""Groups of observations, weights, gaps and directions, compared with dense algebra of numbers."""

import gpytorch
import numpy as np
import pandas as pd
import pytest
import torch
from gpytorch.kernels import ConstantKernel, MultitaskKernel, RBFKernel
from gpytorch.likelihoods import GaussianLikelihood, MultitaskGaussianLikelihood

import gp_orff
from gp_orff.data.reading import Options, read
from tests.support import oracles
from tests.support.fields import curl_free, directions, features_of, flow, uniform

RULES = {
    "exact": gp_orff.Auto(),
    "grid": gp_orff.Grid(domain=((-1, 1), (-1, 1)), tolerance=1e-11, lengthscale_range=(1, 1)),
    "auto_grid": gp_orff.Auto(exact_values=0, tolerance=1e-10),
}
POINTS = 60


def noise_covariance(instrument):
    """Of an instrument's vectors."""
    return {
        "": torch.tensor([[0.05, 0.02], [0.02, 0.08]]),
        "buoy": torch.tensor([[0.3, 0.0], [0.0, 0.2]]),
        "radar": 0.04 * torch.eye(2),
        "plain": 0.07 * torch.eye(2),
    }[instrument].double()


def cases():
    """Chunks, and for each the numbers read: point, sensitivity h, value, noise covariance."""
    x, y, _ = flow(POINTS)
    gaps = y.clone()
    gaps[::3, 0] = float("nan")
    gaps[1::4, 1] = float("nan")
    variances = torch.linspace(0.3, 3.0, POINTS).double()
    u = directions(POINTS)
    along = (u * y).sum(-1)
    every = [(i, j) for i in range(POINTS) for j in range(2)]
    eye = torch.eye(2).double()

    def vectors(instrument, kept=None, scale=None):
        rows = every if kept is None else [(i, j) for i, j in every if kept[i, j]]
        scale = torch.ones(POINTS).double() if scale is None else scale
        noise = noise_covariance(instrument)
        at, component = torch.tensor(rows).T
        sizes = noise[component][:, component] * (at[:, None] == at) * scale[at]
        return x, rows, eye[component], y, sizes

    def sight(instrument):
        rows = [(i, None) for i in range(POINTS)]
        return x, rows, u, along, noise_covariance(instrument)[0, 0] * torch.eye(POINTS).double()

    return {
        "whole": ([{"x": x, "y": y}], [vectors("")]),
        "gaps": ([{"x": x, "y": gaps}], [vectors("", ~gaps.isnan())]),
        "variances": ([{"x": x, "y": y, "variances": variances}], [vectors("", None, variances)]),
        "gaps_and_variances": (
            [{"x": x, "y": gaps, "variances": variances}],
            [vectors("", ~gaps.isnan(), variances)],
        ),
        "lines_of_sight": (
            [{"x": x, "y": along, "directions": u, "group": "radar"}],
            [sight("radar")],
        ),
        "instruments": (
            [
                {"x": x, "y": gaps},
                {"x": x, "y": y, "group": "buoy", "variances": variances},
                {"x": x, "y": along, "directions": u, "group": "radar"},
                {"x": x, "y": along, "directions": u, "group": "plain"},
            ],
            [
                vectors("", ~gaps.isnan()),
                vectors("buoy", None, variances),
                sight("radar"),
                sight("plain"),
            ],
        ),
    }


def model_for(rule, mean=None):
    """With the noise of every instrument as `noise_covariance` has it."""
    likelihood = MultitaskGaussianLikelihood(2, rank=2, has_global_noise=False).double()
    likelihood.task_noise_covar_factor.data = torch.linalg.cholesky(
        noise_covariance("")
    ).contiguous()
    model = gp_orff.VectorFieldGP(
        curl_free(0.5), likelihood=likelihood, frequencies=rule, mean=mean
    )
    own = MultitaskGaussianLikelihood(2, rank=2, has_global_noise=False).double()
    own.task_noise_covar_factor.data = torch.linalg.cholesky(noise_covariance("buoy")).contiguous()
    model.likelihoods["buoy"] = own
    for name in ("radar", "plain"):
        model.likelihoods[name] = GaussianLikelihood().double()
        model.likelihoods[name].noise = noise_covariance(name)[0, 0]
    return model


def oracle(covariance, parts):
    """Points, sensitivities, values, prior covariance and noise of all numbers."""
    x = torch.cat([points for points, *_ in parts])
    offset, index, h, values, blocks = 0, [], [], [], []
    for points, rows, sensitivity, y, noise in parts:
        index += [offset + i for i, _ in rows]
        values += [y[i] if j is None else y[i, j] for i, j in rows]
        h.append(sensitivity)
        blocks.append(noise)
        offset += len(points)
    h, index = torch.cat(h), torch.tensor(index)
    prior = covariance(x).detach().reshape(len(x), 2, len(x), 2)
    latent = torch.einsum("ai,aibj,bj->ab", h, prior[index][:, :, index], h)
    return x, index, h, torch.stack(values), latent, torch.block_diag(*blocks)


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    ("case", "mean"), [*((case, "constant") for case in cases()), ("instruments", "zero")]
)
def test_evidence_and_posterior_equal_dense_algebra(case, rule, mean):
    chunks, parts = cases()[case]
    model = model_for(RULES[rule], gpytorch.means.ZeroMean() if mean == "zero" else None)
    model.condition(chunks, missing="mask")
    x, index, h, y, latent, noise = oracle(lambda x: model.kernel(x).to_dense(), parts)
    covariance = latent + noise
    constant, of_mean = torch.zeros(2).double(), torch.zeros(2, 2).double()
    if mean == "constant":
        white = torch.linalg.solve(covariance, torch.cat([h, y[:, None]], dim=-1))
        of_mean = torch.linalg.inv(h.mT @ white[:, :2])
        constant = of_mean @ h.mT @ white[:, 2]
    residual = y - h @ constant
    expected = oracles.log_density(covariance, residual)
    found = model.log_marginal_likelihood()
    close = 2e-8 if rule == "exact" else 5e-7  # of the mean; a grid cuts 1e-10 of the variance
    torch.testing.assert_close(found, expected, rtol=0, atol=100 * close)

    xs = directions(7, seed=5)
    cross = model.kernel(xs, x).to_dense().detach().reshape(14, len(x), 2)
    cross = torch.einsum("mai,ai->ma", cross[:, index], h)
    gain = torch.linalg.solve(covariance, cross.mT).mT
    wanted = (gain @ residual).reshape(7, 2) + constant
    field = model.posterior()
    torch.testing.assert_close(field.mean(xs), wanted, rtol=0, atol=close)
    effect = torch.eye(2).double().repeat(7, 1) - gain @ h
    wanted = model.kernel(xs).to_dense().detach() - gain @ cross.mT + effect @ of_mean @ effect.mT
    torch.testing.assert_close(field(xs).covariance_matrix, wanted, rtol=0, atol=close)
    torch.testing.assert_close(field.variance(xs).flatten(), wanted.diagonal(), rtol=0, atol=5e-8)


@pytest.mark.parametrize("rule", ["exact", "features"])
def test_two_of_three_components(rule):
    """Every point lacks one: the order of those seen matters, also to the best constant mean."""
    x, generator = flow(POINTS)[0], torch.Generator().manual_seed(0)
    y = torch.randn(POINTS, 3, generator=generator).double() + torch.tensor([1.0, -2.0, 3.0])
    y[torch.arange(POINTS), torch.arange(POINTS) % 3] = float("nan")
    kernel = MultitaskKernel(RBFKernel(), num_tasks=3, rank=3).double()
    kernel.data_covar_module.lengthscale = 0.5
    noise = torch.tensor([[0.5, 0.2, 0.1], [0.2, 0.8, -0.1], [0.1, -0.1, 0.3]]).double()
    likelihood = MultitaskGaussianLikelihood(3, rank=3, has_global_noise=False).double()
    likelihood.task_noise_covar_factor.data = torch.linalg.cholesky(noise).contiguous()
    own = RULES["exact"] if rule == "exact" else gp_orff.MonteCarlo(8)  # fewer than values
    model = gp_orff.VectorFieldGP(kernel, likelihood=likelihood, frequencies=own)
    with gp_orff.settings.check_features(False):
        model.condition(x, y, missing="mask")
        posterior = model.posterior()
    phi = None if rule == "exact" else features_of(model)

    def prior(a, b):
        return kernel(a, b).to_dense().detach() if phi is None else phi(a) @ phi(b).mT

    seen = ~y.flatten().isnan()
    noisy = prior(x, x) + torch.kron(torch.eye(POINTS).double(), noise)
    noisy, values = noisy[seen][:, seen], y.flatten()[seen]
    ones = torch.eye(3).double().repeat(POINTS, 1)[seen]
    white = torch.linalg.solve(noisy, torch.cat([ones, values[:, None]], dim=-1))
    constant = torch.linalg.solve(ones.mT @ white[:, :3], ones.mT @ white[:, 3])
    residual = values - ones @ constant
    found = model.log_marginal_likelihood()
    expected = oracles.log_density(noisy, residual)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-7)
    xs = directions(7, seed=5)
    cross = prior(xs, x)[:, seen]
    wanted = (cross @ torch.linalg.solve(noisy, residual)).reshape(7, 3) + constant
    torch.testing.assert_close(posterior.mean(xs), wanted, rtol=0, atol=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["exact", "auto_grid"])
def test_gradients_in_the_noise_of_every_instrument(rule):
    """By finite differences of the evidence."""
    chunks, _ = cases()["instruments"]
    model = model_for(RULES[rule]).condition(chunks, missing="mask")
    named = [(n, p) for n, p in model.named_parameters() if "mean" not in n]
    gradients = torch.autograd.grad(
        model.log_marginal_likelihood(), [p for _, p in named], allow_unused=True
    )
    for (name, parameter), gradient in zip(named, gradients, strict=True):
        place, values = parameter.data.view(-1), []
        before = place[0].item()
        for step in (-1e-4, 1e-4):
            place[0] = before + step
            values.append(model.log_marginal_likelihood().item())
        place[0] = before
        slope = (values[1] - values[0]) / 2e-4
        found = 0.0 if gradient is None else gradient.flatten()[0].item()
        assert slope == pytest.approx(found, rel=1e-4, abs=1e-3), name


def test_components_of_their_own_precision():
    """Variances (N, p): as two readings of one number each."""
    x, y, _ = flow(POINTS)
    variances = torch.rand(POINTS, 2, generator=torch.Generator().manual_seed(0)).double() + 0.2
    models = []
    for rule in ("exact", "auto_grid"):
        model = gp_orff.VectorFieldGP(curl_free(0.5), frequencies=RULES[rule])
        model.likelihood.noise = 0.3
        model.condition(x, y, variances=variances)
        models.append(model)
    covariance = models[0].kernel(x).to_dense().detach() + torch.diag(0.3 * variances.flatten())
    constant = torch.stack([m.constant.detach() for m in models[0].mean.base_means]).flatten()
    expected = oracles.log_density(covariance, y - constant)
    for model in models:
        torch.testing.assert_close(model.log_marginal_likelihood(), expected, rtol=0, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["gaps", "lines_of_sight", "instruments"])
def test_truncated_variance_enters_each_group(case):
    """Under a budget: the features' own covariance with δ in every number's noise."""
    chunks, _ = cases()[case]
    small = gp_orff.Grid(domain=((-1, 1),) * 2, max_features=60)
    model = model_for(small, gpytorch.means.ZeroMean())
    unweighted = [{k: v for k, v in chunk.items() if k != "variances"} for chunk in chunks]
    model.condition(unweighted, missing="mask")
    observations = model.state.inference
    delta = observations.truncated(model.kernel).detach()
    assert delta.trace() > 0.05 * model.kernel.outputscale  # it matters
    _, parts = cases()["gaps" if case == "gaps" else case]
    if case == "instruments":
        x, rows, h, y, noise = parts[1]
        eye = torch.eye(POINTS).double()
        parts[1] = (x, rows, h, y, torch.kron(eye, noise_covariance("buoy")))
    phi = features_of(model)
    _, index, h, y, latent, noise = oracle(lambda x: phi(x) @ phi(x).mT, parts)
    same = index[:, None] == index[None]
    white = torch.einsum("ai,ij,bj->ab", h, delta, h) * same
    for start, stop in _sights(parts):  # one variance for all directions: the mean one
        white[start:stop, start:stop] = (
            torch.eye(stop - start) * white[start:stop].diagonal(start).mean()
        )
    expected = oracles.log_density(latent + noise + white, y)
    torch.testing.assert_close(model.log_marginal_likelihood(), expected, rtol=1e-9, atol=1e-7)


def _sights(parts):
    offset = 0
    for _, rows, *_ in parts:
        if rows[0][1] is None:
            yield offset, offset + len(rows)
        offset += len(rows)


def test_one_truncated_variance_for_weighted_readings():
    """Not exact (δ has no weights): the mean weight, tested against the right noise."""
    x, y, _ = flow(300)
    variances = torch.linspace(0.5, 2.0, 300).double()
    model = gp_orff.VectorFieldGP(
        curl_free(0.3),
        frequencies=gp_orff.Auto(exact_values=0, max_features=120),
        mean=gpytorch.means.ZeroMean(),
    )
    model.likelihood.noise = 0.05
    model.condition(x, y, variances=variances)
    observations = model.state.inference
    delta = observations.truncated(model.kernel).detach()
    phi = features_of(model)(x)
    noise = torch.kron(torch.diag(variances), 0.05 * torch.eye(2).double())
    noise = noise + torch.kron(torch.eye(300).double(), delta)
    expected = oracles.log_density(phi @ phi.mT + noise, y)
    assert abs(model.log_marginal_likelihood() - expected) / 600 < 0.02


@pytest.mark.slow
def test_an_instrument_learns_its_own_noise():
    """Two of different quality, a radar that sees one component: each gets the noise it has."""
    generator = torch.Generator().manual_seed(4)
    x, _, field = flow(1500)
    noise = torch.randn(1500, 2, generator=generator).double()
    good, bad = field(x[:500]) + 0.05 * noise[:500], field(x[500:1000]) + 0.4 * noise[500:1000]
    u = directions(500)
    radar = (u * field(x[1000:])).sum(-1) + 0.15 * noise[1000:, 0]
    chunks = [
        {"x": x[:1000], "y": torch.cat([good, bad]), "group": ["adcp"] * 500 + ["drifter"] * 500},
        {"x": x[1000:], "y": radar, "directions": u, "group": "radar"},
    ]
    model = gp_orff.VectorFieldGP(curl_free()).fit(chunks, progress=False)
    found = {name: own.noise.item() ** 0.5 for name, own in model.likelihoods.items()}
    assert found["adcp"] == pytest.approx(0.05, rel=0.15)
    assert found["drifter"] == pytest.approx(0.4, rel=0.1)
    assert found["radar"] == pytest.approx(0.15, rel=0.15)
    assert model.report.noise["adcp"] == pytest.approx(found["adcp"] ** 2)
    error = model.posterior().mean(x) - field(x)
    assert error.square().mean().sqrt() < 0.05


def test_a_component_that_is_never_seen_has_no_constant():
    x, y, _ = flow(80)
    y[:, 1] = float("nan")
    for rule in (gp_orff.Auto(), gp_orff.Auto(exact_values=0)):
        model = gp_orff.VectorFieldGP(curl_free(0.5), frequencies=rule)
        model.likelihood.noise = 0.01
        with pytest.warns(gp_orff.DataWarning, match=r"depends on .* along \(0, 1\)"):
            model.condition(x, y, missing="mask")
        assert model.mean.base_means[1].constant.abs() < 1e-8
        assert model.posterior().mean(x).isfinite().all()


def test_readings_of_one_pattern_are_one_group():
    x, y, _ = flow(20)
    y[3, 0] = y[5] = float("nan")
    found = read(x, y, 2, Options(missing="mask"))
    patterns = {own.pattern.columns: len(own) for own in found}
    assert patterns == {(0, 1): 18, (1,): 1}


@pytest.mark.parametrize(
    "labels",
    [
        ["buoy"] * 20 + [None] * 10,
        pd.Series(["buoy"] * 20 + [None] * 10),
        pd.Series(["buoy"] * 20 + [pd.NA] * 10, dtype="string"),
        pd.Categorical(["buoy"] * 20 + [None] * 10),
        np.ma.array(["buoy"] * 30, mask=[False] * 20 + [True] * 10),
    ],
    ids=["list", "pandas", "string", "categorical", "masked"],
)
def test_readings_whose_group_is_missing_have_none(labels):
    """And no group of a noise of its own, which is called nan."""
    x, y = uniform(30, 2), uniform(30, 2, seed=1)
    model = gp_orff.VectorFieldGP(curl_free(0.5)).condition(x, y, group=labels)
    rest = gp_orff.VectorFieldGP(curl_free(0.5)).condition(x[:20], y[:20], group="buoy")
    rest.update(x[20:], y[20:])
    assert list(model.likelihoods) == list(rest.likelihoods) == ["buoy"]
    for own in (model, rest):
        own.likelihoods["buoy"].noise = 0.01
    evidence = [own.log_marginal_likelihood().item() for own in (model, rest)]
    assert evidence[0] == pytest.approx(evidence[1], rel=1e-10)


BAD = {
    "nan": ({"y": lambda y: y.index_fill(0, torch.tensor([0]), float("nan"))}, "missing='mask'"),
    "infinite": (
        {"y": lambda y: y.index_fill(0, torch.tensor([0]), float("inf")), "missing": "mask"},
        "NaN or infinite",
    ),
    "all_gone": ({"y": lambda y: y * float("nan"), "missing": "mask"}, "nothing but NaN"),
    "missing": ({"missing": "drop"}, "missing='raise' or missing='mask'"),
    "variances": ({"variances": -1.0}, "positive, finite variances"),
    "variances_length": ({"variances": np.ones(3)}, "variances of shape"),
    "directions": ({"directions": np.ones((30, 2)), "y": lambda y: y[:, 0]}, "unit vectors"),
    "directions_y": ({"directions": directions(30)}, "one value for each point"),
    "directions_shape": ({"directions": np.ones((30, 3)), "y": lambda y: y[:, 0]}, "of shape"),
    "one component": ({"y": lambda y: y[:, 0]}, r"give directions= of shape \(N, 2\)"),
    "group": ({"group": ["a", "b"]}, "one group for all observations"),
}


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fit", "condition", "update", "statistics_of"])
@pytest.mark.parametrize("name", BAD)
def test_bad_readings_are_refused_and_nothing_is_lost(name, method):
    x, y, _ = flow(30)
    model = gp_orff.VectorFieldGP(curl_free(0.5)).condition(x, y)
    before, known = model.posterior().mean(x), set(model.likelihoods)
    change, message = BAD[name]
    how = dict(change)
    values = how.pop("y", lambda y: y)(y.clone())
    if name == "variances":
        how["variances"] = -torch.ones(30)
    if method == "fit":
        how["progress"] = False
    if (name, method) == ("all_gone", "update"):  # which is counted, and changes nothing
        assert model.update(x, values, **how).report.skipped == 1
    else:
        with pytest.raises(ValueError, match=message):
            getattr(model, method)(x, values, **how)
    assert set(model.likelihoods) == known
    assert torch.equal(model.posterior().mean(x), before)


def test_noise_of_a_direction_must_not_depend_on_it():
    x, y, _ = flow(30)
    likelihood = MultitaskGaussianLikelihood(2).double()
    likelihood.task_noises = torch.tensor([0.1, 0.9])
    model = gp_orff.VectorFieldGP(curl_free(0.5), likelihood=likelihood)
    with pytest.raises(ValueError, match=r"does not depend on direction.*group="):
        model.condition(x, y[:, 0], directions=directions(30))
    with pytest.raises(TypeError, match="wieght"):
        model.condition(x, y, wieght=2)


def test_a_constant_term_of_the_kernel_sees_directions():
    x, y, _ = flow(200)
    kernel = curl_free(0.4) + MultitaskKernel(ConstantKernel(), num_tasks=2).double()
    u = directions(200)
    results = []
    for rule in (gp_orff.Auto(), gp_orff.Auto(exact_values=0, tolerance=1e-8)):
        model = gp_orff.VectorFieldGP(kernel, frequencies=rule, mean=gpytorch.means.ZeroMean())
        model.likelihood.noise = 0.01
        model.condition(x, (u * y).sum(-1), directions=u)
        results.append(model.posterior().mean(x))
    torch.testing.assert_close(*results, rtol=0, atol=1e-4)


def test_a_table_in_degrees_is_warned_of():
    """By names and values; arrays, and tables of other values or names, are not."""
    pandas = pytest.importorskip("pandas")
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(30, 2, generator=generator).double().numpy()
    table = pandas.DataFrame({"Lon": 5 * x[:, 0] - 10, "lat": 5 * x[:, 1] + 40})
    model = gp_orff.VectorFieldGP(gp_orff.CurlFreeKernel(num_dims=2))
    with pytest.warns(gp_orff.DataWarning, match=r"columns \['lon', 'lat'\].* like degrees"):
        model.condition(table, x)
    model.condition(table.to_numpy(), x)
    model.condition(100 * table, x)  # kilometres
    model.condition(table.rename(columns={"Lon": "x", "lat": "y"}), x)
