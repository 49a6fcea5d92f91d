"""Products with trigonometric columns φ(x) = [cos⟨ω_k, x⟩ ; sin⟨ω_k, x⟩], never held whole.

φ is N×2D. Each product here walks over chunks of points, and its backward pass computes the
columns anew, so that memory does not grow with N·D. Everything is computed in float64. Backward
passes are made of differentiable operations: second derivatives exist.
"""

from collections.abc import Callable, Iterator

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd import Function

# of φ: what a cache holds; on a GPU, what hides the cost of starting kernels
_CHUNK_BYTES = {"cpu": 4 * 2**20, "cuda": 256 * 2**20}


def trig(x: Float[Tensor, "*b N d"], omega: Float[Tensor, "*b D d"]) -> Float[Tensor, "*b N 2*D"]:
    """φ(x), its cosine columns first."""
    phase = x @ omega.mT
    return torch.cat([phase.cos(), phase.sin()], dim=-1)


def moments(
    x: Float[Tensor, "*b N d"],
    omega: Float[Tensor, "*b D d"],
    y: Float[Tensor, "*b N k"],
    weights: Float[Tensor, "N m"] | None = None,
) -> tuple[Float[Tensor, "*b 2*D 2*D"], Float[Tensor, "*b 2*D k"]]:
    """C = φᵀφ and Z = φᵀy, in one pass and one backward pass.

    With weights, C is φᵀ diag(a) φ for each of their columns a, (m, 2D, 2D).
    """
    return _Moments.apply(*_same_batch(x, omega, y), True, weights)


def adjoint(
    x: Float[Tensor, "*b N d"], omega: Float[Tensor, "*b D d"], y: Float[Tensor, "*b N k"]
) -> Float[Tensor, "*b 2*D k"]:
    """Z = φᵀy alone."""
    return _Moments.apply(*_same_batch(x, omega, y), False, None)[1]


def apply(
    x: Float[Tensor, "*b N d"], omega: Float[Tensor, "*b D d"], w: Float[Tensor, "*b 2*D k"]
) -> Float[Tensor, "*b N k"]:
    """φ w."""
    return _Apply.apply(*_same_batch(x, omega, w))


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


def _phase_gradient(phi: Tensor, grad_phi: Tensor) -> Tensor:
    """∂/∂phase from ∂/∂φ: −sin · ∂/∂cos + cos · ∂/∂sin."""
    cos, sin = phi.chunk(2, dim=-1)
    grad_cos, grad_sin = grad_phi.chunk(2, dim=-1)
    return torch.addcmul(cos * grad_sin, sin, grad_cos, value=-1)


class _Moments(Function):
    @staticmethod
    def forward(ctx, x, omega, y, gram, weights):
        ctx.save_for_backward(x, omega, y, weights)
        d, columns = omega.shape[-2], 2 * omega.shape[-2]
        kinds = () if weights is None else (weights.shape[-1],)
        c = x.new_zeros(*kinds, *x.shape[:-2], columns, columns) if gram else None
        z = x.new_zeros(*x.shape[:-2], columns, y.shape[-1])
        for rows in chunks(x, columns):
            phase = x[..., rows, :] @ omega.mT
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
        x, omega, y, weights = ctx.saved_tensors
        needs_x, needs_omega, needs_y = ctx.needs_input_grad[:3]
        grad_x = torch.empty_like(x) if needs_x else None
        grad_omega = torch.zeros_like(omega) if needs_omega else None
        grad_y = torch.empty_like(y) if needs_y else None
        both = grad_c + grad_c.mT if grad_c is not None else None
        for rows in chunks(x, 2 * omega.shape[-2]):
            phi = trig(x[..., rows, :], omega)
            if needs_y:
                grad_y[..., rows, :] = phi @ grad_z
            if needs_x or needs_omega:
                grad_phi = y[..., rows, :] @ grad_z.mT
                if both is not None:
                    for own, a in _weighted(both, weights, rows):
                        grad_phi += phi @ own if a is None else a * (phi @ own)
                grad_phase = _phase_gradient(phi, grad_phi)
                if needs_x:
                    grad_x[..., rows, :] = grad_phase @ omega
                if needs_omega:
                    grad_omega += grad_phase.mT @ x[..., rows, :]
        return grad_x, grad_omega, grad_y, None, None


def _weighted(
    matrices: Tensor, weights: Tensor | None, rows: slice
) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Each matrix with its weights, a column."""
    if weights is None:
        return iter([(matrices, None)])
    return zip(matrices, weights[rows].unsqueeze(-1).unbind(1), strict=True)


class _Apply(Function):
    @staticmethod
    def forward(ctx, x, omega, w):
        ctx.save_for_backward(x, omega, w)
        out = x.new_empty(*x.shape[:-1], w.shape[-1])
        for rows in chunks(x, 2 * omega.shape[-2]):
            out[..., rows, :] = trig(x[..., rows, :], omega) @ w
        return out

    @staticmethod
    def backward(ctx, grad):
        x, omega, w = ctx.saved_tensors
        needs_x, needs_omega, needs_w = ctx.needs_input_grad
        grad_x = torch.empty_like(x) if needs_x else None
        grad_omega = torch.zeros_like(omega) if needs_omega else None
        grad_w = torch.zeros_like(w) if needs_w else None
        for rows in chunks(x, 2 * omega.shape[-2]):
            phi = trig(x[..., rows, :], omega)
            if needs_w:
                grad_w += phi.mT @ grad[..., rows, :]
            if needs_x or needs_omega:
                grad_phase = _phase_gradient(phi, grad[..., rows, :] @ w.mT)
                if needs_x:
                    grad_x[..., rows, :] = grad_phase @ omega
                if needs_omega:
                    grad_omega += grad_phase.mT @ x[..., rows, :]
        return grad_x, grad_omega, grad_w
