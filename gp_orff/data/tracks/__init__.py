"""Readings along tracks: blocks of them, whose means are observations with correlated noise."""
