"""The report of a model: numbers, their names, their standard errors, and progress."""

import io
import json
import math
import re
import sys
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import gpytorch
import numpy as np
import pytest
import torch
from gpytorch.kernels import MaternKernel, MultitaskKernel, RBFKernel, ScaleKernel
from gpytorch.likelihoods import MultitaskGaussianLikelihood
from gpytorch.priors import LogNormalPrior

import gp_orff
from gp_orff.fitting.journal import Bar, Lines, Stage
from gp_orff.fitting.names import parameter_names
from gp_orff.fitting.starting_values import with_amplitude
from gp_orff.models import report as reports
from gp_orff.models.report import Curvature
from tests.support.oracles import log_density
from tests.support.registry import CASES

WITHOUT_EXACT = gp_orff.Auto(exact_values=0, max_features=2000)
ONE_THREAD = gp_orff.settings.num_threads(1)  # no measurement, no note of it
FROZEN = sorted((Path(__file__).parents[1] / "frozen").glob("*.pt"))


def uniform(n, seed=0):
    return torch.rand(n, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def curl_free(lengthscale=0.4, outputscale=0.16):
    kernel = ScaleKernel(gp_orff.CurlFreeKernel(num_dims=2)).double()
    kernel.base_kernel.base_kernel.lengthscale, kernel.outputscale = lengthscale, outputscale
    return kernel


def readings(n=60, seed=0, noise=0.1):
    """A draw of the curl-free kernel."""
    x, generator = uniform(n, seed), torch.Generator().manual_seed(seed + 1)
    covariance = curl_free()(x).to_dense().detach() + noise**2 * torch.eye(2 * n)
    z = torch.randn(2 * n, generator=generator, dtype=torch.float64)
    return x, (torch.linalg.cholesky(covariance) @ z).reshape(n, 2)


def fitted(x, y, rule=None, kernel=None, **how):
    kernel = curl_free() if kernel is None else kernel
    model = gp_orff.VectorFieldGP(kernel, frequencies=rule, **how)
    model.likelihood.noise = 0.01
    return model.fit(x, y, progress=False, warm_start=True)


@pytest.fixture(scope="module", name="fit")
def _fit():
    with ONE_THREAD:
        return fitted(*readings(125))


# --- names -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_names_tell_all_parameters_apart_without_plumbing(name):
    """A dict has every name once; all parameters are in it, and the same names come again."""
    kernel, again = (with_amplitude(CASES[name]().kernel) for _ in range(2))
    names = parameter_names(kernel, {})
    assert set(names.values()) == set(kernel.parameters())
    assert list(names) == list(parameter_names(again, {}))
    plumbing = ("raw_", "base_kernel", "kernels", "module", "..")
    assert not any(part in name for name in names for part in plumbing)


@pytest.mark.parametrize(
    ("kernel", "expected"),
    [
        (lambda: ScaleKernel(gp_orff.CurlFreeKernel(num_dims=2)), ["outputscale", "lengthscale"]),
        (
            lambda: gp_orff.HelmholtzKernel(num_dims=2),
            [
                "curl_free.outputscale",
                "curl_free.lengthscale",
                "divergence_free.outputscale",
                "divergence_free.lengthscale",
            ],
        ),
        (
            lambda: curl_free() + curl_free(),
            [
                "curl_free_1.outputscale",
                "curl_free_1.lengthscale",
                "curl_free_2.outputscale",
                "curl_free_2.lengthscale",
            ],
        ),
        (
            lambda: curl_free() * MaternKernel(active_dims=(2,)),
            ["outputscale", "curl_free.lengthscale", "matern.lengthscale"],
        ),
        (
            lambda: ScaleKernel(ScaleKernel(RBFKernel())),
            ["outputscale", "rbf.outputscale", "lengthscale"],
        ),
    ],
)
def test_names_are_what_a_reader_would_say(kernel, expected):
    assert list(parameter_names(kernel(), {})) == expected


def test_noise_is_named_after_its_group():
    kernel, shared = RBFKernel(), gpytorch.likelihoods.GaussianLikelihood()
    other = gpytorch.likelihoods.GaussianLikelihood()
    names = parameter_names(kernel, {"": shared, "adcp": other, "again": shared})
    assert list(names) == ["lengthscale", "noise", "adcp.noise"]  # a shared one has one name


# --- numbers ---------------------------------------------------------------------------------


def test_a_report_has_the_numbers_of_a_fit(fit):
    report = fit.report
    assert (report.action, report.method, report.held) == ("fitted", "exact", "data")
    assert (report.points, report.numbers, report.features) == (125, 250, None)
    assert report.tolerance_reached is report.share_cut is report.cut_over_noise is None
    assert report.evidence == pytest.approx(fit.log_marginal_likelihood().item(), rel=1e-12)
    assert report.noise == {"default": fit.likelihood.noise.item()}
    assert report.hyperparameters["lengthscale"].value == pytest.approx(
        fit.kernel.base_kernel.base_kernel.lengthscale.item()
    )
    assert [stage.name for stage in report.stages] == ["exact kernel"]
    assert 0 < sum(stage.seconds for stage in report.stages) < report.seconds
    assert report.threads == 1
    assert report.stages[-1].nats_per_number == pytest.approx(report.evidence / 250)


@pytest.mark.parametrize(
    ("rule", "method"),
    [
        (WITHOUT_EXACT, "grid"),
        (gp_orff.QuasiMonteCarlo(200), "random"),
        (gp_orff.GaussHermite(12), "quadrature"),
    ],
)
def test_what_represents_the_kernel(rule, method):
    x, y = readings(125)
    with gp_orff.settings.check_features(False):
        model = gp_orff.VectorFieldGP(curl_free(), frequencies=rule).condition(x, y)
        report = model.report
    assert report.method == method
    assert report.features == model.state.inference.num_features(model.kernel)
    on_grid = [report.tolerance_reached, report.aliasing, report.share_cut, report.cut_over_noise]
    assert all((own is not None) == (method == "grid") for own in on_grid)
    if method == "grid":  # shares of one variance
        prior = model.kernel(x[:1]).to_dense().diagonal().mean().item()
        expected = report.share_cut * prior / report.noise["default"]
        assert report.cut_over_noise == pytest.approx(expected, rel=1e-6)


@pytest.mark.slow
def test_actions_are_told_apart():
    (x, y), gauge = readings(125), gp_orff.Component([1.0, 0.0])
    model = gp_orff.VectorFieldGP(curl_free())
    assert (model.report.action, model.report.held) == ("not fitted", "nothing")
    assert str(model.report) == "not fitted: call fit(x, y) or condition(x, y)"
    assert model.condition(x, y).report.action == "conditioned"
    assert model.update(x[:5], y[:5]).report.action == "updated"
    assert model.report.points == 130
    model.observe(x[:5], torch.zeros(5), gauge, noise=1.0)
    assert (model.report.action, model.report.observed) == ("observed", {"Component": 5})
    assert model.report.numbers == 265
    assert model.fit(progress=False, warm_start=True).report.action == "fitted"
    assert str(model.update(x[:5], y[:5]).report).startswith("updated after a fit in")


def test_a_log_is_plain_and_complete(fit):
    found = fit.report.to_dict()
    assert list(found) == [
        *("action", "method", "features", "tolerance_reached", "aliasing", "share_cut"),
        *("cut_over_noise", "points", "numbers", "held", "observed", "skipped", "evidence"),
        *("evidence_error", "noise"),
        *(
            "hyperparameters",
            "stages",
            "seconds",
            "threads",
            "weak_priors",
            "coverage",
            "effective_draws",
            "pareto_k",
            "notes",
            "remarks",
        ),
    ]
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    stage = {"name", "evaluations", "seconds", "nats_per_number", "operations", "loss"}
    assert set(found["stages"][0]) == stage
    assert set(found["hyperparameters"]) == {"outputscale", "lengthscale", "noise", "mean"}
    for own in found["hyperparameters"].values():
        assert set(own) == {"value", "standard_error"}


def test_what_is_not_known_is_none_in_a_log():
    empty = gp_orff.VectorFieldGP(curl_free()).report.to_dict()
    assert empty["evidence"] is None
    noise = empty["hyperparameters"]["noise"]
    assert noise["value"] > 0
    assert noise["standard_error"] is None
    json.dumps(empty, allow_nan=False)


@pytest.mark.slow
def test_arrays_have_a_standard_error_for_each_number():
    x, y = readings(125)
    likelihood = MultitaskGaussianLikelihood(2, has_global_noise=False)
    kernel = ScaleKernel(gp_orff.CurlFreeKernel(RBFKernel(ard_num_dims=2), num_dims=2))
    model = gp_orff.VectorFieldGP(kernel, likelihood=likelihood).fit(x, y, progress=False)
    report = model.report
    for name in ("lengthscale", "task_noises", "mean"):
        own = report.hyperparameters[name]
        assert own.value.shape == own.standard_error.shape == (2,)
    np.testing.assert_allclose(report.noise["default"], report.hyperparameters["task_noises"].value)
    json.dumps(report.to_dict(), allow_nan=False)


# --- standard errors -------------------------------------------------------------------------


def dense_evidence(x, y, logs, prior=None):
    """log p(y) of a curl-free RBF kernel, K = σ²/ℓ² (I − u uᵀ) exp(−‖u‖²/2), u = τ/ℓ, at the best
    constant mean; logs are those of σ², ℓ and the noise."""
    scale, ell, noise = logs.exp()
    u = (x[:, None] - x[None]) / ell
    blocks = torch.eye(2) - u.unsqueeze(-1) * u.unsqueeze(-2)
    blocks = scale / ell**2 * blocks * torch.exp(-0.5 * u.square().sum(-1))[..., None, None]
    covariance = blocks.permute(0, 2, 1, 3).reshape(2 * len(x), -1)
    covariance = covariance + noise * torch.eye(2 * len(x))
    ones, flat = torch.eye(2).double().repeat(len(x), 1), y.reshape(-1)
    precise = torch.linalg.solve(covariance, ones)
    mean = torch.linalg.solve(ones.mT @ precise, precise.mT @ flat)
    found = log_density(covariance, flat - ones @ mean)
    return found if prior is None else found + prior.log_prob(ell)


def standard_errors_of(found, report):
    """sd(θ) = θ sd(log θ) of the three."""
    values = [report.hyperparameters[n].value for n in ("outputscale", "lengthscale", "noise")]
    logs = torch.tensor(values).double().log()
    hessian = torch.autograd.functional.hessian(found, logs)
    return np.array(values) * torch.linalg.inv(-hessian).diagonal().sqrt().numpy()


@pytest.mark.parametrize("prior", [None, LogNormalPrior(math.log(0.3), 0.05)])
def test_standard_errors_are_those_of_the_dense_hessian(prior):
    x, y = readings(125)
    kernel = curl_free()
    if prior is not None:
        kernel.base_kernel.base_kernel.register_prior(
            "lengthscale_prior", prior, lambda m: m.lengthscale, lambda m, v: None
        )
    report = fitted(x, y, kernel=kernel).report
    expected = standard_errors_of(lambda logs: dense_evidence(x, y, logs, prior), report)
    found = [
        report.hyperparameters[name].standard_error
        for name in ("outputscale", "lengthscale", "noise")
    ]
    np.testing.assert_allclose(found, expected, rtol=1e-5)  # differences: 1e-7 of the Hessian
    assert report.remarks == ()


def test_the_mean_has_that_of_generalised_least_squares(fit):
    x, _ = readings(125)
    covariance = fit.kernel(x).to_dense() + fit.likelihood.noise * torch.eye(250)
    ones = torch.eye(2).double().repeat(125, 1)
    information = ones.mT @ torch.linalg.solve(covariance, ones)
    expected = torch.linalg.inv(information).diagonal().sqrt().detach().numpy()
    np.testing.assert_allclose(
        fit.report.hyperparameters["mean"].standard_error, expected, rtol=1e-8
    )


def test_a_grid_has_those_of_the_exact_kernel(fit):
    """Both searches end within 0.01 nats of the maximum, a seventh of a standard error, and the
    errors differ there by as little as the hyperparameters do."""
    on_grid = fitted(*readings(125), WITHOUT_EXACT)
    assert on_grid.report.method == "grid"
    exact = fit.report.standard_errors()
    for name, found in on_grid.report.standard_errors().items():
        np.testing.assert_allclose(found, exact[name], rtol=0.1)


@pytest.mark.slow
def test_standard_errors_are_the_scatter_of_estimates():
    """Of log ℓ and log noise over 20 fields: the sample sd of 20 numbers has a standard error of
    1/√40 = 0.16, their mean one of 1/√20 = 0.22; three of them each."""
    scores = []
    for seed in range(20):
        with ONE_THREAD:
            model = fitted(*readings(125, seed=seed), mean=gpytorch.means.ZeroMean())
        truth = {"lengthscale": 0.4, "noise": 0.01}
        found = {name: model.report.hyperparameters[name] for name in truth}
        scores.append(
            [
                math.log(own.value / truth[name]) * own.value / own.standard_error
                for name, own in found.items()
            ]
        )
    scores = np.array(scores)
    assert np.isfinite(scores).all()
    assert (np.abs(scores.mean(0)) < 3 * 0.22).all()
    assert (np.abs(scores.std(0) - 1) < 3 * 0.16).all()


@pytest.mark.slow
def test_what_was_not_learned_has_none():
    x, y = readings(125)
    kernel = curl_free()
    kernel.base_kernel.base_kernel.raw_lengthscale.requires_grad_(False)
    model = fitted(x, y, kernel=kernel)
    errors = model.report.standard_errors()
    assert math.isnan(errors["lengthscale"])
    assert errors["outputscale"] > 0 < errors["noise"]
    model.update(x[:2], y[:2])
    errors = model.report.standard_errors()
    assert all(math.isnan(errors[name]) for name in ("outputscale", "lengthscale", "noise"))


@pytest.mark.slow
def test_what_the_data_do_not_tell_has_none():
    """A noise at the smallest value it may have, the longest lengthscale, rotations of a factor."""
    x = uniform(60)
    kernel = MultitaskKernel(RBFKernel(), num_tasks=2, rank=2)
    line = 0.2 * x + 1e-3 * torch.randn(60, 2, generator=torch.Generator().manual_seed(0))
    report = fitted(x, line.double(), kernel=kernel).report
    assert np.isnan(report.hyperparameters["covar_factor"].standard_error).all()
    longest = fitted(x, line.double()).report
    assert math.isnan(longest.hyperparameters["lengthscale"].standard_error)
    assert any("lengthscale" in note and "upper bound" in note for note in longest.notes)
    assert longest.hyperparameters["noise"].standard_error > 0  # with the lengthscale held


@pytest.mark.slow
def test_every_group_has_a_noise_and_its_standard_error():
    """Of 120 numbers of known field the relative error of a variance is √(2/120) = 0.13; the field
    takes some of them up."""
    (x, y), (z, w) = readings(60), readings(60, noise=0.3)
    model = gp_orff.VectorFieldGP(curl_free())
    model.fit([(x, y), {"x": z, "y": w, "group": "adcp"}], progress=False)
    report = model.report
    assert list(report.noise) == ["default", "adcp"]
    for label, name in (("default", "noise"), ("adcp", "adcp.noise")):
        own = report.hyperparameters[name]
        assert own.value == pytest.approx(report.noise[label])
        assert 0.1 < own.standard_error / own.value < 0.2


def test_student_t_noise_warns_of_its_weights():
    likelihood = gp_orff.MultitaskStudentTLikelihood(num_tasks=2)
    report = fitted(*readings(40), likelihood=likelihood).report
    assert report.hyperparameters["lengthscale"].standard_error > 0
    assert any("Student-t weights" in text for text in report.remarks)


def test_hyperparameters_far_from_a_maximum_have_none(fit):
    """The noise's standard error is a tenth of it: one that is 1.35 times as large is three away,
    4 nats below."""
    model = deepcopy(fit)
    model.likelihood.noise *= 1.35
    report = model.report
    assert report.hyperparameters["noise"].value == pytest.approx(
        1.35 * fit.report.hyperparameters["noise"].value
    )
    assert math.isnan(report.hyperparameters["noise"].standard_error)
    assert ["not at a maximum" in text for text in report.remarks] == [True]
    assert report.remarks[0] in str(report)


def test_what_was_learned_on_subsets_has_none(fit, monkeypatch):
    """The evidence of all numbers is not at its maximum, and each evaluation takes seconds."""
    monkeypatch.setattr(reports, "MOST_TRAINING", 10)
    curvature = Curvature(fit.state.snapshot(fit.mean), frozenset({"noise"}))
    assert curvature.evaluations == 0
    (remark,) = curvature.standard_errors.remarks
    assert "on subsets" in remark
    assert not curvature.standard_errors.values


@pytest.mark.slow
def test_a_report_stays_true_of_the_model_as_it_was():
    x, y = readings(125)
    model = fitted(x, y)
    other, report = deepcopy(model), model.report
    expected = other.report.to_dict()
    kept = other.state.snapshot(other.mean).kernel
    assert not any(own.requires_grad for own in kept.parameters())
    model.kernel.base_kernel.base_kernel.lengthscale = 0.9
    model.fit(2 * x, y, progress=False)
    assert report.to_dict() == expected
    assert model.report.to_dict() != expected


def test_standard_errors_wait_until_they_are_asked_for(monkeypatch):
    model, count = fitted(*readings(40)), []
    computed = reports.observed
    monkeypatch.setattr(reports, "observed", lambda *parts: count.append(1) or computed(*parts))
    report = model.report
    assert report.evidence
    assert report.hyperparameters["lengthscale"].value > 0
    assert not count
    slow = replace(report, stages=(Stage("slow", 1, 100.0, 0.0),))
    assert "report.standard_errors(), which takes about 600 s" in str(slow)
    assert not count
    assert str(report).count("±") == 5 - ("mean: zero" in str(report))  # one in the header
    assert model.report.standard_errors()
    assert len(count) == 1


# --- files -----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("rule", [None, WITHOUT_EXACT])
def test_a_file_keeps_the_report(rule, tmp_path):
    model = fitted(*readings(125), rule)
    model.save(tmp_path / "model.pt")
    loaded = gp_orff.VectorFieldGP.load(tmp_path / "model.pt")
    before, after = model.report, loaded.report
    assert (before.action, before.stages, before.notes) == (
        after.action,
        after.stages,
        after.notes,
    )
    for name, own in before.standard_errors().items():
        np.testing.assert_allclose(after.standard_errors()[name], own, rtol=1e-5)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("path", [p for p in FROZEN if p.stem != "values"], ids=lambda p: p.stem)
def test_files_of_before_tell_what_they_know(path):
    """Sentences, that are notes now."""
    report = gp_orff.VectorFieldGP.load(path).report
    said = torch.load(path, weights_only=True)["fit"]
    assert set(said["notes"]) <= set(report.notes)
    assert report.action in ("fitted", "conditioned")
    assert report.stages == ()
    assert str(report)


# --- progress --------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self):
        return True


def shown(stream, monkeypatch, call):
    monkeypatch.setattr(sys, "stderr", stream)
    return call(), stream.getvalue()


def test_a_log_file_gets_a_line_for_every_stage(monkeypatch):
    x, y = readings(125)
    model = gp_orff.VectorFieldGP(curl_free(), frequencies=WITHOUT_EXACT)
    model, text = shown(io.StringIO(), monkeypatch, lambda: model.fit(x, y))
    lines = text.splitlines()
    assert "\r" not in text
    assert len(lines) == len(model.report.stages) > 1
    for line, stage in zip(lines, model.report.stages, strict=True):
        assert line.startswith(f"{stage.name}: {stage.evaluations} evaluations, ")


def test_a_terminal_gets_a_bar_and_nobody_gets_nothing(monkeypatch):
    x, y = readings(40)
    model = gp_orff.VectorFieldGP(curl_free())
    _, text = shown(Terminal(), monkeypatch, lambda: model.fit(x, y, warm_start=True))
    assert "\r" in text
    assert "log evidence per value" in text
    for stream in (Terminal(), io.StringIO()):
        _, text = shown(stream, monkeypatch, lambda: model.fit(warm_start=True, progress=False))
        assert text == ""


@pytest.mark.parametrize("kind", [Terminal, io.StringIO])
def test_long_passes_say_how_far_they_are(kind, monkeypatch):
    for progress in (Bar, Lines):
        monkeypatch.setattr(progress, "seconds", 0.0)
    x, y = readings(40)
    chunks = [(x[:10], y[:10]), {"x": x[10:], "y": y[10:]}]
    model = gp_orff.VectorFieldGP(curl_free(), frequencies=WITHOUT_EXACT)
    _, text = shown(kind(), monkeypatch, lambda: model.fit(chunks, warm_start=True))
    found = re.findall(r"pass (\d+) over the data: (\d+) points read", text)
    assert found[:4] == [("1", "10"), ("1", "40"), ("2", "10"), ("2", "40")]
    assert "pass 1 over the data: 10 points read, 1 of 2 chunks" in text
    assert len(set(found)) == 2 * int(found[-1][0])  # a bar draws the last one again
    told = len(text)
    model.update(x[:5], y[:5])  # which shows nothing, and goes through the chunks again
    copied = deepcopy(model).report.points
    assert (copied, len(sys.stderr.getvalue())) == (45, told)


@pytest.mark.slow
def test_a_comparison_says_which_kernel_comes_next(monkeypatch):
    x, y = readings(40)
    kernels = {"short": curl_free(0.2), "long": curl_free(0.8)}
    call = lambda: gp_orff.compare_kernels(x, y, kernels)  # noqa: E731
    found, text = shown(io.StringIO(), monkeypatch, call)
    stages = [stage for model in found.models.values() for stage in model.report.stages]
    assert [line for line in text.splitlines() if line in ("short:", "long:")] == [
        "short:",
        "long:",
    ]
    assert len(text.splitlines()) == len(stages) + 2
    assert found.best.report.evidence == pytest.approx(max(found.evidence.values()))
