"""Passes over chunks on workers of executors: the sums are the same after any failure of a worker.

Tests with several processes are slow, because each process imports PyTorch.
"""

import copy
import multiprocessing
import os
import pickle
import random
import signal
import threading
import time
import warnings
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

import gp_orff
from gp_orff.data.statistics import FieldStatistics
from gp_orff.fitting.search import Search
from tests.support.chunks import (
    Fails,
    Load,
    Slow,
    Warns,
    call,
    chunks,
    nothing,
    num_threads,
    readings,
    reduced,
    times_read,
)
from tests.support.fields import curl_free

XS = 1.6 * torch.rand(40, 2, generator=torch.Generator().manual_seed(9)).double() - 0.8


CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    ["gp_orff", "tests.support.chunks"]
)  # imported once for all processes


@pytest.fixture(scope="module")
def pool():
    with ProcessPoolExecutor(2, mp_context=CONTEXT) as executor:
        yield executor


@pytest.fixture(scope="module")
def dask():
    distributed = pytest.importorskip("distributed")
    options = {"n_workers": 1, "threads_per_worker": 1, "dashboard_address": ":0"}
    with distributed.LocalCluster(**options) as cluster, distributed.Client(cluster) as client:
        yield client.get_executor()


@pytest.fixture
def executor(request):
    if request.param == "threads":
        return ThreadPoolExecutor(2)
    return request.getfixturevalue(request.param)


def model():
    rule = gp_orff.Grid(spacing=1.2, cutoff=9.0)
    return gp_orff.VectorFieldGP(curl_free(0.5), frequencies=rule)


def conditioned():
    return model().condition(*readings(200))


def require_equal(one, other, relative=1e-10):
    assert one.num_values == other.num_values
    for name, tensor in one.tensors.items():
        expected = other.tensors[name]
        assert (tensor - expected).abs().max() <= relative * expected.abs().max()


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["threads", "pool", "dask"], indirect=True)
def test_every_engine_gives_the_same_sums(executor):
    """In any order and any chunking; against sums of cosines and sines, written out."""
    x, y = readings()
    held = conditioned()
    for size in (170, 1000):
        parts = chunks(size)
        random.Random(size).shuffle(parts)
        parts[0] = parts[0]()  # data and callables may be mixed
        found = held.statistics_of(parts, executor=executor)
        require_equal(found, held.statistics_of(x, y))
    (group,), phi = found.groups.values(), found.phi
    phase = (x - phi.origin.numpy()) @ (phi.indices * phi.spacing).T.numpy()
    wave = np.concatenate([np.cos(phase), np.sin(phase)], axis=1)
    np.testing.assert_allclose(group.gram.numpy(), wave.T @ wave, rtol=0, atol=1e-10 * len(x))
    np.testing.assert_allclose(group.cross.numpy(), wave.T @ y, rtol=0, atol=1e-10 * len(x))


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["pool", "dask"], indirect=True)
def test_posteriors_are_those_of_one_process(executor):
    one, other = model().condition(*readings()), model()
    other.condition(chunks(400)[:4], executor=executor)
    other.update(chunks(400)[4:], executor=executor)
    ours, expected = other.posterior(), one.posterior()
    torch.testing.assert_close(ours.mean(XS), expected.mean(XS), rtol=0, atol=1e-9)
    torch.testing.assert_close(ours.variance(XS), expected.variance(XS), rtol=0, atol=1e-9)
    pickle.dumps(other)  # no executor stays behind


@pytest.mark.slow
def test_a_fit_on_workers_is_that_of_one_process(pool):
    """To the last bit: chunks are added in their order, one a task."""
    parts = chunks(20, count=60)
    fits = [
        gp_orff.VectorFieldGP(curl_free(0.5)).fit(parts, progress=False, **options)
        for options in ({}, {"executor": pool})
    ]
    for one, other in zip(*(fit.parameters() for fit in fits), strict=True):
        assert torch.equal(one, other)


@pytest.mark.slow
def test_workers_share_the_cores_for_this_call_only(pool):
    before = [pool.submit(num_threads).result() for _ in range(4)]
    conditioned().statistics_of(chunks(1000), executor=pool)
    assert [pool.submit(num_threads).result() for _ in range(4)] == before


class Counting(ThreadPoolExecutor):
    """Counts the tasks that are submitted and not yet collected."""

    def __init__(self, workers):
        super().__init__(workers)
        self.open, self.most = 0, 0

    def submit(self, *arguments):
        future = super().submit(*arguments)
        self.open += 1
        self.most = max(self.most, self.open)
        collect = future.result

        def result():
            self.open -= 1
            return collect()

        future.result = result
        return future


def test_few_tasks_are_in_flight():
    executor = Counting(3)
    parts = (chunk() for chunk in chunks(100))  # data: one chunk a task
    conditioned().statistics_of([*parts], executor=executor)
    assert 3 < executor.most <= 6


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["pool", "dask"], indirect=True)
def test_warnings_of_workers_reach_the_caller(executor):
    """Once each, and through the filters of the caller."""
    held, parts = conditioned(), [Warns(part) for part in chunks(50, count=300)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        held.statistics_of(parts, executor=executor)
    assert sorted(str(own.message) for own in caught) == [f"clouds at {i}" for i in range(3)]
    assert {(own.category, Path(own.filename).name) for own in caught} == {
        (UserWarning, "chunks.py")
    }
    with pytest.raises(UserWarning, match="clouds at 0"):  # the suite makes errors of them
        held.statistics_of(parts, executor=executor)
    parts = [Warns(part, DeprecationWarning) for part in chunks(50, count=300)]
    with pytest.raises(DeprecationWarning, match="clouds at 0"):  # which a worker does not show
        held.statistics_of(parts, executor=executor)


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["threads", "pool"], indirect=True)
def test_a_chunk_that_fails_is_tried_again(executor, tmp_path):
    """And not the other chunks of its task, of which each has three here."""
    (log := tmp_path / "log").mkdir()
    parts = chunks(60, log)
    parts[2] = Fails(parts[2], tmp_path / "marks", times=2)
    held = conditioned()
    found = held.statistics_of(parts, executor=executor)
    require_equal(found, held.statistics_of(*readings()))
    assert times_read(log) == [2] * 50  # once for the survey, once for the statistics


@pytest.mark.slow
def test_a_chunk_that_fails_for_good_is_named(pool, tmp_path):
    held = conditioned()
    parts = chunks(500)
    parts[4] = Fails(parts[4], tmp_path / "marks", times=99)
    before = held.posterior().mean(XS)
    with pytest.raises(RuntimeError, match=r"chunk 4, Fails.* failed 2 times.*OSError: the disk"):
        held.update(parts, executor=pool, retries=1)
    x, y = parts[0]()
    wrong = [parts[0], (x, np.full_like(y, np.nan))]
    with pytest.raises(ValueError, match=r"chunk 1 .*expected finite observations"):
        held.condition(wrong, executor=pool, retries=0)
    with pytest.raises(TypeError, match=r"chunk 1, .*got None from"):
        held.condition([parts[0], nothing], executor=pool)
    with pytest.raises(ValueError, match=r"chunk 1 failed 3 times.*expects points with 2 columns"):
        held.condition([parts[0], (np.c_[x, x[:, 0]], y)], executor=pool)
    assert torch.equal(held.posterior().mean(XS), before)


@pytest.mark.slow
def test_a_broken_pool_goes_on_with_another(pool, tmp_path):
    """Chunks that are in the checkpoint are not read again."""
    (log := tmp_path / "log").mkdir()
    parts = chunks(300, log)
    marks, path = tmp_path / "marks", tmp_path / "sums"
    parts[7] = Fails(parts[7], marks, times=1, error=None)
    held = conditioned()
    with (
        ProcessPoolExecutor(1, mp_context=CONTEXT) as weak,
        pytest.raises(RuntimeError, match="checkpoint=path"),
    ):
        held.statistics_of(parts, executor=weak, checkpoint=path)
    assert path.exists()
    (partial,) = pickle.loads(path.read_bytes())[2].values()
    assert 5 <= partial.chunks <= 7
    found = held.statistics_of(parts, executor=pool, checkpoint=path)
    assert not path.exists()
    assert times_read(log)[: partial.chunks] == [2] * partial.chunks  # one a pass
    require_equal(found, held.statistics_of(*readings()))


@pytest.mark.slow
def test_a_killed_worker_of_a_cluster_costs_its_chunk_only(dask, tmp_path):
    parts = chunks(500)
    parts[3] = Fails(parts[3], tmp_path / "marks", times=1, error=None)
    held = conditioned()
    found = held.statistics_of(parts, executor=dask)
    require_equal(found, held.statistics_of(*readings()))


class Stopped(Executor):
    """Finishes two tasks; then the user presses Ctrl-C."""

    def __init__(self):
        self.futures = []

    def submit(self, function, /, *arguments):
        future = Future()
        if len(self.futures) < 2:
            future.set_result(function(*arguments))
        else:
            future.result = self.interrupt
        self.futures.append(future)
        return future

    def interrupt(self):
        raise KeyboardInterrupt


def test_an_interrupt_cancels_what_is_pending():
    held, executor = conditioned(), Stopped()
    before = held.posterior().mean(XS)
    with pytest.raises(KeyboardInterrupt):
        held.condition(chunks(100), executor=executor)
    assert all(future.cancelled() for future in executor.futures[2:])
    assert len(executor.futures) > 2
    assert torch.equal(held.posterior().mean(XS), before)


def interrupted(log):
    """As Ctrl-C, once a chunk has been read."""
    while not any(log.iterdir()):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGINT)


@pytest.fixture
def interruptible():
    """Processes in the background of a shell are born deaf to SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["pool", "dask"], indirect=True)
def test_workers_go_on_after_an_interrupt(executor, interruptible, tmp_path):
    """The process gets the signal of Ctrl-C; what waits for a worker is not read."""
    (log := tmp_path / "log").mkdir()
    held, parts = conditioned(), [Slow(part, 0.05) for part in chunks(50, log)]
    before = held.posterior().mean(XS)
    executor.submit(num_threads).result()  # a pool that is interrupted as it starts may hang
    threading.Thread(target=interrupted, args=(log,)).start()
    with pytest.raises(KeyboardInterrupt):
        held.update(parts, executor=executor)
    executor.submit(num_threads).result(timeout=20)
    assert len(list(log.iterdir())) < len(parts)
    assert torch.equal(held.posterior().mean(XS), before)
    require_equal(
        held.statistics_of(chunks(500), executor=executor), held.statistics_of(*readings())
    )


@pytest.mark.slow
def test_a_map_is_computed_on_a_cluster(dask):
    """By blocks, in other processes, which hold the field once each."""
    field = conditioned().posterior()
    axes = {"x": np.linspace(-1, 1, 30), "y": np.linspace(-1, 1, 20)}
    lazy = field.to_xarray(axes, chunks={"x": 8})
    found, whole = lazy.compute(), field.to_xarray(axes)
    for name in whole.data_vars:
        np.testing.assert_allclose(found[name], whole[name], rtol=1e-9, atol=1e-12)


def exit_code(method, *arguments, **options):
    """Of a call in a process of its own."""
    packed = pickle.dumps(method)  # else torch shares the memory of hyperparameters
    process = CONTEXT.Process(target=call, args=(packed, arguments, options))
    process.start()
    process.join()
    return process.exitcode


@pytest.mark.slow
@pytest.mark.parametrize("error", [KeyboardInterrupt, None])
def test_an_interrupted_pass_goes_on(error, tmp_path):
    """Stopped or killed at ten places, in both kinds of passes, and resumed: each chunk counts
    once."""
    (log := tmp_path / "log").mkdir()
    path, stops = tmp_path / "sums", random.Random(0).sample(range(30), 10)
    parts = [
        Fails(part, tmp_path / f"marks {i}", int(i in stops), error, after=i % 2)
        for i, part in enumerate(chunks(100, log))
    ]
    held = conditioned()
    before = held.posterior().mean(XS)
    for _ in stops:
        if error is None:
            assert exit_code(held.condition, parts, checkpoint=path) == -signal.SIGKILL
        else:
            with pytest.raises(KeyboardInterrupt):
                held.condition(parts, checkpoint=path)
        assert torch.equal(held.posterior().mean(XS), before)
    held.condition(parts, checkpoint=path)
    if error is not None:  # a killed process has not written the last chunks
        assert times_read(log) == [2] * 30  # once for the survey, once for the statistics
    expected = model().condition(*readings()).posterior()
    torch.testing.assert_close(held.posterior().mean(XS), expected.mean(XS), rtol=0, atol=1e-9)


@pytest.mark.slow
def test_an_interrupted_fit_goes_on_in_another_process(tmp_path, monkeypatch):
    """Its searches before the pass are not made again: their last bits, which change with the
    number of threads, would ask for another grid."""
    path, parts = tmp_path / "sums", chunks(150, count=900)
    rule, options = gp_orff.Auto(max_features=100), {"warm_start": True, "progress": False}
    whole, resumed = (gp_orff.VectorFieldGP(curl_free(0.5), frequencies=rule) for _ in range(2))
    searches, run = [], Search.run
    monkeypatch.setattr(Search, "run", lambda *a, **b: searches.append(0) or run(*a, **b))
    quiet = gp_orff.settings.check_calibration(False)  # the field has a curl
    with gp_orff.settings.num_threads(1), quiet:
        whole.fit(parts, **options)
        needed = len(searches)
        parts[5] = Fails(parts[5], tmp_path / "marks", 1, KeyboardInterrupt, after=3)
        assert exit_code(resumed.fit, parts, checkpoint=path, **options) == 1
        *_, results = pickle.loads(path.read_bytes())
        resumed.fit(parts, checkpoint=path, **options)
    assert len(searches) == 2 * needed - len(results) < 2 * needed
    for one, other in zip(resumed.parameters(), whole.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_checkpoint_of_something_else_is_refused(tmp_path):
    path, parts = tmp_path / "sums", chunks(500)
    parts[4] = Fails(parts[4], tmp_path / "marks", times=99)
    held = conditioned()
    with pytest.raises(RuntimeError, match=r"chunk 4, Fails.* failed 3 times"):
        held.statistics_of(parts, checkpoint=path)
    with pytest.raises(ValueError, match=r"expected the data of the checkpoint.*other chunks"):
        held.statistics_of([Load(7, 500), *parts[1:]], checkpoint=path)
    with pytest.raises(ValueError, match=r"expected the data of the checkpoint.*fewer chunks"):
        held.statistics_of(parts[:2], checkpoint=path)
    other = gp_orff.VectorFieldGP(curl_free(0.6), frequencies=held.frequencies)
    other.condition(*readings(200))
    with pytest.raises(ValueError, match="expected a checkpoint of this model"):
        other.statistics_of(parts, checkpoint=path)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ValueError, match="is damaged"):
        held.statistics_of(parts, checkpoint=path)


@pytest.mark.slow
def test_bad_executors_and_chunks_are_refused_at_once(pool):
    held, parts = conditioned(), chunks(500)
    with pytest.raises(TypeError, match="Executor, got 'pool'"):
        held.condition(parts, executor="pool")
    with pytest.raises(ValueError, match="retries >= 0"):
        held.condition(parts, executor=pool, retries=-1)
    closed = ThreadPoolExecutor(1)
    closed.shutdown()
    with pytest.raises(RuntimeError, match="got one that has been shut down"):
        held.condition(parts, executor=closed)
    with pytest.raises(TypeError, match=r"got chunk 1.*functools.partial\(load, path\)"):
        held.condition([parts[0], lambda: parts[1]()], executor=pool)
    with pytest.raises(ValueError, match="an empty iterable of chunks"):
        held.condition([], executor=pool)
    assert held.state.data.num_values == 400


def test_callables_are_chunks_without_an_executor():
    found = conditioned().statistics_of(chunks(700))
    require_equal(found, conditioned().statistics_of(*readings()))
    with pytest.raises(TypeError, match="got None from"):
        conditioned().condition([nothing])


def test_statistics_travel_as_bytes():
    one = conditioned().statistics_of(*readings())
    content = one.to_bytes()
    require_equal(FieldStatistics.from_bytes(content), one, 0)
    _ = next(iter(one.groups.values())).gram  # what is computed from the sums does not travel
    numbers = sum(t.numel() * t.element_size() for t in one.tensors.values())
    assert len(pickle.dumps(one)) < 2 * numbers + 20_000
    require_equal(pickle.loads(pickle.dumps(one)), one, 0)
    assert copy.deepcopy(one) is one
    with pytest.raises(ValueError, match="or damaged bytes"):
        FieldStatistics.from_bytes(content[:200])
    with pytest.raises(RuntimeError, match="init_process_group"):
        one.all_reduce()


@pytest.mark.slow
def test_statistics_add_up_over_processes(pool, tmp_path):
    held, (x, y) = conditioned(), readings()
    parts = [held.statistics_of(x[i::2], y[i::2]).to_bytes() for i in (0, 1)]
    futures = [pool.submit(reduced, i, tmp_path / "store", parts[i]) for i in (0, 1)]
    for future in futures:
        require_equal(FieldStatistics.from_bytes(future.result()), held.statistics_of(x, y))


@pytest.mark.slow
def test_blocks_of_a_cross_validation_are_shared(pool):
    x, y = readings(240)
    held = model().condition(x, y)
    blocks = [f"b{i % 7}" for i in range(240)]
    one, other = (held.cross_validate(x, y, blocks=blocks, executor=e) for e in (None, pool))
    assert list(one.blocks) == list(other.blocks)
    for name, block in one.blocks.items():
        assert other.blocks[name].rmse == pytest.approx(block.rmse, rel=1e-9)


@pytest.mark.slow
def test_groups_gaps_and_tracks_come_back_whole(pool):
    """A group of its own, a component that is missing, and a track that goes on in later chunks."""
    x, y = readings(300)
    gaps = y.copy()
    gaps[::3, 1] = np.nan
    parts = [
        {"x": x[i : i + 60], "y": gaps[i : i + 60], "group": "b" if i else None}
        for i in range(0, 300, 60)
    ]
    held = conditioned()
    options = {"missing": "mask"}
    found = held.statistics_of(parts, executor=pool, **options)
    group = ["b" if i >= 60 else None for i in range(300)]
    require_equal(found, held.statistics_of(x, gaps, group=group, **options))
    tracks = [
        {"x": x[i : i + 50], "y": y[i : i + 50], "track": "a", "time": np.arange(i, i + 50.0)}
        for i in range(0, 300, 50)
    ]
    ours, expected = model().condition(tracks, executor=pool), model().condition(tracks)
    assert torch.equal(ours.posterior().mean(XS), expected.posterior().mean(XS))
