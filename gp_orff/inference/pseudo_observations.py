"""The variational Gaussian posterior of the field, under any likelihood.

The normal distribution q(f) maximises the ELBO Σ_n E[log p(y_n | f)] − KL(q ‖ prior). It is the
posterior given pseudo-observations ỹ_n with Gaussian noise of the precision Λ_n (Opper & Archambeau
2009, *The variational Gaussian approximation revisited*; Khan & Lin 2017,
*Conjugate-computation variational inference*). Representation, statistics and algebra are therefore
those of known Gaussian noise. With the evidence Z of the pseudo-observations,

    ELBO = log Z + Σ_n (E[log p(y_n | f)] − E[log N(ỹ_n; f(x_n), Λ_n⁻¹)]) .

1. `Iterate.of` computes q from pseudo-observations, and the ELBO. The derivatives of
   E[log p(y_n | f)] under q give the next pseudo-observations.
2. `converge` moves to the next pseudo-observations in the natural parameters η_n and Λ_n. This is a
   natural-gradient step of rate one. It halves the rate until the ELBO does not fall, and ends when
   a step changes the ELBO little.

The sum is `Dataset.elbo_correction`. After convergence, the gradient of log Z by the
hyperparameters is that of the ELBO.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from gpytorch.likelihoods import Likelihood

from gp_orff.data.dataset import Dataset
from gp_orff.data.observations import Represented
from gp_orff.data.pointwise import (
    expected_density,
    latent,
    likelihood_of,
    observed_as,
    proposed,
)
from gp_orff.inference.features import Inference, Posterior

_SMALLEST = 2.0**-5  # the smallest rate
_ROUNDING = 1e-6  # error in nats per value, from merged positions or truncation


@dataclass(frozen=True)
class Iterate:
    """Pseudo-observations, the ELBO of the posterior that they give, and the next
    pseudo-observations."""

    data: Dataset
    elbo: float
    following: tuple[Represented | None, ...]  # next pseudo-observations of every part of the data

    @classmethod
    @torch.no_grad()
    def of(
        cls,
        data: Dataset,
        inference: Inference,
        posterior: Posterior,
        likelihoods: Mapping[str, Likelihood],
    ) -> "Iterate":
        """The iterate for the posterior of an inference from pseudo-observations."""
        field, following, correction = posterior.field(fixed=True), [], 0.0
        parts, x, moments = list(data.visit()), None, ()
        for part in parts:
            if part.represented is None:
                following.append(None)
                continue
            if x is None or not torch.equal(x, part.x):  # several outputs have the same points
                x, moments = part.x, (field.mean(part.x), field.blocks(part.x))
            likelihood = likelihood_of(likelihoods, part)
            expected, given = proposed(part, likelihood, *moments)
            correction += (expected - expected_density(part, *moments)).sum().item()
            following.append(given)
        density = posterior.evidence.log_density(posterior.mean, inference.num_values).item()
        data = data.with_parts(parts, correction)
        return cls(data, density + correction, tuple(following))

    def moved(self, rate: float) -> Dataset:
        """The data with pseudo-observations moved towards the next ones, by the share `rate`."""
        parts = []
        for part, end in zip(self.data.visit(), self.following, strict=True):
            if end is not None:
                begin = part.represented
                linear = torch.lerp(begin.linear, end.linear, rate)
                precision = torch.lerp(begin.precision, end.precision, rate)
                part = observed_as(part, end._replace(linear=linear, precision=precision))
            parts.append(part)
        return self.data.with_parts(parts, self.data.elbo_correction)


def converge(at: Callable[[Dataset], Iterate], data: Dataset, nats: float, steps: int) -> Dataset:
    """Return the data with converged pseudo-observations.

    A small decrease of the ELBO is accepted. If it follows a gain, full steps may circle around an
    optimum, and the largest rate is halved.

    Args:
        at: a function that computes the iterate of data.
        data: the data with pseudo-observations to start from.
        nats: the steps end when one changes the ELBO by less than this.
        steps: the largest number of steps.
    """
    present, rate, gain = at(data), 1.0, 0.0
    for _ in range(steps):
        trial = _ascended(at, present, rate)
        if trial is None:
            break
        before, gain = gain, trial.elbo - present.elbo
        present = trial
        if abs(gain) < nats:
            break
        if gain < 0 <= before:
            rate = max(0.5 * rate, _SMALLEST)
    return present.data


def _ascended(at: Callable[[Dataset], Iterate], present: Iterate, rate: float) -> Iterate | None:
    """The iterate after the largest step of at most this rate that does not lower the ELBO.

    A decrease by rounding is allowed. The result is None if no step succeeds.
    """
    least = _ROUNDING * present.data.num_values
    while rate >= _SMALLEST:
        try:
            trial = at(present.moved(rate))
        except (torch.linalg.LinAlgError, ValueError, RuntimeError):  # the step was too long
            trial = None
        if trial is not None and trial.elbo >= present.elbo - least:
            return trial
        rate = 0.5 * rate
    return None


@torch.enable_grad()
def learn(
    data: Dataset, posterior: Posterior, likelihoods: Mapping[str, Likelihood], evaluations: int
) -> None:
    """Set the trained parameters of likelihoods to the maximum of Σ_n E[log p(y_n | f)].

    The expectation is under a posterior of the field. Log priors are added to the sum.
    """
    parts = [part for part in data.visit() if part.represented is not None]
    chosen = {likelihood_of(likelihoods, part) for part in parts}
    parameters = [p for likelihood in chosen for p in likelihood.parameters() if p.requires_grad]
    if not parameters:
        return
    field = posterior.field(fixed=True)
    with torch.no_grad():
        moments = [latent(part, field.mean(part.x), field.blocks(part.x)) for part in parts]
    optimizer = torch.optim.LBFGS(
        parameters, max_iter=evaluations, line_search_fn="strong_wolfe", tolerance_change=1e-12
    )

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        total = torch.zeros((), dtype=torch.float64)
        for part, moment in zip(parts, moments, strict=True):
            likelihood = likelihood_of(likelihoods, part)
            expected = likelihood.expected(part.represented.values, *moment)
            total = total - expected.sum() / moment[0].shape[-1]
        for likelihood in chosen:
            for _, owner, prior, closure, _ in likelihood.named_priors():
                total = total - prior.log_prob(closure(owner)).sum()
        (total / data.num_values).backward()
        return (total / data.num_values).detach()

    optimizer.step(loss)
