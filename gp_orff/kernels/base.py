"""Base classes of the kernels of this package, and Cholesky factors with jitter."""

import re
from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from dataclasses import fields, replace
from inspect import Parameter, signature
from itertools import chain
from numbers import Integral, Real
from types import FunctionType
from typing import TypeVar

import torch
from gpytorch import Module
from gpytorch.kernels import CosineKernel, Kernel, PeriodicKernel
from jaxtyping import Float
from linear_operator.utils.cholesky import psd_safe_cholesky
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from gp_orff.symbols.base import Value, refuse_units, required

Part = TypeVar("Part", bound=nn.Module)

# Constructors by the names of public classes; the base class of kernels that contain other kernels;
# checks of inputs.


def name_constructor(cls: type) -> None:
    """Give a subclass a copy of the constructor that it inherits, which errors call by its name."""
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
    """The kernels inside that have a lengthscale, by their paths."""
    parts = kernel.named_modules()
    return {name: part for name, part in parts if getattr(part, "has_lengthscale", False)}


def _lengthscale(kernel: Kernel) -> Float[Tensor, "*b 1 k"] | None:
    """The lengthscale (*b, 1, k) of the scalar kernel inside `kernel`, which can be set.

    It is None if no kernel inside has a lengthscale, or if several have one."""
    inside = list(_with_lengthscale(kernel).values())
    return inside[0].lengthscale if len(inside) == 1 else None


def _assign_lengthscale(kernel: Kernel, value: float | Tensor) -> None:
    """Set the lengthscale of the one kernel inside that has one; RuntimeError, as of gpytorch, if
    none or several do, whose message says where they are."""
    inside = _with_lengthscale(kernel)
    if len(inside) == 1:
        inside.popitem()[1].lengthscale = value
        return
    paths = [re.sub(r"\.(\d+)", r"[\1]", f"kernel.{name}.lengthscale") for name in inside]
    others = [name.replace("raw_", "") for name, _ in kernel.named_parameters()]
    remedy = f"set {' and '.join(paths)}" if paths else f"its parameters are {', '.join(others)}"
    raise RuntimeError(
        f"expected a lengthscale of one scalar kernel inside, got one for "
        f"{type(kernel).__name__}, which has {len(paths) or 'none'} of them; {remedy}"
    )


INNER_LENGTHSCALE = property(_lengthscale, _assign_lengthscale)


class FieldKernel(Kernel):
    """A kernel of vector fields with parameters of its own, not those of a scalar kernel.

    A subclass says which parameter multiplies its variance, and where a search of others starts.
    """

    amplitude: str
    lengthscale = INNER_LENGTHSCALE
    is_field = True  # rather than features

    def scales(self, lengths: Float[Tensor, "d"]) -> dict[str, Tensor]:
        """Values of the parameters that are lengths, by name, for `lengths` along the inputs."""
        raise NotImplementedError


class WrapperKernel(Kernel):
    """A kernel without parameters of its own; its batch shape is that of the kernels inside.

    gpytorch indexes and expands every buffer of a kernel as if it were batched, even `active_dims`
    and frequencies. This class indexes and expands only the kernels inside.
    """

    lengthscale = INNER_LENGTHSCALE
    is_field = True  # rather than features

    def __new__(cls, *args, **kwargs):
        """A new kernel; a TypeError for arguments that belong to a kernel inside."""
        known = dict(list(signature(cls.__init__).parameters.items())[1:])
        unknown = [name for name in kwargs if name not in known]
        _check_arguments(cls, known.values(), args, unknown or kwargs)
        if unknown:
            raise TypeError(
                f"{cls.__name__} expects the arguments {', '.join(known)}, got {unknown[0]}; those "
                "of a kernel inside belong to that, such as gpytorch.kernels.MaternKernel(nu=2.5)"
            )
        return super().__new__(cls)

    def num_outputs_per_input(self, x1: Tensor, x2: Tensor) -> int:
        """p, the number of outputs at each of the points `x1` (n, d) and `x2` (m, d)."""
        return self.num_outputs

    def __getitem__(self, index) -> "WrapperKernel":
        return self._with_children(lambda kernel: kernel[index])

    def expand_batch(self, *sizes: torch.Size | int) -> "WrapperKernel":
        """This kernel with the kernels inside expanded to the batch shape `sizes`."""
        return self._with_children(lambda kernel: kernel.expand_batch(*sizes))

    def _with_children(self, change: Callable[[Kernel], Kernel]) -> "WrapperKernel":
        """A copy of this kernel in which `change` has been applied to each kernel inside."""
        new = type(self).__new__(type(self))  # copy.copy would share gpytorch kernels' __dict__
        new.__dict__.update(self.__dict__)
        new._parameters, new._buffers = dict(self._parameters), dict(self._buffers)
        new._modules = {
            name: change(child) if isinstance(child, Kernel) else child
            for name, child in self._modules.items()
        }
        return new


def related_copy(kernel: Kernel) -> Kernel:
    """A copy of a kernel tree, for another part of the same field: of kernels that have one, the
    `related` kernel in their place."""
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
    """Raise TypeError for arguments that have to be named, with their names."""
    kinds = [parameter.kind for parameter in parameters]
    most = kinds.count(Parameter.POSITIONAL_OR_KEYWORD)
    named = {p.name: p.default for p in parameters if p.kind is Parameter.KEYWORD_ONLY}
    missing = [n for n, default in named.items() if default is Parameter.empty and n not in kwargs]
    example = next(iter([*missing, *named]), "num_dims")
    several = Parameter.VAR_POSITIONAL in kinds
    if (len(args) > most and not several) or (args and missing):
        raise TypeError(
            f"{cls.__name__} expects {', '.join(named)} by name, got {len(args)} arguments without "
            f"names{f', no {missing[0]}' if missing else ''}; for instance "
            f"{cls.__name__}(..., {example}={2 if example.startswith('num') else '...'})"
        )


def parts_of(module: nn.Module, *kinds: type[Part]) -> list[Part]:
    """The modules of these kinds in a tree of modules, which may be the module itself."""
    return [part for part in module.modules() if isinstance(part, kinds)]


def children_of(module: nn.Module) -> list[nn.Module]:
    """The children of a module, those in a list too."""
    lists = [child if isinstance(child, nn.ModuleList) else [child] for child in module.children()]
    return list(chain.from_iterable(lists))


def tensors_of(value: object) -> dict[str, Tensor]:
    """The fields of a dataclass that are tensors."""
    values = {field.name: getattr(value, field.name) for field in fields(value)}
    return {name: value for name, value in values.items() if torch.is_tensor(value)}


def map_tensors(value: Value, change: Callable[[Tensor], Tensor]) -> Value:
    """A dataclass with a function of each field that is a tensor."""
    return replace(value, **{name: change(tensor) for name, tensor in tensors_of(value).items()})


def plain_tensor(tensor: Tensor) -> Tensor:
    """A copy of a tensor for files."""
    return tensor.detach().cpu().clone()


def value_of(name: str, module: Module) -> Tensor:
    """A value with a prior, by its name; unlike closures of gpytorch, it can be pickled."""
    return getattr(module, name)


def set_value(name: str, module: Module, value: Tensor) -> None:
    """Set a value with a prior."""
    module.initialize(**{name: value})


def is_number(value: object, kind: type[Real] = Real) -> bool:
    """Whether a value is a real number of Python or NumPy; True and False are none."""
    return isinstance(value, kind) and not isinstance(value, bool)


def check_positive_integer(value: int, argument: str, owner: str) -> int:
    """The value of an argument as an int; messages name what it belongs to.

    Raises:
        ValueError: no positive integer.
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
    """Values as a tensor, unless they are complex: a conversion would drop the imaginary parts.

    Imaginary parts of zero are refused too. Whether they are zero can depend on the frequencies or
    on trained parameters, and the type does not.

    Args:
        values: a tensor or numbers.
        what: what they are, with the name of the class or function that expects them.
        remedy: what to do.
        dtype: of the tensor; that of the values if None.

    Raises:
        TypeError: the type of the values is complex, or they have a unit.
    """
    refuse_units(values, what)
    kind = torch.as_tensor(values).dtype
    if kind.is_complex:
        raise TypeError(f"expected real numbers for {what}, got {kind}; {remedy}")
    return torch.as_tensor(values, dtype=dtype)


def check_inputs(kernel: Kernel, x: Tensor) -> None:
    """Refuse inputs that have no covariance; messages name the kernel.

    Raises:
        TypeError: inputs that are no tensor, not float32 or float64, or not of the hyperparameters'
            dtype.
        ValueError: no points, one coordinate a point without a column, NaN or infinity.
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
    """Whether a transform of `torch.func`, such as `jacrev` or `vmap`, is active."""
    return torch._C._are_functorch_transforms_active()


def is_traced() -> bool:
    """Whether a transform, or `torch.export`, sees every operation, so that none may depend on the
    values of tensors."""
    return is_transformed() or torch.compiler.is_exporting()


def refuse_tracing(kernel: Kernel) -> None:
    """Raise NotImplementedError inside `torch.jit.trace`: a covariance with derivatives in closed
    form would become a constant of the trace."""
    if torch.jit.is_tracing():
        raise NotImplementedError(
            f"expected {type(kernel).__name__} outside of torch.jit.trace, whose result would be "
            "constant; trace features instead, gp_orff.ORFFKernel(kernel, gp_orff.Grid.for_data(x))"
        )


def check_points(
    kernel: Kernel, num_dims: int | None, x1: Tensor, x2: Tensor, last_dim_is_batch: bool
) -> None:
    """Refuse arguments of `forward` for which a kernel of `num_dims` inputs has no covariance.

    Raises:
        NotImplementedError: as `refuse_tracing`.
        TypeError: as `check_inputs`.
        ValueError: `last_dim_is_batch`, another number of columns, or as `check_inputs`.
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
    """Refuse a base kernel of the class `name` that is no kernel, such as a class.

    Raises:
        TypeError: `base_kernel` is not an instance of a kernel.
    """
    required(
        base_kernel,
        Kernel,
        f"{name} expects an instance of a gpytorch kernel as base_kernel",
        f"for instance {name}(gpytorch.kernels.RBFKernel(), ...)",
    )


def check_scalar(name: str, num_outputs: int, kernel: str = "one") -> None:
    """Refuse a base kernel of several outputs; `name` is that of what needs another.

    Raises:
        ValueError: more than one output.
    """
    if num_outputs != 1:
        raise ValueError(
            f"{name} needs a scalar base kernel, got {kernel} with {num_outputs} outputs; pass the "
            "scalar kernel inside it"
        )


def check_num_dims(
    name: str, num_dims: object, minimum: int, active_dims: Sequence[int] | None
) -> None:
    """Refuse a number of inputs of the class `name` that does not exist.

    Raises:
        TypeError: `num_dims` is not an integer.
        ValueError: it is below `minimum`, or is not the number of `active_dims`.
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
    """Refuse subclasses of `cls` that override its covariance, such as gpytorch's `RBFKernelGrad`.

    Raises:
        NotImplementedError: a kernel with another `forward` than `cls`.
    """
    if type(kernel).forward is not cls.forward:
        raise NotImplementedError(
            f"{type(kernel).__name__} inherits from {cls.__name__} but has a covariance of its "
            f"own, which is not known here; use {cls.__name__}, or register your class with "
            "@gp_orff.spectrum.register and @gp_orff.radial_derivatives.register"
        )


def about_their_middle(
    kernel: Kernel, x1: Float[Tensor, "*b n d"], x2: Float[Tensor, "*b m d"]
) -> tuple[Float[Tensor, "*b n d"], Float[Tensor, "*b m d"]]:
    """Inputs about the mean of `x1` for gpytorch's periodic kernels, which are stationary.

    gpytorch computes their distances from squares of the inputs, which cancels digits of times
    since 1970; it centres those of its other kernels.
    """
    if type(kernel) not in (CosineKernel, PeriodicKernel):
        return x1, x2
    middle = x1.detach().mean(-2, keepdim=True)
    return x1 - middle, x2 - middle


# Roots of covariance matrices in any units.


def positive(variances: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """v, and the least positive number instead of zero."""
    return variances.clamp_min(torch.finfo(variances.dtype).tiny)


def positive_root(variances: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """√v, with a derivative where v = 0."""
    return positive(variances).sqrt()


def cholesky(a: Float[Tensor, "*b n n"]) -> Float[Tensor, "*b n n"]:
    """The Cholesky factor L of a covariance matrix a = L Lᵀ.

    If a is singular to rounding, a nugget of 10⁻⁸ to 10⁻⁶ of its largest variance is added to the
    diagonal. (`psd_safe_cholesky` alone adds a fixed number, whatever the units of a.)

    Example:
        >>> import torch
        >>> from gp_orff.kernels.base import cholesky
        >>> a = torch.tensor([[4.0, 2.0], [2.0, 2.0]])
        >>> (1e10 * cholesky(1e-20 * a.double())).round(decimals=6)
        tensor([[2., 0.],
                [1., 1.]], dtype=torch.float64)
    """
    factor, info = torch.linalg.cholesky_ex(a)
    if not info.any():
        return factor
    size = size_of(a)
    return size.sqrt() * psd_safe_cholesky(a / size)


def size_of(a: Float[Tensor, "*b n n"]) -> Float[Tensor, "*b 1 1"]:
    """The largest variance of a covariance matrix, 1 where it is zero."""
    largest = a.detach().diagonal(dim1=-1, dim2=-2).amax(-1)[..., None, None]
    return torch.where(largest > 0, largest, torch.ones_like(largest))


def reduced_root(root: Float[Tensor, "*b p r"]) -> Float[Tensor, "*b p q"]:
    """A root L of the covariance matrix `root` `root`ᵀ with at most p columns.

    It is the Cholesky factor where r > p. If the matrix is singular, no nugget is added: L is
    `root` times an orthonormal basis of its rows, and differentiable once.

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

    The derivative of C Cᵀ is that of L Lᵀ at constant Q, since Q Qᵀ Cᵀ = Cᵀ.
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
