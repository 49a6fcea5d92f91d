"""Thinning of dense observations: distances by brute force, and better coverage of intervals."""

import math

import gpytorch
import numpy as np
import pytest
import torch

import gp_orff
from tests.support.fields import curl_free, draw, uniform


def track(count=400):
    """Points of a slow random walk, of which two parts are far apart."""
    x = draw(count, 2, seed=0).cumsum(0) / 60
    x[count // 2 :] += 5.0
    return x


@pytest.mark.parametrize("distance", [0.05, [0.2], (0.05, 0.4), torch.tensor([0.3, 0.1])])
def test_rows_that_remain_are_apart_and_others_lie_near_them(distance):
    x = track()
    rows = gp_orff.thin(x, distance)
    scaled = x / torch.as_tensor(distance)
    assert (torch.pdist(scaled[rows]) > 1).all()
    assert (torch.cdist(scaled, scaled[rows]).amin(-1) <= 1).all()
    assert (rows.diff() > 0).all()
    assert len(rows) < len(x)


@pytest.mark.parametrize("labels", [np.array, list, torch.tensor], ids=["array", "list", "tensor"])
def test_points_of_other_groups_stay(labels):
    x = track()
    names = [i % 3 for i in range(len(x))]
    rows = gp_orff.thin(x, 0.3, group=labels(names))
    which = torch.tensor(names)
    for name in range(3):
        own, kept = x[which == name], x[rows[which[rows] == name]]
        assert (torch.pdist(kept) > 0.3).all()
        assert (torch.cdist(own, kept).amin(-1) <= 0.3).all()
    assert (torch.pdist(x[rows]) <= 0.3).any()
    assert torch.equal(gp_orff.thin(x, 0.3, group="one"), gp_orff.thin(x, 0.3))


def test_copies_remain_once_and_the_seed_chooses_which():
    x = torch.zeros(50, 1)
    chosen = {gp_orff.thin(x, 1e-9, seed=seed).item() for seed in range(20)}
    assert len(chosen) > 5
    single = gp_orff.thin(np.arange(20, dtype=np.float32), 0.5)  # (N,)
    assert torch.equal(single, torch.arange(20))


@pytest.mark.parametrize("distance", [0, -1.0, math.nan, math.inf, (1.0, 0.0), (1.0, 1.0, 1.0)])
def test_distances_are_positive_numbers_for_all_columns(distance):
    with pytest.raises(ValueError, match="positive distance, or one for each of the 2 columns"):
        gp_orff.thin(track(), distance)


def test_labels_are_one_for_each_point():
    with pytest.raises(ValueError, match="each of the 400 points in group=, got 3"):
        gp_orff.thin(track(), 0.1, group=[1, 2, 3])


@pytest.mark.slow
def test_error_bars_hold_where_errors_are_shared_by_neighbours():
    """Errors of a track that last for 40 readings, in 20 fields: without thinning, 95 % intervals
    hold less than 0.8 of the field; of readings that far apart, 0.95 within 3 standard errors."""
    tracks, length, fields = 6, 60, 20
    shares = {}
    for distance in (None, 0.2):
        inside = torch.stack([_inside(tracks, length, distance, seed) for seed in range(fields)])
        shares[distance] = inside.mean().item(), (inside.std() / math.sqrt(fields)).item()
    assert shares[None][0] < 0.8
    share, error = shares[0.2]
    assert abs(share - 0.95) < 3 * error


def _inside(tracks, length, distance, seed):
    """The share of the field inside 95 % intervals, under the true kernel."""
    start, end = uniform(2, tracks, 1, 2, seed=seed)
    x = (start + (end - start) * torch.linspace(0, 1, length).double()[:, None]).flatten(0, 1)
    xs = uniform(60, 2, seed=seed + 100)
    kernel = curl_free(0.5)
    prior = kernel(torch.cat([x, xs])).to_dense().detach()
    root = torch.linalg.cholesky(prior + 1e-8 * torch.eye(len(prior)).double())
    f = (root @ draw(len(root), seed=seed + 200)).unflatten(0, (-1, 2))
    lag = (torch.cdist(x, x) / 0.05).square()
    same = torch.kron(torch.eye(tracks), torch.ones(length, length)).double()
    error = same * torch.exp(-0.5 * lag) + 1e-8 * torch.eye(len(x)).double()
    y = f[: len(x)] + torch.linalg.cholesky(error) @ draw(len(x), 2, seed=seed + 300)
    rows = torch.arange(len(x)) if distance is None else gp_orff.thin(x, distance)
    model = gp_orff.VectorFieldGP(kernel, mean=gpytorch.means.ZeroMean())
    model.likelihood.noise = 1.0
    field = model.condition(x[rows], y[rows], merge=0).posterior()
    away = (field.mean(xs) - f[len(x) :]).abs() / field.variance(xs).sqrt()
    return (away < 1.96).double().mean()
