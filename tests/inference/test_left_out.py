"""The part of a symbol that a grid omits: gradients, values, and the constant of potentials."""

import dataclasses
import functools

import gpytorch
import pytest
import torch
from gpytorch.kernels import (
    MaternKernel,
    MultitaskKernel,
    RBFKernel,
    RQKernel,
    ScaleKernel,
    SpectralMixtureKernel,
)
from torch.func import grad, hessian, vmap

import gp_orff
from gp_orff.data.dataset import Dataset
from gp_orff.data.observations import SymbolObservations
from gp_orff.data.patterns import DEFAULT
from gp_orff.data.reading import Options, read
from gp_orff.features.assemble import draw, expand
from gp_orff.features.draws import remainder
from gp_orff.features.expansion import apply_symbol
from gp_orff.features.truncation import periodised_variance, truncated_variance
from gp_orff.inference.features import FeatureInference
from gp_orff.kernels.tree import space_of, spectra_of, terms
from gp_orff.symbols.base import Identity
from tests.support import oracles, registry

RULES = {**registry.RULES, **registry.DETERMINISTIC_RULES}


def uniform(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(*shape, generator=generator, dtype=torch.float64)


def rule_of(name, num_dims):
    """Few frequencies, so that a grid leaves out much."""
    if name == "grid":
        return dataclasses.replace(RULES[name](60), domain=((-1.0, 1.0),) * num_dims)
    return RULES[name](12 if name == "gauss_hermite" else 16)


def observing_all(case, rule):
    """The observations of a field and of every symbol that exists, and the names of these."""
    kernel, d, p = case.kernel.double(), case.num_dims, case.num_outputs
    x = uniform(6, d) - 0.5
    readings = read(x, torch.randn(6, p, generator=torch.Generator().manual_seed(1)), p, Options())
    draws = draw(kernel, rule_of(rule, d), d)
    data, names = Dataset.in_memory(readings), []
    for name, build in registry.SYMBOLS.items():
        symbol, space = build(len(space_of(kernel, d)), p), space_of(kernel, d)
        try:
            q = symbol.num_outputs(p)
            own = SymbolObservations.of(kernel, d, 0.9 * x[:1], torch.ones(1, q), symbol, 0.05)
            truncated_variance(symbol, kernel, draws, space)
        except (ValueError, NotImplementedError):
            continue
        data, names = data.observing(own), [*names, name]
    return FeatureInference(data, draws), names


IN_THE_PLANE = len(registry.SYMBOLS) - 1  # no vector potential
IN_SPACE = len(registry.SYMBOLS) - 2  # no stream function or flux
OF_ANY = 4  # background, box average, component, Jacobian
EXPECTED = {  # how many symbols are observed
    "curl_free": IN_THE_PLANE,
    "curl_free_rq": IN_THE_PLANE,
    "divergence_free_2d": IN_THE_PLANE,
    "divergence_free_3d": IN_SPACE,
    "helmholtz": IN_THE_PLANE,
    "general_matern": IN_THE_PLANE - 3,  # ν = 1.8: no derivatives
    "separable": OF_ANY,
    "separable_sum": IN_THE_PLANE,
    "rank_one": OF_ANY,
    "trained_root": IN_SPACE - 1,  # no potential without a reference
    "lcm": IN_THE_PLANE,
    "spectral_matrix": IN_THE_PLANE,
    "scaled": IN_THE_PLANE,
    "potential_of_a_sum": IN_SPACE,
    "field_separable_and_constant": IN_THE_PLANE,
    "field_times_time": IN_THE_PLANE,
    "periodic": IN_THE_PLANE,
    "active_dims": OF_ANY,
    "scalar": OF_ANY,
    "scalar_rq": OF_ANY,
    "scalar_bessel": OF_ANY,
    "scalar_product": OF_ANY,
    "spectral_mixture": OF_ANY,
}


def known(name, rule):
    """Whether the rule knows the kernel."""
    leaves = [leaf.kernel for term in terms(registry.CASES[name]().kernel) for leaf in term.leaves]
    if rule == "gauss_hermite":
        return all(isinstance(own, RBFKernel) for own in leaves)
    return rule != "grid" or name not in registry.NO_GRID


def expected(name, rule):
    mixed = {"trained_root": 1}
    mixed |= dict.fromkeys(
        ["separable_sum", "lcm", "spectral_matrix", "field_separable_and_constant"], 2
    )
    antiderivatives = mixed.get(name, 0) if rule == "grid" else 0  # of what is no derivative
    return EXPECTED[name] - antiderivatives


CROSSED = [(name, rule) for name in registry.CASES for rule in RULES]


@pytest.mark.parametrize(("name", "rule"), [own for own in CROSSED if not known(*own)])
def test_kernels_that_a_rule_does_not_know(name, rule):
    with pytest.raises(NotImplementedError, match="expect"):
        observing_all(registry.CASES[name](), rule)


OF_RULES = ("helmholtz", "field_separable_and_constant", "scalar_product")
GRADIENTS = [
    (name, rule)
    for name, rule in CROSSED
    if known(name, rule) and (rule == "grid" or name in OF_RULES)
]
"""All kernels on a grid, which leaves something out; other rules change nothing but frequencies."""


@pytest.mark.slow
@pytest.mark.parametrize(("name", "rule"), GRADIENTS)
def test_gradients_of_the_evidence(name, rule):
    """After all symbols are observed, along a random direction of all hyperparameters, by central
    differences of fourth order: their error is below 1e-8."""
    case = registry.CASES[name]()
    observations, names = observing_all(case, rule)
    assert len(names) == expected(name, rule), names
    noises = {DEFAULT: 0.1 * torch.eye(case.num_outputs).double()}
    zero = torch.zeros(case.num_outputs).double()
    parameters = [own for own in case.kernel.parameters() if own.requires_grad]
    generator = torch.Generator().manual_seed(0)
    steps = [torch.randn(own.shape, generator=generator).double() for own in parameters]

    def evidence(size=0.0):
        for own, step in zip(parameters, steps, strict=True):
            own.data += size * step
        value = observations.evidence(case.kernel, noises).log_density(zero, 0)
        for own, step in zip(parameters, steps, strict=True):
            own.data -= size * step
        return value

    found = torch.autograd.grad(evidence(), parameters)
    along = sum((g * s).sum() for g, s in zip(found, steps, strict=True))
    norm = sum(g.square().sum() for g in found).sqrt()
    with torch.no_grad():
        h = 1e-3
        near, far = (evidence(k * h) - evidence(-k * h) for k in (1, 2))
    difference = (8 * near - far) / (12 * h)
    assert (along - difference).abs() < 1e-6 * norm


@pytest.mark.parametrize("num_dims", [1, 2, 3])
@pytest.mark.parametrize("name", registry.SPECTRA)
def test_frequencies_off_a_grid_make_it_whole(name, num_dims):
    """With those on it they have the mass, where the density is smooth at zero, and the second
    moments of the law; on a coarse grid, of which as much as half is left out. 1e-2 of what is."""
    kernel = registry.base(name, num_dims)
    smooth = name not in ("matern12", "matern32")  # else without a second moment, or a heavy tail
    field = gp_orff.CurlFreeKernel(kernel, num_dims=num_dims) if smooth else kernel
    grid = gp_orff.Grid(spacing=0.5, cutoff=2.5)
    (own,), law = draw(field.double(), grid, num_dims), spectra_of(terms(field)[0])
    parts = own.nodes(law), remainder(own, law)
    if smooth:
        kept, beyond = ((weights[:, None] * omega.square()).sum(0) for (omega,), weights in parts)
        whole = law[0].second_moments(num_dims)
    else:
        kept, beyond = (weights.sum() for _, weights in parts)
        whole = torch.ones(()).double()
    assert (beyond > 1e-4 * whole).all()
    torch.testing.assert_close(kept + beyond, whole, rtol=0, atol=1e-2 * beyond.max().item())


@pytest.mark.parametrize("name", ["curl_free", "divergence_free_2d", "helmholtz", "general_matern"])
def test_the_field_itself_lacks_its_truncated_variance(name):
    """Nearest images of the kernel and sums over frequencies: two ways to the same variance."""
    kernel = registry.CASES[name]().kernel.double()
    grid = gp_orff.Grid(domain=((-1.0, 1.0),) * 2, max_features=120)
    draws = draw(kernel, grid, 2)
    expected, _ = truncated_variance(Identity(), kernel, draws, (0, 1))
    white, common = truncated_variance(
        Identity() @ Identity(), kernel, draws, (0, 1)
    )  # no closed form
    torch.testing.assert_close(white, expected, rtol=5e-3, atol=5e-3 * expected.max().item())
    assert not common.any()


GRIDS = [name for name in registry.CASES if name not in registry.NO_GRID]


@pytest.mark.slow
@pytest.mark.parametrize("name", GRIDS)
def test_what_a_grid_holds_term_by_term_is_what_its_features_hold(name):
    """Values and gradients, and parts of a sum lack what the whole does."""
    case = registry.CASES[name]()
    kernel, d = case.kernel.double(), case.num_dims
    draws = draw(kernel, rule_of("grid", d), d)
    expansion = expand(kernel, draws, d)
    found, expected = (
        truncated_variance(Identity(), kernel, draws, (), own)[0] for own in (None, expansion)
    )
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    parameters = [own for own in kernel.parameters() if own.requires_grad]
    slopes = (torch.autograd.grad(own.sum(), parameters) for own in (found, expected))
    for mine, theirs in zip(*slopes, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-8, atol=1e-10)
    if isinstance(kernel, gpytorch.kernels.AdditiveKernel):
        of_terms = iter(draws)
        parts = [
            truncated_variance(Identity(), own, [next(of_terms) for _ in terms(own)], ())[0]
            for own in kernel.kernels
        ]
        torch.testing.assert_close(sum(parts), expected, rtol=1e-10, atol=1e-12)


def potential_given_its_gradient(k, x, y, noise, xs, reference):
    """Mean and covariance of g(xs), less g(reference) where there is one, g ~ GP(0, k(x − z))."""

    def blocks(function, a, b):  # rows are the entries of the left one, point by point
        values = vmap(function)((a[:, None] - b).flatten(0, 1)).reshape(len(a), len(b), -1)
        return values.unflatten(-1, (-1, b.shape[-1])) if function is not k else values

    noisy = -blocks(hessian(k), x, x).transpose(1, 2).flatten(2).flatten(0, 1)
    noisy = noisy + noise * torch.eye(len(noisy))
    cross = -blocks(grad(k), xs, x).flatten(1)
    prior = blocks(k, xs, xs).squeeze(-1)
    if reference is not None:
        own = reference.expand_as(xs)
        cross = cross + blocks(grad(k), own, x).flatten(1)
        left, right = blocks(k, own, xs).squeeze(-1), blocks(k, xs, own).squeeze(-1)
        prior = prior - left - right + blocks(k, own, own).squeeze(-1)
    return oracles.condition(prior, cross, noisy, y.flatten())


@pytest.mark.slow
@pytest.mark.parametrize("alpha", [0.05, 0.25, 0.5, 0.69, 1.0, 1.01, 2.0, 8.3, 100.0, 1e6])
def test_potentials_under_rational_quadratic_kernels(alpha):
    """S(0) is infinite for α ≤ 1. Against dense algebra: 1e-2 of a standard deviation with a
    reference, 2e-2 without, whose constant images see a little of."""
    x, xs, reference = uniform(12, 2), uniform(4, 2, seed=2), torch.full((2,), 0.5).double()
    y = torch.randn(12, 2, generator=torch.Generator().manual_seed(1)).double()
    base = RQKernel().double()
    base.alpha, base.lengthscale = alpha, max(0.5, 0.45 / alpha**0.5)
    spacing = {0.05: 0.45, 0.25: 0.65}.get(alpha, 1.0)  # images fall as its power 2 + 2α
    model = gp_orff.VectorFieldGP(
        gp_orff.CurlFreeKernel(base, num_dims=2),
        mean=gpytorch.means.ZeroMean(),
        frequencies=gp_orff.Grid(domain=((0.0, 1.0),) * 2, spacing=spacing, cutoff=30.0),
    )
    model.likelihood.noise = 0.01
    posterior = model.condition(x, y).posterior()

    def k(lag):
        return oracles.rational_quadratic(lag, base.lengthscale.item(), alpha)

    for own, tolerance in ((reference, 1e-2), (None, 2e-2)):
        mean, covariance = potential_given_its_gradient(k, x, y, 0.01, xs, own)
        found, sd = posterior(xs, gp_orff.Potential(own)), covariance.diagonal().sqrt()
        assert ((found.mean - mean) / sd).abs().max() < tolerance
        torch.testing.assert_close(found.stddev, sd, rtol=tolerance, atol=0)


def test_absolute_potentials_have_the_variance_of_their_kernel():
    """Of a spectral mixture, whose constant is that of a smooth density, and of two parts in space,
    where a vector potential has 2/3 of it in every component."""
    mixture = SpectralMixtureKernel(num_mixtures=2, ard_num_dims=2).double()
    mixture.mixture_scales = torch.full((2, 1, 2), 0.2)
    mixture.mixture_means = torch.tensor([[[0.1, 0.2]], [[0.3, 0.0]]])
    mixture.mixture_weights = torch.tensor([0.4, 0.9])
    flat = gp_orff.CurlFreeKernel(mixture, num_dims=2)
    deep = gp_orff.DivergenceFreeKernel(RBFKernel().double(), num_dims=3)
    k0 = 1.3**2 * torch.ones(1, 1).double()  # the weights' sum along every axis
    for kernel, d, symbol, variance in (
        (flat, 2, gp_orff.Potential(), k0),
        (deep, 3, gp_orff.VectorPotential(), 2 / 3 * torch.eye(3).double()),
    ):
        draws = draw(kernel, gp_orff.Grid(spacing=0.8, cutoff=3.0), d)
        white, common = truncated_variance(symbol, kernel, draws, tuple(range(d)))
        seen = apply_symbol(symbol, expand(kernel, draws, d).double(), tuple(range(d)))
        features = seen.features(torch.zeros(1, d).double())
        total = features @ features.mT + white + common
        torch.testing.assert_close(total, variance, rtol=0, atol=1e-3 * variance.max().item())
        assert common.diagonal().min() > 5e-3  # as much as tells
        assert white.diagonal().min() > 1e-4


@pytest.mark.parametrize("num_dims", [1, 2])
def test_a_periodised_variance_is_a_sum_over_the_nearest_images(num_dims):
    """K at all lags of zero or one period along each axis, where a period is three lengthscales."""
    lengthscale, scale = torch.linspace(0.8, 1.2, num_dims).double(), 1.7
    base = MaternKernel(nu=2.5, ard_num_dims=num_dims).double()
    base.lengthscale = lengthscale
    spacing = 2 * torch.pi / 3.0
    axis = torch.tensor([-3.0, 0.0, 3.0]).double()
    images = torch.cartesian_prod(*[axis] * num_dims).reshape(-1, num_dims)
    away = images[images.abs().sum(-1) > 0]
    k = functools.partial(oracles.matern, lengthscale=lengthscale, nu=2.5)
    curvature = oracles.second_moment("matern52") * torch.diag(lengthscale**-2)
    expected = curvature - vmap(hessian(k))(away).sum(0)

    field = gp_orff.CurlFreeKernel(base, num_dims=num_dims)
    for kernel, variance in (
        (ScaleKernel(field), expected),
        (ScaleKernel(MultitaskKernel(base, num_tasks=2, rank=1)), 1 + k(away).sum()),
    ):
        kernel.double().outputscale = scale
        (own,) = draw(kernel, gp_orff.Grid(spacing=spacing, cutoff=30.0), num_dims)
        (term,) = terms(kernel)
        found = periodised_variance(term, own)
        if variance.dim() == 0:
            variance = variance * kernel.base_kernel.task_covar_module.covar_matrix.to_dense()
        torch.testing.assert_close(found, scale * variance)


def test_parts_of_a_separable_kernel_have_their_variance_over_directions():
    """E[P Σ P] with P = ωωᵀ/‖ω‖², ω = z/ℓ and z of any direction, under two lengthscales."""
    kernel = MultitaskKernel(RBFKernel(ard_num_dims=2), num_tasks=2, rank=1).double()
    kernel.data_covar_module.lengthscale = torch.tensor([0.6, 1.8]).double()
    kernel.task_covar_module.covar_factor.data = torch.tensor([[0.8], [-0.5]]).double()
    angle = torch.arange(20000).double() * (2 * torch.pi / 20000)
    omega = torch.stack([angle.cos() / 0.6, angle.sin() / 1.8], dim=-1)
    unit = omega / omega.norm(dim=-1, keepdim=True)
    projected = unit.unsqueeze(-1) * unit.unsqueeze(-2)
    sigma = kernel.task_covar_module.covar_matrix.to_dense()
    expected = (projected @ sigma @ projected).mean(0)

    symbol, x = gp_orff.CurlFreePart(), torch.zeros(1, 2).double()
    draws = draw(kernel, gp_orff.Grid(spacing=0.4, cutoff=8.0), 2)
    white, common = truncated_variance(symbol, kernel, draws, (0, 1))
    features = apply_symbol(symbol, expand(kernel, draws, 2).double(), (0, 1)).features(x)
    torch.testing.assert_close(features @ features.mT + white + common, expected)
    assert common.diagonal().min() > 1e-3 * expected.diagonal().max()


def test_potentials_on_a_line_have_the_variance_of_their_kernel():
    base = RBFKernel().double()
    kernel = gp_orff.CurlFreeKernel(base, num_dims=1)
    draws, x = draw(kernel, gp_orff.Grid(spacing=0.5, cutoff=8.0), 1), torch.zeros(1, 1).double()
    white, common = truncated_variance(gp_orff.Potential(), kernel, draws, (0,))
    seen = apply_symbol(gp_orff.Potential(), expand(kernel, draws, 1).double(), (0,))
    features = seen.features(x)
    total = features @ features.mT + white + common
    torch.testing.assert_close(total, torch.ones(1, 1).double())


def test_one_term_without_a_potential_is_enough_to_refuse_it():
    field = gp_orff.CurlFreeKernel(RBFKernel().double(), num_dims=2)
    kernel = field + MultitaskKernel(RBFKernel(), num_tasks=2).double()
    draws = draw(kernel, gp_orff.Grid(spacing=0.8, cutoff=5.0), 2)
    with pytest.raises(NotImplementedError, match="frequencies near zero"):
        truncated_variance(gp_orff.Potential(), kernel, draws, (0, 1))
