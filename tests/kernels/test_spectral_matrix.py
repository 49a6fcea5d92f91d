"""Kernels of general spectral matrices: known kernels, scipy quadrature and signatures."""

import math
import warnings

import gpytorch
import numpy as np
import pytest
import scipy.integrate
import torch
from gpytorch.kernels import (
    ConstantKernel,
    MaternKernel,
    MultitaskKernel,
    RBFKernel,
    RQKernel,
    ScaleKernel,
)
from torch import nn

import gp_orff
from tests.support.registry import base

MIXING = torch.tensor([[1.0, 0.0], [0.4, 0.8], [-0.3, 0.2]], dtype=torch.float64)


def gradient(omega):
    return omega.unsqueeze(-1)


def rotated(omega):
    """‖ω‖ times a unit vector across ω, in two dimensions."""
    return torch.stack([omega[:, 1], -omega[:, 0]], dim=-1).unsqueeze(-1)


def constant(omega):
    return MIXING.expand(len(omega), -1, -1)


def uneven(omega):
    """B of a kernel that is none of the known ones, with 2 outputs."""
    radius = omega.square().sum(-1)
    first = torch.stack([1 / (1 + radius), 0.5 * torch.cos(omega[:, 0])], dim=-1)
    second = torch.stack([0.2 * omega[:, 0] * omega[:, 1] / (1 + radius), 0 * radius], dim=-1)
    return torch.stack([first, second], dim=-1)


class Trained(nn.Module):
    """`uneven` with a parameter."""

    def __init__(self):
        super().__init__()
        self.strength = nn.Parameter(torch.tensor(0.8, dtype=torch.float64))

    def forward(self, omega):
        growth = nn.functional.softplus(self.strength) * omega.square().sum(-1)
        return uneven(omega) * (1 + growth)[:, None, None].sqrt()


def matrix_kernel(amplitude=uneven, base_kernel=None, num_outputs=2, num_dims=2, **options):
    base_kernel = base("rbf", num_dims) if base_kernel is None else base_kernel
    return gp_orff.SpectralMatrixKernel(
        base_kernel, amplitude, num_outputs=num_outputs, num_dims=num_dims, **options
    ).double()


def points(count, num_dims, scale=2.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.rand(count, num_dims, generator=generator, dtype=torch.float64)


KNOWN = {  # amplitude, outputs, the kernel it stands for
    "curl_free": (gradient, 2, lambda k: gp_orff.CurlFreeKernel(k, num_dims=2)),
    "divergence_free": (rotated, 2, lambda k: gp_orff.DivergenceFreeKernel(k, num_dims=2)),
    "separable": (constant, 3, lambda k: separable(k)),
}


def separable(kernel):
    """k · M Mᵀ."""
    tasks = MultitaskKernel(kernel, num_tasks=3, rank=2).double()
    tasks.task_covar_module.covar_factor.data = MIXING.clone()
    tasks.task_covar_module.raw_var_constraint = gpytorch.constraints.Positive()
    tasks.task_covar_module.var = torch.full((3,), 1e-14, dtype=torch.float64)
    return tasks


@pytest.mark.parametrize("name", KNOWN)
@pytest.mark.parametrize("rule", ["MonteCarlo", "Orthogonal", "QuasiMonteCarlo"])
def test_features_equal_those_of_a_known_kernel_on_the_same_frequencies(name, rule):
    amplitude, outputs, known = KNOWN[name]
    kernel = base("matern52", 2)
    rule = getattr(gp_orff, rule)(32, measure="base", seed=3)
    mine = gp_orff.ORFFKernel(matrix_kernel(amplitude, kernel, outputs), rule)
    theirs = gp_orff.ORFFKernel(known(kernel), rule)
    x, z = points(7, 2), points(5, 2, seed=1)
    expected = theirs(x, z).to_dense()
    error = (mine(x, z).to_dense() - expected).abs().max() / expected.abs().max()
    assert error < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "spectrum"),  # fields of spectral mixtures have no closed form
    [*((name, "rbf") for name in KNOWN), ("curl_free", "rq"), ("separable", "spectral_mixture")],
)
def test_grids_equal_known_kernels(name, spectrum):
    amplitude, outputs, known = KNOWN[name]
    kernel = base(spectrum, 2)
    x, z = points(7, 2, scale=1.0), points(5, 2, scale=1.0, seed=1)
    grid = gp_orff.Grid.for_data(torch.cat([x, z]), tolerance=1e-4, max_features=5000)
    mine = gp_orff.ORFFKernel(matrix_kernel(amplitude, kernel, outputs), grid)
    exact = known(kernel)
    size = exact(x).to_dense().abs().max()
    foretold = mine.accuracy()[0]
    error = (mine(x, z).to_dense() - exact(x, z).to_dense()).abs().max() / size
    assert error < 3 * (foretold.truncated + foretold.aliasing) + 1e-6
    if spectrum != "rq":
        assert error < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "num_dims", "tolerance"),
    [
        (lambda: base("rbf", 1), 1, 1e-9),
        (lambda: base("rbf", 2), 2, 1e-9),
        (lambda: base("rbf", 3), 3, 1e-9),
        (lambda: base("rq", 2), 2, 1e-4),  # heavy tails: what 200 000 frequencies can do
        (lambda: base("matern52", 2), 2, 1e-4),
        (lambda: ScaleKernel(base("rbf", 2)) + base("matern52", 2), 2, 1e-4),
    ],
)
def test_quadrature_equals_the_curl_free_kernel(make, num_dims, tolerance):
    kernel = make().double()
    mine = matrix_kernel(gradient, kernel, num_dims, num_dims)
    exact = gp_orff.CurlFreeKernel(kernel, num_dims=num_dims)
    x, z = points(6, num_dims), points(4, num_dims, seed=1)
    size = exact(x).to_dense().abs().max()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="for lags up to", category=RuntimeWarning)
        values = mine(x, z).to_dense()
    assert (values - exact(x, z).to_dense()).abs().max() / size < tolerance


@pytest.mark.parametrize("name", ["rbf", "matern52"])
def test_variances_by_quadrature_equal_those_of_the_curl_free_kernel(name):
    kernel, x = base(name, 2), points(6, 2)
    mine = matrix_kernel(gradient, kernel)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="for lags up to", category=RuntimeWarning)
        values = mine(x).diagonal()
    expected = gp_orff.CurlFreeKernel(kernel, num_dims=2)(x).diagonal()
    tolerance = 1e-9 if name == "rbf" else 1e-4
    assert (values - expected).abs().max() / expected.max() < tolerance


def integrate(lengthscale, amplitude, lag):
    """∫ cos⟨ω, lag⟩ A(ω) N(ω; 0, diag ℓ⁻²) dω by Simpson's rule of scipy."""
    ell = lengthscale.squeeze().detach().numpy()
    axes = [np.linspace(-7.5 / scale, 7.5 / scale, 601) for scale in ell]
    first, second = np.meshgrid(*axes, indexing="ij")
    b = amplitude(torch.from_numpy(np.stack([first, second], axis=-1).reshape(-1, 2)))
    density = np.exp(-0.5 * ((first * ell[0]) ** 2 + (second * ell[1]) ** 2))
    density *= np.prod(ell) / (2 * math.pi) * np.cos(first * lag[0] + second * lag[1])
    values = (b @ b.mT).numpy().reshape(601, 601, 2, 2) * density[..., None, None]
    inner = scipy.integrate.simpson(values, x=axes[1], axis=1)
    return torch.from_numpy(scipy.integrate.simpson(inner, x=axes[0], axis=0))


@pytest.fixture(scope="module")
def by_scipy():
    """The kernel of `uneven` at one lag, two points at that lag, and the value by scipy."""
    kernel = matrix_kernel()
    x = torch.tensor([[0.0, 0.0], [0.7, -0.4]], dtype=torch.float64)
    value = integrate(kernel.base_kernel.lengthscale, uneven, (x[0] - x[1]).tolist())
    return kernel, x, value


def test_a_kernel_of_ones_own_equals_scipy(by_scipy):
    kernel, x, value = by_scipy
    assert (kernel(x).to_dense()[:2, 2:] - value).abs().max() < 1e-6
    grid = gp_orff.ORFFKernel(kernel, gp_orff.Grid.for_data(x, tolerance=1e-6))
    assert (grid(x).to_dense()[:2, 2:] - value).abs().max() < 1e-6


def wide_normal(u):
    """Frequencies from N(0, 2² I)."""
    z = torch.special.ndtri(u)
    return 2 * z, -0.5 * z.square().sum(-1) - u.shape[-1] * math.log(2 * math.sqrt(2 * math.pi))


@pytest.mark.parametrize("rule", ["MonteCarlo", "Orthogonal", "QuasiMonteCarlo"])
@pytest.mark.parametrize(
    ("measure", "sampler"), [("trace", None), ("trace", wide_normal), ("base", None)]
)
def test_random_features_are_unbiased(by_scipy, rule, measure, sampler):
    """The mean over 50 draws of 64 frequencies, within 5 standard errors."""
    kernel, x, value = by_scipy
    kernel = matrix_kernel(base_kernel=kernel.base_kernel, sampler=sampler)
    rule = getattr(gp_orff, rule)
    draws = torch.stack(
        [
            gp_orff.ORFFKernel(kernel, rule(64, measure=measure, seed=seed))(x).to_dense()[:2, 2:]
            for seed in range(50)
        ]
    ).detach()
    error = draws.mean(0) - value
    assert (error.abs() <= 5 * draws.std(0) / math.sqrt(50) + 1e-6).all()


def test_an_amplitude_that_is_no_longer_finite_is_named():
    kernel = matrix_kernel(Trained())
    orff = gp_orff.ORFFKernel(kernel, gp_orff.Grid(domain=((0, 1), (0, 1)), tolerance=1e-2))
    kernel.amplitude.strength.data.fill_(math.nan)
    with pytest.raises(ValueError, match="finite amplitude, got NaN or infinity at ω"):
        orff.redraw()


def test_the_sampler_is_used_for_the_trace_measure_only():
    kernel = matrix_kernel(sampler=wide_normal)
    proposed = gp_orff.ORFFKernel(kernel, gp_orff.MonteCarlo(64, seed=1))
    plain = gp_orff.ORFFKernel(matrix_kernel(), gp_orff.MonteCarlo(64, seed=1))
    from_base = gp_orff.ORFFKernel(kernel, gp_orff.MonteCarlo(64, measure="base", seed=1))
    x = points(3, 2)
    assert not torch.allclose(proposed(x).to_dense(), plain(x).to_dense(), atol=1e-3)
    torch.testing.assert_close(from_base(x).to_dense(), plain(x).to_dense(), rtol=0, atol=0)


def test_effective_sample_size():
    """D for equal variances; by hand for A = ωωᵀ drawn from S."""
    kernel = base("rbf", 2)
    known = gp_orff.CurlFreeKernel(kernel, num_dims=2)
    (trace,) = gp_orff.ORFFKernel(
        gp_orff.CurlFreeKernel(RBFKernel(), num_dims=2).double(), gp_orff.MonteCarlo(50)
    ).accuracy()
    assert trace.effective_sample_size == pytest.approx(50, rel=1e-9)
    features = gp_orff.ORFFKernel(known, gp_orff.MonteCarlo(50, measure="base"))
    mine = gp_orff.ORFFKernel(
        matrix_kernel(gradient, kernel), gp_orff.MonteCarlo(50, measure="base")
    )
    lengths = (features.frequencies[0].bases[0] / kernel.lengthscale).square().sum(-1)
    expected = (lengths.sum() ** 2 / lengths.square().sum()).item()
    for orff in (features, mine):
        (accuracy,) = orff.accuracy()
        assert accuracy.num_frequencies == 50
        assert accuracy.effective_sample_size == pytest.approx(expected, rel=1e-9)
    assert "worth" in str(accuracy)


@pytest.mark.parametrize("rule", ["grid", "random"])
def test_gradients_reach_all_parameters(rule):
    kernel = matrix_kernel(Trained(), ScaleKernel(base("rbf", 2)))
    x = points(5, 2, scale=1.0)
    rule = gp_orff.MonteCarlo(8) if rule == "random" else gp_orff.Grid.for_data(x, tolerance=1e-2)
    orff = gp_orff.ORFFKernel(kernel, rule)
    weights = torch.randn(10, 10, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def value():
        return (orff(x).to_dense() * weights).sum()

    value().backward()
    for parameter in kernel.parameters():
        flat, gradient = parameter.data.view(-1), parameter.grad.view(-1)
        for i in range(len(flat)):
            center, step = flat[i].item(), 1e-5
            values = []
            for sign in (1, -1):
                flat[i] = center + sign * step
                values.append(value().item())
            flat[i] = center
            difference = (values[0] - values[1]) / (2 * step)
            assert gradient[i].item() == pytest.approx(difference, rel=1e-6, abs=1e-7)


def test_same_point_covariance_on_a_coarse_grid_has_the_truncated_variance():
    """The variance at a point is exact, whatever the grid truncates."""
    kernel = matrix_kernel(gradient, base("matern52", 2))
    x = points(4, 2)
    coarse = gp_orff.ORFFKernel(kernel, gp_orff.Grid.for_data(x, max_features=200))
    exact = gp_orff.CurlFreeKernel(base("matern52", 2), num_dims=2)
    assert coarse.accuracy()[0].truncated > 0.01
    torch.testing.assert_close(coarse(x).diagonal(), exact(x).diagonal(), rtol=2e-3, atol=0)


SYMBOLS = {
    "divergence": gp_orff.Divergence(),
    "curl": gp_orff.Curl(),
    "jacobian": gp_orff.Jacobian(num_dims=2),
    "curl_free_part": gp_orff.CurlFreePart(),
    "box_average": gp_orff.BoxAverage(0.3),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SYMBOLS)
def test_posteriors_of_symbols_equal_those_of_the_known_kernel(name):
    """A sum of a field and a separable kernel, as spectral matrices and as themselves."""
    x = points(40, 2)
    y = torch.stack([torch.sin(x[:, 0]), torch.cos(2 * x[:, 1])], dim=-1)
    kernel = base("rbf", 2)
    two = MIXING[:2]
    pair = [
        matrix_kernel(gradient, kernel)
        + matrix_kernel(lambda w: two.expand(len(w), -1, -1), kernel),
        gp_orff.CurlFreeKernel(kernel, num_dims=2)
        + gp_orff.SpectralMatrixKernel(
            kernel, lambda w: two.expand(len(w), -1, -1), num_outputs=2, num_dims=2
        ),
    ]
    grid = gp_orff.Grid(domain=((-1, 3), (-1, 3)), spacing=0.6, cutoff=9.0)
    fields = [
        gp_orff.VectorFieldGP(own, frequencies=grid).condition(x, y).posterior() for own in pair
    ]
    mine, theirs = (field(points(3, 2, seed=2), SYMBOLS[name]) for field in fields)
    torch.testing.assert_close(mine.mean, theirs.mean, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(mine.variance, theirs.variance, rtol=1e-9, atol=1e-9)


def written_out(kernel, spacing, cutoff):
    """Φ(z) (n, 2, F) of a grid: half of a disc of frequencies, weights 2 S(ω) h², both columns."""
    count = int(cutoff / spacing) + 1
    index = torch.arange(-count, count + 1, dtype=torch.float64)
    omega = spacing * torch.cartesian_prod(index, index)
    omega = omega[omega.norm(dim=-1) <= cutoff]
    omega = omega[(omega[:, 0] > 0) | ((omega[:, 0] == 0) & (omega[:, 1] >= 0))]
    ell = kernel.lengthscale.detach().squeeze()
    density = torch.exp(-0.5 * (ell * omega).square().sum(-1)) * ell.prod() / (2 * math.pi)
    weights = density * spacing**2 * torch.where(omega.any(-1), 2.0, 1.0)
    directions = weights.sqrt()[:, None, None] * uneven(omega)

    def features(z):
        phase = z @ omega.mT
        parts = [
            torch.einsum("nD,Dpr->npDr", wave, directions) for wave in (phase.cos(), phase.sin())
        ]
        return torch.cat([part.flatten(2) for part in parts], dim=-1)

    return features


@pytest.mark.slow
def test_posteriors_are_those_of_features_written_out():
    """Mean and covariance of the field, its divergence, Jacobian and a line integral."""
    kernel, x, xs = base("rbf", 2), points(40, 2), points(3, 2, seed=2)
    y = torch.stack([torch.sin(3 * x[:, 0]), x.prod(-1)], dim=-1)
    grid = gp_orff.Grid(domain=((-1, 3),) * 2, spacing=0.6, cutoff=9.0, diagonal_correction=False)
    mean = gpytorch.means.ZeroMean()
    model = gp_orff.VectorFieldGP(matrix_kernel(base_kernel=kernel), mean=mean, frequencies=grid)
    model.likelihood.noise = 0.3
    field = model.condition(x, y).posterior()
    features = written_out(kernel, 0.6, 9.0)
    phi = features(x).flatten(0, 1)
    covariance = torch.linalg.inv(torch.eye(phi.shape[-1]).double() + phi.mT @ phi / 0.3)
    weights = covariance @ phi.mT @ y.flatten() / 0.3
    jacobian = torch.func.vmap(torch.func.jacrev(lambda z: features(z[None])[0]))(xs)  # n, p, F, d
    path = torch.tensor([[0.2, 0.1], [1.7, 1.4]], dtype=torch.float64)
    nodes, lengths = map(torch.from_numpy, np.polynomial.legendre.leggauss(40))
    along = path[0] + 0.5 * (1 + nodes)[:, None] * (path[1] - path[0])
    integral = torch.einsum("n,npF,p->F", 0.5 * lengths, features(along), path[1] - path[0])
    for result, rows in (
        (field(xs), features(xs)),
        (field.divergence(xs), jacobian[:, 0, :, 0] + jacobian[:, 1, :, 1]),
        (field.jacobian(xs), jacobian.permute(0, 1, 3, 2)),
        (field(torch.zeros(1, 2).double(), gp_orff.LineIntegral(path)), integral),
    ):
        rows = rows.reshape(-1, phi.shape[-1])
        expected = rows @ covariance @ rows.mT
        close = {"rtol": 1e-8, "atol": 1e-9}  # the rounding of the inverse
        torch.testing.assert_close(result.mean.flatten(), rows @ weights, **close)
        torch.testing.assert_close(result.covariance_matrix, expected, **close)


def test_derivatives_of_infinite_variance_are_refused():
    kernel = matrix_kernel(gradient, base("matern32", 2))
    x = points(10, 2)
    model = gp_orff.VectorFieldGP(kernel, frequencies=gp_orff.QuasiMonteCarlo(32))
    field = model.condition(x, x).posterior()
    with pytest.raises(ValueError, match="infinite"):
        field.divergence(x)


def test_variances_in_single_precision():
    """The diagonal of the kernel and that of the curl-free kernel, in the dtype of the inputs."""
    kernel = gp_orff.SpectralMatrixKernel(RBFKernel(), gradient, num_outputs=2, num_dims=2)
    x = torch.rand(2, 5, 2, generator=torch.Generator().manual_seed(0))
    variance = kernel(x, diag=True)
    known = gp_orff.CurlFreeKernel(RBFKernel(), num_dims=2)(x, diag=True)
    assert variance.dtype == torch.float32
    torch.testing.assert_close(variance, known, rtol=1e-5, atol=0)


def test_a_product_with_time_and_active_dims():
    space = matrix_kernel(gradient, base("rbf", 2), active_dims=(0, 2))
    time = MaternKernel(nu=1.5, active_dims=(1,)).double()
    known = gp_orff.CurlFreeKernel(base("rbf", 2), num_dims=2, active_dims=(0, 2))
    x, z = points(5, 3), points(4, 3, seed=1)
    rule = gp_orff.MonteCarlo(16, measure="base", seed=2)
    mine, theirs = (gp_orff.ORFFKernel(k * time, rule)(x, z).to_dense() for k in (space, known))
    torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)
    torch.testing.assert_close(
        (space * time)(x, z).to_dense(), (known * time)(x, z).to_dense(), rtol=0, atol=1e-8
    )


def test_a_batch_of_kernels():
    kernel = RBFKernel(batch_shape=torch.Size([2])).double()
    kernel.lengthscale = torch.tensor([[[0.6]], [[1.1]]], dtype=torch.float64)
    mine = matrix_kernel(gradient, kernel)
    exact = gp_orff.CurlFreeKernel(kernel, num_dims=2)
    x = points(4, 2)
    torch.testing.assert_close(mine(x).to_dense(), exact(x).to_dense(), rtol=0, atol=1e-8)
    torch.testing.assert_close(mine(x).diagonal(), exact(x).diagonal(), rtol=0, atol=1e-8)
    torch.testing.assert_close(mine[1](x).to_dense(), exact[1](x).to_dense(), rtol=0, atol=1e-8)


@pytest.mark.slow
def test_training_moves_the_amplitude_and_raises_the_evidence():
    generator = torch.Generator().manual_seed(0)
    truth = matrix_kernel(Trained())
    truth.amplitude.strength.data.fill_(-2.0)
    x = points(40, 2, scale=4.0)
    root = torch.linalg.cholesky(
        truth(x).to_dense().detach() + 1e-8 * torch.eye(80, dtype=torch.float64)
    )
    y = (root @ torch.randn(80, generator=generator, dtype=torch.float64)).reshape(40, 2)
    y = y + 0.05 * torch.randn(40, 2, generator=generator, dtype=torch.float64)
    model = gp_orff.VectorFieldGP(ScaleKernel(matrix_kernel(Trained())))
    before = model.condition(x, y).log_marginal_likelihood()
    model.fit(x, y, progress=False)
    assert model.log_marginal_likelihood() > before + 10
    assert model.kernel.base_kernel.amplitude.strength.item() != 0.8
    assert "strength" in "".join(model.report.hyperparameters)


def test_files_keep_the_parameters_of_a_module(tmp_path):
    x = points(60, 2)
    model = gp_orff.VectorFieldGP(matrix_kernel(Trained())).condition(x, x)
    model.kernel.base_kernel.base_kernel.lengthscale = 0.7
    model.save(tmp_path / "model.pt")
    fresh = matrix_kernel(Trained())
    fresh.amplitude.strength.data.fill_(3.0)
    loaded = gp_orff.VectorFieldGP.load(tmp_path / "model.pt", kernel=fresh)
    mean, expected = (m.posterior().mean(x) for m in (loaded, model))
    torch.testing.assert_close(mean, expected, rtol=0, atol=1e-9)


def test_files_refuse_functions(tmp_path):
    x = points(20, 2)
    model = gp_orff.VectorFieldGP(matrix_kernel()).condition(x, x)
    with pytest.raises(ValueError, match=r"torch.nn.Module.*got.*pass kernel= to load"):
        model.save(tmp_path / "model.pt")


def random_of(omega, *shape):
    return torch.ones(len(omega), *shape, dtype=omega.dtype)


BAD = {
    "shape": (lambda w: random_of(w, 3, 1), ValueError, r"matrices \(65, 2, r\).*got \(65, 3, 1\)"),
    "vector": (lambda w: random_of(w, 2), ValueError, r"got \(65, 2\)"),
    "numpy": (lambda w: np.ones((len(w), 2, 1)), TypeError, "a tensor .* got ndarray"),
    "number": (lambda w: torch.ones(2, 2).to(w), ValueError, r"one matrix of p rows"),
    "nan": (lambda w: random_of(w, 2, 1) / 0 * 0, ValueError, "finite amplitude"),
    "zero": (
        lambda w: (w / w.norm(dim=-1, keepdim=True)).unsqueeze(-1),
        ValueError,
        r"at ω = \[0.0, 0.0\].*any finite value at ω = 0",
    ),
    "odd": (
        lambda w: torch.stack([1 + w[:, 0], 1 - w[:, 0]], -1).unsqueeze(-1),
        ValueError,
        r"A\(−ω\) = A\(ω\)",
    ),
    "no_function": (torch.ones(2, 1), TypeError, "a function of frequencies"),
    "a_class": (Trained, TypeError, "instance of torch.nn.Module"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_amplitudes(name):
    amplitude, error, message = BAD[name]
    with pytest.raises(error, match=message):
        matrix_kernel(amplitude)


@pytest.mark.parametrize(
    ("kernel", "error", "message"),
    [
        (RBFKernel, TypeError, "instance of a gpytorch kernel"),
        (ConstantKernel(), ValueError, "constant or a product"),
        (RBFKernel() * RQKernel(), ValueError, "constant or a product"),
        (RBFKernel(active_dims=(0,)), ValueError, "active_dims"),
        (RBFKernel(ard_num_dims=3), ValueError, "ard_num_dims=2"),
        (MultitaskKernel(RBFKernel(), num_tasks=2), ValueError, "scalar base kernel"),
        (gpytorch.kernels.PeriodicKernel(), NotImplementedError, "spectrum of lines"),
    ],
)
def test_bad_base_kernels(kernel, error, message):
    with pytest.raises(error, match=message):
        gp_orff.SpectralMatrixKernel(kernel, gradient, num_outputs=2, num_dims=2)


def test_other_bad_input():
    kernel = matrix_kernel()
    with pytest.raises(ValueError, match="expects inputs with 2 columns, got 3"):
        kernel(points(3, 3)).to_dense()
    with pytest.raises(ValueError, match="2 active_dims, one for each input, got 1"):
        matrix_kernel(active_dims=(0,))
    deep = matrix_kernel(gradient, base("rbf", 4), 4, 4)
    with pytest.raises(NotImplementedError, match=r"at most 3 inputs.*got 4.*ORFFKernel"):
        deep(points(3, 4)).to_dense()
    assert gp_orff.ORFFKernel(deep, gp_orff.MonteCarlo(8)).num_features == 16
    with pytest.raises(ValueError, match="expects a finite variance"):
        matrix_kernel(lambda w: w.unsqueeze(-1), base("matern12", 2))
    for sampler, message in (
        (lambda u: (u[:, :1], u[:, 0]), r"\(8, 2\) and their log density"),
        (lambda u: u, "two tensors"),
        (lambda u: (u, torch.full_like(u[:, 0], math.nan)), "finite"),
    ):
        with pytest.raises(ValueError, match=message):
            gp_orff.ORFFKernel(matrix_kernel(sampler=sampler), gp_orff.MonteCarlo(8))


def gaussian(lag, lengthscale):
    return torch.exp(-0.5 * (lag / torch.tensor(lengthscale).to(lag)).square().sum(-1))


def two_scales(lag):
    """Two outputs with a common long wave."""
    near, far = gaussian(lag, [0.4] * lag.shape[-1]), gaussian(lag, [1.0] * lag.shape[-1])
    return torch.stack([near + far, far, far, far], dim=-1).unflatten(-1, (2, 2))


def closed_form(kernel):
    def signature(lag):
        values = kernel(lag, torch.zeros_like(lag[:1])).to_dense().detach()
        return values.unflatten(0, (len(lag), -1))

    return signature


SIGNATURES = {
    "two_scales_1d": (lambda: two_scales, 1, 1e-8),  # K₀ ends where it is 1e-8 of K₀(0)
    "two_scales_2d": (lambda: two_scales, 2, 1e-8),
    "curl_free": (
        lambda: closed_form(gp_orff.CurlFreeKernel(base("rbf", 2), num_dims=2)),
        2,
        1e-9,
    ),
    "other_units": (
        lambda: (
            lambda lag: 1e-6 * gaussian(lag, [0.05, 900.0])[:, None, None] * torch.eye(2).to(lag)
        ),
        2,
        1e-9,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(name):
    make, num_dims, tolerance = SIGNATURES[name]
    signature = make()
    lengths = [1.0, 2000.0] if name == "other_units" else [3.0] * num_dims
    kernel = gp_orff.SpectralMatrixKernel.from_signature(signature, [(0, s) for s in lengths])
    x = points(6, num_dims, scale=1.0) * torch.tensor(lengths, dtype=torch.float64)
    expected = signature((x.unsqueeze(1) - x).flatten(0, 1))
    p = expected.shape[-1]
    expected = expected.unflatten(0, (6, 6)).transpose(1, 2).reshape(6 * p, 6 * p)
    size = expected.abs().max()
    assert (kernel(x).to_dense() - expected).abs().max() / size < tolerance
    grid = gp_orff.ORFFKernel(kernel, gp_orff.Grid.for_data(x, tolerance=1e-6))
    assert (grid(x).to_dense() - expected).abs().max() / size < 1e-5
    assert not any(parameter.requires_grad for parameter in kernel.parameters())


@pytest.mark.slow
def test_signatures_in_a_model_keep_their_shape():
    kernel = gp_orff.SpectralMatrixKernel.from_signature(two_scales, [(0, 3)])
    x = points(20, 1, scale=3.0)
    y = torch.cat([x.sin(), x.cos()], dim=-1)
    model = gp_orff.VectorFieldGP(ScaleKernel(kernel)).fit(x, y, progress=False)
    lag = torch.tensor([[0.0], [0.5]], dtype=torch.float64)
    ratio = model.kernel(lag).to_dense()[0, 2] / model.kernel(lag).to_dense()[0, 0]
    expected = two_scales(lag)[:, 0, 0]
    assert ratio.item() == pytest.approx((expected[1] / expected[0]).item(), abs=1e-7)


BAD_SIGNATURES = {
    "box": (lambda lag: (lag.abs() < 1).double().unsqueeze(-1), "without negative eigenvalues"),
    "correlation_above_one": (
        lambda lag: (
            gaussian(lag, [1.0])[:, None, None]
            * torch.tensor([[1.0, 1.5], [1.5, 1.0]], dtype=torch.float64)
        ),
        "no process has this covariance",
    ),
    "one_way": (
        lambda lag: torch.stack(
            [gaussian(lag - s, [1.0]) for s in (0, 0.5, 0.5, 0)], dim=-1
        ).unflatten(-1, (2, 2)),
        "as every covariance has",
    ),
    "asymmetric": (
        lambda lag: (
            gaussian(lag, [1.0])[:, None, None]
            * torch.tensor([[1.0, 0.5], [0.0, 1.0]], dtype=torch.float64)
        ),
        "as every covariance has",
    ),
    "does_not_vanish": (lambda lag: torch.cos(lag).unsqueeze(-1), "vanishes at large lags"),
    "nan": (lambda lag: (lag / lag).unsqueeze(-1), "finite"),
    "shape": (lambda lag: gaussian(lag, [1.0]), r"matrices \(17, p, p\)"),
}


@pytest.mark.parametrize("name", BAD_SIGNATURES)
def test_bad_signatures(name):
    signature, message = BAD_SIGNATURES[name]
    with pytest.raises(ValueError, match=message):
        gp_orff.SpectralMatrixKernel.from_signature(signature, [(0, 3)])


def test_bad_domains_of_signatures():
    for domain in ([(1, 1)], [(0, math.inf)], [(2, 1)], (0, 3)):
        with pytest.raises(ValueError, match="low < high"):
            gp_orff.SpectralMatrixKernel.from_signature(two_scales, domain)


def test_trained_base_kernels_of_signatures_are_refused():
    kernel = gp_orff.SpectralMatrixKernel.from_signature(two_scales, [(0, 3)])
    kernel.base_kernel.requires_grad_(True)
    with pytest.raises(ValueError, match="frozen base kernel"):
        gp_orff.ORFFKernel(kernel, gp_orff.MonteCarlo(8))(points(3, 1)).to_dense()
