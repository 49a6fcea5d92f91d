"""Equation 67 of Minh 2016 for any loss, for labels, and for the exact kernel (Equation 72)."""

import gpytorch
import numpy as np
import pandas as pd
import pytest
import torch
from scipy.optimize import minimize
from sklearn.base import clone
from sklearn.linear_model import LogisticRegression
from sklearn.svm import LinearSVC
from sklearn.utils.estimator_checks import parametrize_with_checks

import gp_orff
from gp_orff.regression import (
    ORFFRidge,
    ORFFRidgeClassifier,
    OVKRidge,
    graph_laplacian,
    view_disagreement,
)
from gp_orff.regression.solvers import Whitening
from tests.support.fields import curl_free, flow

RULE = gp_orff.MonteCarlo(30)
ACCURACY = 0.015  # of the default tol of "sgd", which bounds a change that is near the error
ALPHA, WEIGHT = 0.09, 5.0  # M and α have similar effects: see `test_the_laplacian_counts`


def rbf(lengthscale=0.4):
    kernel = gpytorch.kernels.RBFKernel().double()
    kernel.lengthscale = lengthscale
    return kernel


def views():
    """Two outputs, of variance one and a quarter."""
    return gp_orff.SeparableKernel(rbf(), torch.diag(torch.tensor([1.0, 0.5]).double()))


def data(labels=50, columns=2):
    """A few labels among 120 points."""
    x, y, _ = flow(120, noise=0.3)
    x, y = x.numpy(), (y - y.mean(0)).numpy()[:, :columns]
    y[labels:] = np.nan
    return x, y


def coupled(x):
    """A Laplacian of two outputs that depend on each other."""
    return np.kron(graph_laplacian(x).toarray(), [[2.0, 1.0], [1.0, 2.0]])


# kernel, columns of y, M as a function of x, C
PROBLEMS = {
    "field": (lambda: curl_free(0.3), 2, lambda x: None, None),
    "coupled": (lambda: curl_free(0.3), 2, coupled, None),
    "scalar": (rbf, 2, lambda x: None, None),
    "views": (views, 1, lambda x: view_disagreement(len(x), 2), [[0.5, 0.5]]),
}


def problem(name, **settings):
    kernel, columns, laplacian, c = PROBLEMS[name]
    x, y = data(columns=columns)
    return kernel(), x, y, {"laplacian": laplacian(x), "combination": c}


def dense(name, features, x, y):
    """Φ at all points, the rows of C f at labels, and w M ⊗ I, all of them dense."""
    _, _, laplacian, c = PROBLEMS[name]
    p = len(features) // len(x)
    m = laplacian(x)
    m = graph_laplacian(x).toarray() if m is None else getattr(m, "toarray", lambda: m)()
    m = np.kron(m, np.eye(len(features) // len(m)))
    seen = np.repeat(~np.isnan(y[:, 0]), 1 if c is None and p == 1 else (p if c is None else 1))
    rows = features if c is None else np.kron(np.eye(len(x)), c) @ features
    targets = y if c is None and p == 1 else y.reshape(-1, 1)
    return rows[seen], targets[seen], WEIGHT * m


def difference(one, other):
    return np.sqrt(np.mean((one - other) ** 2) / np.mean(other**2))


@pytest.mark.parametrize("name", PROBLEMS)
def test_squares_by_gradients_are_those_of_the_normal_equations(name):
    kernel, x, y, options = problem(name)
    model = ORFFRidge(kernel, RULE, ALPHA, laplacian_weight=WEIGHT)
    closed = clone(model).fit(x, y, **options).predict(x)
    found = model.set_params(solver="sgd").fit(x, y, **options).predict(x)
    assert difference(found, closed) < ACCURACY


@pytest.mark.parametrize("name", PROBLEMS)
def test_the_laplacian_counts(name):
    """Without M, or without unlabelled points, the fields differ by much more than `ACCURACY`."""
    kernel, x, y, options = problem(name)
    model = ORFFRidge(kernel, RULE, ALPHA, laplacian_weight=WEIGHT)
    closed = clone(model).fit(x, y, **options).predict(x)
    without = model.set_params(laplacian_weight=0.0).fit(x, y, combination=options["combination"])
    assert difference(without.predict(x), closed) > 5 * ACCURACY


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
@pytest.mark.parametrize("name", PROBLEMS)
def test_huber_with_a_laplacian_against_full_batches(name):
    """To one percent of the smallest value of the objective, found by L-BFGS on dense matrices."""
    kernel, x, y, options = problem(name)
    delta, alpha = 0.3, ALPHA
    settings = {"loss": torch.nn.HuberLoss(delta=delta), "max_iter": 128}
    model = ORFFRidge(kernel, RULE, alpha, laplacian_weight=WEIGHT, **settings)
    squares = clone(model).set_params(loss=None, max_iter=None).fit(x, y, **options)
    model.fit(x, y, **options)
    phi = model.kernel_.features(torch.from_numpy(x)).numpy()
    rows, targets, m = dense(name, phi, x, y)
    penalty, shape = alpha * np.eye(phi.shape[1]) + phi.T @ m @ phi, (-1, targets.shape[1])

    def objective(theta):
        theta = theta.reshape(shape)
        r = rows @ theta - targets
        value = np.where(abs(r) < delta, r**2 / 2, delta * (abs(r) - delta / 2)).sum()
        gradient = rows.T @ np.clip(r, -delta, delta) + 2 * penalty @ theta
        return value + (theta * (penalty @ theta)).sum(), gradient.ravel()

    start = np.zeros(phi.shape[1] * targets.shape[1])
    settings = {"maxiter": 20000, "maxfun": 20000, "ftol": 1e-14, "gtol": 1e-7}
    best = minimize(objective, start, jac=True, method="L-BFGS-B", options=settings)
    assert objective(model.coef_.ravel())[0] < 1.01 * best.fun
    assert objective(squares.coef_.ravel())[0] > 1.05 * best.fun


def test_the_deformed_weights_have_the_penalty_of_both_terms():
    """α‖v‖² = α‖θ‖² + w fᵀMf, exactly."""
    x, _ = data()
    kernel = gp_orff.ORFFKernel(rbf(), RULE, num_dims=2).double()
    phi = kernel.features(torch.from_numpy(x)).detach()
    m = WEIGHT * torch.from_numpy(graph_laplacian(x).toarray())
    matrix = torch.eye(phi.shape[1], dtype=phi.dtype) + phi.mT @ m @ phi / ALPHA
    whitening = Whitening.of(phi[:40], 1e-3, torch.linalg.cholesky(matrix))
    v = whitening.penalised(
        torch.randn(phi.shape[1], 1, generator=torch.Generator().manual_seed(0)).double()
    )
    theta = whitening.theta(v)
    f = phi @ theta
    both = ALPHA * theta.square().sum() + (f.mT @ m @ f).squeeze()
    assert torch.allclose(ALPHA * v.square().sum(), both, rtol=1e-10)  # rounding times cond


def test_gradients_with_a_laplacian_expect_a_penalty():
    x, y = data()
    with pytest.raises(ValueError, match="expects alpha > 0"):
        ORFFRidge(rbf(), RULE, 0.0, "sgd", laplacian_weight=1.0).fit(x, y)


# Labels: classifiers with unlabelled points, and of other losses.


def arcs(labels=4, unlabelled=np.nan):
    angle = np.linspace(0, np.pi, 60)
    arc = np.stack([np.cos(angle), np.sin(angle)], axis=1)
    X, y = np.concatenate([arc, [1, 0.4] - arc]), np.repeat([0.0, 1.0], 60)
    few = np.full(120, np.nan)
    chosen = np.linspace(5, 55, labels // 2).astype(int)
    few[chosen], few[60 + chosen] = 0, 1
    return X, y, few


def squared_slack(f, c):
    return (1 - c * f).clamp_min(0).square().mean()


@pytest.mark.parametrize("loss", [None, squared_slack])
def test_unlabelled_points_help_a_classifier(loss):
    X, y, few = arcs()
    model = ORFFRidgeClassifier(rbf(0.3), RULE, 1e-3, loss=loss)
    assert model.fit(X, few).score(X, y) < 0.9
    assert model.set_params(laplacian_weight=0.1).fit(X, few).score(X, y) == 1
    assert model.score(X, few) == 1  # of those that have a label
    assert set(model.predict(X)) == {0, 1}


def test_the_field_is_that_of_the_codes():
    X, _, few = arcs()
    M = graph_laplacian(X, n_neighbors=4)
    settings = {"alpha": 1e-3, "laplacian_weight": 0.1}
    model = ORFFRidgeClassifier(rbf(0.3), RULE, **settings).fit(X, few, laplacian=M)
    regression = ORFFRidge(rbf(0.3), RULE, **settings).fit(X, 2 * few - 1, laplacian=M)
    np.testing.assert_allclose(model.decision_function(X), regression.predict(X), rtol=1e-9)


@pytest.mark.parametrize("missing", [None, np.nan])
@pytest.mark.parametrize("names", [["left", "right"], [3, 5], [False, True]])
def test_names_of_classes_with_points_that_have_none(missing, names):
    X, y, few = arcs()
    labels = np.array([missing if np.isnan(v) else names[int(v)] for v in few], dtype=object)
    model = ORFFRidgeClassifier(rbf(0.3), RULE, 1e-3, laplacian_weight=0.1).fit(X, labels)
    assert model.classes_.tolist() == names
    assert model.classes_.dtype == np.array(names).dtype
    assert model.score(X, np.array(names)[y.astype(int)]) == 1
    assert model.score(X, labels) == 1


@pytest.mark.parametrize("labels", ["list", "string"])
def test_points_without_a_name_among_names(labels):
    """A list of strings and NaN, and the strings of pandas, with NA."""
    x = np.random.default_rng(0).normal(size=(30, 2))
    names = np.where(x[:, 0] > 0, "right", "left").astype(object)
    names[::3] = None
    y = [float("nan") if name is None else name for name in names]
    y = y if labels == "list" else pd.Series(names, dtype="string")
    model = ORFFRidgeClassifier(rbf(0.7), RULE, 0.1).fit(x, y)
    assert model.classes_.tolist() == ["left", "right"]
    same = ORFFRidgeClassifier(rbf(0.7), RULE, 0.1).fit(x, names)
    np.testing.assert_array_equal(model.coef_, same.coef_)
    assert model.score(x, y) == same.score(x, names)


def test_no_labels_at_all_are_refused():
    X, *_ = arcs()
    with pytest.raises(ValueError, match="at least two classes"):
        ORFFRidgeClassifier(rbf(), RULE).fit(X, np.full(120, np.nan))


def test_squared_slacks_are_those_of_a_support_vector_machine():
    """scikit-learn minimises ‖θ‖²/2 + C Σ slack², on the features: C = 1/(2α)."""
    rng = np.random.default_rng(0)
    X = rng.uniform(-1, 1, (300, 2))
    y = (X[:, 0] + 0.5 * rng.standard_normal(300) > X[:, 1] ** 2).astype(int)
    model = ORFFRidgeClassifier(rbf(0.7), RULE, 0.5, loss=squared_slack).fit(X, y)
    phi = model.kernel_.features(torch.from_numpy(X)).numpy()
    machine = LinearSVC(C=1.0, fit_intercept=False, dual=False, tol=1e-8).fit(phi, y)
    assert difference(model.decision_function(X), machine.decision_function(phi)) < ACCURACY


def test_cross_entropy_is_that_of_logistic_regression():
    """scikit-learn minimises ‖θ‖²/2 + C Σ cross-entropy, on the features: C = 1/(2α)."""
    rng = np.random.default_rng(0)
    X = rng.uniform(-1, 1, (300, 2))
    y = np.digitize(X[:, 0] + 0.3 * rng.standard_normal(300), [-0.3, 0.3])

    def loss(f, c):
        return torch.nn.functional.cross_entropy(f, c) / 3  # the mean over 300 · 3 entries

    model = ORFFRidgeClassifier(rbf(0.7), RULE, 0.5, "one-hot", loss=loss).fit(X, y)
    phi = model.kernel_.features(torch.from_numpy(X)).numpy()
    logistic = LogisticRegression(C=1.0, fit_intercept=False, tol=1e-8, max_iter=1000).fit(phi, y)
    # ours has the sum over entries, which is that over points: both have the same minimiser
    assert difference(model.decision_function(X), logistic.decision_function(phi)) < ACCURACY


# The exact kernel.


@parametrize_with_checks([OVKRidge()])
def test_conventions_of_scikit_learn(estimator, check):
    check(estimator)


@pytest.mark.parametrize("weight", [0.0, WEIGHT])
@pytest.mark.parametrize("name", PROBLEMS)
def test_the_exact_form_is_that_of_features_that_are_the_kernel(name, weight):
    """With the kernel ΦΦᵀ Equation 72 has the solution of 74, up to rounding times cond ≈ 10⁴."""
    kernel, x, y, options = problem(name)
    model = ORFFRidge(kernel, RULE, ALPHA, laplacian_weight=weight).fit(x, y, **options)
    exact = OVKRidge(model.kernel_, ALPHA, laplacian_weight=weight).fit(x, y, **options)
    new = np.random.default_rng(1).uniform(size=(40, 2))
    np.testing.assert_allclose(exact.predict(new), model.predict(new), atol=1e-9)
    np.testing.assert_allclose(exact.predict_views(new), model.predict_views(new), atol=1e-9)


@pytest.mark.parametrize("name", PROBLEMS)
def test_the_exact_form_minimises_the_objective(name):
    """Its gradient by automatic differentiation, over all fields Σ K(·, x_j) a_j, is zero."""
    kernel, x, y, options = problem(name)
    model = OVKRidge(kernel, ALPHA, laplacian_weight=WEIGHT).fit(x, y, **options)
    K = kernel(torch.from_numpy(x)).to_dense().detach()
    rows, targets, m = (torch.from_numpy(v) for v in dense(name, K.numpy(), x, y))
    a = torch.from_numpy(model.dual_coef_).reshape(len(K), -1).requires_grad_()

    def gradient(a):
        f = K @ a
        value = (rows @ a - targets).square().sum() + ALPHA * (a * f).sum() + (f * (m @ f)).sum()
        return torch.autograd.grad(value, a)[0]

    scale = gradient(torch.zeros_like(a).requires_grad_()).norm()
    assert gradient(a).norm() < 1e-9 * scale


def test_the_exact_form_without_a_laplacian_is_the_posterior_mean():
    x, y = data()
    kernel = curl_free(0.3)
    model = OVKRidge(kernel, ALPHA).fit(x, y)
    assert model.dual_coef_.shape == (50, 2)
    K = kernel(torch.from_numpy(x)).to_dense().detach().numpy()
    mean = K[:, :100] @ np.linalg.solve(K[:100, :100] + ALPHA * np.eye(100), y[:50].ravel())
    np.testing.assert_allclose(model.predict(x).ravel(), mean, atol=1e-10)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"alpha": 0.0}, "OVKRidge expects alpha > 0"),
        ({"kernel": "rbf"}, "OVKRidge expects a gpytorch kernel"),
        (
            {"kernel": gpytorch.kernels.RBFKernel(batch_shape=torch.Size([2]))},
            r"one kernel, got a batch of shape \(2,\)",
        ),
        (
            {"kernel": gp_orff.CurlFreeKernel(num_dims=2), "columns": 1},
            "columns, one for each output",
        ),
    ],
)
def test_what_the_exact_form_refuses(arguments, error):
    x, y = data(columns=arguments.pop("columns", 2))
    with pytest.raises((TypeError, ValueError), match=error):
        OVKRidge(**arguments).fit(x, y)
