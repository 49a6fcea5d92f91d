"""Standard errors of hyperparameters, from the curvature of the evidence."""

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from gpytorch.likelihoods import Likelihood
from jaxtyping import Bool, Float
from torch import Tensor, nn

from gp_orff.inference.conditioning import log_marginal_likelihood
from gp_orff.models.fitting.coordinates import Coordinates
from gp_orff.models.fitting.ranges import parameter_ranges
from gp_orff.models.fitting.robust_em import heavy_tailed_noise
from gp_orff.models.frozen_model import ModelSnapshot
from gp_orff.models.report.names import parameter_names
from gp_orff.models.threads import chosen_threads

STEP = 2e-4
"""In a coordinate, a logarithm mostly, on either side. The error of a central difference grows with
STEP², about 1e-8 of the curvature, and that of rounding with 1/STEP, 1e-8 where gradients have 12
digits. A grid serves lengthscales that far from those it was built for."""
_UNTOLD = 1e-3  # nats: a curvature of less, a standard error of 30 in a logarithm, is none
_ROUNDING = 1e-9  # of the largest curvature
_SHARE = 1e-3  # of a direction that is not told: a coordinate with more of it is not told either
_NEAR, _AT = 0.5, 2.0  # nats below a maximum: one and two standard errors in one direction


@dataclass(frozen=True)
class StandardErrors:
    """By the names of hyperparameters; NaN where there are none, and why in words."""

    values: Mapping[str, Float[np.ndarray, "..."]] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Curvature:
    """That of the log evidence and log priors at the hyperparameters of a model as it was.

    In the coordinates u of a search, logarithms mostly, with the Hessian H in u by central
    differences of the exact gradient,

        sd(θ_i) = |∂θ_i/∂u_i| √((−H)⁻¹)_ii .

    The constant mean is the best one at every place, so that H is that of the profile. Coordinates
    at a bound and frozen ones are held.
    """

    snapshot: ModelSnapshot
    trained: frozenset[str]  # the names of the hyperparameters that were

    @property
    def evaluations(self) -> int:
        """That it takes."""
        known = parameter_names(self.snapshot.kernel, self._likelihoods)
        return 2 * sum(known[name].numel() for name in self.trained)

    @property
    def known(self) -> bool:
        """Whether it has been computed."""
        return "standard_errors" in vars(self)

    @cached_property
    def standard_errors(self) -> StandardErrors:
        if not self.trained:
            return StandardErrors()
        with chosen_threads():
            return self._computed()

    def _computed(self) -> StandardErrors:
        kernel, likelihoods = deepcopy((self.snapshot.kernel, dict(self._likelihoods)))
        names = parameter_names(kernel, likelihoods)
        for name, parameter in names.items():
            parameter.requires_grad_(name in self.trained)
        ranges = parameter_ranges(kernel, self.snapshot.representation.data.survey.distances)
        coordinates = Coordinates(kernel, *likelihoods.values(), ranges=ranges)

        def objective() -> Float[Tensor, ""]:
            model = (self.snapshot.inference, kernel, likelihoods, self.snapshot.fixed_mean)
            return log_marginal_likelihood(*model) + coordinates.log_prior()

        place = coordinates.get()
        found = np.full_like(place, np.nan)
        free = coordinates.at_bounds(place) == 0
        try:
            slope, hessian = _derivatives(coordinates, objective, place, free)
        except (torch.linalg.LinAlgError, ValueError, RuntimeError) as error:
            remarks = [f"no standard errors: the evidence near by fails ({error})"]
        else:
            found[free], remarks = _errors(slope, -hessian)
        coordinates.set(place)
        errors = coordinates.by_parameter(found * np.abs(coordinates.slopes()))
        for parameter in rotating(names):
            errors.pop(parameter, None)
        if any(heavy_tailed_noise(own) is not None for own in likelihoods.values()):
            remarks.append(
                "standard errors are those at the weights of readings under Student-t noise, and "
                "too small by what is not known of the weights"
            )
        return StandardErrors(
            {name: errors[own] for name, own in names.items() if own in errors}, tuple(remarks)
        )

    @property
    def _likelihoods(self) -> Mapping[str, Likelihood]:
        return self.snapshot.representation.likelihoods


def rotating(names: Mapping[str, nn.Parameter]) -> list[nn.Parameter]:
    """Factors of covariances of outputs with several columns, whose rotations are one covariance.
    Gpytorch calls all of them so."""
    factors = (own for name, own in names.items() if name.endswith("covar_factor"))
    return [own for own in factors if own.shape[-1] > 1]


def _derivatives(
    coordinates: Coordinates,
    objective: Callable[[], Float[Tensor, ""]],
    place: Float[np.ndarray, "k"],
    free: Bool[np.ndarray, "k"],
) -> tuple[Float[np.ndarray, "m"], Float[np.ndarray, "m m"]]:
    """The gradient and the Hessian, in the free coordinates."""
    if not free.any():
        return np.zeros(0), np.zeros((0, 0))
    sides = []
    for step in STEP * np.eye(len(place))[free]:
        for side in (step, -step):
            coordinates.set(place + side)
            sides.append(coordinates.value_and_gradient(objective)[1][free])
    after, before = np.array(sides[::2]), np.array(sides[1::2])
    return 0.5 * (after + before).mean(0), (after - before) / (2 * STEP)


def _errors(
    slope: Float[np.ndarray, "m"], precision: Float[np.ndarray, "m m"]
) -> tuple[Float[np.ndarray, "m"], list[str]]:
    """Of coordinates, from the gradient and −H; NaN for those with a share in directions that
    the evidence does not tell, or at no maximum."""
    if not len(slope):
        return np.zeros(0), []
    if not (np.isfinite(precision).all() and np.isfinite(slope).all()):
        return np.full_like(slope, np.nan), ["no standard errors: the curvature is not finite"]
    curvature, directions = np.linalg.eigh(0.5 * (precision + precision.T))
    noise = np.abs(precision - precision.T).max()
    told = curvature > max(_UNTOLD, _ROUNDING * curvature[-1], noise)
    scaled = directions[:, told] / np.sqrt(curvature[told])
    errors = np.sqrt(np.square(scaled).sum(-1))
    untold = (np.abs(directions[:, ~told]) > _SHARE).any(-1)
    below = 0.5 * np.square(slope @ scaled).sum()  # nats that a Newton step would gain
    errors[untold | (below > _AT)] = np.nan
    if below > _AT:
        return errors, ["no standard errors: the evidence is not at a maximum"]
    remarks = []
    if untold.any():
        remarks.append("no standard errors where the evidence has no maximum, or is flat")
    if below > _NEAR:
        remarks.append(
            f"the maximum of the evidence is about {below:.2g} nats higher, by a Newton step"
        )
    return errors, remarks
