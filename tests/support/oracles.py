"""Independent second implementations: textbook formulas and dense algebra, no code of gp_orff."""

import math

import torch


def rbf(tau, lengthscale):
    return torch.exp(-0.5 * (tau / lengthscale).square().sum(-1))


def matern(tau, lengthscale, nu):
    r = math.sqrt(2 * nu) * (tau / lengthscale).norm(dim=-1)
    polynomial = {0.5: 1.0, 1.5: 1 + r, 2.5: 1 + r + r**2 / 3}[nu]
    return polynomial * torch.exp(-r)


def rational_quadratic(tau, lengthscale, alpha=1.4):
    return (1 + (tau / lengthscale).square().sum(-1) / (2 * alpha)) ** (-alpha)


def rough_matern(tau, ell, nu=1.8):
    """Return a Matérn kernel as a mixture of RBF kernels, 1/Γ(ν) ∫ u^ν exp(−u − ν‖τ/ℓ‖²/(2u)) d log
    u."""
    log_u = torch.arange(-60, 6, 1 / 16, dtype=torch.float64)
    log_terms = nu * log_u - log_u.exp() - nu * (tau / ell).square().sum() / (2 * log_u.exp())
    return log_terms.exp().sum() / (16 * math.gamma(nu))


def scalar(name):
    """Return the function k(τ, ℓ) of a scalar kernel by its name."""
    if name in ("rbf", "rq", "matern_general"):
        return {"rbf": rbf, "rq": rational_quadratic, "matern_general": rough_matern}[name]
    nu = {"matern12": 0.5, "matern32": 1.5, "matern52": 2.5}
    return lambda tau, ell: matern(tau, ell, nu[name])


def second_moment(name):
    """Return −k″ along one axis at lag 0 for unit lengthscale, from the Taylor series of the
    kernel."""
    moments = {"rbf": 1.0, "rq": 1.0, "matern32": 3.0, "matern52": 5 / 3, "matern_general": 9 / 4}
    return moments[name]


def curl_free(hessian):
    return -hessian


def divergence_free(hessian):
    trace = hessian.diagonal(dim1=-1, dim2=-2).sum(-1)[..., None, None]
    return hessian - trace * torch.eye(hessian.shape[-1], dtype=hessian.dtype)


def exact(name, build, x, z, lengthscale):
    """Return the exact kernel of a field by automatic differentiation of k. No lag may be zero."""
    k = scalar(name)
    tau = (x[:, None] - z[None]).reshape(-1, x.shape[-1])
    hessian = torch.func.vmap(torch.func.hessian(lambda t: k(t, lengthscale)))(tau)
    blocks = build(hessian).reshape(len(x), len(z), x.shape[-1], x.shape[-1])
    return blocks.transpose(1, 2).reshape(len(x) * x.shape[-1], -1)


def outer(omega):
    """Return A(ω) of the curl-free kernel."""
    return omega.unsqueeze(-1) * omega.unsqueeze(-2)


def projected(omega):
    """Return A(ω) of the divergence-free kernel."""
    norm2 = omega.square().sum(-1)[..., None, None]
    return norm2 * torch.eye(omega.shape[-1], dtype=omega.dtype) - outer(omega)


def fourier_sum(x, z, omega, weights, spectral_matrix):
    """Return Σ_k w_k cos⟨ω_k, x − z⟩ A(ω_k) by its definition, point by point."""
    phase = (x[:, None] - z[None]) @ omega.mT  # (n, m, D)
    blocks = torch.einsum("nmk,k,kij->nimj", phase.cos(), weights, spectral_matrix)
    return blocks.reshape(len(x) * blocks.shape[1], -1)


def log_density(covariance, residuals):
    factor = torch.linalg.cholesky(covariance)
    white = torch.linalg.solve_triangular(factor, residuals.reshape(-1, 1), upper=False)
    logdet = 2 * factor.diagonal().log().sum()
    return -0.5 * (white.square().sum() + logdet + len(covariance) * math.log(2 * math.pi))


def condition(prior, cross, noisy, residuals):
    """Return the posterior mean and covariance at test points, given noisy values at training
    points."""
    factor = torch.linalg.cholesky(noisy)
    mean = cross @ torch.cholesky_solve(residuals.reshape(-1, 1), factor)
    return mean.squeeze(-1), prior - cross @ torch.cholesky_solve(cross.mT, factor)
