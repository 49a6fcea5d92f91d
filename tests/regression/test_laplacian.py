"""The penalty fᵀMf, compared with direct sums, and ΦᵀMΦ, compared with the dense Φ."""

import itertools

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from gpytorch.kernels import MultitaskKernel, RBFKernel

import gp_orff
from gp_orff.features.assemble import draw, expand
from gp_orff.features.expansion import FeatureExpansion, KroneckerExpansion
from gp_orff.regression.laplacian import (
    check_laplacian,
    column_penalty,
    graph_laplacian,
    penalty,
    scaled_column_penalty,
    view_disagreement,
)

POINTS, TIGHT = 40, 1e-12
rng = np.random.default_rng


def circle(num_points, noise=0.0):
    angle = 2 * np.pi * np.arange(num_points) / num_points
    points = np.stack([np.cos(angle), np.sin(angle)], axis=1)
    return points + noise * rng(0).standard_normal(points.shape)


def views(root):
    base = RBFKernel(active_dims=[0] if root[0] else [1])
    return gp_orff.SeparableKernel(base, root=torch.tensor([[float(v)] for v in root]))


KERNELS = {
    "scalar": RBFKernel,
    "curl-free": lambda: gp_orff.CurlFreeKernel(num_dims=2),
    "separable": lambda: MultitaskKernel(RBFKernel(), num_tasks=3, rank=2),
    "two terms": lambda: gp_orff.HelmholtzKernel(num_dims=2),
    "views": lambda: views([1, 0]) + views([0, 1]),
}
RULES = {
    "random": gp_orff.MonteCarlo(20, seed=0),
    "grid": gp_orff.Grid(domain=((-2.0, 2.0),) * 2, max_features=120),
}


@pytest.fixture(params=itertools.product(KERNELS, RULES), ids="-".join)
def problem(request):
    """An expansion, points, and Φ written out."""
    kernel, rule = KERNELS[request.param[0]]().double(), RULES[request.param[1]]
    x = torch.from_numpy(circle(POINTS, noise=0.1))
    expansion = expand(kernel, draw(kernel, rule, 2), 2)
    return expansion, x, expansion.features(x).detach().numpy()


def random_laplacian(size, sparse):
    root = sp.random_array((size, size), density=0.1, rng=rng(1))
    matrix = root @ root.T
    return sp.csr_array(matrix) if sparse else matrix.toarray()


@pytest.mark.slow
@pytest.mark.parametrize("sparse", [True, False])
@pytest.mark.parametrize("of_outputs", [True, False])
def test_the_penalty_is_that_of_the_dense_features(problem, sparse, of_outputs):
    expansion, x, phi = problem
    p = expansion.num_outputs
    matrix = random_laplacian(POINTS * p if of_outputs else POINTS, sparse)
    full = matrix if of_outputs else sp.kron(matrix, sp.eye_array(p)).toarray()
    found, expected = penalty(expansion, x, matrix).numpy(), phi.T @ full @ phi
    assert abs(found - expected).max() <= TIGHT * abs(expected).max()
    assert abs(found - found.T).max() <= 1e-14 * abs(found).max()


def test_blocks_of_features_change_nothing(problem, monkeypatch):
    expansion, x, _ = problem
    matrices = [random_laplacian(POINTS * k, True) for k in {1, expansion.num_outputs}]
    whole = [penalty(expansion, x, matrix) for matrix in matrices]
    monkeypatch.setattr("gp_orff.regression.laplacian._BLOCK_BYTES", 7 * 8 * POINTS)
    for matrix, expected in zip(matrices, whole, strict=True):
        torch.testing.assert_close(penalty(expansion, x, matrix), expected, rtol=TIGHT, atol=1e-12)


def test_separable_kernels_have_a_kronecker_product():
    kernel = KERNELS["separable"]().double()
    expansion = expand(kernel, draw(kernel, RULES["random"], 2), 2)
    assert isinstance(expansion, KroneckerExpansion)
    x, matrix = torch.from_numpy(circle(POINTS)), random_laplacian(POINTS, True)
    small = scaled_column_penalty(expansion, x, matrix)
    mixing = expansion.mixing.detach().numpy()
    phi = expansion.features(x).detach().numpy()
    full = phi.T @ sp.kron(matrix, sp.eye_array(3)) @ phi
    assert abs(np.kron(small, mixing.T @ mixing) - full).max() <= TIGHT * abs(full).max()
    columns = expansion.phi.values(x).detach().numpy()
    found = column_penalty(expansion.phi, x, matrix).numpy()
    expected = columns.T @ matrix @ columns
    assert abs(found - expected).max() <= TIGHT * abs(expected).max()


def test_features_that_share_columns_are_among_the_cases():
    kernel = KERNELS["two terms"]().double()
    expansion = expand(kernel, draw(kernel, RULES["grid"], 2), 2)
    assert isinstance(expansion, FeatureExpansion)
    assert expansion.num_features > expansion.num_columns


@pytest.mark.parametrize("n_neighbors", [1, 4, 500])
def test_a_graph_written_out(n_neighbors):
    """Weights by a loop over all pairs."""
    x = rng(0).standard_normal((30, 3))
    distance = np.linalg.norm(x[:, None] - x, axis=-1)
    nearest = np.argsort(distance, axis=1)[:, 1 : n_neighbors + 1]  # the first is the point itself
    square = np.mean([distance[n, m] ** 2 for n in range(30) for m in nearest[n]])
    weights = np.zeros((30, 30))
    for n in range(30):
        for m in nearest[n]:
            weights[n, m] = weights[m, n] = np.exp(-(distance[n, m] ** 2) / square)
    slope = 0.5 * (weights * distance**2).sum()
    size = np.mean(((x - x.mean(0)) ** 2).sum(1))
    expected = (np.diag(weights.sum(1)) - weights) * size / slope
    found = graph_laplacian(torch.from_numpy(x), n_neighbors)
    assert sp.issparse(found)
    assert found.dtype == np.float64
    assert abs(found.toarray() - expected).max() < 1e-12 * abs(expected).max()
    check_laplacian(found, 30, 2)


@pytest.mark.parametrize("jitter", [1e-12, 1e-9, 1e-6])
@pytest.mark.parametrize("seed", range(5))
def test_places_that_are_repeated_but_for_rounding(jitter, seed):
    """M has a positive diagonal, and ½ Σ_nm W_nm |x_n − x_m|², which cannot cancel, is the size."""
    places = np.repeat(rng(seed).uniform(size=(60, 2)), 25, axis=0)
    x = np.concatenate([places, rng(seed + 5).uniform(size=(2, 2))])
    x = x + jitter * rng(seed).standard_normal(x.shape)
    found = graph_laplacian(x)
    off = sp.coo_array(found - sp.diags_array(found.diagonal()))
    slope = -off.data @ ((x[off.row] - x[off.col]) ** 2).sum(1) / 2
    assert (found.diagonal() >= 0).all()
    assert slope == pytest.approx(np.mean(((x - x.mean(0)) ** 2).sum(1)), rel=1e-3)


def test_units_do_not_matter():
    x = rng(0).standard_normal((200, 2))
    apart = graph_laplacian(x) - graph_laplacian(1e6 * x + 1e5)
    assert abs(apart).max() < 1e-6 * abs(graph_laplacian(x)).max()  # the shift costs ten digits


@pytest.mark.parametrize("n_neighbors", [2, 10])
def test_the_penalty_of_a_function_is_its_mean_square_slope_at_any_number_of_points(n_neighbors):
    """On the unit circle: sin 3t has the slope 3 cos 3t, of mean square 4.5; the size is 1.

    Differences along chords of m steps have relative errors of the order of (3·2πm/N)².
    """
    for num_points in (100, 1000, 10_000):
        angle = 2 * np.pi * np.arange(num_points) / num_points
        f = np.sin(3 * angle)
        energy = f @ graph_laplacian(circle(num_points), n_neighbors) @ f
        assert energy == pytest.approx(4.5, rel=(18.9 * n_neighbors / 2 / num_points) ** 2)


def test_random_points_of_a_square_have_the_penalty_of_their_density():
    """f = x₁ has half of the sum over both coordinates, which is the size, at any N.

    Halves differ by a random part of the slopes of some thousand edges, less than 10 %.
    """
    for num_points in (300, 3000):
        x = rng(0).random((num_points, 2))
        size = np.mean(((x - x.mean(0)) ** 2).sum(1))
        energy = x[:, 0] @ graph_laplacian(x) @ x[:, 0]
        assert energy == pytest.approx(size / 2, rel=0.1)


def test_copies_and_graphs_in_pieces():
    x = np.concatenate([circle(20), circle(20)[:3], 50 + circle(20)])
    matrix = graph_laplacian(x, 3)
    pieces = np.repeat([1.0, -2.0], [23, 20])
    assert np.isfinite(matrix.data).all()
    assert abs(matrix @ pieces).max() < 1e-12 * matrix.max()


def test_times_of_stations_are_the_mean_of_a_station():
    """Some places have many more copies than neighbours, others are single."""
    places = rng(0).random((12, 2))
    index = rng(1).permutation(np.repeat(np.arange(12), [30] * 8 + [1] * 4))
    f = rng(2).standard_normal(len(index))
    means = np.array([f[index == i].mean() for i in range(12)])
    expected = means @ graph_laplacian(places, 5) @ means
    assert f @ graph_laplacian(places[index], 5) @ f == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize(("num_views", "num_outputs"), [(2, 1), (3, 1), (2, 2), (3, 2)])
def test_disagreement_written_out(num_views, num_outputs):
    f = rng(0).standard_normal((5, num_views, num_outputs))
    pairs = itertools.combinations(range(num_views), 2)
    expected = sum(((f[:, i] - f[:, j]) ** 2).sum() for i, j in pairs)
    matrix = view_disagreement(5, num_views, num_outputs)
    assert sp.issparse(matrix)
    assert f.ravel() @ matrix @ f.ravel() == pytest.approx(expected, rel=1e-12)
    check_laplacian(matrix, 5, num_views * num_outputs)


def bilaplacian(num_points):
    """Positive, and not dominated by its diagonal."""
    matrix = graph_laplacian(rng(0).random((num_points, 2)), 5)
    return sp.csr_array(matrix @ matrix)


POSITIVE = {
    "zero": lambda: sp.csr_array((POINTS, POINTS)),
    "a tensor": lambda: torch.eye(POINTS),
    "integers": lambda: sp.eye_array(POINTS, dtype=int),
    "all ones": lambda: np.ones((POINTS, POINTS)),
    "bilaplacian": lambda: bilaplacian(POINTS),
    "dense bilaplacian": lambda: bilaplacian(POINTS).toarray(),
    "rounded": lambda: bilaplacian(POINTS).toarray() * (1 + 1e-14 * rng(0).random(POINTS)),
    "indefinite to rounding": lambda: bilaplacian(POINTS) - 1e-12 * sp.eye_array(POINTS),
}


@pytest.mark.parametrize("name", POSITIVE)
def test_positive_matrices_pass(name):
    given = POSITIVE[name]()
    found = check_laplacian(given, POINTS, 2)
    assert found.dtype == np.float64
    assert sp.issparse(found) == sp.issparse(given)
    dense = found.toarray() if sp.issparse(found) else found
    before = given.toarray() if sp.issparse(given) else np.asarray(given)
    assert np.array_equal(dense, dense.T)
    np.testing.assert_allclose(dense, before, rtol=1e-13, atol=0)


def test_the_smallest_eigenvalue_of_a_large_sparse_matrix_is_found():
    matrix = bilaplacian(5000)
    assert check_laplacian(matrix, 5000, 1).nnz == matrix.nnz
    lowest = matrix.max() * 1e-4 * sp.eye_array(5000)
    with pytest.raises(ValueError, match="negative eigenvalue"):
        check_laplacian(matrix - lowest, 5000, 1)


def asymmetric():
    matrix = np.eye(POINTS)
    matrix[0, 1] = 0.5
    return matrix


def with_nan(sparse):
    matrix = np.eye(POINTS)
    matrix[0, 0] = np.nan
    return sp.csr_array(matrix) if sparse else matrix


INVALID = {
    "asymmetric": (asymmetric, r"symmetric matrix, got M and Mᵀ that differ by 0\.5; pass"),
    "asymmetric sparse": (lambda: sp.csr_array(asymmetric()), "symmetric matrix"),
    "negative": (lambda: -graph_laplacian(circle(POINTS)), "got one with a negative eigenvalue"),
    "adjacency": (lambda: 1 - np.eye(POINTS), "got one with a negative eigenvalue; pass diag"),
    "slightly negative": (
        lambda: bilaplacian(POINTS) - 0.01 * sp.eye_array(POINTS),
        "negative eigenvalue",
    ),
    "NaN": (lambda: with_nan(False), "finite entries, got 1 that are NaN or infinite"),
    "sparse NaN": (lambda: with_nan(True), "finite entries, got 1"),
    "too small": (lambda: np.eye(POINTS - 1), r"of shape \(40, 40\) or \(80, 80\), got \(39, 39\)"),
    "not square": (lambda: np.ones((POINTS, 2 * POINTS)), "expects a matrix with a row for each"),
    "complex": (lambda: 1j * np.eye(POINTS), "real matrix, .*complex128; convert it"),
    "sparse complex": (lambda: sp.csr_array(1j * np.eye(POINTS)), "real matrix"),
    "a vector": (lambda: np.ones(POINTS), r"real matrix, .*got ndarray of shape \(40,\)"),
    "a word": (lambda: "graph", "real matrix, .*got str"),
}


@pytest.mark.parametrize("name", INVALID)
def test_what_is_no_laplacian_raises(name):
    build, words = INVALID[name]
    with pytest.raises(ValueError, match=words):
        check_laplacian(build(), POINTS, 2)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: graph_laplacian(circle(20), 0), "positive integer, got 0"),
        (lambda: graph_laplacian(circle(20), 2.5), r"positive integer, got 2\.5"),
        (lambda: graph_laplacian(circle(1)), "two or more places, got 1 at 1"),
        (lambda: graph_laplacian(np.ones((9, 2))), "two or more places, got 9 at 1"),
        (lambda: graph_laplacian(np.full((9, 2), np.nan)), "finite points"),
        (lambda: view_disagreement(5, 1), "at least two views, got 1"),
        (
            lambda: view_disagreement(0, 2),
            "positive numbers of points and outputs, got num_points=0 and num_outputs=1",
        ),
        (lambda: view_disagreement(5, 2, 0), "positive numbers"),
    ],
)
def test_bad_arguments_raise(call, words):
    with pytest.raises(ValueError, match=words):
        call()
