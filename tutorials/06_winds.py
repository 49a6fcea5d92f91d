# %% [markdown]
# # 6. Winds: vorticity and divergence of a limited area
#
# Spherical harmonics need the winds of the whole globe. What are the vorticity and the divergence
# of one region, given the winds at some stations in it, and how uncertain are they? Can a part of a
# sphere be treated as a plane?
#
# The lines to copy:
#
# ```python
# model = gp_orff.VectorFieldGP(gp_orff.HelmholtzKernel(RQKernel(), num_dims=2))
# field = model.fit(x, f).posterior()        # f: the wind over the map scale m, on the map's axes
# vorticity = m**2 * field.mean(xs, gp_orff.Curl())[:, 0]                       # on the sphere
# sd = m**2 * field.variance(xs, gp_orff.Curl())[:, 0].sqrt()
# psi = field.stream_function(xs).mean
# ```

# %%
import argparse
import math
from copy import deepcopy
from pathlib import Path

import matplotlib
import numpy as np
import torch
from gpytorch.kernels import RBFKernel, RQKernel

import gp_orff
from gp_orff.plotting import plot_field

parser = argparse.ArgumentParser(description="Vorticity and divergence of winds of an area.")
parser.add_argument("--output", type=Path, default=Path("tutorials/output"))
parser.add_argument("--smoke", action="store_true", help="small and quick, to see that it runs")
arguments = parser.parse_args()
share, step = (0.15, 2.0) if arguments.smoke else (0.25, 1.0)  # of stations; of the map, degrees

# %% [markdown]
# ## The data
#
# The data are winds at 200 hPa over East Asia and the western Pacific, the long-term mean of
# January, every 2.5 degrees: the strongest jet of the globe. A random quarter of the points are our
# stations; no noise is added. We compare with the vorticity, the divergence and the divergent part
# of the wind that follow from the winds of the whole globe (data/README.md).
#
# Lengths are in 1000 km, so vorticity and divergence are in (m/s) / 1000 km = 1e-6/s.

# %%
path = Path(__file__).parent / "data" / "winds.csv"
columns = torch.from_numpy(np.loadtxt(path, delimiter=",", skiprows=1))
degrees, wind, *scalars, divergent = columns.split([2, 2, 1, 1, 2], dim=-1)
symbols = {"vorticity": gp_orff.Curl(), "divergence": gp_orff.Divergence()}
reference = dict(zip(symbols, scalars, strict=True))
generator = torch.Generator().manual_seed(0)
station = torch.rand(len(degrees), generator=generator, dtype=torch.float64) < share
print(f"{station.sum()} stations, {(~station).sum()} points held out")

# %% [markdown]
# ## A conformal map
#
# Lambert's conformal cone touches the sphere of radius R at 35 N. It preserves angles and magnifies
# lengths by m; it turns east and north by an angle that grows with longitude. For a wind w along
# the axes of the map, and f = w / m, these equations are exact on the sphere:
#
#     vorticity = m^2 curl f        divergence = m^2 div f        parts of w = m (parts of f)
#
# The stream function of f is that of w. With w as a complex number, the rotation and the division
# by m are one product.

# %%
radius, lon0, lat0 = 6.3712, math.radians(140), math.radians(35)  # 1000 km


def lambert(degrees):
    """Positions (n, 2) on the map, its scale m (n,), and the angle of its axes (n,)."""
    lon, lat = degrees.deg2rad().T
    n, rho0 = math.sin(lat0), radius / math.tan(lat0)
    ratio = math.tan(math.pi / 4 + lat0 / 2) / (math.pi / 4 + lat / 2).tan()
    rho, angle = rho0 * ratio**n, n * (lon - lon0)
    x = torch.stack([rho * angle.sin(), rho0 - rho * angle.cos()], dim=-1)
    return x, n * rho / (radius * lat.cos()), angle


def turn(vectors, factor, angle):
    """Vectors (n, 2) turned counter-clockwise and multiplied by a factor (n,)."""
    turned = torch.view_as_complex(vectors.contiguous()) * torch.polar(factor, angle)
    return torch.view_as_real(turned)


x, scale, angle = lambert(degrees)
one = torch.ones_like(scale)
f = turn(wind, 1 / scale, angle)
print(f"map scale from {scale.min():.3f} to {scale.max():.3f}")

# %% [markdown]
# ## Fit
#
# Winds have structure at many scales: a jet, troughs, mountains. A rational quadratic kernel is a
# mixture of RBF kernels with many lengthscales. Does its evidence exceed that of an RBF kernel?

# %%
kernels = {
    "RBF": gp_orff.HelmholtzKernel(RBFKernel(), num_dims=2),
    "rational quadratic": gp_orff.HelmholtzKernel(RQKernel(), num_dims=2),
}
comparison = gp_orff.compare_kernels(x[station], f[station], kernels, progress=False)
print(f"\n{comparison}\n\n{comparison.best.report}")
assert next(iter(comparison.evidence)) == "rational quadratic"

# %% [markdown]
# ## At the points held out
#
# The table has the root mean squares of the quantity, of the error and of the posterior standard
# deviation; the correlation; the share of the truth inside the 95 % intervals; and the share of
# points where the sign is certain: |mean| > 1.96 sd.


# %%
def score(name, mean, sd, truth):
    """Print a row; return the error, and the share inside the intervals."""
    mean, sd, truth = mean[~station], sd[~station], truth[~station]
    rms = [part.square().mean().sqrt().item() for part in (truth, mean - truth, sd)]
    correlation = torch.corrcoef(torch.stack([mean.ravel(), truth.ravel()]))[0, 1].item()
    inside = ((mean - truth).abs() < 1.96 * sd).double().mean().item()
    sign = (mean.abs() > 1.96 * sd).double().mean().item()
    print(f"{name:28}" + "".join(f"{value:8.2f}" for value in rms), end="")
    print(f"{correlation:8.3f}{inside:8.3f}{sign:8.3f}")
    return rms[1], inside


def posterior(field, x, factor, symbol=None):
    """Mean and standard deviation of a quantity on the sphere."""
    factor = factor[:, None]
    return factor * field.mean(x, symbol), factor * field.variance(x, symbol).sqrt()


field, spread = comparison.best.posterior(), gp_orff.CurlFreePart()
titles = "".join(f"{title:>8}" for title in ("truth", "error", "sd", "corr", "95 %", "sign"))
print(f"\n{'m/s, or 1e-6/s':28}{titles}")
score("wind", *posterior(field, x, scale), turn(wind, one, angle))
inside = {}
for name, symbol in symbols.items():
    estimate = posterior(field, x, scale**2, symbol)
    error, inside[name] = score(name, *estimate, reference[name])
    assert error < (0.8 if arguments.smoke else 0.3) * reference[name].std()
    assert inside[name] > (0.8 if arguments.smoke else 0.9)  # of one field

mean, sd = posterior(field, x, scale, spread)
truth = turn(divergent, one, angle)
whole, _ = score("divergent part", mean, sd, truth)
offset = (mean - truth).mean(0)
rest, _ = score("    less the difference", mean - offset, sd, truth)
print(f"the mean difference: {offset.norm():.2f} m/s")
assert rest < 0.6 * whole

# %% [markdown]
# The stations near a point determine its vorticity and its divergence. The divergent part also
# depends on the winds outside the area: a field without curl and divergence in the area, such as a
# constant, may belong to either part. Global winds determine this; winds of the area do not. The
# model assigns its constant mean to neither part. Apart from the mean difference, both agree.
#
# ## The errors of a plane without a map
#
# We learn the same again with two simplifications: without the scale of the map; and without a map,
# in longitude and latitude, x = R cos(35 N) (lon - 140 E), y = R (lat - 35 N). The vorticity on the
# sphere has a term u tan(lat) / R, and the divergence a term -v tan(lat) / R, that such a plane
# lacks. Lengths from west to east are magnified by cos(35 N) / cos(lat).

# %%
lat = degrees[:, 1:].deg2rad()
terms, stretch = (wind * lat.tan() / radius).square().mean(0).sqrt(), math.cos(lat0) / lat.cos()
print(f"\nno map: missing terms {terms[0]:.2f} and {terms[1]:.2f} (rms, 1e-6/s), ", end="")
print(f"lengths from west to east times {stretch.min():.2f} to {stretch.max():.2f}")

centred = (degrees - torch.tensor([140.0, 35.0])).deg2rad()
flat = radius * centred * torch.tensor([math.cos(lat0), 1.0])
print(f"\n{'m/s, or 1e-6/s':28}{titles}")
for name, (positions, turned) in {"no scale": (x, angle), "no map": (flat, 0 * angle)}.items():
    model, w = deepcopy(comparison.best), turn(wind, one, turned)
    model.fit(positions[station], w[station], warm_start=True, progress=False)
    careless = model.posterior()
    score(f"wind, {name}", *posterior(careless, positions, one), w)
    for quantity, symbol in symbols.items():
        estimate = posterior(careless, positions, one, symbol)
        _, found = score(f"{quantity}, {name}", *estimate, reference[quantity])
        assert found < inside[quantity]

# %% [markdown]
# The winds are as accurate as before. Their derivatives are not, and the error bars do not show it:
# they are those of a field on the plane. The map and its scale take six lines.
#
# ## The figure (`background=True` assigns the model's constant mean to the stream function)

# %%
matplotlib.use("agg")
from matplotlib import pyplot as plt

east, north = (torch.arange(*ends, step).double() for ends in ((100, 180.5), (15, 55.5)))
raster = torch.cartesian_prod(east, north)
xs, m, tilt = lambert(raster)
psi = field.mean(xs, gp_orff.StreamFunction(background=True))[:, 0]
blown, parted = (turn(field.mean(xs, part), m, -tilt) for part in (None, spread))

plt.rcParams["axes.titlesize"] = "medium"
figure, axes = plt.subplots(2, 3, figsize=(13, 4.6), sharex=True, sharey=True, layout="compressed")
arrows = {"arrows": 20, "reference": "m/s"}
plot_field(axes[0, 0], raster, blown, shade=blown.norm(dim=-1), label="speed (m/s)", **arrows)
axes[0, 0].plot(*degrees[station].T, "o", ms=2.5, color="#D55E00")
axes[0, 0].set_title("wind (dots: stations)", loc="left")
label = "stream function (10⁶ m²/s)"
plot_field(axes[1, 0], raster, parted, shade=psi, label=label, cmap="cividis", **arrows)
axes[1, 0].set_title("divergent part (arrows)", loc="left")
for (name, symbol), (left, right) in zip(symbols.items(), axes[:, 1:], strict=True):
    mean, sd = (part[:, 0] for part in posterior(field, xs, m**2, symbol))
    limit = reference[name].abs().quantile(0.99).item()
    signed = {"norm": matplotlib.colors.Normalize(-limit, limit), "cmap": "PuOr_r"}
    plot_field(left, degrees, shade=reference[name][:, 0], label="10⁻⁶/s", **signed)
    plot_field(right, raster, shade=mean, label="10⁻⁶/s", **signed)
    unknown = (mean.abs() < 1.96 * sd).reshape(len(east), -1).T.double()
    right.contourf(east, north, unknown, [0.5, 1.5], colors="none", hatches=["/////"])
    left.set_title(f"{name} from the winds of the globe", loc="left")
    right.set_title(f"{name}, stations (hatched: sign unknown)", loc="left")
plt.setp(axes[1], xlabel="longitude (°E)")
plt.setp(axes[:, 0], ylabel="latitude (°N)")
arguments.output.mkdir(parents=True, exist_ok=True)
figure.savefig(arguments.output / "winds.png", dpi=100, bbox_inches="tight")
print(f"\nfigure: {arguments.output}/winds.png")
