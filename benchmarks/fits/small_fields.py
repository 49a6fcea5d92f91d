"""Fields of vortices and sources from 10 to 30 vectors: default settings compared with an exact GP.

    python benchmarks small_fields [DIR] [--fields 20] [--starts 10] [--smoke]

Each generated field has one vortex (a Gaussian stream function) and one source (a Gaussian
potential) of random place, size and strength in a square of 4 × 4. It is observed at 10 to 30
random points without noise. The vector RMSE over a 17 × 17 grid is relative to the root mean square
of the field.

ours     `VectorFieldGP(HelmholtzKernel(num_dims=2)).fit(x, y)`
exact    gpytorch's `ExactGP` with the exact Helmholtz kernel, constant means and one noise. It is
         the fit with the largest evidence of L-BFGS from 10 random starts

With DIR, the public simulations `vortex` and `divmild` of Berlinghieri et al. 2023 are also
measured, from files XY_train_*.csv and so on, in the unit of the data. The table has their
published vector RMSE too.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from helpers.command import Sizes, with_folder
from helpers.fields import quantiles
from helpers.models import VectorGP, one_noise
from helpers.results import rounded, save
from helpers.rows import Rows

import gp_orff

PUBLISHED = {"vortex": 0.244, "divmild": 0.168}


def generated(seed: int):
    rng = np.random.default_rng(seed)
    centres, sizes = rng.uniform(-1.5, 1.5, (2, 2)), rng.uniform(0.6, 1.5, 2)
    strengths = rng.uniform(0.5, 1.5, 2) * rng.choice([-1, 1], 2)
    x = rng.uniform(-2, 2, (int(rng.integers(10, 31)), 2))
    axis = np.linspace(-2, 2, 17)
    xs = np.stack(np.meshgrid(axis, axis), axis=-1).reshape(-1, 2)

    def field(points):
        vectors = 0.0
        for turned, (centre, size, strength) in enumerate(
            zip(centres, sizes, strengths, strict=True)
        ):
            away = (points - centre) / size
            gradient = strength * away * np.exp(-0.5 * (away**2).sum(-1, keepdims=True))
            vectors = vectors + (gradient[:, ::-1] * [1, -1] if turned else gradient)
        return vectors

    return tuple(map(torch.from_numpy, (x, field(x), xs, field(xs))))


def ours(x, y, xs):
    model = gp_orff.VectorFieldGP(gp_orff.HelmholtzKernel(num_dims=2))
    return model.fit(x, y, progress=False).posterior().mean(xs)


def trained(x, y, start: int) -> tuple[VectorGP, float]:
    """Return a trained exact GP, and its log marginal likelihood per value."""
    rng = np.random.default_rng(start)
    kernel, variance = gp_orff.HelmholtzKernel(num_dims=2).double(), y.var().item()
    for part in (kernel.curl_free, kernel.divergence_free):
        lengthscale = float(np.exp(rng.uniform(math.log(0.3), math.log(3.0))))
        part.base_kernel.base_kernel.lengthscale = lengthscale
        part.outputscale = variance * lengthscale**2 * float(rng.uniform(0.1, 1.0))
    noise = variance * float(np.exp(rng.uniform(math.log(1e-4), math.log(0.1))))
    model = VectorGP.with_constants(x, y, kernel, one_noise(2, noise, least=1e-6))
    try:
        model.learn(max_iter=200)
        with torch.no_grad():
            evidence = model.evidence().item()
    except Exception:  # a search that left what can be factorised
        return model, -math.inf
    return model, evidence if math.isfinite(evidence) else -math.inf


def exact(x, y, xs, starts: int):
    model, _ = max((trained(x, y, start) for start in range(starts)), key=lambda own: own[1])
    with torch.no_grad():
        return model.eval()(xs).mean


def vector_rmse(mean, truth) -> float:
    return (mean - truth).square().sum(-1).mean().sqrt().item()


def compared(x, y, xs, truth, starts: int) -> dict[str, float]:
    return {
        "ours": vector_rmse(ours(x, y, xs), truth),
        "exact": vector_rmse(exact(x, y, xs, starts), truth),
    }


def main(words: Sequence[str] | None = None) -> None:
    parser = Sizes(__file__, __doc__, fields=(20, 2), starts=(10, 2))
    arguments = with_folder(parser, "of the public simulations", nargs="?").parse_args(words)
    rows = Rows()
    for seed in range(arguments.fields):
        *data, truth = generated(seed)
        size = truth.square().sum(-1).mean().sqrt().item()
        found = compared(*data, truth, arguments.starts)
        rows.add(field=seed, points=len(data[0]), **{k: v / size for k, v in found.items()})
    errors = {name: [row[name] for row in rows] for name in ("ours", "exact")}
    found = {
        "fields": len(rows),
        "starts": arguments.starts,
        "relative error": {name: quantiles(own) for name, own in errors.items()},
        "ours is better in": sum(row["ours"] < row["exact"] for row in rows),
    }
    print(rounded(found))
    if arguments.folder is not None:
        found["simulations"] = Rows()
        for name, published in PUBLISHED.items():
            data = (
                torch.from_numpy(np.loadtxt(arguments.folder / f"{kind}_{name}.csv", delimiter=","))
                for kind in ("XY_train", "UV_train", "XY_test", "UV_test")
            )
            own = compared(*data, arguments.starts)
            found["simulations"].add(simulation=name, **own, published=published)
    save(arguments, found)
