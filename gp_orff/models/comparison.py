"""Comparisons: of kernels with one another, and of features with their exact kernel."""

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

# Compare kernels by evidence or left-out blocks.


@dataclass(frozen=True)
class KernelComparison:
    """Models of the same data, the best first; `print` shows a table.

    They are ordered by evidence, or by the NLPD of left-out blocks where there are some.

    Attributes:
        evidence: log marginal likelihood of each model, total nats; with a `LearnedSpectrumKernel`,
            that with the curve of its weights integrated out, by Laplace's method.
        models: the fitted `VectorFieldGP` of each kernel.
        num_values: how many numbers were observed.
        standard_errors: of the evidence of each model, in nats; 0 where it is exact. The evidence
            of a grid of many features is an estimate. Kernels whose evidences are within two
            standard errors of each other are tied: the order says nothing about them.
        cross_validations: the `CrossValidation` of each model; empty if none was asked for.
    """

    evidence: dict[str, float]
    models: dict[str, VectorFieldGP]
    num_values: float
    standard_errors: dict[str, float] = field(default_factory=dict)
    cross_validations: dict[str, CrossValidation] = field(default_factory=dict)

    @property
    def best(self) -> VectorFieldGP:
        """The model of the smallest NLPD of left-out blocks; without them, that of the largest
        evidence, and a `UserWarning` if others are tied with it."""
        first, *others = self.models
        if self.cross_validations:
            return self.models[first]
        ties = [name for name in others if self.tied(first, name)]
        if ties:
            warnings.warn(
                f"the evidence does not determine the best of {[first, *ties]}: its "
                f"error is {self._error(first):.2g} nats for {first!r}, and the others are within "
                "two standard errors; compare predictions of held-out data",
                UserWarning,
                stacklevel=2,
            )
        return self.models[first]

    def tied(self, first: str, second: str) -> bool:
        """Whether two kernels, by name, are within two standard errors of each other: in evidence,
        or in the NLPD of left-out blocks."""
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
        rows = [("kernel", "NLPD", "behind", "error", "RMSE", "inside 95 %")]
        best = next(iter(self.cross_validations.values()))
        for name, result in self.cross_validations.items():
            behind, error = best.gain_over(result)
            scores = f"{result.nlpd:.4f}", f"{behind:.4f}", f"{error:.4f}", f"{result.rmse:.4g}"
            rows.append((name, *scores, f"{result.coverage:.3f}"))
        return rows

    @property
    def _by_evidence(self) -> list[tuple[str, ...]]:
        best = next(iter(self.models))
        points = self.num_values / self.models[best].num_outputs
        rows = [("kernel", "nats", "nats/point", "behind", "error")]
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

    If two kernels explain the data, the evidence favours the more restrictive kernel. For a
    curl-free field, it tends to be larger for the curl-free kernel than for the Helmholtz kernel,
    which contains it. A difference of 5 nats is a factor of 150 in probability, if the noise model
    is right. Correlated noise exaggerates the differences, so the printed table also shows nats per
    point.

    Pass `blocks` to rank the models by held-out blocks, which should be as wide as the correlated
    errors. The score is the negative log predictive density (NLPD) of the values in the blocks,
    with hyperparameters from all data. The table then shows the difference of each kernel from the
    best one, with its standard error from the scatter between blocks.

    The evidence of a `LearnedSpectrumKernel` is an integral over its curves under their prior, not
    the maximum over curves. Many weights are therefore no advantage over kernels with two
    hyperparameters. Lengthscales, variances and noise have their best values for every kernel.

    The result has `.evidence`, in total nats by name, the best first; `.models`; `.best`; and
    `.standard_errors` of the evidence, if it is estimated. `.best` warns, and the table states, if
    evidences are within two standard errors of each other. With `blocks`, `.cross_validations` has
    the scores of each model, and the table states if neighbours are within two standard errors.

    Args:
        x, y: points (N, d) and vectors (N, p), or chunks, as for `VectorFieldGP.fit`.
        kernels: kernels by name, trained in place, without common parameters. If None, four RBF
            kernels are compared: curl-free, divergence-free, Helmholtz, and independent components,
            with p = d.
        progress: whether to show the progress of each fit.
        likelihood: the noise of every model, as for `VectorFieldGP`, which is copied: a
            `MultitaskStudentTLikelihood` for data with outliers.
        frequencies: the frequency rule, as for `VectorFieldGP`.
        blocks: as for `VectorFieldGP.cross_validate`, the same for all kernels; "auto" uses the
            lengthscale of the kernel of largest evidence. If None, the evidence ranks the models.
        options: other arguments of `VectorFieldGP.fit`: `variances`, `noise`, `scale_noise`,
            `directions`, `group`, `missing`, `merge`, `track`, `time`.

    Raises:
        TypeError: kernels without names; as `VectorFieldGP.fit`.
        ValueError: kernels with common hyperparameters; as `VectorFieldGP.fit` and, with `blocks`,
            `cross_validate`.

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
        with check_calibration(False):  # of kernels that may well be wrong
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
    """Raise on kernels without names, and on some that training would change for each other."""
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
                    "compare_kernels expects kernels with separate hyperparameters, since each "
                    f"is trained in place, got {owner!r} and {name!r}, which share some; give each "
                    "a base kernel of its own, such as copy.deepcopy(k)"
                )


def _num_inputs(x: object, y: object, options: Mapping[str, object]) -> int:
    """The columns of the points; the default kernels have as many outputs."""
    Options(**options)  # raises for an unknown name
    if y is None:
        x = next(iter(x))
        x = entries_of(x)["x"]
    return as_points(x[:1]).shape[-1]


# Compare features with their exact kernel.


@dataclass(frozen=True)
class ExactComparison:
    """The error of features against the exact kernel at the same hyperparameters.

    `print` shows the verdict and the numbers.

    Attributes:
        mean: root mean square difference of the posterior means, over the exact posterior sd.
        sd: the largest difference of the posterior standard deviations, over the exact one.
        evidence: difference of the log marginal likelihoods, nats per observed number.
        num_features: how many features; 0 for the exact kernel.
        num_points: how many points were conditioned on.
        on_grid: whether the features are those of a `Grid`.
    """

    mean: float
    sd: float
    evidence: float
    num_features: int
    num_points: int
    on_grid: bool = False

    @property
    def verdict(self) -> str:
        """The largest of the three differences, judged in words, with a remedy."""
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
            f"{self.verdict} (mean off by {self.mean:.2g} posterior sd, sd by {self.sd:.2g}, "
            f"evidence by {self.evidence:.2g} nats per number; {self.num_features} features, "
            f"{self.num_points} points)"
        )


@torch.no_grad()
@chosen_threads()
def compare_with_exact(
    model: VectorFieldGP, x: object, y: object, subset: int = 500, seed: int = 0, **options: object
) -> ExactComparison:
    """Measure the error of a model's features against its exact kernel, on a subset of the data.

    Two posteriors are computed from `subset` random points at the same hyperparameters: one with
    the features of the model, the other with the exact kernel. The two are compared at these points
    and at up to as many others. A model that uses the exact kernel has no error.

    Args:
        model: a model with data, from `fit` or `condition`. It is not changed.
        x, y: points (N, d) and vectors (N, p), usually the data of the model.
        subset: the number of points to condition on; the cost is cubic in it.
        seed: the seed of the random choice of points.
        options: other arguments of `VectorFieldGP.fit`: `variances`, `noise`, `directions`,
            `group`, `missing`.

    Returns:
        The differences in mean, standard deviation and evidence, as an `ExactComparison`. `print`
        shows them and a verdict.

    Raises:
        RuntimeError: a model without data.
        NotImplementedError: a kernel whose covariance has no closed form.
        ValueError: as `VectorFieldGP.fit`; a subset of fewer than 2 points.

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
