"""A learned spectrum compared with the best of RBF, Matérn and RQ kernels.

    python benchmarks learned_spectrum [DIR] [--fields 3] [--folds 5] [--smoke]
    python benchmarks learned_spectrum --many 1e6

There are Helmholtz fields of five kinds on the unit square: potentials with RBF, Matérn 3/2,
Matérn 5/2 and RQ kernels, and a k⁻³ spectrum with waves longer than the square. They are observed
at 20, 200 and 1000 places with a noise of 0.2 standard deviations. The data of the repository are
winds (every fourth place of a few thousand square kilometres) and vectors around a vortex. With
DIR, there are public data too: drifters, winds of Texas, GPS velocities of California, and the
horizontal magnetic field of a hall.

Each set is fitted by `VectorFieldGP(HelmholtzKernel(base))` with five base kernels. The columns are
the negative log predictive density of held-out observations (a fifth at a time; 500 further ones of
simulated fields), the evidence in nats, the fraction of the true field in 95 % intervals,
evaluations, CPU seconds, and the difference between the learned spectrum and the best kernel. The
evidence of a learned spectrum is integrated over its curves. Results are saved after each set.
"""

import time
import warnings
from argparse import Namespace
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from gpytorch.kernels import MaternKernel, RBFKernel, RQKernel
from helpers.command import Sizes, with_folder
from helpers.fields import scores
from helpers.results import ROOT, save
from jaxtyping import Float
from torch import Tensor

import gp_orff
from gp_orff.models.report import integration_over_spectra

BASES = {
    "learned": gp_orff.LearnedSpectrumKernel,
    "RBF": RBFKernel,
    "Matérn 3/2": partial(MaternKernel, nu=1.5),
    "Matérn 5/2": partial(MaternKernel, nu=2.5),
    "RQ": RQKernel,
}
NOISE, HELD_OUT = 0.2, 500
Split = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]
"""x, y; places and readings held out, and the field there if it is known."""


def energy(kind: str, k: Float[np.ndarray, "K"]) -> Float[np.ndarray, "K"]:
    """Return k E(k), the variance per logarithm of the wave number k, up to a constant.

    k is in units of the inverse length. In the plane, a derivative of a potential with the density
    S(k) has E ∝ k³ S.
    """
    if kind == "k⁻³":
        return k**-2
    if kind == "RBF":
        return k**4 * np.exp(-0.5 * k**2)
    if kind == "RQ":  # α = 1/2: k(r) = (1 + r²)^−½
        return k**3 * np.exp(-k)
    nu = {"Matérn 3/2": 1.5, "Matérn 5/2": 2.5}[kind]
    return k**4 * (2 * nu + k**2) ** -(nu + 1)


def simulated(kind: str, points: int, seed: int, waves: int = 3000) -> Split:
    """Return data of a sum of plane waves with random directions and phases, with equal numbers
    of waves in each octave of k.

    If waves were drawn from a steep spectrum, few of them would be short. For a k⁻³ spectrum, only
    one in 3000 would have k above 60, but 10⁵ observations resolve thousands of such waves.
    """
    rng = np.random.default_rng(seed)
    length = np.exp(rng.uniform(np.log(0.1), np.log(0.25)))
    if kind == "k⁻³":  # from an eighth of the lowest mode of the box on
        length, low, high = 1.0, 2 * np.pi / 8, 2 * np.pi * 40
    else:
        low, high = 0.1, 300.0
    k = np.exp(np.log(low) + np.log(high / low) * (np.arange(waves) + rng.random(waves)) / waves)
    amplitude = np.sqrt(energy(kind, k))
    keep = amplitude > 1e-9 * amplitude.max()
    k, amplitude = k[keep] / length, amplitude[keep]
    angle, phase = rng.uniform(0, 2 * np.pi, (2, len(k)))
    along = np.stack([np.cos(angle), np.sin(angle)], -1)
    turned = np.where(rng.random((len(k), 1)) < 0.3, along, along[:, ::-1] * [1, -1])
    x = rng.random((points + HELD_OUT, 2))
    columns = amplitude[:, None] * turned / np.sqrt(0.5 * np.sum(amplitude**2))
    field = np.concatenate(
        [
            np.sin((part @ along.T) * k + phase) @ columns
            for part in np.array_split(x, len(x) // 10000 + 1)
        ]
    )
    y = field + NOISE * rng.standard_normal(field.shape)
    x, y, field = map(torch.from_numpy, (x, y, field))
    return x[:points], y[:points], x[points:], y[points:], field[points:]


def measured_sets(folder: Path | None) -> Iterator[tuple[str, Float[Tensor, "n 2"], Tensor]]:
    tutorials = ROOT / "tutorials" / "data"
    winds = np.loadtxt(tutorials / "winds.csv", delimiter=",", skiprows=1)
    yield "winds", *_split(winds[::4])
    vortex = np.loadtxt(tutorials / "wing_tip_vortex.csv", delimiter=",", skiprows=1)
    yield "vortex", *_split(vortex[np.random.default_rng(0).permutation(len(vortex))[:600]])
    if folder is not None:
        for name in ("full", "sparse"):
            x, y = (
                torch.from_numpy(
                    np.loadtxt(folder / f"{kind}_train_laser{name}.csv", delimiter=",")
                )
                for kind in ("XY", "UV")
            )
            yield f"drifters, {name}", x, y
        texas = np.genfromtxt(folder / "texas-wind.csv", delimiter=",", names=True)
        yield "Texas", *_plane(texas, "wind_speed_east_knots", "wind_speed_north_knots")
        gps = np.genfromtxt(folder / "california-gps.csv", delimiter=",", names=True)
        yield "California", *_plane(gps, "velocity_east", "velocity_north", 1e3)
        for path in (1, 3):
            place, field = (
                np.loadtxt(folder / f"invensense-{path}-{kind}.csv", delimiter=",")
                for kind in ("loc", "mag")
            )
            chosen = np.random.default_rng(path).permutation(len(place))[:500]
            yield f"hall, path {path}", *_split(np.hstack([place, field[:, :2]])[chosen])


def _split(table: Float[np.ndarray, "n k"]) -> tuple[Tensor, Tensor]:
    return torch.from_numpy(table[:, :2].copy()), torch.from_numpy(table[:, 2:4].copy())


def _plane(table: np.ndarray, east: str, north: str, unit: float = 1.0) -> tuple[Tensor, Tensor]:
    """Return positions in km relative to the mean position, and the components east and north."""
    middle = np.radians(table["latitude"].mean())
    lon, lat = (table[n] - table[n].mean() for n in ("longitude", "latitude"))
    x = 111.2 * np.stack([lon * np.cos(middle), lat], -1)
    y = unit * np.stack([table[east], table[north]], -1)
    return torch.from_numpy(x), torch.from_numpy(y)


def splits(x: Tensor, y: Tensor, folds: int) -> Iterator[Split]:
    """Yield training and test data for each fold. Observations at one position are in the same
    fold."""
    places = np.unique(np.round(x.numpy(), 2), axis=0, return_inverse=True)[1].ravel()
    fold = np.random.default_rng(0).integers(5, size=places.max() + 1)[places]
    for number in range(folds):
        out = torch.from_numpy(fold == number)
        yield x[~out], y[~out], x[out], y[out], None


def fitted(base, split: Split) -> dict[str, object]:
    x, y, xs, ys, truth = split
    model = gp_orff.VectorFieldGP(gp_orff.HelmholtzKernel(base(), num_dims=2))
    start = time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        posterior = model.fit(x, y, progress=False).posterior()
        seconds = time.process_time() - start
        mean, variance = posterior.mean(xs), posterior.variance(xs)
    noise = model.likelihood.noise.detach()
    total = variance + noise
    density = 0.5 * ((ys - mean).square() / total + (2 * torch.pi * total).log())
    maximum = model.log_marginal_likelihood().item()
    snapshot = model.state.snapshot(model.mean)
    found = {
        "nlpd": density.mean().item(),
        "nats": maximum + integration_over_spectra(snapshot, model.kernel),
        "nats at the maximum": maximum,
        "inside": scores(mean, total, ys)["inside"],
        "evaluations": sum(stage.evaluations for stage in model.report.stages),
        "CPU s": seconds,
    }
    if truth is not None:
        found["inside, field"] = scores(mean, variance, truth)["inside"]
    return found


def compared(name: str, cases: Sequence[Split]) -> dict[str, object]:
    """Return the means over the cases for each kernel."""
    row: dict[str, object] = {"set": name, "points": len(cases[0][0])}
    for label, base in BASES.items():
        rows = [fitted(base, case) for case in cases]
        row[label] = {key: float(np.mean([own[key] for own in rows])) for key in rows[0]}
    others = [row[label] for label in BASES if label != "learned"]
    row["behind, nlpd"] = row["learned"]["nlpd"] - min(own["nlpd"] for own in others)
    row["behind, nats"] = max(own["nats"] for own in others) - row["learned"]["nats"]
    told = " ".join(f"{label} {row[label]['nlpd']:.3f}" for label in BASES)
    own = row["learned"]
    print(
        f"{name:18} {row['points']:5} nlpd {told}  behind {row['behind, nlpd']:+.3f} nats "
        f"{row['behind, nats']:+.1f} inside {own.get('inside, field', own['inside']):.3f} "
        f"{own['evaluations']:.0f} evaluations {own['CPU s']:.1f} CPU s "
        f"(RBF {row['RBF']['CPU s']:.1f})",
        flush=True,
    )
    return row


def many(points: int) -> dict[str, object]:
    """Return the CPU seconds and the numbers of evaluations of fits to many observations of one
    field."""
    x, y, *_ = simulated("RBF", points, 0)
    row: dict[str, object] = {"points": points}
    for label in ("RBF", "learned"):
        model = gp_orff.VectorFieldGP(gp_orff.HelmholtzKernel(BASES[label](), num_dims=2))
        start = time.process_time()
        model.fit(x, y, progress=False)
        row[f"{label}, CPU s"] = time.process_time() - start
        row[f"{label}, stages"] = [str(stage) for stage in model.report.stages]
        row[f"{label}, nats"] = model.log_marginal_likelihood().item()
        print(f"{points} readings, {label}: {row[f'{label}, CPU s']:.1f} CPU s", flush=True)
    row["ratio"] = row["learned, CPU s"] / row["RBF, CPU s"]
    return row


def sets(arguments: Namespace) -> list[tuple[str, Sequence[Split]]]:
    """Return the data sets by name, small ones first."""
    return sorted(_sets(arguments), key=lambda named: len(named[1][0][0]))


def _sets(arguments: Namespace) -> Iterator[tuple[str, Sequence[Split]]]:
    if not arguments.smoke:
        for name, x, y in measured_sets(arguments.folder):
            yield name, list(splits(x, y, arguments.folds))
    for points in (20, 200, 1000):
        for kind in ("RBF", "Matérn 3/2", "Matérn 5/2", "RQ", "k⁻³"):
            if arguments.least <= points <= arguments.most:
                count = 1 if arguments.smoke else arguments.fields * max(1, 100 // points)
                yield kind, [simulated(kind, points, seed) for seed in range(count)]


def main(words: Sequence[str] | None = None) -> None:
    parser = Sizes(__file__, __doc__, fields=(3, 1), folds=(5, 1), least=(20, 20), most=(1000, 20))
    parser.add_argument("--many", type=float, help="fits of so many readings alone, such as 1e6")
    with_folder(parser, "the folder of public data", nargs="?")
    arguments = parser.parse_args(words)
    if arguments.many:
        save(arguments, many(round(arguments.many)), f"{arguments.many:.0e}")
        return
    rows = []
    for name, cases in sets(arguments):
        rows.append(compared(name, cases))
        behind = [row["behind, nlpd"] for row in rows]
        found = {
            "sets": rows,
            "most behind": max(behind),
            "on average": float(np.mean(behind)),
        }
        save(arguments, found)
