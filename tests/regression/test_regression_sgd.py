"""Regression by stochastic gradients, compared with full-batch solutions of the same objective."""

import pickle

import gpytorch
import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from sklearn.base import clone
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression

import gp_orff
from gp_orff.regression import ORFFRidge
from gp_orff.regression.solvers import Whitening
from tests.support.fields import curl_free, draw, flow, uniform

RULE = gp_orff.MonteCarlo(40)
POINTS = 400
ACCURACY = 0.015  # of the default tol, which bounds a change that is near the error


def scalar_kernel():
    kernel = gpytorch.kernels.RBFKernel()
    kernel.lengthscale = 1.0
    return kernel


def field_data(points=POINTS, noise=0.3):
    x, y, _ = flow(points, noise=noise)
    return x.numpy(), (y - y.mean(0)).numpy()


def smooth_data(points=POINTS, outputs=3):
    x = uniform(points, 4).numpy()
    return x, np.sin(x @ draw(4, outputs, seed=1).numpy()) + 0.1 * draw(points, outputs).numpy()


def with_outliers(x, y):
    bad = np.random.default_rng(0).random(len(y)) < 0.1
    return x, y + 5 * y.std() * bad[:, None] * draw(*y.shape, seed=5).numpy()


PROBLEMS = {
    "field": (lambda: curl_free(0.3), field_data, 0.09),
    "scalar": (scalar_kernel, smooth_data, 0.05),
    "separable": (
        lambda: gp_orff.SeparableKernel(scalar_kernel(), torch.eye(3).double()),
        smooth_data,
        0.05,
    ),
}


def sgd(kernel, alpha, **settings):
    return ORFFRidge(kernel, RULE, alpha, "sgd", **settings)


def phi_of(model, x):
    return model.kernel_.features(torch.from_numpy(x)).numpy()


def columns_of(model, y):
    """y as columns that each have weights of their own."""
    return y if model.kernel_.num_outputs == 1 else y.reshape(-1, 1)


def ridge(model, x, y, alpha):
    """By the normal equations."""
    phi = phi_of(model, x)
    system = phi.T @ phi + alpha * np.eye(phi.shape[1])
    return (phi @ np.linalg.solve(system, phi.T @ columns_of(model, y))).reshape(y.shape)


def full_batch(model, x, y, alpha, loss, slope):
    """By L-BFGS of scipy, for a sum of loss(residual)."""
    phi, targets = phi_of(model, x), columns_of(model, y)
    shape = phi.shape[1], targets.shape[1]

    def objective(theta):
        theta = theta.reshape(shape)
        residual = phi @ theta - targets
        gradient = phi.T @ slope(residual) + 2 * alpha * theta
        return loss(residual).sum() + alpha * (theta**2).sum(), gradient.ravel()

    settings = {"maxiter": 5000, "maxfun": 5000, "maxcor": 50, "ftol": 1e-13, "gtol": 1e-6}
    start = np.zeros(shape).ravel()
    found = minimize(objective, start, jac=True, method="L-BFGS-B", options=settings)
    assert found.success
    return (phi @ found.x.reshape(shape)).reshape(y.shape)


def error(found, expected, y):
    return np.sqrt(np.mean((found - expected) ** 2)) / y.std()


@pytest.mark.slow
@pytest.mark.parametrize("name", PROBLEMS)
def test_squares_against_the_normal_equations(name):
    kernel, data, alpha = PROBLEMS[name]
    x, y = data()
    model = sgd(kernel(), alpha).fit(x, y)
    assert error(model.predict(x), ridge(model, x, y, alpha), y) < ACCURACY
    assert model.n_iter_ <= 128


@pytest.mark.slow
@pytest.mark.parametrize("name", ["field", "scalar"])
def test_huber_against_full_batches(name):
    kernel, data, alpha = PROBLEMS[name]
    x, y = with_outliers(*data())
    delta = 0.3
    model = sgd(kernel(), alpha, loss=torch.nn.HuberLoss(delta=delta)).fit(x, y)
    expected = full_batch(
        model,
        x,
        y,
        alpha,
        lambda r: np.where(abs(r) < delta, r**2 / 2, delta * (abs(r) - delta / 2)),
        lambda r: r.clip(-delta, delta),
    )
    assert error(model.predict(x), expected, y) < ACCURACY


@pytest.mark.slow
def test_absolute_errors_against_full_batches():
    kernel, data, alpha = PROBLEMS["field"]
    x, y = with_outliers(*data())
    model = sgd(kernel(), alpha, loss=torch.nn.L1Loss()).fit(x, y)
    edge = 1e-3  # |r| is smooth within, which moves the minimum by less
    expected = full_batch(
        model, x, y, alpha, lambda r: np.hypot(r, edge), lambda r: r / np.hypot(r, edge)
    )
    assert error(model.predict(x), expected, y) < ACCURACY


def test_logistic_regression():
    """scikit-learn has Σ loss + ‖θ‖²/(2C)."""
    x = uniform(POINTS, 2).numpy()
    y = (np.sin(3 * x[:, 0]) + x[:, 1] + 0.5 * draw(POINTS).numpy() > 1.2).astype(float)
    alpha = 0.5
    model = sgd(scalar_kernel(), alpha, loss=torch.nn.BCEWithLogitsLoss()).fit(x, y)
    exact = LogisticRegression(C=1 / (2 * alpha), fit_intercept=False, tol=1e-8, max_iter=1000)
    expected = exact.fit(phi_of(model, x), y).decision_function(phi_of(model, x))
    assert error(model.predict(x), expected, expected) < ACCURACY


def test_counts():
    """Of a Poisson distribution, whose loss overflows after too long a step."""
    x = uniform(POINTS, 2).numpy()
    rate = np.exp(3 + 2 * np.sin(3 * x[:, 0]))
    y = np.random.default_rng(0).poisson(rate).astype(float)
    model = sgd(scalar_kernel(), 1.0, loss=torch.nn.PoissonNLLLoss()).fit(x, y)
    phi, targets = phi_of(model, x), y

    def objective(theta):
        mean = np.exp(phi @ theta)
        value = (mean - targets * (phi @ theta)).sum() + (theta**2).sum()
        return value, phi.T @ (mean - targets) + 2 * theta

    found = minimize(objective, np.zeros(phi.shape[1]), jac=True, options={"maxiter": 5000})
    assert error(model.predict(x), phi @ found.x, phi @ found.x) < ACCURACY


@pytest.mark.parametrize("scale", [2.0**-20, 2.0**20])
def test_units_of_y_do_not_matter(scale):
    """Exactly: the factor is a power of two."""
    x, y = smooth_data()
    models = [sgd(scalar_kernel(), 0.05, max_iter=8, tol=1.0).fit(x, f * y) for f in (1.0, scale)]
    np.testing.assert_array_equal(models[1].predict(x), scale * models[0].predict(x))


@pytest.mark.parametrize("scale", [2.0**-20, 2.0**20])
def test_units_do_not_matter_for_absolute_errors(scale):
    """α has the unit of the loss over that of θ²."""
    x, y = smooth_data()
    models = [
        sgd(scalar_kernel(), 0.5 / f, loss=torch.nn.L1Loss(), max_iter=8, tol=1.0).fit(x, f * y)
        for f in (1.0, scale)
    ]
    np.testing.assert_allclose(models[1].predict(x), scale * models[0].predict(x), rtol=1e-6)


def test_data_in_chunks():
    """Of one pass, near the solution for all data; N in α/N counts all points so far."""
    x, y = field_data(4000)
    alpha = 20.0
    model = sgd(curl_free(0.3), alpha)
    for rows in np.split(np.arange(4000), 4):
        model.partial_fit(x[rows], y[rows])
    assert error(model.predict(x), ridge(model, x, y, alpha), y) < 0.05
    assert error(ridge(model, x, y, 4 * alpha), ridge(model, x, y, alpha), y) > 0.1


def test_data_given_again_count_again():
    x, y = smooth_data(200)
    alpha, passes = 50.0, 30
    model = sgd(scalar_kernel(), alpha)
    for _ in range(passes):
        model.partial_fit(x, y)
    assert error(model.predict(x), ridge(model, x, y, alpha / passes), y) < 0.03
    assert error(ridge(model, x, y, alpha), ridge(model, x, y, alpha / passes), y) > 0.1


def test_partial_fit_goes_on_from_fit():
    x, y = field_data()
    model = sgd(curl_free(0.3), 0.09).fit(x, y)
    before = model.n_iter_
    expected = ridge(model, x, y, 0.045)
    model.partial_fit(x, y)
    assert model.n_iter_ == before + 1
    assert error(model.predict(x), expected, y) < 2 * ACCURACY


def test_a_seed_determines_everything_and_no_global_state_is_used():
    x, y = smooth_data()
    settings = {"max_iter": 4, "tol": 1.0}
    state = torch.get_rng_state()
    first = sgd(scalar_kernel(), 0.05, **settings).fit(x, y)
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(7)
    np.testing.assert_array_equal(clone(first).fit(x, y).coef_, first.coef_)
    other = sgd(scalar_kernel(), 0.05, seed=1, **settings).fit(x, y)
    assert abs(other.coef_ - first.coef_).max() > 0


def test_a_pickled_descent_goes_on():
    x, y = smooth_data()
    model = sgd(scalar_kernel(), 0.05).partial_fit(x, y)
    copy = pickle.loads(pickle.dumps(model))
    np.testing.assert_array_equal(model.partial_fit(x, y).coef_, copy.partial_fit(x, y).coef_)


def test_points_without_a_label_are_left_out():
    x, y = smooth_data()
    missing = y.copy()
    missing[::3] = np.nan
    seen = ~np.isnan(missing[:, 0])
    kernel, settings = scalar_kernel(), {"max_iter": 2, "tol": 1.0}
    expected = sgd(kernel, 0.05, **settings).fit(x[seen], y[seen])
    np.testing.assert_array_equal(
        sgd(kernel, 0.05, **settings).fit(x, missing).coef_, expected.coef_
    )


@pytest.mark.slow
def test_combinations_of_outputs():
    x, y = field_data()
    c = np.array([[1.0, 2.0]])
    model = sgd(curl_free(0.3), 0.09).fit(x, y @ c.T, combination=c)
    phi = np.einsum("qp,npf->nqf", c, phi_of(model, x).reshape(len(x), 2, -1))[:, 0]
    theta = np.linalg.solve(phi.T @ phi + 0.09 * np.eye(phi.shape[1]), phi.T @ y @ c.T)
    assert error(model.predict(x), phi @ theta, y @ c.T) < ACCURACY


@pytest.mark.parametrize("points", [1, 3])
def test_few_points(points):
    x, y = smooth_data(points)
    model = sgd(scalar_kernel(), 0.05).fit(x, y)
    assert error(model.predict(x), ridge(model, x, y, 0.05), y) < 2 * ACCURACY


def test_zeros_are_learned():
    x, y = smooth_data()
    assert not sgd(scalar_kernel(), 0.05).fit(x, 0 * y).coef_.any()


def test_a_first_chunk_of_zeros_or_of_tiny_numbers_is_no_end():
    """Of a class, or before an instrument is switched on."""
    x, y = smooth_data(800)
    positive = (y > 0).astype(float)
    model = sgd(scalar_kernel(), 0.05, loss=torch.nn.BCEWithLogitsLoss())
    model.partial_fit(x[:400], 0 * y[:400])
    assert np.mean(model.predict(x[:400]) < 0) > 0.9
    for _ in range(8):
        model.partial_fit(x[400:], positive[400:])
    assert np.mean((model.predict(x[400:]) > 0) == positive[400:]) > 0.8
    model = sgd(scalar_kernel(), 0.05).partial_fit(x[:400], 1e-9 * y[:400])
    for _ in range(8):
        model.partial_fit(x[400:], y[400:])
    assert model.score(x[400:], y[400:]) > 0.8


def test_coordinates_have_the_variances_of_their_formula():
    """λδ/(λ + δ), where δ is an eigenvalue of the features' covariance, or what is asked for."""
    features = draw(200, 60) * torch.logspace(0, -3, 60).double()
    variance = torch.linalg.eigvalsh(features.mT @ features / 200).flip(0)
    for least in (0.0, variance[20].item()):
        limit = max(variance[50].item(), least)
        whitening = Whitening.of(features, least)
        white = features @ whitening.penalised(torch.eye(60).double())
        found = torch.linalg.eigvalsh(white.mT @ white / 200).flip(0)
        expected = variance * limit / (variance + limit)
        torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-14)
        row_size = white.square().sum(1).mean().sqrt().item()
        assert whitening.row_size == pytest.approx(row_size, rel=1e-10)


def test_too_few_passes_are_told():
    x, y = smooth_data()
    with pytest.warns(ConvergenceWarning, match="max_iter=3 before tol=0.01; increase"):
        sgd(scalar_kernel(), 0.05, max_iter=3).fit(x, y)


def test_passes_stop_at_the_limit_where_the_tolerance_is_reached():
    x, y = smooth_data()
    assert sgd(scalar_kernel(), 0.05, max_iter=3, tol=1.0).fit(x, y).n_iter_ == 2


@pytest.mark.parametrize("limit", [5, 9])
def test_a_limit_between_two_comparisons_is_told(limit):
    x, y = smooth_data()
    with pytest.warns(ConvergenceWarning, match=f"max_iter={limit}"):
        sgd(scalar_kernel(), 0.05, max_iter=limit, tol=1e-6, seed=np.int64(3)).fit(x, y)


LOSSES = {
    "infinite": (lambda f, y: 1 / (0 * f).mean(), "expected a finite loss"),
    "late": (lambda f, y: torch.where(f.abs() < 1e-3, (f - y) ** 2, torch.nan).mean(), "finite"),
    "many": (torch.nn.MSELoss(reduction="none"), "reduction='mean'"),
    "number": (lambda f, y: ((f - y) ** 2).mean().item(), "without a gradient"),
    "detached": (lambda f, y: ((f - y) ** 2).mean().detach(), "without a gradient"),
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses_that_are_not_numbers(name):
    """They leave the estimator as it was."""
    loss, message = LOSSES[name]
    x, y = smooth_data(64)
    model = sgd(scalar_kernel(), 0.05, max_iter=2, tol=1.0).fit(x, y)
    before = model.coef_.copy()
    model.set_params(loss=loss)
    for learn in (model.fit, model.partial_fit):
        with pytest.raises(ValueError, match=message):
            learn(x, y)
    np.testing.assert_array_equal(model.coef_, before)


@pytest.mark.parametrize("solvers", [("cholesky", "sgd"), ("sgd", "cholesky")])
def test_chunks_stay_with_one_solver(solvers):
    x, y = smooth_data(64)
    model = ORFFRidge(scalar_kernel(), RULE, solver=solvers[0]).partial_fit(x, y)
    with pytest.raises(ValueError, match="pass all data"):
        model.set_params(solver=solvers[1]).partial_fit(x, y)
