"""Many tracks: parts of the algebra against dense formulas, streams, dates, samples of blocks."""

import datetime
import math

import numpy as np
import pytest
import torch

import gp_orff
from gp_orff.data.noise import TrackNoise
from gp_orff.data.observations import Observations
from gp_orff.data.patterns import Components, GroupKey
from gp_orff.data.tracks import (
    BlockNoise,
    BlockTimes,
    WhitenedGram,
    averaged,
    batches_of,
    observations_along,
)
from gp_orff.features.lattice import LatticeColumns
from gp_orff.fitting import plans, strategy
from gp_orff.fitting.trainer import Trainer
from gp_orff.inference import features
from gp_orff.inference import features as iterative
from tests.support.fields import curl_free, draw, uniform

SIZES = (1, 7, 30, 2, 1, 12)  # readings of tracks
GRID = gp_orff.Grid(spacing=1.0, cutoff=5.0, diagonal_correction=False)


def readings(sizes=SIZES, seed=0):
    """Positions along random walks, vectors, labels, and times that begin anew on every track."""
    label = np.repeat(np.arange(len(sizes)), sizes)
    starts = uniform(len(sizes), 2, seed=seed)[label]
    x = starts + 0.1 * draw(len(label), 2, seed=seed + 1)
    times = np.concatenate([np.cumsum(0.5 + np.arange(n) % 3) for n in sizes])
    return x, torch.sin(2 * x) + 0.3 * draw(len(label), 2, seed=seed + 2), label, times


def model_with(span=0.0, frequencies=GRID):
    noise = gp_orff.TrackLikelihood(2).double()
    noise.noise, noise.offset_variance, noise.block_variance = 0.04, 0.09, 0.02
    noise.correlated_variance, noise.correlation_time = 0.05, 4.0
    noise.span.fill_(span)
    noise.duration.fill_(10.0)
    return gp_orff.VectorFieldGP(curl_free(0.6), likelihood=noise, frequencies=frequencies)


@pytest.mark.parametrize("modes", [(4,), (3, 2), (2, 0, 3)])
def test_means_of_lattice_columns_over_blocks(modes):
    """Against cosines and sines of every reading, to rounding; blocks of 1 to 9 readings, and
    either of each pair ±k."""
    k = torch.cartesian_prod(*(torch.arange(-m, m + 1) for m in modes)).reshape(-1, len(modes))
    k = k[len(k) // 2 :] * (-1) ** torch.arange(len(k) // 2 + 1)[:, None]
    spacing = torch.linspace(0.5, 0.9, len(modes)).double()
    block = torch.arange(9).repeat_interleave(torch.tensor([1, 9, 3, 3, 1, 2, 8, 9, 1]))
    x, origin = draw(len(block), len(modes), seed=3), torch.full((len(modes),), 0.3).double()
    phase = (x - origin) @ (k * spacing).mT
    values = torch.cat([phase.cos(), phase.sin()], dim=-1)
    expected = torch.stack([values[block == b].mean(0) for b in range(9)])
    got = averaged(LatticeColumns.of(k, spacing, origin), x, block, 9)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-13)


def test_covariances_of_tracks_of_different_lengths():
    """Against the covariance of every reading, averaged; to rounding. The blocks of all tracks
    stand in some batch, once."""
    counts = torch.tensor([3, 1, 2, 4, 1, 1, 5, 2])
    block = torch.arange(8).repeat_interleave(counts)
    sizes = [2, 1, 5]  # blocks of three tracks
    rows = torch.tensor([[0, 1], [2, -1]])
    clock = torch.cat(
        [start + torch.arange(n) ** 1.5 for start, n in ((2e6, 4), (1e6, 2), (0, 13))]
    )
    clock = clock.double()
    noise = TrackNoise(*torch.tensor([0.3, 0.2, 0.7, 1.7, 0.1], dtype=torch.float64))
    time = noise.correlation_time.clone().requires_grad_()
    noise = noise._replace(correlation_time=time)
    same = torch.block_diag(*(torch.ones(n, n) for n in (4, 2, 13))).double()
    lag = (clock[:, None] - clock).abs()
    dense = same * (0.2 + 0.7 * torch.exp(-lag / time)) + 0.3 * torch.eye(19).double()
    average = torch.nn.functional.one_hot(block).double().mT / counts[:, None]
    dense = average @ dense @ average.mT + (0.1 + 0.5) * torch.eye(8).double()
    got = BlockNoise.of(BlockTimes(clock, block), noise, 0.5).of_tracks(rows)
    torch.testing.assert_close(got[0], dense[:2, :2], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(got[1, 0, 0], dense[2, 2], rtol=1e-12, atol=1e-12)
    assert got[1, 1].tolist() == [0.0, 1.0]
    torch.testing.assert_close(*(torch.autograd.grad(v.sum(), time) for v in (got, dense[:3, :3])))
    every = torch.cat([batch[batch >= 0] for batch in batches_of(sizes)])
    assert sorted(every.tolist()) == list(range(8))
    assert all(len(batches_of([n] * 1000)) > 1 for n in (20, 300))


def test_whitened_products_and_their_derivatives():
    """Against solutions of linear systems, and finite differences of values and gradients."""
    root, z = draw(3, 4, 4, seed=1), draw(3, 4, 2, seed=2).requires_grad_()
    r = (root @ root.mT + torch.eye(4)).requires_grad_()
    gram, logdet = WhitenedGram.apply(r, z)
    expected = sum(part.mT @ torch.linalg.solve(a, part) for a, part in zip(r, z, strict=True))
    torch.testing.assert_close(gram, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(logdet, torch.logdet(r).sum(), rtol=1e-12, atol=1e-12)

    def of_symmetric(a, b):
        return WhitenedGram.apply(0.5 * (a + a.mT), b)

    assert torch.autograd.gradcheck(of_symmetric, (r, z))
    assert torch.autograd.gradgradcheck(of_symmetric, (r, z))


def by_hand(label, times, values, span):
    """The blocks of every track, one reading after another."""
    blocks = []
    for name in np.unique(label):
        rows = np.flatnonzero(label == name)
        parts, last = [], None
        for row in rows:
            part = math.floor((times[row] - times[rows[0]]) / span)
            if part != last or len(parts[-1]) == 256:
                parts.append([])
            parts[-1].append(row)
            last = part
        if len(parts) > 1 and 2 * len(parts[-1]) < len(parts[-2]):
            short = parts.pop()
            parts[-1] += short
        blocks += parts
    return blocks, np.stack([values[part].mean(0) for part in blocks])


def test_blocks_are_those_of_a_loop_over_readings():
    """Tracks that are mixed with each other; the scatter about lines by least squares."""
    x, y, label, times = readings((300, 1, 40, 7, 2) * 3)
    order = np.lexsort((label, times))
    key = GroupKey("", Components.every(2))
    part = Observations(key, x[order], y[order], index=torch.arange(len(order)))
    means = observations_along(part, label[order], times[order], len(order)).in_blocks(4.0)
    blocks, expected = by_hand(label, times, y.numpy(), 4.0)
    torch.testing.assert_close(means.y, torch.from_numpy(expected), rtol=1e-12, atol=1e-13)
    of_track = label[[block[0] for block in blocks]]
    for number, track in enumerate(means.tracks):
        mine = [b for b, owner in zip(blocks, of_track, strict=True) if owner == int(track.label)]
        assert len(track.y) == len(mine), number
        squares = 0.0
        for block in (block for block in mine if len(block) > 2):
            line = np.polyfit(times[block], y.numpy()[block], 1)
            fitted = np.outer(times[block], line[0]) + line[1]
            squares += np.square(y.numpy()[block] - fitted).sum(0)
        np.testing.assert_allclose(track.squares, squares, rtol=1e-9, atol=1e-12)
        assert track.degrees == sum(max(0, len(block) - 2) for block in mine)
    along = observations_along(part, label[order], times[order], len(order))
    assert len(along.in_blocks().y) < len(x)


def test_a_sample_of_blocks_covers_all_long_tracks():
    x, y, label, times = readings((900, 400, 900))
    part = Observations(GroupKey("", Components.every(2)), x, y, index=torch.arange(len(x)))
    means = observations_along(part, label, times, len(x)).in_blocks(9.0)
    few = means.sample(len(means.y) // 2)
    assert [track.label for track in few.tracks] == ["0", "1", "2"]
    assert abs(len(few.y) / len(means.y) - 0.5) < 0.2
    for old, new in zip(means.tracks, few.tracks, strict=True):
        share = new.degrees / old.degrees
        torch.testing.assert_close(new.squares, share * old.squares)
        assert set(map(tuple, new.y.tolist())) <= set(map(tuple, old.y.tolist()))


@pytest.mark.parametrize("span", [0.0, 4.0])
def test_a_track_goes_on_in_later_chunks(span):
    """As if all were in one chunk, exactly; blocks go across the ends of chunks."""
    x, y, label, times = readings()
    order = np.argsort(times, kind="stable")
    chunks = [
        {"x": x[rows], "y": y[rows], "track": label[rows], "time": times[rows]}
        for rows in np.array_split(order, 5)
    ]
    whole = model_with(span).condition(x, y, track=label, time=times)
    stream = model_with(span).condition(chunks)
    torch.testing.assert_close(
        stream.log_marginal_likelihood(), whole.log_marginal_likelihood(), rtol=1e-11, atol=1e-9
    )
    got, expected = stream.posterior(), whole.posterior()
    torch.testing.assert_close(got.mean(x), expected.mean(x), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(got.variance(x), expected.variance(x), rtol=1e-9, atol=1e-9)
    with pytest.raises(ValueError, match="after time"):
        stream.condition(chunks[::-1])
    torch.testing.assert_close(stream.posterior().mean(x), got.mean(x), rtol=0, atol=0)


START = np.datetime64("2024-02-28T23:59:50")
DATES = {
    "numpy": lambda s: START + (1000 * s).astype("timedelta64[ms]"),
    "durations": lambda s: (1000 * s).astype("timedelta64[ms]"),
    "python": lambda s: [START.item() + datetime.timedelta(seconds=t) for t in s],
    "with a zone": lambda s: [
        (START.item() + datetime.timedelta(seconds=t)).replace(
            tzinfo=datetime.timezone(datetime.timedelta(hours=t % 2))
        )
        + datetime.timedelta(hours=t % 2)
        for t in s
    ],
    "pandas": lambda s: __import__("pandas").to_datetime(DATES["numpy"](s)),
    "pandas with a zone": lambda s: DATES["pandas"](s).tz_localize("UTC").tz_convert("Asia/Tokyo"),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", DATES)
def test_times_may_be_dates(kind):
    """As seconds, to the rounding of seconds since 1970, 2e-7; also in an update."""
    if "pandas" in kind:
        pytest.importorskip("pandas")
    x, y, label, times = readings()
    numbers = model_with(4.0).condition(x, y, track=label, time=times)
    dates = DATES[kind](times)
    model = model_with(4.0).condition(x, y, track=label, time=dates)
    torch.testing.assert_close(
        model.log_marginal_likelihood(), numbers.log_marginal_likelihood(), rtol=0, atol=1e-4
    )
    more = times[label == 2] + 100.0
    later = {"track": ["2"] * len(more), "time": DATES[kind](more)}
    values = draw(len(more), 2, seed=7)
    got = model.update(x[: len(more)], values, **later).posterior().mean(x)
    later["time"] = more
    expected = numbers.update(x[: len(more)], values, **later).posterior().mean(x)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)


def test_bad_dates_and_labels():
    x, y, label, times = readings()
    dates = DATES["numpy"](times)
    dates[3] = np.datetime64("NaT")
    with pytest.raises(ValueError, match="finite times, got 1 NaN"):
        model_with().condition(x, y, track=label, time=dates)
    with pytest.raises(TypeError, match="times"):
        model_with().condition(x, y, track=label, time=["noon"] * len(x))
    for missing in (None, math.nan):
        labels = [missing, *map(str, label[1:])]
        with pytest.raises(ValueError, match="got 1 missing"):
            model_with().condition(x, y, track=labels, time=times)
    times[5] = times[4]
    with pytest.raises(ValueError, match="1 that repeat and 0 that run backwards on track '1'"):
        model_with().condition(x, y, track=label, time=times)


def test_searches_may_take_a_sample_of_many_blocks(monkeypatch):
    """About 150 and 300 of 960 blocks; all of them in the posterior."""
    x, y, label, times = readings((60,) * 16, seed=5)
    monkeypatch.setattr(plans, "COARSE_FEATURES", 150)
    monkeypatch.setattr(plans, "MOST_TRAINING", 300)
    blocks, lattices_of = {}, plans.lattices_of

    def recorded(trainer, representation):
        found = lattices_of(trainer, representation)
        for plan in found:
            tracks = plan.representation.data.tracks
            blocks[plan.name] = sum(len(part.y) for part in tracks)
        return found

    monkeypatch.setattr(plans, "lattices_of", recorded)
    monkeypatch.setattr(Trainer, "search", lambda self, search, *given, **options: search)
    monkeypatch.setattr(strategy, "best_start", Trainer.new_search)
    model = model_with(frequencies=gp_orff.Auto(exact_values=100))
    with gp_orff.settings.check_calibration(False):
        model.fit(x, y, track=label, time=times, progress=False)
    assert abs(blocks["coarse grid"] - 150) <= 30
    assert abs(blocks["fine grid"] - 300) <= 30
    assert blocks["fine grid, all blocks"] == len(model.state.data.tracks[0].y) == 960


def test_more_features_than_are_factorised(monkeypatch):
    """Few numbers along tracks and at single points: against the algebra of features, to rounding.
    Many: refused."""
    x, y, label, times = readings()
    chunks = [
        {"x": x, "y": y, "track": label, "time": times, "group": "ship"},
        (x[:9] + 0.1, y[:9]),
    ]

    def conditioned():
        model = model_with(9.0)
        model.likelihoods["ship"] = model.likelihood
        model.likelihood = gp_orff.VectorFieldGP(curl_free(0.6)).likelihood
        return model.condition(chunks)

    plain = conditioned()
    evidence, expected = plain.log_marginal_likelihood(), plain.posterior()
    expected = expected.mean(x), expected.variance(x)
    monkeypatch.setattr(features, "MOST_DENSE", 75)
    written_out = conditioned()
    assert written_out.state.inference.written_out(written_out.kernel)
    torch.testing.assert_close(
        written_out.log_marginal_likelihood(), evidence, rtol=1e-9, atol=1e-8
    )
    got = written_out.posterior()
    got = got.mean(x), got.variance(x)
    torch.testing.assert_close(got, expected, rtol=1e-8, atol=1e-8)
    monkeypatch.setattr(iterative, "MOST_DENSE", 10)
    monkeypatch.setattr(iterative, "most_factorised", lambda device: 70)
    with pytest.raises(ValueError, match=r"at most 70 features for \d+ values along tracks"):
        written_out.condition(chunks)
    torch.testing.assert_close(written_out.posterior().mean(x), got[0], rtol=0, atol=0)
