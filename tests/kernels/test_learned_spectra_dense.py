"""Posteriors and evidence of learned spectra with unusual data, against dense algebra in numpy."""

import numpy as np
import pytest
import torch

import gp_orff

KNOTS = 6
CASES = {"plain": (1.0, 1.0), "large units": (1e5, 1e-6), "small units": (1e-6, 1e5)}


def covariance(a, b, lengths, curls, rotations):
    """Σ_j (a_j C_j + b_j D_j), C and D the curl-free and the divergence-free part of an RBF."""
    r = a[:, None, None] - b[None, :, None]  # (n, m, 1, 2)
    r = r / lengths[:, None]
    value = np.exp(-0.5 * (r**2).sum(-1))[..., None, None] / lengths[:, None, None] ** 2
    hessian = (r[..., :, None] * r[..., None, :] - np.eye(2)) * value
    laplacian = np.trace(hessian, axis1=-2, axis2=-1)[..., None, None] * np.eye(2)
    parts = rotations[:, None, None] * (hessian - laplacian) - curls[:, None, None] * hessian
    return parts.sum(2).transpose(0, 2, 1, 3).reshape(2 * len(a), 2 * len(b))


def dense(model, x, y, xs):
    """log p(y), means and variances, which count the uncertainty of the trained constant mean."""
    first, second = [
        part for part in model.kernel.modules() if isinstance(part, gp_orff.LearnedSpectrumKernel)
    ]
    lengths = np.geomspace(1 / 8, 8, KNOTS)
    u = np.log(lengths)
    bends = np.linalg.pinv(np.diff(np.eye(KNOTS), n=2, axis=0))
    basis = np.column_stack([3 * u, 4 * bends])
    curve = -0.5 * (u / 0.7) ** 2 + basis @ first.shape.detach().numpy()
    other = curve + 0.5 * basis @ second.shape.detach().numpy()
    scales = (
        part.outputscale.item() for part in (model.kernel.curl_free, model.kernel.divergence_free)
    )
    weights = [
        scale * np.exp(c) / np.exp(c).sum() for scale, c in zip(scales, (curve, other), strict=True)
    ]
    options = first.lengthscale.item() * lengths, *weights
    matrix = covariance(x, x, *options) + model.likelihood.noise.item() * np.eye(2 * len(x))
    cross, prior = covariance(xs, x, *options), covariance(xs, xs, *options)
    inverse, mean = np.linalg.inv(matrix), model.mean(torch.from_numpy(x)).detach().numpy()
    residual = (y - mean).ravel()
    evidence = -0.5 * (
        residual @ inverse @ residual
        + np.linalg.slogdet(matrix)[1]
        + len(residual) * np.log(2 * np.pi)
    )
    ones, there = (np.tile(np.eye(2), (len(points), 1)) for points in (x, xs))
    left = there - cross @ inverse @ ones
    variance = prior - cross @ inverse @ cross.T
    variance += left @ np.linalg.inv(ones.T @ inverse @ ones) @ left.T
    means = (cross @ inverse @ residual).reshape(-1, 2) + mean[0]
    return evidence, means, np.diag(variance).reshape(-1, 2)


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("units", CASES.values(), ids=CASES)
def test_posteriors_and_evidence_are_those_of_dense_algebra(units, flat):
    """With repeats, a flat axis and any units, to the rounding of matrices of condition 1e5."""
    place, field = units
    rng = np.random.default_rng(5)
    x, y, xs = rng.random((14, 2)), rng.standard_normal((14, 2)), rng.random((5, 2))
    x[10:] = x[:4]
    if flat:
        x[:, 1] = xs[:, 1] = 0.3
    x, y, xs = place * x, field * y, place * xs
    base = gp_orff.LearnedSpectrumKernel(KNOTS)
    model = gp_orff.VectorFieldGP(gp_orff.HelmholtzKernel(base, num_dims=2))
    for part in model.kernel.modules():
        if isinstance(part, gp_orff.LearnedSpectrumKernel):
            part.lengthscale = 0.4 * place
            part.shape.data.copy_(torch.from_numpy(0.4 * rng.standard_normal(KNOTS - 1)))
    model.kernel.curl_free.outputscale = 0.05 * (place * field) ** 2
    model.kernel.divergence_free.outputscale = 0.1 * (place * field) ** 2
    model.likelihood.noise = 0.1 * field**2
    model.condition(torch.from_numpy(x), torch.from_numpy(y), merge=0)
    posterior = model.posterior()
    evidence, means, variances = dense(model, x, y, xs)
    there = torch.from_numpy(xs)
    assert model.log_marginal_likelihood().item() == pytest.approx(evidence, abs=1e-8)
    np.testing.assert_allclose(posterior.mean(there).numpy(), means, atol=1e-9 * field)
    np.testing.assert_allclose(posterior.variance(there).numpy(), variances, rtol=1e-9)
