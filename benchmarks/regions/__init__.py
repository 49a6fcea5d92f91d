"""The measured regions of README, each written from results by the function of its name."""

from regions import fields, frequencies, large, papers, steps
from regions.registry import REGIONS

__all__ = ["REGIONS", "fields", "frequencies", "large", "papers", "steps"]
