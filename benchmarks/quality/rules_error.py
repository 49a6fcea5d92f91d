"""Error of the kernel by frequency rule: MonteCarlo, Orthogonal, QuasiMonteCarlo.

    python benchmarks rules_error [--seeds 30] [--smoke] [--output FOLDER]

The score is the relative Frobenius error of the curl-free RBF kernel matrix between 100 points of a
cube of three lengthscales, for d = 2, 3, 8 and the trace measure. The figure rules_error.png in the
folder of the results has medians over seeds, with shades from the 10 % to the 90 % quantile. The
table also has the slope of a line through the logarithms of the medians.
"""

from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np
import torch
from gpytorch.kernels import RBFKernel
from helpers.command import Sizes
from helpers.results import save
from helpers.rows import Rows

import gp_orff

matplotlib.use("agg")
from matplotlib import pyplot as plt

RULES = (gp_orff.MonteCarlo, gp_orff.Orthogonal, gp_orff.QuasiMonteCarlo)
DIMS = (2, 3, 8)
COLOURS = dict(zip(RULES, ("#0072B2", "#E69F00", "#009E73"), strict=True))  # Okabe & Ito


@torch.no_grad()
def errors(rule: type, num_dims: int, numbers: Sequence[int], seeds: int) -> np.ndarray:
    """Return the error of the kernel for each seed and number of features, (seeds, numbers)."""
    generator = torch.Generator().manual_seed(0)
    x = 3 * torch.rand(100, num_dims, generator=generator, dtype=torch.float64)
    potential = RBFKernel().double()
    potential.lengthscale = 1.0
    kernel = gp_orff.CurlFreeKernel(potential, num_dims=num_dims)
    exact = kernel(x).to_dense()

    def error(number: int, seed: int) -> float:
        found = gp_orff.ORFFKernel(kernel, rule(number, seed=seed))(x).to_dense()
        return ((found - exact).norm() / exact.norm()).item()

    return np.array([[error(number, seed) for number in numbers] for seed in range(seeds)])


def picture(found, slopes, numbers, path: Path) -> None:
    figure, axes = plt.subplots(1, 3, figsize=(12, 4), sharey=True, layout="constrained")
    for ax, num_dims in zip(axes, DIMS, strict=True):
        for rule, colour in COLOURS.items():
            own = found[num_dims, rule]
            label = f"{rule.__name__} ({slopes[num_dims, rule]:.2f})"
            ax.loglog(numbers, np.median(own, axis=0), "o-", color=colour, ms=4, label=label)
            low, high = np.quantile(own, [0.1, 0.9], axis=0)
            ax.fill_between(numbers, low, high, color=colour, alpha=0.15, lw=0)
        ax.set(title=f"d = {num_dims}", xlabel="frequencies D")
        ax.legend(title="rule (slope)", frameon=False)
    axes[0].set_ylabel("relative error of the kernel matrix")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main(words: Sequence[str] | None = None) -> None:
    arguments = Sizes(__file__, __doc__, seeds=(30, 2), most=(2048, 64)).parse_args(words)
    numbers = [2**k for k in range(4, 12) if 2**k <= arguments.most]
    rows, found, slopes = Rows(), {}, {}
    for num_dims in DIMS:
        for rule in RULES:
            own = found[num_dims, rule] = errors(rule, num_dims, numbers, arguments.seeds)
            medians = np.median(own, axis=0)
            slopes[num_dims, rule] = np.polyfit(np.log(numbers), np.log(medians), 1)[0]
            medians = {str(n): m.item() for n, m in zip(numbers, medians, strict=True)}
            slope = slopes[num_dims, rule].item()
            rows.add(d=num_dims, rule=rule.__name__, **medians, slope=slope)
    if arguments.output is not None:
        picture(found, slopes, numbers, arguments.output / "rules_error.png")
    save(arguments, {"seeds": arguments.seeds, "rows": rows})
