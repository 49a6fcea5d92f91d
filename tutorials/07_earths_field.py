# %% [markdown]
# # 7. The Earth's magnetic field between the heights of three surveys
#
# From observations of satellites and aircraft, we estimate the magnetic field of the Earth and its
# potential at all heights between them.
#
# Two satellites observe the field at heights of 460 and 255 km. Aircraft observe it at 3 km, in
# half of the region. What is the field at other positions and heights, and how uncertain is it? If
# there are no electric currents, the field is a gradient and has no divergence. The harmonic kernel
# has both properties. It is the covariance of a field whose sources are below all observations.
# These are the lines to copy:
#
# ```python
# # in km and nT, with a separate noise for each instrument
# model = gp_orff.VectorFieldGP(gp_orff.HarmonicKernel())
# model.fit(x, y, group=instrument)
# field = model.posterior()
# mean, sd = field.mean(xs), field.variance(xs).sqrt()
#
# # with the potential of the constant mean
# potential = field.potential(xs, reference=x0, background=True)
# ```

# %% tags=["remove-cell"]
import argparse
from pathlib import Path

parser = argparse.ArgumentParser(
    description="The Earth's magnetic field from three surveys.",
    allow_abbrev=False,
)
parser.add_argument("--output", type=Path, default=Path("tutorials/output"))
parser.add_argument(
    "--smoke",
    action="store_true",
    help="small and quick, to see that it runs",
)
arguments, _ = parser.parse_known_args()  # Jupyter adds its own

# %%
import time
from datetime import datetime

import numpy as np
import torch
from gpytorch.kernels import MultitaskKernel, RBFKernel
from matplotlib import pyplot as plt
from ppigrf.ppigrf import igrf_gc, igrf_V

import gp_orff
from gp_orff.plotting import (
    STYLE,
    plot_coastlines,
    plot_deviation,
    plot_field,
    title_panels,
)

thin, tests = 1, 2000  # use every observation; held-out points

# %% tags=["remove-cell"]
if arguments.smoke:
    thin, tests = 3, 300

# %% [markdown]
# ## The true field
#
# The true field is the International Geomagnetic Reference Field, IGRF-14, which describes the
# field of the core up to degree 13. The directions east, north and up depend on the position.
# Components along them are therefore not the partial derivatives of a potential. We use the axes at
# one point in South America, the centre, for all positions.
#
# Let E be the matrix whose rows are the directions east, north and up at a position r. Let E0 and
# r0 be this matrix and the position of the centre. Then x = E0 (r − r0) and B = E0 Eᵀ B_local.
# Latitudes are geocentric, and heights are above a sphere with a radius of 6371.2 km.

# %%
radius, date = 6371.2, datetime(2025, 1, 1)
# longitude and latitude (degrees), height (km)
centre = torch.tensor([[-55.0, -25.0, 0.0]], dtype=torch.float64)


def turn(places):
    """E, (n, 3, 3), at places (n, 3): longitude, latitude, height."""
    lon, lat, _ = places.deg2rad().T
    up = torch.stack(
        [lat.cos() * lon.cos(), lat.cos() * lon.sin(), lat.sin()], dim=-1
    )
    east = torch.stack([-lon.sin(), lon.cos(), 0 * lon], dim=-1)
    return torch.stack([east, torch.linalg.cross(up, east), up], dim=-2)


def position(places):
    """x, (n, 3), in km along the axes of the centre."""
    r, r0 = ((radius + p[:, 2:]) * turn(p)[:, 2] for p in (places, centre))
    return (r - r0) @ turn(centre)[0].T


def igrf(places):
    """B, (n, 3), in nT, and its potential g, (n,), in nT km: B = ∇g.

    B is along the axes of the centre, and g is zero there.
    """
    longitude, latitude, height = places.T.numpy()
    spherical = radius + height, 90 - latitude, longitude, date
    (up, south, east), minus_g = igrf_gc(*spherical), igrf_V(*spherical)[0]
    local = torch.from_numpy(np.stack([east, -south, up], axis=-1)[0])
    turned = torch.einsum("ij,nkj,nk->ni", turn(centre)[0], turn(places), local)
    return turned, torch.from_numpy(
        igrf_V(radius, 115.0, -55.0, date)[0] - minus_g
    )


# %% [markdown]
# ## Three surveys
#
# The two satellites are on polar orbits. The aircraft fly from west to east, as far as 56° W. The
# fields of the crust and of currents in space are part of the noise. The noise is largest for the
# aircraft, because they are near the rocks. We pass the instrument of each observation, and the
# model learns a separate noise for each instrument.


# %%
def lines(longitudes, latitudes, heights, tilt=0.0):
    """Places (n, 3) on lines; each range is (first, last, number)."""
    steps = [
        torch.linspace(*r, dtype=torch.float64)
        for r in (longitudes, latitudes, heights)
    ]
    places = torch.cartesian_prod(*steps)
    places[:, 0] -= tilt * (places[:, 1] + 25)  # the Earth turns below an orbit
    return places


def rms(values, *dims):
    return values.square().mean(*dims).sqrt()


surveys = {
    "satellite": lines(
        (-71, -39, 11), (-39, -11, 13), (460, 460, 1), tilt=0.065
    )[::thin],
    "low satellite": lines(
        (-69, -41, 10), (-38, -12, 13), (255, 255, 1), tilt=0.065
    )[::thin],
    "aircraft": lines((-70, -56, 10), (-38, -12, 11), (3, 3, 1))[::thin],
}
noise = {"satellite": 5.0, "low satellite": 10.0, "aircraft": 50.0}  # nT
places, generator = (
    torch.cat(list(surveys.values())),
    torch.Generator().manual_seed(0),
)
instrument = [name for name, own in surveys.items() for _ in own]
sigma = torch.tensor([noise[name] for name in instrument], dtype=torch.float64)[
    :, None
]
x = position(places)
y = igrf(places)[0] + sigma * torch.randn(
    x.shape, generator=generator, dtype=torch.float64
)
print(
    ", ".join(
        f"{len(own)} observations by {name}" for name, own in surveys.items()
    )
)
low, high = torch.tensor(
    [[-69.0, -37, 0], [-41, -13, 500]], dtype=torch.float64
)
held_out = low + (high - low) * torch.rand(
    tests, 3, generator=generator, dtype=torch.float64
)
xs, (truth, true_g) = position(held_out), igrf(held_out)

# %% [markdown]
# ## Fit
#
# We compare a harmonic kernel with a curl-free kernel and with three independent components. The
# data set is small enough for the exact kernels. The evidence is the log marginal likelihood, in
# nats.
#
# The scores are for one component at 2000 held-out points up to a height of 500 km. They are the
# root mean square error (RMSE, nT), the posterior standard deviation (sd, nT), and the coverage of
# the 95 % intervals. The table has these scores first for the harmonic kernel, then for the
# curl-free kernel.

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
    models[name] = gp_orff.VectorFieldGP(kernel).fit(
        x, y, group=instrument, progress=False
    )
    seconds, nats[name] = (
        time.perf_counter() - began,
        models[name].log_marginal_likelihood().item(),
    )
    errors[name] = models[name].posterior().mean(xs) - truth
    parts = "east {:.1f}, north {:.1f}, up {:.1f}".format(*rms(errors[name], 0))
    print(
        f"{name:12} evidence {nats[name]:.1f}, RMSE {parts}, fit {seconds:.1f} s"
    )
model, curl_free = models["harmonic"], models["curl-free"].posterior()
error, other = errors["harmonic"], errors["curl-free"]
learned = {
    key: own.noise.item() ** 0.5 for key, own in model.likelihoods.items()
}
print(
    "noise learned (nT): "
    + ", ".join(f"{key} {own:.1f}" for key, own in learned.items())
)
field = model.posterior()
sd, other_sd = field.variance(xs).sqrt(), curl_free.variance(xs).sqrt()
inside, other_inside = (
    (miss.abs() < 1.96 * bar).double()
    for miss, bar in ((error, sd), (other, other_sd))
)
west, low = held_out[:, 0] < -55, held_out[:, 2] < 255
regions = {
    "above 255 km": ~low,
    "below, west": low & west,
    "below, east": low & ~west,
}
print(
    f"\n{'':14}{'RMSE':>8}{'sd':>8}{'95 %':>8}{'curl-free: RMSE':>18}{'sd':>8}{'95 %':>8}"
)
for name, here in {**regions, "all": low | ~low}.items():
    print(f"{name:14}{rms(error[here]):8.1f}{rms(sd[here]):8.1f}", end="")
    print(
        f"{inside[here].mean():8.3f}{rms(other[here]):18.1f}{rms(other_sd[here]):8.1f}",
        end="",
    )
    print(f"{other_inside[here].mean():8.3f}")
assert nats["harmonic"] > nats["curl-free"] > nats["independent"]
assert rms(error) < rms(other) < rms(errors["independent"])
assert all(0.7 < learned[key] / noise[key] < 1.4 for key in noise)
assert 0.7 < inside.mean() < 0.99

# %% [markdown]
# The harmonic kernel has the highest evidence and the smallest errors. Its errors are one or two
# nT, for a field of about 22 000 nT, and the coverage of its 95 % intervals is 0.90 to 0.99. The
# errors of the curl-free kernel are four times as large. They are largest where the field is
# continued downwards from the satellites. The intervals of this kernel are too narrow.
#
# ## A check without the true field
#
# The true field has no divergence. Fields drawn from the harmonic kernel have no divergence either,
# but fields drawn from the curl-free kernel have one. We can therefore check the curl-free model
# without the true field. If its posterior were calibrated, the 95 % intervals of the divergence
# would contain zero at about 95 % of the points. The root mean square of the divergence divided by
# its standard deviation would be about 1. It is larger, so the posterior is overconfident. The
# reason is the RBF kernel of the potential. It is as smooth near the ground as at great heights,
# but the field is not.

# %%
divergence = curl_free.divergence(xs)
ratio = divergence.mean / divergence.variance.sqrt()
terms = rms(curl_free.mean(xs, gp_orff.Jacobian())[:, [0, 4, 8]], 0)
share = (ratio.abs() < 1.96).double().mean()
print("\nthe curl-free kernel, rms:")
terms = "{:.2f}, {:.2f} and {:.2f}".format(*terms)
print(f"terms of the divergence {terms} nT/km")
print(f"divergence {rms(divergence.mean):.2f} nT/km, ", end="")
print(f"divergence over its sd {rms(ratio):.2f}")
print(f"error over its sd {rms(other / other_sd):.2f}")
print(f"the interval contains zero at {share:.3f} of the points")
assert min(rms(ratio), rms(other / other_sd)) > 1.1
for symbol in (gp_orff.Curl(), gp_orff.Divergence()):
    assert field.mean(xs, symbol).abs().max() < 1e-6  # harmonic kernel

# %% [markdown]
# ## The potential
#
# With `background=True`, `field.potential` includes the constant mean of the model, which adds a
# linear term. The potential is zero at the reference point. Its standard deviation is that of the
# difference from the reference, so the error at the reference is a part of every difference. The
# coverage over all points therefore depends strongly on this one error. The coverage of differences
# between pairs of points is a better test, because it averages over many errors.

# %%
origin = {"reference": torch.zeros(3), "background": True}
potential = field.potential(xs, **origin)
g, bar = potential.mean, potential.variance.sqrt()
share = ((g - true_g).abs() < 1.96 * bar).double().mean()
print(
    f"\npotential (T m): sd over positions {true_g.std() / 1e6:.1f}, ", end=""
)
print(f"RMSE {rms(g - true_g) / 1e6:.4f}, ", end="")
print(f"posterior sd {rms(bar) / 1e6:.4f}, coverage {share:.3f}")
first = field.potential(xs[:200], **origin)
i, j = torch.triu_indices(200, 200, 1)
between = first.covariance_matrix.detach()
bar = (between[i, i] + between[j, j] - 2 * between[i, j]).clamp_min(0).sqrt()
miss = (g - true_g)[i] - (g - true_g)[j]
share = (miss.abs() < 1.96 * bar).double().mean()
print(f"differences between pairs of points: coverage {share:.3f}")
assert rms(g - true_g) < 1e-3 * true_g.std()

# %% [markdown]
# ## The maps
#
# The field has its minimum over South America. Panels b and c have the same scale: the error of the
# vector is about as large as its standard deviation. Panel d shows the divergence that the
# curl-free kernel gives along two vertical lines. Near the ground in the east, and above 450 km,
# its 95 % intervals do not contain zero.

# %%
plt.style.use(STYLE)
level = lines((-70, -40, 41), (-38, -12, 41), (100, 100, 1))
at, degrees = position(level), level[:, :2]
mean = field.mean(at)
error = (mean - igrf(level)[0]).norm(dim=-1)
sd = field.variance(at).sum(-1).sqrt()
figure, axes = plt.subplots(2, 2, figsize=(7.2, 5.9), layout="compressed")
*maps, profile = axes.flat
strength, scale = mean.norm(dim=-1) / 1e3, plt.Normalize(0, 8)
plot_field(maps[0], degrees, shade=strength, label="|mean of B| (µT)")
plot_deviation(maps[1], degrees, sd, label="sd of B (nT)", norm=scale)
plot_deviation(maps[2], degrees, error, label="|mean − truth| (nT)", norm=scale)
symbols = [("^", "white"), ("o", "#E69F00"), ("s", "#CC79A7")]
for (name, own), (marker, color) in zip(surveys.items(), symbols, strict=True):
    label = f"{name}, {own[0, 2]:.0f} km"
    style = {"ms": 3, "mec": "k", "mew": 0.4, "label": label}
    maps[0].plot(*own[:, :2].T, marker, color=color, **style)
for ax in maps:
    ax.axis([-70, -40, -38, -12])
    ax.set(xlabel="longitude (° E)", ylabel="latitude (° N)")
    plot_coastlines(ax)
for longitude, color in ((-62, "#0072B2"), (-48, "#D55E00")):
    line = lines((longitude, longitude, 1), (-25, -25, 1), (0, 500, 51))
    divergence, height = curl_free.divergence(position(line)), line[:, 2]
    center, bar = divergence.mean, 1.96 * divergence.variance.sqrt()
    band = {"color": color, "alpha": 0.3, "lw": 0}
    profile.fill_betweenx(height, center - bar, center + bar, **band)
    profile.plot(center, height, color=color, label=f"{-longitude}° W")
profile.axvline(0, color="black", lw=1, label="truth")
profile.set(xlabel="mean and 95 % interval (nT/km)", ylabel="height (km)")
profile.set(ylim=(0, 500), box_aspect=26 / 30)
profile.legend(loc="right")
below = {"loc": "upper center", "bbox_to_anchor": (0.55, -0.22), "ncols": 3}
maps[0].legend(**below, columnspacing=0.8, handletextpad=0)
title_panels(
    axes,
    [
        "mean at 100 km, and observations",
        "standard deviation at 100 km",
        "error at 100 km",
        "curl-free kernel: divergence, 25° S",
    ],
)

# %% tags=["remove-cell"]
arguments.output.mkdir(parents=True, exist_ok=True)
figure.savefig(arguments.output / "earths_field.png")
figure.savefig(arguments.output / "earths_field.pdf")
title = maps[0].get_title(loc="left")[4:]  # without the letter
maps[0].set_title(title, loc="left")
card = maps[0].get_tightbbox().transformed(figure.dpi_scale_trans.inverted())
figure.savefig(
    arguments.output / "earths_field_card.png",
    dpi=150,
    bbox_inches=card.padded(0.05),
)
print(f"\nfigure: {arguments.output}/earths_field.png")
