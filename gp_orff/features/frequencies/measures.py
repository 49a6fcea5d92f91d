"""Which law random frequencies are drawn from; weights make up for the difference."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

from gp_orff.features.frequencies.rule import LeafLaw


class Measure(ABC):
    """Frequencies from ‖z‖^{2t} p(z), p the spectral law, with weights E‖z‖^{2t}/(D‖z‖^{2t})."""

    @abstractmethod
    def tilt(self, leaf: LeafLaw) -> int:
        """t."""


@dataclass(frozen=True)
class Trace(Measure):
    """The law of tr A(ω), A = B Bᵀ: features are bounded (Minh 2016, Section 4)."""

    def tilt(self, leaf: LeafLaw) -> int:
        return leaf.degree


@dataclass(frozen=True)
class Base(Measure):
    """p itself: the unbounded map of Brault et al. 2016 (Algorithm 1)."""

    def tilt(self, leaf: LeafLaw) -> int:
        return 0


MEASURES: dict[str, Measure] = {"trace": Trace(), "base": Base()}
NAMES = {measure: name for name, measure in MEASURES.items()}
