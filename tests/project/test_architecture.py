"""The structure of the package: imports have one direction, and every exported name is tested."""

import ast
import builtins
import inspect
import subprocess
import symtable
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import gpytorch
import pytest

import gp_orff
from gp_orff.kernels.spectra import RadialKernel
from gp_orff.kernels.tree import inner_terms, terms
from tests.support import registry

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "gp_orff"
ROOMS = [
    "symbols",
    "kernels",
    "features",
    "data",
    "inference",
    "exact_gp",
    "fitting",
    "models",
]
"""A room may import from those before it, from the settings, nufft and threads."""
BESIDE = {
    "bounds": ["kernels", "features"],
    "regression": ROOMS[:-2],
    "labelled": ["symbols", "data"],
    "plotting": ["symbols"],
}
"""Rooms beside the row: what they may import; of the others, only models imports labelled."""
LEAVES = {
    "settings": set(),
    "nufft": set(),
    "threads": {"settings"},
    "versions": set(),
    "spectra": {"kernels"},
    "command_line": set(),
    "botorch": {"kernels", "features", "data", "exact_gp", "fitting"},
}


def module_of(path):
    """kernels.spectra of gp_orff/kernels/spectra.py."""
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")


SOURCES = {module_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}
TREES = {name: ast.parse(path.read_text()) for name, path in SOURCES.items()}


def room_of(name):
    return name.split(".")[0]


def imported_modules(name):
    """The modules of this package that one imports, as they are imported."""
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.ImportFrom) and node.module.split(".")[0] == "gp_orff":
            package = ".".join(node.module.split(".")[1:])
            for alias in node.names:
                whole = f"{package}.{alias.name}".strip(".")
                yield whole if whole in SOURCES else package
        elif isinstance(node, ast.Import):
            yield from (a.name[8:] for a in node.names if a.name.startswith("gp_orff."))


def test_every_module_is_in_a_room():
    assert {room_of(name) for name in SOURCES} == {*ROOMS, *BESIDE, *LEAVES, "__init__"}


def allowed_rooms(room):
    known = {**LEAVES, **BESIDE}
    before = known[room] if room in known else ROOMS[: ROOMS.index(room)]
    also = {"labelled"} if room == "models" else set()
    return {*before, room, "settings", "nufft", "threads"} | also


def test_imports_run_one_way():
    assert not {
        (name, other)
        for name in SOURCES
        if name != "__init__"
        for other in imported_modules(name)
        if room_of(other) not in allowed_rooms(room_of(name))
    }


def test_no_circle_of_modules():
    needs = {name: set(imported_modules(name)) - {name, "__init__"} for name in SOURCES}
    TopologicalSorter(needs).prepare()  # raises CycleError


def test_rooms_are_folders_without_inner_folders():
    depths = {len(path.relative_to(PACKAGE).parts) for path in SOURCES.values()}
    assert depths == {1, 2}


def test_no_circle_of_rooms():
    """A room, or a file beside the rooms, may need those that do not need it."""
    needs = {room_of(name): set() for name in SOURCES if name != "__init__"}
    for name in SOURCES:
        if name != "__init__":
            needs[room_of(name)] |= {room_of(other) for other in imported_modules(name)}
    order = TopologicalSorter({room: rooms - {room} for room, rooms in needs.items()})
    order.prepare()  # raises CycleError


def test_only_leaves_stand_beside_the_rooms():
    assert {path.stem for path in SOURCES.values() if path.parent == PACKAGE} == {
        *LEAVES,
        "__init__",
    }


def private(name):
    return name.startswith("_") and not name.endswith("_")


@cache
def defined_in(name):
    """Private names that a module gives to functions, classes, methods, fields, attributes."""
    found = set()
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.attr)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return {own for own in found if private(own)}


def private_names(tree):
    """Private names that a module imports, and private attributes of other objects than self."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and private(node.attr):
            if not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")):
                yield node.attr
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("gp_orff"):
            yield from (alias.name for alias in node.names if private(alias.name))


def test_no_module_uses_private_names_of_another():
    hidden = set().union(*map(defined_in, SOURCES))
    assert not {
        (name, own)
        for name, tree in TREES.items()
        for own in private_names(tree)
        if own in hidden - defined_in(name)
    }


def test_no_zip_ends_with_the_shortest():
    """What should have one entry for each part, and has another number of them, raises."""

    def is_lax(call):
        strict = [getattr(word.value, "value", None) for word in call.keywords]
        return getattr(call.func, "id", None) == "zip" and strict != [True]

    assert not [
        (name, node.lineno)
        for name, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and is_lax(node)
    ]


@pytest.mark.slow
def test_importing_warns_of_nothing_and_leaves_extras_alone():
    """Not of what linear_operator does while it is imported, of any category; scipy's parts, which
    take a third of a second, are imported when they are used."""
    code = (
        "import sys, gp_orff; gp_orff.plotting.plot_map\n"
        "extras = {'matplotlib', 'sklearn', 'xarray', 'pandas', 'pyproj', 'ppigrf'}\n"
        "extras |= {'dask', 'distributed', 'zarr'}\n"
        "extras |= {f'scipy.{part}' for part in ('special', 'optimize', 'spatial', 'stats')}\n"
        "assert not extras & set(sys.modules)"
    )
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_no_test_uses_private_names_of_the_package():
    """Sizes at which an algorithm changes are set by their names."""
    hidden = {own for name in SOURCES for own in defined_in(name) if not own.isupper()}
    assert not {
        (name, own) for name, tree in TESTS.items() for own in private_names(tree) if own in hidden
    }


TESTS = {path.name: ast.parse(path.read_text()) for path in ROOT.glob("tests/**/test_*.py")}


def test_no_test_module_imports_another():
    """What they share is in `tests/support` and conftest."""

    def names(node):
        return [getattr(node, "module", None) or "", *(alias.name for alias in node.names)]

    assert not {
        (name, own)
        for name, tree in TESTS.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom | ast.Import)
        for own in names(node)
        if own.rpartition(".")[2].startswith("test_")
    }


def leaves_early(node):
    """Statements that end a test, or a branch of it, without a word; not of functions inside."""
    for own in ast.iter_child_nodes(node):
        if isinstance(own, ast.Return | ast.Pass):
            yield own.lineno
        elif not isinstance(own, ast.FunctionDef | ast.ClassDef | ast.Lambda):
            yield from leaves_early(own)


def test_no_test_passes_silently():
    """What does not apply is not among the parameters, or is asserted to be so."""
    assert not {
        (name, node.name, line)
        for name, tree in TESTS.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
        for line in leaves_early(node)
    }


def exported(kind):
    found = {name: getattr(gp_orff, name) for name in gp_orff.__all__}
    return {n: value for n, value in found.items() if inspect.isclass(value) and kind(value)}


def radial_kernels():
    """Those of the package: tests define others."""
    return {cls for cls in RadialKernel.__subclasses__() if cls.__module__.startswith("gp_orff")}


def test_every_exported_kernel_is_in_the_registry():
    kernels = exported(lambda cls: issubclass(cls, gpytorch.kernels.Kernel))
    tested = {type(m) for case in registry.CASES.values() for m in case().kernel.modules()}
    tested |= {type(build(2)) for build in registry.DOT_PRODUCTS.values()}
    tested |= {type(build()) for build in registry.HARMONIC.values()}
    tested |= {type(build()) for build in registry.TRAINED_DENSITY.values()}
    assert set(kernels.values()) - {gp_orff.ORFFKernel} <= tested  # which wraps every case


def test_every_known_composition_is_in_the_registry():
    tested = {type(m) for case in registry.CASES.values() for m in case().kernel.modules()}
    tested |= {type(build()) for build in registry.HARMONIC.values()}
    for cls in inner_terms.registry:
        assert cls is object or any(issubclass(kind, cls) for kind in tested), cls


def test_every_radial_derivative_is_in_the_registry():
    unknown = gp_orff.radial_derivatives.dispatch(object)
    known = {c for c, f in gp_orff.radial_derivatives.registry.items() if f is not unknown}
    known = known - {RadialKernel} | radial_kernels()
    smooth = [registry.SPECTRA[name] for name in registry.SMOOTH]
    others = {**registry.UNKNOWN_DENSITY, **registry.TRAINED_DENSITY}
    assert known == {type(build()) for build in (*smooth, *others.values())}


def test_every_exported_rule_is_in_the_registry():
    rules = exported(lambda cls: hasattr(cls, "draw"))
    tested = {
        **registry.RULES,
        **registry.STRUCTURED_RULES,
        **registry.LOCAL_RULES,
        **registry.DETERMINISTIC_RULES,
    }
    assert set(rules.values()) == {type(rule(8)) for rule in tested.values()}


def test_every_exported_symbol_is_in_the_registry():
    symbols = exported(lambda cls: issubclass(cls, gp_orff.Symbol))
    tested = {
        type(build(2, 2)) for build in (registry.SYMBOLS | registry.OF_HARMONIC_FIELDS).values()
    }
    assert set(symbols.values()) - {gp_orff.Symbol} == tested


def test_every_known_spectrum_is_in_the_registry():
    unknown = gp_orff.spectrum.dispatch(object)
    known = {c for c, law in gp_orff.spectrum.registry.items() if law is not unknown}
    known = known - {RadialKernel} | radial_kernels()
    leaves = {
        type(leaf.kernel)
        for build in (
            registry.SPECTRA | registry.UNKNOWN_DENSITY | registry.TRAINED_DENSITY
        ).values()
        for term in terms(build(ard_num_dims=2))
        for leaf in term.leaves
    }
    leaves |= set(registry.LINES.values())
    assert leaves <= known <= leaves | {type(b(2)) for b in registry.DOT_PRODUCTS.values()}


def test_all_names_are_defined():
    """Lint does not see it, because shapes in annotations are no names."""
    module_names = {"__file__", "__name__", "__doc__", "__path__"}

    def used(table: symtable.SymbolTable) -> set[str]:
        own = {s.get_name() for s in table.get_symbols() if s.is_global() and s.is_referenced()}
        return own.union(*map(used, table.get_children()))

    for path in sorted((ROOT / "gp_orff").rglob("*.py")):
        table = symtable.symtable(path.read_text(), str(path), "exec")
        symbols = table.get_symbols()
        defined = {s.get_name() for s in symbols if s.is_assigned() or s.is_imported()}
        undefined = used(table) - defined - set(dir(builtins)) - module_names
        assert not undefined, (path, undefined)
