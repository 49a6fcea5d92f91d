"""Dot-product kernels and their features, against quadratures, monomials and scikit-learn."""

import math
from fractions import Fraction

import numpy as np
import pytest
import scipy.special
import torch
from gpytorch.kernels import LinearKernel, PolynomialKernel
from sklearn.metrics.pairwise import polynomial_kernel
from torch.autograd import gradcheck

import gp_orff
from gp_orff.kernels.dot_product.legendre import (
    Legendre,
    legendre_coefficients,
    log_num_harmonics,
)
from tests.fields import draw

DotProductKernel = gp_orff.DotProductKernel
KERNELS = {  # of d inputs
    "exponential": lambda d: DotProductKernel(exact([1 / math.factorial(n) for n in range(6)])),
    "even": lambda d: DotProductKernel.from_taylor(exact([0.3, 0.0, 0.0, 0.0, 0.7])),
    "legendre": lambda d: DotProductKernel.from_legendre(exact([0.2, 0.5, 0.0, 0.3]), d),
    "projections": lambda d: DotProductKernel.from_projections(exact([0.1, 1.0, 2.0, 3.0]), d),
    "linear": lambda d: LinearKernel(ard_num_dims=d),
    "polynomial": lambda d: PolynomialKernel(power=3),
}


def exact(values):
    """In float64 from the start."""
    return torch.tensor(values, dtype=torch.float64)


def kernel_of(name, num_dims):
    """In float64, with hyperparameters away from one."""
    kernel = KERNELS[name](num_dims).double()
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
