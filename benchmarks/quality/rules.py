"""The posterior of every frequency rule and the exact posterior, at equal numbers of features.

    python benchmarks rules [--points 300] [--seeds 3] [--smoke] [--output FOLDER]

The field is drawn from a curl-free prior, RBF or Matern 5/2, over a box of 20, 8 and 3 lengthscales
in d = 1, 2 and 3. The noise is 3 % of its standard deviation, and all numbers are float64. The
hyperparameters are those of the prior and do not change. `Grid` has lengthscale_range=(1, 1) for
this reason, and the known box. `Grid (default)` has the range and the margin that training and
prediction outside the data need.

The scores at 200 points of the box are the number of features; the relative error of the posterior
mean; the median relative error of the standard deviation; the median ratio of the two standard
deviations; the difference of the log evidence in nats per training point; and the negative log
density of the true field per component (NLPD). They are means over seeds for random rules. For
d = 1, `Orthogonal` is `MonteCarlo`. `GaussHermite` has the largest number of nodes that does not
exceed the number of features. It has no row if it raises an error for the spectrum or the extent.
The figures rules.png, errors of the standard deviation, and rules_nlpd.png are in the folder of the
results.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path

import gpytorch
import matplotlib
import torch
from gpytorch.kernels import MaternKernel, RBFKernel
from helpers.command import Sizes
from helpers.models import VectorGP, by_cholesky, one_noise
from helpers.results import save
from helpers.rows import Rows

import gp_orff

matplotlib.use("agg")
from matplotlib import pyplot as plt

FEATURES = (64, 125, 250, 500, 1000, 2000)
EXTENTS = {1: 20.0, 2: 8.0, 3: 3.0}  # lengthscales
NOISE = 0.03  # of the field's standard deviation
POTENTIALS = {"RBF": RBFKernel, "Matérn 5/2": partial(MaternKernel, nu=2.5)}
COLUMNS = ("F", "mean", "sd", "sd/exact", "evidence", "NLPD")
LEAST_ERROR, LEAST_NATS = 1e-6, 1e-3  # less is drawn as this
RANDOM = (gp_orff.MonteCarlo, gp_orff.Orthogonal, gp_orff.QuasiMonteCarlo)
STYLES = {  # colours of Okabe & Ito, safe for colour-blind readers
    "MonteCarlo": ("#E69F00", "o", "-"),
    "Orthogonal": ("#CC79A7", "v", "-"),
    "QuasiMonteCarlo": ("#009E73", "^", "-"),
    "GaussHermite": ("#D55E00", "D", "-"),
    "Grid": ("#0072B2", "s", "-"),
    "Grid (default)": ("#56B4E9", "s", "--"),
}


@dataclass(frozen=True)
class Problem:
    """Observations y at x of a field with this kernel, and the true field at xs."""

    kernel: gpytorch.kernels.Kernel
    box: tuple[tuple[float, float], ...]
    noise: float
    x: torch.Tensor
    y: torch.Tensor
    xs: torch.Tensor
    truth: torch.Tensor

    @classmethod
    def drawn(cls, potential, num_dims, points):
        extent, generator = EXTENTS[num_dims], torch.Generator().manual_seed(0)
        x = extent * torch.rand(points + 200, num_dims, generator=generator, dtype=torch.float64)
        potential = potential.double()
        potential.lengthscale = 1.0
        kernel = gp_orff.CurlFreeKernel(potential, num_dims=num_dims)
        with torch.no_grad():
            covariance = kernel(x).to_dense()
        variance = covariance.diagonal().mean().item()
        root = torch.linalg.cholesky(covariance + 1e-9 * variance * torch.eye(len(covariance)))
        normal = partial(torch.randn, generator=generator, dtype=torch.float64)
        field = (root @ normal(len(root))).reshape(-1, num_dims)
        noise = NOISE**2 * variance
        y = field[:points] + noise**0.5 * normal(points, num_dims)
        box = ((0.0, extent),) * num_dims
        return cls(kernel, box, noise, x[:points], y, x[points:], field[points:])

    def posterior(self, kernel):
        """Return the mean and standard deviation at xs, and the log evidence in nats per point."""
        likelihood = one_noise(self.y.shape[-1], self.noise, least=1e-8)
        model = VectorGP(self.x, self.y, kernel, likelihood)
        check = gp_orff.settings.check_features(False)  # it would warn, rightly
        with torch.no_grad(), by_cholesky(), check:
            evidence = model.train().evidence() * self.y.shape[-1]
            prediction = model.eval()(self.xs)
            return prediction.mean, prediction.stddev, evidence

    def nlpd(self, mean, sd):
        return -torch.distributions.Normal(mean, sd).log_prob(self.truth).mean().item()


def rules(problem, features, seeds):
    """Return the rules of each name with at most `features` features."""
    num_dims = len(problem.box)
    random = RANDOM if num_dims > 1 else (gp_orff.MonteCarlo, gp_orff.QuasiMonteCarlo)
    found = {rule.__name__: [rule(features // 2, seed=s) for s in range(seeds)] for rule in random}
    nodes = 200  # the most that GaussHermite takes
    while nodes**num_dims - nodes % 2 > features:
        nodes -= 1
    found["GaussHermite"] = [gp_orff.GaussHermite(nodes)]
    fixed = {"domain": problem.box, "lengthscale_range": (1, 1), "tolerance": 1e-8}
    grid = partial(gp_orff.Grid.for_data, problem.x, max_features=features)
    return found | {"Grid": [grid(**fixed)], "Grid (default)": [grid()]}


def compare(problem, exact, features, seeds):
    """Return the values of `COLUMNS` for each rule, averaged over seeds, and the errors that
    rules raised."""
    exact_mean, exact_sd, exact_evidence = exact
    rows, refusals = {}, []
    for name, several in rules(problem, features, seeds).items():
        found = []
        for rule in several:
            try:
                kernel = gp_orff.ORFFKernel(problem.kernel, rule)
                mean, sd, evidence = problem.posterior(kernel)
            except (NotImplementedError, ValueError) as refused:
                if name != "GaussHermite":
                    raise
                refusals.append(str(refused).split("; ")[0])
                continue
            found.append(
                [
                    kernel.num_features,
                    ((mean - exact_mean).norm() / exact_mean.norm()).item(),
                    (sd / exact_sd - 1).abs().median().item(),
                    (sd / exact_sd).median().item(),
                    (evidence - exact_evidence).abs().item(),
                    problem.nlpd(mean, sd),
                ]
            )
        if found:
            averages = torch.tensor(found, dtype=torch.float64).mean(0).tolist()
            rows[name] = dict(zip(COLUMNS, averages, strict=True))
    return rows, refusals


def picture(results, value, label):
    """Draw a value of every rule against F, with one row for each kernel and one column for each
    d.

    Open markers show standard deviations that are too large.
    """
    figure, axes = plt.subplots(
        2, 3, figsize=(10, 6.4), sharex=True, sharey=True, layout="constrained"
    )
    for ax, ((kernel_name, num_dims), rows) in zip(axes.flat, results.items(), strict=True):
        for name, (colour, marker, line) in STYLES.items():
            own = {row[name]["F"]: row[name] for row in rows if name in row}
            if not own:
                continue
            values = [value(row, rows) for row in own.values()]
            faces = [colour if row["sd/exact"] < 1 else "white" for row in own.values()]
            ax.loglog(list(own), values, line, color=colour, lw=1.4, zorder=2)
            ax.scatter(list(own), values, s=26, c=faces, marker=marker, edgecolors=colour, zorder=3)
        ax.set_title(f"{kernel_name}, d = {num_dims}, box of {EXTENTS[num_dims]:g} ℓ", fontsize=10)
        ax.grid(color="0.92", lw=0.6)
        ax.spines[["top", "right"]].set_visible(False)
    for ax in axes[:, 0]:
        ax.set_ylabel(label)
    for ax in axes[-1]:
        ax.set_xlabel("features F")
    handles = [
        plt.Line2D([], [], color=colour, marker=marker, linestyle=line, ms=5, label=name)
        for name, (colour, marker, line) in STYLES.items()
    ]
    for face, what in (("0.3", "sd too small"), ("white", "sd too large")):
        handles.append(
            plt.Line2D([], [], color="0.3", marker="o", mfc=face, ms=5, linestyle="", label=what)
        )
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False)
    return figure


def pictures(results, folder: Path) -> None:
    """Draw all figures. `results` contains the rows by potential and d."""
    figures = {
        "rules.png": (
            lambda row, rows: max(LEAST_ERROR, row["sd"]),
            f"median |sd / exact sd − 1|, ≥ {LEAST_ERROR:.0e}",
        ),
        "rules_nlpd.png": (
            lambda row, rows: max(LEAST_NATS, row["NLPD"] - rows[0]["exact"]["NLPD"]),
            f"NLPD − exact NLPD (nats), ≥ {LEAST_NATS:g}",
        ),
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, (value, label) in figures.items():
        figure = picture(results, value, label)
        figure.savefig(folder / name, dpi=150)
        plt.close(figure)
        print(f"figure: {folder / name}")


def main(words: Sequence[str] | None = None) -> None:
    sizes = {"points": (300, 40), "seeds": (3, 1), "most": (2000, 125)}
    arguments = Sizes(__file__, __doc__, **sizes).parse_args(words)
    rows, refused, results = Rows(), [], {}
    for (potential, make), num_dims in product(POTENTIALS.items(), EXTENTS):
        problem = Problem.drawn(make(), num_dims, arguments.points)
        exact = problem.posterior(problem.kernel)
        density = problem.nlpd(*exact[:2])
        name = {"potential": potential, "d": num_dims}
        rows.add(
            **name, rule="exact", most=None, **dict.fromkeys(COLUMNS, None) | {"NLPD": density}
        )
        own = results[potential, num_dims] = [{"exact": {"NLPD": density}}]
        for features in FEATURES:
            if features > arguments.most:
                break
            found, refusals = compare(problem, exact, features, arguments.seeds)
            own.append(found)
            refused += [{**name, "most": features, "why": why} for why in refusals]
            for rule, columns in found.items():
                rows.add(**name, rule=rule, most=features, **columns)
    for refusal in refused:
        print(*refusal.values(), sep=", ")
    if arguments.output is not None:
        pictures(results, arguments.output)
    sizes = {"points": arguments.points, "seeds": arguments.seeds, "lengthscales": EXTENTS}
    save(arguments, {**sizes, "noise": NOISE, "rows": rows, "refused": refused})
