"""Kernels with line spectra: frequencies and weights, random rules, and tidal constituents."""

import math

import numpy as np
import pytest
import torch
from gpytorch.kernels import LCMKernel, PeriodicKernel, ScaleKernel
from torch.autograd import gradcheck, gradgradcheck

import gp_orff
from gp_orff.kernels.lines import SPEEDS, PeriodicLines, TidalKernel, inseparable
from gp_orff.kernels.pairs import Rows, row_covariance
from tests.support.fields import draw
from tests.support.lines import cosine, in_space, periodic

LAGS = torch.linspace(-3, 7, 400, dtype=torch.float64)[:, None]


@pytest.mark.parametrize(
    "kernel", [periodic(), periodic(2.3, 2.0), periodic(0.7, 0.05), cosine(1.7)]
)
def test_sums_of_lines_are_the_kernels_of_gpytorch(kernel):
    spectrum = gp_orff.spectrum(kernel)
    nu, weights = spectrum.lines(spectrum.num_lines(1e-15))
    exact = kernel(LAGS, torch.zeros(1, 1).double()).to_dense()[:, 0]
    torch.testing.assert_close((LAGS * nu).cos() @ weights, exact, rtol=0, atol=1e-12)


def test_derivatives_of_the_weights():
    """First and second, by finite differences."""
    period = torch.ones(1).double()

    def weights(lengthscale):
        return PeriodicLines(period, lengthscale).lines(5)[1]

    lengthscale = torch.tensor([0.6], dtype=torch.float64, requires_grad=True)
    assert gradcheck(weights, lengthscale)
    assert gradgradcheck(weights, lengthscale)


@pytest.mark.parametrize("own", [TidalKernel("M2", "s", active_dims=(2,)), None])
def test_times_since_1970_keep_their_digits(own):
    """More than 25 of them, where gpytorch computes distances by a product of matrices; against
    numpy's cosine of differences. Rounding of 2.4e-7 s of the times is that of both."""
    period = TidalKernel("M2", "s").period
    time = cosine(period / 2, active_dims=(2,)) if own is None else own.double()
    generator = np.random.default_rng(0)
    start = np.array([0, 0, 1.5778368e9])
    x, z = generator.uniform(start, start + np.array([1, 1, 216_000]), (2, 40, 3))
    z[0] = x[0]
    kernel, a, b = in_space() * time, torch.from_numpy(x), torch.from_numpy(z)
    wave = np.cos(2 * np.pi * (x[:, None, 2] - z[None, :, 2]) / period)
    expected = kernel.field_kernel(a, b).to_dense() * torch.from_numpy(
        np.kron(wave, np.ones((2, 2)))
    )
    torch.testing.assert_close(kernel(a, b).to_dense(), expected, rtol=0, atol=1e-10)
    rows = [Rows(points, torch.eye(2).double().unsqueeze(1)) for points in (a, b)]
    torch.testing.assert_close(row_covariance(kernel)(*rows), expected, rtol=0, atol=1e-10)
    each = kernel(a, b, diag=True)
    torch.testing.assert_close(each, expected.diagonal(), rtol=0, atol=1e-10)


def test_tides_expect_one_column():
    with pytest.raises(ValueError, match="one column of time, got 3"):
        TidalKernel("M2")(torch.rand(4, 3)).to_dense()


@pytest.mark.parametrize("lengthscale", [0.01, 0.3, 5.0])
@pytest.mark.parametrize("tolerance", [1e-3, 1e-9])
def test_number_of_lines_is_the_smallest(lengthscale, tolerance):
    """Against the Fourier coefficients of the kernel, by a sum over one period."""
    kernel = periodic(1.0, lengthscale)
    count = gp_orff.spectrum(kernel).num_lines(tolerance)
    points = torch.arange(4096).double()[:, None] / 4096
    values = kernel(points, torch.zeros(1, 1).double()).to_dense()[:, 0].detach().numpy()
    weights = np.fft.rfft(values).real / 4096
    weights[1:] *= 2
    assert weights[count:].sum() <= tolerance < weights[count - 1 :].sum()
    assert gp_orff.spectrum(kernel).num_lines(tolerance, shorter=0.5) >= count


@pytest.mark.parametrize("rule", [gp_orff.QuasiMonteCarlo, gp_orff.MonteCarlo, gp_orff.Orthogonal])
def test_random_frequencies(rule):
    """Within five standard errors, also after the lengthscale and the period have changed."""
    time = periodic(active_dims=(2,))
    kernel = in_space() * time
    orff = gp_orff.ORFFKernel(kernel, rule(4096), num_dims=3)
    x = draw(12, 3)
    for lengthscale, period in ((0.8, 1.3), (1.0, 1.5)):
        time.lengthscale, time.period_length = lengthscale, period
        exact = kernel(x).to_dense()
        error = orff(x).to_dense() - exact
        assert error.abs().max() < 5 / 4096**0.5 * exact.diagonal().max()


def test_importance_weights_are_those_of_the_lines():
    """Of even numbers u, so that each line has its share of draws within one of them."""
    drawn, present = (gp_orff.spectrum(periodic(lengthscale=scale)) for scale in (0.3, 0.5))
    u = (np.arange(4000)[:, None] + 0.5) / 4000
    base = torch.from_numpy(drawn.base(np.ones((4000, 1)), u, 0))
    weights = present.importance(base, 0) / 4000
    for line, weight in enumerate(present.lines(6)[1]):
        found = weights[base[:, 1] == line].sum()
        assert found.item() == pytest.approx(weight.item(), abs=2e-3)
        at = base[:, 1] == line
        nu = present.frequencies(base, 0)[at, 0]
        assert torch.equal(nu, present.lines(6)[0][line].expand(int(at.sum())))


def test_gradients_reach_the_period_of_random_frequencies():
    time = periodic(active_dims=(2,))
    orff = gp_orff.ORFFKernel(in_space() * time, gp_orff.QuasiMonteCarlo(8), num_dims=3)
    x = draw(4, 3)

    def total(period, lengthscale):
        time.raw_period_length.data[:], time.raw_lengthscale.data[:] = period, lengthscale
        value = orff(x).to_dense().sin().sum()
        raw = time.raw_period_length, time.raw_lengthscale
        return value.item(), [g.item() for g in torch.autograd.grad(value, raw)]

    h, (_, slopes) = 1e-5, total(0.9, 0.4)
    by_period = (total(0.9 + h, 0.4)[0] - total(0.9 - h, 0.4)[0]) / (2 * h)
    by_lengthscale = (total(0.9, 0.4 + h)[0] - total(0.9, 0.4 - h)[0]) / (2 * h)
    assert slopes == pytest.approx([by_period, by_lengthscale], rel=1e-6)


def test_what_is_refused():
    rule = gp_orff.QuasiMonteCarlo(8)
    with pytest.raises(ValueError, match="one input"):
        gp_orff.ORFFKernel(periodic(), rule, num_dims=2)
    with pytest.raises(NotImplementedError, match="one input each"):
        gp_orff.spectrum(PeriodicKernel(ard_num_dims=2))
    shared = LCMKernel([periodic(), periodic(2.0)], num_tasks=2).double()
    with pytest.raises(NotImplementedError, match="shared=False"):
        gp_orff.ORFFKernel(shared, rule, num_dims=1)(draw(3, 1)).to_dense()


RATES = {"t": 15.0, "s": 0.5490165, "h": 0.0410686, "p": 0.0046418}  # degrees per hour
DOODSON = """
    Sa 0 0 1 0   Ssa 0 0 2 0   Mm 0 1 0 -1   Msf 0 2 -2 0   Mf 0 2 0 0
    Q1 1 -2 0 1   O1 1 -1 0 0   P1 1 1 -2 0   S1 1 1 -1 0   K1 1 1 0 0   J1 1 2 0 -1   OO1 1 3 0 0
    2N2 2 -2 0 2   MU2 2 -2 2 0   N2 2 -1 0 1   NU2 2 -1 2 -1
    M2 2 0 0 0   L2 2 1 0 -1   T2 2 2 -3 0   S2 2 2 -2 0   K2 2 2 0 0   M3 3 0 0 0   MK3 3 1 0 0
    MN4 4 -1 0 1   M4 4 0 0 0   MS4 4 2 -2 0   S4 4 4 -4 0   M6 6 0 0 0
"""  # multiples of the lunar day, and of the longitudes s, h and p


def test_speeds_are_those_of_doodson_numbers():
    """Within the rounding of the rates, and of the perihelion of T2."""
    day = RATES["t"] - RATES["s"] + RATES["h"]
    rates = np.array([day, RATES["s"], RATES["h"], RATES["p"]])
    words = DOODSON.split()
    assert set(words[::5]) == set(SPEEDS)
    for start in range(0, len(words), 5):
        name, *numbers = words[start], *map(int, words[start + 1 : start + 5])
        assert SPEEDS[name] == pytest.approx(rates @ numbers, abs=3e-6), name


@pytest.mark.parametrize(("unit", "hours"), [("h", 1.0), ("d", 24.0), ("s", 1 / 3600)])
def test_a_constituent_has_its_period(unit, hours):
    kernel = TidalKernel("M2", unit)
    assert kernel.period * hours == pytest.approx(12.4206012, abs=1e-7)
    assert 2 * kernel.period_length.item() == pytest.approx(kernel.period, rel=1e-6)  # float32
    assert 2 * kernel.double().period_length.item() == pytest.approx(kernel.period, rel=1e-14)
    lag = torch.tensor([[kernel.period]]).double()
    assert kernel(lag, 0 * lag).to_dense().item() == pytest.approx(1.0, abs=1e-12)


def test_tides_are_a_sum_of_products():
    kernel = gp_orff.tides(in_space(), ["M2", "K1"], active_dims=(2,)).double()
    x = 10 * draw(5, 3)
    space, lag = in_space()(x).to_dense(), x[:, 2:] - x[:, 2]
    waves = sum(torch.cos(2 * math.pi * lag / (360 / SPEEDS[name])) for name in ("M2", "K1"))
    expected = space * torch.kron(waves, torch.ones(2, 2).double())
    torch.testing.assert_close(kernel(x).to_dense(), expected, rtol=0, atol=1e-12)
    trained = {name.rpartition(".")[-1] for name, p in kernel.named_parameters() if p.requires_grad}
    assert trained == {"raw_outputscale", "raw_lengthscale"}
    plain = gp_orff.tides(gp_orff.CurlFreeKernel(num_dims=2), ["M2", "K1"], active_dims=(2,))
    assert sum(isinstance(part, ScaleKernel) for part in plain.modules()) == 2


def test_learned_periods_stay_within_their_bound():
    kernel = gp_orff.tides(in_space(), ["M2"], active_dims=(2,), period_bound=0.01).double()
    (time,) = (own for own in kernel.modules() if isinstance(own, TidalKernel))
    assert time.raw_period_length.requires_grad
    for raw, share in ((-50.0, 0.99), (0.0, 1.0), (50.0, 1.01)):
        time.raw_period_length.data[:] = raw
        assert 2 * time.period_length.item() == pytest.approx(share * time.period, rel=1e-6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"constituents": []}, "different constituents"),
        ({"constituents": "M2"}, r"a list of different constituents, .*got 'M2'"),
        ({"constituents": ["M2", "M2"]}, "different constituents"),
        ({"constituents": ["X9"]}, "one of Sa"),
        ({"unit": "weeks"}, "one of s, min"),
        ({"active_dims": (1, 2)}, "one column of time"),
        ({"active_dims": 2}, r"such as active_dims=\(2,\), got 2"),
        ({"period_bound": 1.5}, "between 0 and 1"),
    ],
)
def test_wrong_tides(arguments, message):
    with pytest.raises(ValueError, match=message):
        gp_orff.tides(in_space(), **{"constituents": ["M2"], "active_dims": (2,), **arguments})


def test_rayleigh_criterion():
    """M2 and S2 make springs and neaps, of 14.765 days."""
    kernel = gp_orff.tides(in_space(), ["M2", "S2", "K1"], active_dims=(2,), unit="d")
    assert inseparable(kernel, [1, 1, 15]) == []
    ((one, other, needed),) = inseparable(kernel, [1, 1, 14])
    assert (one, other) == ("M2", "S2")
    assert needed == pytest.approx(14.765, abs=1e-3)
