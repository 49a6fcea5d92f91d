"""Calibration curves and energy spectra."""

import numpy as np
import pytest
import scipy.stats
import torch

from gp_orff.plotting import plot_calibration, plot_energy_spectrum


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
    with pytest.raises(ValueError, match="one for each wavenumber"):
        plot_energy_spectrum(ax, k, k[:3])


def test_slopes_are_named_as_ratios_if_they_are(ax):
    k = np.geomspace(1, 10, 20)
    plot_energy_spectrum(ax, k, k**-3, slopes=[-3, -5 / 3, -1.667])
    assert [text.get_text() for text in ax.texts] == ["−3", "−5/3", "−1.67"]
