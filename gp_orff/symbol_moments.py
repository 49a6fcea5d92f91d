"""Whether a symbol of a random field exists, and how much of its variance a grid leaves out."""

import math
from collections.abc import Sequence

import numpy as np
import scipy.stats
import torch
from gpytorch.kernels import Kernel
from jaxtyping import Float
from torch import Tensor

from gp_orff.expansion import Expansion, FeatureExpansion, WaveExpansion, seen_through
from gp_orff.frequencies import Draw, LatticeDraw, QuasiMonteCarlo, TermLaw
from gp_orff.resolution import laws, spectra_of
from gp_orff.symbols import Symbol
from gp_orff.terms import Term, terms

_NODES = 2**13  # of quasi-Monte Carlo


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
            math.isinf(float(torch.as_tensor(law.moment(tilt, len(space))).max()))
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


@torch.no_grad()
def left_out(
    symbol: Symbol,
    kernel: Kernel,
    draws: Sequence[Draw],
    expansion: Expansion,
    space: Sequence[int],
) -> tuple[Float[Tensor, "q q"], Float[Tensor, "q q"]] | None:
    """Var Q f less that on a grid: white, and common to all points; None for other rules.

    The cell around ω = 0, which features of derivatives do not have, holds a constant of an
    antiderivative: S(0) h^d of a potential. What lies beyond the grid is white. With a reference
    the constant drops out, and what is white there is common to all points.
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
    whole = [_whole(symbol, term, own, space) for term, own in zip(found, draws, strict=True)]
    if any(own is None for own in whole):
        every = zip(found, laws(kernel, expansion.omega.shape[-1]), draws, strict=True)
        white = sum(_beyond(symbol, *part, space) for part in every)
        return white, torch.zeros_like(white) if symbol.reference is None else white
    common = sum(_central_cell(symbol, *part, space) for part in zip(found, draws, strict=True))
    kept = _variance(seen_through(symbol, expansion, space))
    white = _positive(sum(whole) - kept - common)
    return white, common if symbol.reference is None else white


def _variance(expansion: FeatureExpansion | WaveExpansion) -> Float[Tensor, "q q"]:
    """Of features on a lattice, where every frequency but zero has its cosine and its sine."""
    varies = (expansion.phi.omega != 0).any(-1)
    if isinstance(expansion, WaveExpansion):  # Re(a e^{i⟨ω,x⟩}) has the mean variance |a|²/2
        a = expansion.amplitudes
        share = torch.where(varies, 0.5, 1.0)[expansion.frequencies]
        return ((share.unsqueeze(-1) * a).mT @ a.conj()).real
    share = torch.cat([torch.where(varies, 0.5, 1.0), torch.where(varies, 0.5, 0.0)])  # sin 0 = 0
    m = expansion.directions
    return (share[expansion.columns].unsqueeze(-1) * m).mT @ m


def _whole(
    symbol: Symbol, term: Term, own: LatticeDraw, space: Sequence[int]
) -> Float[Tensor, "q q"] | None:
    """E[Q A Q*] over the whole law of one term: a moment of the radius times a mean over
    directions; None where it is not that."""
    tilt = term.factor.degree + symbol.order
    if not _varies(term, space):
        origin = term.outputscale.new_zeros(1, len(space)).double()
        return _mean_outer(symbol, term, origin, torch.ones_like(origin[:, 0]), space, space)
    law, alone = spectra_of(term)[0], len(term.leaves) == 1 or term.factor.degree
    if not (symbol.homogeneous and tilt >= 0 and alone and hasattr(law, "lengthscale")):
        return None
    dims = own.dims[0]
    moment = torch.as_tensor(law.moment(tilt, len(dims))).to(term.outputscale.device).squeeze()
    points, weights = _sphere(len(dims), term.outputscale.device)
    return moment * _mean_outer(
        symbol, term, points / law.lengthscale.double(), weights, dims, space
    )


def _beyond(
    symbol: Symbol, term: Term, law: TermLaw, own: LatticeDraw, space: Sequence[int]
) -> Float[Tensor, "q q"]:
    """E[Q A Q*] over frequencies whose cell is not on the grid, by quasi-Monte Carlo."""
    q = symbol.num_outputs(term.num_outputs)
    if not _varies(term, space):  # what is constant in space is never cut
        return term.outputscale.new_zeros(q, q).double()
    measure = "trace" if hasattr(law.leaves[0].spectrum, "lengthscale") else "base"
    drawn = QuasiMonteCarlo(_NODES, measure=measure, seed=0).draw([law])[0].to(own.lattice.spacing)
    omegas, weights = drawn.nodes(spectra_of(term))
    spacing = own.lattice.spacing
    wide = spacing.new_zeros(_NODES, len(spacing))
    for omega, dims in zip(omegas, own.dims, strict=True):
        wide[:, list(dims)] = omega.double()
    index, kept = (wide / spacing).round().long(), own.lattice.indices[own.position]
    most = int(kept.abs().max()) + 1  # codes of what is farther need no more
    index = index.clamp(-most, most)
    base = (2 * most + 1) ** torch.arange(len(spacing), device=index.device)
    codes = torch.cat([kept @ base, -(kept @ base), 0 * base[:1]])  # fields of derivatives lack 0
    outside = ~torch.isin(index @ base, codes)
    images = symbol(wide[:, list(space)], term.num_outputs).to(torch.complex128)
    images = images @ term.factor(omegas[0]).double().to(torch.complex128)
    share = (term.outputscale * weights * outside)[:, None, None]
    return (share * (images @ images.mH).real).sum(0)


def _mean_outer(
    symbol: Symbol,
    term: Term,
    omega: Float[Tensor, "m k"],
    weights: Float[Tensor, "m"],
    dims: Sequence[int],
    space: Sequence[int],
) -> Float[Tensor, "q q"]:
    """The mean of Q A Q* over frequencies of the first leaf."""
    wide = omega.new_zeros(len(omega), max([*dims, *space]) + 1)
    wide[:, list(dims)] = omega
    images = symbol(wide[:, list(space)], term.num_outputs).to(torch.complex128)
    images = images @ term.factor(omega).double().to(torch.complex128)
    outer = weights[:, None, None] * (images @ images.mH).real
    return term.outputscale * outer.sum(0)


def _central_cell(
    symbol: Symbol, term: Term, own: LatticeDraw, space: Sequence[int]
) -> Float[Tensor, "q q"]:
    """S(0) h^d times the mean of Q A Q* over directions, for antiderivatives of derivatives: the
    same at all points of one time."""
    q = symbol.num_outputs(term.num_outputs)
    if not _varies(term, space) or symbol.order >= 0:
        return term.outputscale.new_zeros(q, q).double()
    law, dims = spectra_of(term)[0], own.dims[0]
    points, weights = _sphere(len(dims), term.outputscale.device)
    density = law.log_density(torch.zeros_like(points[:1])).exp()
    share = density * own.lattice.spacing[list(dims)].prod()
    return share * _mean_outer(symbol, term, points, weights, dims, space)


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


def _positive(matrix: Float[Tensor, "q q"]) -> Float[Tensor, "q q"]:
    """Without what rounding and aliasing leave below zero."""
    values, vectors = torch.linalg.eigh(0.5 * (matrix + matrix.mT))
    return (vectors * values.clamp_min(0)) @ vectors.mT
