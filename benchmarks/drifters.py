"""Ocean drifters: a Helmholtz kernel on a grid against the exact GP with the same kernel.

    python benchmarks/drifters.py DIR [--seeds 5]

DIR holds the public LASER data of Berlinghieri et al. 2023, XY_train_laserfull.csv (positions) and
UV_train_laserfull.csv (velocities), two columns each. A fifth is held out, by `--seeds` random
choices. Both models are `VectorFieldGP(HelmholtzKernel(num_dims=2))` with default settings; "exact"
is what they are for so few points, "grid" takes `Auto(exact_values=0)`. Root mean square error and
negative log density of the held-out velocities, per component.
"""

import argparse
import math
import time
from pathlib import Path

import numpy as np
import torch

import gp_orff


def scores(rule, x, y, xs, ys):
    kernel = gp_orff.HelmholtzKernel(num_dims=2)
    start = time.perf_counter()
    model = gp_orff.VectorFieldGP(kernel, frequencies=rule).fit(x, y, progress=False)
    seconds = time.perf_counter() - start
    with torch.no_grad():
        field = model.posterior()
        variance = field.variance(xs) + model.likelihood.noise
        evidence = model.log_marginal_likelihood().item() / y.numel()
    error = field.mean(xs) - ys
    nlpd = 0.5 * (error.square() / variance + torch.log(2 * math.pi * variance)).mean()
    return error.square().mean().sqrt().item(), nlpd.item(), evidence, seconds


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", type=int, default=5)
    arguments = parser.parse_args()
    x, y = (
        torch.from_numpy(
            np.loadtxt(arguments.folder / f"{kind}_train_laserfull.csv", delimiter=",")
        )
        for kind in ("XY", "UV")
    )
    rules = {"exact": gp_orff.Auto(), "grid": gp_orff.Auto(exact_values=0)}
    print(
        f"{len(x)} drifters\n{'seed':>4}{'':>7}{'RMSE':>9}{'NLPD':>9}{'evidence':>10}{'seconds':>9}"
    )
    found = {name: [] for name in rules}
    for seed in range(arguments.seeds):
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
        test, train = order[: len(x) // 5], order[len(x) // 5 :]
        for name, rule in rules.items():
            row = scores(rule, x[train], y[train], x[test], y[test])
            found[name].append(row)
            print(f"{seed:>4}{name:>7}{row[0]:>9.4f}{row[1]:>9.4f}{row[2]:>10.4f}{row[3]:>9.1f}")
    exact, grid = (np.array(found[name]) for name in rules)
    print(f"RMSE, grid over exact: {(grid[:, 0] / exact[:, 0]).round(4)}")
    print(f"NLPD, grid less exact: {(grid[:, 1] - exact[:, 1]).round(4)}")


if __name__ == "__main__":
    main()
