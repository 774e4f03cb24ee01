"""The ManiSkill scripts.

Without a GPU the batched CPU simulation takes its place: the same tensors, partial resets and
masks. A stand-in environment with scripted successes and faults shows what each row must become.
"""

import contextlib
import dataclasses
import io
import json
import math
import os
import shutil
import signal
import subprocess
import sys
from typing import NamedTuple

import gymnasium as gym
import numpy as np
import pytest
import torch
from run_helpers import ROOT, load, rows
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("mani_skill")
import ppo_maniskill as ppo  # noqa: E402
import reppo_maniskill as reppo  # noqa: E402
import trudi_maniskill as trudi  # noqa: E402

SCRIPTS = [trudi, reppo, ppo]
TINY = ["--num-envs", "3", "--num-steps", "50", "--num-minibatches", "2", "--update-epochs", "1"]
TINY += ["--hidden-size", "16", "--eval-points", "2", "--eval-episodes", "2"]
TINY += ["--total-timesteps", "300"]
FILES = {"args.json", "metrics.csv", "checkpoint.pt", "best.pt", "policy.pt", "curve.png"}
FILES |= {"eval.json"}
LIMITS = {  # task -> steps of an episode
    "PickCube": 50,
    "StackCube": 50,
    "PokeCube": 50,
    "PullCube": 50,
    "PushCube": 50,
    "RollBall": 80,
    "LiftPegUpright": 50,
    "PlaceSphere": 50,
    "PlugCharger": 200,
    "PushT": 100,
    "PullCubeTool": 100,
    "TwoRobotPickCube": 100,
    "TwoRobotStackCube": 100,
    "PegInsertionSide": 100,
}
every_script = pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.SCRIPT)
without_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")


class Output(NamedTuple):
    out: str
    err: str


def run(*flags, code=0, script=trudi):
    """main(flags) in this process, which must end with this code. -> out, err"""
    out = io.StringIO()
    err = io.StringIO()
    handlers = {}
    for number in (signal.SIGINT, signal.SIGTERM):
        handlers[number] = signal.getsignal(number)
    got = 0
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            script.main([str(flag) for flag in flags])
    except SystemExit as end:
        got = end.code
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert got == code, (got, err.getvalue())
    return Output(out.getvalue(), err.getvalue())


def make(env_id="PushCube-v1", num_envs=3, seed=5, **kwargs):
    args = trudi.Args(env_id=env_id, backend="physx_cpu_batched", device="cpu")
    return trudi.VecEnv(args, num_envs, seed, **kwargs)


def random_actions(envs, steps, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(steps, envs.num_envs, envs.action_dim, generator=generator) * 2 - 1


class Played(NamedTuple):
    obs: torch.Tensor  # (T, E, O)
    reward: torch.Tensor  # this and the next two (T, E)
    terminated: torch.Tensor
    truncated: torch.Tensor
    final_obs: torch.Tensor  # (T, E, O)
    broken: torch.Tensor  # (T, E)


def play(envs, actions):
    steps = []
    for action in actions:
        steps.append((*envs.step(action), envs.broken))
    return Played(*[torch.stack(values) for values in zip(*steps, strict=True)])


class Scripted(gym.Env):
    """Speaks as ManiSkill's batched environments do. obs: environment, step, episode.

    success and broken hold (environment, step, episode): there the task succeeds, or the simulator
    returns NaN.
    """

    def __init__(self, num_envs, limit=5, success=(), broken=()):
        self.num_envs = num_envs
        self.limit = limit
        self.success = set(success)
        self.broken = set(broken)
        self.device = torch.device("cpu")
        self.clock = torch.zeros(num_envs)
        self.episode = torch.zeros(num_envs)
        self.single_action_space = gym.spaces.Box(np.float32([-1, 0]), np.float32([1, 4]))
        self.action_space = self.single_action_space
        self.resets = []
        self.actions = []

    def obs(self):
        return torch.stack([torch.arange(self.num_envs), self.clock, self.episode], dim=1)

    def at(self, events):
        return torch.tensor([tuple(row) in events for row in self.obs().int().tolist()])

    def reset(self, seed=None, options=None):
        index = options["env_idx"]
        self.resets.append((seed, index.tolist()))
        self.clock[index] = 0
        self.episode[index] += 1
        return self.obs(), {}

    def step(self, action):
        self.actions.append(action)
        self.clock += 1
        obs = self.obs()
        success = self.at(self.success)
        obs[self.at(self.broken), 1] = math.nan
        reward = 10 * torch.arange(self.num_envs) + self.clock
        return obs, reward, success, self.clock >= self.limit, {"success": success}


def make_scripted(monkeypatch, num_envs=3, training=True, script=trudi, **kwargs):
    """-> VecEnv, the stand-in that it drives; both start their first episode"""
    env = Scripted(num_envs, **kwargs)
    monkeypatch.setattr(gym, "make", lambda *args, **kwargs: env)
    args = script.Args(backend="physx_cuda", device="cpu")
    return script.VecEnv(args, num_envs, 7, training=training), env


def results(envs):
    """The finished episodes as lists: environment, return, length, success once, at the end"""
    found = []
    for episode in envs.pop_finished():
        assert list(episode) == ["env", *trudi.EPISODE_METRICS, "mode", "broken"]
        assert type(episode["env"]) is int and type(episode["length"]) is int
        assert episode["broken"] is False
        found.append(list(episode.values())[:-2])
    return found


# --- the environment contract ---


def test_contract_with_a_time_limit():
    envs = make()
    assert envs.obs_dim == envs.actor_dim and envs.critic_start == 0
    steps = play(envs, random_actions(envs, 103))
    assert steps.obs.shape == steps.final_obs.shape == (103, 3, envs.obs_dim)
    assert steps.reward.shape == (103, 3) and not steps.broken.any()
    assert {steps.obs.dtype, steps.reward.dtype, steps.final_obs.dtype} == {torch.float32}
    assert steps.truncated.dtype == steps.terminated.dtype == torch.bool
    at_limit = (torch.arange(103) + 1) % 50 == 0
    assert (steps.truncated == at_limit[:, None]).all() and not steps.terminated.any()
    differs = (steps.final_obs != steps.obs).any(dim=-1)
    assert differs[at_limit].all(), "final_obs must not be the reset observation"
    assert not differs[~at_limit].any()
    episodes = results(envs)
    expected = [[i, 50, 0, 0] for _ in range(2) for i in range(3)]
    assert [[env, *others] for env, _, *others in episodes] == expected
    returns = [*steps.reward[:50].sum(dim=0).tolist(), *steps.reward[50:100].sum(dim=0).tolist()]
    assert [episode[1] for episode in episodes] == pytest.approx(returns, rel=1e-5)
    assert envs.pop_finished() == []


def test_contract_with_another_maniskill(monkeypatch, capsys):
    """Where maniskill_cpu.py refuses the version, separate environments do the same, to the bit."""
    from simulators import maniskill_cpu

    batched = make(num_envs=2)
    actions = random_actions(batched, 53)
    one = play(batched, actions)
    monkeypatch.setitem(maniskill_cpu.TESTED_VERSIONS, "sapien", "0.0.0")
    other = play(make(num_envs=2), actions)
    assert "needs mani_skill 3.0.1 and sapien 0.0.0" in capsys.readouterr().out
    for values, other_values in zip(one, other, strict=True):
        assert torch.equal(values, other_values)


def test_seeds():
    """The same seed gives the same trajectories, also after resets; environments, seeds differ."""
    obs = []
    for seed in (1, 1, 2):
        envs = make(seed=seed)
        obs.append(play(envs, random_actions(envs, 60)).obs)
    assert torch.equal(obs[0], obs[1]) and not torch.equal(obs[0], obs[2])
    starts = obs[0][49]  # the first observations of the second episodes
    assert (starts[0] != starts[1]).any() and (starts != obs[2][49]).any()


def test_success_ends_training_episodes_as_a_time_out(monkeypatch):
    envs, env = make_scripted(monkeypatch, success=[(1, 2, 1), (1, 4, 2)])
    steps = play(envs, torch.zeros(6, 3, 2))
    assert not steps.terminated.any(), "success must not be punished by a value of zero"
    assert not steps.broken.any()
    expected = [[0, 0, 0, 0, 1, 0], [0, 1, 0, 0, 0, 1], [0, 0, 0, 0, 1, 0]]
    assert steps.truncated.int().T.tolist() == expected
    (seeds, first), *others = env.resets
    assert len(set(seeds)) == 3 and first == [0, 1, 2], "each environment has its own seed"
    assert others == [(None, [1]), (None, [0, 2]), (None, [1])], "only what ended restarts"
    assert steps.final_obs[1].tolist() == [[0, 2, 1], [1, 2, 1], [2, 2, 1]]
    assert steps.obs[1, 1].tolist() == [1, 0, 2]
    assert (steps.obs[1, [0, 2]] == steps.final_obs[1, [0, 2]]).all()
    expected = [[1, 23, 2, 1, 1], [0, 15, 5, 0, 0], [2, 115, 5, 0, 0], [1, 50, 4, 1, 1]]
    assert results(envs) == expected


def test_evaluation_runs_to_the_time_limit(monkeypatch):
    success = [(1, 2, 1), (2, 5, 1)]
    envs, _ = make_scripted(monkeypatch, training=False, success=success)
    steps = play(envs, torch.zeros(5, 3, 2))
    assert steps.truncated.int().tolist() == [[0] * 3] * 4 + [[1] * 3]
    success = [episode[3:] for episode in results(envs)]
    assert success == [[0, 0], [1, 0], [1, 1]], "success once, success at the end"


def test_an_environment_without_an_end_is_truncated(monkeypatch):
    monkeypatch.setattr(trudi, "MAX_EPISODE_STEPS", 4)
    envs, _ = make_scripted(monkeypatch, training=False, limit=math.inf)
    steps = play(envs, torch.zeros(8, 3, 2))
    expected = [[0] * 3] * 3 + [[1] * 3]
    assert steps.truncated.int().tolist() == 2 * expected and not steps.terminated.any()


def test_success_may_be_unknown(monkeypatch):
    """A task without success gives nan, which no mean takes for a failure."""
    envs, env = make_scripted(monkeypatch)
    step = env.step
    monkeypatch.setattr(env, "step", lambda action: (*step(action)[:4], {}))
    play(envs, torch.zeros(5, 3, 2))
    for episode in envs.pop_finished():
        assert math.isnan(episode["success_once"]) and math.isnan(episode["success_at_end"])


def test_nonfinite_steps_are_dropped_and_their_env_restarts(monkeypatch):
    envs, env = make_scripted(monkeypatch, broken=[(2, 3, 1)])
    steps = play(envs, torch.zeros(5, 3, 2))
    assert steps.broken.int().T.tolist() == [[0] * 5, [0] * 5, [0, 0, 1, 0, 0]]
    assert int(envs.nonfinite) == 1
    assert steps.final_obs.isfinite().all() and steps.final_obs[2, 2].tolist() == [2, 2, 1]
    assert steps.reward[2, 2] == 0 and not steps.terminated.any()
    assert steps.obs[2, 2].tolist() == [2, 0, 2] and (None, [2]) in env.resets
    assert steps.truncated[2].tolist() == [False, False, True]
    episodes = [(episode["env"], episode["broken"]) for episode in envs.pop_finished()]
    assert episodes == [(2, True), (0, False), (1, False)], "a broken episode is no result"
    assert envs.episode_length.tolist() == [0, 0, 2]


def test_broken_starts_become_finite(monkeypatch):
    envs, env = make_scripted(monkeypatch)
    monkeypatch.setattr(env, "obs", lambda: torch.full((3, 3), math.nan))
    assert envs.reset().tolist() == [[0] * 3] * 3


def test_actions_are_rescaled(monkeypatch):
    envs, env = make_scripted(monkeypatch, num_envs=2)
    envs.step(torch.tensor([[-1.0, -1.0], [0.5, 3.0]]))
    assert env.actions[0].tolist() == [[-1, 0], [0.5, 4]]


class Watch(TorchDispatchMode):
    """Notes the operations that make Python wait for the device, but those of the simulation."""

    def __init__(self):
        super().__init__()
        self.waits = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = str(function).split(".")[1]
        if name in ("_local_scalar_dense", "nonzero", "masked_select", "equal"):
            self.waits.append(str(function))
        return function(*args, **(kwargs or {}))

    def leave_out(self, function):
        def unwatched(*args, **kwargs):
            num_waits = len(self.waits)
            result = function(*args, **kwargs)
            del self.waits[num_waits:]
            return result

        return unwatched


@every_script
def test_the_rollout_waits_once_per_step(script, monkeypatch):
    """One look at who ended per step is what ManiSkill needs itself."""
    events = dict(success=[(1, 2, 1)], broken=[(0, 3, 1)])
    envs, env = make_scripted(monkeypatch, script=script, **events)
    args = script.Args(device="cpu", num_steps=7, num_envs=3, hidden_size=8)
    agent = script.Agent(envs, args)
    generator = torch.Generator().manual_seed(0)
    watch = Watch()
    monkeypatch.setattr(env, "step", watch.leave_out(env.step))
    monkeypatch.setattr(env, "reset", watch.leave_out(env.reset))
    with watch:
        data, _ = script.rollout(agent, envs, envs.obs, args, generator)
    assert watch.waits == ["aten.nonzero.default"] * 7 and int(envs.nonfinite) == 1
    assert data["truncated"].sum() == 4 and not data["terminated"].any()
    assert data["broken"].sum() == 1


# --- the tasks ---


@pytest.mark.parametrize("task", LIMITS)
def test_settings_by_task(task):
    env_id = f"{task}-v1"
    on_cpu = ("physx_cpu_batched", "ManiSkill")
    assert trudi.choose_backend(env_id, "auto", "cpu") == on_cpu
    assert trudi.choose_backend(env_id, "auto", "cuda") == ("physx_cuda", "ManiSkill")
    assert trudi.choose_backend(env_id, "physx_cpu_batched", "cuda") == on_cpu
    assert trudi.default_gamma(env_id) == 1 - 10 / LIMITS[task]
    assert (trudi.reward_mode(env_id) == "sparse") == (task == "PlugCharger")


@every_script
def test_defaults_by_device_and_task(script):
    args, _ = script.parse_args(["--env-id", "RollBall-v1", "--device", "cpu"])
    assert args.gamma == 0.875 and args.backend == "physx_cpu_batched" and args.device == "cpu"
    for name, value in script.CPU_DEFAULTS.items():
        assert getattr(args, name) == value
    args, _ = script.parse_args(["--env-id", "RollBall-v1", "--gamma", "0.5", "--num-envs", "8"])
    assert args.gamma == 0.5 and args.num_envs == 8


@pytest.mark.parametrize(
    "task, num_actions", [("TwoRobotPickCube", 16), ("PushT", 7), ("PlugCharger", 8)]
)
def test_special_tasks(task, num_actions, capsys):
    """Two robots with one flat action; a task that paints its table; no dense reward."""
    envs = make(f"{task}-v1", 2, training=True)
    is_sparse = task == "PlugCharger"
    assert ("sparse" in capsys.readouterr().out) == is_sparse
    steps = play(envs, random_actions(envs, 3))
    assert envs.action_dim == num_actions and steps.obs.isfinite().all()
    assert (steps.reward != 0).any() == (not is_sparse)


@pytest.mark.slow
@pytest.mark.parametrize("task", [*LIMITS, "MS-CartpoleBalance"])
@every_script
def test_every_task_trains(script, task):
    """Four iterations each, and any other registered task too; --bench leaves out evaluations."""
    sizes = ["--num-envs", 3, "--num-steps", 6, "--num-minibatches", 2, "--update-epochs", 1]
    sizes += ["--hidden-size", 16]
    shown = run("--bench", 1, "--env-id", f"{task}-v1", *sizes, script=script).out
    assert " steps/s\n" in shown


@pytest.mark.parametrize("script", [trudi, reppo], ids=lambda script: script.SCRIPT)
def test_the_critics_range_follows_from_gamma(script):
    """Rewards in [0, 1]: values in [0, 1 / (1 - gamma)], with room on both sides."""
    for flags, expected in (
        ([], (0.8, -2, 8)),
        (["--gamma", "0.9"], (0.9, -4, 16)),
        (["--gamma", "0.9", "--vmin", "-3"], (0.9, -3, 16)),
        (["--env-id", "TwoRobotPickCube-v1"], (0.9, -4, 16)),
    ):
        args, _ = script.parse_args(["--device", "cpu", *flags])
        assert (args.gamma, args.vmin, args.vmax) == pytest.approx(expected)


# --- whole runs ---


class Trained(NamedTuple):
    script: object
    folder: object
    out: str


@pytest.fixture(scope="module", params=SCRIPTS, ids=lambda script: script.SCRIPT)
def trained(request, tmp_path_factory):
    """A tiny run of each script; tests that change its folder take a copy."""
    script = request.param
    folder = tmp_path_factory.mktemp("trained") / "run"
    out = run(*TINY, "--run-dir", folder, script=script).out
    return Trained(script, folder, out)


@pytest.mark.slow
def test_train(trained):
    assert "success_once" in trained.out and "PushCube-v1 by physx_cpu_batched" in trained.out
    assert {path.name for path in trained.folder.iterdir()} == FILES
    table = rows(trained.folder)
    assert [row["global_step"] for row in table] == ["150", "300"]
    assert float(table[1]["charts/episode_length"]) == 50
    for name in trained.script.EPISODE_METRICS:
        assert float(table[1][f"eval/{name}"]) >= 0
        assert float(table[1][f"charts/episode_{name}"]) >= 0
    assert float(table[1]["charts/nonfinite"]) == 0
    result = json.loads((trained.folder / "eval.json").read_text())
    assert list(result) == list(trained.script.SAMPLERS)
    for sampler in result.values():
        assert len(sampler["returns"]) == 2 and sampler["length"] == 50
        names = {"mean", "std", "returns", "broken", *trained.script.EPISODE_METRICS[1:]}
        assert set(sampler) == names
    about = json.loads((trained.folder / "args.json").read_text())
    assert about["mani-skill"] == "3.0.1" and about["suite"] == "ManiSkill"


@pytest.mark.slow
def test_load_policy(trained):
    """Raw observations in, the robot's own actions out."""
    script = trained.script
    policy = script.load_policy(trained.folder)
    checkpoint = torch.load(trained.folder / "policy.pt", weights_only=True)
    args = script.Args(**checkpoint["args"])
    envs = script.make_envs(args, 2, seed=3)
    obs = envs.reset()
    action = policy(obs)
    assert action.shape == (2, envs.action_dim)
    low = envs.action_center - envs.action_halfwidth
    assert (action >= low).all() and (action <= low + 2 * envs.action_halfwidth).all()
    assert policy(obs[0]).shape == (envs.action_dim,)


@pytest.mark.slow
def test_docs_explain_every_metric(trained):
    algorithm = trained.script.SCRIPT.removesuffix("_maniskill")
    text = (ROOT / "docs" / "metrics.md").read_text()
    text += (ROOT / "docs" / f"{algorithm}.md").read_text()
    assert [name for name in rows(trained.folder)[0] if f"`{name}`" not in text] == []


@pytest.mark.slow
def test_evaluate(trained, tmp_path):
    expected = json.loads((trained.folder / "eval.json").read_text())
    for name in ("checkpoint", "policy"):
        checkpoint = trained.folder / f"{name}.pt"
        run("--evaluate", checkpoint, "--run-dir", tmp_path, script=trained.script)
        assert json.loads((tmp_path / f"eval_{name}.json").read_text()) == expected


@without_cuda
@pytest.mark.slow
def test_a_policy_from_a_gpu_can_be_evaluated_on_a_cpu(trained, tmp_path):
    checkpoint = load(trained.folder / "policy.pt")
    checkpoint["args"] |= {"device": "cuda", "backend": "physx_cuda"}
    torch.save(checkpoint, tmp_path / "policy.pt")
    run("--evaluate", tmp_path / "policy.pt", script=trained.script)
    result = json.loads((tmp_path / "eval_policy.json").read_text())
    assert result == json.loads((trained.folder / "eval.json").read_text())


@pytest.mark.slow
def test_a_checkpoint_keeps_its_simulation_on_its_device(trained, tmp_path):
    checkpoint = load(trained.folder)
    checkpoint["args"]["backend"] = "physx_cuda"
    torch.save(checkpoint, tmp_path / "checkpoint.pt")
    flags = ["--resume", str(tmp_path), "--device", "cpu"]
    args, _ = trained.script.parse_args(flags)
    assert args.backend == "physx_cuda" and args.device == "cpu"
    args, _ = trained.script.parse_args([*flags, "--backend", "physx_cpu_batched"])
    assert args.backend == "physx_cpu_batched"


def assert_equal_states(one, other):
    assert one.keys() == other.keys()
    for name, values in one.items():
        assert torch.equal(values, other[name]), name


@pytest.mark.slow
@every_script
def test_resume(script, tmp_path, monkeypatch):
    """Weights, optimizers, duals, normalizer, generator, step and best score come back.

    Environments are seeded anew, from seed and step.
    """
    update = script.update

    def interrupted(*args):
        os.kill(os.getpid(), signal.SIGTERM)
        return update(*args)

    folder = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(script, "update", interrupted)
        shown = run(*TINY, "--run-dir", folder, script=script, code=143).out
    assert "stopped by SIGTERM" in shown
    saved = load(folder)
    assert saved["progress"]["step"] == 150
    first_row = rows(folder)[0]

    restore = script.restore
    make_envs = script.make_envs
    restored = []
    seeds = []

    def watched_restore(checkpoint, args, agent, optimizers, generator):
        restore(checkpoint, args, agent, optimizers, generator)
        assert_equal_states(saved["agent"], agent.state_dict())
        for optimizer, before in zip(optimizers, saved["optimizers"], strict=True):
            after = optimizer.state_dict()
            assert after["param_groups"] == before["param_groups"]
            assert after["state"].keys() == before["state"].keys() and after["state"]
            for parameter, values in before["state"].items():
                assert_equal_states(values, after["state"][parameter])
        assert torch.equal(generator.get_state(), saved["generator"])
        restored.append(checkpoint["progress"]["best_return"])

    def watched_make_envs(args, num_envs, seed, **kwargs):
        seeds.append(seed)
        return make_envs(args, num_envs, seed, **kwargs)

    monkeypatch.setattr(script, "restore", watched_restore)
    monkeypatch.setattr(script, "make_envs", watched_make_envs)
    run("--resume", folder, script=script)
    # the signal came before the evaluation, which a run that is asked to end does without
    assert first_row["eval/return"] == ""
    assert restored == [saved["progress"]["best_return"]] == [-math.inf]
    assert seeds[:2] == [10_007 + 150 + 5_000, 10_007 + 150]
    assert load(folder)["progress"]["step"] == 300
    assert rows(folder)[0] == first_row and len(rows(folder)) == 2
    assert (folder / "eval.json").exists()


MY_TASK = """
from mani_skill.envs.tasks.tabletop.push_cube import PushCubeEnv
from mani_skill.utils.registration import register_env

@register_env("MyPush-v1", max_episode_steps=25)
class MyPush(PushCubeEnv):
    pass
"""


@pytest.mark.slow
def test_env_module(tmp_path, monkeypatch):
    from mani_skill.utils.registration import REGISTERED_ENVS

    (tmp_path / "my_tasks.py").write_text(MY_TASK)
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "run"
    task = ["--env-module", "my_tasks", "--env-id", "MyPush-v1"]
    assert "gamma 0.6" in run(*TINY, *task, "--run-dir", folder).out
    result = (folder / "eval.json").read_text()
    assert json.loads(result)["ode"]["length"] == 25
    # a later process finds the module in the checkpoint
    del sys.modules["my_tasks"]
    del REGISTERED_ENVS["MyPush-v1"]
    del gym.registry["MyPush-v1"]
    run("--evaluate", folder / "policy.pt")
    assert (folder / "eval_policy.json").read_text() == result


@pytest.mark.parametrize(
    "flags, sentence",
    [
        (["--env-id", "StackCub-v1"], "has no StackCub-v1; the closest known ids: StackCube-v1"),
        (["--env-module", "no_such_module"], "cannot import no_such_module"),
        (["--num-minibatches", "7"], "num_minibatches must divide num_envs * num_steps"),
        pytest.param(["--device", "cuda"], "no CUDA device", marks=without_cuda),
        pytest.param(["--backend", "physx_cuda"], "physx_cuda cannot make", marks=without_cuda),
    ],
)
def test_bad_input(flags, sentence, tmp_path):
    result = run(*TINY, "--run-dir", tmp_path / "run", *flags, code=2)
    assert result.err.startswith("error: ") and sentence in result.err
    assert result.err.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_authors_of_tasks_see_the_traceback(monkeypatch):
    def fail(*args, **kwargs):
        raise ValueError("a fault of the task")

    monkeypatch.setattr(gym, "make", fail)
    args = trudi.Args(backend="physx_cuda", device="cpu", env_module="my_tasks")
    with pytest.raises(ValueError, match="a fault of the task"):
        trudi.make_envs(args, 2, 1)
    with pytest.raises(SystemExit):
        trudi.make_envs(dataclasses.replace(args, env_module=""), 2, 1)


# --- processes of their own ---


def run_process(command, folder):
    """On a machine on which no Vulkan driver is found."""
    no_driver = str(folder / "none.json")
    environment = os.environ | {"VK_ICD_FILENAMES": no_driver, "VK_DRIVER_FILES": no_driver}
    words = [sys.executable, *map(str, command)]
    return subprocess.run(words, env=environment, cwd=folder, capture_output=True, text=True)


@pytest.mark.slow
def test_first_run_without_vulkan(tmp_path):
    """The README's command on a machine without GPU and drivers: it trains, and is quiet."""
    command = [ROOT / "trudi_maniskill.py", "--env-id", "StackCube-v1", *TINY]
    done = run_process([*command, "--run-dir", tmp_path / "run", "--device", "cpu"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert "StackCube-v1 by physx_cpu_batched" in done.stdout
    assert (tmp_path / "run" / "checkpoint.pt").exists()
    assert "Traceback" not in done.stderr and "libvulkan" not in done.stderr


@pytest.mark.slow
@every_script
def test_a_copied_script_says_what_it_misses(script, tmp_path):
    """On a GPU a script works alone; without one it needs simulators/maniskill_cpu.py."""
    shutil.copy(script.__file__, tmp_path)
    done = run_process([f"{script.SCRIPT}.py", "--device", "cpu"], tmp_path)
    assert done.returncode == 2
    assert "needs simulators/maniskill_cpu.py beside this script" in done.stderr
