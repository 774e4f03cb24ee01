"""pretend_gpu_checks.py in a process of its own: torch takes a pretend device for a whole process,
and ManiSkill cannot live with it."""

import subprocess
import sys

import pytest
from run_helpers import TESTS


@pytest.mark.slow
def test_on_the_pretend_gpu():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += [str(TESTS / "pretend_gpu_checks.py")]
    done = subprocess.run(command, cwd=TESTS.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]
    assert " passed" in done.stdout.splitlines()[-1]
