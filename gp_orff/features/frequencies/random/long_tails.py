"""Random frequencies of which many are high, with importance weights.

A posterior between dense readings with little noise consists of frequencies that readings do not
resolve, which have a small share ε of the prior's variance. Of D frequencies of the prior's own
density only D ε are among them, and none if ε < 1/D. Here the level u of the quantile of ‖ω‖ is

    1 − u = (1 − v)³ ,    v uniform, with the weight du/dv = 3 (1 − u)^{2/3} ,

so that D ε^{1/3} are, and no weight is larger than three times that of the density itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float
from torch import Tensor

from gp_orff.features.frequencies.random.measures import Measure
from gp_orff.features.frequencies.rule import Draw, LeafSpectrum
from gp_orff.kernels.spectra.base import Spectrum
from gp_orff.kernels.spectra.elliptical import Radial

_POWER = 3.0
_RAREST = 2.0**-48  # 1 − u, which is rounded to 2⁻⁵³


@dataclass(frozen=True)
class TailedSpectrum:
    """The part of a radial spectrum that random rules use. Base variables are its own, and the
    logarithm of the weight."""

    spectrum: Radial

    @property
    def draw(self) -> type[Draw]:
        """The frequencies of a term whose radial leaves have long tails."""
        return TailedDraw

    def num_coordinates(self, num_dims: int) -> int:
        return self.spectrum.num_coordinates(num_dims)

    def base(self, directions: np.ndarray, u: np.ndarray, order: int) -> np.ndarray:
        rare = np.clip((1 - u) ** _POWER, _RAREST, None)
        log_weight = np.log(_POWER) + (1 - 1 / _POWER) * np.log(rare)
        base = self.spectrum.base(directions, 1 - rare, order)
        return np.concatenate([base, log_weight.sum(-1, keepdims=True)], axis=-1)

    def frequencies(self, base: Float[Tensor, "D c"], order: int) -> Float[Tensor, "*b D d"]:
        return self.spectrum.frequencies(base[:, :-1], order)

    def importance(self, base: Float[Tensor, "D c"], order: int) -> Float[Tensor, "*b D"]:
        return self.spectrum.importance(base[:, :-1], order) * base[:, -1].exp()


class TailedDraw(Draw):
    """The frequencies of a term whose radial leaves have long tails."""

    def nodes(self, spectra: Sequence[Spectrum]):
        return super().nodes([_tailed(spectrum) for spectrum in spectra])


@dataclass(frozen=True)
class LongTails(Measure):
    """The density ∝ tr A(ω), with more of the high frequencies of radial spectra."""

    def order(self, leaf: LeafSpectrum) -> int:
        return leaf.degree

    def source(self, leaf: LeafSpectrum) -> Spectrum | TailedSpectrum:
        return _tailed(leaf.spectrum)


def _tailed(spectrum: Spectrum) -> Spectrum | TailedSpectrum:
    return TailedSpectrum(spectrum) if isinstance(spectrum, Radial) else spectrum
