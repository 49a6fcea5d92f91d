"""Axes for tests, which are closed after each test and open no window."""

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
