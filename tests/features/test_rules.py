"""Frequency rules, compared with exact kernels: no bias, and the documented rates."""

import math

import numpy as np
import pytest
import torch
from gpytorch.kernels import LCMKernel, MultitaskKernel

import gp_orff
from gp_orff.features.assemble import draw, expand
from gp_orff.features.random import Base, LongTails, Measure, Trace
from gp_orff.models.storage import build_rule, describe_rule
from tests.support.registry import (
    FIELDS,
    INFINITE_VARIANCE,
    MEASURES,
    NO_CELL,
    RULES,
    SMOOTH,
    SPECTRA,
    base,
    randomise_tasks,
)


def pair(num_dims):
    """Two points at a lag of about one lengthscale, and lag zero."""
    x = torch.linspace(-0.3, 0.4, num_dims, dtype=torch.float64).unsqueeze(0)
    return x, torch.cat([x, x + 0.5, x - 0.9])


def estimates(kernel, rule, measure, num_dims, seeds, num_frequencies):
    """Φ(x) Φ(z)ᵀ, which `test_orff_exact_gp` compares with `ORFFKernel`, for many seeds."""
    x, z = pair(num_dims)
    found = []
    with torch.no_grad():
        for seed in range(seeds):
            frequencies = RULES[rule](num_frequencies, measure=measure, seed=seed)
            expansion = expand(kernel, draw(kernel, frequencies, num_dims), num_dims)
            features = expansion.features(torch.cat([x, z]))
            left, right = features.split([features.shape[0] // 4, 3 * features.shape[0] // 4])
            found.append(left @ right.mT)
    return torch.stack(found)


def is_unbiased(samples, exact):
    error = samples.mean(0) - exact
    stderr = samples.std(0) / len(samples) ** 0.5
    return bool((error.abs() <= 5 * stderr + 1e-12).all())


CELLS = [
    (spectrum, measure)
    for spectrum in SMOOTH
    for measure in MEASURES
    if (spectrum, measure) not in INFINITE_VARIANCE
]


DRAWN = [("monte_carlo", 2), ("monte_carlo", 5), *((rule, 3) for rule in RULES)]
OF_FIELDS = [  # every spectrum and measure by every rule, for the one field or the other
    (list(FIELDS)[(i + j) % 2], *cell, *drawn)
    for i, cell in enumerate(CELLS)
    for j, drawn in enumerate(DRAWN)
]


@pytest.mark.slow
@pytest.mark.parametrize(("field", "spectrum", "measure", "rule", "num_dims"), OF_FIELDS)
def test_field_kernels_are_unbiased(field, spectrum, measure, rule, num_dims):
    kernel = FIELDS[field][0](base(spectrum, num_dims), num_dims=num_dims)
    samples = estimates(kernel, rule, measure, num_dims, seeds=25, num_frequencies=256)
    assert is_unbiased(samples, kernel(*pair(num_dims)).to_dense())
    assert not is_unbiased(samples, 1.25 * kernel(*pair(num_dims)).to_dense())  # it can fail


OF_SCALARS = [  # every spectrum by every rule, in two of four numbers of inputs
    (spectrum, rule, num_dims)
    for i, spectrum in enumerate(SPECTRA)
    for j, rule in enumerate(RULES)
    for num_dims in ((1, 5), (2, 3))[(i + j) % 2]
]


@pytest.mark.slow
@pytest.mark.parametrize(("spectrum", "rule", "num_dims"), OF_SCALARS)
def test_scalar_kernels_are_unbiased(spectrum, rule, num_dims):
    kernel = base(spectrum, num_dims)
    samples = estimates(kernel, rule, "trace", num_dims, 50, 128)
    assert is_unbiased(samples, kernel(*pair(num_dims)).to_dense())


@pytest.mark.parametrize("spectrum", list(SPECTRA))
def test_kernels_by_many_high_frequencies_are_unbiased(spectrum):
    kernel = base(spectrum, 2)
    samples = estimates(kernel, "quasi_monte_carlo", LongTails(), 2, 50, 128)
    assert is_unbiased(samples, kernel(*pair(2)).to_dense())


def test_many_frequencies_are_high():
    """Of 2048 frequencies, 2048 · .0001^(1/3) = 95 among the highest ten-thousandth: .2 by the
    density itself."""
    kernel = gp_orff.CurlFreeKernel(base("matern52", 2), num_dims=2)
    spectrum = gp_orff.spectrum(kernel.base_kernel)
    for measure, number in ((LongTails(), 95), ("trace", 0.2)):
        (own,) = draw(kernel, gp_orff.QuasiMonteCarlo(2048, measure=measure), 2)
        (omega,), _ = own.nodes([spectrum])
        shares = [spectrum.tail(z, 1, 2) for z in spectrum.scaled_radius(omega.detach().numpy())]
        assert abs(sum(share < 1e-4 for share in shares) - number) <= 2


@pytest.mark.parametrize("rule", RULES)
def test_separable_kernels_are_unbiased(rule):
    kernel = randomise_tasks(MultitaskKernel(base("rbf", 2), num_tasks=2, rank=2).double())
    samples = estimates(kernel, rule, "trace", 2, 100, 256)
    assert is_unbiased(samples, kernel(*pair(2)).to_dense())


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
def test_shared_frequencies_of_a_linear_model_of_coregionalisation(rule):
    """Unbiased, on half the frequencies of two kernels side by side, with smaller errors."""
    kernel = LCMKernel([base("rbf", 2), base("matern32", 2)], num_tasks=2, rank=1).double()
    for seed, part in enumerate(kernel.covar_module_list):
        randomise_tasks(part, seed)
    exact = kernel(*pair(2)).to_dense()
    shared = estimates(kernel, rule, "trace", 2, 100, 256)
    assert is_unbiased(shared, exact)
    side_by_side = kernel.covar_module_list[0] + kernel.covar_module_list[1]
    features = [
        gp_orff.ORFFKernel(k, RULES[rule](256)).num_features for k in (kernel, side_by_side)
    ]
    assert features == [2 * 256 * 2, 2 * 2 * 256 * 2]
    apart = estimates(side_by_side, rule, "trace", 2, 100, 128)  # as many features
    if rule == "monte_carlo":
        assert (shared - exact).square().mean() < (apart - exact).square().mean()


@pytest.mark.slow
def test_products_with_time_are_unbiased():
    space = gp_orff.DivergenceFreeKernel(base("rbf", 2), num_dims=2, active_dims=(0, 1))
    time = base("matern32", 1)
    time.active_dims = torch.tensor([2])
    kernel = space * time
    for rule in RULES:
        samples = estimates(kernel, rule, "trace", 3, 100, 256)
        assert is_unbiased(samples, kernel(*pair(3)).to_dense())


@pytest.mark.parametrize("rule", RULES)
def test_products_of_kernels_on_lines_are_unbiased(rule):
    """Their signs are independent: cos(ω₁τ₁ + ω₂τ₂) keeps −sin·sin otherwise."""
    first, second = base("rbf", 1), base("matern52", 1)
    first.active_dims, second.active_dims = torch.tensor([0]), torch.tensor([1])
    for kernel in (first * second, base("rbf", 1) * base("matern52", 1)):
        num_dims = 2 if kernel.kernels[0].active_dims is not None else 1
        samples = estimates(kernel, rule, "trace", num_dims, 100, 256)
        assert is_unbiased(samples, kernel(*pair(num_dims)).to_dense())


def test_time_keeps_its_own_law():
    """Only the field's frequencies are tilted: time may be as rough as Matérn 1/2."""
    space = gp_orff.CurlFreeKernel(base("rbf", 2), num_dims=2, active_dims=(0, 1))
    time = base("matern12", 1)
    time.active_dims = torch.tensor([2])
    (draw,) = gp_orff.ORFFKernel(space * time, gp_orff.MonteCarlo(8)).frequencies
    assert draw.orders == (1, 0)
    samples = estimates(space * time, "monte_carlo", "trace", 3, 100, 256)
    assert is_unbiased(samples, (space * time)(*pair(3)).to_dense())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spectrum", "measure", "rule"),
    [
        (*cell, rule)
        for cell in CELLS
        for rule in RULES
        if rule == "quasi_monte_carlo" or cell[0] in ("rbf", "matern52")
    ],
)
def test_error_falls_as_the_root_of_the_number_of_frequencies(spectrum, measure, rule):
    """Slope −½ for independent and orthogonal frequencies, steeper for Sobol points."""
    kernel = gp_orff.CurlFreeKernel(base(spectrum, 2), num_dims=2)
    exact = kernel(*pair(2)).to_dense()
    numbers = [32, 1024]
    # the median over seeds: the tails of the base measure make the mean square error jump
    errors = [
        (estimates(kernel, rule, measure, 2, 100, n) - exact).norm(dim=(-1, -2)).median().item()
        for n in numbers
    ]
    slope = math.log(errors[1] / errors[0]) / math.log(numbers[1] / numbers[0])
    # 100 seeds give each median to about 10 %; over a factor 32 the slope's error is about 0.04
    if (spectrum, measure) == ("matern52", "base") and rule != "monte_carlo":
        assert slope < -0.3  # no fourth moment: far from its limit at these numbers
    elif rule == "quasi_monte_carlo":
        assert slope < -0.6
    else:
        assert slope == pytest.approx(-0.5, abs=0.1)


@pytest.mark.parametrize("rule", RULES)
def test_cells_that_do_not_exist_say_so(rule):
    for spectrum, measure in NO_CELL:
        kernel = gp_orff.CurlFreeKernel(base(spectrum, 2), num_dims=2)
        with pytest.raises(NotImplementedError, match=r'the trace measure.*; use measure="base"'):
            gp_orff.ORFFKernel(kernel, RULES[rule](8, measure=measure))
        gp_orff.ORFFKernel(kernel, RULES[rule](8, measure="base"))


def test_spectral_mixture_fields_are_unbiased_in_the_base_measure():
    """Against −∇∇ᵀk by automatic differentiation: gpytorch has no closed form for it here."""
    kernel = base("spectral_mixture", 2)
    field = gp_orff.CurlFreeKernel(kernel, num_dims=2)
    x, z = pair(2)

    def k(tau):
        weights = kernel.mixture_weights.unsqueeze(-1)  # (Q, 1)
        means, scales = kernel.mixture_means.squeeze(-2), kernel.mixture_scales.squeeze(-2)
        decay = torch.exp(-2 * (torch.pi * tau * scales).square())
        return (weights * decay * torch.cos(2 * torch.pi * tau * means)).sum(0).prod()

    blocks = [-torch.autograd.functional.hessian(k, (x - point).squeeze(0)) for point in z]
    for rule in RULES:
        assert is_unbiased(estimates(field, rule, "base", 2, 100, 256), torch.cat(blocks, dim=-1))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("field", FIELDS)
def test_trace_measure_is_bounded_and_base_is_not(field, rule):
    """Minh 2016: ‖B(ω)‖² is the same for every frequency of an isotropic kernel."""
    kernel = FIELDS[field][0](base("matern52", 3, ard=False), num_dims=3)
    x = torch.zeros(1, 3, dtype=torch.float64)
    trace = kernel(x).to_dense().diagonal().sum()
    for measure, constant in [("trace", True), ("base", False)]:
        orff = gp_orff.ORFFKernel(kernel, RULES[rule](50, measure=measure))
        directions = orff(x).evaluate_kernel().expansion.directions
        norms = directions.square().sum(-1).reshape(2, 50, -1).sum(-1)  # per column
        torch.testing.assert_close(norms[0], norms[1])  # a cosine and a sine of each
        assert torch.allclose(norms, trace / 50) == constant


def test_orthogonal_directions_are_orthogonal():
    orff = gp_orff.ORFFKernel(base("rbf", 3, ard=False), gp_orff.Orthogonal(8), num_dims=3)
    directions = torch.nn.functional.normalize(orff.frequencies[0].base_0, dim=-1)
    for block in directions.split(3):
        torch.testing.assert_close(block @ block.mT, torch.eye(len(block), dtype=torch.float64))


@pytest.mark.parametrize("rule", RULES)
def test_seeds_and_global_random_state(rule):
    kernel = gp_orff.HelmholtzKernel(num_dims=2)
    torch_state, numpy_state = torch.get_rng_state(), np.random.get_state()  # noqa: NPY002
    first, again, other = (
        gp_orff.ORFFKernel(kernel, RULES[rule](20, seed=seed)).frequencies for seed in (0, 0, 1)
    )
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert (np.random.get_state()[1] == numpy_state[1]).all()  # noqa: NPY002
    assert torch.equal(first[0].base_0, again[0].base_0)
    assert not torch.equal(first[0].base_0, other[0].base_0)
    assert not torch.equal(first[0].base_0, first[1].base_0)  # terms differ


@pytest.mark.parametrize("name", SMOOTH)
def test_hyperparameters_act_on_drawn_frequencies(name):
    kernel = gp_orff.CurlFreeKernel(base(name, 2), num_dims=2)
    orff = gp_orff.ORFFKernel(kernel, gp_orff.MonteCarlo(4000, seed=0))
    x, z = pair(2)
    kernel.base_kernel.lengthscale = torch.tensor([0.4, 2.0])
    if name == "rq":
        kernel.base_kernel.alpha = 0.7
    exact, approximate = kernel(x, z).to_dense(), orff(x, z).to_dense()
    assert (approximate - exact).norm() < 0.1 * exact.norm()  # ~1/√D, both move together


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("name", "measure"), [("trace", Trace()), ("base", Base())])
def test_measures_are_called_by_their_names(rule, name, measure):
    """In equality, in words and in files; a measure of others has none."""
    one, other = RULES[rule](8, measure=name), RULES[rule](8, measure=measure)
    assert (one, hash(one), repr(one)) == (other, hash(other), repr(other))
    assert describe_rule(other) == describe_rule(one)
    assert build_rule(describe_rule(one), None) == other

    class Mine(Measure):
        def order(self, leaf):
            return measure.order(leaf)

    kernel = gp_orff.CurlFreeKernel(base("rbf", 2), num_dims=2)
    found, expected = (
        gp_orff.ORFFKernel(kernel, RULES[rule](8, measure=own)).frequencies[0]
        for own in (Mine(), name)
    )
    assert found.orders == expected.orders
    assert torch.equal(found.bases[0], expected.bases[0])


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_frequencies": 0}, "positive integer, got 0"),
        ({"num_frequencies": 2.5}, r"positive integer, got 2\.5"),
        ({"num_frequencies": True}, "positive integer, got True"),
        ({"num_frequencies": 8, "measure": "minh"}, '"trace" or "base", got \'minh\''),
    ],
)
def test_bad_rules_are_refused(rule, arguments, message):
    with pytest.raises(ValueError, match=message):
        RULES[rule](**arguments)
