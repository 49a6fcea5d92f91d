"""Files: a loaded model equals the saved model, and an interrupted save leaves a complete file."""

import contextlib
import io
import os
from pathlib import Path

import gpytorch
import numpy as np
import pytest
import torch
from gpytorch.constraints import GreaterThan, Interval
from gpytorch.kernels import ConstantKernel, Kernel, LCMKernel, MultitaskKernel, RBFKernel
from gpytorch.likelihoods import MultitaskGaussianLikelihood
from gpytorch.priors import GammaPrior, NormalPrior

import gp_orff
from gp_orff.data import dataset
from gp_orff.models import storage
from tests.support import registry
from tests.support.fields import curl_free, directions, flow

pytestmark = pytest.mark.usefixtures("no_check_of_random_features")

XS = 1.6 * torch.rand(20, 2, generator=torch.Generator().manual_seed(5)).double() - 0.8


def numbers(model, xs=XS):
    field = model.posterior()
    evidence = model.log_marginal_likelihood().detach().reshape(1)
    return [field.mean(xs), field.variance(xs), evidence, *(p.detach() for p in model.parameters())]


def assert_same(model, other, xs=XS):
    for mine, theirs in zip(numbers(model, xs), numbers(other, xs), strict=True):
        assert torch.equal(mine, theirs)


def constrained():
    kernel = curl_free(0.4)
    kernel.base_kernel.base_kernel.register_constraint("raw_lengthscale", Interval(0.1, 2.0))
    kernel.base_kernel.base_kernel.lengthscale = 0.4
    kernel.register_constraint("raw_outputscale", GreaterThan(1e-3))
    kernel.outputscale = 0.2
    kernel.raw_outputscale.requires_grad_(False)
    return kernel.double()


KERNELS = {
    "field": lambda: curl_free(0.4),
    "helmholtz": lambda: gp_orff.HelmholtzKernel(gpytorch.kernels.MaternKernel(nu=2.5), num_dims=2),
    "constrained": constrained,
    "separable": lambda: MultitaskKernel(RBFKernel(ard_num_dims=2), num_tasks=2, rank=1),
    "lcm": lambda: LCMKernel([RBFKernel(), gpytorch.kernels.MaternKernel()], num_tasks=2, rank=1),
    "sum": lambda: (
        curl_free(0.4)
        + MultitaskKernel(ConstantKernel(), num_tasks=2)
        + MultitaskKernel(gp_orff.GeneralMaternKernel(nu=2.2), num_tasks=2)
    ),
}
RULES = {
    "exact": None,
    "grid": gp_orff.Auto(exact_values=0, max_features=600),
    "budget": gp_orff.Grid(domain=((-2, 2), (-2, 2)), max_features=200),
    "random": gp_orff.QuasiMonteCarlo(32, measure="base", seed=3),
}
LEARNS = [  # that are seen to go on learning after they were loaded
    ("constrained", "exact"),
    ("constrained", "grid"),
    ("separable", "budget"),
]


SAVED = [  # every kernel twice, every rule with three; files keep the one apart from the other
    ("field", "exact"),
    ("field", "random"),
    ("helmholtz", "grid"),
    ("helmholtz", "budget"),
    ("constrained", "exact"),
    ("constrained", "grid"),
    ("separable", "budget"),
    ("separable", "random"),
    ("lcm", "exact"),
    ("lcm", "budget"),
    ("sum", "grid"),
    ("sum", "random"),
]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the truncated variance:gp_orff.GridWarning")  # few features
@pytest.mark.parametrize(("name", "rule"), SAVED)
def test_a_loaded_model_is_the_saved_one(name, rule, tmp_path, monkeypatch):
    """To the last digit; it goes on: readings are added, hyperparameters learned. On a grid, files
    have statistics, as of many readings."""
    if rule != "exact":
        monkeypatch.setattr(dataset, "MOST_KEPT", 0)
    torch.manual_seed(0)  # gpytorch starts task covariances at random
    x, y, _ = flow(130)
    model = gp_orff.VectorFieldGP(KERNELS[name](), frequencies=RULES[rule])
    model.likelihood.noise = 0.02
    model.condition(x, y).save(tmp_path / "model.pt")
    loaded = gp_orff.VectorFieldGP.load(tmp_path / "model.pt")
    assert_same(model, loaded)
    mine, theirs = ({**own.report.to_dict(), "held": None} for own in (model, loaded))
    assert mine == theirs  # though many data come back as their statistics
    frozen = [p.requires_grad for p in loaded.parameters()]
    assert frozen == [p.requires_grad for p in model.parameters()]
    before = numbers(loaded)[0]
    loaded.update(x[:20], y[:20])
    model.update(x[:20], y[:20])
    torch.testing.assert_close(numbers(loaded)[0], numbers(model)[0], rtol=0, atol=1e-8)
    assert not torch.equal(numbers(loaded)[0], before)
    loaded.save(tmp_path / "again.pt")
    assert_same(loaded, gp_orff.VectorFieldGP.load(tmp_path / "again.pt"))
    if (name, rule) in LEARNS:
        nats = loaded.log_marginal_likelihood().item()
        loaded.fit(progress=False, warm_start=True)
        assert loaded.log_marginal_likelihood().item() > nats + 10


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in registry.CASES if name != "spectral_matrix"])
def test_every_kernel_has_a_recipe(name, tmp_path):
    case = registry.CASES[name]()
    model = gp_orff.VectorFieldGP(case.kernel, frequencies=gp_orff.MonteCarlo(4))
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(30, case.num_dims, generator=generator).double()
    y = torch.randn(30, case.num_outputs, generator=generator).double()
    model.condition(x, y).save(tmp_path / "model.pt")
    assert_same(model, gp_orff.VectorFieldGP.load(tmp_path / "model.pt"), x)


@pytest.mark.parametrize("base", [None, *registry.SMOOTH, *registry.TRAINED_DENSITY])
def test_the_inputs_of_a_kernel_have_a_recipe(base):
    """Space and time, in which the halves of a Helmholtz kernel select their inputs."""
    build = {**registry.SPECTRA, **registry.TRAINED_DENSITY}.get(base, lambda: None)
    space = gp_orff.HelmholtzKernel(build(), num_dims=2, active_dims=(1, 2))
    kernel = space * RBFKernel(active_dims=(0,))
    again = storage.build(storage.describe(kernel.double()), None, "kernel")
    x = flow(8)[0]
    x = torch.cat([x[:, :1] ** 2, x], dim=-1)
    assert torch.equal(again(x).to_dense(), kernel(x).to_dense())
    dims = [part.active_dims for part in kernel.modules() if isinstance(part, Kernel)]
    found = [part.active_dims for part in again.modules() if isinstance(part, Kernel)]
    assert str(found) == str(dims)


@pytest.mark.slow
@pytest.mark.parametrize("held", ["data", "statistics"])
def test_every_kind_of_reading_is_kept(held, tmp_path, monkeypatch):
    x, y, _ = flow(500)
    gaps = y.clone()
    gaps[::3, 0] = float("nan")
    u = directions(500)
    chunks = [
        {"x": x, "y": gaps, "variances": np.linspace(1, 2, 500)},
        {"x": x, "y": (u * y).sum(-1), "directions": u, "group": "radar"},
    ]
    for points in (60, 500):
        cut = [{k: v[:points] if k != "group" else v for k, v in c.items()} for c in chunks]
        model = gp_orff.VectorFieldGP(
            curl_free(0.4), likelihood=gp_orff.MultitaskStudentTLikelihood(2)
        )
        model.condition(cut, missing="mask")
        with monkeypatch.context() as patch:
            if held == "statistics":
                patch.setattr(dataset, "MOST_KEPT", 0)
            model.save(tmp_path / "model.pt")
        exact = points == 60
        assert _load(tmp_path).report.held == ("data" if exact else held)
        assert_same(model, _load(tmp_path))


def _load(folder, **how):
    return gp_orff.VectorFieldGP.load(folder / "model.pt", **how)


def test_a_model_without_data_is_kept(tmp_path):
    likelihood = MultitaskGaussianLikelihood(2, rank=1)
    model = gp_orff.VectorFieldGP(
        curl_free(0.3), likelihood=likelihood, mean=gpytorch.means.ZeroMean()
    )
    model.save(tmp_path / "model.pt")
    loaded = _load(tmp_path)
    for mine, theirs in zip(model.parameters(), loaded.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    assert loaded.report.action == "not fitted"


@pytest.mark.slow
def test_a_file_is_small_and_plain(tmp_path):
    x, y, _ = flow(20_000)
    model = gp_orff.VectorFieldGP(curl_free(0.3)).condition(x, y)
    model.save(tmp_path / "model.pt")
    assert os.path.getsize(tmp_path / "model.pt") < 1e6 < 20_000 * 4 * 8 * 2
    content = torch.load(tmp_path / "model.pt", weights_only=True)
    assert content["format"] == "gp_orff.VectorFieldGP"
    assert content["version"] == storage.VERSION
    loaded = _load(tmp_path)
    wide = 1.3 * XS / 0.8
    one, other = model.posterior().mean(wide), loaded.posterior().mean(wide)
    torch.testing.assert_close(one, other, rtol=0, atol=2e-3)  # a wider grid of its own
    with pytest.raises(ValueError, match="domain"):
        loaded.posterior().mean(9 * XS)


class Mine(RBFKernel):
    """A third party's kernel."""


def test_kernels_of_others_are_given_again(tmp_path):
    @gp_orff.spectrum.register
    def _(kernel: Mine):
        return gp_orff.spectrum(RBFKernel(ard_num_dims=kernel.ard_num_dims).double())

    x, y, _ = flow(100)
    kernels = {
        "class": lambda: MultitaskKernel(Mine(), num_tasks=2),
        "prior": lambda: gp_orff.CurlFreeKernel(
            RBFKernel(lengthscale_prior=gpytorch.priors.GammaPrior(2.0, 3.0)), num_dims=2
        ),
    }
    for build in kernels.values():
        model = gp_orff.VectorFieldGP(build()).condition(x, y)
        model.save(tmp_path / "model.pt")
        with pytest.raises(ValueError, match="pass kernel="):
            _load(tmp_path)
        assert_same(model, _load(tmp_path, kernel=build()))
        with pytest.raises(ValueError, match="other parameters"):
            _load(tmp_path, kernel=gp_orff.HelmholtzKernel(num_dims=2))


@pytest.fixture
def saved(tmp_path):
    """The positions of a model's data, and the file it is in."""
    x, y, _ = flow(60)
    path = tmp_path / "model.pt"
    gp_orff.VectorFieldGP(curl_free(0.3)).condition(x, y).save(path)
    return x, path


def test_files_that_end_early_say_so(saved, tmp_path):
    _, path = saved
    whole = path.read_bytes()
    for size in (0, 10, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match="damaged"):
            _load(tmp_path)


def test_damaged_numbers_are_noticed(saved, tmp_path):
    """Any byte of the positions, wherever it lies in the file."""
    x, path = saved
    whole, numbers = path.read_bytes(), x.numpy().tobytes()
    start = whole.index(numbers)
    for place in start + np.random.default_rng(0).integers(0, len(numbers), 30):
        path.write_bytes(with_damage(whole, place))
        with pytest.raises(ValueError, match="damaged"):
            _load(tmp_path)


@pytest.mark.slow
def test_damage_elsewhere_is_noticed_or_does_no_harm(saved, tmp_path):
    """In padding, in dates of the archive."""
    _, path = saved
    whole, expected = path.read_bytes(), _load(tmp_path)
    for place in np.random.default_rng(0).integers(0, len(whole), 60):
        path.write_bytes(with_damage(whole, place))
        with contextlib.suppress(ValueError):
            assert_same(_load(tmp_path), expected)


def with_damage(whole, place):
    return whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :]


def test_files_of_other_kinds_and_versions_say_so(saved, tmp_path):
    _, path = saved
    content = torch.load(path, weights_only=True)
    torch.save({**content, "version": 99}, path)
    with pytest.raises(ValueError, match=r"version 99.*install a newer gp_orff"):
        _load(tmp_path)
    torch.save({**content, "format": "other"}, path)
    with pytest.raises(ValueError, match="expected a file of a gp_orff"):
        _load(tmp_path)
    torch.save([1, 2], path)
    with pytest.raises(ValueError, match="expected a file of"):
        _load(tmp_path)
    with pytest.raises(FileNotFoundError):
        gp_orff.VectorFieldGP.load(tmp_path / "nothing.pt")


CUT_OFF = {  # at which call of a save, before or after it: whether the new file is there
    "before anything is written": ("torch.save", "before", False),
    "half written": ("torch.save", "halfway", False),
    "before the disk has it": ("os.fsync", "before", False),
    "before it has its name": ("os.replace", "before", False),
    "when it has its name": ("os.replace", "after", True),
}


@pytest.mark.slow
@pytest.mark.parametrize("killed", [False, True], ids=["raised", "killed"])
@pytest.mark.parametrize("moment", CUT_OFF)
def test_saves_that_are_cut_off_leave_a_whole_file(moment, killed, tmp_path, monkeypatch):
    """What is there afterwards is the old or the new model. A process that is killed does not tidy
    up, of one that raises there is nothing left."""
    x, y, _ = flow(400)
    path = tmp_path / "model.pt"
    model = gp_orff.VectorFieldGP(curl_free(0.3), frequencies=gp_orff.Auto(exact_values=0))
    model.likelihood.noise = 0.1
    model.condition(x, y).save(path)
    content = storage.read(path, "gp_orff.VectorFieldGP")
    state = content["likelihood"]["state"]
    state["raw_noise"] = _raw(0.2, state["raw_noise"])
    call, when, new = CUT_OFF[moment]
    with monkeypatch.context() as fault:
        fault.setattr(call, cut_off(call, when))
        if killed:
            fault.setattr(Path, "unlink", lambda *_, **__: None)
        with pytest.raises(KeyboardInterrupt):
            storage.write(path, "gp_orff.VectorFieldGP", content)
    assert killed or list(tmp_path.iterdir()) == [path]
    noise = gp_orff.VectorFieldGP.load(path).likelihood.noise.item()
    assert noise == pytest.approx(0.2 if new else 0.1, abs=1e-6)
    storage.write(path, "gp_orff.VectorFieldGP", content)  # nothing that is left is in the way
    assert gp_orff.VectorFieldGP.load(path).likelihood.noise.item() == pytest.approx(0.2)


def cut_off(call, when):
    """The function, which raises before it does anything, halfway or when all is done."""
    original = {"torch.save": torch.save, "os.fsync": os.fsync, "os.replace": os.replace}[call]

    def interrupted(*arguments):
        if when == "halfway":
            whole = io.BytesIO()
            original(arguments[0], whole)
            arguments[1].write(whole.getvalue()[: whole.tell() // 2])
        elif when == "after":
            original(*arguments)
        raise KeyboardInterrupt

    return interrupted


def _raw(value, like):
    return GreaterThan(0.0).double().inverse_transform(torch.full_like(like, value))


def test_what_a_recipe_cannot_say_is_asked_for(tmp_path):
    """A constraint with a transform of its own; a kernel that stands in two places."""
    x, y, _ = flow(60)

    def own_transform():
        kernel = curl_free(0.4)
        kernel.register_constraint(
            "raw_outputscale", GreaterThan(1e-3, transform=torch.exp, inv_transform=torch.log)
        )
        kernel.outputscale = 0.2
        return kernel.double()

    def shared():
        base = RBFKernel()
        return MultitaskKernel(base, num_tasks=2) + gp_orff.CurlFreeKernel(base, num_dims=2)

    for build in (own_transform, shared):
        torch.manual_seed(0)  # gpytorch starts task covariances at random
        model = gp_orff.VectorFieldGP(build(), frequencies=gp_orff.MonteCarlo(8)).condition(x, y)
        model.save(tmp_path / "model.pt")
        with pytest.raises(ValueError, match="pass kernel="):
            _load(tmp_path)
        assert_same(model, _load(tmp_path, kernel=build()))


def test_a_periodic_kernel_of_several_inputs(tmp_path):
    """Which is exact only, and whose constructor does not take its default ard_num_dims=None."""
    x, y, _ = flow(60)
    kernel = gp_orff.SeparableKernel(gpytorch.kernels.PeriodicKernel(), torch.eye(2)).double()
    model = gp_orff.VectorFieldGP(kernel).condition(x, y)
    model.save(tmp_path / "model.pt")
    assert_same(model, _load(tmp_path))
    with pytest.raises(NotImplementedError, match="one input"):
        gp_orff.VectorFieldGP(kernel, frequencies=gp_orff.Grid.for_data(x)).condition(x, y)


def test_arguments_are_captured_from_attributes():
    """Of any kernel of gpytorch, unless it keeps one of them nowhere, or its state elsewhere."""
    kernel = gpytorch.kernels.PiecewisePolynomialKernel(q=3, ard_num_dims=2, active_dims=(2, 0))
    built = storage.build(storage.describe(kernel), None, "kernel")
    assert (built.q, built.ard_num_dims, built.active_dims.tolist()) == (3, 2, [2, 0])
    assert storage.describe(gpytorch.kernels.IndexKernel(3, rank=2))["recipe"] is None
    related = gp_orff.HelmholtzKernel(gp_orff.LearnedSpectrumKernel(), num_dims=2)
    assert storage.describe(related)["recipe"] is not None
    halves = related + MultitaskKernel(RBFKernel(), num_tasks=2)
    assert storage.describe(halves)["recipe"] is None


@pytest.mark.parametrize("height", [None, 0.25])
def test_heights_follow_later_data_as_before(height):
    kernel = gp_orff.HarmonicKernel(reference_height=height)
    if height is None:
        kernel.set_heights(0.25, 1.0, 2.0)
    built = storage.build(storage.describe(kernel), None, "kernel")
    assert built.follows_data == (height is None)
    assert (built.reference_height, built.mean_height) == (0.25, kernel.mean_height)


@pytest.mark.parametrize("scale", [3.0, 1.0])
def test_priors_that_a_constructor_makes_have_a_recipe(scale):
    kernel = gp_orff.HelmholtzKernel(gp_orff.LearnedSpectrumKernel(5), num_dims=2)
    _, closure, setting = kernel._priors["level_prior"]
    kernel.register_prior("level_prior", NormalPrior(0.0, scale), closure, setting)
    built = storage.build(storage.describe(kernel.double()), None, "kernel")
    assert built.level_prior.scale.item() == scale
    kernel.register_prior("level_prior", GammaPrior(1.0, scale), closure, setting)
    assert storage.describe(kernel.double())["recipe"] is None


def test_names_of_instruments_are_any_strings(tmp_path):
    x, y, _ = flow(60)
    names = np.array(["keys", "a.b", "training", ""] * 15)
    model = gp_orff.VectorFieldGP(curl_free(0.4)).condition(x, y, group=names)
    assert set(model.likelihoods) == {"keys", "a.b", "training"}
    model.likelihoods["a.b"].noise = 0.3
    model.save(tmp_path / "model.pt")
    loaded = _load(tmp_path)
    assert loaded.likelihoods["a.b"].noise.item() == pytest.approx(0.3)
    assert_same(model, loaded)
    with pytest.raises(KeyError):
        loaded.likelihoods["c"]


def test_a_rule_given_at_loading_serves_what_comes_next(tmp_path):
    """The posterior is that of the rule it was made with."""

    class Mine:
        """A third party's rule."""

        def __init__(self, count):
            self.inner = gp_orff.MonteCarlo(count, seed=4)

        def draw(self, *arguments):
            return self.inner.draw(*arguments)

    x, y, _ = flow(80)
    model = gp_orff.VectorFieldGP(curl_free(0.4), frequencies=Mine(16)).condition(x, y)
    model.save(tmp_path / "model.pt")
    with pytest.raises(ValueError, match="frequencies="):
        _load(tmp_path)
    assert_same(model, _load(tmp_path, frequencies=Mine(16)))
    model = gp_orff.VectorFieldGP(curl_free(0.4), frequencies=gp_orff.MonteCarlo(16))
    model.condition(x, y).save(tmp_path / "model.pt")
    assert_same(model, _load(tmp_path, frequencies=gp_orff.MonteCarlo(50)))


@pytest.mark.skipif(os.name != "posix", reason="permissions of POSIX")
def test_files_have_the_permissions_of_other_files(tmp_path):
    """A new one those of `open`; one that is replaced keeps its own."""
    model = gp_orff.VectorFieldGP(curl_free(0.4))
    (tmp_path / "other").touch()
    expected = (tmp_path / "other").stat().st_mode
    model.save(tmp_path / "model.pt")
    assert (tmp_path / "model.pt").stat().st_mode == expected
    (tmp_path / "model.pt").chmod(0o640)
    model.save(tmp_path / "model.pt")
    assert (tmp_path / "model.pt").stat().st_mode & 0o777 == 0o640
