"""Saved models with every noise model: a loaded model is updated like the original model.

A file contains the data or their statistics, whichever are smaller. `forced` uses the statistics
for small data too.
"""

import contextlib
import itertools
import warnings
from dataclasses import replace
from pathlib import Path

import gpytorch
import numpy as np
import pytest
import torch
from gpytorch.kernels import MultitaskKernel, RBFKernel
from gpytorch.likelihoods import MultitaskGaussianLikelihood

import gp_orff
from gp_orff.data import dataset
from gp_orff.models import storage
from gp_orff.models.storage import pack_state, unpack_state
from tests.support import oracles
from tests.support.fields import curl_free, directions, flow

pytestmark = [
    pytest.mark.usefixtures("no_check_of_random_features"),
    pytest.mark.filterwarnings("ignore:the truncated variance:gp_orff.GridWarning"),
]

FROZEN = Path(__file__).parents[1] / "frozen"
FIRST, ALL = 90, 110  # readings that are saved, and with those that come after it
XS = 1.6 * torch.rand(6, 2, generator=torch.Generator().manual_seed(5)).double() - 0.8


def gaussian(rank=0, **options):
    likelihood = MultitaskGaussianLikelihood(2, rank=rank, **options).double()
    if likelihood.has_global_noise:
        likelihood.noise = 0.02
    if rank:
        likelihood.task_noise_covar_factor.data = torch.tensor([[0.1], [0.2]]).double()
    elif likelihood.has_task_noise:
        likelihood.task_noises = torch.tensor([0.01, 0.05])
    return likelihood


def student(**options):
    likelihood = gp_orff.MultitaskStudentTLikelihood(2, **options).double()
    likelihood.noise = 0.02
    return likelihood


def known(scale, **options):
    likelihood = gp_orff.KnownNoiseLikelihood(2, **options)
    likelihood.noise_scale = scale
    return likelihood


def covariances():
    root = torch.randn(ALL, 2, 2, generator=torch.Generator().manual_seed(1)).double()
    return 0.02 * (root @ root.mT + 0.2 * torch.eye(2).double())


def radial():
    u, y = directions(ALL), readings()[1]
    return {"y": (u * y).sum(-1), "directions": u}


def with_gaps():
    y = readings()[1]
    y[::4, 0] = float("nan")
    return {"y": y, "missing": "mask"}


def readings():
    """With some that are wrong, before and after the file is written."""
    x, y, _ = flow(ALL)
    y[::12] += 3.0
    return x, y


SPREAD = 0.5 + torch.rand(ALL, 2, generator=torch.Generator().manual_seed(2)).double()
GROUPS = {"group": np.array(["a", "b", ""] * ALL)[:ALL]}
TRACKS = {"track": np.arange(ALL) // 10, "time": np.arange(ALL)}
NOISES = {  # a likelihood, and what is given with the readings
    "global": (lambda: gaussian(has_task_noise=False), dict),
    "of each output": (lambda: gaussian(has_global_noise=False), dict),
    "correlated": (lambda: gaussian(rank=1), dict),
    "variances": (lambda: gaussian(has_task_noise=False), lambda: {"variances": SPREAD[:, 0]}),
    "of components": (lambda: gaussian(has_task_noise=False), lambda: {"variances": SPREAD}),
    "groups": (lambda: gaussian(has_task_noise=False), lambda: GROUPS),
    "gaps": (lambda: gaussian(rank=1), with_gaps),
    "radial": (lambda: gaussian(has_task_noise=False), radial),
    "known": (lambda: known(1.5), lambda: {"noise": 0.02 * SPREAD[:, 0]}),
    "known covariances": (lambda: known(1.0), lambda: {"noise": covariances()}),
    "Student-t": (student, dict),
    "Student-t, variances": (student, lambda: {"variances": SPREAD[:, 0]}),
    "Student-t, groups": (lambda: student(learn_deg_free=True), lambda: GROUPS),
    "Student-t, gaps": (student, with_gaps),
    "Student-t, radial": (student, radial),
    "Student-t, known": (lambda: known(1.5, deg_free=4.0), lambda: {"noise": 0.02 * SPREAD}),
    "Student-t, covariances": (lambda: known(1.0, deg_free=4.0), lambda: {"noise": covariances()}),
    "tracks": (lambda: gp_orff.TrackLikelihood(2), lambda: TRACKS),
}
GRID = gp_orff.Grid(spacing=1.2, cutoff=6.0, domain=((-2.0, 2.0), (-2.0, 2.0)))
KINDS = {  # the kernel, the rule, and what the file has
    "exact": (lambda: curl_free(0.5), None, "data"),
    "grid": (lambda: curl_free(0.5), gp_orff.Auto(exact_values=0, max_features=400), "data"),
    "grid, statistics": (lambda: curl_free(0.5), GRID, "statistics"),
    "separable": (
        lambda: MultitaskKernel(RBFKernel(ard_num_dims=2), num_tasks=2, rank=1),
        gp_orff.Auto(exact_values=0, max_features=150),
        "data",
    ),
    "random, dual": (lambda: curl_free(0.5), gp_orff.QuasiMonteCarlo(400, seed=3), "data"),
    "random": (lambda: curl_free(0.5), gp_orff.QuasiMonteCarlo(60, seed=3), "data"),
    "random, statistics": (lambda: curl_free(0.5), gp_orff.QuasiMonteCarlo(20), "statistics"),
}
FEW = ("gaps", "Student-t, known")  # crossed with every kind
BY_DATA = ("groups", "radial", "known covariances", "Student-t, groups", "tracks")
"""Of which files with data have what files with statistics do not sum up."""
CASES = [
    (noise, kind)
    for noise, kind in itertools.product(NOISES, KINDS)
    if noise in FEW or kind == "grid, statistics" or (kind == "exact" and noise in BY_DATA)
]
LEFT_OUT = [
    ("tracks", "grid, statistics"),  # files have the readings along tracks themselves
    ("Student-t", "grid, statistics"),  # with more in it below, and in the tests that follow
    ("Student-t, known", "grid"),  # rounds of EM: the same with statistics, and with separable ones
    ("Student-t, known", "random"),
]
CASES = [case for case in CASES if case not in LEFT_OUT]


def model_of(noise, kind):
    torch.manual_seed(0)  # gpytorch starts task covariances at random
    kernel, rule, _ = KINDS[kind]
    return gp_orff.VectorFieldGP(kernel(), likelihood=NOISES[noise][0](), frequencies=rule)


def given(noise, rows):
    """The arguments of some readings."""
    x, y = readings()
    content = {"x": x, "y": y, **NOISES[noise][1]()}
    return {
        name: value if isinstance(value, str) else value[rows] for name, value in content.items()
    }


@contextlib.contextmanager
def forced(held):
    """Files get the statistics of small data too, if `held` says so."""
    with pytest.MonkeyPatch.context() as patch:
        if held == "statistics":
            patch.setattr(dataset, "MOST_KEPT", 0)
        yield


def through_file(model, folder, held):
    with forced(held):
        model.save(folder / "model.pt")
    loaded = gp_orff.VectorFieldGP.load(folder / "model.pt")
    assert loaded.report.held == held
    return loaded


def assert_same(loaded, model):
    """To rounding: sums are added in another order."""
    mine, theirs = loaded.posterior(), model.posterior()
    scale = theirs.variance(XS).max().item()
    torch.testing.assert_close(mine.mean(XS), theirs.mean(XS), rtol=0, atol=1e-7 * scale**0.5)
    own, other = mine(XS).covariance_matrix, theirs(XS).covariance_matrix
    torch.testing.assert_close(own, other, rtol=0, atol=1e-7 * scale)
    nats = model.log_marginal_likelihood().detach()
    torch.testing.assert_close(
        loaded.log_marginal_likelihood().detach(), nats, rtol=1e-9, atol=1e-7
    )


@pytest.mark.slow
@pytest.mark.parametrize(("noise", "kind"), CASES)
def test_a_loaded_model_is_updated_as_the_unsaved_one(noise, kind, tmp_path):
    """Posterior and evidence are those of no file. The few noises that are crossed with every kind
    are updated twice, with a file before each update and after it."""
    held = KINDS[kind][2]
    model = model_of(noise, kind).condition(**given(noise, slice(0, FIRST)))
    loaded = through_file(model, tmp_path, held)
    assert_same(loaded, model)
    later = (
        [slice(FIRST, FIRST + 8), slice(FIRST + 8, ALL)] if noise in FEW else [slice(FIRST, ALL)]
    )
    for rows in later:
        before = model.posterior().mean(XS)
        model.update(**given(noise, rows))
        loaded.update(**given(noise, rows))
        assert (model.posterior().mean(XS) - before).abs().max() > 1e-6
        assert_same(loaded, model)
        if noise in FEW:
            loaded = through_file(loaded, tmp_path, held)
            assert_same(loaded, model)


@pytest.mark.slow
def test_new_readings_are_weighed_as_dense_algebra_weighs_them(tmp_path):
    """By a model that has nothing but statistics: E[r²] under the posterior of the readings before,
    and then the posterior of all. The grid truncates 1e-8."""
    x, y = readings()
    rule = gp_orff.Auto(exact_values=0, tolerance=1e-8)
    model = gp_orff.VectorFieldGP(
        curl_free(0.5), likelihood=student(), mean=zero_mean(), frequencies=rule
    )
    weights = torch.cat(model.condition(x[:FIRST], y[:FIRST]).state.data.weights)
    loaded = through_file(model, tmp_path, "statistics").update(x[FIRST:], y[FIRST:])
    prior, old = model.kernel(x).to_dense().detach(), 2 * FIRST
    noise = torch.diag((0.02 / weights).repeat_interleave(2))
    early = prior[:, :old]
    mean, covariance = oracles.condition(prior, early, early[:old] + noise, y[:FIRST].flatten())
    second = (y.flatten() - mean).square() + covariance.diagonal()
    distance = second[old:].reshape(-1, 2).sum(-1) / 0.02
    weights = torch.cat([weights, (4 + 2) / (4 + distance)])
    noisy = prior + torch.diag((0.02 / weights).repeat_interleave(2))
    cross = loaded.kernel(XS, x).to_dense().detach()
    latent = loaded.kernel(XS).to_dense().detach()
    mean, covariance = oracles.condition(latent, cross, noisy, y.flatten())
    field = loaded.posterior()
    torch.testing.assert_close(field.mean(XS).flatten(), mean, rtol=0, atol=1e-4)
    torch.testing.assert_close(field(XS).covariance_matrix, covariance, rtol=0, atol=1e-4)


def zero_mean():
    return gpytorch.means.MultitaskMean(gpytorch.means.ZeroMean(), 2)


def test_an_old_file_of_student_t_noise_is_updated():
    """It has statistics of few readings, which newer files do not have: what is updated has those
    of all readings."""
    loaded = gp_orff.VectorFieldGP.load(FROZEN / "student_t.pt")
    assert loaded.report.held == "statistics"
    x, y = readings()
    more = 0.5 * x[:20], y[:20]
    again = gp_orff.VectorFieldGP.load(FROZEN / "student_t.pt")
    total = again.statistics + again.statistics_of(*more)
    again.condition(total)
    loaded.update(*more)
    xs = 0.5 * XS
    torch.testing.assert_close(
        loaded.posterior().mean(xs), again.posterior().mean(xs), rtol=0, atol=1e-8
    )
    nats = again.log_marginal_likelihood()
    torch.testing.assert_close(loaded.log_marginal_likelihood(), nats, rtol=1e-9, atol=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("held", ["data", "statistics"])
def test_a_loaded_model_with_heavy_tails_learns_again(held, tmp_path):
    model = model_of("Student-t", "grid").condition(**given("Student-t", slice(ALL)))
    loaded = through_file(model, tmp_path, held)
    nats = loaded.log_marginal_likelihood().item()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", gp_orff.CalibrationWarning)  # of a tenth that is wrong
        loaded.fit(progress=False, warm_start=True)
    assert loaded.log_marginal_likelihood().item() > nats + 10


@pytest.mark.slow
@pytest.mark.parametrize("noise", ["global", "Student-t"])
def test_a_file_has_what_is_smaller(noise, tmp_path):
    """Data grow with their number, statistics hardly."""
    sizes, kinds = {}, ("data", "statistics")
    for count in (1000, 8000):
        x, y, _ = flow(count)
        model = gp_orff.VectorFieldGP(curl_free(0.5), likelihood=NOISES[noise][0]())
        model.condition(x, y).save(tmp_path / "model.pt")
        found = gp_orff.VectorFieldGP.load(tmp_path / "model.pt").report.held
        sizes[count, found] = (tmp_path / "model.pt").stat().st_size
        with forced("statistics"):
            model.save(tmp_path / "statistics.pt")
        statistics = (tmp_path / "statistics.pt").stat().st_size
        assert found == kinds[count > 1000]
        numbers = count * (5 if noise == "Student-t" else 4)  # x, y and weights
        if found == "data":
            assert 8 * numbers < sizes[count, found] < min(8 * numbers + 12_000, statistics)
        else:
            assert sizes[count, found] == statistics < 8 * numbers


def test_a_model_that_was_given_a_smaller_grid_keeps_it(tmp_path):
    """Where a larger one did not converge; an update does not try that again."""
    model = model_of("global", "grid").condition(**given("global", slice(FIRST)))
    state = model.state
    smaller = replace(state, representation=replace(state.representation, dense=True))
    storage.write(tmp_path / "state.pt", "state", pack_state(smaller))
    parts = model.kernel, {"": model.likelihood}, model.frequencies
    loaded = unpack_state(storage.read(tmp_path / "state.pt", "state"), *parts)
    assert loaded.representation.dense
