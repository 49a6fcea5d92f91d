"""The shape of the package: imports run one way, everything exported is tested and documented."""

import ast
import doctest
import inspect
import re
import subprocess
import sys
from pathlib import Path

import gpytorch
import pytest

import gp_orff
from gp_orff.terms import inner_terms, terms
from tests import registry

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "gp_orff"
ORDER = [  # a module may import from those before it
    "settings",
    "threads",
    "cholesky",
    "scalar_kernels",
    "lengths",
    "scale_mixture",
    "spectra",
    "cells",
    "factors",
    "terms",
    "strategies",
    "wrapper",
    "trig",
    "columns",
    "nufft",
    "lattice",
    "frequencies",
    "kernels",
    "products",
    "patches",
    "symbols",
    "expansion",
    "resolution",
    "truncation",
    "patterns",
    "statistics",
    "quadratic",
    "inference",
    "posterior",
    "symbol_moments",
    "exact_symbols",
    "trust",
    "operators",
    "distances",
    "ranges",
    "coordinates",
    "noise",
    "likelihoods",
    "instruments",
    "recipes",
    "readings",
    "matching",
    "further",
    "sources",
    "defaults",
    "field_statistics",
    "data",
    "storage",
    "observations",
    "orff_kernel",
    "snapshot",
    "paths",
    "labelled",
    "field",
    "robust",
    "starting",
    "training",
    "fitting",
    "models",
    "comparison",
    "gpytorch_hooks",
    "__init__",
    "plotting",
]


def imported_modules(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("gp_orff"):
            parts = node.module.split(".")
            names = [parts[1]] if len(parts) > 1 else [alias.name for alias in node.names]
            yield from names
        elif isinstance(node, ast.Import):
            yield from (a.name.split(".")[1] for a in node.names if a.name.startswith("gp_orff."))


def sources():
    return sorted(PACKAGE.rglob("*.py"))


def module_of(path):
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def test_every_module_has_its_place():
    assert {module_of(path) for path in sources()} == set(ORDER)


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_run_one_way(path):
    own = module_of(path)
    for name in imported_modules(path):
        assert name == own or ORDER.index(name) < ORDER.index(own)
        assert name != "plotting"


def test_importing_warns_of_nothing():
    """Not of what linear_operator does while it is imported, of any category."""
    command = [sys.executable, "-W", "error", "-c", "import gp_orff"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def exported(kind):
    found = {name: getattr(gp_orff, name) for name in gp_orff.__all__}
    return {n: value for n, value in found.items() if inspect.isclass(value) and kind(value)}


def test_every_exported_kernel_is_in_the_registry():
    kernels = exported(lambda cls: issubclass(cls, gpytorch.kernels.Kernel))
    tested = {type(m) for case in registry.CASES.values() for m in case().kernel.modules()}
    assert set(kernels.values()) - {gp_orff.ORFFKernel} <= tested  # which wraps every case


def test_every_known_composition_is_in_the_registry():
    tested = {type(m) for case in registry.CASES.values() for m in case().kernel.modules()}
    for cls in inner_terms.registry:
        assert cls is object or any(issubclass(kind, cls) for kind in tested), cls


def test_every_radial_derivative_is_in_the_registry():
    unknown = gp_orff.radial_derivatives.dispatch(object)
    known = {c for c, f in gp_orff.radial_derivatives.registry.items() if f is not unknown}
    known = {cls for cls in known if cls.__name__ != "Cauchy"}  # of the docstring's example
    assert known == {type(registry.SPECTRA[name]()) for name in registry.SMOOTH}


def test_every_exported_rule_is_in_the_registry():
    rules = exported(lambda cls: hasattr(cls, "draw"))
    tested = {**registry.RULES, **registry.DETERMINISTIC_RULES}
    assert set(rules.values()) == {type(rule(8)) for rule in tested.values()}


def test_every_exported_symbol_is_in_the_registry():
    symbols = exported(lambda cls: issubclass(cls, gp_orff.Symbol))
    tested = {type(build(2, 2)) for build in registry.SYMBOLS.values()}
    assert set(symbols.values()) - {gp_orff.Symbol} == tested


def test_every_known_spectrum_is_in_the_registry():
    unknown = gp_orff.spectrum.dispatch(object)
    known = {c for c, law in gp_orff.spectrum.registry.items() if law is not unknown}
    examples = {"MyKernel", "Mine"}  # of a docstring, of a test
    known = {cls for cls in known if cls.__name__ not in examples}
    leaves = {
        type(leaf.kernel)
        for build in registry.SPECTRA.values()
        for term in terms(build(ard_num_dims=2))
        for leaf in term.leaves
    }
    assert known == leaves


@pytest.mark.parametrize("name", gp_orff.__all__)
def test_public_names_have_an_example(name):
    if inspect.ismodule(getattr(gp_orff, name)) or name.endswith("Warning"):
        return
    documented = inspect.getdoc(getattr(gp_orff, name))
    assert doctest.DocTestParser().get_examples(documented), name


def readme_blocks():
    return re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.S)


def test_the_readme_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # it writes a file
    namespace = {}
    blocks = readme_blocks()
    assert blocks
    for block in blocks:
        exec(compile(block, "README.md", "exec"), namespace)
