"""`ORFFKernel`: the features of a kernel as a gpytorch kernel."""

from gpytorch.kernels import Kernel
from jaxtyping import Float
from torch import Tensor, nn

from gp_orff.exact_gp.prior_covariance import FeatureCovariance, NoisyFeatureCovariance
from gp_orff.features.accuracy import GridAccuracy, accuracy
from gp_orff.features.assemble import check_domain, draw, expand
from gp_orff.features.expansion import Expansion
from gp_orff.features.frequencies.rule import Rule
from gp_orff.features.truncation import truncated_variance
from gp_orff.kernels.base import WrapperKernel, check_inputs
from gp_orff.kernels.tree import infer_num_dims, input_columns, terms
from gp_orff.symbols.base import Identity


class ORFFKernel(WrapperKernel):
    r"""Operator-valued Fourier features of a kernel, for any gpytorch `ExactGP`.

    K(x, z) ≈ Φ(x) Φ(z)ᵀ with the features Φ of a kernel tree: curl-free, divergence-free,
    Helmholtz, gpytorch's `MultitaskKernel`, scalar kernels, their sums and scaled forms. The model,
    its likelihood and `ExactMarginalLogLikelihood` stay as they are. With F features, N points cost
    N·F² instead of (N·p)³ in training *and* in prediction, and no N·p × N·p or N·p × F matrix is
    held. If N·p is smaller than F, the N·p × N·p matrix is factorised instead. The algebra is
    float64; in a float32 model the inputs, the hyperparameters and the results are float32, and it
    is not faster.

    Brault et al. 2016 (operator-valued features); Minh 2016, Theorem 3.

    Args:
        kernel: the kernel to approximate. Its hyperparameters stay the same modules and are trained
            through the features.
        frequencies: a rule, such as `gp_orff.MonteCarlo(256, seed=0)`.
        num_dims: d, the number of input columns; needed if the kernel does not determine it (a
            scalar kernel without ARD or active_dims).

    Attributes:
        frequencies: the drawn frequencies, one `Draw` for each leaf of the kernel tree.
        num_outputs: p, the number of outputs.
        num_features: F, the number of features.

    Raises:
        TypeError: `kernel` is not a gpytorch kernel, or `frequencies` is not a rule.
        NotImplementedError: the spectrum of the kernel is not registered.
        ValueError: terms with different numbers of outputs, or an unknown number of inputs.

    Example:
        >>> import gpytorch, gp_orff
        >>> kernel = gp_orff.CurlFreeKernel(gpytorch.kernels.RBFKernel(ard_num_dims=2), num_dims=2)
        >>> kernel = gp_orff.ORFFKernel(kernel, gp_orff.MonteCarlo(256, seed=0))
        >>> kernel.num_features
        512
    """

    def __init__(self, kernel: Kernel, frequencies: Rule, *, num_dims: int | None = None):
        super().__init__()
        if not isinstance(kernel, Kernel):
            raise TypeError(
                f"ORFFKernel expects an instance of a gpytorch kernel first, got {kernel!r}; use, "
                "for instance, ORFFKernel(gpytorch.kernels.RBFKernel(), "
                "gp_orff.MonteCarlo(256), num_dims=2)"
            )
        if isinstance(frequencies, type) or not hasattr(frequencies, "draw"):
            raise TypeError(
                f"ORFFKernel expects a frequency rule second, got {frequencies!r}; use, for "
                "instance, gp_orff.MonteCarlo(256)"
            )
        summands = terms(kernel)
        num_dims = infer_num_dims(summands, num_dims)
        outputs = sorted({term.num_outputs for term in summands})
        if len(outputs) != 1:
            raise ValueError(
                f"ORFFKernel expects terms with one number of outputs, got {outputs}; wrap scalar "
                "kernels in gpytorch.kernels.MultitaskKernel"
            )
        self.num_outputs = outputs[0]
        self.base_kernel = kernel
        self.rule, self._num_dims = frequencies, num_dims
        self.frequencies = nn.ModuleList(draw(kernel, frequencies, num_dims))
        self._num_inputs, self._all_columns = input_columns(summands, num_dims)

    @property
    def num_features(self) -> int:
        """F, the number of features."""
        return self._expansion(self._num_inputs).num_features

    @property
    def is_stationary(self) -> bool:
        """True: K(x, z) depends on x − z only."""
        return True

    def num_outputs_per_input(self, x1: Tensor, x2: Tensor) -> int:
        """p, the number of outputs, whatever the inputs `x1` (n, d) and `x2` (m, d)."""
        return self.num_outputs

    def _expansion(self, num_inputs: int) -> Expansion:
        return expand(self.base_kernel, self.frequencies, num_inputs)

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
        truncated = truncated_variance(
            Identity(), self.base_kernel, self.frequencies, (), expansion
        )
        if truncated is not None and covariance.symmetric:
            covariance = NoisyFeatureCovariance.of(covariance, truncated[0].to(x1.dtype))
        return covariance.diagonal() if diag else covariance

    def accuracy(self) -> list[GridAccuracy]:
        """The accuracy of a `Grid` for each term of the kernel, at the present hyperparameters."""
        return accuracy(self.base_kernel, self.frequencies)

    def redraw(self) -> "ORFFKernel":
        """Draw the frequencies anew at the present hyperparameters; returns the kernel itself."""
        device = next(self.frequencies.buffers()).device
        self.frequencies = nn.ModuleList(draw(self.base_kernel, self.rule, self._num_dims))
        self.frequencies.to(device=device, dtype=self.dtype)
        return self

    def _check_inputs(self, x: Tensor) -> None:
        check_inputs(self, x)
        expected, got = self._num_inputs, x.shape[-1]
        if got < expected or (self._all_columns and got != expected):
            raise ValueError(
                f"ORFFKernel expects inputs with {expected} columns, got {got}; select columns "
                "with active_dims"
            )
