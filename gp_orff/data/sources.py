"""Sources of observations: arrays, chunks that can be visited again, or memory."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from gpytorch.kernels import Kernel
from gpytorch.means import ConstantMean, Mean, MultitaskMean, ZeroMean
from jaxtyping import Float
from torch import Tensor

from gp_orff.data.observations import Observations
from gp_orff.data.reading import Options, chunks, read, unpack
from gp_orff.data.tracks.observations import TrackObservations
from gp_orff.data.tracks.reading import check_time, readings_along
from gp_orff.data.validation import is_single
from gp_orff.features.domain import Box, within_box
from gp_orff.kernels.tree import infer_num_dims, input_columns, terms


@dataclass(frozen=True)
class Reader:
    """Reads data for a model: validated observations on its device, less a varying mean."""

    kernel: Kernel
    mean: Mean
    num_outputs: int

    def read(
        self, x: object, y: object, options: Options
    ) -> Iterator[Observations | TrackObservations]:
        """The observations of x and y, group by group."""
        check_time(options.track, options.time)
        device = next(self.kernel.parameters()).device
        for part in read(x, y, self.num_outputs, options):
            self._check_columns(part.x.shape[-1])
            part = part.to(device)
            if not is_constant(self.mean):
                part = part.minus(varying_mean(self.mean, part.x, self.num_outputs))
            if options.track is None:
                yield part
            else:
                yield readings_along(part, options.track, options.time, len(x))

    def _check_columns(self, got: int) -> None:
        summands = terms(self.kernel)
        num_dims = infer_num_dims(summands, None)
        expected, exactly = input_columns(summands, got if num_dims is None else num_dims)
        if got < expected or (exactly and got != expected):
            raise ValueError(f"the kernel expects points with {expected} columns, got {got}")


@dataclass(frozen=True)
class Arrays:
    """Tensors, arrays or memory maps, held by reference."""

    reader: Reader
    x: object
    y: object
    options: Options

    def __call__(self) -> Iterator[Observations | TrackObservations]:
        offset = 0
        for x, y, options in chunks(self.x, self.y, self.options):
            for part in self.reader.read(x, y, options):
                yield part.shift_index(offset) if offset else part
            offset += len(x)


@dataclass(frozen=True)
class Chunks:
    """An iterable of chunks, held by reference."""

    reader: Reader
    chunks: Iterable
    options: Options

    def __post_init__(self):
        try:
            once = iter(self.chunks) is self.chunks
        except TypeError as error:
            got = type(self.chunks).__name__
            raise TypeError(
                f"expected x and y, or an iterable of chunks (x, y), got {got} alone"
            ) from error
        if once:
            raise TypeError(
                "expected chunks that can be visited again and again, got an iterator, which "
                "ends after one visit; give a list, or an object whose __iter__ starts anew"
            )
        per_observation = ("variances", "noise", "directions", "group", "track", "time")
        if not all(is_single(getattr(self.options, name)) for name in per_observation):
            raise ValueError(
                "expected variances, noise, directions, groups, tracks and times inside the "
                "chunks, got them as arguments; give chunks as mappings with keys x, y, noise, ..."
            )
        if isinstance(self.chunks, Tensor) or hasattr(self.chunks, "__array__"):
            raise TypeError("expected observations y beside x, got x alone: fit(x, y)")

    def __call__(self) -> Iterator[Observations | TrackObservations]:
        for chunk in self.chunks:
            x, y, options = unpack(chunk, self.options)
            for part in chunks(x, y, options):
                yield from self.reader.read(*part)


@dataclass(frozen=True)
class InMemory:
    """Observations in memory."""

    parts: Sequence[Observations]

    def __call__(self) -> Iterator[Observations]:
        return iter(self.parts)


@dataclass(frozen=True)
class WithinBox:
    """The observations of a source that lie inside a box."""

    source: Callable[[], Iterator[Observations]]
    box: Box

    def __call__(self) -> Iterator[Observations]:
        for part in self.source():
            rows = within_box(part.x, self.box)
            if rows.any():
                yield part if rows.all() else part.take(rows)


def is_constant(mean: Mean) -> bool:
    """Whether a mean is a constant for each output."""
    return all(isinstance(base_mean, ConstantMean | ZeroMean) for base_mean in base_means(mean))


def base_means(mean: Mean) -> list[Mean]:
    """The means of the single outputs, or the mean itself."""
    return list(mean.base_means) if isinstance(mean, MultitaskMean) else [mean]


@torch.no_grad()
def varying_mean(mean: Mean, x: Float[Tensor, "n d"], num_outputs: int) -> Float[Tensor, "n p"]:
    """The values of a mean that is not learned here; zero where it is constant."""
    if is_constant(mean):
        return x.new_zeros(len(x), num_outputs)
    values = mean(x).detach()
    if values.numel() != len(x) * num_outputs:
        raise ValueError(
            f"expected a mean with {num_outputs} outputs, got values of shape "
            f"{tuple(values.shape)} at {len(x)} points; wrap it in gpytorch.means.MultitaskMean"
        )
    return values.reshape(len(x), num_outputs)
