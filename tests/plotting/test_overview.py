"""The overview of a posterior shows all available quantities."""

import numpy as np
import pytest
import torch
from gpytorch.kernels import MaternKernel, MultitaskKernel, RBFKernel
from matplotlib import pyplot as plt

import gp_orff
from gp_orff.plotting import overview
from tests.plotting.flows import Flow, grid


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
SD, VORTICITY = "standard deviation, dots: data", "vorticity, hatched: sign unknown"
SUM = "√(sd₁² + sd₂²)"
TITLES = {
    "flow": ["data", "mean", SD, VORTICITY, "divergence, hatched: sign unknown"],
    "without divergence": ["data", "mean", SD, VORTICITY],
    "no derivatives": ["data", "mean", SD],
    "in space": ["data", "mean", SD],
    "one output": ["mean", SD],
}


@pytest.mark.parametrize("name", KERNELS)
def test_an_overview_has_what_exists(name):
    build, num_inputs, num_outputs = KERNELS[name]
    field, x, y = posterior(build(), num_inputs, num_outputs)
    y[3] = torch.nan
    figure = overview(field, x, y, points=6)
    titled = {ax.get_title(loc="left"): ax for ax in figure.axes if ax.get_title(loc="left")}
    letters = [f"({letter})" for letter in "abcde"]
    assert [title.split(" ", 1) for title in titled] == [
        [letter, title] for letter, title in zip(letters, TITLES[name], strict=False)
    ]
    titled = {title[4:]: ax for title, ax in titled.items()}
    dots = {title: [len(line.get_xdata()) for line in ax.lines] for title, ax in titled.items()}
    assert dots == {title: [len(x)] if title == SD else [] for title in titled}
    limits = {(ax.get_xlim(), ax.get_ylim()) for ax in titled.values()}
    assert len(limits) == 1
    sides = [np.linspace(*field.box[column], 6) for column in (0, 1)]
    points = np.stack(np.meshgrid(*sides), axis=-1).reshape(-1, 2)
    middle = np.tile([sum(side) / 2 for side in field.box], (36, 1))
    middle[:, :2] = points
    sd = field.variance(torch.from_numpy(middle))[:, :2].sum(-1).sqrt()
    shaded = titled[SD].collections[0].get_array()
    np.testing.assert_allclose(shaded, sd, rtol=1e-6)
    plt.close(figure)


def test_derivatives_of_an_overview_share_a_scale():
    figure = overview(Flow(), points=5)
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
        ({"y": np.ones((4, 2))}, "positions x with y"),
        ({"at": {7: 1.0}}, r"of no columns, as all are drawn, got \[7\]"),
    ],
)
def test_bad_overviews_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        overview(Flow(), **arguments)


def test_an_overview_refuses_values_of_inputs_that_it_draws_or_does_not_know():
    space = gp_orff.CurlFreeKernel(num_dims=3)
    field, *_ = posterior(space, 3, 3)
    for at in ({1: 0.5}, {3: 0.5}, {-1: 0.5}, {"height": 0.5}):
        with pytest.raises(ValueError, match=r"values of the columns \[2\], got"):
            overview(field, at=at, points=4)


@pytest.mark.parametrize(
    ("unit", "names", "label"),
    [
        ("m/s", ("east (km)", "north (km)"), " (m/s per km)"),
        ("m/s", ("east [km]", "north [km] "), " (m/s per km)"),
        ("", ("east (km)", "north (km)"), ""),
        ("m/s", ("east (km)", "north (m)"), ""),
        ("m/s", ("x", "y"), ""),
    ],
)
def test_derivatives_of_an_overview_have_units_where_these_are_known(unit, names, label):
    figure = overview(Flow(), points=4, unit=unit, names=names)
    labels = [bar.get_ylabel() for ax in figure.axes for bar in ax.child_axes]
    assert labels[2:] == [f"vorticity{label}", f"divergence{label}"]
    assert labels[:2] == [f"{name} ({unit})" if unit else name for name in ("speed", SUM)]
    plt.close(figure)


def test_an_overview_of_one_input_has_curves_with_bands():
    field, x, y = posterior(MultitaskKernel(RBFKernel(), num_tasks=2), 1, 2)
    figure = overview(field, x.flatten(), y, points=5, unit="m/s", names=["time (h)"])
    assert [ax.get_title(loc="left") for ax in figure.axes] == ["(a) output 1", "(b) output 2"]
    assert [ax.get_xlabel() for ax in figure.axes] == ["", "time (h)"]
    at = torch.linspace(*field.box[0], 50, dtype=torch.float64)[:, None]
    mean, sd = field.mean(at), field.variance(at).sqrt()
    for output, ax in enumerate(figure.axes):
        drawn, data = ax.lines
        np.testing.assert_allclose(drawn.get_ydata(), mean[:, output])
        np.testing.assert_array_equal(data.get_xydata(), torch.stack([x[:, 0], y[:, output]], -1))
        band = ax.collections[0].get_paths()[0].vertices[:, 1]
        np.testing.assert_allclose(band.max(), (mean + 1.959964 * sd)[:, output].max())
    plt.close(figure)


def test_an_overview_has_names_of_inputs_and_no_panel_of_data_without_whole_vectors():
    x = grid(3)
    figure = overview(Flow(), x, x * [1, np.nan], points=4, names=("east (km)", "north (km)"))
    first = figure.axes[0]
    assert (first.get_xlabel(), first.get_ylabel()) == ("east (km)", "north (km)")
    assert first.get_title(loc="left") == "(a) mean"
    with pytest.raises(ValueError, match=r"a name for each of 2 inputs, got \['east'\]"):
        overview(Flow(), names=["east"])
    plt.close(figure)


def test_dots_of_many_data_leave_the_map_visible():
    """A dot is as wide as its marker: 10⁵ of them would cover a panel at any fixed size."""
    x = np.random.default_rng(0).uniform(size=(100_000, 2)) * [2, 1.5]
    figure = overview(Flow(), x, points=4)
    (dots,) = figure.axes[1].lines
    box = figure.axes[1].get_window_extent()
    pixels = len(x) * np.pi / 4 * (dots.get_markersize() * figure.dpi / 72 / 2) ** 2
    assert pixels < 0.06 * box.width * box.height  # half a marker wide, as "." is
    plt.close(figure)
