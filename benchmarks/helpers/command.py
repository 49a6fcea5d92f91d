"""The command line of a benchmark: sizes, each with a small one for a quick look, and an output."""

import argparse
import time
from pathlib import Path

RESULTS = Path(__file__).parents[1] / "results"


class Sizes(argparse.ArgumentParser):
    """An option for every size, `--smoke` for the small ones, and `--output`.

    Args:
        file, doc: `__file__` and `__doc__` of the benchmark.
        sizes: by name, (in full, with `--smoke`).
    """

    def __init__(self, file: str, doc: str, **sizes: tuple[float, float]):
        super().__init__(
            description=doc.splitlines()[0],
            epilog="Smoke runs take seconds, and write no results unless --output is given.",
        )
        place = Path(file).absolute().relative_to(RESULTS.parent.absolute())
        self.benchmark, self.sizes = place.with_suffix("").as_posix(), sizes
        for name, (full, small) in sizes.items():
            flag = "--" + name.replace("_", "-")
            self.add_argument(flag, type=type(full), help=f"{full}; {small} with --smoke")
        self.add_argument("--smoke", action="store_true", help="small and quick, to see it run")
        self.add_argument("--output", type=Path, help=f"folder; {RESULTS.name}/ of benchmarks")

    def parse_args(self, *args, **kwargs) -> argparse.Namespace:
        found = super().parse_args(*args, **kwargs)
        given = {name for name in self.sizes if getattr(found, name) is not None}
        found.command = " ".join(
            [f"python benchmarks/{self.benchmark}.py", *self._words(found, given)]
        )
        for name, (full, small) in self.sizes.items():
            if name not in given:
                setattr(found, name, small if found.smoke else full)
        if found.output is None and not found.smoke:
            found.output = RESULTS
        found.benchmark, found.began = self.benchmark, time.perf_counter()
        return found

    def _words(self, found: argparse.Namespace, given: set[str]) -> list[str]:
        """What a user would type, without folders of this machine."""
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
