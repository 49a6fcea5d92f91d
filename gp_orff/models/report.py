"""`FitReport`: the learned hyperparameters, the stages of a fit, and the accuracy of features."""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from functools import cached_property, partial

import numpy as np
import torch
from gpytorch import Module
from gpytorch.kernels import AdditiveKernel, Kernel, MaternKernel, ProductKernel
from gpytorch.likelihoods import Likelihood
from gpytorch.means import Mean
from jaxtyping import Float
from torch import Tensor, nn

from gp_orff.data.dataset import is_constant
from gp_orff.data.likelihoods import raw_deg_frees
from gp_orff.data.noise import Noises, noises_of
from gp_orff.data.patterns import DEFAULT
from gp_orff.data.pointwise import any_pointwise
from gp_orff.features.truncation import accuracy
from gp_orff.fitting.coordinates import Coordinates
from gp_orff.fitting.curvature import observed, prior_scales
from gp_orff.fitting.journal import History, Stage
from gp_orff.fitting.names import parameter_names, readable_names
from gp_orff.fitting.noise import Tails, search_coordinates
from gp_orff.fitting.robust_em import EStep, heavy_tailed_noise
from gp_orff.fitting.scoring import WeakPriors
from gp_orff.inference.features import log_marginal_likelihood
from gp_orff.inference.price import MOST_TRAINING
from gp_orff.kernels.base import children_of
from gp_orff.models.frozen_model import ModelSnapshot, Snapshot
from gp_orff.threads import chosen_threads

# The features that represent the kernel, and their accuracy.


@torch.no_grad()
def approximation(snapshot: ModelSnapshot) -> dict[str, object]:
    """The representation of the kernel in a model with data: values of attributes of `FitReport`,
    by name."""
    inference, kernel = snapshot.inference, snapshot.kernel
    if inference.is_exact:
        return {"method": "exact"}
    found = {"features": inference.num_features(kernel)}
    if any(draw.sampled for draw in inference.draws):
        return {"method": "random", **found}
    grids = accuracy(kernel, inference.draws)
    if not grids:
        return {"method": "quadrature", **found}
    return {
        "method": "grid",
        **found,
        "tolerance_reached": max(grid.tolerance for grid in grids),
        "aliasing": max(grid.aliasing for grid in grids),
        "share_cut": max(grid.truncated for grid in grids),
        "cut_over_noise": max(inference.truncation_ratios(kernel, snapshot.noises).values()),
    }


# The contents of a model as numbers: hyperparameters, noise, and the constant mean.


Numbers = float | Float[np.ndarray, "..."]
_SIGNS = {AdditiveKernel: " + ", ProductKernel: " * "}
_DEFAULT_NAMES = ("default", "unnamed", DEFAULT)  # the first one that no group has is used


def noise_variances(noises: Noises) -> dict[str, Numbers]:
    """Noise variances by group: a float if they are equal for all components, otherwise (p,)."""
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
    """The hyperparameters of the kernel, and of the likelihoods of groups in `present`, by name."""
    values = _by_parameter([kernel, *likelihoods.values()])
    absent = {p for label in {*likelihoods} - {*present} for p in likelihoods[label].parameters()}
    absent -= {*kernel.parameters()}
    names = parameter_names(kernel, likelihoods)
    return {name: values[parameter] for name, parameter in names.items() if parameter not in absent}


@torch.no_grad()
def description(snapshot: Snapshot) -> str:
    """The kernel, its hyperparameters, the noise variances and the constant mean, in one line."""
    kernel, noises = snapshot.kernel, getattr(snapshot, "noises", {})
    values = hyperparameter_values(kernel, {}, ())
    for label, variance in noise_variances(noises).items():
        values["noise" if len(noises) == 1 else f"{label}.noise"] = variance
    values["mean"] = as_numbers(snapshot.constant)
    numbers = ", ".join(f"{name} = {brief(value, 5)}" for name, value in values.items())
    return f"kernel {expression(kernel)}; {numbers}"


def expression(kernel: Kernel) -> str:
    """The classes in a tree of kernels: `ScaleKernel(CurlFreeKernel(MaternKernel(nu=1.5)))`."""
    children = [part for part in children_of(kernel) if isinstance(part, Kernel)]
    parts, name = [expression(child) for child in children], type(kernel).__name__
    if type(kernel) in _SIGNS:
        nested = zip(children, parts, strict=True)
        return _SIGNS[type(kernel)].join(
            f"({text})" if type(child) in _SIGNS else text for child, text in nested
        )
    if isinstance(kernel, MaternKernel):
        parts.append(f"nu={kernel.nu:g}")
    return f"{name}({', '.join(parts)})" if parts else name


def mean_values(mean: Mean) -> dict[str, Numbers]:
    """The parameters of a mean that is not constant, by name; such a mean is not trained."""
    if is_constant(mean):
        return {}
    values = _by_parameter([mean])
    return {f"mean.{name}": values[parameter] for name, parameter in readable_names(mean).items()}


@torch.no_grad()
def constant_mean(snapshot: ModelSnapshot) -> "Estimate":
    """The constant mean (p,). If it is trained and determined by the data, it has the standard
    error √((1ᵀK⁻¹1)⁻¹)_ii of generalised least squares."""
    value, evidence = as_numbers(snapshot.constant), snapshot.posterior.evidence
    if snapshot.fixed_mean is not None or len(evidence.unknown_means()):
        return Estimate(value)
    error = as_numbers(evidence.mean_root().square().sum(-1).sqrt())
    return Estimate(value, partial(as_numbers, error))


def as_numbers(values: Tensor | Float[np.ndarray, "..."]) -> Numbers:
    """Convert to a float, or to an array without axes of length 1."""
    values = np.squeeze(torch.as_tensor(values).detach().cpu().double().numpy()).copy()
    return values if values.ndim else float(values)


def _by_parameter(modules: Iterable[Module]) -> dict[nn.Parameter, Numbers]:
    """The values of parameters, transformed by their constraints."""
    return {
        parameter: as_numbers(parameter if constraint is None else constraint.transform(parameter))
        for module in modules
        for _, parameter, constraint in module.named_parameters_and_constraints()
    }


# Format numbers: values with standard errors, aligned tables, plain values for logs.


_MAX_NUMBERS = 6  # entries shown of an array; a longer one shows its first two and last two


def brief(value: float | Float[np.ndarray, "..."], digits: int) -> str:
    """Format numbers to `digits` significant digits."""
    if np.ndim(value) == 0:
        return f"{float(value):.{digits}g}"
    formatter = {"float_kind": lambda number: f"{number:.{digits}g}"}
    options = {"separator": ", ", "threshold": _MAX_NUMBERS, "edgeitems": 2}
    return np.array2string(np.ravel(value), formatter=formatter, max_line_width=10**6, **options)


def table(rows: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    """Lines with aligned columns. The first `left` columns are aligned left, the others right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


# Standard errors of hyperparameters, from the curvature of the evidence.


_ESTIMATED = (
    "no standard errors: with this many features the evidence is an estimate, and its curvature is "
    "not that of the exact evidence"
)
_LEARNED_ELSEWHERE = (
    "no standard errors: for this many values under the exact kernel, the hyperparameters are "
    "learned on subsets or on a grid, so they are near the maximum of the evidence, but not at it"
)
_FLAT = 1e-3  # nats: a smaller curvature, or a standard error above 30 of a logarithm, is flat
_ROUNDING = 1e-9  # of the largest curvature
_COMPONENT = 1e-3  # a coordinate with a larger component along a flat direction has no error
_NEAR, _AT = 0.5, 2.0  # nats below a maximum: one and two standard errors in one direction


@dataclass(frozen=True)
class StandardErrors:
    """Standard errors by the names of hyperparameters. `remarks` gives reasons for NaN."""

    values: Mapping[str, Float[np.ndarray, "..."]] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Curvature:
    """The curvature of the log evidence and the log priors, at the hyperparameters of a snapshot.

    The Hessian H is taken in the coordinates u of the search, usually logarithms, by central
    differences of the exact gradient:

        sd(θ_i) = |∂θ_i/∂u_i| √((−H)⁻¹)_ii .

    The constant mean maximises the evidence at every u, so H is the Hessian of the profile
    likelihood. For a fit with weak priors, H is the Hessian of the restricted likelihood plus the
    log priors. Frozen coordinates and coordinates at a bound are fixed. The curvature for the
    degrees of freedom of Student-t noise comes from `Tails`.
    """

    snapshot: ModelSnapshot
    trained: frozenset[str]  # names of hyperparameters
    weak_priors: bool = False  # whether they were learned with weak priors

    @property
    def evaluations(self) -> int:
        """The number of evaluations of the gradient for the Hessian; 0 if it is not computed."""
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

    def error_of(self, name: str) -> Float[np.ndarray, "..."] | None:
        """The standard error of a hyperparameter; None without one."""
        return self.standard_errors.values.get(name)

    @cached_property
    @chosen_threads()
    def standard_errors(self) -> StandardErrors:
        """The standard errors of the trained hyperparameters, computed at the first access."""
        if not self.trained:
            return StandardErrors()
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
        for name, parameter in names.items():
            # Low-rank factors W of gpytorch's output covariances W Wᵀ are determined only up to a
            # rotation if they have several columns.
            if name.endswith("covar_factor") and parameter.shape[-1] > 1:
                errors.pop(parameter, None)
        data = self.snapshot.representation.data
        if data.revisitable and data.weights and data.is_small:  # of degrees of freedom
            found = EStep(kernel, likelihoods, None).stored(data)
            of_tails = Tails(likelihoods, scaled=True).standard_errors(found)
            errors |= {parameter: np.array([error]) for parameter, error in of_tails.items()}
        if any(heavy_tailed_noise(likelihood) is not None for likelihood in likelihoods.values()):
            remarks.append(
                "standard errors treat the Student-t weights of the observations as known, so they "
                "do not include the uncertainty of the weights and are too small"
            )
        if any_pointwise(likelihoods):
            remarks.append("standard errors treat pseudo-observations as known, so they are rough")
        return StandardErrors(
            {name: errors[p] for name, p in names.items() if p in errors}, tuple(remarks)
        )

    @property
    def _learned_elsewhere(self) -> bool:
        """Whether no search has used the evidence of all observed values."""
        inference = self.snapshot.inference
        return inference.is_exact and inference.size > MOST_TRAINING

    @property
    def _likelihoods(self) -> Mapping[str, Likelihood]:
        return self.snapshot.representation.likelihoods


def _errors(
    gradient: Float[np.ndarray, "m"], precision: Float[np.ndarray, "m m"]
) -> tuple[Float[np.ndarray, "m"], list[str]]:
    """Standard errors of the coordinates from the gradient and the precision −H, with remarks.
    Coordinates with a component along flat directions have NaN. If the gradient is far from zero,
    all have NaN."""
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
        remarks.append(
            "no standard errors of hyperparameters along which the evidence is flat or has no "
            "maximum"
        )
    if gain > _NEAR:
        remarks.append(f"a Newton step would raise the log evidence by about {gain:.2g} nats")
    return errors, remarks


# The evidence with learned spectra integrated out, by Laplace's method.


_STEP = 1e-3  # step of central differences of gradients, in standard deviations of the prior
_LEAST = 0.1  # least eigenvalue of the precision, relative to the prior, which has 1


def integration_over_spectra(snapshot: ModelSnapshot, kernel: Kernel) -> float:
    """Return the change of the log evidence if the learned curves θ are integrated out, in nats.

    The prior is θ ~ N(0, I), and θ̂ maximises log p(y|θ) + log p(θ). By Laplace's method,

        log ∫ p(y|θ) p(θ) dθ − log p(y|θ̂) ≈ −½ ‖θ̂‖² − ½ log |H| ,    H = I − ∂² log p(y|θ̂) .

    The maximum p(y|θ̂) increases with the flexibility of the curves; the integral need not. All
    other hyperparameters keep their values. The cost is two gradients of the evidence for each
    trained coordinate of a curve. Without trained curves, the result is 0.

    Args:
        snapshot: a snapshot of a fitted model.
        kernel: the kernel of the model, which determines the trained curves. It is not changed.
    """
    kernel, likelihoods = deepcopy((kernel, dict(snapshot.representation.likelihoods)))
    model, coordinates = (snapshot.inference, kernel, likelihoods), Coordinates(kernel)
    scales = prior_scales(kernel, coordinates)
    if not (curves := scales > 0).any():
        return 0.0

    def objective() -> Float[Tensor, ""]:
        return log_marginal_likelihood(*model, snapshot.fixed_mean) + coordinates.log_prior()

    steps, scales = _STEP / np.where(curves, scales, 1.0), scales[curves]
    _, precision = observed(coordinates, objective, curves, steps)
    eigenvalues = np.linalg.eigvalsh(precision / np.outer(scales, scales))
    square = np.square(scales * coordinates.get()[curves]).sum()
    return -0.5 * float(square + np.log(np.maximum(eigenvalues, _LEAST)).sum())


# `FitReport`: the contents of a model and the course of its fit, as numbers and in print.


_PATIENCE = 10.0  # seconds: `print` computes standard errors only if they take less


@dataclass(frozen=True, eq=False)
class Estimate:
    """The value of a hyperparameter and its standard error, in the units of the data.

    Attributes:
        value: the value, a float, or an array if the hyperparameter has several elements.
    """

    value: Numbers
    _error: Callable[[], Numbers | None] | None = field(default=None, repr=False)

    @property
    def standard_error(self) -> Numbers:
        """The standard error, with the shape of `value`. It is NaN if it does not exist.

        It is computed at the first access, which may take long.
        """
        error = None if self._error is None else self._error()
        return as_numbers(np.full_like(self.value, np.nan) if error is None else error)


@dataclass(frozen=True, eq=False, kw_only=True)
class FitReport:
    r"""A report of the hyperparameters, the data and the fit of a `VectorFieldGP`.

    `model.report` returns it, and `print` shows it as text. It describes the model at that time:
    later changes of the model do not affect it. A report refers to the data, which stay in memory.
    The result of `to_dict` does not.

    Standard errors follow from the curvature H of the log evidence plus the log priors. A
    hyperparameter θ_i has the coordinate u_i in the search: the logarithm of a positive parameter,
    or the logit of a parameter in an interval. Then

        sd(θ_i) = |∂θ_i/∂u_i| √((−H)⁻¹)_ii ,    H = ∂² log p(y) / ∂u² ,

    and the constant mean has its best value for each u (Mardia & Marshall 1984, *Maximum likelihood
    estimation of models for residual covariance in spatial regression*, §3). Standard errors are
    computed at the first access, by two evaluations of the evidence for each learned value. `print`
    shows them if they take less than 10 seconds.

    A standard error is NaN if the hyperparameter is frozen, is at a bound of the search, or is not
    determined by the data. All are NaN after `condition`, `update` and `observe`, which do not
    learn hyperparameters. `remarks` and `notes` give the reasons.

    Attributes:
        action: the last action: "fitted", "conditioned", "updated" or "observed". It is "not
            fitted" for a model without data.
        method: the representation of the kernel: "exact", "grid" (features on a frequency grid),
            "quadrature" or "random" (features of a quadrature or random rule). It is "none" for a
            model without data.
        features: the number F of features; None for the exact kernel.
        tolerance_reached: the tolerance of the grid. It exceeds the requested one if `max_features`
            is the limit. It is None without a grid.
        aliasing: the aliasing error of the grid, divided by the prior variance; None without a
            grid.
        share_cut: the truncated variance of the grid, divided by the prior variance; None without
            a grid.
        cut_over_noise: the truncated variance of the grid, divided by the noise variance of the
            group with the least noise; None without a grid.
        points: the number N of points.
        numbers: the number of observed values. It is N·p, less missing components, plus
            observations of symbols.
        held: what the model stores: "data", "statistics" or "nothing".
        observed: the number of observed values of each symbol, by the name of its class.
        skipped: the number of chunks, files and updates without a valid observation.
        evidence: the log marginal likelihood log p(y) in nats, without hyperparameter priors. Under
            Student-t noise it is a lower bound (ELBO). It is NaN without data.
        evidence_error: the standard error of `evidence` if the evidence is an estimate, because
            there are too many features for a factorisation; otherwise 0.
        noise: the noise variance of each group in squared units of y: a float for all components,
            or an array (p,). The key "default" is for observations without a group name. If
            `noise=` was given with the observations, the value is the factor of that noise.
        hyperparameters: an `Estimate` for each name. Examples are `curl_free.lengthscale`, `noise`,
            `adcp.noise` (the noise of group `adcp`) and `mean` (the constant mean). The last part
            is the name of the parameter in gpytorch. If several parameters have the same name, the
            branch of the kernel comes before it. A branch is named after its class, and numbered if
            several branches have the same class.
        stages: the stages of the last fit. Each has `name`, `evaluations`, `seconds` and
            `nats_per_number` (the log evidence per value). It also has `operations` (per
            evaluation) and `loss` (in nats), which `plan` predicts.
        seconds: the wall time of the last fit; None without a fit.
        threads: the number of threads of the last fit; None without a fit.
        weak_priors: whether the last fit used weak priors, as it does for few data. The constant
            mean is then integrated out.
        coverage: the coverage of 95 % intervals for observations that were held out after the last
            fit; None if it was not computed.
        effective_draws: the effective number of draws, if the posterior integrates over the
            hyperparameters by draws; otherwise None.
        pareto_k: the shape of the tail of the weights of these draws (Vehtari et al. 2024); None
            without draws, and for learned spectra. Above 0.7, error bars may be too small.
        notes: decisions and warnings, as sentences.

    Example:
        >>> import gp_orff, torch
        >>> x = torch.rand(
        ...     60, 2, generator=torch.Generator().manual_seed(0)
        ... ).double()
        >>> y = torch.stack(
        ...     [torch.cos(4 * x[:, 0]), torch.cos(4 * x[:, 1])], dim=-1
        ... )
        >>> y = y + 0.1 * torch.randn(
        ...     60, 2, generator=torch.Generator().manual_seed(1)
        ... )
        >>> model = gp_orff.VectorFieldGP(gp_orff.CurlFreeKernel(num_dims=2))
        >>> report = model.fit(x, y, progress=False).report
        >>> report.action, report.method, report.points, report.numbers
        ('fitted', 'exact', 60, 120)
        >>> list(report.hyperparameters)
        ['outputscale', 'lengthscale', 'noise', 'mean']
        >>> noise = report.hyperparameters["noise"]
        >>> abs(noise.value - 0.1**2) < 3 * noise.standard_error
        True
        >>> sum(stage["evaluations"] for stage in report.to_dict()["stages"]) > 0
        True
    """

    action: str
    method: str = "none"
    features: int | None = None
    tolerance_reached: float | None = None
    aliasing: float | None = None
    share_cut: float | None = None
    cut_over_noise: float | None = None
    points: int = 0
    numbers: float = 0
    held: str = "nothing"
    observed: dict[str, int] = field(default_factory=dict)
    skipped: int = 0
    evidence: float = float("nan")
    evidence_error: float = 0.0
    noise: dict[str, Numbers]
    hyperparameters: dict[str, Estimate]
    stages: tuple[Stage, ...]
    seconds: float | None
    threads: int | None
    weak_priors: bool
    coverage: float | None
    effective_draws: float | None = None
    pareto_k: float | None = None
    notes: tuple[str, ...]
    _curvature: Curvature | None = field(default=None, repr=False)

    @property
    def zero_mean(self) -> bool:
        """Whether the constant mean is zero, for example with `mean=gpytorch.means.ZeroMean()`."""
        mean = self.hyperparameters.get("mean")
        return mean is None or not np.any(mean.value)

    @classmethod
    def of(cls, snapshot: ModelSnapshot, history: History, trained: frozenset[str]) -> "FitReport":
        """Return the report of a model with data. `VectorFieldGP.report` calls it.

        Args:
            snapshot: a snapshot of the model.
            history: the actions and stages of the model.
            trained: the names of the hyperparameters that a fit learns.
        """
        representation = snapshot.representation
        labels = {key.label for key in representation.data.keys}
        learned = trained if history.action == "fitted" else frozenset()
        curvature = Curvature(snapshot, learned, history.weak_priors)
        values = hyperparameter_values(snapshot.kernel, representation.likelihoods, labels)
        estimates = {
            name: Estimate(value, partial(curvature.error_of, name))
            for name, value in values.items()
        }
        means = {name: Estimate(value) for name, value in mean_values(snapshot.prior_mean).items()}
        noises = {label: noise for label, noise in snapshot.noises.items() if label in labels}
        draws, of_draws = snapshot.sample.draws, {}
        if draws is not None:
            k = None if np.isnan(draws.pareto_k) else float(draws.pareto_k)
            of_draws = {"effective_draws": draws.effective, "pareto_k": k}
        data, observed = representation.data, Counter[str]()
        for part in data.symbol_data:
            observed[type(part.symbol).__name__] += part.num_values
        return cls(
            **vars(history),
            **approximation(snapshot),
            **of_draws,
            points=data.survey.num_points,
            numbers=data.num_values,
            held="data" if data.revisitable else "statistics",
            observed=dict(observed),
            skipped=data.survey.skipped,
            evidence=snapshot.log_marginal_likelihood,
            evidence_error=snapshot.log_marginal_likelihood_error,
            noise=noise_variances(noises),
            hyperparameters={**estimates, **means, "mean": constant_mean(snapshot)},
            _curvature=curvature,
        )

    @classmethod
    def without_data(cls, kernel: Kernel, likelihoods: Mapping[str, Likelihood]) -> "FitReport":
        """Return the report of a model without data, from its `kernel` and `likelihoods` by group.
        `VectorFieldGP.report` calls it."""
        values = hyperparameter_values(kernel, likelihoods, likelihoods)
        return cls(
            **vars(History("not fitted")),
            noise=noise_variances(noises_of(kernel, likelihoods)),
            hyperparameters={name: Estimate(value) for name, value in values.items()},
        )

    def standard_errors(self) -> dict[str, Numbers]:
        """Return the standard errors of all hyperparameters, by name. This may take long.

        Each has the shape of the value. It is NaN if it does not exist; `remarks` gives the reason.
        """
        return {name: estimate.standard_error for name, estimate in self.hyperparameters.items()}

    @property
    def remarks(self) -> tuple[str, ...]:
        """The reasons for missing or doubtful standard errors, as sentences.

        The first access computes the standard errors, which may take long. The tuple is empty if
        all errors are available, and for a model that was not fitted to its data.
        """
        return () if self._curvature is None else self._curvature.standard_errors.remarks

    def to_dict(self) -> dict[str, object]:
        """Return the report as plain values for `json.dumps`, with standard errors and `remarks`.

        The keys are the names of the attributes. The values are dicts, lists, strings and numbers,
        with None instead of NaN. The call computes the standard errors, which may take long.
        """
        values = {name: value for name, value in vars(self).items() if name != "_curvature"}
        values["hyperparameters"] = {
            name: {"value": estimate.value, "standard_error": estimate.standard_error}
            for name, estimate in self.hyperparameters.items()
        }
        values["stages"] = [asdict(stage) for stage in self.stages]
        values = {**values, "remarks": self.remarks}
        text = json.dumps(values, default=lambda value: value.tolist())  # of numpy
        return json.loads(text, parse_constant=lambda _: None)

    def __str__(self) -> str:
        """The report as text: a summary, the stages, the hyperparameters and the notes."""
        if self.held == "nothing":
            return "not fitted: call fit(x, y) or condition(x, y)"
        blocks = [self._summary, self._stages, self._hyperparameters, list(self.notes)]
        return "\n\n".join("\n".join(lines) for lines in blocks if lines)

    @property
    def _summary(self) -> list[str]:
        """The last action, and a table of data, kernel and evidence."""
        error = f" ± {self.evidence_error:.2g}" if self.evidence_error else ""
        rows = [
            ("data", self._data),
            *self._kernel,
            ("log marginal likelihood", f"{self.evidence:.2f}{error} nats"),
        ]
        if self.effective_draws is not None:
            k = "" if self.pareto_k is None else f", Pareto k = {self.pareto_k:.2f}"
            draws = f"integrated with {self.effective_draws:.0f} effective draws{k}"
            rows.append(("hyperparameters", draws))
        return [self._action, *table(rows, left=2)]

    @property
    def _kernel(self) -> list[tuple[str, str]]:
        """The representation of the kernel, and its accuracy."""
        if self.method == "exact":
            return [("kernel", "exact")]
        if self.method != "grid":
            return [("kernel", f"{self.features} {self.method} features")]
        return [
            (
                "kernel",
                f"frequency grid of {self.features} features, "
                f"tolerance {self.tolerance_reached:.1g}, aliasing {self.aliasing:.1g}",
            ),
            (
                "truncated variance",
                f"{self.share_cut:.2g} of the prior variance, "
                f"{self.cut_over_noise:.2g} of the noise variance",
            ),
        ]

    @property
    def _action(self) -> str:
        """The last action, and the duration of the last fit."""
        if self.seconds is None:
            return self.action
        threads = f"{self.threads} thread{'s' * (self.threads > 1)}"
        duration = f"in {self.seconds:.1f} s with {threads}"
        return f"{self.action}{'' if self.action == 'fitted' else ' after a fit'} {duration}"

    @property
    def _data(self) -> str:
        """The numbers of points and values, and whether the model stores statistics only."""
        symbols = ", ".join(f"{count} of {name}" for name, count in self.observed.items())
        numbers = f"{self.numbers:.12g} values{f' ({symbols})' if symbols else ''}"
        kept = "" if self.held == "data" else "; only sufficient statistics are stored"
        plural = f"{self.skipped} chunks without a valid observation were skipped"
        one = "a chunk without a valid observation was skipped"
        skipped = f"; {one if self.skipped == 1 else plural}" if self.skipped else ""
        return f"{self.points} points, {numbers}{kept}{skipped}"

    @property
    def _stages(self) -> list[str]:
        rows = [
            (
                s.name,
                str(s.evaluations),
                f"{s.seconds:.1f}",
                f"{s.nats_per_number:.5f}" if s.evaluations else "",
                "" if s.operations is None else f"{s.operations:.1e}",
                "" if s.loss is None else f"{s.loss:.2g}",
            )
            for s in self.stages
        ]
        header = (
            "stage",
            "evaluations",
            "seconds",
            "log evidence per value, nats",
            "operations",
            "expected loss, nats",
        )
        return table([header, *rows]) if rows else []

    @property
    def _hyperparameters(self) -> list[str]:
        """A table of the values, with standard errors and remarks if these are quick to compute."""
        shown = self._seconds_of_errors <= _PATIENCE
        rows = []
        for name, estimate in self.hyperparameters.items():
            error, text = estimate.standard_error if shown else np.nan, brief(estimate.value, 5)
            rows.append((name, f"{text} ± {brief(error, 2)}" if np.isfinite(error).any() else text))
        errors = any("±" in value for _, value in rows)
        header = ("hyperparameter", "value ± standard error" if errors else "value")
        if shown:
            return [*table([header, *rows], left=2), *self.remarks]
        seconds = self._seconds_of_errors
        duration = f", which takes about {seconds:.0f} s" if np.isfinite(seconds) else ""
        invitation = f"for standard errors call report.standard_errors(){duration}"
        return [*table([header, *rows], left=2), invitation]

    @property
    def _seconds_of_errors(self) -> float:
        """The expected time of the standard errors, from the evaluations of the last stage."""
        curvature = self._curvature
        if curvature is None or curvature.computed or not curvature.evaluations:
            return 0.0
        if not self.stages:
            return float("inf")
        last = self.stages[-1]
        return curvature.evaluations * last.seconds / max(last.evaluations, 1)
