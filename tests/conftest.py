"""Tests work on small arrays: one thread each is faster, and steady beside other work."""

import torch

torch.set_num_threads(1)
