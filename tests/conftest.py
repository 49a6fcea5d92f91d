"""Tests have small arrays, for which one thread per process is faster and has steadier times."""

import pytest
import torch

import gp_orff

torch.set_num_threads(1)


@pytest.fixture
def no_check_of_random_features():
    """Few features keep the references small; `tests/models/test_trust.py` has the warning."""
    with gp_orff.settings.check_features(False):
        yield
