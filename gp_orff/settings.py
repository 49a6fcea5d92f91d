"""Settings of this package, used like those of `gpytorch.settings`."""

from gpytorch.settings import _feature_flag, _value_context


class check_features(_feature_flag):
    """Whether a new posterior of random features is checked for overconfidence.

    On by default. The check costs about a quarter of the posterior itself, once. See
    `gp_orff.inference.overconfidence`.

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
    """The number of threads that the calls of `VectorFieldGP` and `FieldPosterior` use.

    None by default: a short measurement in each call chooses the number, see
    `gp_orff.models.threads`. The number changes results by rounding errors; with 1 thread, results
    are the same in every run.

    Args:
        value: the number of threads within the `with` block, or None for the measurement.

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


__all__ = ["check_features", "num_threads"]
