"""Energy spectra of known waves and of paths, and errors for invalid requests."""

import math

import numpy as np
import pytest
import torch
from gpytorch.kernels import MaternKernel, MultitaskKernel, RBFKernel

import gp_orff
from gp_orff.models.energy_spectrum import windowed_energy
from tests.support.fields import curl_free, draw, uniform

SIDES = torch.tensor([3.0, 2.0]).double()


def cells(count):
    axes = [
        (torch.arange(n).double() + 0.5) * side / n for n, side in zip(count, SIDES, strict=True)
    ]
    return torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1)


@pytest.mark.parametrize("turned", [True, False])
def test_a_plane_wave_has_its_energy_at_its_wavenumber(turned):
    """½ amplitude² / 2 in all, across the wave or along it; rings do not overlap."""
    wave = torch.tensor([20.0, 15.0]).double()
    direction = torch.tensor([-0.6, 0.8] if turned else [0.8, 0.6]).double()
    field = 1.7 * direction * torch.cos(cells((120, 96)) @ wave).unsqueeze(-1) + 5.0
    step = math.pi  # of the rings, as wide as the widest of the modes
    k = step * torch.arange(1, 25).double()
    energy = windowed_energy(field.unsqueeze(0), SIDES, k)[0]
    expected = 0.5 * 1.7**2 / 2
    assert (step * energy[:, 0 if turned else 1]).sum().item() == pytest.approx(expected, rel=0.02)
    assert energy[:, 1 if turned else 0].sum() < 0.05 * energy.sum()
    assert abs(k[energy.sum(-1).argmax()].item() - 25.0) <= step


def test_many_waves_have_the_spectrum_of_their_law():
    """Energy k⁻² from 6 to 60, three parts rotational: means over octaves, of 20 fields."""
    rng, found = np.random.default_rng(0), []
    k = torch.tensor([12.0, 24.0, 40.0]).double()
    places = cells((100, 80)).reshape(-1, 2).numpy()
    for _ in range(20):
        size = 1 / (1 / 6 - rng.random(200) * (1 / 6 - 1 / 60))
        angle, phase = rng.uniform(0, 2 * np.pi, (2, 200))
        along = np.stack([np.cos(angle), np.sin(angle)], -1)
        across = np.stack([-along[:, 1], along[:, 0]], -1)
        vectors = np.where(rng.random((200, 1)) < 0.75, across, along)
        field = np.cos((places @ along.T) * size + phase) @ vectors / math.sqrt(200)
        found.append(windowed_energy(torch.from_numpy(field.reshape(1, 100, 80, 2)), SIDES, k)[0])
    energy = torch.stack(found).mean(0)
    expected = 0.25 * k**-2 / (1 / 6 - 1 / 60)  # half of a half, over the integral of k⁻²
    assert energy.sum(-1).tolist() == pytest.approx(expected.tolist(), rel=0.15)
    assert (energy[:, 0] / energy.sum(-1)).tolist() == pytest.approx([0.75] * 3, abs=0.05)


def posterior(frequencies=None, points=200, inputs=2, **options):
    x = uniform(points, inputs)
    kernel = curl_free(0.3) if inputs == 2 else options.pop("kernel")
    rule = frequencies or gp_orff.Auto()
    model = gp_orff.VectorFieldGP(kernel, frequencies=rule).double()
    model.likelihood.noise = 0.01
    return model.condition(x, draw(points, 2)).posterior()


@pytest.mark.slow
def test_intervals_and_parts():
    """Of a curl-free kernel: nothing rotates but for the window, and parts add up."""
    field = posterior()
    found = field.energy_spectrum(num_paths=20, level=0.8)
    assert found.wavenumbers[0].item() == pytest.approx(2 * math.pi, rel=0.05)  # two in two
    for part in (found.rotational, found.divergent, found.total):
        assert (part.low <= part.high).all()
        assert part.mean.shape == (24,)
    assert torch.allclose(found.total.mean, found.rotational.mean + found.divergent.mean)
    assert found.rotational.mean.sum() < 0.2 * found.divergent.mean.sum()
    narrower = field.energy_spectrum(num_paths=20, level=0.5).total
    assert (narrower.high - narrower.low < found.total.high - found.total.low).all()
    assert torch.equal(field.energy_spectrum(num_paths=20, level=0.8).total.mean, found.total.mean)


def test_waves_beyond_the_highest_do_not_alias():
    """Paths of a rough field at points twice as near tell the same energy, within 10 %."""
    kernel = gp_orff.CurlFreeKernel(MaternKernel(nu=1.5), num_dims=2).double()
    kernel.base_kernel.lengthscale = 0.3
    model = gp_orff.VectorFieldGP(kernel)
    model.likelihood.noise = 0.1
    field = model.condition(uniform(20, 2), draw(20, 2)).posterior()
    alone, beside = (
        field.energy_spectrum(torch.tensor([40.0, *more]), num_paths=32).total.mean[0]
        for more in ((), (80.0,))
    )
    assert alone.item() == pytest.approx(beside.item(), rel=0.1)


def test_as_a_dataset():
    pytest.importorskip("xarray")
    dataset = posterior().energy_spectrum(torch.tensor([8.0, 12.0]), num_paths=8).to_xarray()
    assert dataset["rotational_low"].dims == ("wavenumber",)
    assert dataset["wavenumber"].values.tolist() == [8.0, 12.0]
    assert dataset.attrs["level"] == 0.9


@pytest.mark.slow
def test_a_time_is_given():
    kernel = gp_orff.DivergenceFreeKernel(num_dims=2, active_dims=(0, 1)) * MaternKernel(
        nu=1.5, active_dims=(2,)
    )
    field = posterior(inputs=3, kernel=kernel.double(), points=40)
    with pytest.raises(ValueError, match="the 1 inputs that are not in space"):
        field.energy_spectrum()
    early, late = (field.energy_spectrum(at=[t], num_paths=8).total.mean for t in (0.0, 2.0))
    assert not torch.allclose(early, late)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"wavenumbers": torch.tensor([1.0])}, "from 6.* two periods in the box, to higher"),
        ({"wavenumbers": torch.tensor([1e4])}, "512 points along a side"),
        ({"wavenumbers": torch.tensor(9.0)}, r"wavenumbers \(m,\)"),
        ({"level": 1.0}, "between 0 and 1"),
        ({"box": ((0.0, 0.0), (0.0, 1.0))}, "with extent"),
        ({"num_paths": 0}, "at least one path"),
    ],
)
def test_bad_arguments_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        posterior().energy_spectrum(**options)


@pytest.mark.parametrize("outputs", [1, 3])
def test_other_numbers_of_components_are_refused(outputs):
    kernel = MultitaskKernel(RBFKernel(), num_tasks=outputs) if outputs > 1 else RBFKernel()
    x, y = uniform(10, 2), uniform(10, outputs, seed=1)
    field = gp_orff.VectorFieldGP(kernel.double()).condition(x, y).posterior()
    with pytest.raises(
        NotImplementedError, match=f"the two components in its plane, got {outputs}"
    ):
        field.energy_spectrum()


def test_spectra_end_below_the_cut_off_of_a_grid():
    x = uniform(200, 2)
    field = posterior(gp_orff.Grid.for_data(x, max_features=500))
    with pytest.raises(ValueError, match="where the paths of a grid end"):
        field.energy_spectrum(torch.tensor([60.0]))
    assert field.energy_spectrum(num_paths=8).wavenumbers[-1] < 40


def test_other_than_planar_fields_are_refused():
    x = uniform(20, 3)
    model = gp_orff.VectorFieldGP(gp_orff.CurlFreeKernel(num_dims=3))
    field = model.condition(x, draw(20, 3)).posterior()
    with pytest.raises(NotImplementedError, match="planar"):
        field.energy_spectrum()
