"""Settings of this package, used like those of `gpytorch.settings`."""

from gpytorch.settings import _feature_flag, _value_context


class check_calibration(_feature_flag):
    """Whether a fit is checked on a few held-out blocks of observations, or held-out tracks.

    The check is on by default. You get a `CalibrationWarning` if 95 % intervals cover too few of
    these observations. The check takes a few percent of the time of the fit. Data in chunks,
    statistics, grids of more than 4096 features and larger matrices are not checked: use
    `cross_validate`.

    Args:
        state: whether to check, within the `with` block.

    Example:
        >>> import gp_orff
        >>> with gp_orff.settings.check_calibration(False):
        ...     gp_orff.settings.check_calibration.on()
        False
    """

    _default = True


class check_features(_feature_flag):
    """Whether a new posterior of random features is checked for overconfidence.

    The check is on by default. It costs about a quarter of the posterior, once. See
    `gp_orff.inference.posteriors`.

    Args:
        state: whether to check, within the `with` block.

    Example:
        >>> import gp_orff
        >>> with gp_orff.settings.check_features(False):
        ...     gp_orff.settings.check_features.on()
        False
    """

    _default = True


class num_threads(_value_context):
    """Set the number of threads for `VectorFieldGP` and `FieldPosterior`; a context manager.

    By default (None), a fit chooses the fastest number by a measurement of 0.03 s, and later calls
    use it. Choose fewer if the machine has become busy since. The number of threads changes results
    by rounding errors: choose 1 for results that are the same in every run.

    Args:
        value: the number of threads within the `with` block; None to measure.

    Raises:
        ValueError: a number that is not a positive integer.

    Example:
        >>> import gp_orff
        >>> with gp_orff.settings.num_threads(4):
        ...     gp_orff.settings.num_threads.value()
        4
    """

    def __init__(self, value: int | None):
        if value is not None and (type(value) is not int or value < 1):
            raise ValueError(
                f"num_threads expects a positive integer, or None for a measurement, got {value!r}"
            )
        super().__init__(value)


__all__ = ["check_calibration", "check_features", "num_threads"]
