"""Plain values as bytes with a version, and bytes between the processes of `torch.distributed`."""

import io
import pickle
from zipfile import BadZipFile

import torch
import torch.distributed as distributed

from gp_orff.data.packing.records import check_kind

_VERSION = 1


def write_bytes(kind: str, content: dict) -> bytes:
    """The bytes of a dict of tensors and plain values; `kind` says of what."""
    stream = io.BytesIO()
    torch.save({"format": kind, "version": _VERSION, **content}, stream)
    return stream.getvalue()


def read_bytes(kind: str, content: bytes) -> dict:
    """The dict that `write_bytes` wrote, on the CPU.

    Raises:
        ValueError: bytes that are damaged, of another kind, or of a newer version.
    """
    try:
        record = torch.load(io.BytesIO(content), weights_only=True, map_location="cpu")
    except (RuntimeError, EOFError, ValueError, BadZipFile, pickle.UnpicklingError) as error:
        raise ValueError(f"expected bytes of a {kind}, got others, or damaged ones") from error
    check_kind(record, kind, "bytes of")
    if record["version"] > _VERSION:
        raise ValueError(
            f"expected a {kind} of a version up to {_VERSION}, got {record['version']}: install a "
            "newer gp_orff"
        )
    return record


def gathered(content: bytes, group: object) -> list[bytes]:
    """The bytes of every process of a group, in the order of their ranks."""
    if not (distributed.is_available() and distributed.is_initialized()):
        raise RuntimeError(
            "expected processes that torch.distributed connects, got none: call "
            "torch.distributed.init_process_group first"
        )
    parts = [None] * distributed.get_world_size(group)
    distributed.all_gather_object(parts, content, group)
    return parts
