"""Observation models beyond gpytorch's own."""

import torch
from gpytorch.likelihoods import MultitaskGaussianLikelihood
from linear_operator.operators import LinearOperator


class MultitaskStudentTLikelihood(MultitaskGaussianLikelihood):
    r"""Vectors with noise of heavy tails, for data with outliers: ε ~ t_ν(0, Σ) in p dimensions.

    The noise of a point is N(0, Σ/w) with w ~ Gamma(ν/2, ν/2) of its own (Lange, Little & Taylor
    1989), so that all components of a bad vector are doubted together. `VectorFieldGP` finds the
    field, the weights w and the hyperparameters by variational EM:

        E[w_n] = (ν + p) / (ν + (y_n − f(x_n))ᵀ Σ⁻¹ (y_n − f(x_n)))  in expectation over f,

    and its log marginal likelihood is the bound of that approximation. Elsewhere in gpytorch the
    marginal is the Gaussian of the same covariance, νΣ/(ν−2).

    Args:
        num_tasks: p.
        deg_free: ν > 2; 4 doubts what is a few Σ away and keeps most of what Gaussian noise knows.
        Others as for `gpytorch.likelihoods.MultitaskGaussianLikelihood`, whose noise is Σ; no task
        noise by default.

    Example:
        >>> import gp_orff, torch
        >>> x = torch.rand(80, 2, generator=torch.Generator().manual_seed(0))
        >>> y = torch.stack([torch.sin(3 * x[:, 1]), torch.sin(3 * x[:, 0])], dim=-1)
        >>> y[:5] += 10  # outliers
        >>> robust = gp_orff.MultitaskStudentTLikelihood(num_tasks=2)
        >>> kernel = gp_orff.HelmholtzKernel(num_dims=2)
        >>> model = gp_orff.VectorFieldGP(kernel, likelihood=robust).fit(x, y, progress=False)
        >>> (model.posterior().mean(x[5:]) - y[5:]).abs().max() < 0.2
        tensor(True)
    """

    def __init__(self, num_tasks: int, *, deg_free: float = 4.0, has_task_noise=False, **kwargs):
        if not deg_free > 2:
            raise ValueError(
                f"MultitaskStudentTLikelihood expects deg_free > 2, got {deg_free}: the noise "
                "would have no variance"
            )
        super().__init__(num_tasks, has_task_noise=has_task_noise, **kwargs)
        self.deg_free = float(deg_free)

    def _shaped_noise_covar(self, *args, **kwargs) -> LinearOperator:
        scale = super()._shaped_noise_covar(*args, **kwargs)
        return scale * torch.tensor(self.deg_free / (self.deg_free - 2)).to(scale.device)
