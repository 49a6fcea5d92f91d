"""Bad input: every message names the expected input, the actual input and the remedy."""

import gpytorch
import pytest
import torch
from gpytorch.kernels import (
    AdditiveKernel,
    MaternKernel,
    MultitaskKernel,
    PeriodicKernel,
    PiecewisePolynomialKernel,
    RBFKernel,
    RBFKernelGrad,
)

import gp_orff
from tests.support.fields import draw
from tests.support.models import evidence, scalar_gp, vector_gp

RULE = gp_orff.MonteCarlo(16)
pytestmark = pytest.mark.filterwarnings("ignore::gp_orff.FeatureWarning")


def curl_free(**kwargs):
    return gp_orff.CurlFreeKernel(RBFKernel(), num_dims=2, **kwargs)


CONSTRUCTION = {
    "rough_potential": (
        lambda: gp_orff.CurlFreeKernel(MaternKernel(nu=0.5), num_dims=2),
        ValueError,
        r"CurlFreeKernel needs a twice-differentiable.*nu > 1, got nu=0.5; use nu=1.5 or 2.5",
    ),
    "rough_potential_of_any_smoothness": (
        lambda: gp_orff.CurlFreeKernel(gp_orff.GeneralMaternKernel(nu=1), num_dims=2),
        ValueError,
        r"CurlFreeKernel needs a twice-differentiable.*nu > 1, got nu=1.0; use nu=1.5",
    ),
    "smoothness_of_the_potential": (
        lambda: gp_orff.CurlFreeKernel(nu=1, num_dims=2),
        TypeError,
        r"CurlFreeKernel expects the arguments base_kernel, .*, got nu; pass arguments",
    ),
    "smoothness_in_words": (
        lambda: gp_orff.GeneralMaternKernel(nu="5/2"),
        TypeError,
        r"GeneralMaternKernel expects nu as a number, got '5/2'",
    ),
    "rough_potential_inside_a_sum": (
        lambda: gp_orff.DivergenceFreeKernel(RBFKernel() + MaternKernel(nu=0.5), num_dims=2),
        ValueError,
        r"DivergenceFreeKernel needs.*got nu=0.5",
    ),
    "unknown_potential": (
        lambda: gp_orff.CurlFreeKernel(PiecewisePolynomialKernel(), num_dims=2),
        NotImplementedError,
        r"one of .*MaternKernel, RBFKernel, RQKernel.*got PiecewisePolynomialKernel.*register",
    ),
    "periodic_potential": (
        lambda: gp_orff.CurlFreeKernel(PeriodicKernel(), num_dims=2),
        NotImplementedError,
        r"CurlFreeKernel expects.*spectral density, got PeriodicKernel.*multiply",
    ),
    "derivative_kernel_in_disguise": (
        lambda: gp_orff.CurlFreeKernel(RBFKernelGrad(), num_dims=2),
        NotImplementedError,
        r"the covariance of RBFKernel, got RBFKernelGrad, which overrides it; use",
    ),
    "class_instead_of_instance": (
        lambda: gp_orff.CurlFreeKernel(RBFKernel, num_dims=2),
        TypeError,
        r"expects an instance.*got <class.*RBFKernel.*for instance, CurlFreeKernel\(",
    ),
    "vector_valued_potential": (
        lambda: gp_orff.CurlFreeKernel(MultitaskKernel(RBFKernel(), num_tasks=2), num_dims=2),
        ValueError,
        r"needs a scalar base kernel, got one with 2 outputs",
    ),
    "divergence_free_on_a_line": (
        lambda: gp_orff.DivergenceFreeKernel(RBFKernel(), num_dims=1),
        ValueError,
        r"DivergenceFreeKernel needs num_dims >= 2, got 1",
    ),
    "ard_of_another_dimension": (
        lambda: gp_orff.CurlFreeKernel(RBFKernel(ard_num_dims=3), num_dims=2),
        ValueError,
        r"expects ard_num_dims=2 in its base kernel, got 3",
    ),
    "active_dims_of_another_number": (
        lambda: curl_free(active_dims=(0, 1, 2)),
        ValueError,
        r"num_dims=2\) expects 2 active_dims.*got 3",
    ),
    "features_of_an_unknown_spectrum": (
        lambda: gp_orff.ORFFKernel(PiecewisePolynomialKernel(), RULE, num_dims=1),
        NotImplementedError,
        r"registered spectral density.*RBFKernel.*got PiecewisePolynomialKernel.*register",
    ),
    "features_in_an_unknown_dimension": (
        lambda: gp_orff.ORFFKernel(RBFKernel(), RULE),
        ValueError,
        r"for RBFKernel, got none of them.*pass num_dims=",
    ),
    "terms_of_different_sizes": (
        lambda: gp_orff.ORFFKernel(AdditiveKernel(curl_free(), RBFKernel()), RULE, num_dims=2),
        ValueError,
        r"same number of outputs, got \[1, 2\]; wrap scalar kernels in.*MultitaskKernel",
    ),
}


@pytest.mark.parametrize("name", CONSTRUCTION)
def test_kernels_that_do_not_exist_are_refused_at_construction(name):
    build, error, message = CONSTRUCTION[name]
    with pytest.raises(error, match=message):
        build()


INPUTS = {
    "too_many_columns": (torch.zeros(3, 3), ValueError, r"with 2 columns, got 3; .*active_dims"),
    "too_few_columns": (torch.zeros(3, 1), ValueError, r"with 2 columns, got 1; .*active_dims"),
    "integers": (torch.zeros(3, 2, dtype=torch.int64), TypeError, r"int64; pass x.double\(\)"),
}


@pytest.mark.parametrize("name", INPUTS)
@pytest.mark.parametrize("approximate", [False, True], ids=["exact", "orff"])
def test_inputs_that_do_not_fit_are_refused(name, approximate):
    x, error, message = INPUTS[name]
    kernel = gp_orff.ORFFKernel(curl_free(), RULE) if approximate else curl_free()
    with pytest.raises(error, match=message):
        kernel(x).to_dense()


def nan_at(tensor, *index):
    tensor = tensor.clone()
    tensor[index] = float("nan")
    return tensor


KERNELS = {
    "CurlFreeKernel": lambda: curl_free(),
    "ORFFKernel": lambda: gp_orff.ORFFKernel(curl_free(), RULE),
}


@pytest.mark.parametrize("name", KERNELS)
def test_inputs_that_are_not_numbers_are_refused(name):
    kernel = KERNELS[name]().double()
    x = nan_at(draw(5, 2), 3, 1)
    x[0, 0] = float("inf")
    with pytest.raises(ValueError, match=rf"{name} .*finite inputs, got 2 points with NaN.*drop"):
        kernel(x).to_dense()
    with pytest.raises(ValueError, match=f"{name} expects at least one point, got an empty set"):
        kernel(draw(0, 2)).to_dense()


@pytest.mark.parametrize("name", KERNELS)
def test_mixed_and_half_precisions_are_refused(name):
    kernel = KERNELS[name]()
    message = rf"{name} has torch.float32 hyper.*got torch.float64; convert.*double\(\)"
    with pytest.raises(TypeError, match=message):
        kernel(draw(3, 2)).to_dense()
    with pytest.raises(TypeError, match=rf"{name} expects float32 or.*float16; pass x.float\(\)"):
        kernel.half()(draw(3, 2).half()).to_dense()


ORFF_ARGUMENTS = {
    "class_instead_of_kernel": ((RBFKernel, RULE), TypeError, r"instance of a gpytorch kernel f"),
    "number_instead_of_rule": ((RBFKernel(), 100), TypeError, r"frequency rule second, got 100"),
    "class_instead_of_rule": ((RBFKernel(), gp_orff.MonteCarlo), TypeError, r"rule second, got <c"),
    "swapped": ((RULE, RBFKernel()), TypeError, r"kernel first, got MonteCarlo"),
}


@pytest.mark.parametrize("name", ORFF_ARGUMENTS)
def test_arguments_of_orff_kernel(name):
    arguments, error, message = ORFF_ARGUMENTS[name]
    with pytest.raises(error, match=message):
        gp_orff.ORFFKernel(*arguments, num_dims=2)


def test_the_number_of_inputs_follows_from_the_other_terms_and_may_not_contradict_them():
    separable = MultitaskKernel(RBFKernel(), num_tasks=2)
    orff = gp_orff.ORFFKernel(curl_free() + separable, RULE)
    assert orff(torch.zeros(3, 2)).shape == (6, 6)
    with pytest.raises(ValueError, match=r"on the same inputs, got \[2\] columns.*num_dims=3"):
        gp_orff.ORFFKernel(curl_free(), RULE, num_dims=3)
    with pytest.raises(ValueError, match=r"column 4 among active_dims, and num_dims=2"):
        gp_orff.ORFFKernel(curl_free() + curl_free(active_dims=(0, 4)), RULE)


def test_dimensions_of_a_field_and_its_potential():
    with pytest.raises(TypeError, match=r"integer num_dims, got 2.0"):
        gp_orff.CurlFreeKernel(RBFKernel(), num_dims=2.0)
    with pytest.raises(
        ValueError, match=r"its base kernel from 0 to 1, got \(1, 3\); .*CurlFreeKernel"
    ):
        gp_orff.CurlFreeKernel(RBFKernel(active_dims=(1, 3)), num_dims=2)
    with pytest.raises(ValueError, match=r"expects ard_num_dims=1 in its base kernel, got 2"):
        gp_orff.CurlFreeKernel(RBFKernel(ard_num_dims=2, active_dims=(0,)), num_dims=2)
    with pytest.raises(
        ValueError, match=r"a constant or a product; drop a constant, which has no gradient"
    ):
        gp_orff.CurlFreeKernel(RBFKernel() * RBFKernel(), num_dims=2)
    for seed in (-1, "a", None, 1.5):
        with pytest.raises(ValueError, match="seed to be a non-negative integer, got"):
            gp_orff.MonteCarlo(8, seed=seed)


@pytest.mark.parametrize("name", KERNELS)
def test_last_dim_is_batch_is_refused(name):
    kernel = KERNELS[name]()
    with pytest.raises(ValueError, match=r"last_dim_is_batch=True.*use active_dims"):
        kernel.forward(torch.zeros(3, 2), torch.zeros(3, 2), last_dim_is_batch=True)


def orff_model(points=40, y=None, **likelihood_arguments):
    kernel = gp_orff.ORFFKernel(curl_free(), RULE)
    y = draw(points, 2, seed=1) if y is None else y
    return vector_gp(draw(points, 2), y, kernel, noise=0.1, **likelihood_arguments)


@pytest.mark.parametrize("points", [3, 40], ids=["dual", "primal"])
def test_observations_that_are_not_numbers_are_counted(points):
    model = orff_model(points, nan_at(draw(points, 2, seed=1), 1, slice(None)))
    message = rf"got 2 NaN or infinite values among {2 * points}; drop those points"
    with pytest.raises(ValueError, match=message):
        evidence(model)
    model.eval()
    with pytest.raises(ValueError, match=message):
        model(draw(2, 2)).mean  # noqa: B018
    model.set_train_data(targets=draw(points, 2, seed=1))  # and nothing was broken by it
    assert model(draw(2, 2)).mean.isfinite().all()


@pytest.mark.parametrize("points", [3, 40], ids=["dual", "primal"])
def test_singular_noise_names_the_remedy(points):
    model = orff_model(points, rank=1, has_global_noise=False)
    with pytest.raises(ValueError, match=r"positive definite noise.*has_global_noise=True"):
        evidence(model)
    model.eval()
    with pytest.raises(ValueError, match=r"singular.*task noise of full rank"):
        model(draw(2, 2)).mean  # noqa: B018


def test_lengths_that_differ_are_refused_by_gpytorch():
    model = vector_gp(draw(40, 2), draw(39, 2), gp_orff.ORFFKernel(curl_free(), RULE), noise=0.1)
    with pytest.raises((RuntimeError, ValueError), match=r"39|78"):
        evidence(model)


def test_a_field_with_another_number_of_outputs_than_the_mean_is_refused():
    model = vector_gp(draw(40, 2), draw(40, 3), gp_orff.ORFFKernel(curl_free(), RULE), noise=0.1)
    with pytest.raises(ValueError, match=r"mean of shape \(40, 2\).*got \(40, 3\)"):
        evidence(model)


DEGENERATE = {
    "one_point": (draw(1, 2), draw(1, 2, seed=1)),
    "all_points_equal": (torch.zeros(60, 2, dtype=torch.float64), draw(60, 2, seed=1)),
    "constant_outputs": (draw(60, 2), torch.ones(60, 2, dtype=torch.float64)),
    "far_from_the_origin": (1e6 + draw(60, 2), draw(60, 2, seed=1)),
}


@pytest.mark.parametrize("name", DEGENERATE)
def test_degenerate_data_still_give_a_posterior(name):
    x, y = DEGENERATE[name]
    model = vector_gp(x, y, gp_orff.ORFFKernel(curl_free(), RULE), noise=0.1)
    evidence(model).backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
    model.eval()
    posterior = model(x[:1] + 0.1)
    assert posterior.mean.isfinite().all()
    assert (posterior.variance > 0).all()


def test_missing_observations_by_gpytorchs_own_policy():
    """settings.observation_nan_policy leaves the structure, and is right without it."""
    kernel = gp_orff.ORFFKernel(RBFKernel(), RULE, num_dims=2).double()
    x, y = draw(40, 2), draw(40, seed=1)
    holes = nan_at(y, slice(3, 9))
    model = scalar_gp(x, holes, kernel, noise=0.1).eval()
    kept = scalar_gp(torch.cat([x[:3], x[9:]]), torch.cat([y[:3], y[9:]]), kernel, 0.1).eval()
    with gpytorch.settings.observation_nan_policy("mask"):
        torch.testing.assert_close(model(x + 0.1).mean, kept(x + 0.1).mean, rtol=1e-6, atol=1e-6)


def test_either_inputs_of_a_covariance_are_looked_at():
    good, bad = draw(3, 2).float(), nan_at(draw(4, 2).float(), 1, 0)
    for inputs in ((good, bad), (bad, good)):
        with pytest.raises(ValueError, match="expects finite inputs, got 1 points"):
            curl_free()(*inputs).to_dense()
