"""Partial sums of passes, and results between them, in a file: interrupted calls go on there."""

import hashlib
import os
import pickle
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from types import MethodType
from typing import Any

import numpy as np
from torch import Tensor

from gp_orff.data.packing.records import write_whole

_SHARE = 0.05  # of the time of a pass that writing may take
_FORMAT = "gp_orff.checkpoint 2"


@dataclass(frozen=True)
class Partial:
    """The sum over the first chunks of a pass."""

    value: Any = None
    chunks: int = 0
    points: int = 0
    digest: str = ""  # of these chunks


@dataclass
class Checkpoint:
    """A file with the partial sums of the passes of one call, by what they sum up, and with results
    of computations between passes, by their order.

    It is a pickle: open only what you have written yourself.
    """

    path: Path
    identity: str  # of the model and the options of the call
    partials: dict[str, Partial] = field(default_factory=dict)
    results: dict[int, Any] = field(default_factory=dict)
    computations: int = 0  # of this call so far
    due: float = 0.0

    @classmethod
    def at(cls, path: str | os.PathLike, identity: str) -> "Checkpoint":
        """What the file holds; nothing if there is none yet.

        Raises:
            ValueError: a file that is damaged, or of another model.
        """
        path = Path(path)
        if not path.exists():
            return cls(path, identity)
        try:
            kind, known, *content = pickle.loads(path.read_bytes())
        except Exception as error:
            raise ValueError(f"{path} is damaged, or is no checkpoint of gp_orff") from error
        if kind != _FORMAT:
            raise ValueError(f"expected {path} as a {_FORMAT}, got {kind!r}")
        if known != identity:
            raise ValueError(
                f"expected a checkpoint of this model, with these hyperparameters and options, got "
                f"that of another in {path}; delete the file, or give another path"
            )
        return cls(path, identity, *content)

    def add(self, work: str, partial: Partial, soon: bool = False) -> None:
        """Keep a partial sum; in the file if `soon`, or if the last writing is long ago."""
        self.partials[work] = partial
        self._write(soon)

    def kept(self, compute: Callable[[], Any]) -> Any:
        """What `compute` returns, or what the same computation returned before; see `passes`."""
        number, self.computations = self.computations, self.computations + 1
        if not self.partials:
            return compute()
        if number not in self.results:
            self.results[number] = compute()
            self._write()
        return self.results[number]

    def _write(self, soon: bool = False) -> None:
        start = time.perf_counter()
        if not soon and start < self.due:
            return
        content = pickle.dumps((_FORMAT, self.identity, self.partials, self.results))
        write_whole(self.path, lambda file: file.write(content))
        end = time.perf_counter()
        self.due = end + (end - start) / _SHARE

    def remove(self) -> None:
        """Delete the file: the call has succeeded."""
        self.path.unlink(missing_ok=True)

    def require(self, known: Partial, digest: str, chunks: int) -> None:
        """Raise ValueError unless the chunks of a partial sum come again."""
        if (digest, chunks) != (known.digest, known.chunks):
            raise ValueError(
                f"expected the data of the checkpoint {self.path}, whose first {known.chunks} "
                f"chunks are done, got {'fewer' if chunks < known.chunks else 'other'} chunks; "
                "delete the file, or give another path"
            )


def digest_of(value: object, before: str = "") -> str:
    """A digest of a tree of arrays, plain values and callables, after another one."""
    digest = hashlib.sha256(before.encode())
    for part in _serialize(value):
        digest.update(part)
    return digest.hexdigest()


def _serialize(value: object) -> Iterator[bytes]:
    """Bytes that are the same in another process, which pickles need not be."""
    if isinstance(value, Tensor):
        value = value.detach().cpu().numpy()
    if isinstance(value, np.ndarray) and value.dtype != object:
        yield f"{value.dtype} {value.shape}".encode()
        yield np.ascontiguousarray(value).tobytes()
    elif isinstance(value, Mapping):
        yield from _serialize([*map(str, value), *value.values()])
    elif isinstance(value, list | tuple | np.ndarray):
        yield f"{len(value)}".encode()
        for item in value:
            yield from _serialize(item)
    elif hasattr(value, "__dask_tokenize__"):
        yield _token(value)
    elif is_dataclass(value) and not isinstance(value, type):
        own = [getattr(value, part.name) for part in fields(value)]
        yield from _serialize([type(value).__qualname__, *own])
    elif isinstance(value, partial):
        yield from _serialize([value.func, value.args, value.keywords])
    elif isinstance(value, MethodType):
        yield from _serialize([value.__func__, value.__self__])
    elif callable(value) and hasattr(value, "__qualname__"):
        yield f"{value.__module__}.{value.__qualname__}".encode()
    else:
        yield pickle.dumps(value) if callable(value) else repr(value).encode()


def _token(value: object) -> bytes:
    """What Dask calls a collection by, which does not change with the process."""
    return import_module("dask.base").tokenize(value).encode()
