"""Every argument with a unit is converted or raises an error; no unit is ignored."""

import re

import numpy as np
import pint
import pytest
import torch
import xarray as xr
from gpytorch.kernels import MaternKernel

import gp_orff
from gp_orff.data.units import UnitArray
from gp_orff.labelled import readings

PLACES = np.array([[0.2, 0.4], [0.7, 0.3]])
SQUARE = np.array([[0.0, 0.0], [1.0, 0.0], [1.0, 1.0], [0.0, 1.0]])
BOX = ((0.1, 0.9), (0.2, 1.0))


def pint_of(values, unit):
    unit = re.sub(r"([a-z])(-?\d)", r"\1**\2", unit).replace(" ", "*")
    return pint.Quantity(np.asarray(values, dtype=float), unit)


def labelled(values, unit):
    return xr.DataArray(np.asarray(values, dtype=float), attrs={"units": unit})


@pytest.fixture(scope="module")
def data():
    x = np.random.default_rng(0).random((25, 2))
    y = np.sin(5 * x[:, ::-1])
    return UnitArray.of(x, ["km", "km"]), UnitArray.of(y, ["m s-1", "m s-1"])


def held(data):
    return gp_orff.VectorFieldGP(gp_orff.DivergenceFreeKernel(num_dims=2)).condition(*data)


def evidence(model):
    return model.log_marginal_likelihood().detach()


CONVERTED = {  # argument: (what follows from it, numbers of the model, others, their unit)
    "box": (lambda m, v: spectrum(m, box=v), BOX, 1000 * np.array(BOX), "m"),
    "wavenumbers": (lambda m, v: spectrum(m, v), [16.0, 20.0], [0.016, 0.02], "m-1"),
    "wavenumbers in radians": (
        lambda m, v: spectrum(m, v),
        [16.0, 20.0],
        [0.016, 0.02],
        "radian m-1",
    ),
    "design, noise": (
        lambda m, v: m.posterior().design(PLACES, noise=v).first,
        0.02,
        200,
        "cm2 s-2",
    ),
    "design, noise of each": (
        lambda m, v: m.posterior().design(PLACES[:1], noise=v).first,
        [[0.02, 0.01], [0.01, 0.03]],
        [[200, 100], [100, 300]],
        "cm2 s-2",
    ),
    "coast, noise": (
        lambda m, v: evidence(m.observe_coast(SQUARE, spacing=0.3, noise=v)),
        0.001,
        10,
        "cm2 s-2",
    ),
    "observe, noise": (
        lambda m, v: evidence(m.observe(PLACES, [0.1, 0.2], gp_orff.Divergence(), noise=v)),
        0.01,
        1e-8,
        "s-2",
    ),
    "condition, noise": (
        lambda m, v: evidence(m.condition(PLACES, PLACES, noise=v)),
        [0.02, 0.03],
        [200, 300],
        "cm2 s-2",
    ),
    "values": (lambda m, v: m.posterior().log_density(PLACES, v), PLACES, 100 * PLACES, "cm s-1"),
    "values of a symbol": (
        lambda m, v: m.posterior().log_density(PLACES, v, gp_orff.Curl()),
        [[0.2], [0.4]],
        [[2e-4], [4e-4]],
        "s-1",
    ),
    "places of paths": (
        lambda m, v: m.posterior().sample_paths(2)(v),
        np.stack([np.tile(PLACES, (3, 1))] * 2),  # (2, 6, 2)
        1000 * np.stack([np.tile(PLACES, (3, 1))] * 2),
        "m",
    ),
}


def spectrum(model, *wavenumbers, **options):
    found = model.posterior().energy_spectrum(*wavenumbers, num_paths=3, **options)
    return torch.cat([found.wavenumbers, found.total.mean])


@pytest.mark.parametrize("quantity", [pint_of, labelled])
@pytest.mark.parametrize("name", CONVERTED)
def test_other_units_give_the_same_results(name, quantity, data):
    result, plain, other, unit = CONVERTED[name]
    expected = result(held(data), plain)
    torch.testing.assert_close(
        result(held(data), quantity(other, unit)), expected, rtol=1e-7, atol=1e-9
    )


@pytest.mark.parametrize("quantity", [pint_of, labelled])
def test_sides_of_a_box_with_a_unit_each(quantity, data):
    field = held(data).posterior()
    metres = tuple(quantity(1000 * np.array(side), "m") for side in BOX)
    torch.testing.assert_close(
        field.design(PLACES, region=metres).first, field.design(PLACES, region=BOX).first
    )
    found, expected = (field.energy_spectrum(box=box, num_paths=2) for box in (metres, BOX))
    torch.testing.assert_close(found.total.mean, expected.total.mean)


@pytest.mark.parametrize("quantity", [pint_of, labelled])
@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda m, q: m.posterior().design(PLACES, noise=q(0.1, "m s-1")), "square of the unit"),
        (lambda m, q: m.posterior().design(PLACES, cost=q([1.0, 2.0], "h")), "numbers for cost"),
        (lambda m, q: m.posterior().log_density(PLACES, q(PLACES, "km")), "column 0 of values"),
        (lambda m, q: m.posterior().energy_spectrum(box=q(BOX, "s")), "of box in 'km'"),
        (lambda m, q: m.posterior().energy_spectrum(q([20.0], "s-1")), "of wavenumbers in"),
        (lambda m, q: m.observe_coast(SQUARE, noise=q(0.1, "m s-1")), "square of the unit"),
        (lambda m, q: m.update(PLACES, PLACES, merge=q(50.0, "m")), "merge= as a distance"),
        (lambda m, q: gp_orff.Flux(q(SQUARE, "km")), "numbers for places and directions"),
        (lambda m, q: gp_orff.Grid(domain=(q((0, 1), "km"),) * 2), "numbers for domain of Grid"),
        (
            lambda m, q: gp_orff.sample_prior(m.kernel, 2, domain=(q((0, 1), "km"),) * 2),
            "numbers for domain of sample_prior",
        ),
    ],
)
def test_what_cannot_be_converted_is_refused(call, error, quantity, data):
    with pytest.raises((ValueError, TypeError), match=error):
        call(held(data), quantity)


def test_data_without_units_and_quantities(data):
    """Nothing says in which unit the data are."""
    bare = gp_orff.VectorFieldGP(gp_orff.DivergenceFreeKernel(num_dims=2))
    bare.condition(*map(np.asarray, data))
    with pytest.raises(ValueError, match="x as numbers of data without units, got 2 columns in"):
        bare.posterior().mean(pint_of(PLACES, "km"))
    with pytest.raises(ValueError, match="the unit of y is unknown"):
        bare.posterior().design(PLACES, noise=pint_of(0.1, "m2 s-2"))
    with pytest.raises(TypeError, match="the entries of points"):
        bare.posterior().mean([[pint.Quantity(0.2, "km"), pint.Quantity(0.4, "km")]])


def test_points_of_a_comparison_with_the_exact_kernel(data):
    coarse = gp_orff.Grid(domain=((-0.5, 1.5), (-0.5, 1.5)), tolerance=0.05)
    kernel = gp_orff.DivergenceFreeKernel(num_dims=2)
    model = gp_orff.VectorFieldGP(kernel, frequencies=coarse).condition(*data)
    metres = pint_of(1000 * np.asarray(data[0]), "m")
    found, expected = (
        gp_orff.compare_with_exact(model, x, data[1], subset=10) for x in (metres, data[0])
    )
    assert expected.mean > 0
    assert found.mean == pytest.approx(expected.mean, rel=1e-6)


def test_components_in_different_units(data):
    """A variance for each component, or covariances."""
    x, y = data
    y = UnitArray.of(y * [1.0, 100.0], ["m s-1", "cm s-1"])
    model = gp_orff.VectorFieldGP(gp_orff.DivergenceFreeKernel(num_dims=2)).condition(x, y)
    plain = model.posterior().design(PLACES[:1], noise=np.diag([0.01, 200.0])).first
    for noise in (pint_of([0.01, 0.02], "m2 s-2"), pint_of(np.diag([0.01, 0.02]), "m2 s-2")):
        torch.testing.assert_close(model.posterior().design(PLACES[:1], noise=noise).first, plain)
    with pytest.raises(ValueError, match="give a variance for each component"):
        model.posterior().design(PLACES[:1], noise=pint_of(0.01, "m2 s-2"))


def test_times_as_dates_and_durations():
    rng = np.random.default_rng(0)
    x, y = rng.random((2, 40))
    times = np.datetime64("2024-05-01") + (rng.random(40) * 86400).astype("timedelta64[s]")
    sea = xr.Dataset(
        {"u": ("i", np.sin(4 * y)), "v": ("i", np.cos(4 * x))},
        {"x": ("i", x), "y": ("i", y), "time": ("i", times)},
    )
    kernel = gp_orff.DivergenceFreeKernel(num_dims=2, active_dims=(0, 1))
    kernel = kernel * MaternKernel(nu=1.5, active_dims=(2,))
    model = gp_orff.VectorFieldGP(kernel)
    columns = ["u", "v"], ["x", "y", "time"]
    field = model.condition(*readings(sea, *columns, time_unit="h", epoch="2024-05-01")).posterior()
    found = [
        field.energy_spectrum(at=[at], num_paths=2).total.mean
        for at in (6.0, np.datetime64("2024-05-01T06:00"))
    ]
    torch.testing.assert_close(*found)
    with pytest.raises(ValueError, match="column 0 of at in 'h since 2024-05-01"):
        field.energy_spectrum(at=[pint.Quantity(6.0, "h")])
