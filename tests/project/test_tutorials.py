"""Tutorials: cells, cards and notebooks; `make tutorials` runs the scripts."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted((ROOT / "tutorials").glob("[0-9]*.py"))
CELL = re.compile(r"^# %%(.*)\n", flags=re.MULTILINE)
AS_JUPYTER = """
import json, sys
namespace = {"__name__": "__main__"}
for cell in json.load(open(sys.argv.pop(1)))["cells"]:
    if cell["cell_type"] == "code":
        exec("".join(cell["source"]), namespace)
"""
each = pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)


@pytest.fixture
def pages(monkeypatch):
    """The extension of the site that makes pages and notebooks."""
    for package in ("jupytext", "sphinx"):
        pytest.importorskip(package)
    monkeypatch.syspath_prepend(ROOT / "docs/extensions")
    import tutorial_pages

    return tutorial_pages


def code_of(script):
    """The kinds and texts of the cells of code."""
    _, *parts = CELL.split(script.read_text())
    cells = zip(parts[::2], parts[1::2], strict=True)
    return [(kind, body) for kind, body in cells if "[markdown]" not in kind]


@each
def test_options_are_in_hidden_cells(script):
    shown = "".join(body for kind, body in code_of(script) if 'tags=["remove-cell"]' not in kind)
    assert not re.findall(r"\b(?:argparse|arguments|parser)\b|__file__|smoke", shown)
    assert max(map(len, shown.splitlines())) <= 100


@each
def test_tutorials_begin_with_lines_to_copy(script):
    first = CELL.split(script.read_text())[2]
    lines = re.search(r"^# ```python\n(.*?)^# ```", first, flags=re.S | re.M)[1].splitlines()
    assert len(lines) <= 15
    assert max(len(line.removeprefix("# ")) for line in lines) <= 72


def test_every_tutorial_has_a_figure(pages):
    assert all(pages.image_of(script) for script in SCRIPTS)
    assert all(pages.image_of(script, "_card") for script in SCRIPTS)


def test_hidden_cells_are_in_the_notebook_but_not_on_the_page(pages):
    script = SCRIPTS[0]
    cells = pages.notebook(script).cells
    assert "argparse" in "".join(cell.source for cell in cells)
    assert "argparse" not in pages.page(script)
    assert [cell.source for cell in cells if cell.cell_type == "code"] == [
        body.strip() for _, body in code_of(script)
    ]


@pytest.mark.slow
def test_a_notebook_runs_in_jupyter(pages, tmp_path):
    """With the arguments of a kernel, next to the folder of data, and without a `__file__`. CI runs
    the scripts of all tutorials."""
    script = SCRIPTS[1]
    (tmp_path / "data").symlink_to(ROOT / "tutorials/data")
    path = tmp_path / f"{script.stem}.ipynb"
    path.write_text(pages.jupytext.writes(pages.notebook(script), fmt="ipynb"))
    options = [path, "-f", "kernel.json", "--f=kernel.json", "--smoke"]
    done = subprocess.run(
        [sys.executable, "-c", AS_JUPYTER, *options],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "MPLBACKEND": "agg", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert list((tmp_path / "tutorials/output").glob("*_card.png"))
