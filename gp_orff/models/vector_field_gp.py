"""`VectorFieldGP`: a Gaussian process of a vector field, with its data and its posterior."""

import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from dataclasses import asdict, replace
from functools import partial
from time import perf_counter

import torch
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import Likelihood
from gpytorch.means import Mean
from gpytorch.models import GP
from jaxtyping import Float
from torch import Tensor

from gp_orff.data.checks import (
    ColumnUnits,
    check_units_of_tides,
    warn_of_close_tides,
    warn_of_sentinels,
    warn_of_values,
)
from gp_orff.data.dataset import (
    Arrays,
    Chunks,
    Data,
    Dataset,
    InMemory,
    Reader,
    base_means,
    is_constant,
)
from gp_orff.data.likelihoods import NamedLikelihoods, default_likelihood
from gp_orff.data.noise import noise_of, noises_of
from gp_orff.data.observations import Observations, SymbolObservations, join
from gp_orff.data.passes import on_workers
from gp_orff.data.patterns import DEFAULT, Components, GroupKey
from gp_orff.data.pointwise import any_pointwise, by_points, represented, require_gaussian
from gp_orff.data.reading import Options, has_no_rows, in_units
from gp_orff.data.sites import Repeats
from gp_orff.data.statistics import FieldStatistics
from gp_orff.data.survey import DataWarning, NoObservations
from gp_orff.features.draws import Rule, check_rule
from gp_orff.features.grid import Auto
from gp_orff.fitting.journal import History, Progress, show_pass, shown
from gp_orff.fitting.noise import learn_scales, remember_all, spans_of
from gp_orff.fitting.robust_em import EStep
from gp_orff.fitting.starting_values import with_amplitude
from gp_orff.fitting.strategy import fit
from gp_orff.inference.along_tracks import (
    TrackOffsets,
    TrackReadings,
    leave_one_out_of_tracks,
    track_offsets,
)
from gp_orff.inference.left_out import (
    LeaveOneOut,
    leave_one_out,
)
from gp_orff.inference.representation import Representation, warn_of_left_out, without_far_points
from gp_orff.kernels.fields import require_field_products
from gp_orff.kernels.tree import checked_terms, space_of
from gp_orff.models import storage
from gp_orff.models.calibration import (
    calibration_of,
    oscillation_along_tracks,
    warn_of_calibration,
)
from gp_orff.models.coasts import coast_observations
from gp_orff.models.cross_validation import CrossValidation, Predictor, blocks_of
from gp_orff.models.derived import take_heights
from gp_orff.models.field_posterior import FieldPosterior
from gp_orff.models.fit_plan import FitPlan, plan_of
from gp_orff.models.frozen_model import ModelSnapshot
from gp_orff.models.report import FitReport
from gp_orff.models.state import (
    ModelState,
    check_mean,
    default_mean,
    is_trained,
    is_trend,
    raw_parameters,
    restored_on_failure,
    trend_of,
    with_groups,
)
from gp_orff.settings import check_calibration
from gp_orff.symbols.base import Identity, Symbol
from gp_orff.threads import chosen_threads

_KIND = "gp_orff.VectorFieldGP"


class VectorFieldGP(GP):
    r"""A vector-valued Gaussian process y = f(x) + μ + ε, for ten to ten million points.

    `fit` learns the hyperparameters by marginal likelihood, `condition` does not change them, and
    `posterior` returns the posterior of the field. Small data sets use the exact kernel. For larger
    ones, one pass computes the sufficient statistics of features on a frequency grid. The cost of
    training is then independent of N. Training starts with the exact evidence of a small subset of
    the data, and continues with searches of increasing cost: see `plan`.

    Hyperparameters, constraints and priors are in the units of x and y. Changing the units does not
    change the results. Computations are in float64. A call that fails leaves the model unchanged.

    Args:
        kernel: any kernel that `ORFFKernel` accepts. It is trained in place. Each term without an
            outputscale, for example a `CurlFreeKernel`, is wrapped in a `ScaleKernel` with
            outputscale 1; `model.kernel` is the result.
        likelihood: a `MultitaskGaussianLikelihood`, a `MultitaskStudentTLikelihood`, or a
            `GaussianLikelihood` for one output. If None, Gaussian with one noise variance. Any
            other likelihood of gpytorch, for example for signs, counts or classes, is wrapped in a
            `Pointwise`: the posterior is then the normal distribution with the largest ELBO.
        mean: the prior mean μ. If None, the best constant for each output is computed in closed
            form, with a flat prior: posteriors include its variance. Other means, such as
            `ZeroMean()`, are not trained. Add a kernel term to model a trend.
        frequencies: the rule that chooses the frequencies of the features: `Auto`, `Grid` or a
            random rule; `Auto(tolerance=1e-5)` if None. The tolerance of a grid is for a noise
            variance of 1/1000 of the signal variance. The model adapts it to the learned noise and
            to the posterior variance, and also adapts `lengthscale_range`.

    Raises:
        TypeError: an argument that is not a kernel, likelihood or frequency rule.
        ValueError: kernel, likelihood and mean have different numbers of outputs.

    Example:
        >>> import gp_orff, torch
        >>> x = torch.rand(100, 2)
        >>> y = torch.stack(
        ...     [torch.sin(3 * x[:, 1]), torch.sin(3 * x[:, 0])], dim=-1
        ... )
        >>> model = gp_orff.VectorFieldGP(gp_orff.HelmholtzKernel(num_dims=2))
        >>> model = model.fit(x, y + 0.1 * torch.randn(100, 2), progress=False)
        >>> field = model.posterior()
        >>> field.mean(x).shape, field.variance(x).shape
        (torch.Size([100, 2]), torch.Size([100, 2]))
    """

    def __new__(cls, *args: object, **kwargs: object):
        """A new model; a TypeError for data instead of the kernel."""
        if len(args) > 1:
            raise TypeError(
                f"VectorFieldGP expects the kernel alone without a name, got {len(args)} "
                "arguments; data go to VectorFieldGP(kernel).fit(x, y)"
            )
        return super().__new__(cls)

    def __init__(
        self,
        kernel: Kernel,
        *,
        likelihood: Likelihood | None = None,
        mean: Mean | None = None,
        frequencies: Rule | None = None,
    ):
        super().__init__()
        example = "VectorFieldGP(gp_orff.HelmholtzKernel(num_dims=2))"
        self.num_outputs = checked_terms(kernel, "VectorFieldGP", example)[0].num_outputs
        frequencies = Auto() if frequencies is None else frequencies
        check_rule(frequencies, "VectorFieldGP expects a frequency rule")
        require_field_products(kernel)
        self.kernel = with_amplitude(kernel)
        if likelihood is None:
            likelihood = default_likelihood(self.num_outputs)
        self.likelihood = by_points(likelihood)
        self.mean = default_mean(self.num_outputs) if mean is None else mean
        self.frequencies = frequencies
        self.likelihoods = NamedLikelihoods()  # of groups with a name
        self._assigned: ModelState | None = None
        self._trend: tuple[Mean, ...] = ()  # a copy of a varying mean, subtracted from the data
        self._units = ColumnUnits()  # of the data that it was fitted to, as far as they are known
        self._learned: Float[Tensor, "k"] | None = None  # hyperparameters of a fit with weak priors
        given = next(kernel.parameters(), None)  # the amplitude, which may be new, is the first
        self.to("cpu" if given is None else given.device, torch.float64)
        noise_of(self.likelihood, self.num_outputs)  # raises if it is not supported
        check_mean(self.mean, self.num_outputs)

    def forward(self, x: Float[Tensor, "n d"]) -> MultitaskMultivariateNormal | MultivariateNormal:
        """Return the distribution of the field at points x given all data, `posterior()(x)`.

        `fit`, `condition`, `update`, `observe` and `load` leave the model in eval mode, which
        gpytorch requires for predictions.

        Args:
            x: points (n, d).

        Raises:
            RuntimeError: a model in train mode, or without data.
        """
        if self.training:
            raise RuntimeError(
                "expected a VectorFieldGP in eval mode, got one in train mode; call "
                "model.fit(x, y) to train it, or model.eval() if it has data"
            )
        return self.posterior()(x)

    @property
    def covar_module(self) -> Kernel:
        """The kernel of the field, as `kernel`; gpytorch's models have it under this name."""
        return self.kernel

    @property
    def mean_module(self) -> Mean:
        """The prior `mean`, under its name in gpytorch's models."""
        return self.mean

    def __setattr__(self, name: str, value: object) -> None:
        names = {"covar_module": "kernel", "mean_module": "mean"}
        super().__setattr__(names.get(name, name), value)

    # learn and condition

    @on_workers
    def fit(
        self,
        x: object = None,
        y: object = None,
        *,
        variances: object = None,
        noise: object = None,
        scale_noise: bool = False,
        directions: object = None,
        group: object = None,
        missing: str = "raise",
        merge: float | None = None,
        track: object = None,
        time: object = None,
        progress: bool = True,
        warm_start: bool = False,
    ) -> "VectorFieldGP":
        """Learn the hyperparameters from observations y at x, condition on them, and return self.

        `x` and `y` replace all stored data. Without them, the model learns again from the stored
        data.
        Parameters with `requires_grad=False` are not trained.

        For at most 120 vectors, or as many values as these have, the hyperparameters have weak
        priors in the units of the data (module `gp_orff.fitting.scoring`). Priors that you register
        replace these. The posterior integrates over all hyperparameters: see `posterior`.

        You get a `CalibrationWarning` if the held-out coverage of 95 % intervals is too low. You
        get a `DataWarning` in these cases:

        - The data are constant, and the hyperparameters do not change.
        - Points are far from all others, and a frequency grid omits them.
        - There are fewer than 10 values per hyperparameter, and the posterior does not integrate
          over the hyperparameters.
        - A lengthscale is below the distances of neighbours.
        - No observation depends on a direction of the constant mean.

        Args:
            x, y: points (N, d) and vectors (N, p) as tensors, arrays or memory maps. Or x alone, an
                iterable of chunks (x, y) that can be iterated repeatedly, such as a list. Memory
                does not grow with the number of chunks. A chunk may be a mapping with the keys x, y
                and, as needed, variances, noise, directions, group, track, time. It may also be a
                callable without arguments that returns a chunk, and loads it in the process that
                uses it.
            variances: relative noise variances (N,), which multiply the noise variance of the
                likelihood. Or (N, p), one for each component, with independent noise.
            noise: instead of `variances`, the noise variance of each observation (N,) or component
                (N, p), or covariances (N, p, p), in squared units of y. Pass it for all
                observations of a group. Values for components that are NaN are ignored. See
                `KnownNoiseLikelihood`. With Student-t noise, these are squared scales. With
                `track`, pass (N,): it is added to the learned white variance.
            scale_noise: False uses `noise` as given. True multiplies it by one factor, which each
                group learns. `condition`, `update` and others do not change the factor.
            directions: (N, p) unit vectors. Then y, (N,), contains the components along them.
            group: a group name for all observations, or one for each. Each group has a separate
                noise, `model.likelihoods[name]`; without a name (None, NaN), `model.likelihood`.
            missing: "mask" treats NaN in y as an unobserved component; "raise" raises an error.
            merge: a distance in the units of x, within which the exact kernel merges positions; 0
                merges none. If None, it merges positions that the prior does not distinguish, if
                this saves a fifth of the values. It also merges positions between which the field
                has a smaller variance than a grid would truncate. In small data sets, records with
                equal values at one place are copies, which are used once, even if rounded
                differently.
            track: a label for each observation, or one for all. Observations of one track share an
                offset and correlated noise: see `TrackLikelihood`. This levels the lines of a
                survey, also with `directions`. A track may continue in later chunks. Its
                observations stay in memory.
            time: (N,) times, which increase along each track. Dates and durations become seconds.
                If None, the length of the path is used.
            progress: whether to show progress on standard error: a bar in a terminal or notebook,
                otherwise one line per stage.
            warm_start: True starts the search from the present hyperparameters, False from values
                derived from the data. A model that stores only statistics always starts warm.
            executor: a `concurrent.futures.Executor`, such as a `ProcessPoolExecutor`, a Dask
                client's `get_executor()` or mpi4py's `MPIPoolExecutor`. Its workers read the chunks
                and return sums. Arrays are processed here, and so are passes with Student-t weights
                and passes that train random frequencies. See `gp_orff.data.passes`.
            retries: the number of further attempts for a chunk that fails on a worker.
            checkpoint: the path of a file (a pickle) with partial sums. An interrupted call with
                the same model and data continues from it. It is deleted after the call succeeds.

        Raises:
            TypeError: values are not real numbers.
            ValueError: data are empty or not finite, or shapes do not fit each other or the kernel.
            RuntimeError: no x is given, and the model has no data.
        """
        if x is None:
            data = self._held.data
            if not data.revisitable:
                remedy = "fit(x, y) on the observations, which are no longer stored"
                require_gaussian(self._every_likelihood, "fit() on statistics", remedy)
            warm_start, read = warm_start or not data.revisitable, lambda: data
            units = nullcontext()
            scale_noise = scale_noise or None  # as before
        else:
            options = Options(
                variances, noise, scale_noise, directions, group, missing, merge, track, time
            )
            read = partial(self._counted_once, x, y, options, learning=True)
            units = self._keeping_units(x, y, options, anew=not warm_start)
        start = perf_counter()
        with (
            units,
            chosen_threads(measure=True) as threads,
            shown(progress) as display,
            restored_on_failure(self),
        ):
            data = read()
            if data.varies:
                state = self._fit_state(data, warm_start, display, scale_noise)
                state = state.with_posterior(self.mean).with_new_tracks(self.mean)
            else:
                _warn_of_constant(data.survey.num_points)
                state = self._condition_state(self._representation_of(data))
            state = self._checked(state.with_posterior(self.mean))
        history = state.history.with_duration(perf_counter() - start, threads)
        return self._assign_with_posterior(replace(state, history=history))

    @on_workers
    def plan(self, x: object, y: object = None, **options: object) -> FitPlan:
        """Return the searches that `fit(x, y)` would run, with their cost and expected loss.

        The plan lists values, features, operations, seconds and memory, and the nats of log
        evidence that the fit is expected to lose. Starting values are computed from 600 values, as
        in a fit. The hyperparameters and data of the model do not change. Seconds are for eight
        evaluations of each search. They exclude passes over the data, rounds of EM under Student-t
        noise, and the posterior.

        Args:
            x, y, options: as for `fit`, without `progress` and `warm_start`.

        Raises:
            TypeError: as `fit` does.
            ValueError: as `fit` does, and if all observations are equal.

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
            >>> plan.rows, plan.features, plan.loss
            (1000, None, 0.0)
        """
        with chosen_threads(measure=True), restored_on_failure(self):
            choice = Options(**options)
            data = self._counted_once(x, y, choice, learning=True)
            if not data.varies:
                raise ValueError(
                    "expected data that vary, got observations that are all the same: fit learns "
                    "nothing from them; set the hyperparameters, and call condition(x, y)"
                )
            kernel, present = deepcopy((self.kernel, self._every_likelihood))
            take_heights(kernel, data, anew=True)
            likelihoods = with_groups(present, data, kernel)
            remember_all(likelihoods, data)
            learn_scales(likelihoods, data, choice.scale_noise)
            return plan_of(kernel, likelihoods, self._fixed_mean, self.frequencies, data)

    @on_workers
    @chosen_threads()
    def condition(self, x: object, y: object = None, **options: object) -> "VectorFieldGP":
        """Condition on observations without changing the hyperparameters, and return self.

        The observations replace all stored data, including the observations of `observe`. Data with
        units (from `gp_orff.labelled` or pint) are converted to the units of the fit, if these are
        known. `update` does the same.

        Args:
            x, y: points (N, d) and vectors (N, p), or chunks, as for `fit`. Or x alone: a
                `FieldStatistics` made by `statistics` or `statistics_of` of this model.
            options: arguments of `fit` that describe the data, from `variances` to `time`.

        Raises:
            TypeError, ValueError: as for `fit`; statistics with other frequencies; units that
                cannot be converted.
            RuntimeError: statistics are given to a model without data.
        """
        if isinstance(x, FieldStatistics):
            statistics = self.state.checked(x)
            data = replace(
                self.state.statistics_only(), field_statistics=statistics, symbol_data=()
            )
            representation = self._representation_of(data)
            return self._assign_with_posterior(self._condition_state(representation))
        choice = Options(**options)
        with self._keeping_units(x, y, choice):
            data = self._counted_once(x, y, choice)
            data, notes = without_far_points(data, self.frequencies)
            representation = self._representation_of(data)
            e_step = EStep.of(representation.kernel, representation.likelihoods, self._fixed_mean)
            representation = e_step.converged(representation)
            return self._assign_with_posterior(self._condition_state(representation, notes))

    @on_workers
    @chosen_threads()
    def update(self, x: object, y: object = None, **options: object) -> "VectorFieldGP":
        """Add observations to the stored data, condition on all of them, and return self.

        The hyperparameters do not change. Up to 4 million values are stored in memory. The model
        changes from the exact kernel to a frequency grid, and to a larger grid, if the data require
        it. With more values, it stores only `statistics`, whose domain is fixed, and `report`
        states this. With a frequency grid, the cost is one pass over the new observations. Under
        Student-t noise, they get weights from the present posterior; `fit()` computes all weights
        again. Data without rows, or with NaN only under `missing="mask"`, change nothing and are
        counted in `report.skipped`.

        Args:
            x, y, options: as for `condition`.

        Raises:
            RuntimeError: the model has no data.
            ValueError: as for `condition`; points outside the domain of the statistics.
        """
        state = self.state
        if isinstance(x, FieldStatistics):
            data = state.statistics_only()
            total = data.field_statistics + state.checked(x)
            representation = self._representation_of(replace(data, field_statistics=total))
            new, history = self._condition_state(representation), state.history.then("updated")
            return self._assign(replace(new, mean=state.mean, history=history))
        if y is not None and has_no_rows(x, y):
            return self._assign(state.skipping())
        choice = Options(**options)
        with self._keeping_units(x, y, choice):
            try:
                new = self.copied(x, y, choice)
            except NoObservations:
                return self._assign(state.skipping())
            return self._assign(state.updated(new))

    @chosen_threads()
    def observe(
        self,
        x: Float[Tensor, "m d"],
        y: Float[Tensor, "m q"],
        symbol: Symbol,
        *,
        noise: float | Float[Tensor, "q"] | Float[Tensor, "q q"],
        directions: Float[Tensor, "m q"] | None = None,
    ) -> "VectorFieldGP":
        """Add observations y = Q(f + μ)(x) + ε of a linear map Q of the field, and return self.

        Q is a `Symbol`. Examples are the potential, measured by a tide gauge; the divergence, which
        is zero in a region without sources; and the component normal to a wall,
        `Component(normal)`. The posterior and `fit()` combine these observations with observations
        of the field. Units are converted if they are known, as by `condition`. `fit(x, y)` and
        `condition(x, y)` discard the observations; `statistics` and `compare_with_exact` ignore
        them. Memory grows with m times the number of features: use at most a few thousand
        observations.

        Args:
            x: points (m, d).
            y: observed values (m, q), or (m,) if q = 1.
            symbol: the map Q, with q outputs; without a `reference`, a potential has a constant.
            noise: the known variance of ε: one value, one per output (q,), or a covariance (q, q).
            directions: (m, q); then y, (m,), has the components of Q f along them.

        Raises:
            RuntimeError: the model has no observations of the field.
            NotImplementedError: the mean is not constant.
            ValueError: wrong shapes, a symbol that does not exist for this kernel, or noise that is
                not positive.

        Example:
            >>> import gp_orff, torch
            >>> x = torch.rand(
            ...     60, 2, generator=torch.Generator().manual_seed(0)
            ... ).double()
            >>> y = torch.stack(
            ...     [torch.sin(3 * x[:, 1]), torch.cos(3 * x[:, 0])], dim=-1
            ... )
            >>> model = gp_orff.VectorFieldGP(
            ...     gp_orff.HelmholtzKernel(num_dims=2)
            ... ).condition(x, y)
            >>> before = model.posterior().divergence(x[:3]).stddev
            >>> _ = model.observe(x, torch.zeros(60), gp_orff.Divergence(), noise=1e-4)
            >>> bool((model.posterior().divergence(x[:3]).stddev < 0.1 * before).all())
            True
        """
        held = self._held
        if not is_constant(self.mean):
            raise NotImplementedError(
                "observations of symbols expect a constant mean, got "
                f"{type(self.mean).__name__}: make the trend a term of the kernel"
            )
        space = space_of(self.kernel, held.data.num_inputs)
        units = self._units.of_symbol(getattr(symbol, "length_power", None), space)
        x, y, noise, _ = units.convert(x, y, noise, None)
        parts = x, y, symbol, noise, directions
        symbol_data = SymbolObservations.of(self.kernel, held.data.num_inputs, *parts)
        key = GroupKey(DEFAULT, Components.every(symbol_data.y.shape[-1]))
        warn_of_sentinels([Observations(key, symbol_data.x, symbol_data.y)])
        held.inference.left_out(symbol, self.kernel, symbol_data.space)  # raises on some grids
        state = held.current(self.kernel, self._every_likelihood, self._fixed_mean)
        return self._assign_with_posterior(state.observing(symbol_data))

    def observe_coast(
        self,
        polygon: object,
        *,
        spacing: float | None = None,
        noise: float | None = None,
        at: Float[Tensor, "t k"] | None = None,
    ) -> "VectorFieldGP":
        """Add observations of no flow through a coast, and return self.

        At points along the coast, f(x)·n = 0 with the normal n. The flow along the coast is not
        constrained. Do not trust error bars next to coasts: in simulations, the coverage of 95 %
        intervals is 74 to 88 %, with and without these observations. The reason is that a flow near
        a coast differs from the flow elsewhere.

        Args:
            polygon: the vertices (v, 2) of a ring, in the coordinates of the model, with the
                coordinate of the first component first. Or a list of rings, of the coast and of
                islands, or an object with `__geo_interface__`, such as a polygon of shapely. For
                longitudes and latitudes, pass `plane.forward(polygon)` with the
                `gp_orff.labelled.LocalPlane` of the data. The units of all arguments are converted.
            spacing: the spacing of the points along the coast; half of the shortest lengthscale if
                None.
            noise: the variance of the flow through the coast; a ten-thousandth of the prior
                variance of the flow if None.
            at: (t, k), the other inputs of the model, for example times. The coast is observed at
                each row.

        Raises:
            RuntimeError: the model has no observations of the field.
            ValueError: a field that is not two-dimensional, a polygon without an edge near the
                data, or inputs `at` that do not fit the model.

        Example:
            >>> import gp_orff, torch
            >>> x = torch.rand(
            ...     40, 2, generator=torch.Generator().manual_seed(0)
            ... ).double()
            >>> y = torch.sin(6 * x.flip(-1))
            >>> model = gp_orff.VectorFieldGP(gp_orff.DivergenceFreeKernel(num_dims=2))
            >>> model = model.condition(x, y)
            >>> square = [[0.0, 0.0], [1.0, 0.0], [1.0, 1.0], [0.0, 1.0]]
            >>> field = model.observe_coast(square, spacing=0.1).posterior()
            >>> bool((field.mean(torch.tensor([[0.0, 0.55]]))[0, 0].abs() < 0.05))
            True
        """
        data = self._held.data
        model = self.kernel, data.num_inputs, data.box, self._units.x
        x, normals, variance = coast_observations(*model, polygon, spacing, noise, at)
        zeros = torch.zeros(len(x), dtype=torch.float64)
        return self.observe(x, zeros, Identity(), noise=variance, directions=normals)

    # what follows from the data

    @chosen_threads()
    def posterior(self, marginalize: bool | None = None) -> FieldPosterior:
        """Return the posterior given all data, as a `FieldPosterior`.

        With `marginalize=True`, error bars include the uncertainty of the hyperparameters. The
        posterior is then a mixture of normal distributions, one for each draw of the
        hyperparameters. The importance weights of the draws follow from the restricted likelihood
        and from the priors, which are the weak ones of `fit` or those that you register. Draws
        continue until error bars are accurate to 2 %, or to 7 % after `observe`. The report lists
        the effective number of draws and the Pareto k of the weights. Under Student-t noise, the
        weights of the observations are drawn as well. With False, the learned values are treated as
        known. With None, the posterior integrates over the hyperparameters after a `fit` to at most
        120 vectors, or to at most 200 values with a `LearnedSpectrumKernel`.

        For kernels with a learned spectrum or with trained matrices of outputs, and for tracks, 32
        draws near the learned values are used instead.

        Raises:
            RuntimeError: the model has no data.
            ValueError: `marginalize=True` with more than 1200 values or with features, for which
                hyperparameters are treated as known.
        """
        snapshot, coverage = self._snapshot(marginalize), self.state.history.coverage
        return FieldPosterior(snapshot, self._units.x, coverage, self._units.y)

    @chosen_threads()
    def log_marginal_likelihood(self) -> Float[Tensor, ""]:
        """Return the log marginal likelihood log p(y) of all data, a scalar (0-d), in nats.

        Hyperparameter priors are not included. Under Student-t noise it is a lower bound (ELBO). It
        has gradients unless the model stores only statistics of random features.
        """
        state = self.state
        # Random frequencies move with the lengthscales, their statistics do not.
        frozen = not state.data.revisitable and not state.data.field_statistics.phi.on_lattice
        with torch.set_grad_enabled(torch.is_grad_enabled() and not frozen):
            return state.log_marginal_likelihood()

    @property
    @chosen_threads()
    def statistics(self) -> FieldStatistics:
        """The sufficient statistics of the data, as a `FieldStatistics`.

        On a grid they are valid for lengthscales from 0.7 to 1.4 times the present values. Their
        domain is the default domain of `Grid`: the box of the data with a margin.
        """
        return self.state.statistics_only().field_statistics

    @on_workers
    @chosen_threads()
    def statistics_of(
        self,
        x: object,
        y: object = None,
        **options: object,
    ) -> FieldStatistics:
        """The sufficient statistics of given observations, to add to `statistics` or to subtract.

        `x`, `y` and `options` are as for `fit`. A RuntimeError is raised if the model has no data,
        and a ValueError for points outside the domain of `statistics`. The model does not change.
        Statistics from copies of a model add exactly, for example those of workers that each read a
        part of the data.

        Under Student-t noise, stored observations have the weights from the fit, so that
        subtracting removes them exactly. Other observations, and all if the model stores only
        statistics, get weights from the present posterior.
        """
        state = self.state
        held = state.statistics_only()
        new = state.weighted(self.copied(x, y, Options(**options)), state.data)
        held.require(new.box)
        new.require_no_tracks()
        return new.statistics(held.field_statistics.phi)

    @property
    def report(self) -> FitReport:
        """A `FitReport`: the hyperparameters, the data and the fit; `print` shows it as text."""
        if self._assigned is None:
            return FitReport.without_data(self.kernel, self._every_likelihood)
        self._snapshot()
        return self.state.report(self.mean)

    # observations predicted from the others

    @chosen_threads()
    def leave_one_out(
        self,
        x: object,
        y: object,
        **options: object,
    ) -> LeaveOneOut:
        """Compare each observation with its prediction from all others, to find outliers.

        Returns residuals, p-values and log densities, one row per point of x (`LeaveOneOut`). They
        have a closed form (Rasmussen & Williams 2006, eqs. 5.10–5.12, for vectors), with
        hyperparameters, mean and Student-t weights from all data. Pass all or some of the data of
        `fit` as `x`, `y` and `options`. For tracks, the prediction uses the observations that you
        pass. Pass all observations if they were merged at sites within which the field changes. A
        ValueError is raised for `variances` (N, p), and for `noise` (N, p) or (N, p, p). It is also
        raised for data outside the fit if the field is less certain than the observation.

        Example:
            >>> import gp_orff, torch
            >>> x = torch.rand(80, 2, generator=torch.Generator().manual_seed(0))
            >>> y = torch.stack(
            ...     [torch.sin(3 * x[:, 1]), torch.sin(3 * x[:, 0])], dim=-1
            ... )
            >>> y[7] = -y[7]  # a bad vector
            >>> kernel = gp_orff.DivergenceFreeKernel(num_dims=2)
            >>> robust = gp_orff.MultitaskStudentTLikelihood(num_tasks=2)
            >>> model = gp_orff.VectorFieldGP(kernel, likelihood=robust)
            >>> result = model.fit(x, y, progress=False).leave_one_out(x, y)
            >>> torch.nonzero(result.p_value < 1e-3).flatten()
            tensor([7])
        """
        require_gaussian(self._every_likelihood, "leave_one_out", "cross_validate, which scores y")
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
        parts = snapshot.posterior, snapshot.noises
        held = state.data.observations if state.data.revisitable else []
        joined = join(weighted)
        same = len(joined) == len(held) and all(
            a.key == b.key and torch.equal(a.x, b.x) and torch.equal(a.y, b.y)
            for a, b in zip(joined, held, strict=True)
        )
        sites = snapshot.inference.latent_of_sites(snapshot.posterior) if same else None
        pairs = zip(data.visit(), weighted, strict=True)
        return leave_one_out(pairs, len(x), state.e_step.heavy_tailed, *parts, sites)

    @on_workers
    @chosen_threads()
    @torch.no_grad()
    def cross_validate(
        self, x: object, y: object = None, *, blocks: object = "auto", **options: object
    ) -> CrossValidation:
        r"""Predict the observations of each held-out block from all others.

        Use blocks that are as wide as the lengthscales of the field. They show which kernel
        predicts best and whether the coverage is right. Holding out single observations is too
        optimistic if the errors of neighbours are correlated.

        The prediction comes from a copy of the model that is conditioned on the rest of the data,
        with the frequencies of all data. Hyperparameters do not change, and a trained constant mean
        μ is estimated from the rest. The result has a closed form. With features, the statistics of
        a block b are subtracted, and A − A_b is factorised. With the exact kernel,

            y_b − E[y_b | rest] = ([K⁻¹]_bb)⁻¹ [K⁻¹ (y − μ)]_b ,    Cov = ([K⁻¹]_bb)⁻¹ ,

        and the variance of μ is added. Iterations of large grids start again for each block. Under
        Student-t noise, observations have the weights from a fit to all data, and predictions
        include the Student-t noise. Observations of `observe` are ignored, and the model does not
        change.

        If a complete track is held out, its observations are predicted like observations of a new
        track. Otherwise, the rest of the track determines its offset and correlated noise.

        Args:
            x, y: points (N, d) and vectors (N, p) in memory, usually the data of the model.
            blocks: "auto" uses tracks, in at most 50 blocks, if `track` has several. Otherwise it
                uses cells of two lengthscales, in 5 to 50 blocks. Or a label for each observation
                (N,), of any hashable type. Or a splitter of scikit-learn, whose `groups` are the
                labels `group=` or `track=`. An observation may be in several of its sets or in
                none.
            options: `variances`, `noise`, `directions`, `group`, `missing`, `merge`, `track` and
                `time`, as for `fit`. Observations that `condition` omits, such as copies, are not
                scored. An observation with a covariance has one value along each axis of its noise.
                Also `executor`, whose workers divide the blocks among them, `retries` and
                `checkpoint`.

        Returns:
            A `CrossValidation`.

        Raises:
            TypeError: chunks; blocks that are neither labels nor a splitter.
            ValueError: as for `fit`; labels of another length; a block with all data.

        Example:
            Errors that are shared by the observations of an instrument:

            >>> import gp_orff, torch
            >>> generator = torch.Generator().manual_seed(0)
            >>> x = torch.rand(120, 2, generator=generator).double()
            >>> y = torch.stack(
            ...     [torch.sin(5 * x[:, 1]), torch.sin(5 * x[:, 0])], dim=-1
            ... )
            >>> names = ["a", "b", "c", "d"] * 30
            >>> y[0::4] += 0.5  # instrument a
            >>> y = y + 0.1 * torch.randn(120, 2, generator=generator)
            >>> model = gp_orff.VectorFieldGP(gp_orff.HelmholtzKernel(num_dims=2))
            >>> result = model.fit(x, y, progress=False).cross_validate(
            ...     x, y, blocks=names
            ... )
            >>> result.blocks["a"].rmse > 2 * result.blocks["b"].rmse
            True
        """
        choice = Options(**options)
        chosen = blocks_of(blocks, self.kernel, x, y, choice)
        data, _ = without_far_points(self._in_memory(x, y, choice), self.frequencies)
        along = self._along_tracks(x, y, choice, data)
        representation = self._representation_of(data)
        e_step = EStep.of(self.kernel, representation.likelihoods, self._fixed_mean)
        representation = e_step.converged(representation)
        predictor = Predictor(representation.now(), e_step, self.mean, along)
        return predictor.cross_validation(chosen)

    @chosen_threads()
    def track_offsets(self, group: str = DEFAULT) -> TrackOffsets:
        """Return the offset of every track of a group, with its standard deviation.

        The offset is the common error of all observations of a track, for example the levelling
        error of a survey line. It is relative to the field that is estimated from all tracks:
        `posterior()` has no offset. Correlated noise along the track is not included.

        Args:
            group: the name of the group, as in `fit(group=)`.

        Raises:
            RuntimeError: the model has no data.
            ValueError: a group without tracks.

        Example:
            >>> import gp_orff, torch
            >>> x = torch.cartesian_prod(
            ...     torch.linspace(0, 1, 8), torch.linspace(0, 1, 12)
            ... ).double()
            >>> line, step = (
            ...     torch.arange(96) // 12,
            ...     torch.tensor([1.0, -1.0]).double().repeat(4),
            ... )
            >>> noise = (
            ...     0.05
            ...     * torch.randn(
            ...         96, generator=torch.Generator().manual_seed(0)
            ...     ).double()
            ... )
            >>> y = torch.sin(3 * x[:, 1]) + step[line] + noise
            >>> u = torch.tensor([0.0, 1.0]).double().expand(96, 2)
            >>> from gpytorch.means import ZeroMean
            >>> model = gp_orff.VectorFieldGP(
            ...     gp_orff.CurlFreeKernel(num_dims=2), mean=ZeroMean()
            ... )
            >>> model = model.fit(x, y, directions=u, track=line, progress=False)
            >>> offsets = model.track_offsets()
            >>> (
            ...     [tuple(part.shape) for part in (offsets.mean, offsets.sd)],
            ...     offsets.labels[0],
            ... )
            ([(8, 1), (8, 1)], '0')
            >>> (last, sd), (first, _) = offsets["7"], offsets["0"]
            >>> bool(abs(last - first + 2) < 3 * sd)
            True
        """
        state = self.state
        tracks = {part.key.label: part for part in state.data.tracks}
        if group not in tracks:
            named = f"one of {sorted(tracks)}" if tracks else "observations with track="
            raise ValueError(
                f"expected the group of observations along tracks, {named}, got {group!r}; give "
                "group=, or fit(x, y, track=labels)"
            )
        parts = self.kernel, state.e_step.noises, self._fixed_mean
        return track_offsets(state.inference, *parts, tracks[group])

    # files

    def save(self, path: str | os.PathLike) -> None:
        """Save the model to one file at `path`.

        The file contains the data, with the weights of Student-t noise, or their `statistics`,
        whichever is smaller. An exact kernel, tracks, a `HarmonicKernel` and random frequencies
        that outnumber the observed values need the data. You can use, update and fit a loaded model
        like the saved one. If the file has statistics, this applies to the lengthscales and the
        domain of `statistics`. The new file replaces an old one only when it is complete.
        `torch.load(path, weights_only=True)` can also read it.
        """
        content = {
            "kernel": storage.describe(self.kernel),
            "likelihood": storage.describe(self.likelihood),
            "likelihoods": {
                name: storage.describe(noise) for name, noise in self.likelihoods.items()
            },
            "mean": storage.describe(self.mean),
            "frequencies": storage.describe_rule(self.frequencies),
            "fit": None if self._assigned is None else storage.pack_state(self.state),
            "units": asdict(self._units),
        }
        storage.write(path, _KIND, content)

    @classmethod
    def load(
        cls,
        path: str | os.PathLike,
        kernel: Kernel | None = None,
        *,
        likelihood: Likelihood | None = None,
        mean: Mean | None = None,
        frequencies: Rule | None = None,
    ) -> "VectorFieldGP":
        """Load a saved model, on the CPU.

        Args:
            path: the file.
            kernel, likelihood, mean, frequencies: parts of the saved model, built as before. Pass a
                part only if its class, constraints or priors are neither from gpytorch nor from
                this package.

        Raises:
            FileNotFoundError: no file at `path`.
            ValueError: the file is damaged or newer than this package; a part that the file cannot
                describe is missing, or is not the saved one.

        Example:
            >>> import gp_orff, os, tempfile, torch
            >>> model = gp_orff.VectorFieldGP(gp_orff.CurlFreeKernel(num_dims=2))
            >>> model = model.condition(torch.rand(20, 2), torch.randn(20, 2))
            >>> path = os.path.join(tempfile.mkdtemp(), "field.pt")
            >>> model.save(path)
            >>> loaded = gp_orff.VectorFieldGP.load(path)
            >>> bool(
            ...     loaded.log_marginal_likelihood().isclose(
            ...         model.log_marginal_likelihood()
            ...     )
            ... )
            True
        """
        content = storage.read(path, _KIND)
        template = None if kernel is None else with_amplitude(kernel)
        model = cls(
            storage.build(content["kernel"], template, "kernel"),
            likelihood=storage.build(content["likelihood"], likelihood, "likelihood"),
            mean=storage.build(content["mean"], mean, "mean"),
            frequencies=storage.build_rule(content["frequencies"], frequencies),
        )
        for label, description in content["likelihoods"].items():
            model.likelihoods[label] = storage.build(description, None, "likelihood")
        model._units = ColumnUnits(**content.get("units", {}))
        if content["fit"] is not None:
            parts = model.kernel, model._every_likelihood, model.frequencies
            model._assign(storage.unpack_state(content["fit"], *parts))
        return model

    def get_extra_state(self) -> dict[str, object]:
        """Return the state other than parameters and buffers, for `state_dict`. It has the kinds of
        likelihood of all groups, and results of a fit with weak priors. While the hyperparameters
        do not change, `condition` gives a posterior that integrates over them, as the fit does."""
        every = self._every_likelihood.items()
        return {
            "likelihoods": {label: storage.recipe_of(likelihood) for label, likelihood in every},
            "learned": torch.empty(0) if self._learned is None else self._learned,
        }

    def set_extra_state(self, state: dict[str, object]) -> None:
        """Restore `state`, which `get_extra_state` returned."""
        learned = state["learned"]
        self._learned = learned.double().cpu() if len(learned) else None

    def _load_from_state_dict(self, state_dict, prefix, *args) -> None:
        key = prefix + "_extra_state"
        state = state_dict.get(key, torch.empty(0))
        if isinstance(state, Tensor):  # of earlier versions
            warnings.warn(
                "the state_dict is older than this version of gp_orff: it does not say which "
                "likelihoods the groups of observations have; those of this model stay",
                stacklevel=2,
            )
            state_dict[key] = {"learned": state}
        else:  # have those of the state, whose values are loaded next
            present, recipes = self._every_likelihood, state["likelihoods"]
            every = {
                label: storage.rebuilt(recipe, present.get(label), "likelihood")
                for label, recipe in recipes.items()
            }
            self.likelihoods = NamedLikelihoods()
            for label, likelihood in every.items():
                likelihood = likelihood.to(next(self.kernel.parameters()))
                self._set_likelihood(label, likelihood.train(self.training))
        super()._load_from_state_dict(state_dict, prefix, *args)

    # reading of arguments

    # From arguments to a state: what `fit` and `condition` have in common.
    #
    # 1. `_read` checks the arguments, and goes through the data once (`Dataset.of`): their box,
    #    scales and a sample. Arrays stay where they are; chunks are read again whenever a pass
    #    needs them.
    # 2. `copied` copies small arrays, so that later changes of the caller's arrays have no effect,
    #    and `_counted_once` drops copies of records.
    # 3. `_fit_state` searches the hyperparameters; `_condition_state` takes the present ones and
    #    chooses a representation for them.
    # 4. `_assign_with_posterior` computes the posterior, and only then assigns the state: if the
    #    posterior fails, the former state stays.
    # 5. `state` checks whenever it is used whether the kernel has left the range of its
    #    frequencies, and moves to others if so.

    def _read(self, x: object, y: object, options: Options, learning: bool = False) -> Dataset:
        """Check the arguments of `fit`, in one pass over the data; `learning`, the blocks of tracks
        are chosen again."""
        self.double()
        spans = {} if learning else spans_of(self._every_likelihood)
        likelihoods = self._every_likelihood
        joint = any(getattr(each, "joint", False) for each in likelihoods.values())
        reader = Reader(self.kernel, self.mean, self.num_outputs, joint)
        units = self._units_of(x, y, options)
        if y is None:
            source = Chunks(reader, x, options, show_pass, units)
        else:
            source = Arrays(reader, *self.converted(x, y, options))
        num_points = 0 if self._assigned is None else self._assigned.data.survey.num_points
        data = Dataset.of(source, num_points, spans)
        if learning:
            for part in data.tracks:
                part.check_repeated()
        if not any_pointwise(likelihoods):
            return data
        if not is_constant(self.mean):
            raise NotImplementedError(
                f"expected a constant mean with {type(self.likelihood).__name__}, got "
                f"{type(self.mean).__name__}; make the trend a term of the kernel"
            )
        parts = represented([*data.visit(), *data.tracks], likelihoods, self.num_outputs)
        return data.with_parts(parts, 0.0)

    def _units_of(self, x: object, y: object, options: Options) -> ColumnUnits:
        """The units that data are brought to: those of the model, or else those of the data."""
        return self._units if self._units.stated else ColumnUnits.of(x, y, options.time)

    @contextmanager
    def _keeping_units(
        self, x: object, y: object, options: Options, anew: bool = False
    ) -> Iterator[None]:
        """Keep the units that data are brought to, unless the block raises; `again`: theirs."""
        before = self._units
        self._units = ColumnUnits() if anew else before
        self._units = self._units_of(x, y, options)
        try:
            check_units_of_tides(self.kernel, self._units)
            yield
        except BaseException:
            self._units = before
            raise

    def converted(self, x: object, y: object, options: Options) -> tuple[object, object, Options]:
        """The arguments `x`, `y` and `options` of `fit` in the units of the model, as far as these
        are known."""
        return in_units(self._units_of(x, y, options), x, y, options)

    def copied(self, x: object, y: object, options: Options, learning: bool = False) -> Dataset:
        """The data that `x`, `y` and `options` describe. Small arrays are copied, so that the
        caller cannot change them. With `learning`, the blocks of tracks are chosen again."""
        data = self._read(x, y, options, learning)
        data = replace(data, repeats=Repeats(options.merge))
        warn_of_values([part for part in data.survey.sample if part.represented is None])
        return data.copied() if y is not None and data.is_small else data

    def _counted_once(
        self, x: object, y: object, options: Options, learning: bool = False
    ) -> Dataset:
        """Data as by `copied`, of which small arrays count copies of records once."""
        data = self.copied(x, y, options, learning)
        single = y is not None and data.is_small and not data.tracks
        return data.without_copies() if single else data

    def _in_memory(self, x: object, y: object, options: Options) -> Dataset:
        """Data as by `_counted_once`, in memory, whose observations have an `index`."""
        read = self._read(x, y, options)
        sources = (InMemory(list(read.visit())),)
        data = replace(read, sources=sources, repeats=Repeats(options.merge))
        return data.without_copies() if data.is_small else data

    def _along_tracks(
        self, x: object, y: object, options: Options, data: Dataset
    ) -> list[TrackReadings]:
        """All observations one by one, if they are along tracks, to be put in blocks as in
        `data`."""
        if not data.tracks:
            return []
        x, y, options = self.converted(x, y, options)
        spans = {part.key.label: part.span for part in data.tracks}
        plain = self._read(x, y, replace(options, track=None, time=None))
        return [
            TrackReadings.of(part, options.track, options.time, len(x), spans[part.key.label])
            for part in plain.visit()
        ]

    # state

    @property
    def state(self) -> ModelState:
        """The state, on frequencies that fit the present kernel and hyperparameters."""
        self._assigned = self._held.current(self.kernel, self._every_likelihood, self._fixed_mean)
        return self._assigned

    @property
    def _held(self) -> ModelState:
        """The state as it was assigned last, for the present mean if that varies."""
        if self._assigned is None:
            raise RuntimeError("the model has no data yet: call fit(x, y) or condition(x, y) first")
        if not is_trend(self._trend, self.mean):
            means = self._trend, self.mean, self._fixed_mean
            self._assigned = self._assigned.following(*means)
            self._trend = trend_of(self.mean)
        return self._assigned

    @property
    def _every_likelihood(self) -> dict[str, Likelihood]:
        """The likelihoods of all groups, with that of observations without a group name."""
        return {DEFAULT: self.likelihood, **self.likelihoods}

    @property
    def _fixed_mean(self) -> Float[Tensor, "p"] | None:
        """The constant mean if it is not trained, zero in addition to a mean that is not constant;
        None for a trained constant mean."""
        if is_trained(self.mean):
            return None
        means = base_means(self.mean)
        fixed = torch.zeros(self.num_outputs).to(next(self.kernel.parameters()))
        if is_constant(self.mean) and len(means) == self.num_outputs:
            constants = [getattr(m, "constant", fixed[0]).detach() for m in means]
            fixed = torch.stack([value.reshape(()) for value in constants])
        return fixed

    def _hyperparameters(self) -> Float[Tensor, "k"]:
        """Raw parameters of the kernel and all likelihoods, and a fixed mean."""
        modules, mean = [self.kernel, *self._every_likelihood.values()], self._fixed_mean
        values = raw_parameters(modules)
        return values if mean is None else torch.cat([values, mean.double().cpu()])

    def _representation_of(self, data: Data) -> Representation:
        """Choose a representation for data, at the present hyperparameters."""
        take_heights(self.kernel, data)
        likelihoods = with_groups(self._every_likelihood, data, self.kernel)
        representation = Representation.of(self.kernel, likelihoods, self.frequencies, data).mended
        warn_of_left_out(data, representation.data)
        return representation

    def _condition_state(
        self, representation: Representation, notes: Sequence[str] = ()
    ) -> ModelState:
        """The state of a model that is conditioned at the present hyperparameters."""
        learned = self._learned is not None and torch.equal(self._learned, self._hyperparameters())
        history = History("conditioned", weak_priors=learned).with_notes(notes)
        return ModelState.of(representation, self._fixed_mean, history)

    def _fit_state(
        self, data: Data, warm_start: bool, progress: Progress, scale_noise: bool | None
    ) -> ModelState:
        """Learn the hyperparameters from data; the state of the fitted model. `scale_noise`: learn
        the factor of known noise, or keep it at one; None, as before."""
        take_heights(self.kernel, data, anew=not warm_start)
        likelihoods = with_groups(self._every_likelihood, data, self.kernel)
        remember_all(likelihoods, data)
        if scale_noise is not None:
            learn_scales(likelihoods, data, scale_noise)
        parts = self.kernel, likelihoods, self._fixed_mean, self.frequencies
        result = fit(*parts, data, warm_start, progress)
        return ModelState.of(result.representation, result.mean, result.history)

    def _checked(self, state: ModelState) -> ModelState:
        """The state, with a note and a warning if the coverage of held-out blocks is too low."""
        if not (check_calibration.on() and state.data.varies):
            return state
        calibration = calibration_of(state, self.mean)
        oscillation = oscillation_along_tracks(state, self.mean)
        notes = [] if calibration is None else calibration.notes
        notes = notes if oscillation is None else [*notes, oscillation.note]
        warn_of_calibration(notes)
        coverage = None if calibration is None else calibration.coverage
        history = replace(state.history, coverage=coverage)
        return replace(state, history=history.with_notes(notes))

    def _snapshot(self, marginalize: bool | None = None) -> ModelSnapshot:
        """A snapshot of the present model; sets a trained constant mean to its best value.
        `marginalize`: as for `posterior`."""
        snapshot = self.state.snapshot(self.mean)
        if is_trained(self.mean):
            for mean, value in zip(base_means(self.mean), snapshot.constant, strict=True):
                mean.initialize(constant=value)
        return snapshot if marginalize is None else self.state.snapshot(self.mean, marginalize)

    def _set_likelihood(self, label: str, likelihood: Likelihood) -> None:
        if label == DEFAULT:
            self.likelihood = likelihood
        else:
            self.likelihoods[label] = likelihood

    def _assign(self, state: ModelState) -> "VectorFieldGP":
        """Assign a new state, the last step of a call."""
        for label, likelihood in state.likelihoods.items():
            self._set_likelihood(label, likelihood)
        self._assigned, self._trend = state, trend_of(self.mean)
        self.eval()
        self._learned = self._hyperparameters() if state.history.weak_priors else None
        return self

    def _assign_with_posterior(self, state: ModelState) -> "VectorFieldGP":
        """Compute the posterior and assign the state; a failure leaves the model as it was."""
        state = state.with_posterior(self.mean)
        state.warn_of_small_grid()
        warn_of_close_tides(state.kernel, state.data.box)
        snapshot = self._assign(state)._snapshot()
        if snapshot.fixed_mean is None:
            _warn_of_unknown_mean(snapshot.posterior.evidence.unknown_means())
        return self

    def _apply(self, fn, recurse=True):
        """`.to(device)` moves the data too."""
        before = next(self.kernel.parameters()).device
        super()._apply(fn, recurse)
        self._trend = tuple(mean._apply(fn, recurse) for mean in self._trend)
        device = next(self.kernel.parameters()).device
        if self._assigned is not None and device != before:
            self._assigned = self._assigned.to(device)
        return self


def _warn_of_unknown_mean(unknown: Float[Tensor, "k p"]) -> None:
    """Warn of directions of the constant mean of which the data say nothing."""
    if not len(unknown):
        return
    # A direction is known up to its sign; the largest component is made positive, and `+ 0.0`
    # removes the sign of negative zeros.
    signs = unknown.gather(-1, unknown.abs().argmax(-1, keepdim=True)).sign()
    along = [", ".join(f"{v:.3g}" for v in vector) for vector in (signs * unknown + 0.0).tolist()]
    words = " and ".join(f"({vector})" for vector in along)
    warnings.warn(
        f"no observation depends on the constant mean of the outputs along {words}: it is "
        "assumed to be zero there; observe other components or directions, or give a mean "
        "that is known, such as mean=gpytorch.means.ZeroMean()",
        DataWarning,
        stacklevel=3,
    )


def _warn_of_constant(count: int) -> None:
    warnings.warn(
        f"expected data that vary, got {count} observations that are all the same: they determine "
        "neither the noise nor the kernel, and the hyperparameters stay as they are; set them, and "
        "call condition(x, y)",
        DataWarning,
        stacklevel=3,
    )
