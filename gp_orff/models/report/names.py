"""Names of hyperparameters that a reader knows, from the tree of modules that holds them."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from gpytorch.kernels import Kernel, ScaleKernel
from gpytorch.likelihoods import Likelihood
from torch import nn

from gp_orff.data.patterns import DEFAULT


def parameter_names(
    kernel: Kernel, likelihoods: Mapping[str, Likelihood]
) -> dict[str, nn.Parameter]:
    """The parameters of a kernel and of the noise of every group.

    A name is that of the parameter, without `raw_`, after those branches of the kernel tree in
    which others of the same name are too. A branch is called after its kind, in lower case, with a
    number where several of a kind stand side by side; a `ScaleKernel` after what it scales.
    Everything else on the way is left out. Noise comes after its group, if that has a name.

    Example:
        >>> import gp_orff
        >>> from gpytorch.kernels import MaternKernel, RBFKernel, ScaleKernel
        >>> from gp_orff.models.report.names import parameter_names
        >>> list(parameter_names(ScaleKernel(gp_orff.CurlFreeKernel(num_dims=2)), {}))
        ['outputscale', 'lengthscale']
        >>> list(parameter_names(gp_orff.HelmholtzKernel(num_dims=2), {}))  # doctest: +ELLIPSIS
        ['curl_free.outputscale', 'curl_free.lengthscale', 'divergence_free.outputscale', ...]
        >>> list(parameter_names(RBFKernel() + RBFKernel() + MaternKernel(), {}))
        ['rbf_1.lengthscale', 'rbf_2.lengthscale', 'matern.lengthscale']
    """
    unnamed = likelihoods.get(DEFAULT)
    branches = [("kernel", readable_names(kernel))]
    if unnamed is not None:
        branches.append(("likelihood", readable_names(unnamed)))
    found = _joined(branches)
    for label, likelihood in likelihoods.items():
        if label != DEFAULT:
            own = readable_names(likelihood).items()
            found.update({f"{label}.{name}": parameter for name, parameter in own})
    return _once(found)


def readable_names(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of one module."""
    own = {name.removeprefix("raw_"): p for name, p in module.named_parameters(recurse=False)}
    return _joined([("", own), *((name, readable_names(part)) for name, part in _parts(module))])


def _joined(branches: Sequence[tuple[str, dict[str, nn.Parameter]]]) -> dict[str, nn.Parameter]:
    """With the name of the branch where others have a parameter of the same name."""
    holders = Counter(kind for _, names in branches for kind in set(map(_last, names)))
    return {
        f"{branch}.{name}" if branch and holders[_last(name)] > 1 else name: parameter
        for branch, names in branches
        for name, parameter in names.items()
    }


def _once(names: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    """A parameter that stands in two places has the first of its names."""
    first = {parameter: name for name, parameter in reversed(names.items())}
    return {name: parameter for name, parameter in names.items() if first[parameter] == name}


def _parts(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules inside one, those in a list too, that have parameters; and their names."""
    found = []
    for child in module.children():
        found.extend(child if isinstance(child, nn.ModuleList) else [child])
    found = [own for own in found if any(True for _ in own.parameters())]
    kinds = [_kind(own) for own in found]
    for place, (kind, own) in enumerate(zip(kinds, found, strict=True)):
        number = kinds[: place + 1].count(kind)
        yield f"{kind}_{number}" if kinds.count(kind) > 1 else kind, own


def _kind(module: nn.Module) -> str:
    """curl_free of a CurlFreeKernel."""
    if isinstance(module, ScaleKernel):
        return _kind(module.base_kernel)
    name = type(module).__name__.removesuffix("Kernel")
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


def _last(name: str) -> str:
    return name.rpartition(".")[2]
