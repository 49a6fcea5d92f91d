"""Readable names of hyperparameters, from the tree of their modules."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from gpytorch.kernels import Kernel, ScaleKernel
from gpytorch.likelihoods import Likelihood
from torch import nn

from gp_orff.data.patterns import DEFAULT
from gp_orff.kernels.base import children_of


def parameter_names(
    kernel: Kernel, likelihoods: Mapping[str, Likelihood]
) -> dict[str, nn.Parameter]:
    """Return the parameters of a kernel and of the likelihood of every group, by readable names.

    A readable name is the name of the parameter without `raw_`. If several branches of the kernel
    tree have a parameter of this name, the names of the branches come before it. A branch is named
    after the class of its kernel, in lower case. Siblings of the same class are numbered. A
    `ScaleKernel` is named after the kernel that it scales. The names contain no other level of the
    tree. Parameters of a named group start with the name of the group.

    Example:
        >>> import gp_orff
        >>> from gpytorch.kernels import MaternKernel, RBFKernel, ScaleKernel
        >>> from gp_orff.fitting.names import parameter_names
        >>> list(
        ...     parameter_names(ScaleKernel(gp_orff.CurlFreeKernel(num_dims=2)), {})
        ... )
        ['outputscale', 'lengthscale']
        >>> list(
        ...     parameter_names(gp_orff.HelmholtzKernel(num_dims=2), {})
        ... )  # doctest: +ELLIPSIS
        ['curl_free.outputscale', 'curl_free.lengthscale', 'divergence_free.outputscale', ...]
        >>> list(parameter_names(RBFKernel() + RBFKernel() + MaternKernel(), {}))
        ['rbf_1.lengthscale', 'rbf_2.lengthscale', 'matern.lengthscale']
    """
    default = likelihoods.get(DEFAULT)
    branches = [("kernel", readable_names(kernel))]
    if default is not None:
        branches.append(("likelihood", readable_names(default)))
    names = _joined(branches)
    for label, likelihood in likelihoods.items():
        if label != DEFAULT:
            parameters = readable_names(likelihood).items()
            names.update({f"{label}.{name}": parameter for name, parameter in parameters})
    return _unique(names)


def readable_names(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of one module and of its children, by readable names."""
    direct = {name.removeprefix("raw_"): p for name, p in module.named_parameters(recurse=False)}
    children = [(name, readable_names(child)) for name, child in _children(module)]
    return _joined([("", direct), *children])


def _joined(branches: Sequence[tuple[str, dict[str, nn.Parameter]]]) -> dict[str, nn.Parameter]:
    """One dict of all branches. The branch precedes each name that several branches have."""
    counts = Counter(name for _, names in branches for name in set(map(_last, names)))
    return {
        f"{branch}.{name}" if branch and counts[_last(name)] > 1 else name: parameter
        for branch, names in branches
        for name, parameter in names.items()
    }


def _unique(names: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    """Each parameter once. A shared parameter has the first of its names."""
    first = {parameter: name for name, parameter in reversed(names.items())}
    return {name: parameter for name, parameter in names.items() if first[parameter] == name}


def _children(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The names and modules of the children with parameters, and of the members of lists."""
    children = [child for child in children_of(module) if any(True for _ in child.parameters())]
    kinds = [_kind(child) for child in children]
    for place, (kind, child) in enumerate(zip(kinds, children, strict=True)):
        number = kinds[: place + 1].count(kind)
        yield f"{kind}_{number}" if kinds.count(kind) > 1 else kind, child


def _kind(module: nn.Module) -> str:
    """The name of a branch: `curl_free` for a `CurlFreeKernel`."""
    if isinstance(module, ScaleKernel):
        return _kind(module.base_kernel)
    name = type(module).__name__.removesuffix("Kernel")
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


def _last(name: str) -> str:
    return name.rpartition(".")[2]
