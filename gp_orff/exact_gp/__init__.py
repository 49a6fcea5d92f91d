"""Exact kernels and features inside GPyTorch models, by the protocol of `ExactGP`."""
