"""Likelihoods beyond those of gpytorch, and a container of likelihoods by name."""

from collections.abc import Iterator, MutableMapping

import torch
from gpytorch.constraints import GreaterThan
from gpytorch.likelihoods import GaussianLikelihood, Likelihood, MultitaskGaussianLikelihood
from linear_operator.operators import LinearOperator
from torch import nn


class MultitaskStudentTLikelihood(MultitaskGaussianLikelihood):
    r"""Student-t noise of vectors, for data with outliers: ε ~ t_ν(0, Σ) in p dimensions.

    The noise of a point is N(0, Σ/w) with its own w ~ Gamma(ν/2, ν/2) (Lange, Little & Taylor
    1989, *Robust statistical modeling using the t distribution*), so that one weight serves all
    components of a vector. `VectorFieldGP` finds the field, the weights and the hyperparameters by
    variational EM with the E-step

        E[w_n] = (ν + p) / (ν + E_f[(y_n − f(x_n))ᵀ Σ⁻¹ (y_n − f(x_n))]) ,

    and its log marginal likelihood is the ELBO. Calling this likelihood on a distribution, as
    other gpytorch models do, adds Gaussian noise of the same covariance, νΣ/(ν−2).

    Args:
        num_tasks: p, the number of outputs.
        deg_free: the degrees of freedom ν > 2, which are not trained. With the default of 4,
            residuals of many noise scales get small weights, and little is lost if the noise is
            Gaussian after all.
        has_task_noise: False for Σ = σ² I; True adds a learned covariance (p, p) to it, diagonal
            for the default `rank` of 0.
        kwargs: other arguments of `gpytorch.likelihoods.MultitaskGaussianLikelihood`, such as
            `rank`. Its noise is the scale matrix Σ, in squared units of y.

    Raises:
        ValueError: `deg_free` is at most 2, so that the noise has no variance.

    Example:
        >>> import gp_orff, torch
        >>> x = torch.rand(80, 2, generator=torch.Generator().manual_seed(0))
        >>> y = torch.stack([torch.sin(3 * x[:, 1]), torch.sin(3 * x[:, 0])], dim=-1)
        >>> y[:5] += 10  # outliers
        >>> robust = gp_orff.MultitaskStudentTLikelihood(num_tasks=2)
        >>> kernel = gp_orff.DivergenceFreeKernel(num_dims=2)
        >>> model = gp_orff.VectorFieldGP(kernel, likelihood=robust).fit(x, y, progress=False)
        >>> (model.posterior().mean(x[5:]) - y[5:]).abs().max() < 0.2
        tensor(True)
    """

    def __init__(self, num_tasks: int, *, deg_free: float = 4.0, has_task_noise=False, **kwargs):
        deg_free = checked_deg_free(self, deg_free)
        super().__init__(num_tasks, has_task_noise=has_task_noise, **kwargs)
        self.deg_free = deg_free

    def _shaped_noise_covar(self, *args, **kwargs) -> LinearOperator:
        scale = super()._shaped_noise_covar(*args, **kwargs)
        return scale * torch.tensor(self.deg_free / (self.deg_free - 2)).to(scale.device)


def checked_deg_free(likelihood: Likelihood, deg_free: float) -> float:
    """ν, the degrees of freedom of a likelihood; ValueError if they are at most 2."""
    if not deg_free > 2:
        raise ValueError(
            f"{type(likelihood).__name__} expects deg_free > 2, got {deg_free}, with which the "
            "noise has no variance; use 4, for instance"
        )
    return float(deg_free)


class NamedLikelihoods(nn.Module, MutableMapping):
    """Likelihoods by name; any string is a valid name, unlike in `torch.nn.ModuleDict`."""

    def __init__(self):
        super().__init__()
        self.names: list[str] = []
        self.members = nn.ModuleList()

    def __getitem__(self, name: str) -> Likelihood:
        if name not in self.names:
            raise KeyError(
                f"expected one of the groups {self.names}, got {name!r}; to set its noise before "
                "its data, assign GaussianLikelihood(noise_constraint=GreaterThan(0.0))"
            )
        return self.members[self.names.index(name)]

    def __setitem__(self, name: str, likelihood: Likelihood) -> None:
        if name in self.names:
            self.members[self.names.index(name)] = likelihood
        else:
            self.names.append(name)
            self.members.append(likelihood)

    def __delitem__(self, name: str) -> None:
        del self.members[self.names.index(name)]
        self.names.remove(name)

    def __iter__(self) -> Iterator[str]:
        return iter(list(self.names))

    def __len__(self) -> int:
        return len(self.names)

    __hash__ = nn.Module.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other


def default_likelihood(num_outputs: int) -> Likelihood:
    """A Gaussian likelihood with one noise variance, bounded below by 0 only, which has no unit."""
    if num_outputs == 1:
        return GaussianLikelihood(noise_constraint=GreaterThan(0.0))
    return MultitaskGaussianLikelihood(
        num_outputs, has_task_noise=False, noise_constraint=GreaterThan(0.0)
    )
