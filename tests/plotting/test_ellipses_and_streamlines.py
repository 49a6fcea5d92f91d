"""Ellipses show covariances, and streamlines follow the field."""

import numpy as np
import pytest
from matplotlib.patches import Circle
from matplotlib.quiver import QuiverKey
from scipy.stats import chi2

from gp_orff.plotting import plot_field, plot_streamlines, plot_uncertainty
from tests.plotting.flows import grid


def covariance(first, second, angle):
    """Of standard deviations `first` and `second`, the first at an angle to the first axis."""
    turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    return turn @ np.diag([first**2, second**2]) @ turn.T


@pytest.mark.parametrize("level", [0.95, 0.5])
def test_ellipses_are_the_covariances_to_the_scale_of_the_arrows(ax, level):
    x, (first, second, angle) = grid(6), (0.3, 0.1, 0.7)
    vectors = np.stack([1 + x[:, 1], x[:, 0]], axis=-1)
    plot_field(ax, x, vectors, arrows=6)
    (quiver,) = ax.collections
    covariances = np.tile(covariance(first, second, angle), (len(x), 1, 1))
    ellipses = plot_uncertainty(ax, x, vectors, covariances, arrows=6, level=level)
    assert ellipses in ax.collections
    outlines = np.stack([path.vertices[:-1] for path in ellipses.get_paths()])
    assert len(outlines) == len(quiver.U)

    tips = quiver.get_offsets() + 0.5 * np.stack([quiver.U, quiver.V], axis=-1) / quiver.scale
    np.testing.assert_allclose(outlines.mean(1), tips, atol=1e-12)
    away = quiver.scale * (outlines - tips[:, None])
    radius = np.sqrt(chi2.ppf(level, 2))
    np.testing.assert_allclose(np.linalg.norm(away, axis=-1).max(-1), radius * first)
    np.testing.assert_allclose(np.linalg.norm(away, axis=-1).min(-1), radius * second)
    # all at one Mahalanobis distance, hence with the right directions
    distance = np.einsum("nki,ij,nkj->nk", away, np.linalg.inv(covariances[0]), away)
    np.testing.assert_allclose(distance, radius**2)


def test_a_circle_at_the_reference_arrow_is_the_size_key_of_ellipses(ax):
    x = grid(6)
    style = {"arrows": 6, "reference": "m/s"}
    covariances = np.tile(0.04 * np.eye(2), (len(x), 1, 1))
    with pytest.raises(ValueError, match=r"arrows on the axes for reference=, .* plot_field first"):
        plot_uncertainty(ax, x, 1 + x, covariances, **style)
    plot_field(ax, x, 1 + x, **style)
    plot_uncertainty(ax, x, 1 + x, covariances, **style)
    (key,) = ax.findobj(QuiverKey)
    length, radius = key.text.get_text().removesuffix(" m/s").split(" ± ")
    assert (float(length), float(radius)) == (key.U, 0.5)  # above 2.45 times 0.2
    circles = []

    def watched(self, renderer):
        circles.append(self.get_transform().transform([(0, 0), (1, 0)]))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Circle, "draw", watched)
        ax.figure.canvas.draw()
    (middle, right), pixels = circles[-1], ax.bbox.width / np.ptp(ax.get_xlim())
    np.testing.assert_allclose(right[0] - middle[0], pixels * 0.5 / ax.collections[0].scale)
    np.testing.assert_allclose(right[0], ax.bbox.x1)
    tip = key.vector.get_offset_transform().transform(key.vector.get_offsets())[0]
    tip[0] += pixels * key.U / ax.collections[0].scale
    np.testing.assert_allclose(middle, tip, atol=1e-6)


def test_a_field_known_exactly_has_points_for_ellipses(ax):
    x = grid(4)
    ellipses = plot_uncertainty(ax, x, x, np.zeros((len(x), 2, 2)))
    assert max(np.ptp(path.vertices, axis=0).max() for path in ellipses.get_paths()) == 0


@pytest.mark.parametrize(
    ("covariances", "message"),
    [
        (np.zeros((16, 2)), r"shape \(16, 2, 2\), got \(16, 2\); .* torch.diag_embed"),
        (np.zeros((15, 2, 2)), r"shape \(16, 2, 2\), got \(15, 2, 2\)"),
        (np.tile([[1.0, 2.0], [2.0, 1.0]], (16, 1, 1)), "eigenvalue -1; give covariances"),
        (np.tile([[1.0, 0.5], [0.0, 1.0]], (16, 1, 1)), "expects symmetric matrices"),
    ],
)
def test_what_is_no_covariance_is_refused(ax, covariances, message):
    x = grid(4)
    with pytest.raises(ValueError, match=message):
        plot_uncertainty(ax, x, x, covariances)


def test_what_is_drawn_is_in_view_where_the_caller_set_no_limits(ax):
    x = 100 + grid(5)
    plot_uncertainty(ax, x, x - 100, np.tile(np.eye(2), (len(x), 1, 1)))
    assert ax.get_xlim()[0] < 100
    assert ax.get_xlim()[1] > 102


def test_streamlines_turn_with_the_field_in_any_order_of_its_points(ax):
    first, second = np.linspace(-1, 1, 31), np.linspace(-2, 2, 41)
    x = np.stack(np.meshgrid(first, second, indexing="ij"), axis=-1).reshape(-1, 2)
    x = np.random.default_rng(0).permutation(x).astype(np.float32) + np.float32(100)
    drawn = plot_streamlines(ax, x, (x - 100)[:, ::-1] * [-1, 1])
    assert len(drawn.lines.get_segments()) > 10
    for line in drawn.lines.get_segments():
        (u, v), radius = (line - 100).T, np.linalg.norm(line - 100, axis=-1)
        assert np.ptp(radius) < 0.02  # a circle around the middle
        assert (u[:-1] * v[1:] >= v[:-1] * u[1:]).all()  # counter-clockwise


@pytest.mark.parametrize(
    "x",
    [
        np.random.default_rng(0).uniform(size=(16, 2)),
        grid(4)[:-1],
        grid(4)[:, [0, 0]],
        np.concatenate([grid(4)[:-1], grid(4)[:1]]),
        grid(4) ** 1.05,
        grid(4) @ [[0.8, 0.6], [-0.6, 0.8]],
    ],
    ids=["scattered", "a hole", "a line", "a point twice", "uneven", "turned"],
)
def test_streamlines_ask_for_a_regular_grid(ax, x):
    with pytest.raises(ValueError, match=r"regular grid, got 1\d points .* torch.cartesian_prod"):
        plot_streamlines(ax, x, x)


def test_arrows_inside_a_map_have_ellipses_and_these_leave_no_margin(ax):
    x = grid(9)
    plot_field(ax, x, 1 + x, shade=x[:, 0])
    ellipses = plot_uncertainty(ax, x, 1 + x, np.tile(np.eye(2), (len(x), 1, 1)))
    assert len(ellipses.get_paths()) == len(ax.collections[1].U) < len(x)
    assert (ax.get_xlim(), ax.get_ylim()) == ((0, 2), (0, 2))
