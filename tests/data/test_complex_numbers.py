"""Complex numbers raise an error, because a conversion would discard their imaginary parts."""

import numpy as np
import pytest
import torch
from gpytorch.kernels import RBFKernel

import gp_orff
from tests.support.models import vector_gp

X = torch.rand(20, 2, generator=torch.Generator().manual_seed(0)).double()
Y = torch.rand(20, 2, generator=torch.Generator().manual_seed(1)).double()
VELOCITY = torch.view_as_complex(Y)  # u + iv


def spectral(amplitude, **options):
    return gp_orff.SpectralMatrixKernel(
        RBFKernel(), amplitude, num_outputs=2, num_dims=1, **options
    )


def with_root_assigned():
    kernel = gp_orff.SeparableKernel(RBFKernel(), torch.ones(2, 1))
    kernel.root = torch.ones(2, 1) + 1j
    return kernel(torch.rand(3, 1)).to_dense()


def with_complex_sampler():
    def sampler(u):
        return torch.special.ndtri(u) + 1j, torch.zeros(len(u))

    kernel = spectral(lambda omega: torch.ones(len(omega), 2, 1), sampler=sampler)
    return gp_orff.ORFFKernel(kernel, gp_orff.MonteCarlo(8)).features(torch.rand(2, 1))


def signature(lag):
    decay = torch.exp(-lag.square())[..., None]
    return decay * torch.tensor([[1, 0.2j], [-0.2j, 1]], dtype=torch.complex128)


def field():
    return gp_orff.VectorFieldGP(gp_orff.HelmholtzKernel(num_dims=2))


def set_attribute(owner, name, value):
    setattr(owner, name, value)


CALLS = {
    "signature": lambda: gp_orff.SpectralMatrixKernel.from_signature(signature, [(0, 1)]),
    "sampler": with_complex_sampler,
    "root": lambda: gp_orff.SeparableKernel(RBFKernel(), torch.ones(2, 1) + 1j),
    "root assigned later": with_root_assigned,
    "coefficients": lambda: gp_orff.DotProductKernel([1.0, 1j]),
    "depths": lambda: set_attribute(gp_orff.HarmonicKernel(), "depths", torch.tensor([1 + 1j])),
    "reference height": lambda: gp_orff.HarmonicKernel(1, reference_height=torch.tensor(1j)),
    "velocities u + iv": lambda: field().condition(X, VELOCITY),
    "velocities of numpy": lambda: field().fit(X.numpy(), VELOCITY.numpy(), progress=False),
    "positions x + iy": lambda: field().condition(VELOCITY, Y),
    "chunks": lambda: field().fit([{"x": X, "y": VELOCITY.numpy()}], progress=False),
    "masked": lambda: field().condition(X, np.ma.masked_array(VELOCITY.numpy()), missing="mask"),
    "noise": lambda: field().condition(X, Y, noise=torch.ones(20) + 1j),
    "variances": lambda: field().condition(X, Y, variances=np.ones(20) + 1j),
    "noise of a symbol": lambda: (
        field()
        .condition(X, Y)
        .observe(X[:2], torch.ones(2, 1), gp_orff.Divergence(), noise=torch.tensor([0.1 + 1j]))
    ),
    "places": lambda: field().condition(X, Y).posterior().mean(X + 1j),
    "component": lambda: gp_orff.Component(torch.tensor([1, 1j])),
    "degrees of freedom": lambda: set_attribute(
        gp_orff.MultitaskStudentTLikelihood(2), "deg_free", torch.tensor(4 + 1j)
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_complex_numbers_raise(name):
    with pytest.raises(TypeError, match=r"real number|float32 or float64 inputs"):
        CALLS[name]()


def test_the_remedy_for_velocities_works():
    with pytest.raises(TypeError, match=r"torch\.view_as_real\(values\)"):
        field().condition(X, VELOCITY)
    model = field().condition(X, torch.view_as_real(VELOCITY))
    wanted = field().condition(X, Y).posterior().mean(X)
    torch.testing.assert_close(model.posterior().mean(X), wanted)


@pytest.mark.parametrize("features", [False, True])
def test_predictions_of_an_exact_gp_refuse_complex_targets(features):
    kernel = gp_orff.HelmholtzKernel(num_dims=2).double()
    kernel = gp_orff.ORFFKernel(kernel, gp_orff.MonteCarlo(8)) if features else kernel
    model = vector_gp(X, Y, kernel, 0.1).eval()
    model.set_train_data(X, Y + 1j, strict=False)
    with pytest.raises(TypeError, match="expected real numbers for the targets"):
        model(X[:2])
    with pytest.raises(TypeError, match="expected real numbers for the targets"):
        gp_orff.FieldPosterior.from_exact_gp(model)
