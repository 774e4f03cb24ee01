"""Tests import the scripts from the repository's root, on one thread, each with the same seed."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
torch.set_num_threads(1)
import simulators.without_opencv  # noqa: E402, F401 -- a machine without libGL runs the tests, too


@pytest.fixture(autouse=True)
def fixed_seed():
    torch.manual_seed(0)
