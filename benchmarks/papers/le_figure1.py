"""Le, Sarlós & Smola 2013, Figure 1: the error of the kernel against the number of frequencies.

    python benchmarks le_figure1 [--seeds 10] [--smoke] [--output FOLDER]

The error is the mean of |k̃(x, z) − k(x, z)| for an RBF kernel. x is one of 4000 points that are
uniform in [0, 1]¹⁰, and z is one of the first 250 points. The mean is over all 10⁶ pairs of
different points. Five rules have n frequencies, with a cosine and a sine each. The paper does not
state the lengthscale. Here it is one, for which the median of k is 0.44. The table has means over
seeds, which determine the frequencies; all seeds have the same points. `Fastfood` and
`StructuredOrthogonal` pad the 10 inputs to 16.

The paper states no numbers, only that Fastfood and Random Kitchen Sinks (`MonteCarlo`) are
indistinguishable. The figure is le_figure1.png in the folder of the results.
"""

from collections.abc import Sequence

import numpy as np
import torch
from helpers.command import Sizes
from helpers.papers import pictures
from helpers.papers.kernels import gaussian
from helpers.results import save
from helpers.rows import Rows
from jaxtyping import Float
from torch import Tensor
from tqdm import tqdm

import gp_orff

DIMS, LEAST = 10, 32
RULES = {
    "MonteCarlo": (gp_orff.MonteCarlo, pictures.ORANGE, "o"),
    "Fastfood": (gp_orff.Fastfood, pictures.BLUE, "s"),
    "StructuredOrthogonal": (gp_orff.StructuredOrthogonal, pictures.PINK, "v"),
    "FourierFastfood": (gp_orff.FourierFastfood, pictures.RED, "D"),
    "QuasiMonteCarlo": (gp_orff.QuasiMonteCarlo, pictures.GREEN, "^"),
}


class Pairs:
    """All pairs of a point x and a point z among some of these points, with the kernel."""

    def __init__(self, points: int):
        generator = torch.Generator().manual_seed(0)
        self.x = torch.rand(points, DIMS, generator=generator, dtype=torch.float64)
        self.z = self.x[: max(1, points // 16)]
        self.kernel = gaussian(DIMS)
        self.exact = self.kernel(self.x, self.z).to_dense()

    def error(self, rule) -> float:
        features = gp_orff.ORFFKernel(self.kernel, rule)
        return (self._approximate(features) - self.exact).abs().sum().item() / (
            self.exact.numel() - len(self.z)
        )

    def _approximate(self, features: gp_orff.ORFFKernel) -> Float[Tensor, "N m"]:
        return features.features(self.x) @ features.features(self.z).mT


def picture(rows):
    figure, ((ax,),) = pictures.panels(1, 1)
    figure.set_size_inches(6, 4.2)
    for name, (_, colour, marker) in RULES.items():
        line = [row for row in rows if row["rule"] == name]
        n, error, sd = ([row[key] for row in line] for key in ("n", "error", "sd"))
        ax.errorbar(n, error, sd, color=colour, marker=marker, ms=5, lw=1.2, label=name)
    first = next(row for row in rows if row["rule"] == "MonteCarlo")
    level = [1.3 * first["error"] * (count / n[0]) ** -0.5 for count in n]
    ax.plot(n, level, ":", color="0.3", lw=1, label="slope −1/2")
    ax.set(xlabel="frequencies n", ylabel="mean |k̃(x, z) − k(x, z)|", xscale="log", yscale="log")
    ax.legend(frameon=False)
    return figure


@torch.no_grad()
def main(words: Sequence[str] | None = None) -> None:
    sizes = {"seeds": (10, 2), "points": (4000, 160), "most": (8192, 64)}
    arguments = Sizes(__file__, __doc__, **sizes).parse_args(words)
    numbers = [LEAST * 2**k for k in range(20) if LEAST * 2**k <= arguments.most]
    pairs, rows, ratios = Pairs(arguments.points), Rows(), Rows()
    mean = {}
    for name, (rule, *_) in RULES.items():
        for number in tqdm(numbers, name, leave=False):
            found = [pairs.error(rule(number, seed=seed)) for seed in range(arguments.seeds)]
            mean[name, number] = float(np.mean(found))
            sd = float(np.std(found, ddof=1))
            rows.add(rule=name, n=number, error=mean[name, number], sd=sd)
    for number in numbers:
        level = mean["MonteCarlo", number]
        ratios.add(n=number, **{name: mean[name, number] / level for name in RULES})
    pictures.save_picture(arguments, picture(rows))
    what = {"seeds": arguments.seeds, "points": arguments.points, "d": DIMS}
    save(arguments, {**what, "rows": rows, "over MonteCarlo": ratios})
