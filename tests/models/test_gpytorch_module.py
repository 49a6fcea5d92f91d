"""A `VectorFieldGP` as a module of gpytorch: modes, names, states, copies and priors."""

import copy
import io
import pickle

import gpytorch
import pytest
import torch
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.likelihoods import BernoulliLikelihood
from gpytorch.means import ConstantMean, MultitaskMean, ZeroMean

import gp_orff
from tests.support.fields import draw, uniform

COUNT = 40
X = uniform(COUNT, 2, seed=1)
Y = torch.sin(3 * X.flip(-1)) + 0.1 * draw(COUNT, 2, seed=2)
XS = uniform(4, 2, seed=3)
pytestmark = pytest.mark.usefixtures("no_check_of_calibration")


@pytest.fixture
def no_check_of_calibration():
    with gp_orff.settings.check_calibration(False):
        yield


def new(**options):
    return gp_orff.VectorFieldGP(gp_orff.DivergenceFreeKernel(num_dims=2), **options)


def same(model, other):
    for part in ("mean", "covariance_matrix"):
        torch.testing.assert_close(getattr(other(XS), part), getattr(model(XS), part))


def test_the_distribution_is_that_of_dense_algebra():
    """In eval mode, in which all calls end; with a mean of zero."""
    model = new(mean=ZeroMean())
    assert isinstance(model, gpytorch.models.GP)
    assert model.training
    model.kernel.base_kernel.lengthscale, model.likelihood.noise = 0.4, 0.01
    model.condition(X, Y)
    assert not model.training
    law, noisy = model(XS), model.kernel(X).to_dense() + 0.01 * torch.eye(2 * COUNT)
    cross = model.kernel(XS, X).to_dense()
    assert isinstance(law, MultitaskMultivariateNormal)
    torch.testing.assert_close(law.mean.flatten(), cross @ torch.linalg.solve(noisy, Y.flatten()))
    covariance = model.kernel(XS).to_dense() - cross @ torch.linalg.solve(noisy, cross.mT)
    torch.testing.assert_close(law.covariance_matrix, covariance, rtol=1e-6, atol=1e-9)


def test_one_output_has_a_normal_distribution():
    model = gp_orff.VectorFieldGP(RBFKernel()).condition(X, Y[:, 0])
    assert isinstance(model(XS), MultivariateNormal)
    assert not isinstance(model(XS), MultitaskMultivariateNormal)
    assert model(XS).mean.shape == (4,)


def test_modes(tmp_path):
    model = new()
    with pytest.raises(RuntimeError, match=r"in eval mode.*call model\.fit\(x, y\)"):
        model(XS)
    with pytest.raises(RuntimeError, match="no data yet"):
        model.eval()(XS)
    for call in (
        lambda: model.condition(X, Y),
        lambda: model.update(X[:3] + 0.01, Y[:3]),
    ):
        model.train()
        call()
        assert not any(part.training for part in model.modules())
    model.train()
    with pytest.raises(RuntimeError, match=r"model\.eval\(\) if it has data"):
        model(XS)
    model.save(tmp_path / "model.pt")
    loaded = gp_orff.VectorFieldGP.load(tmp_path / "model.pt")
    assert not any(part.training for part in loaded.modules())
    same(model.eval(), loaded)


def test_names_of_gpytorch():
    model = new()
    assert model.covar_module is model.kernel
    assert model.mean_module is model.mean
    model.covar_module = kernel = ScaleKernel(gp_orff.CurlFreeKernel(num_dims=2)).double()
    model.mean_module = mean = MultitaskMean(ConstantMean(), 2).double()
    assert model.kernel is kernel
    assert model.mean is mean
    assert [name for name, _ in model.named_children()] == [
        "kernel",
        "likelihood",
        "mean",
        "likelihoods",
    ]
    model.initialize(**{"likelihood.noise": 0.3, "kernel.base_kernel.base_kernel.lengthscale": 0.2})
    assert model.likelihood.noise.item() == pytest.approx(0.3)
    assert model.kernel.base_kernel.lengthscale.item() == pytest.approx(0.2)


def test_priors():
    """A prior of small spread is what a fit learns; the names and values are gpytorch's."""
    model = new()
    inner = model.covar_module.base_kernel.base_kernel
    inner.register_prior("lengthscale_prior", gpytorch.priors.NormalPrior(0.7, 1e-3), "lengthscale")
    assert [name for name, *_ in model.named_priors()] == [
        "kernel.base_kernel.base_kernel.lengthscale_prior"
    ]
    model.train().fit(X, Y, progress=False)
    assert not model.training
    assert model.kernel.base_kernel.lengthscale.item() == pytest.approx(0.7, abs=0.01)
    inner.sample_from_prior("lengthscale_prior")
    assert inner.lengthscale.item() == pytest.approx(0.7, abs=0.01)


STATES = {  # a new model, and options of condition
    "one noise": (new, {}),
    "zero mean": (lambda: new(mean=ZeroMean()), {}),
    "groups": (new, {"group": ["a", "b"] * 20}),
    "noise of each": (new, {"noise": 0.01 + 0.01 * torch.rand(COUNT)}),
    "tracks": (new, {"track": torch.arange(COUNT) // 10}),
    "tracks of a group": (new, {"track": torch.arange(COUNT) // 10, "group": "ship"}),
    "Student-t": (lambda: new(likelihood=gp_orff.MultitaskStudentTLikelihood(2)), {}),
    "learned spectrum": (
        lambda: gp_orff.VectorFieldGP(
            gp_orff.DivergenceFreeKernel(gp_orff.LearnedSpectrumKernel(), num_dims=2)
        ),
        {},
    ),
    "heights": (lambda: gp_orff.VectorFieldGP(gp_orff.HarmonicKernel()), {}),
}


@pytest.mark.parametrize("name", STATES)
def test_states(name):
    """Loaded into a new model, which is conditioned on the data, it gives the same posterior."""
    build, options = STATES[name]
    x, y, xs = X, Y, XS
    if name == "heights":
        heights = 1 + 0.1 * uniform(COUNT, 1, seed=5)
        x, y, xs = torch.cat([X, heights], -1), draw(COUNT, 3), torch.tensor([[0.5, 0.5, 1.0]])
    model = build()
    if name == "learned spectrum":
        next(k for k in model.modules() if hasattr(k, "continued")).continued = True
    model.condition(x, y, **options)
    for parameter in model.parameters():
        parameter.data += 0.2
    model.condition(x, y, **options)
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    other = build()
    other.load_state_dict(torch.load(buffer, weights_only=True))
    assert other.training
    assert list(other.likelihoods) == list(model.likelihoods)
    other.condition(x, y, **options)
    for copied in (other, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(copied(xs).mean, model(xs).mean)
        torch.testing.assert_close(copied(xs).variance, model(xs).variance)
    bystander = copy.deepcopy(model)
    for parameter in model.parameters():
        parameter.data += 1
    torch.testing.assert_close(bystander(xs).variance, other(xs).variance)


def test_states_with_likelihoods_of_the_user():
    class Mine(gpytorch.likelihoods.MultitaskGaussianLikelihood):
        pass

    model = new(likelihood=Mine(2, has_task_noise=False)).condition(X, Y)
    other = new(likelihood=Mine(2, has_task_noise=False))
    other.load_state_dict(model.state_dict())
    same(model, other.condition(X, Y))
    model.likelihoods["mine"] = Mine(2).double()
    with pytest.raises(ValueError, match="built as for the saved model, before loading the state"):
        other.load_state_dict(model.state_dict())


def test_states_of_earlier_versions():
    model, other = new().condition(X, Y), new()
    model.likelihood.noise = 0.02
    state = {name: value for name, value in model.state_dict().items() if name != "_extra_state"}
    for older in (state, state | {"_extra_state": torch.empty(0)}):
        with pytest.warns(UserWarning, match="older than this version.*those of this model stay"):
            other.load_state_dict(older)
        same(model, other.condition(X, Y))


def constants(value):
    mean = MultitaskMean(ConstantMean(), num_tasks=2).double()
    for part in mean.base_means:
        part.initialize(constant=value).requires_grad_(False)
    return mean


@pytest.mark.parametrize("noise", ["gaussian", "signs"])
@pytest.mark.parametrize("rule", ["exact", "grid"])
def test_a_fixed_mean_that_is_changed_later(rule, noise):
    """The answers are those of a model that is conditioned with it."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(12, 2, generator=generator, dtype=torch.float64)
    y = torch.sin(5 * x.flip(-1))
    y = y if noise == "gaussian" else (y > 0.5).double()
    grid = gp_orff.Grid(domain=((0.0, 1.0), (0.0, 1.0)), tolerance=1e-6)
    models = [
        gp_orff.VectorFieldGP(
            gp_orff.HelmholtzKernel(num_dims=2),
            mean=constants(value),
            frequencies=grid if rule == "grid" else gp_orff.Auto(),
            likelihood=BernoulliLikelihood() if noise == "signs" else None,
        ).condition(x, y)
        for value in (0.0, 1.0)
    ]
    changed, expected = models
    changed.posterior().mean(x)  # is remembered
    for part in changed.mean.base_means:
        part.initialize(constant=1.0)
    bound = {"rtol": 1e-6, "atol": 1e-6}  # of the approximation of signs, which is iterated
    torch.testing.assert_close(
        changed.log_marginal_likelihood(), expected.log_marginal_likelihood(), **bound
    )
    torch.testing.assert_close(changed.posterior().mean(x), expected.posterior().mean(x), **bound)
