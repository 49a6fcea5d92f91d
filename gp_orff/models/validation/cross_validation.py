"""`CrossValidation`: how a model predicts readings that it did not learn from."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import ModuleType
from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from gp_orff.models.report.words import table

if TYPE_CHECKING:
    import pandas

LEVEL = 0.95  # of the intervals whose coverage is told
_SHOWN = 20  # blocks in print


@dataclass(frozen=True)
class CrossValidation:
    """Predictions of left-out readings: scores of all and of each block; `print` shows a table.

    `VectorFieldGP.cross_validate` makes one. A prediction is that of a new reading, the field plus
    the noise of its group; each observed number, a component or the value along a direction, is
    scored by itself. Arrays have one entry for each of these M numbers, block after block.

    `rmse`, `nlpd`, `crps`, `coverage` and `pit` are those of all numbers; `blocks["name"]` has
    those of one block, as another `CrossValidation`.

    Attributes:
        names: the names of the blocks: their labels, or the numbers of the splits.
        block: (M,), the block of each number, as an index of `names`.
        index: (M,), the row of its reading in x.
        column: (M,), the component of y that it is.
        observed: (M,), the number itself.
        mean: (M,), its prediction given the readings outside its block.
        sd: (M,), the standard deviation of the prediction, noise included.
        log_density: (M,), the log of its predictive density, in nats.
        crps_values: (M,), its continuous ranked probability score, in units of y.
        pit: (M,), the probability of a smaller number under the prediction; uniform between 0 and 1
            if error bars hold.

    Example:
        >>> import gp_orff, torch
        >>> x = torch.rand(90, 2, generator=torch.Generator().manual_seed(0)).double()
        >>> y = torch.stack([torch.sin(6 * x[:, 1]), torch.sin(6 * x[:, 0])], dim=-1)
        >>> y = y + 0.1 * torch.randn(90, 2, generator=torch.Generator().manual_seed(1))
        >>> model = gp_orff.VectorFieldGP(gp_orff.DivergenceFreeKernel(num_dims=2))
        >>> result = model.fit(x, y, progress=False).cross_validate(x, y)
        >>> 0.1 < result.rmse < 0.2, 0.85 < result.coverage <= 1, len(result.pit)
        (True, True, 180)
        >>> len(result.blocks) == len(result.names)
        True
    """

    names: tuple[Hashable, ...]
    block: Int[Tensor, "M"]
    index: Int[Tensor, "M"]
    column: Int[Tensor, "M"]
    observed: Float[Tensor, "M"]
    mean: Float[Tensor, "M"]
    sd: Float[Tensor, "M"]
    log_density: Float[Tensor, "M"]
    crps_values: Float[Tensor, "M"]
    pit: Float[Tensor, "M"]

    @property
    def rmse(self) -> float:
        """The root mean square of prediction less observation, in units of y."""
        return (self.mean - self.observed).square().mean().sqrt().item()

    @property
    def nlpd(self) -> float:
        """The mean negative log predictive density of a number, in nats; small is good."""
        return -self.log_density.mean().item()

    @property
    def crps(self) -> float:
        """The mean continuous ranked probability score, in units of y; small is good."""
        return self.crps_values.mean().item()

    @property
    def inside(self) -> Bool[Tensor, "M"]:
        """Whether the central 95 % interval of the prediction holds each number, (M,)."""
        return (self.pit - 0.5).abs() <= 0.5 * LEVEL

    @property
    def coverage(self) -> float:
        """The share of the numbers that their 95 % intervals hold."""
        return self.inside.double().mean().item()

    @cached_property
    def blocks(self) -> dict[Hashable, "CrossValidation"]:
        """The scores of each block, by its name."""
        members = [torch.nonzero(self.block == number).squeeze(-1) for number in range(len(self))]
        return {name: self._take(rows) for name, rows in zip(self.names, members, strict=True)}

    def __len__(self) -> int:
        """The number of blocks."""
        return len(self.names)

    def _take(self, rows: Int[Tensor, "m"]) -> "CrossValidation":
        """The scores of some numbers of one block."""
        tensors = {
            name: value[rows] for name, value in vars(self).items() if torch.is_tensor(value)
        }
        tensors["block"] = torch.zeros_like(rows)
        return replace(self, names=(self.names[int(self.block[rows[0]])],), **tensors)

    def gain_over(self, other: "CrossValidation") -> tuple[float, float]:
        """Return how much smaller the NLPD is than that of `other`, and its standard error.

        The readings of a block have errors in common. With the sums D_b of the differences over the
        n_b numbers of the blocks b, and their mean Δ over all M numbers,

            error² = B/(B − 1) Σ_b (D_b − n_b Δ)² / M² .

        Args:
            other: of the same blocks of the same readings, by another model.

        Raises:
            ValueError: other readings or blocks.
        """
        same = torch.equal(self.block, other.block) and torch.equal(self.index, other.index)
        if not (same and self.names == other.names):
            raise ValueError(
                "expected cross-validations of the same blocks of the same readings, got others; "
                "give both models the same data and blocks"
            )
        return _mean_of_blocks(self.log_density - other.log_density, self.block)

    def to_dataframe(self) -> "pandas.DataFrame":
        """Return a pandas DataFrame with a row for each block, and a last row "all".

        Its columns are numbers, rmse, nlpd, crps and coverage.

        Raises:
            ImportError: pandas is not installed; `pip install pandas`.
        """
        frame = _pandas().DataFrame(
            [part._row for part in (*self.blocks.values(), self)], columns=list(_COLUMNS)
        )
        frame.index = [*self.names, "all"]
        return frame

    @property
    def _row(self) -> tuple[int, float, float, float, float]:
        return len(self.pit), self.rmse, self.nlpd, self.crps, self.coverage

    def __str__(self) -> str:
        shown = list(self.blocks.items())
        if len(shown) > _SHOWN:
            shown = sorted(shown, key=lambda pair: -pair[1].nlpd)[:_SHOWN]
        rows = [("block", *_COLUMNS.values())]
        rows += [(str(name), *_in_words(part._row)) for name, part in (*shown, ("all", self))]
        left = len(self) - len(shown)
        notes = [f"the blocks of largest NLPD; {left} others are not shown"] if left else []
        return "\n".join([*table(rows), *notes])


def _mean_of_blocks(values: Float[Tensor, "M"], block: Int[Tensor, "M"]) -> tuple[float, float]:
    """The mean of values, and its standard error if blocks are independent of each other."""
    mean, count = values.mean(), int(block.max()) + 1
    sums = torch.zeros(count).to(values).index_add(0, block, values - mean)
    error = (count / max(count - 1, 1) * sums.square().sum()).sqrt() / len(values)
    return mean.item(), error.item()


_COLUMNS = {
    "numbers": "numbers",
    "rmse": "RMSE",
    "nlpd": "NLPD",
    "crps": "CRPS",
    "coverage": f"inside {100 * LEVEL:.0f} %",
}


def _in_words(row: Sequence[float]) -> list[str]:
    numbers, rmse, nlpd, crps, coverage = row
    return [str(numbers), f"{rmse:.4g}", f"{nlpd:.3f}", f"{crps:.4g}", f"{coverage:.3f}"]


def _pandas() -> ModuleType:
    try:
        import pandas
    except ImportError as error:
        raise ImportError(
            "to_dataframe needs pandas, which is not installed; pip install pandas"
        ) from error
    return pandas
