"""The evidence with the curves of learned spectra integrated out, by Laplace's method."""

from collections.abc import Callable, Sequence
from copy import deepcopy

import torch
from gpytorch.kernels import Kernel
from jaxtyping import Float
from torch import Tensor, nn

from gp_orff.inference.conditioning import log_marginal_likelihood
from gp_orff.kernels.learned_spectrum import learned_spectra
from gp_orff.models.frozen_model import ModelSnapshot

_STEP = 1e-3  # of the central differences of gradients, in standard deviations of the prior
_LEAST = 0.1  # of the precision, where the prior has one: it is not at a maximum where it is less


def integration_over_spectra(snapshot: ModelSnapshot, kernel: Kernel) -> float:
    """What the log evidence changes by when the learned curves θ are integrated out, in nats.

    With a prior θ ~ N(0, I), at its value θ̂ that maximises log p(y|θ) + log p(θ),

        log ∫ p(y|θ) p(θ) dθ − log p(y|θ̂) ≈ −½ ‖θ̂‖² − ½ log |H| ,    H = I − ∂² log p(y|θ̂) :

    a maximum gains by every curve that it may choose, this does not. All other hyperparameters keep
    their values. Two gradients of the evidence for each trained coordinate of a curve; 0 without.

    Args:
        snapshot: of a fitted model.
        kernel: its kernel, which tells the curves that are trained; it is not changed.
    """
    kernel, likelihoods = deepcopy((kernel, dict(snapshot.representation.likelihoods)))
    curves = [part.shape for part in learned_spectra(kernel, trained=True)]
    if not curves:
        return 0.0
    model = (snapshot.inference, kernel, likelihoods, snapshot.fixed_mean)
    curvature = _hessian(lambda: log_marginal_likelihood(*model), curves)
    precision = torch.linalg.eigvalsh(torch.eye(len(curvature)).to(curvature) - curvature)
    square = sum(curve.detach().double().square().sum() for curve in curves)
    return -0.5 * (square + precision.clamp_min(_LEAST).log().sum()).item()


@torch.enable_grad()
def _hessian(
    value: Callable[[], Float[Tensor, ""]], parameters: Sequence[nn.Parameter]
) -> Float[Tensor, "k k"]:
    """By central differences of the gradient."""

    def gradient() -> Float[Tensor, "k"]:
        parts = torch.autograd.grad(value(), parameters)
        return torch.cat([part.double().flatten() for part in parts])

    rows = []
    for parameter in parameters:
        entries = parameter.data.view(-1)
        for i, entry in enumerate(entries.tolist()):
            ends = []
            for step in (_STEP, -_STEP):
                entries[i] = entry + step
                ends.append(gradient())
            entries[i] = entry
            rows.append((ends[0] - ends[1]) / (2 * _STEP))
    hessian = torch.stack(rows)
    return 0.5 * (hessian + hessian.mT)
