"""The normal equations of lattice features, solved by iterations."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from jaxtyping import Float
from torch import Tensor

from gp_orff.features.expansion import FeatureExpansion
from gp_orff.inference.equations.base import Group, NormalEquations, evidence_of, noise_terms
from gp_orff.inference.equations.dense import DenseRows, mean_and_response
from gp_orff.inference.equations.primal import right_hand_sides
from gp_orff.inference.iterative.evidence import EstimatedEvidence, InvQuad, LogdetRatio
from gp_orff.inference.iterative.operator import WeightPrecision
from gp_orff.inference.iterative.posterior import IterativePosterior
from gp_orff.inference.iterative.preconditioner import precondition
from gp_orff.inference.iterative.system import Accuracy, System
from gp_orff.inference.quadratic import Evidence


@dataclass(frozen=True)
class Iterative(NormalEquations):
    """The primal algebra of features on a lattice, of groups of observations and dense rows."""

    expansion: FeatureExpansion
    groups: Sequence[Group]
    rows: Sequence[DenseRows] = ()
    accuracy: Accuracy = field(default_factory=Accuracy)

    def evidence(self) -> Evidence:
        system, logdet = self._system
        quad = InvQuad.apply(system, self._b, *self._parts)
        ratio = LogdetRatio.apply(system, *self._parts)
        return EstimatedEvidence.of(self._evidence(quad, logdet), system, ratio)

    def posterior(self, mean):
        system, logdet = self._system
        b = self._b

        def evidence_of_solution(u: Tensor) -> EstimatedEvidence:
            quad = u @ (2 * b - system.precision.product(u).mT)  # quadratic in the residual
            exact = self._evidence(0.5 * (quad + quad.mT), logdet)
            return EstimatedEvidence.of(exact, system)

        u = system.solve_roughly(b.mT)
        contrast = evidence_of_solution(u).contrast(mean).mT  # y less its mean
        u[:1] += system.refined(contrast @ b.mT, contrast @ u) - contrast @ u
        evidence = evidence_of_solution(u)
        theta = mean_and_response(u.mT @ evidence.contrasts(mean))
        return IterativePosterior(self.expansion, *theta, system), evidence

    @cached_property
    def _whitened(self) -> list[tuple[Tensor, Tensor, Tensor]]:
        return [rows.whitened() for rows in self.rows]

    @cached_property
    def _features(self) -> list[Float[Tensor, "M F"]]:
        return [features for features, *_ in self._whitened]

    @cached_property
    def _b(self) -> Float[Tensor, "F 1+p"]:
        b = right_hand_sides(self.expansion, self.groups)
        return b + sum(features.mT @ design for features, design, _ in self._whitened)

    @cached_property
    def _bases(self) -> list[Float[Tensor, "p p"]]:
        """P E of every weight of every group, for all p components."""
        bases = []
        for statistics, noise in self.groups:
            pattern = statistics.pattern
            precision = pattern.precision(noise.precision)
            for e in pattern.basis(precision):
                bases.append(pattern.embed(pattern.embed(precision @ e).mT))
        return bases

    @property
    def _parts(self) -> list[Tensor]:
        """The tensors that A depends on."""
        return [self.expansion.directions, *self._bases, *self._features]

    @cached_property
    def _system(self) -> tuple[System, Float[Tensor, ""]]:
        """A with its preconditioner P, and log|P|."""
        parts = self.expansion, self.groups
        preconditioner, logdet = precondition(*parts, self._features, self.accuracy.block)
        precision = WeightPrecision.of(*parts, self._bases, self._features)
        num_values = sum(statistics.num_values for statistics, _ in self.groups)
        num_values += sum(len(features) for features in self._features)
        return System(precision, preconditioner, self.accuracy, num_values), logdet

    def _evidence(self, explained: Tensor, logdet: Tensor) -> Evidence:
        row_terms = [
            (design.mT @ design, noise_logdet) for _, design, noise_logdet in self._whitened
        ]
        return evidence_of([*map(noise_terms, self.groups), *row_terms], explained, logdet)
