"""Iterative solvers: LSMR and stochastic gradients; all solvers by name."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Float
from scipy.sparse.linalg import LinearOperator, lsmr
from sklearn.exceptions import ConvergenceWarning
from torch import Tensor
from torch.autograd import grad
from torch.linalg import solve_triangular
from torch.nn.functional import mse_loss

from gp_orff.features.expansion import Expansion
from gp_orff.regression.base import (
    Options,
    Problem,
    Solution,
    Solver,
    refuse_laplacian,
    refuse_loss,
)
from gp_orff.regression.direct import Cholesky, Stein
from gp_orff.regression.laplacian import penalty

# Stochastic gradient descent on the weights of features, for any loss and without a learning rate.
#
# The step lengths are distance over gradients (DoG), in coordinates in which the features of a
# sample have variances of one size; the iterates are averaged.
#
# 1. `Descent.start` takes a sample of rows of Φ. Its principal directions define coordinates u in
#    which large variances are reduced to one limit (`Whitening`): plain gradient steps would be
#    limited by the largest variance and barely move along the others. Directions that the sample
#    does not determine stay as they are.
# 2. `reaching` chooses the first distance, so that a step gives predictions of the size of y, and
#    halves it while the loss grows. DoG then lengthens steps as the iterate moves away from the
#    start.
# 3. `pass_over` visits the points in random order, in batches of at most 64.
# 4. The average of the iterates with weights ∝ (t/T)⁸ is the result, because single iterates
#    fluctuate with the batches; the power lets early iterates be forgotten.
#
# A Laplacian M is no sum over the points of a batch. Its penalty is quadratic in θ, as α‖θ‖² is,
# and both are one: α‖θ‖² + w fᵀMf = α‖v‖² for v = Lᵀθ, L Lᵀ = I + (w/α) ΦᵀMΦ. In v the problem is
# that without M, with the features ΦL⁻ᵀ of a kernel that M deforms (Sindhwani, Niyogi & Belkin
# 2005). The descent goes on in v (`Whitening.factor`), and every loss is possible.


Loss = Callable[[Tensor, Tensor], Tensor]

_BATCH = 64  # the most points of a step
_STEPS = 16  # of a pass, at least, if there are as many points
_SAMPLE = 1024  # rows of Φ whose principal directions are found,
_SAMPLE_NUMBERS = 2**25  # and numbers in them: 256 MB
_ROUNDING = 1e-8  # of variances, relative to the largest
_HALVINGS = 20  # of the first step, at most
_DECAY = 8  # after t steps, step s has a weight ∝ (s/t)^8 in the average


@dataclass(frozen=True)
class Whitening:
    """Coordinates u of the weights: v = u + V diag(gains) Vᵀu and θ = L⁻ᵀv; an immutable value.

    V are the principal directions of some rows of ΦL⁻ᵀ; without a Laplacian, L = I and θ = v.
    Features of variance λ along one of them have variance λδ/(λ + δ) in u, and a gradient step
    advances equally along all with λ > δ. There are at most a quarter as many of these as rows:
    those that a sample determines.

    Ma & Belkin 2017 (EigenPro), where the variances are cut at δ.
    """

    vectors: Float[Tensor, "F r"]
    gains: Float[Tensor, "r 1"]
    row_size: float  # the root mean square length of the rows of Φ, in u
    factor: Float[Tensor, "F F"] | None = None  # L; None: the identity

    @classmethod
    def of(
        cls,
        features: Float[Tensor, "n F"],
        least: float,
        factor: Float[Tensor, "F F"] | None = None,
    ) -> "Whitening":
        """From n rows of Φ, with δ ≥ `least`."""
        if factor is not None:
            features = solve_triangular(factor, features.mT, upper=False).mT
        _, singular, vectors = torch.linalg.svd(features, full_matrices=False)
        variance = singular.square() / len(features)
        determined = min(len(features) // 4, len(variance) - 1)
        limit = variance[determined].clamp_min(max(least, _ROUNDING * variance[0].item()))
        share = limit / (variance + limit)
        row_size = (share * variance).sum().sqrt().item()
        return cls(vectors.mT, (share.sqrt() - 1).unsqueeze(-1), row_size, factor)

    def penalised(self, u: Float[Tensor, "F k"]) -> Float[Tensor, "F k"]:
        """v, whose square is penalised."""
        return u + self.vectors @ (self.gains * (self.vectors.mT @ u))

    def theta(self, v: Float[Tensor, "F k"]) -> Float[Tensor, "F k"]:
        """θ from v."""
        return v if self.factor is None else solve_triangular(self.factor.mT, v, upper=True)


@dataclass(frozen=True)
class Descent:
    """A descent after some steps; an immutable value.

    It minimises Σ loss + α‖v‖², divided by the number of values in the sum. Steps are u ← u − η g
    with gradients g of up to 64 points and η = max_t ‖u_t − u_0‖ / (Σ_t ‖g_t‖²)^½, which fits
    losses of any scale and smoothness. The average of u has weights ∝ (t/T)^8.

    Ivgi, Hinder & Carmon 2023, Equation 1 (DoG); Shamir & Zhang 2013 (polynomial-decay averaging).
    """

    expansion: Expansion
    whitening: Whitening
    seed: int
    u: Float[Tensor, "F k"]
    average: Float[Tensor, "F k"]
    reach: float  # max_t ‖u_t‖
    squares: float = 0.0  # Σ_t ‖g_t‖²
    steps: int = 0
    passes: int = 0
    num_points: int = 0  # in all passes together

    @classmethod
    @torch.no_grad()
    def start(
        cls,
        expansion: Expansion,
        x: Float[Tensor, "N d"],
        y: Float[Tensor, "N q"],
        loss: Loss,
        penalty: float,
        seed: int,
        factor: Float[Tensor, "F F"] | None = None,
    ) -> "Descent":
        """At θ = 0, with coordinates and a first step that suit a sample of these data.

        Args:
            expansion: Φ, for vectors of q outputs; or for one output, if each of the q columns of
                y has weights of its own.
            x, y, loss, penalty: as in `pass_over`.
            seed: of the sample and of the order of the points in all passes.
            factor: L of the Laplacian; None without one.

        Raises:
            ValueError: the loss at zero is not a finite number.
        """
        points, values = _sample(expansion, x, y, seed)
        num_columns = y.shape[-1] if expansion.num_outputs == 1 else 1
        least = penalty * num_columns * _units_of_squares(loss, values)
        whitening = Whitening.of(expansion.features(points), least, factor)
        u = y.new_zeros(expansion.num_features, num_columns)
        return cls(expansion, whitening, seed + 1, u, u, reach=0.0).reaching(x, y, loss)

    @torch.no_grad()
    def reaching(self, x: Float[Tensor, "n d"], y: Float[Tensor, "n q"], loss: Loss) -> "Descent":
        """This descent, with steps at least as long as a first one that suits a sample of the data.

        That one gives predictions of the size of y; where y is zero, it is the loss over the norm
        of its gradient. It is halved until the loss does not grow.
        """
        x, y = _sample(self.expansion, x, y, self.seed)
        zero = torch.zeros_like(self.u)
        value, gradient = self._value_and_gradient(zero, x, y, loss, 0.0)
        size = gradient.norm().item()
        if size == 0:
            return self
        reach = y.abs().mean().item() / self.whitening.row_size or value.item() / size
        for _ in range(_HALVINGS):
            if self._objective(-reach / size * gradient, x, y, loss, 0.0) <= value:
                break
            reach /= 2
        return replace(self, reach=max(reach, self.reach))

    @property
    def theta(self) -> Float[Tensor, "F k"]:
        """θ, averaged."""
        return self.whitening.theta(self.whitening.penalised(self.average))

    def field(self, x: Float[Tensor, "n d"], theta: Float[Tensor, "F k"]) -> Float[Tensor, "n q"]:
        """Φ(x)θ, a column for each output, or for each column of θ."""
        return self.expansion.apply(x, theta)

    @torch.no_grad()
    def pass_over(
        self,
        x: Float[Tensor, "n d"],
        y: Float[Tensor, "n q"],
        loss: Loss,
        penalty: float,
        length: float = 1.0,
    ) -> "Descent":
        """The descent after one pass over these points, in random order.

        Args:
            x: points.
            y: what is observed there, all finite.
            loss: the mean over the entries of a prediction and of y.
            penalty: α, divided by the number of values that it belongs to.
            length: a factor of all steps of this pass.

        Raises:
            ValueError: the loss or its gradient is not finite.
        """
        u, average, reach = self.u, self.average, self.reach
        squares, steps = self.squares, self.steps
        size = min(_BATCH, max(1, len(x) // _STEPS))
        order = _permutation(len(x), self.seed + self.passes)
        for batch in order.tensor_split(-(-len(x) // size)):
            _, gradient = self._value_and_gradient(u, x[batch], y[batch], loss, penalty)
            squares += gradient.square().sum().item()
            if squares > 0:
                u = u - length * reach / squares**0.5 * gradient
            steps += 1
            reach = max(reach, u.norm().item())
            # The recursive form of the weights of Shamir & Zhang (2013); the first step replaces
            # the start.
            average = average.lerp(u, (_DECAY + 1) / (_DECAY + steps))
        return replace(
            self,
            u=u,
            average=average,
            reach=reach,
            squares=squares,
            steps=steps,
            passes=self.passes + 1,
            num_points=self.num_points + len(x),
        )

    def _value_and_gradient(
        self, u: Tensor, x: Tensor, y: Tensor, loss: Loss, penalty: float
    ) -> tuple[Float[Tensor, ""], Float[Tensor, "F k"]]:
        """The objective at u for some points, and its gradient."""
        with torch.enable_grad():
            u = u.detach().requires_grad_()
            value = self._objective(u, x, y, loss, penalty)
            (gradient,) = grad(value, u)
        if not (value.isfinite() and gradient.isfinite().all()):
            raise ValueError(
                f"expected a finite loss and gradient, got a loss of {value.item()} after "
                f"{self.passes} passes; use a loss that is finite for any prediction and these y"
            )
        return value.detach(), gradient

    def _objective(
        self, u: Tensor, x: Tensor, y: Tensor, loss: Loss, penalty: float
    ) -> Float[Tensor, ""]:
        """The mean loss plus the penalty."""
        v = self.whitening.penalised(u)
        value = _mean_loss(loss, self.field(x, self.whitening.theta(v)), y)
        return value + penalty * v.square().sum()


def _sample(
    expansion: Expansion, x: Float[Tensor, "N d"], y: Float[Tensor, "N q"], seed: int
) -> tuple[Float[Tensor, "n d"], Float[Tensor, "n q"]]:
    """Some of the points, with their values."""
    rows = min(_SAMPLE, _SAMPLE_NUMBERS // expansion.num_features)
    chosen = _permutation(len(x), seed)[: max(1, rows // expansion.num_outputs)]
    return x[chosen], y[chosen]


def _units_of_squares(loss: Loss, y: Float[Tensor, "n q"]) -> float:
    """2 mean|y| over the mean slope of the loss at zero, which is 1 for squares: a penalty times
    this ratio suits squares. 1 where one of them is zero."""
    with torch.enable_grad():
        zero = torch.zeros_like(y).requires_grad_()
        (slopes,) = grad(_mean_loss(loss, zero, y), zero)
    size, slope = 2 * y.abs().mean().item(), slopes.abs().sum().item()
    return size / slope if size * slope > 0 else 1.0


def _mean_loss(loss: Loss, prediction: Float[Tensor, "n q"], y: Float[Tensor, "n q"]) -> Tensor:
    """The loss, if it is one number, with a gradient where gradients are enabled."""
    value = loss(prediction, y)
    differentiable = isinstance(value, Tensor) and value.requires_grad
    if torch.is_grad_enabled() and not differentiable:
        raise ValueError(
            "expected a loss that is a differentiable function of the prediction, got one without "
            "a gradient; compute it by torch functions, without item(), detach() or numpy"
        )
    if value.dim() != 0:
        raise ValueError(
            "expected a loss that returns one number, the mean over all entries, got shape "
            f"{tuple(value.shape)}; use reduction='mean'"
        )
    return value


def _permutation(size: int, seed: int) -> Tensor:
    return torch.randperm(size, generator=torch.Generator().manual_seed(int(seed)))


# LSMR: ridge regression that needs products with Φ only.


_LSMR_TOLERANCE = 1e-10
_LIMIT_REACHED = 7  # the reason for stopping that scipy's lsmr returns


class Lsmr(Solver):
    """θ by LSMR (Fong & Saunders 2011), column by column."""

    name = "lsmr"

    def solve(self, problem: Problem, options: Options) -> Solution:
        refuse_laplacian(self.name, problem)
        refuse_loss(self.name, options)
        expansion, (x, y) = problem.observed, problem.labels
        columns = y if expansion.num_outputs == 1 else y.reshape(-1, 1)
        phi = LinearOperator(
            (len(columns), expansion.num_features),
            matvec=lambda theta: _product(expansion, x, theta),
            rmatvec=lambda values: _adjoint(expansion, x, values),
            dtype=np.float64,
        )
        limit = options.max_iter or 10 * expansion.num_features
        tol = _LSMR_TOLERANCE if options.tol is None else options.tol
        stop = {"atol": tol, "btol": tol, "conlim": 0.0, "maxiter": limit}
        found = [lsmr(phi, column, damp=problem.alpha**0.5, **stop) for column in columns.T.numpy()]
        if any(reason == _LIMIT_REACHED for _, reason, *_ in found):
            warnings.warn(
                f"lsmr reached max_iter={limit} before tol={tol:g}: raise either of them, "
                "or alpha, or use solver='cholesky'",
                ConvergenceWarning,
                stacklevel=4,  # through `fit` and its choice of threads
            )
        theta = torch.from_numpy(np.stack([solution for solution, *_ in found], axis=-1))
        return Solution(theta, max(count for _, _, count, *_ in found))


def _product(expansion: Expansion, x: Float[Tensor, "N d"], theta: np.ndarray) -> np.ndarray:
    """Φθ."""
    return expansion.apply(x, torch.from_numpy(theta).reshape(-1, 1)).flatten().numpy()


def _adjoint(expansion: Expansion, x: Float[Tensor, "N d"], values: np.ndarray) -> np.ndarray:
    """Φᵀv."""
    values = torch.from_numpy(values).reshape(len(x), expansion.num_outputs)
    return expansion.adjoint(x, values).flatten().numpy()


# Stochastic gradients: ridge regression with any loss, also of data in chunks.


_MAX_PASSES = 256
_SGD_TOLERANCE = 0.01
_LENGTH_DECAY = 0.25  # power of the pass; that of the step is about 1/2 besides


class Sgd(Solver):
    """θ by stochastic gradient descent on Σ loss + α‖θ‖² + w fᵀMf.

    Brault et al. 2016, Appendix D.1.1 i. `solve` compares the predictions after 1, 2, 4, 8, …
    passes: it stops if they change by less than `tol`, relative to their size. `partial` is one
    pass; the sum then is over all points so far, as often as they were given. The coordinates come
    from the first chunk: a thousand points from everywhere are enough.
    """

    name = "sgd"

    def solve(self, problem: Problem, options: Options) -> Solution:
        (x, y), loss = problem.labels, options.loss or mse_loss
        limit = options.max_iter or _MAX_PASSES
        tol = _SGD_TOLERANCE if options.tol is None else options.tol
        share = problem.alpha / y.numel()
        factor = _factor(problem)
        descent = Descent.start(problem.observed, x, y, loss, share, options.seed, factor)
        before = None
        while descent.passes < limit:
            length = (descent.passes + 1) ** -_LENGTH_DECAY
            descent = descent.pass_over(x, y, loss, share, length)
            if descent.passes.bit_count() == 1:  # a power of two
                now = descent.field(x, descent.theta)
                if before is not None and torch.dist(now, before) <= tol * now.norm():
                    break
                before = now
        else:
            warnings.warn(
                f"sgd reached max_iter={limit} before tol={tol:g}: raise either of them, or alpha, "
                "or use solver='cholesky' for squared errors",
                ConvergenceWarning,
                stacklevel=4,  # through `fit` and its choice of threads
            )
        return Solution(descent.theta, descent.passes, descent)

    def partial(
        self, problem: Problem, options: Options, earlier: tuple[Problem, Solution] | None
    ) -> Solution:
        (x, y), loss = problem.labels, options.loss or mse_loss
        if earlier is None:
            share = problem.alpha / y.numel()
            descent = Descent.start(problem.observed, x, y, loss, share, options.seed)
        else:
            descent = _descent_of(*earlier).reaching(x, y, loss)
            # The loss is a mean over a batch: α is divided by the number of all values so far.
            share = problem.alpha / (y.numel() + descent.num_points * y.shape[-1])
        descent = descent.pass_over(x, y, loss, share)
        return Solution(descent.theta, descent.passes, descent)


def _factor(problem: Problem) -> Float[Tensor, "F F"] | None:
    """L, with L Lᵀ = I + (w/α) ΦᵀMΦ; None without a Laplacian."""
    if problem.laplacian is None:
        return None
    if problem.alpha == 0:
        raise ValueError(
            "solver='sgd' with a Laplacian expects alpha > 0, got 0; a small one, such as 1e-6 "
            "times the variance of the kernel, determines what labels and Laplacian do not"
        )
    matrix = penalty(problem.expansion, problem.x, problem.laplacian) / problem.alpha
    matrix.diagonal().add_(1)
    return torch.linalg.cholesky(matrix)


def _descent_of(problem: Problem, solution: Solution) -> Descent:
    """The descent that found a solution."""
    if not isinstance(solution.state, Descent) or problem.laplacian is not None:
        raise ValueError(
            "expected a model learned by solver='sgd' before, without a Laplacian, got another "
            "one; pass all data to fit, or begin with a clone"
        )
    return solution.state


# The solvers of `ORFFRidge`, by name.


SOLVERS: dict[str, Solver] = {
    solver.name: solver for solver in (Cholesky(), Stein(), Lsmr(), Sgd())
}
