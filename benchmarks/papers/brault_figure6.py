"""Brault et al. 2016, Figure 6: the variance of the estimator and the bound of Proposition 3.1.

    python benchmarks brault_figure6 [--seeds 400] [--smoke] [--output FOLDER]

Let F = K̃(x, z) − K(x, z) with x − z = δ at one random lag δ of [−1, 1]⁴. The first table has
D‖E F²‖ over seeds against the number of frequencies D. For independent frequencies it equals
b(δ) = ‖E cos²⟨ω, δ⟩ A(ω)² − K₀(δ)²‖₂, which is the next column. The bound (Proposition 3.1, C.1 in
the appendix) is

    b(δ) ≤ ½‖(K₀(2δ) + K₀(0)) E A − 2K₀(δ)²‖₂ + ‖V[A]‖₂,    V[A] = E A² − (E A)².

`printed` is the form of the bound in Section 3.1: ½(1 + k(2δ))‖A‖ + k(δ)² for the decomposable
kernel; ½‖K₀(2δ) − 2K₀(δ)²‖ + d + 1 for the curl-free kernel; and
½‖(d − 1)K₀(2δ) − 2K₀(δ)²‖ + d(4d − 3) for the divergence-free kernel. The last two are in base
measure, where V[A] = 3(d − 1)I. Further columns are the bounded maps of Minh 2016 (trace measure),
orthogonal and quasi-random frequencies, and D‖F²‖ of Grid and Gauss–Hermite quadrature with as many
frequencies. The second table has b and its bounds at tδ with 0 ≤ t ≤ 3.

The proposition is false in general. A counterexample has A = 1 and A = 2 at two equally likely
frequencies with the phases ⟨ω, δ⟩ = π/4 and 2π. The figure is brault_figure6.png in the folder of
the results.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from helpers.command import Sizes
from helpers.papers import pictures
from helpers.papers.kernels import KERNELS, at_lag, cells
from helpers.results import save
from helpers.rows import Rows
from jaxtyping import Float
from torch import Tensor

import gp_orff

DIMS, NUMBERS = 4, (16, 128, 1024)
RULES = (gp_orff.MonteCarlo, gp_orff.Orthogonal, gp_orff.QuasiMonteCarlo)
COLOURS = {"base": pictures.ORANGE, "trace": pictures.BLUE, "": pictures.GREEN}
MARKERS = {
    "MonteCarlo": "o",
    "Orthogonal": "v",
    "QuasiMonteCarlo": "^",
    "GaussHermite": "D",
    "Grid": "s",
}
Lag = Float[Tensor, "d"]
Matrix = Float[Tensor, "p p"]
Mean = Callable[[Lag], Matrix]  # δ → K₀(δ) = E cos⟨ω, δ⟩ A(ω)


def norm(matrix: Matrix) -> float:
    return torch.linalg.matrix_norm(matrix, 2).item()


def fourth_moment(mean: Mean, lag: Lag) -> Matrix:
    """Return E cos⟨ω, δ⟩ ‖ω‖² ωωᵀ = ∇∇ᵀΔ exp(−‖δ‖²/2), the mean of A² for the curl-free kernel."""
    d, square = len(lag), lag @ lag
    matrix = (d + 2 - square) * torch.eye(d).to(lag) - (d + 4 - square) * torch.outer(lag, lag)
    return (-square / 2).exp() * matrix


def other_fourth_moment(mean: Mean, lag: Lag) -> Matrix:
    """Return E cos⟨ω, δ⟩ ‖ω‖² (‖ω‖² I − ωωᵀ), the mean of A² for the divergence-free kernel."""
    moment = fourth_moment(mean, lag)
    return moment.trace() * torch.eye(len(lag)).to(lag) - moment


def constant(mean: Mean, lag: Lag) -> Matrix:
    """Return the mean of A² if A does not depend on ω."""
    return mean(lag) @ mean(0 * lag)


def projection(mean: Mean, lag: Lag) -> Matrix:
    """Return the mean of A² if A = dP with a projection P, as for fields in the trace measure."""
    return len(lag) * mean(lag)


SQUARES = {  # E cos⟨ω, δ⟩ A(ω)² by kernel and measure
    ("decomposable", "trace"): constant,
    ("curl-free", "base"): fourth_moment,
    ("curl-free", "trace"): projection,
    ("divergence-free", "base"): other_fourth_moment,
    ("divergence-free", "trace"): projection,
}


def printed_constant(mean: Mean, lag: Lag) -> float:
    size = norm(mean(0 * lag))
    return (size + norm(mean(2 * lag))) / 2 + (norm(mean(lag)) / size) ** 2


def printed_field(mean: Mean, lag: Lag, trace: float, variance: float) -> float:
    return norm(trace * mean(2 * lag) - 2 * mean(lag) @ mean(lag)) / 2 + variance


PRINTED = {
    ("decomposable", "trace"): printed_constant,
    ("curl-free", "base"): partial(printed_field, trace=1, variance=DIMS + 1),
    ("divergence-free", "base"): partial(
        printed_field, trace=DIMS - 1, variance=DIMS * (4 * DIMS - 3)
    ),
}


def exact(cell: tuple[str, str], mean: Mean, lag: Lag) -> float:
    """Return b(δ), by cos²⟨ω, δ⟩ = (1 + cos⟨ω, 2δ⟩)/2."""
    square = partial(SQUARES[cell], mean)
    return norm((square(0 * lag) + square(2 * lag)) / 2 - mean(lag) @ mean(lag))


def bound(cell: tuple[str, str], mean: Mean, lag: Lag) -> float:
    """Return the right-hand side of Proposition 3.1."""
    at_zero = mean(0 * lag)
    first = (mean(2 * lag) + at_zero) @ at_zero - 2 * mean(lag) @ mean(lag)
    variance = SQUARES[cell](mean, 0 * lag) - at_zero @ at_zero
    return norm(first) / 2 + norm(variance)


def random_rows(cell, kernel, lag, numbers, seeds) -> Iterator[dict]:
    """Yield D‖E F²‖ of random rules, as a mean over seeds with a standard error."""
    mean = at_lag(kernel, lag)
    for rule in RULES:
        for number in numbers:
            rules = (rule(number, measure=cell[1], seed=seed) for seed in range(seeds))
            found = [at_lag(gp_orff.ORFFKernel(kernel, own), lag) for own in rules]
            errors = torch.stack(found) - mean
            values, vectors = torch.linalg.eigh((errors @ errors).mean(0))
            along = number * (errors @ vectors[:, -1]).square().sum(-1)
            yield {
                "kernel": cell[0],
                "measure": cell[1],
                "rule": rule.__name__,
                "D": number,
                "D‖E F²‖": number * values[-1].item(),
                "standard error": along.std().item() / seeds**0.5,
            }


def fixed_rows(name, kernel, lag, numbers) -> Iterator[dict]:
    """Yield D‖F²‖ of grids and quadratures."""
    columns = gp_orff.ORFFKernel(kernel, RULES[0](1)).num_features
    grid = partial(gp_orff.Grid, ((-1.0, 1.0),) * DIMS, lengthscale_range=(1, 1), tolerance=1e-8)
    rules = [grid(max_features=columns * D, diagonal_correction=False) for D in numbers if D > 16]
    rules += [gp_orff.GaussHermite(n) for n in range(2, 12) if n**DIMS <= 2 * numbers[-1]]
    for rule in rules:
        features = gp_orff.ORFFKernel(kernel, rule)
        try:
            error = norm(at_lag(features, lag) - at_lag(kernel, lag))
        except ValueError as refused:
            if "larger nodes_per_dim" not in str(refused):
                raise
            continue
        D = features.frequencies[0].num_frequencies
        what = {"kernel": name, "measure": "", "rule": type(rule).__name__, "D": D}
        yield {**what, "D‖E F²‖": D * error**2, "standard error": None}


def counterexample() -> dict[str, float]:
    """Return b and its bound for A = 1 and A = 2 at two frequencies with ⟨ω, δ⟩ = π/4 and 2π."""
    A, phase = torch.tensor([1.0, 2.0]), torch.tensor([0.25, 2.0]) * torch.pi
    k, k2, k0 = ((A * (m * phase).cos()).mean() for m in (1, 2, 0))
    return {
        "b": ((A * phase.cos()).square().mean() - k**2).item(),
        "bound": (((k2 + k0) * k0 - 2 * k**2).abs() / 2 + A.var(correction=0)).item(),
    }


def picture(rows, curves, lag):
    figure, axes = pictures.panels(2, len(KERNELS))
    for column, name in enumerate(KERNELS):
        upper, lower = axes[0][column], axes[1][column]
        for measure, colour in COLOURS.items():
            own = [r for r in rows if (r["kernel"], r["measure"]) == (name, measure)]
            for rule, marker in MARKERS.items():
                found = [r for r in own if r["rule"] == rule]
                D, value = ([r[key] for r in found] for key in ("D", "D‖E F²‖"))
                errors = [2 * (r["standard error"] or 0) for r in found]
                style = {"color": colour, "marker": marker, "ms": 4, "lw": 1.0}
                upper.errorbar(D, value, errors, **style)
                if rule == "MonteCarlo" and found:
                    lower.errorbar(lag.norm(), value[-1], errors[-1], **style)
            curve = [r for r in curves if (r["kernel"], r["measure"]) == (name, measure)]
            t = [r["t"] * lag.norm() for r in curve]
            for key, line in (("b", "-"), ("bound", "--"), ("printed", ":")):
                values = [r[key] for r in curve if r[key] is not None]
                if values:
                    lower.plot(t, values, line, color=colour, lw=1.4)
                    level = next(r[key] for r in curve if r["t"] == 1)
                    upper.axhline(level, linestyle=line, color=colour, lw=0.8, zorder=1)
        upper.set(title=name, xlabel="frequencies D", xscale="log", yscale="log")
        upper.set_ylim(1e-6, 300)
        lower.set(xlabel="‖δ‖ / lengthscale", yscale="log", ylim=(0.3, 100))
    axes[0][0].set_ylabel("D ‖E F(δ)²‖₂ at one lag")
    axes[1][0].set_ylabel("b(δ) and its bounds")
    line = partial(pictures.plt.Line2D, [], [])
    handles = [
        line(color=colour, lw=2, label=f"{measure} measure" if measure else "quadrature")
        for measure, colour in COLOURS.items()
    ]
    handles += [
        line(color="0.3", linestyle="", marker=marker, ms=5, label=rule)
        for rule, marker in MARKERS.items()
    ]
    handles += [
        line(color="0.3", linestyle=style, label=label)
        for style, label in (
            ("-", "b(δ)"),
            ("--", "Proposition 3.1"),
            (":", "as printed for the kernel"),
        )
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False)
    return figure


@torch.no_grad()
def main(words: Sequence[str] | None = None) -> None:
    arguments = Sizes(__file__, __doc__, seeds=(400, 2), most=(1024, 128)).parse_args(words)
    numbers = [number for number in NUMBERS if number <= arguments.most]
    generator = torch.Generator().manual_seed(0)
    lag = 2 * torch.rand(DIMS, generator=generator, dtype=torch.float64) - 1
    rows, curves = Rows(), Rows()
    for name, measure, kernel in cells(DIMS):
        for row in random_rows((name, measure), kernel, lag, numbers, arguments.seeds):
            rows.add(**row)
        if measure == "trace":
            for row in fixed_rows(name, kernel, lag, numbers):
                rows.add(**row)
    for name, measure, kernel in cells(DIMS):
        cell, mean = (name, measure), partial(at_lag, kernel)
        for t in torch.linspace(0, 3, 25).tolist():
            curves.add(
                kernel=name,
                measure=measure,
                t=t,
                b=exact(cell, mean, t * lag),
                bound=bound(cell, mean, t * lag),
                printed=PRINTED[cell](mean, t * lag) if cell in PRINTED else None,
            )
    example = counterexample()
    print(f"two frequencies: b = {example['b']:.3f}, Proposition 3.1 {example['bound']:.3f}")
    pictures.save_picture(arguments, picture(rows, curves, lag))
    sizes = {"seeds": arguments.seeds, "d": DIMS, "lag": lag.tolist()}
    save(arguments, {**sizes, "counterexample": example, "variances": rows, "bounds": curves})
