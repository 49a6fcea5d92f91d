"""Prediction strategies of our kernels, and two methods of gpytorch that are replaced.

gpytorch has no hook for sums and products of our kernels. Models without a kernel of this package
are not affected: each replacement first looks for such a kernel, and otherwise does what gpytorch
does.
"""

import warnings

from gpytorch.kernels import AdditiveKernel, Kernel, ScaleKernel
from gpytorch.models.exact_prediction_strategies import DefaultPredictionStrategy
from linear_operator.utils.warnings import PerformanceWarning

from gp_orff.exact_gp.orff_kernel import ORFFKernel
from gp_orff.exact_gp.prediction import ExactFieldPredictionStrategy, ORFFPredictionStrategy
from gp_orff.kernels.base import FieldKernel, WrapperKernel
from gp_orff.kernels.fields import PotentialKernel
from gp_orff.kernels.matrix_valued.separable import SeparableKernel
from gp_orff.kernels.matrix_valued.spectral_matrix import SpectralMatrixKernel
from gp_orff.kernels.products import FieldProductKernel


def _is_features(kernel: Kernel) -> bool:
    """Whether a kernel consists of `ORFFKernel`s, up to sums and scales."""
    if isinstance(kernel, AdditiveKernel):
        return all(_is_features(term) for term in kernel.kernels)
    if isinstance(kernel, ScaleKernel):
        return _is_features(kernel.base_kernel)
    return isinstance(kernel, ORFFKernel)


def _is_field(kernel: object) -> bool:
    """Whether a kernel contains a field kernel."""
    fields = (
        FieldKernel,
        PotentialKernel,
        SeparableKernel,
        SpectralMatrixKernel,
        FieldProductKernel,
    )
    return isinstance(kernel, Kernel) and any(isinstance(m, fields) for m in kernel.modules())


def _prediction_strategy(
    self: Kernel, train_inputs, train_prior_dist, train_labels, likelihood
) -> DefaultPredictionStrategy:
    """The strategy of our kernels and of sums of kernels; ScaleKernel asks its base kernel."""
    if _is_features(self):
        strategy = ORFFPredictionStrategy
    elif _is_field(self):
        strategy = ExactFieldPredictionStrategy
    else:
        strategy = DefaultPredictionStrategy
    return strategy(train_inputs, train_prior_dist, train_labels, likelihood)


_gpytorch_product = Kernel.__mul__


def _product(self: Kernel, other: Kernel) -> Kernel:
    """The product of a field kernel and a scalar kernel, in either order."""
    if not (_is_field(self) or _is_field(other)):
        return _gpytorch_product(self, other)
    if any(isinstance(m, ORFFKernel) for kernel in (self, other) for m in kernel.modules()):
        warnings.warn(
            "a product with ORFFKernel has no features: its matrices are dense, at a cost cubic in "
            "the number of points. Multiply inside: ORFFKernel(field * scalar, rule).",
            PerformanceWarning,
            stacklevel=2,
        )
    return FieldProductKernel(self, other) if _is_field(self) else FieldProductKernel(other, self)


for kind in (WrapperKernel, AdditiveKernel, FieldKernel):
    kind.prediction_strategy = _prediction_strategy
Kernel.__mul__ = _product
