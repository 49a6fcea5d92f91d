"""One training step of an ExactGP: ORFFKernel against what a user would use instead.

    python benchmarks/exactgp_step.py [--points 20000] [--frequencies 200] [--rounds 9]

A step is the evidence and its gradient for all hyperparameters, in float64, of a curl-free RBF
kernel in two dimensions with gpytorch's MultitaskGaussianLikelihood. All run in one process,
interleaved; the ratios are medians over rounds. Peak memory is measured in a fresh process each,
above what the data and the model hold, after a small warm-up (Linux only).

Contestants, fixed here:
    orff        ORFFKernel(CurlFreeKernel(RBF), MonteCarlo(D)) in ExactGP
    low_rank    the same features, written out as Φ (N·p × F) and given to gpytorch as its
                LowRankRootLinearOperator, in the same ExactGP
    bare        the work no method avoids: one cosine and one sine of every phase, φᵀφ and φ·G,
                over the same chunks, without autograd or gpytorch
    exact_2000  the exact CurlFreeKernel on the first 2000 points, Cholesky
"""

import argparse
import gc
import statistics
import subprocess
import sys
import time

import gpytorch
import torch
from linear_operator.operators import LowRankRootLinearOperator

import gp_orff
from gp_orff.features import chunked

EXACT_POINTS = 2000
CONTESTANTS = ("orff", "low_rank", "bare", "exact_2000")


class Model(gpytorch.models.ExactGP):
    def __init__(self, x, y, likelihood, kernel):
        super().__init__(x, y, likelihood)
        self.mean_module = gpytorch.means.MultitaskMean(gpytorch.means.ConstantMean(), num_tasks=2)
        self.covar_module = kernel

    def forward(self, x):
        return gpytorch.distributions.MultitaskMultivariateNormal(
            self.mean_module(x), self.covar_module(x)
        )


class WrittenOut(gpytorch.kernels.Kernel):
    """The features of an ORFFKernel as one dense Φ, the way gpytorch's RFFKernel holds them."""

    def __init__(self, orff):
        super().__init__()
        self.base_kernel, self.draw = orff.base_kernel, orff.frequencies[0]

    def num_outputs_per_input(self, x1, x2):
        return 2

    def forward(self, x1, x2, diag=False, **params):
        law = gp_orff.spectrum(self.base_kernel.base_kernel)
        (omega,), weights = self.draw.nodes([law])
        phase = x1 @ omega.mT
        phi = torch.cat([phase.cos(), phase.sin()], dim=-1)
        directions = omega * weights.sqrt().unsqueeze(-1)
        directions = torch.cat([directions, directions])  # (F, 2)
        features = (phi.unsqueeze(-2) * directions.mT).reshape(-1, phi.shape[-1])
        return LowRankRootLinearOperator(features)


def data(points):
    generator = torch.Generator().manual_seed(0)
    x = 10 * torch.rand(points, 2, generator=generator, dtype=torch.float64)
    potential = torch.stack([x[:, 0].cos() * x[:, 1].sin(), x[:, 0].sin() * x[:, 1].cos()], dim=-1)
    return x, potential + 0.1 * torch.randn(points, 2, generator=generator, dtype=torch.float64)


def kernels(frequencies):
    exact = gp_orff.CurlFreeKernel(gpytorch.kernels.RBFKernel(), num_dims=2).double()
    orff = gp_orff.ORFFKernel(exact, gp_orff.MonteCarlo(frequencies, seed=0)).double()
    return {"orff": orff, "low_rank": WrittenOut(orff).double(), "exact_2000": exact}


def bare_step(x, phases, g):
    gram = torch.zeros_like(g)
    for rows in chunked.chunks(x, g.shape[0]):
        phi = chunked.trig(x[rows], phases)
        gram += phi.mT @ phi
        phi @ g
    return gram


def step_of(name, points, frequencies):
    """A function that runs one step, its data and model made beforehand."""
    x, y = data(points if name != "exact_2000" else min(points, EXACT_POINTS))
    if name == "bare":
        phases = chunked.LinearPhases(torch.randn(frequencies, 2, dtype=torch.float64))
        g = torch.randn(2 * frequencies, 2 * frequencies, dtype=torch.float64)
        return lambda: bare_step(x, phases, g)
    likelihood = gpytorch.likelihoods.MultitaskGaussianLikelihood(num_tasks=2).double()
    model = Model(x, y, likelihood, kernels(frequencies)[name]).double()
    mll = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)
    model.train()

    def step():
        model.zero_grad()
        with gpytorch.settings.max_cholesky_size(10**6 if name == "exact_2000" else 800):
            loss = -mll(model(x), y)
            loss.backward()
        return loss.item()

    return step


def seconds(step):
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def status(key):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(key)) / 1024


def print_peak_memory(name, points, frequencies):
    """MiB that one step adds at its peak; run in a process of its own."""
    step_of(name, min(points, 500), frequencies)()
    step = step_of(name, points, frequencies)
    gc.collect()
    before = status("VmRSS")
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # forget the peak so far
    step()
    print(status("VmHWM") - before)


def peak_memory(name, arguments):
    command = [sys.executable, __file__, "--memory-of", name, "--points", str(arguments.points)]
    command += ["--frequencies", str(arguments.frequencies)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--points", type=int, default=20_000)
    parser.add_argument("--frequencies", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--memory-of", choices=CONTESTANTS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.memory_of:
        print_peak_memory(arguments.memory_of, arguments.points, arguments.frequencies)
        return

    steps = {n: step_of(n, arguments.points, arguments.frequencies) for n in CONTESTANTS}
    losses = {name: steps[name]() for name in ("orff", "low_rank")}  # also the warm-up
    steps["bare"](), steps["exact_2000"]()
    times = {name: [] for name in CONTESTANTS}
    for _ in range(arguments.rounds):
        for name in CONTESTANTS:
            times[name].append(seconds(steps[name]))

    print(
        f"N = {arguments.points}, d = p = 2, {2 * arguments.frequencies} trig columns, float64, "
        f"{torch.get_num_threads()} threads, {arguments.rounds} interleaved rounds"
    )
    print(f"loss: orff {losses['orff']:.12f}, low_rank {losses['low_rank']:.12f}")
    print(f"{'':12} {'seconds':>9} {'time / orff':>12} {'extra MiB':>10} {'MiB / orff':>11}")
    memory = {name: peak_memory(name, arguments) for name in CONTESTANTS}
    for name in CONTESTANTS:
        ratio = statistics.median(a / b for a, b in zip(times[name], times["orff"], strict=True))
        print(
            f"{name:12} {statistics.median(times[name]):9.4f} {ratio:12.2f} "
            f"{memory[name]:10.0f} {memory[name] / memory['orff']:11.1f}"
        )


if __name__ == "__main__":
    main()
