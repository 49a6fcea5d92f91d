"""Readings along tracks, against dense covariances of all readings."""

import math

import numpy as np
import pytest
import torch
from linear_operator import to_dense

import gp_orff
from gp_orff.features.assemble import expand
from tests.fields import curl_free, draw, uniform

P = 2
EYE = torch.eye(P, dtype=torch.float64)
RULES = {
    "exact": None,
    "grid": gp_orff.Grid(spacing=1.0, cutoff=5.0, diagonal_correction=False),
    "monte_carlo": gp_orff.MonteCarlo(30, seed=0),
}
SEPARABLE = gp_orff.SeparableKernel
NAMES = ("noise", "offset_variance", "correlated_variance", "correlation_time", "block_variance")


def survey(readings=30, tracks=3, seed=0):
    """Positions along random walks, vectors, labels, and times with gaps."""
    x = uniform(tracks, 1, 2, seed=seed) + 0.06 * draw(tracks, readings, 2, seed=seed).cumsum(1)
    steps = 0.5 + uniform(tracks, readings, seed=seed + 1)
    steps[:, readings // 2] = 9.0
    label = np.repeat([f"leg {i}" for i in range(tracks)], readings)
    y = torch.sin(2 * x) + 0.3 * draw(tracks, 1, 2, seed=2) + 0.2 * draw(tracks, readings, 2)
    return x.flatten(0, 1), y.flatten(0, 1), label, steps.cumsum(1).flatten()


def likelihood(span=0.0):
    noise = gp_orff.TrackLikelihood(P).double()
    for name, value in zip(NAMES, (0.04, 0.09, 0.05, 4.0, 0.02), strict=True):
        setattr(noise, name, value)
    noise.span.fill_(span)
    noise.duration.fill_(10.0)
    return noise


def conditioned(rule, span, timed=True):
    x, y, label, time = survey()
    model = gp_orff.VectorFieldGP(
        curl_free(0.6), likelihood=likelihood(span), frequencies=rule or gp_orff.Auto()
    )
    model.condition(x, y, track=label, time=time if timed else None)
    return model, x, y, label, time


def path_length(x, label):
    parts = [x[label == name] for name in np.unique(label)]
    steps = [torch.cat([torch.zeros(1), part.diff(dim=0).norm(dim=-1)]) for part in parts]
    return torch.cat([step.cumsum(0) for step in steps])


class Oracle:
    """The Gaussian of all readings, mapped to block means."""

    def __init__(self, model, x, y, label, clock, xs):
        (part,) = model.state.data.tracks
        block = part.times.block
        average = torch.nn.functional.one_hot(block).double().mT
        average = average / average.sum(-1, keepdim=True)
        same = torch.from_numpy(label[:, None] == label[None])
        noise = model.likelihood
        lag = (clock[:, None] - clock).abs()
        covariance = noise.offset_variance + noise.correlated_variance * torch.exp(
            -lag / noise.correlation_time
        )
        covariance = same * covariance + noise.noise * torch.eye(len(x)).double()
        points = torch.cat([x, xs])
        inference = model.state.inference
        if hasattr(inference, "draws"):
            phi = expand(model.kernel, inference.draws, 2).double().features(points)
            prior = phi @ phi.mT
        else:
            prior = to_dense(model.kernel(points))
        mean = torch.kron(average.contiguous(), EYE)
        n = P * len(x)
        self.k = mean @ (prior[:n, :n] + torch.kron(covariance, EYE)) @ mean.mT
        self.k = self.k + noise.block_variance * torch.eye(len(self.k)).double()
        self.cross, self.prior = prior[n:, :n] @ mean.mT, prior[n:, n:]
        self.y, self.ones = mean @ y.flatten(), mean @ EYE.repeat(len(x), 1)
        self.scatter = self._scatter(model, y, clock, block)

    def _scatter(self, model, y, clock, block):
        """The density of the residuals about a line in every block."""
        squares, degrees, noise = 0.0, 0, model.likelihood
        for b in range(int(block.max()) + 1):
            rows = block == b
            if rows.sum() > 2:
                line = np.polyfit(clock[rows].numpy(), y[rows].numpy(), 1, full=True)
                squares, degrees = squares + line[1].sum(), degrees + P * (rows.sum().item() - 2)
        u = 2 * noise.span / noise.correlation_time
        variance = noise.noise + noise.correlated_variance * u / (15 + u)
        return -0.5 * (squares / variance + degrees * torch.log(2 * math.pi * variance)).sum()

    def constant(self):
        information = self.ones.mT @ torch.linalg.solve(self.k, self.ones)
        return torch.linalg.solve(information, self.ones.mT @ torch.linalg.solve(self.k, self.y))

    def evidence(self):
        mean = self.ones @ self.constant()
        gaussian = torch.distributions.MultivariateNormal(mean, self.k)
        return gaussian.log_prob(self.y) + self.scatter

    def posterior(self):
        constant = self.constant()
        gain = torch.linalg.solve(self.k, self.cross.mT).mT
        mean = gain @ (self.y - self.ones @ constant) + constant.repeat(len(self.cross) // P)
        return mean, (self.prior - gain @ self.cross.mT).diagonal()


CASES = [(rule, span) for rule in RULES for span in (0.0, 4.0)]


@pytest.mark.parametrize("timed", [True, False])
@pytest.mark.parametrize(("rule", "span"), CASES)
def test_evidence_gradient_and_posterior_are_those_of_all_readings(rule, span, timed):
    """To rounding, 1e-8; blocks of several readings with their scatter about lines."""
    span = span if timed else span / 60
    model, x, y, label, time = conditioned(RULES[rule], span, timed)
    clock = time if timed else path_length(x, label)
    xs = uniform(7, 2, seed=9)
    oracle = Oracle(model, x, y, label, clock, xs)
    (part,) = model.state.data.tracks
    assert (len(part.y) < len(x)) == (span > 0)
    parameters = [p for p in model.parameters() if p.requires_grad]
    value, expected = model.log_marginal_likelihood(), oracle.evidence()
    torch.testing.assert_close(value, expected, rtol=1e-9, atol=1e-8)
    gradients = torch.autograd.grad(value, parameters, allow_unused=True)
    references = torch.autograd.grad(expected, parameters, allow_unused=True)
    for gradient, reference in zip(gradients, references, strict=True):
        assert (gradient is None) == (reference is None)
        if gradient is not None:
            torch.testing.assert_close(gradient, reference, rtol=1e-7, atol=1e-8)
    mean, variance = oracle.posterior()
    field = model.posterior()
    torch.testing.assert_close(field.mean(xs).flatten(), mean, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(field.variance(xs).flatten(), variance, rtol=1e-7, atol=1e-8)
