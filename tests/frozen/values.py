"""Numbers that a change of structure must not change, and files that must remain loadable.

`python -m tests.frozen.values` compares all of them. `python -m tests.frozen.values write` writes
them at the commit whose numbers are the reference. The numbers are evidence, gradient, mean,
variance and covariance of every kernel, rule and noise.
"""

import math
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import wraps
from pathlib import Path
from unittest import mock

import gpytorch
import torch
from gpytorch.kernels import MultitaskKernel, RBFKernel
from gpytorch.likelihoods import GaussianLikelihood, MultitaskGaussianLikelihood
from torch import Tensor

import gp_orff
from gp_orff.inference.features import Posterior
from tests.support import registry
from tests.support.models import evidence, scalar_gp, vector_gp

HERE = Path(__file__).parent
FILE = HERE / "values.pt"

RULES = {
    "exact": lambda d: gp_orff.Auto(exact_values=10**6),
    "monte_carlo": lambda d: gp_orff.MonteCarlo(8),
    "base": lambda d: gp_orff.MonteCarlo(8, measure="base", seed=1),
    "orthogonal": lambda d: gp_orff.Orthogonal(8),
    "quasi_monte_carlo": lambda d: gp_orff.QuasiMonteCarlo(8),
    "gauss_hermite": lambda d: gp_orff.GaussHermite(12),
    "grid": lambda d: gp_orff.Grid(domain=((-1.0, 1.0),) * d, max_features=120),
    "plain_grid": lambda d: gp_orff.Grid(
        domain=((-1.0, 1.0),) * d, max_features=120, diagonal_correction=False
    ),
}
COUNTS = {"dual": 7, "primal": 90}  # points for fewer and for more numbers than features


def points(count: int, num_dims: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 2 * torch.rand(count, num_dims, generator=generator, dtype=torch.float64) - 1


def vectors(x: Tensor, num_outputs: int) -> Tensor:
    shifts = torch.arange(num_outputs).to(x)
    return torch.sin(2 * x.sum(-1, keepdim=True) + shifts) + 0.3 * torch.cos(5 * x[:, :1] - shifts)


def _likelihood(p: int) -> gpytorch.likelihoods.Likelihood:
    own = GaussianLikelihood() if p == 1 else MultitaskGaussianLikelihood(p, has_task_noise=False)
    own = own.double()
    own.noise = 0.05
    return own


def _full(p: int) -> gpytorch.likelihoods.Likelihood:
    if p == 1:
        return _likelihood(p)
    own = MultitaskGaussianLikelihood(p, rank=1).double()
    own.noise = 0.05
    own.task_noise_covar_factor.data = 0.1 * torch.arange(1.0, p + 1).double().unsqueeze(-1)
    return own


def _student_t(p: int) -> gpytorch.likelihoods.Likelihood:
    own = gp_orff.MultitaskStudentTLikelihood(p).double()
    own.noise = 0.05
    return own


def _variances(x: Tensor, y: Tensor) -> tuple[Tensor, dict]:
    return y, {"variances": 1 + x[:, 0].square()}


def _groups(x: Tensor, y: Tensor) -> tuple[Tensor, dict]:
    return y, {"group": ["a" if i % 3 else "b" for i in range(len(x))]}


def _masked(x: Tensor, y: Tensor) -> tuple[Tensor, dict]:
    y = y.clone()
    y[::4, 0] = torch.nan
    return y, {"missing": "mask"}


def _directions(x: Tensor, y: Tensor) -> tuple[Tensor, dict]:
    u = torch.nn.functional.normalize(points(len(x), y.shape[-1], seed=9), dim=-1)
    return (y * u).sum(-1), {"directions": u}


NOISES: dict[str, tuple[Callable, Callable]] = {  # the likelihood, and how the data are given
    "global": (_likelihood, lambda x, y: (y, {})),
    "full": (_full, lambda x, y: (y, {})),
    "variances": (_likelihood, _variances),
    "groups": (_likelihood, _groups),
    "masked": (_likelihood, _masked),
    "directions": (_likelihood, _directions),
    "student_t": (_student_t, lambda x, y: (y, {})),
}
NOISY_CASES = ("helmholtz", "separable")  # that every noise is crossed with; others the first two
FEW_RULES = ("exact", "quasi_monte_carlo", "grid")


def given_best_mean(numbers: Callable) -> Callable:
    """The file has variances as of a known mean; the oracle holds those of one that is not."""

    @wraps(numbers)
    def given(*arguments: object) -> dict[str, Tensor]:
        field = Posterior.field
        with mock.patch.object(Posterior, "field", lambda own, fixed: field(own, fixed=True)):
            return numbers(*arguments)

    return given


@given_best_mean
def model_numbers(model: gp_orff.VectorFieldGP, d: int) -> dict[str, Tensor]:
    value = model.log_marginal_likelihood()
    parameters = [own for own in model.parameters() if own.requires_grad]
    gradient = torch.zeros(0).to(value)  # of the statistics of random features, none is known
    if value.requires_grad:
        slopes = torch.autograd.grad(value, parameters, allow_unused=True)
        gradient = torch.cat([s.flatten() for s in slopes if s is not None])
    field, xs = model.posterior(), 0.9 * points(4, d, seed=5)
    return {
        "evidence": value.detach(),
        "gradient": gradient,
        "mean": field.mean(xs),
        "variance": field.variance(xs),
        "covariance": field(xs[:2]).covariance_matrix.detach(),
    }


def conditioned(
    name: str, rule: str, noise: str, count: str, number: int | None = None
) -> gp_orff.VectorFieldGP | None:
    """A model at the hyperparameters of its case; None where there is no such kernel or rule."""
    torch.manual_seed(0)
    case = registry.CASES[name]()
    likelihood, data = NOISES[noise]
    x = points(COUNTS[count] if number is None else number, case.num_dims)
    y, how = data(x, vectors(x, case.num_outputs))
    model = gp_orff.VectorFieldGP(
        case.kernel, likelihood=likelihood(case.num_outputs), frequencies=RULES[rule](case.num_dims)
    )
    return model.condition(x, y, **how)


def model_cases() -> Iterator[tuple[str, ...]]:
    for name in registry.CASES:
        for rule in RULES:
            for noise in NOISES:
                thorough = name in NOISY_CASES and rule in FEW_RULES
                if not thorough and noise not in ("global", "full"):
                    continue
                if name.startswith(("scalar", "spectral")) and noise != "global":
                    continue
                for count in ("primal",) if noise == "full" or rule == "exact" else COUNTS:
                    yield name, rule, noise, count


SYMBOLS = ("divergence", "curl", "potential", "stream_function", "curl_free_part", "jacobian")


@given_best_mean
def symbol_numbers(rule: str) -> dict[str, Tensor]:
    model, xs = conditioned("helmholtz", rule, "global", "primal"), 0.9 * points(3, 2, seed=5)
    field, found = model.posterior(), {}
    for name in SYMBOLS:
        symbol = registry.SYMBOLS[name](2, 2)
        found[f"{name} mean"] = field.mean(xs, symbol)
        found[f"{name} variance"] = field.variance(xs, symbol)
    part = field.part("curl_free")
    found |= {"part mean": part.mean(xs), "part variance": part.variance(xs)}
    paths = field.sample_paths(3, seed=1)(xs)
    model.observe(xs, torch.zeros(len(xs)), gp_orff.Divergence(), noise=1e-2)
    return (
        found | {"paths": paths} | {f"observed {k}": v for k, v in model_numbers(model, 2).items()}
    )


def exact_gp_numbers(name: str, rule: str) -> dict[str, Tensor]:
    torch.manual_seed(0)
    case = registry.CASES[name]()
    x = points(40, case.num_dims)
    y, kernel = vectors(x, case.num_outputs), case.kernel
    if rule != "exact":
        kernel = gp_orff.ORFFKernel(kernel, RULES[rule](case.num_dims))
    if case.num_outputs == 1:
        model = scalar_gp(x, y.squeeze(-1), kernel, 0.05)
    else:
        model = vector_gp(x, y, kernel, 0.05)
    value = evidence(model)
    parameters = [own for own in model.parameters() if own.requires_grad]
    slopes = torch.autograd.grad(value, parameters, allow_unused=True)
    model.eval()
    predicted = model(0.9 * points(3, case.num_dims, seed=5))
    return {
        "evidence": value.detach(),
        "gradient": torch.cat([s.flatten() for s in slopes if s is not None]),
        "mean": predicted.mean.detach(),
        "variance": predicted.variance.detach(),
        "covariance": predicted.covariance_matrix.detach(),
    }


def _update(model: gp_orff.VectorFieldGP) -> gp_orff.VectorFieldGP:
    more = points(60, 2, seed=3)
    return model.update(more, vectors(more, 2))


def _separable() -> gp_orff.VectorFieldGP:
    torch.manual_seed(0)
    kernel = MultitaskKernel(RBFKernel(ard_num_dims=2), num_tasks=2, rank=1)
    x = points(300, 2)
    return gp_orff.VectorFieldGP(kernel, frequencies=RULES["grid"](2)).condition(x, vectors(x, 2))


SAVED: dict[str, Callable[[], gp_orff.VectorFieldGP]] = {
    "exact": lambda: _update(
        conditioned("field_separable_and_constant", "exact", "full", "primal")
    ),
    "grid": lambda: _update(conditioned("helmholtz", "grid", "groups", "primal", 300)),
    "random": lambda: conditioned("curl_free_rq", "quasi_monte_carlo", "masked", "primal"),
    "student_t": lambda: conditioned("helmholtz", "grid", "student_t", "primal"),
    "directions": lambda: conditioned("scaled", "grid", "directions", "primal"),
    "separable": _separable,
    "observed": lambda: conditioned("helmholtz", "grid", "global", "primal", 300).observe(
        points(5, 2, seed=4), torch.zeros(5), gp_orff.Potential([0.1, 0.1]), noise=0.1
    ),
}


def items() -> Iterator[tuple[str, Callable[[], dict[str, Tensor]]]]:
    """Names, and what gives their numbers."""
    for case in model_cases():
        yield " ".join(case), lambda case=case: _of_case(*case)
    for rule in FEW_RULES:
        yield f"symbols {rule}", lambda rule=rule: symbol_numbers(rule)
    for name in registry.CASES:
        for rule in RULES:
            if rule != "plain_grid":
                yield f"gpytorch {name} {rule}", lambda n=name, r=rule: exact_gp_numbers(n, r)


def _of_case(*case: str) -> dict[str, Tensor]:
    return model_numbers(conditioned(*case), registry.CASES[case[0]]().num_dims)


def loaded(name: str) -> dict[str, Tensor]:
    return model_numbers(gp_orff.VectorFieldGP.load(HERE / f"{name}.pt"), 2)


def write() -> None:
    found = {}
    with warnings.catch_warnings(), gp_orff.settings.check_features(False):
        warnings.simplefilter("ignore")
        for name, build in SAVED.items():
            build().save(HERE / f"{name}.pt")
            found[f"loaded {name}"] = loaded(name)
        for name, numbers in items():
            try:
                found[name] = numbers()
            except (NotImplementedError, ValueError) as error:
                print(f"{name}: {error}")
    numbers = torch.cat([own.flatten() for entry in found.values() for own in entry.values()])
    shapes = {name: {k: list(v.shape) for k, v in entry.items()} for name, entry in found.items()}
    torch.save({"shapes": shapes, "numbers": numbers}, FILE)
    print(f"{len(found)} entries, {len(numbers)} numbers")


def kept() -> dict[str, dict[str, Tensor]]:
    """The numbers of the file."""
    content = torch.load(FILE, weights_only=True)
    numbers, found = iter(content["numbers"].split(1)), {}
    for name, entry in content["shapes"].items():
        found[name] = {}
        for key, shape in entry.items():
            own = [next(numbers) for _ in range(math.prod(shape))]
            if (name, key) not in MOVED:
                found[name][key] = torch.cat([*own, torch.zeros(0).double()]).reshape(shape)
    return {name: entry for name, entry in found.items() if not name.startswith(EXACT_SINCE)}


MOVED = {("symbols grid", "part variance"), ("symbols exact", "paths")}
"""What a grid leaves out of a part is computed as of the whole, since: the oracle holds it. Paths
of exact models have other frequencies; `test_paths` holds their law."""


EXACT_SINCE = ("general_matern exact", "general_matern grid", "gpytorch general_matern grid")
"""The kernel had no values: its truncated variance counted images as unknown, and `exact` was a
grid. Dense oracles hold both: `test_exact_kernels`, and what grids truncate `test_grid`."""


def error(now: dict[str, Tensor], before: dict[str, Tensor]) -> float:
    """The largest difference, over the largest number of its kind."""
    shares = [
        ((now[key] - own).abs().max() / own.abs().max().clamp_min(1e-300)).item()
        for key, own in before.items()
        if own.numel()
    ]
    return max(shares)


def compare() -> None:
    """All numbers with those of the file, the worst ones shown."""
    with warnings.catch_warnings(), gp_orff.settings.check_features(False):
        warnings.simplefilter("ignore")
        before, built = kept(), dict(items())
        names = {name: name.removeprefix("loaded ") for name in before}
        errors = {
            name: error(built[name]() if name in built else loaded(names[name]), before[name])
            for name in before
        }
    for name in sorted(errors, key=errors.get, reverse=True)[:5]:
        print(f"{errors[name]:.1e}  {name}")
    print(f"{len(errors)} entries, all within {max(errors.values()):.1e}")


if __name__ == "__main__":
    write() if sys.argv[1:] == ["write"] else compare()
