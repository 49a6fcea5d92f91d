"""A check whether random features are overconfident, by two halves of their frequencies.

Let e(x) be the error of the posterior mean that comes from the features. Two disjoint halves of the
frequencies give independent Monte Carlo estimates with error √2 e each, so that their means differ
by about 2e. Where e is not small against the posterior standard deviation, the error bars do not
cover the error of the features.
"""

import warnings
from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from gp_orff.features.columns import families_of
from gp_orff.features.expansion import Expansion
from gp_orff.inference.weight_posterior import WeightPosterior
from gp_orff.settings import check_features


class FeatureWarning(UserWarning):
    """The error of random features exceeds the error bars of their posterior.

    Example:
        Few features and many accurate observations:

        >>> import gp_orff, torch, warnings
        >>> x = torch.rand(300, 2, generator=torch.Generator().manual_seed(0)).double()
        >>> y = torch.sin(6 * x)  # a gradient
        >>> rule = gp_orff.MonteCarlo(20, seed=0)
        >>> kernel = gp_orff.CurlFreeKernel(num_dims=2)
        >>> model = gp_orff.VectorFieldGP(kernel, frequencies=rule)
        >>> model.likelihood.noise = 1e-4
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always", gp_orff.FeatureWarning)
        ...     _ = model.condition(x, y)
        >>> caught[0].category.__name__
        'FeatureWarning'
    """


def halves(expansion: Expansion) -> list[tuple[Expansion, Int[Tensor, "k"]]]:
    """Two expansions, each with half the frequencies at twice the variance, and their columns."""
    return [(expansion.select(*half), half[0]) for half in expansion.phi.halves()]


def disagreement(
    posterior: WeightPosterior,
    parts: tuple[WeightPosterior, WeightPosterior],
    x: Float[Tensor, "*b n d"],
) -> float:
    """The estimated feature error of the mean over the posterior sd, root mean squares at x.

    Measured against exact posteriors (curl-free RBF and Matérn 5/2, d = 2 and 3, domains of 3 and
    10 lengthscales, 100 and 800 points, noise from 3 % to 100 %, 100 to 1600 features): above 1,
    the true ratio was above 1.5 and the sd below 0.88 of the exact one in every case; below 0.5,
    the true ratio was below 1.1.
    """
    first, second = (part.mean(x) for part in parts)
    error = (first - second).square().mean() / 4
    return (error / posterior.variance(x).mean()).sqrt().item()


@torch.no_grad()
def check(
    posterior: WeightPosterior,
    expansion: Expansion,
    posterior_of: Callable[[Expansion, Int[Tensor, "k"]], WeightPosterior],
    x: Float[Tensor, "*b n d"],
) -> None:
    """Warn if a posterior of random features is overconfident at the first 200 points."""
    if check_features.on() and expansion.phi.sampled and expansion.num_columns > 2:
        pair = halves(expansion)
        if not all(family.num_columns for half, _ in pair for family in families_of(half.phi)):
            return  # one frequency has no halves
        parts = [posterior_of(*half) for half in pair]
        ratio = disagreement(posterior, parts, x[..., :200, :])
        warn_if_overconfident(ratio, expansion.num_features)


def warn_if_overconfident(ratio: float, num_features: int) -> None:
    """Warn if the error of the features is larger than their error bars.

    The message names a round number, so that Python shows it once and not for every posterior.
    """
    if ratio > 1:
        at_least = max(bound for bound in (1, 2, 5, 10) if ratio >= bound)
        warnings.warn(
            f"the posterior of these {num_features} random features is overconfident: the error "
            f"that comes from the features alone is more than {at_least} times the posterior "
            "standard deviation. Use more frequencies, QuasiMonteCarlo or a smoother base kernel, "
            "and compare with the exact kernel on a subset; "
            "gp_orff.settings.check_features(False) silences this check.",
            FeatureWarning,
            stacklevel=2,
        )
