"""Observations along tracks, and models of them."""

import math

import numpy as np
import torch
from linear_operator import to_dense

import gp_orff
from gp_orff.features.assemble import expand
from tests.support.fields import curl_free, draw, uniform

P = 2
EYE = torch.eye(P, dtype=torch.float64)
RULES = {
    "exact": None,
    "grid": gp_orff.Grid(spacing=1.0, cutoff=5.0, diagonal_correction=False),
    "monte_carlo": gp_orff.MonteCarlo(30, seed=0),
}
NAMES = ("noise", "offset_variance", "correlated_variance", "correlation_time", "block_variance")


def survey(readings=30, tracks=3, seed=0):
    """Return positions along random walks, vectors, labels of tracks, and times with gaps."""
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


def turning(x):
    """Return a unit vector at each position. It turns slowly with the position."""
    return torch.stack([torch.cos(0.4 * x[:, 0]), torch.sin(0.4 * x[:, 0])], dim=-1)


def known(x):
    """Return a noise variance for each observation, from a quarter of the white noise to five times
    the white noise."""
    return 0.01 * 20 ** uniform(len(x), seed=7)


def conditioned(rule, span, timed=True, directed=False, given=False):
    x, y, label, time = survey()
    options = {"directions": turning(x)} if directed else {}
    options |= {"noise": known(x)} if given else {}
    y = (y * turning(x)).sum(-1, keepdim=True) if directed else y
    model = gp_orff.VectorFieldGP(
        curl_free(0.6), likelihood=likelihood(span), frequencies=rule or gp_orff.Auto()
    )
    model.condition(x, y, track=label, time=time if timed else None, **options)
    return model, x, y, label, time


def path_length(x, label):
    parts = [x[label == name] for name in np.unique(label)]
    steps = [torch.cat([torch.zeros(1), part.diff(dim=0).norm(dim=-1)]) for part in parts]
    return torch.cat([step.cumsum(0) for step in steps])


class Oracle:
    """The Gaussian distribution of all observations, mapped to block means by dense matrices."""

    def __init__(self, model, x, y, label, clock, xs, along=None):
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
        white = noise.noise + (0 * clock if part.given is None else known(x))
        covariance = same * covariance + torch.diag(white)
        points = torch.cat([x, xs])
        inference = model.state.inference
        if hasattr(inference, "draws"):
            phi = expand(model.kernel, inference.draws, 2).double().features(points)
            prior = phi @ phi.mT
        else:
            prior = to_dense(model.kernel(points))
        mean, n = torch.kron(average.contiguous(), EYE), P * len(x)
        noise_of_means = mean @ torch.kron(covariance, EYE) @ mean.mT
        of_means = mean @ y.flatten() if along is None else average @ y.flatten()
        if along is not None:  # numbers along directions
            mean = average @ torch.block_diag(*along.unsqueeze(1))
            noise_of_means = average @ covariance @ average.mT
        self.k = mean @ prior[:n, :n] @ mean.mT + noise_of_means
        self.k = self.k + noise.block_variance * torch.eye(len(self.k)).double()
        self.cross, self.prior = prior[n:, :n] @ mean.mT, prior[n:, n:]
        self.y, self.ones = of_means, mean @ EYE.repeat(len(x), 1)
        given = torch.zeros(len(x)) if part.given is None else known(x)
        self.scatter = 0.0
        for rows in map(torch.from_numpy, (label == name for name in np.unique(label))):
            parts = y[rows], clock[rows], block[rows], given[rows].mean()
            self.scatter = self.scatter + self.about_lines(model, *parts)

    def about_lines(self, model, y, clock, block, given):
        """Return the log density of the residuals about a line in every block."""
        squares, degrees, noise = 0.0, 0, model.likelihood
        for b in block.unique():
            rows = block == b
            if rows.sum() > 2:
                line = np.polyfit(clock[rows].numpy(), y[rows].numpy(), 1, full=True)
                squares, degrees = (
                    squares + line[1].sum(),
                    degrees + y.shape[-1] * (rows.sum().item() - 2),
                )
        u = 2 * noise.span / noise.correlation_time
        variance = noise.noise + given + noise.correlated_variance * u / (15 + u)
        return -0.5 * (squares / variance + degrees * torch.log(2 * math.pi * variance)).sum()

    def information(self):
        return self.ones.mT @ torch.linalg.solve(self.k, self.ones)

    def constant(self):
        y = self.ones.mT @ torch.linalg.solve(self.k, self.y)
        return torch.linalg.solve(self.information(), y)

    def evidence(self):
        mean = self.ones @ self.constant()
        gaussian = torch.distributions.MultivariateNormal(mean, self.k)
        return gaussian.log_prob(self.y) + self.scatter

    def posterior(self):
        constant = self.constant()
        gain = torch.linalg.solve(self.k, self.cross.mT).mT
        mean = gain @ (self.y - self.ones @ constant) + constant.repeat(len(self.cross) // P)
        effect = EYE.repeat(len(self.cross) // P, 1) - gain @ self.ones
        of_mean = effect @ torch.linalg.solve(self.information(), effect.mT)
        return mean, (self.prior - gain @ self.cross.mT + of_mean).diagonal()
