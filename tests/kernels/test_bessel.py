"""`BesselKernel`: covariances against closed forms, and frequencies against sums of points."""

import itertools
import math

import gpytorch
import mpmath
import numpy as np
import pytest
import scipy.integrate
import scipy.stats
import torch
from gpytorch.kernels import LCMKernel, MultitaskKernel
from torch.autograd import gradcheck, gradgradcheck

import gp_orff
from gp_orff.features.assemble import draw, expand
from tests.support import fields

DIMENSIONS = (1, 2, 3, 8, 50, 198, 199, 200, 400, 1000, 5000)
RULES = {
    "monte_carlo": gp_orff.MonteCarlo,
    "orthogonal": gp_orff.Orthogonal,
    "quasi_monte_carlo": gp_orff.QuasiMonteCarlo,
}


def bessel(power, num_dims, lengthscale=1.0, **kwargs):
    kernel = gp_orff.BesselKernel(power, num_dims, **kwargs).double()
    kernel.lengthscale = torch.as_tensor(lengthscale, dtype=torch.float64)
    return kernel


def by_mpmath(num_dims, s, order):
    """The derivative of Γ(ν + 1)(2/r)^ν J_ν(r) by s = r², in as many digits as it takes."""
    with mpmath.workdps(40):
        b = mpmath.mpf(num_dims) / 2 + 1 + order
        value = mpmath.hyp0f1(b, -mpmath.mpf(s) / 4, maxprec=10**6)
        return float(value * mpmath.mpf(-0.25) ** order / mpmath.rf(b - order, order))


@pytest.mark.slow
@pytest.mark.parametrize("order", [0, 1, 2])
@pytest.mark.parametrize("num_dims", DIMENSIONS)
def test_equals_mpmath(num_dims, order):
    """From zero past the first zeros of the Bessel function, near r = d/2, to large r."""
    scale, zero = math.sqrt(num_dims + 2), num_dims / 2
    r = [0.0, 1e-8, 1e-3, *np.linspace(0.1, 9, 12) * scale, zero, 1.05 * zero, zero + 5, 200.0]
    s = torch.tensor(r, dtype=torch.float64).square()
    found = bessel(1, num_dims).correlation(s, order)
    expected = torch.from_numpy(np.array([by_mpmath(num_dims, own, order) for own in s.tolist()]))
    size = 1.0 if order == 0 else expected[0].abs().item()
    assert (found - expected).abs().max() <= 1e-13 * size
    assert found.isfinite().all()
    assert bessel(1, num_dims).correlation(torch.tensor([1e12]).double(), order).abs() < 1e-5 * size


@pytest.mark.parametrize("num_dims", [1, 2, 7, 300])
@pytest.mark.parametrize("power", [1, 2, 5])
def test_can_be_differentiated_twice(power, num_dims):
    kernel = bessel(power, num_dims)
    s = torch.tensor([0.0, 0.3, 2.0, 9.0, 40.0], dtype=torch.float64) * (num_dims + 2) / 2
    s.requires_grad_()
    assert gradcheck(kernel.correlation, s)
    assert gradgradcheck(kernel.correlation, s)
    for order in (1, 2):
        (slope,) = torch.autograd.grad(kernel.correlation(s, order - 1).sum(), s)
        torch.testing.assert_close(kernel.correlation(s, order), slope, rtol=1e-9, atol=1e-16)
    x = fields.draw(4, num_dims)
    x[1] = x[0]  # a pair at lag zero
    gradients = torch.autograd.grad(
        kernel(x.requires_grad_()).to_dense()[1:].sum(), [x, kernel.raw_lengthscale]
    )
    assert all(gradient.isfinite().all() for gradient in gradients)


CLOSED_FORMS = {1: lambda r: r.sin() / r, 3: lambda r: 3 * (r.sin() - r * r.cos()) / r**3}


@pytest.mark.parametrize("power", [1, 2, 3])
@pytest.mark.parametrize("num_dims", CLOSED_FORMS)
def test_covariances_in_closed_form(num_dims, power):
    x, z = fields.draw(6, num_dims), fields.draw(6, num_dims, seed=1)
    ell = torch.linspace(0.4, 0.9, num_dims).double()
    kernel = bessel(power, num_dims, ell, ard_num_dims=num_dims)
    r = ((x[:, None] - z) / ell).norm(dim=-1)
    expected = CLOSED_FORMS[num_dims](r) ** power
    torch.testing.assert_close(kernel(x, z).to_dense(), expected, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(kernel(x, z, diag=True), expected.diagonal(), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(kernel(x, diag=True), torch.ones(6).double(), rtol=0, atol=0)
    few = bessel(power, num_dims, 0.7, active_dims=tuple(range(1, num_dims + 1)))
    wide = torch.cat([fields.draw(6, 1, seed=2), x], dim=-1)
    r = (x[:, None] - x).norm(dim=-1)[0, 1:] / 0.7
    expected = CLOSED_FORMS[num_dims](r) ** power
    torch.testing.assert_close(few(wide).to_dense()[0, 1:], expected, rtol=1e-8, atol=1e-12)


def test_batches_and_single_precision():
    scales = torch.tensor([0.3, 0.8]).double().reshape(2, 1, 1)
    batch = bessel(2, 4, scales, batch_shape=torch.Size([2]))
    x = fields.draw(5, 4)
    each = torch.stack([bessel(2, 4, ell.item())(x).to_dense() for ell in scales])
    torch.testing.assert_close(batch(x).to_dense(), each)
    orff = gp_orff.ORFFKernel(batch, gp_orff.Fastfood(20_000))
    assert (orff(x).to_dense() - each).abs().max() < 5 / math.sqrt(20_000)
    single = batch.float()(x.float()).to_dense()
    assert single.dtype == torch.float32
    assert (single - each).abs().max() < 1e-5


def sum_of_points(power, num_dims, number, seed=1):
    """‖Σ ξ_i‖, ξ_i uniform in the ball, as Le et al. write it, by plain sampling."""
    rng = np.random.default_rng(seed)
    g = rng.standard_normal((power, number, num_dims))
    g *= rng.random((power, number, 1)) ** (1 / num_dims) / np.linalg.norm(g, axis=-1)[..., None]
    return np.linalg.norm(g.sum(0), axis=-1)


@pytest.mark.slow
@pytest.mark.parametrize("num_dims", [1, 2, 3, 16, 500])
@pytest.mark.parametrize("power", [1, 2, 6])
def test_radii_are_norms_of_sums(power, num_dims):
    law = gp_orff.spectrum(bessel(power, num_dims))
    u = np.random.default_rng(0).random((1000, law.num_coordinates(num_dims)))
    radii = law.radial_base(u, num_dims, 0)
    assert radii.shape == (1000, 1)
    assert radii.max() <= power
    sample = sum_of_points(power, num_dims, 1000)
    assert scipy.stats.ks_2samp(radii[:, 0], sample).pvalue > 1e-3
    more = sum_of_points(2 * power, num_dims, 1000)
    assert scipy.stats.ks_2samp(radii[:, 0], more).pvalue < 1e-3  # it can fail
    for order in (0, 1, 2, 3):
        powers = radii[:, 0] ** (2 * order)
        error = 5 * powers.std() / math.sqrt(1000)
        assert abs(powers.mean() - law.moment(order, num_dims)) <= error + 1e-12


def test_moments():
    """Of one point, by quadrature over its radius; of several, E‖Σξ‖² = t d/(d + 2)."""
    for num_dims, order in itertools.product((1, 4), (0.5, 1, 2.5)):
        value, _ = scipy.integrate.quad(
            lambda r, d=num_dims, m=order: d * r ** (d - 1) * r ** (2 * m), 0, 1
        )
        law = gp_orff.spectrum(bessel(1, num_dims))
        assert law.moment(order, num_dims) == pytest.approx(value)
    law = gp_orff.spectrum(bessel(5, 8, 0.5))
    assert law.moment(1, 8) == pytest.approx(5 * 8 / 10)
    curvature = 4 * 5 / 10 * torch.ones(8).double()  # −∂²k/∂r_i² = t/(d + 2)/ℓ²
    torch.testing.assert_close(law.second_moments(8), curvature)
    with pytest.raises(NotImplementedError, match=r"integer order m .* got m=0\.5"):
        law.moment(0.5, 8)


def estimates(kernel, rule, x, seeds=60, **kwargs):
    num_dims, found = x.shape[-1], []
    with torch.no_grad():
        for seed in range(seeds):
            rows = expand(kernel, draw(kernel, rule(128, seed=seed, **kwargs), num_dims), num_dims)
            features = rows.features(x)
            found.append(features[: kernel.num_outputs_per_input(x, x)] @ features.mT)
    return torch.stack(found)


def is_unbiased(samples, exact):
    error, stderr = samples.mean(0) - exact, samples.std(0) / len(samples) ** 0.5
    return bool((error.abs() <= 5 * stderr + 1e-12).all())


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("power", "num_dims"), [(1, 2), (2, 1), (3, 5), (4, 20)])
def test_random_features_are_unbiased(power, num_dims, rule):
    kernel = bessel(power, num_dims, 0.7)
    x = torch.linspace(0, 1, 4).double()[:, None] * torch.linspace(1, 2, num_dims).double()
    samples = estimates(kernel, RULES[rule], x)
    exact = kernel(x).to_dense()[:1]
    assert is_unbiased(samples, exact)
    assert not is_unbiased(samples, exact**1.2)  # it can fail


@pytest.mark.parametrize(
    ("rule", "num_dims"),
    [(gp_orff.FourierFastfood, 5), (gp_orff.StructuredOrthogonal, 32), (gp_orff.Fastfood, 8)],
)
def test_frequencies_of_structured_rules_end_at_the_power(rule, num_dims):
    """‖ω‖ ≤ t/ℓ, with the law of a sum of points."""
    kernel = gp_orff.ORFFKernel(bessel(3, num_dims, 0.5), rule(4000))
    omega = kernel.phases(torch.eye(num_dims).double()).mT
    radii = 0.5 * omega.norm(dim=-1).detach().numpy()
    assert radii.max() <= 3
    assert scipy.stats.ks_2samp(radii, sum_of_points(3, num_dims, 4000)).pvalue > 1e-3


@pytest.mark.parametrize("power", [1, 2, 3])
def test_curl_free_kernels_are_exact(power):
    """Against the Hessian of the closed form in three dimensions, by automatic differentiation."""
    ell = torch.tensor([0.4, 0.6, 0.9]).double()
    kernel = gp_orff.CurlFreeKernel(bessel(power, 3, ell, ard_num_dims=3), num_dims=3)
    x, z = fields.draw(4, 3), fields.draw(3, 3, seed=1)
    tau = (x[:, None] - z).reshape(-1, 3)
    k = torch.func.hessian(lambda t: CLOSED_FORMS[3]((t / ell).norm()) ** power)
    blocks = -torch.func.vmap(k)(tau).reshape(4, 3, 3, 3)
    expected = blocks.transpose(1, 2).reshape(12, 9)
    torch.testing.assert_close(kernel(x, z).to_dense(), expected, rtol=1e-7, atol=1e-9)
    at_zero = kernel(x[:1]).to_dense()
    torch.testing.assert_close(at_zero, torch.diag(power / 5 / ell**2))


@pytest.mark.parametrize("field", [gp_orff.CurlFreeKernel, gp_orff.DivergenceFreeKernel])
def test_features_of_fields_are_drawn_from_the_density(field):
    kernel = field(bessel(2, 2, 0.3), num_dims=2)
    x = fields.draw(3, 2)
    samples = estimates(kernel, gp_orff.MonteCarlo, x, measure="base")
    assert is_unbiased(samples, kernel(x).to_dense()[:2])
    with pytest.raises(NotImplementedError, match='use measure="base"'):
        gp_orff.ORFFKernel(kernel, gp_orff.MonteCarlo(8))


X = torch.rand(30, 2, generator=torch.Generator().manual_seed(0)).double()
MISTAKES = {
    "power": (lambda: bessel(0, 2), ValueError, "power to be a positive integer, got 0"),
    "dims": (lambda: bessel(1, 2.5), ValueError, "num_dims to be a positive integer, got 2.5"),
    "ard": (lambda: bessel(1, 3, ard_num_dims=2), ValueError, "num_dims=3, got 2"),
    "active": (lambda: bessel(1, 3, active_dims=(1,)), ValueError, "num_dims=3, got 1"),
    "width": (lambda: bessel(1, 3)(X).to_dense(), ValueError, r"3 inputs.*got 2.*num_dims=2"),
    "feature_width": (
        lambda: gp_orff.ORFFKernel(bessel(1, 3), gp_orff.MonteCarlo(8))(X).to_dense(),
        ValueError,
        "3 columns, got 2",
    ),
    "orff_dims": (
        lambda: gp_orff.ORFFKernel(bessel(1, 3), gp_orff.MonteCarlo(8), num_dims=2),
        ValueError,
        "same inputs",
    ),
    "composite_dims": (
        lambda: gp_orff.ORFFKernel(
            gp_orff.SeparableKernel(bessel(1, 3), torch.ones(2, 1).double(), active_dims=(0, 1)),
            gp_orff.MonteCarlo(8),
        ),
        ValueError,
        "3 dimensions.*got 2",
    ),
    "field_dims": (
        lambda: gp_orff.CurlFreeKernel(bessel(1, 2), num_dims=3),
        ValueError,
        "expects num_dims=3 in its base kernel, got 2",
    ),
    "padding": (
        lambda: gp_orff.ORFFKernel(bessel(1, 3), gp_orff.Fastfood(8)),
        ValueError,
        "gp_orff.QuasiMonteCarlo or gp_orff.Orthogonal",
    ),
    "padding_orthogonal": (
        lambda: gp_orff.ORFFKernel(bessel(1, 3), gp_orff.StructuredOrthogonal(8)),
        ValueError,
        "got 32.*gp_orff.QuasiMonteCarlo or gp_orff.Orthogonal",
    ),
    "grid": (
        lambda: gp_orff.ORFFKernel(bessel(1, 2), gp_orff.Grid.for_data(X)),
        NotImplementedError,
        "GridSpectrum, got BesselSpectrum.*use a random rule",
    ),
    "hermite": (
        lambda: gp_orff.ORFFKernel(bessel(1, 2), gp_orff.GaussHermite(8)),
        NotImplementedError,
        "expects RBF",
    ),
    "shared": (
        lambda: gp_orff.ORFFKernel(bessel(1, 2) + bessel(2, 2), gp_orff.MonteCarlo(8, shared=True))(
            X
        ).to_dense(),
        NotImplementedError,
        "shared=False",
    ),
    "lcm": (
        lambda: gp_orff.ORFFKernel(
            LCMKernel([bessel(1, 2), bessel(2, 2)], num_tasks=2).double(), gp_orff.MonteCarlo(8)
        )(X).to_dense(),
        NotImplementedError,
        "gp_orff.Fastfood for an LCMKernel",
    ),
    "spectral_matrix": (
        lambda: gp_orff.SpectralMatrixKernel(
            bessel(1, 2), lambda omega: omega.unsqueeze(-1), num_outputs=2, num_dims=2
        )(X).to_dense(),
        NotImplementedError,
        "put it inside ORFFKernel",
    ),
    "subclass": (
        lambda: gp_orff.spectrum(type("Other", (gp_orff.BesselKernel,), {"forward": None})(1, 2)),
        NotImplementedError,
        "which overrides it",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes(mistake):
    build, error, message = MISTAKES[mistake]
    with pytest.raises(error, match=message):
        build()


def test_auto_draws_frequencies_at_random():
    kernel = gp_orff.ORFFKernel(bessel(2, 2, 0.3), gp_orff.Auto().for_data(X))
    assert "no grid" in kernel.frequencies[0].reason
    assert (kernel(X).to_dense() - kernel.base_kernel(X).to_dense()).abs().max() < 0.01


def test_terms_of_a_linear_model_of_coregionalisation_are_drawn_apart():
    kernel = LCMKernel([bessel(1, 2, 0.4), bessel(3, 2, 0.9)], num_tasks=2).double()
    orff = gp_orff.ORFFKernel(kernel, gp_orff.Fastfood(20_000))
    exact = kernel(X).to_dense()
    assert (orff(X).to_dense() - exact).abs().max() < 0.05 * exact.abs().max()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*poorly:gp_orff.DataWarning")
@pytest.mark.parametrize("rule", [gp_orff.Auto(), gp_orff.Fastfood(64)])
def test_models_of_fields(rule, tmp_path):
    """A fit finds the lengthscale; a file restores the model."""
    x = torch.rand(25, 2, generator=torch.Generator().manual_seed(1)).double()
    y = torch.stack([torch.sin(4 * x[:, 0]), torch.cos(3 * x[:, 1])], dim=-1)
    y = y + 0.01 * fields.draw(25, 2)
    kernel = MultitaskKernel(gp_orff.BesselKernel(3, 2), num_tasks=2, rank=1)
    model = gp_orff.VectorFieldGP(kernel, frequencies=rule)
    with gp_orff.settings.check_features(False):  # of 256 random features
        mean = model.fit(x, y).posterior().mean(x)
        model.save(tmp_path / "model")
        loaded = gp_orff.VectorFieldGP.load(tmp_path / "model")
        torch.testing.assert_close(loaded.posterior().mean(x), mean)
    assert (mean - y).square().mean().sqrt() < 0.1
    kept = loaded.kernel.data_covar_module
    assert isinstance(kept, gp_orff.BesselKernel)
    assert (kept.power, kept.num_dims) == (3, 2)


def test_paths_of_exact_models_have_the_law_of_the_posterior():
    """Variances of 1500 paths over those of the field: within five standard errors of 3.7 %, where
    few waves make the estimates of all places depend on each other."""
    x, xs = fields.uniform(40, 2), fields.uniform(10, 2, seed=1)
    kernel = gp_orff.CurlFreeKernel(bessel(3, 2, 0.2), num_dims=2)
    field = fields.conditioned(kernel, x, fields.draw(40, 2), None).posterior()
    ratio = field.sample_paths(1500)(xs).var(0) / field.variance(xs)
    assert (ratio - 1).abs().max() < 5 * (2 / 1500) ** 0.5


def test_priors_and_constraints():
    kernel = gp_orff.BesselKernel(
        2,
        3,
        lengthscale_prior=gpytorch.priors.GammaPrior(3.0, 6.0),
        lengthscale_constraint=gpytorch.constraints.Interval(0.1, 2.0),
    )
    assert [name for name, *_ in kernel.named_priors()] == ["lengthscale_prior"]
    assert kernel.lengthscale.item() == pytest.approx(1.05)
