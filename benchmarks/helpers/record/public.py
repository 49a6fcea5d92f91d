"""Public data of the record: the magnetic field of a hall, GPS velocities, drifters, a survey."""

import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch
from fits import drifters, magnetometer, survey
from gpytorch.kernels import MaternKernel, RQKernel
from jaxtyping import Bool, Float
from torch import Tensor

import gp_orff

BLOCK, PLACE, FOLDS = 50.0, 0.01, 5  # km: of blocks that are held out, of one place
GPS = {"RQ": RQKernel, "Matérn 3/2": partial(MaternKernel, nu=1.5)}


def hall(folder: Path) -> dict[str, float]:
    found = magnetometer.one_pass(
        *magnetometer.read(folder, [1, 2, 3]), *magnetometer.read(folder, [4])
    )
    return {"NLML": found["NLML"], **_scores(found)}


def gps(folder: Path, base: str, fold: int) -> dict[str, float]:
    """Return the scores of a fit for one fold of blocks of 50 km.

    One record is predicted at each held-out position. There is no evidence in the record, because
    it depends on whether the fit uses all records or only distinct ones.
    """
    x, y, fold_of, first = _velocities(folder)
    train, test = fold_of != fold, (fold_of == fold) & first
    model = gp_orff.VectorFieldGP(gp_orff.HelmholtzKernel(GPS[base](), num_dims=2))
    field = model.fit(x[train], y[train], progress=False).posterior()
    with torch.no_grad():
        variance = field.variance(x[test]) + model.likelihood.noise
        return _scores(magnetometer.scores(field.mean(x[test]) - y[test], variance))


def _velocities(
    folder: Path,
) -> tuple[Float[Tensor, "N 2"], Float[Tensor, "N 2"], Bool[Tensor, "N"], Bool[Tensor, "N"]]:
    """Return positions in km, horizontal velocities in mm per year, folds, and whether a record is
    the first one at its position."""
    table = np.genfromtxt(folder / "california-gps.csv", delimiter=",", names=True)
    middle = np.cos(np.radians(table["latitude"].mean()))
    degrees = [table[name] - table[name].mean() for name in ("longitude", "latitude")]
    x = 111.2 * np.stack([degrees[0] * middle, degrees[1]], -1)
    y = 1e3 * np.stack([table["velocity_east"], table["velocity_north"]], -1)
    block = np.unique(np.floor(x / BLOCK), axis=0, return_inverse=True)[1].ravel()
    fold = np.random.default_rng(0).integers(FOLDS, size=block.max() + 1)[block]
    first = np.zeros(len(x), dtype=bool)
    first[np.unique(np.round(x / PLACE), axis=0, return_index=True)[1]] = True
    return tuple(map(torch.from_numpy, (x, y, fold, first)))


def ocean(folder: Path, seed: int) -> dict[str, float]:
    x, y = (
        torch.from_numpy(np.loadtxt(folder / f"{kind}_train_laserfull.csv", delimiter=","))
        for kind in ("XY", "UV")
    )
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    test, train = order[: len(x) // 5], order[len(x) // 5 :]
    found = drifters.measured(gp_orff.Auto(), x[train], y[train], x[test], y[test])
    return {"evidence": found["evidence"] * y[train].numel(), **_scores(found)}


def rio(folder: Path) -> dict[str, float]:
    x, y, u, rank = survey.read(folder)
    return _scores(survey.harmonic(x, y, u, rank, rank % 5 == 2, 4, "Gaussian"))


def _scores(found: dict[str, float]) -> dict[str, float]:
    return {name: found[name] for name in ("RMSE", "inside", "NLPD") if name in found}


def tasks() -> Iterator[tuple[str, Callable[[Path], dict[str, float]]]]:
    yield "magnetometer", hall
    yield "Rio", rio
    for base in GPS:
        yield from ((f"GPS {base}, fold {i}", partial(gps, base=base, fold=i)) for i in range(5))
    yield from ((f"drifters, seed {seed}", partial(ocean, seed=seed)) for seed in range(3))


PUBLIC = dict(tasks())


def measured(name: str, folder: Path) -> dict[str, float]:
    """Return the scores of a data set, and the CPU seconds of the fit and the predictions."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        began = time.process_time()
        found = PUBLIC[name](folder)
        return {**found, "CPU s": time.process_time() - began}
