"""Observations of symbols of a field: a potential at a gauge, no divergence in a box."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from gp_orff.expansion import Expansion, seen_through
from gp_orff.symbols import Symbol


@dataclass(frozen=True)
class Further:
    """m readings y = (Q f)(x) + ε, ε ~ N(0, noise) at each point."""

    symbol: Symbol
    x: Float[Tensor, "m d"]
    y: Float[Tensor, "m q"]
    noise: Float[Tensor, "q q"]
    space: tuple[int, ...]

    @property
    def num_values(self) -> int:
        return self.y.numel()

    def features(self, expansion: Expansion) -> Float[Tensor, "m*q F"]:
        """Those of Q f, differentiable in the expansion."""
        seen = seen_through(self.symbol, expansion, self.space)
        features = seen.features(self.x)
        referred = self.symbol.referred(self.x, self.space)
        return features if referred is None else features - seen.features(referred)

    def columns(self, num_outputs: int) -> Float[Tensor, "m*q 1+p"]:
        """V = [y, Q(0)]: a constant mean is seen through the symbol too."""
        origin = self.x.new_zeros(1, len(self.space))
        image = self.symbol(origin, num_outputs)[0].real.to(self.x)
        image = image if self.symbol.reference is None else 0 * image
        return torch.cat([self.y.reshape(-1, 1), image.repeat(len(self.x), 1)], dim=-1)

    def covariance(
        self, missing: tuple[Float[Tensor, "q q"], Float[Tensor, "q q"]] | None
    ) -> Float[Tensor, "m*q m*q"]:
        """Of the noise, with what features leave out of the symbol."""
        count = len(self.x)
        eye = torch.eye(count, dtype=self.y.dtype, device=self.y.device)
        if missing is None:
            return torch.kron(eye, self.noise)
        white, common = missing
        if self.symbol.reference is not None:
            common = white
        return torch.kron(eye, self.noise + white) + common.repeat(count, count)

    @property
    def box(self) -> tuple[tuple[float, float], ...]:
        """Of all points the symbol looks at."""
        points = self.symbol.all_points(self.x, self.space)
        return tuple(zip(points.amin(0).tolist(), points.amax(0).tolist(), strict=True))

    def to(self, device: torch.device) -> "Further":
        return replace(self, x=self.x.to(device), y=self.y.to(device), noise=self.noise.to(device))


@dataclass(frozen=True)
class DenseRows:
    """Rows that are written out: features, V and the covariance of their noise."""

    features: Float[Tensor, "m F"]
    columns: Float[Tensor, "m 1+p"]
    noise: Float[Tensor, "m m"]

    @classmethod
    def of(cls, parts: Sequence["DenseRows"]) -> "DenseRows":
        """All of them."""
        return cls(
            torch.cat([own.features for own in parts]),
            torch.cat([own.columns for own in parts]),
            torch.block_diag(*(own.noise for own in parts)),
        )

    def whitened(self) -> tuple[Float[Tensor, "m F"], Float[Tensor, "m 1+p"], Float[Tensor, ""]]:
        """N^{−½}Φ, N^{−½}V and log|N|."""
        factor = torch.linalg.cholesky(self.noise)
        both = torch.cat([self.features, self.columns], dim=-1)
        half = torch.linalg.solve_triangular(factor, both, upper=False)
        logdet = 2 * factor.diagonal().log().sum()
        return *half.split([self.features.shape[-1], self.columns.shape[-1]], dim=-1), logdet
