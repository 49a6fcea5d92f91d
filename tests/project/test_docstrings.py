"""Public docstrings against signatures: a summary, arguments, shapes, exceptions, examples."""

import ast
import doctest
import inspect
import re
import textwrap
import types

import pytest
import torch

import gp_orff

MODULES = [value for name in gp_orff.__all__ if inspect.ismodule(value := getattr(gp_orff, name))]
SHAPE = re.compile(r"\((\*?[a-zA-Z0-9·…]+, ?)*[a-zA-Z0-9·+…]*,?\)|0-d|scalar")


def written_here(value):
    return getattr(value, "__module__", "").startswith("gp_orff")


def methods(cls):
    """Public methods and properties that a class of this package defines itself."""
    for name, value in vars(cls).items():
        function = getattr(value, "fget", None) or getattr(value, "__func__", value)
        if not name.startswith("_") and isinstance(function, types.FunctionType):
            yield name, inspect.unwrap(function)


def inherited(cls, name):
    """Whether a method keeps the contract, and the docstring, of a class above."""
    return vars(cls)[name].__doc__ is None and any(hasattr(base, name) for base in cls.__mro__[1:])


def subjects():
    """Name, callable and docstring of everything public; a class stands for its `__init__`."""
    found = {name: getattr(gp_orff, name) for name in gp_orff.__all__}
    for module in MODULES:
        found |= {
            f"{module.__name__.removeprefix('gp_orff.')}.{name}": value
            for name, value in vars(module).items()
            if not name.startswith("_")
            and written_here(value)
            and (value.__module__ == module.__name__ or name in getattr(module, "__all__", ()))
        }
    for label, value in found.items():
        if inspect.isclass(value) and not issubclass(value, Warning):
            yield label, value.__init__, inspect.getdoc(value)
            for name, method in methods(value):
                if not inherited(value, name):
                    yield f"{label}.{name}", method, inspect.getdoc(method)
        elif callable(value) and not inspect.isclass(value):
            yield label, inspect.unwrap(value), inspect.getdoc(value)


SUBJECTS = {label: (function, text) for label, function, text in subjects()}
CHECKS = {
    name: value.__post_init__
    for name in gp_orff.__all__
    if hasattr(value := getattr(gp_orff, name), "__post_init__")
}
each = pytest.mark.parametrize("label", SUBJECTS)


OURS = [label for label, (function, _) in SUBJECTS.items() if written_here(function)]
ours = pytest.mark.parametrize("label", OURS)


def arguments(function):
    """The parameters that a docstring has to explain, with their annotations."""
    kinds = inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL
    parameters = list(inspect.signature(function).parameters.values())
    bound = bool(parameters) and parameters[0].name in ("self", "cls")
    named = parameters[bound:]
    public = [p for p in named if not p.name.startswith("_")]  # of a dataclass
    return {p.name: p.annotation for p in public if p.kind not in kinds}


def annotated(label):
    function = SUBJECTS[label][0]
    return [*arguments(function).values(), inspect.signature(function).return_annotation]


def exceptions(label):
    """What the body raises; nothing for an `__init__` that `dataclass` writes."""
    body = CHECKS.get(label, SUBJECTS[label][0])
    if body.__code__.co_filename == "<string>":
        return set()
    tree = ast.parse(textwrap.dedent(inspect.getsource(body)))
    calls = (node.exc for node in ast.walk(tree) if isinstance(node, ast.Raise) and node.exc)
    return {call.func.id for call in calls if isinstance(call, ast.Call)}


@each
def test_it_begins_with_a_sentence(label):
    text = SUBJECTS[label][1]
    assert text, "no docstring"
    summary = text.split("\n\n")[0]
    assert re.match(r"[A-Z]|\W|\w\b|\w′", summary), summary  # or with a symbol, such as κ′
    assert summary.rstrip()[-1] in ".:", summary


@ours
def test_every_argument_is_named(label):
    function, text = SUBJECTS[label]
    for name in arguments(function):
        entry = rf"^\s+(\w+, )*{name}(, \w+)*:"  # under Args or Attributes
        assert re.search(rf"{entry}|`[^`]*\b{name}\b[^`]*`", text, flags=re.M), name


@pytest.mark.parametrize("label", [label for label in OURS if torch.Tensor in annotated(label)])
def test_tensors_have_shapes(label):
    """In words, where the signature has none."""
    assert SHAPE.search(SUBJECTS[label][1])


@pytest.mark.parametrize("label", [label for label in OURS if exceptions(label)])
def test_what_is_raised_is_told(label):
    """Of the exceptions that its own body raises."""
    section = SUBJECTS[label][1].partition("Raises:")[2]
    assert exceptions(label) <= set(re.findall(r"^\s+(\w+):", section, flags=re.M))


@pytest.mark.parametrize("label", [label for label in SUBJECTS if "." not in label])
def test_it_has_an_example(label):
    """The doctests of the package run them."""
    assert doctest.DocTestParser().get_examples(SUBJECTS[label][1])
