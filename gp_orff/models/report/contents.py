"""The contents of a model as numbers: hyperparameters, noise, the constant mean, the data."""

from collections import Counter
from collections.abc import Iterable, Mapping

import numpy as np
import torch
from gpytorch import Module
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import Likelihood
from gpytorch.means import Mean
from jaxtyping import Float
from torch import Tensor, nn

from gp_orff.data.dataset import Data, StatisticsOnly
from gp_orff.data.noise.covariances import Noises
from gp_orff.data.patterns import DEFAULT
from gp_orff.data.sources import is_constant
from gp_orff.models.frozen_model import ModelSnapshot
from gp_orff.models.report.names import parameter_names, readable_names

Numbers = float | Float[np.ndarray, "..."]
_DEFAULT_NAMES = ("default", "unnamed", DEFAULT)  # the first that is no group's name is used


def data_attributes(data: Data) -> dict[str, object]:
    """The attributes of `FitReport` that describe the data."""
    observed: Counter[str] = Counter()
    for part in data.symbol_data:
        observed[type(part.symbol).__name__] += part.num_values
    return {
        "points": data.survey.num_points,
        "numbers": data.num_values,
        "held": "statistics" if isinstance(data, StatisticsOnly) else "data",
        "observed": dict(observed),
    }


def noise_variances(noises: Noises) -> dict[str, Numbers]:
    """Noise variances by group: a float where all components have the same one, else (p,)."""
    default = next(name for name in _DEFAULT_NAMES if name == DEFAULT or name not in noises)
    numbers = {}
    for label, covariance in noises.items():
        variances = as_numbers(covariance.diagonal())
        equal = np.ptp(variances) <= 1e-12 * np.max(variances)
        numbers[label or default] = float(np.max(variances)) if equal else variances
    return numbers


def trained_names(kernel: Kernel, likelihoods: Mapping[str, Likelihood]) -> frozenset[str]:
    """The names of the hyperparameters that a fit learns."""
    names = parameter_names(kernel, likelihoods)
    return frozenset(name for name, parameter in names.items() if parameter.requires_grad)


def hyperparameter_values(
    kernel: Kernel, likelihoods: Mapping[str, Likelihood], present: Iterable[str]
) -> dict[str, Numbers]:
    """The values of the kernel and of the likelihoods of the groups in `present`, by name."""
    values = _by_parameter([kernel, *likelihoods.values()])
    absent = {p for label in {*likelihoods} - {*present} for p in likelihoods[label].parameters()}
    absent -= {*kernel.parameters()}
    names = parameter_names(kernel, likelihoods)
    return {name: values[parameter] for name, parameter in names.items() if parameter not in absent}


def mean_values(mean: Mean) -> dict[str, Numbers]:
    """The parameters of a mean that is not constant, by name; such a mean is not trained."""
    if is_constant(mean):
        return {}
    values = _by_parameter([mean])
    return {f"mean.{name}": values[parameter] for name, parameter in readable_names(mean).items()}


@torch.no_grad()
def constant_mean(snapshot: ModelSnapshot) -> tuple[Numbers, Numbers]:
    """The constant mean (p,) and its standard error √((1ᵀK⁻¹1)⁻¹)_ii by generalised least squares,
    which is NaN for a fixed mean and where the data do not determine it."""
    value, evidence = as_numbers(snapshot.constant), snapshot.posterior.evidence
    if snapshot.fixed_mean is not None or len(evidence.unknown_means()):
        return value, as_numbers(torch.full_like(snapshot.constant, torch.nan))
    return value, as_numbers(evidence.mean_root().square().sum(-1).sqrt())


def as_numbers(values: Tensor | Float[np.ndarray, "..."]) -> Numbers:
    """Convert to a float, or to an array without axes of length 1."""
    if isinstance(values, Tensor):
        values = values.detach().cpu().double().numpy()
    values = np.squeeze(values).copy()
    return values if values.ndim else float(values)


def _by_parameter(modules: Iterable[Module]) -> dict[nn.Parameter, Numbers]:
    """The values of parameters, transformed by their constraints."""
    return {
        parameter: as_numbers(parameter if constraint is None else constraint.transform(parameter))
        for module in modules
        for _, parameter, constraint in module.named_parameters_and_constraints()
    }
