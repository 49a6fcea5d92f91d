"""Datasets that are larger than memory: chunks for `fit`, and maps block by block."""
