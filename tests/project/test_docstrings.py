"""Public docstrings against signatures: a summary, arguments, shapes, exceptions, examples."""

import ast
import doctest
import inspect
import re
import textwrap
import types
from pathlib import Path

import torch

import gp_orff

PACKAGE = Path(gp_orff.__file__).parent
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
OURS = {label: own for label, own in SUBJECTS.items() if written_here(own[0])}


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


def test_they_begin_with_a_sentence():
    def begins(text):
        summary = (text or "").split("\n\n")[0].rstrip()
        # or with a symbol, such as κ′
        return re.match(r"[A-Z]|\W|\w\b|\w′", summary) and summary[-1] in ".:"

    assert not [label for label, (_, text) in SUBJECTS.items() if not begins(text)]


def test_no_docstring_begins_with_the_same():
    """Whoever reads it has not read the one above."""
    assert not [
        (path.name, getattr(node, "name", "module"))
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module)
        and re.match("The same|Likewise", ast.get_docstring(node) or "")
    ]


def test_every_argument_is_named():
    def named(argument, text):
        entry = rf"^\s+(\w+, )*{argument}(, \w+)*:"  # under Args or Attributes
        return re.search(rf"{entry}|`[^`]*\b{argument}\b[^`]*`", text, flags=re.M)

    assert not [
        (label, argument)
        for label, (function, text) in OURS.items()
        for argument in arguments(function)
        if not named(argument, text)
    ]


def test_tensors_have_shapes():
    """In words, where the signature has none."""
    with_tensors = [label for label in OURS if torch.Tensor in annotated(label)]
    assert not [label for label in with_tensors if not SHAPE.search(SUBJECTS[label][1])]


def test_what_is_raised_is_named():
    """Of the exceptions that its own body raises."""

    def listed(text):
        return set(re.findall(r"^\s+(\w+):", text.partition("Raises:")[2], flags=re.M))

    assert not [
        (label, missing)
        for label, (_, text) in OURS.items()
        if (missing := exceptions(label) - listed(text))
    ]


def test_they_have_examples():
    """The doctests of the package run them."""
    parser = doctest.DocTestParser()
    names = [label for label in SUBJECTS if "." not in label]
    assert not [label for label in names if not parser.get_examples(SUBJECTS[label][1])]
