"""Kills tiny runs at random moments, resumes them and counts what survived; run by hand.

    python tests/kill_runs.py --kills 50

Each of three scripts, one of ManiSkill among them, is started, killed after a random time, resumed,
killed again and so on, and at last resumed to its end. Every checkpoint on the way must load, and
the rows of metrics.csv must be unique and in order.
"""

import argparse
import csv
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
TINY = ["--num-envs", "4", "--num-steps", "16", "--num-minibatches", "2", "--update-epochs", "1"]
TINY += ["--hidden-size", "16", "--eval-points", "1000", "--eval-episodes", "2", "--device", "cpu"]
RUNS = {
    "trudi_continuous": [
        "--env-id",
        "Pendulum-v1",
        "--diffusion-steps",
        "2",
        "--policy-delay",
        "1",
    ],
    "ppo_continuous": ["--env-id", "Pendulum-v1"],
    "reppo_maniskill": ["--env-id", "PushCube-v1", "--policy-delay", "1"],
}


def command(script, *flags):
    return [sys.executable, str(ROOT / f"{script}.py"), *flags]


def check(folder):
    """-> the step of the checkpoint; fails where something is torn"""
    step = torch.load(folder / "checkpoint.pt", weights_only=True)["progress"]["step"]
    if (folder / "metrics.csv").exists():
        with (folder / "metrics.csv").open(newline="") as file:
            steps = [int(row["global_step"]) for row in csv.DictReader(file)]
        assert steps == sorted(set(steps)), steps
    return step


def torture(script, num_kills, folder):
    first = command(script, *TINY, *RUNS[script], "--run-dir", str(folder))
    first += ["--total-timesteps", "1000000"]
    again = command(script, "--resume", str(folder))
    kills = 0
    while kills < num_kills:
        begun = (folder / "checkpoint.pt").exists()
        process = subprocess.Popen(
            again if begun else first, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        while not (folder / "checkpoint.pt").exists():
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.01)
        time.sleep(random.uniform(0, 8))
        assert process.poll() is None, process.stderr.read()
        process.kill()
        process.communicate()
        kills += 1
        print(f"{script}: kill {kills}, checkpoint at step {check(folder)}", flush=True)
    step = check(folder)
    end = command(script, "--resume", str(folder), "--total-timesteps", str(step + 256))
    done = subprocess.run(end, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert check(folder) >= step and (folder / "eval.json").exists()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    num_kills = parser.parse_args().kills
    random.seed(0)
    shares = [num_kills // 3 + (i < num_kills % 3) for i in range(3)]
    with tempfile.TemporaryDirectory() as temporary:
        for script, share in zip(RUNS, shares, strict=True):
            torture(script, share, Path(temporary) / script)
    print(f"{num_kills} kills: every checkpoint loaded, every run went on to its end")


if __name__ == "__main__":
    main()
