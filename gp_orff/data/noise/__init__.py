"""Noise of observations: covariances, likelihoods, and the noise of a group."""
