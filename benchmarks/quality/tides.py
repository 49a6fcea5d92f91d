"""Tides of a simulated coastal radar: fields of tides, and harmonic analysis of each position.

    python benchmarks tides [--records 20] [--others 4] [--places 500] [--days 30]
                            [--learned 2400] [--smoke]

The data are velocities of `--places` positions in the unit square every hour. They are the sum of
tides, eddies and noise. The tides M2, S2 and K1 have amplitudes of 0.3, 0.12 and 0.1 m/s and
lengthscale 0.5. The eddies have 0.2 m/s, lengthscale 0.15, and decorrelate exponentially in 36
hours. The noise has 0.1 m/s. In tides and eddies, the divergence-free part has 0.7 of the variance.

harmonic analysis  least squares of a constant and the three constituents, for each component of
                   each position separately
tides and eddies   `gp_orff.tides` of a Helmholtz kernel, plus another Helmholtz kernel times a
                   Matérn-1/2 kernel of time; all vectors by the algebra of positions and times
known              the same with the hyperparameters of the simulation
tides              `gp_orff.tides` alone

Hyperparameters are learned from `--learned` random vectors. All models are conditioned on all
vectors; the last two models are run for the first `--others` records only. Errors are the root mean
square errors of the amplitudes of cosine and sine in m/s. Coverage is the fraction of the true
axes, inclinations and phases inside 95 % intervals of `ellipses`. Seconds are processor time.
Results are saved after every record.
"""

import math
import time
import warnings
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from gpytorch.kernels import MaternKernel, RBFKernel
from helpers.command import Sizes
from helpers.fields import curl_free, divergence_free, mean_and_standard_error
from helpers.results import rounded, save
from helpers.rows import Rows
from jaxtyping import Float
from torch import Tensor

import gp_orff
from gp_orff.kernels.lines import TidalKernel
from gp_orff.models.ellipses import TidalEllipses

AMPLITUDES = {"M2": 0.3, "S2": 0.12, "K1": 0.1}  # m/s
EDDIES, HOURS, NOISE, EVERY = 0.2, 36.0, 0.1, 1.0
TIDE, EDDY = 0.5, 0.15  # lengthscales
TURNING = 0.7  # share of the variance
PERIODS = {name: TidalKernel(name).period for name in AMPLITUDES}
QUANTITIES = ("semi_major", "semi_minor", "inclination", "phase")


class Radar(NamedTuple):
    """A simulated record."""

    places: Float[Tensor, "n 2"]
    times: Float[Tensor, "T"]
    y: Float[Tensor, "T n 2"]
    parts: Float[Tensor, "3 2 n 2"]  # of cosine and sine

    @classmethod
    def draw(cls, seed: int, places: int, days: float) -> "Radar":
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        x = torch.rand(places, 2, generator=generator, dtype=torch.float64)
        times = torch.arange(0, 24 * days, EVERY, dtype=torch.float64)
        wide, narrow = (root(in_space(length), x) for length in (TIDE, EDDY))
        parts = torch.stack(
            [
                (size * normal(2, 2 * places) @ wide.mT).unflatten(-1, (places, 2))
                for size in AMPLITUDES.values()
            ]
        )
        decay = torch.linalg.cholesky(torch.exp(-(times[:, None] - times).abs() / HOURS))
        eddies = EDDIES * decay @ normal(len(times), 2 * places) @ narrow.mT
        y = eddies.unflatten(-1, (places, 2)) + NOISE * normal(len(times), places, 2)
        waves = columns(times).unflatten(-1, (3, 2))
        return cls(x, times, y + torch.einsum("tcs,csnp->tnp", waves, parts), parts)

    @property
    def inputs(self) -> Float[Tensor, "T*n 3"]:
        x = self.places.repeat(len(self.times), 1)
        return torch.cat([x, self.times.repeat_interleave(len(self.places))[:, None]], dim=-1)


def columns(times: Float[Tensor, "T"]) -> Float[Tensor, "T 6"]:
    phases = [2 * math.pi * times / period for period in PERIODS.values()]
    return torch.stack([f(phase) for phase in phases for f in (torch.cos, torch.sin)], dim=-1)


def in_space(lengthscale: float):
    """Return a kernel of a field with variance one."""
    turning, straining = divergence_free(lengthscale), curl_free(lengthscale)
    for part, share in ((turning, TURNING), (straining, 1 - TURNING)):
        part.outputscale = share * part.outputscale
    return turning + straining


def root(kernel, x: Float[Tensor, "n 2"]) -> Float[Tensor, "2n 2n"]:
    with torch.no_grad():
        return torch.linalg.cholesky(kernel(x).to_dense() + 1e-9 * torch.eye(2 * len(x)))


def harmonic_analysis(radar: Radar) -> Float[Tensor, "3 2 n 2"]:
    design = torch.cat([columns(radar.times), torch.ones(len(radar.times), 1)], dim=-1)
    found = torch.linalg.lstsq(design.double(), radar.y.flatten(1)).solution[:-1]
    return found.unflatten(0, (3, 2)).unflatten(-1, (-1, 2))


def kernel_of(eddies: bool):
    space = gp_orff.HelmholtzKernel(RBFKernel(), num_dims=2, active_dims=(0, 1))
    kernel = gp_orff.tides(space, list(AMPLITUDES), active_dims=(2,))
    return kernel + space * MaternKernel(nu=0.5, active_dims=(2,)) if eddies else kernel


def learned(
    radar: Radar, eddies: bool, count: int, seed: int
) -> tuple[gp_orff.VectorFieldGP, bool]:
    """Return a fitted model, and whether the fit warns that the field does not vary like tides
    only."""
    x, y = radar.inputs, radar.y.flatten(0, 1)
    some = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))[:count]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = gp_orff.VectorFieldGP(kernel_of(eddies)).fit(x[some], y[some], progress=False)
    return model, any("all kernels of time are periodic" in str(w.message) for w in caught)


def as_simulated() -> gp_orff.VectorFieldGP:
    """Return a model with the hyperparameters of the simulation."""
    model = gp_orff.VectorFieldGP(kernel_of(eddies=True).double())
    sizes = [(TIDE, size) for size in AMPLITUDES.values()] + [(EDDY, EDDIES)]
    for product, (length, size) in zip(model.kernel.kernels, sizes, strict=True):
        for part, share in (("divergence_free", TURNING), ("curl_free", 1 - TURNING)):
            scaled = getattr(product.field_kernel, part)
            scaled.outputscale = share * (size * length) ** 2  # a derivative divides by ℓ²
            for leaf in scaled.modules():
                if isinstance(leaf, RBFKernel):
                    leaf.lengthscale = length
    model.kernel.kernels[-1].scalar_kernel.lengthscale = HOURS
    model.likelihood.noise = NOISE**2
    return model


def parts_of(field: gp_orff.FieldPosterior, places: Tensor) -> Float[Tensor, "3 2 n 2"]:
    """Return the means of the cosine and sine of each tide.

    They change sign after half a period, so differences of two times remove a constant mean.
    """
    found = []
    for number, period in enumerate(PERIODS.values()):
        part = field.part(number)
        at = [
            part.mean(torch.cat([places, torch.full_like(places[:, :1], share * period)], dim=-1))
            for share in (0.0, 0.25, 0.5, 0.75)
        ]
        found.append(torch.stack([0.5 * (at[0] - at[2]), 0.5 * (at[1] - at[3])]))
    return torch.stack(found)


def inside(found: TidalEllipses, truth: TidalEllipses, quantity: str) -> float:
    own, known = getattr(found, quantity), getattr(truth, quantity).mean
    if quantity in ("inclination", "phase"):  # the same axis, from its other end
        known = known + 180 * ((own.mean - known) / 180).round()
    return ((own.low <= known) & (known <= own.high)).double().mean().item()


def conditioned(radar: Radar, model: gp_orff.VectorFieldGP, eddies: bool):
    """Return the posterior given all vectors, and its seconds. With eddies, the number of
    features is returned too."""
    start, options = time.process_time(), {}
    if eddies:
        options["frequencies"] = gp_orff.Grid.for_tides(radar.inputs, model.kernel)
    whole = gp_orff.VectorFieldGP(model.kernel, likelihood=model.likelihood, **options)
    field = whole.condition(radar.inputs, radar.y.flatten(0, 1)).posterior()
    costs = {"conditioning": time.process_time() - start}
    if eddies:
        costs["features"] = whole.state.inference.num_features(whole.kernel)
    return field, costs


def record(seed: int, arguments) -> dict[str, dict[str, float]]:
    radar = Radar.draw(seed, arguments.places, arguments.days)
    truth = [TidalEllipses.of(*part.expand(2, *part.shape).transpose(0, 1)) for part in radar.parts]
    scores = {"harmonic analysis": errors(harmonic_analysis(radar), radar)}
    models = ["tides and eddies", *(["known", "tides"] if seed < arguments.others else [])]
    for name in models:
        start, eddies = time.process_time(), name != "tides"
        if name == "known":
            model = as_simulated()
        else:
            model, warned = learned(radar, eddies, arguments.learned, seed)
        learning = time.process_time() - start
        field, costs = conditioned(radar, model, eddies)
        own = errors(parts_of(field, radar.places), radar) | costs
        if name != "known":
            own |= {"learning": learning, "warned": warned}
        for constituent, known in zip(AMPLITUDES, truth, strict=True):
            found = field.ellipses(constituent, radar.places)
            hits = [inside(found, known, quantity) for quantity in QUANTITIES]
            own[f"inside, {constituent}"] = float(np.mean(hits))
        scores[name] = own
    return scores


def errors(parts: Float[Tensor, "3 2 n 2"], radar: Radar) -> dict[str, float]:
    square = (parts - radar.parts).square().flatten(1).mean(-1)
    return dict(zip(AMPLITUDES, square.sqrt().tolist(), strict=True))


def summary(records: Sequence[Mapping[str, Mapping[str, float]]], name: str) -> dict[str, object]:
    """Return errors over all records, their ratio to the errors of harmonic analysis, coverage
    and costs."""
    records = [scores for scores in records if name in scores]

    def error(model: str, constituent: str) -> float:
        return float(np.sqrt(np.mean([own[model][constituent] ** 2 for own in records])))

    found = {"records": len(records)}
    for constituent in AMPLITUDES:
        found[constituent] = {
            "error": error(name, constituent),
            "ratio": error(name, constituent) / error("harmonic analysis", constituent),
        }
        if name != "harmonic analysis" and len(records) > 1:
            shares = [scores[name][f"inside, {constituent}"] for scores in records]
            found[constituent]["inside"] = mean_and_standard_error(shares)
    for cost in ("features", "conditioning", "learning", "warned"):
        if cost in records[0][name]:
            found[cost] = float(np.mean([scores[name][cost] for scores in records]))
    return found


def main(words: Sequence[str] | None = None) -> None:
    sizes = {"records": (20, 1), "others": (4, 1), "places": (500, 6), "days": (30, 1)}
    sizes["learned"] = (2400, 60)
    arguments = Sizes(__file__, __doc__, **sizes).parse_args(words)
    records, rows = [], Rows()
    for seed in range(arguments.records):
        records.append(record(seed, arguments))
        for name, own in records[-1].items():
            rows.add(record=seed, model=name, **own)
        found = {name: getattr(arguments, name) for name in sizes} | {"records": len(records)}
        found["models"] = {name: summary(records, name) for name in records[0]}
        save(arguments, found)
    print(rounded(found))
