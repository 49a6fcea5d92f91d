"""`FieldPosterior`: means, variances, symbols and sample paths of a field, given the data."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from gpytorch.models import ExactGP
from jaxtyping import Float
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from gp_orff.data.checks import ColumnUnits, entries_in_units, in_column_units
from gp_orff.data.noise import mixture_quantile
from gp_orff.data.validation import as_points, as_real
from gp_orff.exact_gp.operators import posterior_covariance
from gp_orff.inference.posteriors import FieldDistribution
from gp_orff.kernels.base import cholesky, is_transformed
from gp_orff.labelled.attributes import since_epoch
from gp_orff.labelled.maps import on_grid
from gp_orff.labelled.plane import LocalPlane
from gp_orff.models.derived import (
    FieldNormal,
    ScalarNormal,
    directions_unknown,
    warn_of_derivatives,
)
from gp_orff.models.design import Design, Redundancy, design, redundancy
from gp_orff.models.ellipses import TidalEllipses, constituent_of, ellipses
from gp_orff.models.energy_spectrum import EnergySpectrum, energy_spectrum
from gp_orff.models.frozen_model import ExactGPSnapshot, FieldOnDomain, PartSnapshot, Snapshot
from gp_orff.models.report import description
from gp_orff.models.sample_paths import SamplePaths, Summary, sample_paths
from gp_orff.models.transforms import pointwise
from gp_orff.symbols.base import Symbol
from gp_orff.symbols.pointwise import (
    Component,
    Curl,
    CurlFreePart,
    Divergence,
    DivergenceFreePart,
    Jacobian,
    Potential,
    ReductionToPole,
    StreamFunction,
    VectorPotential,
)
from gp_orff.threads import chosen_threads

if TYPE_CHECKING:
    import xarray


class FieldPosterior:
    """The posterior of the field given the data, including the mean μ, as a snapshot of a model.

    `model.posterior()` returns it. A `symbol` is a linear map of the field, such as `Divergence()`.
    Variances are for the field without noise. They include the uncertainty of a trained constant
    mean (universal kriging), also for symbols. After a fit to few data, or with a learned spectrum,
    they include the uncertainty of the hyperparameters. The posterior is then a mixture of normal
    distributions, with moments by `mean` and `variance`, and intervals by `confidence_region`.

    Results have the floating type of the points x, and are computed in float64. For points outside
    the domain of a grid, a larger grid is built, or a ValueError is raised if that is impossible.

    Args:
        snapshot: the data, kernel, noise and mean of the model.
        units: the units of the columns of the points, if known. Points in other units, from
            `gp_orff.labelled` or pint, are converted, and so is every other argument of a method.
            An argument whose unit cannot be converted raises an error.
        coverage: the coverage of 95 % intervals, for observations that were held out after the fit;
            None if it was not computed. Datasets have it as an attribute.
        units_of_outputs: the units of the components, if known, for noise and values with units.

    Example:
        >>> import gp_orff, torch
        >>> x = torch.rand(100, 2, dtype=torch.float64)
        >>> y = torch.stack(
        ...     [torch.sin(3 * x[:, 1]), torch.sin(3 * x[:, 0])], dim=-1
        ... )
        >>> model = gp_orff.VectorFieldGP(gp_orff.DivergenceFreeKernel(num_dims=2))
        >>> field = model.fit(
        ...     x, y + 0.1 * torch.randn(100, 2), progress=False
        ... ).posterior()
        >>> field.mean(x).shape, field.variance(x).shape
        (torch.Size([100, 2]), torch.Size([100, 2]))
        >>> (field.mean(x) - y).abs().mean() < 0.1  # the noise
        tensor(True)
    """

    def __init__(
        self,
        snapshot: Snapshot,
        units: Sequence[str | None] = (),
        coverage: float | None = None,
        units_of_outputs: Sequence[str | None] = (),
    ):
        self._snapshot, self.units, self.coverage = snapshot, tuple(units), coverage
        self._columns = ColumnUnits(self.units, tuple(units_of_outputs))
        self._field = snapshot.field()
        self._extended: FieldOnDomain | None = None  # for the last points outside the domain
        self._image: tuple[FieldOnDomain, Symbol, FieldOnDomain] | None = None  # the last one
        self._warned: set[type[Symbol]] = set()

    def __getstate__(self) -> dict:
        return {**self.__dict__, "_image": None}  # some symbols cannot be pickled

    @classmethod
    def from_exact_gp(cls, model: ExactGP) -> "FieldPosterior":
        """Return the posterior of a trained gpytorch model.

        Args:
            model: an `ExactGP` with training data and a `mean_module`, whose `covar_module` is an
                `ORFFKernel` or an exact kernel.

        Raises:
            TypeError: the model has no training data, or one of the two modules is missing.
            NotImplementedError: a likelihood whose noise this package does not support.

        Example:
            >>> import gp_orff, gpytorch, torch
            >>> class Model(gpytorch.models.ExactGP):
            ...     def __init__(self, x, y, likelihood):
            ...         super().__init__(x, y, likelihood)
            ...         constant = gpytorch.means.ConstantMean()
            ...         self.mean_module = gpytorch.means.MultitaskMean(
            ...             constant, num_tasks=2
            ...         )
            ...         kernel = gp_orff.HelmholtzKernel(num_dims=2)
            ...         self.covar_module = gp_orff.ORFFKernel(
            ...             kernel, gp_orff.Grid.for_data(x)
            ...         )
            ...
            ...     def forward(self, x):
            ...         return gpytorch.distributions.MultitaskMultivariateNormal(
            ...             self.mean_module(x), self.covar_module(x)
            ...         )
            >>> x, y = torch.rand(50, 2), torch.randn(50, 2)
            >>> model = Model(x, y, gpytorch.likelihoods.MultitaskGaussianLikelihood(2))
            >>> field = gp_orff.FieldPosterior.from_exact_gp(model)
            >>> field.divergence(torch.rand(7, 2)).mean.shape
            torch.Size([7])
        """
        return cls(ExactGPSnapshot.of(model))

    @property
    def num_inputs(self) -> int:
        """d, the number of columns of the points."""
        return self._snapshot.num_inputs

    @property
    def num_outputs(self) -> int:
        """p, the number of components of the field."""
        return self._field.distribution.num_outputs

    @property
    def box(self) -> tuple[tuple[float, float], ...]:
        """The smallest box around the data: (low, high) of each column of the points."""
        return self._snapshot.inference.data.box

    @property
    def description(self) -> str:
        """The kernel, its hyperparameters, the noise variances and the constant mean in one line,
        for the history of a Dataset."""
        return description(self._snapshot)

    @property
    def space(self) -> tuple[int, ...]:
        """The columns of the points that are directions of space."""
        return self._snapshot.space

    @chosen_threads()
    def __call__(
        self, x: Float[Tensor, "n d"], symbol: Symbol | None = None
    ) -> MultitaskMultivariateNormal | MultivariateNormal:
        """Return the joint distribution of the field, or of a symbol of it, at n points.

        Its variances have no floor: `gpytorch.settings.min_variance` has no unit and is ignored.

        Args:
            x: points (n, d).
            symbol: a linear map of the field with q outputs; the field itself if None (q = p). The
                mean is (n, q), or (n,) for q = 1.

        Raises:
            ValueError: points that do not fit the model, or a symbol that does not exist for the
                kernel, such as a derivative of a field that is not differentiable.
        """
        points, distribution = self._at(x, symbol)
        mean = self.mean(x, symbol).to(points.device)
        covariance = posterior_covariance(points.to(mean.dtype), distribution)
        if not len(mean):
            covariance = mean.new_zeros(0, 0)
        if mean.shape[-1] == 1:
            return ScalarNormal(mean.squeeze(-1), covariance)
        return FieldNormal(mean, covariance)

    @chosen_threads()
    def mean(self, x: Float[Tensor, "n d"], symbol: Symbol | None = None) -> Float[Tensor, "n q"]:
        """Return the posterior mean (n, q) of the field, or of a `symbol` of it, at points `x`."""
        if is_transformed():
            return pointwise(partial(self.mean, symbol=symbol), x)
        if torch.compiler.is_exporting():
            return self._exported_mean(x, symbol)
        points, distribution = self._at(x, symbol)
        mean = distribution.mean(points) + self._snapshot.trend(points, symbol)
        return _like(x, mean[: len(x)])

    def _exported_mean(
        self, x: Float[Tensor, "n d"], symbol: Symbol | None
    ) -> Float[Tensor, "n q"]:
        """The mean in a program of `torch.export`: NaN outside the domain of a frequency grid."""
        points, snapshot = x.to(self._snapshot.device, torch.float64), self._snapshot
        with _disable_current_modes():  # what does not depend on x is computed, and not traced
            _, distribution = self._at(snapshot.data_point, symbol)
            distribution.mean(snapshot.data_point)
        inside = snapshot.inside(self._field, points)
        mean = distribution.mean(points) + snapshot.trend(points, symbol)
        return torch.where(inside.unsqueeze(-1), mean, torch.nan).to(x)

    @chosen_threads()
    def variance(
        self, x: Float[Tensor, "n d"], symbol: Symbol | None = None
    ) -> Float[Tensor, "n q"]:
        """Return the variance (n, q) of the field, or of a `symbol` of it, at points `x`."""
        if is_transformed():
            return pointwise(partial(self.variance, symbol=symbol), x)
        points, distribution = self._at(x, symbol)
        return _like(x, distribution.variance(points)[: len(x)])

    @chosen_threads()
    def pointwise_covariance(
        self, x: Float[Tensor, "n d"], symbol: Symbol | None = None
    ) -> Float[Tensor, "n q q"]:
        """Return the covariance (n, q, q) between the outputs of the field, or of a `symbol` of it,
        at each of the points `x`. `plotting.plot_uncertainty` draws it."""
        if is_transformed():
            return pointwise(partial(self.pointwise_covariance, symbol=symbol), x)
        points, distribution = self._at(x, symbol)
        return _like(x, distribution.blocks(points)[: len(x)])

    def quantile(
        self, x: Float[Tensor, "n d"], probability: float, symbol: Symbol | None = None
    ) -> Float[Tensor, "n q"]:
        """Return the values (n, q) below which each component of the field, or of a `symbol` of it,
        lies with the given `probability`, at points `x`.

        If the posterior integrates over the hyperparameters, it is a mixture of normal
        distributions with heavy tails, and these are the quantiles of the mixture.

        Raises:
            ValueError: a probability that is not between 0 and 1.

        Example:
            >>> import gp_orff, torch
            >>> model = gp_orff.VectorFieldGP(gp_orff.CurlFreeKernel(num_dims=2))
            >>> field = model.condition(
            ...     torch.rand(20, 2), torch.randn(20, 2)
            ... ).posterior()
            >>> x = torch.rand(7, 2)
            >>> (field.quantile(x, 0.1) < field.quantile(x, 0.9)).all()
            tensor(True)
        """
        return self._quantiles(x, (probability,), symbol)[0]

    def confidence_region(
        self, x: Float[Tensor, "n d"], level: float = 0.95, symbol: Symbol | None = None
    ) -> tuple[Float[Tensor, "n q"], Float[Tensor, "n q"]]:
        """Return the lower and upper limits, (n, q) each, of central intervals at points `x`. The
        intervals contain each component of the field, or of a `symbol` of it, with the probability
        `level`.

        Raises:
            TypeError: a symbol instead of the level.
            ValueError: a level that is not between 0 and 1.
        """
        if isinstance(level, Symbol):
            raise TypeError(f"expected a level such as 0.95, got {level}; give a symbol by symbol=")
        return tuple(self._quantiles(x, (0.5 - 0.5 * level, 0.5 + 0.5 * level), symbol))

    @chosen_threads()
    def _quantiles(
        self, x: Float[Tensor, "n d"], probabilities: Sequence[float], symbol: Symbol | None
    ) -> list[Float[Tensor, "n q"]]:
        if not all(0 < probability < 1 for probability in probabilities):
            raise ValueError(f"expected probabilities between 0 and 1, got {probabilities}")
        weights, means, blocks = self._normals(x, symbol)
        sds = blocks.diagonal(dim1=-2, dim2=-1).clamp_min(0).sqrt()
        return [_like(x, mixture_quantile(weights, means, sds, share)) for share in probabilities]

    @chosen_threads()
    def log_density(
        self,
        x: Float[Tensor, "n d"],
        values: Float[Tensor, "n q"],
        symbol: Symbol | None = None,
    ) -> Float[Tensor, "n"]:
        """Return the log density (n,) of `values` (n, q) of the noise-free field, or of a `symbol`
        of it, at each of the points `x`.

        Raises:
            ValueError: values of another shape.
        """
        weights, means, blocks = self._normals(x, symbol)
        columns = self._columns
        if symbol is not None:
            columns = columns.of_symbol(symbol.length_power, self.space)
        values = in_column_units(values, columns.y, "values")
        values = as_real(values, "values").to(means)
        if values.shape != means.shape[1:]:
            raise ValueError(
                f"expected values of shape {tuple(means.shape[1:])}, one row for each point, got "
                f"{tuple(values.shape)}"
            )
        factor = cholesky(blocks)
        scores = torch.linalg.solve_triangular(factor, (values - means).unsqueeze(-1), upper=False)
        logs = -0.5 * scores.square().sum((-1, -2)) - factor.diagonal(dim1=-2, dim2=-1).log().sum(
            -1
        )
        logs = logs - 0.5 * values.shape[-1] * math.log(2 * math.pi)
        return _like(x, torch.logsumexp(weights.log()[:, None] + logs, 0))

    def _normals(
        self, x: Float[Tensor, "n d"], symbol: Symbol | None
    ) -> tuple[Float[Tensor, "S"], Float[Tensor, "S n q"], Float[Tensor, "S n q q"]]:
        """The normal distributions that the posterior at each of the points is a mixture of."""
        points, distribution = self._at(x, symbol)
        weights, means, blocks = distribution.normals(points)
        means = means + self._snapshot.trend(points, symbol)
        return weights, means[:, : len(x)], blocks[:, : len(x)]

    # symbols by name

    def divergence(self, x: Float[Tensor, "n d"]) -> MultivariateNormal:
        """∇·f at points `x`, a distribution of (n,) values; see `Divergence`."""
        return self(x, Divergence())

    def curl(self, x: Float[Tensor, "n d"]) -> MultivariateNormal | MultitaskMultivariateNormal:
        """∇×f at points `x`: (n,) in two dimensions, (n, 3) in three; see `Curl`."""
        return self(x, Curl())

    def jacobian(self, x: Float[Tensor, "n d"]) -> MultivariateNormal | MultitaskMultivariateNormal:
        """∂_j f_i at points `x`: (n, p·d), row by row; see `Jacobian`."""
        space = len(self.space)
        return self(x, Jacobian(None if space == self.num_outputs else space))

    def potential(
        self,
        x: Float[Tensor, "n d"],
        reference: Float[Tensor, "d"] | None = None,
        *,
        background: bool | None = None,
    ) -> MultivariateNormal:
        """The potential g (n,) of the curl-free part ∇g, at points `x`; `reference` and
        `background` as in `Potential`: the point where g is zero, or None for zero mean over space
        a priori, and whether g includes that of the constant mean."""
        return self(x, Potential(self._in_space(reference), background))

    def stream_function(
        self,
        x: Float[Tensor, "n 2"],
        reference: Float[Tensor, "2"] | None = None,
        *,
        background: bool | None = None,
    ) -> MultivariateNormal:
        """ψ (n,) at points `x`, of the divergence-free part (∂₂ψ, −∂₁ψ); zero at `reference`.
        `background` and all else are as in `StreamFunction`."""
        return self(x, StreamFunction(self._in_space(reference), background))

    def _in_space(self, place: object) -> object:
        """A place (d,) in the units of the directions of space, as far as both are known."""
        if place is None:
            return None
        units = tuple(self.units[column] for column in self.space) if self.units else ()
        return torch.from_numpy(np.stack(entries_in_units(place, units, "reference")))

    def vector_potential(
        self, x: Float[Tensor, "n 3"], *, background: bool | None = None
    ) -> MultitaskMultivariateNormal:
        """A (n, 3) at points `x`, of the divergence-free part ∇×A; `background` is as in
        `VectorPotential`."""
        return self(x, VectorPotential(background))

    def curl_free_part(
        self, x: Float[Tensor, "n d"], *, background: bool = False
    ) -> MultitaskMultivariateNormal:
        """The curl-free part of f (n, d), a gradient, at points `x`; `background` is as in
        `CurlFreePart`."""
        return self(x, CurlFreePart(background))

    def divergence_free_part(
        self, x: Float[Tensor, "n d"], *, background: bool = False
    ) -> MultitaskMultivariateNormal:
        """The divergence-free part of f (n, d), at points `x`; `background` is as in
        `DivergenceFreePart`."""
        return self(x, DivergenceFreePart(background))

    def reduction_to_pole(
        self, x: Float[Tensor, "n 3"], magnetisation: Sequence[float] | Float[Tensor, "3"]
    ) -> MultivariateNormal:
        """The anomaly (n,) under a vertical main field, at points `x`, of a harmonic field whose
        sources are magnetised along `magnetisation` (3,); see `ReductionToPole`."""
        return self(x, ReductionToPole(magnetisation))

    def analytic_signal(
        self,
        x: Float[Tensor, "n d"],
        direction: Sequence[float] | Float[Tensor, "p"],
        *,
        num_draws: int = 256,
        seed: int = 0,
    ) -> Summary:
        """Estimate |∇T| of the component T = ⟨u, f⟩ at points `x`, by draws of its slopes: (n,).

        For the anomaly T along the main field u, it shows the edges of magnetic rocks, for any
        magnetisation (Nabighian 1972).

        Args:
            x: points (n, d).
            direction: the vector u (p,).
            num_draws: the number of draws.
            seed: of the draws.

        Raises:
            ValueError: a direction that is not a vector of p numbers.
        """
        slopes = Jacobian(num_dims=len(self.space)) @ Component(direction)
        mean, covariance = self.mean(x, slopes), self.pointwise_covariance(x, slopes)
        values, vectors = torch.linalg.eigh(covariance)
        root = vectors * values.clamp_min(0).sqrt().unsqueeze(-2)
        generator = torch.Generator().manual_seed(seed)
        shape = num_draws, *mean.shape, 1
        draws = torch.randn(shape, generator=generator, dtype=mean.dtype).to(mean.device)
        return Summary.of((mean + (root @ draws).squeeze(-1)).norm(dim=-1))

    # terms, paths and what follows from them

    def part(self, name: str | int) -> "FieldPosterior":
        """Return the posterior of one term of a sum of kernels, without the constant mean μ.

        A trained μ is uncertain, and the error bars of the term include the effect of this
        uncertainty on the term.

        With a `HelmholtzKernel`, `field.part("curl_free")` is the term with the curl-free kernel.
        The method `field.curl_free_part(x)` is different: for any kernel, it returns the curl-free
        part of the complete field.

        Args:
            name: the index of the term, from 0: a + b + c has the parts 0, 1 and 2, and each
                may be a `HelmholtzKernel`. You can also give the name of a part of a
                `HelmholtzKernel`, "curl_free" or "divergence_free". If several terms have such
                parts, select one term first: `field.part(0).part("curl_free")`. If the complete
                kernel is a `HelmholtzKernel`, its parts also have the indices 0 and 1.

        Raises:
            ValueError: the kernel is not a sum; or no term, or more than one, has this name or
                index.
            NotImplementedError: the terms have common features, by a rule with `shared=True`.
        """
        part = PartSnapshot.of(self._snapshot, name)
        return FieldPosterior(part, self.units, units_of_outputs=self._columns.y)

    def sample_paths(self, num_paths: int, *, seed: int = 0) -> SamplePaths:
        """Draw functions from the posterior, which can be evaluated at any points.

        If `paths` is the result, `paths(x)` has the values (num_paths, n, p) at points x (n, d),
        for p outputs. All calls evaluate the same functions. With features, a function is one draw
        of their weights. If the features are those of a grid, x must be in its domain. With the
        exact kernel, Matheron's rule is used (Wilson et al. 2020, eq. 14). See `SamplePaths`.

        Args:
            num_paths: the number of functions.
            seed: the seed of the random numbers.

        Raises:
            ValueError: `num_paths` is less than 1.
            NotImplementedError: a `part` of an exact model.
        """
        if num_paths < 1:
            raise ValueError(f"sample_paths expects at least one path, got {num_paths}")
        with torch.no_grad():
            paths = sample_paths(self._field, self._snapshot, num_paths, seed)
        return SamplePaths(paths, self._snapshot, self.units)

    def summarize(
        self,
        x: Float[Tensor, "n d"],
        function: Callable[[Float[Tensor, "S n q"]], Float[Tensor, "S *any"]],
        *,
        symbol: Symbol | None = None,
        num_paths: int = 256,
        seed: int = 0,
    ) -> Summary:
        """Estimate the mean, standard deviation and 95 % interval of a function of the field by
        sample paths.

        For example, the mean speed (n,) is `field.summarize(x, lambda f: f.norm(dim=-1)).mean`.

        Args:
            x: points (n, d).
            function: maps the values (S, n, q) of S = num_paths paths to (S, ...).
            symbol: a linear map with q outputs that is applied before; the field if None (q = p).
            num_paths, seed: as for `sample_paths`.

        Raises:
            NotImplementedError: a symbol of an exact model; see `SamplePaths`.
        """
        return Summary.of(function(self.sample_paths(num_paths, seed=seed)(x, symbol)))

    @chosen_threads()
    def design(
        self,
        candidates: Float[Tensor, "C d"],
        count: int = 1,
        *,
        target: Symbol | None = None,
        region: object = None,
        directions: Float[Tensor, "C p"] | None = None,
        noise: object = None,
        cost: Float[Tensor, "C"] | None = None,
    ) -> Design:
        """Choose where to measure next, to reduce the variance of a target in a region.

        Candidates are chosen one after another. Each choice maximises the decrease of the posterior
        variance of the target, averaged over the region and divided by the cost, given the previous
        choices. The decrease is exact and does not depend on the values that will be observed. The
        hyperparameters are the learned ones. See `gp_orff.models.design`.

        Args:
            candidates: points (C, d) where vectors may be observed.
            count: the number of candidates to choose, each at most once.
            target: a linear map of the field, such as `Curl()` or a `Flux`; the field if None.
            region: points (m, d), or a box as a tuple ((low, high), ...), in which 256 quasi-random
                points are used. If None, the box of the data. For a target along a given path, pass
                one point, zero.
            directions: (C, p) unit vectors, where candidates observe the components along them.
            noise: the variance of an observation, of each observation (C,) or of each component
                (p,), or covariances (p, p) or (C, p, p). If None, the noise of the data, if it is
                the same for all.
            cost: (C,), the costs of the candidates. Decreases are divided by them.

        Raises:
            ValueError: shapes that do not fit or are ambiguous, such as a list of two pairs as
                region; or noise of the data that is not the same for all.
            NotImplementedError: no `noise` is given under a likelihood without additive noise.

        Example:
            >>> import gp_orff, torch
            >>> x = torch.rand(
            ...     30, 2, generator=torch.Generator().manual_seed(0)
            ... ).double()
            >>> model = gp_orff.VectorFieldGP(gp_orff.DivergenceFreeKernel(num_dims=2))
            >>> field = model.condition(x, torch.sin(5 * x.flip(-1))).posterior()
            >>> chosen = field.design(
            ...     torch.rand(50, 2).double(), 3, target=gp_orff.Curl()
            ... )
            >>> chosen.indices.shape, bool((chosen.gains > 0).all())
            (torch.Size([3]), True)
        """
        points = in_column_units(candidates, self.units, "candidates")
        region, noise = self._region(region), self._columns.variances(noise)
        return design(self._snapshot, points, count, target, region, directions, noise, cost)

    @chosen_threads()
    def redundancy(
        self, stations: object = None, *, target: Symbol | None = None, region: object = None
    ) -> Redundancy:
        """Rank observations by how much the variance of a target increases without them.

        Args:
            stations: a label of each observation, in the order of the data; observations with the
                same label are removed together. None for those at the same position.
            target, region: as for `design`.

        Returns:
            A `Redundancy`, with the increase of the mean variance of the target if one station is
            removed; `order` has the most redundant station first.

        Raises:
            NotImplementedError: observations along tracks, a model of statistics alone, or
                labels for observations of several groups or with missing components.
            ValueError: labels that do not fit the data, from which copies and rows without values
                were removed.

        Example:
            >>> import gp_orff, torch
            >>> x = torch.tensor([[0.0, 0.0], [1.0, 0.0], [1.0, 0.01]]).double()
            >>> model = gp_orff.VectorFieldGP(gp_orff.CurlFreeKernel(num_dims=2))
            >>> field = model.condition(x, torch.ones(3, 2)).posterior()
            >>> int(field.redundancy().order[-1])  # the one that is far from the others
            0
        """
        region = self._region(region)
        return redundancy(self._snapshot, stations, target, region)

    @torch.no_grad()
    def energy_spectrum(
        self,
        wavenumbers: Float[Tensor, "m"] | None = None,
        *,
        box: Sequence[tuple[float, float]] | None = None,
        at: Sequence[float] = (),
        num_paths: int = 128,
        level: float = 0.9,
        seed: int = 0,
    ) -> EnergySpectrum:
        """Return the rotational and divergent energy of a planar field per wavenumber, with
        intervals. They are computed from spectra of sample paths with a Hann window; see
        `EnergySpectrum`.

        Args:
            wavenumbers: (m,), radians per unit of the inputs, at least two periods in the box. On a
                frequency grid, at most 2/3 of its cut-off. Default: 24 at equal ratios.
            box: (low, high) of both directions of space. Default: the box of the data.
            at: the values of the other inputs, for example a time, or a date if
                `gp_orff.labelled` read dates.
            num_paths, seed: as for `sample_paths`.
            level: the probability of the intervals.

        Raises:
            ValueError: wavenumbers beyond these limits, or an invalid level, box or `at`.
            NotImplementedError: a field that is not planar, or a `part` of an exact model.
        """
        paths = self.sample_paths(num_paths, seed=seed)
        return energy_spectrum(paths, self._snapshot, self.units, wavenumbers, box, at, level)

    @torch.no_grad()
    def ellipses(
        self,
        constituent: str,
        x: Float[Tensor, "n k"],
        *,
        epoch: object = 0.0,
        num_samples: int = 1000,
        level: float = 0.95,
        seed: int = 0,
    ) -> TidalEllipses:
        """Return the tidal ellipses of a constituent of a kernel of `gp_orff.tides`.

        Semi-major and semi-minor axis, inclination and phase are computed from samples of the
        posterior at each point, because they are not linear in the field. See `TidalEllipses`.
        Summands with the same constituent are added. The constant mean is not included.

        Args:
            constituent: its name, such as "M2".
            x: (n, k), points of the k = d − 1 inputs without time.
            epoch: the time relative to which phases are given. Pass a date, such as
                numpy.datetime64, if `gp_orff.labelled` read dates.
            num_samples: the number of samples.
            level: the probability of the intervals.
            seed: the seed of the random numbers.

        Raises:
            ValueError: a constituent that the kernel does not have; points of another shape; a date
                although the data have none; fewer than two samples; a level that is not between 0
                and 1; a field that is not planar.

        Example:
            >>> import gp_orff, torch
            >>> space = gp_orff.HelmholtzKernel(num_dims=2, active_dims=(0, 1))
            >>> kernel = gp_orff.tides(space, ["M2", "K1"], active_dims=(2,))
            >>> x = torch.rand(60, 3) * torch.tensor([1, 1, 100])  # hours in column 2
            >>> model = gp_orff.VectorFieldGP(kernel).condition(x, torch.randn(60, 2))
            >>> ellipses = model.posterior().ellipses("M2", torch.rand(7, 2))
            >>> ellipses.semi_major.mean.shape, ellipses.phase.sd.shape
            (torch.Size([7]), torch.Size([7]))
        """
        leaf, parts = constituent_of(self._snapshot.kernel, constituent)
        tide = FieldPosterior(PartSnapshot.of_sum(self._snapshot, parts), self.units)
        (time,) = leaf.active_dims
        points = in_column_units(x, self.units[:time] + self.units[time + 1 :], "x")
        start = since_epoch(epoch, self.units[time] if self.units else None)
        return ellipses(tide, leaf, points, self.box, start, num_samples, level, seed)

    def to_xarray(
        self,
        coordinates: Mapping[str, object],
        *,
        names: Sequence[str] | None = None,
        symbols: Mapping[str, Symbol] | None = None,
        attrs: "Mapping[str, Mapping[str, Any]] | xarray.Dataset | None" = None,
        time_unit: str = "s",
        epoch: object = None,
        project: LocalPlane | None = None,
        chunks: Mapping[str, object] | None = None,
        paths: int | None = None,
        seed: int = 0,
    ) -> "xarray.Dataset":
        """Return an xarray Dataset of means and standard deviations on a grid of points.

        The grid is the product of 1-D coordinates, or a curvilinear grid if they are 2-D.
        Attributes and the order of dimensions follow the CF conventions; see
        `gp_orff.labelled.on_grid`. The variables `<name>` and `<name>_sd` are the mean and the
        standard deviation of an output or symbol. With `paths`, the variable `<name>` has functions
        drawn from the posterior instead, along the dimension `realization`.

        Args:
            coordinates: 1-D arrays or DataArrays by name, in the order of the model's inputs, or
                2-D for a curvilinear grid.
            names: names of the p outputs. Default: u, v, w for 2 or 3 outputs, otherwise f1, ...
            symbols: symbols of the field by name. If one has several outputs, they are numbered.
                Default: divergence and vorticity of a planar field, if they exist.
            attrs: attributes by name, {"u": {"units": "m s-1"}}, or a Dataset that has them. Units
                of symbols are derived: a vorticity is in "s-1" for "m s-1" and "km".
            time_unit, epoch: the unit and origin of datetime64 coordinates, as in
                `gp_orff.labelled.readings`.
            project, chunks: for degrees, and for Dask arrays; see `gp_orff.labelled.on_grid`.
            paths, seed: the number of functions of an ensemble, and the seed of `sample_paths`.
                Derivatives of the functions need a model on features.

        Raises:
            ImportError: xarray is not installed; `pip install gp_orff[xarray]`, or `[dask]`.
            TypeError: coordinates that are neither numbers nor times, or a symbol that is none.
            ValueError: coordinates, names or symbols that do not fit the field or each other.

        Example:
            >>> import gp_orff, torch
            >>> model = gp_orff.VectorFieldGP(gp_orff.HelmholtzKernel(num_dims=2))
            >>> field = model.condition(
            ...     torch.rand(20, 2), torch.randn(20, 2)
            ... ).posterior()
            >>> ds = field.to_xarray({"x": [0.0, 0.5, 1.0], "y": [0.0, 1.0]})
            >>> ds["vorticity_sd"].dims, ds["vorticity_sd"].shape
            (('x', 'y'), (3, 2))
            >>> ensemble = field.to_xarray(
            ...     {"x": [0.0, 0.5, 1.0], "y": [0.0, 1.0]}, paths=32
            ... )
            >>> dict(ensemble["u"].sizes)
            {'realization': 32, 'x': 3, 'y': 2}
        """
        how = {"names": names, "symbols": symbols, "attrs": attrs, "project": project}
        how |= {"paths": paths, "seed": seed}
        return on_grid(self, coordinates, time_unit=time_unit, epoch=epoch, chunks=chunks, **how)

    def _region(self, region: object) -> object:
        """Points, or a tuple of (low, high), in the units of the columns."""
        if isinstance(region, tuple):
            return tuple(entries_in_units(region, self.units, "region"))
        return in_column_units(region, self.units, "region")

    def _warn_once(self, symbol: Symbol) -> None:
        """Warn of derivatives of which the data say nothing, once for each kind of symbol."""
        if type(symbol) in self._warned:
            return
        self._warned.add(type(symbol))
        kernel = self._snapshot.kernel
        unknown = directions_unknown(kernel, self._snapshot.inference.data)
        warn_of_derivatives(symbol, kernel, unknown)

    def _at(
        self, x: Float[Tensor, "n d"], symbol: Symbol | None
    ) -> tuple[Float[Tensor, "n d"], FieldDistribution]:
        """Checked points (a point of the data if there are none), and the distribution there."""
        if is_transformed():
            raise NotImplementedError(
                "expected plain points, got those of a transform of torch.func, under which mean, "
                "variance, pointwise_covariance and sample paths are available"
            )
        points = in_column_units(x, self.units, "x")
        points = as_points(points, self._snapshot.num_inputs, empty=True).to(self._snapshot.device)
        points = points if len(points) else self._snapshot.data_point
        support = points
        if symbol is not None:
            self._snapshot.check_symbol(symbol)
            self._warn_once(symbol)
            support = symbol.all_points(points, self._snapshot.space)
        # The caches cover the usual course of calls: several results (mean, variance, samples) at
        # the same points, or one symbol at many points. A larger domain is kept until points leave
        # it, and the last image until the field, the symbol or the domain is another one.
        in_domain, field = self._snapshot.in_domain, self._field
        if not in_domain(field, support, symbol):
            if self._extended is None or not in_domain(self._extended, support, symbol):
                self._extended = self._snapshot.field(support, symbol)
            field = self._extended
        if symbol is None:
            return points, field.distribution
        last = self._image
        if (
            last is None
            or last[0] is not field
            or last[1] is not symbol
            or not in_domain(last[2], support)
        ):
            image = self._snapshot.apply(symbol, field, support)
            last = self._image = (field, symbol, image)
        return points, last[2].distribution


def _like(x: object, values: Tensor) -> Tensor:
    """Values on the device of points, and in their precision; float64 for arrays and integers."""
    given = x if isinstance(x, Tensor) else torch.empty(0, dtype=torch.float64)
    return values.to(given.device, given.dtype if given.is_floating_point() else torch.float64)
