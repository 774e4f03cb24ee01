"""Tests import the scripts from the repository's root, on one thread, each with the same seed."""

import sys
import types
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
torch.set_num_threads(1)
try:
    import cv2  # noqa: F401
except ImportError:  # as in the ManiSkill scripts: a machine without libGL.so.1 runs their tests
    sys.modules["cv2"] = types.ModuleType("cv2")


@pytest.fixture(autouse=True)
def fixed_seed():
    torch.manual_seed(0)
