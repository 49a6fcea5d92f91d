"""A distribution of feature weights in training loops of gpytorch."""

import copy
import pickle

import pytest
import torch
from gpytorch.likelihoods import BernoulliLikelihood, PoissonLikelihood
from gpytorch.mlls import PredictiveLogLikelihood, VariationalELBO
from gpytorch.optim import NGD

import gp_orff
from tests.support.counts import bernoulli, counts, gaussian, rbf, signal, zero
from tests.support.fields import curl_free, draw, swirl, unit_cube

MONTE_CARLO = gp_orff.MonteCarlo(20, seed=0)


def ngd_step(model, x, y, num_data, lr):
    elbo = VariationalELBO(model.likelihood, model, num_data=num_data)
    optimizer = NGD(model.variational_parameters(), num_data=num_data, lr=lr)
    optimizer.zero_grad()
    loss = -elbo(model(x), y)
    loss.backward()
    optimizer.step()
    return -loss.item()


@pytest.mark.parametrize("way", ["NGD", "closed form"])
@pytest.mark.parametrize("p", [1, 2])
def test_gaussian_noise_gives_the_exact_posterior_in_one_step(p, way):
    x = unit_cube(60)
    y = (signal(x) if p == 1 else swirl(x)) + 0.2 * (draw(60) if p == 1 else draw(60, 2))
    kernel = rbf() if p == 1 else curl_free()
    model = gp_orff.FeatureGP(kernel, MONTE_CARLO, likelihood=gaussian(p, 0.04), num_dims=2)
    if way == "NGD":
        ngd_step(model, x, y, 60, 1.0)
    else:
        model.step(x, y if p > 1 else y.unsqueeze(-1), 60, 1.0)
    elbo = VariationalELBO(model.likelihood, model, num_data=60)(model(x), y).item()
    phi = model.covar_module.features(x).detach()
    xs = unit_cube(7, seed=3)
    at = model.covar_module.features(xs).detach()
    noise = model.likelihood.noise.item()
    covariance = phi @ phi.mT + noise * torch.eye(len(phi)).double()
    gain = torch.linalg.solve(covariance, phi @ at.mT).mT
    q = model.eval()(xs)
    torch.testing.assert_close(q.mean.flatten(), gain @ y.flatten(), rtol=0, atol=1e-8)
    wanted = at @ at.mT - gain @ phi @ at.mT
    torch.testing.assert_close(q.covariance_matrix, wanted, rtol=0, atol=1e-8)
    zeros = torch.zeros(len(phi)).double()
    evidence = torch.distributions.MultivariateNormal(zeros, covariance).log_prob(y.flatten())
    assert 60 * elbo == pytest.approx(evidence.item(), abs=1e-6)


@pytest.mark.parametrize("p", [1, 2])
def test_a_step_in_closed_form_is_one_of_natural_gradients(p):
    """Twenty minibatches, parameter by parameter, to rounding."""
    x = unit_cube(120)
    f = signal(x).unsqueeze(-1) if p == 1 else 2 * swirl(x)
    y, likelihood = (
        (counts(f), PoissonLikelihood()) if p == 1 else (bernoulli(f), BernoulliLikelihood())
    )
    kernel = rbf() if p == 1 else curl_free()
    models = [
        gp_orff.FeatureGP(kernel, MONTE_CARLO, likelihood=likelihood, num_dims=2) for _ in range(2)
    ]
    for number in range(20):
        rows = torch.arange(120)[number % 4 :: 4]
        ngd_step(models[0], x[rows], y[rows].squeeze(-1), 120, 0.1)
        models[1].step(x[rows], y[rows], 120, 0.1)
    one, two = (model.variational_strategy._variational_distribution for model in models)
    for name in ("natural_vec", "natural_mat"):
        wanted = getattr(one, name).detach()
        size = wanted.abs().max().item()
        torch.testing.assert_close(getattr(two, name), wanted, rtol=0, atol=1e-11 * size)


def test_all_data_reach_the_optimum_of_pseudo_observations():
    """Of the same features: the loop and `VectorFieldGP` maximise one ELBO."""
    x = unit_cube(120)
    y = bernoulli(2 * swirl(x))
    loop = gp_orff.FeatureGP(curl_free(), MONTE_CARLO, likelihood=BernoulliLikelihood())
    for _ in range(25):
        loop.step(x, y, 120, 1.0)
    model = gp_orff.VectorFieldGP(
        curl_free(), likelihood=BernoulliLikelihood(), mean=zero(2), frequencies=MONTE_CARLO
    ).condition(x, y)
    xs = unit_cube(7, seed=3)
    q, field = loop.eval()(xs), model.posterior()
    torch.testing.assert_close(q.mean, field.mean(xs), rtol=0, atol=1e-6)
    torch.testing.assert_close(q.variance, field.variance(xs), rtol=0, atol=1e-6)
    elbo = VariationalELBO(loop.likelihood, loop.train(), num_data=120)(loop(x), y)
    assert 120 * elbo.item() == pytest.approx(model.log_marginal_likelihood().item(), abs=1e-6)


@pytest.mark.parametrize("form", ["natural", "tril", "cholesky"])
def test_objectives_forms_and_copies(form):
    x, y = unit_cube(50), bernoulli(2 * swirl(unit_cube(50)))
    model = gp_orff.FeatureGP(
        curl_free(),
        gp_orff.Grid.for_data(x, tolerance=1e-3),
        likelihood=BernoulliLikelihood(),
        form=form,
    )
    for kind in (VariationalELBO, PredictiveLogLikelihood):
        loss = -kind(model.likelihood, model, num_data=50)(model(x.float()), y)
        loss.backward()
        assert loss.shape == ()
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(other.eval()(x).mean, model.eval()(x).mean)
    if form != "natural":
        with pytest.raises(ValueError, match="natural"):
            model.step(x, y, 50)


def test_the_truncated_variance_of_a_grid_counts():
    """On the diagonal blocks of q(f), in train and eval mode, as in the prior."""
    x = unit_cube(30)
    grid = gp_orff.Grid.for_data(x, tolerance=1e-2)
    model = gp_orff.FeatureGP(curl_free(), grid, likelihood=gaussian(2, 0.1))
    delta = model.covar_module.truncated().detach()
    assert (delta.diagonal() > 0).all()
    phi = model.covar_module.features(x).detach()
    wanted = (phi @ phi.mT).diagonal().view(30, 2) + delta.diagonal()  # before any step, S = I
    torch.testing.assert_close(model(x).variance.detach(), wanted)
    torch.testing.assert_close(model.eval()(x).variance.detach(), wanted)
    prior = model(x, prior=True).lazy_covariance_matrix.diagonal(dim1=-1, dim2=-2)
    torch.testing.assert_close(prior.detach().view(30, 2), wanted)


def test_a_step_needs_a_rate():
    x = unit_cube(10)
    model = gp_orff.FeatureGP(curl_free(), MONTE_CARLO)
    with pytest.raises(ValueError, match="rate above 0 and at most 1"):
        model.step(x, swirl(x), 10, rate=2.0)
    with pytest.raises(ValueError, match="forms"):
        gp_orff.FeatureGP(curl_free(), MONTE_CARLO, form="diagonal")
    with pytest.raises(TypeError, match="frequency rule"):
        gp_orff.FeatureGP(curl_free())


@pytest.mark.parametrize("way", ["step", "ELBO", "predictive"])
def test_observations_that_do_not_fit(way):
    """Signs −1 and 1, for which gpytorch's own likelihood has another density, and columns as
    rows, which have as many values."""
    x = unit_cube(6)
    y = bernoulli(swirl(x))
    model = gp_orff.FeatureGP(curl_free(), MONTE_CARLO, likelihood=BernoulliLikelihood())

    def pass_on(values):
        if way == "step":
            return model.step(x, values, 6)
        objective = {"ELBO": VariationalELBO, "predictive": PredictiveLogLikelihood}[way]
        return objective(model.likelihood, model, num_data=6)(model(x), values)

    for message, wrong in {
        r"BernoulliLikelihood expects 0 or 1.*got -1\.0": 2 * y - 1,
        r"expects observations y of shape \(6, 2\), .* got \(2, 6\)": y.mT,
        r"shape \(6, 2\), one row for each point, got \(6,\)": y[:, 0],
    }.items():
        with pytest.raises(ValueError, match=message):
            pass_on(wrong)
    y[2, 1] = torch.nan  # was not observed
    pass_on(y)
