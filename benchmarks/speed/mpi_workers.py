"""The passes of `workers` on workers of MPI, and a loop in one process.

    pip install mpi4py mpich
    mpiexec -n 3 python -m mpi4py.futures benchmarks mpi_workers [--points 1e7] [--size 1e6]
        [--rounds 3] [--smoke]

One process calls, and the others compute, with one thread each. The columns are those of `workers`.
`cpu` is unknown, because MPI and not the caller starts the workers.
"""

import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from helpers.chunk_files import chunks, one_thread, write
from helpers.command import Sizes
from helpers.results import save
from helpers.rows import Rows

import gp_orff
from speed.workers import compare, loop, model_of


def main(words: Sequence[str] | None = None) -> None:
    sizes = Sizes(__file__, __doc__, points=(1e7, 4e3), size=(1e6, 1e3), rounds=(3, 1))
    arguments = sizes.parse_args(words)
    try:
        from mpi4py.futures import MPIPoolExecutor
    except ImportError as error:
        print(f"nothing measured: {error}; pip install mpi4py mpich")
        return
    one_thread()
    rows = Rows()
    with (
        tempfile.TemporaryDirectory() as folder,
        gp_orff.settings.num_threads(1),
        MPIPoolExecutor(main=False, path=sys.path) as executor,
    ):
        paths = write(Path(folder), int(arguments.points), int(arguments.size))
        model, parts = model_of(paths[0]), chunks(paths)
        list(executor.map(one_thread, range(16)))  # workers are ready, with torch imported
        ways = {
            "loop": partial(loop, model, paths),
            "mpi": partial(model.statistics_of, parts, executor=executor),
        }
        compare(ways, executor.num_workers, arguments.rounds, rows)
    save(arguments, {"rows": [{k: v for k, v in row.items() if "cpu" not in k} for row in rows]})
