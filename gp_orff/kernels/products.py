"""Products of a field kernel with a scalar kernel on other inputs, such as time."""

import torch
from gpytorch.kernels import Kernel, ProductKernel
from jaxtyping import Float
from linear_operator import to_dense
from torch import Tensor

from gp_orff.kernels.base import WrapperKernel
from gp_orff.kernels.tree import Term, inner_terms, products, terms


def require_field_products(kernel: Kernel) -> None:
    """Check that kernels with several outputs are multiplied by `FieldProductKernel`.

    Raises:
        ValueError: gpytorch's product, which multiplies matrices of different sizes.
    """
    for part in kernel.modules():
        if isinstance(part, ProductKernel) and inner_terms(part)[0].num_outputs > 1:
            names = " * ".join(type(factor).__name__ for factor in part.kernels)
            raise ValueError(
                "expected gp_orff.FieldProductKernel for a product with a kernel of several "
                f"outputs, got gpytorch's ProductKernel {names}, which multiplies matrices of "
                "different sizes; give FieldProductKernel(field_kernel, scalar_kernel)"
            )


class FieldProductKernel(WrapperKernel):
    """The product of a field kernel and a scalar kernel of other inputs, such as time.

    K((x, t), (z, s)) = K_field(x, z) · k(t, s). The expressions `field_kernel * scalar_kernel` and
    `scalar_kernel * field_kernel` make this kernel. Both kernels receive all d input columns, and
    each selects its own by its `active_dims`. The field kernel differentiates with respect to its
    own columns only. The covariance matrix of points x (N, d) is (N·p, N·p), ordered point by
    point: row n·p + i is output i at point n.

    Args:
        field_kernel: a kernel with p > 1 outputs.
        scalar_kernel: a kernel with one output.

    Raises:
        ValueError: `field_kernel` has one output only, or `scalar_kernel` has more than one.

    Example:
        A curl-free field in the columns 0 and 1, which changes with the time in column 2:

        >>> import gpytorch, gp_orff, torch
        >>> space = gp_orff.CurlFreeKernel(num_dims=2, active_dims=(0, 1))
        >>> time = gpytorch.kernels.MaternKernel(nu=1.5, active_dims=(2,))
        >>> kernel = gp_orff.FieldProductKernel(space, time)  # the same as space * time
        >>> kernel(torch.rand(5, 3)).shape
        torch.Size([10, 10])
    """

    def __init__(self, field_kernel: Kernel, scalar_kernel: Kernel):
        point = torch.zeros(1, 1)
        outputs = [
            kernel.num_outputs_per_input(point, point) for kernel in (field_kernel, scalar_kernel)
        ]
        if outputs[0] == 1 or outputs[1] != 1:
            raise ValueError(
                "FieldProductKernel expects a kernel with several outputs and one with a single "
                f"output, got {type(field_kernel).__name__} with {outputs[0]} and "
                f"{type(scalar_kernel).__name__} with {outputs[1]}"
            )
        super().__init__()
        self.num_outputs = outputs[0]
        self.field_kernel = field_kernel
        self.scalar_kernel = scalar_kernel

    @property
    def is_stationary(self) -> bool:
        """Whether both kernels are stationary."""
        return self.field_kernel.is_stationary and self.scalar_kernel.is_stationary

    def num_outputs_per_input(self, x1: Tensor, x2: Tensor) -> int:
        """p, the number of outputs at each of the points `x1` (n, d) and `x2` (m, d)."""
        return self.num_outputs

    def forward(
        self, x1: Float[Tensor, "*b n d"], x2: Float[Tensor, "*b m d"], diag: bool = False, **params
    ) -> Float[Tensor, "*b n*p m*p"] | Float[Tensor, "*b n*p"]:
        """The covariance matrix between the points `x1` (*b, n, d) and `x2` (*b, m, d).

        Rows and columns are point-major, n·p + i. With `diag`, only the diagonal, (*b, n·p).
        """
        field = to_dense(self.field_kernel(x1, x2, diag=diag, **params))
        scalar = to_dense(self.scalar_kernel(x1, x2, diag=diag, **params))
        if diag:
            return field * scalar.repeat_interleave(self.num_outputs, dim=-1)
        ones = torch.ones(
            self.num_outputs, self.num_outputs, dtype=field.dtype, device=field.device
        )
        return field * torch.kron(scalar, ones)


@inner_terms.register
def _(kernel: FieldProductKernel) -> list[Term]:
    return products(terms(kernel.field_kernel), terms(kernel.scalar_kernel))
