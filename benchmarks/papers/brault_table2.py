"""Brault et al. 2016, Table 2: time of the products with feature maps against D and p.

    python benchmarks brault_table2 [--most 16384] [--points 1000] [--rounds 5] [--smoke]

The products are P = Φ(x), P* = Φ(x)ᵀ and P*P (one after the other) of
`ORFFKernel.feature_operator`. The kernels are the decomposable (rank p), curl-free and
divergence-free kernel of a Gaussian k with d = p inputs and D random frequencies (trace measure).
Times are measured against D with p = 4 and against p with D = 2048, for all of 1000 points at once.
They are also measured at one point, as in the paper, with 8 times as many frequencies, because a
call takes 0.2 ms. Each is the least time of interleaved rounds after a first round, with one
thread. Exponents are slopes of log seconds over log D and log p. The table also has the exponents
of the largest term of the paper's Table 2 with p′ = p.

Here a product costs N·M·(d + p) + F·p, with M = 2D cosines and sines and F = 2Dp, 2D, 2D(p − 1)
features. The second term does not grow with N. At one point it is the Dpp′ of decomposable kernels,
for which the paper has Dp′ + pp′; for divergence-free kernels it is Dp(p − 1), whose exponent is
2.3 from p = 2 to 16. With many points the cosines take most of the time, which hardly depends on p.
P*P has all terms ⟨m_f, m_g⟩ and no D².

`rules` has the products of about 2048 frequencies of `Grid`, `GaussHermite` and random rules, with
p = 2. Quadratures are as fast as random rules, and grids use fast Fourier transforms. The figure is
brault_table2.png in the folder of the results.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
import torch
from gpytorch.kernels import Kernel
from helpers.command import Sizes
from helpers.measure import interleaved
from helpers.papers import pictures
from helpers.papers.kernels import KERNELS
from helpers.results import save
from helpers.rows import Rows

import gp_orff

OUTPUTS, FREQUENCIES = 4, 2048  # where the other one varies
LEAST, MOST_OUTPUTS = 1024, 16
FACTORS = (8, 1)  # of D, at one point and at many
SPACING = 0.25  # of the grid
PAPER = {  # operations for one point, and the exponents of D and of p of the largest term, p′ = p
    "decomposable": {
        "P": ("D + pp′", 1, 0),
        "P*": ("Dp′ + pp′", 1, 1),
        "P*P": ("D² + Dp′²", 2, 0),
    },
    "curl-free": {"P": ("Dp", 1, 1), "P*": ("Dp", 1, 1), "P*P": ("D²p + Dp", 2, 1)},
    "divergence-free": {"P": ("Dp²", 1, 2), "P*": ("Dp²", 1, 2), "P*P": ("D²p + Dp²", 2, 1)},
}
STYLES = {
    "decomposable": (pictures.BLUE, "s"),
    "curl-free": (pictures.RED, "o"),
    "divergence-free": (pictures.GREEN, "^"),
}


def products(kernel: Kernel, rule, points: int, dims: int) -> dict[str, Callable[[], object]]:
    """Return functions that compute P θ, P* y and P* P θ at random points of [−1, 1]^d."""
    generator = torch.Generator().manual_seed(0)
    random = {"generator": generator, "dtype": torch.float64}
    features = gp_orff.ORFFKernel(kernel, rule)
    phi = features.feature_operator(2 * torch.rand(points, dims, **random) - 1)
    theta = torch.randn(phi.shape[-1], 1, **random)
    y = torch.randn(phi.shape[-2], 1, **random)
    return {
        "P": lambda: phi @ theta,
        "P*": lambda: phi.mT @ y,
        "P*P": lambda: phi.mT @ (phi @ theta),
    }


def timed(name: str, rule, points: int, dims: int, rounds: int) -> Iterator[dict]:
    """Yield a row for each product."""
    found = products(KERNELS[name](dims), rule, points, dims)
    times = interleaved(list(found.values()), rounds)
    for product, own in zip(found, times, strict=True):
        taken = min(own) / points
        yield {"kernel": name, "product": product, "points": points, "seconds/point": taken}


def random_rows(name: str, most: int, points: int, rounds: int) -> Iterator[dict]:
    numbers = [2**k for k in range(30) if LEAST <= 2**k <= most]
    outputs = [2**k for k in range(1, 10) if 2**k <= min(MOST_OUTPUTS, most / LEAST * 2)]
    sizes = [("D", D, OUTPUTS) for D in numbers] + [("p", FREQUENCIES, p) for p in outputs]
    for number, factor in zip((1, points), FACTORS, strict=True):
        for against, D, p in sizes:
            for row in timed(name, gp_orff.MonteCarlo(factor * D), number, p, rounds):
                yield {"against": against, "D": factor * D, "p": p, **row}


def other_rows(points: int, rounds: int) -> Iterator[dict]:
    """Yield rows for a grid and a quadrature with about the same number of frequencies, at many
    points."""
    radius = (2 * FREQUENCIES / math.pi) ** 0.5  # of the disc of nodes, in spacings
    rules = [
        gp_orff.MonteCarlo(FREQUENCIES),
        gp_orff.GaussHermite(math.isqrt(2 * FREQUENCIES)),
        gp_orff.Grid(spacing=SPACING, cutoff=SPACING * radius),
    ]
    for rule in rules:
        for name, make in KERNELS.items():
            D = gp_orff.ORFFKernel(make(2), rule).frequencies[0].num_frequencies
            for row in timed(name, rule, points, 2, rounds):
                yield {"rule": type(rule).__name__, "D": D, **row}


def selected(rows: Sequence[dict], what: dict) -> list[dict]:
    return [row for row in rows if all(row[key] == value for key, value in what.items())]


def exponents(rows: Sequence[dict], points: int) -> Iterator[dict]:
    for name in KERNELS:
        for product, (operations, *expected) in PAPER[name].items():
            for against, paper in zip(("D", "p"), expected, strict=True):
                row = {"kernel": name, "product": product, "against": against}
                slopes = {}
                for number in (1, points):
                    own = selected(rows, {**row, "points": number})
                    sizes, taken = ([r[key] for r in own] for key in (against, "seconds/point"))
                    slopes[f"N = {number}"] = np.polyfit(np.log(sizes), np.log(taken), 1)[0].item()
                yield {**row, "paper": paper, **slopes, "operations": operations}


def picture(rows, number):
    figure, axes = pictures.panels(2, 3, sharey="row")
    for row_of_axes, against in zip(axes, ("D", "p"), strict=True):
        for ax, product in zip(row_of_axes, ("P", "P*", "P*P"), strict=True):
            for name, (colour, marker) in STYLES.items():
                for points, kind in zip((1, number), ("--", "-"), strict=True):
                    what = {"kernel": name, "product": product, "against": against}
                    own = selected(rows, {**what, "points": points})
                    sizes, taken = ([r[key] for r in own] for key in (against, "seconds/point"))
                    face = colour if points > 1 else "white"
                    style = {"color": colour, "marker": marker, "mfc": face, "ms": 4, "lw": 1.2}
                    ax.loglog(sizes, [1e6 * value for value in taken], kind, **style)
            title = f"{product} against {against}"
            ax.set(title=title, xlabel="frequencies D" if against == "D" else "outputs p")
            ax.set_xscale("log", base=2)
    for row_of_axes in axes:
        row_of_axes[0].set_ylabel("µs for each point")
    line = partial(pictures.plt.Line2D, [], [])
    handles = [
        line(color=colour, marker=marker, ms=5, lw=1.2, label=name)
        for name, (colour, marker) in STYLES.items()
    ]
    handles += [
        line(color="0.3", marker="o", mfc=face, ms=5, linestyle=kind, label=label)
        for face, kind, label in (
            ("white", "--", "one point, D = 16 384 below"),
            ("0.3", "-", "1000 points, D = 2048 below"),
        )
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False)
    return figure


@torch.no_grad()
def main(words: Sequence[str] | None = None) -> None:
    sizes = {"most": (16384, 2048), "points": (1000, 50), "rounds": (5, 1)}
    arguments = Sizes(__file__, __doc__, **sizes).parse_args(words)
    torch.set_num_threads(1)
    rows, others, slopes = Rows(), Rows(), Rows()
    for name in KERNELS:
        for row in random_rows(name, arguments.most, arguments.points, arguments.rounds):
            rows.add(**row)
    for row in other_rows(arguments.points, arguments.rounds):
        others.add(**row)
    for row in exponents(rows, arguments.points):
        slopes.add(**row)
    pictures.save_picture(arguments, picture(rows, arguments.points))
    kept = {"p": OUTPUTS, "D": FREQUENCIES, "rounds": arguments.rounds}
    save(arguments, {**kept, "exponents": slopes, "times": rows, "rules": others})
