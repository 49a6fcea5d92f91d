"""The densities that random frequencies are drawn from."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

from gp_orff.features.frequencies.random.proposal import Proposal
from gp_orff.features.frequencies.rule import LeafSpectrum
from gp_orff.kernels.spectra.base import Spectrum


class Measure(ABC):
    """The density that frequencies are drawn from: ∝ ‖z‖^{2t} p(z), p being the spectral density.

    Frequencies then have the weights E‖z‖^{2t}/(D‖z‖^{2t}).
    """

    @abstractmethod
    def order(self, leaf: LeafSpectrum) -> int:
        """t for the frequencies of this leaf."""

    def source(self, leaf: LeafSpectrum) -> Spectrum | Proposal:
        """What the base variables of this leaf are drawn from; with a class `draw`, if frequencies
        are not those of its spectrum."""
        return leaf.spectrum


@dataclass(frozen=True)
class Trace(Measure):
    """The density ∝ tr A(ω), A = B Bᵀ; features are bounded (Minh 2016, Corollary 10)."""

    def order(self, leaf: LeafSpectrum) -> int:
        return leaf.degree

    def source(self, leaf: LeafSpectrum) -> Spectrum | Proposal:
        return leaf.spectrum if leaf.sampler is None else Proposal(leaf.spectrum, leaf.sampler)


@dataclass(frozen=True)
class Base(Measure):
    """The density p; features are unbounded (Brault et al. 2016, Section 2.3)."""

    def order(self, leaf: LeafSpectrum) -> int:
        return 0


_MEASURES: dict[str, Measure] = {"trace": Trace(), "base": Base()}
NAMES = {measure: name for name, measure in _MEASURES.items()}


def as_measure(measure: str | Measure, owner: str) -> Measure:
    """The measure of this name; errors say that `owner` expects it.

    Raises:
        ValueError: an unknown name.
    """
    if isinstance(measure, Measure):
        return measure
    if measure not in tuple(_MEASURES):
        raise ValueError(f'{owner} expects measure "trace" or "base", got {measure!r}')
    return _MEASURES[measure]
