"""`ORFFKernel`, a gpytorch kernel that approximates another kernel by its features."""

import warnings
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from gpytorch.kernels import Kernel
from jaxtyping import Float
from torch import Tensor, nn

from gp_orff.exact_gp.operators import FeatureCovariance, FeatureOperator, NoisyFeatureCovariance
from gp_orff.features.assemble import check_domain, draw, expand
from gp_orff.features.draws import Draw, GridWarning, Rule, check_rule
from gp_orff.features.expansion import Expansion
from gp_orff.features.grid import MOST_DENSE, Grid
from gp_orff.features.grid_design import GridBudgetError
from gp_orff.features.truncation import GridAccuracy, SampleAccuracy, accuracy, truncated_variance
from gp_orff.kernels.base import WrapperKernel, check_inputs
from gp_orff.kernels.tree import (
    checked_terms,
    infer_num_dims,
    input_columns,
    spectra_of,
    terms,
)
from gp_orff.symbols.base import Identity


class ORFFKernel(WrapperKernel):
    r"""A gpytorch kernel that approximates another kernel by operator-valued Fourier features.

    K(x, z) ≈ Φ(x) Φ(z)ᵀ, where the feature matrix Φ(x) is (p, F) for p outputs and F features. Use
    this kernel instead of the exact kernel in an `ExactGP`. The model, its likelihood and
    `ExactMarginalLogLikelihood` do not change. For N points and F < N·p, training and prediction
    cost N·p·F² instead of (N·p)³ operations, and neither an (N·p, N·p) nor an (N·p, F) matrix is
    stored. If F > N·p, the (N·p, N·p) matrix is factorised, as for the exact kernel.

    The frequencies are chosen when this kernel is built. Random frequencies are scaled by the
    current lengthscales in every evaluation. Frequencies of a `Grid` are fixed, and only their
    weights depend on the hyperparameters. If a lengthscale leaves the range of the grid while an
    `ExactGP` is trained, a new grid is built, so that the starting values do not matter. Features
    are computed in float64. A float32 model receives and returns float32, but is no faster.

    Source: Brault et al. 2016, Section 2.3; Minh 2016, Section 3.2.

    Args:
        kernel: the kernel to approximate. It can be a scalar kernel, a curl-free, divergence-free
            or Helmholtz kernel, a `SeparableKernel`, a gpytorch `MultitaskKernel`, or a sum,
            product or scaled form of them. Scalar kernels must be stationary. With a random rule,
            `LinearKernel`, `PolynomialKernel` and `DotProductKernel` work too. The kernel is not
            copied, and its parameters are trained through the features.
        frequencies: the rule that chooses the frequencies, such as `gp_orff.MonteCarlo(256)` or
            `gp_orff.Grid.for_data(x)`.
        num_dims: d, the number of input columns. It is needed only for a scalar kernel without ARD
            and `active_dims`.

    Attributes:
        frequencies: a `ModuleList` with the frequencies of each term of the kernel. A sum of two
            kernels has two terms.
        num_outputs: p, the number of outputs.
        num_features: F, the number of features.

    Raises:
        TypeError: `kernel` is not a gpytorch kernel, or `frequencies` is not a rule.
        NotImplementedError: the spectrum of the kernel is not registered.
        ValueError: the terms have different numbers of outputs, or the number of inputs is unknown.

    Example:
        A curl-free kernel with 4096 random frequencies, which have a cosine and a sine each:

        >>> import gpytorch, gp_orff, torch
        >>> exact = gp_orff.CurlFreeKernel(gpytorch.kernels.RBFKernel(), num_dims=2)
        >>> kernel = gp_orff.ORFFKernel(exact, gp_orff.MonteCarlo(4096, seed=0))
        >>> kernel.num_features
        8192
        >>> x = torch.rand(10, 2)
        >>> error = kernel(x).to_dense() - exact(x).to_dense()
        >>> bool(error.abs().max() < 0.1 * exact(x).to_dense().max())
        True
    """

    is_field = False

    def __init__(self, kernel: Kernel, frequencies: Rule, *, num_dims: int | None = None):
        super().__init__()
        example = "ORFFKernel(gpytorch.kernels.RBFKernel(), gp_orff.MonteCarlo(256), num_dims=2)"
        summands = checked_terms(kernel, "ORFFKernel", example)
        check_rule(frequencies, "ORFFKernel expects a frequency rule second")
        num_dims = infer_num_dims(summands, num_dims)
        self.num_outputs = summands[0].num_outputs
        self.base_kernel = kernel
        self.rule, self._num_dims = frequencies, num_dims
        self.frequencies = nn.ModuleList(draw(kernel, frequencies, num_dims))
        self._num_inputs, self._all_columns = input_columns(summands, num_dims)

    @property
    def num_features(self) -> int:
        """F, the number of features, which is the number of columns of Φ(x)."""
        return self._expansion(self._num_inputs).num_features

    @property
    def is_stationary(self) -> bool:
        """Whether K(x, z) depends on x − z only, so that no term is a dot-product kernel."""
        spectra = (density for term in terms(self.base_kernel) for density in spectra_of(term))
        return all(density.is_stationary for density in spectra)

    def _expansion(self, num_inputs: int) -> Expansion:
        return expand(self.base_kernel, self.frequencies, num_inputs)

    def truncated(self, expansion: Expansion | None = None) -> Float[Tensor, "p p"] | None:
        """Return δ, (p, p), the variance that a grid truncates at every point.

        The result is None for other rules, and without diagonal correction.

        Args:
            expansion: the features of this kernel, if they are already computed.
        """
        parts = self.base_kernel, self.frequencies, (), expansion
        variances = truncated_variance(Identity(), *parts)
        return None if variances is None else variances[0]

    def forward(
        self,
        x1: Float[Tensor, "*b n d"],
        x2: Float[Tensor, "*b m d"],
        diag: bool = False,
        last_dim_is_batch: bool = False,
    ) -> FeatureCovariance | Float[Tensor, "*b n*p"]:
        """Return the covariance (*b, n·p, m·p) between the points `x1` and `x2`, lazily.

        Row k·p + i is output i at point k of `x1`, both counted from 0. If `x2` is `x1`, the
        covariance includes the variance that a grid truncates.

        Args:
            x1: points (*b, n, d).
            x2: points (*b, m, d).
            diag: whether to return only the diagonal (*b, n·p); it needs m = n.
            last_dim_is_batch: must be False.

        Returns:
            A `LinearOperator`, or a tensor if `diag` is True.

        Raises:
            ValueError: `last_dim_is_batch` is True; the points have another number of columns than
                d; there are no points; a point contains NaN or infinity, or is outside the domain
                of a grid.
            TypeError: the points have another dtype than the hyperparameters.
        """
        if last_dim_is_batch:
            raise ValueError(
                "ORFFKernel expects last_dim_is_batch=False, got last_dim_is_batch=True; use "
                "active_dims"
            )
        self._check_inputs(x1)
        if x2 is not x1:
            self._check_inputs(x2)
        check_domain(self.base_kernel, self.frequencies, x1, x2)
        expansion = self._expansion(x1.shape[-1])
        covariance = FeatureCovariance.of(x1, x2, expansion)
        truncated = self.truncated(expansion)
        if truncated is not None and covariance.symmetric:
            covariance = NoisyFeatureCovariance.of(covariance, truncated.to(x1.dtype))
        return covariance.diagonal() if diag else covariance

    def features(self, x: Float[Tensor, "*b N d"]) -> Float[Tensor, "*b N*p F"]:
        """Return the dense feature matrix Φ(x), (N·p, F), for example for a linear model.

        If the weights θ (F,) are standard normal, Φ(x)θ is a sample of the field. The covariance
        `kernel(x, z)` of this kernel is Φ(x) Φ(z)ᵀ. There is one exception: with a `Grid`,
        `kernel(x)` also has the truncated variance on its diagonal blocks, unless
        `diagonal_correction=False`.

        Ridge regression on Φ with the penalty σ²‖θ‖² gives the posterior mean of a GP with the
        noise variance σ². Pass the observations y (N, p) as `y.reshape(-1)`.

        Source: Brault et al. 2016, Section 2.3.

        Args:
            x: points (*b, N, d).

        Returns:
            (*b, N·p, F) in the dtype of x, computed in float64, differentiable in x and in the
            hyperparameters. Row n·p + i is output i at point n.

        Raises:
            TypeError: the points have another dtype than the hyperparameters.
            ValueError: the points have another number of columns than d; there are no points; a
                point contains NaN or infinity, or is outside the domain of a grid.

        Example:
            >>> import gp_orff, torch
            >>> exact = gp_orff.CurlFreeKernel(num_dims=2)
            >>> kernel = gp_orff.ORFFKernel(exact, gp_orff.MonteCarlo(64))
            >>> x, z = torch.rand(5, 2), torch.rand(3, 2)
            >>> phi = kernel.features(x)
            >>> phi.shape
            torch.Size([10, 128])
            >>> product = phi @ kernel.features(z).mT
            >>> torch.allclose(product, kernel(x, z).to_dense(), atol=1e-5)
            True
        """
        return self.feature_operator(x).to_dense()

    def feature_operator(self, x: Float[Tensor, "*b N d"]) -> FeatureOperator:
        """Return the feature matrix Φ(x) as a `LinearOperator`, without storing its N·p rows.

        The products are `phi @ theta` (N·p, m) for `theta` (F, m), and `phi.mT @ y` (F, m) for `y`
        (N·p, m). Iterative solvers need only these products. Pass the vectors of a field (N, p) as
        a column, `y.reshape(-1, 1)`.

        A product computes the M cosines and sines of every point, with M = 2D for D frequencies,
        and multiplies sums of them by the directions of the features. The cost is N·M·p + F·p
        operations, or N·M·p + M·r·p for separable kernels of rank r. On a grid, a fast Fourier
        transform replaces the N·M·p operations.

        Source: Brault et al. 2016, Appendix D.1.2, Tables 1 and 2. There, P is the matrix of the p
        rows of one point. For curl-free kernels, P* P in the paper has ‖ω_k‖² instead of
        ⟨ω_j, ω_k⟩, and there is a similar error for divergence-free kernels. Here
        `phi.mT @ (phi @ theta)` has the correct terms.

        Args:
            x: points (*b, N, d).

        Returns:
            An operator of shape (*b, N·p, F) with the entries of `features(x)`, differentiable in x
            and in the hyperparameters.

        Raises:
            TypeError: the points have another dtype than the hyperparameters.
            ValueError: the points have another number of columns than d; there are no points; a
                point contains NaN or infinity, or is outside the domain of a grid.

        Example:
            Solve the ridge regression (ΦᵀΦ + I) θ = Φᵀy by conjugate gradients. Pass a tolerance,
            because `linear_cg` otherwise stops early:

            >>> import gp_orff, torch
            >>> from linear_operator.utils import linear_cg
            >>> exact = gp_orff.CurlFreeKernel(num_dims=2)
            >>> kernel = gp_orff.ORFFKernel(exact, gp_orff.MonteCarlo(64)).double()
            >>> x = torch.rand(1000, 2, dtype=torch.float64)
            >>> phi = kernel.feature_operator(x)
            >>> phi.shape
            torch.Size([2000, 128])
            >>> right = phi.mT @ torch.cos(3 * x).flatten().unsqueeze(-1)
            >>> with torch.no_grad():
            ...     theta = linear_cg(
            ...         lambda v: phi.mT @ (phi @ v) + v, right, tolerance=1e-5
            ...     )
            >>> fitted = (phi @ theta).reshape(1000, 2)
        """
        self._check_inputs(x)
        check_domain(self.base_kernel, self.frequencies, x)
        return FeatureOperator.of(x, self._expansion(x.shape[-1]))

    def phases(self, x: Float[Tensor, "*b N d"]) -> Float[Tensor, "*b N D"]:
        """Return the inner products ⟨ω, x⟩ of points with all D frequencies ω.

        They are the arguments of the features cos⟨ω, x⟩ and sin⟨ω, x⟩. With the matrix Ω (D, d) of
        frequencies, the result is x Ωᵀ. To get Ωᵀ, use `kernel.phases(torch.eye(d))`. `Fastfood`
        and similar rules compute the inner products in O(D log d) operations for each point,
        without the matrix Ω (Le et al. 2013, Section 4.2).

        Args:
            x: points (*b, N, d).

        Returns:
            (*b, N, D) in the dtype of x, computed in float64, differentiable in x and in the
            lengthscales. The terms of a sum follow each other. The frequency ω = 0 of a constant
            term is first. Frequencies that several terms share, as on a `Grid`, occur only once.

        Raises:
            TypeError: the points have another dtype than the hyperparameters.
            ValueError: the points have another number of columns than d; there are no points; a
                point contains NaN or infinity.

        Example:
            >>> import gp_orff, gpytorch, torch
            >>> exact = gpytorch.kernels.RBFKernel(ard_num_dims=3)
            >>> kernel = gp_orff.ORFFKernel(exact, gp_orff.MonteCarlo(64))
            >>> omega = kernel.phases(torch.eye(3)).mT
            >>> x = torch.rand(5, 3)
            >>> torch.allclose(kernel.phases(x), x @ omega.mT, atol=1e-5)
            True
        """
        self._check_inputs(x)
        expansion = self._expansion(x.shape[-1]).double()
        return expansion.phi.inner_products(x.double()).to(x.dtype)

    def accuracy(self) -> list[GridAccuracy | SampleAccuracy]:
        """Return the accuracy of the frequencies at the current hyperparameters.

        Returns:
            A list with one entry for each term of the kernel. The type depends on the rule:

            - For a grid, a `GridAccuracy`. Its numbers are fractions of the variance of the term.
              `truncated` is the variance beyond the largest frequencies. `aliasing` is an estimate
              of the error due to the spacing. `tolerance` is the tolerance of the grid, which is
              larger than that of the rule if the number of features is limited.
            - For a random rule, a `SampleAccuracy` with `num_frequencies`, D, and
              `effective_sample_size`, (Σ v_k)²/Σ v_k². Here v_k is the variance of frequency k. If
              the effective sample size is far below D, few frequencies have most of the variance.
              In this case, use `measure="trace"`, or a `sampler` whose density is closer to
              S tr A, with the spectral density S and the spectral matrix A. For the error of the
              kernel, see `gp_orff.compare_with_exact` and `gp_orff.bounds`. If terms share
              frequencies, only the frequencies drawn from the term itself are included.
            - For `GaussHermite`, there are no entries.

        Example:
            >>> import gp_orff
            >>> kernel = gp_orff.CurlFreeKernel(num_dims=2)
            >>> kernel = gp_orff.ORFFKernel(kernel, gp_orff.MonteCarlo(64))
            >>> kernel.accuracy()[0].num_frequencies
            64
        """
        return accuracy(self.base_kernel, self.frequencies)

    def redraw(self) -> "ORFFKernel":
        """Choose the frequencies again by the same rule, for the current hyperparameters.

        Call this method after a lengthscale has left the range of a `Grid`. A random rule has a
        fixed seed and draws the same frequencies again, with two exceptions. For a
        `DotProductKernel`, the frequencies depend on the coefficients. For a sum with
        `shared=True`, they depend on the variances of the terms. Call this method if training has
        changed these hyperparameters much.

        Returns:
            This kernel, which is changed in place.

        Raises:
            ValueError: the rule has no frequencies for the current hyperparameters, for example
                because a grid would need too many features.
        """
        self._take(draw(self.base_kernel, self.rule, self._num_dims))
        return self

    def follow_lengthscales(self) -> None:
        """Build a new grid if a lengthscale has left the range of the current grid.

        An `ExactGP` calls this method before every step of its training. If no grid can be built
        for the current lengthscales, the frequencies do not change.
        """
        summands, rule = terms(self.base_kernel), self.rule
        pairs = zip(self.frequencies, summands, strict=True)
        if all(draw.ratio_outside_range(spectra_of(term)) is None for draw, term in pairs):
            return
        with warnings.catch_warnings():  # lengthscales outside the range give a warning
            warnings.simplefilter("ignore", GridWarning)
            present = self.num_features
        if isinstance(rule, Grid) and rule.max_features is None:
            rule = replace(rule, max_features=max(MOST_DENSE, present))
        try:
            with np.errstate(over="ignore", invalid="ignore"):  # a line search may be far off
                draws = draw(self.base_kernel, rule, self._num_dims)
        except GridBudgetError:
            return
        if list(map(type, draws)) != list(map(type, self.frequencies)):
            return
        self._take(draws)
        if rule is not self.rule and draws[0].shared.tolerance > 1.01 * rule.tolerance:
            warnings.warn(
                f"a lengthscale has become so short in training that {rule.max_features} features "
                f"do not suffice for a grid of tolerance {rule.tolerance:g}; its tolerance is now "
                f"{draws[0].shared.tolerance.item():.1g}. Pass a larger max_features= or "
                "tolerance= to Grid",
                GridWarning,
                stacklevel=2,
            )

    def _take(self, draws: Sequence[Draw]) -> None:
        device = next(self.frequencies.buffers()).device
        self.frequencies = nn.ModuleList(draws).train(self.training)
        self.frequencies.to(device=device, dtype=self.dtype)

    def _check_inputs(self, x: Tensor) -> None:
        check_inputs(self, x)
        expected, got = self._num_inputs, x.shape[-1]
        if got < expected or (self._all_columns and got != expected):
            raise ValueError(
                f"ORFFKernel expects inputs with {expected} columns, got {got}; select columns "
                "with active_dims"
            )
