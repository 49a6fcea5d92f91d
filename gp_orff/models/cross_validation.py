"""Cross-validation: held-out blocks of observations, their predictions and scores."""

import math
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import Kernel
from gpytorch.means import Mean
from jaxtyping import Bool, Float, Int
from linear_operator.operators import DiagLinearOperator
from torch import Tensor

from gp_orff.data.dataset import varying_mean
from gp_orff.data.noise import GroupNoise, group_noise
from gp_orff.data.passes import Work, fold, shares
from gp_orff.data.pointwise import likelihood_of
from gp_orff.data.reading import Options
from gp_orff.data.sites import numbered
from gp_orff.data.tracks import labels_of_tracks
from gp_orff.data.validation import as_matrix, is_single
from gp_orff.features.assemble import term_spectra
from gp_orff.features.grid_design import lengthscales
from gp_orff.fitting.robust_em import EStep
from gp_orff.inference.along_tracks import TrackReadings, left_out_of_tracks
from gp_orff.inference.features import Inference
from gp_orff.inference.left_out import Block, LeftOut, left_out
from gp_orff.kernels.base import map_tensors
from gp_orff.models.report import table

if TYPE_CHECKING:
    import pandas


# Blocks of observations to hold out: labels, a splitter, tracks, or cells of two lengthscales.
#
# Neighbouring observations predict each other well, whether or not the model is right. A test
# therefore has to hold out whole neighbourhoods. With `blocks="auto"`:
#
# 1. If there are track labels, tracks are blocks, because the observations of a track share errors.
# 2. Otherwise, the box of the data is divided into cells of two lengthscales along each axis. If
#    fewer than five cells have observations, the axis with the largest cells is divided further.
# 3. More than 50 tracks or cells are combined into 50 blocks of about equal size, in random order.
#    Neighbouring cells are then in different blocks. A large connected block would test
#    extrapolation.


_WIDTH = 2.0  # width of a cell in lengthscales
_FEWEST, _MOST = 5, 50  # number of blocks
_FINEST = 2**20  # most cells along an axis


class Blocks(tuple[Block, ...]):
    """Blocks that were chosen before, for use with several models."""


def blocks_of(blocks: object, kernel: Kernel, x: object, y: object, options: Options) -> Blocks:
    """Return the blocks that a user asked for.

    Args:
        blocks: "auto", labels (N,), a splitter, or the result of an earlier call.
        kernel: a kernel whose lengthscales determine the size of cells, if there are no tracks.
        x, y: points (N, d) and values (N, v).
        options: options with the group or track of each observation, for splitters that need
            groups.

    Raises:
        TypeError: y is missing, `blocks` is of another type, or labels cannot be hashed.
        ValueError: The labels have another length or are all equal, or the sets of a splitter do
            not fit.
    """
    if isinstance(blocks, Blocks):
        return blocks
    if y is None:
        raise TypeError(
            "expected arrays x and y in memory, whose observations blocks= can hold out, got x "
            "alone; give a sample of the chunks, concatenated"
        )
    x, y = (
        as_matrix(values, name).detach().cpu().numpy()
        for values, name in ((x, "points x (N, d)"), (y, "observations y (N, p)"))
    )
    if isinstance(blocks, str):
        if blocks != "auto":
            raise ValueError(
                f"expected blocks='auto', labels (N,) or a splitter, got blocks={blocks!r}"
            )
        blocks = by_track(options.track, len(x))
        if blocks is None:
            blocks = cells(x, lengthscales_of(kernel, x.shape[-1]))
    if hasattr(blocks, "split") and not isinstance(blocks, Iterable):  # as tensors are
        labels = options.group, options.track
        groups = next((each for each in labels if not is_single(each)), None)
        return Blocks(_of_splitter(blocks, x, y, groups))
    return Blocks(_of_labels(blocks, len(x)))


def _of_labels(labels: object, count: int) -> list[Block]:
    """A block for each label, in the order of their first observations."""
    if is_single(labels):
        raise TypeError(
            "expected blocks='auto', a label for each observation or a splitter with a method "
            f"split, got {type(labels).__name__}"
        )
    values = labels.tolist() if hasattr(labels, "tolist") else list(labels)
    if len(values) != count:
        raise ValueError(
            f"expected a label for each of the {count} observations in blocks=, got {len(values)}"
        )
    numbers: dict[Hashable, int] = {}
    try:
        which = torch.tensor([numbers.setdefault(label, len(numbers)) for label in values])
    except TypeError as error:
        raise TypeError(f"expected labels that can be hashed in blocks=, got {error}") from error
    if any(label != label for label in numbers):
        raise ValueError("expected a label for each observation in blocks=, got NaN among them")
    if len(numbers) < 2:
        raise ValueError(
            f"expected at least two blocks, got {next(iter(numbers))!r} for all observations, "
            "so that no observations remain for the prediction; give labels of smaller blocks, or "
            "blocks='auto'"
        )
    masks = [which == number for number in numbers.values()]
    return [Block(name, mask, mask) for name, mask in zip(numbers, masks, strict=True)]


def _of_splitter(
    splitter: Any, x: Float[np.ndarray, "N d"], y: Float[np.ndarray, "N v"], groups: object
) -> list[Block]:
    """Return a block for each split of the splitter.

    Observations that are in neither set of a split are held out, but not predicted.
    """
    blocks = []
    for number, (learned, tested) in enumerate(splitter.split(x, y, groups)):
        left_out, test = torch.ones(len(x), dtype=torch.bool), torch.zeros(len(x), dtype=torch.bool)
        left_out[torch.from_numpy(np.asarray(learned))] = False
        test[torch.from_numpy(np.asarray(tested))] = True
        if not test.any() or left_out.all() or (test & ~left_out).any():
            raise ValueError(
                "expected a splitter whose sets to learn from and to predict have no observation "
                f"in common and are not empty, got {int((~left_out).sum())} and {int(test.sum())} "
                f"observations with {int((test & ~left_out).sum())} in both, in split {number}"
            )
        blocks.append(Block(number, left_out, test))
    if not blocks:
        raise ValueError("expected a splitter with at least one split, got none")
    return blocks


def lengthscales_of(kernel: Kernel, num_inputs: int) -> Float[np.ndarray, "d"]:
    """The largest lengthscale along each axis; 0 for kernels without lengthscales."""
    return np.max([np.zeros(num_inputs), *lengthscales_of_terms(kernel, num_inputs)], axis=0)


def lengthscales_of_terms(kernel: Kernel, num_inputs: int) -> list[Float[np.ndarray, "d"]]:
    """The largest lengthscale along each axis, for each term that has lengthscales."""
    try:
        return [lengthscales([term], num_inputs) for term in term_spectra(kernel, num_inputs)]
    except NotImplementedError:
        return []


def by_track(track: object, count: int) -> Sequence[Hashable] | None:
    """Return the block of each observation, so that observations of one track share a block.

    Each track is a block. If there are more than 50 tracks, they are combined into 50 blocks with
    about equal numbers of observations.

    The result is None if there are no labels, or only one.

    Raises:
        ValueError: The number of labels is not `count`, or labels are missing.

    Example:
        >>> from gp_orff.models.cross_validation import by_track
        >>> (
        ...     by_track(["a", "a", "b"], 3),
        ...     by_track("a", 3),
        ...     len(set(by_track(range(400), 400))),
        ... )
        (['a', 'a', 'b'], None, 50)
    """
    if is_single(track):
        return None
    names, which = labels_of_tracks(track, count)
    if len(names) < 2:
        return None
    labels = track.tolist() if hasattr(track, "tolist") else list(track)
    together = _together(np.bincount(which), 0)
    return labels if len(names) <= _MOST else numbered(together[which])


def cells(
    x: Float[np.ndarray, "N d"], lengths: Float[np.ndarray, "d"], seed: int = 0
) -> Int[np.ndarray, "N"]:
    """The index of the block of each observation, for blocks of cells of about two lengthscales.

    If fewer than five cells have observations, cells are smaller. If there are more than 50 cells,
    they are combined at random into 50 blocks with about equal numbers of observations. The cells
    of a block then rarely touch each other.

    Args:
        x: positions (N, d).
        lengths: lengthscales (d,) along each axis; 0 for an axis without one.
        seed: the seed of the random order.

    Example:
        >>> import numpy as np
        >>> from gp_orff.models.cross_validation import cells
        >>> # 10 cells, from 0
        >>> cells(np.linspace(0, 19.9, 200)[:, None], np.ones(1)).max().item()
        9
    """
    start, extent = x.min(0), np.ptp(x, axis=0)
    extent = np.where(extent > 0, extent, np.finfo(float).tiny)
    scaled = extent / np.where(lengths > 0, lengths, extent)
    counts = np.clip(np.round(scaled / _WIDTH), 1, _FINEST)
    while True:
        lattice = np.minimum(np.floor((x - start) / extent * counts), counts - 1)
        _, cell, sizes = np.unique(lattice, axis=0, return_inverse=True, return_counts=True)
        if len(sizes) >= _FEWEST or counts.max() >= _FINEST:
            return numbered(_together(sizes, seed)[cell.ravel()])
        counts[np.argmax(scaled / counts)] *= 2


def _together(sizes: Sequence[int], seed: int) -> Int[np.ndarray, "c"]:
    """Join cells with `sizes` observations to at most 50 blocks of about equal size, and return the
    block of each cell."""
    count = min(_MOST, len(sizes))
    block, totals = np.empty(len(sizes), dtype=np.int64), np.zeros(count)
    for cell in np.random.default_rng(seed).permutation(len(sizes)):
        block[cell] = totals.argmin()
        totals[block[cell]] += sizes[cell]
    return block


# `CrossValidation`: predictions of held-out observations and their scores.


LEVEL = 0.95  # probability of the intervals whose coverage is reported
_SHOWN = 20  # most blocks in print


@dataclass(frozen=True)
class CrossValidation:
    """Predictions of held-out observations, with their scores. `print` shows a table.

    `VectorFieldGP.cross_validate` returns it. A prediction is the distribution of a new
    observation: the field plus the noise of the group. Each of the M observed values is scored
    separately. A value is a component of a vector, or the component along a direction.

    The attributes from `block` to `pit` are tensors (M,), with one entry for each value, block
    after block. `rmse`, `nlpd`, `crps` and `coverage` are scores of all values together.
    `blocks["name"]` has the scores of one block, as another `CrossValidation`.

    Attributes:
        names: the names of the blocks: their labels, or the indices of the splits.
        block: the block of each value, as an index into `names`.
        index: the row of the observation in x.
        column: the column of the value in y.
        observed: the observed values, in units of y.
        mean: the predicted means given the observations outside the block, in units of y.
        sd: the standard deviations of the predictions with noise, in units of y.
        log_density: the log predictive densities at the observed values, in nats.
        crps_values: the continuous ranked probability scores, in units of y.
        pit: the probability integral transforms: the predicted probabilities of a smaller value. If
            the predictive distributions are right, they are uniformly distributed between 0 and 1.

    Example:
        >>> import gp_orff, torch
        >>> x = torch.rand(
        ...     90, 2, generator=torch.Generator().manual_seed(0)
        ... ).double()
        >>> y = torch.stack(
        ...     [torch.sin(6 * x[:, 1]), torch.sin(6 * x[:, 0])], dim=-1
        ... )
        >>> y = y + 0.1 * torch.randn(
        ...     90, 2, generator=torch.Generator().manual_seed(1)
        ... )
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
        """The root mean square error (RMSE) of the predicted means, in units of y. The observations
        include noise."""
        return (self.mean - self.observed).square().mean().sqrt().item()

    @property
    def nlpd(self) -> float:
        """The mean negative log predictive density (NLPD) per value, in nats. Smaller is better."""
        return -self.log_density.mean().item()

    @property
    def crps(self) -> float:
        """The mean continuous ranked probability score (CRPS), in units of y. Smaller is better."""
        return self.crps_values.mean().item()

    @property
    def inside(self) -> Bool[Tensor, "M"]:
        """Whether the central 95 % interval of each prediction contains the value, (M,)."""
        return (self.pit - 0.5).abs() <= 0.5 * LEVEL

    @property
    def coverage(self) -> float:
        """The coverage: the fraction of values that are inside their 95 % intervals."""
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
        """The scores of the values in `rows`, which belong to one block."""
        names = (self.names[int(self.block[rows[0]])],)
        scores = map_tensors(self, lambda tensor: tensor[rows])
        return replace(scores, names=names, block=torch.zeros_like(rows))

    def gain_over(self, other: "CrossValidation") -> tuple[float, float]:
        """Return the decrease of the NLPD relative to `other`, and its standard error, in nats.

        The decrease Δ is the mean difference of the log densities over all M values. For its
        standard error, the B blocks are independent, but values of one block may have common
        errors. If D_b is the sum of the differences over the n_b values of block b,

            error² = B/(B − 1) Σ_b (D_b − n_b Δ)² / M² .

        Args:
            other: the result of another model for the same blocks of the same observations.

        Returns:
            The decrease and its standard error. A positive decrease means that this model predicts
            better than `other`.

        Raises:
            ValueError: The observations or the blocks differ.

        Example:
            >>> import gp_orff, torch
            >>> x = torch.rand(60, 2, generator=torch.Generator().manual_seed(0))
            >>> y = torch.stack([x[:, 1], -x[:, 0]], dim=-1)  # divergence-free
            >>> kernels = gp_orff.DivergenceFreeKernel, gp_orff.CurlFreeKernel
            >>> right, wrong = (
            ...     gp_orff.VectorFieldGP(kernel(num_dims=2))
            ...     .condition(x, y)
            ...     .cross_validate(x, y, blocks=[i % 6 for i in range(60)])
            ...     for kernel in kernels
            ... )
            >>> decrease, error = right.gain_over(wrong)
            >>> decrease > 0, error > 0
            (True, True)
        """
        same = torch.equal(self.block, other.block) and torch.equal(self.index, other.index)
        if not (same and self.names == other.names):
            raise ValueError(
                "expected cross-validations of the same blocks of the same observations, got "
                "different ones; give both models the same data and blocks"
            )
        gains = self.log_density - other.log_density
        mean, count = gains.mean(), len(self)
        sums = torch.zeros(count).to(gains).index_add(0, self.block, gains - mean)
        # if blocks are independent of each other
        error = (count / max(count - 1, 1) * sums.square().sum()).sqrt() / len(gains)
        return mean.item(), error.item()

    def to_dataframe(self) -> "pandas.DataFrame":
        """Return a pandas DataFrame with a row for each block, and a last row "all".

        Its columns are numbers (of values), rmse, nlpd, crps and coverage.

        Raises:
            ImportError: pandas is not installed. Run `pip install pandas`.
        """
        try:
            import pandas
        except ImportError as error:
            raise ImportError(
                "to_dataframe needs pandas, which is not installed; pip install pandas"
            ) from error
        rows = [part._row for part in (*self.blocks.values(), self)]
        return pandas.DataFrame(rows, [*self.names, "all"], list(_COLUMNS))

    @property
    def _row(self) -> tuple[int, float, float, float, float]:
        return len(self.pit), self.rmse, self.nlpd, self.crps, self.coverage

    def __str__(self) -> str:
        shown = list(self.blocks.items())
        if len(shown) > _SHOWN:
            shown = sorted(shown, key=lambda pair: -pair[1].nlpd)[:_SHOWN]
        rows = [("block", *_COLUMNS.values())]
        for name, part in (*shown, ("all", self)):
            numbers, *scores = part._row
            formats = zip(scores, (".4g", ".3f", ".4g", ".3f"), strict=True)
            rows.append((str(name), str(numbers), *(format(*pair) for pair in formats)))
        left = len(self) - len(shown)
        notes = [f"blocks with the largest NLPD; {left} others are not shown"] if left else []
        return "\n".join([*table(rows), *notes])


_COLUMNS = {
    "numbers": "values",
    "rmse": "RMSE",
    "nlpd": "NLPD",
    "crps": "CRPS",
    "coverage": f"coverage of {100 * LEVEL:.0f} % intervals",
}


# Scores of predictions whose distribution is a mixture of Gaussians with a common mean.
#
# A new observation is y = H f + ε. With Gaussian noise, it has one Gaussian distribution. Student-t
# noise is Gaussian with the variance σ²/w, where w ~ Gamma(ν/2, ν/2). Then y is a mixture of
# Gaussians with the variances Var[H f] + σ²/w, and the integral over log w is a sum over
# equidistant nodes. The noise variance of an observation on a new track may also have several
# values, each with a probability.
#
# The trapezoidal rule in log w converges exponentially, because the density is analytic there and
# decreases quickly at both ends. Small weights determine the density of large residuals, so the
# nodes extend further at the lower end. The CRPS needs pairs of nodes; negligible pairs are
# dropped.


_CHUNK = 2**22  # numbers in memory
_STEP = 0.5  # distance of the nodes, in standard deviations of log w
_SMALLEST = 35.0  # −log of the density of log w over its maximum, at the first and last node
_OUTLIERS = 5.0  # extension of the nodes below the first one, for very large residuals
_NEGLIGIBLE = 1e-12  # least weight of a pair of nodes in the CRPS


@dataclass(frozen=True)
class Scores:
    """Scores of M values, each (M,)."""

    log_density: Float[Tensor, "M"]
    crps: Float[Tensor, "M"]
    pit: Float[Tensor, "M"]

    @classmethod
    def of(
        cls,
        residual: Float[Tensor, "M"],
        latent: Float[Tensor, "M"],
        noise: Float[Tensor, "M"],
        scales: Float[Tensor, "k"],
        q: Float[Tensor, "k"],
    ) -> "Scores":
        """Return the scores of observations y with the residuals r = y − E[y].

        Each residual has the distribution Σ_k q_k N(0, s_k²), with s_k² = latent + noise·scales_k.
        Let φ and Φ be the density and the distribution function of the standard normal
        distribution, and A(r, s²) = 2 s φ(r/s) + r (2 Φ(r/s) − 1). Then

            log p = log Σ q_k N(r; 0, s_k²) ,    pit = Σ q_k Φ(r/s_k) ,
            crps = Σ q_k A(r, s_k²) − ½ Σ q_k q_l A(0, s_k² + s_l²)

        (Grimit et al. 2006, *The continuous ranked probability score for circular variables and its
        application to mesoscale forecast ensemble verification*, eq. 5).

        Args:
            residual: r (M,).
            latent: the variances (M,) of H f.
            noise: the variances (M,) of ε, divided by the scales.
            scales: factors (k,) of the noise variance, from `scales_of_noise`.
            q: the probabilities (k,) of the factors.
        """
        scales, q = scales.to(residual), q.to(residual)
        pairs = _pairs(scales, q)
        rows = max(1, _CHUNK // len(pairs[0]))
        inputs = zip(*(t.split(rows) for t in (residual, latent, noise)), strict=True)
        columns = zip(*(_scores(*chunk, scales, q, *pairs) for chunk in inputs), strict=True)
        return cls(*map(torch.cat, columns))


def _scores(
    r: Float[Tensor, "m"],
    latent: Float[Tensor, "m"],
    noise: Float[Tensor, "m"],
    scales: Float[Tensor, "k"],
    q: Float[Tensor, "k"],
    pair_scales: Float[Tensor, "l"],
    pair_q: Float[Tensor, "l"],
) -> tuple[Float[Tensor, "m"], Float[Tensor, "m"], Float[Tensor, "m"]]:
    """Log density, CRPS and PIT of a chunk."""
    r, latent, noise = r.unsqueeze(-1), latent.unsqueeze(-1), noise.unsqueeze(-1)
    variance = latent + noise * scales
    sd = variance.sqrt()
    z = r / sd
    cdf = torch.special.ndtr(z)
    logs = -0.5 * (z.square() + variance.log() + math.log(2 * math.pi))
    absolute = 2 * sd * _normal_density(z) + r * (2 * cdf - 1)
    spread = (2 * latent + noise * pair_scales).sqrt() @ pair_q * math.sqrt(2 / math.pi)
    return torch.logsumexp(logs + q.log(), -1), absolute @ q - 0.5 * spread, cdf @ q


def _normal_density(z: Tensor) -> Tensor:
    return torch.exp(-0.5 * z.square()) / math.sqrt(2 * math.pi)


def scales_of_noise(deg_free: float) -> tuple[Float[Tensor, "k"], Float[Tensor, "k"]]:
    """Return nodes 1/w with their probabilities, for w ~ Gamma(ν/2, ν/2). The nodes are
    equidistant in log w."""
    one = torch.ones(1, dtype=torch.float64)
    if math.isinf(deg_free):
        return one, one
    a = 0.5 * deg_free  # log w has about the standard deviation 1/√a
    broad = a < 3 * _SMALLEST
    low = _SMALLEST / a + 1 if broad else math.sqrt(3 * _SMALLEST / a)
    low = -low - _OUTLIERS
    u = torch.arange(low, math.sqrt(2 * _SMALLEST / a), _STEP / math.sqrt(a), dtype=torch.float64)
    return torch.exp(-u), torch.softmax(a * (u - u.exp()), 0)


def _pairs(
    scales: Float[Tensor, "k"], q: Float[Tensor, "k"]
) -> tuple[Float[Tensor, "l"], Float[Tensor, "l"]]:
    """The sum of the scales of each pair of nodes, and the probability of the pair."""
    rows, columns = torch.tril_indices(len(q), len(q))
    twice = torch.where(rows == columns, 1.0, 2.0).to(q)
    total, weight = scales[rows] + scales[columns], twice * q[rows] * q[columns]
    kept = weight * total.sqrt() > _NEGLIGIBLE
    return total[kept], weight[kept]


# Predict held-out observations, block by block, and score the predictions.
#
# The blocks are divided into shares for the workers of a call. Each worker predicts and scores its
# share (`_scores_of_blocks`). The results are joined in the order of the blocks. The
# hyperparameters are from all data: only the field is conditioned again.


_DRAWS = 500  # draws of a value whose noise is neither Gaussian nor Student-t


@dataclass(frozen=True)
class Predictor:
    """Predicts some observations of the data of an inference from all others."""

    inference: Inference  # of a `Dataset` in memory whose observations have an `index`
    e_step: EStep
    prior_mean: Mean
    along: Sequence[TrackReadings] = ()  # all observations along tracks

    @torch.no_grad()
    def left_out(self, blocks: Sequence[Block]) -> Iterator[list[LeftOut]]:
        """Yield the tested observations of every block, with the field there given all other
        observations.

        Raises:
            ValueError: A block contains all observations.
        """
        device = next(self.e_step.kernel.parameters()).device
        blocks = [block.to(device) for block in blocks]
        observed = [part.observations for part in self.along] or list(self.inference.data.visit())
        for block in blocks:
            if all(block.left_out[part.index].all() for part in observed):
                raise ValueError(
                    "expected blocks that hold out some of the observations, got block "
                    f"{block.name!r} with all of them; give smaller blocks, or blocks='auto'"
                )
        parts = self.e_step.kernel, self.e_step.noises, self.e_step.mean
        if self.along:
            return left_out_of_tracks(self.inference, self.along, *parts, blocks)
        return left_out(self.inference, *parts, blocks)

    @torch.no_grad()
    def cross_validation(self, blocks: Sequence[Block]) -> CrossValidation:
        """The scores of all blocks with observations.

        Raises:
            ValueError: A block contains all observations, or no block has observed values.
        """
        work = Work(tuple, partial(_scores_of_blocks, self), len)
        scored = fold(
            work,
            lambda: ["cross validation", [[p.x, p.y] for p in self.inference.data.visit()]],
            shares(blocks),
        )
        if not scored:
            raise ValueError(
                "expected blocks with observed values, got none in any of them; drop points "
                "without observations"
            )
        names, columns = zip(*scored, strict=True)
        numbers = [torch.full_like(own[0], i, dtype=torch.long) for i, own in enumerate(columns)]
        return CrossValidation(
            names, torch.cat(numbers), *map(torch.cat, zip(*columns, strict=True))
        )

    def scores(self, found: LeftOut) -> list[Tensor]:
        """Row, column, value, mean, sd, log density, CRPS and PIT of each value of a group."""
        if found.part.represented is not None:
            return self._scores_of_values(found)
        part, noises, noise = found.part, self.e_step.noises, found.noise
        residual, latent = (part.y - found.mean).flatten(), found.variance.clamp_min(0).flatten()
        if noise is None:
            noise = part.noise(GroupNoise(group_noise(part.key, noises)))
            noise = noise.diagonal(dim1=-1, dim2=-2)
        noise, label = noise.flatten(), part.key.label
        model, slow = self.e_step.heavy_tailed.get(label), noises.slow.get(label)
        nu = math.inf if model is None else model.deg_free
        # Student-t noise with the squared scale σ² has the variance σ² ν/(ν − 2).
        heavier = 1.0 if math.isinf(nu) else nu / (nu - 2)
        variance = latent + heavier * noise
        if slow is None:
            scores = Scores.of(residual, latent, noise, *scales_of_noise(nu))
        else:  # `variance` of new tracks has one value; `scales` have several
            new = found.on_new_track.repeat_interleave(part.pattern.num_values)
            rest = variance - new * noises.tracks[label].slow
            scores = Scores.of(residual, rest, new.to(rest), slow.values, slow.weights)
            variance = torch.where(new, slow.matched(rest), rest)
        trend = part.apply(varying_mean(self.prior_mean, part.x, part.pattern.num_outputs))
        values = part.pattern.num_values
        column = torch.tensor(part.pattern.columns).to(part.index).repeat(len(part))
        return [
            part.index.repeat_interleave(values),
            column,
            (part.y + trend).flatten(),
            (found.mean + trend).flatten(),
            variance.sqrt(),
            *astuple(scores),
        ]

    def _scores_of_values(self, left: LeftOut) -> list[Tensor]:
        """Return scores as `scores` does, for values that pseudo-observations represent.

        The density is computed by quadrature. All other scores are computed from equidistant
        quantiles of the field.
        """
        part, variance = left.part, left.variance.clamp_min(0)
        likelihood = likelihood_of(self.e_step.likelihoods, part)
        y = part.represented.values
        if y.shape[-1] != 1 or part.represented.linear.shape[-1] > 1:
            raise NotImplementedError(
                "cross_validate expects a likelihood of single outputs, got "
                f"{type(likelihood.base).__name__}; condition a copy of the model on the rest, "
                "and score the held-out values with likelihood.log_marginal"
            )
        field = MultivariateNormal(left.mean[:, 0], DiagLinearOperator(variance[:, 0]))
        levels = (torch.arange(_DRAWS, dtype=torch.float64) + 0.5) / _DRAWS
        f = left.mean + variance.sqrt() * torch.special.ndtri(levels).to(variance)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            draws = likelihood(f.mT).sample().mT.double()
        order = draws.sort(dim=-1).values
        # Σ_ij |y_i − y_j| of sorted draws is a weighted sum of these.
        ranks = 2 * torch.arange(_DRAWS).to(order) - _DRAWS + 1
        spread = (ranks * order).sum(-1) / _DRAWS**2
        values = y[:, 0]
        return [
            part.index,
            torch.full_like(part.index, part.pattern.columns[0]),
            values,
            draws.mean(-1),
            draws.std(-1),
            likelihood.log_marginal(values, field),
            (draws - y).abs().mean(-1) - spread,
            (draws < y).double().mean(-1) + 0.5 * (draws == y).double().mean(-1),
        ]


@torch.no_grad()
def _scores_of_blocks(
    predictor: Predictor, blocks: Sequence[Block], number: int
) -> list[tuple[Hashable, list[Tensor]]]:
    """The name of each block with observations, and its scores in the order of the rows."""
    found = []
    for block, parts in zip(blocks, predictor.left_out(blocks), strict=True):
        scores = [predictor.scores(part) for part in parts]
        if scores:
            values = [torch.cat(column).cpu() for column in zip(*scores, strict=True)]
            order = torch.argsort(values[0], stable=True)
            found.append((block.name, [column[order] for column in values]))
    return found
