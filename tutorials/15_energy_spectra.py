# %% [markdown]
# # 15. Energy spectra of a flow, and a kernel that learns them
#
# How is the energy of a flow shared among its wavenumbers? Turbulence is told by the slope: -3 for
# the enstrophy cascade of two-dimensional flow, -5/3 for the energy cascade. Readings are scattered
# and noisy, so that a Fourier transform of them is of no use; the posterior of the field is. And a
# kernel says beforehand how the spectrum falls: an RBF kernel like a Gaussian, a Matérn kernel like
# a power that somebody chose. `LearnedSpectrumKernel` finds the curve from the readings.
#
# The lines to copy:
#
# ```python
# kernel = gp_orff.DivergenceFreeKernel(gp_orff.LearnedSpectrumKernel(), num_dims=2)
# field = gp_orff.VectorFieldGP(kernel).fit(x, y).posterior()
# spectrum = field.energy_spectrum()
# plot_energy_spectrum(ax, spectrum.wavenumbers, spectrum.total.mean, slopes=[-3])
# ```

# %%
import argparse
import math
import warnings
from pathlib import Path

import matplotlib
import matplotlib.ticker
import numpy as np
import torch
from gpytorch.kernels import MaternKernel, RBFKernel

import gp_orff
from gp_orff.plotting import plot_energy_spectrum

matplotlib.use("agg")
from matplotlib import pyplot as plt

parser = argparse.ArgumentParser(description="Energy spectra of simulated flows.")
parser.add_argument("--output", type=Path, default=Path("tutorials/output"))
parser.add_argument("--smoke", action="store_true", help="small and quick, to see that it runs")
arguments = parser.parse_args()
points, num_paths = (150, 16) if arguments.smoke else (800, 256)

# %% [markdown]
# ## Two flows whose spectra are known
#
# Sums of 4000 plane waves without divergence, with wavenumbers from 3 to 200 per unit of length and
# an energy per wavenumber that falls like k^-3 or k^-5/3. The square of one unit holds few of the
# longest waves: a realistic survey, smaller than the largest eddies. Readings have errors of a
# tenth of the standard deviation.


# %%
def flow(slope: float, seed: int, waves: int = 4000):
    rng = np.random.default_rng(seed)
    low, high, power = 3.0, 200.0, 1 + slope
    k = (low**power + rng.random(waves) * (high**power - low**power)) ** (1 / power)
    angle, phase = rng.uniform(0, 2 * np.pi, (2, waves))
    wave = np.stack([np.cos(angle), np.sin(angle)])
    across = math.sqrt(2 / waves) * np.stack([-np.sin(angle), np.cos(angle)], -1)
    return lambda x: torch.from_numpy(np.cos((x.numpy() @ wave) * k + phase) @ across)


kernels = {
    "learned": gp_orff.LearnedSpectrumKernel,
    "RBF": RBFKernel,
    "Matérn 3/2": lambda: MaternKernel(nu=1.5),
}
generator = torch.Generator().manual_seed(0)
x = torch.rand(points, 2, generator=generator, dtype=torch.float64)
noise = 0.1 * torch.randn(points, 2, generator=generator, dtype=torch.float64)

# %% [markdown]
# ## The spectrum of what was observed
#
# `energy_spectrum` draws functions from the posterior and transforms each under a Hann window. Its
# intervals are those of the flow in this square, not of a statistical ensemble: the truth to
# compare with is the spectrum of the true flow under the same window.

# %%
from gp_orff.models.derived.energy_spectrum import windowed_energy

wavenumbers = torch.logspace(math.log10(4 * math.pi), 2, 16, dtype=torch.float64)
cells = (torch.arange(160, dtype=torch.float64) + 0.5) / 160
places = torch.cartesian_prod(cells, cells)
figure, axes = plt.subplots(1, 2, figsize=(10, 4.2), layout="constrained")
for ax, (title, slope) in zip(axes, {"k⁻³": -3.0, "k⁻⁵ᐟ³": -5 / 3}.items(), strict=True):
    truth = flow(slope, seed=1)
    y = truth(x) + noise
    known = windowed_energy(
        truth(places).reshape(1, 160, 160, 2), torch.ones(2).double(), wavenumbers
    )[0].sum(-1)
    print(f"{title}: share of wavenumbers whose energy is within the 90 % interval, nats")
    for number, (name, base) in enumerate(kernels.items()):
        kernel = gp_orff.DivergenceFreeKernel(base(), num_dims=2)
        exact = gp_orff.Auto(exact_values=2 * points)  # paths of a grid end where its waves do
        model = gp_orff.VectorFieldGP(kernel, frequencies=exact)
        with warnings.catch_warnings():  # an RBF kernel is too smooth for these flows, and says so
            warnings.simplefilter("ignore", gp_orff.CalibrationWarning)
            field = model.fit(x, y, progress=False).posterior()
        whole = [(0, 1), (0, 1)]  # of the readings and the truth
        total = field.energy_spectrum(wavenumbers, box=whole, num_paths=num_paths).total
        inside = ((known >= total.low) & (known <= total.high)).double().mean()
        print(f"  {name:12} {inside:.2f} {model.log_marginal_likelihood():9.1f}")
        plot_energy_spectrum(
            ax,
            wavenumbers,
            total.mean,
            total.low,
            total.high,
            slopes=[slope] if number == 0 else [],
            label=name,
            color=f"C{number}",
        )
    ax.plot(wavenumbers, known, "k.", label="truth, same window")
    ax.set(title=f"a {title} flow, {points} readings", xlabel="wavenumber (rad per unit)")
    ax.set_ylim(known.min() / 10, known.max() * 10)
    ax.set_xticks([20, 50, 100], ["20", "50", "100"])
    ax.xaxis.set_minor_formatter(matplotlib.ticker.NullFormatter())
axes[0].set_ylabel("energy per wavenumber")
axes[0].legend(loc="lower left", frameon=False)
arguments.output.mkdir(parents=True, exist_ok=True)
figure.savefig(arguments.output / "energy_spectra.png", dpi=150)
print("figure:", arguments.output / "energy_spectra.png")

# %% [markdown]
# Where the curves leave the truth, the readings say nothing any more (800 readings hold waves up to
# about 80 per unit), and each kernel continues by its own law. That is what a kernel is for, and
# why the wrong one has error bars that are too small or too large.
