"""Kernels and features inside gpytorch: the only room that implements the protocol of `ExactGP`."""
