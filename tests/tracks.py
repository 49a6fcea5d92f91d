"""Readings along tracks, and models of them."""

import numpy as np
import torch

import gp_orff
from tests.fields import curl_free, draw, uniform

P = 2
EYE = torch.eye(P, dtype=torch.float64)
RULES = {
    "exact": None,
    "grid": gp_orff.Grid(spacing=1.0, cutoff=5.0, diagonal_correction=False),
    "monte_carlo": gp_orff.MonteCarlo(30, seed=0),
}
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


def turning(x):
    """A unit vector at each position, which turns slowly."""
    return torch.stack([torch.cos(0.4 * x[:, 0]), torch.sin(0.4 * x[:, 0])], dim=-1)


def known(x):
    """A noise variance of each reading, from a quarter of the white noise to five times that."""
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
