"""Coverage of the intervals of energy spectra, with a kernel that learns the spectrum.

    python benchmarks energy_spectra [--points 500] [--fields 5] [--paths 128] [--smoke]

The flows have no divergence and one of four spectra: stream functions with an RBF and a Matérn 3/2
kernel, and energies that decrease like k⁻³ and k⁻⁵ᐟ³ from waves longer than the square on. They are
observed at random places of the unit square, with errors of a tenth of the standard deviation. The
model has a learned spectrum. For each wavenumber, the energy of the true flow under the same window
is compared with the 90 % interval. The scores are the fractions of wavenumbers inside, from two
periods in the square to half the wavenumber ω_max = π√N of observations on a square lattice, and
from there to ω_max.
"""

import math
import time
import warnings
from collections.abc import Callable, Sequence

import numpy as np
import torch
from helpers.command import Sizes
from helpers.fields import mean_and_standard_error
from helpers.results import save
from helpers.rows import Rows
from jaxtyping import Float
from torch import Tensor

import gp_orff
from gp_orff.models.energy_spectrum import windowed_energy

WAVES, NOISE, CELLS, LEVEL = 4000, 0.1, 128, 0.9
LARGEST, SMALLEST = 3.0, 200.0  # wavenumbers of power laws


def power_law(slope: float) -> Callable[[np.random.Generator], Float[np.ndarray, "k"]]:
    def wavenumbers(rng: np.random.Generator) -> Float[np.ndarray, "k"]:
        low, high = LARGEST ** (1 + slope), SMALLEST ** (1 + slope)
        return (low + rng.random(WAVES) * (high - low)) ** (1 / (1 + slope))

    return wavenumbers


def of_rbf(rng: np.random.Generator) -> Float[np.ndarray, "k"]:
    """Draw wave numbers with ‖ωℓ‖² ~ χ²₄, the spectrum of a flow whose stream function has an
    RBF kernel."""
    return np.sqrt(rng.chisquare(4, WAVES)) / length(rng)


def of_matern(rng: np.random.Generator) -> Float[np.ndarray, "k"]:
    """Draw wave numbers with ‖ωℓ‖² ~ 3 χ²₄/χ²₁, a Student-t density with 3 degrees of freedom
    that is weighted by ‖ω‖²."""
    return np.sqrt(3 * rng.chisquare(4, WAVES) / rng.chisquare(1, WAVES)) / length(rng)


def length(rng: np.random.Generator) -> float:
    return math.exp(rng.uniform(math.log(0.1), math.log(0.25)))


SPECTRA = {
    "RBF": of_rbf,
    "Matérn 3/2": of_matern,
    "k⁻³": power_law(-3.0),
    "k⁻⁵ᐟ³": power_law(-5 / 3),
}


def flow(spectrum: Callable, rng: np.random.Generator) -> Callable[[Tensor], Tensor]:
    """Return a sum of plane waves with random directions and phases."""
    k = spectrum(rng)
    angle, phase = rng.uniform(0, 2 * np.pi, (2, WAVES))
    waves = k * np.stack([np.cos(angle), np.sin(angle)])
    across = np.stack([-np.sin(angle), np.cos(angle)], -1) * math.sqrt(2 / WAVES)

    def values(x: Float[Tensor, "n 2"]) -> Float[Tensor, "n 2"]:
        parts = [np.cos(part.numpy() @ waves + phase) @ across for part in x.split(4096)]
        return torch.from_numpy(np.concatenate(parts))

    return values


def inside(
    spectrum: Callable, points: int, seed: int, num_paths: int
) -> tuple[float, float, float]:
    """Return for which fractions of small and of large wave numbers the interval contains the
    true energy, and the CPU seconds."""
    rng = np.random.default_rng(seed)
    truth = flow(spectrum, rng)
    x = torch.from_numpy(rng.random((points, 2)))
    y = truth(x) + NOISE * torch.from_numpy(rng.standard_normal((points, 2)))
    omega_max = math.pi * math.sqrt(points)
    k = torch.linspace(4 * math.pi, omega_max, 16, dtype=torch.float64)
    start = time.process_time()
    kernel = gp_orff.DivergenceFreeKernel(gp_orff.LearnedSpectrumKernel(), num_dims=2)
    model = gp_orff.VectorFieldGP(kernel, frequencies=gp_orff.Auto(exact_values=2 * points))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", gp_orff.CalibrationWarning)
        field = model.fit(x, y, progress=False).posterior()
    total = field.energy_spectrum(k, box=[(0, 1)] * 2, num_paths=num_paths, level=LEVEL).total
    seconds = time.process_time() - start
    cells = (torch.arange(CELLS, dtype=torch.float64) + 0.5) / CELLS
    known = truth(torch.cartesian_prod(cells, cells)).reshape(1, CELLS, CELLS, 2)
    known = windowed_energy(known, torch.ones(2).double(), k)[0].sum(-1)
    holds = ((known >= total.low) & (known <= total.high)).double()
    low = k <= omega_max / 2
    return holds[low].mean().item(), holds[~low].mean().item(), seconds


def main(words: Sequence[str] | None = None) -> None:
    parser = Sizes(__file__, __doc__, points=(500, 40), fields=(5, 1), paths=(128, 16))
    arguments = parser.parse_args(words)
    rows = Rows()
    for name, spectrum in SPECTRA.items():
        for seed in range(arguments.fields):
            low, high, seconds = inside(spectrum, arguments.points, seed, arguments.paths)
            rows.add(**{"spectrum": name, "to half": low, "beyond": high, "CPU s": seconds})
    shares = [row["to half"] for row in rows]
    summary = mean_and_standard_error(shares)
    print(f"inside, up to half of ω_max: {summary['mean']:.3f} ± {summary['standard_error']:.3f}")
    save(arguments, {"fields": list(rows), "to half": summary})
