"""Modules as plain values: what a file holds of kernels, likelihoods, means and frequency rules."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, fields, is_dataclass

import gpytorch.constraints
import torch
from gpytorch import Module
from gpytorch.kernels import (
    AdditiveKernel,
    ConstantKernel,
    Kernel,
    LCMKernel,
    MaternKernel,
    MultitaskKernel,
    ProductKernel,
    RBFKernel,
    RQKernel,
    ScaleKernel,
    SpectralMixtureKernel,
)
from gpytorch.likelihoods import GaussianLikelihood, MultitaskGaussianLikelihood
from gpytorch.means import ConstantMean, MultitaskMean, ZeroMean

from gp_orff import symbols
from gp_orff.data.noise.likelihoods import MultitaskStudentTLikelihood
from gp_orff.features import frequencies
from gp_orff.features.frequencies.rule import Rule
from gp_orff.kernels.fields import CurlFreeKernel, DivergenceFreeKernel, HelmholtzKernel
from gp_orff.kernels.products import FieldProductKernel
from gp_orff.kernels.scalar import GeneralMaternKernel
from gp_orff.symbols.base import Symbol

_CONSTRAINTS = ("Interval", "GreaterThan", "Positive", "LessThan")


def _dims(kernel: Kernel) -> dict:
    dims = kernel.active_dims
    return {"active_dims": None if dims is None else dims.tolist()}


def _scalar(kernel: Kernel) -> dict:
    return {"ard_num_dims": kernel.ard_num_dims, **_dims(kernel)}


def _field(kernel: Kernel) -> dict:
    return {"base_kernel": kernel.base_kernel, "num_dims": kernel.num_dims, **_dims(kernel)}


def _multitask(likelihood: MultitaskGaussianLikelihood) -> dict:
    names = ("num_tasks", "rank", "has_task_noise", "has_global_noise")
    return {name: getattr(likelihood, name) for name in names}


def _one_rank(kernel: Kernel) -> int:
    return kernel.task_covar_module.covar_factor.shape[-1]


# the arguments a class is built again from; "*" are positional ones
_ARGUMENTS: dict[type, Callable[[Module], dict]] = {
    RBFKernel: _scalar,
    RQKernel: _scalar,
    MaternKernel: lambda k: {"nu": k.nu, **_scalar(k)},
    GeneralMaternKernel: lambda k: {"nu": k.nu, **_scalar(k)},
    SpectralMixtureKernel: lambda k: {"num_mixtures": k.num_mixtures, **_scalar(k)},
    ConstantKernel: _dims,
    ScaleKernel: lambda k: {"base_kernel": k.base_kernel},
    AdditiveKernel: lambda k: {"*": list(k.kernels)},
    ProductKernel: lambda k: {"*": list(k.kernels)},
    MultitaskKernel: lambda k: {
        "data_covar_module": k.data_covar_module,
        "num_tasks": k.num_tasks,
        "rank": _one_rank(k),
    },
    LCMKernel: lambda k: {
        "base_kernels": [own.data_covar_module for own in k.covar_module_list],
        "num_tasks": k.covar_module_list[0].num_tasks,
        "rank": [_one_rank(own) for own in k.covar_module_list],
    },
    CurlFreeKernel: _field,
    DivergenceFreeKernel: _field,
    HelmholtzKernel: lambda k: _field(k.curl_free.base_kernel),
    FieldProductKernel: lambda k: {"*": [k.field_kernel, k.scalar_kernel]},
    GaussianLikelihood: lambda own: {},
    MultitaskGaussianLikelihood: _multitask,
    MultitaskStudentTLikelihood: lambda own: {"deg_free": own.deg_free, **_multitask(own)},
    ConstantMean: lambda own: {},
    ZeroMean: lambda own: {},
    MultitaskMean: lambda own: {"base_means": list(own.base_means), "num_tasks": own.num_tasks},
}
_CLASSES = {cls.__name__: cls for cls in _ARGUMENTS}


def describe(module: Module) -> dict:
    """A module as plain values: its class and arguments if they are known, and its state."""
    parts = [own for _, own in module.named_modules(remove_duplicate=False)]
    shared = len({id(own) for own in parts if isinstance(own, Kernel)}) < sum(
        isinstance(own, Kernel) for own in parts
    )  # a part of the tree that stands in two places
    return {
        "name": type(module).__name__,
        "recipe": None if shared else _recipe(module),
        "state": module.state_dict(),
        "frozen": [n for n, p in module.named_parameters() if not p.requires_grad],
    }


def build(described: Mapping, given: Module | None, role: str) -> Module:
    """The module again; `given` takes the place of one that is built from its recipe.

    Raises:
        ValueError: no recipe and none given, or one with other parameters.
    """
    module = given
    if module is None and described["recipe"] is None:
        raise ValueError(
            f"the file has a {role} {described['name']!r} whose class, constraints or priors it "
            f"cannot name: pass {role}=, built like the one that was saved"
        )
    if module is None:
        module = _cook(described["recipe"])
    try:
        module.double().load_state_dict(described["state"])
    except RuntimeError as error:
        raise ValueError(
            f"expected a {role} like the saved {described['name']!r}, got one with other "
            f"parameters: {' '.join(str(error).split())}"
        ) from error
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name not in described["frozen"])
    return module


def _recipe(module: Module) -> dict | None:
    """None where a part is not known, has priors or constraints of other kinds."""
    if type(module) not in _ARGUMENTS or any(True for _ in module.named_priors()):
        return None
    if getattr(module, "batch_shape", torch.Size()):
        return None
    constraints = {}
    for name, constraint in module.named_constraints():
        if type(constraint).__name__ not in _CONSTRAINTS or not constraint.enforced:
            return None
        bounds = [constraint.lower_bound.tolist(), constraint.upper_bound.tolist()]
        usual = _constraint(type(constraint).__name__, *map(torch.tensor, bounds))
        if not _same_function(constraint._transform, usual._transform):
            return None
        constraints[name] = [type(constraint).__name__, *bounds]
    arguments = {}
    for name, value in _ARGUMENTS[type(module)](module).items():
        parts = value if isinstance(value, list) else [value]
        plain = [_recipe(own) if isinstance(own, Module) else own for own in parts]
        if any(own is None and isinstance(p, Module) for own, p in zip(plain, parts, strict=True)):
            return None
        arguments[name] = plain if isinstance(value, list) else plain[0]
    dims = getattr(module, "active_dims", None)
    return {
        "class": type(module).__name__,
        "arguments": arguments,
        "constraints": constraints,
        "active_dims": None if dims is None else dims.tolist(),
    }


def _cook(recipe: Mapping) -> Module:
    arguments = {name: _prepared(value) for name, value in recipe["arguments"].items()}
    positional = arguments.pop("*", [])
    cls = _CLASSES[recipe["class"]]
    if arguments.get("active_dims") is not None:
        arguments["active_dims"] = tuple(arguments["active_dims"])
    module = cls(*positional, **arguments)
    if recipe["active_dims"] is not None:  # of composite kernels, which do not take them
        module.register_buffer("active_dims", torch.tensor(recipe["active_dims"]))
    for name, (kind, low, high) in recipe["constraints"].items():
        constraint = _constraint(kind, torch.tensor(low), torch.tensor(high))
        owner, _, own = name.rpartition(".")
        parent = module.get_submodule(owner) if owner else module
        parent.register_constraint(own.removesuffix("_constraint"), constraint)
    return module


def _prepared(value: object) -> object:
    if isinstance(value, list):
        return [_prepared(own) for own in value]
    return _cook(value) if isinstance(value, Mapping) else value


def _constraint(kind: str, low: torch.Tensor, high: torch.Tensor):
    cls = getattr(gpytorch.constraints, kind)
    bounds = {"Positive": (), "GreaterThan": (low,), "LessThan": (high,), "Interval": (low, high)}
    return cls(*bounds[kind])


def describe_symbol(symbol: Symbol) -> dict:
    """A symbol of this package as plain values.

    Raises:
        ValueError: another one.
    """
    if getattr(symbols, type(symbol).__name__, None) is not type(symbol):
        raise ValueError(
            f"expected observations of symbols of this package in a file, got those of "
            f"{type(symbol).__name__}, which it cannot name; observe them anew after loading"
        )
    own = {field.name: getattr(symbol, field.name) for field in fields(symbol)}
    plain = {
        name: describe_symbol(value) if isinstance(value, Symbol) else value
        for name, value in own.items()
    }
    return {"class": type(symbol).__name__, "fields": plain}


def build_symbol(described: Mapping) -> Symbol:
    """The symbol again."""
    values = {
        name: build_symbol(value) if isinstance(value, Mapping) else value
        for name, value in described["fields"].items()
    }
    return getattr(symbols, described["class"])(**values)


def _same_function(one: object, other: object) -> bool:
    """One object, or copies of one module, such as `torch.nn.Softplus`."""
    alike = (
        isinstance(one, torch.nn.Module) and type(one) is type(other) and repr(one) == repr(other)
    )
    return one is other or alike


def describe_rule(rule: Rule) -> dict | None:
    """A rule of this package as plain values."""
    known = is_dataclass(rule) and getattr(frequencies, type(rule).__name__, None) is type(rule)
    return {"class": type(rule).__name__, **asdict(rule)} if known else None


def build_rule(described: Mapping | None, given: Rule | None) -> Rule:
    """The rule again."""
    if given is not None:
        return given
    if described is None:
        raise ValueError("the file has a frequency rule it cannot name: pass frequencies=")
    arguments = {name: _tuples(value) for name, value in described.items() if name != "class"}
    return getattr(frequencies, described["class"])(**arguments)


def _tuples(value: object) -> object:
    return tuple(map(_tuples, value)) if isinstance(value, list | tuple) else value
