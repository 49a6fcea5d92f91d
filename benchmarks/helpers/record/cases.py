"""The data sets of the record, each with a kernel, and the results of default fits to them."""

import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch
from gpytorch.kernels import Kernel, MaternKernel, RBFKernel, RQKernel
from gpytorch.likelihoods import Likelihood
from jaxtyping import Float
from torch import Tensor

import gp_orff
from helpers.anything.kernels import kernels_of
from helpers.anything.sets import KINDS, made
from helpers.anything.truths import Waves, waves
from helpers.fields import nlpd, scores

C, D, H = "curl-free", "divergence-free", "Helmholtz"
MOST_DENSE = 4096  # values of a set whose objective is the exact kernel's
EVERY = 4  # of the kernels of a set
LARGER = {
    41: "curl-free RBF",
    48: "Helmholtz RBF",
    51: "Helmholtz RBF",
    54: "curl-free RQ",
    56: "divergence-free RBF",
}  # sets with more values, and the kernel of each, of which lattices truncate little


Moments = tuple[Tensor, Tensor, Tensor]
"""The truth, and mean and standard deviation of its posterior."""


@dataclass(frozen=True)
class Case:
    """Observations with the arguments of `fit`, a kernel, and the true field at held-out positions.

    With `chunks`, the observations are passed as a stream of this number of chunks.
    """

    kernel: Callable[[], Kernel]
    x: Float[Tensor, "N c"]
    y: Float[Tensor, "N p"]
    options: Mapping[str, object] = field(default_factory=dict)
    likelihood: Callable[[], Likelihood] | None = None
    chunks: int = 0
    xs: Float[Tensor, "n c"] | None = None
    truth: Float[Tensor, "n p"] | None = None
    true_field: Waves | None = None
    constraint: str = "none"  # of the kernel
    space: int = 2  # inputs that are directions

    @property
    def values(self) -> int:
        return self.y.numel()

    def model(self) -> gp_orff.VectorFieldGP:
        """Return a new model in float64, which is not fitted."""
        likelihood = self.likelihood() if self.likelihood else None
        return gp_orff.VectorFieldGP(self.kernel(), likelihood=likelihood).double()

    def fitted(self) -> gp_orff.VectorFieldGP:
        """Return the model after a fit with default settings. Warnings are ignored."""
        data: tuple[object, ...] = self.x, self.y
        if self.chunks:
            data = (list(zip(*(part.chunk(self.chunks) for part in data), strict=True)),)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return self.model().fit(*data, **self.options, progress=False)

    @torch.no_grad()
    def error_bars(self, model: gp_orff.VectorFieldGP) -> dict[str, dict[str, float]]:
        """Return RMSE, coverage of 95 % intervals and NLPD for the field, its derivatives and its
        potential.

        A stream function replaces the potential of a field that is not curl-free. Quantities that
        do not exist are omitted. Errors are divided by the standard deviation of the truth, so that
        averages over data sets are meaningful.
        """
        found = {}
        for name, moments in (
            ("field", self._field),
            ("derivatives", self._derivatives),
            ("potential", self._potential),
        ):
            try:
                parts = moments(model.posterior())
            except (NotImplementedError, ValueError):  # it does not exist under this kernel
                continue
            if parts is not None:
                size = parts[0].std()
                truth, mean, sd = (part / size for part in parts)
                own = scores(mean, sd.square(), truth)
                density = nlpd(mean - truth, sd.square().clamp_min(1e-12))
                found[name] = {"RMSE": own["error"], "inside": own["inside"], "NLPD": density}
        return found

    def _field(self, posterior: gp_orff.FieldPosterior) -> Moments | None:
        if self.xs is None:
            return None
        return self.truth, posterior.mean(self.xs), posterior.variance(self.xs).sqrt()

    def _derivatives(self, posterior: gp_orff.FieldPosterior) -> Moments | None:
        if self.true_field is None:
            return None
        slopes = torch.from_numpy(self.true_field.jacobian(self.xs.numpy(), self.space)).flatten(1)
        jacobian = gp_orff.Jacobian()
        return slopes, posterior.mean(self.xs, jacobian), _sd(posterior, self.xs, jacobian)

    def _potential(self, posterior: gp_orff.FieldPosterior) -> Moments | None:
        """Return the potential minus its value at the middle of the data.

        It includes the linear potential of the constant background. The result is None for kernels
        with another part.
        """
        if self.true_field is None or self.constraint == "none" or self.space == 1:
            return None
        along, (x, d) = self.constraint == "curl-free", (self.xs.numpy(), self.space)
        if not along and d != 2:
            return None
        middle, origin = self.x.numpy()[:, :d].mean(0), x.copy()
        origin[:, :d] = middle
        away = (x - origin)[:, :d] if along else (x - origin)[:, 1::-1] * [1, -1]
        background = (self.truth.numpy() - self.true_field(x)).mean(0)
        field = self.true_field
        value = field.stream_function if not along else lambda x: field.potential(x, d)
        truth = value(x) - value(origin) + away @ background
        symbol = gp_orff.Potential if along else gp_orff.StreamFunction
        known = symbol(torch.from_numpy(middle))
        mean = posterior.mean(self.xs, known).squeeze(-1)
        return torch.from_numpy(truth), mean, _sd(posterior, self.xs, known).squeeze(-1)


def _sd(posterior: gp_orff.FieldPosterior, xs: Tensor, symbol: object) -> Tensor:
    return posterior.variance(xs, symbol).clamp_min(0.0).sqrt()


def names() -> dict[str, Callable[[], Case]]:
    """Return functions that create a case, by the name of the case. Small cases are first."""
    return {**{name: partial(_generated, *key) for name, key in _generated_names()}, **SPECIAL}


def _generated_names() -> Iterator[tuple[str, tuple[int, str]]]:
    for number, kind in enumerate(KINDS):
        kernels = list(kernels_of(kind))[number % EVERY :: EVERY]
        if number in LARGER:
            kernels = [LARGER[number]]
        elif kind.n * kind.p > MOST_DENSE:
            continue
        yield from ((f"{number:02d} {name}", (number, name)) for name in kernels)


def _generated(number: int, name: str) -> Case:
    kind, problem = KINDS[number], made(number)
    constraint = kind.constraint if name.startswith((C, D)) else "none"
    return Case(
        kernels_of(kind)[name],
        problem.x,
        problem.y,
        xs=problem.xs,
        truth=problem.truth,
        true_field=problem.field,
        constraint=constraint,
        space=kind.d,
    )


# ---- kinds of data that the generated sets lack --------------------------------------------------

HELD_OUT, NOISE = 150, 0.1


def _planar(seed: int, constraint: str, kernel: Callable[[], Kernel], x=None, n=150, d=2) -> Case:
    """Return a case with a field of variance one and lengthscale 0.3. The noise has a tenth of the
    standard deviation of the field."""
    rng = np.random.default_rng(seed)
    truth = waves(rng, "Matérn 5/2", constraint, np.full(d, 0.3), d, d)
    x = rng.random((n, d)) if x is None else x
    xs = rng.random((HELD_OUT, d))
    truth = truth.in_units(np.zeros(d), np.ones(d), 1 / truth(xs).std())
    y = truth(x) + NOISE * rng.standard_normal((len(x), d))
    x, y, xs, values = map(torch.from_numpy, (x, y, xs, truth(xs)))
    known = {"xs": xs, "truth": values, "true_field": truth, "space": d}
    known["constraint"] = constraint if constraint != H else "none"
    return Case(kernel, x, y, **known)


def _tracks(seed: int, constraint: str, kernel: Callable[[], Kernel], timed: bool) -> Case:
    """Return a case with ten straight tracks of 16 observations. Each track has an offset and
    correlated noise, both with a standard deviation of 0.3."""
    rng, count, length = np.random.default_rng(seed), 10, 16
    start, end = rng.random((2, count, 1, 2))
    x = (start + (end - start) * np.linspace(0, 1, length)[:, None]).reshape(-1, 2)
    case = _planar(seed, constraint, kernel, x)
    walk, memory = [rng.standard_normal((count, 2))], np.exp(-1 / 4)
    for _ in range(length - 1):
        walk.append(memory * walk[-1] + np.sqrt(1 - memory**2) * rng.standard_normal((count, 2)))
    shared = 0.3 * (np.stack(walk, 1) + rng.standard_normal((count, 1, 2))).reshape(-1, 2)
    options: dict[str, object] = {"track": np.repeat(np.arange(count), length)}
    if timed:
        options["time"] = np.tile(np.arange(float(length)), count)
    return replace(case, y=case.y + torch.from_numpy(shared), options=options)


def _outliers(case: Case) -> Case:
    """Return the case with thirty times the noise for a tenth of the vectors, and with a Student-t
    likelihood."""
    generator = torch.Generator().manual_seed(0)
    gross = torch.rand(len(case.y), 1, generator=generator, dtype=torch.float64) < 0.1
    error = torch.randn(case.y.shape, generator=generator, dtype=torch.float64)
    robust = partial(gp_orff.MultitaskStudentTLikelihood, num_tasks=case.y.shape[-1])
    return replace(case, y=case.y + 30 * NOISE * gross * error, likelihood=robust)


def _known_noise(case: Case) -> Case:
    rng = np.random.default_rng(5)
    variances = 0.04 * 25 ** rng.random(len(case.x))
    error = np.sqrt(variances)[:, None] * rng.standard_normal(case.y.shape)
    y = case.y + torch.from_numpy(error)
    return replace(case, y=y, options={"noise": torch.from_numpy(variances + NOISE**2)})


def _along_directions(case: Case) -> Case:
    angle = 2 * np.pi * np.random.default_rng(6).random(len(case.x))
    u = torch.from_numpy(np.stack([np.cos(angle), np.sin(angle)], -1))
    return replace(case, y=(case.y * u).sum(-1), options={"directions": u})


def _two_groups(case: Case) -> Case:
    """Return the case with about five times the noise in its second half, which is a separate
    group."""
    half = len(case.x) // 2
    error = np.random.default_rng(7).standard_normal((len(case.x) - half, 2))
    y = torch.cat([case.y[:half], case.y[half:] + 5 * NOISE * torch.from_numpy(error)])
    group = np.repeat(["fine", "rough"], [half, len(case.x) - half])
    return replace(case, y=y, options={"group": group})


def _harmonic(seed: int, n: int, along: bool) -> Case:
    """Return a case with the field of forty vertical dipoles below the points.

    The observations are vectors, or components along one direction if `along`.
    """
    rng = np.random.default_rng(seed)
    sources = np.column_stack([4 * rng.random((40, 2)) - 2, -0.4 - 0.6 * rng.random(40)])
    moments = rng.standard_normal(40)

    def dipoles(x: Float[np.ndarray, "n 3"]) -> Float[np.ndarray, "n 3"]:
        r = x[:, None] - sources
        distance = np.linalg.norm(r, axis=-1, keepdims=True)
        towards = 3 * r * r[..., 2:] / distance**5 - np.array([0, 0, 1.0]) / distance**3
        return (moments[:, None] * towards).sum(1)

    x, xs = (
        np.column_stack([2 * rng.random((count, 2)) - 1, 0.3 * rng.random(count)])
        for count in (n, HELD_OUT)
    )
    size = dipoles(xs).std()
    y = dipoles(x) / size + NOISE * rng.standard_normal((n, 3))
    x, y, xs, truth = map(torch.from_numpy, (x, y, xs, dipoles(xs) / size))
    u = torch.tensor([0.6, 0.0, 0.8], dtype=torch.float64).expand(n, 3)
    how = {"y": (y * u).sum(-1), "options": {"directions": u}} if along else {"y": y}
    return Case(gp_orff.HarmonicKernel, x, **how, xs=xs, truth=truth, space=3)


def _copies(case: Case) -> Case:
    """Return the case with a copy of every fifth record, as in a file with several solutions of one
    network."""
    again = slice(None, None, 5)
    return replace(case, x=torch.cat([case.x, case.x[again]]), y=torch.cat([case.y, case.y[again]]))


def _at_rest(seed: int, still: int, jitter: float) -> Case:
    """Return a case with a platform that stands still for most observations, and then moves along a
    curve.

    While it stands still, its positions have a little noise.
    """
    rng, t = np.random.default_rng(seed), np.linspace(0, 1, 60)
    path = np.column_stack([t, 0.5 + 0.3 * np.sin(8 * t)])
    stop = np.tile([[0.2, 0.3]], (still, 1)) + jitter * rng.standard_normal((still, 2))
    return _planar(seed, C, _of(CURL, RBFKernel), np.concatenate([path, stop]))


def _stretched(case: Case, matrix: Float[np.ndarray, "2 2"]) -> Case:
    """Return the case with positions multiplied by a matrix, as if axes had other units or
    directions. The values do not change."""
    to = torch.from_numpy(matrix)
    return replace(case, x=case.x @ to.mT, xs=case.xs @ to.mT, true_field=None)


def _two_scales(seed: int) -> Case:
    """Return a case with long waves and with waves that are a hundred times shorter. Pairs of
    neighbours determine the short waves."""
    rng = np.random.default_rng(seed)
    middle = rng.random((60, 1, 2))
    x = (middle + 0.01 * rng.standard_normal((60, 5, 2))).reshape(-1, 2)
    case = _planar(seed, C, lambda: _sum_of_two(), x)
    short = waves(rng, "Matérn 5/2", C, np.full(2, 0.003), 2, 2)
    short = short.in_units(np.zeros(2), np.ones(2), 0.3 / short(case.xs.numpy()).std())
    y, truth = (
        own + torch.from_numpy(short(at.numpy()))
        for own, at in ((case.y, case.x), (case.truth, case.xs))
    )
    return replace(case, y=y, truth=truth, true_field=None)


def _sum_of_two() -> Kernel:
    return gp_orff.CurlFreeKernel(num_dims=2) + gp_orff.CurlFreeKernel(num_dims=2)


def _scalars() -> Kernel:
    """Return a kernel of two outputs that share an anisotropic kernel."""
    return gp_orff.SeparableKernel(RBFKernel(ard_num_dims=2), torch.eye(2))


def _flat(seed: int) -> Case:
    """Return a case with vectors in three dimensions, all at the same height."""
    x = np.random.default_rng(seed).random((150, 3)) * [1.0, 1.0, 0.0]
    case = _planar(seed, D, _of(DIV, RBFKernel, 3), x, d=3)
    return replace(case, true_field=None)


def _with_far_point(case: Case) -> Case:
    far = torch.tensor([[1e4, 1e4]], dtype=torch.float64)
    return replace(case, x=torch.cat([case.x, far]), y=torch.cat([case.y, case.y[:1]]))


def _drifters(seed: int) -> Case:
    """Return a case with tracks in a tide. The model has no tide, so residuals oscillate along each
    track."""
    case = _tracks(seed, H, _of(HELM, ROUGH), timed=True)
    hours = torch.as_tensor(case.options["time"])
    phase = 2 * np.pi * hours / 6.2
    tide = 0.5 * torch.stack([phase.cos(), phase.sin()], -1)
    return replace(case, y=case.y + tide)


def _of(build: Callable[..., Kernel], base: Callable[[], Kernel], d: int = 2):
    return lambda: build(base(), num_dims=d)


CURL, DIV, HELM = gp_orff.CurlFreeKernel, gp_orff.DivergenceFreeKernel, gp_orff.HelmholtzKernel
ROUGH, SMOOTH = partial(MaternKernel, nu=1.5), partial(MaternKernel, nu=2.5)
LEARNED = gp_orff.LearnedSpectrumKernel
SPECIAL: dict[str, Callable[[], Case]] = {
    "tracks curl-free RBF": lambda: _tracks(0, C, _of(CURL, RBFKernel), timed=False),
    "tracks Helmholtz Matérn 3/2": lambda: _tracks(1, H, _of(HELM, ROUGH), timed=True),
    "Student-t curl-free RBF": lambda: _outliers(_planar(2, C, _of(CURL, RBFKernel))),
    "Student-t 3-D divergence-free Matérn 5/2": lambda: _outliers(
        _planar(3, D, _of(DIV, SMOOTH, 3), d=3)
    ),
    "known noise Helmholtz RBF": lambda: _known_noise(_planar(4, H, _of(HELM, RBFKernel))),
    "directions divergence-free Matérn 5/2": lambda: _along_directions(
        _planar(5, D, _of(DIV, SMOOTH), n=300)
    ),
    "two groups Helmholtz RQ": lambda: _two_groups(_planar(6, H, _of(HELM, RQKernel))),
    "harmonic": lambda: _harmonic(7, 100, along=False),
    "harmonic directions": lambda: _harmonic(8, 300, along=True),
    "learned spectrum curl-free": lambda: _planar(9, C, _of(CURL, LEARNED)),
    "learned spectrum Helmholtz": lambda: _planar(10, H, _of(HELM, LEARNED)),
    "copies Helmholtz RBF": lambda: _copies(_planar(12, H, _of(HELM, RBFKernel))),
    "copies Student-t Helmholtz RBF": lambda: _copies(
        _outliers(_planar(12, H, _of(HELM, RBFKernel)))
    ),
    "at rest, then moving": lambda: _at_rest(13, 1500, 1e-5),
    "at rest, then moving, more": lambda: _at_rest(14, 1500, 1e-4),
    "half at one place": lambda: _at_rest(15, 60, 0.0),
    "one far point": lambda: _with_far_point(_planar(16, C, _of(CURL, RBFKernel))),
    "stretched axes": lambda: _stretched(_planar(17, C, _scalars), np.diag([30.0, 1.0])),
    "rotated axes": lambda: _stretched(
        _planar(17, C, _scalars), np.array([[0.6, -0.8], [0.8, 0.6]])
    ),
    "axes as they are": lambda: _planar(17, C, _scalars),
    "two lengths, a hundred apart": lambda: _two_scales(18),
    "drifters in a tide": lambda: _drifters(19),
    "without noise": lambda: replace(
        (case := _planar(20, D, _of(DIV, RBFKernel))), y=torch.from_numpy(case.true_field(case.x))
    ),
    "noise alone": lambda: replace(
        (case := _planar(21, C, _of(CURL, RBFKernel))),
        y=case.y - torch.from_numpy(case.true_field(case.x)),
        xs=None,
        true_field=None,
    ),
    "five vectors": lambda: _planar(22, C, _of(CURL, RBFKernel), n=5),
    "a constant axis": lambda: _flat(23),
    "stream divergence-free RBF": lambda: replace(
        _planar(11, D, _of(DIV, RBFKernel), n=1000), chunks=10
    ),
}
