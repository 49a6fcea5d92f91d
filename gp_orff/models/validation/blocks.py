"""Blocks of readings to leave out: by labels, a splitter or tracks; cells of two lengthscales."""

from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from gpytorch.kernels import Kernel
from jaxtyping import Float, Int

from gp_orff.data.reading import Options
from gp_orff.data.tracks.reading import labels_of_tracks
from gp_orff.data.validation import as_matrix, is_single
from gp_orff.features.assemble import term_spectra
from gp_orff.features.frequencies.grid_design import lengthscales
from gp_orff.inference.left_out import Block

_WIDTH = 2.0  # lengthscales
_FEWEST, _MOST = 5, 50  # blocks
_FINEST = 2**20  # cells along an axis


class Blocks(NamedTuple):
    """All blocks, as they serve several models."""

    members: tuple[Block, ...]


class Splitter(Protocol):
    """A splitter of scikit-learn."""

    def split(
        self, x: Float[np.ndarray, "N d"], y: Float[np.ndarray, "N v"], groups: object
    ) -> Iterable[tuple[Int[np.ndarray, "r"], Int[np.ndarray, "t"]]]:
        """Rows to learn from, and rows to predict."""


def blocks_of(blocks: object, kernel: Kernel, x: object, y: object, options: Options) -> Blocks:
    """The blocks that a user asked for.

    Args:
        blocks: "auto", labels (N,), or a splitter; or what this function returned before.
        kernel: whose lengthscales are the size of blocks, where there are no tracks.
        x, y: the readings (N, d), (N, v).
        options: the group of each reading, or its track, for splitters that need groups.

    Raises:
        TypeError: no y; blocks that are none of these, or labels that cannot be hashed.
        ValueError: labels of another length, one label for all, a splitter whose sets do not fit.
    """
    if isinstance(blocks, Blocks):
        return blocks
    if y is None:
        raise TypeError(
            "expected arrays x and y in memory, whose readings blocks= can leave out, got x alone; "
            "give a sample of the chunks, concatenated"
        )
    x, y = (
        as_matrix(values, name).detach().cpu().numpy()
        for values, name in ((x, "points x (N, d)"), (y, "observations y (N, p)"))
    )
    if isinstance(blocks, str):
        if blocks != "auto":
            raise ValueError(
                f"expected blocks='auto', labels (N,) or a splitter, got blocks={blocks!r}"
            )
        blocks = by_track(options.track, len(x))
        if blocks is None:
            blocks = cells(x, lengthscales_of(kernel, x.shape[-1]))
    if hasattr(blocks, "split") and not isinstance(blocks, Iterable):  # as tensors are
        labels = options.group, options.track
        groups = next((each for each in labels if not is_single(each)), None)
        return Blocks(tuple(_of_splitter(blocks, x, y, groups)))
    return Blocks(tuple(_of_labels(blocks, len(x))))


def _of_labels(labels: object, count: int) -> list[Block]:
    """A block for each label, in the order of their first readings."""
    if is_single(labels) or not isinstance(labels, Iterable):
        raise TypeError(
            "expected blocks='auto', a label for each reading or a splitter with a method split, "
            f"got {type(labels).__name__}"
        )
    values = labels.tolist() if hasattr(labels, "tolist") else list(labels)
    if len(values) != count:
        raise ValueError(
            f"expected a label for each of the {count} readings in blocks=, got {len(values)}"
        )
    numbers: dict[Hashable, int] = {}
    try:
        which = torch.tensor([numbers.setdefault(label, len(numbers)) for label in values])
    except TypeError as error:
        raise TypeError(f"expected labels that can be hashed in blocks=, got {error}") from error
    if any(label != label for label in numbers):
        raise ValueError("expected a label for each reading in blocks=, got NaN among them")
    if len(numbers) < 2:
        raise ValueError(
            f"expected at least two blocks, got {next(iter(numbers))!r} for all readings, which "
            "leaves nothing to learn from; give labels of smaller blocks, or blocks='auto'"
        )
    masks = [which == number for number in numbers.values()]
    return [Block(name, mask, mask) for name, mask in zip(numbers, masks, strict=True)]


def _of_splitter(
    splitter: Splitter, x: Float[np.ndarray, "N d"], y: Float[np.ndarray, "N v"], groups: object
) -> list[Block]:
    """A block for each split: what it learns from may be less than all but the tested readings."""
    blocks = []
    for number, (learned, tested) in enumerate(splitter.split(x, y, groups)):
        left_out, test = torch.ones(len(x), dtype=torch.bool), torch.zeros(len(x), dtype=torch.bool)
        left_out[torch.from_numpy(np.asarray(learned))] = False
        test[torch.from_numpy(np.asarray(tested))] = True
        if not test.any() or left_out.all() or (test & ~left_out).any():
            raise ValueError(
                "expected a splitter whose sets to learn from and to predict have no reading in "
                f"common and are not empty, got {int((~left_out).sum())} and {int(test.sum())} "
                f"readings with {int((test & ~left_out).sum())} in both, in split {number}"
            )
        blocks.append(Block(number, left_out, test))
    if not blocks:
        raise ValueError("expected a splitter with at least one split, got none")
    return blocks


def lengthscales_of(kernel: Kernel, num_inputs: int) -> Float[np.ndarray, "d"]:
    """The largest lengthscale along each axis; 0 for kernels without any."""
    try:
        return lengthscales(term_spectra(kernel, num_inputs), num_inputs)
    except NotImplementedError:
        return np.zeros(num_inputs)


def by_track(track: object, count: int) -> Sequence[Hashable] | None:
    """The block of each reading: its track, or one of 50 sets of tracks of about equally many
    readings; None without labels, or with a single one.

    Raises:
        ValueError: labels of another length than `count` readings, or missing ones.

    Example:
        >>> from gp_orff.models.validation.blocks import by_track
        >>> by_track(["a", "a", "b"], 3), by_track("a", 3), len(set(by_track(range(400), 400)))
        (['a', 'a', 'b'], None, 50)
    """
    if is_single(track):
        return None
    names, which = labels_of_tracks(track, count)
    if len(names) < 2:
        return None
    labels = track.tolist() if hasattr(track, "tolist") else list(track)
    together = _together(np.bincount(which), 0)
    return labels if len(names) <= _MOST else _in_order(together[which])


def cells(
    x: Float[np.ndarray, "N d"], lengths: Float[np.ndarray, "d"], seed: int = 0
) -> Int[np.ndarray, "N"]:
    """The number of the block of each reading, for blocks of cells of about two lengthscales.

    Where that gives fewer than five cells with readings, they are smaller. More than 50 are put
    together in 50 blocks of about equally many readings, at random, so that the cells of a block
    hardly touch each other.

    Args:
        x: positions.
        lengths: lengthscales along each axis; 0 where there is none.
        seed: of the random order.

    Example:
        >>> import numpy as np
        >>> from gp_orff.models.validation.blocks import cells
        >>> cells(np.linspace(0, 19.9, 200)[:, None], np.ones(1)).max().item()  # 10 cells, from 0
        9
    """
    start, extent = x.min(0), np.ptp(x, axis=0)
    extent = np.where(extent > 0, extent, np.finfo(float).tiny)
    scaled = extent / np.where(lengths > 0, lengths, extent)
    counts = np.clip(np.round(scaled / _WIDTH), 1, _FINEST)
    while True:
        lattice = np.minimum(np.floor((x - start) / extent * counts), counts - 1)
        _, cell, sizes = np.unique(lattice, axis=0, return_inverse=True, return_counts=True)
        if len(sizes) >= _FEWEST or counts.max() >= _FINEST:
            return _in_order(_together(sizes, seed)[cell.ravel()])
        counts[np.argmax(scaled / counts)] *= 2


def _in_order(labels: Int[np.ndarray, "N"]) -> Int[np.ndarray, "N"]:
    """Numbers from 0, in the order of their first readings."""
    first = np.unique(labels, return_index=True)[1]
    return np.argsort(np.argsort(first))[labels]


def _together(sizes: Sequence[int], seed: int) -> Int[np.ndarray, "c"]:
    """The block of each cell, of which there are `sizes` readings; at most 50 blocks."""
    count = min(_MOST, len(sizes))
    block, totals = np.empty(len(sizes), dtype=np.int64), np.zeros(count)
    for cell in np.random.default_rng(seed).permutation(len(sizes)):
        block[cell] = totals.argmin()
        totals[block[cell]] += sizes[cell]
    return block
