"""Learned degrees of freedom of Student-t noise."""

import copy
import math
import pickle
from functools import partial

import gpytorch
import numpy as np
import pytest
import scipy.special
import scipy.stats
import torch

import gp_orff
from gp_orff.data.patterns import Components, GroupKey, LineOfSight
from gp_orff.fitting.noise import Tails
from gp_orff.inference.robust import Distances, StudentTNoise
from tests.support import oracles
from tests.support.fields import curl_free, flow

T = partial(gp_orff.MultitaskStudentTLikelihood, learn_deg_free=True)


def log_prior(nu):
    """The default: a normal distribution of log(ν − 2) about log 2, as a density with mode 4."""
    return -0.5 * math.log((nu - 2) / 2) ** 2


def heavy(points, deg_free, seed=0, noise=0.1, extent=0.3):
    """A flow read under Student-t noise; Gaussian noise if `deg_free` is infinite. In a box of two
    lengthscales it is known well: where it is not, ν comes out too large."""
    x, _, field = flow(points, seed=seed, extent=extent)
    rng = np.random.default_rng(seed)
    if math.isinf(deg_free):
        drawn = rng.standard_normal((points, 2))
    else:
        drawn = scipy.stats.multivariate_t(shape=np.eye(2), df=deg_free, seed=rng).rvs(points)
    return x, field(x) + noise * torch.from_numpy(drawn), field


def fitted(x, y, likelihood=None, **options):
    """A fit whose field and noise begin near the truth, but not its degrees of freedom."""
    likelihood = T(2) if likelihood is None else likelihood
    likelihood.noise = 0.01
    model = gp_orff.VectorFieldGP(curl_free(0.3), likelihood=likelihood)
    return model.fit(x, y, progress=False, warm_start=True, **options)


@pytest.mark.parametrize("values", [1, 2, 3])
def test_the_density_of_a_distance(values):
    """Against scipy's density of a vector, to rounding."""
    distance = torch.tensor([0.0, 0.3, 40.0]).double()
    for nu in (2.001, 4.0, 300.0):
        law = scipy.stats.multivariate_t(shape=np.eye(values), df=nu)
        vectors = np.zeros((3, values))
        vectors[:, -1] = distance.sqrt()
        found = StudentTNoise(nu).log_density(distance, values).numpy()
        wanted = law.logpdf(vectors) + 0.5 * values * math.log(2 * math.pi)
        np.testing.assert_allclose(found, wanted, rtol=1e-10, atol=1e-12)


def drawn_distances(deg_free, count, values, seed):
    law = scipy.stats.multivariate_t(shape=np.eye(values), df=deg_free, seed=seed)
    return np.square(law.rvs(count).reshape(count, values)).sum(-1)


@pytest.mark.parametrize("scaled", [False, True])
def test_what_distances_tell_is_the_maximum_over_a_grid(scaled):
    """Two parts of one group, of vectors and of numbers, under a scale that is a quarter too small;
    against scipy's densities on a fine grid of ν, and of the scale."""
    vectors, numbers = drawn_distances(3.0, 300, 2, 0), drawn_distances(3.0, 200, 1, 1)
    vectors, numbers = 1.25 * vectors, 1.25 * numbers
    likelihood = T(2).double()
    likelihood.noise = 0.2
    found = [
        Distances(GroupKey("", Components.every(2)), torch.from_numpy(vectors)),
        Distances(GroupKey("", LineOfSight(2)), torch.from_numpy(numbers)),
    ]
    for _ in range(6):  # rounds of EM
        found = Tails({"": likelihood}, scaled).learn(found)
    nus, scales = np.exp(np.linspace(math.log(0.4), math.log(2.5), 93)) + 2, np.ones(1)
    if scaled:
        scales = np.exp(np.linspace(0.0, 0.5, 63))
    root = np.sqrt(np.stack([vectors, np.zeros(300)], axis=-1) / scales[:, None, None])
    one = [scipy.stats.t(nu).logpdf(np.sqrt(numbers / scales[:, None])).sum(-1) for nu in nus]
    laws = [scipy.stats.multivariate_t(shape=np.eye(2), df=nu) for nu in nus]
    two = [law.logpdf(root).reshape(len(scales), -1).sum(-1) for law in laws]
    volumes = (0.5 * len(numbers) + len(vectors)) * np.log(scales)  # of a root of the scale
    values = np.stack(one) + two - volumes + np.array([[log_prior(nu)] for nu in nus])
    i, j = np.unravel_index(values.argmax(), values.shape)
    where = nus[i], scales[j]
    assert likelihood.deg_free.item() == pytest.approx(where[0], rel=0.01)  # a step of the grid
    assert likelihood.noise.item() == pytest.approx(0.2 * where[1], rel=0.008)
    assert found[0].distance.sum() == pytest.approx(vectors.sum() / where[1], rel=0.008)


def dense_elbo(x, y, prior, noise, nu):
    """The ELBO under the best weights, by plain EM in dense algebra."""
    count, weights, change = len(x), torch.ones(len(x)).double(), 1.0
    while change > 1e-9:
        noisy = prior + torch.diag((noise / weights).repeat_interleave(2))
        gain = torch.linalg.solve(noisy, prior).mT
        second = (y.flatten() - gain @ y.flatten()).square() + (prior - gain @ prior).diagonal()
        distance = second.reshape(count, 2).sum(-1) / noise
        new = (nu + 2) / (nu + distance)
        weights, change = new, (new - weights).abs().max()
    d, w = distance.numpy(), weights.numpy()
    q, p = scipy.stats.gamma((nu + 2) / 2, scale=2 / (nu + d)), (nu / 2, 2 / nu)
    mean_log = scipy.special.digamma((nu + 2) / 2) - np.log((nu + d) / 2)
    prior_term = (p[0] - 1) * mean_log - w / p[1] - scipy.special.gammaln(p[0])
    prior_term -= p[0] * math.log(p[1])
    correction = (mean_log - np.log(w) + prior_term + q.entropy()).sum()
    noisy = prior + torch.diag((noise / weights).repeat_interleave(2))
    return oracles.log_density(noisy, y).item() + correction


@pytest.mark.slow
def test_a_fit_ends_where_the_bound_is_largest():
    """ν and the noise against both sides, by dense algebra under the kernel of the fit."""
    x, y, _ = heavy(60, 2.5, seed=1)
    likelihood = T(2).double()
    model = gp_orff.VectorFieldGP(
        curl_free(), likelihood=likelihood, mean=gpytorch.means.ZeroMean()
    )
    y = y - y.mean(0)
    model.fit(x, y, progress=False)
    nu, noise = model.likelihood.deg_free.item(), model.likelihood.noise.item()
    prior = model.kernel(x).to_dense().detach()
    best = dense_elbo(x, y, prior, noise, nu)
    assert model.log_marginal_likelihood().item() == pytest.approx(best, abs=1e-3)
    best += log_prior(nu)
    for factor in (0.8, 1.25):
        other = 2 + factor * (nu - 2)
        assert dense_elbo(x, y, prior, noise, other) + log_prior(other) < best
        assert dense_elbo(x, y, prior, factor * noise, nu) + log_prior(nu) < best


def fisher_error(nu, count, v=2):
    """The standard error of ν of multivariate Student-t noise of unknown scale (Lange, Little &
    Taylor 1989, appendix B)."""
    trigamma = scipy.special.polygamma(1, np.array([nu / 2, (nu + v) / 2]))
    own = 0.25 * (trigamma[0] - trigamma[1]) - v * (nu + v + 4) / (2 * nu * (nu + v) * (nu + v + 2))
    both, scale = v / ((nu + v) * (nu + v + 2)), v * nu / (2 * (nu + v + 2))  # of log s
    return (count * (own - both**2 / scale)) ** -0.5


@pytest.mark.slow
def test_degrees_of_freedom_are_recovered():
    """Of a field that is known well, within the errors of known residuals."""
    scores = []
    for seed, nu in enumerate((2.5, 4.0, 6.0)):
        x, y, _ = heavy(600, nu, seed=seed)
        scores.append((fitted(x, y).likelihood.deg_free.item() - nu) / fisher_error(nu, 600))
    assert np.abs(scores).max() < 3
    assert abs(np.mean(scores)) < 2


@pytest.mark.slow
def test_gaussian_noise_is_known_as_such():
    """ν stays finite, and the map is that of Gaussian noise."""
    x, y, field = heavy(200, math.inf)
    robust, plain = fitted(x, y), gp_orff.VectorFieldGP(curl_free()).fit(x, y, progress=False)
    assert 10 < robust.likelihood.deg_free.item() < 1000
    errors = [(m.posterior().mean(x) - field(x)).square().mean().sqrt() for m in (robust, plain)]
    assert errors[0] == pytest.approx(errors[1].item(), rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["argument", "parameter"])
def test_it_can_be_held(how):
    x, y, _ = heavy(60, 2.5)
    likelihood = T(2, deg_free=7.0, learn_deg_free=how != "argument")
    likelihood.raw_deg_free.requires_grad_(False)
    model = fitted(x, y, likelihood)
    assert model.likelihood.deg_free.item() == pytest.approx(7.0, rel=1e-12)


@pytest.mark.slow
def test_only_a_fit_learns_it():
    x, y, _ = heavy(140, 2.5)
    model = fitted(x[:125], y[:125])
    nu = model.likelihood.deg_free.item()
    assert nu != pytest.approx(4.0, rel=1e-3)
    model.update(x[125:], y[125:])
    model.condition(x, y)
    model.posterior()
    assert model.likelihood.deg_free.item() == nu


@pytest.mark.slow
def test_each_group_has_its_own():
    x, y, _ = heavy(300, math.inf)
    y[::2] = heavy(300, 2.3)[1][::2]
    group = ["heavy", "light"] * 150
    model = fitted(x, y, group=group)
    found = {name: model.likelihoods[name].deg_free.item() for name in ("heavy", "light")}
    assert found["heavy"] < 4 < 8 < found["light"]
    assert {"heavy.deg_free", "light.deg_free"} <= set(model.report.to_dict()["hyperparameters"])


@pytest.mark.slow
def test_known_noise_has_tails_that_are_learned():
    """Stated errors, of which some are mistaken; its factor stays one."""
    x, y, _ = heavy(150, 2.5)
    noise = torch.full((150,), 0.01).double()
    model = fitted(x, y, noise=noise)
    assert type(model.likelihood) is gp_orff.KnownNoiseLikelihood
    assert model.likelihood.noise_scale.item() == 1.0
    assert 2 < model.likelihood.deg_free.item() < 3.9
    held = fitted(x, y, T(2, deg_free=5.0, learn_deg_free=False), noise=noise)
    assert held.likelihood.deg_free.item() == pytest.approx(5.0)
    learned = fitted(x, y, noise=noise, scale_noise=True)
    assert learned.likelihood.noise_scale.item() != 1.0


@pytest.mark.slow
def test_files_and_pickles_keep_it(tmp_path):
    x, y, _ = heavy(40, 2.5)
    model = fitted(x, y)
    model.save(tmp_path / "model.pt")
    others = (
        gp_orff.VectorFieldGP.load(tmp_path / "model.pt"),
        pickle.loads(pickle.dumps(model)),
        copy.deepcopy(model),
    )
    for other in others:
        assert torch.equal(other.likelihood.deg_free, model.likelihood.deg_free)
        assert other.likelihood.raw_deg_free.requires_grad
        assert other.log_marginal_likelihood() == model.log_marginal_likelihood()
    held = gp_orff.VectorFieldGP(curl_free(), likelihood=T(2, learn_deg_free=False))
    held.condition(x, y).save(tmp_path / "held.pt")
    again = gp_orff.VectorFieldGP.load(tmp_path / "held.pt")
    assert not again.likelihood.raw_deg_free.requires_grad
    prior = gpytorch.priors.GammaPrior(2.0, 0.1)
    own = gp_orff.VectorFieldGP(curl_free(), likelihood=T(2, deg_free_prior=prior))
    own.condition(x, y).save(tmp_path / "own.pt")
    with pytest.raises(ValueError, match="pass likelihood="):
        gp_orff.VectorFieldGP.load(tmp_path / "own.pt")


def test_states_from_before_it_was_a_parameter():
    """Keep what the constructor says; a fit after `load` of an old file keeps it too."""
    old = {n: v for n, v in T(2).state_dict().items() if "deg_free" not in n}
    likelihood = T(2, deg_free=6.0)
    likelihood.load_state_dict(old)
    assert likelihood.deg_free.item() == pytest.approx(6.0)
    inside = gpytorch.likelihoods.LikelihoodList(T(2, deg_free=5.0))
    inside.load_state_dict({f"likelihoods.0.{n}": v for n, v in old.items()})
    assert inside.likelihoods[0].deg_free.item() == pytest.approx(5.0)
    loaded = gp_orff.VectorFieldGP.load("tests/frozen/student_t.pt")
    assert loaded.likelihood.deg_free.item() == pytest.approx(4.0, rel=1e-12)
    assert not loaded.likelihood.raw_deg_free.requires_grad


@pytest.mark.slow
def test_chunks_tell_the_same_as_arrays():
    """On one grid, to the accuracy of a round."""
    x, y, _ = heavy(130, 2.5)
    found = []
    for data in ([{"x": x[:50], "y": y[:50]}, {"x": x[50:], "y": y[50:]}], None):
        likelihood = T(2).double()
        likelihood.noise = 0.01
        model = gp_orff.VectorFieldGP(
            curl_free(0.3), likelihood=likelihood, frequencies=gp_orff.Auto(exact_values=0)
        )
        model.fit(*([data] if data else (x, y)), progress=False, warm_start=True)
        found.append(model.likelihood.deg_free.item())
    assert found[0] == pytest.approx(found[1], rel=1e-3)
    assert found[0] < 4


def test_what_is_refused():
    with pytest.raises(ValueError, match="deg_free > 2"):
        T(2, deg_free=2.0)
    with pytest.raises(ValueError, match="inside its constraint"):
        T(2, deg_free_constraint=gpytorch.constraints.Interval(5.0, 9.0))


@pytest.mark.slow
def test_constraints_and_priors_of_the_user():
    x, y, _ = heavy(60, 2.5)
    interval = gpytorch.constraints.Interval(6.0, 9.0)
    model = fitted(x, y, T(2, deg_free=7.0, deg_free_constraint=interval))
    assert 6.0 < model.likelihood.deg_free.item() < 6.5
    narrow = gpytorch.priors.NormalPrior(12.0, 0.01)
    model = fitted(x, y, T(2, deg_free_prior=narrow))
    assert model.likelihood.deg_free.item() == pytest.approx(12.0, abs=0.05)


@pytest.mark.slow
def test_its_standard_error_is_that_of_known_residuals():
    """Of Fisher's information at the ν that is found, where the field is known well: what is
    observed of 400 vectors is within a third of what is expected."""
    x, y, _ = heavy(400, 4.0)
    model = fitted(x, y)
    nu = model.likelihood.deg_free.item()
    found = model.report.hyperparameters["deg_free"]
    assert found.value == pytest.approx(nu)
    assert found.standard_error == pytest.approx(fisher_error(nu, 400), rel=0.33)
    assert model.likelihood.deg_free.item() == nu
    held = fitted(x[:60], y[:60], T(2, learn_deg_free=False)).report.hyperparameters["deg_free"]
    assert math.isnan(held.standard_error)
