"""Pictures: what is drawn is what was given, and nothing global changes."""

import matplotlib
import numpy as np
import pytest
import scipy.stats
import torch
from gpytorch.kernels import MaternKernel, RBFKernel

matplotlib.use("agg")
from matplotlib import pyplot as plt

import gp_orff
from gp_orff.plotting import (
    overview,
    plot_calibration,
    plot_comparison,
    plot_energy_spectrum,
    plot_field,
    plot_map,
    plot_streamlines,
    plot_uncertainty,
)


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
    assert [bar.get_ylabel() for bar in ax.child_axes] == ["speed (m/s)"]


def test_tensors_that_require_gradients_are_drawn(ax):
    x = torch.from_numpy(grid(5)).requires_grad_()
    plot_field(ax, x, 2 * x, shade=x.sum(-1))
    assert len(ax.collections) == 2


def test_without_a_colour_bar_the_figure_stays_the_callers(ax):
    x = grid(5)
    plot_field(ax, x, shade=x[:, 0], colorbar=False)
    plot_map(ax, x, x[:, 0], label=None, colorbar=False)
    assert ax.figure.axes == [ax]
    assert not ax.child_axes


def covariance(first, second, angle):
    """Of standard deviations `first` and `second`, the first at an angle to the first axis."""
    turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    return turn @ np.diag([first**2, second**2]) @ turn.T


def test_ellipses_are_the_covariances_to_the_scale_of_the_arrows(ax):
    x, (first, second, angle) = grid(6), (0.3, 0.1, 0.7)
    vectors = np.stack([1 + x[:, 1], x[:, 0]], axis=-1)
    plot_field(ax, x, vectors, arrows=6)
    (quiver,) = ax.collections
    covariances = np.tile(covariance(first, second, angle), (len(x), 1, 1))
    ellipses = plot_uncertainty(ax, x, vectors, covariances, arrows=6)
    assert ellipses in ax.collections
    outlines = np.stack([path.vertices[:-1] for path in ellipses.get_paths()])
    assert len(outlines) == len(quiver.U)

    tips = quiver.get_offsets() + 0.5 * np.stack([quiver.U, quiver.V], axis=-1) / quiver.scale
    np.testing.assert_allclose(outlines.mean(1), tips, atol=1e-12)
    away = quiver.scale * (outlines - tips[:, None])
    np.testing.assert_allclose(np.linalg.norm(away, axis=-1).max(-1), first)
    np.testing.assert_allclose(np.linalg.norm(away, axis=-1).min(-1), second)
    # all at a Mahalanobis distance of one, hence with the right directions
    distance = np.einsum("nki,ij,nkj->nk", away, np.linalg.inv(covariances[0]), away)
    np.testing.assert_allclose(distance, 1.0)


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
    assert [bar.get_ylabel() for bar in ax.child_axes] == ["divergence (1/s)"]
    norm = matplotlib.colors.Normalize(-9, 9)
    assert plot_map(ax, x, 0 * x[:, 0], label="", norm=norm)[0].norm is norm
    assert plot_map(ax, x, 0 * x[:, 0], label="")[0].norm.vmax > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"level": 95}, "between 0 and 1, got 95; say 0.95"),
        ({"mean": np.zeros(3)}, r"mean of shape \(16,\), got \(3,\); give one row"),
        ({"sd": np.zeros((16, 2))}, r"sd of shape \(16,\), got \(16, 2\)"),
        ({"sd": np.full(16, -0.5)}, "standard deviations, got -0.5; give square roots"),
    ],
)
def test_bad_maps_are_refused(ax, arguments, message):
    given = {"x": grid(4), "mean": np.zeros(16), "label": "curl (1/s)", **arguments}
    with pytest.raises(ValueError, match=message):
        plot_map(ax, **given)


@pytest.fixture
def axes():
    figure, axes = plt.subplots(2, 2, layout="constrained")
    yield axes
    plt.close(figure)


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
    np.testing.assert_allclose([sd_map.norm.vmin, sd_map.norm.vmax], [0, 0.1 * speed.max()])

    first, second, third, fourth = (list(ax.collections) for ax in axes.flat)
    assert [len(drawn) for drawn in (first, second, third, fourth)] == [2, 2, 2, 1]
    assert first[1].scale == second[1].scale  # arrows above the shade, to one scale
    np.testing.assert_allclose(third[1].U, -0.1 * first[1].U)
    bars = [bar.get_ylabel() for ax in axes.flat for bar in ax.child_axes]
    assert bars == ["current (m/s)", "residual and sd of current (m/s)"]
    assert all(ax.get_title() for ax in axes.flat)


def test_comparison_of_scalars_keeps_their_signs(axes):
    x = grid(6)
    truth, sd = x[:, :1] - 1.5, np.full((len(x), 1), 0.25)
    four = plot_comparison(list(axes.flat), x, truth, truth - 0.5, sd, label="curl (1/s)")
    for shown, expected in zip(four, (truth, truth - 0.5, 0 * x[:, :1] - 0.5, sd), strict=True):
        np.testing.assert_allclose(shown.get_array(), expected[:, 0])
    limits = [(shown.norm.vmin, shown.norm.vmax) for shown in four]
    assert limits == [(-2, 2), (-2, 2), (-0.5, 0.5), (-0.5, 0.5)]
    assert [len(ax.collections) for ax in axes.flat] == [1, 1, 1, 1]


def test_bad_comparisons_are_refused(axes):
    x = grid(4)
    with pytest.raises(ValueError, match=r"four axes, got 2; make them with plt.subplots"):
        plot_comparison(axes[0], x, x, x, x, label="m/s")
    with pytest.raises(ValueError, match=r"sd of shape \(16, 2\), got \(16,\)"):
        plot_comparison(axes, x, x, x, x[:, 0], label="m/s")
    with pytest.raises(ValueError, match="standard deviations, got -1"):
        plot_comparison(axes, x, x, x, x - 1, label="m/s")


def every_picture(axes):
    x = grid(8)
    plot_comparison(axes, x, x - 1, x, x, label="current (m/s)")
    plot_map(axes[0, 0], x, x[:, 0], x[:, 1], label="curl (1/s)")
    plot_field(axes[0, 0], x, x, shade=x[:, 0], label="speed (m/s)")
    plot_uncertainty(axes[0, 0], x, x, np.tile(np.eye(2), (len(x), 1, 1)))
    plot_streamlines(axes[0, 0], x, 1 + x)


def test_limits_labels_and_settings_stay_the_callers(axes):
    before = dict(matplotlib.rcParams)
    plt.setp(axes, xlim=(0.5, 1), ylim=(1, 3), xlabel="east (km)", ylabel="north (km)")
    every_picture(axes)
    axes[0, 0].figure.canvas.draw()
    for ax in axes.flat:
        assert (ax.get_xlim(), ax.get_ylim()) == ((0.5, 1), (1, 3))
        assert (ax.get_xlabel(), ax.get_ylabel()) == ("east (km)", "north (km)")
    assert dict(matplotlib.rcParams) == before


def test_what_is_drawn_is_in_view_where_the_caller_set_no_limits(ax):
    x = 100 + grid(5)
    plot_uncertainty(ax, x, x - 100, np.tile(np.eye(2), (len(x), 1, 1)))
    assert ax.get_xlim()[0] < 100
    assert ax.get_xlim()[1] > 102


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


def test_calibration_curves_are_shares_inside_intervals(ax):
    pit = np.random.default_rng(0).uniform(size=500)
    block = np.repeat(np.arange(5), 100)
    curve, band = plot_calibration(ax, torch.from_numpy(pit), block=block, label="model")
    levels, shares = curve.get_data()
    for level in (0.5, 0.95):
        low, high = 0.5 - level / 2, 0.5 + level / 2
        at = np.argmin(np.abs(levels - level))
        assert shares[at] == np.mean((low <= pit) & (pit <= high))
        edges = band.get_paths()[0].vertices
        edges = np.unique(edges[np.isclose(edges[:, 0], level), 1])
        expected = scipy.stats.binom.interval(0.95, 500, level)
        np.testing.assert_allclose(edges * 500, expected)
    assert len(ax.lines) == 7  # the diagonal, five blocks, and all
    assert curve.get_label() == "model"
    assert ax.get_xlabel()
    assert ax.get_ylabel()
    _, wider = plot_calibration(ax, pit, independent=20)
    below, above = (own.get_paths()[0].vertices for own in (wider, band))
    assert (
        below[np.isclose(below[:, 0], 0.5), 1].min() < above[np.isclose(above[:, 0], 0.5), 1].min()
    )


@pytest.mark.parametrize("pit", [np.array([]), np.array([0.5, 1.2]), np.ones((3, 2))])
def test_calibration_expects_probabilities(ax, pit):
    with pytest.raises(ValueError, match="probabilities"):
        plot_calibration(ax, pit)
    with pytest.raises(ValueError, match="block of shape"):
        plot_calibration(ax, np.full(3, 0.5), block=np.zeros(2))


def test_energy_spectra_have_bands_and_slopes(ax):
    k = np.geomspace(1.0, 8.0, 9)
    curve = plot_energy_spectrum(ax, k, k**-3.0, 0.5 * k**-3, 2 * k**-3, slopes=[-3.0, -2])
    assert np.allclose(curve.get_ydata(), k**-3)
    assert (ax.get_xscale(), ax.get_yscale()) == ("log", "log")
    (band,) = ax.collections
    assert np.isclose(band.get_paths()[0].vertices[:, 1].max(), 2.0)
    steps = [np.diff(np.log(line.get_ydata())) / np.diff(np.log(k)) for line in ax.lines[1:]]
    assert np.allclose(steps, [[-3.0] * 8, [-2.0] * 8])
    with pytest.raises(ValueError, match="positive values of shape"):
        plot_energy_spectrum(ax, k, -k)
    with pytest.raises(ValueError, match="like the wavenumbers"):
        plot_energy_spectrum(ax, k, k[:3])


def test_arrows_end_inside_axes_without_limits(ax):
    x = grid(5)
    plot_field(ax, x, np.ones_like(x), arrows=5)
    (quiver,) = ax.collections
    half = 0.5 / quiver.scale  # of each component
    assert ax.get_xlim()[0] <= -half
    assert ax.get_ylim()[1] >= 2 + half


@pytest.mark.parametrize(
    ("longest", "shown"), [(0.083, "0.05 m/s"), (2.0, "2 m/s"), (73, "50 m/s")]
)
def test_the_reference_arrow_has_a_round_length(ax, longest, shown):
    x = grid(5)
    plot_field(ax, x, np.broadcast_to([0, longest], x.shape), reference="m/s")
    (key,) = ax.findobj(matplotlib.quiver.QuiverKey)
    assert key.text.get_text() == shown
    np.testing.assert_allclose(key.U, float(shown.split()[0]))


def posterior(kernel, num_inputs, num_outputs):
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(30, num_inputs, generator=generator).double() * torch.tensor(2.0)
    y = torch.sin(3 * x[:, :1] + torch.arange(num_outputs))
    return gp_orff.VectorFieldGP(kernel).condition(x, y).posterior(), x, y


KERNELS = {
    "flow": (lambda: gp_orff.HelmholtzKernel(num_dims=2), 2, 2),
    "without divergence": (lambda: gp_orff.DivergenceFreeKernel(num_dims=2), 2, 2),
    "no derivatives": (lambda: gp_orff.HelmholtzKernel(MaternKernel(1.5), num_dims=2), 2, 2),
    "in space": (lambda: gp_orff.CurlFreeKernel(num_dims=3), 3, 3),
    "one output": (lambda: RBFKernel(ard_num_dims=2), 2, 1),
}
TITLES = {
    "flow": ["data", "mean", "standard deviation", "vorticity", "divergence"],
    "without divergence": ["data", "mean", "standard deviation", "vorticity"],
    "no derivatives": ["data", "mean", "standard deviation"],
    "in space": ["data", "mean", "standard deviation"],
    "one output": ["mean", "standard deviation"],
}


@pytest.mark.parametrize("name", KERNELS)
def test_an_overview_has_what_exists(name):
    build, num_inputs, num_outputs = KERNELS[name]
    field, x, y = posterior(build(), num_inputs, num_outputs)
    y[3] = torch.nan
    figure = overview(field, x, y, points=6)
    titled = {ax.get_title(loc="left"): ax for ax in figure.axes if ax.get_title(loc="left")}
    assert list(titled) == TITLES[name]
    limits = {(ax.get_xlim(), ax.get_ylim()) for ax in titled.values()}
    assert len(limits) == 1
    sides = [np.linspace(*field.box[column], 6) for column in (0, 1)]
    points = np.stack(np.meshgrid(*sides), axis=-1).reshape(-1, 2)
    middle = np.tile([sum(side) / 2 for side in field.box], (36, 1))
    middle[:, :2] = points
    sd = field.variance(torch.from_numpy(middle))[:, :2].sum(-1).sqrt()
    shaded = titled["standard deviation"].collections[0].get_array()
    np.testing.assert_allclose(shaded, sd, rtol=1e-6)
    plt.close(figure)


def test_derivatives_of_an_overview_share_a_scale():
    figure = overview(posterior(gp_orff.HelmholtzKernel(num_dims=2), 2, 2)[0], points=5)
    vorticity, divergence = (ax.collections[0].norm for ax in figure.axes[2:4])
    assert vorticity is divergence
    plt.close(figure)


def test_an_overview_shows_other_inputs_at_a_value():
    flow = gp_orff.DivergenceFreeKernel(num_dims=2, active_dims=[0, 1])
    field, x, _ = posterior(flow * RBFKernel(active_dims=[2]), 3, 2)
    figure = overview(field, x, at={2: 0.5}, columns=(1, 0), points=5)
    side = [np.linspace(*field.box[column], 5) for column in (1, 0)]
    second, first = (values.ravel() for values in np.meshgrid(*side))
    points = torch.from_numpy(np.stack([first, second, 0 * first + 0.5], axis=-1))
    expected = field.mean(points).norm(dim=-1)
    np.testing.assert_allclose(figure.axes[0].collections[0].get_array(), expected, rtol=1e-6)
    plt.close(figure)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"columns": (0, 0)}, "two different inputs"),
        ({"columns": (0, 2)}, "two different inputs"),
        ({"x": np.ones((4, 3))}, "x of shape"),
        ({"y": np.ones((4, 2))}, "with positions"),
    ],
)
def test_bad_overviews_are_refused(arguments, message):
    field, *_ = posterior(gp_orff.HelmholtzKernel(num_dims=2), 2, 2)
    with pytest.raises(ValueError, match=message):
        overview(field, **arguments)


def test_an_overview_of_a_line_says_what_to_draw():
    field, *_ = posterior(RBFKernel(), 1, 1)
    with pytest.raises(ValueError, match="two inputs or more"):
        overview(field)
