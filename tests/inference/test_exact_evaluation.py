"""The exact evidence in tiles, compared with dense algebra and finite differences."""

import itertools
import math
import pickle
from functools import partial

import pytest
import torch
from gpytorch.kernels import (
    IndexKernel,
    MaternKernel,
    MultitaskKernel,
    RBFKernel,
    RQKernel,
    ScaleKernel,
)
from linear_operator.utils.warnings import NumericalWarning

import gp_orff
from gp_orff.data.dataset import Dataset
from gp_orff.data.reading import Options, read
from gp_orff.inference import exact
from gp_orff.inference.exact import ExactInference
from gp_orff.kernels.pairs import Rows, in_closed_form, row_covariance
from gp_orff.models.few_readings import with_parameters
from tests.support import oracles
from tests.support.fields import draw, uniform
from tests.support.registry import CASES, SMOOTH, base

KINDS = ("vectors", "directions", "gaps", "groups")
FIELDS = (gp_orff.CurlFreeKernel, gp_orff.DivergenceFreeKernel, gp_orff.HelmholtzKernel)
EXACT = sorted(  # of several outputs, with a covariance in closed form
    name for name, build in CASES.items() if build().num_outputs > 1 and name != "spectral_mixture"
)
BATCHED = [name for name in EXACT if in_closed_form(CASES[name]().kernel)]
assert {"curl_free", "helmholtz", "separable_sum", "field_times_time"} <= set(BATCHED)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setattr(exact, "_TILE", 16)


def problem(kind, p, num_dims, points=14):
    """Inference, y, and H of the numbers in the order of the inference."""
    x, y = uniform(points, num_dims), draw(points, p, seed=1)
    y[3], x[3] = y[2] + 0.1, x[2]  # a place that repeats
    options = {}
    if kind == "directions":
        u = draw(points, p, seed=2)
        u = u / u.norm(dim=-1, keepdim=True)
        options, y = {"directions": u}, (y * u).sum(-1, keepdim=True)
    if kind == "gaps":
        y[torch.arange(6), torch.arange(6) % p] = math.nan
        options = {"missing": "mask"}
    if kind == "groups":
        options = {
            "group": ["a", "b"] * (points // 2),
            "variances": 0.5 + uniform(points, seed=4) if p > 1 else None,
        }
    return ExactInference(Dataset.in_memory(read(x, y, p, Options(**options))))


def rows_of(group):
    """H of one group, a matrix for each point."""
    if group.direction is not None:
        return group.direction.unsqueeze(1)
    eye = torch.eye(group.pattern.num_outputs, dtype=torch.float64)
    return eye[list(group.pattern.columns)].expand(len(group), -1, -1)


def dense_log_density(inference, kernel, noises, mean):
    groups = inference.data.observations
    x, p = torch.cat([group.x for group in groups]), len(mean)
    h = torch.block_diag(*(block for group in groups for block in rows_of(group)))
    sigma = [noises[g.key.label] / w for g in groups for w in weights_of(g)]
    covariance = h @ (kernel(x).to_dense() + torch.block_diag(*sigma)) @ h.mT
    y = torch.cat([group.y.flatten() for group in groups])
    return oracles.log_density(covariance, y - h @ mean.repeat(len(x)).reshape(-1, p).flatten())


def weights_of(group):
    return torch.ones(len(group)) if group.weight is None else group.weight


def parameters_of(kernel):
    return [parameter for parameter in kernel.parameters() if parameter.requires_grad]


def check(kernel, inference, p):
    """Rounding: 1e-10 of values of order 10 to 100, whose covariance has a condition of 1e3."""
    raw = torch.tensor([-1.0, -0.5], dtype=torch.float64, requires_grad=True)
    noises = {label: raw[i].exp() * torch.eye(p) for i, label in enumerate(("a", "b"))}
    noises = {**noises, "": raw[0].exp() * torch.eye(p, dtype=torch.float64)}
    noises = {label: noise.double() for label, noise in noises.items()}
    mean = torch.linspace(0.2, 0.4, p, dtype=torch.float64)
    found = inference.evidence(kernel, noises).log_density(mean, inference.num_values)
    expected = dense_log_density(inference, kernel, noises, mean)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    variables = [*parameters_of(kernel), raw]
    gradients = (
        torch.autograd.grad(value, variables, None, True, allow_unused=True, materialize_grads=True)
        for value in (found, expected)
    )
    for own, other in zip(*gradients, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-8, atol=1e-9)


def many(kernel, size=3):
    """A batch of kernels whose parameters differ, and each of them alone."""
    generator = torch.Generator().manual_seed(3)
    raw = {
        own: own.detach() + 0.3 * torch.randn(size, *own.shape, generator=generator).double()
        for own in kernel.parameters()
    }
    alone = [
        with_parameters(kernel, {own: values[i] for own, values in raw.items()}, torch.Size())
        for i in range(size)
    ]
    return with_parameters(kernel, raw, torch.Size([size])), alone


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", BATCHED)
def test_batches_of_kernels_are_what_each_is_alone(name, kind):
    """Evidence and cross covariances; noise, too, is that of each. Rounding."""
    case = CASES[name]()
    p, inference = case.num_outputs, problem(kind, case.num_outputs, case.num_dims)
    kernel = case.kernel.double().requires_grad_(False)
    assert inference.serves_batches(kernel)
    batch, alone = many(kernel)
    levels = torch.tensor([0.5, 0.8, 1.3]).double()
    noises = {label: levels[:, None, None] * torch.eye(p).double() for label in ("", "a", "b")}
    factor, half, evidence = inference.in_batches(batch, noises)
    cross = inference.cross(batch, uniform(4, case.num_dims, seed=8))
    for i, own in enumerate(alone):
        expected = inference.evidence(own, {label: noise[i] for label, noise in noises.items()})
        torch.testing.assert_close(evidence.quad[i], expected.quad, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(evidence.logdet[i], expected.logdet, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(half[i].mT @ half[i], expected.quad, rtol=1e-9, atol=1e-9)
        lone = inference.cross(own, uniform(4, case.num_dims, seed=8))
        torch.testing.assert_close(cross.expand(3, -1, -1)[i], lone, rtol=1e-9, atol=1e-9)
    assert factor.shape[0] == 3


@pytest.mark.slow
@pytest.mark.parametrize("name", SMOOTH)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("field", "num_dims"), [(FIELDS[0], 2), (FIELDS[1], 3), (FIELDS[2], 2)])
def test_fields_equal_dense_algebra(field, num_dims, kind, name):
    inference = problem(kind, num_dims, num_dims)
    ard = KINDS.index(kind) % 2 == num_dims % 2  # half of the pairs, each kind once
    check(field(base(name, num_dims, ard), num_dims=num_dims).double(), inference, num_dims)


@pytest.mark.parametrize("kind", ["directions", "groups"])
@pytest.mark.parametrize("name", EXACT)
def test_every_composition_equals_dense_algebra(name, kind):
    case = CASES[name]()
    check(case.kernel, problem(kind, case.num_outputs, case.num_dims), case.num_outputs)


@pytest.mark.parametrize("kept", [0, 10_000])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_kept_of_lags_serves_other_hyperparameters_and_kernels(kind, kept, monkeypatch):
    monkeypatch.setattr(exact, "_KEPT", kept)
    inference = problem(kind, 2, 2)
    for field, name in itertools.product(FIELDS, ("rbf", "rq")):
        for lengthscale in (0.4, 1.5):
            kernel = field(base(name, 2, ard=False), num_dims=2).double()
            leaves = [part for part in kernel.modules() if isinstance(part, RBFKernel | RQKernel)]
            leaves[0].lengthscale = lengthscale
            check(kernel, inference, 2)
    pieces = exact.Tiles.of(inference.data.observations)
    pieces.covariance(kernel)
    for own, known in ((pieces, kept > 0), (pickle.loads(pickle.dumps(pieces)), False)):
        assert all(bool(geometry) == known for *_, geometry in own.lower())


def test_terms_of_other_inputs_have_other_lags():
    inference = problem("vectors", 2, 3)
    near = gp_orff.CurlFreeKernel(RBFKernel(), num_dims=2, active_dims=(0, 1))
    other = gp_orff.CurlFreeKernel(RBFKernel(), num_dims=2, active_dims=(2, 1))
    for kernel in (near, near + other, other):
        check(kernel.double(), inference, 2)


def test_a_kernel_with_a_covariance_of_its_own_is_asked_for_it():
    """Not the terms of the class that it inherits from."""

    class Doubled(ScaleKernel):
        def forward(self, *args, **params):
            return 2 * super().forward(*args, **params)

    kernel = Doubled(gp_orff.CurlFreeKernel(num_dims=2)).double()
    for kind in KINDS:
        check(kernel, problem(kind, 2, 2), 2)


def evidence_of(kernel, inference, *values):
    """Of the hyperparameters, as a function of their raw values."""
    for parameter, value in zip(parameters_of(kernel), values, strict=True):
        parameter.data.copy_(value.detach().reshape(parameter.shape))
    noises = {"": 0.3 * torch.eye(2, dtype=torch.float64)}
    return inference.evidence(kernel, noises).log_density(None, inference.num_values)


@pytest.mark.parametrize("kind", ["vectors", "directions"])
def test_first_and_second_derivatives_are_finite_differences(kind):
    """Central differences of step h: errors of h² = 1e-8, and of rounding over h, 1e-10."""
    kernel = gp_orff.HelmholtzKernel(MaternKernel(nu=2.5), num_dims=2).double()
    inference = problem(kind, 2, 2)
    values = [0.1 * i + p.detach().clone() for i, p in enumerate(parameters_of(kernel))]
    value = partial(evidence_of, kernel, inference)

    def gradient(*at):
        found = torch.autograd.grad(value(*at), parameters_of(kernel), create_graph=True)
        return torch.cat([own.flatten() for own in found])

    rows = [
        torch.cat(
            [g.flatten() for g in torch.autograd.grad(own, parameters_of(kernel), None, True)]
        )
        for own in gradient(*values)
    ]
    for index in range(len(values)):
        step = [1e-4 * (i == index) + 0 * v for i, v in enumerate(values)]
        after, before = (
            [v + sign * s for v, s in zip(values, step, strict=True)] for sign in (1, -1)
        )
        slope = (value(*after) - value(*before)) / 2e-4
        assert gradient(*values)[index].item() == pytest.approx(slope.item(), abs=1e-6)
        second = (gradient(*after) - gradient(*before)) / 2e-4
        torch.testing.assert_close(rows[index], second, rtol=1e-6, atol=1e-6)


def test_frozen_hyperparameters_have_no_gradient():
    kernel = ScaleKernel(gp_orff.CurlFreeKernel(num_dims=2)).double()
    kernel.base_kernel.base_kernel.raw_lengthscale.requires_grad_(False)
    check(kernel, problem("vectors", 2, 2), 2)
    kernel.requires_grad_(False)
    check(kernel, problem("vectors", 2, 2), 2)


@pytest.mark.parametrize("num_dims", [2, 3])
def test_covariances_along_directions_hold_no_covariance_of_vectors(num_dims):
    kernel = gp_orff.HelmholtzKernel(num_dims=num_dims).double()
    x, v = uniform(5, num_dims), draw(2, 5, num_dims)
    found = row_covariance(kernel)(Rows(x, v), Rows(x[:3], v[:, :3]))
    blocks = kernel(x, x[:3]).to_dense().reshape(5, num_dims, 3, num_dims)
    expected = torch.einsum("qni,nimj,rmj->nqmr", v, blocks, v[:, :3]).reshape(10, 6)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("ard", [False, True])
def test_places_that_repeat_far_from_the_origin(ard):
    """κ″ of Matérn 3/2 has no limit at 0; rounding is 1e-16 of 1e6, beside lags of 1e-1 and 0."""
    kernel = gp_orff.HelmholtzKernel(base("matern32", 2, ard), num_dims=2).double()
    x, v = 1e6 + uniform(40, 2), draw(2, 40, 2)
    found = row_covariance(kernel)(Rows(x, v), Rows(x, v))
    blocks = kernel(x, x).to_dense().reshape(40, 2, 40, 2)
    expected = torch.einsum("qni,nimj,rmj->nqmr", v, blocks, v).reshape(80, 80)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def test_a_singular_covariance_gets_a_nugget():
    """As dense algebra gives it: each of five places ten times, and hardly any noise."""
    x, y = uniform(5, 2).repeat(10, 1), draw(5, 2).repeat(10, 1)
    inference = ExactInference(Dataset.in_memory(read(x, y, 2, Options())))
    noises = {"": 1e-30 * torch.eye(2, dtype=torch.float64)}
    kernel = gp_orff.CurlFreeKernel(num_dims=2).double()
    with pytest.warns(NumericalWarning):
        assert inference.evidence(kernel, noises).logdet.isfinite()


# -- starting values of separable kernels -----------------------------------------------------


def fitted(seed, build):
    torch.manual_seed(seed)  # gpytorch draws output covariances from the global state
    kernel = build()
    x, noise = uniform(25, 2), 0.1 * draw(25, 3, seed=1)
    y = noise + torch.stack([x[:, 0].sin(), x[:, 1].cos() - x[:, 0].sin(), x[:, 1].cos()], dim=-1)
    model = gp_orff.VectorFieldGP(kernel).fit(x, y, progress=False)
    tasks = [part for part in kernel.modules() if isinstance(part, IndexKernel)]
    return model.posterior().mean(x), [part.covar_matrix.to_dense().detach() for part in tasks]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*poorly:gp_orff.DataWarning")
@pytest.mark.parametrize(
    "build",
    [
        lambda: MultitaskKernel(RBFKernel(), num_tasks=3, rank=1),
        lambda: MultitaskKernel(RBFKernel(), num_tasks=3, rank=2),
    ],
)
def test_fits_of_output_covariances_do_not_depend_on_the_global_random_state(build):
    (first, covariances), (second, others) = (fitted(seed, build) for seed in (0, 1))
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    torch.testing.assert_close(covariances, others, rtol=0, atol=0)
