"""Data and a mixing matrix for several tests of regressions."""

import numpy as np
import torch

ROOT = torch.tensor([[1.0, 0.3], [0.2, 0.8]], dtype=torch.float64)


def data(number=40, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.uniform(size=(number, 2))
    y = np.stack([np.sin(5 * x[:, 1]), np.cos(4 * x[:, 0])], axis=1)
    return x, y + 0.1 * rng.standard_normal(y.shape)
