"""Pages: every block of Python runs, links lead somewhere, and the reference names all there is."""

import inspect
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import gp_orff

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs").glob("*.md"))
GUIDE = ["fields", "noise", "gpytorch", "kernels", "frequencies", "scale"]
"""Pages that go on where the one before ended."""


def blocks_of(path):
    return re.findall(r"^```python\n(.*?)^```", path.read_text(), flags=re.S | re.M)


ALONE = [path for path in PAGES if path.stem not in [*GUIDE, "tasks"] and blocks_of(path)]


def run(page, namespace):
    for block in blocks_of(page):
        exec(compile(block, page.name, "exec"), namespace)
    return namespace


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """Pages read and write files in the current folder."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)


@pytest.mark.parametrize("page", [ROOT / "README.md", *ALONE], ids=lambda page: page.stem)
def test_code_of_a_page_runs(page):
    if page.stem == "botorch":
        pytest.importorskip("botorch")
    run(page, {})


def currents(rng, times):
    """Currents on a grid, in m/s, with an island and gaps."""
    xarray = pytest.importorskip("xarray")
    lon, lat = np.linspace(7.0, 7.5, 6), np.linspace(43.0, 43.4, 5)
    time = np.datetime64("2024-05-01") + np.arange(times) * np.timedelta64(1, "D")
    east, north = 80 * (lon - 7.25), (111 * (lat - 43.2))[:, None]
    u, v = np.broadcast_arrays(-0.01 * north, 0.01 * east)  # a vorticity of 2e-5 s-1
    fields = {}
    for name, values in {"u": u, "v": v}.items():
        values = values + 0.01 * rng.standard_normal((times, 5, 6))
        values[:, 2, 2] = np.nan
        fields[name] = (("time", "lat", "lon"), values, {"units": "m s-1"})
    fields["v"][1][1, 0] = fields["u"][1][1, 0] = np.nan
    degrees = {"lon": "degrees_east", "lat": "degrees_north"}
    axes = {"lon": lon, "lat": lat, "time": time}
    dataset = xarray.Dataset(fields, axes)
    for name, units in degrees.items():
        dataset[name].attrs["units"] = units
    return dataset


def test_the_guide_runs(tmp_path):
    xarray = pytest.importorskip("xarray")
    namespace = {}
    for name in GUIDE[:-1]:
        run(ROOT / "docs" / f"{name}.md", namespace)

    sites = np.linspace(0.0, 1.0, 8)
    u, v = np.random.default_rng(0).standard_normal((2, 8, 8))
    dataset = xarray.Dataset(
        {"u": (("y", "x"), u), "v": (("y", "x"), v)}, {"x": sites, "y": sites}
    )
    dataset.to_netcdf(tmp_path / "part.nc", engine="scipy")
    with ThreadPoolExecutor(1) as pool:
        client = SimpleNamespace(get_executor=lambda: pool)  # as that of Dask
        run(ROOT / "docs/scale.md", {**namespace, "folder": tmp_path, "client": client})


TASKS = blocks_of(ROOT / "docs/tasks.md")


def test_three_tasks_are_short():
    lines = [[line for line in block.splitlines() if line.strip()] for block in TASKS]
    assert len(TASKS) == 3
    assert all(len(block) <= 15 for block in lines[:2])


def test_a_month_of_currents_becomes_a_map_of_vorticity(tmp_path):
    currents(np.random.default_rng(0), times=4).to_netcdf("currents.nc", engine="scipy")
    namespace = {}
    exec(compile(TASKS[0], "tasks.md", "exec"), namespace)
    vorticity, sd = namespace["vorticity"], namespace["sd"]
    assert vorticity.attrs["units"] == "s-1"
    assert vorticity.shape[-2:] == (5, 6)
    inside = np.abs(vorticity.values - 2e-5) < 4 * sd.values
    assert inside.mean() > 0.9


def test_total_currents_come_from_two_radars():
    rng = np.random.default_rng(0)
    for name, site in {"north": [0.0, 35.0], "south": [-5.0, 5.0]}.items():
        x = rng.uniform(5.0, 35.0, size=(60, 2))
        look = (x - site) / np.linalg.norm(x - site, axis=-1, keepdims=True)
        speed = (look * flow(x)).sum(-1) + 0.02 * rng.standard_normal(60)
        np.savetxt(f"{name}.csv", np.column_stack([x, speed]), delimiter=",")
    namespace = {}
    exec(compile(TASKS[1], "tasks.md", "exec"), namespace)
    error = np.abs(np.asarray(namespace["mean"]) - flow(namespace["x"]))
    assert (error < 4 * np.asarray(namespace["sd"])).mean() > 0.9
    assert np.sqrt((error**2).mean()) < 0.1  # of a flow of 0.4


def flow(x):
    return 0.4 * np.stack([np.sin(x[:, 1] / 8), np.cos(x[:, 0] / 8)], axis=-1)


def test_one_line_of_a_gpytorch_model_changes():
    import gpytorch

    x = torch.rand(40, 2)
    y = torch.sin(6 * x.flip(-1)) + 0.1 * torch.randn(40, 2)
    namespace = {**vars(gpytorch.kernels), **vars(gpytorch.means), **vars(gpytorch.likelihoods)}
    namespace |= {**vars(gpytorch.distributions), "gpytorch": gpytorch, "gp_orff": gp_orff}
    namespace |= {"torch": torch, "x": x, "y": y}
    exec(compile(TASKS[2], "tasks.md", "exec"), namespace)
    model = namespace["model"].eval()
    with torch.no_grad(), gpytorch.settings.fast_pred_var():
        error = model(x).mean - torch.sin(6 * x.flip(-1))
    assert error.square().mean().sqrt() < 0.15  # of a field of 0.7
