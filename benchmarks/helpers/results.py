"""Results of a benchmark as JSON, with all information that is necessary to repeat it."""

import json
import os
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from helpers.command import RESULTS

PACKAGES = (
    "torch",
    "gpytorch",
    "linear_operator",
    "numpy",
    "scipy",
    "scikit-learn",
    "finufft",
    "gp_orff",
)
ROOT = RESULTS.parents[1]
DIGITS = 5  # that mean something


def save(arguments: Namespace, results: Mapping[str, object], part: str = "") -> None:
    """Write results to `<benchmark>.json` in the output folder, if one is given.

    A part that is measured separately, such as one number of points, is written to
    `<benchmark>/<part>.json`.
    """
    if arguments.output is None:
        return
    path = arguments.output / arguments.benchmark / part
    path = path.with_name(path.name + ".json")
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = {
        "command": arguments.command,
        "commit": COMMIT,
        "date": datetime.now(UTC).date().isoformat(),
        "machine": machine(),
        "results": rounded(results),
        "seconds": rounded(time.perf_counter() - arguments.began),
        "versions": versions(),
    }
    path.write_text(json.dumps(whole, indent=2, sort_keys=True, ensure_ascii=False) + "\n")
    print(f"written: {path}")


def load(folder: Path, name: str) -> dict:
    return json.loads((folder / f"{name}.json").read_text())


def rounded(value: object) -> object:
    """Round numbers to five significant digits, and return them in plain containers."""
    if isinstance(value, Mapping):
        return {str(key): rounded(own) for key, own in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(own) for own in value]
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


def commit() -> str:
    """Return the short hash of the commit, with "+changes" if files that affect results were
    changed."""
    measured = ["gp_orff", "benchmarks", "tutorials", ":!benchmarks/results"]
    try:
        own = git("rev-parse", "--short=7", "HEAD")
        return own + ("+changes" if git("status", "--porcelain", "--", *measured) else "")
    except (OSError, subprocess.CalledProcessError):  # not a clone
        return "unknown"


def git(*words: str) -> str:
    command = ["git", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()


COMMIT = commit()  # of the code as it was loaded


def machine() -> dict[str, object]:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    found = {"cpu": _cpu(), "cores": len(os.sched_getaffinity(0)), "memory_gib": round(memory)}
    torch = sys.modules.get("torch")
    if torch is not None:
        found["threads"] = torch.get_num_threads()
        if torch.cuda.is_available():
            found["gpu"] = torch.cuda.get_device_name()
    return found


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return "unknown"


def versions() -> dict[str, str]:
    found = {"python": ".".join(map(str, sys.version_info[:3]))}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found
