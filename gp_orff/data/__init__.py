"""Observations y = H f + noise, and their sufficient statistics."""
