"""Tides and eddies at every position and every time, by the algebra of products."""

import pytest
import torch
from gpytorch.kernels import MaternKernel, MultitaskKernel, RBFKernel, RQKernel

import gp_orff
from gp_orff.data.dataset import Dataset
from gp_orff.data.reading import Options, read
from gp_orff.features.assemble import draw, expand
from gp_orff.inference.features import ProductInference

NOISE = torch.tensor([[0.02, 0.005], [0.005, 0.03]]).double()


def record(time_first=False, places=7, count=9):
    """All pairs of places and irregular times, in random order."""
    generator = torch.Generator().manual_seed(0)
    where = torch.rand(places, 2, generator=generator).double()
    when = 40 * torch.rand(count, 1, generator=generator).double()
    x = torch.cat([where.repeat(count, 1), when.repeat_interleave(places, dim=0)], dim=-1)
    x = x[torch.randperm(len(x), generator=generator)]
    y = torch.randn(len(x), 2, generator=generator).double()
    return (x[:, [2, 0, 1]] if time_first else x), y


def kernel_of(time_first=False, other_time=False, base=RBFKernel):
    space, time = ((1, 2), (0,)) if time_first else ((0, 1), (2,))
    field = gp_orff.HelmholtzKernel(base(), num_dims=2, active_dims=space)
    eddies = field * MaternKernel(nu=0.5, active_dims=time)
    if other_time:
        eddies = eddies + field * MaternKernel(nu=1.5, active_dims=time)
    kernel = (gp_orff.tides(field, ["M2", "K1"], active_dims=time) + eddies).double()
    leaves = [own for own in kernel.modules() if isinstance(own, base)]
    for number, leaf in enumerate(leaves):  # lengthscales of both parts of each field
        leaf.lengthscale = 0.6 + 0.05 * number
    for leaf in kernel.modules():
        if isinstance(leaf, MaternKernel):
            leaf.lengthscale = 12.0
    return kernel


def grid(time_first=False):
    box, spacing = [(-0.3, 1.3), (-0.3, 1.3), (-5.0, 45.0)], (2.5, 2.5, 0.1)
    order = [2, 0, 1] if time_first else [0, 1, 2]
    box, spacing = [box[i] for i in order], tuple(spacing[i] for i in order)
    return gp_orff.Grid(domain=box, spacing=spacing, tolerance=0.05, lengthscale_range=(1, 1))


def inference_of(x, y, kernel, rule):
    data = Dataset.in_memory(read(x, y, 2, Options()))
    return ProductInference.on_pairs(data, draw(kernel, rule, 3), kernel)


@pytest.mark.parametrize("base", [RBFKernel, RQKernel])
@pytest.mark.parametrize("time_first", [False, True])
def test_products_are_dense_algebra(time_first, base):
    """Of Φ written out: A = I + ΦᵀN⁻¹Φ and the density of y under ΦΦᵀ + N, to rounding. Kernels
    with heavy tails have features of the cell around ω = 0.
    """
    (x, y), kernel = record(time_first), kernel_of(time_first, base=base)
    inference = inference_of(x, y, kernel, grid(time_first))
    mean = torch.tensor([0.3, -0.2]).double()
    with torch.no_grad():
        found = inference.posterior(kernel, {"": NOISE}, mean)
        expansion = expand(kernel, inference.draws, 3).double()
        features, delta = expansion.features(x), inference.truncated(kernel)
        precision = torch.kron(
            torch.eye(len(x)).double(), torch.linalg.inv(NOISE + delta).contiguous()
        )
        a = torch.eye(expansion.num_features).double() + features.mT @ precision @ features
        residual = (y - mean).flatten()
        covariance = features @ features.mT + torch.linalg.inv(precision)
        density = torch.distributions.MultivariateNormal(torch.zeros_like(residual), covariance)
        points = record(time_first, count=2)[0][:5]
        rows, posterior = expansion.features(points), found.distribution.split()[0]
        theta = torch.linalg.solve(a, features.mT @ precision @ residual)
        expected = rows @ torch.linalg.solve(a, rows.mT)
        evidence = inference.log_density(found.evidence, mean)
        root = posterior.weight_root(torch.eye(len(a)).double())
        same = {"rtol": 0, "atol": 1e-9}
        torch.testing.assert_close(evidence, density.log_prob(residual), rtol=0, atol=1e-7)
        torch.testing.assert_close(posterior.mean(points).flatten(), rows @ theta, **same)
        torch.testing.assert_close(posterior.covariance(points), expected, **same)
        torch.testing.assert_close(
            posterior.variance(points).flatten(), expected.diagonal(), **same
        )
        torch.testing.assert_close(root @ root.mT, torch.linalg.inv(a), **same)
        vectors = torch.randn(len(a), 2, generator=torch.Generator().manual_seed(1)).double()
        solved = torch.linalg.solve(a, vectors)
        torch.testing.assert_close(posterior.weight_covariance(vectors), solved, **same)


@pytest.mark.parametrize("number", [0, 2])
def test_parts_are_dense_algebra(number):
    """A constituent, whose features are few, and the eddies."""
    (x, y), kernel = record(), kernel_of()
    inference = inference_of(x, y, kernel, grid())
    with torch.no_grad():
        found = inference.posterior(kernel, {"": NOISE}, torch.zeros(2).double())
        chosen = [2 * number, 2 * number + 1]  # both parts of a field
        _, expansion = inference.of_terms(kernel, chosen)
        part = found.distribution.split()[0].of_part(expansion, kernel.kernels[number])
        whole = expand(kernel, inference.draws, 3).double().features(x)
        precision = torch.linalg.inv(NOISE + inference.truncated(kernel)).contiguous()
        precision = torch.kron(torch.eye(len(x)).double(), precision)
        a = torch.eye(whole.shape[-1]).double() + whole.mT @ precision @ whole
        rows = expansion.features(x[:5])
        expected = rows @ torch.linalg.solve(a, rows.mT)
        mean = rows @ torch.linalg.solve(a, whole.mT @ precision @ y.flatten())
        torch.testing.assert_close(part.covariance(x[:5]), expected, rtol=0, atol=1e-9)
        torch.testing.assert_close(part.mean(x[:5]).flatten(), mean, rtol=0, atol=1e-9)


def test_data_that_are_no_product():
    """An observation that is missing, or in the place of another one."""
    (x, y), kernel = record(), kernel_of()
    for places, values in ((x[1:], y[1:]), (x[[0, *range(len(x) - 1)]], y)):
        assert inference_of(places, values, kernel, grid()) is None


def test_features_that_do_not_fit_into_memory(monkeypatch):
    """They are refused before their matrix is allocated."""
    monkeypatch.setattr("gp_orff.inference.features._memory", lambda device: 2**27)
    (x, y), kernel = record(count=30), kernel_of()
    rule = gp_orff.Grid.for_tides(x, kernel, fastest=6.0)
    model = gp_orff.VectorFieldGP(kernel, frequencies=rule)
    model.likelihood.noise = 0.3
    with pytest.raises(ValueError, match="whole vectors at every pair of a position and a time"):
        model.condition(x[1:], y[1:])


def test_two_kernels_of_time():
    (x, y), kernel = record(), kernel_of(other_time=True)
    inference = inference_of(x, y, kernel, grid())
    with pytest.raises(ValueError, match="the same kernel of time"):
        inference.posterior(kernel, {"": NOISE}, None)


def test_no_derivatives():
    (x, y), kernel = record(), kernel_of()
    inference = inference_of(x, y, kernel, grid())
    with pytest.raises(NotImplementedError, match="fit a model without frequencies="):
        inference.evidence(kernel, {"": NOISE})


@pytest.mark.filterwarnings("ignore::gp_orff.GridWarning")
def test_a_fit_with_so_many_features():
    (x, y), kernel = record(count=30), kernel_of()
    rule = gp_orff.Grid.for_tides(x, kernel, fastest=6.0)
    model = gp_orff.VectorFieldGP(kernel, frequencies=rule)
    with pytest.raises(NotImplementedError, match="fit a model without frequencies="):
        model.fit(x, y, progress=False)


def test_many_features_of_a_model():
    """Amplitudes are those of the exact kernel, within a tenth of their error bars: the grid has
    all waves but the shortest ones of eddies in time."""
    (x, y), kernel = record(places=6, count=40), kernel_of()
    box = [(0.0, 1.0), (0.0, 1.0), (0.0, 40.0)]
    rule = gp_orff.Grid(
        data=box,
        domain=box,
        spacing=(1.4, 1.4, 0.07),
        tolerance=1e-5,
        largest_index=(20, 20, 30),
        lengthscale_range=(1, 1),
        max_features=10**6,
    )
    ellipses, kinds = [], []
    for options in ({"frequencies": rule}, {}):
        model = gp_orff.VectorFieldGP(kernel, **options)
        model.likelihood.noise = 0.3
        field = model.condition(x, y).posterior()
        kinds.append(type(model.state.inference).__name__)
        ellipses.append(field.ellipses("K1", x[:, :2].unique(dim=0), num_samples=500))
    assert kinds == ["ProductInference", "ExactInference"]
    mine, theirs = (own.semi_major for own in ellipses)
    assert ((mine.mean - theirs.mean).abs() < 0.1 * theirs.sd).all()
    torch.testing.assert_close(mine.sd, theirs.sd, rtol=0.1, atol=0)


def test_more_functions_than_memory_serves_are_counted(monkeypatch):
    """In an error, before their matrices are made."""
    (x, y), kernel = record(), kernel_of()
    inference = inference_of(x, y, kernel, grid())
    monkeypatch.setattr("gp_orff.inference.features.most_factorised", lambda device: 5)
    message = r"at most 5 functions of space, functions of time and features of lines, got \d+"
    with torch.no_grad(), pytest.raises(ValueError, match=message):
        inference.posterior(kernel, {"": NOISE}, torch.zeros(2).double())


def test_random_features_in_large_number_are_no_product():
    """12 288 of them, which a fit of 10 000 vectors with a Bessel kernel uses."""
    x, y = torch.rand(20, 3).double(), torch.rand(20, 3).double()
    kernel = MultitaskKernel(RBFKernel(), num_tasks=3, rank=1)
    model = gp_orff.VectorFieldGP(kernel, frequencies=gp_orff.QuasiMonteCarlo(2048))
    assert model.condition(x, y).posterior().mean(x).shape == (20, 3)
