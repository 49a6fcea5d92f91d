"""Posteriors under the transforms of `torch.func`, and in `torch.export`.

The mean and the variance of a field at one point do not depend on other points. Under `jacrev`,
`jvp`, `vmap` and their compositions, `pointwise` evaluates such a function on plain tensors, with
all of its checks. Derivatives of any order follow by automatic differentiation of the function at
each point. The algorithms of the package therefore need no code for transforms.
"""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

Values = Callable[[Float[Tensor, "n d"]], Float[Tensor, "n *q"]]


def pointwise(function: Values, x: Float[Tensor, "n d"]) -> Float[Tensor, "n *q"]:
    """Evaluate a function that maps each point separately, under any transform of `torch.func`.

    Args:
        function: maps points (n, d) to values (n, ...). It is called with plain tensors.
        x: points (n, d), as a transform passes them.
    """
    return _Derivatives.apply(x, function, 0)


def derivatives(function: Values, x: Float[Tensor, "n d"], order: int) -> Float[Tensor, "n *q"]:
    """All derivatives of a given order at n points. Each order adds an axis of length d."""
    if order == 0:
        return function(x)
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        value = function(x)
        for left in reversed(range(order)):
            columns = value.flatten(1).unbind(1)
            rows = [
                torch.autograd.grad(column.sum(), x, create_graph=left > 0, retain_graph=True)[0]
                if column.requires_grad
                else torch.zeros_like(x)
                for column in columns
            ]
            value = torch.stack(rows, 1).reshape(*value.shape, x.shape[-1])
    return value.detach()


class _Derivatives(torch.autograd.Function):
    """The derivatives of a given order, as a function whose derivatives have the next order."""

    @staticmethod
    def forward(x: Tensor, function: Values, order: int) -> Tensor:
        return derivatives(function, x, order)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        x, ctx.function, ctx.order = inputs
        ctx.save_for_backward(x)
        ctx.save_for_forward(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (x,) = ctx.saved_tensors
        jacobian = _Derivatives.apply(x, ctx.function, ctx.order + 1)
        return (gradient.unsqueeze(-1) * jacobian).flatten(1, -2).sum(1), None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        (x,) = ctx.saved_tensors
        jacobian = _Derivatives.apply(x, ctx.function, ctx.order + 1)
        middle = (1,) * (jacobian.dim() - 2)
        return (jacobian * tangent.reshape(len(tangent), *middle, -1)).sum(-1)

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple, x: Tensor, function: Values, order: int
    ) -> tuple[Tensor, int]:
        x = x.movedim(in_dims[0], 0)
        values = _Derivatives.apply(x.flatten(0, 1), function, order)
        return values.unflatten(0, x.shape[:2]), 0
