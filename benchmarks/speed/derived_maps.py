"""Maps of divergence and vorticity with standard deviations: seconds of the first evaluation.

    python benchmarks derived_maps [--points 20000] [--places 100000] [--smoke]

A Helmholtz field over 10 × 10 lengthscales is learned from `--points` vectors with noise of 30 %.
The columns are the seconds of mean and variance of both symbols at `--places` points, and the
additional MiB.
"""

from collections.abc import Sequence

import torch
from helpers.command import Sizes
from helpers.fields import curl_free, divergence_free, field_of
from helpers.measure import PeakMemory, seconds
from helpers.results import rounded, save

import gp_orff

SYMBOLS = (gp_orff.Divergence(), gp_orff.Curl())


def main(words: Sequence[str] | None = None) -> None:
    sizes = {"points": (20_000, 2000), "places": (100_000, 1000)}
    arguments = Sizes(__file__, __doc__, **sizes).parse_args(words)
    field = field_of(curl_free(1.0) + divergence_free(1.5), ((0.0, 10.0),) * 2)
    generator = torch.Generator().manual_seed(0)
    shape = arguments.points, 2
    x = 10 * torch.rand(*shape, generator=generator, dtype=torch.float64)
    y = field(x) + 0.3 * torch.randn(*shape, generator=generator, dtype=torch.float64)
    model = gp_orff.VectorFieldGP(gp_orff.HelmholtzKernel(num_dims=2)).fit(x, y, progress=False)
    posterior = model.posterior()
    xs = 10 * torch.rand(arguments.places, 2, generator=generator, dtype=torch.float64)

    def ask() -> None:
        for symbol in SYMBOLS:
            posterior.mean(xs, symbol), posterior.variance(xs, symbol)

    with PeakMemory() as memory:
        taken = seconds(ask)
    found = {"places": len(xs), "F": model.report.features, "seconds": taken, "MiB": memory.mib}
    print(rounded(found))
    save(arguments, found)
