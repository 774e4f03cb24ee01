"""Training by several processes, as torchrun starts them, here two on a CPU by gloo.

A process of its own for each rank: workers import this file and call the functions below.
"""

import csv
import importlib
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

ROOT = Path(__file__).parents[1]
SCRIPTS = ["trudi_continuous", "reppo_continuous", "ppo_continuous"]
EXTENDED = [pytest.mark.slow, pytest.mark.extended]
ONE_AND_MORE = [SCRIPTS[0]] + [pytest.param(name, marks=EXTENDED) for name in SCRIPTS[1:]]
RUNS = [*ONE_AND_MORE, pytest.param("dppo_continuous", marks=EXTENDED)]
OBS_DIM = 7
ACTION_DIM = 2
BASE = dict(num_steps=6, num_minibatches=2, update_epochs=2, hidden_size=16, max_grad_norm=0.5)
BASE |= dict(normalize_reward=True, gamma=0.9)
pytestmark = pytest.mark.slow


class Envs:
    """VecEnv's contract. Environment i does the same in whatever process it is."""

    obs_dim = OBS_DIM
    actor_dim = OBS_DIM
    critic_start = 0
    action_dim = ACTION_DIM
    spaces = {}

    def __init__(self, indices, may_break=True):
        self.may_break = may_break
        self.generators = [torch.Generator().manual_seed(100 + i) for i in indices]
        self.num_envs = len(indices)
        self.device = torch.device("cpu")

    def draw(self, dim):
        return torch.stack([torch.randn(dim, generator=each) for each in self.generators])

    def reset(self):
        return 2 * self.draw(OBS_DIM) + 1

    def step(self, action):
        obs = self.reset()
        event = self.draw(3)
        self.broken = (event[:, 0] > 2) & self.may_break
        ended = event > 1.2
        return obs, action.sum(dim=1) + event[:, 0], ended[:, 1], ended[:, 2] | self.broken, obs + 1


def make(script, args, envs):
    """-> agent, optimizers"""
    torch.manual_seed(3)
    agent = script.Agent(envs, args)
    with torch.no_grad():
        for parameter in agent.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    if hasattr(script, "policy_loss"):
        rate = torch.tensor(args.learning_rate)
        return agent, [torch.optim.Adam(agent.parameters(), rate, fused=True)]
    duals = dict(params=[agent.log_alpha, agent.log_lambda], lr=args.alpha_learning_rate)
    groups = [dict(params=list(agent.policy.parameters())), duals]
    actor_optimizer = torch.optim.Adam(groups, args.actor_learning_rate, fused=True)
    critic_optimizer = torch.optim.Adam(agent.critic.parameters(), args.learning_rate, fused=True)
    return agent, (actor_optimizer, critic_optimizer)


def state_of(agent):
    """Parameters and buffers, as one row"""
    return torch.cat([value.flatten().double() for value in agent.state_dict().values()])


def iterate(script, args, indices, noise_seed, iterations):
    envs = Envs(indices)
    agent, optimizers = make(script, args, envs)
    generator = torch.Generator().manual_seed(noise_seed)
    obs = envs.reset()
    for _ in range(iterations):
        data, obs = script.rollout(agent, envs, obs, args, generator)
        data = script.compute_targets(agent, data, args, generator)
        script.update(agent, *optimizers, data, args, generator)
    return agent


def one_update(script, args, indices, shown):
    """One iteration in which all randomness belongs to the environments, not to a process.

    shown: what is drawn for all environments, of which these indices take their columns. Steps are
    by SGD: where a gradient is zero but for rounding, Adam would step by its sign. No step is
    broken: what stands in for one is another row in each process.
    """
    envs = Envs(indices, may_break=False)
    agent, optimizers = make(script, args, envs)
    groups = [each.param_groups[0]["params"] for each in optimizers]
    optimizers = [torch.optim.SGD(group, torch.tensor(0.1)) for group in groups]
    calls = iter(shown)

    def noise(batch_size, generator):
        rows = next(calls)  # (..., T * E or E, A)
        wanted = len(indices)
        per_env = batch_size // wanted
        rows = rows[..., : per_env * 8, :].unflatten(-2, (per_env, 8))[..., indices, :]
        return rows.flatten(-3, -2)

    agent.policy.noise = noise
    args = replace(args, num_minibatches=1, update_epochs=1)
    generator = torch.Generator().manual_seed(0)
    real_randperm = torch.randperm
    torch.randperm = lambda n, **_: torch.arange(n)
    try:
        data, _ = script.rollout(agent, envs, envs.reset(), args, generator)
        data = script.compute_targets(agent, data, args, generator)
        script.update(agent, *optimizers, data, args, generator)
    finally:
        torch.randperm = real_randperm
    return agent


def settings(script, num_envs):
    return script.Args(**BASE, num_envs=num_envs)


def draws(script, args):
    shape = (ACTION_DIM,)
    lead = (args.diffusion_steps + 1,) if script.SCRIPT == "trudi_continuous" else ()
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(*lead, 48, *shape, generator=generator) for _ in range(20)]


def worker(rank, port, name, folder):
    torch.set_num_threads(1)
    os.environ |= dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    sys.path.insert(0, str(ROOT))
    script = importlib.import_module(name)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    args = settings(script, 4)
    indices = list(range(4 * rank, 4 * rank + 4))
    trained = state_of(iterate(script, args, indices, noise_seed=rank, iterations=3))
    updated = state_of(one_update(script, args, indices, draws(script, args)))
    torch.save({"trained": trained, "updated": updated}, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@pytest.mark.parametrize("name", ONE_AND_MORE)
def test_equal_to_each_other_and_to_one_process(name, tmp_path):
    """Bit-equal networks and moments on all ranks, and the update of one process with all data."""
    multiprocessing.spawn(worker, (free_port(), name, str(tmp_path)), nprocs=2)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert torch.equal(first["trained"], second["trained"])
    assert torch.equal(first["updated"], second["updated"])
    script = importlib.import_module(name)
    args = settings(script, 8)
    whole = one_update(script, args, list(range(8)), draws(script, args))
    before, _ = make(script, args, Envs(list(range(8))))
    expected = state_of(whole)
    moved = (expected - state_of(before)).abs().max()
    # counters of the reward scale are means over processes: only their ratio has a meaning
    counters = ("squared_return_sum", "return_count")
    keep = []
    for key, value in whole.state_dict().items():
        keep += [key not in counters] * value.numel()
    difference = (first["updated"] - expected)[torch.tensor(keep)].abs().max()
    assert difference < 1e-6 < moved


# === Whole runs by torchrun ===
FLAGS = "--env-id Pendulum-v1 --backend gymnasium --device cpu --hidden-size 8 --num-envs 4"
FLAGS += " --num-steps 8 --num-minibatches 2 --update-epochs 1 --eval-episodes 1"


MANISKILL_FLAGS = "--env-id PushCube-v1 --device cpu --hidden-size 8 --num-envs 2 --num-steps 50"
MANISKILL_FLAGS += " --num-minibatches 2 --update-epochs 1 --eval-episodes 1 --eval-points 1"


def start(folder, *flags, name="trudi_continuous", processes=2):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", processes]
    command += ["--master-port", free_port(), f"{name}.py", *flags]
    if "--resume" not in flags:
        own_flags = MANISKILL_FLAGS if name.endswith("maniskill") else FLAGS
        command += [*own_flags.split(), "--run-dir", folder]
    quiet = os.environ | {"OMP_NUM_THREADS": "1"}
    pipe = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return subprocess.Popen(list(map(str, command)), cwd=ROOT, env=quiet, **pipe)


def steps(folder):
    with (folder / "metrics.csv").open(newline="") as file:
        return [int(row["global_step"]) for row in csv.DictReader(file)]


@pytest.mark.parametrize("name", RUNS)
def test_whole_run_and_resume(name, tmp_path):
    folder = tmp_path / "run"
    run = start(folder, "--total-timesteps", 64, "--eval-points", 2, name=name)
    out, _ = run.communicate(timeout=200)
    assert run.returncode == 0, out
    assert steps(folder) == [32, 64]
    assert out.count("run folder") == 1, "the first process speaks for all"
    saved = torch.load(folder / "checkpoint.pt", weights_only=True)
    assert saved["progress"]["processes"] == 2
    assert (folder / "eval.json").exists()

    resume = [sys.executable, f"{name}.py", "--resume", str(folder), "--total-timesteps", "96"]
    alone = subprocess.run(resume, cwd=ROOT, capture_output=True, text=True)
    assert alone.returncode == 2
    assert "torchrun --nproc-per-node 2" in alone.stderr
    run = start(folder, "--resume", folder, "--total-timesteps", 96, name=name)
    out, _ = run.communicate(timeout=200)
    assert run.returncode == 0, out
    assert steps(folder) == [32, 64, 96]


@pytest.mark.parametrize("name", ["trudi_maniskill", "ppo_maniskill"])
def test_maniskill(name, tmp_path):
    pytest.importorskip("mani_skill")
    folder = tmp_path / "run"
    run = start(folder, "--total-timesteps", 200, name=name)
    out, _ = run.communicate(timeout=300)
    assert run.returncode == 0, out
    assert steps(folder) == [100, 200]
    assert (folder / "eval.json").exists()


def children(pid):
    path = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(child) for child in path.read_text().split()]


def wait_for_rows(run, folder):
    for _ in range(600):
        time.sleep(0.1)
        if (folder / "metrics.csv").exists() and len(steps(folder)) > 2:
            return
    run.kill()
    raise AssertionError(run.communicate()[0])


def test_a_lost_process_ends_the_others(tmp_path):
    folder = tmp_path / "run"
    run = start(folder, "--total-timesteps", 10_000_000, "--eval-points", 1000)
    wait_for_rows(run, folder)
    _, second = sorted(children(run.pid))
    os.kill(second, signal.SIGKILL)
    begin = time.monotonic()
    out, _ = run.communicate(timeout=60)
    assert time.monotonic() - begin < 60
    assert run.returncode != 0
    assert f"the last checkpoint is {folder}/checkpoint.pt" in out
    assert torch.load(folder / "checkpoint.pt", weights_only=True)["progress"]["processes"] == 2


def test_sigterm_ends_all_after_the_iteration(tmp_path):
    folder = tmp_path / "run"
    run = start(folder, "--total-timesteps", 10_000_000, "--eval-points", 1000)
    wait_for_rows(run, folder)
    ranks = children(run.pid)
    run.send_signal(signal.SIGTERM)
    out, _ = run.communicate(timeout=60)
    assert f"go on with --resume {folder}" in out
    saved = torch.load(folder / "checkpoint.pt", weights_only=True)
    assert saved["progress"]["step"] == steps(folder)[-1]
    assert not any(Path(f"/proc/{rank}").exists() for rank in ranks)


def test_refusals(tmp_path):
    run = start(tmp_path / "run", "--total-timesteps", 64, processes=3)
    out, _ = run.communicate(timeout=100)
    assert run.returncode != 0
    assert "num_envs 4 cannot be shared by 3 processes" in out


def test_minibatches_must_divide_the_steps_of_each_process(monkeypatch, capsys):
    import trudi_continuous as trudi

    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit):
        trudi.join_processes(trudi.Args(num_envs=4, num_steps=4, num_minibatches=16))
    assert "num_minibatches must divide the 8 steps of each process" in capsys.readouterr().err


def test_each_process_sees_its_own_gpu(monkeypatch, tmp_path, capsys):
    import trudi_continuous as trudi

    for i in range(2):
        (tmp_path / f"0000:0{i}:00.0").mkdir()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    trudi.one_gpu_each(tmp_path)
    assert "CUDA_VISIBLE_DEVICES" not in os.environ
    for given, rank, wanted in ((None, 1, "1"), ("5,7", 0, "5"), ("5,7", 1, "7")):
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        if given:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
        trudi.one_gpu_each(tmp_path)
        assert os.environ["CUDA_VISIBLE_DEVICES"] == wanted
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(SystemExit):
        trudi.one_gpu_each(tmp_path)
    assert "--nproc-per-node can be at most 2 here" in capsys.readouterr().err
    trudi.one_gpu_each(tmp_path / "no driver")
