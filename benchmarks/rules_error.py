"""Error of the kernel by frequency rule: MonteCarlo, Orthogonal, QuasiMonteCarlo.

    python benchmarks/rules_error.py [--seeds 30] [--output benchmarks/output]

Relative Frobenius error of the curl-free RBF kernel matrix between 100 points of a cube of three
lengthscales, against the exact kernel, trace measure, d = 2, 3, 8; medians over seeds, shaded from
the 10 % to the 90 % quantile. Writes rules_error.png and prints the medians and fitted slopes.
"""

import argparse
from pathlib import Path

import matplotlib
import numpy as np
import torch
from gpytorch.kernels import RBFKernel

import gp_orff

matplotlib.use("agg")
from matplotlib import pyplot as plt

RULES = (gp_orff.MonteCarlo, gp_orff.Orthogonal, gp_orff.QuasiMonteCarlo)
NUMBERS = [2**k for k in range(4, 12)]
COLOURS = ("#0072B2", "#E69F00", "#009E73")  # Okabe & Ito, safe for colour-blind readers


def errors(rule, num_dims, seeds):
    generator = torch.Generator().manual_seed(0)
    x = 3 * torch.rand(100, num_dims, generator=generator, dtype=torch.float64)
    potential = RBFKernel().double()
    potential.lengthscale = 1.0
    kernel = gp_orff.CurlFreeKernel(potential, num_dims=num_dims)
    with torch.no_grad():
        exact = kernel(x).to_dense()
        return np.array(
            [
                [
                    (
                        (gp_orff.ORFFKernel(kernel, rule(n, seed=s))(x).to_dense() - exact).norm()
                        / exact.norm()
                    ).item()
                    for n in NUMBERS
                ]
                for s in range(seeds)
            ]
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=30)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/output"))
    arguments = parser.parse_args()
    figure, axes = plt.subplots(1, 3, figsize=(12, 4), sharey=True, layout="constrained")
    print(f"{'d':>2} {'rule':16}" + "".join(f"{n:>8}" for n in NUMBERS) + "   slope")
    for ax, num_dims in zip(axes, (2, 3, 8), strict=True):
        for rule, colour in zip(RULES, COLOURS, strict=True):
            found = errors(rule, num_dims, arguments.seeds)
            median = np.median(found, axis=0)
            slope = np.polyfit(np.log(NUMBERS), np.log(median), 1)[0]
            print(f"{num_dims:2} {rule.__name__:16}" + "".join(f"{m:8.4f}" for m in median), end="")
            print(f"{slope:8.2f}")
            ax.loglog(
                NUMBERS, median, "o-", color=colour, ms=4, label=f"{rule.__name__} ({slope:.2f})"
            )
            ax.fill_between(
                NUMBERS, *np.quantile(found, [0.1, 0.9], axis=0), color=colour, alpha=0.15, lw=0
            )
        ax.set(title=f"d = {num_dims}", xlabel="frequencies D")
        ax.legend(title="rule (slope)", frameon=False)
    axes[0].set_ylabel("relative error of the kernel matrix")
    arguments.output.mkdir(parents=True, exist_ok=True)
    figure.savefig(arguments.output / "rules_error.png", dpi=150)
    print(f"figure: {arguments.output / 'rules_error.png'}")


if __name__ == "__main__":
    main()
