"""Accuracy of intervals and of approximations, for a known truth or exact kernel."""
