"""The maths of fpo_continuous.py against closed forms and brute force, in float64."""

from types import SimpleNamespace

import pytest
import torch
from makers import perturb
from torch.testing import assert_close

from fpo_continuous import (
    Agent,
    Args,
    act,
    flow_loss,
    policy_loss,
    policy_step,
    rollout,
    sample_action,
)

OBS_DIM = 7
ACTION_DIM = 2
M = 8


@pytest.fixture(autouse=True)
def float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def make_args(**changes):
    values = dict(num_envs=6, num_steps=5, hidden_size=16, actor_hidden_size=16)
    return Args(**(values | changes))


def make_agent(args):
    envs = SimpleNamespace(
        obs_dim=OBS_DIM, actor_dim=5, critic_start=2, action_dim=ACTION_DIM, spaces={}
    )
    agent = Agent(envs, args).double()
    perturb(agent, 0.3)
    return agent


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def gradients(loss, parameters):
    return torch.autograd.grad(loss, [*parameters], allow_unused=True, materialize_grads=True)


def make_batch(args, scale=0.0):
    """An agent that may have changed since the rollout, and a batch of the agent before."""
    agent = make_agent(args)
    obs = torch.randn(40, OBS_DIM)
    inputs = {"obs": obs, "noise": agent.policy.noise(40, seeded())}
    inputs["t"] = agent.policy.times(40, seeded())
    with torch.no_grad():
        batch = policy_step(agent, args, inputs)
        value = agent.value(batch["obs"])
    batch["target"] = value + torch.randn(40)
    batch["advantage"] = torch.randn(40)
    perturb(agent, scale)
    return agent, batch


# === The flow ===
class GaussianFlow:
    """The exact velocity field of actions ~ Normal(mean, std)."""

    def __init__(self, mean, std, num_steps):
        self.mean = mean
        self.std = std
        self.num_steps = num_steps

    def slope(self, t):
        """Cov(noise - action, x) / Var(x)"""
        return (t - (1 - t) * self.std**2) / (t**2 + (1 - t) ** 2 * self.std**2)

    def __call__(self, obs, x, t):
        return -self.mean + self.slope(t) * (x - (1 - t) * self.mean)


def test_euler_steps_on_a_gaussian():
    """The flow maps noise z to mean + std z; Euler's error shrinks with its steps."""
    noise = torch.randn(1000, 1)
    errors = []
    for num_steps in (10, 100, 1000):
        flow = GaussianFlow(0.7, 0.4, num_steps)
        action = sample_action(flow, None, noise)
        # each Euler step is affine in x: follow slope and offset by hand
        scale = 1.0
        offset = 0.0
        for step in range(num_steps):
            t = 1 - step / num_steps
            slope = flow.slope(t)
            offset = offset - (slope * (offset - (1 - t) * 0.7) - 0.7) / num_steps
            scale = scale - slope * scale / num_steps
        assert_close(action, offset + scale * noise)
        errors.append((action - (0.7 + 0.4 * noise)).abs().mean())
    assert errors[0] < 0.1
    assert errors[1] < errors[0] / 8
    assert errors[2] < errors[1] / 8


def test_noise_and_times():
    policy = make_agent(make_args()).policy
    times = policy.times(5000, seeded())
    assert times.shape == (5000, M, 1)
    grid, count = (10 * times).round().unique(return_counts=True)
    assert_close(10 * times, (10 * times).round())
    assert grid.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
    assert (count - 4000).abs().max() < 300  # five standard deviations
    assert policy.noise(5, seeded()).shape == (5, 1 + M, ACTION_DIM)


def test_flow_loss_by_hand():
    """The squared error of the velocity, weighted by (1 - t)^2"""
    policy = make_agent(make_args()).policy
    obs = torch.randn(20, OBS_DIM)
    action = torch.randn(20, ACTION_DIM)
    noise = torch.randn(20, M, ACTION_DIM)
    t = policy.times(20, seeded())
    loss = flow_loss(policy, obs, action, t, noise)
    for i in range(20):
        total = 0
        for m in range(M):
            time = t[i, m]
            x = time * noise[i, m] + (1 - time) * action[i]
            velocity = policy(obs[i][None], x[None], time[None])[0]
            error = velocity - (noise[i, m] - action[i])
            total += (1 - time) ** 2 * (error**2).mean() / M
        assert_close(loss[i], total[0])


def test_the_exact_field_has_the_least_loss():
    """Any other slope or offset of the velocity has a larger one."""
    flow = GaussianFlow(0.7, 0.4, 10)
    action = 0.7 + 0.4 * torch.randn(20_000, 1, generator=seeded(1))
    noise = torch.randn(20_000, M, 1, generator=seeded(2))
    t = 1 - torch.randint(10, (20_000, M, 1), generator=seeded(3)) / 10
    obs = torch.zeros(20_000, 1)
    best = flow_loss(flow, obs, action, t, noise).mean()
    for shift, tilt in ((0.1, 0), (-0.1, 0), (0, 0.1), (0, -0.1)):

        def other(obs, x, t, shift=shift, tilt=tilt):
            return flow(obs, x, t) + shift + tilt * (x - (1 - t) * 0.7)

        assert flow_loss(other, obs, action, t, noise).mean() > best + 1e-4


# === The loss ===
def test_loss_of_the_old_policy():
    """The ratio is exactly 1; the gradient is that of advantage-weighted flow matching."""
    args = make_args(value_coef=0.0)
    agent, batch = make_batch(args)
    loss, metrics = policy_loss(agent, batch, args)
    assert metrics["policy/ratio_change"] == 0
    assert metrics["policy/clipped"] == 0
    assert loss == -batch["advantage"].mean()
    matching = flow_loss(agent.policy, batch["obs"], batch["action"], batch["t"], batch["noise"])
    expected = (batch["advantage"] * matching).mean()
    assert_close(gradients(loss, agent.parameters()), gradients(expected, agent.parameters()))


def test_loss_by_hand():
    args = make_args(clip_coef=0.05, value_coef=0.3)
    agent, batch = make_batch(args, scale=0.05)
    loss, metrics = policy_loss(agent, batch, args)
    matching = flow_loss(agent.policy, batch["obs"], batch["action"], batch["t"], batch["noise"])
    total = 0
    num_clipped = 0
    for i in range(40):
        ratio = (batch["flow_loss"][i] - matching[i]).exp()
        advantage = batch["advantage"][i]
        cost = torch.maximum(-ratio * advantage, -ratio.clamp(0.95, 1.05) * advantage)
        error = agent.value(batch["obs"][i]) - batch["target"][i]
        total = total + (cost + 0.3 * error**2) / 40
        num_clipped += float(abs(ratio - 1) > 0.05)
    assert_close(loss, total)
    assert_close(gradients(loss, agent.parameters()), gradients(total, agent.parameters()))
    assert_close(metrics["policy/clipped"], torch.tensor(num_clipped / 40))
    assert 0.1 < num_clipped / 40 < 0.9
    assert not any(metric.requires_grad for metric in metrics.values())


def test_the_ratio_does_not_overflow():
    args = make_args(value_coef=0.0)
    agent, batch = make_batch(args)
    batch["flow_loss"] += 1000.0
    batch["advantage"] = -batch["advantage"].abs()
    loss, _ = policy_loss(agent, batch, args)
    assert_close(loss, -batch["advantage"].mean() * torch.tensor(3.0).exp())


# === One iteration ===
class Recorder:
    """Environments that remember what they were given."""

    def __init__(self, num_envs):
        self.actions = []
        self.broken = torch.zeros(num_envs, dtype=torch.bool)

    def step(self, action):
        self.actions.append(action)
        obs = torch.randn(len(action), OBS_DIM)
        return obs, torch.zeros(len(action)), self.broken, self.broken, obs


def test_environments_get_the_tanh():
    args = make_args()
    agent = make_agent(args)
    envs = Recorder(6)
    data, _ = rollout(agent, envs, torch.randn(6, OBS_DIM), args, seeded())
    assert torch.equal(torch.stack(envs.actions), data["action"].tanh())
    assert data["action"].abs().max() > 1
    obs = torch.randn(6, OBS_DIM)
    action = act(agent, obs, "ode", args, seeded())
    noise = agent.policy.noise(6, seeded())[:, 0]
    assert torch.equal(action, sample_action(agent.policy, obs, noise).tanh())


def test_the_stored_loss_is_that_of_the_stored_action():
    args = make_args()
    agent = make_agent(args)
    data, _ = rollout(agent, Recorder(6), torch.randn(6, OBS_DIM), args, seeded())
    flat = {name: values.flatten(0, 1) for name, values in data.items()}
    again = flow_loss(agent.policy, flat["obs"], flat["action"], flat["t"], flat["noise"])
    assert_close(flat["flow_loss"], again)
