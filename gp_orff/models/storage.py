"""Models as plain values in files: data, statistics, kernels, likelihoods and frequency rules."""

import dataclasses
import hashlib
import os
import pickle
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial, singledispatch
from importlib import import_module
from inspect import Parameter, getmembers, isclass, signature
from pkgutil import iter_modules
from zipfile import BadZipFile

import gpytorch
import numpy as np
import torch
from gpytorch import Module
from torch import Tensor, nn

from gp_orff import features, kernels, symbols
from gp_orff.data import likelihoods
from gp_orff.data.dataset import Data, Dataset, StatisticsOnly
from gp_orff.data.observations import Observations, SymbolObservations
from gp_orff.data.pointwise import any_pointwise
from gp_orff.data.sites import Repeats
from gp_orff.data.statistics import FieldStatistics, check_kind, write_whole
from gp_orff.data.survey import Survey
from gp_orff.data.tracks import TrackObservations
from gp_orff.features.draws import Rule
from gp_orff.fitting.journal import History, Stage
from gp_orff.inference.representation import Representation
from gp_orff.kernels import dot_product, fields, harmonic
from gp_orff.kernels.base import map_tensors, parts_of, plain_tensor
from gp_orff.kernels.spectral_matrix import SpectralMatrixKernel
from gp_orff.models.state import ModelState
from gp_orff.symbols.base import Symbol

# Read and write files with a checksum. If a write is interrupted, the old file remains.


# In version 1, reports were sentences. Since version 3, data may have no statistics.
VERSION = 3


# errors of torch for damaged files
_DAMAGES = (
    *(RuntimeError, EOFError, OSError, ValueError, LookupError, BadZipFile),
    *(pickle.UnpicklingError, AttributeError, TypeError),
)


def write(path: str | os.PathLike, kind: str, content: dict) -> None:
    """Write a dict to a file that `torch.load(path, weights_only=True)` can read.

    If the write is interrupted, the old file remains.
    """
    record = {"format": kind, "version": VERSION, "checksum": _checksum(content), **content}
    write_whole(path, partial(torch.save, record))


def read(path: str | os.PathLike, kind: str) -> dict:
    """Read a dict that `write` has written.

    Raises:
        FileNotFoundError: The file does not exist.
        ValueError: The file is damaged, newer than this package, or of another kind.
    """
    try:
        record = torch.load(path, weights_only=True, map_location="cpu")
    except FileNotFoundError:
        raise
    except _DAMAGES as error:
        raise _damaged(path) from error
    check_kind(record, kind, "a file of", f" in {path}")
    if record["version"] > VERSION:
        raise ValueError(
            f"expected version {VERSION} or older of the file format, got version "
            f"{record['version']} in {path}; install a newer gp_orff"
        )
    content = {n: v for n, v in record.items() if n not in ("format", "version", "checksum")}
    if record["checksum"] != _checksum(content):
        raise _damaged(path)
    return content


def _damaged(path: str | os.PathLike) -> ValueError:
    return ValueError(f"{path} is damaged, or is not a file of gp_orff: restore it from a copy")


def _checksum(content: object) -> str:
    digest = hashlib.sha256()
    for part in _serialize(content):
        digest.update(part)
    return digest.hexdigest()


@singledispatch
def _serialize(value: object) -> Iterator[bytes]:
    """The bytes of a tree of plain values."""
    yield repr(value).encode()


@_serialize.register
def _(value: Tensor):
    yield f"{value.dtype} {tuple(value.shape)}".encode()
    yield np.ascontiguousarray(value.detach().cpu().numpy()).tobytes()


@_serialize.register
def _(value: Mapping):
    for name, item in value.items():
        yield str(name).encode()
        yield from _serialize(item)


@_serialize.register(list)
@_serialize.register(tuple)
def _(value):
    for item in value:
        yield from _serialize(item)


# Kernels, likelihoods, means, symbols and frequency rules as plain values, and back.
#
# A file contains no code and no pickled objects: `torch.load(weights_only=True)` can read it.
# A module is stored in two parts: its `state_dict`, and a recipe of class names, constructor
# arguments and constraints.
#
# 1. `_recipe` descends the tree of modules. It returns no recipe if it cannot describe a part: an
#    unknown class, a constraint with an unusual transform, a batch, or a parameter that occurs in
#    two places. There is also no recipe if the constructors make other priors.
# 2. `_captured` takes the constructor arguments from attributes with the same names. `_ARGUMENTS`
#    lists the classes that store an argument under another name.
# 3. `build` constructs the module from the recipe. Without a recipe, it needs a module that the
#    user has built in the same way, and only loads the state into it.
# 4. Frozen parameters are listed by name. All others are trained, except parameters that the file
#    does not contain, which were constants in an older version.


_CONSTRAINTS = ("Interval", "GreaterThan", "Positive", "LessThan")
_ELSEWHERE = (
    "_(prior|constraint)$|^(batch_shape|noise)$|^learn_"  # arguments that are stored elsewhere
)
_CLASSES = {
    name: cls
    for place in (
        *(gpytorch.kernels, gpytorch.likelihoods, gpytorch.means, likelihoods),
        *(import_module(f"{kernels.__name__}.{m.name}") for m in iter_modules(kernels.__path__)),
    )
    for name, cls in getmembers(place, isclass)
    if issubclass(cls, Module) and getattr(cls, "has_recipe", True)
}


def _coefficients(kernel: dot_product.DotProductKernel) -> list[float]:
    """Return one for each positive coefficient, and zero for the others. The positive values are
    in the state of the kernel."""
    return [float(n in kernel.degrees) for n in range(max(kernel.degrees) + 1)]


def _tails(likelihood: likelihoods.HeavyTails) -> dict:
    nu = likelihood.deg_free
    return {"deg_free": None if nu is None else nu.item()}


def _task_rank(kernel: gpytorch.kernels.Kernel) -> int:
    return kernel.task_covar_module.covar_factor.shape[-1]


# constructor arguments that are not attributes with the same name
_ARGUMENTS: dict[type, Callable[[Module], dict]] = {
    gpytorch.kernels.MultitaskKernel: lambda k: {"rank": _task_rank(k)},
    gpytorch.kernels.LCMKernel: lambda k: {
        "base_kernels": [term.data_covar_module for term in k.covar_module_list],
        "num_tasks": k.covar_module_list[0].num_tasks,
        "rank": [_task_rank(term) for term in k.covar_module_list],
    },
    fields.HelmholtzKernel: lambda k: _captured(k.curl_free.base_kernel),
    harmonic.HarmonicKernel: lambda k: {
        "reference_height": None if k.follows_data else k.reference_height,
        "mean_height": None,  # the state contains it
    },
    dot_product.DotProductKernel: lambda k: {"coefficients": _coefficients(k)},
    dot_product.LegendreKernel: lambda k: {"eigenvalues": _coefficients(k)},
    dot_product.ProjectionKernel: lambda k: {"coefficients": _coefficients(k)},
    likelihoods.MultitaskStudentTLikelihood: _tails,
    likelihoods.KnownNoiseLikelihood: _tails,
}


def _captured(module: Module) -> dict[str, object]:
    """The constructor arguments of a module, with "*" for positional ones. Priors, constraints and
    the choice of trained parameters are not included, because the description has them
    separately."""
    parameters = signature(type(module)).parameters
    if isinstance(module, gpytorch.kernels.Kernel) and "kwargs" in parameters:
        parameters = {**signature(gpytorch.kernels.Kernel).parameters, **parameters}
    kinds = {
        name: parameter.kind
        for name, parameter in parameters.items()
        if parameter.kind is not Parameter.VAR_KEYWORD and not re.search(_ELSEWHERE, name)
    }
    values = {name: getattr(module, name) for name in kinds if hasattr(module, name)}
    if (dims := values.get("active_dims")) is not None:
        values["active_dims"] = dims.tolist()
    values |= _ARGUMENTS[type(module)](module) if type(module) in _ARGUMENTS else {}
    _require(all(parameters[name].default is None for name in kinds.keys() - values.keys()))
    # The default of `ard_num_dims` in PeriodicKernel is None, but PeriodicKernel does not accept
    # None.
    if values.get("ard_num_dims", 0) is None:
        del values["ard_num_dims"]
    names = {name: "*" for name, kind in kinds.items() if kind is Parameter.VAR_POSITIONAL}
    return {names.get(name, name): value for name, value in values.items()}


def _described(value: object) -> object:
    """An argument as a plain value, a module as its recipe."""
    if isinstance(value, list | nn.ModuleList):
        return [_described(item) for item in value]
    plain = value is None or isinstance(value, bool | int | float | str | tuple | Tensor)
    return value if plain else _recipe(value)


class _Unknown(Exception):
    """A module that a file cannot describe."""


def _require(condition: bool) -> None:
    if not condition:
        raise _Unknown


def describe(module: Module) -> dict:
    """A module as plain values: its recipe, if it has one, its state and its frozen parameters.

    Raises:
        ValueError: The amplitude of a spectral matrix is a plain function, which has no state.
    """
    for part in parts_of(module, SpectralMatrixKernel):
        if "amplitude" not in dict(part.named_children()):
            raise ValueError(
                "expected the amplitude of a SpectralMatrixKernel to be a torch.nn.Module, whose "
                f"parameters and buffers a file can store, got {part.amplitude!r}; put the "
                "function into the forward of a module, and pass kernel= to load"
            )
    parameters = [own for _, own in module.named_parameters(remove_duplicate=False)]
    try:
        _require(len(set(map(id, parameters))) == len(parameters))  # no parameter in two places
        recipe = _recipe(module)
        built = _build_recipe(recipe).double()
        _require(_prior_kinds(built) == _prior_kinds(module))  # their values are in the state
        built.load_state_dict(module.state_dict())
    except (_Unknown, TypeError, ValueError, RuntimeError):  # errors of other classes
        recipe = None
    return {
        "name": type(module).__name__,
        "recipe": recipe,
        "state": module.state_dict(),
        "frozen": [n for n, p in module.named_parameters() if not p.requires_grad],
    }


def recipe_of(module: Module) -> dict | None:
    """The recipe of a module as plain values, without its state; None if it has no recipe."""
    return describe(module)["recipe"]


def rebuilt(recipe: Mapping | None, module: Module | None, role: str) -> Module:
    """The module itself if it has this recipe, otherwise a new module from the recipe.

    Raises:
        ValueError: There is neither a recipe nor a module.
    """
    if module is not None and recipe in (None, recipe_of(module)):
        return module
    if recipe is None:
        raise ValueError(
            f"expected a {role} whose class, constraints and priors a state can describe, got one "
            f"that it cannot; assign a {role}, built as for the saved model, before loading the "
            "state"
        )
    return _build_recipe(recipe)


def build(description: Mapping, module: Module | None, role: str) -> Module:
    """Build a module from its description. With `module`, only load the state into it.

    Raises:
        ValueError: There is neither a recipe nor a module, or the module has other parameters.
    """
    if module is None and description["recipe"] is None:
        raise ValueError(
            f"the file cannot describe the class, constraints or priors of its {role} "
            f"{description['name']!r}: pass {role}=, built as for the saved model"
        )
    if module is None:
        module = _build_recipe(description["recipe"])
    present = module.double().state_dict()  # the recipe has entries that older files do not have
    extra = {name: value for name, value in present.items() if name.endswith("_extra_state")}
    try:
        module.load_state_dict(extra | description["state"])
    except RuntimeError as error:
        raise ValueError(
            f"expected a {role} like the saved {description['name']!r}, got one with other "
            f"parameters: {' '.join(str(error).split())}"
        ) from error
    # Parameters that older files do not contain were constants.
    for name, parameter in module.named_parameters():
        learned = name in description["state"] and name not in description["frozen"]
        parameter.requires_grad_(learned)
    return module


def _recipe(module: Module) -> dict:
    """The recipe of a module. Raises `_Unknown` if a part cannot be described."""
    kind = type(module)
    _require(_CLASSES.get(kind.__name__) is kind)
    _require(not getattr(module, "batch_shape", ()))
    constraints = {}
    for name, constraint in module.named_constraints():
        _require(type(constraint).__name__ in _CONSTRAINTS and constraint.enforced)
        bounds = [constraint.lower_bound.tolist(), constraint.upper_bound.tolist()]
        default = _constraint(type(constraint).__name__, *map(torch.tensor, bounds))
        given, usual = constraint._transform, default._transform  # functions, or equal modules
        _require(type(given) is type(usual) and repr(given) == repr(usual))
        constraints[name] = [type(constraint).__name__, *bounds]
    dims = getattr(module, "active_dims", None)
    return {
        "class": kind.__name__,
        "arguments": {name: _described(value) for name, value in _captured(module).items()},
        "constraints": constraints,
        "active_dims": None if dims is None else dims.tolist(),
        "half": getattr(module, "helmholtz_half", None),  # for a HelmholtzKernel in a sum
    }


def _prior_kinds(module: Module) -> list[tuple]:
    """Return the name and the class of each prior, and the function that computes its argument."""
    return [
        (name, type(prior), getattr(closure, "func", closure))
        for name, _, prior, closure, _ in module.named_priors()
    ]


def _build_recipe(recipe: Mapping) -> Module:
    arguments = {name: _build_argument(value) for name, value in recipe["arguments"].items()}
    positional = arguments.pop("*", [])
    cls = _CLASSES[recipe["class"]]
    if arguments.get("active_dims") is not None:
        arguments["active_dims"] = tuple(arguments["active_dims"])
    module = cls(*positional, **arguments)
    if recipe.get("half") is not None:
        module.helmholtz_half = recipe["half"]
    if recipe["active_dims"] is not None:  # composite kernels do not have this argument
        module.register_buffer("active_dims", torch.tensor(recipe["active_dims"]))
    for name, (kind, low, high) in recipe["constraints"].items():
        constraint = _constraint(kind, torch.tensor(low), torch.tensor(high))
        path, _, parameter = name.rpartition(".")
        owner = module.get_submodule(path) if path else module
        owner.register_constraint(parameter.removesuffix("_constraint"), constraint)
    return module


def _build_argument(value: object) -> object:
    if isinstance(value, list):
        return [_build_argument(item) for item in value]
    return _build_recipe(value) if isinstance(value, Mapping) else value


def _constraint(kind: str, low: torch.Tensor, high: torch.Tensor):
    cls = getattr(gpytorch.constraints, kind)
    bounds = {"Positive": (), "GreaterThan": (low,), "LessThan": (high,), "Interval": (low, high)}
    return cls(*bounds[kind])


def describe_symbol(symbol: Symbol) -> dict:
    """A symbol of this package as plain values.

    Raises:
        ValueError: the symbol is not one of this package.
    """
    if getattr(symbols, type(symbol).__name__, None) is not type(symbol):
        raise ValueError(
            "expected observations of symbols of this package, got observations of "
            f"{type(symbol).__name__}, which a file cannot describe; save the model without them, "
            "and call observe again after loading"
        )
    values = {field.name: getattr(symbol, field.name) for field in dataclasses.fields(symbol)}
    plain = {
        name: describe_symbol(value) if isinstance(value, Symbol) else value
        for name, value in values.items()
    }
    return {"class": type(symbol).__name__, "fields": plain}


def build_symbol(description: Mapping) -> Symbol:
    """Build a symbol from its description."""
    values = {
        name: build_symbol(value) if isinstance(value, Mapping) else value
        for name, value in description["fields"].items()
    }
    return getattr(symbols, description["class"])(**values)


def describe_rule(rule: Rule) -> dict | None:
    """A rule of this package as plain values; None for another rule.

    Raises:
        ValueError: The rule has a function, which cannot be saved.
    """
    exported = dataclasses.is_dataclass(rule) and getattr(
        features, type(rule).__name__, None
    ) is type(rule)
    if not exported:
        return None
    values = dataclasses.asdict(rule)
    if any(map(callable, values.values())):
        raise ValueError(
            f"expected a frequency rule of plain values, got {rule}, with a function that cannot "
            "be saved; save kernel.state_dict() and the data, and call condition again after "
            "loading"
        )
    return {"class": type(rule).__name__, **values}


def build_rule(description: Mapping | None, rule: Rule | None) -> Rule:
    """`rule` if it is given, otherwise the rule of a description.

    Raises:
        ValueError: There is neither a description nor a rule.
    """
    if rule is not None:
        return rule
    if description is None:
        raise ValueError(
            "the file cannot describe its frequency rule: pass frequencies=, built as for the "
            "saved model"
        )
    arguments = {name: _tuples(value) for name, value in description.items() if name != "class"}
    return getattr(features, description["class"])(**arguments)


def _tuples(value: object) -> object:
    return tuple(map(_tuples, value)) if isinstance(value, list | tuple) else value


# Data and statistics as plain values, for files.
#
# The keys are part of the file format and must not change.
#
# The file has either the data or, for features on fixed frequencies, sums over the data: whichever
# is smaller. Sums suffice for all predictions on these frequencies, but not for a new grid or for
# the exact kernel. A sample of the data is stored with them, for results that depend on positions.


_SAMPLE = 500  # points of each sample in a file with statistics


def pack_state(state: ModelState) -> dict:
    """Pack a state: data or their statistics, rules and history."""
    return {
        "history": dataclasses.asdict(state.history),
        "mean": state.mean,
        "choice": describe_rule(state.representation.rule),
        "dense": state.representation.dense,
        "exact": state.inference.is_exact,
        "conditioned_by": describe_rule(state.rule),
        **_pack_data_or_statistics(state),
    }


def _pack_data_or_statistics(state: ModelState) -> dict:
    """The data with their learned weights, or the statistics if these are smaller. Some models need
    the data."""
    data, inference = state.data, state.inference
    if (
        inference.is_exact
        or data.tracks
        or (data.revisitable and any_pointwise(state.likelihoods))
        or inference.written_out(state.kernel)
        or not state.representation.on_lattice  # statistics are valid for one set of waves only
    ):
        return {"known": None, "data": pack_data(data)}
    shared = inference.draws[0].shared_columns() is not None
    statistics = {
        "known": inference.statistics.plain() if shared else None,
        "data": pack_data(state.statistics_only()),
    }
    if not (data.revisitable and data.is_small):
        return statistics
    return min({"known": None, "data": pack_data(data)}, statistics, key=_num_bytes)


def _num_bytes(content: object) -> int:
    """The bytes of a tree of plain values."""
    return sum(map(len, _serialize(content)))


def unpack_state(
    content: Mapping,
    kernel: gpytorch.kernels.Kernel,
    likelihoods: Mapping[str, gpytorch.likelihoods.Likelihood],
    requested: Rule,
) -> ModelState:
    """The state from the content that `pack_state` wrote."""
    data, packed = unpack_data(content["data"]), content["known"]
    choice, rule = (
        None if content["exact"] else build_rule(packed_rule, None if packed_rule else requested)
        for packed_rule in (content["choice"], content["conditioned_by"])
    )
    dense = content.get("dense", False)  # files of version 2 do not have it
    representation = Representation(kernel, likelihoods, requested, data, choice, dense=dense)
    statistics = None if packed is None else FieldStatistics.from_plain(packed)
    parts = representation, rule, statistics, content["mean"], _history(content)
    return ModelState.from_statistics(*parts)


def _history(content: Mapping) -> History:
    """The history. Older files have sentences instead, which become notes."""
    if "history" not in content:
        sentence, notes = content["story"][0], content["notes"]
        action = sentence.split()[0]
        return History(action).with_notes([*([sentence] if sentence != action else []), *notes])
    history = {key: value for key, value in content["history"].items() if key != "zero_mean"}
    stages = tuple(Stage(**stage) for stage in history["stages"])
    return History(**{**history, "stages": stages, "notes": tuple(history["notes"])})


def pack_data(data: Data) -> dict:
    """Pack a `Dataset` with its observations, or `StatisticsOnly` with a sample of points."""
    content = {
        "bound": data.elbo_correction,
        "further": [_pack_symbol_data(part) for part in data.symbol_data],
        "skipped": data.survey.skipped,
    }
    if data.revisitable:
        content["repeats"] = dataclasses.asdict(data.repeats)
        content["tracks"] = [part.plain() for part in data.tracks]
        content["readings"] = [part.plain() for part in data.unweighted().visit()]
        if data.weights is not None:
            content["weights"] = [w.cpu() for w in data.weights]
        return content
    survey = data.survey
    sample = [part.take(slice(0, _SAMPLE)) for part in survey.sample[:4]]
    return {
        **content,
        "sums": data.field_statistics.plain(),
        "domain": data.domain,
        "box": survey.box,
        "num_points": survey.num_points,
        "num_values": survey.num_values,
        "sample": [part.plain() for part in sample],
    }


def unpack_data(content: Mapping) -> Data:
    """The data from the content that `pack_data` wrote."""
    symbol_data = tuple(map(_unpack_symbol_data, content["further"]))
    skipped = content.get("skipped", 0)
    if "readings" in content:
        observations = [Observations.from_plain(part) for part in content["readings"]]
        tracks = [TrackObservations.from_plain(part) for part in content.get("tracks", [])]
        data = Dataset.in_memory([*observations, *tracks]).copied()
        repeats = Repeats(**content.get("repeats", {}))
        survey = dataclasses.replace(data.survey, skipped=skipped)
        weights = content.get("weights")
        return dataclasses.replace(
            data,
            survey=survey,
            weights=None if weights is None else tuple(weights),
            elbo_correction=content["bound"],
            symbol_data=symbol_data,
            repeats=repeats,
        )
    sample = [Observations.from_plain(part) for part in content["sample"]]
    statistics = FieldStatistics.from_plain(content["sums"])
    ranks = [torch.linspace(0, 1, len(part)) for part in sample]
    box, domain = _tuples(content["box"]), _tuples(content["domain"])
    weights = {key: group.weights for key, group in statistics.groups.items()}
    sizes = content["num_points"], content["num_values"]
    survey = Survey(box, *sizes, weights, sample, ranks, skipped=skipped)
    return StatisticsOnly(statistics, domain, survey, symbol_data)


def _pack_symbol_data(part: SymbolObservations) -> dict:
    part = map_tensors(part, plain_tensor)
    tensors = {name: getattr(part, name) for name in ("x", "y", "noise", "direction")}
    return {"symbol": describe_symbol(part.symbol), "space": list(part.space), **tensors}


def _unpack_symbol_data(content: Mapping) -> SymbolObservations:
    symbol, space = build_symbol(content["symbol"]), tuple(content["space"])
    tensors = (content[name] for name in ("x", "y", "noise"))
    return SymbolObservations(symbol, *tensors, space, content.get("direction"))
