"""Accuracy of error bars and of approximations, where the truth or exact kernel is known."""
