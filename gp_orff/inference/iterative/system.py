"""A with its preconditioner: A⁻¹b, log|A| with its standard error, and draws from N(0, A⁻¹)."""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from gp_orff.inference.iterative.conjugate_gradients import Solution, solve
from gp_orff.inference.iterative.lanczos import inverse_root, quadrature
from gp_orff.inference.iterative.operator import WeightPrecision
from gp_orff.inference.iterative.preconditioner import Preconditioner

_LOOSEST = 1e-2  # relative residual of the mean
_FEWEST = 100  # iterations, whatever they cost


@dataclass(frozen=True)
class Accuracy:
    """The effort of iterative solutions.

    Args:
        block: features of the preconditioner's dense block. If it holds all, nothing is estimated.
        probes: random vectors that estimate log|A| and its gradient.
        mean_error: of the mean, root mean square over the posterior's standard deviation. Its
            square, times the smaller of F and the number of values, is the error of yᵀK⁻¹y.
        permitted_error: likewise, where `operations` do not suffice for that.
        operations: for the mean, about; 5·10¹⁰ take 10 s on one core.
        variance_operations: for solutions that tell variances, about. Those of more points are
            estimated from paths, and iterations beyond them end at the permitted residual.
        constants_tolerance: relative residual of constants in the place of the data, and of the
            data that tell the best ones. The error of these is of the order of its square.
        variance_tolerance: relative residual of variances and sample paths. The error of a
            variance is of the order of its square.
        permitted_tolerance: likewise, where the most iterations do not suffice for that. Among
            dense tracks and clusters, variances were within 0.4 % at residuals of 0.06.
        random_tolerance: relative residual of probes, and of paths that estimate variances: far
            below their random error, which is of the order of a tenth.
        paths: sample paths that estimate variances at many points.
        most: iterations, at most.
        seed: of probes and paths.
    """

    block: int = 6000
    probes: int = 8
    mean_error: float = 3e-3
    permitted_error: float = 0.1
    operations: float = 5e10
    variance_operations: float = 5e11
    constants_tolerance: float = 1e-2
    variance_tolerance: float = 1e-4
    permitted_tolerance: float = 1e-2
    random_tolerance: float = 1e-2
    paths: int = 64
    most: int = 2000
    seed: int = 0


class Probes(NamedTuple):
    """z = R u for random signs u, with P⁻¹z and the solutions of A x = z."""

    preconditioned: Float[Tensor, "k F"]
    solution: Solution


@dataclass(frozen=True)
class System:
    """A, P and the accuracy of solutions; vectors are rows."""

    precision: WeightPrecision
    preconditioner: Preconditioner
    accuracy: Accuracy
    num_values: float  # of the data

    def solve(self, b: Float[Tensor, "k F"]) -> Float[Tensor, "k F"]:
        """A⁻¹b, so accurate that bᵀA⁻¹b is."""
        accuracy = self.accuracy
        limits = accuracy.variance_tolerance, accuracy.most, accuracy.permitted_tolerance
        enough = int(accuracy.variance_operations / (len(b) * self._cost))
        return solve(self.precision, self.preconditioner, b, *limits, enough=enough).x

    def affords(self, solutions: int) -> bool:
        """Whether so many solutions take no more than the operations for variances."""
        affordable = self.accuracy.variance_operations / (solutions * self._cost)
        return affordable >= self.accuracy.most or affordable >= self._typical_iterations

    @cached_property
    def _typical_iterations(self) -> int:
        """Of a random vector, until its residual is permitted."""
        z = self.preconditioner.root(self._signs[:1])
        return self._solution(z, self.accuracy.permitted_tolerance).iterations.item()

    def solve_mean(self, b: Float[Tensor, "1+p F"]) -> Float[Tensor, "1+p F"]:
        """A⁻¹Bᵀ, to the accuracy of the mean; the columns of constants get the relative residual of
        that of y."""
        wanted, permitted = self._residuals(b[:1])
        return self._solution(b, wanted, permitted).x

    def solve_roughly(self, b: Float[Tensor, "1+p F"]) -> Float[Tensor, "1+p F"]:
        """A⁻¹Bᵀ, so accurate that BᵀA⁻¹B tells the best constants, and the variance of these."""
        return self._solution(b, self.accuracy.constants_tolerance).x

    def refined(self, b: Float[Tensor, "1 F"], guess: Float[Tensor, "1 F"]) -> Float[Tensor, "1 F"]:
        """A⁻¹b of data less their mean, to the accuracy of the mean, from a guess."""
        wanted, permitted = self._residuals(b)
        return solve(
            self.precision, self.preconditioner, b, wanted, self._affordable, permitted, guess
        ).x

    def _residuals(self, b: Float[Tensor, "1 F"]) -> tuple[float, float]:
        """The relative residuals of the wanted and of the permitted error of the mean.

        An error e of the weights, with the residual r, changes the field by at most ‖e‖_A standard
        deviations at any point, and by about ‖e‖_A/√n in root mean square over n determined
        directions. ‖e‖²_A ≈ rᵀP⁻¹r.
        """
        size = (b * self.preconditioner.solve(b)).sum().sqrt().item()
        directions = min(self.num_values, len(self.preconditioner.diagonal))
        errors = self.accuracy.mean_error, self.accuracy.permitted_error
        wanted, permitted = (
            min(error * directions**0.5 / size, _LOOSEST) if size else _LOOSEST for error in errors
        )
        return wanted, max(wanted, permitted)

    @property
    def _affordable(self) -> int:
        """Iterations of one system."""
        count = int(self.accuracy.operations / self._cost)
        return min(max(count, _FEWEST), self.accuracy.most)

    @property
    def _cost(self) -> float:
        """The operations of an iteration: Fourier transforms for each output, triangular solves."""
        images, p = self.precision.images, self.precision.directions.shape[0]
        transforms = 5 * p * images.size * math.log2(images.size)
        return transforms + 2 * len(self.preconditioner.block) ** 2

    def draw(self, z: Float[Tensor, "k F"]) -> Float[Tensor, "k F"]:
        """R⁻ᵀB^{−½}z, draws from N(0, A⁻¹) if z are draws from N(0, I)."""
        return self._draw(z, self.accuracy.variance_tolerance)

    def _draw(self, z: Float[Tensor, "k F"], tolerance: float) -> Float[Tensor, "k F"]:
        limits = tolerance, self.accuracy.most, self.accuracy.permitted_tolerance
        return inverse_root(self.precision, self.preconditioner, z, *limits)

    @cached_property
    def draws(self) -> tuple[Float[Tensor, "k F"], Float[Tensor, "k F"]]:
        """Draws from N(0, A⁻¹) and N(0, P⁻¹) of common random numbers."""
        shape = self.accuracy.paths, len(self.preconditioner.diagonal)
        z = torch.randn(*shape, generator=self._generator, dtype=torch.float64)
        z = z.to(self.preconditioner.diagonal.device)
        draws = self._draw(z, self.accuracy.random_tolerance)
        return draws, self.preconditioner.inverse_root_transposed(z)

    @cached_property
    def probes(self) -> Probes:
        """The probes of the gradient of log|A|."""
        z = self.preconditioner.root(self._signs)
        solution = self._solution(z, self.accuracy.random_tolerance)
        return Probes(self.preconditioner.solve(z), solution)

    @cached_property
    def logdet_ratio(self) -> tuple[Float[Tensor, ""], float]:
        """log|A| − log|P| = tr log B, and its standard error over the probes.

        Stochastic Lanczos quadrature (Ubaru, Chen & Saad 2017) of uᵀ(log B)u, less uᵀ(B − I)u,
        whose mean is zero: B has the diagonal, and in the block the values, of an identity.
        """
        parts = self.precision, self.preconditioner, self._signs
        values = quadrature(*parts, lambda nodes: nodes.log() - (nodes - 1), self.accuracy.most)
        values = values * len(self.preconditioner.diagonal)
        error = values.std() / len(values) ** 0.5
        return values.mean(), error.item()

    @property
    def _signs(self) -> Float[Tensor, "k F"]:
        """The random signs u of the probes."""
        shape = self.accuracy.probes, len(self.preconditioner.diagonal)
        signs = torch.randint(0, 2, shape, generator=self._generator).double() * 2 - 1
        return signs.to(self.preconditioner.diagonal.device)

    def _solution(
        self, b: Float[Tensor, "k F"], tolerance: float, permitted: float | None = None
    ) -> Solution:
        parts = self.precision, self.preconditioner
        return solve(*parts, b, tolerance, self.accuracy.most, permitted)

    @property
    def _generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.accuracy.seed)
