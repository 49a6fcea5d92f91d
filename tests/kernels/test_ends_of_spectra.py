"""Learned spectra that continue beyond their knots as power laws."""

import math

import numpy as np
import pytest
import torch
from gpytorch.kernels import MultitaskKernel, ScaleKernel

import gp_orff
from gp_orff.features.assemble import draw as drawn
from gp_orff.features.truncation import truncated_variance
from gp_orff.fitting.curves import Curves
from gp_orff.inference.features import FeatureInference
from gp_orff.kernels.learned import end_lengths, end_of_curve
from tests.support.fields import draw, uniform

KNOTS, STEP = 7, math.log(64) / 6
CURVES = {"steep": (0.9, 5.53), "k⁻³": (0.4, 4.03), "flat": (-0.6, 2.3)}  # slopes by hand


def continued(tilt=0.4, lengthscale=0.6, **options):
    """Weights e^{−½ (u/0.7)² + 3 tilt u} at the knots."""
    kernel = gp_orff.LearnedSpectrumKernel(KNOTS, continued=True, **options).double()
    kernel.shape.data[0] = tilt
    kernel.lengthscale = lengthscale
    return kernel


def written_out(tilt, slope, number=400):
    """The lengths and weights of the knots and of a long row of further ones, up to a factor."""
    u = math.log(8) - STEP * np.arange(KNOTS + number)
    knots = u[:KNOTS]
    log_weights = -0.5 * (knots / 0.7) ** 2 + 3 * tilt * knots
    beyond = log_weights[-1] + slope * (u[KNOTS:] - knots[-1])
    return np.exp(u), np.exp(np.append(log_weights, beyond))


@pytest.mark.parametrize(("tilt", "slope"), CURVES.values(), ids=CURVES)
def test_a_curve_goes_on_as_a_power_law(tilt, slope):
    """Against a sum over 400 more lengths: the variance of a field, but for the rounding of the
    least slope; its covariance within 6 % of the variance beyond the knots, which four lengths
    stand for."""
    lengths, weights = written_out(tilt, slope)
    r = np.geomspace(0.04, 3, 60)
    variances = weights / lengths**2
    across = np.exp(-0.5 * (r[:, None] / lengths) ** 2) @ variances / variances[:KNOTS].sum()
    beyond = variances[KNOTS:].sum() / variances[:KNOTS].sum()
    kernel = continued(tilt, lengthscale=1.0)
    spectrum = kernel.weights.detach().numpy(), kernel.lengths.numpy()
    own = spectrum[0] / spectrum[1] ** 2
    own /= own[-KNOTS:].sum()
    assert own[:-KNOTS].sum() == pytest.approx(beyond, rel=0.01)
    found = np.exp(-0.5 * (r[:, None] / spectrum[1]) ** 2) @ own
    assert np.abs(found - across).max() < 0.06 * beyond
    x = torch.tensor([[0.0, 0.0], [0.0, 0.3]]).double()
    field = gp_orff.CurlFreeKernel(kernel, num_dims=2)(x).to_dense().detach()
    value = np.exp(-0.5 * (0.3 / spectrum[1]) ** 2) @ own / own.sum()
    assert (field[0, 2] / field[0, 0]).item() == pytest.approx(value, rel=1e-6)


def test_slopes_have_a_least_value():
    """At which the variance of a field is finite; rounded, so that derivatives are continuous."""
    for slope in (-500.0, -1.0, 0.3):
        curve = slope * STEP * torch.arange(KNOTS).double()
        variances = end_of_curve(curve, STEP).exp() * torch.from_numpy(end_lengths(1, STEP)) ** -2
        assert variances.sum().item() == pytest.approx(1 / math.expm1(0.3 * STEP), rel=1e-3)
    curve = (0.5 * draw(3, KNOTS)).requires_grad_()
    assert torch.autograd.gradcheck(lambda curve: end_of_curve(curve, STEP), curve)
    steep = end_of_curve(400.0 * torch.arange(KNOTS).double(), STEP)
    assert torch.isfinite(steep).all()


@pytest.mark.parametrize("tilt", [0.9, 0.4])
def test_a_grid_lacks_what_is_beyond(tilt):
    """Its size follows from the knots; δ is the variance of the field beyond its edge, integrated
    here over the plane in a few per cent of it, as edges of lattices are ragged."""
    leaf = continued(tilt)
    box = ((0.0, 2.0), (0.0, 2.0))
    rule = gp_orff.Grid(domain=box, data=box, tolerance=1e-2)
    kernel = gp_orff.CurlFreeKernel(leaf, num_dims=2)
    draws = drawn(kernel, rule, 2)
    leaf.continued = False
    ended = drawn(kernel, rule, 2)
    leaf.continued = True
    assert draws[0].num_frequencies <= ended[0].num_frequencies
    delta = truncated_variance(gp_orff.symbols.Identity(), kernel, draws, (0, 1))[0]
    radius = (draws[0].lattice.indices * draws[0].lattice.spacing).norm(dim=-1).max().item()
    s = (leaf.lengths * 0.6).numpy() ** -2
    square = 0.5 * radius**2 / s
    beyond = (leaf.weights.detach().numpy() * s * (1 + square) * np.exp(-square)).sum()
    assert delta.trace().item() / 2 == pytest.approx(beyond, rel=0.1)


def test_exact_and_lattice_posteriors_agree():
    """Means and variances within 1e-3 of the prior variance; a grid has what it does not hold as
    white variance, and no two places are as near as its lengths. Without the ends it is 10 times
    as far off."""
    x, leaf = torch.linspace(0, 1, 26).double().unsqueeze(-1), continued(-0.6, lengthscale=0.1)
    xs, y = x[:-1] + 0.02, draw(26, 2)
    kernel = MultitaskKernel(leaf, num_tasks=2, rank=2).double()
    found = {}
    for name in ("exact", "grid", "ended"):
        rule = gp_orff.Auto() if name == "exact" else gp_orff.Grid.for_data(x, tolerance=1e-6)
        leaf.continued = name != "ended"
        model = gp_orff.VectorFieldGP(kernel, frequencies=rule)
        model.likelihood.noise = 0.1
        posterior = model.condition(x, y, merge=0).posterior()
        found[name] = torch.cat([posterior.mean(xs), posterior.variance(xs)])
    prior = kernel(x[:1]).to_dense().diagonal().amax().item()
    away = {name: (own - found["exact"]).abs().max().item() for name, own in found.items()}
    assert away["grid"] < 1e-3 * prior
    assert away["ended"] > 1e-2 * prior


def test_a_fit_that_fails_leaves_the_end_as_it_was(monkeypatch):
    """Of all fits to few readings, which end the curve: the covariance would be another one."""
    x, y = uniform(25, 2), draw(25, 2)
    model = gp_orff.VectorFieldGP(gp_orff.CurlFreeKernel(continued(), num_dims=2))
    before = model.kernel(x).to_dense().detach()

    def interrupted(*_):
        assert not next(own for own in model.modules() if hasattr(own, "continued")).continued
        raise KeyboardInterrupt

    monkeypatch.setattr("gp_orff.models.vector_field_gp.calibration_of", interrupted)
    with pytest.raises(KeyboardInterrupt):
        model.fit(x, y, progress=False)
    torch.testing.assert_close(model.kernel(x).to_dense().detach(), before, rtol=0, atol=0)


def test_a_fit_of_few_readings_ends_the_curve():
    """Shortest lengths, which few readings do not resolve, stand for all that are shorter."""
    x = uniform(25, 2)
    y = torch.cos(6 * x[:, :1]) * torch.tensor([1.0, 0.3]).double() + 0.2 * draw(25, 2)
    model = gp_orff.VectorFieldGP(ScaleKernel(gp_orff.CurlFreeKernel(continued(), num_dims=2)))
    model.fit(x, y, progress=False)
    assert not model.kernel.base_kernel.base_kernel.continued


def test_ends_are_saved(tmp_path):
    x, y = uniform(40, 2), draw(40, 2)
    model = gp_orff.VectorFieldGP(gp_orff.HelmholtzKernel(continued(), num_dims=2))
    model.condition(x, y).save(tmp_path / "model.pt")
    again = gp_orff.VectorFieldGP.load(tmp_path / "model.pt")
    assert again.kernel.divergence_free.base_kernel.base_kernel.continued
    variances = [one.posterior().variance(x) for one in (model, again)]
    assert torch.equal(*variances)


def test_curves_are_lines_beyond_the_edge_of_a_grid():
    """From the shortest length with most of its variance within the widest term's grid, with the
    slope that the curve has from there to 4.5 times it; the rest of the curves stays."""
    leaf = gp_orff.LearnedSpectrumKernel().double()
    kernel = gp_orff.HelmholtzKernel(leaf, num_dims=2).double()
    spectra = [part.base_kernel.base_kernel for part in kernel.kernels]
    for seed, own in enumerate(spectra):
        own.shape.data = 0.3 * draw(11, seed=seed)
    kernel.curl_free.outputscale = 1e-3  # its own grid is small
    spectra[0].lengthscale = 0.5
    box = ((0.0, 1.0), (0.0, 1.0))
    draws = drawn(kernel, gp_orff.Grid(domain=box, data=box, tolerance=0.2), 2)
    data = gp_orff.VectorFieldGP(kernel).condition(uniform(9, 2), draw(9, 2)).state.data
    lattice = draws[0].lattice
    edge = (lattice.indices * lattice.spacing).norm(dim=-1).max().item()
    resolved = (2 / edge <= 0.5 * np.geomspace(1 / 8, 8, 12)).argmax()
    before = [own.curve.detach().clone() for own in spectra]
    Curves(kernel).extrapolate(FeatureInference(data, draws))
    assert 1 < resolved < 8
    for own, old in zip(spectra, before, strict=True):
        change = own.curve.detach() - old
        assert torch.allclose(change[resolved:], change[resolved].expand(12 - resolved), atol=1e-9)
        slope = (old[resolved + 4] - old[resolved]) / 4
        steps = own.curve.detach().diff()[:resolved]
        assert torch.allclose(steps, slope.expand(resolved), atol=1e-9)


def test_fixed_curves_are_not_extrapolated():
    leaf = continued()
    leaf.shape.requires_grad_(False)
    kernel = gp_orff.CurlFreeKernel(leaf, num_dims=2)
    before = leaf.shape.clone()
    box = ((0.0, 1.0), (0.0, 1.0))
    draws = drawn(kernel, gp_orff.Grid(domain=box, data=box, tolerance=0.5), 2)
    data = gp_orff.VectorFieldGP(kernel).condition(uniform(9, 2), draw(9, 2)).state.data
    Curves(kernel).extrapolate(FeatureInference(data, draws))
    assert torch.equal(leaf.shape, before)


def test_a_state_dict_has_the_end_of_the_spectrum():
    """Of a spectrum that goes on beyond its knots, and of older versions, which lack it."""
    kernel, other = (gp_orff.LearnedSpectrumKernel() for _ in range(2))
    kernel.continued = True
    state = kernel.state_dict()
    other.load_state_dict(state)
    assert other.continued
    older = {name: value for name, value in state.items() if name != "_extra_state"}
    with pytest.warns(UserWarning, match="keeps continued=True"):
        other.load_state_dict(older)
    x = torch.rand(6, 2, dtype=torch.float64)
    torch.testing.assert_close(other.double()(x).to_dense(), kernel.double()(x).to_dense())
