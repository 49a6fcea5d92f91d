"""Frequencies drawn from a density of the user's own, with importance weights."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from gp_orff.features.frequencies.rule import Draw
from gp_orff.kernels.base import as_real_tensor
from gp_orff.kernels.factors import Sampler
from gp_orff.kernels.spectra.base import Spectrum

_RETURNED = "the frequencies that sampler returns", "the log density that sampler returns"


@dataclass(frozen=True)
class Proposal:
    """The part of a spectrum that random rules use, for frequencies of a density ρ.

    Base variables are ω and log ρ(ω): the frequencies depend on no hyperparameter, their weights
    S(ω)/ρ(ω) do.
    """

    spectrum: Spectrum
    sampler: Sampler | None = None

    @property
    def draw(self) -> type[Draw]:
        """The frequencies of a term whose first leaf has a `Proposal`."""
        return ProposedDraw

    def num_coordinates(self, num_dims: int) -> int:
        return num_dims

    def base(self, directions: np.ndarray, u: np.ndarray, order: int) -> np.ndarray:
        pair = self.sampler(torch.from_numpy(u))
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise ValueError(
                "sampler expects to return two tensors, frequencies (D, d) and their log density "
                f"(D,), got {type(pair).__name__}"
            )
        omega, log_density = (
            np.asarray(as_real_tensor(part, what).detach().cpu(), dtype=float)
            for part, what in zip(pair, _RETURNED, strict=True)
        )
        if omega.shape != u.shape or log_density.shape != u.shape[:1]:
            raise ValueError(
                f"sampler expects to return frequencies {u.shape} and their log density "
                f"{u.shape[:1]}, got {omega.shape} and {log_density.shape}"
            )
        if not (np.isfinite(omega).all() and np.isfinite(log_density).all()):
            raise ValueError(
                "sampler expects to return finite frequencies and log densities, got NaN or "
                "infinity; it has to work for every u in (0, 1)"
            )
        return np.concatenate([omega, log_density[:, None]], axis=-1)

    def frequencies(self, base: Float[Tensor, "D d+1"], order: int) -> Float[Tensor, "D d"]:
        return base[:, :-1]

    def importance(self, base: Float[Tensor, "D d+1"], order: int) -> Float[Tensor, "*b D"]:
        return (self.spectrum.log_density(base[:, :-1]) - base[:, -1]).exp()


class ProposedDraw(Draw):
    """The frequencies of a term whose first leaf has a `Proposal`."""

    def nodes(self, spectra: Sequence[Spectrum]):
        return super().nodes([Proposal(spectra[0]), *spectra[1:]])
