"""Observations of a known flow in files of a million points, which workers load."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch


def write(folder: Path, points: int, size: int) -> list[Path]:
    """Write files with `size` observations each, and return their paths."""
    paths = []
    for number, start in enumerate(range(0, points, size)):
        numbers = np.random.default_rng(number)
        x = numbers.uniform(0, 9, (min(size, points - start), 2))
        y = np.stack([np.sin(x[:, 1]), np.cos(x[:, 0])], axis=-1)
        path = folder / f"{number:05d}.npy"
        np.save(path, np.concatenate([x, y + 0.3 * numbers.normal(size=y.shape)], axis=-1))
        paths.append(path)
    return paths


def load(path: Path) -> tuple[np.ndarray, np.ndarray]:
    both = np.load(path)
    return both[:, :2], both[:, 2:]


def chunks(paths: Sequence[Path]) -> list[partial]:
    return [partial(load, path) for path in paths]


def one_thread(_: object = None) -> None:
    torch.set_num_threads(1)
