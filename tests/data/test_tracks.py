"""Observations along tracks, compared with dense covariances of all observations."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from gpytorch.kernels import RBFKernel

import gp_orff
from gp_orff.data.observations import Observations
from gp_orff.data.patterns import Components, GroupKey
from gp_orff.data.tracks import blocks_in_words, observations_along
from tests.support.fields import curl_free, draw, uniform
from tests.support.tracks import (
    EYE,
    NAMES,
    RULES,
    Oracle,
    P,
    conditioned,
    known,
    likelihood,
    path_length,
    survey,
    turning,
)

CASES = [(rule, span) for rule in RULES for span in (0.0, 4.0)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["timed", "along paths", "directed", "known noise"])
@pytest.mark.parametrize(("rule", "span"), CASES)
def test_evidence_gradient_and_posterior_are_those_of_all_readings(rule, span, kind):
    """To rounding, 1e-8; blocks of several observations with their scatter about lines."""
    timed = kind != "along paths"
    span = span if timed else span / 60
    kinds = kind == "directed", kind == "known noise"
    model, x, y, label, time = conditioned(RULES[rule], span, timed, *kinds)
    clock = time if timed else path_length(x, label)
    xs = uniform(7, 2, seed=9)
    oracle = Oracle(model, x, y, label, clock, xs, turning(x) if kind == "directed" else None)
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


def test_two_positions_of_a_block_have_the_means_of_linear_fields(monkeypatch):
    """In the place of all positions, where an exact kernel has many: constants and gradients."""
    model, *_ = conditioned(None, 4.0)
    (part,) = model.state.data.tracks
    monkeypatch.setattr("gp_orff.data.tracks._MOST_NODES", 10)
    fewer = replace(part).condensed
    assert len(fewer.points) == 2 * len(part.y) < len(part.points)

    def rows(observed):
        ones = torch.ones(len(observed.points), 1).double()
        return observed.rows(torch.kron(torch.cat([ones, observed.points], -1), EYE))

    torch.testing.assert_close(rows(fewer), rows(part))


@pytest.mark.parametrize("kind", ["timed", "directed", "known noise"])
@pytest.mark.parametrize(("rule", "span"), [("exact", 4.0), ("grid", 0.0)])
def test_offsets_are_those_of_a_joint_gaussian(rule, span, kind):
    """E[b | y] and its variance, the mean of the field not known; to rounding, 1e-8."""
    kinds = kind == "directed", kind == "known noise"
    model, x, y, label, time = conditioned(RULES[rule], span, True, *kinds)
    oracle = Oracle(model, x, y, label, time, x[:1], turning(x) if kinds[0] else None)
    (part,) = model.state.data.tracks
    prior, width = model.likelihood.offset_variance, 1 if kinds[0] else P
    of_track = torch.arange(3).repeat_interleave(
        torch.tensor([len(track.y) for track in part.tracks])
    )
    cross = prior * torch.kron((of_track == torch.arange(3)[:, None]).double(), EYE[:width, :width])
    gain = torch.linalg.solve(oracle.k, cross.mT).mT
    mean = gain @ (oracle.y - oracle.ones @ oracle.constant())
    effect = gain @ oracle.ones
    of_mean = effect @ torch.linalg.solve(oracle.information(), effect.mT)
    variance = (prior * torch.eye(3 * width).double() - gain @ cross.mT + of_mean).diagonal()
    offsets = model.track_offsets()
    assert offsets.labels == ("leg 0", "leg 1", "leg 2")
    torch.testing.assert_close(offsets.mean.flatten(), mean, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(offsets.sd.flatten(), variance.sqrt(), rtol=1e-8, atol=1e-8)
    assert torch.equal(offsets["leg 1"][0], offsets.mean[1])
    with pytest.raises(KeyError, match="label of a track, such as 'leg 0'"):
        offsets["leg 9"]


def test_offsets_are_those_of_tracks():
    model = gp_orff.VectorFieldGP(curl_free(0.6)).condition(*survey()[:2])
    with pytest.raises(ValueError, match="observations with track="):
        model.track_offsets()
    model, *_ = conditioned(RULES["grid"], 0.0)
    with pytest.raises(ValueError, match=r"one of \[''\], got 'ship'"):
        model.track_offsets("ship")


def separable():
    root = torch.tensor([[1.0, 0.0], [0.4, 0.8]]).double()
    return gp_orff.SeparableKernel(RBFKernel().double(), root)


@pytest.mark.parametrize("rule", ["grid", "monte_carlo"])
def test_separable_kernels_have_the_same_evidence_by_blocks(rule):
    """Against the exact kernel of the same features, to rounding."""
    x, y, label, time = survey()
    model = gp_orff.VectorFieldGP(separable(), likelihood=likelihood(4.0), frequencies=RULES[rule])
    model.condition(x, y, track=label, time=time)
    oracle = Oracle(model, x, y, label, time, x[:3])
    value = model.log_marginal_likelihood()
    torch.testing.assert_close(value, oracle.evidence(), rtol=1e-9, atol=1e-8)
    value.backward()
    parameters = [p for p in model.likelihood.parameters() if p.requires_grad]
    references = torch.autograd.grad(oracle.evidence(), parameters)
    for parameter, reference in zip(parameters, references, strict=True):
        torch.testing.assert_close(parameter.grad, reference, rtol=1e-7, atol=1e-8)


def test_readings_at_single_points_join_those_along_tracks():
    """A group of tracks without offset and correlation is a group of independent observations."""
    x, y, label, time = survey()
    rows = slice(0, 30)
    plain = gp_orff.VectorFieldGP(curl_free(0.6), frequencies=RULES["grid"])
    plain.likelihood.noise = 0.04
    plain.condition(x, y)
    model = gp_orff.VectorFieldGP(curl_free(0.6), frequencies=RULES["grid"])
    model.likelihood.noise = 0.04
    noise = likelihood()
    noise.offset_variance, noise.correlated_variance = 1e-12, 1e-12
    model.likelihoods["ship"] = noise
    chunks = [
        {"x": x[rows], "y": y[rows], "track": label[rows], "time": time[rows], "group": "ship"},
        (x[30:], y[30:]),
    ]
    model.condition(chunks)
    expected, got = plain.posterior().mean(x), model.posterior().mean(x)
    torch.testing.assert_close(got, expected, rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(
        model.log_marginal_likelihood(), plain.log_marginal_likelihood(), rtol=1e-8, atol=1e-6
    )


@pytest.mark.parametrize("rule", ["exact", "grid"])
def test_an_update_with_a_new_track_and_with_more_of_one_is_conditioning_on_all(rule):
    """Blocks of one reading; to rounding."""
    x, y, label, time = survey()
    model, *_ = conditioned(RULES[rule], 0.0)
    first = (label == "leg 0") | ((label == "leg 1") & (time.numpy() < 20))
    parts = [torch.from_numpy(np.flatnonzero(rows)) for rows in (first, ~first)]
    again = gp_orff.VectorFieldGP(
        curl_free(0.6), likelihood=likelihood(), frequencies=RULES[rule] or gp_orff.Auto()
    )
    again.condition(*(x[parts[0]], y[parts[0]]), track=label[parts[0]], time=time[parts[0]])
    again.update(x[parts[1]], y[parts[1]], track=label[parts[1]], time=time[parts[1]])
    got, expected = again.posterior(), model.posterior()
    torch.testing.assert_close(got.mean(x), expected.mean(x), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(got.variance(x), expected.variance(x), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(
        again.log_marginal_likelihood(), model.log_marginal_likelihood(), rtol=1e-10, atol=1e-8
    )


@pytest.mark.parametrize("rule", ["exact", "grid"])
def test_files_keep_tracks(rule, tmp_path):
    model, x, y, label, time = conditioned(RULES[rule], 4.0)
    model.save(tmp_path / "model.pt")
    loaded = gp_orff.VectorFieldGP.load(tmp_path / "model.pt")
    for old, new in zip(model.parameters(), loaded.parameters(), strict=True):
        assert torch.equal(old, new)
    assert torch.equal(loaded.posterior().mean(x), model.posterior().mean(x))
    assert loaded.likelihood.span == 4.0
    later = {"track": ["leg 0"] * 2, "time": time[label == "leg 0"][-1] + torch.tensor([1.0, 2.0])}
    means = [m.update(x[:2], y[:2], **later).posterior().mean(x) for m in (loaded, model)]
    torch.testing.assert_close(*means, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("rule", ["exact", "grid"])
def test_readings_along_directions_are_kept_and_updated(rule, tmp_path):
    """A file and an update with more of a track give what conditioning on all gives, to rounding,
    with their known noise; so does a group of vectors beside them."""
    x, y, label, time = survey()
    u = turning(x)
    z, first = (y * u).sum(-1), time < 20

    def part(rows):
        options = {"track": label[rows.numpy()], "time": time[rows], "directions": u[rows]}
        return (x[rows], z[rows]), {**options, "noise": known(x)[rows]}

    model, again = (
        gp_orff.VectorFieldGP(
            curl_free(0.6), likelihood=likelihood(), frequencies=RULES[rule] or gp_orff.Auto()
        )
        for _ in range(2)
    )
    values, options = part(time > -1)
    model.condition(*values, **options).update(x[:4] + 0.5, y[:4], group="fixed")
    values, options = part(first)
    again.condition(*values, **options).update(x[:4] + 0.5, y[:4], group="fixed")
    again.save(tmp_path / "model.pt")
    values, options = part(~first)
    again = gp_orff.VectorFieldGP.load(tmp_path / "model.pt").update(*values, **options)
    for got, expected in zip(
        (again.posterior().mean(x), again.posterior().variance(x), again.log_marginal_likelihood()),
        (model.posterior().mean(x), model.posterior().variance(x), model.log_marginal_likelihood()),
        strict=True,
    ):
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-8)


def test_a_new_reading_has_the_noise_of_a_new_track():
    model, x, *_ = conditioned(None, 4.0)
    field, noise = model.posterior()(x[:5]), model.likelihood
    reading = noise(field)
    total = sum(getattr(noise, name) for name in NAMES if name != "correlation_time")
    torch.testing.assert_close(reading.variance, field.variance + total)
    torch.testing.assert_close(reading.mean, field.mean)
    conditional = noise(field.mean)
    torch.testing.assert_close(conditional.stddev.square(), total.expand(5, 2))
    known_too = noise(field, noise=known(x[:5])).variance - reading.variance
    torch.testing.assert_close(known_too, known(x[:5]).unsqueeze(-1).expand(5, 2))


@pytest.mark.slow
def test_a_fit_learns_noise_along_tracks_and_error_bars_hold():
    """30 tracks of a known field with white noise, offsets and correlated noise of equal size. The
    tolerances are three standard errors: that of a variance from k numbers is √(2/k) of it."""
    tracks, readings, size = 30, 25, 0.3
    rho = math.exp(-1 / 4.0)
    start, end = uniform(tracks, 1, 2, seed=1), uniform(tracks, 1, 2, seed=2)
    way = torch.linspace(0, 1, readings).double()[:, None]
    x = start + (end - start) * way
    truth = torch.stack([torch.cos(2 * x[..., 0]), torch.sin(3 * x[..., 1])], dim=-1)
    correlated = [draw(tracks, 2, seed=3)]
    for i in range(1, readings):
        fresh = math.sqrt(1 - rho**2) * draw(tracks, 2, seed=3 + i)
        correlated.append(rho * correlated[-1] + fresh)
    noise = draw(tracks, 1, 2, seed=90) + torch.stack(correlated, 1)
    y = truth + size * (noise + draw(tracks, readings, 2, seed=91))
    label = torch.arange(tracks).repeat_interleave(readings)
    time = torch.arange(readings).repeat(tracks)
    rule = gp_orff.Grid(spacing=1.2, cutoff=5.0)
    model = gp_orff.VectorFieldGP(curl_free(), frequencies=rule)
    model.fit(x.flatten(0, 1), y.flatten(0, 1), track=label, time=time, progress=False)
    noise = model.likelihood
    numbers = 2 * tracks
    assert abs(noise.noise.item() / size**2 - 1) < 0.2
    assert abs(noise.offset_variance.item() / size**2 - 1) < 3 * math.sqrt(2 / numbers)
    assert abs(noise.correlated_variance.item() / size**2 - 1) < 0.5
    assert 2.0 < noise.correlation_time.item() < 8.0
    field = model.posterior()
    error = field.mean(x.flatten(0, 1)) - truth.flatten(0, 1)
    z = error / field.variance(x.flatten(0, 1)).sqrt()
    assert 0.85 < (z.abs() < 1.96).double().mean() <= 1.0  # one field: about 20 independent errors


X, Y, LABEL, TIME = survey(10)
SECOND = np.timedelta64(1, "s")
GAPS = Y.index_put((torch.tensor(3), torch.tensor(1)), torch.tensor(torch.nan).double())
BAD = {
    "labels of another length": ({"track": LABEL[:-1]}, "label for each of the 30 observations"),
    "labels in columns": ({"track": LABEL[:, None]}, "got shape .30, 1.; give one name or number"),
    "labels by name": (
        {"track": {"a": LABEL}},
        "track= with one entry for each observation, .* dict",
    ),
    "masked labels": (
        {"track": np.ma.masked_array(LABEL, mask=np.arange(30) == 4)},
        "got 1 missing",
    ),
    "masked dates": (
        {"track": LABEL, "time": np.ma.masked_array(TIME.numpy() * SECOND, mask=np.arange(30) < 2)},
        "finite times, got 2",
    ),
    "times in words": ({"track": LABEL, "time": ["noon"] * 30}, "times as numbers, dates or dur"),
    "times that are rounded": (
        {"track": LABEL, "time": (1.6e9 + TIME).float()},
        "that repeat .* give times in float64",
    ),
    "missing labels": ({"track": [None, *LABEL[1:]]}, "got 1 missing"),
    "times of another length": ({"track": LABEL, "time": TIME[:-1]}, r"times of shape \(30,\)"),
    "times that are not finite": ({"track": LABEL, "time": TIME / 0}, "finite times, got 30"),
    "times that repeat": ({"track": LABEL, "time": TIME * 0}, "9 that repeat and 0 that run"),
    "times that run backwards": ({"track": LABEL, "time": -TIME}, "0 that repeat and 9 that run"),
    "times alone": ({"time": TIME}, "expected track= with time="),
    "tracks of one observation": ({"track": np.arange(30)}, "got 30 with one observation each"),
    "variances": ({"track": LABEL, "variances": np.ones(30)}, "which are relative; omit them"),
    "gaps": ({"track": LABEL, "y": GAPS}, "got 1 NaN or infinite values among 60; drop .* points$"),
    "gaps, masked": (
        {"track": LABEL, "y": GAPS, "missing": "mask"},
        "got 1 observations with components that are NaN; drop these",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_tracks_leave_the_model_as_it_was(name):
    model, *_ = conditioned(RULES["grid"], 0.0)
    before, variables = model.posterior().mean(X), [t.clone() for t in model.parameters()]
    options, message = BAD[name]
    with pytest.raises((ValueError, TypeError), match=message):
        model.fit(X, **{"y": Y, **options}, progress=False)
    assert torch.equal(model.posterior().mean(X), before)
    for old, new in zip(variables, model.parameters(), strict=True):
        assert torch.equal(old, new)


def test_readings_that_are_not_later_are_no_update():
    model, x, y, label, time = conditioned(RULES["grid"], 0.0)
    with pytest.raises(ValueError, match="after time"):
        model.update(x[:3], y[:3], track=label[:3], time=time[:3])
    with pytest.raises(ValueError, match="times for all tracks of a group or for none"):
        model.update(x[:3], y[:3], track=["new"] * 3)
    with pytest.raises(ValueError, match="noise= for all tracks of a group or for none"):
        model.update(x[:3], y[:3], track=["new"] * 3, time=time[:3], noise=torch.ones(3))
    with pytest.raises(ValueError, match="in separate groups"):
        model.update(x[:3], y[:3])
    model.update(x[:3], y[:3], group="fixed")
    assert type(model.likelihoods["fixed"]).__name__ == "MultitaskGaussianLikelihood"


def test_what_tracks_have_not():
    model, x, y, label, _ = conditioned(RULES["grid"], 0.0)
    with pytest.raises(NotImplementedError, match="without track= for statistics"):
        _ = model.statistics
    robust = gp_orff.MultitaskStudentTLikelihood(2)
    model = gp_orff.VectorFieldGP(curl_free(0.6), likelihood=robust)
    with pytest.raises(ValueError, match="Gaussian noise along tracks"):
        model.condition(x, y, track=label)


def test_blocks_of_many_readings_are_short_against_field_and_noise():
    """A slow wave of 4000 readings: blocks of 8; a fast one: of fewer, or none."""
    time = torch.arange(4000).double()
    key = GroupKey("", Components.every(1))

    def count(period):
        wave = torch.sin(2 * math.pi * time / period).unsqueeze(-1)
        part = Observations(key, time.unsqueeze(-1), wave, index=torch.arange(4000))
        return len(observations_along(part, "one", time, 4000).in_blocks().y)

    assert count(400) == 500
    assert 500 < count(60) < 4000
    assert count(4) == 4000


@pytest.mark.parametrize("count", [1001, 1200, 1500])
def test_the_scatter_of_blocks_tells_the_white_noise(count):
    """On a slow wave, of variance 0.04: within 5 standard errors of χ². Blocks of two readings, as
    1200 in 500 blocks would have, have no scatter, and any white noise is as likely."""
    time = torch.arange(count).double()
    y = torch.sin(2 * math.pi * time / 1000)[:, None] + 0.2 * draw(count, 1)
    part = Observations(GroupKey("", Components.every(1)), time[:, None], y, index=time.long())
    (track,) = observations_along(part, "one", time, count).in_blocks().tracks
    assert track.degrees >= count // 3
    error = 0.04 * math.sqrt(2 / track.degrees)
    assert track.squares.item() / track.degrees == pytest.approx(0.04, abs=5 * error)


def test_pauses_do_not_lengthen_blocks():
    """A pause of a thousand seconds within a track; observations each second, or in pairs."""
    wave = torch.sin(2 * math.pi * torch.arange(4000).double() / 400).unsqueeze(-1)
    for steps in (torch.ones(4000), torch.tensor([0.1, 1.9]).repeat(2000)):
        time = steps.double().cumsum(0)
        time[2000:] += 1e4
        key, index = GroupKey("", Components.every(1)), torch.arange(4000)
        part = Observations(key, time.unsqueeze(-1), wave, index=index)
        (track,) = observations_along(part, "one", time, 4000).in_blocks().tracks
        assert len(track.y) == pytest.approx(500, abs=10)
        assert torch.bincount(track.block).max() < 12


def test_tracks_shorter_than_blocks_keep_their_readings():
    """600 tracks of two: a mean for each would tell nothing of offsets."""
    index = torch.arange(1200)
    x, y, key = uniform(1200, 2), draw(1200, 2), GroupKey("", Components.every(2))
    part = Observations(key, x, y, index=index)
    assert len(observations_along(part, index // 2, index % 2, 1200).in_blocks().y) == 1200


def test_means_of_blocks_are_told():
    time = torch.arange(4000).double()
    wave = torch.sin(2 * math.pi * time / 400).unsqueeze(-1)
    key = GroupKey("", Components.every(1))

    def told(count):
        part = Observations(key, time[:count, None], wave[:count], index=torch.arange(count))
        return blocks_in_words([observations_along(part, "one", time[:count], count).in_blocks()])

    assert told(4000) == "4000 observations along 1 track, as 500 means of blocks"
    assert told(20) == ""
    assert blocks_in_words([]) == ""
