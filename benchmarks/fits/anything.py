"""Sixty generated data sets of all kinds × every kernel whose constraint they meet.

    python benchmarks anything [--every 1] [--sets 1,4-9] [--kernels WORD] [--most 100000]
        [--seconds 180] [--again] [--smoke]

The sets have ships' tracks, clusters, repeated stations, survey lines, flat axes, straight lines
and grids. They have one to three dimensions and time, 5 to 100 000 vectors, and units over ten
decades. The fields are sums of plane waves. Most of their spectra differ from those of the kernels.

Each kernel is fitted by `VectorFieldGP(kernel).fit(x, y)`. A fit fails for one of three reasons. It
raises an error. It uses more than 60 s of processor time. Or, without a warning, its 95 % intervals
contain less than 85 % of the held-out observations. These are in blocks of about the spacing of the
data.

The result of each fit is added to `anything.jsonl` in the folder of results. A fit with a result is
repeated only with `--again`.

`--every K` runs one of K fits: for set s the kernels s mod K, s mod K + K, and so on. Each kernel
is therefore fitted to sets of all kinds. `--sets` has the numbers of sets, from 0. `--kernels` is a
regular expression for names of kernels. `--most` is the number of points of the largest set.
`--seconds` is the processor time after which a fit is stopped.
"""

import argparse
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from helpers.anything.fits import measured
from helpers.anything.kernels import kernels_of
from helpers.anything.sets import KINDS, made
from helpers.anything.table import failures, summary
from helpers.command import Sizes
from helpers.results import COMMIT, rounded, save
from helpers.rows import Rows

Key = tuple[int, str]


def numbers_of(words: str) -> list[int]:
    """Return the numbers of a text such as "1,4-6", which gives 1, 4, 5, 6."""
    found = []
    for word in filter(None, words.split(",")):
        first, _, last = word.partition("-")
        found.extend(range(int(first), int(last or first) + 1))
    return found


def chosen(arguments: argparse.Namespace) -> Iterator[Key]:
    for number in arguments.sets or range(len(KINDS)):
        if KINDS[number].n <= arguments.most:
            names = list(kernels_of(KINDS[number]))[number % arguments.every :: arguments.every]
            yield from ((number, name) for name in names if arguments.kernels.search(name))


def recorded(path: Path | None) -> dict[Key, dict]:
    """Return the last record of each fit."""
    lines = path.read_text().splitlines() if path is not None and path.exists() else []
    records = map(json.loads, lines)
    return {(own["set"], own["kernel"]): own for own in records}


def fitted(key: Key, seconds: float) -> dict[str, object]:
    number, name = key
    kind = KINDS[number]
    found = measured(kernels_of(kind)[name](), made(number), seconds)
    return {"set": number, "kernel": name, "data": str(kind), "commit": COMMIT, **found}


def told(record: dict) -> str:
    inside, words = record.get("inside"), record["error"] or "; ".join(record["warnings"])
    share = "     " if inside is None else f"{inside:5.3f}"
    seconds = f"{record['seconds']:>7.1f} s {record['CPU s']:>7.1f} CPU s"
    return (
        f"{record['set']:>3} {record['kernel']:<28} {seconds}  {share}  "
        f"{record.get('method', ''):<6} {record.get('F') or '':>6}  {words[:80]}"
    )


def main(words: Sequence[str] | None = None) -> None:
    parser = Sizes(__file__, __doc__, most=(100_000, 8), every=(1, 1), seconds=(180.0, 20.0))
    parser.add_argument("--sets", help="such as 1,4-9; all")
    parser.add_argument("--kernels", type=re.compile, default="", help="a regular expression")
    parser.add_argument("--again", action="store_true", help="also those that are recorded")
    arguments = parser.parse_args(words)
    arguments.command += f" --sets {arguments.sets}" if arguments.sets else ""
    arguments.sets = numbers_of(arguments.sets or ("2" if arguments.smoke else ""))
    keys, path, records = list(chosen(arguments)), None, {}
    if arguments.output is not None:
        arguments.output.mkdir(parents=True, exist_ok=True)
        path = arguments.output / "anything.jsonl"
        records = recorded(path)
    if arguments.again:
        records = {}
    arguments.began -= sum(records[key]["seconds"] for key in keys if key in records)
    fits = []
    for key in keys:
        if key not in records:
            records[key] = rounded(fitted(key, arguments.seconds))
            print(told(records[key]), flush=True)
            if path is not None:
                with path.open("a") as file:
                    file.write(json.dumps(records[key], ensure_ascii=False) + "\n")
        fits.append(records[key])
    save(arguments, tabulated(fits))


def tabulated(fits: Sequence[dict]) -> dict[str, object]:
    by_set, by_kernel = Rows(), Rows()
    for number in sorted({own["set"] for own in fits}):
        own = [record for record in fits if record["set"] == number]
        by_set.add(set=number, **summary(own), data=str(KINDS[number]))
    for name in sorted({own["kernel"] for own in fits}):
        own = [record for record in fits if record["kernel"] == name]
        by_kernel.add(**summary(own), kernel=name)
    found = {"all": summary(fits), "commits": sorted({own["commit"] for own in fits})}
    failed = failures(fits)
    print(rounded(found))
    for own in failed:
        print(f"{own['set']:>3} {own['kernel']:<28} {own['why'][:120]}  [{own['data']}]")
    return {**found, "sets": by_set, "kernels": by_kernel, "failures": failed}
