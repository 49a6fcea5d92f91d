"""The protocol of solvers."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral, Real

from jaxtyping import Float
from torch import Tensor

from gp_orff.regression.problem import Problem


@dataclass(frozen=True)
class Options:
    """The settings of iterative solvers.

    Raises:
        ValueError: one of them has no meaning.
    """

    max_iter: int | None = None
    tol: float | None = None
    loss: Callable[[Tensor, Tensor], Tensor] | None = None
    seed: int = 0

    def __post_init__(self):
        valid = {
            "max_iter a positive integer or None": self.max_iter is None
            or (isinstance(self.max_iter, Integral) and self.max_iter >= 1),
            "tol a number >= 0 or None": self.tol is None
            or (isinstance(self.tol, Real) and self.tol >= 0),
            "loss a function such as torch.nn.HuberLoss() or None": self.loss is None
            or callable(self.loss),
            "seed an integer >= 0": isinstance(self.seed, Integral) and self.seed >= 0,
        }
        for words, holds in valid.items():
            if not holds:
                value = getattr(self, words.split()[0])
                raise ValueError(f"expected {words}, got {value!r}")


@dataclass(frozen=True)
class Solution:
    """The weights of the features, (F, q) for a scalar kernel, else (F, 1)."""

    theta: Float[Tensor, "F _"]
    num_iterations: int = 1
    state: object = None  # what `partial` goes on from


class Solver(ABC):
    """A way to solve a `Problem`."""

    name: str

    @abstractmethod
    def solve(self, problem: Problem, options: Options) -> Solution:
        """The minimiser."""

    def partial(
        self, problem: Problem, options: Options, earlier: tuple[Problem, Solution] | None
    ) -> Solution:
        """The solution for the data of `problem` and all earlier data.

        Raises:
            ValueError: this solver needs all data at once; the earlier solution is of another one.
        """
        raise ValueError(
            "partial_fit expects a solver that takes data in chunks, got "
            f"solver={self.name!r}; use 'cholesky' or 'sgd', or fit"
        )


def refuse_laplacian(name: str, problem: Problem) -> None:
    """Raise ValueError if the problem has a Laplacian, which iterative solvers do not take."""
    if problem.laplacian is not None:
        raise ValueError(
            f"solver={name!r} expects laplacian_weight=0, got a Laplacian; use solver='cholesky'"
        )


def refuse_loss(name: str, options: Options) -> None:
    """Raise ValueError if there is a loss other than the square."""
    if options.loss is not None:
        raise ValueError(
            f"solver={name!r} minimises squares and expects loss=None, got {options.loss!r}; use "
            "solver='sgd'"
        )
