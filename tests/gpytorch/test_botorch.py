"""BoTorch in a separate process, because importing it changes settings of gpytorch permanently."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_a_field_is_a_model_of_botorch():
    if find_spec("botorch") is None:
        pytest.skip("botorch is not installed")
    files = ["tests/gpytorch/in_botorch.py", "gp_orff/botorch.py"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files]
    done = subprocess.run([*command, "--noconftest"], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout
