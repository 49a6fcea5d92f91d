"""From a thousand points to a hundred million: seconds, memory, error, coverage.

    python benchmarks/scale.py [--most 1e8] [--only 2 | 3] [--others]

Known fields, draws of the prior, read with noise of 0.3 of their standard deviation: two inputs, a
Helmholtz kernel over 9 × 9 lengthscales; three inputs, a curl-free kernel over 4 × 4 × 4. Every row
is a process of its own with all cores, `VectorFieldGP.fit` with default settings from data to
trained model. From 10⁷ points on (`--streamed`) the data are never in memory: they are made anew,
chunk by chunk, in every pass. Columns:

fit          seconds of the whole `fit`, of which `making` were spent on making the data
memory       largest resident size of the process above that before the data came, MiB
F            features of the posterior
RMSE, sd     root mean square error of the posterior mean at 2000 held-out points against the true
             field, per component, and root mean posterior variance
inside       share of the true components within 95 % intervals

The others, in two dimensions, all with the Helmholtz kernel:

exact        `ExactGP` with the exact kernel, L-BFGS from the same starting values
dense        one evaluation of evidence and gradient, dense matrices in plain torch
SVGP         `ApproximateGP` with the exact kernel, 500 inducing variables (both components at 250
             points, placed by k-means; natural gradients, Adam at 0.05 for the hyperparameters,
             batches of 256 points) until its ELBO settles: no gain above 0.002 nats per number in
             200 steps
"""

import argparse
import json
import math
import subprocess
import sys
import time
import warnings

import gpytorch
import numpy as np
import torch
from gpytorch.kernels import Kernel
from helpers import curl_free, divergence_free, field_of, peak_mib, resident_mib, scores
from tqdm import tqdm

import gp_orff

NOISE = 0.3
EXTENT = {2: 9.0, 3: 4.0}
CHUNK = 2**18


def true_kernel(dims):
    if dims == 3:
        return curl_free(1.0, 3)
    weak = curl_free(1.0)
    weak.outputscale = 0.25 * weak.outputscale
    return weak + divergence_free(1.5)


def kernel_of(dims):
    if dims == 3:
        return gp_orff.CurlFreeKernel(num_dims=3)
    return gp_orff.HelmholtzKernel(num_dims=2)


class Observations:
    """Chunks of readings, made anew whenever they are gone through."""

    def __init__(self, field, points, dims):
        self.field, self.points, self.dims = field, points, dims
        self.seconds = 0.0

    def __iter__(self):
        for start in range(0, self.points, CHUNK):
            began = time.perf_counter()
            generator = torch.Generator().manual_seed(1 + start)
            shape = (min(CHUNK, self.points - start), self.dims)
            x = EXTENT[self.dims] * torch.rand(*shape, generator=generator, dtype=torch.float64)
            noise = NOISE * torch.randn(*shape, generator=generator, dtype=torch.float64)
            y = self.field(x) + noise
            self.seconds += time.perf_counter() - began
            yield x, y


def problem(points, dims):
    box = ((0.0, EXTENT[dims]),) * dims
    field = field_of(true_kernel(dims), box)
    generator = torch.Generator().manual_seed(0)
    xs = EXTENT[dims] * torch.rand(2000, dims, generator=generator, dtype=torch.float64)
    return Observations(field, points, dims), xs, field(xs)


def in_memory(readings):
    return tuple(map(torch.cat, zip(*readings, strict=True)))


def ours(points, dims, streamed):
    readings, xs, truth = problem(points, dims)
    data = (readings,) if streamed else in_memory(readings)
    readings.seconds, before = 0.0, resident_mib()
    start = time.perf_counter()
    model = gp_orff.VectorFieldGP(kernel_of(dims)).fit(*data, progress=False)
    seconds = time.perf_counter() - start
    peak = peak_mib() - before
    field = model.posterior()
    found = scores(field.mean(xs), field.variance(xs), truth)
    features = [line for line in model.report.splitlines() if line.startswith("F = ")]
    features = int(features[0].split()[2]) if features else 0
    return row(seconds, readings.seconds, peak, features, *found)


def row(seconds, making, peak, features, rmse, sd, inside):
    names = ("fit", "making", "memory", "F", "RMSE", "sd", "inside")
    return dict(zip(names, (seconds, making, peak, features, rmse, sd, inside), strict=True))


class ExactModel(gpytorch.models.ExactGP):
    def __init__(self, x, y, likelihood, kernel):
        super().__init__(x, y, likelihood)
        self.covar_module = kernel

    def forward(self, x):
        mean = torch.zeros(len(x), 2, dtype=x.dtype)
        return gpytorch.distributions.MultitaskMultivariateNormal(mean, self.covar_module(x))


def start_kernel():
    """Starting values a user might choose: a fifth of the extent, the variance of the data."""
    kernel = gp_orff.HelmholtzKernel(num_dims=2).double()
    for part in (kernel.curl_free, kernel.divergence_free):
        part.base_kernel.base_kernel.lengthscale = EXTENT[2] / 5
        part.outputscale = 0.5 * (EXTENT[2] / 5) ** 2
    return kernel


def exact(points, dims, streamed):
    readings, xs, truth = problem(points, dims)
    x, y = in_memory(readings)
    before = resident_mib()
    likelihood = gpytorch.likelihoods.MultitaskGaussianLikelihood(2, has_task_noise=False).double()
    likelihood.noise = 0.1
    model = ExactModel(x, y, likelihood, start_kernel())
    mll = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=25, line_search_fn="strong_wolfe")
    start = time.perf_counter()

    def closure():
        optimizer.zero_grad()
        loss = -mll(model(x), y)
        loss.backward()
        return loss

    with gpytorch.settings.max_cholesky_size(10**6):
        optimizer.step(closure)
        seconds = time.perf_counter() - start
        model.eval()
        with torch.no_grad():
            posterior = model(xs)
            found = scores(posterior.mean, posterior.variance, truth)
    return row(seconds, 0.0, peak_mib() - before, 0, *found)


def dense(points, dims, streamed):
    """Seconds of one evaluation with its gradient; five parameters in logarithms."""
    readings, _, _ = problem(points, dims)
    x, y = in_memory(readings)
    before = resident_mib()
    difference = x.mT.unsqueeze(-1) - x.mT.unsqueeze(-2)  # (2, N, N)
    logs = torch.tensor([0.0, 0.4, -1.4, 0.0, -2.4], dtype=torch.float64, requires_grad=True)

    def evaluate():
        first, second, weak, strong, noise = logs.exp()
        u, v = difference / first, difference / second
        k, m = torch.exp(-0.5 * u.square().sum(0)), torch.exp(-0.5 * v.square().sum(0))
        blocks = [
            [
                weak * k * ((i == j) * 1.0 - u[i] * u[j])
                + strong * m * ((i == j) * (1 - v.square().sum(0)) + v[i] * v[j])
                for j in range(2)
            ]
            for i in range(2)
        ]
        covariance = torch.cat([torch.cat(own, dim=1) for own in blocks])
        factor = torch.linalg.cholesky(covariance + noise * torch.eye(2 * points))
        half = torch.linalg.solve_triangular(factor, y.mT.reshape(-1, 1), upper=False)
        evidence = -0.5 * half.square().sum() - factor.diagonal().log().sum()
        evidence.backward()

    start = time.perf_counter()
    evaluate()
    return row(time.perf_counter() - start, 0.0, peak_mib() - before, 0, *(3 * [math.nan]))


class BothComponents(Kernel):
    """A vector kernel on rows (x, 0), (x, 1), … of components, as inducing variables need it."""

    def __init__(self, kernel):
        super().__init__()
        self.kernel = kernel

    def forward(self, x1, x2, diag=False, **params):
        return self.kernel(x1[..., ::2, :2], x2[..., ::2, :2], diag=diag, **params)


class SparseModel(gpytorch.models.ApproximateGP):
    def __init__(self, places, kernel):
        inducing = both(places)
        distribution = gpytorch.variational.NaturalVariationalDistribution(len(inducing))
        strategy = gpytorch.variational.VariationalStrategy(
            self, inducing, distribution, learn_inducing_locations=False, jitter_val=1e-6
        )
        super().__init__(strategy)
        self.covar_module = BothComponents(kernel)

    def forward(self, x):
        mean = torch.zeros(len(x), dtype=x.dtype)
        return gpytorch.distributions.MultivariateNormal(mean, self.covar_module(x))


def both(x):
    component = torch.arange(2, dtype=x.dtype).repeat(len(x)).unsqueeze(-1)
    return torch.cat([x.repeat_interleave(2, dim=0), component], dim=-1)


def svgp(points, dims, streamed):
    from scipy.cluster.vq import kmeans2

    readings, xs, truth = problem(points, dims)
    x, y = in_memory(readings)
    before = resident_mib()
    torch.manual_seed(0)
    start = time.perf_counter()
    places, _ = kmeans2(x[:20_000].numpy(), 250, minit="++", seed=0)
    kernel = start_kernel()
    model = SparseModel(torch.from_numpy(places), kernel).double()
    likelihood = gpytorch.likelihoods.GaussianLikelihood().double()
    likelihood.noise = 0.1
    elbo = gpytorch.mlls.VariationalELBO(likelihood, model, num_data=2 * points)
    natural = gpytorch.optim.NGD(model.variational_parameters(), num_data=2 * points, lr=0.1)
    adam = torch.optim.Adam([*model.hyperparameters(), *likelihood.parameters()], lr=0.05)
    history, bar = [], tqdm(desc="SVGP", unit=" steps", mininterval=5)
    while True:
        rows = torch.randint(points, (256,))
        natural.zero_grad(), adam.zero_grad()
        loss = -elbo(model(both(x[rows])), y[rows].reshape(-1))
        loss.backward()
        natural.step(), adam.step()
        history.append(-loss.item())
        bar.set_postfix({"ELBO": f"{history[-1]:.4f}"}), bar.update()
        recent, before_that = history[-200:], history[-400:-200]
        if len(history) % 200 == 0 and np.mean(recent) - np.mean(before_that or [-9]) < 2e-3:
            break
    seconds = time.perf_counter() - start
    peak = peak_mib() - before
    model.eval()
    with torch.no_grad():
        posterior = model(both(xs))
        mean, variance = (t.view(-1, 2) for t in (posterior.mean, posterior.variance))
    return row(seconds, 0.0, peak, len(history), *scores(mean, variance, truth))


METHODS = {"ours": ours, "exact": exact, "dense": dense, "svgp": svgp}


def measured(method, points, dims, streamed=False):
    command = [sys.executable, __file__, "--one", method, str(int(points)), str(dims)]
    command += ["--streamed"] if streamed else []
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return json.loads(out.splitlines()[-1])


def show(name, points, found, last=""):
    print(
        f"{name:<16}{points:>12,}{found['fit']:>9.1f}{found['making']:>9.1f}{found['memory']:>8.0f}"
        f"{found['F']:>6}{found['RMSE']:>9.5f}{found['sd']:>9.5f}{found['inside']:>8.3f}{last}",
        flush=True,
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--most", type=float, default=1e8)
    parser.add_argument("--only", type=int, choices=(2, 3))
    parser.add_argument("--others", action="store_true", help="the others alone")
    parser.add_argument("--one", nargs=3, metavar=("METHOD", "N", "DIMS"), help="a row, as JSON")
    parser.add_argument("--streamed", action="store_true", help="with --one: not in memory")
    arguments = parser.parse_args()
    if arguments.one:
        method, points, dims = arguments.one
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of gpytorch, about jitter
            print(json.dumps(METHODS[method](int(points), int(dims), arguments.streamed)))
        return
    print(f"{torch.get_num_threads()} threads, torch {torch.__version__}")
    print(
        f"{'':<16}{'N':>12}{'fit':>9}{'making':>9}{'memory':>8}{'F':>6}{'RMSE':>9}{'sd':>9}"
        f"{'inside':>8}"
    )
    if not arguments.others:
        for dims in (2, 3):
            if arguments.only not in (None, dims):
                continue
            points = 1000
            while points <= arguments.most:
                streamed = points >= 10**7
                name = f"{dims} inputs" + (", streamed" if streamed else "")
                show(name, points, measured("ours", points, dims, streamed))
                points *= 10
    if arguments.only in (None, 2):
        for points in (1000, 2000):
            show("exact", points, measured("exact", points, 2))
        for points in (1000, 2000, 4000):
            show("dense, 1 eval.", points, measured("dense", points, 2))
        show("SVGP", 10**5, measured("svgp", 10**5, 2), "   (F: its steps)")


if __name__ == "__main__":
    main()
