"""The ManiSkill scripts. Without a GPU the batched CPU simulation takes its place: the same tensors, partial resets and
masks. A stand-in env with scripted successes and faults shows what each row must become."""

import contextlib
import csv
import importlib
import io
import json
import math
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("mani_skill")
import ppo_maniskill as ppo  # noqa: E402
import reppo_maniskill as reppo  # noqa: E402
import trudi_maniskill as trudi  # noqa: E402

ROOT = Path(__file__).parents[1]
SCRIPTS = [trudi, reppo, ppo]
TINY = "--num-envs 3 --num-steps 50 --num-minibatches 2 --update-epochs 1 --hidden-size 16".split()
TINY += "--eval-points 2 --eval-episodes 2 --total-timesteps 300".split()
LIMITS = dict(PickCube=50, StackCube=50, PokeCube=50, PullCube=50, PushCube=50, RollBall=80, LiftPegUpright=50)
LIMITS |= dict(PlaceSphere=50, PlugCharger=200, PushT=100, PullCubeTool=100, TwoRobotPickCube=100)
LIMITS |= dict(TwoRobotStackCube=100, PegInsertionSide=100)
every_script = pytest.mark.parametrize("script", SCRIPTS, ids=lambda s: s.SCRIPT)


def run(*flags, code=0, script=trudi):
    """main(flags) in this process -> out, err"""
    out, err = io.StringIO(), io.StringIO()
    handlers = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            script.main([*map(str, flags)])
        got = 0
    except SystemExit as e:
        got = e.code
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert got == code, (got, err.getvalue())
    return SimpleNamespace(out=out.getvalue(), err=err.getvalue())


def make(env_id="PushCube-v1", num_envs=3, seed=5, **kwargs):
    return trudi.VecEnv("physx_cpu_batched", env_id, num_envs, seed, torch.device("cpu"), **kwargs)


def noise(envs, steps, seed=0):
    return torch.rand(steps, envs.num_envs, envs.action_dim, generator=torch.Generator().manual_seed(seed)) * 2 - 1


def play(envs, actions):
    """-> obs, reward, terminated, truncated, final_obs, valid, each (T, E, ...)"""
    return [torch.stack(x) for x in zip(*[(*envs.step(a), envs.valid) for a in actions], strict=True)]


def finished(envs):
    return [episode for block in envs.finished for episode in block.tolist()]


class Scripted(gym.Env):
    """Speaks as ManiSkill's batched envs do. obs: env, step of its episode, episode. `success` and `broken` hold
    (env, step, episode): there the task succeeds, or the simulator returns NaN."""

    def __init__(self, num_envs, limit=5, success=(), broken=()):
        self.num_envs, self.limit, self.device = num_envs, limit, torch.device("cpu")
        self.events = dict(success=set(success), broken=set(broken))
        self.clock, self.episode = torch.zeros(2, num_envs)
        self.single_action_space = gym.spaces.Box(np.float32([-1, 0]), np.float32([1, 4]))
        self.action_space, self.resets, self.actions = self.single_action_space, [], []

    def obs(self):
        return torch.stack([torch.arange(self.num_envs), self.clock, self.episode], 1)

    def at(self, event):
        return torch.tensor([tuple(x) in self.events[event] for x in self.obs().int().tolist()])

    def reset(self, seed=None, options=None):
        index = options["env_idx"]
        self.resets.append((seed, index.tolist()))
        self.clock[index], self.episode[index] = 0, self.episode[index] + 1
        return self.obs(), {}

    def step(self, action):
        self.actions.append(action)
        self.clock += 1
        obs, success = self.obs(), self.at("success")
        obs[self.at("broken"), 1] = math.nan
        reward = 10 * torch.arange(self.num_envs) + self.clock
        return obs, reward, success, self.clock >= self.limit, dict(success=success)


def scripted(monkeypatch, num_envs=3, stagger=1, **kwargs):
    env = Scripted(num_envs, **kwargs)
    monkeypatch.setattr(gym, "make", lambda *a, **k: env)
    return trudi.VecEnv("physx_cuda", "PushCube-v1", num_envs, 7, torch.device("cpu"), stagger=stagger), env


# --- the environment contract


def test_contract_with_a_time_limit():
    envs = make()
    obs, reward, terminated, truncated, final_obs, valid = play(envs, noise(envs, 103))
    assert obs.shape == final_obs.shape == (103, 3, envs.actor_dim) and reward.shape == (103, 3) and valid.all()
    assert {x.dtype for x in (obs, reward, final_obs)} == {torch.float32} and truncated.dtype == torch.bool
    at_limit = (torch.arange(103) + 1) % 50 == 0
    assert (truncated == at_limit[:, None]).all() and not terminated.any()
    assert (final_obs[at_limit] != obs[at_limit]).any(-1).all(), "final_obs must not be the reset observation"
    assert (final_obs[~at_limit] == obs[~at_limit]).all()
    assert [e[:1] + e[2:] for e in finished(envs)] == [[i, 50, 0, 0] for _ in range(2) for i in range(3)]
    returns = [e[1] for e in finished(envs)]
    assert returns == pytest.approx([*reward[:50].sum(0).tolist(), *reward[50:100].sum(0).tolist()], rel=1e-5)


def test_contract_with_another_maniskill(monkeypatch, capsys):
    """Where maniskill_cpu.py refuses the version, separate envs do the same, to the bit."""
    whole = play(make(num_envs=2), noise(make(num_envs=2), 53))
    monkeypatch.setitem(importlib.import_module("maniskill_cpu").TESTED, "sapien", "0.0.0")
    separate = play(make(num_envs=2), noise(make(num_envs=2), 53))
    assert "needs mani_skill 3.0.1 and sapien 0.0.0" in capsys.readouterr().out
    assert all(torch.equal(a, b) for a, b in zip(whole, separate, strict=True))


def test_seeds():
    """The same seed gives the same trajectories, also after resets; envs and seeds differ."""
    obs = [play(make(seed=seed), noise(make(), 60))[0] for seed in (1, 1, 2)]
    assert torch.equal(obs[0], obs[1]) and not torch.equal(obs[0], obs[2])
    starts = obs[0][49]  # the first observations of the second episodes
    assert (starts[0] != starts[1]).any() and (starts != obs[2][49]).any()


def test_repeated_resets_give_the_same_streams():
    """What a resumed run relies on: an env that was reset n times goes on like one that really lived so long."""
    lived = make()
    play(lived, noise(lived, 50))
    lived.reset(torch.tensor([1]))
    again = make(resets=lived.resets.numpy())
    assert again.resets.tolist() == lived.resets.tolist() == [2, 3, 2] and torch.equal(again.obs, lived.obs)


def test_success_ends_training_episodes_as_a_time_out(monkeypatch):
    envs, env = scripted(monkeypatch, success=[(1, 2, 1), (1, 4, 2)])
    obs, reward, terminated, truncated, final_obs, valid = play(envs, torch.zeros(6, 3, 2))
    assert not terminated.any() and valid.all(), "success must not be punished by a value of zero"
    assert truncated.int().T.tolist() == [[0, 0, 0, 0, 1, 0], [0, 1, 0, 0, 0, 1], [0, 0, 0, 0, 1, 0]]
    (seeds, first), *others = env.resets
    assert len(set(seeds)) == 3 and first == [0, 1, 2], "each env has a seed of its own"
    assert others == [(None, [1]), (None, [0, 2]), (None, [1])], "only ended envs restart"
    assert final_obs[1].tolist() == [[0, 2, 1], [1, 2, 1], [2, 2, 1]] and obs[1].tolist()[1] == [1, 0, 2]
    assert (obs[1, [0, 2]] == final_obs[1, [0, 2]]).all()
    assert finished(envs) == [[1, 23, 2, 1, 1], [0, 15, 5, 0, 0], [2, 115, 5, 0, 0], [1, 50, 4, 1, 1]]


def test_evaluation_runs_to_the_time_limit(monkeypatch):
    envs, env = scripted(monkeypatch, stagger=0, success=[(1, 2, 1), (2, 5, 1)])
    truncated = play(envs, torch.zeros(5, 3, 2))[3]
    assert truncated.int().tolist() == [[0] * 3] * 4 + [[1] * 3]
    assert [e[3:] for e in finished(envs)] == [[0, 0], [1, 0], [1, 1]], "success once, success at the end"


def test_nonfinite_steps_are_dropped_and_their_env_restarts(monkeypatch):
    envs, env = scripted(monkeypatch, broken=[(2, 3, 1)])
    obs, reward, terminated, truncated, final_obs, valid = play(envs, torch.zeros(5, 3, 2))
    assert valid.int().T.tolist() == [[1] * 5, [1] * 5, [1, 1, 0, 1, 1]] and int(envs.nonfinite) == 1
    assert final_obs.isfinite().all() and final_obs[2, 2].tolist() == [2, 2, 1] and reward[2, 2] == 0
    assert obs[2, 2].tolist() == [2, 0, 2] and (None, [2]) in env.resets and truncated[2].tolist() == [0, 0, 1]
    assert [e[0] for e in finished(envs)] == [-1, 0, 1], "a broken episode is no result"
    assert envs.episode_length.tolist() == [0, 0, 2]


def test_actions_are_rescaled(monkeypatch):
    envs, env = scripted(monkeypatch, num_envs=2)
    envs.step(torch.tensor([[-1.0, -1.0], [0.5, 3.0]]))
    assert env.actions[0].tolist() == [[-1, 0], [0.5, 4]]


def test_the_rollout_waits_once_per_step(monkeypatch):
    """On a GPU reading a value waits for the device. One look at who ended per step is what ManiSkill needs itself."""
    envs, _ = scripted(monkeypatch, success=[(1, 2, 1)], broken=[(0, 3, 1)])
    args = trudi.Args(num_steps=7, num_envs=3, hidden_size=8, diffusion_steps=2, vmin=-1.0, vmax=1.0, alpha_init=0.1)
    args.lambda_init, waits = 1.0, []
    agent, rng = trudi.Agent(envs, args), torch.Generator().manual_seed(0)

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if str(function).split(".")[1] in ("_local_scalar_dense", "nonzero", "masked_select", "equal"):
                waits.append(str(function))
            return function(*args, **kwargs or {})

    quiet = Scripted.step
    monkeypatch.setattr(Scripted, "step", lambda self, action: unwatched(quiet, self, action))
    reset = Scripted.reset
    monkeypatch.setattr(Scripted, "reset", lambda self, **kwargs: unwatched(reset, self, **kwargs))

    def unwatched(function, *args, **kwargs):
        seen = len(waits)
        result = function(*args, **kwargs)
        del waits[seen:]
        return result

    with Watch():
        data, _ = trudi.rollout(agent, envs, envs.obs, args, rng, lambda phase: None)
    assert waits == ["aten.nonzero.default"] * 7 and int(envs.nonfinite) == 1
    assert data["truncated"].sum() == 4 and not data["terminated"].any() and (~data["valid"]).sum() == 1


# --- the tasks


@pytest.mark.parametrize("task", LIMITS)
def test_settings_by_task(task, capsys):
    args = trudi.Args(env_id=f"{task}-v1")
    assert trudi.choose_backend(args, torch.device("cpu")) == ("physx_cpu_batched", "ManiSkill")
    assert trudi.choose_backend(args, torch.device("cuda"))[0] == "physx_cuda"
    assert trudi.SUITES["ManiSkill"]["gamma"] == 1 - 10 / LIMITS[task]
    assert ("sparse" in capsys.readouterr().out) == (task == "PlugCharger")


@pytest.mark.parametrize("task, actions", [("TwoRobotPickCube", 16), ("PushT", 7), ("PlugCharger", 8)])
def test_special_tasks(task, actions):
    """Two robots with one flat action; a task that paints its table; a task without a dense reward."""
    envs = make(f"{task}-v1", 2)
    obs, reward, *_ = play(envs, noise(envs, 3))
    assert envs.action_dim == actions and obs.isfinite().all() and (reward != 0).any() == (task != "PlugCharger")


@pytest.mark.parametrize("task", [*LIMITS, "MS-CartpoleBalance"])
@every_script
def test_every_task_trains(script, task):
    """Four iterations each, and any other registered task too; --bench leaves out evaluations."""
    sizes = "--num-envs 3 --num-steps 6 --num-minibatches 2 --update-epochs 1 --hidden-size 16".split()
    assert " steps/s\n" in run("--bench", 1, "--env-id", f"{task}-v1", *sizes, script=script).out


# --- whole runs


def load(folder):
    return torch.load(folder / "checkpoint.pt", weights_only=True)


@every_script
def test_train_and_evaluate(script, tmp_path):
    out = run(*TINY, "--run-dir", tmp_path / "a", "--capture-video", script=script).out
    assert "success_once" in out and "PushCube-v1 by physx_cpu_batched" in out
    names = {p.name for p in (tmp_path / "a").iterdir()} - {"video.gif"}
    assert names == {"args.json", "metrics.csv", "checkpoint.pt", "best.pt", "curve.png", "eval.json"}
    assert (tmp_path / "a" / "video.gif").exists() or "no video" in out
    rows = list(csv.DictReader((tmp_path / "a" / "metrics.csv").open()))
    assert [r["global_step"] for r in rows] == ["150", "300"] and float(rows[1]["charts/episode_length"]) == 50
    for key in ("eval/return", "eval/success_once", "eval/success_at_end", "charts/nonfinite"):
        assert float(rows[1][key]) >= 0
    readme = (ROOT / "README.md").read_text()
    assert not [key for key in rows[0] if f"`{key}`" not in readme], "every logged key is explained"
    table = json.loads((tmp_path / "a" / "eval.json").read_text())
    assert [*table] == [*script.SAMPLERS] and all(len(t["returns"]) == 2 and t["length"] == 50 for t in table.values())
    assert json.loads((tmp_path / "a" / "args.json").read_text())["mani-skill"] == "3.0.1"

    run("--evaluate", tmp_path / "a" / "checkpoint.pt", script=script)
    again = json.loads((tmp_path / "a" / "eval_checkpoint.json").read_text())
    assert again == table


@every_script
def test_resume_is_exact(script, tmp_path, monkeypatch):
    """Episodes end where iterations end, so that a resumed run equals the uninterrupted one to the bit."""
    run(*TINY, "--run-dir", tmp_path / "whole", script=script)
    update = script.update

    def interrupted(*args):
        os.kill(os.getpid(), signal.SIGTERM)
        return update(*args)

    monkeypatch.setattr(script, "update", interrupted)
    assert "stopped by SIGTERM" in run(*TINY, "--run-dir", tmp_path / "half", script=script, code=143).out
    monkeypatch.setattr(script, "update", update)
    assert load(tmp_path / "half")["step"] == 150
    run("--resume", tmp_path / "half", script=script)
    whole, half = (load(tmp_path / x) for x in ("whole", "half"))
    assert whole["step"] == half["step"] == 300 and whole["resets"] == half["resets"]
    assert all(torch.equal(v, half["agent"][k]) for k, v in whole["agent"].items())


def test_env_module(tmp_path, monkeypatch):
    (tmp_path / "my_envs.py").write_text(
        "from mani_skill.envs.tasks.tabletop.push_cube import PushCubeEnv\n"
        "from mani_skill.utils.registration import register_env\n"
        "@register_env('MyPush-v1', max_episode_steps=25)\n"
        "class MyPush(PushCubeEnv):\n    pass\n"
    )
    monkeypatch.chdir(tmp_path)
    flags = [*TINY, "--env-module", "my_envs", "--env-id", "MyPush-v1", "--run-dir", tmp_path / "run"]
    assert "gamma 0.6" in run(*flags).out
    assert json.loads((tmp_path / "run" / "eval.json").read_text())["ode"]["length"] == 25


@pytest.mark.parametrize(
    "flags, sentence",
    [
        (["--env-id", "StackCub-v1"], "ManiSkill has no StackCub-v1; the closest known ids: StackCube-v1"),
        (["--env-module", "no_such_module"], "cannot import no_such_module"),
        (["--num-minibatches", "7"], "must be a multiple of num_minibatches"),
        (["--device", "cuda"], "no CUDA device"),
    ],
)
def test_bad_input(flags, sentence, tmp_path):
    if "cuda" in flags and torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    result = run(*TINY, "--run-dir", tmp_path / "run", *flags, code=2)
    assert result.err.startswith("error: ") and sentence in result.err and result.err.count("\n") == 1
    assert not (tmp_path / "run").exists()


def hidden(tmp_path):
    """Environment variables under which no Vulkan driver is found"""
    return os.environ | dict(VK_ICD_FILENAMES=str(tmp_path / "none.json"), VK_DRIVER_FILES=str(tmp_path / "none.json"))


def test_first_run_without_vulkan(tmp_path):
    """The README's command on a machine without GPU and drivers: it trains, and says why there is no video."""
    command = [sys.executable, ROOT / "trudi_maniskill.py", "--env-id", "StackCube-v1", "--capture-video", *TINY]
    command += ["--run-dir", tmp_path / "run", "--device", "cpu"]
    done = subprocess.run([*map(str, command)], env=hidden(tmp_path), cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "StackCube-v1 by physx_cpu_batched" in done.stdout and "no video: physx_cpu" in done.stdout
    assert (tmp_path / "run" / "checkpoint.pt").exists() and "Traceback" not in done.stderr


def test_a_copied_script_says_what_it_misses(tmp_path):
    """On a GPU a script works alone; without one it needs maniskill_cpu.py."""
    shutil.copy(ROOT / "ppo_maniskill.py", tmp_path)
    command = [sys.executable, "ppo_maniskill.py", "--device", "cpu"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=hidden(tmp_path))
    assert done.returncode == 2 and "needs maniskill_cpu.py beside this script" in done.stderr
