"""Simplex codes and their classifier, compared with the classifier of scikit-learn on the features.

Let g_t be one-hot ridge predictions, whose sum g is the prediction of a constant 1. The scores of
RidgeClassifier are 2g_t − g, and those of simplex codes (T g_t − g)/(T − 1). Differences between
classes are equal up to the factor T/(2(T − 1)), so the labels are equal up to rounding (1e-9 here).
"""

import itertools

import gpytorch
import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.base import clone
from sklearn.datasets import load_digits, load_iris
from sklearn.exceptions import NotFittedError
from sklearn.kernel_ridge import KernelRidge
from sklearn.linear_model import RidgeClassifier
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

import gp_orff
from gp_orff.regression import ORFFRidge, ORFFRidgeClassifier, simplex_codes

FREQUENCIES = gp_orff.MonteCarlo(30, seed=0)
X, Y = load_iris(return_X_y=True)
NAMES = np.array(["setosa", "versicolor", "virginica"])
NEW = np.random.default_rng(0).uniform(X.min(0), X.max(0), size=(200, 4))


def rbf(lengthscale=2.0):
    kernel = gpytorch.kernels.RBFKernel().double()
    kernel.lengthscale = lengthscale
    return kernel


def classifier(kernel=None, alpha=0.3, **options):
    return ORFFRidgeClassifier(kernel or rbf(), FREQUENCIES, alpha, **options)


def separable(T):
    """The codes of T classes inside the kernel."""
    return gp_orff.SeparableKernel(rbf(), torch.from_numpy(simplex_codes(T)))


def features(fitted, points):
    return fitted.kernel_.features(torch.as_tensor(points)).detach().numpy()


def centred(scores):
    return scores - scores.mean(axis=1, keepdims=True)


# -- codes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("T", [2, 3, 4, 10, 100])
def test_codes_are_corners_of_a_regular_simplex(T):
    """Mroueh et al. 2012: unit vectors with ⟨c_s, c_t⟩ = −1/(T − 1)."""
    codes = simplex_codes(T)
    assert codes.shape == (T, T - 1)
    assert codes.dtype == np.float64
    expected = np.full((T, T), -1 / (T - 1))
    np.fill_diagonal(expected, 1.0)
    np.testing.assert_allclose(codes @ codes.T, expected, atol=1e-14)
    np.testing.assert_allclose(codes.sum(0), 0, atol=1e-13)


@pytest.mark.parametrize("wrong", [1, 0, -3, 2.0, "3", None])
def test_codes_of_no_number_of_classes(wrong):
    with pytest.raises(ValueError, match=r"at least 2 classes, got .*; pass len"):
        simplex_codes(wrong)


# -- against scikit-learn ---------------------------------------------------------------------


@parametrize_with_checks([ORFFRidgeClassifier(frequencies=gp_orff.MonteCarlo(20))])
def test_conventions_of_scikit_learn(estimator, check):
    check(estimator)


@pytest.mark.parametrize("coding", ["simplex", "one-hot"])
@pytest.mark.parametrize("alpha", [1e-3, 1.0, 100.0])
@pytest.mark.parametrize("T", [2, 3])
def test_labels_are_those_of_ridge_classifier_on_the_features(T, alpha, coding):
    x, y = X[Y < T], Y[Y < T]
    found = classifier(alpha=alpha, coding=coding).fit(x, y)
    reference = RidgeClassifier(alpha=alpha, fit_intercept=False).fit(features(found, x), y)
    np.testing.assert_array_equal(found.predict(NEW), reference.predict(features(found, NEW)))


def test_labels_with_the_default_kernel_and_frequencies():
    found = ORFFRidgeClassifier().fit(X[:, :2], Y)
    reference = RidgeClassifier(alpha=1.0, fit_intercept=False).fit(features(found, X[:, :2]), Y)
    expected = reference.predict(features(found, NEW[:, :2]))
    np.testing.assert_array_equal(found.predict(NEW[:, :2]), expected)


def test_converges_to_the_exact_kernel():
    """OVK of Brault et al. 2016, Section 4.2; a grid is exact to a relative 1e-8 of 150 points."""
    x, new = X[:, :2], NEW[:, :2]
    rule = gp_orff.Auto(tolerance=1e-8, lengthscale_range=(1, 1))
    found = ORFFRidgeClassifier(rbf(), rule, alpha=1.0).fit(x, Y).decision_function(new)
    exact = KernelRidge(alpha=1.0, kernel="rbf", gamma=1 / 8).fit(x, simplex_codes(3)[Y])
    np.testing.assert_allclose(found, exact.predict(new) @ simplex_codes(3).T, atol=1e-6)


@pytest.mark.parametrize("alpha", [1e-2, 1.0])
def test_scores_are_those_of_ridge_classifier(alpha):
    found = classifier(alpha=alpha).fit(X, Y)
    reference = RidgeClassifier(alpha=alpha, fit_intercept=False).fit(features(found, X), Y)
    expected = centred(reference.decision_function(features(found, NEW)))
    scores = found.decision_function(NEW)
    assert scores.shape == (len(NEW), 3)
    np.testing.assert_allclose(centred(scores), 3 / 4 * expected, atol=1e-9)
    np.testing.assert_allclose(scores.sum(1), 0, atol=1e-9)  # T g_t − g sums to zero


@pytest.mark.parametrize("coding", ["simplex", "one-hot"])
def test_scores_of_two_classes_are_those_of_ridge_classifier(coding):
    """One-hot: (g_1 − g_0)/2, half of 2g_1 − g."""
    x, y = X[Y > 0], NAMES[Y[Y > 0]]
    found = classifier(coding=coding).fit(x, y)
    reference = RidgeClassifier(alpha=0.3, fit_intercept=False).fit(features(found, x), y)
    expected = reference.decision_function(features(found, NEW))
    scores = found.decision_function(NEW)
    assert scores.shape == (len(NEW),)
    factor = {"simplex": 1, "one-hot": 1 / 2}[coding]
    np.testing.assert_allclose(scores, factor * expected, atol=1e-9)
    np.testing.assert_array_equal(found.predict(NEW) == "virginica", expected > 0)


@pytest.mark.parametrize("T", [2, 3])
def test_codes_inside_the_kernel_scale_the_penalty(T):
    """f = CΘφ and CᵀC = I T/(T − 1): the scores are (T − 1)/T of those at α(T − 1)/T."""
    x, y = X[Y < T], Y[Y < T]
    inside = classifier(separable(T), alpha=0.3, coding="one-hot").fit(x, y)
    outside = classifier(alpha=0.3 * (T - 1) / T).fit(x, y)
    assert inside.coef_.shape == (outside.coef_.size,)
    expected = (T - 1) / T * outside.decision_function(NEW)
    np.testing.assert_allclose(inside.decision_function(NEW), expected, atol=1e-9)
    np.testing.assert_array_equal(inside.predict(NEW), outside.predict(NEW))


def test_a_kernel_of_all_coordinates_is_used_as_it_is():
    """K = k A with A = I is k for each coordinate; another A gives other scores."""
    identity = gp_orff.SeparableKernel(rbf(), torch.eye(2).double())
    found = classifier(identity).fit(X, Y)
    expected = classifier().fit(X, Y).decision_function(NEW)
    np.testing.assert_allclose(found.decision_function(NEW), expected, atol=1e-9)
    uneven = gp_orff.SeparableKernel(rbf(), torch.diag(torch.tensor([1.0, 0.1])).double())
    assert np.abs(classifier(uneven).fit(X, Y).decision_function(NEW) - expected).max() > 0.1


def test_is_ridge_regression_on_codes():
    found = classifier(solver="cholesky").fit(X, Y)
    ridge = ORFFRidge(rbf(), FREQUENCIES, 0.3, "cholesky").fit(X, simplex_codes(3)[Y])
    np.testing.assert_array_equal(found.coef_, ridge.coef_)
    assert found.n_iter_ == ridge.n_iter_ == 1
    np.testing.assert_array_equal(found.codes_, simplex_codes(3))
    assert found.regression_.solver == "cholesky"


# -- use --------------------------------------------------------------------------------------


def test_learns_digits_and_is_tuned_by_cross_validation():
    """Better than the linear classifier on the pixels, by more than 3 standard errors of 797."""
    x, y = load_digits(return_X_y=True)
    machine = make_pipeline(
        StandardScaler(), ORFFRidgeClassifier(rbf(8.0), gp_orff.MonteCarlo(150))
    )
    grid = {"orffridgeclassifier__alpha": [0.01, 0.1, 1.0, 100.0]}
    search = GridSearchCV(machine, grid, cv=2).fit(x[:1000], y[:1000])
    linear = RidgeClassifier().fit(x[:1000], y[:1000])
    assert search.best_params_["orffridgeclassifier__alpha"] < 100
    assert search.score(x[1000:], y[1000:]) > linear.score(x[1000:], y[1000:]) + 0.03


def test_labels_of_every_kind_come_back():
    table = pd.DataFrame(X, columns=list("abcd"))
    expected = classifier().fit(X, Y).predict(X)
    named = classifier().fit(table, pd.Series(NAMES[Y]))
    assert named.classes_.tolist() == NAMES.tolist()
    assert named.predict(table).tolist() == NAMES[expected].tolist()
    assert named.feature_names_in_.tolist() == list("abcd")
    assert named.score(table, NAMES[Y]) == np.mean(expected == Y)
    tensors = classifier().fit(torch.as_tensor(X), torch.as_tensor(Y) - 7)
    np.testing.assert_array_equal(tensors.predict(torch.as_tensor(X)), expected - 7)
    booleans = classifier().fit(X, Y == 1)
    assert booleans.predict(X).dtype == bool


def test_is_cloned_without_what_it_learned():
    fitted = classifier(coding="one-hot", solver="cholesky").fit(X, Y)
    assert fitted.n_features_in_ == 4
    copy = clone(fitted)
    assert not hasattr(copy, "n_features_in_")
    assert (copy.coding, copy.solver, copy.alpha) == ("one-hot", "cholesky", 0.3)
    with pytest.raises(NotFittedError):
        copy.predict(X)


# -- bad input --------------------------------------------------------------------------------


BAD = {
    "one class": ({}, np.ones(150), r"at least two classes, got one class: \[1\.0\]; .*add points"),
    "coding": (
        {"coding": "binary"},
        Y,
        r"one of the codings \['one-hot', 'simplex'\], got 'binary'; use",
    ),
    "codings": ({"coding": ["simplex"]}, Y, r"'simplex'\], got \['simplex'\]; use"),
    "outputs": (
        {"kernel": separable(3)},
        Y,
        r"1 or 2 outputs for 3 classes and coding='simplex', got 3 outputs; pass a scalar kernel",
    ),
    "outputs for codes": (
        {"kernel": separable(4), "coding": "one-hot"},
        Y,
        r"1 or 3 outputs for 3 classes and coding='one-hot', got 4 outputs; .* root of 3 rows",
    ),
    "values": ({}, Y + 0.5, "Unknown label type: continuous"),
    "infinity": ({}, np.where(Y == 1, np.inf, 0.0), "y contains infinity"),
    "lengths": ({}, Y[:100], "inconsistent numbers of samples"),
}


@pytest.mark.parametrize(("options", "labels", "words"), BAD.values(), ids=BAD)
def test_a_failed_fit_says_why_and_leaves_the_last_one(options, labels, words):
    fitted = classifier().fit(X, Y)
    before, kept = fitted.decision_function(NEW), dict(vars(fitted))
    fitted.set_params(**options)
    with pytest.raises(ValueError, match=words):
        fitted.fit(X, labels)
    learned = [name for name in kept if name.endswith("_")]
    assert all(vars(fitted)[name] is kept[name] for name in learned)
    np.testing.assert_array_equal(fitted.decision_function(NEW), before)


@pytest.mark.parametrize("wrong", ["rbf", gpytorch.kernels.RBFKernel])
def test_what_is_no_kernel_is_refused(wrong):
    with pytest.raises(TypeError, match="kernel"):
        classifier(wrong).fit(X, Y)


def test_points_of_other_dimensions_are_refused():
    fitted = classifier().fit(X, Y)
    for method, width in itertools.product((fitted.predict, fitted.decision_function), (3, 5)):
        with pytest.raises(ValueError, match=f"{width} features"):
            method(X[:, [0] * width])
