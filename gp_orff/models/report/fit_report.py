"""What was done to the data and what came of it: numbers, and words for them."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import partial

import numpy as np
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import Likelihood

from gp_orff.data.noise.covariances import noises_of
from gp_orff.models.fitting.history import History, Stage
from gp_orff.models.frozen_model import ModelSnapshot
from gp_orff.models.report.approximation import Approximation
from gp_orff.models.report.contents import (
    Numbers,
    as_numbers,
    constant_mean,
    data_attributes,
    hyperparameter_values,
    mean_values,
    noise_variances,
)
from gp_orff.models.report.standard_errors import Curvature
from gp_orff.models.report.words import plain, table, with_error

_PATIENCE = 10.0  # seconds that words may take for standard errors


@dataclass(frozen=True, eq=False)
class Estimate:
    """A hyperparameter, in the user's units.

    Attributes:
        value: a float, or an array where there are several of the name.
    """

    value: Numbers
    _error: Callable[[], Numbers] = field(repr=False)

    @property
    def standard_error(self) -> Numbers:
        """Of the same shape; NaN where there is none. Computed when it is first asked for."""
        return self._error()


@dataclass(frozen=True, eq=False)
class FitReport:
    r"""What a `VectorFieldGP` holds and how it came to it; `print` gives it in words.

    It stays true of the model as it was when it was asked for, whatever becomes of the model. Like
    a `FieldPosterior` it holds on to the data; what `to_dict` gives does not.

    Standard errors follow from the curvature of the log evidence, and of the log priors, in the
    coordinates u of the search (logarithms of positive parameters, logits of those in an interval),

        sd(θ_i) = |∂θ_i/∂u_i| √((−H)⁻¹)_ii ,    H = ∂² log p(y) / ∂u² ,

    at the best constant mean (Mardia & Marshall 1984, *Maximum likelihood estimation of models for
    residual covariance in spatial regression*, §3, with the observed information). They take two
    evaluations of the evidence for every number that was learned, and are computed when they are
    first asked for; `print` shows them where they take less than 10 seconds. They are NaN for what
    was not learned from these data: after `condition`, `update` and `observe`, for frozen
    hyperparameters, those at a bound, and those that the evidence does not tell; `remarks` says
    more.

    Attributes:
        action: what was done last: "fitted", "conditioned", "updated", "observed"; "not fitted"
            for a model without data.
        method: what represents the kernel: "exact", "grid", "quadrature", "random"; "none".
        features: F; None for the exact kernel.
        tolerance_reached: of the grid, after its budget; None without one.
        aliasing: of the grid, as a share of the prior variance; None without one.
        share_cut: of the prior variance, what the grid leaves out; None without one.
        cut_over_noise: the same variance over that of the noise, in the group of least noise.
        points: N.
        numbers: that were observed, of symbols too: N·p and theirs.
        held: "data", "statistics", or "nothing".
        observed: how many numbers of each symbol, by its name.
        evidence: log p(y), total nats, without priors, a lower bound of it under Student-t noise;
            NaN without data.
        noise: variances by group, one for all components or one for each; readings that name no
            group are under "default".
        hyperparameters: `Estimate`s by names such as `curl_free.lengthscale`, `noise` or
            `adcp.noise`, and `mean`, the constant one. A name is that of gpytorch's parameter,
            after those branches of the kernel that tell it from others: a branch is called after
            its kind, with a number where there are several of a kind.
        stages: of the last fit: name, evaluations, seconds, nats_per_number.
        seconds: of the last fit, all that it did.
        threads: the most that it used.
        notes: decisions and warnings, in words.

    Example:
        >>> import gp_orff, torch
        >>> x = torch.rand(60, 2, generator=torch.Generator().manual_seed(0)).double()
        >>> y = torch.stack([torch.cos(4 * x[:, 0]), torch.cos(4 * x[:, 1])], dim=-1)
        >>> y = y + 0.1 * torch.randn(60, 2, generator=torch.Generator().manual_seed(1))
        >>> model = gp_orff.VectorFieldGP(gp_orff.CurlFreeKernel(num_dims=2))
        >>> report = model.fit(x, y, progress=False).report
        >>> report.action, report.method, report.points, report.numbers
        ('fitted', 'exact', 60, 120)
        >>> list(report.hyperparameters)
        ['outputscale', 'lengthscale', 'noise', 'mean']
        >>> noise = report.hyperparameters["noise"]
        >>> abs(noise.value - 0.1**2) < 3 * noise.standard_error
        True
        >>> sum(stage["evaluations"] for stage in report.to_dict()["stages"]) > 0
        True
    """

    action: str
    method: str
    features: int | None
    tolerance_reached: float | None
    aliasing: float | None
    share_cut: float | None
    cut_over_noise: float | None
    points: int
    numbers: float
    held: str
    observed: dict[str, int]
    evidence: float
    noise: dict[str, Numbers]
    hyperparameters: dict[str, Estimate]
    stages: tuple[Stage, ...]
    seconds: float | None
    threads: int | None
    notes: tuple[str, ...]
    _curvature: Curvature | None = field(default=None, repr=False)

    @classmethod
    def of(cls, snapshot: ModelSnapshot, history: History, trained: frozenset[str]) -> "FitReport":
        """Of a model with data; `trained` are the names of what a fit learns."""
        own = snapshot.representation
        present = {key.label for key in own.data.keys}
        learned = trained if history.action == "fitted" else frozenset()
        curvature = Curvature(snapshot, learned)
        values = hyperparameter_values(snapshot.kernel, own.likelihoods, present)
        estimates = {n: Estimate(v, partial(_error, curvature, n, v)) for n, v in values.items()}
        constant, error = constant_mean(snapshot)
        noises = {label: found for label, found in snapshot.noises.items() if label in present}
        return cls(
            **_of_history(history),
            **asdict(Approximation.of(snapshot)),
            **data_attributes(own.data),
            evidence=snapshot.log_marginal_likelihood,
            noise=noise_variances(noises),
            hyperparameters={
                **estimates,
                **_without_error(mean_values(snapshot.prior_mean)),
                "mean": Estimate(constant, partial(_known, error)),
            },
            _curvature=curvature,
        )

    @classmethod
    def without_data(cls, kernel: Kernel, likelihoods: Mapping[str, Likelihood]) -> "FitReport":
        """Of a model as it was made."""
        return cls(
            **_of_history(History("not fitted")),
            **asdict(Approximation("none")),
            points=0,
            numbers=0,
            held="nothing",
            observed={},
            evidence=float("nan"),
            noise=noise_variances(noises_of(kernel, likelihoods)),
            hyperparameters=_without_error(hyperparameter_values(kernel, likelihoods, likelihoods)),
        )

    def standard_errors(self) -> dict[str, Numbers]:
        """Of all hyperparameters by name, however long it takes."""
        return {name: own.standard_error for name, own in self.hyperparameters.items()}

    @property
    def remarks(self) -> tuple[str, ...]:
        """Where standard errors are missing or to be doubted, in words. Computes them."""
        return () if self._curvature is None else self._curvature.standard_errors.remarks

    def to_dict(self) -> dict[str, object]:
        """All of it as plain values, of which `json.dumps` makes a line of a log: dicts, lists,
        strings, numbers, and None for NaN. Standard errors included, however long they take."""
        found = {own.name: getattr(self, own.name) for own in fields(self)}
        del found["_curvature"]
        found["hyperparameters"] = {
            name: {"value": own.value, "standard_error": own.standard_error}
            for name, own in self.hyperparameters.items()
        }
        found["stages"] = [asdict(own) for own in self.stages]
        found["remarks"] = self.remarks
        return plain(found)

    def __str__(self) -> str:
        if self.held == "nothing":
            return "not fitted: call fit(x, y) or condition(x, y)"
        blocks = [
            [self._done, str(Approximation(**self._approximation)), self._evidence],
            self._stages,
            self._hyperparameters,
            list(self.notes),
        ]
        return "\n\n".join("\n".join(lines) for lines in blocks if lines)

    @property
    def _done(self) -> str:
        """What was done, to what."""
        took = ""
        if self.seconds is not None:
            threads = f" with {self.threads} thread{'s' * (self.threads > 1)}"
            took = f" in {self.seconds:.1f} s{threads}"
            took = took if self.action == "fitted" else f" after a fit{took}"
        symbols = "".join(f", {count} of {name}" for name, count in self.observed.items())
        held = "the data" if self.held == "data" else "their statistics, no data"
        many = f"{self.points} points, {self.numbers:.12g} numbers{symbols}"
        return f"{self.action}{took}: {many}; held: {held}"

    @property
    def _approximation(self) -> dict[str, object]:
        return {own.name: getattr(self, own.name) for own in fields(Approximation)}

    @property
    def _evidence(self) -> str:
        return f"log marginal likelihood {self.evidence:.2f} nats"

    @property
    def _stages(self) -> list[str]:
        rows = [
            (own.name, str(own.evaluations), f"{own.seconds:.1f}", f"{own.nats_per_number:.5f}")
            for own in self.stages
        ]
        return (
            table([("stage", "evaluations", "seconds", "nats per number"), *rows]) if rows else []
        )

    @property
    def _hyperparameters(self) -> list[str]:
        """With standard errors where they do not take long."""
        known = self._seconds_of_errors <= _PATIENCE
        rows = [
            (name, with_error(own.value, own.standard_error if known else None))
            for name, own in self.hyperparameters.items()
        ]
        return [*table(rows, left=2), *(self.remarks if known else self._later)]

    @property
    def _seconds_of_errors(self) -> float:
        """That they will take, as evaluations of the last stage did."""
        curvature = self._curvature
        if curvature is None or curvature.known or not curvature.evaluations:
            return 0.0
        if not self.stages:
            return float("inf")
        last = self.stages[-1]
        return curvature.evaluations * last.seconds / max(last.evaluations, 1)

    @property
    def _later(self) -> tuple[str, ...]:
        seconds = self._seconds_of_errors
        took = f" takes about {seconds:.0f} s" if np.isfinite(seconds) else ""
        return (f"standard errors: report.standard_errors(){took}",)


def _of_history(history: History) -> dict[str, object]:
    return {own.name: getattr(history, own.name) for own in fields(History)}


def _without_error(values: Mapping[str, Numbers]) -> dict[str, Estimate]:
    return {name: Estimate(v, partial(_nothing, v)) for name, v in values.items()}


def _known(error: Numbers) -> Numbers:
    return error


def _nothing(value: Numbers) -> Numbers:
    return as_numbers(np.full_like(value, np.nan))


def _error(curvature: Curvature, name: str, value: Numbers) -> Numbers:
    found = curvature.standard_errors.values.get(name)
    return _nothing(value) if found is None else as_numbers(found)
