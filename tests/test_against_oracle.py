"""Three hundred random models against the dense oracle: evidence, means and covariances."""

import numpy as np
import pytest

from tests import dense_oracle as dense
from tests.random_models import Question, Twin, exact, on_grid, on_large_grid, tensor


def built(own: Twin, path) -> Twin:
    """With all its readings."""
    own.condition()
    steps = [own.update] * own.rng.integers(0, 3)
    steps += [own.observe] * own.rng.choice(3, p=[0.4, 0.4, 0.2])
    if own.rng.random() < 0.3:
        steps.append(lambda: own.save_and_load(path))
    for i in own.rng.permutation(len(steps)):
        steps[i]()
    return own


def deviations(own: Twin, tolerance):
    """What differs by more than the tolerance, in words."""
    right = dense.Posterior(own.field, own.readings, own.mean)
    found = []

    def compare(what, mine, theirs, scale, bound):
        error = np.abs(mine.detach().numpy() - theirs).max() / scale
        if not error <= bound:
            found.append(f"{what} off by {error:.1e} (tolerance {bound:.1e})")

    count = len(right.white)
    compare("evidence", own.model.log_marginal_likelihood(), right.evidence, count, tolerance(None))
    field = own.model.posterior()
    for question in own.asked():
        x, bound = own.points(4), tolerance(question)
        mean, covariance, prior = right.predict(question.functional(x))
        scale = max(np.diagonal(prior).max(), 1e-6)
        source = field if question.part is None else field.part(question.part)
        points, symbol, words = tensor(x), question.symbol, question.words
        mine = source(points, symbol)
        compare(f"mean of {words}", mine.mean.flatten(), mean, np.sqrt(scale), bound)
        compare(f"covariance of {words}", mine.covariance_matrix, covariance, scale, bound)
        blocks = source.pointwise_covariance(points, symbol)
        q = blocks.shape[-1]
        theirs = np.stack([covariance[i : i + q, i : i + q] for i in range(0, len(covariance), q)])
        compare(f"blocks of {words}", blocks, theirs, scale, bound)
    return found
