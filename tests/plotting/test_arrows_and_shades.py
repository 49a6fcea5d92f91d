"""Arrows and shades show the data, remain within the axes, and change no global settings."""

import matplotlib
import numpy as np
import pytest
import torch
from matplotlib import pyplot as plt

from gp_orff.plotting import (
    plot_comparison,
    plot_field,
    plot_map,
    plot_streamlines,
    plot_uncertainty,
)
from tests.plotting.flows import grid


def test_arrows_are_thinned_points_of_the_field(ax):
    x = grid()
    vectors = np.stack([-x[:, 1], x[:, 0]], axis=-1)
    before = dict(matplotlib.rcParams)
    assert plot_field(ax, x, vectors, arrows=10) is None
    (quiver,) = ax.collections
    assert len(quiver.U) == 81  # every fourth point, not at the edges
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
    assert shaded.colorbar.ax.get_ylabel() == "speed (m/s)"


def test_tensors_that_require_gradients_are_drawn(ax):
    x = torch.from_numpy(grid(5)).requires_grad_()
    plot_field(ax, x, 2 * x, shade=x.sum(-1))
    assert len(ax.collections) == 2


def test_without_a_colour_bar_the_figure_stays_the_callers(ax):
    x = grid(5)
    plot_field(ax, x, shade=x[:, 0], colorbar=False)
    plot_map(ax, x, x[:, 0], label=None, colorbar=False)
    assert ax.figure.axes == [ax]
    assert not any(shaded.colorbar for shaded in ax.collections)


def every_picture(axes):
    x = grid(8)
    plot_comparison(axes, x, x - 1, x, x, label="current (m/s)")
    plot_map(axes[0, 0], x, x[:, 0], x[:, 1], label="curl (1/s)")
    plot_field(axes[0, 0], x, x, shade=x[:, 0], label="speed (m/s)")
    plot_uncertainty(axes[0, 0], x, x, np.tile(np.eye(2), (len(x), 1, 1)))
    plot_streamlines(axes[0, 0], x, 1 + x, density=0.3)


def test_limits_labels_and_settings_stay_the_callers(axes):
    before = dict(matplotlib.rcParams)
    plt.setp(axes, xlim=(0.5, 1), ylim=(1, 3), xlabel="east (km)", ylabel="north (km)")
    every_picture(axes)
    axes[0, 0].figure.draw_without_rendering()
    for ax in axes.flat:
        assert (ax.get_xlim(), ax.get_ylim()) == ((0.5, 1), (1, 3))
        assert (ax.get_xlabel(), ax.get_ylabel()) == ("east (km)", "north (km)")
    assert dict(matplotlib.rcParams) == before


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


def test_arrows_end_inside_axes_without_limits(ax):
    x = grid(5)
    plot_field(ax, x, np.ones_like(x), arrows=5)
    (quiver,) = ax.collections
    half = 0.5 / quiver.scale  # of each component
    assert ax.get_xlim()[0] <= -half
    assert ax.get_ylim()[1] >= 2 + half


@pytest.mark.parametrize("longest", [0.083, 2.0, 73])
@pytest.mark.parametrize("arrows", [5, 40])
def test_the_reference_arrow_has_a_round_length_and_is_seen(ax, longest, arrows):
    """It is at least a tenth of the side, and a fourth at most: 5 / 2 is the largest step."""
    x = grid(81)
    plot_field(ax, x, np.broadcast_to([0, longest], x.shape), reference="m/s", arrows=arrows)
    (key,), (quiver,) = ax.findobj(matplotlib.quiver.QuiverKey), ax.collections
    number, unit = key.text.get_text().split()
    assert unit == "m/s"
    assert number.replace(".", "").strip("0") in ("1", "2", "5")
    np.testing.assert_allclose(key.U, float(number))
    side = np.ptp(quiver.get_offsets(), axis=0).max()
    assert 0.1 * side <= key.U / quiver.scale <= 0.25 * side


def ends_of(quiver):
    half = 0.5 * np.stack([quiver.U, quiver.V], axis=-1) / quiver.scale
    return np.concatenate([quiver.get_offsets() - half, quiver.get_offsets() + half])


def outward(x):
    return np.random.default_rng(1).uniform(0.5, 1, (len(x), 1)) * (x - x.mean(0))


def test_a_single_vector_is_drawn(ax):
    plot_field(ax, [[3.0, 4.0]], [[0.0, 2.0]], reference="m/s", arrows=1)
    np.testing.assert_allclose(ends_of(ax.collections[0]), [[3, 3.4], [3, 4.6]])


SCATTERED = np.random.default_rng(0).uniform(0, 2, size=(300, 2))


@pytest.mark.parametrize("x", [grid(9), grid(46), SCATTERED], ids=["coarse", "fine", "scattered"])
def test_a_map_fills_its_axes_and_holds_its_arrows(ax, x):
    plot_field(ax, x, outward(x), shade=x[:, 0])
    ends, (low, high) = ends_of(ax.collections[1]), (x.min(0), x.max(0))
    np.testing.assert_array_equal([ax.get_xlim(), ax.get_ylim()], np.stack([low, high], axis=-1))
    assert ((low <= ends) & (ends <= high)).all()
    assert len(ends) > 50


def test_arrows_stay_inside_the_callers_limits_and_maps(ax):
    x = grid(21)
    ax.set(xlim=(1.5, 0.5))
    ax.contourf(np.linspace(0, 2, 21), np.linspace(0, 2, 21), x[:, 0].reshape(21, 21))
    plot_field(ax, x, outward(x), arrows=10)
    first, second = ends_of(ax.collections[-1]).T
    assert 0.5 <= first.min() < first.max() <= 1.5
    assert 0 <= second.min() < second.max() <= 2
    assert ax.get_xlim() == (1.5, 0.5)


def test_arrows_of_a_grid_with_gaps_are_in_its_rows_and_columns(ax):
    x, vectors = grid(41), np.ones((41**2, 2))
    vectors[(x > 1.2).all(-1)] = np.nan
    plot_field(ax, x, vectors, arrows=10)
    drawn = ax.collections[0].get_offsets()
    np.testing.assert_allclose(np.diff(np.unique(drawn.round(6))), 0.2, atol=1e-6)
    assert not (drawn > 1.2 + 1e-9).all(-1).any()
    assert len(drawn) == 10**2 - 4**2


def test_points_without_a_shade_are_blank(ax):
    x = grid(11)
    shade = np.where(np.linalg.norm(x - 1, axis=-1) < 0.3, np.nan, x[:, 0])
    plot_field(ax, x, shade=shade, label="depth (m)")
    ax.figure.canvas.draw()
    colours = np.asarray(ax.figure.canvas.buffer_rgba())[::-1]
    hole, edge = (colours[tuple(np.rint(ax.transData.transform(at)).astype(int)[::-1])] for at in
                  ([1, 1], [0.4, 1]))  # fmt: skip
    assert hole.min() == 255
    assert edge.min() < 100


@pytest.mark.parametrize("layout", [None, "constrained", "compressed"])
def test_colour_bars_are_as_high_as_their_axes_and_have_room(layout):
    figure, axes = plt.subplots(1, 2, layout=layout)
    x = grid(5) * [1, 0.3]
    bars = [plot_field(ax, x, shade=x[:, 0], label="m").colorbar.ax for ax in axes]
    figure.draw_without_rendering()
    for ax, bar in zip(axes, bars, strict=True):
        found, expected = bar.get_window_extent(), ax.get_window_extent()
        np.testing.assert_allclose([found.y0, found.y1], [expected.y0, expected.y1])
        assert found.x0 > expected.x1
    beyond = [axes[1].get_window_extent().x0, figure.bbox.x1 * 1.01]
    assert bars[0].get_tightbbox().x1 < beyond[0]
    assert bars[1].get_tightbbox().x1 < beyond[1]
    plt.close(figure)


@pytest.mark.parametrize(
    ("limits", "extend"),
    [((0, 2), "neither"), ((0, 1), "max"), ((1, 2), "min"), ((0.5, 1.5), "both")],
)
def test_colour_bars_show_what_they_cut_off(ax, limits, extend):
    x = grid(5)
    shaded = plot_field(ax, x, shade=x[:, 0], norm=matplotlib.colors.Normalize(*limits))
    assert shaded.colorbar.extend == extend


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"x": np.zeros((0, 2))}, "one or more finite positions, got 0"),
        ({"x": np.array([[0.0, np.nan], [1, 1]])}, "finite positions, .* 1 values that are not"),
        ({"vectors": grid(3), "arrows": 0}, "one arrow or more .* got arrows=0; to draw no arrows"),
        ({"vectors": np.full((9, 2), np.nan)}, "numbers in vectors, got only NaN"),
        (
            {"x": grid(3)[:, [0, 0]], "shade": np.ones(9)},
            "all on one line, got 9 .* without shade",
        ),
        ({"x": np.eye(2), "shade": np.ones(2)}, "three or more positions to shade"),
    ],
)
def test_what_cannot_be_drawn_is_refused(ax, arguments, message):
    with pytest.raises(ValueError, match=message):
        plot_field(ax, **{"x": grid(3), **arguments})
    assert not ax.collections


def test_nothing_is_drawn_where_no_point_is_inside_the_limits(ax):
    ax.set(xlim=(5, 6), ylim=(5, 6))
    plot_field(ax, grid(5), grid(5), reference="m/s")
    ax.figure.canvas.draw()
    assert not ax.findobj(matplotlib.quiver.QuiverKey)


@pytest.mark.parametrize("ellipses", [False, True])
@pytest.mark.parametrize("layout", ["compressed", "constrained", "tight"])
@pytest.mark.parametrize("size", [(6, 2), (3, 3), (2, 6)])
def test_layouts_leave_room_for_the_reference_arrow(layout, size, ellipses):
    """Its text, arrow and circle are inside the figure, and the box that it states is theirs."""
    figure, axes = plt.subplots(1, 2 if size[0] > 3 else 1, figsize=size, layout=layout)
    x = grid(8)
    for ax in np.ravel(axes):
        plot_field(ax, x, x, reference="m s$^{-1}$", colorbar=False, shade=x[:, 0])
        if ellipses:
            plot_uncertainty(ax, x, x, np.tile(0.3 * np.eye(2), (64, 1, 1)), reference="m/s")
    figure.canvas.draw()
    for ax in np.ravel(axes):
        (key,) = (own for own in ax.get_children() if isinstance(own, matplotlib.quiver.QuiverKey))
        text, box = key.text.get_window_extent(), key.get_window_extent()
        assert box.y0 <= text.y0 < text.y1 <= box.y1
        if ellipses:
            (quiver,) = (own for own in ax.collections if hasattr(own, "U"))
            radius = 2 / quiver.scale * ax.bbox.width / np.ptp(ax.get_xlim())
            assert "± 2" in key.text.get_text()
            assert box.height >= 2 * radius > text.height
            assert ax.bbox.y1 <= box.y0 < box.y1 <= figure.bbox.y1 + 1
        assert text.x0 >= box.x0 - 1
        assert text.y1 <= figure.bbox.y1
        assert max(text.x1, key.vector.get_window_extent().x1) <= ax.bbox.x1 + 1
    plt.close(figure)
