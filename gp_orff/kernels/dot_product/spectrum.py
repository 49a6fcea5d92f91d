"""Eigenvalues of dot-product kernels, which take the place of a spectral density."""

from dataclasses import dataclass

from gpytorch.kernels import LinearKernel, PolynomialKernel
from jaxtyping import Float
from torch import Tensor

from gp_orff.kernels.cholesky import positive_root
from gp_orff.kernels.dot_product.kernel import DotProductKernel
from gp_orff.kernels.dot_product.series import Coefficients, Harmonics, Series, Taylor
from gp_orff.kernels.scalar import require_covariance_of
from gp_orff.kernels.spectra.base import spectrum


@dataclass(frozen=True)
class DotProductSpectrum:
    """The eigenvalues of a dot-product kernel of the lifted inputs x̃ = (scale · x, offset).

    It is no `Spectrum`: the kernel is not stationary and has no spectral density. Features of it
    are polynomials of ⟨x̃, z⟩, z uniform on the sphere (Le et al. 2013, Corollary 4).

    Args:
        series: the form of the kernel.
        coefficients: its coefficients, (*b) each, by their degrees.
        scale: what multiplies the inputs, (*b, 1, d) or (*b, 1, 1).
        offset: further inputs, equal at all points, (*b, 1, q).
    """

    series: Series
    coefficients: Coefficients
    scale: Float[Tensor, "*b 1 d"]
    offset: Float[Tensor, "*b 1 q"]

    @property
    def isotropic_lengthscale(self) -> None:
        """Raise: there is none.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(
            "expected stationary kernels, which have lengthscales, got a dot-product kernel; "
            "measure the error of its features with gp_orff.compare_with_exact"
        )

    def num_coordinates(self, num_dims: int) -> int:
        """The number of uniform coordinates that draw a harmonic: one, for any `num_dims`."""
        return 1

    def num_lifted(self, num_dims: int) -> int:
        """The number of lifted inputs for `num_dims` inputs."""
        return num_dims + self.offset.shape[-1]

    def harmonics(self, num_dims: int) -> Harmonics:
        """The expansion of the kernel in d = `num_dims` lifted inputs, differentiable, in float64.

        A power series has one in any d, for inputs that are padded by zeros too.

        Raises:
            ValueError: d < 2, or another d than that of the series.
        """
        if num_dims < 2:
            raise ValueError(
                "features of a dot-product kernel expect at least 2 inputs, since there are no "
                f"Legendre polynomials in one dimension, got {num_dims}; append a column of zeros "
                "to the inputs"
            )
        if self.series.num_dims not in (None, num_dims):
            raise ValueError(
                f"a dot-product kernel of Legendre polynomials or projections in "
                f"{self.series.num_dims} inputs expects random vectors of as many dimensions, got "
                f"{num_dims}, to which the rule pads; use gp_orff.QuasiMonteCarlo, which does not, "
                "or DotProductKernel.from_taylor"
            )
        values = {n: a.double() for n, a in self.coefficients.items()}
        return self.series.harmonics(values, num_dims)


@spectrum.register
def _(kernel: DotProductKernel) -> DotProductSpectrum:
    require_covariance_of(DotProductKernel, kernel)
    values = kernel.coefficients
    coefficients = dict(zip(kernel.degrees, values.unbind(-1), strict=True))
    return DotProductSpectrum(
        kernel.series, coefficients, values.new_ones(1, 1), values.new_zeros(1, 0)
    )


@spectrum.register
def _(kernel: LinearKernel) -> DotProductSpectrum:
    require_covariance_of(LinearKernel, kernel)
    variance = kernel.variance
    one = {1: variance.new_ones(())}
    return DotProductSpectrum(Taylor(), one, positive_root(variance), variance.new_zeros(1, 0))


@spectrum.register
def _(kernel: PolynomialKernel) -> DotProductSpectrum:
    """(⟨x, x′⟩ + c)^p = ⟨x̃, x̃′⟩^p with x̃ = (x, √c).

    Raises:
        ValueError: a power that is no positive integer, or a negative offset.
    """
    require_covariance_of(PolynomialKernel, kernel)
    power, offset = kernel.power, kernel.offset
    if power < 1 or int(power) != power:
        raise ValueError(
            f"PolynomialKernel expects a positive integer as power, got {power}; other powers have "
            "no power series with positive coefficients"
        )
    if (offset < 0).any():
        raise ValueError(
            f"PolynomialKernel expects an offset that is not negative, got {offset.tolist()}; "
            "constrain it with gpytorch.constraints.Positive()"
        )
    one, root = {int(power): offset.new_ones(())}, positive_root(offset).unsqueeze(-2)
    return DotProductSpectrum(Taylor(), one, offset.new_ones(1, 1), root)
