"""A field on a plane, seen in longitude and latitude."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from gp_orff.labelled.plane import LocalPlane
from gp_orff.symbols.base import Symbol


class Field(Protocol):
    """The part of `FieldPosterior` that maps use."""

    @property
    def num_inputs(self) -> int: ...

    @property
    def num_outputs(self) -> int: ...

    @property
    def space(self) -> tuple[int, ...]: ...

    def mean(self, x: Float[Tensor, "n d"], symbol: Symbol | None) -> Float[Tensor, "n q"]: ...

    def variance(self, x: Float[Tensor, "n d"], symbol: Symbol | None) -> Float[Tensor, "n q"]: ...

    def pointwise_covariance(
        self, x: Float[Tensor, "n d"], symbol: Symbol | None
    ) -> Float[Tensor, "n q q"]: ...


@dataclass(frozen=True)
class ProjectedField:
    """The field at longitude and latitude, with vectors to the east and north.

    Args:
        field: the field on the plane.
        plane: the projection.
        columns: those of longitude and latitude among the inputs.
    """

    field: Field
    plane: LocalPlane
    columns: tuple[int, int]

    @property
    def num_inputs(self) -> int:
        return self.field.num_inputs

    @property
    def num_outputs(self) -> int:
        return self.field.num_outputs

    @property
    def space(self) -> tuple[int, ...]:
        return self.field.space

    def in_km(self, inputs: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """The attributes of inputs, with the unit of those of the plane, and of a height's unless
        it has one."""
        heights = self.space if self.num_outputs == len(self.space) else ()  # beside a vector
        km = {"units": "km"}
        return [
            km if i in self.columns else {**km, **own} if i in heights else own
            for i, own in enumerate(inputs)
        ]

    def mean(self, x: Float[Tensor, "n d"], symbol: Symbol | None) -> Float[Tensor, "n q"]:
        mean, turn = self.field.mean(self._points(x), symbol), self._turn(x, symbol)
        return mean if turn is None else (turn @ mean.unsqueeze(-1)).squeeze(-1)

    def variance(self, x: Float[Tensor, "n d"], symbol: Symbol | None) -> Float[Tensor, "n q"]:
        points, turn = self._points(x), self._turn(x, symbol)
        if turn is None:
            return self.field.variance(points, symbol)
        covariance = self.field.pointwise_covariance(points, symbol)
        return (turn @ covariance * turn).sum(-1)

    def pointwise_covariance(
        self, x: Float[Tensor, "n d"], symbol: Symbol | None
    ) -> Float[Tensor, "n q q"]:
        covariance = self.field.pointwise_covariance(self._points(x), symbol)
        turn = self._turn(x, symbol)
        return covariance if turn is None else turn @ covariance @ turn.mT

    def _places(self, x: Float[Tensor, "n d"]) -> Float[np.ndarray, "n 2"]:
        return x[:, list(self.columns)].numpy()

    def _points(self, x: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
        """The inputs of the model: km in the plane, and other columns as they are."""
        points = x.clone()
        points[:, list(self.columns)] = torch.from_numpy(self.plane.forward(self._places(x)))
        return points

    def _turn(self, x: Float[Tensor, "n d"], symbol: Symbol | None) -> Tensor | None:
        """The matrices (n, q, q) from the outputs in the plane to those of the east and north.

        p outputs are a vector, p·d the derivatives of one, along the d columns of space. With two
        components, divided by k in the plane, a symbol in units of lengths to the power n gets the
        factor k^(1−n).
        """
        p, space = self.num_outputs, len(self.space)
        q = p if symbol is None else symbol.num_outputs(p)
        if not self.plane.vectors or p == 1:
            return None
        frame = torch.from_numpy(self.plane.frame(self._places(x), p))
        scale = frame[:, :2, :2].det() ** -0.5  # k, or 1
        power = 0 if symbol is None else symbol.length_power or 0
        factor = (scale**-power)[:, None, None]
        vector = frame.inverse()
        if q == 1:
            return factor * scale[:, None, None]
        if q == p:
            return factor * vector
        if q != p * space or self.space[:2] != self.columns:
            raise ValueError(
                f"expected a symbol with 1 output, {p} components of a vector or their {p * space} "
                f"derivatives to turn to the east and north, got {q} outputs; evaluate it at "
                "project.forward(places), in the axes of the plane"
            )
        along = torch.eye(space, dtype=torch.float64).repeat(len(x), 1, 1)
        along[:, :2, :2] = vector[:, :2, :2] / scale[:, None, None]
        return factor * torch.einsum("nij,nkl->nikjl", vector, along).reshape(len(x), q, q)
