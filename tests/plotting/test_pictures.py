"""Pictures compared with approved ones; `python -m tests.plotting.test_pictures` draws them again.

The pictures have no text, because fonts differ between machines.
"""

import io
from pathlib import Path

import matplotlib
import numpy as np
import pytest

matplotlib.use("agg")
from matplotlib import pyplot as plt

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
from tests.plotting.flows import Flow, flow, grid

FOLDER = Path(__file__).parent / "pictures"
SMALL = {"figsize": (4, 3), "dpi": 50}


def vectors():
    figure, (left, right) = plt.subplots(1, 2, layout="compressed", **SMALL)
    x = grid(31)
    style = {"arrows": 10, "reference": "m/s"}
    plot_field(left, x, flow(x), shade=x[:, 0], norm=plt.Normalize(0, 1.5), **style)
    scattered = np.random.default_rng(0).uniform(0, 2, size=(150, 2))
    covariances = np.tile(0.01 * np.eye(2), (len(scattered), 1, 1))
    plot_field(right, scattered, flow(scattered), **style)
    plot_uncertainty(right, scattered, flow(scattered), covariances, **style)
    return figure


def scalars():
    figure, (left, right) = plt.subplots(1, 2, layout="compressed", **SMALL)
    x = grid(31)
    plot_map(left, x, x[:, 0] - x[:, 1] ** 2, 0.2 + 0.1 * x[:, 0], label="curl (1/s)")
    plot_field(right, x, shade=np.where((x < 0.5).all(-1), np.nan, x[:, 1]), colorbar=False)
    plot_streamlines(right, x, flow(x), density=0.5)
    return figure


def comparison():
    figure, axes = plt.subplots(2, 2, layout="compressed", **SMALL)
    x = grid(21)
    mean = flow(x) * [1, 0.8]
    plot_comparison(axes, x, flow(x), mean, 0 * x + 0.1, label="m/s", arrows=10, reference="m/s")
    return figure


def curves():
    figure, (left, right) = plt.subplots(1, 2, layout="constrained", **SMALL)
    pit = np.random.default_rng(0).beta(0.7, 0.7, size=300)
    plot_calibration(left, pit, block=np.repeat(np.arange(3), 100))
    k = np.geomspace(1, 10, 20)
    plot_energy_spectrum(right, k, k**-3, 0.7 * k**-3, 1.5 * k**-3, slopes=[-3])
    return figure


def first_look():
    x = np.random.default_rng(0).uniform(size=(80, 2)) * [2, 1.5]
    figure = overview(Flow(), x, flow(x), points=15, unit="m/s")
    figure.set(figwidth=6, figheight=3, dpi=50)
    return figure


PICTURES = [vectors, scalars, comparison, curves, first_look]


def pixels(figure):
    """The colours (height, width, 3) of a figure without its text, between 0 and 1."""
    for text in figure.findobj(matplotlib.text.Text):
        text.set_text("")
    for key in figure.findobj(matplotlib.quiver.QuiverKey):
        key.text.set_text("")
    for axis in figure.findobj(matplotlib.axis.Axis):
        axis.set_major_formatter(matplotlib.ticker.NullFormatter())
        axis.set_minor_formatter(matplotlib.ticker.NullFormatter())
    figure.canvas.draw()
    return np.asarray(figure.canvas.buffer_rgba())[..., :3] / 255


@pytest.mark.parametrize("draw", PICTURES)
def test_pictures_are_those_that_were_looked_at(draw):
    """Other versions of matplotlib may smooth edges in another way: one pixel in a hundred."""
    figure = draw()
    found, known = pixels(figure), plt.imread(FOLDER / f"{draw.__name__}.png")[..., :3]
    plt.close(figure)
    assert found.shape == known.shape
    different = np.abs(found - known).max(-1) > 0.2
    assert different.mean() < 0.01


def test_a_saved_pdf_has_text_and_an_image_of_the_map():
    (figure, ax), x, file = plt.subplots(), grid(41), io.BytesIO()
    plot_field(ax, x, flow(x), shade=x[:, 0], label="speed (m/s)", reference="m/s")
    figure.savefig(file, format="pdf")
    plt.close(figure)
    written = file.getvalue()
    assert b"/Subtype /Image" in written
    assert b"/Type /Font" in written
    assert b"/ShadingType" not in written  # thousands of triangles, which some viewers draw wrong
    assert len(written) < 300_000


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for draw in PICTURES:
        plt.imsave(FOLDER / f"{draw.__name__}.png", pixels(draw()))
