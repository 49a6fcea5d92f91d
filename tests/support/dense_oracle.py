"""A second implementation of Gaussian processes of vectors, without code of the package.

It imports neither gp_orff nor gpytorch. A field is a sum of derivatives of independent scalar
processes g_l, f = Σ_l Σ_α m_lα ∂^α g_l. A linear functional of a field depends on values and
derivatives of the g_l at nodes. All covariances are therefore derivatives of scalar kernels k_l,

    Cov[∂^α g(x), ∂^β g(z)] = (−1)^|β| ∂^{α+β} k (x − z) .

Automatic differentiation with truncated Taylor series in numpy (*jets*) computes these derivatives,
also at lag zero. Integrals are Gauss–Legendre sums, and conditioning is dense. Shapes: n points, k
nodes, D inputs, of which `space` are differentiated, p outputs, L processes.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise, product

import numpy as np
from jaxtyping import Float
from numpy import ndarray as Array
from scipy.special import gamma, kv

Index = tuple[int, ...]  # exponents of a monomial in the inputs that are space; a derivative
Jet = dict[Index, Array]  # Σ_α c_α h^α, the Taylor series at τ of a function of τ + h
Profile = Callable[[Array, int], list[Array]]  # κ(s), κ′(s), …, κ^(order)(s), s = ‖τ/ℓ‖²


def rbf(s: Float[Array, "*n"], order: int) -> list[Array]:
    """Return the derivatives of κ(s) = exp(−s/2) up to an order."""
    return [(-0.5) ** m * np.exp(-0.5 * s) for m in range(order + 1)]


def rational_quadratic(alpha: float) -> Profile:
    """Return a function for the derivatives of κ(s) = (1 + s/2α)^−α."""

    def profile(s: Float[Array, "*n"], order: int) -> list[Array]:
        fallen = np.cumprod([1.0, *(-(alpha + m) / (2 * alpha) for m in range(order))])
        return [c * (1 + s / (2 * alpha)) ** (-alpha - m) for m, c in enumerate(fallen)]

    return profile


def matern(nu: float) -> Profile:
    """Return a function for the derivatives of κ = z^ν K_ν(z) / (2^{ν−1} Γ(ν)) in s, with z =
    √(2νs).

    Any ν is possible. Each derivative lowers the order by one and multiplies by −ν, because of (z^ν
    K_ν)′ = −z z^{ν−1} K_{ν−1} (DLMF 10.29.4).

    A derivative that diverges at s = 0 is replaced by 0. In all derivatives in τ that exist, it is
    multiplied by a factor that vanishes faster.
    """

    def profile(s: Float[Array, "*n"], order: int) -> list[Array]:
        z, scale = np.sqrt(2 * nu * s), 2 ** (1 - nu) / gamma(nu)
        return [scale * (-nu) ** m * _bessel(nu - m, z) for m in range(order + 1)]

    return profile


def _bessel(mu: float, z: Float[Array, "*n"]) -> Float[Array, "*n"]:
    """Return z^μ K_μ(z). At z = 0, this is the limit if it is finite, and otherwise 0."""
    away = np.where(z > 0, z, 1.0)
    order = abs(mu) - 0.5
    if order == int(order):  # K of half-integer order is elementary (DLMF 10.49.12)
        n = int(order)
        faculty = math.factorial
        terms = [
            faculty(n + j) / faculty(j) / faculty(n - j) * (2 * away) ** -j for j in range(n + 1)
        ]
        values = away**mu * np.sqrt(math.pi / (2 * away)) * np.exp(-away) * sum(terms)
    else:
        values = away**mu * kv(mu, away)
    return np.where(z > 0, values, 2 ** (mu - 1) * gamma(mu) if mu > 0 else 0.0)


def times(a: Jet, b: Jet, order: int) -> Jet:
    """Return the product of two series, truncated at the order."""
    out: Jet = {}
    for (p, u), (q, v) in product(a.items(), b.items()):
        if sum(p) + sum(q) <= order:
            key = tuple(i + j for i, j in zip(p, q, strict=True))
            out[key] = out[key] + u * v if key in out else u * v
    return out


def compose(outer: Sequence[Array], inner: Jet, zero: Index, order: int) -> Jet:
    """Return Σ_m outer_m inner^m for a series `inner` without a constant term, by Horner's rule."""
    out: Jet = {zero: outer[-1]}
    for coefficient in reversed(outer[:-1]):
        out = times(out, inner, order)
        out[zero] = coefficient + out.get(zero, 0.0)
    return out


@dataclass(frozen=True)
class Leaf:
    """The scalar kernel κ(Σ_c (τ_c/ℓ_c)²) of some columns of the inputs."""

    profile: Profile
    lengthscales: dict[int, float]  # by column

    def jet(self, tau: Float[Array, "n m D"], space: Sequence[int], order: int) -> Jet:
        s, inner = 0.0, {}
        for column, ell in self.lengthscales.items():
            s = s + (tau[..., column] / ell) ** 2
            if column in space:  # (τ + h)² − τ² = 2τh + h²
                place = space.index(column)
                inner[unit(place, len(space))] = 2 * tau[..., column] / ell**2
                inner[unit(place, len(space), 2)] = np.full(tau.shape[:-1], ell**-2)
        own = order if inner else 0
        outer = [d / math.factorial(m) for m, d in enumerate(self.profile(s, own))]
        return compose(outer, inner, (0,) * len(space), own)


def unit(place: int, length: int, power: int = 1) -> Index:
    return tuple(power * (i == place) for i in range(length))


@dataclass(frozen=True)
class Scalar:
    """A scalar kernel, which is a variance times a product of leaves. It is constant without
    leaves."""

    variance: float
    leaves: tuple[Leaf, ...]

    def derivatives(self, tau: Float[Array, "n m D"], space: Sequence[int], order: int) -> Jet:
        """Return ∂^α k(τ) for all |α| ≤ order. Missing derivatives are zero."""
        jet: Jet = {(0,) * len(space): np.full(tau.shape[:-1], self.variance)}
        for leaf in self.leaves:
            jet = times(jet, leaf.jet(tau, space, order), order)
        return {alpha: math.prod(map(math.factorial, alpha)) * c for alpha, c in jet.items()}


@dataclass(frozen=True)
class Process:
    """A scalar process g, with the field f = Σ_α makes[α] ∂^α g."""

    kernel: Scalar
    makes: dict[Index, Float[Array, "p"]]
    role: str  # "potential", "stream", "constant" or "mixed"
    term: int = 0  # of the kernel, where it is a sum


def gradient(kernel: Scalar, d: int) -> list[Process]:
    """Return the processes of f = ∇g, which has the covariance −∇∇ᵀk."""
    return [Process(kernel, {unit(i, d): np.eye(d)[i] for i in range(d)}, "potential")]


def rotation(kernel: Scalar, d: int) -> list[Process]:
    """Return the processes of f = (∂₂ψ, −∂₁ψ), or of f = ∇×A with independent components of A.

    The covariance of f is (∇∇ᵀ − ΔI)k.
    """
    if d == 2:
        makes = {(0, 1): np.array([1.0, 0.0]), (1, 0): np.array([0.0, -1.0])}
        return [Process(kernel, makes, "stream")]
    turns = np.cross(np.eye(3)[:, None], np.eye(3)[None])  # e_j × e_c
    return [
        Process(kernel, {unit(j, 3): turns[j, c] for j in range(3) if j != c}, "stream")
        for c in range(3)
    ]


def mixed(kernel: Scalar, matrix: Float[Array, "p p"], d: int) -> list[Process]:
    """Return the processes of a field with the covariance k A.

    They are independent, and each is multiplied by a column of a root of A.
    """
    values, vectors = np.linalg.eigh(matrix)
    role = "mixed" if kernel.leaves else "constant"
    return [
        Process(kernel, {(0,) * d: column}, role)
        for column in (vectors * np.sqrt(values.clip(0))).T
        if column.any()
    ]


@dataclass(frozen=True)
class Functional:
    """Linear functionals of a field, Σ_α Σ_kl weights[α]_rkl ∂^α g_l(node_k), indexed by r.

    `constant` is the effect of a constant mean on them.
    """

    nodes: Float[Array, "k D"]
    weights: dict[Index, Float[Array, "rows k L"]]
    constant: Float[Array, "rows p"]

    def __len__(self) -> int:
        return len(self.constant)

    def rows(self, chosen: Array) -> "Functional":
        """Return some of the functionals."""
        weights = {alpha: w[chosen] for alpha, w in self.weights.items()}
        return Functional(self.nodes, weights, self.constant[chosen])

    def through(self, matrix: Float[Array, "q r"]) -> "Functional":
        """Multiply each group of consecutive functionals, such as the components at a point, by a
        matrix."""
        return self._mapped(np.kron(np.eye(len(self) // matrix.shape[1]), matrix))

    def _mapped(self, matrix: Float[Array, "q rows"]) -> "Functional":
        weights = {a: np.tensordot(matrix, w, axes=1) for a, w in self.weights.items()}
        return Functional(self.nodes, weights, matrix @ self.constant)

    def of(self, processes: Sequence[bool]) -> "Functional":
        """Return the functionals of a part of the field, for which the mean is zero. The part is a
        selection of processes."""
        weights = {alpha: w * np.asarray(processes) for alpha, w in self.weights.items()}
        return Functional(self.nodes, weights, 0 * self.constant)

    def minus(self, other: "Functional") -> "Functional":
        """Return these functionals minus others."""
        weights = {
            alpha: np.concatenate([w, -other.weights[alpha]], axis=1)
            for alpha, w in self.weights.items()
        }
        nodes = np.concatenate([self.nodes, other.nodes])
        return Functional(nodes, weights, self.constant - other.constant)


@dataclass(frozen=True)
class Field:
    """A prior with its processes, the number of outputs, and the inputs that are space."""

    processes: list[Process]
    num_outputs: int
    space: tuple[int, ...]

    # --- functionals ---------------------------------------------------------------------------

    def local(
        self, x: Float[Array, "n D"], seen: Iterable[tuple[Array, Index, Float[Array, "q p"]]]
    ) -> Functional:
        """Return Σ M ∂^β f(x + shift), with q values at every point.

        The sum is over triples `seen` of a shift in space, a multi-index β and a matrix M (q, p).
        """
        seen = list(seen)
        shifts = np.unique([shift for shift, _, _ in seen], axis=0)
        n, q, p = len(x), *seen[0][2].shape
        nodes = np.repeat(x[None], len(shifts), axis=0)
        nodes[..., list(self.space)] += shifts[:, None]
        weights: dict[Index, Array] = {}
        constant = np.zeros((n, q, p))
        every = np.arange(n)
        for shift, beta, matrix in seen:
            place = int((shifts == shift).all(-1).argmax())
            constant += 0 if any(beta) else matrix
            for number, process in enumerate(self.processes):
                for alpha, column in process.makes.items():
                    key = tuple(i + j for i, j in zip(alpha, beta, strict=True))
                    empty = np.zeros((n, q, len(shifts), n, len(self.processes)))
                    own = weights.setdefault(key, empty)
                    own[every, :, place, every, number] += matrix @ column
        flat = {key: w.reshape(n * q, len(shifts) * n, -1) for key, w in weights.items()}
        return Functional(nodes.reshape(-1, x.shape[-1]), flat, constant.reshape(n * q, p))

    def values(self, x: Float[Array, "n D"]) -> Functional:
        """Return the values of the field, point by point."""
        return self.local(x, [(self._here, self._none, np.eye(self.num_outputs))])

    def along(self, x: Float[Array, "n D"], directions: Float[Array, "n p"]) -> Functional:
        """Return the component of the field along a separate direction at every point."""
        n, p = directions.shape
        rows = np.zeros((n, n, p))
        rows[np.arange(n), np.arange(n)] = directions
        return self.values(x)._mapped(rows.reshape(n, -1))

    def jacobian(self, x: Float[Array, "n D"], box: Sequence[float] = ()) -> Functional:
        """Return ∂_j f_i, row by row. If widths are given, the field is averaged over boxes."""
        d, p = len(self.space), self.num_outputs
        averaged = _box(box) if len(box) else [(self._here, 1.0)]
        return self.local(
            x,
            [
                (shift, unit(j, d), weight * np.kron(np.eye(p), np.eye(d)[:, [j]]))
                for shift, weight in averaged
                for j in range(d)
            ],
        )

    def divergence(self, x: Float[Array, "n D"], box: Sequence[float] = ()) -> Functional:
        """Return Σ_i ∂_i f_i."""
        return self.jacobian(x, box).through(np.eye(self.num_outputs).reshape(1, -1))

    def curl(self, x: Float[Array, "n D"], box: Sequence[float] = ()) -> Functional:
        """Return ∂₁f₂ − ∂₂f₁, or the three components ∂₂f₃ − ∂₃f₂, … of the curl in three
        dimensions."""
        jacobian = self.jacobian(x, box)  # [∂₁f₁, ∂₂f₁, …, ∂₁f₂, …]
        if self.num_outputs == 2:
            return jacobian.through(np.array([[0.0, -1.0, 1.0, 0.0]]))
        rows = np.zeros((3, 3, 3))  # component, i, j
        for a, b, c in ((0, 1, 2), (1, 2, 0), (2, 0, 1)):
            rows[a, c, b], rows[a, b, c] = 1.0, -1.0
        return jacobian.through(rows.reshape(3, 9))

    def box(self, x: Float[Array, "n D"], widths: Sequence[float], nodes: int = 8) -> Functional:
        """Return the mean over a box around x."""
        eye = np.eye(self.num_outputs)
        return self.local(x, [(shift, self._none, w * eye) for shift, w in _box(widths, nodes)])

    def line(self, x: Float[Array, "n D"], path: Float[Array, "c d"], nodes: int = 8) -> Functional:
        """Return ∫ f·ds along the straight segments between the corners x + path."""
        return self._along_path(x, path, np.eye(len(self.space)), nodes)

    def flux(self, x: Float[Array, "n D"], path: Float[Array, "c 2"], nodes: int = 8) -> Functional:
        """Return ∫ f·n ds with the normal n to the right of the path. For a segment (a, b), n is
        (b, −a)."""
        return self._along_path(x, path, np.array([[0.0, 1.0], [-1.0, 0.0]]), nodes)

    def _along_path(self, x, path, turn: Float[Array, "d d"], nodes: int) -> Functional:
        pieces = pairwise(path)
        return self.local(
            x,
            [
                (a + t * (b - a), self._none, w * (turn @ (b - a))[None])
                for a, b in pieces
                for t, w in zip(*_gauss(nodes), strict=True)
            ],
        )

    def process(
        self,
        x: Float[Array, "n D"],
        role: str,
        reference: Float[Array, "d"] | None = None,
        background: bool | None = None,
    ) -> Functional:
        """Return the sum of all processes with a role, such as the potential, minus its value at a
        reference.

        With `background`, it includes the potential of the constant mean.
        """
        chosen = np.array([own.role == role for own in self.processes], dtype=float)
        weights = {self._none: np.eye(len(x))[..., None] * chosen}
        here = Functional(x, weights, self._of_mean(x, role, background))
        if reference is None:
            return here
        there = x.copy()
        there[:, list(self.space)] = reference
        of_mean = self._of_mean(there, role, background)
        return here.minus(replace(here, nodes=there, constant=of_mean))

    def _of_mean(self, x: Float[Array, "n D"], role: str, background: bool | None) -> Array:
        """Return the potential ⟨c, x⟩ or the stream function c₁x₂ − c₂x₁ of a constant mean c.

        It is zero if `background` is False. By default, it is zero if the field has processes of
        other roles.
        """
        if background is None:
            background = all(own.role == role for own in self.processes)
        y = x[:, list(self.space)] if background else np.zeros((len(x), len(self.space)))
        return y if role == "potential" else np.stack([y[:, 1], -y[:, 0]], axis=-1)

    def part(
        self, x: Float[Array, "n D"], chosen: Callable[[Process], bool], with_mean: bool = False
    ) -> Functional:
        """Return the field of some of the processes, with or without the constant mean."""
        values = self.values(x)
        part = values.of([chosen(own) for own in self.processes])
        return replace(part, constant=values.constant) if with_mean else part

    @property
    def _here(self) -> Float[Array, "d"]:
        return np.zeros(len(self.space))

    @property
    def _none(self) -> Index:
        return (0,) * len(self.space)

    # --- the prior -----------------------------------------------------------------------------

    def covariance(self, a: Functional, b: Functional) -> Float[Array, "r s"]:
        """Return Cov[a(f), b(f)]."""
        tau = a.nodes[:, None] - b.nodes[None]
        total = np.zeros((len(a), len(b)))
        for kernel, members in self._shared:
            left, right = (self._used(own, members) for own in (a, b))
            if not left or not right:
                continue
            order = max(sum(alpha) for alpha in left) + max(sum(beta) for beta in right)
            found = kernel.derivatives(tau, self.space, order)
            for (alpha, u), (beta, v) in product(left.items(), right.items()):
                key = tuple(i + j for i, j in zip(alpha, beta, strict=True))
                if key in found:
                    sign = (-1) ** sum(beta)
                    seen = np.tensordot(v, found[key], axes=(1, 1))  # (s, L, k)
                    total += sign * np.tensordot(u, seen, axes=((1, 2), (2, 1)))
        return total

    @cached_property
    def _shared(self) -> list[tuple[Scalar, list[int]]]:
        """The kernels, each with the indices of its processes."""
        kernels = {id(own.kernel): own.kernel for own in self.processes}
        return [
            (kernel, [i for i, own in enumerate(self.processes) if own.kernel is kernel])
            for kernel in kernels.values()
        ]

    @staticmethod
    def _used(functional: Functional, members: list[int]) -> dict[Index, Array]:
        """Return the nonzero weights of some processes."""
        own = {alpha: w[..., members] for alpha, w in functional.weights.items()}
        return {alpha: w for alpha, w in own.items() if w.any()}


def _gauss(nodes: int) -> tuple[Array, Array]:
    """Return nodes and weights of a Gauss–Legendre rule for the mean over (0, 1)."""
    t, w = np.polynomial.legendre.leggauss(nodes)
    return 0.5 * (1 + t), 0.5 * w


def _box(widths: Sequence[float], nodes: int = 8) -> list[tuple[Float[Array, "d"], float]]:
    rules = [
        list(zip((t - 0.5) * width, w, strict=True)) for width in widths for t, w in [_gauss(nodes)]
    ]
    return [
        (np.array([t for t, _ in own]), math.prod(w for _, w in own)) for own in product(*rules)
    ]


@dataclass(frozen=True)
class Reading:
    """An observation y = a(f) + ε with ε ~ N(0, noise)."""

    functional: Functional
    y: Float[Array, "r"]
    noise: Float[Array, "r r"]


class Posterior:
    """The posterior of a field given observations and a constant mean.

    If no mean is given, it is the mean with the largest evidence, and its uncertainty is included.
    """

    def __init__(
        self, field: Field, readings: Sequence[Reading], mean: Float[Array, "p"] | None = None
    ):
        self.field, self.readings = field, readings
        blocks = [
            [self._block(i, j) if i <= j else None for j in range(len(readings))]
            for i in range(len(readings))
        ]
        blocks = [
            [blocks[i][j] if i <= j else blocks[j][i].T for j in range(len(readings))]
            for i in range(len(readings))
        ]
        self.factor = np.linalg.cholesky(np.block(blocks))
        self.ones = self._white(np.concatenate([own.functional.constant for own in readings]))
        y = self._white(np.concatenate([own.y for own in readings]))
        self.squares = y @ y  # of which the evidence is a small difference
        self.of_mean = np.zeros((self.ones.shape[1],) * 2)  # its covariance
        if mean is None:  # generalised least squares, along directions that readings depend on
            seen = np.concatenate([own.functional.constant for own in readings])
            _, sizes, directions = np.linalg.svd(seen, full_matrices=False)
            seen = directions[sizes > 1e-10 * sizes.max()].T
            inverse = seen @ np.linalg.pinv(self.ones @ seen, rcond=0)
            mean, self.of_mean = inverse @ y, inverse @ inverse.T
        self.mean, self.white = mean, y - self.ones @ mean
        logdet = 2 * np.log(np.diagonal(self.factor)).sum()
        count = len(y) * math.log(2 * math.pi)
        self.evidence = -0.5 * (self.white @ self.white + logdet + count)

    def _block(self, i: int, j: int) -> Array:
        a, b = self.readings[i], self.readings[j]
        return self.field.covariance(a.functional, b.functional) + (a.noise if i == j else 0.0)

    def _white(self, columns: Array) -> Array:
        return np.linalg.solve(self.factor, columns)

    def predict(self, functional: Functional) -> tuple[Array, Array, Array]:
        """Return the mean, the covariance, and the prior covariance of functionals."""
        cross = [self.field.covariance(own.functional, functional) for own in self.readings]
        gain, prior = (
            self._white(np.concatenate(cross)),
            self.field.covariance(functional, functional),
        )
        effect = functional.constant - gain.T @ self.ones
        covariance = prior - gain.T @ gain + effect @ self.of_mean @ effect.T
        return gain.T @ self.white + functional.constant @ self.mean, covariance, prior
