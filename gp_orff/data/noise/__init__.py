"""The noise of observations: its covariance, its likelihoods, and how groups share it."""
