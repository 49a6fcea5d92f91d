"""Readings along tracks that are left out, against dense covariances of all readings."""

import numpy as np
import pytest
import torch
from linear_operator import to_dense

import gp_orff
from gp_orff.features.assemble import expand
from gp_orff.features.truncation import truncated_variance
from gp_orff.symbols.base import Identity
from tests.tracks import EYE, RULES, P, conditioned, path_length

RULES = {**RULES, "truncated": gp_orff.Grid(spacing=1.0, cutoff=5.0)}
ROUNDING = 1e-8


def covariances(model, x, label, clock):
    """Prior covariance of the field, noise of a track without its white part, and δ."""
    inference, noise = model.state.inference, model.likelihood
    lag = (clock[:, None] - clock).abs()
    slow = noise.offset_variance + noise.correlated_variance * torch.exp(
        -lag / noise.correlation_time
    )
    slow = torch.from_numpy(label[:, None] == label[None]) * slow
    if not hasattr(inference, "draws"):
        return to_dense(model.kernel(x)), slow, 0.0
    phi = expand(model.kernel, inference.draws, 2).double().features(x)
    delta = truncated_variance(Identity(), model.kernel, inference.draws, ())
    return phi @ phi.mT, slow, 0.0 if delta is None else delta[0].diagonal().max()


def averaging(label, clock, span):
    """A row of weights for every block of consecutive readings, track by track."""
    rows = []
    for name in dict.fromkeys(label):
        members = np.flatnonzero(label == name)
        times = clock[members] - clock[members][0]
        part = torch.arange(len(times)) if span == 0 else (times / span).floor().long()
        blocks = [members[(part == b).numpy()] for b in part.unique()]
        if len(blocks) > 1 and 2 * len(blocks[-1]) < np.median([len(b) for b in blocks]):
            last = blocks.pop()
            blocks[-1] = np.concatenate([blocks[-1], last])
        for block in blocks:
            row = torch.zeros(len(label)).double()
            row[block] = 1 / len(block)
            rows.append(row)
    return torch.stack(rows)


def predicted_by_the_rest(model, x, y, label, clock, rest, tested, span):
    """Mean and variance of readings, from dense algebra."""
    field, slow, delta = covariances(model, x, label, clock)
    noise = model.likelihood
    kept = np.flatnonzero(rest)
    average = torch.zeros(0, len(x)).double()
    for row in averaging(label[kept], clock[kept], span):
        whole = torch.zeros(1, len(x)).double()
        whole[0, kept] = row
        average = torch.cat([average, whole])
    h = torch.kron(average, EYE)
    count = len(average)
    own = (noise.block_variance + delta) * torch.eye(count).double()
    white = noise.noise * average @ average.mT
    signal = field + torch.kron(slow, EYE)
    k = h @ signal @ h.mT + torch.kron(white + own, EYE)
    cross, ones, values = signal @ h.mT, h @ EYE.repeat(len(x), 1), h @ y.flatten()
    information = ones.mT @ torch.linalg.solve(k, ones)
    constant = torch.linalg.solve(information, ones.mT @ torch.linalg.solve(k, values))
    gain = torch.linalg.solve(k, cross.mT).mT
    mean = gain @ (values - ones @ constant) + constant.repeat(len(x))
    variance = (signal - gain @ cross.mT).diagonal() + delta + noise.noise + noise.block_variance
    return mean.unflatten(0, (-1, P))[tested], variance.unflatten(0, (-1, P))[tested]


def blocks_within(label):
    """Thirds of every track, in three blocks."""
    return np.concatenate([np.arange(n) * 3 // n for n in np.unique(label, return_counts=True)[1]])


CASES = [(rule, span, whole) for rule in RULES for span in (0.0, 4.0) for whole in (True, False)]


@pytest.mark.parametrize("timed", [True, False], ids=["time", "path"])
@pytest.mark.parametrize(("rule", "span", "whole"), CASES)
def test_readings_are_predicted_by_the_rest(rule, span, whole, timed):
    """Tracks left out whole, and parts of tracks whose rest tells their offset."""
    span = span if timed else span / 60
    model, x, y, label, time = conditioned(RULES[rule], span, timed)
    clock = time if timed else path_length(x, label)
    before = model.posterior().mean(x)
    blocks = label if whole else blocks_within(label)
    options = {"track": label, **({"time": time} if timed else {})}
    found = model.cross_validate(x, y, blocks=blocks, **options)
    assert torch.equal(model.posterior().mean(x), before)
    assert len(found.pit) == y.numel()
    for number, name in enumerate(dict.fromkeys(blocks.tolist())):
        rows = found.block == number
        tested = blocks == name
        mean, variance = predicted_by_the_rest(
            model, x, y, label, clock, ~tested, torch.from_numpy(tested), span
        )
        torch.testing.assert_close(found.mean[rows], mean.flatten(), rtol=ROUNDING, atol=ROUNDING)
        sd = variance.sqrt().flatten()
        torch.testing.assert_close(found.sd[rows], sd, rtol=ROUNDING, atol=ROUNDING)
        assert torch.equal(found.observed[rows], y[torch.from_numpy(tested)].flatten())


@pytest.mark.parametrize(("rule", "span"), [(rule, span) for rule in RULES for span in (0.0, 4.0)])
def test_one_reading_is_predicted_by_all_others(rule, span):
    """From the mean of the others of its block, whose error it shares, and all other blocks."""
    model, x, y, label, time = conditioned(RULES[rule], span)
    found = model.leave_one_out(x, y, track=label, time=time)
    field, slow, delta = covariances(model, x, label, time)
    noise, average = model.likelihood, averaging(label, time, span)
    member = (average > 0).double()
    common = (noise.block_variance + delta) * member.mT @ member
    signal = field + torch.kron(slow + common, EYE)
    total = signal + noise.noise * torch.eye(len(signal)).double()
    h = torch.kron(average, EYE)
    k, ones = h @ total @ h.mT, h @ EYE.repeat(len(x), 1)
    information = ones.mT @ torch.linalg.solve(k, ones)
    constant = torch.linalg.solve(information, ones.mT @ torch.linalg.solve(k, h @ y.flatten()))
    for i in range(0, len(x), 7):
        others = average.clone()
        others[:, i] = 0.0
        others = others[others.sum(-1) > 0]
        h = torch.kron(others / others.sum(-1, keepdim=True), EYE)
        rows = slice(P * i, P * i + P)
        k, cross = h @ total @ h.mT, total[rows] @ h.mT
        gain = torch.linalg.solve(k, cross.mT).mT
        values = h @ (y - constant).flatten()
        residual = y[i] - constant - gain @ values
        covariance = total[rows, rows] - gain @ cross.mT
        torch.testing.assert_close(found.residual[i], residual, rtol=1e-7, atol=1e-7)
        torch.testing.assert_close(found.covariance[i], covariance, rtol=1e-7, atol=1e-8)
