"""`VectorFieldGP`: a vector field learned from data, with uncertainty."""

import time
import warnings
from dataclasses import replace
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from gp_orff.data.dataset import StatisticsOnly
from gp_orff.data.field_statistics import FieldStatistics
from gp_orff.data.observations import SymbolObservations
from gp_orff.data.reading import Options
from gp_orff.data.sources import is_constant
from gp_orff.data.survey import DataWarning
from gp_orff.features.lattice import LatticeColumns
from gp_orff.inference.robust import LeaveOneOut, leave_one_out
from gp_orff.models.base import FieldModel
from gp_orff.models.field_posterior import FieldPosterior
from gp_orff.models.fitting.progress import shown
from gp_orff.models.fitting.robust_em import EStep
from gp_orff.models.fitting.trainer import without_far_points
from gp_orff.models.threads import chosen_threads
from gp_orff.symbols.base import Symbol


class VectorFieldGP(FieldModel):
    r"""A Gaussian process y = f(x) + μ + ε with vector values, for ten points or ten million.

    `fit` learns the hyperparameters by marginal likelihood, `condition` leaves them as they are,
    and `posterior` returns the field. Small data use the exact kernel. Larger data are reduced to
    the sufficient statistics of a frequency grid in one pass, and the cost of training does not
    depend on N. Starting values come from the evidence of a small subset with points at all
    distances; then narrow grids, coarse ones first, follow the lengthscales. `report` is a
    `FitReport` of all that was done.

    Hyperparameters, constraints and priors are in the user's units. Results do not depend on the
    units: starting values scale with the data, and the search is in logarithms. Computations are in
    float64. A call that fails leaves the model as it was.

    Args:
        kernel: any kernel tree that `ORFFKernel` accepts; it is trained in place. A term without an
            amplitude, such as a bare `CurlFreeKernel`, gets a `ScaleKernel` of outputscale 1 around
            it, in `model.kernel`.
        likelihood: a `MultitaskGaussianLikelihood`, a `MultitaskStudentTLikelihood`, or a
            `GaussianLikelihood` for one output; if None, Gaussian with one noise variance.
        mean: if None, a constant for each output, with the best values in closed form; or
            `gpytorch.means.ZeroMean()`; or another mean, which is not trained. Trends to be learned
            are terms of the kernel.
        frequencies: a frequency rule; `Auto(tolerance=1e-5, max_features=4096)` if None. The
            tolerance of a `Grid` or `Auto` holds where the noise variance is a thousandth of the
            signal's; elsewhere it is adapted to the noise and to the posterior variance. Ranges of
            lengthscales are chosen during the search; the domain grows with the points asked for.

    Raises:
        TypeError: an argument that is no kernel, likelihood or rule.
        ValueError: kernel, likelihood or mean with different numbers of outputs.

    Example:
        >>> import gp_orff, torch
        >>> x = torch.rand(200, 2)
        >>> y = torch.stack([torch.sin(3 * x[:, 1]), torch.sin(3 * x[:, 0])], dim=-1)
        >>> model = gp_orff.VectorFieldGP(gp_orff.HelmholtzKernel(num_dims=2))
        >>> model = model.fit(x, y + 0.1 * torch.randn(200, 2), progress=False)
        >>> field = model.posterior()
        >>> field.mean(x).shape, field.variance(x).shape
        (torch.Size([200, 2]), torch.Size([200, 2]))
    """

    def fit(
        self,
        x: object = None,
        y: object = None,
        *,
        variances: object = None,
        directions: object = None,
        group: object = None,
        missing: str = "raise",
        progress: bool = True,
        warm_start: bool = False,
    ) -> "VectorFieldGP":
        """Learn the hyperparameters from observations y at x, and condition on them.

        Parameters that do not require gradients stay as they are. Without `x` and `y` the model
        learns again from all data it holds, or from their statistics. Constant data give a warning
        and leave the hyperparameters as they are.

        Args:
            x, y: points (N, d) and vectors (N, p): tensors, arrays or memory maps. Or x alone, an
                iterable of chunks (x, y) that can be iterated repeatedly, such as a list or an
                object with `__iter__`. A chunk may be a mapping with the keys x, y and, as needed,
                variances, directions, group. Memory does not grow with the number of chunks.
            variances: (N,) factors of the noise variance of the likelihood, in any unit; or (N, p),
                one for each component, whose noise is then independent.
            directions: (N, p) unit vectors; y (N,) is then the component along them.
            group: the name of the observation group, one for all or one per observation. Each group
                learns its own noise, in `model.likelihoods[group]`; without a name, it is
                `model.likelihood`.
            missing: "mask" if NaN in y is an unobserved component; "raise" refuses NaN.
            progress: whether to show the progress of the fit on standard error: by a bar on a
                terminal or in a notebook, by one line for each stage elsewhere.
            warm_start: whether to start from the present hyperparameters, or from values that
                follow from the data.

        Raises:
            TypeError: values that are not real numbers.
            ValueError: data that are empty, not finite, or of shapes that do not fit.
            RuntimeError: no x, and no data held.
        """
        if x is None:
            data = self._held.data
            warm_start, read = warm_start or isinstance(data, StatisticsOnly), lambda: data
        else:
            read = partial(self.copied, x, y, Options(variances, directions, group, missing))
        start, before = time.perf_counter(), [p.detach().clone() for p in self.parameters()]
        with chosen_threads() as threads, shown(progress) as display:
            try:
                data = read()
                if data.varies:
                    state = self._fit_state(data, warm_start, display)
                else:
                    _warn_of_constant(data.survey.num_points)
                    state = self._condition_state(self._representation_of(data))
                state.snapshot(self.mean)
            except BaseException:
                for parameter, value in zip(self.parameters(), before, strict=True):
                    parameter.data.copy_(value)
                raise
        history = state.history.with_duration(time.perf_counter() - start, threads)
        return self._assign_with_posterior(replace(state, history=history))

    @chosen_threads()
    def condition(
        self,
        x: object,
        y: object = None,
        **options: object,
    ) -> "VectorFieldGP":
        """Condition on observations, with the hyperparameters as they are.

        `x`, `y` and `options` are arguments of `fit`. Or `x` is a `FieldStatistics` of this model,
        from `statistics` or `statistics_of`: it replaces all data held, observations of symbols
        too.
        """
        if isinstance(x, FieldStatistics):
            statistics = self.state.checked(x)
            data = replace(
                self.state.statistics_only(), field_statistics=statistics, symbol_data=()
            )
            representation = self._representation_of(data)
            return self._assign_with_posterior(self._condition_state(representation))
        data, notes = without_far_points(self.copied(x, y, Options(**options)), self.frequencies)
        representation = self._representation_of(data)
        e_step = EStep(representation.kernel, representation.likelihoods, self._fixed_mean)
        representation = e_step.converged(representation)
        return self._assign_with_posterior(self._condition_state(representation, notes))

    @chosen_threads()
    def update(
        self,
        x: object,
        y: object = None,
        **options: object,
    ) -> "VectorFieldGP":
        """Add observations `x`, `y` (`options`: as for `fit`) to the data, and condition on all.

        The cost is one pass over the new observations. Small data are kept under the exact kernel;
        with more data, a frequency grid takes over. Up to 4 million numbers are kept in memory, so
        that the grid can be rebuilt for points outside its domain. With more, only the statistics
        are kept, for a domain a quarter wider than the data on each side. `report` tells which.
        Under Student-t noise, the present posterior gives new observations their weights; `fit()`
        computes all weights again. `x` may be a `FieldStatistics`, as for `condition`.

        Raises:
            RuntimeError: a model without data.
            ValueError: as `fit`; points outside the domain of the statistics held.
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
        """Add observations y = (Q f)(x) + ε of a symbol Q, a linear map of the field.

        A tide gauge observes the potential; no flow crosses a wall (`Component(normal)`, or
        `directions` in `fit`); a region without sources has zero divergence. The posterior combines
        them with the observations of the field, and `fit()` learns from both. `statistics` and
        `compare_with_exact` use those of the field only; `condition(x, y)` and `fit(x, y)` replace
        all. Rows of Q are stored densely: use at most some thousand observations.

        Args:
            x: points (m, d).
            y: observed values (m, q), or (m,) for one output.
            symbol: the map Q, of the field with its mean; potentials need a reference.
            noise: the known noise variance; one for all outputs, (q,), or a covariance (q, q).

        Raises:
            RuntimeError: a model without observations of the field.
            NotImplementedError: a mean that is not constant.
            ValueError: wrong shapes, a symbol that the kernel lacks, or noise that is not positive.

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
        """The sufficient statistics of the data, on a frequency lattice.

        It serves lengthscales from 0.7 to 1.4 times the present ones, and a domain a quarter wider
        than the data on each side.
        """
        return self.state.statistics_only().field_statistics

    @chosen_threads()
    def statistics_of(
        self,
        x: object,
        y: object = None,
        **options: object,
    ) -> FieldStatistics:
        """The sufficient statistics of other data, to add to `statistics` or to subtract.

        `x`, `y` and `options` are arguments of `fit`; the model is not changed. Statistics made by
        copies of one model add exactly. Under Student-t noise, observations that the model holds
        keep their weights, so that subtracting them removes them exactly; the present posterior
        gives all others their weights, and all of them if only statistics are held.
        """
        state = self.state
        held = state.statistics_only()
        new = state.weighted(self.copied(x, y, Options(**options)), state.data)
        held.require(new.box)
        return new.statistics(held.field_statistics.phi)

    @chosen_threads()
    def log_marginal_likelihood(self) -> Float[Tensor, ""]:
        """The log marginal likelihood log p(y), total nats (0-d), without hyperparameter priors.

        Differentiable in the hyperparameters, unless only statistics of random features are held.
        Under Student-t noise it is a lower bound (ELBO).
        """
        state = self.state
        frozen = isinstance(state.data, StatisticsOnly) and not isinstance(
            state.data.field_statistics.phi, LatticeColumns
        )  # random frequencies move with the lengthscales, their statistics do not
        with torch.set_grad_enabled(torch.is_grad_enabled() and not frozen):
            return state.log_marginal_likelihood()

    @chosen_threads()
    def posterior(self) -> FieldPosterior:
        """The posterior of the field given the data, as a `FieldPosterior`."""
        return FieldPosterior(self._snapshot())

    @chosen_threads()
    def leave_one_out(
        self,
        x: object,
        y: object,
        **options: object,
    ) -> LeaveOneOut:
        """Compare each observation with its prediction from all others.

        In closed form (Rasmussen & Williams 2006, eqs. 5.10–5.12, for vectors). `x`, `y` and `how`
        are arguments of `fit`, and must be data the model was conditioned on. Hyperparameters and
        mean are those of all data. Under Student-t noise the weights are those of the model, or,
        where it holds statistics only, those that the present posterior gives.

        Example:
            >>> import gp_orff, torch
            >>> x = torch.rand(200, 2, generator=torch.Generator().manual_seed(0))
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
        data = self._read(x, y, Options(**options))
        pairs = zip(data.visit(), state.weighted(data, state.data).visit(), strict=True)
        parts = snapshot.posterior, snapshot.noises, snapshot.constant
        return leave_one_out(pairs, len(x), state.e_step.heavy_tailed, *parts)


def _warn_of_constant(count: int) -> None:
    warnings.warn(
        f"expected data that vary, got {count} observations that are all the same: they determine "
        "neither the noise nor the kernel, and the hyperparameters stay as they are; set them, and "
        "call condition(x, y)",
        DataWarning,
        stacklevel=3,
    )
