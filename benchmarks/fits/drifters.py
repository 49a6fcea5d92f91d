"""Ocean drifters: a Helmholtz kernel on a grid compared with the exact GP of the same kernel.

    python benchmarks drifters DIR [--seeds 5] [--smoke]

DIR contains the public LASER data of Berlinghieri et al. 2023, XY_train_laserfull.csv (positions)
and UV_train_laserfull.csv (velocities), with two columns each. `--seeds` random choices hold out a
fifth of the data. Both models are `VectorFieldGP(HelmholtzKernel(num_dims=2))`. The model `exact`
has default settings, which use the exact kernel for so few points. The model `grid` has
`Grid.for_data(x, tolerance=1e-5, max_features=4096)`. The scores are the root mean square error and
the negative log density of the held-out velocities, per component, and the evidence in nats per
number.
"""

import time
from collections.abc import Sequence

import numpy as np
import torch
from helpers.command import Sizes, with_folder
from helpers.fields import nlpd
from helpers.results import rounded, save
from helpers.rows import Rows

import gp_orff

RULES = {
    "exact": lambda x: gp_orff.Auto(),
    "grid": lambda x: gp_orff.Grid.for_data(x, tolerance=1e-5, max_features=4096),
}


def measured(rule, x, y, xs, ys) -> dict[str, float]:
    kernel = gp_orff.HelmholtzKernel(num_dims=2)
    start = time.perf_counter()
    model = gp_orff.VectorFieldGP(kernel, frequencies=rule).fit(x, y, progress=False)
    seconds = time.perf_counter() - start
    with torch.no_grad():
        field = model.posterior()
        variance = field.variance(xs) + model.likelihood.noise
        evidence = model.log_marginal_likelihood().item() / y.numel()
    error = field.mean(xs) - ys
    return {
        "F": model.report.features,
        "RMSE": error.square().mean().sqrt().item(),
        "NLPD": nlpd(error, variance),
        "evidence": evidence,
        "seconds": seconds,
    }


def main(words: Sequence[str] | None = None) -> None:
    parser = Sizes(__file__, __doc__, seeds=(5, 1), most=(10_000, 60))
    arguments = with_folder(parser, "of the public data").parse_args(words)
    x, y = (
        torch.from_numpy(
            np.loadtxt(arguments.folder / f"{kind}_train_laserfull.csv", delimiter=",")
        )[: arguments.most]
        for kind in ("XY", "UV")
    )
    rows = Rows()
    for seed in range(arguments.seeds):
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
        test, train = order[: len(x) // 5], order[len(x) // 5 :]
        for name, rule in RULES.items():
            own = measured(rule(x[train]), x[train], y[train], x[test], y[test])
            rows.add(seed=seed, kernel=name, **own)
    exact, grid = rows[::2], rows[1::2]
    assert all(a["F"] is None and b["F"] for a, b in zip(exact, grid, strict=True))
    found = {
        "drifters": len(x),
        "seeds": arguments.seeds,
        "rows": rows,
        "largest |RMSE ratio - 1|": max(
            abs(a["RMSE"] / b["RMSE"] - 1) for a, b in zip(grid, exact, strict=True)
        ),
        "largest |NLPD difference|": max(
            abs(a["NLPD"] - b["NLPD"]) for a, b in zip(grid, exact, strict=True)
        ),
    }
    print(rounded({name: value for name, value in found.items() if name != "rows"}))
    save(arguments, found)
