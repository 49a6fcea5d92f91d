"""Statistics of many readings in files, by one process, by a pool and by a Dask cluster.

    python benchmarks/workers.py [--points 1e7] [--size 1e6] [--smoke]

A Helmholtz kernel over 9 × 9 lengthscales, in files of 10⁶ readings that are written at first. One
call of `statistics_of` looks at every file twice: once for box, counts and a sample, and once for
the sums. Every process has one thread. Columns:

seconds      of the call, workers running already
overhead     over the loop, if it took the same time on each worker
caller       MiB by which the calling process grows at most
apart        largest difference of the sums from those of the loop, over their largest number

loop         the sum of `statistics_of` each file, in a `for` loop
here         chunks that load themselves, without an executor
pool, dask   the same on workers
by hand      a tree of delayed sums with dask, one task a file
"""

import multiprocessing
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial, reduce
from operator import add
from pathlib import Path

import dask
import distributed
from helpers.chunk_files import chunks, load, one_thread, write
from helpers.command import Sizes
from helpers.measure import PeakMemory, seconds
from helpers.results import save
from helpers.rows import Rows

import gp_orff
from gp_orff.data.field_statistics import FieldStatistics

Sums = Callable[[], FieldStatistics]


def model_of(first: Path) -> gp_orff.VectorFieldGP:
    """A model whose grid is that of all files."""
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
    with distributed.LocalCluster(**options) as machines, distributed.Client(machines) as client:
        client.run(one_thread)
        yield client


def loop(model: gp_orff.VectorFieldGP, paths: Sequence[Path]) -> FieldStatistics:
    return reduce(add, (model.statistics_of(*load(path)) for path in paths))


def of_file(model: gp_orff.VectorFieldGP, path: Path) -> FieldStatistics:
    return model.statistics_of(*load(path))


def by_hand(model: gp_orff.VectorFieldGP, paths: Sequence[Path]) -> FieldStatistics:
    held = dask.delayed(model)
    sums = [dask.delayed(of_file)(held, path) for path in paths]
    while len(sums) > 1:
        sums = [dask.delayed(sum)(sums[i : i + 4]) for i in range(0, len(sums), 4)]
    return sums[0].compute()


def apart(found: FieldStatistics, expected: FieldStatistics) -> float:
    pairs = zip(found.tensors.values(), expected.tensors.values(), strict=True)
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)


def main(words: Sequence[str] | None = None) -> None:
    arguments = Sizes(__file__, __doc__, points=(1e7, 4e3), size=(1e6, 1e3)).parse_args(words)
    one_thread()
    with tempfile.TemporaryDirectory() as folder, gp_orff.settings.num_threads(1):
        paths = write(Path(folder), int(arguments.points), int(arguments.size))
        model, rows = model_of(paths[0]), Rows()
        expected, alone = None, 0.0

        def measure(way: str, workers: int, sums: Sums) -> None:
            nonlocal expected, alone
            found: list[FieldStatistics] = []
            with PeakMemory() as memory:
                needed = seconds(lambda: found.append(sums()))
            expected, alone = (expected, alone) if expected else (found[0], needed)
            rows.add(
                way=way,
                workers=workers,
                seconds=needed,
                overhead=needed * workers / alone - 1,
                caller=memory.mib,
                apart=apart(found[0], expected),
            )

        measure("loop", 1, partial(loop, model, paths))
        parts = chunks(paths)
        measure("here", 1, partial(model.statistics_of, parts))
        for workers in (1, 2):
            with pool(workers) as executor:
                measure("pool", workers, partial(model.statistics_of, parts, executor=executor))
        for workers in (1, 2):
            with cluster(workers) as client:
                executor = client.get_executor()
                measure("dask", workers, partial(model.statistics_of, parts, executor=executor))
                measure("by hand", workers, partial(by_hand, model, paths))
        size = len(expected.to_bytes()) / 2**20
        print(f"sums of a task: {size:.2f} MiB; {len(paths)} files")
    save(arguments, {"rows": rows, "MiB of sums": size, "files": len(paths)})


if __name__ == "__main__":
    main()
