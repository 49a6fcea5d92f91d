"""Random models in two forms: as user code with the package, and for the dense oracle.

A seed determines a kernel, noises and a mean; observations in steps, first `condition`, then
`update`, `observe`, `save` and `load` in any order, and on grids also updates by statistics; and
the quantities to compare at the end.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import gpytorch
import numpy as np

import gp_orff
from gp_orff.symbols.base import Composed
from tests.support import dense_oracle as dense
from tests.support.random_priors import (
    Inputs,
    Noise,
    Prior,
    Scalars,
    coregional,
    separable,
    single,
    tensor,
    vectors,
)


@dataclass(frozen=True)
class Question:
    """A linear map of the field, as a symbol of the package and as a functional of the oracle.

    If `symbol` is None, it is the field itself, or the part of the field with the index `part`.
    """

    symbol: gp_orff.Symbol | None
    functional: Callable[[np.ndarray], dense.Functional]
    part: int | None = None
    integral: bool = False

    @property
    def words(self) -> str:
        if self.symbol is None:
            return "field" if self.part is None else f"part {self.part}"
        parts = [self.symbol]
        if isinstance(self.symbol, Composed):
            parts = [self.symbol.outer, self.symbol.inner]
        return " @ ".join(type(own).__name__ for own in parts)


@dataclass
class Twin:
    """A model, the same prior and observations for the oracle, and a text with all steps."""

    rng: np.random.Generator
    prior: Prior
    field: dense.Field
    noises: dict[str, Noise]
    mean: np.ndarray | None
    corner: np.ndarray  # of the unit box that all readings are in
    model: gp_orff.VectorFieldGP
    story: list[str]
    closed_forms: bool  # of the exact kernel alone
    extras: tuple[str, ...]  # further steps
    level: np.ndarray  # of all values: the image of this constant is added to them
    flat: bool  # whether directions are parallel, and vectors have one component
    seen: list[np.ndarray] = field(default_factory=list)
    readings: list[dense.Reading] = field(default_factory=list)
    integrals: bool = False  # whether one was observed
    folder: Path | None = None

    @property
    def p(self) -> int:
        return self.field.num_outputs

    def points(self, n: int) -> np.ndarray:
        """Return random points in the box. Sometimes one of them is a point that was observed
        before."""
        x = self.corner + self.rng.uniform(size=(n, len(self.corner)))
        if self.seen and self.rng.random() < 0.4:
            x[0] = self.seen[-1][0]
        self.seen.append(x)
        return x

    # Readings of the field, as keys of a chunk ----------------------------------------------------

    def chunk(self, n: int) -> dict[str, object]:
        if self.p > 1 and self.rng.random() < 0.3:
            return self._along(n)
        x, y = self.points(n), self.rng.normal(size=(n, self.p))
        labels = self._labels(n)
        covariance = np.stack([self.noises[label].covariance for label in labels])
        given, noise = self._weighted(covariance)
        kept = np.ones((n, self.p), dtype=bool)
        if self.flat:
            kept[:, 1:] = False
        elif self.rng.random() < 0.4:
            kept = self.rng.random((n, self.p)) < 0.7
            kept[0, 0] = True
            self.story[-1] += " with gaps"
        rows = kept.flatten()
        own = self.field.values(x).rows(rows)
        y = y + self.level
        self.readings.append(dense.Reading(own, y[kept], noise[np.ix_(rows, rows)]))
        if any(labels):
            same = len(set(labels)) == 1
            given["group"] = labels[0] if same else [label or None for label in labels]
        return {"x": tensor(x), "y": tensor(np.where(kept, y, np.nan)), **given}

    def _along(self, n: int) -> dict[str, object]:
        """Return random components along directions, as arguments of `condition`.

        They belong to the default group only if the noise of this group is isotropic.
        """
        x, y, u = self.points(n), self.rng.normal(size=n), self.rng.normal(size=(n, self.p))
        if self.flat:
            u = np.tile(np.eye(self.p)[0], (n, 1)) * np.sign(u[:, :1])
        u = u / np.linalg.norm(u, axis=-1, keepdims=True)
        y = y + u @ self.level
        label = "" if self.noises[""].isotropic and self.rng.random() < 0.5 else "radar"
        variance = self.noises[label].covariance[:1, :1]
        given, noise = self._weighted(np.broadcast_to(variance, (n, 1, 1)))
        self.story[-1] += " along directions"
        self.readings.append(dense.Reading(self.field.along(x, u), y, noise))
        given |= {"group": label} if label else {}
        return {"x": tensor(x), "y": tensor(y), "directions": tensor(u), **given}

    def _weighted(self, covariance: np.ndarray) -> tuple[dict[str, object], np.ndarray]:
        """Return random known variances as arguments, and the resulting noise covariance of all
        values."""
        n, v, _ = covariance.shape
        kind, given = self.rng.choice(["none", "(N,)", "(N, p)"]), {}
        self.story[-1] += f"; {n} readings" + f" of variances {kind}" * (kind != "none")
        if kind != "none":
            variances = self.rng.lognormal(size=n if kind == "(N,)" else (n, v))
            given = {"variances": tensor(variances)}
            if variances.ndim == 2:  # of components that are then independent
                covariance = covariance * np.eye(v)
            covariance = covariance * variances.reshape(n, -1, 1)
        noise = np.zeros((n, v, n, v))
        noise[np.arange(n), :, np.arange(n), :] = covariance
        return given, noise.reshape(n * v, n * v)

    def _labels(self, n: int) -> list[str]:
        kind = self.rng.choice(["none", "one", "each"], p=[0.5, 0.25, 0.25])
        if kind == "each":
            return self.rng.choice(["", "B", "C"], n).tolist()
        return ["B" if kind == "one" else ""] * n

    # Steps ----------------------------------------------------------------------------------------

    def run(self, folder: Path) -> "Twin":
        """Condition the model, take random further steps, and return self."""
        rng, self.folder = self.rng, folder
        self.condition()
        steps = ["update"] * rng.integers(0, 3) + ["observe"] * rng.choice(3, p=[0.4, 0.4, 0.2])
        steps += [extra for extra in self.extras if rng.random() < 0.3]
        for step in rng.permutation(steps).tolist():
            getattr(self, step)()
        return self

    def condition(self) -> None:
        self.story.append("condition on")
        chunks = [self.chunk(int(self.rng.integers(3, 7))) for _ in range(self.rng.integers(1, 3))]
        if len(chunks) == 1:
            self.model.condition(**chunks[0], missing="mask", merge=0)
        else:
            self.model.condition(chunks, missing="mask", merge=0)
        self._instruments()

    def update(self) -> None:
        self.story.append("update with")
        self.model.update(**self.chunk(int(self.rng.integers(1, 5))), missing="mask", merge=0)
        self._instruments()

    def merge(self) -> None:
        """Update the model by the statistics of new observations."""
        self.story.append("merge the statistics of")
        chunk = self.chunk(int(self.rng.integers(1, 5)))
        self.model.update(self.model.statistics_of(**chunk, missing="mask"))
        self._instruments()

    def observe(self) -> None:
        """Observe a random symbol, with one variance, with a variance for each output, or with a
        covariance."""
        found = [own for own in self.questions() if own.symbol is not None]
        found = [own for own in found if own.symbol.order >= 0 or own.symbol.reference is not None]
        if not found:
            return
        chosen, x = self._one_of(found), self.points(int(self.rng.integers(1, 4)))
        self.story.append(f"observe {chosen.words}")
        functional = chosen.functional(x)
        q = len(functional) // len(x)
        root = 0.2 * self.rng.normal(size=(q, q))
        covariance = root @ root.T + 0.05 * np.eye(q)
        variances, y = np.diagonal(covariance), self.rng.normal(size=(len(x), q))
        noise, covariance = {
            "one": (variances[0], variances[0] * np.eye(q)),
            "each": (variances, np.diag(variances)),
            "full": (covariance, covariance),
        }[self.rng.choice(["one", "each", "full"])]
        y = y + (functional.constant @ self.level).reshape(y.shape)
        self.model.observe(tensor(x), tensor(y), chosen.symbol, noise=tensor(noise))
        covariance = np.kron(np.eye(len(x)), covariance)
        self.readings.append(dense.Reading(functional, y.flatten(), covariance))
        self.integrals |= chosen.integral

    def save_and_load(self) -> None:
        self.story.append("save, load")
        path = self.folder / "model.pt"
        self.model.save(path)
        self.model = gp_orff.VectorFieldGP.load(path)

    def _instruments(self) -> None:
        """Set the noise of groups that are new in the model."""
        for label, likelihood in self.model.likelihoods.items():
            self.noises[label].given_to(likelihood)

    # Questions ------------------------------------------------------------------------------------

    def asked(self) -> list[Question]:
        """Return the field and one more question."""
        first, *others = self.questions()
        return [first, self._one_of(others)] if others else [first]

    def questions(self) -> list[Question]:
        """Return all linear maps that exist for the prior and that the oracle can compute."""
        rng, own, p, d = self.rng, self.field, self.p, len(self.field.space)
        found = [Question(None, own.values)]
        u, v = rng.normal(size=p), rng.normal(size=p * d)
        component, mixture = gp_orff.Component(u.tolist()), gp_orff.Component(v.tolist())
        found.append(Question(component, lambda x: own.values(x).through(u[None])))
        if self.prior.derivatives >= 2:
            jacobian = gp_orff.Jacobian(None if d == p else d)
            found.append(Question(jacobian, own.jacobian))
            found.append(Question(mixture @ jacobian, lambda x: own.jacobian(x).through(v[None])))
        smooth = set(self.prior.names) <= {"rbf", "rq"}
        if self.prior.derivatives >= 2 or smooth:  # by Gauss nodes
            found += self._of_boxes() + (self._of_paths() if d == p else [])
        if d == p:
            found += self._of_vectors() + self._of_parts()
        return found

    def _of_boxes(self) -> list[Question]:
        own, d = self.field, len(self.field.space)
        widths = tuple(self.rng.uniform(0.1, 0.4 if d < 3 else 0.2, d).tolist())
        if self.closed_forms and d == 3 and not set(self.prior.names) <= {"rbf", "rq"}:
            return []  # seconds
        nodes = {1: 40, 2: 8, 3: 4}[d]
        box = gp_orff.BoxAverage(widths)
        found = [Question(box, partial(own.box, widths=widths, nodes=nodes), integral=True)]
        if not self.closed_forms and d == self.p == 2:
            found.append(Question(gp_orff.Divergence() @ box, partial(own.divergence, box=widths)))
            found.append(Question(gp_orff.Curl() @ box, partial(own.curl, box=widths)))
        return found

    def _of_paths(self) -> list[Question]:
        nodes = 8 if set(self.prior.names) <= {"rbf", "rq", "general"} else 40
        path = 0.2 * self.rng.normal(size=(int(self.rng.integers(2, 4)), self.p))
        corners = tensor(path)
        kinds = [(gp_orff.LineIntegral(corners), self.field.line)]
        if self.p == 2:
            kinds.append((gp_orff.Flux(corners), self.field.flux))
        return [
            Question(symbol, partial(function, path=path, nodes=nodes), integral=True)
            for symbol, function in kinds
        ]

    def _of_vectors(self) -> list[Question]:
        own, found = self.field, []
        if self.prior.derivatives >= 2:
            found.append(Question(gp_orff.Divergence(), own.divergence))
        if self.prior.derivatives >= 2 and self.p > 1:
            found.append(Question(gp_orff.Curl(), own.curl))
        return found

    def _of_parts(self) -> list[Question]:
        """Return the Helmholtz parts, the potentials, and the terms of the kernel."""
        own, p, found = self.field, self.p, []
        roles = {process.role for process in own.processes}
        if "mixed" in roles:
            return found
        reference = self.corner[list(own.space)] + self.rng.uniform(-0.2, 1.2, p)
        background = [None, True, False][len(self.seen) % 3]  # whether the mean belongs to a part
        for role, value, part in (
            ("potential", gp_orff.Potential, gp_orff.CurlFreePart),
            ("stream", gp_orff.StreamFunction, gp_orff.DivergenceFreePart),
        ):
            if role not in roles:
                continue
            chosen = _has(role=role)
            functional = partial(own.part, chosen=chosen, with_mean=bool(background))
            found.append(Question(part(bool(background)), functional))
            if role == "potential" or p == 2:
                process = partial(own.process, role=role, background=background)
                symbol = value(reference, background)
                found.append(Question(symbol, partial(process, reference=reference)))
                if self.closed_forms and p == len(self.corner):
                    found.append(Question(value(None, background), process))
        if "constant" in roles:
            found.append(Question(gp_orff.Background(), self._background))
        terms = range(self.prior.parts) if self.prior.parts > 1 else []
        return found + [Question(None, partial(own.part, chosen=_has(term=i)), i) for i in terms]

    def _background(self, x: np.ndarray) -> dense.Functional:
        """Return the constant terms of the kernel together with the constant mean."""
        return self.field.part(x, _has(role="constant"), with_mean=True)

    def _one_of(self, found: Sequence[Question]) -> Question:
        return found[self.rng.integers(len(found))]


def _has(**wanted: object) -> Callable[[dense.Process], bool]:
    return lambda process: all(getattr(process, name) == w for name, w in wanted.items())


# From seeds ---------------------------------------------------------------------------------------


def exact(seed: int) -> Twin:
    """Return a model under the exact kernel, in one to three dimensions, sometimes with time."""
    rng = np.random.default_rng(seed)
    d = int(rng.choice([1, 2, 3], p=[0.2, 0.5, 0.3]))
    return _twin(
        rng, f"seed {seed}, exact", d, d > 1 and rng.random() < 0.3, Scalars(), ("save_and_load",)
    )


def on_grid(seed: int) -> Twin:
    """Return a model on a fine grid, in one or two dimensions.

    All scalar kernels are of one kind, which a few hundred features represent to rounding.
    """
    rng = np.random.default_rng(seed)
    d = int(rng.choice([1, 2], p=[0.4, 0.6]))
    name = str(rng.choice(["rbf", "rq", "general"])) if d == 1 else "rbf"
    known = Scalars((name,), shortest=1.0, rich=False)
    return _twin(rng, f"seed {seed}, grid", d, False, known, ("save_and_load", "merge"), 1e-9)


def on_large_grid(seed: int) -> Twin:
    """Return a model on a fine grid with three inputs, one of which may be time."""
    rng = np.random.default_rng(seed)
    known = Scalars(("rbf",), when=("rbf",), shortest=1.3, rich=False)
    d = int(rng.integers(2, 4))
    return _twin(rng, f"seed {seed}, large grid", d, d == 2, known, (), 1e-6)


def _twin(
    rng,
    words: str,
    d: int,
    timed: bool,
    known: Scalars,
    extras: tuple[str, ...],
    tolerance: float | None = None,
) -> Twin:
    """Return a model without data, with a random prior, noise and mean."""
    family = rng.choice(["vectors", "separable", "single"], p=[0.65, 0.2, 0.15])
    order, inputs = rng.permutation(d + timed).tolist(), Inputs(tuple(range(d)))
    if family == "vectors":
        inputs = Inputs(tuple(order[:d]), order[d] if timed else None)
        prior, p = vectors(rng, inputs, known), d
    elif family == "separable":
        p = int(rng.integers(2, 4))
        prior = [separable, coregional][rng.integers(2)](rng, inputs, known, p)
    else:
        prior, p = single(rng, inputs, known), 1
    kind = rng.choice(["global", "tasks", "both", "full"]) if p > 1 else "global"
    noises = {label: Noise.draw(rng, kind, p) for label in ("", "B", "C")}
    noises["radar"] = Noise.draw(rng, "global", p)
    mean, module = _mean(rng, p)
    level, flat = _level(words, mean, p)
    corner = rng.choice([0.0, 3.0]) * np.ones(inputs.number)
    model = gp_orff.VectorFieldGP(
        prior.kernel,
        likelihood=noises[""].likelihood(),
        mean=module,
        frequencies=_rule(rng, corner, tolerance),
    )
    if rng.random() < 0.5:
        model.likelihoods["B"] = noises["B"].likelihood()
    where = f"space {inputs.space}" + f", time {inputs.time}" * (inputs.time is not None)
    about = f"noise {kind}, mean {mean if mean is None else mean.round(2).tolist()}"
    return Twin(
        rng,
        prior,
        dense.Field(prior.processes, p, inputs.space),
        noises,
        mean,
        corner,
        model,
        [f"{words}, {where}: {prior.words}", f"{about}, level {level.round(1)}" + ", flat" * flat],
        closed_forms=tolerance is None,
        extras=extras,
        level=level,
        flat=flat,
    )


def _level(words: str, mean: np.ndarray | None, p: int) -> tuple[np.ndarray, bool]:
    """Return a constant that is added to all values, and whether all observations are along one
    direction.

    The constant is zero if the mean is known.
    """
    rng = np.random.default_rng(list(words.encode()))  # leaves all else as it was
    size = rng.choice([0.0, 10.0, 290.0, 1e4]) if mean is None else 0.0
    return size * rng.uniform(0.5, 1.0, p), bool(mean is None and p > 1 and rng.random() < 0.2)


def _mean(rng, p: int) -> tuple[np.ndarray | None, gpytorch.means.Mean | None]:
    """Return a mean that is estimated, zero, or fixed at random values."""
    kind = rng.choice(["best", "zero", "fixed"])
    if kind == "best":
        return None, None
    if kind == "zero":
        return np.zeros(p), gpytorch.means.ZeroMean()
    values, base = rng.normal(size=p), gpytorch.means.ConstantMean()
    module = gpytorch.means.MultitaskMean(base, num_tasks=p) if p > 1 else base
    for own, value in zip(getattr(module, "base_means", [module]), values, strict=True):
        own.double().initialize(constant=tensor(value))
    return values, module.requires_grad_(False)


def _rule(rng, corner: np.ndarray, tolerance: float | None):
    """Return a grid for the box and for all points that paths and boxes reach from it."""
    if tolerance is None:
        return None
    domain = tuple((low - 0.75, low + 1.75) for low in corner.tolist())
    if rng.random() < 0.5:
        return gp_orff.Grid(domain=domain, tolerance=tolerance)
    return gp_orff.Auto(domain=domain, tolerance=tolerance, exact_values=0, max_features=20_000)
