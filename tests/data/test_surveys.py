"""Maps for surveys: reduction to the pole, gradients and the analytic signal."""

import gpytorch
import pytest
import torch

import gp_orff
from tests.support.harmonic import harmonic, points

FIELD = torch.nn.functional.normalize(torch.tensor([0.2, 0.7, -0.6]).double(), dim=0)
REMANENT = torch.nn.functional.normalize(torch.tensor([-0.5, 0.3, -0.9]).double(), dim=0)
UP = torch.tensor([0.0, 0.0, 1.0]).double()


def dipoles(x, magnetisation, below=True):
    """−∇∇(1/r) m of three dipoles, by hand."""
    places = torch.tensor([[0.3, 0.4, -0.6], [0.7, 0.6, -0.7], [0.5, 0.2, -0.8]]).double()
    if not below:
        places[:, 2] = 1 - places[:, 2]
    r = x[:, None] - places
    size = r.norm(dim=-1, keepdim=True)
    values = 3 * r * (r @ magnetisation)[..., None] / size**5 - magnetisation / size**3
    return values.sum(1)


def model_of(side="below", rule=None):
    domain = ((0.0, 1.0), (0.0, 1.0), (0.0, 1.0))
    rule = rule or gp_orff.Grid(domain, tolerance=1e-6, max_features=3000)
    zero = gpytorch.means.ZeroMean()
    model = gp_orff.VectorFieldGP(harmonic(side, 1), frequencies=rule, mean=zero)
    model.likelihood.noise = 1e-5
    return model


@pytest.mark.slow
@pytest.mark.parametrize("magnetisation", [FIELD, REMANENT])
@pytest.mark.parametrize("side", ["below", "above"])
def test_dipoles_are_reduced_to_the_pole(side, magnetisation):
    """Whole field vectors of dipoles tell their vertical twins to 5 % of the range in the middle of
    the readings, where the prior has little to say."""
    x = points(250)
    field = model_of(side).condition(x, dipoles(x, magnetisation, side == "below")).posterior()
    z = points(40, seed=3, low=0.3, high=0.7)
    expected = dipoles(z, UP, side == "below")[:, 2]
    pole = gp_orff.ReductionToPole(3.0 * magnetisation)
    mean, sd = field.mean(z, pole)[:, 0], field.variance(z, pole).sqrt()[:, 0]
    assert (mean - expected).square().mean().sqrt() < 0.05 * (expected.max() - expected.min())
    raw = dipoles(z, magnetisation, side == "below") @ magnetisation
    assert (raw - expected).abs().max() > 0.2 * (expected.max() - expected.min())
    assert ((mean - expected).abs() < 4 * sd).all()


@pytest.mark.parametrize("side", ["below", "both"])
def test_at_the_pole_nothing_changes(side):
    """A vertical magnetisation leaves the vertical component, by mean and by variance."""
    x = points(60)
    field = model_of(side).condition(x, dipoles(x, FIELD)).posterior()
    z, pole, vertical = points(9, seed=3), gp_orff.ReductionToPole(-UP), gp_orff.Component(-UP)
    assert torch.equal(field.reduction_to_pole(z, -UP).mean, field.mean(z, pole)[:, 0])
    assert torch.allclose(field.mean(z, pole), field.mean(z, vertical), atol=1e-10)
    assert torch.allclose(field.variance(z, pole), field.variance(z, vertical), atol=1e-8)
    paths = field.sample_paths(3, seed=0)
    assert torch.allclose(paths(z, pole), paths(z, vertical), atol=1e-10)


def test_models_under_the_exact_kernel_make_features_for_it():
    x, z, pole = points(60), points(9, seed=3), gp_orff.ReductionToPole(REMANENT)
    waves = model_of().condition(x, dipoles(x, FIELD)).posterior()
    exact = gp_orff.VectorFieldGP(harmonic("below", 1), mean=gpytorch.means.ZeroMean())
    exact.likelihood.noise = 1e-5
    found = exact.condition(x, dipoles(x, FIELD)).posterior().mean(z, pole)
    expected = waves.mean(z, pole)
    assert (found - expected).abs().max() < 0.02 * expected.abs().max()


def test_reductions_are_refused_where_they_are_unstable_or_unknown():
    with pytest.raises(ValueError, match=r"at least 10 degrees, got 5\.\d+"):
        gp_orff.ReductionToPole([0.0, 1.0, -0.1])
    for wrong in ([0.0, 0.0, 0.0], [1.0, 2.0], [0.0, float("nan"), 1.0]):
        with pytest.raises(ValueError, match="finite numbers"):
            gp_orff.ReductionToPole(wrong)
    x, pole = points(20), gp_orff.ReductionToPole(FIELD)
    other = gp_orff.VectorFieldGP(gp_orff.CurlFreeKernel(num_dims=3)).condition(x, x).posterior()
    with pytest.raises(NotImplementedError, match="HarmonicKernel"):
        other.mean(x, pole)


def test_gradients_of_a_reduction_are_its_slopes():
    """Compositions multiply; against central differences, whose error is O(h²)."""
    x = points(60)
    field = model_of().condition(x, dipoles(x, FIELD)).posterior()
    z, pole = points(5, seed=3, low=0.2, high=0.8), gp_orff.ReductionToPole(FIELD)
    slopes = field.mean(z, gp_orff.Jacobian(num_dims=3) @ pole)
    step = 1e-4 * torch.eye(3).double()
    expected = [(field.mean(z + h, pole) - field.mean(z - h, pole)) / 2e-4 for h in step]
    assert torch.allclose(slopes, torch.cat(expected, dim=-1), rtol=1e-5, atol=1e-5)
    with pytest.raises(NotImplementedError, match="CurlFreePart"):
        field.mean(z, gp_orff.Component(FIELD) @ gp_orff.CurlFreePart())


def test_analytic_signal():
    """|∇T| by draws of the three slopes at every point, beside sample paths, within 5/√M standard
    deviations for M = 2000; the exact kernel has the same slopes as features, to their accuracy."""
    x, z = points(40), points(4, seed=3)
    field = model_of().condition(x, dipoles(x, FIELD)).posterior()
    slopes = gp_orff.Jacobian(num_dims=3) @ gp_orff.Component(FIELD)
    found = field.analytic_signal(z, FIELD, num_draws=20_000)
    paths = field.summarize(z, lambda g: g.norm(dim=-1), symbol=slopes, num_paths=2000)
    assert ((found.mean - paths.mean).abs() < 5 * found.sd / 2000**0.5).all()
    assert torch.allclose(found.sd, paths.sd, rtol=0.12)
    exact = model_of(rule=gp_orff.Auto()).condition(x, dipoles(x, FIELD)).posterior()
    signal = exact.analytic_signal(z, FIELD, num_draws=20_000)
    assert torch.allclose(signal.mean, found.mean, rtol=0.02)


def test_surveys_in_degrees_warn():
    x = points(20)
    degrees = x * torch.tensor([0.3, 0.3, 200.0]) + torch.tensor([-42.5, -22.3, 300.0])
    model = gp_orff.VectorFieldGP(gp_orff.HarmonicKernel(1))
    with pytest.warns(gp_orff.DataWarning, match="look like degrees.*labelled.total_field"):
        model.condition(degrees, x)
    metres = x * torch.tensor([3000.0, 3000.0, 200.0]) + torch.tensor([0.0, 0.0, 300.0])
    gp_orff.VectorFieldGP(gp_orff.HarmonicKernel(1)).condition(metres, x)


@pytest.mark.filterwarnings("ignore:no observation depends on the constant mean")
@pytest.mark.parametrize("case", ["numbers", "vectors", "two heights", "one side"])
def test_two_sides_and_one_height_warn(case):
    """Numbers at one height do not tell the sides apart; vectors do, and so do two heights."""
    x = points(8)
    x[:, 2] = torch.arange(8) % 2 if case == "two heights" else 0.5
    model = gp_orff.VectorFieldGP(
        gp_orff.HarmonicKernel(1, "below" if case == "one side" else "both")
    )
    options = {} if case == "vectors" else {"directions": FIELD.expand(8, 3)}
    y = dipoles(x, FIELD) if case == "vectors" else dipoles(x, FIELD) @ FIELD
    if case == "numbers":
        with pytest.warns(gp_orff.DataWarning, match="does not determine the side"):
            model.condition(x, y, **options)
    else:
        model.condition(x, y, **options)  # warnings are errors


@pytest.mark.filterwarnings("ignore:no observation depends on the constant mean")
def test_the_report_tells_the_limit_of_waves():
    """4096 features, not the 8192 of a lattice."""
    x = points(1100)
    model = gp_orff.VectorFieldGP(harmonic(num_depths=1))
    model.condition(x, x[:, 2], directions=FIELD.expand(1100, 3), merge=0.0)
    assert "within 4096 features" in model.state.representation.reason


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:no observation depends on the constant mean")
def test_lines_with_offsets_are_levelled():
    """Lines of a total field, each with an offset of half the anomaly's standard deviation: their
    size is learned within three standard errors, √(1/2k) of it from k lines, and the anomaly is
    found to a fifth, where readings are off by a half."""
    lines, readings = 12, 15
    generator = torch.Generator().manual_seed(0)
    across, along = (torch.linspace(0, 1, n).double() for n in (lines, readings))
    x = torch.cartesian_prod(across, along)
    x = torch.cat([x, 0.05 + 0.05 * torch.sin(5 * x[:, 1:])], dim=-1)
    line = torch.arange(lines).repeat_interleave(readings)
    truth = dipoles(x, FIELD) @ FIELD
    size = truth.std().item()
    offsets, noise = (
        size * share * torch.randn(count, generator=generator).double()
        for share, count in ((0.5, lines), (0.02, len(x)))
    )
    model = gp_orff.VectorFieldGP(gp_orff.HarmonicKernel(1))
    u = FIELD.expand(len(x), 3)
    model.fit(x, truth + offsets[line] + noise, directions=u, track=line, progress=False)
    learned = model.likelihood.offset_variance.item() ** 0.5
    assert abs(learned / offsets.std().item() - 1) < 3 / (2 * lines) ** 0.5
    error = model.posterior().mean(x) @ FIELD - truth
    assert (error - error.mean()).std() < 0.2 * size
