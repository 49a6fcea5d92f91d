"""The columns of dot-product kernels, and local columns around templates."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor

from gp_orff.features.columns import PointwiseColumns
from gp_orff.features.phases import Phases
from gp_orff.kernels.dot_product import Polynomials

# The columns ‖x‖ⁿ L_m(⟨x, z⟩/‖x‖) of dot-product kernels.


@dataclass(frozen=True)
class DotProductColumns(PointwiseColumns):
    """φ_k(x) = ‖x̃‖^{n_k − m_k} P_{m_k}(⟨x̃, z_k⟩, ‖x̃‖²) with unit vectors z_k.

    x̃ = (scale · x, offset) are the lifted inputs. The columns are sorted by their orders m_k,
    highest first, so that each step of the recurrence is for those that need it
    (Le et al. 2013, Section 4.5).
    """

    phases: Phases  # ⟨x̃, z_k⟩
    polynomials: Polynomials
    degrees: Int[Tensor, "M"]  # n_k
    orders: Int[Tensor, "M"]  # m_k, descending
    dims: tuple[int, ...]  # the input columns
    scale: Float[Tensor, "*b 1 d"]
    offset: Float[Tensor, "*b 1 q"]

    sampled = True

    @property
    def num_columns(self) -> int:
        return len(self.orders)

    @property
    def device(self) -> torch.device:
        return self.orders.device

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return *self.phases.tensors, self.scale, self.offset

    def with_tensors(self, *tensors: Tensor) -> "DotProductColumns":
        *others, scale, offset = tensors
        phases = self.phases.rebuild(*others)
        return replace(self, phases=phases, scale=scale, offset=offset)

    def to(self, device: torch.device) -> "DotProductColumns":
        moved = self.with_tensors(*(tensor.to(device) for tensor in self.tensors))
        return replace(moved, degrees=self.degrees.to(device), orders=self.orders.to(device))

    def select(self, columns: Int[Tensor, "k"]) -> "DotProductColumns":
        return replace(
            self,
            phases=self.phases.select(columns),
            degrees=self.degrees[columns],
            orders=self.orders[columns],
        )

    def halves(self) -> list[tuple[Int[Tensor, "k"], Float[Tensor, "k"]]]:
        """Every second column of an order m > 0; both halves contain those of m = 0.

        These do not depend on z.
        """
        sampled, constant = self.orders.nonzero().flatten(), (self.orders == 0).nonzero().flatten()
        halves = []
        for side in (0, 1):
            half = sampled[side::2]
            factors = constant.new_ones(len(half) + len(constant), dtype=torch.float64)
            factors[: len(half)] *= len(sampled) / max(len(half), 1)
            halves.append((torch.cat([half, constant]), factors))
        return halves

    def plain(self) -> dict[str, object]:
        tensors = {name: getattr(self, name) for name in ("degrees", "orders", "scale", "offset")}
        return {
            "phases": self.phases.plain(),
            "polynomials": {"class": type(self.polynomials).__name__, **asdict(self.polynomials)},
            "dims": self.dims,
            **{name: tensor.detach().cpu() for name, tensor in tensors.items()},
        }

    def mean_squares(self) -> Float[Tensor, "*b M 1"]:
        """Raise: the mean of a polynomial's square over all of space is infinite.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(
            "expected a stationary kernel for a mean over all of space, got a dot-product kernel, "
            "whose variance grows without bound; use the variance at points of your own"
        )

    def inner_products(self, x: Float[Tensor, "*b N d"]) -> Float[Tensor, "*b N M"]:
        return self.phases(self._lifted(x, torch.zeros_like(self.offset)))

    def _lifted(
        self, x: Float[Tensor, "*b N d"], offset: Float[Tensor, "*b 1 q"]
    ) -> Float[Tensor, "*b N k"]:
        scaled = x[..., list(self.dims)] * self.scale
        batch = torch.broadcast_shapes(scaled.shape[:-1], offset.shape[:-1])
        return torch.cat([part.expand(*batch, part.shape[-1]) for part in (scaled, offset)], dim=-1)

    def values(self, x: Float[Tensor, "*b N d"]) -> Float[Tensor, "*b N M"]:
        lifted = self._lifted(x, self.offset)
        t, s = self.phases(lifted), lifted.square().sum(-1, keepdim=True)
        values = torch.cat(list(self._by_order(t, s))[::-1], dim=-1)
        halves = (self.degrees - self.orders) // 2
        if not halves.any():
            return values
        powers = torch.cat([s**k for k in range(int(halves.max()) + 1)], dim=-1)
        return values * powers[..., halves]

    def _by_order(
        self, t: Float[Tensor, "*b N M"], s: Float[Tensor, "*b N 1"]
    ) -> Iterator[Float[Tensor, "*b N k"]]:
        """P_m of the columns of order m, for m = 0, 1, …"""
        previous, current = t, torch.ones_like(t)
        for m, count in enumerate(self._counts):
            yield current[..., count:]
            t, previous, current = (a[..., :count] for a in (t, previous, current))
            step = self.polynomials.step(m, t, s, current, previous) if m else t
            previous, current = current, step

    @cached_property
    def _counts(self) -> list[int]:
        """The number of columns of a higher order than m, for m = 0, 1, …"""
        numbers = torch.bincount(self.orders).tolist()
        return [sum(numbers[m + 1 :]) for m in range(len(numbers))]


# Local columns: positive bumps around templates z.


@dataclass(frozen=True)
class TemplateColumns(PointwiseColumns):
    """φ_k(x) = exp(a⟨x̃, z_k⟩ − (p/2)‖x̃‖² − (a/2)‖z_k‖²), x̃ = (x − center)/ℓ.

    Each is a bump of width 1/√p around x̃ = (a/p) z_k (Le et al. 2013, eqs. 24 and 26).
    """

    templates: Float[Tensor, "M k"]  # z
    inverse_lengthscale: Float[Tensor, "*b 1 k"]
    center: Float[Tensor, "k"]
    a: float
    p: float
    dims: tuple[int, ...]  # the input columns

    sampled = True

    @property
    def num_columns(self) -> int:
        return len(self.templates)

    @property
    def device(self) -> torch.device:
        return self.templates.device

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.inverse_lengthscale,)

    def with_tensors(self, *tensors: Tensor) -> "TemplateColumns":
        (inverse_lengthscale,) = tensors
        return replace(self, inverse_lengthscale=inverse_lengthscale)

    def to(self, device: torch.device) -> "TemplateColumns":
        names = ("templates", "inverse_lengthscale", "center")
        return replace(self, **{name: getattr(self, name).to(device) for name in names})

    def select(self, columns: Int[Tensor, "k"]) -> "TemplateColumns":
        return replace(self, templates=self.templates[columns])

    def halves(self) -> list[tuple[Int[Tensor, "k"], Float[Tensor, "k"]]]:
        """Every second template."""
        index = torch.arange(self.num_columns, device=self.device)
        halves = [index[side::2] for side in (0, 1)]
        shares = [len(index) / max(len(half), 1) for half in halves]
        variances = [
            self.templates.new_full(h.shape, s) for h, s in zip(halves, shares, strict=True)
        ]
        return list(zip(halves, variances, strict=True))

    def plain(self) -> dict[str, object]:
        names = ("templates", "inverse_lengthscale", "center")
        tensors = {name: getattr(self, name).detach().cpu() for name in names}
        return {**tensors, "a": self.a, "p": self.p, "dims": list(self.dims)}

    def inner_products(self, x: Float[Tensor, "*b N d"]) -> Float[Tensor, "*b N M"]:
        """⟨x, z_k/ℓ⟩."""
        return (x[..., list(self.dims)].double() * self.inverse_lengthscale) @ self.templates.mT

    def values(self, x: Float[Tensor, "*b N d"]) -> Float[Tensor, "*b N M"]:
        scaled = (x[..., list(self.dims)] - self.center) * self.inverse_lengthscale
        squares = 0.5 * self.p * scaled.square().sum(-1, keepdim=True)
        heights = 0.5 * self.a * self.templates.square().sum(-1)
        return (self.a * (scaled @ self.templates.mT) - squares - heights).exp()

    def mean_squares(self) -> Float[Tensor, "*b M 1"]:
        """The mean of φ² at the center over draws of the template, z ~ N(0, I/(a² − 2a)).

        It takes the place of the mean over space, which is 0: with it, the variance of the features
        is that of the kernel, which is the same everywhere if p = 2.
        """
        mean = (1 - 2 / self.a) ** (0.5 * len(self.dims))
        shape = (*self.inverse_lengthscale.shape[:-2], self.num_columns, 1)
        return self.inverse_lengthscale.new_full(shape, mean)
