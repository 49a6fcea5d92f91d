"""One fit of one kernel to one data set: its time, its warnings and its prediction errors."""

import re
import signal
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from gpytorch.kernels import Kernel

import gp_orff
from helpers.anything.sets import Problem
from helpers.fields import scores

_WORDS = 300  # characters of a message that are kept


class OutOfTime(BaseException):
    """Raised at the time limit. It is not an `Exception`, so that no code in a fit catches it."""


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise `OutOfTime` in the `with` block after some seconds of processor time, as soon as the
    present operation returns."""

    def stop(*_: object) -> None:
        raise OutOfTime

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def measured(kernel: Kernel, problem: Problem, most: float) -> dict[str, object]:
    """Fit a kernel, and return seconds, warnings, the `error` and scores of predictions as a dict.

    Args:
        kernel: the kernel, which is trained in place.
        problem: the data.
        most: the processor time in seconds after which the fit is stopped.
    """
    found: dict[str, object] = {"points": len(problem.x), "error": None}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        start, before = time.perf_counter(), time.process_time()
        try:
            with limited(most):
                model = gp_orff.VectorFieldGP(kernel).fit(problem.x, problem.y, progress=False)
                found["seconds"] = time.perf_counter() - start
                found["CPU s"] = time.process_time() - before
                found |= _told(model) | _predicted(model, problem)
        except OutOfTime as late:
            found["error"] = f"OutOfTime: given up after {most:g} s in {_place(late)}"
        except Exception as error:  # whatever a user would meet
            found["error"] = f"{type(error).__name__}: {error}"[:_WORDS]
        found.setdefault("seconds", time.perf_counter() - start)
        found.setdefault("CPU s", time.process_time() - before)
    found["warnings"] = _messages(caught)
    return found


def _told(model: gp_orff.VectorFieldGP) -> dict[str, object]:
    report = model.report
    return {
        "method": report.method,
        "F": report.features,
        "nats a number": report.evidence / report.numbers,
        "cut / noise": report.cut_over_noise,
        "stages": [[s.name, s.evaluations, round(s.seconds, 2)] for s in report.stages],
        "notes": [note[:_WORDS] for note in report.notes],
    }


@torch.no_grad()
def _predicted(model: gp_orff.VectorFieldGP, problem: Problem) -> dict[str, object]:
    """Return the coverage of 95 % intervals for held-out observations and for the true field, and
    errors divided by the standard deviation of the noise."""
    start, field = time.perf_counter(), model.posterior()
    mean, variance = field.mean(problem.xs), field.variance(problem.xs)
    latent = scores(mean, variance, problem.truth)
    return {
        "inside": scores(mean, variance + model.likelihood.noise, problem.ys)["inside"],
        "inside, field": latent["inside"],
        "error / noise": latent["error"] / problem.noise,
        "sd / noise": latent["sd"] / problem.noise,
        "noise": model.likelihood.noise.sqrt().item() / problem.noise,
        "readings": problem.ys.numel(),
        "seconds to predict": time.perf_counter() - start,
    }


def _place(error: BaseException) -> str:
    """Return the names of the functions of the package that were running, the outermost first."""
    frames = traceback.extract_tb(error.__traceback__)
    return " > ".join(own.name for own in frames if "gp_orff" in Path(own.filename).parts)[:_WORDS]


def _messages(caught: list[warnings.WarningMessage]) -> list[str]:
    """Return each message once, if messages that differ only in numbers are counted as equal.

    A message begins with the class of the warning, and with "foreign" if another package gave it.
    """
    found = {}
    for own in caught:
        category = own.category
        mark = "" if category.__module__.startswith("gp_orff") else "foreign "
        text = f"{mark}{category.__name__}: {own.message}"[:_WORDS]
        found.setdefault(re.sub(r"[\d.e+-]+", "#", text), text)
    return list(found.values())
