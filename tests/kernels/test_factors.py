"""Cholesky factors and inverses by SciPy's LAPACK, compared with those of PyTorch."""

import pytest
import torch
from linear_operator.utils.errors import NanError
from linear_operator.utils.warnings import NumericalWarning
from torch.autograd import forward_ad

from gp_orff.kernels import base
from gp_orff.kernels.base import BLOCK, cholesky, cholesky_inverse, mirror
from tests.support.fields import draw


@pytest.fixture(autouse=True, params=[True, False], ids=["SciPy", "PyTorch"])
def library(request, monkeypatch):
    """SciPy replaces MKL on processors on which that is slow."""
    monkeypatch.setattr(base, "mkl_is_slow", lambda: request.param)
    return request.param


def covariance(*shape):
    root = draw(*shape)
    return root @ root.mT + torch.eye(shape[-1]).double()


@pytest.mark.parametrize("shape", [(1, 1), (7, 7), (BLOCK + 5, BLOCK + 5), (3, 40, 40), (90, 4, 4)])
def test_factors_and_inverses(shape, library, monkeypatch):
    a, calls = covariance(*shape), []
    dpotri = base.lapack.dpotri
    monkeypatch.setattr(base.lapack, "dpotri", lambda f: calls.append(1) or dpotri(f))
    factor, expected = cholesky(a.tril()), torch.linalg.cholesky(a)  # one triangle is read
    torch.testing.assert_close(factor, expected)
    assert not factor.triu(1).any()
    inverse = cholesky_inverse(factor)
    torch.testing.assert_close(inverse, torch.cholesky_inverse(expected))
    torch.testing.assert_close(inverse, inverse.mT)
    few = a.shape[:-2].numel() < 90
    assert len(calls) == (a.shape[:-2].numel() if library and few else 0)


def test_a_matrix_with_any_strides():
    a = covariance(9, 9)
    wide = torch.zeros(9, 18).double()
    wide[:, ::2] = a
    torch.testing.assert_close(cholesky(wide[:, ::2]), torch.linalg.cholesky(a))
    torch.testing.assert_close(cholesky(a.mT), torch.linalg.cholesky(a))


def test_single_precision_and_derivatives_stay_with_torch():
    a = covariance(6, 6)
    assert cholesky(a.float()).dtype == torch.float32
    a.requires_grad_()
    assert torch.autograd.gradcheck(lambda a: cholesky(a @ a.mT), (a,))


@pytest.mark.filterwarnings("ignore:.*jit.trace. is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_operations_that_are_recorded_stay_with_torch():
    a, tangent = covariance(6, 6), covariance(6, 6)
    for function, expected in (
        (cholesky, torch.linalg.cholesky),
        (cholesky_inverse, torch.cholesky_inverse),
    ):
        matrix = a if function is cholesky else torch.linalg.cholesky(a)
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(matrix, tangent)
            found, wanted = (forward_ad.unpack_dual(f(dual)).tangent for f in (function, expected))
        torch.testing.assert_close(found, wanted)
        traced = torch.jit.trace(function, (matrix,), check_trace=False)
        torch.testing.assert_close(traced(4 * matrix), expected(4 * matrix))


def test_an_inverse_of_a_singular_factor_is_an_error():
    with pytest.raises(torch.linalg.LinAlgError):
        cholesky_inverse(torch.tensor([[1.0, 0.0], [1.0, 0.0]]).double())


@pytest.mark.parametrize("place", [(3, 3), (5, 2)])
def test_nan_is_an_error(place):
    a = covariance(6, 6)
    a[place] = float("nan")
    with pytest.raises(NanError):
        cholesky(a)


def test_a_nugget_in_the_units_of_the_matrix():
    root = 1e10 * draw(6, 2)
    with pytest.warns(NumericalWarning, match="jitter"):
        factor = cholesky(root @ root.mT)
    largest = (root @ root.mT).diagonal().max()
    difference = factor @ factor.mT - root @ root.mT
    assert 1e-9 < difference.diagonal().max() / largest < 1e-5
    # with a unit of one, no nugget is large enough for such a matrix
    with pytest.warns(NumericalWarning), pytest.raises(Exception, match="not positive"):
        cholesky(root @ root.mT - 1e18 * torch.eye(6).double(), unit=1.0)


def test_the_triangle_below_the_diagonal_is_copied():
    lower = draw(2, BLOCK + 3, BLOCK + 3)
    expected = lower.tril() + lower.tril(-1).mT
    torch.testing.assert_close(mirror(lower), expected, rtol=0, atol=0)


@pytest.mark.parametrize("mkl", [True, False])
@pytest.mark.parametrize("vendor", ["GenuineIntel", "AuthenticAMD"])
@pytest.mark.parametrize("linux", [True, False])
def test_the_processor_decides(monkeypatch, mkl, vendor, linux):
    def read_text(path):
        assert str(path) == "/proc/cpuinfo"
        if not linux:
            raise FileNotFoundError
        return f"vendor_id : {vendor}"

    monkeypatch.undo()  # of the fixture
    monkeypatch.setattr("pathlib.Path.read_text", read_text)
    monkeypatch.setattr("platform.processor", lambda: f"Family 6, {vendor}")
    monkeypatch.setattr("torch.backends.mkl.is_available", lambda: mkl)
    assert base.mkl_is_slow.__wrapped__() == (mkl and vendor == "AuthenticAMD")
