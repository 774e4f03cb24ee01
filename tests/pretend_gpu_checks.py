"""What only a CUDA machine would show: tensors on two devices, and waits of the host."""

import importlib
import sys

import gymnasium as gym
import pytest
import torch
from pretend_gpu import DEVICE, DeviceGenerator, pretend
from run_helpers import BATCH, ROOT, run, steps, train

from tools import extras

CONTINUOUS = ["trudi_continuous", "reppo_continuous", "ppo_continuous"]
CONTINUOUS += ["dppo_continuous", "fpo_continuous"]
MANISKILL = ["trudi_maniskill", "reppo_maniskill", "ppo_maniskill"]
CASES = [(name, {}) for name in CONTINUOUS + MANISKILL]
CASES += [(name, {"normalize_reward": True}) for name in CONTINUOUS + MANISKILL]
CASES += [("trudi_continuous", {"trust_region": "none"}), ("trudi_continuous", {"kl_samples": 3})]
CASES += [("trudi_continuous", {"policy_delay": 3}), ("reppo_continuous", {"trust_region": "none"})]
CASES += [("ppo_continuous", {"objective": "spo"}), ("ppo_continuous", {"schedule": "linear"})]


class Envs:
    """VecEnv's contract, with every tensor on the device and columns that only the critic sees."""

    def __init__(self):
        self.num_envs = 6
        self.device = DEVICE
        self.obs_dim = 7
        self.actor_dim = 5
        self.critic_start = 2
        self.action_dim = 2
        self.spaces = {}

    def reset(self):
        return torch.randn(self.num_envs, self.obs_dim, device=DEVICE)

    def step(self, action):
        assert action.device == DEVICE
        obs = self.reset()
        reward = torch.rand(self.num_envs, device=DEVICE)
        terminated = torch.rand(self.num_envs, device=DEVICE) < 0.2
        truncated = torch.rand(self.num_envs, device=DEVICE) < 0.2
        self.broken = torch.rand(self.num_envs, device=DEVICE) < 0.1
        return obs, reward, terminated, truncated, obs + 1


def make_optimizers(script, agent, args):
    """As in main."""
    if hasattr(script, "policy_loss"):
        learning_rate = torch.tensor(args.learning_rate, device=DEVICE)
        return (torch.optim.Adam(agent.parameters(), learning_rate, fused=True),)
    duals = dict(params=[agent.log_alpha, agent.log_lambda], lr=args.alpha_learning_rate)
    groups = [dict(params=list(agent.policy.parameters())), duals]
    actor_optimizer = torch.optim.Adam(groups, args.actor_learning_rate, fused=True)
    critic_optimizer = torch.optim.Adam(agent.critic.parameters(), args.learning_rate, fused=True)
    return (actor_optimizer, critic_optimizer)


def iterate(script, gpu, **changes):
    """Two iterations with the settings of CUDA and small sizes. -> agent"""
    sizes = dict(num_envs=6, num_steps=3, num_minibatches=2, update_epochs=2, hidden_size=16)
    args = script.Args(**sizes | {"device": "cuda"} | changes)
    script.check_args(args)
    generator = DeviceGenerator(DEVICE)
    generator.manual_seed(1)
    envs = Envs()
    agent = script.Agent(envs, args).to(DEVICE)
    optimizers = make_optimizers(script, agent, args)
    obs = envs.reset()
    gpu.clear()
    for _ in range(2):
        data, obs = script.rollout(agent, envs, obs, args, generator)
        data = script.compute_targets(agent, data, args, generator)
        metrics = script.update(agent, *optimizers, data, args, generator)
        assert all(value.device == DEVICE for value in metrics.values())
    for sampler in script.SAMPLERS:
        with torch.no_grad():
            normalized = agent.policy.normalizer(obs)
            action = script.act(agent, normalized, sampler, args, generator)
        assert action.device == DEVICE
    return agent


def load(name):
    if name in MANISKILL:
        pytest.importorskip("mani_skill")
    return importlib.import_module(name)


@pytest.mark.parametrize("name, changes", CASES, ids=lambda case: str(case))
def test_one_device_and_no_wait(name, changes):
    """Rollout, targets, update and acting never wait for the device."""
    script = load(name)
    with pretend(script) as gpu:
        iterate(script, gpu, **changes)
        assert not gpu.waits
        assert gpu.launches["aten::addmm"] > 10, "it looks at the launches, too"


FAULTS = {  # what is broken on purpose
    "noise of the host": (
        "return torch.randn(shape, generator=generator, device=generator.device)",
        "return torch.randn(shape)",
    ),
    "a constant that is no buffer": (
        'self.register_buffer("step_sizes", torch.tensor(self.schedule), persistent=False)',
        "self.step_sizes = torch.tensor(self.schedule)",
    ),
    "an order of the host": (
        "order = torch.randperm(batch_size, generator=generator, device=generator.device)",
        "order = torch.randperm(batch_size)",
    ),
    "a number that is read": (
        "loss = torch.where(inside, improve, pull_back).mean()",
        "loss = torch.where(inside, improve, pull_back).mean() + 0 * inside.sum().item()",
    ),
    "the loss for a CPU": (
        'sparse = batch["obs"].device.type == "cpu" and not args.compile',
        "sparse = True",
    ),
    "a question about a tensor": (
        '    optimizer.step()\n    return {**metrics, "losses/critic_grad_norm": norm}',
        "    optimizer.step() if loss > -1e9 else None\n    return metrics",
    ),
    "a target of the host": (
        "targets = torch.empty_like(reward)",
        "targets = torch.empty(reward.shape)",
    ),
    "a new tensor in the normalizer": (
        "self.count += batch_size",
        "self.count += torch.tensor(float(batch_size), device=self.count.device)",
    ),
    "rows by a mask": (
        "rows = torch.where(broken, (~broken).int().argmax(), rows)",
        "rows = torch.cat([rows[~broken], rows[broken]])",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found(fault, tmp_path, monkeypatch):
    before, after = FAULTS[fault]
    text = (ROOT / "trudi_continuous.py").read_text()
    assert text.count(before) == 1
    (tmp_path / "broken_script.py").write_text(text.replace(before, after))
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop("broken_script", None)
    broken = importlib.import_module("broken_script")
    with pretend(broken) as gpu:
        try:
            iterate(broken, gpu)
        except RuntimeError as error:
            assert "two devices" in str(error)
        else:
            assert gpu.waits


@pytest.mark.parametrize("name", CONTINUOUS)
def test_a_whole_run_and_then_without_the_gpu(name, tmp_path):
    """Train, evaluate and save there; evaluate and resume on a machine without it, and back."""
    script = load(name)
    folder = tmp_path / "run"
    more = ["--total-timesteps", 4 * BATCH]
    with pretend(script):
        train(folder, "--device", "cuda", "--backend", "gymnasium", script=script)
        run("--evaluate", folder / "best.pt", script=script)
    saved = torch.load(folder / "checkpoint.pt", weights_only=True)
    assert saved["args"]["device"] == "cuda"
    run("--evaluate", folder / "policy.pt", script=script)
    action = script.load_policy(folder / "policy.pt")(torch.zeros(3, 4))
    assert action.shape == (3, 2) and action.device.type == "cpu"
    out = run("--resume", folder, *more, script=script).out
    assert "on cpu" in out and steps(folder) == [BATCH, 2 * BATCH, 3 * BATCH, 4 * BATCH]
    with pretend(script):
        run("--resume", folder, "--total-timesteps", 5 * BATCH, script=script)
    assert steps(folder)[-1] == 5 * BATCH


# === Environments ===
ON_THE_HOST = [("envpool", "CheetahRun-v1"), ("gymnasium", "Pendulum-v1")]


@pytest.mark.parametrize("backend, env_id", ON_THE_HOST)
def test_simulators_of_the_host_are_waited_for_twice_a_step(backend, env_id):
    """For the actions, and for one table with all that the simulator says."""
    script = load("trudi_continuous")
    if backend == "envpool":
        pytest.importorskip("envpool")
    with pretend(script) as gpu:
        args = script.Args(env_id=env_id, backend=backend, device="cuda")
        envs = script.make_envs(args, 3, seed=1)
        action = torch.zeros(3, envs.action_dim, device=DEVICE)
        gpu.clear()
        for _ in range(10):
            result = envs.step(action)
        assert all(tensor.device == DEVICE for tensor in (*result, envs.broken))
        assert sum(gpu.waits.values()) == 20


class ManiSkillStub:
    """What VecEnv sees of ManiSkill on a GPU: all tensors on the device, partial resets."""

    def __init__(self, num_envs):
        self.num_envs = num_envs
        self.unwrapped = self
        self.device = DEVICE
        self.action_space = gym.spaces.Box(-1, 1, (num_envs, 4))
        self.single_action_space = gym.spaces.Box(-1, 1, (4,))
        self.seeds = []

    def get_wrapper_attr(self, name):
        return getattr(self, name)

    def reset(self, seed=None, options=None):
        assert options["env_idx"].device == DEVICE
        self.seeds.append(seed)
        return torch.randn(self.num_envs, 5, device=DEVICE), {}

    def step(self, action):
        assert action.device == DEVICE
        obs = torch.randn(self.num_envs, 5, device=DEVICE)
        chance = torch.rand(self.num_envs, device=DEVICE)
        success = chance < 0.3
        return obs, chance, success, chance > 0.8, {"success": success}


@pytest.mark.parametrize("training", [True, False])
def test_maniskill_is_waited_for_once_a_step(training, monkeypatch):
    script = load("trudi_maniskill")
    script.import_tasks(None)
    made = {}

    def make(env_id, **kwargs):
        made.update(kwargs)
        return ManiSkillStub(kwargs["num_envs"])

    monkeypatch.setattr(script.gym, "make", make)
    with pretend(script) as gpu:
        args = script.Args(env_id="PickCube-v1", backend="physx_cuda", device="cuda")
        envs = script.VecEnv(args, 6, seed=1, training=training)
        envs.reset()
        gpu.clear()
        for _ in range(128):
            result = envs.step(torch.zeros(6, 4, device=DEVICE))
        assert all(tensor.device == DEVICE for tensor in (*result, envs.broken))
        assert sum(gpu.waits.values()) == 128
        assert len(envs.pop_finished()) > 50
    assert made["sim_backend"] == "physx_cuda" and made["render_backend"] == "none"
    first, second, *later = envs.env.seeds
    assert len(set(first)) == len(set(second)) == 6 and first != second
    assert set(map(str, later)) == {"None"}, "episodes that follow draw from the simulation"


@pytest.mark.parametrize("name", MANISKILL)
def test_a_whole_run_of_maniskill(name, tmp_path, monkeypatch):
    """Train, evaluate, save and resume with a simulation on the device."""
    script = load(name)
    script.import_tasks(None)

    def make(env_id, **kwargs):
        return ManiSkillStub(kwargs["num_envs"])

    monkeypatch.setattr(script.gym, "make", make)
    folder = tmp_path / "run"
    flags = "--env-id PickCube-v1 --device cuda --hidden-size 8 --num-envs 4 --num-steps 8"
    flags += " --num-minibatches 2 --update-epochs 1 --eval-points 1 --eval-episodes 2"
    with pretend(script):
        script.main([*flags.split(), "--total-timesteps", "64", "--run-dir", str(folder)])
        script.main(["--resume", str(folder), "--total-timesteps", "96"])
        script.main(["--evaluate", str(folder / "best.pt")])
    assert steps(folder) == [32, 64, 96]
    saved = torch.load(folder / "policy.pt", weights_only=True)
    assert saved["args"]["backend"] == "physx_cuda" and saved["args"]["device"] == "cuda"
    assert script.load_policy(folder / "policy.pt")(torch.zeros(3, 5)).shape == (3, 4)


class CalledGraph(extras.Graph):
    """In the place of a CUDA graph: what would be replayed is called."""

    def warm_up(self, fixed, batch):
        return self.step(*fixed, batch)

    def record(self, fixed):
        self.fixed = fixed

    def replay(self):
        self.result = self.step(*self.fixed, self.batch)


@pytest.mark.parametrize("name", CONTINUOUS)
def test_whole_run_with_graphs(name, tmp_path, monkeypatch):
    """The same curve as without them; on a real device they were never recorded."""
    script = load(name)
    steps_before = {key: vars(script)[key] for key in vars(script) if key.endswith("_step")}
    monkeypatch.setattr(script.extras, "Graph", CalledGraph)
    flags = ["--device", "cuda", "--backend", "gymnasium"]
    with pretend(script):
        train(tmp_path / "eager", *flags, script=script)
        try:
            train(tmp_path / "graphs", *flags, "--cudagraphs", script=script)
            graphs = [vars(script)[key] for key in steps_before]
            assert all(isinstance(graph, CalledGraph) and graph.batch for graph in graphs)
        finally:
            for key, step in steps_before.items():
                setattr(script, key, step)
    eager, graphs = (torch.load(tmp_path / kind / "policy.pt") for kind in ("eager", "graphs"))
    for key, value in eager["agent"].items():
        torch.testing.assert_close(graphs["agent"][key], value, rtol=0, atol=0)
