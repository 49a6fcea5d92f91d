"""A total-field survey: a harmonic kernel with observations along lines.

    python benchmarks survey DIR [--folds 1] [--thin 4] [--noise Gaussian lines ...] [--smoke]

DIR contains rio-magnetic.csv of fatiando/verde: 37 718 observations along lines. Distinct line
numbers are sorted, including ties. Every fifth line is held out, from rank 2 on in the first fold
and from ranks 3, 4, 0 and 1 in further folds. `VectorFieldGP(HarmonicKernel())` with default
settings learns from one in `--thin` observations of the other lines. It uses the exact kernel. With
--thin 1 it uses the means at few sites, and with Student-t noise one observation of each site. The
main field is that of 1978.3.

The noise is Gaussian, or has an offset and correlated noise of each line (track=), or is Student-t
with learned degrees of freedom. RMSE and NLPD are those of all held-out observations in nT,
including noise. Seconds are the processor time of the fit. The table also has equivalent sources of
harmonica if this package is installed.
"""

import importlib.util
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import numpy as np
import scipy.stats
import torch
from helpers.command import Sizes, with_folder
from helpers.results import save
from helpers.rows import Rows

import gp_orff

FOLDS = (2, 3, 4, 0, 1)
NOISES = ("Gaussian", "lines", "Student-t")


def read(folder: Path):
    """Return positions in km, anomalies, directions of the main field, and the ranks of the
    lines."""
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


def harmonic(x, y, u, line, held_out, thin: int, noise: str) -> dict[str, float]:
    rows = np.flatnonzero(~held_out)[::thin]
    robust = None
    if noise == "Student-t":
        robust = gp_orff.MultitaskStudentTLikelihood(num_tasks=3, learn_deg_free=True)
    model = gp_orff.VectorFieldGP(gp_orff.HarmonicKernel(), likelihood=robust)
    options = {"directions": u[rows], "progress": False}
    if noise == "lines":
        options["track"] = line[rows]
    began = time.process_time()
    model.fit(x[rows], y[rows], **options)
    fit = time.process_time() - began
    field, along = model.posterior(), torch.from_numpy(u[held_out])
    means, variances = [], []
    for points, unit in zip(
        torch.from_numpy(x[held_out]).split(1000), along.split(1000), strict=True
    ):
        means.append((field.mean(points) * unit).sum(-1))
        covariance = field.pointwise_covariance(points)
        variances.append(torch.einsum("ni,nij,nj->n", unit, covariance, unit))
    error = (torch.from_numpy(y[held_out]) - torch.cat(means)).unsqueeze(-1)
    sd = (torch.cat(variances).unsqueeze(-1) + noise_variances(model.likelihood)).sqrt()
    predicted = torch.distributions.Normal(0.0, sd)
    scores = {
        "RMSE": error.square().mean().sqrt().item(),
        "NLPD": -predicted.log_prob(error).exp().mean(-1).log().mean().item(),
        "inside": ((predicted.cdf(error).mean(-1) - 0.5).abs() < 0.475).double().mean().item(),
    }
    if robust is not None:
        scores["deg_free"] = model.likelihood.deg_free.item()
    return {"readings": len(rows), **scores, "seconds": fit}


def equivalent_sources(x, y, rank, fold: int, thin: int) -> dict[str, float]:
    """Return the errors of harmonica's `EquivalentSourcesGB`, which gives no error bars.

    Its depth and damping are those with the smallest error on a second set of lines. The seconds
    include the search for them.
    """
    import harmonica

    metres, held_out, judged = 1e3 * x, rank % 5 == fold, rank % 5 == (fold + 1) % 5

    def error(known, asked, depth: float, damping: float) -> float:
        sources = harmonica.EquivalentSourcesGB(
            depth=depth, damping=damping, window_size=20e3, block_size=500, random_state=0
        )
        sources.fit(tuple(metres[known].T), y[known])
        return np.square(sources.predict(tuple(metres[asked].T)) - y[asked]).mean() ** 0.5

    began = time.process_time()
    known, asked = (np.flatnonzero(rows)[::thin] for rows in (~held_out & ~judged, judged))
    settings = product((800.0, 2000.0, 4000.0), (0.1, 10.0, 1000.0))
    best = min(settings, key=lambda setting: error(known, asked, *setting))
    rows = np.flatnonzero(~held_out)[::thin]
    found = {"RMSE": error(rows, held_out, *best), "NLPD": float("nan"), "inside": float("nan")}
    return {"readings": len(rows), **found, "seconds": time.process_time() - began}


def noise_variances(likelihood) -> torch.Tensor:
    """Return equally probable noise variances of an observation on a new line."""
    if isinstance(likelihood, gp_orff.TrackLikelihood):
        names = ("noise", "offset_variance", "correlated_variance", "block_variance")
        return sum(getattr(likelihood, name).detach().double() for name in names).reshape(1)
    noise = likelihood.noise.detach().double()
    if not isinstance(likelihood, gp_orff.MultitaskStudentTLikelihood):
        return noise.reshape(1)
    half = likelihood.deg_free.item() / 2
    probabilities = (np.arange(200) + 0.5) / 200
    return noise / torch.from_numpy(scipy.stats.gamma.ppf(probabilities, half, scale=1 / half))


def main(words: Sequence[str] | None = None) -> None:
    parser = with_folder(
        Sizes(__file__, __doc__, folds=(1, 1), thin=(4, 1)), "folder of rio-magnetic.csv"
    )
    parser.add_argument("--noise", nargs="+", choices=NOISES, default=NOISES[:1])
    arguments = parser.parse_args(words)
    x, y, u, rank = read(arguments.folder)
    if arguments.smoke:
        x, y, u, rank = (part[::60] for part in (x, y, u, rank))
    rows = Rows()
    for fold in FOLDS[: arguments.folds]:
        held_out = rank % 5 == fold
        for noise in arguments.noise:
            scores = harmonic(x, y, u, rank, held_out, arguments.thin, noise)
            rows.add(model="harmonic kernel", noise=noise, fold=fold, **scores)
        if importlib.util.find_spec("harmonica"):
            scores = equivalent_sources(x, y, rank, fold, arguments.thin)
            rows.add(model="equivalent sources", noise="", fold=fold, **scores)
    save(arguments, {"readings": len(y), "rows": rows})
