"""How far the posterior of random features is from the exact one, at the same hyperparameters.

    python benchmarks/random_feature_posterior.py [--points 800] [--seeds 3]

A curl-free field drawn from the prior over a square of 5 or 10 lengthscales, noise 3 % of its
standard deviation, float64. Against the exact GP at 300 points: relative error of the posterior
mean and standard deviation, the median ratio of the two standard deviations, and the negative log
density of the true field per component (NLPD), averages over seeds of the features.
"""

import argparse
from itertools import product

import gpytorch
import torch
from gpytorch.kernels import MaternKernel, RBFKernel

import gp_orff

FREQUENCIES = (256, 512, 1024)
RULES = (gp_orff.MonteCarlo, gp_orff.Orthogonal, gp_orff.QuasiMonteCarlo)


class Model(gpytorch.models.ExactGP):
    def __init__(self, x, y, noise, kernel):
        constraint = gpytorch.constraints.GreaterThan(1e-8)
        likelihood = gpytorch.likelihoods.MultitaskGaussianLikelihood(
            2, has_task_noise=False, noise_constraint=constraint
        )
        super().__init__(x, y, likelihood)
        self.covar_module = kernel
        self.double()
        likelihood.noise = noise

    def forward(self, x):
        return gpytorch.distributions.MultitaskMultivariateNormal(
            torch.zeros(len(x), 2, dtype=x.dtype), self.covar_module(x)
        )


def posterior(model, x):
    with torch.no_grad(), gpytorch.settings.max_cholesky_size(10**6):
        prediction = model.eval()(x)
        return prediction.mean, prediction.stddev


def nlpd(truth, mean, sd):
    return -torch.distributions.Normal(mean, sd).log_prob(truth).mean().item()


def compare(name, potential, extent, points, seeds):
    generator = torch.Generator().manual_seed(0)
    x = extent * torch.rand(points + 300, 2, generator=generator, dtype=torch.float64)
    potential = potential.double()
    potential.lengthscale = 1.0
    kernel = gp_orff.CurlFreeKernel(potential, num_dims=2)
    with torch.no_grad():
        covariance = kernel(x).to_dense()
        variance = covariance.diagonal().mean()
        root = torch.linalg.cholesky(covariance + 1e-9 * torch.eye(len(covariance)))
        field = (root @ torch.randn(len(root), generator=generator).double()).reshape(-1, 2)
    noise = (0.03**2 * variance).item()
    y = field[:points] + noise**0.5 * torch.randn(points, 2, generator=generator).double()
    truth, x, xs = field[points:], x[:points], x[points:]
    exact_mean, exact_sd = posterior(Model(x, y, noise, kernel), xs)
    head = f"{name}, {extent:g} lengthscales"
    print(f"{head:30}{'exact':>9}{'':36}{nlpd(truth, exact_mean, exact_sd):10.2f}")
    for rule, number in product(RULES, FREQUENCIES):
        rows = []
        for seed in range(seeds):
            orff = gp_orff.ORFFKernel(kernel, rule(number, seed=seed))
            mean, sd = posterior(Model(x, y, noise, orff), xs)
            rows.append(
                [
                    ((mean - exact_mean).norm() / exact_mean.norm()).item(),
                    ((sd - exact_sd).norm() / exact_sd.norm()).item(),
                    (sd / exact_sd).median().item(),
                    nlpd(truth, mean, sd),
                ]
            )
        mean_error, sd_error, ratio, density = torch.tensor(rows).mean(0).tolist()
        print(f"{'  ' + rule.__name__:30}{2 * number:9}{mean_error:12.3f}", end="")
        print(f"{sd_error:12.3f}{ratio:12.3f}{density:10.2f}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--points", type=int, default=800)
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    print(f"{'':30}{'features':>9}{'mean error':>12}{'sd error':>12}{'sd / exact':>12}{'NLPD':>10}")
    for name, potential in [("RBF", RBFKernel()), ("Matern 5/2", MaternKernel(nu=2.5))]:
        for extent in (5.0, 10.0):
            with gp_orff.settings.check_features(False):  # it would warn, rightly
                compare(name, potential, extent, arguments.points, arguments.seeds)


if __name__ == "__main__":
    main()
