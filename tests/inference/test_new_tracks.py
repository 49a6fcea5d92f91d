"""Predicted observations of new tracks after few tracks integrate over the variance of offsets."""

import math

import numpy as np
import pytest
import scipy.integrate
import scipy.stats
import torch
from gpytorch.constraints import GreaterThan, Interval
from gpytorch.means import MultitaskMean, ZeroMean
from gpytorch.priors import GammaPrior

import gp_orff
from gp_orff.data.noise import SlowVariance
from gp_orff.inference.along_tracks import slow_variance
from gp_orff.models.calibration import calibration_of
from tests.support.fields import curl_free, draw, uniform
from tests.support.tracks import EYE, RULES, Oracle, P, conditioned, likelihood, turning


def learned(model):
    """What the data of a conditioned model tell of the variance of new tracks."""
    snapshot = model.state.snapshot(model.mean)
    field = snapshot.posterior.field(fixed=snapshot.fixed_mean is not None)
    (part,) = model.state.data.tracks
    return slow_variance(field, model.state.e_step.noises, part, model.likelihood)


def level_of(noise, clock, label):
    """The share ℓ of correlated noise that goes on for longer than the longest track."""
    longest = max(float(np.ptp(clock[label == name].numpy())) for name in np.unique(label))
    twice = 2 * noise.correlation_time
    return (noise.correlated_variance * twice / (twice + longest)).item()


def densities(oracle, same, present, u):
    """The restricted evidence and the Fisher information of exp(u), the variance of offsets, by
    dense algebra; `present` is the variance in `oracle.k`."""
    evidence, information = [], []
    for value in u.exp():
        k = oracle.k + (value - present) * same
        inverse = torch.linalg.inv(k)
        weighted = oracle.ones.mT @ inverse
        inner = weighted @ oracle.ones
        projected = inverse - weighted.mT @ torch.linalg.solve(inner, weighted)
        logs = torch.logdet(k) + torch.logdet(inner)
        evidence.append(-0.5 * (logs + oracle.y @ projected @ oracle.y))
        told = projected @ same
        information.append(0.5 * (told @ told).trace())
    return torch.stack(evidence), torch.stack(information)


CASES = [
    ("exact", 0.0, "timed"),
    ("exact", 4.0, "directed"),
    ("exact", 4.0, "prior"),
    ("grid", 0.0, "timed"),
    ("grid", 0.0, "directed"),
    ("monte_carlo", 4.0, "timed"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("rule", "span", "kind"), CASES)
@torch.no_grad()
def test_the_variance_of_new_tracks_is_that_of_dense_integrals(rule, span, kind):
    """Quantiles of readings, by sums over 500 values of log V; the range of 64 values leaves out
    2e-9 of the density on both sides."""
    directed = kind == "directed"
    model, x, y, label, time = conditioned(RULES[rule], span, directed=directed)
    noise = model.likelihood
    if kind == "prior":
        noise.register_prior("offset_variance_prior", GammaPrior(2.0, 30.0), "offset_variance")
    oracle = Oracle(model, x, y, label, time, x[:1], turning(x) if directed else None)
    (part,) = model.state.data.tracks
    of_track = torch.arange(3).repeat_interleave(torch.tensor([len(t.y) for t in part.tracks]))
    same = (of_track[:, None] == of_track).double()
    same = same if directed else torch.kron(same, EYE)
    level = 0.0 if kind == "prior" else level_of(noise, time, label)
    u = torch.linspace(-22.0, 14.0, 500).double()
    evidence, information = densities(oracle, same, noise.offset_variance + level, u)
    logs = evidence + u + 0.5 * information.log()
    if kind == "prior":
        logs = evidence + u + noise.offset_variance_prior.log_prob(u.exp())
    weights = torch.softmax(logs, 0)
    values = u.exp() + noise.correlated_variance - level
    found = learned(model)
    for variance in (0.01, 1.0):
        for point in (0.2, 0.9, 0.975):
            z = found.quantile(point, torch.tensor([variance]).double())
            probability = weights @ torch.special.ndtr(z / (variance + values).sqrt())
            assert probability.item() == pytest.approx(point, abs=1e-6)


def along(tracks, seed, offset, readings=4, noise=1e-5):
    """A model of a field that is almost constant, given tracks of offsets of that variance."""
    x = uniform(tracks, readings, 2, seed=seed).flatten(0, 1)
    label = np.repeat(np.arange(tracks), readings)
    offsets = math.sqrt(offset) * draw(tracks, P, seed=seed)
    y = 290.0 + offsets[label] + noise * draw(len(x), P, seed=seed + 1)
    model = gp_orff.VectorFieldGP(curl_free(0.6), likelihood=likelihood())
    model.kernel.outputscale = 1e-12
    model.likelihood.noise = noise**2
    model.likelihood.offset_variance, model.likelihood.correlated_variance = 0.5, 1e-12
    model.condition(x, y, track=label, time=np.tile(np.arange(readings), tracks))
    return model, offsets


@pytest.mark.parametrize("long", [False, True])
@pytest.mark.parametrize("tracks", [2, 3, 5])
def test_offsets_that_are_known_well_have_students_distribution(tracks, long):
    """With K tracks, t of 2 (K − 1) degrees of freedom; to 1e-4, for errors of 1e-5. Correlated
    noise that goes on for long is an offset."""
    model, offsets = along(tracks, seed=tracks, offset=1.0)
    if long:
        model.likelihood.offset_variance, model.likelihood.correlated_variance = 1e-12, 0.5
        model.likelihood.correlation_time = 1e8
    degrees = P * (tracks - 1)
    squares = (offsets - offsets.mean(0)).square().sum().item()
    found = learned(model)
    for level in (0.05, 0.6, 0.975):
        expected = scipy.stats.t.ppf(level, degrees, scale=math.sqrt(squares / degrees))
        value = found.quantile(level, torch.zeros(1).double()).item()
        assert value == pytest.approx(expected, rel=1e-4)


@pytest.mark.slow
def test_intervals_on_a_fourth_track_cover():
    """50 times three tracks: the probability of an offset inside is 95 %, within three standard
    errors, which are 0.03. At the variance of largest evidence it would be 0.88, that of |t| < 1.96
    under 4 degrees of freedom. The mean of three offsets is known to a third of v."""
    inside = []
    for seed in range(50):
        model, offsets = along(3, seed=10 * seed, offset=1.0)
        found, mean = learned(model), offsets.mean(0)
        upper = found.quantile(0.975, torch.zeros(1).double()) * math.sqrt(4 / 3)
        below, above = (torch.special.ndtr(mean + sign * upper) for sign in (-1, 1))
        inside.append((above - below).mean().item())
    error = np.std(inside) / math.sqrt(50)
    assert error < 0.01
    assert abs(np.mean(inside) - 0.95) < 3 * error


@pytest.mark.parametrize("time", [0.3, 3.0, 300.0])
def test_the_share_of_correlated_noise_that_counts_as_offset(time):
    """The covariance of the rest is positive semi-definite, and that of a little more is not."""
    clock = torch.linspace(0.0, 7.0, 400).double()
    covariance = 2.0 * torch.exp(-(clock[:, None] - clock).abs() / time)
    noise = likelihood()
    noise.correlated_variance, noise.correlation_time = 2.0, time
    level = level_of(noise, clock, np.zeros(400))
    assert torch.linalg.eigvalsh(covariance - level)[0] > -1e-10
    assert torch.linalg.eigvalsh(covariance - 1.001 * level)[0] < -1e-10


MIXTURE = SlowVariance(
    torch.tensor([0.01, 0.1, 1.0, 10.0] + 60 * [1.0]).double(),
    torch.tensor([0.4, 0.3, 0.2, 0.1] + 60 * [0.0], dtype=torch.float64),
)


def with_mixture(rule="exact", span=0.0):
    model, *data = conditioned(RULES[rule], span)
    model.likelihood.slow_variance = MIXTURE
    return model, *data


def probability(z, variance):
    """P(y − m < z) of a new reading with this variance besides that of a new track."""
    sd = np.sqrt(np.asarray(variance)[..., None] + MIXTURE.values[:4].numpy())
    return scipy.stats.norm.cdf(np.asarray(z)[..., None] / sd) @ MIXTURE.weights[:4].numpy()


@torch.no_grad()
def test_readings_of_new_tracks_have_quantiles_of_the_mixture():
    """To 1e-12; the Gaussian has the central 95 % interval of the mixture."""
    model, x, *_ = with_mixture()
    noise, field = model.likelihood, model.posterior()(x[:6])
    for given in (None, torch.linspace(0.1, 0.6, 6).double()):
        rest = field.variance + noise.noise + (0 if given is None else given[:, None])
        for level in (0.01, 0.5, 0.8):
            z = noise.quantile(field, level, noise=given) - field.mean
            np.testing.assert_allclose(probability(z, rest), level, atol=1e-12)
        half = scipy.stats.norm.ppf(0.975) * noise(field, noise=given).stddev
        np.testing.assert_allclose(probability(half, rest), 0.975, atol=1e-9)
    half = scipy.stats.norm.ppf(0.975) * noise(field.mean).stddev
    np.testing.assert_allclose(probability(half, noise.noise.expand_as(half)), 0.975, atol=1e-9)
    off = noise(field).covariance_matrix - field.covariance_matrix
    torch.testing.assert_close(off, torch.diag(off.diagonal()))
    with pytest.raises(ValueError, match="level between 0 and 1, got 95"):
        noise.quantile(field, 95)


def test_quantiles_of_set_parameters_are_gaussian():
    model, x, *_ = conditioned(None, 0.0)
    reading = model.likelihood(model.posterior()(x[:3]))
    z = scipy.stats.norm.ppf(0.9)
    got = model.likelihood.quantile(model.posterior()(x[:3]), 0.9)
    torch.testing.assert_close(got, reading.mean + z * reading.stddev)


@pytest.mark.parametrize("rule", ["exact", "grid"])
def test_scores_of_tracks_that_are_left_out_are_those_of_the_mixture(rule):
    """Against sums and quadrature; readings whose track is known keep their scores."""
    model, x, y, label, time = with_mixture(rule, 4.0)
    options = {"track": label, "time": time}
    noise = model.likelihood
    found = model.cross_validate(x, y, **options)
    thirds = np.tile(np.arange(30) // 10, 3)
    known = model.cross_validate(x, y, blocks=thirds, **options)
    noise.offset_variance = noise.offset_variance.item()  # as it is, but not integrated over
    assert noise.slow_variance is None
    plain = model.cross_validate(x, y, **options)
    known_before = model.cross_validate(x, y, blocks=thirds, **options)
    for name in ("mean", "sd", "log_density", "crps_values", "pit"):
        torch.testing.assert_close(getattr(known, name), getattr(known_before, name))
    torch.testing.assert_close(found.mean, plain.mean)
    slow = (noise.offset_variance + noise.correlated_variance).item()
    rest, residual = plain.sd.square() - slow, plain.observed - plain.mean
    np.testing.assert_allclose(found.pit, probability(residual, rest), atol=1e-9)
    sd = (rest[:, None] + MIXTURE.values[:4]).sqrt()
    logs = scipy.stats.norm.logpdf(residual[:, None], scale=sd)
    expected = scipy.special.logsumexp(logs, axis=-1, b=MIXTURE.weights[:4])
    np.testing.assert_allclose(found.log_density, expected, atol=1e-9)
    half = scipy.stats.norm.ppf(0.975) * found.sd
    np.testing.assert_allclose(probability(half, rest), 0.975, atol=1e-8)
    for i in (0, 50, 100):

        def squared(z, i=i):
            return (probability(z, rest[i]) - (z > residual[i].item())) ** 2

        points = [residual[i].item()]
        crps = scipy.integrate.quad(squared, -40, 40, points=points, limit=400, epsabs=1e-10)[0]
        assert found.crps_values[i].item() == pytest.approx(crps, abs=1e-7)


@pytest.mark.slow
def test_a_fit_integrates_and_keeps_what_it_learned(tmp_path):
    """Through `condition`, `update`, files and state_dicts; older state_dicts load."""
    _, x, y, label, time = conditioned(RULES["grid"], 0.0)
    model = gp_orff.VectorFieldGP(curl_free(0.6), frequencies=RULES["grid"])
    model.fit(x, y, track=label, time=time, progress=False)
    assert "from 3 tracks, the standard deviation of offset" in str(model.report)
    slow, field = model.likelihood.slow_variance, model.posterior()(x[:4])
    upper = model.likelihood.quantile(field, 0.975)
    assert slow.weights.sum().item() == pytest.approx(1.0)
    assert torch.equal(learned(model).values, slow.values)
    half = upper - field.mean
    below = (
        torch.special.ndtr(
            half.unsqueeze(-1)
            / (field.variance + model.likelihood.noise)
            .add(model.likelihood.block_variance)
            .unsqueeze(-1)
            .add(slow.values)
            .sqrt()
        )
        @ slow.weights
    )
    torch.testing.assert_close(below, torch.full_like(below, 0.975))
    model.save(tmp_path / "model.pt")
    loaded = gp_orff.VectorFieldGP.load(tmp_path / "model.pt")
    torch.testing.assert_close(loaded.likelihood.quantile(loaded.posterior()(x[:4]), 0.975), upper)
    state = model.likelihood.state_dict()
    other = likelihood()
    other.load_state_dict(state)
    assert torch.equal(other.slow_variance.values, slow.values)
    other.load_state_dict({k: v for k, v in state.items() if not k.startswith("slow")})
    assert other.slow_variance is None
    later = {"track": ["new"] * 3, "time": time[:3]}
    model.update(x[:3], y[:3], **later).condition(x, y, track=label, time=time)
    assert torch.equal(model.likelihood.slow_variance.values, slow.values)
    assert torch.equal(model.double().likelihood.slow_variance.values, slow.values)
    model.likelihood.offset_variance = 0.1
    assert model.likelihood.slow_variance is None
    frozen = gp_orff.VectorFieldGP(curl_free(0.6), likelihood=model.likelihood)
    frozen.likelihood.raw_offset_variance.requires_grad_(False)
    frozen.fit(x, y, track=label, time=time, progress=False)
    assert frozen.likelihood.slow_variance is None
    assert frozen.likelihood.offset_variance.item() == pytest.approx(0.1)


def test_what_leaves_the_variance_of_new_tracks_as_it_is():
    """One track under an unknown mean tells nothing, many offsets tell enough."""
    x, y = uniform(900, 2), draw(900, 2)
    model = gp_orff.VectorFieldGP(
        curl_free(0.6), likelihood=likelihood(), frequencies=RULES["grid"]
    )
    assert learned(model.condition(x[:30], y[:30], track="one")) is None
    assert learned(model.condition(x[:400], y[:400], track=np.arange(400) // 2)) is not None
    assert learned(model.condition(x, y, track=np.arange(900) // 2)) is None
    zero = MultitaskMean(ZeroMean(), num_tasks=P)
    known = gp_orff.VectorFieldGP(curl_free(0.6), likelihood=likelihood(), mean=zero)
    assert learned(known.condition(x[:30], y[:30], track="one")) is not None


@pytest.mark.parametrize(
    ("constraint", "low", "high"),
    [
        (GreaterThan(0.2), 0.2, math.inf),
        (Interval(0.0, 0.3), 0.0, 0.3),
        (Interval(0.2499, 0.2501), 0.2499, 0.2501),
    ],
)
def test_the_variance_of_offsets_stays_within_its_bounds(constraint, low, high):
    model, *_ = conditioned(None, 0.0)
    noise = gp_orff.TrackLikelihood(P, offset_variance_constraint=constraint).double()
    for name in ("noise", "correlated_variance", "correlation_time"):
        setattr(noise, name, getattr(model.likelihood, name).item())
    noise.offset_variance = 0.25
    model.likelihood = noise
    found = learned(model)
    likely = found.values[found.weights > 1e-6] - noise.correlated_variance.item()
    assert low - 0.05 - 1e-9 <= likely.min()  # of that, correlated noise may have 0.05
    assert likely.max() <= high + 1e-9


def test_the_check_of_a_fit_counts_with_the_mixture():
    """Offsets of standard deviation one, where the largest evidence would say 0.01."""
    x = uniform(12, 1, 2, seed=1) + 0.05 * draw(12, 10, 2, seed=2).cumsum(1)
    y = torch.sin(2 * x) + draw(12, 1, 2, seed=3) + 0.1 * draw(12, 10, 2, seed=4)
    noise = likelihood()
    noise.noise, noise.offset_variance, noise.correlated_variance = 0.1, 1e-4, 1e-4
    model = gp_orff.VectorFieldGP(curl_free(0.6), likelihood=noise)
    model.condition(x.flatten(0, 1), y.flatten(0, 1), track=np.arange(120) // 10)
    before = calibration_of(model.state, model.mean)
    noise.slow_variance = SlowVariance(torch.ones(64).double(), torch.full((64,), 1 / 64).double())
    after = calibration_of(model.state, model.mean)
    assert before.note
    assert before.coverage < 0.5
    assert not after.note
    assert after.independent < before.independent  # what a track shares is more
