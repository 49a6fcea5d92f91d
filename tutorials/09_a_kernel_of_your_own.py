# %% [markdown]
# # 9. A kernel of your own, and how many features it takes
#
# Large eddies of the ocean hardly diverge, small internal waves do. At some wavelength, one gives
# way to the other: at 40 to 100 km in the interior of most gyres (Qiu et al. 2018, J. Phys.
# Oceanogr. 48). No kernel of this package has that wavelength. Can you write one that learns it
# from drifters? And how many features does such a kernel take?
#
# The lines to copy:
#
# ```python
# class Amplitude(torch.nn.Module):                      # parameters are learned with the others
#     def __init__(self):
#         super().__init__()
#         self.share = torch.nn.Parameter(torch.tensor(0.5))
#     def forward(self, omega):                          # frequencies (D, d) -> B (D, p, r)
#         across = torch.stack([-omega[:, 1], omega[:, 0]], dim=-1)
#         return torch.stack([self.share * omega, across], dim=-1)
# kernel = gp_orff.SpectralMatrixKernel(RBFKernel(), Amplitude(), num_outputs=2, num_dims=2)
# field = gp_orff.VectorFieldGP(kernel).fit(x, y).posterior()
# ```

# %%
import argparse
import math
from pathlib import Path

import matplotlib
import numpy as np
import torch
from gpytorch.kernels import RBFKernel, ScaleKernel

import gp_orff
from gp_orff.plotting import plot_colorbar, plot_field

parser = argparse.ArgumentParser(description="A kernel of your own, and its features.")
parser.add_argument("--output", type=Path, default=Path("tutorials/output"))
parser.add_argument("--smoke", action="store_true", help="small and quick, to see that it runs")
arguments = parser.parse_args()
num_fields, num_drifters, num_draws = (1, 80, 5) if arguments.smoke else (3, 250, 40)
starts = (80.0,) if arguments.smoke else (40.0, 80.0, 160.0)  # wavelengths to start from, km
drawn = {"generator": torch.Generator().manual_seed(0), "dtype": torch.float64}

# %% [markdown]
# ## A kernel is a distribution of waves
#
# Bochner's theorem: a stationary kernel with k(0) = 1 is an average of waves,
# k(x - z) = E cos(omega . (x - z)), over a distribution S of frequencies. Draw frequencies from S,
# and the Gram matrix of their cosines and sines tends to that of k. For an RBF kernel, S is a
# normal distribution.


# %%
def average_of_waves(x, omega):
    """The Gram matrix of the waves cos and sin of omega . x, of equal weight."""
    phase = x @ omega.mT
    waves = torch.cat([phase.cos(), phase.sin()], dim=-1)
    return waves @ waves.mT / len(omega)


rbf = RBFKernel().double()
rbf.lengthscale = 1.0
line = torch.linspace(0, 5, 101, dtype=torch.float64)[:, None]
exact = rbf(line).to_dense().detach()
averages = {n: average_of_waves(line, torch.randn(n, 1, **drawn)) for n in (10, 100, 10_000)}
for n, average in averages.items():
    print(f"{n:6} waves: largest error of the Gram matrix {(average - exact).abs().max():.3f}")
assert (averages[10_000] - exact).abs().max() < 0.05

# %% [markdown]
# ## Vectors: every wave has a matrix
#
# The waves of a vector field have directions, the columns of a matrix B(omega):
#
#     K(x, z) = E cos(omega . (x - z)) B(omega) B(omega)^T
#
# Waves along omega are gradients. So B = omega is the curl-free kernel:

# %%
own = gp_orff.SpectralMatrixKernel(rbf, lambda w: w[..., None], num_outputs=2, num_dims=2)
curl_free = gp_orff.CurlFreeKernel(rbf, num_dims=2)
x = 5 * torch.rand(50, 2, **drawn)
with torch.no_grad():
    apart = (own(x).to_dense() - curl_free(x).to_dense()).abs().max()
print(f"\nB = omega and CurlFreeKernel are {apart:.0e} apart")
assert apart < 1e-9

# %% [markdown]
# ## A kernel that no class here has
#
# A wave along omega diverges; a wave across omega rotates. Let the divergent share of the energy be
# that of a high-pass filter, with one half at a wavelength of L km:
#
#     share(omega) = |omega|^8 / (|omega|^8 + kappa^8),        kappa = 2 pi / L
#
# B has two columns: omega sqrt(share), and omega turned by 90 degrees times sqrt(1 - share). It has
# to be finite at omega = 0, and B B^T the same at -omega. Its gradient has to be finite too: so we
# write |omega|^4 and not the root of |omega|^8. Fits search without bounds, so the parameter is
# log L.


# %%
class Transition(torch.nn.Module):
    """B(omega) of currents that rotate at long wavelengths and diverge at short ones."""

    def __init__(self, wavelength):
        super().__init__()
        self.log_wavelength = torch.nn.Parameter(torch.tensor(math.log(wavelength)))

    def forward(self, omega):
        kappa = 2 * math.pi * (-self.log_wavelength).exp()
        ratio = (omega / kappa).square().sum(-1, keepdim=True).square()  # |omega / kappa|^4
        across = torch.stack([-omega[:, 1], omega[:, 0]], dim=-1)
        return torch.stack([ratio * omega, across], dim=-1) / (1 + ratio**2).sqrt()[..., None]


def make_kernel(wavelength, lengthscale):
    base = RBFKernel()
    base.lengthscale = lengthscale
    amplitude = Transition(wavelength)
    return gp_orff.SpectralMatrixKernel(base, amplitude, num_outputs=2, num_dims=2).double()


# %% [markdown]
# The same by hand: a sum over a lattice of frequencies, with S, the share and both directions
# written out. It gives the kernel, and currents with this kernel to learn from: 250 drifters in a
# square of 150 km, a current of about 10 cm/s, noise of 2 cm/s. Half of the energy diverges at 60
# km. We know the divergent part of these currents, which no drifter observes.

# %%
wavelength, scale, side, noise = 60.0, 20.0, 150.0, 2.0  # km, km, km, cm/s
step = 2 * math.pi / 600  # rad/km: waves repeat after 600 km, far outside the square
index = step * torch.arange(-40, 41, dtype=torch.float64)
omega = torch.cartesian_prod(index, index)[: 81**2 // 2]  # one of each pair +-omega
square = omega.square().sum(-1)
weight = 2 * step**2 * scale**2 / (2 * math.pi) * torch.exp(-0.5 * scale**2 * square)  # S
share = square**4 / (square**4 + (2 * math.pi / wavelength) ** 8)
across = torch.stack([-omega[:, 1], omega[:, 0]], dim=-1)
columns = torch.stack([share.sqrt()[:, None] * omega, (1 - share).sqrt()[:, None] * across], -1)
columns = weight.sqrt()[:, None, None] * columns  # (D, p, r): divergent waves, rotating waves

x = side * torch.rand(50, 2, **drawn)
waves = torch.cat([(x @ omega.mT).cos(), (x @ omega.mT).sin()], dim=-1).reshape(50, 2, -1)
by_hand = torch.einsum("ntD,mtD,Dpr,Dqr->npmq", waves, waves, columns, columns).reshape(100, 100)
with torch.no_grad():
    ours = make_kernel(wavelength, scale)(x).to_dense()
apart = (ours - by_hand).abs().max() / ours[0, 0]
print(f"the kernel and the sum over waves by hand are {apart:.0e} apart, relatively")
assert apart < 1e-6


def current(x, normal):
    """The current at x (n, 2) and its divergent part, (2, n, 2), in cm/s."""
    phase = x @ omega.mT
    strength = 10 / by_hand[0, 0].sqrt() * columns
    waves = phase.cos() @ (normal[0] * strength).flatten(1)
    waves = (waves + phase.sin() @ (normal[1] * strength).flatten(1)).unflatten(-1, (2, 2))
    return torch.stack([waves.sum(-1), waves[..., 0]])


# %% [markdown]
# ## Does it learn the wavelength?
#
# Two other models see the same data: a Helmholtz kernel, the sum of a divergent and a rotating
# field with a lengthscale each; and a separable kernel, one scalar kernel times a matrix that is
# learned.
#
# `fit` tries many lengthscales, but it cannot know what the parameters of your amplitude mean. The
# evidence of our kernel has several maxima. So we start three fits (`warm_start`), at wavelengths
# of 40, 80 and 160 km, with the lengthscale of the separable model and the variance of the data,
# and keep the one with the largest evidence.
#
# The columns are the difference of the evidence from that of our kernel, in nats; and the NLPD, in
# nats per component, and the error, rms in cm/s, of the current and of its divergent part, at 1000
# other positions. All are means over three currents. They are drawn from our kernel, so that it is
# the right one here: the table tells what the other two cost.


# %%
def fit_ours(x, y, lengthscale):
    """The model of largest evidence, of three that start at several wavelengths."""
    models = []
    for start in starts:
        kernel = ScaleKernel(make_kernel(start, lengthscale)).double()
        with torch.no_grad():
            kernel.outputscale = y.var() / kernel(x[:1]).to_dense()[0, 0]
        model = gp_orff.VectorFieldGP(kernel)
        models.append(model.fit(x, y, warm_start=True, progress=False))
    return max(models, key=lambda model: model.report.evidence)


rows, learned, cases = {"our own": [], "Helmholtz": [], "separable": []}, [], []
for _ in range(num_fields):
    normal = torch.randn(2, len(omega), 1, 2, **drawn)
    x, xs = side * torch.rand(num_drifters, 2, **drawn), side * torch.rand(1000, 2, **drawn)
    y = current(x, normal)[0]
    y = y + noise * torch.randn(*y.shape, **drawn)
    separable = gp_orff.SeparableKernel(RBFKernel(), torch.nn.Parameter(torch.eye(2)))
    others = {"Helmholtz": gp_orff.HelmholtzKernel(num_dims=2), "separable": separable}
    fits = {name: gp_orff.VectorFieldGP(kernel) for name, kernel in others.items()}
    models = {name: model.fit(x, y, progress=False) for name, model in fits.items()}
    models["our own"] = fit_ours(x, y, separable.base_kernel.lengthscale.item())
    for name, model in models.items():
        field, row = model.posterior(), [model.report.evidence]
        for truth, part in zip(current(xs, normal), (None, gp_orff.CurlFreePart()), strict=True):
            mean, sd = field.mean(xs, part), field.variance(xs, part).sqrt()
            density = torch.distributions.Normal(mean, sd).log_prob(truth)
            row += [-density.mean().item(), (mean - truth).square().mean().sqrt().item()]
        rows[name].append(row)
    learned.append(models["our own"].kernel.base_kernel.amplitude.log_wavelength.exp().item())
    cases.append((x, normal, models))

table = {name: np.array(row) for name, row in rows.items()}
print(f"\n{'':12}{'evidence':>10}{'current':>16}{'divergent part':>18}")
for name, values in table.items():
    evidence = (values - table["our own"])[:, 0].mean()
    nlpd, error, nlpd_part, error_part = values.mean(0)[1:]
    print(f"{name:12}{evidence:10.1f}{nlpd:10.3f}{error:6.2f}{nlpd_part:12.3f}{error_part:6.2f}")
print(f"\n{models['our own'].report}\n")
print(f"wavelengths learned: {', '.join(f'{w:.1f}' for w in learned)} km; truth {wavelength} km")
assert all(abs(value / wavelength - 1) < 0.15 for value in learned)
for name in ("Helmholtz", "separable"):
    gain = (table[name] - table["our own"]).mean(0)
    assert arguments.smoke or (gain[0] < 0 and (gain[1:] > 0).all())

# %% [markdown]
# The Helmholtz kernel is a good approximation of ours: two lengthscales can tell large eddies from
# small waves. So the current is only a little better. But its divergent part, which the drifters do
# not observe by itself, depends on what the prior says about long waves. And the wavelength is a
# number that no other kernel gives; its logarithm has a standard error in the report.
#
# ## A covariance on paper
#
# You may have a covariance function and no B. Let temperature have a correlation length of 1 m in
# depth, and salinity one of 2 m. What is the length of their cross-covariance? The mean, 1.5 m,
# looks right. `from_signature` takes the Fourier transform, which has to be positive at every
# frequency, and finds that no process has this covariance. The length has to be at least the root
# mean square, 1.58 m. (With a correlation of 0.8, it can be 1.77 m at most.)


# %%
def signature(lag, cross):
    """The covariance (m, 2, 2) of temperature and salinity at lags (m, 1), in standard units."""
    heat, salt, both = (torch.exp(-0.5 * (lag / scale) ** 2) for scale in (1.0, 2.0, cross))
    return torch.stack([heat, 0.8 * both, 0.8 * both, salt], dim=-1).reshape(-1, 2, 2)


depth = [(0.0, 10.0)]
make = gp_orff.SpectralMatrixKernel.from_signature
try:
    make(lambda lag: signature(lag, 1.5), depth)
    raise AssertionError("this is no covariance")
except ValueError as refusal:
    print(f"\n{refusal}\n")
rms = 2.5**0.5
lags = torch.linspace(0, 10, 50, dtype=torch.float64)[:, None]
with torch.no_grad():
    kernel = make(lambda lag: signature(lag, rms), depth).double()
    blocks = kernel(lags, 0 * lags[:1]).to_dense().reshape(50, 2, 2)
apart = (blocks - signature(lags, rms)).abs().max()
print(f"root mean square: the kernel and the covariance on paper are {apart:.0e} apart")
assert apart < 1e-6

# %% [markdown]
# ## How many features?
#
# For kernels whose moments are known (scalar, separable, curl-free, divergence-free, sums of them)
# theorems bound the error of random features: with a probability of 95 %, the error over a box does
# not exceed epsilon if there are D frequencies. Take the curl-free RBF kernel with lengthscale 1 on
# the box [-1, 1]^2. Here K(0) is the identity, and we want an error of at most 10 % of it. How many
# frequencies do the theorems ask for, and how many does it take? We measure the largest error over
# lags, in the norm of Hilbert and Schmidt, in 40 draws: its 95 % quantile. `brault` is in the
# spectral norm, which is smaller.

# %%
box, target = ((-1.0, 1.0), (-1.0, 1.0)), 0.1
bounds = {
    "minh": gp_orff.bounds.minh(curl_free, box),
    "brault": gp_orff.bounds.brault(curl_free, box),
}
corners = torch.tensor([[-1.0, -1.0], [1.0, -1.0]], dtype=torch.float64)
inside = torch.cartesian_prod(*2 * [torch.linspace(-1, 1, 11, dtype=torch.float64)])
with torch.no_grad():
    exact_blocks = curl_free(corners, inside).to_dense()  # lags from corners: all, up to sign


@torch.no_grad()
def largest_error(rule):
    """The number of frequencies of a rule, and its largest error over the box."""
    features = gp_orff.ORFFKernel(curl_free, rule)
    error = features(corners, inside).to_dense() - exact_blocks
    size = error.reshape(2, 2, -1, 2).square().sum((1, 3)).sqrt().max().item()
    return features.num_features // 2, size


def quantile(rule, number):
    """The 95 % quantile of the largest error of a random rule."""
    errors = [largest_error(rule(number, seed=seed))[1] for seed in range(num_draws)]
    return number, np.quantile(errors, 0.95)


known = {"domain": box, "lengthscale_range": (1, 1), "diagonal_correction": False}
grids = [gp_orff.Grid(tolerance=10.0**-power, **known) for power in np.arange(0.5, 6.5, 0.5)]
found = {
    "random": [quantile(gp_orff.MonteCarlo, number) for number in (32, 128, 512, 2048)],
    "Sobol": [quantile(gp_orff.QuasiMonteCarlo, number) for number in (32, 128, 512)],
    "grid": [largest_error(grid) for grid in grids],
}
found = {name: np.array(pairs) for name, pairs in found.items()}
frequencies = {f"bound: {name}": bound.num_frequencies(target) for name, bound in bounds.items()}
for name, pairs in found.items():
    number, error = np.log(pairs.T)
    frequencies[name] = math.ceil(math.exp(np.interp(-math.log(target), -error, number)))
print(f"\nfrequencies for an error of {target}:")
print("\n".join(f"{name:16}{number:8}" for name, number in frequencies.items()))
slope = np.polyfit(*np.log(found["random"].T), 1)[0]
print(f"the error of random features falls as D^{slope:.2f}")
assert abs(slope + 0.5) < (0.2 if arguments.smoke else 0.1)
assert list(frequencies.values()) == sorted(frequencies.values(), reverse=True)

# %% [markdown]
# The bounds hold, for every kernel of their class and every box, and that is their use: they show
# that the error falls as 1/sqrt(D). As a number of features they are useless. Random features
# take a twentieth of what the smaller one asks for, Sobol points a ninth of that, and a grid a
# twelfth again: in two dimensions, with a smooth kernel, its error falls faster than any power of
# D. Do not choose a number of features by a bound. Use a grid where there is one, and give it a
# tolerance; for a random rule, measure. For our own kernel no bound is known, and a grid keeps its
# tolerance:

# %%
kernel = models["our own"].kernel
rule = gp_orff.Grid.for_data(x, tolerance=1e-4, lengthscale_range=(1, 1))
features = gp_orff.ORFFKernel(kernel, rule)
with torch.no_grad():
    gram = kernel(x[:50], x[50:]).to_dense()
    apart = (features(x[:50], x[50:]).to_dense() - gram).abs().max() / kernel.outputscale
    apart = apart / kernel.base_kernel(x[:1]).to_dense()[0, 0]
print(f"\nour kernel, {features.num_features} features, tolerance 1e-4: ", end="")
print(f"at most {apart:.1e} of the variance from the exact kernel")
assert apart < 3e-4

# %% [markdown]
# ## The figure
#
# Above: averages of waves and their kernel; the spectra that were learned, one line for each
# current, and the truth; errors of features. Below: the divergent part of the last current.

# %%
matplotlib.use("agg")
from matplotlib import pyplot as plt

blue, orange, green, pink = "#0072B2", "#D55E00", "#009E73", "#CC79A7"  # Okabe & Ito
plt.rcParams["axes.titlesize"] = "medium"
figure, axes = plt.subplots(2, 3, figsize=(13, 7.4), layout="constrained")
for (n, average), colour in zip(averages.items(), (orange, green, blue), strict=True):
    axes[0, 0].plot(line[:, 0], average[0], color=colour, lw=1.5, label=f"{n:,} waves")
axes[0, 0].plot(line[:, 0], exact[0], "k--", lw=1.2, label="kernel")
axes[0, 0].set(xlabel="lag / lengthscale", ylabel="covariance", title="A kernel is many waves")
axes[0, 0].legend(frameon=False)

waves = torch.linspace(20, 300, 200, dtype=torch.float64)  # wavelengths, km
along = torch.stack([2 * math.pi / waves, 0 * waves], dim=-1)


@torch.no_grad()
def spectra(scaled):
    """Energy of the divergent and of the rotating waves, for each octave of the wavelength."""
    density = gp_orff.spectrum(scaled.base_kernel.base_kernel).log_density(along).exp()
    energy = scaled.base_kernel.amplitude(along).square().sum(1) * density[:, None]
    return scaled.outputscale * 2 * math.pi * math.log(2) * along[:, :1] ** 2 * energy


truth = ScaleKernel(make_kernel(wavelength, scale)).double()
truth.outputscale = 100 / by_hand[0, 0]
for part, (name, colour) in enumerate({"divergent": orange, "rotating": blue}.items()):
    for _, _, models in cases:
        ours = spectra(models["our own"].kernel)[:, part]
        axes[0, 1].plot(waves, ours, color=colour, lw=1, alpha=0.7)
    axes[0, 1].plot(waves, spectra(truth)[:, part], "--", color=colour, lw=2.2, label=name)
axes[0, 1].axvline(wavelength, color="k", lw=0.8)
axes[0, 1].set(title="Spectra (thin: learned, dashed: true)", ylim=(0, None))
axes[0, 1].set_xlabel("wavelength (km); line: true transition")
axes[0, 1].set_ylabel("energy per octave (cm²/s²)")
axes[0, 1].set_xscale("log")
axes[0, 1].set_xticks([20, 40, 60, 100, 200, 300], [20, 40, 60, 100, 200, 300])
axes[0, 1].xaxis.set_minor_locator(matplotlib.ticker.NullLocator())
axes[0, 1].legend(frameon=False)

reach = np.geomspace(16, 1e6, 40)
for (name, bound), style in zip(bounds.items(), ("k-", "k--"), strict=True):
    errors = [bound.error(int(number)) for number in reach]
    axes[0, 2].loglog(reach, errors, style, lw=1.3, label=f"bound: {name.capitalize()}")
for (name, values), colour in zip(found.items(), (orange, green, blue), strict=True):
    axes[0, 2].loglog(*values.T, "o-", ms=4, color=colour, label=name)
axes[0, 2].axhline(target, color="grey", lw=0.8, label="asked for")
axes[0, 2].set(xlabel="frequencies", ylabel="largest error / ‖K(0)‖", ylim=(1e-6, 30))
axes[0, 2].set(title="Features: asked for, and taken")
axes[0, 2].legend(frameon=False, loc="lower right", fontsize=9)

raster = torch.cartesian_prod(*2 * [torch.linspace(0, side, 31, dtype=torch.float64)])
field, part = cases[-1][2]["our own"].posterior(), gp_orff.CurlFreePart()
actual, mean = current(raster, cases[-1][1])[1], field.mean(raster, part)
sd = field.variance(raster, part).sum(-1).sqrt()
panels = {
    "Divergent part of the current": (actual, actual.norm(dim=-1), "speed (cm/s)"),
    "Its posterior mean": (mean, mean.norm(dim=-1), "speed (cm/s)"),
    "Its standard deviation (dots: drifters)": (None, sd, "sd (cm/s)"),
}
ticks = np.linspace(0, side, 31)
for ax, (title, (vectors, shade, label)) in zip(axes[1], panels.items(), strict=True):
    levels = np.arange(0, 9) if vectors is None else np.arange(0, 25, 3)
    shaded = ax.contourf(ticks, ticks, shade.reshape(31, 31).T, levels, extend="max")
    plot_colorbar(ax, shaded, label)
    plot_field(ax, raster, vectors, arrows=16, reference="cm/s")
    ax.set(xlabel="east (km)", ylabel="north (km)", xlim=(0, side), ylim=(0, side))
    ax.set_title(title, loc="left")
axes[1, 2].plot(*cases[-1][0].T, "o", ms=2, color=orange)
arguments.output.mkdir(parents=True, exist_ok=True)
figure.savefig(arguments.output / "a_kernel_of_your_own.png", dpi=100)
print(f"\nfigure: {arguments.output}/a_kernel_of_your_own.png")

# %% [markdown]
# ## The number

# %%
rmse = {name: values.mean(0)[4] for name, values in table.items()}
print(f"\nwavelength {np.mean(learned):.1f} km learned, {wavelength:.0f} km true; divergent part: ")
print(f"error {rmse['our own']:.2f} cm/s, Helmholtz {rmse['Helmholtz']:.2f}")
