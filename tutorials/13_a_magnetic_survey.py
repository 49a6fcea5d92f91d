# %% [markdown]
# # 13. A magnetic survey along flight lines
#
# From the strength of the magnetic field along flight lines, we estimate its three components at
# any height, with standard deviations.
#
# The *anomaly* is the field that rocks add to the main field of the Earth. Above the rocks, it has
# neither curl nor divergence. A `HarmonicKernel` describes such fields. These are the lines to
# copy:
#
# ```python
# x, y, options, plane = gp_orff.labelled.total_field(
#     survey, date=1978.3
# )
# noise = gp_orff.MultitaskStudentTLikelihood(num_tasks=3)
# model = gp_orff.VectorFieldGP(
#     gp_orff.HarmonicKernel(), likelihood=noise
# )
# field = model.fit(x, y, **options).posterior()
# field.mean(x)  # three components in nT: east, north, up
# field.mean(x + [0, 0, 1.0])  # continued upward by 1 km
# # the anomaly if the main field, of direction u, were vertical
# field.mean(x, gp_orff.ReductionToPole(u))
# ```

# %% tags=["remove-cell"]
import argparse
from pathlib import Path

parser = argparse.ArgumentParser(
    description="The magnetic field above Rio de Janeiro state.",
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
import importlib.util
import time

import numpy as np
import torch
import xarray
from matplotlib import pyplot as plt
from scipy.stats import gamma

import gp_orff
from gp_orff.plotting import (
    SIGNED,
    STYLE,
    plot_colorbar,
    plot_deviation,
    plot_map,
    title_panels,
)

# planes of sources, step of the rows, points along a side of the map
depths, step, count = 2, 1, 61

# %% tags=["remove-cell"]
if arguments.smoke:
    depths, step, count = 1, 12, 12

# %% [markdown]
# ## The survey
#
# The data are from an airborne survey of 1978 (CPRM, Brazil), in an area of 30 × 30 km. We use
# every sixth of 9913 observations, along 40 lines from north to south and three tie lines that
# cross them. Neighbouring lines are half a kilometre or more from each other. `total_field`
# converts longitude and latitude to kilometres. It also computes the direction u of the main field
# in 1978 at each observation. The observed anomaly is the component of the field of the rocks along
# u.

# %%
table = np.genfromtxt(
    folder / "rio_magnetic.csv",
    delimiter=",",
    names=True,
    dtype=None,
    encoding="utf-8",
)[::step]
coords = {
    "longitude": ("observation", table["longitude"]),
    "latitude": ("observation", table["latitude"]),
    "height": ("observation", table["height_m"], {"units": "m"}),
}
anomaly = ("observation", table["anomaly_nt"], {"units": "nT"})
survey = xarray.Dataset({"anomaly": anomaly}, coords)
x, y, options, plane = gp_orff.labelled.total_field(survey, date=1978.3)
x, y, u = map(torch.from_numpy, (x, y, options["directions"]))
_, line = np.unique(table["line_number"], return_inverse=True)
held_out = torch.from_numpy(line % 5 == 2)
known = ~held_out
mean_u = u.mean(0)
inclination = torch.rad2deg(torch.asin(-mean_u[2] / mean_u.norm())).item()
print(f"{len(x)} observations along {line.max() + 1} lines")
print(f"{int(held_out.sum())} of them held out")
print(f"inclination of the main field: {inclination:.1f} degrees")

# %% [markdown]
# ## Outliers
#
# Where two lines cross, their observations usually differ by a few nT, but sometimes by a hundred.
# Student-t noise gives small weights to such outliers. To test predictions, we hold out complete
# lines, because neighbouring observations along a line are almost equal.
#
# The prediction of an observation is the field along u, plus noise. Student-t noise is Gaussian
# noise whose variance has an inverse gamma distribution. We therefore compute the probability
# density of an observation as a mean of normal densities, over 200 equally probable noise
# variances.


# %%
def along(field, points, units):
    """Mean and variance of the component along the main field."""
    means, variances = [], []
    parts = zip(points.split(500), units.split(500), strict=True)
    for part, unit in parts:
        means.append((field.mean(part) * unit).sum(-1))
        covariance = field.pointwise_covariance(part)
        variances.append(torch.einsum("ni,nij,nj->n", unit, covariance, unit))
    return torch.cat(means), torch.cat(variances)


def noise_variances(likelihood):
    """Equally probable noise variances."""
    noise = likelihood.noise.detach().double()
    if not isinstance(likelihood, gp_orff.MultitaskStudentTLikelihood):
        return noise.reshape(1)
    half = likelihood.deg_free.item() / 2
    levels = (np.arange(200) + 0.5) / 200
    return noise / torch.from_numpy(gamma.ppf(levels, half, scale=1 / half))


likelihoods = {
    "Gaussian": None,
    "Student-t": gp_orff.MultitaskStudentTLikelihood(num_tasks=3),
}
models = {}
print(f"\n{'noise':12}{'RMSE (nT)':>10}{'MAE (nT)':>10}", end="")
print(f"{'coverage':>10}{'NLPD':>8}{'seconds':>9}")
for name, likelihood in likelihoods.items():
    kernel = gp_orff.HarmonicKernel(depths)
    model = gp_orff.VectorFieldGP(kernel, likelihood=likelihood)
    began = time.perf_counter()
    model.fit(x[known], y[known], directions=u[known], progress=False)
    seconds = time.perf_counter() - began
    mean, variance = along(model.posterior(), x[held_out], u[held_out])
    error = (y[held_out] - mean).unsqueeze(-1)
    noise = noise_variances(model.likelihood)
    predicted = torch.distributions.Normal(
        0.0, (variance.unsqueeze(-1) + noise).sqrt()
    )
    pit = predicted.cdf(error).mean(-1)  # probability of a smaller value
    density = predicted.log_prob(error).exp().mean(-1)
    coverage = ((pit - 0.5).abs() < 0.475).double().mean()
    models[name] = model
    print(f"{name:12}{error.square().mean().sqrt():10.1f}", end="")
    print(f"{error.abs().mean():10.1f}{coverage:10.3f}", end="")
    print(f"{-density.log().mean():8.2f}{seconds:9.1f}")

# %% [markdown]
# The table has the root mean square and mean absolute errors (RMSE, MAE) and the coverage of 95 %
# intervals. The NLPD is the negative log predictive density of an observation.
#
# Neither model is best by all scores. Student-t noise has the lower NLPD (4.94 instead of 5.08).
# Gaussian noise has the smaller errors, and its intervals contain 0.949 of the held-out
# observations. The intervals with Student-t noise contain only 0.887, so they are too narrow.
#
# For comparison, the next cell fits the equivalent sources of harmonica, which do not give standard
# deviations.

# %%
if importlib.util.find_spec("harmonica"):
    import harmonica

    metres, nanotesla = 1e3 * x.numpy(), y.numpy()
    best = np.inf
    for depth in (300.0, 1000.0, 3000.0):
        for damping in (1e-2, 1e0, 1e2):
            sources = harmonica.EquivalentSources(depth=depth, damping=damping)
            sources.fit(tuple(metres[known].T), nanotesla[known])
            error = sources.predict(tuple(metres[held_out].T))
            error -= nanotesla[held_out]
            best = min(best, np.sqrt(np.mean(error**2)))
    print(f"{'harmonica':12}{best:10.1f}   best of nine settings")

# %% [markdown]
# ## Upward continuation
#
# We evaluate the posterior just above the highest observation, and 1 km higher. Short waves decay
# with height, and so do the standard deviations. Below the observations, the standard deviations
# would grow, because the observations contain little information on waves that have decayed.

# %%
field = models["Student-t"].posterior()
low, high = x[:, :2].amin(0) + 1, x[:, :2].amax(0) - 1
axes = [
    torch.linspace(a, b, count, dtype=torch.float64)
    for a, b in zip(low, high, strict=True)
]
places = torch.cartesian_prod(*axes)
top = x[:, 2].max().item()
maps = {}
for height in (top, top + 1.0):
    points = torch.nn.functional.pad(places, (0, 1), value=height)
    mean, variance = along(field, points, mean_u.expand(len(points), 3))
    maps[height] = mean, variance.sqrt()
    print(f"\nat {height:.2f} km: rms of the anomaly ", end="")
    print(f"{mean.square().mean().sqrt():.0f} nT, ", end="")
    print(f"standard deviation {variance.mean().sqrt():.1f} nT")

# %% [markdown]
# ## Reduction to the pole
#
# If the main field is inclined, an anomaly is not directly above its rocks. `ReductionToPole`
# computes the anomaly that a vertical main field would cause. This anomaly is directly above the
# rocks. The computation requires that the rocks are magnetised along the main field. The
# standard deviations are larger than before.

# %%
points = torch.nn.functional.pad(places[::10], (0, 1), value=top)
pole = gp_orff.ReductionToPole(mean_u)
reduced, variance = field.mean(points, pole), field.variance(points, pole)
print(
    f"\nreduced to the pole: rms {reduced.square().mean().sqrt():.0f} nT, ",
    end="",
)
print(f"standard deviation {variance.mean().sqrt():.0f} nT")

# %% [markdown]
# ## The anomaly at two heights
#
# Hatches mark places where the 95 % interval of the anomaly contains zero. The standard deviation
# is smallest in the middle, where all points have neighbours on many lines, and grows towards the
# edge.

# %%
limit = float(y.abs().quantile(0.98))
norm = plt.Normalize(-limit, limit)
with plt.rc_context(STYLE):
    figure, panels = plt.subplots(2, 2, figsize=(7.2, 6.2), layout="compressed")
    (data, lower), (deviation, higher) = panels
    dots = {"norm": norm, "cmap": SIGNED}
    data.set_facecolor("0.75")  # so that values near zero are visible
    seen = data.scatter(*x[known, :2].T, c=y[known], s=2, **dots)
    plot_colorbar(data, seen, "anomaly (nT)")
    for panel, (mean, sd) in zip((lower, higher), maps.values(), strict=True):
        plot_map(panel, places, mean, sd, label="anomaly (nT)", norm=norm)
    plot_deviation(
        deviation, places, maps[top][1], label="standard deviation (nT)"
    )
    for panel in (data, deviation):
        panel.plot(*x[held_out, :2].T, "k.", ms=0.8)
    for panel in panels.flat:
        panel.set(aspect="equal", xlim=axes[0][[0, -1]], ylim=axes[1][[0, -1]])
        panel.set(xlabel="east (km)", ylabel="north (km)")
    title_panels(
        panels,
        [
            "observations (black: held out)",
            f"posterior mean at {top:.1f} km",
            f"standard deviation at {top:.1f} km",
            f"posterior mean at {top + 1:.1f} km",
        ],
    )

# %% tags=["remove-cell"]
arguments.output.mkdir(parents=True, exist_ok=True)
with plt.rc_context(STYLE):
    figure.savefig(arguments.output / "a_magnetic_survey.png", dpi=170)
    figure.savefig(arguments.output / "a_magnetic_survey.pdf")
    title = lower.get_title(loc="left")[4:]  # without the letter
    lower.set_title(title, loc="left")
    card = lower.get_tightbbox()
    card = card.transformed(figure.dpi_scale_trans.inverted())
    figure.savefig(
        arguments.output / "a_magnetic_survey_card.png",
        dpi=150,
        bbox_inches=card.padded(0.05),
    )
print(f"\nfigure: {arguments.output}/a_magnetic_survey.png")
