"""Products with the matrix of columns φ(x), chunk by chunk; boxes of inputs."""

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.autograd import Function

from gp_orff.features.phases import Phases
from gp_orff.kernels.base import is_traced
from gp_orff.symbols.base import refuse_units

# Products with the N×2D matrix φ(x) = [cos θ(x) ; sin θ(x)], without storing it.
#
# Each product goes through the points in chunks, and its backward pass computes the columns again,
# so that memory does not grow with N·D. Everything is computed in float64. Backward passes consist
# of differentiable operations: second derivatives exist.


# bytes of φ at once: on a CPU they fit into its cache; on a GPU they outweigh launching kernels
_CHUNK_BYTES = {"cpu": 4 * 2**20, "cuda": 256 * 2**20}


def trig(x: Float[Tensor, "*b N d"], phases: Phases) -> Float[Tensor, "*b N 2*D"]:
    """φ(x), cosines first."""
    phase = phases(x)
    return torch.cat([phase.cos(), phase.sin()], dim=-1)


def moments(
    x: Float[Tensor, "*b N d"],
    phases: Phases,
    y: Float[Tensor, "*b N k"],
    weights: Float[Tensor, "N m"] | None = None,
) -> tuple[Float[Tensor, "*b 2*D 2*D"], Float[Tensor, "*b 2*D k"]]:
    """C = φᵀφ and Z = φᵀy, in one pass over the points and one backward pass.

    With `weights`, C is φᵀ diag(a) φ for each of their columns a, of shape (m, 2D, 2D).
    """
    x, y, *tensors = _broadcast_batches(x, y, *phases.tensors)
    return _Moments.apply(x, y, True, weights, phases.rebuild, *tensors)


def adjoint(
    x: Float[Tensor, "*b N d"], phases: Phases, y: Float[Tensor, "*b N k"]
) -> Float[Tensor, "*b 2*D k"]:
    """Z = φᵀy, without C."""
    x, y, *tensors = _broadcast_batches(x, y, *phases.tensors)
    return _Moments.apply(x, y, False, None, phases.rebuild, *tensors)[1]


def apply(
    x: Float[Tensor, "*b N d"], phases: Phases, w: Float[Tensor, "*b 2*D k"]
) -> Float[Tensor, "*b N k"]:
    """φ w."""
    if is_traced():
        return trig(x, phases) @ w
    x, w, *tensors = _broadcast_batches(x, w, *phases.tensors)
    return _Apply.apply(x, w, phases.rebuild, *tensors)


def chunks(x: Float[Tensor, "*b N d"], width: int) -> Iterator[slice]:
    """Slices of the points, so short that `width` float64 numbers for each point are a chunk."""
    budget = _CHUNK_BYTES.get(x.device.type, _CHUNK_BYTES["cpu"])
    rows = max(1, budget // (8 * width * max(1, x.shape[:-2].numel())))
    return (slice(start, start + rows) for start in range(0, x.shape[-2], rows))


def by_chunks(
    function: Callable[[Float[Tensor, "*b m d"]], Float[Tensor, "*b m k"]],
    x: Float[Tensor, "*b N d"],
    width: int,
) -> Float[Tensor, "*b N k"]:
    """function(x), computed by chunks of points for which it needs `width` numbers each.

    Results go into one array, since a list of pieces would fragment the heap.
    """
    out = None
    for rows in chunks(x, width):
        part = function(x[..., rows, :])
        if out is None:
            out = part.new_empty(*part.shape[:-2], x.shape[-2], part.shape[-1])
        out[..., rows, :] = part
    return out


def _broadcast_batches(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The matrices in float64, with one batch shape."""
    batch = torch.broadcast_shapes(*(t.shape[:-2] for t in tensors))
    return tuple(t.double().expand(*batch, *t.shape[-2:]) for t in tensors)


class _PhaseGradients:
    """Accumulates ∂/∂x and the derivatives by the tensors of the phases, chunk by chunk."""

    def __init__(self, x: Tensor, phases: Phases, needs_x: bool, needs_tensors: Sequence[bool]):
        self._points, self._phases = x, phases
        self.x = torch.empty_like(x) if needs_x else None
        self.tensors = [torch.zeros_like(t) if any(needs_tensors) else None for t in phases.tensors]
        self.needed = needs_x or any(needs_tensors)

    def add(self, rows: slice, phi: Tensor, grad_phi: Tensor) -> None:
        """Add the part of ∂/∂φ of one chunk: ∂/∂θ = cos θ · ∂/∂(sin θ) − sin θ · ∂/∂(cos θ)."""
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
    """C, or None, and Z."""

    @staticmethod
    def forward(ctx, x, y, gram, weights, rebuild, *tensors):
        ctx.save_for_backward(x, y, weights, *tensors)
        ctx.rebuild, phases = rebuild, rebuild(*tensors)
        d, columns = phases.num_frequencies, 2 * phases.num_frequencies
        num_grams = () if weights is None else (weights.shape[-1],)
        c = x.new_zeros(*num_grams, *x.shape[:-2], columns, columns) if gram else None
        z = x.new_zeros(*x.shape[:-2], columns, y.shape[-1])
        for rows in chunks(x, columns):
            phase = phases(x[..., rows, :])
            cos, sin = phase.cos(), phase.sin()
            if gram:  # C is symmetric: three of its four blocks suffice
                for block, a in _with_weights(c, weights, rows):
                    left, right = (cos, sin) if a is None else (a * cos, a * sin)
                    block[..., :d, :d] += left.mT @ cos
                    block[..., :d, d:] += left.mT @ sin
                    block[..., d:, d:] += right.mT @ sin
            z[..., :d, :] += cos.mT @ y[..., rows, :]
            z[..., d:, :] += sin.mT @ y[..., rows, :]
        if gram:
            c[..., d:, :d] = c[..., :d, d:].mT
        return c, z

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


def _with_weights(
    matrices: Tensor, weights: Tensor | None, rows: slice
) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Each matrix with the weights of these rows, as a column; None if there are no weights."""
    if weights is None:
        return iter([(matrices, None)])
    return zip(matrices, weights[rows].unsqueeze(-1).unbind(1), strict=True)


class _Apply(Function):
    """φ w."""

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


# Boxes: the regions of input space that frequencies are made for.


Box = tuple[tuple[float, float], ...]  # (low, high) of each input column


def box_of(x: Float[Tensor, "N d"]) -> Box:
    """The smallest box that contains the points x, (N, d), or (N,) on a line.

    Raises:
        TypeError: points that are not numbers, such as dates.
        ValueError: no points, or points that are not finite.
    """
    if not isinstance(x, Tensor | list | tuple):
        x = np.asarray(x)  # of a table, too
        if x.dtype.kind not in "fiu":
            raise TypeError(
                f"expected points x (N, d) as numbers, got type {x.dtype}; read tables with dates "
                "by gp_orff.labelled.readings"
            )
        x = x if x.flags.writeable else x.copy()
    x = torch.as_tensor(x)
    x = x.unsqueeze(-1) if x.dim() == 1 else x
    if x.dim() < 2 or x.shape[-2] == 0:
        raise ValueError(
            f"expected at least one point, in an array (N, d), got shape {tuple(x.shape)}"
        )
    flat = x.detach().reshape(-1, x.shape[-1])
    low, high = flat.amin(0).double(), flat.amax(0).double()
    if not torch.isfinite(low + high).all():
        raise ValueError("expected finite points, got NaN or infinite coordinates; drop them")
    return tuple(zip(low.tolist(), high.tolist(), strict=True))


def as_box(box: Box, name: str, owner: str = "Grid") -> Box:
    """`box` with floats as bounds, after a check; errors call it the argument `name` of `owner`."""
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
    """Which of the points x lie in a box."""
    low, high = torch.tensor(box, dtype=x.dtype, device=x.device).mT
    return ((x >= low) & (x <= high)).all(-1)


def contains(domain: Box, box: Box) -> bool:
    """Whether the domain contains the whole box."""
    return all(
        low <= side[0] and side[1] <= high for side, (low, high) in zip(box, domain, strict=True)
    )


def union(first: Box, second: Box) -> Box:
    """The smallest box that contains both."""
    return tuple((min(a[0], b[0]), max(a[1], b[1])) for a, b in zip(first, second, strict=True))


def in_words(box: Box) -> str:
    """A box as error messages write it: (0, 1) x (0, 2)."""
    return " x ".join(f"({low:.6g}, {high:.6g})" for low, high in box)


def rounded(box: Box, steps: Sequence[float]) -> Box:
    """A box whose bounds are rounded outward to multiples of a step along each input; those of a
    constant input stay."""
    bounds = []
    for (low, high), step in zip(box, steps, strict=True):
        if high > low and step > 1e-12 * max(abs(low), abs(high)):
            low, high = math.floor(low / step) * step, math.ceil(high / step) * step
        bounds.append((float(low), float(high)))
    return tuple(bounds)


def far_message(data: Box, requested: Box) -> str:
    """The message for points far from the data, with the column in which they are farthest."""
    extent, joint_extent = (
        np.ptp(np.concatenate(boxes, axis=-1), axis=-1) for boxes in ([data], [data, requested])
    )
    smallest = 1e-9 * joint_extent.max() + np.finfo(float).tiny
    column = np.argmax(joint_extent / np.maximum(extent, smallest))
    (low, high), (first, last) = data[column], requested[column]
    return (
        f"expected points near the data, got column {column} from {first:.6g} to {last:.6g} where "
        f"the data are between {low:.6g} and {high:.6g}: no frequency grid covers both; check the "
        "units and the order of the columns, or predict closer to the data"
    )


def corners(box: Box, device: torch.device) -> Float[Tensor, "2 d"]:
    """The lowest and the highest point of a box."""
    return torch.tensor(box, dtype=torch.float64, device=device).mT
