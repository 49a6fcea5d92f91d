"""What a fit would do, and what it would cost: `VectorFieldGP.plan`."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from time import perf_counter

import torch
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import Likelihood
from jaxtyping import Float
from torch import Tensor

from gp_orff.data.dataset import Data
from gp_orff.features.draws import Rule
from gp_orff.fitting.journal import Progress
from gp_orff.fitting.plans import OfSubset, Priced, plans_of, route
from gp_orff.fitting.strategy import best_start, trainer_of
from gp_orff.inference.price import SHORT, SUBSET_VALUES
from gp_orff.inference.representation import Representation

_SIZE = 768  # of the matrix whose factorisation gives the speed of this machine
_MATRICES = 4  # of the size of a covariance, or of the normal equations, that are held at a time
_BYTES = 8  # of a number


@dataclass(frozen=True)
class PlannedSearch:
    """A search that a fit would make.

    Attributes:
        name: of the rows and columns, as in the stages of a report.
        rows: the observed numbers, or their means at sites, that the evidence is computed from.
        features: the features that stand for the kernel; None for the kernel itself.
        operations: floating-point operations of one evaluation of the evidence and its gradient.
        seconds: for six such evaluations on this machine.
        mebibytes: of the matrices that are held at a time.
        loss: the nats of log evidence that its optimum is expected to lack, where the kernel itself
            and all data have none.
    """

    name: str
    rows: float
    features: int | None
    operations: float
    seconds: float
    mebibytes: float
    loss: float

    def __str__(self) -> str:
        columns = "" if self.features is None else f" on {self.features} features"
        return (
            f"{self.name}: {self.rows:.0f} values{columns}, {self.operations:.1e} operations an "
            f"evaluation, about {self.seconds:.2g} s and {self.mebibytes:.2g} MiB, expected loss "
            f"{self.loss:.2g} nats"
        )


@dataclass(frozen=True)
class FitPlan:
    """The searches that `fit` would run on some data, with their cost.

    Attributes:
        searches: the searches in order, after starting values were found on 600 values. The last
            one determines the result. If no search would improve the starting values, the list
            has only the search for these.
        numbers: the number of all observed values.
        reason: the reason for the representation of the kernel, in words; may be empty.

    Example:
        >>> import gp_orff, torch
        >>> x = torch.rand(
        ...     500, 2, generator=torch.Generator().manual_seed(0)
        ... ).double()
        >>> y = torch.stack(
        ...     [torch.cos(4 * x[:, 0]), torch.cos(4 * x[:, 1])], dim=-1
        ... )
        >>> y = y + 0.1 * torch.randn(
        ...     500, 2, generator=torch.Generator().manual_seed(1)
        ... )
        >>> plan = gp_orff.VectorFieldGP(gp_orff.CurlFreeKernel(num_dims=2)).plan(
        ...     x, y
        ... )
        >>> plan.numbers, plan.seconds > 0, plan.to_dict()["searches"][-1]["name"]
        (1000, True, 'exact kernel')
    """

    searches: tuple[PlannedSearch, ...]
    numbers: float
    reason: str

    @property
    def rows(self) -> float:
        """The rows of the last search."""
        return self.searches[-1].rows

    @property
    def features(self) -> int | None:
        """The number of features of the last search; None for the exact kernel."""
        return self.searches[-1].features

    @property
    def seconds(self) -> float:
        """The seconds of all searches."""
        return sum(search.seconds for search in self.searches)

    @property
    def mebibytes(self) -> float:
        """The memory of the search that needs most, in MiB."""
        return max(search.mebibytes for search in self.searches)

    @property
    def loss(self) -> float:
        """The expected loss of log evidence, in nats."""
        return self.searches[-1].loss

    def to_dict(self) -> dict[str, object]:
        """The plan as plain values."""
        return asdict(self)

    def __str__(self) -> str:
        lines = [f"plan of a fit to {self.numbers:.0f} values, after starting values:"]
        lines += [f"  {search}" for search in self.searches]
        return "\n".join([*lines, *([f"  {self.reason}"] if self.reason else [])])


def plan_of(
    kernel: Kernel,
    likelihoods: Mapping[str, Likelihood],
    mean: Float[Tensor, "p"] | None,
    requested: Rule,
    data: Data,
) -> FitPlan:
    """The plan of a fit, at starting values, which the modules are set to."""
    trainer, data = trainer_of(kernel, likelihoods, mean, requested, data, Progress())
    best_start(trainer)
    representation = Representation.of(kernel, likelihoods, requested, data)
    chosen = route(plans_of(trainer, representation), data.num_values)
    if not chosen:  # no plan within the budget loses less than the starting values
        numbers = min(SUBSET_VALUES, data.num_values)
        first = OfSubset(trainer, "starting values", numbers, data.num_values)
        chosen = [Priced(first, first.operations, first.loss)]
    speed = _operations_a_second(next(kernel.parameters()).device)
    searches = []
    for priced in chosen:
        rows, features = priced.plan.shape
        seconds = SHORT * priced.operations / speed
        size = rows if features is None else min(rows, features)
        mebibytes = _MATRICES * _BYTES * size**2 / 2**20
        costs = priced.operations, seconds, mebibytes, priced.loss
        searches.append(PlannedSearch(priced.plan.name, rows, features, *costs))
    return FitPlan(tuple(searches), data.num_values, representation.reason)


def _operations_a_second(device: torch.device) -> float:
    """Of a factorisation and an inverse, as searches make them."""
    matrix = torch.eye(_SIZE, dtype=torch.float64, device=device).add_(1 / _SIZE)
    elapsed = []
    for _ in range(2):  # the first one starts threads
        began = perf_counter()
        torch.cholesky_inverse(torch.linalg.cholesky(matrix)).sum().item()  # waits for a GPU
        elapsed.append(perf_counter() - began)
    return _SIZE**3 / min(elapsed)  # a third of n³, and two thirds
