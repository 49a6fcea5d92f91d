"""The command line of a benchmark: sizes, small sizes for a quick run, and a folder for results."""

import argparse
import sys
import time
from pathlib import Path

FOLDER = Path(__file__).parents[1]
RESULTS = FOLDER / "results"
RUN = (sys.executable, str(FOLDER))  # then the name of a benchmark and its options


class Sizes(argparse.ArgumentParser):
    """A parser with an option for every size, `--smoke` for small sizes, and `--output`.

    Args:
        file, doc: `__file__` and `__doc__` of the benchmark.
        sizes: the full size and the size with `--smoke`, by name.
    """

    def __init__(self, file: str, doc: str, **sizes: tuple[float, float]):
        place = Path(file)
        self.name, self.sizes = place.stem, sizes
        self.benchmark = f"papers/{self.name}" if place.parent.name == "papers" else self.name
        super().__init__(
            prog=f"python benchmarks {self.name}",
            description=doc.splitlines()[0],
            epilog="Smoke runs take seconds, and write no results unless --output is given.",
        )
        for name, (full, small) in sizes.items():
            flag = "--" + name.replace("_", "-")
            self.add_argument(flag, type=type(full), help=f"{full}; {small} with --smoke")
        self.add_argument("--smoke", action="store_true", help="small and quick, to see it run")
        self.add_argument("--output", type=Path, help="folder; benchmarks/results")

    def parse_args(self, *args, **kwargs) -> argparse.Namespace:
        found = super().parse_args(*args, **kwargs)
        given = {name for name in self.sizes if getattr(found, name) is not None}
        found.command = " ".join([self.prog, *self._words(found, given)])
        for name, (full, small) in self.sizes.items():
            if name not in given:
                setattr(found, name, small if found.smoke else full)
        if found.output is None and not found.smoke:
            found.output = RESULTS
        found.benchmark, found.began = self.benchmark, time.perf_counter()
        return found

    def _words(self, found: argparse.Namespace, given: set[str]) -> list[str]:
        """Return the options that a user would type, without folders of this machine."""
        folder = ["DIR"] if getattr(found, "folder", None) else []
        sizes = [
            f"--{name.replace('_', '-')} {getattr(found, name):g}"
            for name in self.sizes
            if name in given
        ]
        return [*folder, *sizes, *(["--smoke"] if found.smoke else [])]


def with_folder(parser: Sizes, what: str, **how: object) -> Sizes:
    parser.add_argument("folder", metavar="DIR", type=Path, help=what, **how)
    return parser
