"""Axes to draw on, closed afterwards, without a window."""

import matplotlib
import pytest

matplotlib.use("agg")
from matplotlib import pyplot as plt


@pytest.fixture
def ax():
    figure, ax = plt.subplots()
    yield ax
    plt.close(figure)


@pytest.fixture
def axes():
    figure, axes = plt.subplots(2, 2, layout="constrained")
    yield axes
    plt.close(figure)
