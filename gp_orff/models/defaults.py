"""The noise and the mean of a `VectorFieldGP` to which none is given."""

from gpytorch.constraints import GreaterThan
from gpytorch.likelihoods import GaussianLikelihood, Likelihood, MultitaskGaussianLikelihood
from gpytorch.means import ConstantMean, Mean, MultitaskMean

from gp_orff.data.sources import base_means


def default_likelihood(num_outputs: int) -> Likelihood:
    """One global noise, positive: a lower bound would have units."""
    if num_outputs == 1:
        return GaussianLikelihood(noise_constraint=GreaterThan(0.0))
    return MultitaskGaussianLikelihood(
        num_outputs, has_task_noise=False, noise_constraint=GreaterThan(0.0)
    )


def default_mean(num_outputs: int) -> Mean:
    return MultitaskMean(ConstantMean(), num_outputs) if num_outputs > 1 else ConstantMean()


def is_trained(mean: Mean) -> bool:
    """Whether it is a constant for every output, to be found."""
    means = base_means(mean)
    return all(isinstance(m, ConstantMean) and m.raw_constant.requires_grad for m in means)


def check_mean(mean: Mean, num_outputs: int) -> None:
    """Constants are found in closed form: one for each output, all trained or none, and free."""
    means = base_means(mean)
    if not all(isinstance(m, ConstantMean) for m in means):
        return
    if len(means) != num_outputs:
        raise ValueError(
            f"expected a constant mean for each of the kernel's {num_outputs} outputs, got "
            f"{len(means)}; use MultitaskMean(ConstantMean(), num_tasks={num_outputs})"
        )
    trained = {m.raw_constant.requires_grad for m in means}
    bound = any([*m.named_priors(), *m.named_constraints()] for m in means)
    if len(trained) > 1 or (bound and True in trained):
        raise ValueError(
            "expected constant means without priors and constraints, all trained or none, since "
            "the best ones are found in closed form; a Gaussian prior on a constant is the term "
            "MultitaskKernel(ConstantKernel(), num_tasks=...) of the kernel"
        )
