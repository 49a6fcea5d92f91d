"""The kernels whose constraint a data set meets, by name."""

from collections.abc import Callable

import torch
from gpytorch.kernels import (
    Kernel,
    LCMKernel,
    LinearKernel,
    MaternKernel,
    MultitaskKernel,
    PolynomialKernel,
    RBFKernel,
    RQKernel,
)

import gp_orff
from helpers.anything.sets import Kind

BASES: dict[str, Callable[..., Kernel]] = {
    "RBF": RBFKernel,
    "Matérn 3/2": lambda **how: MaternKernel(nu=1.5, **how),
    "Matérn 5/2": lambda **how: MaternKernel(nu=2.5, **how),
    "RQ": RQKernel,
}
SCALARS = {**BASES, "Matérn 1/2": lambda **how: MaternKernel(nu=0.5, **how)}
FIELDS = {
    "curl-free": gp_orff.CurlFreeKernel,
    "divergence-free": gp_orff.DivergenceFreeKernel,
    "Helmholtz": gp_orff.HelmholtzKernel,
}


class Split(torch.nn.Module):
    """The factor B(ω) = (a ω, b E₁ω, b E₂ω, …) of a Helmholtz kernel, with the generators E_i of
    rotations.

    Both parts have the same spectrum: B Bᵀ = a² ωωᵀ + b² (‖ω‖² I − ωωᵀ). Starting values of a and b
    are `length`, for wave numbers near 1/`length`.
    """

    def __init__(self, num_dims: int, length: float):
        super().__init__()
        self.size = torch.nn.Parameter(torch.full((2,), length))
        pairs = torch.combinations(torch.arange(num_dims))
        turns = torch.zeros(len(pairs), num_dims, num_dims)
        for turn, (i, j) in zip(turns, pairs.tolist(), strict=True):
            turn[i, j], turn[j, i] = 1.0, -1.0
        self.register_buffer("turns", turns)

    def forward(self, omega):
        along = self.size[0] * omega.unsqueeze(-1)
        return torch.cat([along, self.size[1] * torch.einsum("kij,Dj->Dik", self.turns, omega)], -1)


def kernels_of(kind: Kind) -> dict[str, Callable[[], Kernel]]:
    """Return functions by name that build a new kernel in each call, because fits train kernels in
    place."""
    if kind.constraint == "polynomial":
        found = _polynomials(kind)
    elif kind.p == 1:
        found = {**_scalars(kind), **(_fields(kind) if kind.constraint == "curl-free" else {})}
    else:
        found = {**_fields(kind), **_separable(kind)}
    return {name: _in_time(make, kind) for name, make in found.items()} if kind.time else found


def _space(kind: Kind) -> dict[str, tuple[int, ...]]:
    """Return `active_dims` of the inputs that are space if there is a time input, otherwise no
    arguments."""
    return {"active_dims": tuple(range(kind.d))} if kind.time else {}


def _fields(kind: Kind) -> dict[str, Callable[[], Kernel]]:
    if kind.constraint == "none":
        return {}
    space, d = _space(kind), kind.d
    names = {kind.constraint, "Helmholtz"} if d > 1 else {kind.constraint}
    found = {
        f"{name} {base}": lambda build=FIELDS[name], base=make: build(base(), num_dims=d, **space)
        for name in sorted(names)
        for base, make in BASES.items()
    }
    found[f"{kind.constraint} Matérn 1.8"] = lambda: FIELDS[kind.constraint](
        gp_orff.GeneralMaternKernel(nu=1.8), num_dims=d, **space
    )
    if kind.constraint == "Helmholtz":
        found["spectral matrix RBF"] = lambda: gp_orff.SpectralMatrixKernel(
            RBFKernel(), Split(d, 0.2 * kind.unit), num_outputs=d, num_dims=d, **space
        )
    return found


def _separable(kind: Kind) -> dict[str, Callable[[], Kernel]]:
    space, p = _space(kind), kind.p
    found = {
        f"multitask {name}": lambda base=make: MultitaskKernel(base(**space), p, rank=1)
        for name, make in SCALARS.items()
    }
    found["separable RBF"] = lambda: gp_orff.SeparableKernel(
        RBFKernel(**space), torch.nn.Parameter(_start(p, p))
    )
    found["LCM RBF + Matérn 3/2"] = lambda: LCMKernel(
        [RBFKernel(**space), MaternKernel(nu=1.5, **space)], p, rank=1
    )
    if not kind.time:
        found["multitask Bessel"] = lambda: MultitaskKernel(
            gp_orff.BesselKernel(2, num_dims=kind.d), p, rank=1
        )
    return found


def _scalars(kind: Kind) -> dict[str, Callable[[], Kernel]]:
    space = _space(kind)
    found = {f"scalar {name}": lambda base=make: base(**space) for name, make in SCALARS.items()}
    found["scalar Matérn 1.8"] = lambda: gp_orff.GeneralMaternKernel(nu=1.8, **space)
    return found


def _polynomials(kind: Kind) -> dict[str, Callable[[], Kernel]]:
    p = kind.p
    return {
        "multitask linear + RBF": lambda: (
            MultitaskKernel(LinearKernel(), p, rank=1) + MultitaskKernel(RBFKernel(), p, rank=1)
        ),
        "multitask polynomial": lambda: MultitaskKernel(PolynomialKernel(power=2), p, rank=p),
        "multitask dot product": lambda: MultitaskKernel(
            gp_orff.DotProductKernel([1.0, 1.0, 1.0]), p, rank=p
        ),
        "multitask RBF": lambda: MultitaskKernel(RBFKernel(), p, rank=1),
    }


def _in_time(make: Callable[[], Kernel], kind: Kind) -> Callable[[], Kernel]:
    return lambda: gp_orff.FieldProductKernel(make(), MaternKernel(nu=1.5, active_dims=(kind.d,)))


def _start(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.eye(*shape) + 0.3 * torch.randn(*shape, generator=generator)
