"""`VectorFieldGP`: a vector field learned from data, with uncertainty."""

import warnings
from dataclasses import replace
from functools import partial
from time import perf_counter

import torch
from jaxtyping import Float
from torch import Tensor

from gp_orff.data.dataset import StatisticsOnly
from gp_orff.data.field_statistics import FieldStatistics
from gp_orff.data.observations import SymbolObservations
from gp_orff.data.reading import Options
from gp_orff.data.sources import is_constant
from gp_orff.data.survey import DataWarning
from gp_orff.data.tracks.observations import require_none
from gp_orff.data.workers.calls import on_workers
from gp_orff.features.lattice import LatticeColumns
from gp_orff.inference.conditioning.left_out_points import without_far_points
from gp_orff.models.base import restored_on_failure
from gp_orff.models.field_posterior import FieldPosterior
from gp_orff.models.fitting.progress import shown
from gp_orff.models.fitting.robust_em import EStep
from gp_orff.models.validation.model import ValidatedModel
from gp_orff.symbols.base import Symbol
from gp_orff.threads import chosen_threads


class VectorFieldGP(ValidatedModel):
    r"""A vector-valued Gaussian process y = f(x) + μ + ε, for ten points or ten million.

    `fit` learns the hyperparameters by marginal likelihood, `condition` keeps them as they are, and
    `posterior` returns the posterior of the field. Small data use the exact kernel. For larger
    data, one pass computes the sufficient statistics of features on a frequency grid; the cost of
    training is then independent of N. Training starts with the exact evidence of a small subset of
    the data, continues on coarse grids and ends on a fine one.

    Hyperparameters, constraints and priors are in the units of x and y; changing the units does not
    change the results. Computations are in float64. A call that fails leaves the model unchanged.

    Args:
        kernel: any kernel that `ORFFKernel` accepts. It is trained in place. Each term without an
            amplitude, such as a bare `CurlFreeKernel`, is wrapped in a `ScaleKernel` with
            outputscale 1; `model.kernel` is the result.
        likelihood: a `MultitaskGaussianLikelihood`, a `MultitaskStudentTLikelihood`, or a
            `GaussianLikelihood` for one output. If None, Gaussian with one noise variance.
        mean: the prior mean μ. If None, the best constant for each output, in closed form, with a
            flat prior: posteriors count its variance. Others, such as `ZeroMean()`, are not
            trained: make a trend a kernel term.
        frequencies: the rule that chooses the frequencies of the features: `Auto`, `Grid` or a
            random rule; `Auto(tolerance=1e-5)` if None. The tolerance of a grid
            applies to a noise variance of 1/1000 of the signal variance; the model adapts it to the
            learned noise and to the posterior variance. It also adapts `lengthscale_range`.

    Raises:
        TypeError: an argument that is not a kernel, likelihood or frequency rule.
        ValueError: kernel, likelihood and mean have different numbers of outputs.

    Example:
        >>> import gp_orff, torch
        >>> x = torch.rand(100, 2)
        >>> y = torch.stack([torch.sin(3 * x[:, 1]), torch.sin(3 * x[:, 0])], dim=-1)
        >>> model = gp_orff.VectorFieldGP(gp_orff.HelmholtzKernel(num_dims=2))
        >>> model = model.fit(x, y + 0.1 * torch.randn(100, 2), progress=False)
        >>> field = model.posterior()
        >>> field.mean(x).shape, field.variance(x).shape
        (torch.Size([100, 2]), torch.Size([100, 2]))
    """

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

        `x` and `y` replace all data held. Without them, the model learns again from what it holds.
        Parameters with `requires_grad=False` are not trained. Few data, of at most 120 vectors or
        as many numbers as these have, learn with weak priors in the units of the data (module
        `gp_orff.models.fitting.scoring.weak_priors`), which priors that you register replace, and
        the posterior integrates all hyperparameters: see `posterior`. A `DataWarning` is given for
        constant data, which leave the hyperparameters unchanged, for points far from all others,
        which a frequency grid leaves out, for fewer than 10 numbers a hyperparameter where these
        are not integrated, for lengthscales below the distances of neighbours, and for a direction
        of the constant mean on which no observation depends. A `CalibrationWarning` is given where
        95 % intervals hold too few readings of some blocks.

        Args:
            x, y: points (N, d) and vectors (N, p) as tensors, arrays or memory maps. Or x alone, an
                iterable of chunks (x, y) that can be iterated repeatedly, such as a list; memory
                does not grow with their number. A chunk may be a mapping with the keys x, y and, as
                needed, variances, noise, directions, group, track, time; or a callable without
                arguments that returns one, and loads it where it is used.
            variances: relative noise variances (N,), which multiply that of the likelihood; or
                (N, p), one for each component, with independent noise.
            noise: in place of `variances`, the noise itself, in squared units of y: a variance of
                each reading (N,) or component (N, p), or covariances (N, p, p), of readings of one
                group or of all. What belongs to components that are NaN is ignored. See
                `KnownNoiseLikelihood`; beside Student-t noise it is the scale of each, and beside
                `track` (N,) are added to the white variance that is learned.
            scale_noise: False keeps `noise` as it is; True multiplies it by one factor, which each
                group learns. `condition`, `update` and others take the factor as it is.
            directions: (N, p) unit vectors. Then y, (N,), holds the components along them.
            group: a group name for all observations, or one for each. Each group learns its own
                noise, `model.likelihoods[name]`; without a name (None, NaN), `model.likelihood`.
            missing: "mask" treats NaN in y as an unobserved component; "raise" raises an error.
            merge: a distance in the units of x, within which the exact kernel merges positions; 0
                merges none. If None, those that the prior cannot tell apart, where this saves a
                fifth of the numbers; wider ones, where the field changes less within them than
                grids truncate. Of small data, records with equal values at one place are copies,
                which count once, also if they were rounded differently.
            track: a label for each reading, or one for all: readings of one track share an offset
                and correlated noise, see `TrackLikelihood`: lines of a survey are levelled, beside
                `directions` too. A track may go on in later chunks. Its readings stay in memory.
            time: (N,) times, which increase along each track; dates and durations become seconds.
                If None, the length of its path.
            progress: whether to show progress on standard error: a bar in a terminal or notebook,
                otherwise one line per stage.
            warm_start: True starts the search from the present hyperparameters, False from values
                derived from the data. A model that holds only statistics always starts warm.
            executor: a `concurrent.futures.Executor`, such as a `ProcessPoolExecutor`, a Dask
                client's `get_executor()` or mpi4py's `MPIPoolExecutor`, whose workers read the
                chunks and return sums; arrays stay here, and so do passes that weigh readings by
                Student-t noise, or train random frequencies. See `gp_orff.data.workers`.
            retries: how often a chunk that fails on a worker is tried again.
            checkpoint: the path of a file (a pickle) with partial sums, from which an interrupted
                call with the same model and data goes on; deleted when the call has succeeded.

        Raises:
            TypeError: values are not real numbers.
            ValueError: data are empty or not finite, or shapes do not fit each other or the kernel.
            RuntimeError: no x is given, and the model has no data.
        """
        if x is None:
            data = self._held.data
            warm_start, read = warm_start or isinstance(data, StatisticsOnly), lambda: data
            scale_noise = scale_noise or None  # as before
        else:
            options = Options(
                variances, noise, scale_noise, directions, group, missing, merge, track, time
            )
            read = partial(self.counted_once, x, y, options, learning=True)
        start = perf_counter()
        with chosen_threads() as threads, shown(progress) as display, restored_on_failure(self):
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
    @chosen_threads()
    def condition(self, x: object, y: object = None, **options: object) -> "VectorFieldGP":
        """Condition on observations without changing the hyperparameters, and return self.

        The observations replace all data held, including those of `observe`.

        Args:
            x, y: points (N, d) and vectors (N, p), or chunks, as for `fit`. Or x alone: a
                `FieldStatistics` made by `statistics` or `statistics_of` of this model.
            options: arguments of `fit` that describe the data, from `variances` to `time`.

        Raises:
            TypeError, ValueError: as for `fit`; statistics with other frequencies.
            RuntimeError: statistics are given to a model without data.
        """
        if isinstance(x, FieldStatistics):
            statistics = self.state.checked(x)
            data = replace(
                self.state.statistics_only(), field_statistics=statistics, symbol_data=()
            )
            representation = self._representation_of(data)
            return self._assign_with_posterior(self._condition_state(representation))
        data, notes = without_far_points(
            self.counted_once(x, y, Options(**options)), self.frequencies
        )
        representation = self._representation_of(data)
        e_step = EStep(representation.kernel, representation.likelihoods, self._fixed_mean)
        representation = e_step.converged(representation)
        return self._assign_with_posterior(self._condition_state(representation, notes))

    @on_workers
    @chosen_threads()
    def update(self, x: object, y: object = None, **options: object) -> "VectorFieldGP":
        """Add observations to the data held, condition on all of them, and return self.

        The hyperparameters do not change. Up to 4 million numbers are kept in memory; the model
        changes from the exact kernel to a frequency grid, and to a larger grid, as the data
        require. With more numbers it keeps only `statistics`, whose domain is fixed; `report` says
        so. With a frequency grid, the cost is one pass over the new observations. Under Student-t
        noise they get weights from the present posterior; `fit()` computes all weights anew.

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
        return self._assign(state.updated(self.copied(x, y, Options(**options))))

    @chosen_threads()
    def observe(
        self,
        x: Float[Tensor, "m d"],
        y: Float[Tensor, "m q"],
        symbol: Symbol,
        *,
        noise: float | Float[Tensor, "q"] | Float[Tensor, "q q"],
    ) -> "VectorFieldGP":
        """Add observations y = Q(f + μ)(x) + ε of a linear map Q of the field, and return self.

        Q is a `Symbol`: the potential, measured by a tide gauge; the divergence, zero in a region
        without sources; the component normal to a wall, `Component(normal)`. The posterior and
        `fit()` combine these observations with those of the field. `fit(x, y)` and
        `condition(x, y)` discard them; `statistics` and `compare_with_exact` ignore them. Memory
        grows with m times the number of features: use at most a few thousand observations.

        Args:
            x: points (m, d).
            y: observed values (m, q), or (m,) if q = 1.
            symbol: the map Q, with q outputs; without a `reference`, a potential has a constant.
            noise: the known variance of ε: a number, one per output (q,), or a covariance (q, q).

        Raises:
            RuntimeError: the model has no observations of the field.
            NotImplementedError: the mean is not constant.
            ValueError: wrong shapes, a symbol that does not exist for this kernel, or noise that is
                not positive.

        Example:
            >>> import gp_orff, torch
            >>> x = torch.rand(60, 2, generator=torch.Generator().manual_seed(0)).double()
            >>> y = torch.stack([torch.sin(3 * x[:, 1]), torch.cos(3 * x[:, 0])], dim=-1)
            >>> model = gp_orff.VectorFieldGP(gp_orff.HelmholtzKernel(num_dims=2)).condition(x, y)
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
        symbol_data = SymbolObservations.of(self.kernel, held.data.num_inputs, x, y, symbol, noise)
        held.inference.left_out(symbol, self.kernel, symbol_data.space)  # raises on some grids
        state = held.current(self.kernel, self._every_likelihood)
        return self._assign_with_posterior(state.observing(symbol_data))

    @property
    @chosen_threads()
    def statistics(self) -> FieldStatistics:
        """The sufficient statistics of the data, as a `FieldStatistics`.

        On a grid they are valid for lengthscales from 0.7 to 1.4 times the present ones, and in the
        default domain of `Grid`: the box of the data with a margin.
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

        `x`, `y` and `options` are those of `fit`; RuntimeError if the model has no data, ValueError
        for points outside the domain of `statistics`. The model is not changed. Copies of it, such
        as workers that read parts of the data, make statistics that add exactly.

        Under Student-t noise, observations that the model holds have the weights it gave them, so
        that subtracting removes them exactly. Other observations get weights from the present
        posterior. So do all observations if the model holds only statistics.
        """
        state = self.state
        held = state.statistics_only()
        new = state.weighted(self.copied(x, y, Options(**options)), state.data)
        held.require(new.box)
        require_none(new.tracks)
        return new.statistics(held.field_statistics.phi)

    @chosen_threads()
    def log_marginal_likelihood(self) -> Float[Tensor, ""]:
        """Return the log marginal likelihood log p(y) of all data, a scalar (0-d), in nats.

        Hyperparameter priors are not included. Under Student-t noise it is a lower bound (ELBO). It
        has gradients unless the model holds nothing but statistics of random features.
        """
        state = self.state
        frozen = isinstance(state.data, StatisticsOnly) and not isinstance(
            state.data.field_statistics.phi, LatticeColumns
        )  # random frequencies move with the lengthscales, their statistics do not
        with torch.set_grad_enabled(torch.is_grad_enabled() and not frozen):
            return state.log_marginal_likelihood()

    @chosen_threads()
    def posterior(self, marginalize: bool | None = None) -> FieldPosterior:
        """Return the posterior given all data, as a `FieldPosterior`; RuntimeError without data.

        With `marginalize` error bars count what few readings leave open of the hyperparameters: the
        posterior is a mixture of those under draws of all of them, whose importance weights follow
        from the restricted likelihood and the weak priors of `fit`, or those that are registered.
        They are drawn until error bars are known to 2 %; the report has their effective number and
        the Pareto k of the weights. False takes the learned values as known. None integrates after
        a `fit` to at most 120 vectors, and to up to 200 numbers with a `LearnedSpectrumKernel`.

        Kernels with a learned spectrum or with trained matrices of outputs, and readings along
        tracks, take 32 draws about the learned values instead. ValueError for more than 1200
        numbers, and for features, whose hyperparameters are taken as known.
        """
        return FieldPosterior(self._snapshot(marginalize))


def _warn_of_constant(count: int) -> None:
    warnings.warn(
        f"expected data that vary, got {count} observations that are all the same: they determine "
        "neither the noise nor the kernel, and the hyperparameters stay as they are; set them, and "
        "call condition(x, y)",
        DataWarning,
        stacklevel=3,
    )
