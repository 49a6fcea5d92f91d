# %% [markdown]
# # 15. Energy spectra of a flow, and a kernel that learns them
#
# From scattered and noisy observations of a flow, we estimate its energy at each wavenumber, with
# intervals.
#
# The slope of the spectrum is −3 in the enstrophy cascade of two-dimensional flow, and −5/3 in the
# energy cascade. A kernel determines in advance how the spectrum falls. The spectrum of an RBF
# kernel falls like a Gaussian, and that of a Matérn kernel like a power law with a fixed exponent.
# `LearnedSpectrumKernel` learns the curve from the observations. These are the lines to copy:
#
# ```python
# learned = gp_orff.LearnedSpectrumKernel()
# kernel = gp_orff.DivergenceFreeKernel(learned, num_dims=2)
# field = gp_orff.VectorFieldGP(kernel).fit(x, y).posterior()
# spectrum = field.energy_spectrum(level=0.95)
# k, energy = spectrum.wavenumbers, spectrum.total
# plot_energy_spectrum(
#     ax, k, energy.mean, energy.low, energy.high, slopes=[-3]
# )
# ```

# %% tags=["remove-cell"]
import argparse
from pathlib import Path

parser = argparse.ArgumentParser(
    description="Energy spectra of simulated flows and of winds.",
    allow_abbrev=False,
)
parser.add_argument("--output", type=Path, default=Path("tutorials/output"))
parser.add_argument(
    "--smoke",
    action="store_true",
    help="small and quick, to see that it runs",
)
arguments, _ = parser.parse_known_args()  # Jupyter adds its own
folder = Path("tutorials" if Path("tutorials").exists() else ".") / "data"

# %%
import math
import warnings

import numpy as np
import torch
from gpytorch.kernels import MaternKernel, RBFKernel
from matplotlib import pyplot as plt
from matplotlib.ticker import NullFormatter

import gp_orff
from gp_orff.models.energy_spectrum import windowed_energy
from gp_orff.plotting import STYLE, plot_energy_spectrum, title_panels

points, num_paths, step = 800, 256, 1  # step of the rows of winds

# %% tags=["remove-cell"]
if arguments.smoke:
    points, num_paths, step = 60, 16, 8

# %% [markdown]
# ## Two flows with known spectra
#
# The flows are sums of 4000 plane waves without divergence. Their wavenumbers k are between 3 and
# 200 rad/km, with the same number of waves in every octave. The energy per wavenumber falls like
# k⁻³ or like k to the power −5/3. The root mean square speed is 1 m/s. The flows are observed in a
# square with a side of 1 km, which is smaller than the largest eddies, as in many surveys. Each
# component is observed with an error of 0.1 m/s.


# %%
def flow(slope: float, seed: int, waves: int = 4000):
    rng = np.random.default_rng(seed)
    k = np.exp(rng.uniform(math.log(3.0), math.log(200.0), waves))
    # energy of a wave: energy per wavenumber times the spacing
    energy = k ** (1 + slope)
    angle, phase = rng.uniform(0, 2 * np.pi, (2, waves))
    along = np.stack([np.cos(angle), np.sin(angle)])
    across = np.stack([-np.sin(angle), np.cos(angle)], -1)
    across *= np.sqrt(2 * energy / energy.sum())[:, None]
    return lambda x: torch.from_numpy(
        np.cos((x.numpy() @ along) * k + phase) @ across
    )


generator = torch.Generator().manual_seed(0)
x = torch.rand(points, 2, generator=generator, dtype=torch.float64)
noise = 0.1 * torch.randn(points, 2, generator=generator, dtype=torch.float64)

# %% [markdown]
# ## The spectrum of the flow in the square
#
# `energy_spectrum` draws functions from the posterior, multiplies each by a Hann window, and
# computes its Fourier transform. The intervals are for the flow in this square, and not for a
# statistical ensemble of flows. We therefore compare them with the spectrum of the true flow, with
# the same window.


# %%
def posterior(kernel, x, y):
    # sample paths on a grid have no waves beyond its cut-off
    exact = gp_orff.Auto(exact_values=2 * len(x))
    model = gp_orff.VectorFieldGP(kernel, frequencies=exact)
    with warnings.catch_warnings():  # an RBF kernel is too smooth here
        warnings.simplefilter("ignore", gp_orff.CalibrationWarning)
        model.fit(x, y, progress=False)
    return model.posterior(), model.log_marginal_likelihood().item()


def contained(truth, energy):
    """At how many wavenumbers the interval contains the truth."""
    return int(((truth >= energy.low) & (truth <= energy.high)).sum())


kernels = {
    "learned": gp_orff.LearnedSpectrumKernel,
    "RBF": RBFKernel,
    "Matérn 3/2": lambda: MaternKernel(nu=1.5),
}
flows = {"$k^{-3}$": -3.0, "$k^{-5/3}$": -5 / 3}
k = torch.logspace(math.log10(4 * math.pi), 2, 16, dtype=torch.float64)
cells = (torch.arange(160, dtype=torch.float64) + 0.5) / 160
places, box = torch.cartesian_prod(cells, cells), [(0, 1), (0, 1)]
truths, spectra = {}, {}
for title, slope in flows.items():
    truth = flow(slope, seed=1)
    values = truth(places).reshape(1, 160, 160, 2)
    side = torch.ones(2, dtype=torch.float64)
    truths[title] = windowed_energy(values, side, k)[0].sum(-1)
    print(f"\nflow {title}, intervals of 95 % at {len(k)} wavenumbers")
    for name, base in kernels.items():
        kernel = gp_orff.DivergenceFreeKernel(base(), num_dims=2)
        field, nats = posterior(kernel, x, truth(x) + noise)
        energy = field.energy_spectrum(
            k, box=box, num_paths=num_paths, level=0.95
        ).total
        spectra[title, name] = energy
        count = contained(truths[title], energy)
        print(f"  {name:12} {count:3} contain the truth", end="")
        print(f"; evidence {nats:8.1f} nats")

# %%
colors = dict(zip(kernels, ("#0072B2", "#D55E00", "#009E73"), strict=True))
with plt.rc_context(STYLE):
    figure, axes = plt.subplots(1, 2, figsize=(7.2, 3.2), layout="compressed")
    for ax, (title, slope) in zip(axes, flows.items(), strict=True):
        for name, color in colors.items():
            energy = spectra[title, name]
            plot_energy_spectrum(
                ax,
                k,
                energy.mean,
                energy.low,
                energy.high,
                slopes=[slope] if name == "learned" else [],
                label=name,
                color=color,
            )
        known = truths[title]
        ax.plot(k, known, "ko", ms=3, label="truth, same window")
        ax.set_ylim(known.min() / 10, known.max() * 10)
        ax.set_xlabel("wavenumber (rad/km)")
        ax.set_xticks([20, 50, 100], ["20", "50", "100"])
        ax.xaxis.set_minor_formatter(NullFormatter())
    axes[0].set_ylabel("energy per wavenumber (m² s⁻² km)")
    axes[0].legend(
        loc="lower left",
        title="mean and 95 % interval",
        title_fontsize="small",
        alignment="left",
    )
    title_panels(axes, [f"flow {title}" for title in flows])

# %% tags=["remove-cell"]
arguments.output.mkdir(parents=True, exist_ok=True)
with plt.rc_context(STYLE):
    figure.savefig(arguments.output / "energy_spectra.png")
    figure.savefig(arguments.output / "energy_spectra.pdf")
    title = axes[0].get_title(loc="left")[4:]  # without the letter
    axes[0].set_title(title, loc="left")
    card = axes[0].get_tightbbox()
    card = card.transformed(figure.dpi_scale_trans.inverted())
    figure.savefig(
        arguments.output / "energy_spectra_card.png",
        dpi=150,
        bbox_inches=card.padded(0.05),
    )
print("\nfigure:", arguments.output / "energy_spectra.png")

# %% [markdown]
# ## The coverage of three kernels
#
# For the flow with slope −3, the intervals of the learned spectrum contain the true spectrum at 14
# of 16 wavenumbers. The intervals of a Matérn 3/2 kernel contain it at 11 wavenumbers, and those of
# an RBF kernel at 8. For the flow with slope −5/3, the numbers are 15, 16 and 7.
#
# The observations of the steep flow determine waves up to about 60 rad/km. Shorter waves are weaker
# than the noise. For these waves, each kernel extrapolates the spectrum in its own way. For the
# steep flow, no interval contains the true spectrum beyond 80 rad/km. If the extrapolation of a
# kernel is wrong, its intervals are too narrow or too wide.
#
# ## The winds of January
#
# The winds of [tutorial 06](../tutorials/06_winds.py) are at 200 hPa over East Asia, at 561 points.
# A third of these points are stations. A `HelmholtzKernel` separates the rotational energy from the
# divergent energy. On Lambert's conformal map (the extra `gp_orff[geo]`), wavenumbers are correct
# within 7 %. Instead of the true spectrum, we use the spectrum from all points, with the same
# window. The winds are means over many years, so eddies are averaged out. The spectrum is therefore
# far steeper than that of a single day.

# %%
columns = np.loadtxt(folder / "winds.csv", delimiter=",", skiprows=1)
degrees, wind = np.split(columns[::step, :4], 2, axis=1)
plane = gp_orff.labelled.LocalPlane(
    "+proj=lcc +lat_0=35 +lat_1=35 +lon_0=140 +R=6371200 +type=crs"
)
sites = torch.from_numpy(plane.forward(degrees)) / 1000  # 1000 km
wind = torch.from_numpy(plane.rotate(wind, degrees))
order = torch.randperm(len(sites), generator=generator)
k = torch.logspace(math.log10(2.9), math.log10(6.6), 10, dtype=torch.float64)
area = list(zip(sites.amin(0).tolist(), sites.amax(0).tolist(), strict=True))
winds = {}
for name, rows in {"stations": order[: len(sites) // 3], "all": order}.items():
    learned = gp_orff.LearnedSpectrumKernel()
    kernel = gp_orff.HelmholtzKernel(learned, num_dims=2)
    field, _ = posterior(kernel, sites[rows], wind[rows])
    winds[name] = field.energy_spectrum(
        k, box=area, num_paths=num_paths, level=0.95
    )
for part in ("rotational", "divergent"):
    few, all_points = (getattr(found, part) for found in winds.values())
    print(f"\n{part} energy per wavenumber (m² s⁻² 1000 km)")
    print("rad/1000 km   stations, 95 % interval           all points")
    for i in range(0, len(k), 3):
        interval = f"{few.low[i]:.3g} to {few.high[i]:.3g}"
        print(f"{k[i]:11.2f}{few.mean[i]:11.3g}, {interval:22}", end="")
        print(f"{all_points.mean[i]:9.3g}")
    count = contained(all_points.mean, few)
    print(f"{count} of {len(k)} intervals contain that of all points")

# %% [markdown]
# For both parts, the intervals of the stations contain the spectrum of all points at all ten
# wavenumbers.
