"""Equations 72 and 74 of Minh 2016 against direct formulas; the benefit of unlabelled points."""

import itertools

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from gpytorch.kernels import MultitaskKernel, RBFKernel, ScaleKernel

import gp_orff
from gp_orff.regression import ORFFRidge
from gp_orff.regression.laplacian import graph_laplacian, view_disagreement

POINTS, LABELLED, ALPHA, WEIGHT = 30, 12, 0.03, 0.7
rng = np.random.default_rng


def two_views(num_inputs, lengthscale):
    """A field of two outputs: one is a function of the first inputs, the other of the rest."""
    parts = []
    for view, root in enumerate([[[1.0], [0.0]], [[0.0], [1.0]]]):
        columns = tuple(range(view * num_inputs, (view + 1) * num_inputs))
        base = RBFKernel(active_dims=columns).double()
        base.lengthscale = lengthscale
        root = torch.tensor(root, dtype=torch.float64)
        parts.append(gp_orff.SeparableKernel(base, root=root))
    return parts[0] + parts[1]


KERNELS = {
    "scalar": (RBFKernel, 1),
    "curl-free": (lambda: gp_orff.CurlFreeKernel(num_dims=2), 2),
    "separable": (lambda: MultitaskKernel(RBFKernel(), num_tasks=3, rank=2), 3),
    "sum of views": (lambda: two_views(1, 0.8), 2),
    "sum of fields": (lambda: gp_orff.HelmholtzKernel(num_dims=2), 2),
}
LAPLACIANS = {  # of N points, and of N·p values
    "graph": lambda x, p: graph_laplacian(x, 4),
    "dense": lambda x, p: random_laplacian(len(x)),
    "coupled": lambda x, p: sp.csr_array(random_laplacian(len(x) * p)),
    "coupled dense": lambda x, p: random_laplacian(len(x) * p),
}
COMBINATIONS = {
    "none": lambda p: None,
    "mean": lambda p: np.full((1, p), 1 / p),
    "fewer": lambda p: rng(3).standard_normal((p - 1, p)),
    "more": lambda p: rng(3).standard_normal((p + 1, p)),
}


def random_laplacian(size):
    root = rng(1).standard_normal((size, size // 2))
    return root @ root.T / size


def problem(p, combination, columns=2):
    """Points, labels that are NaN where there are none, and C."""
    x = rng(0).uniform(-1, 1, (POINTS, columns))
    c = COMBINATIONS[combination](p)
    y = rng(2).standard_normal((POINTS, 2 if p == 1 else p if c is None else len(c)))
    y[rng(4).permutation(POINTS)[LABELLED:]] = np.nan
    return x, y, c


def solutions(phi, y, m, c):
    """f at all points by Equation 72 and by Equation 74, with l γ_I = WEIGHT and l γ_A = ALPHA."""
    p = len(phi) // len(y)
    labelled = np.flatnonzero(~np.isnan(y).any(1))
    c = np.eye(p) if c is None else c
    selection = np.eye(len(y))[:, labelled]  # I_{(u+l)×l}
    m = np.kron(m, np.eye(len(phi) // len(m)))
    inner = np.kron(selection @ selection.T, c.T @ c) + WEIGHT * m
    targets = y[labelled] if p == 1 else y[labelled].reshape(-1, 1)  # a scalar kernel: by columns
    right = np.kron(selection, c.T) @ targets
    gram = phi @ phi.T
    a = np.linalg.solve(inner @ gram + ALPHA * np.eye(len(gram)), right)
    h = np.linalg.solve(phi.T @ inner @ phi + ALPHA * np.eye(phi.shape[1]), phi.T @ right)
    return [f if p == 1 else f.reshape(len(y), p) for f in (gram @ a, phi @ h)]


CASES = [
    case
    for case in itertools.product(KERNELS, LAPLACIANS, COMBINATIONS)
    if case[0] != "scalar" or case[2] == "none"
]


@pytest.mark.slow
@pytest.mark.parametrize("num_frequencies", [8, 100])  # fewer features than values, and more
@pytest.mark.parametrize(("name", "laplacian", "combination"), CASES)
def test_it_solves_equations_72_and_74(name, laplacian, combination, num_frequencies):
    """Up to rounding: they differ by 10⁻¹¹ at most."""
    build, p = KERNELS[name]
    x, y, c = problem(p, combination)
    m = LAPLACIANS[laplacian](x, p)
    rule = gp_orff.MonteCarlo(num_frequencies, seed=0)
    model = ORFFRidge(build(), rule, ALPHA, laplacian_weight=WEIGHT)
    model.fit(x, y, laplacian=m, combination=c)
    phi = model.kernel_.features(torch.from_numpy(x)).numpy()
    dual, primal = solutions(phi, y, m.toarray() if sp.issparse(m) else m, c)
    assert abs(dual - primal).max() < 1e-8
    found = model.predict(x) if p == 1 else model.predict_views(x)
    assert abs(found - primal).max() < 1e-8
    combined = primal if c is None else primal @ c.T
    assert abs(model.predict(x) - combined).max() < 1e-8


def test_a_tensor_a_matrix_in_full_and_the_default_are_the_same_laplacian():
    x, y, _ = problem(2, "none")
    kernel, rule = gp_orff.CurlFreeKernel(num_dims=2), gp_orff.MonteCarlo(20, seed=0)
    small = graph_laplacian(x)
    given = [None, small.toarray(), torch.from_numpy(small.toarray()), sp.kron(small, np.eye(2))]
    found = [
        ORFFRidge(kernel, rule, ALPHA, laplacian_weight=WEIGHT).fit(x, y, laplacian=m).coef_
        for m in given
    ]
    for coefficients in found:
        np.testing.assert_allclose(coefficients, found[0], rtol=0, atol=1e-9)


def test_a_large_weight_makes_views_agree():
    x, y, c = problem(2, "mean")
    apart = []
    for weight in (0.0, 1e6):
        model = ORFFRidge(two_views(1, 0.8), alpha=ALPHA, laplacian_weight=weight)
        first, second = model.fit(x, y, view_disagreement(POINTS, 2), c).predict_views(x).T
        apart.append(abs(first - second).max())
    assert apart[1] < 1e-3 * apart[0]


def rmse(found, truth):
    """The root mean square error, by which Minh 2016 judges fields (Table 2)."""
    return np.sqrt(np.mean((found - truth) ** 2))


def front(num_points, seed):
    """Points of a meandering front, and the gradient there of a temperature that jumps across it.

    T = s(x₁) w tanh(u / |∇u| w) with u = x₂ − sin(kx₁) for a strength s and a width w.
    """
    wavenumber, width = 2 * np.pi / 0.8, 0.05
    line = torch.linspace(0, 1.6, 10_001, dtype=torch.float64)
    steps = torch.hypot(line.diff(), (wavenumber * line).sin().diff()).cumsum(0)
    place = rng(seed).random(num_points) * steps[-1].item()
    first = torch.from_numpy(np.interp(place, steps, line[1:]))
    x = torch.stack([first, (wavenumber * first).sin()], dim=-1).requires_grad_()
    slope = wavenumber * (wavenumber * x[:, 0]).cos()
    distance = (x[:, 1] - (wavenumber * x[:, 0]).sin()) / (1 + slope**2).sqrt()
    temperature = (1 + 0.4 * (5 * x[:, 0] + seed).sin()) * width * (distance / width).tanh()
    (gradient,) = torch.autograd.grad(temperature.sum(), x)
    return x.detach().numpy(), gradient.numpy()


@pytest.mark.parametrize("seed", range(5))
def test_unlabelled_points_of_a_curve_improve_a_curl_free_field(seed):
    """20 labelled points and 1000 without a label; errors at 500 others of the curve.

    The gradient turns with the front, slowly along it; other limbs of the front, where it points
    the other way, are near. The weight and the lengthscale are the same for all seeds.
    """
    x, truth = front(1520, seed)
    y = truth[:1020] + 0.05 * rng(seed).standard_normal((1020, 2))
    y[20:] = np.nan
    base = RBFKernel().double()
    base.lengthscale = 0.3
    kernel = ScaleKernel(gp_orff.CurlFreeKernel(base, num_dims=2)).double()
    kernel.outputscale = 0.5 * 0.3**2  # a variance of 1/2 for each component
    errors = {}
    for weight in (0.0, 0.03):
        model = ORFFRidge(kernel, alpha=0.05**2, laplacian_weight=weight).fit(x[:1020], y)
        errors[weight] = rmse(model.predict(x[1020:]), truth[1020:])
    assert errors[0.03] < errors[0.0]


def spectrometers(num_samples, seed):
    """Two instruments of four channels each, and the concentration that both respond to.

    Each sees it in one direction of its channels, and independent interferences in the others.
    """
    generator = rng(seed)
    concentration = generator.uniform(-1.7, 1.7, num_samples)
    views = []
    for _ in range(2):
        channels = generator.standard_normal((num_samples, 4))
        channels[:, 0] = concentration + 0.15 * channels[:, 0]
        views.append(channels @ np.linalg.qr(generator.standard_normal((4, 4)))[0])
    return np.concatenate(views, axis=1), np.sin(1.5 * concentration)


@pytest.mark.parametrize("seed", range(5))
def test_unlabelled_points_that_two_views_agree_on_improve_both(seed):
    """20 labelled samples and 400 without a label; errors at 500 others."""
    x, truth = spectrometers(920, seed)
    y = truth[:420] + 0.1 * rng(seed).standard_normal(420)
    y[20:] = np.nan
    errors = {}
    for weight in (0.0, 3.0):
        rule = gp_orff.QuasiMonteCarlo(128, seed=0)
        model = ORFFRidge(two_views(4, 2.0), rule, alpha=0.01, laplacian_weight=weight)
        model.fit(x[:420], y, view_disagreement(420, 2) / 420, combination=[[0.5, 0.5]])
        found = np.column_stack([model.predict_views(x[420:]), model.predict(x[420:])])
        errors[weight] = [rmse(column, truth[420:]) for column in found.T]
    assert np.less(errors[3.0], errors[0.0]).all()


def test_without_ridge_penalty_places_may_repeat():
    """α = 0, fewer numbers than features, and every place twice: the objective is the least."""
    x = np.repeat(rng(0).random((20, 2)), 2, axis=0)
    y = rng(1).standard_normal((40, 2))
    y[10:] = np.nan
    laplacian = graph_laplacian(x, 4).toarray()
    model = ORFFRidge(
        gp_orff.CurlFreeKernel(num_dims=2), gp_orff.MonteCarlo(60), 0.0, laplacian_weight=WEIGHT
    ).fit(x, y, laplacian)
    phi = model.kernel_.features(torch.from_numpy(x)).numpy()
    root = np.linalg.cholesky(WEIGHT * laplacian + 1e-13 * np.eye(40)).T
    rows = np.concatenate([phi[:20], np.kron(root, np.eye(2)) @ phi])
    right = np.concatenate([y[:10].ravel(), np.zeros(80)])

    def objective(theta):
        return np.sum((rows @ theta - right) ** 2)

    rounding = np.sqrt(len(model.coef_) * np.finfo(float).eps)  # of singular values, from squares
    least = objective(np.linalg.lstsq(rows, right, rcond=rounding)[0])
    assert objective(model.coef_) == pytest.approx(least, rel=1e-4)
