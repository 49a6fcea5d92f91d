# %% [markdown]
# # 7. The Earth's magnetic field between the heights of three surveys
#
# Satellites observe the Earth's magnetic field at 460 and at 255 km; aircraft at 3 km, in half of
# the region. What is the field at other positions and heights, and how uncertain is it? Where no
# current flows, the field is a gradient, and it has no divergence anywhere. The harmonic kernel has
# both properties: it is that of sources at some depth below all readings, and also gives the
# potential.
#
# The lines to copy:
#
# ```python
# model = gp_orff.VectorFieldGP(gp_orff.HarmonicKernel())
# model.fit(x, y, group=instrument)                # km, nT; one noise per instrument
# field = model.posterior()
# mean, sd = field.mean(xs), field.variance(xs).sqrt()
# potential = field.potential(xs, reference=x0, background=True)   # with that of the constant mean
# ```

# %%
import argparse
import time
from datetime import datetime
from pathlib import Path

import matplotlib
import numpy as np
import torch
from gpytorch.kernels import MultitaskKernel, RBFKernel
from ppigrf.ppigrf import igrf_gc, igrf_V

import gp_orff
from gp_orff.plotting import plot_field

parser = argparse.ArgumentParser(description="The Earth's magnetic field from three surveys.")
parser.add_argument("--output", type=Path, default=Path("tutorials/output"))
parser.add_argument("--smoke", action="store_true", help="small and quick, to see that it runs")
arguments = parser.parse_args()
thin, tests = (3, 300) if arguments.smoke else (1, 2000)

# %% [markdown]
# ## The true field, in a fixed frame
#
# The truth is the International Geomagnetic Reference Field, IGRF-14: the field of the core, up to
# degree 13. The directions east, north and up depend on the position, so components along them are
# not the partial derivatives of a potential. We therefore use the axes of one centre, in South
# America. With the matrix E of rows east, north and up at a position, and E0 and r0 those of the
# centre, x = E0 (r - r0), B = E0 E' B_local. Latitudes are geocentric, heights above a sphere of
# 6371.2 km.

# %%
radius, date = 6371.2, datetime(2025, 1, 1)
centre = torch.tensor([[-55.0, -25.0, 0.0]], dtype=torch.float64)  # longitude, latitude, height


def turn(places):
    """E at places (n, 3) of longitude, latitude (degrees) and height (km): (n, 3, 3)."""
    lon, lat, _ = places.deg2rad().T
    up = torch.stack([lat.cos() * lon.cos(), lat.cos() * lon.sin(), lat.sin()], dim=-1)
    east = torch.stack([-lon.sin(), lon.cos(), 0 * lon], dim=-1)
    return torch.stack([east, torch.linalg.cross(up, east), up], dim=-2)


def position(places):
    """x: (n, 3), km along the axes of the centre."""
    r, r0 = ((radius + p[:, 2:]) * turn(p)[:, 2] for p in (places, centre))
    return (r - r0) @ turn(centre)[0].T


def igrf(places):
    """B (n, 3), nT, and g (n,), nT km: B = grad g, in the axes of the centre, where g is zero."""
    longitude, latitude, height = places.T.numpy()
    spherical = radius + height, 90 - latitude, longitude, date
    (up, south, east), minus_g = igrf_gc(*spherical), igrf_V(*spherical)[0]
    local = torch.from_numpy(np.stack([east, -south, up], axis=-1)[0])
    turned = torch.einsum("ij,nkj,nk->ni", turn(centre)[0], turn(places), local)
    return turned, torch.from_numpy(igrf_V(radius, 115.0, -55.0, date)[0] - minus_g)


# %% [markdown]
# ## Three surveys
#
# There are two satellites on polar orbits, and aircraft on lines from west to east, up to 56
# degrees west. The contributions of the crust and of currents in space count as noise, which is
# largest for the aircraft, near the rocks. The model gets the instrument of every observation, and
# learns the noise of each instrument.


# %%
def lines(longitudes, latitudes, heights, tilt=0.0):
    """Places on straight lines; each range is (first, last, number)."""
    steps = [torch.linspace(*r, dtype=torch.float64) for r in (longitudes, latitudes, heights)]
    places = torch.cartesian_prod(*steps)
    places[:, 0] -= tilt * (places[:, 1] + 25)  # the Earth turns below an orbit
    return places


def rms(values, *dims):
    return values.square().mean(*dims).sqrt()


surveys = {
    "satellite": lines((-71, -39, 11), (-39, -11, 13), (460, 460, 1), tilt=0.065)[::thin],
    "low satellite": lines((-69, -41, 10), (-38, -12, 13), (255, 255, 1), tilt=0.065)[::thin],
    "aircraft": lines((-70, -56, 10), (-38, -12, 11), (3, 3, 1))[::thin],
}
noise = {"satellite": 5.0, "low satellite": 10.0, "aircraft": 50.0}  # nT
places, generator = torch.cat(list(surveys.values())), torch.Generator().manual_seed(0)
instrument = [name for name, own in surveys.items() for _ in own]
sigma = torch.tensor([noise[name] for name in instrument], dtype=torch.float64)[:, None]
x = position(places)
y = igrf(places)[0] + sigma * torch.randn(x.shape, generator=generator, dtype=torch.float64)
print(", ".join(f"{len(own)} readings by {name}" for name, own in surveys.items()))
low, high = torch.tensor([[-69.0, -37, 0], [-41, -13, 500]], dtype=torch.float64)
held_out = low + (high - low) * torch.rand(tests, 3, generator=generator, dtype=torch.float64)
xs, (truth, true_g) = position(held_out), igrf(held_out)

# %% [markdown]
# ## Fit
#
# We compare a harmonic field with a curl-free one and with three independent components. The data
# are few enough for the exact kernel. The evidence is the log marginal likelihood in nats. The
# table has, at held-out points up to 500 km, the root mean square error (RMSE) of a component in nT
# of the harmonic field, its sd, the share of the truth inside the 95 % intervals, and the same for
# the curl-free field.

# %%
torch.manual_seed(0)  # gpytorch initialises a MultitaskKernel at random
kernels = {
    "harmonic": gp_orff.HarmonicKernel(),
    "curl-free": gp_orff.CurlFreeKernel(num_dims=3),
    "independent": MultitaskKernel(RBFKernel(), num_tasks=3, rank=0),
}
models, errors, nats = {}, {}, {}
for name, kernel in kernels.items():
    began = time.perf_counter()
    models[name] = gp_orff.VectorFieldGP(kernel).fit(x, y, group=instrument, progress=False)
    seconds, nats[name] = time.perf_counter() - began, models[name].log_marginal_likelihood().item()
    errors[name] = models[name].posterior().mean(xs) - truth
    parts = "east {:.1f}, north {:.1f}, up {:.1f}".format(*rms(errors[name], 0))
    print(f"{name:12} evidence {nats[name]:.1f}, RMSE {parts}, fit {seconds:.1f} s")
model, curl_free = models["harmonic"], models["curl-free"].posterior()
error, other = errors["harmonic"], errors["curl-free"]
learned = {key: own.noise.item() ** 0.5 for key, own in model.likelihoods.items()}
print("noise learned (nT): " + ", ".join(f"{key} {own:.1f}" for key, own in learned.items()))
field = model.posterior()
sd, other_sd = field.variance(xs).sqrt(), curl_free.variance(xs).sqrt()
inside, other_inside = (
    (miss.abs() < 1.96 * bar).double() for miss, bar in ((error, sd), (other, other_sd))
)
west, low = held_out[:, 0] < -55, held_out[:, 2] < 255
regions = {"above 255 km": ~low, "below, west": low & west, "below, east": low & ~west}
print(f"\n{'':14}{'RMSE':>8}{'sd':>8}{'95 %':>8}{'curl-free: RMSE':>18}{'sd':>8}{'95 %':>8}")
for name, here in {**regions, "all": low | ~low}.items():
    print(f"{name:14}{rms(error[here]):8.1f}{rms(sd[here]):8.1f}", end="")
    print(f"{inside[here].mean():8.3f}{rms(other[here]):18.1f}{rms(other_sd[here]):8.1f}", end="")
    print(f"{other_inside[here].mean():8.3f}")
assert nats["harmonic"] > nats["curl-free"] > nats["independent"]
assert rms(error) < rms(other) < rms(errors["independent"])
assert all(0.7 < learned[key] / noise[key] < 1.4 for key in noise)
assert 0.7 < inside.mean() < 0.99

# %% [markdown]
# Evidence and errors both favour the harmonic kernel. Its errors are one or two nT of some 22 000,
# and its error bars contain the truth at 0.90 to 0.99 of the points. The errors of the curl-free
# field are four times larger, most of all where it is continued downwards, and its error bars are
# too narrow.
#
# ## A check that needs no truth
#
# The harmonic field has no divergence, by its kernel. The curl-free kernel does not know that. If
# its posterior were right, zero would be inside the error bars of the divergence, and the root mean
# square of divergence over sd would be about 1. It is larger: that posterior is overconfident. An
# RBF kernel is as smooth near the ground as at great heights; the field is not.

# %%
divergence = curl_free.divergence(xs)
ratio = divergence.mean / divergence.variance.sqrt()
terms = rms(curl_free.mean(xs, gp_orff.Jacobian())[:, [0, 4, 8]], 0)
print("\nthe curl-free field: terms {:.2f}, {:.2f} and {:.2f} nT/km; ".format(*terms), end="")
print(f"the divergence {rms(divergence.mean):.2f} nT/km, over its sd {rms(ratio):.2f}")
print(f"zero inside 95 % at {(ratio.abs() < 1.96).double().mean():.3f} of the points; ", end="")
print(f"error over its sd {rms(other / other_sd):.2f}")
assert rms(divergence.mean) < 0.1 * terms.max()
assert min(rms(ratio), rms(other / other_sd)) > 1.1  # the check warns, rightly
for symbol in (gp_orff.Curl(), gp_orff.Divergence()):
    assert field.mean(xs, symbol).abs().max() < 1e-6  # a property of the harmonic kernel

# %% [markdown]
# ## The potential
#
# With `background=True`, `field.potential` includes the constant mean of the model, which adds a
# linear term. The potential is zero at the reference, and its error bars are those of the
# difference from the reference. All of these share the error at the reference, so that the share
# inside is about one draw; differences between pairs of places are many.

# %%
level = lines((-70, -40, 41), (-38, -12, 41), (100, 100, 1))  # for the maps
at, (true_b, g_level) = position(level), igrf(level)
origin = {"reference": torch.zeros(3), "background": True}
potential = field.potential(torch.cat([xs, at]), **origin)
(g, g_map), bar = potential.mean.split([tests, len(at)]), potential.variance.sqrt()[:tests]
share = ((g - true_g).abs() < 1.96 * bar).double().mean()
print(f"\npotential (T m): {true_g.std() / 1e6:.1f} from place to place, ", end="")
print(f"RMSE {rms(g - true_g) / 1e6:.4f}, sd {rms(bar) / 1e6:.4f}, {share:.3f} inside 95 %")
few, (i, j) = field.potential(xs[:200], **origin), torch.triu_indices(200, 200, 1)
between = few.covariance_matrix.detach()
bar = (between[i, i] + between[j, j] - 2 * between[i, j]).clamp_min(0).sqrt()
miss = (g - true_g)[i] - (g - true_g)[j]
print(f"between pairs of places: {(miss.abs() < 1.96 * bar).double().mean():.3f} inside 95 %")
assert rms(g - true_g) < 1e-3 * true_g.std()

# %% [markdown]
# ## The figure

# %%
matplotlib.use("agg")
from matplotlib import pyplot as plt

mean, sd, plane = field.mean(at), field.variance(at).sum(-1).sqrt(), at[:, :2]
miss, g_miss = (mean - true_b).norm(dim=-1), (g_map - g_level) / 1e3
horizontal = {"vectors": mean[:, :2] / 1e3, "arrows": 12, "reference": "µT"}
scale = matplotlib.colors.Normalize
bars, signed = {"norm": scale(0, 8), "cmap": "cividis"}, {"cmap": "PuOr"}
maps = [
    ("mean at 100 km", mean.norm(dim=-1) / 1e3, "|B| (µT); arrows: horizontal", horizontal),
    ("its standard deviation", sd, "standard deviation (nT)", bars),
    ("its error, on the same scale", miss, "|error| (nT)", bars),
    ("potential at 100 km", g_map / 1e6, "potential (T m)", {"norm": scale(-40, 40), **signed}),
    ("its error", g_miss, "error (mT m)", {"norm": scale(-4, 4), **signed}),
]
plt.rcParams["axes.titlesize"] = "medium"
figure, axes = plt.subplots(2, 3, figsize=(13, 7.6), layout="compressed")
for ax, (title, shade, label, how) in zip(axes.flat[:5], maps, strict=True):
    ax.axis([-1220, 1220, -1220, 1220])
    plot_field(ax, plane, shade=shade, label=label, **how)
    ax.set(xlabel="east (km)", ylabel="north (km)")
    ax.set_title(title, loc="left")
for (name, own), style in zip(surveys.items(), ("w^", "yo", "ms"), strict=True):
    axes[0, 1].plot(*position(own)[:, :2].T, style, ms=4, mec="k", mew=0.5, label=name)
axes[0, 1].legend(loc="lower right", fontsize="small")
ax = axes[1, 2]
for half, longitude, colour in (("west", -62, "#0072B2"), ("east", -48, "#D55E00")):
    column = lines((longitude, longitude, 1), (-25, -25, 1), (0, 500, 51))
    there, up = curl_free.divergence(position(column)), column[:, 2]
    bar = 1.96 * there.variance.sqrt()
    ax.fill_betweenx(up, there.mean - bar, there.mean + bar, color=colour, alpha=0.3)
    ax.plot(there.mean, up, color=colour, lw=2, label=f"{half}, {-longitude}° W")
ax.axvline(0, color="black", lw=1)
ax.set(title="curl-free kernel: divergence at 25° S", xlabel="divergence, 95 % intervals (nT/km)")
ax.set(ylabel="height (km)", ylim=(0, 500), box_aspect=1)
ax.legend(loc="right", fontsize="small")
arguments.output.mkdir(parents=True, exist_ok=True)
figure.savefig(arguments.output / "earths_field.png", dpi=100, bbox_inches="tight")
print(f"\nfigure: {arguments.output}/earths_field.png")
