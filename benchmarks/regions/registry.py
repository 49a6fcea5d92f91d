"""Region name → function that writes it."""

from collections.abc import Callable, Mapping
from functools import wraps

from regions.markdown import Results

REGIONS: dict[str, Callable[[Results], str]] = {}


def region(write: Callable[[Results], str]) -> Callable[[Results], str]:
    """Register under the name of the function, with dashes."""
    REGIONS[write.__name__.replace("_", "-")] = write
    return write


def sentence(write: Callable[[Mapping], str]) -> Callable[[Mapping], str]:
    """Register what is written from the one file of results of that name; the source follows."""
    return _with_source(write, " ")


def tabulated(write: Callable[[Mapping], str]) -> Callable[[Mapping], str]:
    """The same for what ends with a table: the source is a paragraph of its own."""
    return _with_source(write, "\n\n")


def _with_source(write: Callable[[Mapping], str], separator: str) -> Callable[[Mapping], str]:
    @region
    @wraps(write)
    def whole(results: Results) -> str:
        measured = results.one(write.__name__)
        return f"{write(measured.results)}{separator}{measured.source}"

    return write
