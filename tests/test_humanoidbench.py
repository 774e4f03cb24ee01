"""simulators/humanoidbench_env.py, on a stand-in with the suite's defects, and on the suite.

The stand-in, tests/fake_humanoidbench, has the suite's names and faults on a small robot. Its tasks
have 8 steps an episode.
"""

import importlib.util
import os
import signal
import subprocess
import sys
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from run_helpers import (
    MORE,
    ROOT,
    SCRIPTS,
    TINY,
    assert_all_end,
    descendants,
    every_script,
    load,
    rows,
    run,
    wait_for,
)

import trudi_continuous as trudi
from simulators import humanoidbench_env
from simulators.workers import kill_workers
from tools import benchmark

FAKE = ROOT / "tests/fake_humanoidbench"
WALK = "h1hand-walk-v0"
FAKE_TASKS = ["walk", "reach", "push", "package", "kitchen"]
LENGTH = 8
has_suite = importlib.util.find_spec("humanoid_bench") is not None
needs_suite = pytest.mark.skipif(not has_suite, reason="needs HumanoidBench, which is not on PyPI")
needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads Linux's /proc")


def forget_suite():
    """The next import_suite imports it again."""
    kill_workers()
    humanoidbench_env.import_suite.cache_clear()
    for name in list(sys.modules):
        if name.split(".")[0] == "humanoid_bench":
            del sys.modules[name]
    for env_id in list(gym.registry):
        if trudi.HUMANOIDBENCH_ID.fullmatch(env_id):
            del gym.registry[env_id]


@pytest.fixture
def fake_suite(monkeypatch):
    """HumanoidBench's stand-in is installed, and JAX is not."""
    forget_suite()
    monkeypatch.syspath_prepend(FAKE)
    monkeypatch.setitem(sys.modules, "jax", None)
    yield
    forget_suite()


@pytest.fixture
def real_suite():
    forget_suite()
    yield
    forget_suite()


@pytest.fixture
def no_suite(monkeypatch):
    forget_suite()
    monkeypatch.setitem(sys.modules, "humanoid_bench", None)
    yield
    monkeypatch.undo()
    forget_suite()


def make(task, num_envs=3, seed=5, torch_threads=1, **kwargs):
    args = trudi.Args(env_id=f"h1hand-{task}-v0", backend="gymnasium", device="cpu")
    args.torch_threads = torch_threads
    return trudi.make_envs(args, num_envs, seed, **kwargs)


def play(envs, num_steps=20, seed=0):
    """-> what random actions lead to: obs, reward, terminated, truncated, final_obs, (T, E, ...)"""
    generator = torch.Generator().manual_seed(seed)
    history = []
    for _ in range(num_steps):
        action = torch.rand(envs.num_envs, envs.action_dim, generator=generator) * 2 - 1
        history.append(envs.step(action))
    return [torch.stack(values) for values in zip(*history, strict=True)]


def assert_equal(ours, theirs):
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one, other)


# === ids, settings, the missing package ===
@pytest.mark.parametrize("task", benchmark.HUMANOIDBENCH_TASKS)
def test_every_task_of_the_paper_is_known_by_its_id(task):
    env_id = f"h1hand-{task}-v0"
    assert trudi.choose_backend(env_id, "auto", "cpu") == ("gymnasium", "HumanoidBench")
    assert trudi.choose_backend(env_id, "gymnasium", "cuda") == ("gymnasium", "HumanoidBench")


def test_other_robots_and_other_ids():
    for env_id in ("h1-walk-v0", "g1-run-v0", "h1touch-cube-v0", f"humanoid_bench:{WALK}"):
        assert trudi.choose_backend(env_id, "auto", "cpu") == ("gymnasium", "HumanoidBench")
    for env_id in ("h1hand-walk-v1", "my_module:h1hand-walk-v0", "h2-walk-v0", "G1-walk-v0"):
        assert trudi.choose_backend(env_id, "auto", "cpu") == ("gymnasium", "other")


def test_settings_of_the_suite():
    args, _ = trudi.parse_args(["--env-id", WALK, "--device", "cpu"])
    assert (args.vmin, args.vmax, args.gamma) == (-250, 250, 0.99)
    assert not args.normalize_reward and args.alpha_init <= 0.01
    assert args.num_envs + args.eval_episodes <= 32, "for a laptop"
    args, _ = trudi.parse_args(["--env-id", "h1hand-reach-v0", "--device", "cpu"])
    assert (args.vmin, args.vmax) == (-2_000, 2_000)
    for script in SCRIPTS:
        on_gpu = script.SUITES["HumanoidBench"]
        assert (on_gpu["num_envs"], script.Args().num_steps) == (128, 128)
        assert 1 <= on_gpu["torch_threads"] <= os.cpu_count()
    widths = {
        script.SCRIPT: script.SUITES["HumanoidBench"].get("hidden_size") for script in SCRIPTS
    }
    assert widths["trudi_continuous"] == widths["reppo_continuous"] == 256
    assert widths["ppo_continuous"] == widths["dppo_continuous"] == 128


@every_script
def test_without_the_package_a_sentence_has_both_commands(script, no_suite):
    err = run("--env-id", WALK, "--device", "cpu", code=2, script=script).err
    assert err.count("\n") == 1
    first, second = (line.strip("`") for line in humanoidbench_env.INSTALL.split("`")[1::2])
    assert first in err and second in err
    page = (ROOT / "docs/humanoidbench.md").read_text()
    assert first.removeprefix("pip") in page and second.removeprefix("pip") in page


def test_other_tasks_import_nothing_of_it():
    code = "import sys, trudi_continuous as trudi; trudi.parse_args(['--device', 'cpu']);"
    code += "trudi.choose_backend('h1hand-walk-v0', 'auto', 'cpu');"
    code += "print([name for name in sys.modules if 'humanoid' in name or 'simulators' in name])"
    command = [sys.executable, "-c", code]
    assert subprocess.check_output(command, cwd=ROOT, text=True).strip() == "[]"


# === the repairs, on the stand-in ===
def test_defects_of_the_stand_in(fake_suite):
    """What is repaired fails without it."""
    with pytest.raises(ImportError, match="jax"):
        import humanoid_bench
    with humanoidbench_env.pretended_jax():
        import humanoid_bench  # noqa: F401
    with pytest.raises(AttributeError, match="flex_evpair|no_such_array"):
        gym.make(WALK, render_mode=None)


@pytest.mark.parametrize("task", FAKE_TASKS)
def test_every_task_runs(task, fake_suite, capsys):
    envs = make(task)
    obs, reward, terminated, truncated, final_obs = play(envs)
    assert obs.isfinite().all() and reward.isfinite().all()
    assert truncated.any() and terminated.any() == (task == "walk")
    ended = terminated | truncated
    assert torch.equal(obs[~ended], final_obs[~ended])
    assert (obs[ended] != final_obs[ended]).any(dim=1).all(), "the last one, and the next first one"
    assert capsys.readouterr().out == "", "the suite's own messages"
    lengths = [episode["length"] for episode in envs.pop_finished()]
    assert max(lengths) == LENGTH if task != "walk" else min(lengths) < LENGTH


def test_the_pretended_jax_does_not_stay(fake_suite):
    humanoidbench_env.import_suite()
    assert sys.modules.get("jax") is None and "jax.numpy" not in sys.modules


@pytest.mark.parametrize("task", ["reach", "package"])
def test_goals_are_seeded(task, fake_suite):
    column = {"reach": 2, "package": 3}[task]
    goals = []
    state = np.random.get_state()[1].tolist()  # noqa: NPY002
    for seed in (1, 1, 2):
        envs = make(task, seed=seed)
        obs, *_ = play(envs, num_steps=2 * LENGTH + 1)
        goals.append(obs[:, :, column])
    assert torch.equal(goals[0], goals[1]) and not torch.equal(goals[0], goals[2])
    assert len(goals[0].unique()) == 9, "3 environments, 3 episodes"
    assert np.random.get_state()[1].tolist() == state  # noqa: NPY002


def test_models_are_shared_where_nobody_writes_to_them(fake_suite):
    models = {}
    for task in FAKE_TASKS:
        envs = make(task)
        models[task] = {id(env.unwrapped.model) for env in envs.env.envs}
    assert {task: len(found) for task, found in models.items()} == {
        "walk": 1,
        "reach": 1,
        "push": 1,
        "package": 3,
        "kitchen": 1,
    }


def test_success(fake_suite):
    """The task's own, seen once; else the return, 1 a step, against the suite's bar of 5 or 1000"""
    found = {}
    for task in ("kitchen", "reach", "push"):
        envs = make(task, num_envs=1)
        play(envs, num_steps=LENGTH)
        found[task] = [episode["success"] for episode in envs.pop_finished()]
    assert found == {"kitchen": [1.0], "reach": [0.0], "push": [1.0]}


def test_pictures_are_drawn_in_this_process(fake_suite, monkeypatch):
    """Today's renderer takes no camera, and the suite gives it one."""
    envs = humanoidbench_env.make_vec(WALK, 1, num_workers=2)
    assert isinstance(envs, humanoidbench_env.WorkersEnv)
    env = humanoidbench_env.make(WALK)
    renderer = env.unwrapped.mujoco_renderer
    monkeypatch.setattr(type(renderer), "_get_viewer", lambda *_, **__: Viewer())
    envs = humanoidbench_env.make_vec(WALK, 1, num_workers=2, render_mode="rgb_array")
    envs.reset(seed=0)
    assert envs.render() == ("a picture",)


class Viewer:
    def render(self, render_mode, camera_id):
        return "a picture"

    def close(self):
        pass


# === worker processes ===
@pytest.mark.slow
@pytest.mark.parametrize("task", ["walk", "package"])
def test_workers_do_the_same(task, fake_suite):
    """5 environments: in this process, by two workers, and by more workers than environments"""
    histories = []
    episodes = []
    for torch_threads in (1, 2, 6):
        envs = make(task, num_envs=5, torch_threads=torch_threads, stagger=True)
        is_shared = isinstance(envs.env, humanoidbench_env.WorkersEnv)
        assert is_shared == (torch_threads > 1)
        first = envs.reset()
        histories.append([first, *play(envs, num_steps=30)])
        episodes.append(envs.pop_finished())
    assert_equal(histories[1], histories[0])
    assert_equal(histories[2], histories[0])
    for found in episodes[1:]:
        assert [{**one, "mode": 0} for one in found] == [{**one, "mode": 0} for one in episodes[0]]


SIZES = [*TINY, *MORE[trudi], "--env-id", WALK, "--device", "cpu", "--total-timesteps", "128"]


@pytest.mark.slow
def test_train_resume_and_evaluate_with_workers(fake_suite, tmp_path):
    """A run that was stopped after one iteration goes on, with another number of workers."""
    run(*SIZES, "--torch-threads", 2, "--run-dir", tmp_path)
    assert load(tmp_path)["progress"]["step"] == 128
    assert [float(row["charts/nonfinite"]) for row in rows(tmp_path)] == [0, 0]
    run("--resume", tmp_path, "--total-timesteps", 256, "--torch-threads", 1)
    assert load(tmp_path)["progress"]["step"] == 256
    out = run("--evaluate", tmp_path / "best.pt", "--torch-threads", 2).out
    assert "success" in out and (tmp_path / "eval_best.json").exists()


def start_training(folder):
    """-> a run with two workers that would go on for long, its workers, all its processes"""
    flags = [*SIZES[:-1], "1000000", "--eval-points", "10000", "--torch-threads", "2"]
    command = [sys.executable, ROOT / "trudi_continuous.py", *flags, "--run-dir", folder]
    process = subprocess.Popen(
        list(map(str, command)),
        env=os.environ | {"PYTHONPATH": str(FAKE)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    wait_for(lambda: (folder / "metrics.csv").exists(), process)
    pids = descendants(process.pid)
    workers = []
    for pid in pids:
        if "spawn_main" in Path(f"/proc/{pid}/cmdline").read_text():
            workers.append(pid)
    assert len(workers) == 2, "training and evaluation share the workers"
    return process, workers, pids


@needs_proc
@pytest.mark.slow
@pytest.mark.extended  # as with ManiSkill's workers
def test_signals_reach_the_trainer_alone(tmp_path):
    """As by Ctrl-C: the whole group gets the signal, and only the trainer listens."""
    process, workers, pids = start_training(tmp_path / "run")
    for worker in workers:
        os.kill(worker, signal.SIGTERM)
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGINT, err
    assert "stopped by SIGINT" in out and "Traceback" not in err
    assert load(tmp_path / "run")["progress"]["step"] > 0
    assert_all_end(pids)


@needs_proc
@pytest.mark.slow
@pytest.mark.extended  # as with ManiSkill's workers
def test_a_killed_trainer_leaves_no_process(tmp_path):
    process, _, pids = start_training(tmp_path / "run")
    process.kill()
    assert_all_end(pids)
    process.communicate()


@needs_proc
@pytest.mark.slow
@pytest.mark.extended  # as with ManiSkill's workers
def test_a_killed_worker_ends_the_run_with_one_sentence(tmp_path):
    process, workers, pids = start_training(tmp_path / "run")
    os.kill(workers[0], signal.SIGKILL)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert err.startswith("error: simulation worker") and "killed by SIGKILL" in err
    assert err.strip().count("\n") == 0
    assert_all_end(pids)


# === the suite itself ===
@needs_suite
@pytest.mark.slow
@pytest.mark.parametrize("task", benchmark.HUMANOIDBENCH_TASKS)
def test_twenty_steps_of_every_task(task, real_suite):
    """And a model that environments share is the same after them."""
    envs = make(task, num_envs=2)
    model = envs.env.envs[0].unwrapped.model
    arrays = {}
    for name in dir(model):
        if isinstance(getattr(model, name), np.ndarray) and not name.endswith("_rgba"):
            arrays[name] = getattr(model, name).copy()
    obs, reward, _, _, final_obs = play(envs)
    envs.reset()
    assert envs.action_dim == 61 and envs.nonfinite == 0
    assert obs.isfinite().all() and reward.isfinite().all() and final_obs.isfinite().all()
    is_shared = model is envs.env.envs[1].unwrapped.model
    assert is_shared == (not task.startswith(humanoidbench_env.MOVE_BODIES))
    if is_shared:
        for name, before in arrays.items():
            assert np.array_equal(getattr(model, name), before, equal_nan=True), name


@needs_suite
@pytest.mark.slow
def test_workers_simulate_the_suite(real_suite):
    histories = [play(make("push", num_envs=4, torch_threads=threads)) for threads in (1, 2)]
    assert_equal(*histories)
