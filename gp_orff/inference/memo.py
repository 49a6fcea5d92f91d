"""A cache of one value that depends on hyperparameters."""

from collections.abc import Callable, Iterable
from typing import TypeVar

import torch
from torch import Tensor, nn

T = TypeVar("T")


class Memo:
    """A cache of one value, valid while its key and the hyperparameters stay the same."""

    def __init__(self):
        self._entry: tuple[object, list[Tensor], object] | None = None

    def get(self, make: Callable[[], T], modules: Iterable[nn.Module], key: object = None) -> T:
        parameters, entry = [p for module in modules for p in module.parameters()], self._entry
        if entry is None or entry[0] != key or not _equal(entry[1], parameters):
            self._entry = entry = (key, [p.detach().clone() for p in parameters], make())
        return entry[2]


def _equal(before: list[Tensor], now: list[Tensor]) -> bool:
    return len(before) == len(now) and all(map(torch.equal, before, now))
