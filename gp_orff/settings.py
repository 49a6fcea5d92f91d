"""Switches of this package, used like those of `gpytorch.settings`."""

from gpytorch.settings import _feature_flag, _value_context


class check_features(_feature_flag):
    """Whether a posterior of random features is checked for overconfidence when it is made.

    On by default; about a quarter of the posterior's own cost, once. See
    `gp_orff.inference.overconfidence`.

    Example:
        >>> import gp_orff
        >>> with gp_orff.settings.check_features(False):
        ...     gp_orff.settings.check_features.on()
        False
    """

    _default = True


class num_threads(_value_context):
    """How many threads the calls of `VectorFieldGP` and `FieldPosterior` use.

    None by default: a short measurement inside each call chooses, see `gp_orff.models.threads`. The
    number changes results by rounding; with 1, they are the same on every run.

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
