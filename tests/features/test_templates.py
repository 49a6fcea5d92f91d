"""`Templates`, compared with the exact RBF kernel, quadrature over templates, and dense algebra."""

import itertools
import math
import pickle
import warnings

import numpy as np
import pytest
import scipy.integrate
import torch
from gpytorch.kernels import (
    ConstantKernel,
    MaternKernel,
    MultitaskKernel,
    RBFKernel,
    ScaleKernel,
)
from gpytorch.means import ZeroMean
from torch.autograd import gradcheck

import gp_orff
from gp_orff.data.reading import Options, read
from gp_orff.data.statistics import FieldStatistics
from gp_orff.features import chunked
from gp_orff.features.assemble import draw as drawn
from gp_orff.features.assemble import expand
from gp_orff.features.columns import TrigColumns
from gp_orff.features.zoo import Bump, TemplateColumns
from gp_orff.regression import ORFFRidge
from tests.support import oracles
from tests.support.fields import draw
from tests.support.models import dense_noise, evidence, gradient, scalar_gp
from tests.support.registry import randomise_tasks

A, SEEDS = 2.4, 100


def rbf(num_dims, **kwargs):
    kernel = RBFKernel(ard_num_dims=num_dims, **kwargs).double()
    kernel.lengthscale = torch.linspace(0.7, 1.5, num_dims, dtype=torch.float64)
    return kernel


def features_of(kernel, x):
    """The features, by eq. (26) with their constant, from the standard normal numbers w = √b z."""
    (draw_of_term,) = kernel.frequencies
    a, base = draw_of_term.a, kernel.base_kernel
    z = draw_of_term.bases[0] / math.sqrt(a * a - 2 * a)
    b = a * a - 2 * a
    scaled = x / base.lengthscale
    exponents = [
        2 * a / (2 * a + b) * scaled.square().sum(-1, keepdim=True),
        -2 * scaled @ z.mT,
        z.square().sum(-1),
    ]
    phi = torch.exp(-a / 2 * sum(exponents))
    return phi * ((2 * a + b) / b) ** (x.shape[-1] / 4) / len(z) ** 0.5


def columns(z, weighted=False, a=A, lengthscale=1.0):
    """Columns with templates z (M, k)."""
    z = torch.as_tensor(z)
    inverse = torch.full((1, z.shape[-1]), 1 / lengthscale, dtype=torch.float64)
    center = torch.zeros(z.shape[-1], dtype=torch.float64)
    function = Bump(a, a if weighted else 2.0)
    return TemplateColumns(z, inverse, center, tuple(range(z.shape[-1])), function)


# The kernel


@pytest.mark.parametrize("num_dims", [1, 2, 3])
@torch.no_grad()
def test_the_kernel_is_unbiased(num_dims):
    """100 seeds of 200 templates, within 5 standard errors, with ARD and away from the origin."""
    exact, center = rbf(num_dims), [10.0, -3.0, 5.0][:num_dims]
    x = draw(6, num_dims) * exact.lengthscale + torch.tensor(center)
    found = torch.stack(
        [
            gp_orff.ORFFKernel(exact, gp_orff.Templates(200, a=A, center=center, seed=seed))(
                x
            ).to_dense()
            for seed in range(SEEDS)
        ]
    )
    error = (found.mean(0) - exact(x).to_dense()).abs()
    assert (error < 5 * found.std(0) / SEEDS**0.5).all()
    assert (found.std(0) / SEEDS**0.5).max() < 0.06  # so that it can fail


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("num_dims", [1, 2])
@pytest.mark.parametrize("a", [2.1, 2.5, 4.0])
def test_the_constant_by_quadrature(a, num_dims, weighted):
    """Sums over a lattice of templates, 0.1 apart, give the RBF kernel, or (25) with 1 at 0: 1e-9.

    Such sums of Gaussians converge exponentially.
    """
    nodes = np.linspace(-12, 12, 241)
    weights = np.exp(-(a * a - 2 * a) / 2 * nodes**2)
    z = np.array(list(itertools.product(nodes, repeat=num_dims)))
    weights = np.array([math.prod(w) for w in itertools.product(weights, repeat=num_dims)])
    weights = torch.from_numpy(weights) * (0.1 / math.sqrt(2 * math.pi) * a) ** num_dims
    x = draw(5, num_dims)
    phi = columns(z, weighted, a).values(x)
    expected = oracles.rbf(x[:, None] - x, 1.0)
    if weighted:  # (25) at b = a² − 2a
        b, squares = a * a - 2 * a, x.square().sum(-1)
        share = -a / 2 * b / (2 * a + b) * (squares[:, None] + squares)
        expected = expected * share.exp()
    torch.testing.assert_close((phi * weights) @ phi.mT, expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("b", [0.4, 3.0])
def test_equations_25_and_26_with_any_b(b):
    """∫ φ φ′ dμ by scipy: the constant √(b/(2a + b)), and the lengthscale √(2a + b)/a."""
    a = 1.7
    density = scipy.stats.norm(scale=b**-0.5).pdf
    for x, y in ((0.3, -0.8), (1.1, 0.2)):

        def product(z, p, x=x, y=y):
            bumps = [math.exp(-a / 2 * (p * t * t - 2 * t * z + z * z)) for t in (x, y)]
            return math.prod(bumps) * density(z)

        constant = math.sqrt(b / (2 * a + b))
        rbf_part = math.exp(-(a * a) / (4 * a + 2 * b) * (x - y) ** 2)
        local = math.exp(-a / 2 * b / (2 * a + b) * (x * x + y * y))
        for p, expected in ((1.0, local * rbf_part), (2 * a / (2 * a + b), rbf_part)):
            found = scipy.integrate.quad(product, -20, 20, args=(p,), limit=200)[0]
            assert found == pytest.approx(constant * expected, rel=1e-8)
        assert rbf_part == pytest.approx(math.exp(-0.5 * (x - y) ** 2 * a * a / (2 * a + b)))


@pytest.mark.parametrize("weighted", [False, True])
def test_features_are_positive_bumps(weighted):
    """Positive, and largest at (a/p) z, on a lattice of points 0.02 apart."""
    z = torch.tensor([[0.4], [-1.0]], dtype=torch.float64)
    x = torch.linspace(-3, 3, 301, dtype=torch.float64).unsqueeze(-1)
    phi = columns(z, weighted).values(x)
    assert (phi > 0).all()
    expected = z[:, 0] * (1 if weighted else A / 2)
    torch.testing.assert_close(x[phi.argmax(0), 0], expected, rtol=0, atol=0.011)


@torch.no_grad()
def test_the_weighted_kernel():
    """4000 templates of (25), 1 at the center: 0.05 is 3 standard errors or more."""
    exact, center = rbf(2), torch.tensor([4.0, -2.0], dtype=torch.float64)
    rule = gp_orff.Templates(4000, a=A, weighted=True, center=center.tolist())
    scaled = draw(6, 2)
    x = center + scaled * exact.lengthscale
    squares = scaled.square().sum(-1)
    expected = exact(x).to_dense() * (-0.5 * (A - 2) * (squares[:, None] + squares)).exp()
    found = gp_orff.ORFFKernel(exact, rule)(x).to_dense()
    torch.testing.assert_close(found, expected, rtol=0, atol=0.05)


@torch.no_grad()
def test_features_are_those_of_equation_26():
    """Rounding; in a kernel, and with its inner products."""
    kernel = gp_orff.ORFFKernel(rbf(3), gp_orff.Templates(7, a=A, seed=3))
    x = 0.1 * draw(5, 3)
    torch.testing.assert_close(kernel.features(x).to_dense(), features_of(kernel, x))
    z = kernel.frequencies[0].bases[0] / math.sqrt(A * A - 2 * A)
    torch.testing.assert_close(kernel.phases(x), x / kernel.base_kernel.lengthscale @ z.mT)
    assert kernel.num_features == 7


@pytest.mark.parametrize(("a", "r"), [(2.2, 1.0), (2.5, 0.0), (2.5, 1.3), (6.0, 0.5)])
def test_the_variance_of_the_docstring(a, r):
    """E φ⁴ in one dimension by scipy."""
    b = a * a - 2 * a
    density = scipy.stats.norm(scale=b**-0.5).pdf

    def fourth(z):
        phi = (a / (a - 2)) ** 0.25 * math.exp(-0.5 * (2 * r * r - 2 * a * r * z + a * z * z))
        return phi**4 * density(z)

    found = scipy.integrate.quad(fourth, -30, 30, limit=400)[0]
    expected = (a * a / (a * a - 4)) ** 0.5 * math.exp(4 * r * r * (a - 2) / (a + 2))
    assert found == pytest.approx(expected, rel=1e-8)


def test_the_numbers_of_the_docstring():
    """At r = √d, a = 2.45 is best and gives 2.6^d; standard deviations of the bumps' centers."""
    a = np.linspace(2.01, 6, 4000)
    fourth = (a**2 / (a**2 - 4)) ** 0.5 * np.exp(4 * (a - 2) / (a + 2))
    assert a[fourth.argmin()] == pytest.approx(2.45, abs=0.01)
    assert fourth.min() == pytest.approx(2.6, abs=0.01)
    assert fourth.min() ** 3 - 1 == pytest.approx(16, abs=0.5)
    assert fourth.min() ** 10 - 1 == pytest.approx(14_000, rel=0.02)
    for a, sd in ((2.45, 1.2), (2.08, 2.5)):
        assert a / 2 / math.sqrt(a * a - 2 * a) == pytest.approx(sd, abs=0.06)


# Products, gradients, statistics


@pytest.mark.parametrize("chunk", [10**6, 3])
def test_products_equal_dense_algebra(chunk, monkeypatch):
    monkeypatch.setitem(chunked._CHUNK_BYTES, "cpu", 8 * 5 * chunk)
    phi, x, y, w = columns(draw(5, 2)), draw(40, 2), draw(40, 2, seed=1), draw(5, 3, seed=2)
    written = phi.values(x)
    for found, expected in zip(
        (*phi.moments(x, y), phi.adjoint(x, y), phi.apply(x, w)),
        (written.mT @ written, written.mT @ y, written.sum(0), written.mT @ y, written @ w),
        strict=True,
    ):
        torch.testing.assert_close(found, expected)


def test_gradients():
    """In x and the lengthscales, by differences."""
    x, y, inverse = draw(6, 2).requires_grad_(), draw(6, 2, seed=1), torch.ones(1, 2).double()
    phi = columns(draw(4, 2))

    def moments(x, inverse):
        return phi.with_tensors(inverse).moments(x, y)

    assert gradcheck(moments, (x, (1.3 * inverse).requires_grad_()))


def test_halves_and_parts():
    """Both halves estimate the same kernel: their mean is that of all; parts are as they were."""
    phi, x = columns(draw(6, 2)), draw(5, 2)
    values = phi.values(x)
    halves = [(phi.select(index).values(x), v) for index, v in phi.halves()]
    torch.testing.assert_close(sum((h * v) @ h.mT for h, v in halves) / 2, values @ values.mT)
    index, _ = phi.halves()[1]
    torch.testing.assert_close(phi.select(index).values(x), values[:, index])
    assert len(columns(draw(1, 2)).halves()[1][0]) == 0


def test_which_columns_are_the_same():
    z = draw(4, 2)
    assert columns(z).same(columns(z, lengthscale=1 + 1e-12))
    for other in (columns(z + 1), columns(z, True), columns(z, a=3.0), columns(z, lengthscale=2.0)):
        assert not columns(z).same(other)
    assert not columns(z).same(TrigColumns.of(z))


def test_statistics_in_a_file():
    phi, x, y = columns(draw(5, 2)), draw(30, 2), draw(30, 2, seed=1)
    statistics = FieldStatistics.of(read(x, y, 2, Options()), phi)
    restored = FieldStatistics.from_plain(statistics.plain())
    assert restored.phi.same(phi)
    torch.testing.assert_close(restored.phi.values(x), phi.values(x))


# In models


@pytest.mark.parametrize("center", [None, [0.3, -0.2]])
def test_an_exact_gp_step_equals_dense_algebra(center):
    """Evidence and gradient against the Gaussian density of features that are written out."""
    x, y = draw(60, 2), draw(60, seed=1)
    rule = gp_orff.Templates(15, a=A, center=center)
    kernel = gp_orff.ORFFKernel(rbf(2), rule)
    model = scalar_gp(x, y, kernel, noise=0.1)
    found = evidence(model)
    phi = features_of(kernel, x if center is None else x - x.new_tensor(center))
    dense = oracles.log_density(phi @ phi.mT + dense_noise(model, 60), y - model.mean_module(x))
    assert found.item() == pytest.approx(dense.item(), rel=1e-9)
    torch.testing.assert_close(gradient(found, model), gradient(dense, model), rtol=1e-8, atol=1e-8)


@torch.no_grad()
@pytest.mark.parametrize("name", ["multitask", "separable", "sum", "batch", "active_dims"])
def test_kernels(name):
    """Against the exact kernel with 4000 templates; 0.1 is 3 standard errors or more."""
    exact = {
        "multitask": lambda: randomise_tasks(MultitaskKernel(rbf(2), num_tasks=2, rank=1).double()),
        "separable": lambda: gp_orff.SeparableKernel(rbf(2), draw(2, 2)),
        "sum": lambda: ScaleKernel(rbf(2)) + rbf(2) + ConstantKernel(),
        "batch": lambda: rbf(2, batch_shape=torch.Size([3])),
        "active_dims": lambda: RBFKernel(active_dims=(0, 2)),
    }[name]().double()
    x = 0.5 * draw(5, 3 if name == "active_dims" else 2)
    kernel = gp_orff.ORFFKernel(exact, gp_orff.Templates(4000, a=A), num_dims=x.shape[-1])
    found, expected = kernel(x).to_dense(), exact(x).to_dense()
    assert found.shape == expected.shape
    assert (found - expected).abs().max() < 0.1 * expected.abs().max()
    assert len(kernel.accuracy()) == (3 if name == "sum" else 1)


def test_single_precision():
    """Computed in float64, in the dtype of the inputs."""
    kernel = gp_orff.ORFFKernel(RBFKernel(ard_num_dims=2), gp_orff.Templates(50, a=A))
    x = draw(5, 2).float()
    found, double = kernel(x).to_dense(), kernel.double()(x.double()).to_dense()
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), double, rtol=1e-5, atol=1e-5)


def test_ridge_equals_dense_algebra():
    x, y = draw(50, 2), draw(50, 1, seed=1)
    rule = gp_orff.Templates(20, a=A)
    ridge = ORFFRidge(rbf(2), rule, alpha=0.3).fit(x.numpy(), y.numpy())
    with torch.no_grad():
        phi = features_of(gp_orff.ORFFKernel(rbf(2), rule), x)
        expected = phi @ torch.linalg.solve(phi.mT @ phi + 0.3 * torch.eye(20), phi.mT @ y)
    np.testing.assert_allclose(ridge.predict(x.numpy()), expected.numpy(), atol=1e-9)


@pytest.mark.filterwarnings("ignore::gp_orff.FeatureWarning")  # few features, as any
def test_a_vector_field_gp_and_its_file(tmp_path):
    """The posterior mean by dense algebra, before and after a file."""
    x, y, xs = draw(80, 2), draw(80, 2, seed=1), draw(7, 2, seed=2)
    exact = gp_orff.SeparableKernel(rbf(2), torch.eye(2)).double()
    model = gp_orff.VectorFieldGP(exact, frequencies=gp_orff.Templates(20, a=A), mean=ZeroMean())
    model.likelihood.noise = 0.5
    model.condition(x, y)
    found = model.posterior().mean(xs)
    kernel = gp_orff.ORFFKernel(rbf(2), gp_orff.Templates(20, a=A))
    with torch.no_grad():
        phi, at = features_of(kernel, x), features_of(kernel, xs)
        scale = exact(x[:1]).to_dense()[0, 0]
        solved = torch.linalg.solve(scale * phi.mT @ phi + 0.5 * torch.eye(20), phi.mT @ y)
    torch.testing.assert_close(found, scale * at @ solved, rtol=1e-8, atol=1e-8)
    model.save(tmp_path / "model.pt")
    loaded = gp_orff.VectorFieldGP.load(tmp_path / "model.pt")
    torch.testing.assert_close(loaded.posterior().mean(xs), found)


def test_the_variance_that_callers_ask_for():
    """The mean of the kernel at the center: 1, where the mean over space is 0."""
    kernel = rbf(2)
    features = expand(kernel, drawn(kernel, gp_orff.Templates(30, a=A), 2), 2)
    assert features.mean_variance().item() == pytest.approx(1.0)


# Any function and any sampler, eqs. (19) to (23)


def squared_distance(s, r, t):
    return r**2 - 2 * s + t**2


def epanechnikov(s, r, t):
    return (1 - squared_distance(s, r, t)).clamp_min(0)


def ratio(s, r, t):
    """Not a function of the distance."""
    return (1 + s) / (1 + r + t)


FUNCTIONS = {"epanechnikov": epanechnikov, "ratio": ratio}
SAMPLERS = {
    "uniform": (lambda u: 4 * u - 2, scipy.stats.uniform(-2, 4)),
    "heavy tails": (scipy.stats.t(3).ppf, scipy.stats.t(3)),
}


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("function", FUNCTIONS)
@torch.no_grad()
def test_functions_of_ones_own_against_the_integral_over_templates(function, sampler):
    """(22) by scipy's quadrature, within 5 standard errors of 50 seeds of 200 templates."""
    kappa, (draw_templates, law) = FUNCTIONS[function], SAMPLERS[sampler]
    exact, center = ScaleKernel(rbf(1)).double(), 3.0
    exact.outputscale = 1.5
    x = torch.tensor([[2.2], [3.1], [3.5]], dtype=torch.float64)
    scaled = ((x - center) / exact.base_kernel.lengthscale).squeeze().tolist()

    def value(i, j):
        def integrand(z):
            both = (
                kappa(*map(torch.tensor, (one * z, abs(one), abs(z)))).item()
                for one in (scaled[i], scaled[j])
            )
            return math.prod(both) * law.pdf(z)

        edges = sorted({-2.0, 2.0, *(s + e for s in scaled for e in (-1.0, 1.0))})
        lower, upper = max(law.ppf(1e-9), -60.0), min(law.ppf(1 - 1e-9), 60.0)
        cuts = [lower, *(e for e in edges if lower < e < upper), upper]
        parts = itertools.pairwise(cuts)
        return 1.5 * sum(scipy.integrate.quad(integrand, *part)[0] for part in parts)

    expected = torch.tensor([[value(i, j) for j in range(3)] for i in range(3)])
    rules = [
        gp_orff.Templates(200, function=kappa, sampler=draw_templates, center=[center], seed=seed)
        for seed in range(50)
    ]
    found = torch.stack([gp_orff.ORFFKernel(exact, rule)(x).to_dense() for rule in rules])
    error, noise = (found.mean(0) - expected).abs(), found.std(0) / 50**0.5
    assert (error < 5 * noise + 1e-5).all()  # and what the integral omits
    assert (noise < 0.05 * expected.max()).all()  # so that it can fail


def test_a_bump_as_a_function_of_ones_own():
    """(24), with the templates of a normal law, is the kernel of `weighted=True` up to a factor."""
    b = A * A - 2 * A
    rule = gp_orff.Templates(
        50_000,
        function=lambda s, r, t: (-A / 2 * squared_distance(s, r, t)).exp(),
        sampler=scipy.stats.norm(scale=b**-0.5).ppf,
    )
    x, kernel = 0.5 * draw(5, 1), rbf(1)
    with torch.no_grad():
        found = gp_orff.ORFFKernel(kernel, rule)(x).to_dense() * (1 - 2 / A) ** -0.5
        scaled = x / kernel.lengthscale
        squares = scaled.square().sum(-1)
        share = -A / 2 * b / (2 * A + b) * (squares[:, None] + squares)
        expected = share.exp() * kernel(x).to_dense()
    # the standard error of the mean of 50 000 products below 1.5
    torch.testing.assert_close(found, expected, rtol=0, atol=5 * 1.5 / 50_000**0.5)


def test_gradients_of_functions_of_ones_own():
    """By points and lengthscales, against differences; at the center too, where ‖x̃‖ has a kink."""
    rule = gp_orff.Templates(30, function=epanechnikov, sampler=lambda u: 4 * u - 2)
    kernel = gp_orff.ORFFKernel(rbf(2), rule, num_dims=2).double()
    x = torch.cat([torch.zeros(1, 2), 0.5 * draw(4, 2)]).double()

    def gram(x, lengthscale):
        kernel.base_kernel.lengthscale = lengthscale
        (term,) = gp_orff.kernels.tree.terms(kernel.base_kernel)
        phi, variances = kernel.frequencies[0].columns(term, 2)
        phi = phi.with_tensors(1 / lengthscale)
        return (phi.values(x) * variances.mT) @ phi.values(x).mT

    lengthscale = torch.tensor([[0.8, 1.3]], dtype=torch.float64, requires_grad=True)
    assert gradcheck(gram, (x.requires_grad_(), lengthscale))


@pytest.mark.parametrize("function", [epanechnikov, lambda s, r, t: epanechnikov(s, r, t)])
def test_statistics_with_a_function_have_no_bytes(function):
    """Bytes contain no code; the error comes before a file is written, not when it is read."""
    rule = gp_orff.Templates(20, function=function, sampler=lambda u: 4 * u - 2)
    x, y = 0.7 * draw(30, 1), draw(30, 1, seed=1)
    model = gp_orff.VectorFieldGP(rbf(1), frequencies=rule).condition(x, y)
    for write in (model.statistics.to_bytes, lambda: pickle.dumps(model.statistics)):
        with pytest.raises(ValueError, match="of plain values, got columns of a rule with a f"):
            write()


def test_regression_and_products_with_functions_of_ones_own():
    """The posterior mean by dense algebra."""
    rule = gp_orff.Templates(40, function=epanechnikov, sampler=lambda u: 4 * u - 2)
    x, y = 0.7 * draw(60, 2), draw(60, 1, seed=1)
    ridge = ORFFRidge(rbf(2), rule, alpha=0.3).fit(x.numpy(), y.numpy())
    z = ridge.kernel_.frequencies[0].templates
    scaled = x / rbf(2).lengthscale.detach()
    distances = (scaled[:, None] - z).square().sum(-1)
    phi = (1 - distances).clamp_min(0) / 40**0.5
    expected = phi @ torch.linalg.solve(phi.mT @ phi + 0.3 * torch.eye(40).double(), phi.mT @ y)
    np.testing.assert_allclose(ridge.predict(x.numpy()), expected.numpy(), atol=1e-9)
    full = expand(ridge.kernel_.base_kernel, ridge.kernel_.frequencies, 2)
    at_zero = (1 - z.square().sum(-1)).clamp_min(0).square().mean()
    assert full.mean_variance().item() == pytest.approx(at_zero.item())


@pytest.mark.filterwarnings("ignore::gp_orff.FeatureWarning")  # few features, as any
def test_a_function_goes_into_no_file(tmp_path):
    rule = gp_orff.Templates(20, function=epanechnikov, sampler=lambda u: 4 * u - 2)
    exact = gp_orff.SeparableKernel(rbf(2), torch.eye(2)).double()
    model = gp_orff.VectorFieldGP(exact, frequencies=rule, mean=ZeroMean())
    model.condition(draw(80, 2), draw(80, 2, seed=1))
    with pytest.raises(ValueError, match="a function that cannot be saved"):
        model.save(tmp_path / "model.pt")


# Bad input


def own(function, sampler):
    return gp_orff.ORFFKernel(rbf(2), gp_orff.Templates(8, function=function, sampler=sampler))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: gp_orff.Templates(8, a=2), "a > 2, got 2"),
        (lambda: gp_orff.Templates(8, a=math.inf), "a > 2, got inf"),
        (lambda: gp_orff.Templates(8, a="3"), "a > 2, got '3'"),
        (lambda: gp_orff.Templates(8), "a > 2, got None"),
        (lambda: gp_orff.Templates(8, function=epanechnikov), "a function and a sampler together"),
        (lambda: gp_orff.Templates(8, sampler=lambda u: u), "a function and a sampler together"),
        (
            lambda: gp_orff.Templates(8, a=3, function=epanechnikov, sampler=lambda u: u),
            "without a and weighted",
        ),
        (lambda: own(lambda s, r, t: t, lambda u: u), r"finite values \(N, n\), got shape \(8,\)"),
        (lambda: own(lambda s, r, t: s / 0, lambda u: u), "got shape .* 8 that are not finite"),
        (
            lambda: own(epanechnikov, lambda u: u[:3]),
            r"finite templates \(8, 2\).*got shape \(3, 2\)",
        ),
        (lambda: own(epanechnikov, lambda u: u / 0), "16 that are not finite"),
        (lambda: gp_orff.Templates(0, a=3), "positive integer, got 0"),
        (lambda: gp_orff.Templates(2.5, a=3), "positive integer, got 2.5"),
        (lambda: gp_orff.Templates(8, a=3, seed=-1), "seed"),
        (lambda: gp_orff.Templates(8, a=3, center=[math.nan]), "finite numbers as center"),
        (
            lambda: gp_orff.ORFFKernel(rbf(2), gp_orff.Templates(8, a=3, center=[1.0])),
            "center of 2 numbers.*got 1",
        ),
    ],
)
def test_bad_input(call, words):
    with pytest.raises(ValueError, match=words):
        call()


@pytest.mark.parametrize(
    ("kernel", "words"),
    [
        (lambda: MaternKernel(), "RBFKernel in every term, got spectra StudentT; use"),
        (lambda: rbf(2) * rbf(2), "got spectra Gaussian x Gaussian"),
        (lambda: gp_orff.CurlFreeKernel(num_dims=2), "scalar or separable.*QuasiMonteCarlo"),
    ],
)
def test_other_kernels(kernel, words):
    with pytest.raises(NotImplementedError, match=words):
        gp_orff.ORFFKernel(kernel(), gp_orff.Templates(8, a=3), num_dims=2)


def test_derivatives_are_refused():
    """Bumps have no frequency: the message names the way out."""
    exact = gp_orff.SeparableKernel(rbf(2), torch.eye(2)).double()
    model = gp_orff.VectorFieldGP(exact, frequencies=gp_orff.Templates(20, a=A))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", gp_orff.FeatureWarning)
        model.condition(0.3 * draw(80, 2), draw(80, 2, seed=1))
        with pytest.raises(NotImplementedError, match="QuasiMonteCarlo"):
            model.posterior().mean(draw(3, 2), gp_orff.Divergence())


def test_warnings_of_too_many_inputs_and_distant_inputs():
    """Where the standard error of k̃(x, x) exceeds the kernel, at the center or at the inputs."""
    a, n = 2.5, 100
    fits = int(2 * math.log1p(n) / math.log(a * a / (a * a - 4)))
    gp_orff.ORFFKernel(RBFKernel(), gp_orff.Templates(n, a=a), num_dims=fits)
    with pytest.warns(UserWarning, match="few inputs.*use gp_orff.QuasiMonteCarlo"):
        gp_orff.ORFFKernel(RBFKernel(), gp_orff.Templates(n, a=a), num_dims=fits + 1)
    kernel = gp_orff.ORFFKernel(rbf(1), gp_orff.Templates(n, a=a))
    x = torch.linspace(-0.5, 0.5, 20, dtype=torch.float64).unsqueeze(-1)
    kernel(9 * torch.tensor([[-1.0], [1.0]]).double()).to_dense()  # corners of a box around it
    with pytest.warns(UserWarning, match="or half of the inputs are farther away"):
        kernel(18 * x).to_dense()
    excess = math.log1p(n) - 0.5 * math.log(a * a / (a * a - 4))
    edge = 0.7 * math.sqrt(excess / (4 * (a - 2) / (a + 2)))
    kernel(x + 0.99 * edge).to_dense()
    with pytest.warns(UserWarning, match="pass the mean of the inputs as center="):
        kernel(x + 1.01 * edge).to_dense()
    centered = gp_orff.Templates(n, a=a, center=[50.0])
    gp_orff.ORFFKernel(rbf(1), centered)(x + 50).to_dense()
