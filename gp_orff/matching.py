"""Readings found again among others: by instrument, place and numbers."""

import numpy as np
import torch
from jaxtyping import Int
from numpy.typing import NDArray

from gp_orff.readings import Readings

_WORD = 2**64 - 1


def fingerprints(part: Readings) -> Int[np.ndarray, "n"]:
    """A number for each reading, the same for the same reading; others share it by a chance of
    2⁻⁶⁴. y in single precision: a trend taken from it may differ in its last digits."""
    columns = torch.cat([part.x, part.y.float().double()], dim=-1) + 0.0  # −0 is 0
    found = np.full(len(part), hash(part.key) & _WORD, dtype=np.uint64)
    for column in columns.cpu().numpy().view(np.uint64).T:
        found = _mixed(found ^ column)
    return found


def places(asked: Int[np.ndarray, "m"], held: Int[np.ndarray, "n"]) -> Int[np.ndarray, "m"]:
    """Where each one asked for stands among those held, −1 for nowhere; of equal ones the k-th
    asked for is the k-th held."""
    order = np.argsort(held, kind="stable")
    rank = np.searchsorted(held[order], asked) + _repeats(asked)
    place = order[np.minimum(rank, len(held) - 1)]
    return np.where((rank < len(held)) & (held[place] == asked), place, -1)


def _repeats(values: Int[np.ndarray, "n"]) -> Int[np.ndarray, "n"]:
    """How many equal ones stand before each."""
    order = np.argsort(values, kind="stable")
    ordered, before = values[order], np.empty(len(values), dtype=np.int64)
    before[order] = np.arange(len(values)) - np.searchsorted(ordered, ordered)
    return before


def _mixed(bits: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A bijection of 64-bit words in which every bit changes half of the others (SplitMix64)."""
    bits = (bits ^ (bits >> 30)) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> 27)) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> 31)
