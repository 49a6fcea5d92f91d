"""What a model holds, as numbers: hyperparameters, noise, the constant mean, the data."""

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
_UNSEEN = 1e-10  # of the information on a mean, below which there is none
_WITHOUT_NAME = ("default", "unnamed", DEFAULT)  # the first that no group has


def data_attributes(data: Data) -> dict[str, object]:
    """As those of `FitReport`."""
    observed: Counter[str] = Counter()
    for own in data.symbol_data:
        observed[type(own.symbol).__name__] += own.num_values
    return {
        "points": data.survey.num_points,
        "numbers": data.num_values,
        "held": "statistics" if isinstance(data, StatisticsOnly) else "data",
        "observed": dict(observed),
    }


def noise_variances(noises: Noises) -> dict[str, Numbers]:
    """By group: one for all components, or one for each."""
    unnamed = next(name for name in _WITHOUT_NAME if name == DEFAULT or name not in noises)
    found = {}
    for label, covariance in noises.items():
        variances = as_numbers(covariance.diagonal())
        alike = np.ptp(variances) <= 1e-12 * np.max(variances)
        found[label or unnamed] = float(np.max(variances)) if alike else variances
    return found


def trained_names(kernel: Kernel, likelihoods: Mapping[str, Likelihood]) -> frozenset[str]:
    """Of the hyperparameters that a fit would learn."""
    names = parameter_names(kernel, likelihoods)
    return frozenset(name for name, own in names.items() if own.requires_grad)


def hyperparameter_values(
    kernel: Kernel, likelihoods: Mapping[str, Likelihood], present: Iterable[str]
) -> dict[str, Numbers]:
    """Those of the kernel and of the noise of the groups that are present."""
    values = _by_parameter([kernel, *likelihoods.values()])
    absent = [p for label in {*likelihoods} - {*present} for p in likelihoods[label].parameters()]
    absent = {own for own in absent if all(own is not p for p in kernel.parameters())}
    names = parameter_names(kernel, likelihoods)
    return {name: values[own] for name, own in names.items() if own not in absent}


def mean_values(mean: Mean) -> dict[str, Numbers]:
    """The parameters of a mean that is taken as it is."""
    if is_constant(mean):
        return {}
    values = _by_parameter([mean])
    return {f"mean.{name}": values[own] for name, own in readable_names(mean).items()}


@torch.no_grad()
def constant_mean(snapshot: ModelSnapshot) -> tuple[Numbers, Numbers]:
    """The constant and, where it is the one of largest evidence, its standard error by generalised
    least squares: √((1ᵀK⁻¹1)⁻¹)_ii."""
    value = as_numbers(snapshot.constant)
    information = snapshot.posterior.evidence.quad[1:, 1:]
    seen = torch.linalg.eigvalsh(information)
    if snapshot.fixed_mean is not None or not seen[0] > _UNSEEN * seen[-1]:
        return value, as_numbers(torch.full_like(snapshot.constant, torch.nan))
    return value, as_numbers(torch.linalg.inv(information).diagonal().sqrt())


def as_numbers(values: Tensor | Float[np.ndarray, "..."]) -> Numbers:
    """A float, or an array without axes of length 1."""
    if isinstance(values, Tensor):
        values = values.detach().cpu().double().numpy()
    values = np.squeeze(values).copy()
    return values if values.ndim else float(values)


def _by_parameter(modules: Iterable[Module]) -> dict[nn.Parameter, Numbers]:
    """As the user sees them."""
    return {
        parameter: as_numbers(parameter if own is None else own.transform(parameter))
        for module in modules
        for _, parameter, own in module.named_parameters_and_constraints()
    }
