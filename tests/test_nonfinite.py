"""Numbers that are not finite: of a simulator that breaks, of parameters that have diverged."""

import math
import re

import torch
from run_helpers import (
    BATCH,
    CLOCK,
    TINY,
    every_script_slowly,
    leaves,
    load,
    one_script_and_more,
    really_every_script_slowly,
    rows,
    run,
    steps,
    train,
)


def broken_steps(folder):
    return [int(row["charts/nonfinite"]) for row in rows(folder)]


def assert_finite(folder, unknown=()):
    """All that was logged is finite, and the algorithm's metrics are in each row."""
    for row in rows(folder):
        assert all(math.isfinite(float(value)) for value in row.values() if value)
        own = [name for name in row if name.startswith(("losses/", "policy/"))]
        assert all(row[name] for name in own if name not in unknown)
    for value in leaves(load(folder)["agent"]).values():
        assert value.isfinite().all()


@really_every_script_slowly
def test_training_survives_a_simulator_that_breaks(script, tmp_path):
    folder = tmp_path / "run"
    train(folder, env=["--env-id", "probe_envs:Faulty-v0"], iterations=6, script=script)
    broken = broken_steps(folder)
    assert 0 < broken[0] < broken[-1] and broken == sorted(broken)
    assert_finite(folder)
    lengths = {row["charts/episode_length"] for row in rows(folder)}
    assert lengths <= {"", "16.0"}, "a broken episode is no result"
    run("--resume", folder, "--total-timesteps", 8 * BATCH, script=script)
    assert broken_steps(folder)[:6] == broken
    assert broken_steps(folder)[6] >= broken[-1], "the count goes on"


@every_script_slowly
def test_training_survives_bad_starts(script, tmp_path):
    """Half of the episodes start at an infinite observation."""
    folder = tmp_path / "run"
    train(folder, env=["--env-id", "probe_envs:BadStart-v0"], script=script)
    assert_finite(folder)


@every_script_slowly
def test_training_survives_a_simulator_that_never_works(script, tmp_path):
    folder = tmp_path / "run"
    train(folder, env=["--env-id", "probe_envs:Hopeless-v0"], script=script)
    assert broken_steps(folder) == [BATCH, 2 * BATCH]
    # PPO cannot explain the variance of targets that are all equal
    assert_finite(folder, unknown=["losses/explained_variance"])
    for row in rows(folder):
        assert row["charts/episode_return"] == "" and float(row["eval/return"]) == 0


@every_script_slowly
def test_nonfinite_parameters_stop_the_run(script, monkeypatch, tmp_path):
    rollout = script.rollout
    calls = []

    def poisoned(agent, *inputs):
        calls.append(1)
        if len(calls) == 3:
            *_, last = agent.parameters()
            last.data.view(-1)[0] = math.nan
        return rollout(agent, *inputs)

    monkeypatch.setattr(script, "rollout", poisoned)
    folder = tmp_path / "run"
    flags = [*TINY, *CLOCK, "--run-dir", folder]
    flags += ["--total-timesteps", 6 * BATCH, "--eval-points", 3]
    err = run(*flags, script=script, code=1).err
    assert err.count("\n") == 1 and err.startswith("error: ")
    assert "non-finite" in err and "checkpoint.pt" in err
    monkeypatch.undo()

    saved = load(folder)
    assert saved["progress"]["step"] == 2 * BATCH and steps(folder) == [BATCH, 2 * BATCH]
    for value in leaves(saved).values():
        if isinstance(value, torch.Tensor):
            assert value.isfinite().all()
    run("--resume", folder, script=script)
    assert steps(folder) == [BATCH, 2 * BATCH, 3 * BATCH, 4 * BATCH, 5 * BATCH, 6 * BATCH]


@one_script_and_more
def test_progress_before_a_first_episode_ended(script, tmp_path):
    env = ["--env-id", "Pendulum-v1"]  # 200 steps an episode
    out = train(tmp_path / "run", iterations=1, env=env, script=script).out
    line = next(line for line in out.splitlines() if " steps/s " in line)
    assert re.search(r" return -  eval -\d+\.\d  ", line) and "nan" not in line
    assert rows(tmp_path / "run")[0]["charts/episode_return"] == ""
