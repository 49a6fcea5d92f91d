"""A kernel tree as a sum over the lengths of its learned spectra."""

from collections.abc import Iterator
from copy import deepcopy

from gpytorch.kernels import AdditiveKernel, Kernel, RBFKernel

from gp_orff.kernels.learned_spectrum.kernel import LearnedSpectrumKernel


def components(kernel: Kernel) -> Iterator[tuple[LearnedSpectrumKernel, int, Kernel]]:
    """∂K/∂π_j of every learned spectrum of a kernel tree with covariance K.

    K is linear in the weights π of each: ∂K/∂π_j is the term of a sum that the spectrum belongs to,
    with an RBF kernel of the length ℓ λ_j in its place.

    Yields:
        The learned spectrum, j, and the kernel ∂K/∂π_j; this one serves until the next is taken.

    Example:
        >>> import gp_orff, torch
        >>> from gp_orff.kernels.learned_spectrum.components import components
        >>> base, x = gp_orff.LearnedSpectrumKernel(5), torch.rand(3, 2)
        >>> kernel = gp_orff.CurlFreeKernel(base, num_dims=2)
        >>> parts = [own.weights[j] * part(x).to_dense() for own, j, part in components(kernel)]
        >>> torch.allclose(sum(parts), kernel(x).to_dense(), atol=1e-4)
        True
    """
    for term in _terms(kernel):
        for path, own in term.named_modules():
            if not isinstance(own, LearnedSpectrumKernel):
                continue
            rbf = RBFKernel(
                ard_num_dims=own.ard_num_dims,
                batch_shape=own.batch_shape,
                active_dims=None if own.active_dims is None else tuple(own.active_dims.tolist()),
            ).to(own.shape)
            whole = _replaced(term, path, rbf)
            for j, length in enumerate(own.lengths.tolist()):
                rbf.lengthscale = own.lengthscale.detach() * length
                yield own, j, whole


def _terms(kernel: Kernel) -> Iterator[Kernel]:
    if isinstance(kernel, AdditiveKernel):
        for part in kernel.kernels:
            yield from _terms(part)
    else:
        yield kernel


def _replaced(kernel: Kernel, path: str, part: Kernel) -> Kernel:
    """A copy of a kernel tree with another kernel at a path."""
    if not path:
        return part
    copy = deepcopy(kernel)
    parent, _, name = path.rpartition(".")
    setattr(copy.get_submodule(parent), name, part)
    return copy
