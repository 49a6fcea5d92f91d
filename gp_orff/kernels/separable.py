"""Separable kernels k(x, z) L Lᵀ with a root L of any rank, fixed or trained."""

import torch
from gpytorch.kernels import Kernel
from jaxtyping import Float
from linear_operator import to_dense
from linear_operator.operators import KroneckerProductLinearOperator
from torch import Tensor, nn

from gp_orff.kernels.base import (
    WrapperKernel,
    as_real_tensor,
    check_base_kernel,
    check_points,
    check_scalar,
)
from gp_orff.kernels.tree import Mixing, Term, inner_terms, num_outputs, terms

_ROOT = "the root L of SeparableKernel"


class SeparableKernel(WrapperKernel):
    r"""Separable kernel K(x, z) = k(x, z) L Lᵀ with a root L (p, r) that is fixed or trained.

    The p outputs are f(x) = L g(x), where g consists of r independent functions with the scalar
    kernel k. If k(x, x) = 1, the covariance of the outputs at one point is L Lᵀ (p, p). With D
    random frequencies, this kernel has 2D·r features. gpytorch's `MultitaskKernel` has 2D·p
    features for any rank.

    The covariance matrix of points x (N, d) is (N·p, N·p). Its rows are ordered point by point: row
    n·p + i is output i at point n.

    Choose the root as follows:

    - If the outputs are the nodes of a graph with the Laplacian M, use L Lᵀ = M†, the pseudoinverse
      of M. The example computes this root from the eigenvectors of M. Its rank r is p minus the
      number of connected components of the graph, and the outputs of each component sum to zero.
      For a common signal, add a second kernel with the root `torch.ones(p, 1)`.
    - If the outputs are classes, coded by the corners of a simplex, use L (p, p − 1) with one
      corner in each row. See `gp_orff.regression.simplex_codes`.
    - If all outputs share one signal, use L (p, 1) with the strength of the signal in each output.
    - If the relations are unknown, use an `nn.Parameter` (p, r) with a rank r that you choose.
      Start from random numbers, because equal columns would stay equal.

    If r < p, then p − r linear combinations of the outputs are zero under this prior. If the data
    contradict this, the error bars are too small. In this case, use a larger r, add a second
    kernel, or use `MultitaskKernel`, which adds a separate variance for each output.

    Source: Brault et al. 2016, Definition 2.1 and Example 2.1; Minh 2016, Example 1.

    Args:
        base_kernel: the scalar kernel k, an instance of a gpytorch kernel. Sums, products, scaled
            and constant kernels work too. Its `active_dims` count the columns that the
            `active_dims` of the separable kernel select.
        root: L, of shape (p, r), or (\*b, p, r) for a batch. An `nn.Parameter` is trained, and must
            have the dtype of `base_kernel`. Any other tensor is copied, converted to this dtype,
            and fixed. To train a common variance, pass a `ScaleKernel` as `base_kernel`.
            `VectorFieldGP` adds a `ScaleKernel` if the root is fixed and there is none.
        active_dims: the input columns that the kernel uses; all columns if None.

    Raises:
        TypeError: `base_kernel` is not an instance of a kernel, or `root` is not a tensor of
            floating-point numbers.
        ValueError: `base_kernel` has several outputs; `root` is not a matrix, or a batch of
            matrices, with at least one row and one column; `root` is zero, or contains NaN or
            infinity.

    Example:
        The root for three outputs in a row, the graph 1 – 2 – 3:

        >>> import gpytorch, gp_orff, torch
        >>> laplacian = torch.tensor(
        ...     [[1.0, -1.0, 0.0], [-1.0, 2.0, -1.0], [0.0, -1.0, 1.0]]
        ... )
        >>> values, vectors = torch.linalg.eigh(laplacian)
        >>> positive = values > 1e-6 * values.max()
        >>> root = vectors[:, positive] / values[positive].sqrt()
        >>> inverse = torch.linalg.pinv(laplacian, rtol=1e-6)
        >>> torch.allclose(root @ root.mT, inverse, atol=1e-6)
        True
        >>> kernel = gp_orff.SeparableKernel(gpytorch.kernels.RBFKernel(), root)
        >>> kernel(torch.rand(5, 2)).shape
        torch.Size([15, 15])
        >>> features = gp_orff.ORFFKernel(
        ...     kernel, gp_orff.MonteCarlo(10), num_dims=2
        ... )
        >>> features.num_features  # 2 D r with D = 10 and r = 2
        40

        A trained root of rank 1:

        >>> trained = torch.nn.Parameter(torch.ones(3, 1))
        >>> kernel = gp_orff.SeparableKernel(gpytorch.kernels.RBFKernel(), trained)
        >>> [name for name, _ in kernel.named_parameters()]
        ['root', 'base_kernel.raw_lengthscale']
    """

    def __init__(
        self,
        base_kernel: Kernel,
        root: Float[Tensor, "*b p r"] | nn.Parameter,
        *,
        active_dims: tuple[int, ...] | None = None,
    ):
        check_base_kernel("SeparableKernel", base_kernel)
        check_scalar("SeparableKernel", num_outputs(base_kernel), type(base_kernel).__name__)
        _check_root(root)
        super().__init__(active_dims=active_dims, batch_shape=root.shape[:-2])
        self.base_kernel = base_kernel
        if isinstance(root, nn.Parameter):
            self.register_parameter("root", root)
        else:
            self.register_buffer("root", root.detach().clone())

    @property
    def num_outputs(self) -> int:
        """p, the number of outputs."""
        return self.root.shape[-2]

    @property
    def is_stationary(self) -> bool:
        """Whether the base kernel is stationary."""
        return self.base_kernel.is_stationary

    def __getitem__(self, index) -> "SeparableKernel":
        shape = (*self.batch_shape, *self.root.shape[-2:])
        return super().__getitem__(index)._with_root(self.root.expand(shape)[index])

    def expand_batch(self, *sizes: torch.Size | int) -> "SeparableKernel":
        """Return a copy whose base kernel and root are expanded to the batch shape `sizes`."""
        new = super().expand_batch(*sizes)
        return new._with_root(self.root.expand(*new.base_kernel.batch_shape, -1, -1))

    def _with_root(self, root: Float[Tensor, "*b p r"]) -> "SeparableKernel":
        """Replace the root of this copy of a kernel, and keep whether it is trained."""
        if isinstance(self.root, nn.Parameter):
            root = nn.Parameter(root.detach(), requires_grad=self.root.requires_grad)
        self.root, self.batch_shape = root, root.shape[:-2]
        return self

    def forward(
        self,
        x1: Float[Tensor, "*b n d"],
        x2: Float[Tensor, "*b m d"],
        diag: bool = False,
        last_dim_is_batch: bool = False,
    ) -> KroneckerProductLinearOperator | Float[Tensor, "*b n*p"]:
        """Return the covariance matrix (*b, n·p, m·p) between the points `x1` and `x2`.

        Row k·p + i is output i at point k of `x1`, both counted from 0. Columns are ordered in the
        same way, by the points of `x2`.

        Args:
            x1: points (*b, n, d).
            x2: points (*b, m, d).
            diag: whether to return only the diagonal (*b, n·p); it needs m = n.
            last_dim_is_batch: must be False.

        Raises:
            ValueError: `last_dim_is_batch` is True; there are no points; a point contains NaN or
                infinity.
            TypeError: the points have another dtype than the hyperparameters.
        """
        check_points(self, None, x1, x2, last_dim_is_batch)
        k = to_dense(self.base_kernel(x1, x2, diag=diag))
        root = as_real_tensor(self.root, _ROOT).to(k)
        if diag:
            return (k.unsqueeze(-1) * root.square().sum(-1).unsqueeze(-2)).flatten(-2)
        return KroneckerProductLinearOperator(k, root @ root.mT)


def _check_root(root: Tensor) -> None:
    tensor = isinstance(root, Tensor)
    if not tensor or not as_real_tensor(root, _ROOT).is_floating_point():
        got = root.dtype if tensor else type(root).__name__
        raise TypeError(
            f"SeparableKernel expects a tensor of floating-point numbers as root, got {got}; pass "
            "torch.as_tensor(root, dtype=torch.float64), or a torch.nn.Parameter of this tensor to "
            "train it"
        )
    if root.dim() < 2 or 0 in root.shape[-2:]:
        raise ValueError(
            "SeparableKernel expects a root of shape (p, r), with a row for each of the p outputs "
            f"and at least one column, got {tuple(root.shape)}; for one column pass "
            "root.unsqueeze(-1)"
        )
    invalid = int((~torch.isfinite(root)).sum())
    if invalid:
        raise ValueError(
            f"SeparableKernel expects finite numbers as root, got {invalid} that are NaN or "
            "infinite; to build the root of a pseudoinverse, omit eigenvectors with eigenvalue zero"
        )
    if not root.any():
        raise ValueError(
            "SeparableKernel expects a root that is not zero, got only zeros, with which all "
            "outputs and gradients are zero; start from small random numbers"
        )


@inner_terms.register
def _(kernel: SeparableKernel) -> list[Term]:
    summands = terms(kernel.base_kernel)
    root = as_real_tensor(kernel.root, _ROOT)  # checked again, because users can assign it
    mixing = Mixing(root.to(summands[0].outputscale))  # all terms share it, and their columns
    return [term.with_factor(mixing) for term in summands]
