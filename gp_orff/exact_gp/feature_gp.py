"""A gpytorch model with a normal distribution of feature weights, for any training loop."""

import torch
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import Likelihood
from gpytorch.means import Mean, MultitaskMean, ZeroMean
from gpytorch.models import ApproximateGP
from gpytorch.utils.memoize import cached
from gpytorch.variational import (
    CholeskyVariationalDistribution,
    NaturalVariationalDistribution,
    TrilNaturalVariationalDistribution,
    _VariationalDistribution,
    _VariationalStrategy,
)
from jaxtyping import Float
from linear_operator import to_linear_operator
from linear_operator.operators import (
    BlockDiagLinearOperator,
    DiagLinearOperator,
    LinearOperator,
    RootLinearOperator,
)
from torch import Tensor

from gp_orff.data.likelihoods import default_likelihood
from gp_orff.data.pointwise import Pointwise, by_points
from gp_orff.exact_gp.orff_kernel import ORFFKernel
from gp_orff.features.draws import Rule

_FORMS = {
    "natural": NaturalVariationalDistribution,
    "tril": TrilNaturalVariationalDistribution,
    "cholesky": CholeskyVariationalDistribution,
}


class WeightVariationalStrategy(_VariationalStrategy):
    r"""A gpytorch variational strategy for the weights of features, without inducing points.

    The field is f(x) = μ(x) + Φ(x)θ + e(x), with the mean μ, the features Φ(x) (p, F), and weights
    θ (F,) with the prior N(0, I) and the variational distribution q(θ) = N(m, S). The error
    e(x) ~ N(0, δ) has the truncated variance δ of a grid, and is independent between points. Then

        q(f(x)) = N(μ(x) + Φ(x)m, Φ(x) S Φ(x)ᵀ + δ) .

    In train mode, the covariance between different points is omitted, because the ELBO of a
    pointwise likelihood does not depend on it. In eval mode, the full covariance is returned.

    Args:
        model: a `gpytorch.models.ApproximateGP` with a `mean_module`, whose `covar_module` is an
            `ORFFKernel`.
        variational_distribution: a variational distribution of gpytorch for F weights, where F is
            the `num_features` of the kernel.

    Example:
        >>> import gp_orff, gpytorch, torch
        >>> kernel = gp_orff.ORFFKernel(
        ...     gp_orff.CurlFreeKernel(num_dims=2), gp_orff.MonteCarlo(50)
        ... )
        >>> q = gpytorch.variational.NaturalVariationalDistribution(
        ...     kernel.num_features, mean_init_std=0.0
        ... )
        >>> class Model(gpytorch.models.ApproximateGP):
        ...     def __init__(self):
        ...         super().__init__(gp_orff.WeightVariationalStrategy(self, q))
        ...         zero = gpytorch.means.ZeroMean()
        ...         self.mean_module = gpytorch.means.MultitaskMean(
        ...             zero, num_tasks=2
        ...         )
        ...         self.covar_module = kernel
        >>> Model()(torch.rand(7, 2)).mean.shape
        torch.Size([7, 2])
    """

    def __init__(self, model: ApproximateGP, variational_distribution: _VariationalDistribution):
        # The base class needs a tensor of inducing points; this one is empty.
        none = torch.zeros(0, 1)
        super().__init__(model, none, variational_distribution, learn_inducing_locations=False)

    @property
    @cached(name="prior_distribution_memo")
    def prior_distribution(self) -> MultivariateNormal:
        """The prior N(0, I) of the weights."""
        q = self._variational_distribution
        zeros = torch.zeros(q.shape(), dtype=q.dtype, device=q.device)
        return MultivariateNormal(zeros, DiagLinearOperator(torch.ones_like(zeros)))

    def __getstate__(self) -> dict:
        """Return the state without the distribution of the last call.

        Its tensors have a graph and cannot be copied.
        """
        return {k: v for k, v in super().__getstate__().items() if k != "_memoize_cache"}

    def kl_divergence(self) -> Float[Tensor, "*b"]:
        """Return the Kullback–Leibler divergence KL(q(θ) ‖ N(0, I)), in nats."""
        if not isinstance(self._variational_distribution, tuple(_FORMS.values())):
            return super().kl_divergence()
        q = self.variational_distribution
        root = q.lazy_covariance_matrix.root.to_dense()
        log_root = root.diagonal(dim1=-1, dim2=-2).abs().log().sum(-1)
        squares = root.square().sum((-1, -2)) + q.mean.square().sum(-1)
        return 0.5 * (squares - root.shape[-1]) - log_root

    def forward(
        self,
        x: Float[Tensor, "*b n d"],
        inducing_points: Tensor,
        inducing_values: Float[Tensor, "*b F"],
        variational_inducing_covar: LinearOperator | None = None,
        diag: bool = True,
        **kwargs,
    ) -> MultivariateNormal:
        """Return q(f) at points.

        Args:
            x: points (*b, n, d).
            inducing_points: ignored.
            inducing_values: m, (*b, F), the mean of the weights.
            variational_inducing_covar: S, (*b, F, F), the covariance of the weights; zero if None.
            diag: whether to omit the covariance between different points in train mode.
        """
        kernel = self.model.covar_module
        p, phi = kernel.num_outputs, kernel.features(x)
        mean = (phi @ inducing_values.unsqueeze(-1)).squeeze(-1).unflatten(-1, (-1, p))
        mean = mean + self.model.mean_module(x).view(mean.shape[-2:] if p == 1 else mean.shape)
        delta = kernel.truncated()
        covariance = variational_inducing_covar
        if covariance is None:
            root = phi.new_zeros(*phi.shape[:-1], 1)
        else:
            root = phi @ covariance.root_decomposition(method="cholesky").root.to_dense()
        if diag and self.training:
            root = root.unflatten(-2, (-1, p))
            blocks = root @ root.mT
            blocks = blocks if delta is None else blocks + delta.to(blocks)
            of_points = BlockDiagLinearOperator(to_linear_operator(blocks))
        else:
            of_points = RootLinearOperator(root)
            if delta is not None:
                every = delta.to(root).expand(*mean.shape[:-1], p, p)
                of_points = of_points + BlockDiagLinearOperator(to_linear_operator(every))
        if p == 1:
            return MultivariateNormal(mean.squeeze(-1), of_points)
        return MultitaskMultivariateNormal(mean, of_points)


class FeatureGP(ApproximateGP):
    r"""A gpytorch model with a normal distribution of feature weights, for any likelihood.

    The field is f(x) = μ(x) + Φ(x)θ with the features Φ of an `ORFFKernel`, and the distribution of
    the weights is q(θ) = N(m, S); see `WeightVariationalStrategy` for the distribution of f. The
    class is a `gpytorch.models.ApproximateGP`. gpytorch's `VariationalELBO`,
    `PredictiveLogLikelihood` and `NGD`, minibatches and `state_dict` work as with inducing points,
    also for several outputs.

    Use this class for data streams without an end, and as a part of a larger model. If all data fit
    in memory, use `VectorFieldGP(kernel, likelihood=...)` instead, which reaches the same optimum
    in a few passes over the data. Computations use float64.

    Args:
        kernel: a kernel that `ORFFKernel` accepts, or an `ORFFKernel`.
        frequencies: the rule that chooses the frequencies. Omit it if `kernel` is an `ORFFKernel`.
        likelihood: a gpytorch likelihood. It becomes the attribute `likelihood`, inside a
            `Pointwise` if it is not Gaussian. If None, it is Gaussian.
        mean_module: μ, a gpytorch mean; zero if None.
        form: the parametrisation of q(θ). Use "natural", the default, for `gpytorch.optim.NGD` and
            for `step`, "tril" for `NGD` and likelihoods that are not log-concave, and "cholesky"
            for optimisers such as Adam.
        num_dims: d, the number of input columns, as for `ORFFKernel`.

    Raises:
        TypeError: `frequencies` is not a rule, and `kernel` is not an `ORFFKernel`.
        ValueError: `form` is another word.

    Example:
        Classify the signs of two components, in minibatches of 100 points:

        >>> import gp_orff, gpytorch, torch
        >>> x = torch.rand(300, 2, generator=torch.Generator().manual_seed(0))
        >>> y = (
        ...     torch.stack(
        ...         [torch.sin(6 * x[:, 1]), torch.sin(6 * x[:, 0])], dim=-1
        ...     )
        ...     > 0
        ... ).double()
        >>> model = gp_orff.FeatureGP(
        ...     gp_orff.DivergenceFreeKernel(num_dims=2),
        ...     gp_orff.MonteCarlo(50),
        ...     likelihood=gpytorch.likelihoods.BernoulliLikelihood(),
        ... )
        >>> elbo = gpytorch.mlls.VariationalELBO(
        ...     model.likelihood, model, num_data=300
        ... )
        >>> optimizer = gpytorch.optim.NGD(
        ...     model.variational_parameters(), num_data=300, lr=0.5
        ... )
        >>> for rows in torch.arange(300).split(100) * 5:
        ...     optimizer.zero_grad()
        ...     loss = -elbo(model(x[rows]), y[rows])
        ...     loss.backward()
        ...     _ = optimizer.step()
        >>> bool(((model.eval()(x).mean > 0) == y).double().mean() > 0.9)
        True
    """

    def __init__(
        self,
        kernel: Kernel,
        frequencies: Rule | None = None,
        *,
        likelihood: Likelihood | None = None,
        mean_module: Mean | None = None,
        form: str = "natural",
        num_dims: int | None = None,
    ):
        if form not in _FORMS:
            raise ValueError(f"FeatureGP expects one of the forms {sorted(_FORMS)}, got {form!r}")
        if not isinstance(kernel, ORFFKernel):
            kernel = ORFFKernel(kernel, frequencies, num_dims=num_dims)
        q = _FORMS[form](kernel.num_features, mean_init_std=0.0)
        super().__init__(WeightVariationalStrategy(self, q))
        p, zero = kernel.num_outputs, ZeroMean()
        self.covar_module = kernel
        self.mean_module = mean_module or (zero if p == 1 else MultitaskMean(zero, p))
        self.likelihood = default_likelihood(p) if likelihood is None else by_points(likelihood)
        self.double()

    def __call__(
        self, inputs: Float[Tensor, "*b n d"], prior: bool = False, **kwargs
    ) -> MultivariateNormal:
        """Return q(f) at the points `inputs` (*b, n, d), or the prior of f if `prior` is True."""
        return super().__call__(inputs.double(), prior=prior, **kwargs)

    def forward(self, x: Float[Tensor, "*b n d"]) -> MultivariateNormal:
        """Return the prior distribution of the field at the points `x` (*b, n, d).

        It is a `MultivariateNormal` (*b, n) if the number of outputs p is 1, and a
        `MultitaskMultivariateNormal` (*b, n, p) otherwise.
        """
        kind = MultivariateNormal
        if self.covar_module.num_outputs > 1:
            kind = MultitaskMultivariateNormal
        return kind(self.mean_module(x), self.covar_module(x))

    @torch.no_grad()
    def step(
        self, x: Float[Tensor, "n d"], y: Float[Tensor, "n v"], num_data: int, rate: float = 0.1
    ) -> None:
        """Take a step of natural gradient ascent of the ELBO on a minibatch, in closed form.

        The step updates the precision P = S⁻¹ and h = P m of q(θ) = N(m, S). For the point i of the
        minibatch, g_i is the gradient and Λ_i is minus the Hessian of E log p(y_i | f) under q with
        respect to the mean of f. Then

            P ← (1 − r) P + r (I + N/n Σ_i Φ_iᵀ Λ_i Φ_i) ,
            h ← (1 − r) h + r N/n Σ_i Φ_iᵀ (g_i + Λ_i Φ_i m) .

        This is a step of `gpytorch.optim.NGD` with `lr=rate`, but without derivatives of factors of
        F×F matrices. With Gaussian noise, a step with r = 1 on all data gives the exact posterior.

        Args:
            x: (n, d), the points of the minibatch.
            y: (n, v), the observations of the minibatch.
            num_data: N, the number of points in all data.
            rate: r, with 0 < r ≤ 1; 0.1 by default.

        Raises:
            ValueError: the form is not "natural"; `rate` is not in (0, 1]; `y` has another shape,
                or contains a value with zero probability.

        Example:
            >>> import gp_orff, torch
            >>> x = torch.rand(200, 2)
            >>> kernel = gp_orff.CurlFreeKernel(num_dims=2)
            >>> model = gp_orff.FeatureGP(kernel, gp_orff.MonteCarlo(50))
            >>> model.step(x, x, num_data=200, rate=1.0)
            >>> bool((model.eval()(x).mean - x).abs().mean() < 0.5)
            True
        """
        q = self.variational_strategy._variational_distribution
        if not isinstance(q, NaturalVariationalDistribution):
            raise ValueError(
                f"step expects FeatureGP(form='natural'), got a {type(q).__name__}; train this "
                "model with an optimiser"
            )
        if not 0 < rate <= 1:
            raise ValueError(f"step expects a rate above 0 and at most 1, got {rate}")
        kernel, likelihood = self.covar_module, self.likelihood
        x, p = x.double(), kernel.num_outputs
        phi, precision = kernel.features(x), -2 * q.natural_mat
        factor = torch.linalg.cholesky(precision)
        m = torch.cholesky_solve(q.natural_vec.unsqueeze(-1), factor)
        root = torch.linalg.solve_triangular(factor, phi.mT, upper=False).mT.unflatten(0, (-1, p))
        blocks, delta = root @ root.mT, kernel.truncated()
        blocks = blocks if delta is None else blocks + delta.to(blocks)
        mean = (phi @ m).view(-1, p)
        if not isinstance(likelihood, Pointwise):
            likelihood = Pointwise(likelihood)
        likelihood.check(y, mean)
        trend = self.mean_module(x).view(-1, p)
        _, slope, curvature = likelihood.derivatives(y.double(), mean + trend, blocks)
        linear = slope + (curvature @ mean.unsqueeze(-1)).squeeze(-1)
        weighted = (curvature @ phi.unflatten(0, (-1, p))).flatten(0, 1)
        share, eye = num_data / len(x), torch.eye(len(precision)).to(precision)
        target = eye + share * phi.mT @ weighted
        q.natural_mat.lerp_(-0.5 * target, rate)
        q.natural_vec.lerp_(share * (phi.mT @ linear.reshape(-1)), rate)
        self.variational_strategy._clear_cache()
        self.variational_strategy.variational_params_initialized.fill_(1)
