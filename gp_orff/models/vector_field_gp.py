"""`VectorFieldGP`: a vector field learned from data, with uncertainty."""

import os
import time
import warnings
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from gpytorch.constraints import GreaterThan
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import GaussianLikelihood, Likelihood
from gpytorch.means import Mean
from jaxtyping import Float
from torch import Tensor
from tqdm import tqdm

from gp_orff.data.dataset import MOST_KEPT, Data, HeldData, HeldSums
from gp_orff.data.field_statistics import FieldStatistics
from gp_orff.data.noise.covariances import Noises, noise_of, noises_of
from gp_orff.data.noise.groups import group_noise
from gp_orff.data.noise.likelihoods import Instruments
from gp_orff.data.observations import SymbolObservations
from gp_orff.data.patterns import DEFAULT, GroupKey, LineOfSight
from gp_orff.data.reading import Options
from gp_orff.data.sources import Arrays, Chunks, Reader, base_means, is_constant
from gp_orff.data.survey import DataWarning
from gp_orff.features.domain import Box, box_of
from gp_orff.features.frequencies.auto import Auto
from gp_orff.features.frequencies.grid import MOST_FEATURES, Grid
from gp_orff.features.frequencies.rule import Rule
from gp_orff.features.lattice import LatticeColumns
from gp_orff.inference.conditioning import (
    FeatureInference,
    Inference,
    log_marginal_likelihood,
)
from gp_orff.inference.robust import LeaveOneOut, leave_one_out
from gp_orff.kernels.tree import terms
from gp_orff.models.defaults import check_mean, default_likelihood, default_mean, is_trained
from gp_orff.models.field_posterior import FieldPosterior
from gp_orff.models.fitting.starting_values import start_noise, with_amplitude
from gp_orff.models.fitting.strategy import Fit, silent
from gp_orff.models.frozen_model import Snapshot
from gp_orff.models.storage import files
from gp_orff.models.storage.pack import pack_data, pack_statistics, unpack_data, unpack_statistics
from gp_orff.models.storage.recipes import build, build_rule, describe, describe_rule
from gp_orff.models.threads import chosen_threads
from gp_orff.symbols.base import Symbol

_KIND = "gp_orff.VectorFieldGP"
_NOTHING_LEFT = 0.9  # of the variance missing: a grid for points far away that is of no use


class VectorFieldGP(torch.nn.Module):
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

    def __init__(
        self,
        kernel: Kernel,
        *,
        likelihood: Likelihood | None = None,
        mean: Mean | None = None,
        frequencies: Rule | None = None,
    ):
        super().__init__()
        if not isinstance(kernel, Kernel):
            raise TypeError(
                f"VectorFieldGP expects an instance of a gpytorch kernel, got {kernel!r}; for "
                "instance VectorFieldGP(gp_orff.HelmholtzKernel(num_dims=2))"
            )
        frequencies = Auto() if frequencies is None else frequencies
        if isinstance(frequencies, type) or not hasattr(frequencies, "draw"):
            raise TypeError(
                f"VectorFieldGP expects a frequency rule, got {frequencies!r}; for instance "
                "gp_orff.Auto()"
            )
        outputs = sorted({term.num_outputs for term in terms(kernel)})
        if len(outputs) != 1:
            raise ValueError(
                f"VectorFieldGP expects terms with one number of outputs, got {outputs}; wrap "
                "scalar kernels in gpytorch.kernels.MultitaskKernel"
            )
        self.num_outputs = outputs[0]
        self.kernel = with_amplitude(kernel)
        self.likelihood = default_likelihood(self.num_outputs) if likelihood is None else likelihood
        self.mean = default_mean(self.num_outputs) if mean is None else mean
        self.frequencies = frequencies
        self.likelihoods = Instruments()  # that have a name
        self._fit: Fit | None = None
        self._observations: Inference | None = None
        self._last: tuple[list[Tensor], _Snapshot] | None = None
        self._reserve: tuple[Data, list[Tensor], HeldSums] | None = None
        self._story: list[str] = []
        self.double()
        noise_of(self.likelihood, self.num_outputs)  # raises for what is not known
        check_mean(self.mean, self.num_outputs)

    @property
    def report(self) -> str:
        """What was done to the data, and what is held, in words."""
        if self._fit is None:
            return "not fitted: call fit(x, y) or condition(x, y)"
        snapshot = self._snapshot()
        return "\n".join(
            [
                f"{self._story[0]}: {self._fit.data.describe()}",
                *self._fit.notes,
                self._observations.describe(self.kernel),
                f"log marginal likelihood {snapshot.log_marginal_likelihood:.2f} nats",
                *_hyperparameters(self),
            ]
        )

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
            data = self._held().data
            warm_start = warm_start or isinstance(data, HeldSums)
            prepare = partial(self._fit_of, data)
        else:
            how = Options(variances, directions, group, missing)
            prepare = partial(self._prepare, x, y, how)
        began, before = time.perf_counter(), self._state()
        with (
            chosen_threads() as threads,
            tqdm(disable=not progress, unit=" evaluations", mininterval=0.5) as bar,
        ):

            def show(stage: str, nats: float) -> None:
                bar.set_description_str(f"{stage} ", refresh=False)
                bar.set_postfix({"nats per number": f"{nats:.4f}"}, refresh=False)
                bar.update()

            try:
                fit = prepare(show)
                if fit.data.varies:
                    fit.run(warm_start)
                else:
                    _warn_of_constant(fit.data.survey.num_points)
                self._accept(fit)
                self._snapshot()
            except BaseException:
                self._restore(before)
                raise
        self._story = [f"fitted in {time.perf_counter() - began:.1f} s with {threads}"]
        return self

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
        before = self._state()
        try:
            if isinstance(x, FieldStatistics):
                fit = self._fit_of(replace(self._sums(), sums=self._own(x), further=()))
            else:
                fit = self._prepare(x, y, Options(**how))
                fit.set_far_points_aside()
                fit.weigh()
            self._accept(fit)
            self._snapshot()
        except BaseException:
            self._restore(before)
            raise
        self._story = ["conditioned"]
        return self

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
        fit, before = self._held(), self._state()
        self._conditioned()
        try:
            if isinstance(x, FieldStatistics):
                sums = self._sums()
                merged = self._fit_of(replace(sums, sums=sums.sums + self._own(x)))
                merged.mean = fit.mean
                self._accept(merged)
            else:
                new = self._prepare(x, y, Options(**how))
                self._add(fit, self._weighed(new.data))
        except BaseException:
            self._restore(before)
            raise
        return self

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
        fit, before = self._held(), self._state()
        try:
            if not is_constant(self.mean):
                raise NotImplementedError(
                    "observations of symbols expect a constant mean, got "
                    f"{type(self.mean).__name__}: make the trend a term of the kernel"
                )
            further = SymbolObservations.of(self.kernel, fit.data.num_inputs, x, y, symbol, noise)
            self._observations.left_out(symbol, self.kernel, further.space)  # refuses, on a grid
            data = fit.data.observing(further)
            self._accept(replace(fit, data=data, notes=list(fit.notes)))
            self._snapshot()
        except BaseException:
            self._restore(before)
            raise
        return self

    @property
    def statistics(self) -> FieldStatistics:
        """The sufficient statistics of the data, on a lattice that serves lengthscales from 0.7 to
        1.4 times the present ones and a domain a quarter wider than the data on each side."""
        return self._sums().sums

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
        options = Options(**how)
        sums, before = self._sums(), self._state()
        try:
            new = self._weighed(self._prepare(x, y, options).data, self._fit.data)
        finally:
            self._restore(before)
        sums.require(new.box)
        return new.statistics(sums.sums.phi)

    @chosen_threads()
    def log_marginal_likelihood(self) -> Float[Tensor, ""]:
        """log p(y), total nats, without priors; differentiable in the hyperparameters.

        Under Student-t noise, a lower bound of it; without derivative where only the statistics of
        random features are held.
        """
        fit, observations = self._conditioned()
        moving = isinstance(fit.data, HeldSums) and not isinstance(
            fit.data.sums.phi, LatticeColumns
        )
        with torch.set_grad_enabled(torch.is_grad_enabled() and not moving):
            return log_marginal_likelihood(observations, self.kernel, self._instruments, fit.mean)

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
            >>> kernel = gp_orff.HelmholtzKernel(num_dims=2)
            >>> robust = gp_orff.MultitaskStudentTLikelihood(num_tasks=2)
            >>> model = gp_orff.VectorFieldGP(kernel, likelihood=robust)
            >>> found = model.fit(x, y, progress=False).leave_one_out(x, y)
            >>> torch.nonzero(found.p_value < 1e-3).flatten()
            tensor([7])
        """
        snapshot, before = self._snapshot(), self._state()
        try:
            data = self._read(x, y, Options(**how))
            weighed = self._weighed(data, self._fit.data)
        finally:
            self._restore(before)
        pairs = zip(data.visit(), weighed.visit(), strict=True)
        known = (snapshot.own, snapshot.noises, snapshot.constant)
        return leave_one_out(pairs, len(x), snapshot.fit.tails, *known)

    def save(self, path: str | os.PathLike) -> None:
        """Everything to one file, that `torch.load(path, weights_only=True)` reads too: few data as
        they are, others as their `statistics`, from which a loaded model predicts, is updated and
        learns again. The old file, if there is one, stays whole until the new one is.
        """
        content = {
            "kernel": describe(self.kernel),
            "likelihood": describe(self.likelihood),
            "likelihoods": {label: describe(own) for label, own in self.likelihoods.items()},
            "mean": describe(self.mean),
            "frequencies": describe_rule(self.frequencies),
            "fit": None,
        }
        if self._fit is not None:
            fit, observations = self._conditioned()
            exact = not isinstance(observations, FeatureInference)
            few = exact or observations.written_out(self.kernel)
            known = None if exact else pack_statistics(observations.statistics_of(self.kernel))
            content["fit"] = {
                "story": list(self._story),
                "notes": list(fit.notes),
                "mean": fit.mean,
                "choice": describe_rule(fit.choice),
                "exact": exact,
                "conditioned_by": describe_rule(fit.conditioned_by),
                "known": known,
                "data": pack_data(fit.data if few else self._sums()),
            }
        files.write(path, _KIND, content)

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
        """A model as it was saved, on the CPU.

        Args:
            kernel, likelihood, mean, frequencies: built as they were for the saved model, where
                their classes, constraints or priors are not gpytorch's or this package's.

        Raises:
            FileNotFoundError: no file.
            ValueError: a file that is damaged, or newer than this package; a kernel that the file
                cannot name and that is not given, or another one than was saved.
        """
        found = files.read(path, _KIND)
        given = None if kernel is None else with_amplitude(kernel)
        model = cls(
            build(found["kernel"], given, "kernel"),
            likelihood=build(found["likelihood"], likelihood, "likelihood"),
            mean=build(found["mean"], mean, "mean"),
            frequencies=build_rule(found["frequencies"], frequencies),
        )
        for label, described in found["likelihoods"].items():
            model.likelihoods[label] = build(described, None, "likelihood")
        own = found["fit"]
        if own is not None:
            fit = model._fit_of(unpack_data(own["data"]))
            fit.notes, fit.mean = own["notes"], own["mean"]
            choice, by = own["choice"], own["conditioned_by"]
            known = None if own["known"] is None else unpack_statistics(own["known"])
            rules = [None, None]
            if not own["exact"]:
                rules = [build_rule(rule, None if rule else frequencies) for rule in (choice, by)]
            observations = fit.resumed(*rules, known)
            model._accept(fit, observations)
            model._story = own["story"]
        return model

    @property
    def _instruments(self) -> dict[str, Likelihood]:
        return {DEFAULT: self.likelihood, **self.likelihoods}

    def _held(self) -> Fit:
        if self._fit is None:
            raise RuntimeError("the model has no data yet: call fit(x, y) or condition(x, y) first")
        return self._fit

    def _prepare(
        self, x: object, y: object, how: Options, show: Callable[..., None] = silent
    ) -> Fit:
        """A fit of data, with a copy of those that are small."""
        data = self._read(x, y, how)
        if y is not None and data.size <= MOST_KEPT:
            data = data.kept()
        return self._fit_of(data, show)

    def _read(self, x: object, y: object, how: Options) -> HeldData:
        """Data that have been looked at once, and their instruments."""
        self.double()
        reader = Reader(self.kernel, self.mean, self.num_outputs)
        source = Chunks(reader, x, how) if y is None else Arrays(reader, x, y, how)
        seen = 0 if self._fit is None else self._fit.data.survey.num_points
        data = HeldData.of(source, seed=seen)
        for key in data.keys:
            self._meet(key)
        return data

    def _meet(self, key: GroupKey) -> None:
        """A likelihood for an instrument that is new: Σ is that of the model's own, beside which
        variances are understood."""
        if key.label in self._instruments:
            return
        likelihood = self.likelihood
        if isinstance(key.pattern, LineOfSight):
            likelihood = GaussianLikelihood(noise_constraint=GreaterThan(0.0))
            variance = noise_of(self.likelihood, self.num_outputs).diagonal().mean()
            start_noise(likelihood, variance.item())
        self.likelihoods[key.label] = deepcopy(likelihood).to(next(self.kernel.parameters()))

    def _fit_of(self, data: Data, show: Callable[..., None] = silent) -> Fit:
        fixed, means = None, base_means(self.mean)
        if not is_trained(self.mean):
            fixed = torch.zeros(self.num_outputs).to(next(self.kernel.parameters()))
            if is_constant(self.mean) and len(means) == self.num_outputs:
                constants = [getattr(m, "constant", fixed[0]).detach() for m in means]
                fixed = torch.stack([value.reshape(()) for value in constants])
        return Fit(self.kernel, self._instruments, fixed, self.frequencies, data, show)

    def _add(self, fit: Fit, new: HeldData) -> None:
        """What is new, beside what there is."""
        if isinstance(fit.data, HeldSums):
            fit.data.require(new.box)
            data = fit.data + new
        else:
            data = fit.data + new.counted()
            if data.held > MOST_KEPT:
                data = replace(fit, data=data).sums()
        notes, instruments = list(fit.notes), self._instruments
        fit = replace(fit, data=data, notes=notes, likelihoods=instruments)
        self._accept(fit, fit.grown(self._observations, new))

    def _weighed(self, data: HeldData, held: Data | None = None) -> HeldData:
        """Data, under Student-t noise with the weights they have among those held; others with
        weights from the field as it is."""
        fit, observations = self._conditioned()
        fit = replace(fit, data=data, likelihoods=self._instruments)
        return fit.weighed_by(observations, held)

    def _own(self, statistics: FieldStatistics) -> FieldStatistics:
        """Statistics that this model can take, with instruments for their groups."""
        sums = self._sums()
        if not sums.sums.phi.same(statistics.phi):
            raise ValueError(
                "expected statistics of this model's frequencies, got those of others; make them "
                "with statistics_of(x, y) of this model, or of a copy of it"
            )
        if not statistics.num_values > 0:
            raise ValueError("expected statistics of at least one reading, got those of none")
        for key in statistics.groups:
            self._meet(key)
        return statistics

    @chosen_threads()
    def _sums(self) -> HeldSums:
        """Statistics in the place of the data."""
        fit, now = self._held(), self._hyperparameters
        known = self._reserve is not None and self._reserve[0] is fit.data
        if not known or not all(map(torch.equal, now, self._reserve[1])):
            self._reserve = fit.data, [p.detach().clone() for p in now], fit.sums()
        return self._reserve[2]

    def _accept(self, fit: Fit, observations: Inference | None = None) -> None:
        fit.progress = silent
        for key in fit.data.keys:
            group_noise(key, noises_of(self.kernel, self._instruments))  # raises
        observations = fit.observations() if observations is None else observations
        observations.prepare()
        self._fit, self._observations, self._last = fit, observations, None

    def _conditioned(self) -> tuple[Fit, Inference]:
        """The data under the hyperparameters as they are now."""
        fit = self._held()
        if isinstance(self._observations, FeatureInference) and self._observations.stale(
            self.kernel
        ):
            self._observations = fit.observations()
        return fit, self._observations

    def _snapshot(self) -> "_Snapshot":
        """Of the model as it is now; the constant mean is brought up to date."""
        fit, observations = self._conditioned()
        now = self._hyperparameters
        if self._last is None or not all(map(torch.equal, now, self._last[0])):
            snapshot = _Snapshot.of(self, fit, observations)
            if is_trained(self.mean):
                for own, value in zip(base_means(self.mean), snapshot.constant, strict=True):
                    own.initialize(constant=value)
            self._last = [p.detach().clone() for p in now], snapshot
        return self._last[1]

    @property
    def _hyperparameters(self) -> list[Tensor]:
        modules = (self.kernel, self.likelihood, self.likelihoods)
        return [parameter for module in modules for parameter in module.parameters()]

    def _state(self) -> tuple[list[Tensor], list[str], dict]:
        """All that a call may change."""
        parameters = [parameter.detach().clone() for parameter in self.parameters()]
        own = {name: getattr(self, name) for name in ("_fit", "_observations", "_last", "_story")}
        return parameters, list(self.likelihoods), own

    def _restore(self, state: tuple[list[Tensor], list[str], dict]) -> None:
        parameters, known, own = state
        for label in set(self.likelihoods) - set(known):
            del self.likelihoods[label]
        for parameter, value in zip(self.parameters(), parameters, strict=True):
            parameter.data.copy_(value)
        for name, value in own.items():
            setattr(self, name, value)

    def _apply(self, fn, recurse=True):
        """`.to(device)` moves the data too."""
        before = next(self.kernel.parameters()).device
        super()._apply(fn, recurse)
        device = next(self.kernel.parameters()).device
        if self._fit is not None and device != before:
            self._fit.data = self._fit.data.to(device)
            if self._fit.mean is not None:
                self._fit.mean = self._fit.mean.to(device)
            self._accept(self._fit)
            self._reserve = None
        return self


@dataclass(frozen=True)
class _Snapshot(Snapshot):
    fit: Fit
    observations: Inference
    noises: Noises
    prior_mean: Mean

    @classmethod
    def of(cls, model: VectorFieldGP, fit: Fit, observations: Inference) -> "_Snapshot":
        instruments = model._instruments
        kernel, likelihoods, mean = (
            deepcopy(part) for part in (model.kernel, instruments, model.mean)
        )
        for module in (kernel, mean, *likelihoods.values()):
            module.requires_grad_(False)
        frozen = replace(fit, kernel=kernel, likelihoods=likelihoods)
        return cls(frozen, observations, noises_of(kernel, likelihoods), mean)

    @property
    def kernel(self) -> Kernel:
        return self.fit.kernel

    @property
    def given(self) -> Float[Tensor, "p"] | None:
        return self.fit.mean

    @property
    def num_inputs(self) -> int:
        return self.fit.data.num_inputs

    @property
    def log_marginal_likelihood(self) -> float:
        values, bound = self.observations.num_values, self.fit.data.bound
        return (self.own.evidence.log_density(self.constant, values) + bound).item()

    def by_features(self, points: Float[Tensor, "n d"]) -> Inference:
        rule = Grid(data=self.fit.data.box, max_features=MOST_FEATURES)
        return _wider(replace(self.fit, rule=rule, choice=None, _chosen=False, notes=[]), points)

    def elsewhere(self, points: Float[Tensor, "n d"]) -> Inference:
        observations = _wider(self.fit, points)
        if not observations.covers(self.kernel, points):  # a grid by hand, or statistics alone
            observations.draws[0].lattice.check(points)
        return observations


def _warn_of_constant(count: int) -> None:
    warnings.warn(
        f"expected data that vary, got {count} readings that are all the same: they tell neither "
        "the noise nor the kernel, whose hyperparameters stay as they are; set them, and call "
        "condition(x, y)",
        DataWarning,
        stacklevel=3,
    )


def _wider(fit: Fit, points: Float[Tensor, "n d"]) -> Inference:
    """The data, on frequencies that serve these points too."""
    box = fit.data.box
    try:
        wider = fit.observations(_around(box, points))
    except ValueError as error:  # no grid of this size within the budget
        raise ValueError(_far(box, box_of(points))) from error
    if wider.missing > max(_NOTHING_LEFT, fit.observations().missing):
        raise ValueError(_far(box, box_of(points)))
    return wider


def _far(data: Box, asked: Box) -> str:
    """In which column the points asked for are farthest from the data."""
    extent, both = (
        np.ptp(np.concatenate(boxes, axis=-1), axis=-1) for boxes in ([data], [data, asked])
    )
    least = 1e-9 * both.max() + np.finfo(float).tiny
    column = np.argmax(both / np.maximum(extent, least))
    (low, high), (first, last) = data[column], asked[column]
    return (
        f"expected points near the data, got column {column} from {first:.6g} to {last:.6g} where "
        f"the data are between {low:.6g} and {high:.6g}: no frequency grid serves both; check the "
        "units and the order of the columns, or predict nearer by"
    )


def _around(box: Box, points: Tensor) -> Box:
    """The box of data and points, a little larger: the next points will come from near by."""
    corners = torch.tensor(box, dtype=points.dtype, device=points.device).mT
    both = box_of(torch.cat([corners, points]))
    return tuple((low - 0.1 * (high - low), high + 0.1 * (high - low)) for low, high in both)


_NAMES = {"raw_noise": "noise variance", "noise_covar.raw_noise": "noise variance"}


def _hyperparameters(model: VectorFieldGP) -> list[str]:
    present = {key.label for key in model._held().data.keys}
    noises = [(label, own) for label, own in model._instruments.items() if label in present]
    lines = []
    for label, module in [("", model.kernel), *noises, ("", model.mean)]:
        for name, parameter, constraint in module.named_parameters_and_constraints():
            value = parameter if constraint is None else constraint.transform(parameter)
            numbers = np.array2string(
                value.detach().cpu().numpy().reshape(-1), precision=5, separator=", ", threshold=12
            )
            words = _NAMES.get(name, name.replace("raw_", ""))
            lines.append(f"{label}: {words} = {numbers}" if label else f"{words} = {numbers}")
    return lines
