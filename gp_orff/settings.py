"""Switches of this package, used like those of `gpytorch.settings`."""

from gpytorch.settings import _feature_flag


class check_features(_feature_flag):
    """Whether a posterior of random features is checked for overconfidence when it is made.

    On by default; about a quarter of the posterior's own cost, once. See `gp_orff.trust`.

    Example:
        >>> import gp_orff
        >>> with gp_orff.settings.check_features(False):
        ...     gp_orff.settings.check_features.on()
        False
    """

    _default = True


__all__ = ["check_features"]
