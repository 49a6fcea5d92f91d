"""Pages: every block of Python runs, every link works, and the reference has every public name."""

import inspect
import re
import subprocess
import sys
import tomllib
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import gpytorch
import numpy as np
import pytest
import torch

import gp_orff

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").glob("*.md"))
GUIDE = ["fields", "noise", "scale", "gpytorch", "kernels", "frequencies"]
"""Pages that go on where the one before ended."""


def blocks_of(path):
    return re.findall(r"^```python\n(.*?)^```", path.read_text(), flags=re.S | re.M)


ALONE = [
    path for path in PAGES if path.stem not in [*GUIDE, "botorch", "tasks"] and blocks_of(path)
]


def run(page, namespace):
    for block in blocks_of(page):
        exec(compile(block, page.name, "exec"), namespace)
    return namespace


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """Pages read and write files in the current folder."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)


@pytest.mark.slow
@pytest.mark.parametrize("page", [ROOT / "README.md", *ALONE], ids=lambda page: page.stem)
def test_code_of_a_page_runs(page):
    run(page, {})


@pytest.mark.slow
def test_code_of_the_page_on_botorch_runs():
    """In a process of its own: importing BoTorch changes settings of gpytorch for good."""
    if find_spec("botorch") is None:
        pytest.skip("botorch is not installed")
    checks = """
assert posterior.mean.shape == (4, 2)
assert places.shape == (2, 2)
with torch.no_grad():
    start = improvement(torch.rand(64, 2, 2, dtype=torch.float64))
assert value > start.median()
"""
    code = "".join([*blocks_of(ROOT / "docs/botorch.md"), checks])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


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


def write_part(folder):
    """A file of readings, for the page on many of them."""
    xarray = pytest.importorskip("xarray")
    sites = np.linspace(0.0, 1.0, 20)
    u, v = np.sin(6 * np.stack(np.meshgrid(sites, sites)))
    u, v = v, u + 0.1 * np.random.default_rng(0).standard_normal((20, 20))
    dataset = xarray.Dataset({"u": (("y", "x"), u), "v": (("y", "x"), v)}, {"x": sites, "y": sites})
    dataset.to_netcdf(folder / "part.nc", engine="scipy")


@pytest.mark.slow
def test_the_guide_runs(tmp_path):
    write_part(tmp_path)
    with ThreadPoolExecutor(1) as pool:
        client = SimpleNamespace(get_executor=lambda: pool)  # as that of Dask
        namespace = {"folder": tmp_path, "client": client}
        for name in GUIDE:
            run(ROOT / "docs" / f"{name}.md", namespace)


TASKS = blocks_of(ROOT / "docs/tasks.md")


def test_tasks_are_short():
    lines = [[line for line in block.splitlines() if line.strip()] for block in TASKS]
    assert len(TASKS) == 4
    assert all(len(block) <= 22 for block in lines[:3])  # of 72 columns


@pytest.mark.slow
def test_a_month_of_currents_becomes_a_map_of_vorticity(tmp_path):
    currents(np.random.default_rng(0), times=4).to_netcdf("currents.nc", engine="scipy")
    namespace = {}
    exec(compile(TASKS[0], "tasks.md", "exec"), namespace)
    vorticity, sd = namespace["vorticity"], namespace["sd"]
    assert vorticity.attrs["units"] == "s-1"
    assert dict(vorticity.sizes) == {"lon": 6, "lat": 5, "time": 1}
    inside = np.abs(vorticity.values - 2e-5) < 4 * sd.values
    assert inside.mean() > 0.9


@pytest.mark.slow
def test_a_table_becomes_a_map_whose_errors_hold():
    """A rigid rotation: published errors are half the true ones, and some records are copies."""
    pytest.importorskip("pyproj")
    rng = np.random.default_rng(0)
    lon, lat = rng.uniform(7.0, 7.5, 130), rng.uniform(43.0, 43.4, 130)
    east, north = 111.3 * np.cos(np.deg2rad(43.2)) * (lon - 7.25), 111.1 * (lat - 43.2)
    u, v = np.stack([-0.01 * north, 0.01 * east]) + 0.02 * rng.standard_normal((2, 130))
    columns = np.stack([lon, lat, u, v, *np.full((2, 130), 0.01)], axis=-1)
    columns = np.concatenate([columns, columns[:15] + 1e-9 * np.array([1, 1, 0, 0, 0, 0])])
    titles = "lon,lat,u,v,u_se,v_se"
    np.savetxt("stations.csv", columns, delimiter=",", header=titles, comments="")
    namespace = {}
    with pytest.warns(gp_orff.DataWarning, match="copies"):
        exec(compile(TASKS[1].replace(", 40)", ", 12)"), "tasks.md", "exec"), namespace)
    vorticity, sd = namespace["maps"].vorticity, namespace["maps"].vorticity_sd
    assert vorticity.attrs["units"] == "s-1"
    inside = np.abs(vorticity.values - 2e-5) < 4 * sd.values
    assert inside.mean() > 0.9
    scale = namespace["model"].likelihood.noise_scale.item()
    assert 2.9 < scale < 5.1  # 4, from 260 numbers: ± 0.35


@pytest.mark.slow
def test_total_currents_come_from_two_radars():
    rng = np.random.default_rng(0)
    for name, site in {"north": [0.0, 35.0], "south": [-5.0, 5.0]}.items():
        x = rng.uniform(5.0, 35.0, size=(60, 2))
        look = (x - site) / np.linalg.norm(x - site, axis=-1, keepdims=True)
        speed = (look * flow(x)).sum(-1) + 0.02 * rng.standard_normal(60)
        np.savetxt(f"{name}.csv", np.column_stack([x, speed]), delimiter=",")
    namespace = {}
    exec(compile(TASKS[2], "tasks.md", "exec"), namespace)
    error = np.abs(np.asarray(namespace["mean"]) - flow(namespace["x"]))
    assert (error < 4 * np.asarray(namespace["sd"])).mean() > 0.9
    assert np.sqrt((error**2).mean()) < 0.1  # of a flow of 0.4


def flow(x):
    return 0.4 * np.stack([np.sin(x[:, 1] / 8), np.cos(x[:, 0] / 8)], axis=-1)


def test_one_line_of_a_gpytorch_model_changes():
    namespace = {}
    exec(compile(TASKS[3], "tasks.md", "exec"), namespace)
    model = namespace["model"].eval()
    new = torch.rand(100, 2)
    with torch.no_grad():
        error = model(new).mean - torch.sin(6 * new.flip(-1))
    assert error.square().mean().sqrt() < 0.2  # of a field of 0.7


def test_links_of_the_pages_lead_somewhere():
    for page in [ROOT / "README.md", *PAGES]:
        links = re.findall(r"\]\((?!https?://|#)([^)#]+)", page.read_text())
        lost = [link for link in links if not (page.parent / link).exists()]
        assert set(lost) <= {"tutorials/index.md"}, page  # which `make docs` writes


API = sorted((ROOT / "docs/api").glob("*.rst"))


def title(page):
    text = page.read_text()
    found = re.search(r"^# (.*)|^(.+)\n=+$", text, flags=re.M)
    return found[1] or found[2]


def titles():
    """The titles of pages, by path; that of the tutorials is written by `make docs`."""
    pages = [page for page in [*PAGES, *API] if page.stem != "changes"]  # which includes another
    return {page: title(page) for page in pages} | {ROOT / "docs/tutorials/index.md": "Tutorials"}


def test_titles_differ():
    found = list(titles().values())
    assert len(set(found)) == len(found)


def test_links_to_pages_have_their_titles():
    expected = titles()
    for page in [ROOT / "README.md", *PAGES]:
        for text, target in re.findall(r"\[([^\]]*)\]\(([^)#:]+)\)", page.read_text()):
            to = (page.parent / target).resolve()
            if to in expected:
                assert text.casefold() == expected[to].casefold(), (page.name, text)


def test_code_of_the_pages_is_narrow():
    """So that it is not cut; ruff keeps examples in docstrings narrow."""
    for page in [ROOT / "README.md", *PAGES]:
        blocks = re.findall(r"^```[^\n]*\n(.*?)^```", page.read_text(), flags=re.S | re.M)
        lines = [line for block in blocks for line in block.splitlines()]
        assert not [line for line in lines if len(line) > 72], page.name


def test_pages_have_no_marks_of_a_merge():
    files = [path for suffix in ("md", "rst") for path in ROOT.glob(f"docs/**/*.{suffix}")]
    for page in [*files, *ROOT.glob("*.md")]:
        assert not re.findall(r"^(?:<{7}|>{7}) ", page.read_text(), flags=re.M), page.name


def test_columns_of_tables_have_names():
    for page in [ROOT / "README.md", *PAGES]:
        heads = re.findall(r"^\|(.*)\|\n+\|[ :|-]+\|$", page.read_text(), flags=re.M)
        assert not [head for head in heads if not all(map(str.strip, head.split("|")))], page.name


def test_extras_exist():
    """Those of the page on the installation, which users need: all but those for development."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    listed = re.findall(r"^\| `(\w+)` \|", (ROOT / "docs/install.md").read_text(), flags=re.M)
    assert set(listed) == set(extras) - {"benchmarks", "test", "docs", "dev"}


def items_of_papers():
    """The cells of the tables of the page on papers: item, content, name, page and benchmark."""
    text = (ROOT / "docs/papers.md").read_text()
    for table in re.findall(r"^\| item \|.*\n\|-.*\n((?:\|.*\n)+)", text, flags=re.M):
        yield from (line.split("|")[1:-1] for line in table.splitlines())


def test_names_on_the_page_of_papers_exist():
    """With the arguments that the page gives them; and every benchmark of a paper is there."""
    items = list(items_of_papers())
    assert all(len(item) == 5 for item in items)
    for name in re.findall("`([^`]+)`", " ".join(item[2] for item in items)):
        path, _, arguments = name.partition("(")
        value = gpytorch if path.startswith("gpytorch.") else gp_orff
        for part in path.removeprefix("gpytorch.").split("."):
            value = getattr(value, part)
        given = re.findall(r"(\w+)=", arguments)
        assert set(given) <= set(inspect.signature(value).parameters), name
    named = set(re.findall("`([^`]+)`", " ".join(item[4] for item in items)))
    for folder, suffix in (("benchmarks", "py"), ("benchmarks/results", "json")):
        files = (ROOT / folder / "papers").glob(f"[!_]*.{suffix}")
        assert {file.stem for file in files} == named


def documented():
    """What the entries of docs/api name, but those of BoTorch, whose import changes settings."""
    for page in {*(ROOT / "docs/api").glob("*.rst")} - {ROOT / "docs/api/botorch.rst"}:
        module = None
        for kind, name in re.findall(r"^\.\. (\w+):: (\S+)", page.read_text(), flags=re.M):
            if kind in ("automodule", "currentmodule"):
                module = import_module(name)
                yield module
            elif kind.startswith("auto"):
                yield getattr(module, name)


def public():
    """The full names of what the package and its public modules offer."""
    for name in gp_orff.__all__:
        value = getattr(gp_orff, name)
        yield f"gp_orff.{name}", value
        if inspect.ismodule(value):
            for inner in getattr(value, "__all__", [n for n in vars(value) if n[0] != "_"]):
                yield f"gp_orff.{name}.{inner}", getattr(value, inner)
    for name in gp_orff.labelled.__all__:
        yield f"gp_orff.labelled.{name}", getattr(gp_orff.labelled, name)


def test_the_reference_has_every_public_name():
    there = {id(value) for value in documented()}
    assert not [name for name, value in public() if written_here(value) and id(value) not in there]


def written_here(value):
    """Whether a public module defines a name, rather than importing it from elsewhere."""
    return inspect.ismodule(value) or getattr(value, "__module__", "").startswith("gp_orff")


def test_every_public_name_has_an_example():
    lacking = [
        name
        for name, value in public()
        if written_here(value)
        and not inspect.ismodule(value)
        and not (inspect.isclass(value) and issubclass(value, Warning))
        and ">>>" not in (inspect.getdoc(value) or "")
    ]
    assert not lacking


def test_every_file_tells_the_same_version():
    told = [
        re.search(r"version = \{(.*)\}", (ROOT / "docs/citing.md").read_text())[1],
        re.search(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(), flags=re.M)[1],
        re.search(r'set version = "(.*)"', (ROOT / "conda/meta.yaml").read_text())[1],
        re.search(r"^## (\d\S+)", (ROOT / "CHANGELOG.md").read_text(), flags=re.M)[1],
    ]
    assert told == [gp_orff.__version__] * 4


def test_the_conda_recipe_asks_for_what_the_package_asks():
    text = (ROOT / "pyproject.toml").read_text()
    asked = re.search(r"^dependencies = \[(.*?)^\]", text, flags=re.S | re.M)[1]
    asked = {entry.replace(" ", "") for entry in re.findall(r'"(.*?)"', asked)}
    names = {"pytorch": "torch", "python-finufft": "finufft"}  # those of conda-forge
    run = (ROOT / "conda/meta.yaml").read_text().split("  run:\n")[1].split("\n\n")[0]
    recipe = [line.removeprefix("    - ").split() for line in run.splitlines()]
    assert {"".join([names.get(name, name), *rest]) for name, *rest in recipe[1:]} == asked


def test_the_page_of_versions_tells_those_of_the_constraints():
    page = (ROOT / "docs/compatibility.md").read_text()
    rows = re.findall(r"^\| ([\w-]+)[^|]*\|[^|]*\| ([\d.]+) \|$", page, flags=re.M)
    text = (ROOT / "constraints.txt").read_text()
    pins = dict(re.findall(r"^([\w-]+)==([\d.]+)", text, flags=re.M))
    assert len(rows) == 20
    assert all(pins[name.lower()] == version for name, version in rows if name != "Python")
