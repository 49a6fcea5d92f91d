"""A page and a notebook for each script of tutorials/, and a gallery; nothing is executed.

Cells of text become Markdown, cells of code become blocks, and links to scripts lead to the pages.
Cells tagged `remove-cell` are in the notebook, collapsed, and not on the page.
"""

import re
from pathlib import Path

import jupytext
from nbformat import NotebookNode
from sphinx.application import Sphinx

SCRIPTS = sorted((Path(__file__).parents[2] / "tutorials").glob("[0-9]*.py"))
LINK = re.compile(r"(?:\.\./)*tutorials/(\d\d_\w+)\.py(?=\))")
HIDDEN = "remove-cell"  # the tag that Jupyter Book uses too


def notebook(script: Path) -> NotebookNode:
    """The script as a notebook for Jupyter, whose hidden cells are collapsed."""
    result = jupytext.read(script, fmt="py:percent")
    for number, cell in enumerate(result.cells):
        cell.id = f"{script.stem[3:]}-{number}"[-64:]  # jupytext's own are random
        if HIDDEN in cell.metadata.get("tags", []):
            cell.metadata["jupyter"] = {"source_hidden": True}
    name = {"name": "python3", "display_name": "Python 3", "language": "python"}
    result.metadata = {"kernelspec": name, "language_info": {"name": "python"}}
    return result


def image_of(script: Path, suffix: str = "") -> str:
    """The path of a tutorial's figure from its page, or of its card with suffix `_card`."""
    figure = script.parent / "figures" / f"{script.stem[3:]}{suffix}.png"
    return f"../../tutorials/figures/{figure.name}" if figure.exists() else ""


def page(script: Path) -> str:
    """The script as Markdown: its title and first words, the figure, and what follows."""
    cells = [
        cell.source if cell.cell_type == "markdown" else f"```python\n{cell.source}\n```"
        for cell in notebook(script).cells
        if HIDDEN not in cell.metadata.get("tags", [])
    ]
    figure = image_of(script)
    shown = [f"![Figure of the tutorial]({figure})"] if figure else []
    downloads = (
        f"Download: {{download}}`notebook <{script.stem}.ipynb>`, "
        f"{{download}}`script <../../tutorials/{script.name}>`."
    )
    return "\n\n".join([cells[0], *shown, downloads, *cells[1:]]) + "\n"


def card(script: Path) -> str:
    """An entry of the gallery: an image, the title, and the first sentence of the tutorial."""
    title, text = jupytext.read(script, fmt="py:percent").cells[0].source.split("\n\n")[:2]
    sentence = re.match(r".*?[.?](?=\s|$)", text, flags=re.S)[0]
    image = image_of(script, "_card") or image_of(script)
    options = f":img-top: {image}\n:img-alt: \n:link: {script.stem}\n:link-type: doc"
    return f":::{{grid-item-card}} {title.removeprefix('# ')}\n{options}\n\n{sentence}\n:::"


def gallery() -> str:
    """The page of all tutorials: cards, three in a row, one on a telephone."""
    contents = "\n".join(script.stem for script in SCRIPTS)
    cards = "\n\n".join(card(script) for script in SCRIPTS)
    return (
        "---\nhtml_theme.sidebar_secondary.remove: true\n---\n\n# Tutorials\n\n"
        "Each tutorial answers one question. Download it as a notebook or a script, or run it in a "
        "clone: `python tutorials/01_wing_tip_vortex.py`.\n\n"
        f"```{{toctree}}\n:hidden:\n\n{contents}\n```\n\n"
        f"::::{{grid}} 1 2 3 3\n:gutter: 3\n\n{cards}\n\n::::\n"
    )


def write(app: Sphinx) -> None:
    """Write the pages and notebooks that have changed."""
    folder = Path(app.srcdir) / "tutorials"
    folder.mkdir(exist_ok=True)
    files = {"index.md": gallery()}
    for script in SCRIPTS:
        files[f"{script.stem}.md"] = page(script)
        files[f"{script.stem}.ipynb"] = jupytext.writes(notebook(script), fmt="ipynb")
    for name, text in files.items():
        path = folder / name
        if not path.exists() or path.read_text() != text:
            path.write_text(text)


def link(_: Sphinx, document: str, source: list[str]) -> None:
    """Links to scripts, from `document` to their pages."""
    up = "../" * document.count("/")
    source[0] = LINK.sub(rf"{up}tutorials/\1.md", source[0])


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("builder-inited", write)
    app.connect("source-read", link)
    return {"parallel_read_safe": True}
