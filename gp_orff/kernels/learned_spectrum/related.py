"""A learned spectrum that is another one plus a difference: the two parts of one field."""

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy

import torch
from gpytorch.constraints import Interval
from gpytorch.kernels import Kernel
from jaxtyping import Float
from torch import Tensor, nn

from gp_orff.kernels.learned_spectrum.kernel import LearnedSpectrumKernel

_DIFFERENCE = 0.5  # standard deviations of a difference, over those of the curve itself


class RelatedSpectrumKernel(LearnedSpectrumKernel):
    """A `LearnedSpectrumKernel` whose curve is that of another one plus a difference.

    With the log weights log π of the other one and the same lengths ℓ λ_j,

        log π′ = const + log π + b′ u + D₂⁺ c′ ,    b′ ~ N(0, 1.5²) ,    c′_j ~ N(0, (τ/2)²) :

    half the standard deviations of the first curve. `shape` holds b′ and c′ over theirs.

    Args:
        other: the kernel whose lengthscale, lengths and curve this one shares. It is no submodule:
            the part of the model that owns it trains it.

    Example:
        >>> import gp_orff
        >>> from gp_orff.kernels.learned_spectrum import RelatedSpectrumKernel
        >>> first = gp_orff.LearnedSpectrumKernel(5)
        >>> second = RelatedSpectrumKernel(first)
        >>> first.lengthscale, first.shape.data[0] = 2.0, 0.3
        >>> second.lengthscale.item(), bool((second.weights == first.weights).all())
        (2.0, True)
    """

    has_lengthscale = False  # of its own: gpytorch registers none

    def __init__(self, other: LearnedSpectrumKernel):
        super().__init__(
            other.num_knots,
            other.smoothness,
            ard_num_dims=other.ard_num_dims,
            batch_shape=other.batch_shape,
            active_dims=other.active_dims,
            continued=other.continued,
        )
        self._other = (other,)  # a tuple hides it from the list of submodules
        self.has_lengthscale = True
        self.to(other.shape)
        self.shape.requires_grad_(other.shape.requires_grad)

    @property
    def other(self) -> LearnedSpectrumKernel:
        """The kernel whose curve this one shares."""
        return self._other[0]

    @property
    def lengthscale(self) -> Float[Tensor, "*b 1 d"]:
        """ℓ of the other kernel."""
        return self.other.lengthscale.to(self.shape)

    @lengthscale.setter
    def lengthscale(self, value: float | Tensor) -> None:
        self.other.lengthscale = value

    @property
    def raw_lengthscale(self) -> nn.Parameter:
        """The parameter of the other kernel."""
        return self.other.raw_lengthscale

    @property
    def raw_lengthscale_constraint(self) -> Interval:
        """Its constraint."""
        return self.other.raw_lengthscale_constraint

    @property
    def curve(self) -> Float[Tensor, "*b J"]:
        """The logarithms of the weights at the knots, up to a constant."""
        difference = self.shape @ self._basis.to(self.shape).mT
        return self.other.curve.to(self.shape) + _DIFFERENCE * difference

    def _coordinates(self, change: Float[Tensor, "*b J"]) -> Float[Tensor, "*b J-1"]:
        """The change of `shape` that changes the curve so, up to a constant."""
        return super()._coordinates(change) / _DIFFERENCE

    def centre(self, order: int) -> None:
        """Leave the curve where that of the other kernel is."""
        self.shape.data.zero_()

    def __getitem__(self, index) -> "RelatedSpectrumKernel":
        own = super().__getitem__(index)
        if own is not self:
            own._other = (self.other[index],)
        return own

    def expand_batch(self, *sizes: torch.Size | int) -> "RelatedSpectrumKernel":
        """The kernel with parameters expanded to a batch shape, as in gpytorch."""
        own = super().expand_batch(*sizes)
        if own is not self:
            own._other = (self.other.expand_batch(*sizes),)
        return own


def learned_spectra(kernel: nn.Module, trained: bool = False) -> list[LearnedSpectrumKernel]:
    """The learned spectra anywhere in a kernel tree; if `trained`, those whose curve is."""
    found = [part for part in kernel.modules() if isinstance(part, LearnedSpectrumKernel)]
    return [part for part in found if part.shape.requires_grad or not trained]


def has_learned_spectrum(kernel: Kernel, trained: bool = False) -> bool:
    """Whether a learned spectrum is anywhere in a kernel tree; if `trained`, one whose curve is."""
    return bool(learned_spectra(kernel, trained))


@contextmanager
def held_curves(kernel: Kernel) -> Iterator[None]:
    """Hold the trained curves of learned spectra at their start, while other hyperparameters are
    searched; they are trained again afterwards."""
    trained = [part.shape for part in learned_spectra(kernel, trained=True)]
    for curve in trained:
        curve.requires_grad_(False).zero_()
    try:
        yield
    finally:
        for curve in trained:
            curve.requires_grad_(True)


def continue_curves(kernel: Kernel, continued: bool = True) -> None:
    """Continue learned spectra that are trained beyond their last knots, or end them there."""
    for part in learned_spectra(kernel, trained=True):
        part.continued = continued


def related_copy(kernel: Kernel) -> Kernel:
    """A copy of a kernel tree, in which every learned spectrum is the original one plus a
    difference."""
    if isinstance(kernel, LearnedSpectrumKernel):
        return RelatedSpectrumKernel(kernel)
    copy = deepcopy(kernel)
    for path, part in kernel.named_modules():
        if isinstance(part, LearnedSpectrumKernel):
            parent, _, name = path.rpartition(".")
            setattr(copy.get_submodule(parent), name, RelatedSpectrumKernel(part))
    return copy
