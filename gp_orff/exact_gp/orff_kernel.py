"""`ORFFKernel`: the features of a kernel as a gpytorch kernel."""

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
    r"""Approximate a kernel by operator-valued Fourier features (ORFF), for any gpytorch `ExactGP`.

    K(x, z) ≈ Φ(x) Φ(z)ᵀ, where Φ(x) is (p, F) for p outputs and F features. Use this kernel instead
    of the exact one. The model, its likelihood and `ExactMarginalLogLikelihood` do not change.
    If F < N·p for N points, training and prediction cost N·p·F² instead of (N·p)³ operations, and
    no (N·p, N·p) or (N·p, F) matrix is stored. If F > N·p, the (N·p, N·p) matrix is factorised, as
    for the exact kernel.

    The frequencies are chosen when this kernel is built. Random frequencies scale with the present
    lengthscales in every evaluation. Frequencies of a `Grid` are fixed, and their weights depend on
    the hyperparameters. While an `ExactGP` is trained, a new grid is built if a lengthscale has
    left the range of the grid. Optimisers may therefore start anywhere. Computations use float64. A
    float32 model takes and returns float32, but runs no faster.

    Brault et al. 2016, Section 2.3; Minh 2016, Section 3.2.

    Args:
        kernel: the kernel to approximate: a curl-free, divergence-free or Helmholtz kernel, a
            `SeparableKernel`, a gpytorch `MultitaskKernel`, a scalar kernel, or sums, products and
            scaled forms of them. Scalar kernels are stationary ones, or, with a random rule,
            `LinearKernel`, `PolynomialKernel` and `DotProductKernel`. Its parameters are not
            copied: they are trained through the features.
        frequencies: the rule that chooses the frequencies, such as `gp_orff.MonteCarlo(256)`.
        num_dims: d, the number of input columns; needed if the kernel does not determine it (a
            scalar kernel without ARD or active_dims).

    Attributes:
        frequencies: a `ModuleList` with the frequencies of each term of the kernel. A sum of two
            kernels has two terms. Any other kernel is one term.
        num_outputs: p, the number of outputs.
        num_features: F, the number of features.

    Raises:
        TypeError: `kernel` is not a gpytorch kernel, or `frequencies` is not a rule.
        NotImplementedError: the spectrum of the kernel is not registered.
        ValueError: the terms have different numbers of outputs, or the number of inputs is unknown.

    Example:
        >>> import gpytorch, gp_orff, torch
        >>> exact = gp_orff.CurlFreeKernel(gpytorch.kernels.RBFKernel(), num_dims=2)
        >>> kernel = gp_orff.ORFFKernel(exact, gp_orff.MonteCarlo(4096, seed=0))
        >>> kernel.num_features  # a cosine and a sine for each frequency
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
        """F, the number of features: the columns of Φ(x)."""
        return self._expansion(self._num_inputs).num_features

    @property
    def is_stationary(self) -> bool:
        """Whether K(x, z) depends on x − z only: not if a term is a dot-product kernel."""
        spectra = (density for term in terms(self.base_kernel) for density in spectra_of(term))
        return all(density.is_stationary for density in spectra)

    def _expansion(self, num_inputs: int) -> Expansion:
        return expand(self.base_kernel, self.frequencies, num_inputs)

    def truncated(self, expansion: Expansion | None = None) -> Float[Tensor, "p p"] | None:
        """δ (p, p), the variance that a grid truncates at every point, of its `expansion`; None if
        none."""
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
        """K(x1, x2), lazily as a `LinearOperator`.

        Args:
            x1: points (*b, n, d).
            x2: points (*b, m, d).
            diag: return the diagonal (*b, n·p) only.
            last_dim_is_batch: not supported.

        Returns:
            The covariance (*b, n·p, m·p); between the same points, with the variance that a grid
            truncates.

        Raises:
            ValueError: `last_dim_is_batch` is True, or inputs with a wrong number of columns.
        """
        if last_dim_is_batch:
            raise ValueError("ORFFKernel does not take last_dim_is_batch=True; use active_dims")
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
        """The dense feature matrix Φ(x) (N·p, F), for few points or your own linear model.

        Φ(x)θ with weights θ ~ N(0, I_F) is a draw of the field, and K̃(x, z) = Φ(x) Φ(z)ᵀ the
        covariance `kernel(x, z)` of this kernel. Ridge regression on Φ with the penalty σ²‖θ‖² has
        the posterior mean of a GP with noise variance σ²; y (N, p) goes with it as
        `y.reshape(-1)`. One exception: on a `Grid`, `kernel(x)` of points with themselves also has
        the truncated variance on its diagonal blocks, unless `diagonal_correction=False`.

        Brault et al. 2016, Section 2.3.

        Args:
            x: points (*b, N, d).

        Returns:
            (*b, N·p, F) in the dtype of x, computed in float64, differentiable in x and in the
            hyperparameters. Row n·p + i is output i at point n.

        Raises:
            TypeError: inputs of another dtype than the hyperparameters.
            ValueError: inputs with a wrong number of columns, NaN or infinity, no points, or points
                outside the domain of a grid.

        Example:
            >>> import gp_orff, torch
            >>> exact = gp_orff.CurlFreeKernel(num_dims=2)
            >>> kernel = gp_orff.ORFFKernel(exact, gp_orff.MonteCarlo(64))
            >>> x, z = torch.rand(5, 2), torch.rand(3, 2)
            >>> phi = kernel.features(x)
            >>> phi.shape
            torch.Size([10, 128])
            >>> torch.allclose(
            ...     phi @ kernel.features(z).mT, kernel(x, z).to_dense(), atol=1e-5
            ... )
            True
        """
        return self.feature_operator(x).to_dense()

    def feature_operator(self, x: Float[Tensor, "*b N d"]) -> FeatureOperator:
        """Φ(x) as a `LinearOperator`, for products without storing a matrix of N rows.

        It has the entries of `features(x)`. `phi @ theta` is (N·p, m) for `theta` (F, m), and
        `phi.mT @ y` is (F, m) for `y` (N·p, m). Iterative solvers need only these products. Pass
        the vectors of a field (N, p) as a column: `y.reshape(-1, 1)`.

        A product computes the M cosines and sines of every point (M = 2D if no columns are shared),
        and applies the directions of the features to their sums. The cost is N·M·p + F·p
        operations, or N·M·p + M·r·p for separable kernels of rank r. On a grid, a fast Fourier
        transform computes the first term.

        Brault et al. 2016, Appendix D.1.2, Tables 1 and 2, where P is the p rows of one point. For
        curl-free kernels, P* P in the paper has ‖ω_k‖² instead of ⟨ω_j, ω_k⟩, and likewise for
        divergence-free kernels. Here `phi.mT @ (phi @ theta)` has the correct terms.

        Args:
            x: points (*b, N, d).

        Returns:
            An operator of shape (*b, N·p, F) with the entries of `features(x)`, differentiable in x
            and in the hyperparameters.

        Raises:
            TypeError: as for `features`.
            ValueError: as for `features`.

        Example:
            A ridge regression by conjugate gradients on (ΦᵀΦ + I) θ = Φᵀy. By default `linear_cg`
            stops early, so it needs a tolerance:

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
        """The inner products x Ωᵀ of points with all D frequencies ω.

        They are the arguments of the features cos⟨ω, x⟩ and sin⟨ω, x⟩. `Fastfood` and its siblings
        compute them in O(D log d) operations for each point, without the matrix Ω;
        `kernel.phases(torch.eye(d))` is Ωᵀ.

        Le et al. 2013, Section 4.2.

        Args:
            x: points (*b, N, d).

        Returns:
            (*b, N, D) in the dtype of x, computed in float64, differentiable in x and in the
            lengthscales. The frequencies of the terms of a sum follow each other. A constant term
            has the frequency ω = 0, which comes first. Frequencies that several terms share, as on
            a `Grid`, are present once.

        Raises:
            TypeError: inputs of another dtype than the hyperparameters.
            ValueError: inputs with a wrong number of columns, NaN or infinity, or no points.

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
        """The accuracy of the frequencies at the present hyperparameters, for each term.

        Returns:
            One entry for each term of the kernel, in order. The type depends on the rule:

            - A grid: `GridAccuracy`, with fractions of the variance of the term. `truncated` is the
              variance beyond the largest frequencies of the grid. `aliasing` is an estimate of the
              error from the spacing. `tolerance` is the tolerance of the grid, which `max_features`
              may have raised.
            - A random rule: `SampleAccuracy`, with `num_frequencies`, D, and
              `effective_sample_size` (Σ v_k)²/Σ v_k², where v_k is the variance of frequency k. It
              is D if all variances are equal. If it is far below D, few frequencies have most of
              the variance: use `measure="trace"`, or a `sampler` closer to S tr A. It is not an
              error of the kernel; for the error see `gp_orff.compare_with_exact` and
              `gp_orff.bounds`. If terms share their frequencies (`shared=True`, `LCMKernel`), only
              frequencies drawn from the term itself are included.
            - `GaussHermite`: the list is empty.
        """
        return accuracy(self.base_kernel, self.frequencies)

    def redraw(self) -> "ORFFKernel":
        """Choose the frequencies again by the same rule, at the present hyperparameters.

        Call this method after the lengthscales of a `Grid` have left their range. A random rule has
        a fixed seed and draws the same frequencies again. For a `DotProductKernel`, it chooses
        harmonics by the present coefficients, which training may have changed much.

        Returns:
            This kernel, changed in place.
        """
        self._take(draw(self.base_kernel, self.rule, self._num_dims))
        return self

    def follow_lengthscales(self) -> None:
        """Redraw the frequencies if a lengthscale has left their range, as an `ExactGP` does before
        every step of its training. Where no such grid can be built, they stay."""
        summands, rule = terms(self.base_kernel), self.rule
        pairs = zip(self.frequencies, summands, strict=True)
        if all(draw.ratio_outside_range(spectra_of(term)) is None for draw, term in pairs):
            return
        with warnings.catch_warnings():  # of the range that is left
            warnings.simplefilter("ignore", GridWarning)
            present = self.num_features
        if isinstance(rule, Grid) and rule.max_features is None:
            rule = replace(rule, max_features=max(MOST_DENSE, present))
        try:
            with np.errstate(over="ignore", invalid="ignore"):  # lengthscales of a line search
                draws = draw(self.base_kernel, rule, self._num_dims)
        except GridBudgetError:
            return
        if list(map(type, draws)) != list(map(type, self.frequencies)):
            return
        self._take(draws)
        if rule is not self.rule and draws[0].shared.tolerance > 1.01 * rule.tolerance:
            warnings.warn(
                f"a lengthscale has become so short in training that {rule.max_features} features "
                f"do not suffice for a grid of tolerance {rule.tolerance:g}: it is "
                f"{draws[0].shared.tolerance.item():.1g} now; give Grid a max_features= or a "
                "tolerance= that suits the lengthscale",
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
