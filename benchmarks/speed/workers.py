"""Statistics of many observations in files, by one process, by a pool and by a Dask cluster.

    python benchmarks workers [--points 1e7] [--size 1e6] [--rounds 3] [--smoke]

The kernel is a Helmholtz kernel over 9 × 9 lengthscales. The observations are in files of 10⁶
points, which are written first. One call of `statistics_of` reads every file twice: once for box,
counts and a sample, and once for the sums. Every process has one thread and has already run once.
The methods take turns, first with one worker, then with two. The table has medians of the rounds.
`cpu` includes idle processes of the other methods. The columns are

seconds      of the call
cpu          seconds of all processes together
overhead     (seconds × workers) / seconds of the loop − 1, in the same rounds
cpu_more     the same for `cpu`, which is more informative if the machine also does other work
caller       the largest growth of the calling process in MiB
apart        largest difference of the sums from those of the loop, over their largest number

and the methods are

loop         the sum of `statistics_of` each file, in a `for` loop
here         chunks that load themselves, without an executor
pool, dask   the same on workers
by hand      a tree of delayed sums with dask, one task per file
"""

import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial, reduce
from operator import add
from pathlib import Path

import dask
import distributed
import psutil
from helpers.chunk_files import chunks, load, one_thread, write
from helpers.command import Sizes
from helpers.measure import PeakMemory
from helpers.results import save
from helpers.rows import Rows

import gp_orff
from gp_orff.data.statistics import FieldStatistics

Sums = Callable[[], FieldStatistics]


def model_of(first: Path) -> gp_orff.VectorFieldGP:
    """Return a model with the grid that is used for all files."""
    x, y = (values[:2000] for values in load(first))
    box = gp_orff.Grid(domain=((0.0, 9.0), (0.0, 9.0)), max_features=4000)
    return gp_orff.VectorFieldGP(gp_orff.HelmholtzKernel(num_dims=2), frequencies=box).condition(
        x, y
    )


@contextmanager
def pool(workers: int) -> Iterator[ProcessPoolExecutor]:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context) as executor:
        list(executor.map(one_thread, range(4 * workers)))  # started, with torch imported
        yield executor


@contextmanager
def cluster(workers: int) -> Iterator[distributed.Client]:
    options = {"n_workers": workers, "threads_per_worker": 1, "dashboard_address": ":0"}
    with (
        distributed.LocalCluster(**options) as machines,
        distributed.Client(machines, set_as_default=False) as client,
    ):
        client.run(one_thread)
        yield client


def loop(model: gp_orff.VectorFieldGP, paths: Sequence[Path]) -> FieldStatistics:
    return reduce(add, (model.statistics_of(*load(path)) for path in paths))


def of_file(model: gp_orff.VectorFieldGP, path: Path) -> FieldStatistics:
    with gp_orff.settings.num_threads(1):
        return model.statistics_of(*load(path))


def by_hand(
    client: distributed.Client, model: gp_orff.VectorFieldGP, paths: Sequence[Path]
) -> FieldStatistics:
    held = client.scatter(model, broadcast=True)
    sums = [dask.delayed(of_file)(held, path) for path in paths]
    while len(sums) > 1:
        sums = [dask.delayed(sum)(sums[i : i + 4]) for i in range(0, len(sums), 4)]
    return client.compute(sums[0]).result()


def apart(found: FieldStatistics, expected: FieldStatistics) -> float:
    pairs = zip(found.tensors.values(), expected.tensors.values(), strict=True)
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and of its running children."""
    processes = psutil.Process().children(recursive=True)
    times = [own.cpu_times() for own in processes]
    return time.process_time() + sum(own.user + own.system for own in times)


def measured(sums: Sums) -> tuple[dict[str, float], FieldStatistics]:
    began = cpu_seconds()
    with PeakMemory() as memory:
        start = time.perf_counter()
        found = sums()
        seconds = time.perf_counter() - start
    return {"seconds": seconds, "cpu": cpu_seconds() - began, "caller": memory.mib}, found


def compare(ways: dict[str, Sums], workers: int, rounds: int, rows: Rows) -> FieldStatistics:
    """Return a row for each way, and the sums of the loop, which is the first way."""
    taken: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    differences = dict.fromkeys(ways, 0.0)
    for _ in range(rounds):
        expected = None
        for way, sums in ways.items():
            numbers, found = measured(sums)
            expected = expected or found
            differences[way] = max(differences[way], apart(found, expected))
            taken[way].append(numbers)

    def median(way: str, name: str) -> float:
        return statistics.median(own[name] for own in taken[way])

    def more(way: str, name: str, times: int) -> float:
        pairs = zip(taken[way], taken["loop"], strict=True)
        return statistics.median(times * own[name] / alone[name] - 1 for own, alone in pairs)

    for way in ways:
        count = 1 if way in ("loop", "here") else workers
        rows.add(
            way=way,
            workers=count,
            seconds=median(way, "seconds"),
            cpu=median(way, "cpu"),
            overhead=more(way, "seconds", count),
            cpu_more=more(way, "cpu", 1),
            caller=max(own["caller"] for own in taken[way]),
            apart=differences[way],
        )
    return expected


def main(words: Sequence[str] | None = None) -> None:
    sizes = Sizes(__file__, __doc__, points=(1e7, 4e3), size=(1e6, 1e3), rounds=(3, 1))
    arguments = sizes.parse_args(words)
    one_thread()
    with tempfile.TemporaryDirectory() as folder, gp_orff.settings.num_threads(1):
        paths = write(Path(folder), int(arguments.points), int(arguments.size))
        model, rows, parts = model_of(paths[0]), Rows(), chunks(paths)
        for workers in (1, 2):
            with ExitStack() as stack:
                executor = stack.enter_context(pool(workers))
                dask_executor = stack.enter_context(cluster(workers)).get_executor()
                other = stack.enter_context(cluster(workers))
                ways = {
                    "loop": partial(loop, model, paths),
                    "here": partial(model.statistics_of, parts),
                    "pool": partial(model.statistics_of, parts, executor=executor),
                    "dask": partial(model.statistics_of, parts, executor=dask_executor),
                    "by hand": partial(by_hand, other, model, paths),
                }
                if workers > 1:
                    del ways["here"]
                for sums in ways.values():  # code that is loaded at first
                    sums.func(*sums.args[:-1], sums.args[-1][:1], **sums.keywords)
                expected = compare(ways, workers, arguments.rounds, rows)
        size = len(expected.to_bytes()) / 2**20
        print(f"sums of a task: {size:.2f} MiB; {len(paths)} files")
    save(arguments, {"rows": rows, "MiB of sums": size, "files": len(paths)})
