"""The frequencies of a kernel tree's terms on one shared lattice."""

import math
import warnings
from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from gp_orff.features.columns import Columns
from gp_orff.features.frequencies.constant_axes import ALONG_FREQUENCY, plane_weights
from gp_orff.features.frequencies.rule import Draw, TermSpectrum
from gp_orff.features.lattice import GramCache, LatticeColumns
from gp_orff.kernels.harmonic import HarmonicSpectrum
from gp_orff.kernels.spectra.base import GridSpectrum, Spectrum


class GridWarning(UserWarning):
    """Warns that a lengthscale has left the range for which its frequency grid was built.

    The kernel is then less accurate than `Grid(tolerance=...)` says: call `ORFFKernel.redraw()`,
    constrain the lengthscale, or give `Grid` a wider `lengthscale_range`.

    Example:
        >>> import gpytorch, gp_orff, torch, warnings
        >>> x = torch.linspace(0, 1, 20).unsqueeze(-1)
        >>> kernel = gpytorch.kernels.RBFKernel(ard_num_dims=1)
        >>> kernel = gp_orff.ORFFKernel(kernel, gp_orff.Grid.for_data(x))
        >>> kernel.base_kernel.lengthscale = 0.1  # it was 0.69 when the grid was built
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always")
        ...     _ = kernel(x).to_dense()
        >>> caught[0].category.__name__
        'GridWarning'
    """


class FixedBuffers(nn.Module):
    """A module whose buffers keep their types, and take the lengths of the state they load."""

    def _apply(self, fn, recurse=True):
        return super()._apply(lambda tensor: tensor.to(fn(tensor).device), recurse)

    def _load_from_state_dict(self, state_dict, prefix, *arguments):
        for name, buffer in self._buffers.items():
            incoming = state_dict.get(prefix + name)
            if incoming is not None and incoming.shape != buffer.shape:
                self._buffers[name] = torch.empty_like(incoming, device=buffer.device)
        super()._load_from_state_dict(state_dict, prefix, *arguments)


class Lattice(FixedBuffers):
    """The lattice that the terms of a kernel tree share: ω = h ∘ k for integer k.

    Args:
        indices: k, one of each pair ±k.
        spacing: h, in radians per unit of the inputs.
        domain: the lowest and highest value of every input at which the lattice represents the
            kernel; may be infinite.
        lag: the longest lag between a datum and a point of the domain, along each axis.
        tolerance: the share of the variance for which the lattice was made.
        constant: the inputs that are constant, along which frequencies are summed; none if None.
    """

    def __init__(
        self,
        indices: Int[np.ndarray, "D d"],
        spacing: Float[np.ndarray, "d"],
        domain: Float[np.ndarray, "2 d"],
        lag: Float[np.ndarray, "d"],
        tolerance: float,
        constant: Bool[np.ndarray, "d"] | None = None,
    ):
        super().__init__()
        constant = np.zeros(len(spacing), dtype=bool) if constant is None else constant
        self.register_buffer("constant", torch.from_numpy(constant))
        finite = np.isfinite(domain).all()
        self.register_buffer("indices", torch.from_numpy(indices))
        self.register_buffer("spacing", torch.from_numpy(spacing))
        self.register_buffer("domain", torch.from_numpy(domain))
        origin = domain.mean(axis=0) if finite else np.zeros(len(spacing))
        self.register_buffer("origin", torch.from_numpy(origin))
        self.register_buffer("lag", torch.from_numpy(lag if finite else np.zeros_like(lag)))
        self.register_buffer("tolerance", torch.tensor(tolerance, dtype=torch.float64))
        self.cache = GramCache()

    def columns(self) -> LatticeColumns:
        """The cosines and sines of every frequency, with the lattice's cache of C."""
        return LatticeColumns.of(self.indices, self.spacing, self.origin, self.cache)

    def _load_from_state_dict(self, state_dict, prefix, *arguments):
        spacing = state_dict.get(prefix + "spacing", self.spacing)
        state_dict.setdefault(prefix + "constant", torch.zeros_like(spacing, dtype=torch.bool))
        super()._load_from_state_dict(state_dict, prefix, *arguments)
        self.cache = GramCache()

    @property
    def period(self) -> Float[Tensor, "d"]:
        """P = 2π/h, with which the sum over the lattice is periodic."""
        return 2 * math.pi / self.spacing

    def outside(self, x: Float[Tensor, "*b n d"]) -> Bool[Tensor, "*b n"]:
        """Which of the points x are outside the domain."""
        low, high = self.domain
        slack = 1e-6 * (high - low)  # the rounding of float32 inputs
        x = x.detach()[..., : len(low)]
        return ((x < low - slack) | (x > high + slack)).any(-1)

    def check(self, x: Float[Tensor, "*b n d"]) -> None:
        """Check that all points x are inside the domain.

        Raises:
            ValueError: points outside.
        """
        check_domain(x, self.outside(x), self.domain)


def check_domain(
    x: Float[Tensor, "*b n d"], outside: Bool[Tensor, "*b n"], domain: Float[Tensor, "2 d"]
) -> None:
    """Refuse points x that are outside a domain.

    Raises:
        ValueError: points outside.
    """
    if outside.any():
        worst = ", ".join(f"{value:.6g}" for value in x[outside][0].tolist())
        box = ", ".join(f"({low:.6g}, {high:.6g})" for low, high in domain.mT.tolist())
        raise ValueError(
            f"expected points inside the grid's domain ({box}), got {int(outside.sum())} "
            f"outside it, such as ({worst}); give the region of interest as domain= of the "
            "rule, such as Grid.for_data(x, domain=...) or Auto(domain=...)"
        )


class LatticeDraw(FixedBuffers, Draw):
    """The frequencies of one term on a lattice, with the weights of the quadrature.

    Args:
        lattice: shared by all terms of the tree.
        position: which of the lattice's points the term uses, (D,). A point occurs again for each
            constant input of a field.
        direction: of B(ω), (D,): the axis of its spectrum that is a constant input, or
            `ALONG_FREQUENCY`.
        spectrum: of the term, at its present hyperparameters.
        lengthscale_range: the shortest and longest lengthscale for which the frequencies are
            valid, relative to the present lengthscales.
        diagonal_correction: whether inference adds the truncated variance.
        cell: which of the points represent the cell around ω = 0 of a field; see `near_zero` in
            `gp_orff.features`.
    """

    sampled = False

    def __init__(
        self,
        lattice: Lattice,
        position: Int[np.ndarray, "D"],
        direction: Int[np.ndarray, "D"],
        spectrum: TermSpectrum,
        lengthscale_range: tuple[float, float],
        diagonal_correction: bool,
        cell: Int[np.ndarray, "k"] = (),
    ):
        super().__init__([], [])
        self.cell: LatticeDraw | None = None
        if len(cell):
            varying = (~lattice.constant[list(spectrum.leaves[0].dims)]).sum().item()
            others = TermSpectrum(spectrum.leaves[1:], varying * spectrum.rank)
            along = np.full(len(cell), ALONG_FREQUENCY)
            options = (0.0, math.inf), diagonal_correction
            self.cell = LatticeDraw(lattice, cell, along, others, *options)
        self.lattice = lattice
        self.dims = tuple(leaf.dims for leaf in spectrum.leaves)
        self.lengthscale_range, self.diagonal_correction = lengthscale_range, diagonal_correction
        self.warned, self.joint = False, None
        self.register_buffer("position", torch.from_numpy(position))
        self.register_buffer("direction", torch.from_numpy(direction))
        built = _lengths([leaf.spectrum for leaf in spectrum.leaves], self.dims)
        self.register_buffer("built", torch.from_numpy(np.concatenate(built)))

    @property
    def num_frequencies(self) -> int:
        return len(self.position)

    @property
    def nonzero(self) -> Tensor:
        """Which frequencies are not zero, and so have a sine."""
        return self.lattice.indices[self.position].any(-1)

    @property
    def shared(self) -> nn.Module:
        """The frequencies that all terms share: the lattice, or more in a sum with others."""
        return self.joint or self.lattice

    def shared_columns(self) -> Columns:
        return self.shared.columns()

    def nodes(self, spectra):
        self._check_range(spectra)
        indices, spacing = self.lattice.indices[self.position], self.lattice.spacing
        omegas = [(indices * spacing)[:, list(dims)] for dims in self.dims]
        weights = 1.0 + self.nonzero.to(spacing)  # −k is the same feature
        for leaf, (spectrum, omega) in enumerate(zip(spectra, omegas, strict=True)):
            weights = weights * self._leaf_weights(leaf, spectrum, omega)
        across = self.direction != ALONG_FREQUENCY
        if across.any():
            omegas[0][across] = torch.eye(len(self.dims[0])).to(spacing)[self.direction[across]]
        return omegas, weights

    def _leaf_weights(
        self, leaf: int, spectrum: Spectrum, omega: Float[Tensor, "D k"]
    ) -> Float[Tensor, "*b D"]:
        """The weights of the frequencies of one leaf; the first is that of the field."""
        dims = list(self.dims[leaf])
        spacing, constant = self.lattice.spacing[dims], self.lattice.constant[dims].tolist()
        if leaf or not any(constant):
            return plane_weights(spectrum, omega, spacing, constant)
        axes, counts = self.direction.unique_consecutive(return_counts=True)
        parts = zip(axes.tolist(), omega.split(counts.tolist()), strict=True)
        weights = [plane_weights(spectrum, part, spacing, constant, axis) for axis, part in parts]
        return torch.cat(weights, dim=-1)

    def check_domain(self, spectra, *points):
        for x in points:
            self.lattice.check(x)

    def _load_from_state_dict(self, state_dict, prefix, *arguments):
        position = state_dict.get(prefix + "position", self.position)
        along = torch.full_like(position, ALONG_FREQUENCY)
        state_dict.setdefault(prefix + "direction", along)  # of a state before there were others
        super()._load_from_state_dict(state_dict, prefix, *arguments)

    def ratio_outside_range(self, spectra: Sequence[Spectrum]) -> float | None:
        lengthscales, others = _lengths(spectra, self.dims)
        built = self.built.cpu().numpy()
        # other lengths depend on two parameters, and may leave the range by each of them
        power = np.repeat([1, 2], [len(lengthscales), len(others)])[: len(built)]
        ratio = np.concatenate([lengthscales, others])[: len(built)] / built
        low, high = self.lengthscale_range
        outside = (ratio < 0.999 * low**power) | (ratio > 1.001 * high**power)
        columns = [dim for dims in self.dims for dim in dims]  # one for each lengthscale
        outside[: len(columns)] &= ~self.lattice.constant.cpu().numpy()[columns]
        outside = ratio[outside]
        return float(outside[0]) if len(outside) else None

    def _check_range(self, spectra: Sequence[Spectrum]) -> None:
        ratio = None if self.warned else self.ratio_outside_range(spectra)
        if ratio is not None:
            self.warned = True
            low, high = self.lengthscale_range
            warnings.warn(
                f"a lengthscale is {ratio:.2g} times what the frequency grid was built for, "
                f"outside its range {low:g} to {high:g}: call redraw() of the ORFFKernel and "
                "continue, constrain the lengthscale, or give Grid a wider lengthscale_range",
                GridWarning,
                stacklevel=2,
            )


def _lengths(
    spectra: Sequence[Spectrum], dims: Sequence[Sequence[int]]
) -> tuple[Float[np.ndarray, "k"], Float[np.ndarray, "m"]]:
    """The lengthscales, and the other lengths, for which a grid is built."""
    pairs = [(spectrum, len(axes)) for spectrum, axes in zip(spectra, dims, strict=True)]
    lengthscales = [axis_lengthscales(spectrum, count) for spectrum, count in pairs]
    others = [spectrum.other_lengths(count) for spectrum, count in pairs]
    return np.concatenate([[], *lengthscales]), np.concatenate([[], *others])


def axis_lengthscales(spectrum: Spectrum, num_dims: int) -> Float[np.ndarray, "d"]:
    """The lengthscale along each axis: the scaled radius of a unit frequency."""
    if isinstance(spectrum, HarmonicSpectrum):
        return spectrum.lengths()
    if not isinstance(spectrum, GridSpectrum):
        raise NotImplementedError(
            f"{type(spectrum).__name__} has no scaled_radius, tail and correlation, which a "
            "frequency grid needs: expected a subclass of gp_orff.spectra.GridSpectrum; use a "
            "random rule such as gp_orff.QuasiMonteCarlo"
        )
    return spectrum.scaled_radius(np.eye(num_dims))
