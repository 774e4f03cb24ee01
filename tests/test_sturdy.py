"""What a hostile user or a bad day does to a run: nothing hangs, nothing mixes, nothing is lost."""

import errno
import json
import os
import re
import signal
import time
from pathlib import Path

import pytest
import torch
from run_helpers import (
    BATCH,
    CLOCK,
    TINY,
    every_script,
    every_script_slowly,
    files,
    load,
    one_script_and_more,
    run,
    start,
    steps,
    train,
    trudi,
    wait_for,
)


# --- evaluation always ends ---
@every_script_slowly
@pytest.mark.parametrize("env_id", ["NoReward-v0", "Hopeless-v0"])
def test_every_episode_breaks(script, env_id, tmp_path):
    folder = tmp_path / "run"
    out = train(folder, env=["--env-id", f"probe_envs:{env_id}"], script=script).out
    table = json.loads((folder / "eval.json").read_text())
    assert {result["broken"] for result in table.values()} == {2}
    assert "2 ended by a non-finite step" in out
    assert "100% of this iteration's steps were non-finite" in out


@every_script
def test_weights_of_nan_are_evaluated_in_finite_time(script, tmp_path):
    folder = tmp_path / "run"
    train(folder, script=script)
    checkpoint = load(folder)
    for value in checkpoint["agent"].values():
        if value.is_floating_point():
            value.fill_(torch.nan)
    torch.save(checkpoint, folder / "policy.pt")
    run("--evaluate", folder / "policy.pt", script=script)
    table = json.loads((folder / "eval_policy.json").read_text())
    assert all(result["broken"] == 2 for result in table.values())


class Endless:
    """Environments whose episodes never end."""

    num_envs = 2
    device = torch.device("cpu")

    def __init__(self):
        self.num_steps = 0

    def reset(self):
        return torch.zeros(2, 4)

    def step(self, action):
        self.num_steps += 1
        return torch.zeros(2, 4), None

    def pop_finished(self):
        return []


def test_evaluation_is_bounded(tmp_path, monkeypatch):
    train(tmp_path / "run")
    checkpoint = load(tmp_path / "run")
    args = trudi.Args(**checkpoint["args"])
    envs = trudi.make_envs(args, 2, seed=0)
    agent = trudi.Agent(envs, args)
    monkeypatch.setattr(trudi, "MAX_EPISODE_STEPS", 50)
    endless = Endless()
    assert trudi.evaluate(agent, endless, "ode", args) == []
    assert endless.num_steps == 50


def interrupt_at(monkeypatch, script, call, number):
    """The signal arrives in the middle of this call of evaluate's."""
    act = script.act
    calls = []

    def interrupted(*inputs):
        calls.append(1)
        if len(calls) == call:
            signal.raise_signal(number)
        return act(*inputs)

    monkeypatch.setattr(script, "act", interrupted)
    return calls


@every_script
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP], ids=lambda n: n.name)
def test_a_signal_in_an_evaluation(script, number, tmp_path, monkeypatch):
    """It ends the evaluation, and the iteration is saved."""
    folder = tmp_path / "run"
    calls = interrupt_at(monkeypatch, script, 5, number)
    flags = [*TINY, *CLOCK, "--run-dir", folder, "--total-timesteps", 8 * BATCH]
    out = run(*flags, code=128 + number, script=script).out
    assert len(calls) == 5, "an episode has 16 steps"
    assert f"stopped by {number.name}" in out
    assert load(folder)["progress"]["step"] == steps(folder)[-1] == 4 * BATCH
    monkeypatch.undo()
    run("--resume", folder, script=script)
    assert steps(folder) == [(i + 1) * BATCH for i in range(8)]


@every_script
def test_a_signal_in_the_final_table(script, tmp_path, monkeypatch):
    folder = tmp_path / "run"
    interrupt_at(monkeypatch, script, 2 * 16 + 5, signal.SIGINT)  # after two evaluations
    flags = [*TINY, *CLOCK, "--run-dir", folder, "--total-timesteps", 2 * BATCH]
    out = run(*flags, code=128 + signal.SIGINT, script=script).out
    assert f"--resume {folder}" in out and not (folder / "eval.json").exists()
    monkeypatch.undo()
    run("--resume", folder, script=script)
    assert (folder / "eval.json").exists() and steps(folder) == [BATCH, 2 * BATCH]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP], ids=lambda n: n.name)
def test_a_signal_is_acknowledged_at_once(number, tmp_path):
    folder = tmp_path / "run"
    process = start(*TINY, *CLOCK, "--run-dir", folder, "--total-timesteps", 10**6 * BATCH)
    wait_for(lambda: len(steps(folder)) >= 2, process)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert f"{number.name}: stopping after this iteration" in err and "Traceback" not in err


@one_script_and_more
def test_a_closed_pipe(script, tmp_path):
    """As by `| head -1`: a checkpoint, no traceback, no words."""
    folder = tmp_path / "run"
    total = ["--total-timesteps", 10**6 * BATCH, "--eval-points", 10**6]
    process = start(*TINY, *CLOCK, *total, "--run-dir", folder, script=script)
    process.stdout.readline()
    process.stdout.close()
    err = process.stderr.read()
    process.wait(timeout=60)
    assert process.returncode == 128 + signal.SIGPIPE
    assert err == ""
    assert load(folder)["progress"]["step"] == steps(folder)[-1]


# --- folders ---
def test_two_runs_in_the_same_second(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(os.path.dirname(__file__))
    monkeypatch.setattr(time, "strftime", lambda _: "20261117-120000")
    for _ in range(3):
        run(*TINY, *CLOCK)
    folders = sorted((tmp_path / "runs").iterdir())
    assert len(folders) == 3
    assert folders[1].name == f"{folders[0].name}-2"
    assert all(steps(folder) == [BATCH] for folder in folders)


@pytest.mark.slow
def test_two_processes_in_one_folder(tmp_path):
    folder = tmp_path / "run"
    flags = [*TINY, *CLOCK, "--run-dir", folder, "--total-timesteps", 10**6 * BATCH]
    first = start(*flags)
    wait_for(lambda: len(steps(folder)) >= 2, first)
    second = start("--resume", folder)
    _, err = second.communicate(timeout=60)
    assert second.returncode == 2 and "another run" in err and err.count("\n") == 1
    first.kill()
    first.communicate()
    run("--resume", folder, "--total-timesteps", steps(folder)[-1] + BATCH)  # the lock died with it


# --- full disks and flipped bytes ---
@every_script
def test_a_disk_that_is_full_at_a_checkpoint(script, tmp_path, monkeypatch):
    folder = tmp_path / "run"
    save = torch.save
    calls = []

    def full(state, path):
        calls.append(1)
        if len(calls) >= 3:
            path.write_bytes(b"half of it")
            raise RuntimeError("[enforce fail at inline_container.cc:668] . unexpected pos 64 vs 0")
        save(state, path)

    monkeypatch.setattr(torch, "save", full)
    flags = [*TINY, *CLOCK, "--run-dir", folder, "--total-timesteps", 8 * BATCH]
    err = run(*flags, code=1, script=script).err
    assert err.count("\n") == 1 and "disk" in err and "Traceback" not in err
    assert not list(folder.glob("*.tmp"))
    load(folder)  # the one before is whole


def test_a_disk_that_is_full_at_a_row(tmp_path, monkeypatch):
    folder = tmp_path / "run"
    open_path = Path.open

    def full(path, *mode, **kwargs):
        if path.name == "metrics.csv" and mode == ("a",):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return open_path(path, *mode, **kwargs)

    monkeypatch.setattr(Path, "open", full)
    err = run(*TINY, *CLOCK, "--run-dir", folder, code=1).err
    assert err.count("\n") == 1 and "metrics.csv" in err and "No space left" in err
    load(folder)


@every_script
def test_flipped_bytes_are_noticed(script, tmp_path):
    """In every tensor of the checkpoint. What lies between them is padding."""
    folder = tmp_path / "run"
    train(folder, script=script)
    path = folder / "checkpoint.pt"
    whole = path.read_bytes()
    tensors = [value for value in load(folder)["agent"].values() if value.numel() >= 16]
    assert len(tensors) > 5
    for tensor in tensors:
        content = tensor.numpy().tobytes()
        middle = whole.index(content) + len(content) // 2 - 8
        damaged = bytearray(whole)
        for i in range(middle, middle + 16):
            damaged[i] ^= 0xFF
        path.write_bytes(damaged)
        err = run("--evaluate", folder, code=2, script=script).err
        assert err.count("\n") == 1 and "damaged" in err
    path.write_bytes(whole)
    run("--evaluate", folder, script=script)


# --- the rest ---
def test_metrics_are_rewritten_atomically(tmp_path, monkeypatch):
    """A kill while --resume drops later rows leaves all rows or those that are kept."""
    folder = tmp_path / "run"
    train(folder, iterations=4)
    before = files(folder)
    replaced = []
    monkeypatch.setattr(os, "replace", lambda a, b: replaced.append((a, b)))
    from tools import extras

    extras.drop_rows_after(folder / "metrics.csv", 2 * BATCH)
    assert (folder / "metrics.csv").read_bytes() == before["metrics.csv"]
    assert len(replaced) == 1 and replaced[0][1].name == "metrics.csv"


def test_envpool_without_threads(monkeypatch):
    """It says "Resource temporarily unavailable" where a process may have no more of them."""
    envpool = pytest.importorskip("envpool")

    def fail(*_, **__):
        raise RuntimeError("Resource temporarily unavailable")

    monkeypatch.setattr(envpool, "make_gymnasium", fail)
    err = run("--env-id", "CheetahRun-v1", code=2).err
    assert err.count("\n") == 1 and "Resource temporarily unavailable" in err
    assert "closest" not in err, "the id is not what is wrong"


@pytest.mark.parametrize("env_id", ["Pong-v5", "CartPole-v1", "LunarLander-v3"])
def test_an_id_never_suggests_itself(env_id):
    err = run("--env-id", env_id, code=2).err
    sentence, _, suggested = err.partition("closest known ids:")
    assert env_id in sentence and env_id not in suggested.replace(",", "").split()


def test_track_without_a_login(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path))
    err = run(*TINY, *CLOCK, "--run-dir", tmp_path / "run", "--track", code=2).err
    assert "wandb login" in err.splitlines()[-1]
    assert not (tmp_path / "run" / "checkpoint.pt").exists()


@every_script
def test_help_fits_a_terminal(script):
    """In the groups of Args, with an example of each way to start."""
    out = run("--help", script=script).out
    assert max(len(line) for line in out.splitlines()) <= 100
    assert f"python {script.SCRIPT}.py --resume" in out
    words = " ".join(out.split())
    assert words.count("default: None") == len(re.findall(r"; None: .*? \(default: None", words))
    headings = [line for line in out.splitlines() if re.fullmatch(r"\w[\w ]*:", line)]
    assert headings[:2] == ["run:", "rollout and optimization:"] and headings[-1] == "evaluation:"
