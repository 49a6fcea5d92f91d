"""Fits to counts and signs: 20 000 values in memory, and a million values in chunks.

    python benchmarks likelihood_fits [--points 20000] [--stream 1000000] [--features 500] [--smoke]

The field is a scalar field of variance one and lengthscale 0.1 in the unit square. `fit` learns the
hyperparameters from default starting values. A chunk has at most 100 000 values. Seconds are
processor time with one thread. Errors of the mean over the standard deviation of the field, and the
fraction of the field in 95 % intervals, are measured at 2000 other places. MiB is the additional
peak memory of a fit.
"""

import time
import warnings
from collections.abc import Sequence

import torch
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.likelihoods import BernoulliLikelihood, PoissonLikelihood
from gpytorch.means import ZeroMean
from helpers.command import Sizes
from helpers.fields import field_of, scores
from helpers.measure import PeakMemory
from helpers.results import save
from helpers.rows import Rows

import gp_orff

LIKELIHOODS = {"counts": PoissonLikelihood, "signs": BernoulliLikelihood}
CHUNK, PLACES, LENGTHSCALE = 100_000, 2000, 0.1


def fitted(name: str, points: int, features: int) -> dict[str, float]:
    kernel = ScaleKernel(RBFKernel(ard_num_dims=2)).double()
    kernel.base_kernel.lengthscale, kernel.outputscale = LENGTHSCALE, 1.0
    generator = torch.Generator().manual_seed(0)
    x, xs = (torch.rand(n, 2, generator=generator).double() for n in (points, PLACES))
    field = field_of(kernel, ((0.0, 1.0),) * 2)
    torch.manual_seed(1)
    y = LIKELIHOODS[name]().forward(field(x).flatten()).sample().double()
    rule = gp_orff.Auto(exact_values=0, max_features=features)
    parts = {"likelihood": LIKELIHOODS[name](), "mean": ZeroMean(), "frequencies": rule}
    model = gp_orff.VectorFieldGP(ScaleKernel(RBFKernel()), **parts)
    chunks = list(zip(x.split(CHUNK), y.split(CHUNK), strict=True))
    with PeakMemory() as memory:
        began = time.process_time()
        model.fit(*((x, y) if len(chunks) == 1 else (chunks,)), progress=False)
        seconds = time.process_time() - began
    posterior, truth = model.posterior(), field(xs).reshape(-1, 1)
    own = scores(posterior.mean(xs), posterior.variance(xs), truth)
    return {
        "F": model.report.features,
        "CPU s": seconds,
        "MiB": memory.mib,
        "RMSE": own["error"] / truth.std().item(),
        "inside": own["inside"],
    }


def main(words: Sequence[str] | None = None) -> None:
    sizes = {"points": (20_000, 500), "stream": (1_000_000, 1000), "features": (500, 100)}
    arguments = Sizes(__file__, __doc__, **sizes).parse_args(words)
    warnings.simplefilter("ignore")  # of a small grid
    torch.set_num_threads(1)
    rows = Rows()
    for points in (arguments.points, arguments.stream):
        for name in LIKELIHOODS:
            found = fitted(name, points, arguments.features)
            rows.add(likelihood=name, values=points, **found)
            save(arguments, {"rows": rows})
