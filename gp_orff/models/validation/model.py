"""`ValidatedModel`: methods of a model that compare readings with predictions from others."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from gp_orff.data.dataset import Data, Dataset
from gp_orff.data.noise.covariances import noises_of
from gp_orff.data.observations import Observations, join
from gp_orff.data.patterns import DEFAULT
from gp_orff.data.reading import Options
from gp_orff.data.repeats.copies import without_copies
from gp_orff.data.repeats.request import Repeats
from gp_orff.data.sources import InMemory
from gp_orff.data.workers.calls import on_workers
from gp_orff.inference.along_tracks.offsets import TrackOffsets, track_offsets
from gp_orff.inference.conditioning.left_out_points import without_far_points
from gp_orff.inference.left_out import leave_one_out_of_tracks
from gp_orff.inference.left_out.readings import TrackReadings
from gp_orff.inference.robust import LeaveOneOut, leave_one_out
from gp_orff.models.base import FieldModel
from gp_orff.models.fitting.robust_em import EStep
from gp_orff.models.state import ModelState
from gp_orff.models.validation.blocks import blocks_of
from gp_orff.models.validation.calibration import calibration_of, warn_of_calibration
from gp_orff.models.validation.cross_validation import CrossValidation
from gp_orff.models.validation.predictor import Predictor
from gp_orff.settings import check_calibration
from gp_orff.threads import chosen_threads


class ValidatedModel(FieldModel):
    """A model that predicts readings of its own data from the others."""

    @chosen_threads()
    def leave_one_out(
        self,
        x: object,
        y: object,
        **options: object,
    ) -> LeaveOneOut:
        """Compare each observation with its prediction from all others, to find outliers.

        Returns residuals, p-values and log densities, one row per point of x (`LeaveOneOut`). They
        are in closed form (Rasmussen & Williams 2006, eqs. 5.10–5.12, for vectors), with
        hyperparameters, mean and Student-t weights from all data. `x`, `y` and `options` have to be
        all or some of the data of `fit`, with the same options; of readings along tracks, the
        others are those given. ValueError for `variances` (N, p), `noise` (N, p) or (N, p, p), and
        for other data where the field is less certain than the observation; of readings that were
        merged at sites within which the field changes, all have to be given.

        Example:
            >>> import gp_orff, torch
            >>> x = torch.rand(80, 2, generator=torch.Generator().manual_seed(0))
            >>> y = torch.stack([torch.sin(3 * x[:, 1]), torch.sin(3 * x[:, 0])], dim=-1)
            >>> y[7] = -y[7]  # a bad vector
            >>> kernel = gp_orff.DivergenceFreeKernel(num_dims=2)
            >>> robust = gp_orff.MultitaskStudentTLikelihood(num_tasks=2)
            >>> model = gp_orff.VectorFieldGP(kernel, likelihood=robust)
            >>> result = model.fit(x, y, progress=False).leave_one_out(x, y)
            >>> torch.nonzero(result.p_value < 1e-3).flatten()
            tensor([7])
        """
        snapshot, state = self._snapshot(), self.state
        choice = Options(**options)
        data = self._read(x, y, choice)
        if data.tracks:
            representation = self._representation_of(data)
            noises = noises_of(self.kernel, representation.likelihoods)
            parts = self.kernel, noises, self._fixed_mean, len(x)
            along = self._along_tracks(x, y, choice, data)
            return leave_one_out_of_tracks(representation.now(), along, *parts)
        weighted = list(state.weighted(data, state.data).visit())
        parts = snapshot.posterior, snapshot.noises, snapshot.constant
        same = _are_all(weighted, state.data)
        sites = snapshot.inference.latent_of_sites(snapshot.posterior) if same else None
        pairs = zip(data.visit(), weighted, strict=True)
        return leave_one_out(pairs, len(x), state.e_step.heavy_tailed, *parts, sites)

    @on_workers
    @chosen_threads()
    @torch.no_grad()
    def cross_validate(
        self, x: object, y: object = None, *, blocks: object = "auto", **options: object
    ) -> CrossValidation:
        r"""Predict the readings of each block from all others, and return a `CrossValidation`.

        Readings near each other tell the same: leaving out one at a time flatters a model whose
        errors are correlated. Blocks as wide as the field is smooth ask for what a map is made for,
        and tell which kernel predicts best and whether error bars hold.

        A prediction is the one of a copy of the model that `condition` gives the rest of the data,
        on the frequencies that suit all of them: hyperparameters stay as they are, and a trained
        constant mean μ is estimated from the rest. It is found in closed form. With features, the
        statistics of a block b are subtracted, and A − A_b is factorised; with the exact kernel,

            y_b − E[y_b | rest] = ([K⁻¹]_bb)⁻¹ [K⁻¹ (y − μ)]_b ,    Cov = ([K⁻¹]_bb)⁻¹ ,

        and the variance of μ is added. Iterations of large grids start anew for each block. Under
        Student-t noise, readings have the weights that all data give them, and predictions add the
        Student-t noise itself. Observations of `observe` are ignored, and the model is not changed.

        A reading of a track that is left out whole is predicted as one of a new track. Where other
        readings of its track stay, on their clock, they tell its offset and correlated noise.

        Args:
            x, y: points (N, d) and vectors (N, p) in memory, usually the data of the model.
            blocks: "auto" for tracks, in at most 50 blocks, where `track` has several; else for
                cells of two lengthscales, in 5 to 50 blocks. Or a label for each reading (N,),
                numbers, names or anything hashable. Or a splitter of scikit-learn; a reading may be
                in several of its sets or none. Its `groups` are those of `group=`, or of `track=`.
            options: `variances`, `noise`, `directions`, `group`, `missing`, `merge`, `track` and
                `time`, as for `fit`. Readings that `condition` leaves out, such as copies, are not
                scored; those with covariances have a number along each axis of their noise. And
                `executor`, whose workers share the blocks, `retries` and `checkpoint`.

        Raises:
            TypeError: chunks; blocks that are no labels and no splitter.
            ValueError: as for `fit`; labels of another length, a block that leaves nothing.

        Example:
            Errors that are shared by the readings of an instrument:

            >>> import gp_orff, torch
            >>> generator = torch.Generator().manual_seed(0)
            >>> x = torch.rand(120, 2, generator=generator).double()
            >>> y = torch.stack([torch.sin(5 * x[:, 1]), torch.sin(5 * x[:, 0])], dim=-1)
            >>> names = ["a", "b", "c", "d"] * 30
            >>> y[0::4] += 0.5  # instrument a
            >>> y = y + 0.1 * torch.randn(120, 2, generator=generator)
            >>> model = gp_orff.VectorFieldGP(gp_orff.HelmholtzKernel(num_dims=2))
            >>> result = model.fit(x, y, progress=False).cross_validate(x, y, blocks=names)
            >>> result.blocks["a"].rmse > 2 * result.blocks["b"].rmse
            True
        """
        choice = Options(**options)
        chosen = blocks_of(blocks, self.kernel, x, y, choice)
        data, _ = without_far_points(self._in_memory(x, y, choice), self.frequencies)
        along = self._along_tracks(x, y, choice, data)
        representation = self._representation_of(data)
        e_step = EStep(self.kernel, representation.likelihoods, self._fixed_mean)
        representation = e_step.converged(representation)
        predictor = Predictor(representation.now(), e_step, self.mean, along)
        return predictor.cross_validation(chosen.members)

    @chosen_threads()
    def track_offsets(self, group: str = DEFAULT) -> TrackOffsets:
        """Return the offset of every track of a group, with its standard deviation.

        It is what the readings of a track have in common besides the field, such as the levelling
        error of a line of a survey. The field is the one that all tracks tell together:
        `posterior()` is level. Noise that is correlated along the track is not part of it.

        Args:
            group: the name of the group, as in `fit(group=)`.

        Raises:
            RuntimeError: the model has no data.
            ValueError: a group without tracks.

        Example:
            >>> import gp_orff, torch
            >>> x = torch.cartesian_prod(torch.linspace(0, 1, 8), torch.linspace(0, 1, 12)).double()
            >>> line, step = torch.arange(96) // 12, torch.tensor([1.0, -1.0]).double().repeat(4)
            >>> noise = 0.05 * torch.randn(96, generator=torch.Generator().manual_seed(0)).double()
            >>> y = torch.sin(3 * x[:, 1]) + step[line] + noise
            >>> u = torch.tensor([0.0, 1.0]).double().expand(96, 2)
            >>> from gpytorch.means import ZeroMean
            >>> model = gp_orff.VectorFieldGP(gp_orff.CurlFreeKernel(num_dims=2), mean=ZeroMean())
            >>> model = model.fit(x, y, directions=u, track=line, progress=False)
            >>> offsets = model.track_offsets()
            >>> [tuple(part.shape) for part in (offsets.mean, offsets.sd)], offsets.labels[0]
            ([(8, 1), (8, 1)], '0')
            >>> (last, sd), (first, _) = offsets["7"], offsets["0"]
            >>> bool(abs(last - first + 2) < 3 * sd)
            True
        """
        state = self.state
        tracks = {part.key.label: part for part in state.data.tracks}
        if group not in tracks:
            named = f"one of {sorted(tracks)}" if tracks else "readings with track="
            raise ValueError(
                f"expected the group of readings along tracks, {named}, got {group!r}; give "
                "group=, or fit(x, y, track=labels)"
            )
        parts = self.kernel, state.e_step.noises, self._fixed_mean
        return track_offsets(state.inference, *parts, tracks[group])

    def _checked(self, state: ModelState) -> ModelState:
        """The state, with a note and a warning if error bars do not hold on left-out blocks."""
        calibrated = check_calibration.on() and state.data.varies
        calibration = calibration_of(state, self.mean) if calibrated else None
        if calibration is None or not calibration.note:
            return state
        warn_of_calibration(calibration)
        return replace(state, history=state.history.with_notes([calibration.note]))

    def _along_tracks(
        self, x: object, y: object, options: Options, data: Dataset
    ) -> list[TrackReadings]:
        """All readings one by one, if they are along tracks, to be put in blocks as in `data`."""
        if not data.tracks:
            return []
        spans = {part.key.label: part.span for part in data.tracks}
        plain = self._read(x, y, replace(options, track=None, time=None))
        return [
            TrackReadings.of(part, options.track, options.time, len(x), spans[part.key.label])
            for part in plain.visit()
        ]

    def _in_memory(self, x: object, y: object, options: Options) -> Dataset:
        """Data as by `counted_once`, in memory, whose observations have an `index`."""
        read = self._read(x, y, options)
        sources = (InMemory(list(read.visit())),)
        data = replace(read, sources=sources, repeats=Repeats(options.merge))
        return without_copies(data) if data.is_small else data


def _are_all(read: Sequence[Observations], data: Data) -> bool:
    """Whether the observations are all of the data, in their order."""
    held, read = data.observations if isinstance(data, Dataset) else [], join(read)
    return len(read) == len(held) and all(
        a.key == b.key and torch.equal(a.x, b.x) and torch.equal(a.y, b.y)
        for a, b in zip(read, held, strict=True)
    )
