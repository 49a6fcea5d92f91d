"""Warnings of tasks in other processes, which reach the caller."""

import pickle
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Told:
    """A warning, and the line that gave it."""

    text: str
    category: type[Warning]
    file: str
    line: int

    def again(self) -> None:
        """Give the warning in this process, whose filters say what becomes of it."""
        warnings.warn_explicit(self.text, self.category, self.file, self.line)


class _Heard(threading.local):
    """The warnings of the task of this thread."""

    told: dict[Told, None] | None = None


_heard = _Heard()
_lock = threading.Lock()
_tasks, _before = 0, warnings.catch_warnings()


@contextmanager
def heard_warnings() -> Iterator[dict[Told, None]]:
    """Inside the block, warnings of this thread are the keys of a dict, each once.

    Filters are those of a process: the first of several threads sets them, the last restores them.
    """
    global _tasks, _before
    with _lock:
        if not _tasks:
            _before = warnings.catch_warnings()
            _before.__enter__()
            warnings.simplefilter("always")
            warnings.showwarning = _hear
        _tasks += 1
    _heard.told = {}
    try:
        yield _heard.told
    finally:
        _heard.told = None
        with _lock:
            _tasks -= 1
            if not _tasks:
                _before.__exit__(None, None, None)


def _hear(message, category, filename, lineno, file=None, line=None) -> None:
    """In the place of `warnings.showwarning`; what other threads say is dropped."""
    if _heard.told is not None:
        _heard.told[Told(str(message), _known(category), filename, lineno)] = None


def _known(category: type[Warning]) -> type[Warning]:
    """The category if it can be sent to the caller, else a `UserWarning`."""
    try:
        pickle.dumps(category)
    except Exception:
        return UserWarning
    return category
