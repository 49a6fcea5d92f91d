"""Brault et al. 2016, Figure 4: the error of a learned curl-free field against D.

    python benchmarks brault_figure4 [--seeds 20] [--points 100] [--most 1000] [--smoke]
        [--output FOLDER]

The data are N = 100 noisy vectors of the field of five Gaussians. The score is the mean squared
error of a component at 2000 other points without noise, divided by the mean square of a component.
In this unit the variance of the noise is 0.01. The table has means over seeds of data and
frequencies, with standard errors. The paper states neither its N nor its noise nor numbers. Its
solid lines are exact kernels here, and its dotted lines `MonteCarlo`. `base` is its unbounded map
of the curl-free kernel, and `trace` is the map of Minh 2016, Theorem 9. The decomposable kernel is
k·I with a Gaussian k, so outputs are independent.

All kernels have variance one. The error of 5 folds of the training points, computed in closed form,
chooses the lengthscale (8 values from 0.3 to 1.5) and the penalty (15 values from 1e-6 to 10). This
is the choice of `GridSearchCV` with `KFold(5)` by squared errors. `RBFSampler` + `Ridge` of
scikit-learn has D components in one row, and therefore the 2D weights of curl-free features, and 2D
components in another row.

`Grid` has at most 2D features on the known box, and `GaussHermite` the largest n² ≤ 2D nodes.
`GaussHermite` raises an error for lags at which its error exceeds 1e-3, and chooses among the other
lengthscales. `curl-free below RBFSampler` has the differences on the same data. The figure is
brault_figure4.png in the folder of the results.
"""

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from gpytorch.kernels import Kernel, RBFKernel
from helpers.command import Sizes
from helpers.fields import curl_free, mean_and_standard_error
from helpers.papers import five_gaussians, pictures
from helpers.papers.five_gaussians import BOX, Sample
from helpers.papers.ridge import Predict, by_features, exact
from helpers.results import save
from helpers.rows import Rows
from jaxtyping import Float
from sklearn.kernel_approximation import RBFSampler
from sklearn.linear_model import Ridge
from sklearn.pipeline import make_pipeline
from torch import Tensor

import gp_orff

NUMBERS, TEST, FOLDS = (10, 30, 100, 300, 1000), 2000, 5
LENGTHSCALES = np.geomspace(0.3, 1.5, 8).tolist()
PENALTIES = torch.logspace(-6, 1, 15, dtype=torch.float64)
COLOURS = {"decomposable": pictures.BLUE, "curl-free": pictures.RED}
STYLES = {  # colour, marker and line of the right panel
    "MonteCarlo, base": (pictures.ORANGE, "o", "--"),
    "MonteCarlo, trace": (pictures.ORANGE, "o", "-"),
    "QuasiMonteCarlo, trace": (pictures.GREEN, "^", "-"),
    "GaussHermite": (pictures.RED, "D", "-"),
    "Grid": (pictures.BLUE, "s", "-"),
}


def decomposable(lengthscale: float) -> RBFKernel:
    kernel = RBFKernel(ard_num_dims=2).double()
    kernel.lengthscale = lengthscale
    return kernel.requires_grad_(False)


KERNELS = {"decomposable": decomposable, "curl-free": curl_free}


@dataclass(frozen=True)
class Exact:
    """Regression with an exact operator-valued kernel, by the Cholesky factor of its matrix."""

    kernel: Callable[[float], Kernel]

    def gram(self, lengthscale: float, x: Float[Tensor, "N 2"]) -> Float[Tensor, "n n"]:
        return self.kernel(lengthscale)(x).to_dense()

    def fit(self, lengthscale: float, penalty: float, sample: Sample) -> Predict:
        return exact(self.kernel(lengthscale), penalty, sample)


@dataclass(frozen=True)
class Features:
    """Regression with operator-valued features, by `ORFFRidge`."""

    kernel: Callable[[float], Kernel]
    rule: object

    def gram(self, lengthscale: float, x: Float[Tensor, "N 2"]) -> Float[Tensor, "n n"]:
        features = gp_orff.ORFFKernel(self.kernel(lengthscale), self.rule)
        features.features(five_gaussians.mesh(2))  # quadratures refuse boxes that are too large
        phi = features.features(x)
        return phi @ phi.mT

    def fit(self, lengthscale: float, penalty: float, sample: Sample) -> Predict:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", gp_orff.GridWarning)  # D = 10 is coarse on purpose
            return by_features(self.kernel(lengthscale), self.rule, penalty, sample)


@dataclass(frozen=True)
class Sampler:
    """Regression of independent outputs by `RBFSampler` and `Ridge` of scikit-learn."""

    components: int
    seed: int

    def features(self, lengthscale: float) -> RBFSampler:
        gamma = 0.5 / lengthscale**2
        return RBFSampler(gamma=gamma, n_components=self.components, random_state=self.seed)

    def gram(self, lengthscale: float, x: Float[Tensor, "N 2"]) -> Float[Tensor, "n n"]:
        phi = torch.from_numpy(self.features(lengthscale).fit_transform(x.numpy()))
        return phi @ phi.mT

    def fit(self, lengthscale: float, penalty: float, sample: Sample) -> Predict:
        model = make_pipeline(self.features(lengthscale), Ridge(penalty, fit_intercept=False))
        model.fit(sample.x.numpy(), sample.y.numpy())
        return lambda x: torch.from_numpy(model.predict(x.numpy()))


def fold_errors(gram: Float[Tensor, "n n"], y: Float[Tensor, "n q"]) -> Float[Tensor, "alphas"]:
    """Return the squared errors of the held-out rows for every penalty, summed over the folds.

    With A = K + αI, the residuals of the held-out rows S are (A⁻¹)_SS⁻¹ (A⁻¹y)_S.
    """
    values, vectors = torch.linalg.eigh(gram)
    inverse = 1 / (values.clamp_min(0) + PENALTIES.unsqueeze(-1))  # (alphas, n)
    by_fold = vectors.unflatten(0, (FOLDS, -1))  # (folds, s, n)
    scaled = by_fold * inverse[:, None, None]
    residuals = torch.linalg.solve(scaled @ by_fold.mT, scaled @ (vectors.mT @ y))
    return residuals.square().sum((1, 2, 3))


def tuned(method, sample: Sample, step: int) -> tuple[float, float] | None:
    """Return the lengthscale and the penalty with the smallest error, among every `step`th
    lengthscale.

    The result is None if the rule refuses all lengthscales.
    """
    errors = {}
    for lengthscale in LENGTHSCALES[::step]:
        try:
            gram = method.gram(lengthscale, sample.x)
        except ValueError as refused:
            if "larger nodes_per_dim" not in str(refused):
                raise
            continue
        least = fold_errors(gram, sample.y.reshape(len(gram), -1)).min(0)
        errors[least.values.item()] = lengthscale, PENALTIES[least.indices].item()
    return errors[min(errors)] if errors else None


def exact_methods() -> Iterator[tuple[dict, Exact]]:
    for name, kernel in KERNELS.items():
        yield {"kernel": name, "rule": "exact", "measure": "", "D": None}, Exact(kernel)


def methods(D: int, seed: int) -> Iterator[tuple[dict, object]]:
    """Yield the methods that are compared at D frequencies. The seed determines the frequencies."""
    independent = {"kernel": "independent", "measure": "", "D": D}
    yield {**independent, "rule": "RBFSampler"}, Sampler(D, seed)
    yield {**independent, "rule": "RBFSampler, 2D"}, Sampler(2 * D, seed)
    for name, kernel in KERNELS.items():
        for measure in ("base", "trace")[name == "decomposable" :]:
            rule = gp_orff.MonteCarlo(D, measure=measure, seed=seed)
            what = {"kernel": name, "measure": measure, "D": D}
            yield {**what, "rule": "MonteCarlo"}, Features(kernel, rule)
        what = {"kernel": name, "measure": "trace", "D": D, "rule": "QuasiMonteCarlo"}
        yield what, Features(kernel, gp_orff.QuasiMonteCarlo(D, seed=seed))
        fixed = {"lengthscale_range": (1, 1), "diagonal_correction": False}
        grid = gp_orff.Grid(BOX, max_features=2 * D, **fixed)
        what = {"kernel": name, "measure": "", "D": D}
        yield {**what, "rule": "Grid"}, Features(kernel, grid)
        hermite = gp_orff.GaussHermite(math.isqrt(2 * D))
        yield {**what, "rule": "GaussHermite"}, Features(kernel, hermite)


def errors_of(
    seed: int, points: int, numbers: Sequence[int], step: int
) -> Iterator[tuple[dict, dict]]:
    """Yield each method, with its error on the data of a seed and with its tuned values."""
    train = Sample.of(five_gaussians.curl_free, points, seed)
    test = Sample.of(five_gaussians.curl_free, TEST, seed + 2**16)
    signal = five_gaussians.mean_square()
    compared = [*exact_methods(), *(pair for D in numbers for pair in methods(D, seed))]
    for what, method in compared:
        chosen = tuned(method, train, step)
        if chosen is not None:
            error = method.fit(*chosen, train)(test.x) - test.truth
            mse = error.square().mean().item() / signal
            lengthscale, penalty = chosen
            yield what, {"mse": mse, "lengthscale": lengthscale, "penalty": penalty}


def summary(what: dict, found: Sequence[dict]) -> dict:
    """Return means and standard errors over seeds."""
    mse = mean_and_standard_error([own["mse"] for own in found])
    typical = {key: float(np.median([own[key] for own in found])) for key in found[0]}
    return {
        **what,
        "MSE": mse["mean"],
        "standard error": mse["standard_error"],
        "median": typical["mse"],
        "ℓ": typical["lengthscale"],
        "α": typical["penalty"],
    }


def differences(found: dict, numbers: Sequence[int]) -> Iterator[dict]:
    """Yield the differences between curl-free random features and `RBFSampler` on the same data."""
    for D in numbers:
        own = [one["mse"] for one in found["curl-free", "MonteCarlo", "trace", D]]
        for rule in ("RBFSampler", "RBFSampler, 2D"):
            other = [one["mse"] for one in found["independent", rule, "", D]]
            below = mean_and_standard_error(np.subtract(other, own).tolist())
            yield {
                "D": D,
                "rule": rule,
                "MSE less": below["mean"],
                "standard error": below["standard_error"],
                "seeds below": sum(a < b for a, b in zip(own, other, strict=True)),
            }


def line(ax, rows, label, **style) -> None:
    D, mse, error = ([row[key] for row in rows] for key in ("D", "MSE", "standard error"))
    ax.errorbar(D, mse, error, label=label, ms=4, lw=1.3, **style)


def picture(rows):
    """Draw the lines of the paper and `RBFSampler`, and all rules of the curl-free kernel."""
    figure, ((left, right),) = pictures.panels(1, 2, sharey=True)

    def of(**what):
        return [row for row in rows if all(row[key] == value for key, value in what.items())]

    for kernel, colour in COLOURS.items():
        (ovk,) = of(kernel=kernel, rule="exact")
        left.axhline(ovk["MSE"], color=colour, lw=1.6, label=f"{kernel} OVK")
        own = of(kernel=kernel, rule="MonteCarlo", measure="trace")
        line(left, own, f"{kernel} ORFF", color=colour, marker="o", linestyle=":")
    for rule, number, face in (("RBFSampler", "D", "white"), ("RBFSampler, 2D", "2D", "0.35")):
        label = f"RBFSampler({number}) + Ridge"
        line(left, of(rule=rule), label, color="0.35", marker="v", mfc=face, linestyle=":")
    right.axhline(ovk["MSE"], color="0.2", lw=1.6, label="OVK")
    for name, (colour, marker, kind) in STYLES.items():
        rule, _, measure = name.partition(", ")
        own = of(kernel="curl-free", rule=rule, measure=measure)
        line(right, own, name, color=colour, marker=marker, linestyle=kind)
    for ax, title in ((left, "Figure 4"), (right, "curl-free kernel, other frequencies")):
        noise = {"color": "0.6", "lw": 0.8, "linestyle": "--", "zorder": 1}
        ax.axhline(five_gaussians.NOISE**2, label="variance of the noise", **noise)
        ax.set(title=title, xlabel="frequencies D", xscale="log", yscale="log")
        ax.legend(frameon=False, fontsize=8)
    left.set_ylabel("mean squared error / mean square of the field")
    return figure


@torch.no_grad()
def main(words: Sequence[str] | None = None) -> None:
    sizes = {"seeds": (20, 2), "points": (100, 40), "most": (1000, 10)}
    arguments = Sizes(__file__, __doc__, **sizes).parse_args(words)
    if arguments.points % FOLDS:
        raise SystemExit(f"--points expects a multiple of {FOLDS}, got {arguments.points}")
    numbers = [number for number in NUMBERS if number <= arguments.most]
    found: dict[tuple, list] = {}
    for seed in range(arguments.seeds):
        step = 4 if arguments.smoke else 1
        for what, one in errors_of(seed, arguments.points, numbers, step):
            key = what["kernel"], what["rule"], what["measure"], what["D"]
            found.setdefault(key, []).append(one)
    rows, lower = Rows(), Rows()
    names = ("kernel", "rule", "measure", "D")
    for key in sorted(found, key=lambda key: (*key[:3], key[3] or 0)):
        if len(found[key]) == arguments.seeds:
            rows.add(**summary(dict(zip(names, key, strict=True)), found[key]))
    for row in differences(found, numbers):
        lower.add(**row)
    pictures.save_picture(arguments, picture(rows))
    kept = {"seeds": arguments.seeds, "points": arguments.points, "test points": TEST}
    save(arguments, {**kept, "errors": rows, "curl-free below RBFSampler": lower})
