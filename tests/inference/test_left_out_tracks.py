"""Held-out observations along tracks, compared with dense covariances of all observations."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from linear_operator import to_dense

import gp_orff
from gp_orff.data.reading import Options, read
from gp_orff.features.assemble import expand
from gp_orff.features.truncation import truncated_variance
from gp_orff.inference.along_tracks import TrackReadings, left_out_of_tracks, tracks_left_out
from gp_orff.inference.left_out import Block
from gp_orff.models.calibration import calibration_of
from gp_orff.models.cross_validation import by_track
from gp_orff.symbols.base import Identity
from tests.support.fields import curl_free, draw, uniform
from tests.support.tracks import EYE, RULES, P, conditioned, known, likelihood, path_length, turning

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
    """A row of weights for every block of consecutive observations, track by track."""
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


def observing(x, directed):
    """H of all readings: whole vectors, or their components along directions."""
    return (
        torch.block_diag(*turning(x).unsqueeze(1)) if directed else torch.eye(P * len(x)).double()
    )


def predicted_by_the_rest(
    model, x, y, label, clock, rest, tested, span, directed=False, given=False
):
    """Mean and variance of observations, from dense algebra."""
    field, slow, delta = covariances(model, x, label, clock)
    select, eye = observing(x, directed), EYE[:1, :1] if directed else EYE
    noise, own_noise = model.likelihood, known(x) if given else 0 * x[:, 0]
    kept = np.flatnonzero(rest)
    average = torch.zeros(0, len(x)).double()
    for row in averaging(label[kept], clock[kept], span):
        whole = torch.zeros(1, len(x)).double()
        whole[0, kept] = row
        average = torch.cat([average, whole])
    h = torch.kron(average, eye)
    count = len(average)
    own = (noise.block_variance + delta) * torch.eye(count).double()
    white = (noise.noise + own_noise) * average @ average.mT
    signal = select @ field @ select.mT + torch.kron(slow, eye)
    k = h @ signal @ h.mT + torch.kron(white + own, eye)
    every = select @ EYE.repeat(len(x), 1)
    cross, ones, values = signal @ h.mT, h @ every, h @ y.flatten()
    information = ones.mT @ torch.linalg.solve(k, ones)
    constant = torch.linalg.solve(information, ones.mT @ torch.linalg.solve(k, values))
    gain = torch.linalg.solve(k, cross.mT).mT
    mean = gain @ (values - ones @ constant) + every @ constant
    effect = every - gain @ ones
    latent = signal - gain @ cross.mT + effect @ torch.linalg.solve(information, effect.mT)
    variance = latent.diagonal() + delta + noise.noise + noise.block_variance
    variance = variance + own_noise.repeat_interleave(len(eye))
    return mean.unflatten(0, y.shape)[tested], variance.unflatten(0, y.shape)[tested]


def blocks_within(label):
    """Thirds of every track, in three blocks."""
    return np.concatenate([np.arange(n) * 3 // n for n in np.unique(label, return_counts=True)[1]])


CASES = [
    (rule, span, whole, True) for rule in RULES for span in (0.0, 4.0) for whole in (True, False)
]
CASES += [("exact", 4.0, False, False), ("grid", 0.0, True, False)]
PLAIN, ALONG, GIVEN = {}, {"directed": True}, {"given": True}
CASES = [(*case, PLAIN) for case in CASES]
CASES += [
    (rule, 4.0, whole, True, ALONG | GIVEN)
    for rule in ("exact", "truncated")
    for whole in (True, False)
]
CASES += [("exact", 0.0, False, True, GIVEN), ("monte_carlo", 0.0, False, True, ALONG)]


@pytest.mark.slow
@pytest.mark.parametrize(("rule", "span", "whole", "timed", "kind"), CASES)
def test_readings_are_predicted_by_the_rest(rule, span, whole, timed, kind):
    """Tracks left out whole, and parts of tracks whose rest tells their offset."""
    span = span if timed else span / 60
    model, x, y, label, time = conditioned(RULES[rule], span, timed, **kind)
    clock = time if timed else path_length(x, label)
    before = model.posterior().mean(x)
    blocks = label if whole else blocks_within(label)
    options = {"track": label, **({"time": time} if timed else {})}
    options |= {"directions": turning(x)} if kind.get("directed") else {}
    options |= {"noise": known(x)} if kind.get("given") else {}
    found = model.cross_validate(x, y, blocks=blocks, **options)
    assert torch.equal(model.posterior().mean(x), before)
    assert len(found.pit) == y.numel()
    for number, name in enumerate(dict.fromkeys(blocks.tolist())):
        rows = found.block == number
        tested = blocks == name
        mean, variance = predicted_by_the_rest(
            model, x, y, label, clock, ~tested, torch.from_numpy(tested), span, **kind
        )
        torch.testing.assert_close(found.mean[rows], mean.flatten(), rtol=ROUNDING, atol=ROUNDING)
        sd = variance.sqrt().flatten()
        torch.testing.assert_close(found.sd[rows], sd, rtol=ROUNDING, atol=ROUNDING)
        assert torch.equal(found.observed[rows], y[torch.from_numpy(tested)].flatten())


SINGLE = [(rule, span, PLAIN) for rule in RULES for span in (0.0, 4.0)]
SINGLE += [("exact", 4.0, ALONG | GIVEN), ("grid", 4.0, ALONG), ("monte_carlo", 0.0, GIVEN)]


@pytest.mark.slow
@pytest.mark.parametrize(("rule", "span", "kind"), SINGLE)
def test_one_reading_is_predicted_by_all_others(rule, span, kind, monkeypatch):
    """From the mean of the others of its block, whose error it shares, and all other blocks."""
    monkeypatch.setattr("gp_orff.inference.along_tracks._READINGS", 29)  # of 30 on a track
    model, x, y, label, time = conditioned(RULES[rule], span, **kind)
    directed, given = kind.get("directed", False), kind.get("given", False)
    options = {"directions": turning(x)} if directed else {}
    options |= {"noise": known(x)} if given else {}
    found = model.leave_one_out(x, y, track=label, time=time, **options)
    field, slow, delta = covariances(model, x, label, time)
    noise, average = model.likelihood, averaging(label, time, span)
    select, eye = observing(x, directed), EYE[:1, :1] if directed else EYE
    own_noise = known(x) if given else 0 * x[:, 0]
    member = (average > 0).double()
    common = (noise.block_variance + delta) * member.mT @ member
    signal = select @ field @ select.mT + torch.kron(slow + common, eye)
    total = signal + torch.kron(torch.diag(noise.noise + own_noise), eye)
    h, every = torch.kron(average, eye), select @ EYE.repeat(len(x), 1)
    k, ones = h @ total @ h.mT, h @ every
    information = ones.mT @ torch.linalg.solve(k, ones)
    constant = torch.linalg.solve(information, ones.mT @ torch.linalg.solve(k, h @ y.flatten()))
    for i in (0, 7, 14, 21, 29, 44, 59, 89):
        others = average.clone()
        others[:, i] = 0.0
        others = others[others.sum(-1) > 0]
        h = torch.kron(others / others.sum(-1, keepdim=True), eye)
        rows = slice(len(eye) * i, len(eye) * (i + 1))
        k, cross = h @ total @ h.mT, total[rows] @ h.mT
        gain = torch.linalg.solve(k, cross.mT).mT
        values = h @ (y.flatten() - every @ constant)
        residual = y[i] - every[rows] @ constant - gain @ values
        covariance = total[rows, rows] - gain @ cross.mT
        torch.testing.assert_close(found.residual[i], residual, rtol=1e-7, atol=1e-7)
        torch.testing.assert_close(found.covariance[i], covariance, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("rule", RULES)
def test_the_joint_covariance_of_what_is_left_out_has_the_variances(rule, monkeypatch):
    """Of observations whose track partly stays, and of new tracks, which share their offset."""
    model, x, y, label, time = conditioned(RULES[rule], 0.0)
    monkeypatch.setattr("gp_orff.inference.along_tracks._READINGS", 7)
    (part,) = read(x, y, P, Options())
    readings = TrackReadings.of(part, label, time, len(x), 0.0)
    mask = torch.from_numpy((label == "leg 0") | (blocks_within(label) == 1))
    parts = model.kernel, model.state.e_step.noises, None, [Block("some", mask, mask)]
    (((found,),),) = (left_out_of_tracks(model.state.inference, [readings], *parts),)
    joint = found.joint()
    torch.testing.assert_close(joint.diagonal(), found.variance.flatten(), rtol=1e-8, atol=1e-9)
    assert torch.linalg.eigvalsh(joint)[0] > -1e-9
    first, last = 0, 2 * 29  # of the new track, apart in time
    assert joint[first, last] > 0.5 * model.likelihood.offset_variance


@pytest.mark.slow
def test_blocks_are_tracks_without_a_word():
    model, x, y, label, time = conditioned(None, 0.0)
    options = {"track": label, "time": time}
    found = model.cross_validate(x, y, **options)
    assert found.names == ("leg 0", "leg 1", "leg 2")
    assert torch.equal(found.mean, model.cross_validate(x, y, blocks=label, **options).mean)
    one = model.cross_validate(x[:30], y[:30], track="leg 0", time=time[:30])
    assert len(one) >= 5  # cells
    rows = slice(0, 60)
    ranked = gp_orff.compare_kernels(
        x[rows],
        y[rows],
        {"curl-free": curl_free(0.6).requires_grad_(False)},
        frequencies=RULES["grid"],
        blocks="auto",
        track=label[rows],
        progress=False,
    )
    assert ranked.cross_validations["curl-free"].names == ("leg 0", "leg 1")


@pytest.mark.parametrize(
    ("track", "message"),
    [
        (np.array([[1, 2]] * 20), "a track label for each of the 20 observations, got shape"),
        ([None] + ["a"] * 19, "a track label for each of the 20 observations, got 1 missing"),
        (["a"] * 19, "a track label for each of the 20 observations, got shape .19,.; give one"),
    ],
)
def test_bad_labels_are_told_as_those_of_tracks(track, message):
    """Not as those of `blocks`, which the user did not give."""
    with pytest.raises(ValueError, match=message):
        by_track(track, 20)


def test_many_tracks_are_put_together_in_fifty_blocks():
    labels = np.arange(600) // 5
    blocks = np.array(by_track(labels, 600))
    assert len(set(blocks)) == 50
    assert all(len(set(blocks[labels == name])) == 1 for name in range(120))
    assert np.bincount(blocks).max() <= 15


@pytest.mark.parametrize("rule", RULES)
def test_a_track_that_is_left_out_is_a_new_one(rule):
    """Residuals of its block means, and their covariance, against dense algebra."""
    model, x, y, label, time = conditioned(RULES[rule], 4.0)
    state = model.state
    field, slow, delta = covariances(model, x, label, time)
    noise, average = model.likelihood, averaging(label, time, 4.0)
    h = torch.kron(average, EYE)
    own = noise.noise * average @ average.mT
    own = own + (noise.block_variance + delta) * torch.eye(len(average)).double()
    k = h @ (field + torch.kron(slow, EYE)) @ h.mT + torch.kron(own, EYE)
    values, ones = h @ y.flatten(), h @ EYE.repeat(len(x), 1)
    of_track = (average[:, torch.from_numpy(label == "leg 1")] > 0).any(-1).repeat_interleave(P)
    rest, tested = (torch.nonzero(rows).squeeze(-1) for rows in (~of_track, of_track))
    inner = k[rest][:, rest]
    information = ones[rest].mT @ torch.linalg.solve(inner, ones[rest])
    constant = ones[rest].mT @ torch.linalg.solve(inner, values[rest])
    constant = torch.linalg.solve(information, constant)
    gain = torch.linalg.solve(inner, k[rest][:, tested]).mT
    values = values - ones @ constant
    (part,) = state.data.tracks
    part = replace(part, tracks=part.tracks[1:2])
    parts = model.kernel, state.e_step.noises, None
    ((residual, covariance),) = tracks_left_out(state.inference, *parts, [part])
    expected = values[tested] - gain @ values[rest]
    torch.testing.assert_close(residual, expected, rtol=ROUNDING, atol=ROUNDING)
    effect = ones[tested] - gain @ ones[rest]
    expected = k[tested][:, tested] - gain @ k[rest][:, tested]
    expected = expected + effect @ torch.linalg.solve(information, effect.mT)
    torch.testing.assert_close(covariance, expected, rtol=ROUNDING, atol=ROUNDING)


def test_a_fit_looks_at_whole_tracks():
    """Offsets that are denied: 12 tracks of 10, most outside their intervals."""
    x = uniform(12, 1, 2, seed=1) + 0.05 * draw(12, 10, 2, seed=2).cumsum(1)
    y = torch.sin(2 * x) + draw(12, 1, 2, seed=3) + 0.1 * draw(12, 10, 2, seed=4)
    options = {"track": np.arange(120) // 10, "progress": False}
    noise = likelihood()
    noise.noise, noise.offset_variance, noise.correlated_variance = 0.1, 1e-4, 1e-4
    model = gp_orff.VectorFieldGP(curl_free(0.6), likelihood=noise)
    model.requires_grad_(False)
    with pytest.warns(gp_orff.CalibrationWarning, match="in 2 held-out blocks"):
        model.fit(x.flatten(0, 1), y.flatten(0, 1), **options)
    model.likelihood.offset_variance = 1.0
    said = calibration_of(model.state, model.mean)
    assert not said.note
    assert said.independent < said.numbers / 5  # a track shares its offset
    one = model.condition(x[0], y[0], track="one")
    assert calibration_of(one.state, one.mean) is None
