"""Standard errors of hyperparameters, and the evidence with learned curves integrated out."""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import Likelihood
from jaxtyping import Float
from torch import Tensor, nn

from gp_orff.data.dataset import Dataset
from gp_orff.data.likelihoods import raw_deg_frees
from gp_orff.fitting.curvature import observed, prior_scales
from gp_orff.fitting.names import parameter_names
from gp_orff.fitting.noise import Tails, search_coordinates
from gp_orff.fitting.robust_em import EStep, heavy_tailed_noise
from gp_orff.fitting.scoring import WeakPriors
from gp_orff.fitting.search import Coordinates
from gp_orff.fitting.trainer import MOST_SEARCHED
from gp_orff.inference.exact import ExactInference
from gp_orff.inference.features import log_marginal_likelihood
from gp_orff.kernels.learned import learned_spectra
from gp_orff.models.frozen_model import ModelSnapshot
from gp_orff.threads import chosen_threads

# Standard errors of hyperparameters, from the curvature of the evidence.


_ESTIMATED = (
    "no standard errors: the evidence of so many features is an estimate, whose curvature is not "
    "that of the evidence"
)
_LEARNED_ELSEWHERE = (
    "no standard errors: so many numbers under the exact kernel learn the hyperparameters on "
    "subsets or on a grid, near the maximum of their evidence, not at it"
)
_FLAT = 1e-3  # nats: smaller curvatures, standard errors above 30 in a logarithm, count as flat
_ROUNDING = 1e-9  # of the largest curvature
_COMPONENT = 1e-3  # along a flat direction: a coordinate with more has no standard error
_NEAR, _AT = 0.5, 2.0  # nats below a maximum: one and two standard errors in one direction


@dataclass(frozen=True)
class StandardErrors:
    """Standard errors by the names of hyperparameters, NaN where there is none, and remarks why."""

    values: Mapping[str, Float[np.ndarray, "..."]] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Curvature:
    """The curvature of the log evidence and the log priors, at the hyperparameters of a snapshot.

    The Hessian H is taken in the coordinates u of the search, usually logarithms, by central
    differences of the exact gradient:

        sd(θ_i) = |∂θ_i/∂u_i| √((−H)⁻¹)_ii .

    The constant mean maximises the evidence at every u, so H is the Hessian of the profile
    likelihood. Of few data, which learned with weak priors, it is that of the restricted likelihood
    plus these priors. Frozen coordinates and coordinates at a bound are held fixed. The degrees of
    freedom of Student-t noise have the curvature that `Tail` tells.
    """

    snapshot: ModelSnapshot
    trained: frozenset[str]  # names of hyperparameters
    weak_priors: bool = False  # whether they were learned with weak priors

    @property
    def evaluations(self) -> int:
        """The number of evaluations of the gradient that the Hessian takes, if it is computed."""
        if self._learned_elsewhere:
            return 0
        parameters = parameter_names(self.snapshot.kernel, self._likelihoods)
        trained = {parameters[name] for name in self.trained}
        trained -= set().union(*map(raw_deg_frees, self._likelihoods.values()))
        return 2 * sum(parameter.numel() for parameter in trained)

    @property
    def computed(self) -> bool:
        """Whether the standard errors have been computed."""
        return "standard_errors" in vars(self)

    @cached_property
    def standard_errors(self) -> StandardErrors:
        """The standard errors of the trained hyperparameters, computed at the first access."""
        if not self.trained:
            return StandardErrors()
        with chosen_threads():
            return self.compute()

    def compute(self) -> StandardErrors:
        """Compute the standard errors of the trained hyperparameters."""
        if self.snapshot.log_marginal_likelihood_error > 0:
            return StandardErrors(remarks=(_ESTIMATED,))
        if self._learned_elsewhere:
            return StandardErrors(remarks=(_LEARNED_ELSEWHERE,))
        kernel, likelihoods = deepcopy((self.snapshot.kernel, dict(self._likelihoods)))
        names = parameter_names(kernel, likelihoods)
        for name, parameter in names.items():
            parameter.requires_grad_(name in self.trained)
        survey = self.snapshot.representation.data.survey
        coordinates = search_coordinates(kernel, likelihoods, survey)
        model = self.snapshot.inference, kernel, likelihoods, self.snapshot.fixed_mean
        weak = WeakPriors.of(kernel, likelihoods, survey) if self.weak_priors else None

        def objective() -> Float[Tensor, ""]:
            value = log_marginal_likelihood(*model, restricted=weak is not None)
            prior = 0.0 if weak is None else weak.log_density(kernel, likelihoods)
            return value + coordinates.log_prior() + prior

        u = coordinates.get()
        errors_of_u = np.full_like(u, np.nan)
        free = coordinates.at_bounds(u) == 0
        try:
            gradient, precision = observed(coordinates, objective, free)
        except (torch.linalg.LinAlgError, ValueError, RuntimeError) as error:
            remarks = [
                f"no standard errors: the evidence at nearby hyperparameters failed ({error})"
            ]
        else:
            errors_of_u[free], remarks = _errors(gradient, precision)
        errors = coordinates.by_parameter(errors_of_u * np.abs(coordinates.slopes()))
        for parameter in rotating(names):
            errors.pop(parameter, None)
        errors.update(self._of_tails(kernel, likelihoods))
        if any(heavy_tailed_noise(likelihood) is not None for likelihood in likelihoods.values()):
            remarks.append(
                "standard errors hold the Student-t weights of the observations fixed, and are "
                "too small by the uncertainty of the weights"
            )
        return StandardErrors(
            {name: errors[p] for name, p in names.items() if p in errors}, tuple(remarks)
        )

    def _of_tails(
        self, kernel: Kernel, likelihoods: Mapping[str, Likelihood]
    ) -> dict[nn.Parameter, Float[np.ndarray, "1"]]:
        """Those of degrees of freedom, from the weights of readings in memory."""
        data = self.snapshot.representation.data
        if not (isinstance(data, Dataset) and data.weights and data.is_small):
            return {}
        found = EStep(kernel, likelihoods, None).stored(data)
        errors = Tails(likelihoods, scaled=True).standard_errors(found)
        return {parameter: np.array([error]) for parameter, error in errors.items()}

    @property
    def _learned_elsewhere(self) -> bool:
        """Whether no search has seen the evidence of all numbers."""
        inference = self.snapshot.inference
        return isinstance(inference, ExactInference) and inference.size > MOST_SEARCHED

    @property
    def _likelihoods(self) -> Mapping[str, Likelihood]:
        return self.snapshot.representation.likelihoods


def rotating(names: Mapping[str, nn.Parameter]) -> list[nn.Parameter]:
    """Low-rank factors W of gpytorch's output covariances W Wᵀ with several columns: W is
    determined only up to a rotation, and has no standard error."""
    factors = (parameter for name, parameter in names.items() if name.endswith("covar_factor"))
    return [factor for factor in factors if factor.shape[-1] > 1]


def _errors(
    gradient: Float[np.ndarray, "m"], precision: Float[np.ndarray, "m m"]
) -> tuple[Float[np.ndarray, "m"], list[str]]:
    """Standard errors of the coordinates from the gradient and −H, and remarks; NaN for coordinates
    with a component along flat directions, and for all where the gradient is far from zero."""
    if not len(gradient):
        return np.zeros(0), []
    if not (np.isfinite(precision).all() and np.isfinite(gradient).all()):
        return np.full_like(gradient, np.nan), ["no standard errors: the curvature is not finite"]
    curvature, directions = np.linalg.eigh(0.5 * (precision + precision.T))
    asymmetry = np.abs(precision - precision.T).max()
    # The asymmetry of the numerical Hessian measures its error: smaller curvatures are not
    # determined.
    curved = curvature > max(_FLAT, _ROUNDING * curvature[-1], asymmetry)
    scaled = directions[:, curved] / np.sqrt(curvature[curved])
    errors = np.sqrt(np.square(scaled).sum(-1))
    flat = (np.abs(directions[:, ~curved]) > _COMPONENT).any(-1)
    gain = 0.5 * np.square(gradient @ scaled).sum()  # nats of a Newton step
    errors[flat | (gain > _AT)] = np.nan
    if gain > _AT:
        return errors, ["no standard errors: the evidence is not at a maximum"]
    remarks = []
    if flat.any():
        remarks.append("no standard error where the evidence is flat or has no maximum")
    if gain > _NEAR:
        remarks.append(f"a Newton step would raise the log evidence by about {gain:.2g} nats")
    return errors, remarks


# The evidence with the curves of learned spectra integrated out, by Laplace's method.


_STEP = 1e-3  # of the central differences of gradients, in standard deviations of the prior
_LEAST = 0.1  # of the precision, where the prior has one: it is not at a maximum where it is less


def integration_over_spectra(snapshot: ModelSnapshot, kernel: Kernel) -> float:
    """What the log evidence changes by when the learned curves θ are integrated out, in nats.

    With a prior θ ~ N(0, I), at its value θ̂ that maximises log p(y|θ) + log p(θ),

        log ∫ p(y|θ) p(θ) dθ − log p(y|θ̂) ≈ −½ ‖θ̂‖² − ½ log |H| ,    H = I − ∂² log p(y|θ̂) :

    a maximum gains by every curve that it may choose, this does not. All other hyperparameters keep
    their values. Two gradients of the evidence for each trained coordinate of a curve; 0 without.

    Args:
        snapshot: of a fitted model.
        kernel: its kernel, which tells the curves that are trained; it is not changed.
    """
    kernel, likelihoods = deepcopy((kernel, dict(snapshot.representation.likelihoods)))
    curves = [part.shape for part in learned_spectra(kernel, trained=True)]
    if not curves:
        return 0.0
    for parameter in kernel.parameters():
        parameter.requires_grad_(any(parameter is curve for curve in curves))
    model, coordinates = (snapshot.inference, kernel, likelihoods), Coordinates(kernel)

    def objective() -> Float[Tensor, ""]:
        return log_marginal_likelihood(*model, snapshot.fixed_mean) + coordinates.log_prior()

    scales = prior_scales(kernel, coordinates)
    _, precision = observed(coordinates, objective, steps=_STEP / scales)
    eigenvalues = np.linalg.eigvalsh(precision / np.outer(scales, scales))
    square = sum(curve.detach().double().square().sum().item() for curve in curves)
    return -0.5 * float(square + np.log(np.maximum(eigenvalues, _LEAST)).sum())
