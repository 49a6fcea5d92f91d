"""`VectorFieldGP`: a vector field learned from data, with uncertainty."""

import time
import warnings
from dataclasses import replace
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor
from tqdm import tqdm

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
from gp_orff.models.fitting.robust_em import EStep
from gp_orff.models.fitting.trainer import without_far_points
from gp_orff.models.threads import chosen_threads
from gp_orff.symbols.base import Symbol


class VectorFieldGP(FieldModel):
    r"""A Gaussian process y = f(x) + μ + ε for vectors, from a hundred points to millions.

    `fit` learns the hyperparameters by the marginal likelihood, `condition` takes them as they
    are, `posterior` is the field. Small data use the exact kernel. Otherwise one pass over the
    data gives the statistics of a frequency grid, and training costs nothing in N: starting values
    come from the evidence of a small subset that shows every scale, then narrow grids, coarse
    before fine, follow the lengthscales. What was done stands in `report`.

    Units do not matter: hyperparameters, constraints and priors are in the user's units, the search
    runs in logarithms, and starting values scale with the data. Inside, everything is float64.

    Args:
        kernel: any kernel tree that `ORFFKernel` understands; it is trained in place. A term
            without an amplitude of its own, such as a bare `CurlFreeKernel`, gets one: a
            `ScaleKernel` of outputscale 1 around it, in `model.kernel`.
        likelihood: a `MultitaskGaussianLikelihood`, or a `GaussianLikelihood` for one output; one
            global noise if None.
        mean: a constant for each output if None, of which the best one is found in closed form;
            `gpytorch.means.ZeroMean()`; or any other mean, taken as it is. Trends to be learned
            are terms of the kernel.
        frequencies: a rule; `Auto(tolerance=1e-5, max_features=4096)` if None. Of a `Grid` or
            `Auto`, the tolerance is used as it is where the noise has a thousandth of the signal's
            variance, and made to follow the noise and the posterior variance elsewhere; ranges of
            lengthscales are chosen while they are sought, and the domain grows where it is asked.

    Raises:
        TypeError: something that is no kernel, likelihood or rule.
        ValueError: in `fit` and `condition`, data that are empty, not finite, of different length
            or of another number of outputs. A model that fails keeps what it has learned.

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

        Readings that are all the same teach nothing: a warning says so, and hyperparameters stay.
        Starting values come from the data; with `warm_start`, they are those the kernel and the
        likelihood have. Parameters that do not require gradients stay as they are. Without x and y
        the model learns again from what it holds, all that `update` added included: from the
        data, or from their statistics and the hyperparameters it has.

        Args:
            x, y: points (N, d) and vectors (N, p), tensors, arrays or memory maps; or x alone, an
                iterable of chunks (x, y) that can be gone through again and again, such as a list
                or an object with `__iter__`. A chunk may also be a mapping with keys x, y and, if
                they are needed, variances, directions, group. Memory does not grow with their
                number: a look at all of them, and one pass for every grid.
            variances: (N,), of the noise of each reading relative to that of the likelihood, in any
                unit: only their product matters; or (N, p), for each component, which are then
                taken as independent.
            directions: (N, p) unit vectors, where y (N,) is the component along them.
            group: the instrument, one for all or one for each reading. Each has a noise of its own,
                learned, in `model.likelihoods[group]`; readings that name none have
                `model.likelihood`.
            missing: "mask" where NaN in y is a component that was not observed.
        """
        if x is None:
            data = self._held.data
            warm_start, read = warm_start or isinstance(data, StatisticsOnly), lambda: data
        else:
            read = partial(self.copied, x, y, Options(variances, directions, group, missing))
        began, before = time.perf_counter(), [p.detach().clone() for p in self.parameters()]
        with (
            chosen_threads() as threads,
            tqdm(disable=not progress, unit=" evaluations", mininterval=0.5) as bar,
        ):

            def show(stage: str, nats: float) -> None:
                bar.set_description_str(f"{stage} ", refresh=False)
                bar.set_postfix({"nats per number": f"{nats:.4f}"}, refresh=False)
                bar.update()

            try:
                data = read()
                if data.varies:
                    state = self._learned(data, warm_start, show)
                else:
                    _warn_of_constant(data.survey.num_points)
                    state = self._conditioned(self._represented(data))
                state.snapshot(self.mean)
            except BaseException:
                for parameter, value in zip(self.parameters(), before, strict=True):
                    parameter.data.copy_(value)
                raise
        took = f"fitted in {time.perf_counter() - began:.1f} s with {threads}"
        return self._assign_whole(replace(state, story=took))

    @chosen_threads()
    def condition(
        self,
        x: object,
        y: object = None,
        **how: object,
    ) -> "VectorFieldGP":
        """Condition on observations with the hyperparameters as they are; arguments as for `fit`.

        Or on `FieldStatistics` made by `statistics` and `statistics_of` of this model, and on
        nothing else: symbols that were observed are no longer known.
        """
        if isinstance(x, FieldStatistics):
            sums = self.state.statistics_only()
            own = self._represented(
                replace(sums, field_statistics=self.state.checked(x), symbol_data=())
            )
            return self._assign_whole(self._conditioned(own))
        data, notes = without_far_points(self.copied(x, y, Options(**how)), self.frequencies)
        own = self._represented(data)
        own = EStep(own.kernel, own.likelihoods, self._fixed_mean).settled(own)
        return self._assign_whole(self._conditioned(own, notes))

    @chosen_threads()
    def update(
        self,
        x: object,
        y: object = None,
        **how: object,
    ) -> "VectorFieldGP":
        """Add observations; arguments as for `fit`. The posterior is that of all of them together.

        Costs one pass over what is new. Small data are kept, under the exact kernel; later a
        frequency grid takes over. Readings added in memory are kept up to 4 million numbers, so
        that the grid can still be rebuilt for points outside its domain; beyond, only the
        statistics are, for a domain that reaches a quarter of its extent farther on each side.
        `report` says what is held. Under Student-t noise, new readings are weighed by the field as
        it is, and `fit()` weighs all of them anew.

        Raises:
            RuntimeError: a model without data.
            ValueError: as in `fit`; points outside the domain, once only statistics are held. The
                model keeps what it has.
        """
        state = self.state
        if isinstance(x, FieldStatistics):
            sums = state.statistics_only()
            own = self._represented(
                replace(sums, field_statistics=sums.field_statistics + state.checked(x))
            )
            return self._assign(replace(self._conditioned(own), mean=state.mean, story=state.story))
        return self._assign(state.updated(self.copied(x, y, Options(**how))))

    @chosen_threads()
    def observe(
        self,
        x: Float[Tensor, "m d"],
        y: Float[Tensor, "m q"],
        symbol: Symbol,
        *,
        noise: float | Float[Tensor, "q"] | Float[Tensor, "q q"],
    ) -> "VectorFieldGP":
        """Add observations of a symbol of the field: anything linear is data.

        A tide gauge reads the potential, a wall has no flow across it (`Component(normal)`, or
        directions= in `fit`), a box without sources has no divergence. They enter the one posterior
        together with the readings of the field, and `fit()` learns from both; `statistics`, and
        `compare_with_exact`, are of the field's readings alone, and `condition(x, y)` and
        `fit(x, y)` begin anew. Rows are written out: meant for up to some thousands.

        Args:
            x: (m, d), the points.
            y: (m, q), or (m,) for a symbol with one output.
            symbol: what is observed of the field, its mean included; potentials need a reference.
            noise: the known variance of the noise, one for all outputs, for each, or a covariance.

        Raises:
            RuntimeError: a model without readings of the field.
            ValueError: shapes that do not fit, a symbol that does not exist for the kernel, a noise
                that is not positive. The model keeps what it has.

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
        held.inference.left_out(symbol, self.kernel, symbol_data.space)  # refuses, on a grid
        state = held.current(self.kernel, self._every_likelihood).holding(
            held.data.observing(symbol_data)
        )
        return self._assign_whole(state)

    @property
    @chosen_threads()
    def statistics(self) -> FieldStatistics:
        """The sufficient statistics of the data, on a lattice that serves lengthscales from 0.7 to
        1.4 times the present ones and a domain a quarter wider than the data on each side."""
        return self.state.statistics_only().field_statistics

    @chosen_threads()
    def statistics_of(
        self,
        x: object,
        y: object = None,
        **how: object,
    ) -> FieldStatistics:
        """Those of other data, to add to `statistics`, or to take away; arguments as for `fit`.

        The model is not changed. Workers on copies of one model make parts that merge exactly.
        Under Student-t noise, readings that are among those the model holds have the weights they
        were given there, so that taking them away leaves nothing of them; all others, and all once
        only statistics are held, are weighed by the field as it is.
        """
        options, state = Options(**how), self.state
        sums = state.statistics_only()
        new = state.weighted(self.copied(x, y, options), state.data)
        sums.require(new.box)
        return new.statistics(sums.field_statistics.phi)

    @chosen_threads()
    def log_marginal_likelihood(self) -> Float[Tensor, ""]:
        """log p(y), total nats, without priors; differentiable in the hyperparameters.

        Under Student-t noise, a lower bound of it; without derivative where only the statistics of
        random features are held.
        """
        state = self.state
        moving = isinstance(state.data, StatisticsOnly) and not isinstance(
            state.data.field_statistics.phi, LatticeColumns
        )
        with torch.set_grad_enabled(torch.is_grad_enabled() and not moving):
            return state.log_marginal_likelihood()

    @chosen_threads()
    def posterior(self) -> FieldPosterior:
        """The field given the data."""
        return FieldPosterior(self._snapshot())

    @chosen_threads()
    def leave_one_out(
        self,
        x: object,
        y: object,
        **how: object,
    ) -> LeaveOneOut:
        """How each reading fits the field that all others give; arguments as for `fit`.

        In closed form, from one posterior (Rasmussen & Williams 2006, eqs. 5.10–5.12, for vectors):
        the hyperparameters and the mean are those of all data. The readings must be among those the
        model was conditioned on; under Student-t noise their weights are those they were given
        there, and where only statistics are held, those the field as it is would give.

        Example:
            >>> import gp_orff, torch
            >>> x = torch.rand(200, 2, generator=torch.Generator().manual_seed(0))
            >>> y = torch.stack([torch.sin(3 * x[:, 1]), torch.sin(3 * x[:, 0])], dim=-1)
            >>> y[7] = -y[7]  # a bad vector
            >>> kernel = gp_orff.DivergenceFreeKernel(num_dims=2)
            >>> robust = gp_orff.MultitaskStudentTLikelihood(num_tasks=2)
            >>> model = gp_orff.VectorFieldGP(kernel, likelihood=robust)
            >>> found = model.fit(x, y, progress=False).leave_one_out(x, y)
            >>> torch.nonzero(found.p_value < 1e-3).flatten()
            tensor([7])
        """
        snapshot, state = self._snapshot(), self.state
        data = self._read(x, y, Options(**how))
        pairs = zip(data.visit(), state.weighted(data, state.data).visit(), strict=True)
        known = (snapshot.own, snapshot.noises, snapshot.constant)
        return leave_one_out(pairs, len(x), state.e_step.heavy_tailed, *known)


def _warn_of_constant(count: int) -> None:
    warnings.warn(
        f"expected data that vary, got {count} readings that are all the same: they tell neither "
        "the noise nor the kernel, whose hyperparameters stay as they are; set them, and call "
        "condition(x, y)",
        DataWarning,
        stacklevel=3,
    )
