"""The searches of a fit and their cost, before the fit: `VectorFieldGP.plan`."""

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
from gp_orff.kernels.base import cholesky, cholesky_inverse

_SIZE = 768  # rows of the matrix whose factorisation gives the speed of this machine
_MATRICES = 4  # matrices in memory at a time, each as large as the one that is factorised
_BYTES = 8  # bytes of a float64 number


@dataclass(frozen=True)
class PlannedSearch:
    """One search of a `FitPlan`; `print` shows it in one line.

    Attributes:
        name: the name of the search, as in the stages of a report.
        rows: the number of values from which the evidence is computed. They are observed values, or
            averages of values at positions that are merged.
        features: the number of features; None for the exact kernel.
        operations: the floating-point operations of one evaluation of the evidence and its
            gradient.
        seconds: the time of six evaluations on this machine.
        mebibytes: the memory of the matrices, in MiB.
        loss: the expected loss of log evidence in nats: the maximum of the evidence under the exact
            kernel and all data, less the evidence at the result of this search.
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
            f"{self.name}: {self.rows:.0f} values{columns}, {self.operations:.1e} operations per "
            f"evaluation, about {self.seconds:.2g} s and {self.mebibytes:.2g} MiB, expected loss "
            f"of log evidence {self.loss:.2g} nats"
        )


@dataclass(frozen=True)
class FitPlan:
    """The searches that `fit` would run on some data, with their cost. `print` shows them.

    `VectorFieldGP.plan` returns it.

    Attributes:
        searches: the searches in order, each with the attributes `name`, `rows`, `features`,
            `operations`, `seconds`, `mebibytes` and `loss`. The last search determines the result.
            The search for starting values, on 600 values, comes before them. The tuple contains it
            only if no other search would improve the starting values.
        numbers: the number of all observed values.
        reason: the reason for the representation of the kernel, in words. It may be empty.

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
        """The number of values in the last search, after close positions may have been merged."""
        return self.searches[-1].rows

    @property
    def features(self) -> int | None:
        """The number of features of the last search; None for the exact kernel."""
        return self.searches[-1].features

    @property
    def seconds(self) -> float:
        """The time of all searches on this machine, in seconds."""
        return sum(search.seconds for search in self.searches)

    @property
    def mebibytes(self) -> float:
        """The memory of the search that needs the most, in MiB."""
        return max(search.mebibytes for search in self.searches)

    @property
    def loss(self) -> float:
        """The expected loss of log evidence after the last search, in nats."""
        return self.searches[-1].loss

    def to_dict(self) -> dict[str, object]:
        """Return the plan as plain values for `json.dumps`, with the attributes as keys."""
        return asdict(self)

    def __str__(self) -> str:
        lines = [f"plan of a fit to {self.numbers:.0f} values, after a search for starting values:"]
        lines += [f"  {search}" for search in self.searches]
        return "\n".join([*lines, *([f"  {self.reason}"] if self.reason else [])])


def plan_of(
    kernel: Kernel,
    likelihoods: Mapping[str, Likelihood],
    mean: Float[Tensor, "p"] | None,
    requested: Rule,
    data: Data,
) -> FitPlan:
    """Set the modules to starting values, and return the plan of a fit from there."""
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
    """The operations per second of a Cholesky factorisation and an inverse, as in a search."""
    matrix = torch.eye(_SIZE, dtype=torch.float64, device=device).add_(1 / _SIZE)
    elapsed = []
    for _ in range(2):  # the first one starts threads
        began = perf_counter()
        cholesky_inverse(cholesky(matrix)).sum().item()  # waits for a GPU
        elapsed.append(perf_counter() - began)
    return _SIZE**3 / min(elapsed)  # a third of n³, and two thirds
