"""The Fisher information of hyperparameters under the exact kernel."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import Likelihood
from jaxtyping import Bool, Float
from torch import Tensor, nn

from gp_orff.data.noise.covariances import Noises, noises_of
from gp_orff.inference.conditioning import ExactInference
from gp_orff.kernels.cholesky import cholesky
from gp_orff.kernels.learned_spectrum import LearnedSpectrumKernel, learned_spectra
from gp_orff.kernels.learned_spectrum.components import components
from gp_orff.models.fitting.coordinates import Coordinates
from gp_orff.models.fitting.scoring.curves import prior_scales

MOST_SAMPLED = 200  # numbers whose posteriors count what they leave open of hyperparameters
_STEP = 1e-7  # of differences, in coordinates


@dataclass(frozen=True)
class Information:
    """The Fisher information of numbers y ~ N(c, K) in the coordinates u of a search, plus that of
    the prior of learned spectra:

        H_ij = ½ tr(K⁻¹ ∂_iK K⁻¹ ∂_jK) + ∂_iz · ∂_jz ,    z ~ N(0, I) the `shape` of the spectra.

    The covariance is linear in the weights π of a learned spectrum, so that its derivatives in all
    coordinates of the curves follow from a matrix for each length, and those from an RBF kernel
    each. Derivatives in the other coordinates are differences of the covariance.

    Args:
        inference: of the numbers, under the exact kernel.
        kernel: its kernel.
        likelihoods: those of all groups.
        coordinates: of the kernel and of the likelihoods.
    """

    inference: ExactInference
    kernel: Kernel
    likelihoods: Mapping[str, Likelihood]
    coordinates: Coordinates

    @torch.no_grad()
    def __call__(self, projected: bool = False) -> Float[np.ndarray, "k k"]:
        """H at the present hyperparameters; `projected`: that of the numbers less their best
        constant mean, with P = K⁻¹ − K⁻¹H(HᵀK⁻¹H)⁻¹HᵀK⁻¹ in the place of K⁻¹."""
        coordinates, u = self.coordinates, self.coordinates.get()
        covariance = self._covariance()
        factor = cholesky(covariance)
        constants = self.inference.constants(self._noises) if projected else None

        def whitened(change: Float[Tensor, "M M"]) -> Float[Tensor, "M*M"]:
            half = torch.linalg.solve_triangular(factor, change, upper=False)
            both = torch.linalg.solve_triangular(factor, half.mT, upper=False)
            if constants is None:
                return both.flatten()
            basis = torch.linalg.solve_triangular(factor, constants, upper=False)
            basis, _, _ = torch.linalg.svd(basis, full_matrices=False)
            left = both - basis @ (basis.mT @ both)
            return (left - (left @ basis) @ basis.mT).flatten()

        weights, rows, held = [], [], self._held
        for own, j, part in components(self.kernel):
            if own in held:
                continue
            weights.append((own, j))
            rows.append(whitened(self.inference.prior_covariance(part)))
        others = np.flatnonzero(~self.of_curves)
        for i in others:
            coordinates.set(u + _STEP * np.eye(len(u))[i])
            rows.append(whitened((self._covariance() - covariance) / _STEP))
        coordinates.set(u)
        stacked = torch.stack(rows)
        gram = 0.5 * (stacked @ stacked.mT).cpu().numpy()
        to_rows = np.zeros((len(rows), len(u)))
        if weights:
            to_rows[: len(weights)] = self._slopes_of_weights(weights)
        to_rows[range(len(weights), len(rows)), others] = 1.0
        return to_rows.T @ gram @ to_rows + np.diag(self._scales**2)

    @property
    def of_curves(self) -> Bool[np.ndarray, "k"]:
        """Which of the coordinates are those of a learned spectrum."""
        return self._scales > 0

    @property
    def _scales(self) -> Float[np.ndarray, "k"]:
        return prior_scales(self.kernel, self.coordinates)

    @property
    @torch.enable_grad()
    def _held(self) -> set[LearnedSpectrumKernel]:
        """The spectra whose weights do not change."""
        return {part for part in learned_spectra(self.kernel) if not part.weights.requires_grad}

    def _covariance(self) -> Float[Tensor, "M M"]:
        return self.inference.covariance(self.kernel, self._noises)

    @property
    def _noises(self) -> Noises:
        return noises_of(self.kernel, self.likelihoods)

    @torch.enable_grad()
    def _slopes_of_weights(
        self, weights: list[tuple[LearnedSpectrumKernel, int]]
    ) -> Float[np.ndarray, "w k"]:
        """∂π/∂u."""
        parameters = [part.parameter for part in self.coordinates.parts]
        values = {own: own.weights for own, _ in weights}
        return np.stack([self._gradient(values[own][j], parameters) for own, j in weights])

    def _gradient(
        self, value: Float[Tensor, ""], parameters: list[nn.Parameter]
    ) -> Float[np.ndarray, "k"]:
        slopes = torch.autograd.grad(value, parameters, retain_graph=True, allow_unused=True)
        return self._scales * np.concatenate(
            [
                np.zeros(parameter.numel()) if slope is None else slope.cpu().numpy().ravel()
                for parameter, slope in zip(parameters, slopes, strict=True)
            ]
        )
