"""Exact field kernels, compared with automatic differentiation, and constraints of their fields."""

import gpytorch
import pytest
import torch
from gpytorch.kernels import MaternKernel, RBFKernel, RBFKernelGrad, ScaleKernel

import gp_orff
from gp_orff.kernels.derivatives import polynomial
from tests.support import oracles
from tests.support.fields import draw
from tests.support.models import dense_noise, evidence, gradient, vector_gp
from tests.support.registry import FIELDS, SMOOTH, base

DIMENSIONS = [
    (f, d) for f, (cls, *_) in FIELDS.items() for d in (1, 2, 3, 5) if d >= cls.minimum_dims
]


@pytest.mark.parametrize("name", SMOOTH)
@pytest.mark.parametrize(("field", "num_dims"), DIMENSIONS)
def test_matches_the_autodiff_hessian(field, name, num_dims):
    cls, build, _ = FIELDS[field]
    kernel = cls(base(name, num_dims), num_dims=num_dims)
    x, z = draw(6, num_dims), draw(5, num_dims, seed=1)
    expected = oracles.exact(name, build, x, z, kernel.base_kernel.lengthscale.detach().squeeze(0))
    assert (kernel(x, z).to_dense() - expected).abs().max() <= 1e-10
    pairs = kernel(x[:5], z, diag=True)
    torch.testing.assert_close(pairs, kernel(x[:5], z).to_dense().diagonal())


@pytest.mark.parametrize("num_dims", [2, 3])
@pytest.mark.parametrize("name", SMOOTH)
@pytest.mark.parametrize("field", FIELDS)
def test_lag_zero_is_the_limit(field, name, num_dims):
    cls, build, _ = FIELDS[field]
    kernel = cls(base(name, num_dims), num_dims=num_dims)
    ell = kernel.base_kernel.lengthscale.detach().squeeze()
    x = draw(1, num_dims).requires_grad_()
    at_zero = kernel(x).to_dense()
    expected = build(-oracles.second_moment(name) * torch.diag(ell**-2))
    assert (at_zero - expected).abs().max() <= 1e-10
    torch.testing.assert_close(kernel(x, diag=True), expected.diagonal())
    nearby = oracles.exact(name, build, x.detach() + 1e-6, x.detach(), ell)
    assert (at_zero - nearby).abs().max() <= 1e-4  # Matérn 3/2 approaches it like ‖τ‖
    gradients = torch.autograd.grad(at_zero.sum(), [x, kernel.base_kernel.raw_lengthscale])
    assert all(gradient.isfinite().all() for gradient in gradients)


def test_is_the_hessian_block_of_gpytorchs_gradient_kernel():
    ours = gp_orff.CurlFreeKernel(base("rbf", 3), num_dims=3)
    theirs = RBFKernelGrad(ard_num_dims=3).double()
    theirs.lengthscale = ours.base_kernel.lengthscale.detach()
    x, z = draw(4, 3), draw(5, 3, seed=1)
    block = theirs(x, z).to_dense().reshape(4, 4, 5, 4)[:, 1:, :, 1:].reshape(12, 15)
    torch.testing.assert_close(ours(x, z).to_dense(), block)


def test_sums_scales_and_active_dims_of_the_potential():
    smooth, rough = RBFKernel(active_dims=[0, 2]), MaternKernel(nu=2.5, ard_num_dims=3)
    scaled = ScaleKernel(rough)
    scaled.outputscale = 0.3
    kernel = gp_orff.CurlFreeKernel(smooth + scaled, num_dims=3).double()
    x, z = draw(4, 3), draw(3, 3, seed=1)
    first = gp_orff.CurlFreeKernel(RBFKernel(), num_dims=2).double()
    embedded = torch.zeros(4, 3, 3, 3, dtype=torch.float64)
    block = first(x[:, [0, 2]], z[:, [0, 2]]).to_dense().reshape(4, 2, 3, 2)
    embedded[:, [[0], [2]], :, [0, 2]] = block.permute(1, 3, 0, 2)
    second = gp_orff.CurlFreeKernel(rough, num_dims=3)(x, z).to_dense()
    expected = embedded.reshape(12, 9) + 0.3 * second
    torch.testing.assert_close(kernel(x, z).to_dense(), expected)


def test_a_third_party_kernel_needs_only_its_radial_derivatives():
    class Cauchy(gpytorch.kernels.Kernel):
        has_lengthscale = True

    kernel = Cauchy(ard_num_dims=2).double()
    kernel.lengthscale = torch.tensor([0.6, 1.2], dtype=torch.float64)
    with pytest.raises(NotImplementedError, match=r"registered radial derivatives.*got Cauchy"):
        gp_orff.CurlFreeKernel(kernel, num_dims=2)
    gp_orff.radial_derivatives.register(Cauchy, lambda k, s: (-((1 + s) ** -2), 2 * (1 + s) ** -3))
    field = gp_orff.DivergenceFreeKernel(ScaleKernel(kernel), num_dims=2).double()

    def k(tau):
        return field.base_kernel.outputscale / (1 + (tau / kernel.lengthscale).square().sum())

    x, z = draw(1, 2), draw(1, 2, seed=1)
    hessian = torch.autograd.functional.hessian(k, (x - z).squeeze(0))
    torch.testing.assert_close(field(x, z).to_dense(), oracles.divergence_free(hessian))
    with pytest.raises(NotImplementedError, match=r"registered spectral density.*got Cauchy"):
        gp_orff.ORFFKernel(field, gp_orff.MonteCarlo(8))


def test_active_dims_of_the_field_are_space():
    kernel = gp_orff.DivergenceFreeKernel(RBFKernel(), num_dims=2, active_dims=(0, 2)).double()
    plain = gp_orff.DivergenceFreeKernel(RBFKernel(), num_dims=2).double()
    x = draw(5, 3)
    torch.testing.assert_close(kernel(x).to_dense(), plain(x[:, [0, 2]]).to_dense())


def test_helmholtz_is_the_scaled_sum_with_its_own_copies():
    potential = RBFKernel()
    kernel = gp_orff.HelmholtzKernel(potential, num_dims=2).double()
    kernel.curl_free.outputscale, kernel.divergence_free.outputscale = 0.5, 2.0
    kernel.divergence_free.base_kernel.base_kernel.lengthscale = 0.3
    x = draw(4, 2)
    parts = [
        scale * cls(base_kernel, num_dims=2)(x).to_dense()
        for scale, cls, base_kernel in [
            (0.5, gp_orff.CurlFreeKernel, kernel.curl_free.base_kernel.base_kernel),
            (2.0, gp_orff.DivergenceFreeKernel, kernel.divergence_free.base_kernel.base_kernel),
        ]
    ]
    torch.testing.assert_close(kernel(x).to_dense(), sum(parts))
    assert potential.lengthscale.item() == pytest.approx(0.6931, abs=1e-4)  # untouched


@pytest.mark.parametrize("field", FIELDS)
def test_batch_equals_loop(field):
    cls = FIELDS[field][0]
    shape = torch.Size([3])
    batch = ScaleKernel(cls(RBFKernel(batch_shape=shape), num_dims=2), batch_shape=shape).double()
    batch.outputscale = torch.tensor([0.3, 1.0, 3.0])
    batch.base_kernel.base_kernel.lengthscale = torch.tensor([0.5, 1.0, 2.0]).view(3, 1, 1)
    x = draw(5, 2)
    assert batch(x).shape == (3, 10, 10)
    for i in range(3):
        single = cls(RBFKernel(), num_dims=2).double()
        single.base_kernel.lengthscale = batch.base_kernel.base_kernel.lengthscale[i].detach()
        expected = batch.outputscale[i] * single(x).to_dense()
        torch.testing.assert_close(batch(x).to_dense()[i], expected, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(batch(x, diag=True)[i], expected.diagonal())


def stencil(center, step):
    """Central-difference points: (2·d, d), pairs x ± h e_i."""
    offsets = step * torch.eye(len(center), dtype=torch.float64)
    return torch.cat([center + offsets, center - offsets])


def central_jacobian(values, step):
    """J_ij = ∂_j f_i from values on a stencil (2·d, p)."""
    forward, backward = values.chunk(2)
    return ((forward - backward) / (2 * step)).mT


@pytest.mark.parametrize("num_dims", [2, 3])
@pytest.mark.parametrize("field", FIELDS)
def test_samples_obey_the_law_by_finite_differences(field, num_dims):
    step = 1e-3
    kernel = FIELDS[field][0](base("rbf", num_dims), num_dims=num_dims)
    covariance = kernel(stencil(torch.zeros(num_dims, dtype=torch.float64), step)).to_dense()
    values, vectors = torch.linalg.eigh(covariance)  # eigh: near-singular, but exact to rounding
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(len(values), 20, generator=generator, dtype=torch.float64)
    samples = vectors @ (values.clamp_min(0).sqrt().unsqueeze(-1) * normal)
    for sample in samples.mT:
        jacobian = central_jacobian(sample.reshape(-1, num_dims), step)
        residual = jacobian - jacobian.mT if field == "curl_free" else jacobian.diagonal().sum()
        # truncation O(h²) of third derivatives, and eigenvalues lost to rounding: √ε/h
        assert residual.abs().max() < 1e-4 * jacobian.abs().max()


@pytest.mark.parametrize("num_dims", [2, 3])
@pytest.mark.parametrize("name", ["rbf", "matern52"])
@pytest.mark.parametrize("field", FIELDS)
def test_posterior_means_obey_the_law_by_autograd(field, name, num_dims):
    kernel = FIELDS[field][0](base(name, num_dims), num_dims=num_dims)
    model = vector_gp(draw(12, num_dims), draw(12, num_dims, seed=1), kernel, noise=0.01)
    model.eval()
    for x in draw(4, num_dims, seed=2):
        jacobian = torch.autograd.functional.jacobian(
            lambda t: model(t.unsqueeze(0)).mean.squeeze(0), x
        )
        residual = jacobian - jacobian.mT if field == "curl_free" else jacobian.trace()
        assert residual.abs().max() <= 1e-11 * jacobian.abs().max()


def test_large_sets_train_by_cholesky_when_asked():
    """Beyond 800 numbers; the exact kernel is an ordinary gpytorch kernel: evidence and gradient
    are those of dense algebra."""
    x, y = draw(410, 2), draw(410, 2, seed=1)
    kernel = gp_orff.CurlFreeKernel(RBFKernel(), num_dims=2).double()
    model = vector_gp(x, y, kernel, noise=0.1)
    with gpytorch.settings.max_cholesky_size(10_000):
        found = evidence(model)
        slopes = gradient(found, model)
    noisy = kernel(x).to_dense() + dense_noise(model, 410)
    expected = oracles.log_density(noisy, y - model.mean_module(x))
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=0)
    wanted = gradient(expected, model)
    torch.testing.assert_close(slopes, wanted, rtol=1e-7, atol=1e-7)


def test_active_dims_of_both_parts_of_a_helmholtz_kernel_are_space():
    kernel = gp_orff.HelmholtzKernel(num_dims=2, active_dims=(0, 2)).double()
    x = draw(5, 3)
    plain = gp_orff.HelmholtzKernel(num_dims=2).double()(x[:, [0, 2]])
    torch.testing.assert_close(kernel(x).to_dense(), plain.to_dense())


def test_what_is_no_polynomial_in_some_directions_only_is_none():
    """Its first output is one, its second is not."""

    def function(omega):
        first = omega[:, 0].square()
        return torch.stack([first, first.sqrt().cos()], dim=-1).unsqueeze(-1)

    with pytest.raises(NotImplementedError, match="is a polynomial in ω"):
        polynomial(function, 2, 2)


def test_a_field_without_inputs_is_refused():
    with pytest.raises(ValueError, match="needs num_dims >= 1, got 0"):
        gp_orff.CurlFreeKernel(RBFKernel(), num_dims=0)
