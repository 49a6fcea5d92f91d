"""What files and bytes of this package share: whole writes, and a kind that is checked."""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO


def write_whole(path: str | os.PathLike, write: Callable[[BinaryIO], object]) -> None:
    """Replace a file by what `write` writes; an interrupted write leaves the old file as it was."""
    path = Path(path)
    temporary = {"dir": path.parent, "prefix": f".{path.name}.", "delete": False}
    with tempfile.NamedTemporaryFile(**temporary) as file:
        try:
            write(file)
            file.flush()
            os.fsync(file.fileno())
            os.replace(file.name, path)
        except BaseException:
            Path(file.name).unlink(missing_ok=True)
            raise


def check_kind(record: object, kind: str, expected: str, place: str = "") -> None:
    """Raise ValueError unless a record is a dict with this `kind` as its format.

    `expected` and `place` are words of the message, before the kind and at its end.
    """
    actual = record.get("format") if isinstance(record, dict) else type(record).__name__
    if not isinstance(record, dict) or actual != kind:
        raise ValueError(f"expected {expected} a {kind}, got {actual!r}{place}")
