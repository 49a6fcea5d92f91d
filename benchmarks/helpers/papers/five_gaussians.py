"""The fields of five Gaussians of Brault et al. 2016, Section 4.2 and Figure 7, and data of them.

The centres and the signs are those of the paper. Here the Gaussians are exp(−‖x − c‖²/(2·0.5²)) on
the box [−2, 2]². Points are uniform. The standard deviation of the independent noise is a tenth of
the root mean square of the field.
"""

from dataclasses import dataclass
from functools import cache

import torch
from jaxtyping import Float
from torch import Tensor

from helpers.fields import Field

CENTRES = ((0.0, 0.0), (0.0, 1.0), (0.0, -1.0), (-1.0, 0.0), (1.0, 0.0))
SIGNS = (1.0, 1.0, 1.0, -1.0, -1.0)
WIDTH, HALF = 0.5, 2.0
BOX = ((-HALF, HALF),) * 2
NOISE = 0.1  # its standard deviation over the root mean square of a component


def _bumps(x: Float[Tensor, "N 2"]) -> tuple[Float[Tensor, "N 5 2"], Float[Tensor, "N 5"]]:
    lags = x.unsqueeze(-2) - torch.tensor(CENTRES, dtype=x.dtype)
    return lags, torch.tensor(SIGNS).to(x) * (-lags.square().sum(-1) / (2 * WIDTH**2)).exp()


def potential(x: Float[Tensor, "N 2"]) -> Float[Tensor, "N"]:
    return _bumps(x)[1].sum(-1)


def curl_free(x: Float[Tensor, "N 2"]) -> Float[Tensor, "N 2"]:
    """Return the gradient of the potential."""
    lags, bumps = _bumps(x)
    return -(bumps.unsqueeze(-1) * lags).sum(-2) / WIDTH**2


def divergence_free(x: Float[Tensor, "N 2"]) -> Float[Tensor, "N 2"]:
    """Return the gradient of the potential, rotated by 90 degrees."""
    first, second = curl_free(x).unbind(-1)
    return torch.stack([-second, first], dim=-1)


FIELDS: dict[str, Field] = {"curl-free": curl_free, "divergence-free": divergence_free}


def mesh(side: int) -> Float[Tensor, "N 2"]:
    """Return a grid of side × side points in the box."""
    axis = torch.linspace(-HALF, HALF, side, dtype=torch.float64)
    return torch.cartesian_prod(axis, axis)


@cache
def mean_square() -> float:
    """Return the mean square of a component of the field over the box."""
    return curl_free(mesh(201)).square().mean().item()


@dataclass(frozen=True)
class Sample:
    """Random points, the field there, and noisy observations of it."""

    x: Float[Tensor, "N 2"]
    truth: Float[Tensor, "N 2"]
    y: Float[Tensor, "N 2"]

    @classmethod
    def of(cls, field: Field, points: int, seed: int) -> "Sample":
        generator = torch.Generator().manual_seed(seed)
        random = {"generator": generator, "dtype": torch.float64}
        x = HALF * (2 * torch.rand(points, 2, **random) - 1)
        truth = field(x)
        noise = NOISE * mean_square() ** 0.5
        return cls(x, truth, truth + noise * torch.randn(points, 2, **random))
