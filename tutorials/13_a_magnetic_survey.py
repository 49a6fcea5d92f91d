# %% [markdown]
# # 13. A magnetic survey: from readings along lines to the field at any height
#
# An aeroplane flies along lines and reads the strength of the magnetic field. What the rocks below
# add to the main field of the Earth is the *anomaly*. Above the rocks its field has neither curl
# nor divergence. A `HarmonicKernel` knows that: from one number at each reading follow the whole
# vector, the field at other heights, and how sure all of it is.
#
# The lines to copy:
#
# ```python
# x, y, options, plane = gp_orff.labelled.total_field(survey, date=1978.3)
# model = gp_orff.VectorFieldGP(
#     gp_orff.HarmonicKernel(), likelihood=gp_orff.MultitaskStudentTLikelihood(num_tasks=3)
# )
# model.fit(x, y, **options)
# field = model.posterior()      # three components in nT: east, north, up
# higher = field.mean(x + [0, 0, 1.0])   # continued upward by 1 km
# field.mean(x, gp_orff.ReductionToPole(u))   # the anomaly under a vertical main field u
# ```

# %%
import argparse
import importlib.util
import time
from pathlib import Path

import matplotlib
import numpy as np
import torch
import xarray

import gp_orff
from gp_orff.plotting import plot_calibration, plot_map

parser = argparse.ArgumentParser(description="The magnetic field above Rio de Janeiro state.")
parser.add_argument("--output", type=Path, default=Path("tutorials/output"))
parser.add_argument("--smoke", action="store_true", help="small and quick, to see that it runs")
arguments = parser.parse_args()
depths = 1 if arguments.smoke else 2  # planes of sources

# %% [markdown]
# ## The survey
#
# A part of 30 km by 30 km of an airborne survey of 1978 (CPRM, Brazil): every sixth of 9913
# readings along 40 lines from north to south, half a kilometre apart or more, and three tie lines
# across. `total_field` turns longitude and latitude into kilometres, and evaluates the direction of
# the main field of that year at each reading: the anomaly is the component of the rocks' field
# along it.

# %%
folder = Path(__file__).parent if "__file__" in globals() else Path("tutorials")
table = np.genfromtxt(
    folder / "data" / "rio_magnetic.csv", delimiter=",", names=True, dtype=None, encoding="utf-8"
)
table = table[::12] if arguments.smoke else table
survey = xarray.Dataset(
    {"anomaly": ("reading", table["anomaly_nt"], {"units": "nT"})},
    {
        "longitude": ("reading", table["longitude"]),
        "latitude": ("reading", table["latitude"]),
        "height": ("reading", table["height_m"], {"units": "m"}),
    },
)
x, y, options, plane = gp_orff.labelled.total_field(survey, date=1978.3)
x, y, u = (torch.from_numpy(values) for values in (x, y, options["directions"]))
_, line = np.unique(table["line_number"], return_inverse=True)
held_out = torch.from_numpy(line % 5 == 2)
mean_u = u.mean(0)
inclination = torch.rad2deg(torch.asin(-mean_u[2] / mean_u.norm())).item()
print(f"{len(x)} readings along {line.max() + 1} lines, {int(held_out.sum())} of them held out")
print(f"inclination of the main field {inclination:.1f} degrees")

# %% [markdown]
# ## Outliers along whole stretches
#
# Where lines cross, readings differ by a few nT, and now and then by a hundred. Student-t noise
# gives such readings little weight. Whole lines are held out, since neighbours along a line would
# give the answer away.
#
# A prediction of a reading is the field along u, plus noise. Its probabilities under Student-t
# noise are means over noise variances: a Student-t variable is a Gaussian one whose variance is
# drawn from an inverse gamma distribution.


# %%
def along(field, points, units):
    """Mean and variance of the component along the main field."""
    means, variances = [], []
    for part, unit in zip(points.split(500), units.split(500), strict=True):
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
    probabilities = (torch.arange(200, dtype=torch.float64) + 0.5) / 200
    from scipy.stats import gamma

    return noise / torch.from_numpy(gamma.ppf(probabilities, half, scale=1 / half))


likelihoods = {
    "Gaussian": None,
    "Student-t": gp_orff.MultitaskStudentTLikelihood(num_tasks=3),
}
models, probabilities = {}, {}
print(f"\n{'noise':12}{'RMSE':>8}{'MAE':>8}{'inside':>8}{'NLPD':>8}{'seconds':>9}")
for name, likelihood in likelihoods.items():
    model = gp_orff.VectorFieldGP(gp_orff.HarmonicKernel(depths), likelihood=likelihood)
    began = time.perf_counter()
    model.fit(x[~held_out], y[~held_out], directions=u[~held_out], progress=False)
    seconds = time.perf_counter() - began
    mean, variance = along(model.posterior(), x[held_out], u[held_out])
    error = (y[held_out] - mean).unsqueeze(-1)
    sd = (variance.unsqueeze(-1) + noise_variances(model.likelihood)).sqrt()
    predicted = torch.distributions.Normal(0.0, sd)
    pit = predicted.cdf(error).mean(-1)
    nlpd = -predicted.log_prob(error).exp().mean(-1).log().mean().item()
    inside = ((pit - 0.5).abs() < 0.475).double().mean().item()
    models[name], probabilities[name] = model, pit
    rmse, mae = error.square().mean().sqrt().item(), error.abs().mean().item()
    print(f"{name:12}{rmse:8.1f}{mae:8.1f}{inside:8.3f}{nlpd:8.2f}{seconds:9.1f}")

# %% [markdown]
# Beside it, where it is installed, the equivalent sources of harmonica, which give no error bars.

# %%
if importlib.util.find_spec("harmonica"):
    import harmonica

    metres = 1e3 * x.numpy()
    best = np.inf
    for depth in (300.0, 1000.0, 3000.0):
        for damping in (1e-2, 1e0, 1e2):
            sources = harmonica.EquivalentSources(depth=depth, damping=damping)
            known = ~held_out.numpy()
            sources.fit(tuple(metres[known].T), y.numpy()[known])
            guess = sources.predict(tuple(metres[~known].T))
            best = min(best, float(np.sqrt(np.mean((guess - y.numpy()[~known]) ** 2))))
    print(f"{'harmonica':12}{best:8.1f}   the best of nine settings on the lines held out")

# %% [markdown]
# ## The field at other heights
#
# The same posterior, at other points: just above the highest reading, and 1 km higher. Details
# fade, and so do the error bars. Below the readings they would grow: what is lost is not known.

# %%
field = models["Student-t"].posterior()
low, high = x[:, :2].amin(0), x[:, :2].amax(0)
count = 12 if arguments.smoke else 61
axes = [
    torch.linspace(a + 1, b - 1, count, dtype=torch.float64) for a, b in zip(low, high, strict=True)
]
places = torch.cartesian_prod(*axes)
top = x[:, 2].max().item()
maps = {}
for height in (top, top + 1.0):
    points = torch.cat([places, torch.full_like(places[:, :1], height)], dim=-1)
    mean, variance = along(field, points, mean_u.expand(len(points), 3))
    maps[height] = mean, variance.sqrt()
    print(f"\nat {height:.2f} km: anomaly with rms {mean.square().mean().sqrt():.0f} nT, ", end="")
    print(f"error bar {variance.mean().sqrt():.1f} nT")

# %% [markdown]
# Under an inclined main field an anomaly is not above its rocks. Reduced to the pole it is, for
# rocks that are magnetised along the main field; error bars grow.

# %%
points = torch.cat([places[::10], torch.full_like(places[::10, :1], top)], dim=-1)
pole = gp_orff.ReductionToPole(mean_u)
reduced, sd = field.mean(points, pole), field.variance(points, pole).sqrt()
print(f"\nreduced to the pole: rms {reduced.square().mean().sqrt():.0f} nT, ", end="")
print(f"error bar {sd.square().mean().sqrt():.0f} nT")

# %% [markdown]
# ## The figure

# %%
matplotlib.use("agg")
from matplotlib import pyplot as plt

figure, panels = plt.subplots(1, 4, figsize=(16.5, 4.3), layout="constrained")
limit = float(y.abs().quantile(0.98))
norm = matplotlib.colors.Normalize(-limit, limit)
shared = {"norm": norm, "cmap": "PuOr_r"}
kept = ~held_out
panels[0].scatter(*x[kept, :2].T, c=y[kept], s=2, **shared)
panels[0].scatter(*x[held_out, :2].T, c="0.6", s=0.5, label="held out")
panels[0].legend(loc="lower right", markerscale=6, framealpha=1)
panels[0].set_title("readings along lines")
for panel, (height, (mean, sd)) in zip(panels[1:3], maps.items(), strict=True):
    shaded, _ = plot_map(panel, places, mean, sd, label=None, norm=norm, colorbar=False)
    panel.set_title(f"at {height:.1f} km (hatched: sign unknown)")
xlim, ylim = ((axis[0], axis[-1]) for axis in axes)
for panel in panels[:3]:
    panel.set(aspect="equal", xlabel="east (km)", xlim=xlim, ylim=ylim)
panels[0].set_ylabel("north (km)")
figure.colorbar(shaded, ax=list(panels[:3]), label="anomaly (nT)", extend="both", shrink=0.8)
lines = len(np.unique(line[held_out.numpy()]))
for (name, pit), color in zip(probabilities.items(), ("#D55E00", "#0072B2"), strict=True):
    plot_calibration(panels[3], pit, independent=10 * lines, label=name, color=color)
panels[3].legend(loc="lower right", frameon=False)
panels[3].set(title="do the lines held out agree?", ylabel="share of readings inside")
arguments.output.mkdir(parents=True, exist_ok=True)
figure.savefig(arguments.output / "a_magnetic_survey.png", dpi=110)
print(f"\nfigure: {arguments.output}/a_magnetic_survey.png")
