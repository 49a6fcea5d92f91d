"""One training step of a separable kernel: 20 outputs against one.

    python benchmarks/kronecker_step.py [--points 20000] [--frequencies 200] [--rounds 9]

Evidence and gradient by ORFFKernel(MultitaskKernel(RBF)) in ExactGP, float64, interleaved in one
process; beside the same features without the Kronecker algebra (every direction written out, F =
2D·p, one step, as its cost is F³). The ratios are medians over rounds.
"""

import argparse
import statistics
import time

import gpytorch
import torch
from gpytorch.kernels import MultitaskKernel, RBFKernel

import gp_orff


class Written(gp_orff.ORFFKernel):
    """The same features without the Kronecker form."""

    def _expansion(self, num_inputs):
        return super()._expansion(num_inputs).general()


class Model(gpytorch.models.ExactGP):
    def __init__(self, x, y, likelihood, kernel):
        super().__init__(x, y, likelihood)
        self.covar_module = kernel
        self.double()

    def forward(self, x):
        mean = torch.zeros(*self.train_targets.shape, dtype=x.dtype)
        return gpytorch.distributions.MultitaskMultivariateNormal(mean, self.covar_module(x))


def step_of(outputs, points, frequencies, kind=gp_orff.ORFFKernel):
    generator = torch.Generator().manual_seed(0)
    x = 10 * torch.rand(points, 2, generator=generator, dtype=torch.float64)
    y = torch.randn(points, outputs, generator=generator, dtype=torch.float64)
    torch.manual_seed(0)
    kernel = MultitaskKernel(RBFKernel(), num_tasks=outputs, rank=1)
    likelihood = gpytorch.likelihoods.MultitaskGaussianLikelihood(outputs)
    rule = gp_orff.MonteCarlo(frequencies)
    model = Model(x, y, likelihood, kind(kernel, rule, num_dims=2))
    mll = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)

    def step():
        model.zero_grad()
        start = time.perf_counter()
        (-mll(model(x), y)).backward()
        return time.perf_counter() - start

    return step


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--points", type=int, default=20_000)
    parser.add_argument("--frequencies", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    size = (arguments.points, arguments.frequencies)
    steps = {p: step_of(p, *size) for p in (1, 20)}
    for step in steps.values():
        step()
    times = {p: [] for p in steps}
    for _ in range(arguments.rounds):
        for p, step in steps.items():
            times[p].append(step())
    ratio = statistics.median(b / a for a, b in zip(times[1], times[20], strict=True))
    written = step_of(20, *size, kind=Written)()
    print(f"N = {size[0]}, {2 * size[1]} trig columns, {arguments.rounds} interleaved rounds")
    print(f"p = 1    {statistics.median(times[1]):8.3f} s")
    print(f"p = 20   {statistics.median(times[20]):8.3f} s, {ratio:.2f} times p = 1")
    print(f"p = 20 without the Kronecker algebra {written:8.3f} s")


if __name__ == "__main__":
    main()
