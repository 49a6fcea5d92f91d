"""Iterative algebra of large frequency grids, compared with factorizations of small grids."""

import pytest
import torch
from gpytorch.kernels import MaternKernel, MultitaskKernel, RBFKernel, RQKernel

import gp_orff
from gp_orff.data.dataset import Dataset
from gp_orff.data.observations import SymbolObservations
from gp_orff.data.reading import Options, read
from gp_orff.features.assemble import draw, num_features
from gp_orff.inference import features as iterative
from gp_orff.inference import iterative as iterations
from gp_orff.inference import representation
from gp_orff.inference.features import FeatureInference, IterativeInference, feature_inference
from gp_orff.inference.iterative import Accuracy, ConvergenceError
from gp_orff.models.comparison import KernelComparison
from gp_orff.models.report import Curvature

EXACT = Accuracy(block=10**6)  # the dense block holds all features
TIGHT = Accuracy(
    block=20, probes=12, mean_error=1e-11, constants_tolerance=1e-11, variance_tolerance=1e-11
)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def uniform(*shape, seed=0):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def in_space_and_time():
    field = gp_orff.CurlFreeKernel(RBFKernel(), num_dims=2, active_dims=(0, 2))
    return field * MaternKernel(1.5, active_dims=(1,))


KERNELS = {
    "curl_free": (lambda: gp_orff.CurlFreeKernel(MaternKernel(2.5), num_dims=2), 2),
    "divergence_free": (lambda: gp_orff.DivergenceFreeKernel(RBFKernel(), num_dims=3), 3),
    "helmholtz": (lambda: gp_orff.HelmholtzKernel(RQKernel(), num_dims=2), 2),
    "separable": (lambda: MultitaskKernel(RBFKernel(ard_num_dims=2), num_tasks=2, rank=1), 2),
    "space_and_time": (in_space_and_time, 3),
    "line": (lambda: MultitaskKernel(MaternKernel(1.5), num_tasks=2, rank=1), 1),
}


def options_of(name, count):
    if name == "weights":
        return Options(variances=0.5 + uniform(count, seed=3))
    if name == "groups":
        return Options(group=["a" if i % 3 else "b" for i in range(count)])
    if name == "directions":
        angle = 6 * uniform(count, seed=4)
        return Options(directions=torch.stack([angle.cos(), angle.sin()], -1))
    return Options(missing="mask")


def problem(kernel, kind="plain", count=80, features=160):
    build, d = KERNELS[kernel]
    torch.manual_seed(0)
    k = build().double()
    p = 3 if kernel == "divergence_free" else 2
    count = 2 * count if kind == "directions" else count
    x, y = 2 * uniform(count, d, seed=1), normal(count, p, seed=2)
    if kind == "gaps":
        y[::4, 0] = torch.nan
    options = options_of(kind, count)
    if kind == "directions":
        y = y[:, :1]
    data = Dataset.in_memory(read(x, y, p, options))
    rule = gp_orff.Grid(domain=((0.0, 2.0),) * d, tolerance=1e-2, max_features=features)
    noise = torch.tensor([[0.05, 0.0], [0.0, 0.05]]).double() if p == 2 else 0.05 * torch.eye(3)
    noises = {key.label: noise.double() * (2 if key.label == "b" else 1) for key in data.keys}
    return k, data, draw(k, rule, d), noises


SMALL = {"count": 40, "features": 80}
KINDS = [("helmholtz", kind) for kind in ("weights", "groups", "directions", "gaps")]
CASES = [*((kernel, "plain") for kernel in KERNELS), *KINDS]


def gradients(inference, kernel, noises):
    parameters = [*kernel.parameters()]
    noises = {key: value.clone().requires_grad_() for key, value in noises.items()}
    evidence = inference.evidence(kernel, noises)
    value = evidence.log_density(None, inference.num_values)
    leaves = [*parameters, *noises.values()]
    return evidence, value.item(), torch.autograd.grad(value, leaves)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind"), CASES)
def test_a_block_of_all_features_is_the_dense_algebra(name, kind):
    kernel, data, draws, noises = problem(name, kind, **SMALL)
    dense, iterative = (
        FeatureInference(data, draws),
        IterativeInference(data, draws, accuracy=EXACT),
    )
    _, value, slopes = gradients(dense, kernel, noises)
    evidence, found, found_slopes = gradients(iterative, kernel, noises)
    assert found == pytest.approx(value, rel=1e-9)
    assert evidence.standard_error < 1e-9
    for slope, other in zip(slopes, found_slopes, strict=True):
        torch.testing.assert_close(other, slope, rtol=1e-8, atol=1e-8)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind"), [("divergence_free", "plain"), ("separable", "plain"), *KINDS]
)
def test_iterations_are_the_dense_algebra(name, kind):
    """With a small block, solutions are exact to the tolerance."""
    kernel, data, draws, noises = problem(name, kind, **SMALL)
    dense, iterative = (
        FeatureInference(data, draws),
        IterativeInference(data, draws, accuracy=TIGHT),
    )
    expected, found = (part.posterior(kernel, noises, None) for part in (dense, iterative))
    x = 2 * uniform(7, data.num_inputs, seed=7)
    torch.testing.assert_close(found.evidence.quad, expected.evidence.quad, rtol=1e-9, atol=1e-9)
    for method in ("mean", "variance", "blocks", "covariance"):
        values = [getattr(part.distribution, method)(x) for part in (found, expected)]
        torch.testing.assert_close(*values, rtol=1e-8, atol=1e-9)
    error = abs(found.evidence.logdet - expected.evidence.logdet)
    assert 0 < error < 3 * found.evidence.logdet_error


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind"), [("helmholtz", "groups"), ("separable", "plain")])
def test_gradients_are_those_of_dense_algebra_within_their_standard_error(name, kind):
    """Over 16 seeds; 4.5 standard errors, as a t-distribution of 15 degrees of freedom asks for."""
    kernel, data, draws, noises = problem(name, kind, **SMALL)
    _, _, expected = gradients(FeatureInference(data, draws), kernel, noises)
    runs = []
    for seed in range(16):
        accuracy = Accuracy(block=20, probes=4, mean_error=1e-8, seed=seed)
        inference = IterativeInference(data, draws, accuracy=accuracy)
        runs.append(torch.cat([g.flatten() for g in gradients(inference, kernel, noises)[2]]))
    runs, expected = torch.stack(runs), torch.cat([g.flatten() for g in expected])
    error = runs.std(0) / 16**0.5
    assert ((runs.mean(0) - expected).abs() <= 4.5 * error + 1e-8 * expected.abs()).all()
    assert (error > 0).any()


@pytest.mark.slow
def test_observations_of_symbols_enter_the_iterations():
    kernel, data, draws, noises = problem("helmholtz")
    x, q = 2 * uniform(3, 2, seed=5), torch.zeros(3, 1).double()
    data = data.observing(SymbolObservations.of(kernel, 2, x, q, gp_orff.Divergence(), 0.01))
    dense, iterative = (
        FeatureInference(data, draws),
        IterativeInference(data, draws, accuracy=TIGHT),
    )
    expected, found = (part.posterior(kernel, noises, None) for part in (dense, iterative))
    torch.testing.assert_close(found.evidence.quad, expected.evidence.quad, rtol=1e-9, atol=1e-9)
    means = [part.distribution.mean(x) for part in (found, expected)]
    torch.testing.assert_close(*means, rtol=1e-8, atol=1e-9)
    exact = IterativeInference(data, draws, accuracy=EXACT)
    for slope, other in zip(
        gradients(dense, kernel, noises)[2], gradients(exact, kernel, noises)[2], strict=True
    ):
        torch.testing.assert_close(other, slope, rtol=1e-8, atol=1e-8)


@pytest.mark.slow
def test_variances_at_many_points_are_estimated():
    """The error is that of 64 paths: at most √(4/64)."""
    kernel, data, draws, noises = problem("helmholtz")
    accuracy = Accuracy(block=60, variance_tolerance=1e-6)
    x = 2 * uniform(300, 2, seed=5)
    field, expected = (
        part.posterior(kernel, noises, None).distribution.split()[0]
        for part in (
            IterativeInference(data, draws, accuracy=accuracy),
            FeatureInference(data, draws),
        )
    )
    ratio = field.variance(x) / expected.variance(x)
    assert 1e-4 < (ratio - 1).square().mean().sqrt() < 0.25
    torch.testing.assert_close(field.blocks(x).diagonal(dim1=-1, dim2=-2), field.variance(x))
    rows = slice(0, 20)
    torch.testing.assert_close(
        field.blocks(x[rows]), expected.blocks(x[rows]), rtol=1e-6, atol=1e-6
    )
    exact = IterativeInference(data, draws, accuracy=EXACT)
    field = exact.posterior(kernel, noises, None).distribution.split()[0]
    torch.testing.assert_close(field.blocks(x), expected.blocks(x), rtol=1e-7, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("operations", [0.0, 5e11])
def test_variances_of_potentials_are_estimated_where_solutions_are_costly(operations):
    """Within the error of 64 paths; zero at the reference; else solved for."""
    kernel, data, draws, noises = problem("helmholtz")
    accuracy = Accuracy(block=60, variance_operations=operations)
    x = 2 * uniform(40, 2, seed=5)
    x[3] = torch.tensor([0.4, 0.3], dtype=torch.float64)
    symbol = gp_orff.Potential(x[3])
    field, expected = (
        part.posterior(kernel, noises, None).distribution.split()[0].apply(symbol, (0, 1))
        for part in (
            IterativeInference(data, draws, accuracy=accuracy),
            FeatureInference(data, draws),
        )
    )
    variance, exact = field.variance(x), expected.variance(x)
    assert variance[3] < 1e-12 * exact.max()
    rows = torch.arange(40) != 3
    error = (variance / exact - 1)[rows].abs()
    assert error.square().mean().sqrt() < 0.25
    assert (error.max() > 1e-3) == (operations == 0)
    torch.testing.assert_close(field.blocks(x)[:, 0], variance)


@pytest.mark.slow
def test_solutions_are_affordable_by_their_iterations():
    """A random vector tells how many a solution takes, where not every number is affordable."""
    kernel, data, draws, noises = problem("helmholtz")

    def affords(operations):
        accuracy = Accuracy(block=20, variance_operations=operations)
        inference = IterativeInference(data, draws, accuracy=accuracy)
        field = inference.posterior(kernel, noises, None).distribution.split()[0]
        return [field.system.affords(count) for count in (1, 10, 1000)]

    assert affords(1e5) == [False] * 3
    assert affords(1e6) == [True, False, False]
    assert affords(1e15) == [True] * 3


def test_draws_have_the_covariance_of_the_posterior():
    """R of A⁻¹ = R Rᵀ, from draws of unit vectors."""
    kernel, data, draws, noises = problem("line")
    accuracy = Accuracy(block=20, variance_tolerance=1e-12)
    inference = IterativeInference(data, draws, accuracy=accuracy)
    field = inference.posterior(kernel, noises, None).distribution.split()[0]
    eye = torch.eye(field.expansion.num_features, dtype=torch.float64)
    root = field.weight_root(eye)
    torch.testing.assert_close(root @ root.mT, field.weight_covariance(eye), rtol=1e-8, atol=1e-9)


@pytest.mark.slow
def test_no_convergence_is_an_error():
    kernel, data, draws, noises = problem("helmholtz")
    inference = IterativeInference(data, draws, accuracy=Accuracy(block=20, most=3))
    with pytest.raises(ConvergenceError, match=r"got .* after 3 iterations"):
        inference.posterior(kernel, noises, None)


@pytest.mark.slow
def test_residuals_are_permitted_where_operations_end():
    """The mean is as accurate as permitted, after the fewest iterations; else it is an error."""
    kernel, data, draws, noises = problem("helmholtz")
    x = 2 * uniform(50, 2, seed=5)

    def mean(**accuracy):
        inference = IterativeInference(data, draws, accuracy=Accuracy(block=20, **accuracy))
        return inference.posterior(kernel, noises, None).distribution.split()[0]

    exact = mean(mean_error=1e-11, constants_tolerance=1e-11)
    sd = exact.variance(x).sqrt()
    rough = {"mean_error": 1e-11, "constants_tolerance": 1e-2, "most": 20}
    error = ((mean(permitted_error=0.1, **rough).mean(x) - exact.mean(x)) / sd).square().mean()
    assert 1e-10 < error.sqrt() < 0.1
    with pytest.raises(ConvergenceError, match="after 20 iterations"):
        mean(permitted_error=1e-11, **rough)


@pytest.mark.slow
def test_residuals_of_variances_are_permitted_where_iterations_end():
    """A relative residual of 0.3 is permitted: variances, whose errors go with its square, are
    within a tenth, and draws of a path within 0.3. One of 1e-6 is not reached, and an error."""
    kernel, data, draws, noises = problem("helmholtz")
    x = 2 * uniform(50, 2, seed=5)

    def field(permitted, most=20):
        accuracy = Accuracy(
            block=20,
            permitted_error=1.0,
            variance_tolerance=1e-9,
            permitted_tolerance=permitted,
            most=most,
        )
        inference = IterativeInference(data, draws, accuracy=accuracy)
        return inference.posterior(kernel, noises, None).distribution.split()[0]

    exact, rough = field(1e-9, 2000), field(0.3)
    error = rough.variance(x) / exact.variance(x) - 1
    assert 1e-7 < error.abs().max() < 0.1
    z = torch.eye(exact.expansion.num_features, 3, dtype=torch.float64)
    root = exact.weight_root(z)
    assert 1e-7 < (rough.weight_root(z) - root).norm() / root.norm() < 0.3
    strict = field(1e-6)
    with pytest.raises(ConvergenceError, match=r"residual of 1e-06, got .* after 20 iterations"):
        strict.variance(x)
    with pytest.raises(ConvergenceError, match=r"residual of 1e-06, got .* after 20 iterations"):
        strict.weight_root(z)


@pytest.mark.slow
def test_operations_limit_the_iterations_of_the_mean(monkeypatch):
    kernel, data, draws, noises = problem("helmholtz")
    monkeypatch.setattr(iterations, "_FEWEST", 3)
    accuracy = Accuracy(block=20, permitted_error=1e-9, mean_error=1e-9, operations=0)
    inference = IterativeInference(data, draws, accuracy=accuracy)
    with pytest.raises(ConvergenceError, match="after 3 iterations"):
        inference.posterior(kernel, noises, None)


def test_draws_do_not_depend_on_whether_a_basis_is_kept(monkeypatch):
    kernel, data, draws, noises = problem("line")
    inference = IterativeInference(data, draws, accuracy=Accuracy(block=20))
    posterior = inference.posterior(kernel, noises, None).distribution.split()[0]
    z = normal(posterior.expansion.num_features, 3)
    kept = posterior.weight_root(z)
    monkeypatch.setattr(iterations, "_MOST_KEPT", 0)
    assert torch.equal(posterior.weight_root(z), kept)


def test_iterations_serve_large_grids_of_many_values(monkeypatch):
    """Whose covariance would take long to make of a matrix of features."""
    kernel, data, draws, _ = problem("helmholtz")
    assert type(feature_inference(data, draws, kernel)) is FeatureInference
    monkeypatch.setattr(iterative, "most_factorised", lambda device: 10)
    assert type(feature_inference(data, draws, kernel)) is FeatureInference
    products = data.num_values**2 * num_features(kernel, draws)
    monkeypatch.setattr(iterative, "_MOST_PRODUCTS", 0.9 * products)
    assert type(feature_inference(data, draws, kernel)) is IterativeInference


@pytest.mark.parametrize(("gib", "features"), [(4, 8192), (15, 14188), (64, 20_000)])
def test_memory_limits_the_features_that_are_factorised(monkeypatch, gib, features):
    """Five matrices of F² numbers take at most half of the memory."""
    monkeypatch.setattr(iterative, "_memory", lambda device: gib * 2**30)
    assert iterative.most_factorised(torch.device("cpu")) == features


def test_systems_that_do_not_tell_their_memory_count_as_having_8_gib(monkeypatch):
    monkeypatch.delattr("os.sysconf")
    assert iterative.most_factorised(torch.device("cpu")) == 10362


@pytest.fixture
def model(monkeypatch):
    """A model whose grid counts as a large one."""
    monkeypatch.setattr(iterative, "MOST_DENSE", 100)
    monkeypatch.setattr(iterative, "_LARGEST", 100)
    x = 2 * uniform(150, 2, seed=1)
    y = torch.stack([torch.sin(3 * x[:, 1]), torch.cos(3 * x[:, 0])], -1) + 0.1 * normal(150, 2)
    rule = gp_orff.Grid(domain=((0.0, 2.0),) * 2, tolerance=1e-3)
    model = gp_orff.VectorFieldGP(gp_orff.HelmholtzKernel(num_dims=2), frequencies=rule).double()
    return model.condition(x, y)


def test_models_work_by_iterations(model, tmp_path):
    assert isinstance(model.state.inference, IterativeInference)
    field, x = model.posterior(), 2 * uniform(20, 2, seed=9)
    joint = field(x)
    torch.testing.assert_close(joint.mean, field.mean(x))
    torch.testing.assert_close(joint.variance, field.variance(x), rtol=1e-5, atol=1e-9)
    assert field.divergence(x).variance.min() > 0
    assert field.potential(x, reference=torch.zeros(2)).variance.min() > 0
    assert field.part("curl_free").variance(x).shape == (20, 2)
    paths = field.sample_paths(200)(x)
    error = (paths.mean(0) - field.mean(x)) / field.variance(x).sqrt()
    assert error.abs().max() < 5 / 200**0.5
    model.save(tmp_path / "model.pt")
    loaded = gp_orff.VectorFieldGP.load(tmp_path / "model.pt")
    torch.testing.assert_close(loaded.posterior().mean(x), field.mean(x), rtol=1e-4, atol=1e-4)
    updated = model.update(x, field.mean(x))
    assert isinstance(updated.state.inference, IterativeInference)
    assert "features" in str(model.report)
    curvature = Curvature(model.state.snapshot(model.mean), frozenset({"noise"}))
    assert "no standard errors" in curvature.standard_errors.remarks[0]
    assert model.log_marginal_likelihood().isfinite()
    assert len(model.statistics.groups) == 1


def test_kernels_whose_evidences_are_close_are_tied():
    names = ["a", "b", "c"]
    evidence, errors = (
        dict(zip(names, (-10.0, -13.0, -30.0), strict=True)),
        dict.fromkeys(names, 2.0),
    )
    models = dict.fromkeys(names, gp_orff.VectorFieldGP(gp_orff.HelmholtzKernel(num_dims=2)))
    comparison = KernelComparison(evidence, models, 100, errors)
    assert comparison.tied("a", "b")
    assert not comparison.tied("b", "c")
    with pytest.warns(UserWarning, match="does not determine the best of"):
        _ = comparison.best
    assert [line.count("tied") for line in str(comparison).splitlines()] == [0, 0, 1, 0]
    exact = KernelComparison(evidence, models, 100)
    assert exact.best is models["a"]
    assert not exact.tied("a", "a")


def test_a_model_takes_a_smaller_grid_where_iterations_do_not_converge(monkeypatch):
    """After a search that the user should not lose; a grid of the user's own raises."""
    x, y = uniform(800, 2, seed=1), torch.sin(40 * uniform(800, 2, seed=1))

    def failing(*arguments):
        raise ConvergenceError("no convergence")

    monkeypatch.setattr(representation, "MOST_EXACT", 0)
    monkeypatch.setattr(representation, "MOST_DENSE", 60)
    monkeypatch.setattr(iterative, "MOST_DENSE", 60)
    monkeypatch.setattr(iterative, "_LARGEST", 60)
    monkeypatch.setattr(iterations, "solve", failing)
    kernel = gp_orff.CurlFreeKernel(num_dims=2)
    kernel.base_kernel.lengthscale = 0.2
    model = gp_orff.VectorFieldGP(kernel, frequencies=gp_orff.Auto(exact_values=0))
    with pytest.warns(gp_orff.GridWarning, match="a smaller grid was used"):
        model.condition(x, y, merge=0)
    assert model.report.features <= 60
    assert any("no convergence" in note for note in model.report.notes)
    given = gp_orff.VectorFieldGP(kernel, frequencies=gp_orff.Grid.for_data(x, max_features=500))
    with pytest.raises(ConvergenceError):
        given.condition(x, y, merge=0)
