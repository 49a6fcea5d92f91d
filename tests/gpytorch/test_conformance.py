"""`BaseKernelTestCase` of gpytorch for the kernels of the registry, exact and in `ORFFKernel`."""

import unittest
from functools import partial

import pytest
import torch
from gpytorch.kernels import MaternKernel, MultitaskKernel, RBFKernel, ScaleKernel
from gpytorch.test.base_kernel_test_case import BaseKernelTestCase
from torch import nn

import gp_orff
from tests.support.registry import (
    FIELDS,
    RULES,
    SMOOTH,
    SPECTRA,
    STRUCTURED_RULES,
    TRAINED_DENSITY,
    UNKNOWN_DENSITY,
)

pytestmark = pytest.mark.filterwarnings("ignore::gp_orff.FeatureWarning")
METHODS = [name for name in dir(BaseKernelTestCase) if name.startswith("test_")]
INPUTS = {"test_active_dims_list": 4, "test_active_dims_range": 6}  # two in the other tests
OF_TWO = [name for name in METHODS if name not in INPUTS]
COLUMNS = 10  # of the points, of which active_dims select as many
ROOT = torch.tensor([[1.0, 0.2], [0.5, -0.7], [0.1, 0.4]])
NO_BATCH = torch.Size([])


def amplitude(omega):
    return omega.unsqueeze(-1)


def field(cls, scalar=RBFKernel):
    def build(d, active_dims=None, **kwargs):
        return cls(scalar(**kwargs), num_dims=d, active_dims=active_dims)

    return build


def separable(d, active_dims=None, root=ROOT, **kwargs):
    return gp_orff.SeparableKernel(RBFKernel(**kwargs), root, active_dims=active_dims)


def trained_root(d, **kwargs):
    return separable(d, root=nn.Parameter(ROOT.clone()), **kwargs)


def multitask(d, active_dims=None, **kwargs):
    """Without a batch shape of its own, which gpytorch repeats."""
    kernel = MultitaskKernel(RBFKernel(**kwargs), num_tasks=3, rank=2, active_dims=active_dims)
    return kernel.initialize(
        **{"task_covar_module.covar_factor": ROOT.clone(), "task_covar_module.var": torch.ones(3)}
    )


def spectral_matrix(d, active_dims=None, **kwargs):
    own = {"num_outputs": d, "num_dims": d, "active_dims": active_dims}
    return gp_orff.SpectralMatrixKernel(RBFKernel(**kwargs), amplitude, **own)


def product(d, active_dims=None, ard_num_dims=None, **kwargs):
    own = field(gp_orff.CurlFreeKernel)(d, active_dims, ard_num_dims=ard_num_dims, **kwargs)
    return own * MaternKernel(nu=1.5, active_dims=active_dims, **kwargs)


def scaled(d, batch_shape=NO_BATCH, **kwargs):
    own = field(gp_orff.DivergenceFreeKernel)(d, batch_shape=batch_shape, **kwargs)
    return ScaleKernel(own, batch_shape=batch_shape)


def dot_product(d, ard_num_dims=None, batch_shape=NO_BATCH, **kwargs):
    coefficients = torch.tensor([1.0, 0.5, 0.2]).expand(*batch_shape, 3)
    return gp_orff.DotProductKernel(coefficients, **kwargs)


def scalar(make):
    return lambda d, **kwargs: make(**kwargs)


FIELD_KERNELS = {
    **{name: field(cls) for name, (cls, *_) in FIELDS.items()},
    **{f"curl_free_{name}": field(gp_orff.CurlFreeKernel, SPECTRA[name]) for name in SMOOTH[1:]},
    "helmholtz": field(gp_orff.HelmholtzKernel),
    "product": product,
    "scaled": scaled,
    "spectral_matrix": spectral_matrix,
}
OTHERS = {
    "separable": separable,
    "trained_root": trained_root,
    "matern_general": scalar(SPECTRA["matern_general"]),
    "dot_product": dot_product,
}
GPYTORCHS = {  # their exact kernels are not ours
    **{name: scalar(SPECTRA[name]) for name in ("rbf", "matern12", "matern32", "matern52", "rq")},
    "multitask": multitask,
}
LEARNED = {name: scalar(make) for name, make in TRAINED_DENSITY.items()}
BESSEL = {
    name: lambda d, make=make, **kwargs: make(num_dims=d, **kwargs)
    for name, make in UNKNOWN_DENSITY.items()
}
EXACT = {**FIELD_KERNELS, **OTHERS, **LEARNED, **BESSEL}
IN_FEATURES = {**FIELD_KERNELS, **OTHERS, **GPYTORCHS, **BESSEL}

OF_GPYTORCH = {("multitask", "test_kernel_getitem_broadcast")}  # fails in its kernels already


def conform(method, kernel, columns=2):
    """Run a test of gpytorch's with kernels from `kernel(d, **kwargs)`, on points in a cube."""

    class Case(BaseKernelTestCase, unittest.TestCase):
        def create_kernel_no_ard(self, **kwargs):
            return kernel(INPUTS.get(method, columns), **kwargs)

        def create_kernel_ard(self, num_dims, **kwargs):
            return kernel(num_dims, ard_num_dims=num_dims, **kwargs)

        def create_data_single_batch(self):
            return torch.rand(2, 3, columns)

        def create_data_double_batch(self):
            return torch.rand(3, 2, 50, columns)

    result = Case(method).run()
    assert result.wasSuccessful(), "".join(text for _, text in result.errors + result.failures)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", [name for name in EXACT if name != "spectral_matrix"])
def test_exact_kernels(name, method):
    conform(method, EXACT[name])


@pytest.mark.slow
@pytest.mark.parametrize("method", OF_TWO)
def test_exact_spectral_matrix(method):
    conform(method, spectral_matrix)


@pytest.mark.parametrize("method", [name for name in OF_TWO if not name.endswith("_ard")])
def test_harmonic_kernel(method):
    kernel = partial(gp_orff.HarmonicKernel, reference_height=-1.0)
    conform(method, lambda d, **kwargs: kernel(**kwargs), columns=3)


@pytest.mark.parametrize("method", INPUTS)
def test_spectral_matrices_of_many_inputs_say_what_to_do(method):
    with pytest.raises(AssertionError, match="put it inside ORFFKernel"):
        conform(method, spectral_matrix)


def in_features(name, rule):
    def build(d, active_dims=None, **kwargs):
        inside = {**IN_FEATURES, **LEARNED}[name](d, active_dims=active_dims, **kwargs)
        columns = d if active_dims is None else COLUMNS
        of_others = {} if name in (*FIELD_KERNELS, *BESSEL) else {"num_dims": columns}
        return gp_orff.ORFFKernel(inside, rule, **of_others)

    return build


CASES = [(n, m) for n in IN_FEATURES for m in METHODS if (n, m) not in OF_GPYTORCH]


@pytest.mark.parametrize(("name", "method"), CASES)
def test_in_features(name, method):
    conform(method, in_features(name, gp_orff.MonteCarlo(16, seed=0)))


BOTH = "curl_free", "separable"
RULED = {  # rules with their kernels, on any number of inputs, and on two
    **{name: (make(16), BOTH) for name, make in RULES.items()},
    **{name: (make(16), BOTH[1:]) for name, make in STRUCTURED_RULES.items()},
}
RULED_OF_TWO = {
    "grid": (gp_orff.Grid(((0.0, 1.0),) * 2, max_features=200), (*BOTH, "learned")),
    "gauss_hermite": (gp_orff.GaussHermite(8), BOTH),
}
CASES_OF_RULES = [
    (rule, name, method)
    for ruled, methods in ((RULED, METHODS), (RULED_OF_TWO, OF_TWO))
    for rule, (_, names) in ruled.items()
    for name in names
    for method in methods
]


@pytest.mark.slow
@pytest.mark.parametrize(("rule", "name", "method"), CASES_OF_RULES)
def test_rules(rule, name, method):
    conform(method, in_features(name, {**RULED, **RULED_OF_TWO}[rule][0]))
