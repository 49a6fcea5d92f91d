"""Oscillations along tracks, such as tides, that are missing in a model."""

import math

import numpy as np
import pytest
import torch
from linear_operator import to_dense

import gp_orff
from gp_orff.features.assemble import expand
from gp_orff.models.calibration import oscillation_along_tracks, ratios_of_track
from tests.support.tracks import EYE, P, conditioned

HOURS = 16


def drifters(period=None, count=12, seed=0):
    """Straight tracks with an offset and correlated noise, and perhaps a tide."""
    rng = np.random.default_rng(seed)
    start, end = rng.random((2, count, 1, 2))
    x = start + (end - start) * np.linspace(0, 1, HOURS)[:, None]
    y = np.stack([np.sin(6 * x[..., 1]), np.cos(6 * x[..., 0])], -1)
    walk, memory = [rng.standard_normal((count, 2))], math.exp(-1 / 4)
    for _ in range(HOURS - 1):
        step = rng.standard_normal((count, 2))
        walk.append(memory * walk[-1] + math.sqrt(1 - memory**2) * step)
    y = y + 0.3 * (np.stack(walk, 1) + rng.standard_normal((count, 1, 2)))
    y = y + 0.1 * rng.standard_normal(y.shape)
    hours = np.tile(np.arange(float(HOURS)), count)
    if period is not None:
        phase = 2 * np.pi * hours.reshape(count, HOURS) / period
        y = y + 0.5 * np.stack([np.cos(phase), np.sin(phase)], -1)
    options = {"track": np.repeat(np.arange(count), HOURS), "time": hours, "progress": False}
    return (x.reshape(-1, 2), y.reshape(-1, 2)), options


def fitted(data, options):
    return gp_orff.VectorFieldGP(gp_orff.HelmholtzKernel(num_dims=2)).fit(*data, **options)


def test_a_fit_names_the_period_of_a_tide():
    with pytest.warns(gp_orff.CalibrationWarning, match="with a period of about 6,") as caught:
        model = fitted(*drifters(6.2))
    note = next(str(w.message) for w in caught if "oscillate" in str(w.message))
    assert model.report.notes[-1] in note
    tide = oscillation_along_tracks(model.state, model.mean)
    assert abs(1 / tide.period - 1 / 6.2) < 1 / (2 * HOURS)  # the resolution of a track
    # As the remedy says: without the tide, there is no warning, which here would be an error.
    (x, y), options = drifters(6.2)
    phase = 2 * np.pi * options["time"] / 6.2
    model = fitted((x, y - 0.5 * np.stack([np.cos(phase), np.sin(phase)], -1)), options)
    assert oscillation_along_tracks(model.state, model.mean) is None


@pytest.mark.parametrize("rule", ["exact", "grid"])
@pytest.mark.parametrize("span", [0.0, 2.0])
def test_ratios_are_those_of_dense_algebra(rule, span):
    """Given all data, residuals are N Q⁻¹(y − Hμ̂), of covariance N P N, where P is Q⁻¹ less what
    the flat prior of the mean takes."""
    model, *_ = conditioned(gp_orff.Grid(spacing=1.0, cutoff=5.0) if rule == "grid" else None, span)
    (held,) = model.state.data.tracks
    noises, posterior = model.state.e_step.noises, model.state.snapshot(model.mean).posterior
    field, white = posterior.field(fixed=False).split()
    truncated = None if white is None else (white, white)
    noise = held.noise_covariance(noises, truncated)
    average = torch.nn.functional.one_hot(held.times.block).double().mT
    average = torch.kron((average / average.sum(-1, keepdim=True)).contiguous(), EYE)
    if rule == "exact":
        prior = to_dense(model.kernel(held.x))
    else:
        phi = expand(model.kernel, model.state.inference.draws, 2).double().features(held.x)
        prior = phi @ phi.mT
    inverse = torch.linalg.inv(average @ prior @ average.mT + noise)
    ones = EYE.repeat(len(held.y), 1)
    effect = inverse @ ones
    inverse = inverse - effect @ torch.linalg.solve(ones.mT @ effect, effect.mT)
    residual = (noise @ inverse @ held.values).detach()
    covariance = (noise @ inverse @ noise).detach()
    frequency = torch.tensor([0.05, 0.11, 0.3], dtype=torch.float64)
    blocks = held.blocks[1]
    part = held.take(torch.arange(blocks.start, blocks.stop))
    time = 0.5 * (part.times.first + part.times.last)
    wave = torch.exp(2j * math.pi * frequency[:, None] * time)
    with torch.no_grad():
        found = list(ratios_of_track(field, truncated, noises, part, wave))
    for i in range(P):
        rows = torch.arange(blocks.start, blocks.stop) * P + i
        r, c = residual[rows].to(wave), covariance[rows][:, rows].to(wave)
        expected = (wave.conj() @ r).abs() ** 2 / ((wave.conj() @ c) * wave).sum(-1).real
        torch.testing.assert_close(found[i], expected, rtol=1e-7, atol=1e-9)


def test_tracks_that_tell_nothing():
    (x, y), options = drifters(6.2)
    few = np.arange(len(x)) % HOURS < 7
    options = {key: options[key][few] for key in ("track", "time")}
    model = gp_orff.VectorFieldGP(gp_orff.HelmholtzKernel(num_dims=2))
    model.condition(x[few], y[few], **options)
    assert oscillation_along_tracks(model.state, model.mean) is None
    model.condition(x, y, track=drifters()[1]["track"])  # along the path, not in time
    assert oscillation_along_tracks(model.state, model.mean) is None
