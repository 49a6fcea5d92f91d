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
    """The posterior of the field f + μ given the data, where μ is the prior mean.

    `model.posterior()` returns it. It is a snapshot: later changes of the model do not affect it.
    The field has d inputs and p outputs. A `symbol` is a linear map of the field with q outputs,
    such as `Divergence()`.

    Variances are for the noise-free field, or for a symbol of it. They include the uncertainty of a
    trained constant mean (universal kriging). After a fit to few data, or with a learned spectrum,
    they include the uncertainty of the hyperparameters. The posterior is then a mixture of normal
    distributions. `mean` and `variance` return its moments, and `confidence_region` returns its
    intervals.

    Results have the floating type of the points x, and are computed in float64. For points outside
    the domain of a grid, a larger grid is built. If that is impossible, a ValueError is raised.

    Args:
        snapshot: the data, kernel, noise and mean of the model.
        units: the units of the columns of the points, if known. Arguments of methods with other
            units, from `gp_orff.labelled` or pint, are converted to these. An argument whose unit
            cannot be converted raises an error.
        coverage: the coverage of 95 % intervals for observations that were held out after the fit;
            None if it was not computed. The Datasets of `to_xarray` have it as an attribute.
        units_of_outputs: the units of the components, if known. Noise and values with units are
            converted to these.

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
            model: an `ExactGP` with training data, a `mean_module` and a `covar_module`. The latter
                is an `ORFFKernel` or an exact kernel.

        Raises:
            TypeError: The model has no training data, or one of the two modules is missing.
            NotImplementedError: This package does not support the noise of the likelihood.

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
        """The number d of inputs, the columns of the points."""
        return self._snapshot.num_inputs

    @property
    def num_outputs(self) -> int:
        """The number p of outputs, the components of the field."""
        return self._field.distribution.num_outputs

    @property
    def box(self) -> tuple[tuple[float, float], ...]:
        """The smallest box that contains the data: (low, high) for each of the d inputs."""
        return self._snapshot.inference.data.box

    @property
    def description(self) -> str:
        """The kernel, hyperparameters, noise variances and constant mean, as one line of text. The
        `history` attribute of a Dataset contains it."""
        return description(self._snapshot)

    @property
    def space(self) -> tuple[int, ...]:
        """The columns of the points that are directions of space; time, for example, is not one."""
        return self._snapshot.space

    @chosen_threads()
    def __call__(
        self, x: Float[Tensor, "n d"], symbol: Symbol | None = None
    ) -> MultitaskMultivariateNormal | MultivariateNormal:
        """Return the joint distribution of the field, or of a symbol of it, at n points.

        Its variances have no lower limit: `gpytorch.settings.min_variance` is ignored, because one
        number cannot fit all units.

        Args:
            x: points (n, d).
            symbol: a linear map of the field with q outputs. The default is the field itself, with
                q = p.

        Returns:
            A normal distribution with a mean of shape (n, q), or (n,) for q = 1.

        Raises:
            ValueError: The points do not fit the model, or the symbol does not exist for the
                kernel. An example is a derivative of a field that is not differentiable.

        Example:
            >>> import gp_orff, torch
            >>> model = gp_orff.VectorFieldGP(gp_orff.HelmholtzKernel(num_dims=2))
            >>> field = model.condition(
            ...     torch.rand(20, 2), torch.randn(20, 2)
            ... ).posterior()
            >>> joint = field(torch.rand(7, 2), gp_orff.Curl())
            >>> joint.mean.shape, joint.covariance_matrix.shape
            (torch.Size([7]), torch.Size([7, 7]))
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
        """Return the posterior mean of the field, or of a symbol of it, at each point.

        Args:
            x: points (n, d).
            symbol: a linear map of the field with q outputs. The default is the field itself, with
                q = p.

        Returns:
            The means (n, q), in units of y or of the symbol.

        Raises:
            ValueError: The points do not fit the model, or the symbol does not exist for the
                kernel.

        Example:
            >>> import gp_orff, torch
            >>> model = gp_orff.VectorFieldGP(gp_orff.HelmholtzKernel(num_dims=2))
            >>> field = model.condition(
            ...     torch.rand(20, 2), torch.randn(20, 2)
            ... ).posterior()
            >>> x = torch.rand(7, 2)
            >>> field.mean(x).shape, field.mean(x, gp_orff.Divergence()).shape
            (torch.Size([7, 2]), torch.Size([7, 1]))
        """
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
        """The mean in a program of `torch.export`. It is NaN outside the domain of a grid."""
        points, snapshot = x.to(self._snapshot.device, torch.float64), self._snapshot
        with _disable_current_modes():  # quantities independent of x are computed, and not traced
            _, distribution = self._at(snapshot.data_point, symbol)
            distribution.mean(snapshot.data_point)
        inside = snapshot.inside(self._field, points)
        mean = distribution.mean(points) + snapshot.trend(points, symbol)
        return torch.where(inside.unsqueeze(-1), mean, torch.nan).to(x)

    @chosen_threads()
    def variance(
        self, x: Float[Tensor, "n d"], symbol: Symbol | None = None
    ) -> Float[Tensor, "n q"]:
        """Return the posterior variance of the field, or of a symbol of it, at each point.

        It does not include the noise of observations.

        Args:
            x: points (n, d).
            symbol: a linear map of the field with q outputs. The default is the field itself, with
                q = p.

        Returns:
            The variances (n, q), in squared units of y or of the symbol.

        Raises:
            ValueError: The points do not fit the model, or the symbol does not exist for the
                kernel.

        Example:
            >>> import gp_orff, torch
            >>> model = gp_orff.VectorFieldGP(gp_orff.HelmholtzKernel(num_dims=2))
            >>> x = torch.rand(20, 2)
            >>> field = model.condition(x, torch.randn(20, 2)).posterior()
            >>> (field.variance(x + 9) > field.variance(x)).all()  # far from the data
            tensor(True)
        """
        if is_transformed():
            return pointwise(partial(self.variance, symbol=symbol), x)
        points, distribution = self._at(x, symbol)
        return _like(x, distribution.variance(points)[: len(x)])

    @chosen_threads()
    def pointwise_covariance(
        self, x: Float[Tensor, "n d"], symbol: Symbol | None = None
    ) -> Float[Tensor, "n q q"]:
        """Return the posterior covariance between the outputs at each point.

        The outputs belong to the field, or to a symbol of it. `gp_orff.plotting.plot_uncertainty`
        draws the covariance as ellipses. Call the posterior, `field(x)`, for the covariance between
        different points.

        Args:
            x: points (n, d).
            symbol: a linear map of the field with q outputs. The default is the field itself, with
                q = p.

        Returns:
            The covariances (n, q, q), in squared units of y or of the symbol.

        Raises:
            ValueError: The points do not fit the model, or the symbol does not exist for the
                kernel.

        Example:
            >>> import gp_orff, torch
            >>> model = gp_orff.VectorFieldGP(gp_orff.HelmholtzKernel(num_dims=2))
            >>> field = model.condition(
            ...     torch.rand(20, 2), torch.randn(20, 2)
            ... ).posterior()
            >>> field.pointwise_covariance(torch.rand(7, 2)).shape
            torch.Size([7, 2, 2])
        """
        if is_transformed():
            return pointwise(partial(self.pointwise_covariance, symbol=symbol), x)
        points, distribution = self._at(x, symbol)
        return _like(x, distribution.blocks(points)[: len(x)])

    def quantile(
        self, x: Float[Tensor, "n d"], probability: float, symbol: Symbol | None = None
    ) -> Float[Tensor, "n q"]:
        """Return a quantile of each output of the field, or of a symbol of it, at each point.

        An output is below the quantile with the given probability. If the posterior integrates over
        the hyperparameters, it is a mixture of normal distributions, and the result is the quantile
        of the mixture.

        Args:
            x: points (n, d).
            probability: the probability, between 0 and 1.
            symbol: a linear map of the field with q outputs. The default is the field itself, with
                q = p.

        Returns:
            The quantiles (n, q), in units of y or of the symbol.

        Raises:
            ValueError: The probability is not between 0 and 1.

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
        """Return the limits of central intervals for the field, or for a symbol of it.

        Each interval contains one output at one point with the probability `level`. The intervals
        are for the noise-free field.

        Args:
            x: points (n, d).
            level: the probability, between 0 and 1.
            symbol: a linear map of the field with q outputs. The default is the field itself, with
                q = p.

        Returns:
            The lower and the upper limits, (n, q) each, in units of y or of the symbol.

        Raises:
            TypeError: A symbol is given in the place of the level.
            ValueError: The level is not between 0 and 1.

        Example:
            >>> import gp_orff, torch
            >>> model = gp_orff.VectorFieldGP(gp_orff.CurlFreeKernel(num_dims=2))
            >>> field = model.condition(
            ...     torch.rand(20, 2), torch.randn(20, 2)
            ... ).posterior()
            >>> x = torch.rand(7, 2)
            >>> low, high = field.confidence_region(x, 0.9)
            >>> ((low < field.mean(x)) & (field.mean(x) < high)).all()
            tensor(True)
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
        """Return the log density of values of the noise-free field, or of a symbol, at each point.

        Each density is the joint one of the q outputs at a point. Use it to score a prediction
        against true values.

        Args:
            x: points (n, d).
            values: the values (n, q), in units of y or of the symbol.
            symbol: a linear map of the field with q outputs. The default is the field itself, with
                q = p.

        Returns:
            The log densities (n,), in nats.

        Raises:
            ValueError: `values` has another shape.

        Example:
            >>> import gp_orff, torch
            >>> model = gp_orff.VectorFieldGP(gp_orff.CurlFreeKernel(num_dims=2))
            >>> field = model.condition(
            ...     torch.rand(20, 2), torch.randn(20, 2)
            ... ).posterior()
            >>> x = torch.rand(7, 2)
            >>> best = field.log_density(x, field.mean(x))
            >>> (field.log_density(x, field.mean(x) + 1) < best).all()
            tensor(True)
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
        """The weights, means and covariances of the normal distributions whose mixture is the
        posterior at each point."""
        points, distribution = self._at(x, symbol)
        weights, means, blocks = distribution.normals(points)
        means = means + self._snapshot.trend(points, symbol)
        return weights, means[:, : len(x)], blocks[:, : len(x)]

    # symbols by name

    def divergence(self, x: Float[Tensor, "n d"]) -> MultivariateNormal:
        """Return the distribution of the divergence ∇·f at n points.

        It has n values, in units of y per unit of x. See `Divergence`.

        Args:
            x: points (n, d).

        Raises:
            ValueError: The field has no divergence: p differs from the number of directions of
                space, or the field is not differentiable.

        Example:
            >>> import gp_orff, torch
            >>> model = gp_orff.VectorFieldGP(gp_orff.HelmholtzKernel(num_dims=2))
            >>> field = model.condition(
            ...     torch.rand(20, 2), torch.randn(20, 2)
            ... ).posterior()
            >>> field.divergence(torch.rand(7, 2)).stddev.shape
            torch.Size([7])
        """
        return self(x, Divergence())

    def curl(self, x: Float[Tensor, "n d"]) -> MultivariateNormal | MultitaskMultivariateNormal:
        """Return the distribution of the curl ∇×f at n points.

        In two dimensions it has n values, the vorticity ∂₁f₂ − ∂₂f₁. In three dimensions it has
        (n, 3) values. They are in units of y per unit of x. See `Curl`.

        Args:
            x: points (n, d).

        Raises:
            ValueError: The field has other dimensions, or is not differentiable.

        Example:
            >>> import gp_orff, torch
            >>> model = gp_orff.VectorFieldGP(gp_orff.HelmholtzKernel(num_dims=2))
            >>> field = model.condition(
            ...     torch.rand(20, 2), torch.randn(20, 2)
            ... ).posterior()
            >>> field.curl(torch.rand(7, 2)).stddev.shape
            torch.Size([7])
        """
        return self(x, Curl())

    def jacobian(self, x: Float[Tensor, "n d"]) -> MultivariateNormal | MultitaskMultivariateNormal:
        """Return the distribution of the Jacobian matrices ∂_j f_i at n points.

        It has (n, p·k) values for k directions of space: the matrices (p, k), row by row. They are
        in units of y per unit of x. See `Jacobian`.

        Args:
            x: points (n, d).

        Raises:
            ValueError: The field is not differentiable.

        Example:
            >>> import gp_orff, torch
            >>> model = gp_orff.VectorFieldGP(gp_orff.HelmholtzKernel(num_dims=2))
            >>> field = model.condition(
            ...     torch.rand(20, 2), torch.randn(20, 2)
            ... ).posterior()
            >>> field.jacobian(torch.rand(7, 2)).mean.unflatten(-1, (2, 2)).shape
            torch.Size([7, 2, 2])
        """
        space = len(self.space)
        return self(x, Jacobian(None if space == self.num_outputs else space))

    def potential(
        self,
        x: Float[Tensor, "n d"],
        reference: Float[Tensor, "d"] | None = None,
        *,
        background: bool | None = None,
    ) -> MultivariateNormal:
        """Return the distribution of the potential g of the curl-free part ∇g, at n points.

        It has n values, in units of y times the unit of x. See `Potential`.

        Args:
            x: points (n, d).
            reference: the point where g is zero, with its coordinates in space. By default, the
                prior determines the constant: the mean of g over all of space is zero.
            background: whether g includes the potential of the constant mean. By default, it does
                if the kernel is curl-free.

        Raises:
            ValueError: The field has no potential: p differs from the number of directions of
                space.

        Example:
            >>> import gp_orff, torch
            >>> model = gp_orff.VectorFieldGP(gp_orff.CurlFreeKernel(num_dims=2))
            >>> x = torch.rand(20, 2)
            >>> field = model.condition(x, torch.randn(20, 2)).posterior()
            >>> field.potential(x, reference=x[0]).mean.shape
            torch.Size([20])
        """
        return self(x, Potential(self._in_space(reference), background))

    def stream_function(
        self,
        x: Float[Tensor, "n 2"],
        reference: Float[Tensor, "2"] | None = None,
        *,
        background: bool | None = None,
    ) -> MultivariateNormal:
        """Return the distribution of the stream function ψ of a planar field, at n points.

        The divergence-free part of the field is (∂₂ψ, −∂₁ψ). The distribution has n values, in
        units of y times the unit of x. See `StreamFunction`.

        Args:
            x: points (n, d).
            reference: a point (2,) where ψ is zero. By default, the prior determines the constant:
                the mean of ψ over all of space is zero.
            background: whether ψ includes the stream function of the constant mean. By default, it
                does if the kernel is divergence-free.

        Raises:
            ValueError: The field is not planar.

        Example:
            >>> import gp_orff, torch
            >>> model = gp_orff.VectorFieldGP(gp_orff.DivergenceFreeKernel(num_dims=2))
            >>> x = torch.rand(20, 2)
            >>> field = model.condition(x, torch.randn(20, 2)).posterior()
            >>> field.stream_function(x, reference=x[0]).mean.shape
            torch.Size([20])
        """
        return self(x, StreamFunction(self._in_space(reference), background))

    def _in_space(self, place: object) -> object:
        """A place in space, converted to the units of the points if both units are known."""
        if place is None:
            return None
        units = tuple(self.units[column] for column in self.space) if self.units else ()
        return torch.from_numpy(np.stack(entries_in_units(place, units, "reference")))

    def vector_potential(
        self, x: Float[Tensor, "n 3"], *, background: bool | None = None
    ) -> MultitaskMultivariateNormal:
        """Return the distribution of the vector potential A of a field in three dimensions.

        The divergence-free part of the field is ∇×A, with ∇·A = 0 (Coulomb gauge). The distribution
        has (n, 3) values, in units of y times the unit of x. See `VectorPotential`.

        Args:
            x: points (n, d).
            background: whether A includes the vector potential of the constant mean. By default, it
                does if the kernel is divergence-free.

        Raises:
            ValueError: The field does not have three components and three directions of space.

        Example:
            >>> import gp_orff, torch
            >>> model = gp_orff.VectorFieldGP(gp_orff.DivergenceFreeKernel(num_dims=3))
            >>> field = model.condition(
            ...     torch.rand(20, 3), torch.randn(20, 3)
            ... ).posterior()
            >>> field.vector_potential(torch.rand(7, 3)).mean.shape
            torch.Size([7, 3])
        """
        return self(x, VectorPotential(background))

    def curl_free_part(
        self, x: Float[Tensor, "n d"], *, background: bool = False
    ) -> MultitaskMultivariateNormal:
        """Return the distribution of the curl-free part of the field, a gradient, at n points.

        It has (n, p) values, in units of y. For a `HelmholtzKernel`, `part("curl_free")` is the
        posterior of the curl-free term of the kernel instead. See `CurlFreePart`.

        Args:
            x: points (n, d).
            background: whether the constant mean belongs to this part.

        Raises:
            ValueError: p differs from the number of directions of space.

        Example:
            >>> import gp_orff, torch
            >>> model = gp_orff.VectorFieldGP(gp_orff.HelmholtzKernel(num_dims=2))
            >>> field = model.condition(
            ...     torch.rand(20, 2), torch.randn(20, 2)
            ... ).posterior()
            >>> field.curl_free_part(torch.rand(7, 2)).mean.shape
            torch.Size([7, 2])
        """
        return self(x, CurlFreePart(background))

    def divergence_free_part(
        self, x: Float[Tensor, "n d"], *, background: bool = False
    ) -> MultitaskMultivariateNormal:
        """Return the distribution of the divergence-free part of the field at n points.

        It has (n, p) values, in units of y. For a `HelmholtzKernel`, `part("divergence_free")` is
        the posterior of the divergence-free term of the kernel instead. See `DivergenceFreePart`.

        Args:
            x: points (n, d).
            background: whether the constant mean belongs to this part.

        Raises:
            ValueError: p differs from the number of directions of space.

        Example:
            >>> import gp_orff, torch
            >>> model = gp_orff.VectorFieldGP(gp_orff.HelmholtzKernel(num_dims=2))
            >>> field = model.condition(
            ...     torch.rand(20, 2), torch.randn(20, 2)
            ... ).posterior()
            >>> field.divergence_free_part(torch.rand(7, 2)).mean.shape
            torch.Size([7, 2])
        """
        return self(x, DivergenceFreePart(background))

    def reduction_to_pole(
        self, x: Float[Tensor, "n 3"], magnetisation: Sequence[float] | Float[Tensor, "3"]
    ) -> MultivariateNormal:
        """Return the distribution of a magnetic anomaly that is reduced to the pole, at n points.

        The result is the anomaly that the same sources would have if the main field and their
        magnetisation were vertical. It has n values, in units of y. See `ReductionToPole`.

        Args:
            x: points (n, 3).
            magnetisation: the direction (3,) in which the sources are magnetised.

        Raises:
            ValueError: The kernel is not a `HarmonicKernel`.

        Example:
            >>> import gp_orff, torch
            >>> x = torch.rand(20, 3) * torch.tensor([5.0, 5.0, 0.1])
            >>> model = gp_orff.VectorFieldGP(gp_orff.HarmonicKernel())
            >>> field = model.condition(x, torch.randn(20, 3)).posterior()
            >>> field.reduction_to_pole(x, [0.0, 0.5, -0.87]).mean.shape
            torch.Size([20])
        """
        return self(x, ReductionToPole(magnetisation))

    def analytic_signal(
        self,
        x: Float[Tensor, "n d"],
        direction: Sequence[float] | Float[Tensor, "p"],
        *,
        num_draws: int = 256,
        seed: int = 0,
    ) -> Summary:
        """Estimate the analytic signal |∇T| of a component T = ⟨u, f⟩ of the field f.

        If T is a magnetic anomaly along the main field u, the analytic signal shows the edges of
        magnetic rocks, for any direction of magnetisation. It is not linear in the field, so it is
        computed from draws of ∇T from the posterior at each point (Nabighian 1972, *The analytic
        signal of two-dimensional magnetic bodies with polygonal cross-section*).

        Args:
            x: points (n, d).
            direction: the vector u (p,).
            num_draws: the number of draws.
            seed: the seed of the random numbers.

        Returns:
            A `Summary` with means, standard deviations and 95 % intervals, (n,) each, in units of y
            per unit of x.

        Raises:
            ValueError: `direction` is not a vector of p numbers.

        Example:
            >>> import gp_orff, torch
            >>> x = torch.rand(20, 3) * torch.tensor([5.0, 5.0, 0.1])
            >>> model = gp_orff.VectorFieldGP(gp_orff.HarmonicKernel())
            >>> field = model.condition(x, torch.randn(20, 3)).posterior()
            >>> field.analytic_signal(x, [0.0, 0.5, -0.87]).mean.shape
            torch.Size([20])
        """
        slopes = Jacobian(num_dims=len(self.space)) @ Component(direction)
        mean, covariance = self.mean(x, slopes), self.pointwise_covariance(x, slopes)
        values, vectors = torch.linalg.eigh(covariance)
        root = vectors * values.clamp_min(0).sqrt().unsqueeze(-2)
        generator = torch.Generator().manual_seed(seed)
        shape = num_draws, *mean.shape, 1
        draws = torch.randn(shape, generator=generator, dtype=mean.dtype).to(mean.device)
        return Summary.of((mean + (root @ draws).squeeze(-1)).norm(dim=-1))

    # terms, sample paths, and quantities that follow from paths

    def part(self, name: str | int) -> "FieldPosterior":
        """Return the posterior of one term of a sum of kernels, without the constant mean μ.

        If μ is trained, it is uncertain, and the error bars of the term include the effect of this
        uncertainty.

        With a `HelmholtzKernel`, `field.part("curl_free")` is the term with the curl-free kernel.
        The method `field.curl_free_part(x)` is different: for any kernel, it returns the curl-free
        part of the complete field.

        Args:
            name: the index of the term, or the name of a part of a `HelmholtzKernel`. A sum
                a + b + c has the indices 0, 1 and 2, and each term may be a `HelmholtzKernel`. The
                names are "curl_free" and "divergence_free". If several terms have such parts,
                select one term first: `field.part(0).part("curl_free")`. If the complete kernel is
                a `HelmholtzKernel`, its parts also have the indices 0 and 1.

        Raises:
            ValueError: The kernel is not a sum, or not exactly one term has this name or index.
            NotImplementedError: The terms have common features, by a rule with `shared=True`.

        Example:
            >>> import gp_orff, torch
            >>> model = gp_orff.VectorFieldGP(gp_orff.HelmholtzKernel(num_dims=2))
            >>> x, y = torch.rand(2, 20, 2).double()
            >>> field = model.condition(x, y).posterior()
            >>> parts = [field.part("curl_free"), field.part("divergence_free")]
            >>> total = sum(part.mean(x) for part in parts) + model.mean(x)
            >>> torch.allclose(total, field.mean(x))
            True
        """
        part = PartSnapshot.of(self._snapshot, name)
        return FieldPosterior(part, self.units, units_of_outputs=self._columns.y)

    def sample_paths(self, num_paths: int, *, seed: int = 0) -> SamplePaths:
        """Draw functions from the posterior. You can evaluate them at any points.

        With features, a function is one draw of their weights. On a grid, points must be in its
        domain. With the exact kernel, functions are drawn by Matheron's rule (Wilson et al. 2020,
        *Efficiently sampling functions from Gaussian process posteriors*, eq. 14).

        Args:
            num_paths: the number S of functions.
            seed: the seed of the random numbers.

        Returns:
            A `SamplePaths`. If `paths` is the result, `paths(x)` has the values (S, n, p) at points
            x (n, d), in units of y. All calls evaluate the same functions.

        Raises:
            ValueError: `num_paths` is less than 1.
            NotImplementedError: The posterior is a `part` of a model with the exact kernel.

        Example:
            >>> import gp_orff, torch
            >>> model = gp_orff.VectorFieldGP(gp_orff.HelmholtzKernel(num_dims=2))
            >>> field = model.condition(
            ...     torch.rand(20, 2), torch.randn(20, 2)
            ... ).posterior()
            >>> field.sample_paths(5)(torch.rand(7, 2)).shape
            torch.Size([5, 7, 2])
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
        """Estimate the mean, standard deviation and 95 % interval of a function of the field.

        The estimates are from sample paths. Use this method if the function is not linear. Examples
        are the speed at each point, and the largest speed in a region.

        Args:
            x: points (n, d).
            function: maps the values (S, n, q) of S paths to results (S, ...).
            symbol: a linear map of the field with q outputs, which is applied before `function`.
                The default is the field itself, with q = p.
            num_paths: the number S of paths.
            seed: the seed of the random numbers.

        Returns:
            A `Summary`, with the shape of the result of `function` for one path.

        Raises:
            NotImplementedError: A symbol is given for a model with the exact kernel.

        Example:
            >>> import gp_orff, torch
            >>> model = gp_orff.VectorFieldGP(gp_orff.HelmholtzKernel(num_dims=2))
            >>> field = model.condition(
            ...     torch.rand(20, 2), torch.randn(20, 2)
            ... ).posterior()
            >>> speed = field.summarize(torch.rand(7, 2), lambda f: f.norm(dim=-1))
            >>> speed.mean.shape, bool((speed.low < speed.high).all())
            (torch.Size([7]), True)
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
        variance of the target, divided by the cost of the candidate. The variance is averaged over
        the region, and the previous choices count as observed. The decrease is exact and does not
        depend on the values that will be observed. Hyperparameters have their learned values. See
        `gp_orff.models.design` for the formula.

        Args:
            candidates: points (C, d) where vectors may be observed.
            count: the number of candidates to choose. Each is chosen at most once.
            target: a linear map of the field, such as `Curl()` or a `Flux`. The default is the
                field itself.
            region: points (m, d), or a box as a tuple ((low, high), ...). In a box, 256
                quasi-random points are used. The default is the box of the data. If the target is
                an integral along a given path, pass one point, zero.
            directions: unit vectors (C, p). A candidate then observes only the component along its
                direction.
            noise: the noise of new observations, in squared units of y: one variance, variances of
                candidates (C,) or components (p,), or covariances (p, p) or (C, p, p). The default
                is the noise of the data, if it is the same for all observations.
            cost: the costs (C,) of the candidates, positive and in any unit. The default is equal
                costs.

        Returns:
            A `Design` with the indices and points of the choices and their decreases of variance.

        Raises:
            ValueError: Shapes do not fit or are ambiguous, such as a list of two pairs as `region`.
                Or `noise` is not given, and the noise of the data is not the same for all.
            NotImplementedError: `noise` is not given, and the likelihood has no additive noise.

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
        """Rank stations by the increase of the variance of a target if a station is removed.

        The variance is the posterior variance of the target, averaged over a region.

        Args:
            stations: a station label for each observation, in the order of the data. Observations
                with the same label are removed together. By default, observations at the same
                position form a station.
            target: a linear map of the field, as for `design`. The default is the field itself.
            region: points (m, d) or a box, as for `design`. The default is the box of the data.

        Returns:
            A `Redundancy` with the increase of variance for each station. Its `order` has the most
            redundant station first.

        Raises:
            NotImplementedError: The model has tracks or stores only statistics. Or labels are
                given for data with several groups or missing components.
            ValueError: The number of labels is not the number of stored observations. Copies and
                rows without values are not stored.

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
        """Return the rotational and the divergent energy spectrum of a planar field.

        The spectra have intervals. They are computed from sample paths with a Hann window;
        `EnergySpectrum` has the formula.

        Args:
            wavenumbers: wavenumbers (m,) in radians per unit of x. The smallest one must have two
                periods in the box. On a frequency grid, the largest one is 2/3 of the cut-off. The
                default is 24 wavenumbers with equal ratios.
            box: (low, high) of both directions of space. The default is the box of the data.
            at: the values of the inputs that are not in space, for example a time. Pass a date if
                `gp_orff.labelled` read dates.
            num_paths: the number of sample paths.
            level: the probability of the intervals.
            seed: the seed of the random numbers.

        Returns:
            An `EnergySpectrum` with (m,) values for each part.

        Raises:
            ValueError: Wavenumbers are beyond these limits, or the level, the box or `at` is not
                valid.
            NotImplementedError: The field is not planar, or the posterior is a `part` of a model
                with the exact kernel.

        Example:
            >>> import gp_orff, torch
            >>> x = torch.rand(100, 2).double()
            >>> model = gp_orff.VectorFieldGP(gp_orff.HelmholtzKernel(num_dims=2))
            >>> field = model.condition(x, torch.sin(6 * x)).posterior()
            >>> spectrum = field.energy_spectrum(num_paths=16)
            >>> spectrum.wavenumbers.shape, spectrum.divergent.mean.shape
            (torch.Size([24]), torch.Size([24]))
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
        """Return the tidal ellipses of one constituent of a kernel of `gp_orff.tides`.

        The axes, inclination and phase of an ellipse are not linear in the field. So they are
        computed from samples of the posterior at each point. If several terms of the kernel have
        the constituent, their sum is used. The constant mean is not included.

        Args:
            constituent: the name of the constituent, such as "M2".
            x: points (n, d − 1), without the column of time.
            epoch: the time at which phases are zero. Pass a date, such as numpy.datetime64, if
                `gp_orff.labelled` read dates.
            num_samples: the number of samples.
            level: the probability of the intervals.
            seed: the seed of the random numbers.

        Returns:
            A `TidalEllipses` with (n,) values for each quantity.

        Raises:
            ValueError: The kernel does not have the constituent, the field is not planar, or the
                points have another shape. Or `epoch` is a date but the data have no dates,
                `num_samples` is less than 2, or the level is not between 0 and 1.

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

        The grid is the product of 1-D coordinates, or a curvilinear grid if they are 2-D. For each
        output or symbol, the variables `<name>` and `<name>_sd` are the mean and the standard
        deviation. With `paths`, the variable `<name>` has sample paths instead, along the dimension
        `realization`. Attributes and the order of dimensions follow the CF conventions; see
        `gp_orff.labelled.on_grid`.

        Args:
            coordinates: arrays or DataArrays by name, in the order of the inputs of the model. They
                are 1-D, or 2-D for a curvilinear grid.
            names: the names of the p outputs. The default is u, v, w for 2 or 3 outputs, otherwise
                f1, f2, ...
            symbols: symbols of the field by name. If a symbol has several outputs, they are
                numbered. The default is the divergence and the vorticity of a planar field, if they
                exist.
            attrs: attributes by name, {"u": {"units": "m s-1"}}, or a Dataset that has them. Units
                of symbols are derived, and their values are converted: if u is in "m s-1" and x in
                "km", the vorticity is in "s-1".
            time_unit: the unit of time of the model, for datetime64 coordinates, as in
                `gp_orff.labelled.readings`.
            epoch: the date at which the time of the model is zero, as in
                `gp_orff.labelled.readings`.
            project: the plane of a model that was fitted to longitudes and latitudes; see
                `gp_orff.labelled.on_grid`.
            chunks: the sizes of Dask chunks, by dimension; see `gp_orff.labelled.on_grid`.
            paths: the number of sample paths. The default is none. Derivatives of paths need a
                model with features.
            seed: the seed of the sample paths.

        Returns:
            A Dataset with the coordinates and variables.

        Raises:
            ImportError: xarray is not installed. Run `pip install gp_orff[xarray]`, or
                `gp_orff[dask]` for `chunks`.
            TypeError: Coordinates are neither numbers nor times, or a value of `symbols` is not a
                `Symbol`.
            ValueError: Coordinates, names or symbols do not fit the field or each other.

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
        """Points, or a tuple of (low, high), converted to the units of the columns."""
        if isinstance(region, tuple):
            return tuple(entries_in_units(region, self.units, "region"))
        return in_column_units(region, self.units, "region")

    def _warn_once(self, symbol: Symbol) -> None:
        """Warn of derivatives that the data do not determine, once for each class of symbol."""
        if type(symbol) in self._warned:
            return
        self._warned.add(type(symbol))
        kernel = self._snapshot.kernel
        unknown = directions_unknown(kernel, self._snapshot.inference.data)
        warn_of_derivatives(symbol, kernel, unknown)

    def _at(
        self, x: Float[Tensor, "n d"], symbol: Symbol | None
    ) -> tuple[Float[Tensor, "n d"], FieldDistribution]:
        """Checked points, and the distribution of the field there. If there are no points, a point
        of the data is used."""
        if is_transformed():
            raise NotImplementedError(
                "expected plain points, got points inside a transform of torch.func; use mean, "
                "variance, pointwise_covariance or sample paths there"
            )
        points = in_column_units(x, self.units, "x")
        points = as_points(points, self._snapshot.num_inputs, empty=True).to(self._snapshot.device)
        points = points if len(points) else self._snapshot.data_point
        support = points
        if symbol is not None:
            self._snapshot.check_symbol(symbol)
            self._warn_once(symbol)
            support = symbol.all_points(points, self._snapshot.space)
        # Two caches serve the usual course of calls: several results (mean, variance, samples) at
        # the same points, or one symbol at many points. A larger domain is stored until points
        # leave it. The last image is stored until the field, the symbol or the domain changes.
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
    """Values on the device and with the floating type of points; float64 for arrays and
    integers."""
    given = x if isinstance(x, Tensor) else torch.empty(0, dtype=torch.float64)
    return values.to(given.device, given.dtype if given.is_floating_point() else torch.float64)
