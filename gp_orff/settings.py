"""Settings of this package. Use them as context managers, like those of `gpytorch.settings`."""

from gpytorch.settings import _feature_flag, _value_context


class check_calibration(_feature_flag):
    """Whether `VectorFieldGP.fit` tests the coverage on a few held-out blocks or tracks.

    The check is on by default. You get a `CalibrationWarning` if the 95 % intervals cover too few
    of the held-out observations. The check takes a few percent of the time of the fit.

    Use `VectorFieldGP.cross_validate` in these cases, which have no check: observations of symbols,
    `Pointwise` likelihoods, tracks with a matrix of more than 4096 rows, and other large data whose
    covariance has no closed form.

    Args:
        state: True or False, within the `with` block.

    Example:
        >>> import gp_orff
        >>> with gp_orff.settings.check_calibration(False):
        ...     gp_orff.settings.check_calibration.on()
        False
    """

    _default = True


class check_features(_feature_flag):
    """Whether each new posterior of random features is tested for overconfidence.

    The check is on by default. You get a `FeatureWarning` if the error of the features exceeds the
    error bars. The check takes about a quarter of the time of the posterior. The module
    `gp_orff.inference.posteriors` explains the check.

    Args:
        state: True or False, within the `with` block.

    Example:
        >>> import gp_orff
        >>> with gp_orff.settings.check_features(False):
        ...     gp_orff.settings.check_features.on()
        False
    """

    _default = True


class num_threads(_value_context):
    """The number of threads for `VectorFieldGP` and `FieldPosterior`.

    NumPy and SciPy use at most this number in the calls. If several calls run at the same time, the
    first one sets their number.

    By default (None), a fit measures the fastest number in 0.03 s, and later calls use this number.
    If other programs have become active since the fit, choose a smaller number. The number of
    threads changes results by rounding errors. Choose 1 if results must be equal in every run.

    Args:
        value: the number of threads within the `with` block, or None for a measurement.

    Raises:
        ValueError: `value` is not a positive integer or None.

    Example:
        >>> import gp_orff
        >>> with gp_orff.settings.num_threads(4):
        ...     gp_orff.settings.num_threads.value()
        4
    """

    def __init__(self, value: int | None):
        if value is not None and (type(value) is not int or value < 1):
            raise ValueError(
                f"num_threads expects a positive integer, or None for a measurement, got {value!r};"
                " use 1 for results that are equal in every run"
            )
        super().__init__(value)


__all__ = ["check_calibration", "check_features", "num_threads"]
