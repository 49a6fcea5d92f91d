"""What a bound is asked of: a kernel, the measure of its frequencies, and a box of inputs."""

import math
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property, reduce
from operator import add

import torch
from gpytorch.kernels import Kernel

from gp_orff.features.assemble import term_spectra
from gp_orff.features.bounds.constants import Constants, term_constants
from gp_orff.features.domain import Box, as_box
from gp_orff.features.frequencies.random import Measure, as_measure
from gp_orff.features.frequencies.rule import TermSpectrum
from gp_orff.kernels.tree import Term, infer_num_dims, input_columns, terms


@dataclass(frozen=True)
class Problem:
    """The random terms of a kernel, without constants, whose features are exact."""

    name: str  # of the bound, for messages
    terms: tuple[tuple[Term, TermSpectrum], ...]
    measure: Measure
    domain: Box | None

    @classmethod
    @torch.no_grad()
    def of(
        cls,
        name: str,
        kernel: Kernel,
        domain: Box | None,
        measure: str | Measure,
        num_dims: int | None,
    ) -> "Problem":
        """The problem of the arguments of a bound.

        Raises:
            TypeError: `kernel` is not a gpytorch kernel.
            ValueError: a batch of kernels; a kernel without random terms, or whose terms have
                different numbers of outputs; a domain that is not a finite box of its inputs; an
                unknown measure.
        """
        if not isinstance(kernel, Kernel):
            raise TypeError(
                f"{name} expects an instance of a gpytorch kernel, got {kernel!r}; use, for "
                "instance, gp_orff.CurlFreeKernel(num_dims=2)"
            )
        if kernel.batch_shape:
            raise ValueError(
                f"{name} expects one kernel, got a batch of shape {tuple(kernel.batch_shape)}; "
                "pass one kernel of the batch, kernel[i]"
            )
        measure = as_measure(measure, name)
        kernel = deepcopy(kernel).double().cpu()
        summands = terms(kernel)
        outputs = sorted({term.num_outputs for term in summands})
        if len(outputs) > 1:
            raise ValueError(
                f"{name} expects terms with one number of outputs, got {outputs}; wrap scalar "
                "kernels in gpytorch.kernels.MultitaskKernel"
            )
        if domain is not None:
            domain = as_box(domain, "domain", name)
        num_dims = infer_num_dims(summands, num_dims)
        if num_dims is None:  # constants at one lag do not depend on it
            num_dims = 1 if domain is None else len(domain)
        _check_columns(name, domain, *input_columns(summands, num_dims))
        pairs = zip(summands, term_spectra(kernel, num_dims), strict=True)
        random = tuple(pair for pair in pairs if pair[0].leaves)
        if not random:
            raise ValueError(
                f"{name} expects a kernel with a spectral density, got constants only, whose "
                "features are exact; add a stationary kernel"
            )
        return cls(name, random, measure, domain)

    @cached_property
    def constants(self) -> Constants:
        """The constants of the sum of all terms."""
        return reduce(add, (term_constants(*pair, self.measure) for pair in self.terms))

    @property
    def num_outputs(self) -> int:
        """p, the number of outputs."""
        return self.terms[0][0].num_outputs

    @property
    def columns(self) -> list[int]:
        """The input columns that the kernel depends on."""
        return sorted({dim for _, term in self.terms for leaf in term.leaves for dim in leaf.dims})

    @property
    def diagonal(self) -> float:
        """l, the diagonal of the domain along these columns.

        Raises:
            ValueError: no domain.
        """
        if self.domain is None:
            raise ValueError(
                f"{self.name} expects a domain, since it holds for all inputs of a box, got None; "
                "pass domain=((low, high), ...), one pair for each input"
            )
        return math.hypot(*(self.domain[dim][1] - self.domain[dim][0] for dim in self.columns))


def _check_columns(name: str, domain: Box | None, number: int, exact: bool) -> None:
    """Refuse a domain with another number of inputs than the kernel has, or than it needs."""
    if domain is None or len(domain) == number or (len(domain) > number and not exact):
        return
    raise ValueError(
        f"{name} expects a domain with {number} pairs (low, high), one for each input of the "
        f"kernel, got {len(domain)}"
    )
