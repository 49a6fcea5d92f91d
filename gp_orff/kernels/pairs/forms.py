"""Covariances as sums Σ c Φ of numbers c of pairs of points times forms Φ of directions v and w.

Terms of a kernel that have a form in common add their numbers first. Numbers of pairs are matrices
(n, m); directions come before them.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd import Function


class Form(Protocol):
    """What depends on directions."""

    @property
    def factors(self) -> tuple[Tensor, ...]:
        """The tensors that it is made of."""

    def added(self, total: Tensor, number: Float[Tensor, "*b #n #m"]) -> Tensor:
        """`total` + c Φ, (*b, q, r, n, m)."""

    def cotangents(
        self, number: Float[Tensor, "*b #n #m"], gradient: Float[Tensor, "*b q r n m"]
    ) -> tuple[Tensor | None, ...]:
        """The derivatives of Σ G ∘ c Φ in c and in every factor, before they are summed over axes
        that were broadcast; None for factors that need none."""


Products = Mapping[Form, Float[Tensor, "*b #n #m"]]
"""The number c of every form Φ in Σ c Φ."""


@dataclass(frozen=True, eq=False)
class Plain:
    """Φ itself, the same for all pairs or one for each."""

    value: Float[Tensor, "*b q r #n #m"]

    @property
    def factors(self) -> tuple[Tensor, ...]:
        return (self.value,)

    def added(self, total: Tensor, number: Tensor) -> Tensor:
        return torch.addcmul(total, _of_pairs(number), self.value)

    def cotangents(self, number: Tensor, gradient: Tensor) -> tuple[Tensor | None, ...]:
        of_value = _of_pairs(number) * gradient if self.value.requires_grad else None
        return _sum(_sum(gradient * self.value, -4), -3), of_value


@dataclass(frozen=True, eq=False)
class Outer:
    """Φ = l rᵀ, with l of the left directions and r of the right ones."""

    left: Float[Tensor, "*b q n m"]
    right: Float[Tensor, "*b r n m"]

    @property
    def factors(self) -> tuple[Tensor, ...]:
        return self.left, self.right

    def added(self, total: Tensor, number: Tensor) -> Tensor:
        left = number.unsqueeze(-3) * self.left
        return torch.addcmul(total, left.unsqueeze(-3), self.right.unsqueeze(-4))

    def cotangents(self, number: Tensor, gradient: Tensor) -> tuple[Tensor | None, ...]:
        to_left = _sum(gradient * self.right.unsqueeze(-4), -3)
        of_number = _sum(to_left * self.left, -3)
        if not self.left.requires_grad:
            return of_number, None, None
        to_right = _sum(gradient * self.left.unsqueeze(-3), -4)
        return of_number, number.unsqueeze(-3) * to_left, number.unsqueeze(-3) * to_right


def _of_pairs(number: Float[Tensor, "*b #n #m"]) -> Float[Tensor, "*b 1 1 #n #m"]:
    return number[..., None, None, :, :]


def _sum(values: Tensor, axis: int) -> Tensor:
    """Over an axis of directions; of one direction, without a copy."""
    return values.squeeze(axis) if values.shape[axis] == 1 else values.sum(axis)


def collected(products: Iterable[tuple[Form, Float[Tensor, "*b #n #m"]]]) -> Products:
    """The sum of the numbers of every form."""
    numbers: dict[Form, Tensor] = {}
    for form, number in products:
        numbers[form] = numbers[form] + number if form in numbers else number
    return numbers


def total(products: Products) -> Float[Tensor, "*b q r n m"]:
    """Σ c Φ, differentiable any number of times."""
    return _Total.apply(products, *_tensors(products))


def cotangents(
    products: Products, gradient: Float[Tensor, "*b q r n m"]
) -> list[tuple[Tensor, Tensor]]:
    """The tensors of Σ c Φ that require derivatives of Σ G ∘ c Φ, and these derivatives."""
    pairs = zip(_tensors(products), _gradients(products, gradient), strict=True)
    return [(tensor, own) for tensor, own in pairs if tensor.requires_grad]


class _Total(Function):
    """Σ c Φ, whose derivatives hold no products for all pairs of directions."""

    @staticmethod
    def forward(ctx, products: Products, *tensors: Tensor) -> Tensor:
        ctx.products = products
        value = tensors[0].new_zeros(())
        for form, number in products.items():
            value = form.added(value, number)
        return value

    @staticmethod
    def backward(ctx, gradient: Tensor):
        return None, *_gradients(ctx.products, gradient)


def _tensors(products: Products) -> list[Tensor]:
    return [t for form, number in products.items() for t in (number, *form.factors)]


def _gradients(products: Products, gradient: Tensor) -> list[Tensor | None]:
    found = [own for form, number in products.items() for own in form.cotangents(number, gradient)]
    return [
        None if own is None else own.sum_to_size(tensor.shape)
        for tensor, own in zip(_tensors(products), found, strict=True)
    ]
