"""Runs that go on: what --resume restores, signals, kills, torn files. And that seeds reproduce.

A resumed run is not the uninterrupted one: its environments start new episodes, seeded by the
run's seed and step. All else goes on from where it was.
"""

import fcntl
import json
import re
import shutil
import signal
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
from run_helpers import (
    BATCH,
    CLOCK,
    SAMPLERS,
    TINY,
    assert_same_run,
    assert_same_state,
    every_script_slowly,
    files,
    load,
    one_script_and_more,
    ppo,
    really_every_script_slowly,
    reppo,
    rows,
    run,
    short_cartpole,
    start,
    steps,
    timeless,
    train,
    trudi,
    wait_for,
)

from tools import extras

CARTPOLE = ["--env-id", "CartpoleBalance-v1"]  # by EnvPool


@pytest.fixture(scope="module", autouse=True)
def short_episodes():
    with short_cartpole():
        yield


@pytest.fixture(scope="module")
def clock(tmp_path_factory):
    """A finished run of TruDi; tests that change it take a copy."""
    folder = tmp_path_factory.mktemp("clock") / "run"
    train(folder, iterations=4)
    return folder


def row_steps(last_iteration):
    return list(range(BATCH, last_iteration * BATCH + 1, BATCH))


# --- seeds ---


@one_script_and_more
def test_seeds_reproduce(script, tmp_path):
    one = tmp_path / "one"
    same = tmp_path / "same"
    other = tmp_path / "other"
    train(one, iterations=3, script=script)
    train(same, iterations=3, script=script)
    train(other, "--seed", 2, iterations=3, script=script)
    assert_same_run(one, same)
    names = ("losses/critic", "losses/value", "policy/kl", "losses/flow")
    own = [name for name in rows(one)[0] if name in names]
    assert len(own) == 2
    for ours, theirs in zip(timeless(one), timeless(other), strict=True):
        for name in ("charts/episode_return", *own):
            assert ours[name] != theirs[name]


@pytest.mark.slow
def test_seeds_reproduce_on_envpool(tmp_path):
    env = ["--env-id", "InvertedPendulum-v5"]  # terminates within a few steps
    for name, seed in {"one": 1, "same": 1, "other": 2}.items():
        train(tmp_path / name, "--seed", seed, env=env)
    assert_same_run(tmp_path / "one", tmp_path / "same")
    assert timeless(tmp_path / "one") != timeless(tmp_path / "other")


# --- what is restored ---


@really_every_script_slowly
def test_all_is_restored(script, tmp_path):
    """Nothing is left to train, so the checkpoint is what was restored, written again."""
    folder = tmp_path / "run"
    train(folder, iterations=3, script=script)
    before = load(folder)
    progress = before["progress"]
    assert progress["step"] == 3 * BATCH and np.isfinite(progress["best_return"])
    assert before["agent"]["policy.normalizer.count"] > 3 * BATCH - 1
    assert len(before["optimizers"]) == (2 if script in (trudi, reppo) else 1)
    inode = (folder / "checkpoint.pt").stat().st_ino
    shown = run("--resume", folder, script=script).out
    assert (folder / "checkpoint.pt").stat().st_ino != inode
    after = load(folder)
    assert "discounted_return" not in after["agent"], "interrupted episodes start again"
    assert_same_state(before, after)
    assert after["progress"]["elapsed"] == progress["elapsed"]
    assert steps(folder) == row_steps(3)
    assert "start again" in shown


@every_script_slowly
def test_training_begins_where_it_ended(script, tmp_path, monkeypatch):
    """The first rollout after a restart sees the weights and the noise of before."""
    folder = tmp_path / "run"
    train(folder, script=script)
    saved = load(folder)
    seen = {}
    rollout = script.rollout

    def watched(agent, envs, obs, args, generator):
        if not seen:
            seen["agent"] = {name: value.clone() for name, value in agent.state_dict().items()}
            seen["generator"] = generator.get_state().clone()
        return rollout(agent, envs, obs, args, generator)

    monkeypatch.setattr(script, "rollout", watched)
    run("--resume", folder, "--total-timesteps", 3 * BATCH, script=script)
    for name, value in saved["agent"].items():
        assert torch.equal(seen["agent"][name], value), name
    assert torch.equal(seen["generator"], saved["generator"])
    assert steps(folder) == row_steps(3)


@every_script_slowly
def test_environments_are_seeded_by_seed_and_step(script, tmp_path, monkeypatch):
    seeds = []
    make_envs = script.make_envs

    def watched(args, num_envs, seed, **kwargs):
        seeds.append((num_envs, seed))
        return make_envs(args, num_envs, seed, **kwargs)

    monkeypatch.setattr(script, "make_envs", watched)
    folder = tmp_path / "run"
    train(folder, "--seed", 3, iterations=1, script=script)
    first = list(seeds)
    seeds.clear()
    run("--resume", folder, "--total-timesteps", 2 * BATCH, script=script)
    training = 3 * 10_007
    assert first[:2] == [(2, training + 5_000), (4, training)]
    assert seeds[:2] == [(2, training + 5_000 + BATCH), (4, training + BATCH)]
    assert first[2:] == seeds[2:] == [(2, training + 5_000)] * len(SAMPLERS[script])


@pytest.mark.parametrize(
    "script, env",
    [
        pytest.param(trudi, CLOCK, id="trudi-Clock"),
        pytest.param(trudi, CARTPOLE, id="trudi-Cartpole", marks=pytest.mark.slow),
        pytest.param(reppo, CLOCK, id="reppo-Clock", marks=pytest.mark.slow),
        pytest.param(reppo, CARTPOLE, id="reppo-Cartpole", marks=pytest.mark.slow),
        pytest.param(ppo, CLOCK, id="ppo-Clock", marks=pytest.mark.slow),
        pytest.param(ppo, CARTPOLE, id="ppo-Cartpole", marks=pytest.mark.slow),
    ],
)
def test_two_resumes_of_the_same_folder_are_equal(script, env, tmp_path):
    """To the bit. Rows before the restart stay, those after it are new ones."""
    one = tmp_path / "one"
    train(one, env=env, script=script)
    before = timeless(one)
    two = shutil.copytree(one, tmp_path / "two")
    for folder in (one, two):
        run("--resume", folder, "--total-timesteps", 4 * BATCH, script=script)
    assert_same_run(one, two)
    assert steps(one) == row_steps(4) and timeless(one)[:2] == before
    assert len({json.dumps(row) for row in timeless(one)}) == 4


@really_every_script_slowly
def test_resume_with_more_steps_then_evaluate(script, tmp_path):
    folder = tmp_path / "run"
    train(folder, "--eval-points", 1, script=script)
    before = timeless(folder)
    elapsed = load(folder)["progress"]["elapsed"]
    run("--resume", folder, "--total-timesteps", 4 * BATCH, script=script)
    assert steps(folder) == row_steps(4) and timeless(folder)[:2] == before
    assert load(folder)["progress"]["step"] == 4 * BATCH
    assert load(folder)["progress"]["elapsed"] > elapsed
    times = [float(row["time/elapsed"]) for row in rows(folder)]
    assert times == sorted(times)
    before = files(folder)
    run("--evaluate", folder / "best.pt", script=script)  # its settings name a folder to resume
    after = files(folder)
    assert list(json.loads(after.pop("eval_best.json"))) == SAMPLERS[script]
    assert after == before


def test_the_best_score_survives(clock, tmp_path):
    """A worse score after a restart does not replace the best checkpoint."""
    folder = shutil.copytree(clock, tmp_path / "run")
    checkpoint = load(folder)
    checkpoint["progress"]["best_return"] = 1e6
    torch.save(checkpoint, folder / "checkpoint.pt")
    best = (folder / "best.pt").read_bytes()
    run("--resume", folder, "--total-timesteps", 6 * BATCH)
    assert rows(folder)[-1]["eval/return"]
    assert (folder / "best.pt").read_bytes() == best
    assert load(folder)["progress"]["best_return"] == 1e6


def test_resume_from_an_earlier_checkpoint(clock, tmp_path):
    """In its own folder it would overwrite what came later. As a copy it is a run of its own."""
    folder = shutil.copytree(clock, tmp_path / "run")
    before = files(folder)
    err = run("--resume", folder / "best.pt", code=2).err
    assert err.count("\n") == 1 and "checkpoint.pt" in err and "cp " in err
    assert files(folder) == before
    branch = tmp_path / "branch"
    branch.mkdir()
    checkpoint = load(folder / "best.pt")
    checkpoint["progress"]["step"] = 2 * BATCH
    torch.save(checkpoint, branch / "checkpoint.pt")
    run("--resume", branch)
    assert files(folder) == before
    assert steps(branch) == [3 * BATCH, 4 * BATCH]


def test_resume_with_fewer_steps_than_done(clock, tmp_path):
    folder = shutil.copytree(clock, tmp_path / "run")
    before = files(folder)
    err = run("--resume", folder, "--total-timesteps", 3 * BATCH, code=2).err
    assert err.count("\n") == 1 and str(4 * BATCH) in err
    assert files(folder) == before


def test_two_resumes_of_one_folder(clock, tmp_path):
    folder = shutil.copytree(clock, tmp_path / "run")
    before = files(folder)
    with (folder / "args.json").open() as locked:  # as by another process
        fcntl.flock(locked, fcntl.LOCK_EX)
        err = run("--resume", folder, "--total-timesteps", 6 * BATCH, code=2).err
        assert err.count("\n") == 1 and "another run" in err and str(folder) in err
        assert files(folder) == before
    run("--resume", folder, "--total-timesteps", 6 * BATCH)
    assert steps(folder) == row_steps(6)


def test_settings_that_may_change(clock, tmp_path):
    folder = shutil.copytree(clock, tmp_path / "run")
    flags = ["--total-timesteps", 5 * BATCH, "--eval-episodes", 3, "--eval-sampler", "sde"]
    run("--resume", folder, *flags)
    about = json.loads((folder / "args.json").read_text())
    assert (about["eval_episodes"], about["eval_sampler"], about["num_envs"]) == (3, "sde", 4)
    table = json.loads((folder / "eval.json").read_text())
    assert len(table["ode"]["returns"]) == 3


# --- interruptions ---


@pytest.mark.slow
@pytest.mark.parametrize(
    "script, number",
    [
        pytest.param(trudi, signal.SIGTERM, id="trudi-SIGTERM"),
        pytest.param(trudi, signal.SIGINT, id="trudi-SIGINT"),
        pytest.param(reppo, signal.SIGTERM, id="reppo-SIGTERM"),
        pytest.param(ppo, signal.SIGTERM, id="ppo-SIGTERM"),
    ],
)
def test_signals_save_and_the_run_goes_on(script, number, tmp_path):
    folder = tmp_path / "run"
    total = ["--total-timesteps", 10_000 * BATCH]
    process = start(*TINY, *CLOCK, "--run-dir", folder, *total, script=script)
    wait_for(lambda: len(steps(folder)) >= 2, process)
    process.send_signal(number)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 128 + number and "Traceback" not in err
    assert re.search(rf"^.*{number.name}.*--resume {folder}$", out, re.M)
    reached = steps(folder)[-1]
    assert load(folder)["progress"]["step"] == reached < 10_000 * BATCH
    assert not (folder / "eval.json").exists(), "eval.json says that a run is finished"
    before = timeless(folder)
    twin = shutil.copytree(folder, tmp_path / "twin")
    for run_dir in (folder, twin):
        run("--resume", run_dir, "--total-timesteps", reached + 2 * BATCH, script=script)
    assert_same_run(folder, twin)
    assert steps(folder) == row_steps(reached // BATCH + 2)
    assert timeless(folder)[:-2] == before
    assert (folder / "eval.json").exists()


def test_a_signal_during_an_iteration_ends_it_first(tmp_path, monkeypatch):
    rollout = trudi.rollout
    calls = []

    def interrupted(*inputs):
        calls.append(1)
        if len(calls) == 2:
            signal.raise_signal(signal.SIGTERM)
        return rollout(*inputs)

    monkeypatch.setattr(trudi, "rollout", interrupted)
    folder = tmp_path / "run"
    flags = [*TINY, *CLOCK, "--run-dir", folder, "--total-timesteps", 8 * BATCH]
    out, err = run(*flags, code=128 + signal.SIGTERM)
    assert steps(folder) == row_steps(2) and load(folder)["progress"]["step"] == 2 * BATCH
    assert f"--resume {folder}" in out and err == ""


def test_a_run_that_goes_on_is_not_finished(clock, tmp_path, monkeypatch):
    """eval.json of its first end would say so."""
    folder = shutil.copytree(clock, tmp_path / "run")
    rollout = trudi.rollout

    def interrupted(*inputs):
        signal.raise_signal(signal.SIGINT)
        return rollout(*inputs)

    monkeypatch.setattr(trudi, "rollout", interrupted)
    run("--resume", folder, "--total-timesteps", 8 * BATCH, code=128 + signal.SIGINT)
    assert steps(folder) == row_steps(5) and not (folder / "eval.json").exists()
    monkeypatch.undo()
    run("--resume", folder)
    assert steps(folder) == row_steps(8) and (folder / "eval.json").exists()


@pytest.mark.slow
def test_kill_leaves_a_loadable_checkpoint(tmp_path):
    """SIGKILL at random moments of a run that saves at each iteration; then it ends well."""
    folder = tmp_path / "run"
    moments = np.random.default_rng(int(time.time()))
    num_iterations = 20_000
    flags = [*TINY, *CLOCK, "--run-dir", folder]
    flags += ["--total-timesteps", num_iterations * BATCH, "--eval-points", num_iterations]
    reached = 0
    for _ in range(3):
        process = start(*flags)

        def goes_on(step=reached):
            """Reads while the run writes: a checkpoint must be whole at any moment."""
            path = folder / "checkpoint.pt"
            return path.exists() and load(folder)["progress"]["step"] > step

        wait_for(goes_on, process)
        time.sleep(moments.uniform(0, 0.4))
        process.kill()
        process.communicate()
        saved = load(folder)
        assert saved["progress"]["step"] > reached
        assert all(values.isfinite().all() for values in saved["agent"].values())
        reached = saved["progress"]["step"]
        flags = ["--resume", folder]
    total = reached + 2 * BATCH
    run("--resume", folder, "--total-timesteps", total, "--eval-points", 1)
    assert steps(folder) == row_steps(total // BATCH)
    assert (folder / "eval.json").exists()


def test_a_run_that_ended_before_its_first_checkpoint_can_start_again(tmp_path, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "save", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "run")
    monkeypatch.undo()
    train(tmp_path / "run")
    assert steps(tmp_path / "run") == row_steps(2)


@pytest.mark.parametrize("torn", ["320,1.5,0.0,", "3", "320,1.5\n384,"])
def test_a_torn_last_row_is_repaired(torn, clock, tmp_path):
    """As a kill in the middle of a write leaves it."""
    folder = shutil.copytree(clock, tmp_path / "run")
    with (folder / "metrics.csv").open("a") as file:
        file.write(torn)
    run("--resume", folder, "--total-timesteps", 6 * BATCH)
    assert steps(folder) == row_steps(6) and None not in rows(folder)[4]
    assert timeless(folder)[:4] == timeless(clock)


@pytest.mark.parametrize("torn", ["", "global_step,time/ela"])
def test_a_torn_header_is_repaired(torn, clock, tmp_path):
    """A kill between the first open and the first write leaves an empty file."""
    folder = shutil.copytree(clock, tmp_path / "run")
    (folder / "metrics.csv").write_text(torn)
    run("--resume", folder, "--total-timesteps", 5 * BATCH)
    assert steps(folder) == [5 * BATCH] and list(rows(folder)[0]) == list(rows(clock)[0])


def test_a_lost_table_starts_again(clock, tmp_path):
    folder = shutil.copytree(clock, tmp_path / "run")
    (folder / "metrics.csv").unlink()
    run("--resume", folder, "--total-timesteps", 5 * BATCH)
    assert steps(folder) == [5 * BATCH]


def test_a_kill_during_the_repair_loses_no_rows(clock, tmp_path, monkeypatch):
    """The table is written beside and moved into place."""
    folder = shutil.copytree(clock, tmp_path / "run")
    before = (folder / "metrics.csv").read_bytes()
    write_text = Path.write_text

    def killed(path, text):
        write_text(path, text[: len(text) // 2])
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", killed)
    with pytest.raises(KeyboardInterrupt):
        extras.drop_rows_after(folder / "metrics.csv", 2 * BATCH)
    assert (folder / "metrics.csv").read_bytes() == before


def test_graphs_may_be_switched_on_at_resume_and_are_not_for_evaluation(monkeypatch):
    agent = torch.nn.Linear(2, 3)
    optimizer = torch.optim.Adam(agent.parameters())
    generator = torch.Generator()
    checkpoint = {
        "agent": agent.state_dict(),
        "optimizers": [optimizer.state_dict()],
        "generator": generator.get_state(),
        "progress": {"step": 0},
        "args": asdict(trudi.Args(device="cuda", backend="envpool", cudagraphs=True)),
    }
    args = trudi.Args(cudagraphs=True)
    trudi.restore(checkpoint, args, agent, [optimizer], generator)
    assert all(group["capturable"] for group in optimizer.param_groups)

    monkeypatch.setattr(trudi, "load_checkpoint", lambda given: checkpoint)
    args, _ = trudi.parse_args(["--evaluate", "best.pt", "--device", "cpu"])
    assert not args.cudagraphs
