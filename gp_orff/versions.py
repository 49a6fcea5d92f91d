"""The versions and the platform that a bug report should contain."""

import platform
from importlib import metadata

PACKAGES = [
    *("gp_orff", "torch", "gpytorch", "linear_operator", "jaxtyping", "numpy", "scipy", "finufft"),
    *("matplotlib", "xarray", "pint", "pyproj", "ppigrf", "dask", "distributed", "zarr"),
    *("scikit-learn", "botorch", "cartopy", "basemap-data"),
]


def show_versions() -> None:
    """Print the platform, the Python version and the package versions, one per line.

    A bug report should contain this text.

    Example:
        >>> import gp_orff
        >>> gp_orff.show_versions()  # doctest: +ELLIPSIS
        system           ...
        Python           3...
        gp_orff          ...
    """
    print(f"{'system':<16} {platform.platform()}")
    print(f"{'Python':<16} {platform.python_version()}")
    for name in PACKAGES:
        print(f"{name:<16} {_version(name)}")


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"
