"""A check after a fit: the coverage of 95 % intervals for held-out observations."""

import math
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
import scipy
import torch
from gpytorch.means import Mean
from jaxtyping import Bool, Complex, Float
from linear_operator.utils.errors import NotPSDError
from linear_operator.utils.warnings import NumericalWarning
from torch import Tensor

from gp_orff.data.dataset import Dataset, InMemory
from gp_orff.data.noise import Noises
from gp_orff.data.observations import Observations, TruncatedVariance
from gp_orff.data.patterns import GroupKey
from gp_orff.data.pointwise import any_pointwise
from gp_orff.data.tracks import TrackObservations
from gp_orff.fitting.noise import is_kept
from gp_orff.inference.along_tracks import (
    covariance_of_blocks,
    in_components,
    residual_of_blocks,
    tracks_left_out,
)
from gp_orff.inference.exact import ExactInference, has_covariance
from gp_orff.inference.left_out import Block, LeftOut, predicted
from gp_orff.inference.posteriors import FieldDistribution
from gp_orff.kernels.lines import inputs_of_lines
from gp_orff.kernels.tree import space_of
from gp_orff.models.cross_validation import (
    LEVEL,
    Predictor,
    lengthscales_of,
    lengthscales_of_terms,
)
from gp_orff.models.state import ModelState

# A few blocks of large data, predicted by the exact kernel from the observations around them.
#
# A calibrated model is also calibrated if it is conditioned on some of the observations only. The
# observations around a block have the largest effect on the prediction there. All of them are used,
# so that errors which neighbours share are visible.
#
# 1. The positions of blocks and of tested observations are from a sample of the data.
# 2. The sample shows the distance within which a block has 2 × 1200 values around it.
# 3. One visit to the data collects all observations within this distance, and the nearest 1200
#    values are used.
# 4. The exact kernel, with the hyperparameters of the fit, predicts the block from these.


_LEARNED = 1200  # values around a block, from which it is predicted
_OF_ALL, _FEW, _MOST_READINGS = (
    20,
    5000,
    2**20,
)  # observations of chunks: one of this many, at least, and at most
_FEWEST_NEIGHBOURS = 4  # observations of a sample that determine a distance


def first_readings(data: Dataset) -> Dataset:
    """Return all observations of small data, or about the first twentieth of chunks and large data.

    Observations that are selected keep the weights that the model has learned for them.
    """
    if data.is_small and _at_hand(data):
        return data
    sample, every = data.survey.sample, data.survey.num_points
    if sum(map(len, sample)) == every and data.weights is None:
        return Dataset.in_memory(sample)
    most = min(max(every // _OF_ALL, _FEW), _MOST_READINGS)
    parts, count = [], 0
    for part in data.unweighted().visit():
        parts.append(part)
        count += len(part)
        if count >= most:
            break
    kept = Dataset.in_memory(parts)
    return kept if data.weights is None else replace(kept, weights=data.weights[: len(parts)])


def left_out_of_surroundings(
    state: ModelState,
    data: Dataset,
    constant: Float[Tensor, "p"],
    blocks: Sequence[Block],
    half: Float[Tensor, "d"],
) -> Iterator[list[LeftOut]]:
    """Predict each held-out block from the observations around it, and yield the predictions.

    The exact kernel predicts the tested observations of a block from about 1200 observed values,
    which are the nearest ones outside the block. Blocks without neighbours are omitted.

    Args:
        state: the state of a model whose kernel has a covariance in closed form.
        data: observations at single points, in memory.
        constant: the mean (p,) of the field.
        blocks: blocks of the sample `data.survey.sample`.
        half: (d,), about half the width of a block along each axis. Distances from the centre of a
            block are divided by it.
    """
    kernel, noises = state.e_step.kernel, state.e_step.noises
    x = torch.cat([part.x for part in data.survey.sample])
    wanted = _LEARNED * len(x) / data.survey.num_values  # of the sample, around a block
    for block in blocks:
        inside = block.left_out.to(x.device)
        box = x[inside].aminmax(dim=0)
        away = partial(_distance, 0.5 * (box.min + box.max), half)
        within, others = away(x[inside]), away(x[~inside])
        rank = min(len(others), _FEWEST_NEIGHBOURS + round(2 * wanted))
        outer = others.kthvalue(rank).values
        parts = []
        for part in data.visit():
            distance = away(part.x)
            parts.append(_rows_of(part, (distance > within.max()) & (distance <= outer)))
        if not any(map(len, parts)):
            continue
        of_numbers = [away(part.x).repeat_interleave(part.y.shape[-1]) for part in parts]
        every = torch.cat(of_numbers)
        most = every.kthvalue(min(_LEARNED, len(every))).values
        near = [_rows_of(part, away(part.x) <= most) for part in parts]
        learned = Dataset.in_memory(list(filter(len, near)))
        inference = ExactInference.merging(kernel, noises, learned)
        posterior = inference.posterior(kernel, noises, constant)
        chosen = block.tested.split([len(part) for part in data.survey.sample])
        tested = list(filter(len, map(_rows_of, data.survey.sample, chosen)))
        tested = [replace(part, index=torch.arange(len(part))) for part in tested]
        every = block._replace(tested=torch.ones_like(block.tested))
        yield predicted(Dataset.in_memory(tested), every, posterior.field(fixed=True))


def _distance(
    centre: Float[Tensor, "d"], half: Float[Tensor, "d"], x: Float[Tensor, "n d"]
) -> Float[Tensor, "n"]:
    """Return max_i |x_i − c_i| / h_i for each point x, with the centre c and the half widths h."""
    return ((x - centre.to(x)).abs() / half.to(x)).amax(-1)


def _rows_of(part: Observations, chosen: Bool[Tensor, "n"]) -> Observations:
    return part.take(torch.nonzero(chosen)[:, 0].to(part.x.device))


# A cheap test of a few held-out blocks after a fit: the coverage of the intervals.
#
# The predictions of a block have common errors. If ρ_ij is the correlation of two predictions of a
# block given the rest, the indicators of their intervals are correlated by at most ρ_ij². The
# effective number of independent values among the tested ones is therefore
#
#     n_eff = (Σ_b n_b)² / Σ_b Σ_ij ρ_ij² .
#
# A warning needs two conditions. The coverage of 95 % intervals is below 0.85, and so small a
# coverage is improbable for n_eff independent values of a calibrated model.
#
# `_calibration_of` chooses what to hold out by the kind of data. For tracks, it holds out complete
# tracks, because the observations of a track share errors. If matrices are small, it holds out
# blocks of two lengthscales, given the rest. Otherwise, it holds out blocks given the observations
# around them. Large data along tracks are not tested. The draws have a fixed seed, so that a fit
# always gives the same warnings.


LEAST = 0.85  # coverage below which a warning is possible
_CHANCE = 0.003  # probability of the coverage under a calibrated model, below which one is given
_FEWEST_NUMBERS = 5  # effective number of values below which there is no test
_OUTLIER = 0.3  # largest weight of an outlier
_MAJORITY = 0.6  # least share of observations that are not outliers
_HALF = 1.0  # lengthscales from the centre of a block to its sides
_SHARE = 0.2  # largest share of the observations in a block
_BLOCKS, _TESTED, _NUMBERS = 5, 60, 180  # blocks; tested observations and values of each, at most
_FEW_BLOCKS, _MANY_ROWS = 3, 1000  # blocks, if matrices have more rows than this
_HALF_WIDTH = NormalDist().inv_cdf(0.5 + 0.5 * LEVEL)  # half the width of an interval over sd
_RARE = 1e-5  # as `_CHANCE`, for tests that are rarely significant
_OF_STUDENT_T = 0.1  # share of outliers that Student-t noise explains
_MIDDLE = 0.5 * NormalDist().inv_cdf(0.75)  # half of the median of |z| over its sd
_SHARE_OF_MIDDLE = 2 * NormalDist().cdf(_MIDDLE) - 1
_TINY = 1e-12  # least probability, so that normal scores are finite
_MOST = 4096  # rows of a matrix; more would take long compared with the fit


class CalibrationWarning(UserWarning):
    """Held-out observations or residuals show that error bars may be wrong.

    `VectorFieldGP.fit` makes this check after the search. You get the warning in four cases:

    - The 95 % intervals cover less than 85 % of the held-out values, and chance does not explain
      this.
    - Some observations have much larger noise than the others.
    - The residuals of neighbours are correlated.
    - The residuals along tracks oscillate.

    `gp_orff.settings.check_calibration(False)` turns the check off.

    Example:
        Each of 20 tracks has a constant error, of which the model is not informed:

        >>> import gp_orff, torch, warnings
        >>> generator = torch.Generator().manual_seed(1)
        >>> start, step = torch.rand(2, 20, 1, 2, generator=generator).double()
        >>> x = (start + (step - 0.5) * torch.linspace(0, 1, 20)[:, None]).flatten(
        ...     0, 1
        ... )
        >>> y = torch.stack(
        ...     [torch.sin(6 * x[:, 1]), torch.sin(6 * x[:, 0])], dim=-1
        ... )
        >>> y += (
        ...     torch.randn(20, 1, 2, generator=generator)
        ...     .repeat(1, 20, 1)
        ...     .flatten(0, 1)
        ... )
        >>> y += 0.02 * torch.randn(400, 2, generator=generator)
        >>> model = gp_orff.VectorFieldGP(gp_orff.DivergenceFreeKernel(num_dims=2))
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always", gp_orff.CalibrationWarning)
        ...     _ = model.fit(x, y, progress=False)
        >>> [warning.category.__name__ for warning in caught]
        ['CalibrationWarning']
    """


Tested = tuple[Float[Tensor, "m"], Float[Tensor, "m m"]]
"""The m values of a block as normal scores z = Φ⁻¹(F(y)), where F is the predictive distribution
function, and the correlations of their predictions."""


@dataclass(frozen=True)
class Calibration:
    """The coverage of 95 % intervals for the values of a few held-out blocks."""

    inside: int  # values inside their intervals
    numbers: int  # tested values
    blocks: int
    independent: float  # the effective number of independent values
    central: int = 0  # values whose score is below a third of the root mean square
    alike: float | None = None  # correlation of residuals of neighbours, if it is significant
    between_lines: float | None = None  # the same if all kernels of an axis are periodic
    noise_kept: bool = False  # whether the noise was given and has no learned factor

    @classmethod
    def of(cls, blocks: Iterable[Iterable[Tested]], outliers: float = 0.0) -> "Calibration | None":
        """Return the coverage from the scores of every block; None without blocks.

        At most a fraction `outliers` of the values is treated as outliers.
        """
        scores, deviations = [], []  # deviations: sd of the count of covered values, over one value
        for parts in map(list, blocks):
            scores += [score.detach().cpu() for score, _ in parts]
            # Parts of one block, such as groups, are taken as fully dependent: their deviations add
            # up before they are squared. Different blocks count as independent.
            of_parts = [correlation.square().sum().sqrt().item() for _, correlation in parts]
            deviations.append(sum(of_parts))
        if not any(map(len, scores)):
            return None
        z = torch.cat(scores).abs()
        inside = int((z <= _HALF_WIDTH).sum())
        usual = z[z <= z.quantile(1 - outliers)]
        central = int((z < _MIDDLE * usual.square().mean().sqrt()).sum())
        independent = len(z) ** 2 / float(np.square(deviations).sum())
        return cls(inside, len(z), len(deviations), independent, central=central)

    @property
    def coverage(self) -> float:
        return self.inside / self.numbers

    @property
    def chance(self) -> float:
        """The probability of this coverage, or a smaller one, under a calibrated model."""
        return _chance(self.coverage, self.independent, LEVEL)

    @property
    def notes(self) -> list[str]:
        """Faults of the error bars and remedies, as sentences; empty if no test is significant."""
        every = [self.note, self.note_of_outliers, self.note_of_axes, self.note_of_lines]
        return [text for text in every if text]

    @property
    def note_of_outliers(self) -> str:
        """A note and remedy for observations with much larger noise than the others; or empty."""
        rest = 1 - self.central / self.numbers
        scarce = self.independent < _FEWEST_NUMBERS
        if scarce or rest >= 0.5 or _chance(rest, self.independent, 1 - _SHARE_OF_MIDDLE) > _RARE:
            return ""
        return (
            f"{self.central} of {self.numbers} held-out values are within a third of the root mean "
            f"square deviation from the predictions, but {_SHARE_OF_MIDDLE * self.numbers:.0f} are "
            "expected. Some observations have much larger noise than the others, such as outliers "
            "or those of a bad instrument, and their noise may hide the field. Label each "
            "instrument by group=, drop the outliers, or try gp_orff.MultitaskStudentTLikelihood"
        )

    @property
    def note_of_axes(self) -> str:
        """A note and remedy for one lengthscale along axes of very different extents; or empty."""
        if self.alike is None:
            return ""
        return (
            f"residuals of neighbours are correlated by {self.alike:.2f}, with distances relative "
            "to the extents of the axes. The fitted noise includes a part of the field, and the "
            "error bars omit this part. The axes have very different extents, but the kernel has "
            "one lengthscale. Use one for each axis, by "
            "gpytorch.kernels.RBFKernel(ard_num_dims=...) inside the kernel, or scale the axes to "
            "similar extents"
        )

    @property
    def note_of_lines(self) -> str:
        """A note and remedy for a field that also varies without a period; or empty."""
        if self.between_lines is None:
            return ""
        return (
            f"residuals of neighbours in space and time are correlated by {self.between_lines:.2f}:"
            " the field also varies without a period, for example by eddies, but all kernels of "
            "time are periodic. The fitted noise includes this variation, and the error bars of "
            "tides are too small. Add a kernel for it, as in gp_orff.tides(space, ...) + space * "
            "gpytorch.kernels.MaternKernel(nu=0.5, active_dims=...)"
        )

    @property
    def note(self) -> str:
        """A note and remedies if the coverage is too low; or empty."""
        few = self.independent < _FEWEST_NUMBERS
        if few or self.coverage >= LEAST or self.chance > _CHANCE:
            return ""
        factor = "scale_noise=True (noise= may be too small), " if self.noise_kept else ""
        return (
            f"95 % intervals cover {self.coverage:.2f} of {self.numbers} values in {self.blocks} "
            "held-out blocks: error bars far from observations are too small. Observations may "
            "share errors (one track, one instrument), or the kernel is too smooth or omits a part "
            "of the field. Try a HelmholtzKernel, a rougher kernel such as MaternKernel(nu=1.5), "
            f"Student-t noise, track=, {factor}or fewer observations (gp_orff.thin). Compare these "
            "models by cross_validate(x, y, blocks=...) or compare_kernels(..., blocks=...)"
        )


def _chance(share: float, independent: float, expected: float) -> float:
    """Return the probability of a coverage of at most `share` among `independent` values.

    Each value is covered with the probability `expected`, so the number of covered values has a
    binomial distribution. The incomplete beta function interpolates this distribution between
    integers.
    """
    trials = max(independent, 1.0)
    count = min(share * trials, trials - 1e-9)
    return float(scipy.special.betainc(trials - count, count + 1, 1 - expected))


def calibration_of(state: ModelState, prior_mean: Mean) -> Calibration | None:
    """Return the coverage of a few held-out blocks or tracks, each predicted from the other data.

    Blocks are two lengthscales wide. For chunks and large matrices, blocks are predicted only from
    the observations around them. Observations along tracks are held out as complete tracks.

    The result is None if the model stores only statistics, if symbols were observed, or if a
    covariance is singular. It is also None for large data along tracks, and for large data without
    a covariance in closed form.
    """
    try:
        with warnings.catch_warnings():  # of near-singular data, of which the fit has warned
            warnings.simplefilter("ignore", NumericalWarning)
            found = _calibration_of(state, prior_mean)
            given = is_kept(state.likelihoods, state.data)
            return found and replace(
                found,
                noise_kept=given,
                alike=correlation_of_residuals(state, prior_mean),
                between_lines=correlation_between_lines(state, prior_mean),
            )
    except (torch.linalg.LinAlgError, NotPSDError):
        return None


@torch.no_grad()
def _calibration_of(state: ModelState, prior_mean: Mean) -> Calibration | None:
    data, rows = state.data, _rows(state)
    count = _FEW_BLOCKS if rows > _MANY_ROWS else _BLOCKS
    outliers = _OF_STUDENT_T if state.e_step.heavy_tailed else 0.0
    if not data.revisitable or data.symbol_data or any_pointwise(state.likelihoods):
        return None
    if not data.tracks and (rows > _MOST or not _at_hand(data)):
        return Calibration.of(_left_out_of_surroundings(state, prior_mean), outliers)
    if rows > _MOST:
        return None
    if data.tracks:
        chosen = [_some(held, count) for held in state.data.tracks if len(held.tracks) > 1]
        found = Calibration.of(_left_out_tracks(state, chosen))
        return found and replace(found, blocks=sum(len(part.tracks) for part in chosen))
    return Calibration.of(_left_out_blocks(state, prior_mean, count), outliers)


def _left_out_blocks(state: ModelState, prior_mean: Mean, count: int) -> Iterator[Iterator[Tested]]:
    """The tested values of a few blocks of two lengthscales."""
    inference, parts, first = state.inference, [], 0
    for part in inference.data.unweighted().visit():
        index = torch.arange(first, first + len(part), device=part.x.device)
        parts.append(replace(part, index=index))
        first += len(part)
    data = replace(inference.data, sources=(InMemory(parts),))
    indexed = inference.of(data)
    if not inference.is_exact and inference.draws[0].shared_columns() is not None:
        indexed = replace(indexed, known=inference.statistics)
    predictor = Predictor(indexed, state.e_step, prior_mean)
    x = torch.cat([part.x for part in data.visit()]).cpu()
    usual = torch.cat(list(data.all_weights())).cpu() > _OUTLIER
    for parts in predictor.left_out(
        _blocks(x, usual, _half_widths(state), count, _most_tested(data.survey.sample[0].key))
    ):
        yield (_tested(predictor, part) for part in parts)


def _left_out_of_surroundings(state: ModelState, prior_mean: Mean) -> Iterator[Iterator[Tested]]:
    """The tested values of a few blocks of a sample, given the observations around them."""
    if not has_covariance(state.kernel, state.data):
        return
    data = first_readings(state.data)
    x = torch.cat([part.x for part in data.survey.sample]).cpu()
    usual, half = torch.ones(len(x), dtype=torch.bool), _half_widths(state)
    if data.weights is not None:
        weights = data.stored_weights(Dataset.in_memory(data.survey.sample))
        usual = torch.cat(list(weights)).cpu() > _OUTLIER
    blocks = _blocks(x, usual, half, _FEW_BLOCKS, _most_tested(data.survey.sample[0].key))
    predictor = Predictor(state.inference, state.e_step, prior_mean)
    constant = state.snapshot(prior_mean).constant
    for parts in left_out_of_surroundings(state, data, constant, blocks, half):
        yield (_tested(predictor, part) for part in parts)


def _tested(predictor: Predictor, part: LeftOut) -> Tested:
    *_, sd, _, _, pit = predictor.scores(part)
    pit = pit.clamp(_TINY, 1 - _TINY)
    return torch.special.ndtri(pit), _correlations(part.joint(), sd)


def _left_out_tracks(
    state: ModelState, chosen: Sequence[TrackObservations]
) -> Iterator[list[Tested]]:
    """The block means of a few complete tracks of each group, which are held out together."""
    noises = state.e_step.noises
    found = tracks_left_out(state.inference, state.e_step.kernel, noises, state.mean, chosen)
    for part, (residual, covariance) in zip(chosen, found, strict=True):
        slow, variance = noises.slow.get(part.key.label), covariance.diagonal()
        if slow is not None:
            more = slow.matched(variance - noises.tracks[part.key.label].slow) - variance
            root = more.clamp_min(0).sqrt()
            sizes = torch.tensor([len(track.y) for track in part.tracks]).to(root.device)
            track = torch.arange(len(sizes)).to(sizes).repeat_interleave(sizes)
            same = (track.unsqueeze(-1) == track).to(root)  # values of one track share an error
            shared = in_components(same, part.y.shape[-1]) * root.unsqueeze(-1) * root
            covariance = covariance + shared
        sd = covariance.diagonal().sqrt()
        yield [(residual / sd, _correlations(covariance, sd))]


def _correlations(covariance: Float[Tensor, "m m"], sd: Float[Tensor, "m"]) -> Float[Tensor, "m m"]:
    """The correlations of values whose standard deviations `sd` include the noise."""
    return (covariance / (sd.unsqueeze(-1) * sd)).fill_diagonal_(1.0)


def warn_of_calibration(notes: Iterable[str]) -> None:
    """Give a warning for each note."""
    for note in notes:
        text = f"{note}; gp_orff.settings.check_calibration(False) silences this check"
        warnings.warn(text, CalibrationWarning, stacklevel=2)


# Oscillations along tracks, such as a tide that the model omits.
#
# Correlated noise along tracks can absorb an oscillation. The field and its error bars are then
# wrong. Given all data, the residuals r of the block means of a track have the covariance C = N −
# S, where N is the covariance of the noise and S that of the field. At the frequency ω, with a_b =
# exp(iωt_b), the ratio |aᴴr|²/(aᴴCa) has the mean 1 and is about exponentially distributed. Its sum
# over n tracks and components has about a Gamma distribution. An oscillation is a ratio that is too
# large for this distribution, and larger than the ratios at longer and shorter periods.


_TRACKS = 20  # most tracks that are tested
_SHORTEST, _LONGEST = 8, 200  # blocks of a track, at least and at most
_NEIGHBOURS = 1.5  # least ratio to the periods with which an oscillation is compared


class Oscillation(NamedTuple):
    """A period along tracks at which residuals have more variance than the model explains."""

    period: float
    ratio: float  # the variance of the residuals over the variance that the model explains

    @property
    def note(self) -> str:
        """The possible reason, and remedies."""
        return (
            f"residuals along tracks oscillate with a period of about {self.period:.3g}, in units "
            f"of time=. At this period, their variance is {self.ratio:.2g} times the variance that "
            "field and noise explain. The model may omit a tide or an inertial oscillation. "
            "Subtract it from the observations of each track before the fit, or average the "
            "observations over whole periods"
        )


@torch.no_grad()
def oscillation_along_tracks(state: ModelState, prior_mean: Mean) -> Oscillation | None:
    """The most significant oscillation of residuals along tracks with times; None if none is
    significant."""
    tracks = [along for along in getattr(state.data, "tracks", ()) if along.timed]
    if not tracks or not math.isfinite(_rows(state)):
        return None
    field, white = state.snapshot(prior_mean).posterior.field(fixed=False).split()
    truncated = None if white is None else (white, white)
    groups = (_oscillation(field, truncated, state.e_step.noises, along) for along in tracks)
    return min(filter(None, groups), default=(0.0, None))[1]


def _oscillation(
    field: FieldDistribution,
    truncated: TruncatedVariance,
    noises: Noises,
    along: TrackObservations,
) -> tuple[float, Oscillation] | None:
    """The most significant oscillation of a group, and its probability under the model; None if
    none is significant."""
    long = [number for number, track in enumerate(along.tracks) if len(track.y) >= _SHORTEST]
    if not long:
        return None
    order = torch.randperm(len(long), generator=torch.Generator().manual_seed(0)).tolist()
    parts = []
    for number in (long[i] for i in order[:_TRACKS]):
        rows = torch.arange(along.blocks[number].start, along.blocks[number].stop)
        parts.append(along.take(rows[:_LONGEST].to(along.y.device)))
    times = [(0.5 * (part.times.first + part.times.last)).cpu() for part in parts]
    spans = np.array([(time[-1] - time[0]).item() for time in times])
    spacing = np.median(spans / [len(time) - 1 for time in times])
    longest = spans.max()
    if not spacing > 0:
        return None
    frequencies = np.arange(1, int(longest / spacing) + 1) / (2 * longest)
    sums, counts = np.zeros((2, len(frequencies)))
    for part, time, span in zip(parts, times, spans, strict=True):
        resolved = frequencies * span >= 1  # a track resolves periods up to its duration
        wave = torch.exp(2j * math.pi * torch.from_numpy(frequencies[resolved])[:, None] * time)
        for ratio in ratios_of_track(field, truncated, noises, part, wave):
            sums[resolved] += ratio.numpy()
            counts[resolved] += 1
    frequencies, sums, counts = (values[counts > 0] for values in (frequencies, sums, counts))
    return _peak(frequencies, sums, counts)


def ratios_of_track(
    field: FieldDistribution,
    truncated: TruncatedVariance,
    noises: Noises,
    part: TrackObservations,
    wave: Complex[Tensor, "k T"],
) -> Iterator[Float[Tensor, "k"]]:
    """|aᴴr|²/(aᴴCa) for each component of the block means of a track, at k frequencies."""
    residual, width = residual_of_blocks(field, part).cpu().to(wave), part.y.shape[-1]
    latent = covariance_of_blocks(field, part)
    covariance = (part.noise_covariance(noises, truncated) - latent).cpu().to(wave)
    for i in range(width):
        of_one = covariance[i::width, i::width]
        expected = ((wave.conj() @ of_one) * wave).sum(-1).real
        yield (wave.conj() @ residual[:, i]).abs().square() / expected


def _peak(
    frequencies: Float[np.ndarray, "k"],
    sums: Float[np.ndarray, "k"],
    counts: Float[np.ndarray, "k"],
) -> tuple[float, Oscillation] | None:
    """The oscillation with the smallest probability. `sums` are sums of `counts` ratios."""
    ratios, significant = sums / counts, []
    for i, frequency in enumerate(frequencies):
        longer = ratios[frequencies * _NEIGHBOURS <= frequency]
        shorter = ratios[frequencies >= frequency * _NEIGHBOURS]
        if not (len(longer) and len(shorter)):
            continue
        usual = max(1.0, np.median(longer), np.median(shorter))
        chance = len(frequencies) * scipy.special.gammaincc(counts[i], sums[i] / usual)
        if chance < _RARE:
            significant.append((chance, -ratios[i], Oscillation(1 / frequency, ratios[i])))
    return (min(significant)[0], min(significant)[2]) if significant else None


# A part of the field that the kernel excludes, and that is learned as noise.
#
# 1. If one lengthscale is longer than the extent of the data along one axis and shorter than along
#    another axis, the field cannot vary along the first axis.
# 2. If all kernels of an axis are periodic, such as tides, the field repeats along it.
#
# All other variation of the field is learned as noise. Predictions of held-out observations then
# have the right coverage, because the noise is large, but the field does not. The residuals of
# neighbours show this: they are correlated. Neighbours are found with distances relative to the
# extent of each axis. If e are the normal scores of the residuals of M pairs of neighbours,
# Σ e_i e_j/√M is about standard normal for independent residuals. Given all data, the residuals of
# a calibrated model are correlated less than the noise is.
#
# In a long record, the times between neighbours of a random sample exceed the lifetime of eddies.
# For an axis with periodic kernels only, the sample is therefore one interval of this axis, and the
# extent is the length of this interval.


_SAMPLED = 1000  # most points of a sample
_CORRELATED = 5.0  # standard deviations above which a correlation is significant


@torch.no_grad()
def correlation_of_residuals(state: ModelState, prior_mean: Mean) -> float | None:
    """The correlation of residuals of neighbours, if it is significant and axes of very different
    extents have one lengthscale; otherwise None."""
    data, space = state.data, list(space_of(state.kernel, state.data.num_inputs))
    if not data.revisitable or data.tracks:
        return None
    extents = data.survey.distances.bulk[space]
    shared = [lengths[space] for lengths in lengthscales_of_terms(state.kernel, data.num_inputs)]
    pairs = (
        (lengths[i], extents[i], extents[lengths == lengths[i]].max())
        for lengths in shared
        for i in range(len(lengths))
    )
    if not any(0 < short < length < long for length, short, long in pairs):
        return None
    return _correlation(state, prior_mean, space)


@torch.no_grad()
def correlation_between_lines(state: ModelState, prior_mean: Mean) -> float | None:
    """The correlation of residuals of neighbours, if it is significant and all kernels of an axis
    are periodic; otherwise None."""
    data = state.data
    if not data.revisitable or data.tracks:
        return None
    space = space_of(state.kernel, data.num_inputs)
    for axis in inputs_of_lines(state.kernel):
        correlation = _correlation(state, prior_mean, sorted({*space, axis}), axis)
        if correlation is not None:
            return correlation
    return None


def _correlation(
    state: ModelState, prior_mean: Mean, axes: Sequence[int], stretched: int | None = None
) -> float | None:
    """Return the correlation of residuals of neighbours along `axes`; None if it is not
    significant.

    It is computed for a random sample, or for an interval of the axis `stretched`.
    """
    data, snapshot, products = state.data, state.snapshot(prior_mean), []
    for part in data.survey.sample:
        extents = data.survey.distances.bulk.copy()
        if stretched is None:
            rows = torch.randperm(len(part), generator=torch.Generator().manual_seed(0))
            rows = rows[:_SAMPLED]
        else:
            rows, first = part.x[:, stretched].argsort(), max(0, (len(part) - _SAMPLED) // 2)
            rows = rows[first : first + _SAMPLED]
            extents[stretched] = np.ptp(part.x[rows, stretched].cpu().numpy())
        part = part.take(rows.to(part.x.device))
        mean = snapshot.field().distribution.mean(part.x)
        residual = (part.y - part.apply(mean)).cpu().numpy()
        if len(part) < 2:
            continue
        scaled = part.x[:, axes].cpu().numpy() / extents[axes].clip(min=_TINY)
        # pairs of a point and its nearest neighbour, each pair once
        nearest = scipy.spatial.cKDTree(scaled).query(scaled, k=2)[1][:, 1]
        pairs = np.stack([np.arange(len(part)), nearest], axis=-1)
        first, second = np.unique(np.sort(pairs, axis=-1), axis=0).T
        ranks = residual.argsort(0).argsort(0)  # as quantiles of a standard normal distribution
        scores = scipy.special.ndtri((ranks + 0.5) / len(ranks))
        products.append((scores[first] * scores[second]).ravel())
    every = np.concatenate([np.empty(0), *products])
    significant = every.sum() > _CORRELATED * math.sqrt(max(len(every), 1))
    return float(every.mean()) if significant else None


def _rows(state: ModelState) -> float:
    """Return the number of rows of the matrix that is factorised to predict a block. It is infinite
    if no matrix is factorised."""
    inference = state.inference
    if inference.is_exact:
        return inference.size
    return math.inf if inference.is_iterative else inference.num_features(state.kernel)


def _at_hand(data: Dataset) -> bool:
    return all(source.at_hand for source in data.sources)


def _some(held: TrackObservations, count: int) -> TrackObservations:
    """Return blocks from a few tracks, which are drawn at random and are at most a fifth of all
    tracks."""
    generator, few = torch.Generator().manual_seed(0), int(_SHARE * len(held.tracks))
    few = min(count, max(1, few))
    chosen = torch.randperm(len(held.tracks), generator=generator)[:few].tolist()
    part = replace(held, tracks=tuple(held.tracks[number] for number in chosen))
    rows = torch.randperm(len(part.y), generator=generator)[: few * _most_tested(held.key)]
    return part.take(rows.sort().values.to(part.x.device))


def _most_tested(key: GroupKey) -> int:
    return min(_TESTED, max(1, _NUMBERS // key.pattern.num_outputs))


def _half_widths(state: ModelState) -> Float[Tensor, "d"]:
    """Return half the width of a block (d,), which is one lengthscale along each axis.

    Along an axis without a lengthscale, it is the extent of the data.
    """
    lengths = torch.from_numpy(lengthscales_of(state.kernel, state.data.num_inputs))
    low, high = torch.tensor(state.data.survey.box, dtype=lengths.dtype).mT
    half = _HALF * torch.where(lengths > 0, lengths, high - low)
    return half.clamp_min(torch.finfo(half.dtype).tiny)


def _blocks(
    x: Float[Tensor, "n d"],
    usual: Bool[Tensor, "n"],
    half: Float[Tensor, "d"],
    count: int,
    most_tested: int,
) -> list[Block]:
    """Blocks around observations that are drawn at random. Blocks do not overlap.

    A block is two lengthscales wide, or less if it would contain more than a fifth of the
    observations. Outliers under Student-t noise are not tested, unless they are the majority,
    because the intervals of the field need not cover them.
    """
    generator, blocks = torch.Generator().manual_seed(0), []
    columns = (x / half).mT.contiguous()
    free, share = torch.ones(len(x), dtype=torch.bool), max(1, int(_SHARE * len(x)))
    # If most weights are small, they do not identify outliers, and all observations are tested.
    usual = usual | (usual.double().mean() < _MAJORITY)
    for centre in torch.randperm(len(x), generator=generator)[: 10 * count].tolist():
        if not free[centre]:
            continue
        distance = (columns - columns[:, centre, None]).abs_().amax(0)
        inside = distance <= 1.0
        if inside.sum() > share:
            inside = distance <= distance.kthvalue(share).values
        if not free[inside].all() or inside.sum() > 2 * _SHARE * len(x):
            continue
        rows = torch.nonzero(inside & usual).squeeze(-1)
        order = torch.randperm(len(rows), generator=generator)[:most_tested]
        tested = torch.zeros_like(inside)
        tested[rows[order]] = True
        free &= ~inside
        blocks.append(Block(len(blocks), inside, tested))
        if len(blocks) == count:
            break
    return blocks
