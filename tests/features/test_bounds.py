"""Bounds of random features, compared with the papers' formulas, brute force and 200 draws."""

import itertools
import math
from functools import cache

import numpy as np
import pytest
import scipy.integrate
import torch
from gpytorch.kernels import (
    ConstantKernel,
    MaternKernel,
    MultitaskKernel,
    RBFKernel,
    RQKernel,
    ScaleKernel,
)
from torch.autograd import gradcheck

import gp_orff
from gp_orff.bounds.constants import Problem, constants, crossing, moments
from gp_orff.features.assemble import draw, expand_terms
from gp_orff.features.random import Base, Trace
from gp_orff.kernels.tree import Gradient, terms
from tests.support.registry import CASES, FIELDS, MEASURES, base, randomise_tasks

BOUNDS = {
    name: getattr(gp_orff.bounds, name)
    for name in gp_orff.bounds.__all__
    if name not in ("Bound", "fastfood")  # another rule: test_bounds_fastfood.py
}
BOX = ((-1.0, 1.0), (-1.0, 1.0))


def unit(name, kind=None, num_dims=2, lengthscale=1.0):
    """A kernel, or a field over it, with one lengthscale."""
    kernel = base(name, num_dims, ard=False)
    kernel.lengthscale = lengthscale
    return kernel if kind is None else FIELDS[kind][0](kernel, num_dims=num_dims)


def field(name, kind, num_dims):
    return FIELDS[kind][0](base(name, num_dims), num_dims=num_dims)


def two_tasks():
    """Two different task matrices on separate frequencies."""
    parts = [MultitaskKernel(base(name, 2), num_tasks=2, rank=1) for name in ("rbf", "matern52")]
    return randomise_tasks(parts[0].double(), 1) + randomise_tasks(parts[1].double(), 2)


KERNELS = {name: (build, build().num_dims) for name, build in CASES.items()}
KERNELS = {name: (lambda b=b: b().kernel, d) for name, (b, d) in KERNELS.items()} | {
    "curl_free_unit": (lambda: unit("rbf", "curl_free"), 2),
    "curl_free_unit_3d": (lambda: unit("rbf", "curl_free", 3), 3),
    "curl_free_matern32": (lambda: field("matern32", "curl_free", 2), 2),
    "curl_free_matern52": (lambda: unit("matern52", "curl_free"), 2),
    "curl_free_spectral_mixture": (lambda: field("spectral_mixture", "curl_free", 2), 2),
    "divergence_free_unit_3d": (lambda: unit("rbf", "divergence_free", 3), 3),
    "divergence_free_rq_3d": (lambda: field("rq", "divergence_free", 3), 3),
    "matern12": (lambda: base("matern12", 2), 2),
    "matern32_3d": (lambda: base("matern32", 3), 3),
    "rbf_unit": (lambda: unit("rbf"), 2),
    "two_tasks": (two_tasks, 2),
}


def bound_of(name, kernel, box, measure):
    """A bound; None where the theorem does not hold for the kernel."""
    try:
        return BOUNDS[name](kernel, box, measure=measure)
    except (ValueError, NotImplementedError):
        return None


@cache
def existing(name, measure):
    """The bounds of a kernel, over a box of sides 2."""
    build, num_dims = KERNELS[name]
    box = ((-1.0, 1.0),) * num_dims
    found = {theorem: bound_of(theorem, build(), box, measure) for theorem in BOUNDS}
    return {theorem: bound for theorem, bound in found.items() if bound is not None}


def relative(expected):
    """Small probabilities, too, to nine digits."""
    return pytest.approx(min(1, expected), rel=1e-9, abs=0)


# The theorems as they are written: unit Gaussian, box [−1, 1]², l = √8; rounding


@pytest.mark.parametrize("error", [0.05, 0.3, 2.0])
@pytest.mark.parametrize("number", [10, 10_000])
def test_minh_is_theorem_12(number, error):
    """M = tr K(0) = 2, σ² = M², m₁ = E χ₂³."""
    a, m, m1 = 2 ** (7 / 3) * (2 ** (1 / 3) + 2 ** (-2 / 3)), 2.0, 3 * math.sqrt(math.pi / 2)
    exponent = number * error / (8 * 3 * m) * math.log(1 + m * error / m**2)
    expected = a * (m1 * 2 * math.sqrt(8) / error) ** (2 / 3) * math.exp(-exponent)
    bound = BOUNDS["minh"](unit("rbf", "curl_free"), BOX)
    assert bound.probability(number, error) == relative(expected)


@pytest.mark.parametrize("error", [0.05, 0.3, 2.0])
def test_minh_at_one_lag_is_theorem_11(error):
    """With 2M for M, since the centred variable is bounded by 2M."""
    bound = BOUNDS["minh_pointwise"](unit("rbf", "divergence_free", 3))
    m = 2 * 3 / math.sqrt(2)  # tr K(0)/√(d − 1)
    expected = 2 * math.exp(-100 * error / (4 * m) * math.log(1 + 2 * m * error / m**2))
    assert bound.probability(100, error) == relative(expected)


@pytest.mark.parametrize("error", [0.05, 0.3, 2.0, 30.0])
@pytest.mark.parametrize("number", [10, 10_000])
@pytest.mark.parametrize("kind", FIELDS)
def test_brault_of_unbounded_maps_is_theorem_3_1(number, error, kind):
    """b = 3, ψ = 2/(1 − 4^{−1/2}), ‖K(0)‖ = 1, σ_p² = d(d + 2)(d + 4), C′ = 2 for d = 2."""
    b, m = 3.0, 2 * 4.0 + 2 / math.log(2)
    u = m * math.log(2 * m**2 / b + 1)
    exponent = error * number / (4 * (math.e - 1) * u)
    if error * u <= 4 * (math.e - 1) * b:
        exponent = error**2 * number / (8 * 4 * (b + error * u / 12))
    constant = 2 * 2 ** (14 / 4) * 2 ** (2 / 4)
    expected = constant * (2 * math.sqrt(48) * math.sqrt(8) / error) * math.exp(-exponent)
    bound = BOUNDS["brault"](unit("rbf", kind), BOX, measure="base")
    assert bound.probability(number, error) == relative(expected)


@pytest.mark.parametrize("error", [0.05, 0.3, 2.0])
@pytest.mark.parametrize("number", [10, 10_000])
def test_brault_of_bounded_maps_is_theorem_b_1(number, error):
    """b = 1 at lag 0 and at infinity, U = 2 + 1, σ_p² = E χ₂² · E χ₂⁴ = 16."""
    exponent = error**2 * number / (4 * (4 * 1 + 2 * 3 * error / 3))
    constant = 2 * 2 ** (14 / 4) * 2 ** (2 / 4)
    expected = constant * (2 * 4 * math.sqrt(8) / error) * math.exp(-exponent)
    bound = BOUNDS["brault"](unit("rbf", "curl_free"), BOX)
    assert bound.probability(number, error) == relative(expected)


@pytest.mark.parametrize("num_tasks", [1, 3])
def test_hoeffding_and_rahimi_recht_are_claim_1(num_tasks):
    """σ² = E‖ω‖² = Σ ℓ⁻², with ‖A‖ for a."""
    kernel, a = base("rbf", 2), 1.0
    sigma = kernel.lengthscale.pow(-2).sum().sqrt().item()
    if num_tasks > 1:
        kernel = randomise_tasks(MultitaskKernel(kernel, num_tasks=3, rank=1).double())
        a = torch.linalg.matrix_norm(kernel.task_covar_module.covar_matrix.to_dense(), 2).item()
    pointwise, uniform = (BOUNDS[n](kernel, BOX) for n in ("hoeffding", "rahimi_recht"))
    expected = 2 * math.exp(-30 * 0.5**2 / 2)
    assert pointwise.probability(30, 0.5 * a) == relative(expected)
    expected = 2**8 * (sigma * math.sqrt(8) / 0.5) ** 2 * math.exp(-1000 * 0.5**2 / (4 * 4))
    assert uniform.probability(1000, 0.5 * a) == relative(expected)


@pytest.mark.parametrize("name", ["rahimi_recht", "brault", "minh"])
def test_the_best_covering_radius(name):
    """C e^{−Dt} max(1, (4l/s)^d) + (4Λs/ε)^k, minimised by hand over s, in small boxes too."""
    kernel = unit("rbf")
    k, count = (1, 2) if name == "minh" else (2, 2)
    slope = {1: math.sqrt(math.pi / 2), 2: math.sqrt(2)}[k]
    number, s = 400, np.geomspace(1e-9, 1e9, 200_001)
    for side, error in itertools.product((1e-3, 0.05, 1.0), (0.2, 0.6)):
        bound, diagonal = BOUNDS[name](kernel, ((0.0, side),) * 2), side * math.sqrt(2)
        anchors = count * math.exp(-number * bound.tail(error / 2))
        inside = anchors * np.maximum(1.0, (4 * diagonal / s) ** 2)
        least = (inside + (4 * slope * np.minimum(s, diagonal) / error) ** k).min()
        assert bound.probability(number, error) >= min(1, least) * (1 - 1e-6)


def test_the_numbers_of_the_unit_curl_free_kernel():
    """D = 10⁴, box [−1, 1]², 95 %."""
    kernel = unit("rbf", "curl_free")
    assert BOUNDS["minh"](kernel, BOX).error(10_000) <= 0.29
    assert BOUNDS["brault"](kernel, BOX, measure="base").error(10_000) <= 0.41


# The constants


@cache
def radial_moment(name, num_dims, power):
    """E ‖z‖^power, z = ℓω, from the density: trapezoid sums over log r converge exponentially."""
    t = torch.linspace(-16, 32, 4001, dtype=torch.float64)
    omega = torch.nn.functional.pad(t.exp().unsqueeze(-1), (0, num_dims - 1))
    kernel = base(name, num_dims, ard=False)
    kernel.lengthscale = 1.0
    surface = {2: 2 * math.pi, 3: 4 * math.pi}[num_dims]
    with torch.no_grad():
        log_density = gp_orff.spectrum(kernel).log_density(omega)
    return surface * (log_density + (num_dims + power) * t).exp().sum().item() * (48 / 4000)


def directions(num_dims):
    """Unit vectors of equal weight whose averages are exact for polynomials of degree 6."""
    angle = torch.arange(16, dtype=torch.float64) * (2 * math.pi / 16)
    circle = torch.stack([angle.cos(), angle.sin()], dim=-1)
    if num_dims == 2:
        return circle, torch.full((16,), 1 / 16, dtype=torch.float64)
    height, weights = (torch.from_numpy(v) for v in np.polynomial.legendre.leggauss(6))
    rim = (1 - height.square()).sqrt()
    points = [(rim[:, None, None] * circle), height[:, None, None].expand(6, 16, 1)]
    return torch.cat(points, dim=-1).reshape(-1, 3), (weights / 32).repeat_interleave(16)


@pytest.mark.parametrize("num_dims", [2, 3])
@pytest.mark.parametrize("ard", [False, True])
@pytest.mark.parametrize(("degree", "order"), [(0, 0), (1, 0), (1, 1)])
@pytest.mark.parametrize("name", ["rbf", "rq", "matern52"])
def test_moments_are_integrals_over_the_density(name, degree, order, ard, num_dims):
    """Radial quadrature to 1e-8, times averages over the sphere; odd moments are bounded."""
    kernel = base(name, num_dims, ard)
    found = moments(gp_orff.spectrum(kernel), degree, order, num_dims)
    u, weights = directions(num_dims)
    scaled = u / kernel.lengthscale
    q = scaled.square().sum(-1)

    def mean(power, of_direction):
        """E r^power · E of_direction."""
        return radial_moment(name, num_dims, power) * (weights * of_direction).sum().item()

    tilt = mean(2 * order, torch.ones_like(q))
    assert found.mean == pytest.approx(mean(2 * degree, q**degree), rel=1e-7)
    square = tilt * mean(4 * degree - 2 * order, q ** (2 * degree))
    assert found.mean_square == pytest.approx(square, rel=1e-7)
    exact = mean(2 * degree + 1, q ** (degree + 0.5))
    assert exact * (1 - 1e-7) <= found.first <= exact * (1.05 if ard else 1 + 1e-7)
    if math.isfinite(found.second):
        second = tilt * mean(4 * degree + 2 - 2 * order, q ** (2 * degree + 1))
        assert found.second == pytest.approx(second, rel=1e-7)
    for axis, outer in enumerate(found.outer):
        entry = tilt * mean(4 - 2 * order, q * scaled[:, axis].square())
        assert outer == pytest.approx(entry, rel=1e-7)
    largest = tilt * (1 / kernel.lengthscale).square().max().item() ** degree
    assert found.largest == (pytest.approx(largest) if degree == order else math.inf)


@pytest.mark.parametrize("num_dims", [1, 2])
@pytest.mark.parametrize("degree", [0, 1])
def test_moments_of_a_spectral_mixture(degree, num_dims):
    """Means over 10⁵ draws, within 5 standard errors."""
    spectrum = gp_orff.spectrum(base("spectral_mixture", num_dims))
    found = moments(spectrum, degree, 0, num_dims)
    rng = np.random.default_rng(0)
    u = rng.random((100_000, spectrum.num_coordinates(num_dims)))
    normal = rng.standard_normal((len(u), num_dims))
    sphere = normal / np.linalg.norm(normal, axis=-1, keepdims=True)
    variables = torch.from_numpy(spectrum.base(sphere, u, 0))
    omega, v = spectrum.frequencies(variables, 0), spectrum.importance(variables, 0).double()
    norm2 = omega.double().square().sum(-1).detach()
    w = v.detach() * norm2**degree

    def close(value, sample):
        return abs(value - sample.mean().item()) < 5 * (sample.std() / len(sample) ** 0.5).item()

    assert close(found.mean, w)
    assert close(found.mean_square, w**2)
    assert close(found.second, norm2 * w**2)
    assert found.first >= (norm2.sqrt() * w).mean().item() * 0.99
    for axis, outer in enumerate(found.outer):
        assert close(outer, v.detach() ** 2 * norm2 * omega.detach()[:, axis] ** 2)
    assert (w.max().item() <= found.largest * (1 + 1e-9)) or degree
    if math.isfinite(found.orlicz):
        assert (w / found.orlicz).exp().mean().item() <= 2 * (1 + 1e-2)


@pytest.mark.parametrize(("kind", "values"), [("curl_free", (3, 4)), ("divergence_free", (3, 6))])
def test_the_variance_and_orlicz_norm_of_unit_gaussians(kind, values):
    """d + 1, and (d − 1) max(3, (d + 2)/2) for d = 2, 3; 2/(1 − 4^{−1/d}). Rounding."""
    for d, value in zip((2, 3), values, strict=True):
        found = Problem.of("", unit("rbf", kind, d), None, "base", None).constants
        assert found.variance == pytest.approx(value, rel=1e-9)
        assert found.orlicz == pytest.approx(2 / (1 - 4 ** (-1 / d)), rel=1e-9)
    assert Problem.of("", unit("rbf"), None, "base", None).constants.variance == 0.5


def test_the_variance_between_its_ends():
    """Divergence-free, d = 4: more than (d − 1)(d + 2)/2 = 9, by the moments of a Gaussian."""
    r = np.linspace(0, 6, 60_001)
    c = [(1 - 4 * r**2), (16 * r**4 - 24 * r**2 + 3)]  # E ω₁², E ω₁⁴ times cos 2rω₁, over E cos
    square = (c[1] + 5 * c[0] + 10) * np.exp(-2 * r**2)  # E A²₂₂ cos, A² = ‖ω‖²(‖ω‖² − ω₂²)
    across = 0.5 * (18 + square) - (3 - r**2) ** 2 * np.exp(-(r**2))
    found = Problem.of("", unit("rbf", "divergence_free", 4), None, "base", None).constants
    assert found.variance == pytest.approx(across.max(), rel=1e-7)
    assert across.max() > 9.03


def test_many_inputs():
    """Where a search would be too large, b is at most ‖E W²‖ = (d + 2) or d(d − 1)."""
    found = Problem.of("", unit("rbf", "curl_free", 5), None, "base", None).constants
    assert 6 <= found.variance <= 7 * (1 + 1e-9)
    found = Problem.of("", unit("rbf", "divergence_free", 20), None, "trace", None).constants
    assert 0.5 * 20 * 19 <= found.variance <= 20 * 19 * (1 + 1e-9)
    image = ((-1.0, 1.0),) * 784
    for bound in BOUNDS.values():
        assert 0 < bound(unit("rbf", num_dims=784), image).error(10**6) < 1


def sampled(kernel, num_dims, measure, number, draws, seed):
    """ω (draws, number, d) and random matrices W (draws, number, p, p) of every term."""
    summands = terms(kernel)
    rule = gp_orff.MonteCarlo(number * draws, measure=measure, seed=seed)
    for term, frequencies in zip(summands, draw(kernel, rule, num_dims), strict=True):
        full = expand_terms([term], [frequencies], num_dims).general()
        omega, p = full.phi.omega, term.num_outputs
        if len(omega) == 1:  # a constant
            continue
        matrices = omega.new_zeros(2 * len(omega), p, p)
        outer = full.directions.unsqueeze(-1) * full.directions.unsqueeze(-2)
        matrices = matrices.index_add(0, full.columns, outer)[: len(omega)] * len(omega)
        yield omega.reshape(draws, number, -1), matrices.reshape(draws, number, p, p)


SAMPLED = [
    (name, measure)
    for name in (
        "curl_free",
        "curl_free_unit_3d",
        "curl_free_matern52",
        "divergence_free_unit_3d",
        "field_times_time",
    )
    for measure in MEASURES
] + [
    ("curl_free_spectral_mixture", "base"),
    ("scalar", "trace"),
    ("scalar_product", "trace"),
    ("separable", "trace"),
    ("spectral_mixture", "trace"),
]


def not_more(sample, value):
    """Whether the mean of a sample is at most `value`, within 5 standard errors."""
    return sample.mean() <= value * (1 + 1e-9) + 5 * sample.std() / len(sample) ** 0.5


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize(("name", "measure"), SAMPLED)
def test_constants_hold_for_a_sample(name, measure):
    """No constant is less than what 40 000 draws have; b by its largest eigenvalue at each lag."""
    build, num_dims = KERNELS[name]
    kernel = build()
    found = Problem.of("", kernel, None, measure, num_dims).constants
    ((omega, matrices),) = sampled(kernel, num_dims, measure, 40_000, 1, seed=3)
    omega, matrices = omega[0], matrices[0]
    norm, spectral, frobenius = (
        omega.norm(dim=-1),
        torch.linalg.eigvalsh(matrices)[:, -1],
        matrices.flatten(1).norm(dim=-1),
    )
    assert spectral.max() <= found.largest * (1 + 1e-9)
    assert frobenius.max() <= found.largest_frobenius * (1 + 1e-9)
    assert not_more(frobenius.square(), found.variance_frobenius)
    assert not_more(norm.square() * spectral.square(), found.lipschitz**2)
    assert not_more(norm * frobenius, found.lipschitz_frobenius)
    assert math.isinf(found.orlicz) or (spectral / found.orlicz).exp().mean() <= 2.02
    squares = matrices @ matrices
    for lag in [0.0, 0.3, 0.7, 1.2, 2.0, 4.0]:
        wave = (lag * omega[:, 0]).cos()[:, None, None]
        mean = (wave * matrices).mean(0)
        variance = (wave.square() * squares).mean(0) - mean @ mean
        vector = torch.linalg.eigh(variance).eigenvectors[:, -1]
        along = ((wave * matrices) @ vector - mean @ vector).square().sum(-1)
        assert not_more(along, found.variance)


@pytest.mark.parametrize("name", ["rbf", "rq", "matern12"])
def test_the_variance_of_scalar_kernels(name):
    """The largest of ½(1 + k(2r)) − k(r)², on a fine lattice of lags along the diagonal."""
    kernel = base(name, 2)
    tau = torch.linspace(0, 400, 400_001, dtype=torch.float64)[:, None] * kernel.lengthscale
    with torch.no_grad():
        k, double = (kernel(t, torch.zeros(1, 2).double()).to_dense() for t in (tau, 2 * tau))
    found = Problem.of("", kernel, None, "trace", None).constants.variance
    assert found == pytest.approx((0.5 * (1 + double) - k.square()).max().item(), rel=1e-4)


def test_the_variance_of_slowly_decaying_kernels():
    """1/2 at infinity, and 1/2 + 4^{−2α}/16 where k(δ) = 4^{−α}/4, beyond 10⁶ lengthscales."""
    kernel = RQKernel().double()
    for alpha in (0.05, 0.1, 0.4):
        kernel.alpha = torch.tensor(alpha, dtype=torch.float64)
        found = Problem.of("", kernel, None, "trace", None).constants.variance
        assert 0.5 + 4 ** (-2 * alpha) / 16 <= found * (1 + 1e-6)
        assert found <= 0.75


# Draws


def spectral_norm(error):
    return torch.linalg.eigvalsh(error).abs().amax(-1)


def frobenius_norm(error):
    return error.flatten(-2).norm(dim=-1)


NORMS = {"minh": frobenius_norm, "minh_pointwise": frobenius_norm}
DRAWS, NUMBER = 200, 64


@torch.no_grad()
def quantiles(kernel, num_dims, measure, number=NUMBER):
    """The 95 % quantile of each error over 200 draws: the largest over lags in [−2, 2]^d, or that
    at the worst lag."""
    lags_per_axis = {2: 13, 3: 7, 4: 5}[num_dims] if number == NUMBER else 5
    axis = torch.linspace(-2, 2, lags_per_axis, dtype=torch.float64)
    lags = torch.cartesian_prod(*[axis] * num_dims)
    lags = lags[: len(lags) // 2 + 1]  # the error is even; the last one is 0
    error = 0.0
    for omega, matrices in sampled(kernel, num_dims, measure, number, DRAWS, seed=7):
        waves = (omega @ lags.mT).cos()  # (draws, D, lags)
        sums = waves.mT @ matrices.flatten(-2) / number
        error = error + sums.unflatten(-1, matrices.shape[-2:])
    error = error - exact(kernel, num_dims, lags, error)
    norms = {name: NORMS.get(name, spectral_norm)(error) for name in BOUNDS}
    return {
        name: (
            norm.quantile(0.95, dim=0).max()
            if name in ("hoeffding", "minh_pointwise")
            else norm.amax(-1).quantile(0.95)
        ).item()
        for name, norm in norms.items()
    }


def exact(kernel, num_dims, lags, estimates):
    """K(δ) without its constants, by the kernel itself or, without a closed form, by the mean of
    the estimates, whose error is √200 times smaller than theirs."""
    p = estimates.shape[-1]
    try:
        values = kernel(lags, lags.new_zeros(1, num_dims)).to_dense().reshape(-1, p, p)
    except NotImplementedError:
        return estimates.mean(0)
    for term in terms(kernel):
        if not term.leaves:
            values = values - term.outputscale * term.factor.matrix @ term.factor.matrix.mT
    return values


@pytest.mark.slow
@pytest.mark.parametrize("measure", MEASURES)
@pytest.mark.parametrize("name", KERNELS)
def test_200_draws_stay_below_every_bound(name, measure):
    build, num_dims = KERNELS[name]
    bounds = existing(name, measure)
    found = quantiles(build(), num_dims, measure) if bounds else {}
    for theorem, bound in bounds.items():
        assert found[theorem] <= bound.error(NUMBER), theorem


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "measure", "number"),
    [
        ("curl_free_unit", "trace", NUMBER),
        ("rbf_unit", "base", NUMBER),
        ("curl_free_unit", "base", 4096),
    ],
)
def test_bounds_are_within_a_factor_of_20(name, measure, number):
    """So that they can fail. That of unbounded maps falls like 1/D at first, then like 1/√D."""
    build, num_dims = KERNELS[name]
    found = quantiles(build(), num_dims, measure, number)
    for theorem, bound in existing(name, measure).items():
        assert bound.error(number) / 20 <= found[theorem] <= bound.error(number), theorem


def test_where_bounds_exist():
    """In the measure "base" Minh's do not exist for fields, and Brault's for Gaussian ones only."""
    cells = itertools.product(KERNELS, MEASURES)
    missing = {cell: set(BOUNDS) - set(existing(*cell)) for cell in cells}
    separable = {"separable", "separable_sum", "two_tasks", "rbf_unit", "matern32_3d", "matern12"}
    separable |= {"scalar", "scalar_rq", "scalar_product", "spectral_mixture"}
    separable |= {"rank_one", "trained_root"}
    scalar_only = {"hoeffding", "rahimi_recht"}
    everything = set(BOUNDS)
    gaussian = {"curl_free", "divergence_free_2d", "scaled", "field_times_time", "active_dims"}
    gaussian |= {name for name in KERNELS if "unit" in name} - {"rbf_unit"}
    for (name, measure), names in missing.items():
        expected = {} if name in separable else scalar_only
        if name not in separable and measure == "base":
            smooth = name in gaussian or name == "curl_free_spectral_mixture"
            expected = everything - {"brault"} if smooth else everything
        expected = {
            "lcm": everything,
            "periodic": everything,
            "spectral_matrix": scalar_only,
            "scalar_bessel": everything,  # power 2: moments of whole orders only
            "matern12": everything - {"hoeffding", "minh_pointwise"},
        }.get(name, expected)
        rough = {"general_matern": {"brault"}, "curl_free_matern32": {"brault", "minh"}}
        expected = set(expected) | rough.get(name, set())
        if (name, measure) == ("curl_free_spectral_mixture", "trace"):
            expected = everything
        assert names == expected, (name, measure)


# Units and inverses


@pytest.mark.parametrize("measure", MEASURES)
@pytest.mark.parametrize("kind", [None, *FIELDS])
@pytest.mark.parametrize("theorem", BOUNDS)
def test_units(theorem, kind, measure):
    """A kernel 100 times as large; inputs, box and lengthscale in other units. Rounding."""
    kernel = unit("rbf", kind)
    bound = bound_of(theorem, kernel, BOX, measure)
    allowed = kind is None or (theorem == "brault" or ("minh" in theorem and measure == "trace"))
    assert (bound is not None) == allowed
    large, far = ScaleKernel(kernel).double(), unit("rbf", kind, lengthscale=1e5)
    large.outputscale = 100.0
    box = tuple((low * 1e5, high * 1e5) for low, high in BOX)
    for other, factor in [(large, 100.0), (far, 1.0 if kind is None else 1e-10)]:
        scaled = bound_of(theorem, other, BOX if other is large else box, measure)
        assert (scaled is None) == (bound is None)
        for number in (10, 10_000) if allowed else ():
            expected = factor * bound.error(number)
            assert scaled.error(number) == pytest.approx(expected, rel=1e-9)


BOUND_CASES = [
    ("hoeffding", "two_tasks", "trace"),
    ("rahimi_recht", "matern32_3d", "trace"),
    ("brault", "helmholtz", "trace"),
    ("brault", "curl_free", "base"),
    ("minh_pointwise", "general_matern", "trace"),
    ("minh", "field_separable_and_constant", "trace"),
]
each_bound = pytest.mark.parametrize(("theorem", "name", "measure"), BOUND_CASES)


@each_bound
@pytest.mark.parametrize("confidence", [1e-6, 0.5, 0.95, 1 - 1e-9])
@pytest.mark.parametrize("number", [1, 64, 10**6])
def test_inverses(theorem, name, measure, number, confidence):
    """P jumps down where the unbounded tail changes its form: there P(error) < 1 − confidence."""
    bound = existing(name, measure)[theorem]
    error = bound.error(number, confidence)
    rest = 1 - confidence
    assert bound.probability(number, error) <= rest * (1 + 1e-6)
    assert bound.probability(number, error * (1 - 1e-9)) >= rest * (1 - 1e-4)
    for share in (0.8, 1.3):
        needed = bound.num_frequencies(share * error, confidence)
        assert bound.probability(needed, share * error) <= rest * (1 + 1e-6)
        assert needed == 1 or bound.probability(needed - 1, share * error) > rest


@each_bound
def test_probabilities_decrease(theorem, name, measure):
    bound = existing(name, measure)[theorem]
    errors = np.geomspace(1e-3, 1e3, 400)
    table = np.array([[bound.probability(n, e) for e in errors] for n in (1, 10, 1000, 10**5)])
    assert (np.diff(table, axis=0) <= 0).all()
    assert (np.diff(table, axis=1) <= 0).all()
    assert table.min() >= 0
    assert table.max() == 1


def test_bounds_grow_with_the_box_only():
    """One point is a box, too: not better than one lag, since only the lag 0 is known."""
    kernel = unit("rbf", "curl_free")
    errors = [BOUNDS["minh"](kernel, ((0.0, side),) * 2).error(1000) for side in (0, 1e-3, 1, 9)]
    assert errors == sorted(errors)
    assert errors[0] > BOUNDS["minh_pointwise"](kernel).error(1000)


def test_a_kernel_is_read_at_its_present_values():
    kernel = unit("rbf", "curl_free")
    before = BOUNDS["minh"](kernel, BOX)
    kernel.base_kernel.lengthscale = 0.5
    assert BOUNDS["minh"](kernel, BOX).error(100) > 3 * before.error(100)
    assert kernel.base_kernel.raw_lengthscale.requires_grad
    single = unit("rbf", "curl_free").float()
    assert BOUNDS["minh"](single, BOX).error(100) == pytest.approx(before.error(100), rel=1e-6)


def test_only_the_columns_that_a_kernel_uses_count():
    kernel = gp_orff.CurlFreeKernel(unit("rbf"), num_dims=2, active_dims=(0, 2)).double()
    box = ((-1.0, 1.0), (0.0, 50.0), (-1.0, 1.0))
    expected = BOUNDS["minh"](unit("rbf", "curl_free"), BOX).error(100)
    assert BOUNDS["minh"](kernel, box).error(100) == pytest.approx(expected)


def test_measures_by_name_or_value():
    kernel = unit("rbf", "curl_free")
    for name, value in (("trace", Trace()), ("base", Base())):
        by_name, by_value = (BOUNDS["brault"](kernel, BOX, measure=m) for m in (name, value))
        assert by_name == by_value


def test_the_crossing_of_a_decreasing_function():
    assert crossing(lambda x: 7 - x, 1e-9) == pytest.approx(7, rel=1e-14)
    assert crossing(lambda x: 1 if x < 3 else -1, 1e9) == pytest.approx(3, rel=1e-14)


# Moments of half orders


@pytest.mark.parametrize("order", [0.5, 1.5, 2, 2.5])
@pytest.mark.parametrize("alpha", [0.7, 30.0])
def test_moments_of_a_gamma_mixture(order, alpha):
    """E s^t by quadrature over log s, times E χ₃^{2t}; differentiable in α."""

    def density(t, power):
        log_s = alpha * math.log(alpha) - math.lgamma(alpha) + alpha * t - alpha * math.exp(t)
        return math.exp(log_s + power * t)

    scale = scipy.integrate.quad(density, -60, 8, args=(order,), limit=400, epsabs=0)[0]
    chi = 2**order * math.gamma(1.5 + order) / math.gamma(1.5)

    def moment(a):
        spectrum = gp_orff.spectra.GammaMixture(torch.ones(1, 1).double(), a)
        return spectrum.moment(order, 3)

    a = torch.tensor([alpha], dtype=torch.float64, requires_grad=True)
    assert moment(a).item() == pytest.approx(scale * chi, rel=1e-8)
    assert gradcheck(moment, (a,))


# A spectrum and a factor of one's own


def test_a_spectrum_of_ones_own():
    class Bare(gp_orff.spectra.Gaussian):
        isotropic_lengthscale = None

    kernel = gp_orff.CurlFreeKernel(unit("rbf"), num_dims=2)
    gp_orff.spectrum.register(RBFKernel)(lambda kernel: Bare(kernel.lengthscale))
    with pytest.raises(NotImplementedError, match=r"moments\.register"):
        BOUNDS["minh"](kernel, BOX)


def test_a_factor_of_ones_own():
    class Twice(Gradient):
        pass

    class Kernel(gp_orff.CurlFreeKernel):
        def factor(self, dims):
            return Twice(self.num_dims, dims)

    kernel = Kernel(unit("rbf"), num_dims=2)
    assert math.isfinite(BOUNDS["minh"](kernel, BOX).error(10))  # that of its class above
    constants.register(Twice)(constants.dispatch(object))
    with pytest.raises(NotImplementedError, match="compare_with_exact"):
        BOUNDS["minh"](kernel, BOX)


# Bad input


FIELD = unit("rbf", "curl_free")
ROUGH = field("matern32", "curl_free", 2)
CONSTANT = ConstantKernel().double()
BATCH = RBFKernel(batch_shape=torch.Size([2])).double()
UNEQUAL = base("rbf", 2) + MultitaskKernel(base("rbf", 2), num_tasks=2).double()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: BOUNDS["hoeffding"](FIELD), "use minh_pointwise"),
        (lambda: BOUNDS["rahimi_recht"](FIELD, BOX), "use brault or minh"),
        (lambda: BOUNDS["brault"](field("matern52", "curl_free", 2), BOX, measure="base"), "trace"),
        (lambda: BOUNDS["brault"](field("rq", "curl_free", 2), BOX, measure="base"), "Orlicz"),
        (lambda: BOUNDS["brault"](ROUGH, BOX), "use minh, .*pointwise"),
        (
            lambda: BOUNDS["minh"](ROUGH, BOX),
            r"nu=1\.5.*use minh_pointwise",
        ),
        (lambda: BOUNDS["minh"](FIELD, BOX, measure="base"), 'measure="trace"'),
        (lambda: BOUNDS["minh_pointwise"](FIELD, measure="base"), 'measure="trace"'),
        (
            lambda: BOUNDS["rahimi_recht"](MaternKernel(nu=0.5).double(), BOX),
            "minh, .*hoeffding",
        ),
        (lambda: BOUNDS["minh"](FIELD), "domain"),
        (lambda: BOUNDS["minh"](FIELD, ((0.0, 1.0),)), "2 pairs .* got 1"),
        (lambda: BOUNDS["minh"](FIELD, ((0.0, math.nan),) * 2), "minh expects domain="),
        (lambda: BOUNDS["minh"](FIELD, ((0.0, math.inf),) * 2), "finite"),
        (lambda: BOUNDS["minh"](FIELD, ((1.0, 0.0),) * 2), "low, high"),
        (lambda: BOUNDS["minh"](FIELD, BOX, num_dims=3), "same inputs"),
        (lambda: BOUNDS["minh"](FIELD, BOX, measure="uniform"), '"trace" or "base"'),
        (lambda: BOUNDS["minh"](BATCH, BOX), "batch of shape"),
        (lambda: BOUNDS["minh"](CONSTANT, BOX), "only constants"),
        (lambda: BOUNDS["minh"](UNEQUAL, BOX), "number of outputs"),
        (lambda: BOUNDS["minh"](FIELD, BOX).error(100, 1.0), "between 0 and 1, got 1.0"),
        (lambda: BOUNDS["minh"](FIELD, BOX).error(100, math.nan), "between 0 and 1"),
        (lambda: BOUNDS["minh"](FIELD, BOX).num_frequencies(0.1, 0.0), "between 0 and 1"),
        (lambda: BOUNDS["minh"](FIELD, BOX).num_frequencies(0.0), "positive"),
        (lambda: BOUNDS["minh"](FIELD, BOX).probability(100, math.inf), "finite"),
        (lambda: BOUNDS["minh"](FIELD, BOX).probability(0, 0.1), "num_frequencies >= 1"),
        (lambda: BOUNDS["minh"](FIELD, BOX).error(math.nan), "num_frequencies >= 1"),
    ],
)
def test_bad_input(call, words):
    with pytest.raises(ValueError, match=words):
        call()


def test_bounds_that_are_not_known():
    with pytest.raises(NotImplementedError, match="compare_with_exact"):
        BOUNDS["minh"](CASES["lcm"]().kernel, BOX)
    with pytest.raises(NotImplementedError, match='measure="base"'):
        BOUNDS["minh"](field("spectral_mixture", "curl_free", 2), BOX)
    with pytest.raises(TypeError, match="gpytorch kernel"):
        BOUNDS["minh"]("rbf", BOX)
