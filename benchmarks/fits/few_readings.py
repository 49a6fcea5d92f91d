"""Do 95 % intervals of few readings hold, with hyperparameters as fitted and integrated out?

    python benchmarks few_readings [--fields 60] [--places 60] [--smoke]

Draws of a divergence-free RBF prior of variance one and lengthscale 0.5 on a square of side 2, with
white noise of standard deviation 0.2: from 20 and from 50 vectors at random points, and from 8
tracks of 25 vectors, each of length one with an offset and correlated noise (over a fifth of the
track) of the same size. `VectorFieldGP` learns all hyperparameters; shares of the true components
at random places inside the intervals of `posterior()` and `posterior(marginalize=True)`, with
standard errors over fields; mean sd, and the median of seconds of the second over those of the fit.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from helpers.command import Sizes
from helpers.fields import divergence_free, mean_and_standard_error, scores
from helpers.measure import seconds
from helpers.results import save
from helpers.rows import Rows
from jaxtyping import Float
from torch import Tensor

import gp_orff

SIDE, NOISE, MEMORY = 2.0, 0.2, 0.2
TRACKS, ALONG = 8, 25
LAYOUTS = {"20 vectors": 20, "50 vectors": 50, "8 tracks of 25": TRACKS * ALONG}


class Problem:
    """Readings, and the field at places where there are none."""

    def __init__(self, layout: str, places: int, seed: int):
        self.generator = torch.Generator().manual_seed(seed)
        count, self.options = LAYOUTS[layout], {}
        self.x, self.xs = SIDE * self._uniform(count, 2), SIDE * self._uniform(places, 2)
        noise = self._normal(count, 2)
        if "tracks" in layout:
            self.x, noise = self._along_tracks(), noise + self._of_tracks()
            self.options = {"track": np.repeat(np.arange(TRACKS), ALONG)}
        covariance = divergence_free(0.5)(torch.cat([self.x, self.xs])).to_dense().detach()
        root = torch.linalg.cholesky(covariance + 1e-9 * torch.eye(len(covariance)))
        field = (root @ self._normal(len(covariance))).reshape(-1, 2)
        self.y, self.truth = field[:count] + NOISE * noise, field[count:]

    def _uniform(self, *shape: int) -> Tensor:
        return torch.rand(*shape, generator=self.generator, dtype=torch.float64)

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64)

    def _along_tracks(self) -> Float[Tensor, "N 2"]:
        angle, share = 2 * math.pi * self._uniform(TRACKS, 1), torch.arange(ALONG) / ALONG
        way = torch.stack([angle.cos() * share, angle.sin() * share], dim=-1)
        return (SIDE * self._uniform(TRACKS, 1, 2) + way).flatten(0, 1)

    def _of_tracks(self) -> Float[Tensor, "N 2"]:
        """An offset and an Ornstein–Uhlenbeck process, each of variance one."""
        kept = math.exp(-1 / (MEMORY * ALONG))
        states, steps = [self._normal(TRACKS, 2)], self._normal(ALONG, TRACKS, 2)
        for step in steps[1:]:
            states.append(kept * states[-1] + math.sqrt(1 - kept**2) * step)
        return (torch.stack(states, dim=1) + self._normal(TRACKS, 1, 2)).flatten(0, 1)


def measured(problem: Problem) -> dict[str, float]:
    model = gp_orff.VectorFieldGP(gp_orff.DivergenceFreeKernel(num_dims=2))
    options = {**problem.options, "progress": False}
    with gp_orff.settings.check_calibration(False):
        fit = seconds(lambda: model.fit(problem.x, problem.y, **options))
    found = {}
    for name, marginalize in (("fitted", False), ("integrated", True)):
        fields = []
        spent = seconds(lambda held=fields, how=marginalize: held.append(model.posterior(how)))
        mean, variance = fields[0].mean(problem.xs), fields[0].variance(problem.xs)
        own = scores(mean, variance, problem.truth)
        found |= {name: own["inside"], f"sd, {name}": own["sd"]}
    return {**found, "time over fit": spent / fit}


def main(words: Sequence[str] | None = None) -> None:
    arguments = Sizes(__file__, __doc__, fields=(60, 2), places=(60, 10)).parse_args(words)
    rows = Rows()
    for layout in LAYOUTS:
        problems = (Problem(layout, arguments.places, seed) for seed in range(arguments.fields))
        found = [measured(problem) for problem in problems]
        held = {name: np.array([one[name] for one in found]) for name in found[0]}
        times = float(np.median(held.pop("time over fit")))
        means = {name: float(values.mean()) for name, values in held.items()}
        for name in ("fitted", "integrated"):
            means[f"error, {name}"] = mean_and_standard_error(held[name])["standard_error"]
        rows.add(layout=layout, **means, **{"time over fit": times})
    save(arguments, {"fields": arguments.fields, "rows": rows})
