"""Parts of an `ExactGP` that do not fit its kernel: each message names a remedy that works."""

import pickle
from functools import partial

import gpytorch
import pytest
import torch
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from gpytorch.kernels import (
    LCMKernel,
    MaternKernel,
    MultitaskKernel,
    ProductKernel,
    RBFKernel,
    ScaleKernel,
)
from gpytorch.likelihoods import GaussianLikelihood, MultitaskGaussianLikelihood
from gpytorch.means import ConstantMean, MultitaskMean

import gp_orff
from tests.support.fields import draw
from tests.support.models import evidence

N = 12
X, Y = draw(N, 2), draw(N, 2, seed=1)
KERNELS = {
    "exact": lambda: ScaleKernel(gp_orff.DivergenceFreeKernel(RBFKernel(), num_dims=2)),
    "orff": lambda: gp_orff.ORFFKernel(
        gp_orff.HelmholtzKernel(num_dims=2), gp_orff.MonteCarlo(64, seed=0)
    ),
}
pytestmark = pytest.mark.filterwarnings("ignore::gp_orff.FeatureWarning")


class Model(gpytorch.models.ExactGP):
    """The parts of an ExactGP as they are given."""

    def __init__(self, kernel, y=Y, mean=None, likelihood=None, law=MultitaskMultivariateNormal):
        likelihood = MultitaskGaussianLikelihood(2) if likelihood is None else likelihood
        super().__init__(X, y, likelihood)
        self.mean_module = MultitaskMean(ConstantMean(), 2) if mean is None else mean
        self.covar_module, self.law = kernel, law

    def forward(self, x):
        return self.law(self.mean_module(x), self.covar_module(x))


MISTAKES = {  # arguments, and what the message has
    "likelihood of one output": (
        {"likelihood": GaussianLikelihood()},
        r"got a GaussianLikelihood for 1; use gpytorch\.likelihoods\.(Multitask.*)",
    ),
    "likelihood of three": (
        {"likelihood": MultitaskGaussianLikelihood(3)},
        r"got a MultitaskGaussianLikelihood for 3; use gpytorch\.likelihoods\.(Multitask.*)",
    ),
    "mean of one": (
        {"mean": ConstantMean()},
        r"expected a mean of shape \(12, 2\).*, got \(12,\); use (gpytorch\.means\..*)",
    ),
    "mean of three": (
        {"mean": MultitaskMean(ConstantMean(), 3)},
        r"expected a mean of shape \(12, 2\).*, got \(12, 3\); use (gpytorch\.means\..*)",
    ),
    "all of one output": (
        {"mean": ConstantMean(), "likelihood": GaussianLikelihood(), "law": MultivariateNormal},
        r"a MultitaskMultivariateNormal, got \(12,\); use (gpytorch\.means\..*)",
    ),
    "distribution of one output": (
        {"law": MultivariateNormal},
        r"expected a MultitaskMultivariateNormal.* \(12, 2\), got a MultivariateNormal; return gp",
    ),
    "order by output": (
        {"law": partial(MultitaskMultivariateNormal, interleaved=False)},
        r"expected interleaved=True.* got interleaved=False; omit",
    ),
    "columns as rows": ({"y": Y.mT}, r"targets y of shape \(12, 2\).*, got \(2, 12\); pass (y.mT)"),
    "one component": ({"y": Y[:, 0]}, r"targets y of shape \(12, 2\).*, got \(12,\); pass a row"),
}


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("name", MISTAKES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_parts_that_do_not_fit(kernel, name, mode):
    parts, match = MISTAKES[name]
    model = getattr(Model(KERNELS[kernel](), **parts).double(), mode)()
    with pytest.raises(ValueError, match=match):
        model(X if mode == "train" else X + 0.1)


@pytest.mark.parametrize("kernel", KERNELS)
def test_remedies(kernel):
    """What the messages say gives the evidence of the dense normal density."""
    mean = gpytorch.means.MultitaskMean(gpytorch.means.ConstantMean(), num_tasks=2)
    likelihood = gpytorch.likelihoods.MultitaskGaussianLikelihood(num_tasks=2)
    y = Y.mT.mT
    model = Model(KERNELS[kernel](), y, mean, likelihood).double()
    law = model.likelihood(model(X))
    dense = torch.distributions.MultivariateNormal(law.loc, law.covariance_matrix)
    torch.testing.assert_close(evidence(model), dense.log_prob(y.flatten()))


def test_student_t_noise():
    likelihood, kernel = gp_orff.MultitaskStudentTLikelihood(2), KERNELS["exact"]()
    with pytest.raises(NotImplementedError, match=r"VectorFieldGP\(kernel, likelihood=likelih"):
        Model(kernel, likelihood=likelihood)
    gp_orff.VectorFieldGP(kernel, likelihood=likelihood).fit(X, Y, progress=False)


def test_scalar_kernels_in_models_of_vectors():
    rule = gp_orff.MonteCarlo(16, seed=0)
    scalar = Model(gp_orff.ORFFKernel(RBFKernel(), rule, num_dims=2)).double()
    with pytest.raises(ValueError, match=r"MultitaskKernel\(kernel, num_tasks=2\)"):
        scalar(X)
    field = gp_orff.DivergenceFreeKernel(num_dims=2)
    with pytest.raises(ValueError, match=r"got \[1, 2\]; wrap scalar kernels in gpyt.*num_tasks=2"):
        Model(RBFKernel() + field).double()(X)
    vectors = MultitaskKernel(RBFKernel(), num_tasks=2)
    assert evidence(Model(gp_orff.ORFFKernel(vectors, rule, num_dims=2)).double()).isfinite()
    assert evidence(Model(vectors + field).double()).isfinite()


def test_models_that_are_sound():
    """Flattened targets; one output; one component of a field; other models than ours."""
    flat = Model(KERNELS["exact"](), Y.flatten()).double()
    torch.testing.assert_close(evidence(flat), evidence(Model(KERNELS["exact"]()).double()))

    one = {"mean": ConstantMean(), "likelihood": GaussianLikelihood(), "law": MultivariateNormal}
    scalar = gp_orff.ORFFKernel(MaternKernel(), gp_orff.MonteCarlo(16, seed=0), num_dims=2)
    assert evidence(Model(scalar, Y[:, 0], **one).double()).isfinite()

    class Eastward(Model):
        def forward(self, x):
            return MultivariateNormal(self.mean_module(x), self.covar_module(x)[..., ::2, ::2])

    assert evidence(Eastward(KERNELS["exact"](), Y[:, 0], **one).double()).isfinite()

    with gpytorch.settings.debug(False):  # a part of the data
        Model(KERNELS["exact"]()).double()(X[:5])
    one["likelihood"] = GaussianLikelihood()
    model = Model(RBFKernel(), Y[:, 0], **one).double()
    with pytest.raises(RuntimeError, match="train on the training inputs"):
        model(X[:5])


# Lengthscales of kernels inside.


@pytest.mark.parametrize(
    ("build", "path"),
    [
        (lambda: gp_orff.DivergenceFreeKernel(num_dims=2), "base_kernel"),
        (lambda: gp_orff.CurlFreeKernel(RBFKernel(ard_num_dims=2), num_dims=2), "base_kernel"),
        (lambda: gp_orff.SeparableKernel(RBFKernel(), torch.eye(2)), "base_kernel"),
        (
            lambda: gp_orff.ORFFKernel(KERNELS["exact"](), gp_orff.MonteCarlo(8)),
            "base_kernel.base_kernel.base_kernel",
        ),
    ],
)
def test_the_lengthscale_is_that_of_the_one_kernel_inside(build, path):
    kernel = build()
    inner = kernel.get_submodule(path)
    assert not kernel.has_lengthscale
    for value in (0.3, torch.linspace(0.2, 0.4, inner.lengthscale.shape[-1])):
        kernel.lengthscale = value
        assert torch.equal(kernel.lengthscale, inner.lengthscale)
        wanted = torch.as_tensor(value).expand(1, inner.lengthscale.shape[-1])
        torch.testing.assert_close(inner.lengthscale.detach(), wanted)
    kernel.initialize(lengthscale=0.6)
    torch.testing.assert_close(inner.lengthscale.mean().item(), 0.6)


@pytest.mark.parametrize(
    ("build", "paths"),
    [
        (
            lambda: gp_orff.HelmholtzKernel(num_dims=2),
            [f"kernel.kernels[{i}].base_kernel.base_kernel.lengthscale" for i in (0, 1)],
        ),
        (
            lambda: KERNELS["exact"]().base_kernel * RBFKernel(active_dims=(0,)),
            ["kernel.field_kernel.base_kernel.lengthscale", "kernel.scalar_kernel.lengthscale"],
        ),
    ],
)
def test_lengthscales_of_several_kernels_inside(build, paths):
    kernel = build()
    assert kernel.lengthscale is None
    with pytest.raises(RuntimeError, match=r"one lengthscale, got .* with 2") as caught:
        kernel.lengthscale = 0.3
    assert str(caught.value).endswith(f"; set {' and '.join(paths)}")
    for path in paths:
        exec(f"{path} = 0.3")
        torch.testing.assert_close(eval(path).item(), 0.3)


def test_parameters_of_kernels_without_lengthscales():
    kernel = gp_orff.HarmonicKernel()
    with pytest.raises(RuntimeError, match=r"its parameters are .*depth") as caught:
        kernel.initialize(lengthscale=0.3)
    assert "raw_" not in str(caught.value)


# Kernels whose matrices have different sizes, and NaN.


FIELD = gp_orff.CurlFreeKernel(num_dims=2)
KERNEL_MISTAKES = {
    "a field of tasks": (
        lambda: MultitaskKernel(FIELD, num_tasks=2),
        "scalar kernel in a MultitaskKernel, got a CurlFreeKernel with 2 outputs",
    ),
    "a scaled field of tasks": (
        lambda: ScaleKernel(MultitaskKernel(ScaleKernel(FIELD), num_tasks=2)),
        "got a ScaleKernel with 2 outputs",
    ),
    "fields of regionalisation": (
        lambda: LCMKernel([FIELD], num_tasks=2),
        "scalar kernel in a MultitaskKernel, got a CurlFreeKernel",
    ),
    "a field and three outputs": (
        lambda: FIELD + MultitaskKernel(RBFKernel(), num_tasks=3),
        r"got \[2, 3\]",
    ),
    "a scalar and a field": (lambda: RBFKernel() + FIELD, r"got \[1, 2\]; wrap scalar"),
    "a product of gpytorch": (
        lambda: ProductKernel(FIELD, RBFKernel()),
        r"got gpytorch's ProductKernel.*FieldProductKernel\(field_kernel, scalar_kernel\)",
    ),
}


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("name", KERNEL_MISTAKES)
def test_kernels_of_different_sizes(name, mode):
    build, match = KERNEL_MISTAKES[name]
    model = getattr(Model(build()).double(), mode)()
    with pytest.raises(ValueError, match=match):
        model(X if mode == "train" else X + 0.1)


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_targets_that_are_not_finite(kernel, mode):
    y = Y.clone()
    y[3, 0], y[4, 1] = torch.nan, torch.inf
    model = getattr(Model(KERNELS[kernel](), y).double(), mode)()
    with pytest.raises(ValueError, match=r"got 2 NaN or infinite.*nan_policy"):
        model(X if mode == "train" else X + 0.1)
    y[4, 1] = torch.nan
    model = getattr(Model(KERNELS[kernel](), y).double(), mode)()
    with gpytorch.settings.observation_nan_policy("mask"):
        assert model(X if mode == "train" else X + 0.1).mean.isfinite().all()


def test_constructors_have_the_names_of_public_classes():
    for name in gp_orff.__all__:
        kind = getattr(gp_orff, name)
        if isinstance(kind, type) and kind.__module__.startswith("gp_orff"):
            own = kind.__init__.__qualname__.split(".")[0]
            assert own in (name, "object") or issubclass(kind, Warning), name
    with pytest.raises(TypeError, match=r"^DivergenceFreeKernel\.__init__\(\) missing 1 required"):
        gp_orff.DivergenceFreeKernel()
    with pytest.raises(TypeError, match=r"^QuasiMonteCarlo\.__init__\(\) missing 1 required"):
        gp_orff.QuasiMonteCarlo()
    kernel = pickle.loads(pickle.dumps(gp_orff.CurlFreeKernel(RBFKernel(), num_dims=3)))
    assert kernel.num_dims == 3
    assert gp_orff.Fastfood(8, seed=2) == gp_orff.Fastfood(8, seed=2)
    with pytest.raises(
        ValueError, match=r"^a kernel of vectors needs a scalar base kernel, got one"
    ):
        gp_orff.VectorFieldGP(MultitaskKernel(FIELD, num_tasks=2))
