"""Limiting cases of regression: points far from the data, weights, defaults."""

import warnings

import numpy as np
import pytest
import torch
from gpytorch.kernels import RBFKernel
from sklearn.base import clone
from sklearn.exceptions import ConvergenceWarning

import gp_orff
from gp_orff.regression import ORFFRidge, ORFFRidgeClassifier, ORFFRidgeCV
from gp_orff.regression.laplacian import graph_laplacian
from tests.support.regressions import ROOT, data

C = np.array([[0.5, 0.5], [1.0, -1.0], [0.0, 2.0]])
FAR = np.array([[1.3, 0.5], [0.5, -0.4], [1.2, 1.3]])
rng = np.random.default_rng


def rbf(lengthscale=0.3):
    kernel = RBFKernel().double()
    kernel.lengthscale = lengthscale
    return kernel


def covariance(kernel, a, b):
    """K(a, b) of the exact kernel."""
    with torch.no_grad():
        return kernel(torch.from_numpy(a), torch.from_numpy(b)).to_dense().numpy()


def test_far_from_the_data_views_and_a_laplacian_still_count():
    """Equation 72 of Minh 2016 with the exact kernel; the grid is exact to 1e-5 of the variance."""
    (x, fields), kernel, alpha, weight = data(), gp_orff.SeparableKernel(rbf(), ROOT), 0.1, 5.0
    y = fields @ C.T
    y[20:] = np.nan
    model = ORFFRidge(kernel, alpha=alpha, laplacian_weight=weight).fit(x, y, combination=C)
    seen = np.diag(np.arange(40) < 20).astype(float)
    penalty = np.kron(seen, C.T @ C) + weight * np.kron(graph_laplacian(x).toarray(), np.eye(2))
    right = (np.where(np.isnan(y), 0, y) @ C).ravel()
    a = np.linalg.solve(penalty @ covariance(kernel, x, x) + alpha * np.eye(80), right)
    expected = (covariance(kernel, FAR, x) @ a).reshape(3, 2)
    assert np.allclose(model.predict_views(FAR), expected, rtol=0, atol=2e-3)
    assert np.allclose(model.predict(FAR), expected @ C.T, rtol=0, atol=5e-3)
    without = ORFFRidge(kernel, alpha=alpha).fit(x, y, combination=C).predict_views(FAR)
    assert abs(without - expected).max() > 0.05  # the penalty matters there


@pytest.mark.filterwarnings("ignore:the generalised cross-validation error")
def test_far_from_the_data_the_alpha_chosen_counts():
    x, y = data()
    model = ORFFRidgeCV(rbf(), alphas=[1e-3, 0.1, 10.0]).fit(x, y)
    assert model.alpha_ == 0.1
    k = covariance(rbf(), x, x)
    expected = covariance(rbf(), FAR, x) @ np.linalg.solve(k + 0.1 * np.eye(40), y)
    assert np.allclose(model.predict(FAR), expected, rtol=0, atol=1e-3)


@pytest.mark.parametrize("scale", [1.0, 9.0])
def test_alphas_by_default_are_relative_to_the_variance_of_the_kernel(scale):
    """The mean of the variances of both outputs, 1.09/2 and 0.68/2 times the scale."""
    kernel = gp_orff.SeparableKernel(rbf(), scale**0.5 * ROOT)
    model = ORFFRidgeCV(kernel, gp_orff.MonteCarlo(20)).fit(*data(200))
    variance = scale * (ROOT @ ROOT.T).diagonal().mean().item()
    assert np.allclose(model.alphas_, variance * np.logspace(-6, 2, 17), rtol=1e-6)


def test_score_weighs_the_labelled_points():
    x, y = data()
    y[::4] = np.nan
    model = ORFFRidge(rbf(), gp_orff.MonteCarlo(20)).fit(x, y)
    weights = rng(2).uniform(size=40)
    rows = ~np.isnan(y[:, 0])
    w, y, found = weights[rows, None], y[rows], model.predict(x)[rows]
    mean = (w * y).sum(0) / w.sum()
    expected = np.mean(1 - (w * (y - found) ** 2).sum(0) / (w * (y - mean) ** 2).sum(0))
    gaps = np.full((40, 2), np.nan)
    gaps[rows] = y
    assert model.score(x, gaps, sample_weight=weights) == pytest.approx(expected)
    assert model.score(x, gaps, sample_weight=list(weights)) == pytest.approx(expected)


def test_chunks_after_a_fit_with_a_combination_are_combined_too():
    (x, fields), rule = data(), gp_orff.MonteCarlo(20)
    y = fields @ C.T
    model = ORFFRidge(gp_orff.SeparableKernel(rbf(), ROOT), rule, alpha=0.1)
    whole = model.fit(x, y, combination=C).predict(x)
    parts = model.fit(x[:25], y[:25], combination=C).partial_fit(x[25:], y[25:])
    assert np.allclose(parts.predict(x), whole, rtol=0, atol=1e-9)


def test_one_row_that_is_nan_in_part_is_refused():
    x, y = data()
    y[3, 1] = np.nan
    with pytest.raises(ValueError, match="got 1 rows with numbers and NaN"):
        ORFFRidge(rbf(), gp_orff.MonteCarlo(5)).fit(x, y)


def test_a_penalty_is_no_boolean():
    with pytest.raises(ValueError, match="alpha, a finite number >= 0, got True"):
        ORFFRidge(rbf(), gp_orff.MonteCarlo(5), alpha=True).fit(*data())


def test_a_penalty_below_rounding_does_not_cost_digits():
    """The normal equations of repeated points are singular but for α and rounding.

    Ridge as augmented least squares; eigenvectors are off by 2e-5, a Cholesky factor by 2e-2.
    """
    (x, y), alpha = data(), 1e-14
    x, y = np.concatenate([x, x]), np.concatenate([y, y + 0.1])
    model = ORFFRidge(rbf(), gp_orff.MonteCarlo(60), alpha=alpha).fit(x, y)
    phi = model.kernel_.features(torch.from_numpy(x)).numpy()
    rows = np.concatenate([phi, alpha**0.5 * np.eye(phi.shape[1])])
    theta = np.linalg.lstsq(rows, np.concatenate([y, np.zeros((120, 2))]), rcond=1e-17)[0]
    assert np.allclose(model.predict(x), phi @ theta, rtol=0, atol=1e-3)


@pytest.mark.parametrize("coupling", ["combination", "laplacian"])
def test_stein_refuses_a_laplacian_that_couples_the_outputs(coupling):
    x, y = data()
    graph = graph_laplacian(x).toarray()
    arguments = {
        "combination": {"laplacian": graph, "combination": np.eye(2)},
        "laplacian": {"laplacian": np.kron(graph, np.ones((2, 2)))},
    }
    kernel = gp_orff.SeparableKernel(rbf(), ROOT)
    model = ORFFRidge(kernel, gp_orff.MonteCarlo(5), solver="stein", laplacian_weight=0.1)
    with pytest.raises(ValueError, match="no laplacian that couples its outputs"):
        model.fit(x, y, **arguments[coupling])
    assert model.fit(x, y, laplacian=graph).n_iter_ == 1


def test_chunks_do_not_follow_a_fit_with_a_laplacian():
    x, y = data()
    model = ORFFRidge(rbf(), gp_orff.MonteCarlo(5), laplacian_weight=0.1).fit(x, y)
    before = model.predict(x)
    with pytest.raises(ValueError, match="fitted without a Laplacian"):
        model.set_params(laplacian_weight=0.0).partial_fit(x, y)
    assert np.array_equal(model.predict(x), before)


def test_chunks_do_not_follow_another_solver():
    x, y = data()
    model = ORFFRidge(rbf(), gp_orff.MonteCarlo(5), solver="sgd", max_iter=1000, tol=0.1).fit(x, y)
    with pytest.raises(ValueError, match="by the same solver, got another one"):
        model.set_params(solver="cholesky").partial_fit(x, y)


@pytest.mark.parametrize("options", [{"max_iter": 3}, {"tol": 1e-2}])
def test_the_classifier_passes_its_options_on(options):
    x, y = data()
    classifier = ORFFRidgeClassifier(rbf(), gp_orff.MonteCarlo(20), 0.1, solver="lsmr")
    limited = clone(classifier).set_params(**options)
    labels = y[:, 0] > 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        assert limited.fit(x, labels).n_iter_ < classifier.fit(x, labels).n_iter_


@pytest.mark.slow
def test_the_classifier_passes_its_seed_on():
    x, y = data()
    classifier = ORFFRidgeClassifier(rbf(), gp_orff.MonteCarlo(20), 0.1, solver="sgd", tol=0.1)
    first, second = (
        clone(classifier).set_params(seed=seed).fit(x, y[:, 0] > 0).coef_ for seed in (0, 1)
    )
    assert not np.array_equal(first, second)


def test_the_default_lengthscale_does_not_depend_on_the_order_of_the_points():
    """Two clusters in order; the median is that of all pairs, to the error of 1000 points."""
    x = np.concatenate([rng(0).normal(size=(1500, 2)), 20 + rng(1).normal(size=(1500, 2))])
    distances = torch.pdist(torch.from_numpy(x))
    for points in (x, x[::-1], np.sort(x, axis=0)):
        model = ORFFRidge(frequencies=gp_orff.MonteCarlo(5)).fit(points, points[:, 0])
        found = model.kernel_.base_kernel.lengthscale.item()
        assert abs((distances < found).double().mean().item() - 0.5) < 0.03


@pytest.mark.parametrize("learn", [ORFFRidge.fit, ORFFRidge.partial_fit])
@pytest.mark.parametrize("number", [60, 400])
def test_eigenvectors_are_as_precise_as_cholesky_factors(number, learn):
    """Ridge as augmented least squares; directions without variance have the weight 1/α too."""
    (x, y), alpha = data(number), 1e-4
    model = learn(ORFFRidge(rbf(), gp_orff.MonteCarlo(50), alpha, "stein"), x, y)
    phi = model.kernel_.features(torch.from_numpy(x)).numpy()
    rows = np.concatenate([phi, alpha**0.5 * np.eye(100)])
    theta = np.linalg.lstsq(rows, np.concatenate([y, np.zeros((100, 2))]), rcond=1e-17)[0]
    assert np.allclose(model.predict(x), phi @ theta, rtol=0, atol=1e-10)


def test_values_that_stand_for_missing_ones():
    """As in other readers of data; without the rows there is no warning."""
    x, y = data()
    y[:3] = -9999.0
    with pytest.warns(gp_orff.DataWarning, match="the value -9999 is in the observations"):
        ORFFRidge(rbf()).fit(x, y[:, 0])
    ORFFRidge(rbf()).fit(x[3:], y[3:, 0])
