"""A record of the main task: the best value of each number so far, and its current value.

    python benchmarks record [DIR] [--rows WORD] [--search 60] [--smoke]

The fits are every fourth kernel of the generated sets of `anything` with up to 4096 values, five of
the larger sets, and twelve kinds of data that are not in `anything`: tracks, Student-t noise, known
noise, directions, groups, harmonic kernels, learned spectra, a stream. The rows are

fit          the evidence of the default fit in nats. It is the objective of the set, which does not
             depend on the plan of the fit (dense algebra; on a fine lattice beyond 4096 values).
             The regret is the best known evidence minus this evidence. For larger sets, also the
             nats that the search gains if it continues on the features of the fit. Scores of the
             field, its derivatives and its potential: RMSE over the standard deviation of the
             truth, fraction inside 95 % intervals, NLPD; CPU seconds.
all fits     quantiles of regrets, and means of these scores.
time         times of whole fits, a step of `ExactGP`, updates and a map. Each is divided by the
             time of a Cholesky factor and inverse of size 2000 and a transform of 10⁶ points, which
             are measured at the same time; CPU seconds and MiB. Each is a process that runs alone.
public       the same scores on the data of DIR, if DIR is present.

For each row, `results/record.json` has the best value, the commit that reached it, and the current
value. For an evidence it also has the best known value, from all runs and from searches.
`--search S` starts these searches at the end of each fit and at random places near it, for at most
S processor seconds each. `--rows` measures the rows whose names contain a match of WORD; the others
do not change. The exit status is 1 if a row is worse than its best value by more than its
tolerance.
"""

import json
import math
import multiprocessing
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import numpy as np
from helpers.command import RESULTS, RUN, Sizes, with_folder
from helpers.results import COMMIT, machine, versions

WORKERS = 2
STARTS = 4  # random ones of a search
DIGITS = 10
SMOKE = r"fit / (10 curl-free RBF|directions)|time / fit 20 "
Row = dict[str, object]


class Quantity(NamedTuple):
    """A quantity of the record: which values are better, and the tolerance for worse values."""

    higher: bool
    slack: Callable[[float, float], float]  # of the best value and the number of readings


def of_nats(best: float, values: float) -> float:
    return max(1.0, 1e-4 * values)


def of_share(share: float) -> Callable[[float, float], float]:
    return lambda best, values: share * abs(best)


def of_score(best: float, values: float) -> float:
    return 0.02


LEVEL = 0.95  # more inside is no better
QUANTITIES = {
    "evidence": Quantity(True, of_nats),
    "NLML": Quantity(False, of_nats),
    "gain": Quantity(False, of_nats),
    "RMSE": Quantity(False, of_share(0.02)),
    "inside": Quantity(True, of_score),
    "NLPD": Quantity(False, of_score),
    "regret": Quantity(False, of_share(0.1)),
    "time": Quantity(False, of_share(0.2)),
    "CPU s": Quantity(False, of_share(0.2)),
    "MiB": Quantity(False, lambda best, values: max(20.0, 0.2 * best)),
}
TOLD = ("seconds", "reference s")  # of no best


def quantity_of(name: str) -> Quantity:
    """Return the quantity of a row, from the last word or words of its name."""
    return next(own for word, own in QUANTITIES.items() if name.endswith(word))


def judged(name: str) -> bool:
    """Return whether the run fails if this row is worse.

    Scores of single fits are not judged, because they are noisy and do not always improve with the
    evidence. Times of single fits are not judged, because other processes affect them.
    """
    section, *_, word = name.split(" / ")
    return section != "fit" or word in ("evidence", "gain")


def merged(before: Row | None, name: str, value: float, **more: object) -> Row:
    """Return the row with a new present value. The best value and its commit stay if the new
    value is not better.

    If the objective has changed, the row starts again.
    """
    quantity, row = quantity_of(name), dict(before or {})
    if row.get("objective") != more.get("objective"):
        row = {}
    known = [own for own in (row.get("known"), more.pop("known", None)) if own is not None]
    row |= {"present": value, "measured": COMMIT, **more}
    shown = min(value, LEVEL) if name.endswith("inside") else value
    best = row.get("best")
    if best is None or (shown > best if quantity.higher else shown < best):
        row |= {"best": shown, "commit": COMMIT}
    if known:
        row["known"] = max(*known, row["best"])
    return row


def is_worse(name: str, row: Row) -> bool:
    quantity, best, present = quantity_of(name), row["best"], row["present"]
    lost = best - present if quantity.higher else present - best
    return not lost <= quantity.slack(best, row.get("values", 0.0)) + 1e-9


# ---- measurements --------------------------------------------------------------------------------


def single_thread() -> None:
    import torch

    torch.set_num_threads(1)


def fit(name: str, seconds: float) -> list[tuple[str, float, dict[str, object]]]:
    """Return the rows of one fit."""
    from helpers.record import cases, evidence

    case = cases.names()[name]()
    began = time.process_time()
    model = case.fitted()
    spent = time.process_time() - began
    (value, words), known = evidence.reached(case, model), {}
    large = case.values > cases.MOST_DENSE
    if seconds and not large:
        known["known"] = evidence.best_known(case, model, STARTS, seconds)
    known.setdefault("known", value)
    rows = [
        ("evidence", value, {"values": case.values, "objective": words, **known}),
        ("CPU s", spent, {}),
    ]
    for what, scores in case.error_bars(model).items():
        rows += [(f"{what} {word}", number, {}) for word, number in scores.items()]
    if large:
        rows.append(("gain", evidence.gain(case, model), {"values": case.values}))
    return [(f"fit / {name} / {word}", number, more) for word, number, more in rows]


def public(name: str, folder: Path) -> list[tuple[str, float, dict[str, object]]]:
    from helpers.record.public import measured

    found = measured(name, folder)
    return [(f"public / {name} / {word}", number, {}) for word, number in found.items()]


def timed(name: str, smoke: bool) -> list[tuple[str, float, dict[str, object]]]:
    """Return the rows of a timed task, which runs in a separate process with all cores."""
    words = [*RUN, "record", "--time", name, *["--smoke"] * smoke]
    found = json.loads(subprocess.run(words, check=True, capture_output=True, text=True).stdout)
    told = {word: found.pop(word) for word in TOLD}
    return [
        (f"time / {name} / {word}", number, told if word == "time" else {})
        for word, number in found.items()
    ]


def pooled(rows: dict[str, Row]) -> Iterator[tuple[str, float]]:
    """Yield quantiles of regrets over all fits, in nats and in nats per value, and means of
    scores."""
    fits = [row for name, row in rows.items() if name.endswith("/ evidence") and "known" in row]
    regrets = np.array([row["known"] - row["present"] for row in fits])
    for share in (0.5, 0.9, 0.99) if len(fits) else ():
        yield f"{share:.0%} regret", float(np.quantile(regrets, share))
        each = regrets / [row["values"] for row in fits]
        yield f"{share:.0%}, nats a value, regret", float(np.quantile(each, share))
    scores: dict[str, list[float]] = {}
    for name, row in rows.items():
        section, *_, word = name.split(" / ")
        if section == "fit" and word.endswith(("RMSE", "inside", "NLPD")):
            scores.setdefault(word, []).append(row["present"])
    for word, values in scores.items():
        mean = np.median(values) if word.endswith(("RMSE", "NLPD")) else np.mean(values)
        yield word, float(mean)


def measured(arguments) -> Iterator[list[tuple[str, float, dict[str, object]]]]:
    """Yield the rows that the command line requests. Fits run in parallel, then timed tasks run
    alone."""
    from helpers.record import cases
    from helpers.record.times import TIMED

    wanted = re.compile(arguments.rows or (SMOKE if arguments.smoke else ""))
    os.environ["OMP_NUM_THREADS"] = "1"  # of the workers
    context = multiprocessing.get_context("spawn")
    with context.Pool(WORKERS, initializer=single_thread, maxtasksperchild=20) as pool:
        names = [name for name in cases.names() if wanted.search(f"fit / {name}")]
        tasks = [pool.apply_async(fit, (name, arguments.search)) for name in reversed(names)]
        if arguments.folder is not None:
            from helpers.record.public import PUBLIC

            chosen = [name for name in PUBLIC if wanted.search(f"public / {name}")]
            folder = arguments.folder.absolute()
            tasks += [pool.apply_async(public, (name, folder)) for name in chosen]
        for task in tasks:
            yield task.get()
    del os.environ["OMP_NUM_THREADS"]
    for name in TIMED:
        if wanted.search(f"time / {name}"):
            yield timed(name, arguments.smoke)


# ---- the file and the table ----------------------------------------------------------------------


def read(path: Path) -> dict[str, Row]:
    return json.loads(path.read_text())["results"]["rows"] if path.exists() else {}


def write(path: Path, rows: dict[str, Row], arguments) -> None:
    """Write the record with one row on each line."""
    head = {
        "command": arguments.command,
        "commit": COMMIT,
        "date": datetime.now(UTC).date().isoformat(),
        "machine": machine(),
        "objective": "log p(y) under the exact kernel, helpers/record/evidence.py",
        "seconds": round(time.perf_counter() - arguments.began, 1),
        "versions": versions(),
    }
    lines = [
        f"  {json.dumps(name)}: {json.dumps(value, ensure_ascii=False)},"
        for name, value in head.items()
    ]
    told = [
        f"   {json.dumps(name, ensure_ascii=False)}: {json.dumps(row, ensure_ascii=False)}"
        for name, row in sorted(rows.items())
    ]
    body = ",\n".join(told)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("{\n" + "\n".join(lines) + '\n  "results": {"rows": {\n' + body + "\n  }}\n}\n")


def table(rows: dict[str, Row], names: Sequence[str]) -> Iterator[str]:
    """Yield the lines of a table of the judged rows, and of other rows that are worse."""
    yield f"{'best':>12} {'of':<16} {'present':>12} {'ratio':>7} {'regret':>9}  row"
    for name in names:
        row, worse = rows[name], is_worse(name, rows[name])
        if not (worse or judged(name)):
            continue
        best, present = row["best"], row["present"]
        ratio = present / best if best else math.nan
        regret = f"{row['known'] - present:9.3f}" if "known" in row else " " * 9
        mark = ("WORSE" if judged(name) else "worse") if worse else ""
        yield (
            f"{best:>12.6g} {row['commit']:<16} {present:>12.6g} {ratio:>7.3f} {regret}  {name} "
            f"{mark}"
        ).rstrip()


def main(words: Sequence[str] | None = None) -> int:
    parser = Sizes(__file__, __doc__, search=(0.0, 0.0))
    with_folder(parser, "of public data", nargs="?")
    parser.add_argument("--rows", help="a regular expression of the rows to measure")
    parser.add_argument("--time", help="measure this alone, and print it")
    arguments = parser.parse_args(words)
    if arguments.time:
        from helpers.record.times import timed as alone

        print(json.dumps(alone(arguments.time, arguments.smoke)))
        return 0
    path = (arguments.output or RESULTS) / "record.json"
    rows, names = read(path), []
    for found in measured(arguments):
        for name, value, more in found:
            numbers = {key: rounded(own) for key, own in more.items()}
            rows[name] = merged(rows.get(name), name, rounded(value), **numbers)
            names.append(name)
        print(f"{found[0][0]}: {found[0][1]:.6g}", file=sys.stderr, flush=True)
        if arguments.output is not None:
            write(path, rows, arguments)
    for word, value in pooled(rows):
        name = f"all fits / {word}"
        if arguments.rows is None and not arguments.smoke:
            rows[name] = merged(rows.get(name), name, rounded(value))
            names.append(name)
    print(*table(rows, sorted(names)), sep="\n")
    failed = [name for name in names if judged(name) and is_worse(name, rows[name])]
    print(f"{len(names)} rows, {len(failed)} of them worse than their tolerance allows")
    if arguments.output is not None:
        write(path, rows, arguments)
    return int(bool(failed))


def rounded(value: object) -> object:
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value
