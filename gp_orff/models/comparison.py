"""Two questions to ask of a model: is its kernel the right one, and do its features suffice?"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from gpytorch.kernels import Kernel, MultitaskKernel, RBFKernel
from jaxtyping import Float
from torch import Tensor

from gp_orff.data.dataset import Dataset
from gp_orff.data.reading import Options
from gp_orff.data.validation import as_matrix, as_points
from gp_orff.inference.conditioning import ExactInference, FeatureInference
from gp_orff.kernels.fields import CurlFreeKernel, DivergenceFreeKernel, HelmholtzKernel
from gp_orff.models.threads import chosen_threads
from gp_orff.models.vector_field_gp import VectorFieldGP


@dataclass(frozen=True)
class KernelComparison:
    """Models of the same data by their evidence, the best first; `print` shows a table.

    Attributes:
        evidence: log marginal likelihood of each, total nats.
        models: the fitted `VectorFieldGP` of each.
        num_values: numbers that were read.
    """

    evidence: dict[str, float]
    models: dict[str, VectorFieldGP]
    num_values: float

    @property
    def best(self) -> VectorFieldGP:
        """The model of largest evidence."""
        return next(iter(self.models.values()))

    def __str__(self) -> str:
        width = max(map(len, self.evidence))
        points = self.num_values / self.best.num_outputs
        top = next(iter(self.evidence.values()))
        lines = [f"{'kernel':<{width}}  {'nats':>12}  {'nats/point':>10}  {'behind':>8}"]
        for name, nats in self.evidence.items():
            lines.append(
                f"{name:<{width}}  {nats:>12.1f}  {nats / points:>10.4f}"
                f"  {(nats - top) / points:>8.4f}"
            )
        return "\n".join(lines)


def compare_kernels(
    x: object,
    y: object = None,
    kernels: Mapping[str, Kernel] | None = None,
    *,
    progress: bool = True,
    frequencies: object = None,
    **how: object,
) -> KernelComparison:
    """Which kernel do the data speak for? Each is trained, and judged by its evidence.

    The evidence pays for what a kernel excludes: where the field is free of curl, the curl-free
    kernel has more of it than the Helmholtz kernel, which could do the same. A difference of a few
    nats in total decides; it is shown for each point, as data that are not independent make all
    totals too large.

    Args:
        x, y, how: the data, as for `VectorFieldGP.fit`.
        kernels: by name; curl-free, divergence-free, Helmholtz and independent components with RBF
            kernels if None.
        frequencies: as for `VectorFieldGP`.

    Raises:
        ValueError, TypeError: as `VectorFieldGP.fit`.

    Example:
        >>> import gp_orff, torch
        >>> x = torch.rand(150, 2, generator=torch.Generator().manual_seed(0))
        >>> y = torch.stack([torch.cos(4 * x[:, 0]), torch.cos(4 * x[:, 1])], dim=-1)  # no curl
        >>> y = y + 0.3 * torch.randn(150, 2, generator=torch.Generator().manual_seed(1))
        >>> found = gp_orff.compare_kernels(x, y, progress=False)
        >>> list(found.evidence)[-1]  # what the data exclude
        'divergence-free'
        >>> abs(found.evidence["curl-free"] - found.evidence["Helmholtz"]) < 3  # which contains it
        True
    """
    if kernels is None:
        kernels = _usual(_num_inputs(x, y, how))
    models = {}
    for name, kernel in kernels.items():
        model = VectorFieldGP(kernel, frequencies=frequencies)
        models[name] = model.fit(x, y, progress=progress, **how)
    evidence = {name: own.log_marginal_likelihood().item() for name, own in models.items()}
    order = sorted(evidence, key=evidence.get, reverse=True)
    num_values = next(iter(models.values())).state.data.num_values
    return KernelComparison(
        {name: evidence[name] for name in order}, {name: models[name] for name in order}, num_values
    )


def _usual(num_dims: int) -> dict[str, Kernel]:
    found = {"curl-free": CurlFreeKernel(num_dims=num_dims)}
    if num_dims > 1:
        found["divergence-free"] = DivergenceFreeKernel(num_dims=num_dims)
        found["Helmholtz"] = HelmholtzKernel(num_dims=num_dims)
    independent = MultitaskKernel(RBFKernel(), num_tasks=num_dims, rank=0)
    return {**found, "independent": independent}


def _num_inputs(x: object, y: object, how: Mapping[str, object]) -> int:
    """The columns of the points, which for the usual kernels are those of the vectors."""
    Options(**how)
    if y is None:
        x = next(iter(x))
        x = x["x"] if isinstance(x, Mapping) else x[0]
    return as_points(x[:1]).shape[-1]


@dataclass(frozen=True)
class ExactComparison:
    """How far features are from the exact kernel at the same hyperparameters; `print` says it.

    Attributes:
        mean: root mean square of the difference of posterior means, over the exact posterior sd.
        sd: the largest difference of posterior standard deviations, over the exact one.
        evidence: difference of log marginal likelihoods, nats per number.
        on_grid: whether the features are those of a `Grid`.
        verdict: the same in words.
    """

    mean: float
    sd: float
    evidence: float
    num_features: int
    num_points: int
    on_grid: bool = False

    @property
    def verdict(self) -> str:
        if self.num_features == 0:
            return "exact: this model uses the exact kernel, nothing is approximated"
        if not math.isfinite(self.mean + self.sd + self.evidence):
            return "unusable: the approximation is not finite"
        worst = max(self.mean, self.sd, abs(self.evidence))
        if worst <= 0.02:
            return "good: indistinguishable from the exact kernel"
        if worst <= 0.2:
            finer = "a finer tolerance" if self.on_grid else "gp_orff.Grid, or more frequencies,"
            return f"fair: means and error bars are usable, {finer} would sharpen them"
        remedy = (
            "give the grid a larger max_features, or a smaller tolerance where that does not bind"
            if self.on_grid
            else "use gp_orff.Grid, or more frequencies"
        )
        return f"poor: the error of the features is not small against the error bars; {remedy}"

    def __str__(self) -> str:
        return (
            f"{self.verdict} (mean off by {self.mean:.2g} posterior sd, sd by {self.sd:.2g}, "
            f"evidence by {self.evidence:.2g} nats per number; {self.num_features} features, "
            f"{self.num_points} points)"
        )


@torch.no_grad()
@chosen_threads()
def compare_with_exact(
    model: VectorFieldGP, x: object, y: object, subset: int = 500, seed: int = 0, **how: object
) -> ExactComparison:
    """The features of a model against its exact kernel, on some of the data.

    Both condition on `subset` of the points, chosen at random, at the hyperparameters of the model,
    and are compared at them and at as many others.

    Args:
        model: fitted or conditioned.
        x, y, how: data, as for `VectorFieldGP.fit`.

    Raises:
        RuntimeError: a model without data.
        NotImplementedError: a kernel without a covariance in closed form.
        ValueError: as `VectorFieldGP.fit`; a subset of fewer than 2 points.

    Example:
        >>> import gp_orff, torch
        >>> x = torch.rand(700, 2, generator=torch.Generator().manual_seed(0)).double()
        >>> y = torch.stack([torch.sin(6 * x[:, 1]), torch.sin(6 * x[:, 0])], dim=-1)
        >>> model = gp_orff.VectorFieldGP(gp_orff.HelmholtzKernel(num_dims=2)).condition(x, y)
        >>> gp_orff.compare_with_exact(model, x, y, subset=200).verdict
        'good: indistinguishable from the exact kernel'
    """
    if subset < 2:
        raise ValueError(f"compare_with_exact expects a subset of at least 2 points, got {subset}")
    state = model.state
    x, y = as_points(x, state.data.num_inputs), as_matrix(y, "observations y (N, p)")
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    options = Options(**how)
    few = _some(model, x, y, options, order[:subset])
    points = x[order[: 2 * subset]].to(next(model.kernel.parameters()).device)
    noises, inference = state.e_step.noises, state.inference
    results = []
    for own in (ExactInference(few), inference.of(few)):
        found = own.posterior(model.kernel, noises, state.mean)
        mean = found.evidence.best_mean() if state.mean is None else state.mean
        nats = found.evidence.log_density(mean, few.num_values) / few.num_values
        field = found.distribution
        results.append((field.mean(points) + mean, field.variance(points).sqrt(), nats.item()))
    (mean, sd, nats), (other_mean, other_sd, other_nats) = results
    features, on_grid = 0, False
    if isinstance(inference, FeatureInference):
        features = inference.num_features(model.kernel)
        on_grid = inference.draws[0].shared_columns() is not None
    return ExactComparison(
        _rms((other_mean - mean) / sd),
        ((other_sd - sd) / sd).abs().max().item(),
        other_nats - nats,
        features,
        len(few.observations[0]),
        on_grid,
    )


def _some(model: VectorFieldGP, x: Tensor, y: Tensor, options: Options, rows: Tensor) -> Dataset:
    chosen = {
        name: value if value is None or isinstance(value, str | int) else value[rows]
        for name, value in vars(options).items()
    }
    few = model.copied(x[rows], y[rows], Options(**chosen))
    return model.state.weighted(few, model.state.data)


def _rms(values: Float[Tensor, "n p"]) -> float:
    return values.square().mean().sqrt().item()
