"""Which of several ways a policy takes: two_doors.py, the entropy of the choice, the picture."""

import json
import math

import gymnasium as gym
import numpy as np
import pytest
from run_helpers import TINY, every_script, reppo, run, train, trudi

import two_doors
from tools import plot_modes

DOORS = ["--env-id", "two_doors:TwoDoors-v0"]


def episodes_of(*counts, failures=(0, 0)):
    """Successes of each mode, then failures of each mode"""
    made = []
    for success, group in ((1.0, counts), (0.0, failures)):
        for mode, count in enumerate(group):
            made += [{"mode": float(mode), "success": success}] * count
    return made


# === the entropy ===
@pytest.mark.parametrize(
    "counts, entropy",
    [
        ((100, 100), 1.0),
        ((200, 0), 0.0),
        ((0, 200), 0.0),
        ((150, 50), 0.8112781244591328),  # -3/4 log2(3/4) - 1/4 log2(1/4)
        ((19, 0), None),
        ((10, 10), 1.0),
        ((30, 30, 30), 1.0),
    ],
)
def test_entropy_by_hand(counts, entropy):
    ways = trudi.behavior(episodes_of(*counts))
    assert ways["successes_by_mode"] == list(counts)
    assert ways["entropy"] == (None if entropy is None else pytest.approx(entropy))


def test_only_successes_count():
    """A policy that always succeeds by one way has no entropy, however its failures end."""
    ways = trudi.behavior(episodes_of(50, 0, failures=(0, 50)))
    assert ways["entropy"] == 0
    assert ways["paper_entropy"] == pytest.approx(1.0)  # half of all episodes each


def test_episodes_without_a_way():
    """They are no successes, but the paper's form divides by all episodes."""
    nowhere = [{"mode": -1.0, "success": 0.0}] * 100
    ways = trudi.behavior(episodes_of(50, 50) + nowhere)
    assert ways["entropy"] == pytest.approx(1.0)
    assert ways["paper_entropy"] == pytest.approx(2 * 0.25 * math.log2(4))
    assert trudi.behavior(nowhere) == {}
    assert trudi.behavior([{"mode": math.nan, "success": 1.0}] * 30) == {}


def test_maniskill_counts_success_at_the_end():
    episodes = [{"mode": 1.0, "success_once": 1.0, "success_at_end": 0.0}] * 30
    assert trudi.behavior(episodes)["successes_by_mode"] == [0, 0]


# === the two doors ===
def walk(direction):
    env = gym.make("two_doors:TwoDoors-v0")
    obs, _ = env.reset(seed=0)
    assert (obs == 0).all()
    total = 0.0
    for step in range(32):
        towards = np.clip((direction - obs) / two_doors.TwoDoors.speed, -1, 1)
        obs, reward, terminated, truncated, info = env.step(towards)
        total += reward
        assert not terminated
        assert truncated == (step == 31)
    return total, info


def test_both_doors_are_equally_good():
    left, left_info = walk(np.array([-1.0, 0.0]))
    right, right_info = walk(np.array([1.0, 0.0]))
    assert left == pytest.approx(right)
    assert left == pytest.approx(0.2 + 0.4 + 0.6 + 0.8 + 28)
    assert left_info == {"mode": 0, "success": True}
    assert right_info == {"mode": 1, "success": True}
    middle, info = walk(np.array([0.0, 0.0]))
    assert middle == pytest.approx(0)
    assert not info["success"]


# === whole runs ===
@every_script
def test_evaluation_reports_the_ways(script, tmp_path):
    folder = tmp_path / "run"
    train(folder, env=DOORS, script=script)
    out = run("--evaluate", folder, "--eval-episodes", 30, script=script).out
    assert "successes by mode" in out
    table = json.loads((folder / "eval_checkpoint.json").read_text())
    for sampler in script.SAMPLERS:
        ways = table[sampler]["behavior"]
        assert len(ways["successes_by_mode"]) == 2
        assert 0 <= ways["paper_entropy"] <= 1


def test_evaluation_on_another_task(tmp_path):
    """Of the same shapes; another one is refused."""
    folder = tmp_path / "run"
    long = ["--env-id", "probe_envs:Late-v0"]
    train(folder, env=long)
    assert "length 2.00" in run("--evaluate", folder).out
    out = run("--evaluate", folder, "--eval-env-id", "probe_envs:One-v0").out
    assert "length 1.00" in out
    flags = [*TINY, *long, "--eval-env-id", "two_doors:TwoDoors-v0", "--run-dir", tmp_path / "no"]
    err = run(*flags, code=2).err
    assert "TwoDoors-v0 has other observations or actions than probe_envs:Late-v0" in err


@pytest.mark.slow
def test_the_picture(tmp_path, capsys):
    for script in (trudi, reppo):
        train(tmp_path / script.SCRIPT, env=DOORS, script=script)
    runs = [str(tmp_path / script.SCRIPT) for script in (trudi, reppo)]
    plot_modes.main([*runs, "--out", str(tmp_path / "doors.png"), "--episodes", "40"])
    assert (tmp_path / "doors.png").stat().st_size > 5_000
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(": ")[1].split()[0] for line in lines] == ["TruDi", "REPPO"]
    for line in lines:
        *counts, total = [int(word) for word in line.replace(",", "").split() if word.isdigit()]
        assert sum(counts) == total == 40


def test_table_of_ways(tmp_path):
    """Entropies and returns of the run's own sampler; undefined ones are not averaged."""

    def write(folder, counts, entropy, **settings):
        folder.mkdir(parents=True)
        (folder / "args.json").write_text(json.dumps({"eval_sampler": "ode"} | settings))
        ways = {"successes_by_mode": counts, "entropy": entropy, "paper_entropy": 0.5}
        table = {"ode": {"mean": float(sum(counts)), "behavior": ways}, "sde": {}}
        (folder / "eval.json").write_text(json.dumps(table))

    write(tmp_path / "trudi/a_1", [10, 30], 0.8)
    write(tmp_path / "trudi/a_2", [20, 22], 1.0)
    write(tmp_path / "reppo/a_1", [3, 0], None)
    (tmp_path / "ppo").mkdir()  # nothing has finished
    rows = plot_modes.mode_table(tmp_path).splitlines()[2:]
    assert rows == [
        "| REPPO | 1 | 3.0 | 3 : 0 | - | - |",
        "| TruDi | 2 | 41.0 | 10 : 30, 20 : 22 | 0.80, 1.00 | 0.90 |",
    ]
