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

    The field f has the prior `kernel`, μ is the prior mean, and ε is the noise. `fit` learns the
    hyperparameters: it maximises the marginal likelihood. `condition` replaces the data, but not
    the hyperparameters. `posterior` returns the posterior of f + μ as a `FieldPosterior`.

    Small data sets use the exact kernel. Larger ones use features on a frequency grid: one pass
    over the N points computes sufficient statistics, and the cost of training does not depend on N.
    Training starts with the exact evidence of a small subset of the data. Searches of increasing
    cost follow; `plan` lists them.

    Hyperparameters, constraints and priors are in the units of x and y. Changing the units does not
    change the results. Computations are in float64. A call that fails leaves the model unchanged.

    Args:
        kernel: a gpytorch kernel that `ORFFKernel` accepts. It is trained in place. Each term
            without an outputscale, for example a `CurlFreeKernel`, is wrapped in a `ScaleKernel`
            with outputscale 1. `model.kernel` is the result.
        likelihood: a `MultitaskGaussianLikelihood`, a `MultitaskStudentTLikelihood`, or a
            `GaussianLikelihood` for one output. The default is Gaussian noise with one variance for
            all outputs. Any other likelihood of gpytorch, for example for signs, counts or classes,
            is wrapped in a `Pointwise`. The posterior is then the normal distribution with the
            largest ELBO (evidence lower bound).
        mean: the prior mean μ, a gpytorch mean. By default, the best constant for each output is
            computed in closed form under a flat prior, and posteriors include its variance. Other
            means, such as `ZeroMean()`, are not trained. To model a trend, add a kernel term.
        frequencies: the rule that chooses the frequencies of the features: `Auto`, `Grid` or a
            random rule. The default is `Auto(tolerance=1e-5)`. The tolerance of a grid assumes a
            noise variance of 1/1000 of the signal variance. The model adapts the tolerance to the
            learned noise and to the posterior variance. It also adapts `lengthscale_range`.

    Raises:
        TypeError: An argument is not a kernel, likelihood or frequency rule.
        ValueError: Kernel, likelihood and mean have different numbers of outputs.

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
        """Create a model. Raise a TypeError if more than one argument is given without a name."""
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
        self.likelihoods = NamedLikelihoods()  # by the names of groups
        self._assigned: ModelState | None = None
        self._trend: tuple[Mean, ...] = ()  # a copy of a varying mean, subtracted from the data
        self._units = ColumnUnits()  # the units of the fitted data, if they are known
        self._learned: Float[Tensor, "k"] | None = None  # hyperparameters of a fit with weak priors
        given = next(kernel.parameters(), None)  # the amplitude, which may be new, is the first
        self.to("cpu" if given is None else given.device, torch.float64)
        noise_of(self.likelihood, self.num_outputs)  # raises if it is not supported
        check_mean(self.mean, self.num_outputs)

    def forward(self, x: Float[Tensor, "n d"]) -> MultitaskMultivariateNormal | MultivariateNormal:
        """Return the joint distribution of the field at points x given all data: `posterior()(x)`.

        The model must be in eval mode. `fit`, `condition`, `update`, `observe` and `load` set it.

        Args:
            x: points (n, d).

        Returns:
            A normal distribution of (n, p) values, or of (n,) values for p = 1 output.

        Raises:
            RuntimeError: The model is in train mode, or has no data.

        Example:
            >>> import gp_orff, torch
            >>> model = gp_orff.VectorFieldGP(gp_orff.CurlFreeKernel(num_dims=2))
            >>> model = model.condition(torch.rand(20, 2), torch.randn(20, 2))
            >>> model(torch.rand(7, 2)).mean.shape
            torch.Size([7, 2])
        """
        if self.training:
            raise RuntimeError(
                "expected a VectorFieldGP in eval mode, got one in train mode; call "
                "model.fit(x, y) to train it, or model.eval() if it has data"
            )
        return self.posterior()(x)

    @property
    def covar_module(self) -> Kernel:
        """The kernel of the field: the attribute `kernel` under its usual name in gpytorch."""
        return self.kernel

    @property
    def mean_module(self) -> Mean:
        """The prior mean: the attribute `mean` under its usual name in gpytorch."""
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
        data. Parameters with `requires_grad=False` are not trained.

        For at most 120·p observed values of p outputs, the hyperparameters have weak priors in the
        units of the data (module `gp_orff.fitting.scoring`). `posterior` then integrates over the
        hyperparameters. Priors that you register replace the weak ones.

        You get a `CalibrationWarning` if the held-out coverage of 95 % intervals is too low. You
        get a `DataWarning` in these cases:

        - All observed values are equal. The hyperparameters then do not change.
        - A few points are far from all others. A frequency grid omits them.
        - There are fewer than 10 values per hyperparameter, and the posterior does not integrate
          over the hyperparameters.
        - A lengthscale is probably below the median distance of neighbouring points.
        - No observation depends on some component of the constant mean.

        Args:
            x, y: points (N, d) and vectors (N, p), as tensors, arrays or memory maps. For data that
                do not fit in memory, pass x alone: an iterable of chunks that can be iterated
                repeatedly, such as a list. A chunk is a pair (x, y). It can also be a mapping with
                the keys x, y and, if needed, variances, noise, directions, group, track and time.
                Or it is a callable without arguments that returns such a pair or mapping; each
                pass calls it again.
            variances: relative noise variances, (N,). They multiply the noise variance of the
                likelihood. With (N, p), each component has a separate variance, and the noise of
                the components is independent.
            noise: known noise, instead of `variances`: one variance for each observation (N,) or
                component (N, p), or a covariance for each observation (N, p, p), in squared units
                of y. Pass it for all observations of a group. Entries of components that are NaN
                are ignored. With Student-t noise, `noise` is the squared scale. With `track`, its
                shape is (N,), and a learned white variance is added. See `KnownNoiseLikelihood`.
            scale_noise: whether `noise` is multiplied by a factor, which is learned for each group.
                Other methods, such as `condition` and `update`, do not change the factor.
            directions: unit vectors (N, p). The values y, (N,), are then the components of the
                vectors along these directions.
            group: the name of a group, for all observations or for each one. Each group has a
                separate noise, `model.likelihoods[name]`. Observations without a name (None or NaN)
                have the noise `model.likelihood`.
            missing: "mask" treats NaN in y as an unobserved component; "raise" raises an error.
            merge: the exact kernel averages observations whose positions are within this distance,
                in units of x. 0 merges no positions. By default (None), it merges positions if the
                field barely changes between them and merging saves a fifth of the values. Small
                data sets are also searched for copies, which are records with equal values at one
                place. Each record is used once, even if its copies are rounded differently.
            track: a track label for all observations or for each one. Observations of one track
                share an offset and have correlated noise; see `TrackLikelihood`. Use it to level
                the lines of a survey. A track may continue in later chunks. Observations with
                `track` stay in memory.
            time: the times (N,) of observations with `track`. They increase along each track. Dates
                and durations are converted to seconds. The default is the length of the path.
            progress: whether to show progress on standard error: a bar in a terminal or notebook,
                otherwise one line per stage.
            warm_start: whether the search starts from the present hyperparameters. Otherwise it
                starts from values that are derived from the data. A model that stores only
                statistics always starts from the present hyperparameters.
            executor: a `concurrent.futures.Executor`, such as a `ProcessPoolExecutor`, a Dask
                client's `get_executor()` or mpi4py's `MPIPoolExecutor`. Its workers read the chunks
                and return sums. Three tasks stay in this process: arrays, passes with Student-t
                weights, and passes that train random frequencies. See `gp_orff.data.passes`.
            retries: the number of further attempts for a chunk that fails on a worker.
            checkpoint: the path of a file (a pickle) for partial sums. If a call is interrupted,
                the next call with the same model and data continues from the file. A call that
                succeeds deletes it.

        Raises:
            TypeError: Values are not real numbers.
            ValueError: The data are empty or not finite, or shapes do not fit each other or the
                kernel.
            RuntimeError: No x is given, and the model has no data.

        Example:
            >>> import gp_orff, torch
            >>> generator = torch.Generator().manual_seed(0)
            >>> x = torch.rand(60, 2, generator=generator).double()
            >>> y = torch.stack(
            ...     [torch.sin(3 * x[:, 1]), torch.sin(3 * x[:, 0])], dim=-1
            ... )
            >>> y = y + 0.1 * torch.randn(60, 2, generator=generator)
            >>> model = gp_orff.VectorFieldGP(gp_orff.DivergenceFreeKernel(num_dims=2))
            >>> report = model.fit(x, y, progress=False).report
            >>> 0.005 < report.noise["default"] < 0.02  # the variance is 0.01
            True
        """
        if x is None:
            data = self._held.data
            if not data.revisitable:
                remedy = "fit(x, y) on the observations, which are no longer stored"
                require_gaussian(self._every_likelihood, "fit() on statistics", remedy)
            warm_start, read = warm_start or not data.revisitable, lambda: data
            units = nullcontext()
            scale_noise = scale_noise or None  # None for the choice of the last fit
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

        For each search, the plan has the numbers of values and features, the cost, and the expected
        loss of log evidence in nats. The cost is given as operations, seconds and memory. Starting
        values are computed from 600 values, as in a fit. The model does not change. The time is for
        six evaluations in each search. It excludes passes over the data, EM under Student-t noise,
        and the posterior.

        Args:
            x, y: the data, as for `fit`.
            options: the arguments of `fit` that describe the data, from `variances` to `time`.

        Raises:
            TypeError: Values are not real numbers.
            ValueError: The data are not valid, as for `fit`, or all observed values are equal.

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
                    "expected data that vary, got observations with equal values: fit learns "
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
        known.

        Args:
            x, y: points (N, d) and vectors (N, p), or chunks, as for `fit`. You can also pass x
                alone, as a `FieldStatistics` from `statistics` or `statistics_of` of this model.
            options: the arguments of `fit` that describe the data, from `variances` to `time`.

        Raises:
            TypeError: Values are not real numbers.
            ValueError: The data are not valid, as for `fit`; statistics have other frequencies than
                the model; or units cannot be converted.
            RuntimeError: Statistics are given to a model without data.

        Example:
            >>> import gp_orff, torch
            >>> model = gp_orff.VectorFieldGP(gp_orff.CurlFreeKernel(num_dims=2))
            >>> model = model.condition(torch.rand(20, 2), torch.randn(20, 2))
            >>> model.report.action, model.report.points
            ('conditioned', 20)
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

        The hyperparameters do not change. If the data require it, the model changes from the exact
        kernel to a frequency grid, or to a larger grid. With a frequency grid, the cost is one pass
        over the new observations.

        The model stores up to 4 million values. If there are more, it stores only `statistics`,
        whose domain is fixed. `report.held` states which of the two is stored.

        Under Student-t noise, the new observations get weights from the present posterior. `fit()`
        computes all weights again. Data without valid observations change nothing and are counted
        in `report.skipped`: data without rows, or with NaN only under `missing="mask"`.

        Args:
            x, y: the new data, as for `condition`.
            options: the arguments of `fit` that describe the data, from `variances` to `time`.

        Raises:
            RuntimeError: The model has no data.
            ValueError: The data are not valid, as for `condition`, or points are outside the domain
                of the statistics.

        Example:
            >>> import gp_orff, torch
            >>> model = gp_orff.VectorFieldGP(gp_orff.CurlFreeKernel(num_dims=2))
            >>> model = model.condition(torch.rand(20, 2), torch.randn(20, 2))
            >>> model.update(torch.rand(5, 2), torch.randn(5, 2)).report.points
            25
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

        Q is a `Symbol`, for example:

        - the potential, which a tide gauge measures;
        - the divergence, which is zero in a region without sources;
        - the component normal to a wall, `Component(normal)`.

        The posterior and `fit()` combine these observations with observations of the field.
        `fit(x, y)` and `condition(x, y)` discard them. `statistics` and `compare_with_exact` ignore
        them. Units are converted if they are known, as by `condition`. Memory grows with m times
        the number of features, so use at most a few thousand observations.

        Args:
            x: points (m, d).
            y: observed values (m, q), or (m,) if q = 1.
            symbol: the map Q, with q outputs. A potential without a `reference` includes an unknown
                constant.
            noise: the known variance of ε, in squared units of y: one value, one per output (q,),
                or a covariance (q, q).
            directions: unit vectors (m, q). The values y, (m,), are then the components of Q(f + μ)
                along these directions.

        Raises:
            RuntimeError: The model has no observations of the field.
            NotImplementedError: The mean is not constant.
            ValueError: Shapes do not fit, the symbol does not exist for this kernel, or the noise
                is not positive.

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

        The observations are f(x)·n = 0 at points along the coast, with the normal n. They do not
        constrain the flow along the coast. Do not trust error bars next to coasts, because a flow
        near a coast differs from the flow elsewhere. In simulations, their 95 % intervals covered
        the flow in 74 to 88 % of cases, with and without these observations.

        Args:
            polygon: the vertices (v, 2) of a ring, in the coordinates of the model. The first
                column is the coordinate of the first component. You can also pass a list of rings,
                for a coast and islands, or an object with `__geo_interface__`, such as a polygon of
                shapely. For longitudes and latitudes, pass `plane.forward(polygon)` with the
                `gp_orff.labelled.LocalPlane` of the data. Units are converted.
            spacing: the distance between points along the coast, in units of x. The default is half
                of the shortest lengthscale.
            noise: the variance of the flow through the coast, in squared units of y. The default is
                10⁻⁴ of the prior variance of the flow.
            at: (t, k), values of the k other inputs of the model, for example times. The coast is
                observed at each of the t rows.

        Raises:
            RuntimeError: The model has no observations of the field.
            ValueError: The field is not two-dimensional, no edge of the polygon is near the data,
                or `at` does not fit the inputs of the model.

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

    # results that follow from the data

    @chosen_threads()
    def posterior(self, marginalize: bool | None = None) -> FieldPosterior:
        """Return the posterior given all data, as a `FieldPosterior`.

        With `marginalize=True`, the posterior integrates over the hyperparameters, so that error
        bars include their uncertainty. It is then a mixture of normal distributions, one for each
        draw of the hyperparameters. The draws have importance weights, which follow from the
        restricted likelihood and from the priors: the weak priors of `fit`, or those that you
        register. Draws continue until error bars are accurate to 2 %, or to 7 % after `observe`.
        Under Student-t noise, the weights of the observations are drawn as well. If the model has a
        learned spectrum, a trained covariance matrix of outputs, or tracks, the posterior instead
        uses 32 draws near the fitted hyperparameters. `model.report` gives the effective number of
        draws, and the shape k of a Pareto distribution fitted to the largest weights.

        Args:
            marginalize: whether the posterior integrates over the hyperparameters. If False, it
                uses their fitted values. If None, it integrates after a `fit` to at most 120·p
                values of p outputs, or to at most 200 values with a `LearnedSpectrumKernel`.

        Raises:
            RuntimeError: The model has no data.
            ValueError: `marginalize=True` is given for more than 1200 values, or for a model with
                features.

        Example:
            >>> import gp_orff, torch
            >>> model = gp_orff.VectorFieldGP(gp_orff.CurlFreeKernel(num_dims=2))
            >>> model = model.condition(torch.rand(20, 2), torch.randn(20, 2))
            >>> model.posterior().mean(torch.rand(7, 2)).shape
            torch.Size([7, 2])
        """
        snapshot, coverage = self._snapshot(marginalize), self.state.history.coverage
        return FieldPosterior(snapshot, self._units.x, coverage, self._units.y)

    @chosen_threads()
    def log_marginal_likelihood(self) -> Float[Tensor, ""]:
        """Return the log marginal likelihood log p(y) of all data, a scalar (0-d), in nats.

        It does not include hyperparameter priors. Under Student-t noise and for a `Pointwise`
        likelihood, it is a lower bound (ELBO). It has gradients with respect to the
        hyperparameters, unless the model stores only statistics of random features.

        Example:
            >>> import gp_orff, torch
            >>> model = gp_orff.VectorFieldGP(gp_orff.CurlFreeKernel(num_dims=2))
            >>> model = model.condition(torch.rand(20, 2), torch.randn(20, 2))
            >>> model.log_marginal_likelihood().shape
            torch.Size([])
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

        On a grid, they are valid for lengthscales from 0.7 to 1.4 times the present values. Their
        domain is the default domain of `Grid`: the box of the data with a margin. They do not
        include the observations of `observe`.

        Example:
            >>> import gp_orff, torch
            >>> model = gp_orff.VectorFieldGP(gp_orff.CurlFreeKernel(num_dims=2))
            >>> model = model.condition(torch.rand(20, 2), torch.randn(20, 2))
            >>> model.statistics.num_values
            40
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
        """Return the sufficient statistics of observations, as a `FieldStatistics`.

        You can add them to `statistics` or subtract them, and pass the result to `condition`. The
        model does not change. Statistics from copies of one model add exactly, for example if
        several workers each read a part of the data.

        Under Student-t noise, each observation has a weight. If the model stores an observation, it
        gets its weight from the fit, so that subtraction removes it exactly. All other observations
        get weights from the present posterior.

        Args:
            x, y: points (N, d) and vectors (N, p), or chunks, as for `fit`.
            options: the arguments of `fit` that describe the data, from `variances` to `time`.

        Raises:
            RuntimeError: The model has no data.
            ValueError: Points are outside the domain of `statistics`, or the data are not valid, as
                for `fit`.

        Example:
            >>> import gp_orff, torch
            >>> x, y = torch.rand(30, 2), torch.randn(30, 2)
            >>> model = gp_orff.VectorFieldGP(gp_orff.CurlFreeKernel(num_dims=2))
            >>> model = model.condition(x, y)
            >>> rest = model.statistics - model.statistics_of(x[:10], y[:10])
            >>> model.condition(rest).report.numbers
            40
        """
        state = self.state
        held = state.statistics_only()
        new = state.weighted(self.copied(x, y, Options(**options)), state.data)
        held.require(new.box)
        new.require_no_tracks()
        return new.statistics(held.field_statistics.phi)

    @property
    def report(self) -> FitReport:
        """A `FitReport` of the hyperparameters, the data and the fit. `print` shows it as text."""
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

        The predictions have a closed form (Rasmussen & Williams 2006, eqs. 5.10–5.12, for vectors).
        The hyperparameters, the mean and Student-t weights are from all data. For tracks, and if
        the fit merged positions, pass all data of the fit.

        Args:
            x, y: points (N, d) and vectors (N, p): all or some of the data of the fit.
            options: the arguments of `fit` that describe the data, from `variances` to `time`.

        Returns:
            A `LeaveOneOut` with residuals, p-values and log densities, one row per point of x.

        Raises:
            RuntimeError: The model has no data.
            ValueError: `variances` have the shape (N, p), or `noise` has the shape (N, p) or
                (N, p, p). Or an observation was not part of the fit, and the variance of the
                field exceeds the noise variance there.

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

        The scores show which kernel predicts best and whether the coverage is right. Use blocks
        that are as wide as the lengthscales of the field. Holding out single observations is too
        optimistic if the errors of neighbours are correlated.

        Each block is predicted by a copy of the model that is conditioned on the rest of the data.
        The copy has the hyperparameters and frequencies of the model. A trained constant mean μ is
        estimated from the rest. The prediction has a closed form. For the exact kernel with the
        covariance K of all observations y, a block b has

            y_b − E[y_b | rest] = ([K⁻¹]_bb)⁻¹ [K⁻¹ (y − μ)]_b ,    Cov = ([K⁻¹]_bb)⁻¹ ,

        and the variance of μ is added. With features, the statistics of the block are subtracted
        from those of all data. An iterative solver starts again for each block.

        Under Student-t noise, the weights of the observations are from all data, and predictions
        include the Student-t noise. If a complete track is held out, it is predicted as a new
        track. Otherwise, the rest of the track determines its offset and correlated noise.
        Observations of `observe` are ignored. The model does not change.

        Args:
            x, y: points (N, d) and vectors (N, p) in memory, usually the data of the model.
            blocks: "auto", labels or a splitter. With "auto", blocks are tracks, at most 50, if
                `track` has several labels. Otherwise they are cells of two lengthscales, in 5 to 50
                blocks. Labels (N,) are of any hashable type, one for each observation. A splitter
                of scikit-learn gets the labels `group=` or `track=` as its `groups`; an observation
                may be in several of its test sets or in none.
            options: the arguments of `fit` that describe the data, from `variances` to `time`, and
                `executor`, `retries` and `checkpoint`. The workers of the executor share the
                blocks. Observations that `condition` omits, such as copies, have no score. If
                `noise` is a covariance, the scored values are components along its axes.

        Returns:
            A `CrossValidation`.

        Raises:
            TypeError: Chunks are given, or `blocks` is neither labels nor a splitter.
            ValueError: The data are not valid, as for `fit`, the labels have another length, or a
                block contains all data.

        Example:
            The observations of each instrument share an error, so each instrument is a block:

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
        error of a survey line. It is relative to the field that is estimated from all tracks.
        It does not include the correlated noise along the track. The field of `posterior()` does
        not include offsets.

        Args:
            group: the name of the group, as in `fit(group=)`. The default is the group of
                observations without a name.

        Returns:
            A `TrackOffsets` with means and standard deviations (k, p) of k tracks, in units of y.
            With `directions`, p = 1.

        Raises:
            RuntimeError: The model has no data.
            ValueError: The group has no tracks.

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

        The file contains the data, or their `statistics` if these are smaller. It always contains
        the data for an exact kernel, tracks, a `HarmonicKernel`, and random frequencies that
        outnumber the observed values. Weights of Student-t noise are saved with the data.

        You can use, update and fit a loaded model like the saved one. If the file contains
        statistics, the lengthscales and points must be in the range and domain of `statistics`.

        An old file at `path` is replaced only when the new one is complete.
        `torch.load(path, weights_only=True)` can also read the file.

        Args:
            path: the file, for example "field.pt".

        Example:
            >>> import gp_orff, os, tempfile, torch
            >>> model = gp_orff.VectorFieldGP(gp_orff.CurlFreeKernel(num_dims=2))
            >>> model = model.condition(torch.rand(20, 2), torch.randn(20, 2))
            >>> path = os.path.join(tempfile.mkdtemp(), "field.pt")
            >>> model.save(path)
            >>> gp_orff.VectorFieldGP.load(path).report.points
            20
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
            path: a file that `save` wrote.
            kernel, likelihood, mean, frequencies: parts of the model, built as for the saved model.
                Pass a part only if its class, constraints or priors are neither from gpytorch nor
                from this package: the file cannot describe such a part.

        Raises:
            FileNotFoundError: There is no file at `path`.
            ValueError: The file is damaged or newer than this package. Or a part that the file
                cannot describe is not given, or differs from the saved one.

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
        """Return the state other than parameters and buffers, for `state_dict`.

        It contains the class of the likelihood of each group, and the hyperparameters that a fit
        with weak priors has learned. While these do not change, the posterior after `condition`
        integrates over them, as after the fit.
        """
        every = self._every_likelihood.items()
        return {
            "likelihoods": {label: storage.recipe_of(likelihood) for label, likelihood in every},
            "learned": torch.empty(0) if self._learned is None else self._learned,
        }

    def set_extra_state(self, state: dict[str, object]) -> None:
        """Restore a `state` that `get_extra_state` returned."""
        learned = state["learned"]
        self._learned = learned.double().cpu() if len(learned) else None

    def _load_from_state_dict(self, state_dict, prefix, *args) -> None:
        key = prefix + "_extra_state"
        state = state_dict.get(key, torch.empty(0))
        if isinstance(state, Tensor):  # of earlier versions
            warnings.warn(
                "the state_dict is older than this version of gp_orff, and does not contain the "
                "likelihoods of the groups of observations; those of this model stay",
                stacklevel=2,
            )
            state_dict[key] = {"learned": state}
        else:  # create the likelihoods of the state; their values are loaded next
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

    # From arguments to a state: the steps that `fit` and `condition` have in common.
    #
    # 1. `_read` checks the arguments and reads the data once (`Dataset.of`), for their box, scales
    #    and a sample. Arrays are not copied. Chunks are read again whenever a pass needs them.
    # 2. `copied` copies small arrays, so that later changes of the caller's arrays have no effect.
    #    `_counted_once` drops copies of records.
    # 3. `_fit_state` searches the hyperparameters. `_condition_state` uses the present ones. Both
    #    choose a representation for the hyperparameters.
    # 4. `_assign_with_posterior` computes the posterior, and only then assigns the state. If the
    #    posterior fails, the former state stays.
    # 5. Every use of `state` checks whether the kernel has left the range of its frequencies. If
    #    so, new frequencies are chosen.

    def _read(self, x: object, y: object, options: Options, learning: bool = False) -> Dataset:
        """Check the arguments of `fit`, in one pass over the data. With `learning`, the blocks of
        tracks are chosen again."""
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
        """The units to which data are converted: those of the model, or else those of the data."""
        return self._units if self._units.stated else ColumnUnits.of(x, y, options.time)

    @contextmanager
    def _keeping_units(
        self, x: object, y: object, options: Options, anew: bool = False
    ) -> Iterator[None]:
        """Store the units to which data are converted, unless the block raises an error. If `anew`
        is True, the units of the data replace the units of the model."""
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
        """Return the arguments `x` (N, d), `y` (N, p) and `options` of `fit` in the units of the
        model. Arguments without units do not change."""
        return in_units(self._units_of(x, y, options), x, y, options)

    def copied(self, x: object, y: object, options: Options, learning: bool = False) -> Dataset:
        """Return the data that `x`, `y` and `options` describe, as a `Dataset`. Small arrays are
        copied, so that the caller cannot change them. With `learning`, the blocks of tracks are
        chosen again."""
        data = self._read(x, y, options, learning)
        data = replace(data, repeats=Repeats(options.merge))
        warn_of_values([part for part in data.survey.sample if part.represented is None])
        return data.copied() if y is not None and data.is_small else data

    def _counted_once(
        self, x: object, y: object, options: Options, learning: bool = False
    ) -> Dataset:
        """Data as from `copied`. If they are small arrays, copies of records are dropped."""
        data = self.copied(x, y, options, learning)
        single = y is not None and data.is_small and not data.tracks
        return data.without_copies() if single else data

    def _in_memory(self, x: object, y: object, options: Options) -> Dataset:
        """Data as from `_counted_once`, in memory. Each observation has an `index`, its row."""
        read = self._read(x, y, options)
        sources = (InMemory(list(read.visit())),)
        data = replace(read, sources=sources, repeats=Repeats(options.merge))
        return data.without_copies() if data.is_small else data

    def _along_tracks(
        self, x: object, y: object, options: Options, data: Dataset
    ) -> list[TrackReadings]:
        """All single observations along tracks, with the durations of the blocks in `data`. The
        list is empty without tracks."""
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
        """The immutable state, with frequencies for the present kernel and hyperparameters."""
        self._assigned = self._held.current(self.kernel, self._every_likelihood, self._fixed_mean)
        return self._assigned

    @property
    def _held(self) -> ModelState:
        """The state that was assigned last. If a mean that is not constant has changed since, the
        data are corrected for the change."""
        if self._assigned is None:
            raise RuntimeError("the model has no data yet: call fit(x, y) or condition(x, y) first")
        if not is_trend(self._trend, self.mean):
            means = self._trend, self.mean, self._fixed_mean
            self._assigned = self._assigned.following(*means)
            self._trend = trend_of(self.mean)
        return self._assigned

    @property
    def _every_likelihood(self) -> dict[str, Likelihood]:
        """The likelihoods of all groups, and of observations without a group name."""
        return {DEFAULT: self.likelihood, **self.likelihoods}

    @property
    def _fixed_mean(self) -> Float[Tensor, "p"] | None:
        """The constant mean (p,) if it is not trained, and None if it is trained. If the mean is
        not constant, it is subtracted from the data, and the result is zero."""
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
        """The state of a model that is conditioned with the present hyperparameters."""
        learned = self._learned is not None and torch.equal(self._learned, self._hyperparameters())
        history = History("conditioned", weak_priors=learned).with_notes(notes)
        return ModelState.of(representation, self._fixed_mean, history)

    def _fit_state(
        self, data: Data, warm_start: bool, progress: Progress, scale_noise: bool | None
    ) -> ModelState:
        """Learn the hyperparameters from data, and return the state of the fitted model.
        `scale_noise` states whether the factor of known noise is learned, or is one. None keeps the
        choice of the last fit."""
        take_heights(self.kernel, data, anew=not warm_start)
        likelihoods = with_groups(self._every_likelihood, data, self.kernel)
        remember_all(likelihoods, data)
        if scale_noise is not None:
            learn_scales(likelihoods, data, scale_noise)
        parts = self.kernel, likelihoods, self._fixed_mean, self.frequencies
        result = fit(*parts, data, warm_start, progress)
        return ModelState.of(result.representation, result.mean, result.history)

    def _checked(self, state: ModelState) -> ModelState:
        """The state with the coverage of held-out blocks. If it is too low, there is a note and a
        warning."""
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
        """Set a trained constant mean to its best value, and return a snapshot of the model.
        `marginalize` is as for `posterior`."""
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
        """Compute the posterior, then assign the state. A failure does not change the model."""
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
    """Warn of directions of the constant mean that the data do not determine."""
    if not len(unknown):
        return
    # A direction is known up to its sign; the largest component is made positive, and `+ 0.0`
    # removes the sign of negative zeros.
    signs = unknown.gather(-1, unknown.abs().argmax(-1, keepdim=True)).sign()
    along = [", ".join(f"{v:.3g}" for v in vector) for vector in (signs * unknown + 0.0).tolist()]
    words = " and ".join(f"({vector})" for vector in along)
    warnings.warn(
        f"no observation depends on the constant mean of the outputs along {words}: this part of "
        "the mean is assumed to be zero; observe other components or directions, or give a known "
        "mean, such as mean=gpytorch.means.ZeroMean()",
        DataWarning,
        stacklevel=3,
    )


def _warn_of_constant(count: int) -> None:
    warnings.warn(
        f"expected data that vary, got {count} observations with equal values: they determine "
        "neither the noise nor the kernel, and the hyperparameters do not change; set the "
        "hyperparameters, and call condition(x, y)",
        DataWarning,
        stacklevel=3,
    )
