"""Symbols of posteriors, compared with autograd, exact kernels, each other, and closed forms."""

import itertools
import re

import gpytorch
import pytest
import torch
from gpytorch.kernels import ConstantKernel, MaternKernel, MultitaskKernel, RBFKernel, ScaleKernel
from torch.autograd.functional import jacobian

import gp_orff
from gp_orff import (
    Background,
    BoxAverage,
    Component,
    Curl,
    CurlFreePart,
    Divergence,
    DivergenceFreePart,
    Flux,
    Jacobian,
    LineIntegral,
    Potential,
    StreamFunction,
    VectorPotential,
)
from gp_orff.kernels.derivatives import SymbolCovariance, derivatives
from tests.support.fields import ALGEBRAS, conditioned, draw, helmholtz, model_of, symbols, uniform

pytestmark = pytest.mark.usefixtures("no_check_of_random_features")


@pytest.mark.slow
@pytest.mark.parametrize("d", [2, 3])
@pytest.mark.parametrize("rule", ALGEBRAS)
def test_means_are_those_of_autograd(rule, d):
    """Derivatives of the mean of the field, and the mean of the field as a derivative: 1e-8."""
    own = gp_orff.Grid.for_data(uniform(60, 3), tolerance=1e-3) if d == 3 else ALGEBRAS["grid"]
    field = model_of(helmholtz(d), own if rule == "grid" else ALGEBRAS[rule], d).posterior()
    x = uniform(7, d, seed=5)
    slopes = jacobian(lambda z: field.mean(z).sum(0), x).permute(1, 0, 2)  # (n, i, j)

    def same(found, expected):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-8 * slopes.abs().max().item())

    same(field.jacobian(x).mean.reshape(slopes.shape), slopes)
    same(field.divergence(x).mean, slopes.diagonal(dim1=1, dim2=2).sum(-1))
    if d == 2:
        same(field.curl(x).mean, slopes[:, 1, 0] - slopes[:, 0, 1])
    else:
        i, j = [2, 0, 1], [1, 2, 0]
        same(field.curl(x).mean, slopes[:, i, j] - slopes[:, j, i])

    def gradient(symbol):
        return jacobian(lambda z: field.mean(z, symbol).sum(0), x).permute(1, 0, 2)

    curl_free, rest = field.curl_free_part(x).mean, field.divergence_free_part(x).mean
    same(gradient(Potential())[:, 0], curl_free)
    background = field.mean(x) - curl_free - rest
    same(background, background[:1].expand_as(background))
    if d == 2:
        slope = gradient(StreamFunction())[:, 0]
        same(torch.stack([slope[:, 1], -slope[:, 0]], dim=-1), rest)
    elif rule != "exact":
        slope = gradient(VectorPotential())
        same(
            torch.stack([slope[:, a, b] - slope[:, b, a] for a, b in ((2, 1), (0, 2), (1, 0))], -1),
            rest,
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernel", "d"),
    [(RBFKernel, 2), (RBFKernel, 3), (lambda: MaternKernel(nu=2.5), 2)],
    ids=["rbf-2", "rbf-3", "matern-2"],
)
def test_features_are_the_exact_kernel(kernel, d):
    """Means, variances, covariances of every symbol; what the grid cuts and the cell around zero
    are in. Matérn 5/2 for what needs no derivative: what a grid cuts of one is most of it."""
    smooth = kernel is RBFKernel
    built = helmholtz(d, kernel)
    rule = gp_orff.Grid(
        domain=((0, 2),) * d,
        tolerance=1e-8 if smooth else 1e-6,
        lengthscale_range=(1, 1),
        max_features=None if smooth else 3000,
    )
    exact = model_of(built, None, d).posterior()
    grid = model_of(built, rule, d).posterior()
    x = uniform(6, d, seed=5)
    for symbol in symbols(d):
        if symbol.order > 0 and not smooth:
            continue
        one, other = grid(x, symbol), exact(x, symbol)
        scale = exact.variance(x, symbol).sqrt().mean().item()
        tolerance = 2e-3 if smooth else 0.12  # of a standard deviation
        torch.testing.assert_close(one.mean, other.mean, rtol=0, atol=tolerance * scale)
        tolerance = 1e-4 if smooth else 0.05
        torch.testing.assert_close(
            one.covariance_matrix, other.covariance_matrix, rtol=0, atol=tolerance * scale**2
        )
        torch.testing.assert_close(
            grid.variance(x, symbol).flatten(), one.covariance_matrix.diagonal()
        )


@pytest.mark.parametrize("rule", ALGEBRAS)
def test_parts_and_background_are_the_field(rule):
    field = model_of(helmholtz(2), ALGEBRAS[rule], 2).posterior()
    x = uniform(30, 2, seed=5)
    parts = field.mean(x, CurlFreePart()) + field.mean(x, DivergenceFreePart())
    background = field.mean(x, Background())
    assert background.abs().max() > 1  # the constant mean is in neither part
    assert torch.equal(background, background[:1].expand_as(background))
    torch.testing.assert_close(parts + background, field.mean(x), rtol=0, atol=1e-10)


@pytest.mark.parametrize("rule", ["grid", "primal", "dual"])
def test_covariances_are_those_of_the_maps(rule):
    """A composition in two steps is one of the combined symbol; rows of maps that are linear
    combinations of others have their variances."""
    field = model_of(helmholtz(2), ALGEBRAS[rule], 2).posterior()
    x = uniform(9, 2, seed=5)
    trace = Component([1.0, 0.0, 0.0, 1.0]) @ Jacobian()
    turned = Component([0.0, -1.0, 1.0, 0.0]) @ Jacobian()
    for one, other in ((trace, Divergence()), (turned, Curl())):
        torch.testing.assert_close(field.mean(x, one), field.mean(x, other))
        torch.testing.assert_close(
            field(x, one).covariance_matrix, field(x, other).covariance_matrix
        )
    none = Divergence() @ DivergenceFreePart()
    assert field.mean(x, none).abs().max() < 1e-9
    assert field.variance(x, none).max() < 1e-9
    torch.testing.assert_close(
        field.mean(x, Divergence() @ CurlFreePart()), field.mean(x, Divergence())
    )


@pytest.mark.parametrize("rule", ["exact", "grid", "dual"])
def test_integrals_are_quadratures_of_the_field(rule):
    field = model_of(helmholtz(2), ALGEBRAS[rule], 2).posterior()
    x = 0.7 * uniform(3, 2, seed=5)  # within the domain of one grid
    square = torch.tensor([[0.0, 0], [0.5, 0], [0.5, 0.5], [0, 0.5], [0, 0]]).double()
    t = ((torch.arange(2000) + 0.5) / 2000).double()
    line, flux = torch.zeros(3, 1).double(), torch.zeros(3, 1).double()
    for a, b in itertools.pairwise(square):
        along = torch.stack([field.mean(p + a + t[:, None] * (b - a)).mean(0) for p in x])
        line += along @ (b - a)[:, None]
        flux += along @ torch.stack([(b - a)[1], -(b - a)[0]])[:, None]
    torch.testing.assert_close(field.mean(x, LineIntegral(square)), line, rtol=0, atol=1e-6)
    torch.testing.assert_close(field.mean(x, Flux(square)), flux, rtol=0, atol=1e-6)
    # Stokes and Gauss: circulation and flux are means of curl and divergence over the square
    middle = x + 0.25
    stokes = 0.25 * field.mean(middle, Curl() @ BoxAverage(0.5)) if rule != "exact" else None
    if stokes is not None:
        torch.testing.assert_close(field.mean(x, LineIntegral(square)), stokes)
        gauss = 0.25 * field.mean(middle, Divergence() @ BoxAverage(0.5))
        torch.testing.assert_close(field.mean(x, Flux(square)), gauss)
    coarse = ((torch.arange(60) + 0.5) / 60).double()
    inside = torch.cartesian_prod(coarse, coarse) * 0.5
    mean = torch.stack([field.mean(p + inside).mean(0) for p in x])
    torch.testing.assert_close(field.mean(middle, BoxAverage(0.5)), mean, rtol=0, atol=1e-3)


def test_potentials_start_at_their_reference():
    for rule in ("exact", "grid", "dual"):
        field = model_of(helmholtz(2), ALGEBRAS[rule], 2).posterior()
        x0 = torch.tensor([0.7, 0.4])
        at = x0.double().unsqueeze(0)
        for symbol in (Potential(x0), StreamFunction(x0)):
            assert field.mean(at, symbol).abs() < 1e-6
            assert 0 <= field.variance(at, symbol) < 1e-5  # what a grid cuts, twice
        far, near = at + 0.5, at + 0.1
        assert field.potential(far, x0).variance > field.potential(near, x0).variance > 1e-6


def test_what_does_not_exist_is_refused():
    rough = gp_orff.CurlFreeKernel(MaternKernel(nu=1.5), num_dims=2)
    for rule in (None, gp_orff.MonteCarlo(20)):
        field = model_of(ScaleKernel(rough), rule, 2).posterior()
        for symbol in (Divergence(), Jacobian(), Curl()):
            with pytest.raises(
                ValueError, match=r"nu=1.5, for which its variance is infinite.*nu > 2"
            ):
                field.mean(uniform(2, 2), symbol)
        field.potential(uniform(2, 2))
    separable = MultitaskKernel(RBFKernel(), num_tasks=2, rank=1)
    field = model_of(separable, gp_orff.MonteCarlo(20), 2).posterior()
    with pytest.raises(ValueError, match="reference=x0"):
        field.potential(uniform(2, 2))
    field.potential(uniform(2, 2), reference=[0.0, 0.0])
    field.divergence(uniform(2, 2))
    with pytest.raises(ValueError, match="exists in 3 dimensions, got 2"):
        field.vector_potential(uniform(2, 2))
    with pytest.raises(ValueError, match="a reference of 2 coordinates"):
        field.potential(uniform(2, 2), reference=[0.0])
    with pytest.raises(ValueError, match="a direction of 2 numbers, got 3"):
        field(uniform(2, 2), Component([1.0, 0.0, 0.0]))
    with pytest.raises(ValueError, match="corners with 2 coordinates"):
        field(uniform(2, 2), LineIntegral(uniform(3, 3)))
    with pytest.raises(ValueError, match="at least two corners"):
        LineIntegral(uniform(1, 2))
    three = MultitaskKernel(RBFKernel(), num_tasks=3, rank=1)
    model = gp_orff.VectorFieldGP(three, frequencies=gp_orff.MonteCarlo(20))
    field = model.condition(uniform(20, 2), uniform(20, 3)).posterior()
    with pytest.raises(ValueError, match="one component for each of its 2 inputs"):
        field.divergence(uniform(2, 2))
    assert field.jacobian(uniform(2, 2)).mean.shape == (2, 6)


def variance_of_divergence(field, x, step=1e-3):
    """In columns 1 and 2, by central differences of the covariance of the field."""
    h = step * torch.eye(3).double()[1:]
    weights = torch.zeros(4, 2).double()
    weights[[0, 1], [0, 1]], weights[[2, 3], [0, 1]] = 0.5 / step, -0.5 / step
    stencils = (torch.cat([p + h, p - h]) for p in x)
    covariances = torch.stack([field(own).covariance_matrix for own in stencils])
    return torch.einsum("a,nab,b->n", weights.flatten(), covariances, weights.flatten())


@pytest.mark.parametrize("rule", ["exact", "grid"])
def test_space_and_time(rule):
    """Derivatives act on space only, wherever its columns are."""
    kernel = gp_orff.CurlFreeKernel(RBFKernel(), num_dims=2, active_dims=(1, 2))
    kernel = ScaleKernel(kernel * RBFKernel(active_dims=(0,)))
    x = uniform(50, 3)
    model = gp_orff.VectorFieldGP(kernel, frequencies=ALGEBRAS[rule])
    model.likelihood.noise = 0.01
    y = torch.stack([torch.sin(3 * x[:, 1]) * x[:, 0], torch.cos(2 * x[:, 2])], dim=-1)
    field = model.condition(x, y).posterior()
    xs = uniform(5, 3, seed=2)
    slopes = jacobian(lambda z: field.mean(z).sum(0), xs).permute(1, 0, 2)[..., 1:]
    expected = slopes.diagonal(dim1=1, dim2=2).sum(-1)
    torch.testing.assert_close(field.divergence(xs).mean, expected, rtol=0, atol=1e-8)
    torch.testing.assert_close(field.curl(xs).mean, torch.zeros(5).double(), rtol=0, atol=1e-8)
    exact = gp_orff.VectorFieldGP(kernel)
    exact.likelihood.noise = 0.01
    wanted = variance_of_divergence(exact.condition(x, y).posterior(), xs)
    tolerance = 1e-5 if rule == "exact" else 0.02  # of differences; of what the grid cuts
    torch.testing.assert_close(field.divergence(xs).variance, wanted, rtol=tolerance, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("nu", [1.5, 2.5, None])
def test_integrals_of_rough_and_of_long_exact_fields(nu):
    """Over many lengthscales and of kernels with a kink: a circulation of a curl-free field is
    zero, a line integral of it is a difference of potentials."""
    base = RBFKernel() if nu is None else MaternKernel(nu=nu)
    kernel = ScaleKernel(gp_orff.CurlFreeKernel(base, num_dims=2))
    base.lengthscale = 0.7
    mean = gpytorch.means.MultitaskMean(gpytorch.means.ConstantMean(), 2).requires_grad_(False)
    field = model_of(kernel, None, 2, points=30, mean=mean).posterior()
    x = uniform(3, 2, seed=5)
    scale = field.variance(x, LineIntegral(torch.tensor([[0.0, 0.0], [0.7, 0.0]]))).max()
    square = torch.tensor([[0.0, 0], [1, 0], [1, 1], [0, 1], [0, 0]])
    assert field.variance(x, LineIntegral(square)).max() < 5e-3 * scale
    assert field.mean(x, LineIntegral(square)).abs().max() < 1e-3
    far = torch.tensor([8.0, 0.0])
    line = LineIntegral(torch.stack([torch.zeros(2), far]))
    start = torch.zeros(1, 2).double()
    potential = field.potential(far.double().unsqueeze(0), reference=[0.0, 0.0])
    constant = (field.mean(start, Background()) @ far.double()).item()
    expected = potential.mean.item() + constant
    assert field.mean(start, line).item() == pytest.approx(expected, abs=1e-3)
    assert field.variance(start, line).item() == pytest.approx(potential.variance.item(), rel=3e-3)


def test_potentials_in_space_and_time():
    """The constant in space drops out with a reference; the exact kernel and a grid agree."""
    kernel = gp_orff.CurlFreeKernel(RBFKernel(), num_dims=2, active_dims=(1, 2))
    kernel = ScaleKernel(kernel * RBFKernel(active_dims=(0,)))
    x, xs = uniform(50, 3), uniform(5, 3, seed=2)
    y = torch.stack([torch.sin(3 * x[:, 1]) * x[:, 0], torch.cos(2 * x[:, 2])], dim=-1)
    found = []
    for own in (None, gp_orff.Grid(domain=((-0.5, 2.5),) * 3, tolerance=1e-4)):
        model = gp_orff.VectorFieldGP(kernel, frequencies=own)
        model.likelihood.noise = 0.01
        field = model.condition(x, y).posterior()
        found.append(field(xs, Potential([1.0, 1.0])))
        if own is not None:
            with pytest.raises(ValueError, match="reference=x0"):
                field.potential(xs)
    exact, grid = found
    sd = exact.stddev.max()
    torch.testing.assert_close(grid.mean, exact.mean, rtol=0, atol=0.01 * sd.item())
    torch.testing.assert_close(
        grid.covariance_matrix, exact.covariance_matrix, rtol=0, atol=0.02 * sd.item() ** 2
    )


def test_points_a_symbol_looks_at_are_served():
    """By a wider grid, or refused: never aliased. Of a reference, a path, a box."""
    kernel = helmholtz(2)
    exact = model_of(kernel, None, 2).posterior()
    grid = model_of(kernel, gp_orff.Auto(exact_values=0, tolerance=1e-6), 2).posterior()
    x = uniform(3, 2, seed=5)
    symbols = {
        "reference": Potential([6.0, 1.0]),
        "path": LineIntegral(torch.tensor([[0.0, 0.0], [5.0, 0.0]])),
        "box": BoxAverage((6.0, 1.0)),
    }
    for symbol in symbols.values():
        one, other = grid.variance(x, symbol), exact.variance(x, symbol)
        torch.testing.assert_close(one, other, rtol=0.02, atol=0)
        with pytest.raises(ValueError, match="inside the grid's domain"):
            grid.sample_paths(2)(x, symbol)


@pytest.mark.parametrize("rule", ALGEBRAS)
def test_the_terms_of_a_sum(rule):
    """They add up, are the curl-free and the divergence-free part where they have nothing else, and
    have the covariance of dense algebra."""
    kernel = helmholtz(2) + MultitaskKernel(RBFKernel(), num_tasks=2, rank=0)
    model = model_of(kernel, ALGEBRAS[rule], 2)
    field, x = model.posterior(), uniform(6, 2, seed=5)
    parts = [field.part(i) for i in range(2)]
    rest = parts[-1]
    constant = torch.stack([m.constant.detach() for m in model.mean.base_means]).flatten()
    total = sum(part.mean(x) for part in parts) + constant
    torch.testing.assert_close(total, field.mean(x), rtol=0, atol=1e-8)
    first = rest.mean(x, Component([1.0, 0.0])).flatten()
    torch.testing.assert_close(first, rest.mean(x)[:, 0])
    if rule in ("exact", "grid"):
        exact, data = model.kernel.requires_grad_(False), model.state.data.observations[0]
        part = exact.kernels[2]
        noise = model.likelihood.noise.item()
        noisy = exact(data.x).to_dense() + noise * torch.eye(120).double()
        cross = part(x, data.x).to_dense()
        wanted = part(x).to_dense() - cross @ torch.linalg.solve(noisy, cross.mT)
        wanted = wanted + of_unknown_mean(cross, noisy)
        atol = 1e-8 if rule == "exact" else 2e-3
        torch.testing.assert_close(rest(x).covariance_matrix, wanted, rtol=0, atol=atol)


SCALED = "scaled field + separable"
SUMS = {
    "field + separable": lambda: [helmholtz(2), _tasks()],
    "separable + field": lambda: [_tasks(), helmholtz(2)],
    "field + field": lambda: [helmholtz(2), _shorter(helmholtz(2))],
    "three": lambda: [helmholtz(2), _tasks(), _shorter(helmholtz(2))],
    SCALED: lambda: [ScaleKernel(helmholtz(2)), _tasks()],
    "halves by hand": lambda: [helmholtz(2).divergence_free, helmholtz(2).curl_free],
}


def of_unknown_mean(cross, noisy):
    """k K⁻¹H (HᵀK⁻¹H)⁻¹ HᵀK⁻¹kᵀ: what an unknown mean adds to the covariance of a part."""
    ones = torch.eye(2).double().repeat(len(noisy) // 2, 1)
    solved = torch.linalg.solve(noisy, ones)
    effect = cross @ solved
    return effect @ torch.linalg.solve(ones.mT @ solved, effect.mT)


def _shorter(kernel):
    kernel.curl_free.base_kernel.base_kernel.lengthscale = 0.6
    return kernel


def _tasks():
    return MultitaskKernel(RBFKernel(), num_tasks=2, rank=0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "rule"), [*((name, "exact") for name in SUMS), ("three", "grid"), (SCALED, "grid")]
)
def test_parts_follow_the_expression_although_gpytorch_flattens_sums(name, rule, tmp_path):
    """Each summand against dense algebra, and after a file; halves have names."""
    summands = SUMS[name]()
    kernel = summands[0]
    for summand in summands[1:]:
        kernel = kernel + summand
    fine = gp_orff.Grid(domain=((-1.0, 1.0),) * 2, tolerance=1e-6)
    model = model_of(kernel, ALGEBRAS["exact"] if rule == "exact" else fine, 2)
    model.save(tmp_path / "model.pt")
    for own in (model, gp_orff.VectorFieldGP.load(tmp_path / "model.pt")):
        field, xs = own.posterior(), uniform(6, 2, seed=5)
        data = model.state.data.observations[0]
        constant = torch.stack([m.constant.detach() for m in model.mean.base_means]).flatten()
        noisy = sum(k.double()(data.x).to_dense() for k in summands).detach()
        noisy = noisy + model.likelihood.noise.item() * torch.eye(len(noisy)).double()
        residual = (data.y - constant).flatten()
        atol = 1e-8 if rule == "exact" else 1e-3  # a thousand times the tolerance of the grid
        for i, summand in enumerate(summands):
            choices = [(field.part(i), summand)]
            if isinstance(summand, gp_orff.HelmholtzKernel):
                choices.append((field.part(i).part("curl_free"), summand.curl_free))
            for part, k in choices:
                cross = k(xs, data.x).to_dense().detach()
                mean = (cross @ torch.linalg.solve(noisy, residual)).reshape(6, 2)
                torch.testing.assert_close(part.mean(xs), mean, rtol=0, atol=atol)
                variance = k(xs).to_dense().detach() - cross @ torch.linalg.solve(noisy, cross.mT)
                variance = variance + of_unknown_mean(cross, noisy)
                variance = variance.diagonal().reshape(6, 2)
                torch.testing.assert_close(part.variance(xs), variance, rtol=0, atol=atol)
        with pytest.raises(ValueError, match=f"its index below {len(summands)}"):
            field.part(len(summands))
        if sum(isinstance(k, gp_orff.HelmholtzKernel) for k in summands) > 1:
            with pytest.raises(ValueError, match=r"part\(0\).part\('curl_free'\)"):
                field.part("curl_free")


@pytest.mark.parametrize("rule", ALGEBRAS)
def test_the_parts_of_a_helmholtz_kernel(rule):
    field, x = model_of(helmholtz(2), ALGEBRAS[rule], 2).posterior(), uniform(6, 2, seed=5)
    for name, symbol in {
        "curl_free": CurlFreePart(),
        "divergence_free": DivergenceFreePart(),
    }.items():
        part = field.part(name)
        torch.testing.assert_close(part.mean(x), field.mean(x, symbol), rtol=0, atol=1e-8)
        one, other = part(x).covariance_matrix, field(x, symbol).covariance_matrix
        torch.testing.assert_close(one, other, rtol=0, atol=1e-7)
    assert field.part("curl_free").variance(x, Curl()).max() < 1e-8
    if rule == "exact":
        with pytest.raises(NotImplementedError, match="no sample paths"):
            field.part("curl_free").sample_paths(2)
    else:
        paths = field.part("curl_free").sample_paths(3, seed=1)
        whole = field.sample_paths(3, seed=1)(x, CurlFreePart())
        torch.testing.assert_close(paths(x), whole, rtol=0, atol=1e-8)
    for wrong in ("gradient", 2, "kernels"):
        with pytest.raises(ValueError, match="a term of a sum of kernels"):
            field.part(wrong)


@pytest.mark.slow
def test_features_that_truncate_much_say_so():
    """A vector potential of a rough field; of a smooth one the grid is as good (below). What a grid
    of most features lacks is the same under twice the noise, of which it is half the share."""

    def told(noise):
        model = conditioned(helmholtz(3, MaternKernel), uniform(30, 3), draw(30, 3), None, noise)
        with pytest.warns(gp_orff.GridWarning, match="VectorPotential has no closed") as caught:
            model.posterior().vector_potential(uniform(2, 3, seed=5))
        model.posterior().divergence_free_part(uniform(2, 3, seed=5))  # which has one
        return float(re.search(r"is ([\d.e+-]+) times the noise", str(caught[0].message))[1])

    assert told(0.05) == pytest.approx(2 * told(0.1), rel=0.1)  # two digits are told


@pytest.mark.slow
def test_what_has_no_closed_form_takes_features():
    """Under the exact kernel of small data: a vector potential, a part of a separable kernel, an
    average of a derivative; anywhere, against a grid made for them."""
    x = uniform(5, 3, seed=5)
    domain = ((-1.0, 3.0),) * 3
    exact = model_of(helmholtz(3), None, 3).posterior()
    grid = gp_orff.Grid(domain=domain, tolerance=1e-3, lengthscale_range=(1, 1))
    fine = model_of(helmholtz(3), grid, 3).posterior()
    symbol = VectorPotential()
    sd = fine.variance(x, symbol).sqrt()
    assert ((exact.mean(x, symbol) - fine.mean(x, symbol)) / sd).abs().max() < 0.1
    torch.testing.assert_close(exact.variance(x, symbol).sqrt(), sd, rtol=0.01, atol=0)
    far = x + 4.0
    assert exact.vector_potential(far).variance.mean() > exact.vector_potential(x).variance.mean()
    slopes = jacobian(lambda z: exact.mean(z, symbol).sum(0), x).permute(1, 0, 2)
    pairs = ((2, 1), (0, 2), (1, 0))
    curl = torch.stack([slopes[:, a, b] - slopes[:, b, a] for a, b in pairs], dim=-1)
    part = exact.mean(x, DivergenceFreePart())
    torch.testing.assert_close(curl, part, rtol=0, atol=2e-2)  # of a grid, and exact

    torch.manual_seed(0)  # gpytorch starts task covariances at random
    separable = MultitaskKernel(RBFKernel(), num_tasks=2, rank=1)
    exact = model_of(separable, None, 2).posterior()
    x = uniform(5, 2, seed=5)
    both = exact.mean(x, CurlFreePart()) + exact.mean(x, DivergenceFreePart())
    total = both + exact.mean(x, Background())
    spread = (total - exact.mean(x)).std(0)  # a grid's slowest wave is constant
    assert (spread < 1e-2).all()
    field = model_of(helmholtz(2), None, 2).posterior()
    middles = 0.5 * (torch.arange(8).double() + 0.5) / 8 - 0.25
    cells = torch.cartesian_prod(middles, middles)
    inside = torch.stack([field.mean(p + cells, Divergence()).mean() for p in x])
    found = field.mean(x, Divergence() @ BoxAverage(0.5)).flatten()
    sd = field.variance(x, Divergence()).sqrt().max().item()
    torch.testing.assert_close(found, inside, rtol=0, atol=0.03 * sd)  # of the grid: 0.017


def test_what_varies_in_time_only_is_background():
    field_kernel = gp_orff.CurlFreeKernel(RBFKernel(), num_dims=2, active_dims=(0, 1))
    offset = MultitaskKernel(RBFKernel(), num_tasks=2, rank=0, active_dims=(2,))
    kernel = ScaleKernel(field_kernel) + offset
    rule = gp_orff.Grid(domain=((-0.5, 2.5),) * 3, tolerance=1e-4)
    x, xs = uniform(60, 3), uniform(4, 3, seed=2)
    y = torch.stack([torch.sin(3 * x[:, 0]) + x[:, 2], torch.cos(2 * x[:, 1])], dim=-1)
    model = gp_orff.VectorFieldGP(kernel, frequencies=rule)
    model.likelihood.noise = 0.01
    field = model.condition(x, y).posterior()
    gradient = jacobian(lambda z: field.mean(z, Potential([0.0, 0.0])).sum(0), xs)[0, :, :2]
    torch.testing.assert_close(gradient, field.curl_free_part(xs).mean, rtol=0, atol=1e-8)
    torch.testing.assert_close(field.part(0).mean(xs), field.curl_free_part(xs).mean)
    assert (field.potential(xs, reference=[0.0, 0.0]).variance > 0).all()


def test_a_spectral_mixture_has_symbols():
    """On a grid, whose cut is known by quadrature only: divergence against autograd."""
    mixture = gpytorch.kernels.SpectralMixtureKernel(num_mixtures=2, ard_num_dims=2)
    mixture.mixture_scales = 0.2 * torch.ones(2, 1, 2)
    mixture.mixture_means = torch.tensor([[[0.1, 0.2]], [[0.3, 0.0]]])
    kernel = ScaleKernel(gp_orff.CurlFreeKernel(mixture, num_dims=2))
    rule = gp_orff.Grid(domain=((0, 2),) * 2, tolerance=1e-4)
    field = model_of(kernel, rule, 2).posterior()
    x = uniform(4, 2, seed=5)
    slopes = jacobian(lambda z: field.mean(z).sum(0), x).permute(1, 0, 2)
    divergence = field.divergence(x)
    expected = slopes.diagonal(dim1=1, dim2=2).sum(-1)
    torch.testing.assert_close(divergence.mean, expected, rtol=0, atol=1e-8)
    assert (divergence.variance > 0).all()


@pytest.mark.parametrize("rule", ALGEBRAS)
def test_covariances_at_every_point(rule):
    field, x = model_of(helmholtz(2), ALGEBRAS[rule], 2).posterior(), uniform(5, 2, seed=5)
    for symbol in (None, CurlFreePart(), Potential([0.5, 0.5])):
        joint = field(x, symbol).covariance_matrix
        q = len(joint) // 5
        blocks = joint.reshape(5, q, 5, q).diagonal(dim1=0, dim2=2).permute(2, 0, 1)
        found = field.pointwise_covariance(x, symbol)
        torch.testing.assert_close(found, blocks, rtol=1e-7, atol=1e-9)


def test_a_constant_term_is_background():
    kernel = helmholtz(2) + MultitaskKernel(ConstantKernel(), num_tasks=2, rank=0)
    zero = gpytorch.means.ZeroMean()
    field = model_of(kernel, gp_orff.Auto(exact_values=0), 2, mean=zero).posterior()
    x = uniform(5, 2, seed=5)
    without = field.mean(x) - field.mean(x, CurlFreePart()) - field.mean(x, DivergenceFreePart())
    torch.testing.assert_close(without, without[:1].expand_as(without))
    assert without.abs().min() > 1
    torch.testing.assert_close(field.mean(x, Background()), without)
    assert (field.variance(x, Background()) > 0).all()
    assert field.variance(x, Divergence()).min() > 0


def test_a_symbol_of_ones_own():
    class Strain(gp_orff.Symbol):
        """½(∂₁f₂ + ∂₂f₁)."""

        order, homogeneous = 1, True

        def num_outputs(self, p):
            return 1

        def __call__(self, omega, p):
            return 0.5j * omega.flip(-1).unsqueeze(-2)

    shear = Component([0.0, 0.5, 0.5, 0.0]) @ Jacobian()
    for rule in ("exact", "grid", "dual"):
        field = model_of(helmholtz(2), ALGEBRAS[rule], 2).posterior()
        x = uniform(5, 2, seed=5)
        one, other = field(x, Strain()), field(x, shear)
        torch.testing.assert_close(one.mean, other.mean)
        torch.testing.assert_close(one.covariance_matrix, other.covariance_matrix)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", [RBFKernel, lambda: MaternKernel(nu=2.5)], ids=["rbf", "matern"])
def test_derivatives_of_kernels(kernel):
    """Against automatic differentiation of the formula, up to the fourth."""
    kernel = kernel().double()
    kernel.lengthscale = 0.7
    lengthscale = kernel.lengthscale.item()

    def formula(t):
        r = (t / lengthscale).square().sum(-1)
        if isinstance(kernel, RBFKernel):
            return torch.exp(-0.5 * r)
        z = (5 * r).sqrt()
        return (1 + z + z * z / 3) * torch.exp(-z)

    tau = torch.tensor([0.3, -0.5]).double()
    function = formula
    for order in range(5):
        expected = function(tau)
        found = derivatives(kernel, tau.reshape(1, 1, 2), order)[0, 0]
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
        function = torch.func.jacfwd(function)


def test_fourth_derivatives_at_zero_are_moments():
    """E ω₁⁴ = 3 (E‖z‖⁴/8) / ℓ⁴ for the spectral law, a third of it for E ω₁² ω₂²."""
    kernel, lengthscale = MaternKernel(nu=2.5).double(), 0.7
    kernel.lengthscale = lengthscale
    at_zero = derivatives(kernel, torch.zeros(1, 1, 2).double(), 4)[0, 0]
    fourth = gp_orff.spectrum(kernel).moment(2, 2) * 3 / 8 / lengthscale**4
    assert at_zero[0, 0, 0, 0].item() == pytest.approx(fourth, rel=1e-4)
    assert at_zero[0, 0, 1, 1].item() == pytest.approx(fourth / 3, rel=1e-4)


def test_covariance_of_two_symbols():
    """Cov[∇·f(x), ∇×f(z)] of independent parts is zero; of a part with itself the Laplacian."""
    kernel = helmholtz(2)
    x, z = uniform(4, 2), uniform(3, 2, seed=9)
    kernel.requires_grad_(False)
    mixed = SymbolCovariance(kernel, Divergence(), Curl(), (0, 1))
    assert mixed(x, z).abs().max() < 1e-12
    own = SymbolCovariance(kernel, Divergence(), Divergence(), (0, 1))(x, z)
    scale = kernel.curl_free.outputscale.item()
    tau = (x.unsqueeze(1) - z) / 0.8
    r = tau.square().sum(-1)
    expected = scale * (r * r - 8 * r + 8) * torch.exp(-0.5 * r) / 0.8**4  # Δ²k
    torch.testing.assert_close(own, expected, rtol=1e-6, atol=1e-6)
