"""A total-field survey: a harmonic kernel on readings along lines.

    python benchmarks/survey.py DIR [--folds 1] [--thin 4] [--smoke]

DIR holds rio-magnetic.csv of fatiando/verde: 37 718 readings along lines. Distinct line numbers are
sorted, ties included, and every fifth line is held out, from the rank 2 on (fold by fold, then from
3, 4, 0, 1). `VectorFieldGP(HarmonicKernel())` with default settings learns from one in `--thin`
readings of the other lines, which the exact kernel takes; the main field is that of 1978.3. RMSE
and NLPD are of all held-out readings in nT, noise included; seconds of the fit.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from helpers.command import Sizes, with_folder
from helpers.fields import nlpd
from helpers.measure import seconds
from helpers.results import save
from helpers.rows import Rows

import gp_orff

FOLDS = (2, 3, 4, 0, 1)


def read(folder: Path):
    """Positions in km, anomalies, directions of the main field, ranks of the lines."""
    import pandas
    import xarray

    frame = pandas.read_csv(folder / "rio-magnetic.csv")
    survey = xarray.Dataset.from_dataframe(frame).set_coords(
        ["longitude", "latitude", "height_ell_m"]
    )
    coordinates = ("longitude", "latitude", "height_ell_m")
    x, y, options, _ = gp_orff.labelled.total_field(
        survey, "total_field_anomaly_nt", coordinates, date=1978.3
    )
    rank = np.unique(frame.line_number, return_inverse=True)[1]
    return x, y, options["directions"], rank


def harmonic(x, y, u, held_out, thin: int) -> dict[str, float]:
    rows = np.flatnonzero(~held_out)[::thin]
    model = gp_orff.VectorFieldGP(gp_orff.HarmonicKernel())
    fit = seconds(lambda: model.fit(x[rows], y[rows], directions=u[rows], progress=False))
    field, along = model.posterior(), torch.from_numpy(u[held_out])
    means, variances = [], []
    for points, unit in zip(
        torch.from_numpy(x[held_out]).split(1000), along.split(1000), strict=True
    ):
        means.append((field.mean(points) * unit).sum(-1))
        covariance = field.pointwise_covariance(points)
        variances.append(torch.einsum("ni,nij,nj->n", unit, covariance, unit))
    error = torch.cat(means) - torch.from_numpy(y[held_out])
    variance = torch.cat(variances) + model.likelihood.noise.detach()
    scores = {
        "RMSE": error.square().mean().sqrt().item(),
        "NLPD": nlpd(error, variance),
        "inside": (error.abs() < 1.96 * variance.sqrt()).double().mean().item(),
    }
    return {"readings": len(rows), **scores, "seconds": fit}


def main(words: Sequence[str] | None = None) -> None:
    parser = with_folder(
        Sizes(__file__, __doc__, folds=(1, 1), thin=(4, 1)), "folder of rio-magnetic.csv"
    )
    arguments = parser.parse_args(words)
    x, y, u, rank = read(arguments.folder)
    if arguments.smoke:
        x, y, u, rank = (part[::60] for part in (x, y, u, rank))
    rows = Rows()
    for fold in FOLDS[: arguments.folds]:
        held_out = rank % 5 == fold
        scores = harmonic(x, y, u, held_out, arguments.thin)
        rows.add(model="harmonic kernel", fold=fold, **scores)
    save(arguments, {"readings": len(y), "rows": rows})


if __name__ == "__main__":
    main()
