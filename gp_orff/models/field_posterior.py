"""The posterior of a vector field, as a scientist asks for it."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from gpytorch.models import ExactGP
from jaxtyping import Float
from torch import Tensor

from gp_orff.data.validation import as_places
from gp_orff.exact_gp.posterior_covariance import posterior_covariance
from gp_orff.inference.distributions import FieldDistribution
from gp_orff.inference.exact_posterior import ExactPosterior
from gp_orff.labelled import on_grid
from gp_orff.models.frozen_model import ExactGPSnapshot, Located, PartSnapshot, Snapshot
from gp_orff.models.sample_paths import SamplePaths, Summary, sample_paths
from gp_orff.models.threads import chosen_threads
from gp_orff.symbols.base import Symbol
from gp_orff.symbols.derivatives import Curl, Divergence, Jacobian
from gp_orff.symbols.parts import CurlFreePart, DivergenceFreePart
from gp_orff.symbols.potentials import Potential, StreamFunction, VectorPotential

if TYPE_CHECKING:
    import xarray


class FieldPosterior:
    """The latent field given the data, its mean included; an immutable snapshot of a model.

    Variances are those of the field: for new observations, add the noise of the likelihood.

    All results are computed in float64 where the model is, and returned in the type of the points;
    means and variances also where the points are. Points outside the frequency grid's domain are
    served by a wider grid, made from the data when they come.

    Example:
        >>> import gp_orff, torch
        >>> x = torch.rand(100, 2, dtype=torch.float64)
        >>> y = torch.stack([torch.sin(3 * x[:, 1]), torch.sin(3 * x[:, 0])], dim=-1)
        >>> model = gp_orff.VectorFieldGP(gp_orff.DivergenceFreeKernel(num_dims=2))
        >>> field = model.fit(x, y, progress=False).posterior()
        >>> field.mean(x).shape, field.variance(x).shape
        (torch.Size([100, 2]), torch.Size([100, 2]))
        >>> (field.mean(x) - y).abs().max() < 0.01
        tensor(True)
    """

    def __init__(self, snapshot: Snapshot):
        self._snapshot = snapshot
        self._own = snapshot.located()
        self._wide: Located | None = None  # of the points outside that came last
        self._derived: tuple[Located, Symbol, Located] | None = None  # the last one

    def __getstate__(self) -> dict:
        return {**self.__dict__, "_derived": None}  # whose symbol may not pickle

    @classmethod
    def from_exact_gp(cls, model: ExactGP) -> "FieldPosterior":
        """Of a trained gpytorch model, whose `covar_module` is an `ORFFKernel` or an exact kernel.

        Raises:
            TypeError: a model without mean_module and such a covar_module, or without data.
            NotImplementedError: a likelihood whose noise is not known.

        Example:
            >>> import gp_orff, gpytorch, torch
            >>> class Model(gpytorch.models.ExactGP):
            ...     def __init__(self, x, y, likelihood):
            ...         super().__init__(x, y, likelihood)
            ...         constant = gpytorch.means.ConstantMean()
            ...         self.mean_module = gpytorch.means.MultitaskMean(constant, num_tasks=2)
            ...         kernel = gp_orff.HelmholtzKernel(num_dims=2)
            ...         self.covar_module = gp_orff.ORFFKernel(kernel, gp_orff.Grid.for_data(x))
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
        return self._snapshot.num_inputs

    @property
    def num_outputs(self) -> int:
        return self._own.distribution.num_outputs

    @chosen_threads()
    def __call__(
        self, x: Float[Tensor, "n d"], symbol: Symbol | None = None
    ) -> MultitaskMultivariateNormal | MultivariateNormal:
        """The joint distribution of the field, or of a symbol of it, at n points; (n,) where there
        is one output."""
        points, distribution = self._at(x, symbol)
        points = points.to(_dtype(x))
        covariance = posterior_covariance(points, distribution)
        mean = self.mean(x, symbol).to(points)
        if not len(mean):
            covariance = mean.new_zeros(0, 0)
        if mean.shape[-1] == 1:
            return MultivariateNormal(mean.squeeze(-1), covariance)
        return MultitaskMultivariateNormal(mean, covariance)

    @chosen_threads()
    def mean(self, x: Float[Tensor, "n d"], symbol: Symbol | None = None) -> Float[Tensor, "n q"]:
        """E[f(x)], or that of a symbol of f."""
        points, distribution = self._at(x, symbol)
        mean = distribution.mean(points) + self._snapshot.mean(points, symbol)
        return mean[: len(x)].to(_device(x), _dtype(x))

    @chosen_threads()
    def variance(
        self, x: Float[Tensor, "n d"], symbol: Symbol | None = None
    ) -> Float[Tensor, "n q"]:
        """Var[f_j(x)], or that of a symbol of f; nothing n×n."""
        points, distribution = self._at(x, symbol)
        return distribution.variance(points)[: len(x)].to(_device(x), _dtype(x))

    @chosen_threads()
    def pointwise_covariance(
        self, x: Float[Tensor, "n d"], symbol: Symbol | None = None
    ) -> Float[Tensor, "n q q"]:
        """Cov[f(x_n)] of the components at every point by itself, for `plotting.plot_uncertainty`;
        nothing n×n."""
        points, distribution = self._at(x, symbol)
        return distribution.blocks(points)[: len(x)].to(_device(x), _dtype(x))

    def divergence(self, x: Float[Tensor, "n d"]) -> MultivariateNormal:
        """∇·f (n,); see `Divergence`."""
        return self(x, Divergence())

    def curl(self, x: Float[Tensor, "n d"]) -> MultivariateNormal | MultitaskMultivariateNormal:
        """∇×f, (n,) in two dimensions, (n, 3) in three; see `Curl`."""
        return self(x, Curl())

    def jacobian(self, x: Float[Tensor, "n d"]) -> MultivariateNormal | MultitaskMultivariateNormal:
        """∂_j f_i (n, p·d), row by row; see `Jacobian`."""
        space = len(self._snapshot.space)
        return self(x, Jacobian(None if space == self.num_outputs else space))

    def potential(
        self, x: Float[Tensor, "n d"], reference: Float[Tensor, "d"] | None = None
    ) -> MultivariateNormal:
        """g of the curl-free part ∇g (n,); see `Potential`."""
        return self(x, Potential(reference))

    def stream_function(
        self, x: Float[Tensor, "n 2"], reference: Float[Tensor, "2"] | None = None
    ) -> MultivariateNormal:
        """ψ of the divergence-free part (∂₂ψ, −∂₁ψ) (n,); see `StreamFunction`."""
        return self(x, StreamFunction(reference))

    def vector_potential(self, x: Float[Tensor, "n 3"]) -> MultitaskMultivariateNormal:
        """A of the divergence-free part ∇×A (n, 3); see `VectorPotential`."""
        return self(x, VectorPotential())

    def curl_free_part(self, x: Float[Tensor, "n d"]) -> MultitaskMultivariateNormal:
        """The part of f that is a gradient (n, d); see `CurlFreePart`."""
        return self(x, CurlFreePart())

    def divergence_free_part(self, x: Float[Tensor, "n d"]) -> MultitaskMultivariateNormal:
        """The part of f without divergence (n, d); see `DivergenceFreePart`."""
        return self(x, DivergenceFreePart())

    def part(self, name: str | int) -> "FieldPosterior":
        """The posterior of one term of a sum of kernels, such as `field.part("curl_free")` of a
        `HelmholtzKernel`, or `field.part(0)`; without the mean, which is in none of them.

        Unlike `CurlFreePart`, which is a map of any field, this asks which term of the prior
        explains the data.

        Raises:
            ValueError: a kernel that is no sum, or a name that is none of its terms.
            NotImplementedError: terms that share their features.
        """
        return FieldPosterior(PartSnapshot.of(self._snapshot, name))

    def sample_paths(self, num_paths: int, *, seed: int = 0) -> SamplePaths:
        """Functions drawn from the posterior: `paths(x)` is (num_paths, n, p) at any points, the
        same functions in every call; see `SamplePaths`. By drawn weights of the features; of exact
        models by Matheron's rule (Wilson et al. 2020).

        Raises:
            ValueError: in a call, points outside a frequency grid's domain.
        """
        if num_paths < 1:
            raise ValueError(f"sample_paths expects at least one path, got {num_paths}")
        smooth, _ = self._own.distribution.split()
        if isinstance(self._snapshot, PartSnapshot) and isinstance(smooth, ExactPosterior):
            raise NotImplementedError(
                "sample paths of a part of an exact model are not known: expected features, such "
                "as VectorFieldGP(kernel, frequencies=gp_orff.Auto(exact_values=0))"
            )
        with torch.no_grad():
            paths = sample_paths(smooth, self._snapshot.num_inputs, num_paths, seed)
        return SamplePaths(paths, self._snapshot)

    def summarize(
        self,
        x: Float[Tensor, "n d"],
        function: Callable[[Float[Tensor, "S n p"]], Float[Tensor, "S *any"]],
        *,
        num_paths: int = 256,
        seed: int = 0,
    ) -> Summary:
        """Mean, standard deviation and 95 % interval of anything that follows from the field's
        values at n points, by sample paths: `field.summarize(x, lambda f: f.norm(dim=-1))` is the
        speed."""
        return Summary.of(function(self.sample_paths(num_paths, seed=seed)(x)))

    def to_xarray(
        self,
        coordinates: Mapping[str, object],
        *,
        names: Sequence[str] | None = None,
        symbols: Mapping[str, Symbol] | None = None,
        attrs: Mapping[str, Mapping[str, Any]] | None = None,
        time_unit: str = "s",
        epoch: object = None,
    ) -> "xarray.Dataset":
        """A Dataset on the product of coordinates: for every output and symbol its mean, and its
        standard deviation as `<name>_sd`; float64, in chunks of points.

        Args:
            coordinates: 1-D arrays or DataArrays by name, in the order of the model's inputs.
                datetime64 becomes a number of `time_unit` since `epoch` for the model, as in
                `gp_orff.labelled.readings`, and stays a time in the Dataset.
            names: of the outputs; u, v, w of two or three, else f1, f2, ...
            symbols: maps of the field by name, numbered where they have several outputs; if None,
                divergence and vorticity of a planar field, where they exist.
            attrs: attributes by name, such as {"u": {"units": "m s-1"}}, added to those of the
                coordinates; units and standard_name go to the standard deviation too.

        Raises:
            ImportError: no xarray; `pip install gp_orff[xarray]`.
            TypeError: coordinates that are neither numbers nor times, no symbol.
            ValueError: coordinates, names or symbols that do not fit the field or each other.

        Example:
            >>> import gp_orff, torch
            >>> model = gp_orff.VectorFieldGP(gp_orff.HelmholtzKernel(num_dims=2))
            >>> field = model.condition(torch.rand(20, 2), torch.randn(20, 2)).posterior()
            >>> ds = field.to_xarray({"x": [0.0, 0.5, 1.0], "y": [0.0, 1.0]})
            >>> ds["vorticity_sd"].dims, ds["vorticity_sd"].shape
            (('x', 'y'), (3, 2))
        """
        return on_grid(
            self,
            coordinates,
            names=names,
            symbols=symbols,
            attrs=attrs,
            time_unit=time_unit,
            epoch=epoch,
        )

    def _at(
        self, x: Float[Tensor, "n d"], symbol: Symbol | None
    ) -> tuple[Float[Tensor, "n d"], FieldDistribution]:
        """The points, one where there are none, and the distribution there."""
        points = as_places(x, self._snapshot.num_inputs).to(self._snapshot.device)
        points = points if len(points) else self._snapshot.somewhere
        support = points
        if symbol is not None:
            self._snapshot.check_symbol(symbol)
            support = symbol.all_points(points, self._snapshot.space)
        in_domain, field = self._snapshot.in_domain, self._own
        if not in_domain(field, support):
            if self._wide is None or not in_domain(self._wide, support):
                self._wide = self._snapshot.located(support)
            field = self._wide
        if symbol is None:
            return points, field.distribution
        last = self._derived
        if (
            last is None
            or last[0] is not field
            or last[1] is not symbol
            or not in_domain(last[2], support)
        ):
            image = self._snapshot.apply(symbol, field, support)
            last = self._derived = (field, symbol, image)
        return points, last[2].distribution


def _device(x: object) -> torch.device:
    return x.device if isinstance(x, Tensor) else torch.device("cpu")


def _dtype(x: object) -> torch.dtype:
    known = isinstance(x, Tensor) and x.is_floating_point()
    return x.dtype if known else torch.float64
