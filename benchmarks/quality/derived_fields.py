"""Divergence and vorticity: calibration, and public simulations.

    python benchmarks derived_fields [DIR] [--fields 30] [--smoke]

simulations  with DIR, the public simulations `vortex` and `divmild` of Berlinghieri et al. 2023:
             root mean square error of both maps against the known grids, and the posterior sd
calibration  fields drawn from Helmholtz priors (as in `calibration`), with 2000 vectors each and
             learned hyperparameters: fraction of the true divergence and vorticity at 1000 held-out
             points inside 95 % intervals, mean and standard error over the fields
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from helpers.command import Sizes, with_folder
from helpers.fields import Field, helmholtz_problem, mean_and_standard_error, scores
from helpers.results import rounded, save
from helpers.rows import Rows
from jaxtyping import Float
from torch import Tensor

import gp_orff

SYMBOLS = {"divergence": gp_orff.Divergence(), "vorticity": gp_orff.Curl()}
# The files' vorticity is the opposite of ours.
KNOWN_GRIDS = {"divergence": ("divgrid", 1), "vorticity": ("vortgrid", -1)}


def truth_of(field: Field, x: Float[Tensor, "n 2"]) -> Mapping[str, Float[Tensor, "n 1"]]:
    """Return the divergence and the vorticity of a known field, by automatic differentiation."""
    x = x.clone().requires_grad_()
    values = field(x)
    east, north = (
        torch.autograd.grad(values[:, i].sum(), x, retain_graph=True)[0] for i in range(2)
    )
    return {
        "divergence": (east[:, 0] + north[:, 1]).detach().unsqueeze(-1),
        "vorticity": (north[:, 0] - east[:, 1]).detach().unsqueeze(-1),
    }


def learned(x: Float[Tensor, "N 2"], y: Float[Tensor, "N 2"]) -> gp_orff.VectorFieldGP:
    return gp_orff.VectorFieldGP(gp_orff.HelmholtzKernel(num_dims=2)).fit(x, y, progress=False)


def calibration(fields: int, points: int) -> Rows:
    rows = Rows()
    for seed in range(fields):
        field, x, y, xs = helmholtz_problem(seed, points)
        posterior, truth = learned(x, y).posterior(), truth_of(field, xs)
        for name, symbol in SYMBOLS.items():
            mean, variance = posterior.mean(xs, symbol), posterior.variance(xs, symbol)
            rows.add(field=seed, symbol=name, **scores(mean, variance, truth[name]))
    return rows


def summary(rows: Rows, name: str) -> dict[str, object]:
    own = [row for row in rows if row["symbol"] == name]
    ratios = [row["error"] / row["sd"] for row in own]
    inside = mean_and_standard_error([row["inside"] for row in own])
    return {"inside": inside, "error / sd": float(np.median(ratios))}


def simulations(folder: Path) -> Rows:
    rows = Rows()
    for name in ("vortex", "divmild"):
        x, y, xs = (
            torch.from_numpy(np.loadtxt(folder / f"{kind}_{name}.csv", delimiter=","))
            for kind in ("XY_train", "UV_train", "XY_test")
        )
        posterior = learned(x, y).posterior()
        for kind, (file, sign) in KNOWN_GRIDS.items():
            known = sign * np.loadtxt(folder / f"{file}_{name}.csv", delimiter=",").reshape(-1, 1)
            mean, variance = (f(xs, SYMBOLS[kind]) for f in (posterior.mean, posterior.variance))
            own = scores(mean, variance, torch.from_numpy(known))
            size = math.sqrt((known**2).mean())
            rows.add(simulation=name, points=len(x), symbol=kind, size=size, **own)
    return rows


def main(words: Sequence[str] | None = None) -> None:
    parser = Sizes(__file__, __doc__, fields=(30, 2), points=(2000, 200))
    arguments = with_folder(parser, "of the public simulations", nargs="?").parse_args(words)
    found = {} if arguments.folder is None else {"simulations": simulations(arguments.folder)}
    rows = calibration(arguments.fields, arguments.points)
    calibrated = {name: summary(rows, name) for name in SYMBOLS}
    found["calibration"] = {
        "fields": arguments.fields,
        "points": arguments.points,
        **calibrated,
    }
    print(rounded(calibrated))
    save(arguments, found)
