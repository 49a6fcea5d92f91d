"""Products with the matrix of columns φ(x), computed in chunks of points; boxes of inputs."""

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.autograd import Function

from gp_orff.features.phases import Phases
from gp_orff.kernels.base import BLOCK, is_traced, mirror
from gp_orff.symbols.base import refuse_units

# Products with the N×2D matrix φ(x) = [cos θ(x) ; sin θ(x)], without storing it.
#
# Each product processes the points in chunks, and its backward pass computes the columns again.
# Memory therefore does not grow with N·D. All operations use float64. Backward passes consist of
# differentiable operations, so second derivatives exist.


# The bytes of φ in one chunk. On a CPU a chunk fits into the cache. On a GPU a chunk takes longer
# than launching its kernels.
_CHUNK_BYTES = {"cpu": 4 * 2**20, "cuda": 256 * 2**20}


def trig(x: Float[Tensor, "*b N d"], phases: Phases) -> Float[Tensor, "*b N 2*D"]:
    """Return φ(x), cosines first, then sines."""
    phase = phases(x)
    return torch.cat([phase.cos(), phase.sin()], dim=-1)


def moments(
    x: Float[Tensor, "*b N d"],
    phases: Phases,
    y: Float[Tensor, "*b N k"],
    weights: Float[Tensor, "N m"] | None = None,
) -> tuple[Float[Tensor, "*b 2*D 2*D"], Float[Tensor, "*b 2*D k"]]:
    """Return C = φᵀφ and Z = φᵀy, in one pass over the points and one backward pass.

    With `weights`, C contains φᵀ diag(a) φ for each column a of `weights` and has the shape
    (m, *b, 2D, 2D).
    """
    x, y, *tensors = _broadcast_batches(x, y, *phases.tensors)
    return _Moments.apply(x, y, True, weights, phases.rebuild, *tensors)


def adjoint(
    x: Float[Tensor, "*b N d"], phases: Phases, y: Float[Tensor, "*b N k"]
) -> Float[Tensor, "*b 2*D k"]:
    """Return Z = φᵀy."""
    x, y, *tensors = _broadcast_batches(x, y, *phases.tensors)
    return _Moments.apply(x, y, False, None, phases.rebuild, *tensors)[1]


def apply(
    x: Float[Tensor, "*b N d"], phases: Phases, w: Float[Tensor, "*b 2*D k"]
) -> Float[Tensor, "*b N k"]:
    """Return φ w."""
    if is_traced():
        return trig(x, phases) @ w
    x, w, *tensors = _broadcast_batches(x, w, *phases.tensors)
    return _Apply.apply(x, w, phases.rebuild, *tensors)


def chunks(x: Float[Tensor, "*b N d"], width: int) -> Iterator[slice]:
    """Return slices of the points such that one chunk has room for `width` numbers per point.

    The numbers are float64.
    """
    budget = _CHUNK_BYTES.get(x.device.type, _CHUNK_BYTES["cpu"])
    rows = max(1, budget // (8 * width * max(1, x.shape[:-2].numel())))
    return (slice(start, start + rows) for start in range(0, x.shape[-2], rows))


def by_chunks(
    function: Callable[[Float[Tensor, "*b m d"]], Float[Tensor, "*b m k"]],
    x: Float[Tensor, "*b N d"],
    width: int,
) -> Float[Tensor, "*b N k"]:
    """Return function(x), computed in chunks of points; `function` needs `width` numbers per point.

    The results are written into one array, because a list of pieces would fragment the heap.
    """
    out = None
    for rows in chunks(x, width):
        part = function(x[..., rows, :])
        if out is None:
            out = part.new_empty(*part.shape[:-2], x.shape[-2], part.shape[-1])
        out[..., rows, :] = part
    return out


def _broadcast_batches(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return the matrices in float64, expanded to one batch shape."""
    batch = torch.broadcast_shapes(*(t.shape[:-2] for t in tensors))
    return tuple(t.double().expand(*batch, *t.shape[-2:]) for t in tensors)


class _PhaseGradients:
    """The derivatives by x and by the tensors of the phases, accumulated over chunks."""

    def __init__(self, x: Tensor, phases: Phases, needs_x: bool, needs_tensors: Sequence[bool]):
        self._points, self._phases = x, phases
        self.x = torch.empty_like(x) if needs_x else None
        self.tensors = [torch.zeros_like(t) if any(needs_tensors) else None for t in phases.tensors]
        self.needed = needs_x or any(needs_tensors)

    def add(self, rows: slice, phi: Tensor, grad_phi: Tensor) -> None:
        """Add the derivatives from one chunk, whose points are `rows`.

        The derivative by a phase θ is ∂/∂θ = cos θ · ∂/∂(sin θ) − sin θ · ∂/∂(cos θ).
        """
        cos, sin = phi.chunk(2, dim=-1)
        grad_cos, grad_sin = grad_phi.chunk(2, dim=-1)
        grad = torch.addcmul(cos * grad_sin, sin, grad_cos, value=-1)
        if self.x is not None:
            self.x[..., rows, :] = self._phases.point_gradient(grad)
        if self.tensors[0] is not None:
            parts = self._phases.gradients(self._points[..., rows, :], grad)
            for total, part in zip(self.tensors, parts, strict=True):
                total += part


class _Moments(Function):
    """The autograd function of C = φᵀ diag(a) φ and Z = φᵀy; C is None if `gram` is false."""

    @staticmethod
    def forward(ctx, x, y, gram, weights, rebuild, *tensors):
        ctx.save_for_backward(x, y, weights, *tensors)
        ctx.rebuild, phases = rebuild, rebuild(*tensors)
        columns = 2 * phases.num_frequencies
        num_grams = () if weights is None else (weights.shape[-1],)
        c = x.new_zeros(*num_grams, *x.shape[:-2], columns, columns) if gram else None
        z = x.new_zeros(*x.shape[:-2], columns, y.shape[-1])
        for rows in chunks(x, columns):
            phi = trig(x[..., rows, :], phases)
            for matrix, a in _with_weights(c, weights, rows) if gram else ():
                _add_gram(matrix, phi if a is None else a * phi, phi)
            z += phi.mT @ y[..., rows, :]
        return mirror(c) if gram else c, z

    @staticmethod
    def backward(ctx, grad_c, grad_z):
        x, y, weights, *tensors = ctx.saved_tensors
        phases, (needs_x, needs_y) = ctx.rebuild(*tensors), ctx.needs_input_grad[:2]
        gradients = _PhaseGradients(x, phases, needs_x, ctx.needs_input_grad[5:])
        grad_y = torch.empty_like(y) if needs_y else None
        symmetric = grad_c + grad_c.mT if grad_c is not None else None
        for rows in chunks(x, grad_z.shape[-2]):
            phi = trig(x[..., rows, :], phases)
            if needs_y:
                grad_y[..., rows, :] = phi @ grad_z
            if gradients.needed:
                grad_phi = y[..., rows, :] @ grad_z.mT
                if symmetric is not None:
                    for matrix, a in _with_weights(symmetric, weights, rows):
                        grad_phi += phi @ matrix if a is None else a * (phi @ matrix)
                gradients.add(rows, phi, grad_phi)
        return gradients.x, grad_y, None, None, None, *gradients.tensors


def _add_gram(
    total: Float[Tensor, "*b k k"], left: Float[Tensor, "*b n k"], right: Float[Tensor, "*b n k"]
) -> None:
    """Add the symmetric matrix leftᵀ right to a total, in blocks of rows up to the diagonal.

    Each block is added by the matrix product itself, without an intermediate result.
    """
    size = total.shape[-1]
    total = total.view(-1, size, size)
    left, right = (part.reshape(-1, *part.shape[-2:]) for part in (left, right))
    for start in range(0, size, BLOCK):
        rows = slice(start, min(start + BLOCK, size))
        total[:, rows, : rows.stop].baddbmm_(left[..., rows].mT, right[..., : rows.stop])


def _with_weights(
    matrices: Tensor, weights: Tensor | None, rows: slice
) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Return pairs of a matrix and the column of its weights in these rows.

    Without weights the second part of the only pair is None.
    """
    if weights is None:
        return iter([(matrices, None)])
    return zip(matrices, weights[rows].unsqueeze(-1).unbind(1), strict=True)


class _Apply(Function):
    """The autograd function of φ w."""

    @staticmethod
    def forward(ctx, x, w, rebuild, *tensors):
        ctx.save_for_backward(x, w, *tensors)
        ctx.rebuild, phases = rebuild, rebuild(*tensors)
        out = x.new_empty(*x.shape[:-1], w.shape[-1])
        of_cos, of_sin = w.chunk(2, dim=-2)
        for rows in chunks(x, w.shape[-2]):
            phase = phases(x[..., rows, :])
            out[..., rows, :] = phase.cos() @ of_cos + phase.sin() @ of_sin
        return out

    @staticmethod
    def backward(ctx, grad):
        x, w, *tensors = ctx.saved_tensors
        phases, (needs_x, needs_w) = ctx.rebuild(*tensors), ctx.needs_input_grad[:2]
        gradients = _PhaseGradients(x, phases, needs_x, ctx.needs_input_grad[3:])
        grad_w = torch.zeros_like(w) if needs_w else None
        for rows in chunks(x, w.shape[-2]):
            phi = trig(x[..., rows, :], phases)
            if needs_w:
                grad_w += phi.mT @ grad[..., rows, :]
            if gradients.needed:
                gradients.add(rows, phi, grad[..., rows, :] @ w.mT)
        return gradients.x, grad_w, None, *gradients.tensors


# Boxes are the regions of input space in which frequencies represent the kernel.


Box = tuple[tuple[float, float], ...]  # (low, high) of each input column


def box_of(x: Float[Tensor, "N d"]) -> Box:
    """Return the smallest box that contains the points `x` (N, d).

    An array (N,) is a column of N points on a line.

    Raises:
        TypeError: the points are not numbers, for example dates.
        ValueError: there are no points; or a coordinate is not finite.
    """
    if not isinstance(x, Tensor | list | tuple):
        x = np.asarray(x)  # x may be a table
        if x.dtype.kind not in "fiu":
            raise TypeError(
                f"expected points x (N, d) as numbers, got type {x.dtype}; convert tables with "
                "dates by gp_orff.labelled.readings"
            )
        x = x if x.flags.writeable else x.copy()
    x = torch.as_tensor(x)
    x = x.unsqueeze(-1) if x.dim() == 1 else x
    if x.dim() < 2 or x.shape[-2] == 0:
        raise ValueError(
            f"expected an array (N, d) with at least one point, got shape {tuple(x.shape)}"
        )
    flat = x.detach().reshape(-1, x.shape[-1])
    low, high = flat.amin(0).double(), flat.amax(0).double()
    if not torch.isfinite(low + high).all():
        raise ValueError(
            "expected finite points, got NaN or infinite coordinates; drop these points"
        )
    return tuple(zip(low.tolist(), high.tolist(), strict=True))


def as_box(box: Box, name: str, owner: str = "Grid") -> Box:
    """Return `box` with floats as bounds.

    Args:
        box: one pair (low, high) for each input column.
        name: the name of the argument in error messages.
        owner: the class of the argument in error messages.

    Raises:
        ValueError: a bound is not a finite number; or low > high.
    """
    refuse_units(box, f"{name} of {owner}")
    try:
        bounds = tuple((float(low), float(high)) for low, high in box)
    except (TypeError, ValueError):  # no pairs
        bounds = ()
    if not bounds or not all(low <= high and math.isfinite(high - low) for low, high in bounds):
        raise ValueError(
            f"{owner} expects {name}=((low, high), ...), finite numbers low <= high, one pair for "
            f"each input, got {box}"
        )
    return bounds


def within_box(x: Float[Tensor, "n d"], box: Box) -> Bool[Tensor, "n"]:
    """Return for each of the points x (n, d) whether it lies in the box."""
    low, high = torch.tensor(box, dtype=x.dtype, device=x.device).mT
    return ((x >= low) & (x <= high)).all(-1)


def contains(domain: Box, box: Box) -> bool:
    """Return whether `domain` contains the whole of `box`."""
    return all(
        low <= side[0] and side[1] <= high for side, (low, high) in zip(box, domain, strict=True)
    )


def union(first: Box, second: Box) -> Box:
    """Return the smallest box that contains both boxes."""
    return tuple((min(a[0], b[0]), max(a[1], b[1])) for a, b in zip(first, second, strict=True))


def in_words(box: Box) -> str:
    """Return a box as error messages write it, for example `(0, 1) x (0, 2)`."""
    return " x ".join(f"({low:.6g}, {high:.6g})" for low, high in box)


def rounded(box: Box, steps: Sequence[float]) -> Box:
    """Return `box` with its bounds rounded outward to multiples of `steps`, one for each input.

    The bounds of a constant input do not change.
    """
    bounds = []
    for (low, high), step in zip(box, steps, strict=True):
        if high > low and step > 1e-12 * max(abs(low), abs(high)):
            low, high = math.floor(low / step) * step, math.ceil(high / step) * step
        bounds.append((float(low), float(high)))
    return tuple(bounds)


def far_message(data: Box, requested: Box) -> str:
    """Return the message for points far from the data; it names the most distant column."""
    extent, joint_extent = (
        np.ptp(np.concatenate(boxes, axis=-1), axis=-1) for boxes in ([data], [data, requested])
    )
    smallest = 1e-9 * joint_extent.max() + np.finfo(float).tiny
    column = np.argmax(joint_extent / np.maximum(extent, smallest))
    (low, high), (first, last) = data[column], requested[column]
    return (
        f"expected points near the data, got column {column} from {first:.6g} to {last:.6g} where "
        f"the data are between {low:.6g} and {high:.6g}; no frequency grid covers both, so check "
        "the units and the order of the columns, or predict closer to the data"
    )


def corners(box: Box, device: torch.device) -> Float[Tensor, "2 d"]:
    """Return the lowest and the highest corner of a box, (2, d), in float64 on `device`."""
    return torch.tensor(box, dtype=torch.float64, device=device).mT
