"""Likelihoods beyond those of gpytorch, and a container of likelihoods by name."""

from collections.abc import Iterator, MutableMapping

import torch
from gpytorch.constraints import GreaterThan, Interval
from gpytorch.likelihoods import GaussianLikelihood, Likelihood, MultitaskGaussianLikelihood
from gpytorch.priors import Prior
from linear_operator.operators import LinearOperator
from torch import Tensor, nn

from gp_orff.data.noise.heavy_tails import HeavyTails


class MultitaskStudentTLikelihood(HeavyTails, MultitaskGaussianLikelihood):
    r"""Student-t noise of vectors, for data with outliers: ε ~ t_ν(0, Σ) in p dimensions.

    The noise of a point is N(0, Σ/w) with its own w ~ Gamma(ν/2, ν/2) (Lange, Little & Taylor
    1989, *Robust statistical modeling using the t distribution*), so that one weight serves all
    components of a vector. `VectorFieldGP` finds the field, the weights and the hyperparameters by
    variational EM with the E-step

        E[w_n] = (ν + p) / (ν + E_f[(y_n − f(x_n))ᵀ Σ⁻¹ (y_n − f(x_n))]) ,

    and its log marginal likelihood is the ELBO. With d_n = E_f[…] of that posterior of the field,
    a fit learns ν, if it is asked to, as what maximises Σ_n log t_ν(d_n) + log p(ν), with the
    Student-t density t_ν of v observed numbers of a vector,

        t_ν(d) ∝ Γ((ν + v)/2) / Γ(ν/2) ν^(−v/2) (1 + d/ν)^(−(ν + v)/2) ,

    the ELBO under the best weights for that ν (ECME: Liu & Rubin 1995, *ML estimation of the t
    distribution using EM and its extensions, ECM and ECME*). `condition` and `update` keep it. A
    search stays above 2.5, unless it starts lower: under gross outliers the evidence rises to 2,
    where the map is worse, and its error bars are too small.

    Calling this likelihood on a distribution, as other gpytorch models do, adds Gaussian noise of
    the same covariance, νΣ/(ν−2), which tells nothing of ν.

    Args:
        num_tasks: p, the number of outputs.
        deg_free: the degrees of freedom ν > 2, or where a fit that learns them starts. With 4,
            residuals of many noise scales get small weights, and little is lost if the noise is
            Gaussian after all.
        learn_deg_free: whether fits learn ν, as with `raw_deg_free.requires_grad_(True)`. Tails
            that are learned tell the distribution of readings best; ν = 4 gives the better map
            where readings are few, or outliers rare and gross.
        deg_free_constraint: of ν; greater than 2 by default.
        deg_free_prior: of ν; by default log p(ν) = −½ log²((ν − 2)/2) + const, with its mode at
            4: ν stays near it where readings do not tell, above 2, and finite under noise that is
            Gaussian after all.
        has_task_noise: False for Σ = σ² I; True adds a learned covariance (p, p) to it, diagonal
            for the default `rank` of 0.
        kwargs: other arguments of `gpytorch.likelihoods.MultitaskGaussianLikelihood`, such as
            `rank`. Its noise is the scale matrix Σ, in squared units of y.

    Raises:
        ValueError: `deg_free` is at most 2, so that the noise has no variance.

    Attributes:
        deg_free: ν, a tensor (1,), which can be set.

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

    def __init__(
        self,
        num_tasks: int,
        *,
        deg_free: float | Tensor = 4.0,
        learn_deg_free: bool = False,
        deg_free_constraint: Interval | None = None,
        deg_free_prior: Prior | None = None,
        has_task_noise: bool = False,
        **kwargs,
    ):
        super().__init__(num_tasks, has_task_noise=has_task_noise, **kwargs)
        self.add_deg_free(deg_free, learn_deg_free, deg_free_constraint, deg_free_prior)

    def _shaped_noise_covar(self, *args, **kwargs) -> LinearOperator:
        scale = super()._shaped_noise_covar(*args, **kwargs)
        return scale * torch.tensor(self.heavier).to(scale.device)


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
