"""The unit of every symbol, compared with a table, and values in this unit."""

import gpytorch
import numpy as np
import pytest
import torch
import xarray as xr

import gp_orff
from gp_orff.labelled.attributes import Unit, conversion
from tests.support.fields import helmholtz, model_of
from tests.support.registry import SYMBOLS

AXES = {"x": np.array([0.4, 1.5]), "y": np.array([0.7, 1.1])}

PAIRS = {
    ("m s-1", "km"): {-1: ("s-1", 1e-3), 1: ("m2 s-1", 1e3)},
    ("m/s", "m"): {-1: ("s-1", 1.0), 1: ("m2 s-1", 1.0)},
    ("knots", "km"): {-1: ("s-1", 1852 / 3600e3), 1: ("m2 s-1", 1852 / 3.6)},
    ("mm yr-1", "km"): {-1: ("yr-1", 1e-6), 1: ("m2 yr-1", 1.0)},
    ("nT", "km"): {-1: ("nT km-1", 1.0), 1: ("nT km", 1.0)},
    ("V m-1", "cm"): {-1: ("V m-2", 1e2), 1: ("V", 1e-2)},
    ("m s-1", "degree"): {-1: ("m s-1 degree-1", 1.0), 1: ("m degree s-1", 1.0)},
    ("1", "m"): {-1: ("m-1", 1.0), 1: ("m", 1.0)},
}
"""Units of f and x; those of symbols of a power of length, and the factor of numbers."""

POWERS = {"derivative": -1, "antiderivative": 1, "the field": 0}
KINDS = {
    "Divergence": "derivative",
    "Curl": "derivative",
    "Jacobian": "derivative",
    "Potential": "antiderivative",
    "StreamFunction": "antiderivative",
    "VectorPotential": "antiderivative",
    "LineIntegral": "antiderivative",
    "Flux": "antiderivative",
    "CurlFreePart": "the field",
    "DivergenceFreePart": "the field",
    "Background": "the field",
    "Component": "the field",
    "BoxAverage": "the field",
    "Identity": "the field",
}


def attrs_of(outputs, inputs):
    return {name: {"units": outputs} for name in "uv"} | {n: {"units": inputs} for n in "xy"}


@pytest.fixture(scope="module")
def field():
    return model_of(helmholtz(2), None, 2, points=12).posterior()


@pytest.mark.parametrize("name", SYMBOLS)
def test_powers_of_length(name):
    symbol = SYMBOLS[name](2, 2)
    if isinstance(symbol, gp_orff.symbols.Composed):
        parts = symbol.outer.length_power, symbol.inner.length_power
        assert symbol.length_power == sum(parts)
    else:
        assert symbol.length_power == POWERS[KINDS[type(symbol).__name__]]


@pytest.mark.slow
@pytest.mark.parametrize(("outputs", "inputs"), PAIRS)
def test_units_and_numbers(field, outputs, inputs):
    path = torch.tensor([[0.0, 0.0], [0.2, 0.1]])
    symbols = {
        "zeta": gp_orff.Curl(),
        "psi": gp_orff.StreamFunction(torch.ones(2)),
        "part": gp_orff.CurlFreePart(),
        "along": gp_orff.LineIntegral(path),
        "smooth": gp_orff.Divergence() @ gp_orff.BoxAverage(0.1),
    }
    maps = field.to_xarray(AXES, symbols=symbols, attrs=attrs_of(outputs, inputs))
    plain = field.to_xarray(AXES, symbols=symbols)
    powers = {"zeta": -1, "smooth": -1, "psi": 1, "along": 1, "part_1": 0, "part_2": 0, "u": 0}
    for name, power in powers.items():
        units, factor = {0: (outputs, 1.0), **PAIRS[outputs, inputs]}[power]
        for key in (name, f"{name}_sd"):
            assert maps[key].attrs["units"] == units
            np.testing.assert_allclose(maps[key], factor * plain[key], rtol=1e-12)
            assert "units" not in plain[key].attrs


UNITS = {
    "m s-1": "m s-1",
    "m.s-1": "m s-1",
    "m*s**-1": "m s-1",
    "m s^-1": "m s-1",
    "s-1 m": "m s-1",
    "kg/m2/s": "kg m-2 s-1",
    "W/m^2": "W m-2",
    "degrees_east": "degree",
    "1": "1",
    "0.01 m": "0.01 m",
    "1e-3 m s-1": "0.001 m s-1",
    "%": "%",
    "m m-1": "1",
}


@pytest.mark.parametrize("text", UNITS)
def test_units_in_the_order_of_cf(text):
    assert str(Unit.parse(text)) == UNITS[text]


@pytest.mark.parametrize("text", ["", "W (m2)-1", "m s-", "10-3 m", "m / / s", "m, s", "log(1 Pa)"])
def test_units_that_are_not_understood(text):
    assert Unit.parse(text) is None


def test_conversions():
    assert conversion("0.01 m s-1", "km s-1") == pytest.approx(1e-5)
    assert conversion("knot", "m s-1") == pytest.approx(0.514444, rel=1e-6)
    assert conversion("nT", "m") is None
    assert conversion("(a)", "(a)") == 1.0


def test_units_of_outputs_that_differ(field):
    """There is no unit of their sum; nor where a unit is missing or not understood."""
    for wrong in ({"v": {"units": "nT"}}, {"v": {}}, {"y": {"units": "m"}}, {"y": {"units": "?"}}):
        maps = field.to_xarray(AXES, attrs={**attrs_of("m s-1", "km"), **wrong})
        assert "units" not in maps["vorticity"].attrs, wrong
    maps = field.to_xarray(AXES, attrs=attrs_of("m s-1", "km") | {"v": {"units": "m/s"}})
    assert maps["vorticity"].attrs["units"] == "s-1"


def test_a_symbol_of_ones_own_has_no_unit_unless_it_is_homogeneous(field):
    class Shift(gp_orff.Symbol):
        def num_outputs(self, p):
            return p

        def __call__(self, omega, p):
            return torch.eye(p, dtype=torch.complex128).expand(len(omega), p, p)

    class Same(Shift):
        homogeneous = True

    symbols = {"a": Shift(), "b": Same(), "c": gp_orff.Divergence() @ Shift()}
    maps = field.to_xarray(AXES, symbols=symbols, attrs=attrs_of("nT", "m"))
    assert [maps[n].attrs.get("units") for n in ("a_1", "b_1", "c")] == [None, "nT", None]


def test_units_that_are_asked_for(field):
    """A symbol is brought to the units given for it, or they are refused."""
    attrs, plain = attrs_of("m s-1", "km"), field.to_xarray(AXES)
    daily = field.to_xarray(AXES, attrs=attrs | {"vorticity": {"units": "mm m-1 s-1"}})
    np.testing.assert_allclose(daily["vorticity"], plain["vorticity"], rtol=1e-12)
    assert daily["vorticity_sd"].attrs["units"] == "mm m-1 s-1"
    with pytest.raises(ValueError, match=r"'vorticity' that follow from 'm s-1'.*'s-1', got 'm'"):
        field.to_xarray(AXES, attrs=attrs | {"vorticity": {"units": "m"}})
    degrees = attrs_of("m s-1", "degrees_east") | {"vorticity": {"units": "s-1"}}
    with pytest.raises(ValueError, match="'m s-1 degree-1', got 's-1'"):
        field.to_xarray(AXES, attrs=degrees)


NAMES = [
    (
        "eastward_wind",
        "northward_wind",
        "divergence_of_wind",
        "atmosphere_upward_relative_vorticity",
    ),
    ("northward_wind", "eastward_wind", None, None),
    ("x_wind", "y_wind", "divergence_of_wind", "atmosphere_upward_relative_vorticity"),
    (
        "eastward_sea_water_velocity",
        "northward_sea_water_velocity",
        None,
        "ocean_relative_vorticity",
    ),
    ("sea_ice_x_velocity", "sea_ice_y_velocity", "divergence_of_sea_ice_velocity", None),
    ("eastward_wind", "y_wind", None, None),
]


@pytest.mark.slow
@pytest.mark.parametrize(("u", "v", "divergence", "vorticity"), NAMES)
def test_standard_names(field, u, v, divergence, vorticity):
    attrs = attrs_of("m s-1", "km")
    attrs |= {"u": {**attrs["u"], "standard_name": u}, "v": {**attrs["v"], "standard_name": v}}
    maps = field.to_xarray(AXES, attrs=attrs)
    for name, expected in (("divergence", divergence), ("vorticity", vorticity)):
        assert maps[name].attrs.get("standard_name") == expected
        sd = maps[f"{name}_sd"].attrs.get("standard_name")
        assert sd == (expected and f"{expected} standard_error")
    per_degree = field.to_xarray(
        AXES, attrs=attrs | attrs_of("m s-1", "degree") | {"u": attrs["u"], "v": attrs["v"]}
    )
    assert "standard_name" not in per_degree["vorticity"].attrs


def test_attributes_of_a_dataset(field):
    """Those that hold for predictions, of names that there are."""
    u = xr.DataArray(1.0, attrs={"units": "nT", "valid_range": [0, 1], "long_name": "east"})
    survey = xr.Dataset({"u": u, "v": u, "elsewhere": u})
    survey["x"] = xr.DataArray([0.0], dims="x", attrs={"units": "km", "axis": "X"})
    survey["y"] = xr.DataArray([0.0], dims="y", attrs={"units": "km"})
    maps = field.to_xarray(AXES, attrs=survey)
    assert maps["u"].attrs == {
        "long_name": "east",
        "units": "nT",
        "ancillary_variables": "u_sd",
    }
    assert maps["x"].attrs == {"units": "km"}
    assert maps["divergence"].attrs["units"] == "nT km-1"


def test_maps_without_units_of_the_field_tell_the_length_in_derivatives(field):
    km = {name: {"units": "km"} for name in "xy"}
    maps = field.to_xarray(AXES, attrs=km)
    assert maps["vorticity"].attrs["comment"] == "in units of the field times km-1"
    assert not {"units", "comment"} & set(maps["u"].attrs)
    maps = field.to_xarray(AXES, symbols={"g": gp_orff.Potential([0.5, 0.5])}, attrs=km)
    assert maps["g"].attrs["comment"] == "in units of the field times km"
    assert "comment" not in field.to_xarray(AXES)["vorticity"].attrs


def test_a_dataset_whose_variables_have_other_names_than_the_outputs_warns(field):
    given = {name: ("x", [0.0], {"units": "m s-1"}) for name in ("ve", "vn")}
    survey = xr.Dataset(given, {n: (n, [0.0], {"units": "km"}) for n in "xy"})
    with pytest.warns(gp_orff.DataWarning, match=r"names=\['ve', 'vn'\]"):
        field.to_xarray(AXES, attrs=survey)
    maps = field.to_xarray(AXES, attrs=survey, names=["ve", "vn"])  # and no warning
    assert maps["vorticity"].attrs["units"] == "s-1"


def test_distributions_in_small_units_have_their_own_standard_deviations():
    """gpytorch raises those below 1e-5; these are of 1e-6, of one quantity and of two, and of
    readings."""
    x = 1e5 * torch.rand(40, 2, generator=torch.Generator().manual_seed(0)).double()
    y = 1e-7 * torch.stack([(x[:, 1] / 2e4).sin(), (x[:, 0] / 2e4).sin()], dim=-1)
    kernel = gp_orff.DivergenceFreeKernel(num_dims=2).double()
    kernel.base_kernel.lengthscale = 2e4
    scaled = gpytorch.kernels.ScaleKernel(kernel).double()
    scaled.outputscale = (2e4 * 1e-7) ** 2
    model = gp_orff.VectorFieldGP(scaled)
    model.likelihood.noise = 1e-18
    field = model.condition(x, y).posterior()
    for symbol in (None, gp_orff.Curl()):
        normal = field(x[:5], symbol)
        exact = normal.covariance_matrix.diagonal().reshape(normal.mean.shape)
        torch.testing.assert_close(normal.variance, exact)
        torch.testing.assert_close(normal.variance.reshape(5, -1), field.variance(x[:5], symbol))
    low, high = normal.confidence_region()
    torch.testing.assert_close(high - low, 4 * exact.sqrt())
    reading = model.likelihood(field(x[:5]))
    torch.testing.assert_close(reading.variance, field.variance(x[:5]) + model.likelihood.noise)
