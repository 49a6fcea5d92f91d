"""Φ(x) of `ORFFKernel`, as a matrix and as an operator, compared with sums over the frequencies."""

import unittest

import pytest
import torch
from gpytorch.kernels import RBFKernel, ScaleKernel
from linear_operator.operators import LinearOperator
from linear_operator.test.linear_operator_test_case import RectangularLinearOperatorTestCase
from torch.autograd import gradcheck

import gp_orff
from gp_orff.features import lattice
from tests.support.fields import draw, uniform
from tests.support.models import orff_of
from tests.support.registry import CASES, NO_GRID, RULES

pytestmark = [
    pytest.mark.filterwarnings("ignore::gp_orff.GridWarning"),  # small grids
    # linear_operator's own fall-backs
    pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning"),
    pytest.mark.filterwarnings("ignore::linear_operator.utils.warnings.PerformanceWarning"),
]

GRIDS = [name for name in CASES if name not in NO_GRID]
HERMITE = ("curl_free", "divergence_free_2d", "separable", "rank_one", "scaled", "active_dims")


def grid_of(case, max_features=120, **options):
    domain = ((-1.0, 3.0),) * case.num_dims
    return gp_orff.ORFFKernel(
        case.kernel,
        gp_orff.Grid(domain=domain, max_features=max_features, **options),
        num_dims=case.num_dims,
    ).double()


def gram(kernel, x, z):
    return kernel.features(x) @ kernel.features(z).mT


def close(found, expected):
    """Within 1e-12 of the largest number: sums of up to 10⁴ products of numbers of one size."""
    return (found - expected).abs().max() <= 1e-12 * max(1.0, expected.abs().max().item())


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", CASES)
def test_products_of_features_are_the_kernel(name, rule):
    """Against Σ_k w_k cos⟨ω_k, x − z⟩ A(ω_k), written out."""
    case = CASES[name]()
    kernel = gp_orff.ORFFKernel(case.kernel, RULES[rule](24, seed=1), num_dims=case.num_dims)
    kernel = kernel.double()
    x, z = draw(6, case.num_dims), draw(5, case.num_dims, seed=1)
    phi = kernel.features(x)
    assert phi.shape == (6 * case.num_outputs, kernel.num_features)
    assert phi.dtype == x.dtype
    assert close(gram(kernel, x, z), case.covariance(kernel.frequencies, x, z))
    assert close(gram(kernel, x, z), kernel(x, z).to_dense())
    assert close(gram(kernel, x, x), kernel(x).to_dense())


@pytest.mark.slow
@pytest.mark.parametrize("name", GRIDS)
def test_products_of_features_of_a_grid_lack_what_it_truncates(name):
    """Of different sets the kernel; of one set the kernel less one block for every point."""
    case = CASES[name]()
    kernel, p = grid_of(case), case.num_outputs
    x, z = uniform(6, case.num_dims), uniform(5, case.num_dims, seed=1)
    eye = torch.eye(5 * p, dtype=torch.float64)
    assert close(gram(kernel, x, z), kernel(x, z) @ eye)
    assert close(gram(kernel, x, z), kernel(x, z).to_dense())
    lacking = (kernel(x).to_dense() - gram(kernel, x, x)).detach()
    block = lacking[:p, :p]
    assert close(lacking, torch.kron(torch.eye(6).double(), block))
    assert torch.linalg.eigvalsh(block).min() > -1e-12
    exact = lacking + gram(kernel, x, x) - torch.kron(torch.eye(6).double(), block)
    plain = grid_of(case, diagonal_correction=False)
    assert close(plain(x).to_dense(), exact)


@pytest.mark.parametrize("name", HERMITE)
def test_products_of_many_features_are_the_exact_kernel(name):
    """Gauss–Hermite nodes are exact to rounding; a lattice of enough features to 1e-5."""
    case = CASES[name]()
    x, z = uniform(6, case.num_dims), uniform(5, case.num_dims, seed=1)
    exact = case.kernel(x, z).to_dense()
    hermite = gp_orff.ORFFKernel(case.kernel, gp_orff.GaussHermite(60), num_dims=case.num_dims)
    assert close(gram(hermite.double(), x, z), exact)
    grid = grid_of(case, max_features=6000)
    assert (gram(grid, x, z) - exact).abs().max() < 1e-5 * exact.abs().max().clamp_min(1)


@pytest.mark.parametrize("name", ["curl_free", "trained_root"])
def test_features_are_differentiable(name):
    """In the inputs and in all hyperparameters, by central differences."""
    case = CASES[name]()
    kernel = orff_of(case, 3)
    parameters = [own for own in kernel.parameters() if own.requires_grad]
    theta = draw(kernel.num_features, 2, seed=2)
    inputs = (draw(4, case.num_dims).requires_grad_(), *parameters)  # changed in place
    assert gradcheck(lambda x, *_: kernel.features(x) @ theta, inputs)
    assert gradcheck(lambda x, *_: kernel.feature_operator(x) @ theta, inputs)
    theta = draw(4 * case.num_outputs, 2, seed=3)
    assert gradcheck(lambda x, *_: kernel.feature_operator(x).mT @ theta, inputs)


def test_inputs_are_checked_as_for_covariances():
    kernel = grid_of(CASES["rank_one"]())
    for function in (kernel.features, kernel.feature_operator):
        with pytest.raises(ValueError, match="2 columns, got 3"):
            function(uniform(4, 3))
        with pytest.raises(TypeError, match=r"float64 hyperparameters.*got torch.float32"):
            function(uniform(4, 2).float())
        with pytest.raises(ValueError, match="got 1 points with NaN or infinite"):
            function(torch.tensor([[0.0, torch.nan]]).double())
        with pytest.raises(ValueError, match="at least one point"):
            function(uniform(0, 2))
        with pytest.raises(ValueError, match="domain"):
            function(uniform(4, 2) + 100)


def test_features_of_a_batch_are_those_of_its_kernels():
    potential = RBFKernel(batch_shape=torch.Size([3])).double()
    potential.lengthscale = torch.tensor([0.5, 1.0, 2.0]).double().view(3, 1, 1)
    field = gp_orff.CurlFreeKernel(potential, num_dims=2)
    root = torch.nn.Parameter(draw(3, 4, 2))
    separable = gp_orff.SeparableKernel(potential, root)
    for kernel, p in ((field, 2), (separable, 4)):
        orff = gp_orff.ORFFKernel(kernel, gp_orff.MonteCarlo(5), num_dims=2)
        for x in (uniform(6, 2), uniform(3, 6, 2)):
            phi, operator = orff.features(x), orff.feature_operator(x)
            assert phi.shape == operator.shape == (3, 6 * p, orff.num_features)
            theta = draw(3, orff.num_features, 2, seed=4)
            assert close(operator @ theta, phi @ theta)
            for i in range(3):
                alone = gp_orff.ORFFKernel(kernel[i], gp_orff.MonteCarlo(5), num_dims=2)
                assert close(phi[i], alone.features(x[i] if x.dim() > 2 else x))


@pytest.mark.parametrize("name", ["curl_free", "separable", "rank_one"])
def test_products_on_a_lattice_by_transforms(name, monkeypatch):
    """FINUFFT is asked for 1e-12 relative to the sum of the strengths."""
    monkeypatch.setattr(lattice, "_FEW", 0)
    kernel = grid_of(CASES[name]())
    x = uniform(50, 2)
    operator, phi = kernel.feature_operator(x), kernel.features(x)
    theta, v = draw(operator.shape[1], 3), draw(operator.shape[0], 3, seed=1)
    assert (operator @ theta - phi @ theta).abs().max() < 1e-9
    assert (operator.mT @ v - phi.mT @ v).abs().max() < 1e-9
    assert (operator @ theta[:, 0] - phi @ theta[:, 0]).abs().max() < 1e-9
    assert (operator.mT @ v[:, 0] - phi.mT @ v[:, 0]).abs().max() < 1e-9


def test_the_products_of_the_normal_equations_have_all_pairs_of_frequencies():
    """⟨ω_j, ω_k⟩, where Table 1 of Brault et al. 2016 has ‖ω_k‖² in P* P θ."""
    kernel = orff_of(CASES["curl_free"](), 4)
    x, theta = draw(1, 2), draw(8, seed=1)
    phi = kernel.feature_operator(x)
    directions = phi.expansion.directions  # √w_k ω_k, of every cosine, then of every sine
    phase = x @ phi.expansion.phi.omega.mT
    waves = torch.cat([phase.cos(), phase.sin()], dim=-1).squeeze(0)
    expected = waves * ((directions @ directions.mT) @ (waves * theta))
    assert close(phi.mT @ (phi @ theta), expected)
    printed = waves * (waves @ (theta * directions.square().sum(-1)))
    assert (expected - printed).abs().max() > 0.1


def leaf_operator(kernel, x, transposed=False):
    """In float32, of tensors that are leaves of the graph."""
    operator = kernel.float().feature_operator(x.float())
    parts = [part.detach().clone().requires_grad_() for part in operator.representation()]
    operator = operator.representation_tree()(*parts)
    return operator.mT if transposed else operator


def dense_of(operator):
    """Waves times directions, from the operator's own tensors, with a graph."""
    full = operator.expansion.general()
    x = operator.x - getattr(full.phi, "origin", 0.0)
    phase = x @ full.phi.omega.to(x).mT
    waves = torch.cat([phase.cos(), phase.sin()], dim=-1)[..., full.columns]
    dense = (waves.unsqueeze(-2) * full.directions.mT.unsqueeze(-3)).flatten(-3, -2)
    return dense.to(operator.x)


class FieldFeatures(RectangularLinearOperatorTestCase, unittest.TestCase):
    """linear_operator's suite: 4 points, 2 outputs and 10 features of a curl-free field."""

    seed = 0

    def create_linear_op(self):
        return leaf_operator(orff_of(CASES["curl_free"](), 5), draw(4, 2))

    def evaluate_linear_op(self, linear_op):
        return dense_of(linear_op)


class SpaceFeatures(FieldFeatures):
    """d − 1 features for each column."""

    def create_linear_op(self):
        return leaf_operator(orff_of(CASES["divergence_free_3d"](), 2), draw(4, 3))


class SumFeatures(FieldFeatures):
    """Three terms of different structure."""

    def create_linear_op(self):
        return leaf_operator(orff_of(CASES["field_separable_and_constant"](), 2), draw(3, 2))


class SeparableFeatures(FieldFeatures):
    """One feature for each column, of 3 outputs."""

    def create_linear_op(self):
        return leaf_operator(orff_of(CASES["rank_one"](), 4), draw(4, 2))


class LatticeFeatures(FieldFeatures):
    def create_linear_op(self):
        return leaf_operator(grid_of(CASES["curl_free"](), 14), uniform(4, 2))


class SeparableLatticeFeatures(FieldFeatures):
    def create_linear_op(self):
        return leaf_operator(grid_of(CASES["rank_one"](), 14), uniform(4, 2))


class BatchFeatures(FieldFeatures):
    def create_linear_op(self):
        root = torch.nn.Parameter(draw(3, 2, 2))
        kernel = ScaleKernel(RBFKernel(ard_num_dims=2, batch_shape=torch.Size([3])))
        kernel = gp_orff.SeparableKernel(kernel.double(), root).double()
        return leaf_operator(gp_orff.ORFFKernel(kernel, gp_orff.MonteCarlo(3)), draw(4, 2))


class TransposedFeatures(FieldFeatures):
    def create_linear_op(self):
        kernel = orff_of(CASES["curl_free"](), 5)
        return leaf_operator(kernel, draw(4, 2), transposed=True)

    def evaluate_linear_op(self, linear_op):
        return dense_of(linear_op.mT).mT


def test_an_operator_that_is_not_square_has_no_diagonal():
    operator = orff_of(CASES["curl_free"](), 5).feature_operator(draw(4, 2))
    assert isinstance(operator, LinearOperator)
    with pytest.raises(RuntimeError, match="square"):
        operator.diagonal()
