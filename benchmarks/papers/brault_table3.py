"""Brault et al. 2016, Table 3: ORFF and the exact kernel, with and without correlated noise.

    python benchmarks brault_table3 [--runs 10] [--large-runs 3] [--smoke]

The setting is that of Appendix D.2: x is uniform on [−1, 1]²⁰, and y = Φ̃(x)θ has 20 numbers. The
map Φ̃ has 10⁴ random frequencies of the kernel k A, and θ is uniform on [−1, 1]. k is Gaussian, and
its lengthscale is the median distance of 1000 points. A = uuᵀ has rank one and ‖A‖₂ = 1. Noise is
N(0, Σ) with ‖Σ‖₂ = √V[y]. Models with the same kernel learn from N points. `ORFF` has D = 1000
other frequencies, which are 2000 features of a `SeparableKernel` with a root of one column. `OVK`
is exact. Each run has new data and frequencies; there are `large_runs` runs for 10⁵ points.

The paper leaves some details open:

- RMSE is the root mean square error of a number, over 1000 further points and 20 outputs, without
  noise. The RMSE of a vector is √20 times as large and is closer to most numbers of the paper.
  Neither reproduces all of them. The ratios of ORFF and OVK do not depend on this choice.
- ‖Σ‖₂ = √V[y] equates a variance with a standard deviation. Here the formula is used as printed,
  with V[y] the variance over points, averaged over outputs. Σ ∝ W Wᵀ with a normal W (20 × 20).
- The penalty α = Nλ is chosen from `ALPHAS` for every N and method, by the squared error at 1000
  observations of one additional data set.

With A = uuᵀ, Φ = φ ⊗ u and K = k ⊗ uuᵀ. Only uᵀy is therefore learned, as a scalar with the
features φ or the kernel k, and the prediction is f(x)u. There is no grid for 20 inputs, because
Gauss–Hermite quadrature needs at least 2²⁰ nodes. Further columns are `QuasiMonteCarlo` and
`Orthogonal`. The figure is brault_table3.png in the folder of the results.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from gpytorch.kernels import RBFKernel
from helpers.command import Sizes
from helpers.papers import pictures
from helpers.papers.kernels import gaussian
from helpers.results import save
from helpers.rows import Rows
from jaxtyping import Float
from scipy.linalg.blas import dsyrk
from torch import Tensor
from tqdm import tqdm

import gp_orff

DIMS, OUTPUTS, TRUE_FREQUENCIES, HELD_OUT, CHUNK = 20, 20, 10_000, 1000, 5000
NUMBERS, LARGEST_OVK = (100, 1000, 10_000, 100_000), 10_000
ALPHAS = (1e-6, 1e-3, 1e-2, 1e-1, 1.0)
TARGETS = ("without noise", "with noise")
RULES = {
    "ORFF": gp_orff.MonteCarlo,
    "Orthogonal": gp_orff.Orthogonal,
    "QuasiMonteCarlo": gp_orff.QuasiMonteCarlo,
}
PAPER = {  # mean and standard deviation for each of NUMBERS, or the first of them
    ("ORFF", "without noise"): (
        (9.21e-2, 4e-3),
        (5.97e-2, 2e-4),
        (3.56e-2, 5e-4),
        (2.89e-2, 7e-4),
    ),
    ("OVK", "without noise"): ((4.36e-2, 7e-3), (2.13e-2, 8e-4), (1.01e-2, 1e-4)),
    ("ORFF", "with noise"): (
        (1.312e-1, 1e-2),
        (1.085e-1, 2e-2),
        (0.876e-1, 3e-3),
        (0.717e-1, 3e-3),
    ),
    ("OVK", "with noise"): ((1.222e-1, 9e-2), (0.990e-1, 4e-2), (0.825e-1, 2e-3)),
}
STYLES = {
    "ORFF": (pictures.ORANGE, "o"),
    "OVK": (pictures.BLACK, "X"),
    "Orthogonal": (pictures.PINK, "v"),
    "QuasiMonteCarlo": (pictures.GREEN, "^"),
}


@dataclass(frozen=True)
class Data:
    """Points, and uᵀy at these points in two columns, as in `TARGETS`. The first 1000 points are
    held out."""

    x: Float[Tensor, "n 20"]
    targets: Float[Tensor, "n 2"]
    lengthscale: float
    rms: float  # of a number y, without noise
    noise: float  # standard deviation of a number

    @classmethod
    def of(cls, seed: int, points: int) -> "Data":
        generator = torch.Generator().manual_seed(seed)

        def uniform(*shape: int) -> Tensor:
            return 2 * torch.rand(*shape, generator=generator, dtype=torch.float64) - 1

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        x, u = uniform(HELD_OUT + points, DIMS), normal(OUTPUTS, 1)
        u = u / u.norm()
        lengthscale = torch.pdist(x[:HELD_OUT]).median().item()
        kernel = gp_orff.SeparableKernel(rbf(lengthscale), u)
        truth = gp_orff.ORFFKernel(kernel, gp_orff.MonteCarlo(TRUE_FREQUENCIES, seed=seed))
        theta = uniform(truth.num_features, 1)
        y = (truth.feature_operator(x) @ theta).reshape(-1, OUTPUTS)
        root = normal(OUTPUTS, OUTPUTS)
        root *= (y.var(0).mean().sqrt() / torch.linalg.matrix_norm(root @ root.mT, 2)).sqrt()
        noise = normal(len(x), OUTPUTS) @ root.mT  # Σ = root rootᵀ
        targets = torch.cat([y @ u, (y + noise) @ u], dim=-1)
        return cls(x, targets, lengthscale, y.square().mean().sqrt().item(), noise.std().item())

    def some(self, number: int) -> tuple[Float[Tensor, "N 20"], Float[Tensor, "N 2"]]:
        """Return the first N training points."""
        part = slice(HELD_OUT, HELD_OUT + number)
        return self.x[part], self.targets[part]


def rbf(lengthscale: float) -> RBFKernel:
    kernel = gaussian(DIMS)
    kernel.lengthscale = lengthscale
    return kernel


@dataclass(frozen=True)
class Learner:
    """The prediction f = R (M + α)⁻¹ r for targets t.

    It is Φ(z) (ΦᵀΦ + α)⁻¹ Φᵀt with features, and K(z, x) (K + α)⁻¹ t with the exact kernel.
    """

    matrix: Float[Tensor, "m m"]
    right: Float[Tensor, "m 2"]
    rows: Float[Tensor, "n m"]

    @classmethod
    def orff(cls, data: Data, number: int, rule: object) -> "Learner":
        kernel = gp_orff.ORFFKernel(rbf(data.lengthscale), rule)
        upper, right = np.zeros((kernel.num_features,) * 2, order="F"), 0.0
        for x, targets in zip(*(part.split(CHUNK) for part in data.some(number)), strict=True):
            phi = kernel.features(x)
            upper = dsyrk(1.0, phi.numpy().T, 1.0, upper, overwrite_c=True)
            right += phi.mT @ targets
        matrix = torch.from_numpy(np.triu(upper) + np.triu(upper, 1).T)
        return cls(matrix, right, kernel.features(data.x[:HELD_OUT]))

    @classmethod
    def ovk(cls, data: Data, number: int) -> "Learner":
        kernel, (x, targets) = rbf(data.lengthscale), data.some(number)
        rows = kernel(data.x[:HELD_OUT], x).to_dense()
        return cls(kernel(x).to_dense(), targets, rows)

    def predictions(self, alpha: float) -> Float[Tensor, "n 2"]:
        """Return f for both targets."""
        system = self.matrix.clone()
        system.diagonal().add_(alpha)
        return self.rows @ torch.cholesky_solve(self.right, torch.linalg.cholesky(system))


def learners(data: Data, number: int, seed: int, frequencies: int) -> Iterator[tuple[str, Learner]]:
    for name, rule in RULES.items():
        yield name, Learner.orff(data, number, rule(frequencies, seed=1000 + seed))
    if number <= LARGEST_OVK:
        yield "OVK", Learner.ovk(data, number)


def rmse(error: Float[Tensor, "n"]) -> float:
    """Return the RMSE of a value, where `error` is the error along u."""
    return (error.square().mean() / OUTPUTS).sqrt().item()


def chosen(data: Data, numbers: Sequence[int], frequencies: int) -> dict[tuple, float]:
    """Return the α with the smallest error at held-out observations, for each (N, method,
    target)."""
    found = {}
    for number in numbers:
        for name, learner in learners(data, number, 0, frequencies):
            errors = {
                alpha: (learner.predictions(alpha) - data.targets[:HELD_OUT]).square().mean(0)
                for alpha in ALPHAS
            }
            for column, target in enumerate(TARGETS):
                best = min(ALPHAS, key=lambda alpha: errors[alpha][column])
                found[number, name, target] = best
    return found


def errors(
    data: Data, number: int, seed: int, frequencies: int, alphas: dict[tuple, float]
) -> Iterator[tuple[tuple, float]]:
    """Yield the RMSE for each (N, method, target), with the given α."""
    truth = data.targets[:HELD_OUT, 0]
    for name, learner in learners(data, number, seed, frequencies):
        for column, target in enumerate(TARGETS):
            f = learner.predictions(alphas[number, name, target])[:, column]
            yield (number, name, target), rmse(f - truth)


def row(key: tuple, alpha: float, found: Sequence[float]) -> dict:
    number, name, target = key
    values = PAPER.get((name, target), ())
    printed = dict(zip(NUMBERS[: len(values)], values, strict=True))
    mean, sd = printed.get(number, (None, None))
    return {
        "data": target,
        "N": number,
        "method": name,
        "alpha": alpha,
        "runs": len(found),
        "mean": float(np.mean(found)),
        "sd": float(np.std(found, ddof=1)),
        "paper": mean,
        "paper's sd": sd,
    }


def picture(rows):
    figure, [axes] = pictures.panels(1, 2, sharey=True)
    for ax, target in zip(axes, TARGETS, strict=True):
        for name, (colour, marker) in STYLES.items():
            own = [row for row in rows if (row["data"], row["method"]) == (target, name)]
            N, mean, sd, paper = ([row[key] for row in own] for key in ("N", "mean", "sd", "paper"))
            style = {"color": colour, "marker": marker, "ms": 6, "lw": 1.2}
            ax.errorbar(N, mean, sd, label=name, **style)
            if own and own[0]["paper"] is not None:
                hollow = {"mfc": "white", "linestyle": ":", "label": f"{name}, in the paper"}
                ax.plot(N, paper, **style | hollow)
        ax.set(title=target, xlabel="points N", xscale="log", yscale="log")
    axes[0].set_ylabel("RMSE of a number")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    return figure


@torch.no_grad()
def main(words: Sequence[str] | None = None) -> None:
    arguments = Sizes(
        __file__,
        __doc__,
        runs=(10, 2),
        large_runs=(3, 2),
        most=(100_000, 100),
        frequencies=(1000, 100),
    ).parse_args(words)
    numbers = [number for number in NUMBERS if number <= arguments.most]
    alphas = chosen(Data.of(arguments.runs, numbers[-1]), numbers, arguments.frequencies)
    found, sizes = {key: [] for key in alphas}, []
    for seed in tqdm(range(arguments.runs), "runs", leave=False):
        own = [n for n in numbers if n <= LARGEST_OVK or seed < arguments.large_runs]
        data = Data.of(seed, own[-1])
        sizes.append((data.lengthscale, data.rms, data.noise))
        for number in own:
            for key, error in errors(data, number, seed, arguments.frequencies, alphas):
                found[key].append(error)
    rows = Rows()
    for target in TARGETS:
        for key in (key for key in found if key[2] == target):
            rows.add(**row(key, alphas[key], found[key]))
    pictures.save_picture(arguments, picture(rows))
    lengthscale, rms, noise = np.mean(sizes, axis=0).tolist()
    what = {"lengthscale": lengthscale, "rms of y": rms, "noise": noise}
    save(arguments, {"frequencies": arguments.frequencies, **what, "rows": rows})
