"""Base classes of kernels, checks of their arguments and inputs, and Cholesky factors."""

import platform
import re
from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from dataclasses import fields, replace
from functools import cache
from inspect import Parameter, signature
from itertools import chain
from numbers import Integral, Real
from pathlib import Path
from types import FunctionType
from typing import TypeVar

import torch
from gpytorch import Module
from gpytorch.kernels import CosineKernel, Kernel, PeriodicKernel
from jaxtyping import Bool, Float
from linear_operator.utils.cholesky import psd_safe_cholesky
from scipy.linalg import lapack
from torch import Tensor, nn
from torch.autograd import Function, forward_ad
from torch.autograd.function import once_differentiable

from gp_orff.symbols.base import Value, refuse_units, required

Part = TypeVar("Part", bound=nn.Module)

# Base classes of kernels, and checks of their arguments and inputs.


def name_constructor(cls: type) -> None:
    """Give a subclass its copy of the inherited constructor, so that errors name the subclass."""
    inherited = cls.__init__
    copied = FunctionType(
        inherited.__code__,
        inherited.__globals__,
        "__init__",
        inherited.__defaults__,
        inherited.__closure__,
    )
    copied.__kwdefaults__ = inherited.__kwdefaults__
    copied.__annotations__, copied.__doc__ = inherited.__annotations__, inherited.__doc__
    copied.__module__, copied.__qualname__ = cls.__module__, f"{cls.__qualname__}.__init__"
    cls.__init__ = copied


def _with_lengthscale(kernel: Kernel) -> dict[str, Kernel]:
    """Return the kernels with a lengthscale in the tree `kernel`, by their paths."""
    parts = kernel.named_modules()
    return {name: part for name, part in parts if getattr(part, "has_lengthscale", False)}


def _lengthscale(self: Kernel) -> Float[Tensor, "*b 1 k"] | None:
    """The lengthscale of the scalar kernel that this kernel contains; you can assign it.

    Its shape is (*b, 1, d), or (*b, 1, 1) if all inputs share one lengthscale, in units of the
    inputs. It is None if no contained kernel has a lengthscale, or if several have one.
    """
    inside = list(_with_lengthscale(self).values())
    return inside[0].lengthscale if len(inside) == 1 else None


def _assign_lengthscale(kernel: Kernel, value: float | Tensor) -> None:
    """Set the lengthscale of the scalar kernel that `kernel` contains.

    Raises:
        RuntimeError: no contained kernel has a lengthscale, or several have one.
    """
    inside = _with_lengthscale(kernel)
    if len(inside) == 1:
        inside.popitem()[1].lengthscale = value
        return
    paths = [re.sub(r"\.(\d+)", r"[\1]", f"kernel.{name}.lengthscale") for name in inside]
    others = [name.replace("raw_", "") for name, _ in kernel.named_parameters()]
    remedy = f"set {' and '.join(paths)}" if paths else f"its parameters are {', '.join(others)}"
    raise RuntimeError(
        f"expected a kernel that contains one lengthscale, got {type(kernel).__name__} with "
        f"{len(paths) or 'none'}; {remedy}"
    )


INNER_LENGTHSCALE = property(_lengthscale, _assign_lengthscale)


class FieldKernel(Kernel):
    """A kernel of vector fields that is not built from a scalar kernel.

    Attributes:
        amplitude: the name of the parameter that multiplies the variance.
    """

    amplitude: str
    lengthscale = INNER_LENGTHSCALE
    is_field = True  # False for an `ORFFKernel`

    def scales(self, lengths: Float[Tensor, "d"]) -> dict[str, Tensor]:
        """Return starting values of the parameters that are lengths, by name.

        Args:
            lengths: (d,), the typical lengths of the field along the d inputs.
        """
        raise NotImplementedError


class WrapperKernel(Kernel):
    """A kernel that contains other kernels; its batch shape is the batch shape of these kernels.

    gpytorch indexes and expands every buffer of a kernel as if it were batched, even `active_dims`
    and frequencies. This class indexes and expands only the contained kernels.
    """

    lengthscale = INNER_LENGTHSCALE
    is_field = True  # False for an `ORFFKernel`

    def __new__(cls, *args, **kwargs):
        """Create the kernel, and raise TypeError for arguments that it does not have."""
        known = dict(list(signature(cls.__init__).parameters.items())[1:])
        unknown = [name for name in kwargs if name not in known]
        _check_arguments(cls, known.values(), args, unknown or kwargs)
        if unknown:
            raise TypeError(
                f"{cls.__name__} expects the arguments {', '.join(known)}, got {unknown[0]}; pass "
                "arguments of a scalar kernel to that kernel, such as "
                "gpytorch.kernels.MaternKernel(nu=2.5)"
            )
        return super().__new__(cls)

    def num_outputs_per_input(self, x1: Tensor, x2: Tensor) -> int:
        """Return p, the number of outputs at each of the points `x1` (n, d) and `x2` (m, d)."""
        return self.num_outputs

    def __getitem__(self, index) -> "WrapperKernel":
        return self._with_children(lambda kernel: kernel[index])

    def expand_batch(self, *sizes: torch.Size | int) -> "WrapperKernel":
        """Return a copy whose contained kernels are expanded to the batch shape `sizes`."""
        return self._with_children(lambda kernel: kernel.expand_batch(*sizes))

    def _with_children(self, change: Callable[[Kernel], Kernel]) -> "WrapperKernel":
        """Return a copy of this kernel with `change` applied to each contained kernel."""
        new = type(self).__new__(type(self))  # copy.copy would share gpytorch kernels' __dict__
        new.__dict__.update(self.__dict__)
        new._parameters, new._buffers = dict(self._parameters), dict(self._buffers)
        new._modules = {
            name: change(child) if isinstance(child, Kernel) else child
            for name, child in self._modules.items()
        }
        return new


def related_copy(kernel: Kernel) -> Kernel:
    """Return a copy of a kernel tree for another part of the same field.

    In the copy, each kernel with a method `related` is replaced by the result of this method.
    """
    if hasattr(kernel, "related"):
        return kernel.related()
    copy = deepcopy(kernel)
    for path, part in kernel.named_modules():
        if hasattr(part, "related"):
            parent, _, name = path.rpartition(".")
            setattr(copy.get_submodule(parent), name, part.related())
    return copy


def _check_arguments(
    cls: type, parameters: Iterable[Parameter], args: Sequence[object], kwargs: Sequence[str]
) -> None:
    """Raise TypeError if an argument that must be named is passed without its name."""
    kinds = [parameter.kind for parameter in parameters]
    most = kinds.count(Parameter.POSITIONAL_OR_KEYWORD)
    named = {p.name: p.default for p in parameters if p.kind is Parameter.KEYWORD_ONLY}
    missing = [n for n, default in named.items() if default is Parameter.empty and n not in kwargs]
    example = next(iter([*missing, *named]), "num_dims")
    several = Parameter.VAR_POSITIONAL in kinds
    if (len(args) > most and not several) or (args and missing):
        raise TypeError(
            f"{cls.__name__} expects {', '.join(named)} by name, got {len(args)} arguments without "
            f"names{f' and no {missing[0]}' if missing else ''}; for instance, write "
            f"{cls.__name__}(..., {example}={2 if example.startswith('num') else '...'})"
        )


def parts_of(module: nn.Module, *kinds: type[Part]) -> list[Part]:
    """Return all instances of `kinds` in a tree of modules, including the module itself."""
    return [part for part in module.modules() if isinstance(part, kinds)]


def children_of(module: nn.Module) -> list[nn.Module]:
    """Return the children of a module, including those in a `ModuleList`."""
    lists = [child if isinstance(child, nn.ModuleList) else [child] for child in module.children()]
    return list(chain.from_iterable(lists))


def tensors_of(value: object) -> dict[str, Tensor]:
    """Return the fields of a dataclass that are tensors, by name."""
    values = {field.name: getattr(value, field.name) for field in fields(value)}
    return {name: value for name, value in values.items() if torch.is_tensor(value)}


def map_tensors(value: Value, change: Callable[[Tensor], Tensor]) -> Value:
    """Return a copy of a dataclass with `change` applied to each field that is a tensor."""
    return replace(value, **{name: change(tensor) for name, tensor in tensors_of(value).items()})


def plain_tensor(tensor: Tensor) -> Tensor:
    """Return a detached copy of a tensor on the CPU, for files."""
    return tensor.detach().cpu().clone()


def value_of(name: str, module: Module) -> Tensor:
    """Return the attribute `name`, for a prior. Unlike a closure of gpytorch, it can be pickled."""
    return getattr(module, name)


def set_value(name: str, module: Module, value: Tensor) -> None:
    """Set the attribute `name` that has a prior."""
    module.initialize(**{name: value})


def is_number(value: object, kind: type[Real] = Real) -> bool:
    """Return whether a value is a real number of Python or NumPy; True and False are not."""
    return isinstance(value, kind) and not isinstance(value, bool)


def check_positive_integer(value: int, argument: str, owner: str) -> int:
    """Return the value of an argument as an int.

    Args:
        value: the value.
        argument: the name of the argument, for the error.
        owner: the name of the class that has the argument, for the error.

    Raises:
        ValueError: the value is not a positive integer.
    """
    if not is_number(value, Integral) or value < 1:
        raise ValueError(f"{owner} expects {argument} to be a positive integer, got {value!r}")
    return int(value)


def as_real_tensor(
    values: object,
    what: str,
    remedy: str = "pass the real part",
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return real values as a tensor, and raise an error if their type is complex.

    A conversion would drop imaginary parts. Complex values with zero imaginary parts are refused
    too, because whether these parts are zero can depend on frequencies or trained parameters.

    Args:
        values: a tensor, an array or a list of numbers.
        what: a description of the values for the error, with the class or function that expects
            them.
        remedy: the advice in the error.
        dtype: the type of the tensor; the type of the values if None.

    Raises:
        TypeError: the type of the values is complex, or the values have a unit.
    """
    refuse_units(values, what)
    kind = torch.as_tensor(values).dtype
    if kind.is_complex:
        raise TypeError(f"expected real numbers for {what}, got {kind}; {remedy}")
    return torch.as_tensor(values, dtype=dtype)


def check_inputs(kernel: Kernel, x: Tensor) -> None:
    """Raise an error if the inputs (n, d) of a kernel are invalid.

    Raises:
        TypeError: the inputs are not a tensor, are neither float32 nor float64, or have another
            dtype than the hyperparameters.
        ValueError: there are no points, the inputs have shape (n,), or they contain NaN or
            infinity.
    """
    name = type(kernel).__name__
    required(x, Tensor, f"{name} expects a tensor of inputs", "pass torch.as_tensor(x)")
    if x.dim() < 2:
        raise ValueError(
            f"{name} expects inputs of shape (n, d), got {tuple(x.shape)}; pass x.unsqueeze(-1) "
            "for one input"
        )
    if x.dtype not in (torch.float32, torch.float64):
        remedy = "x.float()" if x.is_floating_point() else "x.double()"
        remedy = "torch.view_as_real(x) for positions x + iy" if x.is_complex() else remedy
        raise TypeError(f"{name} expects float32 or float64 inputs, got {x.dtype}; pass {remedy}")
    if x.dtype != kernel.dtype:
        raise TypeError(
            f"{name} has {kernel.dtype} hyperparameters and expects inputs of the same type, got "
            f"{x.dtype}; convert the inputs, x.to({kernel.dtype}), or the model, by .float() or "
            ".double()"
        )
    if x.shape[-2] == 0:
        raise ValueError(f"{name} expects at least one point, got an empty set")
    invalid = 0 if is_traced() else int((~torch.isfinite(x)).any(-1).sum())
    if invalid:
        raise ValueError(
            f"{name} expects finite inputs, got {invalid} points with NaN or infinite "
            "coordinates; drop them"
        )


def is_transformed() -> bool:
    """Return whether a transform of `torch.func`, such as `jacrev` or `vmap`, is active."""
    return torch._C._are_functorch_transforms_active()


def is_traced() -> bool:
    """Return whether a transform or `torch.export` records every operation.

    Operations must then not depend on the values of tensors.
    """
    return is_transformed() or torch.compiler.is_exporting()


def refuse_tracing(kernel: Kernel) -> None:
    """Raise NotImplementedError inside `torch.jit.trace`.

    A covariance with derivatives in closed form would become a constant of the trace.
    """
    if torch.jit.is_tracing():
        raise NotImplementedError(
            f"expected {type(kernel).__name__} outside of torch.jit.trace, got a trace, in which "
            "its covariance would be a constant; trace features instead, "
            "gp_orff.ORFFKernel(kernel, gp_orff.Grid.for_data(x))"
        )


def check_points(
    kernel: Kernel, num_dims: int | None, x1: Tensor, x2: Tensor, last_dim_is_batch: bool
) -> None:
    """Raise an error if the arguments of `forward` are invalid for a kernel of `num_dims` inputs.

    Raises:
        NotImplementedError: the call is inside `torch.jit.trace`.
        TypeError: one of the reasons listed at `check_inputs`.
        ValueError: `last_dim_is_batch` is True, the inputs have another number of columns, or one
            of the reasons listed at `check_inputs`.
    """
    refuse_tracing(kernel)
    name = type(kernel).__name__
    if last_dim_is_batch:
        raise ValueError(
            f"{name} couples all input dimensions and expects last_dim_is_batch=False, got "
            "last_dim_is_batch=True; use active_dims"
        )
    for x in (x1,) if x2 is x1 else (x1, x2):
        if num_dims is not None and x.shape[-1] != num_dims:
            raise ValueError(
                f"{name}(num_dims={num_dims}) expects inputs with {num_dims} columns, got "
                f"{x.shape[-1]}; select columns with active_dims"
            )
        check_inputs(kernel, x)


def check_base_kernel(name: str, base_kernel: object) -> None:
    """Raise an error if the base kernel of the class `name` is not an instance of a kernel.

    Raises:
        TypeError: `base_kernel` is not an instance of a kernel, but for example a class.
    """
    required(
        base_kernel,
        Kernel,
        f"{name} expects an instance of a gpytorch kernel as base_kernel",
        f"use, for instance, {name}(gpytorch.kernels.RBFKernel(), ...)",
    )


def check_scalar(name: str, num_outputs: int, kernel: str = "one") -> None:
    """Raise an error if a base kernel has several outputs.

    Args:
        name: the class or rule that needs a scalar kernel, for the error.
        num_outputs: the number of outputs of the base kernel.
        kernel: the base kernel, for the error.

    Raises:
        ValueError: `num_outputs` is not 1.
    """
    if num_outputs != 1:
        raise ValueError(
            f"{name} needs a scalar base kernel, got {kernel} with {num_outputs} outputs; pass the "
            "scalar kernel inside it"
        )


def check_num_dims(
    name: str, num_dims: object, minimum: int, active_dims: Sequence[int] | None
) -> None:
    """Raise an error if `num_dims` is invalid for the class `name`.

    Raises:
        TypeError: `num_dims` is not an integer.
        ValueError: `num_dims` is below `minimum`, or is not the number of `active_dims`.
    """
    if not is_number(num_dims, Integral):
        raise TypeError(f"{name} expects an integer num_dims, got {num_dims!r}")
    if num_dims < minimum:
        raise ValueError(f"{name} needs num_dims >= {minimum}, got {num_dims}")
    if active_dims is not None and len(active_dims) != num_dims:
        raise ValueError(
            f"{name}(num_dims={num_dims}) expects {num_dims} active_dims, one for each input, got "
            f"{len(active_dims)}"
        )


def require_covariance_of(cls: type[Kernel], kernel: Kernel) -> None:
    """Raise an error if a subclass of `cls` overrides the covariance of `cls`.

    An example is gpytorch's `RBFKernelGrad`.

    Raises:
        NotImplementedError: the kernel has another `forward` than `cls`.
    """
    if type(kernel).forward is not cls.forward:
        raise NotImplementedError(
            f"expected the covariance of {cls.__name__}, got {type(kernel).__name__}, which "
            f"overrides it; use {cls.__name__}, or register your class with "
            "@gp_orff.spectrum.register and @gp_orff.radial_derivatives.register"
        )


def about_their_middle(
    kernel: Kernel, x1: Float[Tensor, "*b n d"], x2: Float[Tensor, "*b m d"]
) -> tuple[Float[Tensor, "*b n d"], Float[Tensor, "*b m d"]]:
    """Subtract the mean of `x1` from both inputs if the kernel is a periodic one of gpytorch.

    These kernels are stationary, so their values do not change. gpytorch computes their distances
    from squares of the inputs. Without centring, times since 1970 would lose digits. gpytorch
    itself centres the inputs of its other kernels.
    """
    if type(kernel) not in (CosineKernel, PeriodicKernel):
        return x1, x2
    middle = x1.detach().mean(-2, keepdim=True)
    return x1 - middle, x2 - middle


# Roots of covariance matrices in any units.


def positive(variances: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Return the variances, with the smallest positive number instead of zero."""
    return variances.clamp_min(torch.finfo(variances.dtype).tiny)


def positive_root(variances: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Return the roots √v of variances v, with a finite derivative at v = 0."""
    return positive(variances).sqrt()


def cholesky(a: Float[Tensor, "*b n n"], unit: float | None = None) -> Float[Tensor, "*b n n"]:
    """Return the Cholesky factor L of a covariance matrix a = L Lᵀ.

    If a is singular to rounding, a nugget of 10⁻⁸ to 10⁻⁶ units is added to the diagonal. By
    default, the unit is the largest variance of a. The nugget thus has the units of a, unlike that
    of `psd_safe_cholesky`.

    Example:
        >>> import torch
        >>> from gp_orff.kernels.base import cholesky
        >>> a = torch.tensor([[4.0, 2.0], [2.0, 2.0]])
        >>> (1e10 * cholesky(1e-20 * a.double())).round(decimals=6)
        tensor([[2., 0.],
                [1., 1.]], dtype=torch.float64)
    """
    factor, failed = _cholesky_in_lapack(a) if _suits_lapack(a) else torch.linalg.cholesky_ex(a)
    if not failed.any():
        return factor
    size = size_of(a) if unit is None else unit
    return size**0.5 * psd_safe_cholesky(a / size)


def cholesky_inverse(factor: Float[Tensor, "*b n n"]) -> Float[Tensor, "*b n n"]:
    """Return (L Lᵀ)⁻¹ for a Cholesky factor L.

    Example:
        >>> import torch
        >>> from gp_orff.kernels.base import cholesky_inverse
        >>> cholesky_inverse(torch.tensor([[2.0, 0.0], [1.0, 1.0]]).double())
        tensor([[ 0.5000, -0.5000],
                [-0.5000,  1.0000]], dtype=torch.float64)
    """
    if not _suits_lapack(factor):
        return torch.cholesky_inverse(factor)
    return _of_each(_inverse_in_lapack, factor)


BLOCK = 256  # rows of a block of a symmetric matrix


# PyTorch calls MKL, which is slow on processors that are not from Intel. SciPy's LAPACK (OpenBLAS)
# replaces it there. On an AMD EPYC with one thread, it is 1.1 to 1.9 times faster for factors and
# 1.2 to 2.5 times for inverses of 20 to 4800 rows. On an Intel Xeon, MKL is 1.1 to 2 times faster.
#
# A transposed array has the order of Fortran, so the upper triangle there is the lower one here.


def _suits_lapack(a: Tensor) -> bool:
    """Whether SciPy should factorise a, which is one matrix or a few, without derivatives."""
    if _is_recorded(a) or a.dtype != torch.float64 or a.device.type != "cpu":
        return False
    number = a.shape[:-2].numel()
    return 0 < number <= a.shape[-1] and mkl_is_slow()  # torch is faster for many small matrices


@cache
def mkl_is_slow() -> bool:
    """Whether PyTorch calls MKL on a processor that is not from Intel."""
    if not torch.backends.mkl.is_available():
        return False
    try:
        processor = Path("/proc/cpuinfo").read_text()
    except OSError:  # not on Linux
        processor = platform.processor()
    return "GenuineIntel" not in processor


def _is_recorded(a: Tensor) -> bool:
    """Whether operations on a are recorded, for derivatives or in a graph."""
    traced = is_traced() or torch.jit.is_tracing() or torch.compiler.is_compiling()
    if traced or (a.requires_grad and torch.is_grad_enabled()):
        return True
    return forward_ad.unpack_dual(a).tangent is not None


def _of_each(function: Callable[[Tensor], Tensor], matrices: Float[Tensor, "*b n n"]) -> Tensor:
    if matrices.dim() == 2:
        return function(matrices)
    results = [function(matrix) for matrix in matrices.flatten(0, -3)]
    return torch.stack(results).unflatten(0, matrices.shape[:-2])


def _cholesky_in_lapack(
    a: Float[Tensor, "*b n n"],
) -> tuple[Float[Tensor, "*b n n"], Bool[Tensor, "*b"]]:
    """The Cholesky factors, and whether a matrix is not positive definite."""
    infos = []

    def factor(matrix: Float[Tensor, "n n"]) -> Float[Tensor, "n n"]:
        upper, info = lapack.dpotrf(matrix.detach().numpy().T)
        infos.append(info)
        return torch.from_numpy(upper.T)

    factors = _of_each(factor, a)
    failed = torch.tensor(infos, device=a.device).view(a.shape[:-2]) != 0
    # OpenBLAS reports success for NaN.
    return factors, failed | factors.diagonal(dim1=-2, dim2=-1).isnan().any(-1)


def _inverse_in_lapack(factor: Float[Tensor, "n n"]) -> Float[Tensor, "n n"]:
    upper, info = lapack.dpotri(factor.detach().numpy().T)
    if info:
        return torch.cholesky_inverse(factor)  # raises
    return mirror(torch.from_numpy(upper.T))


def mirror(lower: Float[Tensor, "*b n n"]) -> Float[Tensor, "*b n n"]:
    """Copy the triangle below the diagonal to the one above it, in place."""
    for start in range(0, lower.shape[-1], BLOCK):
        rows = slice(start, start + BLOCK)
        square = lower[..., rows, rows]
        square.copy_(square.tril() + square.tril(-1).mT)
        lower[..., :start, rows] = lower[..., rows, :start].mT
    return lower


def size_of(a: Float[Tensor, "*b n n"]) -> Float[Tensor, "*b 1 1"]:
    """Return the largest variance of each covariance matrix, or 1 if the variance is zero."""
    largest = a.detach().diagonal(dim1=-1, dim2=-2).amax(-1)[..., None, None]
    return torch.where(largest > 0, largest, torch.ones_like(largest))


def reduced_root(root: Float[Tensor, "*b p r"]) -> Float[Tensor, "*b p q"]:
    """Return a root L, with at most p columns, of the covariance matrix C Cᵀ of `root` C.

    If C has at most p columns, L is C. If C has more columns, L is the Cholesky factor of C Cᵀ. If
    this matrix is singular, L is C times an orthonormal basis of the rows of C, without a nugget.
    In this case, L can be differentiated only once.

    Example:
        Three columns along one line:

        >>> import torch
        >>> from gp_orff.kernels.base import reduced_root
        >>> root = torch.tensor([[1.0, 2.0, 2.0], [2.0, 4.0, 4.0]]).double()
        >>> factor = reduced_root(root)
        >>> (factor @ factor.mT).round(decimals=12)
        tensor([[ 9., 18.],
                [18., 36.]], dtype=torch.float64)
    """
    p, r = root.shape[-2:]
    if r <= p:
        return root
    a = root @ root.mH
    factor, info = torch.linalg.cholesky_ex(a)
    pivots, variances = (t.detach().diagonal(dim1=-1, dim2=-2).real for t in (factor, a))
    # A pivot that is smaller, relative to the standard deviation, is zero to rounding.
    singular = info.any() or (pivots <= 1e-7 * variances.sqrt()).any()
    return _RootOnRows.apply(root) if singular else factor


class _RootOnRows(Function):
    """L = C Q with an orthonormal basis Q of the rows of C, so that L Lᵀ = C Cᵀ.

    The derivative of C Cᵀ is the derivative of L Lᵀ at constant Q, because Q Qᵀ Cᵀ = Cᵀ.
    """

    @staticmethod
    def forward(ctx, root: Float[Tensor, "*b p r"]) -> Float[Tensor, "*b p p"]:
        basis, _ = torch.linalg.qr(root.mT)
        ctx.save_for_backward(basis)
        return root @ basis

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Float[Tensor, "*b p p"]) -> Float[Tensor, "*b p r"]:
        (basis,) = ctx.saved_tensors
        return grad @ basis.mT
