"""Blocks of a Dataset of Dask arrays, as chunks that are loaded where they are used."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, product
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from gp_orff.labelled.values import optional

if TYPE_CHECKING:
    import xarray


@dataclass(frozen=True)
class Block:
    """A callable that loads one block of a Dataset and reads it."""

    dataset: "xarray.Dataset"
    read: Callable[["xarray.Dataset"], dict[str, np.ndarray]]
    where: str

    def __call__(self) -> dict[str, np.ndarray]:
        return self.read(self.dataset.compute(scheduler="synchronous"))  # the workers are many

    def __repr__(self) -> str:
        return f"the block {self.where}"


@dataclass(frozen=True)
class Blocks:
    """The blocks of a Dataset of Dask arrays, which can be visited again; nothing is loaded."""

    dataset: "xarray.Dataset"
    read: Callable[["xarray.Dataset"], dict[str, np.ndarray]]

    @classmethod
    def of(
        cls,
        dataset: "xarray.Dataset",
        names: Sequence[str],
        read: Callable[["xarray.Dataset"], dict[str, np.ndarray]],
    ) -> "Blocks | None":
        """The blocks of these variables; None if they are in memory, or are not Dask arrays."""
        if all(dataset.variables[name].chunks is None for name in names):
            return None
        return cls(dataset[list(names)].drop_attrs().unify_chunks(), read)

    def __len__(self) -> int:
        return prod(len(sizes) for sizes in self._chunks.values())

    def __iter__(self) -> Iterator[Block]:
        dask = optional("dask", "dask")
        slices = {
            name: [slice(end - size, end) for size, end in zip(own, accumulate(own), strict=True)]
            for name, own in self._chunks.items()
        }
        for rows in product(*slices.values()):
            block = dict(zip(slices, rows, strict=True))
            where = ", ".join(f"{name} {own.start}:{own.stop}" for name, own in block.items())
            (part,) = dask.optimize(self.dataset.isel(block))  # the graph of this block alone
            yield Block(part, self.read, where)

    @property
    def _chunks(self) -> Mapping[str, tuple[int, ...]]:
        return self.dataset.chunksizes
