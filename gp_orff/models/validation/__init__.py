"""Predictions of readings that were left out: blocks, scores, and what a model says of itself."""
