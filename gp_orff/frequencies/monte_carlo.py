"""Independent random frequencies."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from gp_orff.frequencies.draw import Draw, Law


@dataclass(frozen=True)
class MonteCarlo:
    r"""Independent random frequencies: operator-valued random Fourier features.

    `measure="trace"` draws ω from the law of tr A(ω): for curl-free and divergence-free kernels
    p₁(z) ∝ ‖z‖² p(z), with weights E‖z‖²/(D‖z‖²). Features are then bounded (Minh 2016,
    Section 4). `measure="base"` draws from p itself with weights 1/D, the unbounded map of
    Brault et al. 2016 (Algorithm 1); with a Matérn kernel its error has a finite variance only
    for ν > 2. For separable and scalar kernels the two are the same (Rahimi & Recht 2007).

    Frequencies are drawn once, in base units, when a kernel is built; hyperparameters act on them
    afterwards, so that gradients reach the lengthscales. The kernel they give is unbiased with
    error O(D^{−1/2}); its *posterior* is overconfident, most of all under heavy-tailed spectra
    and little noise: `benchmarks/random_feature_posterior.py` measures by how much.

    Args:
        num_frequencies: D, for each leaf of the kernel tree; a leaf has 2D trigonometric columns.
        measure: "trace" or "base".
        seed: of NumPy's `default_rng`; the same seed gives the same frequencies everywhere. No
            global random state is read or changed.

    Raises:
        ValueError: an unknown measure, or fewer than one frequency.

    Example:
        >>> import gp_orff
        >>> gp_orff.MonteCarlo(256, seed=0)
        MonteCarlo(num_frequencies=256, measure='trace', seed=0)
    """

    num_frequencies: int
    measure: str = "trace"
    seed: int = 0

    def __init__(self, num_frequencies: int, *, measure: str = "trace", seed: int = 0):
        if (
            isinstance(num_frequencies, bool)
            or int(num_frequencies) != num_frequencies
            or num_frequencies < 1
        ):
            raise ValueError(
                "MonteCarlo expects num_frequencies to be a positive integer, "
                f"got {num_frequencies!r}"
            )
        if measure not in ("trace", "base"):
            raise ValueError(f'MonteCarlo expects measure "trace" or "base", got {measure!r}')
        for name, value in (
            ("num_frequencies", int(num_frequencies)),
            ("measure", measure),
            ("seed", seed),
        ):
            object.__setattr__(self, name, value)

    def draw(self, laws: Sequence[Law]) -> list[Draw]:
        streams = np.random.default_rng(self.seed).spawn(len(laws))
        return [self._draw(law, rng) for law, rng in zip(laws, streams, strict=True)]

    def _draw(self, law: Law, rng: np.random.Generator) -> Draw:
        tilt = law.degree if self.measure == "trace" else 0
        z = law.spectrum.sample(self.num_frequencies, law.num_dims, tilt, rng)
        # E[g(z)] = E_tilted[g(z) · E‖z‖^{2t} / ‖z‖^{2t}]
        ratio = law.spectrum.moment(tilt, law.num_dims) / np.linalg.norm(z, axis=-1) ** (2 * tilt)
        return Draw(torch.from_numpy(z), torch.from_numpy(ratio / self.num_frequencies))
