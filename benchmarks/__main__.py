"""Run a benchmark, or list all benchmarks.

    python benchmarks                           # the names
    python benchmarks NAME [--help | options]
    python benchmarks --all [--smoke] [DATA]    # each benchmark in a separate process

DATA is a folder of public data. Benchmarks that need it have DIR after their name in their
docstring; benchmarks that can also run without it have [DIR]. Without DATA, `--all` omits the
benchmarks that need it.
"""

import argparse
import ast
import difflib
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType

FOLDER = Path(__file__).parent
KINDS = ("fits", "speed", "quality", "papers")
BENCHMARKS = {
    path.stem: path for kind in KINDS for path in sorted(FOLDER.glob(f"{kind}/[a-z]*.py"))
}
TOOLS = {path.stem: path for path in sorted(FOLDER.glob("[a-z]*.py"))}
ALL = BENCHMARKS | TOOLS


def docstring_of(path: Path) -> str:
    return ast.get_docstring(ast.parse(path.read_text()))


def listed() -> Iterator[str]:
    """Yield the names of all benchmarks by folder, with the first lines of their docstrings."""
    for kind in KINDS:
        yield f"{kind}/  {docstring_of(FOLDER / kind / '__init__.py')}"
        yield from (line(own) for own in BENCHMARKS.values() if own.parent.name == kind)
    yield "tools"
    yield from map(line, TOOLS.values())


def line(path: Path) -> str:
    return f"  {path.stem:<20}{docstring_of(path).splitlines()[0]}"


def benchmark(name: str) -> ModuleType:
    """Return the module of a benchmark with this name, from any folder."""
    if name not in ALL:
        near = " or ".join(difflib.get_close_matches(name, ALL))
        hint = f"do you mean {near}?" if near else "`python benchmarks` lists the names."
        sys.exit(f"There is no benchmark {name}; {hint}")
    return import_module(".".join(ALL[name].relative_to(FOLDER).with_suffix("").parts))


def public_data(name: str) -> str:
    """Return "DIR" if the benchmark needs the folder of public data, "[DIR]" if the folder is
    optional, and otherwise ""."""
    found = re.search(rf"benchmarks {name} (DIR|\[DIR\])", docstring_of(ALL[name]))
    return found[1] if found else ""


def commands(words: Sequence[str]) -> Iterator[list[str]]:
    """Yield the name and options of each benchmark that `--all` runs."""
    parser = argparse.ArgumentParser(prog="python benchmarks --all")
    parser.add_argument("data", metavar="DATA", nargs="?", help="the folder of public data")
    parser.add_argument("--smoke", action="store_true", help="small and quick, to see them run")
    arguments = parser.parse_args(words)
    for name in BENCHMARKS:
        data = [arguments.data] if arguments.data and public_data(name) else []
        if data or public_data(name) != "DIR":
            yield [name, *data, *["--smoke"] * arguments.smoke]


def main(words: Sequence[str]) -> int | None:
    if not words or words[0] in ("-h", "--help"):
        print(__doc__, *listed(), sep="\n")
    elif words[0] == "--all":
        for command in commands(words[1:]):
            print("python benchmarks", *command, flush=True)
            subprocess.run([sys.executable, FOLDER, *command], check=True)
    else:
        return benchmark(words[0]).main(words[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
