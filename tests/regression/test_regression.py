"""Ridge regression on features: dense algebra, scikit-learn, and Gaussian processes."""

import pickle

import numpy as np
import pytest
import torch
from gpytorch.kernels import MultitaskKernel, RBFKernel, ScaleKernel
from gpytorch.means import MultitaskMean, ZeroMean
from sklearn.base import clone
from sklearn.exceptions import ConvergenceWarning, NotFittedError
from sklearn.linear_model import Ridge
from sklearn.model_selection import GridSearchCV
from sklearn.utils.estimator_checks import check_estimator

import gp_orff
from gp_orff.regression import ORFFRidge, ORFFRidgeCV
from tests.support.regressions import ROOT, data

RULES = {
    "few": gp_orff.MonteCarlo(15, seed=0),  # fewer features than numbers in y
    "many": gp_orff.QuasiMonteCarlo(64, seed=0),
    "grid": gp_orff.Grid(domain=((0, 1), (0, 1)), tolerance=1e-4, lengthscale_range=(1, 1)),
    "auto": None,
}


def rbf(lengthscale=0.3):
    kernel = RBFKernel()
    kernel.lengthscale = lengthscale
    return kernel


def multitask():
    kernel = MultitaskKernel(rbf(), num_tasks=2, rank=1)
    kernel.task_covar_module.covar_factor.data = ROOT[:, :1]  # random otherwise
    kernel.task_covar_module.var = torch.ones(2)
    return kernel


KERNELS = {
    "curl-free": lambda: gp_orff.CurlFreeKernel(rbf(), num_dims=2),
    "Helmholtz": lambda: gp_orff.HelmholtzKernel(rbf(), num_dims=2),
    "separable": lambda: gp_orff.SeparableKernel(rbf(), ROOT),
    "rank one": lambda: gp_orff.SeparableKernel(rbf(), ROOT[:, :1]),
    "multitask": multitask,
    "two separable": lambda: (
        gp_orff.SeparableKernel(rbf(), ROOT) + gp_orff.SeparableKernel(rbf(0.6), torch.ones(2, 1))
    ),
    "scalar": rbf,
    "sum of scalars": lambda: ScaleKernel(rbf()) + rbf(0.6),
}
SEPARATE = ["separable", "rank one", "multitask", "scalar", "sum of scalars"]


def features(model, x):
    return model.kernel_.features(torch.from_numpy(x)).numpy()


def sklearns(model, x, y, alpha, at):
    """Predictions of scikit-learn's Ridge on the features, by a singular value decomposition."""
    phi = features(model, x)
    targets = y if len(phi) == len(y) else y.reshape(-1)
    ridge = Ridge(alpha=alpha, fit_intercept=False, solver="svd").fit(phi, targets)
    return ridge.predict(features(model, at)).reshape(len(at), -1)


@pytest.mark.slow
@pytest.mark.parametrize("alpha", [1e-3, 1.0])
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
def test_ridge_is_that_of_sklearn_on_the_features(kernel, rule, alpha):
    (x, y), (at, _) = data(), data(20, seed=1)
    model = ORFFRidge(kernel(), rule, alpha=alpha).fit(x, y)
    assert np.allclose(model.predict(at), sklearns(model, x, y, alpha, at), rtol=0, atol=1e-9)
    if model.coef_.ndim == 1:
        assert np.allclose(features(model, at) @ model.coef_, model.predict(at).ravel(), atol=1e-9)


@pytest.mark.parametrize("rule", ["few", "many"])
@pytest.mark.parametrize("kernel", SEPARATE)
def test_eigenvectors_give_what_cholesky_factors_give(kernel, rule):
    x, y = data()
    for alpha in (1e-3, 1.0):
        stein = ORFFRidge(KERNELS[kernel](), RULES[rule], alpha=alpha, solver="stein").fit(x, y)
        expected = sklearns(stein, x, y, alpha, x)
        assert np.allclose(stein.predict(x), expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("rule", ["few", "many"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_lsmr(kernel, rule):
    x, y = data()
    model = ORFFRidge(KERNELS[kernel](), RULES[rule], alpha=0.1, solver="lsmr").fit(x, y)
    assert np.allclose(model.predict(x), sklearns(model, x, y, 0.1, x), rtol=0, atol=1e-6)
    assert model.n_iter_ > 1


def test_lsmr_tells_that_it_did_not_converge():
    x, y = data()
    model = ORFFRidge(rbf(), RULES["many"], alpha=1e-6, solver="lsmr", max_iter=3)
    with pytest.warns(ConvergenceWarning, match="max_iter=3"):
        assert model.fit(x, y).n_iter_ == 3


@pytest.mark.parametrize("kernel", ["curl-free", "Helmholtz", "separable"])
@pytest.mark.parametrize("rule", ["few", "many"])
def test_ridge_is_the_mean_of_a_gaussian_process(kernel, rule):
    (x, y), (at, _) = data(), data(20, seed=1)
    alpha = 0.04
    model = ORFFRidge(KERNELS[kernel](), RULES[rule], alpha=alpha).fit(x, y)
    gp = gp_orff.VectorFieldGP(
        KERNELS[kernel](), mean=MultitaskMean(ZeroMean(), num_tasks=2), frequencies=RULES[rule]
    )
    gp.likelihood.noise = alpha
    with gp_orff.settings.check_features(False):
        mean = gp.condition(x, y).posterior().mean(torch.from_numpy(at)).numpy()
    assert np.allclose(model.predict(at), mean, rtol=0, atol=1e-9)


@pytest.mark.parametrize("solver", ["cholesky", "stein"])
def test_no_penalty_is_least_squares_of_least_norm(solver):
    x, y = data(40)
    x, y = np.concatenate([x, x]), np.concatenate([y, y + 0.1])  # singular in both forms
    for rule in ("few", "many"):
        model = ORFFRidge(rbf(), RULES[rule], alpha=0.0, solver=solver).fit(x, y)
        theta = np.linalg.lstsq(features(model, x), y, rcond=1e-7)[0]
        assert np.allclose(model.predict(x), features(model, x) @ theta, atol=1e-5)


@pytest.mark.filterwarnings("ignore:the generalised cross-validation error")
@pytest.mark.parametrize("rule", ["few", "many"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_generalised_cross_validation(kernel, rule):
    """Against H as a dense matrix."""
    x, y = data()
    alphas = [1e-2, 0.1, 1.0, 30.0]
    model = ORFFRidgeCV(KERNELS[kernel](), RULES[rule], alphas=[1e-3, *alphas, 1e3]).fit(x, y)
    phi = features(model, x)
    targets = y if len(phi) == len(y) else y.reshape(-1, 1)
    for alpha, error in zip(model.alphas_, model.gcv_errors_, strict=True):
        hat = phi @ np.linalg.solve(phi.T @ phi + alpha * np.eye(phi.shape[1]), phi.T)
        left = (len(hat) - np.trace(hat)) * targets.shape[1]
        assert error == pytest.approx(y.size * ((targets - hat @ targets) ** 2).sum() / left**2)
    assert model.alpha_ == model.alphas_[np.argmin(model.gcv_errors_)]
    same = ORFFRidge(KERNELS[kernel](), RULES[rule], alpha=model.alpha_).fit(x, y)
    assert np.allclose(model.predict(x), same.predict(x), rtol=0, atol=1e-9)


def test_alphas_by_default_do_not_depend_on_units():
    """Of a field kernel, whose variance is 1/ℓ²."""
    x, y = data(200)
    first = ORFFRidgeCV(KERNELS["Helmholtz"](), RULES["few"]).fit(x, y)
    kernel = gp_orff.HelmholtzKernel(rbf(0.3e5), num_dims=2)
    second = ORFFRidgeCV(kernel, RULES["few"]).fit(1e5 * x, 1e-6 * y)
    assert np.allclose(second.predict(1e5 * x), 1e-6 * first.predict(x), rtol=0, atol=1e-12)


def test_the_end_of_the_alphas_is_told():
    x, y = data(200)
    with pytest.warns(UserWarning, match="an end of the alphas from 10 to 100; pass"):
        ORFFRidgeCV(rbf(), RULES["few"], alphas=[100, 10]).fit(x, y)


@pytest.mark.parametrize("solver", ["cholesky", "stein"])
def test_chunks_add_up(solver):
    x, y = data(90)
    whole = ORFFRidge(KERNELS["separable"](), RULES["few"], alpha=0.1, solver=solver).fit(x, y)
    parts = clone(whole)
    for i in range(3):
        parts.partial_fit(x[i::3], y[i::3])
    begun = clone(whole).fit(x[:40], y[:40]).partial_fit(x[40:], y[40:])
    for model in (parts, begun):
        assert np.allclose(model.predict(x), whole.predict(x), rtol=0, atol=1e-9)


def test_rows_of_nan_are_left_out():
    x, y = data()
    gaps = y.copy()
    gaps[::3] = np.nan
    rest = ~np.isnan(gaps[:, 0])
    rule = RULES["few"]
    for model in (ORFFRidge(rbf(), rule, 0.1), ORFFRidgeCV(rbf(), rule, alphas=[0.1])):
        expected = clone(model).fit(x[rest], y[rest]).predict(x)
        assert np.allclose(clone(model).fit(x, gaps).predict(x), expected, rtol=0, atol=1e-10)
        assert model.fit(x, gaps).score(x, gaps) == pytest.approx(model.score(x[rest], y[rest]))
    chunked = ORFFRidge(rbf(), rule, 0.1).partial_fit(x, gaps).partial_fit(x, np.nan * y)
    assert np.allclose(chunked.predict(x), expected, rtol=0, atol=1e-10)


def test_points_outside_the_data():
    """A grid that follows the data is extended; the prior mean, zero, is far away."""
    x, y = data()
    model = ORFFRidge(rbf(0.2), alpha=0.01).fit(x, y)
    near = np.array([[1.6, 0.5], [0.5, -0.6]])
    exact = rbf(0.2).double()
    with torch.no_grad():
        gram, cross = (exact(torch.from_numpy(a), torch.from_numpy(x)).numpy() for a in (x, near))
    expected = cross @ np.linalg.solve(gram + 0.01 * np.eye(len(x)), y)
    before = model.predict(x)
    assert np.allclose(model.predict(near), expected, atol=1e-3)
    assert np.allclose(model.predict(np.array([[4.0, 4.0]])), 0, atol=1e-3)
    assert np.array_equal(model.predict(x), before)
    chunked = ORFFRidge(rbf(0.2)).partial_fit(x, y)
    with pytest.raises(ValueError, match="domain="):
        chunked.predict(np.array([[4.0, 4.0]]))
    with pytest.raises(ValueError, match="domain="):
        chunked.partial_fit(x + 4, y)
    with pytest.raises(ValueError, match="domain="):
        ORFFRidge(rbf(0.2), gp_orff.Auto(domain=((0, 1), (0, 1)))).fit(x, y).predict(near)


def test_a_point_far_out_does_not_change_the_others():
    """Only points that the grid of the data does not serve have a larger one."""
    x, y = data()
    model = ORFFRidge(KERNELS["curl-free"](), alpha=0.01).fit(x, y)
    expected = model.predict(x)
    found = model.predict(np.concatenate([x[:20], [[6.0, 6.0], [-0.9, 0.5]], x[20:]]))
    assert np.array_equal(np.delete(found, [20, 21], axis=0), expected)
    assert abs(found[20]).max() < 1e-3
    assert abs(found[21]).max() > 0.01
    near = model.predict([[1.5, 0.5]])
    for far in (1e2, 1e4):
        with pytest.raises(ValueError, match=r"points near the data, .* no frequency grid covers"):
            model.predict([[far, far]])
    model.predict([[6.0, 6.0]])
    assert np.array_equal(model.predict([[1.5, 0.5]]), near)  # whatever was predicted before


@pytest.mark.parametrize("lengthscale", [0.001, 0.08])
def test_a_grid_that_cannot_resolve_the_kernel_warns(lengthscale):
    x, y = data()
    with pytest.warns(gp_orff.GridWarning, match=r"omits .*% of the variance"):
        ORFFRidge(rbf(lengthscale), gp_orff.Auto(max_features=100)).fit(x, y)
    ORFFRidge(rbf(0.12), gp_orff.Auto(max_features=100)).fit(x, y)  # lacks 4 %, without a word


def test_defaults():
    """The lengthscale is the median distance, also of data that have only one place."""
    x, y = data()
    model = ORFFRidge().fit(x, y)
    median = np.median(np.linalg.norm(x[:, None] - x, axis=-1)[np.triu_indices(len(x), 1)])
    assert model.kernel_.base_kernel.lengthscale.item() == pytest.approx(median, rel=0.01)
    times = ORFFRidge().fit(np.tile(x, (100, 1)), np.tile(y, (100, 1)))  # of stations, in order
    assert times.kernel_.base_kernel.lengthscale.item() == pytest.approx(median, rel=0.05)
    assert ORFFRidge().fit(np.ones((3, 2)), np.arange(3.0)).predict(np.ones((1, 2))) == (
        pytest.approx(0.75, abs=1e-5)  # Σy/(n + α), the tolerance of the grid
    )


def test_the_kernel_given_is_not_touched():
    x, y = data()
    kernel = KERNELS["curl-free"]()
    model = ORFFRidge(kernel, RULES["few"]).fit(x, y)
    assert kernel.base_kernel.lengthscale.dtype == torch.float32
    assert kernel.base_kernel.raw_lengthscale.requires_grad
    kernel.base_kernel.lengthscale = 7.0
    assert model.kernel_.base_kernel.base_kernel.lengthscale.item() == pytest.approx(0.3)


def test_grid_search_pickling_and_tensors():
    x, y = data(60)
    grid = {"kernel": [rbf(0.3), rbf(0.03)], "alpha": [0.1, 10.0]}
    search = GridSearchCV(ORFFRidge(frequencies=RULES["many"]), grid, cv=3).fit(x, y)
    assert search.best_params_["alpha"] == 0.1
    assert search.best_params_["kernel"].lengthscale.item() == pytest.approx(0.3)
    best = search.best_estimator_
    assert np.array_equal(pickle.loads(pickle.dumps(best)).predict(x), best.predict(x))
    tensors = clone(best).fit(torch.from_numpy(x), torch.from_numpy(y))
    assert np.array_equal(tensors.predict(torch.from_numpy(x)), best.predict(x))
    assert np.array_equal(best.predict_views(x), best.predict(x))
    vector = clone(best).fit(x, y[:, 0])
    assert vector.predict(x).shape == (60,)
    assert np.allclose(vector.predict(x), best.predict(x)[:, 0], atol=1e-12)


BAD = {
    "alpha": ({"alpha": -1.0}, {}, "finite number >= 0, got -1"),
    "alpha in words": ({"alpha": "1"}, {}, "alpha"),
    "weight": ({"laplacian_weight": np.nan}, {}, "laplacian_weight"),
    "solver": ({"solver": "svd"}, {}, "'auto', 'cholesky', .* got 'svd'"),
    "stein": ({"kernel": KERNELS["curl-free"](), "solver": "stein"}, {}, "separable .*cholesky"),
    "lsmr": ({"solver": "lsmr", "laplacian_weight": 1.0}, {}, "laplacian_weight=0"),
    "loss": ({"solver": "lsmr", "loss": torch.nn.L1Loss()}, {}, "loss=None, got L1Loss"),
    "loss, direct": ({"solver": "stein", "loss": torch.nn.L1Loss()}, {}, "loss=None"),
    "max_iter": ({"max_iter": 0}, {}, "max_iter a positive integer or None, got 0"),
    "a half": ({"max_iter": 2.5}, {}, "max_iter a positive integer or None, got 2.5"),
    "tol": ({"tol": -1.0}, {}, "tol a number >= 0 or None, got -1.0"),
    "words": ({"loss": "huber"}, {}, "loss a function such as .* got 'huber'"),
    "seed": ({"seed": None}, {}, "seed an integer >= 0, got None"),
    "outputs": ({"kernel": gp_orff.CurlFreeKernel(num_dims=2)}, {"y": np.ones((40, 3))}, "2 col"),
    "inputs": ({"kernel": gp_orff.CurlFreeKernel(num_dims=3)}, {}, "columns"),
    "no label": ({}, {"y": np.full((40, 2), np.nan)}, "a row of y with a label, got 40"),
    "part of a label": (
        {},
        {"y": np.where(np.eye(40, 2) > 0, np.nan, 1.0)},
        "with numbers and NaN",
    ),
    "infinite": ({}, {"y": np.full((40, 2), np.inf)}, "infinity"),
    "length": ({}, {"y": np.ones((39, 2))}, "inconsistent numbers of samples"),
    "C": ({"kernel": KERNELS["separable"]()}, {"combination": np.ones((1, 2))}, r"\(2, 2\)"),
    "M": ({"laplacian_weight": 1.0}, {"laplacian": -np.eye(40)}, "positive semi-definite"),
    "M, unused": ({}, {"laplacian": np.triu(np.ones((40, 40)))}, "symmetric"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_leaves_the_estimator_as_it_was(case):
    parameters, arguments, message = BAD[case]
    x, y = data()
    model = ORFFRidge(frequencies=RULES["few"]).fit(x, y)
    model.set_params(**parameters)
    before, predicted = dict(vars(model)), ORFFRidge(frequencies=RULES["few"]).fit(x, y).predict(x)
    with pytest.raises(ValueError, match=message):
        model.fit(**{"X": x[:, ::-1] if case != "inputs" else x, "y": y, **arguments})
    assert vars(model) == before
    assert np.array_equal(model.predict(x), predicted)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"solver": "lsmr"}, "in chunks, got solver='lsmr'; use 'cholesky'"),
        ({"laplacian_weight": 1.0}, "laplacian_weight=0, got 1.0"),
    ],
)
def test_chunks_that_cannot_be_learned_from(parameters, message):
    x, y = data()
    model = ORFFRidge(frequencies=RULES["few"], **parameters)
    with pytest.raises(ValueError, match=message):
        model.partial_fit(x, y)
    with pytest.raises(NotFittedError):
        model.predict(x)
    model = ORFFRidge(frequencies=RULES["few"]).partial_fit(x, y)
    with pytest.raises(ValueError, match="2 columns, as in the first chunk, got 1"):
        model.partial_fit(x, y[:, 0])


@pytest.mark.parametrize("solver", ["cholesky", "sgd"])
def test_chunks_after_a_fit_with_a_laplacian(solver):
    x, y = data()
    model = ORFFRidge(frequencies=RULES["few"], solver=solver, laplacian_weight=1.0).fit(x, y)
    with pytest.raises(ValueError, match="without a Laplacian"):
        model.set_params(laplacian_weight=0.0).partial_fit(x, y)


@pytest.mark.parametrize("kernel", [RBFKernel, "rbf"])
def test_no_kernel_and_no_rule(kernel):
    x, y = data()
    with pytest.raises(TypeError, match="a gpytorch kernel"):
        ORFFRidge(kernel).fit(x, y)
    with pytest.raises(TypeError, match="base_kernel, and its rule as frequencies="):
        ORFFRidge(ORFFRidge(frequencies=RULES["few"]).fit(x, y).kernel_).fit(x, y)
    with pytest.raises(TypeError, match="frequency rule"):
        ORFFRidge(frequencies=gp_orff.MonteCarlo).fit(x, y)


@pytest.mark.parametrize("alphas", [[], [0.0, 1.0], [-1.0], [np.nan]])
def test_bad_alphas(alphas):
    with pytest.raises(ValueError, match="alphas, positive"):
        ORFFRidgeCV(alphas=alphas).fit(*data())


@pytest.mark.filterwarnings(
    "ignore:the generalised cross-validation error"
)  # their data have no noise
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.SkipTestWarning")
@pytest.mark.parametrize(
    "estimator",
    [
        ORFFRidge(frequencies=gp_orff.QuasiMonteCarlo(32)),
        ORFFRidgeCV(frequencies=gp_orff.QuasiMonteCarlo(32)),
    ],
)
def test_conventions_of_sklearn(estimator):
    check_estimator(estimator)


def test_arrays_may_be_used_again():
    """A buffer that holds one chunk after the other; and arrays that change after a fit."""
    x, y = data(90)
    whole = ORFFRidge(rbf(), RULES["few"], alpha=0.1).fit(x, y)
    points, values = x[:30].copy(), y[:30].copy()
    model = clone(whole).fit(points, values)
    for rows in (slice(30, 60), slice(60, 90)):
        points[:], values[:] = x[rows], y[rows]
        model.partial_fit(points, values)
    assert np.allclose(model.predict(x), whole.predict(x), rtol=0, atol=1e-9)
    model, far = ORFFRidge(rbf(0.2), alpha=0.1).fit(points, values), np.array([[1.8, 0.5]])
    expected = ORFFRidge(rbf(0.2), alpha=0.1).fit(points.copy(), values.copy()).predict(far)
    points[:], values[:] = 0.0, 0.0
    assert np.array_equal(model.predict(far), expected)
