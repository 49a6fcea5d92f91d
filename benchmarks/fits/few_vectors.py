"""Coverage of 95 % intervals of the field and of derived quantities, from 8 to 400 vectors.

    python benchmarks few_vectors [--fields 60] [--rows ""] [--workers 1] [--smoke]

The data are draws of planar fields with random hyperparameters, which are uniform in logarithms.
Lengthscales are between 0.15 and 1 of the side of the square. The ratio of the curl-free and the
divergence-free part is between 1/30 and 30; one field in five has no curl-free part. The noise is
between 2 and 30 % of the standard deviation. A constant mean has normal components with the same
standard deviation. 60 % of the points are in two clusters. `VectorFieldGP` learns all
hyperparameters with default settings.

The columns are the fractions of the truth at ten random places inside the intervals of
`posterior()` and of `posterior(marginalize=False)`, with standard errors over fields. They are
measured for the field, its vorticity, its divergence if it is not zero, and differences of the
potential of the curl-free part plus the constant mean. Further columns are effective draws,
Pareto k, and CPU seconds of the fit with its posterior.

`--rows` selects the rows whose names contain this text; all rows by default.
"""

import math
import time
import warnings
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import gpytorch
import numpy as np
import torch
from helpers.command import Sizes
from helpers.fields import mean_and_standard_error
from helpers.results import rounded, save
from helpers.rows import Rows

import gp_orff

PLACES = 10
LAYOUTS = {
    **{f"Helmholtz RBF, {n} vectors": ("helmholtz", "rbf", n, False) for n in (8, 15, 30, 60, 120)},
    "curl-free RBF, 30 vectors": ("curl-free", "rbf", 30, False),
    "curl-free Matern 5/2, 30 vectors": ("curl-free", "matern", 30, False),
    "Helmholtz RBF, 30 vectors, outliers": ("helmholtz", "rbf", 30, True),
    "Helmholtz RBF, 400 vectors": ("helmholtz", "rbf", 400, False),
}
OUTLIERS, FARTHER = 0.1, 10.0  # share, and the factor of their noise


def radial(kind: str, s: np.ndarray) -> tuple[np.ndarray, ...]:
    """Return κ, κ′, κ″, s κ‴ and s² κ⁗ of a kernel κ(s) with s = ‖τ‖²."""
    if kind == "rbf":
        k = np.exp(-0.5 * s)
        return k, -k / 2, k / 4, -s * k / 8, s * s * k / 16
    r = np.sqrt(s)
    root, decay = math.sqrt(5) * r, np.exp(-math.sqrt(5) * r)
    third = -25 * math.sqrt(5) / 24 * r * decay
    fourth = 25 * math.sqrt(5) / 48 * (r + math.sqrt(5) * s) * decay
    return (
        (1 + root + 5 / 3 * s) * decay,
        -5 / 6 * (1 + root) * decay,
        25 / 12 * decay,
        third,
        fourth,
    )


def covariance(kind: str, a: str, x: np.ndarray, b: str, z: np.ndarray, length: float):
    """Return Cov[A g(x), B g(z)] for a potential g ~ GP(0, κ(‖τ/ℓ‖²)) and two linear maps A and
    B.

    A map is "p" for g itself, "1" or "2" for a partial derivative, or "L" for the Laplacian.
    """
    tau = (x[:, None] - z[None]) / length
    k, k1, k2, k3, k4 = radial(kind, (tau**2).sum(-1))
    s = (tau**2).sum(-1)
    orders = {"p": 0, "1": 1, "2": 1, "L": 2}
    sign = -1.0 if b in "12" else 1.0
    scale = sign / length ** (orders[a] + orders[b])
    axes = [int(own) - 1 for own in (a, b) if own in "12"]
    laplacians = (a == "L") + (b == "L")
    if laplacians == 2:
        return scale * (32 * k2 + 64 * k3 + 16 * k4)
    if laplacians == 1:
        if axes:
            return scale * 2 * tau[..., axes[0]] * (8 * k2 + 4 * k3)
        return scale * (4 * k1 + 4 * k2 * s)
    if len(axes) == 2:
        i, j = axes
        return scale * (2 * k1 * (i == j) + 4 * k2 * tau[..., i] * tau[..., j])
    return scale * (2 * k1 * tau[..., axes[0]] if axes else k)


def drawn(kind: str, parts, length: float, size: float, rng) -> list[np.ndarray]:
    """Draw linear maps of one potential jointly. Each component of its gradient has the standard
    deviation `size`."""
    if size == 0:
        return [np.zeros(len(x)) for _, x in parts]
    rows = [[covariance(kind, a, x, b, z, length) for b, z in parts] for a, x in parts]
    matrix = np.block(rows)
    sds = np.sqrt(np.diag(matrix))
    values, vectors = np.linalg.eigh(matrix / np.outer(sds, sds))
    normal = rng.standard_normal(len(sds))
    values = sds * (vectors @ (np.sqrt(np.maximum(values, 0)) * normal))
    values *= size / math.sqrt(-2 * radial(kind, np.zeros(1))[1][0]) * length
    return np.split(values, np.cumsum([len(x) for _, x in parts])[:-1])


def problem(layout: str, seed: int) -> dict[str, np.ndarray]:
    """Return observations, further positions, and the true values there by the name of each
    quantity."""
    family, kind, count, outliers = LAYOUTS[layout]
    rng = np.random.default_rng([seed, count, len(layout)])

    def between(low: float, high: float) -> float:
        return float(np.exp(rng.uniform(math.log(low), math.log(high))))

    x, clustered, centres = rng.random((count, 2)), int(0.6 * count), rng.random((2, 2))
    near = centres[rng.integers(2, size=clustered)] + 0.07 * rng.standard_normal((clustered, 2))
    x[:clustered] = np.clip(near, 0, 1)
    xs = rng.random((PLACES, 2))
    lengths, noise, ratio = (
        (between(0.15, 1), between(0.15, 1)),
        between(0.02, 0.3),
        between(1 / 30, 30),
    )
    sizes = ratio / math.hypot(1, ratio), 1 / math.hypot(1, ratio)
    if rng.random() < 0.2:
        sizes = 0.0, 1.0
    if family == "curl-free":
        sizes = 1.0, 0.0
    constant = rng.standard_normal(2)
    maps = [("1", x), ("2", x), ("1", xs), ("2", xs), ("L", xs), ("p", xs)]
    g1, g2, s1, s2, divergence, potential = drawn(kind, maps, lengths[0], sizes[0], rng)
    h1, h2, t1, t2, vorticity, _ = drawn(kind, maps, lengths[1], sizes[1], rng)
    y = np.stack([g1 - h2, g2 + h1], 1) + constant
    errors = noise * rng.standard_normal(y.shape)
    if outliers:
        errors *= np.where(rng.random((count, 1)) < OUTLIERS, FARTHER, 1.0)
    truth = {"field": np.stack([s1 - t2, s2 + t1], 1) + constant}
    if family == "helmholtz":
        truth["vorticity"] = vorticity
    if sizes[0]:
        truth["divergence"] = divergence
    potential = potential + xs @ constant
    truth["potential"] = potential[1:] - potential[0]
    return {"x": x, "y": y + errors, "xs": xs, "truth": truth}


def kernel_of(family: str, kind: str) -> gpytorch.kernels.Kernel:
    base = gpytorch.kernels.RBFKernel() if kind == "rbf" else gpytorch.kernels.MaternKernel(nu=2.5)
    build = gp_orff.HelmholtzKernel if family == "helmholtz" else gp_orff.CurlFreeKernel
    return build(base, num_dims=2)


def measured(task: tuple[str, int]) -> dict[str, float]:
    """Return the coverage, and mean logarithms of the widths of intervals, for one field."""
    layout, seed = task
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    family, kind, _, outliers = LAYOUTS[layout]
    own = problem(layout, seed)
    x, y, xs = (torch.from_numpy(own[name]) for name in ("x", "y", "xs"))
    likelihood = gp_orff.MultitaskStudentTLikelihood(num_tasks=2) if outliers else None
    model = gp_orff.VectorFieldGP(kernel_of(family, kind), likelihood=likelihood)
    began = time.process_time()
    model.fit(x, y, progress=False)
    field = model.posterior()
    found = {"seconds": time.process_time() - began}
    report = model.report
    found["draws"] = report.effective_draws or math.nan
    found["pareto k"] = math.nan if report.pareto_k is None else report.pareto_k
    symbols = {
        "field": None,
        "vorticity": gp_orff.Curl(),
        "divergence": gp_orff.Divergence(),
        "potential": gp_orff.Potential(reference=xs[0], background=True),
    }
    for how, posterior in (("default", field), ("plug-in", model.posterior(marginalize=False))):
        for name, truth in own["truth"].items():
            places = xs[1:] if name == "potential" else xs
            low, high = posterior.confidence_region(places, symbol=symbols[name])
            values = torch.from_numpy(truth).reshape(low.shape)
            inside = ((low <= values) & (values <= high)).double().mean().item()
            found[f"{how}, {name}"] = inside
            found[f"log width, {how}, {name}"] = (high - low).log().mean().item()
    return found


def main(words: Sequence[str] | None = None) -> None:
    parser = Sizes(__file__, __doc__, fields=(60, 1), workers=(1, 1))
    parser.add_argument("--rows", default="", help="a part of the names of rows to measure")
    arguments = parser.parse_args(words)
    layouts = [name for name in LAYOUTS if arguments.rows in name]
    if arguments.smoke:
        layouts = layouts[:1]
    rows = Rows()
    with ProcessPoolExecutor(arguments.workers, mp_context=get_context("spawn")) as pool:
        run = map if arguments.workers == 1 else pool.map
        for layout in layouts:
            found = list(run(measured, [(layout, seed) for seed in range(arguments.fields)]))
            rows.add(layout=layout, **summary(found))
    save(
        arguments, {"fields": arguments.fields, "rows": rows}, part=arguments.rows.replace(" ", "-")
    )


def summary(found: Sequence[dict[str, float]]) -> dict[str, object]:
    """Return the mean coverage with its standard error, and the medians of all other values."""
    total: dict[str, object] = {}
    for name in dict.fromkeys(name for own in found for name in own):
        values = [own[name] for own in found if name in own]
        if name.split(", ")[0] in ("default", "plug-in"):
            spread = mean_and_standard_error(values) if len(values) > 1 else {"mean": values[0]}
            total[name] = spread
        else:
            total[name] = float(np.nanmedian(values)) if np.isfinite(values).any() else None
    print(rounded(total), flush=True)
    return total
