"""Compare features with their exact kernel."""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from gp_orff.data.dataset import Dataset
from gp_orff.data.reading import Options
from gp_orff.data.validation import as_matrix, as_points
from gp_orff.inference.conditioning import ExactInference, FeatureInference
from gp_orff.models.vector_field_gp import VectorFieldGP
from gp_orff.threads import chosen_threads


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

    Two posteriors are computed from `subset` random points, with the features and with the exact
    kernel, at the same hyperparameters. They are compared at these points and at as many others.
    `print` of the result shows a verdict and the differences in mean, standard deviation and
    evidence. A model that uses the exact kernel has no error.

    Args:
        model: a model with data, from `fit` or `condition`. It is not changed.
        x, y: points (N, d) and vectors (N, p), usually the data of the model.
        subset: the number of points to condition on; the cost is cubic in it.
        seed: the seed of the random choice of points.
        options: other arguments of `VectorFieldGP.fit`: `variances`, `noise`, `directions`,
            `group`, `missing`.

    Raises:
        RuntimeError: a model without data.
        NotImplementedError: a kernel whose covariance has no closed form.
        ValueError: as `VectorFieldGP.fit`; a subset of fewer than 2 points.

    Example:
        >>> import gp_orff, torch
        >>> x = torch.rand(700, 2, generator=torch.Generator().manual_seed(0)).double()
        >>> y = torch.stack([torch.sin(6 * x[:, 1]), torch.sin(6 * x[:, 0])], dim=-1)
        >>> model = gp_orff.VectorFieldGP(gp_orff.HelmholtzKernel(num_dims=2))
        >>> model = model.condition(x, y, merge=0)
        >>> gp_orff.compare_with_exact(model, x, y, subset=200).verdict
        'good: indistinguishable from the exact kernel'
    """
    if subset < 2:
        raise ValueError(f"compare_with_exact expects a subset of at least 2 points, got {subset}")
    state = model.state
    x, y = as_points(x, state.data.num_inputs), as_matrix(y, "observations y (N, p)")
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    data = _subset_of(model, x, y, Options(**options), order[:subset])
    points = x[order[: 2 * subset]].to(next(model.kernel.parameters()).device)
    noises, inference = state.e_step.noises, state.inference
    results = []
    for method in (ExactInference(data), inference.of(data)):
        posterior = method.posterior(model.kernel, noises, state.mean)
        mean = posterior.evidence.best_mean() if state.mean is None else state.mean
        nats = posterior.evidence.log_density(mean, data.num_values) / data.num_values
        distribution = posterior.under(state.mean)
        sd = distribution.variance(points).sqrt()
        results.append((distribution.mean(points) + mean, sd, nats.item()))
    (exact_mean, exact_sd, exact_nats), (mean, sd, nats) = results
    features, on_grid = 0, False
    if isinstance(inference, FeatureInference):
        features = inference.num_features(model.kernel)
        on_grid = inference.draws[0].shared_columns() is not None
    return ExactComparison(
        _rms((mean - exact_mean) / exact_sd),
        ((sd - exact_sd) / exact_sd).abs().max().item(),
        nats - exact_nats,
        features,
        len(data.observations[0]),
        on_grid,
    )


def _subset_of(
    model: VectorFieldGP, x: Tensor, y: Tensor, options: Options, rows: Tensor
) -> Dataset:
    """Some rows of the data and of their options, with the weights the model gives them."""
    row_options = {
        name: value if value is None or isinstance(value, str | int | float) else value[rows]
        for name, value in vars(options).items()
    }
    data = model.copied(x[rows], y[rows], Options(**row_options))
    return model.state.weighted(data, model.state.data)


def _rms(values: Float[Tensor, "n p"]) -> float:
    return values.square().mean().sqrt().item()
