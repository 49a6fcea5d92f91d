"""Two curvatures of the log evidence L in the coordinates u of a search.

    observed    −∂²L/∂u² at the hyperparameters, by differences of the exact gradient
    average     the mean of the observed and the expected curvature, without second derivatives of
                the covariance of the data by u

The observed curvature gives standard errors and integrals by Laplace's method. The average
curvature is positive semidefinite at all hyperparameters and takes no gradient. It gives the steps
of a search and the first proposal of importance sampling (Gilmour, Thompson & Cullis 1995, *Average
information REML*).
"""

from collections.abc import Callable, Iterator, Mapping

import numpy as np
import torch
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import Likelihood
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import normalize

from gp_orff.data.noise import noises_of
from gp_orff.fitting.coordinates import Coordinates
from gp_orff.inference.equations import Primal, Whitened, information
from gp_orff.inference.exact import ExactInference
from gp_orff.inference.features import Inference
from gp_orff.kernels.base import cholesky_inverse
from gp_orff.kernels.spectra import learned_spectra

STEP = 2e-4
"""The step of the central differences in a coordinate, usually a logarithm.

The truncation error is proportional to STEP² and is about 1e-8 of the curvature. The rounding error
is proportional to 1/STEP and is about 1e-8 for gradients with 12 digits. Lengthscales that change
by STEP stay within the range of a grid.
"""
_STEP_OF_COVARIANCES, _STEP_OF_FEATURES = 1e-7, 1e-6  # forward differences in a coordinate
_TURN, _ROUNDING = 1e-3, 1e-9  # a step of all coordinates, and the tolerance of `_are_alike`


@torch.enable_grad()
def observed(
    coordinates: Coordinates,
    objective: Callable[[], Float[Tensor, ""]],
    free: Bool[np.ndarray, "k"] | None = None,
    steps: float | Float[np.ndarray, "k"] = STEP,
) -> tuple[Float[np.ndarray, "m"], Float[np.ndarray, "m m"]]:
    """Return the gradient and minus the Hessian of an objective in m free coordinates.

    Each free coordinate takes two gradients. The matrix is not made symmetric: its asymmetry
    measures the error of the differences.

    Args:
        coordinates: the k coordinates of the search. The derivatives are at their present values.
        objective: a function without arguments that returns the objective, a scalar.
        free: True for each coordinate that is free; None for all.
        steps: the steps of the differences, one for all coordinates or one for each.
    """
    chosen = np.eye(len(coordinates.get()), dtype=bool)
    chosen = chosen if free is None else chosen[free]
    gradients = [
        coordinates.value_and_gradient(objective)[1][chosen.any(0)]
        for size in (steps, -steps)
        for _ in _moved(coordinates, chosen * size)
    ]
    after, before = np.reshape(gradients, (2, len(chosen), len(chosen)))
    widths = 2 * (chosen * steps).sum(-1, keepdims=True)
    return (after + before).sum(0) / max(2 * len(chosen), 1), (before - after) / widths


@torch.no_grad()
def average(
    inference: Inference,
    kernel: Kernel,
    likelihoods: Mapping[str, Likelihood],
    coordinates: Coordinates,
    mean: Float[Tensor, "p"] | None = None,
) -> Float[np.ndarray, "k k"] | None:
    """Return the average information, plus the precision of the prior of learned spectra.

    Under features, it exists only if hyperparameters do nothing but scale features and noise, and
    if the weights follow from sufficient statistics. Otherwise the function returns None.

    Args:
        inference: the inference from the data, under the exact kernel or by features.
        kernel: the kernel of the model.
        likelihoods: the likelihood of every group, by label.
        coordinates: the k coordinates of kernel and likelihoods. The information is that at their
            present values.
        mean: the values of a constant mean; None for the mean with the largest evidence.
    """
    parts = kernel, likelihoods, coordinates, mean
    if inference.is_exact:
        matrix = _under_exact_kernel(inference, *parts)
    else:
        matrix = _under_features(inference, *parts)
    return None if matrix is None else matrix + np.diag(prior_scales(kernel, coordinates) ** 2)


def prior_scales(kernel: Kernel, coordinates: Coordinates) -> Float[np.ndarray, "k"]:
    """∂z/∂u for the curves z ~ N(0, I) of learned spectra, and 0 for all other coordinates u."""
    curves = {id(part.shape) for part in learned_spectra(kernel)}
    return np.concatenate(
        [
            np.zeros(0),
            *(
                np.full(part.parameter.numel(), part.scale * (id(part.parameter) in curves))
                for part in coordinates.parts
            ),
        ]
    )


def _moved(coordinates: Coordinates, steps: Float[np.ndarray, "m k"]) -> Iterator[None]:
    """Set the coordinates to u + step for one step after another, and finally to u. The caller
    evaluates a function after each step."""
    u = coordinates.get()
    try:
        for step in steps:
            coordinates.set(u + step)
            yield
    finally:
        coordinates.set(u)


# Under the exact kernel, the values are y ~ N(H c, K). Their average information is
#
#     A_ij = ½ w_iᵀ P w_j ,    w_i = ∂_iK a ,    a = K⁻¹(y − H c) .
#
# P is K⁻¹ for a given mean c, and K⁻¹ − K⁻¹H(HᵀK⁻¹H)⁻¹HᵀK⁻¹ for the c with the largest evidence. A
# takes one factorisation, and one covariance matrix at each of k moved hyperparameters, of which
# only the product with a is stored.
#
# Observations at equal positions also have r values of scatter about their means, with variances
# ∝ σ². These values add r log σ² to the logarithm of the determinant. Their information is
# ½ r ∂_i log σ² ∂_j log σ².


def _under_exact_kernel(
    inference: ExactInference,
    kernel: Kernel,
    likelihoods: Mapping[str, Likelihood],
    coordinates: Coordinates,
    mean: Float[Tensor, "p"] | None,
) -> Float[np.ndarray, "k k"]:
    noises = noises_of(kernel, likelihoods)
    prior, design = inference.prior(kernel), inference.design(noises)
    factor, half, evidence = data = Whitened.of_covariance(prior + inference.noise(noises), design)
    a = data.solved(mean)[:, 0]
    scatter, of_kernel = inference.scatter_logdet(noises), set(kernel.parameters())
    owners = [p.parameter in of_kernel for p in coordinates.parts for _ in p.parameter.flatten()]
    noise_times_a = inference.noise_times(noises, a)
    moved, w, slopes = _moved(coordinates, _STEP_OF_COVARIANCES * np.eye(len(owners))), [], []
    for _, is_of_kernel in zip(moved, owners, strict=True):
        if is_of_kernel:
            w.append(inference.change_of_prior(kernel, prior, a))
            slopes.append(torch.zeros_like(scatter))
        else:
            now = noises_of(kernel, likelihoods)
            w.append(inference.noise_times(now, a) - noise_times_a)
            slopes.append(inference.scatter_logdet(now) - scatter)
    w = torch.stack(w, -1)
    w = torch.linalg.solve_triangular(factor, w, upper=False)
    if mean is None:
        left = half[:, 1:] @ evidence.mean_root()
        w = w - left @ (left.mT @ w)
    slopes = torch.stack(slopes).to(w)
    count = max(inference.num_values - len(half), 1.0)
    total = w.mT @ w + slopes[:, None] * slopes / count
    return (0.5 * total / _STEP_OF_COVARIANCES**2).cpu().numpy()


# Under features, hyperparameters may change the variances w of the features and the noise variances
# σ² of the groups. The weights θ ~ N(0, I) have the information G_g = ZᵀΣ_g⁻¹Z of each group. With
# A = I + Σ_g G_g and M = I − A⁻¹, the expected curvature is
#
#     −E ∂²L/∂log w_e ∂log w_f = ½ M_ef² ,
#     −E ∂²L/∂log w_f ∂log σ²_g = ½ (A⁻¹ G_g A⁻¹)_ff ,
#     −E ∂²L/∂log σ²_g ∂log σ²_h = ½ [δ_gh (n_g − 2 tr A⁻¹G_g) + tr A⁻¹G_g A⁻¹G_h] .
#
# The first line is averaged with ½ E[θ_e] E[θ_f] M_ef, where E[θ] is the posterior mean of the
# weights. Under the model, both have the same expectation. If w is orders of magnitude smaller than
# the data suggest, the expected curvature is far too small, and its steps are far too long.
#
# The matrix takes one factorisation and one inverse, like an evaluation of the evidence. The
# derivatives of log w and log σ² by u are differences.


def _under_features(
    inference: Inference,
    kernel: Kernel,
    likelihoods: Mapping[str, Likelihood],
    coordinates: Coordinates,
    mean: Float[Tensor, "p"] | None,
) -> Float[np.ndarray, "k k"] | None:
    def equations() -> Primal | None:
        return inference.primal(kernel, noises_of(kernel, likelihoods))

    if inference.is_exact or (present := equations()) is None:
        return None
    size = len(coordinates.get())
    turn = _TURN * np.cos(np.arange(size))
    (is_alike,) = (_are_alike(present, equations()) for _ in _moved(coordinates, turn[None]))
    if not is_alike:
        return None
    start, steps = _logarithms(present), _STEP_OF_FEATURES * np.eye(size)
    changes = [_logarithms(equations()) - start for _ in _moved(coordinates, steps)]
    expansion, groups = present.expansion.general(), present.groups
    slopes, noise_slopes = (torch.stack(changes, -1) / _STEP_OF_FEATURES).split(
        [len(start) - len(groups), len(groups)]
    )
    posterior, _ = present.posterior(mean)
    inverse = cholesky_inverse(posterior.factor)
    explained = -inverse  # M = I − A⁻¹; for a single group, M = A⁻¹G
    explained.diagonal().add_(1)
    solved = [explained]
    if len(groups) > 1:  # `information` returns I + G_g, with the I of the prior
        solved = [inverse @ information(expansion, [group]) - inverse for group in groups]
    weighted = posterior.theta * slopes  # (F, k)
    total = slopes.mT @ (explained.square() @ slopes) + weighted.mT @ (explained @ weighted)
    total = 0.5 * total
    mixed = torch.stack([(part * inverse).sum(-1) for part in solved])  # (G, F)
    mixed = noise_slopes.mT @ (mixed @ slopes)
    noise = torch.stack(
        [torch.stack([(one * other.mT).sum() for other in solved]) for one in solved]
    )
    counts = [
        group.statistics.count * group.statistics.pattern.num_values - 2 * part.trace()
        for group, part in zip(groups, solved, strict=True)
    ]
    noise = noise + torch.diag(torch.stack(counts))
    total = total + mixed + mixed.mT + noise_slopes.mT @ noise @ noise_slopes
    return 0.5 * total.cpu().numpy()


def _logarithms(equations: Primal) -> Float[Tensor, "F+G"]:
    """log w of every feature, and log σ² of every group."""
    squares = equations.expansion.general().directions.square().sum(-1)
    tiny = torch.finfo(squares.dtype).tiny
    noises = [group.noise.logdet / group.noise.precision.shape[-1] for group in equations.groups]
    return torch.cat([squares.clamp_min(tiny).log(), torch.stack(noises)])


def _are_alike(present: Primal, moved: Primal) -> bool:
    """Return whether two systems of equations differ only in scales. This is so if their features
    are real with the same directions, and if all elements of Σ have equal ratios.
    """
    shapes = [
        [some.expansion.general().directions, *(group.noise.precision for group in some.groups)]
        for some in (present, moved)
    ]
    return not shapes[0][0].is_complex() and all(
        torch.allclose(*(normalize(part, dim=-1) for part in pair), atol=_ROUNDING)
        for pair in zip(*shapes, strict=True)
    )
