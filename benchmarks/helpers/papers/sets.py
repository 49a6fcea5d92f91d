"""Data sets for regression: one set of Le et al. 2013, and replacements for the others."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float
from sklearn import datasets
from torch import Tensor

from helpers.papers.digits import digits

Arrays = tuple[Float[np.ndarray, "N d"], Float[np.ndarray, "N p"]]


@dataclass(frozen=True)
class Split:
    """The points for training, x and y, and the points for the test, xs and ys."""

    x: Float[Tensor, "N d"]
    y: Float[Tensor, "N p"]
    xs: Float[Tensor, "n d"]
    ys: Float[Tensor, "n p"]

    def validation(self) -> "Split":
        """Return a split whose test points are the last fifth of these training points."""
        n = len(self.x) * 4 // 5
        return Split(self.x[:n], self.y[:n], self.x[n:], self.y[n:])


@dataclass(frozen=True)
class Source:
    """A data set, and its division into training and test.

    Labels are integers. They become outputs of zeros and ones, one output for each class, minus
    their means. Every input and every output of a regression is scaled to mean zero and variance
    one over the training points. Pixels have a common standard deviation, because many are nearly
    constant.

    Args:
        load: a function that returns X and y, or X and labels.
        training, test: the numbers of points.
        images: whether the inputs are pixels.
    """

    load: Callable[[], tuple[np.ndarray, np.ndarray]]
    training: int
    test: int
    images: bool = False

    def split(self, seed: int, share: float = 1.0) -> Split:
        """Return a random split, with the fraction `share` of the points."""
        x, y = self._arrays()
        order = np.random.default_rng(seed).permutation(len(x))
        training, test = round(share * self.training), round(share * self.test)
        x, y = (torch.from_numpy(own[order[: training + test]]) for own in (x, y))
        x = _centred(x, training, together=self.images)
        y = _centred(y, training) if y.shape[-1] == 1 else y - y[:training].mean(0)
        return Split(x[:training], y[:training], x[training:], y[training:])

    def _arrays(self) -> Arrays:
        x, y = _loaded(self.load)
        return x, (np.eye(y.max() + 1)[y] if np.issubdtype(y.dtype, np.integer) else y[:, None])


@cache
def _loaded(load: Callable) -> tuple[np.ndarray, np.ndarray]:
    return load()


def _centred(
    values: Float[Tensor, "n k"], training: int, together: bool = False
) -> Float[Tensor, "n k"]:
    """Subtract the mean and divide by the standard deviation, both of the training points."""
    own = values[:training]
    deviation = (own - own.mean(0)).square().mean() if together else own.var(0)
    return (values - own.mean(0)) / deviation.sqrt().where(deviation > 0, 1.0)


def _friedman(num_inputs: int) -> Callable[[], tuple[np.ndarray, np.ndarray]]:
    def load() -> tuple[np.ndarray, np.ndarray]:
        """Return Friedman's data, which depend on five inputs. The noise has variance 1, the
        function about 24."""
        return datasets.make_friedman1(3500, num_inputs, noise=1.0, random_state=0)

    return load


def _handwritten() -> tuple[np.ndarray, np.ndarray]:
    return datasets.load_digits(return_X_y=True)


def insurance(folder: Path) -> Source:
    """Return the data set that Le et al. 2013 call Insurance (CoIL Challenge 2000), from
    Caravan.csv.

    It has 85 inputs for each of 5822 customers. The label is whether the customer has a policy for
    a caravan.
    """

    def load() -> tuple[np.ndarray, np.ndarray]:
        table = np.loadtxt(folder / "Caravan.csv", dtype=str, delimiter=",", skiprows=1)
        return table[:, :-1].astype(float), (table[:, -1] == "Yes").astype(int)

    return Source(load, 4822, 1000)


def _diabetes() -> tuple[np.ndarray, np.ndarray]:
    return datasets.load_diabetes(return_X_y=True)


SETS = {
    "diabetes": Source(_diabetes, 294, 148),
    "Friedman, 21 inputs": Source(_friedman(21), 2500, 1000),
    "digits": Source(_handwritten, 1297, 500, images=True),
    "Friedman, 384 inputs": Source(_friedman(384), 2500, 1000),
    "MNIST": Source(digits, 2500, 1000, images=True),
}
