"""Experiments of the papers, with their figures."""
