"""Passes with killed processes: the sums are those of an undisturbed pass.

    python benchmarks killed_workers [--points 2e6] [--size 2e4] [--times 10] [--smoke]

dask        in each of `times` passes on a new cluster of two processes, one worker receives SIGKILL
            at a random moment
checkpoint  a pass with `checkpoint=` receives SIGKILL at `times` random moments, each time in a
            new process, and then continues to the end

The columns are the largest difference from the undisturbed sums, over their largest number; the
same for counts of values; and the number of kills before the end of a pass.
"""

import multiprocessing
import os
import pickle
import random
import signal
import tempfile
import threading
import time
from collections.abc import Sequence
from multiprocessing.synchronize import Event
from pathlib import Path

import distributed
from helpers.chunk_files import chunks, one_thread, write
from helpers.command import Sizes
from helpers.results import save
from helpers.rows import Rows

import gp_orff
from gp_orff.data.statistics import FieldStatistics
from speed.workers import apart, model_of


def killing_one(client: distributed.Client, after: float, killed: list[int]) -> threading.Thread:
    """Start a thread that kills a worker of the cluster after some seconds."""

    def kill() -> None:
        time.sleep(after)
        process = random.choice(list(client.run(os.getpid).values()))
        killed.append(process)
        os.kill(process, signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    return thread


def on_a_cluster(
    model: gp_orff.VectorFieldGP, parts: Sequence, times: int, needed: float
) -> tuple[list[FieldStatistics], int]:
    """Return the sums of several passes, and how many workers were killed before the end of a
    pass.

    `needed` is about half of the seconds of a pass.
    """
    options = {"n_workers": 2, "threads_per_worker": 1, "dashboard_address": ":0"}
    found, before_end = [], 0
    for _ in range(times):  # a new one each: a nanny does not always bring its worker back
        with distributed.LocalCluster(**options) as cluster, distributed.Client(cluster) as client:
            executor = client.get_executor()
            model.statistics_of(parts[:4], executor=executor)  # imports
            killed: list[int] = []
            thread = killing_one(client, random.uniform(0.1, 1.0) * needed, killed)
            found.append(model.statistics_of(parts, executor=executor))
            before_end += bool(killed)
            thread.join()
    return found, before_end


def sums(model: bytes, parts: Sequence, path: Path, out: Path, begun: Event) -> None:
    """Write the sums of a pass with a checkpoint, in a separate process."""
    one_thread()
    begun.set()
    found = pickle.loads(model).statistics_of(parts, checkpoint=path)
    out.write_bytes(found.to_bytes())


def with_a_checkpoint(
    model: gp_orff.VectorFieldGP, parts: Sequence, times: int, folder: Path
) -> tuple[FieldStatistics, int]:
    """Return the sums of a pass, and how often its process was killed before the end."""
    context, out = multiprocessing.get_context("forkserver"), folder / "sums"
    context.set_forkserver_preload(["gp_orff"])
    packed = pickle.dumps(model)
    start = time.perf_counter()
    sums(packed, parts, folder / "other", out, context.Event())
    needed, killed = time.perf_counter() - start, 0
    out.unlink()
    while not out.exists():
        begun = context.Event()
        arguments = packed, parts, folder / "checkpoint", out, begun
        process = context.Process(target=sums, args=arguments)
        process.start()
        begun.wait()
        process.join(random.uniform(0.1, 1.0) / times * needed if killed < times else None)
        if process.is_alive():
            process.kill()
            process.join()
            killed += 1
    return FieldStatistics.from_bytes(out.read_bytes()), killed


def main(words: Sequence[str] | None = None) -> None:
    sizes = Sizes(__file__, __doc__, points=(2e6, 4e3), size=(2e4, 1e3), times=(10, 1))
    arguments = sizes.parse_args(words)
    one_thread()
    random.seed(0)
    with tempfile.TemporaryDirectory() as name, gp_orff.settings.num_threads(1):
        folder = Path(name)
        parts = chunks(paths := write(folder, int(arguments.points), int(arguments.size)))
        model, rows = model_of(paths[0]), Rows()
        start = time.perf_counter()
        expected = model.statistics_of(parts)
        needed = 0.5 * (time.perf_counter() - start)

        def add(way: str, found: Sequence[FieldStatistics], killed: int) -> None:
            rows.add(
                way=way,
                passes=len(found),
                killed=killed,
                apart=max(apart(own, expected) for own in found),
                values=max(abs(own.num_values - expected.num_values) for own in found),
            )

        add("dask", *on_a_cluster(model, parts, arguments.times, needed))
        total, killed = with_a_checkpoint(model, parts, arguments.times, folder)
        add("checkpoint", [total], killed)
    save(arguments, {"rows": rows, "files": len(paths)})
