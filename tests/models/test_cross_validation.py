"""Held-out blocks: predictions of a model that is conditioned on all other data, and scores."""

import gpytorch
import numpy as np
import pytest
import scipy.integrate
import scipy.stats
import sklearn.model_selection as splitters
import torch
from gpytorch.kernels import MultitaskKernel, RBFKernel

import gp_orff
from gp_orff.data.dataset import Dataset
from gp_orff.data.reading import Options, read
from gp_orff.models.cross_validation import Scores, blocks_of, cells, scales_of_noise
from tests.support.fields import ALGEBRAS, curl_free, directions, draw, flow, uniform

N, ROUNDING = 120, 1e-10  # of sums of as many numbers, on matrices of conditions up to 1e4


def options_of(kind, y):
    """How readings are given, and y as it is then."""
    if kind == "weights":
        return {"variances": 0.3 + uniform(N, seed=4), "group": ["a", "b", "b"] * (N // 3)}, y
    if kind == "gaps":
        return {"missing": "mask"}, y.index_put(
            (torch.arange(0, N, 3), torch.tensor(0)), y.new_tensor(np.nan)
        )
    if kind == "along":
        return {"directions": directions(N)}, (y * directions(N)).sum(-1)
    return {}, y


def some(values, rows):
    if isinstance(values, list):
        return [value for value, kept in zip(values, rows.tolist(), strict=True) if kept]
    return values[rows] if torch.is_tensor(values) else values


def left_out_by_conditioning(model, x, y, labels, options):
    """Mean and covariance of the field at all points, by label, from the readings of others."""
    state, found = model.state, {}
    for label in dict.fromkeys(labels):
        rows = torch.tensor([other != label for other in labels])
        own = Options(**{name: some(value, rows) for name, value in options.items()})
        rest = Dataset.in_memory(read(x[rows], y[rows], 2, own))
        posterior = state.inference.of(rest).posterior(
            model.kernel, state.e_step.noises, state.mean
        )
        field = posterior.field(fixed=state.mean is not None)
        found[label] = field.mean(x), field.blocks(x)
    return found


@pytest.mark.slow
@pytest.mark.usefixtures("no_check_of_random_features")
@pytest.mark.parametrize("kind", ["vectors", "weights", "gaps", "along"])
@pytest.mark.parametrize("algebra", ALGEBRAS)
def test_blocks_are_predicted_by_the_rest(algebra, kind):
    x, y, _ = flow(N)
    options, y = options_of(kind, y)
    model = gp_orff.VectorFieldGP(curl_free(0.4), frequencies=ALGEBRAS[algebra])
    model.likelihood.noise = 0.05
    model.condition(x, y, **options)
    before = model.posterior().mean(x)
    labels = (5 * uniform(N, seed=5)).long().tolist()
    found = model.cross_validate(x, y, blocks=labels, **options)
    assert torch.equal(model.posterior().mean(x), before)
    assert found.names == tuple(dict.fromkeys(labels))
    expected = left_out_by_conditioning(model, x, y, labels, options)
    variances = options.get("variances", torch.ones(N))
    assert len(found.pit) == torch.isfinite(y).sum()
    for b, i, j, mean, sd, observed in zip(
        found.block, found.index, found.column, found.mean, found.sd, found.observed, strict=True
    ):
        assert labels[i] == found.names[b]
        field, covariance = (values[i] for values in expected[labels[i]])
        h = directions(N)[i] if kind == "along" else torch.eye(2).double()[j]
        assert mean == pytest.approx((h @ field).item(), rel=ROUNDING, abs=ROUNDING)
        noise = 0.05 * variances[i].item()
        assert sd == pytest.approx((h @ covariance @ h + noise).sqrt().item(), rel=ROUNDING)
        assert observed == (y[i] if kind == "along" else y[i, j])


def test_the_closed_form_is_that_of_dense_algebra():
    """With the mean that the rest gives, by generalised least squares."""
    x, y, _ = flow(40)
    model = gp_orff.VectorFieldGP(curl_free(0.4))
    model.likelihood.noise = 0.05
    found = model.cross_validate(x, y, blocks=[i // 10 for i in range(40)])
    covariance = model.kernel(x).to_dense().detach()
    noisy = covariance + 0.05 * torch.eye(80).double()
    ones = torch.eye(2).double().repeat(40, 1)
    for number in range(4):
        block = torch.arange(20 * number, 20 * (number + 1))
        rest = torch.tensor([row for row in range(80) if row not in block.tolist()])
        k, h, v = noisy[rest][:, rest], ones[rest], y.flatten()[rest]
        of_mean = torch.linalg.inv(h.mT @ torch.linalg.solve(k, h))
        constant = of_mean @ h.mT @ torch.linalg.solve(k, v)
        gain = torch.linalg.solve(k, covariance[rest][:, block]).mT
        mean = gain @ (v - h @ constant) + ones[block] @ constant
        effect = ones[block] - gain @ h
        known = noisy[block][:, block] - gain @ covariance[rest][:, block]
        sd = (known + effect @ of_mean @ effect.mT).diagonal().sqrt()
        torch.testing.assert_close(found.mean[block], mean, rtol=ROUNDING, atol=ROUNDING)
        torch.testing.assert_close(found.sd[block], sd, rtol=ROUNDING, atol=ROUNDING)


@pytest.mark.parametrize("rule", [None, gp_orff.Auto(exact_values=0)], ids=["exact", "grid"])
@pytest.mark.parametrize("mean", [gpytorch.means.ZeroMean(), gpytorch.means.LinearMean(2)])
def test_means_that_are_not_trained_stay_what_they_are(rule, mean):
    x, y, _ = flow(60)
    many = gpytorch.means.MultitaskMean(mean, 2)
    model = gp_orff.VectorFieldGP(curl_free(0.4), frequencies=rule, mean=many)
    labels = torch.arange(60) % 3
    found = model.cross_validate(x, y, blocks=labels)
    torch.testing.assert_close(found.observed, y[found.index, found.column])
    rest, block = labels != 1, found.block == 1
    model.condition(x[rest], y[rest], merge=0)
    at = found.index[block], found.column[block]
    tolerance = 1e-10 if rule is None else 1e-3  # grids of other boxes, of noise 0.7
    torch.testing.assert_close(
        found.mean[block], model.posterior().mean(x)[at], rtol=0, atol=tolerance
    )


@pytest.mark.parametrize("across", [False, True], ids=["within", "across"])
def test_places_that_are_read_several_times(across):
    """Readings of one place, in one block or in several; what merges them changes nothing."""
    x, y, _ = flow(30)
    x, y = x.repeat(4, 1), y.repeat(4, 1) + 0.2 * draw(N, 2, seed=3)
    labels = torch.arange(N) // 30 if across else torch.arange(N) % 30 % 4
    model = gp_orff.VectorFieldGP(curl_free(0.4))
    model.likelihood.noise = 0.05
    merged, apart = (model.cross_validate(x, y, blocks=labels, merge=m) for m in (None, 0))
    model.condition(x, y)
    assert model.state.inference.size == 60  # of 240
    torch.testing.assert_close(merged.mean, apart.mean, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(merged.sd, apart.sd, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("points", [30, 400], ids=["dual", "primal"])
def test_many_outputs(points):
    kernel = MultitaskKernel(RBFKernel(), num_tasks=5, rank=2).double()
    x, y = uniform(points, 2), draw(points, 5, seed=1)
    rule = gp_orff.Grid.for_data(x, tolerance=1e-4)
    model = gp_orff.VectorFieldGP(kernel, frequencies=rule).condition(x, y)
    labels = (torch.arange(points) % 3).tolist()
    found = model.cross_validate(x, y, blocks=labels)
    rest = torch.tensor(labels) != 2
    data, state = Dataset.in_memory(read(x[rest], y[rest], 5, Options())), model.state
    posterior = state.inference.of(data).posterior(model.kernel, state.e_step.noises, None)
    mean = posterior.distribution.mean(x) + posterior.evidence.best_mean()
    block = found.block == 2
    expected = mean[found.index[block], found.column[block]]
    torch.testing.assert_close(found.mean[block], expected, rtol=1e-8, atol=1e-8)


def test_large_grids_are_conditioned_by_iterations(monkeypatch):
    iterative = "gp_orff.inference.features"
    monkeypatch.setattr(f"{iterative}.MOST_DENSE", 100)
    monkeypatch.setattr(f"{iterative}._LARGEST", 100)
    monkeypatch.setattr(f"{iterative}._MOST_NUMBERS", 100)
    x, y, _ = flow(300)
    model = gp_orff.VectorFieldGP(curl_free(0.4), frequencies=gp_orff.Grid.for_data(x))
    model.likelihood.noise = 0.05
    labels = (torch.arange(300) % 3).tolist()
    found = model.cross_validate(x, y, blocks=labels)
    monkeypatch.undo()
    dense = model.cross_validate(x, y, blocks=labels)
    # To the tolerance of the iterations, and of variances that are estimated
    torch.testing.assert_close(found.mean, dense.mean, rtol=0, atol=1e-3)
    torch.testing.assert_close(found.sd, dense.sd, rtol=0.05, atol=0)


def test_student_t_noise_is_that_of_a_new_reading():
    """Weights are those of all data; the reading itself has the noise of the likelihood."""
    x, y, _ = flow(N)
    y[::20] += 3.0
    robust = gp_orff.MultitaskStudentTLikelihood(num_tasks=2, deg_free=4.0)
    model = gp_orff.VectorFieldGP(curl_free(0.4), likelihood=robust)
    model.likelihood.noise = 0.02
    labels = (torch.arange(N) % 3).tolist()
    found = model.cross_validate(x, y, blocks=labels)
    state = model.condition(x, y).state
    (part,) = state.data.visit()
    rest = torch.tensor(labels) != 0
    weighted = state.inference.of(Dataset.in_memory([part.take(rest)]))
    posterior = weighted.posterior(model.kernel, state.e_step.noises, None)
    mean = posterior.distribution.mean(x) + posterior.evidence.best_mean()
    variance = posterior.field(fixed=False).variance(x) + 0.02 * 4 / (4 - 2)
    at = found.index[found.block == 0], found.column[found.block == 0]
    # To the convergence of the weights
    torch.testing.assert_close(found.mean[found.block == 0], mean[at], rtol=0, atol=1e-5)
    torch.testing.assert_close(found.sd[found.block == 0], variance[at].sqrt(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("nu", [2.5, 4.0, 30.0, 400.0, np.inf])
def test_scores_are_those_of_the_noise_alone_where_the_field_is_known(nu):
    r, scale = torch.tensor([0.0, 0.4, -3.0, 60.0]).double(), 1.7
    noise = torch.full((4,), scale**2).double()
    found = Scores.of(r, torch.zeros(4).double(), noise, *scales_of_noise(nu))
    noise = scipy.stats.norm(scale=scale) if np.isinf(nu) else scipy.stats.t(nu, scale=scale)
    np.testing.assert_allclose(found.log_density, noise.logpdf(r), rtol=1e-7)
    np.testing.assert_allclose(found.pit, noise.cdf(r), atol=1e-8)
    for residual, crps in zip(r[:3].tolist(), found.crps[:3], strict=True):
        below, _ = scipy.integrate.quad(lambda z: noise.cdf(z) ** 2, -np.inf, residual)
        above, _ = scipy.integrate.quad(lambda z: noise.sf(z) ** 2, residual, np.inf)
        assert crps == pytest.approx(below + above, abs=1e-7)


def test_scores_of_a_field_and_its_noise():
    """Student-t noise plus a Gaussian, by quadrature of the convolution."""
    field, noise = scipy.stats.norm(scale=0.8), scipy.stats.t(4.0, scale=0.5)
    r = torch.tensor([0.0, 1.1, -4.0]).double()
    variances = torch.full((3,), 0.64).double(), torch.full((3,), 0.25).double()
    found = Scores.of(r, *variances, *scales_of_noise(4.0))

    def integral(f, residual):
        return scipy.integrate.quad(lambda z: field.pdf(z) * f(residual - z), -8, 8, limit=200)[0]

    for residual, density, pit in zip(r.tolist(), found.log_density, found.pit, strict=True):
        values = [integral(f, residual) for f in (noise.pdf, noise.cdf)]
        np.testing.assert_allclose([density, pit], [np.log(values[0]), values[1]], atol=1e-7)


def small():
    x, y, _ = flow(60)
    model = gp_orff.VectorFieldGP(curl_free(0.4))
    model.likelihood.noise = 0.05
    return model, x, y


def test_pooled_scores_and_those_of_blocks():
    model, x, y = small()
    found = model.cross_validate(x, y, blocks=[("leg", i % 4) for i in range(60)])
    assert list(found.blocks) == [("leg", i) for i in range(4)]
    mean, sd, observed = (t.numpy() for t in (found.mean, found.sd, found.observed))
    scores = scipy.stats.norm(mean, sd)
    assert found.rmse == pytest.approx(np.sqrt(np.mean((mean - observed) ** 2)))
    assert found.nlpd == pytest.approx(-scores.logpdf(observed).mean())
    np.testing.assert_allclose(found.pit, scores.cdf(observed), atol=1e-12)
    low, high = scores.interval(0.95)
    assert found.coverage == np.mean((low <= observed) & (observed <= high))
    first = found.blocks["leg", 0]
    assert first.nlpd == pytest.approx(-scores.logpdf(observed)[found.block == 0].mean())
    assert first.names == (("leg", 0),)
    frame = found.to_dataframe()
    assert list(frame.columns) == ["numbers", "rmse", "nlpd", "crps", "coverage"]
    assert list(frame.index) == [*found.names, "all"]
    assert frame["crps"].iloc[-1] == found.crps
    assert frame["numbers"].sum() == 2 * 120
    table = str(found).splitlines()
    assert len(table) == 6
    assert table[-1].split()[:3] == ["all", "120", f"{found.rmse:.4g}"]


def test_many_blocks_are_told_by_the_worst():
    model, x, y = small()
    found = model.cross_validate(x, y, blocks=np.arange(60))
    table = str(found).splitlines()
    assert len(table) == 23
    worst = max(found.blocks, key=lambda name: found.blocks[name].nlpd)
    assert table[1].split()[0] == str(worst)
    assert "40 others" in table[-1]


def test_without_pandas(monkeypatch):
    model, x, y = small()
    found = model.cross_validate(x, y)
    monkeypatch.setitem(__import__("sys").modules, "pandas", None)
    with pytest.raises(ImportError, match="pip install pandas"):
        found.to_dataframe()


SPLITTERS = {
    "folds": (splitters.KFold(4, shuffle=True, random_state=0), 4, 60),
    "repeated": (splitters.RepeatedKFold(n_splits=3, n_repeats=2, random_state=0), 6, 120),
    "incomplete": (splitters.ShuffleSplit(2, test_size=10, train_size=30, random_state=0), 2, 20),
    "in order": (splitters.TimeSeriesSplit(4), 4, 48),
    "groups": (splitters.LeaveOneGroupOut(), 3, 60),
}


@pytest.mark.parametrize("name", SPLITTERS)
def test_splitters_of_scikit_learn(name):
    splitter, count, points = SPLITTERS[name]
    model, x, y = small()
    group = ["a", "b", "c"] * 20 if name == "groups" else None
    found = model.cross_validate(x, y, blocks=splitter, group=group)
    assert (len(found), len(found.pit)) == (count, 2 * points)
    pairs = list(splitter.split(x, y, group))
    for (learned, tested), part in zip(pairs, found.blocks.values(), strict=True):
        assert sorted(set(part.index.tolist())) == sorted(tested)
        model.condition(x[learned], y[learned], group=group and [group[i] for i in learned])
        expected = model.posterior().mean(x)[part.index, part.column]
        torch.testing.assert_close(part.mean, expected, rtol=1e-8, atol=1e-8)


def test_groups_of_a_splitter_are_tracks():
    """Where no groups are given; and `group=`, where both are."""
    model, x, y = small()
    track, group = ["a", "b", "c", "d"] * 15, ["e", "f", "f"] * 20
    for options, labels in (
        (Options(track=track), track),
        (Options(track=track, group=group), group),
        (Options(track=track, group="ship"), track),
    ):
        blocks = blocks_of(splitters.LeaveOneGroupOut(), model.kernel, x, y, options)
        tested = [set(np.flatnonzero(block.tested)) for block in blocks]
        assert tested == [
            set(np.flatnonzero(np.array(labels) == name)) for name in sorted({*labels})
        ]


class Bad:
    """A splitter whose sets share a reading."""

    def split(self, x, y, groups):
        yield np.arange(30), np.arange(29, 60)


BAD = {
    "length": (list(range(59)), ValueError, "label for each of the 60 observations"),
    "one": (["a"] * 60, ValueError, "at least two blocks"),
    "nan": ([1.0] * 59 + [float("nan")], ValueError, "NaN"),
    "rows": ([[1, 2]] * 60, TypeError, "hashed"),
    "word": ("automatic", ValueError, "blocks='automatic'"),
    "number": (5, TypeError, "got int"),
    "shared": (Bad(), ValueError, "1 in both"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_blocks(name):
    blocks, error, message = BAD[name]
    model, x, y = small()
    before = model.condition(x, y).posterior().mean(x)
    with pytest.raises(error, match=message):
        model.cross_validate(x, y, blocks=blocks)
    assert torch.equal(model.posterior().mean(x), before)


def test_blocks_that_leave_nothing_and_chunks():
    model, x, y = small()
    y[10:] = float("nan")
    with pytest.raises(ValueError, match="hold out some of the observations"):
        model.cross_validate(x, y, blocks=[0] * 10 + [1] * 50, missing="mask")
    labels = [0] * 5 + [1] * 5 + [2] * 50
    assert model.cross_validate(x, y, blocks=labels, missing="mask").names == (0, 1)
    with pytest.raises(TypeError, match="got x alone"):
        model.cross_validate([(x, y)])


def test_copies_and_far_points_are_not_scored():
    model, x, y = small()
    with pytest.warns(gp_orff.DataWarning, match="copies"):
        found = model.cross_validate(x.repeat(2, 1), y.repeat(2, 1), blocks=[0, 1] * 60)
    once = model.cross_validate(x, y, blocks=[0, 1] * 30)
    torch.testing.assert_close(found.mean, once.mean)


@pytest.mark.slow
@pytest.mark.parametrize("extent", [0.1, 20.0, 200.0])
def test_cells_are_two_lengthscales_wide(extent):
    x = (extent * uniform(20_000, 2) / 2).numpy()
    block = cells(x, np.array([1.0, 1.0]))
    counts = np.bincount(block)
    assert 5 <= len(counts) <= 50
    assert counts.max() < 1.5 * counts.mean()
    spread = np.array([np.ptp(x[block == number], axis=0).max() for number in range(len(counts))])
    if extent < 1:
        assert (spread < 0.6 * extent).all()
    else:  # many cells in each block
        assert len(counts) == 50
    # of the readings within a fifth of a lengthscale, most are left out together
    near = np.abs(x[:300, None] - x[None]).max(-1) < 0.2 * min(1, extent)
    together = (block[:300, None] == block[None])[near].mean()
    assert together > (0.2 if extent < 1 else 0.7)


def test_cells_of_axes_of_their_own():
    """Two lengthscales along each axis, in any unit; a constant axis does not count."""
    x = np.concatenate([uniform(2000, 2).numpy() * [4.0, 1000.0], np.full((2000, 1), 3.0)], axis=1)
    block = cells(x, np.array([1.0, 1e3, 0.1]))  # 8 by 2000 by 0
    centre = np.array([x[block == number, 0].mean() for number in range(block.max() + 1)])
    assert len(centre) >= 5
    for number in range(len(centre)):
        assert np.ptp(x[block == number, 0]) <= 2.001
    same = cells(x * 1e-3, 1e-3 * np.array([1.0, 1e3, 0.1]))
    np.testing.assert_array_equal(block, same)
    assert set(cells(np.zeros((4, 2)), np.ones(2))) == {0}
    assert len(set(cells(np.arange(4.0)[:, None], np.zeros(1)))) == 4


def test_kernels_without_lengthscales_have_blocks():
    x = torch.nn.functional.normalize(draw(80, 3), dim=-1)
    y = (x @ draw(3, 1, seed=1)).squeeze(-1) + 0.1 * draw(80, seed=2)
    kernel = gp_orff.DotProductKernel.from_taylor([0.1, 1.0, 0.5])
    model = gp_orff.VectorFieldGP(kernel).condition(x, y)
    assert len(model.cross_validate(x, y)) >= 5
