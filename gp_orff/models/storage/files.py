"""Files, written whole or not at all."""

import hashlib
import os
import pickle
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
import torch
from torch import Tensor

VERSION = 1


def write(path: str | os.PathLike, kind: str, content: dict) -> None:
    """A dict as a file that `torch.load(path, weights_only=True)` reads; a write that is cut off
    leaves the old file whole."""
    path = Path(path)
    whole = {"format": kind, "version": VERSION, "checksum": _checksum(content), **content}
    hidden = {"dir": path.parent, "prefix": f".{path.name}.", "delete": False}
    with tempfile.NamedTemporaryFile(**hidden) as file:
        try:
            torch.save(whole, file)
            file.flush()
            os.fsync(file.fileno())
            os.replace(file.name, path)
        except BaseException:
            Path(file.name).unlink(missing_ok=True)
            raise


def read(path: str | os.PathLike, kind: str) -> dict:
    """The dict of a file.

    Raises:
        FileNotFoundError: no file.
        ValueError: a file that is damaged, newer than this package, or of another kind.
    """
    try:
        content = torch.load(path, weights_only=True, map_location="cpu")
    except FileNotFoundError:
        raise
    except (RuntimeError, EOFError, OSError, ValueError, KeyError, BadZipFile) as error:
        raise _damaged(path) from error
    except (pickle.UnpicklingError, AttributeError, TypeError, IndexError) as error:
        raise _damaged(path) from error
    if not isinstance(content, dict) or content.get("format") != kind:
        found = content.get("format") if isinstance(content, dict) else type(content).__name__
        raise ValueError(f"expected a file of a {kind}, got {found!r} in {path}")
    if content["version"] > VERSION:
        raise ValueError(
            f"{path} was written in version {content['version']} of the file format, this gp_orff "
            f"reads up to {VERSION}: install a newer one"
        )
    own = {n: v for n, v in content.items() if n not in ("format", "version", "checksum")}
    if content["checksum"] != _checksum(own):
        raise _damaged(path)
    return own


def _damaged(path: str | os.PathLike) -> ValueError:
    return ValueError(f"{path} is damaged, or no file of gp_orff: restore it from a copy")


def _checksum(content: object) -> str:
    digest = hashlib.sha256()
    for piece in _pieces(content):
        digest.update(piece)
    return digest.hexdigest()


def _pieces(value: object) -> Iterator[bytes]:
    """Everything in a tree of plain values."""
    if isinstance(value, Tensor):
        yield f"{value.dtype} {tuple(value.shape)}".encode()
        yield np.ascontiguousarray(value.detach().cpu().numpy()).tobytes()
    elif isinstance(value, Mapping):
        for name, own in value.items():
            yield str(name).encode()
            yield from _pieces(own)
    elif isinstance(value, list | tuple):
        for own in value:
            yield from _pieces(own)
    else:
        yield repr(value).encode()
