"""Structured frequencies, compared with dense matrices of scipy and with their distributions."""

import math
from itertools import pairwise

import numpy as np
import pytest
import scipy.linalg
import scipy.special
import scipy.stats
import torch
from gpytorch.kernels import (
    ConstantKernel,
    LCMKernel,
    MaternKernel,
    MultitaskKernel,
    RBFKernel,
    RQKernel,
    ScaleKernel,
    SpectralMixtureKernel,
)
from torch.autograd import gradcheck, gradgradcheck

import gp_orff
from gp_orff.features.assemble import draw
from gp_orff.features.phases import (
    FastfoodProjection,
    FourierProjection,
    OrthogonalProjection,
    hadamard,
)
from gp_orff.features.random import Fastfood, FourierFastfood, StructuredOrthogonal
from gp_orff.kernels.tree import terms
from tests.support import fields, oracles
from tests.support.registry import DETERMINISTIC_RULES, RULES, STRUCTURED_RULES, randomise_tasks
from tests.support.structured_oracle import WrittenOut, directions

# The Walsh–Hadamard transform


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_hadamard_matrices(dtype):
    for power in range(12):
        num_dims = 2**power
        h = hadamard(torch.eye(num_dims, dtype=dtype))
        assert h.dtype == dtype
        assert (h.numpy() == scipy.linalg.hadamard(num_dims)).all()
        assert (hadamard(h) == num_dims * torch.eye(num_dims, dtype=dtype)).all()  # H Hᵀ = d I


@pytest.mark.parametrize("shape", [(256,), (3, 512), (2, 0, 8), (2, 3, 4, 1024)])
def test_hadamard_transforms_of_batches(shape):
    x = fields.draw(*shape)
    expected = x.numpy() @ scipy.linalg.hadamard(shape[-1])
    torch.testing.assert_close(hadamard(x).numpy(), expected, rtol=1e-13, atol=1e-12)
    moved = fields.draw(*shape[::-1]).permute(*reversed(range(len(shape))))  # not contiguous
    expected = moved.numpy() @ scipy.linalg.hadamard(shape[-1])
    torch.testing.assert_close(hadamard(moved).numpy(), expected, rtol=1e-13, atol=1e-12)


@pytest.mark.parametrize("num_dims", [1, 2, 16, 256])
def test_derivatives_of_hadamard_transforms(num_dims):
    x = fields.draw(2, num_dims).requires_grad_()
    assert gradcheck(hadamard, x)
    assert gradgradcheck(hadamard, x)


@pytest.mark.parametrize("num_dims", [0, 3, 100])
def test_hadamard_transforms_of_other_lengths(num_dims):
    with pytest.raises(ValueError, match=rf"power of two, got {num_dims}; pad"):
        hadamard(torch.zeros(2, num_dims))


# Phases


def rbf(num_dims=5, **kwargs):
    kernel = RBFKernel(ard_num_dims=num_dims, **kwargs).double()
    kernel.lengthscale = torch.linspace(0.7, 1.3, num_dims).double()
    return kernel


def rational_quadratic(alpha=0.4):
    kernel = RQKernel(ard_num_dims=5).double()
    kernel.alpha, kernel.lengthscale = alpha, 1.1
    return kernel


def batch():
    kernel = RBFKernel(batch_shape=torch.Size([2])).double()
    kernel.lengthscale = torch.tensor([0.6, 1.9]).double().reshape(2, 1, 1)
    return kernel


def separable():
    root = torch.tensor([[0.7, 0.3], [-1.2, 0.5], [0.4, 0.9]]).double()
    product = rbf(3, active_dims=(4, 0, 2)) * MaternKernel(1.5, active_dims=(1, 3)).double()
    return gp_orff.SeparableKernel(product + rational_quadratic(), root)


def coregionalised():
    kernel = LCMKernel([rbf(), MaternKernel(2.5, ard_num_dims=5)], num_tasks=2).double()
    for seed, part in enumerate(kernel.covar_module_list):
        randomise_tasks(part, seed)
    return kernel


TREES = {  # on five inputs
    "ard": rbf,
    "rational_quadratic": rational_quadratic,
    "active_dims": lambda: rbf(3, active_dims=(4, 0, 2)),
    "product": lambda: rbf() * MaternKernel(nu=1.5, active_dims=(1,)).double(),
    "product_of_all": lambda: rbf() * rational_quadratic(),
    "sum": lambda: rbf() + ScaleKernel(rational_quadratic()).double(),
    "with_constant": lambda: rbf() + ConstantKernel().double(),
    "batch": batch,
    "multitask": lambda: randomise_tasks(MultitaskKernel(rbf(), num_tasks=2).double()),
    "separable": separable,
    "lcm": coregionalised,
}


def orff_of(tree, rule):
    return gp_orff.ORFFKernel(TREES[tree](), rule, num_dims=5).double()


def in_order(omega):
    """Sorted by one number each: the zero of a constant comes first or last."""
    number = omega @ fields.draw(5, 1, seed=8)
    return omega.take_along_dim(number.argsort(dim=-2), dim=-2)


@pytest.mark.parametrize("number", [1, 16])  # d′ = 8 for five inputs
@pytest.mark.parametrize("rule", STRUCTURED_RULES.values(), ids=STRUCTURED_RULES)
@pytest.mark.parametrize("tree", TREES)
def test_phases_are_products_with_the_frequencies(tree, rule, number):
    """Ω = phases(I), and Ω from dense matrices of numpy."""
    kernel = orff_of(tree, rule(number, seed=3))
    written = orff_of(tree, WrittenOut(rule(number, seed=3)))
    x = fields.draw(4, 5)
    omega, expected = (own.phases(torch.eye(5).double()).mT for own in (kernel, written))
    assert (kernel.phases(x) - x @ omega.mT).abs().max() <= 1e-12
    assert (in_order(omega) - in_order(expected)).abs().max() <= 1e-12
    covariances = [own(x).to_dense() for own in (kernel, written)]
    torch.testing.assert_close(*covariances, rtol=0, atol=1e-12)
    assert kernel.num_features == written.num_features
    several = kernel.phases(x.expand(3, 1, 4, 5))
    assert (several - kernel.phases(x)).abs().max() <= 1e-12


OTHER_RULES = {**RULES, **DETERMINISTIC_RULES}


@pytest.mark.parametrize("rule", OTHER_RULES.values(), ids=OTHER_RULES)
@pytest.mark.parametrize("field", [False, True])
def test_phases_of_every_rule(rule, field):
    kernel = rbf(2)
    kernel = gp_orff.CurlFreeKernel(kernel, num_dims=2) if field else kernel
    kernel = gp_orff.ORFFKernel(kernel, rule(40)).double()
    omega = kernel.phases(torch.eye(2).double()).mT
    x = fields.uniform(7, 2)
    assert (kernel.phases(x) - x @ omega.mT).abs().max() <= 1e-12
    assert kernel.phases(x).shape == (7, len(omega))


@pytest.mark.parametrize("rule", STRUCTURED_RULES.values(), ids=STRUCTURED_RULES)
@pytest.mark.parametrize("tree", ["active_dims", "product_of_all", "batch"])
def test_derivatives_of_phases(tree, rule):
    kernel = orff_of(tree, rule(11))
    parameters = list(kernel.parameters())

    def phases(x, *values):
        pairs = dict(zip((name for name, _ in kernel.named_parameters()), values, strict=True))
        return torch.func.functional_call(
            Phases(kernel), {f"kernel.{k}": v for k, v in pairs.items()}, x
        )

    x = fields.draw(2, 5).requires_grad_()
    values = [own.detach().clone().requires_grad_() for own in parameters]
    assert gradcheck(phases, (x, *values), rtol=1e-4, atol=1e-7)


class Phases(torch.nn.Module):
    def __init__(self, kernel):
        super().__init__()
        self.kernel = kernel

    def forward(self, x):
        return self.kernel.phases(x)


@pytest.mark.parametrize("num_inputs", [1, 2, 3, 8, 30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "projection", [FastfoodProjection, OrthogonalProjection, FourierProjection]
)
def test_adjoints(projection, dtype, num_inputs):
    """Σ_k v_k u_k, to the precision of the numbers."""
    own = projection.draw(num_inputs, 37, np.random.default_rng(0))
    rows = torch.from_numpy(directions(own)[:, :num_inputs].copy())
    x, values = fields.draw(4, num_inputs), fields.draw(4, 37, seed=1)
    error = 1e-5 if dtype == torch.float32 else 1e-13
    assert (own(x.to(dtype)) - x @ rows.mT).abs().max() <= error
    assert (own.adjoint(values.to(dtype)) - values @ rows).abs().max() <= 2 * error


@pytest.mark.parametrize("rule", STRUCTURED_RULES.values(), ids=STRUCTURED_RULES)
def test_a_thousand_inputs(rule):
    """Against the dense matrices; memory of a few vectors, not of a matrix."""
    kernel = gp_orff.ORFFKernel(MaternKernel(0.5).double(), rule(1500), num_dims=1000)
    written = gp_orff.ORFFKernel(MaternKernel(0.5).double(), WrittenOut(rule(1500)), num_dims=1000)
    x = fields.draw(3, 1000)
    expected = written.phases(x)
    assert (kernel.phases(x) - expected).abs().max() <= 1e-12 * expected.abs().max()
    assert sum(own.numel() for own in kernel.frequencies.buffers()) <= 5 * 2048


# Laws


def padded(rule, num_dims):
    """d′ for d inputs."""
    least = {Fastfood: 1, StructuredOrthogonal: 32}
    dims = 2 ** math.ceil(math.log2(num_dims))
    return max(dims, least[rule]) if rule in least else num_dims


@pytest.mark.parametrize("num_dims", [3, 16, 100])
@pytest.mark.parametrize("rule", STRUCTURED_RULES.values(), ids=STRUCTURED_RULES)
def test_lengths_have_the_law_of_the_kernel(rule, num_dims):
    """In d′ dimensions, for d inputs and d′ − d zeros."""
    (own,) = draw(RBFKernel(), rule(3000), num_dims)
    vectors = directions(own.projections[0])
    dims = padded(rule, num_dims)
    assert vectors.shape == (3000, dims)
    assert np.abs(np.linalg.norm(vectors, axis=-1) - 1).max() <= 1e-12
    for kernel, square in (
        (RBFKernel(), scipy.stats.chi2(dims)),
        (MaternKernel(1.5), scipy.stats.betaprime(dims / 2, 1.5, scale=3.0)),
        (gp_orff.GeneralMaternKernel(0.8), scipy.stats.betaprime(dims / 2, 0.8, scale=1.6)),
    ):
        (own,) = draw(kernel, rule(3000), num_dims)
        radii = gp_orff.spectrum(kernel).radii(own.bases[0], 0).numpy()
        assert scipy.stats.kstest(radii**2, square.cdf).pvalue > 1e-3
        two_more = square.args[0] + (2 if square.dist.name == "chi2" else 1)
        other = square.dist(two_more, *square.args[1:], **square.kwds)
        assert dims > 20 or scipy.stats.kstest(radii**2, other.cdf).pvalue < 1e-3


@pytest.mark.parametrize("rule", STRUCTURED_RULES.values(), ids=STRUCTURED_RULES)
def test_lengths_follow_alpha(rule):
    """s = F⁻¹(u) of Gamma(α, rate α) at the present α, ‖ω‖ = √s χ_{d′}."""
    kernel = RQKernel().double()
    (own,) = draw(kernel, rule(3000), 8)
    kernel.alpha = 0.3
    radii = gp_orff.spectrum(kernel).radii(own.bases[0], 0).detach().numpy()
    rng, dims = np.random.default_rng(0), padded(rule, 8)
    sample = rng.gamma(0.3, 1 / 0.3, 3000) * rng.chisquare(dims, 3000)
    assert scipy.stats.ks_2samp(radii**2, sample).pvalue > 1e-3
    sample = rng.gamma(1.0, 1.0, 3000) * rng.chisquare(dims, 3000)
    assert scipy.stats.ks_2samp(radii**2, sample).pvalue < 1e-3


@pytest.mark.parametrize("projection", [FastfoodProjection, OrthogonalProjection])
def test_directions(projection):
    """Blocks differ; the second moments of Fastfood's rows are I/d′, those of HD₁HD₂HD₃ are
    orthogonal exactly."""
    dims = projection.padded(5)
    own = projection.draw(5, dims * 2000, np.random.default_rng(0))
    blocks = directions(own).reshape(2000, dims, dims)
    assert not (blocks[0] == blocks[1]).all()
    second = np.einsum("mki,mkj->ij", blocks, blocks) / len(directions(own))
    assert np.abs(second - np.eye(dims) / dims).max() < 5 / dims / math.sqrt(2000)
    gram = blocks @ blocks.transpose(0, 2, 1)
    orthogonal = np.abs(gram - np.eye(dims)).max() < 1e-12
    assert orthogonal == (projection is OrthogonalProjection)


SEEDS = 400


def estimates(kernel, rule, lags, trained=None):
    """Σ_k cos⟨ω_k, τ⟩/D of one block of frequencies, (seeds, lags), and D."""
    num_dims = lags.shape[-1]
    number = 2 ** math.ceil(math.log2(num_dims))
    draws = [draw(kernel, rule(number, seed=seed), num_dims)[0] for seed in range(SEEDS)]
    kernel.initialize(**(trained or {}))
    (term,) = terms(kernel)
    with torch.no_grad():
        phases = [own.columns(term, num_dims)[0].phases(lags) for own in draws]
    return torch.stack([own.cos().mean(-1) for own in phases]), number


def lags_of(num_dims, radii=(0.5, 1.0, 2.0)):
    """Along an axis, and in a direction that is not zero in any coordinate."""
    axis = torch.eye(num_dims)[1].double()
    dense = fields.draw(num_dims, seed=3)
    units = torch.stack([axis, dense / dense.norm()])
    return (torch.tensor(radii).double()[:, None, None] * units).reshape(-1, num_dims)


KERNELS = {  # kernel, hyperparameters that it has after the draw, κ(r)
    "rbf": (RBFKernel, {"lengthscale": 1.0}, lambda r: torch.exp(-r.square() / 2)),
    "matern32": (
        lambda: MaternKernel(1.5),
        {"lengthscale": 0.8},
        lambda r: oracles.matern(r.unsqueeze(-1), 0.8, 1.5),
    ),
    "rq": (
        RQKernel,
        {"lengthscale": 1.2, "alpha": 0.3},
        lambda r: oracles.rational_quadratic(r.unsqueeze(-1), 1.2, 0.3),
    ),
}


def ratio_of_variances(samples, number, at, at_twice):
    """The variance over that of independent frequencies, (½(1 + k(2τ)) − k(τ)²)/D."""
    return samples.var(0) * number / ((1 + at_twice) / 2 - at.square())


NOISE = 1 + 2 * math.sqrt(2 / SEEDS)  # of a ratio of variances, two standard errors


@pytest.mark.slow
@pytest.mark.parametrize("num_dims", [8, 64, 256])
@pytest.mark.parametrize("name", KERNELS)
def test_fastfood_is_unbiased_with_a_variance_near_that_of_independent_frequencies(name, num_dims):
    build, trained, kappa = KERNELS[name]
    lags = lags_of(num_dims)
    samples, number = estimates(build().double(), Fastfood, lags, trained)
    r = lags.norm(dim=-1)
    stderr = samples.std(0) / math.sqrt(SEEDS)
    assert ((samples.mean(0) - kappa(r)).abs() <= 5 * stderr).all()
    assert not ((samples.mean(0) - kappa(1.2 * r)).abs() <= 5 * stderr).all()  # it can fail
    assert (ratio_of_variances(samples, number, kappa(r), kappa(2 * r)) <= 2.2 * NOISE).all()


@pytest.mark.parametrize("power", [1, 3])
@pytest.mark.parametrize("num_dims", [8, 64])
def test_fastfood_of_bessel_kernels_is_unbiased(num_dims, power):
    kernel = gp_orff.BesselKernel(power, num_dims).double()
    kernel.lengthscale = 1.0
    lags = lags_of(num_dims) * math.sqrt((num_dims + 2) / power)  # of the size of correlations
    samples, number = estimates(kernel, Fastfood, lags)
    with torch.no_grad():
        at, twice = (kernel.correlation(own.square().sum(-1)) for own in (lags, 2 * lags))
    stderr = samples.std(0) / math.sqrt(SEEDS)
    assert ((samples.mean(0) - at).abs() <= 5 * stderr).all()
    assert (ratio_of_variances(samples, number, at, twice) <= 2.2 * NOISE).all()


@pytest.mark.parametrize("num_dims", [64, 1000])
def test_orthogonal_directions_reduce_the_variance(num_dims):
    lags = lags_of(num_dims)
    samples, number = estimates(
        RBFKernel().double(), StructuredOrthogonal, lags, {"lengthscale": 1.0}
    )
    kappa, r = KERNELS["rbf"][2], lags.norm(dim=-1)
    stderr = samples.std(0) / math.sqrt(SEEDS)
    assert ((samples.mean(0) - kappa(r)).abs() <= 5 * stderr).all()
    assert (ratio_of_variances(samples, number, kappa(r), kappa(2 * r)) <= 0.8 * NOISE).all()


def expected_cosine(products, num_dims, r):
    """E cos(r R v) over radii R ~ χ_d, for products v of unit vectors."""
    return scipy.special.hyp1f1(num_dims / 2, 0.5, -((r * products) ** 2) / 2)


@pytest.mark.parametrize("coordinates", [1, 2])
@pytest.mark.parametrize("num_dims", [2, 16, 32])
def test_the_bias_of_orthogonal_directions_is_that_of_the_docstring(num_dims, coordinates):
    """Between inputs that differ in one or two coordinates, over 1000 blocks of each of 8 seeds."""
    r, found = np.array([1.5, 2.0, 3.0, 4.0]), []
    direction = torch.zeros(1, num_dims).double()
    direction[:, :coordinates] = coordinates**-0.5
    for seed in range(8):
        own = OrthogonalProjection.draw(num_dims, 32_000, np.random.default_rng(seed))
        values, counts = np.unique(own(direction)[0].abs().numpy().round(12), return_counts=True)
        cosines = expected_cosine(values, own.padded(num_dims), r[:, None])
        found.append((cosines * counts).sum(-1) / counts.sum() - np.exp(-(r**2) / 2))
    mean, stderr = np.mean(found, axis=0), np.std(found, axis=0) / math.sqrt(8)
    assert (np.abs(mean) <= 0.003 + 4 * stderr).all()
    assert stderr.max() < 0.003


@pytest.mark.slow
def test_fourier_directions_are_wrong_along_an_axis():
    """All entries have similar size: J₀(√2 r) for most coordinates, cos r for the first, up to
    O(1/d); in directions with many coordinates, the kernel."""
    lags = torch.cat([lags_of(1000), lags_of(1000).roll(-1, dims=-1)[::2]])
    kernel = RBFKernel().double()
    samples, _ = estimates(kernel, FourierFastfood, lags, {"lengthscale": 1.0})
    r, mean = np.array([0.5, 1.0, 2.0]), samples.mean(0).numpy()
    along, dense, first = mean[0:6:2], mean[1:6:2], mean[6:]
    assert np.abs(along - scipy.special.j0(math.sqrt(2) * r)).max() < 0.003
    assert np.abs(first - np.cos(r)).max() < 0.003
    stderr = samples.std(0).numpy()[1:6:2] / math.sqrt(SEEDS)
    assert (np.abs(dense - np.exp(-(r**2) / 2)) < 5 * stderr + 0.003).all()
    assert along[2] - math.exp(-2) == pytest.approx(-0.33, abs=0.005)  # as the docstring says
    assert first[2] - math.exp(-2) == pytest.approx(-0.55, abs=0.005)


def test_terms_and_leaves_are_drawn_apart():
    kernel = LCMKernel([rbf() * rbf(), rbf()], num_tasks=2).double()
    first, second = draw(kernel, Fastfood(16), 5)
    bases = [*first.bases, *second.bases]
    signs = [projection.signs for own in (first, second) for projection in own.projections]
    assert all((one != other).any() for one, other in pairwise(bases))
    assert all((one != other).any() for one, other in pairwise(signs))


@pytest.mark.parametrize("rule", STRUCTURED_RULES.values(), ids=STRUCTURED_RULES)
def test_seeds(rule):
    x = fields.draw(3, 5)
    state = torch.get_rng_state()
    one, same, other = (orff_of("ard", rule(9, seed=seed)).phases(x) for seed in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.allclose(one, other)
    assert torch.equal(torch.get_rng_state(), state)


# Mistakes


def spectral_mixture():
    return SpectralMixtureKernel(num_mixtures=2, ard_num_dims=2)


def spectral_matrix():
    return gp_orff.SpectralMatrixKernel(
        RBFKernel(), lambda omega: omega.unsqueeze(-1), num_outputs=2, num_dims=2
    )


NOT_SEPARABLE = {
    "spectral_matrix": spectral_matrix,
    "spectral_mixture": spectral_mixture,
    "sum": lambda: RBFKernel() + spectral_mixture(),
}


@pytest.mark.parametrize("rule", STRUCTURED_RULES.values(), ids=STRUCTURED_RULES)
@pytest.mark.parametrize("name", NOT_SEPARABLE)
def test_kernels_that_need_every_frequency(name, rule):
    with pytest.raises(NotImplementedError, match=r"expects .* got .* use gp_orff.QuasiMonteCarlo"):
        gp_orff.ORFFKernel(NOT_SEPARABLE[name](), rule(8))


@pytest.mark.parametrize("rule", STRUCTURED_RULES.values(), ids=STRUCTURED_RULES)
@pytest.mark.parametrize("number", [0, -3, 2.5, "8", True])
def test_numbers_of_frequencies(rule, number):
    with pytest.raises(ValueError, match=f"{rule.__name__} expects num_frequencies .* positive"):
        rule(number)


@pytest.mark.parametrize("rule", STRUCTURED_RULES.values(), ids=STRUCTURED_RULES)
@pytest.mark.parametrize("seed", [-1, 0.5, None, True])
def test_seeds_that_are_none(rule, seed):
    with pytest.raises(ValueError, match=f"{rule.__name__} expects seed .* non-negative integer"):
        rule(8, seed=seed)


@pytest.mark.parametrize("call", ["phases", "features", "feature_operator", "forward"])
def test_points_of_another_width(call):
    kernel = orff_of("ard", Fastfood(8))
    for width in (4, 6):
        with pytest.raises(ValueError, match=f"5 columns, got {width}"):
            getattr(kernel, call)(*[fields.draw(3, width)] * (1 + (call == "forward")))
    with pytest.raises(TypeError, match="float"):
        kernel.phases(fields.draw(3, 5).float())
    with pytest.raises(ValueError, match="NaN"):
        kernel.phases(fields.draw(3, 5) * math.nan)


def test_the_number_of_inputs_has_to_be_known():
    with pytest.raises(ValueError, match="num_dims="):
        gp_orff.ORFFKernel(RBFKernel(), Fastfood(8))


def test_gradients_after_a_transform_in_inference_mode():
    """Hadamard matrices are kept: those made in inference mode could not be used in training. No
    other test has this type."""
    x = torch.rand(2, 64).half()
    with torch.inference_mode():
        hadamard(x)
    x.requires_grad_()
    hadamard(x).sum().backward()
    assert x.grad[0].tolist() == [64.0] + 63 * [0.0]


@pytest.mark.parametrize(
    ("x", "error", "match"),
    [
        (np.zeros((3, 2)), TypeError, "expects a tensor of inputs, got ndarray.*torch.as_tensor"),
        ([[0.0, 1.0]], TypeError, "expects a tensor of inputs, got list.*torch.as_tensor"),
        (torch.zeros(3), ValueError, r"expects inputs of shape \(n, d\), got \(3,\).*unsqueeze"),
    ],
)
def test_inputs_that_are_no_matrix(x, error, match):
    kernel = gp_orff.ORFFKernel(RBFKernel(), Fastfood(8), num_dims=2)
    for call in (kernel.phases, kernel.features):
        with pytest.raises(error, match=match):
            call(x)
