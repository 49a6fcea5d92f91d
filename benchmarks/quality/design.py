"""Five more observations at points that `design` or other rules choose, and the time of `design`.

    python benchmarks design [DIR] [--draws 50] [--splits 20] [--candidates 10000] [--smoke]

drifters  a flow drawn from a Helmholtz prior on the unit square, with known hyperparameters, and
          eight drifters with ten velocities each. Five more velocities are observed at points of a
          20 × 20 grid. `design` chooses them for the vorticity of a region. Other rules choose the
          points farthest from all others, or random points, in the square or only in the region.
          The score is the RMSE of the vorticity at 400 points of the region, which is the whole
          square or a quarter of it
stations  with DIR, the wind stations of Texas: the hyperparameters are learned from 40 stations,
          and five more of 70 candidates are chosen. The score is the RMSE of both components at all
          other stations
time      processor seconds to choose five of the candidates after 500 vectors, with random
          features, on a grid and with the exact kernel
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from helpers.command import Sizes, with_folder
from helpers.fields import curl_free, divergence_free, mean_and_standard_error
from helpers.results import rounded, save
from helpers.rows import Rows
from jaxtyping import Float, Int
from torch import Tensor

import gp_orff

SQUARE = ((0.0, 1.0), (0.0, 1.0))
REGIONS = {"the square": SQUARE, "a quarter": ((0.5, 1.0), (0.5, 1.0))}
NOISE = 0.1  # of a flow of sd 1.1
MORE = 5
DRIFTERS, STEPS, STEP = 8, 10, 0.04
PRESENT, OFFERED = 40, 70  # stations
Choice = Int[Tensor, "k"]


def flow():
    turning, straining = divergence_free(0.2), curl_free(0.2)
    straining.outputscale = 0.2 * straining.outputscale
    return turning + straining


def drifting(
    field: Callable[[Float[Tensor, "n 2"]], Float[Tensor, "n 2"]], generator: torch.Generator
) -> Float[Tensor, "N 2"]:
    """Return the positions of drifters while they are in the square."""
    x = torch.rand(DRIFTERS, 2, generator=generator, dtype=torch.float64)
    places = []
    for _ in range(STEPS):
        places.append(x)
        x = x + STEP * field(x)
        x = x[((x > 0) & (x < 1)).all(-1)]
    return torch.cat(places)


def lattice(box: Sequence[tuple[float, float]], count: int = 20) -> Float[Tensor, "count**2 2"]:
    middles = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    return torch.cartesian_prod(*(low + (high - low) * middles for low, high in box))


def farthest(candidates: Float[Tensor, "C 2"], x: Float[Tensor, "N 2"]) -> Choice:
    """Choose candidates one after another. Each is the one that is farthest from all
    observations so far."""
    distance, chosen = torch.cdist(candidates, x).amin(-1), []
    for _ in range(MORE):
        chosen.append(int(distance.argmax()))
        distance = distance.minimum(torch.cdist(candidates, candidates[chosen[-1:]]).squeeze(-1))
    return torch.tensor(chosen)


def rmse(mean: Float[Tensor, "n q"], truth: Float[Tensor, "n q"]) -> float:
    return (mean - truth).square().mean().sqrt().item()


def drifters(draws: int, box: Sequence[tuple[float, float]]) -> Rows:
    rows, candidates, points, curl = Rows(), lattice(SQUARE), lattice(box), gp_orff.Curl()
    low, high = torch.tensor(box, dtype=torch.float64).mT
    inside = ((candidates > low) & (candidates < high)).all(-1).nonzero().squeeze(-1)
    for seed in range(draws):
        generator = torch.Generator().manual_seed(seed)
        truth = gp_orff.sample_prior(flow(), 1, seed=seed, domain=((-0.2, 1.2), (-0.2, 1.2)))
        x = drifting(lambda at, truth=truth: truth(at)[0], generator)
        y = truth(torch.cat([x, candidates]))[0]
        y = y + NOISE * torch.randn(y.shape, generator=generator, dtype=torch.float64)
        y, offers = y.split([len(x), len(candidates)])
        model = gp_orff.VectorFieldGP(flow())
        model.likelihood.noise = NOISE**2
        before = model.condition(x, y).posterior()
        choices = {
            "design": before.design(candidates, MORE, target=curl, region=points).indices,
            "farthest": farthest(candidates, x),
            "random": torch.randperm(len(candidates), generator=generator)[:MORE],
        }
        if len(inside) < len(candidates):
            some = torch.randperm(len(inside), generator=generator)[:MORE]
            choices["farthest, inside"] = inside[farthest(candidates[inside], x)]
            choices["random, inside"] = inside[some]
        known = truth(points, curl)[0]
        errors = {"before": rmse(before.mean(points, curl), known)}
        for how, chosen in choices.items():
            model.condition(torch.cat([x, candidates[chosen]]), torch.cat([y, offers[chosen]]))
            errors[how] = rmse(model.posterior().mean(points, curl), known)
        rows.add(draw=seed, **errors)
    return rows


def stations(folder: Path, splits: int) -> Rows:
    table = np.genfromtxt(folder / "texas-wind.csv", delimiter=",", names=True, encoding="utf-8")
    middle = np.radians(table["latitude"].mean())
    lon, lat = (table[name] - table[name].mean() for name in ("longitude", "latitude"))
    places = torch.from_numpy(111.2 * np.stack([lon * np.cos(middle), lat], -1))  # km
    winds = torch.from_numpy(
        np.stack([table[f"wind_speed_{way}_knots"] for way in ("east", "north")], -1)
    )
    rows = Rows()
    for seed in range(splits):
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(len(places), generator=generator)
        present, offered, others = order.split([PRESENT, OFFERED, len(order) - PRESENT - OFFERED])
        x, y, candidates = places[present], winds[present], places[offered]
        model = gp_orff.VectorFieldGP(gp_orff.HelmholtzKernel(num_dims=2))
        before = model.fit(x, y, progress=False).posterior()
        choices = {
            "design": before.design(candidates, MORE, region=places[others]).indices,
            "farthest": farthest(candidates, x),
            "random": torch.randperm(OFFERED, generator=generator)[:MORE],
        }
        errors = {"before": rmse(before.mean(places[others]), winds[others])}
        for how, chosen in choices.items():
            new = offered[chosen]
            model.condition(torch.cat([x, places[new]]), torch.cat([y, winds[new]]))
            errors[how] = rmse(model.posterior().mean(places[others]), winds[others])
        rows.add(draw=seed, **errors)
    return rows


def summary(rows: Sequence[Mapping[str, float]]) -> dict[str, dict[str, object]]:
    """Return, for each method, the mean RMSE, the mean difference from the RMSE of `design`, and
    how often it is larger."""
    errors = {name: np.array([row[name] for row in rows]) for name in rows[0] if name != "draw"}
    return {
        name: {
            "RMSE": mean_and_standard_error(own),
            "more": mean_and_standard_error(own - errors["design"]),
            "share": float((own > errors["design"]).mean()),
        }
        for name, own in errors.items()
    }


def seconds(candidates: int) -> Iterator[dict[str, object]]:
    """Yield the processor seconds of a design, for each rule of frequencies and each target."""
    generator = torch.Generator().manual_seed(0)
    x, places = (
        torch.rand(count, 2, generator=generator, dtype=torch.float64)
        for count in (500, candidates)
    )
    y = torch.sin(6 * x.flip(-1))
    rules = {
        "random features": gp_orff.QuasiMonteCarlo(250),
        "grid": gp_orff.Grid(domain=SQUARE, tolerance=1e-9, lengthscale_range=(1, 1)),
        "exact kernel": gp_orff.Auto(),
    }
    for name, rule in rules.items():
        model = gp_orff.VectorFieldGP(flow(), frequencies=rule)
        model.likelihood.noise = NOISE**2
        field = model.condition(x, y).posterior()
        for target, symbol in (("field", None), ("vorticity", gp_orff.Curl())):
            field.design(places[:100], MORE, target=symbol)
            began = time.process_time()
            field.design(places, MORE, target=symbol)
            spent = time.process_time() - began
            size = model.report.features  # None for the exact kernel
            yield {"features": name, "F": size, "target": target, "seconds": spent}


def main(words: Sequence[str] | None = None) -> None:
    parser = Sizes(__file__, __doc__, draws=(50, 2), splits=(20, 2), candidates=(10_000, 200))
    arguments = with_folder(parser, "of public data", nargs="?").parse_args(words)
    found = {"time": Rows()} | {
        name: getattr(arguments, name) for name in ("draws", "splits", "candidates")
    }
    for row in seconds(arguments.candidates):
        found["time"].add(**row)
    found["drifters"] = {
        name: summary(drifters(arguments.draws, box)) for name, box in REGIONS.items()
    }
    if arguments.folder is not None:
        found["stations"] = summary(stations(arguments.folder, arguments.splits))
    print(rounded(found))
    save(arguments, found)
