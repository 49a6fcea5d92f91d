"""A constant mean with a flat prior: values of any size, and quantities that depend on a field.

The dense formulas are as follows. Let H be the constants at the data, and
ĉ = (HᵀK⁻¹H)⁻¹HᵀK⁻¹y. Let h be the quantity of a constant field, k its covariance with the data, and
R = h − kᵀK⁻¹H. Then

    mean  h ĉ + kᵀK⁻¹(y − H ĉ) ,    covariance  Cov − kᵀK⁻¹k + R (HᵀK⁻¹H)⁻¹ Rᵀ .
"""

import gpytorch
import numpy as np
import pytest
import torch
from gpytorch.kernels import RBFKernel, ScaleKernel

import gp_orff
from gp_orff.symbols.base import Symbol
from tests.support.fields import draw, unit_cube

ROOT = torch.tensor([[1.0], [0.9], [0.8]]).double()
ROUNDING = {"rtol": 1e-7, "atol": 1e-7}


def temperatures(level):
    """Three that go together: 100 of each with a standard deviation of 5, and noise of 0.05."""
    x = torch.from_numpy(np.sort(np.random.default_rng(0).uniform(0, 10, (100, 1)), 0))
    k = torch.exp(-0.5 * (x - x.mT).square()) + 1e-10 * torch.eye(100)
    f = 5 * torch.linalg.cholesky(k) @ draw(100, 1)
    return x, level + f * ROOT.mT + 0.05 * draw(100, 3, seed=1)


def together(**options):
    kernel = ScaleKernel(gp_orff.SeparableKernel(RBFKernel(), ROOT)).double()
    kernel.outputscale, kernel.base_kernel.base_kernel.lengthscale = 25.0, 1.0
    likelihood = gpytorch.likelihoods.MultitaskGaussianLikelihood(3, has_task_noise=False).double()
    likelihood.noise = 0.05**2
    return gp_orff.VectorFieldGP(kernel, likelihood=likelihood, **options)


def kriging(noisy, cross, prior, ones, image, y):
    """ĉ, and mean and covariance of a quantity."""
    solved, weights = torch.linalg.solve(noisy, ones), torch.linalg.solve(noisy, cross.mT)
    inverse = torch.linalg.inv(ones.mT @ solved)
    constant = inverse @ solved.mT @ y
    rest = image - weights.mT @ ones
    covariance = prior - weights.mT @ cross.mT + rest @ inverse @ rest.mT
    return constant, image @ constant + weights.mT @ (y - ones @ constant), covariance


RULES = {
    "exact": lambda: None,
    "statistics": lambda: gp_orff.Grid(domain=((-5.0, 15.0),), tolerance=1e-12),
    "written out": lambda: gp_orff.Grid(domain=((-70.0, 80.0),), tolerance=1e-12),
}


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("level", [0.0, 290.0, 1e4])
@pytest.mark.parametrize("file", [False, True])
def test_of_outputs_that_go_together(rule, level, file, tmp_path):
    """The data tell 10⁵ times less of the mean that all three share than of their differences."""
    x, y = temperatures(level)
    model = together(frequencies=RULES[rule]()).condition(x, y, merge=0)
    if file:
        model.save(tmp_path / "model.pt")
        model = gp_orff.VectorFieldGP.load(tmp_path / "model.pt")
    xs = torch.tensor([[5.0], [7.3], [13.0]]).double()
    with torch.no_grad():
        noisy = model.kernel(x).to_dense() + 0.05**2 * torch.eye(300)
        cross, prior = model.kernel(xs, x).to_dense(), model.kernel(xs).to_dense()
    ones, image = torch.eye(3).double().repeat(100, 1), torch.eye(3).double().repeat(3, 1)
    constant, mean, covariance = kriging(noisy, cross, prior, ones, image, y.flatten())
    residual = y.flatten() - ones @ constant
    quad = residual @ torch.linalg.solve(noisy, residual)
    evidence = -0.5 * (quad + torch.logdet(noisy) + 300 * np.log(2 * np.pi))
    field = model.posterior()
    scale = 1e-6 if rule == "exact" else 1e-5  # of a grid
    squares = y.square().sum().item() / 0.05**2  # of which the evidence is a small difference
    rounding = 10 * scale + 10 * np.finfo(float).eps * squares
    torch.testing.assert_close(model.log_marginal_likelihood(), evidence, rtol=0, atol=rounding)
    atol = 10 * scale + 3e-8 * level  # the data tell 10⁵ times less of some directions
    torch.testing.assert_close(field.mean(xs).flatten(), mean, rtol=0, atol=atol)
    wanted = covariance.diagonal().sqrt()
    torch.testing.assert_close(field.variance(xs).sqrt().flatten(), wanted, rtol=1e-3, atol=scale)
    constants = torch.stack([m.constant.detach() for m in model.mean.base_means]).flatten()
    torch.testing.assert_close(constants, constant, rtol=0, atol=atol)


def test_under_student_t_noise(tmp_path):
    """The Gaussian posterior under the weights that the model gave its readings."""
    x, y = temperatures(290.0)
    y[::9] += 3.0
    model = together()
    model.likelihood = gp_orff.MultitaskStudentTLikelihood(3).double()
    model.likelihood.noise = 0.05**2
    model.condition(x, y, merge=0)
    (part,) = model.state.data.observations
    assert part.weight.min() < 0.1
    noise = model.state.snapshot(model.mean).noises[""].detach()
    noisy = torch.kron(torch.diag(1 / part.weight), noise)
    xs = torch.tensor([[5.0], [13.0]]).double()
    with torch.no_grad():
        noisy = noisy + model.kernel(x).to_dense()
        cross, prior = model.kernel(xs, x).to_dense(), model.kernel(xs).to_dense()
    ones, image = torch.eye(3).double().repeat(100, 1), torch.eye(3).double().repeat(2, 1)
    _, mean, covariance = kriging(noisy, cross, prior, ones, image, y.flatten())
    model.save(tmp_path / "model.pt")
    for own in (model, gp_orff.VectorFieldGP.load(tmp_path / "model.pt")):
        field = own.posterior()
        # With a condition number of 1e6, weights of 2e4 in the mean have rounding errors of 1e-6.
        torch.testing.assert_close(field.mean(xs).flatten(), mean, rtol=0, atol=5e-6)
        torch.testing.assert_close(field(xs).covariance_matrix, covariance, **ROUNDING)


# What the data say nothing of -----------------------------------------------------------------


def beams(spread):
    """Components of a constant field of 3000, 4000 along directions within an angle."""
    angle = 0.3 + spread * torch.linspace(-1, 1, 30).double()
    directions = torch.stack([angle.cos(), angle.sin()], dim=-1)
    return directions, directions @ torch.tensor([3000.0, 4000.0]).double() + 0.1 * draw(30, 1)[
        :, 0
    ]


def scalar_noise(kernel, p=2):
    likelihood = gpytorch.likelihoods.MultitaskGaussianLikelihood(p, has_task_noise=False).double()
    likelihood.noise = 0.01
    return gp_orff.VectorFieldGP(kernel.double(), likelihood=likelihood)


@pytest.mark.parametrize("options", [{}, {"exact_values": 0}])
def test_beams_that_are_nearly_parallel_tell_of_both_components(options):
    """With 10⁻⁵ of the information across them: by dense algebra."""
    x, (u, y) = unit_cube(30), beams(1e-4)
    model = scalar_noise(gp_orff.HelmholtzKernel(num_dims=2))
    model.frequencies = gp_orff.Auto(tolerance=1e-9, **options)
    model.condition(x, y, directions=u, merge=0)
    xs = unit_cube(4, seed=5)
    rows = torch.zeros(30, 60).double()
    rows[torch.arange(30)[:, None], torch.arange(60).reshape(30, 2)] = u
    with torch.no_grad():
        noisy = rows @ model.kernel(x).to_dense() @ rows.mT + 0.01 * torch.eye(30)
        cross, prior = model.kernel(xs, x).to_dense() @ rows.mT, model.kernel(xs).to_dense()
    image = torch.eye(2).double().repeat(4, 1)
    constant, mean, covariance = kriging(noisy, cross, prior, u, image, y)
    assert (constant / covariance.diagonal()[:2].sqrt()).abs().min() > 1
    field = model.posterior()
    scale = covariance.diagonal().max().sqrt().item()
    torch.testing.assert_close(field.mean(xs).flatten(), mean, rtol=0, atol=1e-4 * scale)
    torch.testing.assert_close(field(xs).covariance_matrix, covariance, rtol=1e-4, atol=1e-3)


def test_what_no_observation_depends_on_is_named():
    x, (u, y) = unit_cube(30), beams(0.0)
    model = scalar_noise(gp_orff.CurlFreeKernel(num_dims=2))
    with pytest.warns(gp_orff.DataWarning, match=r"outputs along \(-0.296, 0.955\)"):
        model.condition(x, y, directions=u)
    constant = torch.stack([m.constant.detach() for m in model.mean.base_means]).flatten()
    torch.testing.assert_close(constant[0] * u[0, 1], constant[1] * u[0, 0])
    assert abs((u[0] @ constant).item() - y.mean().item()) < 1  # 4048
    assert np.isnan(model.report.standard_errors()["mean"]).all()
    east = torch.stack([y, torch.full_like(y, torch.nan)], dim=-1)
    with pytest.warns(
        gp_orff.DataWarning, match=r"along \(0, 1\): this part of the mean is assumed"
    ):
        model.condition(x, east, missing="mask")
    assert model.mean.base_means[1].constant.item() == 0
    model.mean = gpytorch.means.MultitaskMean(gpytorch.means.ZeroMean(), num_tasks=2)
    model.condition(x, east, missing="mask")  # no warning for a mean that is known


# Derived quantities ---------------------------------------------------------------------------


def of_field(kernel, x, rule=None, **options):
    model = scalar_noise(kernel, x.shape[-1])
    y = torch.tensor([3.0, -20.0, 7.0][: x.shape[-1]]).double() + 0.1 * draw(*x.shape)
    model.frequencies = rule or gp_orff.Auto(**options)
    return model.condition(x, y, merge=0)


class Turned(Symbol):
    """(∂₂ψ, −∂₁ψ) of one output ψ, in two dimensions."""

    order, homogeneous = 1, True

    def num_outputs(self, p):
        return 2

    def __call__(self, omega, p):
        return 1j * torch.stack([omega[:, 1:], -omega[:, :1]], dim=-2)


@pytest.mark.parametrize(
    ("kernel", "back", "d"),
    [
        (gp_orff.CurlFreeKernel, gp_orff.Jacobian(2) @ gp_orff.Potential(), 2),
        (gp_orff.DivergenceFreeKernel, Turned() @ gp_orff.StreamFunction(), 2),
        (gp_orff.DivergenceFreeKernel, gp_orff.Curl() @ gp_orff.VectorPotential(), 3),
    ],
)
def test_derivatives_of_potentials_are_the_field(kernel, back, d):
    """Means, covariances and sample paths, the constant mean included."""
    x, xs = unit_cube(30, 0, d), unit_cube(5, 5, d)
    with gp_orff.settings.check_features(False):  # whose posterior is exact, for their kernel
        model = of_field(kernel(num_dims=d), x, gp_orff.MonteCarlo(200, seed=0))
    field = model.posterior()
    mean = field.mean(xs, back).flatten()
    torch.testing.assert_close(mean, field.mean(xs).flatten(), **ROUNDING)
    covariance = field(xs, back).covariance_matrix
    torch.testing.assert_close(covariance, field(xs).covariance_matrix, **ROUNDING)
    paths = field.sample_paths(3, seed=1)
    torch.testing.assert_close(paths(xs, back), paths(xs), **ROUNDING)


@pytest.mark.parametrize("options", [{}, {"exact_values": 0, "tolerance": 1e-7}])
def test_differences_of_potentials_are_line_integrals(options):
    """Under a curl-free kernel, of the field with its mean; of a grid to its tolerance."""
    x = unit_cube(40)
    field = of_field(gp_orff.CurlFreeKernel(num_dims=2), x, **options).posterior()
    start, step = unit_cube(4, seed=5), torch.tensor([0.3, 0.2]).double()
    along = gp_orff.LineIntegral(torch.stack([torch.zeros(2).double(), step]))
    integral = field(start, along)
    joint = field(torch.cat([start + step, start]), gp_orff.Potential(torch.zeros(2)))
    less = torch.cat([torch.eye(4), -torch.eye(4)], dim=1).double()
    tolerance = {"rtol": 0, "atol": 1e-6 if not options else 1e-4}
    torch.testing.assert_close(integral.mean, less @ joint.mean, **tolerance)
    covariance = less @ joint.covariance_matrix @ less.mT
    torch.testing.assert_close(integral.covariance_matrix, covariance, **tolerance)


def test_background_assigns_the_mean():
    """To a potential or a part, or leaves it out."""
    x, xs, origin = unit_cube(40), unit_cube(4, seed=5), torch.tensor([0.1, 0.7]).double()
    pure = of_field(gp_orff.CurlFreeKernel(num_dims=2), x)
    both = of_field(gp_orff.HelmholtzKernel(num_dims=2), x)
    for model in (pure, both):
        field = model.posterior()
        constant = torch.stack([m.constant.detach() for m in model.mean.base_means]).flatten()
        bare, full = (field.potential(xs, origin, background=own).mean for own in (False, True))
        torch.testing.assert_close(full - bare, (xs - origin) @ constant, **ROUNDING)
        usual = full if model is pure else bare
        torch.testing.assert_close(field.potential(xs, origin).mean, usual, **ROUNDING)
    bare, full = (field.curl_free_part(xs, background=own) for own in (False, True))
    torch.testing.assert_close(full.mean - bare.mean, constant.expand(4, 2), **ROUNDING)
    psi = [field.stream_function(xs, origin, background=own).mean for own in (False, True)]
    turned = (xs - origin) @ torch.stack([-constant[1], constant[0]])
    torch.testing.assert_close(psi[1] - psi[0], turned, **ROUNDING)
    rest = field.divergence_free_part(xs)
    joined = full.mean + rest.mean
    torch.testing.assert_close(joined, field.mean(xs), **ROUNDING)


def waves(x, rows):
    """Φ with covariances Re Φ Φᴴ of a harmonic field f = −∇V of sources in a plane one below, where
    Cov[V(x), V(z)] = 6 / R, by Gauss nodes in the wave numbers."""
    k, weight = np.polynomial.legendre.leggauss(80)
    k, weight = 10 * (k + 1), 10 * weight
    angle = 2 * np.pi * np.arange(48) / 48
    omega = k[:, None, None] * np.stack([np.cos(angle), np.sin(angle), 0 * angle + 1j], axis=-1)
    omega, size = omega.reshape(-1, 3), np.repeat(6 * weight / 48, 48)
    wave = np.exp(1j * (x + np.array([0.0, 0, 1])) @ omega.T) * np.sqrt(size)
    return (wave[:, None] * rows(omega).T).reshape(-1, len(omega))


def of_anomaly(omega):
    return (-1j * omega[:, 2] ** 2 / (omega @ MAGNETISATION))[:, None]


MAGNETISATION = np.array([0.4, 0.3, -0.8]) / np.linalg.norm([0.4, 0.3, -0.8])
HARMONIC = {
    "potential": (gp_orff.Potential(), lambda omega: 0 * omega[:, :1] - 1, {}),
    "pole": (
        gp_orff.ReductionToPole(MAGNETISATION),
        of_anomaly,
        {"exact_values": 0, "tolerance": 1e-4, "max_features": 4000},
    ),
}


@pytest.mark.parametrize("name", HARMONIC)
def test_of_a_harmonic_field(name):
    """Neither the potential nor the anomaly at the pole has the constant; both depend on it."""
    symbol, rows, options = HARMONIC[name]
    box = torch.tensor([4.0, 4, 0.5]).double()
    x, xs = box * unit_cube(30, 0, 3), box * unit_cube(4, 5, 3)
    kernel = gp_orff.HarmonicKernel(1, reference_height=0.0, mean_height=0.0).double()
    kernel.depths, kernel.variances = 1.0, 1.0
    model = of_field(kernel, x, **options)
    data, wanted = waves(x.numpy(), lambda omega: -1j * omega), waves(xs.numpy(), rows)
    products = [(a @ b.conj().T).real for a, b in ((data, data), (wanted, data), (wanted, wanted))]
    noisy, cross, prior = map(torch.from_numpy, products)
    noisy = noisy + 0.01 * torch.eye(90)
    ones, y = torch.eye(3).double().repeat(30, 1), model.state.data.observations[0].y.flatten()
    none = torch.zeros(4, 3).double()
    _, mean, covariance = kriging(noisy, cross, prior, ones, none, y)
    known = prior - cross @ torch.linalg.solve(noisy, cross.mT)
    sd, scale = covariance.diagonal().sqrt(), covariance.diagonal().max().item()
    assert (sd / known.diagonal().sqrt()).max() > 1.2
    found, tolerance = model.posterior()(xs, symbol), 1e-6 if name == "potential" else 1e-2
    size = mean.abs().max().item()
    torch.testing.assert_close(found.mean, mean, rtol=0, atol=3 * tolerance * max(size, scale**0.5))
    torch.testing.assert_close(found.covariance_matrix, covariance, rtol=0, atol=tolerance * scale)


@pytest.mark.parametrize("constant", [None, 80.0])
def test_parts_have_no_mean(constant):
    """Of a large mean, known or not: k₁ᵀK⁻¹(y − H ĉ) for the term with the covariance k₁."""
    x, xs = unit_cube(30), unit_cube(4, seed=5)
    y = (80.0 + torch.stack([torch.sin(4 * x[:, 1]), torch.cos(4 * x[:, 0])], -1)).flatten()
    kernel = gp_orff.HelmholtzKernel(num_dims=2).double()
    mean = gpytorch.means.MultitaskMean(gpytorch.means.ConstantMean(), 2)
    if constant is not None:
        mean.initialize(**{f"base_means.{i}.constant": constant for i in range(2)})
        mean.requires_grad_(False)
    model = gp_orff.VectorFieldGP(kernel, mean=mean)
    model.likelihood.noise = 0.01
    field = model.condition(x, y.reshape(30, 2), merge=0).posterior()
    with torch.no_grad():
        noisy = kernel(x).to_dense() + 0.01 * torch.eye(60)
        cross = kernel.curl_free(xs, x).to_dense()
    ones = torch.eye(2).double().repeat(30, 1)
    best = kriging(noisy, cross, 0.0, ones, torch.zeros(8, 2).double(), y)[0]
    given = best if constant is None else torch.full((2,), constant).double()
    expected = cross @ torch.linalg.solve(noisy, y - ones @ given)
    part = field.part("curl_free").mean(xs)
    torch.testing.assert_close(part.flatten(), expected, **ROUNDING)
    both = part + field.part("divergence_free").mean(xs) + given
    torch.testing.assert_close(both, field.mean(xs), **ROUNDING)


def test_circulation_of_a_vector_potential_is_a_flux():
    """Of a constant field: the image of a linear one under an integral, to rounding."""
    path = torch.tensor([[0.0, 0, 0], [1, 0, 0], [1, 2, 0], [0, 2, 0], [0, 0, 0]]).double()
    symbol = gp_orff.LineIntegral(path) @ gp_orff.VectorPotential(background=True)
    value, slope = symbol.of_affine(torch.eye(3).double(), torch.zeros(3, 3, 3).double())
    torch.testing.assert_close(value, torch.tensor([[0.0, 0.0, 2.0]]).double())
    assert not slope.any()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:a lengthscale exceeds:gp_orff.DataWarning")
def test_a_mixture_has_a_mean_of_each_member():
    """∇g is the field for a mixture over hyperparameters, too."""
    x, xs = unit_cube(25), unit_cube(4, seed=5)
    y = torch.tensor([30.0, -5.0]) + torch.stack([x[:, 1], x[:, 0]], -1) + 0.1 * draw(25, 2)
    model = scalar_noise(gp_orff.CurlFreeKernel(num_dims=2)).fit(x, y, progress=False)
    field, origin = model.posterior(marginalize=True), torch.zeros(2)
    step = torch.tensor([0.4, -0.3]).double()
    along = gp_orff.LineIntegral(torch.stack([torch.zeros(2).double(), step]))
    g = [field.potential(at, origin).mean for at in (xs, xs + step)]
    torch.testing.assert_close(g[1] - g[0], field(xs, along).mean, rtol=0, atol=1e-6)
