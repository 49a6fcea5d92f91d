# %% [markdown]
# # 9. A kernel of your own, and how many features it needs
#
# To define a new kernel, you write one function of the frequency, and a fit learns the parameters
# of this function from the data.
#
# In the ocean, the flow of large eddies has almost no divergence, but small internal waves have a
# large divergence. In the interior of most gyres, the transition is at wavelengths of 40 to 100 km
# (Qiu et al. 2018, J. Phys. Oceanogr. 48). No kernel of this package has this wavelength as a
# parameter. We write a kernel that learns it from drifters. How many features does this kernel
# need? These are the lines to copy:
#
# ```python
# class Amplitude(torch.nn.Module):
#     def __init__(self):
#         super().__init__()
#         self.share = torch.nn.Parameter(torch.tensor(0.5))
#
#     def forward(self, omega):  # frequencies (D, 2) -> B (D, 2, r)
#         across = torch.stack([-omega[:, 1], omega[:, 0]], dim=-1)
#         return torch.stack([self.share * omega, across], dim=-1)
#
# kernel = gp_orff.SpectralMatrixKernel(
#     RBFKernel(), Amplitude(), num_outputs=2, num_dims=2
# )
# field = gp_orff.VectorFieldGP(kernel).fit(x, y).posterior()
# ```

# %% tags=["remove-cell"]
import argparse
from pathlib import Path

parser = argparse.ArgumentParser(
    description="A kernel of your own, and its features.", allow_abbrev=False
)
parser.add_argument("--output", type=Path, default=Path("tutorials/output"))
parser.add_argument(
    "--smoke",
    action="store_true",
    help="small and quick, to see that it runs",
)
arguments, _ = parser.parse_known_args()  # Jupyter adds its own

# %%
import math

import numpy as np
import torch
from gpytorch.kernels import RBFKernel, ScaleKernel
from matplotlib import pyplot as plt
from matplotlib.ticker import NullLocator

import gp_orff
from gp_orff.plotting import STYLE, plot_deviation, plot_field, title_panels

num_fields, num_drifters, num_draws = 3, 250, 40
initial = (40.0, 80.0, 160.0)  # starting wavelengths of the fits, km
drawn = {"generator": torch.Generator().manual_seed(0), "dtype": torch.float64}

# %% tags=["remove-cell"]
if arguments.smoke:
    num_fields, num_drifters, num_draws = 1, 80, 5
    initial = (80.0,)

# %% [markdown]
# ## A kernel as a distribution of waves
#
# By Bochner's theorem, a stationary kernel with k(0) = 1 is an average of waves over a distribution
# S of frequencies ω: k(x − z) = E cos(ω·(x − z)). For an RBF kernel, S is a normal distribution. We
# draw frequencies from S. The Gram matrix of their cosines and sines converges to the Gram matrix
# of k:


# %%
def average_of_waves(x, omega):
    """The Gram matrix of the waves cos and sin of ω·x, of equal weight."""
    phase = x @ omega.mT
    waves = torch.cat([phase.cos(), phase.sin()], dim=-1)
    return waves @ waves.mT / len(omega)


rbf = RBFKernel().double()
rbf.lengthscale = 1.0
line = torch.linspace(0, 5, 101, dtype=torch.float64)[:, None]
exact = rbf(line).to_dense().detach()
for n in (10, 100, 10_000):
    average = average_of_waves(line, torch.randn(n, 1, **drawn))
    error = (average - exact).abs().max()
    print(f"{n:6} waves: largest error of the Gram matrix {error:.3f}")
assert error < 0.05

# %% [markdown]
# ## Waves of vectors
#
# The waves of a vector field also have directions, which are the columns of a matrix B(ω):
#
#     K(x, z) = E cos(ω·(x − z)) B(ω) B(ω)ᵀ
#
# Waves in the direction of ω are gradients, so B = ω gives the curl-free kernel:

# %%
gradients = gp_orff.SpectralMatrixKernel(
    rbf, lambda w: w[..., None], num_outputs=2, num_dims=2
)
curl_free = gp_orff.CurlFreeKernel(rbf, num_dims=2)
x = 5 * torch.rand(50, 2, **drawn)
with torch.no_grad():
    error = (gradients(x).to_dense() - curl_free(x).to_dense()).abs().max()
print(f"\nlargest difference of B = ω and CurlFreeKernel: {error:.0e}")
assert error < 1e-9

# %% [markdown]
# ## A kernel with a transition
#
# A wave whose direction is ω has a divergence. A wave whose direction is perpendicular to ω has a
# curl. Let the divergent fraction of the energy be a high-pass filter, which is one half at a
# wavelength of L km:
#
#     share(ω) = |ω|⁸ / (|ω|⁸ + κ⁸),        κ = 2π / L
#
# B has two columns. The first is ω times √share. The second is ω, rotated by 90 degrees, times √(1
# − share). B must be finite at ω = 0, and B Bᵀ must be equal at ω and −ω. The gradient of B must be
# finite too, so we write |ω|⁴ and not the root of |ω|⁸. A fit searches without bounds, so the
# parameter is log L.


# %%
class Transition(torch.nn.Module):
    """B(ω), which rotates at long wavelengths and diverges at short ones."""

    def __init__(self, wavelength):
        super().__init__()
        log_wavelength = torch.tensor(math.log(wavelength))
        self.log_wavelength = torch.nn.Parameter(log_wavelength)

    def forward(self, omega):
        kappa = 2 * math.pi * (-self.log_wavelength).exp()
        squared = (omega / kappa).square().sum(-1, keepdim=True)
        ratio = squared.square()  # |ω / κ|⁴
        across = torch.stack([-omega[:, 1], omega[:, 0]], dim=-1)
        both = torch.stack([ratio * omega, across], dim=-1)
        return both / (1 + ratio**2).sqrt()[..., None]


def make_kernel(wavelength, lengthscale):
    base = RBFKernel()
    base.lengthscale = lengthscale
    kernel = gp_orff.SpectralMatrixKernel(
        base, Transition(wavelength), num_outputs=2, num_dims=2
    )
    return kernel.double()


# %% [markdown]
# As a check, we compute this kernel without the package, as a sum over a lattice of frequencies.
#
# We use the same waves to simulate currents whose divergent part is known. At a wavelength of 60
# km, half of the energy is divergent. There are 250 drifters in a square of 150 km. The current is
# about 10 cm/s, and the noise is 2 cm/s. No drifter observes the divergent part separately.

# %%
wavelength, scale, side, noise = 60.0, 20.0, 150.0, 2.0  # km, km, km, cm/s
step = 2 * math.pi / 600  # rad/km: waves repeat after 600 km
index = step * torch.arange(-40, 41, dtype=torch.float64)
omega = torch.cartesian_prod(index, index)[: 81**2 // 2]  # one of ω and −ω
square = omega.square().sum(-1)
density = scale**2 / (2 * math.pi) * torch.exp(-0.5 * scale**2 * square)  # S
share = square**4 / (square**4 + (2 * math.pi / wavelength) ** 8)
across = torch.stack([-omega[:, 1], omega[:, 0]], dim=-1)
along = share.sqrt()[:, None] * omega
across = (1 - share).sqrt()[:, None] * across
columns = torch.stack([along, across], dim=-1)  # (D, p, r)
columns *= (2 * step**2 * density).sqrt()[:, None, None]

x = side * torch.rand(50, 2, **drawn)
phase = x @ omega.mT
waves = torch.stack([phase.cos(), phase.sin()], dim=1)
both = "ntD,mtD,Dpr,Dqr->npmq"
total = torch.einsum(both, waves, waves, columns, columns).reshape(100, 100)
with torch.no_grad():
    ours = make_kernel(wavelength, scale)(x).to_dense()
error = (ours - total).abs().max() / ours[0, 0]
print(f"largest difference from the sum over waves, relatively: {error:.0e}")
assert error < 1e-6


def current(x, normal):
    """The current at x (n, 2) and its divergent part, (2, n, 2), in cm/s."""
    phase = x @ omega.mT
    strength = 10 / total[0, 0].sqrt() * columns
    waves = phase.cos() @ (normal[0] * strength).flatten(1)
    waves = waves + phase.sin() @ (normal[1] * strength).flatten(1)
    waves = waves.unflatten(-1, (2, 2))
    return torch.stack([waves.sum(-1), waves[..., 0]])


# %% [markdown]
# ## A fit of the wavelength
#
# We compare our kernel with two others on the same data. A Helmholtz kernel is the sum of a
# divergent and a rotational field, each with a lengthscale. A separable kernel is a scalar kernel
# times a matrix.
#
# `fit` tries many lengthscales, but it cannot choose starting values for a parameter of B such as
# the wavelength. The evidence of our kernel has several maxima. In such a case, start several fits
# with `warm_start`, and use the fit with the largest evidence. Our fits start at wavelengths of 40,
# 80 and 160 km, with the lengthscale of the separable model and the variance of the data.
#
# The table has the difference of the evidence from that of our kernel, in nats. The other columns
# are the negative log predictive density (NLPD, in nats per component) and the root mean square
# error (in cm/s) at 1000 held-out positions, first for the current and then for its divergent part.
# All numbers are means over three currents. The currents are drawn from our kernel, so the table
# shows how much worse the other two kernels are.


# %%
def fit_ours(x, y, lengthscale):
    """The model of largest evidence over several starts."""
    models = []
    for start in initial:
        kernel = ScaleKernel(make_kernel(start, lengthscale)).double()
        with torch.no_grad():
            kernel.outputscale = y.var() / kernel(x[:1]).to_dense()[0, 0]
        model = gp_orff.VectorFieldGP(kernel)
        models.append(model.fit(x, y, warm_start=True, progress=False))
    return max(models, key=lambda model: model.report.evidence)


rows = {"ours": [], "Helmholtz": [], "separable": []}
cases, parts = [], (None, gp_orff.CurlFreePart())
for _ in range(num_fields):
    normal = torch.randn(2, len(omega), 1, 2, **drawn)
    x = side * torch.rand(num_drifters, 2, **drawn)
    xs = side * torch.rand(1000, 2, **drawn)
    y = current(x, normal)[0]
    y = y + noise * torch.randn(*y.shape, **drawn)
    root = torch.nn.Parameter(torch.eye(2))
    kernels = {
        "Helmholtz": gp_orff.HelmholtzKernel(num_dims=2),
        "separable": gp_orff.SeparableKernel(RBFKernel(), root),
    }
    models = {
        name: gp_orff.VectorFieldGP(kernel).fit(x, y, progress=False)
        for name, kernel in kernels.items()
    }
    lengthscale = kernels["separable"].base_kernel.lengthscale.item()
    models["ours"] = fit_ours(x, y, lengthscale)
    for name, model in models.items():
        field, row = model.posterior(), [model.report.evidence]
        for truth, part in zip(current(xs, normal), parts, strict=True):
            mean, sd = field.mean(xs, part), field.variance(xs, part).sqrt()
            density = torch.distributions.Normal(mean, sd).log_prob(truth)
            error = (mean - truth).square().mean().sqrt()
            row += [-density.mean().item(), error.item()]
        rows[name].append(row)
    cases.append((x, normal, models["ours"]))

table = {name: np.array(row) for name, row in rows.items()}
print(f"\n{'':12}{'evidence':>10}{'current':>16}{'divergent part':>18}")
for name, values in table.items():
    evidence = (values - table["ours"])[:, 0].mean()
    nlpd, error, nlpd_part, error_part = values.mean(0)[1:]
    print(f"{name:12}{evidence:10.1f}{nlpd:10.3f}{error:6.2f}", end="")
    print(f"{nlpd_part:12.3f}{error_part:6.2f}")
print(f"\n{cases[-1][2].report}\n")
learned = []
for _, _, model in cases:
    log = model.kernel.base_kernel.amplitude.log_wavelength.item()
    sd = model.report.standard_errors()["log_wavelength"]
    learned.append(np.exp(log + 1.96 * sd * np.array([-1, 0, 1])))
    low, best, high = learned[-1]
    print(f"wavelength {best:.1f} km, 95 % interval {low:.1f} to {high:.1f} km")
assert all(abs(best / wavelength - 1) < 0.15 for _, best, _ in learned)
for name in kernels:
    gain = (table[name] - table["ours"]).mean(0)
    assert num_fields == 1 or (gain[0] < 0 and (gain[1:] > 0).all())

# %% [markdown]
# The Helmholtz kernel is a good approximation of our kernel, because its two lengthscales can
# distinguish large eddies from small waves. Our kernel predicts the current only slightly better.
# It predicts the divergent part better. The drifters do not observe this part separately, so its
# estimate depends on the prior of the long waves. Only our kernel has the wavelength as a
# parameter. The report has the standard error of its logarithm.
#
# ## A kernel from a covariance function
#
# If you have a covariance function instead of B, use `from_signature`. For example, let temperature
# have a correlation length of 1 m in depth, and let salinity have one of 2 m. Which lengths are
# possible for their cross-covariance? We first try the mean of the two, 1.5 m. The Fourier
# transform of a covariance must be positive at every frequency. With 1.5 m, it is not, and
# `from_signature` raises an error. The length must be at least the root mean square of the two
# lengths, 1.58 m.


# %%
def signature(lag, cross):
    """The covariance (m, 2, 2) of temperature and salinity, scaled."""
    heat, salt, both = (
        torch.exp(-0.5 * (lag / length) ** 2) for length in (1.0, 2.0, cross)
    )
    rows = [heat, 0.8 * both, 0.8 * both, salt]
    return torch.stack(rows, dim=-1).reshape(-1, 2, 2)


depth = [(0.0, 10.0)]
make = gp_orff.SpectralMatrixKernel.from_signature
try:
    make(lambda lag: signature(lag, 1.5), depth)
    raise AssertionError("this is no covariance")
except ValueError as error:
    print(f"\n{error}\n")
rms = 2.5**0.5
lags = torch.linspace(0, 10, 50, dtype=torch.float64)[:, None]
with torch.no_grad():
    kernel = make(lambda lag: signature(lag, rms), depth).double()
    blocks = kernel(lags, 0 * lags[:1]).to_dense().reshape(50, 2, 2)
error = (blocks - signature(lags, rms)).abs().max()
print(f"{rms:.2f} m: largest error of the kernel {error:.0e}")
assert error < 1e-6

# %% [markdown]
# ## The number of features
#
# Theorems bound the error of random features for scalar, separable, curl-free and divergence-free
# kernels, and for sums of them. They state that with D frequencies, the error in a box is at most
# ε, with a probability of 95 %.
#
# As an example, we use the curl-free RBF kernel with a lengthscale of 1 on the box [−1, 1]². K(0)
# is the identity, and ε is 0.1. How many frequencies do the theorems require, and how many are
# enough? We measure the largest error over all lags, in the Hilbert-Schmidt norm. For random rules,
# we use the 95 % quantile over 40 draws. The bound `brault` is for the spectral norm, which is
# smaller.

# %%
box, target = ((-1.0, 1.0), (-1.0, 1.0)), 0.1
bounds = {
    "minh": gp_orff.bounds.minh(curl_free, box),
    "brault": gp_orff.bounds.brault(curl_free, box),
}
# all lags, up to their sign, are between these corners and these points
corners = torch.tensor([[-1.0, -1.0], [1.0, -1.0]], dtype=torch.float64)
axis = torch.linspace(-1, 1, 11, dtype=torch.float64)
inside = torch.cartesian_prod(axis, axis)
with torch.no_grad():
    exact_blocks = curl_free(corners, inside).to_dense()


@torch.no_grad()
def largest_error(rule):
    """The number of frequencies of a rule, and its largest error over the box."""
    features = gp_orff.ORFFKernel(curl_free, rule)
    error = features(corners, inside).to_dense() - exact_blocks
    squares = error.reshape(2, 2, -1, 2).square().sum((1, 3))
    return features.num_features // 2, squares.max().sqrt().item()


def quantile(rule, number):
    """The 95 % quantile of the largest error of a random rule."""
    rules = (rule(number, seed=seed) for seed in range(num_draws))
    return number, np.quantile([largest_error(r)[1] for r in rules], 0.95)


random, sobol = gp_orff.MonteCarlo, gp_orff.QuasiMonteCarlo
domain = {"domain": box, "lengthscale_range": (1, 1)}
grids = [
    gp_orff.Grid(tolerance=10.0**-power, diagonal_correction=False, **domain)
    for power in np.arange(0.5, 6.5, 0.5)
]
measured = {
    "random": [quantile(random, number) for number in (32, 128, 512, 2048)],
    "Sobol": [quantile(sobol, number) for number in (32, 128, 512)],
    "grid": [largest_error(grid) for grid in grids],
}
measured = {name: np.array(pairs) for name, pairs in measured.items()}
frequencies = {
    f"bound: {name}": bound.num_frequencies(target)
    for name, bound in bounds.items()
}
for name, pairs in measured.items():
    number, error = np.log(pairs.T)
    log_number = np.interp(-math.log(target), -error, number)
    frequencies[name] = math.ceil(math.exp(log_number))
print(f"\nfrequencies for an error of {target}:")
for name, number in frequencies.items():
    print(f"{name:16}{number:8}")
slope = np.polyfit(*np.log(measured["random"].T), 1)[0]
print(f"the error of random features decreases as D^{slope:.2f}")
assert abs(slope + 0.5) < 0.2
decreasing = sorted(frequencies.values(), reverse=True)
assert list(frequencies.values()) == decreasing

# %% [markdown]
# The bounds are valid for every kernel of their class and every box. They show that the error of
# random features decreases as 1/√D. They do not show how many features are enough. Random features
# need a twentieth of the smaller bound. Sobol points need a ninth of the number of random features,
# and a grid needs a twelfth of the number of Sobol points. In two dimensions and with a smooth
# kernel, the error of a grid decreases faster than any power of D.
#
# Do not choose the number of features by a bound. Use a grid with a tolerance if a grid is
# possible. Otherwise, measure the error of random frequencies. No bound is known for our kernel,
# but a grid reaches its tolerance:

# %%
x, _, model = cases[-1]
kernel = model.kernel
rule = gp_orff.Grid.for_data(x, tolerance=1e-4, lengthscale_range=(1, 1))
features = gp_orff.ORFFKernel(kernel, rule)
with torch.no_grad():
    gram = kernel(x[:50], x[50:]).to_dense()
    error = (features(x[:50], x[50:]).to_dense() - gram).abs().max()
    error /= kernel(x[:1]).to_dense()[0, 0]
print(f"\nour kernel, {features.num_features} features: ", end="")
print(f"largest error {error:.1e} of the variance")
assert error < 3e-4

# %% [markdown]
# ## The spectra, and the divergent part
#
# In panel a, dashed lines are the spectra of the kernel from which the currents are drawn. Thin
# lines are the spectra learned from each of the three currents. The black bars are 95 % intervals
# of the learned wavelengths, from their standard errors. The maps are for the last current. Only
# the prior separates its divergent part from the rest.

# %%
plt.style.use(STYLE)
figure, axes = plt.subplots(2, 2, figsize=(7.2, 6.2), layout="compressed")
energies, *maps = axes.flat
waves = torch.linspace(20, 300, 200, dtype=torch.float64)  # km
along = torch.stack([2 * math.pi / waves, 0 * waves], dim=-1)


@torch.no_grad()
def spectra(scaled):
    """Energy per octave of the divergent and of the rotating waves."""
    inner = scaled.base_kernel
    density = gp_orff.spectrum(inner.base_kernel).log_density(along).exp()
    energy = inner.amplitude(along).square().sum(1) * density[:, None]
    octave = 2 * math.pi * math.log(2) * along[:, :1] ** 2
    return scaled.outputscale * octave * energy


true_kernel = ScaleKernel(make_kernel(wavelength, scale)).double()
true_kernel.outputscale = 100 / total[0, 0]
colors = {"divergent": "#D55E00", "rotating": "#0072B2"}
for part, (name, color) in enumerate(colors.items()):
    energy = spectra(true_kernel)[:, part]
    energies.plot(waves, energy, "--", color=color, lw=1.8, label=name)
    for _, _, model in cases:
        energy = spectra(model.kernel)[:, part]
        energies.plot(waves, energy, color=color, lw=0.7)
for k, (low, best, high) in enumerate(learned):
    energies.plot([low, high], [150 + 6 * k] * 2, color="black", lw=1)
    energies.plot(best, 150 + 6 * k, "o", color="black", ms=3)
energies.axvline(wavelength, color="black", ls="--", lw=0.8)
energies.set(xscale="log", ylim=(0, 170), box_aspect=1)
energies.set(xlabel="wavelength (km)", ylabel="energy per octave (cm²/s²)")
ticks = [20, 40, 60, 100, 200]
energies.set_xticks(ticks, ticks)
energies.xaxis.set_minor_locator(NullLocator())
energies.legend(loc="upper right")

axis = torch.linspace(0, side, 61, dtype=torch.float64)
raster, part = torch.cartesian_prod(axis, axis), gp_orff.CurlFreePart()
x, normal, model = cases[-1]
field = model.posterior()
mean, truth = field.mean(raster, part), current(raster, normal)[1]
shared = plt.Normalize(0, truth.norm(dim=-1).max())
style = {"label": "speed (cm/s)", "norm": shared, "arrows": 16}
for ax, vectors in zip(maps[:2], (truth, mean), strict=True):
    speed = vectors.norm(dim=-1)
    plot_field(ax, raster, vectors, shade=speed, reference="cm/s", **style)
sd = field.variance(raster, part).sum(-1).sqrt()
plot_deviation(maps[2], raster, sd, label="sd of the divergent part (cm/s)")
maps[2].plot(*x.T, "o", ms=2, mew=0.2, mec="white", color="#D55E00")
plt.setp(maps, xlabel="east (km)", ylabel="north (km)")
plt.setp(maps, xlim=(0, side), ylim=(0, side))
titles = [
    "spectra, true and learned",
    "true divergent part",
    "its posterior mean",
    "its standard deviation, drifters",
]
title_panels(axes, titles)

# %% tags=["remove-cell"]
arguments.output.mkdir(parents=True, exist_ok=True)
figure.savefig(arguments.output / "a_kernel_of_your_own.png")
figure.savefig(arguments.output / "a_kernel_of_your_own.pdf")
title = maps[1].get_title(loc="left")[4:]  # without the letter
maps[1].set_title(title, loc="left")
card = maps[1].get_tightbbox().transformed(figure.dpi_scale_trans.inverted())
figure.savefig(
    arguments.output / "a_kernel_of_your_own_card.png",
    dpi=150,
    bbox_inches=card.padded(0.05),
)
print(f"\nfigure: {arguments.output}/a_kernel_of_your_own.png")
