"""A page for each script of tutorials/, with its recorded figure; nothing is executed.

Cells of text become Markdown, cells of code become blocks, and links to scripts lead to the pages.
"""

import re
from pathlib import Path

from sphinx.application import Sphinx

SCRIPTS = sorted((Path(__file__).parents[2] / "tutorials").glob("[0-9]*.py"))
CELL = re.compile(r"^# %%(.*)\n", flags=re.MULTILINE)
LINK = re.compile(r"(?:\.\./)*tutorials/(\d\d_\w+)\.py(?=\))")


def figure_of(script: Path) -> Path | None:
    """The figure that is kept for a tutorial, if there is one."""
    figure = script.parent / "figures" / f"{script.stem[3:]}.png"
    return figure if figure.exists() else None


def page(script: Path) -> str:
    """The script as Markdown: its title and first words, the figure, and what follows."""
    _, *parts = CELL.split(script.read_text())
    cells = [
        _text(body) if "[markdown]" in kind else f"```python\n{body.strip()}\n```"
        for kind, body in zip(parts[::2], parts[1::2], strict=True)
    ]
    figure = figure_of(script)
    shown = [f"![What the tutorial draws](../../tutorials/figures/{figure.name})"] if figure else []
    download = f"{{download}}`Download the script <../../tutorials/{script.name}>`"
    return "\n\n".join([cells[0], *shown, download, *cells[1:]]) + "\n"


def gallery() -> str:
    """The list of all tutorials, with their figures."""
    entries = []
    for script in SCRIPTS:
        figure = figure_of(script)
        shown = f'<img src="../_images/{figure.name}" alt="" width="320">' if figure else ""
        entries.append(f"{shown}\n\n[]({script.stem}.md)")
    contents = "\n".join(script.stem for script in SCRIPTS)
    return (
        "# Tutorials\n\nEach is a script of one question, and runs as it is: "
        "`python tutorials/01_wing_tip_vortex.py`. Figures are those of full runs.\n\n"
        f"```{{toctree}}\n:hidden:\n\n{contents}\n```\n\n" + "\n\n".join(entries) + "\n"
    )


def write(app: Sphinx) -> None:
    """Write the pages that have changed."""
    folder = Path(app.srcdir) / "tutorials"
    folder.mkdir(exist_ok=True)
    pages = {script.stem: page(script) for script in SCRIPTS}
    for name, text in {**pages, "index": gallery()}.items():
        path = folder / f"{name}.md"
        if not path.exists() or path.read_text() != text:
            path.write_text(text)


def link(_: Sphinx, document: str, source: list[str]) -> None:
    """Links to scripts, from `document` to their pages."""
    up = "../" * document.count("/")
    source[0] = LINK.sub(rf"{up}tutorials/\1.md", source[0])


def _text(cell: str) -> str:
    return "\n".join(line.removeprefix("#").removeprefix(" ") for line in cell.strip().split("\n"))


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("builder-inited", write)
    app.connect("source-read", link)
    return {"parallel_read_safe": True}
