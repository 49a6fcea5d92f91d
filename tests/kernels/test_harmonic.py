"""`HarmonicKernel`: covariances against derivatives of 1/R, constraints of its fields, models."""

import gpytorch
import magpylib
import numpy as np
import pytest
import torch
from scipy.spatial.transform import Rotation
from torch.autograd.functional import hessian, jacobian

import gp_orff
from gp_orff.fitting.starting_values import rescale
from gp_orff.kernels.derivatives import SymbolCovariance
from gp_orff.symbols.base import Identity
from tests.support.harmonic import SOURCES, harmonic, points


def potential(kernel, sources):
    """Cov[V(a), V(b)] by its definition, at two points."""
    names = {"below": ["below"], "above": ["above"], "both": ["below", "above"]}[sources]
    depths, variances = (v.detach().chunk(len(names)) for v in (kernel.depths, kernel.variances))

    def covariance(a, b):
        total = 0.0
        for name, hs, vs in zip(names, depths, variances, strict=True):
            for h, v in zip(hs, vs, strict=True):
                plane = -h if name == "below" else 1 + h
                z = (a[2] - plane).abs() + (b[2] - plane).abs()
                amplitude = v * 3 / 4 * (2 * (0.5 - plane).abs()) ** 3
                r = (a - b)[:2].square().sum()
                total = total + amplitude / (r + z**2).sqrt()
        return total

    return covariance


@pytest.mark.parametrize("sources", SOURCES)
def test_the_covariance_is_that_of_the_gradient_of_a_potential(sources):
    kernel, x, z = harmonic(sources), points(4), points(3, seed=1)
    between = potential(kernel, sources)
    blocks = [[hessian(between, (a, b))[0][1] for b in z] for a in x]
    expected = torch.cat([torch.cat(row, dim=1) for row in blocks])
    assert torch.allclose(kernel(x, z).to_dense(), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("sources", SOURCES)
def test_fields_are_harmonic(sources):
    """Laplace's equation by automatic differentiation; curl and divergence are zero."""
    kernel, (x, z) = harmonic(sources), points(2)
    between = potential(kernel, sources)
    laplacian = hessian(lambda a: between(a, z), x).trace()
    assert abs(laplacian) < 1e-8
    (slopes,) = jacobian(lambda a: kernel(a[None], z[None]).to_dense(), (x,))
    assert torch.allclose(slopes, slopes.transpose(0, 2), atol=1e-12)  # the curl of every column
    assert slopes.diagonal(dim1=0, dim2=2).sum(-1).abs().max() < 1e-12


@pytest.mark.parametrize("sources", SOURCES)
def test_positive_definite(sources):
    matrix = harmonic(sources)(points(30)).to_dense()
    assert torch.linalg.eigvalsh(matrix)[0] > 0
    assert torch.allclose(matrix, matrix.mT, rtol=0, atol=1e-13)


def test_variances_are_those_of_a_component_at_the_mean_height():
    kernel = harmonic("both")
    x = torch.tensor([[3.0, 4.0, 0.5]], dtype=torch.float64)
    assert torch.isclose(kernel(x, diag=True).mean(), kernel.variances.sum(), rtol=1e-12)


def test_gpytorch_conventions():
    """Diagonals, batches, indexing, active_dims, ScaleKernel, state_dict and types."""
    kernel, x = harmonic(), points(5)
    matrix = kernel(x).to_dense()
    assert torch.allclose(kernel(x, diag=True), matrix.diagonal(), rtol=1e-12)
    assert torch.allclose(kernel(x)[3:6, :6].to_dense(), matrix[3:6, :6])
    batch = gp_orff.HarmonicKernel(
        2, reference_height=0.0, mean_height=0.5, batch_shape=torch.Size([2])
    ).double()
    batch.depths = torch.stack([kernel.depths, 2 * kernel.depths]).detach()
    batch.variances = torch.stack([kernel.variances, kernel.variances]).detach()
    assert torch.allclose(batch(x).to_dense()[0], matrix)
    assert torch.allclose(batch[0](x).to_dense(), matrix)
    assert torch.allclose(batch[1](x).to_dense(), batch(x).to_dense()[1])
    turned = harmonic(active_dims=(2, 0, 1))
    assert torch.allclose(turned(x[:, [1, 2, 0]]).to_dense(), matrix)
    scaled = gpytorch.kernels.ScaleKernel(kernel).double()
    scaled.outputscale = 2.0
    assert torch.allclose(scaled(x).to_dense(), 2 * matrix, rtol=1e-6)
    other = gp_orff.HarmonicKernel(2).double()
    other.load_state_dict(kernel.state_dict())
    assert torch.equal(other(x).to_dense(), matrix)
    single = harmonic().float()(x.float()).to_dense()
    assert single.dtype == torch.float32
    assert torch.allclose(single.double(), matrix, rtol=1e-4, atol=1e-4)


def test_gradients_of_the_hyperparameters():
    """Against central differences, of a random projection of the matrix."""
    kernel, x = harmonic("both", 1), points(3)
    weights = torch.randn(9, 9, generator=torch.Generator().manual_seed(0)).double()

    def total():
        return (weights * kernel(x).to_dense()).sum()

    total().backward()
    for parameter in (kernel.raw_depths, kernel.raw_variances):
        for i in range(2):
            values = []
            for step in (1e-5, -1e-5):
                parameter.data[i] += step
                values.append(total().item())
                parameter.data[i] -= step
            difference = (values[0] - values[1]) / 2e-5
            assert parameter.grad[i].item() == pytest.approx(difference, rel=1e-7, abs=1e-7)


SYMBOLS = {
    "identity": Identity(),
    "jacobian": gp_orff.Jacobian(),
    "potential": gp_orff.Potential(),
    "component": gp_orff.Component([0.6, 0.0, 0.8]),
    "divergence": gp_orff.Divergence(),
    "curl": gp_orff.Curl(),
}


@pytest.mark.parametrize("name", SYMBOLS)
def test_covariances_of_symbols(name):
    """Against derivatives of the covariance of −V, which has the gradient f."""
    kernel, x, z = harmonic("both"), points(2), points(2, seed=1)
    symbol, between = SYMBOLS[name], potential(kernel, "both")

    def field(a, b):
        return jacobian(lambda p: between(a, p), b, create_graph=True)  # Cov[V(a), V′(b)]

    def image(a, b):
        if name == "potential":
            return field(a, b)[None]
        f = jacobian(lambda p: field(p, b), a, create_graph=True).mT  # (f of a, f of b)
        if name == "identity":
            return f
        if name == "component":
            return (f.new_tensor([0.6, 0.0, 0.8]) @ f)[None]
        slopes = jacobian(lambda p: jacobian(lambda q: field(q, b), p, create_graph=True).mT, a)
        if name == "jacobian":
            return slopes.transpose(1, 2).reshape(9, 3)  # (i, l, j) → (i, j, l)
        return torch.zeros(symbol.num_outputs(3), 3)

    covariance = SymbolCovariance(kernel, symbol, Identity(), (0, 1, 2))
    expected = torch.cat([torch.cat([image(a, b) for b in z], dim=1) for a in x])
    assert torch.allclose(covariance(x, z), expected.to(x), rtol=1e-9, atol=1e-9)


def test_a_model_of_few_readings():
    """Exact inference by hand; continuation and symbols of its posterior."""
    x, z = points(20), points(5, seed=1, low=0.2, high=2.0)
    y = torch.stack([x[:, 0], -x[:, 1], x[:, 2]], dim=-1)
    kernel = harmonic()
    model = gp_orff.VectorFieldGP(kernel, mean=gpytorch.means.ZeroMean())
    model.likelihood.noise = 0.01
    field = model.condition(x, y).posterior()
    matrix = kernel(x).to_dense() + 0.01 * torch.eye(60)
    cross, prior = kernel(z, x).to_dense(), kernel(z).to_dense()
    mean = cross @ torch.linalg.solve(matrix, y.flatten())
    variance = (prior - cross @ torch.linalg.solve(matrix, cross.mT)).diagonal()
    assert torch.allclose(field.mean(z).flatten(), mean, atol=1e-8)
    assert torch.allclose(field.variance(z).flatten(), variance, atol=1e-8)
    curl, divergence = gp_orff.Curl(), gp_orff.Divergence()
    for symbol in (curl, divergence):
        assert field.mean(z, symbol).abs().max() == 0
        assert field.variance(z, symbol).abs().max() == 0
    slopes = jacobian(lambda p: field.mean(p[None])[0], z[0])
    assert torch.allclose(field.mean(z[:1], gp_orff.Jacobian()).reshape(3, 3), slopes, atol=1e-8)
    g = gp_orff.Potential(reference=torch.zeros(3))
    up = jacobian(lambda p: field.mean(p[None], g)[0, 0], z[0])
    assert torch.allclose(up, field.mean(z[:1])[0], atol=1e-8)


def test_heights_come_from_the_readings_and_are_saved(tmp_path):
    x = points(30) + torch.tensor([0.0, 0.0, 100.0])
    y = torch.stack([x[:, 0], -x[:, 1], 0 * x[:, 2]], dim=-1)
    kernel = gp_orff.HarmonicKernel(num_depths=1)
    model = gp_orff.VectorFieldGP(kernel).condition(x, y)
    assert kernel.reference_height == pytest.approx(x[:, 2].min().item())
    assert kernel.mean_height == pytest.approx(x[:, 2].mean().item())
    model.save(tmp_path / "field.pt")
    loaded = gp_orff.VectorFieldGP.load(tmp_path / "field.pt")
    assert torch.equal(loaded.posterior().mean(x), model.posterior().mean(x))
    model.update(x[:3] - torch.tensor([0.0, 0.0, 0.3]), y[:3])  # above the sources
    assert kernel.reference_height == pytest.approx(x[:, 2].min().item())
    with pytest.raises(ValueError, match="above its sources"):
        model.update(x[:3] - torch.tensor([0.0, 0.0, 10.0]), y[:3])


def test_bad_input():
    make = gp_orff.HarmonicKernel
    with pytest.raises(ValueError, match='"below", "above" or "both", got \'left\''):
        make(sources="left")
    with pytest.raises(ValueError, match="positive integer, got 0"):
        make(0)
    with pytest.raises(ValueError, match="a pair"):
        make(sources="both", reference_height=1.0)
    with pytest.raises(ValueError, match="between the sources and mean_height"):
        make(reference_height=1.0, mean_height=0.0)
    with pytest.raises(ValueError, match="together with a reference_height"):
        make(mean_height=0.0)
    with pytest.raises(ValueError, match="pass reference_height="):
        make()(points(3).float()).to_dense()
    for sources, side in (("below", -5.0), ("above", 5.0)):
        with pytest.raises(ValueError, match=r"its sources, which reach (up|down) to height"):
            harmonic(sources)(points(3) + torch.tensor([0.0, 0.0, side])).to_dense()
    with pytest.raises(ValueError, match="3 columns, got 2"):
        harmonic()(points(3)[:, :2]).to_dense()


@pytest.mark.slow
def test_the_field_of_magnetised_blocks_is_continued_upward():
    """Blocks of magpylib under ground, whose field is a closed form of its own."""
    random = np.random.default_rng(1)
    blocks = magpylib.Collection(
        *(
            magpylib.magnet.Cuboid(
                magnetization=random.normal(size=3),
                dimension=random.uniform(0.3, 2.0, 3),
                position=[*random.uniform(-6, 6, 2), -random.uniform(1.5, 3.0)],
                orientation=Rotation.from_rotvec([0, 0, angle]),
            )
            for angle in random.uniform(0, np.pi, 25)
        )
    )
    x = np.stack(np.meshgrid(np.linspace(-5, 5, 11), np.linspace(-5, 5, 21)), -1).reshape(-1, 2)
    x = np.c_[x, 0.3 + 0.05 * np.sin(x[:, 0] + x[:, 1])]
    y = blocks.getB(x)
    size = y.std()
    y = y / size + 0.02 * random.normal(size=y.shape)
    model = gp_orff.VectorFieldGP(gp_orff.HarmonicKernel(num_depths=1))
    field = model.fit(x, y, progress=False).posterior()
    for height in (0.4, 1.0, 2.0):  # in a field of which the noise is 2 %
        z = torch.from_numpy(np.c_[random.uniform(-3, 3, (100, 2)), np.full(100, height)])
        truth = torch.from_numpy(blocks.getB(z.numpy()) / size)
        error = field.mean(z) - truth
        assert error.norm() < 0.03 * truth.norm()
        inside = error.square() <= 1.96**2 * field.variance(z)
        assert inside.double().mean() > 0.75  # errors within a depth are alike: few are independent


def test_total_field_of_dipoles_is_continued_upward():
    """One component of the field of dipoles, read along lines, tells all three far above; a kernel
    that is only curl-free has errors of about 1 there."""
    random = np.random.default_rng(0)
    places = np.c_[random.uniform(-8, 8, (40, 2)), -random.uniform(0.5, 3.0, 40)]
    moments = random.normal(size=(40, 3))

    def dipoles(x):
        r = x[:, None] - places
        length = np.linalg.norm(r, axis=2, keepdims=True)
        return (3 * (r * moments).sum(2, keepdims=True) * r / length**5 - moments / length**3).sum(
            1
        )

    x = np.stack(np.meshgrid(np.linspace(-5, 5, 11), np.linspace(-5, 5, 21)), -1).reshape(-1, 2)
    x = np.c_[x, 0.3 + 0.05 * np.sin(x[:, 0] + x[:, 1])]
    along = np.array([-0.2956, 0.8302, 0.4727]) / np.linalg.norm([-0.2956, 0.8302, 0.4727])
    y = dipoles(x) @ along
    y = y / y.std() + 0.02 * random.normal(size=len(y))
    kernel = gp_orff.HarmonicKernel(num_depths=1)
    model = gp_orff.VectorFieldGP(kernel, mean=gpytorch.means.ZeroMean())
    model.fit(x, y, directions=np.tile(along, (len(x), 1)), progress=False)
    z = np.c_[random.uniform(-3, 3, (50, 2)), np.full(50, 1.0)]
    truth = dipoles(z) / (dipoles(x) @ along).std()
    mean = model.posterior().mean(torch.from_numpy(z)).detach().numpy()
    assert np.linalg.norm((mean - truth) @ along) < 0.15 * np.linalg.norm(truth @ along)
    assert np.linalg.norm((mean - truth)[:, 2]) < 0.3 * np.linalg.norm(truth[:, 2])


def test_the_amplitude_multiplies_the_covariance():
    kernel = gp_orff.HarmonicKernel(2, "both", reference_height=(0.0, 2.0)).double()
    x = torch.rand(4, 3, generator=torch.Generator().manual_seed(0)).double() + 0.5
    before = kernel(x).to_dense()
    assert rescale(kernel, 3.0)
    torch.testing.assert_close(kernel(x).to_dense(), 3 * before)


@pytest.mark.parametrize("name", ["depth", "variance"])
def test_values_are_set_to_draws_from_their_priors(name):
    """gpytorch's `sample_from_prior` draws without an argument; the same seed gives the same."""
    prior = gpytorch.priors.LogNormalPrior(torch.zeros(2), torch.ones(2))
    kernel = gp_orff.HarmonicKernel(2, **{f"{name}_prior": prior})
    torch.manual_seed(0)
    expected = prior.sample()
    torch.manual_seed(0)
    kernel.sample_from_prior(f"{name}_prior")
    torch.testing.assert_close(getattr(kernel, f"{name}s"), expected, rtol=1e-5, atol=0)
