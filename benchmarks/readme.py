"""Puts the numbers of benchmarks/results into README.md and docs/: `make readme`.

    python benchmarks/readme.py [--pages README.md ...] [--results benchmarks/results]

Pages have regions, `<!-- measured: NAME -->` to `<!-- end -->`; a function of that name in regions/
writes each. One whose results are missing stays as it is and is named, and the exit status is 1.
"""

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from regions import REGIONS
from regions.markdown import Results

HERE = Path(__file__).parent
PAGES = [HERE.parent / "README.md", *sorted((HERE.parent / "docs").glob("*.md"))]
REGION = re.compile(r"(<!-- measured: ([\w-]+) -->\n).*?(<!-- end -->)", flags=re.DOTALL)


def filled(text: str, results: Results) -> tuple[str, list[str]]:
    """The text with its regions written anew, and what is missing."""
    missing = []

    def write(match: re.Match) -> str:
        begin, name, end = match.groups()
        try:
            return f"{begin}\n{REGIONS[name](results)}\n\n{end}"
        except (FileNotFoundError, KeyError) as error:
            missing.append(f"{name}: no {error.args[-1] if isinstance(error, KeyError) else error}")
            return match.group()

    return REGION.sub(write, text), missing


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pages", type=Path, nargs="+", default=PAGES)
    parser.add_argument("--results", type=Path, default=HERE / "results")
    arguments = parser.parse_args(words)
    missing = []
    for page in arguments.pages:
        text, unknown = filled(page.read_text(), Results(arguments.results))
        page.write_text(text)
        missing.extend(unknown)
    for what in missing:
        print(f"unchanged, {what}", file=sys.stderr)
    return int(bool(missing))


if __name__ == "__main__":
    sys.exit(main())
