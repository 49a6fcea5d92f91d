"""Any number of observations of a known field, in memory or generated again in every pass."""

import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

import gp_orff
from helpers.fields import Field, curl_free, divergence_free, field_of, scores

NOISE = 0.3
EXTENT = {2: 9.0, 3: 4.0}
CHUNK = 2**18


def true_kernel(dims: int):
    if dims == 3:
        return curl_free(1.0, 3)
    weak = curl_free(1.0)
    weak.outputscale = 0.25 * weak.outputscale
    return weak + divergence_free(1.5)


class Chunks:
    """Chunks of observations that are generated again in every pass; `seconds` is the time for
    this."""

    def __init__(self, field: Field, points: int, dims: int):
        self.field, self.points, self.dims = field, points, dims
        self.seconds = 0.0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for start in range(0, self.points, CHUNK):
            began = time.perf_counter()
            generator = torch.Generator().manual_seed(1 + start)
            shape = (min(CHUNK, self.points - start), self.dims)
            x = EXTENT[self.dims] * torch.rand(*shape, generator=generator, dtype=torch.float64)
            noise = NOISE * torch.randn(*shape, generator=generator, dtype=torch.float64)
            y = self.field(x) + noise
            self.seconds += time.perf_counter() - began
            yield x, y


@dataclass(frozen=True)
class Problem:
    """Chunks of observations, and the true field at held-out points."""

    chunks: Chunks
    xs: Float[Tensor, "2000 d"]
    truth: Float[Tensor, "2000 p"]

    @classmethod
    def of(cls, points: int, dims: int) -> "Problem":
        field = field_of(true_kernel(dims), ((0.0, EXTENT[dims]),) * dims)
        generator = torch.Generator().manual_seed(0)
        xs = EXTENT[dims] * torch.rand(2000, dims, generator=generator, dtype=torch.float64)
        return cls(Chunks(field, points, dims), xs, field(xs))

    def in_memory(self) -> tuple[Float[Tensor, "N d"], Float[Tensor, "N p"]]:
        x, y = map(torch.cat, zip(*self.chunks, strict=True))
        return x, y

    def scores(self, posterior: gp_orff.FieldPosterior) -> dict[str, float]:
        return scores(posterior.mean(self.xs), posterior.variance(self.xs), self.truth)


@torch.no_grad()
def least_sd(points: int, dims: int, nodes: int) -> float:
    """Return the smallest possible root mean posterior variance of a component, for `points`
    points.

    It follows from the eigenvalues λ of the covariance operator on the box and the noise variance
    σ², as √(Σ λσ²/(nλ + σ²) / p). This assumes uniform, dense points. On average, no estimate of a
    field from this prior is more accurate.
    """
    ticks, weights = (torch.from_numpy(part) for part in np.polynomial.legendre.leggauss(nodes))
    x = torch.cartesian_prod(*[0.5 * EXTENT[dims] * (1 + ticks)] * dims)
    roots = torch.cartesian_prod(*[0.5 * weights] * dims).prod(-1).sqrt().repeat_interleave(dims)
    covariance = roots[:, None] * true_kernel(dims).double()(x).to_dense() * roots
    variances = torch.linalg.eigvalsh(covariance).clamp_min(0.0)
    shares = variances * NOISE**2 / (points * variances + NOISE**2)
    return (shares.sum() / dims).sqrt().item()
