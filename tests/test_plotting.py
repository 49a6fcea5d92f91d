"""Pictures: what is drawn is what was given, and nothing global changes."""

import subprocess
import sys

import matplotlib
import numpy as np
import pytest
import torch

matplotlib.use("agg")
from matplotlib import pyplot as plt

from gp_orff.plotting import plot_field


@pytest.fixture
def ax():
    figure, ax = plt.subplots()
    yield ax
    plt.close(figure)


def grid(number=40):
    axis = np.linspace(0, 2, number)
    return np.stack(np.meshgrid(axis, axis), axis=-1).reshape(-1, 2)


def test_arrows_are_thinned_points_of_the_field(ax):
    x = grid()
    vectors = np.stack([-x[:, 1], x[:, 0]], axis=-1)
    before = dict(matplotlib.rcParams)
    assert plot_field(ax, x, vectors, arrows=10) is None
    (quiver,) = ax.collections
    assert 100 <= len(quiver.U) <= 121
    drawn = quiver.get_offsets()
    np.testing.assert_allclose(quiver.U, -drawn[:, 1])
    np.testing.assert_allclose(quiver.V, drawn[:, 0])
    assert dict(matplotlib.rcParams) == before


def test_shade_and_its_scale_are_the_callers(ax):
    x = grid()
    norm = matplotlib.colors.Normalize(0, 5)
    shaded = plot_field(ax, x, shade=x[:, 0], norm=norm, label="speed (m/s)")
    np.testing.assert_allclose(shaded.get_array(), x[:, 0])
    assert shaded.norm is norm
    assert any(other.get_ylabel() == "speed (m/s)" for other in ax.figure.axes)


def test_tensors_that_require_gradients_are_drawn(ax):
    x = torch.from_numpy(grid(5)).requires_grad_()
    plot_field(ax, x, 2 * x, shade=x.sum(-1))
    assert len(ax.collections) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"x": np.zeros((4, 3))}, r"positions of shape \(n, 2\), got \(4, 3\)"),
        ({"x": np.zeros((4, 2)), "vectors": np.zeros((3, 2))}, r"vectors of shape \(4, 2\)"),
        ({"x": np.zeros((4, 2)), "shade": np.zeros((4, 2))}, r"shade of shape \(4,\)"),
    ],
)
def test_bad_shapes_are_refused(ax, arguments, message):
    with pytest.raises(ValueError, match=message):
        plot_field(ax, **arguments)


def test_matplotlib_is_imported_only_when_it_is_used():
    code = "import sys, gp_orff, gp_orff.plotting; assert 'matplotlib' not in sys.modules"
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)
