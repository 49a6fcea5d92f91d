"""What the data resolve: the tolerances that their noise asks of grids, and the boxes of these."""

from dataclasses import dataclass, replace

import numpy as np
import torch
from gpytorch.kernels import Kernel
from jaxtyping import Float

from gp_orff.data.dataset import Data
from gp_orff.data.noise.covariances import Noises
from gp_orff.features.assemble import draw, num_features, term_spectra
from gp_orff.features.domain import Box, rounded
from gp_orff.features.frequencies.grid import Grid, GridBudgetError
from gp_orff.features.frequencies.grid_design import lengthscales
from gp_orff.inference.memo import Memo
from gp_orff.kernels.closed_form import at_zero
from gp_orff.kernels.learned_spectrum import has_learned_spectrum
from gp_orff.kernels.tree import terms

COARSE_TOLERANCE, COARSE_FEATURES = 1e-2, 2000
MOST_TRAINING = 4096  # features, by default, of searches
PERIOD_OF_LEARNED = 2.0  # of grids, in extents: some waves of a learned spectrum are always long
_SIGNAL_TO_NOISE = 1e3  # the ratio of variances at which the rule's tolerance is used unchanged
_SHARE_OF_POSTERIOR = 0.01  # the share of the posterior variance that a grid may truncate
_SHARE_OF_LEARNED = 0.1  # of a learned spectrum, whose short waves the data do not tell of
_SHARE_OF_NOISE = 0.003  # that decaying waves may truncate: they cost more than a lattice
_MARGIN_OF_LEARNED = 0.25  # in the place of the lengthscale of a learned spectrum, in extents


@dataclass(frozen=True)
class Resolution:
    """What data resolve of a kernel at its present hyperparameters.

    Args:
        kernel, data, noises: of the fit.
        costly: whether features cost more than those of a lattice.
        counts, resolved: caches of numbers of features.
    """

    kernel: Kernel
    data: Data
    noises: Noises
    costly: bool
    counts: Memo
    resolved: Memo

    @torch.no_grad()
    def tolerance(self, rule: Grid) -> float:
        """The tolerance that the noise of the data requires.

        It is the rule's own where the noise variance is a thousandth of the signal variance, and
        tighter for less noise. It is at most 1 % of the posterior variance, about F/(N·p) times the
        noise variance: the data could not tell more of the truncated features. Of learned spectra,
        whose shortest waves always have some of the variance, it is 10 %.
        """
        signal = sum(
            at_zero(term).diagonal(dim1=-1, dim2=-2).mean()
            for term in terms(self.kernel)
            if term.leaves
        )
        if not signal > 0:
            return rule.tolerance
        if not self.learns_spectrum:
            return self._tolerance(rule, signal.item(), COARSE_TOLERANCE, _SHARE_OF_POSTERIOR)
        # most of the variance may be that of few long waves: the features of all that is resolved
        least = self._tolerance(rule, signal.item(), COARSE_TOLERANCE, _SHARE_OF_LEARNED)
        return self._tolerance(rule, signal.item(), least, _SHARE_OF_LEARNED)

    def _tolerance(self, rule: Grid, signal: float, counted: float, share: float) -> float:
        """The tolerance that truncates a share of the posterior variance, which the number of
        features of a grid of the tolerance `counted` tells."""
        coarse = grid_for(rule, self.rounded_box, None, counted)
        coarse = replace(coarse, max_features=COARSE_FEATURES)
        counts = self.counts if counted == COARSE_TOLERANCE else self.resolved
        count = counts.get(lambda: self._count(coarse), [self.kernel], coarse)
        posterior_to_noise = count / self.data.num_values
        noise_to_signal = min(self.data.local_noises(self.noises, 1 / posterior_to_noise).values())
        noise_to_signal /= signal
        tolerance = rule.tolerance * min(max(noise_to_signal * _SIGNAL_TO_NOISE, 1e-3), 10.0)
        largest = share * noise_to_signal * posterior_to_noise
        least = _SHARE_OF_NOISE * noise_to_signal if self.costly else 1e-10
        return max(min(tolerance, largest), least)

    def _count(self, rule: Grid) -> int:
        """F of a grid; the budget if the grid exceeds it."""
        try:
            return num_features(self.kernel, draw(self.kernel, rule, self.data.num_inputs))
        except GridBudgetError:
            return rule.max_features

    @property
    def learns_spectrum(self) -> bool:
        """Whether curves of learned spectra are trained."""
        return has_learned_spectrum(self.kernel, trained=True)

    @property
    def lengthscales(self) -> Float[np.ndarray, "d"]:
        """The largest lengthscale of all kernels along each input; of learned spectra, which are
        the same with others, at most a quarter of the extent."""
        d = self.data.num_inputs
        scales = lengthscales(term_spectra(self.kernel, d), d)
        if not self.learns_spectrum:
            return scales
        low, high = np.array(self.data.box).T
        most = np.where(high > low, _MARGIN_OF_LEARNED * (high - low), np.inf)
        return np.minimum(scales, most)

    @property
    def rounded_box(self) -> Box:
        """The data's box, rounded outward to quarter lengthscales; new points rarely change it."""
        return rounded(self.data.box, 0.25 * self.lengthscales)

    @property
    def widened_box(self) -> Box:
        """The data's box and on each side a lengthscale, but at least a quarter of the extent."""
        low, high = np.array(self.data.box).T
        margin = np.maximum(self.lengthscales, 0.25 * (high - low))
        return tuple(zip((low - margin).tolist(), (high + margin).tolist(), strict=True))


def grid_for(
    rule: Grid,
    domain: Box,
    data: Box | None,
    tolerance: float,
    lengthscale_range: tuple[float, float] = (1.0, 1.0),
    most: int = MOST_TRAINING,
) -> Grid:
    """The grid for a domain, within the rule's budget, or `most` features if it has none."""
    limits = {"tolerance": tolerance, "max_features": rule.max_features or most}
    return replace(rule, domain=domain, data=data, lengthscale_range=lengthscale_range, **limits)
