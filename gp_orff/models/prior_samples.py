"""Functions drawn from the prior of a kernel."""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property

import torch
from gpytorch.kernels import Kernel
from jaxtyping import Float
from torch import Tensor

from gp_orff.features.assemble import draw, expand, term_spectra, with_constants
from gp_orff.features.chunked import Box
from gp_orff.features.draws import Draw, Rule
from gp_orff.features.grid import GRID_INPUTS, Grid
from gp_orff.features.random import LongTails, QuasiMonteCarlo
from gp_orff.kernels.base import check_positive_integer
from gp_orff.kernels.symbol_covariance import require
from gp_orff.kernels.tree import space_of, terms
from gp_orff.models.sample_paths import SamplePaths, WeightPaths
from gp_orff.symbols.base import Symbol

_TOLERANCE = 1e-4  # the share of the variance that paths may lack: less than 4000 of them show
_MOST = 2**13  # features of a grid
_FREQUENCIES = 2048  # of a prior that no such grid serves


@dataclass(frozen=True)
class Prior:
    """A field without data, on frequencies that were drawn; what `SamplePaths` asks of a model."""

    kernel: Kernel
    num_inputs: int
    draws: Sequence[Draw]
    domain: Box | None  # None: any points

    @property
    def device(self) -> torch.device:
        return next(self.kernel.parameters()).device

    @cached_property
    def space(self) -> tuple[int, ...]:
        """The input columns that are directions of space."""
        return space_of(self.kernel, self.num_inputs)

    @property
    def data_point(self) -> Float[Tensor, "1 d"]:
        """A point of the domain."""
        box = self.domain or ((0.0, 1.0),) * self.num_inputs
        middle = [0.5 * (low + high) for low, high in box]
        return torch.tensor([middle], dtype=torch.float64, device=self.device)

    def check_symbol(self, symbol: Symbol) -> None:
        """Raise ValueError for a symbol that does not exist for the field."""
        require(symbol, self.kernel, self.space)

    def require(self, points: Float[Tensor, "n d"], symbol: Symbol | None) -> None:
        """Raise ValueError for points outside the domain of the frequencies."""
        if self.domain is not None:
            self.draws[0].shared.check(points)

    def trend(self, points: Float[Tensor, "n d"], symbol: Symbol | None) -> Float[Tensor, "n 1"]:
        """The mean, zero."""
        return torch.zeros_like(points[:, :1])


def sample_prior(
    kernel: Kernel, num_paths: int, *, seed: int = 0, domain: Box | None = None
) -> SamplePaths:
    """Draw functions from the Gaussian process with a kernel and the mean zero.

    Each is f(x) = Σ_f θ_f φ_f(x) m_f with weights θ ~ N(0, I): the features are those of a grid for
    the domain, which lacks at most a ten-thousandth of the variance or so, and otherwise of 2048
    quasi-random frequencies, whose covariance has an error of some per cent that all paths share.

    Args:
        kernel: any kernel that `ORFFKernel` accepts, at its present hyperparameters.
        num_paths: the number of functions S.
        seed: of the random numbers.
        domain: (low, high) of each input, where the functions are needed. None for anywhere; then
            the frequencies are quasi-random, and the kernel has to know its number of inputs.

    Returns:
        `paths`, with `paths(x)` of shape (S, n, p), which is the same functions in all calls;
        `paths(x, symbol)` are their derivatives, potentials and parts. See `SamplePaths`.

    Raises:
        ValueError: `num_paths` is less than 1, a number of inputs that is not known, or a kernel
            that needs a domain.

    Example:
        >>> import gp_orff, torch
        >>> kernel = gp_orff.HelmholtzKernel(num_dims=2)
        >>> flows = gp_orff.sample_prior(kernel, 3, seed=1, domain=((0, 5), (0, 5)))
        >>> x = 5 * torch.rand(7, 2)
        >>> flows(x).shape, flows(x, gp_orff.Curl()).shape
        (torch.Size([3, 7, 2]), torch.Size([3, 7, 1]))
    """
    check_positive_integer(num_paths, "num_paths", "sample_prior")
    with torch.no_grad():
        kernel = deepcopy(kernel).double().requires_grad_(False)
        box = None if domain is None else tuple((float(low), float(high)) for low, high in domain)
        num_inputs = _num_inputs(kernel) if box is None else len(box)
        draws, box = _drawn(kernel, num_inputs, box, seed)
        expansion = with_constants(expand(kernel, draws, num_inputs).double(), terms(kernel), draws)
        generator = torch.Generator().manual_seed(seed)
        theta = torch.randn(
            expansion.num_features, num_paths, generator=generator, dtype=torch.float64
        )
        prior = Prior(kernel, num_inputs, draws, box)
        return SamplePaths(WeightPaths(expansion, theta.to(prior.device)), prior)


def _drawn(
    kernel: Kernel, num_inputs: int, box: Box | None, seed: int
) -> tuple[list[Draw], Box | None]:
    """Frequencies, and the domain that they serve."""
    rule: Rule = QuasiMonteCarlo(_FREQUENCIES, measure=LongTails(), seed=seed)
    decays = any(term.factor.decays for term in terms(kernel))
    if decays and box is None:
        raise ValueError("expected domain= for a kernel whose waves decay with height, got None")
    if box is None or num_inputs > GRID_INPUTS:
        return draw(kernel, rule, num_inputs), None
    grid = Grid(domain=box, tolerance=_TOLERANCE, lengthscale_range=(1.0, 1.0), max_features=_MOST)
    try:
        draws = draw(kernel, grid, num_inputs)
    except (ValueError, NotImplementedError):
        if decays:
            raise
        return draw(kernel, rule, num_inputs), None
    if decays or draws[0].shared.tolerance.item() <= 10 * _TOLERANCE:
        return draws, box
    return draw(kernel, rule, num_inputs), None


def _num_inputs(kernel: Kernel) -> int:
    """The number of inputs, as far as a kernel knows it."""
    counts = [len(leaf.dims) for spectrum in term_spectra(kernel) for leaf in spectrum.leaves]
    return max(counts)
