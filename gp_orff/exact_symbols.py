"""Symbols of exact kernels, in closed form: the reference for those of features.

A scalar kernel k of the squared scaled distance has all its derivatives in closed form. Where Q A
and Q A Q* of a symbol Q and a spectral density A are polynomials in ω, covariances are derivatives
of k: ω^α turns e^{i⟨ω,τ⟩} into (−i)^|α| ∂^α e^{i⟨ω,τ⟩}. Matrices, and integrals over paths and
boxes, need nothing but the covariance of what they are taken of: `patches` says how exact they are.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations_with_replacement, product

import torch
from gpytorch.kernels import Kernel
from jaxtyping import Complex, Float
from linear_operator import to_dense
from torch import Tensor

from gp_orff.cholesky import cholesky
from gp_orff.kernels import radial_derivatives
from gp_orff.lengths import shortest_lengths
from gp_orff.patches import Patch, Rule
from gp_orff.posterior import FieldLaw
from gp_orff.spectra import spectrum
from gp_orff.symbols import Identity, Symbol
from gp_orff.terms import Leaf, Term, terms
from gp_orff.trig import by_chunks


def derivatives(leaf: Leaf, tau: Float[Tensor, "n m k"], order: int) -> Float[Tensor, "n m *k"]:
    """All partial derivatives of one order (0 to 4) of k at displacements τ of its own inputs.

    With s = τᵀΛτ and u = Λτ: ∂_i = 2κ′u_i, ∂_ij = 2κ′Λ_ij + 4κ″u_iu_j, and so on: every pair of
    indices is in one Λ or in two u, with 2^{order − pairs} κ^{(order − pairs)} in front.
    """
    lengthscale = leaf.kernel.lengthscale.double().reshape(-1).expand(tau.shape[-1])
    u = tau / lengthscale.square()
    metric = torch.diag(lengthscale.pow(-2))
    radial = _radial(leaf.kernel, (tau / lengthscale).square().sum(-1), order)
    letters, total = "abcd"[:order], 0.0
    for pairs in range(order // 2 + 1):
        factor = 2 ** (order - pairs) * radial[order - pairs]
        for chosen in _pairings(letters, pairs):
            rest = [c for c in letters if c not in "".join(chosen)]
            operands = [factor, *[metric] * pairs, *[u] * len(rest)]
            inputs = ",".join(["nm", *chosen, *(f"nm{c}" for c in rest)])
            total = total + torch.einsum(f"{inputs}->nm{letters}", *operands)
    return total


def _pairings(letters: str, pairs: int) -> list[tuple[str, ...]]:
    """All ways to take so many pairs out of the letters."""
    if pairs == 0:
        return [()]
    found = []
    for i, j in combinations_with_replacement(range(len(letters)), 2):
        if i == j:
            continue
        rest = letters[i + 1 : j] + letters[j + 1 :]  # later pairs start later: each once
        found += [(letters[i] + letters[j], *more) for more in _pairings(rest, pairs - 1)]
    return found


def _radial(kernel: Kernel, s: Float[Tensor, "n m"], order: int) -> list[Float[Tensor, "n m"]]:
    """κ, κ′, …, κ^{(order)} at s."""
    followed = s.requires_grad
    with torch.enable_grad():
        s = s.clamp_min(1e-24) if followed else s.clamp_min(1e-24).requires_grad_()
        found = [_value(kernel, s), *radial_derivatives(kernel, s)]
        while len(found) <= order:
            found.append(torch.autograd.grad(found[-1].sum(), s, create_graph=True)[0])
    return found if followed else [own.detach() for own in found]


def _value(kernel: Kernel, s: Float[Tensor, "n m"]) -> Float[Tensor, "n m"]:
    """κ(s), from the kernel itself along its first input."""
    lengthscale = kernel.lengthscale.reshape(-1)
    points = s.new_zeros(s.numel(), kernel.ard_num_dims or 1)
    points[:, 0] = s.sqrt().flatten() * lengthscale[0]
    return kernel.forward(points, torch.zeros_like(points), diag=True).reshape(s.shape)


def polynomial(
    function: Callable[[Float[Tensor, "m k"]], Complex[Tensor, "m q p"]], dims: int, degree: int
) -> dict[tuple[int, ...], Complex[Tensor, "q p"]]:
    """The coefficients of a homogeneous polynomial, by its monomials ω_i ω_j …

    Raises:
        NotImplementedError: a function that is none.
    """
    monomials = list(combinations_with_replacement(range(dims), degree))
    generator = torch.Generator().manual_seed(0)
    omega = torch.randn(4 * len(monomials) + 8, dims, generator=generator, dtype=torch.float64)
    values = function(omega).to(torch.complex128)
    columns = [omega[:, list(own)].prod(-1) for own in monomials]
    design = torch.stack(columns, dim=-1).to(torch.complex128)
    found = torch.linalg.lstsq(design, values.flatten(1)).solution
    if (design @ found - values.flatten(1)).abs().max() > 1e-9 * (1 + values.abs().max()):
        raise NotImplementedError("no polynomial in ω")
    return dict(zip(monomials, found.unflatten(-1, values.shape[1:]), strict=True))


@dataclass(frozen=True)
class SymbolCovariance:
    """Cov[Q f(x), R f(z)] under the prior, for symbols Q and R of a field."""

    kernel: Kernel
    left: Symbol
    right: Symbol
    space: tuple[int, ...]

    def __call__(self, x: Float[Tensor, "n d"], z: Float[Tensor, "m d"]) -> Float[Tensor, "nq mr"]:
        """Point-major.

        Raises:
            NotImplementedError: no closed form.
        """
        pairs = [own.reshape(-1, x.shape[-1]) for own in torch.broadcast_tensors(x.unsqueeze(1), z)]
        blocks = self._blocks(pairs[0] - pairs[1]).unflatten(0, (len(x), len(z)))
        return blocks.transpose(1, 2).flatten(2, 3).flatten(0, 1)

    def _blocks(self, tau: Float[Tensor, "l d"]) -> Float[Tensor, "l q r"]:
        """At lags."""
        found = terms(self.kernel)
        p = found[0].num_outputs
        (lefts, left), (rights, right) = (self._peeled(own, p) for own in (self.left, self.right))
        _require_lags(found)
        inner, total = replace(self, left=left, right=right), 0.0
        whole = any(len(own.edges) for own in (*lefts, *rights))  # more than points
        rule = _rule(found, self.space, tau.shape[-1]) if whole else Rule(math.inf, kink=False)
        for a, b in product(lefts, rights):
            lags, edges = self._moved(tau, a.corner - b.corner), torch.cat([a.edges, -b.edges])
            mean = rule.mean(partial(inner._local, found), lags, edges, self.space)
            total = total + a.matrix.to(tau) @ mean @ b.matrix.to(tau).mT
        return total

    def _peeled(self, symbol: Symbol, p: int) -> tuple[Sequence[Patch], Symbol]:
        """A symbol as sums over patches of a local one."""
        num_dims = len(self.space)
        patches = symbol.patches(num_dims, p)
        if patches is not None:
            return patches, Identity()
        return [Patch.point(num_dims, torch.eye(symbol.num_outputs(p)))], symbol

    def _local(self, found: Sequence[Term], tau: Float[Tensor, "l d"]) -> Float[Tensor, "l q r"]:
        """Of the field, or of derivatives of it."""
        if isinstance(self.left, Identity) and isinstance(self.right, Identity):
            origin = torch.zeros_like(tau[:1])
            return to_dense(self.kernel(tau, origin)).unflatten(0, (len(tau), -1))
        return sum(self._term(term, tau.unsqueeze(1)) for term in found).squeeze(1)

    def less(self, x: Float[Tensor, "n d"], z: Float[Tensor, "m d"]) -> Float[Tensor, "nq mr"]:
        """The same of values less those at the references of either side."""
        whole = self(x, z)
        left, right = self.left.referred(x, self.space), self.right.referred(z, self.space)
        if left is not None:
            whole = whole - self(left, z)
        if right is not None:
            whole = whole - self(x, right)
        if left is not None and right is not None:
            whole = whole + self(left, right)
        return whole

    def _moved(self, x: Float[Tensor, "n d"], shift: Float[Tensor, "k"]) -> Float[Tensor, "n d"]:
        moved = x.clone()
        moved[:, list(self.space)] += shift.to(moved)
        return moved

    def _term(self, term: Term, tau: Float[Tensor, "n m d"]) -> Float[Tensor, "n m q r"]:
        p, degree = term.num_outputs, term.factor.degree

        def density(omega: Float[Tensor, "m d"], factor: Tensor) -> Complex[Tensor, "m q r"]:
            left, right = (s(omega, p).to(torch.complex128) for s in (self.left, self.right))
            outer = (factor @ factor.mT).to(torch.complex128)
            return left @ outer @ right.mH

        if not term.leaves:  # a constant
            origin = tau.new_zeros(1, len(self.space))
            block = density(origin, term.factor(origin)).real
            return (term.outputscale * block).expand(*tau.shape[:2], -1, -1)
        first, *others = term.leaves
        dims = first.active_dims or tuple(range(tau.shape[-1]))
        total = 2 * degree + self.left.order + self.right.order
        own = Leaf(first.kernel)

        def of_leaf(omega: Float[Tensor, "m k"]) -> Complex[Tensor, "m q r"]:
            factor = term.factor(omega)
            if degree:
                return density(term.factor.embedded(omega), factor)
            wide = omega.new_zeros(len(omega), tau.shape[-1])
            wide[:, list(dims)] = omega
            return density(wide[:, list(self.space)], factor)

        if not degree and others:
            raise NotImplementedError("a product of kernels, each with a part of space")
        if not 0 <= total <= 4:
            raise NotImplementedError(f"derivatives of order {total} of its potential")
        coefficients = polynomial(of_leaf, len(dims), total)
        tensor = derivatives(own, tau[..., list(dims)], total)
        block = 0.0
        for monomial, coefficient in coefficients.items():
            turned = ((-1j) ** total * coefficient).real
            block = block + tensor[(..., *monomial)][..., None, None] * turned
        scale = term.outputscale
        for leaf in others:
            lag = tau[..., list(leaf.active_dims)].flatten(0, 1)
            zero = torch.zeros_like(lag)
            k = leaf.kernel.forward(lag, zero, diag=True)
            scale = scale * k.reshape(*tau.shape[:2], 1, 1)
        return scale * block


def _require_lags(found: Sequence[Term]) -> None:
    if not all(leaf.kernel.is_stationary for term in found for leaf in term.leaves):
        raise NotImplementedError("a kernel that is not stationary")


def _rule(found: Sequence[Term], space: Sequence[int], num_inputs: int) -> Rule:
    """By the shortest length in space, and by whether there is a kernel of it with few derivatives,
    or of which not is known how many."""
    leaves = [leaf for term in found for leaf in term.leaves]
    within = [leaf for leaf in leaves if not set(_columns(leaf, num_inputs)).isdisjoint(space)]
    lengths = [own for leaf in within for own in _lengths(leaf, space, num_inputs)]
    return Rule(min(lengths, default=math.inf), any(_has_kink(leaf.kernel) for leaf in within))


def _columns(leaf: Leaf, num_inputs: int) -> Sequence[int]:
    return leaf.active_dims or range(num_inputs)


def _lengths(leaf: Leaf, space: Sequence[int], num_inputs: int) -> list[float]:
    """The shortest ones, along the inputs of space that it sees."""
    columns = _columns(leaf, num_inputs)
    own = shortest_lengths(leaf.kernel).detach()
    own = own.reshape(-1, own.shape[-1]).amin(0).expand(len(columns)).tolist()
    return [length for column, length in zip(columns, own, strict=True) if column in space]


def _has_kink(kernel: Kernel) -> bool:
    try:
        moment = spectrum(kernel).moment(3, 2)
    except NotImplementedError:
        return True
    return not torch.isfinite(torch.as_tensor(moment)).all()


@dataclass(frozen=True)
class ExactSymbolLaw(FieldLaw):
    """The exact posterior of Q f; less its value at a reference, if any."""

    kernel: Kernel
    symbol: Symbol
    space: tuple[int, ...]
    cross: Callable[[Float[Tensor, "n d"]], Float[Tensor, "n*q M"]]  # with the readings
    factor: Float[Tensor, "M M"]
    alpha: Float[Tensor, "M 1"]

    @property
    def num_outputs(self) -> int:
        return self.symbol.num_outputs(terms(self.kernel)[0].num_outputs)

    @property
    def _width(self) -> int:
        return len(self.factor) * self.num_outputs * 9

    def check(self, x: Float[Tensor, "1 d"]) -> "ExactSymbolLaw":
        """Itself, if it has a closed form.

        Raises:
            NotImplementedError: it has none.
        """
        try:
            self._blocks(x)
        except NotImplementedError as error:
            raise type(error)(
                f"{type(self.symbol).__name__} has no closed form under this exact kernel "
                f"({error}); features have one: expected, for instance, "
                "VectorFieldGP(kernel, frequencies=gp_orff.Auto(exact_values=0))"
            ) from error
        return self

    def mean(self, x: Tensor) -> Tensor:
        def part(points: Float[Tensor, "n d"]) -> Float[Tensor, "n q"]:
            return (self.cross(points) @ self.alpha).unflatten(0, (len(points), -1)).squeeze(-1)

        return by_chunks(part, x.double(), self._width)

    def covariance(self, x: Tensor) -> Tensor:
        x = x.double()
        white = torch.linalg.solve_triangular(self.factor, self.cross(x).mT, upper=False)
        return self._prior(x) - white.mT @ white

    def root(self, x: Tensor) -> Tensor:
        return cholesky(self.covariance(x))

    def _variance(self, x: Tensor) -> Tensor:
        return self._blocks(x).diagonal(dim1=-1, dim2=-2)

    def _blocks(self, x: Tensor) -> Tensor:
        white = torch.linalg.solve_triangular(self.factor, self.cross(x).mT, upper=False)
        white = white.mT.unflatten(0, (len(x), -1))
        return self._prior_blocks(x) - white @ white.mT

    @property
    def _covariance(self) -> SymbolCovariance:
        return SymbolCovariance(self.kernel, self.symbol, self.symbol, self.space)

    def _prior_blocks(self, x: Float[Tensor, "n d"]) -> Float[Tensor, "n q q"]:
        block = self._covariance(x[:1], x[:1])
        if self.symbol.reference is None:
            return block.expand(len(x), -1, -1)
        lags = x - self.symbol.referred(x, self.space)
        cross = self._covariance(lags, torch.zeros_like(x[:1])).unflatten(0, (len(x), -1))
        return 2 * block - cross - cross.mT

    def _prior(self, x: Float[Tensor, "n d"]) -> Float[Tensor, "n*q n*q"]:
        return self._covariance.less(x, x)
