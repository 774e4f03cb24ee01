"""simulators/maniskill_workers.py: the same numbers as in one process, and no process left behind.

Equal means equal to the bit.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from run_helpers import ROOT, assert_all_end, assert_same_run, descendants, load, rows, wait_for

pytest.importorskip("mani_skill")
from test_maniskill import run  # noqa: E402
from test_maniskill_cpu import fingers, make_official, manipulate, noise  # noqa: E402

import trudi_maniskill as trudi  # noqa: E402
from simulators import maniskill_cpu, maniskill_workers  # noqa: E402
from simulators.workers import WorkerLost, kill_workers  # noqa: E402
from tools import extras  # noqa: E402

SIZES = ["--num-envs", "5", "--num-steps", "20", "--num-minibatches", "2", "--update-epochs", "1"]
SIZES += ["--hidden-size", "16", "--eval-points", "2", "--eval-episodes", "3"]
SIZES += ["--total-timesteps", "200"]
needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads Linux's /proc")
# A task that breaks: each environment shows NaN in one step, on account of where its cube lies.
BROKEN_TASK = """
import torch
from mani_skill.envs.tasks.tabletop.push_cube import PushCubeEnv
from mani_skill.utils.registration import register_env

@register_env("BrokenPush-v1", max_episode_steps=12)
class BrokenPush(PushCubeEnv):
    def _get_obs_extra(self, info):
        obs = super()._get_obs_extra(info)
        is_left = self.obj.pose.p[:, 1:2] > 0
        is_time = (self.elapsed_steps == 4)[:, None]
        obs["goal_pos"] = torch.where(is_left & is_time, torch.nan, obs["goal_pos"])
        return obs

@register_env("FailingPush-v1", max_episode_steps=12)
class FailingPush(PushCubeEnv):
    def _load_scene(self, options):
        raise ValueError("a fault of the task")
"""


@pytest.fixture(scope="module", autouse=True)
def no_worker_is_left():
    maniskill_cpu.install()
    yield
    kill_workers()


@pytest.fixture(scope="module")
def task_folder(tmp_path_factory):
    """The current folder, with my_broken_tasks.py"""
    folder = tmp_path_factory.mktemp("tasks")
    (folder / "my_broken_tasks.py").write_text(BROKEN_TASK)
    with contextlib.chdir(folder), pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        yield folder


# --- the same numbers ---


def assert_same(ours, theirs):
    """Tensors, or infos with the same entries of one value per environment"""
    if isinstance(ours, dict):
        assert ours.keys() == theirs.keys()
        for name in theirs:
            assert_same(ours[name], theirs[name])
        return
    if isinstance(ours, bool):
        assert ours == theirs
        return
    assert ours.dtype == theirs.dtype
    assert torch.equal(ours, theirs)


def grasping_actions(task, seed):
    """What a single environment does to grasp, to lift and to let go"""
    official = make_official(task, max_episode_steps=200)
    official.reset(seed=seed)
    actions = []
    num_grasped = 0
    for action in manipulate(official, task):
        actions.append(action)
        official.step(action[None])
        if task != "PushCube":
            num_grasped += int(fingers(official, task)[0, -1])
    official.close()
    assert task == "PushCube" or num_grasped >= 5, "nothing was grasped"
    return torch.stack(actions)


def play(task, num_workers, grasp):
    """Seeded, unseeded and partial resets, a time limit and grasps. -> all that was shown"""
    env = maniskill_cpu.make_env(
        f"{task}-v1", 5, num_workers=num_workers, max_episode_steps=len(grasp)
    )
    shown = [*env.reset()]  # with the seeds that ManiSkill builds the scenes with
    shown += env.reset(seed=3)
    shown += env.reset(seed=[7, 8, 9, 10, 6])
    actions = noise(len(grasp), 5, grasp.shape[1])
    actions[:, 4] = grasp  # row 4 started with the seed of the grasp
    for t, action in enumerate(actions):
        shown += env.step(action)
        if t in (5, 30, 31):
            shown += env.reset(options={"env_idx": torch.tensor([[0, 3], [1], [0, 1, 2]][t % 3])})
    assert shown[-2][4], "the time limit"
    shown += env.reset()
    shown += env.step(actions[0])
    if num_workers > 1:
        assert isinstance(env, maniskill_workers.WorkersEnv)
    env.close()
    return shown


@pytest.mark.slow
@pytest.mark.parametrize("task", ["PickCube", "StackCube", "PushCube"])
def test_every_number_of_workers_gives_the_same(task):
    grasp = grasping_actions(task, seed=6)
    in_process = play(task, 1, grasp)
    in_process_grasps = [shown for shown in in_process if isinstance(shown, dict)]
    if task == "PickCube":
        assert sum(int(info["is_grasped"][4]) for info in in_process_grasps) >= 5
    for num_workers in (2, 3):
        with_workers = play(task, num_workers, grasp)
        for ours, theirs in zip(with_workers, in_process, strict=True):
            assert_same(ours, theirs)


@pytest.mark.slow
def test_scenes_are_built_with_the_seed_of_their_row():
    """PegInsertionSide draws the sizes of its pegs when it builds the scenes."""
    obs = []
    for num_workers in (0, 2):
        env = maniskill_cpu.make_env("PegInsertionSide-v1", 4, num_workers=num_workers)
        obs.append(env.reset(seed=[1, 2, 3, 4])[0])
        env.close()
    assert torch.equal(obs[0], obs[1])
    assert len(obs[0][:, -1].unique()) > 1, "all pegs are alike"


@pytest.mark.slow
def test_autoreset_and_more_workers_than_environments():
    episodes = []
    for num_workers in (0, 3):
        envs = maniskill_cpu.make("PushCube-v1", 2, num_workers=num_workers, max_episode_steps=6)
        first, _ = envs.reset(seed=1)
        for action in noise(6, 2, 8):
            obs, reward, _, truncated, info = envs.step(action)
        assert truncated.all()
        final = info["final_info"]["episode"]
        assert (final["episode_len"] == 6).all()
        episodes.append([first, obs, reward, info["final_observation"], final["return"]])
        assert envs.action_space.shape == (2, 8) and len(envs.observation_space.shape) == 2
        envs.close()
    for ours, theirs in zip(*episodes, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.slow
def test_nonfinite_steps(task_folder):
    """They become truncations, and only their own environments start again."""
    trudi.import_tasks("my_broken_tasks")
    results = []
    for num_workers in (0, 2):
        args = trudi.Args(
            env_id="BrokenPush-v1",
            env_module="my_broken_tasks",
            backend="physx_cpu_batched",
            device="cpu",
            sim_workers=num_workers,
        )
        envs = trudi.VecEnv(args, 5, seed=2, training=True)
        steps = []
        for action in noise(30, 5, 8):
            steps += [*envs.step(action), envs.broken]
        results.append(steps)
        episodes = envs.pop_finished()
        assert int(envs.nonfinite) == sum(episode["broken"] for episode in episodes) > 0
        assert not all(episode["broken"] for episode in episodes)
        results[-1].append(torch.tensor([episode["return"] for episode in episodes]))
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.slow
def test_a_whole_run(task_folder, tmp_path):
    """Training, evaluation, a task of the user's own, and a resume with another number."""
    folders = []
    task = ["--env-module", "my_broken_tasks", "--env-id", "BrokenPush-v1"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(extras, "draw_curve", lambda *_: None)
        for num_workers in (0, 2):
            folder = tmp_path / f"with_{num_workers}"
            flags = [*SIZES, *task, "--run-dir", folder, "--sim-workers", num_workers]
            out = run(*flags).out
            where = "2 worker processes" if num_workers else "this process"
            assert f"5 environments are simulated in {where}" in out
            about = json.loads((folder / "args.json").read_text())
            assert about["sim_workers"] == num_workers
            assert not [name for name, value in about.items() if value is None and name != "git"]
            assert float(rows(folder)[-1]["charts/nonfinite"]) > 0
            folders.append(folder)
        assert_same_run(*folders)
        more = ["--total-timesteps", 300]
        run("--resume", folders[0], *more, "--sim-workers", 2)
        run("--resume", folders[1], *more, "--sim-workers", 0)
        assert_same_run(*folders)
    assert load(folders[0])["args"]["sim_workers"] == 2


# --- what goes wrong ---


def make_pushing():
    env = maniskill_cpu.make_env("PushCube-v1", 4, num_workers=2)
    env.reset(seed=1)
    return env


@pytest.mark.slow
def test_failures_of_a_task_come_with_their_traceback(task_folder):
    args = trudi.Args(env_id="FailingPush-v1", backend="physx_cpu_batched", device="cpu")
    args.env_module = "my_broken_tasks"
    args.sim_workers = 2
    with pytest.raises(RuntimeError, match="a fault of the task") as caught:
        trudi.make_envs(args, 4, 1)
    assert "in _load_scene" in caught.value.__notes__[0]
    env = make_pushing()
    with pytest.raises(RuntimeError, match="Actions must be finite"):
        env.step(torch.tensor([[0.0], [0.0], [0.0], [torch.nan]]).expand(4, 8))
    env.reset(seed=2)
    assert env.step(torch.zeros(4, 8))[0].isfinite().all(), "the workers are still there"


@pytest.mark.slow
def test_a_batch_that_nobody_needs_is_freed():
    env = make_pushing()
    pool = env.pool
    del env
    assert len(pool.closed_batches) == 1
    make_pushing()
    assert len(pool.closed_batches) == 1, "the second one; the first was closed"


@pytest.mark.slow
def test_a_worker_that_hangs():
    env = make_pushing()
    processes = [worker.process for worker in env.pool.workers]
    os.kill(processes[1].pid, signal.SIGSTOP)
    with pytest.raises(WorkerLost, match="worker 2 of 2 has not answered for 2 s"):
        env.call("step", seconds=2)
    assert not any(process.is_alive() for process in processes), "a worker is left"
    with pytest.raises(WorkerLost):
        env.step(torch.zeros(4, 8))


def start_training(folder):
    """-> a run with two workers that would go on for long, its workers, all its processes"""
    flags = [*SIZES[:-1], "1000000", "--eval-points", "10000", "--run-dir", folder]
    command = [sys.executable, ROOT / "trudi_maniskill.py", *flags, "--sim-workers", "2"]
    process = subprocess.Popen(
        list(map(str, command)),
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
def test_a_killed_trainer_leaves_no_process(tmp_path):
    process, _, pids = start_training(tmp_path / "run")
    process.kill()
    assert_all_end(pids)
    process.communicate()


@needs_proc
@pytest.mark.slow
def test_a_killed_worker_ends_the_run_with_one_sentence(tmp_path):
    folder = tmp_path / "run"
    process, workers, pids = start_training(folder)
    os.kill(workers[0], signal.SIGKILL)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    reason = "was killed by SIGKILL; the last checkpoint is"
    expected = [
        f"error: simulation worker {i} of 2 {reason} {folder}/checkpoint.pt" for i in (1, 2)
    ]
    assert err.strip() in expected
    assert load(folder)["progress"]["step"] >= 0
    assert_all_end(pids)


@needs_proc
@pytest.mark.slow
def test_signals_reach_the_trainer_alone(tmp_path):
    """As by Ctrl-C: the whole group gets SIGINT and SIGTERM, and only the trainer listens."""
    folder = tmp_path / "run"
    process, workers, pids = start_training(folder)
    for worker in workers:
        os.kill(worker, signal.SIGINT)
        os.kill(worker, signal.SIGHUP)
    os.killpg(process.pid, signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM, err
    assert "stopped by SIGTERM" in out and "Traceback" not in err
    assert load(folder)["progress"]["step"] > 0
    assert_all_end(pids)


# --- how many ---


def test_free_cores(tmp_path, monkeypatch):
    """Core 0 idles for half of the time, core 1 is busy, core 2 is not ours."""
    path = tmp_path / "stat"
    path.write_text("cpu  9 9 9\ncpu0 10 0 0 100 0\ncpu1 10 0 0 100 0\ncpu2 0 0 0 100 0\nintr 5\n")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    later = "cpu  9 9 9\ncpu0 12 0 0 106 2\ncpu1 20 0 0 100 0\ncpu2 0 0 0 110 0\nintr 5\n"
    monkeypatch.setattr(time, "sleep", lambda _: path.write_text(later))
    assert extras.free_cores(path=str(path)) == 1
    assert extras.free_cores(path=str(tmp_path / "nothing")) == os.cpu_count()


@pytest.mark.parametrize(
    "num_free, flags, expected",
    [
        (16, [], 4),
        (3, [], 3),
        (1, [], 0),
        (16, ["--num-envs", "16"], 0),
        (16, ["--num-envs", "256"], 16),
        (16, ["--sim-workers", "7"], 7),
        (16, ["--sim-workers", "1"], 0),
    ],
)
def test_default_number(num_free, flags, expected, monkeypatch, capsys):
    monkeypatch.setattr(extras, "free_cores", lambda: num_free)
    args, _ = trudi.parse_args(["--device", "cpu", *flags])
    assert args.sim_workers == expected
    where = f"in {expected} worker processes" if expected else "in this process"
    assert f"{args.num_envs} environments are simulated {where}" in capsys.readouterr().out


def test_workers_are_refused_on_a_gpu(tmp_path):
    flags = ["--backend", "physx_cuda", "--sim-workers", "2", "--run-dir", tmp_path / "run"]
    assert "--sim-workers is for the simulation on a CPU" in run(*flags, code=2).err
