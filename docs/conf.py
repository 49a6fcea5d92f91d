"""The site: `make docs` writes it to docs/build, offline, with warnings as errors."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "extensions"))

import gp_orff

project = "gp_orff"
author = "The gp_orff authors"
copyright = author
release = version = gp_orff.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.intersphinx",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_design",
    "mathml",
    "plain_docstrings",
    "tutorial_pages",
]
ELSEWHERE = {
    "python": "https://docs.python.org/3/",
    "numpy": "https://numpy.org/doc/stable/",
    "torch": "https://docs.pytorch.org/docs/stable/",
    "gpytorch": "https://docs.gpytorch.ai/en/stable/",
}
# NAME.inv: links to NAME, read from here only
inventories = Path(__file__).parent / "inventories"
intersphinx_mapping = {
    name: (address, str(inventories / f"{name}.inv"))
    for name, address in ELSEWHERE.items()
    if (inventories / f"{name}.inv").exists()
}

myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 3
exclude_patterns = ["build", "inventories"]

default_role = "py:obj"
toc_object_entries_show_parents = "hide"
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True, "show-inheritance": True}
autodoc_typehints_format = "short"
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True

html_math_renderer = "mathml"
html_title = project
html_theme = "pydata_sphinx_theme"
html_theme_options = {
    "show_toc_level": 2,
    "navigation_with_keys": False,
    "navbar_align": "left",
    "navigation_depth": 2,
}
WIDE = ("index", "tutorials/index")  # these pages have no sidebars
html_sidebars = {page: [] for page in (*WIDE, "search", "_modules/**")}
html_static_path = ["static"]
html_css_files = ["site.css"]
