"""The two learned spectra of a HelmholtzKernel: one curve, and a difference."""

import copy
import math
import pickle

import pytest
import torch
from gpytorch.kernels import RBFKernel, ScaleKernel

import gp_orff
from gp_orff.kernels.base import related_copy
from gp_orff.kernels.learned import RelatedSpectrumKernel
from tests.support.fields import draw, uniform


def helmholtz(batch=(), **options):
    base = gp_orff.LearnedSpectrumKernel(6, batch_shape=torch.Size(batch), **options)
    kernel = gp_orff.HelmholtzKernel(base, num_dims=2).double()
    for number, own in enumerate(spectra(kernel)):
        own.shape.data = 0.5 * draw(*own.shape.shape, seed=number)
    return kernel


def spectra(kernel):
    return [part.base_kernel.base_kernel for part in kernel.kernels]


def test_the_second_curve_is_the_first_plus_half_a_curve():
    """Half the standard deviations of a `LearnedSpectrumKernel` with the same `shape`."""
    first, second = spectra(helmholtz())
    alone = gp_orff.LearnedSpectrumKernel(6).double()
    start = alone.log_weights
    alone.shape.data = second.shape.data
    expected = first.log_weights + 0.5 * (alone.log_weights - start)
    assert torch.allclose(second.weights, expected.softmax(-1), rtol=1e-12)
    first.lengthscale = 0.37
    assert second.lengthscale.item() == pytest.approx(0.37)
    second.lengthscale = 0.2
    assert first.lengthscale.item() == pytest.approx(0.2)


def test_gradients_reach_the_first_curve_through_the_second():
    kernel = helmholtz()
    first, second = spectra(kernel)
    kernel.divergence_free(uniform(3, 2)).to_dense().sum().backward()
    assert all(p.grad.abs().max() > 0 for p in (first.shape, first.raw_lengthscale, second.shape))


def test_parameters_are_counted_once():
    names = [name for name, _ in helmholtz().named_parameters(remove_duplicate=False)]
    assert len(names) == 5
    assert sum("lengthscale" in name for name in names) == 1


def test_levels_have_a_prior():
    """log(σ₂²/σ₁²) ~ N(0, 3²), which can be sampled; other base kernels have none."""
    kernel = helmholtz()
    kernel.curl_free.outputscale, kernel.divergence_free.outputscale = 0.5, 4.0
    (found,) = [
        (prior, closure(owner))
        for name, owner, prior, closure, _ in kernel.named_priors()
        if name == "level_prior"
    ]
    assert found[1].item() == pytest.approx(math.log(8))
    assert (found[0].loc.item(), found[0].scale.item()) == (0.0, 3.0)
    kernel.sample_from_prior("level_prior")
    assert kernel.curl_free.outputscale.item() == pytest.approx(0.5)
    assert kernel.divergence_free.outputscale.item() != pytest.approx(4.0)
    assert not list(gp_orff.HelmholtzKernel(RBFKernel(), num_dims=2).named_priors())


@pytest.mark.parametrize("again", [copy.deepcopy, lambda k: pickle.loads(pickle.dumps(k))])
def test_copies_share_among_themselves(again):
    kernel = helmholtz()
    twin, x = again(kernel), uniform(3, 2)
    first, second = spectra(twin)
    assert second.other is first
    assert torch.equal(twin(x).to_dense(), kernel(x).to_dense())
    spectra(kernel)[0].shape.data += 1.0
    assert not torch.equal(twin(x).to_dense(), kernel(x).to_dense())


def test_batches_are_indexed_and_expanded():
    x = uniform(3, 2)
    batch = helmholtz((2,))
    whole = batch(x).to_dense()
    for number in range(2):
        assert torch.allclose(batch[number](x).to_dense(), whole[number], atol=1e-13)
    one = spectra(helmholtz())[1]
    expanded = one.expand_batch(torch.Size([2]))(x).to_dense()
    assert expanded.shape == (2, 3, 3)
    assert torch.allclose(expanded, one(x).to_dense().expand(2, 3, 3), atol=1e-13)


def test_learned_spectra_anywhere_in_a_base_kernel():
    base = ScaleKernel(gp_orff.LearnedSpectrumKernel(5)) + RBFKernel()
    base.kernels[0].base_kernel.shape.requires_grad_(False)
    copied = related_copy(base)
    related = copied.kernels[0].base_kernel
    assert isinstance(related, RelatedSpectrumKernel)
    assert related.other is base.kernels[0].base_kernel
    assert not related.shape.requires_grad
    assert type(copied.kernels[1]) is RBFKernel
    assert copied.kernels[1] is not base.kernels[1]
    x = uniform(4, 2)
    assert torch.allclose(copied(x).to_dense(), base(x).to_dense())


def test_it_is_fitted_saved_and_converted(tmp_path):
    """In single precision too; equal after loading, and the second part follows the first."""
    x = uniform(30, 2)
    y = torch.cos(5 * x) + 0.1 * draw(30, 2)
    kernel = gp_orff.HelmholtzKernel(gp_orff.LearnedSpectrumKernel(5), num_dims=2)
    model = gp_orff.VectorFieldGP(kernel).condition(x.float(), y.float())
    names = list(model.report.hyperparameters)
    assert names.count("lengthscale") == 1
    assert {"curl_free.shape", "divergence_free.shape"} <= set(names)
    spectra(kernel)[0].shape.data[0] = 0.4
    model.save(tmp_path / "model.pt")
    again = gp_orff.VectorFieldGP.load(tmp_path / "model.pt")
    first, second = spectra(again.kernel)
    assert second.other is first
    assert torch.equal(again.posterior().mean(x), model.posterior().mean(x))


def test_weights_change_with_those_of_the_other_curve():
    first = gp_orff.LearnedSpectrumKernel(5)
    second = RelatedSpectrumKernel(first)
    second.shape.requires_grad_(False)
    assert second.is_trained
    first.shape.requires_grad_(False)
    assert not second.is_trained
