"""Curl-free, divergence-free and Helmholtz kernels, and their products with scalar kernels."""

from copy import deepcopy
from functools import singledispatch

import torch
from gpytorch.kernels import AdditiveKernel, Kernel, ProductKernel, RBFKernel, ScaleKernel
from gpytorch.priors import NormalPrior
from jaxtyping import Float
from linear_operator import to_dense
from torch import Tensor
from torch.nn import ModuleList

from gp_orff.kernels.base import (
    INNER_LENGTHSCALE,
    WrapperKernel,
    about_their_middle,
    check_base_kernel,
    check_num_dims,
    check_points,
    check_scalar,
    name_constructor,
    parts_of,
    related_copy,
)
from gp_orff.kernels.derivatives import radial_derivatives
from gp_orff.kernels.pairs import Pairs, collected, field_forms, total
from gp_orff.kernels.spectra import spectral_density, spectrum
from gp_orff.kernels.tree import (
    Factor,
    Gradient,
    Solenoidal,
    Term,
    inner_terms,
    num_outputs,
    products,
    terms,
)

# Exact curl-free kernels, divergence-free kernels, and their Helmholtz sums.
#
# A scalar stationary kernel is k(x, z) = κ(s) with s = ‖τ/ℓ‖² and τ = x − z. With Λ = diag ℓ⁻² and
# u = Λτ, its negative Hessian is
#
#     −∇∇ᵀk = −2κ′(s) Λ − 4κ″(s) u uᵀ .
#
# The base kernel k is the covariance of the potential and is not rescaled. Rows of matrices are
# ordered point by point: row n·p + i is output i at point n, as gpytorch's
# `MultitaskMultivariateNormal` expects.


class PotentialKernel(WrapperKernel):
    """The kernel of a field that is a derivative of a potential with the kernel `base_kernel`.

    Use its subclasses `CurlFreeKernel`, which lists the arguments and the errors, and
    `DivergenceFreeKernel`.
    """

    is_stationary = True
    minimum_dims = 1

    def __init_subclass__(cls) -> None:
        name_constructor(cls)

    def __init__(
        self,
        base_kernel: Kernel | None = None,
        *,
        num_dims: int,
        active_dims: tuple[int, ...] | None = None,
    ):
        name = type(self).__name__
        base_kernel = RBFKernel() if base_kernel is None else base_kernel
        check_base_kernel(name, base_kernel)
        check_num_dims(name, num_dims, self.minimum_dims, active_dims)
        super().__init__(active_dims=active_dims)
        self.num_dims = self.num_outputs = num_dims
        self.base_kernel = base_kernel
        for term in terms(base_kernel):
            self._check(term)

    def factor(self, dims: tuple[int, ...] | None) -> Factor:
        """Return the factor B(ω) of the spectral matrix S(ω) B(ω) B(ω)* of the field.

        Args:
            dims: the inputs that the potential depends on; all inputs if None.
        """
        raise NotImplementedError

    def _check(self, term: Term) -> None:
        """Raise an error if a term of the potential has no field, or is not supported."""
        name = type(self).__name__
        check_scalar(name, term.num_outputs)
        if len(term.leaves) != 1:
            raise ValueError(
                f"{name} expects a stationary base kernel, or a sum of them, each with a "
                "ScaleKernel or without, got a constant or a product; drop a constant, which has "
                f"no gradient, and multiply {name} itself by a kernel of time"
            )
        leaf = term.leaves[0].kernel
        if spectrum.dispatch(type(leaf)) is spectrum.dispatch(object):
            if radial_derivatives.dispatch(type(leaf)) is radial_derivatives.dispatch(object):
                radial_derivatives(leaf, None)  # raises, and lists the kernels it knows
        elif torch.as_tensor(spectral_density(leaf, name).moment(1, self.num_dims)).isinf().any():
            base = f"nu={leaf.nu}" if hasattr(leaf, "nu") else type(leaf).__name__
            raise ValueError(
                f"{name} needs a twice-differentiable base kernel: Matern nu > 1, got {base}; use "
                "nu=1.5 or 2.5"
            )
        dims = term.leaves[0].active_dims
        if dims is not None and not all(0 <= dim < self.num_dims for dim in dims):
            raise ValueError(
                f"{name}(num_dims={self.num_dims}) expects active_dims of its base kernel from 0 "
                f"to {self.num_dims - 1}, got {dims}; to select the inputs that are directions of "
                f"space, pass active_dims to {name}"
            )
        num_inputs = self.num_dims if dims is None else len(dims)
        for argument in ("ard_num_dims", "num_dims"):  # the latter of a BesselKernel
            number = getattr(leaf, argument, None)
            if number not in (None, num_inputs):
                raise ValueError(
                    f"{name}(num_dims={self.num_dims}) expects {argument}={num_inputs} in its base "
                    f"kernel, got {number}"
                )

    def forward(
        self,
        x1: Float[Tensor, "*b n d"],
        x2: Float[Tensor, "*b m d"],
        diag: bool = False,
        last_dim_is_batch: bool = False,
    ) -> Float[Tensor, "*b n*d m*d"] | Float[Tensor, "*b n*d"]:
        """Return the covariance matrix (*b, n·d, m·d) between the points `x1` and `x2`.

        Row k·d + i is component i at point k of `x1`, both counted from 0. Columns are ordered in
        the same way, by the points of `x2`.

        Args:
            x1: points (*b, n, d).
            x2: points (*b, m, d).
            diag: whether to return only the diagonal (*b, n·d); it needs m = n.
            last_dim_is_batch: must be False.

        Raises:
            ValueError: `last_dim_is_batch` is True; the points have another number of columns than
                d; there are no points; a point contains NaN or infinity.
            TypeError: the points have another dtype than the hyperparameters.
        """
        check_points(self, self.num_dims, x1, x2, last_dim_is_batch)
        axes = torch.eye(self.num_dims, dtype=x1.dtype, device=x1.device).unsqueeze(-2)
        x, z = x1.mT.contiguous(), x2.mT.contiguous()  # lags are laid out as their inputs
        if diag:
            x, z = x - z, torch.zeros_like(z[..., :1])
        products = []
        for term in inner_terms(self):
            dims = slice(None) if term.factor.dims is None else list(term.factor.dims)
            pairs = Pairs(x[..., dims, :], z[..., dims, :], axes, axes, term.factor.dims)
            products += field_forms(term)(pairs)
        blocks = total(collected(products))  # (*b, d, d, n, m)
        if diag:
            return blocks.squeeze(-1).diagonal(dim1=-3, dim2=-2).flatten(-2)
        return blocks.movedim(-4, -2).movedim(-4, -1).flatten(-4, -3).flatten(-2, -1)


class CurlFreeKernel(PotentialKernel):
    r"""Curl-free kernel K(x, z) = −∇∇ᵀ k(x − z), the prior of a field f = ∇g.

    The potential g has the scalar kernel k, and ∇∇ᵀk is the Hessian of k with respect to x − z.
    The covariance matrix of points x (N, d) is (N·d, N·d). Its rows are ordered point by point: row
    n·d + i is component i at point n.

    For one lengthscale ℓ, each component has the variance s·m/ℓ², in units of potential² / length².
    Here s is the outputscale of k, and m depends on the class of k. For RBF and rational quadratic
    kernels m = 1, and for Matérn kernels m = ν/(ν − 1).

    Source: Brault et al. 2016, Section 2.3, Definition 2.2; Minh 2016, Section 3.3, Example 2.

    Args:
        base_kernel: the scalar kernel k of the potential, an instance of a gpytorch kernel. It can
            be an RBF, rational quadratic or Matérn kernel (ν > 1), a stationary kernel of this
            package, or a sum of such kernels. Each of them may be inside a `ScaleKernel`. ARD and
            batch shapes work as in gpytorch. If None, an `RBFKernel` is used.
        num_dims: d, the number of input columns and of outputs.
        active_dims: the d input columns that are directions of space; all columns if None.

    Raises:
        TypeError: `base_kernel` is not an instance of a kernel; `num_dims` is not an integer.
        ValueError: `base_kernel` is not twice differentiable (Matérn with ν ≤ 1), has more than one
            output, is constant, or is a product of kernels; `num_dims` differs from the number of
            `active_dims` or of ARD lengthscales.
        NotImplementedError: `base_kernel` has neither a registered spectrum nor registered radial
            derivatives.

    Example:
        >>> import gpytorch, gp_orff, torch
        >>> kernel = gp_orff.CurlFreeKernel(
        ...     gpytorch.kernels.RBFKernel(), num_dims=2
        ... )
        >>> kernel.base_kernel.lengthscale = 0.5
        >>> kernel(torch.rand(5, 2)).shape
        torch.Size([10, 10])
        >>> # the variance of each component is 1 / ℓ²
        >>> kernel(torch.zeros(1, 2)).to_dense().detach().diag()
        tensor([4., 4.])
    """

    def factor(self, dims: tuple[int, ...] | None) -> Factor:
        return Gradient(self.num_dims, dims)


class DivergenceFreeKernel(PotentialKernel):
    r"""Divergence-free kernel K(x, z) = (∇∇ᵀ − Δ I) k(x − z), the prior of an incompressible field.

    Here Δ is the Laplace operator, and the derivatives are with respect to x − z. In two
    dimensions, the field is f = (∂₂ψ, −∂₁ψ), and the stream function ψ has the scalar kernel k. In
    three dimensions, the field is f = ∇ × A. The three components of A are independent, and each
    has the kernel k. The kernel exists for every d ≥ 2.

    The covariance matrix of points x (N, d) is (N·d, N·d), ordered as for `CurlFreeKernel`. For one
    lengthscale, the variance of each component is d − 1 times its variance under the curl-free
    kernel with the same k.

    Source: Brault et al. 2016, Section 2.3, Definition 2.2; Minh 2016, Section 3.3, Example 2.

    Args:
        base_kernel: the scalar kernel k, as for `CurlFreeKernel`. If None, an `RBFKernel` is used.
        num_dims: d ≥ 2, the number of input columns and of outputs.
        active_dims: the d input columns that are directions of space; all columns if None.

    Raises:
        TypeError: `base_kernel` is not an instance of a kernel; `num_dims` is not an integer.
        ValueError: d < 2, or one of the reasons listed at `CurlFreeKernel`.
        NotImplementedError: `base_kernel` has neither a registered spectrum nor registered radial
            derivatives.

    Example:
        >>> import gpytorch, gp_orff, torch
        >>> kernel = gp_orff.DivergenceFreeKernel(
        ...     gpytorch.kernels.MaternKernel(nu=2.5), num_dims=3
        ... )
        >>> kernel(torch.rand(5, 3)).shape
        torch.Size([15, 15])
    """

    minimum_dims = 2

    def factor(self, dims: tuple[int, ...] | None) -> Factor:
        return Solenoidal(self.num_dims, dims)


_HALVES = "curl_free", "divergence_free"


class HelmholtzKernel(AdditiveKernel):
    """The sum of a scaled curl-free and a scaled divergence-free kernel.

    K(x, z) = σ₁² (−∇∇ᵀ) k₁(x − z) + σ₂² (∇∇ᵀ − Δ I) k₂(x − z)

    By Helmholtz's theorem, every smooth field that vanishes at infinity is the sum of a curl-free
    and a divergence-free field. Both terms have gpytorch's class `ScaleKernel`, with the
    outputscales σ₁² and σ₂². The scalar kernels k₁ and k₂ start as copies of `base_kernel`, and
    their hyperparameters are independent. The covariance matrix of points x (N, d) is (N·d, N·d),
    ordered as for `CurlFreeKernel`.

    If `base_kernel` is a `LearnedSpectrumKernel`, the two spectra are related. The log spectrum of
    k₂ is the log spectrum of k₁ plus a learned difference. The prior standard deviations of the
    difference are half as large as those of the first log spectrum. In this case, log(σ₂²/σ₁²) has
    the prior N(0, 3²).

    Source: Berlinghieri et al. 2023, Section 4.

    Args:
        base_kernel: the scalar kernel of both potentials, as for `CurlFreeKernel`. If None, an
            `RBFKernel` is used.
        num_dims: d ≥ 2, the number of input columns and of outputs.
        active_dims: the d input columns that are directions of space; all columns if None.

    Attributes:
        curl_free: the first term, a `ScaleKernel` of a `CurlFreeKernel`.
        divergence_free: the second term, a `ScaleKernel` of a `DivergenceFreeKernel`.

    Raises:
        TypeError: `base_kernel` is not an instance of a kernel; `num_dims` is not an integer.
        ValueError: d < 2, or one of the reasons listed at `CurlFreeKernel`.
        NotImplementedError: `base_kernel` has neither a registered spectrum nor registered radial
            derivatives.

    Example:
        A flow whose divergence-free part is stronger and varies over shorter lengths:

        >>> import gp_orff, torch
        >>> kernel = gp_orff.HelmholtzKernel(num_dims=2)
        >>> kernel.divergence_free.outputscale = 2.0
        >>> kernel.divergence_free.base_kernel.lengthscale = 0.3
        >>> kernel(torch.rand(5, 2)).shape
        torch.Size([10, 10])
    """

    lengthscale = INNER_LENGTHSCALE

    def __init__(
        self,
        base_kernel: Kernel | None = None,
        *,
        num_dims: int,
        active_dims: tuple[int, ...] | None = None,
    ):
        first = RBFKernel() if base_kernel is None else deepcopy(base_kernel)
        kinds = {CurlFreeKernel: first, DivergenceFreeKernel: related_copy(first)}
        parts = [
            ScaleKernel(
                kind(base, num_dims=num_dims, active_dims=active_dims),
                batch_shape=first.batch_shape,
            )
            for kind, base in kinds.items()
        ]
        super().__init__(*parts)
        for name, part in zip(_HALVES, parts, strict=True):
            part.helmholtz_half = name
        if any(hasattr(part, "related") for part in first.modules()):
            self.register_prior("level_prior", NormalPrior(0.0, 3.0), _level, _set_level)

    @classmethod
    def of_halves(cls, *halves: ScaleKernel) -> "HelmholtzKernel":
        """Return the Helmholtz kernel with the two terms `halves`, without copying them."""
        kernel = cls.__new__(cls)
        AdditiveKernel.__init__(kernel, *halves)
        return kernel

    def expand_batch(self, *sizes: torch.Size | int) -> "HelmholtzKernel":
        """Return a copy of this kernel whose two terms have the batch shape `sizes`."""
        new = deepcopy(self)
        new.kernels = ModuleList([part.expand_batch(*sizes) for part in self.kernels])
        return new

    @property
    def curl_free(self) -> ScaleKernel:
        """The first term, a `ScaleKernel` of a `CurlFreeKernel`."""
        return self.kernels[0]

    @property
    def divergence_free(self) -> ScaleKernel:
        """The second term, a `ScaleKernel` of a `DivergenceFreeKernel`."""
        return self.kernels[1]


@singledispatch
def summands(kernel: Kernel) -> list[Kernel]:
    """Return the summands of a sum of kernels; return an empty list for other kernels.

    gpytorch flattens sums. If H is a `HelmholtzKernel`, the sum H + k has three kernels, and the
    two terms of H come one after the other. This function returns H as one summand. The summands of
    H alone are its two terms.

    Example:
        >>> import gpytorch, gp_orff
        >>> k = gpytorch.kernels.MultitaskKernel(
        ...     gpytorch.kernels.RBFKernel(), num_tasks=2
        ... )
        >>> kernel = gp_orff.HelmholtzKernel(num_dims=2) + k
        >>> len(kernel.kernels)
        3
        >>> [
        ...     type(summand).__name__
        ...     for summand in gp_orff.kernels.fields.summands(kernel)
        ... ]
        ['HelmholtzKernel', 'MultitaskKernel']
    """
    return []


@summands.register
def _(kernel: AdditiveKernel) -> list[Kernel]:
    kernels, found = list(kernel.kernels), []
    while kernels:
        names = tuple(getattr(part, "helmholtz_half", None) for part in kernels[:2])
        count = 2 if names == _HALVES else 1
        found.append(HelmholtzKernel.of_halves(*kernels[:2]) if count == 2 else kernels[0])
        kernels = kernels[count:]
    return found


@summands.register
def _(kernel: HelmholtzKernel) -> list[Kernel]:
    return list(kernel.kernels)


def counterpart(part: Kernel, kernel: Kernel, copy: Kernel) -> Kernel:
    """Return the part of `copy` that corresponds to `part` of the `kernel` itself."""
    names = {module: name for name, module in kernel.named_modules()}
    if part in names:
        return copy.get_submodule(names[part])
    parts = [counterpart(summand, kernel, copy) for summand in part.kernels]
    build = HelmholtzKernel.of_halves if isinstance(part, HelmholtzKernel) else AdditiveKernel
    return build(*parts)


def _level(kernel: HelmholtzKernel) -> Float[Tensor, "*b"]:
    """Return log(σ₂²/σ₁²)."""
    return (kernel.divergence_free.outputscale / kernel.curl_free.outputscale).log()


def _set_level(kernel: HelmholtzKernel, value: Float[Tensor, "*b"]) -> None:
    kernel.divergence_free.outputscale = value.exp() * kernel.curl_free.outputscale.detach()


@inner_terms.register
def _(kernel: PotentialKernel) -> list[Term]:
    return [
        term.with_factor(kernel.factor(term.leaves[0].active_dims))
        for term in terms(kernel.base_kernel)
    ]


# Products of a field kernel with a scalar kernel on other inputs, such as time.


def require_field_products(kernel: Kernel) -> None:
    """Raise an error if gpytorch's `ProductKernel` multiplies a kernel with several outputs.

    Raises:
        ValueError: `kernel` contains such a product; use `FieldProductKernel` instead.
    """
    for part in parts_of(kernel, ProductKernel):
        if inner_terms(part)[0].num_outputs > 1:
            names = " * ".join(type(factor).__name__ for factor in part.kernels)
            raise ValueError(
                "expected gp_orff.FieldProductKernel for a product with a kernel of several "
                f"outputs, got gpytorch's ProductKernel {names}, which multiplies matrices of "
                "different sizes; use FieldProductKernel(field_kernel, scalar_kernel)"
            )


class FieldProductKernel(WrapperKernel):
    """The product of a field kernel and a scalar kernel of other inputs, for example of time.

    K((x, t), (z, s)) = K_field(x, z) · k(t, s)

    The expressions `field_kernel * scalar_kernel` and `scalar_kernel * field_kernel` return this
    kernel. Both kernels receive all d input columns, and each kernel selects its columns by
    `active_dims`. Derivatives of the field are with respect to the columns of `field_kernel` only.
    The covariance matrix of points (N, d) is (N·p, N·p), ordered point by point: row n·p + i is
    output i at point n.

    Args:
        field_kernel: a gpytorch kernel with p > 1 outputs.
        scalar_kernel: a gpytorch kernel with one output.

    Raises:
        ValueError: `field_kernel` has one output only, or `scalar_kernel` has more than one.

    Example:
        A curl-free field in columns 0 and 1 that changes with time, in column 2:

        >>> import gpytorch, gp_orff, torch
        >>> space = gp_orff.CurlFreeKernel(num_dims=2, active_dims=(0, 1))
        >>> time = gpytorch.kernels.MaternKernel(nu=1.5, active_dims=(2,))
        >>> kernel = space * time
        >>> type(kernel).__name__, kernel(torch.rand(5, 3)).shape
        ('FieldProductKernel', torch.Size([10, 10]))
    """

    def __init__(self, field_kernel: Kernel, scalar_kernel: Kernel):
        outputs = [num_outputs(kernel) for kernel in (field_kernel, scalar_kernel)]
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

    def forward(
        self, x1: Float[Tensor, "*b n d"], x2: Float[Tensor, "*b m d"], diag: bool = False, **params
    ) -> Float[Tensor, "*b n*p m*p"] | Float[Tensor, "*b n*p"]:
        """Return the covariance matrix (*b, n·p, m·p) between the points `x1` and `x2`.

        Row k·p + i is output i at point k of `x1`, both counted from 0. Columns are ordered in the
        same way, by the points of `x2`.

        Args:
            x1: points (*b, n, d).
            x2: points (*b, m, d).
            diag: whether to return only the diagonal (*b, n·p); it needs m = n.
            params: further arguments of both kernels.
        """
        field = to_dense(self.field_kernel(x1, x2, diag=diag, **params))
        inputs = about_their_middle(self.scalar_kernel, x1, x2)
        scalar = to_dense(self.scalar_kernel(*inputs, diag=diag, **params))
        scalar = scalar.repeat_interleave(self.num_outputs, dim=-1)
        return field * (scalar if diag else scalar.repeat_interleave(self.num_outputs, dim=-2))


@inner_terms.register
def _(kernel: FieldProductKernel) -> list[Term]:
    return products(terms(kernel.field_kernel), terms(kernel.scalar_kernel))
