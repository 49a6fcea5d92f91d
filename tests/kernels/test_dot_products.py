"""Dot-product kernels and features, compared with quadratures, monomials and scikit-learn."""

import copy
import math
from fractions import Fraction

import gpytorch
import numpy as np
import pytest
import scipy.special
import torch
from gpytorch.kernels import LinearKernel, PolynomialKernel
from sklearn.metrics.pairwise import polynomial_kernel
from torch.autograd import gradcheck, gradgradcheck

import gp_orff
from gp_orff.data.reading import Options, read
from gp_orff.data.statistics import FieldStatistics
from gp_orff.features import chunked
from gp_orff.features.phases import LinearPhases
from gp_orff.features.zoo import DotProductColumns
from gp_orff.kernels.dot_product import Legendre, legendre_coefficients, log_num_harmonics
from gp_orff.kernels.tree import terms
from tests.support.fields import draw
from tests.support.registry import DOT_PRODUCTS, MEASURES

DotProductKernel = gp_orff.DotProductKernel


def exact(values):
    """In float64 from the start."""
    return torch.tensor(values, dtype=torch.float64)


def kernel_of(name, num_dims):
    """In float64, with hyperparameters away from one."""
    kernel = DOT_PRODUCTS[name](num_dims).double()
    if name == "linear":
        kernel.variance = torch.linspace(0.5, 1.5, num_dims)
    if name == "polynomial":
        kernel.offset = torch.tensor([0.6])
    return kernel


def sphere(*shape, seed=0):
    return torch.nn.functional.normalize(draw(*shape, seed=seed), dim=-1)


def gegenbauer(m, d, t):
    """L_{m,d} by SciPy; in the plane it is a Chebyshev polynomial."""
    if d == 2:
        return scipy.special.eval_chebyt(m, t)
    alpha = d / 2 - 1
    one = scipy.special.eval_gegenbauer(m, alpha, 1.0)
    return scipy.special.eval_gegenbauer(m, alpha, t) / one


# Legendre polynomials


@pytest.mark.parametrize("d", [2, 3, 5, 20, 300])
def test_legendre_polynomials(d):
    t = np.linspace(-1, 1, 9)
    t = torch.from_numpy(t)
    for m, value in enumerate(Legendre(d).sequence(t, torch.ones_like(t), 12)):
        torch.testing.assert_close(value, torch.from_numpy(gegenbauer(m, d, t.numpy())))


def test_they_are_homogeneous_and_smooth_at_zero():
    x, z = 3 * draw(4, 5), sphere(1, 5)
    radius = x.norm(dim=-1)
    t = (x @ z.mT).squeeze(-1)
    for m, value in enumerate(Legendre(5).sequence(t, radius**2, 6)):
        expected = radius.numpy() ** m * gegenbauer(m, 5, (t / radius).numpy())
        np.testing.assert_allclose(value, expected, rtol=1e-10, atol=1e-10)
    zero = torch.zeros(2, dtype=torch.float64)
    for m, value in enumerate(Legendre(5).sequence(zero, zero, 6)):
        assert torch.equal(value, torch.full_like(zero, m == 0))


@pytest.mark.parametrize("d", [2, 3, 4, 7, 1000])
def test_the_number_of_harmonics(d):
    """Homogeneous polynomials of degree m, without ‖x‖² times those of degree m − 2."""
    for m in range(12):
        count = math.comb(d + m - 1, m) - (math.comb(d + m - 3, m - 2) if m > 1 else 0)
        assert math.exp(log_num_harmonics(d, m)) == pytest.approx(count, rel=1e-12)


@pytest.mark.parametrize("d", [2, 3, 9, 4000])
def test_coefficients_of_monomials(d):
    """By exact division: the recurrence t L_m = ((m + d − 2) L_{m+1} + m L_{m−1})/(2m + d − 2)."""
    expected = {0: Fraction(1)}
    for n in range(51):
        found = legendre_coefficients(d, n)
        assert set(found) == {m for m, c in expected.items() if c}
        for m, value in found.items():  # logs of about 400 lose three digits
            assert value == pytest.approx(float(expected[m]), rel=1e-12)
        following = {}
        for m, c in expected.items():
            up = Fraction(m + d - 2, 2 * m + d - 2) if m else Fraction(1)
            following[m + 1] = following.get(m + 1, 0) + c * up
            if m:
                following[m - 1] = following.get(m - 1, 0) + c * (1 - up)
        expected = following


# exact kernels


def test_taylor_equals_a_sum_over_monomials():
    """(2 + ⟨x, z⟩)³ in two inputs, as features with binomial coefficients written out."""
    x, z = draw(5, 2), draw(4, 2, seed=1)
    kernel = DotProductKernel(exact([8.0, 12.0, 6.0, 1.0]))
    expected = polynomial_kernel(x, z, degree=3, gamma=1.0, coef0=2.0)
    np.testing.assert_allclose(kernel(x, z).to_dense().detach(), expected, rtol=1e-12)

    def monomials(x):
        return torch.stack(
            [
                math.sqrt(math.factorial(3) / math.prod(map(math.factorial, (i, j, 3 - i - j))))
                * math.sqrt(2.0) ** (3 - i - j)
                * x[:, 0] ** i
                * x[:, 1] ** j
                for i in range(4)
                for j in range(4 - i)
            ],
            dim=-1,
        )

    expected = monomials(x) @ monomials(z).mT
    torch.testing.assert_close(kernel(x, z).to_dense().detach(), expected)


@pytest.mark.parametrize("d", [2, 5])
def test_a_legendre_series(d):
    eigenvalues, x, z = [0.2, 0.5, 0.0, 0.3], draw(5, d), draw(4, d, seed=1)
    kernel = DotProductKernel.from_legendre(exact(eigenvalues), d)
    lengths = (x.norm(dim=-1)[:, None] * z.norm(dim=-1)).numpy()
    cosines = (x @ z.mT).numpy() / lengths
    expected = sum(v * lengths**m * gegenbauer(m, d, cosines) for m, v in enumerate(eigenvalues))
    np.testing.assert_allclose(kernel(x, z).to_dense().detach(), expected, rtol=1e-10, atol=1e-12)


def test_projections_equal_a_quadrature_over_the_sphere():
    """Eq. 28 for d = 3: Gauss–Legendre in the height, equal steps in the angle; both exact."""
    heights, weights = np.polynomial.legendre.leggauss(12)
    angles = 2 * np.pi * np.arange(24) / 24
    rim = np.sqrt(1 - heights**2)[:, None]
    v = np.stack(
        [rim * np.cos(angles), rim * np.sin(angles), heights[:, None] + 0 * angles], axis=-1
    ).reshape(-1, 3)
    weights = np.repeat(weights / 2 / 24, 24)
    coefficients, x, z = [0.1, 1.0, 0.0, 3.0, 0.5], draw(5, 3).numpy(), draw(4, 3, seed=1).numpy()
    expected = sum(
        c * (x @ v.T) ** p @ (weights[:, None] * (v @ z.T) ** p) for p, c in enumerate(coefficients)
    )
    kernel = DotProductKernel.from_projections(exact(coefficients), 3)
    found = kernel(torch.from_numpy(x), torch.from_numpy(z)).to_dense().detach()
    np.testing.assert_allclose(found, expected, rtol=1e-10)


@pytest.mark.parametrize("name", ["exponential", "legendre", "projections"])
def test_diagonals_batches_and_gradients(name):
    kernel, x = kernel_of(name, 3), draw(2, 6, 3)
    x[0, 0] = 0.0
    dense = kernel(x).to_dense()
    torch.testing.assert_close(kernel(x, diag=True), dense.diagonal(dim1=-1, dim2=-2))
    assert torch.linalg.eigvalsh(dense).min() > -1e-12

    raw = kernel.raw_coefficients  # which gradcheck changes in place
    assert gradcheck(lambda x, raw: kernel(x).to_dense(), (x.requires_grad_(), raw))


def test_a_batch_of_kernels():
    coefficients = torch.tensor([[1.0, 0.0, 2.0], [3.0, 0.0, 4.0]])
    kernel, x = DotProductKernel(coefficients).double(), draw(5, 3)
    one = DotProductKernel(coefficients[1]).double()
    torch.testing.assert_close(kernel(x).to_dense()[1], one(x).to_dense())
    torch.testing.assert_close(kernel[1](x).to_dense(), one(x).to_dense())
    assert one.expand_batch(torch.Size([2])).coefficients.shape == (2, 2)


def test_coefficients_are_trained_and_zeros_stay():
    kernel = DotProductKernel(exact([0.0, 2.0, 0.0, 1e-12]))
    assert kernel.degrees == (1, 3)
    assert [name for name, _ in kernel.named_parameters()] == ["raw_coefficients"]
    torch.testing.assert_close(
        kernel.coefficients.detach(), exact([2.0, 1e-12]), rtol=1e-12, atol=0
    )
    kernel.coefficients = torch.tensor([0.5, 0.25])
    x = draw(4, 2)
    torch.testing.assert_close(
        kernel(x).to_dense().detach(), 0.5 * (x @ x.mT) + 0.25 * (x @ x.mT) ** 3
    )
    assert not kernel.is_stationary


def test_active_dims():
    kernel, x = DotProductKernel([1.0, 1.0], active_dims=(0, 2)).double(), draw(5, 3)
    expected = 1 + x[:, [0, 2]] @ x[:, [0, 2]].mT
    torch.testing.assert_close(kernel(x).to_dense().detach(), expected)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: DotProductKernel([1.0, -0.5]), ValueError, "negative.*from_legendre"),
        (lambda: DotProductKernel([1.0, math.nan]), ValueError, "finite"),
        (lambda: DotProductKernel([0.0, 0.0]), ValueError, "at least one positive"),
        (lambda: DotProductKernel([]), ValueError, "sequence"),
        (lambda: DotProductKernel([[1.0, 0.0], [1.0, 1.0]]), ValueError, "same"),
        (lambda: DotProductKernel.from_legendre([1.0], 1), ValueError, "num_dims >= 2"),
        (lambda: DotProductKernel.from_projections([1.0], 1), ValueError, ">= 2"),
        (lambda: DotProductKernel.from_legendre([1.0], 2.0), TypeError, "integer"),
        (lambda: kernel_of("legendre", 3)(draw(4, 2)).to_dense(), ValueError, "3 columns, got 2"),
        (lambda: kernel_of("even", 3)(draw(4, 2).float()).to_dense(), TypeError, "float64"),
    ],
)
def test_bad_kernels(make, error, message):
    with pytest.raises(error, match=message):
        make()


# columns


def columns(d=4, lifted=1, scale=None, offset=None):
    """Of orders and degrees written by hand, on inputs 0 and 2 of three, and constant ones."""
    degrees, orders = torch.tensor([5, 6, 3, 2, 3, 2]), torch.tensor([5, 4, 3, 2, 1, 0])
    scale = exact([[0.8, 1.3]]) if scale is None else scale
    offset = exact([[0.6] * lifted]) if offset is None else offset
    phases = LinearPhases(sphere(6, 2 + lifted, seed=5))
    return DotProductColumns(phases, Legendre(d), degrees, orders, (0, 2), scale, offset)


def test_columns_equal_scipys_polynomials():
    phi, x = columns(d=3), draw(2, 7, 3)
    lifted = torch.cat([x[..., [0, 2]] * phi.scale, exact([[[0.6]]]).expand(2, 7, 1)], dim=-1)
    radius = lifted.norm(dim=-1, keepdim=True)
    cosines = (lifted @ phi.phases.omega.mT / radius).numpy()
    expected = np.stack(
        [
            radius[..., 0].numpy() ** n * gegenbauer(m, 3, cosines[..., k])
            for k, (n, m) in enumerate(zip(phi.degrees.tolist(), phi.orders.tolist(), strict=True))
        ],
        axis=-1,
    )
    np.testing.assert_allclose(phi.values(x), expected, rtol=1e-11, atol=1e-13)
    chosen = torch.tensor([1, 3, 4])
    np.testing.assert_allclose(phi.select(chosen).values(x), expected[..., chosen], rtol=1e-11)


@pytest.mark.parametrize("zero", [False, True])
def test_columns_have_two_derivatives(zero):
    x, scale = draw(3, 3), exact([[0.8, 1.3]]).requires_grad_()
    x[0] = 0.0 if zero else x[0]
    none = torch.zeros(1, 0).double()

    def values(x, scale):
        return columns(d=2, lifted=0, scale=scale, offset=none).values(x)

    assert gradcheck(values, (x.requires_grad_(), scale))
    assert gradgradcheck(values, (x, scale))


@pytest.mark.parametrize("budget", [2**22, 8 * 6 * 4])
def test_products_equal_dense_algebra(budget, monkeypatch):
    monkeypatch.setitem(chunked._CHUNK_BYTES, "cpu", budget)
    phi, x, y, w = columns(d=3), draw(2, 9, 3), draw(9, 2, seed=1), draw(6, 4, seed=2)
    values = phi.values(x)
    gram, cross, total = phi.moments(x, y)
    close = {"rtol": 1e-12, "atol": 1e-12}
    torch.testing.assert_close(gram, values.mT @ values, **close)
    torch.testing.assert_close(cross, values.mT @ y, **close)
    torch.testing.assert_close(total, values.sum(-2), **close)
    torch.testing.assert_close(phi.adjoint(x, y), values.mT @ y, **close)
    torch.testing.assert_close(phi.apply(x, w), values @ w, **close)
    x, values, weights = x[0], values[0], draw(9, 3, seed=3).exp()
    grams, cross, sums = phi.sums(x, y, weights)
    for found, total, weight in zip(grams, sums, weights.mT, strict=True):
        torch.testing.assert_close(phi.gram(found), values.mT @ (weight[:, None] * values), **close)
        torch.testing.assert_close(total, values.mT @ weight, **close)
    torch.testing.assert_close(cross, values.mT @ y, **close)
    assert torch.equal(phi.sums(x[:0], y[:0], weights[:0])[0][0], torch.zeros(6, 6).double())
    assert phi.moments(x.float(), y.float())[0].dtype == torch.float64


@pytest.mark.slow
def test_products_are_differentiable_twice(monkeypatch):
    monkeypatch.setitem(chunked._CHUNK_BYTES, "cpu", 8 * 6 * 2)
    x, y, w = draw(3, 3), draw(3, 1, seed=1).requires_grad_(), draw(6, 1, seed=2).requires_grad_()
    scale = exact([[0.8, 1.3]]).requires_grad_()

    def evidence(y, scale):
        gram, cross, _ = columns(d=3, scale=scale).moments(x, y)
        gram = gram + torch.eye(6)
        return (cross * torch.linalg.solve(gram, cross)).sum() - gram.logdet()

    def apply(w, scale):
        return columns(d=3, scale=scale).apply(x, w)

    for function, inputs in ((evidence, (y, scale)), (apply, (w, scale))):
        assert gradcheck(function, inputs)
        assert gradgradcheck(function, inputs)


def test_columns_are_told_apart_halved_and_saved():
    phi = columns(d=3)
    assert phi.same(phi.to(torch.device("cpu")))
    assert not phi.same(columns(d=4))
    assert not phi.same(columns(d=3, scale=exact([[0.8, 1.4]])))
    (first, factor), (second, _) = phi.halves()
    assert (first.tolist(), second.tolist()) == ([0, 2, 4, 5], [1, 3, 5])  # m = 0 in both
    assert factor.tolist() == [5 / 3] * 3 + [1.0]
    x, y = draw(8, 3), draw(8, 1, seed=1)
    statistics = FieldStatistics.of(read(x, y, 1, Options()), phi)
    assert FieldStatistics.from_plain(statistics.plain()).phi.same(phi)
    with pytest.raises(NotImplementedError, match="variance grows without bound"):
        phi.mean_squares()


# random features

RULES = {
    "monte_carlo": gp_orff.MonteCarlo,
    "orthogonal": gp_orff.Orthogonal,
    "quasi_monte_carlo": gp_orff.QuasiMonteCarlo,
    "fastfood": gp_orff.Fastfood,
    "structured_orthogonal": gp_orff.StructuredOrthogonal,
    "fourier": gp_orff.FourierFastfood,
}
EXACT_LAW = tuple(RULES)[:4]  # z is uniform on the sphere


def features(kernel, num_dims, rule):
    return gp_orff.ORFFKernel(kernel, rule, num_dims=num_dims).double()


def points(d):
    """On the sphere, inside, outside, and zero."""
    scales = exact([[1.0], [1.0], [1.0], [0.4], [1.3], [0.0]])
    x = sphere(6, d, seed=4)
    x[1] = torch.nn.functional.normalize(x[0] + 0.4 * x[1], dim=0)  # near the first
    return scales * x


CELLS = [("exponential", 2, "monte_carlo", "trace")]
CELLS += [(name, 5, "monte_carlo", "trace") for name in DOT_PRODUCTS]
CELLS += [(name, 20, "monte_carlo", measure) for name in DOT_PRODUCTS for measure in MEASURES]
CELLS += [
    (*case, rule, "base")
    for case in (("exponential", 2), ("polynomial", 5), ("exponential", 20))
    for rule in EXACT_LAW[1:]
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "d", "rule", "measure"), CELLS)
def test_the_mean_over_seeds_is_the_exact_kernel(name, d, rule, measure):
    """Within five standard errors, of 50 seeds of 128 columns."""
    kernel, x = kernel_of(name, d), points(d)
    expected, found = kernel(x).to_dense().detach(), []
    for seed in range(50):
        phi = features(kernel, d, RULES[rule](128, measure=measure, seed=seed)).features(x).detach()
        found.append(phi @ phi.mT)
    found = torch.stack(found)
    error = found.std(0) / math.sqrt(len(found)) + 1e-12 * expected.abs().max()
    assert ((found.mean(0) - expected).abs() < 5 * error).all()


@pytest.mark.parametrize("rule", RULES)
def test_at_zero_features_are_exact_and_differentiable(rule):
    """Only the constant column is not zero there; it is no random one."""
    kernel = features(kernel_of("exponential", 4), 4, RULES[rule](32))
    x = torch.zeros(1, 4, dtype=torch.float64, requires_grad=True)
    variance = kernel(x, diag=True)
    torch.testing.assert_close(variance.detach(), exact([1.0]), rtol=1e-12, atol=0)
    (gradient,) = torch.autograd.grad(variance.sum(), x)
    assert torch.equal(gradient, torch.zeros_like(x))


def columns_of(kernel, rule):
    (draw_of_term,) = features(kernel, 4, rule).frequencies
    phi, variances = draw_of_term.columns(terms(kernel)[0], 4)
    return phi, variances.detach().squeeze(-1)


@pytest.mark.parametrize("measure", MEASURES)
def test_variances_of_corollary_4(measure):
    """λ N(d, m) / D for one order m, where N(4, m) = (m + 1)²; the sum of Corollary 4."""
    kernel = DotProductKernel.from_legendre(exact([0.0, 0.0, 0.3]), 4)
    _, variances = columns_of(kernel, gp_orff.MonteCarlo(20, measure=measure))
    torch.testing.assert_close(variances, torch.full((20,), 0.3 * 9 / 20).double())


@pytest.mark.parametrize("measure", MEASURES)
def test_the_law_of_the_orders(measure):
    """λ = 0.2, 0.5, 0, 0.3 with N = 1, 4, 9, 16: Σ λN = 6.8 without the constant."""
    kernel = DotProductKernel.from_legendre(exact([0.2, 0.5, 0.0, 0.3]), 4)
    phi, variances = columns_of(kernel, gp_orff.MonteCarlo(1001, measure=measure))
    law = {1: 0.5 / 0.8, 3: 0.3 / 0.8}
    if measure == "trace":
        law = {1: (law[1] + 2 / 6.8) / 2, 3: (law[3] + 4.8 / 6.8) / 2}
    expected = {1: 2.0 / (1000 * law[1]), 3: 4.8 / (1000 * law[3]), 0: 0.2}
    for order, variance in zip(phi.orders.tolist(), variances.tolist(), strict=True):
        assert variance == pytest.approx(expected[order])
    assert phi.orders.tolist() == sorted(phi.orders.tolist(), reverse=True)
    share = (phi.orders == 3).sum().item() / 1000
    assert share == pytest.approx(law[3], abs=5 * math.sqrt(law[3] * law[1] / 1000))
    if measure == "trace":
        assert variances[:-1].max() < 2 * 6.8 / 1000


def test_many_inputs():
    """512 columns of a cubic kernel of unit vectors with 64 inputs: errors of both measures.

    Drawn as in Corollary 4 alone, the error is above 0.16.
    """
    kernel, x = DotProductKernel(exact([1.0, 3.0, 3.0, 1.0]) / 8), points(64)[:3]
    exact_values, errors = kernel(x).to_dense().detach(), {}
    for measure in MEASURES:
        rules = [gp_orff.MonteCarlo(512, measure=measure, seed=seed) for seed in range(8)]
        found = torch.stack([features(kernel, 64, rule)(x).to_dense().detach() for rule in rules])
        errors[measure] = (found - exact_values).square().mean().sqrt().item()
    assert errors["base"] < 0.08
    assert errors["trace"] < 0.12


@pytest.mark.parametrize(("rule", "number"), [("orthogonal", 8), ("structured_orthogonal", 64)])
def test_orthogonal_vectors_give_a_linear_kernel_exactly(rule, number):
    """Blocks of 4 and of 32 vectors."""
    kernel, x = kernel_of("linear", 4), draw(6, 4)
    found = features(kernel, 4, RULES[rule](number))(x).to_dense()
    torch.testing.assert_close(found, kernel(x).to_dense(), rtol=1e-12, atol=1e-12)


def shared(kernel):
    return gpytorch.kernels.MultitaskKernel(kernel, num_tasks=2).double()


COMPOSITIONS = {
    "scaled": lambda: gpytorch.kernels.ScaleKernel(PolynomialKernel(2)),
    "multitask": lambda: shared(kernel_of("polynomial", 3)),
    "separable": lambda: gp_orff.SeparableKernel(LinearKernel(), draw(2, 1)),
    "sum": lambda: PolynomialKernel(2) + gpytorch.kernels.RBFKernel() + LinearKernel(),
    "sum_of_multitask": lambda: shared(LinearKernel()) + shared(gpytorch.kernels.RBFKernel()),
    "lcm": lambda: gpytorch.kernels.LCMKernel(
        [LinearKernel(), gpytorch.kernels.RBFKernel(), PolynomialKernel(2)], num_tasks=2
    ),
    "active_dims": lambda: PolynomialKernel(2, active_dims=(0, 2)),
    "constant": lambda: PolynomialKernel(2) + gpytorch.kernels.ConstantKernel(),
}


@pytest.mark.parametrize("rule", ["quasi_monte_carlo", "fastfood"])
@pytest.mark.parametrize("name", COMPOSITIONS)
def test_compositions(name, rule):
    """4096 features against the exact kernel; a mean error of 5 % of the largest variance."""
    exact_kernel = COMPOSITIONS[name]().double()
    kernel, x = features(exact_kernel, 3, RULES[rule](4096)), 0.7 * draw(5, 3)
    found, expected = kernel(x).to_dense().detach(), exact_kernel(x).to_dense().detach()
    assert (found - expected).abs().mean() < 0.05 * expected.diagonal().max()
    phi = kernel.features(x).detach()
    torch.testing.assert_close(phi @ phi.mT, found, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(kernel(x, diag=True).detach(), found.diagonal())
    assert kernel.num_features == phi.shape[-1]
    assert not kernel.is_stationary
    assert len(kernel.accuracy()) == len(kernel.frequencies)


def test_a_batch_in_features():
    kernel = DotProductKernel(exact([[1.0, 0.0, 2.0], [3.0, 0.0, 0.1]]))
    orff, x = features(kernel, 3, gp_orff.QuasiMonteCarlo(1024)), draw(5, 3)
    found, expected = orff(x).to_dense().detach(), kernel(x).to_dense().detach()
    assert found.shape == (2, 5, 5)
    assert ((found - expected).abs() < 0.05 * expected.amax((-1, -2), keepdim=True)).all()
    torch.testing.assert_close(orff[1](x).to_dense().detach(), found[1])


@pytest.mark.parametrize("rule", ["monte_carlo", "fastfood"])
def test_the_evidence_and_its_gradient(rule):
    """Those of a dense normal distribution with the covariance ΦΦᵀ + σ²I, and by differences."""
    kernel = gpytorch.kernels.ScaleKernel(kernel_of("polynomial", 3) + kernel_of("exponential", 3))
    x, y = 0.7 * draw(30, 3), draw(30, seed=1)
    model = model_of(features(kernel.double(), 3, RULES[rule](9)), x, y)
    evidence = gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model)
    parameters = list(model.parameters())
    found = 30 * evidence(model(x), y)
    phi = model.covar_module.features(x)
    covariance = phi @ phi.mT + model.likelihood.noise * torch.eye(30)
    mean = torch.zeros(30).double() + model.mean_module(x)
    dense = torch.distributions.MultivariateNormal(mean, covariance).log_prob(y)
    torch.testing.assert_close(found, dense, rtol=1e-9, atol=0)
    pairs = zip(
        torch.autograd.grad(found, parameters), torch.autograd.grad(dense, parameters), strict=True
    )
    for own, expected in pairs:
        torch.testing.assert_close(own, expected, rtol=1e-6, atol=1e-8)
    offset = kernel.base_kernel.kernels[0].raw_offset

    def evidence_of(offset):
        phi = model.covar_module.features(x)
        return torch.distributions.MultivariateNormal(
            mean.detach(), phi @ phi.mT + 0.3 * torch.eye(30)
        ).log_prob(y)

    assert gradcheck(evidence_of, offset)


def model_of(kernel, x, y):
    class Model(gpytorch.models.ExactGP):
        def __init__(self):
            super().__init__(x, y, gpytorch.likelihoods.GaussianLikelihood())
            self.mean_module, self.covar_module = gpytorch.means.ConstantMean(), kernel

        def forward(self, x):
            return gpytorch.distributions.MultivariateNormal(
                self.mean_module(x), self.covar_module(x)
            )

    return Model().double()


def test_predictions_of_an_exact_gp():
    """With orthogonal vectors, those of the linear kernel itself."""
    x, y, xs = draw(40, 4), draw(40, seed=1), draw(5, 4, seed=2)
    predictions = []
    for kernel in (
        kernel_of("linear", 4),
        features(kernel_of("linear", 4), 4, gp_orff.Orthogonal(8)),
    ):
        model = model_of(kernel, x, y).eval()
        posterior = model(xs)
        predictions.append((posterior.mean.detach(), posterior.covariance_matrix.detach()))
    for found, expected in zip(*predictions, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-8)


def test_a_vector_field_model(tmp_path):
    """Evidence and predictions on features are those of the exact kernel; files keep the model."""
    x, xs = draw(40, 4), draw(5, 4, seed=2)
    y, means = x[:, :2] + 0.1 * draw(40, 2, seed=1), []
    prior = shared(kernel_of("linear", 4))
    for rule in (None, gp_orff.Orthogonal(8), gp_orff.StructuredOrthogonal(64)):
        kernel = copy.deepcopy(prior)
        settings = {} if rule is None else {"frequencies": rule}
        model = gp_orff.VectorFieldGP(kernel, **settings).condition(x, y)
        posterior = model.posterior()
        means.append((posterior.mean(xs), posterior.variance(xs)))
        model.save(tmp_path / "model.pt")
        again = gp_orff.VectorFieldGP.load(tmp_path / "model.pt").posterior()
        torch.testing.assert_close(again.mean(xs), posterior.mean(xs), rtol=1e-9, atol=1e-12)
    for mean, variance in means[1:]:
        torch.testing.assert_close(mean, means[0][0], rtol=1e-7, atol=1e-9)
        torch.testing.assert_close(variance, means[0][1], rtol=1e-7, atol=1e-9)
    first = posterior.mean(xs, gp_orff.Component([1.0, 0.0]))
    torch.testing.assert_close(first, means[-1][0][:, :1])
    with pytest.raises(
        NotImplementedError, match=r"Component.*columns.*are not waves, got Jacobian"
    ):
        posterior.mean(xs, gp_orff.Jacobian(num_dims=4))


@pytest.mark.parametrize("name", ["even", "legendre", "projections", "polynomial"])
def test_files_keep_kernels(name, tmp_path):
    x = 0.5 * draw(20, 4)
    model = gp_orff.VectorFieldGP(kernel_of(name, 4), frequencies=gp_orff.MonteCarlo(8))
    model.condition(x, x[:, :1]).save(tmp_path / "model.pt")
    again = gp_orff.VectorFieldGP.load(tmp_path / "model.pt")
    torch.testing.assert_close(again.posterior().mean(x), model.posterior().mean(x))


def test_regression():
    """A linear kernel is ridge regression on the inputs; its variance is that at the data."""
    x, y = draw(50, 4).numpy(), draw(50, 2, seed=1).numpy()
    kernel = shared(kernel_of("linear", 4))
    kernel.data_covar_module.variance = torch.ones(4)
    covariance = kernel.task_covar_module.covar_matrix.to_dense().detach().numpy()
    ridge = gp_orff.regression.ORFFRidge(kernel, gp_orff.Orthogonal(8), alpha=0.5).fit(x, y)
    gram = np.kron(x @ x.T, covariance)
    expected = gram @ np.linalg.solve(gram + 0.5 * np.eye(100), y.ravel())
    np.testing.assert_allclose(ridge.predict(x).ravel(), expected, rtol=1e-6, atol=1e-9)
    chosen = gp_orff.regression.ORFFRidgeCV(kernel, gp_orff.Orthogonal(8)).fit(x, x[:, :2] + y)
    variance = (x**2).sum(1).mean() * covariance.trace() / 2
    np.testing.assert_allclose(chosen.alphas_, np.logspace(-6, 2, 17) * variance, rtol=1e-8)


def test_permutations():
    """Remark 8: the inner product of permutation matrices counts the places that agree."""
    orders = torch.tensor([[0, 1, 2, 3], [1, 0, 2, 3], [3, 2, 1, 0], [0, 2, 1, 3]])
    x = torch.nn.functional.one_hot(orders).double().flatten(1)
    agreements = (orders[:, None] == orders).sum(-1).double()
    kernel = DotProductKernel.from_taylor(exact([0.0, 0.1, 0.05]))
    expected = 0.1 * agreements + 0.05 * agreements**2
    torch.testing.assert_close(kernel(x).to_dense().detach(), expected)
    found = features(kernel, 16, gp_orff.Fastfood(4096, measure="base"))(x).to_dense().detach()
    assert (found - expected).abs().max() < 0.25  # three standard deviations


RULE = gp_orff.MonteCarlo(8)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda: gp_orff.ORFFKernel(LinearKernel(), RULE, num_dims=1),
            ValueError,
            "2 inputs.*zeros",
        ),
        (
            lambda: features(kernel_of("legendre", 5), 5, gp_orff.Fastfood(8)),
            ValueError,
            "from_taylor",
        ),
        (lambda: features(kernel_of("legendre", 5), 4, RULE), ValueError, "same inputs|5"),
        (
            lambda: features(kernel_of("even", 3), 3, RULE)(draw(4, 2)).to_dense(),
            ValueError,
            "3 col",
        ),
        (
            lambda: features(LinearKernel() * gpytorch.kernels.RBFKernel(), 3, RULE),
            NotImplementedError,
            "product.*sum",
        ),
        (
            lambda: features(gpytorch.kernels.RBFKernel() * LinearKernel(), 3, gp_orff.Fastfood(8)),
            NotImplementedError,
            "product.*sum",
        ),
        (
            lambda: gp_orff.CurlFreeKernel(LinearKernel(), num_dims=2),
            NotImplementedError,
            "stationary base kernel, got LinearKernel.*MultitaskKernel",
        ),
        (
            lambda: gp_orff.SpectralMatrixKernel(
                LinearKernel(), lambda w: w[:, :, None], num_outputs=2, num_dims=2
            ),
            NotImplementedError,
            "stationary base kernel",
        ),
        (
            lambda: features(LinearKernel(), 2, gp_orff.Grid(domain=((0.0, 1.0),) * 2)),
            NotImplementedError,
            "QuasiMonteCarlo",
        ),
        (
            lambda: features(LinearKernel(), 2, gp_orff.GaussHermite(3)),
            NotImplementedError,
            "QuasiMonteCarlo",
        ),
        (
            lambda: gp_orff.bounds.minh(LinearKernel(), domain=((0.0, 1.0),) * 2),
            NotImplementedError,
            "compare_with_exact",
        ),
        (lambda: gp_orff.spectrum(PolynomialKernel(power=0.5)), ValueError, "positive integer"),
    ],
)
def test_bad_features(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_auto_takes_random_vectors():
    x = draw(20, 2)
    kernel = features(PolynomialKernel(2), 2, gp_orff.Auto(max_features=64).for_data(x))
    assert "quasi-Monte Carlo" in kernel.frequencies[0].reason


def test_gradients_at_zero():
    """The square roots of an offset and of a variance have derivatives there."""
    homogeneous, nothing = PolynomialKernel(2).double(), LinearKernel().double()
    homogeneous.raw_offset.data.fill_(-1e4)
    nothing.raw_variance.data.fill_(-1e4)
    for kernel in (homogeneous, nothing):
        features(kernel, 4, gp_orff.MonteCarlo(32))(draw(5, 4)).to_dense().sum().backward()
        assert all(torch.isfinite(parameter.grad).all() for parameter in kernel.parameters())


def test_gradients_of_a_coefficient_that_is_zero():
    kernel = gp_orff.DotProductKernel([1.0, 1.0, 1.0]).double()
    kernel.raw_coefficients.data[0] = -1e4
    features(kernel, 4, gp_orff.MonteCarlo(32))(draw(5, 4)).to_dense().sum().backward()
    assert torch.isfinite(kernel.raw_coefficients.grad).all()
