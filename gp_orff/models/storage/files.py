"""Read and write files with a checksum; a write either completes or leaves the old file."""

import hashlib
import os
import pickle
from collections.abc import Iterator, Mapping
from functools import partial
from zipfile import BadZipFile

import numpy as np
import torch
from torch import Tensor

from gp_orff.data.packing.records import check_kind, write_whole

VERSION = 3  # since data without statistics may stand for a grid; in 1, reports are sentences


def write(path: str | os.PathLike, kind: str, content: dict) -> None:
    """Write a dict to a file that `torch.load(path, weights_only=True)` reads.

    An interrupted write leaves the old file as it was.
    """
    record = {"format": kind, "version": VERSION, "checksum": _checksum(content), **content}
    write_whole(path, partial(torch.save, record))


def read(path: str | os.PathLike, kind: str) -> dict:
    """Read the dict that `write` has written.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is damaged, newer than this package, or of another kind.
    """
    try:
        record = torch.load(path, weights_only=True, map_location="cpu")
    except FileNotFoundError:
        raise
    except (RuntimeError, EOFError, OSError, ValueError, KeyError, BadZipFile) as error:
        raise _damaged(path) from error
    except (pickle.UnpicklingError, AttributeError, TypeError, IndexError) as error:
        raise _damaged(path) from error
    check_kind(record, kind, "a file of", f" in {path}")
    if record["version"] > VERSION:
        raise ValueError(
            f"{path} has version {record['version']} of the file format, but this gp_orff reads "
            f"versions up to {VERSION}: install a newer one"
        )
    content = {n: v for n, v in record.items() if n not in ("format", "version", "checksum")}
    if record["checksum"] != _checksum(content):
        raise _damaged(path)
    return content


def _damaged(path: str | os.PathLike) -> ValueError:
    return ValueError(f"{path} is damaged, or is not a file of gp_orff: restore it from a copy")


def _checksum(content: object) -> str:
    digest = hashlib.sha256()
    for part in _serialize(content):
        digest.update(part)
    return digest.hexdigest()


def _serialize(value: object) -> Iterator[bytes]:
    """The bytes of a tree of plain values."""
    if isinstance(value, Tensor):
        yield f"{value.dtype} {tuple(value.shape)}".encode()
        yield np.ascontiguousarray(value.detach().cpu().numpy()).tobytes()
    elif isinstance(value, Mapping):
        for name, item in value.items():
            yield str(name).encode()
            yield from _serialize(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _serialize(item)
    else:
        yield repr(value).encode()
