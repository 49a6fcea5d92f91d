"""Searches for hyperparameters, each on one representation of the data or a series of them."""
