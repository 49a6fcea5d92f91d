"""Random features against the exact kernels: unbiased, with the rate of Monte Carlo."""

import numpy as np
import pytest
import torch
from gpytorch.kernels import MultitaskKernel

import gp_orff
from tests.registry import FIELDS, INFINITE_VARIANCE, RULES, SMOOTH, SPECTRA, base


def pair(num_dims):
    """Two points at a lag of about one lengthscale, and lag zero."""
    x = torch.linspace(-0.3, 0.4, num_dims, dtype=torch.float64).unsqueeze(0)
    return x, torch.cat([x, x + 0.5, x - 0.9])


def estimates(kernel, rule, num_dims, seeds, num_frequencies):
    x, z = pair(num_dims)
    with torch.no_grad():
        return torch.stack(
            [
                gp_orff.ORFFKernel(kernel, rule(num_frequencies, seed), num_dims=num_dims)(
                    x, z
                ).to_dense()
                for seed in range(seeds)
            ]
        )


def is_unbiased(samples, exact):
    error = samples.mean(0) - exact
    stderr = samples.std(0) / len(samples) ** 0.5
    return bool((error.abs() <= 5 * stderr + 1e-12).all())


CELLS = [
    (spectrum, rule)
    for spectrum in SMOOTH
    for rule in RULES
    if (spectrum, rule.removeprefix("monte_carlo_")) not in INFINITE_VARIANCE
]


@pytest.mark.parametrize("num_dims", [2, 3, 5])
@pytest.mark.parametrize(("spectrum", "rule"), CELLS)
@pytest.mark.parametrize("field", FIELDS)
def test_field_kernels_are_unbiased(field, spectrum, rule, num_dims):
    kernel = FIELDS[field][0](base(spectrum, num_dims), num_dims=num_dims)
    samples = estimates(kernel, RULES[rule], num_dims, seeds=100, num_frequencies=256)
    assert is_unbiased(samples, kernel(*pair(num_dims)).to_dense())
    assert not is_unbiased(samples, 1.25 * kernel(*pair(num_dims)).to_dense())  # it can fail


@pytest.mark.parametrize("num_dims", [2, 3, 5])
@pytest.mark.parametrize("spectrum", SPECTRA)
def test_separable_kernels_are_unbiased(spectrum, num_dims):
    kernel = MultitaskKernel(base(spectrum, num_dims), num_tasks=2, rank=2).double()
    torch.nn.init.constant_(kernel.task_covar_module.covar_factor, 0.6)
    torch.nn.init.constant_(kernel.task_covar_module.raw_var, 0.2)
    samples = estimates(kernel, RULES["monte_carlo_base"], num_dims, 100, 256)
    assert is_unbiased(samples, kernel(*pair(num_dims)).to_dense())


@pytest.mark.parametrize(("spectrum", "rule"), CELLS)
def test_error_falls_as_the_root_of_the_number_of_frequencies(spectrum, rule):
    kernel = gp_orff.CurlFreeKernel(base(spectrum, 2), num_dims=2)
    exact = kernel(*pair(2)).to_dense()
    numbers = [2**k for k in range(5, 12)]
    # the median over seeds: the tails of the base measure make the mean square error jump
    errors = [
        (estimates(kernel, RULES[rule], 2, 100, number) - exact).norm(dim=(-1, -2)).median().item()
        for number in numbers
    ]
    slope = np.polyfit(np.log(numbers), np.log(errors), 1)[0]
    # 100 seeds give each median to about 10 %; over a factor 64 the slope's error is about 0.03
    assert slope == pytest.approx(-0.5, abs=0.1)


@pytest.mark.parametrize("field", FIELDS)
def test_trace_measure_is_bounded_and_base_is_not(field):
    """Minh 2016: ‖B(ω)‖² is the same for every frequency of an isotropic kernel."""
    kernel = FIELDS[field][0](base("matern52", 3, ard=False), num_dims=3)
    x = torch.zeros(1, 3, dtype=torch.float64)
    trace = kernel(x).to_dense().diagonal().sum()
    for measure, constant in [("trace", True), ("base", False)]:
        orff = gp_orff.ORFFKernel(kernel, gp_orff.MonteCarlo(50, measure=measure))
        directions = orff(x).evaluate_kernel().expansion.directions
        norms = directions.square().sum(-1).reshape(2, 50, -1).sum(-1)  # per column
        torch.testing.assert_close(norms[0], norms[1])  # a cosine and a sine of each
        assert torch.allclose(norms, trace / 50) == constant


def test_seeds_and_global_random_state():
    kernel = gp_orff.HelmholtzKernel(num_dims=2)
    torch_state, numpy_state = torch.get_rng_state(), np.random.get_state()  # noqa: NPY002
    first, again, other = (
        gp_orff.ORFFKernel(kernel, gp_orff.MonteCarlo(20, seed=seed)) for seed in (0, 0, 1)
    )
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert (np.random.get_state()[1] == numpy_state[1]).all()  # noqa: NPY002
    assert torch.equal(first.frequencies[0].z, again.frequencies[0].z)
    assert not torch.equal(first.frequencies[0].z, other.frequencies[0].z)
    assert not torch.equal(first.frequencies[0].z, first.frequencies[1].z)  # leaves differ


def test_hyperparameters_act_on_drawn_frequencies():
    kernel = gp_orff.CurlFreeKernel(base("rbf", 2), num_dims=2)
    orff = gp_orff.ORFFKernel(kernel, gp_orff.MonteCarlo(2000, seed=0))
    x, z = pair(2)
    kernel.base_kernel.lengthscale = torch.tensor([0.4, 2.0])
    exact, approximate = kernel(x, z).to_dense(), orff(x, z).to_dense()
    assert (approximate - exact).norm() < 0.1 * exact.norm()  # ~1/√D, both move together


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_frequencies": 0}, "positive integer, got 0"),
        ({"num_frequencies": 2.5}, r"positive integer, got 2\.5"),
        ({"num_frequencies": 8, "measure": "minh"}, '"trace" or "base", got \'minh\''),
    ],
)
def test_bad_rules_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        gp_orff.MonteCarlo(**arguments)
