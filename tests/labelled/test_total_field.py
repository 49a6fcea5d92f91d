"""Total-field anomalies, compared with the IGRF and with the geometry of the field."""

import sys
from datetime import date, datetime

import numpy as np
import ppigrf
import pytest
import xarray as xr

import gp_orff
from gp_orff.labelled import total_field

EPOCH = datetime(2015, 7, 2, 12)  # the middle of 2015


def survey(centre=(-42.5, -22.3), half=(0.3, 0.3), count=80, highest=3000.0):
    numbers = np.random.default_rng(0)
    places = np.array(centre) + np.array(half) * numbers.uniform(-1, 1, (count, 2))
    columns = {
        "longitude": places[:, 0],
        "latitude": places[:, 1],
        "height": numbers.uniform(0, highest, count),
        "line": np.arange(count) // 10,
    }
    columns = {name: ("reading", own) for name, own in columns.items()}
    return xr.Dataset({"anomaly": ("reading", numbers.normal(size=count))}, columns)


@pytest.mark.parametrize(
    ("centre", "half", "highest"),
    [
        ((-42.5, -22.3), (0.3, 0.3), 3000.0),
        ((100.0, 0.0), (9.0, 8.0), 500e3),
        ((20.0, 86.0), (170.0, 3.5), 9000.0),
        ((179.9, -45.0), (6.0, 3.0), 0.0),
    ],
    ids=["small", "large and high", "around the pole", "across the date line"],
)
def test_directions_are_those_of_the_main_field(centre, half, highest):
    """At every reading, turned by the image of a step to the north; 1e-7 as the docstring says."""
    ds = survey(centre, half, highest=highest)
    x, y, options, plane = total_field(ds, date="2015-07-02T12:00")
    places = np.stack([ds["longitude"], ds["latitude"]], axis=-1)
    km = ds["height"].to_numpy() / 1000
    east, north, up = (own[0] for own in ppigrf.igrf(*places.T, km, EPOCH))
    step = np.array([0, 1e-4])
    axis = plane.forward(places + step) - plane.forward(places - step)
    axis /= np.linalg.norm(axis, axis=-1, keepdims=True)
    turned = east[:, None] * np.stack([axis[:, 1], -axis[:, 0]], axis=-1) + north[:, None] * axis
    field = np.column_stack([turned, up])
    expected = field / np.linalg.norm(field, axis=-1, keepdims=True)
    np.testing.assert_allclose(options["directions"], expected, rtol=0, atol=1e-7)
    np.testing.assert_allclose(np.linalg.norm(options["directions"], axis=-1), 1, atol=1e-14)
    np.testing.assert_allclose(x, np.column_stack([plane.forward(places), km]), atol=1e-12)
    np.testing.assert_array_equal(y, ds["anomaly"])


def test_what_the_linearisation_leaves_out():
    """0 ≤ |B₀ + b| − |B₀| − u·b ≤ |b|²/(2|B₀|), for fields of up to a tenth of |B₀|."""
    ds = survey()
    *_, options, _ = total_field(ds, date=EPOCH)
    main = 24000.0 * options["directions"]
    anomalies = np.random.default_rng(1).normal(size=main.shape)
    anomalies *= np.geomspace(1, 2400, len(main))[:, None] / np.linalg.norm(
        anomalies, axis=-1, keepdims=True
    )
    total = np.linalg.norm(main + anomalies, axis=-1) - 24000.0
    error = total - (options["directions"] * anomalies).sum(-1)
    bound = (anomalies**2).sum(-1) / (2 * 24000.0)
    assert (error > -1e-9).all()
    assert (error < bound + 1e-9).all()
    assert (error / bound).max() > 0.9  # the bound is no larger than it has to be


def test_arguments_of_fit():
    """Labels of tracks and noise beside directions; a model takes directions as they are."""
    ds = survey().assign(var=("reading", np.full(80, 0.1)))
    x, y, options, plane = total_field(ds, date=2015.5, track="line", noise="var")
    assert sorted(options) == ["directions", "noise", "track"]
    model = gp_orff.VectorFieldGP(gp_orff.CurlFreeKernel(num_dims=3))
    model.condition(x, y, directions=options["directions"])
    along = (model.posterior().mean(x).numpy() * options["directions"]).sum(-1)
    assert np.corrcoef(along, y)[0, 1] > 0.9
    axes = {"lon": [-42.5], "lat": [-22.4, -22.3], "height": [1.0]}
    attrs = {name: {"units": "nT"} for name in ("east", "north", "up")}
    symbols = {"potential": gp_orff.Potential(), "gradient": gp_orff.Jacobian()}
    maps = model.posterior().to_xarray(
        axes, names=list(attrs), attrs=attrs, symbols=symbols, project=plane
    )
    assert maps["potential"].attrs["units"] == "nT km"
    assert maps["gradient_9"].attrs["units"] == "nT km-1"


@pytest.fixture(scope="module")
def on_epoch():
    return total_field(survey(), date=EPOCH)[2]["directions"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "moment",
    [
        2015.5,
        np.float64(2015.5),
        "2015-07-02T12:00",
        EPOCH,
        np.datetime64("2015-07-02T12:00:00.000"),
        date(2015, 7, 2),
    ],
    ids=repr,
)
def test_forms_of_a_date(moment, on_epoch):
    """A day changes directions by less than 1e-5."""
    *_, options, _ = total_field(survey(), date=moment)
    np.testing.assert_allclose(options["directions"], on_epoch, rtol=0, atol=1e-5)


def test_names_and_units_of_heights():
    ds = survey()
    x, *_ = total_field(ds, date=EPOCH)
    kilometres = ds.assign_coords(h=(ds["height"] / 1000).assign_attrs(units="km"))
    again, *_ = total_field(kilometres, "anomaly", ("longitude", "latitude", "h"), date=EPOCH)
    np.testing.assert_allclose(again, x, atol=1e-12)
    other = total_field(ds, date=EPOCH, project="EPSG:31983")
    assert other[-1].crs == "EPSG:31983"


WRONG = [
    ({"date": 1850.0}, ValueError, "covers, from 1900 to 2029, got 1850-01-01"),
    ({"date": "2035-01-01"}, ValueError, "got 2035-01-01"),
    ({"anomaly": "tfa"}, KeyError, "tfa"),
    ({"coordinates": ("longitude", "latitude")}, ValueError, "longitude, latitude and height"),
    ({"coordinates": ("longitude", "latitude", "depth")}, ValueError, "positive upward, got.*down"),
    ({"coordinates": ("longitude", "latitude", "pressure")}, ValueError, "height in m or km.*hPa"),
    ({"dataset": [1.0]}, TypeError, "xarray Dataset, got list"),
]


@pytest.mark.parametrize(("wrong", "error", "message"), WRONG)
def test_what_is_no_survey(wrong, error, message):
    ds = survey()
    ds = ds.assign_coords(depth=ds["height"].assign_attrs(positive="down"))
    ds = ds.assign_coords(pressure=ds["height"].assign_attrs(units="hPa"))
    with pytest.raises(error, match=message):
        total_field(**{"dataset": ds, "date": EPOCH, **wrong})


def test_without_ppigrf(monkeypatch):
    monkeypatch.setitem(sys.modules, "ppigrf", None)
    with pytest.raises(ImportError, match=r"pip install gp_orff\[geomag\]"):
        total_field(survey(), date=EPOCH)
