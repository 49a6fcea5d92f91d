"""Joint distributions of a field at points, in any unit."""

import gpytorch
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from torch import Tensor


class _InAnyUnit(MultivariateNormal):
    """A normal distribution whose variances have no floor.

    gpytorch raises variances to `gpytorch.settings.min_variance`, 1e-10 in double precision, which
    is a standard deviation of 1e-5 in whatever the unit is: that of a vorticity in s⁻¹ may be less.
    """

    @property
    def variance(self) -> Tensor:
        """The variances: at every point, of every output."""
        floor = gpytorch.settings.min_variance(float_value=0.0, double_value=0.0, half_value=0.0)
        with floor:
            return super().variance


class FieldNormal(_InAnyUnit, MultitaskMultivariateNormal):
    """Several outputs at n points, (n, q)."""


class ScalarNormal(_InAnyUnit):
    """One output at n points, (n,)."""
