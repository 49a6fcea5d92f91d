"""Products with trigonometric columns φ(x) = [cos θ(x) ; sin θ(x)], never held whole.

φ is N×2D. Each product here walks over chunks of points, and its backward pass computes the
columns anew, so that memory does not grow with N·D. Everything is computed in float64. Backward
passes are made of differentiable operations: second derivatives exist.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd import Function

# of φ: what a cache holds; on a GPU, what hides the cost of starting kernels
_CHUNK_BYTES = {"cpu": 4 * 2**20, "cuda": 256 * 2**20}


class Phases(ABC):
    """θ_k(x) = ⟨ω_k, x⟩ of D frequencies, and its derivatives, by whatever transform gives them."""

    num_frequencies: int
    omega: Float[Tensor, "*b D d"]
    tensors: tuple[Tensor, ...]  # the differentiable parts, each ending in a matrix

    @abstractmethod
    def rebuild(self, *tensors: Tensor) -> "Phases":
        """The same phases of other tensors."""

    @abstractmethod
    def select(self, frequencies: Int[Tensor, "k"]) -> "Phases":
        """Those of some frequencies."""

    @abstractmethod
    def __call__(self, x: Float[Tensor, "*b N d"]) -> Float[Tensor, "*b N D"]:
        """θ(x)."""

    @abstractmethod
    def point_gradient(self, grad: Float[Tensor, "*b N D"]) -> Float[Tensor, "*b N d"]:
        """∂/∂x from ∂/∂θ."""

    @abstractmethod
    def gradients(
        self, x: Float[Tensor, "*b N d"], grad: Float[Tensor, "*b N D"]
    ) -> Sequence[Tensor]:
        """∂/∂(each of the tensors) from ∂/∂θ."""


@dataclass(frozen=True)
class LinearPhases(Phases):
    """Those of any ω, by a product of matrices."""

    omega: Float[Tensor, "*b D d"]

    @property
    def num_frequencies(self) -> int:
        return self.omega.shape[-2]

    @property
    def tensors(self) -> tuple[Tensor]:
        return (self.omega,)

    def rebuild(self, omega: Float[Tensor, "*b D d"]) -> "LinearPhases":
        return LinearPhases(omega)

    def select(self, frequencies: Int[Tensor, "k"]) -> "LinearPhases":
        return LinearPhases(self.omega[..., frequencies, :])

    def __call__(self, x: Float[Tensor, "*b N d"]) -> Float[Tensor, "*b N D"]:
        return x @ self.omega.mT

    def point_gradient(self, grad: Float[Tensor, "*b N D"]) -> Float[Tensor, "*b N d"]:
        return grad @ self.omega

    def gradients(self, x: Tensor, grad: Tensor) -> tuple[Float[Tensor, "*b D d"]]:
        return (grad.mT @ x,)


def trig(x: Float[Tensor, "*b N d"], phases: Phases) -> Float[Tensor, "*b N 2*D"]:
    """φ(x), its cosine columns first."""
    phase = phases(x)
    return torch.cat([phase.cos(), phase.sin()], dim=-1)


def moments(
    x: Float[Tensor, "*b N d"],
    phases: Phases,
    y: Float[Tensor, "*b N k"],
    weights: Float[Tensor, "N m"] | None = None,
) -> tuple[Float[Tensor, "*b 2*D 2*D"], Float[Tensor, "*b 2*D k"]]:
    """C = φᵀφ and Z = φᵀy, in one pass and one backward pass.

    With weights, C is φᵀ diag(a) φ for each of their columns a, (m, 2D, 2D).
    """
    x, y, *tensors = _same_batch(x, y, *phases.tensors)
    return _Moments.apply(x, y, True, weights, phases.rebuild, *tensors)


def adjoint(
    x: Float[Tensor, "*b N d"], phases: Phases, y: Float[Tensor, "*b N k"]
) -> Float[Tensor, "*b 2*D k"]:
    """Z = φᵀy alone."""
    x, y, *tensors = _same_batch(x, y, *phases.tensors)
    return _Moments.apply(x, y, False, None, phases.rebuild, *tensors)[1]


def apply(
    x: Float[Tensor, "*b N d"], phases: Phases, w: Float[Tensor, "*b 2*D k"]
) -> Float[Tensor, "*b N k"]:
    """φ w."""
    x, w, *tensors = _same_batch(x, w, *phases.tensors)
    return _Apply.apply(x, w, phases.rebuild, *tensors)


def chunks(x: Float[Tensor, "*b N d"], width: int) -> Iterator[slice]:
    """Slices of points for which a float64 array of `width` numbers a point stays small."""
    budget = _CHUNK_BYTES.get(x.device.type, _CHUNK_BYTES["cpu"])
    rows = max(1, budget // (8 * width * max(1, x.shape[:-2].numel())))
    return (slice(start, start + rows) for start in range(0, x.shape[-2], rows))


def by_chunks(
    function: Callable[[Float[Tensor, "*b m d"]], Float[Tensor, "*b m k"]],
    x: Float[Tensor, "*b N d"],
    width: int,
) -> Float[Tensor, "*b N k"]:
    """function(x), chunk by chunk into one array: a list of pieces would fragment the heap."""
    out = None
    for rows in chunks(x, width):
        part = function(x[..., rows, :])
        if out is None:
            out = part.new_empty(*part.shape[:-2], x.shape[-2], part.shape[-1])
        out[..., rows, :] = part
    return out


def _same_batch(*tensors: Tensor) -> tuple[Tensor, ...]:
    batch = torch.broadcast_shapes(*(t.shape[:-2] for t in tensors))
    return tuple(t.double().expand(*batch, *t.shape[-2:]) for t in tensors)


class _PhaseGradients:
    """∂/∂x and ∂/∂(the tensors of the phases) from ∂/∂φ, chunk by chunk."""

    def __init__(self, x: Tensor, phases: Phases, needs_x: bool, needs_tensors: Sequence[bool]):
        self._points, self._phases = x, phases
        self.x = torch.empty_like(x) if needs_x else None
        self.tensors = [torch.zeros_like(t) if any(needs_tensors) else None for t in phases.tensors]
        self.needed = needs_x or any(needs_tensors)

    def add(self, rows: slice, phi: Tensor, grad_phi: Tensor) -> None:
        """−sin · ∂/∂cos + cos · ∂/∂sin is ∂/∂phase."""
        cos, sin = phi.chunk(2, dim=-1)
        grad_cos, grad_sin = grad_phi.chunk(2, dim=-1)
        grad = torch.addcmul(cos * grad_sin, sin, grad_cos, value=-1)
        if self.x is not None:
            self.x[..., rows, :] = self._phases.point_gradient(grad)
        if self.tensors[0] is not None:
            parts = self._phases.gradients(self._points[..., rows, :], grad)
            for total, own in zip(self.tensors, parts, strict=True):
                total += own


class _Moments(Function):
    @staticmethod
    def forward(ctx, x, y, gram, weights, rebuild, *tensors):
        ctx.save_for_backward(x, y, weights, *tensors)
        ctx.rebuild, phases = rebuild, rebuild(*tensors)
        d, columns = phases.num_frequencies, 2 * phases.num_frequencies
        kinds = () if weights is None else (weights.shape[-1],)
        c = x.new_zeros(*kinds, *x.shape[:-2], columns, columns) if gram else None
        z = x.new_zeros(*x.shape[:-2], columns, y.shape[-1])
        for rows in chunks(x, columns):
            phase = phases(x[..., rows, :])
            cos, sin = phase.cos(), phase.sin()
            if gram:  # symmetric: three blocks of four
                for own, a in _weighted(c, weights, rows):
                    left, right = (cos, sin) if a is None else (a * cos, a * sin)
                    own[..., :d, :d] += left.mT @ cos
                    own[..., :d, d:] += left.mT @ sin
                    own[..., d:, d:] += right.mT @ sin
            z[..., :d, :] += cos.mT @ y[..., rows, :]
            z[..., d:, :] += sin.mT @ y[..., rows, :]
        if gram:
            c[..., d:, :d] = c[..., :d, d:].mT
        return c, z

    @staticmethod
    def backward(ctx, grad_c, grad_z):
        x, y, weights, *tensors = ctx.saved_tensors
        phases, (needs_x, needs_y) = ctx.rebuild(*tensors), ctx.needs_input_grad[:2]
        found = _PhaseGradients(x, phases, needs_x, ctx.needs_input_grad[5:])
        grad_y = torch.empty_like(y) if needs_y else None
        both = grad_c + grad_c.mT if grad_c is not None else None
        for rows in chunks(x, grad_z.shape[-2]):
            phi = trig(x[..., rows, :], phases)
            if needs_y:
                grad_y[..., rows, :] = phi @ grad_z
            if found.needed:
                grad_phi = y[..., rows, :] @ grad_z.mT
                if both is not None:
                    for own, a in _weighted(both, weights, rows):
                        grad_phi += phi @ own if a is None else a * (phi @ own)
                found.add(rows, phi, grad_phi)
        return found.x, grad_y, None, None, None, *found.tensors


def _weighted(
    matrices: Tensor, weights: Tensor | None, rows: slice
) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Each matrix with its weights, a column."""
    if weights is None:
        return iter([(matrices, None)])
    return zip(matrices, weights[rows].unsqueeze(-1).unbind(1), strict=True)


class _Apply(Function):
    @staticmethod
    def forward(ctx, x, w, rebuild, *tensors):
        ctx.save_for_backward(x, w, *tensors)
        ctx.rebuild, phases = rebuild, rebuild(*tensors)
        out = x.new_empty(*x.shape[:-1], w.shape[-1])
        for rows in chunks(x, w.shape[-2]):
            out[..., rows, :] = trig(x[..., rows, :], phases) @ w
        return out

    @staticmethod
    def backward(ctx, grad):
        x, w, *tensors = ctx.saved_tensors
        phases, (needs_x, needs_w) = ctx.rebuild(*tensors), ctx.needs_input_grad[:2]
        found = _PhaseGradients(x, phases, needs_x, ctx.needs_input_grad[3:])
        grad_w = torch.zeros_like(w) if needs_w else None
        for rows in chunks(x, w.shape[-2]):
            phi = trig(x[..., rows, :], phases)
            if needs_w:
                grad_w += phi.mT @ grad[..., rows, :]
            if found.needed:
                found.add(rows, phi, grad[..., rows, :] @ w.mT)
        return found.x, grad_w, None, *found.tensors
