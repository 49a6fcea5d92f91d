"""A normal distribution of feature weights as a gpytorch model, for any training loop."""

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
    r"""q(θ) = N(m, S) of the weights of features: f(x) = μ(x) + Φ(x)θ + e(x), θ ~ N(0, I).

    There are no inducing points. The error e(x) ~ N(0, δ) has the truncated variance δ of a grid.
    It is independent between points, and q(f) includes it:

        q(f(x)) = N(μ(x) + Φ(x)m, Φ(x) S Φ(x)ᵀ + δ) .

    In train mode the covariance has only the blocks of single points, which determine the ELBO of
    every pointwise likelihood. In eval mode the full covariance of all points is returned.

    Args:
        model: a `gpytorch.models.ApproximateGP` whose `covar_module` is an `ORFFKernel`, and that
            has a `mean_module`.
        variational_distribution: a variational distribution of gpytorch, with as many values as the
            kernel has features, such as `NaturalVariationalDistribution(kernel.num_features,
            mean_init_std=0.0)`.

    Example:
        >>> import gp_orff, gpytorch, torch
        >>> kernel = gp_orff.ORFFKernel(
        ...     gp_orff.CurlFreeKernel(num_dims=2), gp_orff.MonteCarlo(50)
        ... )
        >>> q = gpytorch.variational.NaturalVariationalDistribution(
        ...     100, mean_init_std=0.0
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
        # The base class expects a tensor of inducing points: it has none, in one column.
        none = torch.zeros(0, 1)
        super().__init__(model, none, variational_distribution, learn_inducing_locations=False)

    @property
    @cached(name="prior_distribution_memo")
    def prior_distribution(self) -> MultivariateNormal:
        """N(0, I), of the weights."""
        q = self._variational_distribution
        zeros = torch.zeros(q.shape(), dtype=q.dtype, device=q.device)
        return MultivariateNormal(zeros, DiagLinearOperator(torch.ones_like(zeros)))

    def __getstate__(self) -> dict:
        """Without the distribution of the last call: tensors with a graph cannot be copied."""
        return {k: v for k, v in super().__getstate__().items() if k != "_memoize_cache"}

    def kl_divergence(self) -> Float[Tensor, "*b"]:
        """KL(q(θ) ‖ N(0, I))."""
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
        """q(f) at points.

        Args:
            x: points (*b, n, d).
            inducing_points: none.
            inducing_values: the mean m of the weights, (*b, F).
            variational_inducing_covar: their covariance S; None if they are known.
            diag: whether to omit the covariance between different points, in train mode.
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
    r"""A normal distribution of feature weights, for any likelihood and training loop.

    It is a `gpytorch.models.ApproximateGP`: `VariationalELBO`, `PredictiveLogLikelihood`, `NGD`,
    minibatches and `state_dict` work as with inducing points, and with vectors too. Use this class
    for endless streams, and for parts of a larger model. If all data fit in memory, use
    `VectorFieldGP(kernel, likelihood=...)` instead, which reaches the same optimum in a few passes.

    Computations are in float64.

    Args:
        kernel: any kernel that `ORFFKernel` accepts, or an `ORFFKernel`.
        frequencies: the rule that chooses the frequencies; None if the kernel is an `ORFFKernel`.
        likelihood: any gpytorch likelihood, in a `Pointwise` if it is not Gaussian; Gaussian if
            None. It is `model.likelihood`, for `VariationalELBO(model.likelihood, model, N)`.
        mean_module: the mean; zero if None.
        form: how q(θ) = N(m, S) is parametrised: "natural" for `gpytorch.optim.NGD` and `step`,
            "tril" for `NGD` and likelihoods that are not log-concave, "cholesky" for Adam.
        num_dims: d, the number of input columns, as for `ORFFKernel`.

    Raises:
        TypeError: neither rule nor `ORFFKernel`.
        ValueError: another form.

    Example:
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
        """q(f) at the points `inputs` (*b, n, d); with `prior`, the prior there."""
        return super().__call__(inputs.double(), prior=prior, **kwargs)

    def forward(self, x: Float[Tensor, "*b n d"]) -> MultivariateNormal:
        """The prior distribution of the field with p outputs at points `x` (*b, n, d).

        It is a `MultivariateNormal` (*b, n) if p = 1, else a `MultitaskMultivariateNormal`
        (*b, n, p).
        """
        kind = MultivariateNormal
        if self.covar_module.num_outputs > 1:
            kind = MultitaskMultivariateNormal
        return kind(self.mean_module(x), self.covar_module(x))

    @torch.no_grad()
    def step(
        self, x: Float[Tensor, "n d"], y: Float[Tensor, "n v"], num_data: int, rate: float = 0.1
    ) -> None:
        """Take a step of natural gradients on a minibatch, in closed form.

        With the precision P and h = P m of q(θ), and the slope g_n and curvature Λ_n of E log p(y_n
        | f) under q,

            P ← (1 − r) P + r (I + N/n Σ_n Φ_nᵀ Λ_n Φ_n) ,
            h ← (1 − r) h + r N/n Σ_n Φ_nᵀ (g_n + Λ_n Φ_n m) .

        That is a step of `gpytorch.optim.NGD` with `lr=rate`, without the derivatives of factors of
        F×F matrices. A rate of one on all data gives the exact posterior under Gaussian noise.

        Args:
            x: the points of the minibatch (n, d).
            y: its observations (n, v).
            num_data: N, of all data.
            rate: r, from 0 to 1.

        Raises:
            ValueError: another form than "natural"; a rate that is not between 0 and 1;
                observations of another shape, or with zero probability.
        """
        q = self.variational_strategy._variational_distribution
        if not isinstance(q, NaturalVariationalDistribution):
            raise ValueError(
                f"step expects FeatureGP(form='natural'), got a {type(q).__name__}; train it with "
                "an optimiser"
            )
        if not 0 < rate <= 1:
            raise ValueError(f"step expects a rate from 0 to 1, got {rate}")
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
