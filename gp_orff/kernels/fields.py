"""Exact operator-valued kernels: curl-free, divergence-free and their Helmholtz sum.

With a scalar stationary kernel k(x, z) = κ(s), s = ‖τ/ℓ‖², τ = x − z, Λ = diag ℓ⁻², u = Λτ,

    −∇∇ᵀk = −2κ′(s) Λ − 4κ″(s) u uᵀ .

The base kernel k is the kernel of the potential, used as it is, without hidden normalisation.
Matrices are point-major: row n·p + i is output i of point n, as gpytorch's
`MultitaskMultivariateNormal` expects.
"""

import math
from copy import deepcopy

from gpytorch.kernels import AdditiveKernel, Kernel, RBFKernel, ScaleKernel
from jaxtyping import Float
from torch import Tensor

from gp_orff.kernels.base import WrapperKernel, check_inputs
from gp_orff.kernels.closed_form import derivatives, radial_derivatives
from gp_orff.kernels.factors import Factor, Gradient, Solenoidal
from gp_orff.kernels.spectra.base import spectrum
from gp_orff.kernels.tree import Term, inner_terms, terms


class PotentialKernel(WrapperKernel):
    """A kernel of fields that derive from a potential with kernel `base_kernel`."""

    is_stationary = True
    minimum_dims = 1

    def __init__(
        self,
        base_kernel: Kernel | None = None,
        *,
        num_dims: int,
        active_dims: tuple[int, ...] | None = None,
    ):
        name = type(self).__name__
        base_kernel = RBFKernel() if base_kernel is None else base_kernel
        if not isinstance(base_kernel, Kernel):
            raise TypeError(
                f"{name} expects an instance of a gpytorch kernel as base_kernel, got "
                f"{base_kernel!r}; for instance {name}(gpytorch.kernels.RBFKernel(), num_dims=2)"
            )
        if isinstance(num_dims, bool) or not isinstance(num_dims, int):
            raise TypeError(f"{name} expects an integer num_dims, got {num_dims!r}")
        if num_dims < self.minimum_dims:
            raise ValueError(f"{name} needs num_dims >= {self.minimum_dims}, got {num_dims}")
        if active_dims is not None and len(active_dims) != num_dims:
            raise ValueError(
                f"{name}(num_dims={num_dims}) expects {num_dims} active_dims, one for each "
                f"component of the field, got {len(active_dims)}"
            )
        super().__init__(active_dims=active_dims)
        self.num_dims = num_dims
        self.base_kernel = base_kernel
        for term in terms(base_kernel):
            self._check(term)

    def factor(self, dims: tuple[int, ...] | None) -> Factor:
        """B(ω) of the field, for the spectrum of a potential that varies along `dims`."""
        raise NotImplementedError

    def _check(self, term: Term) -> None:
        """Whether the field of this term of the potential exists."""
        name = type(self).__name__
        if term.num_outputs != 1:
            raise ValueError(
                f"{name} needs a scalar base kernel, got one with {term.num_outputs} outputs; pass "
                "the scalar kernel inside it"
            )
        if len(term.leaves) != 1:
            raise ValueError(
                f"{name} expects a potential made of scaled sums of stationary kernels, got a "
                "constant or a product; a constant has no gradient, and products in space are "
                f"not supported. For a product with time, multiply {name} itself"
            )
        leaf = term.leaves[0].kernel
        if spectrum.dispatch(type(leaf)) is spectrum.dispatch(object):
            if radial_derivatives.dispatch(type(leaf)) is radial_derivatives.dispatch(object):
                radial_derivatives(leaf, None)  # raises, naming what is known
        elif math.isinf(spectrum(leaf).moment(1, self.num_dims)):
            found = f"nu={leaf.nu}" if hasattr(leaf, "nu") else type(leaf).__name__
            raise ValueError(
                f"{name} needs a twice-differentiable base kernel: Matern nu > 1, got {found}; use "
                "nu=1.5 or 2.5"
            )
        dims = term.leaves[0].active_dims
        if dims is not None and not all(0 <= dim < self.num_dims for dim in dims):
            raise ValueError(
                f"{name}(num_dims={self.num_dims}) expects active_dims of its base kernel within "
                f"its own {self.num_dims} inputs, got {dims}; to select the inputs that are space, "
                f"give active_dims to {name}"
            )
        seen = self.num_dims if dims is None else len(dims)
        if leaf.ard_num_dims not in (None, seen):
            raise ValueError(
                f"{name}(num_dims={self.num_dims}) expects ard_num_dims={seen} in its base "
                f"kernel, got {leaf.ard_num_dims}"
            )

    def num_outputs_per_input(self, x1: Tensor, x2: Tensor) -> int:
        return self.num_dims

    def forward(
        self,
        x1: Float[Tensor, "*b n d"],
        x2: Float[Tensor, "*b m d"],
        diag: bool = False,
        last_dim_is_batch: bool = False,
    ) -> Float[Tensor, "*b n*d m*d"] | Float[Tensor, "*b n*d"]:
        if last_dim_is_batch:
            raise ValueError(
                f"{type(self).__name__} ties the input dimensions together, so that "
                "last_dim_is_batch=True has no meaning for it; use active_dims"
            )
        if x1.shape[-1] != self.num_dims:
            raise ValueError(
                f"{type(self).__name__}(num_dims={self.num_dims}) expects inputs with "
                f"{self.num_dims} columns, got {x1.shape[-1]}; select columns with active_dims"
            )
        check_inputs(self, x1)
        if x2 is not x1:
            check_inputs(self, x2)
        tau = (x1 - x2).unsqueeze(-2) if diag else x1.unsqueeze(-2) - x2.unsqueeze(-3)
        parts = [_minus_hessian(term, tau) for term in inner_terms(self)]
        blocks = self.factor(None).assemble(sum(parts[1:], parts[0]))  # (*b, n, m, d, d)
        if diag:
            return blocks.squeeze(-3).diagonal(dim1=-1, dim2=-2).flatten(-2)
        return blocks.transpose(-3, -2).flatten(-4, -3).flatten(-2, -1)


def _minus_hessian(term: Term, tau: Float[Tensor, "*b n m d"]) -> Float[Tensor, "*b n m d d"]:
    """−∇∇ᵀk of the potential of one term."""
    leaf = term.leaves[0]
    seen = tau if leaf.active_dims is None else tau[..., list(leaf.active_dims)]
    hessian = term.factor.embedded_outer(derivatives(leaf.kernel, seen, 2))
    return -term.outputscale[..., None, None, None, None] * hessian


class CurlFreeKernel(PotentialKernel):
    r"""Curl-free kernel K(x, z) = −∇∇ᵀ k(x − z): fields that are gradients of a potential.

    `base_kernel` is the scalar kernel k of the potential (RBF, Matérn 3/2 and 5/2, and scaled sums
    of them; ARD and batch shapes as in gpytorch). Rows of the covariance matrix are point-major,
    n·p + i. The field's variance is outputscale · E‖z‖²/(d ℓ²), in units of potential² / length².

    Brault et al. 2016, Section 3.2; Minh 2016, Section 4.

    Args:
        base_kernel: an instance of a gpytorch kernel, an `RBFKernel` if None.
        num_dims: d, the number of input columns and of outputs.
        active_dims: the input columns that are space, if not all.

    Raises:
        ValueError: a base kernel that is not twice differentiable (Matérn ν ≤ 1) or not scalar.
        NotImplementedError: a base kernel that is not registered.

    Example:
        >>> import gpytorch, gp_orff, torch
        >>> kernel = gp_orff.CurlFreeKernel(gpytorch.kernels.RBFKernel(ard_num_dims=2), num_dims=2)
        >>> kernel(torch.zeros(5, 2)).shape
        torch.Size([10, 10])
    """

    def factor(self, dims: tuple[int, ...] | None) -> Factor:
        return Gradient(self.num_dims, dims)


class DivergenceFreeKernel(PotentialKernel):
    r"""Divergence-free kernel K(x, z) = (∇∇ᵀ − ΔI) k(x − z): incompressible fields.

    In two dimensions these are the fields (∂₂ψ, −∂₁ψ) of a stream function ψ with kernel k, in
    three the curls of a vector potential. Arguments and errors as for `CurlFreeKernel`; d ≥ 2.

    Brault et al. 2016, Section 3.2; Minh 2016, Section 4.

    Example:
        >>> import gpytorch, gp_orff, torch
        >>> kernel = gp_orff.DivergenceFreeKernel(gpytorch.kernels.MaternKernel(nu=2.5), num_dims=3)
        >>> kernel(torch.zeros(5, 3)).shape
        torch.Size([15, 15])
    """

    minimum_dims = 2

    def factor(self, dims: tuple[int, ...] | None) -> Factor:
        return Solenoidal(self.num_dims, dims)


class HelmholtzKernel(AdditiveKernel):
    """The sum of a scaled curl-free and a scaled divergence-free kernel.

    Every smooth field that vanishes at infinity is such a sum (Helmholtz). The two parts are
    `ScaleKernel`s with their own copies of `base_kernel`, at `.curl_free` and `.divergence_free`
    (Berlinghieri et al. 2023, Section 4).

    Args:
        base_kernel: the scalar kernel of both potentials, an `RBFKernel` if None.
        num_dims: d ≥ 2.
        active_dims: the input columns that are space, if not all.

    Example:
        >>> import gp_orff
        >>> kernel = gp_orff.HelmholtzKernel(num_dims=2)
        >>> kernel.divergence_free.base_kernel.base_kernel.lengthscale = 0.3
    """

    def __init__(
        self,
        base_kernel: Kernel | None = None,
        *,
        num_dims: int,
        active_dims: tuple[int, ...] | None = None,
    ):
        base_kernel = RBFKernel() if base_kernel is None else base_kernel
        parts = [
            ScaleKernel(
                kind(deepcopy(base_kernel), num_dims=num_dims, active_dims=active_dims),
                batch_shape=base_kernel.batch_shape,
            )
            for kind in (CurlFreeKernel, DivergenceFreeKernel)
        ]
        super().__init__(*parts)

    @property
    def curl_free(self) -> ScaleKernel:
        return self.kernels[0]

    @property
    def divergence_free(self) -> ScaleKernel:
        return self.kernels[1]


@inner_terms.register
def _(kernel: PotentialKernel) -> list[Term]:
    return [
        term.with_factor(kernel.factor(term.leaves[0].active_dims if term.leaves else None))
        for term in terms(kernel.base_kernel)
    ]
