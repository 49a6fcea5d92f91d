"""The Fisher information of hyperparameters that scale features, as the curves of spectra do."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import Likelihood
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import normalize

from gp_orff.data.noise.covariances import noises_of
from gp_orff.inference.conditioning import FeatureInference, Inference
from gp_orff.inference.equations.primal import Primal, information
from gp_orff.models.fitting.coordinates import Coordinates
from gp_orff.models.fitting.scoring.curves import prior_scales

_STEP = 1e-6  # of differences, in coordinates
_TURN, _ROUNDING = 1e-3, 1e-9  # a step, and by how much what it leaves alone may differ


@dataclass(frozen=True)
class FeatureInformation:
    """The Fisher information of observations under features whose hyperparameters change their
    variances w and the noise variances σ² of groups, in the coordinates u of a search, plus that of
    the prior of learned spectra.

    With unit weights, the information G_g = ZᵀΣ_g⁻¹Z of each group on them, A = I + Σ_g G_g and
    M = I − A⁻¹,

        −E ∂²L/∂log w_e ∂log w_f = ½ M_ef² ,
        −E ∂²L/∂log w_f ∂log σ²_g = ½ (A⁻¹ G_g A⁻¹)_ff ,
        −E ∂²L/∂log σ²_g ∂log σ²_h = ½ [δ_gh (n_g − 2 tr A⁻¹G_g) + tr A⁻¹G_g A⁻¹G_h] .

    With E[θ] the mean of the unit weights, the first is averaged with ½ E[θ_e] E[θ_f] M_ef, whose
    mean it is under the model (Johnson & Thompson 1995, *Restricted maximum likelihood estimation
    of variance components ... using average information*): where w is far below what the data tell,
    as of waves that a curve does not hold yet, the expected information alone is too small by
    orders, and its steps too long.

    One factorisation and one inverse, as of an evaluation of the evidence. The derivatives of log w
    and log σ² by u are differences.

    Args:
        inference: of the data, by features on a lattice.
        kernel: its kernel.
        likelihoods: those of all groups.
        coordinates: of the kernel and of the likelihoods.
        mean: a constant one; None for the best one.
    """

    inference: FeatureInference
    kernel: Kernel
    likelihoods: Mapping[str, Likelihood]
    coordinates: Coordinates
    mean: Float[Tensor, "p"] | None = None

    @classmethod
    def of(
        cls,
        inference: Inference,
        kernel: Kernel,
        likelihoods: Mapping[str, Likelihood],
        coordinates: Coordinates,
        mean: Float[Tensor, "p"] | None = None,
    ) -> "FeatureInformation | None":
        """The information; None where hyperparameters do more than to scale features and noise, or
        where weights are not found from statistics."""
        if not isinstance(inference, FeatureInference):
            return None
        own = cls(inference, kernel, likelihoods, coordinates, mean)
        return own if own._equations() is not None and own._scales() else None

    @torch.no_grad()
    def __call__(self) -> Float[np.ndarray, "k k"]:
        """H at the present hyperparameters."""
        equations = self._equations()
        expansion, groups = equations.expansion, equations.groups
        slopes, noise_slopes = self._slopes(equations)
        eye = torch.eye(expansion.num_features).to(expansion.directions)
        parts = [information(expansion, [group]) - eye for group in groups]
        posterior, _ = equations.posterior(self.mean)
        inverse = torch.cholesky_inverse(posterior.factor)
        solved = [eye - inverse] if len(parts) == 1 else [inverse @ part for part in parts]
        explained = eye - inverse
        observed = posterior.theta * slopes  # (F, k)
        total = slopes.mT @ (explained.square() @ slopes) + observed.mT @ (explained @ observed)
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
        prior = prior_scales(self.kernel, self.coordinates) ** 2
        return 0.5 * total.cpu().numpy() + np.diag(prior)

    def _equations(self) -> Primal | None:
        return self.inference.primal(self.kernel, noises_of(self.kernel, self.likelihoods))

    def _slopes(self, equations: Primal) -> tuple[Float[Tensor, "F k"], Float[Tensor, "G k"]]:
        """∂ log w/∂u of every feature, and ∂ log σ²/∂u of every group."""
        u, columns = self.coordinates.get(), []
        start = _logarithms(equations)
        for step in _STEP * np.eye(len(u)):
            self.coordinates.set(u + step)
            moved = _logarithms(self._equations())
            columns.append([(b - a) / _STEP for a, b in zip(start, moved, strict=True)])
        self.coordinates.set(u)
        return tuple(torch.stack(part, -1) for part in zip(*columns, strict=True))

    @torch.no_grad()
    def _scales(self) -> bool:
        """Whether a step of all coordinates leaves the directions of features, and the ratios of
        the elements of Σ, as they are."""
        u, shapes = self.coordinates.get(), []
        for step in (0.0, _TURN):
            self.coordinates.set(u + step * np.cos(np.arange(len(u))))
            equations = self._equations()
            directions = equations.expansion.directions
            noises = [group.noise.precision for group in equations.groups]
            shapes.append([normalize(part, dim=-1) for part in (directions, *noises)])
        self.coordinates.set(u)
        alike = [torch.allclose(*pair, atol=_ROUNDING) for pair in zip(*shapes, strict=True)]
        return not directions.is_complex() and all(alike)


def _logarithms(equations: Primal) -> tuple[Float[Tensor, "F"], Float[Tensor, "G"]]:
    """log w of every feature, and log σ² of every group."""
    squares = equations.expansion.directions.square().sum(-1)
    tiny = torch.finfo(squares.dtype).tiny
    noises = [group.noise.logdet / group.noise.precision.shape[-1] for group in equations.groups]
    return squares.clamp_min(tiny).log(), torch.stack(noises)
