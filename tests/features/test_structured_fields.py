"""Fields on structured frequencies: explicit frequencies, exact kernels, and dense algebra."""

import gpytorch
import numpy as np
import pytest
import torch
from gpytorch.kernels import MaternKernel, RBFKernel, RQKernel
from torch.autograd import gradcheck

import gp_orff
from gp_orff.features.assemble import draw as drawn
from gp_orff.features.assemble import expand
from gp_orff.features.expansion import GradientExpansion
from gp_orff.regression import ORFFRidge
from tests.support.fields import draw
from tests.support.registry import STRUCTURED_RULES

MEASURES = ("trace", "base")


def ard(kernel, num_dims):
    kernel = kernel.double()
    kernel.lengthscale = torch.linspace(0.8, 1.6, num_dims, dtype=torch.float64)
    return kernel


def curl_free(num_dims=3, base=RBFKernel):
    return gp_orff.CurlFreeKernel(ard(base(ard_num_dims=num_dims), num_dims), num_dims=num_dims)


KERNELS = {
    "rbf": curl_free,
    "matern": lambda: curl_free(base=lambda **options: MaternKernel(nu=2.5, **options)),
    "rq": lambda: curl_free(base=RQKernel),
    "permuted": lambda: gp_orff.CurlFreeKernel(
        RBFKernel().double(), num_dims=3, active_dims=(2, 0, 1)
    ),
    "some of the inputs": lambda: gp_orff.CurlFreeKernel(
        RBFKernel(active_dims=(0, 2)).double(), num_dims=3
    ),
    "scaled": lambda: gpytorch.kernels.ScaleKernel(curl_free()).double(),
    "divergence-free": lambda: gp_orff.DivergenceFreeKernel(
        ard(RBFKernel(ard_num_dims=3), 3), num_dims=3
    ),
    "helmholtz": lambda: gp_orff.HelmholtzKernel(num_dims=3).double(),
    "product": lambda: curl_free() * RBFKernel().double(),
}


@pytest.mark.parametrize("measure", MEASURES)
@pytest.mark.parametrize("name", KERNELS)
@torch.no_grad()
def test_fastfood_is_unbiased(name, measure):
    """The mean of 100 seeds, within 5 standard errors of the exact kernel."""
    exact, x = KERNELS[name](), draw(4, 3)
    rules = [gp_orff.Fastfood(64, seed=seed, measure=measure) for seed in range(100)]
    found = torch.stack(
        [gp_orff.ORFFKernel(exact, rule, num_dims=3)(x).to_dense() for rule in rules]
    )
    expected, error = exact(x).to_dense(), found.std(0) / 10
    assert ((found.mean(0) - expected).abs() < 5 * error + 1e-12).all()
    assert error.max() < 0.12 * expected.diagonal().max()  # so that it can fail


@pytest.mark.parametrize("measure", MEASURES)
@pytest.mark.parametrize("rule", STRUCTURED_RULES.values(), ids=STRUCTURED_RULES)
@torch.no_grad()
def test_curl_free_features_by_written_out_frequencies(rule, measure):
    """K̃ = Σ w cos⟨ω, δ⟩ ωωᵀ, with ω from the phases of unit vectors; w = 1/D, or E‖z‖²/(D‖z‖²)
    with the length ‖z‖ in d′ dimensions, which the draw has as its base."""
    kernel = gp_orff.ORFFKernel(curl_free(), rule(20, measure=measure))
    x, (frequencies,) = draw(5, 3), kernel.frequencies
    omega = kernel.phases(torch.eye(3).double()).mT
    weights = torch.full((20,), 1 / 20, dtype=torch.float64)
    if measure == "trace":
        weights = weights * rule.projection.padded(3) / frequencies.bases[0][:, 0].square()
    cosines = torch.cos(kernel.phases(x)[:, None] - kernel.phases(x))
    expected = torch.einsum("k,nmk,ki,kj->nimj", weights, cosines, omega, omega).reshape(15, 15)
    torch.testing.assert_close(kernel(x).to_dense(), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("rule", STRUCTURED_RULES.values(), ids=STRUCTURED_RULES)
@torch.no_grad()
def test_products_are_those_of_the_dense_features(rule, name):
    kernel = gp_orff.ORFFKernel(KERNELS[name](), rule(20), num_dims=3)
    x, phi = draw(7, 3), kernel.features(draw(7, 3))
    operator = kernel.feature_operator(x)
    theta, values = draw(phi.shape[1], 2, seed=1), draw(21, 2, seed=2)
    torch.testing.assert_close(operator @ theta, phi @ theta, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(operator.mT @ values, phi.mT @ values, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(kernel(x).to_dense(), phi @ phi.mT, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(kernel(x) @ values, phi @ (phi.mT @ values), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "name", ["rbf", "matern", "rq", "scaled", "some of the inputs", "product", "divergence-free"]
)
def test_which_fields_write_no_frequency_out(name):
    kernel = KERNELS[name]()
    features = expand(kernel, drawn(kernel, gp_orff.Fastfood(20), 3), 3)
    assert isinstance(features, GradientExpansion) == (name not in ("product", "divergence-free"))


@pytest.mark.parametrize("product", ["apply", "adjoint"])
def test_gradients_of_products(product):
    """By points and by the tensors that follow the hyperparameters, against differences."""
    kernel = curl_free()
    features = expand(kernel, drawn(kernel, gp_orff.Fastfood(10), 3), 3)
    rows = features.num_features if product == "apply" else 4
    right = draw(rows, 2 if product == "apply" else 6, seed=1).requires_grad_()
    tensors = [tensor.detach().requires_grad_() for tensor in features.tensors]

    def of(x, right, *tensors):
        return getattr(features.rebuild(*tensors), product)(x, right)

    assert gradcheck(of, (draw(4, 3).requires_grad_(), right, *tensors))


@torch.no_grad()
def test_some_columns_with_other_variances():
    """As halves of a sample are made: the frequencies 1 and 4, with three times the variance."""
    kernel = curl_free()
    features = expand(kernel, drawn(kernel, gp_orff.Fastfood(10), 3), 3)
    x, columns = draw(4, 3), torch.tensor([1, 4, 11, 14])
    some = features.select(columns, torch.full((4,), 3.0).double())
    expected = 3**0.5 * features.features(x)[:, columns]
    torch.testing.assert_close(some.features(x), expected, rtol=1e-12, atol=1e-12)
    weights = draw(4, 1)
    torch.testing.assert_close(some.apply(x, weights).reshape(-1, 1), expected @ weights)
    (accuracy,) = gp_orff.ORFFKernel(kernel, gp_orff.Fastfood(400)).accuracy()
    assert 200 < accuracy.effective_sample_size <= 400


@pytest.mark.parametrize("solver", ["cholesky", "lsmr", "sgd"])
def test_a_field_of_forces(solver):
    """Weights by dense algebra; sgd to its tolerance, the others to rounding times cond."""
    x = draw(150, 6)
    y = -x * torch.exp(-x.square().sum(-1, keepdim=True) / 8)  # the gradient of an energy
    kernel = gp_orff.CurlFreeKernel(RBFKernel().double(), num_dims=6)
    kernel.base_kernel.lengthscale = 2.0
    settings = {"alpha": 1e-2, "laplacian_weight": 0.0 if solver == "lsmr" else 0.1}
    model = ORFFRidge(kernel, gp_orff.Fastfood(64), solver=solver, **settings)
    model.fit(x.numpy(), y.numpy())
    with torch.no_grad():
        phi = model.kernel_.features(x)
    laplacian = gp_orff.regression.graph_laplacian(x).toarray()
    m = settings["laplacian_weight"] * torch.kron(
        torch.from_numpy(laplacian), torch.eye(6).double()
    )
    system = phi.mT @ phi + phi.mT @ m @ phi + 1e-2 * torch.eye(phi.shape[1]).double()
    expected = (phi @ torch.linalg.solve(system, phi.mT @ y.reshape(-1, 1))).reshape(150, 6).numpy()
    tolerance = 0.02 if solver == "sgd" else 1e-7
    error = np.linalg.norm(model.predict(x.numpy()) - expected) / np.linalg.norm(expected)
    assert error < tolerance
