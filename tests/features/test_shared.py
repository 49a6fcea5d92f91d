"""Random rules that draw the terms of a sum from one mixture: exact weights, exact roots."""

import math
from dataclasses import replace

import gpytorch
import pytest
import scipy.integrate
import torch
from gpytorch.kernels import (
    ConstantKernel,
    LCMKernel,
    MultitaskKernel,
    RBFKernel,
    ScaleKernel,
)
from torch.distributions import Normal

import gp_orff
from gp_orff.features.assemble import draw, expand, expand_terms, num_features, term_spectra
from gp_orff.features.expansion import KroneckerExpansion
from gp_orff.kernels.base import reduced_root
from gp_orff.kernels.tree import Mixing, terms
from gp_orff.models.storage import build_rule, describe_rule
from tests.support import fields, oracles
from tests.support.models import dense_noise, evidence, gradient, vector_gp
from tests.support.registry import MEASURES, RULES, SPECTRA, base, randomise_tasks


def tasks(kernel, num_tasks=2, seed=0):
    return randomise_tasks(MultitaskKernel(kernel, num_tasks=num_tasks, rank=1).double(), seed)


def rbf(lengthscale, **kwargs):
    kernel = RBFKernel(**kwargs).double()
    kernel.lengthscale = lengthscale
    return kernel


def scaled(kernel, outputscale):
    kernel = ScaleKernel(kernel).double()
    kernel.outputscale = outputscale
    return kernel


def helmholtz(num_dims=2, lengthscales=(0.7, 1.1)):
    kernel = gp_orff.HelmholtzKernel(num_dims=num_dims).double()
    for part, lengthscale in zip(kernel.kernels, lengthscales, strict=True):
        part.base_kernel.base_kernel.lengthscale = lengthscale
    kernel.divergence_free.outputscale = 0.4
    return kernel


def curl_free(base_kernel, num_dims=2, outputscale=0.7):
    return scaled(gp_orff.CurlFreeKernel(base_kernel, num_dims=num_dims), outputscale)


def coregionalisation(num_tasks=2):
    """Three terms with p columns each, of which p are left."""
    names = ("rbf", "matern52", "matern32")
    parts = [tasks(base(name, 2), num_tasks, seed) for seed, name in enumerate(names)]
    return parts[0] + parts[1] + parts[2]


def separable(lengthscales, num_tasks=3):
    first, *others = (tasks(rbf(own), num_tasks, i) for i, own in enumerate(lengthscales))
    return sum(others, first)


def mixed_linear_model():
    kernel = LCMKernel([base("spectral_mixture", 2), base("rbf", 2)], num_tasks=2, rank=1)
    for seed, part in enumerate(kernel.double().covar_module_list):
        randomise_tasks(part, seed)
    return kernel


def some_alone():
    """A constant, a product, a potential of other inputs, and two that share."""
    product = tasks(rbf(0.9) * rbf(1.4, active_dims=(1,)), seed=3)
    line = MultitaskKernel(rbf(0.6), num_tasks=2, rank=1, active_dims=(0,)).double()
    other = randomise_tasks(line, seed=4)
    return curl_free(base("rbf", 2)) + tasks(ConstantKernel()) + product + other + tasks(rbf(1.2))


def three_potentials():
    return sum(
        (curl_free(base("rbf", 2, ard=False), outputscale=v) for v in (0.5, 0.9)),
        curl_free(base("matern52", 2)),
    )


KERNELS = {
    "helmholtz": helmholtz,
    "helmholtz_3d": lambda: helmholtz(3),
    "coregionalisation": coregionalisation,
    "two_tasks": lambda: tasks(rbf(0.6)) + tasks(base("matern52", 2), seed=1),
    "curl_free_and_separable": lambda: curl_free(base("rbf", 2)) + tasks(rbf(1.3)),
    "three_potentials": three_potentials,
    "scalars": lambda: scaled(base("rbf", 2), 0.5) + base("rq", 2),
    "some_alone": some_alone,
}
SIZES = {"helmholtz_3d": 3}  # inputs, 2 of all others
MODELS = [(name, measure) for name in KERNELS for measure in MEASURES]


def size(name):
    return SIZES.get(name, 2)


def pair(num_dims):
    x = torch.linspace(-0.3, 0.4, num_dims, dtype=torch.float64).unsqueeze(0)
    return x, torch.cat([x, x + 0.5, x - 0.9])


def estimate(kernel, rule, x, z):
    """Φ(x) Φ(z)ᵀ."""
    expansion = expand(kernel, draw(kernel, rule, x.shape[-1]), x.shape[-1])
    return expansion.features(x) @ expansion.features(z).mT


def is_unbiased(samples, exact):
    standard_error = samples.std(0) / len(samples) ** 0.5
    return bool(((samples.mean(0) - exact).abs() <= 5 * standard_error + 1e-12).all())


SEEDS = 60  # standard errors are below a tenth of the 40 % by which the tests can fail


@torch.no_grad()
def samples_of(kernel, name, num_dims, **options):
    points = pair(num_dims)
    rules = [RULES[name](24, shared=True, seed=seed, **options) for seed in range(SEEDS)]
    return torch.stack([estimate(kernel, rule, *points) for rule in rules])


@pytest.mark.slow
@pytest.mark.parametrize(("name", "measure"), MODELS)
def test_unbiased(name, measure):
    """Over many seeds, within 5 standard errors of the exact kernel."""
    kernel, d = KERNELS[name](), size(name)
    samples, exact = samples_of(kernel, "monte_carlo", d, measure=measure), kernel(*pair(d))
    assert is_unbiased(samples, exact.to_dense())
    assert not is_unbiased(samples, 1.4 * exact.to_dense())  # it can fail


@pytest.mark.slow
@pytest.mark.parametrize("rule", [name for name in RULES if name != "monte_carlo"])
@pytest.mark.parametrize("name", ["helmholtz", "coregionalisation"])
def test_unbiased_with_frequencies_that_depend_on_each_other(name, rule):
    kernel = KERNELS[name]()
    assert is_unbiased(samples_of(kernel, rule, 2), kernel(*pair(2)).to_dense())


def test_unbiased_where_the_spectrum_is_not_what_is_drawn_from():
    """Components of spectral mixtures are drawn with equal probabilities, whatever their weights;
    the expectation of the terms side by side, which have their own importance weights."""
    kernel = mixed_linear_model()
    apart = kernel.covar_module_list[0] + kernel.covar_module_list[1]
    rule = gp_orff.QuasiMonteCarlo(2**15)
    with torch.no_grad():
        exact = estimate(apart, rule, *pair(2))
        samples = [
            estimate(kernel, gp_orff.MonteCarlo(256, seed=seed), *pair(2)) for seed in range(200)
        ]
    assert is_unbiased(torch.stack(samples), exact)


def by_hand(kernel, draws, measure, x, z):
    """Σ_k cos⟨ω_k, x − z⟩ Σ_q w_qk A_q(ω_k), each term q with one RBF kernel."""
    parts = [part.base_kernel for part in kernel.kernels]
    scales = [own.base_kernel.lengthscale.squeeze() for own in parts]
    omega = torch.cat([own.base_0 / ell for own, ell in zip(draws, scales, strict=True)])
    densities = [Normal(0.0, 1 / ell).log_prob(omega).sum(-1) for ell in scales]
    logs = []
    for own, density, ell, part in zip(draws, densities, scales, parts, strict=True):
        squared = (ell * omega).square().sum(-1) / omega.shape[-1]
        is_field = isinstance(part, gp_orff.CurlFreeKernel | gp_orff.DivergenceFreeKernel)
        tilt = squared.log() if measure == "trace" and is_field else 0.0
        logs.append(density + tilt + math.log(len(own.base_0)))
    mixture, total = torch.logsumexp(torch.stack(logs), dim=0), 0.0
    for part, own, density in zip(kernel.kernels, parts, densities, strict=True):
        weights = part.outputscale * (density - mixture).exp()
        total = total + oracles.fourier_sum(x, z, omega, weights, MATRICES[type(own)](own, omega))
    return total


MATRICES = {
    gp_orff.CurlFreeKernel: lambda kernel, omega: oracles.outer(omega),
    gp_orff.DivergenceFreeKernel: lambda kernel, omega: oracles.projected(omega),
}


@pytest.mark.parametrize("measure", MEASURES)
@pytest.mark.parametrize("num_dims", [2, 3])
def test_evidence_and_gradient_are_those_of_the_definition(num_dims, measure):
    """Of a `HelmholtzKernel`, to rounding, in an unmodified `ExactGP`."""
    kernel = helmholtz(num_dims)
    orff = gp_orff.ORFFKernel(kernel, gp_orff.Orthogonal(16, measure=measure, shared=True))
    x, z = fields.draw(12, num_dims), fields.draw(5, num_dims, seed=1)
    draws = orff.frequencies
    expected = by_hand(kernel, draws, measure, x, z)
    assert (orff(x, z).to_dense() - expected).abs().max() < 1e-12 * expected.abs().max()
    model = vector_gp(x, fields.draw(12, num_dims, seed=2), orff, noise=0.1)
    noisy = by_hand(kernel, draws, measure, x, x) + dense_noise(model, 12)
    residuals = (model.train_targets - model.mean_module(x)).flatten()
    wanted, found = oracles.log_density(noisy, residuals), evidence(model)
    assert found.item() == pytest.approx(wanted.item(), rel=1e-9)
    slopes, expected = gradient(found, model), gradient(wanted, model)
    assert (slopes - expected).norm() < 1e-9 * expected.norm()


@pytest.mark.parametrize(("name", "measure"), MODELS)
def test_gradients_reach_every_hyperparameter(name, measure):
    """Central differences of Σ T ∘ K: their rounding and their third derivatives are near 1e-9."""
    kernel, (x, z) = KERNELS[name](), pair(size(name))
    rule = gp_orff.MonteCarlo(24, measure=measure, shared=True)
    draws = draw(kernel, rule, size(name))
    direction = fields.draw(*kernel(x, z).shape)

    def value():
        expansion = expand(kernel, draws, size(name))
        return (direction * (expansion.features(x) @ expansion.features(z).mT)).sum()

    parameters = list(kernel.parameters())
    for slopes, parameter in zip(torch.autograd.grad(value(), parameters), parameters, strict=True):
        assert slopes.any()
        for index, slope in enumerate(slopes.flatten()):
            entries, values = parameter.data.view(-1), []
            for step in (1e-5, -2e-5):
                entries[index] += step
                values.append(value().item())
            entries[index] += 1e-5
            assert (values[0] - values[1]) / 2e-5 == pytest.approx(slope.item(), rel=1e-6, abs=1e-8)


def features(kernel, number, shared, num_dims=2):
    rule = gp_orff.MonteCarlo(number, shared=shared)
    orff = gp_orff.ORFFKernel(kernel, rule, num_dims=num_dims)
    assert num_features(kernel, orff.frequencies) == orff.num_features  # without features made
    return sum(own.num_frequencies for own in orff.frequencies), orff.num_features


def test_number_of_features():
    """D frequencies in all, with p features a column at most."""
    assert features(helmholtz(), 64, shared=False) == (128, 256)
    assert features(helmholtz(), 64, shared=True) == (64, 256)
    assert features(helmholtz(3), 64, shared=True, num_dims=3) == (64, 384)
    assert features(coregionalisation(), 60, shared=False) == (180, 720)
    assert features(coregionalisation(), 60, shared=True) == (60, 240)
    assert features(three_potentials(), 60, shared=False) == (180, 360)
    assert features(three_potentials(), 60, shared=True) == (60, 120)  # one column ω, singular
    assert features(three_potentials() + tasks(rbf(1.0)), 60, shared=True) == (60, 240)


def two_scales(scale):
    return scaled(rbf(0.5), scale) + scaled(rbf(1.2), 1.0)


def test_each_term_gives_frequencies_by_its_share_of_the_variance():
    """Minh 2016, (58) and (59): tr μ̃ is tr K(0), so that every draw has the variance at lag zero.

    Shares of 48 and 16 of 64; a term without variance gives one.
    """
    kernel = two_scales(3.0)
    for seed in range(3):
        rule = gp_orff.MonteCarlo(64, seed=seed, shared=True)
        shared = gp_orff.ORFFKernel(kernel, rule, num_dims=2)
        assert [own.num_frequencies for own in shared.frequencies] == [48, 16]
        variance = shared.features(torch.zeros(1, 2).double()).square().sum().item()
        assert variance == pytest.approx(4, rel=1e-9)
    numbers = draw(two_scales(1e-9), gp_orff.MonteCarlo(64, shared=True), 2)
    assert [own.num_frequencies for own in numbers] == [1, 64]


def test_a_state_brings_its_numbers_of_frequencies():
    """Shares follow hyperparameters, those of a new kernel are others."""
    rule, (x, z) = gp_orff.MonteCarlo(64, shared=True), pair(2)
    trained, new = (gp_orff.ORFFKernel(two_scales(s), rule, num_dims=2) for s in (3.0, 1.0))
    new.load_state_dict(trained.state_dict())
    assert [own.num_frequencies for own in new.frequencies] == [48, 16]
    torch.testing.assert_close(new(x, z).to_dense(), trained(x, z).to_dense(), rtol=0, atol=1e-12)


COMPARED = {  # squared errors at equal features: shared over side by side; 100 seeds give 6 %
    "separable": (lambda: separable((0.4, 0.6, 1.0)), 3.0, (0.4, 0.8)),
    "helmholtz": (lambda: helmholtz(lengthscales=(0.6, 0.6)), 1.0, (0.75, 1.15)),
    "far_apart": (lambda: helmholtz(lengthscales=(0.3, 1.0)), 1.0, (0.85, 1.25)),
}


@pytest.mark.parametrize("name", COMPARED)
def test_errors_of_the_covariance_with_equal_features(name):
    """Where columns are merged they are smaller; where they stand side by side they are not."""
    build, ratio, (low, high) = COMPARED[name]
    kernel, x = build(), fields.draw(15, 2)
    errors = []
    for shared, number in ((True, 60), (False, 60 / ratio)):
        rules = [gp_orff.MonteCarlo(int(number), seed=s, shared=shared) for s in range(100)]
        with torch.no_grad():
            found = torch.stack([estimate(kernel, rule, x, x) for rule in rules])
        errors.append((found - kernel(x).to_dense()).square().sum((-1, -2)).mean().item())
    assert features(kernel, 60, shared=True)[1] == features(kernel, int(number), shared=False)[1]
    assert low < errors[0] / errors[1] < high


def test_one_task_matrix_stays_a_kronecker_product():
    kernel = tasks(scaled(rbf(0.5), 0.3) + rbf(1.2), num_tasks=3)
    expansion = expand(kernel, draw(kernel, gp_orff.MonteCarlo(16, shared=True), 2), 2)
    assert isinstance(expansion, KroneckerExpansion)
    assert expansion.num_features == 2 * 16 * 3


def test_terms_that_cannot_share_keep_their_frequencies():
    kernel = some_alone()
    shared, alone = (
        draw(kernel, gp_orff.MonteCarlo(32, shared=shared), 2) for shared in (True, False)
    )
    zero = torch.zeros(1, 2).double()
    field, other = (
        part(zero).to_dense().trace().item()
        for part in (curl_free(base("rbf", 2)), tasks(rbf(1.2)))
    )
    number = round(32 * field / (field + other))
    assert [own.num_frequencies for own in shared] == [number, 1, 32, 32, 32 - number]
    for i in (2, 3):
        assert all(map(torch.equal, shared[i].bases, alone[i].bases))


def test_a_linear_model_of_coregionalisation_shares_in_any_case():
    kernel = LCMKernel([base("rbf", 2), base("matern32", 2)], num_tasks=2, rank=1).double()
    one, other = (
        estimate(kernel, gp_orff.MonteCarlo(32, shared=shared), *pair(2))
        for shared in (True, False)
    )
    assert torch.equal(one, other)


def test_a_quadrature_shares_nothing():
    """Its nodes are no sample of a mixture."""
    kernel = LCMKernel([base("rbf", 2), base("rbf", 2)], num_tasks=2, rank=1).double()
    found = estimate(kernel, gp_orff.GaussHermite(16), *pair(2))
    torch.testing.assert_close(found, kernel(*pair(2)).to_dense(), rtol=0, atol=1e-9)


def test_singular_sums_have_no_nugget():
    """At the frequencies of two terms with one lengthscale, the third is zero to rounding."""
    kernel = helmholtz(lengthscales=(0.02, 2.0)) + curl_free(rbf(0.02, active_dims=(0, 1)))
    draws, (x, z) = draw(kernel, gp_orff.MonteCarlo(60, shared=True), 2), pair(2)
    expected, expansion = by_hand(kernel, draws, "trace", x, z), expand(kernel, draws, 2)
    numbers = [own.num_frequencies for own in draws]
    assert numbers == [30, 1, 30]  # of 60, and one of the term that is 10⁻⁴ of the variance
    assert expansion.num_features == 2 * 61 * 2
    assert len({term.factor for term in terms(kernel)}) == 3  # two columns ω, on other inputs
    error = expansion.features(x) @ expansion.features(z).mT - expected
    assert error.abs().max() < 1e-12 * expected.abs().max()


def collinear(seed):
    """Three separable terms of rank one, whose task vectors lie in a plane of three tasks."""
    plane = fields.draw(3, 2, seed=seed)
    return [plane @ fields.draw(2, 2, seed=seed + i) for i in range(3)]


def test_singular_sums_of_task_matrices_are_exact_and_differentiable():
    summands = [
        replace(terms(rbf(0.5 + i))[0], factor=Mixing(matrix.requires_grad_()))
        for i, matrix in enumerate(collinear(seed=0))
    ]
    kernels = [summand.leaves[0].kernel for summand in summands]
    spectra = [own for kernel in kernels for own in term_spectra(kernel, 2)]
    draws = gp_orff.MonteCarlo(30, shared=True).draw(spectra)
    x, z = pair(2)
    expansion = expand_terms(summands, draws, 2)
    assert expansion.num_features == 2 * 30 * 3
    found = expansion.features(x) @ expansion.features(z).mT
    law = [gp_orff.spectrum(kernel) for kernel in kernels]
    omega = torch.cat([own.nodes([s])[0][0] for own, s in zip(draws, law, strict=True)])
    densities = torch.stack([s.log_density(omega).exp() for s in law])
    weights = densities / (10 * densities.sum(0))
    matrices = [t.factor.matrix @ t.factor.matrix.mT for t in summands]
    matrix = torch.einsum("qk,qij->kij", weights, torch.stack(matrices))
    expected = oracles.fourier_sum(x, z, omega, torch.ones(30).double(), matrix)
    assert torch.linalg.matrix_rank(matrix, hermitian=True).max() == 2
    assert (found - expected).abs().max() < 1e-12 * expected.abs().max()
    direction = fields.draw(*found.shape)
    leaves = [t.factor.matrix for t in summands] + [k.raw_lengthscale for k in kernels]
    slopes, wanted = (
        torch.autograd.grad((direction * own).sum(), leaves) for own in (found, expected)
    )
    for slope, own in zip(slopes, wanted, strict=True):
        assert (slope - own).abs().max() < 1e-10 * own.abs().max()


@pytest.mark.parametrize("shape", [(4, 2, 3), (4, 3, 7), (2, 3, 3, 4)])
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_reduced_roots(shape, rank):
    """Lower triangular, or of any form where the matrix is singular, without an error."""
    *batch, p, r = shape
    root = fields.draw(math.prod(shape), 1).reshape(shape) * 1e-9
    if rank < p:
        root = root[..., :, :rank] @ fields.draw(rank, r) if rank else 0 * root
    root.requires_grad_()
    factor = reduced_root(root)
    assert factor.shape == (*batch, p, p)
    exact = root @ root.mT
    assert (factor @ factor.mT - exact).abs().max() <= 1e-14 * exact.abs().max()
    direction = fields.draw(p, p)
    slope, expected = (
        torch.autograd.grad((direction * own).sum(), root)[0] for own in (factor @ factor.mT, exact)
    )
    assert (slope - expected).abs().max() <= 1e-12 * expected.abs().max()
    assert reduced_root(root[..., :1]).shape == (*batch, p, 1)


def test_singular_roots_refuse_second_derivatives():
    """They would be wrong; they are right where the matrix is regular."""
    for rank, message in ((1, "once_differentiable"), (3, None)):
        root = (fields.draw(2, rank) @ fields.draw(rank, 3, seed=1)).requires_grad_()
        factor = reduced_root(root)
        (slope,) = torch.autograd.grad((factor @ factor.mT).square().sum(), root, create_graph=True)
        if message is None:
            assert slope.square().sum().requires_grad
        else:
            with pytest.raises(RuntimeError, match=message):
                slope.square().sum().backward()


SAMPLED = [
    (name, order)
    for name in SPECTRA
    for order in (0, 1)
    if order == 0 or name not in ("matern12", "spectral_mixture")
]


@pytest.mark.parametrize(("name", "order"), SAMPLED)
def test_sampling_densities(name, order):
    """Their integral is one, and what is drawn has its second moment; on a line, by scipy."""
    spectrum = gp_orff.spectrum(base(name, 1))

    def density(omega):
        omega = torch.tensor([[omega]], dtype=torch.float64)
        log_density = spectrum.log_density(omega) - spectrum.log_importance(omega, order)
        return log_density.exp().item()

    total = 2 * scipy.integrate.quad(density, 0, math.inf, limit=400)[0]
    assert total == pytest.approx(1, abs=1e-5)
    kernel = base(name, 1) if order == 0 else gp_orff.CurlFreeKernel(base(name, 1), num_dims=1)
    (drawn,) = draw(kernel, gp_orff.MonteCarlo(4000), 1)
    assert drawn.orders == (order,)
    omega = spectrum.frequencies(drawn.bases[0], order).detach().abs().squeeze(-1)
    median = omega.median().item()
    below = 2 * scipy.integrate.quad(density, 0, median, limit=400)[0]
    assert below == pytest.approx(0.5, abs=5 * 0.5 / 4000**0.5)  # 5 standard errors


@pytest.mark.parametrize("name", ["helmholtz", "helmholtz_3d"])
def test_parts_of_a_helmholtz_kernel(name):
    """Their columns stand side by side: against dense algebra on the same frequencies."""
    d = size(name)
    model = gp_orff.VectorFieldGP(
        KERNELS[name](),
        frequencies=gp_orff.MonteCarlo(64, shared=True),
        mean=gpytorch.means.ZeroMean(),
    )
    model.likelihood.noise = 0.1
    x, y, xs = fields.draw(30, d), fields.draw(30, d, seed=1), fields.draw(6, d, seed=2)
    posterior = model.condition(x, y).posterior()
    noisy = by_hand(model.kernel, model.state.inference.draws, "trace", x, x).detach()
    noisy = noisy + model.likelihood.noise.item() * torch.eye(len(noisy)).double()
    total = 0.0
    for part, other in (("curl_free", "divergence_free"), ("divergence_free", "curl_free")):
        alone = KERNELS[name]()
        getattr(alone, other).raw_outputscale.data.fill_(-60.0)
        cross, prior = (
            by_hand(alone, model.state.inference.draws, "trace", xs, z).detach() for z in (x, xs)
        )
        field, solved = posterior.part(part), torch.linalg.solve(noisy, cross.mT)
        mean = (solved.mT @ y.flatten()).reshape(6, d)
        torch.testing.assert_close(field.mean(xs), mean, rtol=0, atol=1e-10)
        variance = (prior - cross @ solved).diagonal().reshape(6, d)
        torch.testing.assert_close(field.variance(xs), variance, rtol=0, atol=1e-10)
        total = total + field.mean(xs)
    torch.testing.assert_close(total, posterior.mean(xs), rtol=0, atol=1e-10)


def test_parts_beside_a_linear_model_of_coregionalisation():
    """Without a nugget in the features of the others, which are zero."""
    linear = LCMKernel([base("rbf", 2), base("matern52", 2)], num_tasks=2, rank=1).double()
    for seed, part in enumerate(linear.covar_module_list):
        randomise_tasks(part, seed)
    model = gp_orff.VectorFieldGP(linear + curl_free(rbf(0.6)), frequencies=gp_orff.MonteCarlo(32))
    x, y = fields.draw(40, 2), fields.draw(40, 2, seed=1)
    field = model.condition(x, y).posterior()
    total = field.part(0).mean(x) + field.part(1).mean(x)
    rest = field.mean(x) - total  # the mean μ, one for each component
    torch.testing.assert_close(rest, rest[:1].expand(40, 2), rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", ["coregionalisation", "three_potentials"])
def test_terms_whose_directions_were_added_have_no_posterior(name):
    model = gp_orff.VectorFieldGP(KERNELS[name](), frequencies=gp_orff.MonteCarlo(8, shared=True))
    x, y = fields.draw(60, 2), fields.draw(60, 2, seed=1)
    posterior = model.condition(x, y).posterior()
    with pytest.raises(NotImplementedError, match="use shared=False"):
        posterior.part(0).mean(x)


@pytest.mark.parametrize("rule", RULES)
def test_states_and_files(rule, tmp_path):
    one = RULES[rule](16, shared=True, seed=2)
    assert build_rule(describe_rule(one), None) == one
    old = {key: value for key, value in describe_rule(one).items() if key != "shared"}
    assert build_rule(old, None) == RULES[rule](16, seed=2)
    x, z = pair(2)
    orff, other = (
        gp_orff.ORFFKernel(
            KERNELS["curl_free_and_separable"](), RULES[rule](16, shared=True, seed=seed)
        )
        for seed in (2, 3)
    )
    other.load_state_dict(orff.state_dict())
    assert torch.equal(orff(x, z).to_dense(), other(x, z).to_dense())
    model = gp_orff.VectorFieldGP(helmholtz(), frequencies=one)
    model.condition(fields.draw(40, 2), fields.draw(40, 2, seed=1)).save(tmp_path / "model.pt")
    loaded = gp_orff.VectorFieldGP.load(tmp_path / "model.pt")
    assert loaded.frequencies == one
    assert torch.equal(loaded.posterior().mean(x), model.posterior().mean(x))


def test_batches_of_kernels():
    """Each kernel of a batch has the features that it has by itself, if the shares are the same."""
    lengthscales = torch.tensor([0.5, 0.8]).double()
    field = curl_free(RBFKernel(batch_shape=torch.Size([2])).double())
    field.base_kernel.base_kernel.lengthscale = lengthscales[:, None, None]
    field = ScaleKernel(field, batch_shape=torch.Size([2])).double()
    field.outputscale = lengthscales.square()
    batch, (x, z) = field + tasks(rbf(1.2)), pair(2)
    rule = gp_orff.MonteCarlo(16, shared=True)
    found = estimate(batch, rule, x, z)
    for index, lengthscale in enumerate((0.5, 0.8)):
        single = scaled(curl_free(rbf(lengthscale)), lengthscale**2) + tasks(rbf(1.2))
        torch.testing.assert_close(found[index], estimate(single, rule, x, z))


@pytest.mark.parametrize("value", ["yes", 1, None])
def test_bad_input(value):
    for name, rule in RULES.items():
        with pytest.raises(ValueError, match=f"expects shared to be True or False, got {value!r}"):
            rule(8, shared=value)
        assert "shared=True" in repr(RULES[name](8, shared=True))


def test_a_spectrum_without_lengthscale_has_no_trace_measure_to_share(monkeypatch):
    monkeypatch.setattr(gp_orff.spectra.StudentT, "isotropic_lengthscale", None)
    kernel = curl_free(base("matern52", 2)) + tasks(rbf(1.0))
    with pytest.raises(NotImplementedError, match="use shared=False"):
        estimate(kernel, gp_orff.MonteCarlo(8, shared=True), *pair(2))
    estimate(kernel, gp_orff.MonteCarlo(8, shared=True, measure="base"), *pair(2))
