"""What a test or an example in a docstring registers is forgotten after it."""

import gc
import inspect
import sys

import pytest

import gp_orff  # noqa: F401  with the modules whose functions dispatch

# BoTorch changes settings of gpytorch: `test_botorch.py` imports it in another process.
collect_ignore = ["gp_orff/botorch.py", "tests/gpytorch/in_botorch.py"]


def dispatching():
    """The functions of the package that others may register their own types with."""
    modules = [own for name, own in sys.modules.items() if name.startswith("gp_orff")]
    every = {id(own): own for module in modules for own in vars(module).values()}
    return [own for own in every.values() if hasattr(own, "dispatch") and hasattr(own, "register")]


REGISTRIES = {
    own: inspect.getclosurevars(own.register).nonlocals["registry"] for own in dispatching()
}


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Modules and tests stay to the end: nothing among them is garbage."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(autouse=True)
def registries_as_they_were():
    before = {own: dict(registry) for own, registry in REGISTRIES.items()}
    yield
    for own, registry in REGISTRIES.items():
        if registry != before[own]:
            registry.clear()
            registry.update(before[own])
            own._clear_cache()
