"""Whether a symbol of a random field exists, and how much of its variance a grid leaves out."""

import math
from collections.abc import Sequence

import numpy as np
import scipy.stats
import torch
from gpytorch.kernels import Kernel
from jaxtyping import Float
from torch import Tensor

from gp_orff.frequencies import Draw, LatticeDraw, remainder
from gp_orff.resolution import spectra_of
from gp_orff.symbols import Symbol
from gp_orff.terms import Term, terms
from gp_orff.truncation import lifted, second_moment


def space_of(kernel: Kernel, num_inputs: int) -> tuple[int, ...]:
    """The inputs that are directions of space: those of the field kernels, else all of them."""
    found = set()
    for term in terms(kernel):
        if term.factor.degree:
            dims = term.leaves[0].active_dims
            inner = term.factor.dims
            if dims is None or (inner is not None and dims == inner):
                dims = tuple(range(term.num_outputs))
            found.add(dims)
    if len(found) > 1:
        raise ValueError(f"expected field kernels on the same inputs, got {sorted(found)}")
    return found.pop() if found else tuple(range(num_inputs))


def require(symbol: Symbol, kernel: Kernel, space: Sequence[int]) -> None:
    """Raise ValueError where the symbol of the field does not exist.

    A field whose spectral density falls too slowly has no derivative, one that is not a derivative
    itself has no stationary potential.
    """
    found = terms(kernel)
    symbol.check(len(space), found[0].num_outputs)
    for term in found:
        if not _varies(term, space):
            continue
        tilt = term.factor.degree + symbol.order
        name = type(symbol).__name__
        own = type(term.leaves[0].kernel).__name__
        if tilt < 0 and symbol.reference is None:
            raise ValueError(
                f"{name} of a field that is no derivative itself ({own} without a curl-free or "
                "divergence-free kernel) is known up to its value somewhere only: expected a "
                "reference, got none; pass reference=x0"
            )
        others = [dim for leaf in term.leaves[1:] for dim in leaf.active_dims or space]
        if term.factor.degree and symbol.order and set(others) & set(space):
            raise NotImplementedError(
                f"{name} of a field kernel times a kernel of the same inputs is not known: "
                "expected factors of other inputs, such as time"
            )
        if symbol.order < 0 and symbol.reference is None and (not symbol.homogeneous or others):
            raise ValueError(
                f"{name} is known up to its value somewhere only, under this kernel: expected a "
                "reference, got none; pass reference=x0"
            )
        if symbol.order > 0 and any(
            torch.as_tensor(law.moment(tilt, len(space))).isinf().any()
            for law in spectra_of(term)[:1]
        ):
            nu = getattr(term.leaves[0].kernel, "nu", None)
            raise ValueError(
                f"{name} does not exist for a field with this {own} potential"
                f"{'' if nu is None else f', nu={nu}'}: its variance is infinite; expected "
                f"a kernel with {tilt} derivatives (Matérn nu > {tilt}, or RBF)"
            )


def _varies(term: Term, space: Sequence[int]) -> bool:
    """Whether a term varies in space: what does not is background."""
    seen = {dim for leaf in term.leaves for dim in leaf.active_dims or space}
    return bool(seen & set(space))


def left_out(
    symbol: Symbol, kernel: Kernel, draws: Sequence[Draw], space: Sequence[int]
) -> tuple[Float[Tensor, "q q"], Float[Tensor, "q q"]] | None:
    """Var Q f less that on a grid, differentiable: white, and common to all points; None for other
    rules.

    What lies beyond the grid is white. What varies too slowly for it is a constant, such as that of
    a potential; with a reference it drops out, and what is white there is common to all points.
    """
    found = terms(kernel)
    lattice = all(isinstance(own, LatticeDraw) for own in draws)
    if lattice and any(t.factor.degree + symbol.order < 0 and _varies(t, space) for t in found):
        raise NotImplementedError(
            f"{type(symbol).__name__} of a field that is no derivative itself needs frequencies "
            "near zero, which a grid does not have: expected frequencies such as "
            "gp_orff.QuasiMonteCarlo(1024)"
        )
    if not (lattice and all(own.correct for own in draws)):
        return None
    parts = [_left_out(symbol, *pair, space) for pair in zip(found, draws, strict=True)]
    white, common = (sum(own) for own in zip(*parts, strict=True))
    return white, common


def _left_out(
    symbol: Symbol, term: Term, own: LatticeDraw, space: Sequence[int]
) -> tuple[Float[Tensor, "q q"], Float[Tensor, "q q"]]:
    """Of one term."""
    if not term.leaves:  # a constant
        q = symbol.num_outputs(term.num_outputs)
        return (term.outputscale.new_zeros(q, q).double(),) * 2
    white = _second_moment(symbol, term, own, *remainder(own, spectra_of(term)), space)
    if symbol.reference is not None:
        return white, white
    fades = term.factor.degree + symbol.order > 0  # Q A Q* is zero at ω = 0
    if fades or not (symbol.homogeneous and len(term.leaves) == 1 and _varies(term, space)):
        return white, torch.zeros_like(white)
    return white, _constant(symbol, term, own, space, white)


def _constant(
    symbol: Symbol,
    term: Term,
    own: LatticeDraw,
    space: Sequence[int],
    white: Float[Tensor, "q q"],
) -> Float[Tensor, "q q"]:
    """What the frequencies of a grid, and those beyond, leave of a variance that is known.

    It completes their sum at lag zero, as S(0) h^d does where the density is smooth, and is finite
    where that diverges; the integral of S over the cell around zero is less by O(h²) of itself.
    """
    law, spacing = spectra_of(term)[0], own.lattice.spacing[list(own.dims[0])]
    if hasattr(law, "lengthscale"):  # the law of ℓω has no directions of its own
        whole = _over_directions(symbol, term, own, space, law.lengthscale.double())
        kept = _second_moment(symbol, term, own, *own.nodes([law]), space)
        return lifted(whole - kept - white, whole)
    origin = torch.zeros_like(spacing).unsqueeze(0)
    cell = law.log_density(origin).exp() * spacing.prod()
    kept = _second_moment(symbol, term, own, [origin], torch.ones_like(cell), space)
    around = _over_directions(symbol, term, own, space, torch.ones_like(origin))
    return cell * (around - kept)


def _over_directions(
    symbol: Symbol,
    term: Term,
    own: LatticeDraw,
    space: Sequence[int],
    lengthscale: Float[Tensor, "1 d"],
) -> Float[Tensor, "q q"]:
    """The mean of Q A Q* over directions of ℓω."""
    points, weights = _sphere(len(own.dims[0]), own.lattice.spacing.device)
    return _second_moment(symbol, term, own, [points / lengthscale], weights, space)


def _second_moment(
    symbol: Symbol,
    term: Term,
    own: LatticeDraw,
    omegas: Sequence[Float[Tensor, "m k"]],
    weights: Float[Tensor, "m"],
    space: Sequence[int],
) -> Float[Tensor, "q q"]:
    """Σ w Q A Q* over frequencies of the leaves."""
    wide = weights.new_zeros(len(weights), len(own.lattice.spacing))
    for omega, dims in zip(omegas, own.dims, strict=True):
        wide[:, list(dims)] = omega
    images = symbol(wide[:, list(space)], term.num_outputs).to(torch.complex128)
    images = images @ term.factor(omegas[0]).to(torch.complex128)
    return second_moment(term, images, weights)


def _sphere(dims: int, device: torch.device) -> tuple[Float[Tensor, "m k"], Float[Tensor, "m"]]:
    """Directions and weights of a mean over the sphere; spectrally accurate for dims ≤ 3."""
    if dims == 1:
        points = torch.ones(1, 1, dtype=torch.float64)
    elif dims <= 3:
        angle = torch.arange(128, dtype=torch.float64) * (2 * math.pi / 128)
        points = torch.stack([angle.cos(), angle.sin()], dim=-1)
    else:
        sequence = scipy.stats.qmc.Sobol(dims, seed=0).random_base2(14)
        normal = torch.from_numpy(scipy.stats.norm.ppf(sequence))
        points = normal / normal.norm(dim=-1, keepdim=True)
    points = points.to(device)
    if dims != 3:
        return points, points.new_full((len(points),), 1 / len(points))
    height, weight = (torch.from_numpy(v).to(device) for v in np.polynomial.legendre.leggauss(64))
    flat = (1 - height.square()).sqrt()[:, None, None] * points  # (64, 128, 2)
    heights = height[:, None, None].expand(*flat.shape[:2], 1)
    weights = (0.5 * weight / len(points)).repeat_interleave(len(points))
    return torch.cat([flat, heights], dim=-1).flatten(0, 1), weights
