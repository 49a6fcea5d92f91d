"""The posterior at held-out observations given all others, in closed form for each block."""

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, singledispatch
from typing import NamedTuple

import numpy as np
import torch
from gpytorch.kernels import Kernel
from jaxtyping import Bool, Float, Int
from torch import Tensor

from gp_orff.data.dataset import Dataset, StatisticsOnly
from gp_orff.data.noise import Noises
from gp_orff.data.observations import Observations, PointObservations, with_rows
from gp_orff.data.patterns import GroupKey
from gp_orff.data.sites import merged, site_labels
from gp_orff.data.statistics import FieldStatistics
from gp_orff.features.assemble import expand
from gp_orff.inference.equations import DenseRows, has_blocks, whole_vectors
from gp_orff.inference.exact import ExactInference, observed_covariance
from gp_orff.inference.features import FeatureInference, Inference, Posterior, Residuals
from gp_orff.inference.posteriors import FieldDistribution
from gp_orff.inference.quadratic import Evidence, seen_by
from gp_orff.inference.robust import StudentTNoise, residuals
from gp_orff.kernels.base import cholesky, cholesky_inverse
from gp_orff.settings import check_features

# Blocks of held-out observations: the posterior given all other observations, the rest.
#
# For each block, every method returns the tested observations, with mean and covariance of the
# field at their positions given the rest. There are four methods:
#
# - Any inference: condition on the rest, block after block.
# - Exact kernel, or dual algebra (`left_out_of_rows`): one Cholesky factor of K serves all blocks,
#   and each block takes a solution of its size.
# - Features (primal): subtract the sums of the block from those of all data, and factorise A again.
# - Tracks (in `along_tracks`): condition on the block means of the rest, since the remaining
#   observations of a track also predict the correlated noise of held-out ones.
#
# `left_out` and `tested` differ because a buffer around the tested block may be left out as well.


class Block(NamedTuple):
    """The observations of a block, selected by their `index`."""

    name: Hashable
    left_out: Bool[Tensor, "N"]  # True for held-out observations
    tested: Bool[Tensor, "N"]  # True for the held-out observations that are predicted

    def to(self, device: torch.device) -> "Block":
        """This block on another device."""
        return Block(self.name, self.left_out.to(device), self.tested.to(device))


class LeftOut(NamedTuple):
    """Held-out observations of a group, and the field at their positions given the rest."""

    part: Observations  # with nominal weights, and the `index` of every observation
    mean: Float[Tensor, "n v"]  # E[H f], with the constant mean
    variance: Float[Tensor, "n v"]  # Var[H f], with the truncated variance
    joint: Callable[[], Float[Tensor, "n*v n*v"]]  # computes Cov[H f] of all these observations
    noise: Float[Tensor, "n v"] | None = None  # noise variances; None for those of the group
    on_new_track: Bool[Tensor, "n"] | None = None  # True without other observations of the track


@singledispatch
@torch.no_grad()
def left_out(
    inference: Inference,
    kernel: Kernel,
    noises: Noises,
    mean: Float[Tensor, "p"] | None,
    blocks: Iterable[Block],
) -> Iterator[list[LeftOut]]:
    """Hold out the observations of every block, and yield predictions of the tested ones given the
    rest.

    Inference by features subtracts statistics. The exact kernel inverts one matrix. Any other
    inference is conditioned on the rest again for every block. Learned weights of Student-t noise
    do not change.

    Args:
        inference: the inference from a `Dataset` in memory, without observed symbols. Its
            observations have an `index`.
        kernel: the prior.
        noises: the noise covariances Σ, by the label of the group.
        mean: the constant mean. If None, the mean is unknown. It is then the one with the
            largest evidence given the rest, and its covariance is included.
        blocks: the blocks, on the device of the data.
    """
    for block in blocks:
        rest = [part.take(~block.left_out[part.index]) for part in inference.data.visit()]
        rest = Dataset.in_memory([part for part in rest if len(part)])
        posterior = inference.of(rest).posterior(kernel, noises, mean)
        yield predicted(inference.data, block, posterior.field(fixed=mean is not None))


def predicted(data: Dataset, block: Block, field: FieldDistribution) -> list[LeftOut]:
    """Return the tested observations of a block with the mean and covariance of the field there."""
    results = []
    for part in data.unweighted().visit():
        part = part.take(block.tested[part.index])
        if len(part):
            mean, variance = part.apply(field.mean(part.x)), field.latent_variance(part)
            results.append(LeftOut(part, mean, variance, partial(_joint, part, field)))
    return results


@torch.no_grad()
def _joint(part: Observations, field: FieldDistribution) -> Float[Tensor, "n*v n*v"]:
    return part.apply_to_joint(field.covariance(part.x))


# Held-out blocks, from the covariance of all observations (dual algebra).
#
# With K = Cov[H f] + noise, V = [y, H(1⊗I_p)] and Q = K⁻¹V, the rows b of a block have, given all
# others r,
#
#     Cov[y_b | y_r] = ([K⁻¹]_bb)⁻¹ ,    V_b − E[V_b | V_r] = ([K⁻¹]_bb)⁻¹ Q_b ,
#     V_rᵀ K_rr⁻¹ V_r = Vᵀ Q − Q_bᵀ ([K⁻¹]_bb)⁻¹ Q_b
#
# (Rasmussen & Williams 2006, eqs. 5.10–5.12, generalised to blocks and to a mean). The last
# equation gives the constant mean with the largest evidence of the rest, and its covariance.


_SPLIT = 2  # ratio of rows and sites above which conditioning on the rest is cheaper


@dataclass(frozen=True)
class Rows:
    """The rows of a covariance matrix, perhaps merged at sites, and their observations."""

    readings: Sequence[Observations]  # observations with nominal weights, one part per group
    groups: Sequence[Observations]  # merged observations with weights
    sites: Sequence[Int[Tensor, "n"]]  # for each part, the site of every observation in its group

    @classmethod
    def of(
        cls,
        data: Dataset,
        reach: Sequence[float] | None = None,
        kinds: Int[Tensor, "N"] | None = None,
    ) -> "Rows":
        """The rows of data. Observations of the same kind within one `reach` are merged."""
        readings, weighted = list(data.unweighted().visit()), list(data.visit())
        if reach is None:
            sites = [torch.arange(len(part), device=part.x.device) for part in readings]
            return cls(readings, weighted, sites)
        apart = (*reach, 0.0)
        tagged = [
            replace(part, x=torch.cat([part.x, kinds[part.index, None].to(part.x)], dim=-1))
            for part in weighted
        ]
        sites = [torch.from_numpy(site_labels(part, apart)).to(part.x.device) for part in tagged]
        groups = [replace(part, x=part.x[:, :-1]) for part in merged(tagged, apart)[0]]
        return cls(readings, groups, sites)

    @property
    def observed(self) -> PointObservations:
        return PointObservations(list(self.groups))

    def __len__(self) -> int:
        return sum(group.y.numel() for group in self.groups)

    def within(self, block: Bool[Tensor, "N"]) -> Bool[Tensor, "M"]:
        """The rows that are in a block."""
        # A site is in the block if its observations are. By `kinds`, all observations of a site
        # belong to the same blocks, so that any of them decides.
        masks = []
        for part, group, sites in zip(self.readings, self.groups, self.sites, strict=True):
            inside = torch.zeros(len(group), dtype=torch.bool, device=sites.device)
            inside[sites] = block[part.index]
            masks.append(inside.repeat_interleave(group.y.shape[-1]))
        return torch.cat(masks)

    def predicted(
        self,
        tested: Bool[Tensor, "N"],
        rows: Int[Tensor, "k"],
        mean: Float[Tensor, "k"],
        latent: Float[Tensor, "k k"],
    ) -> list[LeftOut]:
        """The tested observations, and the field there, from the field at some rows."""
        position = torch.zeros(len(self), dtype=torch.long, device=rows.device)
        position[rows] = torch.arange(len(rows), device=rows.device)
        first, results = 0, []
        for part, group, sites in zip(self.readings, self.groups, self.sites, strict=True):
            kept, values = tested[part.index], group.y.shape[-1]
            columns = torch.arange(values, device=rows.device)
            at = position[first + values * sites[kept].unsqueeze(-1) + columns]  # (n, v)
            if kept.any():
                joint = partial(_square, latent, at.flatten())
                results.append(LeftOut(part.take(kept), mean[at], latent.diagonal()[at], joint))
            first += group.y.numel()
        return results


def _square(matrix: Float[Tensor, "k k"], rows: Int[Tensor, "m"]) -> Float[Tensor, "m m"]:
    """The matrix of some rows and columns."""
    return matrix[rows[:, None], rows]


@left_out.register
@torch.no_grad()
def _(inference: ExactInference, kernel, noises, mean, blocks):
    blocks = list(blocks)
    if not blocks:
        return
    rows = Rows.of(inference.data, inference.reach, kinds([block.left_out for block in blocks]))
    # Observations of one site in different blocks need separate rows. If the matrix is then much
    # larger than that of the sites, its factorisation costs more than conditioning for each block.
    if inference.changes is not None or len(rows) > _SPLIT * inference.size:
        yield from left_out.dispatch(object)(inference, kernel, noises, mean, blocks)
        return
    covariance = observed_covariance(kernel, [rows.observed])
    covariance = covariance + rows.observed.noise_covariance(noises)
    yield from left_out_of_rows(rows, covariance, noises, mean, blocks)


def left_out_of_rows(
    rows: Rows,
    covariance: Float[Tensor, "M M"],
    noises: Noises,
    mean: Float[Tensor, "p"] | None,
    blocks: Iterable[Block],
) -> Iterator[list[LeftOut]]:
    """Yield the observations of every block with the field there given all others, from the
    covariance K of all rows."""
    design = rows.observed.design(next(iter(noises.values())).shape[-1])
    factor = cholesky(covariance)
    solved = torch.cholesky_solve(design, factor)
    noise = rows.observed.noise_covariance(noises)
    for block in blocks:
        b = torch.nonzero(rows.within(block.left_out)).squeeze(-1)
        unit = torch.zeros_like(covariance[:, : len(b)])
        unit[b, torch.arange(len(b), device=b.device)] = 1.0
        # halfᵀ half = [K⁻¹]_bb, from columns of the identity, without the whole K⁻¹.
        half = torch.linalg.solve_triangular(factor, unit, upper=False)
        conditional = cholesky_inverse(cholesky(half.mT @ half))
        residual = conditional @ solved[b]
        rest = torch.ones_like(design[:, 0], dtype=torch.bool).index_fill(0, b, False)
        evidence = Evidence(
            design.mT @ solved - solved[b].mT @ residual,
            covariance.new_zeros(()),
            seen_by(design[rest], covariance.diagonal()[rest]),
        )
        expected = design[b, 0] - (residual @ evidence.contrast(mean)).squeeze(-1)
        # The covariance of the observations minus that of their noise is that of the field. The
        # noise of a block is independent of the rest.
        latent = conditional - _square(noise, b)
        if mean is None:
            effect = residual[:, 1:] @ evidence.mean_root()
            latent = latent + effect @ effect.mT
        yield rows.predicted(block.tested, b, expected, latent)


def kinds(masks: Sequence[Bool[Tensor, "N"]]) -> Int[Tensor, "N"]:
    """Return a number for each observation, which is equal for observations that are in the same
    sets."""
    # Each set has a random word. Observations in the same sets have the same sum of words. Others
    # have different sums, except with probability 2⁻⁶⁴ for a pair.
    words = np.random.default_rng(0).integers(0, 2**64, size=len(masks), dtype=np.uint64)
    sums = np.zeros(len(masks[0]), dtype=np.uint64)
    for word, mask in zip(words, masks, strict=True):
        sums[mask.cpu().numpy()] += word  # modulo 2⁶⁴
    numbers = np.unique(sums, return_inverse=True)[1]
    return torch.from_numpy(numbers.ravel()).to(masks[0].device)


# Held-out blocks for inference by features: their statistics are subtracted.


@left_out.register
@torch.no_grad()
def _(inference: FeatureInference, kernel, noises, mean, blocks):
    data = inference.data
    expansion = expand(kernel, inference.draws, data.num_inputs).double()
    cheap = has_blocks(expansion) and whole_vectors(data.observations)
    if inference.prefers_dual_algebra(expansion) and not cheap:  # fewer values than features
        rows = Rows.of(data)
        delta = inference.truncated(kernel, expansion)
        truncated = None if delta is None else (delta, torch.zeros_like(delta))
        dense = DenseRows.of(rows.observed, expansion, noises, truncated)
        covariance = dense.features @ dense.features.mT + dense.noise
        yield from left_out_of_rows(rows, covariance, noises, mean, blocks)
        return
    total = inference.statistics_of(kernel)
    for block in blocks:
        parts = [part.take(block.left_out[part.index]) for part in data.visit()]
        rest = total - FieldStatistics.of([part for part in parts if len(part)], total.phi)
        known = StatisticsOnly(rest, None, data.survey)
        with check_features(False):  # the model's own posterior is checked
            conditioned = replace(inference, data=known, known=rest)
            posterior = conditioned.posterior(kernel, noises, mean)
        yield predicted(data, block, posterior.field(fixed=mean is not None))


# Leave-one-out residuals.


@dataclass(frozen=True)
class LeaveOneOut:
    """Each observation compared with its prediction from all others.

    `VectorFieldGP.leave_one_out` returns it. Attributes have one row for each of the N points, in
    the given order, with v values each. Values that were not observed have NaN.

    Attributes:
        residual: the observation less its prediction from all others, (N, v), in units of y.
        covariance: the covariance of the residual with noise, (N, v, v), in squared units of y. For
            Student-t noise, it uses the scale matrix of the noise.
        distance: the squared distance rᵀ C⁻¹ r, (N,), for the residual r with the covariance C.
        p_value: the probability of a distance at least as large under the model, (N,). It is small
            for outliers. The distance has a χ² distribution with v degrees of freedom. Under
            Student-t noise with ν degrees of freedom, it is v times an F(v, ν) variable, if the
            variance of the field is small compared with the noise.
        log_density: the Gaussian log density of each observation given all others, (N,), in nats.
            Under Gaussian noise, their sum is a score of the model.
        weight: the expected weight of each observation under Student-t noise, (N,). It is small for
            outliers. Under Gaussian noise it is 1.

    Example:
        >>> import gp_orff, torch
        >>> x = torch.rand(40, 2, generator=torch.Generator().manual_seed(0))
        >>> model = gp_orff.VectorFieldGP(gp_orff.CurlFreeKernel(num_dims=2))
        >>> model = model.condition(x, torch.sin(3 * x))
        >>> result = model.leave_one_out(x, torch.sin(3 * x))
        >>> result.residual.shape, result.p_value.shape
        (torch.Size([40, 2]), torch.Size([40]))
    """

    residual: Float[Tensor, "N v"]
    covariance: Float[Tensor, "N v v"]
    distance: Float[Tensor, "N"]
    p_value: Float[Tensor, "N"]
    log_density: Float[Tensor, "N"]
    weight: Float[Tensor, "N"]

    @classmethod
    def empty(cls, count: int, values: int) -> "LeaveOneOut":
        """A result with NaN in each row, which `record` overwrites."""
        shapes = [(values,), (values, values), (), (), (), ()]
        nan = torch.tensor(math.nan, dtype=torch.float64)
        return cls(*(nan.repeat(count, *shape) for shape in shapes))

    def record(
        self,
        index: Int[Tensor, "n"],
        columns: Int[Tensor, "v"],
        residual: Float[Tensor, "n v"],
        covariance: Float[Tensor, "n v v"],
        weight: Float[Tensor, "n"],
        tail: Callable[[Float[Tensor, "n"], int], Float[Tensor, "n"]],
    ) -> None:
        """Overwrite some rows. `tail(d, v)` is the probability of a distance of at least d."""
        distance = (residual * torch.linalg.solve(covariance, residual)).sum(-1)
        log_normaliser = residual.shape[-1] * math.log(2 * math.pi) + torch.logdet(covariance)
        self.residual[index[:, None], columns] = residual.cpu()
        self.covariance[index[:, None, None], columns[:, None], columns] = covariance.cpu()
        self.distance[index] = distance.cpu()
        self.p_value[index] = tail(distance.cpu(), len(columns))
        self.log_density[index] = -0.5 * (distance + log_normaliser).cpu()
        self.weight[index] = weight.cpu()


@torch.no_grad()
def leave_one_out(
    pairs: Iterable[tuple[Observations, Observations]],
    count: int,
    models: Mapping[str, StudentTNoise],
    posterior: Posterior,
    noises: Noises,
    sites: Mapping[GroupKey, Residuals] | None = None,
) -> LeaveOneOut:
    """Leave-one-out residuals of pairs (nominal, weighted) of observations.

    The posterior is conditioned on the weighted observations, with noise covariances N. With
    e = y − H E[f] and S = H Cov[f] Hᵀ of each observation, the residual r satisfies

        r = N (N − S)⁻¹ e ,    Cov[H f | others] = N (N − S)⁻¹ N − N .

    Covariance and density use the noise of the nominal observations. If the field changes within
    sites, `sites` has e and S of the latent vector that the records of a site share, by group.

    Raises:
        ValueError: if the posterior was not conditioned on the observations, or if components of a
            vector are separate observations.
    """
    result, pairs = None, list(pairs)
    parts = [weighted for _, weighted in pairs]
    known = [None] * len(parts) if sites is None else [row for _, row in with_rows(parts, sites)]
    for (nominal, weighted), at_sites in zip(pairs, known, strict=True):
        columns = torch.tensor(nominal.pattern.columns)
        if result is None:
            result = LeaveOneOut.empty(count, nominal.pattern.num_columns)
        index = nominal.index.cpu()
        if not result.weight[index].isnan().all():
            raise ValueError(
                "expected one observation for each point, got components of a vector with separate "
                "noise, which are several observations; pass variances (N,) or noise (N,), or use "
                "cross_validate(x, y, blocks=range(len(x)))"
            )
        if at_sites is None:
            residual, latent, noise = residuals(weighted, posterior, noises)
        else:
            residual, latent, noise = *at_sites, posterior.noises[weighted.key]
        noise_covariance = weighted.noise(noise)
        if not (torch.linalg.eigvalsh(noise_covariance - latent)[:, 0] > 0).all():
            raise ValueError(
                "expected observations on which the model was conditioned, got some at which the "
                "variance of the field exceeds that of the noise; pass the data of fit or "
                "condition; if the report states that positions were merged, condition with "
                "merge=0, or use cross_validate(x, y, blocks=range(len(x)))"
            )
        gain = noise_covariance @ torch.linalg.inv(noise_covariance - latent)  # N (N − S)⁻¹
        residual = (gain @ residual.unsqueeze(-1)).squeeze(-1)
        covariance = gain @ noise_covariance - noise_covariance + nominal.noise(noise)
        model = models.get(nominal.key.label)
        weight = torch.ones_like(residual[:, 0]) if weighted.weight is None else weighted.weight
        weight = weight if nominal.weight is None else weight / nominal.weight
        tail = chi_squared if model is None else model.tail
        result.record(index, columns, residual, covariance, weight, tail)
    return result


def chi_squared(distance: Float[Tensor, "n"], values: int) -> Float[Tensor, "n"]:
    """P(D ≥ distance) for D ~ χ² with `values` degrees of freedom."""
    half = torch.tensor(0.5 * values, dtype=distance.dtype)
    return torch.special.gammaincc(half, 0.5 * distance)
