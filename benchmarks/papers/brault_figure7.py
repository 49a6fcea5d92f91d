"""Brault et al. 2016, Figure 7: a curl-free and a divergence-free field of five Gaussians.

    python benchmarks brault_figure7 [--points 100] [--smoke] [--output FOLDER]

The curl-free field is the gradient of a potential of five Gaussians, positive at [0, 0], [0, 1] and
[0, −1], and negative at [−1, 0] and [1, 0]. The divergence-free field is its rotation by 90°. The
paper shows the data and states no numbers.

Here automatic differentiation computes the largest curl and divergence of each field on the mesh of
the arrows, divided by the largest element of its Jacobian. `ORFFRidge` with the kernel of each
field, lengthscale 0.6 and α = 0.01 learns from noisy vectors at random points. The table has its
mean squared error on the mesh, divided by the mean square of a component. In this unit the variance
of the noise is 0.01. `MonteCarlo` has 200 frequencies, `Grid` a tolerance of 1e-5, and
`GaussHermite` 32 nodes along each axis. The figure is brault_figure7.png in the folder of the
results.
"""

from collections.abc import Sequence

import torch
from helpers import fields
from helpers.command import Sizes
from helpers.papers import pictures
from helpers.papers.five_gaussians import (
    BOX,
    CENTRES,
    FIELDS,
    HALF,
    SIGNS,
    Sample,
    mean_square,
    mesh,
    potential,
)
from helpers.papers.ridge import by_features
from helpers.results import save
from helpers.rows import Rows
from jaxtyping import Float
from torch import Tensor

import gp_orff

SIDE, LENGTHSCALE, ALPHA = 21, 0.6, 0.01
KERNELS = {"curl-free": fields.curl_free, "divergence-free": fields.divergence_free}
RULES = {
    "MonteCarlo": gp_orff.MonteCarlo(200),
    "GaussHermite": gp_orff.GaussHermite(32),
    "Grid": gp_orff.Grid(BOX, lengthscale_range=(1, 1)),
}


def derivatives(field: fields.Field, x: Float[Tensor, "N 2"]) -> dict[str, float]:
    """Return the largest curl and the largest divergence, divided by the largest entry of the
    Jacobian."""
    jacobian = torch.func.vmap(torch.func.jacrev(lambda point: field(point.unsqueeze(0))[0]))(x)
    largest = jacobian.abs().max()
    return {
        "curl": ((jacobian[:, 1, 0] - jacobian[:, 0, 1]).abs().max() / largest).item(),
        "divergence": (jacobian.diagonal(dim1=1, dim2=2).sum(1).abs().max() / largest).item(),
    }


def gradient_error(x: Float[Tensor, "N 2"]) -> float:
    """Return the largest difference between the curl-free field and the gradient of the
    potential, which is computed by automatic differentiation."""
    gradient = torch.func.vmap(torch.func.grad(lambda point: potential(point.unsqueeze(0))[0]))(x)
    return (gradient - FIELDS["curl-free"](x)).abs().max().item()


def learned(name: str, sample: Sample, x: Float[Tensor, "N 2"]) -> dict[str, float]:
    """Return the mean squared error of each rule."""
    found = {}
    for rule, frequencies in RULES.items():
        predict = by_features(KERNELS[name](LENGTHSCALE), frequencies, ALPHA, sample)
        found[rule] = (predict(x) - FIELDS[name](x)).square().mean().item() / mean_square()
    return found


def picture(x: Float[Tensor, "N 2"], samples: dict[str, Sample]):
    figure, (axes,) = pictures.panels(1, 3, sharey=True)
    scalar, *vectors = axes
    fine, levels = mesh(201), torch.linspace(-1.2, 1.2, 13)
    side = round(len(fine) ** 0.5)
    axis = torch.linspace(-HALF, HALF, side)
    values = potential(fine).reshape(side, side).mT
    shown = scalar.contourf(axis, axis, values, levels=levels, cmap="RdBu_r")
    for centre, sign in zip(CENTRES, SIGNS, strict=True):
        scalar.text(*centre, "+" if sign > 0 else "−", ha="center", va="center")
    figure.colorbar(shown, ax=axes, shrink=0.8, label="scalar field", ticks=levels[1::5])
    scalar.set_title("scalar field")
    arrows = {"angles": "xy", "scale": 30, "width": 0.005}
    for ax, (name, field) in zip(vectors, FIELDS.items(), strict=True):
        ax.quiver(*x.T, *field(x).T, color="0.35", label="field", **arrows)
        data = samples[name]
        label = f"{len(data.x)} noisy vectors"
        ax.quiver(*data.x.T, *data.y.T, color=pictures.RED, label=label, **arrows)
        ax.set_title(name)
    for ax in axes:
        ax.set(xlim=(-HALF, HALF), ylim=(-HALF, HALF), aspect="equal")
        ax.set(xticks=range(-2, 3), yticks=range(-2, 3))
        ax.grid(False)
    handles, labels = vectors[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False)
    return figure


def main(words: Sequence[str] | None = None) -> None:
    arguments = Sizes(__file__, __doc__, points=(100, 20)).parse_args(words)
    x, rows = mesh(SIDE), Rows()
    samples = {name: Sample.of(field, arguments.points, 0) for name, field in FIELDS.items()}
    for name, field in FIELDS.items():
        rows.add(field=name, **derivatives(field, x), **learned(name, samples[name], x))
    pictures.save_picture(arguments, picture(x, samples))
    kept = {"points": arguments.points, "mesh": SIDE, "gradient error": gradient_error(x)}
    save(arguments, {**kept, "fields": rows})
