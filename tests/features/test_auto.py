"""`Auto`: the rule that it chooses, and the reason that it prints."""

import pytest
import torch
from gpytorch.kernels import MaternKernel, RBFKernel

import gp_orff
from gp_orff.features.assemble import term_spectra
from tests.support.fields import uniform


def chosen(kernel, auto, num_dims=None):
    return auto.choose(term_spectra(kernel, num_dims))


def field(num_dims, kernel=RBFKernel):
    return gp_orff.CurlFreeKernel(kernel().double(), num_dims=num_dims)


def test_few_inputs_take_a_grid():
    x = uniform(20, 2)
    rule, reason = chosen(field(2), gp_orff.Auto().for_data(x))
    assert isinstance(rule, gp_orff.Grid)
    assert reason == "grid: 2 inputs, tolerance 1e-05 within 8192 features"


def test_a_budget_that_does_not_suffice_is_told():
    auto = gp_orff.Auto(max_features=300).for_data(uniform(20, 2))
    rule, reason = chosen(field(2, MaternKernel), auto)
    assert isinstance(rule, gp_orff.Grid)
    assert "do not suffice for 1e-05" in reason


def test_many_inputs_take_random_frequencies():
    rule, reason = chosen(field(6), gp_orff.Auto(max_features=500).for_data(uniform(20, 6)))
    assert rule == gp_orff.QuasiMonteCarlo(128)  # 2 · 128 features, the next power is too many
    assert "6 inputs" in reason
    kernel = gp_orff.ORFFKernel(field(6), gp_orff.Auto(max_features=500).for_data(uniform(20, 6)))
    assert kernel.num_features <= 500


def test_without_data_or_where_a_grid_is_refused():
    with pytest.raises(ValueError, match=r"Auto\(\)\.for_data\(x\)"):
        chosen(field(2), gp_orff.Auto())
    rule, reason = chosen(field(2), gp_orff.Auto(max_features=64))
    assert isinstance(rule, gp_orff.QuasiMonteCarlo)
    assert "for_data" in reason
    product = RBFKernel() * MaternKernel(nu=1.5)
    rule, reason = chosen(product, gp_orff.Auto().for_data(uniform(20, 2)), 2)
    assert isinstance(rule, gp_orff.QuasiMonteCarlo)
    assert "different input columns" in reason


def test_the_reason_can_be_read_from_the_kernel():
    kernel = gp_orff.ORFFKernel(field(2), gp_orff.Auto().for_data(uniform(20, 2)))
    assert kernel.frequencies[0].reason.startswith("grid")


@pytest.mark.parametrize("wrong", [{"tolerance": 0}, {"max_features": 0}, {"exact_values": -1}])
def test_bad_arguments(wrong):
    with pytest.raises(ValueError, match="Auto expects"):
        gp_orff.Auto(**wrong)


def test_a_budget_without_a_frequency_for_each_term_is_named():
    x = uniform(30, 2)
    model = gp_orff.VectorFieldGP(
        gp_orff.HelmholtzKernel(num_dims=2),
        frequencies=gp_orff.Auto(max_features=3, exact_values=0),
    )
    before = {name: value.clone() for name, value in model.named_parameters()}
    with pytest.raises(ValueError, match=r"at least 4, .*Auto\(max_features=3\)"):
        model.condition(x, torch.sin(x))
    with pytest.raises(ValueError, match=r"at least 4, .*Auto\(max_features=3\)"):
        model.fit(x, torch.sin(x), progress=False)
    assert all(torch.equal(before[name], value) for name, value in model.named_parameters())
