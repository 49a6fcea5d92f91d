"""Comparisons of kernels with each other, and of features with their exact kernel."""

import math
import warnings
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from gpytorch.kernels import Kernel, MultitaskKernel, RBFKernel
from gpytorch.likelihoods import Likelihood

from gp_orff.data.reading import Options
from gp_orff.data.validation import as_matrix, as_points, entries_of, is_single
from gp_orff.fitting.journal import announce
from gp_orff.inference.exact import ExactInference
from gp_orff.kernels.fields import CurlFreeKernel, DivergenceFreeKernel, HelmholtzKernel
from gp_orff.models.cross_validation import CrossValidation, blocks_of
from gp_orff.models.report import integration_over_spectra, table
from gp_orff.models.vector_field_gp import VectorFieldGP
from gp_orff.settings import check_calibration
from gp_orff.threads import chosen_threads

# Compare kernels by evidence or held-out blocks.


@dataclass(frozen=True)
class KernelComparison:
    """Models of the same data, ranked by `compare_kernels`. `print` shows a table.

    The models are ordered by evidence, or by the NLPD of held-out blocks if there are blocks. The
    attributes are mappings by the names of the kernels, with the best kernel first.

    Attributes:
        evidence: the log marginal likelihood of each model, in nats. With a
            `LearnedSpectrumKernel`, its curve is integrated out by Laplace's method.
        models: the fitted `VectorFieldGP` of each kernel.
        num_values: the number of observed values.
        standard_errors: the standard error of each evidence, in nats. It is 0 if the evidence is
            exact. With many features, the evidence is an estimate.
        cross_validations: the `CrossValidation` of each model; empty without blocks.

    Example:
        >>> import gp_orff, torch
        >>> x = torch.rand(60, 2, generator=torch.Generator().manual_seed(0))
        >>> y = torch.stack([x[:, 1], -x[:, 0]], dim=-1)  # divergence-free
        >>> found = gp_orff.compare_kernels(x, y, progress=False)
        >>> found.best is found.models[list(found.evidence)[0]]
        True
    """

    evidence: dict[str, float]
    models: dict[str, VectorFieldGP]
    num_values: float
    standard_errors: dict[str, float] = field(default_factory=dict)
    cross_validations: dict[str, CrossValidation] = field(default_factory=dict)

    @property
    def best(self) -> VectorFieldGP:
        """The best model: with blocks, that with the smallest NLPD, otherwise that with the largest
        evidence. You get a `UserWarning` if the evidence of other models is within two standard
        errors."""
        first, *others = self.models
        if self.cross_validations:
            return self.models[first]
        ties = [name for name in others if self.tied(first, name)]
        if ties:
            warnings.warn(
                f"the evidence does not determine the best of {[first, *ties]}: its standard error "
                f"is {self._error(first):.2g} nats for {first!r}, and the others are within two "
                "standard errors; compare predictions of held-out data by blocks='auto'",
                UserWarning,
                stacklevel=2,
            )
        return self.models[first]

    def tied(self, first: str, second: str) -> bool:
        """Whether two kernels are within two standard errors of each other.

        The comparison is by the NLPD of held-out blocks if there are blocks, otherwise by evidence.

        Args:
            first, second: the names of the kernels.
        """
        if self.cross_validations:
            gain, error = self.cross_validations[first].gain_over(self.cross_validations[second])
            return abs(gain) <= 2 * error
        error = math.hypot(self._error(first), self._error(second))
        return error > 0 and abs(self.evidence[first] - self.evidence[second]) <= 2 * error

    def _error(self, name: str) -> float:
        return self.standard_errors.get(name, 0.0)

    def __str__(self) -> str:
        header, *rows = self._by_blocks if self.cross_validations else self._by_evidence
        names = list(self.models)
        tied = [False, False, *(self.tied(a, b) for a, b in pairwise(names))]
        lines = table([header, *rows])
        return "\n".join(
            line + "  tied with the kernel above" * same
            for line, same in zip(lines, tied, strict=True)
        )

    @property
    def _by_blocks(self) -> list[tuple[str, ...]]:
        header = "kernel", "NLPD", "difference", "standard error", "RMSE"
        rows = [(*header, "coverage of 95 % intervals")]
        best = next(iter(self.cross_validations.values()))
        for name, result in self.cross_validations.items():
            difference, error = best.gain_over(result)
            scores = f"{result.nlpd:.4f}", f"{difference:.4f}", f"{error:.4f}", f"{result.rmse:.4g}"
            rows.append((name, *scores, f"{result.coverage:.3f}"))
        return rows

    @property
    def _by_evidence(self) -> list[tuple[str, ...]]:
        best = next(iter(self.models))
        points = self.num_values / self.models[best].num_outputs
        header = "kernel", "log evidence, nats", "nats per point", "difference"
        rows = [(*header, "standard error")]
        for name, nats in self.evidence.items():
            of_point = nats, nats - self.evidence[best], self._error(name)
            rows.append((name, f"{nats:.1f}", *(f"{value / points:.4f}" for value in of_point)))
        return rows if any(self.standard_errors.values()) else [row[:-1] for row in rows]


def compare_kernels(
    x: object,
    y: object = None,
    kernels: Mapping[str, Kernel] | None = None,
    *,
    progress: bool = True,
    likelihood: Likelihood | None = None,
    frequencies: object = None,
    blocks: object = None,
    **options: object,
) -> KernelComparison:
    """Fit a model with each kernel, and rank the models by evidence or by held-out blocks.

    If two kernels explain the data, the evidence favours the more restrictive one. An example is a
    curl-free field: the evidence tends to be larger for a curl-free kernel than for a Helmholtz
    kernel, whose fields include all curl-free ones. If the noise model is right, a difference of
    5 nats is a factor of 150 in probability. Correlated noise exaggerates the differences, so the
    printed table also shows nats per point.

    With `blocks`, the models are ranked by the negative log predictive density (NLPD) of the values
    in held-out blocks. The blocks should be as wide as correlated errors extend. Hyperparameters
    are from all data. The table shows the difference of each kernel from the best one, with a
    standard error from the scatter between blocks.

    The evidence of a `LearnedSpectrumKernel` is an integral over its curves under their prior, not
    the maximum over curves. The kernel therefore has no advantage from its many weights.
    Lengthscales, variances and noise have their best values for every kernel.

    Args:
        x, y: points (N, d) and vectors (N, p), or chunks, as for `VectorFieldGP.fit`.
        kernels: kernels by name. They are trained in place and may not share parameters. By
            default, four RBF kernels with p = d are compared: "curl-free", "divergence-free",
            "Helmholtz" and "independent" (independent components).
        progress: whether to show the progress of each fit.
        likelihood: the noise of every model, as for `VectorFieldGP`. Each model gets a copy. Use a
            `MultitaskStudentTLikelihood` for data with outliers.
        frequencies: the frequency rule, as for `VectorFieldGP`.
        blocks: held-out blocks, as for `VectorFieldGP.cross_validate`. All models have the same
            blocks. With "auto", their size follows from the lengthscale of the kernel with the
            largest evidence. By default, the evidence ranks the models.
        options: the arguments of `VectorFieldGP.fit` that describe the data, from `variances` to
            `time`.

    Returns:
        A comparison with the mappings `evidence` (in nats), `standard_errors`, `models` and, with
        `blocks`, `cross_validations`. All are by name, the best kernel first. `best` is the best
        model. The printed table states if a kernel is within two standard errors of the one above.

    Raises:
        TypeError: `kernels` is not a mapping, or values are not real numbers.
        ValueError: Kernels share hyperparameters, the data are not valid (see `VectorFieldGP.fit`),
            or `blocks` do not fit the data (see `VectorFieldGP.cross_validate`).

    Example:
        >>> import gp_orff, torch
        >>> x = torch.rand(150, 2, generator=torch.Generator().manual_seed(0))
        >>> # no curl
        >>> y = torch.stack(
        ...     [torch.cos(4 * x[:, 0]), torch.cos(4 * x[:, 1])], dim=-1
        ... )
        >>> y = y + 0.3 * torch.randn(
        ...     150, 2, generator=torch.Generator().manual_seed(1)
        ... )
        >>> evidence = gp_orff.compare_kernels(x, y, progress=False).evidence
        >>> list(evidence)[-1]  # the last is the worst
        'divergence-free'
        >>> # both explain the data
        >>> abs(evidence["curl-free"] - evidence["Helmholtz"]) < 3
        True
    """
    if kernels is None:
        d = _num_inputs(x, y, options)
        kernels = {"curl-free": CurlFreeKernel(num_dims=d)}
        if d > 1:
            kernels["divergence-free"] = DivergenceFreeKernel(num_dims=d)
            kernels["Helmholtz"] = HelmholtzKernel(num_dims=d)
        kernels["independent"] = MultitaskKernel(RBFKernel(), num_tasks=d, rank=0)
    _check(kernels)
    choice = Options(**options)
    if blocks is not None and (y is None or not isinstance(blocks, str)):  # raises before the fits
        blocks = blocks_of(blocks, next(iter(kernels.values())), x, y, choice)
    models = {}
    for name, kernel in kernels.items():
        announce(f"{name}:", progress)
        model = VectorFieldGP(kernel, frequencies=frequencies, likelihood=deepcopy(likelihood))
        with check_calibration(False):  # some of the kernels are expected to be wrong
            models[name] = model.fit(x, y, progress=progress, **options)
    snapshots = {name: model.state.snapshot(model.mean) for name, model in models.items()}
    evidence = {
        name: model.log_marginal_likelihood().item()
        + integration_over_spectra(snapshots[name], model.kernel)
        for name, model in models.items()
    }
    order = sorted(evidence, key=evidence.get, reverse=True)
    num_values = next(iter(models.values())).state.data.num_values
    errors = {name: own.log_marginal_likelihood_error for name, own in snapshots.items()}
    results = {}
    if blocks is not None:
        same = blocks_of(blocks, models[order[0]].kernel, x, y, choice)
        for name in order:
            announce(f"{name}: {len(same)} blocks", progress)
            results[name] = models[name].cross_validate(x, y, blocks=same, **options)
        order.sort(key=lambda name: results[name].nlpd)
    return KernelComparison(
        {name: evidence[name] for name in order},
        {name: models[name] for name in order},
        num_values,
        {name: errors[name] for name in order},
        {name: results[name] for name in order if name in results},
    )


def _check(kernels: Mapping[str, Kernel]) -> None:
    """Raise an error for kernels without names, and for kernels that share parameters."""
    if not isinstance(kernels, Mapping) or not kernels:
        raise TypeError(
            "compare_kernels expects kernels= as a mapping from names to kernels, such as "
            f"{{'curl-free': gp_orff.CurlFreeKernel(num_dims=2)}}, got {type(kernels).__name__}"
        )
    owners: dict[torch.nn.Parameter, str] = {}
    for name, kernel in kernels.items():
        for parameter in kernel.parameters():
            owner = owners.setdefault(parameter, name)
            if owner != name and parameter.requires_grad:
                raise ValueError(
                    "compare_kernels expects kernels with separate hyperparameters, because each "
                    f"is trained in place, got {owner!r} and {name!r}, which share some; give each "
                    "kernel a separate base kernel, such as copy.deepcopy(k)"
                )


def _num_inputs(x: object, y: object, options: Mapping[str, object]) -> int:
    """The number of columns of the points, which is the number of outputs of default kernels."""
    Options(**options)  # raises for an unknown name
    if y is None:
        x = next(iter(x))
        x = entries_of(x)["x"]
    return as_points(x[:1]).shape[-1]


# Compare features with their exact kernel.


@dataclass(frozen=True)
class ExactComparison:
    """The error of features relative to the exact kernel, at the same hyperparameters.

    `compare_with_exact` returns it. `print` shows the verdict and the errors.

    Attributes:
        mean: the root mean square difference of the posterior means, divided by the exact posterior
            standard deviation.
        sd: the largest relative difference of the posterior standard deviations.
        evidence: the difference of the log marginal likelihoods, in nats per observed value.
        num_features: the number of features; 0 for the exact kernel.
        num_points: the number of points of the posteriors.
        on_grid: whether the features are on a `Grid`.

    Example:
        >>> import gp_orff, torch
        >>> model = gp_orff.VectorFieldGP(gp_orff.CurlFreeKernel(num_dims=2))
        >>> x, y = torch.rand(50, 2), torch.randn(50, 2)
        >>> found = gp_orff.compare_with_exact(model.condition(x, y), x, y)
        >>> found.mean, found.num_features, found.num_points
        (0.0, 0, 50)
    """

    mean: float
    sd: float
    evidence: float
    num_features: int
    num_points: int
    on_grid: bool = False

    @property
    def verdict(self) -> str:
        """A judgement of the largest of the three errors, with a remedy: "exact", "good", "fair",
        "poor" or "unusable", followed by a reason."""
        if self.num_features == 0:
            return "exact: this model uses the exact kernel, nothing is approximated"
        if not math.isfinite(self.mean + self.sd + self.evidence):
            return "unusable: the approximation is not finite"
        worst = max(self.mean, self.sd, abs(self.evidence))
        if worst <= 0.02:
            return "good: indistinguishable from the exact kernel"
        if worst <= 0.2:
            finer = "a smaller tolerance" if self.on_grid else "gp_orff.Grid, or more frequencies"
            return f"fair: means and error bars are usable; {finer} would make them more accurate"
        remedy = (
            "give the grid a larger max_features, or, if that is not reached, a smaller tolerance"
            if self.on_grid
            else "use gp_orff.Grid, or more frequencies"
        )
        return f"poor: the error of the features is not small compared to the error bars; {remedy}"

    def __str__(self) -> str:
        return (
            f"{self.verdict} (errors: mean {self.mean:.2g} posterior sd, relative error of the sd "
            f"{self.sd:.2g}, log evidence {self.evidence:.2g} nats per value; "
            f"{self.num_features} features, {self.num_points} points)"
        )


@torch.no_grad()
@chosen_threads()
def compare_with_exact(
    model: VectorFieldGP, x: object, y: object, subset: int = 500, seed: int = 0, **options: object
) -> ExactComparison:
    """Measure the error of the features of a model relative to its exact kernel.

    Two posteriors are computed from `subset` random points at the same hyperparameters: one with
    the features of the model, the other with the exact kernel. The posteriors are compared at these
    points and at up to `subset` other points of the data. If the model uses the exact kernel, all
    errors are zero.

    Args:
        model: a model with data, from `fit` or `condition`. It is not changed.
        x, y: points (N, d) and vectors (N, p), usually the data of the model.
        subset: the number of points that the posteriors use. The cost is cubic in this number.
        seed: the seed of the random choice of points.
        options: the arguments `variances`, `noise`, `directions`, `group` and `missing`, as for
            `VectorFieldGP.fit`.

    Returns:
        An `ExactComparison` with the errors of mean, standard deviation and evidence. `print` shows
        them and a verdict.

    Raises:
        RuntimeError: The model has no data.
        NotImplementedError: The covariance of the kernel has no closed form.
        ValueError: `subset` is less than 2, or the data are not valid (see `VectorFieldGP.fit`).

    Example:
        >>> import gp_orff, torch
        >>> x = torch.rand(
        ...     700, 2, generator=torch.Generator().manual_seed(0)
        ... ).double()
        >>> y = torch.stack(
        ...     [torch.sin(6 * x[:, 1]), torch.sin(6 * x[:, 0])], dim=-1
        ... )
        >>> model = gp_orff.VectorFieldGP(gp_orff.HelmholtzKernel(num_dims=2))
        >>> model = model.condition(x, y, merge=0)
        >>> gp_orff.compare_with_exact(model, x, y, subset=200).verdict
        'good: indistinguishable from the exact kernel'
    """
    if subset < 2:
        raise ValueError(f"compare_with_exact expects a subset of at least 2 points, got {subset}")
    state = model.state
    x, y, choice = model.converted(x, y, Options(**options))
    x, y = as_points(x, state.data.num_inputs), as_matrix(y, "observations y (N, p)")
    # The first `subset` points of a random order are the data of both posteriors; predictions are
    # compared at these and at the next `subset` points, where error bars are wider.
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    rows = order[:subset]
    of_rows = {n: each if is_single(each) else each[rows] for n, each in vars(choice).items()}
    data = model.copied(x[rows], y[rows], Options(**of_rows))
    data = state.weighted(data, state.data)
    points = x[order[: 2 * subset]].to(next(model.kernel.parameters()).device)
    noises, inference = state.e_step.noises, state.inference
    results = []
    for method in (ExactInference(data), inference.of(data)):
        posterior = method.posterior(model.kernel, noises, state.mean)
        nats = posterior.evidence.log_density(posterior.mean, data.num_values) / data.num_values
        distribution = posterior.field(fixed=state.mean is not None)
        sd = distribution.variance(points).sqrt()
        results.append((distribution.mean(points), sd, nats.item()))
    (exact_mean, exact_sd, exact_nats), (mean, sd, nats) = results
    features, on_grid = 0, False
    if not inference.is_exact:
        features = inference.num_features(model.kernel)
        on_grid = inference.draws[0].shared_columns() is not None
    return ExactComparison(
        ((mean - exact_mean) / exact_sd).square().mean().sqrt().item(),
        ((sd - exact_sd) / exact_sd).abs().max().item(),
        nats - exact_nats,
        features,
        len(data.observations[0]),
        on_grid,
    )
