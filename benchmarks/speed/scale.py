"""From a thousand points to a hundred million: time, memory, error, coverage; other methods.

    python benchmarks scale [--most 1e7] [--others 1 | 0] [--smoke]
    python benchmarks scale --row ours 1e8 2

The fields are draws of the prior, observed with noise of 0.3 of their standard deviation. For two
inputs, the kernel is a Helmholtz kernel over 9 × 9 lengthscales; for three inputs, a curl-free
kernel over 4 × 4 × 4. Every row is a separate process with all cores, and a separate file in
results/scale. `--row` measures one row. From 10⁷ points on, the data are never in memory: they are
generated again, chunk by chunk, in every pass. The columns are

fit          seconds of the whole `VectorFieldGP.fit` with default settings, from data to trained
             model; `making` is the part of these seconds that generates the data
MiB          largest resident size of the process minus the size before `fit`
error, sd    root mean square error of the posterior mean at 2000 held-out points against the true
             field, per component, and root mean posterior variance
inside       fraction of the true components inside 95 % intervals
map          seconds of the first posterior mean and variance at 10⁶ points. It is not measured for
             the exact kernel, where each point costs the square of the number of values
evaluation   seconds of evidence and gradient by all hyperparameters, median; without a pass over
             the data
bare         seconds of one Cholesky factorisation and one inverse, which every evaluation needs, of
             F rows or as many rows as there are numbers; interleaved with the evaluation. Also the
             ratio of both
pass         seconds of the statistics of all data in memory, and of the transforms that every pass
             needs: calls of FINUFFT alone, interleaved. Also the ratio of both

The other methods, in two dimensions and all with the Helmholtz kernel, are

exact        `ExactGP` with the exact kernel, at most 25 iterations of L-BFGS from plausible
             starting values
dense        one evaluation of evidence and gradient with dense matrices in plain torch, after a
             first evaluation
svgp         `ApproximateGP` with the exact kernel, 500 inducing variables (both components at 250
             points of k-means; natural gradients, Adam at 0.05 for the hyperparameters, batches of
             256 points). It stops when the ELBO gains less than 0.002 nats per number in 200 steps

`--row limit 1e8 3` measures the sd of the posterior of the exact kernel for dense points.
"""

import subprocess
from collections.abc import Iterator, Sequence
from statistics import median

import torch
from helpers import others
from helpers.command import RUN, Sizes
from helpers.known_data import EXTENT, Problem, least_sd
from helpers.measure import PeakMemory, interleaved, median_ratio, seconds
from helpers.results import rounded, save
from helpers.unavoidable import factorisation, transforms

import gp_orff

STREAMED = 10**7  # points, from which on data are made anew in every pass


def model_of(dims: int) -> gp_orff.VectorFieldGP:
    if dims == 3:
        return gp_orff.VectorFieldGP(gp_orff.CurlFreeKernel(num_dims=3))
    return gp_orff.VectorFieldGP(gp_orff.HelmholtzKernel(num_dims=2))


def ours(points: int, dims: int, smoke: bool) -> dict[str, object]:
    problem = Problem.of(points, dims)
    streamed = points >= STREAMED
    data = (problem.chunks,) if streamed else problem.in_memory()
    problem.chunks.seconds, model = 0.0, model_of(dims)
    with PeakMemory() as memory:
        fit = seconds(lambda: model.fit(*data, progress=False))
    found = {
        "streamed": streamed,
        "F": model.report.features,
        "fit": fit,
        "making": problem.chunks.seconds,
        "MiB": memory.mib,
    }
    found |= problem.scores(model.posterior())
    if found["F"] is not None:
        found["map"] = mapping(model, dims, 10**3 if smoke else 10**6)
        with gp_orff.settings.num_threads(torch.get_num_threads()):  # as bare work has
            found |= evaluations(model, min(found["F"], points * dims), 3 if smoke else 7)
            found |= {} if streamed else passes(model, *data)
    return found


def mapping(model: gp_orff.VectorFieldGP, dims: int, places: int) -> float:
    posterior, generator = model.posterior(), torch.Generator().manual_seed(2)
    x = EXTENT[dims] * torch.rand(places, dims, generator=generator, dtype=torch.float64)
    return seconds(lambda: (posterior.mean(x), posterior.variance(x)))


def evaluations(model: gp_orff.VectorFieldGP, size: int, rounds: int) -> dict[str, float]:
    def evaluation() -> None:
        model.zero_grad()
        model.log_marginal_likelihood().backward()

    own, bare = interleaved([evaluation, factorisation(size)], rounds)
    return {
        "evaluation": median(own),
        "bare": median(bare),
        "evaluation / bare": median_ratio(own, bare),
    }


def passes(model: gp_orff.VectorFieldGP, x, y) -> dict[str, float]:
    bare = transforms(x, y, model.statistics.phi)
    own, unavoidable = interleaved([lambda: model.statistics_of(x, y), bare], 3)
    return {
        "pass": median(own),
        "transforms": median(unavoidable),
        "pass / transforms": median_ratio(own, unavoidable),
    }


def limit(points: int, dims: int, smoke: bool) -> dict[str, object]:
    return {"sd": least_sd(points, dims, nodes=4 if smoke else 12 if dims == 3 else 40)}


METHODS = {
    "ours": ours,
    "limit": limit,
    "exact": others.exact,
    "dense": others.dense,
    "svgp": others.svgp,
}


def ladder(most: float) -> Iterator[tuple[str, float, int]]:
    for dims in (2, 3):
        points = 1e3
        while points <= (most if dims == 2 else min(most, 1e6)):
            yield "ours", points, dims
            points *= 10


def rows(arguments) -> Iterator[tuple[str, float, int]]:
    """Yield the method, the number of points and the number of inputs of each row."""
    if arguments.smoke:
        yield from [("ours", 2000, 2), ("exact", 50, 2), ("dense", 100, 2), ("svgp", 300, 2)]
        return
    yield from ladder(arguments.most)
    if arguments.others:
        yield from [("exact", points, 2) for points in (1e3, 2e3)]
        yield from [("dense", points, 2) for points in (1e3, 2e3, 4e3)]
        yield "svgp", 1e5, 2


def main(words: Sequence[str] | None = None) -> None:
    parser = Sizes(__file__, __doc__, most=(1e7, 1e3), others=(1, 1))
    parser.add_argument("--row", nargs=3, metavar=("METHOD", "N", "DIMS"), help="this one alone")
    arguments = parser.parse_args(words)
    if arguments.row:
        measured(arguments)
        return
    for method, points, dims in rows(arguments):
        command = [*RUN, "scale", "--row", method, f"{points:g}", str(dims)]
        command += ["--smoke"] if arguments.smoke else []
        command += ["--output", arguments.output] if arguments.output else []
        subprocess.run(command, check=True)


def measured(arguments) -> None:
    method, points, dims = arguments.row[0], float(arguments.row[1]), int(arguments.row[2])
    arguments.command += f" --row {method} {points:g} {dims}"
    found = METHODS[method](int(points), dims, arguments.smoke)
    print(f"{method}, {points:g} points, {dims} inputs: ", end="")
    print(*(f"{name} {value}" for name, value in rounded(found).items()), sep=", ", flush=True)
    row = {"method": method, "points": int(points), "inputs": dims, **found}
    save(arguments, row, f"{method}-{dims}d-{points:.0e}".replace("e+0", "e"))
