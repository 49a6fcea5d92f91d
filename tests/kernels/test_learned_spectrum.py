"""LearnedSpectrumKernel: its covariance, its spectrum, its grids, and fits."""

import math
import pickle

import gpytorch
import numpy as np
import pytest
import scipy.integrate
import torch
from gpytorch.kernels import MultitaskKernel, RBFKernel, ScaleKernel

import gp_orff
from tests.support.fields import draw, uniform

RATES = np.geomspace(64.0, 1 / 64, 7)  # λ⁻² of seven lengths


def learned(num_knots=7, seed=0, ard=None, batch=(), lengthscale=0.6):
    """A kernel with weights of its own."""
    options = {"ard_num_dims": ard, "batch_shape": torch.Size(batch)}
    kernel = gp_orff.LearnedSpectrumKernel(num_knots, **options).double()
    kernel.shape.data = 0.5 * draw(*kernel.shape.shape, seed=seed)
    kernel.lengthscale = lengthscale * torch.linspace(1.0, 1.5, ard or 1).double()
    return kernel


def weights_by_hand(kernel):
    u = -0.5 * np.log(RATES)
    slope, bends = np.split(kernel.shape.detach().numpy(), [1])
    second = np.zeros((5, 7))
    for i in range(5):
        second[i, i : i + 3] = 1, -2, 1
    bent = np.linalg.lstsq(second, 4 * bends, rcond=None)[0]
    weights = np.exp(3 * slope * u + bent - 0.5 * (u / 0.7) ** 2)
    return weights / weights.sum()


def test_the_covariance_is_a_mixture_of_rbf_kernels():
    kernel, x, z = learned(ard=2), uniform(6, 2), uniform(4, 2, seed=1)
    weights = weights_by_hand(kernel)
    square = ((x[:, None] - z) / kernel.lengthscale.detach()).square().sum(-1).numpy()
    expected = sum(w * np.exp(-0.5 * rate * square) for w, rate in zip(weights, RATES, strict=True))
    assert np.allclose(kernel(x, z).to_dense().detach(), expected, atol=1e-13)
    assert np.allclose(kernel(x, x).to_dense().diagonal().detach(), 1.0, atol=1e-13)
    assert np.allclose(kernel(x, diag=True).detach(), 1.0, atol=1e-13)


def test_batches_have_weights_of_their_own():
    kernel = learned(batch=(3,))
    x = uniform(5, 2)
    together = kernel(x).to_dense()
    for i in range(3):
        one = learned()
        one.shape.data = kernel.shape.data[i]
        assert torch.allclose(together[i], one(x).to_dense(), atol=1e-13)


@pytest.mark.parametrize("dims", [2, 3])
@pytest.mark.parametrize("cls", [gp_orff.CurlFreeKernel, gp_orff.DivergenceFreeKernel])
def test_field_kernels_are_those_of_the_mixture(cls, dims):
    """Sums of field kernels of RBF kernels."""
    kernel, x = learned(), uniform(4, dims)
    weights, expected = weights_by_hand(kernel), 0.0
    for weight, rate in zip(weights, RATES, strict=True):
        rbf = RBFKernel().double()
        rbf.lengthscale = 0.6 / torch.tensor(rate, dtype=torch.float64).sqrt()
        expected = expected + weight * cls(rbf, num_dims=dims)(x).to_dense()
    actual = cls(kernel, num_dims=dims)(x).to_dense()
    assert torch.allclose(actual, expected, rtol=1e-12, atol=1e-12 * expected.abs().max().item())


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_the_spectrum_is_the_transform_of_the_kernel(dims):
    """Radial integrals of its density: one, E‖z‖², and the tail; k(r) in one dimension."""
    kernel = learned()
    spectrum = gp_orff.spectrum(kernel)
    sphere = 2 * math.pi ** (dims / 2) / math.gamma(dims / 2)

    def density(log_radius, order=0):
        omega = torch.zeros(1, dims, dtype=torch.float64)
        radius = omega[0, 0] = math.exp(log_radius)
        z = radius * 0.6
        value = spectrum.log_density(omega).exp().item()
        return value * sphere * radius**dims * z ** (2 * order)

    def integral(low, order):
        return scipy.integrate.quad(density, low, 6.0, (order,), limit=200, epsabs=1e-11)[0]

    assert integral(-30.0, 0) == pytest.approx(1.0, abs=1e-8)
    moment = integral(-30.0, 1)
    assert spectrum.moment(1, dims).item() == pytest.approx(moment, rel=1e-8)
    assert spectrum.second_moments(dims).tolist() == pytest.approx([moment / dims / 0.36] * dims)
    beyond = integral(math.log(3.0 / 0.6), 1) / moment
    assert spectrum.tail(3.0, order=1, num_dims=dims) == pytest.approx(beyond, rel=1e-6)


@pytest.mark.parametrize("order", [0, 1])
def test_correlations_are_bounded(order):
    kernel = learned()
    spectrum, lags = gp_orff.spectrum(kernel), torch.linspace(0.01, 8.0, 80).double()
    points = torch.stack([lags, torch.zeros_like(lags)], dim=-1)
    whole = gp_orff.CurlFreeKernel(kernel, num_dims=2) if order else kernel
    values = whole(points, torch.zeros(1, 2).double()).to_dense()
    values = values.unflatten(0, (80, -1)).flatten(1).abs().amax(-1)
    values = values / whole(torch.zeros(1, 2).double()).to_dense()[0, 0]
    bounds = [spectrum.correlation(lag, 0, order) for lag in lags.tolist()]
    assert (values <= torch.tensor(bounds, dtype=torch.float64) * (1 + 1e-12)).all()


def problem(points=150, seed=0):
    x = uniform(points, 2, seed=seed)
    gradient = torch.tensor([5.0, 3.0]).double() * torch.cos(
        x @ torch.tensor([[5.0], [3.0]]).double()
    )
    return x, gradient + 0.3 * draw(points, 2, seed=seed)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["curl_free", "helmholtz", "multitask", "time"])
def test_a_grid_is_the_exact_kernel(name):
    """Evidence, mean and variance, at a tolerance of 1e-7, or what 6000 features reach in time."""
    error = 3e-3 if name == "time" else 1e-3
    x, y = problem(40)
    leaf = learned(seed=3, lengthscale=0.3)
    time = RBFKernel(active_dims=(2,))
    time.lengthscale = 2.0
    leaf.shape.data[0] += 3.0  # log weights rise by nine for a factor e of the length
    kernel = {
        "curl_free": lambda: ScaleKernel(gp_orff.CurlFreeKernel(leaf, num_dims=2)),
        "helmholtz": lambda: gp_orff.HelmholtzKernel(leaf, num_dims=2),
        "multitask": lambda: MultitaskKernel(leaf, num_tasks=2, rank=2),
        "time": lambda: (
            gp_orff.CurlFreeKernel(leaf, num_dims=2, active_dims=(0, 1))
            * RBFKernel(active_dims=(2,))
        ),
    }[name]().double()
    if name == "time":
        x = torch.cat([x, uniform(40, 1, seed=4)], dim=-1)
    found = []
    for rule in (gp_orff.Auto(), gp_orff.Grid.for_data(x, tolerance=1e-7, max_features=6000)):
        model = gp_orff.VectorFieldGP(kernel, frequencies=rule)
        model.likelihood.noise = 0.09
        posterior = model.condition(x, y, merge=0).posterior()
        values = model.log_marginal_likelihood(), posterior.mean(x), posterior.variance(x)
        found.append([value.detach() for value in values])
    for exact, grid in zip(*found, strict=True):
        assert torch.allclose(exact, grid, rtol=error, atol=error * exact.abs().max().item())


@pytest.mark.slow
@pytest.mark.parametrize("continued", [False, True])
def test_gradients_agree_with_differences(continued):
    x, y = problem(25)
    leaf = learned(seed=1)
    leaf.continued = continued
    kernel = ScaleKernel(gp_orff.CurlFreeKernel(leaf, num_dims=2)).double()
    for rule in (gp_orff.Auto(), gp_orff.Grid.for_data(x, max_features=3000)):
        model = gp_orff.VectorFieldGP(kernel, frequencies=rule).double()
        model.condition(x, y)

        def value(model=model):
            return model.log_marginal_likelihood()

        model.zero_grad()
        value().backward()
        gradient = leaf.shape.grad.clone()
        for i, step in enumerate(1e-4 * torch.eye(len(gradient)).double()):
            ends = []
            for sign in (1, -1):
                leaf.shape.data += sign * step
                ends.append(value().item())
                leaf.shape.data -= sign * step
            assert gradient[i].item() == pytest.approx(
                (ends[0] - ends[1]) / 2e-4, rel=1e-6, abs=1e-6
            )


@pytest.mark.slow
def test_it_is_learned_by_default_on_few_and_on_many():
    """No worse than the RBF kernel that made the field; and it is in the report."""
    x, y = problem(120)
    base = gp_orff.LearnedSpectrumKernel(6)
    model = gp_orff.VectorFieldGP(gp_orff.CurlFreeKernel(base, num_dims=2))
    model.fit(x, y, progress=False)
    rbf = gp_orff.VectorFieldGP(gp_orff.CurlFreeKernel(RBFKernel(), num_dims=2))
    rbf.fit(x, y, progress=False)
    evidences = [m.log_marginal_likelihood().item() for m in (model, rbf)]
    assert evidences[0] > evidences[1] - 3
    assert "shape" in str(model.report)


def test_it_is_saved_and_updated(tmp_path):
    x, y = problem(60)
    model = gp_orff.VectorFieldGP(gp_orff.CurlFreeKernel(learned(ard=2), num_dims=2))
    model.condition(x[:50], y[:50]).save(tmp_path / "model.pt")
    again = gp_orff.VectorFieldGP.load(tmp_path / "model.pt")
    for one in (model, again):
        one.update(x[50:], y[50:])
    means = [one.posterior().mean(x) for one in (model, again)]
    assert torch.equal(*means)


def test_it_can_be_pickled_and_its_prior_sampled():
    """As workers need it, and `pyro_sample_from_prior` does."""
    kernel, x = learned(), uniform(4, 2)
    assert torch.equal(pickle.loads(pickle.dumps(kernel))(x).to_dense(), kernel(x).to_dense())
    kernel.sample_from_prior("shape_prior")
    assert kernel.shape.shape == (6,)


def test_priors_take_part_in_gpytorch():
    class Model(gpytorch.models.ExactGP):
        def __init__(self, x, y, likelihood):
            super().__init__(x, y, likelihood)
            self.mean_module = gpytorch.means.ZeroMean()
            self.covar_module = learned()

        def forward(self, x):
            return gpytorch.distributions.MultivariateNormal(
                self.mean_module(x), self.covar_module(x)
            )

    x, y = uniform(10, 1), draw(10)
    likelihood = gpytorch.likelihoods.GaussianLikelihood().double()
    model = Model(x, y, likelihood)
    loss = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)
    before = loss(model(x), y).item()
    plain = model.covar_module
    prior = -0.5 * (plain.shape.square() + math.log(2 * math.pi)).sum().item()
    del plain._priors["shape_prior"]
    assert before == pytest.approx(loss(model(x), y).item() + prior / 10, rel=1e-12)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: gp_orff.LearnedSpectrumKernel(3), "at least 4, got 3"),
        (lambda: gp_orff.LearnedSpectrumKernel(2.5), "num_knots"),
        (lambda: gp_orff.LearnedSpectrumKernel(smoothness=0.0), "smoothness > 0"),
        (lambda: gp_orff.LearnedSpectrumKernel(smoothness=float("inf")), "finite smoothness"),
    ],
)
def test_bad_arguments_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("name", ["space", "time"])
def test_positions_without_extent_are_refused(name):
    """In all the inputs that a learned spectrum reads; the model is unchanged."""
    x, y = problem(20)
    kernel = gp_orff.CurlFreeKernel(learned(), num_dims=2)
    if name == "time":
        y, constant = y[:, :1], torch.full((20, 1), 3.0).double()
        kernel = RBFKernel(active_dims=(0, 1)) * gp_orff.LearnedSpectrumKernel(active_dims=(2,))
        x, dims = torch.cat([x, constant], dim=-1), r"\[2\]"
    else:
        x, dims = torch.ones_like(x), r"\[0, 1\]"
    model = gp_orff.VectorFieldGP(kernel)
    before = [value.clone() for value in model.parameters()]
    with pytest.raises(ValueError, match=f"an extent in at least one .*columns {dims}"):
        model.fit(x, y, progress=False)
    assert all(map(torch.equal, before, model.parameters()))


@pytest.mark.slow
def test_one_input_may_lack_extent():
    x, y = uniform(100, 2), 0.1 * draw(100, 2)
    x[:, 1] = 2.0
    y += torch.sin(9 * x[:, :1]) * torch.tensor([1.0, 0.5]).double()
    base = gp_orff.LearnedSpectrumKernel(5)
    model = gp_orff.VectorFieldGP(gp_orff.CurlFreeKernel(base, num_dims=2)).fit(
        x, y, progress=False
    )
    assert torch.isfinite(model.log_marginal_likelihood())


def test_random_frequencies_serve_fixed_weights():
    """Scalar and field kernels, within four standard errors of a mean over 2^14 frequencies."""
    leaf, x = learned(ard=2), uniform(5, 2)
    for kernel in (leaf, gp_orff.CurlFreeKernel(leaf, num_dims=2)):
        features = gp_orff.ORFFKernel(kernel, gp_orff.MonteCarlo(2**14, seed=0), num_dims=2)
        with pytest.raises(NotImplementedError, match="LearnedSpectrumKernel with trained weights"):
            features(x).to_dense()
        with torch.no_grad():
            actual, expected = features(x).to_dense(), kernel(x).to_dense()
        assert (actual - expected).abs().max() < 4 * expected.abs().max() / 2**7


def test_more_inputs_than_a_grid_serves():
    """Auto takes random frequencies, which weights in training refuse with a remedy that serves
    five inputs; `VectorFieldGP` takes the kernel itself."""
    x, y = uniform(30, 5), draw(30, 2)
    leaf = learned(4)
    features = gp_orff.ORFFKernel(leaf, gp_orff.Auto(max_features=64).for_data(x), num_dims=5)
    message = "up to 4 inputs, .* frequencies of 5 inputs; use the kernel without features"
    with pytest.raises(NotImplementedError, match=message):
        features(x).to_dense()
    model = gp_orff.VectorFieldGP(
        MultitaskKernel(leaf, num_tasks=2), frequencies=gp_orff.Auto(exact_values=0)
    )
    model.condition(x, y)
    model.log_marginal_likelihood().backward()
    assert leaf.shape.grad.abs().max() > 0


def test_paths_of_exact_posteriors():
    """Their spread is that of the posterior, far from the data and near it."""
    x, y = problem(30)
    model = gp_orff.VectorFieldGP(gp_orff.CurlFreeKernel(learned(seed=2), num_dims=2)).double()
    model.likelihood.noise = 0.09
    posterior = model.condition(x, y).posterior()
    xs = 2 * uniform(20, 2, seed=5)
    values = posterior.sample_paths(600)(xs)
    assert torch.allclose(values.var(0).sqrt(), posterior.variance(xs).sqrt(), rtol=0.25)


def test_second_moments_of_a_batch_are_those_of_each_kernel():
    kernel = gp_orff.LearnedSpectrumKernel(5, ard_num_dims=2, batch_shape=torch.Size([3])).double()
    kernel.shape.data = torch.linspace(-1, 1, kernel.shape.numel()).reshape(3, 4).double()
    kernel.lengthscale = torch.linspace(0.5, 2, 6).reshape(3, 1, 2)
    alone = [gp_orff.spectrum(kernel[i]).second_moments(2) for i in range(3)]
    torch.testing.assert_close(gp_orff.spectrum(kernel).second_moments(2), torch.stack(alone))
