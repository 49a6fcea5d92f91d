"""Frequency grids, compared with exact kernels and exact posteriors."""

import copy
import dataclasses
import math
import pickle
import warnings

import numpy as np
import pytest
import torch
from gpytorch.kernels import (
    ConstantKernel,
    MaternKernel,
    MultitaskKernel,
    RBFKernel,
    RQKernel,
    ScaleKernel,
)

import gp_orff
from gp_orff import nufft
from gp_orff.exact_gp.operators import NoisyFeatureCovariance
from gp_orff.features import grid_design
from gp_orff.features import lattice as lattice_columns
from gp_orff.features.assemble import expand, term_spectra
from gp_orff.features.truncation import truncated_variance
from gp_orff.kernels.tree import terms
from gp_orff.symbols.base import Identity
from tests.support import oracles
from tests.support.fields import draw, exact_problem, uniform
from tests.support.models import centred_gp, errors, evidence, scalar_gp, vector_gp
from tests.support.registry import CASES, NO_GRID, base

BOX = ((-1.0, 1.0),)


ACCURACY = [  # field, d, lengthscale in a box of 2, points, signal over noise
    (gp_orff.CurlFreeKernel, 2, 0.2, 600, 33),
    (gp_orff.CurlFreeKernel, 2, 0.1, 300, 3),
    (gp_orff.DivergenceFreeKernel, 2, 0.2, 300, 3),
    (gp_orff.DivergenceFreeKernel, 2, 0.1, 300, 33),
    (gp_orff.CurlFreeKernel, 3, 0.7, 100, 33),
]


@pytest.mark.slow
@pytest.mark.parametrize(("field", "num_dims", "lengthscale", "points", "snr"), ACCURACY)
def test_the_posterior_is_that_of_the_exact_kernel(field, num_dims, lengthscale, points, snr):
    """At the very lengthscales a grid is built for, where it has nothing to spare."""
    potential = RBFKernel().double()
    potential.lengthscale = lengthscale
    kernel = field(potential, num_dims=num_dims)
    problem = exact_problem(kernel, num_dims, points, snr)
    grids = {
        tolerance: gp_orff.Grid(
            domain=BOX * num_dims, tolerance=tolerance, lengthscale_range=(1.0, 1.0)
        )
        for tolerance in (1e-5, 1e-6)
    }
    grids["default"] = gp_orff.Grid.for_data(problem[0])
    found = dict(zip(grids, errors(kernel, grids.values(), problem), strict=True))
    mean, sd, ev, _ = found[1e-5]
    assert mean <= 2e-3
    assert sd <= 2e-2
    assert ev <= 2e-3
    better_mean, better_sd, better_ev, _ = found[1e-6]
    assert better_mean <= mean / 4
    assert better_sd <= sd / 4
    assert better_ev <= max(ev / 4, 1e-4)  # the error of the evidence may cross zero
    assert max(found["default"][:3]) < 1e-7  # with room for lengthscales from 0.7 to 1.4


@pytest.mark.slow
@pytest.mark.parametrize(("features", "worse"), [(700, 0.5), (1500, 0.25)])
def test_what_is_cut_is_returned(features, worse):
    """Matérn 5/2, whose tail no grid can hold: honest with the correction, far off without."""
    potential = MaternKernel(nu=2.5).double()
    potential.lengthscale = 0.3
    kernel = gp_orff.CurlFreeKernel(potential, num_dims=2)
    problem = exact_problem(kernel, 2, 400, 33)
    grid = gp_orff.Grid.for_data(problem[0], max_features=features)
    assert 0.9 * features < gp_orff.ORFFKernel(kernel, grid).num_features <= features
    plain = dataclasses.replace(grid, diagonal_correction=False)
    corrected, uncorrected = errors(kernel, (grid, plain), problem)
    assert corrected[3] < worse
    assert uncorrected[3] > 5 * worse


def on_large_grid(case):
    grid = gp_orff.Grid(
        domain=BOX * case.num_dims,
        tolerance=1e-6,
        max_features=6000,
        lengthscale_range=(1.0, 1.0),
    )
    return gp_orff.ORFFKernel(case.kernel, grid, num_dims=case.num_dims)


@pytest.mark.parametrize("name", NO_GRID)
def test_a_kernel_tree_that_has_no_grid(name):
    with pytest.raises(NotImplementedError, match=NO_GRID[name]):
        on_large_grid(CASES[name]())


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in CASES if n not in NO_GRID])
def test_every_kernel_tree_on_a_grid_is_its_exact_kernel(name):
    """Within what the grid says it truncates and aliases, for every pair of points."""
    case = CASES[name]()
    kernel = on_large_grid(case)
    assert kernel.num_features <= 6000
    x = 2 * torch.rand(12, case.num_dims, generator=torch.Generator().manual_seed(0)).double() - 1
    with torch.no_grad():
        found = kernel(x).to_dense()
        zero = kernel(x[:1]).to_dense()
        exact = case.kernel(x).to_dense()
    accuracy = kernel.accuracy()
    assert len(accuracy) == len(terms(case.kernel))
    size = exact.diagonal().max()
    share = sum(own.truncated + own.aliasing for own in accuracy)
    assert (found - exact).abs().max() <= (share + 1e-9) * size
    p = case.num_outputs
    aliased = sum(own.aliasing for own in accuracy)
    assert (zero - exact[:p, :p]).abs().max() <= (aliased + 1e-9) * size  # what is cut is back


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "regime"),
    [
        *((name, 4) for name in CASES if name not in NO_GRID),
        *((name, 100) for name in ("helmholtz", "lcm", "field_separable_and_constant", "scalar")),
    ],
)
def test_inside_exact_gp_it_is_dense_algebra(name, regime):
    """Evidence, its gradient, mean and variance, against the matrices ΦΦᵀ + I⊗(Σ + δ). Every kernel
    with fewer points than features; which algebra serves more points depends on the number of
    outputs and of terms alone."""
    case = CASES[name]()
    grid = gp_orff.Grid(domain=BOX * case.num_dims, max_features=160, lengthscale_range=(1.0, 1.0))
    kernel = gp_orff.ORFFKernel(case.kernel, grid, num_dims=case.num_dims)
    generator = torch.Generator().manual_seed(0)
    x = 2 * torch.rand(regime, case.num_dims, generator=generator).double() - 1
    xs = 2 * torch.rand(3, case.num_dims, generator=generator).double() - 1
    p = case.num_outputs
    y = draw(regime, p)
    if p == 1:
        model = scalar_gp(x, y.squeeze(-1), kernel, 0.3)
    else:
        model = vector_gp(x, y, kernel, 0.3, has_task_noise=False)

    def dense():
        expansion = expand(case.kernel, kernel.frequencies, case.num_dims)
        white = truncated_variance(Identity(), case.kernel, kernel.frequencies, (), expansion)[0]
        phi, test = expansion.features(x), expansion.features(xs)
        noise = model.likelihood.noise * torch.eye(p) + white
        noisy = phi @ phi.mT + torch.kron(torch.eye(regime).double(), noise.contiguous())
        prior = test @ test.mT + torch.kron(torch.eye(3).double(), white.contiguous())
        return noisy, test @ phi.mT, prior

    parameters = [q for q in model.parameters() if q.requires_grad]
    found = evidence(model)
    gradient = torch.autograd.grad(found, parameters, allow_unused=True)
    mean = model.mean_module(x)
    expected = oracles.log_density(dense()[0], y - mean.reshape(regime, p))
    expected_gradient = torch.autograd.grad(expected, parameters, allow_unused=True)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    norm = sum(g.square().sum() for g in expected_gradient if g is not None).sqrt()
    for mine, theirs in zip(gradient, expected_gradient, strict=True):
        if theirs is not None and theirs.numel():
            assert (mine - theirs).abs().max() <= 1e-9 * norm
    model.eval()
    with torch.no_grad():
        noisy, cross, prior = dense()
        posterior = model(xs)
        mean, covariance = oracles.condition(
            prior, cross, noisy, y - model.mean_module(x).reshape(regime, p)
        )
        mean = mean + model.mean_module(xs).reshape(-1)
    torch.testing.assert_close(posterior.mean.flatten(), mean, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(posterior.covariance_matrix, covariance, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(
        posterior.variance.flatten(), covariance.diagonal(), rtol=1e-9, atol=1e-9
    )


def random_problem(seed):
    """A kernel tree, a domain (some axes flat) and a grid that is too small for it."""
    rng = np.random.default_rng(seed)
    d = int(rng.integers(1, 4))
    extent = np.where(rng.random(d) < 0.2, 0.0, rng.uniform(0.1, 5.0, d))
    scalar = base(rng.choice(["rbf", "matern32", "matern52", "rq"]), d)
    scalar.lengthscale = torch.from_numpy(np.exp(rng.uniform(-1, 1, d)))
    if isinstance(scalar, RQKernel):
        scalar.alpha = torch.tensor(rng.uniform(1.6, 4.0)).double()
    kinds = [gp_orff.CurlFreeKernel] + [gp_orff.DivergenceFreeKernel] * (d > 1)
    kernel = kinds[rng.integers(len(kinds))](scalar, num_dims=d)
    if rng.random() < 0.5:
        kernel = kernel + MultitaskKernel(scalar, num_tasks=d, rank=1).double()
    grid = gp_orff.Grid(
        domain=tuple((0.0, float(e)) for e in extent),
        max_features=int(rng.integers(300, 1500)),
        tolerance=1e-4,
        lengthscale_range=(float(rng.uniform(0.5, 1)), float(rng.uniform(1, 2))),
    )
    return kernel, grid, d


# Of 40 seeds, those that together have every pair of what `random_problem` draws: the number of
# inputs, the scalar kernel, the field, whether there is a sum, and flat axes.
SEEDS = [0, 3, 6, 10, 11, 14, 18, 19, 23, 25, 31, 35]


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_the_truncated_variance_is_never_negative(seed):
    """Also at lengthscales the grid was not built for."""
    kernel, grid, d = random_problem(seed)
    orff = gp_orff.ORFFKernel(kernel, grid)
    for factor in (1.0, 0.3, 3.0, 20.0):
        for leaf in {leaf.kernel for term in terms(kernel) for leaf in term.leaves}:
            leaf.lengthscale = leaf.lengthscale.detach() * factor
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", gp_orff.GridWarning)
            expansion = expand(kernel, orff.frequencies, d)
        white = truncated_variance(Identity(), kernel, orff.frequencies, (), expansion)[0]
        assert torch.linalg.eigvalsh(white).min() >= 0
        assert white.isfinite().all()


@pytest.mark.parametrize("field", [gp_orff.CurlFreeKernel, gp_orff.DivergenceFreeKernel])
def test_the_truncated_variance_is_the_sum_of_what_was_cut(field):
    """Against the lattice continued to where nothing is left."""
    potential = RBFKernel(ard_num_dims=2).double()
    potential.lengthscale = torch.tensor([0.5, 0.8]).double()
    kernel = field(potential, num_dims=2)
    grid = gp_orff.Grid(spacing=(0.9, 0.7), cutoff=4.0)
    orff = gp_orff.ORFFKernel(kernel, grid)
    omega = torch.cartesian_prod(*[torch.arange(-60, 61).double()] * 2) * torch.tensor(
        [0.9, 0.7], dtype=torch.float64
    )
    cut = omega[omega.norm(dim=-1) > 4.0]
    density = torch.exp(-0.5 * (cut * potential.lengthscale).square().sum(-1))
    density = density * potential.lengthscale.prod() / (2 * math.pi)
    matrix = {gp_orff.CurlFreeKernel: oracles.outer}.get(field, oracles.projected)(cut)
    expected = 0.9 * 0.7 * (density[:, None, None] * matrix).sum(0)
    found = truncated_variance(Identity(), kernel, orff.frequencies, ())[0]
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def test_the_truncated_variance_has_derivatives():
    potential = MaternKernel(nu=2.5, ard_num_dims=2).double()
    kernel = ScaleKernel(gp_orff.CurlFreeKernel(potential, num_dims=2)).double()
    orff = gp_orff.ORFFKernel(kernel, gp_orff.Grid(domain=BOX * 2, max_features=60))

    def value(lengthscale):
        potential.lengthscale = lengthscale
        expansion = expand(kernel, orff.frequencies, 2)
        return truncated_variance(Identity(), kernel, orff.frequencies, (), expansion)[0]

    value(torch.tensor([0.7, 0.7]).double())[0, 0].backward()
    raw = potential.raw_lengthscale
    slope = raw.grad / torch.sigmoid(raw.detach())  # ∂raw/∂ℓ of a softplus
    h = 1e-6
    for axis in range(2):
        step = h * torch.eye(2)[axis].double()
        ends = [value(0.7 + sign * step)[0, 0].item() for sign in (1, -1)]
        assert slope[0, axis].item() == pytest.approx((ends[0] - ends[1]) / (2 * h), rel=1e-6)


def grid_kernel(grid, lengthscale=0.5):
    potential = RBFKernel().double()
    potential.lengthscale = lengthscale
    return gp_orff.ORFFKernel(gp_orff.CurlFreeKernel(potential, num_dims=2), grid)


def test_terms_of_a_sum_take_their_own_part_of_one_lattice():
    smooth, rough = RBFKernel().double(), RBFKernel().double()
    smooth.lengthscale, rough.lengthscale = 1.0, 0.25
    background = MultitaskKernel(ConstantKernel(), num_tasks=2).double()
    parts = [gp_orff.CurlFreeKernel(smooth, num_dims=2)]
    parts += [gp_orff.DivergenceFreeKernel(rough, num_dims=2), background]
    kernel = gp_orff.ORFFKernel(parts[0] + parts[1] + background, gp_orff.Grid(domain=BOX * 2))
    few, many, one = (own.num_frequencies for own in kernel.frequencies)
    assert one == 1
    assert 8 < many / few < 32  # (1/0.25)² = 16, up to the rim
    assert len({id(own.lattice) for own in kernel.frequencies}) == 1
    assert kernel.num_features == 2 * (few + many) + 2  # DC: one cosine, two outputs
    assert kernel.frequencies[0].lattice.columns().num_columns == 2 * (many + 1)


def test_each_axis_has_its_own_spacing_and_cutoff():
    potential = RBFKernel(ard_num_dims=2).double()
    potential.lengthscale = torch.tensor([0.2, 1.0])
    kernel = gp_orff.CurlFreeKernel(potential, num_dims=2)
    grid = gp_orff.Grid(domain=((0.0, 1.0), (0.0, 30.0)), lengthscale_range=(1, 1))
    lattice = gp_orff.ORFFKernel(kernel, grid).frequencies[0].lattice
    reach = (lattice.indices * lattice.spacing).abs().amax(0)
    assert reach[0] / reach[1] == pytest.approx(5, rel=0.1)
    lag = grid_design.correlation_lag(term_spectra(kernel)[0].leaves[0], 0, 1e-5)
    assert lattice.period[0].item() == pytest.approx(1 + lag)
    assert lattice.period[1].item() == pytest.approx(30 + 5 * lag)


def test_a_budget_wins_over_the_tolerance():
    kernel = grid_kernel(gp_orff.Grid(domain=BOX * 2, max_features=80))
    assert kernel.num_features <= 80
    (accuracy,) = kernel.accuracy()
    assert accuracy.tolerance > 1e-5
    assert 1e-5 < accuracy.truncated < accuracy.tolerance
    assert "truncated" in str(accuracy)


def test_by_hand():
    kernel = grid_kernel(gp_orff.Grid(spacing=1.0, cutoff=2.3))
    omega = kernel.frequencies[0].lattice.columns().omega
    assert len(omega) == 10  # half of the 21 lattice points within 2.3, without zero
    assert omega.norm(dim=-1).max() == math.sqrt(5)
    kernel(torch.tensor([[1e6, 0.0]]).double()).to_dense()  # no domain, no error


def test_points_outside_the_domain_raise():
    x = torch.rand(30, 2, generator=torch.Generator().manual_seed(0)).double()
    kernel = grid_kernel(gp_orff.Grid.for_data(x))
    kernel(x + torch.tensor([0.25, 0.0]).double()).to_dense()  # a quarter of the extent is allowed
    with pytest.raises(ValueError, match=r"inside the grid's domain.*got 1 outside.*domain="):
        kernel(x, torch.tensor([[5.0, 0.5]]).double()).to_dense()
    wide = gp_orff.Grid.for_data(x, domain=((-6.0, 6.0), (-1.0, 2.0)))
    grid_kernel(wide)(x, torch.tensor([[5.0, 0.5]]).double()).to_dense()


def test_a_lengthscale_that_leaves_its_range_warns_once():
    kernel = grid_kernel(gp_orff.Grid(domain=BOX * 2, lengthscale_range=(0.8, 1.25)))
    x = draw(5, 2).clamp(-1, 1)
    potential = kernel.base_kernel.base_kernel
    potential.lengthscale = 0.6
    kernel(x).to_dense()
    potential.lengthscale = 0.7
    with pytest.warns(gp_orff.GridWarning, match=r"1\.4 times.*range 0\.8 to 1\.25.*redraw\(\)"):
        kernel(x).to_dense()
    potential.lengthscale = 1.0
    kernel(x).to_dense()  # warnings are errors here: once is enough
    before = kernel.num_features
    assert kernel.redraw() is kernel
    assert kernel.num_features < before
    kernel(x).to_dense()


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: gp_orff.Grid(), "extent of the data"),
        (lambda: gp_orff.Grid(domain=BOX, tolerance=0.0), "tolerance in"),
        (lambda: gp_orff.Grid(domain=BOX, lengthscale_range=(1.1, 2.0)), "low <= 1 <= high"),
        (lambda: gp_orff.Grid(domain=((1.0, 0.0),)), "low, high"),
        (lambda: gp_orff.Grid(domain=BOX, max_features=0), "positive max_features"),
        (lambda: gp_orff.Grid(spacing=-1.0), "positive spacing"),
        (lambda: gp_orff.Grid.for_data(torch.zeros(0, 2)), "at least one"),
        (lambda: gp_orff.Grid.for_data(torch.tensor([[0.0, math.nan]])), "finite"),
        (lambda: grid_kernel(gp_orff.Grid(domain=BOX)), "each of the kernel's 2 input columns"),
        (lambda: grid_kernel(gp_orff.Grid(domain=BOX * 2), 1e-3), "max_features="),
        (
            lambda: grid_kernel(gp_orff.Grid(domain=BOX * 2, max_features=1)),
            "represent almost none",
        ),
    ],
)
def test_bad_grids(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_state_is_loaded_into_a_fresh_kernel():
    """Whose lengthscales, and so whose grid, are still others."""
    kernel = grid_kernel(gp_orff.Grid(domain=BOX * 2), 0.4)
    fresh = grid_kernel(gp_orff.Grid(domain=BOX * 2), 0.9)
    assert fresh.num_features != kernel.num_features
    fresh.load_state_dict(kernel.state_dict())
    x = draw(5, 2).clamp(-1, 1)
    for other in (fresh, copy.deepcopy(kernel), pickle.loads(pickle.dumps(kernel))):
        assert torch.equal(other(x).to_dense(), kernel(x).to_dense())


def test_float32_models_keep_their_grid_exact():
    double = grid_kernel(gp_orff.Grid(domain=BOX * 2))
    single = copy.deepcopy(double).float()
    assert single.frequencies[0].lattice.spacing.dtype == torch.float64
    x = draw(6, 2).clamp(-1, 1)
    found = single(x.float()).to_dense()
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), double(x).to_dense(), rtol=1e-5, atol=1e-5)


def test_the_accuracy_of_scalar_kernels_in_float32():
    grid = gp_orff.Grid(domain=BOX, tolerance=1e-4)
    single, double = (gp_orff.ORFFKernel(RBFKernel(), grid, num_dims=1) for _ in range(2))
    (found,), (expected,) = single.accuracy(), double.double().accuracy()
    assert found.truncated == pytest.approx(expected.truncated, rel=1e-3, abs=1e-6)


def test_a_training_step_costs_one_transform_of_each_type(monkeypatch):
    """The statistics C are kept; a trainable mean needs φᵀr and, for its gradient, φw."""
    monkeypatch.setattr(lattice_columns, "_FEW", 0)
    x, y = draw(300, 2).clamp(-1, 1), draw(300, 2, seed=1)
    model = centred_gp(grid_kernel(gp_orff.Grid(domain=BOX * 2, max_features=60)), x, y, 0.1)
    calls = []
    for name in ("type1", "type2"):
        original = getattr(nufft, name)
        monkeypatch.setattr(
            nufft, name, lambda *args, n=name, f=original: calls.append(n) or f(*args)
        )
    evidence(model).backward()
    calls.clear()
    for _ in range(2):
        evidence(model).backward()
    assert sorted(calls) == ["type1", "type1", "type2", "type2"]


def test_grids_add_like_other_features():
    """Sums outside ORFFKernel keep the structure, and what each returns."""
    x = draw(4, 2).clamp(-1, 1)
    first = grid_kernel(gp_orff.Grid(domain=BOX * 2, max_features=30), 0.5)
    second = grid_kernel(gp_orff.Grid(domain=BOX * 2, max_features=50), 0.3)
    random = gp_orff.ORFFKernel(second.base_kernel, gp_orff.MonteCarlo(8))
    for other in (second, random):
        total = (first + ScaleKernel(other).double())(x).evaluate_kernel()
        assert isinstance(total, NoisyFeatureCovariance)
        scale = torch.nn.functional.softplus(torch.zeros(())).double()
        expected = first(x).to_dense() + scale * other(x).to_dense()
        torch.testing.assert_close(total.to_dense(), expected)


def test_a_domain_inside_the_data_serves_the_data_too():
    """Lags between data count, not only those to the domain."""
    x = 10 * torch.rand(30, 2, generator=torch.Generator().manual_seed(0)).double()
    inner = ((4.0, 6.0),) * 2
    kernel = grid_kernel(gp_orff.Grid.for_data(x, domain=inner), 0.7)
    lattice = kernel.frequencies[0].lattice
    assert (lattice.period > x.amax(0) - x.amin(0)).all()


def test_loading_another_grid_forgets_the_statistics_of_the_old():
    """Same points, same number of features, another lattice."""
    first = grid_kernel(gp_orff.Grid(domain=((0.0, 1.0),) * 2), 0.3)
    second = grid_kernel(gp_orff.Grid(domain=((0.0, 2.0),) * 2), 0.6)
    x = torch.rand(200, 2, generator=torch.Generator().manual_seed(0)).double()
    models = [centred_gp(kernel, x, draw(200, 2), 0.1) for kernel in (first, second)]
    expected = [evidence(model).item() for model in models]
    assert expected[0] != expected[1]
    first.load_state_dict(second.state_dict())
    assert evidence(models[0]).item() == expected[1]


def test_what_is_cut_stays_where_inputs_have_gradients():
    """gpytorch slices the test inputs of K(x, x) apart."""
    x, xs = draw(60, 2).clamp(-1, 1), draw(4, 2, seed=1).clamp(-1, 1)
    potential = MaternKernel(nu=1.5).double()
    potential.lengthscale = 0.3
    field = gp_orff.CurlFreeKernel(potential, num_dims=2)
    grid = gp_orff.Grid(domain=BOX * 2, max_features=200)
    model = centred_gp(gp_orff.ORFFKernel(field, grid), x, draw(60, 2, seed=2), 0.1).eval()
    plain = model(xs).variance
    live = model(xs.clone().requires_grad_()).variance
    torch.testing.assert_close(live, plain)


def test_fields_over_mixtures_have_no_images_and_a_grid_all_the_same():
    potential = base("spectral_mixture", 2)
    kernel = gp_orff.CurlFreeKernel(potential, num_dims=2)
    orff = gp_orff.ORFFKernel(kernel, gp_orff.Grid(domain=BOX * 2, max_features=400))
    found = orff(torch.zeros(1, 2).double()).to_dense()
    second = gp_orff.spectrum(potential).second_moments(2) * potential.mixture_weights.sum() ** 2
    torch.testing.assert_close(found, torch.diag_embed(second), rtol=1e-3, atol=1e-9)


def test_batches_of_task_kernels():
    """Their factors have a batch where the frequencies have none."""
    shape = torch.Size([2])
    scalars = [RBFKernel(batch_shape=shape).double() for _ in range(2)]
    for scalar, own in zip(scalars, (0.5, 0.8), strict=True):
        scalar.lengthscale = torch.tensor([own, 1.0]).reshape(2, 1, 1)
    kernel = sum(
        (MultitaskKernel(k, num_tasks=2, batch_shape=shape).double() for k in scalars[1:]),
        MultitaskKernel(scalars[0], num_tasks=2, batch_shape=shape).double(),
    )
    orff = gp_orff.ORFFKernel(kernel, gp_orff.Grid(domain=BOX * 2), num_dims=2)
    x = draw(5, 2).clamp(-1, 1)
    torch.testing.assert_close(orff(x).to_dense(), kernel(x).to_dense(), rtol=1e-4, atol=1e-4)
    assert len(orff.accuracy()) == 2


def test_outputs_of_very_different_size_keep_their_own():
    """What rounding asks for is added in the units of each output."""
    scalar = RBFKernel().double()
    kernel = MultitaskKernel(scalar, num_tasks=2, rank=1).double()
    kernel.task_covar_module.covar_factor.data.zero_()
    kernel.task_covar_module.var = torch.tensor([1e12, 1e-6]).double()
    orff = gp_orff.ORFFKernel(kernel, gp_orff.Grid(domain=BOX * 2, tolerance=1e-8), num_dims=2)
    diagonal = orff(torch.zeros(1, 2).double()).to_dense().diagonal()
    torch.testing.assert_close(diagonal, torch.tensor([1e12, 1e-6]).double())


def test_a_term_that_hardly_varies_does_not_spoil_the_others():
    """Its spacing would need a lattice that no budget affords; and it keeps some frequencies."""
    rough, smooth = RBFKernel().double(), RBFKernel().double()
    rough.lengthscale, smooth.lengthscale = 0.2, 50.0
    kernel = gp_orff.CurlFreeKernel(rough, num_dims=2)
    kernel = kernel + gp_orff.DivergenceFreeKernel(smooth, num_dims=2)
    orff = gp_orff.ORFFKernel(kernel, gp_orff.Grid(domain=BOX * 2, max_features=1500))
    first, second = orff.frequencies
    assert second.num_frequencies >= 2
    assert first.num_frequencies > 300
    assert orff.accuracy()[0].truncated < 1e-3


def test_the_edges_of_a_domain_are_inside_it():
    """Also far below zero, where they are rounded by 1e-6 of the domain; inputs that no kernel sees
    are not looked at."""
    kernel = gp_orff.CurlFreeKernel(RBFKernel().double(), num_dims=2, active_dims=(0, 1))
    box = ((-5.0, -3.0), (-3.0, 1.0))
    (own,) = gp_orff.ORFFKernel(kernel, gp_orff.Grid(domain=box)).frequencies
    corners = torch.cartesian_prod(*torch.tensor(box).double())
    inside = torch.cat([corners, corners.float().nextafter(torch.tensor(9.0))])
    assert not own.lattice.outside(inside).any()
    assert not own.lattice.outside(torch.cat([inside, 99 + inside], dim=-1)).any()
    size = torch.tensor([2.0, 4.0]).double()
    for sign in (-1, 1):  # a thousandth of the domain beyond it, along either axis
        beyond = torch.tensor(box).double().mT[(1 + sign) // 2] + sign * 1e-3 * torch.diag(size)
        assert own.lattice.outside(beyond).all()


def test_without_a_domain_aliasing_is_told_at_the_data():
    """Σ_j k(jP), j ≠ 0, by the kernel itself; within a factor of two."""
    scalar = RBFKernel().double()
    scalar.lengthscale = 1.0
    kernel = gp_orff.ORFFKernel(
        scalar, gp_orff.Grid(spacing=2 * math.pi / 4, cutoff=8.0), num_dims=1
    )
    (accuracy,) = kernel.accuracy()
    images = 4 * torch.tensor([[-2.0], [-1.0], [1.0], [2.0]]).double()
    expected = scalar(images, torch.zeros(1, 1).double()).to_dense().sum().item()
    assert 1 <= accuracy.aliasing / expected < 2


def test_a_budget_goes_to_the_terms_of_large_variance():
    """A rough term with 0.1 % of the variance, on a grid that cannot hold it. With the same share
    of both terms truncated, evidences were 500 nats off, and the sd 9 times too large."""
    x, xs = uniform(250, 2, seed=0) * 1.5, uniform(100, 2, seed=1) * 1.5
    kernel = gp_orff.HelmholtzKernel(num_dims=2).double()
    for part, scale, lengthscale in zip(kernel.kernels, (1e-3, 1.0), (0.05, 0.5), strict=True):
        part.base_kernel.base_kernel.lengthscale = lengthscale
        part.outputscale = scale * lengthscale**2
    y, found = torch.sin(4 * x), []
    for rule in (gp_orff.Auto(exact_values=1000), gp_orff.Grid.for_data(x, max_features=600)):
        model = gp_orff.VectorFieldGP(kernel, frequencies=rule)
        model.likelihood.noise = 0.05
        field = model.condition(x, y, merge=0).posterior()
        found.append((model.log_marginal_likelihood().item(), field.variance(xs).sqrt()))
    (exact, sd), (evidence, wider) = found
    assert abs(evidence - exact) < 15  # of 500 numbers; what is truncated is 2 % of the noise
    assert (wider / sd).mean().item() == pytest.approx(1, abs=0.05)
