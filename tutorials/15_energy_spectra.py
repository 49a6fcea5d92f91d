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
points, num_paths, every = (60, 16, 8) if arguments.smoke else (800, 256, 1)

# %% [markdown]
# ## Two flows whose spectra are known
#
# Sums of 4000 plane waves without divergence, with wavenumbers from 3 to 200 per unit of length, as
# many in every octave, whose energy per wavenumber falls like k^-3 or k^-5/3. The square of one
# unit holds few of the longest waves: a realistic survey, smaller than the largest eddies. Readings
# have errors of a tenth of the standard deviation.


# %%
def flow(slope: float, seed: int, waves: int = 4000):
    rng = np.random.default_rng(seed)
    k = np.exp(rng.uniform(math.log(3.0), math.log(200.0), waves))
    energy = k ** (1 + slope)  # of a wave: that per wavenumber times the distance of wavenumbers
    angle, phase = rng.uniform(0, 2 * np.pi, (2, waves))
    wave = np.stack([np.cos(angle), np.sin(angle)])
    across = np.sqrt(2 * energy / energy.sum())[:, None] * np.stack(
        [-np.sin(angle), np.cos(angle)], -1
    )
    return lambda x: torch.from_numpy(np.cos((x.numpy() @ wave) * k + phase) @ across)


kernels = {  # colours of Okabe & Ito, safe for colour-blind readers
    "learned": (gp_orff.LearnedSpectrumKernel, "#0072B2"),
    "RBF": (RBFKernel, "#D55E00"),
    "Matérn 3/2": (lambda: MaternKernel(nu=1.5), "#009E73"),
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
from gp_orff.models.energy_spectrum import windowed_energy


def posterior(kernel, x, y):
    exact = gp_orff.Auto(exact_values=2 * len(x))  # paths of a grid end where its waves do
    model = gp_orff.VectorFieldGP(kernel, frequencies=exact)
    with warnings.catch_warnings():  # an RBF kernel is too smooth for these flows, and says so
        warnings.simplefilter("ignore", gp_orff.CalibrationWarning)
        model.fit(x, y, progress=False)
    return model.posterior(), model.log_marginal_likelihood().item()


def draw_spectrum(ax, k, energy, **options):
    plot_energy_spectrum(ax, k, energy.mean, energy.low, energy.high, **options)


wavenumbers = torch.logspace(math.log10(4 * math.pi), 2, 16, dtype=torch.float64)
cells = (torch.arange(160, dtype=torch.float64) + 0.5) / 160
places = torch.cartesian_prod(cells, cells)
figure, axes = plt.subplots(1, 3, figsize=(13.5, 4.2), layout="constrained")
square = [(0, 1), (0, 1)]  # of the readings and the truth
for ax, (title, slope) in zip(axes[:2], {"k⁻³": -3.0, "k⁻⁵ᐟ³": -5 / 3}.items(), strict=True):
    truth = flow(slope, seed=1)
    known = windowed_energy(
        truth(places).reshape(1, 160, 160, 2), torch.ones(2).double(), wavenumbers
    )[0].sum(-1)
    print(f"{title} flow: at how many of {len(wavenumbers)} wavenumbers the 90 % interval holds")
    for name, (base, color) in kernels.items():
        kernel = gp_orff.DivergenceFreeKernel(base(), num_dims=2)
        field, nats = posterior(kernel, x, truth(x) + noise)
        total = field.energy_spectrum(wavenumbers, box=square, num_paths=num_paths).total
        inside = ((known >= total.low) & (known <= total.high)).sum()
        print(f"  {name:12} {inside:3} of {len(wavenumbers)}; evidence {nats:8.1f} nats")
        slopes = [slope] if name == "learned" else []
        draw_spectrum(ax, wavenumbers, total, slopes=slopes, label=name, color=color)
    ax.plot(wavenumbers, known, "k.", label="truth, same window")
    ax.set(title=f"a {title} flow, {points} readings", xlabel="wavenumber (rad per unit)")
    ax.set_ylim(known.min() / 10, known.max() * 10)
    ax.set_xticks([20, 50, 100], ["20", "50", "100"])
axes[0].set_ylabel("energy per wavenumber")
axes[0].legend(loc="lower left", frameon=False, title="mean and 90 % interval")

# %% [markdown]
# On the k^-3 flow, intervals of the learned spectrum hold the truth at 13 of 16 wavenumbers, those
# of a Matérn 3/2 kernel at 11 and of an RBF kernel at 8; on the k^-5/3 flow at 14, 15 and 5. Where
# the curves leave the truth, the readings say nothing any more (800 readings with this noise hold
# waves of the steep flow up to about 60 per unit), and each kernel continues by its own law. That
# is what a kernel is for, and why the wrong one has error bars that are too small or too large.
#
# ## The winds of January
#
# The winds of tutorial 6, at 200 hPa over East Asia: 561 points, of which a third are stations. A
# `HelmholtzKernel` tells the rotational energy from the divergent. On Lambert's conformal map (the
# extra `gp_orff[geo]`) wavenumbers are right within 7 %. The spectrum from all points under the
# same window takes the place of the truth. Eddies have been averaged out of a mean over many
# years, so that this spectrum is far steeper than that of the winds of one day.

# %%
path = Path(__file__).parent / "data" / "winds.csv"
columns = np.loadtxt(path, delimiter=",", skiprows=1)[::every, :4]
degrees, wind = np.split(columns, 2, axis=1)
plane = gp_orff.labelled.LocalPlane("+proj=lcc +lat_0=35 +lat_1=35 +lon_0=140 +R=6371200 +type=crs")
sites = torch.from_numpy(plane.forward(degrees)) / 1000  # 1000 km
wind = torch.from_numpy(plane.rotate(wind, degrees))
station = torch.randperm(len(sites), generator=generator)[: len(sites) // 3]
k = torch.logspace(math.log10(2.9), math.log10(6.6), 10, dtype=torch.float64)
area = list(zip(sites.amin(0).tolist(), sites.amax(0).tolist(), strict=True))
spectra = {}
for name, chosen in {"stations": station, "all points": torch.arange(len(sites))}.items():
    kernel = gp_orff.HelmholtzKernel(gp_orff.LearnedSpectrumKernel(), num_dims=2)
    field, _ = posterior(kernel, sites[chosen], wind[chosen])
    spectra[name] = field.energy_spectrum(k, box=area, num_paths=num_paths)
for part, color in {"rotational": "#0072B2", "divergent": "#E69F00"}.items():
    energy, known = (getattr(spectra[name], part) for name in ("stations", "all points"))
    slopes = [-3.0] if part == "rotational" else []
    draw_spectrum(axes[2], k, energy, slopes=slopes, label=part, color=color)
    axes[2].plot(k, known.mean, "o", color=color, ms=3)
    inside = ((known.mean >= energy.low) & (known.mean <= energy.high)).sum()
    print(f"winds, {part}: the interval of {len(station)} stations holds {inside} of {len(k)}")
axes[2].plot([], [], "o", color="0.5", ms=3, label=f"mean of all {len(sites)} points")
axes[2].set(
    title=f"winds, {len(station)} stations",
    xlabel="wavenumber (rad per 1000 km)",
    ylabel="energy per wavenumber (m² s⁻² 1000 km)",
)
axes[2].set_xticks([3, 4, 6], ["3", "4", "6"])
axes[2].legend(loc="lower left", frameon=False)
for ax in axes:
    ax.xaxis.set_minor_formatter(matplotlib.ticker.NullFormatter())
arguments.output.mkdir(parents=True, exist_ok=True)
figure.savefig(arguments.output / "energy_spectra.png", dpi=120)
print("figure:", arguments.output / "energy_spectra.png")
