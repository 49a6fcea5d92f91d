"""A magnetic field mapped by a robot: one pass on a grid; random features; independent outputs.

    python benchmarks/magnetometer.py DIR [--thin 10] [--frequencies 500]

DIR holds the public data of Solin, Kok, Wahlström, Schön & Särkkä 2018 (IEEE T-RO 34(4)), files
invensense-{1..4}-loc.csv (x, y in metres) and -mag.csv (three components). Trains on paths 1 to 3
with z = 0 and tests on the whole of path 4. Every model has a constant background and one noise.
`VectorFieldGP` takes every reading and its default settings; `ExactGP` with random features takes
one reading in `--thin`, all components scaled by one number. NLPD and RMSE are per component in the
units of the data; NLML is the negative log marginal likelihood of all training readings, in nats.
"""

import argparse
import math
import time
from pathlib import Path

import gpytorch
import numpy as np
import torch
from gpytorch.kernels import ConstantKernel, MultitaskKernel, RBFKernel, ScaleKernel
from tqdm import tqdm

import gp_orff


def read(folder, paths):
    def load(kind):
        files = [folder / f"invensense-{path}-{kind}.csv" for path in paths]
        return torch.from_numpy(np.concatenate([np.loadtxt(f, delimiter=",") for f in files]))

    position = load("loc")
    return torch.nn.functional.pad(position, (0, 1)), load("mag")  # z = 0


def background():
    return MultitaskKernel(ConstantKernel(), num_tasks=3, rank=0)


def independent():
    potential = RBFKernel()
    potential.lengthscale = 0.5
    return MultitaskKernel(potential, num_tasks=3, rank=0) + background()


def curl_free():
    potential = RBFKernel()
    potential.lengthscale = 0.5
    field = ScaleKernel(gp_orff.CurlFreeKernel(potential, num_dims=3))
    field.outputscale = 0.25  # the field's variance is outputscale / ℓ²
    return field + background()


class Model(gpytorch.models.ExactGP):
    def __init__(self, x, y, kernel):
        likelihood = gpytorch.likelihoods.MultitaskGaussianLikelihood(3, has_task_noise=False)
        super().__init__(x, y, likelihood)
        self.covar_module = kernel
        self.double()
        likelihood.noise = 0.05

    def forward(self, x):
        mean = torch.zeros(len(x), 3, dtype=x.dtype)
        return gpytorch.distributions.MultitaskMultivariateNormal(mean, self.covar_module(x))


def learn(model, name):
    mll = gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=40, line_search_fn="strong_wolfe")
    start = time.perf_counter()
    with tqdm(desc=name, unit=" evaluations", mininterval=1) as bar:

        def closure():
            optimizer.zero_grad()
            loss = -mll(model(*model.train_inputs), model.train_targets)
            loss.backward()
            bar.update()
            return loss

        optimizer.step(closure)
    model.eval()
    return time.perf_counter() - start


def scores(name, readings, error, variance, seconds, nlml=None):
    nlpd = 0.5 * (error.square() / variance + torch.log(2 * math.pi * variance)).mean()
    inside = (error.abs() < 1.96 * variance.sqrt()).double().mean()
    rmse = error.square().mean().sqrt()
    likelihood = "" if nlml is None else f"{nlml:9.0f}"
    print(f"{name:14}{readings:9}{rmse:8.3f}{nlpd:8.3f}{inside:8.3f}{seconds:9.1f}{likelihood}")


def one_pass(x, y, xs, ys):
    kernel = ScaleKernel(gp_orff.CurlFreeKernel(RBFKernel(), num_dims=3))
    model = gp_orff.VectorFieldGP(kernel)
    start = time.perf_counter()
    model.fit(x, y)
    seconds = time.perf_counter() - start
    with torch.no_grad():
        nlml = -model.log_marginal_likelihood().item()
        field = model.posterior()
        variance = field.variance(xs) + model.likelihood.noise
    scores("one pass", len(x), field.mean(xs) - ys, variance, seconds, nlml)
    print(model.report)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--thin", type=int, default=10)
    parser.add_argument("--frequencies", type=int, default=500)
    arguments = parser.parse_args()
    torch.manual_seed(0)  # gpytorch starts task covariances at random
    (x, y), (xs, ys) = read(arguments.folder, [1, 2, 3]), read(arguments.folder, [4])
    print(f"{'':14}{'readings':>9}{'RMSE':>8}{'NLPD':>8}{'95 %':>8}{'seconds':>9}{'NLML':>9}")
    one_pass(x, y, xs, ys)
    x, y = x[:: arguments.thin], y[:: arguments.thin]
    scale = y.std()
    rule = gp_orff.MonteCarlo(arguments.frequencies, seed=0)
    for name, kernel in [("independent", independent()), ("curl-free", curl_free())]:
        model = Model(x, y / scale, gp_orff.ORFFKernel(kernel, rule, num_dims=3))
        seconds = learn(model, name)
        with torch.no_grad():
            prediction = model.likelihood(model(xs))
            mean, variance = prediction.mean * scale, prediction.variance * scale**2
        scores(name, len(x), mean - ys, variance, seconds)


if __name__ == "__main__":
    main()
