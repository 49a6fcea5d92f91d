"""Signs, counts, outliers and classes: the posterior of the field and Hamiltonian Monte Carlo.

    python benchmarks any_likelihood [--points 50] [--draws 2000] [--fields 24] [--smoke]

Values at points in the unit square are drawn from the likelihood and a prior with Monte Carlo
features. `VectorFieldGP` with these features and chains of HMC over their weights compute the mean
and the standard deviation of the field at 20 other places. The columns for each likelihood are the
root mean square and the largest error of the mean in standard deviations of the field, the mean,
smallest and largest ratio of the standard deviations, and the standard error of the mean of the
chains. The last row has observations of speed alone, for which no normal distribution is accurate.

The second table has fits to 200 numbers with Student-t noise of ν = 3, of `--fields` random fields.
The fits are EM with ν = 4, EM that learns ν, and pseudo-observations. The columns are the fraction
of the field at 100 other places in 95 % intervals, its standard error, the error of the mean, and
seconds.
"""

import time
import warnings
from collections.abc import Callable, Sequence

import torch
from gpytorch.kernels import Kernel, MultitaskKernel, RBFKernel, ScaleKernel
from gpytorch.likelihoods import (
    BernoulliLikelihood,
    Likelihood,
    PoissonLikelihood,
    SoftmaxLikelihood,
    StudentTLikelihood,
)
from gpytorch.means import ConstantMean, Mean, MultitaskMean, ZeroMean
from helpers.command import Sizes
from helpers.results import save
from helpers.rows import Rows
from torch import Tensor

import gp_orff

FREQUENCIES, CHAINS, LEAPS = 50, 24, 8


class Speed(Likelihood):
    def forward(self, f, *args, **kwargs):
        return torch.distributions.Normal(f.norm(dim=-1), 0.1)


def scalar(variance: float) -> Kernel:
    kernel = ScaleKernel(RBFKernel()).double()
    kernel.base_kernel.lengthscale, kernel.outputscale = 0.3, variance
    return kernel


def vectors(variance: float) -> Kernel:
    kernel = gp_orff.DivergenceFreeKernel(RBFKernel(), num_dims=2)
    kernel = ScaleKernel(kernel).double()
    kernel.base_kernel.base_kernel.lengthscale, kernel.outputscale = 0.4, variance * 0.4**2
    return kernel


def three_classes() -> Kernel:
    kernel = MultitaskKernel(RBFKernel(), num_tasks=3, rank=3).double()
    kernel.data_covar_module.lengthscale = 0.3
    factor = torch.tensor([[1.5, 0, 0], [1.2, 0.7, 0], [-0.8, 0.3, 1.0]])
    kernel.task_covar_module.covar_factor.data.copy_(factor)
    kernel.task_covar_module.var = torch.full((3,), 1e-6)
    return kernel


def tails() -> Likelihood:
    likelihood = StudentTLikelihood().double()
    likelihood.deg_free, likelihood.noise = 4.0, 0.01
    return likelihood.requires_grad_(False)


def known(*values: float) -> Mean:
    means = [ConstantMean() for _ in values]
    for mean, value in zip(means, values, strict=True):
        mean.initialize(constant=value).requires_grad_(False)
    return MultitaskMean(means, len(values)).double() if len(values) > 1 else means[0].double()


CASES: dict[str, Callable[[], tuple[Kernel, Likelihood, Mean]]] = {
    "signs": lambda: (scalar(4.0), BernoulliLikelihood(), ZeroMean()),
    "signs of vectors": lambda: (vectors(4.0), BernoulliLikelihood(), known(0.0, 0.0)),
    "counts": lambda: (scalar(4.0), PoissonLikelihood(), ZeroMean()),
    "Student-t": lambda: (scalar(1.0), tails(), ZeroMean()),
    "Student-t, vectors": lambda: (vectors(1.0), tails(), known(0.0, 0.0)),
    "three classes": lambda: (
        three_classes(),
        SoftmaxLikelihood(num_classes=3, mixing_weights=False),
        known(0.0, 0.0, 0.0),
    ),
    "speed": lambda: (vectors(1.0), Speed(), known(2.0, 0.0)),
}


def hmc(log_density: Callable[[Tensor], Tensor], start: Tensor, root: Tensor, draws: int) -> Tensor:
    """Draw from a density by Hamiltonian Monte Carlo, in coordinates with a covariance near I.

    The result has the shape (draws, chains, F). The step is adapted to an acceptance rate of 0.8 in
    the first fifth of the draws, which are omitted.
    """
    generator = torch.Generator().manual_seed(0)

    def value(z):
        z = z.detach().requires_grad_()
        values = log_density(start + z @ root.mT)
        (slope,) = torch.autograd.grad(values.sum(), z)
        return values.detach(), slope

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    z = normal(CHAINS, len(start))
    (level, slope), step, kept = value(z), 0.15, []
    for number in range(draws // 5 + draws):
        momentum = normal(CHAINS, len(start))
        energy = level - 0.5 * momentum.square().sum(-1)
        length = step * (0.8 + 0.4 * torch.rand(1, generator=generator).double())
        place, force = z, slope
        for _ in range(LEAPS):
            momentum = momentum + 0.5 * length * force
            place = place + length * momentum
            new, force = value(place)
            momentum = momentum + 0.5 * length * force
        accepted = (new - 0.5 * momentum.square().sum(-1) - energy).clamp(max=0).exp().nan_to_num()
        moved = torch.rand(CHAINS, generator=generator).double() < accepted
        z, slope = (torch.where(moved[:, None], *pair) for pair in ((place, z), (force, slope)))
        level = torch.where(moved, new, level)
        if number < draws // 5:
            step *= float(torch.exp(0.05 * (accepted.mean() - 0.8)))
        else:
            kept.append(start + z @ root.mT)
    return torch.stack(kept)


def compared(name: str, points: int, draws: int) -> dict[str, float]:
    kernel, likelihood, mean = CASES[name]()
    rule = gp_orff.MonteCarlo(FREQUENCIES if "classes" not in name else 17, seed=0)
    features = gp_orff.ORFFKernel(kernel, rule, num_dims=2)
    p, generator = features.num_outputs, torch.Generator().manual_seed(1)
    x, xs = (torch.rand(n, 2, generator=generator).double() for n in (points, 20))
    phi, at = features.features(x).detach(), features.features(xs).detach()
    trend = mean(xs[:1]).detach().reshape(p)

    def of(theta: Tensor, phi: Tensor) -> Tensor:
        f = (theta @ phi.mT).unflatten(-1, (-1, p)) + trend
        return f.squeeze(-1) if p == 1 else f

    weights = torch.randn(phi.shape[-1], generator=generator, dtype=torch.float64)
    torch.manual_seed(2)
    y = likelihood.forward(of(weights, phi)).sample()

    def log_density(theta: Tensor) -> Tensor:
        logs = likelihood.forward(of(theta, phi)).log_prob(y)
        return logs.flatten(1).sum(-1) - 0.5 * theta.square().sum(-1)

    model = gp_orff.VectorFieldGP(kernel, likelihood=likelihood, mean=mean, frequencies=rule)
    field = model.condition(x, y.double()).posterior()
    parts = list(model.state.data.visit())  # HMC starts where the pseudo-observations are
    rows = torch.cat([part.rows(phi) for part in parts])
    precision = torch.cat([part.weight for part in parts])
    values = torch.cat([(part.y - part.apply(trend.expand(len(part), p)))[:, 0] for part in parts])
    inverse = torch.linalg.inv(
        torch.eye(len(weights)).double() + rows.mT @ (precision[:, None] * rows)
    )
    start = inverse @ rows.mT @ (precision * values)
    chains = hmc(log_density, start, torch.linalg.cholesky(inverse), draws)
    f = of(chains, at).flatten(2)
    wanted, sd = f.flatten(0, 1).mean(0), f.flatten(0, 1).std(0)
    error = (field.mean(xs).flatten() - wanted) / sd
    ratio = field.variance(xs).sqrt().flatten() / sd
    return {
        "mean": error.square().mean().sqrt().item(),
        "largest": error.abs().max().item(),
        "sd": ratio.mean().item(),
        "least": ratio.min().item(),
        "most": ratio.max().item(),
        "of chains": (f.mean(0).std(0) / CHAINS**0.5 / sd).max().item(),
    }


def fitted(how: str, seed: int) -> tuple[float, float, float]:
    """Return the coverage of the field, the root mean square error of its mean, and the seconds
    of a fit."""
    torch.manual_seed(seed)
    kernel, x = ScaleKernel(RBFKernel()).double(), torch.rand(300, 2, dtype=torch.float64)
    kernel.base_kernel.lengthscale, kernel.outputscale = 0.25, 1.0
    covariance = kernel(x).to_dense().detach() + 1e-6 * torch.eye(300)
    f = torch.distributions.MultivariateNormal(torch.zeros(300).double(), covariance).sample()
    y = f[:200] + 0.2 * torch.distributions.StudentT(3.0).sample((200,))
    likelihood = StudentTLikelihood()
    if how != "pseudo-observations":
        learns = how == "EM, learned ν"
        likelihood = gp_orff.MultitaskStudentTLikelihood(1, learn_deg_free=learns)
    kernel = ScaleKernel(RBFKernel()).double()
    model = gp_orff.VectorFieldGP(kernel, likelihood=likelihood, mean=ZeroMean())
    began = time.process_time()
    field = model.fit(x[:200], y, progress=False).posterior(marginalize=False)
    seconds = time.process_time() - began
    miss = field.mean(x[200:])[:, 0] - f[200:]
    inside = miss.abs() < 1.96 * field.variance(x[200:])[:, 0].sqrt()
    return inside.double().mean().item(), miss.square().mean().sqrt().item(), seconds


def main(words: Sequence[str] | None = None) -> None:
    sizes = {"points": (50, 20), "draws": (2000, 100), "fields": (24, 2)}
    arguments = Sizes(__file__, __doc__, **sizes).parse_args(words)
    warnings.simplefilter("ignore", gp_orff.CalibrationWarning)  # of what is measured here
    rows = Rows()
    for name in CASES:
        rows.add(likelihood=name, **compared(name, arguments.points, arguments.draws))
    ways = Rows()
    for how in ("EM", "EM, learned ν", "pseudo-observations"):
        found = torch.tensor([fitted(how, seed) for seed in range(arguments.fields)])
        coverage, rmse, seconds = found.mean(0).tolist()
        error = found[:, 0].std().item() / arguments.fields**0.5
        ways.add(how=how, coverage=coverage, error=error, rmse=rmse, seconds=seconds)
    sizes = {name: getattr(arguments, name) for name in sizes}
    save(arguments, {**sizes, "rows": rows, "ways": ways})
