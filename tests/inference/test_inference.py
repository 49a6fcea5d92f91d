"""Evidence and weight posteriors, compared with dense algebra on the same features."""

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from gp_orff.data.noise import Noise, independent
from gp_orff.data.statistics import Statistics
from gp_orff.features.assemble import merge
from gp_orff.features.columns import SideBySide, TrigColumns
from gp_orff.features.expansion import FeatureExpansion, KroneckerExpansion, apply_symbol
from gp_orff.features.lattice import LatticeColumns
from gp_orff.inference.equations import (
    DenseRows,
    Dual,
    Group,
    equations_of_vectors,
    normal_equations,
    prefers_dual,
    with_ones,
)
from gp_orff.inference.posteriors import DualPosterior, PlusConstant, PlusWhite
from gp_orff.inference.separable import DualBlocks, KroneckerPosterior
from gp_orff.symbols.integrals import LineIntegral
from gp_orff.symbols.pointwise import StreamFunction
from tests.support import oracles
from tests.support.fields import draw


def weight_posterior(*given):
    """Of vectors of mean zero."""
    return equations_of_vectors(*given).posterior(torch.zeros(2).double())[0]


def spd(size, seed=0):
    root = draw(size, size, seed=seed)
    return root @ root.mT / size + 0.5 * torch.eye(size, dtype=torch.float64)


def feature_expansion():
    columns = torch.tensor([0, 0, 1, 2, 3, 3, 4, 5, 2])  # some columns twice, out of order
    return FeatureExpansion(TrigColumns.of(draw(3, 2)), 0.5 * draw(9, 2, seed=1), columns)


def kronecker_expansion(rank=2):
    return KroneckerExpansion(
        TrigColumns.of(draw(3, 2)), 0.2 + draw(6, 1, seed=1).abs(), draw(2, rank, seed=2)
    )


def lattice_expansion():
    indices = torch.tensor([[0, 0], [0, 1], [1, -1], [1, 0]])
    phi = LatticeColumns.of(indices, torch.tensor([0.7, 0.5]).double(), draw(2, seed=7))
    return FeatureExpansion(phi, 0.5 * draw(7, 2, seed=8), torch.tensor([0, 1, 2, 3, 5, 6, 7]))


EXPANSIONS = {
    "features": feature_expansion,
    "kronecker": kronecker_expansion,
    "kronecker_rank_one": lambda: kronecker_expansion(rank=1),
    "kronecker_rank_three": lambda: kronecker_expansion(rank=3),
    "merged": lambda: merge([feature_expansion(), kronecker_expansion()]),
    "side_by_side": lambda: merge([lattice_expansion(), feature_expansion()]),
}


def written_out(expansion, x):
    """Φ(x) by loops over the definition f(x) = Σ_f θ_f trig_f(x) m_f."""
    full = expansion.general()
    rows = []
    for point in x:
        values = columns_at(full.phi, point)
        for output in range(full.num_outputs):
            used = enumerate(full.columns.tolist())
            row = [values[column] * full.directions[feature, output] for feature, column in used]
            rows.append(torch.stack(row))
    return torch.stack(rows)


def columns_at(phi, point):
    """cos and sin of every frequency, family after family."""
    if isinstance(phi, SideBySide):
        return [value for own in phi.families for value in columns_at(own, point)]
    origin = phi.origin if isinstance(phi, LatticeColumns) else 0.0
    phases = [(omega * (point - origin)).sum() for omega in phi.omega]
    return [p.cos() for p in phases] + [p.sin() for p in phases]


@pytest.mark.slow
@pytest.mark.parametrize("points", [2, 60], ids=["dual", "primal"])
@pytest.mark.parametrize("name", EXPANSIONS)
def test_evidence_and_posterior_equal_dense_algebra(name, points):
    expansion, x, y = EXPANSIONS[name](), draw(points, 2, seed=3), draw(points, 2, seed=4)
    covariance, xs = spd(2), draw(5, 2, seed=5)
    noise = Noise.of(covariance)
    features, test_features = written_out(expansion, x), written_out(expansion, xs)
    torch.testing.assert_close(expansion.features(x), features)
    noisy = features @ features.mT + torch.kron(torch.eye(points), covariance)

    found = equations_of_vectors(expansion, x, y, noise).evidence()
    for mean in (torch.zeros(2).double(), draw(2, seed=6)):
        expected = oracles.log_density(noisy, y - mean)
        torch.testing.assert_close(found.log_density(mean, y.numel()), expected, rtol=1e-12, atol=0)
    best = found.best_mean()
    ones = torch.eye(2).double().repeat(points, 1)
    whitened = torch.linalg.solve(noisy, torch.cat([ones, y.reshape(-1, 1)], dim=1))
    gls = torch.linalg.solve(ones.mT @ whitened[:, :2], ones.mT @ whitened[:, 2])
    torch.testing.assert_close(best, gls, rtol=1e-9, atol=1e-9)

    posterior = weight_posterior(expansion, x, y, noise)
    algebra = posterior.inverse if isinstance(posterior, KroneckerPosterior) else posterior
    assert isinstance(algebra, DualPosterior | DualBlocks) == (points == 2)
    mean, cov = oracles.condition(
        test_features @ test_features.mT, test_features @ features.mT, noisy, y
    )
    torch.testing.assert_close(posterior.mean(xs).flatten(), mean, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(posterior.covariance(xs), cov, rtol=1e-10, atol=1e-12)
    variance = posterior.variance(xs).flatten()
    torch.testing.assert_close(variance, cov.diagonal(), rtol=1e-10, atol=1e-12)
    root = posterior.root(xs)
    torch.testing.assert_close(root @ root.mT, cov, rtol=1e-8, atol=1e-8)  # may carry jitter
    theta = draw(expansion.num_features, 3, seed=6)
    eye = torch.eye(len(features.mT), dtype=torch.float64)
    inverse = torch.linalg.inv(
        eye + features.mT @ torch.linalg.solve(torch.kron(torch.eye(points), covariance), features)
    )
    torch.testing.assert_close(posterior.weight_covariance(theta), inverse @ theta)


@pytest.mark.parametrize("name", EXPANSIONS)
def test_both_algebras_agree(name):
    """The statistics and the dual on the same data, whichever is cheaper."""
    expansion, noise = EXPANSIONS[name](), Noise.of(spd(2))
    x, y, xs = draw(8, 2, seed=3), draw(8, 2, seed=4), draw(5, 2, seed=5)
    statistics = Statistics.of(x, y, expansion.phi)
    features, columns = expansion.features(x), with_ones(y)
    rows = DenseRows(features, columns, independent(noise.covariance, 8))
    written_out, summed = (
        Dual(expansion, rows),
        normal_equations(expansion, [Group(statistics, noise)]),
    )
    dual = written_out.evidence()
    torch.testing.assert_close(summed.evidence()[:2], dual[:2])
    for mean in (None, draw(2, seed=6)):
        primal, evidence = summed.posterior(mean)
        torch.testing.assert_close(evidence[:2], dual[:2])
        other, evidence = written_out.posterior(mean)
        torch.testing.assert_close(evidence[:2], dual[:2])
        torch.testing.assert_close(primal.mean(xs), other.mean(xs))
        torch.testing.assert_close(primal.covariance(xs), other.covariance(xs))
        for law in (primal, other):
            blocks = law.covariance(xs).reshape(5, 2, 5, 2)
            expected = torch.stack([blocks[i, :, i] for i in range(5)])
            torch.testing.assert_close(law.blocks(xs), expected)


@pytest.mark.parametrize("name", EXPANSIONS)
def test_rows_beside_statistics_are_all_rows(name):
    """Of further observations with noise of their own, also of separable kernels."""
    expansion, noise = EXPANSIONS[name](), Noise.of(spd(2))
    x, y, xs = draw(8, 2, seed=3), draw(8, 2, seed=4), draw(5, 2, seed=5)
    rows = DenseRows(expansion.features(x), with_ones(y), independent(noise.covariance, 8))
    further = [
        DenseRows(draw(size, expansion.num_features, seed=size), draw(size, 3), spd(size))
        for size in (3, 1)
    ]
    groups = [Group(Statistics.of(x, y, expansion.phi), noise)]
    summed = normal_equations(expansion, groups, further)
    written_out = Dual(expansion, DenseRows.concatenate([rows, *further]))
    torch.testing.assert_close(summed.evidence()[:2], written_out.evidence()[:2])
    one, other = (own.posterior(None) for own in (summed, written_out))
    torch.testing.assert_close(one[1][:2], other[1][:2])
    torch.testing.assert_close(one[0].mean(xs), other[0].mean(xs))
    torch.testing.assert_close(one[0].covariance(xs), other[0].covariance(xs))


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPANSIONS)
@pytest.mark.parametrize("points", [3, 20], ids=["dual", "primal"])
def test_evidence_gradients(name, points):
    """In the data, the noise and every tensor of the expansion, against finite differences."""
    expansion = EXPANSIONS[name]()

    def function(x, y, root, *tensors):
        noise = Noise.of(root @ root.mT + torch.eye(2, dtype=torch.float64))
        evidence = equations_of_vectors(expansion.rebuild(*tensors), x, y, noise).evidence()
        return evidence.quad, evidence.logdet

    leaves = [draw(points, 2, seed=3), draw(points, 2, seed=4), draw(2, 2, seed=5)]
    leaves += [t.clone() for t in expansion.tensors]
    assert gradcheck(function, [t.requires_grad_() for t in leaves])


def test_kronecker_gradients_survive_equal_eigenvalues():
    """LᵀΣ⁻¹L = 1: eigh itself has no derivative there."""
    x, y = draw(20, 2, seed=3), draw(20, 2, seed=4)
    kronecker = KroneckerExpansion(
        TrigColumns.of(draw(3, 2)), torch.ones(6, 1).double(), torch.eye(2, dtype=torch.float64)
    )
    mixing = kronecker.mixing.clone().requires_grad_()
    noise = Noise.of(torch.eye(2, dtype=torch.float64))
    gradients = []
    for form in (lambda e: e, lambda e: e.general()):
        expansion = form(KroneckerExpansion(kronecker.phi, kronecker.scales, mixing))
        groups = [Group(Statistics.of(x, y, expansion.phi), noise)]
        found = normal_equations(expansion, groups).evidence()
        total = found.log_density(torch.zeros(2).double(), y.numel())
        gradients.append(torch.autograd.grad(total, mixing)[0])
    assert gradients[0].isfinite().all()
    torch.testing.assert_close(gradients[0], gradients[1])


def test_the_cheaper_factorisation_is_chosen():
    features, kronecker = feature_expansion(), kronecker_expansion()  # F = 9; 2D = 6, r = 2
    assert prefers_dual(features, 4)  # 8³ < 9³
    assert not prefers_dual(features, 5)
    assert prefers_dual(kronecker, 3)  # 6³ < 2·6³
    assert not prefers_dual(kronecker, 4)  # although N·p = 8 < F = 12
    three = KroneckerExpansion(kronecker.phi, kronecker.scales, draw(3, 3))
    assert prefers_dual(three, 5)  # 3·5³ < 3·6³: blocks of three outputs
    assert not prefers_dual(three, 6)
    assert not prefers_dual(three, 5, whole=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPANSIONS)
@pytest.mark.parametrize("points", [2, 20], ids=["dual", "primal"])
def test_second_derivatives(name, points):
    """Laplace approximations and gradient penalties differentiate the gradient."""
    expansion = EXPANSIONS[name]()

    def function(x, root, *tensors):
        noise = Noise.of(root @ root.mT + torch.eye(2, dtype=torch.float64))
        y, own = draw(points, 2, seed=4), expansion.rebuild(*tensors)
        found = equations_of_vectors(own, x, y, noise).evidence()
        return found.quad.sum() + found.logdet

    leaves = [draw(points, 2, seed=3), draw(2, 2, seed=5), *expansion.tensors]
    assert gradgradcheck(function, [t.clone().requires_grad_() for t in leaves])


def test_second_derivatives_of_predictions():
    expansion = feature_expansion()
    posterior = weight_posterior(expansion, draw(20, 2), draw(20, 2, seed=1), Noise.of(spd(2)))
    xs = draw(3, 2, seed=5).requires_grad_()
    assert gradgradcheck(lambda x: (posterior.mean(x), posterior.variance(x)), xs)


@pytest.mark.parametrize(
    "covariance",
    [[[1.0, 1.0], [1.0, 1.0]], [[0.0, 0.0], [0.0, 1.0]], [[1.0, 1.0], [1.0, 1.0 + 1e-15]]],
)
def test_singular_noise_is_refused(covariance):
    with pytest.raises(ValueError, match=r"positive definite noise.*singular.*global noise"):
        Noise.of(torch.tensor(covariance, dtype=torch.float64))


def test_detaching_cuts_every_tensor():
    expansion = feature_expansion()
    omega = expansion.phi.omega.clone().requires_grad_()
    live = FeatureExpansion(TrigColumns.of(omega), expansion.directions, expansion.columns)
    posterior = weight_posterior(live, draw(20, 2), draw(20, 2, seed=1), Noise.of(spd(2)))
    assert posterior.weights.requires_grad
    detached = posterior.detached()
    assert not detached.variance(draw(3, 2)).requires_grad
    assert not detached.mean(draw(3, 2)).requires_grad


def test_grams_of_features_are_cached_for_the_same_numbers_only():
    expansion, x, y = feature_expansion(), draw(20, 2, seed=3), draw(20, 2, seed=4)
    statistics = Statistics.of(x, y, expansion.phi)
    kept = statistics.feature_grams(expansion)
    assert statistics.feature_grams(expansion) is kept
    for other, factor in ((2 * statistics, 2.0), (statistics + statistics - 3 * statistics, -1.0)):
        torch.testing.assert_close(other.feature_grams(expansion)[0], factor * kept[0])


def test_complex_directions_are_real_parts_of_waves():
    """Of the features Re(m_f ψ_f(x)), each product of an expansion."""
    real, x = feature_expansion(), draw(7, 2, seed=3)
    directions = torch.complex(real.directions, draw(9, 2, seed=2))
    expansion = FeatureExpansion(real.phi, directions, real.columns)
    wave = torch.exp(1j * (x @ real.phi.omega.mT))
    wave = torch.cat([wave, -1j * wave], dim=-1)[:, real.columns]  # (N, F)
    features = (wave[:, None] * directions.mT).real.flatten(0, 1)
    torch.testing.assert_close(expansion.features(x), features)
    theta, values = draw(9, 3, seed=4), draw(14, 3, seed=5)
    applied = expansion.phi.apply(x, expansion.column_weights(theta))
    torch.testing.assert_close(applied.reshape(14, 3), features @ theta)
    z = expansion.phi.adjoint(x, values.reshape(7, 6))
    torch.testing.assert_close(expansion.feature_values(z), features.mT @ values)
    variance = features.square().sum(-1).reshape(7, 2)
    torch.testing.assert_close(expansion.variance(x), variance)
    scaled = expansion.scaled(torch.tensor(4.0).double()).double()
    torch.testing.assert_close(scaled.features(x), 2 * features)


@pytest.mark.parametrize("kind", [PlusWhite, PlusConstant])
def test_what_is_added_to_a_distribution(kind):
    """Its variances, blocks and root are those of its covariance."""
    x, xs = draw(20, 2), draw(4, 2, seed=2)
    posterior = weight_posterior(feature_expansion(), x, draw(20, 2, seed=1), Noise.of(spd(2)))
    plus, added = kind(posterior, spd(2, seed=3)), spd(2, seed=3)
    same = torch.eye(4) if kind is PlusWhite else torch.ones(4, 4)
    covariance = posterior.covariance(xs) + torch.kron(same.double(), added)
    torch.testing.assert_close(plus.covariance(xs), covariance)
    torch.testing.assert_close(plus.variance(xs).flatten(), covariance.diagonal())
    blocks = covariance.reshape(4, 2, 4, 2)
    torch.testing.assert_close(plus.blocks(xs), torch.stack([blocks[i, :, i] for i in range(4)]))
    torch.testing.assert_close(plus.root(xs) @ plus.root(xs).mT, covariance)
    torch.testing.assert_close(plus.mean(xs), posterior.mean(xs))
    assert plus.split()[0] is (posterior if kind is PlusWhite else plus)


@pytest.mark.parametrize("name", ["features", "kronecker", "kronecker_rank_one", "merged"])
def test_every_form_of_features_has_the_products_of_its_matrix(name):
    """Φθ, Φᵀv, diag ΦΦᵀ, and what a choice of columns or a variance makes of Φ."""
    expansion, x = EXPANSIONS[name](), draw(7, 2, seed=3)
    features, p = written_out(expansion, x), expansion.num_outputs
    theta = draw(features.shape[-1], 3, seed=4)
    applied = expansion.phi.apply(x, expansion.column_weights(theta))
    torch.testing.assert_close(applied.reshape(7 * p, 3), features @ theta)
    values = draw(7 * p, 3, seed=5)
    z = expansion.phi.adjoint(x, values.reshape(7, 3 * p))
    torch.testing.assert_close(expansion.feature_values(z), features.mT @ values)
    variance = features.square().sum(-1).reshape(7, p)
    torch.testing.assert_close(expansion.variance(x), variance)
    torch.testing.assert_close(
        written_out(expansion.scaled(variance[0, 0]), x) ** 2, features**2 * variance[0, 0]
    )

    half = expansion.num_columns // 2
    columns, factors = torch.tensor([0, 2, half, half + 2]), draw(4, seed=6).square()
    every = torch.zeros(expansion.num_columns).double().index_add(0, columns, factors)
    kept = every[expansion.general().columns]
    expected = features[:, kept > 0] * kept[kept > 0].sqrt()
    torch.testing.assert_close(expansion.select(columns, factors).features(x), expected)


def test_what_is_gathered_is_kept_for_the_same_columns_only():
    one, x, y = feature_expansion(), draw(20, 2, seed=3), draw(20, 2, seed=4)
    other = FeatureExpansion(one.phi, one.directions, one.columns.flip(0))
    statistics = Statistics.of(x, y, one.phi)
    statistics.feature_grams(one)
    (found,) = statistics.feature_grams(other)
    values = one.phi.values(x)[:, other.columns]
    torch.testing.assert_close(found, values.mT @ values)


@pytest.mark.parametrize("points", [2, 60], ids=["dual", "primal"])
@pytest.mark.parametrize("name", ["features", "kronecker", "kronecker_rank_three"])
def test_roots_of_the_weights_have_their_covariance(name, points):
    """R Rᵀ = Cov[θ], and Φ Cov[θ] Φᵀ of any features Φ of the weights; may carry jitter."""
    expansion, x, y = EXPANSIONS[name](), draw(points, 2, seed=3), draw(points, 2, seed=4)
    posterior = weight_posterior(expansion, x, y, Noise.of(spd(2)))
    eye = torch.eye(expansion.num_features).double()
    covariance = posterior.weight_covariance(eye)
    root = posterior.weight_root(eye)
    torch.testing.assert_close(root @ root.mT, covariance, rtol=1e-8, atol=1e-8)
    for rows in (6, 40):
        features = draw(rows, len(eye), seed=6)
        expected = features @ covariance @ features.mT
        root = posterior.root_of(features)
        torch.testing.assert_close(root @ root.mT, expected, rtol=1e-7, atol=1e-7)
        torch.testing.assert_close(posterior.covariance_of(features), expected)
        torch.testing.assert_close(posterior.variance_of(features), expected.diagonal())
        blocks = expected.reshape(rows // 2, 2, rows // 2, 2)
        blocks = torch.stack([blocks[n, :, n] for n in range(rows // 2)])
        torch.testing.assert_close(posterior.blocks_of(features, 2), blocks)


def test_kronecker_posteriors_are_differentiable_at_equal_eigenvalues():
    """LᵀΣ⁻¹L = 1 again: against finite differences, which leave that point."""
    x, y, xs = draw(20, 2, seed=3), draw(20, 2, seed=4), draw(3, 2, seed=5)
    plain, noise = kronecker_expansion(), Noise.of(torch.eye(2, dtype=torch.float64))

    def predicted(mixing):
        expansion = KroneckerExpansion(plain.phi, plain.scales, mixing)
        posterior = weight_posterior(expansion, x, y, noise)
        return posterior.mean(xs), posterior.variance(xs)

    assert gradcheck(predicted, torch.eye(2, dtype=torch.float64).requires_grad_())


@pytest.mark.parametrize("points", [2, 60], ids=["dual", "primal"])
@pytest.mark.parametrize("name", ["features", "kronecker"])
def test_numbers_in_float32_are_taken_in_float64(name, points):
    expansion, noise, xs = EXPANSIONS[name](), Noise.of(spd(2)), draw(4, 2).float()
    x, y = draw(points, 2, seed=3), draw(points, 2, seed=4).float()
    posterior = weight_posterior(expansion, x, y, noise)
    expected = weight_posterior(expansion, x, y.double(), noise).theta
    torch.testing.assert_close(posterior.theta, expected, rtol=1e-12, atol=1e-12)
    turned = posterior.apply(StreamFunction(torch.zeros(2).double()), (0, 1))
    for own in (posterior, turned):
        for found in (own.mean, own.covariance, own.root, own.variance, own.blocks):
            torch.testing.assert_close(found(xs), found(xs.double()), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("points", [3, 40], ids=["few", "folded"])
def test_symbols_with_real_and_imaginary_parts_on_a_lattice(points):
    """Where many variances are one transform, those of complex directions are not."""
    expansion, xs = lattice_expansion(), draw(points, 2, seed=6)
    posterior = weight_posterior(expansion, draw(60, 2), draw(60, 2, seed=1), Noise.of(spd(2)))
    symbol = LineIntegral(torch.tensor([[0.0, 0.0], [0.5, 0.2], [0.6, 0.9]]).double())
    image = apply_symbol(symbol, expansion, (0, 1))
    assert image.is_complex
    features = image.features(xs)
    expected = features @ posterior.weight_covariance(features.mT)
    found = posterior.apply(symbol, (0, 1))
    torch.testing.assert_close(found.variance(xs).flatten(), expected.diagonal())
    torch.testing.assert_close(found.covariance(xs), expected)
    torch.testing.assert_close(found.blocks(xs).flatten(), expected.diagonal())
    torch.testing.assert_close(found.mean(xs), features @ posterior.theta)


@pytest.mark.parametrize("name", ["features", "kronecker"])
def test_groups_of_two_noises_equal_dense_algebra(name):
    """Those of a separable kernel too, which are no Kronecker product then."""
    expansion, noises = EXPANSIONS[name](), [Noise.of(spd(2)), Noise.of(spd(2, seed=9))]
    x, y, xs = draw(50, 2, seed=3), draw(50, 2, seed=4), draw(5, 2, seed=5)
    parts = [(x[:30], y[:30]), (x[30:], y[30:])]
    groups = [
        Group(Statistics.of(*own, expansion.phi), noise)
        for own, noise in zip(parts, noises, strict=True)
    ]
    posterior, evidence = normal_equations(expansion, groups).posterior(torch.zeros(2).double())
    features, test_features = written_out(expansion, x), written_out(expansion, xs)
    noise = torch.block_diag(*[noises[0].covariance] * 30, *[noises[1].covariance] * 20)
    noisy = features @ features.mT + noise
    expected = oracles.log_density(noisy, y)
    torch.testing.assert_close(evidence.log_density(torch.zeros(2).double(), 100), expected)
    mean, cov = oracles.condition(
        test_features @ test_features.mT, test_features @ features.mT, noisy, y
    )
    torch.testing.assert_close(posterior.mean(xs).flatten(), mean)
    torch.testing.assert_close(posterior.covariance(xs), cov)
