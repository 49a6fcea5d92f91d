"""Observations of symbols of a field: a potential at a gauge, no divergence in a box."""

from dataclasses import dataclass, replace

import torch
from gpytorch.kernels import Kernel
from jaxtyping import Float
from torch import Tensor

from gp_orff.expansion import Expansion, seen_through
from gp_orff.readings import as_matrix, as_points
from gp_orff.symbol_moments import require, space_of
from gp_orff.symbols import Symbol
from gp_orff.terms import terms


@dataclass(frozen=True)
class Further:
    """m readings y = (Q f)(x) + ε, ε ~ N(0, noise) at each point."""

    symbol: Symbol
    x: Float[Tensor, "m d"]
    y: Float[Tensor, "m q"]
    noise: Float[Tensor, "q q"]
    space: tuple[int, ...]

    @classmethod
    def of(
        cls, kernel: Kernel, num_inputs: int, x: object, y: object, symbol: Symbol, noise: object
    ) -> "Further":
        """Copies of what a user gives, on the kernel's device.

        Raises:
            TypeError: what is no symbol.
            ValueError: shapes that do not fit, a symbol that does not exist for the kernel, a
                potential without a reference, a noise that is not positive.
        """
        if not isinstance(symbol, Symbol):
            raise TypeError(
                f"expected a symbol, such as gp_orff.Divergence(), got {type(symbol).__name__}"
            )
        space = space_of(kernel, num_inputs)
        require(symbol, kernel, space)
        if symbol.order < 0 and symbol.reference is None:
            raise ValueError(
                f"expected a reference in an observed {type(symbol).__name__}, which readings tell "
                "up to a constant only, got none; pass reference=x0"
            )
        x, y = as_points(x, num_inputs).detach(), as_matrix(y, "observations y (m, q)").detach()
        q = symbol.num_outputs(terms(kernel)[0].num_outputs)
        if y.shape != (len(x), q) or not torch.isfinite(y).all():
            raise ValueError(
                f"expected finite observations of {type(symbol).__name__} of shape {(len(x), q)}, "
                f"got shape {tuple(y.shape)}{'' if torch.isfinite(y).all() else ' with NaN'}"
            )
        own = cls(symbol, x.clone(), y.clone(), _covariance(noise, q), space)
        return own.to(next(kernel.parameters()).device)

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
        return torch.kron(eye, self.noise + white) + common.repeat(count, count)

    @property
    def box(self) -> tuple[tuple[float, float], ...]:
        """Of all points the symbol looks at."""
        points = self.symbol.all_points(self.x, self.space)
        return tuple(zip(points.amin(0).tolist(), points.amax(0).tolist(), strict=True))

    def to(self, device: torch.device) -> "Further":
        return replace(self, x=self.x.to(device), y=self.y.to(device), noise=self.noise.to(device))


def _covariance(noise: object, q: int) -> Float[Tensor, "q q"]:
    """Of a variance for all outputs or one for each, or itself."""
    covariance = torch.as_tensor(noise, dtype=torch.float64).clone()
    if covariance.dim() < 2 and covariance.numel() in (1, q):
        covariance = torch.diag(covariance.expand(q))
    symmetric = covariance.shape == (q, q) and torch.allclose(covariance, covariance.mT)
    if not symmetric or not (torch.linalg.eigvalsh(covariance) > 0).all():
        raise ValueError(
            f"expected a positive noise variance, {q} of them or a covariance matrix, got {noise!r}"
        )
    return covariance
