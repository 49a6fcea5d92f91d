"""The same inside gpytorch: the only room that knows the protocol of `ExactGP`."""
