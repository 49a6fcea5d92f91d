"""Write numbers of benchmarks/results into README.md and docs/, and list their ages: `make readme`.

    python benchmarks readme [--pages README.md ...] [--results benchmarks/results]
        [--measure SECONDS [--data DIR]]

A measured region of a page is a comment with a template, followed by the text that the template
produced:

    <!-- measured: calibration
    {{ calibration.fields }} fields, of {{ calibration.points | power }} vectors each.
    -->
    ...
    <!-- end -->

The first line names files of results. `papers/bounds` becomes a variable `bounds`, which contains
the results of that file, and under `record` its commit, command and machine. `ours=scale/ours-*` is
a list of all matching files. The template is a Jinja template with the filters in FORMATS. Each
text is followed by the command, commit and machine of its files.

A region that cannot be written does not change; its name is printed, and the exit status is 1. Then
every file on a page is listed with its age: the number of commits that have changed gp_orff/ since
it was measured. If parts of a file were measured at several commits, the oldest part counts. The
list also has each "commit 1234567" in the text of a page. Files older than OLD are marked.
`--measure SECONDS` first repeats old measurements that took at most so long. `--data` is the folder
of public data.
"""

import argparse
import json
import math
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

from helpers.command import RESULTS
from helpers.results import ROOT, git
from jinja2 import Environment, StrictUndefined, TemplateError

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
REGION = re.compile(r"(<!-- measured: ([^\n]+)\n(.*?)-->\n).*?(<!-- end -->)", flags=re.DOTALL)
OLD = 100  # commits of the package


def number(value: float | None, digits: int = 2) -> str:
    """Format a number with so many significant digits, but with all digits before the point.

    Small numbers are written as 2.3e−6.
    """
    if not value or math.isnan(value):
        return decimal(value, digits - 1)
    if abs(value) < 1e-4:
        first, exponent = f"{value:.{digits - 1}e}".split("e")
        return f"{first}e{int(exponent)}".replace("-", "−")
    return decimal(value, max(0, digits - 1 - math.floor(math.log10(abs(value)))))


def decimal(value: float | None, decimals: int) -> str:
    unknown = value is None or math.isnan(value)
    return "" if unknown else f"{value:.{decimals}f}".replace("-", "−")


def power(count: int) -> str:
    """Format a number with one nonzero digit as 10⁵ or 2·10³, and others in groups of three
    digits."""
    exponent = len(str(count)) - 1
    first, rest = divmod(count, 10**exponent)
    if exponent < 3 or rest:
        return grouped(count)
    ten = "10" + str(exponent).translate(str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return ten if first == 1 else f"{first}·{ten}"


def grouped(count: float | None) -> str:
    """Format a number in groups of three digits, such as 27 384. Numbers below 10 000 are not
    grouped."""
    if count is None:
        return ""
    words = f"{count:,.0f}" if abs(count) >= 10_000 else f"{count:.0f}"
    return words.replace(",", " ").replace("-", "−")


def percent(share: float, decimals: int = 0) -> str:
    return f"{decimal(100 * share, decimals)} %"


def average(value: Mapping[str, float]) -> str:
    """Format a mean and its standard error, such as 0.949 ± 0.002."""
    return f"{decimal(value['mean'], 3)} ± {decimal(value['standard_error'], 3)}"


def where(rows: Iterable[Mapping], **values: object) -> list[Mapping]:
    """Return the rows that have these values."""
    return [row for row in rows if all(row.get(key) == own for key, own in values.items())]


FORMATS = (number, decimal, power, grouped, percent, average, where)
LANGUAGE = Environment(undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
LANGUAGE.filters |= {own.__name__: own for own in FORMATS}


def files_of(words: str, folder: Path) -> dict[str, Path | list[Path]]:
    """Return the files of results that a region names, by the names of their variables.

    Raises:
        FileNotFoundError: there is no file with such a name.
    """
    found = {}
    for word in words.split():
        name, _, pattern = word.rpartition("=")
        paths = sorted(folder.glob(f"{pattern}.json"))
        if not paths:
            raise FileNotFoundError(f"no results {pattern}")
        found[name or Path(pattern).name] = paths if set("*[") & set(pattern) else paths[0]
    return found


def flat(files: Mapping[str, Path | list[Path]]) -> list[Path]:
    return [path for own in files.values() for path in (own if isinstance(own, list) else [own])]


def read(path: Path | list[Path]) -> dict | list[dict]:
    if isinstance(path, list):
        return [read(own) for own in path]
    record = json.loads(path.read_text())
    return {**record.pop("results"), "record": record}


def written(template: str, files: Mapping[str, Path | list[Path]]) -> str:
    text = LANGUAGE.from_string(template).render({name: read(own) for name, own in files.items()})
    return f"{text.strip()}\n\n{sources([read(path)['record'] for path in flat(files)])}"


def sources(records: Iterable[Mapping]) -> str:
    """Return a line for each benchmark, commit and machine. It has the complete command if there
    is only one."""
    commands = {}
    for record in records:
        name, note = " ".join(record["command"].split()[:3]), record.get("note")
        commit = record["commit"] + (f" ({note})" if note else "")
        key = name, f"commit {commit}, {place(record)}"
        commands.setdefault(key, []).append(record["command"])
    return "<br>\n".join(
        f"*`{own[0] if len(own) == 1 else name}`, {where_from}*"
        for (name, where_from), own in commands.items()
    )


def place(record: Mapping) -> str:
    """Return the machine of a record, and its version of torch, as text."""
    machine, torch = record["machine"], record["versions"].get("torch")
    cores = f"{machine['cores']} cores"
    words = [f"{cores} of {machine['cpu']}" if "cpu" in machine else cores, machine.get("gpu")]
    return ", ".join(filter(None, [*words, torch and f"torch {torch}"]))


class Age(NamedTuple):
    """The number of commits that have changed the package since a result was measured."""

    commits: int  # −1 if git does not know
    since: str
    path: Path | None  # of the results; None if the number is written by hand
    pages: list[str]


def ages(pages: Iterable[Path], folder: Path) -> list[Age]:
    """Return the ages of all results on the pages, and of all commits in their text, the oldest
    first."""
    found = {}
    for page in pages:
        text, here = page.read_text(), set()
        for match in REGION.finditer(text):
            with suppress(FileNotFoundError):  # which `fill` names
                paths = flat(files_of(match[2], folder))
                here |= {(path, *commits(json.loads(path.read_text()))) for path in paths}
        by_hand = re.findall(r"\bcommit\s+([0-9a-f]{7,})", REGION.sub("", text))
        here |= {(None, own) for own in by_hand}
        for own in here:
            found.setdefault(own, []).append(page.name)
    rows = []
    for (path, *named), names in found.items():
        age, since = max((age_of(own), own) for own in named)  # the oldest of its parts
        rows.append(Age(age, since, path, names))
    return sorted(rows, key=lambda own: (-own.commits, str(own.path), own.since))


def commits(value: object) -> Iterator[str]:
    """Yield all commits that a file of results names."""
    if isinstance(value, Mapping):
        for key, own in value.items():
            if key in ("commit", "commits"):
                yield from [own] if isinstance(own, str) else own
            else:
                yield from commits(own)
    elif isinstance(value, list):
        for own in value:
            yield from commits(own)


@cache
def age_of(commit: str) -> int:
    try:
        return int(git("rev-list", "--count", f"{commit}..HEAD", "--", "gp_orff"))
    except (OSError, subprocess.CalledProcessError):  # not a clone, or one that is not deep enough
        return -1


def took(path: Path | None) -> float | None:
    """Return the seconds of a measurement. None if unknown, for example if parts were measured
    at different commits."""
    record = {} if path is None else json.loads(path.read_text())
    return None if len(set(commits(record))) > 1 else record.get("seconds")


def listed(rows: Sequence[Age], folder: Path) -> Iterator[str]:
    yield f"{'commits ago':>11}       {'took, s':>7}  {'commit':<8}  results (pages)"
    for own in rows:
        what = "by hand" if own.path is None else own.path.relative_to(folder).with_suffix("")
        ago = ("unknown" if own.commits < 0 else own.commits, "old" if own.commits > OLD else "")
        cells = f"{ago[0]:>11}  {ago[1]:<3}  {grouped(took(own.path)):>7}  {own.since:<8}"
        yield f"{cells}  {what} ({', '.join(own.pages)})"
    old, unknown = sum(own.commits > OLD for own in rows), sum(own.commits < 0 for own in rows)
    words = f"{old} of {len(rows)} are older than {OLD} commits of gp_orff/"
    yield f"{words}; git does not know the age of {unknown}" if unknown else words


def measure(path: Path, arguments: argparse.Namespace) -> str:
    """Run the command of some results again.

    Returns: The reason why they were not measured, or "" if they were.
    """
    seconds, (_, *words) = took(path), json.loads(path.read_text())["command"].split()
    if seconds is None or seconds > arguments.measure:
        return f"takes {grouped(seconds) or 'unknown'} s"
    if "DIR" in words and arguments.data is None:
        return "needs --data"
    words = [str(arguments.data.absolute()) if word == "DIR" else word for word in words]
    command = [sys.executable, *words, "--output", str(arguments.results.absolute())]
    done = subprocess.run(command, cwd=ROOT)
    return f"its command failed: {' '.join(command)}" if done.returncode else ""


def fill(page: Path, folder: Path) -> Iterator[str]:
    """Write the regions of a page.

    Yields: The names of missing files or variables.
    """
    missing = []

    def write(match: re.Match) -> str:
        begin, words, template, end = match.groups()
        try:
            return f"{begin}\n{written(template, files_of(words, folder))}\n\n{end}"
        except (FileNotFoundError, TemplateError) as error:
            missing.append(f"unchanged, {page.name}, {words}: {error}")
            return match.group()

    page.write_text(REGION.sub(write, page.read_text()))
    yield from missing


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python benchmarks readme", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--pages", type=Path, nargs="+", default=PAGES)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--measure", type=float, metavar="SECONDS", help="what took at most these")
    parser.add_argument("--data", type=Path, metavar="DIR", help="of public data")
    arguments = parser.parse_args(words)
    missing = []
    if arguments.measure is not None:
        for own in ages(arguments.pages, arguments.results):
            if own.path and own.commits > OLD and (why := measure(own.path, arguments)):
                print(f"not measured again, {own.path.stem}: {why}", file=sys.stderr)
    for page in arguments.pages:
        missing.extend(fill(page, arguments.results))
    print(*listed(ages(arguments.pages, arguments.results), arguments.results), sep="\n")
    print(*missing, sep="\n", end="\n" if missing else "", file=sys.stderr)
    return int(bool(missing))
