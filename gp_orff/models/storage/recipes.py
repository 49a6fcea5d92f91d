"""Kernels, likelihoods, means, symbols and frequency rules as plain values, and back."""

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
    LinearKernel,
    MaternKernel,
    MultitaskKernel,
    PolynomialKernel,
    ProductKernel,
    RBFKernel,
    RQKernel,
    ScaleKernel,
    SpectralMixtureKernel,
)
from gpytorch.likelihoods import GaussianLikelihood, MultitaskGaussianLikelihood
from gpytorch.means import ConstantMean, MultitaskMean, ZeroMean
from gpytorch.priors import NormalPrior
from torch import nn

from gp_orff import symbols
from gp_orff.data.noise.heavy_tails import HeavyTails
from gp_orff.data.noise.known_noise_likelihood import KnownNoiseLikelihood
from gp_orff.data.noise.likelihoods import MultitaskStudentTLikelihood
from gp_orff.data.noise.track_likelihood import TrackLikelihood
from gp_orff.features import frequencies
from gp_orff.features.frequencies.rule import Rule
from gp_orff.kernels.dot_product.kernel import DotProductKernel, LegendreKernel, ProjectionKernel
from gp_orff.kernels.fields import CurlFreeKernel, DivergenceFreeKernel, HelmholtzKernel
from gp_orff.kernels.harmonic import HarmonicKernel
from gp_orff.kernels.learned_spectrum import LearnedSpectrumKernel
from gp_orff.kernels.matrix_valued.separable import SeparableKernel
from gp_orff.kernels.matrix_valued.spectral_matrix import SpectralMatrixKernel
from gp_orff.kernels.products import FieldProductKernel
from gp_orff.kernels.scalar import BesselKernel, GeneralMaternKernel
from gp_orff.symbols.base import Symbol

# the owner and the standard deviation of priors that constructors make
_OWN_PRIORS = {"shape_prior": (LearnedSpectrumKernel, 1.0), "level_prior": (HelmholtzKernel, 3.0)}
_CONSTRAINTS = ("Interval", "GreaterThan", "Positive", "LessThan")


def _active_dims(kernel: Kernel) -> dict:
    dims = kernel.active_dims
    return {"active_dims": None if dims is None else dims.tolist()}


def _scalar(kernel: Kernel) -> dict:
    return {"ard_num_dims": kernel.ard_num_dims, **_active_dims(kernel)}


def _field(kernel: Kernel) -> dict:
    return {"base_kernel": kernel.base_kernel, "num_dims": kernel.num_dims, **_active_dims(kernel)}


def _harmonic(kernel: HarmonicKernel) -> dict:
    given = None if kernel.follows_data else kernel.reference_height
    return {
        "num_depths": kernel.num_depths,
        "sources": kernel.sources,
        "reference_height": given,
        **_active_dims(kernel),
    }


def _coefficients(kernel: DotProductKernel) -> list[float]:
    """One where coefficients are positive, zero elsewhere; their values are in the state."""
    return [float(n in kernel.degrees) for n in range(max(kernel.degrees) + 1)]


def _multitask(likelihood: MultitaskGaussianLikelihood) -> dict:
    names = ("num_tasks", "rank", "has_task_noise", "has_global_noise")
    return {name: getattr(likelihood, name) for name in names}


def _tails(likelihood: HeavyTails) -> dict:
    nu = likelihood.deg_free
    return {"deg_free": None if nu is None else nu.item()}


def _task_rank(kernel: Kernel) -> int:
    return kernel.task_covar_module.covar_factor.shape[-1]


# the constructor arguments of an instance of each class; "*" are positional ones
_ARGUMENTS: dict[type, Callable[[Module], dict]] = {
    RBFKernel: _scalar,
    RQKernel: _scalar,
    MaternKernel: lambda k: {"nu": k.nu, **_scalar(k)},
    GeneralMaternKernel: lambda k: {"nu": k.nu, **_scalar(k)},
    LearnedSpectrumKernel: lambda k: {
        "num_knots": k.num_knots,
        "smoothness": k.smoothness,
        "continued": k.continued,
        **_scalar(k),
    },
    BesselKernel: lambda k: {"power": k.power, "num_dims": k.num_dims, **_scalar(k)},
    SpectralMixtureKernel: lambda k: {"num_mixtures": k.num_mixtures, **_scalar(k)},
    LinearKernel: _scalar,
    PolynomialKernel: lambda k: {"power": k.power, **_active_dims(k)},
    DotProductKernel: lambda k: {"coefficients": _coefficients(k), **_active_dims(k)},
    LegendreKernel: lambda k: {
        "eigenvalues": _coefficients(k),
        "num_dims": k.num_dims,
        **_active_dims(k),
    },
    ProjectionKernel: lambda k: {
        "coefficients": _coefficients(k),
        "num_dims": k.num_dims,
        **_active_dims(k),
    },
    ConstantKernel: _active_dims,
    ScaleKernel: lambda k: {"base_kernel": k.base_kernel},
    AdditiveKernel: lambda k: {"*": list(k.kernels)},
    ProductKernel: lambda k: {"*": list(k.kernels)},
    MultitaskKernel: lambda k: {
        "data_covar_module": k.data_covar_module,
        "num_tasks": k.num_tasks,
        "rank": _task_rank(k),
    },
    LCMKernel: lambda k: {
        "base_kernels": [term.data_covar_module for term in k.covar_module_list],
        "num_tasks": k.covar_module_list[0].num_tasks,
        "rank": [_task_rank(term) for term in k.covar_module_list],
    },
    CurlFreeKernel: _field,
    DivergenceFreeKernel: _field,
    HelmholtzKernel: lambda k: _field(k.curl_free.base_kernel),
    HarmonicKernel: _harmonic,
    FieldProductKernel: lambda k: {"*": [k.field_kernel, k.scalar_kernel]},
    SeparableKernel: lambda k: {
        "base_kernel": k.base_kernel,
        "root": k.root,  # a parameter if it is trained
        **_active_dims(k),
    },
    GaussianLikelihood: lambda likelihood: {},
    MultitaskGaussianLikelihood: _multitask,
    MultitaskStudentTLikelihood: lambda noise: {**_tails(noise), **_multitask(noise)},
    TrackLikelihood: lambda noise: {"num_tasks": noise.num_tasks},
    KnownNoiseLikelihood: lambda noise: {"num_tasks": noise.num_tasks, **_tails(noise)},
    ConstantMean: lambda mean: {},
    ZeroMean: lambda mean: {},
    MultitaskMean: lambda mean: {"base_means": list(mean.base_means), "num_tasks": mean.num_tasks},
}
_CLASSES = {cls.__name__: cls for cls in _ARGUMENTS}


def describe(module: Module) -> dict:
    """A module as plain values: its recipe, if it has one, its state and its frozen parameters.

    Raises:
        ValueError: a spectral matrix that is a plain function, whose values are in no state.
    """
    for part in module.modules():
        if isinstance(part, SpectralMatrixKernel) and not isinstance(part.amplitude, nn.Module):
            raise ValueError(
                "expected the amplitude of a SpectralMatrixKernel to be a torch.nn.Module, whose "
                f"parameters and buffers a file keeps, got {part.amplitude!r}; put the function "
                "into the forward of a module, and pass kernel= to load"
            )
    parameters = [own for _, own in module.named_parameters(remove_duplicate=False)]
    shared = len(set(map(id, parameters))) < len(parameters)  # in two places of the tree
    return {
        "name": type(module).__name__,
        "recipe": None if shared else _recipe(module),
        "state": module.state_dict(),
        "frozen": [n for n, p in module.named_parameters() if not p.requires_grad],
    }


def build(description: Mapping, module: Module | None, role: str) -> Module:
    """Build a module from its description; with `module`, only load the state into it.

    Raises:
        ValueError: neither a recipe nor a module, or a module with other parameters.
    """
    if module is None and description["recipe"] is None:
        raise ValueError(
            f"the file has a {role} {description['name']!r} whose class, constraints or priors it "
            f"cannot describe: pass {role}=, built like the one that was saved"
        )
    if module is None:
        module = _build_recipe(description["recipe"])
    present = module.double().state_dict()  # with what the recipe says and older files lack
    extra = {name: value for name, value in present.items() if name.endswith("_extra_state")}
    try:
        module.load_state_dict(extra | description["state"])
    except RuntimeError as error:
        raise ValueError(
            f"expected a {role} like the saved {description['name']!r}, got one with other "
            f"parameters: {' '.join(str(error).split())}"
        ) from error
    for name, parameter in module.named_parameters():  # what older files do not know was constant
        learned = name in description["state"] and name not in description["frozen"]
        parameter.requires_grad_(learned)
    return module


def _recipe(module: Module) -> dict | None:
    """How to build a module; None if a class, constraint or prior in it is not a known one."""
    if type(module) not in _ARGUMENTS or not all(map(_is_own, module.named_priors())):
        return None
    if getattr(module, "batch_shape", torch.Size()):
        return None
    constraints = {}
    for name, constraint in module.named_constraints():
        if type(constraint).__name__ not in _CONSTRAINTS or not constraint.enforced:
            return None
        bounds = [constraint.lower_bound.tolist(), constraint.upper_bound.tolist()]
        default = _constraint(type(constraint).__name__, *map(torch.tensor, bounds))
        if not _same_function(constraint._transform, default._transform):
            return None
        constraints[name] = [type(constraint).__name__, *bounds]
    arguments = {}
    for name, value in _ARGUMENTS[type(module)](module).items():
        parts = value if isinstance(value, list) else [value]
        plain = [_recipe(part) if isinstance(part, Module) else part for part in parts]
        pairs = zip(plain, parts, strict=True)
        if any(value is None and isinstance(part, Module) for value, part in pairs):
            return None
        arguments[name] = plain if isinstance(value, list) else plain[0]
    dims = getattr(module, "active_dims", None)
    return {
        "class": type(module).__name__,
        "arguments": arguments,
        "constraints": constraints,
        "active_dims": None if dims is None else dims.tolist(),
        "half": getattr(module, "helmholtz_half", None),  # of a HelmholtzKernel in a sum
    }


def _is_own(named_prior: tuple) -> bool:
    """Whether a prior is the one that the constructor of its module makes."""
    name, owner, prior, _, _ = named_prior
    if isinstance(owner, HeavyTails) and name.rpartition(".")[-1] == "deg_free_prior":
        return owner.has_default_prior
    kind, scale = _OWN_PRIORS.get(name.rpartition(".")[-1], ((), None))
    if not (isinstance(owner, kind) and isinstance(prior, NormalPrior)):
        return False
    return (float(prior.loc), float(prior.scale)) == (0.0, scale)


def _build_recipe(recipe: Mapping) -> Module:
    arguments = {name: _build_argument(value) for name, value in recipe["arguments"].items()}
    positional = arguments.pop("*", [])
    cls = _CLASSES[recipe["class"]]
    if arguments.get("active_dims") is not None:
        arguments["active_dims"] = tuple(arguments["active_dims"])
    module = cls(*positional, **arguments)
    if recipe.get("half") is not None:
        module.helmholtz_half = recipe["half"]
    if recipe["active_dims"] is not None:  # which composite kernels do not take as an argument
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
            "expected observations of symbols of this package, got those of "
            f"{type(symbol).__name__}, which a file cannot describe; save the model without them "
            "and observe them again after loading"
        )
    values = {field.name: getattr(symbol, field.name) for field in fields(symbol)}
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


def _same_function(one: object, other: object) -> bool:
    """Whether both are one object, or equal modules, such as two `torch.nn.Softplus`."""
    equal = (
        isinstance(one, torch.nn.Module) and type(one) is type(other) and repr(one) == repr(other)
    )
    return one is other or equal


def describe_rule(rule: Rule) -> dict | None:
    """A rule of this package as plain values; None for another rule."""
    exported = is_dataclass(rule) and getattr(frequencies, type(rule).__name__, None) is type(rule)
    return {"class": type(rule).__name__, **asdict(rule)} if exported else None


def build_rule(description: Mapping | None, rule: Rule | None) -> Rule:
    """`rule` if there is one, else the rule of a description.

    Raises:
        ValueError: neither a description nor a rule.
    """
    if rule is not None:
        return rule
    if description is None:
        raise ValueError("the file has a frequency rule it cannot describe: pass frequencies=")
    arguments = {name: _tuples(value) for name, value in description.items() if name != "class"}
    return getattr(frequencies, description["class"])(**arguments)


def _tuples(value: object) -> object:
    return tuple(map(_tuples, value)) if isinstance(value, list | tuple) else value
