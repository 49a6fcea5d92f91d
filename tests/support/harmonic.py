"""Harmonic kernels and points for tests."""

import torch

import gp_orff

SOURCES = {"below": 0.0, "above": 1.0, "both": (0.0, 1.0)}


def points(count, seed=0, low=0.0, high=1.0):
    generator = torch.Generator().manual_seed(seed)
    return low + (high - low) * torch.rand(count, 3, generator=generator, dtype=torch.float64)


def harmonic(sources="below", num_depths=2, **options):
    reference = SOURCES[sources]
    kernel = gp_orff.HarmonicKernel(
        num_depths, sources, reference_height=reference, mean_height=0.5, **options
    ).double()
    count = kernel.depths.shape[-1]
    kernel.depths = torch.linspace(0.4, 1.1, count)
    kernel.variances = torch.linspace(0.5, 1.5, count)
    return kernel
