"""Separable kernels k(x, z) L Lᵀ with a root L of any rank."""

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

    The p outputs are f(x) = L g(x), where g is r independent functions with the scalar kernel k.
    L Lᵀ (p, p) is the covariance of the outputs at one point if k(x, x) = 1. D random frequencies
    make 2D·r features; with gpytorch's `MultitaskKernel` they make 2D·p, whatever its rank.

    The covariance matrix of points x (N, d) is (N·p, N·p). Its rows are ordered point by point: row
    n·p + i is output i at point n.

    Typical roots:

    - Outputs are the nodes of a graph with the Laplacian M: L Lᵀ = M†, the pseudoinverse. Compute
      the root from the eigenvectors of M†, as in the example. Its rank is p minus the number of
      connected components. The outputs of each component then sum to zero. For a common signal, add
      a second term whose root is `torch.ones(p, 1)`.
    - Classes are coded by the corners of a simplex: L is (p, p − 1), with one corner for each
      class.
    - All outputs have one signal: L is (p, 1), the strength of the signal in each output.
    - The relations are unknown: L is an `nn.Parameter` (p, r) of the rank you choose. Start it from
      random numbers, because equal columns would stay equal.

    If r < p, p − r linear combinations of the outputs are zero in this prior. If the data
    contradict this, error bars are too small: use a larger r, a second term, or `MultitaskKernel`,
    which adds a separate variance to each output.

    Brault et al. 2016, Definition 2.1 and Example 2.1; Minh 2016, Example 1.

    Args:
        base_kernel: the scalar kernel k, an instance of a gpytorch kernel, including sums,
            products, scaled and constant kernels. Its `active_dims` refer to the columns that the
            `active_dims` of this kernel select.
        root: L, of shape (p, r), or (\*b, p, r) for a batch. An `nn.Parameter` is trained, as the
            parameter `root` of this kernel. Any other tensor is copied and fixed. To train a common
            variance, make `base_kernel` a `ScaleKernel`; `VectorFieldGP` adds one to a term with a
            fixed root and no scale. A fixed root is used in the dtype of `base_kernel`. A trained
            root must have this dtype.
        active_dims: the input columns that this kernel uses; all columns if None.

    Raises:
        TypeError: `base_kernel` is not an instance of a kernel, or `root` is not a tensor of
            floating-point numbers.
        ValueError: `base_kernel` has several outputs; `root` is not a matrix (or a batch of
            matrices) with at least one row and one column; `root` has NaN or infinite values, or is
            zero.

    Example:
        Three tasks in a row, the graph 1 – 2 – 3:

        >>> import gpytorch, gp_orff, torch
        >>> laplacian = torch.tensor(
        ...     [[1.0, -1.0, 0.0], [-1.0, 2.0, -1.0], [0.0, -1.0, 1.0]]
        ... )
        >>> values, vectors = torch.linalg.eigh(laplacian)
        >>> positive = values > 1e-6 * values.max()
        >>> # root @ root.mT is L†
        >>> root = vectors[:, positive] / values[positive].sqrt()
        >>> torch.allclose(
        ...     root @ root.mT, torch.linalg.pinv(laplacian, rtol=1e-6), atol=1e-6
        ... )
        True
        >>> kernel = gp_orff.SeparableKernel(gpytorch.kernels.RBFKernel(), root)
        >>> kernel(torch.rand(5, 2)).shape
        torch.Size([15, 15])
        >>> features = gp_orff.ORFFKernel(
        ...     kernel, gp_orff.MonteCarlo(10), num_dims=2
        ... )
        >>> features.num_features  # 2 · 10 columns, r = 2 features each
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
        """This kernel with the base kernel and the root expanded to the batch shape `sizes`."""
        new = super().expand_batch(*sizes)
        return new._with_root(self.root.expand(*new.base_kernel.batch_shape, -1, -1))

    def _with_root(self, root: Float[Tensor, "*b p r"]) -> "SeparableKernel":
        """This copy of a kernel, with another root: trained if the present one is."""
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
        """The covariance (*b, n·p, m·p) between the points `x1` (*b, n, d) and `x2` (*b, m, d).

        Row k·p + i is output i at point k of `x1`, both counted from 0. Columns are ordered in the
        same way, by the points of `x2`. With `diag`, only the diagonal (*b, n·p) is returned.

        Raises:
            ValueError: `last_dim_is_batch` is True; `x1` or `x2` has no points, or contains NaN or
                infinity.
            TypeError: inputs of another dtype than the hyperparameters.
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
            f"SeparableKernel expects a tensor of floating-point numbers as root, got {got}; for "
            "instance torch.as_tensor(root, dtype=torch.float64), or a torch.nn.Parameter of it to "
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
            "infinite; a pseudoinverse has only eigenvectors of eigenvalues that are not zero"
        )
    if not root.any():
        raise ValueError(
            "SeparableKernel expects a root that is not zero, got only zeros: no output would "
            "vary, and no gradient would change that; start from small random numbers"
        )


@inner_terms.register
def _(kernel: SeparableKernel) -> list[Term]:
    summands = terms(kernel.base_kernel)
    root = as_real_tensor(kernel.root, _ROOT)  # which can be assigned
    mixing = Mixing(root.to(summands[0].outputscale))  # one for all: they share columns
    return [term.with_factor(mixing) for term in summands]
