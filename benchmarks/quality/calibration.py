"""Coverage of 95 % intervals for fields of known priors, with learned hyperparameters.

    python benchmarks calibration [--fields 50] [--points 10000] [--smoke]

Every field is a draw of a Helmholtz prior (two inputs, RBF potentials). Lengthscales are between a
tenth and a quarter of the extent, amplitudes between 0.3 and 1, and noise between 0.1 and 1, all
log-uniform. `VectorFieldGP` learns all of them from `--points` vectors with default settings. The
score is the fraction of the latent components at 1000 held-out points inside the 95 % intervals of
each field. A field has few independent values, so the fractions of single fields vary. Their mean
must be near 0.95.
"""

import math
from collections.abc import Sequence

import numpy as np
from helpers.command import Sizes
from helpers.fields import helmholtz_problem, mean_and_standard_error, quantiles, scores
from helpers.results import rounded, save
from helpers.rows import Rows

import gp_orff


def measured(seed: int, points: int) -> dict[str, float]:
    field, x, y, xs = helmholtz_problem(seed, points)
    model = gp_orff.VectorFieldGP(gp_orff.HelmholtzKernel(num_dims=2))
    posterior = model.fit(x, y, progress=False).posterior()
    return scores(posterior.mean(xs), posterior.variance(xs), field(xs))


def main(words: Sequence[str] | None = None) -> None:
    arguments = Sizes(__file__, __doc__, fields=(50, 2), points=(10_000, 300)).parse_args(words)
    rows = Rows()
    for seed in range(arguments.fields):
        rows.add(field=seed, **measured(seed, arguments.points))
    error, sd, inside = (
        np.array([row[name] for row in rows]) for name in ("error", "sd", "inside")
    )
    found = {
        "fields": arguments.fields,
        "points": arguments.points,
        "inside": mean_and_standard_error(inside),
        "inside of a field": quantiles(inside),
        "error / sd": math.sqrt((error**2).sum() / (sd**2).sum()),
    }
    print(rounded(found))
    save(arguments, found)
