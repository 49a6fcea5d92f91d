"""The measured regions of README, each written from results by the function of its name."""

from regions import fields, frequencies, large, many_inputs, paper_tables, papers, steps
from regions.registry import REGIONS

__all__ = [
    "REGIONS",
    "fields",
    "frequencies",
    "large",
    "many_inputs",
    "paper_tables",
    "papers",
    "steps",
]
