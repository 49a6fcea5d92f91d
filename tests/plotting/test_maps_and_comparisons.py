"""Maps of scalars, and comparisons of truth and posterior."""

import matplotlib
import numpy as np
import pytest
import torch
from matplotlib import pyplot as plt

from gp_orff.plotting import (
    DEVIATION,
    STYLE,
    plot_comparison,
    plot_deviation,
    plot_map,
    title_panels,
)
from tests.plotting.flows import grid


@pytest.mark.parametrize(("level", "z"), [(0.95, 1.959964), (0.5, 0.674490)])
def test_points_whose_sign_is_not_known_are_hatched(ax, level, z):
    x = np.random.default_rng(0).uniform(-2, 2, size=(900, 2))
    mean, sd = x[:, 0] + 0.2 * x[:, 1], 0.2 + 0.1 * x[:, 1] ** 2
    shaded, hatched = plot_map(ax, x, mean, sd, label="curl (1/s)", level=level)
    np.testing.assert_array_equal(shaded.get_array(), mean)
    assert hatched.hatches == ["////"]
    inside = hatched.get_paths()[0].contains_points(x)
    margin = np.abs(np.abs(mean) - z * sd)
    clear = (margin > 1e-9) & (np.abs(x) < 1.7).all(-1)  # the hull's edge has no inside
    assert 0.1 < inside[clear].mean() < 0.9
    np.testing.assert_array_equal(inside[clear], (np.abs(mean) < z * sd)[clear])


@pytest.mark.parametrize("sd", [0.0, 1e-9, 1e9])
def test_maps_known_everywhere_or_nowhere_are_drawn(ax, sd):
    x = grid(6)
    _, hatched = plot_map(ax, x, 1 + x[:, 0], np.full(len(x), sd), label="divergence (1/s)")
    covered = hatched.get_paths()[0].contains_points([[1.03, 0.99]])
    assert covered.all() == (sd > 1)
    ax.figure.canvas.draw()


def test_a_map_parts_its_colours_at_zero_unless_told(ax):
    x = torch.from_numpy(grid(5))
    shaded, hatched = plot_map(ax, x, x[:, :1] - 0.5, label="divergence (1/s)")  # (n, 1)
    assert hatched is None
    assert (shaded.norm.vmin, shaded.norm.vmax) == (-1.5, 1.5)
    assert shaded.colorbar.ax.get_ylabel() == "divergence (1/s)"
    norm = matplotlib.colors.Normalize(-9, 9)
    assert plot_map(ax, x, 0 * x[:, 0], label="", norm=norm)[0].norm is norm
    assert plot_map(ax, x, 0 * x[:, 0], label="")[0].norm.vmax > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"level": 95}, "between 0 and 1, got 95; use 0.95"),
        ({"mean": np.zeros(3)}, r"mean of shape \(16,\), got \(3,\); give one row"),
        ({"sd": np.zeros((16, 2))}, r"sd of shape \(16,\), got \(16, 2\)"),
        ({"sd": np.full(16, -0.5)}, "standard deviations, .* got -0.5; give square roots"),
    ],
)
def test_bad_maps_are_refused(ax, arguments, message):
    given = {"x": grid(4), "mean": np.zeros(16), "label": "curl (1/s)", **arguments}
    with pytest.raises(ValueError, match=message):
        plot_map(ax, **given)


def test_comparison_of_vectors_has_two_scales(axes):
    x = torch.from_numpy(grid(12))
    truth, sd = torch.stack([1 + x[:, 1], -x[:, 0]], dim=-1), 0.1 + 0 * x
    truth_map, mean_map, residual_map, sd_map = plot_comparison(
        axes, x, truth, 0.9 * truth, sd, label="current (m/s)", arrows=6
    )
    speed = truth.norm(dim=-1).numpy()
    np.testing.assert_allclose(truth_map.get_array(), speed)
    np.testing.assert_allclose(mean_map.get_array(), 0.9 * speed)
    np.testing.assert_allclose(residual_map.get_array(), 0.1 * speed)
    np.testing.assert_allclose(sd_map.get_array(), 0.1 * np.sqrt(2))
    assert truth_map.norm is mean_map.norm
    assert residual_map.norm is sd_map.norm
    np.testing.assert_allclose([mean_map.norm.vmin, mean_map.norm.vmax], [0, speed.max()])
    inner = (np.abs(x.numpy() - 1) < 0.8).all(-1)
    assert 0.4 < inner.mean() < 0.8
    np.testing.assert_allclose([sd_map.norm.vmin, sd_map.norm.vmax], [0, 0.1 * speed[inner].max()])
    assert sd_map.colorbar.extend == "max"  # of the residual at the edge

    first, second, third, fourth = (list(ax.collections) for ax in axes.flat)
    assert [len(drawn) for drawn in (first, second, third, fourth)] == [2, 2, 2, 1]
    assert first[1].scale == second[1].scale  # arrows above the shade, to one scale
    np.testing.assert_allclose(third[1].U, -0.1 * first[1].U)
    bars = [shown.colorbar.ax.get_ylabel() for shown in (mean_map, sd_map)]
    assert bars == ["current (m/s)", "residual and sd of current (m/s)"]
    assert all(ax.get_title(loc="left") for ax in axes.flat)


def test_comparison_of_scalars_keeps_their_signs(axes):
    x = grid(6)
    truth, sd = x[:, :1] - 1.5, np.full((len(x), 1), 0.25)
    four = plot_comparison(list(axes.flat), x, truth, truth - 0.5, sd, label="curl (1/s)")
    for shown, expected in zip(four, (truth, truth - 0.5, 0 * x[:, :1] - 0.5, sd), strict=True):
        np.testing.assert_allclose(shown.get_array(), expected[:, 0])
    limits = [(shown.norm.vmin, shown.norm.vmax) for shown in four]
    assert limits == [(-2, 2), (-2, 2), (-0.5, 0.5), (-0.5, 0.5)]
    assert [len(ax.collections) for ax in axes.flat] == [1, 1, 1, 1]


def test_deviations_have_a_scale_from_zero_to_the_interior(ax):
    x = np.random.default_rng(0).uniform(-1, 1, size=(4000, 2)) * [1, 3]
    sd = 0.1 + np.abs(x[:, 0]) ** 9
    shaded = plot_deviation(ax, x, sd[:, None], label="sd (m/s)")
    assert shaded.norm.vmin == 0
    np.testing.assert_allclose(shaded.norm.vmax, 0.1 + 0.8**9, rtol=0.02)  # 4000 positions
    assert shaded.colorbar.extend == "max"
    assert shaded.cmap.name == DEVIATION
    norm = matplotlib.colors.Normalize(0, 2)
    assert plot_deviation(ax, x, sd, label="", norm=norm, colorbar=False).norm is norm
    edge = np.array([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]])  # has no interior
    assert plot_deviation(ax, edge, [1.0, 2.0, 3.0], label="").norm.vmax == 3
    with pytest.raises(ValueError, match=r"standard deviations, .* got -1"):
        plot_deviation(ax, edge, [1.0, -1.0, 1.0], label="")


def test_titles_have_letters_if_there_are_several(axes):
    title_panels(axes, ["data", "mean", "sd", "curl"])
    titles = [ax.get_title(loc="left") for ax in axes.flat]
    assert titles == ["(a) data", "(b) mean", "(c) sd", "(d) curl"]
    title_panels(axes[0, 0], ["mean"])
    assert axes[0, 0].get_title(loc="left") == "mean"
    with pytest.raises(ValueError, match="one title for each of 2 axes, at most 26, got 1"):
        title_panels(axes[0], ["mean"])


def test_figures_in_the_style_are_saved_for_print(tmp_path):
    with plt.rc_context(STYLE):
        figure = plt.figure(figsize=(2, 1))
        figure.add_axes((0, 0, 1, 1))
        figure.savefig(tmp_path / "a.png", bbox_inches=figure.bbox_inches)
    assert plt.imread(tmp_path / "a.png").shape[:2] == (300, 600)
    plt.close(figure)


def test_bad_comparisons_are_refused(axes):
    x = grid(4)
    with pytest.raises(ValueError, match=r"four axes, got 2; make them with plt.subplots"):
        plot_comparison(axes[0], x, x, x, x, label="m/s")
    with pytest.raises(ValueError, match=r"sd of shape \(16, 2\), got \(16,\)"):
        plot_comparison(axes, x, x, x, x[:, 0], label="m/s")
    with pytest.raises(ValueError, match=r"standard deviations, .* got -1"):
        plot_comparison(axes, x, x, x, x - 1, label="m/s")


def test_a_map_with_gaps_is_hatched_elsewhere(ax):
    x = grid(11)
    gaps = (x > 1.5).all(-1)
    _, hatched = plot_map(ax, x, np.where(gaps, np.nan, 0), np.ones(len(x)), label="curl (1/s)")
    inside = hatched.get_paths()[0].contains_points([[0.5, 0.53], [1.85, 1.83]])
    assert list(inside) == [True, False]


def test_a_comparison_has_reference_arrows_of_truth_and_residual(axes):
    x = grid(6)
    plot_comparison(axes, x, x, 0.9 * x, x, label="current (m/s)", reference="m/s")
    keys = [ax.findobj(matplotlib.quiver.QuiverKey) for ax in axes.flat]
    assert [len(own) for own in keys] == [1, 0, 1, 0]
    assert keys[2][0].text.get_text() == "0.1 m/s"
