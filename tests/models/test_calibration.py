"""A fit checks a few held-out blocks and warns if its intervals do not cover them."""

import pytest
import scipy.stats
import torch
from gpytorch.kernels import MaternKernel, RBFKernel
from linear_operator import to_dense

import gp_orff
from gp_orff.data.dataset import Dataset
from gp_orff.data.reading import Options, read
from gp_orff.inference.left_out import Block, left_out
from gp_orff.models.calibration import (
    Calibration,
    calibration_of,
    first_readings,
    left_out_of_surroundings,
)
from tests.support.fields import (
    ALGEBRAS,
    conditioned,
    curl_free,
    directions,
    exact_problem,
    flow,
)


def overconfident():
    """A model of a rough field that may not learn that it is rough."""
    x, y, *_ = exact_problem(curl_free(0.3, lambda: MaternKernel(nu=1.5)), 2, 200, 20.0)
    model = gp_orff.VectorFieldGP(curl_free(1.0))
    model.kernel.requires_grad_(False)
    model.likelihood.noise = 0.01
    model.likelihood.requires_grad_(False)
    return model, x, y


def test_error_bars_that_are_too_small_are_told_of():
    model, x, y = overconfident()
    with pytest.warns(gp_orff.CalibrationWarning, match="check_calibration") as caught:
        model.fit(x, y, progress=False)
    note = model.report.notes[-1]
    assert note.startswith("95 % intervals cover")
    assert note in str(caught[0].message)
    said = calibration_of(model.state, model.mean)
    assert f"{said.coverage:.2f} of {said.numbers} values in {said.blocks} held-out blocks" in note
    found = model.cross_validate(x, y)
    assert said.coverage < 0.85
    assert abs(said.coverage - found.coverage) < 0.15  # of a few blocks, and of all


def test_it_can_be_switched_off_and_leaves_no_half_fitted_model():
    model, x, y = overconfident()
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(gp_orff.CalibrationWarning):  # here, warnings are errors
        model.fit(x, y, progress=False)
    assert all(map(torch.equal, before, model.parameters()))
    with pytest.raises(RuntimeError, match="no data yet"):
        model.posterior()
    with gp_orff.settings.check_calibration(False):
        model.fit(x, y, progress=False)
    assert not [note for note in model.report.notes if "intervals" in note]
    assert gp_orff.settings.check_calibration.on()


BASES = {"smooth": RBFKernel, "rough": lambda: MaternKernel(nu=1.5)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("base", "rule"), [("smooth", None), ("rough", gp_orff.Auto(exact_values=0))]
)
def test_calibrated_models_are_silent(base, rule):
    """On a field drawn from the prior; the report has no note."""
    x, y, *_ = exact_problem(curl_free(0.5, BASES[base]), 2, 120, 5.0)
    model = gp_orff.VectorFieldGP(curl_free(kernel=BASES[base]), frequencies=rule)
    model.fit(x, y, progress=False)
    assert not [note for note in model.report.notes if "intervals" in note]
    said = calibration_of(model.state, model.mean)
    assert said.coverage > 0.85
    assert 5 < said.independent <= said.numbers


@pytest.mark.usefixtures("no_check_of_random_features")
@pytest.mark.parametrize("along", [False, True], ids=["vectors", "along"])
@pytest.mark.parametrize("algebra", ALGEBRAS)
def test_predictions_of_a_block_have_the_covariance_of_the_rest(algebra, along):
    x, y, _ = flow(120)
    h = directions(120)
    options = {"directions": h} if along else {}
    model = gp_orff.VectorFieldGP(curl_free(0.4), frequencies=ALGEBRAS[algebra])
    model.likelihood.noise = 0.05
    y = (y * h).sum(-1) if along else y
    state = model.condition(x, y, **options).state
    parts = model.kernel, state.e_step.noises, None

    def inference(rows):
        kept = {name: value[rows] for name, value in options.items()}
        data = Dataset.in_memory(read(x[rows], y[rows], 2, Options(**kept)))
        return state.inference.of(data)

    block, tested = torch.arange(120) < 20, torch.arange(120) < 10
    ((said,),) = left_out(inference(slice(None)), *parts, [Block(0, block, tested)])
    rest = inference(~block).posterior(*parts).field(fixed=False)
    expected = rest.covariance(x[:10]).detach()
    if along:
        blocks = expected.unflatten(0, (10, 2)).unflatten(2, (10, 2))
        expected = torch.einsum("ni,nimj,mj->nm", h[:10], blocks, h[:10])
    torch.testing.assert_close(said.joint(), expected, rtol=1e-8, atol=1e-10)
    diagonal = said.joint().diagonal()
    torch.testing.assert_close(said.variance.flatten(), diagonal, rtol=1e-8, atol=1e-10)


def test_a_note_needs_few_inside_and_little_chance():
    """By the binomial distribution of as many independent numbers."""
    few = Calibration(inside=80, numbers=100, blocks=5, independent=10.0)
    assert few.chance == pytest.approx(scipy.stats.binom.cdf(8, 10, 0.95))
    assert not few.note  # one in twelve would be as bad
    assert Calibration(80, 100, 5, 60.0).note
    assert not Calibration(860, 1000, 5, 1000.0).note  # above 0.85
    assert Calibration(840, 1000, 5, 1000.0).note
    assert Calibration(inside=0, numbers=2, blocks=1, independent=2.0).chance < 0.003
    assert not Calibration(inside=0, numbers=2, blocks=1, independent=2.0).note  # two tell nothing


@pytest.mark.filterwarnings("ignore::gp_orff.CalibrationWarning")
@pytest.mark.parametrize("scale_noise", [False, True])
def test_known_noise_that_is_too_small_may_have_a_factor(scale_noise):
    """The noise is said to be that of a reading; the field is rougher than the prior, in which the
    residuals are noise: a factor of it is learned, and then its intervals hold them."""
    model, x, y = overconfident()
    noise = torch.full((len(x),), 0.01)
    report = model.fit(x, y, noise=noise, scale_noise=scale_noise, progress=False).report
    told = ["scale_noise=True" in note for note in report.notes if "intervals cover" in note]
    assert told == ([] if scale_noise else [True])


@pytest.mark.slow
def test_student_t_noise_has_its_own_intervals():
    """A fit of a field drawn from the prior is silent; a scale ten times too small is told of."""
    x, y, *_ = exact_problem(curl_free(0.5), 2, 120, 2.0)
    robust = gp_orff.MultitaskStudentTLikelihood(num_tasks=2)
    model = gp_orff.VectorFieldGP(curl_free(0.5), likelihood=robust)
    said = calibration_of(model.fit(x, y, progress=False).state, model.mean)
    assert said.coverage > 0.85
    assert not said.note
    wrong = torch.arange(0, 120, 6)  # one in six
    spoiled = y.index_put((wrong,), y[wrong] + 20.0)
    assert not calibration_of(model.condition(x, spoiled).state, model.mean).note
    model.likelihood.noise = model.likelihood.noise.item() / 100
    model.condition(x, y)
    assert calibration_of(model.state, model.mean).note


@pytest.mark.parametrize("how", ["statistics", "symbols"])
def test_what_has_no_readings_to_leave_out_is_not_checked(how):
    x, y, _ = flow(60)
    model = conditioned(curl_free(0.4), x, y, gp_orff.Auto(exact_values=0))
    if how == "statistics":
        model.condition(model.statistics)
    if how == "symbols":
        model.observe(x[:3], torch.zeros(3), gp_orff.Divergence(), noise=1.0)
    assert calibration_of(model.state, model.mean) is None


@pytest.mark.parametrize("how", ["chunks", "large", "weighted"])
def test_chunks_and_large_data_are_looked_at_too(how, monkeypatch):
    """A kernel that is too smooth is told of; the one that the field was drawn from is not."""
    monkeypatch.setattr("gp_orff.models.calibration._MOST", 10)
    smooth, x, y = overconfident()
    rough = gp_orff.VectorFieldGP(curl_free(0.3, lambda: MaternKernel(nu=1.5)))
    rough.likelihood.noise = exact_problem(rough.kernel, 2, 200, 20.0)[-1]
    for model, wrong in ((smooth, True), (rough, False)):
        if how == "weighted":
            noise = model.likelihood.noise.item()
            model.likelihood = gp_orff.MultitaskStudentTLikelihood(2, deg_free=100.0).double()
            model.likelihood.noise = noise
        parts = [(x[:90], y[:90]), (x[90:], y[90:])]
        model.condition(parts) if how == "chunks" else model.condition(x, y)
        said = calibration_of(model.state, model.mean)
        assert bool(said.note) == wrong
        assert said.blocks == 3


def test_the_check_reads_the_first_chunks_only(monkeypatch):
    """Until there are enough readings; of few readings the sample has all."""
    monkeypatch.setattr("gp_orff.models.calibration._FEW", 50)
    monkeypatch.setattr("gp_orff.data.survey._SAMPLE", 150)
    _, x, y = overconfident()
    parts = [(x[i : i + 20], y[i : i + 20]) for i in range(0, 200, 20)]
    state = gp_orff.VectorFieldGP(curl_free(0.3)).condition(parts).state
    assert torch.equal(torch.cat([part.x for part in first_readings(state.data).visit()]), x[:60])
    few = gp_orff.VectorFieldGP(curl_free(0.3)).condition(parts[:2]).state
    assert first_readings(few.data).survey.num_points == 40


@pytest.mark.parametrize("along", [False, True], ids=["vectors", "along"])
def test_a_block_is_predicted_from_the_readings_around_it(along, monkeypatch):
    """From the nearest 80 numbers outside; against dense covariances, to rounding."""
    monkeypatch.setattr("gp_orff.models.calibration._LEARNED", 80)
    x, y, _ = flow(150)
    h = directions(150)
    y = (y * h).sum(-1) if along else y
    model = gp_orff.VectorFieldGP(curl_free(0.4))
    model.likelihood.noise = 0.05
    state = model.condition(x, y, **({"directions": h} if along else {})).state
    half, constant = torch.tensor([0.3, 0.4]).double(), torch.tensor([0.2, -0.1]).double()
    inside = ((x - x[0]).abs() / half).amax(-1) <= 1
    tested = inside & (torch.arange(150) < 75)
    blocks = [Block(0, inside, tested)]
    (((found,),),) = (left_out_of_surroundings(state, state.data, constant, blocks, half),)
    centre = 0.5 * (x[inside].amin(0) + x[inside].amax(0))
    distance = ((x - centre).abs() / half).amax(-1)
    outside = torch.nonzero(distance > distance[inside].max())[:, 0]
    near = outside[distance[outside].argsort()][: 80 if along else 40]
    rows = torch.block_diag(*h.unsqueeze(1)) if along else torch.eye(300).double()
    width = 1 if along else 2
    prior = rows @ to_dense(model.kernel(x)) @ rows.mT
    of = (torch.arange(150 * width) // width).unsqueeze(-1)
    learned, asked = (of == near).any(-1), tested[of.squeeze(-1)]
    k = prior[learned][:, learned] + 0.05 * torch.eye(int(learned.sum())).double()
    gain = prior[asked][:, learned] @ torch.linalg.inv(k)
    mean = rows @ constant.repeat(150)
    expected = mean[asked] + gain @ (y.flatten() - mean)[learned]
    covariance = prior[asked][:, asked] - gain @ prior[learned][:, asked]
    torch.testing.assert_close(found.mean.flatten(), expected, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(found.joint(), covariance, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("trials", [1, 5, 10, 40])
def test_chances_are_binomial_and_monotonic_between_integers(trials):
    """9.99 numbers are as good as 10: rounded down, 9 of 10 small scores would be no chance."""
    for count in range(trials + 1):
        calibration = Calibration(count, trials, 1, float(trials))
        binomial = scipy.stats.binom.cdf(count, trials, 0.95)
        assert calibration.chance == pytest.approx(binomial, rel=1e-6)
        a, b = (Calibration(count, trials, 1, trials + d).chance for d in (0.01, -0.01))
        assert max(a, b) == pytest.approx(calibration.chance, rel=0.1)
    assert not Calibration(10, 10, 2, 9.99, central=9).note_of_outliers
    assert Calibration(10, 10, 2, 9.99, central=10).note_of_outliers
