"""Region name → function that writes it."""

from collections.abc import Callable

from regions.markdown import Results

REGIONS: dict[str, Callable[[Results], str]] = {}


def region(write: Callable[[Results], str]) -> Callable[[Results], str]:
    """Register under the name of the function, with dashes."""
    REGIONS[write.__name__.replace("_", "-")] = write
    return write
