# %% [markdown]
# # 6. Winds: vorticity and divergence of a limited area
#
# From winds at stations, we estimate the vorticity and the divergence of a region of the globe,
# with error bars.
#
# Spherical harmonics require the winds of the complete globe. For a part of the globe, use a
# conformal map, which preserves angles, and correct for its scale. These are the lines to copy:
#
# ```python
# # f: the wind along the axes of the map, divided by its scale m
# kernel = gp_orff.HelmholtzKernel(RQKernel(), num_dims=2)
# field = gp_orff.VectorFieldGP(kernel).fit(x, f).posterior()
#
# # on the sphere
# curl = gp_orff.Curl()
# vorticity = m**2 * field.mean(xs, curl)[:, 0]
# sd = m**2 * field.variance(xs, curl)[:, 0].sqrt()
# ```

# %% tags=["remove-cell"]
import argparse
from pathlib import Path

parser = argparse.ArgumentParser(
    description="Vorticity and divergence of winds of an area.",
    allow_abbrev=False,
)
parser.add_argument("--output", type=Path, default=Path("tutorials/output"))
parser.add_argument(
    "--smoke",
    action="store_true",
    help="small and quick, to see that it runs",
)
arguments, _ = parser.parse_known_args()  # Jupyter adds its own
folder = Path("tutorials") if Path("tutorials").exists() else Path()

# %%
import math
from copy import deepcopy

import numpy as np
import torch
from gpytorch.kernels import RBFKernel, RQKernel
from matplotlib import pyplot as plt

import gp_orff
from gp_orff.plotting import (
    STYLE,
    plot_coastlines,
    plot_deviation,
    plot_field,
    plot_map,
    title_panels,
)

share = 0.25  # fraction of the points that are stations
step = 1.0  # degrees, between the points of the figures

# %% tags=["remove-cell"]
if arguments.smoke:
    share, step = 0.15, 2.0

# %% [markdown]
# ## The data
#
# The data are the long-term mean winds of January at 200 hPa over East Asia and the western
# Pacific, every 2.5 degrees. They include the strongest jet of the globe. A random quarter of the
# points are our stations, and no noise is added. The vorticity, the divergence and the divergent
# part of the wind were computed from the winds of the complete globe (data/README.md). They serve
# as the truth.
#
# Lengths are in 1000 km, so vorticity and divergence are in (m/s) / 1000 km = 10⁻⁶/s.

# %%
path = folder / "data" / "winds.csv"
columns = torch.from_numpy(np.loadtxt(path, delimiter=",", skiprows=1))
degrees, wind, *scalars, divergent = columns.split([2, 2, 1, 1, 2], dim=-1)
symbols = {"vorticity": gp_orff.Curl(), "divergence": gp_orff.Divergence()}
reference = dict(zip(symbols, scalars, strict=True))
generator = torch.Generator().manual_seed(0)
station = torch.rand(len(degrees), generator=generator).double() < share
print(f"{station.sum()} stations, {(~station).sum()} points held out")

# %% [markdown]
# ## A conformal map
#
# Lambert's conformal cone touches the sphere of radius R at 35° N. It preserves angles and
# multiplies lengths by its scale m. It rotates east and north by an angle that grows with
# longitude. Let w be the wind with components along the axes of the map, and let f = w / m. Then
# these equations are exact on the sphere. The "parts" are the curl-free and the divergence-free
# part:
#
#     vorticity = m² curl f        divergence = m² div f        parts of w = m (parts of f)
#
# The stream functions of f and w are equal. If the wind is a complex number, one product does both
# the rotation to the axes of the map and the division by m.

# %%
radius, lon0, lat0 = 6.3712, math.radians(140), math.radians(35)  # 1000 km


def lambert(degrees):
    """Positions (n, 2) on the map, its scale m (n,), the angle of its axes (n,)."""
    lon, lat = degrees.deg2rad().T
    n, rho0 = math.sin(lat0), radius / math.tan(lat0)
    ratio = math.tan(math.pi / 4 + lat0 / 2) / (math.pi / 4 + lat / 2).tan()
    rho, angle = rho0 * ratio**n, n * (lon - lon0)
    x = torch.stack([rho * angle.sin(), rho0 - rho * angle.cos()], dim=-1)
    return x, n * rho / (radius * lat.cos()), angle


def turn(vectors, factor, angle):
    """Vectors (n, 2) turned counter-clockwise and multiplied by a factor (n,)."""
    turned = torch.view_as_complex(vectors.contiguous())
    return torch.view_as_real(turned * torch.polar(factor, angle))


x, scale, angle = lambert(degrees)
one = torch.ones_like(scale)
f = turn(wind, 1 / scale, angle)
print(f"map scale from {scale.min():.3f} to {scale.max():.3f}")

# %% [markdown]
# ## Fit
#
# Winds have structure on many scales, because of jets, troughs and mountains. A rational quadratic
# kernel is a mixture of RBF kernels with many lengthscales. We compare its evidence with that of an
# RBF kernel.

# %%
kernels = {
    "RBF": gp_orff.HelmholtzKernel(RBFKernel(), num_dims=2),
    "rational quadratic": gp_orff.HelmholtzKernel(RQKernel(), num_dims=2),
}
comparison = gp_orff.compare_kernels(
    x[station], f[station], kernels, progress=False
)
print(f"\n{comparison}\n\n{comparison.best.report}")
assert next(iter(comparison.evidence)) == "rational quadratic"

# %% [markdown]
# ## Scores at the held-out points
#
# The columns of the table are:
#
# - the root mean squares of the true quantity, of the error, and of the posterior standard
#   deviation;
# - the correlation of the posterior mean and the truth;
# - the coverage of the 95 % intervals;
# - the fraction of points at which the sign is known, |mean| > 1.96 sd.


# %%
def score(name, mean, sd, truth):
    """Print a row; return the error, and the coverage of 95 % intervals."""
    mean, sd, truth = mean[~station], sd[~station], truth[~station]
    parts = truth, mean - truth, sd
    rms = [part.square().mean().sqrt().item() for part in parts]
    pair = torch.stack([mean.ravel(), truth.ravel()])
    correlation = torch.corrcoef(pair)[0, 1].item()
    coverage = ((mean - truth).abs() < 1.96 * sd).double().mean().item()
    sign = (mean.abs() > 1.96 * sd).double().mean().item()
    print(f"{name:28}" + "".join(f"{value:8.2f}" for value in rms), end="")
    print(f"{correlation:8.3f}{coverage:8.3f}{sign:8.3f}")
    return rms[1], coverage


def posterior(field, x, factor, symbol=None):
    """Mean and standard deviation of a quantity on the sphere."""
    mean, variance = field.mean(x, symbol), field.variance(x, symbol)
    return factor[:, None] * mean, factor[:, None] * variance.sqrt()


field, curl_free = comparison.best.posterior(), gp_orff.CurlFreePart()
head = f"\n{'m/s, or 10⁻⁶/s':28}"
for title in ("truth", "error", "sd", "corr", "95 %", "sign"):
    head += f"{title:>8}"
print(head)
score("wind", *posterior(field, x, scale), turn(wind, one, angle))
errors, coverage = {}, {}
for name, symbol in symbols.items():
    estimate = posterior(field, x, scale**2, symbol)
    errors[name], coverage[name] = score(name, *estimate, reference[name])

mean, sd = posterior(field, x, scale, curl_free)
truth = turn(divergent, one, angle)
whole, _ = score("divergent part", mean, sd, truth)
offset = (mean - truth).mean(0)
rest, _ = score("    minus mean difference", mean - offset, sd, truth)
print(f"the mean difference: {offset.norm():.2f} m/s")

# %% tags=["remove-cell"]
for name, truth in reference.items():
    assert errors[name] < (0.8 if arguments.smoke else 0.3) * truth.std()
    assert coverage[name] > (0.8 if arguments.smoke else 0.9)  # one field
assert rest < 0.6 * whole

# %% [markdown]
# The stations near a point determine its vorticity and its divergence. The divergent part of the
# wind also depends on the winds outside the region. For example, a constant wind has neither curl
# nor divergence in the region, and may belong to either part. The global winds determine to which
# part it belongs, but the winds of the region do not. The model assigns its constant mean to
# neither part. If we subtract the mean difference, the divergent parts of the model and of the
# global winds agree.
#
# ## The errors of two simplifications
#
# We fit the model again with each of two simplifications. The first omits the scale of the map. The
# second replaces the map by a plane of longitude and latitude:
#
#     x = R cos(35°) (lon − 140°)        y = R (lat − 35°)
#
# On the sphere, the vorticity has a term u tan(lat) / R, and the divergence has a term −v tan(lat)
# / R. The plane neglects both terms. It also multiplies lengths from west to east by cos(35°) /
# cos(lat).

# %%
lat = degrees[:, 1:].deg2rad()
terms = (wind * lat.tan() / radius).square().mean(0).sqrt()
stretch = math.cos(lat0) / lat.cos()
print(
    f"\nno map: terms of {terms[0]:.2f} and {terms[1]:.2f} neglected ", end=""
)
print("(rms, 10⁻⁶/s), lengths from west to east times ", end="")
print(f"{stretch.min():.2f} to {stretch.max():.2f}")

centred = (degrees - torch.tensor([140.0, 35.0])).deg2rad()
flat = radius * centred * torch.tensor([math.cos(lat0), 1.0])
planes = {"no scale": (x, angle), "no map": (flat, 0 * angle)}
print(head)
for name, (positions, turned) in planes.items():
    model, w = deepcopy(comparison.best), turn(wind, one, turned)
    model.fit(positions[station], w[station], warm_start=True, progress=False)
    plane = model.posterior()
    score(f"wind, {name}", *posterior(plane, positions, one), w)
    for quantity, symbol in symbols.items():
        estimate = posterior(plane, positions, one, symbol)
        truth = reference[quantity]
        _, found = score(f"{quantity}, {name}", *estimate, truth)
        assert found < coverage[quantity]

# %% [markdown]
# The winds are as accurate as before. Their derivatives are less accurate. The error bars do not
# include these errors, because they are for a field on the plane. The correct map and its scale
# need only six lines of code.
#
# ## The divergence and its error bars
#
# Panels c to f show the divergence of the global winds, its posterior mean, their difference, and
# the posterior standard deviation. Hatches mark places where the 95 % interval contains zero.

# %%
east = torch.arange(100, 180.5, step).double()
north = torch.arange(15, 55.5, step).double()
raster = torch.cartesian_prod(east, north)
xs, m, tilt = lambert(raster)
blown = turn(field.mean(xs), m, -tilt)
vorticity, divergence = (
    posterior(field, xs, m**2, symbol) for symbol in symbols.values()
)
truth = reference["divergence"]
at_points, _ = posterior(field, x, scale**2, symbols["divergence"])

plt.rcParams.update(STYLE)
figure, axes = plt.subplots(
    3, 2, figsize=(7.2, 6.2), sharex=True, sharey=True, layout="compressed"
)
speed = {"shade": blown.norm(dim=-1), "norm": plt.Normalize(0)}
arrows = {"arrows": 16, "reference": "m/s", "label": "wind speed (m/s)"}
plot_field(axes[0, 0], raster, blown, **speed, **arrows)
dots = {"marker": "o", "ms": 2.6, "mfc": "#FF8000", "mec": "black", "mew": 0.3}
for ax in (axes[0, 0], axes[2, 1]):
    ax.plot(*degrees[station].T, ls="", zorder=2.8, **dots)
plot_map(axes[0, 1], raster, *vorticity, label="vorticity (10⁻⁶/s)")
limit = truth.abs().max().item()
signed = {"label": "divergence (10⁻⁶/s)", "norm": plt.Normalize(-limit, limit)}
plot_map(axes[1, 0], degrees, truth, **signed)
plot_map(axes[1, 1], raster, *divergence, **signed)
difference = at_points - truth
plot_map(axes[2, 0], degrees, difference, label="difference (10⁻⁶/s)")
plot_deviation(axes[2, 1], raster, divergence[1], label="sd (10⁻⁶/s)")
titles = (
    "wind; dots: stations",
    "vorticity, mean; hatched: sign unknown",
    "divergence of the global winds",
    "divergence, mean; hatched: sign unknown",
    "difference, (d) minus (c)",
    "sd of the divergence; dots: stations",
)
title_panels(axes, titles)
for ax in axes.flat:
    plot_coastlines(ax)
plt.setp(axes[-1], xlabel="longitude (°E)")
plt.setp(axes[:, 0], ylabel="latitude (°N)")

# %% tags=["remove-cell"]
output = arguments.output
output.mkdir(parents=True, exist_ok=True)
figure.savefig(output / "winds.pdf")
figure.savefig(output / "winds.png", dpi=160)
title = axes[1, 1].get_title(loc="left")[4:]  # without the letter
axes[1, 1].set_title(title, loc="left")
card = axes[1, 1].get_tightbbox().transformed(figure.dpi_scale_trans.inverted())
figure.savefig(
    output / "winds_card.png", dpi=150, bbox_inches=card.padded(0.05)
)
print(f"\nfigure: {output}/winds.png")
