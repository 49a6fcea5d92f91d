"""A magnetic field mapped by a robot: all data on a grid, random features, independent outputs.

    python benchmarks magnetometer DIR [--thin 10] [--frequencies 500] [--smoke]

DIR contains the public data of Solin, Kok, Wahlström, Schön & Särkkä 2018 (IEEE T-RO 34(4)), files
invensense-{1..4}-loc.csv (x, y in metres) and -mag.csv (three components). The models learn from
paths 1 to 3 with z = 0 and predict the whole of path 4. Every model has a constant background and
one noise. `VectorFieldGP` with default settings learns from every vector, and from one vector in
`--thin`. `ExactGP` with random features learns from one in `--thin`, with all components divided by
the same number. NLPD and RMSE are per component in the unit of the data. NLML is the negative log
marginal likelihood of the training vectors in nats.
"""

import math
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from gpytorch.kernels import ConstantKernel, Kernel, MultitaskKernel, RBFKernel, ScaleKernel
from helpers.command import Sizes, with_folder
from helpers.fields import nlpd
from helpers.models import VectorGP, one_noise
from helpers.results import save
from helpers.rows import Rows
from jaxtyping import Float
from torch import Tensor

import gp_orff


def read(folder: Path, paths: Sequence[int]) -> tuple[Float[Tensor, "N 3"], Float[Tensor, "N 3"]]:
    def load(kind: str) -> Tensor:
        files = [folder / f"invensense-{path}-{kind}.csv" for path in paths]
        return torch.from_numpy(np.concatenate([np.loadtxt(f, delimiter=",") for f in files]))

    position = load("loc")
    return torch.nn.functional.pad(position, (0, 1)), load("mag")  # z = 0


def background() -> Kernel:
    return MultitaskKernel(ConstantKernel(), num_tasks=3, rank=0)


def independent() -> Kernel:
    potential = RBFKernel()
    potential.lengthscale = 0.5
    return MultitaskKernel(potential, num_tasks=3, rank=0) + background()


def curl_free() -> Kernel:
    potential = RBFKernel()
    potential.lengthscale = 0.5
    field = ScaleKernel(gp_orff.CurlFreeKernel(potential, num_dims=3))
    field.outputscale = 0.25  # the field's variance is outputscale / ℓ²
    return field + background()


def scores(error: Float[Tensor, "n 3"], variance: Float[Tensor, "n 3"]) -> dict[str, float]:
    inside = (error.abs() < 1.96 * variance.sqrt()).double().mean()
    return {
        "RMSE": error.square().mean().sqrt().item(),
        "NLPD": nlpd(error, variance),
        "inside": inside.item(),
    }


def one_pass(x, y, xs, ys) -> dict[str, float]:
    model = gp_orff.VectorFieldGP(ScaleKernel(gp_orff.CurlFreeKernel(RBFKernel(), num_dims=3)))
    start = time.perf_counter()
    model.fit(x, y, progress=False)
    seconds = time.perf_counter() - start
    with torch.no_grad():
        nlml = -model.log_marginal_likelihood().item()
        field = model.posterior()
        found = scores(field.mean(xs) - ys, field.variance(xs) + model.likelihood.noise)
    return {**found, "seconds": seconds, "NLML": nlml}


def by_exact_gp(kernel: Kernel, x, y, xs, ys, iterations: int) -> dict[str, float]:
    scale = y.std()
    model = VectorGP(x, y / scale, kernel, one_noise(3, 0.05))
    start = time.perf_counter()
    model.learn(iterations)
    seconds = time.perf_counter() - start
    with torch.no_grad(), gp_orff.settings.check_features(False):  # it would warn, rightly
        evidence = model.evidence().item()
        prediction = model.likelihood(model.eval()(xs))
        mean, variance = prediction.mean * scale, prediction.variance * scale**2
    nlml = -y.numel() * (evidence - math.log(scale))  # in the units of the data
    return {**scores(mean - ys, variance), "seconds": seconds, "NLML": nlml}


def main(words: Sequence[str] | None = None) -> None:
    sizes = {"thin": (10, 100), "frequencies": (500, 20), "iterations": (40, 3)}
    parser = Sizes(__file__, __doc__, **sizes)
    arguments = with_folder(parser, "of the public data").parse_args(words)
    torch.manual_seed(0)  # gpytorch starts task covariances at random
    (x, y), test = read(arguments.folder, [1, 2, 3]), read(arguments.folder, [4])
    few = x[:: arguments.thin], y[:: arguments.thin]
    rows = Rows()
    for data in [few] if arguments.smoke else [(x, y), few]:
        found = one_pass(*data, *test)
        rows.add(model="VectorFieldGP", kernel="curl-free", points=len(data[0]), **found)
    rule = gp_orff.MonteCarlo(arguments.frequencies, seed=0)
    for name, kernel in {"curl-free": curl_free(), "independent": independent()}.items():
        orff = gp_orff.ORFFKernel(kernel, rule, num_dims=3)
        found = by_exact_gp(orff, *few, *test, arguments.iterations)
        rows.add(model="ExactGP", kernel=name, points=len(few[0]), **found)
    found = {"frequencies": arguments.frequencies, "test": len(test[0]), "rows": rows}
    save(arguments, found)
