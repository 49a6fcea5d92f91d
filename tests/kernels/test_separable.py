"""Separable kernels with a root of any rank, compared with dense k ⊗ L Lᵀ, and typical uses."""

import gpytorch
import pytest
import torch
from gpytorch.kernels import (
    ConstantKernel,
    MaternKernel,
    MultitaskKernel,
    RBFKernel,
    RFFKernel,
    ScaleKernel,
)
from torch import nn

import gp_orff
from gp_orff.fitting.starting_values import rescale
from tests.support import oracles
from tests.support.fields import draw, uniform
from tests.support.models import dense_noise, evidence, gradient, vector_gp

pytestmark = pytest.mark.usefixtures("no_check_of_random_features")


def root(p=3, r=1, seed=0):
    return draw(p, r, seed=seed)


def separable(matrix, **options):
    kernel = RBFKernel(ard_num_dims=2, **options).double()
    kernel.lengthscale = torch.tensor([0.6, 1.1]).double()
    return gp_orff.SeparableKernel(kernel, matrix)


def rbf(x, z, lengthscale=(0.6, 1.1)):
    return oracles.rbf(x[:, None] - z[None], torch.tensor(lengthscale).double())


def constant(value):
    kernel = ConstantKernel().double()
    kernel.constant = torch.tensor(value).double()
    return kernel


# -- values -----------------------------------------------------------------------------------


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("rank", [1, 2, 3, 5])
def test_is_the_kronecker_product(rank, trained):
    matrix = root(r=rank)
    kernel = separable(nn.Parameter(matrix) if trained else matrix)
    x, z = uniform(5, 2), uniform(4, 2, seed=1)
    expected = torch.kron(rbf(x, z), matrix @ matrix.mT)
    torch.testing.assert_close(kernel(x, z).to_dense(), expected)
    torch.testing.assert_close(kernel(x[:4], z, diag=True), expected[:12].diagonal())
    assert kernel.num_outputs == 3


def test_base_kernels_of_every_kind_and_their_inputs():
    """Columns of columns: (2, 0, 1) of the inputs, and of these one for each kernel of a sum."""
    first, second = RBFKernel(active_dims=(1,)).double(), MaternKernel(active_dims=(2,)).double()
    scaled = ScaleKernel(RBFKernel().double()).double()
    scaled.outputscale = 0.3
    base = first * second + scaled + constant(0.7)
    kernel = gp_orff.SeparableKernel(base, root(), active_dims=(2, 0, 1))
    x, z = uniform(5, 3), uniform(4, 3, seed=1)
    ells = [own.lengthscale.item() for own in (first, second, scaled.base_kernel)]
    tau = x[:, None] - z[None]
    expected = oracles.rbf(tau[..., [0]], ells[0]) * oracles.matern(tau[..., [1]], ells[1], 2.5)
    expected = expected + 0.3 * oracles.rbf(tau, ells[2]) + 0.7
    found = kernel(x, z).to_dense()
    torch.testing.assert_close(found, torch.kron(expected, root() @ root().mT))
    alone = gp_orff.SeparableKernel(first, root(), active_dims=(2, 0, 1))
    expected = torch.kron(oracles.rbf(tau[..., [0]], ells[0]), root() @ root().mT)
    torch.testing.assert_close(alone(x, z).to_dense(), expected)
    hermite = gp_orff.ORFFKernel(alone, gp_orff.GaussHermite(30), num_dims=3)
    torch.testing.assert_close(hermite(x, z).to_dense(), expected)
    many = gp_orff.ORFFKernel(kernel, gp_orff.QuasiMonteCarlo(4096), num_dims=3)
    # the quasi-random error is well below that of 4096 independent draws, 1/√4096 = 1.6e-2
    torch.testing.assert_close(many(x, z).to_dense(), found, rtol=0, atol=0.01 * found.max().item())


def test_a_root_from_a_graph_of_tasks():
    """The pseudoinverse of its Laplacian, of rank 5 − 2 for two components; each sums to zero."""
    edges = [(0, 1), (1, 2), (3, 4)]
    laplacian = torch.zeros(5, 5).double()
    for i, j in edges:
        laplacian[[i, j], [i, j]] += 1
        laplacian[[i, j], [j, i]] -= 1
    values, vectors = torch.linalg.eigh(laplacian)
    positive = values > 1e-9 * values.max()
    matrix = vectors[:, positive] / values[positive].sqrt()
    assert matrix.shape == (5, 3)
    kernel = separable(matrix)
    block = kernel(uniform(1, 2)).to_dense()
    torch.testing.assert_close(block, torch.linalg.pinv(laplacian, hermitian=True))
    components = torch.tensor([[1, 1, 1, 0, 0], [0, 0, 0, 1, 1]]).double()
    assert (components @ block).abs().max() < 1e-14
    assert gp_orff.ORFFKernel(kernel, gp_orff.MonteCarlo(10)).num_features == 2 * 10 * 3


def test_a_root_of_simplex_codes():
    """The corners of a simplex: equal variances, equal correlations −1/(p − 1), rank p − 1."""
    centred = torch.eye(4).double() - 1 / 4
    vectors = torch.linalg.eigh(centred).eigenvectors
    corners = vectors[:, 1:] * (4 / 3) ** 0.5
    block = separable(corners)(uniform(1, 2)).to_dense()
    torch.testing.assert_close(block, 4 / 3 * torch.eye(4).double() - 1 / 3)


# -- features ---------------------------------------------------------------------------------


@pytest.mark.parametrize("points", [2, 60])
def test_rank_one_has_as_many_features_as_a_scalar_kernel(points):
    """20 outputs and 10 frequencies: 20 features, and the posterior of dense algebra."""
    matrix = root(20, 1)
    orff = gp_orff.ORFFKernel(separable(matrix), gp_orff.MonteCarlo(10))
    assert orff.num_features == 20
    tasks = MultitaskKernel(separable(matrix).base_kernel, num_tasks=20, rank=1)
    assert gp_orff.ORFFKernel(tasks, gp_orff.MonteCarlo(10)).num_features == 400
    x, y, xs = uniform(points, 2), draw(points, 20), uniform(7, 2, seed=2)
    model = vector_gp(x, y, orff, noise=0.05)
    bases = orff.frequencies[0].bases[0] / separable(matrix).base_kernel.lengthscale.detach()
    weights = torch.ones(10).double() / 10

    def covariance(a, b):
        return oracles.fourier_sum(a, b, bases, weights, (matrix @ matrix.mT).expand(10, -1, -1))

    noisy = covariance(x, x) + dense_noise(model, points)
    residuals = (y - model.mean_module(x)).flatten()
    expected = oracles.log_density(noisy, residuals)
    torch.testing.assert_close(evidence(model), expected, rtol=1e-9, atol=0)
    mean, cov = oracles.condition(covariance(xs, xs), covariance(xs, x), noisy, residuals)
    posterior = model.eval()(xs)
    assert (posterior.mean.flatten() - mean).abs().max() <= 1e-9
    assert (posterior.covariance_matrix - cov).abs().max() <= 1e-9
    assert (posterior.variance.flatten() - cov.diagonal()).abs().max() <= 1e-9


@pytest.mark.parametrize("rule", ["exact", "grid", "random"])
def test_posteriors_of_a_field_model(rule):
    """Rank one and rank two of four outputs, against dense algebra with the exact kernel, or with
    the covariance of the features."""
    matrix = root(4, 2)
    kernel = separable(matrix) + gp_orff.SeparableKernel(
        MaternKernel().double(), root(4, 1, seed=3)
    )
    rules = {
        "exact": None,
        "grid": gp_orff.Grid(spacing=1.0, cutoff=5.0),
        "random": gp_orff.QuasiMonteCarlo(32),
    }
    x, y, xs = uniform(80, 2), draw(80, 4), uniform(6, 2, seed=2)
    model = gp_orff.VectorFieldGP(kernel, frequencies=rules[rule], mean=gpytorch.means.ZeroMean())
    model.likelihood.noise = 0.1
    field = model.condition(x, y).posterior()
    prior = model.kernel
    if rule != "exact":
        prior = gp_orff.ORFFKernel(model.kernel, rules[rule], num_dims=2).double()

    def covariance(a, b):
        return prior(a, b).to_dense().detach()

    noisy = covariance(x, x) + 0.1 * torch.eye(320).double()
    mean, cov = oracles.condition(covariance(xs, xs), covariance(xs, x), noisy, y.flatten())
    torch.testing.assert_close(field.mean(xs).flatten(), mean, rtol=0, atol=1e-9)
    torch.testing.assert_close(field.variance(xs).flatten(), cov.diagonal(), rtol=0, atol=1e-9)


@pytest.mark.parametrize("points", [40, 300])
@pytest.mark.parametrize("rank", [0, 1])
def test_exact_models_of_gpytorch(points, rank):
    """Below 800 numbers gpytorch factorises, above it diagonalises both factors: evidence and its
    gradient, also in a root whose L Lᵀ has equal eigenvalues, and predictions."""
    matrix = nn.Parameter(root(4, 1))
    kernel = separable(matrix)
    x, y, xs = uniform(points, 2), draw(points, 4), uniform(6, 2, seed=2)
    torch.manual_seed(0)  # gpytorch draws task noise from the global state
    model = vector_gp(x, y, kernel, noise=0.1, rank=rank)

    def covariance(a, b):
        return torch.kron(kernel.base_kernel(a, b).to_dense(), matrix @ matrix.mT)

    noisy = covariance(x, x) + dense_noise(model, points)
    residuals = (y - model.mean_module(x)).flatten()
    found, expected = evidence(model), oracles.log_density(noisy, residuals)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=0)
    slopes, wanted = gradient(found, model), gradient(expected, model)
    assert (slopes - wanted).norm() <= 1e-7 * wanted.norm()
    with torch.no_grad():
        posterior = model.eval()(xs)
        mean, cov = oracles.condition(
            covariance(xs, xs),
            covariance(xs, x),
            covariance(x, x) + dense_noise(model, points),
            residuals,
        )
        torch.testing.assert_close(posterior.mean.flatten(), mean, rtol=0, atol=1e-9)
        torch.testing.assert_close(posterior.covariance_matrix, cov, rtol=0, atol=1e-9)


def test_fantasies_of_exact_models_equal_a_refit():
    x, y, more_x, more_y = uniform(30, 2), draw(30, 3), uniform(3, 2, seed=2), draw(3, 3, seed=3)
    model, xs = vector_gp(x, y, separable(root()), noise=0.1).eval(), uniform(5, 2, seed=5)
    refit = vector_gp(
        torch.cat([x, more_x]), torch.cat([y, more_y]), model.covar_module, noise=0.1
    ).eval()
    with torch.no_grad():
        model(xs)
        found, expected = model.get_fantasy_model(more_x, more_y)(xs), refit(xs)
    torch.testing.assert_close(found.mean, expected.mean, rtol=0, atol=1e-8)
    torch.testing.assert_close(found.variance, expected.variance, rtol=0, atol=1e-8)


@pytest.mark.parametrize("order", ["separable_first", "scalar_first"])
def test_products_with_a_kernel_of_time(order):
    space = gp_orff.SeparableKernel(RBFKernel().double(), root(), active_dims=(0, 1))
    time = RBFKernel(active_dims=(2,)).double()
    kernel = space * time if order == "separable_first" else time * space
    assert isinstance(kernel, gp_orff.FieldProductKernel)
    x = uniform(4, 3)
    expected = torch.kron((space.base_kernel(x[:, :2]) * time(x)).to_dense(), root() @ root().mT)
    torch.testing.assert_close(kernel(x).to_dense(), expected)
    inside = gp_orff.ORFFKernel(kernel, gp_orff.MonteCarlo(6), num_dims=3)
    assert inside.num_features == 12


# -- fixed and trained roots, batches -----------------------------------------------------------


def test_a_tensor_is_fixed_and_a_parameter_is_trained():
    matrix = root()
    fixed = separable(matrix)
    expected = matrix.clone()
    matrix.zero_()  # of the user's tensor, which was copied
    assert torch.equal(fixed.root, expected)
    assert dict(fixed.named_parameters()).keys() == {"base_kernel.raw_lengthscale"}
    assert torch.equal(fixed.state_dict()["root"], expected)
    parameter = nn.Parameter(expected.clone())
    trained = separable(parameter)
    assert dict(trained.named_parameters())["root"] is parameter
    fixed.float(), trained.float()
    assert fixed.root.dtype == trained.root.dtype == torch.float32
    single = gp_orff.SeparableKernel(RBFKernel(), expected)  # a root of more digits than the rest
    assert single(uniform(3, 2).float()).dtype == torch.float32
    assert torch.equal(single.double().root, expected)  # and keeps them
    differentiable = expected.clone().requires_grad_()
    assert not separable(2 * differentiable).root.requires_grad


def test_indexing_and_expanding():
    """Batches of roots, of base kernels and of both; the kernel itself stays as it was."""
    x, shape = uniform(4, 2), torch.Size([3])
    base = RBFKernel(batch_shape=shape).double()
    base.lengthscale = torch.tensor([0.5, 1.0, 2.0]).double().view(3, 1, 1)
    for matrix in (draw(3, 4, 2), draw(4, 2)):
        for scalar in (base, RBFKernel().double()):
            for own in (matrix, nn.Parameter(matrix)):
                kernel = gp_orff.SeparableKernel(scalar, own)
                full = kernel(x).to_dense()
                assert kernel.batch_shape == full.shape[:-2]
                for i in range(len(full) if full.dim() > 2 else 0):
                    assert kernel[i].batch_shape == ()
                    assert isinstance(kernel[i].root, nn.Parameter) == isinstance(own, nn.Parameter)
                    torch.testing.assert_close(kernel[i](x).to_dense(), full[i])
                    torch.testing.assert_close(kernel[i : i + 1](x).to_dense(), full[i : i + 1])
                wide = kernel.expand_batch(torch.Size([2, 3]))
                assert wide.batch_shape == (2, 3)
                torch.testing.assert_close(wide(x).to_dense(), full.expand(2, 3, 16, 16))
                assert kernel.root is own or torch.equal(kernel.root, own)
                assert kernel.batch_shape == full.shape[:-2]


def test_lazy_covariances_of_a_batch_are_indexed():
    kernel = gp_orff.SeparableKernel(RBFKernel().double(), draw(3, 4, 2))
    x = uniform(3, 5, 2)
    full = kernel(x).to_dense()
    torch.testing.assert_close(kernel(x)[1].to_dense(), full[1])
    torch.testing.assert_close(kernel(x)[1:, :8, 4:12].to_dense(), full[1:, :8, 4:12])


# -- learning, files ----------------------------------------------------------------------------


def tied(points=40, seed=0):
    """Six outputs on a ring, each observed at a third of the points; the truth at other points."""
    x, noise = uniform(points + 200, 2, seed=seed), draw(points, 6, seed=seed + 1)
    ring = 2 * torch.eye(6) - torch.eye(6).roll(1, 0) - torch.eye(6).roll(-1, 0)
    values, vectors = torch.linalg.eigh(ring.double())
    matrix = vectors / (values + 0.1).sqrt() @ vectors.mT  # unique, unlike the eigenvectors
    covariance = rbf(x, x, (0.5, 0.5)) + 1e-9 * torch.eye(len(x)).double()
    truth = torch.linalg.cholesky(covariance) @ draw(len(x), 6, seed=seed + 2) @ matrix.mT
    y = truth[:points] + 0.2 * noise
    y[draw(points, 6, seed=seed + 3) > -0.4] = torch.nan
    return matrix, x[:points], y, x[points:], truth[points:]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*poorly:gp_orff.DataWarning")
def test_a_graph_of_tasks_helps_where_outputs_are_missing():
    """The root that the truth was drawn with, against independent outputs."""
    matrix, x, y, xs, truth = tied(points=24)
    errors = {}
    for name, own in {"graph": matrix, "independent": torch.eye(6).double()}.items():
        model = gp_orff.VectorFieldGP(gp_orff.SeparableKernel(RBFKernel(), own))
        model.fit(x, y, missing="mask", progress=False)
        errors[name] = (model.posterior().mean(xs) - truth).square().mean().sqrt().item()
    assert errors["graph"] < 0.85 * errors["independent"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*poorly:gp_orff.DataWarning")
def test_fits_do_not_depend_on_units():
    """Of a trained root, and of a fixed one, whose kernel gets an outputscale."""
    _, x, y, _, _ = tied(points=12)
    y = y[:, :3].nan_to_num(0.0)
    for own in (nn.Parameter(draw(3, 2, seed=4)), draw(3, 2, seed=4)):
        evidences, sizes = [], []
        for length, unit in ((1.0, 1.0), (1e4, 1e-5)):
            copy = nn.Parameter(own.detach().clone()) if isinstance(own, nn.Parameter) else own
            model = gp_orff.VectorFieldGP(gp_orff.SeparableKernel(RBFKernel(), copy))
            assert isinstance(model.kernel, ScaleKernel) != isinstance(own, nn.Parameter)
            model.fit(length * x, unit * y, progress=False)
            log_unit = y.numel() * torch.tensor(unit).double().log()
            evidences.append(model.log_marginal_likelihood().item() + log_unit.item())
            sizes.append(model.kernel(x[:1] * length).to_dense().detach() / unit**2)
        assert abs(evidences[0] - evidences[1]) < 1e-3
        # A search ends before the optimum by less than the evidence tells.
        torch.testing.assert_close(sizes[0], sizes[1], rtol=3e-3, atol=1e-6)


@pytest.mark.parametrize("trained", [False, True])
def test_the_variance_is_that_of_the_root_or_of_the_base_kernel(trained):
    kernel = gp_orff.SeparableKernel(ScaleKernel(RBFKernel()), nn.Parameter(root())).double()
    kernel.root.requires_grad_(trained)
    x, matrix = uniform(3, 2), kernel.root.detach().clone()
    before = kernel(x).to_dense()
    assert rescale(kernel, 4.0)
    torch.testing.assert_close(kernel(x).to_dense(), 4 * before)
    assert torch.equal(kernel.root, 2 * matrix if trained else matrix)


@pytest.mark.slow
def test_a_trained_root_is_found():
    """Three outputs of one signal: strengths up to their sign, and the names in the report."""
    x = uniform(30, 2)
    signal = torch.sin(2 * x[:, :1]) * torch.cos(2 * x[:, 1:])
    strengths = torch.tensor([[1.0, -2.0, 0.5]]).double()
    y = signal * strengths + 0.05 * draw(30, 3)
    start = nn.Parameter(torch.ones(3, 1))
    model = gp_orff.VectorFieldGP(gp_orff.SeparableKernel(RBFKernel(), start))
    assert torch.equal(start, torch.ones(3, 1))
    model.fit(x, y, progress=False)
    found = model.kernel.root.detach()
    ratio = found.squeeze() / found[0]
    torch.testing.assert_close(ratio, strengths.squeeze(), rtol=0, atol=0.1)
    assert "root" in model.report.hyperparameters


@pytest.mark.parametrize("kind", ["fixed", "trained", "frozen"])
def test_files_keep_the_root(kind, tmp_path):
    matrix = root(3, 2)
    if kind != "fixed":
        matrix = nn.Parameter(matrix, requires_grad=kind == "trained")
    kernel = gp_orff.SeparableKernel(ScaleKernel(RBFKernel()), matrix, active_dims=(1, 0))
    x, y = uniform(40, 2), draw(40, 3)
    model = gp_orff.VectorFieldGP(kernel).condition(x, y)
    model.save(tmp_path / "model.pt")
    loaded = gp_orff.VectorFieldGP.load(tmp_path / "model.pt")
    assert isinstance(loaded.kernel.root, nn.Parameter) == (kind != "fixed")
    assert loaded.kernel.root.requires_grad == (kind == "trained")
    assert torch.equal(loaded.kernel.root, model.kernel.root)
    xs = uniform(5, 2, seed=3)
    assert torch.equal(loaded.posterior().mean(xs), model.posterior().mean(xs))
    assert torch.equal(loaded.posterior().variance(xs), model.posterior().variance(xs))


def test_a_root_in_two_places_is_no_recipe(tmp_path):
    """Two kernels that are trained with one root would have two after loading."""

    def build():
        shared = nn.Parameter(root(3, 1))
        return gp_orff.SeparableKernel(RBFKernel(), shared) + gp_orff.SeparableKernel(
            MaternKernel(), shared
        )

    model = gp_orff.VectorFieldGP(build()).condition(uniform(20, 2), draw(20, 3))
    model.save(tmp_path / "model.pt")
    with pytest.raises(ValueError, match="pass kernel="):
        gp_orff.VectorFieldGP.load(tmp_path / "model.pt")
    loaded = gp_orff.VectorFieldGP.load(tmp_path / "model.pt", kernel=build())
    assert len(list(loaded.kernel.parameters())) == 3


# -- errors -------------------------------------------------------------------------------------

BAD_ROOTS = {
    "a list": ([[1.0]], TypeError, "tensor of floating-point numbers as root, got list"),
    "integers": (torch.ones(3, 1).long(), TypeError, "got torch.int64; pass"),
    "a vector": (torch.ones(3), ValueError, r"shape \(p, r\).*got \(3,\); for one column"),
    "no columns": (torch.ones(3, 0), ValueError, r"at least one column, got \(3, 0\)"),
    "no rows": (torch.ones(0, 2), ValueError, r"got \(0, 2\)"),
    "infinite": (torch.tensor([[1.0], [torch.inf]]), ValueError, "finite.*got 1 that are"),
    "zero": (torch.zeros(3, 2), ValueError, "not zero, got only zeros.*small random numbers"),
}


@pytest.mark.parametrize("name", BAD_ROOTS)
def test_bad_roots_are_refused(name):
    matrix, kind, message = BAD_ROOTS[name]
    with pytest.raises(kind, match=message):
        gp_orff.SeparableKernel(RBFKernel(), matrix)


def test_bad_base_kernels_are_refused():
    with pytest.raises(
        TypeError, match=r"instance of a gpytorch kernel as base_kernel, got <class"
    ):
        gp_orff.SeparableKernel(RBFKernel, torch.ones(3, 1))
    with pytest.raises(ValueError, match="scalar base kernel, got CurlFreeKernel with 2 outputs"):
        gp_orff.SeparableKernel(gp_orff.CurlFreeKernel(num_dims=2), torch.ones(3, 1))
    unknown = gp_orff.SeparableKernel(RFFKernel(num_samples=3), torch.ones(3, 1))
    with pytest.raises(NotImplementedError, match=r"registered spectral density.*got RFFKernel"):
        gp_orff.ORFFKernel(unknown, gp_orff.MonteCarlo(3), num_dims=2)


def test_bad_inputs_are_refused():
    kernel = separable(root())
    with pytest.raises(ValueError, match="SeparableKernel expects finite inputs, got 1 points"):
        kernel(torch.tensor([[0.0, torch.nan]]).double()).to_dense()
    with pytest.raises(TypeError, match=r"SeparableKernel has torch.float64 hyperparameters"):
        kernel(uniform(3, 2).float()).to_dense()
    with pytest.raises(ValueError, match=r"last_dim_is_batch=False, got last_dim_is_batch=True"):
        kernel.forward(uniform(3, 2), uniform(3, 2), last_dim_is_batch=True)
