"""Integrals of exact kernels, compared with closed forms and quadratures by scipy."""

import math
from itertools import pairwise

import gpytorch
import numpy as np
import pytest
import torch
from gpytorch.kernels import (
    CosineKernel,
    MaternKernel,
    MultitaskKernel,
    PeriodicKernel,
    RBFKernel,
    RQKernel,
    ScaleKernel,
    SpectralDeltaKernel,
    SpectralMixtureKernel,
)
from scipy.integrate import quad

import gp_orff
from gp_orff import BoxAverage, Component, Flux, Jacobian, LineIntegral, Potential
from gp_orff.kernels import lengths
from gp_orff.kernels.derivatives import SymbolCovariance
from gp_orff.symbols.base import Identity
from gp_orff.symbols.patches import Axis, axes_of
from tests.support import oracles

ELL = 0.8
PATH = torch.tensor([[0.0, 0.1], [0.5, 0.3], [0.1, 0.25], [0.3, -0.4]], dtype=torch.float64)
POINTS = torch.tensor([[0.0, 0.1], [0.25, 0.2], [0.251, 0.2], [0.9, 0.4]], dtype=torch.float64)


def scalar(nu):
    kernel = (RBFKernel() if nu is None else MaternKernel(nu=nu)).double()
    kernel.lengthscale = torch.tensor(ELL, dtype=torch.float64)
    return kernel.requires_grad_(False)


def profile(nu, r):
    name = "rbf" if nu is None else f"matern{int(2 * nu)}2"
    tau = torch.tensor([r], dtype=torch.float64)
    return oracles.scalar(name)(tau, torch.tensor([ELL], dtype=torch.float64)).item()


def covariance(kernel, left, right, x, z):
    space = tuple(range(x.shape[-1]))
    return SymbolCovariance(kernel, left, right, space)(x, z)


@pytest.mark.parametrize("nu", [0.5, 1.5, 2.5, None])
def test_means_over_intervals_by_scipy(nu):
    """Of two intervals, with the density of a trapezoid, and of one and a point, in it or beside
    it: 1e-9."""
    kernel, wide, narrow = scalar(nu), BoxAverage(0.6), BoxAverage(0.4)
    for lag in (0.0, 0.05, 0.1, 0.3, 1.5):
        x, z = torch.zeros(1, 1).double(), torch.tensor([[lag]], dtype=torch.float64).double()

        def overlap(u):  # of the two intervals, shifted
            return max(0.0, min(0.3, u + 0.2) - max(-0.3, u - 0.2)) / 0.24

        places = sorted({lag, *(lag + w for w in (-0.3, 0.3)), *(-0.5, -0.1, 0.1, 0.5)})
        inside = [own for own in places if -0.5 <= own <= 0.5]
        both = sum(
            quad(lambda u, lag=lag: overlap(u) * profile(nu, abs(u - lag)), a, b, epsabs=1e-12)[0]
            for a, b in pairwise(inside)
        )
        found = covariance(kernel, wide, narrow, x, z).item()
        assert found == pytest.approx(both, abs=1e-9)
        middle = min(max(lag, -0.3), 0.3)
        one = sum(
            quad(lambda u, lag=lag: profile(nu, abs(u - lag)) / 0.6, a, b, epsabs=1e-12)[0]
            for a, b in ((-0.3, middle), (middle, 0.3))
        )
        assert covariance(kernel, wide, Identity(), x, z).item() == pytest.approx(one, abs=1e-9)


@pytest.mark.parametrize(
    ("nu", "d", "tolerance"),
    [(1.5, 1, 1e-9), (2.5, 1, 1e-9), (1.5, 2, 1e-4), (2.5, 2, 1e-6), (None, 2, 1e-9)],
)
def test_integrals_of_gradients_are_differences_of_potentials(nu, d, tolerance):
    """Along a path that turns at sharp angles and through points; of a flow across it, of stream
    functions. In two dimensions with a kink, two patches are not known to rounding."""
    kernels = {gp_orff.CurlFreeKernel: (LineIntegral, Potential)}
    if d == 2:
        kernels[gp_orff.DivergenceFreeKernel] = (Flux, gp_orff.StreamFunction)
    path, x, start = PATH[:, :d], POINTS[:, :d], torch.zeros(1, d).double()
    for field, (integral, potential) in kernels.items():
        kernel = field(scalar(nu), num_dims=d)
        values = covariance(kernel, potential(), Identity(), path[[0, -1]], x)
        found = covariance(kernel, integral(path), Identity(), start, x)
        torch.testing.assert_close(found[0], values[1] - values[0], rtol=0, atol=1e-6)
        variance = 2 * (profile(nu, 0.0) - profile(nu, (path[-1] - path[0]).norm().item()))
        found = covariance(kernel, integral(path), integral(path), start, start).item()
        assert found == pytest.approx(variance, abs=tolerance)


def test_boxes_have_the_dimensions_of_space():
    """Not one for every output: products of one-dimensional means, of three outputs and of one."""
    one = quad(lambda u: 2 * (1 - u) * math.exp(-0.5 * (u / ELL) ** 2), 0, 1)[0]
    x = torch.zeros(1, 2).double()
    found = covariance(scalar(None), BoxAverage(1.0), BoxAverage(1.0), x, x)
    assert found.item() == pytest.approx(one**2, abs=1e-10)
    kernel = MultitaskKernel(scalar(None), num_tasks=3, rank=1).double().requires_grad_(False)
    tasks = kernel.task_covar_module.covar_matrix.to_dense()
    found = covariance(kernel, BoxAverage(1.0), BoxAverage(1.0), x, x)
    torch.testing.assert_close(found, one**2 * tasks, rtol=0, atol=1e-9)


def test_boxes_in_three_dimensions_of_kernels_with_kinks():
    """A product of one for each dimension, of one-dimensional means: 1e-6."""
    kernels = [MaternKernel(nu=0.5, active_dims=(i,)).double() for i in range(3)]
    kernel = math.prod(kernels[1:], start=kernels[0]).requires_grad_(False)
    for own in kernels:
        own.lengthscale = torch.tensor(ELL, dtype=torch.float64)
    x = torch.zeros(1, 3).double()
    one = quad(lambda u: 2 * (0.5 - u) * profile(0.5, u) / 0.25, 0, 0.5)[0]
    found = covariance(kernel, BoxAverage(0.5), BoxAverage(0.5), x, x).item()
    assert found == pytest.approx(one**3, abs=1e-6)
    half = quad(lambda u: profile(0.5, u) / 0.25, 0, 0.25)[0]
    found = covariance(kernel, BoxAverage(0.5), Identity(), x, x).item()
    assert found == pytest.approx(half**3, abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["rough", "product", "nameless"])
def test_matrices_and_integrals_need_no_derivatives(kernel):
    """u^T f by the matrix itself, whatever the kernel, asked for and observed, to 1e-9."""

    class Nameless(gpytorch.kernels.PeriodicKernel):
        """Of no known spectrum."""

    scalars = {
        "rough": MaternKernel(nu=0.5),
        "product": RBFKernel(active_dims=(0,)) * MaternKernel(nu=1.5, active_dims=(1, 2)),
        "nameless": Nameless(),
    }
    torch.manual_seed(0)
    built = MultitaskKernel(scalars[kernel], num_tasks=2, rank=1)
    rng = np.random.default_rng(0)
    x, xs = (torch.from_numpy(rng.uniform(size=(n, 3))) for n in (8, 4))
    u = torch.tensor([0.6, 0.8]).double()
    model = gp_orff.VectorFieldGP(built).condition(x, torch.from_numpy(rng.normal(size=(8, 2))))
    for _ in range(2):
        field, own = model.posterior(), Component(u)
        torch.testing.assert_close(
            field.mean(xs, own).flatten(), field.mean(xs) @ u, atol=1e-9, rtol=0
        )
        wanted = torch.einsum("p,npq,q->n", u, field.pointwise_covariance(xs), u)
        torch.testing.assert_close(field.variance(xs, own).flatten(), wanted, atol=1e-9, rtol=0)
        small = field.mean(xs, BoxAverage(1e-6))
        torch.testing.assert_close(small, field.mean(xs), atol=1e-4, rtol=0)
        twice = field.mean(xs, own @ BoxAverage(0.1)).flatten()
        torch.testing.assert_close(twice, field.mean(xs, BoxAverage(0.1)) @ u, atol=1e-9, rtol=0)
        model.observe(xs, torch.zeros(4), own, noise=1e-3)
    assert (model.posterior().mean(xs) @ u).abs().max() < 0.1  # three standard deviations


def test_what_is_no_lag_is_refused():
    kernel = MultitaskKernel(gpytorch.kernels.LinearKernel(), num_tasks=2).double()
    x = torch.ones(3, 2).double()
    with pytest.raises(NotImplementedError, match="a stationary kernel"):
        covariance(kernel, Component([1.0, 0.0]), Identity(), x, x)


def test_many_lengthscales_in_every_direction_are_refused():
    kernel = gp_orff.CurlFreeKernel(scalar(1.5), num_dims=2)
    x = torch.zeros(1, 2).double()
    with pytest.raises(NotImplementedError, match="over many lengthscales"):
        covariance(kernel, BoxAverage(20.0), Identity(), x, x)


def test_parallel_edges_are_one_axis():
    """Whose density is that of the sum of two uniform numbers, here by a histogram."""
    edges = torch.tensor([[1.0, 0.0], [0.0, 0.0], [-0.4, 0.0], [0.3, 0.3]], dtype=torch.float64)
    first, second = axes_of(edges)
    assert first.widths == (1.0, 0.4)
    assert second.widths == (edges[3].norm().item(),)
    rng = np.random.default_rng(0)
    sums = rng.uniform(size=100_000) - 0.4 * rng.uniform(size=100_000)
    counts, bins = np.histogram(sums, bins=14, range=(-0.4, 1.0), density=True)
    middle = torch.from_numpy(0.5 * (bins[1:] + bins[:-1]))
    own = Axis(first.direction, first.start, first.widths)
    np.testing.assert_allclose(own.density(middle), counts, atol=0.05)  # five standard errors


KINDS = [np.asarray, torch.tensor, tuple, list]


def given_as(kind):
    """Symbols whose arguments are of a kind."""
    numbers, path = kind([0.5, 0.25]), kind([[0.0, 0.0], [0.5, 0.25]])
    given = [Component(numbers), BoxAverage(numbers), BoxAverage(np.float64(0.3))]
    given += [LineIntegral(path), Flux(path), Potential(numbers), gp_orff.StreamFunction(numbers)]
    return [*given, Component(kind([1.0, 0, 0, 0])) @ Jacobian(np.int64(2))]


@pytest.mark.parametrize("kind", KINDS)
def test_arguments_are_plain_values(kind):
    """Of any kind, copied."""
    numbers = kind([0.5, 0.25])
    assert Component(numbers).direction == (0.5, 0.25) == BoxAverage(numbers).widths
    assert BoxAverage(np.float64(0.5)) == BoxAverage(torch.tensor(0.5)) == BoxAverage(0.5)
    assert [repr(own) for own in given_as(kind)] == [repr(own) for own in given_as(list)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [np.asarray, torch.tensor])
def test_arguments_are_plain_values_in_files(kind, tmp_path):
    rng = np.random.default_rng(0)
    x, xs = (torch.from_numpy(rng.uniform(size=(n, 2))) for n in (6, 3))
    kernel = ScaleKernel(gp_orff.CurlFreeKernel(num_dims=2))
    model = gp_orff.VectorFieldGP(kernel).condition(x, torch.from_numpy(rng.normal(size=(6, 2))))
    for symbol in given_as(kind):
        q = symbol.num_outputs(2)
        model.observe(xs, torch.zeros(3, q), symbol, noise=0.1)
    model.save(tmp_path / "model.pt")
    loaded = gp_orff.VectorFieldGP.load(tmp_path / "model.pt").posterior()
    torch.testing.assert_close(loaded.mean(xs), model.posterior().mean(xs), rtol=0, atol=1e-10)


def test_a_direction_is_a_vector():
    with pytest.raises(ValueError, match=r"a direction \(p,\), got shape \(2, 2\)"):
        Component(np.eye(2))


def valued(kernel, **values):
    kernel = kernel.double()
    for name, value in values.items():
        setattr(kernel, name, torch.tensor(value, dtype=torch.float64))
    return kernel.requires_grad_(False)


@pytest.mark.parametrize(
    ("kernel", "at"),
    [
        (
            valued(
                SpectralMixtureKernel(num_mixtures=2),
                mixture_means=[[[0.3]], [[10.0]]],
                mixture_scales=[[[0.1]], [[0.05]]],
                mixture_weights=[0.1, 0.9],
            ),
            lambda t: (
                0.1 * math.exp(-2 * (math.pi * 0.1 * t) ** 2) * math.cos(2 * math.pi * 0.3 * t)
                + 0.9 * math.exp(-2 * (math.pi * 0.05 * t) ** 2) * math.cos(2 * math.pi * 10 * t)
            ),
        ),
        (
            valued(PeriodicKernel(), period_length=0.13, lengthscale=1.0),
            lambda t: math.exp(-2 * math.sin(math.pi * t / 0.13) ** 2),
        ),
        (
            valued(PeriodicKernel(), period_length=0.7, lengthscale=0.01),
            lambda t: math.exp(-200 * math.sin(math.pi * t / 0.7) ** 2),
        ),
        (valued(CosineKernel(), period_length=0.023), lambda t: math.cos(math.pi * t / 0.023)),
        (
            valued(SpectralDeltaKernel(1, num_deltas=2), Z=[[3.0], [20.0]], lengthscale=0.9),
            lambda t: sum(math.cos(2 * math.pi * z * t / 0.9) / 2 for z in (3, 20)),
        ),
        (
            valued(RQKernel(), alpha=0.003, lengthscale=1.0),
            lambda t: (1 + t * t / 0.006) ** -0.003,
        ),
    ],
    ids=["mixture", "periodic", "narrow", "cosine", "deltas", "heavy"],
)
def test_kernels_that_vary_faster_than_their_lengthscales(kernel, at):
    """The variance of a mean over an interval, whose lags have the density of a triangle."""
    width, x = 0.9, torch.zeros(1, 1).double()
    whole, error = quad(
        lambda t: 2 * (1 - t / width) / width * at(t), 0, width, limit=400, epsabs=1e-13
    )
    found = covariance(kernel, BoxAverage(width), BoxAverage(width), x, x).item()
    assert found == pytest.approx(whole, abs=1e-10 + error)


def test_mixtures_have_a_length_for_every_input():
    """A product of one-dimensional means; time, however fast, is none of space."""
    means = [[[3.0, 0.1, 500.0]]]
    kernel = valued(
        SpectralMixtureKernel(num_mixtures=1, ard_num_dims=3),
        mixture_means=means,
        mixture_scales=[[[0.5, 0.7, 90.0]]],
        mixture_weights=[1.0],
    )
    x, box = torch.zeros(1, 3).double(), BoxAverage([0.9, 0.4])
    whole = 1.0
    for mean, scale, width in ((3.0, 0.5, 0.9), (0.1, 0.7, 0.4)):
        whole *= quad(
            lambda t, m=mean, s=scale, w=width: (
                2
                * (1 - t / w)
                / w
                * math.exp(-2 * (math.pi * s * t) ** 2)
                * math.cos(2 * math.pi * m * t)
            ),
            0,
            width,
        )[0]
    found = SymbolCovariance(kernel, box, box, (0, 1))(x, x).item()
    assert found == pytest.approx(whole, abs=1e-10)


@pytest.mark.parametrize("time", [RBFKernel, lambda **own: MaternKernel(nu=0.5, **own)])
def test_integrals_over_space_do_not_see_how_fast_time_is(time):
    """At one time, where its kernel is one: the same without it, to rounding."""
    base = valued(MaternKernel(nu=2.5), lengthscale=0.5)
    space = gp_orff.DivergenceFreeKernel(base, num_dims=2, active_dims=(0, 1))
    x, box = torch.zeros(1, 3).double(), BoxAverage([0.3, 0.2])
    alone = SymbolCovariance(space, box, box, (0, 1))(x, x)
    for length in (5.0, 0.01, 1e-6):
        kernel = space * valued(time(active_dims=(2,)), lengthscale=length)
        found = SymbolCovariance(kernel, box, box, (0, 1))(x, x)
        torch.testing.assert_close(found, alone, rtol=0, atol=1e-9)


def test_features_in_place_of_long_integrals_are_told():
    """Where the exact kernel would need too many nodes, and features have the answer."""
    kernel = MultitaskKernel(scalar(1.5), num_tasks=1, rank=1)
    x = torch.rand(5, 2, generator=torch.Generator().manual_seed(0)).double()
    field = gp_orff.VectorFieldGP(kernel).condition(x, x[:, :1].sin()).posterior()
    assert field.variance(x, BoxAverage(0.1)).isfinite().all()
    with pytest.warns(UserWarning, match=r"many lengthscales.*uses features.*smaller pieces"):
        field.variance(x[:1], BoxAverage([10.0, 10.0]))


def test_kernels_of_no_known_length_have_points_alone():
    class Lengthless(gpytorch.kernels.Kernel):
        is_stationary = True

        def forward(self, x, z, **params):
            return self.covar_dist(x, z, **params).square().neg().exp()

    x, kernel = torch.zeros(1, 2).double(), Lengthless()
    assert covariance(kernel, Component([1.0]), Identity(), x, x).item() == 1
    with pytest.raises(NotImplementedError, match="got Lengthless; register"):
        covariance(kernel, BoxAverage(1.0), Identity(), x, x)
    lengths.shortest_lengths.register(Lengthless, lambda own: torch.ones(1))
    one = quad(lambda t: math.exp(-t * t), 0, 0.5)[0] / 0.5
    found = covariance(kernel, BoxAverage(1.0), Identity(), x, x).item()
    assert found == pytest.approx(one**2, abs=1e-9)
