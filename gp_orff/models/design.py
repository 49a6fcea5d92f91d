"""Where to measure next, and which observations are redundant, by the posterior variance.

Let t be a target, such as the field, its vorticity or a transport. The criterion is the posterior
variance of t, averaged over M points r_m of a region: v = Σ_m tr Var[t(r_m)] / M. A new observation
y = H f(x) + ε with the noise covariance N decreases v by

    tr( (B + N)⁻¹ W Wᵀ ) / M ,    B = Cov[H f(x)],    W = Cov[H f(x), (t(r_1), …, t(r_M))] ,

where the covariances are conditional on all data. The decrease does not depend on the value of y.
If an observation is removed from the data, v increases by tr((N − B)⁻¹ W Wᵀ) / M.

1. `Side` has the arrays from which covariances between two sets of points follow: features, or the
   whitened covariance with the data under the exact kernel.
2. `design` chooses the candidate with the largest decrease divided by its cost. Then it updates the
   covariances of all others for this choice (*): W − C A⁻¹ W_*, with C = Cov[H f, H_* f] and
   A = B_* + N_*. The update is exact. The choices are greedy: if the decrease is submodular, their
   total decrease is at least 63 % of the largest possible one (Nemhauser et al. 1978).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce, singledispatch
from operator import add
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from gp_orff.data.noise import GroupNoise, group_noise
from gp_orff.data.observations import Observations
from gp_orff.data.patterns import DEFAULT
from gp_orff.data.reading import unit_directions
from gp_orff.data.statistics import Weights
from gp_orff.data.validation import as_points
from gp_orff.features.chunked import as_box
from gp_orff.inference.exact import ExactPosterior, prior_covariance
from gp_orff.inference.posteriors import (
    FieldDistribution,
    Plus,
    SymbolPosterior,
    WeightPosterior,
    WithMean,
)
from gp_orff.kernels.base import as_real_tensor, check_positive_integer, cholesky, cholesky_inverse
from gp_orff.models.frozen_model import FieldOnDomain, Snapshot
from gp_orff.symbols.base import Identity, Symbol

_REGION = 256  # quasi-random points of a region that is given as a box


class Design(NamedTuple):
    """The candidates that `FieldPosterior.design` chose, in the order of their choice.

    The mean variance is the posterior variance of the target, summed over its outputs and averaged
    over the region, in squared units of the target.

    Attributes:
        indices: the indices (k,) of the k chosen candidates.
        points: the points (k, d) of the chosen candidates.
        gains: the decrease (k,) of the mean variance by each choice, after the choices before it.
        variance: the mean variance before the first choice.
        candidates: the points (C, d) of all candidates.
        first: the decrease (C,) of the mean variance by each candidate alone.

    Example:
        >>> import gp_orff, torch
        >>> x = torch.rand(30, 2).double()
        >>> model = gp_orff.VectorFieldGP(gp_orff.DivergenceFreeKernel(num_dims=2))
        >>> field = model.condition(x, torch.sin(5 * x.flip(-1))).posterior()
        >>> chosen = field.design(torch.rand(50, 2), 3)
        >>> chosen.points.shape, bool(chosen.gains.sum() < chosen.variance)
        (torch.Size([3, 2]), True)
    """

    indices: Int[Tensor, "k"]
    points: Float[Tensor, "k d"]
    gains: Float[Tensor, "k"]
    variance: float
    candidates: Float[Tensor, "C d"]
    first: Float[Tensor, "C"]


class Redundancy(NamedTuple):
    """The increase of variance if one station is removed; `FieldPosterior.redundancy` returns it.

    The mean variance is the posterior variance of the target, summed over its outputs and averaged
    over the region, in squared units of the target.

    Attributes:
        labels: the labels (s,) of the s stations, or the indices of the distinct positions.
        points: the mean position (s, d) of each station.
        losses: the increase (s,) of the mean variance if only this station is removed.
        variance: the mean variance with all stations.

    Example:
        >>> import gp_orff, torch
        >>> x = torch.tensor([[0.0, 0.0], [1.0, 0.0], [1.0, 0.01]]).double()
        >>> model = gp_orff.VectorFieldGP(gp_orff.CurlFreeKernel(num_dims=2))
        >>> field = model.condition(x, torch.ones(3, 2)).posterior()
        >>> result = field.redundancy(["a", "b", "c"])
        >>> str(result.labels[result.order[-1]])  # far from the others
        'a'
    """

    labels: np.ndarray
    points: Float[Tensor, "s d"]
    losses: Float[Tensor, "s"]
    variance: float

    @property
    def order(self) -> Int[Tensor, "s"]:
        """The indices (s,) of the stations, the most redundant one first."""
        return self.losses.argsort()


# Covariances between two sets of points.


@dataclass(frozen=True)
class Side:
    """Points under a distribution of the field, or of a symbol of it."""

    core: WeightPosterior | ExactPosterior  # conditional on the constant mean
    x: Float[Tensor, "n d"]
    rows: Tensor  # features (n·q, F), or Cov[t(x), H f] L⁻ᵀ (n·q, M)
    effect: Float[Tensor, "n*q k"]  # the effect of the uncertain constant mean

    def take(self, points: Int[Tensor, "k"]) -> "Side":
        """Some of the points."""
        q = len(self.effect) // len(self.x)
        rows = (points.unsqueeze(-1) * q + torch.arange(q).to(points)).flatten()
        return replace(self, x=self.x[points], rows=self.rows[rows], effect=self.effect[rows])

    def covariance(self, other: "Side") -> Float[Tensor, "n*q m*r"]:
        """Cov[t(x), s(z)] given the data, for the points x of this side and z of the other."""
        return _between(self.core, self, other) + self.effect @ other.effect.mT


@singledispatch
def side_of(distribution: FieldDistribution, x: Float[Tensor, "n d"]) -> Side:
    """Return the `Side` of points for a distribution of the field.

    It omits white noise and variance that is common to all points, because they do not contribute
    to the covariances.
    """
    raise NotImplementedError(
        f"expected a posterior of one model, got a {type(distribution).__name__}"
    )


@side_of.register
def _(distribution: Plus, x):
    return side_of(distribution.distribution, x)


@side_of.register
def _(distribution: WithMean, x):
    effect = distribution.effect(x).flatten(0, 1)
    return replace(side_of(distribution.distribution, x), effect=effect)


@side_of.register
def _(distribution: WeightPosterior, x):
    rows = distribution.expansion.features(x)
    return Side(distribution, x, rows, x.new_zeros(len(rows), 0))


@side_of.register
def _(distribution: SymbolPosterior, x):
    rows = distribution.features(x)
    return Side(distribution.posterior, x, rows, x.new_zeros(len(rows), 0))


@side_of.register
def _(distribution: ExactPosterior, x):
    cross = distribution.cross(x)
    rows = torch.linalg.solve_triangular(distribution.factor, cross, upper=False).mT
    return Side(distribution, x, rows, x.new_zeros(len(rows), 0))


@singledispatch
def _between(distribution: WeightPosterior | ExactPosterior, a: "Side", b: "Side") -> Tensor:
    raise NotImplementedError


@_between.register
def _(distribution: WeightPosterior, a, b):
    # Features after those of the field, of the constants of potentials, are zero in the field.
    count = distribution.expansion.num_features
    short, long = sorted((a, b), key=lambda side: len(side.rows))
    solved = distribution.weight_covariance(short.rows[:, :count].mT)
    product = long.rows[:, :count] @ solved
    return product if long is a else product.mT


@_between.register
def _(distribution: ExactPosterior, a, b):
    space = b.core.space or distribution.space
    prior = prior_covariance(
        distribution.kernel, distribution.symbol, a.x, b.core.symbol, b.x, space
    )
    return prior - a.rows @ b.rows.mT


# What to measure next.


@torch.no_grad()
def design(
    snapshot: Snapshot,
    candidates: object,
    count: int,
    target: Symbol | None,
    region: object,
    directions: object,
    noise: object,
    cost: object,
) -> Design:
    """Choose candidates one after another. The arguments are as for `FieldPosterior.design`."""
    x = as_points(candidates, snapshot.num_inputs).to(snapshot.device)
    check_positive_integer(count, "count", "design")
    if count > len(x):
        raise ValueError(f"expected at most the {len(x)} candidates as count, got {count}")
    r = region_of(region, snapshot)
    field, image = _field_and_target(snapshot, x, r, target)
    goal = side_of(image.distribution, r)
    every = _candidates(snapshot, field, x, directions, noise)
    cost = torch.ones_like(x[:, 0]) if cost is None else cost
    prices = as_real_tensor(cost, "cost", dtype=torch.float64).to(x)
    if prices.shape != (len(x),) or not (prices > 0).all():
        raise ValueError(
            f"expected cost as {len(x)} positive numbers, one for each candidate, got shape "
            f"{tuple(prices.shape)}, with {int((~(prices > 0)).sum())} that are not positive"
        )
    chosen, decreases, first = _greedy(every, goal, count, prices)
    indices = torch.tensor(chosen)
    variance = image.distribution.variance(r).sum(-1).mean().item()
    gains = torch.tensor(decreases, dtype=torch.float64) / len(r)
    return Design(indices, x[chosen].cpu(), gains, variance, x.cpu(), first.cpu() / len(r))


class Candidates(NamedTuple):
    """Possible observations of v values each, at C points."""

    side: Side
    blocks: Float[Tensor, "C v v"]  # B
    noise: Float[Tensor, "C v v"]
    h: Float[Tensor, "C v p"]  # H

    def rows(self, values: Float[Tensor, "C*p k"]) -> Float[Tensor, "C v k"]:
        """H of k fields."""
        return self.h @ values.unflatten(0, (len(self.h), -1))

    def with_one(self, index: int) -> Float[Tensor, "C v v"]:
        """C = Cov[H f, H_* f] of every candidate with the candidate `index`."""
        one = self.side.take(torch.tensor([index], device=self.side.x.device))
        return self.rows(self.side.covariance(one)) @ self.h[index].mT


def _candidates(
    snapshot: Snapshot,
    field: FieldOnDomain,
    x: Float[Tensor, "C d"],
    directions: object,
    noise: object,
) -> Candidates:
    distribution, white = field.distribution.split()
    blocks, p = distribution.blocks(x), distribution.num_outputs
    h = torch.eye(p).to(blocks).expand(len(x), p, p)
    if directions is not None:
        h = unit_directions(directions, len(x), p).to(blocks).unsqueeze(1)
    added = _noise_of(snapshot, noise, len(x), p, directions is not None).to(blocks)
    added = h @ added @ h.mT if added.shape[-1] == p else added
    added = added if white is None else added + h @ white @ h.mT
    blocks = h @ blocks @ h.mT
    return Candidates(side_of(distribution, x), blocks, added.expand_as(blocks), h)


def _noise_of(
    snapshot: Snapshot, noise: object, count: int, p: int, along: bool
) -> Float[Tensor, "#C v v"]:
    """The noise covariance of each candidate, or one for all."""
    if noise is None:
        return _noise_of_data(snapshot).detach().unsqueeze(0)
    values = as_real_tensor(noise, "noise", dtype=torch.float64)
    v = 1 if along else p
    if values.shape == (count,) == (v,) and not (values == values[0]).all():
        raise ValueError(
            f"expected noise whose shape distinguishes {count} candidates and {v} components, got "
            f"{tuple(values.shape)}; give torch.diag(noise) for components, or noise[:, None, None]"
            f" * torch.eye({v}) for candidates"
        )
    if values.dim() == 0 or values.shape == (count,):
        covariance = values.reshape(-1, 1, 1) * torch.eye(v).double()
    elif values.shape == (v,):
        covariance = torch.diag(values).unsqueeze(0)
    elif values.shape in ((v, v), (count, v, v)):
        covariance = values.reshape(-1, v, v)
    else:
        raise ValueError(
            f"expected noise as a variance, one for each of the {count} candidates or of the {v} "
            f"numbers of each, or covariances {(v, v)}, got shape {tuple(values.shape)}"
        )
    if not (torch.linalg.eigvalsh(covariance) > 0).all():
        raise ValueError(
            "expected positive noise variances or positive definite covariances of the candidates, "
            "got zero or negative ones; give the noise of the instrument"
        )
    return covariance


def _noise_of_data(snapshot: Snapshot) -> Float[Tensor, "p p"]:
    """Return the noise covariance of the observations.

    An error is raised if it differs between observations, or if they have no noise variance.
    """
    data = snapshot.inference.data
    labels = {key.label for key in data.keys}
    label = DEFAULT if DEFAULT in labels else min(labels)
    if any(part.represented is not None for part in data.survey.sample if part.key.label == label):
        raise NotImplementedError(
            "design expects noise= for a model whose likelihood is neither Gaussian nor Student-t "
            "and has no noise variance, got none; give the variance of an instrument with Gaussian "
            "noise"
        )
    given = [data.weights_of[key] for key in data.keys if key.known and key.label == label]
    weights = reduce(add, given) if given else Weights.of(None, 1)
    equal = math.isclose(weights.count * weights.squares, weights.total**2)  # or larger
    equal &= all(part.given is None for part in data.tracks if part.key.label == label)
    if not equal or (label != DEFAULT and len(labels) > 1):
        raise ValueError(
            "expected noise= for the candidates, because the noise of the data is not the same for "
            "all observations, got none; give a variance"
        )
    return snapshot.noises[label] / weights.mean


def _greedy(
    candidates: Candidates, target: Side, count: int, cost: Float[Tensor, "C"]
) -> tuple[list[int], list[float], Float[Tensor, "C"]]:
    """The indices of the choices, the decrease of the summed variance by each choice, and the
    decrease by every candidate before the first choice."""
    cross = candidates.rows(candidates.side.covariance(target))  # W, (C, v, M·q)
    blocks, noise = candidates.blocks, candidates.noise
    free = torch.ones(len(blocks), dtype=torch.bool, device=blocks.device)
    chosen: list[int] = []
    decreases: list[float] = []
    halves: list[Float[Tensor, "C v v"]] = []
    first = gains = _decrease(blocks + noise, cross)
    while True:
        index = int(torch.where(free, gains / cost, -torch.inf).argmax())
        chosen.append(index)
        decreases.append(gains[index].item())
        free[index] = False
        if len(chosen) == count:
            return chosen, decreases, first
        factor = cholesky(blocks[index] + noise[index])
        common = candidates.with_one(index)  # C, given the data
        for half in halves:  # and given the choices before
            common = common - half @ half[index].mT
        half = torch.linalg.solve_triangular(factor.mT, common, upper=True, left=False)
        halves.append(half)
        cross = cross - half @ torch.linalg.solve_triangular(factor, cross[index], upper=False)
        blocks = blocks - half @ half.mT
        gains = _decrease(blocks + noise, cross)


def _decrease(covariance: Float[Tensor, "C v v"], cross: Float[Tensor, "C v k"]) -> Tensor:
    """tr(A⁻¹ W Wᵀ) of each, (C,)."""
    inverse = cholesky_inverse(cholesky(covariance))
    return (inverse * (cross @ cross.mT)).sum((-1, -2))


def region_of(region: object, snapshot: Snapshot) -> Float[Tensor, "m d"]:
    """The points of a region: the given points, or quasi-random points in a box. The default is the
    box of the data."""
    d = snapshot.num_inputs
    box = snapshot.inference.data.box if region is None else region
    pairs = isinstance(box, tuple | list) and all(np.shape(side) == (2,) for side in box)
    if pairs and isinstance(box, list) and d == 2:  # points have two coordinates too
        if len(box) == 2 and all(low < high for low, high in box):
            raise ValueError(
                f"expected a tuple of (low, high) as a box, or an array of points, got the list "
                f"{box}, which may be either; give tuple(region) for a box, or "
                "torch.tensor(region) for points"
            )
        pairs = False
    if not pairs:
        return as_points(box, d).to(snapshot.device)
    if len(box) != d:
        raise ValueError(f"expected a region with (low, high) of {d} inputs, got {len(box)}")
    low, high = torch.tensor(as_box(box, "region", "design"), dtype=torch.float64).mT
    engine = torch.quasirandom.SobolEngine(d, scramble=True, seed=0)
    return (low + (high - low) * engine.draw(_REGION, dtype=torch.float64)).to(snapshot.device)


def _field_and_target(
    snapshot: Snapshot,
    x: Float[Tensor, "n d"],
    region: Float[Tensor, "m d"],
    target: Symbol | None,
) -> tuple[FieldOnDomain, FieldOnDomain]:
    """The field under the learned hyperparameters, and its target, at the points x and region."""
    symbol = Identity() if target is None else target
    snapshot.check_symbol(symbol)
    support = torch.cat([x, symbol.all_points(region, snapshot.space)])
    field = snapshot.learned_field(support, symbol)
    if target is None:
        return field, field
    image = snapshot.apply(symbol, field, support)
    if image.inference is not field.inference:  # features instead of the exact kernel
        field = snapshot.learned_field(support, symbol, image.inference)
    return field, image


# Which observations are redundant.


@torch.no_grad()
def redundancy(
    snapshot: Snapshot, stations: object, target: Symbol | None, region: object
) -> Redundancy:
    """Return the increase of the variance of the target if one station is removed, for each
    station.

    The arguments are as for `FieldPosterior.redundancy`.
    """
    data = snapshot.inference.data
    if not data.revisitable or data.tracks:
        what = "observations along tracks" if data.revisitable else "statistics"
        raise NotImplementedError(
            f"expected observations that can be removed one by one, got {what}; fit the model "
            "without tracks, or to data that it stores"
        )
    parts, r = list(data.visit()), region_of(region, snapshot)
    every = torch.cat([part.x for part in parts])
    names, station = _stations(stations, every, len(parts) > 1)
    field, image = _field_and_target(snapshot, every, r, target)
    distribution, white = field.distribution.split()
    goal, pieces, firsts = side_of(image.distribution, r), [], np.cumsum([0, *map(len, parts)])
    for part in parts:
        side, group = side_of(distribution, part.x), group_noise(part.key, snapshot.noises)
        cross = part.rows(side.covariance(goal)).unflatten(0, (len(part), -1))  # W
        pieces.append(Piece(part, side, cross, part.noise(GroupNoise(group, white))))
    losses, points = [], []
    order = np.argsort(station, kind="stable")
    for rows in np.split(order, np.cumsum(np.bincount(station))[:-1]):
        chosen = []
        for piece, start in zip(pieces, firsts[:-1], strict=True):
            inside = rows[(rows >= start) & (rows < start + len(piece.part))] - start
            if len(inside):
                chosen.append(piece.take(torch.from_numpy(inside).to(every.device)))
        losses.append(_loss(chosen))
        points.append(every[torch.from_numpy(rows)].mean(0))
    variance = image.distribution.variance(r).sum(-1).mean().item()
    loss = torch.stack(losses).cpu() / len(r)
    return Redundancy(names, torch.stack(points).cpu(), loss, variance)


class Piece(NamedTuple):
    """Observations of one group, with the arrays from which the effect of a removal follows."""

    part: Observations
    side: Side
    cross: Float[Tensor, "n v k"]  # W
    noise: Float[Tensor, "n v v"]

    def take(self, rows: Int[Tensor, "m"]) -> "Piece":
        """Some of the observations."""
        return Piece(self.part.take(rows), self.side.take(rows), self.cross[rows], self.noise[rows])


def _loss(pieces: Sequence[Piece]) -> Float[Tensor, ""]:
    """tr((N − B)⁻¹ W Wᵀ) for the observations of one station."""

    def between(a: Piece, b: Piece) -> Float[Tensor, "n*v m*w"]:
        return b.part.rows(a.part.rows(a.side.covariance(b.side)).mT).mT

    joint = torch.cat([torch.cat([between(a, b) for b in pieces], dim=-1) for a in pieces])  # B
    noise = torch.block_diag(*(block for piece in pieces for block in piece.noise))
    cross = torch.cat([piece.cross.flatten(0, 1) for piece in pieces])
    return (torch.linalg.solve(noise - joint, cross) * cross).sum()


def _stations(
    stations: object, x: Float[Tensor, "N d"], several: bool
) -> tuple[np.ndarray, Int[np.ndarray, "N"]]:
    """The labels of stations, and the index of the station of each observation."""
    if stations is None:
        _, station = np.unique(x.cpu().numpy(), axis=0, return_inverse=True)
        station = station.reshape(-1)
        return np.arange(station.max() + 1), station
    labels = np.asarray(stations)
    if several:
        raise NotImplementedError(
            "expected stations=None, which removes all observations at one position together, got "
            "labels: a model stores observations of several groups, or with missing components, in "
            "an order that labels cannot follow"
        )
    if labels.shape != (len(x),):
        raise ValueError(
            f"expected a station for each of the {len(x)} observations that the model stores, got "
            f"shape {labels.shape}; the model does not store copies of records and rows without a "
            "value: remove these from x and y, or use condition(..., merge=0), which stores copies"
        )
    return np.unique(labels, return_inverse=True)
