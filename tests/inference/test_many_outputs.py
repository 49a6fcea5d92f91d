"""Separable kernels with many outputs, compared with dense algebra and Cholesky factors.

One eigendecomposition of the Gram matrix of the columns replaces a Cholesky factor for every
output.
"""

import mpmath
import numpy as np
import pytest
import torch
from gpytorch.kernels import MultitaskKernel, RBFKernel, ScaleKernel
from gpytorch.likelihoods import MultitaskGaussianLikelihood
from gpytorch.means import MultitaskMean, ZeroMean
from torch.autograd import gradcheck, gradgradcheck
from torch.utils._python_dispatch import TorchDispatchMode

import gp_orff
from gp_orff.data.noise import Noise
from gp_orff.features.assemble import expand
from gp_orff.features.columns import TrigColumns
from gp_orff.features.expansion import KroneckerExpansion
from gp_orff.inference import separable
from gp_orff.inference.equations import KroneckerDual, dual_of_vectors, equations_of_vectors
from gp_orff.inference.separable import (
    CholeskyBlocks,
    DualBlocks,
    EigenBlocks,
    KroneckerInvQuadLogdet,
    KroneckerPosterior,
    Solution,
    blocks_of,
)
from tests.support import oracles
from tests.support.fields import draw, uniform
from tests.support.models import dense_noise, evidence, gradient, vector_gp

pytestmark = pytest.mark.usefixtures("no_check_of_random_features")
ALGEBRAS = {"cholesky": CholeskyBlocks, "eigen": EigenBlocks}
OUTPUTS = 7


@pytest.fixture(params=ALGEBRAS)
def algebra(request, monkeypatch):
    """Each of the two, whatever the rank."""
    monkeypatch.setattr(separable, "blocks_of", ALGEBRAS[request.param].of)
    return request.param


def spd(size, rank=None, batch=(), seed=0):
    root = draw(*batch, size, rank or size, seed=seed)
    return root @ root.mT


def system(n=9, r=OUTPUTS, batch=(), scale=1.0):
    """C of half rank, G with equal eigenvalues, zeros among them, Z and s."""
    vectors = torch.linalg.qr(draw(*batch, r, r, seed=1)).Q
    values = torch.arange(r).double() // 2
    g = (vectors * values) @ vectors.mT
    return scale * spd(n, n // 2, batch), g, draw(*batch, n, r, seed=2), draw(*batch, n, 1, seed=3)


def dense(c, g, z, s):
    """I + C⊗G and [vec Z, s⊗I] in numpy."""
    c, g, z, s = (t.detach().numpy() for t in (c, g, z, s))
    return np.eye(z.size) + np.kron(c, g), np.hstack(
        [z.reshape(-1, 1), np.kron(s, np.eye(z.shape[-1]))]
    )


class Largest(TorchDispatchMode):
    """The largest number of entries that a tensor had inside a `with`."""

    entries = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, tuple | list) else [out]:
            if isinstance(t, torch.Tensor):
                self.entries = max(self.entries, t.untyped_storage().nbytes() // t.element_size())
        return out


# -- the algebra ------------------------------------------------------------------------------


def test_quadratic_forms_and_determinant_equal_dense_algebra(algebra):
    """Condition number 3e2 to 3e4; ≤ 1e-9, the rounding errors that it allows being 1e-12."""
    for scale in (1.0, 100.0):
        given = system(scale=scale)
        a, b = dense(*given)
        solution = Solution.of(*given)
        expected = torch.from_numpy(b.T @ np.linalg.solve(a, b))
        torch.testing.assert_close(solution.quad, expected, rtol=1e-9, atol=1e-9)
        logdet = torch.tensor(np.linalg.slogdet(a)[1])
        torch.testing.assert_close(solution.blocks.logdet(), logdet, rtol=1e-12, atol=0)
        v = draw(1 + OUTPUTS, 1, seed=4)
        expected = torch.from_numpy(np.linalg.solve(a, b @ v.numpy()))
        torch.testing.assert_close(solution.combine(v), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", ALGEBRAS)
def test_each_block_equals_its_inverse(kind):
    c, rates, v = spd(9, 4), torch.tensor([0.0, 1.0, 1.0, 2.5]).double(), draw(4, 3, 9, seed=1)
    found = ALGEBRAS[kind].of(c, rates)
    inverses = torch.linalg.inv(torch.eye(9).double() + rates[:, None, None] * c)
    torch.testing.assert_close(found.solve(v), v @ inverses)
    torch.testing.assert_close(found.forms(v[0]), ((v[0] @ inverses) * v[0]).sum(-1))
    for root in (found.half(torch.eye(9).double().expand(4, 9, 9)),):
        torch.testing.assert_close(root @ root.mT, inverses)
        torch.testing.assert_close(found.half(v), v @ root)
        torch.testing.assert_close(found.other_half(v), v @ root.mT)
        torch.testing.assert_close(found.half(v[:1]), v[:1] @ root)
    by_c, by_rate = found.logdet_gradients(c)
    torch.testing.assert_close(by_c, (rates[:, None, None] * inverses).sum(0))
    torch.testing.assert_close(by_rate, (inverses @ c).diagonal(dim1=1, dim2=2).sum(-1))
    assert found.width == (36 if kind == "cholesky" else 13)


def symmetric(root):
    return root @ root.mT


def test_gradients_equal_finite_differences(algebra):
    """Of every entry of BᵀA⁻¹B and of log|A|, at equal and at zero eigenvalues of C and G."""
    mixing = torch.cat([torch.eye(4), torch.zeros(2, 4)]).double()  # of G: 1 and 0
    leaves = [draw(5, 2), mixing, draw(5, 6, seed=2), draw(5, 1, seed=3)]

    def function(c_root, g_root, z, s):
        return KroneckerInvQuadLogdet.apply(symmetric(c_root), symmetric(g_root), z, s)

    assert gradcheck(function, [t.requires_grad_() for t in leaves])


def test_gradients_of_batches_equal_those_of_dense_algebra(algebra):
    """And those of one system that a batch shares."""
    c, g, z, s = system(batch=(3,))
    for given in ((c, g, z, s), (c[0], g[0], z, s), (c, g[0], z[0], s)):
        leaves = [t.clone().requires_grad_() for t in given]
        quad, logdet = KroneckerInvQuadLogdet.apply(*leaves)
        weights = draw(*quad.shape, seed=5)
        found = torch.autograd.grad((quad * weights).sum() + logdet.sum(), leaves)
        a, b = separable.kronecker_dense(*leaves)
        forms = (b.mT @ torch.linalg.solve(a, b) * weights).sum((-1, -2))
        wanted = torch.autograd.grad((forms + torch.linalg.slogdet(a)[1]).sum(), leaves)
        for one, other in zip(found, wanted, strict=True):
            other = 0.5 * (other + other.mT) if one.shape[-1] == one.shape[-2] else other
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def test_second_derivatives(algebra):
    def function(c_root, g_root, z, s):
        quad, logdet = KroneckerInvQuadLogdet.apply(symmetric(c_root), symmetric(g_root), z, s)
        return quad.sum() + logdet

    leaves = [draw(3, 2), draw(5, 5, seed=1), draw(3, 5, seed=2), draw(3, 1, seed=3)]
    assert gradgradcheck(function, [t.requires_grad_() for t in leaves])


def test_tiny_noise_is_as_accurate_as_with_cholesky_factors():
    """Condition number 1e10, against 50 digits: both lose what it takes, ten digits of sixteen."""
    c, g, z, s = system(n=6, r=5, scale=1e9)
    a, b = (mpmath.matrix(t.tolist()) for t in dense(c, g, z, s))
    with mpmath.workdps(50):
        factor = mpmath.cholesky(a)
        expected = float(2 * sum(mpmath.log(factor[i, i]) for i in range(a.rows)))
        first = b[:, 0]
        quad = float((first.T * mpmath.cholesky_solve(a, first))[0])
    errors = {}
    for name, kind in ALGEBRAS.items():
        values, u = torch.linalg.eigh(g)
        own = kind.of(c, values.clamp_min(0))
        half = own.half((z @ u).mT.unsqueeze(-2))
        errors[name] = [abs(own.logdet().item() - expected), abs(half.square().sum().item() - quad)]
    for found, reference, size in zip(
        errors["eigen"], errors["cholesky"], (expected, quad), strict=True
    ):
        assert found <= max(10 * reference, 1e-6 * abs(size))


def test_the_cheaper_algebra_is_chosen():
    """Cholesky factors where the blocks are differentiated: eigenvectors have no derivatives."""
    c, many = spd(9), torch.ones(20).double()
    assert isinstance(blocks_of(c, many), EigenBlocks)
    assert isinstance(blocks_of(c, many[:2]), CholeskyBlocks)
    c.requires_grad_()
    assert isinstance(blocks_of(c, many), CholeskyBlocks)
    with torch.no_grad():
        assert isinstance(blocks_of(c, many), EigenBlocks)


# -- the posterior ----------------------------------------------------------------------------


def expansion_of(rank=OUTPUTS, columns=6, seed=0):
    phi = TrigColumns.of(draw(columns // 2, 2, seed=seed))
    scales = 0.2 + draw(columns, 1, seed=seed + 1).abs()
    return KroneckerExpansion(phi, scales, draw(OUTPUTS, rank, seed=seed + 2))


def noise_of_outputs():
    return Noise.of(spd(OUTPUTS, seed=8) / OUTPUTS + 0.3 * torch.eye(OUTPUTS).double())


@pytest.mark.parametrize("rank", [5, OUTPUTS])
def test_posteriors_equal_dense_algebra(algebra, rank):
    """≤ 1e-9: evidence, field, roots, weights and a symbol."""
    expansion, noise = expansion_of(rank), noise_of_outputs()
    x, y, xs, mean = draw(60, 2, seed=3), draw(60, OUTPUTS, seed=4), draw(5, 2, seed=5), draw(7)
    posterior, found = equations_of_vectors(expansion, x, y, noise).posterior(mean)
    assert isinstance(posterior, KroneckerPosterior)
    features, tests = expansion.features(x), expansion.features(xs)
    noisy = features @ features.mT + torch.kron(torch.eye(60).double(), noise.covariance)
    close = {"rtol": 1e-9, "atol": 1e-9}
    log_density = oracles.log_density(noisy, y - mean)
    torch.testing.assert_close(found.log_density(mean, y.numel()), log_density, **close)
    expected, cov = oracles.condition(tests @ tests.mT, tests @ features.mT, noisy, y - mean)
    torch.testing.assert_close(posterior.mean(xs).flatten(), expected, **close)
    torch.testing.assert_close(posterior.covariance(xs), cov, **close)
    torch.testing.assert_close(posterior.variance(xs).flatten(), cov.diagonal(), **close)
    every = cov.reshape(5, OUTPUTS, 5, OUTPUTS)
    every = torch.stack([every[i, :, i] for i in range(5)])
    torch.testing.assert_close(posterior.blocks(xs), every, **close)
    for points in (xs, draw(8, 2, seed=6)):  # fewer than columns, and more
        root = posterior.root(points)
        torch.testing.assert_close(root @ root.mT, posterior.covariance(points), **close)
        assert root.shape[-1] == rank * min(len(points), 6)
    eye = torch.eye(expansion.num_features).double()
    white = torch.linalg.solve(torch.kron(torch.eye(60).double(), noise.covariance), features)
    weights = torch.linalg.inv(eye + features.mT @ white)
    torch.testing.assert_close(posterior.weight_covariance(eye), weights, **close)
    root = posterior.weight_root(eye)
    torch.testing.assert_close(root @ root.mT, weights, **close)
    root = posterior.root_of(tests)
    torch.testing.assert_close(root @ root.mT, cov, **close)


def test_symbols_of_posteriors(algebra):
    """The divergence of seven outputs in seven dimensions, from the Jacobian of the features."""
    phi = TrigColumns.of(0.5 * draw(3, OUTPUTS))
    expansion = KroneckerExpansion(phi, 1 + draw(6, 1).abs(), draw(OUTPUTS, 5, seed=2))
    x, y, point = draw(60, OUTPUTS, seed=3), draw(60, OUTPUTS, seed=4), draw(1, OUTPUTS, seed=5)
    posterior = equations_of_vectors(expansion, x, y, noise_of_outputs()).posterior(None)[0]
    jacobian = torch.autograd.functional.jacobian(expansion.features, point).squeeze(2)
    row = sum(jacobian[i, :, i] for i in range(OUTPUTS)).unsqueeze(0)  # (1, F)
    found = posterior.apply(gp_orff.Divergence(), range(OUTPUTS))
    torch.testing.assert_close(found.mean(point), row @ posterior.theta)
    variance = row @ posterior.weight_covariance(row.mT)
    for own in (found.variance(point), found.covariance(point), found.blocks(point)[0]):
        torch.testing.assert_close(own, variance)


def test_batches_equal_their_members(algebra):
    x, y, xs = draw(3, 40, 2, seed=3), draw(3, 40, OUTPUTS, seed=4), draw(5, 2, seed=5)
    plain, noise = expansion_of(), noise_of_outputs()
    scales = plain.scales * torch.tensor([0.5, 1.0, 2.0]).double()[:, None, None]
    wide = KroneckerExpansion(plain.phi, scales, plain.mixing.expand(3, -1, -1))
    noises = Noise(*(t.expand(3, *t.shape) for t in noise))
    together, evidence_of_all = equations_of_vectors(wide, x, y, noises).posterior(None)
    assert together.batch_shape == (3,)
    v = draw(wide.num_features, 2, seed=6)
    for i in range(3):
        own = KroneckerExpansion(plain.phi, scales[i], plain.mixing)
        alone, found = equations_of_vectors(own, x[i], y[i], noise).posterior(None)
        torch.testing.assert_close(evidence_of_all.logdet[i], found.logdet)
        torch.testing.assert_close(evidence_of_all.quad[i], found.quad)
        for name in ("mean", "variance", "covariance"):
            torch.testing.assert_close(getattr(together, name)(xs)[i], getattr(alone, name)(xs))
        torch.testing.assert_close(
            together.weight_covariance(v.expand(3, -1, -1))[i], alone.weight_covariance(v)
        )


def test_detaching_cuts_the_graph():
    """Of trained columns: Cholesky factors then, of however many outputs."""
    plain, x, y = expansion_of(), draw(60, 2, seed=3), draw(60, OUTPUTS, seed=4)
    xs, scales = draw(3, 2, seed=5), plain.scales.clone().requires_grad_()

    def predicted(scales):
        own = KroneckerExpansion(plain.phi, scales, plain.mixing)
        return equations_of_vectors(own, x, y, noise_of_outputs()).posterior(None)[0]

    posterior = predicted(scales)
    assert posterior.variance(xs).requires_grad
    assert gradcheck(lambda s: (predicted(s).mean(xs), predicted(s).variance(xs)), scales)
    detached = posterior.detached()
    for name in ("mean", "variance", "blocks", "covariance", "root"):
        assert not getattr(detached, name)(xs).requires_grad
    torch.testing.assert_close(detached.variance(xs), posterior.variance(xs).detach())


# -- models -----------------------------------------------------------------------------------


def tasks(outputs=OUTPUTS, seed=0):
    torch.manual_seed(seed)  # gpytorch starts task covariances at random
    kernel = MultitaskKernel(RBFKernel(), num_tasks=outputs, rank=2).double()
    kernel.data_covar_module.lengthscale = 0.8
    return kernel


def test_exact_gps_equal_dense_algebra():
    """Evidence, its gradient, and predictions with and without `torch.no_grad`."""
    x, y, xs = uniform(60, 2), draw(60, OUTPUTS), uniform(5, 2, seed=2)
    kernel = gp_orff.ORFFKernel(tasks(), gp_orff.QuasiMonteCarlo(8), num_dims=2)
    model = vector_gp(x, y, kernel, noise=0.1)

    def noisy():
        features = kernel.features(x)
        return features @ features.mT + dense_noise(model, len(x))

    residuals = (y - model.mean_module(x)).flatten()
    found, expected = evidence(model), oracles.log_density(noisy(), residuals)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=0)
    slopes, wanted = gradient(found, model), gradient(expected, model)
    assert (slopes - wanted).norm() <= 1e-9 * wanted.norm()
    tests, features = kernel.features(xs), kernel.features(x)
    mean, cov = oracles.condition(tests @ tests.mT, tests @ features.mT, noisy(), residuals)
    offset = model.mean_module(xs).flatten()
    for context in (torch.enable_grad, torch.no_grad):
        model.train()
        with context():
            posterior = model.eval()(xs)
            torch.testing.assert_close(posterior.mean.flatten(), mean + offset, rtol=0, atol=1e-9)
            torch.testing.assert_close(posterior.variance.flatten(), cov.diagonal())


def test_paths_have_the_posterior_variance():
    """4000 paths: a standard deviation is known to 1/√8000, and 5 of these errors are allowed."""
    x, y, xs = uniform(60, 2), draw(60, OUTPUTS), uniform(4, 2, seed=2)
    rule = gp_orff.QuasiMonteCarlo(8)
    model = gp_orff.VectorFieldGP(tasks(), frequencies=rule, mean=ZeroMean()).condition(x, y)
    field = model.posterior()
    paths = field.sample_paths(4000, seed=0)(xs)
    sd, mean = field.variance(xs).sqrt(), field.mean(xs)
    assert ((paths.std(0) / sd - 1).abs() < 5 / 8000**0.5).all()
    assert ((paths.mean(0) - mean).abs() < 5 * sd / 4000**0.5).all()


def test_no_matrix_for_every_output_is_stored():
    """Neither r·M² entries of Cholesky factors nor p·M·r of the design of a mean: a step and
    predictions of 64 outputs on 96 columns, whose largest tensors are M², N·M and N·p."""
    points, outputs, frequencies = 100, 64, 48
    x, y = uniform(points, 2), draw(points, outputs)
    kernel = gp_orff.ORFFKernel(tasks(outputs), gp_orff.QuasiMonteCarlo(frequencies), num_dims=2)
    model = vector_gp(x, y, kernel, noise=0.1)
    columns = 2 * frequencies
    with Largest() as seen:
        evidence(model).backward()
        model.eval()
        posterior = model(x[:2])
        assert posterior.variance.shape == posterior.mean.shape == (2, outputs)
    assert seen.entries <= 4 * columns * outputs
    with Largest() as seen:
        CholeskyBlocks.of(spd(columns), torch.ones(outputs).double())
    assert seen.entries >= outputs * columns**2


@pytest.mark.parametrize(("rank", "noise"), [(OUTPUTS, 0.1), (2, 0.1), (1, 1e-3)])
def test_few_points_take_blocks_of_their_number(rank, noise):
    """The dual algebra of separable kernels against K + I⊗Σ written out."""
    mixing, points = draw(OUTPUTS, rank), 12
    kernel = gp_orff.SeparableKernel(RBFKernel().double(), torch.nn.Parameter(mixing))
    orff = gp_orff.ORFFKernel(kernel, gp_orff.MonteCarlo(20), num_dims=3).double()
    x, y = draw(points, 3, seed=1), draw(points, OUTPUTS, seed=2)
    root = draw(OUTPUTS, OUTPUTS, seed=3)
    covariance = (noise * (root @ root.mT + torch.eye(OUTPUTS))).requires_grad_()
    leaves = [x.requires_grad_(), covariance, *kernel.parameters()]

    def log_density(equations):
        expansion = expand(orff.base_kernel, orff.frequencies, 3)
        evidence = equations(expansion, x, y, Noise.of(covariance)).evidence()
        return evidence.log_density(draw(OUTPUTS, seed=5), y.numel())

    found, expected = log_density(equations_of_vectors), log_density(dual_of_vectors)
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=0)
    pairs = zip(*(torch.autograd.grad(v, leaves) for v in (found, expected)), strict=True)
    for one, other in pairs:
        torch.testing.assert_close(one, other, rtol=1e-7, atol=1e-8 * other.abs().max().item())
    with torch.no_grad():
        expansion, xs = expand(orff.base_kernel, orff.frequencies, 3), draw(5, 3, seed=4)
        posterior, dense = (
            equations(expansion, x, y, Noise.of(covariance)).posterior(None)[0]
            for equations in (equations_of_vectors, dual_of_vectors)
        )
        assert isinstance(posterior.inverse, DualBlocks)
        for name in ("mean", "variance", "blocks", "covariance"):
            one, other = (getattr(p, name)(xs) for p in (posterior, dense))
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)
        root = posterior.root(xs)
        torch.testing.assert_close(root @ root.mT, dense.covariance(xs), rtol=1e-9, atol=1e-9)
        eye = torch.eye(expansion.num_features).double()
        root = posterior.weight_root(eye)
        for found in (root @ root.mT, posterior.weight_covariance(eye)):
            torch.testing.assert_close(found, dense.weight_covariance(eye), rtol=0, atol=1e-10)


def test_few_points_of_many_outputs_never_fill_a_matrix():
    """100 outputs at 50 points: a step and predictions without a matrix of 5000 rows."""
    x, y = draw(50, 3), draw(50, 100, seed=1)
    kernel = gp_orff.ORFFKernel(
        MultitaskKernel(RBFKernel(), num_tasks=100), gp_orff.MonteCarlo(100), num_dims=3
    ).double()
    model = vector_gp(x, y, kernel, 0.1)
    with Largest() as largest:
        gradient(evidence(model), model)
        model.eval()
        with torch.no_grad():
            prediction = model(draw(4, 3, seed=2))
            assert torch.isfinite(prediction.variance).all()
    assert largest.entries < 0.1 * y.numel() ** 2


def test_few_points_with_a_singular_noise():
    """Noise of rank one on three outputs, against K + I⊗Σ."""
    x, y = draw(20, 3), draw(20, 3, seed=1)
    likelihood = MultitaskGaussianLikelihood(3, rank=1, has_global_noise=False).double()
    likelihood.task_noise_covar_factor.data = draw(3, 1, seed=2)
    kernel, rule = MultitaskKernel(RBFKernel(), num_tasks=3).double(), gp_orff.MonteCarlo(64)
    model = gp_orff.VectorFieldGP(
        kernel, likelihood=likelihood, mean=MultitaskMean(ZeroMean(), 3), frequencies=rule
    ).condition(x, y)
    features = gp_orff.ORFFKernel(kernel, rule, num_dims=3).features(x).detach()
    factor = likelihood.task_noise_covar_factor.detach()
    noisy = features @ features.mT + torch.kron(torch.eye(20), factor @ factor.mT)
    expected = oracles.log_density(noisy, y)
    torch.testing.assert_close(model.log_marginal_likelihood(), expected, rtol=1e-9, atol=0)


@pytest.mark.parametrize("noise", [0.1, 1e-4, 1e-8])
def test_few_points_solve_without_cancellation(noise):
    x, y, v = draw(20, 3), draw(20, 6, seed=1), draw(120, 3, seed=2)
    kernel = MultitaskKernel(RBFKernel(), num_tasks=6)
    kernel = gp_orff.ORFFKernel(kernel, gp_orff.MonteCarlo(64), num_dims=3).double()
    phi, covariance = kernel.features(x).detach(), noise * torch.eye(6).double()
    expansion = expand(kernel.base_kernel, kernel.frequencies, 3)
    noisy = phi @ phi.mT + torch.kron(torch.eye(20), covariance)
    with torch.no_grad():
        equations = equations_of_vectors(expansion, x, y, Noise.of(covariance))
        found = equations.solve(v)
    expected = torch.linalg.solve(noisy, v)
    bound = 1e-14 * torch.linalg.cond(noisy) * expected.norm()
    assert isinstance(equations, KroneckerDual)
    assert (found - expected).norm() < bound


@pytest.mark.slow
def test_starting_values_of_many_outputs():
    """With 20 outputs, 600 numbers are 30 points of 6 inputs, which find no lengthscale; features
    take 150. The fit ends where one from good values does."""
    x = uniform(300, 6)
    y = torch.sin(4 * x @ draw(6, 20, seed=1)) + 0.1 * draw(300, 20, seed=2)
    values = []
    for warm_start in (False, True):
        kernel = gp_orff.SeparableKernel(ScaleKernel(RBFKernel()), torch.eye(20)).double()
        kernel.base_kernel.base_kernel.lengthscale = 0.5
        model = gp_orff.VectorFieldGP(kernel, frequencies=gp_orff.Fastfood(64))
        model.fit(x, y, warm_start=warm_start, progress=False)
        values.append(model.log_marginal_likelihood().item())
        assert warm_start or "starting values, 150 points" in str(model.report)
    assert values[0] > values[1] - 1.0
