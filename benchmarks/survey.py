"""A total-field survey: harmonic kernels with error bars beside equivalent sources.

    python benchmarks/survey.py DIR [--folds 1] [--smoke]

DIR holds rio-magnetic.csv of fatiando/verde: 37 718 readings along lines. Distinct line numbers are
sorted, ties included, and every fifth line is held out, from the rank 2 on (fold by fold, then from
3, 4, 0, 1). `VectorFieldGP(HarmonicKernel())` with default settings, Gaussian and Student-t noise,
learns from the other lines; the main field is that of 1978.3. `harmonica.EquivalentSourcesGB`,
where it is installed, is tuned on every fifth of the lines that are not held out. RMSE and NLPD are
of readings in nT, noise included; seconds of fit and, for the sources, of the search.
"""

import importlib.util
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from helpers.command import Sizes, with_folder
from helpers.results import save
from helpers.rows import Rows

import gp_orff

FOLDS = (2, 3, 4, 0, 1)
DEPTHS, DAMPINGS = (0.5, 1.0, 2.0), (1e-2, 1e-1, 1.0, 10.0)  # km, of equivalent sources


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


def harmonic(x, y, u, held_out, likelihood) -> dict[str, float]:
    model = gp_orff.VectorFieldGP(gp_orff.HarmonicKernel(), likelihood=likelihood)
    start = time.perf_counter()
    model.fit(x[~held_out], y[~held_out], directions=u[~held_out], progress=False)
    seconds = time.perf_counter() - start
    model.condition(x, y, directions=u)  # hyperparameters as they are
    split = [(np.flatnonzero(~held_out), np.flatnonzero(held_out))]
    found = model.cross_validate(x, y, directions=u, blocks=split)
    scores = {"RMSE": found.rmse, "NLPD": found.nlpd, "inside": found.coverage}
    return {**scores, "seconds": seconds, "F": model.report.features}


def equivalent_sources(x, y, rank, held_out) -> dict[str, float]:
    import harmonica

    def predicted(train, test, depth, damping):
        sources = harmonica.EquivalentSourcesGB(
            depth=depth, damping=damping, window_size=5.0, random_state=0
        )
        sources.fit(tuple(x[train].T), y[train])
        return sources.predict(tuple(x[test].T))

    start = time.perf_counter()
    inner = ~held_out & (rank % 5 == (rank[held_out][0] + 1) % 5)
    errors = {
        (depth, damping): np.square(
            predicted(~held_out & ~inner, inner, depth, damping) - y[inner]
        ).mean()
        for depth in DEPTHS
        for damping in DAMPINGS
    }
    best = min(errors, key=errors.get)
    error = predicted(~held_out, held_out, *best) - y[held_out]
    rmse = float(np.sqrt(np.square(error).mean()))
    return {
        "RMSE": rmse,
        "depth": best[0],
        "damping": best[1],
        "seconds": time.perf_counter() - start,
    }


def main(words: Sequence[str] | None = None) -> None:
    parser = with_folder(Sizes(__file__, __doc__, folds=(1, 1)), "folder of rio-magnetic.csv")
    arguments = parser.parse_args(words)
    x, y, u, rank = read(arguments.folder)
    if arguments.smoke:
        x, y, u, rank = (part[::60] for part in (x, y, u, rank))
    rows = Rows()
    for fold in FOLDS[: arguments.folds]:
        held_out = rank % 5 == fold
        noises = {
            "Gaussian": None,
            "Student-t": gp_orff.MultitaskStudentTLikelihood(num_tasks=3),
        }
        for name, likelihood in noises.items():
            scores = harmonic(x, y, u, held_out, likelihood)
            rows.add(model=f"harmonic, {name} noise", fold=fold, **scores)
        if importlib.util.find_spec("harmonica"):
            scores = equivalent_sources(x, y, rank, held_out)
            rows.add(model="equivalent sources", fold=fold, **scores)
    save(arguments, {"readings": len(y), "rows": rows})


if __name__ == "__main__":
    main()
