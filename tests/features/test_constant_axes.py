"""Constant inputs: features whose frequencies along these inputs are summed."""

import pytest
import torch
from gpytorch.kernels import (
    MaternKernel,
    MultitaskKernel,
    RBFKernel,
    RQKernel,
    SpectralMixtureKernel,
)

import gp_orff
from gp_orff import nufft
from gp_orff.features.assemble import draw as draw_frequencies
from gp_orff.features.chunked import box_of
from gp_orff.features.truncation import truncated_variance
from gp_orff.kernels.tree import spectra_of, terms
from gp_orff.symbols.base import Identity
from tests.support.fields import draw, uniform

HEIGHT = 0.4
SPACE = (0, 1, 2)
BASES = {
    "rbf": (lambda: RBFKernel(ard_num_dims=3), 1e-9),
    "matern": (lambda: MaternKernel(nu=2.5, ard_num_dims=3), 1e-2),
    "rq": (lambda: RQKernel(ard_num_dims=3), 1e-4),
}
KERNELS = {
    "curl_free": lambda base: gp_orff.CurlFreeKernel(base, num_dims=3),
    "divergence_free": lambda base: gp_orff.DivergenceFreeKernel(base, num_dims=3),
    "helmholtz": lambda base: gp_orff.HelmholtzKernel(base, num_dims=3),
    "separable": lambda base: MultitaskKernel(base, num_tasks=2, rank=1),
}


def base_of(name, scale=1.0):
    base = BASES[name][0]().double()
    base.lengthscale = scale * torch.tensor([0.9, 1.1, 1.3])
    if name == "rq":
        base.alpha = torch.tensor([1.5])
    return base


def kernel_of(field, name, scale=1.0):
    torch.manual_seed(0)  # gpytorch draws the mixing matrix from the global state
    return KERNELS[field](base_of(name, scale)).double()


def plane(points, seed=0):
    """Points of the square [0, 2]² at one height."""
    return torch.cat([uniform(points, 2, seed=seed), torch.full((points, 1), HEIGHT).double()], -1)


def flat_grid(x, **options):
    box = box_of(x)
    return gp_orff.Grid(domain=box, data=box, lengthscale_range=(1.0, 1.0), **options)


def model_of(kernel, rule, x, noise=0.1):
    model = gp_orff.VectorFieldGP(kernel, frequencies=rule)
    model.likelihood.noise = noise
    y = torch.stack([torch.sin(x[:, 0]), torch.cos(x[:, 1]), x[:, 0] * x[:, 1]], dim=-1)
    return model.condition(x, y + 0.3 * draw(*y.shape, seed=1))


def pair_of_models(x, tolerance=1e-8):
    """By features and by the exact kernel."""
    rules = flat_grid(x, tolerance=tolerance), gp_orff.Auto(exact_values=10**6)
    return [model_of(kernel_of("curl_free", "rbf"), rule, x) for rule in rules]


@pytest.mark.parametrize("name", BASES)
@pytest.mark.parametrize("order", [0, 1])
def test_weights_are_sums_over_the_frequencies_along_the_input(name, order):
    """A sum over ω_a of the density times ω_a^{2t}; with ω_a = sinh u it converges to rounding."""
    (spectrum,) = spectra_of(terms(base_of(name))[0])
    scale = spectrum.second_moments(3)[2].item() if order else 1.0
    u = torch.linspace(-14, 14, 1401, dtype=torch.float64)
    across = u.sinh()
    for at in ([0.7, 1.3], [4.0, -0.2]):
        plane_frequency = torch.tensor([at]).double()
        found = spectrum.marginal((0, 1), order).log_density(plane_frequency).exp().item()
        omega = torch.cat([plane_frequency.expand(len(u), 2), across.unsqueeze(-1)], -1)
        values = across ** (2 * order) * spectrum.log_density(omega).exp() * u.cosh()
        assert scale * found == pytest.approx(0.02 * values.sum().item(), rel=1e-8)


@pytest.mark.parametrize("name", BASES)
@pytest.mark.parametrize("field", KERNELS)
def test_covariances_in_the_plane_are_those_of_the_kernel(field, name):
    x, z = plane(6), plane(5, seed=3)
    kernel, tolerance = kernel_of(field, name), BASES[name][1]
    exact = kernel(x, z).to_dense()
    size = kernel(x[:1], x[:1]).to_dense().diagonal().mean()
    every = torch.cat([x, z])
    summed = gp_orff.ORFFKernel(kernel, flat_grid(every, tolerance=tolerance)).double()
    # truncation and aliasing are each up to the tolerance, of a trace of three components
    assert (summed(x, z).to_dense() - exact).abs().max() < 6 * tolerance * size
    assert summed.frequencies[0].lattice.constant.tolist() == [False, False, True]
    assert not summed.frequencies[0].lattice.indices[:, 2].any()


def test_two_features_for_each_frequency_in_the_plane():
    x = plane(6)
    kernel = kernel_of("curl_free", "rbf")
    summed, whole = (
        gp_orff.ORFFKernel(kernel, flat_grid(x, tolerance=1e-5, sum_constant=choice))
        for choice in (True, False)
    )
    lattice = summed.frequencies[0].lattice
    assert summed.num_features <= 2 * (2 * len(lattice.indices))
    assert 3 * summed.num_features < whole.num_features


def test_a_product_with_time_and_a_station():
    """Time is summed where it is constant; space where a station does not move."""
    space = gp_orff.CurlFreeKernel(RBFKernel(), num_dims=3, active_dims=SPACE)
    kernel = (space * RBFKernel(active_dims=(3,))).double()
    moving = torch.cat([plane(6), torch.full((6, 1), 2.0).double()], -1)
    station = torch.cat([torch.full((6, 3), HEIGHT).double(), uniform(6, 1)], -1)
    for x in (moving, station):
        summed = gp_orff.ORFFKernel(kernel, flat_grid(x, tolerance=1e-9)).double()
        exact = kernel(x[:3], x[3:]).to_dense()
        assert torch.allclose(summed(x[:3], x[3:]).to_dense(), exact, rtol=0, atol=1e-8)
    # one cosine and one sine of time for each component
    assert summed.num_features <= 3 * 2 * len(summed.frequencies[0].lattice.indices)


def test_points_of_one_place_need_one_feature_for_each_component():
    x = torch.full((2, 3), HEIGHT).double()
    kernel = kernel_of("curl_free", "rq")
    summed = gp_orff.ORFFKernel(kernel, flat_grid(x, tolerance=1e-4)).double()
    assert summed.frequencies[0].num_frequencies == 3
    assert torch.allclose(summed(x[:1], x[1:]).to_dense(), kernel(x[:1]).to_dense())


def test_transforms_without_frequencies_along_an_axis():
    """Against the sums written out; FINUFFT at 1e-12."""
    phases, strengths, modes = draw(20, 3), draw(20, 3, seed=1), (2, 0, 1)
    ranges = [torch.arange(-m, m + 1).double() for m in modes]
    angles = phases @ torch.cartesian_prod(*ranges).mT
    waves = torch.complex(angles.cos(), angles.sin())
    sums = nufft.type1(phases, strengths, modes)
    assert sums.shape == (3, 5, 1, 3)
    assert torch.allclose(sums.flatten(1), strengths.mT.to(waves) @ waves, atol=1e-9)
    values = nufft.type2(phases, sums)
    assert torch.allclose(values, (waves @ sums.flatten(1).mT).real, atol=1e-8)


@pytest.mark.parametrize("name", BASES)
@pytest.mark.parametrize("field", KERNELS)
def test_only_what_is_cut_in_the_plane_counts_as_truncated(field, name):
    """The variance of the features and δ add up to K(0), up to aliasing; δ is the tolerance."""
    x, tolerance = plane(6), max(BASES[name][1], 1e-6)
    kernel = kernel_of(field, name)
    draws = draw_frequencies(kernel, flat_grid(x, tolerance=tolerance), 3)
    delta = truncated_variance(Identity(), kernel, draws, ())[0].diagonal()
    summed = gp_orff.ORFFKernel(kernel, flat_grid(x, tolerance=tolerance)).double()
    variance = kernel(x[:1], x[:1]).to_dense().diagonal()
    features = summed(x[:1], x[:1].clone() + 0.0).to_dense().diagonal()
    assert (delta < 2 * tolerance * variance).all()
    assert (delta > 0.02 * tolerance * variance).all()
    assert torch.allclose(features, variance, rtol=3 * tolerance)


def test_evidence_is_that_of_the_whole_lattice_and_of_the_exact_kernel():
    x = plane(40)
    summed, exact = pair_of_models(x, tolerance=1e-10)
    rule = flat_grid(x, tolerance=1e-10, sum_constant=False)
    whole = model_of(kernel_of("curl_free", "rbf"), rule, x)
    values = [m.log_marginal_likelihood().item() for m in (summed, whole, exact)]
    assert values[0] == pytest.approx(values[1], rel=1e-8)  # 1e-10 of the variance over the noise
    assert values[0] == pytest.approx(values[2], rel=1e-8)
    at = plane(5, seed=4)
    assert torch.allclose(summed.posterior().mean(at), whole.posterior().mean(at), atol=1e-8)


@pytest.mark.parametrize("name", BASES)
def test_gradients_of_the_evidence_by_finite_differences(name):
    """Central differences: an error of h² and rounding over h, about 1e-7 for h = 1e-5."""
    x = plane(30)
    kernel = kernel_of("curl_free", name, scale=1.5)
    model = model_of(kernel, flat_grid(x, tolerance=1e-3, max_features=600), x)
    inference, held = model.state.inference, model.state
    assert inference.draws[0].lattice.constant.any()
    parameters = list(kernel.parameters())
    gradients = torch.autograd.grad(held.log_marginal_likelihood(), parameters)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        for index in range(parameter.numel()):
            values = []
            for step in (1e-5, -1e-5):
                with torch.no_grad():
                    parameter.view(-1)[index] += step
                    values.append(held.log_marginal_likelihood().item())
                    parameter.view(-1)[index] -= step
            slope = (values[0] - values[1]) / 2e-5
            assert gradient.flatten()[index].item() == pytest.approx(slope, rel=1e-5, abs=1e-5)


def test_predictions_in_the_plane_and_off_it():
    x = plane(40)
    summed, exact = (model.posterior() for model in pair_of_models(x))
    above = plane(5, seed=4) + torch.tensor([0.0, 0.0, 0.3]).double()
    for points in (plane(5, seed=4), above, plane(5, seed=5)):
        assert torch.allclose(summed.mean(points), exact.mean(points), atol=1e-4)
        assert torch.allclose(summed.variance(points), exact.variance(points), rtol=1e-3)


@pytest.mark.filterwarnings("ignore:the truncated variance of the given grid", "ignore:all points")
@pytest.mark.parametrize("symbol", [gp_orff.Divergence(), gp_orff.Jacobian()])
def test_symbols_take_the_whole_lattice(symbol):
    x, at = plane(40), plane(5, seed=4)
    models = pair_of_models(x)
    summed, exact = (model.posterior()(at, symbol) for model in models)
    assert torch.allclose(summed.mean, exact.mean, atol=1e-3)
    assert torch.allclose(summed.variance, exact.variance, rtol=1e-3, atol=1e-6)


def test_observed_symbols_take_the_whole_lattice():
    x, at = plane(40), plane(5, seed=4)
    means = []
    for model in pair_of_models(x):
        model.observe(at, torch.zeros(5), gp_orff.Divergence(), noise=1e-2)
        means.append(model.posterior().mean(at))
    assert torch.allclose(*means, atol=1e-4)


def test_paths_of_symbols_say_what_they_need():
    summed, _ = pair_of_models(plane(40))
    paths = summed.posterior().sample_paths(2)
    assert paths(plane(3)).shape == (2, 3, 3)
    with pytest.raises(NotImplementedError, match="sum_constant=False"):
        paths(plane(3), gp_orff.Divergence())


def test_a_spectrum_without_a_marginal_keeps_the_whole_lattice():
    kernel = SpectralMixtureKernel(num_mixtures=1, ard_num_dims=2).double()
    kernel.mixture_means, kernel.mixture_scales = 0.1, 0.2
    x = uniform(6, 2)
    x[:, 1] = 0.5
    rule = flat_grid(x, tolerance=1e-3)
    lattice = gp_orff.ORFFKernel(kernel, rule, num_dims=2).frequencies[0].lattice
    assert not lattice.constant.any()
    assert lattice.indices[:, 1].any()


def test_states_of_grids_load_with_and_without_constant_inputs():
    x = plane(6)
    kernel = kernel_of("curl_free", "rbf")
    summed, whole = (
        gp_orff.ORFFKernel(kernel, flat_grid(x, tolerance=1e-3, sum_constant=choice)).double()
        for choice in (True, False)
    )
    expected = [grid(x).to_dense() for grid in (summed, whole)]
    added = ("constant", "direction")
    older = {k: v for k, v in whole.state_dict().items() if not k.endswith(added)}
    newer = summed.state_dict()
    for state, value in zip((newer, older), expected, strict=True):
        fresh = gp_orff.ORFFKernel(kernel, flat_grid(x, tolerance=1e-2)).double()
        fresh.load_state_dict(state)
        assert torch.allclose(fresh(x).to_dense(), value)
